"""The links of a channel: each is one thing that happens to an update on its way, with both its halves in one object.

`encode` is the client's half, `decode` the server's, `finish` what the server does to the total of a round. Messages
are updates as in `headstart.core.update`; every part that a link leaves out does nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from math import prod
from typing import Any

import numpy as np

from headstart.channel.accounting import doubled, noise_multiplier, sensitivity, spent
from headstart.channel.shared_noise import SharedNoise
from headstart.config.stage import Privacy
from headstart.core.message import Array, Message
from headstart.core.params import clipped, norm
from headstart.core.reply import Sender
from headstart.core.seeds import Seed, generator_of, hiding
from headstart.core.statistics import Floats
from headstart.core.update import Blocks, Total, block_of
from headstart.errors import MessageError

# An update so many times larger than the model it updates is no step of SGD.
_DIVERGED = 1e4
# Nor is one that, added up over the rounds, leads out of float32, which messages travel in.
_LARGEST = 1e30
# 0.29 of 100 is a little less than 29 in floating point.
_ROUNDED = 1e-9
# What sets the generator of the noise apart from those that shuffle and draw.
_NOISE = 0xD1FF


class Link:
    """One step between client and server; as it is, it does nothing."""

    lossy = False
    """Whether the server reads another update than the client meant to send."""
    feeds_back = False
    """Whether what the server does not read of an update is added to the client's next one."""

    def encode(self, message: Message, sender: Sender) -> Message:
        """On the client: the update as it travels."""
        return message

    def decode(self, message: Message, sender: Sender) -> Message:
        """On the server: the update as it counts; `MessageError` where it cannot be right."""
        return message

    def finish(self, total: Total, round: int) -> Total:
        """On the server, once a round (from 0), before it steps."""
        return total

    def spent(self, rounds: int) -> dict[str, Any] | None:
        """The privacy guarantee after so many rounds; None where there is none."""
        return None


class Check(Link):
    """Refuses arrays of other shapes, numbers that are none, and updates that no training makes."""

    def __init__(self, deviation: float = 0.0) -> None:
        """deviation: that of the noise which clients add to every number."""
        self.deviation = deviation

    def decode(self, message: Message, sender: Sender) -> Message:
        """The arrays that were expected, and no other."""
        expected = sender.expected
        arrays = {name: message.array(name, "float32", shape) for name, shape in expected.items()}
        blocks = dict[str, dict[str, Array]]()
        for name, array in arrays.items():
            blocks.setdefault(block_of(name).partition("@")[0], {})[name] = array
            if name.partition("@")[0].endswith("running_var") and array.min(initial=0) < 0:
                raise MessageError(f"array {name!r} holds a negative variance")
        for block, each in blocks.items():
            length = norm(each)
            if block != "update" and length > _LARGEST:
                raise MessageError(f"the arrays of {block!r} have diverged: their norm is {length:.1e}")
            if block == "update" and length > (largest := self._largest(sender)):
                raise MessageError(f"the update has diverged: its norm is {length:.1e}, more than {largest:.1e}")
        return Message(arrays, message.scalars)

    def _largest(self, sender: Sender) -> float:
        """The largest norm of an update of a model of this norm."""
        if sender.model_norm is None:
            return _LARGEST
        usual = sender.model_norm
        if self.deviation:
            shapes = [s for n, s in sender.expected.items() if block_of(n).partition("@")[0] == "update"]
            usual += self.deviation * sum(map(prod, shapes)) ** 0.5
        return float(min(_DIVERGED * (1 + usual), _LARGEST - usual))


class Clip(Link):
    """No update counts that is longer than a norm; a client shortens its own, the server what a client did not."""

    lossy = True

    def __init__(self, longest: float) -> None:
        self.longest = longest

    def encode(self, message: Message, sender: Sender) -> Message:
        """Shortened, in float32."""
        return Message(self._shortened(message.arrays, np.float32), message.scalars)

    def decode(self, message: Message, sender: Sender) -> Message:
        """Clipped again: no client is trusted with it."""
        return Message(self._shortened(message.arrays), message.scalars)

    def _shortened(self, arrays: Mapping[str, Array], precision: type[np.floating] | None = None) -> dict[str, Array]:
        update = {name: array for name, array in arrays.items() if block_of(name).partition("@")[0] == "update"}
        short = clipped(update, self.longest)
        if precision is not None:
            short = {name: array.astype(precision, copy=False) for name, array in short.items()}
        return {**arrays, **short}


