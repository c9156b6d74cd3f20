"""FedPer: personal heads on a shared body (Arivazhagan et al., "Federated learning with personalization layers", 2019).

A client trains body and head together. Travels, both ways: the body. The head stays with the client and goes on from
round to round where it was.
"""

from __future__ import annotations

from headstart.config.stage import FedPerStage
from headstart.methods.training import TrainingMethod


class FedPerMethod(TrainingMethod[FedPerStage]):
    """FedAvg under a plan that keeps the head personal."""
