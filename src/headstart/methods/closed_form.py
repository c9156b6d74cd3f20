"""What closed forms share: one pass over the client's features, statistics up, a head that the server solves for."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from headstart.core.message import Message
from headstart.core.reply import StatisticsResult
from headstart.core.statistics import ClientStatistics, Features, Ints, Moments, Summary, Transform, shorten, summarise
from headstart.core.update import StatisticsTotal
from headstart.heads import LinearHead
from headstart.methods.base import Arrays, Method, Received, StageContext
from headstart.solvers.cohort import Cohort


@dataclass(frozen=True)
class ClosedFormState:
    """What the server has heard: one total, or, where every client's rows are kept, one part for each round."""

    parts: tuple[ClientStatistics, ...] = ()

    @property
    def rows(self) -> int:
        """Class means that were heard."""
        return sum(len(part.labels) for part in self.parts)


class ClosedForm(Method[ClosedFormState]):
    """A subclass says which second moments it needs, and what head the statistics make.

    A subclass whose head depends on every client's rows, on a map of the features or on several means of a class says
    so in `summary`, `transform` and `parts`.
    """

    one_shot = True
    moments: Moments | None = None
    state_type = ClosedFormState
    transform: Transform | None = None
    """A map of the features before they are summed."""

    def __init__(self, stage: Any, context: StageContext) -> None:
        self.stage, self.context = stage, context
        self._solved: tuple[ClosedFormState, LinearHead] | None = None

    @property
    def summary(self) -> Summary:
        """What clients say of their features."""
        return Summary(self.context.task.n_classes, self.context.dim, self.moments)

    @abstractmethod
    def solve(self, total: ClientStatistics) -> LinearHead:
        """The head that everything heard so far makes."""

    def init(self) -> ClosedFormState:
        """Nothing heard yet."""
        return ClosedFormState()

    def broadcast(self, state: ClosedFormState, round: int, since: int, task: int = 0) -> Message:
        """The number of the round: all that a client has to know."""
        return Message(scalars={"round": round})

    def receive(self, cohort: Cohort, message: Message) -> Received:
        """The number of the round."""
        return Received(int(message.scalars["round"]))

    def client_update(self, cohort: Cohort, received: Received) -> StatisticsResult:
        """Statistics of each client's classes."""
        statistics, owners = summarise(
            self.vectors(cohort),
            cohort.labels,
            self.summary.n_classes,
            clients=cohort.owners,
            parts=self.parts(cohort),
            moments=self.moments,
            rows=cohort.rows,
            transform=self._transform(cohort.clip),
            rank=self.summary.rank,
            seed=self.context.seed,
            min_examples=self.stage.min_examples,
        )
        return StatisticsResult(statistics, owners, cohort.sizes)

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
        """Add the statistics of the round, or put them beside the others."""
        if not total.parts:
            return state
        if self.summary.rows:
            return ClosedFormState((*state.parts, total.merged()))
        return ClosedFormState((self.summary.empty().merge(*state.parts, *total.parts).pooled(),))

    def head(self, state: ClosedFormState) -> LinearHead:
        """The head; of the same state it is solved for once. Where nobody was heard yet, every class is masked."""
        if self._solved is None or self._solved[0] is not state:
            self._solved = state, self._head(state)
        return self._solved[1]

    def _head(self, state: ClosedFormState) -> LinearHead:
        if not state.rows:
            none = np.zeros(0, np.int64)
            classes = self.context.task.n_classes
            return LinearHead.from_classes(classes, none, np.zeros((0, self.context.dim)), np.zeros(0))
        return self.solve(state.parts[0].merge(*state.parts[1:]).solvable())

    def model(self, state: ClosedFormState, task: int = 0) -> Message:
        """The head."""
        return Message(self.head(state).arrays())

    def load(self, message: Message, task: int = 0, personal: Arrays | None = None) -> LinearHead:
        """The head; the body is left alone."""
        return LinearHead.of_arrays({name: array.astype(np.float32) for name, array in message.arrays.items()})

    def selected(self, state: ClosedFormState) -> Mapping[str, float]:
        """Hyper-parameters that the data chose."""
        return self.head(state).notes
