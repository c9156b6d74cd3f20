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
`cryptography`, Shamir's sharing over GF(2**128) from `pycryptodome`. All secrets are drawn by the operating system.

Who learns what
    A server that follows the protocol learns the total, who took part and the shapes. This also holds when fewer
    than `threshold` clients tell it all they know: then it learns the total of the others' values. Clients learn
    nothing of each other but public keys. A total over few clients may itself say much, and so may two totals that
    differ by one client; noise is the remedy.
Dropouts
    The sum opens when `threshold` clients answer to the end: `clients - threshold` may drop out, in any exchange.
    The values of a client that drops out in the last exchange are in the sum.
Cost
    Upwards a client sends 8 bytes per value, 64 bytes of keys and per other client 100 bytes of parts and shares
    (116 if that one drops out of `masked`); downwards it gets 164 bytes per other client. It expands one mask per
    other client. The server expands one mask per client heard, and as many again for every client that drops out
    of `masked`. Shamir's sharing is plain Python and weighs most among many clients: of 100 with a threshold of 67,
    each takes about 0.2 seconds to split its secrets, and the server about 15 to rebuild all.
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

from __future__ import annotations

import math
import os
import struct
from collections.abc import Mapping, Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt
from Crypto.Protocol.SecretSharing import Shamir
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.ciphers.algorithms import AES
from cryptography.hazmat.primitives.ciphers.modes import CTR
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from headstart.channel.fixed import BITS, from_fixed, to_fixed
from headstart.core.message import Array, Message, Scalar
from headstart.errors import HeadstartError, MessageError

STEPS = ("keys", "shares", "masked", "reveal")

_KEY, _SEED, _CHECK = 32, 16, 32
_SECRETS = _SEED + _KEY
_NONCE, _TAG = 12, 16
_PART = _NONCE + _SECRETS + _TAG
_SHAMIR_BLOCK = 16
_STREAM_BLOCK = bytes(1 << 16)  # zeros; the key stream is made in blocks that stay in the processor's cache

# What a client keeps until it answers an exchange: every array with its dtype and shape.
_FRESH: dict[str, tuple[str, tuple[int | None, ...]]] = {
    "share_secret": ("uint8", (_KEY,)),
    "mask_secret": ("uint8", (_KEY,)),
}
_CLIENT_STATE = {
    "shares": _FRESH,
    "masked": _FRESH
    | {
        "numbers": ("int64", (None,)),
        "share_keys": ("uint8", (None, _KEY)),
        "mask_keys": ("uint8", (None, _KEY)),
        "seed": ("uint8", (_SEED,)),
        "own_secrets": ("uint8", (_SECRETS,)),
    },
    "reveal": {
        "numbers": ("int64", (None,)),
        "secrets": ("uint8", (None, _SECRETS)),
        "survivors": ("int64", (None,)),
    },
}


