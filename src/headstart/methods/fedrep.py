"""FedRep: a head of its own for each client, fitted to the shared backbone before the backbone is trained (Collins et
al., "Exploiting shared representations for personalized federated learning", ICML 2021, algorithm 1).

In its round a client first trains its head for ``head_epochs`` under the backbone it received, then the backbone for
``local_epochs`` under its new head; each part is really frozen while the other trains. Travels, both ways: the
backbone.
"""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar, Literal

import numpy as np
from pydantic import NonNegativeInt

from headstart.config.stage import Part, TrainingStage
from headstart.core.plan import Role
from headstart.core.reply import ClientResult
from headstart.methods.base import Received
from headstart.methods.registry import register
from headstart.methods.training import Training
from headstart.solvers.cohort import Cohort
from headstart.solvers.objective import Objective


class FedRepStage(TrainingStage):
    """As FedPer, but each client trains its head first, then the backbone (Collins et al., ICML 2021)."""

    classifier: ClassVar[Role] = "personal"
    method: Literal["fedrep"]
    train: Part = "all"
    head_epochs: NonNegativeInt = 10
    """Epochs on the head, before local_epochs on the backbone."""


class FedRep(Training[FedRepStage]):
    """Head, then backbone."""

    def client_update(self, cohort: Cohort, received: Received) -> ClientResult:
        """Two phases, each with a velocity of its own."""
        start, passes = received.model, np.zeros(len(cohort.clients), np.int64)
        head, body = (
            frozenset(name for name in start if self.plan.role(name) == role) for role in ("personal", "shared")
        )
        if self.stage.head_epochs:
            fitting = Objective(trains=head, epochs=self.stage.head_epochs, phase=1)
            fitted = self.solve(start, cohort, received.round, fitting)
            start = start | {name: fitted.params[name].clone() for name in head}
            passes = fitted.passes
        local = self.solve(start, cohort, received.round, Objective(trains=body))
        local = replace(local, passes=local.passes + passes)
        return self.result(cohort, local, update=local.params - received.model)


register(FedRepStage, FedRep)
