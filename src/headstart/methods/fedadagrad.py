"""FedAvg with another combiner: Adagrad on the mean update, which is a pseudo-gradient (Reddi et al., ICLR 2021).

What travels is FedAvg's.
"""

from __future__ import annotations

from typing import Literal

from pydantic import PositiveFloat

from headstart.combiners import Adagrad, Combiner
from headstart.config.stage import TrainingStage
from headstart.methods.registry import register
from headstart.methods.training import Training


class FedAdagradStage(TrainingStage):
    """Adagrad on the mean update (Reddi et al., ICLR 2021)."""

    method: Literal["fedadagrad"]
    server_lr: PositiveFloat = 0.01
    """Learning rate of the server's step along the mean update."""
    tau: PositiveFloat = 1e-3
    """Adaptivity: added to the square root of the sum of squared updates."""


class FedAdagrad(Training[FedAdagradStage]):
    """Adagrad on the server."""

    def combiner(self) -> Combiner:
        """v ← v + Δ̄²; x ← x + η Δ̄ / (√v + τ)."""
        return Adagrad(self.stage.server_lr, self.stage.tau)


register(FedAdagradStage, FedAdagrad)
