"""What a method is: a few verbs, free of transport and scheduling; and those that statistics methods share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from headstart.errors import MessageError
from headstart.heads import LinearHead
from headstart.ledger import Published
from headstart.statistics import (
    ClientStatistics,
    Features,
    Ints,
    Moments,
    Transform,
    message_nbytes,
    summarise,
)
from headstart.wire import Message

if TYPE_CHECKING:  # closed-form methods do not wait for torch
    from headstart.backbones import Backbone
    from headstart.backbones.inputs import Inputs
    from headstart.modules import Attached

State = TypeVar("State")
Kept = Callable[[str, npt.NDArray[np.float32] | None], npt.NDArray[np.float32]]
"""What clients kept under a name [M, …]; for those that have kept nothing yet, the value given, or zeros."""
Arrays = Mapping[str, npt.NDArray[Any]]
Heard = tuple[ClientStatistics, ...]
"""What a server of statistics has heard: one total, or, where every client's rows are kept, one entry per reply."""


@dataclass(frozen=True)
class TaskSetting:
    """What is known of one task."""

    name: str
    n_classes: int
    n_clients: int = 1
    n_examples: int = 1
    previous: LinearHead | None = None
    """The head that an earlier stage hands on."""
    module: Arrays | None = None
    """Values of the module that an earlier stage hands on; None where it is new."""


@dataclass(frozen=True)
class Setting:
    """What server and clients know before the first round."""

    n_classes: int
    dim: int
    seed: tuple[int, ...]
    """The run's seed and the number of the stage."""
    n_clients: int = 1
    n_examples: int = 1
    previous: LinearHead | None = None
    """The head that an earlier stage hands on."""
    backbone: Backbone | None = None
    """The body that an earlier stage hands on, or the pre-trained one; None where the data are features."""
    module: Attached | None = None
    """The module on the body that is to be trained."""
    tasks: tuple[TaskSetting, ...] = ()
    """Where there are several; the numbers above are those of all of them together."""
    moves: Literal["head", "body"] | None = None
    """Of what the plan trains, the part that really moves; the rest is loaded, each client's own, and stays."""

    @property
    def each(self) -> tuple[TaskSetting, ...]:
        """The tasks: one, or several."""
        one = TaskSetting("", self.n_classes, self.n_clients, self.n_examples, self.previous)
        return self.tasks or (one,)

    def alone(self, task: TaskSetting) -> Setting:
        """The setting of one of the tasks, as if it were the only one."""
        return replace(
            self,
            n_classes=task.n_classes,
            n_clients=task.n_clients,
            n_examples=task.n_examples,
            previous=task.previous,
            tasks=(),
        )


@dataclass(frozen=True, eq=False)
class Cohort:
    """Clients of one task that answer together: thousands in a simulation, one on a node of its own.

    source: features [N, d], or what a body that trains reads, of all clients and never copied; rows: [n] this cohort's
    examples, client after client; labels, owners: [n].
    """

    clients: Ints
    source: Features | Inputs
    rows: Ints
    labels: Ints
    owners: Ints
    new: npt.NDArray[np.bool_]
    """[M] the clients that answer for the first time in this stage, and have no features yet."""
    kept: Kept
    task: int = 0
    """The number of the task; labels are those of its own classes."""

    @property
    def features(self) -> Features:
        """Features [N, d], for methods that leave the body alone."""
        assert isinstance(self.source, np.ndarray)
        return self.source

    @property
    def inputs(self) -> Inputs:
        """Batches of examples, for methods that train the body."""
        assert not isinstance(self.source, np.ndarray)
        return self.source


@dataclass(frozen=True, eq=False)
class Reply:
    """What a cohort says, and what each of its clients [M] spends on saying it: bytes, examples through the body."""

    clients: Ints
    message: Message
    nbytes: Ints
    forward_passes: Ints
    kept: Mapping[str, npt.NDArray[np.float32]] = field(default_factory=dict)
    """What the client keeps to itself until its next round; it never travels."""
    task: int = 0


def weight_of(reply: Reply, weighting: str) -> float:
    """How much a client counts in a mean: by its examples, or as much as any other."""
    examples = reply.message.scalars.get("examples")
    if not isinstance(examples, int) or not 1 <= examples <= 10**12:
        raise MessageError(f"a client says that it has {examples} examples")
    return float(examples) if weighting == "examples" else 1.0


