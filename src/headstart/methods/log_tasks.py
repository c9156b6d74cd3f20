"""Several tasks for a method whose model is a log of steps: a log for each task, and one for what they have in common.

What belongs to a task, its module and its head, takes the steps of its own clients; a backbone that trains takes those
of all clients. A client's slopes are along one direction of all that it has, and so they count for both.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from headstart.core.message import Message
from headstart.core.params import Params
from headstart.core.reply import ClientResult
from headstart.core.update import Blocks, Total, array_name
from headstart.heads import LinearHead
from headstart.methods.base import Arrays, Method, Received, StageContext
from headstart.methods.fedmezo import NO_STEP, FedMeZO, Log, Replay
from headstart.solvers.cohort import Cohort

if TYPE_CHECKING:  # methods are known before torch is loaded
    from torch import Tensor

_COMMON = ""


@dataclass(frozen=True)
class Logs:
    """The state of the server: the logs of the model's parts, all of the same length."""

    parts: tuple[Log, ...]


class LogTasks(Method[Logs]):
    """FedMeZO for every task, on one backbone; a part of the model is what one log moves: `@TASK`, or what is
    common."""

    replays = True
    state_type = Logs
    methods: Sequence[FedMeZO] = ()

    def __init__(self, make: Callable[[StageContext], FedMeZO], context: StageContext) -> None:
        self.methods = [make(context.alone(number)) for number in range(len(context.tasks))]
        first = self.methods[0]
        self.weighting = first.weighting
        common = [name for name in first.network.trained if name.startswith("body.")]
        self.replay_by_part: dict[str, Replay] = {_COMMON: first.replay_of(common)} if common else {}
        self._own = [f"@{task.name}" for task in context.tasks] if len(common) < len(first.network.trained) else []
        self._waiting: dict[str, dict[str, Tensor]] = {}
        self._here = len(self._own) - 1
        """The task whose own parameters the backbone has; those of the others wait."""
        for name, method in zip(self._own, self.methods, strict=False):
            trained, given = method.network.trained, method.context.task.module or {}
            values = {f"module.{each}": value for each, value in given.items() if f"module.{each}" in trained}
            method.network.load(_tensors(values))
            self.replay_by_part[name] = method.replay_of([each for each in trained if each not in common])
            self._waiting[name] = self.replay_by_part[name].values()
        self._waiting.pop(self._own[-1] if self._own else _COMMON, None)

    def _parts(self, task: int) -> list[str]:
        """Of the model's parts, those that a task has."""
        return [name for name in self.replay_by_part if name in (_COMMON, *self._own[task : task + 1])]

    @property
    def blocks(self) -> Blocks:  # type: ignore[override]
        """The slopes of every part."""
        return {array_name("slopes", name): self.methods[0].blocks["slopes"] for name in self.replay_by_part}

    def expected(self, task: int) -> Blocks:
        """The slopes of the task's parts."""
        return {array_name("slopes", name): self.methods[task].blocks["slopes"] for name in self._parts(task)}

    def check(self, message: Message) -> None:
        """As the method."""
        for slopes in message.arrays.values():
            self.methods[0].check(Message({"slopes": slopes}))

    # ------------------------------------------------------------------------------------------------ on the server

    def init(self) -> Logs:
        """Empty logs."""
        return Logs(tuple(self.methods[0].init() for _ in self.replay_by_part))

    def broadcast(self, state: Logs, round: int, since: int, task: int = 0) -> Message:
        """As the method, for the parts of a task."""
        seed = self.methods[0].seed_of(round)
        return self._message(state, task, max(since, 0), {"round": round, "seed": seed})

    def _message(self, state: Logs, task: int, first: int, scalars: dict[str, int]) -> Message:
        """The logs of a task's parts from step ``first`` on."""
        logs = dict(zip(self.replay_by_part, state.parts, strict=True))
        sent = {name: logs[name].message(first).arrays for name in self._parts(task)}
        arrays = {array_name(kind, name): array for name, each in sent.items() for kind, array in each.items()}
        return Message(arrays, {**scalars, "first": first})

    def server_update(self, state: Logs, total: Total, round: int) -> Logs:
        """The mean slopes of every part enter its log; a part that nobody replied for does not move."""
        parts, seed = [], self.methods[0].seed_of(round)
        for name, log in zip(self.replay_by_part, state.parts, strict=True):
            block = array_name("slopes", name)
            replied = total.weight(block) > 0
            slopes = total.sums[block] / total.weight(block) if replied else np.zeros(log.slopes.shape[1])
            parts.append(log.appended(seed if replied else NO_STEP, slopes))
        return Logs(tuple(parts))

    def model(self, state: Logs, task: int = 0) -> Message:
        """The whole logs of a task's parts."""
        return self._message(state, task, 0, {})

    def load(self, message: Message, task: int = 0, personal: Arrays | None = None) -> LinearHead:
        """Take the steps of the logs; the head after them."""
        self._apply(0, message, task)
        return self.methods[task].head()

    # ----------------------------------------------------------------------------------------------- on the clients

    def receive(self, cohort: Cohort, message: Message) -> Received:
        """Catch up with the logs; all clients of a task have the same weights."""
        self._apply(int(message.scalars["first"]), message, cohort.task)
        return Received(int(message.scalars["round"]), scalars=message.scalars)

    def client_update(self, cohort: Cohort, received: Received) -> ClientResult:
        """As the task's method; the slopes count for each of the task's parts."""
        result = self.methods[cohort.task].client_update(cohort, received)
        slopes = result.blocks["slopes"][_COMMON]
        return replace(result, blocks={"slopes": Params(dict.fromkeys(self._parts(cohort.task), slopes))})

    def _apply(self, first: int, message: Message, task: int) -> None:
        """Give the backbone what is the task's own, and take the steps of its parts."""
        self._enter(task)
        for name in self._parts(task):
            arrays = {kind: message.arrays[array_name(kind, name)] for kind in ("seeds", "slopes")}
            self.replay_by_part[name].apply(first, Log.of(Message(arrays)))

    def _enter(self, task: int) -> None:
        if not self._own or task == self._here:
            return
        before, now = self._own[self._here], self._own[task]
        self._waiting[before] = self.replay_by_part[before].values()
        self.methods[task].network.load(self._waiting.pop(now))
        self._here = task


def _tensors(arrays: Arrays) -> dict[str, Tensor]:
    from headstart.solvers.network import tensors

    return tensors(arrays)
