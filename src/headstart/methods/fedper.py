"""FedPer: personal heads on a shared body (Arivazhagan et al., "Federated learning with personalization layers", 2019).

A client trains body and head together. Travels, both ways: the body. The head stays with the client and goes on from
round to round where it was.
"""

from __future__ import annotations

from headstart.methods.training import TrainingMethod
from headstart.stages import FedPerStage


class FedPerMethod(TrainingMethod[FedPerStage]):
    """FedAvg under a plan that keeps the head personal."""
