"""Everything a client needs to start a stage, beside the recipe and its own examples."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Set
from dataclasses import dataclass, field, replace
from math import inf
from typing import Any

import numpy as np

from headstart.channel.channel import Channel, channel_of
from headstart.config.recipe import Recipe
from headstart.config.stage import ClosedForm, Rounds
from headstart.core.message import Array, Message
from headstart.core.plan import Plan
from headstart.core.seeds import Seed
from headstart.core.target import Target
from headstart.engine.model_store import ModelStore, Module, Version
from headstart.errors import HeadstartError, MessageError
from headstart.heads import LinearHead
from headstart.methods import Method, Population, StageContext, Task, build

Shapes = Mapping[str, tuple[int, ...]]

_EARLIER = 0  # the number under which a client's model store has what earlier stages made


def plan_of(stage: ClosedForm | Rounds, personal: Set[str], fixed_head: bool) -> Plan:
    """The plan of a stage; personal: the parts of the model that are each client's own already."""
    plan = replace(stage.plan, head="frozen", hidden="frozen") if fixed_head else stage.plan
    return plan.on_top_of(personal, stage.norm_statistics) if stage.personalises else plan


def method_of(
    stage: ClosedForm | Rounds,
    plan: Plan,
    seed: tuple[int, ...],
    store: ModelStore,
    tasks: tuple[Task, ...],
    noise: Seed = (),
) -> tuple[Method[Any], Channel]:
    """The method and the channel of a stage on a backbone as it is loaded; noise: as in `StageContext`."""
    store.attach(stage, plan, seed)
    if stage.privacy is not None and not stage.trains and store.backbone is not None and store.backbone.by_batch:
        raise HeadstartError(
            f"stages.{seed[1]}.privacy: the backbone normalises by the batch, so that one example changes the features "
            "of others, which no noise was counted for; use a backbone with running statistics"
        )
    context = StageContext(tasks, store.dim, seed, plan, store.model, noise)
    method = build(stage, context)
    clients = {task.name: task.population.clients for task in tasks}
    return method, channel_of(stage, method, seed, clients, context.noise_seed)


@dataclass(frozen=True, eq=False)
class Start:
    """What a stage starts from, as the server knows it."""

    weights: Mapping[str, Array]
    """Of the backbone, where earlier stages trained it."""
    module: Module | None
    """What earlier stages left on the backbone."""
    norm_statistics: str
    personal: frozenset[str]
    """Parts of the model that are each client's own already."""
    own: frozenset[str]
    """Names of those parameters in a client's state."""


