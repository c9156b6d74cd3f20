"""What both sides of a secure sum share: checks of settings and messages, keys, masks."""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import AES
from cryptography.hazmat.primitives.ciphers.modes import CTR
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from headstart.channel.secure.shamir import share_bytes
from headstart.core.message import Array, Message
from headstart.errors import HeadstartError, MessageError

STEPS = ("keys", "shares", "masked", "reveal")

KEY_BYTES, SEED_BYTES, CHECK_BYTES = 32, 16, 32
SEED_SHARE_BYTES, KEY_SHARE_BYTES = share_bytes(SEED_BYTES), share_bytes(KEY_BYTES)
SECRETS_BYTES = SEED_SHARE_BYTES + KEY_SHARE_BYTES
NONCE_BYTES, _TAG_BYTES = 12, 16
PART_BYTES = NONCE_BYTES + SECRETS_BYTES + _TAG_BYTES
_STREAM_BLOCK = bytes(1 << 16)  # zeros; the key stream is made in blocks that stay in the processor's cache


def session_bytes(session: bytes | str) -> bytes:
    """The name of a sum as bytes; refused where it is empty."""
    data = session.encode() if isinstance(session, str) else bytes(session)
    if not data:
        raise HeadstartError("a secure sum needs a session name that is not empty")
    return data


def is_number(number: object) -> bool:
    """Whether this is a client's number: a whole number from 0 that int64 holds."""
    return isinstance(number, int) and not isinstance(number, bool) and 0 <= number < 2**63


def check_settings(clients: int, threshold: int, bits: int) -> None:
    """Refuse fewer than 3 clients, a threshold that is not more than two thirds and at most all, bits not 0 to 52."""
    if clients < 3:
        raise HeadstartError(f"a secure sum needs at least 3 clients, not {clients}")
    if not 2 * clients < 3 * threshold <= 3 * clients:
        raise HeadstartError(
            f"the threshold of a secure sum of {clients} clients is from {2 * clients // 3 + 1} (more than two thirds) "
            f"to {clients}, not {threshold}"
        )
    if not 0 <= bits <= 52:
        raise HeadstartError(f"the fractional bits of a secure sum are from 0 to 52, not {bits}")


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
    return HKDF(algorithm=SHA256(), length=32, salt=session, info=b"headstart secure sum " + info).derive(secret)


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
