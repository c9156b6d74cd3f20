"""The rounds of a stage, whoever the clients are: who is asked, what is sent, what counts, what it costs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from headstart.config.stage import ClosedForm, PersonaliseStage, Rounds
from headstart.core.ledger import Ledger
from headstart.core.message import Message
from headstart.core.progress import progress
from headstart.core.statistics import Features, Floats, Ints
from headstart.data import Federation
from headstart.engine.rules import check_enough, check_on_time
from headstart.engine.store import ClientStore
from headstart.errors import HeadstartError, MessageError
from headstart.methods import Method, Reply
from headstart.solvers.cohort import Cohort

if TYPE_CHECKING:  # closed-form methods do not wait for torch
    from headstart.backbones import Inputs

    Source = Features | Inputs

# A sum of fewer tells too much of each: of two, either knows the other's part.
SMALLEST_SUM = 3

Bools = npt.NDArray[np.bool_]

AfterRound = Callable[[int, Any], object]
"""Called when a round is over, with its number from 0 and the server's state; what is true ends the stage."""


@dataclass(frozen=True, eq=False)
class Question:
    """What a round asks: its number from 0, the clients [M], and for each the message it is sent, the last round whose
    message it has (-1 for none), and whether it has not answered in this stage yet."""

    round: int
    clients: Ints
    messages: Sequence[Message]
    since: Ints
    new: Bools

    def part(self, places: Ints) -> Question:
        """The same for some of the clients."""
        messages = [self.messages[place] for place in places]
        return Question(self.round, self.clients[places], messages, self.since[places], self.new[places])


@dataclass(frozen=True, eq=False)
class Heard:
    """What came of asking some clients: a reply after so many seconds for each, or the reason why there is none."""

    clients: Ints
    reply: Reply | None
    seconds: float = 0.0
    why: str = ""
    forgot: bool = False
    """Whether the clients no longer have what they were sent, or kept, before."""


@dataclass(frozen=True, eq=False)
class Summed:
    """A secure sum: whose answers are in it, why others' are not, what it is, and what each spent on it [M]."""

    clients: Ints
    dropped: Mapping[int, str]
    values: Mapping[str, Floats]
    bytes_up: Ints
    bytes_down: Ints
    forward_passes: Ints
    kept: Ints
    """Clients that want to keep something."""
    forgot: Sequence[int] = ()
    """Clients that no longer have what they were sent, or kept, before."""


class Clients(Protocol):
    """The clients of a stage, in this process or anywhere else."""

    def present(self) -> Bools:
        """[K] Who can be asked now."""

    def ask(self, question: Question) -> Iterator[Heard]:
        """What each of them says, in the order of the clients."""

    def add_up(self, question: Question, threshold: int, shapes: Mapping[str, tuple[int, ...]]) -> Summed:
        """The sum of what they say, and nothing else; so many of them have to stay to the end."""

    def keep(self, reply: Reply) -> None:
        """The reply counts: what its client wants to keep is what it has from the end of the round on."""


