"""SCAFFOLD: control variates against client drift, option II (Karimireddy et al., ICML 2020).

Travels down: the model x and the server's control variate c. A client steps along g − c_k + c from x to y_k, in τ steps
of size η, and sets c_k⁺ = c_k − c + (x − y_k)/(τ η). Travels up: y_k − x and c_k⁺ − c_k. The server moves by the
weighted mean of the first over the clients of the round, and adds that of the second over all clients to c: c stays the
mean of all c_k under the same weights. c_k stays with the client.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

import numpy as np
from pydantic import PositiveFloat

from headstart.config.stage import TrainingStage
from headstart.core.reply import ClientResult
from headstart.core.update import Total
from headstart.methods.base import Received
from headstart.methods.registry import register
from headstart.methods.training import Training, TrainingState
from headstart.solvers.cohort import Cohort
from headstart.solvers.objective import Objective, learning_rate


class ScaffoldStage(TrainingStage):
    """Control variates against client drift, option II (Karimireddy et al., ICML 2020)."""

    sends: ClassVar[tuple[str, ...]] = ("update", "control")
    accumulates: ClassVar[Mapping[str, str]] = {"control": "control"}
    plain_sgd: ClassVar[bool] = True
    method: Literal["scaffold"]
    server_lr: PositiveFloat = 1.0
    """Learning rate of the server's step along the mean update; 1: the mean itself."""


class Scaffold(Training[ScaffoldStage]):
    """Drift-corrected SGD; twice FedAvg's traffic in both directions."""

    memories = broadcasts = keeps = ("control",)

    def client_update(self, cohort: Cohort, received: Received) -> ClientResult:
        """Local steps along g − c_k + c; then c_k moves by (x − y_k)/(τ η) − c."""
        x, c, c_k = received.model, received["control"], self.kept("control", cohort)
        local = self.solve(x, cohort, received.round, Objective(correction=c - c_k))
        update = (local.params - x).select(c)
        scale = local.steps.astype(np.float32) * np.float32(learning_rate(self.stage, received.round))
        return self.result(cohort, local, {"control": c_k}, update=update, control=-c - update / scale)

    def server_update(self, state: TrainingState, total: Total, round: int) -> TrainingState:
        """x ← x + η_g Δ̄; c ← c + Σ (n_k/N) (c_k⁺ − c_k), with 1/K for n_k/N where clients count alike."""
        everybody = state.population.examples if self.weighting == "examples" else state.population.clients
        control = state.memory["control"] + total.sum("control") * (1 / everybody)
        return super().server_update(state, total, round).with_memory(control=control)


register(ScaffoldStage, Scaffold)
