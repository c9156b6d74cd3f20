"""Adaptive steps of the server, Δ̄ as a pseudo-gradient (Reddi et al., ICLR 2021).

m ← β₁ m + (1 − β₁) Δ̄, a second moment v that starts at τ², and x ← x + η m / (√v + τ).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from headstart.combiners.combiner import State
from headstart.core.params import Params, Shapes
from headstart.core.statistics import Floats


@dataclass(frozen=True)
class Adam:
    """v ← β₂ v + (1 − β₂) Δ̄². With ``bias_correction`` v starts at zero, as in torch."""

    lr: float
    beta1: float
    beta2: float
    tau: float
    bias_correction: bool = False

    def init(self, shapes: Shapes) -> State:
        """The second moment starts at τ²; at zero where the bias of that start is corrected."""
        start = 0.0 if self.bias_correction else self.tau**2
        return {
            "first": Params.zeros(shapes),
            "second": Params({name: np.full(shape, start) for name, shape in shapes.items()}),
            # Counted for each parameter: a task that nobody was drawn for has taken fewer steps than there were rounds.
            "steps": Params({name: np.zeros(()) for name in shapes}),
        }

    def update(self, params: Params, mean: Params, state: State) -> tuple[Params, State]:
        """One adaptive step."""
        first = state["first"] * self.beta1 + mean * (1 - self.beta1)
        second = Params({name: self.second_moment(state["second"][name], delta) for name, delta in mean.items()})
        steps = Params({name: np.asarray(state["steps"][name] + 1) for name in mean})
        moved = Params()
        for name, value in params.items():
            one = 1 - self.beta1 ** float(steps[name]) if self.bias_correction else 1.0
            two = 1 - self.beta2 ** float(steps[name]) if self.bias_correction else 1.0
            moved[name] = value + self.lr * ((first[name] / one) / (np.sqrt(second[name] / two) + self.tau))
        return moved, {"first": first, "second": second, "steps": steps}

    def second_moment(self, second: Floats, delta: Floats) -> Floats:
        """v from the square of the mean update."""
        return self.beta2 * second + (1 - self.beta2) * delta**2


class Yogi(Adam):
    """v ← v − (1 − β₂) Δ̄² sign(v − Δ̄²)."""

    def second_moment(self, second: Floats, delta: Floats) -> Floats:
        """Yogi's additive rule."""
        return np.asarray(second - (1 - self.beta2) * delta**2 * np.sign(second - delta**2))


@dataclass(frozen=True)
class Adagrad:
    """v ← v + Δ̄²; x ← x + η Δ̄ / (√v + τ)."""

    lr: float
    tau: float

    def init(self, shapes: Shapes) -> State:
        """The second moment starts at τ²."""
        return {"second": Params({name: np.full(shape, self.tau**2) for name, shape in shapes.items()})}

    def update(self, params: Params, mean: Params, state: State) -> tuple[Params, State]:
        """One Adagrad step."""
        second = Params({name: state["second"][name] + delta**2 for name, delta in mean.items()})
        scaled = Params({name: delta / (np.sqrt(second[name]) + self.tau) for name, delta in mean.items()})
        return params + scaled * self.lr, {"second": second}
