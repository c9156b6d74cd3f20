"""Clients on the nodes of a Flower grid: the same requests, as bytes, over Flower's messages.

A message holds the bytes of the method's message, and a few facts as JSON: the server's process, the stage, the
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
from headstart.core.reply import AnyReply, Failure, GroupReply, Reply
from headstart.engine.client_states import ClientStates
from headstart.engine.flower_messages import count_of, noise_keys, read_reply, reason_of
from headstart.engine.grid import Nodes
from headstart.engine.node_errors import StateLostError
from headstart.engine.node_stage import WRITTEN
from headstart.engine.server import Bools, Request, check_sum
from headstart.engine.server_log import Content
from headstart.engine.setup import StageSetup, digest
from headstart.errors import HeadstartError, MessageError

if TYPE_CHECKING:  # Flower takes seconds to load
    from flwr.app import Message as FlowerMessage

    from headstart.channel.secure import SecureSum

log = logging.getLogger("headstart")


@dataclass(eq=False)
class FlowerClients:
    """The clients of a stage, each on its node.

    tasks: [K] the task of each; setups: for a task, and whether the client has personal parameters from the stage
    before, its setup; earlier: states of the stages that this one continues.
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
    """The channel of the test metrics of each task's clients."""
    shared: Callable[[], SharedNoise | None] = lambda: None
    """The noise that clients add to a secure sum together."""
    _encoded_setups: dict[tuple[int, bool], tuple[bytes, str]] = field(default_factory=dict)
    _has_setup: set[int] = field(default_factory=set)
    """Clients whose node has the setup of the stage, as this process knows."""
    rounds_done: int = 0
    """Rounds behind the model, the one under way included."""
    _absences: Mapping[int, str] = field(default_factory=dict)

    def available(self) -> Bools:
        """Clients whose node is connected, once there are as many as the stage needs; nodes that have missed a deadline
        are not sampled in the next rounds where there are enough others."""
        available = np.zeros(len(self.tasks), np.bool_)
        needed = min(self.stage.min_replies or 1, len(self.tasks))
        online = self.nodes.available(needed, self.stage.deadline)
        if len(online) < needed:
            raise HeadstartError(
                f"{self.stage.method}: {len(online)} of {len(self.tasks)} nodes are available, min_replies = {needed}; "
                f"missing: {self.nodes.named_absences()}"
            )
        self.nodes.stragglers = {node: rounds - 1 for node, rounds in self.nodes.stragglers.items()}
        responsive = self.nodes.responsive(online)
        chosen = responsive if self.stage.trains and len(responsive) >= needed else online
        self._absences = self.nodes.absences() | dict.fromkeys(online - chosen, "not sampled: it has missed a deadline")
        available[list(chosen)] = True
        return available

    def absences(self) -> Mapping[int, str]:
        """Why clients cannot take part in the round under way."""
        return self._absences

    def send(self, request: Request) -> Iterator[AnyReply]:
        """To all at once; what has come is passed on in the order of the clients, so that sums do not depend on
        speed."""
        self.rounds_done = request.round + 1
        if request.threshold:
            exchange = _Exchange.of(request)
            try:
                yield self._aggregate(request, "secure", exchange, self.shapes(request.round), self.shared())
            except HeadstartError as error:
                yield Failure(request.clients, str(error), tuple(sorted(exchange.state_lost)))
            return
        requests = {}
        for client, message, new in zip(request.clients.tolist(), request.messages, request.new, strict=True):
            requests[self.nodes.ids[client]] = self._request(client, message, bool(new))
        clients, began = {self.nodes.ids[int(client)]: int(client) for client in request.clients}, time.monotonic()
        order, ready = [int(client) for client in request.clients], dict[int, AnyReply]()
        for node, reply in self._send(requests, retry=self._needs_all(len(requests))):
            client = clients[node]
            ready[client] = self._reply(client, reply, time.monotonic() - began)
            while order and order[0] in ready:
                yield ready.pop(order.pop(0))

    def _needs_all(self, clients: int) -> bool:
        """Whether a round with so many clients needs them all: then a node that leaves is waited for."""
        return self.stage.deadline is not None and (self.stage.min_replies or 1) >= clients

    def _aggregate(
        self,
        request: Request,
        kind: str,
        exchange: _Exchange,
        shapes: Mapping[str, tuple[int, ...]],
        shared: SharedNoise | None = None,
    ) -> GroupReply:
        """The protocol of `channel.secure`, exchange by exchange; a client that does not reply has dropped out."""
        from headstart.channel.secure import SecureSum

        numbers = request.clients.tolist()
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
        survivors, total = set(server.survivors), server.total()
        if shared is not None:
            total = dict(shared.removed(total, len(numbers), request.threshold, list(exchange.noise.values())))
        why = {c: exchange.refused.get(c, f"no reply in step {step}") for c, step in server.dropped().items()}
        return GroupReply(
            np.array(sorted(survivors)),
            request.clients,
            total,
            np.array([exchange.up[client] for client in numbers]),
            np.array([exchange.down[client] for client in numbers]),
            np.array([exchange.passes[client] for client in numbers]),
            dict.fromkeys(sorted(exchange.wrote & survivors), WRITTEN),
            {client: reason for client, reason in why.items() if client not in survivors},
            tuple(sorted(exchange.state_lost)),
        )

    def _exchange(
        self, server: SecureSum, kind: str, sent: Mapping[int, tuple[Message, bool]], exchange: _Exchange
    ) -> None:
        """One exchange of the protocol with all clients that have not dropped out."""
        clients = {self.nodes.ids[client]: client for client in sent}
        requests, step = {}, str(server.step)
        for client, outgoing in server.instructions().items():
            message, new = sent[client] if step == "keys" else (Message(), False)
            facts, parts = self._request(client, message, new, kind, step == "keys")
            parts["exchange"] = outgoing.to_bytes()
            exchange.down[client] += len(parts["exchange"])
            requests[self.nodes.ids[client]] = facts, parts
        for node, reply in self._send(requests, {"kind": step}):
            client = clients[node]
            try:
                facts, data = self._read(client, reply, step == "keys")
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
        """The model of each task on the test examples of its available clients."""
        if not self.stage.tests_on_nodes:  # they would refuse
            return [Tested()] * len(models)
        if self.stage.secure:
            return [self._aggregate_tests(task, model) for task, model in enumerate(models)]
        requests, clients = {}, {node: client for client, node in self.nodes.ids.items()}
        up, down = np.zeros((2, len(models)), np.int64)
        for client in self._evaluators():
            task = int(self.tasks[client])
            _, parts = requests[self.nodes.ids[client]] = self._request(client, models[task], True, "evaluate")
            down[task] += sum(map(len, parts.values()))
        found: list[dict[int, Tally]] = [{} for _ in models]
        for node, reply in self._send(requests):
            client = clients[node]
            task = int(self.tasks[client])
            try:
                _, data = self._read(client, reply)
                up[task] += len(data)
                found[task][client] = self.figures[task].read(Message.from_bytes(data))
            except MessageError as error:
                log.warning("client %d does not evaluate the model: %s", client, error)
        tested = []
        for each, *nbytes in zip(found, up.tolist(), down.tolist(), strict=True):
            total = added([each[client] for client in sorted(each)])
            tested.append(Tested(total, {} if self.stage.protected else each, (nbytes[0], nbytes[1])))
        return tested

    def _evaluators(self) -> list[int]:
        """Clients that evaluate a model: the available ones that have not missed a deadline lately."""
        online = self.nodes.available(1, self.stage.deadline)
        return sorted(self.nodes.responsive(online) or online)

    def _aggregate_tests(self, task: int, model: Message) -> Tested:
        """The test metrics of the available clients of a task, by secure aggregation."""
        clients = np.array([client for client in self._evaluators() if self.tasks[client] == task], np.int64)
        new, threshold = np.ones(len(clients), np.bool_), self.stage.survivors(len(clients))
        request = Request(self.rounds_done, clients, [model] * len(clients), np.full(len(clients), -1), new, threshold)
        try:
            check_sum(self.stage, self.rounds_done, len(clients))
            reply = self._aggregate(request, "secure-test", _Exchange.of(request), self.figures[task].shapes)
        except HeadstartError as error:
            log.warning("the model is not evaluated: %s", error)
            return Tested()
        nbytes = int(reply.bytes_up.sum()), int(reply.bytes_down.sum())
        return Tested(self.figures[task].of_sum(reply.values), {}, nbytes)

    def metrics_of(self, task: int, total: Tally) -> tuple[float | None, float | None, Metrics]:
        """Accuracy, loss and the other metrics of the summed counts of a task's clients."""
        figures = self.figures[task]
        return figures.finish(total, self.rounds_done, task) if total else (None, None, figures.metrics({}))

    def _send(
        self, requests: Mapping[int, Content], about: Mapping[str, Any] | None = None, retry: bool = False
    ) -> Iterator[tuple[int, FlowerMessage | str]]:
        """Send requests to nodes; about: what the server's log notes beside the stage and the round; retry: whether
        nodes that leave are waited for."""
        about = {"stage": self.number, "round": self.rounds_done - 1, **(about or {})}
        return self.nodes.send(requests, self.stage.deadline, about, retry)

    def _request(
        self, client: int, message: Message, new: bool, kind: str = "answer", with_setup: bool = True
    ) -> Content:
        key = int(self.tasks[client]), any(states.has(client) for _, states in self.earlier)
        if key not in self._encoded_setups:
            setup = self.setups[key].to_message().to_bytes()
            self._encoded_setups[key] = setup, digest(setup)
        setup, name = self._encoded_setups[key]
        chain = [(self.number, self.states), *self.earlier]
        in_use = [(number, int(states.slots[client]), states.shapes) for number, states in chain]
        facts = {"kind": kind, "client": client, "setup": name, "states": in_use, "new": new}
        if kind in ("evaluate", "secure-test"):
            facts["done"] = self.rounds_done
        return facts, {"message": message.to_bytes()} | (
            {"setup": setup} if with_setup and client not in self._has_setup else {}
        )

    def _read(self, client: int, reply: FlowerMessage | str, with_setup: bool = True) -> tuple[dict[str, Any], bytes]:
        """Facts and bytes of a client's reply; with_setup: whether the request had the setup, if needed."""
        facts, data = read_reply(reply)
        if facts.get("state_lost") is True:  # its next request is that of a new client
            self._has_setup.discard(client)
            for states in (self.states, *(states for _, states in self.earlier)):
                states.slots[client] = -1
            raise StateLostError(reason_of(facts))
        if "error" in facts:
            raise MessageError(reason_of(facts))
        if with_setup:
            self._has_setup.add(client)
        return facts, data

    def _reply(self, client: int, reply: FlowerMessage | str, seconds: float) -> AnyReply:
        who = np.array([client])
        try:
            facts, data = self._read(client, reply)
            passes = count_of(facts)
            message = Message.from_bytes(data)
        except MessageError as error:
            return Failure(who, str(error), (client,) if isinstance(error, StateLostError) else ())
        state = WRITTEN if facts.get("kept") else {}
        sizes = np.array([len(data)]), np.array([passes])
        return Reply(who, message, *sizes, state, int(self.tasks[client]), seconds)


@dataclass(frozen=True, eq=False)
class Tested:
    """Test metrics of clients: their sum, those of each client where nothing hides them, and bytes up and down."""

    total: Tally = field(default_factory=dict)
    each: Mapping[int, Tally] = field(default_factory=dict)
    nbytes: tuple[int, int] = (0, 0)


@dataclass
class _Exchange:
    """What the exchanges of a secure sum cost each client, and who dropped out."""

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

    @classmethod
    def of(cls, request: Request) -> _Exchange:
        """Nothing exchanged yet."""
        numbers = request.clients.tolist()
        up, down, passes = (dict.fromkeys(numbers, 0) for _ in range(3))
        return cls(up, down, passes, len(survivor_levels(len(numbers), request.threshold)))
