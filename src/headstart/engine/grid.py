"""The nodes of a Flower grid: which are available, the requests they are sent, and their replies."""

from __future__ import annotations

import json
import logging
import time
import uuid
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from headstart.config.recipe import Recipe
from headstart.core.statistics import Ints
from headstart.engine.flower_messages import (
    LONGEST_REASON,
    RECORD,
    count_of,
    is_unavailable,
    package_version,
    read_reply,
    reason_of,
    recipe_digest,
)
from headstart.engine.server_log import Content, ServerLog
from headstart.errors import HeadstartError, MessageError, listed

if TYPE_CHECKING:  # Flower takes seconds to load
    from flwr.app import Message as FlowerMessage
    from flwr.serverapp import Grid

    from headstart.engine.shared_nodes import SharedNodes

log = logging.getLogger("headstart")

# Between two looks for replies: a twentieth of the time since the last one, within these seconds.
_SHARE, _SHORTEST, _LONGEST = 1 / 20, 0.02, 0.5
# Seconds: between two looks at which nodes are connected while no reply comes, how long a node may take to join, and
# between two lines about the nodes that are waited for, the first of which leaves connected nodes time to reply.
_REFRESH, _JOIN_TIMEOUT, _REPORT, _JOINING = 5.0, 60.0, 30.0, 10.0
# A node that has missed a deadline is sampled again in the third round after.
_PAUSE = 3
LARGEST_DIM = 65_536
_JOIN: Content = ({"kind": "join"}, {})
_ALIKE = {"dim": "the length of its features", "weights": "the digest of its backbone's weights"}