class _ClientLevel(Link):
    """DP-FedAvg: what a client adds to the model is at most ``clip`` long, and noise hides it.

    The unit is a client with all its examples and rounds. In a simulation noise comes from the recipe's seed: **the
    guarantee is void towards anybody who knows the seed**. In a deployment the server's comes from a secret of the run,
    so that a resumed run is the one that was interrupted, and a client's from the operating system's generator.
    """

    lossy = True
    released = "a model after every round"
    """What anybody sees that the guarantee is about."""
    replaces = False
    """Whether neighbours differ by an update that is another one, and not by one that is there or not."""

    def __init__(self, privacy: Privacy, rounds: int, sampled: tuple[int, int] | None, seed: Seed) -> None:
        """sampled: of how many clients a round draws how many, where nobody knows whom; None: all count in full."""
        self.privacy, self.rounds, self.sampled, self.seed = privacy, rounds, sampled or (None, None), seed

    @cached_property
    def multiplier(self) -> float:
        """Standard deviation of the noise in units of the sensitivity."""
        return noise_multiplier(self.privacy.epsilon, self.privacy.delta, self.rounds, *self.sampled)

    @property
    def deviation(self) -> float:
        """Standard deviation of the noise on each number of the sum, or of a client's update."""
        raise NotImplementedError

    def clipped(self, arrays: Mapping[str, Array]) -> dict[str, Array]:
        """No longer than ``clip``; zeros for an update that is not finite, which must not show."""
        if not np.isfinite(norm(arrays)):
            return {name: np.zeros_like(array) for name, array in arrays.items()}
        return clipped(arrays, self.privacy.clip)

    def noised(self, arrays: Mapping[str, Array], *key: int) -> dict[str, Floats]:
        """With noise on every number; key: the round, and the client where it is a client's noise."""
        rng = generator_of(hiding(self.seed, arrays.values()), _NOISE, *key)
        return {
            name: np.asarray(rng.normal(array.astype(np.float64), self.deviation)) for name, array in arrays.items()
        }

    def epsilon(self, rounds: int) -> float:
        """ε after so many rounds."""
        return spent(self.multiplier, self.privacy.delta, rounds, *self.sampled) if rounds else 0.0

    def spent(self, rounds: int) -> dict[str, Any]:
        """The guarantee of so many rounds, for a client, and for one of its examples, which another one replaces."""
        privacy, epsilon = self.privacy, self.epsilon(rounds)
        return {
            "epsilon": epsilon,
            "delta": privacy.delta,
            "unit": "client",
            "example_epsilon": epsilon if self.replaces else doubled(epsilon, privacy.delta),
            "noise": privacy.noise,
            "noise_multiplier": self.multiplier,
            "clip": privacy.clip,
            "released": self.released,
        }


class ServerNoise(_ClientLevel):
    """Noise on the sum of a round: hides from whoever sees the models whether a client took part.

    Where a round draws some of the clients, the server keeps to itself whom. The sum is divided by the number of
    clients that a round asks, which everybody knows, not by how many answered; a task counts as many as a round asks of
    it on average, and one at least. A client's whole update, over all tasks, is no longer than ``clip``: the noise is
    the same for all of them, those without any reply included.
    """

    def __init__(
        self,
        privacy: Privacy,
        rounds: int,
        asked: int,
        clients: Mapping[str, int],
        blocks: Callable[[], Blocks],
        seed: Seed,
    ) -> None:
        """clients: all of them, by the block that they send; blocks: what they send now, of all tasks."""
        super().__init__(privacy, rounds, (asked, clients["update"]), seed)
        self.asked, self.clients, self.blocks = asked, clients, blocks

    @property
    def replaces(self) -> bool:  # type: ignore[override]
        """Where a round draws some of the clients."""
        return self.asked < self.clients["update"]

    @property
    def deviation(self) -> float:
        """Of the noise on each number of the sum."""
        return self.multiplier * sensitivity(self.privacy.clip, self.asked, self.clients["update"])

    def encode(self, message: Message, sender: Sender) -> Message:
        """Clipped; nothing else is sent."""
        return Message({name: a.astype(np.float32) for name, a in self.clipped(message.arrays).items()})

    def decode(self, message: Message, sender: Sender) -> Message:
        """Clipped again."""
        return Message(self.clipped(message.arrays))

    def finish(self, total: Total, round: int) -> Total:
        """Noise on every sum, and public numbers of clients."""
        sums = {name: total.sums.get(name, np.zeros(shape)) for name, shape in self.blocks().items()}
        everybody = self.clients["update"]
        weights = {block: max(self.asked * count / everybody, 1.0) for block, count in self.clients.items()}
        return Total(self.noised(sums, round), weights)


