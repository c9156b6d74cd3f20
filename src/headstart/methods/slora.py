"""SLoRA: sparse fine-tuning primes low-rank updates (Babakniya et al., 2023, as N. Bernier's thesis describes it).

In the first rounds a few entries of the matrices that LoRA will adapt are trained; which ones, the seed says, so only
their values travel. Their change ΔW is then cut to rank r by its singular values, B = U √S, A = √S Vᵀ, the matrices go
back to the pre-trained ones, and LoRA goes on from there. The head is trained all along. Both parts are FedAvg.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import numpy as np
from pydantic import Field, PositiveFloat, PositiveInt

from headstart.config.stage import TrainingStage
from headstart.core.message import Message
from headstart.core.params import Params
from headstart.core.reply import ClientResult
from headstart.core.statistics import Floats
from headstart.core.update import Blocks, Total
from headstart.heads import LinearHead
from headstart.methods.base import Arrays, Method, Received, StageContext
from headstart.methods.registry import register, with_temperature
from headstart.methods.tasks import TrainingStates, TrainingTasks, training_of
from headstart.methods.training import Training, TrainingState
from headstart.solvers.cohort import Cohort


class SLoRAStage(TrainingStage):
    """Sparse fine-tuning, whose low-rank part LoRA then starts from (Babakniya et al., 2023)."""

    phased: ClassVar[bool] = True
    method: Literal["slora"]
    train: Literal["lora"] = "lora"
    rank: PositiveInt = 16
    alpha_lora: PositiveFloat = 32.0
    density: float = Field(default=0.1, gt=0, le=1)
    """Share of the entries that priming trains."""
    priming: float = Field(default=0.2, ge=0, lt=1)
    """Share of the rounds that prime: one at least, or none where it is 0."""
    server_lr: PositiveFloat = 1.0
    """Learning rate of the server's step along the mean update; 1: the mean itself."""


@dataclass(frozen=True)
class SLoRAState:
    """The state of FedAvg in either part."""

    primed: bool
    inner: TrainingState


@dataclass(frozen=True)
class SLoRAStates:
    """The same of several tasks."""

    primed: bool
    inner: TrainingStates


AnyState = SLoRAState | SLoRAStates


