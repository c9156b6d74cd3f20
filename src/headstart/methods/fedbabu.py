"""FedBABU: body aggregation and body update (Oh et al., "FedBABU: toward enhanced representation for federated
image classification", ICLR 2022, algorithm 1).

The head is random, the same on all clients, and stays as it is; clients train and the server averages what is below
it. Travels, both ways: the backbone. A `personalise` stage then fine-tunes on each client. With μ > 0 each client is
pulled towards the global backbone: FedProx+BABU.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import NonNegativeFloat

from headstart.config.stage import Part, TrainingStage
from headstart.core.plan import Role
from headstart.methods.fedprox import FedProx
from headstart.methods.registry import register


class FedBABUStage(TrainingStage):
    """The backbone under a head that stays as it starts; clients fine-tune afterwards (Oh et al., ICLR 2022)."""

    classifier: ClassVar[Role] = "frozen"
    method: Literal["fedbabu"]
    train: Part = "body"
    """What is trained below the head: the backbone, a module, or, with "head", the hidden layers of an MLP."""
    mu: NonNegativeFloat = 0.0
    """Pull towards the global model: FedProx+BABU where it is not 0."""


class FedBABU(FedProx):
    """FedAvg, or FedProx, under a plan that freezes the head."""


register(FedBABUStage, FedBABU)
