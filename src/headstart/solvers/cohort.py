"""The clients that a solver works for together, and their examples."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from headstart.core.statistics import Features, Floats, Ints

if TYPE_CHECKING:  # closed-form methods do not wait for torch
    from headstart.backbones.inputs import Inputs

ReadState = Callable[[str, npt.NDArray[np.float32] | None], npt.NDArray[np.float32]]
"""Client state by name [M, …]; for clients that have none yet, the value given, or zeros."""


@dataclass(frozen=True, eq=False)
class Cohort:
    """Clients of one task that answer together: thousands in a simulation, one on a node of its own.

    source: features [N, d], or what a backbone that trains reads, of all clients and never copied; rows: [n] this
    cohort's examples, client after client; labels, owners: [n].
    """

    clients: Ints
    source: Features | Inputs
    rows: Ints
    labels: Ints
    owners: Ints
    new: npt.NDArray[np.bool_]
    """[M] the clients that answer for the first time in this stage, and have no features yet."""
    state: ReadState
    task: int = 0
    """The number of the task; labels are those of its own classes."""
    clip: float | None = None
    """Features longer than this are clipped to it before they are summed."""
    targets: Floats | None = None
    """[N, q] of all clients and never copied, where no classes are learned."""

    @property
    def sizes(self) -> Ints:
        """Examples [M] of each client."""
        return np.searchsorted(self.owners, self.clients, "right") - np.searchsorted(self.owners, self.clients)

    @property
    def features(self) -> Features:
        """Features [N, d], for methods that leave the backbone alone."""
        assert isinstance(self.source, np.ndarray)
        return self.source

    @property
    def inputs(self) -> Inputs:
        """Batches of examples, for methods that train the backbone."""
        assert not isinstance(self.source, np.ndarray)
        return self.source
