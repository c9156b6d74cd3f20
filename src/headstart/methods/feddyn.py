"""FedDyn: a dynamic regulariser that aligns local and global optima (Acar et al., ICLR 2021).

Client k minimises its loss + α_k ⟨w, h_k⟩ + α_k/2 ‖w − x‖² from the server's x, then h_k ← h_k + w_k − x. Travels up:
w_k − x. The server's x is the mean of the models it received plus the mean of all clients' h. ``adaptive`` divides α by
the client's share of the examples relative to an even one, as the official code does. h_k stays with the client. With
``max_norm`` a client shortens w_k − x before h_k moves by it: both sides add up the same updates.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar, Literal

import numpy as np
from pydantic import PositiveFloat

from headstart.config.stage import TrainingStage
from headstart.core.reply import ClientResult
from headstart.core.update import Total
from headstart.methods.base import Received, StageContext
from headstart.methods.registry import register
from headstart.methods.training import Training, TrainingState
from headstart.solvers.cohort import Cohort
from headstart.solvers.objective import Objective


class FedDynStage(TrainingStage):
    """A dynamic regulariser that aligns local and global optima (Acar et al., ICLR 2021)."""

    accumulates: ClassVar[Mapping[str, str]] = {"dual": "update"}
    method: Literal["feddyn"]
    alpha_dyn: PositiveFloat = 0.01
    """α: strength of the dynamic regulariser."""
    adaptive: bool = True
    """Divide alpha by a client's share of the examples, as the official code does."""


class FedDyn(Training[FedDynStage]):
    """Local duals h_k; their mean over all clients on the server."""

    memories = keeps = ("dual",)

    def __init__(self, stage: FedDynStage, context: StageContext) -> None:
        super().__init__(stage, context)
        self.weighting = "uniform"

    def client_update(self, cohort: Cohort, received: Received) -> ClientResult:
        """SGD with the dynamic regulariser; the dual moves by the update."""
        # An even share is one of all that minimise together: a task by itself where nothing is common to the tasks.
        group = self.context.population if self.plan.body == "shared" else self.context.task.population
        even = group.examples / group.clients
        factor = even / cohort.sizes if self.stage.adaptive else np.ones(len(cohort.clients))
        alpha, dual = (self.stage.alpha_dyn * factor).astype(np.float32), self.kept("dual", cohort)
        local = self.solve(received.model, cohort, received.round, Objective(alpha, dual * alpha))
        return self.result(cohort, local, {"dual": dual}, update=local.params - received.model)

    def server_update(self, state: TrainingState, total: Total, round: int) -> TrainingState:
        """x ← mean of the received models + mean of all duals, which have moved by the same updates."""
        mean = total.mean("update")
        dual = state.memory["dual"] + mean * (total.weight("update") / state.population.clients)
        moved = super().server_update(state, total, round)
        return replace(moved, params=state.params + mean + dual).with_memory(dual=dual)


register(FedDynStage, FedDyn)
