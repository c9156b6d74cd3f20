"""What a method is: a few verbs, free of transport and scheduling; and those that statistics methods share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import inf
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from headstart.channel.accounting import noise_multiplier
from headstart.channel.noise import Seed, StatisticsNoise, every_class, generators_of, present, solvable
from headstart.config.stage import Privacy
from headstart.core.ledger import Published
from headstart.core.message import Message
from headstart.core.statistics import (
    ClientStatistics,
    Features,
    Floats,
    Ints,
    Moments,
    Transform,
    message_nbytes,
    shorten,
    summarise,
    unpacked,
)
from headstart.errors import MessageError
from headstart.heads import LinearHead
from headstart.solvers.cohort import Cohort, Kept

if TYPE_CHECKING:  # closed-form methods do not wait for torch
    from headstart.backbones import Backbone
    from headstart.modules import Attached

State = TypeVar("State")
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
    noise: Seed = ()
    """What noise is drawn from beside the seed: nothing in a simulation, a secret on the server of a deployment. None,
    on its nodes: the operating system's generator alone."""

    @property
    def noise_seed(self) -> Seed:
        """What noise that hides somebody is drawn from."""
        return None if self.noise is None else (*self.noise, *self.seed)

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
    examples = whole_number(reply, "examples", 10**12)
    return float(examples) if weighting == "examples" else 1.0


def whole_number(reply: Reply, name: str, largest: int) -> int:
    """A scalar of a reply that counts something, from 1 on."""
    value = reply.message.scalars.get(name)
    if type(value) is not int or not 1 <= value <= largest:  # True is an int, too
        raise MessageError(f"a client says {name} = {value!r:.40}; a whole number from 1 to {largest} was expected")
    return value


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

    def summand(self, reply: Reply, round: int) -> Mapping[str, Floats]:
        """On a client: its reply as what can be added up, in arrays of the same names and shapes as any other's."""

    def summands(self, state: State) -> Mapping[str, tuple[int, ...]]:
        """Names and shapes of what clients add."""

    def fold_sum(self, state: State, values: Mapping[str, Floats]) -> State:
        """Server: fold in the sum of what several clients added."""

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

    def show(self, state: State, task: int = 0) -> Message:
        """Server: the model of a task as it is now, for a client that tests it on its own examples."""

    def shown(self, message: Message, task: int = 0, own: Arrays | None = None) -> LinearHead:
        """On a client: write a model that the server shows, and what is the client's own, into the body; its head."""

    def published(self, state: State, counts: Ints) -> Published:
        """The cost as the papers count it; counts: [K, C] examples by class of the clients that were heard."""

    def spent(self, state: State) -> dict[str, Any] | None:
        """What has been spent of the privacy budget so far, and by what noise; None without privacy."""

    def freeze(self, state: State) -> Message:
        """The state, for a checkpoint."""

    def thaw(self, message: Message) -> State:
        """The state from a checkpoint."""