class Nodes:
    """The nodes of a grid, by the number of the client that each represents."""

    def __init__(
        self, grid: Grid | SharedNodes, recipe: Recipe, numbers: Mapping[str, int], audit: ServerLog | None = None
    ) -> None:
        """numbers: the clients by name; audit: the log of all requests and replies."""
        self.grid, self.numbers, self.audit, self.session = grid, numbers, audit, uuid.uuid4().hex
        self.run = self.session
        """32 hexadecimal digits under which nodes keep what they keep: a run's own, once it has a directory."""
        self.recipe = recipe_digest(recipe)
        self.ids: dict[int, int] = {}
        """The node of each client that has joined."""
        self.node_info: dict[int, dict[str, Any]] = {}
        """What the node of each client replied when it joined."""
        self.refusals: dict[str, str] = {}
        """Why a node that is waited for is excluded, by its name."""
        self.agreed: dict[str, Any] = {}
        """What all nodes must have in common, once that is settled."""
        self.tasks = recipe.task_names if recipe.tasks else ()
        self.members: Ints | None = None
        """[K] The task of each client, once a run with several has begun; -1 for one whose node had not joined."""
        self.stragglers: dict[int, int] = {}
        """Nodes that have missed a deadline, and for how many rounds they are not sampled."""
        self._refused: set[tuple[int, str]] = set()
        """Nodes that are excluded, and since when they are connected: one that is started anew may join again."""
        self._pending: dict[str, tuple[int, str, float]] = {}
        """Join requests without a reply yet: the node, since when it is connected, and when the request was sent."""
        self._online: dict[int, str] = {}
        self._absent_since: dict[int, float] = {}
        """Clients that are absent, and since when."""

    def available(self, wait_for: int, timeout: float | None = None) -> set[int]:
        """Clients whose node is connected, once so many are, or no others can come, or so many seconds have passed.

        Nodes that are not known yet are sent a join request; its reply is waited for only where more are needed.
        """
        began, reported = time.monotonic(), -_REPORT
        while True:
            available, waited = self._refresh(wait_for), time.monotonic() - began
            if len(available) >= wait_for:
                return available
            if timeout is not None and waited > timeout:
                log.warning("continuing without %s", self.named_absences())
                return available
            if len(self.refusals) >= len(self.numbers):
                raise self._no_participants()
            if available and len(available) + len(self.refusals) >= len(self.numbers):
                return available
            joining = self._pending and waited < _JOINING
            if waited - reported >= _REPORT and not joining:
                reported = waited
                counts, missing = (len(available), wait_for), self.named_absences()
                log.warning("waiting for nodes: %d of %d are available; missing: %s", *counts, missing)
            time.sleep(_LONGEST)

    def _no_participants(self) -> HeadstartError:
        reasons: dict[str, list[str]] = {}
        for name, text in self.refusals.items():
            reasons.setdefault(text.removeprefix(f"{name}: "), []).append(name)
        lines = [f"{listed(names)}: {why}" for why, names in reasons.items()]
        return HeadstartError("no node can participate: " + "; ".join(lines))

    def _refresh(self, wait_for: int) -> set[int]:
        """Clients whose node is connected now; unknown nodes are sent a join request, read where more are needed."""
        since = {node.node_id: (node.name, node.last_activated_at) for node in self.grid.get_nodes()}
        self._online = {node: name for node, (name, _) in since.items()}
        sent = self._request_joins({node: activated for node, (_, activated) in since.items()})
        if self._pending and (sent or len(self._available()) < wait_for):
            for reply in self.grid.pull_messages(list(self._pending)):
                self._receive_join(reply)
        available = self._available()
        for client in self.numbers.values():
            if client in available:
                self._absent_since.pop(client, None)
            else:
                self._absent_since.setdefault(client, time.time())
        return available

    def _available(self) -> set[int]:
        return {client for client, node in self.ids.items() if node in self._online}

    def _request_joins(self, since: Mapping[int, str]) -> bool:
        """Send join requests to unknown nodes, without waiting; returns whether there were any."""
        now = time.monotonic()
        for message, (node, activated, sent) in list(self._pending.items()):
            if since.get(node) != activated or now - sent > _JOIN_TIMEOUT:
                del self._pending[message]
                if since.get(node) == activated:
                    log.warning(
                        "a node is excluded: %s: no reply within %g s", self._online[node] or node, _JOIN_TIMEOUT
                    )
        known = {*self.ids.values(), *(node for node, _, _ in self._pending.values())}
        unknown = [node for node, at in since.items() if node not in known and (node, at) not in self._refused]
        for node, message in self._push(dict.fromkeys(unknown, _JOIN), {}):
            if message:
                self._pending[message] = node, since[node], now
        return bool(unknown)

    def _receive_join(self, reply: FlowerMessage) -> bool:
        """Take the reply to a join request; returns whether it was one."""
        if (message := reply.metadata.reply_to_message_id) not in self._pending:
            return False
        node, since, _ = self._pending.pop(message)
        if node in self._online:
            self._log_reply(node, _JOIN, reply, {})
            self._admit(node, since, reply)
        return True

    def _admit(self, node: int, since: str, reply: FlowerMessage) -> None:
        """Admit a node under the name of a client that no other node represents, or exclude it."""
        registered = name = self._online[node]
        try:
            info, _ = read_reply(reply)
            if "error" in info:
                raise MessageError(reason_of(info))
            name = str(info.get("name", registered))[:LONGEST_REASON]
            if name not in self.numbers:
                raise MessageError(f"no client is called {name!r}")
            if registered and registered != name:
                raise MessageError(f"it is registered as {registered!r} and says that it is {name!r}")
            client = self.numbers[name]
            if self.ids.get(client) in self._online:
                raise MessageError(f"another node represents {name}")
            if not all(count_of(info, key) for key in ("examples", "dim")):
                raise MessageError("it has no training examples")
            self._check_alike(info)
            self._check_member(client, info)
            self.ids[client], self.node_info[client] = node, info
            self.refusals.pop(name, None)
        except MessageError as error:
            self._exclude(node, since, registered or name, error)

    def _exclude(self, node: int, since: str, name: str, error: MessageError) -> None:
        self._refused.add((node, since))
        if not self._online.get(node) or name in self.numbers:  # others are not waited for
            self.refusals[name or str(node)] = f"{name or node}: {error}"
        log.warning("a node is excluded: %s: %s", self._online.get(node) or node, error)

    def _check_alike(self, info: Mapping[str, Any]) -> None:
        """Refuse a node that has another backbone, or features of another length, than the others."""
        if info["dim"] > LARGEST_DIM:
            raise MessageError(f"{_ALIKE['dim']} is {info['dim']}, and {LARGEST_DIM} is the most")
        if not isinstance(info.get("weights"), str | None) or len(info.get("weights") or "") > LONGEST_REASON:
            raise MessageError(f"{_ALIKE['weights']} is none")
        if self.agreed and self.tasks and info.get("task") not in self.tasks:
            task = reason_of({"error": info.get("task")})
            raise MessageError(f"its task is {task!r}, and the recipe's are {', '.join(self.tasks)}")
        for key, value in self.agreed.items():
            if info.get(key) != value:
                found = reason_of({"error": info.get(key)})
                raise MessageError(f"{_ALIKE[key]} is {found}, and the federation's is {value}")

    def task_of(self, client: int) -> int:
        """The number of the task of a client's node; -1 for a client whose node has not joined."""
        return self.tasks.index(self.node_info[client]["task"]) if client in self.node_info else -1

    def _check_member(self, client: int, info: Mapping[str, Any]) -> None:
        """Refuse a node with another task than it had when the run began."""
        if self.members is None or (task := int(self.members[client])) == self.tasks.index(info["task"]):
            return
        if task < 0:
            raise MessageError("the run began before it had joined; it takes part once the run is started again")
        raise MessageError(f"its task is {info['task']!r}, and was {self.tasks[task]!r} when the run began")

    def agree(self, known: Mapping[str, Any]) -> None:
        """Settle what all nodes must have in common, by what the server knows or else by the majority of those that
        have joined; the others are excluded."""
        self.agreed = {key: known[key] if key in known else self._majority(key) for key in _ALIKE}
        self._check_all()

    def begin(self, members: Ints | None) -> None:
        """From now on a node has the task that its client has in the run; others are excluded."""
        self.members = members
        self._check_all()

    def _check_all(self) -> None:
        """Exclude nodes that have joined and differ from what is settled."""
        names, since = {number: name for name, number in self.numbers.items()}, self._since()
        for client, info in list(self.node_info.items()):
            try:
                self._check_alike(info)
                self._check_member(client, info)
            except MessageError as error:
                node = self.ids.pop(client)
                del self.node_info[client]
                self._absent_since.setdefault(client, time.time())
                self._exclude(node, since.get(node, ""), names[client], error)
        if not self.node_info:
            raise self._no_participants()

    def _majority(self, key: str) -> Any:
        counts = Counter(info.get(key) for info in self.node_info.values()).most_common(2)
        if len(counts) > 1 and counts[0][1] == counts[1][1]:
            names = {number: name for name, number in self.numbers.items()}
            values = ", ".join(f"{names[client]}: {info.get(key)}" for client, info in sorted(self.node_info.items()))
            raise HeadstartError(
                f"nodes do not agree on {_ALIKE[key].replace('its', 'the')}, without a majority: {values}"
            )
        return counts[0][0]

    def absences(self) -> dict[int, str]:
        """Since when each absent client is absent, and why."""
        found = {}
        for name, client in self.numbers.items():
            if client in self._absent_since:
                why = "the node has left" if client in self.ids else "no node has joined"
                if name in self._online.values() and client not in self.ids:
                    why = "the node has not replied to the join request"
                if name in self.refusals:
                    why = self.refusals[name].removeprefix(f"{name}: ")
                since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self._absent_since[client]))
                found[client] = f"absent since {since}: {why}"
        return found

    def named_absences(self) -> str:
        """The absent clients by name, with the reasons."""
        names = {number: name for name, number in self.numbers.items()}
        return "; ".join(f"{names[client]} ({why})" for client, why in self.absences().items()) or "none"

    def responsive(self, available: set[int]) -> set[int]:
        """Those of the available clients whose node has not missed a deadline lately."""
        return {client for client in available if self.stragglers.get(self.ids[client], 0) <= 0}

    def _since(self) -> dict[int, str]:
        """The connected nodes, and since when."""
        return {node.node_id: node.last_activated_at for node in self.grid.get_nodes()}

    def _log_reply(self, node: int, request: Content, reply: FlowerMessage | str, about: Mapping[str, Any]) -> None:
        """Write a reply into the server's log."""
        if self.audit is not None:
            self.audit.replied(self._name(node), request, reply, {"run": self.run, "recipe": self.recipe, **about})

    def _name(self, node: int) -> str:
        return self._online.get(node) or str(node)

    def _push(self, requests: Mapping[int, Content], about: Mapping[str, Any]) -> list[tuple[int, str]]:
        """Send requests to nodes; each node with the id of its message, empty where it has left."""
        from flwr.app import ConfigRecord, RecordDict
        from flwr.app import Message as FlowerMessage

        if self.audit is not None:
            named = [(self._name(node), request) for node, request in requests.items()]
            self.audit.asked(named, {"run": self.run, "recipe": self.recipe, **about})
        whose = {"session": self.session, "run": self.run, "recipe": self.recipe, "version": package_version()}
        messages = []
        for node, (facts, parts) in requests.items():
            record = ConfigRecord({"facts": json.dumps(whose | facts), **parts})
            messages.append(FlowerMessage(RecordDict({RECORD: record}), node, "query"))
        names = list(self.grid.push_messages(messages)) if messages else []
        return list(zip(requests, names, strict=True))

    def send(
        self, requests: Mapping[int, Content], timeout: float | None, about: Mapping[str, Any], retry: bool = False
    ) -> Iterator[tuple[int, FlowerMessage | str]]:
        """Send requests to nodes; yields each node with its reply, or with the reason why there is none.

        about: what the server's log says of it, the stage and the round; retry: whether a node that leaves before it
        has replied is waited for, and sent the request once more when it is back.
        """
        for node, reply in self._replies(requests, timeout, about, retry):
            self._log_reply(node, requests[node], reply, about)
            yield node, reply

    def _replies(
        self, requests: Mapping[int, Content], timeout: float | None, about: Mapping[str, Any], retry: bool
    ) -> Iterator[tuple[int, FlowerMessage | str]]:
        since = self._since() if requests else {}
        waiting: dict[str, int] = {}
        left: dict[int, FlowerMessage | str] = {}
        for node, message in self._push(requests, about):
            if message:
                waiting[message] = node
            else:
                left[node] = "the node has left"
        began = last = looked = time.monotonic()
        while waiting or left:
            if not retry:
                yield from left.items()
                left.clear()
            pulled = time.monotonic()
            replies = list(self.grid.pull_messages([*waiting, *self._pending]))
            for reply in replies:
                if not self._receive_join(reply) and (message := reply.metadata.reply_to_message_id) in waiting:
                    node = waiting.pop(message)
                    if is_unavailable(reply):
                        left[node] = reply
                    else:
                        self.stragglers.pop(node, None)
                        yield node, reply
            now = time.monotonic()
            last = now if replies else last
            if timeout is not None and now - began > timeout:
                for node in waiting.values():
                    self.stragglers[node] = _PAUSE
                    yield node, f"no reply within {timeout:g} s"
                yield from left.items()
                return
            if (waiting or left) and now - looked > _REFRESH:
                looked, there = now, self._since()
                for message, node in list(waiting.items()):
                    if there.get(node) != since.get(node):  # what a node had taken is not given to it again
                        del waiting[message]
                        left[node] = "the node was started anew" if node in there else "the node has left"
                if retry:
                    since |= there
                    waiting |= self._resend({node: requests[node] for node in left if node in there}, about, left)
            if waiting or (left and retry):
                # A SuperLink that waits for replies has waited in this one's place.
                time.sleep(max(0.0, min(_LONGEST, max(_SHORTEST, _SHARE * (now - last))) - (now - pulled)))

    def _resend(
        self, requests: Mapping[int, Content], about: Mapping[str, Any], left: dict[int, Any]
    ) -> dict[str, int]:
        """Send requests once more to nodes that had left; returns the messages that are waited for."""
        waiting = {message: node for node, message in self._push(requests, about) if message}
        for node in waiting.values():
            del left[node]
        return waiting
