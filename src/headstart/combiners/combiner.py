"""What a combiner is: two functions, as an optimiser of optax."""

from __future__ import annotations

from typing import Protocol

from headstart.core.params import Params, Shapes

State = dict[str, Params]
"""The state of a server optimiser, by name: one array per parameter each."""


class Combiner(Protocol):
    """A step of the server along the mean update of a round."""

    def init(self, shapes: Shapes) -> State:
        """The state before the first round."""

    def update(self, params: Params, mean: Params, state: State) -> tuple[Params, State]:
        """New parameters and state; of some of the parameters at a time where there are several tasks."""
