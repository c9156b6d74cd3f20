"""FedNova: updates normalised by the local work behind them (Wang et al., NeurIPS 2020).

x ← x + τ_eff Σ p_k Δ_k / a_k with p_k = n_k/Σn. a_k is how far a client moves, in steps, under a constant gradient:
τ_k for plain SGD, more with momentum, less with a proximal pull. τ_eff = Σ p_k a_k, or Σ p_k τ_k with a pull, as in the
authors' code. Travels up: the update, the examples and the number of steps.
"""

from __future__ import annotations

from typing import ClassVar, Literal

import numpy as np
from pydantic import Field, NonNegativeFloat

from headstart.combiners import Combiner, Momentum
from headstart.config.stage import TrainingStage
from headstart.core.message import Message
from headstart.core.params import Params
from headstart.core.reply import ClientResult
from headstart.core.statistics import Floats, Ints
from headstart.core.update import Total
from headstart.errors import MessageError
from headstart.methods.base import Received
from headstart.methods.registry import register
from headstart.methods.training import Training, TrainingState
from headstart.solvers.cohort import Cohort
from headstart.solvers.objective import Objective, learning_rate

# So many times the largest update still fits into float32.
_MOST_STEPS = 1e7


class FedNovaStage(TrainingStage):
    """Updates normalised by the local steps behind them (Wang et al., NeurIPS 2020)."""

    numbers: ClassVar[tuple[str, ...]] = ("steps",)
    sgd_only: ClassVar[bool] = True
    method: Literal["fednova"]
    mu: NonNegativeFloat = 0.0
    """μ: strength of the proximal term of local training."""
    server_momentum: float = Field(default=0.0, ge=0, lt=1)
    """Of the server's steps."""


class FedNova(Training[FedNovaStage]):
    """FedAvg without the bias towards clients that take more steps."""

    def client_update(self, cohort: Cohort, received: Received) -> ClientResult:
        """Local SGD, with a proximal term where μ is not 0; Δ_k / a_k travels, and what τ_eff averages."""
        local = self.solve(received.model, cohort, received.round, Objective(self.stage.mu))
        reach = self._reach(local.steps, learning_rate(self.stage, received.round))
        effective = local.steps if self.stage.mu else reach
        steps = Params({"": effective.astype(np.float32)})
        return self.result(cohort, local, update=(local.params - received.model) / reach, steps=steps)

    def _reach(self, steps: Ints, rate: float) -> Floats:
        """a_k [M]: the distance, in units of the learning rate, under a constant gradient of 1."""
        decay, momentum = rate * self.stage.mu, self.stage.momentum
        # Velocity and distance after a step are linear in those before it: τ steps are a power of one matrix.
        step = np.array([[momentum, -decay, 1.0], [momentum, 1.0 - decay, 1.0], [0.0, 0.0, 1.0]])
        return np.array([np.linalg.matrix_power(step, int(count))[1, 2] for count in steps])

    def check(self, message: Message) -> None:
        """Steps are more than none."""
        if not 0 < (steps := float(message.arrays["steps"])) < _MOST_STEPS:
            raise MessageError(f"a client says that it took {steps:.1e} steps")

    def combiner(self) -> Combiner:
        """v ← β v + Δ̄; x ← x + v."""
        return Momentum(1.0, self.stage.server_momentum)

    def server_update(self, state: TrainingState, total: Total, round: int) -> TrainingState:
        """A step along τ_eff Σ p_k Δ_k / a_k."""
        return self.step(state, total, total.mean("update") * float(total.mean("steps")[""]))


register(FedNovaStage, FedNova)
