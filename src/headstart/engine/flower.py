"""Clients on the nodes of a Flower grid: the same questions, as bytes, over Flower's messages.

A message holds what `wire` makes of the method's message, and a few facts as JSON: who asks, about which stage, as
which client. Of a client's reply, only what its method sends leaves the node; what it keeps stays on the node's disk.
"""

from __future__ import annotations

import json
import logging
import math
import re
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from headstart.channel.fixed import BITS
from headstart.config.recipe import Recipe
from headstart.config.stage import ClosedForm, Rounds
from headstart.core.message import Message
from headstart.engine.begin import Begin, digest
from headstart.engine.node import Asked, ForgottenError, Kept, Node
from headstart.engine.rounds import Bools, Heard, Question, Summed
from headstart.engine.store import ClientStore
from headstart.errors import HeadstartError, MessageError
from headstart.methods import Reply

if TYPE_CHECKING:  # Flower takes seconds to load
    from flwr.app import Message as FlowerMessage
    from flwr.serverapp import Grid

log = logging.getLogger("headstart")

_RECORD = "headstart"
# Between two looks for replies, in seconds: short where nodes answer at once, longer while they work.
_SHORTEST, _LONGEST = 0.02, 0.5
# Between two looks at who is there while nobody answers, and how long a node may take to say who it is.
_ROLL_CALL, _PATIENCE = 5.0, 60.0
_LARGEST_COUNT, _LONGEST_REASON = 10**15, 500


class Nodes:
    """The nodes of a grid, by the number of the client that each answers for."""

    def __init__(self, grid: Grid, recipe: Recipe, numbers: Mapping[str, int]) -> None:
        """numbers: the clients by name."""
        self.grid, self.numbers, self.session = grid, numbers, uuid.uuid4().hex
        self.run = self.session
        """32 hexadecimal digits under which nodes keep what they keep: a run's own, once it has a directory."""
        self.recipe = recipe_digest(recipe)
        self.ids: dict[int, int] = {}
        """The node of each client that has joined."""
        self.said: dict[int, dict[str, Any]] = {}
        """How each introduced itself."""
        self.refusals: dict[str, str] = {}
        """Why a node that is waited for cannot take part, by its name."""
        self._refused: set[tuple[int, str]] = set()
        """Nodes that cannot take part, and since when they are there: one that is started anew is asked again."""

    def present(self, wait_for: int, patience: float | None = None) -> set[int]:
        """Clients whose node is there, once so many are, or none else can come, or so many seconds have passed.

        Nodes that are not known yet are asked who they are.
        """
        until, waited = None if patience is None else time.monotonic() + patience, False
        while True:
            nodes = list(self.grid.get_nodes())
            online = {node.node_id: node.name for node in nodes}
            here = {node.node_id for node in nodes if (node.node_id, node.last_activated_at) not in self._refused}
            strangers = here - set(self.ids.values())
            for node, reply in self.send({node: ({"kind": "join"}, {}) for node in strangers}, _PATIENCE):
                self._meet(node, reply, online)
            present = {client for client, node in self.ids.items() if node in online}
            if len(present) >= wait_for or (until is not None and time.monotonic() > until):
                return present
            if len(self.refusals) >= len(self.numbers):
                raise HeadstartError("no node can take part: " + "; ".join(self.refusals.values()))
            if present and len(present) + len(self.refusals) >= len(self.numbers):
                return present
            if not waited:
                log.warning("waiting for nodes: %d of %d are there", len(present), wait_for)
            waited = True
            time.sleep(_LONGEST)

    def _meet(self, node: int, reply: FlowerMessage | str, online: Mapping[int, str]) -> None:
        """A node says who it is: it is welcome under the name of a client that no other node answers for."""
        registered = name = online[node]
        try:
            said, _ = _read(reply)
            if "error" in said:
                raise MessageError(_reason(said))
            name = str(said.get("name", registered))[:_LONGEST_REASON]
            if name not in self.numbers:
                raise MessageError(f"no client is called {name!r}")
            if registered and registered != name:
                raise MessageError(f"it is registered as {registered!r} and says that it is {name!r}")
            client = self.numbers[name]
            if self.ids.get(client) in online:
                raise MessageError(f"another node answers for {name}")
            if not all(_count(said, key) for key in ("examples", "dim")):
                raise MessageError("it has no training examples")
            self.ids[client], self.said[client] = node, said
            self.refusals.pop(name, None)
        except MessageError as error:
            if not isinstance(reply, str):  # who does not answer is asked again
                self._refused.add((node, self._since().get(node, "")))
                if not registered or registered in self.numbers:  # nobody waits for others
                    self.refusals[registered or name or str(node)] = f"{registered or name or node}: {error}"
            log.warning("a node stays out: %s: %s", registered or node, error)

    def _since(self) -> dict[int, str]:
        """The nodes that are there, and since when."""
        return {node.node_id: node.last_activated_at for node in self.grid.get_nodes()}

    def send(
        self, questions: Mapping[int, tuple[dict[str, Any], dict[str, bytes]]], patience: float | None
    ) -> Iterator[tuple[int, FlowerMessage | str]]:
        """Send facts and bytes to nodes; yields each node with its reply, or with the reason why there is none."""
        from flwr.app import ConfigRecord, RecordDict
        from flwr.app import Message as FlowerMessage

        about = {"session": self.session, "run": self.run, "recipe": self.recipe, "version": _version()}
        messages = []
        for node, (facts, parts) in questions.items():
            record = ConfigRecord({"facts": json.dumps(about | facts), **parts})
            messages.append(FlowerMessage(RecordDict({_RECORD: record}), node, "query"))
        since = self._since() if messages else {}
        waiting: dict[str, int] = {}
        for message, node in zip(self.grid.push_messages(messages), questions, strict=True):
            if message:
                waiting[message] = node
            else:
                yield node, "the node has left"
        del messages
        began, pause, looked = time.monotonic(), _SHORTEST, time.monotonic()
        while waiting:
            replies = list(self.grid.pull_messages(list(waiting)))
            for reply in replies:
                if (asked := reply.metadata.reply_to_message_id) in waiting:
                    yield waiting.pop(asked), reply
            pause = _SHORTEST if replies else min(1.5 * pause, _LONGEST)
            now = time.monotonic()
            if patience is not None and now - began > patience:
                for node in waiting.values():
                    yield node, f"no answer within {patience:g} s"
                return
            if waiting and now - looked > _ROLL_CALL:
                looked, there = now, self._since()
                for message, node in list(waiting.items()):
                    if there.get(node) != since.get(node):  # what a node had taken is not given to it again
                        del waiting[message]
                        yield node, "the node was started anew" if node in there else "the node has left"
            if waiting:
                time.sleep(pause)