class Method(Protocol[State]):
    """A method of federated learning."""

    hears_once: bool
    """Whether a client is heard in one round only: what it says does not depend on what the server knows."""
    catches_up: bool
    """Whether what a client is sent depends on the last round that it took part in."""
    kept_shapes: Mapping[str, tuple[int, ...]]
    """What a client keeps to itself from one of its rounds to the next."""
    bytes_per_client: int
    """Memory that answering for one more client of a cohort takes, beyond its features."""
    personal: bool
    """Whether every client has a model of its own."""

    def open(self) -> State:
        """Server: what is known before round 1."""

    def instruct(self, state: State, round: int, since: int, task: int = 0) -> Message:
        """Server to a client of a task that took part in round ``since`` last, -1 for never."""

    def answer(self, cohort: Cohort, message: Message) -> list[Reply]:
        """On the clients. A cohort says what its clients would say one by one."""

    def fold(self, state: State, reply: Reply) -> State:
        """Server: fold a reply in; a reply that cannot be right raises `MessageError` and changes nothing."""

    def close(self, state: State) -> State:
        """Server: what it makes of the round, once all replies are folded in."""

    def refine(self, state: State, cohort: Cohort) -> State:
        """Server: train on the examples that clients have given it, where the stage asks for that."""

    def head(self, state: State, task: int = 0, own: Arrays | None = None) -> LinearHead:
        """The head of a task that the state amounts to, with what is a client's own."""

    def place(self, state: State, task: int = 0, own: Arrays | None = None) -> None:
        """Write the state, and what is a client's own, into the body; nothing to do where the body is left alone."""

    def own(self, kept: Kept, task: int = 0) -> Mapping[str, npt.NDArray[np.float32]]:
        """What is each client's own [M, …] by the name of the parameter, from what they kept."""

    def published(self, state: State, counts: Ints) -> Published:
        """The cost as the papers count it; counts: [K, C] examples by class of the clients that were heard."""

    def freeze(self, state: State) -> Message:
        """The state, for a checkpoint."""

    def thaw(self, message: Message) -> State:
        """The state from a checkpoint."""


class StatisticsMethod(ABC):
    """One pass over the client's features, statistics up, a closed-form head on the server.

    A subclass says which second moments it needs, whether the server adds the statistics up or keeps every client's
    rows, and what head they make.
    """

    hears_once = True
    catches_up = False
    kept_shapes: Mapping[str, tuple[int, ...]] = {}
    bytes_per_client = 0
    moments: Moments | None = None
    keeps_rows = False
    personal = False

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.transform: Transform | None = None
        self.dim = setting.dim

    @abstractmethod
    def solve(self, total: ClientStatistics) -> LinearHead:
        """Server: the head that everything heard so far makes."""

    @abstractmethod
    def published(self, state: Heard, counts: Ints) -> Published:
        """The papers' count."""

    def open(self) -> Heard:
        """Nothing heard yet."""
        return (ClientStatistics.empty(self.setting.n_classes, self.dim, self.moments),)

    def instruct(self, state: Heard, round: int, since: int, task: int = 0) -> Message:
        """The number of the round: all that a client has to know."""
        return Message(scalars={"round": round})

    def answer(self, cohort: Cohort, message: Message) -> list[Reply]:
        """Statistics of each client's classes, of all clients in one reply."""
        statistics, owners = summarise(
            cohort.features,
            cohort.labels,
            self.setting.n_classes,
            clients=cohort.owners,
            parts=self.parts(cohort),
            moments=self.moments,
            rows=cohort.rows,
            transform=self.transform,
        )
        rows = np.bincount(np.searchsorted(cohort.clients, owners), minlength=len(cohort.clients))
        sizes = np.bincount(np.searchsorted(cohort.clients, cohort.owners), minlength=len(cohort.clients))
        nbytes = np.array([message_nbytes(int(count), self.dim, self.moments) for count in rows])
        return [Reply(cohort.clients, statistics.to_message(), nbytes, sizes, task=cohort.task)]

    def parts(self, cohort: Cohort) -> Ints | None:
        """Random parts of a client's class, where each part is to speak for itself."""
        return None

    def fold(self, state: Heard, reply: Reply) -> Heard:
        """Add the statistics up, or put them beside the others."""
        heard = ClientStatistics.from_message(reply.message, self.setting.n_classes, self.dim, self.moments)
        return (*state, heard) if self.keeps_rows else (state[0].merge(heard).pooled(),)

    def close(self, state: Heard) -> Heard:
        """Nothing to do: the head is solved for when it is asked for."""
        return state

    def refine(self, state: Heard, cohort: Cohort) -> Heard:
        """Statistics are not trained."""
        return state

    def head(self, state: Heard, task: int = 0, own: Arrays | None = None) -> LinearHead:
        """The head."""
        return self.solve(state[0].merge(*state[1:]))

    def place(self, state: Heard, task: int = 0, own: Arrays | None = None) -> None:
        """The body is left alone."""
        return None

    def own(self, kept: Kept, task: int = 0) -> Mapping[str, npt.NDArray[np.float32]]:
        """Nothing."""
        return {}

    def freeze(self, state: Heard) -> Message:
        """Arrays of the state, at full precision."""
        total = state[0].merge(*state[1:])
        arrays = {"labels": total.labels, "counts": total.counts, "sums": total.sums}
        return Message(arrays if total.moments is None else arrays | {"moments": total.moments})

    def thaw(self, message: Message) -> Heard:
        """The state that `freeze` wrote."""
        return (ClientStatistics(self.setting.n_classes, **message.arrays),)  # type: ignore[arg-type]
