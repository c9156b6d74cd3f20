"""The server's log: whom it admitted and revoked, what it asked each node, and what came back, in a chain of entries.

What is asked is on disk before it leaves, and what came back before it is used. An entry about a node's reply has the
run, stage, round, kind, digest and bytes of the entry in the node's own ledger.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from headstart.core.chain import Chain
from headstart.engine.flower_messages import count_of, question_digest, read_reply, reason_of
from headstart.engine.setup import digest
from headstart.errors import MessageError

if TYPE_CHECKING:  # Flower takes seconds to load
    from flwr.app import Message as FlowerMessage

Question = tuple[dict[str, Any], dict[str, bytes]]
"""Facts and parts of a message to a node."""


class ServerLog(Chain):
    """What a server did; ``about`` is what an entry is about: the node, run, recipe, stage, round and kind."""

    def asked(self, questions: Iterable[tuple[str, Question]], about: Mapping[str, Any]) -> None:
        """Nodes, by name, are about to be asked."""
        entries = []
        for node, (facts, parts) in questions:
            # Of a secure sum, only the first exchange has a question of its own; the others are told what came of it.
            first = "message" in parts and about.get("kind", "keys") == "keys"
            asked = question_digest(facts, parts["message"]) if first else digest(parts.get("told", b""))
            what = {"question": asked, "bytes": sum(map(len, parts.values()))} if parts else {}
            entries.append({"event": "asked", "node": node, **_about(facts, about), **what})
        if entries:
            self.append(*entries)

    def replied(self, node: str, question: Question, reply: FlowerMessage | str, about: Mapping[str, Any]) -> None:
        """A node has replied, or has not, which a text says why."""
        event, what = ("absent", {"why": reply}) if isinstance(reply, str) else _came(question[0], reply)
        self.append({"event": event, "node": node, **_about(question[0], about), **what})


def _about(facts: Mapping[str, Any], about: Mapping[str, Any]) -> dict[str, Any]:
    """What the log says of a question in the words of a node's ledger."""
    kind = str(facts["kind"])
    found = {"kind": {"evaluate": "test"}.get(kind, kind), **about}
    return found if kind == "join" else {**found, "of": "test" if kind in ("evaluate", "secure-test") else "answer"}


def _came(facts: Mapping[str, Any], reply: FlowerMessage) -> tuple[str, dict[str, Any]]:
    """The event, and what is noted of a reply, whoever wrote it."""
    try:
        said, data = read_reply(reply)
        if "error" in said:
            return "refused", {"why": reason_of(said)}
        if facts["kind"] != "join":
            return "replied", {"answer": digest(data), "bytes": len(data)}
        weights = {"weights": reason_of({"error": said["weights"]})} if said.get("weights") else {}
        return "replied", {"examples": count_of(said, "examples"), "dim": count_of(said, "dim"), **weights}
    except MessageError as error:
        return "unreadable", {"why": str(error)}