@dataclass(eq=False)
class FlowerClients:
    """The clients of a stage, each on its node.

    tasks: [K] the task of each; begins: for a task, and whether the client has something of its own from the stage
    before, what it is told of the stage; earlier: stores of the stages that this one goes on from.
    """

    nodes: Nodes
    stage: ClosedForm | Rounds
    number: int
    tasks: np.ndarray
    begins: Mapping[tuple[int, bool], Begin]
    store: ClientStore
    earlier: Sequence[tuple[int, ClientStore]]
    _told: dict[tuple[int, bool], tuple[bytes, str]] = field(default_factory=dict)
    _know: set[int] = field(default_factory=set)
    """Clients that have what the stage begins with, as this process knows."""
    _played: int = 0
    """Rounds behind the model, the one under way included."""

    def present(self) -> Bools:
        """Clients whose node is there, once there are as many as the stage needs."""
        present = np.zeros(len(self.tasks), np.bool_)
        present[list(self.nodes.present(min(self.stage.min_replies, len(self.tasks))))] = True
        return present

    def ask(self, question: Question) -> Iterator[Heard]:
        """All at once; what has come is passed on in the order of the clients, so that sums do not depend on speed."""
        asked, self._played = {}, question.round + 1
        for client, message, new in zip(question.clients.tolist(), question.messages, question.new, strict=True):
            asked[self.nodes.ids[client]] = self._question(client, message, bool(new))
        clients, began = {self.nodes.ids[int(client)]: int(client) for client in question.clients}, time.monotonic()
        order, ready = [int(client) for client in question.clients], dict[int, Heard]()
        for node, reply in self.nodes.send(asked, self.stage.deadline):
            client = clients[node]
            ready[client] = self._heard(client, reply, time.monotonic() - began)
            while order and order[0] in ready:
                yield ready.pop(order.pop(0))

    def add_up(self, question: Question, threshold: int, shapes: Mapping[str, tuple[int, ...]]) -> Summed:
        """The protocol of `channel.secure`, an exchange after the other; who does not answer is left behind."""
        from headstart.channel.secure import SecureSum

        numbers = question.clients.tolist()
        nodes = {client: self.nodes.ids[client] for client in numbers}
        clients = {node: client for client, node in nodes.items()}
        sent = dict(zip(numbers, zip(question.messages, question.new.tolist(), strict=True), strict=True))
        up, down, passes = (dict.fromkeys(numbers, 0) for _ in range(3))
        server = SecureSum(uuid.uuid4().bytes, numbers, threshold, shapes, BITS)
        dropped: dict[int, str] = {}
        kept, forgot = set[int](), set[int]()
        self._played = question.round + 1
        while server.step:
            asked = {}
            for client, told in server.instructions().items():
                message, new = sent[client] if server.step == "masked" else (Message(), False)
                facts, parts = self._question(client, message, new, "secure", server.step == "keys")
                parts["told"] = told.to_bytes()
                down[client] += len(parts["told"])
                asked[nodes[client]] = facts, parts
            for node, reply in self.nodes.send(asked, self.stage.deadline):
                client = clients[node]
                try:
                    facts, data = self._said(client, reply, server.step == "keys")
                    up[client] += len(data)
                    server.receive(client, Message.from_bytes(data))
                    passes[client] += _count(facts)
                    kept |= {client} if facts.get("kept") else set()
                except MessageError as error:
                    dropped[client] = str(error)
                    forgot |= {client} if isinstance(error, ForgottenError) else set()
            server.next()
        heard = set(server.heard)
        why = {client: dropped.get(client, f"no answer in step {step}") for client, step in server.dropped().items()}
        return Summed(
            np.array(sorted(heard)),
            {client: reason for client, reason in why.items() if client not in heard},
            server.total(),
            np.array([up[client] for client in numbers]),
            np.array([down[client] for client in numbers]),
            np.array([passes[client] for client in numbers]),
            np.array(sorted(kept & heard), np.int64),
            sorted(forgot),
        )

    def keep(self, reply: Reply) -> None:
        """The client has written what it keeps where it is not in use; that counts now."""
        if reply.kept:
            self.store.accept(int(reply.clients[0]))

    def examine(self, models: Sequence[Message]) -> dict[int, dict[str, Any]]:
        """How good a model is at each client that is there; models: of each task."""
        if self.stage.protected:  # they would refuse
            return {}
        asked, clients = {}, {node: client for client, node in self.nodes.ids.items()}
        for client in sorted(self.nodes.present(1)):
            asked[self.nodes.ids[client]] = self._question(client, models[int(self.tasks[client])], True, "examine")
        found = {}
        for node, reply in self.nodes.send(asked, self.stage.deadline):
            try:
                facts, _ = self._said(clients[node], reply)
                loss = facts.get("loss")
                examples, right, known = (_count(facts, name) for name in ("examples", "right", "known"))
                if right > examples or known > examples or not isinstance(loss, float) or not math.isfinite(loss):
                    raise MessageError("its figures make no sense")
                found[clients[node]] = facts
            except MessageError as error:
                log.warning("client %d does not test the model: %s", clients[node], error)
        return found

    def _question(
        self, client: int, message: Message, new: bool, kind: str = "answer", tell: bool = True
    ) -> tuple[dict[str, Any], dict[str, bytes]]:
        key = int(self.tasks[client]), any(store.has(client) for _, store in self.earlier)
        if key not in self._told:
            begin = self.begins[key].to_message().to_bytes()
            self._told[key] = begin, digest(begin)
        begin, name = self._told[key]
        chain = [(self.number, self.store), *self.earlier]
        kept = [(number, int(store.slots[client]), store.shapes) for number, store in chain]
        facts = {"kind": kind, "client": client, "begin": name, "kept": kept, "new": new}
        if kind == "examine":
            facts["done"] = self._played
        return facts, {"message": message.to_bytes()} | ({"begin": begin} if tell and client not in self._know else {})

    def _said(self, client: int, reply: FlowerMessage | str, told: bool = True) -> tuple[dict[str, Any], bytes]:
        """Facts and bytes of a client's reply; told: whether what the stage begins with was sent where it had to be."""
        facts, data = _read(reply)
        if facts.get("forgotten") is True:  # next time it is asked as if it had never kept anything
            self._know.discard(client)
            for store in (self.store, *(store for _, store in self.earlier)):
                store.slots[client] = -1
            raise ForgottenError(_reason(facts))
        if "error" in facts:
            raise MessageError(_reason(facts))
        if told:
            self._know.add(client)
        return facts, data

    def _heard(self, client: int, reply: FlowerMessage | str, seconds: float) -> Heard:
        who = np.array([client])
        try:
            facts, data = self._said(client, reply)
            passes = _count(facts)
            message = Message.from_bytes(data)
        except MessageError as error:
            return Heard(who, None, seconds, str(error), isinstance(error, ForgottenError))
        kept = {"": np.zeros(0, np.float32)} if facts.get("kept") else {}  # what it is, only the node knows
        sizes = np.array([len(data)]), np.array([passes])
        return Heard(who, Reply(who, message, *sizes, kept, int(self.tasks[client])), seconds)


