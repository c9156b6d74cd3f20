"""Asynchronous clients, simulated: buffered aggregation (FedBuff; Nguyen et al., AISTATS 2022).

So many clients are at work at any time, each on the model as it was when it was sent. As soon as ``buffer`` updates
have come, the server steps along their mean, an update that is s steps old counting for (1 + s)^-staleness of itself;
that is a round. Whoever has replied is replaced at once by a client that is at work on nothing and is in no buffer, in
the order in which the round draws. So with a buffer for everybody, a round is one of FedAvg.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from headstart.core.message import Message
from headstart.core.reply import Reply
from headstart.core.seeds import Seed
from headstart.core.statistics import Ints
from headstart.engine.clock import Clock
from headstart.engine.server import Server, drawing_order
from headstart.errors import MessageError

if TYPE_CHECKING:
    from headstart.engine.round import Costs, Transport


@dataclass(frozen=True, eq=False)
class Flight:
    """An update under way, as a checkpoint holds it."""

    client: int
    round: int
    """From 0: whose model it starts from."""
    arrives: float
    late: str
    arrays: dict[str, Any]
    scalars: dict[str, Any]
    state: dict[str, Any]
    passes: int
    task: int
    down: int
    """Bytes that the client was sent."""

    @classmethod
    def of(cls, reply: Reply, round: int, now: float, down: Ints) -> Flight:
        """A reply that will have come when its seconds are over."""
        (client,), (passes,), message = reply.clients.tolist(), reply.forward_passes.tolist(), reply.message
        return cls(
            client, round, now + reply.seconds, reply.late, dict(message.arrays), dict(message.scalars),
            dict(reply.state), passes, reply.task, int(down[client]),
        )  # fmt: skip

    def reply(self) -> Reply:
        """As the server receives it."""
        message, passes = Message(self.arrays, self.scalars), np.array([self.passes])
        size = np.array([message.nbytes])
        return Reply(np.array([self.client]), message, size, passes, self.state, self.task, late=self.late)


@dataclass(frozen=True, eq=False)
class Flights:
    """All updates under way."""

    flights: tuple[Flight, ...] = ()


class BufferedRounds:
    """The rounds of a stage whose clients are asynchronous."""

    def __init__(self, server: Server, clients: Transport, costs: Costs, seed: Seed, clock: Clock) -> None:
        self.server, self.clients, self.costs, self.seed, self.clock = server, clients, costs, seed, clock
        self.stage: Any = server.stage
        self.flights = {flight.client: flight for flight in (server.under_way or Flights()).flights}
        self.buffer: dict[int, Flight] = {}

    def play_round(self, round: int) -> Iterator[int]:
        """Until the buffer is full, and a step; yields for every update that has come."""
        server, ledger, stage = self.server, self.costs.ledger, self.stage
        names, late = server.federation.names, 0
        server.begin(round, stage.buffer)
        ledger.latest = []
        while len(self.buffer) < stage.buffer and late <= len(names):
            flight = self._next(round)
            reply = flight.reply()
            self.costs.charge(round, reply)
            ledger.latest.append((flight.client, int(reply.bytes_up[0]), flight.down))
            if flight.late:
                ledger.drop(round, [names[flight.client]], flight.late)
                late += 1
            else:
                self.buffer[flight.client] = flight
                yield 1
        for client in sorted(self.buffer):  # the order of a sum is part of it
            try:
                self._add(self.buffer[client], round)
            except MessageError as refusal:
                ledger.drop(round, [names[client]], str(refusal))
        server.step(round)
        self.buffer.clear()
        self.clients.states.commit()
        server.under_way = Flights(tuple(self.flights[client] for client in sorted(self.flights)))
        self.costs.tick()

    def _next(self, round: int) -> Flight:
        """The update that comes first; before time passes, whoever has replied is replaced."""
        first = self._first()
        while first is None or first.arrives > self.clock.now:
            self._start(round)
            first = self._first()
            if first is not None:
                break
            self.clock.wait(self._idle())
        assert first is not None
        self.clock.now = max(self.clock.now, first.arrives)
        return self.flights.pop(first.client)

    def _first(self) -> Flight | None:
        return min(self.flights.values(), key=lambda flight: (flight.arrives, flight.client), default=None)

    def _idle(self) -> Any:
        """[K] Who is at work on nothing, and in no buffer."""
        idle = np.ones(self.server.federation.n_clients, np.bool_)
        idle[[*self.flights, *self.buffer]] = False
        return idle

    def _start(self, round: int) -> None:
        """Send the model to as many clients as are missing."""
        server, ledger, clock = self.server, self.costs.ledger, self.clock
        count = self.stage.sampled(server.federation.n_clients) - len(self.flights)
        order = drawing_order(self.stage, server.federation, self.seed, round)
        chosen = np.sort(order[(self._idle() & clock.available())[order]][:count])
        if not len(chosen):
            return
        before = ledger.bytes_down.copy()
        (request,) = server.requests(round, chosen, ledger.last_round)
        self.costs.charge_request(request)
        down = ledger.bytes_down - before
        for reply in clock.timed(self.clients.send(request), down, self.stage.deadline):
            self.flights[int(reply.clients[0])] = Flight.of(reply, round, clock.now, down)

    def _add(self, flight: Flight, round: int) -> None:
        """Add an update of the buffer to the total, by its age."""
        reply, age = flight.reply(), round - flight.round
        self.server.add(replace(reply, discount=float((1 + age) ** -self.stage.staleness)))
        self.clients.commit(reply)
