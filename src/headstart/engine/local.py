"""Clients in this process: no serialisation, nothing copied per client, many clients answered at once."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from tempfile import SpooledTemporaryFile
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from headstart.channel.fixed import check_values, exponents_of, from_fixed, largest_exponents, to_fixed
from headstart.core.message import Message
from headstart.core.reply import AnyReply, ClientState, Failure, GroupReply, Reply
from headstart.core.statistics import Features
from headstart.data import Federation
from headstart.engine.client import ClientRuntime
from headstart.engine.client_states import ClientStates
from headstart.engine.clock import Clock
from headstart.engine.server import Bools, Request
from headstart.engine.workers import Workers, worker_count
from headstart.errors import HeadstartError
from headstart.solvers.cohort import Cohort

if TYPE_CHECKING:  # closed-form methods do not wait for torch
    from headstart.backbones import Inputs

    Source = Features | Inputs

# Examples and bytes answered for at once: enough for full-speed matrix products, little enough to stay small in memory,
# which is used again for the next cohort.
_COHORT_EXAMPLES = 16384
_COHORT_BYTES = 64 << 20


@dataclass(frozen=True, eq=False)
class LocalClients:
    """The clients of a federation whose examples are all here.

    source: features, or what a backbone that trains reads; states: what stays with the clients.
    """

    runtime: ClientRuntime
    federation: Federation
    source: Source
    states: ClientStates
    clock: Clock | None = None
    """Where clients cannot be asked at any time."""

    def available(self) -> Bools:
        """All clients, or those that can be asked at the simulated time; where that is nobody, time passes."""
        everybody = np.ones(self.federation.n_clients, np.bool_)
        if self.clock is None:
            return everybody
        self.clock.wait(everybody)
        return self.clock.available()

    def absences(self) -> Mapping[int, str]:
        """No client is absent."""
        return {}

    def send(self, request: Request) -> Iterator[AnyReply]:
        """Replies cohort by cohort, or the sum of all of them."""
        if not request.threshold:
            yield from self._replies(request)
            return
        try:
            yield self._aggregate(request)
        except HeadstartError as error:
            yield Failure(request.clients, str(error))

    def _replies(self, request: Request) -> Iterator[Reply]:
        """Client after client or, where workers are asked for and a backbone trains, several at once."""
        method, clients = self.runtime.method, len(request.clients)
        alone = isinstance(self.source, np.ndarray) or method.replays or method.folds  # what they share changes
        if alone or clients == 1 or worker_count() == 1:
            yield from self._answers(request)
            return
        jobs = [request.part(np.array([place])) for place in range(clients)]
        slots = self.states.slots[request.clients].tolist()
        if method.measures:  # workers go by what the process finds that they are forked from
            yield from self._answers(jobs.pop(0))
            slots.pop(0)
        for replies in self._workers.map(list(zip(jobs, slots, strict=True))):
            yield from replies

    @cached_property
    def _workers(self) -> Workers:
        return Workers(self, worker_count())

    def prepare_worker(self) -> None:
        """In a worker, once: nothing is written where another process writes."""
        self.source.own_states()  # type: ignore[union-attr]

    def work(self, job: tuple[Request, int]) -> list[Reply]:
        """In a worker: the reply of one client, whose state is in a slot of the files that all processes read."""
        request, slot = job
        self.states.slots[request.clients] = slot
        return list(self._answers(request))

    def _answers(self, request: Request) -> Iterator[Reply]:
        """Where clients catch up with a log, a cohort is sent what the client that knows least needs."""
        for first, last, cohort in self._cohorts(request):
            began, since = time.monotonic(), request.since[first:last]
            for reply in self.runtime.answer(cohort, request.messages[first + int(since.argmin())]):
                yield replace(reply, seconds=(time.monotonic() - began) / len(cohort.clients))

    def _aggregate(self, request: Request) -> GroupReply:
        """The same numbers as the protocol gives, client by client, without its keys and masks: nothing leaves here.

        Bytes are those of the masked values; what the protocol sends beside them is not counted.
        """
        count, exponents, states = len(request.clients), dict[str, int](), dict[int, ClientState]()
        shared = self.runtime.channel.shared
        nbytes, passes = np.zeros(count, np.int64), np.zeros(count, np.int64)
        with SpooledTemporaryFile(_COHORT_BYTES) as kept:  # the scale is known when all have replied
            for place, client in enumerate(request.clients.tolist()):
                (reply,) = self._replies(request.part(np.array([place])))
                vector = self.runtime.vector(reply, request.messages[place])
                values = Message(vector)
                if shared is not None:  # no client drops out here, so that nothing has to be removed
                    values = Message(shared.noised(vector, client, request.round, count, count))
                check_values(values.arrays, count)
                exponents = largest_exponents([exponents, exponents_of(values.arrays)])
                nbytes[place], passes[place] = kept.write(values.to_bytes()), reply.forward_passes[0]
                states[client] = reply.state
            kept.seek(0)
            total: dict[str, npt.NDArray[np.int64]] = {}
            for size in nbytes.tolist():
                fixed = to_fixed(Message.from_bytes(kept.read(size)).arrays, exponents, count)
                total = {name: total[name] + value if total else value for name, value in fixed.items()}
        found, none = from_fixed(total, exponents, count), np.zeros(count, np.int64)
        return GroupReply(request.clients, request.clients, found, nbytes, none, passes, states)

    def commit(self, reply: AnyReply) -> None:
        """Into the files of the states."""
        states = reply.state if isinstance(reply, GroupReply) else {int(reply.clients[0]): getattr(reply, "state", {})}
        for client, state in states.items():
            self.states.write(client, state)

    def _cohorts(self, request: Request) -> Iterator[tuple[int, int, Cohort]]:
        """The clients in order, cut into cohorts of one task that fit into memory, with their places."""
        clients, sizes = request.clients, self.federation.sizes
        memory = self.runtime.memory_per_client
        load = np.cumsum(sizes[clients] / _COHORT_EXAMPLES + memory / _COHORT_BYTES)
        tasks = self.federation.tasks_of(clients)
        cuts = np.flatnonzero(np.diff(np.floor(load)) + np.diff(tasks)) + 1
        for first, last in zip([0, *cuts], [*cuts, len(clients)], strict=True):
            part = clients[first:last]
            rows, owners = self.federation.rows_of(part)
            task = int(tasks[first])
            train = self.federation.dataset.train
            labels = train.labels[rows] - self.federation.class_starts[task]
            read, new = partial(self.states.read, clients=part), request.new[first:last]
            cohort = Cohort(part, self.source, rows, labels, owners, new, read, task, targets=train.targets)
            yield first, last, cohort


def shared_examples(share: float, federation: Federation, source: Source, seed: tuple[int, ...]) -> Cohort:
    """What clients have given to the server: a share of each one's examples, at least one, as those of one client."""
    rng = np.random.default_rng([0x5A4E, *seed])
    given = []
    for client in range(federation.n_clients):
        rows, _ = federation.rows_of(np.array([client]))
        given.append(rng.permutation(rows)[: max(1, round(share * len(rows)))])
    rows = np.sort(np.concatenate(given))
    server = np.array([federation.n_clients])
    owners, labels = np.repeat(server, len(rows)), federation.dataset.train.labels[rows]

    def nothing(name: str, start: npt.NDArray[np.float32] | None) -> npt.NDArray[np.float32]:
        raise AssertionError("nothing stays with a server as it does with a client")

    return Cohort(server, source, rows, labels, owners, np.array([False]), nothing)