def _count(facts: Mapping[str, Any], name: str = "passes") -> int:
    """A number of examples that a client tells; by default, how many went through its body."""
    count = facts.get(name)
    if type(count) is not int or not 0 <= count <= _LARGEST_COUNT:
        raise MessageError(f"the reply does not say how many {name} there were")
    return count


def _reason(facts: Mapping[str, Any]) -> str:
    """What a node says went wrong: a short line of printable characters, whoever wrote it."""
    text = " ".join(str(facts["error"])[:_LONGEST_REASON].split())
    return "".join(character if character.isprintable() else "?" for character in text)


def respond(message: FlowerMessage, node: Node, name: str) -> FlowerMessage:
    """What a node says to a message; a mistake or a fault becomes an answer that says so."""
    facts: dict[str, Any]
    parts: dict[str, bytes] = {}
    try:
        asked, given = _facts(message)
        _check_same(asked, node.recipe)
        if asked.get("kind") == "join":
            facts = {"name": name, **node.introduction()}
        else:
            if "begin" in given:
                node.remember(given["begin"])
            if asked.get("kind") == "examine":
                return _reply(message, node.examine(_asked(asked, given)), {})
            if asked.get("kind") == "secure":
                facts, told = node.add(_asked(asked, given), Message.from_bytes(given.get("told", b"")))
                return _reply(message, facts, {"message": told.to_bytes()})
            reply = node.answer(_asked(asked, given))
            facts = {"passes": int(reply.forward_passes[0]), "kept": bool(reply.kept)}
            parts = {"message": reply.message.to_bytes()}
    except ForgottenError as error:
        facts = {"error": str(error), "forgotten": True}
    except HeadstartError as error:
        facts = {"error": str(error)}
    except Exception as error:  # a node that fails is left out of the round; it does not fail silently
        facts = {"error": f"the node failed: {type(error).__name__}: {error}"}
    return _reply(message, facts, parts)


