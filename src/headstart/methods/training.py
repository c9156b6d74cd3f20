"""What methods that train a head share: parameters down, updates up, a running mean, a step of the server."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Generic, TypeVar

import numpy as np
import torch

from headstart.errors import MessageError
from headstart.heads import LinearHead
from headstart.ledger import Published
from headstart.methods.base import Cohort, Reply, Setting
from headstart.methods.solver import LocalResult, Stack, local_sgd
from headstart.recipe import Training
from headstart.statistics import Floats, Ints
from headstart.wire import Message

# An update so many times larger than the head it updates is no step of SGD.
_EXPLODED = 1e4

StageT = TypeVar("StageT", bound=Training)
Vectors = dict[str, Floats]
"""Arrays by the name of the parameter they belong to, in float64: the server adds and steps in double precision."""


@dataclass(frozen=True)
class TrainingState:
    """The server between two replies: the head, what its optimiser remembers, and the sums of this round so far."""

    parameters: Vectors
    memory: dict[str, Vectors] = field(default_factory=dict)
    round: int = 0
    sums: dict[str, Vectors] = field(default_factory=dict)
    weight: float = 0.0
    effort: float = 0.0
    replies: int = 0


class TrainingMethod(Generic[StageT]):
    """FedAvg's skeleton. A method changes what the solver minimises, what else travels, and the server's step."""

    hears_once = False
    memories: tuple[str, ...] = ()
    """What the server remembers from round to round, one vector per parameter each; zero before the first round."""
    travels: tuple[str, ...] = ("update",)
    """What a client sends, one array per parameter each."""
    keeps: tuple[str, ...] = ()
    """What a client keeps to itself from one of its rounds to the next; zero before its first."""

    def __init__(self, stage: StageT, setting: Setting) -> None:
        self.stage, self.setting = stage, setting
        classes, dim = setting.n_classes, setting.dim
        self.shapes: dict[str, tuple[int, ...]] = {"weight": (classes, dim), "bias": (classes,)}
        kept = {f"{what}.{name}": shape for what in self.keeps for name, shape in self.shapes.items()}
        self.kept_shapes: Mapping[str, tuple[int, ...]] = kept
        # Parameters, start, velocity, gradient, and what is kept and corrected by, in float32.
        self.bytes_per_client = 4 * 8 * classes * (dim + 1)

    # ------------------------------------------------------------------------------------------------ on the server

    def open(self) -> TrainingState:
        """The head to start from."""
        return TrainingState(self._start(), {name: self._zeros() for name in self.memories})

    def instruct(self, state: TrainingState, round: int) -> Message:
        """The head, in float32, and what else clients need."""
        sent = {"model": state.parameters, **{name: state.memory[name] for name in self.broadcasts()}}
        return Message(_named(sent, np.float32), {"round": round})

    def broadcasts(self) -> tuple[str, ...]:
        """Memories of the server that travel down with the head."""
        return ()

    def fold(self, state: TrainingState, reply: Reply) -> TrainingState:
        """Add a weighted update to the sums of the round; an update that cannot be right is refused."""
        arrays = {
            what: {name: reply.message.array(f"{what}.{name}", "float32", shape) for name, shape in self.shapes.items()}
            for what in self.travels
        }
        norm, largest = norm_of(arrays["update"]), _EXPLODED * (1 + norm_of(state.parameters))
        if norm > largest:
            raise MessageError(f"the update has exploded: its norm is {norm:.1e}, more than {largest:.1e}")
        weight = self.weight_of(reply)
        sums = {}
        for what, vectors in arrays.items():
            factor = self.factor(what, weight, state, reply)
            before = state.sums.get(what) or self._zeros()
            sums[what] = {name: before[name] + factor * array.astype(np.float64) for name, array in vectors.items()}
        effort = state.effort + weight * self.effort(state, reply)
        return replace(state, sums=sums, weight=state.weight + weight, effort=effort, replies=state.replies + 1)

    def weight_of(self, reply: Reply) -> float:
        """How much a client counts in the mean."""
        examples = reply.message.scalars.get("examples")
        if not isinstance(examples, int) or not 1 <= examples <= 10**12:
            raise MessageError(f"a client says that it has {examples} examples")
        return float(examples) if self.stage.weighting == "examples" else 1.0

    def factor(self, what: str, weight: float, state: TrainingState, reply: Reply) -> float:
        """The factor of an array of a reply in the sum of the round."""
        return weight

    def effort(self, state: TrainingState, reply: Reply) -> float:
        """A figure of which the round needs the mean over the clients."""
        return 1.0

    def close(self, state: TrainingState) -> TrainingState:
        """The step of the server, once all replies of the round are in; without any, the head stays as it is."""
        if state.replies:
            mean = {name: total / state.weight for name, total in state.sums["update"].items()}
            parameters, memory = self.step(state, mean)
            state = replace(state, parameters=parameters, memory=memory)
        return TrainingState(state.parameters, state.memory, state.round + 1)

    def step(self, state: TrainingState, mean: Vectors) -> tuple[Vectors, dict[str, Vectors]]:
        """New parameters and memories from the mean update of the round."""
        return added(state.parameters, mean, getattr(self.stage, "server_lr", 1.0)), state.memory

    def head(self, state: TrainingState) -> LinearHead:
        """The head as it is."""
        parameters = state.parameters
        return LinearHead(parameters["weight"].astype(np.float32), parameters["bias"].astype(np.float32))

    def published(self, state: TrainingState, counts: Ints) -> Published:
        """The FedNCM paper's count of head tuning: both directions; every example in every round."""
        values = self.setting.n_classes * self.setting.dim
        share = 1.0 if self.stage.participation is None else self.stage.participation
        per_round = self.stage.clients_per_round or round(share * self.setting.n_clients)
        formula = "FedNCM paper, appendix A: 2 · C · d · K · R · 4 bytes, up and down"
        epochs = self.stage.local_epochs or 1
        passes = state.round * epochs * int(counts.sum())
        return Published(2 * values * per_round * state.round * 4, passes, formula)

    def freeze(self, state: TrainingState) -> Message:
        """The state between two rounds, at full precision."""
        return Message(_named({"model": state.parameters, **state.memory}, np.float64), {"round": state.round})

    def thaw(self, message: Message) -> TrainingState:
        """The state that `freeze` wrote."""
        vectors = {
            what: {name: message.arrays[f"{what}.{name}"].astype(np.float64) for name in self.shapes}
            for what in ("model", *self.memories)
        }
        return TrainingState(vectors.pop("model"), vectors, int(message.scalars["round"]))

    # ----------------------------------------------------------------------------------------------- on the clients

    def answer(self, cohort: Cohort, message: Message) -> list[Reply]:
        """Train every client's head; each sends its update and keeps its own."""
        clients = len(cohort.clients)
        start = {
            name: torch.from_numpy(message.arrays[f"model.{name}"].copy()).expand(clients, *shape)
            for name, shape in self.shapes.items()
        }
        sizes = np.searchsorted(cohort.owners, cohort.clients, "right") - np.searchsorted(cohort.owners, cohort.clients)
        result, sent, kept = self.train(start, cohort, message, sizes)
        replies = []
        for row, client in enumerate(cohort.clients):
            arrays = {f"{what}.{name}": sent[what][name][row].numpy() for what in self.travels for name in self.shapes}
            mine = {f"{what}.{name}": kept[what][name][row].numpy() for what in self.keeps for name in self.shapes}
            scalars = {"examples": int(sizes[row]), "steps": int(result.steps[row])}
            reply = Message(arrays, scalars)
            passes = int(sizes[row]) if cohort.new[row] else 0
            replies.append(Reply(np.array([client]), reply, np.array([reply.nbytes]), np.array([passes]), mine))
        return replies

    def train(
        self, start: Stack, cohort: Cohort, message: Message, sizes: Ints
    ) -> tuple[LocalResult, dict[str, Stack], dict[str, Stack]]:
        """Local training: the result, what travels and what is kept, all stacked over the cohort."""
        result = local_sgd(start, cohort, self.stage, int(message.scalars["round"]), self.setting.seed)
        return result, {"update": difference(result.parameters, start)}, {}

    # ------------------------------------------------------------------------------------------------------ helpers

    def remembered(self, what: str, cohort: Cohort) -> Stack:
        """What each client of a cohort kept under this name [M, …]."""
        return {name: torch.from_numpy(cohort.kept(f"{what}.{name}")) for name in self.shapes}

    def _start(self) -> Vectors:
        previous = self.setting.previous
        if self.stage.head_init == "zeros":
            return self._zeros()
        if self.stage.head_init == "previous" and previous is not None:
            # A class that was masked because nobody had been heard about it may be learned now.
            bias = np.where(np.isfinite(previous.bias), previous.bias, 0.0)
            return {"weight": previous.weight.astype(np.float64), "bias": bias.astype(np.float64)}
        rng = np.random.default_rng([*self.setting.seed, 0x1417])
        bound = 1 / np.sqrt(self.setting.dim)  # torch's own initialisation of a linear layer
        return {name: rng.uniform(-bound, bound, shape) for name, shape in self.shapes.items()}

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


def _named(vectors: dict[str, Vectors], dtype: type[np.floating]) -> dict[str, np.ndarray]:
    return {f"{what}.{name}": array.astype(dtype) for what, each in vectors.items() for name, array in each.items()}
