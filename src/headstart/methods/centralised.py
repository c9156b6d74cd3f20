"""The oracle: SGD on everybody's examples in one place. Nothing travels; it is what federated methods are judged by.

The pooled examples are those of a federation of one client, which keeps its velocity from round to round: with one
local epoch a round, this is plain SGD for as many epochs as there are rounds.
"""

from __future__ import annotations

from headstart.config.stage import CentralisedStage
from headstart.core.ledger import Published
from headstart.core.message import Message
from headstart.core.statistics import Ints
from headstart.methods.training import TrainingMethod, TrainingState, difference
from headstart.solvers.cohort import Cohort
from headstart.solvers.heads import LocalResult, Objective, Stack


class CentralisedMethod(TrainingMethod[CentralisedStage]):
    """FedAvg's skeleton with one client."""

    keeps = ("velocity",)

    def train(
        self, start: Stack, cohort: Cohort, message: Message, sizes: Ints
    ) -> tuple[LocalResult, dict[str, Stack], dict[str, Stack]]:
        """SGD goes on where the last round stopped."""
        velocity = self.remembered("velocity", cohort)
        result = self.solve(start, cohort, int(message.scalars["round"]), Objective(velocity=velocity))
        return result, {"update": difference(result.parameters, start)}, {"velocity": result.velocity}

    def published(self, state: TrainingState, counts: Ints) -> Published:
        """The papers give their oracles' accuracy and no cost."""
        return Published(0, super().published(state, counts).forward_passes, "nothing travels")
