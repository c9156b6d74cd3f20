"""The oracle: SGD on everybody's examples in one place. Nothing travels; it is what federated methods are judged by.

The pooled examples are those of a federation of one client, which keeps its velocity from round to round: with one
local epoch a round, this is plain SGD for as many epochs as there are rounds.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from headstart.config.stage import TrainingStage
from headstart.core.reply import ClientResult
from headstart.methods.base import Received
from headstart.methods.registry import register
from headstart.methods.training import Training
from headstart.solvers.cohort import Cohort
from headstart.solvers.objective import Objective


class CentralisedStage(TrainingStage):
    """The oracle: one machine holds everybody's examples; a round is so many epochs over all of them."""

    pooled: ClassVar[bool] = True
    communicates: ClassVar[bool] = False
    one_task: ClassVar[str] = "has one machine with everybody's examples, and tasks have clients; run each as [data]"
    sgd_only: ClassVar[bool] = True
    method: Literal["centralised"]


class Centralised(Training[CentralisedStage]):
    """FedAvg's skeleton with one client."""

    keeps = ("velocity",)

    def client_update(self, cohort: Cohort, received: Received) -> ClientResult:
        """SGD goes on where the last round stopped."""
        velocity = self.kept("velocity", cohort)
        local = self.solve(received.model, cohort, received.round, Objective(velocity=velocity))
        return self.result(cohort, local, {"velocity": local.velocity}, update=local.params - received.model)


register(CentralisedStage, Centralised)
