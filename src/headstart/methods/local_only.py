"""Local only: every client trains for itself, from the model that the stage starts with, and nothing travels.

A client's model and velocity go on from round to round: with one local epoch a round, this is plain SGD for as many
epochs as the rounds that the client was drawn for.
"""

from __future__ import annotations

from typing import TypeVar

from headstart.config.stage import LocalOnlyStage, PersonaliseStage
from headstart.core.ledger import Published
from headstart.core.message import Message
from headstart.core.params import Shapes
from headstart.core.statistics import Ints
from headstart.methods.base import Setting
from headstart.methods.training import TrainingMethod, TrainingState
from headstart.solvers.cohort import Cohort
from headstart.solvers.heads import LocalResult, Objective, Stack

StageT = TypeVar("StageT", bound=LocalOnlyStage | PersonaliseStage)


class LocalOnlyMethod(TrainingMethod[StageT]):
    """FedAvg under a plan that keeps everything personal."""

    def __init__(self, stage: StageT, setting: Setting) -> None:
        self.keeps = ("velocity",) if stage.momentum else ()
        super().__init__(stage, setting)

    def kept_with(self, what: str) -> Shapes:
        """A velocity for every parameter; statistics have none."""
        return {name: shape for name, shape in self._mine.items() if name not in self._statistics}

    def train(
        self, start: Stack, cohort: Cohort, message: Message, sizes: Ints
    ) -> tuple[LocalResult, dict[str, Stack], dict[str, Stack]]:
        """SGD goes on where the client's last round stopped."""
        velocity = self.remembered("velocity", cohort) if self.keeps else None
        moves = self.setting.moves
        only = None if moves is None else frozenset(n for n in start if n.startswith("head.") == (moves == "head"))
        result = self.solve(start, cohort, int(message.scalars["round"]), Objective(velocity=velocity, moves=only))
        return result, {}, {"velocity": velocity | result.velocity} if velocity else {}

    def published(self, state: TrainingState, counts: Ints) -> Published:
        """No paper counts it."""
        return Published(0, super().published(state, counts).forward_passes, "nothing travels")
