"""What methods that train share: parameters down, local training, updates up, a step of the server."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np

from headstart.combiners import Average, Combiner
from headstart.config.stage import Rounds
from headstart.core.message import Message
from headstart.core.params import Params, Shapes
from headstart.core.reply import ClientResult
from headstart.core.update import Blocks, Total, block
from headstart.errors import MessageError, listed
from headstart.heads import LinearHead
from headstart.methods.base import ALONE, Arrays, Method, Population, Received, StageContext
from headstart.methods.head_init import head_start
from headstart.solvers.cohort import Cohort, ReadState
from headstart.solvers.objective import LocalResult, Objective, Solver

if TYPE_CHECKING:  # methods are known before torch is loaded
    from headstart.solvers.network import Network

StageT = TypeVar("StageT", bound=Rounds)


@dataclass(frozen=True)
class TrainingState:
    """The server between two rounds: the shared parameters, and what its optimiser remembers."""

    params: Params
    memory: dict[str, Params] = field(default_factory=dict)
    statistics: Params = field(default_factory=Params)
    """Running statistics of batch norm, where they are shared."""
    population: Population = field(default_factory=Population)
    """All clients that these parameters are trained for."""

    def with_memory(self, **memory: Params) -> TrainingState:
        """The same with other memories."""
        return replace(self, memory={**self.memory, **memory})


class Training(Method[TrainingState], Generic[StageT]):
    """FedAvg's skeleton: x ← combiner(x, Σ weight · Δ / Σ weight).

    A method changes what a client minimises and sends (`client_update`), and what the server does with the total
    (`server_update`).
    """

    state_type = TrainingState
    memories: tuple[str, ...] = ()
    """What the server remembers beside its aggregator's state: one array per parameter each, zero at first."""
    broadcasts: tuple[str, ...] = ()
    """Memories of the server that travel down with the model."""
    keeps: tuple[str, ...] = ()
    """What stays with a client beside its part of the model, one array per shared parameter each; zero at first."""
    needs_network = False
    """Whether the solver works on one network at a time where only heads train, too."""

    def __init__(self, stage: StageT, context: StageContext) -> None:
        self.stage, self.context, self.plan = stage, context, context.plan
        self.weighting: str = stage.weighting
        self.accumulates, self.twin = stage.accumulates, stage.twin
        head = head_start(stage, context)
        self.network: Network | None = None
        below, self._statistics = Params(), Params()
        if self.plan.changes_features or self.needs_network:
            from headstart.solvers.network import Network, tensors

            self.network = Network(context.model, tensors(head), stage, self.plan, context.number)
            below = Params({n: p for n, p in _values(self.network.trained).items() if not n.startswith("head.")})
            self._statistics = _values(self.network.statistics)
        given = {f"module.{name}": np.asarray(array, np.float64) for name, array in (context.task.module or {}).items()}
        self.start = below | {name: value for name, value in given.items() if name in below} | head
        """What a client starts from before it has received or kept anything; the frozen backbone is not here."""
        self.shared = self.start.select(name for name in self.start if self.plan.role(name) == "shared")
        self.shapes: Shapes = self.shared.shapes
        self.solve = self.solver()
        # A backbone trains for one client at a time.
        # Of a head: parameters, start, velocity, gradient, and what is kept and corrected by, in float32.
        self.memory_per_client = ALONE if self.network else 4 * 8 * sum(v.size for v in self.start.values())

    def solver(self) -> Solver:
        """What the clients do: SGD, on stacked heads or on the network."""
        from headstart.solvers.heads import HeadSolver
        from headstart.solvers.network import BodySolver

        stage, seed = self.stage, self.context.seed
        if self.network:
            return BodySolver(self.network, stage, seed)  # type: ignore[arg-type]
        trained = [name for name in self.start if self.plan.role(name) != "frozen"]
        return HeadSolver(stage, seed, trained)  # type: ignore[arg-type]

    @property
    def measures(self) -> bool:
        """Whether the first batch is still to be timed, to choose precision and memory layout."""
        return self.network is not None and self.network.undecided

    def combiner(self) -> Combiner:
        """How the server steps along the mean update."""
        return Average(self.stage.server_step)

    @cached_property
    def blocks(self) -> Blocks:  # type: ignore[override]
        """What is sent of every shared parameter, and the shared statistics."""
        sent = {f"{what}.{name}": shape for what in self.stage.sends for name, shape in self.shapes.items()}
        sent |= dict.fromkeys(self.stage.numbers, ())
        return {**sent, **{f"statistics.{name}": value.shape for name, value in self._shared_statistics.items()}}

    @cached_property
    def personal_shapes(self) -> Shapes:
        """What is each client's own part of the model."""
        roles = ("personal", "shared") if self.twin else ("personal",)
        mine = {name: value.shape for name, value in self.start.items() if self.plan.role(name) in roles}
        if self.plan.statistics in roles:
            mine |= self._statistics.shapes
        return mine

    @property
    def personal(self) -> bool:  # type: ignore[override]
        """Whether every client has a model of its own."""
        return bool(self.personal_shapes)

    @property
    def client_state(self) -> Blocks:  # type: ignore[override]
        """What clients keep with the parameters, and their part of the model."""
        kept = {f"{kind}.{name}": shape for kind in self.keeps for name, shape in self.kept_with.items()}
        return {**kept, **{f"personal.{name}": shape for name, shape in self.personal_shapes.items()}}

    @property
    def kept_with(self) -> Shapes:
        """The parameters that clients keep something with."""
        return self.shapes

    @property
    def _shared_statistics(self) -> Params:
        return self._statistics if self.plan.statistics == "shared" else Params()

    # ------------------------------------------------------------------------------------------------ on the server

    def init(self) -> TrainingState:
        """The model to start from."""
        memory = {name: Params.zeros(self.shapes) for name in self.memories} | self.combiner().init(self.shapes)
        return TrainingState(self.shared, memory, self._shared_statistics, self.context.task.population)

    def broadcast(self, state: TrainingState, round: int, since: int, task: int = 0) -> Message:
        """What is shared, in float32, and what else a client needs."""
        sent = {"model": state.params, **{name: state.memory[name] for name in self.broadcasts}}
        return Message(_named(sent | {"statistics": state.statistics}), {"round": round})

    def server_update(self, state: TrainingState, total: Total, round: int) -> TrainingState:
        """A step along the mean update."""
        return self.step(state, total, total.mean("update"))

    def step(self, state: TrainingState, total: Total, mean: Params) -> TrainingState:
        """A step along a mean of updates; statistics are no parameters to step along: their mean is the new value."""
        params, memory = self.combiner().update(state.params, mean, state.memory)
        statistics = total.mean("statistics") if state.statistics else state.statistics
        return replace(state, params=params, memory=state.memory | memory, statistics=statistics)

    def train_on_server(self, state: TrainingState, cohort: Cohort, round: int) -> TrainingState:
        """The model of a round, trained as a client would, on examples that the server was given."""
        received = self.receive(cohort, self.broadcast(state, round, -1))
        whole = self.stage.share_train == "all"
        trains = frozenset(name for name in self.start if whole or not name.startswith("head."))
        local = self.solve(received.model, cohort, round, Objective(trains=trains))
        moved = {name: local.params[name][0].double().numpy().copy() for name in state.params if name in trains}
        statistics = {name: local.statistics[name][0].double().numpy() for name in state.statistics}
        return replace(state, params=state.params | moved, statistics=Params(statistics))

    def model(self, state: TrainingState, task: int = 0) -> Message:
        """What is shared, in float32."""
        return Message(_named({"model": state.params, "statistics": state.statistics}))

    def load(self, message: Message, task: int = 0, personal: Arrays | None = None) -> LinearHead:
        """What is shared, what is the client's own and what is frozen; the backbone is put into evaluation mode."""
        values = self.start | self._statistics | block(message.arrays, "model") | block(message.arrays, "statistics")
        values = values | (personal or {})
        if self.network and self.network.backbone:
            from headstart.solvers.network import tensors

            self.network.load(tensors(values))
            self.network.model.set_mode(False, self.stage.norm_statistics)
        heads = {n.removeprefix("head."): v.astype(np.float32) for n, v in values.items() if n.startswith("head.")}
        return replace(LinearHead.of_arrays(heads), temperature=self.stage.known_temperature)

    def personal_params(self, read: ReadState, task: int = 0) -> dict[str, np.ndarray]:
        """What a client kept, or what it would start from."""
        start = self.start | self._statistics
        return {name: read(f"personal.{name}", start[name].astype(np.float32)) for name in self.personal_shapes}

    # ----------------------------------------------------------------------------------------------- on the clients

    def receive(self, cohort: Cohort, message: Message) -> Received:
        """The parameters that each client starts from: what it received, what is its own, and what is frozen."""
        from headstart.solvers.network import tensors

        self._check_received(message)
        clients = len(cohort.clients)
        given = self.start | block(message.arrays, "model") | block(message.arrays, "statistics")
        model = Params({n: value.expand(clients, *value.shape) for n, value in tensors(given).items()})
        if not self.twin:
            model = model | tensors(self.personal_params(cohort.state))
        blocks = {name: tensors(block(message.arrays, name)) for name in self.broadcasts}
        return Received(int(message.scalars["round"]), model, blocks)

    def _check_received(self, message: Message) -> None:
        """Refuse what is no model of the stage: it could fail with some examples, and not with others."""
        blocks = {"model": self.shared.shapes, "statistics": self._shared_statistics.shapes}
        blocks |= dict.fromkeys(self.broadcasts, self.shapes)
        expected = {f"{block}.{name}": shape for block, shapes in blocks.items() for name, shape in shapes.items()}
        found = {name: array.shape for name, array in message.arrays.items()}
        if found != {name: tuple(shape) for name, shape in expected.items()}:
            wrong = sorted(name for name in found.keys() | expected.keys() if found.get(name) != expected.get(name))
            raise MessageError(f"the message is of another model than the stage trains: {listed(wrong, 3)}")

    def client_update(self, cohort: Cohort, received: Received) -> ClientResult:
        """Local training; the client sends how far it has moved the model."""
        local = self.solve(received.model, cohort, received.round, Objective())
        return self.result(cohort, local, update=local.params - received.model)

    def result(
        self, cohort: Cohort, local: LocalResult, state: Mapping[str, Params] | None = None, **blocks: Params
    ) -> ClientResult:
        """What clients send of the shared parameters, and what they keep: their part of the model, and ``state``."""
        sent = {name: values.select(n for n in values if n in self.shapes or not n) for name, values in blocks.items()}
        if self.plan.statistics == "shared":
            sent["statistics"] = local.statistics
        kept = dict(state or {})
        if not self.twin:
            kept["personal"] = (local.params | local.statistics).select(self.personal_shapes)
        if self.network and "personal" in kept:  # a network's memory is the next client's
            kept["personal"] = Params({name: value.clone() for name, value in kept["personal"].items()})
        passes = local.passes if self.plan.changes_features else np.where(cohort.new, cohort.sizes, 0)
        return ClientResult(sent, passes, {"examples": cohort.sizes, "steps": local.steps}, kept)

    def kept(self, kind: str, cohort: Cohort) -> Params:
        """What each client kept of a kind [M, …]."""
        from headstart.solvers.network import tensors

        return tensors({name: cohort.state(f"{kind}.{name}", None) for name in self.kept_with})


def _named(vectors: Mapping[str, Params]) -> dict[str, np.ndarray]:
    """Arrays in float32 under the names that messages use."""
    return {f"{what}.{name}": np.array(a, np.float32) for what, each in vectors.items() for name, a in each.items()}


def _values(tensors: Mapping[str, Any]) -> Params:
    """Values of tensors, in float64."""
    return Params({name: tensor.detach().cpu().double().numpy() for name, tensor in tensors.items()})
