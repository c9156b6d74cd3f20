"""The rounds of a stage, whoever the clients are."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from headstart.core.ledger import Ledger
from headstart.core.progress import progress
from headstart.core.reply import AnyReply, Failure, GroupReply, Reply
from headstart.core.seeds import Seed
from headstart.core.statistics import Ints
from headstart.engine.buffered import BufferedRounds
from headstart.engine.client_states import ClientStates
from headstart.engine.clock import Clock
from headstart.engine.server import Bools, Request, Server, check_sum, draw
from headstart.errors import MessageError

AfterRound = Callable[[int, Any], object]
"""Called when a round is over, with its number from 0 and the server's state; what is true ends the stage."""


class Transport(Protocol):
    """The clients of a stage, in this process or anywhere else."""

    @property
    def states(self) -> ClientStates:
        """What stays with them."""

    def available(self) -> Bools:
        """[K] Whether each client can be sampled now."""

    def absences(self) -> Mapping[int, str]:
        """Why each of the others cannot."""

    def send(self, request: Request) -> Iterator[AnyReply]:
        """Their replies, in the order of the clients; one reply for a client, a cohort or a secure group."""

    def commit(self, reply: AnyReply) -> None:
        """The reply counts: what stays with its clients is theirs from the end of the round on."""


@dataclass(frozen=True, eq=False)
class Costs:
    """What requests cost beside what replies say of themselves."""

    ledger: Ledger
    setup_bytes: Ints
    """[K] Bytes of earlier stages' work that a client needs before its first reply."""
    communicates: bool = True
    """Whether anything travels from round to round."""
    clock: Clock | None = None
    """Where clients have simulated machines."""

    def charge_request(self, request: Request) -> None:
        """Charge what a request sends."""
        ledger, clients = self.ledger, request.clients
        if self.communicates:
            sizes = {id(message): message.nbytes for message in {id(m): m for m in request.messages}.values()}
            ledger.bytes_down[clients] += np.array([sizes[id(message)] for message in request.messages], np.int64)
        ledger.bytes_down[clients] += self.setup_bytes[clients] * request.new

    def timed(self, server: Server, request: Request, replies: Iterator[AnyReply]) -> Iterator[AnyReply]:
        """The replies to a request, which is charged; with the time that they take, where that is simulated."""
        before = self.ledger.bytes_down.copy() if self.clock else None
        self.charge_request(request)
        if self.clock is None or before is None:
            return replies
        count = server.stage.sampled(server.federation.n_clients)
        return self.clock.round(replies, self.ledger.bytes_down - before, server.stage, count)

    def tick(self) -> None:
        """Bring the seconds up to now, and the simulated ones."""
        self.ledger.tick()
        if self.clock is not None:
            self.clock.now = max(self.clock.now, self.clock.ends)
            self.ledger.simulated_seconds = self.clock.now

    def charge(self, round: int, reply: AnyReply) -> None:
        """Charge what a reply costs, whether it counts or not."""
        ledger = self.ledger
        match reply:
            case Failure():  # next time they are treated as new
                ledger.last_round[list(reply.state_lost)] = -1
            case GroupReply():
                ledger.last_round[reply.clients] = round
                ledger.last_round[list(reply.state_lost)] = -1
                ledger.bytes_up[reply.sampled] += reply.bytes_up
                ledger.bytes_down[reply.sampled] += reply.bytes_down
                ledger.forward_passes[reply.sampled] += reply.forward_passes
            case Reply():
                ledger.last_round[reply.clients] = round
                ledger.bytes_up[reply.clients] += reply.bytes_up if self.communicates else 0
                ledger.forward_passes[reply.clients] += reply.forward_passes


def play_round(server: Server, clients: Transport, costs: Costs, round: int, drawn: Ints) -> Iterator[int]:
    """Send, add up, step; yields how many clients have replied. One whose message is refused is excluded; one that has
    lost its state is asked again, as a new one."""
    ledger = costs.ledger
    before = ledger.bytes_up[drawn], ledger.bytes_down[drawn]

    def drop(who: Ints, why: str) -> None:
        ledger.drop(round, [server.federation.names[client] for client in who], why)

    server.begin(round, len(drawn))
    asked, lost = drawn, list[int]()
    while len(asked):
        for request in server.requests(round, asked, ledger.last_round):
            for reply in costs.timed(server, request, clients.send(request)):
                costs.charge(round, reply)
                if isinstance(reply, Failure) and reply.state_lost and asked is drawn:
                    lost += reply.clients.tolist()
                    continue
                try:
                    server.add(reply)
                    clients.commit(reply)
                except MessageError as refusal:
                    drop(reply.clients, str(refusal))
                if isinstance(reply, GroupReply):
                    for client, why in reply.dropped.items():
                        drop(np.array([client]), why)
                yield len(reply.clients)
        asked, lost = np.array(sorted(lost), np.int64), []
    server.step(round)
    moved = ledger.bytes_up[drawn] - before[0], ledger.bytes_down[drawn] - before[1]
    ledger.latest = list(zip(drawn.tolist(), *(each.tolist() for each in moved), strict=True))
    clients.states.commit()
    costs.tick()


def play_rounds(
    server: Server,
    clients: Transport,
    costs: Costs,
    seed: Seed,
    after_round: AfterRound,
    first_round: int = 0,
) -> None:
    """Play the rounds of a stage from ``first_round`` on, until ``after_round`` ends it; seed: what draws clients."""
    stage, federation = server.stage, server.federation
    count = federation.n_clients
    rounds, per_round = stage.rounds_for(count), stage.buffer or stage.sampled(count)
    if stage.secure and not stage.trains:  # who is left for the last round
        whole = stage.rounds_per_pass(count) - 1
        check_sum(stage, whole + 1, min(per_round, count - whole * per_round))
    with progress(f"{stage.method}: clients", rounds * per_round, first_round * per_round) as advance:
        buffered = BufferedRounds(server, clients, costs, seed, costs.clock) if stage.buffer and costs.clock else None
        for round in range(first_round, rounds):
            if buffered:
                replies = buffered.play_round(round)
            else:
                drawn = draw(stage, federation, seed, round, clients.available())
                absent = {federation.names[client]: why for client, why in clients.absences().items()}
                costs.ledger.note_absences(round + 1, absent)
                replies = play_round(server, clients, costs, round, drawn)
            for replied in replies:
                advance(replied)
            if after_round(round, server.state):
                break
