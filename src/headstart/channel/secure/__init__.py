"""Secure sums: the server learns the total of the clients' values and none of the values.

Pairwise masks after Bonawitz et al., "Practical Secure Aggregation for Privacy-Preserving Machine Learning"
(CCS 2017), figure 4 without the signatures and the consistency check. One `SecureSum` on the server and one
`SecureClient` on every client compute one sum in four exchanges; both are state machines that make and read
messages and know nothing of transport.

1. `keys`: every client sends two X25519 public keys, one to encrypt shares, one for masks.
2. `shares`: every client draws the seed of a mask of its own, splits the seed and its private mask key into
   Shamir shares, and sends everyone's part encrypted for its recipient, with a hash that the seed is checked by.
3. `masked`: every client sends its values as fixed-point integers modulo 2**64, plus its own mask, plus a mask
   shared with each other client, which one of the two adds and the other subtracts.
4. `reveal`: of every client whose values arrived, the others give their share of its seed; of every client whose
   values did not arrive, their share of its mask key. The server rebuilds these and removes the masks that are left.

The total is exactly the sum of the clients' fixed-point integers, converted to float64 once.

Building blocks: X25519, HKDF-SHA256, AES-256-GCM for the parts and AES-256-CTR as the mask generator come from
`cryptography`, Shamir's sharing over GF(2**31 - 1) is in `shamir.py`. All secrets are drawn by the operating system.

Who learns what
    A server that follows the protocol learns the total, who took part and the shapes. This also holds when fewer
    than `threshold` clients tell it all they know: then it learns the total of the others' values. Clients learn
    nothing of each other but public keys. A total over few clients may itself say much, and so may two totals that
    differ by one client; noise is the remedy.
Dropouts
    The sum opens when `threshold` clients answer to the end: `clients - threshold` may drop out, in any exchange.
    The values of a client that drops out in the last exchange are in the sum.
Cost
    Upwards a client sends 8 bytes per value, 64 bytes of keys and per other client 112 bytes of parts and shares
    (128 if that one drops out of `masked`); downwards it gets 172 bytes per other client. It expands one mask per
    other client. The server expands one mask per client heard, and as many again for every client that drops out
    of `masked`. Of 100 clients with 5,130 values each takes about 0.02 seconds, and the server 0.1.
What lies could still do
    A lying client can put any number into the total, and can keep the sum from opening: by parts that do not
    decrypt (their recipients refuse and are dropped) or by wrong shares (found out, as the rebuilt key is compared
    with its public key and the rebuilt seed with its hash). It cannot read another client's values.
    A server that lies about public keys can read everything, as the keys are not signed: authenticate the clients to
    each other where the server is not trusted with that.
    A server that passes the keys on can still tell every client another story about who has dropped out. To open the
    total of g clients it needs their seeds and the mask keys of v others, where the lists it gave those g hold g + v
    clients, so g + v ≥ threshold = t. A key takes t clients that were told its owner is missing, and a client accepts
    n - t missing at most, if its list holds all n. So v t ≤ g (g + v - t) + (n - g) (n - t). With t a little more than
    n / 2 this allows g = 1: a single client's values. With 3 t > 2 n, which is asked for here, g is more than n / 3
    and at least 3. Clients on the server's side weaken this; the signatures and the consistency check of the paper,
    which leave the server one story, are not built yet.
"""

from headstart.channel.secure.client import SecureClient
from headstart.channel.secure.protocol import STEPS
from headstart.channel.secure.server import SecureSum

__all__ = ["STEPS", "SecureClient", "SecureSum"]
