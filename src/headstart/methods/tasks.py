"""Several tasks for a method that knows one: each by itself, in the same rounds. Nothing is shared between them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from headstart.heads import LinearHead
from headstart.ledger import Published
from headstart.methods.base import Arrays, Cohort, Kept, Reply, Setting, StatisticsMethod
from headstart.statistics import Ints
from headstart.wire import Message

States = tuple[Any, ...]


class PerTask:
    """One closed-form method for every task."""

    hears_once = True
    catches_up = False
    kept_shapes: Mapping[str, tuple[int, ...]] = {}
    bytes_per_client = 0
    personal = False

    def __init__(self, make: Callable[[Setting], StatisticsMethod], setting: Setting) -> None:
        self.setting = setting
        self.methods = [make(setting.alone(task)) for task in setting.tasks]

    def open(self) -> States:
        """Nothing heard yet of any task."""
        return tuple(method.open() for method in self.methods)

    def instruct(self, state: States, round: int, since: int, task: int = 0) -> Message:
        """As the task's method."""
        return self.methods[task].instruct(state[task], round, since)

    def answer(self, cohort: Cohort, message: Message) -> list[Reply]:
        """As the task's method."""
        return self.methods[cohort.task].answer(cohort, message)

    def fold(self, state: States, reply: Reply) -> States:
        """Into the state of the reply's task."""
        mine = self.methods[reply.task].fold(state[reply.task], reply)
        return (*state[: reply.task], mine, *state[reply.task + 1 :])

    def close(self, state: States) -> States:
        """Nothing to do: heads are solved for when they are asked for."""
        return state

    def refine(self, state: States, cohort: Cohort) -> States:
        """Nothing is trained on the server."""
        return state

    def head(self, state: States, task: int = 0, own: Arrays | None = None) -> LinearHead:
        """The head of a task; no class is known where none of its clients was heard yet."""
        if not any(len(heard.labels) for heard in state[task]):
            none, dim = np.zeros(0, np.int64), self.setting.dim
            return LinearHead.from_classes(self.setting.tasks[task].n_classes, none, np.zeros((0, dim)), np.zeros(0))
        return self.methods[task].head(state[task])

    def place(self, state: States, task: int = 0, own: Arrays | None = None) -> None:
        """The body is left alone."""
        return None

    def own(self, kept: Kept, task: int = 0) -> Mapping[str, npt.NDArray[np.float32]]:
        """Nothing."""
        return {}

    def published(self, state: States, counts: Ints) -> Published:
        """The sum over the tasks; a client's task is the one whose classes it has."""
        stops = np.cumsum([task.n_classes for task in self.setting.tasks])
        costs = []
        for method, mine, stop, task in zip(self.methods, state, stops, self.setting.tasks, strict=True):
            part = counts[:, stop - task.n_classes : stop]
            costs.append(method.published(mine, part[part.sum(axis=1) > 0]))
        return Published(sum(cost.bytes for cost in costs), sum(c.forward_passes for c in costs), costs[0].formula)

    def freeze(self, state: States) -> Message:
        """The states of all tasks, by their numbers."""
        arrays: dict[str, Any] = {}
        for number, (method, mine) in enumerate(zip(self.methods, state, strict=True)):
            arrays |= {f"{number}.{name}": array for name, array in method.freeze(mine).arrays.items()}
        return Message(arrays)

    def thaw(self, message: Message) -> States:
        """The states that `freeze` wrote."""
        states = []
        for number, method in enumerate(self.methods):
            prefix = f"{number}."
            arrays = {n.removeprefix(prefix): a for n, a in message.arrays.items() if n.startswith(prefix)}
            states.append(method.thaw(Message(arrays)))
        return tuple(states)
