"""FedAvg: local SGD, then the mean (McMahan et al., AISTATS 2017). With ``train = "head"`` it is a linear
probe, with ``train = "all"`` fine-tuning.

Travels down: what is trained. Travels up: the client's update and how many examples are behind it.
"""

from __future__ import annotations

from typing import Literal

from pydantic import PositiveFloat

from headstart.config.stage import TrainingStage
from headstart.methods.registry import register
from headstart.methods.training import Training


class FedAvgStage(TrainingStage):
    """Local SGD, then the mean (McMahan et al., AISTATS 2017)."""

    method: Literal["fedavg"]
    server_lr: PositiveFloat = 1.0
    """Learning rate of the server's step along the mean update; 1: the mean itself."""


class FedAvg(Training[FedAvgStage]):
    """x ← x + η_g Σ n_k Δ_k / Σ n_k: the skeleton itself."""


register(FedAvgStage, FedAvg)
