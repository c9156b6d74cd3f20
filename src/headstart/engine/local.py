"""Rounds in this process: no serialisation, nothing copied per client, many clients answered at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from headstart.data import Federation
from headstart.engine.store import Arrays, ClientStore, gather
from headstart.errors import HeadstartError, MessageError
from headstart.ledger import Ledger
from headstart.methods import Cohort, Method, Reply
from headstart.progress import progress
from headstart.recipe import ClosedForm, Training
from headstart.statistics import Features, Ints

# Examples and bytes answered for at once: enough for full-speed matrix products, little enough to stay small in memory.
_COHORT_EXAMPLES = 16384
_COHORT_BYTES = 256 << 20


@dataclass(frozen=True, eq=False)
class Finished:
    """A round that is over: its number from 0, the server's state, and what clients are about to keep."""

    number: int
    state: Any
    clients: Ints
    kept: Arrays


AfterRound = Callable[[Finished], None]


def rounds_of(stage: ClosedForm | Training, n_clients: int) -> tuple[int, int]:
    """Number of rounds and clients in each: everybody, unless the stage samples."""
    per_round = n_clients
    if stage.clients_per_round is not None:
        per_round = min(stage.clients_per_round, n_clients)
    elif stage.participation is not None:
        per_round = max(1, round(stage.participation * n_clients))
    if not isinstance(stage, ClosedForm):
        return stage.rounds, per_round
    every = -(-n_clients // per_round)
    return (every if stage.rounds is None else min(stage.rounds, every)), per_round


def play(
    method: Method[Any],
    stage: ClosedForm | Training,
    federation: Federation,
    features: Features,
    seed: tuple[int, ...],
    ledger: Ledger,
    store: ClientStore,
    after_round: AfterRound,
    state: Any = None,
    first_round: int = 0,
) -> Any:
    """Play the rounds of a stage from ``first_round`` on; a client whose message is refused is left out."""
    state = method.open() if state is None else state
    rounds, per_round = rounds_of(stage, federation.n_clients)
    with progress(f"{stage.method}: clients heard", rounds * per_round, first_round * per_round) as advance:
        for number in range(first_round, rounds):
            message = method.instruct(state, number)
            heard: list[Reply] = []
            sampled = _sample(method, seed, number, per_round, federation.n_clients)
            for cohort in _cohorts(method, federation, features, ledger, store, sampled):
                ledger.bytes_down[cohort.clients] += message.nbytes
                for reply in method.answer(cohort, message):
                    ledger.bytes_up[reply.clients] += reply.nbytes
                    ledger.forward_passes[reply.clients] += reply.forward_passes
                    try:
                        state = method.fold(state, reply)
                        heard.append(reply)
                    except MessageError as error:
                        names = ", ".join(federation.names[client] for client in reply.clients)
                        ledger.dropped.append({"round": number + 1, "clients": names, "why": str(error)})
                advance(len(cohort.clients))
            good = sum(len(reply.clients) for reply in heard)
            if good < min(stage.min_replies, len(sampled)):
                last = f"; the last refusal: {ledger.dropped[-1]['why']}" if ledger.dropped else ""
                raise HeadstartError(
                    f"{stage.method}, round {number + 1}: {good} of {len(sampled)} clients gave a usable answer, "
                    f"min_replies = {stage.min_replies}{last}"
                )
            state = method.close(state)
            ledger.tick()
            clients, kept = gather(heard)
            after_round(Finished(number, state, clients, kept))
            store.write(clients, kept)
    return state


def _sample(method: Method[Any], seed: tuple[int, ...], number: int, per_round: int, n_clients: int) -> Ints:
    """Clients of a round, without replacement; where a client is heard once, those that were not heard before."""
    key = [*seed, 0x0DE] if method.hears_once else [*seed, 0x0DE, number]
    order = np.random.default_rng(key).permutation(n_clients)
    start = number * per_round if method.hears_once else 0
    return np.sort(order[start : start + per_round])


def _cohorts(
    method: Method[Any], federation: Federation, features: Features, ledger: Ledger, store: ClientStore, clients: Ints
) -> Iterator[Cohort]:
    """The clients in order, cut into cohorts that fit into memory."""
    load = federation.sizes[clients] / _COHORT_EXAMPLES + method.bytes_per_client / _COHORT_BYTES
    for part in np.split(clients, np.flatnonzero(np.diff(np.floor(np.cumsum(load)))) + 1):
        rows, owners = federation.rows_of(part)
        labels = federation.dataset.train.labels[rows]
        new = ledger.forward_passes[part] == 0
        yield Cohort(part, features, rows, labels, owners, new, partial(store.read, clients=part))