class ClientNoise(_ClientLevel):
    """Noise on every update: hides the update itself from the server.

    Any two updates of length ``clip`` are 2 · clip apart at most. The server sees who takes part, so every round counts
    in full, and a client that is drawn less often has spent less than what is reported.
    """

    released = "every client's update in every round"
    replaces = True

    @property
    def deviation(self) -> float:
        """Of the noise on each number of an update."""
        return self.multiplier * 2 * self.privacy.clip

    def encode(self, message: Message, sender: Sender) -> Message:
        """Clipped, with noise; nothing else is sent."""
        arrays = self.noised(self.clipped(message.arrays), sender.round, sender.client)
        return Message({name: array.astype(np.float32) for name, array in arrays.items()})


class SumNoise(_ClientLevel):
    """Noise on the secure sum of a round, a share by every client: hides from the server, too, what a client adds.

    Neighbours differ by one client that sends zeros instead of its update: the server sees who takes part, so no round
    counts less because it draws some of the clients. The sum is divided by the number of clients that a round asks.
    """

    released = "the total of every round"

    def __init__(self, privacy: Privacy, rounds: int, asked: int, blocks: Callable[[], Blocks], seed: Seed) -> None:
        """asked: how many clients a round asks; blocks: what they send."""
        super().__init__(privacy, rounds, None, seed)
        self.asked, self.blocks = asked, blocks

    @cached_property
    def shared(self) -> SharedNoise:
        """What each client adds to the sum."""
        dim = sum(int(np.prod(shape)) for shape in self.blocks().values())
        return SharedNoise.of(self.privacy, self.privacy.clip, dim, self.asked, self.rounds, self.seed)

    @property
    def multiplier(self) -> float:
        """Of what is left of the budget for a Gaussian mechanism."""
        return self.shared.multiplier

    @property
    def deviation(self) -> float:
        """Of the noise on each number of the sum."""
        return self.shared.deviation

    def encode(self, message: Message, sender: Sender) -> Message:
        """Clipped; nothing else is sent."""
        return Message({name: a.astype(np.float32) for name, a in self.clipped(message.arrays).items()})

    def decode(self, message: Message, sender: Sender) -> Message:
        """Clipped again."""
        return Message(self.clipped(message.arrays))

    def finish(self, total: Total, round: int) -> Total:
        """A public number of clients."""
        return Total(total.sums, {"update": float(self.asked)} if total.sums else {})

    def epsilon(self, rounds: int) -> float:
        """ε after so many rounds."""
        return self.shared.spent(rounds)


class HideTask(Link):
    """A client sends zeros for the tasks that are not its own, and which is its own in `present` [T].

    A server that sees sums only does not learn a client's task from them.
    """

    def __init__(self, tasks: Sequence[str], blocks: Callable[[], Blocks]) -> None:
        """blocks: what clients of all tasks send now."""
        self.tasks, self.blocks = tuple(tasks), blocks

    def encode(self, message: Message, sender: Sender) -> Message:
        """Padded."""
        zeros = {n: np.zeros(s, np.float32) for n, s in self.blocks().items() if n not in message.arrays}
        present = np.eye(len(self.tasks), dtype=np.float32)[sender.task]
        return Message({**message.arrays, **zeros, "present": present}, message.scalars)

    def decode(self, message: Message, sender: Sender) -> Message:
        """Without what belongs to other tasks."""
        present = message.array("present", "float32", (len(self.tasks),))
        if not np.isin(present, (0, 1)).all() or present.sum() != 1:
            raise MessageError("a client says that it has no task, or more than one")
        arrays = {name: message.array(name, "float32", shape) for name, shape in self.blocks().items()}
        mine = ("", self.tasks[int(present.argmax())])
        return Message({n: a for n, a in arrays.items() if n.partition("@")[2] in mine}, message.scalars)


def median(values: Floats) -> Floats:
    """Of each coordinate of values [n, ...] by itself (Yin et al., ICML 2018)."""
    return np.asarray(np.median(values, axis=0))


def trimmed_mean(values: Floats, trim: float) -> Floats:
    """Of each coordinate of values [n, ...]: without the share ``trim`` at each end, and one at least where n >= 3."""
    count = len(values)
    cut = max(int(trim * count + _ROUNDED), 1 if count >= 3 else 0)
    return np.asarray(np.sort(values, axis=0)[cut : count - cut].mean(axis=0))
