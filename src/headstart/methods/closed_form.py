"""What closed forms share: one pass over the client's features, statistics up, a head that the server solves for."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from headstart.core.message import Message
from headstart.core.params import Params
from headstart.core.reply import StatisticsResult
from headstart.core.statistics import (
    ClientStatistics,
    Features,
    Floats,
    Ints,
    Moments,
    Summary,
    Transform,
    shorten,
    summarise,
)
from headstart.core.update import StatisticsTotal
from headstart.errors import MessageError
from headstart.heads import LinearHead
from headstart.heads.calibrate import N_TEMPERATURES, least, losses, temperature_of, temperatures
from headstart.methods.base import ALONE, Arrays, Method, Received, StageContext
from headstart.solvers.cohort import Cohort


@dataclass(frozen=True)
class ClosedFormState:
    """What the server has received: one total, or, where every client's rows are kept, one part for each round; and the
    examples' losses at each temperature of the grid, added up."""

    parts: tuple[ClientStatistics, ...] = ()
    losses: tuple[ClientStatistics, ...] = ()
    earlier: tuple[ClientStatistics, ...] = ()
    """The total of the pass before, where what clients say depends on it."""
    number: int = 0
    """The pass over the clients that the parts are of."""
    clients: dict[str, ClientStatistics] = field(default_factory=dict)
    """The statistics of each client, by its number, where they are kept: the parts are then their sum, by client."""

    @property
    def rows(self) -> int:
        """Class means that were received."""
        return sum(len(part.labels) for part in self.parts)


