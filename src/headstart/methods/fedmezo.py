"""FedMeZO: training with one seed and a few scalars per round (thesis, chapter 4; MeZO: Malladi et al., NeurIPS 2023).

Travels down: a seed, and the mean slopes of the rounds that the client has missed. Every client measures the slope of
its loss along the directions of the seed, g_k = (L_k(θ + εz) − L_k(θ − εz)) / 2ε, over all its examples or a random
batch of them. Travels up: one scalar per direction. The mean over the clients, weighted by all their examples, is the
slope of the pooled loss, or an unbiased estimate of it, whoever holds what; everybody then takes the same step θ ← θ −
η Σ_p g_p z_p / P. The server needs no weights, and the run is its log of seeds and scalars: whoever has the log and the
pre-trained weights has the model.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import numpy as np
import numpy.typing as npt
from pydantic import PositiveInt

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

# A slope that would need a loss to change by so much over the probe is no slope.
_ABSURD = 200.0


class FedMeZOStage(ZerothOrderStage):
    """One seed and a few scalars per round (thesis, chapter 4)."""

    replays: ClassVar[bool] = True
    method: Literal["fedmezo"]
    batch_size: PositiveInt | Literal["full"] = "full"
    """Examples of each client that a round looks at: all of them, or so many."""


@dataclass(frozen=True)
class Log:
    """The state of the server, and the model: seeds [T] and mean slopes [T, P]."""

    seeds: Ints
    slopes: npt.NDArray[np.float32]

    @classmethod
    def of(cls, message: Message) -> Log:
        """The log in a message."""
        return cls(message.arrays["seeds"].astype(np.int64), message.arrays["slopes"].astype(np.float32))

    def message(self, first: int = 0, **scalars: int) -> Message:
        """Its steps from ``first`` on."""
        return Message({"seeds": self.seeds[first:], "slopes": self.slopes[first:]}, {**scalars, "first": first})


class FedMeZO(Method[Log]):
    """Two forward passes per direction on the clients; a mean of scalars on the server."""

    replays = FedMeZOStage.replays
    state_type = Log

    def __init__(self, stage: FedMeZOStage, context: StageContext) -> None:
        from headstart.solvers.network import Network, tensors
        from headstart.solvers.zeroth import ZerothOrder

        self.stage, self.context, self.plan = stage, context, context.plan
        self.weighting = stage.weighting
        self.blocks = {"slopes": (stage.num_directions,)}
        self.network = Network(context.model, tensors(head_start(stage, context)), stage, self.plan)
        self.probes = ZerothOrder(self.network, stage.epsilon)
        self._taken = 0
        """Steps of the log that the weights have taken."""
        self._start = {name: parameter.detach().clone() for name, parameter in self.network.trained.items()}

    # ------------------------------------------------------------------------------------------------ on the server

    def init(self) -> Log:
        """An empty log."""
        return Log(np.zeros(0, np.int64), np.zeros((0, self.stage.num_directions), np.float32))

    def broadcast(self, state: Log, round: int, since: int, task: int = 0) -> Message:
        """This round's seed, and the log since the last round that the client took part in."""
        return state.message(max(since, 0), round=round, seed=self._seed(round))

    def _seed(self, round: int) -> int:
        return int(np.random.default_rng([0x5EED, *self.context.seed, round]).integers(2**31))

    def check(self, message: Message) -> None:
        """Slopes are no larger than a loss can make them."""
        steepest, largest = np.abs(message.arrays["slopes"]).max(), _ABSURD / (2 * self.stage.epsilon)
        if steepest > largest:
            raise MessageError(f"a slope of {steepest:.1e} is absurd, more than {largest:.1e}")

    def server_update(self, state: Log, total: Total, round: int) -> Log:
        """The mean slopes enter the log."""
        slopes = total.mean("slopes")[""].astype(np.float32)
        return Log(np.append(state.seeds, self._seed(round)), np.vstack([state.slopes, slopes]))

    def model(self, state: Log, task: int = 0) -> Message:
        """The whole log."""
        return state.message()

    def load(self, message: Message, task: int = 0, personal: Arrays | None = None) -> LinearHead:
        """Take the steps of the log; the head after them."""
        self._follow(0, Log.of(message))
        self.network.model.set_mode(False, "freeze")
        heads = {n.removeprefix("head."): p for n, p in self.network.parameters.items() if n.startswith("head.")}
        head = LinearHead.of_arrays({name: p.detach().cpu().numpy().copy() for name, p in heads.items()})
        return replace(head, temperature=self.stage.known_temperature)

    # ----------------------------------------------------------------------------------------------- on the clients

    def receive(self, cohort: Cohort, message: Message) -> Received:
        """Catch up with the log; all clients have the same weights."""
        self._follow(int(message.scalars["first"]), Log.of(message))
        return Received(int(message.scalars["round"]), scalars=message.scalars)

    def client_update(self, cohort: Cohort, received: Received) -> ClientResult:
        """The slopes of each client's loss along the seed's directions; one pass serves all clients."""
        rows, count = self._rows(cohort, received.round), len(cohort.clients)
        place = np.searchsorted(cohort.clients, cohort.owners[rows])
        seen, seed = np.bincount(place, minlength=count), int(received.scalars["seed"])
        slopes = np.stack(
            [
                np.bincount(place, self.probes.slopes(cohort, rows, seed, number), count) / seen
                for number in range(self.stage.num_directions)
            ],
            axis=1,
        ).astype(np.float32)
        passes = 2 * self.stage.num_directions * seen
        if not self.plan.changes_features:  # the backbone is passed once, and the head is nothing beside it
            passes = np.where(cohort.new, cohort.sizes, 0)
        return ClientResult({"slopes": Params({"": slopes})}, passes, {"examples": cohort.sizes})

    def _rows(self, cohort: Cohort, round: int) -> Ints:
        """Positions of the examples that this round looks at: all, or so many of each client, drawn at random."""
        if self.stage.batch_size == "full":
            return np.arange(len(cohort.rows))
        starts = np.searchsorted(cohort.owners, cohort.clients)
        drawn = []
        for client, start, size in zip(cohort.clients, starts, cohort.sizes, strict=True):
            rng = np.random.default_rng([0x3E20, *self.context.seed, round, int(client)])
            drawn.append(np.sort(start + rng.permutation(size)[: self.stage.batch_size]))
        return np.concatenate(drawn)

    def _follow(self, first: int, log: Log) -> None:
        """Take the steps of a log that starts at step ``first``, from where the weights are, or from the start where
        they have taken more."""
        if first + len(log.seeds) < self._taken:
            self.network.load(self._start)
            self._taken = 0
        if first > self._taken:
            raise MessageError(f"the log starts at step {first}, and the weights have taken {self._taken}")
        for number in range(self._taken, first + len(log.seeds)):
            rate = learning_rate(self.stage, number)
            self.probes.step(int(log.seeds[number - first]), log.slopes[number - first], rate, self.stage.weight_decay)
            self._taken = number + 1


def joined(earlier: Message | None, news: Message) -> Message:
    """The whole log of a client: what it was sent before, and then the new rounds."""
    first = int(news.scalars["first"])
    if not first:
        return news
    known = 0 if earlier is None else len(earlier.arrays["seeds"])
    if earlier is None or known < first:
        raise MessageError(f"the log starts at step {first}, and {known} steps are known")
    arrays = {name: np.concatenate([earlier.arrays[name][:first], news.arrays[name]]) for name in news.arrays}
    return Message(arrays, {**news.scalars, "first": 0})


register(FedMeZOStage, FedMeZO)