class SLoRA(Method[AnyState]):
    """FedAvg on a mask, a singular value decomposition, FedAvg on LoRA's factors; each task by itself, in one mask."""

    def __init__(self, stage: SLoRAStage, context: StageContext) -> None:
        assert context.model is not None
        self.stage, self.context, self.body = stage, context, context.model
        self.state_type = SLoRAState if len(context.tasks) == 1 else SLoRAStates
        self.weighting = stage.weighting
        self.seed = context.seed[0] * 1000 + context.seed[1]
        self.switch = max(1, round(stage.priming * stage.rounds)) if stage.priming else 0
        self.tuning = self.priming = self.part = self._training()
        """``part``: the one that the backbone is prepared for."""
        self.memory_per_client = self.tuning.memory_per_client
        if self.switch:
            self._prepare_priming()

    def _prepare_priming(self) -> None:
        """A mask on top of LoRA as it starts, which changes nothing."""
        tuning: Any = self.tuning
        tuning.load(tuning.model(tuning.init()))
        settings = {**self.stage.module_settings, "density": self.stage.density}
        self.mask = self.body.attach("mask", settings, self.seed)
        self.priming = self.part = self._training()

    def _training(self) -> Training[SLoRAStage] | TrainingTasks:
        """FedAvg on the module that was attached last."""

        def make(context: StageContext) -> Training[SLoRAStage]:
            return Training(with_temperature(self.stage, context), context)  # type: ignore[arg-type]

        return training_of(make, self.context, self.stage.hide_task)

    @property
    def blocks(self) -> Blocks:  # type: ignore[override]
        """Those of the part that is under way."""
        return self.part.blocks

    def expected(self, task: int) -> Blocks:
        """Of these, what a client of a task sends."""
        return self.part.expected(task)

    def _enter(self, primed: bool) -> Any:
        """The part that a state or a message is about, with the backbone prepared for it."""
        if primed and self.part is not self.tuning:
            self.body.detach(1)
            self.part = self.tuning
        elif not primed and self.part is self.tuning:
            self._prepare_priming()
        return self.part

    def init(self) -> AnyState:
        """Nothing primed yet; without priming, LoRA as it starts."""
        return self._state(not self.switch, self.part.init())

    def _state(self, primed: bool, inner: Any) -> AnyState:
        made: AnyState = self.state_type(primed, inner)
        return made

    def broadcast(self, state: AnyState, round: int, since: int, task: int = 0) -> Message:
        """The masked values or the factors, and the head; and which of them."""
        message = self._enter(state.primed).broadcast(state.inner, round, since, task)
        return Message(message.arrays, {**message.scalars, "primed": state.primed})

    def receive(self, cohort: Cohort, message: Message) -> Received:
        """As FedAvg; a client learns from the message that priming is over."""
        received: Received = self._enter(bool(message.scalars["primed"])).receive(cohort, message)
        return received

    def client_update(self, cohort: Cohort, received: Received) -> ClientResult:
        """SGD on what the message holds."""
        return self.part.client_update(cohort, received)

    def server_update(self, state: AnyState, total: Total, round: int) -> AnyState:
        """As FedAvg; after the last round of priming, LoRA takes over."""
        inner = self._enter(state.primed).server_update(state.inner, total, round)
        if state.primed or round + 1 < self.switch:
            return self._state(state.primed, inner)
        begin = self._enter(True).init()
        if isinstance(inner, TrainingState):
            return self._state(True, self._primed(begin, inner))
        tasks = zip(begin.tasks, inner.tasks, strict=True)
        return self._state(True, replace(begin, tasks=tuple(self._primed(new, before) for new, before in tasks)))

    def _primed(self, begin: TrainingState, inner: TrainingState) -> TrainingState:
        """LoRA as it starts, with the factors and the head that priming made."""
        heads = inner.params.select(name for name in inner.params if name.startswith("head."))
        return replace(begin, params=begin.params | self._factors(inner) | heads)

    def _factors(self, state: TrainingState) -> Params:
        """LoRA's factors of every matrix that has changed: the best approximation of its change of that rank."""
        from headstart.modules.mask import entries

        scale, found = self.stage.lora_scale, Params()
        shapes = self.tuning.methods[0].shapes  # type: ignore[union-attr]
        for number, name in enumerate(self.mask.parameters):
            left_name, right_name = (f"module.{name}.lora_{side}.weight" for side in "BA")
            change = np.zeros((shapes[left_name][0], shapes[right_name][1]))
            values = state.params[f"module.{name}"]
            change.ravel()[entries(change.size, self.stage.density, self.seed, number)] = values
            if change.any():  # factors of nothing would have no gradient
                found[left_name], found[right_name] = factors(change / scale, self.stage.rank)
        return found

    def train_on_server(self, state: AnyState, cohort: Cohort, round: int) -> AnyState:
        """As FedAvg."""
        return self._state(state.primed, self._enter(state.primed).train_on_server(state.inner, cohort, round))

    def model(self, state: AnyState, task: int = 0) -> Message:
        """The masked values or the factors, and the head; and which of them."""
        return Message(self._enter(state.primed).model(state.inner, task).arrays, {"primed": state.primed})

    def load(self, message: Message, task: int = 0, personal: Arrays | None = None) -> LinearHead:
        """Write the values or the factors into their modules; the head."""
        head: LinearHead = self._enter(bool(message.scalars["primed"])).load(message, task)
        return head


def factors(matrix: Floats, rank: int) -> tuple[Floats, Floats]:
    """B [m, r] and A [r, n] with the best B A of that rank, the singular values split evenly between them; zeros where
    the matrix has fewer."""
    left, values, right = np.linalg.svd(matrix, full_matrices=False)
    roots = np.sqrt(values[:rank])
    missing = (0, rank - len(roots))
    return np.pad(left[:, :rank] * roots, ((0, 0), missing)), np.pad(roots[:, None] * right[:rank], (missing, (0, 0)))


register(SLoRAStage, SLoRA)
