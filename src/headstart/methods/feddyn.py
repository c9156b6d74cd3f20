"""FedDyn: a dynamic regulariser that aligns local and global optima (Acar et al., ICLR 2021).

Client k minimises its loss + α_k ⟨w, h_k⟩ + α_k/2 ‖w − x‖² from the server's x, then h_k ← h_k + w_k − x. Travels up:
w_k − x. The server's x is the mean of the models it heard plus the mean of all clients' h. ``adaptive`` divides α by
the client's share of the examples relative to an even one, as the official code does. h_k stays with the client. With
``max_norm`` a client shortens w_k − x before h_k moves by it: both sides add up the same updates.
"""

from __future__ import annotations

import numpy as np
import torch

from headstart.config.stage import FedDynStage
from headstart.core.message import Message
from headstart.core.params import Vectors, added
from headstart.core.statistics import Ints
from headstart.methods.base import Reply
from headstart.methods.training import Tally, TrainingMethod, TrainingState, difference
from headstart.solvers.cohort import Cohort
from headstart.solvers.heads import LocalResult, Objective, Stack, clip_norms, wide


class FedDynMethod(TrainingMethod[FedDynStage]):
    """Local duals h_k; their mean over all clients on the server."""

    memories = ("dual",)
    keeps = ("dual",)

    def train(
        self, start: Stack, cohort: Cohort, message: Message, sizes: Ints
    ) -> tuple[LocalResult, dict[str, Stack], dict[str, Stack]]:
        """SGD with the dynamic regulariser; the dual moves by the update."""
        # An even share is one of all that minimise together: a task by itself where nothing is common to the tasks.
        apart = all("@" in name for name in self.shapes)
        group = self.tasks[cohort.task] if apart else self.setting
        even = group.n_examples / group.n_clients
        factor = even / sizes if self.stage.adaptive else np.ones(len(sizes))
        pull = torch.from_numpy((self.stage.alpha_dyn * factor).astype(np.float32))
        dual = self.remembered("dual", cohort)
        drift = {name: wide(pull, value) * value for name, value in dual.items()}
        result = self.solve(start, cohort, int(message.scalars["round"]), Objective(pull, drift))
        update = difference(result.parameters, start)
        if self.max_norm is not None:
            clip_norms(update, self.max_norm)
        return result, {"update": update}, {"dual": {name: dual[name] + moved for name, moved in update.items()}}

    def weight_of(self, reply: Reply) -> float:
        """A plain mean over the clients heard, whatever their sizes."""
        return 1.0

    def step(self, state: TrainingState, mean: Vectors, tally: Tally) -> tuple[Vectors, dict[str, Vectors]]:
        """x ← mean of the models heard + mean of all duals, which have moved by the same updates."""
        dual = added(state.memory["dual"], mean, tally.replies / tally.clients)
        return added(added(state.parameters, mean, 1.0), dual, 1.0), {"dual": dual}
