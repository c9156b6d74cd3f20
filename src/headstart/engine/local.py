"""Rounds in this process: no serialisation, nothing copied per client, many clients answered at once."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from headstart.data import Federation
from headstart.engine.rules import check_enough, check_on_time
from headstart.engine.store import ClientStore
from headstart.errors import MessageError
from headstart.ledger import Ledger
from headstart.methods import Cohort, Method
from headstart.progress import progress
from headstart.stages import ClosedForm, Rounds
from headstart.statistics import Features, Ints

if TYPE_CHECKING:  # closed-form methods do not wait for torch
    from headstart.backbones import Inputs

    Source = Features | Inputs

# Examples and bytes answered for at once: enough for full-speed matrix products, little enough to stay small in memory.
_COHORT_EXAMPLES = 16384
_COHORT_BYTES = 256 << 20


AfterRound = Callable[[int, Any], None]
"""Called when a round is over, with its number from 0 and the server's state."""


def rounds_of(stage: ClosedForm | Rounds, n_clients: int) -> tuple[int, int]:
    """Number of rounds and clients in each: everybody, unless the stage samples."""
    per_round = stage.sampled(n_clients)
    if not isinstance(stage, ClosedForm):
        return stage.rounds, per_round
    every = -(-n_clients // per_round)
    return (every if stage.rounds is None else min(stage.rounds, every)), per_round


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
    handed_over: Sequence[int] | None = None,
) -> Any:
    """Play the rounds of a stage from ``first_round`` on; a client whose message is refused is left out.

    source: features, or what a body that trains reads; handed_over: [T] bytes of earlier stages' work that a client of
    each task needs before its first answer.
    """
    handed_over = handed_over or [0] * len(federation.tasks)
    state = method.open() if state is None else state
    rounds, per_round = rounds_of(stage, federation.n_clients)
    server = _shared(stage, federation, source, seed) if isinstance(stage, Rounds) and stage.share else None
    with progress(f"{stage.method}: clients heard", rounds * per_round, first_round * per_round) as advance:
        for number in range(first_round, rounds):
            sampled = _sample(method, stage, seed, number, per_round, federation)
            # One message for the clients of a task, or, where clients catch up, for each round they were in last.
            since = ledger.last_round[sampled] if method.catches_up else np.full(len(sampled), -1)
            kinds = set(zip(federation.tasks_of(sampled).tolist(), since.tolist(), strict=True))
            messages = {kind: method.instruct(state, number, kind[1], kind[0]) for kind in sorted(kinds)}
            good, last_refusal = 0, ""
            for cohort in _cohorts(method, federation, source, ledger, store, sampled):
                since = ledger.last_round[cohort.clients] if method.catches_up else np.full(len(cohort.clients), -1)
                heard = [messages[cohort.task, int(last)] for last in since]
                if not stage.silent:
                    ledger.bytes_down[cohort.clients] += [message.nbytes for message in heard]
                if not stage.pools:
                    ledger.bytes_down[cohort.clients] += handed_over[cohort.task] * cohort.new
                ledger.last_round[cohort.clients] = number
                asked = time.monotonic()
                for reply in method.answer(cohort, heard[int(since.argmin())]):
                    ledger.bytes_up[reply.clients] += 0 if stage.silent else reply.nbytes
                    ledger.forward_passes[reply.clients] += reply.forward_passes
                    try:
                        check_on_time(stage, (time.monotonic() - asked) / len(cohort.clients))
                        state = method.fold(state, reply)
                    except MessageError as error:
                        last_refusal = str(error)
                        names = ", ".join(federation.names[client] for client in reply.clients)
                        ledger.dropped.append({"round": number + 1, "clients": names, "why": last_refusal})
                        continue
                    good += len(reply.clients)
                    if reply.kept:
                        store.write(int(reply.clients[0]), reply.kept)
                advance(len(cohort.clients))
            check_enough(stage, number + 1, good, len(sampled), last_refusal)
            state = method.close(state)
            if server is not None:
                state = method.refine(state, server)
            store.commit()
            ledger.tick()
            after_round(number, state)
    return state


def _sample(
    method: Method[Any],
    stage: ClosedForm | Rounds,
    seed: tuple[int, ...],
    number: int,
    per_round: int,
    federation: Federation,
) -> Ints:
    """Clients of a round, without replacement; where a client is heard once, those that were not heard before."""
    key = [*seed, 0x0DE] if method.hears_once else [*seed, 0x0DE, number]
    if getattr(stage, "sampling", "clients") == "clients":
        order = np.random.default_rng(key).permutation(federation.n_clients)
    else:  # from each task in turn; whom a task sends does not depend on the other tasks
        ranks, turns, clients = [], [], []
        for task in range(len(federation.tasks)):
            mine = federation.clients_of(task)
            count = mine.stop - mine.start
            clients.append(mine.start + np.random.default_rng([*key, task]).permutation(count))
            ranks.append(np.arange(count))
            turns.append(np.full(count, task if method.hears_once else (task - number) % len(federation.tasks)))
        order = np.concatenate(clients)[np.lexsort((np.concatenate(turns), np.concatenate(ranks)))]
    start = number * per_round if method.hears_once else 0
    return np.sort(order[start : start + per_round])


def _shared(stage: Rounds, federation: Federation, source: Source, seed: tuple[int, ...]) -> Cohort:
    """What clients have given to the server: a share of each one's examples, at least one, as those of one client."""
    rng = np.random.default_rng([*seed, 0x5A4E])
    given = []
    for client in range(federation.n_clients):
        rows, _ = federation.rows_of(np.array([client]))
        given.append(rng.permutation(rows)[: max(1, round(stage.share * len(rows)))])
    rows = np.sort(np.concatenate(given))
    server = np.array([federation.n_clients])
    owners, labels = np.repeat(server, len(rows)), federation.dataset.train.labels[rows]

    def nothing(name: str, start: npt.NDArray[np.float32] | None) -> npt.NDArray[np.float32]:
        raise AssertionError("a server keeps nothing as a client does")

    return Cohort(server, source, rows, labels, owners, np.array([False]), nothing)


def _cohorts(
    method: Method[Any], federation: Federation, source: Source, ledger: Ledger, store: ClientStore, clients: Ints
) -> Iterator[Cohort]:
    """The clients in order, cut into cohorts of one task that fit into memory."""
    load = np.cumsum(federation.sizes[clients] / _COHORT_EXAMPLES + method.bytes_per_client / _COHORT_BYTES)
    tasks = federation.tasks_of(clients)
    for part in np.split(clients, np.flatnonzero(np.diff(np.floor(load)) + np.diff(tasks)) + 1):
        rows, owners = federation.rows_of(part)
        task = int(federation.tasks_of(part[:1])[0])
        labels = federation.dataset.train.labels[rows] - federation.class_starts[task]
        new = ledger.last_round[part] < 0
        yield Cohort(part, source, rows, labels, owners, new, partial(store.read, clients=part), task)