class SecureClient:
    """One client's side of one secure sum.

    `keys`, `share`, `mask` and `reveal` answer the four exchanges in this order. Each of `share` and `mask` answers
    once, `reveal` answers again only to the same request. A refused request changes nothing. Where the next exchange
    is answered by another process, keep `to_message()` on the node, written before the answer is sent: a client that
    answers twice from an old state could give its values away. The state holds secrets and must not travel.

    Parameters
    ----------
    session
        Names this sum; the same for all its clients, and never used for two sums.
    number
        This client's number among those the server calls.
    clients, threshold
        How many clients the server calls, and how many must answer to the end; more than two thirds, 3 or more.
    bits
        Fractional bits of the fixed-point values, 0 to 52.
    """

    def __init__(self, session: bytes | str, number: int, clients: int, threshold: int, bits: int = BITS) -> None:
        self._session = _session(session)
        _check_settings(clients, threshold, bits)
        if not _is_number(number):
            raise HeadstartError(f"a client's number is a whole number from 0, not {number!r}")
        self._number, self._clients, self._threshold, self._bits = number, clients, threshold, bits
        self._step = "shares"
        self._state: dict[str, Array] = {
            name: _array(X25519PrivateKey.generate().private_bytes_raw()) for name in ("share_secret", "mask_secret")
        }

    def keys(self) -> Message:
        """The answer to `keys`: two public keys."""
        self._require("shares")
        share_key, mask_key = _public(self._secret("share_secret")), _public(self._secret("mask_secret"))
        return self._answer("keys", {"share_key": _array(share_key), "mask_key": _array(mask_key)})

    def share(self, everyone: Message) -> Message:
        """The answer to `shares`: for everybody else an encrypted part of this client's two secrets."""
        self._require("shares")
        _check_message(everyone, self._session, "shares", {"numbers", "share_keys", "mask_keys"})
        numbers = _numbers(everyone, "numbers")
        if self._number not in numbers:
            raise MessageError(f"client {self._number} is not among the clients listed with their keys")
        if not self._threshold <= len(numbers) <= self._clients:
            raise MessageError(
                f"{len(numbers)} clients are listed with their keys; between {self._threshold} and {self._clients} "
                f"are accepted"
            )
        share_keys = _rows(everyone.array("share_keys", "uint8", (len(numbers), _KEY)))
        mask_keys = _rows(everyone.array("mask_keys", "uint8", (len(numbers), _KEY)))
        if len({*share_keys, *mask_keys}) != 2 * len(numbers):
            raise MessageError("two of the public keys listed are the same")
        own = numbers.index(self._number)
        share_secret, mask_secret = self._secret("share_secret"), self._secret("mask_secret")
        if (share_keys[own], mask_keys[own]) != (_public(share_secret), _public(mask_secret)):
            raise MessageError(f"the public keys listed for client {self._number} are not its own")

        seed = os.urandom(_SEED)
        seed_shares = _split(seed, self._threshold, len(numbers))
        key_shares = _split(mask_secret.private_bytes_raw(), self._threshold, len(numbers))
        secrets = [a + b for a, b in zip(seed_shares, key_shares, strict=True)]
        mine = (self._number, share_keys[own])
        parts = []
        for number, public, secret in zip(numbers, share_keys, secrets, strict=True):
            if number != self._number:
                key = _pair_key(self._session, b"part", share_secret, mine, (number, public))
                nonce = os.urandom(_NONCE)
                parts.append(nonce + AESGCM(key).encrypt(nonce, secret, self._associated(self._number, number)))

        self._state |= {name: everyone.arrays[name] for name in ("numbers", "share_keys", "mask_keys")}
        self._state |= {"seed": _array(seed), "own_secrets": _array(secrets[own])}
        self._step = "masked"
        recipients = np.array([n for n in numbers if n != self._number], dtype=np.int64)
        check = _array(_derive(self._session, b"check", seed, self._number))
        return self._answer("shares", {"recipients": recipients, "parts": _matrix(parts, _PART), "check": check})

    def mask(self, parts: Message, values: Mapping[str, Array]) -> Message:
        """The answer to `masked`: the values, masked, as int64.

        A part that does not decrypt is refused with a `MessageError` that names its sender; this client is then
        out of the sum.
        """
        self._require("masked")
        _check_message(parts, self._session, "masked", {"senders", "parts"})
        senders = _numbers(parts, "senders")
        share_keys = dict(zip(self._state["numbers"].tolist(), _rows(self._state["share_keys"]), strict=True))
        mask_keys = dict(zip(self._state["numbers"].tolist(), _rows(self._state["mask_keys"]), strict=True))
        strangers = [n for n in senders if n not in share_keys or n == self._number]
        if strangers:
            raise MessageError(f"parts came from clients {strangers}, which are not among the others with keys")
        if len(senders) + 1 < self._threshold:
            raise MessageError(
                f"{len(senders) + 1} clients have sent parts, {self._threshold} are needed to open the sum"
            )
        encrypted = _rows(parts.array("parts", "uint8", (len(senders), _PART)))

        secret = self._secret("share_secret")
        mine = (self._number, share_keys[self._number])
        secrets = {self._number: self._state["own_secrets"].tobytes()}
        for sender, part in zip(senders, encrypted, strict=True):
            key = _pair_key(self._session, b"part", secret, mine, (sender, share_keys[sender]))
            associated = self._associated(sender, self._number)
            try:
                secrets[sender] = AESGCM(key).decrypt(part[:_NONCE], part[_NONCE:], associated)
            except InvalidTag:
                raise MessageError(f"the part from client {sender} was not made for this client and sum") from None

        fixed = to_fixed(values, self._clients, self._bits)
        names = sorted(fixed)
        masked = np.concatenate([fixed[name].ravel() for name in names]).view(np.uint64)
        _add_stream(masked, _derive(self._session, b"self", self._state["seed"].tobytes(), self._number), 1)
        secret = self._secret("mask_secret")
        mine = (self._number, mask_keys[self._number])
        for sender in senders:
            key = _pair_key(self._session, b"mask", secret, mine, (sender, mask_keys[sender]))
            _add_stream(masked, key, _sign(self._number, sender))

        present = sorted(secrets)
        self._state = {
            "numbers": np.array(present, dtype=np.int64),
            "secrets": _matrix([secrets[number] for number in present], _SECRETS),
            "survivors": np.array([], dtype=np.int64),
        }
        self._step = "reveal"
        return self._answer("masked", _unflatten(masked.view(np.int64), {name: fixed[name].shape for name in names}))

    def reveal(self, survivors: Message) -> Message:
        """The answer to `reveal`: shares of the survivors' seeds and of the missing clients' mask keys, never both."""
        self._require("reveal")
        _check_message(survivors, self._session, "reveal", {"survivors", "missing"})
        heard, missing = _numbers(survivors, "survivors"), _numbers(survivors, "missing")
        both = sorted(set(heard) & set(missing))
        if both:
            raise MessageError(f"both secrets of clients {both} are asked for, which would give their values away")
        if sorted(heard + missing) != self._state["numbers"].tolist():
            raise MessageError("the survivors and the missing are not the clients that sent parts")
        if self._number not in heard:
            raise MessageError(f"client {self._number} has sent its values and is not among the survivors")
        if len(heard) < self._threshold:
            raise MessageError(f"{len(heard)} clients have sent values, {self._threshold} are needed to open the sum")
        if self._state["survivors"].size and tuple(self._state["survivors"].tolist()) != heard:
            raise MessageError("shares were revealed before, for another list of survivors")
        secrets = dict(zip(self._state["numbers"].tolist(), _rows(self._state["secrets"]), strict=True))
        self._state["survivors"] = np.array(heard, dtype=np.int64)
        seed_shares = _matrix([secrets[number][:_SEED] for number in heard], _SEED)
        key_shares = _matrix([secrets[number][_SEED:] for number in missing], _KEY)
        return self._answer("reveal", {"seed_shares": seed_shares, "key_shares": key_shares})

    def to_message(self) -> Message:
        """The secret state between two exchanges, to be kept on the node."""
        scalars: dict[str, Scalar] = {
            "session": self._session.hex(),
            "number": self._number,
            "clients": self._clients,
            "threshold": self._threshold,
            "bits": self._bits,
            "step": self._step,
        }
        return Message(dict(self._state), scalars)

    @classmethod
    def from_message(cls, message: Message) -> SecureClient:
        """The client whose state `to_message` gave."""
        try:
            session = bytes.fromhex(str(message.scalars["session"]))
            layout = _CLIENT_STATE[str(message.scalars["step"])]
            number, clients, threshold, bits = (
                int(message.scalars[name]) for name in ("number", "clients", "threshold", "bits")
            )
        except (KeyError, ValueError):
            raise MessageError("not the state of a client of a secure sum") from None
        client = cls(session, number, clients, threshold, bits)
        client._state = {name: message.array(name, *wanted) for name, wanted in layout.items()}
        client._step = str(message.scalars["step"])
        per_client = [n for n in ("numbers", "share_keys", "mask_keys", "secrets") if n in layout]
        if len({len(client._state[name]) for name in per_client}) > 1:
            raise MessageError("not the state of a client of a secure sum: its lists differ in length")
        return client

    def _require(self, step: str) -> None:
        if self._step != step:
            raise MessageError(f"the client's next exchange is {self._step!r}; this request is out of turn")

    def _secret(self, name: str) -> X25519PrivateKey:
        return X25519PrivateKey.from_private_bytes(self._state[name].tobytes())

    def _associated(self, sender: int, recipient: int) -> bytes:
        settings = (self._clients, self._threshold, self._bits, sender, recipient)
        return struct.pack("<5q", *settings) + self._session

    def _answer(self, step: str, arrays: Mapping[str, Array]) -> Message:
        return Message(arrays, {"session": self._session.hex(), "step": step, "sender": self._number})


