"""FedYolo: one frozen transformer for any number of tasks (Zhang et al., "FedYolo: augmenting federated learning with
pre-trained transformers", 2023, algorithm 1).

Every task has a module and a head of its own. A round draws clients from all tasks; each trains its task's module and
head. Travels, both ways: these alone. The server averages per task, over the clients of the task that were drawn; a
task of which nobody was drawn stays as it is. With ``hide_task`` a client sends zeros for the other tasks beside its
own update, and one sum over all clients gives the same averages.
"""

from __future__ import annotations

from headstart.config.stage import FedYoloStage
from headstart.core.ledger import Published
from headstart.core.statistics import Ints
from headstart.methods.training import TrainingMethod, TrainingState


class FedYoloMethod(TrainingMethod[FedYoloStage]):
    """FedAvg's skeleton on modules; that tasks are averaged apart is the skeleton's own rule."""

    def published(self, state: TrainingState, counts: Ints) -> Published:
        """The paper counts one direction, and every parameter of a client's module and head."""
        total = 4 * self.travelling * self.stage.sampled(self.setting.n_clients) * state.round
        passes = state.round * self.round_passes(counts)
        return Published(round(total), passes, "FedYolo paper: T · M · P parameters of 4 bytes, one way")
