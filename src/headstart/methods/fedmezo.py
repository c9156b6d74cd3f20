"""FedMeZO: training with one seed and a few scalars per round (N. Bernier, Efficient fine-tuning strategies for
federated learning, MSc thesis, Concordia University, 2024, chapter 4; MeZO: Malladi et al., NeurIPS 2023).

Travels down: a seed, and the mean slopes of the rounds that the client has missed. Every client measures the slope of
its loss along the directions of the seed, g_k = (L_k(θ + εz) − L_k(θ − εz)) / 2ε, over all its examples or a random
batch of them. Travels up: one scalar per direction. The mean over the clients, weighted by all their examples, is the
slope of the pooled loss, or an unbiased estimate of it, whoever holds what; everybody then takes the same step θ ← θ −
η Σ_p g_p z_p / P. The server needs no weights, and the run is its log of seeds and scalars: whoever has the log and the
pre-trained weights has the model. Momentum, Adam's second moment and a rate that is measured are functions of the log,
and so they change nothing of that.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np
import numpy.typing as npt
from pydantic import Field, NonNegativeInt, PositiveInt

from headstart.config.stage import ZerothOrderStage
from headstart.core.message import Message
from headstart.core.params import Params
from headstart.core.reply import ClientResult
from headstart.core.statistics import Ints
from headstart.core.update import Total
from headstart.errors import MessageError
from headstart.heads import LinearHead
from headstart.methods.base import Arrays, Method, Received, StageContext
from headstart.methods.head_init import head_start
from headstart.methods.registry import register
from headstart.solvers.cohort import Cohort
from headstart.solvers.objective import learning_rate

if TYPE_CHECKING:  # methods are known before torch is loaded
    from torch import Tensor

    from headstart.solvers.network import Network
    from headstart.solvers.zeroth import Descent

# A slope that would need a loss to change by so much over the probe is no slope.
_ABSURD = 200.0
_TINY = 1e-12
NO_STEP = -1
"""In the place of a seed: a round without a reply, in which nothing moves."""


class FedMeZOStage(ZerothOrderStage):
    """One seed and a few scalars per round (N. Bernier, MSc thesis, Concordia University, 2024, chapter 4)."""

    replays: ClassVar[bool] = True
    local_steps: ClassVar[int] = 1
    method: Literal["fedmezo"]
    batch_size: PositiveInt | Literal["full"] = "full"
    """Examples of each client that a round looks at: all of them, or so many."""
    batch_share: float | None = Field(default=None, gt=0, le=1)
    """In the place of batch_size: the share of its examples that each client looks at, one at least. Every example then
    counts alike in a round, as it does in the mean; a few of a large client's are the noisier estimate."""
    probe_rounds: NonNegativeInt = 0
    """In so many rounds at first, clients send the curvature of their loss along the directions in the place of its
    slope, and nothing moves. The rate is then lr · P / h, h the root mean square of that curvature: at lr = 1 a step
    along a slope without noise goes as far as a quadratic falls; batches ask for less, such as 0.3."""
    momentum: float = Field(default=0.0, ge=0, lt=1)
    """Of the steps. Every client holds the velocity, as large as what is trained."""
    beta2: float | None = Field(default=None, ge=0, lt=1)
    """Slopes are divided by the root of a running mean of their squares, as in Adam: ``lr`` is then how far a parameter
    moves in a step, about, however steep the loss."""

    def seen(self, size: int) -> int:
        """Examples that a round looks at, of a client with so many."""
        return super().seen(size) if self.batch_share is None else max(1, round(self.batch_share * size))


@dataclass(frozen=True)
class Log:
    """The state of the server, and the model: seeds [T] and mean slopes [T, P]."""

    seeds: Ints
    """Of each step, what its directions are drawn from; `NO_STEP` where none was taken."""
    slopes: npt.NDArray[np.float32]

    @classmethod
    def of(cls, message: Message) -> Log:
        """The log in a message."""
        slopes = message.array("slopes", "float32", (None, None)).astype(np.float32)
        return cls(message.array("seeds", "int64", (len(slopes),)).astype(np.int64), slopes)

    def message(self, first: int = 0, **scalars: int) -> Message:
        """Its steps from ``first`` on."""
        return Message({"seeds": self.seeds[first:], "slopes": self.slopes[first:]}, {**scalars, "first": first})

    def appended(self, seed: int, slopes: npt.NDArray[np.float64]) -> Log:
        """The log after a step more; slopes: [P]."""
        return Log(np.append(self.seeds, seed), np.vstack([self.slopes, slopes.astype(np.float32)]))