class SecureSum:
    """The server's side of one secure sum.

    For each of the four exchanges in `STEPS`: send what `instructions` says, `receive` every answer, then `next`.
    After the last, `total` is the sum.

    Parameters
    ----------
    session
        Names this sum; the same for all its clients, and never used for two sums.
    clients
        The numbers of the clients that are called.
    threshold
        How many of them must answer to the end; more than half.
    shapes
        Names and shapes of the arrays that are summed.
    bits
        Fractional bits of the fixed-point values, 0 to 52.
    """

    def __init__(
        self,
        session: bytes | str,
        clients: Sequence[int],
        threshold: int,
        shapes: Mapping[str, tuple[int, ...]],
        bits: int = BITS,
    ) -> None:
        self._session = _session(session)
        _check_settings(len(clients), threshold, bits)
        if len(set(clients)) != len(clients) or not all(_is_number(number) for number in clients):
            raise HeadstartError("the clients of a secure sum are different whole numbers from 0")
        if not shapes:
            raise HeadstartError("a secure sum needs at least one array of values")
        self._clients, self._threshold, self._bits = tuple(sorted(clients)), threshold, bits
        self._shapes = {name: tuple(shapes[name]) for name in sorted(shapes)}
        self._closed = 0
        self._answers: dict[str, dict[int, Mapping[str, Array]]] = {step: {} for step in STEPS}
        self._sum = np.zeros(sum(math.prod(shape) for shape in self._shapes.values()), dtype=np.uint64)
        self._total: dict[str, npt.NDArray[np.float64]] | None = None

    @property
    def step(self) -> str | None:
        """The exchange under way; None when all four are closed."""
        return STEPS[self._closed] if self._closed < len(STEPS) else None

    @property
    def waiting(self) -> tuple[int, ...]:
        """Who has not yet answered the exchange under way."""
        return () if self.step is None else self._silent(self.step)

    @property
    def heard(self) -> tuple[int, ...]:
        """Whose values are in the sum."""
        return tuple(sorted(self._answers["masked"]))

    def dropped(self) -> dict[int, str]:
        """Every client that is out, with the first exchange it did not answer."""
        return {number: step for step in STEPS[: self._closed] for number in self._silent(step)}

    def instructions(self) -> dict[int, Message]:
        """What to send to whom in the exchange under way."""
        if self.step is None:
            return {}
        asked = self._asked(self.step)
        scalars: dict[str, Scalar] = {"session": self._session.hex(), "step": self.step}
        if self.step == "keys":
            settings = {"clients": len(self._clients), "threshold": self._threshold, "bits": self._bits}
            return dict.fromkeys(asked, Message({}, scalars | settings))
        if self.step == "masked":
            return {number: Message(self._parts_for(number), scalars) for number in asked}
        if self.step == "shares":
            keys = self._answers["keys"]
            arrays: dict[str, Array] = {
                "numbers": np.array(asked, dtype=np.int64),
                "share_keys": np.stack([keys[number]["share_key"] for number in asked]),
                "mask_keys": np.stack([keys[number]["mask_key"] for number in asked]),
            }
        else:
            missing = self._silent("masked")
            arrays = {"survivors": np.array(asked, dtype=np.int64), "missing": np.array(missing, dtype=np.int64)}
        return dict.fromkeys(asked, Message(arrays, scalars))

    def receive(self, number: int, message: Message) -> None:
        """Take client `number`'s answer; anything but what was asked for is refused and changes nothing."""
        step = self.step
        if step is None:
            raise MessageError("the secure sum has no exchange under way")
        if number not in self._asked(step):
            raise MessageError(f"client {number!r} is not asked in the exchange {step!r}")
        if number in self._answers[step]:
            raise MessageError(f"client {number} has answered the exchange {step!r} already")
        self._answers[step][number] = self._take(step, number, message)

    def next(self) -> None:
        """Close the exchange: whoever has not answered is out.

        With fewer clients left than the threshold the exchange stays open and a `HeadstartError` says so.
        """
        if self.step is None:
            raise HeadstartError("the secure sum has no exchange under way")
        left = len(self._answers[self.step])
        if left < self._threshold:
            raise HeadstartError(
                f"{left} of {len(self._clients)} clients are left, {self._threshold} are needed to open the sum"
            )
        self._closed += 1

    def total(self) -> dict[str, npt.NDArray[np.float64]]:
        """The sum of the values of the clients `heard`, by name."""
        if self.step is not None:
            raise HeadstartError(f"the sum is not open yet: the exchange {self.step!r} is under way")
        if self._total is None:
            arrays = _unflatten(self._unmasked().view(np.int64), self._shapes)
            self._total = {name: from_fixed(array, self._bits) for name, array in arrays.items()}
        return {name: array.copy() for name, array in self._total.items()}

    def _asked(self, step: str) -> tuple[int, ...]:
        before = STEPS.index(step) - 1
        return self._clients if before < 0 else tuple(sorted(self._answers[STEPS[before]]))

    def _silent(self, step: str) -> tuple[int, ...]:
        return tuple(number for number in self._asked(step) if number not in self._answers[step])

    def _parts_for(self, recipient: int) -> dict[str, Array]:
        answers = self._answers["shares"]
        senders = [number for number in self._asked("masked") if number != recipient]
        rows = [answers[s]["parts"][int(np.searchsorted(answers[s]["recipients"], recipient))] for s in senders]
        return {"senders": np.array(senders, dtype=np.int64), "parts": np.stack(rows)}

    def _take(self, step: str, number: int, message: Message) -> Mapping[str, Array]:
        """Check an answer and return what is kept of it; masked values go straight into the running sum."""
        if step == "keys":
            _check_message(message, self._session, step, {"share_key", "mask_key"}, number)
            known = {key.tobytes() for answer in self._answers[step].values() for key in answer.values()}
            keys = {name: message.array(name, "uint8", (_KEY,)) for name in ("share_key", "mask_key")}
            for name, key in keys.items():
                if key.tobytes() in known:
                    raise MessageError(f"{name!r} is a public key that was sent before")
                known.add(key.tobytes())
                try:
                    X25519PrivateKey.generate().exchange(X25519PublicKey.from_public_bytes(key.tobytes()))
                except ValueError:
                    raise MessageError(f"{name!r} is not a usable X25519 public key") from None
            return keys
        if step == "shares":
            _check_message(message, self._session, step, {"recipients", "parts", "check"}, number)
            others = tuple(other for other in self._asked(step) if other != number)
            if _numbers(message, "recipients") != others:
                raise MessageError("the recipients of the parts are not all other clients with keys")
            message.array("parts", "uint8", (len(others), _PART))
            message.array("check", "uint8", (_CHECK,))
            return message.arrays
        if step == "masked":
            _check_message(message, self._session, step, set(self._shapes), number)
            arrays = [message.array(name, "int64", shape) for name, shape in self._shapes.items()]
            self._sum += np.concatenate([array.ravel() for array in arrays]).view(np.uint64)
            return {}
        _check_message(message, self._session, step, {"seed_shares", "key_shares"}, number)
        message.array("seed_shares", "uint8", (len(self.heard), _SEED))
        message.array("key_shares", "uint8", (len(self._silent("masked")), _KEY))
        return message.arrays

    def _unmasked(self) -> npt.NDArray[np.uint64]:
        total = self._sum.copy()
        mask_keys = {number: answer["mask_key"].tobytes() for number, answer in self._answers["keys"].items()}
        for row, number in enumerate(self.heard):
            seed = self._rebuilt("seed_shares", row)
            if _derive(self._session, b"check", seed, number) != self._answers["shares"][number]["check"].tobytes():
                raise MessageError(_misfit("seed", number))
            _add_stream(total, _derive(self._session, b"self", seed, number), -1)
        for row, number in enumerate(self._silent("masked")):
            secret = X25519PrivateKey.from_private_bytes(self._rebuilt("key_shares", row))
            if _public(secret) != mask_keys[number]:
                raise MessageError(_misfit("mask key", number))
            for other in self.heard:
                mine, others = (number, mask_keys[number]), (other, mask_keys[other])
                _add_stream(total, _pair_key(self._session, b"mask", secret, mine, others), -_sign(other, number))
        return total

    def _rebuilt(self, name: str, row: int) -> bytes:
        """The secret whose shares stand in this row of the first answers that suffice."""
        points = {number: point for point, number in enumerate(self._asked("shares"), start=1)}
        answers = sorted(self._answers["reveal"].items())[: self._threshold]
        return _combine({points[number]: answer[name][row].tobytes() for number, answer in answers})


