"""What methods that train share: parameters down, updates up, a running mean, a step of the server."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Generic, TypeVar

import numpy as np
import torch

from headstart.errors import MessageError
from headstart.heads import LinearHead
from headstart.ledger import Published
from headstart.methods.base import Cohort, Reply, Setting, weight_of
from headstart.methods.network import BodySolver, Network, set_mode
from headstart.methods.plan import Plan, Shapes, Vectors, head_shapes, head_start
from headstart.methods.solver import HeadSolver, LocalResult, Objective, Solver, Stack
from headstart.recipe import DistMeZOStage, Training
from headstart.statistics import Ints
from headstart.wire import Message

# An update so many times larger than the model it updates is no step of SGD.
_EXPLODED = 1e4
# A body trains for one client at a time: a cohort has room for no second one.
_ALONE = 1 << 62

StageT = TypeVar("StageT", bound=Training | DistMeZOStage)


@dataclass(frozen=True)
class TrainingState:
    """The server between two replies: the model, what its optimiser remembers, and the sums of this round so far."""

    parameters: Vectors
    memory: dict[str, Vectors] = field(default_factory=dict)
    statistics: Vectors = field(default_factory=dict)
    """Running statistics of batch norm, where they are shared."""
    round: int = 0
    sums: dict[str, Vectors] = field(default_factory=dict)
    weight: float = 0.0
    effort: float = 0.0
    replies: int = 0


class TrainingMethod(Generic[StageT]):
    """FedAvg's skeleton. A method changes what the solver minimises, what else travels, and the server's step."""

    hears_once = False
    catches_up = False
    memories: tuple[str, ...] = ()
    """What the server remembers from round to round, one vector per parameter each; zero before the first round."""
    travels: tuple[str, ...] = ("update",)
    """What a client sends, one array per parameter each."""
    needs_network = False
    """Whether the solver works on one network at a time where only heads train, too."""
    personal: tuple[str, ...] = ()
    """What stays with a client from one of its rounds to the next, one array per parameter; zero before its first."""

    def __init__(self, stage: StageT, setting: Setting) -> None:
        self.stage, self.setting, self.plan = stage, setting, Plan.of(stage)
        head = head_start(stage, setting, head_shapes(stage, setting.n_classes, setting.dim))
        self._initial, self._frozen_head = (head, Vectors()) if self.plan.head == "shared" else (Vectors(), head)
        self._statistics = Vectors()
        self.network: Network | None = None
        if self.plan.changes_features or self.needs_network:
            tensors = {name: torch.from_numpy(value.astype(np.float32)) for name, value in head.items()}
            backbone = setting.backbone if self.plan.changes_features else None
            self.network = Network(backbone, setting.module, tensors, stage)
            trained = {n: p.detach().cpu().double().numpy() for n, p in self.network.trained.items()}
            self._initial = trained | self._initial
            self._statistics = {n: b.cpu().double().numpy() for n, b in self.network.statistics.items()}
        self.solve = self.solver()
        self.shapes: Shapes = {name: value.shape for name, value in self._initial.items()}
        kept = {f"{what}.{name}": shape for what in self.personal for name, shape in self.shapes.items()}
        self.kept_shapes: Mapping[str, tuple[int, ...]] = kept
        # Of a head: parameters, start, velocity, gradient, and what is kept and corrected by, in float32.
        values = sum(int(np.prod(shape)) for shape in self.shapes.values())
        self.bytes_per_client = _ALONE if self.network else 4 * 8 * values

    def solver(self) -> Solver:
        """What the clients do: SGD, on stacked heads or on the network."""
        stage = self.stage
        assert not isinstance(stage, DistMeZOStage)
        return (
            BodySolver(self.network, stage, self.setting.seed) if self.network else HeadSolver(stage, self.setting.seed)
        )

    # ------------------------------------------------------------------------------------------------ on the server

    def open(self) -> TrainingState:
        """The model to start from."""
        return TrainingState(self._initial, {name: self._zeros() for name in self.memories}, self._statistics)

    def instruct(self, state: TrainingState, round: int, since: int) -> Message:
        """What is shared, in float32, and what else clients need."""
        sent = {"model": state.parameters, **{name: state.memory[name] for name in self.broadcasts()}}
        return Message(_named(sent | {"statistics": state.statistics}, np.float32), {"round": round})

    def broadcasts(self) -> tuple[str, ...]:
        """Memories of the server that travel down with the model."""
        return ()

    def fold(self, state: TrainingState, reply: Reply) -> TrainingState:
        """Add a weighted update to the sums of the round; an update that cannot be right is refused."""
        arrays = {what: _checked(reply.message, what, self.shapes) for what in self.travels}
        moved = {name: value.shape for name, value in state.statistics.items()}
        arrays["statistics"] = _checked(reply.message, "statistics", moved)
        norm, largest = norm_of(arrays["update"]), _EXPLODED * (1 + norm_of(state.parameters))
        if norm > largest:
            raise MessageError(f"the update has exploded: its norm is {norm:.1e}, more than {largest:.1e}")
        for name, value in arrays["statistics"].items():
            if name.endswith("running_var") and value.min(initial=0) < 0:
                raise MessageError(f"array 'statistics.{name}' holds a negative variance")
        weight = self.weight_of(reply)
        sums = {}
        for what, vectors in arrays.items():
            factor = weight if what == "statistics" else self.factor(what, weight, state, reply)
            before = state.sums.get(what)
            # An array without dimensions times a number is a number, which nothing can be added to in place.
            scaled = {name: np.asarray(factor * array.astype(np.float64)) for name, array in vectors.items()}
            sums[what] = scaled if before is None else {n: np.add(before[n], v, out=v) for n, v in scaled.items()}
        effort = state.effort + weight * self.effort(state, reply)
        return replace(state, sums=sums, weight=state.weight + weight, effort=effort, replies=state.replies + 1)

    def weight_of(self, reply: Reply) -> float:
        """How much a client counts in the mean."""
        return weight_of(reply, self.stage.weighting)

    def factor(self, what: str, weight: float, state: TrainingState, reply: Reply) -> float:
        """The factor of an array of a reply in the sum of the round."""
        return weight

    def effort(self, state: TrainingState, reply: Reply) -> float:
        """A figure of which the round needs the mean over the clients."""
        return 1.0

    def close(self, state: TrainingState) -> TrainingState:
        """The step of the server, once all replies of the round are in; without any, the model stays as it is.

        Statistics are averaged as they are: they are estimates, not parameters that an optimiser steps along.
        """
        if state.replies:
            mean = {name: total / state.weight for name, total in state.sums["update"].items()}
            parameters, memory = self.step(state, mean)
            statistics = {name: total / state.weight for name, total in state.sums["statistics"].items()}
            state = replace(state, parameters=parameters, memory=memory, statistics=statistics)
        return TrainingState(state.parameters, state.memory, state.statistics, state.round + 1)

    def step(self, state: TrainingState, mean: Vectors) -> tuple[Vectors, dict[str, Vectors]]:
        """New parameters and memories from the mean update of the round."""
        return added(state.parameters, mean, getattr(self.stage, "server_lr", 1.0)), state.memory

    def head(self, state: TrainingState) -> LinearHead:
        """The head as it is."""
        values = self._frozen_head or state.parameters
        heads = {n.removeprefix("head."): v.astype(np.float32) for n, v in values.items() if n.startswith("head.")}
        return LinearHead.of_arrays(heads)

    def place(self, state: TrainingState) -> None:
        """Write what the state says into the body, and put it into evaluation mode."""
        if self.network and self.network.backbone:
            self.network.load(_tensors({**state.parameters, **state.statistics}))
            set_mode(self.network.backbone.body, False, self.stage.norm_statistics)

    def published(self, state: TrainingState, counts: Ints) -> Published:
        """The FedNCM paper's count: both directions, without the bias of the head; every example in every round.

        A step on the body counts as three forward passes.
        """
        values = sum(int(np.prod(shape)) for shape in self.shapes.values())
        values -= self.setting.n_classes if self.plan.head == "shared" else 0
        per_round = self.stage.sampled(self.setting.n_clients)
        what = "(C · d + P)" if self.plan.changes_features else "C · d"
        formula = f"FedNCM paper, appendix A: 2 · {what} · K · R · 4 bytes, up and down"
        return Published(2 * values * per_round * state.round * 4, state.round * self.round_passes(counts), formula)

    def round_passes(self, counts: Ints) -> int:
        """The paper's count of a round's forward passes."""
        epochs = getattr(self.stage, "local_epochs", None) or 1
        return (3 if self.plan.changes_features else 1) * epochs * int(counts.sum())

    def freeze(self, state: TrainingState) -> Message:
        """The state between two rounds, at full precision."""
        vectors = {"model": state.parameters, "statistics": state.statistics, **state.memory}
        return Message(_named(vectors, np.float64), {"round": state.round})

    def thaw(self, message: Message) -> TrainingState:
        """The state that `freeze` wrote."""
        vectors = {
            what: {name: message.arrays[f"{what}.{name}"].astype(np.float64) for name in self.shapes}
            for what in ("model", *self.memories)
        }
        statistics = {name: message.arrays[f"statistics.{name}"].astype(np.float64) for name in self._statistics}
        return TrainingState(vectors.pop("model"), vectors, statistics, int(message.scalars["round"]))

    # ----------------------------------------------------------------------------------------------- on the clients

    def answer(self, cohort: Cohort, message: Message) -> list[Reply]:
        """Train every client's model; each sends its update and keeps its own."""
        clients = len(cohort.clients)
        given = {n.removeprefix("model."): a for n, a in message.arrays.items() if n.startswith("model.")}
        given |= {n.removeprefix("statistics."): a for n, a in message.arrays.items() if n.startswith("statistics.")}
        start = {name: value.expand(clients, *value.shape) for name, value in _tensors(given).items()}
        sizes = np.searchsorted(cohort.owners, cohort.clients, "right") - np.searchsorted(cohort.owners, cohort.clients)
        result, sent, kept = self.train(start, cohort, message, sizes)
        sent["statistics"] = result.statistics
        replies = []
        for row, client in enumerate(cohort.clients):
            arrays = {f"{what}.{name}": each[name][row].numpy() for what, each in sent.items() for name in each}
            mine = {f"{what}.{name}": each[name][row].numpy() for what, each in kept.items() for name in each}
            reply = Message(arrays, {"examples": int(sizes[row]), "steps": int(result.steps[row])})
            passes = self.passes(int(sizes[row]), int(result.steps[row]), bool(cohort.new[row]))
            replies.append(Reply(np.array([client]), reply, np.array([reply.nbytes]), np.array([passes]), mine))
        return replies

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
        width = size if self.stage.batch_size == "full" else min(self.stage.batch_size, size)
        per_epoch = -(-size // width)
        return 3 * (steps // per_epoch * size + steps % per_epoch * width)

    # ------------------------------------------------------------------------------------------------------ helpers

    def remembered(self, what: str, cohort: Cohort) -> Stack:
        """What each client of a cohort kept under this name [M, …]."""
        return {name: torch.from_numpy(cohort.kept(f"{what}.{name}")) for name in self.shapes}

    def _zeros(self) -> Vectors:
        return {name: np.zeros(shape) for name, shape in self.shapes.items()}


def norm_of(vectors: Mapping[str, np.ndarray]) -> float:
    """Euclidean norm over all names."""
    return float(np.sqrt(sum(np.sum(np.square(vector, dtype=np.float64)) for vector in vectors.values())))


def difference(left: Stack, right: Stack) -> Stack:
    """left − right, name by name."""
    return {name: value - right[name] for name, value in left.items()}


def added(left: Vectors, right: Vectors, factor: float) -> Vectors:
    """left + factor · right, name by name."""
    return {name: value + factor * right[name] for name, value in left.items()}


def _checked(message: Message, what: str, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, np.ndarray]:
    return {name: message.array(f"{what}.{name}", "float32", shape) for name, shape in shapes.items()}


def _named(vectors: dict[str, Vectors], dtype: type[np.floating]) -> dict[str, np.ndarray]:
    return {f"{what}.{name}": np.array(array, dtype) for what, each in vectors.items() for name, array in each.items()}


def _tensors(arrays: Mapping[str, np.ndarray]) -> Stack:
    """Float32 tensors of arrays, on the same memory where that can be."""
    return {name: torch.from_numpy(np.require(array, np.float32, "W")) for name, array in arrays.items()}
