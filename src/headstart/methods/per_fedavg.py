"""Per-FedAvg: a model from which one step of SGD makes a good model for each client (Fallah et al., "Personalized
federated learning with theoretical guarantees", NeurIPS 2020, first-order variant).

A local step takes two batches D and D': w̃ = w − α ∇f(w; D), then w ← w − β ∇f(w̃; D'). α is ``inner_lr``, β is ``lr``.
What travels is FedAvg's. To use the model, let each client take a step: `personalise` with batch_size = "full" and one
epoch takes exactly one.
"""

from __future__ import annotations

from typing import Literal

from pydantic import PositiveFloat

from headstart.config.stage import Part, TrainingStage
from headstart.core.reply import ClientResult
from headstart.methods.base import Received
from headstart.methods.registry import register
from headstart.methods.training import Training
from headstart.solvers.cohort import Cohort
from headstart.solvers.objective import Objective


class PerFedAvgStage(TrainingStage):
    """A model that one step of a client makes good, first-order variant (Fallah et al., NeurIPS 2020)."""

    method: Literal["per-fedavg"]
    train: Part = "all"
    inner_lr: PositiveFloat = 0.01
    """Of the step whose result the meta step looks at."""


class PerFedAvg(Training[PerFedAvgStage]):
    """FedAvg with meta steps."""

    def client_update(self, cohort: Cohort, received: Received) -> ClientResult:
        """Gradients at the model after an inner step."""
        local = self.solve(received.model, cohort, received.round, Objective(inner_lr=self.stage.inner_lr))
        return self.result(cohort, local, update=local.params - received.model)


register(PerFedAvgStage, PerFedAvg)