def _misfit(secret: str, number: int) -> str:
    return f"the shares revealed of client {number}'s {secret} do not fit what client {number} announced"


def _session(session: bytes | str) -> bytes:
    data = session.encode() if isinstance(session, str) else bytes(session)
    if not data:
        raise HeadstartError("a secure sum needs a session name that is not empty")
    return data


def _is_number(number: object) -> bool:
    return isinstance(number, int) and not isinstance(number, bool) and 0 <= number < 2**63


def _check_settings(clients: int, threshold: int, bits: int) -> None:
    if clients < 3:
        raise HeadstartError(f"a secure sum needs at least 3 clients, not {clients}")
    if not 2 * clients < 3 * threshold <= 3 * clients:
        raise HeadstartError(
            f"the threshold of a secure sum of {clients} clients is from {2 * clients // 3 + 1} (more than two thirds) "
            f"to {clients}, not {threshold}"
        )
    if not 0 <= bits <= 52:
        raise HeadstartError(f"the fractional bits of a secure sum are from 0 to 52, not {bits}")


def _check_message(message: Message, session: bytes, step: str, arrays: set[str], sender: int | None = None) -> None:
    """Refuse a message of another session, exchange or sender, or with other arrays than these."""
    if message.scalars.get("session") != session.hex():
        raise MessageError("the message belongs to another session")
    if message.scalars.get("step") != step:
        raise MessageError(f"the message is for the exchange {message.scalars.get('step')!r}, not {step!r}")
    if sender is not None and message.scalars.get("sender") != sender:
        raise MessageError(f"the message says it is from client {message.scalars.get('sender')!r}, not {sender!r}")
    unknown = sorted(set(message.arrays) - arrays)
    if unknown:
        raise MessageError(f"the arrays {unknown} do not belong into the exchange {step!r}")
    missing = sorted(arrays - set(message.arrays))
    if missing:
        raise MessageError(f"the arrays {missing} are missing in the exchange {step!r}")


