"""LG-FedAvg: personal backbones under a shared head (Liang et al., "Think locally, act globally: federated learning
with local and global representations", 2020, algorithm 1).

A client trains backbone and head together. Travels, both ways: the head. The backbone stays with the client. As in the
paper, let it start from a stage of FedAvg.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from headstart.config.stage import Part, TrainingStage
from headstart.core.plan import Role
from headstart.methods.registry import register
from headstart.methods.training import Training


class LGFedAvgStage(TrainingStage):
    """The head is averaged, every client keeps a backbone of its own (Liang et al., 2020)."""

    representation: ClassVar[Role] = "personal"
    method: Literal["lg-fedavg"]
    train: Part = "all"


class LGFedAvg(Training[LGFedAvgStage]):
    """FedAvg under a plan that keeps the backbone personal."""


register(LGFedAvgStage, LGFedAvg)
