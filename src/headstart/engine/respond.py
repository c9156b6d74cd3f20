"""The replies of a node to Flower's messages."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from headstart.config.recipe import Recipe
from headstart.core.message import Message
from headstart.engine.flower_messages import facts_of, package_version, recipe_digest, reply_to
from headstart.engine.node import Node
from headstart.engine.node_errors import StateLostError, without_folders
from headstart.engine.node_stage import NodeRequest, StatesInUse
from headstart.errors import HeadstartError, MessageError

if TYPE_CHECKING:  # Flower takes seconds to load
    from flwr.app import Message as FlowerMessage


def respond(message: FlowerMessage, node: Node, name: str) -> FlowerMessage:
    """The reply of a node to a message; a mistake or a fault becomes a reply that says so."""
    failure: dict[str, Any]
    try:
        facts, parts = facts_of(message)
        _check_same(facts, node.recipe)
        if facts.get("kind") == "join":
            return reply_to(message, {"name": name, **node.node_info()}, {})
        replied, content = _reply(node, facts, parts)
        return reply_to(message, replied, {"message": content.to_bytes()})
    except StateLostError as error:
        failure = {"error": without_folders(error, str(node.folder)), "state_lost": True}
    except HeadstartError as error:
        failure = {"error": without_folders(error, str(node.folder))}
    except Exception as error:  # a node that fails is excluded from the round; it does not fail silently
        failure = {"error": f"the node failed: {type(error).__name__}: {without_folders(error, str(node.folder))}"}
    return reply_to(message, failure, {})


def _reply(node: Node, facts: Mapping[str, Any], parts: Mapping[str, bytes]) -> tuple[dict[str, Any], Message]:
    """Facts and message of the reply to a request to train, to evaluate, or to continue a secure sum."""
    kind = facts.get("kind")
    if "setup" in parts:
        node.remember(parts["setup"])
    if kind in ("secure", "secure-test"):
        received = Message.from_bytes(parts.get("exchange", b""))
        return node.add(_request_of(facts, parts), received, test=kind == "secure-test")
    request = _request_of(facts, parts)
    if kind == "evaluate":
        return {}, node.evaluate(request)
    reply = node.answer(request)
    return {"passes": int(reply.forward_passes[0]), "kept": bool(reply.state)}, reply.message


def run_of(message: FlowerMessage) -> str:
    """The run that a message is about, as the name of a folder."""
    facts, _ = facts_of(message)
    run = facts.get("run")
    if not isinstance(run, str) or not re.fullmatch("[0-9a-f]{32}", run):
        raise MessageError("the request names no run")
    return run


def refuse(message: FlowerMessage, error: Exception, *known: str) -> FlowerMessage:
    """The reply of a node that cannot take part; known: paths that it does not reveal."""
    return reply_to(message, {"error": without_folders(error, *known)}, {})


def _check_same(facts: Mapping[str, Any], recipe: Recipe) -> None:
    """Refuse a server that is another version of this package, or that runs another recipe."""
    if facts.get("version") != package_version():
        raise HeadstartError(f"the node runs headstart {package_version()}, the server {facts.get('version')}")
    if facts.get("recipe") != recipe_digest(recipe):
        raise HeadstartError("the server runs another recipe than the node was given")


def _request_of(facts: Mapping[str, Any], parts: Mapping[str, bytes]) -> NodeRequest:
    """A request of what a message holds."""
    try:
        states: StatesInUse = [
            (int(number), int(slot), {str(n): tuple(shape) for n, shape in shapes.items()})
            for number, slot, shapes in facts["states"]
        ]
        message = Message.from_bytes(parts["message"])
        fields = str(facts["session"]), int(facts["client"]), str(facts["setup"]), states, bool(facts["new"]), message
        done = int(facts.get("done", 0))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise MessageError(f"the server's request cannot be read: {error!r}") from None
    return NodeRequest(*fields, done)