def _numbers(message: Message, name: str) -> tuple[int, ...]:
    """An array of client numbers, which must rise."""
    numbers = tuple(message.array(name, "int64", (None,)).tolist())
    if any(a >= b for a, b in pairwise(numbers)) or (numbers and numbers[0] < 0):
        raise MessageError(f"array {name!r} is not a rising list of client numbers")
    return numbers


def _public(secret: X25519PrivateKey) -> bytes:
    return secret.public_key().public_bytes_raw()


def _array(data: bytes) -> Array:
    return np.frombuffer(data, dtype=np.uint8)


def _matrix(rows: Sequence[bytes], width: int) -> Array:
    return _array(b"".join(rows)).reshape(len(rows), width)


def _rows(matrix: Array) -> list[bytes]:
    return [row.tobytes() for row in matrix]


def _unflatten(flat: npt.NDArray[np.int64], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, npt.NDArray[np.int64]]:
    """Cut a vector into arrays of these shapes, in the order of the mapping."""
    arrays, start = {}, 0
    for name, shape in shapes.items():
        end = start + math.prod(shape)
        arrays[name] = flat[start:end].reshape(shape)
        start = end
    return arrays


def _hkdf(session: bytes, info: bytes, secret: bytes) -> bytes:
    return HKDF(algorithm=SHA256(), length=32, salt=session, info=b"headstart secure sum " + info).derive(secret)


