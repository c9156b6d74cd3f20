"""Per-FedAvg: a model from which one step of SGD makes a good model for each client (Fallah et al., "Personalized
federated learning with theoretical guarantees", NeurIPS 2020, first-order variant).

A local step takes two batches D and D': w̃ = w − α ∇f(w; D), then w ← w − β ∇f(w̃; D'). α is ``inner_lr``, β is ``lr``.
What travels is FedAvg's. To use the model, let each client take a step: `personalise` with batch_size = "full" and one
epoch takes exactly one.
"""

from __future__ import annotations

from headstart.config.stage import PerFedAvgStage
from headstart.core.message import Message
from headstart.core.statistics import Ints
from headstart.methods.training import TrainingMethod, difference
from headstart.solvers.cohort import Cohort
from headstart.solvers.heads import LocalResult, Objective, Stack


class PerFedAvgMethod(TrainingMethod[PerFedAvgStage]):
    """FedAvg with meta steps."""

    def train(
        self, start: Stack, cohort: Cohort, message: Message, sizes: Ints
    ) -> tuple[LocalResult, dict[str, Stack], dict[str, Stack]]:
        """Gradients at the model after an inner step."""
        objective = Objective(inner_lr=self.stage.inner_lr)
        result = self.solve(start, cohort, int(message.scalars["round"]), objective)
        return result, {"update": difference(result.parameters, start)}, {}

    def examples_of(self, size: int, steps: int) -> int:
        """Every step takes two batches, and an epoch has two at least."""
        half = -(-size // 2)
        width = half if self.stage.batch_size == "full" else min(self.stage.batch_size, half)
        epochs, rest = divmod(2 * steps, -(-size // width))
        return epochs * size + rest * width
