"""Plans: for every parameter and buffer of a model, whether it is frozen, shared or personal.

Names start with the part they belong to: `body.`, `module.` or `head.`. What is shared is trained and travels; what is
personal is trained and stays with the client from round to round: no message holds it. What is frozen stays as the
stage found it, bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

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
    still: frozenset[str] = frozenset()
    """Parts that are personal and do not train: each client's own is loaded, and stays as it is."""
    lora_b: Role | None = None
    """Of LoRA's factors B A, the role of B where it is another than that of the module."""

    @property
    def changes_features(self) -> bool:
        """Whether training changes the features, so that they cannot be computed once."""
        return {self.body, self.module} != {"frozen"}

    def role(self, name: str) -> Role:
        """The role of a parameter by its name."""
        if self.lora_b is not None and ".lora_B." in name:
            return self.lora_b
        role: Role = getattr(self, part_of(name))
        return role

    def trains(self, name: str) -> bool:
        """Whether a parameter changes, by its name."""
        return self.role(name) != "frozen" and part_of(name) not in self.still

    def on_top_of(self, personal: Iterable[str], norm_statistics: str) -> Plan:
        """Parts that are each client's own already stay so, and move where this plan trains them."""
        still = {part for part in personal if getattr(self, part) == "frozen"}
        roles: dict[str, Role] = dict.fromkeys(still, "personal")
        if "body" in still and norm_statistics == "aggregate":
            roles["statistics"] = "personal"
        return replace(self, **roles, still=frozenset(still))


def part_of(name: str) -> str:
    """The part of the model that a parameter belongs to."""
    return "hidden" if name.startswith("head.hidden.") else name.partition(".")[0]


FROZEN = Plan("frozen", "frozen", "frozen", "frozen", "frozen")
"""Nothing is trained: a head is computed."""
