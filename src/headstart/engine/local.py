"""Clients in this process: no serialisation, nothing copied per client, many clients answered at once."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from headstart.channel.fixed import BITS, from_fixed, to_fixed
from headstart.config.stage import ClosedForm, Rounds
from headstart.core.ledger import Ledger
from headstart.core.message import Message
from headstart.core.statistics import Features, Ints
from headstart.data import Federation
from headstart.engine.rounds import AfterRound, Bools, Heard, Question, Summed, play_rounds, shared_examples
from headstart.engine.store import ClientStore
from headstart.methods import Method, Reply
from headstart.solvers.cohort import Cohort

if TYPE_CHECKING:  # closed-form methods do not wait for torch
    from headstart.backbones import Inputs

    Source = Features | Inputs

# Examples and bytes answered for at once: enough for full-speed matrix products, little enough to stay small in memory.
_COHORT_EXAMPLES = 16384
_COHORT_BYTES = 256 << 20


def play(
    method: Method[Any],
    stage: ClosedForm | Rounds,
    federation: Federation,
    source: Source,
    seed: tuple[int, ...],
    ledger: Ledger,
    store: ClientStore,
    after_round: AfterRound,
    state: Any = None,
    first_round: int = 0,
    handed_over: Ints | None = None,
) -> Any:
    """Play the rounds of a stage with clients in this process."""
    server = shared_examples(stage, federation, source, seed) if isinstance(stage, Rounds) and stage.share else None
    clients = LocalClients(method, federation, source, store)
    about = (seed, ledger, store, after_round, state, first_round, handed_over, server)
    return play_rounds(method, stage, federation, clients, *about)


@dataclass(frozen=True, eq=False)
class LocalClients:
    """The clients of a federation whose examples are all here.

    source: features, or what a body that trains reads; store: what the clients keep.
    """

    method: Method[Any]
    federation: Federation
    source: Source
    store: ClientStore

    def present(self) -> Bools:
        """Everybody."""
        return np.ones(self.federation.n_clients, np.bool_)

    def ask(self, question: Question) -> Iterator[Heard]:
        """Cohort by cohort. Where clients catch up, a cohort is told what the one that knows least has to be told."""
        for first, last, cohort in self._cohorts(question):
            asked, since = time.monotonic(), question.since[first:last]
            for reply in self.method.answer(cohort, question.messages[first + int(since.argmin())]):
                yield Heard(reply.clients, reply, (time.monotonic() - asked) / len(cohort.clients))

    def add_up(self, question: Question, threshold: int, shapes: Mapping[str, tuple[int, ...]]) -> Summed:
        """The same numbers as the protocol gives, client by client, without its keys and masks: nothing leaves here.

        Bytes are those of the masked values; what the protocol sends beside them is not counted.
        """
        total: dict[str, npt.NDArray[np.int64]] = {}
        count = len(question.clients)
        nbytes, passes = np.zeros(count, np.int64), np.zeros(count, np.int64)
        for place in range(count):
            (heard,) = self.ask(question.part(np.array([place])))
            assert heard.reply is not None
            values = to_fixed(self.method.summand(heard.reply, question.round), count, BITS)
            total = {name: total[name] + value if total else value for name, value in values.items()}
            nbytes[place] = Message(values).nbytes
            passes[place] = heard.reply.forward_passes[0]
            self.keep(heard.reply)
        found = {name: from_fixed(value, BITS) for name, value in total.items()}
        return Summed(question.clients, {}, found, nbytes, np.zeros(count, np.int64), passes, np.zeros(0, np.int64))

    def keep(self, reply: Reply) -> None:
        """Into the store."""
        if reply.kept:
            self.store.write(int(reply.clients[0]), reply.kept)

    def _cohorts(self, question: Question) -> Iterator[tuple[int, int, Cohort]]:
        """The clients in order, cut into cohorts of one task that fit into memory, with their places."""
        clients, sizes = question.clients, self.federation.sizes
        load = np.cumsum(sizes[clients] / _COHORT_EXAMPLES + self.method.bytes_per_client / _COHORT_BYTES)
        tasks = self.federation.tasks_of(clients)
        cuts = np.flatnonzero(np.diff(np.floor(load)) + np.diff(tasks)) + 1
        for first, last in zip([0, *cuts], [*cuts, len(clients)], strict=True):
            part = clients[first:last]
            rows, owners = self.federation.rows_of(part)
            task = int(tasks[first])
            labels = self.federation.dataset.train.labels[rows] - self.federation.class_starts[task]
            kept = partial(self.store.read, clients=part)
            yield first, last, Cohort(part, self.source, rows, labels, owners, question.new[first:last], kept, task)
