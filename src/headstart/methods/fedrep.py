"""FedRep: a head of its own for each client, fitted to the shared body before the body is trained (Collins et al.,
"Exploiting shared representations for personalized federated learning", ICML 2021, algorithm 1).

In its round a client first trains its head for ``head_epochs`` under the body it received, then the body for
``local_epochs`` under its new head; each part is really frozen while the other trains. Travels, both ways: the body.
"""

from __future__ import annotations

from headstart.config.stage import FedRepStage
from headstart.core.message import Message
from headstart.core.statistics import Ints
from headstart.methods.training import TrainingMethod, difference
from headstart.solvers.cohort import Cohort
from headstart.solvers.heads import LocalResult, Objective, Stack


class FedRepMethod(TrainingMethod[FedRepStage]):
    """Head, then body."""

    def train(
        self, start: Stack, cohort: Cohort, message: Message, sizes: Ints
    ) -> tuple[LocalResult, dict[str, Stack], dict[str, Stack]]:
        """Two phases, each with a velocity of its own."""
        round, begin = int(message.scalars["round"]), start
        head, body = (
            frozenset(name for name in start if self.plan.role(name) == role) for role in ("personal", "shared")
        )
        if self.stage.head_epochs:
            fitting = Objective(moves=head, epochs=self.stage.head_epochs, phase=1)
            fitted = self.solve(start, cohort, round, fitting).parameters
            begin = start | {name: fitted[name].clone() for name in head}
        result = self.solve(begin, cohort, round, Objective(moves=body))
        return result, {"update": difference(result.parameters, start)}, {}

    def passes(self, size: int, steps: int, new: bool) -> int:
        """The head's epochs are a forward pass each."""
        head = self.stage.head_epochs * size if self.plan.changes_features else 0
        return super().passes(size, steps, new) + head
