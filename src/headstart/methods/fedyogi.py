"""FedAvg with another combiner: Yogi on the mean update, which is a pseudo-gradient (Reddi et al., ICLR 2021).

What travels is FedAvg's.
"""

from __future__ import annotations

from typing import Literal

from headstart.combiners import Combiner, Yogi
from headstart.config.stage import AdaptiveStage
from headstart.methods.registry import register
from headstart.methods.training import Training


class FedYogiStage(AdaptiveStage):
    """Yogi on the mean update (Reddi et al., ICLR 2021)."""

    method: Literal["fedyogi"]


class FedYogi(Training[FedYogiStage]):
    """Yogi on the server."""

    def combiner(self) -> Combiner:
        """v ← v − (1 − β₂) Δ̄² sign(v − Δ̄²)."""
        stage = self.stage
        return Yogi(stage.server_lr, stage.beta1, stage.beta2, stage.tau, stage.bias_correction)


register(FedYogiStage, FedYogi)
