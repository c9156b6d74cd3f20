"""FedPer: personal heads on a shared backbone (Arivazhagan et al., "Federated learning with personalization layers",
2019).

A client trains backbone and head together. Travels, both ways: the backbone. The head stays with the client and goes on
from round to round where it was.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from headstart.config.stage import Part, TrainingStage
from headstart.core.plan import Role
from headstart.methods.registry import register
from headstart.methods.training import Training


class FedPerStage(TrainingStage):
    """The backbone is averaged, every client keeps a head of its own (Arivazhagan et al., 2019)."""

    classifier: ClassVar[Role] = "personal"
    method: Literal["fedper"]
    train: Part = "all"


class FedPer(Training[FedPerStage]):
    """FedAvg under a plan that keeps the head personal."""


register(FedPerStage, FedPer)
