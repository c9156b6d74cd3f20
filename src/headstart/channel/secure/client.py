"""One client's side of a secure sum."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from headstart.channel.fixed import check_values, exponents_of, to_fixed
from headstart.channel.secure.graph import LARGEST_CLIQUE, Graph
from headstart.channel.secure.identity import SIGNATURE_BYTES, Identity
from headstart.channel.secure.protocol import (
    KEY_BYTES,
    KEY_SHARE_BYTES,
    NONCE_BYTES,
    PART_BYTES,
    SECRETS_BYTES,
    SEED_BYTES,
    SEED_SHARE_BYTES,
    VALUE,
    KeyList,
    Terms,
    add_stream,
    byte_array,
    byte_matrix,
    byte_rows,
    check_exponents,
    check_message,
    check_number,
    client_numbers,
    derive,
    mask_purpose,
    mask_sign,
    pair_key,
    part_context,
    public_bytes,
    session_bytes,
    signed_keys,
    unflatten,
)
from headstart.channel.secure.shamir import split
from headstart.core.message import Array, Message, Scalar
from headstart.errors import MessageError

# What a client keeps until it answers an exchange: every array with its dtype and shape; its values beside them.
_Layout = dict[str, tuple[str, tuple[int | None, ...]]]
_FRESH: _Layout = {"share_secret": ("uint8", (KEY_BYTES,)), "mask_secret": ("uint8", (KEY_BYTES,))}
_REVEAL: _Layout = {
    "list_digest": ("uint8", (32,)),
    "sharers": ("int64", (None,)),
    "present": ("int64", (None,)),
    "secrets": ("uint8", (None, SECRETS_BYTES)),
}
_STATE: dict[str, _Layout] = {
    "masked": _FRESH
    | {
        "listed": ("int64", (None,)),
        "group": ("int64", (None,)),
        "list_digest": ("uint8", (32,)),
        "share_keys": ("uint8", (None, KEY_BYTES)),
        "mask_keys": ("uint8", (None, KEY_BYTES)),
        "exponents": ("int32", (None,)),
        "seed": ("uint8", (SEED_BYTES,)),
        "own_secrets": ("uint8", (SECRETS_BYTES,)),
    },
    "agree": _REVEAL,
    "reveal": _REVEAL | {"survivors": ("int64", (None,))},
    "none": {"survivors": ("int64", (None,))},
}
_AS_LONG = (("group", "share_keys"), ("group", "mask_keys"), ("present", "secrets"))


class SecureClient:
    """One client's side of one secure sum.

    `keys`, `share`, `mask`, `agree` and `reveal` answer the exchanges in this order, each of `share`, `mask` and
    `agree` once; where all have to stay, `keys` and `mask` are all. A refused request changes nothing. Where the next
    exchange is answered by another process, keep `to_message()` on the node, written before the answer is sent: a
    client that answers twice from an old state could give its values away. The state holds secrets and must not travel.
    After the last answer `survivors` are those whose values are in the total, and `agreed` of them have signed for it.

    Parameters
    ----------
    session
        Names this sum; the same for all its clients, and never used for two sums.
    clients, threshold
        How many clients the server calls, and how many must answer to the end; more than two thirds, 3 or more.
    identity
        The client's number and key, and the keys of the others.
    values
        What is added: float64 arrays, as fixed-point numbers, and int64 arrays, as they are.
    context
        What the values are an answer to, from the client's own knowledge: clients that differ in it refuse each other.
    """

    def __init__(
        self,
        session: bytes | str,
        clients: int,
        threshold: int,
        identity: Identity,
        values: Mapping[str, Array],
        context: bytes = b"",
    ) -> None:
        self._terms, self._identity = Terms(session_bytes(session), clients, threshold), identity
        self._number, self._context = check_number(identity.number), context
        self._values = {name: np.asarray(values[name]) for name in sorted(values)}
        check_values(self._values, clients)
        self._step, self.agreed = self._terms.steps[1], 0
        self._state: dict[str, Array] = {
            name: byte_array(X25519PrivateKey.generate().private_bytes_raw()) for name in _FRESH
        }

    def keys(self) -> Message:
        """The answer to `keys`: two public keys and the exponents of the values, signed."""
        self._require(self._terms.steps[1])
        share_key, mask_key = (byte_array(key) for key in self._public_keys())
        exponents = self._exponents()
        signed = signed_keys(self._terms, self._context, self._number, share_key, mask_key, exponents)
        arrays = {"share_key": share_key, "mask_key": mask_key, "exponents": exponents}
        return self._answer("keys", arrays | {"signature": byte_array(self._identity.sign(signed))})

    def share(self, everyone: Message) -> Message:
        """The answer to `shares`: for every neighbour an encrypted part of this client's two secrets."""
        self._require("shares")
        listed, graph = self._checked_list(everyone, "shares")
        group, seed = graph.group(self._number), os.urandom(SEED_BYTES)
        places = np.searchsorted(listed.numbers, group)
        own_secrets = (seed, self._state["mask_secret"].tobytes())
        shares = [split(secret, graph.needed, (places + 1).tolist()) for secret in own_secrets]
        secrets = dict(zip(group, byte_rows(np.concatenate(shares, axis=1)), strict=True))
        own = secrets.pop(self._number)
        state = self._neighbourhood(listed, group)
        share_keys = dict(zip(group, byte_rows(state["share_keys"]), strict=True))
        parts = self._encrypted(secrets, share_keys, state["list_digest"].tobytes())

        self._state |= state | {"seed": byte_array(seed), "own_secrets": byte_array(own)}
        self._step = "masked"
        recipients = np.array(list(secrets), dtype=np.int64)
        check = byte_array(derive(self._terms.session, b"check", seed, self._number))
        return self._answer(
            "shares", {"recipients": recipients, "parts": byte_matrix(parts, PART_BYTES), "check": check}
        )

    def mask(self, received: Message) -> Message:
        """The answer to `masked`: the values, masked, as int64, and a signature of who has sent parts to whom.

        A part that does not decrypt is refused with a `MessageError` that names its sender; this client is then
        out of the sum. Where all have to stay there are no parts, and what is received is everyone's keys.
        """
        self._require("masked")
        if self._terms.all_stay:
            return self._mask_for_all(received)
        secrets = self._decrypted(received)
        arrays = self._masked(self._state, list(secrets))
        secrets[self._number] = self._state["own_secrets"].tobytes()
        present = sorted(secrets)
        self._state = {
            "list_digest": self._state["list_digest"],
            "sharers": received.arrays["sharers"],
            "present": np.array(present, dtype=np.int64),
            "secrets": byte_matrix([secrets[number] for number in present], SECRETS_BYTES),
        }
        self._step, self._values = "agree", {}
        return self._answer("masked", {**arrays, "signature": byte_array(self._identity.sign(self._signed(b"masked")))})

    def _mask_for_all(self, everyone: Message) -> Message:
        """The values with masks that cancel only in the total of everybody on this list; no secret is kept."""
        listed, graph = self._checked_list(everyone, "masked")
        group = graph.group(self._number)
        state = self._state | self._neighbourhood(listed, group)
        arrays = self._masked(state, [other for other in group if other != self._number])
        self._state = {"survivors": np.array(listed.numbers, dtype=np.int64)}
        self._step, self._values, self.agreed = "none", {}, len(listed.numbers)
        return self._answer("masked", arrays)

    def agree(self, received: Message) -> Message:
        """The answer to `agree`: a signature of the one list of survivors that this client opens the sum for."""
        self._require("agree")
        check_message(received, self._terms.session, "agree", {"survivors", "signers", "signatures"})
        survivors = client_numbers(received, "survivors")
        if self._number not in survivors:
            raise MessageError(f"client {self._number} has sent its values and is not among the survivors")
        if len(survivors) < self._terms.threshold:
            raise MessageError(
                f"{len(survivors)} clients have sent values, {self._terms.threshold} are needed to open the sum"
            )
        unknown = sorted(set(survivors) - set(self._state["sharers"].tolist()))
        if unknown:
            raise MessageError(f"clients {unknown} are among the survivors and have sent no parts")
        neighbours = [n for n in self._state["present"].tolist() if n in survivors and n != self._number]
        signed = self._signers(received, self._signed(b"masked"))
        if missing := [number for number in neighbours if number not in signed]:
            raise MessageError(f"clients {missing} have not signed that the same clients have sent parts")
        self._state["survivors"] = np.array(survivors, dtype=np.int64)
        self._step = "reveal"
        return self._answer("agree", {"signature": byte_array(self._identity.sign(self._signed(b"agree")))})

    def reveal(self, agreed: Message) -> Message:
        """The answer to `reveal`: shares of the survivors' seeds and of the missing clients' mask keys, never both.

        Given only when `threshold` survivors have signed the list that this client has signed, or everybody has signed
        that everybody has sent parts and values.
        """
        self._require("agree", "reveal")
        check_message(agreed, self._terms.session, "reveal", {"signers", "signatures"})
        if self._all_present(agreed):
            self._state["survivors"], self._step = self._state["sharers"], "reveal"
            self.agreed = len(self._state["sharers"])
        else:
            self._require("reveal")
            self.agreed = self._check_agreed(agreed)
        secrets = dict(zip(self._state["present"].tolist(), byte_rows(self._state["secrets"]), strict=True))
        survivors = set(self._state["survivors"].tolist())
        seeds = [secret[:SEED_SHARE_BYTES] for number, secret in secrets.items() if number in survivors]
        keys = [secret[SEED_SHARE_BYTES:] for number, secret in secrets.items() if number not in survivors]
        arrays = {
            "seed_shares": byte_matrix(seeds, SEED_SHARE_BYTES),
            "key_shares": byte_matrix(keys, KEY_SHARE_BYTES),
        }
        return self._answer("reveal", arrays)

    @property
    def survivors(self) -> Array:
        """The numbers of those whose values are in the total, once this client has agreed to it."""
        return self._state["survivors"]

    def to_message(self) -> Message:
        """The secret state between two exchanges, to be kept on the node."""
        scalars: dict[str, Scalar] = {
            "session": self._terms.session.hex(),
            "number": self._number,
            "clients": self._terms.clients,
            "threshold": self._terms.threshold,
            "context": self._context.hex(),
            "step": self._step,
        }
        return Message({**self._state, **{VALUE + name: array for name, array in self._values.items()}}, scalars)

    @classmethod
    def from_message(cls, message: Message, identity: Identity) -> SecureClient:
        """The client whose state `to_message` gave."""
        try:
            session, context = (bytes.fromhex(str(message.scalars[name])) for name in ("session", "context"))
            step = str(message.scalars["step"])
            number, clients, threshold = (int(message.scalars[name]) for name in ("number", "clients", "threshold"))
        except (KeyError, ValueError):
            raise MessageError("not the state of a client of secure aggregation") from None
        terms = Terms(session, clients, threshold)
        if (layout := _FRESH if step == terms.steps[1] else _STATE.get(step)) is None:
            raise MessageError(f"not the state of a client of secure aggregation: it has no exchange {step!r}")
        if number != identity.number:
            raise MessageError(f"the state is of client {number}, not of client {identity.number}")
        client = cls.__new__(cls)
        client._terms, client._identity, client.agreed = terms, identity, 0
        client._number, client._context, client._step = number, context, step
        client._values = {n.removeprefix(VALUE): a for n, a in message.arrays.items() if n.startswith(VALUE)}
        client._state = {name: message.array(name, *wanted) for name, wanted in layout.items()}
        if any(a in layout and b in layout and len(client._state[a]) != len(client._state[b]) for a, b in _AS_LONG):
            raise MessageError("not the state of a client of secure aggregation: its lists differ in length")
        return client

    def _checked_list(self, everyone: Message, step: str) -> tuple[KeyList, Graph]:
        """A list of keys that this client accepts, signed by everyone on it, for this sum; and who neighbours whom."""
        wanted = {"numbers", "share_keys", "mask_keys", "exponents", "signatures"}
        check_message(everyone, self._terms.session, step, wanted)
        listed = KeyList.of(everyone, len(self._exponents()))
        numbers = listed.numbers
        if self._number not in numbers:
            raise MessageError(f"client {self._number} is not among the clients listed with their keys")
        if not self._terms.threshold <= len(numbers) <= self._terms.clients:
            raise MessageError(
                f"{len(numbers)} clients are listed with their keys; between {self._terms.threshold} and "
                f"{self._terms.clients} are accepted"
            )
        share_keys, mask_keys = byte_rows(listed.share_keys), byte_rows(listed.mask_keys)
        if len({*share_keys, *mask_keys}) != 2 * len(numbers):
            raise MessageError("two of the public keys listed are the same")
        own = numbers.index(self._number)
        if (share_keys[own], mask_keys[own]) != self._public_keys():
            raise MessageError(f"the public keys listed for client {self._number} are not its own")
        check_exponents(listed.exponents)
        for place, number in enumerate(numbers):
            signed = listed.signed(place, self._terms, self._context)
            if not self._identity.signed_by(number, listed.signatures[place].tobytes(), signed):
                raise MessageError(f"the keys listed for client {number} are not signed by it for this sum")
        return listed, Graph.of(listed.digest(self._terms), numbers, self._terms.threshold)

    def _neighbourhood(self, listed: KeyList, group: Sequence[int]) -> dict[str, Array]:
        """What masks are made from: the neighbours' keys, what they are bound to, and the common exponents."""
        places = np.searchsorted(listed.numbers, group)
        return {
            "listed": np.array(listed.numbers, dtype=np.int64),
            "group": np.array(group, dtype=np.int64),
            "share_keys": listed.share_keys[places],
            "mask_keys": listed.mask_keys[places],
            "list_digest": byte_array(listed.digest(self._terms)),
            "exponents": np.asarray(listed.exponents.max(axis=0)),
        }

    def _all_present(self, agreed: Message) -> bool:
        """Whether all that have sent parts, as this client knows them, have signed that they have sent values, too.

        The signatures are those of the exchange `masked`. Among neighbours, where fewer than `threshold` shares open a
        secret, the list of survivors is agreed on whoever is missing.
        """
        sharers = self._state["sharers"]
        opens = np.array_equal(self._state.get("survivors", sharers), sharers) and self._terms.clients <= LARGEST_CLIQUE
        return opens and set(sharers.tolist()) <= self._signers(agreed, self._signed(b"masked"))

    def _check_agreed(self, agreed: Message) -> int:
        """How many survivors have signed the list that this client has signed; fewer than `threshold` are refused."""
        valid = self._signers(agreed, self._signed(b"agree")) & set(self._state["survivors"].tolist())
        if len(valid) < self._terms.threshold:
            raise MessageError(
                f"{len(valid)} survivors have signed the list of survivors, {self._terms.threshold} are needed"
            )
        return len(valid)

    def _signers(self, message: Message, signed: bytes) -> set[int]:
        """Who has signed this, of those that a message has signatures of."""
        signers = client_numbers(message, "signers")
        signatures = byte_rows(message.array("signatures", "uint8", (len(signers), SIGNATURE_BYTES)))
        pairs = zip(signers, signatures, strict=True)
        return {number for number, signature in pairs if self._identity.signed_by(number, signature, signed)}

    def _signed(self, step: bytes) -> bytes:
        """What clients sign in `masked`, the list of keys and who has sent parts; in `agree` also who has survived."""
        names = ("list_digest", "sharers") if step == b"masked" else ("list_digest", "sharers", "survivors")
        return self._terms.encoded(step, self._context, *(self._state[name].tobytes() for name in names))

    def _encrypted(
        self, secrets: Mapping[int, bytes], share_keys: Mapping[int, bytes], list_digest: bytes
    ) -> list[bytes]:
        """Everyone's secrets, each readable by its recipient alone."""
        private, parts = self._secret("share_secret"), []
        for recipient, secret in secrets.items():
            key = self._pair_key(b"part", private, share_keys, recipient)
            nonce, context = os.urandom(NONCE_BYTES), part_context(list_digest, self._number, recipient)
            parts.append(nonce + AESGCM(key).encrypt(nonce, secret, context))
        return parts

    def _decrypted(self, parts: Message) -> dict[int, bytes]:
        """What the others' parts say, by sender, of a message that this client accepts."""
        check_message(parts, self._terms.session, "masked", {"sharers", "parts"})
        sharers, group = client_numbers(parts, "sharers"), self._state["group"].tolist()
        share_keys = dict(zip(group, byte_rows(self._state["share_keys"]), strict=True))
        unknown = sorted(set(sharers) - set(self._state["listed"].tolist()))
        if unknown:
            raise MessageError(f"parts came from clients {unknown}, which are not among those with keys")
        if self._number not in sharers:
            raise MessageError(f"client {self._number} has sent parts and is not among those that have")
        if len(sharers) < self._terms.threshold:
            raise MessageError(
                f"{len(sharers)} clients have sent parts, {self._terms.threshold} are needed to open the sum"
            )
        senders = [number for number in sharers if number in share_keys and number != self._number]
        encrypted = byte_rows(parts.array("parts", "uint8", (len(senders), PART_BYTES)))
        private, secrets = self._secret("share_secret"), {}
        for sender, part in zip(senders, encrypted, strict=True):
            key = self._pair_key(b"part", private, share_keys, sender)
            context = part_context(self._state["list_digest"].tobytes(), sender, self._number)
            try:
                secrets[sender] = AESGCM(key).decrypt(part[:NONCE_BYTES], part[NONCE_BYTES:], context)
            except InvalidTag:
                raise MessageError(f"the part from client {sender} was not made for this client and sum") from None
        return secrets

    def _masked(self, state: Mapping[str, Array], others: Sequence[int]) -> dict[str, Array]:
        """The values as fixed-point numbers, with this client's own mask, where it has one, and those it shares."""
        exponents = dict(zip(exponents_of(self._values), state["exponents"].tolist(), strict=True))
        fixed = to_fixed(self._values, exponents, self._terms.clients)
        values: npt.NDArray[np.uint64] = np.concatenate([array.ravel() for array in fixed.values()]).view(np.uint64)
        if "seed" in state:
            add_stream(values, derive(self._terms.session, b"self", state["seed"].tobytes(), self._number), 1)
        private, purpose = self._secret("mask_secret"), mask_purpose(state["list_digest"].tobytes())
        mask_keys = dict(zip(state["group"].tolist(), byte_rows(state["mask_keys"]), strict=True))
        for other in others:
            add_stream(values, self._pair_key(purpose, private, mask_keys, other), mask_sign(self._number, other))
        return dict(unflatten(values.view(np.int64), {VALUE + name: array.shape for name, array in fixed.items()}))

    def _require(self, *steps: str) -> None:
        if self._step not in steps:
            raise MessageError(f"the client's next exchange is {self._step!r}; this request is out of turn")

    def _exponents(self) -> Array:
        return np.array(list(exponents_of(self._values).values()), dtype=np.int32)

    def _secret(self, name: str) -> X25519PrivateKey:
        return X25519PrivateKey.from_private_bytes(self._state[name].tobytes())

    def _public_keys(self) -> tuple[bytes, bytes]:
        return public_bytes(self._secret("share_secret")), public_bytes(self._secret("mask_secret"))

    def _pair_key(self, purpose: bytes, private: X25519PrivateKey, keys: Mapping[int, bytes], other: int) -> bytes:
        mine, theirs = (self._number, keys[self._number]), (other, keys[other])
        return pair_key(self._terms.session, purpose, private, mine, theirs)

    def _answer(self, step: str, arrays: Mapping[str, Array]) -> Message:
        return Message(arrays, {"session": self._terms.session.hex(), "step": step, "sender": self._number})
