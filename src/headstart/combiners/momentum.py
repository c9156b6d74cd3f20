"""Momentum on the server: v ← β v + Δ̄, x ← x + η v (Hsu et al., 2019)."""

from __future__ import annotations

from dataclasses import dataclass

from headstart.combiners.combiner import State
from headstart.core.params import Params, Shapes


@dataclass(frozen=True)
class Momentum:
    """A step of length ``lr`` along a decaying sum of the mean updates."""

    lr: float
    beta: float

    def init(self, shapes: Shapes) -> State:
        """No velocity."""
        return {"momentum": Params.zeros(shapes)}

    def update(self, params: Params, mean: Params, state: State) -> tuple[Params, State]:
        """v ← β v + Δ̄; x ← x + η v."""
        momentum = mean + state["momentum"] * self.beta
        return params + momentum * self.lr, {"momentum": momentum}
