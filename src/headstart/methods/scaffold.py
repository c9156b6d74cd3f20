"""SCAFFOLD: control variates against client drift, option II (Karimireddy et al., ICML 2020).

Travels down: the model x and the server's control variate c. A client steps along g − c_k + c from x to y_k, in τ steps
of size η, and sets c_k⁺ = c_k − c + (x − y_k)/(τ η). Travels up: y_k − x and c_k⁺ − c_k. The server moves by the mean
of the first and adds the mean of the second, over all clients, to c. c_k stays with the client.
"""

from __future__ import annotations

import torch

from headstart.methods.base import Cohort, Reply
from headstart.methods.plan import Vectors
from headstart.methods.solver import LocalResult, Objective, Stack, learning_rate, wide
from headstart.methods.training import Tally, TrainingMethod, TrainingState, added, difference
from headstart.stages import ScaffoldStage
from headstart.statistics import Ints
from headstart.wire import Message


class ScaffoldMethod(TrainingMethod[ScaffoldStage]):
    """Drift-corrected SGD; twice FedAvg's traffic in both directions."""

    memories = ("control",)
    travels = ("update", "control")
    keeps = ("control",)

    def broadcasts(self) -> tuple[str, ...]:
        """The server's control variate."""
        return ("control",)

    def train(
        self, start: Stack, cohort: Cohort, message: Message, sizes: Ints
    ) -> tuple[LocalResult, dict[str, Stack], dict[str, Stack]]:
        """Local steps along g − c_k + c, then the client's new control variate."""
        round = int(message.scalars["round"])
        mine = self.remembered("control", cohort)
        names = self.shared_names(cohort.task)
        server = {name: torch.from_numpy(message.arrays[f"control.{full}"].copy()) for name, full in names.items()}
        correction = {name: server[name] - mine[name] for name in names}
        result = self.solve(start, cohort, round, Objective(drift=correction))
        update = difference(result.parameters, start)
        scale = torch.from_numpy(result.steps) * learning_rate(self.stage, round)
        change = {name: -server[name] - moved / wide(scale, moved) for name, moved in update.items()}
        kept = {name: mine[name] + change[name] for name in names}
        return result, {"update": update, "control": change}, {"control": kept}

    def factor(self, what: str, weight: float, state: TrainingState, reply: Reply) -> float:
        """Updates are averaged by weight; control variates count once each, over all clients."""
        return weight if what == "update" else 1.0

    def step(self, state: TrainingState, mean: Vectors, tally: Tally) -> tuple[Vectors, dict[str, Vectors]]:
        """x ← x + η_g Δ̄; c ← c + (1/K) Σ (c_k⁺ − c_k)."""
        control = added(state.memory["control"], state.sums["control"], 1 / tally.clients)
        return added(state.parameters, mean, self.stage.server_lr), {"control": control}
