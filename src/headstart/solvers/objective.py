"""What local training minimises, and what comes of it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from headstart.config.stage import Rounds
from headstart.core.params import Params
from headstart.core.statistics import Features, Ints
from headstart.solvers.cohort import Cohort


@dataclass(frozen=True)
class Objective:
    """What a method adds to each client's loss: proximal/2 ‖w − centre‖² + ⟨correction, w⟩; and how it is minimised.

    Both terms are part of the objective, so momentum sees them; ``clip`` does not, which bounds the gradient of the
    loss. A client may train several times in a round, in phases: on some of the parameters, for other epochs, at
    another rate.
    """

    proximal: float | Features = 0.0
    """One factor for all clients, or one for each [M]."""
    correction: Mapping[str, Any] | None = None
    """Added to the gradient at every step [M, …]."""
    velocity: Mapping[str, Any] | None = None
    """The velocity to start with, which may be moved in place; zero where it is None."""
    in_place: frozenset[str] = frozenset()
    """Parameters of the start that may be moved in place, where there is no proximal term."""
    centre: Mapping[str, Any] | None = None
    """The centre of the proximal term; the start where it is None."""
    trains: frozenset[str] | None = None
    """Of the parameters that the plan loads, those that move; None: all."""
    epochs: int | None = None
    phase: int = 0
    """Batches of another phase are drawn anew."""
    inner_lr: float | None = None
    """Where it is set, batches go in pairs: the gradient of a step is that of the second batch, after a step of this
    size along the gradient of the first."""


@dataclass(frozen=True, eq=False)
class LocalResult:
    """Parameters after local training [M, …], how many steps each client took [M], and what else has changed."""

    params: Params
    steps: Ints
    passes: Ints
    """Forward passes through the backbone [M]; a step on it counts as three, as in the papers."""
    velocity: Params
    statistics: Params = field(default_factory=Params)
    """Running statistics of batch norm, where they are trained along."""


class Solver(Protocol):
    """What clients do with the model they are given."""

    def __call__(self, start: Params, cohort: Cohort, round: int, objective: Objective) -> LocalResult:
        """From ``start`` [M, …] along each client's loss and the objective; batches by (seed, round, client)."""


def learning_rate(stage: Rounds, round: int) -> float:
    """The rate of a round (from 0): linear warm-up, then constant, stepwise or cosine decay."""
    warmup = stage.rounds // 10 if stage.warmup_rounds == "auto" else stage.warmup_rounds
    if round < warmup:
        return stage.lr * (round + 1) / (warmup + 1)
    done = (round - warmup) / max(stage.rounds - warmup, 1)
    if stage.schedule == "step":
        return stage.lr * (0.01 if done >= 0.75 else 0.1 if done >= 0.5 else 1.0)
    if stage.schedule == "cosine":
        return stage.lr * 0.5 * (1 + math.cos(math.pi * done))
    return stage.lr