@dataclass(frozen=True, eq=False)
class StageSetup:
    """Everything a client of one task needs to start a stage."""

    number: int
    task: int
    tasks: tuple[tuple[str, int, int, int], ...]
    """Of each task: its name, and the numbers of its classes, clients and examples."""
    heads: tuple[Shapes | None, ...]
    """Of each task: the shapes of the head that the stage starts from."""
    personal: tuple[str, ...] = ()
    """Parts of the model that are each client's own already."""
    norm_statistics: str = "aggregate"
    temperatures: tuple[float, ...] = ()
    """Of each task: that of the head."""
    module: tuple[str, Mapping[str, Any]] | None = None
    """Kind and settings of the module that an earlier stage left on the backbone."""
    arrays: Mapping[str, Array] = field(default_factory=dict)
    """What earlier stages made and this one does not send: `body.…`, `module.…` and `head.…`."""

    @classmethod
    def of(
        cls, seed: tuple[int, ...], stage: ClosedForm | Rounds, plan: Plan, tasks: tuple[Task, ...], task: int,
        start: Start, replays: bool,
    ) -> StageSetup:  # fmt: skip
        """A stage as the server knows it; replays: whether a client rebuilds the model from a log."""
        parts = dict[str, Mapping[str, Array]]()

        def sent(role: str) -> bool:  # with every message
            return role == "shared" and not replays

        head, module = tasks[task].head, start.module
        if not sent(plan.body):
            parts["body"] = start.weights
        elif stage.norm_statistics == "freeze":
            statistics = ("running_mean", "running_var")
            parts["body"] = {n: array for n, array in start.weights.items() if n.endswith(statistics)}
        if module is not None and module.values and not sent(plan.module):
            parts["module"] = module.values[task]
        if stage.trains and stage.head_init == "previous" and head is not None:
            parts["head"] = {n: array for n, array in head.parameters().items() if not sent(plan.role(f"head.{n}"))}
        arrays = {f"{part}.{name}": array for part, each in parts.items() for name, array in each.items()}
        return cls(
            seed[1],
            task,
            tuple((one.name, one.n_classes, one.population.clients, one.population.examples) for one in tasks),
            tuple({n: a.shape for n, a in one.head.parameters().items()} if one.head else None for one in tasks),
            tuple(sorted(start.personal)),
            start.norm_statistics,
            tuple(one.head.temperature if one.head else 1.0 for one in tasks),
            (module.kind, module.settings) if module else None,
            arrays,
        )

    @property
    def clients(self) -> int:
        """Clients of all tasks."""
        return sum(clients for _, _, clients, _ in self.tasks)

    def without(self, own: Set[str]) -> StageSetup:
        """The same for a client that has some of the parameters itself."""
        return replace(self, arrays={name: array for name, array in self.arrays.items() if name not in own})

    @property
    def nbytes(self) -> int:
        """Bytes of what earlier stages made."""
        return Message(self.arrays).nbytes if self.arrays else 0

    def check(self, recipe: Recipe, classes: int) -> None:
        """Refuse on a node what no server sends that follows the recipe, and what would fail with some examples and not
        with others; classes: of the node's own task."""
        if self.tasks[self.task][1] != classes:
            raise MessageError(f"the setup is of {self.tasks[self.task][1]} classes, and the data have {classes}")
        for task, shapes in enumerate(self.heads):
            name, count, *_ = self.tasks[task]
            if shapes is not None and not (_is_head(shapes, count) and 0 < self.temperatures[task] < inf):
                raise MessageError(f"the setup's head of {name} is none of {count} classes")
        earlier = recipe.stages[: self.number]
        trained = {
            "body": any(stage.plan.body != "frozen" or stage.folds for stage in earlier),
            "module": any(stage.plan.module != "frozen" for stage in earlier),
            "head": self.heads[self.task] is not None,
        }
        if self.norm_statistics not in {"aggregate", *(stage.norm_statistics for stage in earlier)}:
            raise MessageError(f"no earlier stage leaves norm_statistics {self.norm_statistics!r}")
        if self.module is not None and not any(_leaves(stage, *self.module) for stage in earlier):
            raise MessageError(f"no earlier stage leaves a module {self.module[0]!r} with these settings")
        for name, array in self.arrays.items():
            part, _, rest = name.partition(".")
            if not trained.get(part):
                raise MessageError(f"the setup has {name!r}, and no earlier stage makes it")
            if part == "head" and array.shape != (self.heads[self.task] or {}).get(rest):
                raise MessageError(f"the setup's {name!r} is of another head than it says")
            values = np.asarray(array, np.float64)
            masked = (name == "head.bias") & np.isneginf(values)  # of a class that nobody has
            if not (np.isfinite(values) | masked).all():
                raise MessageError(f"the setup's {name!r} holds NaN or infinity")

    def to_message(self) -> Message:
        """All of it."""
        facts = {name: value for name, value in vars(self).items() if name != "arrays"}
        return Message(self.arrays, {"facts": json.dumps(facts)})

    @classmethod
    def from_message(cls, message: Message) -> StageSetup:
        """What `to_message` wrote."""
        try:
            facts = json.loads(str(message.scalars["facts"]))
            heads = tuple(None if head is None else {n: tuple(s) for n, s in head.items()} for head in facts["heads"])
            tasks = tuple((str(name), int(c), int(k), int(n)) for name, c, k, n in facts["tasks"])
            module = tuple(facts["module"]) if facts["module"] else None
            personal = tuple(part for part in facts["personal"] if part in ("body", "module", "hidden", "head"))
            known = {
                "temperatures": tuple(map(float, facts["temperatures"])),
                "heads": heads,
                "tasks": tasks,
                "module": module,
                "personal": personal,
                "arrays": message.arrays,
            }
            return cls(**facts | known)
        except (KeyError, TypeError, ValueError) as error:
            raise MessageError(f"the setup of the stage cannot be read: {error!r}") from None

    def method(
        self, recipe: Recipe, store: ModelStore, noise: Seed, target: Target = "classes"
    ) -> tuple[Method[Any], Channel]:
        """The method and the channel of the stage on a pre-trained backbone, which takes on what earlier stages made;
        target: what is learned of the client's examples."""
        stage = recipe.stages[self.number]
        self._load(store)
        plan = plan_of(stage, frozenset(self.personal), store.fixed_head)
        return method_of(stage, plan, (recipe.seed, self.number), store, self._tasks(target), noise)

    def _under(self, prefix: str) -> dict[str, np.ndarray]:
        return {name.removeprefix(prefix): a for name, a in self.arrays.items() if name.startswith(prefix)}

    def _load(self, store: ModelStore) -> None:
        weights, values = self._under("body."), self._under("module.")
        if store.backbone is None or not (weights or self.module or self.norm_statistics != "aggregate"):
            return
        module = None
        if self.module is not None:
            module = Module(*self.module, (values,) * len(self.tasks) if values else ())
        arrays = {**store.arrays(), **weights}
        store.remember(_EARLIER, Version(_EARLIER, self.norm_statistics, arrays, module))
        store.load(_EARLIER)

    def _tasks(self, target: Target) -> tuple[Task, ...]:
        tasks, values = [], self._under("module.")
        for number, ((name, classes, clients, examples), shapes) in enumerate(zip(self.tasks, self.heads, strict=True)):
            head = None
            if shapes is not None:  # what is not sent is another task's, or comes with every message
                zeros = {n: np.zeros(shape, np.float32) for n, shape in shapes.items()}
                given = LinearHead.of_arrays(zeros | (self._under("head.") if number == self.task else {}))
                head = replace(given, temperature=self.temperatures[number])
            tasks.append(Task(name, classes, Population(clients, examples), head, values or None, target))
        return tuple(tasks)


def _leaves(stage: ClosedForm | Rounds, kind: str, settings: Mapping[str, Any]) -> bool:
    """Whether a stage leaves a module of a kind with these settings, which have travelled as JSON."""
    made = {key: value for key, value in stage.module_settings.items() if value is not None}
    return stage.train == kind and json.loads(json.dumps(made)) == dict(settings)


def _is_head(shapes: Shapes, classes: int) -> bool:
    """Whether these are the shapes of a head of so many classes, each with one row or more."""
    rows, width = shapes.get("bias", ()), shapes.get("weight", ())
    return len(rows) == 1 and width[:1] == rows and len(width) == 2 and rows[0] >= classes and rows[0] % classes == 0


def digest(data: bytes) -> str:
    """A name for bytes that nothing else has."""
    return hashlib.sha256(data).hexdigest()
