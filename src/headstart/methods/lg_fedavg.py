"""LG-FedAvg: personal bodies under a shared head (Liang et al., "Think locally, act globally: federated learning with
local and global representations", 2020, algorithm 1).

A client trains body and head together. Travels, both ways: the head. The body stays with the client. As in the paper,
let it start from a stage of FedAvg.
"""

from __future__ import annotations

from headstart.config.stage import LGFedAvgStage
from headstart.methods.training import TrainingMethod


class LGFedAvgMethod(TrainingMethod[LGFedAvgStage]):
    """FedAvg under a plan that keeps the body personal."""
