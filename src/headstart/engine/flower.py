"""Clients on the nodes of a Flower grid: the same requests, as bytes, over Flower's messages.

A message holds the bytes of the method's message, and a few facts as JSON: who asks, about which stage, as which
client. Of a client's reply, only what its channel lets through leaves the node; its state stays on the node's disk.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from headstart.channel.figures import FiguresChannel
from headstart.channel.shared_noise import SharedNoise, survivor_levels
from headstart.config.stage import ClosedForm, Rounds
from headstart.core.message import Message
from headstart.core.metrics import Metrics, Tally, added
from headstart.core.reply import Failure, GroupReply, Reply
from headstart.engine.client_states import ClientStates
from headstart.engine.flower_messages import count_of, noise_keys, read_reply, reason_of
from headstart.engine.grid import Nodes
from headstart.engine.node import WRITTEN, StateLostError
from headstart.engine.round import AnyReply
from headstart.engine.server import Bools, Request, check_sum
from headstart.engine.server_log import Question
from headstart.engine.setup import StageSetup, digest
from headstart.errors import HeadstartError, MessageError

if TYPE_CHECKING:  # Flower takes seconds to load
    from flwr.app import Message as FlowerMessage

    from headstart.channel.secure import SecureSum

log = logging.getLogger("headstart")


@dataclass(eq=False)
class FlowerClients:
    """The clients of a stage, each on its node.

    tasks: [K] the task of each; setups: for a task, and whether the client has something of its own from the stage
    before, what it is told of the stage; earlier: states of the stages that this one goes on from.
    """

    nodes: Nodes
    stage: ClosedForm | Rounds
    number: int
    tasks: np.ndarray
    setups: Mapping[tuple[int, bool], StageSetup]
    states: ClientStates
    earlier: Sequence[tuple[int, ClientStates]]
    shapes: Callable[[int], Mapping[str, tuple[int, ...]]]
    """Names and shapes of what clients add in the secure sum of a round (from 0)."""
    figures: Sequence[FiguresChannel]
    """What clients of each task tell of tests."""
    shared: Callable[[], SharedNoise | None] = lambda: None
    """The noise that clients add to a secure sum together."""
    _told: dict[tuple[int, bool], tuple[bytes, str]] = field(default_factory=dict)
    _know: set[int] = field(default_factory=set)
    """Clients that have what the stage starts from, as this process knows."""
    _played: int = 0
    """Rounds behind the model, the one under way included."""
    _absences: Mapping[int, str] = field(default_factory=dict)

    def available(self) -> Bools:
        """Clients whose node is there, once there are as many as the stage needs; nodes that have missed a deadline
        are left out of the next rounds where there are enough others."""
        available = np.zeros(len(self.tasks), np.bool_)
        needed = min(self.stage.min_replies or 1, len(self.tasks))
        present = self.nodes.available(needed, self.stage.deadline)
        if len(present) < needed:
            raise HeadstartError(
                f"{self.stage.method}: {len(present)} of {len(self.tasks)} nodes are there, min_replies = {needed}; "
                f"missing: {self.nodes.named_absences()}"
            )
        self.nodes.late = {node: rounds - 1 for node, rounds in self.nodes.late.items()}
        rested = self.nodes.rested(present)
        asked = rested if self.stage.trains and len(rested) >= needed else present
        self._absences = self.nodes.absences() | dict.fromkeys(present - asked, "not asked: it has missed a deadline")
        available[list(asked)] = True
        return available

    def absences(self) -> Mapping[int, str]:
        """Why clients cannot be asked in the round under way."""
        return self._absences

    def send(self, request: Request) -> Iterator[AnyReply]:
        """To all at once; what has come is passed on in the order of the clients, so that sums do not depend on
        speed."""
        self._played = request.round + 1
        if request.threshold:
            try:
                yield self._sum(request, "secure", self.shapes(request.round), self.shared())
            except HeadstartError as error:
                yield Failure(request.clients, str(error))
            return
        asked = {}
        for client, message, new in zip(request.clients.tolist(), request.messages, request.new, strict=True):
            asked[self.nodes.ids[client]] = self._request(client, message, bool(new))
        clients, began = {self.nodes.ids[int(client)]: int(client) for client in request.clients}, time.monotonic()
        order, ready = [int(client) for client in request.clients], dict[int, AnyReply]()
        for node, reply in self._send(asked, again=self._needs(len(asked))):
            client = clients[node]
            ready[client] = self._reply(client, reply, time.monotonic() - began)
            while order and order[0] in ready:
                yield ready.pop(order.pop(0))

    def _needs(self, asked: int) -> bool:
        """Whether a round cannot go on without any of those that are asked: who leaves is waited for."""
        return self.stage.deadline is not None and (self.stage.min_replies or 1) >= asked

    def _sum(
        self, request: Request, kind: str, shapes: Mapping[str, tuple[int, ...]], shared: SharedNoise | None = None
    ) -> GroupReply:
        """The protocol of `channel.secure`, an exchange after the other; who does not answer is left behind."""
        from headstart.channel.secure import SecureSum

        numbers = request.clients.tolist()
        parts = len(survivor_levels(len(numbers), request.threshold))
        exchange = _Exchange(dict.fromkeys(numbers, 0), dict.fromkeys(numbers, 0), dict.fromkeys(numbers, 0), parts)
        whole = shared is not None or (kind == "secure-test" and self.stage.privacy is not None)
        integers = tuple(shapes) if whole else ()
        server = SecureSum(uuid.uuid4().bytes, numbers, request.threshold, shapes, integers)
        sent = dict(zip(numbers, zip(request.messages, request.new.tolist(), strict=True), strict=True))
        while server.step:
            self._exchange(server, kind, sent, exchange)
            try:
                server.next()
            except HeadstartError as error:
                refusals = "".join(f"; client {client}: {why}" for client, why in sorted(exchange.refused.items()))
                raise HeadstartError(f"{error}{refusals}") from None
        heard, total = set(server.heard), server.total()
        if shared is not None:
            total = dict(shared.removed(total, len(numbers), request.threshold, list(exchange.noise.values())))
        why = {c: exchange.refused.get(c, f"no answer in step {step}") for c, step in server.dropped().items()}
        return GroupReply(
            np.array(sorted(heard)),
            request.clients,
            total,
            np.array([exchange.up[client] for client in numbers]),
            np.array([exchange.down[client] for client in numbers]),
            np.array([exchange.passes[client] for client in numbers]),
            dict.fromkeys(sorted(exchange.wrote & heard), WRITTEN),
            {client: reason for client, reason in why.items() if client not in heard},
            tuple(sorted(exchange.state_lost)),
        )

    def _exchange(
        self, server: SecureSum, kind: str, sent: Mapping[int, tuple[Message, bool]], exchange: _Exchange
    ) -> None:
        """One exchange of the protocol with everybody that is still there."""
        clients = {self.nodes.ids[client]: client for client in sent}
        asked, step = {}, str(server.step)
        for client, told in server.instructions().items():
            message, new = sent[client] if step == "keys" else (Message(), False)
            facts, parts = self._request(client, message, new, kind, step == "keys")
            parts["told"] = told.to_bytes()
            exchange.down[client] += len(parts["told"])
            asked[self.nodes.ids[client]] = facts, parts
        for node, reply in self._send(asked, {"kind": step}):
            client = clients[node]
            try:
                facts, data = self._said(client, reply, step == "keys")
                exchange.up[client] += len(data)
                server.receive(client, Message.from_bytes(data))
                exchange.passes[client] += count_of(facts)
                exchange.wrote |= {client} if facts.get("kept") else set()
                if step == "reveal":
                    exchange.noise[client] = noise_keys(facts, exchange.parts)
            except MessageError as error:
                exchange.refused[client] = str(error)
                exchange.state_lost |= {client} if isinstance(error, StateLostError) else set()

    def commit(self, reply: AnyReply) -> None:
        """Nodes have written their states where they are not in use; that counts now."""
        match reply:
            case GroupReply():
                wrote = list(reply.state)
            case Reply():
                wrote = reply.clients.tolist() if reply.state else []
            case Failure():
                wrote = []
        for client in wrote:
            self.states.accept(client)

    def evaluate(self, models: Sequence[Message]) -> list[Tested]:
        """The model of each task at all of its clients that are there."""
        if not self.stage.tests_on_nodes:  # they would refuse
            return [Tested()] * len(models)
        if self.stage.secure:
            return [self._test_sum(task, model) for task, model in enumerate(models)]
        asked, clients = {}, {node: client for client, node in self.nodes.ids.items()}
        up, down = np.zeros((2, len(models)), np.int64)
        for client in self._testers():
            task = int(self.tasks[client])
            _, parts = asked[self.nodes.ids[client]] = self._request(client, models[task], True, "evaluate")
            down[task] += sum(map(len, parts.values()))
        found: list[dict[int, Tally]] = [{} for _ in models]
        for node, reply in self._send(asked):
            client = clients[node]
            task = int(self.tasks[client])
            try:
                _, data = self._said(client, reply)
                up[task] += len(data)
                found[task][client] = self.figures[task].read(Message.from_bytes(data))
            except MessageError as error:
                log.warning("client %d does not test the model: %s", client, error)
        tested = []
        for each, *nbytes in zip(found, up.tolist(), down.tolist(), strict=True):
            total = added([each[client] for client in sorted(each)])
            tested.append(Tested(total, {} if self.stage.protected else each, (nbytes[0], nbytes[1])))
        return tested

    def _testers(self) -> list[int]:
        """Clients that are asked to test a model: those that are there and have not missed a deadline lately."""
        present = self.nodes.available(1, self.stage.deadline)
        return sorted(self.nodes.rested(present) or present)

    def _test_sum(self, task: int, model: Message) -> Tested:
        """What all clients of a task that are there tell, as one secure sum."""
        there = np.array([client for client in self._testers() if self.tasks[client] == task], np.int64)
        new, threshold = np.ones(len(there), np.bool_), self.stage.survivors(len(there))
        request = Request(self._played, there, [model] * len(there), np.full(len(there), -1), new, threshold)
        try:
            check_sum(self.stage, self._played, len(there))
            reply = self._sum(request, "secure-test", self.figures[task].shapes)
        except HeadstartError as error:
            log.warning("the model is not tested: %s", error)
            return Tested()
        nbytes = int(reply.bytes_up.sum()), int(reply.bytes_down.sum())
        return Tested(self.figures[task].of_sum(reply.values), {}, nbytes)

    def judged(self, task: int, total: Tally) -> tuple[float | None, float | None, Metrics]:
        """Accuracy, loss and the other metrics of what clients of a task told, added up."""
        figures = self.figures[task]
        return figures.finish(total, self._played, task) if total else (None, None, figures.metrics({}))

    def _send(
        self, asked: Mapping[int, Question], about: Mapping[str, Any] | None = None, again: bool = False
    ) -> Iterator[tuple[int, FlowerMessage | str]]:
        """Ask nodes; about: what is noted in the server's log beside the stage and the round; again: whether those that
        leave are waited for."""
        about = {"stage": self.number, "round": self._played - 1, **(about or {})}
        return self.nodes.send(asked, self.stage.deadline, about, again)

    def _request(self, client: int, message: Message, new: bool, kind: str = "answer", tell: bool = True) -> Question:
        key = int(self.tasks[client]), any(states.has(client) for _, states in self.earlier)
        if key not in self._told:
            setup = self.setups[key].to_message().to_bytes()
            self._told[key] = setup, digest(setup)
        setup, name = self._told[key]
        chain = [(self.number, self.states), *self.earlier]
        in_use = [(number, int(states.slots[client]), states.shapes) for number, states in chain]
        facts = {"kind": kind, "client": client, "setup": name, "states": in_use, "new": new}
        if kind in ("evaluate", "secure-test"):
            facts["done"] = self._played
        return facts, {"message": message.to_bytes()} | ({"setup": setup} if tell and client not in self._know else {})

    def _said(self, client: int, reply: FlowerMessage | str, told: bool = True) -> tuple[dict[str, Any], bytes]:
        """Facts and bytes of a client's reply; told: whether what the stage starts from was sent where it had to be."""
        facts, data = read_reply(reply)
        if facts.get("state_lost") is True:  # next time it is asked as if it had never kept anything
            self._know.discard(client)
            for states in (self.states, *(states for _, states in self.earlier)):
                states.slots[client] = -1
            raise StateLostError(reason_of(facts))
        if "error" in facts:
            raise MessageError(reason_of(facts))
        if told:
            self._know.add(client)
        return facts, data

    def _reply(self, client: int, reply: FlowerMessage | str, seconds: float) -> AnyReply:
        who = np.array([client])
        try:
            facts, data = self._said(client, reply)
            passes = count_of(facts)
            message = Message.from_bytes(data)
        except MessageError as error:
            return Failure(who, str(error), isinstance(error, StateLostError))
        state = WRITTEN if facts.get("kept") else {}
        sizes = np.array([len(data)]), np.array([passes])
        return Reply(who, message, *sizes, state, int(self.tasks[client]), seconds)


@dataclass(frozen=True, eq=False)
class Tested:
    """What clients tell of a test: added up, each where nothing hides them, and the bytes of it, up and down."""

    total: Tally = field(default_factory=dict)
    each: Mapping[int, Tally] = field(default_factory=dict)
    nbytes: tuple[int, int] = (0, 0)


@dataclass
class _Exchange:
    """What the exchanges of a secure sum cost each client, and what became of it."""

    up: dict[int, int]
    down: dict[int, int]
    passes: dict[int, int]
    parts: int
    """Of a client's noise, where clients share it."""
    refused: dict[int, str] = field(default_factory=dict)
    wrote: set[int] = field(default_factory=set)
    """Clients that have written a state."""
    state_lost: set[int] = field(default_factory=set)
    noise: dict[int, dict[int, bytes]] = field(default_factory=dict)
    """Keys of the parts of each client's noise that the sum does not need."""
