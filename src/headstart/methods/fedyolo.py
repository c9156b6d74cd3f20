"""FedYolo: one frozen transformer for any number of tasks (Zhang et al., "FedYolo: augmenting federated learning with
pre-trained transformers", 2023, algorithm 1).

Every task has a module and a head of its own. A round draws clients from all tasks; each trains its task's module and
head. Travels, both ways: these alone. The server averages per task, over the clients of the task that were drawn; a
task of which nobody was drawn stays as it is. With ``hide_task`` a client sends zeros for the other tasks beside its
own update, and one sum over all clients gives the same averages.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field, NonNegativeInt, PositiveInt

from headstart.config.stage import Auto, TrainingStage
from headstart.methods.registry import register
from headstart.methods.training import Training


class FedYoloStage(TrainingStage):
    """A module and a head for each task on one frozen transformer, averaged per task (Zhang et al., 2023)."""

    method: Literal["fedyolo"]
    train: Literal["lora", "adapter", "prefix", "vpt"] = "lora"
    rounds: PositiveInt = 150
    batch_size: PositiveInt | Literal["full"] = 32
    momentum: float = Field(default=0.9, ge=0, lt=1)
    schedule: Literal["constant", "step", "cosine"] = "cosine"
    warmup_rounds: NonNegativeInt | Auto = "auto"
    """The paper warms up and does not say for how long; "auto": for a tenth of the rounds."""
    weighting: Literal["examples", "uniform"] = "uniform"


class FedYolo(Training[FedYoloStage]):
    """FedAvg on modules; that tasks are averaged apart is a rule for every method."""


register(FedYoloStage, FedYolo)
