"""Local only: every client trains for itself, from the model that the stage starts with, and nothing travels.

A client's model and velocity go on from round to round: with one local epoch a round, this is plain SGD for as many
epochs as the rounds that the client was drawn for.
"""

from __future__ import annotations

from typing import ClassVar, Literal, TypeVar

from headstart.config.stage import LocalStage, Part, TrainingStage
from headstart.core.params import Shapes
from headstart.core.plan import Role
from headstart.core.reply import ClientResult
from headstart.methods.base import Received, StageContext
from headstart.methods.registry import register
from headstart.methods.training import Training
from headstart.solvers.cohort import Cohort
from headstart.solvers.objective import Objective

StageT = TypeVar("StageT", bound=TrainingStage | LocalStage)


class LocalOnlyStage(TrainingStage):
    """Every client trains for itself, and nothing travels."""

    communicates: ClassVar[bool] = False
    representation: ClassVar[Role] = "personal"
    classifier: ClassVar[Role] = "personal"
    method: Literal["local-only"]
    train: Part = "all"


class LocalOnly(Training[StageT]):
    """FedAvg under a plan that keeps everything personal."""

    def __init__(self, stage: StageT, context: StageContext) -> None:
        self.keeps = ("velocity",) if stage.momentum else ()
        super().__init__(stage, context)

    @property
    def kept_with(self) -> Shapes:
        """A velocity for every parameter; statistics have none."""
        return {name: shape for name, shape in self.personal_shapes.items() if name in self.start}

    def client_update(self, cohort: Cohort, received: Received) -> ClientResult:
        """SGD goes on where the client's last round stopped."""
        velocity = self.kept("velocity", cohort) if self.keeps else None
        trains = frozenset(name for name in received.model if self.plan.trains(name)) if self.plan.still else None
        objective = Objective(velocity=velocity, trains=trains, in_place=frozenset(self.personal_shapes))
        local = self.solve(received.model, cohort, received.round, objective)
        return self.result(cohort, local, {"velocity": velocity | local.velocity} if velocity else {})


register(LocalOnlyStage, LocalOnly)
