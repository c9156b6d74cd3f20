"""Server optimisers: the mean update Δ̄ as a pseudo-gradient (Hsu et al., 2019; Reddi et al., ICLR 2021).

FedAvgM: v ← β v + Δ̄, x ← x + η v. FedAdam, FedYogi and FedAdagrad: m ← β₁ m + (1 − β₁) Δ̄, a second moment v that starts
at τ², and x ← x + η m / (√v + τ). What travels is FedAvg's.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from headstart.config.stage import FedAdagradStage, FedAdamStage, FedAvgMStage, FedYogiStage
from headstart.core.plan import Vectors
from headstart.core.statistics import Floats
from headstart.methods.training import Tally, TrainingMethod, TrainingState, added


class FedAvgMMethod(TrainingMethod[FedAvgMStage]):
    """Momentum on the server."""

    memories = ("momentum",)

    def step(self, state: TrainingState, mean: Vectors, tally: Tally) -> tuple[Vectors, dict[str, Vectors]]:
        """v ← β v + Δ̄; x ← x + η v."""
        momentum = added(mean, state.memory["momentum"], self.stage.server_momentum)
        return added(state.parameters, momentum, self.stage.server_lr), {"momentum": momentum}


class _AdaptiveMethod(TrainingMethod[FedAdamStage | FedYogiStage]):
    memories = ("first", "second", "steps")

    def open(self) -> TrainingState:
        """The second moment starts at τ²; at zero where the bias of that start is corrected, as in Adam."""
        state, start = super().open(), 0.0 if self.stage.bias_correction else self.stage.tau**2
        second = {name: np.full(shape, start) for name, shape in self.shapes.items()}
        # Counted for each parameter: a task that nobody was drawn for has taken fewer steps than there were rounds.
        steps = {name: np.zeros(()) for name in self.shapes}
        return replace(state, memory={**state.memory, "second": second, "steps": steps})

    def step(self, state: TrainingState, mean: Vectors, tally: Tally) -> tuple[Vectors, dict[str, Vectors]]:
        """One adaptive step."""
        stage, first, second = self.stage, state.memory["first"], state.memory["second"]
        first = {name: stage.beta1 * first[name] + (1 - stage.beta1) * delta for name, delta in mean.items()}
        second = {name: self.second_moment(second[name], delta) for name, delta in mean.items()}
        steps = {name: np.asarray(state.memory["steps"][name] + 1) for name in mean}
        parameters = {}
        for name, value in state.parameters.items():
            one = 1 - stage.beta1 ** float(steps[name]) if stage.bias_correction else 1.0
            two = 1 - stage.beta2 ** float(steps[name]) if stage.bias_correction else 1.0
            step = (first[name] / one) / (np.sqrt(second[name] / two) + stage.tau)
            parameters[name] = value + stage.server_lr * step
        return parameters, {"first": first, "second": second, "steps": steps}

    def second_moment(self, second: Floats, delta: Floats) -> Floats:
        """v from the square of the mean update."""
        return self.stage.beta2 * second + (1 - self.stage.beta2) * delta**2


class FedAdamMethod(_AdaptiveMethod):
    """v ← β₂ v + (1 − β₂) Δ̄²."""


class FedYogiMethod(_AdaptiveMethod):
    """v ← v − (1 − β₂) Δ̄² sign(v − Δ̄²)."""

    def second_moment(self, second: Floats, delta: Floats) -> Floats:
        """Yogi's additive rule."""
        return np.asarray(second - (1 - self.stage.beta2) * delta**2 * np.sign(second - delta**2))


class FedAdagradMethod(TrainingMethod[FedAdagradStage]):
    """v ← v + Δ̄²; x ← x + η Δ̄ / (√v + τ)."""

    memories = ("second",)

    def open(self) -> TrainingState:
        """The second moment starts at τ²."""
        second = {name: np.full(shape, self.stage.tau**2) for name, shape in self.shapes.items()}
        return replace(super().open(), memory={"second": second})

    def step(self, state: TrainingState, mean: Vectors, tally: Tally) -> tuple[Vectors, dict[str, Vectors]]:
        """One Adagrad step."""
        second = {name: state.memory["second"][name] + delta**2 for name, delta in mean.items()}
        scaled = {name: delta / (np.sqrt(second[name]) + self.stage.tau) for name, delta in mean.items()}
        return added(state.parameters, scaled, self.stage.server_lr), {"second": second}
