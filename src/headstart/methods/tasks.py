"""Several tasks for methods that know one: what belongs to a task is trained by its clients, what is common by all.

Every task has a head and a module of its own; a backbone that trains is common to all. Where several tasks are
together, the names of what belongs to one end in `@TASK`; a method sees plain names, one task, and the clients of that
part.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from headstart.core.message import Message
from headstart.core.params import Params
from headstart.core.reply import ClientResult, StatisticsResult
from headstart.core.update import Blocks, StatisticsTotal, Total
from headstart.heads import LinearHead
from headstart.methods.base import Arrays, Method, Received, StageContext
from headstart.methods.closed_form import ClosedForm, ClosedFormState
from headstart.methods.training import Training, TrainingState
from headstart.solvers.cohort import Cohort, ReadState


@dataclass(frozen=True)
class ClosedFormStates:
    """The state of each task."""

    tasks: tuple[ClosedFormState, ...]

    @property
    def rows(self) -> int:
        """Class means that were received."""
        return sum(state.rows for state in self.tasks)


class ClosedFormTasks(Method[ClosedFormStates]):
    """One closed form for every task; nothing is common to them."""

    state_type = ClosedFormStates
    methods: Sequence[ClosedForm] = ()

    def __init__(self, make: Callable[[StageContext], ClosedForm], context: StageContext) -> None:
        self.methods = [make(context.alone(number)) for number in range(len(context.tasks))]

    def init(self) -> ClosedFormStates:
        """Nothing received yet of any task."""
        return ClosedFormStates(tuple(method.init() for method in self.methods))

    def broadcast(self, state: ClosedFormStates, round: int, since: int, task: int = 0) -> Message:
        """As the task's method."""
        return self.methods[task].broadcast(state.tasks[task], round, since)

    def receive(self, cohort: Cohort, message: Message) -> Received:
        """As the task's method."""
        return self.methods[cohort.task].receive(cohort, message)

    def client_update(self, cohort: Cohort, received: Received) -> StatisticsResult:
        """As the task's method."""
        return self.methods[cohort.task].client_update(cohort, received)

    def server_update(self, state: ClosedFormStates, total: list[StatisticsTotal], round: int) -> ClosedFormStates:
        """Each task by itself."""
        parts = zip(self.methods, state.tasks, total, strict=True)
        return ClosedFormStates(tuple(method.server_update(mine, part, round) for method, mine, part in parts))

    def model(self, state: ClosedFormStates, task: int = 0) -> Message:
        """As the task's method."""
        return self.methods[task].model(state.tasks[task])

    def load(self, message: Message, task: int = 0, personal: Arrays | None = None) -> LinearHead:
        """As the task's method."""
        return self.methods[task].load(message)


@dataclass(frozen=True)
class TrainingStates:
    """What is common to all tasks, and what belongs to each."""

    common: TrainingState
    tasks: tuple[TrainingState, ...]


