"""DistMeZO: every client takes MeZO steps of its own, with seeds of its own, and the server averages the weights.

The naive way to distribute MeZO (also what FederatedScope's FedMeZO does): whole models travel, as in FedAvg, and the
clients' directions have nothing in common.
"""

from __future__ import annotations

from typing import Literal

from pydantic import PositiveFloat, PositiveInt

from headstart.config.stage import ZerothOrderStage
from headstart.methods.registry import register
from headstart.methods.training import Training
from headstart.solvers.objective import Solver


class DistMeZOStage(ZerothOrderStage):
    """Every client takes MeZO steps of its own, with seeds of its own; then the mean of the weights."""

    method: Literal["distmezo"]
    local_steps: PositiveInt = 10
    """Steps of a client in a round."""
    server_lr: PositiveFloat = 1.0
    """Learning rate of the server's step along the mean update; 1: the mean itself."""


class DistMeZO(Training[DistMeZOStage]):
    """FedAvg with zeroth-order steps on the clients."""

    needs_network = True

    def solver(self) -> Solver:
        """MeZO steps."""
        from headstart.solvers.zeroth import ZerothSolver

        assert self.network is not None
        return ZerothSolver(self.network, self.stage, self.context.seed)


register(DistMeZOStage, DistMeZO)
