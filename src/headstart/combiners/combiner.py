"""What a combiner is: two functions, as an optimiser of optax."""

from __future__ import annotations

from typing import Protocol

from headstart.core.params import Shapes, Vectors

Memory = dict[str, Vectors]
"""What a server remembers from round to round, by name: one array per parameter each."""


class Combiner(Protocol):
    """A step of the server along the mean update of a round."""

    def init(self, shapes: Shapes) -> Memory:
        """What it remembers before the first round."""

    def update(self, parameters: Vectors, mean: Vectors, memory: Memory) -> tuple[Vectors, Memory]:
        """New parameters and memory. Called for some of the parameters at a time, where clients have several tasks."""
