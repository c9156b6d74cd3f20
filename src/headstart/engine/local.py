"""Rounds in this process: no serialisation, nothing copied per client, many clients answered at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from headstart.data import Federation
from headstart.errors import HeadstartError, MessageError
from headstart.ledger import Ledger
from headstart.methods import Cohort, Method
from headstart.progress import progress
from headstart.recipe import Stage
from headstart.statistics import Features, Ints

# Examples answered for at once: enough for full-speed matrix products, little enough to stay small in memory.
_COHORT_EXAMPLES = 16384

AfterRound = Callable[[int, Any], None]


def rounds_of(stage: Stage, n_clients: int) -> tuple[int, int]:
    """Number of rounds and clients in each: by default everybody is heard once."""
    per_round = n_clients
    if stage.clients_per_round is not None:
        per_round = min(stage.clients_per_round, n_clients)
    elif stage.participation is not None:
        per_round = max(1, round(stage.participation * n_clients))
    every = -(-n_clients // per_round)
    return (every if stage.rounds is None else min(stage.rounds, every)), per_round


def play(
    method: Method[Any],
    stage: Stage,
    federation: Federation,
    features: Features,
    seed: tuple[int, ...],
    ledger: Ledger,
    after_round: AfterRound,
    state: Any = None,
    first_round: int = 0,
) -> Any:
    """Play the rounds of a stage from ``first_round`` on; a client whose message is refused is left out."""
    state = method.open() if state is None else state
    rounds, per_round = rounds_of(stage, federation.n_clients)
    # Statistics do not change from one round to the next: each round hears clients that were not heard before.
    order = np.random.default_rng([*seed, 0x0DE]).permutation(federation.n_clients)
    heard = min(first_round * per_round, federation.n_clients)
    with progress(f"{stage.method}: clients heard", federation.n_clients, heard) as advance:
        for number in range(first_round, rounds):
            message = method.instruct(state, number)
            good = 0
            for cohort in _cohorts(federation, features, np.sort(order[number * per_round : (number + 1) * per_round])):
                ledger.bytes_down[cohort.clients] += message.nbytes
                reply = method.answer(cohort, message)
                ledger.bytes_up[reply.clients] += reply.nbytes
                ledger.forward_passes[reply.clients] += reply.forward_passes
                try:
                    state = method.fold(state, reply)
                    good += len(reply.clients)
                except MessageError as error:
                    names = ", ".join(federation.names[client] for client in reply.clients)
                    ledger.dropped.append({"round": number + 1, "clients": names, "why": str(error)})
                advance(len(reply.clients))
            if number == 0 and not good:
                raise HeadstartError(f"no client gave a usable answer: {ledger.dropped[-1]['why']}")
            ledger.tick()
            after_round(number, state)
    return state


def _cohorts(federation: Federation, features: Features, clients: Ints) -> Iterator[Cohort]:
    """The clients in order, cut into cohorts of about so many examples."""
    sizes = np.cumsum(federation.sizes[clients])
    for part in np.split(clients, np.flatnonzero(np.diff(sizes // _COHORT_EXAMPLES)) + 1):
        rows, owners = federation.rows_of(part)
        yield Cohort(part, features, rows, federation.dataset.train.labels[rows], owners)