def _derive(session: bytes, purpose: bytes, seed: bytes, number: int) -> bytes:
    """A key (`self`) or a check value (`check`) from a client's seed."""
    return _hkdf(session, purpose + struct.pack("<q", number), seed)


def _pair_key(
    session: bytes, purpose: bytes, secret: X25519PrivateKey, mine: tuple[int, bytes], other: tuple[int, bytes]
) -> bytes:
    """The key two clients share for a purpose (`part`, `mask`); bound to both numbers and public keys."""
    try:
        agreed = secret.exchange(X25519PublicKey.from_public_bytes(other[1]))
    except ValueError:
        raise MessageError(f"the public key of client {other[0]} is not usable") from None
    pair = b"".join(struct.pack("<q", number) + public for number, public in sorted([mine, other]))
    return _hkdf(session, purpose + pair, agreed)


def _sign(number: int, other: int) -> int:
    """Of a pair, the client with the lower number adds the common mask and the other subtracts it."""
    return 1 if number < other else -1


def _add_stream(values: npt.NDArray[np.uint64], key: bytes, sign: int) -> None:
    """Add (or with sign -1 subtract) the AES-CTR key stream of this key, modulo 2**64, in place."""
    encryptor = Cipher(AES(key), CTR(bytes(16))).encryptor()
    operation = np.add if sign > 0 else np.subtract
    length = len(_STREAM_BLOCK) // 8
    for start in range(0, values.size, length):
        block = values[start : start + length]
        stream = np.frombuffer(encryptor.update(_STREAM_BLOCK[: 8 * block.size]), dtype="<u8")
        operation(block, stream, out=block)


def _split(secret: bytes, threshold: int, count: int) -> list[bytes]:
    """Shamir shares of a secret of whole 16-byte blocks, for the points 1 to `count`."""
    blocks = [secret[start : start + _SHAMIR_BLOCK] for start in range(0, len(secret), _SHAMIR_BLOCK)]
    shares = [Shamir.split(threshold, count, block, ssss=False) for block in blocks]
    return [b"".join(share for _, share in row) for row in zip(*shares, strict=True)]


def _combine(shares: Mapping[int, bytes]) -> bytes:
    """The secret from exactly as many shares, by point, as its threshold."""
    length = len(next(iter(shares.values())))
    return b"".join(
        Shamir.combine([(point, share[start : start + _SHAMIR_BLOCK]) for point, share in shares.items()], ssss=False)
        for start in range(0, length, _SHAMIR_BLOCK)
    )
