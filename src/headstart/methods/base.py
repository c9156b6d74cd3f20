"""What a method is: the verbs of its paper's pseudo-code, free of transport, files, privacy and costs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from headstart.core.message import Message
from headstart.core.params import Params, Seed
from headstart.core.plan import Plan
from headstart.core.reply import ClientResult, StatisticsResult
from headstart.core.update import Blocks
from headstart.heads import LinearHead
from headstart.solvers.cohort import Cohort, ReadState

if TYPE_CHECKING:  # closed-form methods do not wait for torch
    from headstart.modules import LocalModel

State = TypeVar("State")
Arrays = Mapping[str, npt.NDArray[Any]]


@dataclass(frozen=True)
class Population:
    """All clients that a part of the model is trained for together, heard or not, and their examples."""

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
    """The body as the stage starts from it, with the module that is to be trained; None where the data are features."""
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
        return None if self.noise is None else (*self.noise, *self.seed)

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


class Method(Protocol[State]):
    """A method of federated learning."""

    @property
    def one_shot(self) -> bool:
        """Whether a client is heard in one round only: what it says does not depend on what the server knows."""

    @property
    def replays(self) -> bool:
        """Whether the model is a log of steps: a client is sent those it has missed since its last round."""

    @property
    def blocks(self) -> Blocks:
        """Names and shapes of all that clients send, of all tasks."""

    @property
    def state_type(self) -> type:
        """The class of the server's state, a dataclass."""

    @property
    def client_state(self) -> Blocks:
        """Names and shapes of what stays with a client from one of its rounds to the next."""

    @property
    def accumulates(self) -> Mapping[str, str]:
        """Kinds of client state that add up what was sent of a block."""

    @property
    def memory_per_client(self) -> int:
        """Bytes that one more client of a cohort takes, beyond its features."""

    @property
    def weighting(self) -> str:
        """How clients count in a mean: by their "examples", or "uniform"."""

    @property
    def personal(self) -> bool:
        """Whether every client has a model of its own."""

    def init(self) -> State:
        """Server: the state before round 1."""

    def broadcast(self, state: State, round: int, since: int, task: int = 0) -> Message:
        """Server to a client of a task that took part in round ``since`` last, -1 for never."""

    def receive(self, cohort: Cohort, message: Message) -> Received:
        """On the clients: what they start from."""

    def client_update(self, cohort: Cohort, received: Received) -> ClientResult | StatisticsResult:
        """On the clients: what each of them does."""

    def expected(self, task: int) -> Blocks:
        """Names and shapes of what a client of a task sends."""

    def check(self, message: Message) -> None:
        """Server: `MessageError` where no client sends such an update."""

    def server_update(self, state: State, total: Any, round: int) -> State:
        """Server: the state after a round (from 0), from the total of what was heard in it."""

    def model(self, state: State, task: int = 0) -> Message:
        """The global model of a task, in the form that `load` reads."""

    def load(self, message: Message, task: int = 0, personal: Arrays | None = None) -> LinearHead:
        """Write a model, and what is a client's own, into the body; its head."""

    def own(self, read: ReadState, task: int = 0) -> Mapping[str, npt.NDArray[np.float32]]:
        """What is each client's own [M, …] by the name of the parameter, from its client state."""

    def selected(self, state: State) -> Mapping[str, float]:
        """Hyper-parameters that the data chose."""


class BaseMethod:
    """What most methods answer alike: nothing stays with a client, and every client sends the same arrays."""

    one_shot = False
    replays = False
    personal = False
    weighting = "uniform"
    blocks: Blocks = MappingProxyType({})
    client_state: Blocks = MappingProxyType({})
    accumulates: Mapping[str, str] = MappingProxyType({})
    memory_per_client = 0

    def check(self, message: Message) -> None:
        """Nothing beyond what the channel checks."""

    def expected(self, task: int) -> Blocks:
        """The same of every client."""
        return self.blocks

    def own(self, read: ReadState, task: int = 0) -> Mapping[str, npt.NDArray[np.float32]]:
        """Nothing."""
        return {}

    def selected(self, state: Any) -> Mapping[str, float]:
        """Nothing was chosen."""
        return {}
