"""Ditto: FedAvg, and beside it a model of each client's own that is pulled towards the global one (Li et al., "Ditto:
fair and robust federated learning through personalization", ICML 2021, algorithm 1).

In its round a client trains the global model w as in FedAvg, and on the same batches its own model v by steps along
∇f(v) + λ (v − w), w being the model it received. Travels, both ways: the global model. v stays with the client.
"""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar, Literal

from pydantic import NonNegativeFloat

from headstart.config.stage import Part, TrainingStage
from headstart.core.reply import ClientResult
from headstart.methods.base import Received
from headstart.methods.registry import register
from headstart.methods.training import Training
from headstart.solvers.cohort import Cohort
from headstart.solvers.objective import Objective


class DittoStage(TrainingStage):
    """FedAvg, and beside it a model of each client's own that is pulled towards the global one (Li et al., 2021)."""

    twin: ClassVar[bool] = True
    method: Literal["ditto"]
    train: Part = "all"
    lambda_ditto: NonNegativeFloat = 1.0
    """Strength of the pull."""


class Ditto(Training[DittoStage]):
    """FedAvg with a personal twin of everything that is shared."""

    def client_update(self, cohort: Cohort, received: Received) -> ClientResult:
        """The global model w first, then the client's own v."""
        from headstart.solvers.network import tensors

        w, round = received.model, received.round
        shared = self.solve(w, cohort, round, Objective())
        update = shared.params - w
        passes = shared.passes.copy()
        start = w | tensors(self.personal_params(cohort.state))
        v = self.solve(start, cohort, round, Objective(self.stage.lambda_ditto, centre=w))
        personal = (v.params | v.statistics).select(self.personal_shapes)
        return self.result(cohort, replace(shared, passes=passes + v.passes), {"personal": personal}, update=update)


register(DittoStage, Ditto)
