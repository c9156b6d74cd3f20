"""Plans: for every parameter and buffer of a model, whether it is frozen, shared or personal.

Names start with the part they belong to: `body.`, `module.` or `head.`. What is shared is trained and travels; what is
personal is trained and stays with the client from round to round: no message holds it. What is frozen stays as the
stage found it, bit for bit.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from headstart.core.params import Shapes

Role = Literal["frozen", "shared", "personal"]
"""Of a parameter: it stays as it is; it is trained and travels; it is trained and stays with the client."""


@dataclass(frozen=True)
class Plan:
    """The role of each part of a model.

    ``hidden`` are the layers before the last one of an MLP head; ``statistics`` are the running means and variances of
    batch norm.
    """

    body: Role
    module: Role
    hidden: Role
    head: Role
    statistics: Role

    @property
    def changes_features(self) -> bool:
        """Whether training changes the features, so that they cannot be computed once."""
        return {self.body, self.module} != {"frozen"}

    def role(self, name: str) -> Role:
        """The role of a parameter by its name."""
        part = "hidden" if name.startswith("head.hidden.") else name.partition(".")[0]
        role: Role = getattr(self, part)
        return role

    def trained(self, shapes: Mapping[str, tuple[int, ...]]) -> Shapes:
        """The parameters that change."""
        return {name: shape for name, shape in shapes.items() if self.role(name) != "frozen"}