class StatisticsMethod(ABC):
    """One pass over the client's features, statistics up, a closed-form head on the server.

    A subclass says which second moments it needs, whether the server adds the statistics up or keeps every client's
    rows, and what head they make.

    With privacy, clients shorten the vectors they sum and speak of every class. Where they add the noise themselves,
    the server takes it as it comes. Where the server adds it, it does so when it solves, and draws the same noise for
    the whole stage: solving again for the same statistics shows nothing new. Solving after each of several rounds
    would: the totals of two rounds, under the same noise, differ by exact sums. A recipe with noise on totals therefore
    hears everybody in one round. Noise on rows stays with its row, and rounds may be as many as there are clients.
    """

    hears_once = True
    catches_up = False
    kept_shapes: Mapping[str, tuple[int, ...]] = {}
    moments: Moments | None = None
    keeps_rows = False
    personal = False
    longest = inf
    """No vector that is summed is longer, whatever the features."""
    means_per_client = 1
    """Rows that a client may send of a class."""

    def __init__(self, setting: Setting, privacy: Privacy | None = None) -> None:
        self.setting = setting
        self.privacy = privacy
        self.noise_seed = setting.noise_seed
        self.task = 0
        """The number of the task among several, no two of which have the same noise."""
        self.transform: Transform | None = None
        self.dim = setting.dim
        self._solved: tuple[Heard, LinearHead] | None = None

    @property
    def by_row(self) -> bool:
        """Whether the head depends on every client's rows, and not on their sums alone."""
        return self.keeps_rows

    @property
    def bytes_per_client(self) -> int:
        """A row for every class, and room to add noise to it, where there is privacy."""
        return 0 if self.privacy is None else 4 * 8 * self.setting.n_classes * (self.dim + 1)

    @cached_property
    def noise(self) -> StatisticsNoise | None:
        """The noise that the stage's privacy asks for. A client is heard once: there is one release."""
        if self.privacy is None:
            return None
        multiplier = noise_multiplier(self.privacy.epsilon, self.privacy.delta)
        return StatisticsNoise(multiplier, min(self.privacy.clip, self.longest), self.moments)

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
            transform=self.transform if self.noise is None else self._shortened,
        )
        statistics, owners = self.said(statistics, owners, cohort)
        rows = np.bincount(np.searchsorted(cohort.clients, owners), minlength=len(cohort.clients))
        sizes = np.bincount(np.searchsorted(cohort.clients, cohort.owners), minlength=len(cohort.clients))
        nbytes = np.array([message_nbytes(int(count), self.dim, self.moments) for count in rows])
        if self.privacy is not None and self.privacy.noise == "client":  # their number is not to be known
            sizes = np.zeros_like(sizes)
        return [Reply(cohort.clients, statistics.to_message(), nbytes, sizes, task=cohort.task)]

    def said(self, statistics: ClientStatistics, owners: Ints, cohort: Cohort) -> tuple[ClientStatistics, Ints]:
        """What clients say of their statistics, and the client [R] behind each row: with privacy, of every class."""
        if self.privacy is None or self.noise is None:
            return statistics, owners
        statistics = every_class(statistics, owners, cohort.clients)
        owners = np.repeat(cohort.clients, self.setting.n_classes)
        if self.privacy.noise == "server":
            return statistics, owners
        statistics = self.noise.add(statistics, generators_of(self.noise_seed, self.task, cohort.clients))
        if not self.by_row:  # leaving rows out would bias the sums
            return statistics, owners
        statistics, kept = present(statistics)
        return statistics, owners[kept]

    def _shortened(self, features: Features) -> Features:
        assert self.noise is not None
        return shorten(features if self.transform is None else self.transform(features), self.noise.bound)

    def parts(self, cohort: Cohort) -> Ints | None:
        """Random parts of a client's class, where each part is to speak for itself."""
        return None

    def fold(self, state: Heard, reply: Reply) -> Heard:
        """Add the statistics up, or put them beside the others; those that no features have are refused."""
        noisy = self.privacy is not None and self.privacy.noise == "client"
        heard = ClientStatistics.from_message(
            reply.message,
            self.setting.n_classes,
            self.dim,
            self.moments,
            every_class=self.privacy is not None and not (self.by_row and noisy),
            noisy=noisy,
            rows_per_class=self.means_per_client * len(reply.clients),
            longest=inf if self.noise is None else self.noise.bound,
        )
        return (*state, heard) if self.keeps_rows else (state[0].merge(heard).pooled(),)

    def summand(self, reply: Reply, round: int) -> dict[str, Floats]:
        """Counts and sums of every class, present or not, and the second moments."""
        heard = self.fold(self.open(), reply)
        return self.dense(heard[0].merge(*heard[1:]).pooled())

    def dense(self, total: ClientStatistics) -> dict[str, Floats]:
        """Statistics of pooled classes with zeros for those that are not there."""
        counts, sums = np.zeros(self.setting.n_classes), np.zeros((self.setting.n_classes, self.dim))
        counts[total.labels], sums[total.labels] = total.counts, total.sums
        moments = total.moments
        if moments is not None and moments.ndim == 2:
            moments = moments[np.triu_indices(self.dim)]
        return {"counts": counts, "sums": sums} | ({} if moments is None else {"moments": moments})

    def summands(self, state: Heard) -> dict[str, tuple[int, ...]]:
        """Those of somebody who has nothing."""
        return {name: values.shape for name, values in self.dense(self.open()[0]).items()}

    def fold_sum(self, state: Heard, values: Mapping[str, Floats]) -> Heard:
        """As the statistics of one client that has everybody's examples."""
        counts = np.rint(values["counts"]).astype(np.int64)
        labels = np.arange(len(counts)) if self.privacy else np.flatnonzero(counts > 0)
        sums, moments = values["sums"][labels], values.get("moments")
        if moments is not None and self.moments == "full":
            moments = unpacked(moments, self.dim)
        heard = ClientStatistics(self.setting.n_classes, labels, counts[labels], sums, moments)
        return (*state, heard) if self.keeps_rows else (state[0].merge(heard).pooled(),)

    def close(self, state: Heard) -> Heard:
        """Nothing to do: the head is solved for when it is asked for."""
        return state

    def refine(self, state: Heard, cohort: Cohort) -> Heard:
        """Statistics are not trained."""
        return state

    def head(self, state: Heard, task: int = 0, own: Arrays | None = None) -> LinearHead:
        """The head; of the same state it is solved for once."""
        if self._solved is None or self._solved[0] is not state:
            self._solved = state, self.solve(self._usable(state[0].merge(*state[1:])))
        return self._solved[1]

    def _usable(self, total: ClientStatistics) -> ClientStatistics:
        """What the server solves with: with privacy, noisy statistics that are possible ones."""
        if self.privacy is None or self.noise is None:
            return total
        total = total if self.by_row else total.pooled()
        if self.privacy.noise == "server":
            total = self.noise.add(total, generators_of(self.noise_seed, self.task))
        noises = 1 if self.privacy.noise == "server" else self.setting.n_clients
        return solvable(total, self.noise.floor(self.dim, noises))

    def place(self, state: Heard, task: int = 0, own: Arrays | None = None) -> None:
        """The body is left alone."""
        return None

    def own(self, kept: Kept, task: int = 0) -> Mapping[str, npt.NDArray[np.float32]]:
        """Nothing."""
        return {}

    def show(self, state: Heard, task: int = 0) -> Message:
        """The head."""
        return Message(self.head(state, task).arrays())

    def shown(self, message: Message, task: int = 0, own: Arrays | None = None) -> LinearHead:
        """The head that the server shows."""
        return LinearHead.of_arrays({name: array.astype(np.float32) for name, array in message.arrays.items()})

    def spent(self, state: Heard) -> dict[str, Any] | None:
        """Everything, once anybody is heard: examples of one client are hidden apart from those of another."""
        if self.privacy is None or self.noise is None:
            return None
        return {
            "epsilon": self.privacy.epsilon if any(len(heard.labels) for heard in state) else 0.0,
            "delta": self.privacy.delta,
            "unit": "example",
            "noise": self.privacy.noise,
            "noise_multiplier": self.noise.multiplier,
            "clip": self.noise.bound,
        }

    def freeze(self, state: Heard) -> Message:
        """Arrays of the state, at full precision."""
        total = state[0].merge(*state[1:])
        arrays = {"labels": total.labels, "counts": total.counts, "sums": total.sums}
        return Message(arrays if total.moments is None else arrays | {"moments": total.moments})

    def thaw(self, message: Message) -> Heard:
        """The state that `freeze` wrote."""
        return (ClientStatistics(self.setting.n_classes, **message.arrays),)  # type: ignore[arg-type]
