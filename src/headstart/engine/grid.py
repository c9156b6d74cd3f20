"""The nodes of a Flower grid: who is there, what is sent to them, and what comes back."""

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
from headstart.engine.server_log import Question, ServerLog
from headstart.errors import HeadstartError, MessageError

if TYPE_CHECKING:  # Flower takes seconds to load
    from flwr.app import Message as FlowerMessage
    from flwr.serverapp import Grid

log = logging.getLogger("headstart")

# Between two looks for replies: a twentieth of the time since the last one, within these seconds.
_SHARE, _SHORTEST, _LONGEST = 1 / 20, 0.02, 0.5
# Between two looks at who is there while nobody answers, how long a node may take to say who it is, and between two
# lines that say whom the server waits for.
_ROLL_CALL, _PATIENCE, _TELL = 5.0, 60.0, 30.0
# A node that has missed a deadline is asked again in the third round after.
_AGAIN = 3
LARGEST_DIM = 65_536
_JOIN: Question = ({"kind": "join"}, {})
_ALIKE = {"dim": "the length of its features", "weights": "the digest of its backbone's weights"}


class Nodes:
    """The nodes of a grid, by the number of the client that each answers for."""

    def __init__(self, grid: Grid, recipe: Recipe, numbers: Mapping[str, int], audit: ServerLog | None = None) -> None:
        """numbers: the clients by name; audit: where all that is asked and all that comes back is noted."""
        self.grid, self.numbers, self.audit, self.session = grid, numbers, audit, uuid.uuid4().hex
        self.run = self.session
        """32 hexadecimal digits under which nodes keep what they keep: a run's own, once it has a directory."""
        self.recipe = recipe_digest(recipe)
        self.ids: dict[int, int] = {}
        """The node of each client that has joined."""
        self.said: dict[int, dict[str, Any]] = {}
        """How each introduced itself."""
        self.refusals: dict[str, str] = {}
        """Why a node that is waited for cannot take part, by its name."""
        self.agreed: dict[str, Any] = {}
        """What all nodes have to say alike, once that is settled."""
        self.tasks = recipe.task_names if recipe.tasks else ()
        self.members: Ints | None = None
        """[K] The task of each client, once a run with several has begun; -1 for one that had not said which."""
        self.late: dict[int, int] = {}
        """Nodes that have missed a deadline, and in how many rounds they are asked again."""
        self._refused: set[tuple[int, str]] = set()
        """Nodes that cannot take part, and since when they are there: one that is started anew is asked again."""
        self._joins: dict[str, tuple[int, str, float]] = {}
        """Questions who a node is that have no answer yet: the node, since when it is there, and when it was asked."""
        self._online: dict[int, str] = {}
        self._gone: dict[int, float] = {}
        """Clients that are not there, and since when."""

    def available(self, wait_for: int, patience: float | None = None) -> set[int]:
        """Clients whose node is there, once so many are, or none else can come, or so many seconds have passed.

        Nodes that are not known yet are asked who they are; nobody waits for their answer who does not need it.
        """
        began, told = time.monotonic(), -_TELL
        while True:
            present, waited = self._roll_call(wait_for), time.monotonic() - began
            if len(present) >= wait_for:
                return present
            if patience is not None and waited > patience:
                log.warning("going on without %s", self.named_absences())
                return present
            if len(self.refusals) >= len(self.numbers):
                raise self._nobody()
            if present and len(present) + len(self.refusals) >= len(self.numbers):
                return present
            if waited - told >= _TELL:
                told = waited
                log.warning(
                    "waiting for nodes: %d of %d are there; missing: %s", len(present), wait_for, self.named_absences()
                )
            time.sleep(_LONGEST)

    def _nobody(self) -> HeadstartError:
        return HeadstartError("no node can take part: " + "; ".join(self.refusals.values()))

    def _roll_call(self, wait_for: int) -> set[int]:
        """Clients whose node is there now; who is not known is asked, and heard where more are needed."""
        since = {node.node_id: (node.name, node.last_activated_at) for node in self.grid.get_nodes()}
        self._online = {node: name for node, (name, _) in since.items()}
        asked = self._ask_strangers({node: activated for node, (_, activated) in since.items()})
        if self._joins and (asked or len(self._present()) < wait_for):
            for reply in self.grid.pull_messages(list(self._joins)):
                self._hear(reply)
        present = self._present()
        for client in self.numbers.values():
            if client in present:
                self._gone.pop(client, None)
            else:
                self._gone.setdefault(client, time.time())
        return present

    def _present(self) -> set[int]:
        return {client for client, node in self.ids.items() if node in self._online}

    def _ask_strangers(self, since: Mapping[int, str]) -> bool:
        """Ask nodes that are not known who they are, without waiting; returns whether there were any."""
        now = time.monotonic()
        for message, (node, activated, asked) in list(self._joins.items()):
            if since.get(node) != activated or now - asked > _PATIENCE:
                del self._joins[message]
                if since.get(node) == activated:
                    log.warning("a node stays out: %s: no answer within %g s", self._online[node] or node, _PATIENCE)
        known = {*self.ids.values(), *(node for node, _, _ in self._joins.values())}
        strangers = [node for node, at in since.items() if node not in known and (node, at) not in self._refused]
        for node, message in self._push(dict.fromkeys(strangers, _JOIN), {}):
            if message:
                self._joins[message] = node, since[node], now
        return bool(strangers)

    def _hear(self, reply: FlowerMessage) -> bool:
        """Take a reply that says who a node is; returns whether it was one."""
        if (message := reply.metadata.reply_to_message_id) not in self._joins:
            return False
        node, since, _ = self._joins.pop(message)
        if node in self._online:
            self._note(node, _JOIN, reply, {})
            self._meet(node, since, reply)
        return True

    def _meet(self, node: int, since: str, reply: FlowerMessage) -> None:
        """A node says who it is: it is welcome under the name of a client that no other node answers for."""
        registered = name = self._online[node]
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
            if self.ids.get(client) in self._online:
                raise MessageError(f"another node answers for {name}")
            if not all(count_of(said, key) for key in ("examples", "dim")):
                raise MessageError("it has no training examples")
            self._check_alike(said)
            self._check_member(client, said)
            self.ids[client], self.said[client] = node, said
            self.refusals.pop(name, None)
        except MessageError as error:
            self._stay_out(node, since, registered or name, error)

    def _stay_out(self, node: int, since: str, name: str, error: MessageError) -> None:
        self._refused.add((node, since))
        if not self._online.get(node) or name in self.numbers:  # nobody waits for others
            self.refusals[name or str(node)] = f"{name or node}: {error}"
        log.warning("a node stays out: %s: %s", self._online.get(node) or node, error)

    def _check_alike(self, said: Mapping[str, Any]) -> None:
        """Refuse a node that has another backbone, or features of another length, than the others."""
        if said["dim"] > LARGEST_DIM:
            raise MessageError(f"{_ALIKE['dim']} is {said['dim']}, and {LARGEST_DIM} is the most")
        if not isinstance(said.get("weights"), str | None) or len(said.get("weights") or "") > LONGEST_REASON:
            raise MessageError(f"{_ALIKE['weights']} is none")
        if self.agreed and self.tasks and said.get("task") not in self.tasks:
            task = reason_of({"error": said.get("task")})
            raise MessageError(f"its task is {task!r}, and the recipe's are {', '.join(self.tasks)}")
        for key, value in self.agreed.items():
            if said.get(key) != value:
                found = reason_of({"error": said.get(key)})
                raise MessageError(f"{_ALIKE[key]} is {found}, and the federation's is {value}")

    def task_of(self, client: int) -> int:
        """The number of the task that a client's node says it has; -1 for a client that has not come."""
        return self.tasks.index(self.said[client]["task"]) if client in self.said else -1

    def _check_member(self, client: int, said: Mapping[str, Any]) -> None:
        """Refuse a node with another task than it had when the run began."""
        if self.members is None or (task := int(self.members[client])) == self.tasks.index(said["task"]):
            return
        if task < 0:
            raise MessageError("the run began before it had said its task; it takes part once the run is started again")
        raise MessageError(f"its task is {said['task']!r}, and was {self.tasks[task]!r} when the run began")

    def agree(self, known: Mapping[str, Any]) -> None:
        """Settle what all nodes have to say alike, by what the server knows or else by the majority of those that have
        joined; the others are refused."""
        self.agreed = {key: known[key] if key in known else self._majority(key) for key in _ALIKE}
        self._check_all()

    def begin(self, members: Ints | None) -> None:
        """From now on a node has the task that its client has in the run; others are refused."""
        self.members = members
        self._check_all()

    def _check_all(self) -> None:
        """Refuse nodes that have joined and are not what is settled."""
        names, since = {number: name for name, number in self.numbers.items()}, self._since()
        for client, said in list(self.said.items()):
            try:
                self._check_alike(said)
                self._check_member(client, said)
            except MessageError as error:
                node = self.ids.pop(client)
                del self.said[client]
                self._gone.setdefault(client, time.time())
                self._stay_out(node, since.get(node, ""), names[client], error)
        if not self.said:
            raise self._nobody()

    def _majority(self, key: str) -> Any:
        counts = Counter(said.get(key) for said in self.said.values()).most_common(2)
        if len(counts) > 1 and counts[0][1] == counts[1][1]:
            names = {number: name for name, number in self.numbers.items()}
            told = ", ".join(f"{names[client]}: {said.get(key)}" for client, said in sorted(self.said.items()))
            raise HeadstartError(
                f"nodes do not agree on {_ALIKE[key].replace('its', 'the')}, without a majority: {told}"
            )
        return counts[0][0]

    def absences(self) -> dict[int, str]:
        """Since when each client is not there, and why."""
        found = {}
        for name, client in self.numbers.items():
            if client in self._gone:
                why = "the node has left" if client in self.ids else "no node has come"
                if name in self._online.values() and client not in self.ids:
                    why = "the node does not say who it is"
                if name in self.refusals:
                    why = self.refusals[name].removeprefix(f"{name}: ")
                since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self._gone[client]))
                found[client] = f"absent since {since}: {why}"
        return found

    def named_absences(self) -> str:
        """All that are not there, in words."""
        names = {number: name for name, number in self.numbers.items()}
        return "; ".join(f"{names[client]} ({why})" for client, why in self.absences().items()) or "nobody"

    def rested(self, present: set[int]) -> set[int]:
        """Those of the clients that are there whose node has not missed a deadline lately."""
        return {client for client in present if self.late.get(self.ids[client], 0) <= 0}

    def _since(self) -> dict[int, str]:
        """The nodes that are there, and since when."""
        return {node.node_id: node.last_activated_at for node in self.grid.get_nodes()}

    def _note(self, node: int, question: Question, reply: FlowerMessage | str, about: Mapping[str, Any]) -> None:
        """Write what came back into the server's log."""
        if self.audit is not None:
            self.audit.replied(self._name(node), question, reply, {"run": self.run, "recipe": self.recipe, **about})

    def _name(self, node: int) -> str:
        return self._online.get(node) or str(node)

    def _push(self, questions: Mapping[int, Question], about: Mapping[str, Any]) -> list[tuple[int, str]]:
        """Send facts and bytes to nodes; each node with the name of its message, empty where it has left."""
        from flwr.app import ConfigRecord, RecordDict
        from flwr.app import Message as FlowerMessage

        if self.audit is not None:
            named = [(self._name(node), question) for node, question in questions.items()]
            self.audit.asked(named, {"run": self.run, "recipe": self.recipe, **about})
        whose = {"session": self.session, "run": self.run, "recipe": self.recipe, "version": package_version()}
        messages = []
        for node, (facts, parts) in questions.items():
            record = ConfigRecord({"facts": json.dumps(whose | facts), **parts})
            messages.append(FlowerMessage(RecordDict({RECORD: record}), node, "query"))
        names = list(self.grid.push_messages(messages)) if messages else []
        return list(zip(questions, names, strict=True))

    def send(
        self, questions: Mapping[int, Question], patience: float | None, about: Mapping[str, Any], again: bool = False
    ) -> Iterator[tuple[int, FlowerMessage | str]]:
        """Send facts and bytes to nodes; yields each node with its reply, or with the reason why there is none.

        about: what the server's log says of it, the stage and the round; again: whether a node that leaves before it
        has answered is waited for, and asked once more when it is back.
        """
        for node, reply in self._replies(questions, patience, about, again):
            self._note(node, questions[node], reply, about)
            yield node, reply

    def _replies(
        self, questions: Mapping[int, Question], patience: float | None, about: Mapping[str, Any], again: bool
    ) -> Iterator[tuple[int, FlowerMessage | str]]:
        since = self._since() if questions else {}
        waiting: dict[str, int] = {}
        left: dict[int, FlowerMessage | str] = {}
        for node, message in self._push(questions, about):
            if message:
                waiting[message] = node
            else:
                left[node] = "the node has left"
        began = last = looked = time.monotonic()
        while waiting or left:
            if not again:
                yield from left.items()
                left.clear()
            asked = time.monotonic()
            replies = list(self.grid.pull_messages([*waiting, *self._joins]))
            for reply in replies:
                if not self._hear(reply) and (message := reply.metadata.reply_to_message_id) in waiting:
                    node = waiting.pop(message)
                    if is_unavailable(reply):
                        left[node] = reply
                    else:
                        self.late.pop(node, None)
                        yield node, reply
            now = time.monotonic()
            last = now if replies else last
            if patience is not None and now - began > patience:
                for node in waiting.values():
                    self.late[node] = _AGAIN
                    yield node, f"no answer within {patience:g} s"
                yield from left.items()
                return
            if (waiting or left) and now - looked > _ROLL_CALL:
                looked, there = now, self._since()
                for message, node in list(waiting.items()):
                    if there.get(node) != since.get(node):  # what a node had taken is not given to it again
                        del waiting[message]
                        left[node] = "the node was started anew" if node in there else "the node has left"
                if again:
                    since |= there
                    waiting |= self._ask_again({node: questions[node] for node in left if node in there}, about, left)
            if waiting or (left and again):
                # A SuperLink that waits for replies has waited in this one's place.
                time.sleep(max(0.0, min(_LONGEST, max(_SHORTEST, _SHARE * (now - last))) - (now - asked)))

    def _ask_again(
        self, questions: Mapping[int, Question], about: Mapping[str, Any], left: dict[int, Any]
    ) -> dict[str, int]:
        """Send what was asked to nodes that had left, once more; the messages that are waited for."""
        waiting = {message: node for node, message in self._push(questions, about) if message}
        for node in waiting.values():
            del left[node]
        return waiting
