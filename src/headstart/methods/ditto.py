"""Ditto: FedAvg, and beside it a model of each client's own that is pulled towards the global one (Li et al., "Ditto:
fair and robust federated learning through personalization", ICML 2021, algorithm 1).

In its round a client trains the global model w as in FedAvg, and on the same batches its own model v by steps along
∇f(v) + λ (v − w), w being the model it received. Travels, both ways: the global model. v stays with the client.
"""

from __future__ import annotations

import torch

from headstart.config.stage import DittoStage
from headstart.core.message import Message
from headstart.core.statistics import Ints
from headstart.methods.training import TrainingMethod, difference
from headstart.solvers.cohort import Cohort
from headstart.solvers.heads import LocalResult, Objective, Stack


class DittoMethod(TrainingMethod[DittoStage]):
    """FedAvg with a personal copy of everything that is shared."""

    copies = True

    def train(
        self, start: Stack, cohort: Cohort, message: Message, sizes: Ints
    ) -> tuple[LocalResult, dict[str, Stack], dict[str, Stack]]:
        """The global model first, then the client's own."""
        round = int(message.scalars["round"])
        result = self.solve(start, cohort, round, Objective())
        update = difference(result.parameters, start)
        mine = {name: torch.from_numpy(value) for name, value in self.own(cohort.kept, cohort.task).items()}
        pull = torch.full((len(cohort.clients),), self.stage.lambda_ditto)
        own = self.solve(start | mine, cohort, round, Objective(pull, anchor=start))
        values = {**own.parameters, **own.statistics}
        return result, {"update": update}, {"personal": {name: values[name] for name in mine}}

    def passes(self, size: int, steps: int, new: bool) -> int:
        """Two models are trained."""
        return super().passes(size, steps, new) * (2 if self.plan.changes_features else 1)
