"""FedAvg with another combiner: the mean update as a pseudo-gradient (Hsu et al., 2019; Reddi et al., ICLR 2021).

What travels is FedAvg's.
"""

from __future__ import annotations

from headstart.combiners import Adagrad, Adam, Combiner, Momentum, Yogi
from headstart.config.stage import FedAdagradStage, FedAdamStage, FedAvgMStage, FedYogiStage
from headstart.methods.training import TrainingMethod


class FedAvgMMethod(TrainingMethod[FedAvgMStage]):
    """Momentum on the server."""

    def combiner(self) -> Combiner:
        """v ← β v + Δ̄; x ← x + η v."""
        return Momentum(self.stage.server_lr, self.stage.server_momentum)


class FedAdamMethod(TrainingMethod[FedAdamStage]):
    """Adam on the server."""

    def combiner(self) -> Combiner:
        """v ← β₂ v + (1 − β₂) Δ̄²."""
        stage = self.stage
        return Adam(stage.server_lr, stage.beta1, stage.beta2, stage.tau, stage.bias_correction)


class FedYogiMethod(TrainingMethod[FedYogiStage]):
    """Yogi on the server."""

    def combiner(self) -> Combiner:
        """v ← v − (1 − β₂) Δ̄² sign(v − Δ̄²)."""
        stage = self.stage
        return Yogi(stage.server_lr, stage.beta1, stage.beta2, stage.tau, stage.bias_correction)


class FedAdagradMethod(TrainingMethod[FedAdagradStage]):
    """Adagrad on the server."""

    def combiner(self) -> Combiner:
        """v ← v + Δ̄²; x ← x + η Δ̄ / (√v + τ)."""
        return Adagrad(self.stage.server_lr, self.stage.tau)
