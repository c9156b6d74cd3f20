"""What a run costs: bytes and forward passes, measured, and beside them as the papers count them."""

from __future__ import annotations

import logging
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]

log = logging.getLogger("headstart")


@dataclass(frozen=True)
class Published:
    """A paper's own count of a method's cost: the figure, and the formula in words."""

    bytes: int
    forward_passes: int
    formula: str


@dataclass(frozen=True, eq=False)
class CostFacts:
    """What a paper's count of the cost of one task depends on."""

    stage: Any
    """The table of the recipe."""
    n_classes: int
    dim: int
    """Length of the vectors that are summed, or of the features."""
    clients: int
    """All clients, whether they replied or not."""
    rounds: int
    """That were played."""
    counts: Ints
    """[K, C] Examples of each class, of the clients that replied."""
    rows: int = 0
    """Class means that were received, where the server keeps them apart."""
    shared: float = 0.0
    """Parameters that a client shares."""

    @property
    def examples(self) -> int:
        """Of all clients that replied."""
        return int(self.counts.sum())

    @property
    def per_round(self) -> int:
        """Clients of a round."""
        count: int = self.stage.sampled(self.clients)
        return count


Cost = Callable[[CostFacts], Published]
COSTS: dict[str, Cost] = {}
"""The papers' counts, by method; `headstart.register` adds to it."""


@dataclass
class Ledger:
    """Costs of one stage by client [K]: bytes of the serialised messages, examples through the backbone, seconds in
    all.

    Features that an earlier stage left in the cache are not credited: a stage costs the same whatever ran before it.
    The pre-trained backbone is public and is not counted as traffic, as in the papers.
    """

    bytes_up: Ints
    bytes_down: Ints
    forward_passes: Ints
    last_round: Ints
    """The last round, from 0, that each client was asked in; -1 for never."""
    seconds: float = 0.0
    dropped: list[dict[str, str | int]] = field(default_factory=list)
    """Which clients were excluded from which round, and why."""
    latest: list[tuple[int, int, int]] = field(default_factory=list)
    """Of the round that was played last: each client that was asked, and its bytes up and down."""
    absent: dict[str, list[int]] = field(default_factory=dict)
    """Who could not be asked, and in which rounds (from 1)."""
    absences: dict[str, str] = field(default_factory=dict)
    """Of the round that was played last: who could not be asked, and why."""
    simulated_seconds: float | None = None
    """Of the stage, where clients have simulated machines."""
    _since: float = field(default_factory=time.perf_counter)

    @classmethod
    def open(cls, n_clients: int, simulated_seconds: float | None = None) -> Ledger:
        """Nothing spent yet; the clock starts."""
        up, down, passes = np.zeros((3, n_clients), np.int64)
        return cls(up, down, passes, np.full(n_clients, -1), simulated_seconds=simulated_seconds)

    def drop(self, round: int, names: Sequence[str], why: str) -> None:
        """Note that some clients do not count in a round (from 0)."""
        self.dropped.append({"round": round + 1, "clients": ", ".join(names), "why": why})

    def tick(self) -> None:
        """Bring the seconds up to now."""
        now = time.perf_counter()
        self.seconds, self._since = self.seconds + now - self._since, now

    def note_absences(self, round: int, why: Mapping[str, str]) -> None:
        """Who cannot be asked in a round (from 1), by name, and why; the log says so where that has changed."""
        if why and why.keys() != self.absences.keys():
            absent = "; ".join(f"{name} ({reason})" for name, reason in why.items())
            log.warning("round %d continues without %s", round, absent)
        self.absences = dict(why)
        for name in why:
            self.absent.setdefault(name, []).append(round)

    def totals(self) -> dict[str, float]:
        """Sums over the clients, under the names of the metrics."""
        return {
            "bytes_up": int(self.bytes_up.sum()),
            "bytes_down": int(self.bytes_down.sum()),
            "forward_passes": int(self.forward_passes.sum()),
            "seconds": round(self.seconds, 3),
            **({} if self.simulated_seconds is None else {"simulated_seconds": round(self.simulated_seconds, 3)}),
        }


def peak_memory() -> int:
    """Peak resident bytes of this process, 0 where the system does not say (Windows). Linux's own figure, where there
    is one, does not count the parent's."""
    try:
        status = Path("/proc/self/status").read_text(encoding="ascii")
        return 1024 * int(re.search(r"VmHWM:\s+(\d+)", status)[1])  # type: ignore[index]
    except (OSError, TypeError):
        try:
            import resource
        except ImportError:
            return 0
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
