"""What a client has to know of a stage before its first answer, beside the recipe and its own examples."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from headstart.channel.noise import Seed
from headstart.config.recipe import Recipe
from headstart.config.stage import ClosedForm, PersonaliseStage, Rounds
from headstart.core.message import Array, Message
from headstart.engine.body import Body, Module, Version
from headstart.errors import MessageError
from headstart.heads import LinearHead
from headstart.methods import Method, Setting, TaskSetting, build

Shapes = Mapping[str, tuple[int, ...]]
Moves = Literal["head", "body"] | None

_HANDED = 0  # the number under which a client's body has what it was handed


def method_of(
    stage: ClosedForm | Rounds,
    seed: tuple[int, ...],
    body: Body,
    tasks: tuple[TaskSetting, ...],
    moves: Moves,
    noise: Seed = (),
) -> Method[Any]:
    """The method of a stage on a body as it is loaded; noise: as in `Setting`."""
    setting = Setting(
        sum(task.n_classes for task in tasks),
        body.dim,
        seed,
        sum(task.n_clients for task in tasks),
        sum(task.n_examples for task in tasks),
        tasks[0].previous,
        body.backbone,
        body.attach(stage, seed),
        tasks if len(tasks) > 1 else (),
        moves,
        noise,
    )
    return build(stage, setting)


@dataclass(frozen=True, eq=False)
class Begin:
    """A stage as a client of one task is told of it."""

    number: int
    task: int
    tasks: tuple[tuple[str, int, int, int], ...]
    """Of each task: its name, and the numbers of its classes, clients and examples."""
    heads: tuple[Shapes | None, ...]
    """Of each task: the shapes of the head that the stage starts from."""
    update: str | None = None
    """What a personalising stage really loads, where that is more than its recipe says."""
    moves: Moves = None
    norm_statistics: str = "aggregate"
    module: tuple[str, Mapping[str, Any]] | None = None
    """Kind and settings of the module that an earlier stage left on the body."""
    arrays: Mapping[str, Array] = field(default_factory=dict)
    """What earlier stages made and this one does not send: `body.…`, `module.…` and `head.…`."""

    @classmethod
    def of(
        cls,
        number: int,
        task: int,
        tasks: tuple[TaskSetting, ...],
        stage: ClosedForm | Rounds,
        plain: ClosedForm | Rounds,
        moves: Moves,
        catches_up: bool,
        weights: Mapping[str, Array],
        module: Module | None,
        norm_statistics: str,
        own: Set[str],
    ) -> Begin:
        """A stage as the server knows it.

        plain: the stage as the recipe has it; catches_up: whether a client rebuilds the model from a log; weights: of
        the body, where earlier stages trained it; module: what they left on it; own: what the client has of its own.
        """
        plan, parts = stage.plan if isinstance(stage, Rounds) else None, dict[str, Mapping[str, Array]]()

        def sent(role: str) -> bool:  # with every message
            return role == "shared" and not catches_up

        head = tasks[task].previous
        if not (plan and sent(plan.body)):
            parts["body"] = weights
        elif isinstance(stage, Rounds) and stage.norm_statistics == "freeze":
            statistics = ("running_mean", "running_var")
            parts["body"] = {n: array for n, array in weights.items() if n.endswith(statistics)}
        if module is not None and module.values and not (plan and sent(plan.module)):
            parts["module"] = module.values[task]
        if plan is not None and stage.head_init == "previous" and head is not None:
            parts["head"] = {n: array for n, array in head.parameters().items() if not sent(plan.role(f"head.{n}"))}
        arrays = {f"{part}.{name}": array for part, each in parts.items() for name, array in each.items()}
        return cls(
            number,
            task,
            tuple((each.name, each.n_classes, each.n_clients, each.n_examples) for each in tasks),
            tuple(
                {n: a.shape for n, a in each.previous.parameters().items()} if each.previous else None for each in tasks
            ),
            stage.update if isinstance(stage, PersonaliseStage) and stage is not plain else None,
            moves,
            norm_statistics,
            (module.kind, module.settings) if module else None,
            {name: array for name, array in arrays.items() if f"personal.{name}" not in own},
        )

    @property
    def nbytes(self) -> int:
        """Bytes of what earlier stages made."""
        return Message(self.arrays).nbytes if self.arrays else 0

    def to_message(self) -> Message:
        """All of it."""
        facts = {name: value for name, value in vars(self).items() if name != "arrays"}
        return Message(self.arrays, {"facts": json.dumps(facts)})

    @classmethod
    def from_message(cls, message: Message) -> Begin:
        """What `to_message` wrote."""
        try:
            facts = json.loads(str(message.scalars["facts"]))
            heads = tuple(None if head is None else {n: tuple(s) for n, s in head.items()} for head in facts["heads"])
            tasks = tuple((str(name), int(c), int(k), int(n)) for name, c, k, n in facts["tasks"])
            module = tuple(facts["module"]) if facts["module"] else None
            return cls(**facts | {"heads": heads, "tasks": tasks, "module": module, "arrays": message.arrays})
        except (KeyError, TypeError, ValueError) as error:
            raise MessageError(f"the server tells of a stage in an unknown way: {error!r}") from None

    def method(self, recipe: Recipe, body: Body, noise: Seed) -> tuple[ClosedForm | Rounds, Method[Any]]:
        """The stage and its method on a pre-trained body, which takes on what it is handed."""
        stage = recipe.stages[self.number]
        if self.update is not None:
            stage = stage.model_copy(update={"update": self.update})

        def under(prefix: str) -> dict[str, np.ndarray]:
            return {name.removeprefix(prefix): a for name, a in self.arrays.items() if name.startswith(prefix)}

        weights, values = under("body."), under("module.")
        if body.backbone is not None and (weights or self.module or self.norm_statistics != "aggregate"):
            module = None
            if self.module is not None:
                module = Module(*self.module, (values,) * len(self.tasks) if values else ())
            arrays = {name: array.copy() for name, array in body.arrays().items()} | weights
            body.remember(_HANDED, Version(_HANDED, self.norm_statistics, arrays, module))
            body.load(_HANDED)
        tasks = []
        for number, ((name, classes, clients, examples), shapes) in enumerate(zip(self.tasks, self.heads, strict=True)):
            head = None
            if shapes is not None:  # what is not handed over is another task's, or comes with every message
                zeros = {n: np.zeros(shape, np.float32) for n, shape in shapes.items()}
                head = LinearHead.of_arrays(zeros | (under("head.") if number == self.task else {}))
            tasks.append(TaskSetting(name, classes, clients, examples, head, values or None))
        return stage, method_of(stage, (recipe.seed, self.number), body, tuple(tasks), self.moves, noise)


def digest(data: bytes) -> str:
    """A name for bytes that nothing else has."""
    return hashlib.sha256(data).hexdigest()
