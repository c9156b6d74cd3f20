"""SLoRA: sparse fine-tuning primes low-rank updates (Babakniya et al., 2023, as the thesis describes it).

In the first rounds a few entries of the matrices that LoRA will adapt are trained; which ones, the seed says, so only
their values travel. Their change ΔW is then cut to rank r by its singular values, B = U √S, A = √S Vᵀ, the matrices go
back to the pre-trained ones, and LoRA goes on from there. The head is trained all along. Both parts are FedAvg.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from headstart.config.stage import SLoRAStage
from headstart.core.ledger import Published
from headstart.core.message import Message
from headstart.core.params import Vectors
from headstart.core.statistics import Floats, Ints
from headstart.heads import LinearHead
from headstart.methods.base import Arrays, Reply, Setting
from headstart.methods.training import TrainingMethod, TrainingState
from headstart.modules import attach
from headstart.modules.mask import entries
from headstart.solvers.cohort import Cohort, Kept


@dataclass(frozen=True)
class SLoRAState:
    """The state of FedAvg in either part."""

    primed: bool
    inner: TrainingState


class SLoRAMethod:
    """FedAvg on a mask, a singular value decomposition, FedAvg on LoRA's factors."""

    hears_once = False
    catches_up = False
    personal = False

    def __init__(self, stage: SLoRAStage, setting: Setting) -> None:
        assert setting.backbone is not None
        self.stage, self.setting = stage, setting
        self.seed = setting.seed[0] * 1000 + setting.seed[1]
        self.mask = attach("mask", setting.backbone, {"density": stage.density, "blocks": stage.blocks}, self.seed)
        self.priming = TrainingMethod(stage, replace(setting, module=self.mask))
        self.tuning = TrainingMethod(stage, setting)
        self.switch = max(1, round(stage.priming * stage.rounds)) if stage.priming else 0
        if not self.switch:
            self.mask.detach()
        self.kept_shapes = self.priming.kept_shapes
        self.bytes_per_client = self.priming.bytes_per_client

    def _part(self, state: SLoRAState) -> TrainingMethod[SLoRAStage]:
        return self.tuning if state.primed else self.priming

    def open(self) -> SLoRAState:
        """Nothing primed yet; without priming, LoRA as it starts."""
        return SLoRAState(not self.switch, (self.priming if self.switch else self.tuning).open())

    def instruct(self, state: SLoRAState, round: int, since: int, task: int = 0) -> Message:
        """The masked values or the factors, and the head."""
        return self._part(state).instruct(state.inner, round, since)

    def answer(self, cohort: Cohort, message: Message) -> list[Reply]:
        """SGD on what the message holds."""
        return self._of(message).answer(cohort, message)

    def _of(self, message: Message) -> TrainingMethod[SLoRAStage]:
        """The part that a message is about; a client learns from it that priming is over."""
        if not any(".lora_" in name for name in message.arrays):
            return self.priming
        self.mask.detach()
        return self.tuning

    def fold(self, state: SLoRAState, reply: Reply) -> SLoRAState:
        """As FedAvg."""
        return replace(state, inner=self._part(state).fold(state.inner, reply))

    def summand(self, reply: Reply, round: int) -> dict[str, np.ndarray]:
        """As FedAvg."""
        return self._of(reply.message).summand(reply, round)

    def summands(self, state: SLoRAState) -> dict[str, tuple[int, ...]]:
        """Those of the part that is under way."""
        return self._part(state).summands(state.inner)

    def fold_sum(self, state: SLoRAState, values: Mapping[str, np.ndarray]) -> SLoRAState:
        """As FedAvg."""
        return replace(state, inner=self._part(state).fold_sum(state.inner, values))

    def close(self, state: SLoRAState) -> SLoRAState:
        """As FedAvg; after the last round of priming, LoRA takes over."""
        inner = self._part(state).close(state.inner)
        if state.primed or inner.round < self.switch:
            return SLoRAState(state.primed, inner)
        self.mask.detach()
        begin = self.tuning.open()
        heads = {name: value for name, value in inner.parameters.items() if name.startswith("head.")}
        return SLoRAState(
            True, replace(begin, parameters=begin.parameters | self._factors(inner) | heads, round=inner.round)
        )

    def _factors(self, state: TrainingState) -> Vectors:
        """LoRA's factors of every matrix: the best approximation of its change of that rank."""
        scale, found = self.stage.alpha_lora / self.stage.rank, {}
        for number, name in enumerate(self.mask.parameters):
            change = np.zeros(self._shape(name))
            values = state.parameters[f"module.{name}"]
            change.ravel()[entries(change.size, self.stage.density, self.seed, number)] = values
            left, right = factors(change / scale, self.stage.rank)
            found[f"module.{name}.lora_B.weight"], found[f"module.{name}.lora_A.weight"] = left, right
        return found

    def _shape(self, name: str) -> tuple[int, int]:
        begin = self.tuning.shapes
        return begin[f"module.{name}.lora_B.weight"][0], begin[f"module.{name}.lora_A.weight"][1]

    def refine(self, state: SLoRAState, cohort: Cohort) -> SLoRAState:
        """As FedAvg."""
        return replace(state, inner=self._part(state).refine(state.inner, cohort))

    def spent(self, state: SLoRAState) -> dict[str, Any] | None:
        """As FedAvg, over the rounds of both parts."""
        return self._part(state).spent(state.inner)

    def head(self, state: SLoRAState, task: int = 0, own: Arrays | None = None) -> LinearHead:
        """The head as it is."""
        return self._part(state).head(state.inner)

    def place(self, state: SLoRAState, task: int = 0, own: Arrays | None = None) -> None:
        """Write the masked values or the factors into their modules."""
        self._part(state).place(state.inner)

    def own(self, kept: Kept, task: int = 0) -> dict[str, npt.NDArray[np.float32]]:
        """Nothing."""
        return {}

    def show(self, state: SLoRAState, task: int = 0) -> Message:
        """The masked values or the factors, and the head."""
        return self._part(state).show(state.inner)

    def shown(self, message: Message, task: int = 0, own: Arrays | None = None) -> LinearHead:
        """The head, once the values or the factors are in their modules."""
        return self._of(message).shown(message)

    def published(self, state: SLoRAState, counts: Ints) -> Published:
        """The thesis's Eq. 7 with the sizes of this model: one direction, without the head."""
        per_round = self.stage.sampled(self.setting.n_clients)
        sizes = [
            sum(int(np.prod(shape)) for name, shape in part.shapes.items() if name.startswith("module."))
            for part in (self.priming, self.tuning)
        ]
        rounds = (min(state.inner.round, self.switch), max(state.inner.round - self.switch, 0))
        total = 4 * per_round * (rounds[0] * sizes[0] + rounds[1] * sizes[1])
        passes = state.inner.round * self.tuning.round_passes(counts)
        return Published(total, passes, "thesis, Eq. 7: (R₁ · density · |W| + R₂ · |LoRA|) · K · 4 bytes, up")

    def freeze(self, state: SLoRAState) -> Message:
        """The state of the part that is under way."""
        inner = self._part(state).freeze(state.inner)
        return Message(inner.arrays, {**inner.scalars, "primed": state.primed})

    def thaw(self, message: Message) -> SLoRAState:
        """The state that `freeze` wrote."""
        primed = bool(message.scalars["primed"])
        if primed:
            self.mask.detach()
        return SLoRAState(primed, (self.tuning if primed else self.priming).thaw(message))


def factors(matrix: Floats, rank: int) -> tuple[Floats, Floats]:
    """B [m, r] and A [r, n] with the best B A of that rank, the singular values split evenly between them."""
    left, values, right = np.linalg.svd(matrix, full_matrices=False)
    roots = np.sqrt(values[:rank])
    return left[:, :rank] * roots, roots[:, None] * right[:rank]
