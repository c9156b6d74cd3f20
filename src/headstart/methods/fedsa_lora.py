"""FedSA-LoRA: of LoRA's factors, A is everybody's, B each client's own (Guo et al., ICLR 2025).

A tends to learn what clients have in common, B what sets them apart. A client trains both. Travels, both ways: A, and
the head. B stays with the client and goes on from round to round where it was. With one factor averaged and the other
alone, no mean of products is taken, and so none is wrong.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from headstart.config.stage import TrainingStage
from headstart.core.plan import Role
from headstart.methods.registry import register
from headstart.methods.training import Training


class FedSALoRAStage(TrainingStage):
    """Of LoRA's factors B A, A is averaged and B stays with the client (Guo et al., 2025)."""

    lora_b: ClassVar[Role] = "personal"
    method: Literal["fedsa-lora"]
    train: Literal["lora"] = "lora"


class FedSALoRA(Training[FedSALoRAStage]):
    """FedAvg under a plan that keeps B personal."""


register(FedSALoRAStage, FedSALoRA)
