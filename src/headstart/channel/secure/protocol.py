"""What both sides of a secure sum share: its terms, checks of messages, the list of keys, masks."""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import AES
from cryptography.hazmat.primitives.ciphers.modes import CTR
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from headstart.channel.fixed import GRID, LARGEST, SMALLEST
from headstart.channel.secure.identity import SIGNATURE_BYTES
from headstart.channel.secure.shamir import share_bytes
from headstart.core.message import Array, Message
from headstart.errors import HeadstartError, MessageError

STEPS = ("keys", "shares", "masked", "agree", "reveal")
_PROTOCOL = b"headstart secure sum 3"
VALUE = "value."
"""Before the names of the arrays that are added, so that they are nothing else."""

KEY_BYTES, SEED_BYTES, CHECK_BYTES = 32, 16, 32
SEED_SHARE_BYTES, KEY_SHARE_BYTES = share_bytes(SEED_BYTES), share_bytes(KEY_BYTES)
SECRETS_BYTES = SEED_SHARE_BYTES + KEY_SHARE_BYTES
NONCE_BYTES, _TAG_BYTES = 12, 16
PART_BYTES = NONCE_BYTES + SECRETS_BYTES + _TAG_BYTES
_STREAM_BLOCK = bytes(1 << 16)  # zeros; the key stream is made in blocks that stay in the processor's cache


@dataclass(frozen=True)
class Terms:
    """What all sides of a sum have to have in common.

    session: names this sum, and is never used for two; clients: how many are called; threshold: how many of them must
    answer to the end, more than two thirds and 3 or more.
    """

    session: bytes
    clients: int
    threshold: int

    def __post_init__(self) -> None:
        if not self.session:
            raise HeadstartError("secure aggregation needs a session name that is not empty")
        if self.clients < 3:
            raise HeadstartError(f"secure aggregation needs at least 3 clients, not {self.clients}")
        if not 2 * self.clients < 3 * self.threshold <= 3 * self.clients:
            raise HeadstartError(
                f"the threshold of secure aggregation of {self.clients} clients is from {2 * self.clients // 3 + 1} "
                f"(more than two thirds) to {self.clients}, not {self.threshold}"
            )

    @property
    def all_stay(self) -> bool:
        """Whether nobody may drop out, so that no secret has to be shared."""
        return self.threshold == self.clients

    @property
    def steps(self) -> tuple[str, ...]:
        """The exchanges of the sum."""
        return ("keys", "masked") if self.all_stay else STEPS

    def encoded(self, purpose: bytes, *parts: bytes) -> bytes:
        """The parts as bytes that nothing else encodes to: no other purpose, sum or division into parts."""
        numbers = struct.pack("<2q", self.clients, self.threshold)
        whole = (_PROTOCOL, purpose, self.session, numbers, *parts)
        return b"".join(struct.pack("<q", len(part)) + part for part in whole)


@dataclass(frozen=True, eq=False)
class KeyList:
    """Everyone's public keys and exponents, signed, as the exchange after `keys` passes them on.

    numbers: [m] rising; share_keys, mask_keys: [m, 32]; exponents: [m, float arrays]; signatures: [m, 64].
    """

    numbers: tuple[int, ...]
    share_keys: Array
    mask_keys: Array
    exponents: Array
    signatures: Array

    @classmethod
    def of(cls, message: Message, exponents: int) -> KeyList:
        """The list in a message, checked in form only; exponents: how many each client has."""
        numbers = client_numbers(message, "numbers")
        count = len(numbers)
        return cls(
            numbers,
            message.array("share_keys", "uint8", (count, KEY_BYTES)),
            message.array("mask_keys", "uint8", (count, KEY_BYTES)),
            message.array("exponents", "int32", (count, exponents)),
            message.array("signatures", "uint8", (count, SIGNATURE_BYTES)),
        )

    def arrays(self) -> dict[str, Array]:
        """The list as a message has it."""
        return {**vars(self), "numbers": np.array(self.numbers, dtype=np.int64)}

    def signed(self, place: int, terms: Terms, context: bytes) -> bytes:
        """What the client in this place has to have signed."""
        return signed_keys(
            terms, context, self.numbers[place], self.share_keys[place], self.mask_keys[place], self.exponents[place]
        )

    def digest(self, terms: Terms) -> bytes:
        """The same for clients that were given the same list in the same sum."""
        parts = (self.arrays()[name].tobytes() for name in ("numbers", "share_keys", "mask_keys", "exponents"))
        return hashlib.sha256(terms.encoded(b"list", *parts)).digest()


