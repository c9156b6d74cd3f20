"""The server of a stage: which clients it samples, what it sends them, and which replies and rounds count."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from headstart.channel.channel import Channel
from headstart.config.stage import ClosedForm, Rounds
from headstart.core.message import Message
from headstart.core.reply import Failure, GroupReply, Reply, Sender
from headstart.core.seeds import Generator, Seed, generator_of
from headstart.core.statistics import Ints
from headstart.core.update import Total
from headstart.data import Federation
from headstart.engine.client import model_norm
from headstart.errors import HeadstartError, MessageError
from headstart.methods import Method
from headstart.solvers.cohort import Cohort

# What sets the generator that draws clients apart from others.
_DRAW = 0x0DE
# A sum of fewer tells too much of each: of two, either knows the other's part.
SMALLEST_SUM = 3

Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class Request:
    """The request of a round to some clients [M]: for each the message that it is sent, the last round whose message
    it has (-1 for none), and whether it has not replied in this stage yet."""

    round: int
    """From 0."""
    clients: Ints
    messages: Sequence[Message]
    since: Ints
    new: Bools
    threshold: int = 0
    """Of a secure sum, how many have to stay to the end; 0: clients reply one by one."""

    def part(self, places: Ints, threshold: int = 0) -> Request:
        """The same for some of the clients."""
        messages = [self.messages[place] for place in places]
        return Request(self.round, self.clients[places], messages, self.since[places], self.new[places], threshold)


class Server:
    """The state of a method between rounds, and the total of the round under way."""

    def __init__(
        self, stage: ClosedForm | Rounds, method: Method[Any], channel: Channel, federation: Federation, state: Any
    ) -> None:
        self.stage, self.method, self.channel, self.federation = stage, method, channel, federation
        self.state = state
        self.data: Cohort | None = None
        """Examples that clients have given to the server."""
        self._total: Any = None
        self._good, self._sampled, self._refusal, self._round = 0, 0, "", 0
        self._senders: dict[int, Sender] = {}
        self.under_way: Any = None
        """Updates of asynchronous clients that have not come yet."""

    def begin(self, round: int, count: int) -> None:
        """Nothing received yet in a round (from 0) that so many clients are to count in."""
        self._total, self._good, self._sampled, self._refusal = self.channel.total(round), 0, count, ""
        self._round, self._senders = round, {}

    def requests(self, round: int, clients: Ints, last_round: Ints) -> list[Request]:
        """The requests of a round (from 0) to these clients; last_round: [K] the last one that each took part in."""
        last, tasks = last_round[clients], self.federation.tasks_of(clients)
        since = last if self.method.replays else np.full(len(clients), -1)
        kinds = list(zip(tasks.tolist(), since.tolist(), strict=True))
        # One message for the clients of a task, or, where clients catch up, for each round they were in last.
        sent = {kind: self.method.broadcast(self.state, round, kind[1], kind[0]) for kind in sorted(set(kinds))}
        self._senders |= {task: self._sender(task, message) for (task, _), message in sent.items()}
        request = Request(round, clients, [sent[kind] for kind in kinds], since, last < 0)
        return self._groups(request) if self.stage.secure else [request]

    def _sender(self, task: int, message: Message | None = None) -> Sender:
        """What is known of clients of a task that were sent a message; None: in an earlier round."""
        if message is None:
            message = self.method.broadcast(self.state, self._round, -1, task)
        return Sender(-1, self._round, task, self.method.expected(task), model_norm(message))

    def _groups(self, request: Request) -> list[Request]:
        """The clients of a round in groups, each to be added up by itself."""
        count = len(request.clients)
        check_sum(self.stage, request.round + 1, count)
        parts = np.array_split(np.arange(count), max(1, count // (self.stage.secure_group or count)))
        return [request.part(part, self.stage.survivors(len(part))) for part in parts]

    def add(self, reply: Reply | GroupReply | Failure) -> None:
        """Add a reply to the total of the round; `MessageError` where it does not count."""
        try:
            match reply:
                case Failure():
                    raise MessageError(reply.why)
                case GroupReply():
                    self.channel.add_vector(self._total, reply.values)
                case Reply() if reply.late:
                    raise MessageError(reply.late)
                case Reply():
                    if self.stage.deadline is not None and reply.seconds > self.stage.deadline:
                        raise MessageError(
                            f"late: it took {reply.seconds:.1f} s, and the deadline is {self.stage.deadline:g} s"
                        )
                    sender = self._senders.get(reply.task) or self._sender(reply.task)
                    self.channel.add(self._total, reply, sender)
        except MessageError as refusal:
            self._refusal = str(refusal)
            raise
        self._good += len(reply.clients)

    def step(self, round: int) -> None:
        """The state after a round (from 0); one with fewer usable replies than min_replies stops the run."""
        if self._good < min(self.stage.min_replies or 1, self._sampled):
            last = f"; the last refusal: {self._refusal}" if self._refusal else ""
            raise HeadstartError(
                f"{self.stage.method}, round {round + 1}: {self._good} of {self._sampled} clients sent a usable reply, "
                f"min_replies = {self.stage.min_replies or 1}{last}"
            )
        total = self.channel.finish(self._total, round)
        if self._good or (isinstance(total, Total) and total.weights):  # noise hides that there was no reply
            self.state = self.method.server_update(self.state, total, round)
        if self.data is not None:
            self.state = self.method.train_on_server(self.state, self.data, round)  # type: ignore[attr-defined]
        self._total = None


def check_sum(stage: Any, round: int, clients: int) -> None:
    """Refuse a round (from 1) of a secure stage with too few clients."""
    if clients < SMALLEST_SUM:
        raise HeadstartError(
            f"{stage.method}, round {round}: a sum of {clients} clients hides none of them; secure aggregation needs "
            f"{SMALLEST_SUM} or more in a round"
        )


def draw(stage: ClosedForm | Rounds, federation: Federation, seed: Seed, round: int, available: Bools) -> Ints:
    """Clients of a round (from 0), without replacement; where a client participates once, those not sampled
    before.

    An absent client makes room for the next in the order, which does not depend on who is available. Not so with
    privacy: its accounting is for a sample of all clients, and an absent client is not replaced.
    """
    one_shot, per_round = not stage.trains, stage.asked(federation.n_clients)
    order = drawing_order(stage, federation, seed, round)
    if one_shot or stage.privacy is not None:
        first = round % stage.rounds_per_pass(federation.n_clients) * per_round if one_shot else 0  # type: ignore[union-attr]
        turn = order[first : first + per_round]
        return np.sort(turn[available[turn]])
    return np.sort(order[available[order]][:per_round])


def drawing_order(stage: ClosedForm | Rounds, federation: Federation, seed: Seed, round: int) -> Ints:
    """The clients in the order in which a round draws them."""
    return _order(stage, federation, seed, (round,) if stage.trains else ())


def _order(stage: ClosedForm | Rounds, federation: Federation, seed: Seed, key: tuple[int, ...]) -> Ints:
    """The clients in the order in which they are drawn; from each task in turn, where the stage asks for that.

    key: the number of the round, where every round draws anew.
    """
    if stage.sampling == "clients":
        return _generator(seed, *key).permutation(federation.n_clients)
    ranks, turns, clients, turn = [], [], [], sum(key)
    for task in range(len(federation.tasks)):  # the clients of a task do not depend on the other tasks
        mine = federation.clients_of(task)
        clients.append(mine[_generator(seed, *key, task).permutation(len(mine))])
        ranks.append(np.arange(len(mine)))
        turns.append(np.full(len(mine), (task - turn) % len(federation.tasks)))
    return np.concatenate(clients)[np.lexsort((np.concatenate(turns), np.concatenate(ranks)))]


def _generator(seed: Seed, *key: int) -> Generator:
    """What draws clients."""
    return generator_of((_DRAW, *seed), *key) if isinstance(seed, tuple) else generator_of(seed, _DRAW, *key)
