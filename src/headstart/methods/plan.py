"""Plans: for every parameter and buffer of a model, whether it is frozen, shared or personal.

Names start with the part they belong to: `body.` or `head.`. What is shared is trained and travels; what is frozen
stays as the stage found it, bit for bit.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from headstart.recipe import Training

Role = Literal["frozen", "shared"]
Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class Plan:
    """The role of each part of a model; ``statistics`` are the running means and variances of batch norm."""

    body: Role
    head: Role
    statistics: Role

    @classmethod
    def of(cls, stage: Training) -> Plan:
        """The plan that a stage's ``train`` and ``norm_statistics`` name."""
        body: Role = "frozen" if stage.train == "head" else "shared"
        head: Role = "frozen" if stage.train == "body" else "shared"
        return cls(body, head, body if stage.norm_statistics == "aggregate" else "frozen")

    def shared(self, shapes: Mapping[str, tuple[int, ...]]) -> Shapes:
        """The parameters that are trained and travel."""
        return {name: shape for name, shape in shapes.items() if getattr(self, name.split(".")[0]) == "shared"}


def head_shapes(stage: Training, n_classes: int, dim: int) -> Shapes:
    """Parameters of a head on features of ``dim``: a linear layer, behind two hidden layers where it is an MLP."""
    if stage.head == "linear":
        return {"head.weight": (n_classes, dim), "head.bias": (n_classes,)}
    width = stage.hidden
    return {
        "head.hidden.0.weight": (width, dim),
        "head.hidden.0.bias": (width,),
        "head.hidden.1.weight": (width, width),
        "head.hidden.1.bias": (width,),
        "head.weight": (n_classes, width),
        "head.bias": (n_classes,),
    }
