"""One client's side of a secure sum."""

from __future__ import annotations

import os
import struct
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from headstart.channel.fixed import BITS, to_fixed
from headstart.channel.secure.protocol import (
    KEY_BYTES,
    KEY_SHARE_BYTES,
    NONCE_BYTES,
    PART_BYTES,
    SECRETS_BYTES,
    SEED_BYTES,
    SEED_SHARE_BYTES,
    add_stream,
    byte_array,
    byte_matrix,
    byte_rows,
    check_message,
    check_settings,
    client_numbers,
    derive,
    is_number,
    mask_sign,
    pair_key,
    public_bytes,
    session_bytes,
    unflatten,
)
from headstart.channel.secure.shamir import split
from headstart.core.message import Array, Message, Scalar
from headstart.errors import HeadstartError, MessageError

# What a client keeps until it answers an exchange: every array with its dtype and shape.
_FRESH: dict[str, tuple[str, tuple[int | None, ...]]] = {
    "share_secret": ("uint8", (KEY_BYTES,)),
    "mask_secret": ("uint8", (KEY_BYTES,)),
}
_CLIENT_STATE = {
    "shares": _FRESH,
    "masked": _FRESH
    | {
        "numbers": ("int64", (None,)),
        "share_keys": ("uint8", (None, KEY_BYTES)),
        "mask_keys": ("uint8", (None, KEY_BYTES)),
        "seed": ("uint8", (SEED_BYTES,)),
        "own_secrets": ("uint8", (SECRETS_BYTES,)),
    },
    "reveal": {
        "numbers": ("int64", (None,)),
        "secrets": ("uint8", (None, SECRETS_BYTES)),
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
        self._session = session_bytes(session)
        check_settings(clients, threshold, bits)
        if not is_number(number):
            raise HeadstartError(f"a client's number is a whole number from 0, not {number!r}")
        self._number, self._clients, self._threshold, self._bits = number, clients, threshold, bits
        self._step = "shares"
        self._state: dict[str, Array] = {
            name: byte_array(X25519PrivateKey.generate().private_bytes_raw())
            for name in ("share_secret", "mask_secret")
        }

    def keys(self) -> Message:
        """The answer to `keys`: two public keys."""
        self._require("shares")
        share_key, mask_key = self._public_keys()
        return self._answer("keys", {"share_key": byte_array(share_key), "mask_key": byte_array(mask_key)})

    def share(self, everyone: Message) -> Message:
        """The answer to `shares`: for everybody else an encrypted part of this client's two secrets."""
        self._require("shares")
        share_keys = self._checked_share_keys(everyone)
        seed = os.urandom(SEED_BYTES)
        points = range(1, len(share_keys) + 1)
        shares = [split(secret, self._threshold, points) for secret in (seed, self._state["mask_secret"].tobytes())]
        secrets = dict(zip(share_keys, byte_rows(np.concatenate(shares, axis=1)), strict=True))
        own = secrets.pop(self._number)
        parts = self._encrypted(secrets, share_keys)

        self._state |= {name: everyone.arrays[name] for name in ("numbers", "share_keys", "mask_keys")}
        self._state |= {"seed": byte_array(seed), "own_secrets": byte_array(own)}
        self._step = "masked"
        recipients = np.array(list(secrets), dtype=np.int64)
        check = byte_array(derive(self._session, b"check", seed, self._number))
        return self._answer(
            "shares", {"recipients": recipients, "parts": byte_matrix(parts, PART_BYTES), "check": check}
        )

    def mask(self, parts: Message, values: Mapping[str, Array]) -> Message:
        """The answer to `masked`: the values, masked, as int64.

        A part that does not decrypt is refused with a `MessageError` that names its sender; this client is then
        out of the sum.
        """
        self._require("masked")
        secrets = self._decrypted(parts)
        fixed = to_fixed(values, self._clients, self._bits)
        names = sorted(fixed)
        masked = np.concatenate([fixed[name].ravel() for name in names]).view(np.uint64)
        self._add_masks(masked, list(secrets))

        secrets[self._number] = self._state["own_secrets"].tobytes()
        present = sorted(secrets)
        self._state = {
            "numbers": np.array(present, dtype=np.int64),
            "secrets": byte_matrix([secrets[number] for number in present], SECRETS_BYTES),
            "survivors": np.array([], dtype=np.int64),
        }
        self._step = "reveal"
        return self._answer("masked", unflatten(masked.view(np.int64), {name: fixed[name].shape for name in names}))

    def reveal(self, survivors: Message) -> Message:
        """The answer to `reveal`: shares of the survivors' seeds and of the missing clients' mask keys, never both."""
        self._require("reveal")
        check_message(survivors, self._session, "reveal", {"survivors", "missing"})
        heard, missing = client_numbers(survivors, "survivors"), client_numbers(survivors, "missing")
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
        secrets = self._rows_by_client("secrets")
        self._state["survivors"] = np.array(heard, dtype=np.int64)
        seed_shares = byte_matrix([secrets[number][:SEED_SHARE_BYTES] for number in heard], SEED_SHARE_BYTES)
        key_shares = byte_matrix([secrets[number][SEED_SHARE_BYTES:] for number in missing], KEY_SHARE_BYTES)
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

    def _checked_share_keys(self, everyone: Message) -> dict[int, bytes]:
        """The keys to encrypt shares with, by client, of a list of keys that this client accepts."""
        check_message(everyone, self._session, "shares", {"numbers", "share_keys", "mask_keys"})
        numbers = client_numbers(everyone, "numbers")
        if self._number not in numbers:
            raise MessageError(f"client {self._number} is not among the clients listed with their keys")
        if not self._threshold <= len(numbers) <= self._clients:
            raise MessageError(
                f"{len(numbers)} clients are listed with their keys; between {self._threshold} and {self._clients} "
                f"are accepted"
            )
        share_keys = byte_rows(everyone.array("share_keys", "uint8", (len(numbers), KEY_BYTES)))
        mask_keys = byte_rows(everyone.array("mask_keys", "uint8", (len(numbers), KEY_BYTES)))
        if len({*share_keys, *mask_keys}) != 2 * len(numbers):
            raise MessageError("two of the public keys listed are the same")
        own = numbers.index(self._number)
        if (share_keys[own], mask_keys[own]) != self._public_keys():
            raise MessageError(f"the public keys listed for client {self._number} are not its own")
        return dict(zip(numbers, share_keys, strict=True))

    def _encrypted(self, secrets: Mapping[int, bytes], share_keys: Mapping[int, bytes]) -> list[bytes]:
        """Everyone's secrets, each readable by its recipient alone."""
        private, parts = self._secret("share_secret"), []
        for recipient, secret in secrets.items():
            key = self._pair_key(b"part", private, share_keys, recipient)
            nonce = os.urandom(NONCE_BYTES)
            parts.append(nonce + AESGCM(key).encrypt(nonce, secret, self._associated(self._number, recipient)))
        return parts

    def _decrypted(self, parts: Message) -> dict[int, bytes]:
        """What the others' parts say, by sender, of a message that this client accepts."""
        check_message(parts, self._session, "masked", {"senders", "parts"})
        senders, share_keys = client_numbers(parts, "senders"), self._rows_by_client("share_keys")
        strangers = [n for n in senders if n not in share_keys or n == self._number]
        if strangers:
            raise MessageError(f"parts came from clients {strangers}, which are not among the others with keys")
        if len(senders) + 1 < self._threshold:
            raise MessageError(
                f"{len(senders) + 1} clients have sent parts, {self._threshold} are needed to open the sum"
            )
        encrypted = byte_rows(parts.array("parts", "uint8", (len(senders), PART_BYTES)))
        private, secrets = self._secret("share_secret"), {}
        for sender, part in zip(senders, encrypted, strict=True):
            key = self._pair_key(b"part", private, share_keys, sender)
            associated = self._associated(sender, self._number)
            try:
                secrets[sender] = AESGCM(key).decrypt(part[:NONCE_BYTES], part[NONCE_BYTES:], associated)
            except InvalidTag:
                raise MessageError(f"the part from client {sender} was not made for this client and sum") from None
        return secrets

    def _add_masks(self, values: npt.NDArray[np.uint64], others: Sequence[int]) -> None:
        """Add this client's own mask, and the masks it shares with the others, in place."""
        add_stream(values, derive(self._session, b"self", self._state["seed"].tobytes(), self._number), 1)
        private, mask_keys = self._secret("mask_secret"), self._rows_by_client("mask_keys")
        for other in others:
            add_stream(values, self._pair_key(b"mask", private, mask_keys, other), mask_sign(self._number, other))

    def _require(self, step: str) -> None:
        if self._step != step:
            raise MessageError(f"the client's next exchange is {self._step!r}; this request is out of turn")

    def _secret(self, name: str) -> X25519PrivateKey:
        return X25519PrivateKey.from_private_bytes(self._state[name].tobytes())

    def _public_keys(self) -> tuple[bytes, bytes]:
        return public_bytes(self._secret("share_secret")), public_bytes(self._secret("mask_secret"))

    def _rows_by_client(self, name: str) -> dict[int, bytes]:
        return dict(zip(self._state["numbers"].tolist(), byte_rows(self._state[name]), strict=True))

    def _pair_key(self, purpose: bytes, private: X25519PrivateKey, keys: Mapping[int, bytes], other: int) -> bytes:
        return pair_key(self._session, purpose, private, (self._number, keys[self._number]), (other, keys[other]))

    def _associated(self, sender: int, recipient: int) -> bytes:
        settings = (self._clients, self._threshold, self._bits, sender, recipient)
        return struct.pack("<5q", *settings) + self._session

    def _answer(self, step: str, arrays: Mapping[str, Array]) -> Message:
        return Message(arrays, {"session": self._session.hex(), "step": step, "sender": self._number})