class ClosedForm(Method[ClosedFormState]):
    """A subclass says which second moments it needs, and what head the statistics make.

    A subclass whose head depends on every client's rows, on a map of the features or on several means of a class says
    so in `summary`, `transform` and `parts`.
    """

    moments: Moments | None = None
    state_type = ClosedFormState
    transform: Transform | None = None
    """A map of the features before they are summed."""

    def __init__(self, stage: Any, context: StageContext) -> None:
        self.stage, self.context = stage, context
        self.validation: tuple[Features, Ints] | None = None
        """The server's features [n, d] and labels [n] to calibrate on, where the stage asks for that."""
        self._solved: tuple[tuple[ClientStatistics, ...], LinearHead, Floats] | None = None

    @property
    def summary(self) -> Summary:
        """What clients say of their features."""
        kept = self.stage.keep_statistics
        return Summary(self.context.task.n_classes, self.context.dim, self.moments, kept=kept)

    @property
    def memory_per_client(self) -> int:  # type: ignore[override]
        """Where every client's statistics are kept, a cohort has room for no second one."""
        return ALONE if self.stage.keep_statistics else 0

    @property
    def summaries(self) -> tuple[Summary, ...]:
        """What clients say in each pass."""
        learned = int(self.stage.passes) - self._calibrates
        return (self.summary,) * learned + (Summary(1, N_TEMPERATURES),) * self._calibrates

    @property
    def _calibrates(self) -> bool:
        """Whether the last pass is for the temperature."""
        return bool(self.stage.temperature == "auto")

    def pass_of(self, round: int) -> int:
        """The pass over the clients that a round (from 0) belongs to."""
        return int(self.stage.turn(round, self.context.population.clients))

    def _is_calibration(self, round: int) -> bool:
        return self._calibrates and self.pass_of(round) == self.stage.passes - 1

    @abstractmethod
    def solve(self, total: ClientStatistics) -> LinearHead:
        """The head of all statistics received so far."""

    def init(self) -> ClosedFormState:
        """Nothing received yet."""
        return ClosedFormState()

    def optimism(self, total: ClientStatistics, head: LinearHead) -> tuple[float, Floats]:
        """How much better a head fits its own examples than others, as `ridge_optimism` has it; nothing by default."""
        return 1.0, np.zeros(self.context.task.n_classes)

    def broadcast(self, state: ClosedFormState, round: int, since: int, task: int = 0) -> Message:
        """The number of the round: all that a client has to know; to calibrate, the head, and what to try with it."""
        if not self._is_calibration(round) or not state.rows:
            return Message(self.broadcast_arrays(state, self.pass_of(round)), {"round": round})
        head, grid = self._solve(state)
        factor, own = self.optimism(self._total(state), head)
        arrays = {f"head.{name}": array for name, array in head.arrays().items()}
        return Message({**arrays, "grid": grid, "own": own}, {"round": round, "factor": factor})

    def broadcast_arrays(self, state: ClosedFormState, number: int) -> dict[str, npt.NDArray[Any]]:
        """What a pass (from 0) tells clients of the one before."""
        return {}

    def receive(self, cohort: Cohort, message: Message) -> Received:
        """The number of the round, and the head or the centres where there are any."""
        scalars, round = {name: float(value) for name, value in message.scalars.items()}, int(message.scalars["round"])
        if message.arrays:
            self.check_received(message, round)
        return Received(round, blocks={"": Params(message.arrays)}, scalars=scalars)

    def check_received(self, message: Message, round: int) -> None:
        """Refuse what could fail with some examples, and not with others."""
        if not self._is_calibration(round):
            raise MessageError(f"{self.stage.method} sends clients no arrays in round {round + 1}")
        classes = self.context.task.n_classes
        message.array("own", "float64", (classes,))
        if not (message.array("grid", "float64", (N_TEMPERATURES,)) > 0).all():  # type: ignore[operator]
            raise MessageError("a temperature of the grid is not above 0")
        rows = len(message.array("head.weight", "float32", (None, None)))
        bias = np.asarray(message.arrays.get("head.bias"))
        if rows != classes * self.stage.rows_per_class or bias.shape != (rows,) or not (bias < np.inf).all():
            raise MessageError("the head to calibrate is of other classes than the data")

    def client_update(self, cohort: Cohort, received: Received) -> StatisticsResult:
        """Statistics of each client's classes, or the losses of its examples."""
        passes = np.where(cohort.new, cohort.sizes, 0)
        if self._is_calibration(received.round):
            return StatisticsResult(*self._losses(cohort, received), passes)
        statistics, owners = summarise(
            self.vectors(cohort),
            self.labels(cohort, received),
            self.summary.n_classes,
            clients=cohort.owners,
            parts=self.parts(cohort),
            moments=self.moments,
            rows=cohort.rows,
            transform=self._transform(cohort.clip),
            rank=self.summary.rank,
            sketch=self.summary.sketch,
            seed=self.context.seed,
            min_examples=self.stage.min_examples,
        )
        return StatisticsResult(statistics, owners, passes)

    def _losses(self, cohort: Cohort, received: Received) -> tuple[ClientStatistics, Ints]:
        """The sum of each client's losses at each temperature; an example of a masked class has none."""
        given = received[""]
        if "grid" not in given:
            return Summary(1, N_TEMPERATURES).empty(), np.zeros(0, np.int64)
        head = self.load(Message({n.removeprefix("head."): a for n, a in given.items() if n.startswith("head.")}))
        scores = head.scores(cohort.features[cohort.rows]).astype(np.float64) * received.scalars["factor"]
        scores[np.arange(len(scores)), cohort.labels] -= given["own"][cohort.labels]
        known = np.isfinite(scores[np.arange(len(scores)), cohort.labels])
        found = losses(scores[known], cohort.labels[known], given["grid"])
        return summarise(found, np.zeros(len(found), np.int64), 1, clients=cohort.owners[known])

    def labels(self, cohort: Cohort, received: Received) -> Ints:
        """What each example [n] is counted and summed as: its class, unless a method has it otherwise."""
        return cohort.labels

    def vectors(self, cohort: Cohort) -> Features:
        """What is summed [N, …]: the features."""
        return cohort.features

    def parts(self, cohort: Cohort) -> Ints | None:
        """Random parts of a client's class, where each part is to speak for itself."""
        return None

    def _transform(self, clip: float | None) -> Transform | None:
        if clip is None:
            return self.transform

        def clipped(features: Features) -> Features:
            return shorten(features if self.transform is None else self.transform(features), clip)

        return clipped

    def server_update(self, state: ClosedFormState, total: StatisticsTotal, round: int) -> ClosedFormState:
        """Add the statistics of the round, or put them beside the others; every pass begins anew."""
        if not total.parts:
            return state
        if self._is_calibration(round):
            return replace(state, losses=(total.merged().merge(*state.losses).pooled(),))
        if (number := self.pass_of(round)) > state.number:
            state = ClosedFormState((), earlier=state.parts, number=number)
        if self.stage.keep_statistics:
            return self.of_clients(state.clients | {str(client): each for client, each in total.kept.items()})
        if self.summary.rows:
            return replace(state, parts=(*state.parts, total.merged()))
        return replace(state, parts=(self.summary.empty().merge(*state.parts, *total.parts).pooled(),))

    def of_clients(self, clients: Mapping[str, ClientStatistics]) -> ClosedFormState:
        """The state of each client's statistics, added up in the order of their numbers, whenever they replied.

        Floating-point sums depend on their order: so the state with clients that came and went is, to the bit, that of
        those that are left.
        """
        kept = {client: clients[client] for client in sorted(clients, key=int)}
        total = self.summary.empty().merge(*kept.values())
        return ClosedFormState((total if self.summary.rows else total.pooled(),), clients=kept)

    def head(self, state: ClosedFormState) -> LinearHead:
        """The head, with its temperature. Before the first reply, every class is masked."""
        if not state.rows:
            none = np.zeros(0, np.int64)
            return LinearHead.from_classes(
                self.context.task.n_classes, none, np.zeros((0, self.context.dim)), np.zeros(0)
            )
        (head, grid), chosen = self._solve(state), self.stage.temperature
        if chosen == "auto":
            chosen = least(grid, state.losses[0].sums[0]) if state.losses else 1.0
        elif chosen == "validation":
            chosen = temperature_of(head.scores(self.validation[0]), self.validation[1]) if self.validation else 1.0
        else:
            return replace(head, temperature=chosen)
        return replace(head, temperature=chosen, notes={**head.notes, "temperature": chosen})

    def _total(self, state: ClosedFormState) -> ClientStatistics:
        """All statistics received, as what can be solved for."""
        return state.parts[0].merge(*state.parts[1:]).solvable()

    def _solve(self, state: ClosedFormState) -> tuple[LinearHead, Floats]:
        """The head before its temperature, and those to try; of the same statistics it is solved for once."""
        if self._solved is None or self._solved[0] is not state.parts:
            total = self._total(state)
            head, grid = self.solve(total), np.zeros(0)
            if self.stage.temperature == "auto":
                known = total.pooled()
                grid = temperatures(known.sums / known.counts[:, None] @ head.weight.T + head.bias)
            self._solved = state.parts, head, grid
        return self._solved[1:]

    def model(self, state: ClosedFormState, task: int = 0) -> Message:
        """The head."""
        return Message(self.head(state).arrays())

    def load(self, message: Message, task: int = 0, personal: Arrays | None = None) -> LinearHead:
        """The head; the backbone is left alone."""
        return LinearHead.of_arrays({name: array.astype(np.float32) for name, array in message.arrays.items()})

    def selected(self, state: ClosedFormState) -> Mapping[str, float]:
        """Hyper-parameters that the data chose."""
        return self.head(state).notes