def rounds_of(stage: ClosedForm | Rounds, n_clients: int) -> tuple[int, int]:
    """Number of rounds and clients in each: everybody, unless the stage samples."""
    per_round = stage.sampled(n_clients)
    if not isinstance(stage, ClosedForm):
        return stage.rounds, per_round
    every = -(-n_clients // per_round)
    return (every if stage.rounds is None else min(stage.rounds, every)), per_round


def play_rounds(
    method: Method[Any],
    stage: ClosedForm | Rounds,
    federation: Federation,
    clients: Clients,
    seed: tuple[int, ...],
    ledger: Ledger,
    store: ClientStore,
    after_round: AfterRound,
    state: Any = None,
    first_round: int = 0,
    handed_over: Ints | None = None,
    server: Cohort | None = None,
) -> Any:
    """Play the rounds of a stage from ``first_round`` on; a client whose message is refused is left out.

    handed_over: [K] bytes of earlier stages' work that a client needs before its first answer; server: examples that
    clients have given to the server.
    """
    needs = np.zeros(federation.n_clients, np.int64) if handed_over is None else handed_over
    state = method.open() if state is None else state
    rounds, per_round = rounds_of(stage, federation.n_clients)
    if method.hears_once:  # who is left for the last round
        _check_sum(stage, rounds, min(per_round, federation.n_clients - (rounds - 1) * per_round))
    with progress(f"{stage.method}: clients heard", rounds * per_round, first_round * per_round) as advance:
        for number in range(first_round, rounds):
            sampled = _sample(method, stage, seed, number, per_round, federation, clients.present())
            question = _question(method, state, number, sampled, federation, ledger)
            before = ledger.bytes_up[sampled], ledger.bytes_down[sampled]
            if not stage.silent:
                ledger.bytes_down[sampled] += np.array([message.nbytes for message in question.messages], np.int64)
            if not stage.pools:
                ledger.bytes_down[sampled] += needs[sampled] * question.new
            good, last_refusal = 0, ""

            def drop(who: Ints, why: str, number: int = number) -> None:
                names = ", ".join(federation.names[client] for client in who)
                ledger.dropped.append({"round": number + 1, "clients": names, "why": why})

            groups = _groups(stage, question)
            for group, threshold in groups:
                try:
                    summed = clients.add_up(group, threshold, method.summands(state))
                    state = method.fold_sum(state, summed.values)
                except HeadstartError as error:
                    last_refusal = str(error)
                    drop(group.clients, last_refusal)
                    continue
                for client, why in summed.dropped.items():
                    drop(np.array([client]), why)
                _charge_sum(ledger, number, group.clients, summed)
                for client in summed.kept:
                    store.accept(int(client))
                good += len(summed.clients)
                advance(len(group.clients))
            for heard in clients.ask(question) if not groups else ():
                try:
                    if heard.forgot:  # next time they are asked as if they were new
                        ledger.last_round[heard.clients] = store.slots[heard.clients] = -1
                    if heard.reply is None:
                        raise MessageError(heard.why)
                    _charge(ledger, number, heard.reply, stage.silent)
                    check_on_time(stage, heard.seconds)
                    state = method.fold(state, heard.reply)
                    good += len(heard.clients)
                    clients.keep(heard.reply)
                except MessageError as error:
                    last_refusal = str(error)
                    drop(heard.clients, last_refusal)
                advance(len(heard.clients))
            check_enough(stage, number + 1, good, len(sampled), last_refusal)
            moved = ledger.bytes_up[sampled] - before[0], ledger.bytes_down[sampled] - before[1]
            ledger.latest = list(zip(sampled.tolist(), *(each.tolist() for each in moved), strict=True))
            state = method.close(state)
            if server is not None:
                state = method.refine(state, server)
            store.commit()
            ledger.tick()
            if after_round(number, state):
                break
    return state


def _question(
    method: Method[Any], state: Any, number: int, sampled: Ints, federation: Federation, ledger: Ledger
) -> Question:
    """One message for the clients of a task, or, where clients catch up, for each round they were in last."""
    last = ledger.last_round[sampled]
    since = last if method.catches_up else np.full(len(sampled), -1)
    kinds = list(zip(federation.tasks_of(sampled).tolist(), since.tolist(), strict=True))
    messages = {kind: method.instruct(state, number, kind[1], kind[0]) for kind in sorted(set(kinds))}
    return Question(number, sampled, [messages[kind] for kind in kinds], since, last < 0)


def _groups(stage: ClosedForm | Rounds, question: Question) -> list[tuple[Question, int]]:
    """The clients of a round in groups, each to be added up by itself, and how many of each have to stay to the end;
    none where nothing is to be hidden."""
    count = len(question.clients)
    if isinstance(stage, PersonaliseStage) or not stage.secure:
        return []
    _check_sum(stage, question.round + 1, count)
    parts = np.array_split(np.arange(count), max(1, count // (stage.secure_group or count)))
    return [(question.part(part), stage.survivors(len(part))) for part in parts]


def _check_sum(stage: ClosedForm | Rounds, round: int, clients: int) -> None:
    """Refuse a round (from 1) of a secure stage with too few clients."""
    if not isinstance(stage, PersonaliseStage) and stage.secure and clients < SMALLEST_SUM:
        raise HeadstartError(
            f"{stage.method}, round {round}: a sum of {clients} clients hides nobody; secure sums need "
            f"{SMALLEST_SUM} or more in a round"
        )


def _charge_sum(ledger: Ledger, number: int, asked: Ints, summed: Summed) -> None:
    """What a secure sum costs beyond the messages of its method."""
    ledger.last_round[summed.clients] = number
    ledger.last_round[list(summed.forgot)] = -1
    ledger.bytes_up[asked] += summed.bytes_up
    ledger.bytes_down[asked] += summed.bytes_down
    ledger.forward_passes[asked] += summed.forward_passes


def _charge(ledger: Ledger, number: int, reply: Reply, silent: bool) -> None:
    """What a reply costs, whether it counts or not."""
    ledger.last_round[reply.clients] = number
    ledger.bytes_up[reply.clients] += 0 if silent else reply.nbytes
    ledger.forward_passes[reply.clients] += reply.forward_passes


def _sample(
    method: Method[Any],
    stage: ClosedForm | Rounds,
    seed: tuple[int, ...],
    number: int,
    per_round: int,
    federation: Federation,
    present: Bools,
) -> Ints:
    """Clients of a round, without replacement; where a client is heard once, those that were not heard before.

    Who cannot be asked now makes room for the next in the order, which does not depend on who is there. Not so with
    privacy: its account is of a draw from all clients, and who is absent is missing.
    """
    which = () if method.hears_once else (number,)
    if getattr(stage, "sampling", "clients") == "clients":
        order = np.random.default_rng([0x0DE, *seed, *which]).permutation(federation.n_clients)
    else:  # from each task in turn; whom a task sends does not depend on the other tasks
        ranks, turns, clients = [], [], []
        for task in range(len(federation.tasks)):
            mine = federation.clients_of(task)
            count = mine.stop - mine.start
            clients.append(mine.start + np.random.default_rng([0x0DE, *seed, *which, task]).permutation(count))
            ranks.append(np.arange(count))
            turns.append(np.full(count, task if method.hears_once else (task - number) % len(federation.tasks)))
        order = np.concatenate(clients)[np.lexsort((np.concatenate(turns), np.concatenate(ranks)))]
    if method.hears_once or getattr(stage, "privacy", None) is not None:
        first = number * per_round if method.hears_once else 0
        turn = order[first : first + per_round]
        return np.sort(turn[present[turn]])
    return np.sort(order[present[order]][:per_round])


def shared_examples(stage: Rounds, federation: Federation, source: Source, seed: tuple[int, ...]) -> Cohort:
    """What clients have given to the server: a share of each one's examples, at least one, as those of one client."""
    rng = np.random.default_rng([0x5A4E, *seed])
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
