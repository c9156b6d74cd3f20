"""FedAvg with another combiner: momentum on the mean update, which is a pseudo-gradient (Hsu et al., 2019).

What travels is FedAvg's.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field, PositiveFloat

from headstart.combiners import Combiner, Momentum
from headstart.config.stage import TrainingStage
from headstart.methods.registry import register
from headstart.methods.training import Training


class FedAvgMStage(TrainingStage):
    """FedAvg with momentum on the server (Hsu et al., 2019)."""

    method: Literal["fedavgm"]
    server_lr: PositiveFloat = 1.0
    """Learning rate of the server's step along the mean update; 1: the mean itself."""
    server_momentum: float = Field(default=0.9, ge=0, lt=1)
    """Of the server's steps."""


class FedAvgM(Training[FedAvgMStage]):
    """Momentum on the server."""

    def combiner(self) -> Combiner:
        """v ← β v + Δ̄; x ← x + η v."""
        return Momentum(self.stage.server_lr, self.stage.server_momentum)


register(FedAvgMStage, FedAvgM)