@dataclass
class _StepSize:
    """How far the steps of a log go, from what the log has said so far."""

    stage: FedMeZOStage
    squared_curvatures: list[float] = field(default_factory=list)
    """Of the rounds that measured curvatures, in units of 2/ε: the mean of their squares over directions."""
    square: float = 0.0
    """A running mean of the squares of slopes."""
    steps: int = 0
    """That the mean is of."""

    @property
    def unit(self) -> float:
        """What the stage's learning rate is a multiple of: 1, or P / h, h the measured curvature."""
        if not self.squared_curvatures:
            return 1.0
        # The root mean square is no less than the mean, tr H, in which directions that bend down cancel others; and
        # what is rounded in a loss can only make it larger.
        curvature = 2 / self.stage.epsilon * math.sqrt(np.mean(self.squared_curvatures))
        return self.stage.num_directions / max(curvature, _TINY)

    def rate(self, number: int, slopes: npt.NDArray[np.float32]) -> float:
        """The rate of step ``number`` (from 0), which has these slopes [P]; 0 where they measure the curvature."""
        if number < self.stage.probe_rounds:
            self.squared_curvatures.append(_mean_square(slopes))
            return 0.0
        rate = learning_rate(self.stage, number) * self.unit
        if self.stage.beta2 is None:
            return rate
        beta, self.steps = self.stage.beta2, self.steps + 1
        self.square = beta * self.square + (1 - beta) * _mean_square(slopes)
        return rate / max(math.sqrt(self.square / (1 - beta**self.steps)), _TINY)


class Replay:
    """Parameters that take the steps of a log, how many they have taken, and, where the stage may end with an earlier
    round, where they started from."""

    def __init__(self, stage: FedMeZOStage, network: Network, descent: Descent) -> None:
        self.stage, self.network, self.descent = stage, network, descent
        self._start = self.values() if stage.keep == "best" else None
        self._taken, self._step_size = 0, _StepSize(stage)
        """Steps of the log that have been taken, and how far the next one goes."""

    def values(self) -> dict[str, Tensor]:
        """The parameters as they are now, in memory of their own."""
        return {name: parameter.detach().clone() for name, parameter in self.descent.parameters.items()}

    def apply(self, first: int, log: Log) -> None:
        """Take the steps of a log that starts at step ``first``, from where the parameters are, or from the start where
        they have taken more."""
        if (last := first + len(log.seeds)) < self._taken:
            if self._start is None:
                raise MessageError(f"the log ends after step {last}, and the weights have taken {self._taken}")
            self.network.load(self._start)
            self.descent.reset()
            self._taken, self._step_size = 0, _StepSize(self.stage)
        if first > self._taken:
            raise MessageError(f"the log starts at step {first}, and the weights have taken {self._taken}")
        for number in range(self._taken, last):
            seed, slopes = int(log.seeds[number - first]), log.slopes[number - first]
            if seed != NO_STEP and (rate := self._step_size.rate(number, slopes)):
                self.descent.step(seed, slopes, rate, self.stage.weight_decay, self.stage.momentum)
            self._taken = number + 1


def _mean_square(values: npt.NDArray[np.float32]) -> float:
    return float(np.square(values.astype(np.float64)).mean())


