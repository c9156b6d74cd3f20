"""The mean itself: x ← x + η Δ̄ (McMahan et al., AISTATS 2017)."""

from __future__ import annotations

from dataclasses import dataclass

from headstart.combiners.combiner import State
from headstart.core.params import Params, Shapes


@dataclass(frozen=True)
class Average:
    """A step of length ``lr`` along the mean update."""

    lr: float = 1.0

    def init(self, shapes: Shapes) -> State:
        """Nothing."""
        return {}

    def update(self, params: Params, mean: Params, state: State) -> tuple[Params, State]:
        """x ← x + η Δ̄."""
        return params + mean * self.lr, {}
