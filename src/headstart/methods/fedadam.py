"""FedAvg with another combiner: Adam on the mean update, which is a pseudo-gradient (Reddi et al., ICLR 2021).

What travels is FedAvg's.
"""

from __future__ import annotations

from typing import Literal

from headstart.combiners import Adam, Combiner
from headstart.config.stage import AdaptiveStage
from headstart.methods.registry import register
from headstart.methods.training import Training


class FedAdamStage(AdaptiveStage):
    """Adam on the mean update (Reddi et al., ICLR 2021)."""

    method: Literal["fedadam"]


class FedAdam(Training[FedAdamStage]):
    """Adam on the server."""

    def combiner(self) -> Combiner:
        """v ← β₂ v + (1 − β₂) Δ̄²."""
        stage = self.stage
        return Adam(stage.server_lr, stage.beta1, stage.beta2, stage.tau, stage.bias_correction)


register(FedAdamStage, FedAdam)
