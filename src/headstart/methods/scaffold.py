"""SCAFFOLD: control variates against client drift, option II (Karimireddy et al., ICML 2020).

Travels down: the model x and the server's control variate c. A client steps along g − c_k + c from x to y_k, in τ steps
of size η, and sets c_k⁺ = c_k − c + (x − y_k)/(τ η). Travels up: y_k − x and c_k⁺ − c_k. The server moves by the
weighted mean of the first over the clients heard, and adds that of the second over all clients to c, so that c stays
the mean of all c_k under the same weights. c_k stays with the client.
"""

from __future__ import annotations

import torch

from headstart.config.stage import ScaffoldStage
from headstart.core.message import Message
from headstart.core.params import Vectors, added
from headstart.core.statistics import Ints
from headstart.methods.training import Tally, TrainingMethod, TrainingState, difference
from headstart.solvers.cohort import Cohort
from headstart.solvers.heads import LocalResult, Objective, Stack, learning_rate, wide


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

    def step(self, state: TrainingState, mean: Vectors, tally: Tally) -> tuple[Vectors, dict[str, Vectors]]:
        """x ← x + η_g Δ̄; c ← c + Σ (n_k/N) (c_k⁺ − c_k), with 1/K for n_k/N where clients count alike."""
        everybody = tally.examples if self.stage.weighting == "examples" else tally.clients
        control = added(state.memory["control"], state.sums["control"], 1 / everybody)
        return super().step(state, mean, tally)[0], {"control": control}