class TrainingTasks(Method[TrainingStates]):
    """One training method for every task, on one backbone."""

    state_type = TrainingStates
    methods: Sequence[Training[Any]] = ()

    def __init__(self, make: Callable[[StageContext], Training[Any]], context: StageContext, hide_task: bool) -> None:
        self.names = [task.name for task in context.tasks]
        self.methods = [make(context.alone(number)) for number in range(len(context.tasks))]
        self.context, self.hide_task = context, hide_task
        self.weighting, self.accumulates = self.methods[0].weighting, self.methods[0].accumulates
        self.memory_per_client = max(method.memory_per_client for method in self.methods)
        self.common = [name for name in self.methods[0].shapes if name.startswith("body.")]

    def _full(self, name: str, task: int) -> str:
        """The name of a parameter of a task where those of several are together."""
        return name if name.startswith("body.") else f"{name}@{self.names[task]}"

    def _renamed(self, arrays: Mapping[str, Any], task: int) -> dict[str, Any]:
        """Arrays of messages and client states, by their names where several tasks are together."""
        full = {name: name if ".body." in name else f"{name}@{self.names[task]}" for name in arrays}
        return {full[name]: array for name, array in arrays.items()}

    def _plain(self, arrays: Mapping[str, Any], task: int) -> dict[str, Any]:
        """Of arrays of several tasks, those of one and those that are common, under plain names."""
        split = {name: name.partition("@") for name in arrays}
        return {plain: arrays[n] for n, (plain, _, mine) in split.items() if mine in ("", self.names[task])}

    @cached_property
    def blocks(self) -> Blocks:  # type: ignore[override]
        """Those of all tasks, each once, what is common first."""
        every = [self._of_task(method.blocks, task) for task, method in enumerate(self.methods)]
        kinds = dict.fromkeys(name.partition(".")[0].partition("@")[0] for name in every[0])
        found = {name: shape for each in every for name, shape in each.items()}
        order = [(kind, n) for kind in kinds for n in found if n.partition(".")[0].partition("@")[0] == kind]
        return {name: found[name] for _, name in order}

    def expected(self, task: int) -> Blocks:
        """Of a task's own, and of what is common; a number of a client counts for both."""
        return self._of_task(self.methods[task].expected(0), task)

    def _of_task(self, mine: Blocks, task: int) -> Blocks:
        """A task's arrays, by their names where several tasks are together."""
        both = {name: shape for name, shape in mine.items() if "." not in name and self.common}
        return {**both, **self._renamed(mine, task)}

    @property
    def client_state(self) -> Blocks:  # type: ignore[override]
        """Those of all tasks."""
        parts = enumerate(self.methods)
        return {n: s for task, method in parts for n, s in self._renamed(method.client_state, task).items()}

    @property
    def personal(self) -> bool:  # type: ignore[override]
        """Whether every client has a model of its own."""
        return self.methods[0].personal

    def check(self, message: Message) -> None:
        """As the method."""
        self.methods[0].check(Message({name.partition("@")[0]: array for name, array in message.arrays.items()}))

    def counted(self, arrays: Arrays) -> Arrays:
        """As the method of the task that an update is of."""
        found = dict(arrays)
        for task, name in enumerate(self.names):
            own = {full.removesuffix(f"@{name}"): array for full, array in arrays.items() if full.endswith(f"@{name}")}
            found |= self._renamed(self.methods[task].counted(own), task) if own else {}
        return found

    def init(self) -> TrainingStates:
        """The backbone of the first, and every task's own."""
        states = [method.init() for method in self.methods]
        common = _part(states[0], self.common)
        tasks = tuple(_part(s, [n for n in s.params if n not in self.common]) for s in states)
        return TrainingStates(
            replace(common, population=self.context.population),
            tuple(replace(state, statistics=Params()) for state in tasks),
        )

    def _joined(self, state: TrainingStates, task: int) -> TrainingState:
        """The state of a task as its method knows it."""
        common, own = state.common, state.tasks[task]
        memory = {name: common.memory[name] | own.memory[name] for name in own.memory}
        return TrainingState(common.params | own.params, memory, common.statistics, own.population)

    def broadcast(self, state: TrainingStates, round: int, since: int, task: int = 0) -> Message:
        """What is common and what is the task's own; of all tasks, where a client is not to show which is its own."""
        arrays: dict[str, Any] = {}
        for each in range(len(self.methods)) if self.hide_task else (task,):
            sent = self.methods[each].broadcast(self._joined(state, each), round, since)
            arrays |= self._renamed(sent.arrays, each)
        return Message(arrays, {"round": round})

    def receive(self, cohort: Cohort, message: Message) -> Received:
        """As the task's method."""
        plain = Message(self._plain(message.arrays, cohort.task), message.scalars)
        return self.methods[cohort.task].receive(self._alone(cohort), plain)

    def _alone(self, cohort: Cohort) -> Cohort:
        """A cohort whose client state has plain names."""
        return replace(cohort, state=self._reader(cohort.state, cohort.task))

    def _reader(self, read: ReadState, task: int) -> ReadState:
        """Reads client state under plain names."""

        def plain(name: str, start: npt.NDArray[np.float32] | None) -> npt.NDArray[np.float32]:
            kind, _, parameter = name.partition(".")
            return read(f"{kind}.{self._full(parameter, task)}", start)

        return plain

    def client_update(self, cohort: Cohort, received: Received) -> ClientResult:
        """As the task's method; a number of a client counts for the task and for what is common."""
        task = cohort.task
        result = self.methods[task].client_update(self._alone(cohort), received)

        def named(params: Params) -> Params:
            both = {"": params[""]} if "" in params and self.common else {}
            return Params({**both, **{self._full(name, task): value for name, value in params.items()}})

        blocks = {name: named(params) for name, params in result.blocks.items()}
        return replace(result, blocks=blocks, state={kind: named(params) for kind, params in result.state.items()})

    def server_update(self, state: TrainingStates, total: Total, round: int) -> TrainingStates:
        """What is common by all clients that replied, each task by its own clients; a task without a reply stays."""
        tasks = []
        for method, name, mine in zip(self.methods, self.names, state.tasks, strict=True):
            part = total.part(name)
            tasks.append(method.server_update(mine, part, round) if part.weight("update") else mine)
        part, common = total.part(""), state.common
        if part.weight("update"):
            common = self.methods[0].server_update(common, part, round)
        return TrainingStates(common, tuple(tasks))

    def model(self, state: TrainingStates, task: int = 0) -> Message:
        """As the task's method, under plain names."""
        return self.methods[task].model(self._joined(state, task))

    def load(self, message: Message, task: int = 0, personal: Arrays | None = None) -> LinearHead:
        """As the task's method."""
        return self.methods[task].load(message, personal=personal)

    def personal_params(self, read: ReadState, task: int = 0) -> dict[str, np.ndarray]:
        """As the task's method."""
        return self.methods[task].personal_params(self._reader(read, task))


def training_of(
    make: Callable[[StageContext], Training[Any]], context: StageContext, hide_task: bool
) -> Training[Any] | TrainingTasks:
    """A training method for the task of a context, or for each of several."""
    return make(context) if len(context.tasks) == 1 else TrainingTasks(make, context, hide_task)


def _part(state: TrainingState, names: list[str]) -> TrainingState:
    """Some of the parameters, with what the server remembers of them."""
    memory = {kind: params.select(names) for kind, params in state.memory.items()}
    return replace(state, params=state.params.select(names), memory=memory)