def signed_keys(terms: Terms, context: bytes, number: int, share_key: Array, mask_key: Array, exps: Array) -> bytes:
    """What a client signs in the exchange `keys`; context: what its values are an answer to."""
    keys = (share_key.tobytes(), mask_key.tobytes(), exps.astype("<i4").tobytes())
    return terms.encoded(b"keys", context, struct.pack("<q", number), *keys)


def session_bytes(session: bytes | str) -> bytes:
    """The name of a sum as bytes."""
    return session.encode() if isinstance(session, str) else bytes(session)


def check_number(number: object) -> int:
    """A client's number; refused where it is no whole number from 0 that int64 holds."""
    if not isinstance(number, int) or isinstance(number, bool) or not 0 <= number < 2**63:
        raise HeadstartError(f"a client's number is a whole number from 0, not {number!r}")
    return number


def check_exponents(exponents: Array) -> None:
    """Refuse exponents that no values have."""
    if exponents.size and ((exponents % GRID).any() or exponents.min() < SMALLEST or exponents.max() > LARGEST):
        raise MessageError(f"the exponents are not multiples of {GRID} from {SMALLEST} to {LARGEST}")


def check_message(message: Message, session: bytes, step: str, arrays: set[str], sender: int | None = None) -> None:
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


def client_numbers(message: Message, name: str) -> tuple[int, ...]:
    """An array of client numbers, which must rise."""
    numbers = tuple(message.array(name, "int64", (None,)).tolist())
    if any(a >= b for a, b in pairwise(numbers)) or (numbers and numbers[0] < 0):
        raise MessageError(f"array {name!r} is not a rising list of client numbers")
    return numbers


def public_bytes(secret: X25519PrivateKey) -> bytes:
    """The public key of a private key."""
    return secret.public_key().public_bytes_raw()


def byte_array(data: bytes) -> Array:
    """Bytes as uint8: [n]."""
    return np.frombuffer(data, dtype=np.uint8)


def byte_matrix(rows: Sequence[bytes], width: int) -> Array:
    """Rows of `width` bytes as uint8: [rows, width]."""
    return byte_array(b"".join(rows)).reshape(len(rows), width)


def byte_rows(matrix: Array) -> list[bytes]:
    """The rows of a matrix as bytes."""
    return [row.tobytes() for row in matrix]


def unflatten(flat: npt.NDArray[np.int64], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, npt.NDArray[np.int64]]:
    """Cut a vector into arrays of these shapes, in the order of the mapping."""
    arrays, start = {}, 0
    for name, shape in shapes.items():
        end = start + math.prod(shape)
        arrays[name] = flat[start:end].reshape(shape)
        start = end
    return arrays


def _hkdf(session: bytes, info: bytes, secret: bytes) -> bytes:
    return HKDF(algorithm=SHA256(), length=32, salt=session, info=_PROTOCOL + b" " + info).derive(secret)


def derive(session: bytes, purpose: bytes, seed: bytes, number: int) -> bytes:
    """A key (`self`) or a check value (`check`) from a client's seed."""
    return _hkdf(session, purpose + struct.pack("<q", number), seed)


def pair_key(
    session: bytes, purpose: bytes, secret: X25519PrivateKey, mine: tuple[int, bytes], other: tuple[int, bytes]
) -> bytes:
    """The key two clients share for a purpose (`part`, `mask`); bound to both numbers and public keys."""
    try:
        agreed = secret.exchange(X25519PublicKey.from_public_bytes(other[1]))
    except ValueError:
        raise MessageError(f"the public key of client {other[0]} is not usable") from None
    pair = b"".join(struct.pack("<q", number) + public for number, public in sorted([mine, other]))
    return _hkdf(session, purpose + pair, agreed)


def mask_purpose(list_digest: bytes) -> bytes:
    """What the masks of a pair are for: one sum's list of keys; those of clients with different lists do not cancel."""
    return b"mask" + list_digest


def part_context(list_digest: bytes, sender: int, recipient: int) -> bytes:
    """What a part is bound to beside its key: one sum's list of keys, a sender and a recipient."""
    return struct.pack("<2q", sender, recipient) + list_digest


def mask_sign(number: int, other: int) -> int:
    """Of a pair, the client with the lower number adds the common mask and the other subtracts it."""
    return 1 if number < other else -1


def add_stream(values: npt.NDArray[np.uint64], key: bytes, sign: int) -> None:
    """Add (or with sign -1 subtract) the AES-CTR key stream of this key, modulo 2**64, in place."""
    encryptor = Cipher(AES(key), CTR(bytes(16))).encryptor()
    operation = np.add if sign > 0 else np.subtract
    length = len(_STREAM_BLOCK) // 8
    for start in range(0, values.size, length):
        block = values[start : start + length]
        stream = np.frombuffer(encryptor.update(_STREAM_BLOCK[: 8 * block.size]), dtype="<u8")
        operation(block, stream, out=block)
