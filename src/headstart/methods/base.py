"""What a method is: the verbs of its paper's pseudo-code, free of transport, files, privacy and costs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt

from headstart.core.message import Message
from headstart.core.params import Params
from headstart.core.plan import Plan
from headstart.core.reply import ClientResult, StatisticsResult
from headstart.core.seeds import Seed, extended
from headstart.core.target import Target
from headstart.core.update import Blocks
from headstart.heads import LinearHead
from headstart.solvers.cohort import Cohort, ReadState

if TYPE_CHECKING:  # closed-form methods do not wait for torch
    from headstart.modules import LocalModel

State = TypeVar("State")
Arrays = Mapping[str, npt.NDArray[Any]]
ALONE = 1 << 62
"""Bytes that leave a cohort no room for a second client."""


@dataclass(frozen=True)
class Population:
    """All clients that a part of the model is trained for together, sampled or not, and their examples."""

    clients: int = 1
    examples: int = 1


@dataclass(frozen=True)
class Task:
    """What is known of one task before the first round."""

    name: str
    n_classes: int
    population: Population = Population()
    head: LinearHead | None = None
    """The head that an earlier stage has made; None where there is none."""
    module: Arrays | None = None
    """Values of the module that an earlier stage has made; None where it is new."""
    target: Target = "classes"
    """What is learned; of targets that are no classes, ``n_classes`` is how many there are."""


@dataclass(frozen=True)
class StageContext:
    """What server and clients know of a stage before the first round."""

    tasks: tuple[Task, ...]
    dim: int
    """Length of a feature vector."""
    seed: tuple[int, ...]
    """The run's seed and the number of the stage."""
    plan: Plan
    model: LocalModel | None = None
    """The backbone as the stage starts from it, with the module that is to be trained; None where the data are
    features."""
    noise: Seed = ()
    """What noise is drawn from beside the seed: nothing in a simulation, a secret on the server of a deployment. None,
    on its nodes: the operating system's generator alone."""
    number: int = 0
    """Of the task among several, where this is the context of one of them."""
    everybody: Population | None = None
    """All clients of all tasks, where this is the context of one of them."""

    @property
    def noise_seed(self) -> Seed:
        """What noise that hides somebody is drawn from."""
        return extended(self.noise, *self.seed)

    @property
    def task(self) -> Task:
        """The task of a method that serves one."""
        (task,) = self.tasks
        return task

    @property
    def population(self) -> Population:
        """All clients of all tasks."""
        clients = sum(task.population.clients for task in self.tasks)
        return self.everybody or Population(clients, sum(task.population.examples for task in self.tasks))

    @property
    def fixed_head(self) -> bool:
        """Whether heads are the backbone's own: as wide as what it gives a task, and never trained."""
        backbone = self.model.backbone if self.model else None
        return backbone is not None and backbone.task != "classify"

    def alone(self, number: int) -> StageContext:
        """The context of one of the tasks, by its number."""
        return replace(self, tasks=(self.tasks[number],), number=number, everybody=self.population)


@dataclass(frozen=True, eq=False)
class Received:
    """What the clients of a cohort [M] have received, and start from."""

    round: int
    """From 0."""
    model: Params = field(default_factory=Params)
    """The parameters that each client starts from, stacked [M, …]: what is shared, and what is its own."""
    blocks: Mapping[str, Params] = field(default_factory=dict)
    """What else the server has sent, by block."""
    scalars: Mapping[str, Any] = field(default_factory=dict)

    def __getitem__(self, block: str) -> Params:
        return self.blocks[block]


class Method(ABC, Generic[State]):
    """A method of federated learning. What most methods answer alike is answered here: nothing stays with a client, and
    every client sends the same arrays."""

    state_type: type
    """The class of the server's state, a dataclass."""
    replays: bool = False
    """Whether the model is a log of steps: a client is sent those it has missed since its last round."""
    blocks: Blocks = MappingProxyType({})
    """Names and shapes of all that clients send, of all tasks."""
    weighting: str = "uniform"
    """How clients count in a mean: by their "examples", or "uniform"."""
    personal: bool = False
    """Whether every client has a model of its own."""
    client_state: Blocks = MappingProxyType({})
    """Names and shapes of what stays with a client from one of its rounds to the next."""
    accumulates: Mapping[str, str] = MappingProxyType({})
    """Kinds of client state that add up what was sent of a block."""
    folds: bool = False
    """Whether the server writes into frozen backbone weights (FedEx-LoRA)."""

    @property
    def measures(self) -> bool:
        """Whether the first batch is still to be timed, to choose precision and memory layout."""
        return False

    memory_per_client: int = 0
    """Bytes that one more client of a cohort takes, beyond its features."""

    @abstractmethod
    def init(self) -> State:
        """Server: the state before round 1."""

    @abstractmethod
    def broadcast(self, state: State, round: int, since: int, task: int = 0) -> Message:
        """Server to a client of a task that took part in round ``since`` last, -1 for never."""

    @abstractmethod
    def receive(self, cohort: Cohort, message: Message) -> Received:
        """On the clients: what they start from."""

    @abstractmethod
    def client_update(self, cohort: Cohort, received: Received) -> ClientResult | StatisticsResult:
        """On the clients: what each of them does."""

    @abstractmethod
    def server_update(self, state: State, total: Any, round: int) -> State:
        """Server: the state after a round (from 0), from the total of its replies."""

    @abstractmethod
    def model(self, state: State, task: int = 0) -> Message:
        """The global model of a task, in the form that `load` reads."""

    @abstractmethod
    def load(self, message: Message, task: int = 0, personal: Arrays | None = None) -> LinearHead:
        """Write a model, and what is a client's own, into the backbone; its head."""

    @property
    def methods(self) -> Sequence[Method[Any]]:
        """The method of each task."""
        return [self]

    def expected(self, task: int) -> Blocks:
        """Names and shapes of what a client of a task sends."""
        return self.blocks

    def check(self, message: Message) -> None:
        """Server: `MessageError` where no client sends such an update, beyond what the channel checks."""

    def counted(self, arrays: Arrays) -> Arrays:
        """Server: of a client's update, what is added up; all of it, as it is."""
        return arrays

    def personal_params(self, read: ReadState, task: int = 0) -> Mapping[str, npt.NDArray[np.float32]]:
        """The personal parameters of each client [M, …] by name, from its client state."""
        return {}

    def selected(self, state: State) -> Mapping[str, float]:
        """Hyper-parameters that the data chose."""
        return {}
