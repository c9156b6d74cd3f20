"""Secure sums: the server learns the total of the clients' values and none of the values.

Pairwise masks after Bonawitz et al., "Practical Secure Aggregation for Privacy-Preserving Machine Learning"
(CCS 2017), figure 4, the variant against a server that cheats; beyond 50 clients among neighbours only, after Bell et
al., CCS 2020 (`graph.py`). One `SecureSum` on the server and one `SecureClient` on every client compute one sum in up
to five exchanges; both are state machines that make and read messages and know nothing of transport.

1. `keys`: every client sends two X25519 public keys, one to encrypt shares, one for masks, and the exponents of its
   values (`channel/fixed.py`), signed with its long-term key.
2. `shares`: every client gets everyone's signed keys and checks them by the public keys that it knows its peers by. It
   draws the seed of a mask of its own, splits the seed and its private mask key into Shamir shares, and sends every
   neighbour's part encrypted for its recipient, with a hash that the seed is checked by.
3. `masked`: every client gets its neighbours' parts and the list of all who sent parts, the sharers. It sends its
   values as fixed-point integers modulo 2**64, plus its own mask, plus a mask shared with each neighbour that sent
   parts, which one of the two adds and the other subtracts; and signs the lists of keys and of sharers.
4. `agree`: every client gets the list of those whose values arrived, the survivors, and its surviving neighbours'
   signatures of the sharers. Where these are the sharers that it knows, it signs all three lists.
5. `reveal`: who sees the signatures of `threshold` survivors on the very lists that it signed itself gives its share of
   every surviving neighbour's seed, and of every missing one's mask key. The server rebuilds these and removes the
   masks that are left.

Two of these exchanges are for clients that drop out, and one more is for a server that lies about who has:

- Where all have to stay (a threshold of all clients, as of any three) there is `keys`, and `masked` follows it at once:
  every client gets everyone's signed keys, checks them, and sends its values with the masks that it shares, without one
  of its own. Nothing is shared and nothing revealed; the masks are gone from the total of all. Clients erase their
  secrets before they answer.
- Where some may drop out and nobody has, `reveal` follows `masked`, up to 50 clients: the signatures of all sharers
  that all of them have sent parts come with their values, and so are the agreement that nobody is missing.

The total is exactly the sum of the clients' fixed-point integers, converted to float64 once.

Building blocks: X25519, Ed25519, HKDF-SHA256, AES-256-GCM for the parts and AES-256-CTR as the mask generator come from
`cryptography`, Shamir's sharing over GF(2**31 - 1) is in `shamir.py`. All secrets are drawn by the operating system.
Everything signed names the protocol, the session, the numbers of clients, and a context: what the values are an answer
to, as the client itself knows it. Signatures of one sum say nothing in another, and clients that were asked different
things do not accept each other.

Who learns what
    The server learns the total, who took part, the shapes, and of every client and array the size of the largest value
    within a factor of 2**16. Clients learn these sizes and public keys. A total over few clients may itself say much,
    and so may two totals that differ by one client; noise is the remedy.
What a lying server can do, alone or with c of the n clients, of which t (the threshold) have to stay
    It cannot replace a key: its signature would have to be a peer's. It can leave clients out of the list of keys, and
    has to give the same list to all: otherwise parts do not decrypt, and signatures do not count.
    It cannot open two lists of survivors: each takes t signatures, and a client signs once, so 2 t ≤ n + c. With
    t > 2 n / 3 this takes 2 t - n > n / 3 clients on its side; with fewer, all clients that open anything do so for one
    list. Of a survivor it then gets the seed and never the mask key, of everybody else the mask key and never the seed,
    unless as many holders of the survivor's shares help it as open a secret (t; among neighbours, more than half).
    It cannot tell a client of fewer sharers than others know, so that it shares masks with few: the holders of its seed
    would miss its signature. So two neighbours that survive share a mask, and what opens is one total over t or more
    survivors, over the values of t - c others (among neighbours with c > 0, see `graph.py`).
    It gains nothing from a client that reveals at once. Such clients, a of those that do not help it, open seeds only,
    of all sharers, and sign no list of survivors any more. For the mask key of one that it calls missing, t - c others
    have to sign a list without that one, and for the same one's seed a ≥ t - c: together n - c at most, so 2 t ≤ n + c
    again. (Among neighbours fewer than t open a secret, and survivors are always agreed on.)
    It gains nothing where all have to stay, with up to n - 2 clients on its side: the masks of a pair follow from the
    list of keys that each of the two was given, which has n clients, their exponents, and signatures for one sum and
    context. Those of clients that were given different lists do not cancel. What opens is the total of all clients of
    one list (beyond 50, of all that neighbours link who do not help it), and every client masks once.
    It can keep a sum from opening, begin another one, and choose whom it calls: with c clients that it calls each time,
    a sum of n tells it the total of the n - c others. It can call few (three at least, all of whom have to stay).
What lying clients can do
    Put any number into the total; spoil its precision, by an exponent that is too large; and keep the sum from opening:
    by signatures or parts that are none (refused, with the client's number), or by wrong shares (found out, as the
    rebuilt key is compared with its public key and the rebuilt seed with its hash). They cannot read others' values.
Where there are no keys
    A simulation signs with keys that follow from the session (`Identity.derived`): the same messages and bytes, and no
    protection from anybody.
Dropouts
    The sum opens when t clients answer to the end: n - t may drop out, in any exchange; beyond 50 clients with a
    probability of 1 - 2**-20 or more, if they are not chosen. The values of a client that drops out after `masked` are
    in the sum.
Cost
    Upwards a client sends 8 bytes per value, 256 bytes of keys and signatures, and per neighbour 112 bytes of parts and
    shares (128 if that one drops out of `masked`); downwards it gets 228 bytes per other client and 156 per neighbour.
    It checks two signatures per other client and one per neighbour, and expands one mask per neighbour. The server
    expands one mask per survivor, and one per neighbour of every client that drops out of `masked`. Without `agree`
    there are 64 bytes and a signature less, downwards 80 bytes per neighbour. Where all have to stay a client sends 8
    bytes per value and 128 of keys and signature, gets 140 per client, and checks a signature per client; the server
    adds.
"""

from headstart.channel.secure.client import SecureClient
from headstart.channel.secure.identity import Identity
from headstart.channel.secure.protocol import STEPS
from headstart.channel.secure.server import SecureSum

__all__ = ["STEPS", "Identity", "SecureClient", "SecureSum"]
