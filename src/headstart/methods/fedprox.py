"""FedProx: a pull of each client towards the global model (Li et al., MLSys 2020).

Each client minimises its loss + μ/2 ‖w − w_global‖². What travels is FedAvg's. With μ = 0 it is FedAvg.
"""

from __future__ import annotations

import torch

from headstart.config.stage import FedBABUStage, FedProxStage
from headstart.core.message import Message
from headstart.core.statistics import Ints
from headstart.methods.training import TrainingMethod, difference
from headstart.solvers.cohort import Cohort
from headstart.solvers.heads import LocalResult, Objective, Stack


class FedProxMethod(TrainingMethod[FedProxStage | FedBABUStage]):
    """FedAvg with a proximal term."""

    def train(
        self, start: Stack, cohort: Cohort, message: Message, sizes: Ints
    ) -> tuple[LocalResult, dict[str, Stack], dict[str, Stack]]:
        """The pull is part of the gradient, so that momentum sees it."""
        pull = torch.full((len(cohort.clients),), self.stage.mu)
        result = self.solve(start, cohort, int(message.scalars["round"]), Objective(pull))
        return result, {"update": difference(result.parameters, start)}, {}
