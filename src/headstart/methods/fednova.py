"""FedNova: updates normalised by the local work behind them (Wang et al., NeurIPS 2020).

x ← x + τ_eff Σ p_k Δ_k / a_k with p_k = n_k/Σn. a_k is how far a client moves, in steps, under a constant gradient:
τ_k for plain SGD, more with momentum, less with a proximal pull. τ_eff = Σ p_k a_k, or Σ p_k τ_k with a pull, as in the
authors' code. Travels up: the update, the examples and the number of steps.
"""

from __future__ import annotations

import numpy as np
import torch

from headstart.combiners import Combiner, Momentum
from headstart.config.stage import FedNovaStage
from headstart.core.message import Message
from headstart.core.params import Vectors
from headstart.core.statistics import Ints
from headstart.errors import MessageError
from headstart.methods.base import Reply, whole_number
from headstart.methods.training import Tally, TrainingMethod, TrainingState, difference
from headstart.solvers.cohort import Cohort
from headstart.solvers.heads import LocalResult, Objective, Stack, learning_rate


class FedNovaMethod(TrainingMethod[FedNovaStage]):
    """FedAvg without the bias towards clients that take more steps."""

    def train(
        self, start: Stack, cohort: Cohort, message: Message, sizes: Ints
    ) -> tuple[LocalResult, dict[str, Stack], dict[str, Stack]]:
        """Local SGD, with a proximal pull where μ is not 0."""
        pull = torch.full((len(cohort.clients),), self.stage.mu) if self.stage.mu else None
        result = self.solve(start, cohort, int(message.scalars["round"]), Objective(pull))
        return result, {"update": difference(result.parameters, start)}, {}

    def factor(self, what: str, weight: float, state: TrainingState, reply: Reply) -> float:
        """n_k / a_k."""
        return weight / self._reach(state, reply)

    def effort(self, state: TrainingState, reply: Reply) -> float:
        """What τ_eff averages."""
        return steps_of(reply) if self.stage.mu else self._reach(state, reply)

    def combiner(self) -> Combiner:
        """v ← β v + Δ̄; x ← x + v."""
        return Momentum(1.0, self.stage.server_momentum)

    def step(self, state: TrainingState, mean: Vectors, tally: Tally) -> tuple[Vectors, dict[str, Vectors]]:
        """A step along τ_eff Σ p_k Δ_k / a_k."""
        effective = tally.effort / tally.weight
        return super().step(state, {name: effective * delta for name, delta in mean.items()}, tally)

    def _reach(self, state: TrainingState, reply: Reply) -> float:
        """a_k: the distance, in units of the learning rate, under a constant gradient of 1."""
        rate = learning_rate(self.stage, state.round)
        pull, momentum = rate * self.stage.mu, self.stage.momentum
        # Velocity and distance after a step are linear in those before it: τ steps are a power of one matrix.
        step = np.array([[momentum, -pull, 1.0], [momentum, 1.0 - pull, 1.0], [0.0, 0.0, 1.0]])
        with np.errstate(over="ignore", invalid="ignore"):
            distance = float(np.linalg.matrix_power(step, steps_of(reply))[1, 2])
        if not 0 < distance < 1e12:
            raise MessageError(f"no {steps_of(reply)} steps end at a distance of {distance:.1e}")
        return distance


def steps_of(reply: Reply) -> int:
    """The number of local steps that a client says it took; refused where it cannot be."""
    return whole_number(reply, "steps", 10**7)
