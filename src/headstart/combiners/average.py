"""The mean itself: x ← x + η Δ̄ (McMahan et al., AISTATS 2017)."""

from __future__ import annotations

from dataclasses import dataclass

from headstart.combiners.combiner import Memory
from headstart.core.params import Shapes, Vectors, added


@dataclass(frozen=True)
class Average:
    """A step of length ``lr`` along the mean update."""

    lr: float = 1.0

    def init(self, shapes: Shapes) -> Memory:
        """Nothing."""
        return {}

    def update(self, parameters: Vectors, mean: Vectors, memory: Memory) -> tuple[Vectors, Memory]:
        """x ← x + η Δ̄."""
        return added(parameters, mean, self.lr), {}
