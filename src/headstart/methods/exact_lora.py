"""Exact means of LoRA's updates: the mean of factors B̄ Ā is not the mean of the clients' products B_k A_k.

Clients send their factors, as in FedAvg, and the server adds up their products beside them. With B_k = B + ΔB_k and A_k
= A + ΔA_k around what everybody received, what the mean of factors gets wrong is R = mean(ΔB_k ΔA_k) − ΔB̄ ΔĀ.

FedEx-LoRA (Singhal, Ponkshe and Vepakomma, ACL 2025) folds R into the frozen weight, W ← W + (alpha_lora / rank) R, so
that the model is the mean of the clients' models. Travels down: the factors, and the weights under them.

FlexLoRA (Bai et al., NeurIPS 2024) factors the mean B̄ Ā + R anew by its singular values, cut to the server's rank, and
gives client k the r_k largest of them: clients may have different ranks. Travels: factors of the server's rank.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from pydantic import Field, PositiveInt

from headstart.config.stage import TrainingStage
from headstart.core.message import Message
from headstart.core.params import Params
from headstart.core.reply import ClientResult
from headstart.core.statistics import Floats
from headstart.core.update import Blocks, Total
from headstart.methods.base import Arrays, Received, StageContext
from headstart.methods.registry import register
from headstart.methods.training import StageT, Training, TrainingState
from headstart.solvers.cohort import Cohort
from headstart.solvers.objective import Objective

_A, _B = ".lora_A.weight", ".lora_B.weight"


class _ExactStage(TrainingStage):
    products: ClassVar[bool] = True
    train: Literal["lora"] = "lora"


class FedExLoRAStage(_ExactStage):
    """LoRA with FedAvg, and what the mean of factors gets wrong folded into the weights (Singhal et al., 2025)."""

    one_task: ClassVar[str] = "folds one task's residual into weights that all tasks read; use flexlora"
    folds: ClassVar[bool] = True
    method: Literal["fedex-lora"]


class FlexLoRAStage(_ExactStage):
    """LoRA whose mean product is factored anew in every round, for clients of different ranks (Bai et al., 2024)."""

    method: Literal["flexlora"]
    ranks: Annotated[tuple[PositiveInt, ...], Field(strict=False, min_length=1)] | None = None
    """Of the clients, in turn: client k has the rank at k modulo their number; unset: everybody has the server's."""


class _Products(Training[StageT]):
    """FedAvg on factors, with the sum of their products beside that of the factors."""

    def __init__(self, stage: StageT, context: StageContext) -> None:
        super().__init__(stage, context)
        self.layers = [name.removesuffix(_A) for name in self.shapes if name.endswith(_A)]

    @cached_property
    def blocks(self) -> Blocks:  # type: ignore[override]
        """What is sent, and the products that the server makes of it."""
        shapes = {name: (self.shapes[name + _B][0], self.shapes[name + _A][1]) for name in self.layers}
        return {**self._sent, **{f"product.{name}": shape for name, shape in shapes.items()}}

    @cached_property
    def _sent(self) -> Blocks:
        blocks: Blocks = Training.blocks.func(self)  # type: ignore[attr-defined]  # what is cached is with the products
        return blocks

    def expected(self, task: int) -> Blocks:
        """The factors alone."""
        return self._sent

    def counted(self, arrays: Arrays) -> Arrays:
        """A client's update, and ΔB_k ΔA_k of every layer."""
        updates = {name: [arrays[f"update.{name}{end}"].astype(np.float64) for end in (_B, _A)] for name in self.layers}
        return {**arrays, **{f"product.{name}": left @ right for name, (left, right) in updates.items()}}

    def residuals(self, total: Total) -> dict[str, Floats]:
        """R of every layer."""
        mean, products = total.mean("update"), total.mean("product")
        return {name: products[name] - mean[name + _B] @ mean[name + _A] for name in self.layers}


class FedExLoRA(_Products[FedExLoRAStage]):
    """FedAvg on factors; the residual goes into the weights."""

    folds = FedExLoRAStage.folds

    def __init__(self, stage: FedExLoRAStage, context: StageContext) -> None:
        super().__init__(stage, context)
        assert self.network is not None
        self.weights = {name: f"body.{name.removeprefix('module.')}.weight" for name in self.layers}
        parameters = self.network.parameters
        found = {each: parameters[each].detach().cpu().double().numpy() for each in self.weights.values()}
        self.start, self.shared = self.start | found, self.shared | found
        core: Any = self.network.backbone.core if self.network.backbone else None
        layers = {name: core.get_submodule(name.removeprefix("module.")) for name in self.layers}
        self.turned = {name for name, layer in layers.items() if layer.fan_in_fan_out}
        """Layers that keep their matrix the other way round, as GPT-2's do."""

    def server_update(self, state: TrainingState, total: Total, round: int) -> TrainingState:
        """The mean of the factors, and of what is left of their products."""
        folded = {}
        for name, residual in self.residuals(total).items():
            folded[self.weights[name]] = self.stage.lora_scale * (residual.T if name in self.turned else residual)
        return self.step(state, total, total.mean("update") | folded)


class FlexLoRA(_Products[FlexLoRAStage]):
    """The mean product, factored anew; every client has as much of it as its rank allows."""

    def server_update(self, state: TrainingState, total: Total, round: int) -> TrainingState:
        """Factors of the mean product, largest singular values first; the rest as in FedAvg."""
        after = self.step(state, total, total.mean("update"))
        made: dict[str, Floats] = {}
        for name, residual in self.residuals(total).items():
            left, values, right = np.linalg.svd(
                after.params[name + _B] @ after.params[name + _A] + residual, full_matrices=False
            )
            rank = min(self.stage.rank, len(values))
            # All of the size in B, as in LoRA's beginning: a direction that nobody has used yet can still be learned.
            made[name + _B] = _padded(left[:, :rank] * values[:rank], self.shapes[name + _B])
            made[name + _A] = _padded(right[:rank], self.shapes[name + _A])
        return replace(after, params=after.params | made)

    def receive(self, cohort: Cohort, message: Message) -> Received:
        """What each client starts from: as many of the directions as its rank. The others have no gradient at zero."""
        received, given = super().receive(cohort, message), Params()
        if self.stage.ranks is None:
            return replace(received, blocks={"whole": received.model})
        ranks = [self.stage.ranks[client % len(self.stage.ranks)] for client in cohort.clients.tolist()]
        for name in self.layers:
            left, right = (received.model[name + end].clone() for end in (_B, _A))
            for place, rank in enumerate(ranks):
                left[place, :, rank:], right[place, rank:] = 0, 0
            given[name + _B], given[name + _A] = left, right
        return replace(received, model=received.model | given, blocks={"whole": received.model})

    def client_update(self, cohort: Cohort, received: Received) -> ClientResult:
        """Local training; the update is counted from the whole of what was sent."""
        local = self.solve(received.model, cohort, received.round, Objective())
        return self.result(cohort, local, update=local.params - received["whole"])


def _padded(array: Floats, shape: tuple[int, ...]) -> Floats:
    """With zeros behind, where a matrix is smaller than the rank."""
    return np.pad(array, [(0, size - there) for size, there in zip(shape, array.shape, strict=True)])


register(FedExLoRAStage, FedExLoRA)
register(FlexLoRAStage, FlexLoRA)
