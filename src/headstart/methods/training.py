"""What methods that train share: parameters down, updates up, a running mean, a step of the server."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar

import numpy as np
import torch

from headstart.channel.robust import ClientPrivacy, norm_of, robust_mean_of, shortened
from headstart.combiners import Average, Combiner
from headstart.config.stage import DistMeZOStage, PersonaliseStage, Training
from headstart.core.ledger import Published
from headstart.core.message import Message
from headstart.core.params import Shapes, Vectors, zeros
from headstart.core.statistics import Ints
from headstart.errors import HeadstartError, MessageError
from headstart.heads import LinearHead
from headstart.methods.base import Arrays, Reply, Setting, weight_of
from headstart.methods.head_init import head_start
from headstart.solvers.cohort import Cohort, Kept
from headstart.solvers.heads import HeadSolver, LocalResult, Objective, Solver, Stack
from headstart.solvers.network import BodySolver, Network, set_mode

# An update so many times larger than the model it updates is no step of SGD.
_EXPLODED = 1e4
# Nor is one that, added up over the rounds, leads out of float32, which messages travel in.
_BEYOND = 1e30
# A body trains for one client at a time: a cohort has room for no second one.
_ALONE = 1 << 62

StageT = TypeVar("StageT", bound=Training | DistMeZOStage)


@dataclass(frozen=True)
class Tally:
    """What the server has heard in a round about a group of parameters: those of all clients, or those of a task."""

    clients: int
    """All clients of the group, heard or not."""
    weight: float = 0.0
    effort: float = 0.0
    replies: int = 0
    examples: int = 0
    """Of all clients of the group."""

    def plus(self, weight: float, effort: float, replies: int) -> Tally:
        """With what was heard added."""
        return Tally(self.clients, self.weight + weight, self.effort + effort, self.replies + replies, self.examples)


@dataclass(frozen=True)
class TrainingState:
    """The server between two replies: the model, what its optimiser remembers, and the sums of this round so far."""

    parameters: Vectors
    memory: dict[str, Vectors] = field(default_factory=dict)
    statistics: Vectors = field(default_factory=dict)
    """Running statistics of batch norm, where they are shared."""
    round: int = 0
    sums: dict[str, Vectors] = field(default_factory=dict)
    tallies: dict[str, Tally] = field(default_factory=dict)
    """By the name of the group, which is empty for what all clients share."""
    heard: tuple[tuple[list[str], dict[str, Arrays]], ...] = ()
    """Of every reply of this round, its groups and its arrays, where a sum is not enough: memory for all clients of a
    round. Nothing is left of it between two rounds."""


class TrainingMethod(Generic[StageT]):
    """FedAvg's skeleton. A method changes what the solver minimises, what else travels, and the server's step.

    Where there are several tasks, each has a head and a module of its own, and the names of their parameters end in
    `@TASK` wherever those of several tasks are together. On a client, which has one task, names are plain.
    """

    hears_once = False
    catches_up = False
    memories: tuple[str, ...] = ()
    """What the server remembers beside its combiner's memory, one vector per parameter each; zero at first."""
    travels: tuple[str, ...] = ("update",)
    """What a client sends, one array per parameter each."""
    needs_network = False
    """Whether the solver works on one network at a time where only heads train, too."""
    keeps: tuple[str, ...] = ()
    """What else stays with a client from one of its rounds to the next, one array per shared parameter; zero before its
    first."""
    copies = False
    """Whether a client has its own copy of what is shared, too."""

    def __init__(self, stage: StageT, setting: Setting) -> None:
        self.stage, self.setting, self.plan = stage, setting, stage.plan
        self.tasks = setting.each
        heads = [head_start(stage, setting, task) for task in self.tasks]
        self.network: Network | None = None
        body, module = Vectors(), Vectors()
        self._statistics = Vectors()
        if self.plan.changes_features or self.needs_network:
            tensors = {name: torch.from_numpy(value.astype(np.float32)) for name, value in heads[0].items()}
            backbone = setting.backbone if self.plan.changes_features else None
            self.network = Network(backbone, setting.module, tensors, stage)
            body, module = (
                {n: p.detach().cpu().double().numpy() for n, p in self.network.trained.items() if n.startswith(part)}
                for part in ("body.", "module.")
            )
            self._statistics = {n: b.cpu().double().numpy() for n, b in self.network.statistics.items()}
        self.robust_mean = robust_mean_of(stage)
        self._combiner = self.combiner()
        self.max_norm: float | None = getattr(stage, "max_norm", None)
        self.privacy: ClientPrivacy | None = None
        if privacy := getattr(stage, "privacy", None):
            asked = stage.sampled(setting.n_clients)
            self.privacy = ClientPrivacy(privacy, stage.rounds, asked, setting.n_clients, setting.noise_seed)
        if self.privacy and self._shared_statistics:
            raise HeadstartError(
                f"stages.{setting.seed[1]}.norm_statistics: with privacy, clients cannot send running statistics of "
                "batch norm, which nothing hides; use 'freeze' or 'batch'"
            )
        self._start: list[Vectors] = []
        """Of each task: what a client starts from before it has heard or kept anything; the frozen body is not here."""
        for task, head in zip(self.tasks, heads, strict=True):
            given = {f"module.{name}": np.asarray(array, np.float64) for name, array in (task.module or {}).items()}
            self._start.append({**body, **(module | {n: v for n, v in given.items() if n in module}), **head})
        everything = [(self._full(n, t), n, v) for t in range(len(self.tasks)) for n, v in self._start[t].items()]
        self._initial = {full: value for full, name, value in everything if self.plan.role(name) == "shared"}
        self.solve = self.solver()
        self.shapes: Shapes = {name: value.shape for name, value in self._initial.items()}
        mine = {full: v.shape for full, n, v in everything if self.plan.role(n) == "personal" or self._is_copied(n)}
        if self.plan.statistics == "personal" or (self.copies and self.plan.statistics == "shared"):
            mine |= {name: value.shape for name, value in self._statistics.items()}
        self._mine = mine
        kept = {f"{what}.{name}": shape for what in self.keeps for name, shape in self.kept_with(what).items()}
        self.kept_shapes: Mapping[str, tuple[int, ...]] = kept | {f"personal.{n}": shape for n, shape in mine.items()}
        # Of a head: parameters, start, velocity, gradient, and what is kept and corrected by, in float32.
        values = max(sum(value.size for value in start.values()) for start in self._start)
        self.bytes_per_client = _ALONE if self.network else 4 * 8 * values

    @property
    def personal(self) -> bool:
        """Whether every client has a model of its own."""
        return bool(self._mine)

    def kept_with(self, what: str) -> Shapes:
        """The parameters, by their full names, that clients keep something with."""
        return self.shapes

    def _is_copied(self, name: str) -> bool:
        return self.copies and self.plan.role(name) == "shared"

    def _full(self, name: str, task: int) -> str:
        """The name of a task's parameter where those of several tasks are together."""
        return name if len(self.tasks) == 1 or name.startswith("body.") else f"{name}@{self.tasks[task].name}"

    def _of(self, task: int, shapes: Mapping[str, object]) -> dict[str, str]:
        """Plain names of those parameters that a client of the task has, and what they are called in ``shapes``."""
        names = {**self._start[task], **self._statistics}
        return {name: full for name in names if (full := self._full(name, task)) in shapes}

    def shared_names(self, task: int) -> dict[str, str]:
        """Plain names of what a client of the task shares, and their full names."""
        return self._of(task, self.shapes)

    def solver(self) -> Solver:
        """What the clients do: SGD, on stacked heads or on the network."""
        stage, seed = self.stage, self.setting.seed
        assert not isinstance(stage, DistMeZOStage)
        if self.network:
            return BodySolver(self.network, stage, seed)
        return HeadSolver(stage, seed, [name for name in self._start[0] if self.plan.role(name) != "frozen"])

    # ------------------------------------------------------------------------------------------------ on the server

    def open(self) -> TrainingState:
        """The model to start from."""
        memory = {**{name: zeros(self.shapes) for name in self.memories}, **self._combiner.init(self.shapes)}
        return TrainingState(self._initial, memory, self._shared_statistics)

    @property
    def _shared_statistics(self) -> Vectors:
        return self._statistics if self.plan.statistics == "shared" else Vectors()

    def instruct(self, state: TrainingState, round: int, since: int, task: int = 0) -> Message:
        """What is shared with a client of the task, in float32, and what else it needs."""
        names = list(self.shapes if self.stage.hide_task else self.shared_names(task).values())
        sent = {"model": state.parameters, **{name: state.memory[name] for name in self.broadcasts()}}
        sent = {what: {name: vectors[name] for name in names} for what, vectors in sent.items()}
        return Message(_named(sent | {"statistics": state.statistics}, np.float32), {"round": round})

    def broadcasts(self) -> tuple[str, ...]:
        """Memories of the server that travel down with the model."""
        return ()

    def fold(self, state: TrainingState, reply: Reply) -> TrainingState:
        """Add a weighted update to the sums of the round, or keep it; an update that cannot be right is refused."""
        mine = self.shared_names(reply.task).values()
        shapes = {name: self.shapes[name] for name in (self.shapes if self.stage.hide_task else mine)}
        arrays: dict[str, Arrays] = {what: _checked(reply.message, what, shapes) for what in self.travels}
        moved = {name: value.shape for name, value in state.statistics.items()}
        arrays["statistics"] = _checked(reply.message, "statistics", moved)
        norm, usual = norm_of(arrays["update"]), norm_of({n: state.parameters[n] for n in shapes})
        if self.privacy and not self.privacy.on_server:
            usual += self.privacy.deviation * sum(int(np.prod(shape)) for shape in shapes.values()) ** 0.5
        if norm > (largest := min(_EXPLODED * (1 + usual), _BEYOND - usual)):
            raise MessageError(f"the update has exploded: its norm is {norm:.1e}, more than {largest:.1e}")
        for what in ("statistics", *self.travels):
            if what != "update" and norm_of(arrays[what]) > _BEYOND:
                raise MessageError(f"the arrays of {what!r} have exploded: their norm is {norm_of(arrays[what]):.1e}")
        for name, value in arrays["statistics"].items():
            if name.endswith("running_var") and value.min(initial=0) < 0:
                raise MessageError(f"array 'statistics.{name}' holds a negative variance")
        if self.privacy and self.privacy.on_server:
            arrays["update"] = self.privacy.bounded(arrays["update"])
        if self.max_norm is not None:
            arrays["update"] = shortened(arrays["update"], self.max_norm)
        weight, groups = self.weight_of(reply), self._groups(reply)
        sums, heard = state.sums, state.heard
        if self.robust_mean:
            heard = (*heard, (groups, arrays))
        else:
            sums = self._summed(state, reply, arrays, weight)
        tallies = dict(state.tallies)
        for group in groups:
            before = tallies.get(group) or self._tally(group)
            tallies[group] = before.plus(weight, weight * self.effort(state, reply), 1)
        return replace(state, sums=sums, tallies=tallies, heard=heard)

    def _summed(
        self, state: TrainingState, reply: Reply, arrays: dict[str, Arrays], weight: float
    ) -> dict[str, Vectors]:
        """The sums of the round with those arrays added, each by its factor."""
        sums = {what: dict(vectors) for what, vectors in state.sums.items()}
        for what, vectors in arrays.items():
            factor = weight if what == "statistics" else self.factor(what, weight, state, reply)
            into = sums.setdefault(what, {})
            for name, array in vectors.items():
                # An array without dimensions times a number is a number, which nothing can be added to in place.
                scaled = np.asarray(factor * array.astype(np.float64))
                into[name] = np.add(into[name], scaled, out=scaled) if name in into else scaled
        return sums

    def summand(self, reply: Reply, round: int) -> dict[str, np.ndarray]:
        """What the server would know if it had heard this client only: the sums of the round, and its tallies."""
        alone = self.fold(replace(self.open(), round=round), reply)
        tallies = [alone.tallies.get(group) or Tally(0) for group in self._all_groups()]
        sums = {f"{what}.{name}": v for what, vectors in alone.sums.items() for name, v in vectors.items()}
        return {**sums, "tallies": np.array([[tally.weight, tally.effort, tally.replies] for tally in tallies])}

    def summands(self, state: TrainingState) -> Shapes:
        """Of every array that travels, of the shared statistics, and of the tallies."""
        shapes = {f"{what}.{name}": shape for what in self.travels for name, shape in self.shapes.items()}
        shapes |= {f"statistics.{name}": value.shape for name, value in state.statistics.items()}
        return {**shapes, "tallies": (len(self._all_groups()), 3)}

    def fold_sum(self, state: TrainingState, values: Mapping[str, np.ndarray]) -> TrainingState:
        """Add the sums and tallies of several clients to those of the round."""
        sums = {what: dict(vectors) for what, vectors in state.sums.items()}
        for full, value in values.items():
            what, _, name = full.partition(".")
            if name:
                into = sums.setdefault(what, {})
                into[name] = into[name] + value if name in into else value
        tallies = dict(state.tallies)
        for group, (weight, effort, replies) in zip(self._all_groups(), values["tallies"], strict=True):
            if (count := int(np.rint(replies))) > 0:
                tallies[group] = (tallies.get(group) or self._tally(group)).plus(weight, effort, count)
        return replace(state, sums=sums, tallies=tallies)

    def _all_groups(self) -> list[str]:
        """The groups of parameters: all clients', and each task's."""
        return ["", *(task.name for task in self.tasks if len(self.tasks) > 1)]

    def _groups(self, reply: Reply) -> list[str]:
        """The groups of parameters that a reply is about: all clients', and its task's."""
        if len(self.tasks) == 1:
            return [""]
        if not self.stage.hide_task:
            return ["", self.tasks[reply.task].name]
        # What a server of secure sums would see the total of: one for the client's task, zero for the others.
        present = reply.message.array("present", "float32", (len(self.tasks),))
        if not np.isin(present, (0, 1)).all() or present.sum() != 1:
            raise MessageError("a client says that it has no task, or more than one")
        return ["", self.tasks[int(present.argmax())].name]

    def _tally(self, group: str) -> Tally:
        """Nothing heard about a group yet."""
        examples = sum(task.n_examples for task in self.tasks if group in ("", task.name))
        return Tally(self._clients_of(group), examples=examples)

    def _clients_of(self, group: str) -> int:
        return sum(task.n_clients for task in self.tasks if group in ("", task.name))

    def weight_of(self, reply: Reply) -> float:
        """How much a client counts in the mean; with privacy it does not say how many examples it has."""
        return 1.0 if self.privacy else weight_of(reply, self.stage.weighting)

    def factor(self, what: str, weight: float, state: TrainingState, reply: Reply) -> float:
        """The factor of an array of a reply in the sum of the round."""
        return weight

    def effort(self, state: TrainingState, reply: Reply) -> float:
        """A figure of which the round needs the mean over the clients."""
        return 1.0

    def close(self, state: TrainingState) -> TrainingState:
        """The step of the server, once all replies of the round are in, for each group of parameters by itself.

        What nobody was heard about stays as it is, unless noise hides who was heard. Statistics are combined as they
        are: they are estimates, not parameters that an optimiser steps along.
        """
        if self.privacy and self.privacy.on_server:
            state = self._hidden(state, self.privacy)
        parameters, memory, statistics = state.parameters, state.memory, state.statistics
        for group, tally in state.tallies.items():
            names = [name for name in parameters if name.partition("@")[2] == group]
            part = replace(
                state,
                parameters={name: parameters[name] for name in names},
                memory={what: {name: vectors[name] for name in names} for what, vectors in memory.items()},
            )
            moved, remembered = self.step(part, self._centre(state, group, "update", names), tally)
            parameters = parameters | moved
            memory = {what: vectors | remembered[what] for what, vectors in memory.items()}
            if not group:
                statistics = self._centre(state, group, "statistics", state.statistics)
        return TrainingState(parameters, memory, statistics, state.round + 1)

    def _centre(self, state: TrainingState, group: str, what: str, names: Iterable[str]) -> Vectors:
        """What the replies about a group have in the middle: their mean, or the robust one."""
        if self.robust_mean is None:
            return {name: state.sums[what][name] / state.tallies[group].weight for name in names}
        replies = [arrays[what] for groups, arrays in state.heard if group in groups]
        return {
            name: self.robust_mean(np.stack([reply[name] for reply in replies]).astype(np.float64)) for name in names
        }

    def _hidden(self, state: TrainingState, privacy: ClientPrivacy) -> TrainingState:
        """The round with noise on every sum, of tasks that nobody was heard about too, and public numbers of clients.

        A client's whole update, over all groups, is no longer than ``clip``, so the noise is the same for all of them.
        A task counts as many clients as a round asks on average, and one at least.
        """
        heard = state.sums.get("update", {})
        total = {name: heard.get(name, np.zeros(shape)) for name, shape in self.shapes.items()}
        tallies = {}
        for group in self._all_groups():
            clients = self._clients_of(group)
            asked = max(privacy.asked * clients / privacy.clients, 1.0)
            tallies[group] = Tally(clients, asked, asked, round(asked))
        return replace(state, sums={"update": privacy.noised(total, state.round)}, tallies=tallies)

    def spent(self, state: TrainingState) -> dict[str, Any] | None:
        """The guarantee of the rounds so far; None where the stage has no ``privacy``."""
        return self.privacy.spent(state.round) if self.privacy else None

    def refine(self, state: TrainingState, cohort: Cohort) -> TrainingState:
        """The server trains the model of the round as a client would, on the examples that it was given."""
        assert not isinstance(self.stage, DistMeZOStage | PersonaliseStage)
        whole = self.stage.share_train == "all"
        moves = frozenset(name for name in self.model(state) if whole or not name.startswith("head."))
        start = {name: value[None] for name, value in _tensors(self.model(state)).items()}
        result = self.solve(start, cohort, state.round - 1, Objective(moves=moves))
        found = {name: value[0].double().numpy().copy() for name, value in result.parameters.items()}
        statistics = {name: result.statistics[name][0].double().numpy() for name in state.statistics}
        moved = {name: found[name] for name in state.parameters if name in moves}
        return replace(state, parameters=state.parameters | moved, statistics=statistics)

    def step(self, state: TrainingState, mean: Vectors, tally: Tally) -> tuple[Vectors, dict[str, Vectors]]:
        """New parameters and memories of a group from the mean update of the round."""
        parameters, memory = self._combiner.update(state.parameters, mean, state.memory)
        return parameters, state.memory | memory

    def combiner(self) -> Combiner:
        """How the server steps along the mean update."""
        return Average(getattr(self.stage, "server_lr", 1.0))

    def model(self, state: TrainingState, task: int = 0, own: Arrays | None = None) -> dict[str, np.ndarray]:
        """Every parameter but the frozen body's, by its plain name: as the state has it, or as a client has."""
        shared = {name: state.parameters[full] for name, full in self.shared_names(task).items()}
        return {**self._start[task], **shared, **self._statistics, **state.statistics, **(own or {})}

    def head(self, state: TrainingState, task: int = 0, own: Arrays | None = None) -> LinearHead:
        """The head as it is."""
        values = self.model(state, task, own)
        heads = {n.removeprefix("head."): v.astype(np.float32) for n, v in values.items() if n.startswith("head.")}
        return replace(LinearHead.of_arrays(heads), temperature=self.stage.temperature)

    def place(self, state: TrainingState, task: int = 0, own: Arrays | None = None) -> None:
        """Write what the state says into the body, and put it into evaluation mode."""
        if self.network and self.network.backbone:
            self.network.load(_tensors(self.model(state, task, own)))
            set_mode(self.network.backbone.body, False, self.stage.norm_statistics)

    def own(self, kept: Kept, task: int = 0) -> dict[str, np.ndarray]:
        """What is each client's own: what it kept, or what it would start from."""
        start = {**self._start[task], **self._statistics}
        names = self._of(task, self._mine)
        return {name: kept(f"personal.{full}", start[name].astype(np.float32)) for name, full in names.items()}

    def show(self, state: TrainingState, task: int = 0) -> Message:
        """What a client of the task would be sent."""
        return self.instruct(state, state.round, -1, task)

    def shown(self, message: Message, task: int = 0, own: Arrays | None = None) -> LinearHead:
        """The head of what is shared and of what is the client's own, once the rest is in the body."""
        names = self.shared_names(task).values()
        values = {name: message.arrays[f"model.{name}"].astype(np.float64) for name in names}
        statistics = {name: message.arrays[f"statistics.{name}"].astype(np.float64) for name in self._shared_statistics}
        state = TrainingState(self._initial | values, {}, statistics)
        self.place(state, task, own)
        return self.head(state, task, own)

    def published(self, state: TrainingState, counts: Ints) -> Published:
        """The FedNCM paper's count: both directions, without the bias of the head; every example in every local epoch.

        A step on the body counts as three forward passes.
        """
        biases = sum(task.n_classes * task.n_clients for task in self.tasks) if self.plan.head == "shared" else 0
        values = self.travelling - biases / self.setting.n_clients
        per_round = self.stage.sampled(self.setting.n_clients)
        what = "(C · d + P)" if self.plan.changes_features else "C · d"
        formula = f"FedNCM paper, appendix A: 2 · {what} · K · R · 4 bytes, up and down"
        total = round(2 * values * per_round * state.round * 4)
        return Published(total, state.round * self.round_passes(counts), formula)

    @property
    def travelling(self) -> float:
        """Shared parameters of a client; the mean over all clients, where tasks differ."""
        sizes = {name: int(np.prod(shape)) for name, shape in self.shapes.items()}
        each = (t.n_clients * sum(sizes[n] for n in self.shared_names(i).values()) for i, t in enumerate(self.tasks))
        return sum(each) / sum(task.n_clients for task in self.tasks)

    def round_passes(self, counts: Ints) -> int:
        """The paper's count of a round's forward passes; with local steps, of their batches."""
        examples = (getattr(self.stage, "local_epochs", None) or 1) * int(counts.sum())
        if steps := getattr(self.stage, "local_steps", None):
            examples = sum(self.examples_of(int(size), steps) for size in counts.sum(axis=1))
        return (3 if self.plan.changes_features else 1) * examples

    def freeze(self, state: TrainingState) -> Message:
        """The state between two rounds, at full precision."""
        vectors = {"model": state.parameters, "statistics": state.statistics, **state.memory}
        return Message(_named(vectors, np.float64), {"round": state.round})

    def thaw(self, message: Message) -> TrainingState:
        """The state that `freeze` wrote."""
        vectors = {
            what: {name: message.arrays[f"{what}.{name}"].astype(np.float64) for name in self.shapes}
            for what in ("model", *self.memories, *self._combiner.init({}))
        }
        statistics = {name: message.arrays[f"statistics.{name}"].astype(np.float64) for name in self._shared_statistics}
        return TrainingState(vectors.pop("model"), vectors, statistics, int(message.scalars["round"]))

    # ----------------------------------------------------------------------------------------------- on the clients

    def answer(self, cohort: Cohort, message: Message) -> list[Reply]:
        """Train every client's model; each sends its update and keeps its own."""
        clients, task = len(cohort.clients), cohort.task
        shared, mine = self.shared_names(task), self._of(task, self._mine)
        given: dict[str, np.ndarray] = {**self._start[task]}
        given |= {name: message.arrays[f"model.{full}"] for name, full in shared.items()}
        given |= {n.removeprefix("statistics."): a for n, a in message.arrays.items() if n.startswith("statistics.")}
        start = {name: value.expand(clients, *value.shape) for name, value in _tensors(given).items()}
        if not self.copies:
            start |= _tensors(self.own(cohort.kept, task))
        sizes = np.searchsorted(cohort.owners, cohort.clients, "right") - np.searchsorted(cohort.owners, cohort.clients)
        result, sent, kept = self.train(start, cohort, message, sizes)
        if not self.copies:
            everything = {**result.parameters, **result.statistics}
            kept = {**kept, "personal": {name: everything[name] for name in mine}}
        sent = {what: {self._full(n, task): v for n, v in each.items() if n in shared} for what, each in sent.items()}
        kept = {what: {self._full(n, task): v for n, v in each.items()} for what, each in kept.items()}
        sent["statistics"] = result.statistics if self.plan.statistics == "shared" else {}
        replies = []
        for row, client in enumerate(cohort.clients):
            arrays = {f"{what}.{name}": each[name][row].numpy() for what, each in sent.items() for name in each}
            scalars = {"examples": int(sizes[row]), "steps": int(result.steps[row])}
            if self.privacy:
                arrays, scalars = self._guarded(self.privacy, arrays, int(message.scalars["round"]), int(client)), {}
            if self.stage.hide_task and len(self.tasks) > 1:
                arrays |= self._padding(arrays, task)
            # A copy: where there is a network, its memory is the next client's.
            keeps = {f"{what}.{name}": each[name][row].numpy().copy() for what, each in kept.items() for name in each}
            reply = Message(arrays, scalars)
            passes = self.passes(int(sizes[row]), int(result.steps[row]), bool(cohort.new[row]))
            if self.privacy and not self.privacy.on_server:  # how many examples it has is not to be known
                passes = 0
            nbytes = np.array([reply.nbytes])
            replies.append(Reply(np.array([client]), reply, nbytes, np.array([passes]), keeps, task))
        return replies

    def _guarded(self, privacy: ClientPrivacy, arrays: Arrays, round: int, client: int) -> dict[str, np.ndarray]:
        """A client's arrays as it may send them: no longer than ``clip``, and with noise where it adds its own."""
        arrays = privacy.bounded(arrays)
        if not privacy.on_server:
            arrays = privacy.noised(arrays, round, client)
        return {name: value.astype(np.float32) for name, value in arrays.items()}

    def _padding(self, arrays: Mapping[str, np.ndarray], task: int) -> dict[str, np.ndarray]:
        """Zeros for the parameters of other tasks, and which task is the client's own."""
        names = {f"{what}.{name}": shape for what in self.travels for name, shape in self.shapes.items()}
        zeros = {name: np.zeros(shape, np.float32) for name, shape in names.items() if name not in arrays}
        return {**zeros, "present": np.eye(len(self.tasks), dtype=np.float32)[task]}

    def train(
        self, start: Stack, cohort: Cohort, message: Message, sizes: Ints
    ) -> tuple[LocalResult, dict[str, Stack], dict[str, Stack]]:
        """Local training: the result, what travels and what is kept, all stacked over the cohort."""
        result = self.solve(start, cohort, int(message.scalars["round"]), Objective())
        return result, {"update": difference(result.parameters, start)}, {}

    def passes(self, size: int, steps: int, new: bool) -> int:
        """Forward passes: through a frozen body once; three for each example of a step on the body, as in the paper."""
        if not self.plan.changes_features:
            return size if new else 0
        return 3 * self.examples_of(size, steps)

    def examples_of(self, size: int, steps: int) -> int:
        """Examples in the batches of so many local steps of a client with ``size`` of them."""
        width = size if self.stage.batch_size == "full" else min(self.stage.batch_size, size)
        epochs, rest = divmod(steps, -(-size // width))
        return epochs * size + rest * width

    # ------------------------------------------------------------------------------------------------------ helpers

    def remembered(self, what: str, cohort: Cohort) -> Stack:
        """What each client of a cohort kept under this name [M, …]."""
        names = self._of(cohort.task, self.kept_with(what))
        return {name: torch.from_numpy(cohort.kept(f"{what}.{full}", None)) for name, full in names.items()}


def difference(left: Stack, right: Stack) -> Stack:
    """left − right, name by name."""
    return {name: value - right[name] for name, value in left.items()}


def _checked(message: Message, what: str, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, np.ndarray]:
    return {name: message.array(f"{what}.{name}", "float32", shape) for name, shape in shapes.items()}


def _named(vectors: dict[str, Vectors], dtype: type[np.floating]) -> dict[str, np.ndarray]:
    return {f"{what}.{name}": np.array(array, dtype) for what, each in vectors.items() for name, array in each.items()}


def _tensors(arrays: Mapping[str, np.ndarray]) -> Stack:
    """Float32 tensors of arrays, on the same memory where that can be."""
    return {name: torch.from_numpy(np.require(array, np.float32, "W")) for name, array in arrays.items()}