class FedMeZO(Method[Log]):
    """Two forward passes per direction on the clients; a mean of scalars on the server."""

    replays = FedMeZOStage.replays
    state_type = Log

    def __init__(self, stage: FedMeZOStage, context: StageContext) -> None:
        from headstart.solvers.network import Network, tensors
        from headstart.solvers.zeroth import ZerothOrderProbe

        self.stage, self.context, self.plan = stage, context, context.plan
        self.weighting = stage.weighting
        self.blocks = {"slopes": (stage.num_directions,)}
        head = tensors(head_start(stage, context))
        self.network = Network(context.model, head, stage, self.plan, context.number)
        self.probes = ZerothOrderProbe(self.network, stage.epsilon)

    @cached_property
    def replay(self) -> Replay:
        """All that is trained, from where the stage found it: nobody moves it before the first step."""
        return self.replay_of(self.network.trained)

    def replay_of(self, names: Iterable[str]) -> Replay:
        """Some of what is trained, from where it is now."""
        from headstart.solvers.zeroth import Descent

        return Replay(self.stage, self.network, Descent(self.network, self.probes.perturbation, names))

    # ------------------------------------------------------------------------------------------------ on the server

    def init(self) -> Log:
        """An empty log."""
        return Log(np.zeros(0, np.int64), np.zeros((0, self.stage.num_directions), np.float32))

    def broadcast(self, state: Log, round: int, since: int, task: int = 0) -> Message:
        """This round's seed, and the log since the last round that the client took part in."""
        return state.message(max(since, 0), round=round, seed=self.seed_of(round))

    def seed_of(self, round: int) -> int:
        """What the directions of a round (from 0) are drawn from."""
        return int(np.random.default_rng([0x5EED, *self.context.seed, round]).integers(2**31))

    def check(self, message: Message) -> None:
        """Slopes are no larger than a loss can make them."""
        steepest, largest = np.abs(message.arrays["slopes"]).max(), _ABSURD / (2 * self.stage.epsilon)
        if steepest > largest:
            raise MessageError(f"a slope of {steepest:.1e} is absurd, more than {largest:.1e}")

    def server_update(self, state: Log, total: Total, round: int) -> Log:
        """The mean slopes enter the log."""
        return state.appended(self.seed_of(round), total.mean("slopes")[""])

    def model(self, state: Log, task: int = 0) -> Message:
        """The whole log."""
        return state.message()

    def selected(self, state: Log) -> dict[str, float]:
        """The rate that the curvatures gave."""
        measured = [_mean_square(slopes) for slopes in state.slopes[: self.stage.probe_rounds]]
        return {"lr": self.stage.lr * _StepSize(self.stage, measured).unit} if measured else {}

    def load(self, message: Message, task: int = 0, personal: Arrays | None = None) -> LinearHead:
        """Take the steps of the log; the head after them."""
        self.replay.apply(0, Log.of(message))
        return self.head()

    def head(self) -> LinearHead:
        """The head as it is now; the backbone is put into evaluation mode."""
        self.network.model.set_mode(False, "freeze")
        heads = {n.removeprefix("head."): p for n, p in self.network.parameters.items() if n.startswith("head.")}
        head = LinearHead.of_arrays({name: p.detach().cpu().numpy().copy() for name, p in heads.items()})
        return replace(head, temperature=self.stage.known_temperature)

    # ----------------------------------------------------------------------------------------------- on the clients

    def receive(self, cohort: Cohort, message: Message) -> Received:
        """Catch up with the log; all clients have the same weights."""
        self.replay.apply(int(message.scalars["first"]), Log.of(message))
        return Received(int(message.scalars["round"]), scalars=message.scalars)

    def client_update(self, cohort: Cohort, received: Received) -> ClientResult:
        """The slopes of each client's loss along the seed's directions; one pass serves all clients."""
        rows, count = self._rows(cohort, received.round), len(cohort.clients)
        place = np.searchsorted(cohort.clients, cohort.owners[rows])
        seen, seed = np.bincount(place, minlength=count), int(received.scalars["seed"])
        measures = received.round < self.stage.probe_rounds
        along = self.probes.curvatures if measures else self.probes.slopes
        directions = range(self.stage.num_directions)
        found = [np.bincount(place, along(cohort, rows, seed, number), count) / seen for number in directions]
        slopes = np.stack(found, axis=1).astype(np.float32)
        passes = (3 if measures else 2) * self.stage.num_directions * seen
        if not self.plan.changes_features:  # the backbone is passed once, and the head is nothing beside it
            passes = np.where(cohort.new, cohort.sizes, 0)
        return ClientResult({"slopes": Params({"": slopes})}, passes, {"examples": cohort.sizes})

    def _rows(self, cohort: Cohort, round: int) -> Ints:
        """Positions of the examples that this round looks at: all, or so many of each client, drawn at random."""
        if self.stage.batch_size == "full" and self.stage.batch_share is None:
            return np.arange(len(cohort.rows))
        starts = np.searchsorted(cohort.owners, cohort.clients)
        drawn = []
        for client, start, size in zip(cohort.clients, starts, cohort.sizes, strict=True):
            rng = np.random.default_rng([0x3E20, *self.context.seed, round, int(client)])
            drawn.append(np.sort(start + rng.permutation(size)[: self.stage.seen(int(size))]))
        return np.concatenate(drawn)


def joined(earlier: Message | None, news: Message) -> Message:
    """The whole log of a client: what it was sent before, and then the new rounds."""
    first = int(news.scalars["first"])
    if not first:
        return news
    known = 0 if earlier is None else len(next(iter(earlier.arrays.values())))
    if earlier is None or known < first:
        raise MessageError(f"the log starts at step {first}, and {known} steps are known")
    arrays = {name: np.concatenate([earlier.arrays[name][:first], news.arrays[name]]) for name in news.arrays}
    return Message(arrays, {**news.scalars, "first": 0})


register(FedMeZOStage, FedMeZO)
