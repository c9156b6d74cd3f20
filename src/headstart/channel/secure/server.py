"""The server's side of a secure sum."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property

import numpy as np
import numpy.typing as npt
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey

from headstart.channel.fixed import from_fixed
from headstart.channel.secure.graph import LARGEST_CLIQUE, Graph
from headstart.channel.secure.identity import SIGNATURE_BYTES
from headstart.channel.secure.protocol import (
    CHECK_BYTES,
    KEY_BYTES,
    KEY_SHARE_BYTES,
    PART_BYTES,
    SEED_BYTES,
    SEED_SHARE_BYTES,
    VALUE,
    KeyList,
    Terms,
    add_stream,
    byte_matrix,
    check_exponents,
    check_message,
    check_number,
    client_numbers,
    derive,
    mask_purpose,
    mask_sign,
    pair_key,
    public_bytes,
    session_bytes,
    unflatten,
)
from headstart.channel.secure.shamir import combine
from headstart.core.message import Array, Message, Scalar
from headstart.errors import HeadstartError, MessageError


class SecureSum:
    """The server's side of one secure sum.

    While there is a `step`: send what `instructions` says, `receive` every answer, then `next`. After the last, `total`
    is the sum.

    Parameters
    ----------
    session
        Names this sum; the same for all its clients, and never used for two sums.
    clients
        The numbers of the clients that are called.
    threshold
        How many of them must answer to the end; more than two thirds, 3 or more.
    shapes
        Names and shapes of the arrays that are summed.
    integers
        Names of those that are int64, added as they are; the others are float64.
    """

    def __init__(
        self,
        session: bytes | str,
        clients: Sequence[int],
        threshold: int,
        shapes: Mapping[str, tuple[int, ...]],
        integers: Collection[str] = (),
    ) -> None:
        self._terms = Terms(session_bytes(session), len(clients), threshold)
        if len({check_number(number) for number in clients}) != len(clients):
            raise HeadstartError("the clients of secure aggregation are different whole numbers from 0")
        if not shapes:
            raise HeadstartError("secure aggregation needs at least one array of values")
        self._clients = tuple(sorted(clients))
        self._shapes = {name: tuple(shapes[name]) for name in sorted(shapes)}
        self._scaled = [name for name in self._shapes if name not in integers]
        self._closed = 0
        self._public_keys: set[bytes] = set()
        self._steps = self._terms.steps
        self._answers: dict[str, dict[int, Mapping[str, Array]]] = {step: {} for step in self._steps}
        self._sum = np.zeros(sum(math.prod(shape) for shape in self._shapes.values()), dtype=np.uint64)
        self._total: dict[str, Array] | None = None

    @property
    def step(self) -> str | None:
        """The exchange under way; None when all are closed."""
        return self._steps[self._closed] if self._closed < len(self._steps) else None

    @property
    def waiting(self) -> tuple[int, ...]:
        """Who has not yet answered the exchange under way."""
        return () if self.step is None else self._silent(self.step)

    @property
    def survivors(self) -> tuple[int, ...]:
        """Whose values are in the sum."""
        return tuple(sorted(self._answers["masked"]))

    def dropped(self) -> dict[int, str]:
        """Every client that is out, with the first exchange it did not answer."""
        return {number: step for step in self._steps[: self._closed] for number in self._silent(step)}

    def instructions(self) -> dict[int, Message]:
        """What to send to whom in the exchange under way."""
        if self.step is None:
            return {}
        asked = self._asked(self.step)
        scalars: dict[str, Scalar] = {"session": self._terms.session.hex(), "step": self.step}
        if self.step == "keys":
            settings = {"clients": self._terms.clients, "threshold": self._terms.threshold}
            return dict.fromkeys(asked, Message({}, scalars | settings))
        if self._closed == 1:
            arrays = self._listed.arrays()
        elif self.step == "masked":
            return {number: Message(self._parts_for(number), scalars) for number in asked}
        elif self.step == "agree":
            survivors = np.array(asked, dtype=np.int64)
            groups = {number: set(self._graph.group(number)) - {number} for number in asked}
            return {
                number: Message({"survivors": survivors, **self._signatures("masked", groups[number])}, scalars)
                for number in asked
            }
        else:
            arrays = self._signatures("agree", asked)
        return dict.fromkeys(asked, Message(arrays, scalars))

    def receive(self, number: int, message: Message) -> None:
        """Take client `number`'s answer; anything but what was asked for is refused and changes nothing."""
        step = self.step
        if step is None:
            raise MessageError("secure aggregation has no exchange under way")
        if number not in self._asked(step):
            raise MessageError(f"client {number!r} is not asked in the exchange {step!r}")
        if number in self._answers[step]:
            raise MessageError(f"client {number} has answered the exchange {step!r} already")
        checks = {
            "keys": self._checked_keys,
            "shares": self._checked_parts,
            "masked": self._add_values,
            "agree": self._checked_signature,
            "reveal": self._checked_shares,
        }
        self._answers[step][number] = checks[step](number, message)

    def next(self) -> None:
        """Close the exchange: whoever has not answered is out; where nobody is, nothing has to be agreed on.

        With fewer clients left than the threshold the exchange stays open and a `HeadstartError` says so.
        """
        if self.step is None:
            raise HeadstartError("secure aggregation has no exchange under way")
        left = len(self._answers[self.step])
        if left < self._terms.threshold:
            raise HeadstartError(
                f"{left} of {self._terms.clients} clients are left, {self._terms.threshold} are needed to open the sum"
            )
        self._closed += 1
        if self.step == "agree" and not self._silent("masked") and self._terms.clients <= LARGEST_CLIQUE:
            self._answers["agree"] = self._answers["masked"]  # all have signed that all have sent parts and values
            self._closed += 1

    def total(self) -> dict[str, Array]:
        """The sum of the values of the `survivors`, by name."""
        if self.step is not None:
            raise HeadstartError(f"the sum is not open yet: the exchange {self.step!r} is under way")
        if self._total is None:
            arrays = unflatten(self._unmasked().view(np.int64), self._shapes)
            exponents = dict(zip(self._scaled, self._listed.exponents.max(axis=0).tolist(), strict=True))
            self._total = from_fixed(arrays, exponents, self._terms.clients)
        return {name: array.copy() for name, array in self._total.items()}

    def _asked(self, step: str) -> tuple[int, ...]:
        before = self._steps.index(step) - 1
        return self._clients if before < 0 else tuple(sorted(self._answers[self._steps[before]]))

    def _silent(self, step: str) -> tuple[int, ...]:
        return tuple(number for number in self._asked(step) if number not in self._answers[step])

    @property
    def _listed(self) -> KeyList:
        """The keys of everybody that has sent some."""
        keys, numbers = self._answers["keys"], self._asked(self._steps[1])
        names = ("share_key", "mask_key", "exponents", "signature")
        return KeyList(numbers, *(np.stack([keys[number][name] for number in numbers]) for name in names))

    @cached_property
    def _list_digest(self) -> bytes:
        """Asked for when the keys are known."""
        return self._listed.digest(self._terms)

    @cached_property
    def _graph(self) -> Graph:
        """Who shares with whom."""
        return Graph.of(self._list_digest, self._asked("shares"), self._terms.threshold)

    def _signatures(self, step: str, numbers: Collection[int]) -> dict[str, Array]:
        """Those of some clients in an exchange, of as many as have answered it."""
        answers = {number: self._answers[step][number] for number in sorted(numbers) if number in self._answers[step]}
        rows = [answer["signature"].tobytes() for answer in answers.values()]
        return {
            "signers": np.array(list(answers), dtype=np.int64),
            "signatures": byte_matrix(rows, SIGNATURE_BYTES),
        }

    def _parts_for(self, recipient: int) -> dict[str, Array]:
        answers, sharers = self._answers["shares"], self._asked("masked")
        senders = [n for n in self._graph.group(recipient) if n in answers and n != recipient]
        rows = [answers[s]["parts"][int(np.searchsorted(answers[s]["recipients"], recipient))] for s in senders]
        parts = byte_matrix([row.tobytes() for row in rows], PART_BYTES)
        return {"sharers": np.array(sharers, dtype=np.int64), "parts": parts}

    def _checked_keys(self, number: int, message: Message) -> Mapping[str, Array]:
        wanted = {"share_key", "mask_key", "exponents", "signature"}
        check_message(message, self._terms.session, "keys", wanted, number)
        check_exponents(message.array("exponents", "int32", (len(self._scaled),)))
        message.array("signature", "uint8", (SIGNATURE_BYTES,))
        keys = {name: message.array(name, "uint8", (KEY_BYTES,)) for name in ("share_key", "mask_key")}
        found: set[bytes] = set()
        for name, key in keys.items():
            data = key.tobytes()
            if data in self._public_keys or data in found:
                raise MessageError(f"{name!r} is a public key that was sent before")
            found.add(data)
            try:
                X25519PrivateKey.generate().exchange(X25519PublicKey.from_public_bytes(data))
            except ValueError:
                raise MessageError(f"{name!r} is not a usable X25519 public key") from None
        self._public_keys |= found
        return message.arrays

    def _checked_parts(self, number: int, message: Message) -> Mapping[str, Array]:
        check_message(message, self._terms.session, "shares", {"recipients", "parts", "check"}, number)
        others = tuple(other for other in self._graph.group(number) if other != number)
        if client_numbers(message, "recipients") != others:
            raise MessageError("the recipients of the parts are not the client's neighbours")
        message.array("parts", "uint8", (len(others), PART_BYTES))
        message.array("check", "uint8", (CHECK_BYTES,))
        return message.arrays

    def _add_values(self, number: int, message: Message) -> Mapping[str, Array]:
        """Masked values go straight into the running sum; nothing is kept of them."""
        names = {VALUE + name: shape for name, shape in self._shapes.items()}
        signed = set() if self._terms.all_stay else {"signature"}
        check_message(message, self._terms.session, "masked", {*names} | signed, number)
        arrays = [message.array(name, "int64", shape) for name, shape in names.items()]
        signatures = {name: message.array(name, "uint8", (SIGNATURE_BYTES,)) for name in signed}
        self._sum += np.concatenate([array.ravel() for array in arrays]).view(np.uint64)
        return signatures

    def _checked_signature(self, number: int, message: Message) -> Mapping[str, Array]:
        check_message(message, self._terms.session, "agree", {"signature"}, number)
        message.array("signature", "uint8", (SIGNATURE_BYTES,))
        return message.arrays

    def _checked_shares(self, number: int, message: Message) -> Mapping[str, Array]:
        check_message(message, self._terms.session, "reveal", {"seed_shares", "key_shares"}, number)
        for name, width in (("seed_shares", SEED_SHARE_BYTES), ("key_shares", KEY_SHARE_BYTES)):
            message.array(name, "uint8", (len(self._rows(name, number)), width))
        return message.arrays

    def _owners(self, name: str) -> tuple[int, ...]:
        """Whose secrets these are shares of."""
        return self.survivors if name == "seed_shares" else self._silent("masked")

    def _rows(self, name: str, holder: int) -> list[int]:
        """The owners of the shares in this order that a client reveals."""
        group = set(self._graph.group(holder))
        return [number for number in self._owners(name) if number in group]

    def _unmasked(self) -> npt.NDArray[np.uint64]:
        total, session = self._sum.copy(), self._terms.session
        if self._terms.all_stay:  # every mask is there twice, once with either sign
            return total
        purpose = mask_purpose(self._list_digest)
        mask_keys = {number: answer["mask_key"].tobytes() for number, answer in self._answers["keys"].items()}
        for number, seed in self._rebuilt("seed_shares", SEED_BYTES).items():
            if derive(session, b"check", seed, number) != self._answers["shares"][number]["check"].tobytes():
                raise MessageError(_misfit("seed", number))
            add_stream(total, derive(session, b"self", seed, number), -1)
        for number, key in self._rebuilt("key_shares", KEY_BYTES).items():
            secret = X25519PrivateKey.from_private_bytes(key)
            if public_bytes(secret) != mask_keys[number]:
                raise MessageError(_misfit("mask key", number))
            for other in set(self._graph.group(number)) & set(self.survivors):
                mine, others = (number, mask_keys[number]), (other, mask_keys[other])
                add_stream(total, pair_key(session, purpose, secret, mine, others), -mask_sign(other, number))
        return total

    def _rebuilt(self, name: str, length: int) -> dict[int, bytes]:
        """The secrets by owner, each from the first answers that suffice."""
        shares: dict[int, list[Array]] = {number: [] for number in self._owners(name)}
        points: dict[int, list[int]] = {number: [] for number in shares}
        place = {number: place for place, number in enumerate(self._asked("shares"), start=1)}
        for holder, answer in sorted(self._answers["reveal"].items()):
            for row, owner in enumerate(self._rows(name, holder)):
                if len(points[owner]) < self._graph.needed:
                    points[owner].append(place[holder])
                    shares[owner].append(answer[name][row])
        for owner, found in points.items():
            if len(found) < self._graph.needed:
                held = f"{len(found)} of client {owner}'s neighbours are left"
                raise HeadstartError(f"{held}, {self._graph.needed} are needed to open the sum")
        if not shares:
            return {}
        stacked = np.array([np.stack(rows) for rows in shares.values()], dtype=np.uint8)
        return dict(zip(shares, combine(np.array(list(points.values())), stacked, length), strict=True))


def _misfit(secret: str, number: int) -> str:
    return f"the shares revealed of client {number}'s {secret} do not fit what client {number} announced"
