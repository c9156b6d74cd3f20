"""FedProx: a pull of each client towards the global model (Li et al., MLSys 2020).

Each client minimises its loss + μ/2 ‖w − w_global‖². What travels is FedAvg's. With μ = 0 it is FedAvg.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import NonNegativeFloat, PositiveFloat

from headstart.config.stage import TrainingStage
from headstart.core.reply import ClientResult
from headstart.methods.base import Received
from headstart.methods.registry import register
from headstart.methods.training import Training
from headstart.solvers.cohort import Cohort
from headstart.solvers.objective import Objective


class FedProxStage(TrainingStage):
    """FedAvg with a pull towards the global model (Li et al., MLSys 2020)."""

    method: Literal["fedprox"]
    mu: NonNegativeFloat = 0.01
    """μ: strength of the pull towards the server's model."""
    server_lr: PositiveFloat = 1.0
    """Learning rate of the server's step along the mean update; 1: the mean itself."""


class FedProx(Training[Any]):
    """FedAvg with a proximal term."""

    def client_update(self, cohort: Cohort, received: Received) -> ClientResult:
        """The proximal term is part of the gradient, so that momentum sees it."""
        local = self.solve(received.model, cohort, received.round, Objective(self.stage.mu))
        return self.result(cohort, local, update=local.params - received.model)


register(FedProxStage, FedProx)
