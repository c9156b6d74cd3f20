"""The server's log: whom it admitted and revoked, its requests to each node, and their replies, in a chain of entries.

A request is on disk before it leaves, and a reply before it is used. An entry about a node's reply has the
run, stage, round, kind, digest and bytes of the entry in the node's own ledger.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from headstart.core.chain import Chain
from headstart.engine.flower_messages import count_of, read_reply, reason_of, request_digest
from headstart.engine.setup import digest
from headstart.errors import MessageError

if TYPE_CHECKING:  # Flower takes seconds to load
    from flwr.app import Message as FlowerMessage

Content = tuple[dict[str, Any], dict[str, bytes]]
"""Content of a message to a node: facts, and named parts as bytes."""


class ServerLog(Chain):
    """What a server did; ``about`` is what an entry is about: the node, run, recipe, stage, round and kind."""

    def asked(self, requests: Iterable[tuple[str, Content]], about: Mapping[str, Any]) -> None:
        """Requests are about to be sent to nodes, by name."""
        entries = []
        for node, (facts, parts) in requests:
            # Of a secure sum only the first exchange is a request of its own; the others pass on what clients sent.
            first = "message" in parts and about.get("kind", "keys") == "keys"
            name = request_digest(facts, parts["message"]) if first else digest(parts.get("exchange", b""))
            what = {"question": name, "bytes": sum(map(len, parts.values()))} if parts else {}
            entries.append({"event": "asked", "node": node, **_about(facts, about), **what})
        if entries:
            self.append(*entries)

    def replied(self, node: str, request: Content, reply: FlowerMessage | str, about: Mapping[str, Any]) -> None:
        """A node has replied, or has not: then the reply is the reason, as a text."""
        event, what = ("absent", {"why": reply}) if isinstance(reply, str) else _received(request[0], reply)
        self.append({"event": event, "node": node, **_about(request[0], about), **what})


def _about(facts: Mapping[str, Any], about: Mapping[str, Any]) -> dict[str, Any]:
    """What the log says of a request, in the words of a node's ledger."""
    kind = str(facts["kind"])
    found = {"kind": {"evaluate": "test"}.get(kind, kind), **about}
    return found if kind == "join" else {**found, "of": "test" if kind in ("evaluate", "secure-test") else "answer"}


def _received(request: Mapping[str, Any], reply: FlowerMessage) -> tuple[str, dict[str, Any]]:
    """The event, and what is noted of a reply, whoever wrote it."""
    try:
        facts, data = read_reply(reply)
        if "error" in facts:
            return "refused", {"why": reason_of(facts)}
        if request["kind"] != "join":
            return "replied", {"answer": digest(data), "bytes": len(data)}
        weights = {"weights": reason_of({"error": facts["weights"]})} if facts.get("weights") else {}
        return "replied", {"examples": count_of(facts, "examples"), "dim": count_of(facts, "dim"), **weights}
    except MessageError as error:
        return "unreadable", {"why": str(error)}
