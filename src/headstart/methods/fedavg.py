"""FedAvg: local SGD, then the mean (McMahan et al., AISTATS 2017). With ``train = "head"`` it is a linear
probe, with ``train = "all"`` fine-tuning.

Travels down: what is trained. Travels up: the client's update and how many examples are behind it.
"""

from __future__ import annotations

from headstart.config.stage import FedAvgStage
from headstart.methods.training import TrainingMethod


class FedAvgMethod(TrainingMethod[FedAvgStage]):
    """The skeleton itself: x ← x + η_g Σ n_k Δ_k / Σ n_k."""
