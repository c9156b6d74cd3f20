"""Several tasks for a method that knows one: each by itself, in the same rounds. Nothing is shared between them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from headstart.core.ledger import Published
from headstart.core.message import Message
from headstart.core.statistics import Floats, Ints
from headstart.heads import LinearHead
from headstart.methods.base import Arrays, Reply, Setting, StatisticsMethod
from headstart.solvers.cohort import Cohort, Kept

States = tuple[Any, ...]


class PerTask:
    """One closed-form method for every task."""

    hears_once = True
    catches_up = False
    kept_shapes: Mapping[str, tuple[int, ...]] = {}
    personal = False

    def __init__(self, make: Callable[[Setting], StatisticsMethod], setting: Setting) -> None:
        self.setting = setting
        self.methods = [make(setting.alone(task)) for task in setting.tasks]
        for number, method in enumerate(self.methods):
            method.task = number
        self.bytes_per_client = max(method.bytes_per_client for method in self.methods)

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

    def summand(self, reply: Reply, round: int) -> dict[str, Floats]:
        """As the task's method; zeros for the other tasks."""
        found: dict[str, Floats] = {}
        for number, method in enumerate(self.methods):
            mine = method.summand(reply, round) if number == reply.task else method.dense(method.open()[0])
            found |= {f"{number}.{name}": values for name, values in mine.items()}
        return found

    def summands(self, state: States) -> dict[str, tuple[int, ...]]:
        """Those of all tasks."""
        parts = enumerate(zip(self.methods, state, strict=True))
        return {f"{t}.{name}": shape for t, (method, mine) in parts for name, shape in method.summands(mine).items()}

    def fold_sum(self, state: States, values: Mapping[str, Floats]) -> States:
        """Each task's part into its state."""
        parts = [
            {n.removeprefix(f"{t}."): v for n, v in values.items() if n.startswith(f"{t}.")} for t in range(len(state))
        ]
        return tuple(m.fold_sum(s, part) for m, s, part in zip(self.methods, state, parts, strict=True))

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

    def show(self, state: States, task: int = 0) -> Message:
        """As the task's method."""
        return Message(self.head(state, task).arrays())

    def shown(self, message: Message, task: int = 0, own: Arrays | None = None) -> LinearHead:
        """As the task's method."""
        return self.methods[task].shown(message)

    def published(self, state: States, counts: Ints) -> Published:
        """The sum over the tasks; a client's task is the one whose classes it has."""
        stops = np.cumsum([task.n_classes for task in self.setting.tasks])
        costs = []
        for method, mine, stop, task in zip(self.methods, state, stops, self.setting.tasks, strict=True):
            part = counts[:, stop - task.n_classes : stop]
            costs.append(method.published(mine, part[part.sum(axis=1) > 0]))
        return Published(sum(cost.bytes for cost in costs), sum(c.forward_passes for c in costs), costs[0].formula)

    def spent(self, state: States) -> dict[str, Any] | None:
        """The most that any task has spent: an example is one task's."""
        each = [method.spent(mine) for method, mine in zip(self.methods, state, strict=True)]
        return max((one for one in each if one is not None), key=lambda one: float(one["epsilon"]), default=None)

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
