"""Rounds in this process: no serialisation, nothing copied per client, many clients answered at once."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from headstart.data import Federation
from headstart.engine.rules import check_enough, check_on_time
from headstart.engine.store import ClientStore
from headstart.errors import MessageError
from headstart.ledger import Ledger
from headstart.methods import Cohort, Method
from headstart.progress import progress
from headstart.recipe import ClosedForm, Rounds
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
    handed_over: int = 0,
) -> Any:
    """Play the rounds of a stage from ``first_round`` on; a client whose message is refused is left out.

    source: features, or what a body that trains reads; handed_over: bytes of earlier stages' work that a client needs
    before its first answer.
    """
    state = method.open() if state is None else state
    rounds, per_round = rounds_of(stage, federation.n_clients)
    with progress(f"{stage.method}: clients heard", rounds * per_round, first_round * per_round) as advance:
        for number in range(first_round, rounds):
            sampled = _sample(method, seed, number, per_round, federation.n_clients)
            message = method.instruct(state, number, int(ledger.last_round[sampled].min()))
            sent = {-1: message.nbytes}
            if method.catches_up:
                sent = {n: method.instruct(state, number, n).nbytes for n in map(int, set(ledger.last_round[sampled]))}
            good, last_refusal = 0, ""
            for cohort in _cohorts(method, federation, source, ledger, store, sampled):
                if not stage.pools:
                    since = ledger.last_round[cohort.clients] if method.catches_up else [-1] * len(cohort.clients)
                    ledger.bytes_down[cohort.clients] += [sent[int(n)] for n in since] + handed_over * cohort.new
                ledger.last_round[cohort.clients] = number
                asked = time.monotonic()
                for reply in method.answer(cohort, message):
                    ledger.bytes_up[reply.clients] += 0 if stage.pools else reply.nbytes
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
            store.commit()
            ledger.tick()
            after_round(number, state)
    return state


def _sample(method: Method[Any], seed: tuple[int, ...], number: int, per_round: int, n_clients: int) -> Ints:
    """Clients of a round, without replacement; where a client is heard once, those that were not heard before."""
    key = [*seed, 0x0DE] if method.hears_once else [*seed, 0x0DE, number]
    order = np.random.default_rng(key).permutation(n_clients)
    start = number * per_round if method.hears_once else 0
    return np.sort(order[start : start + per_round])


def _cohorts(
    method: Method[Any], federation: Federation, source: Source, ledger: Ledger, store: ClientStore, clients: Ints
) -> Iterator[Cohort]:
    """The clients in order, cut into cohorts that fit into memory."""
    load = federation.sizes[clients] / _COHORT_EXAMPLES + method.bytes_per_client / _COHORT_BYTES
    for part in np.split(clients, np.flatnonzero(np.diff(np.floor(np.cumsum(load)))) + 1):
        rows, owners = federation.rows_of(part)
        labels = federation.dataset.train.labels[rows]
        new = ledger.last_round[part] < 0
        yield Cohort(part, source, rows, labels, owners, new, partial(store.read, clients=part))
