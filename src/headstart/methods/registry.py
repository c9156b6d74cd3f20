"""The methods by name: the stage that a recipe writes, and what makes the method of it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from headstart.config.stage import STAGES, ClosedForm, Rounds, method_name
from headstart.core.ledger import COSTS, Cost
from headstart.methods.base import Method, StageContext

Maker = Callable[[Any, StageContext], Any]
"""What makes the `Method` of a stage: usually the method's class."""

METHODS: dict[str, Maker] = {}
"""The method of every stage in `STAGES`, by the same name; `register` adds to both."""


def register(stage: type[ClosedForm | Rounds], method: Maker, cost: Cost | None = None) -> None:
    """Add a method: recipes may name it from now on, and `headstart methods` lists it.

    stage: the table of a recipe, a subclass of one of the families in `headstart.config.stage`, with
    ``method: Literal["its-name"]``, its keys and their defaults; method: a class with the verbs of `Method`, called
    with a stage and a `StageContext`; cost: what a paper charges it for, where one does. A class that is defined again,
    as in a notebook, takes the place of its former self.
    """
    name = method_name(stage)
    STAGES[name], METHODS[name] = stage, method
    if cost is not None:
        COSTS[name] = cost


def build(stage: ClosedForm | Rounds, context: StageContext) -> Method[Any]:
    """The method of a stage."""
    make = METHODS[stage.method]

    def made(stage: Any, context: StageContext) -> Any:
        return make(with_temperature(stage, context), context)

    if stage.phased:  # it makes a method of each phase, for as many tasks as there are
        phases: Method[Any] = make(stage, context)
        return phases
    if len(context.tasks) == 1:
        method: Method[Any] = made(stage, context)
        return method
    from headstart.methods.log_tasks import LogTasks
    from headstart.methods.tasks import ClosedFormTasks, TrainingTasks

    if not stage.trains:
        return ClosedFormTasks(partial(made, stage), context)
    if stage.replays:
        return LogTasks(partial(made, stage), context)
    return TrainingTasks(partial(made, stage), context, stage.hide_task)


def with_temperature(stage: ClosedForm | Rounds, context: StageContext) -> ClosedForm | Rounds:
    """A stage that trains, with the temperature of the head that it starts from where it has none of its own."""
    if not stage.trains or stage.temperature != "auto":
        return stage
    head = context.task.head if stage.head_init == "previous" else None
    return stage.model_copy(update={"temperature": head.temperature if head else 1.0})