def run_of(message: FlowerMessage) -> str:
    """The run that a message is about, as the name of a folder."""
    facts, _ = _facts(message)
    run = facts.get("run")
    if not isinstance(run, str) or not re.fullmatch("[0-9a-f]{32}", run):
        raise MessageError("the server does not say which run it asks for")
    return run


def refuse(message: FlowerMessage, why: str) -> FlowerMessage:
    """The answer of a node that cannot take part."""
    return _reply(message, {"error": why}, {})


def _reply(message: FlowerMessage, facts: dict[str, Any], parts: dict[str, bytes]) -> FlowerMessage:
    from flwr.app import ConfigRecord, RecordDict
    from flwr.app import Message as FlowerMessage

    return FlowerMessage(RecordDict({_RECORD: ConfigRecord({"facts": json.dumps(facts), **parts})}), reply_to=message)


def _check_same(asked: Mapping[str, Any], recipe: Recipe) -> None:
    """Refuse a server that is another version of this package, or that runs another recipe."""
    if asked.get("version") != _version():
        raise HeadstartError(f"the node runs headstart {_version()}, the server {asked.get('version')}")
    if asked.get("recipe") != recipe_digest(recipe):
        raise HeadstartError("the server runs another recipe than the node was given")


def _asked(facts: Mapping[str, Any], given: Mapping[str, bytes]) -> Asked:
    try:
        kept: Kept = [
            (int(number), int(slot), {str(n): tuple(shape) for n, shape in shapes.items()})
            for number, slot, shapes in facts["kept"]
        ]
        message = Message.from_bytes(given["message"])
        asked = str(facts["session"]), int(facts["client"]), str(facts["begin"]), kept, bool(facts["new"]), message
        done = int(facts.get("done", 0))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise MessageError(f"the server asks in an unknown way: {error!r}") from None
    return Asked(*asked, done)


def _read(reply: FlowerMessage | str) -> tuple[dict[str, Any], bytes]:
    """Facts and bytes of a reply; one that is none is refused."""
    if isinstance(reply, str):
        return {"error": reply}, b""
    if reply.has_error():
        reason = re.sub(r"\x1b\[[0-9;]*m", "", str(reply.error.reason or reply.error.code))
        return {"error": f"Flower: {reason.strip()[-300:]}"}, b""  # the cause is at the end
    facts, parts = _facts(reply)
    return facts, parts.get("message", b"")


def _facts(message: FlowerMessage) -> tuple[dict[str, Any], dict[str, bytes]]:
    """The facts and the parts of a message of ours."""
    try:
        record = dict(message.content.config_records[_RECORD])
        facts = json.loads(str(record.pop("facts")))
    except (KeyError, ValueError, RecursionError) as error:
        raise MessageError(f"not a message of headstart: {error!r}") from None
    if not isinstance(facts, dict) or not all(isinstance(part, bytes) for part in record.values()):
        raise MessageError("not a message of headstart: its parts are of other kinds")
    return facts, record  # type: ignore[return-value]


def recipe_digest(recipe: Recipe) -> str:
    """The same for the same recipe, however it is written."""
    return digest(recipe.to_toml().encode())


def _version() -> str:
    from importlib.metadata import version

    return version("headstart")
