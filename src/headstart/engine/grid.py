"""The nodes of a Flower grid: who is there, what is sent to them, and what comes back."""

from __future__ import annotations

import json
import logging
import time
import uuid
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from headstart.config.recipe import Recipe
from headstart.engine.flower_messages import (
    LONGEST_REASON,
    RECORD,
    count_of,
    package_version,
    read_reply,
    reason_of,
    recipe_digest,
)
from headstart.errors import HeadstartError, MessageError

if TYPE_CHECKING:  # Flower takes seconds to load
    from flwr.app import Message as FlowerMessage
    from flwr.serverapp import Grid

log = logging.getLogger("headstart")

# Between two looks for replies: a twentieth of the time since the last one, within these seconds.
_SHARE, _SHORTEST, _LONGEST = 1 / 20, 0.02, 0.5
# Between two looks at who is there while nobody answers, and how long a node may take to say who it is.
_ROLL_CALL, _PATIENCE = 5.0, 60.0


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

    def available(self, wait_for: int, patience: float | None = None) -> set[int]:
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
            said, _ = read_reply(reply)
            if "error" in said:
                raise MessageError(reason_of(said))
            name = str(said.get("name", registered))[:LONGEST_REASON]
            if name not in self.numbers:
                raise MessageError(f"no client is called {name!r}")
            if registered and registered != name:
                raise MessageError(f"it is registered as {registered!r} and says that it is {name!r}")
            client = self.numbers[name]
            if self.ids.get(client) in online:
                raise MessageError(f"another node answers for {name}")
            if not all(count_of(said, key) for key in ("examples", "dim")):
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

        about = {"session": self.session, "run": self.run, "recipe": self.recipe, "version": package_version()}
        messages = []
        for node, (facts, parts) in questions.items():
            record = ConfigRecord({"facts": json.dumps(about | facts), **parts})
            messages.append(FlowerMessage(RecordDict({RECORD: record}), node, "query"))
        since = self._since() if messages else {}
        waiting: dict[str, int] = {}
        for message, node in zip(self.grid.push_messages(messages), questions, strict=True):
            if message:
                waiting[message] = node
            else:
                yield node, "the node has left"
        del messages
        began = last = looked = time.monotonic()
        while waiting:
            asked = time.monotonic()
            replies = list(self.grid.pull_messages(list(waiting)))
            for reply in replies:
                if (message := reply.metadata.reply_to_message_id) in waiting:
                    yield waiting.pop(message), reply
            now = time.monotonic()
            last = now if replies else last
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
                # A SuperLink that waits for replies has waited in this one's place.
                time.sleep(max(0.0, min(_LONGEST, max(_SHORTEST, _SHARE * (now - last))) - (now - asked)))
