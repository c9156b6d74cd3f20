"""What a node says to Flower's messages."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from headstart.config.recipe import Recipe
from headstart.core.message import Message
from headstart.engine.flower_messages import facts_of, package_version, recipe_digest, reply_to
from headstart.engine.node import Node, NodeRequest, StateLostError, StatesInUse
from headstart.errors import HeadstartError, MessageError

if TYPE_CHECKING:  # Flower takes seconds to load
    from flwr.app import Message as FlowerMessage

log = logging.getLogger("headstart")

# From the root of an absolute path to the last slash before the text can no longer be part of it.
_FOLDERS = re.compile(r"(?<![^\s'\"(\[=:,;<`])~?/(?=[^\s/])(?:[^\n:;,'\"()<>`]*/)?")


def respond(message: FlowerMessage, node: Node, name: str) -> FlowerMessage:
    """What a node says to a message; a mistake or a fault becomes an answer that says so."""
    facts: dict[str, Any]
    parts: dict[str, bytes] = {}
    try:
        asked, given = facts_of(message)
        _check_same(asked, node.recipe)
        if asked.get("kind") == "join":
            facts = {"name": name, **node.node_info()}
        else:
            if "setup" in given:
                node.remember(given["setup"])
            if asked.get("kind") == "evaluate":
                return reply_to(message, {}, {"message": node.evaluate(_asked(asked, given)).to_bytes()})
            if asked.get("kind") in ("secure", "secure-test"):
                told, test = Message.from_bytes(given.get("told", b"")), asked["kind"] == "secure-test"
                facts, told = node.add(_asked(asked, given), told, test)
                return reply_to(message, facts, {"message": told.to_bytes()})
            reply = node.answer(_asked(asked, given))
            facts = {"passes": int(reply.forward_passes[0]), "kept": bool(reply.state)}
            parts = {"message": reply.message.to_bytes()}
    except StateLostError as error:
        facts = {"error": without_folders(error, str(node.folder)), "state_lost": True}
    except HeadstartError as error:
        facts = {"error": without_folders(error, str(node.folder))}
    except Exception as error:  # a node that fails is left out of the round; it does not fail silently
        facts = {"error": f"the node failed: {type(error).__name__}: {without_folders(error, str(node.folder))}"}
    return reply_to(message, facts, parts)


def without_folders(error: Exception, *known: str) -> str:
    """What an error says, with the names of files in the place of their paths; all of it goes into the node's log.

    Where a file is tells the server more than it has to know: users, wards, patients. known: paths of the node's own;
    one that is not known ends where a quotation mark does.
    """
    text = str(error)
    log.warning("refused: %s: %s", type(error).__name__, text)
    given = (getattr(error, "filename", None), getattr(error, "filename2", None))
    for path in sorted((path for path in (*known, *given) if isinstance(path, str)), key=len, reverse=True):
        if PurePath(path).is_absolute():
            text = text.replace(path, PurePath(path).name)
    return _FOLDERS.sub("", text)


def run_of(message: FlowerMessage) -> str:
    """The run that a message is about, as the name of a folder."""
    facts, _ = facts_of(message)
    run = facts.get("run")
    if not isinstance(run, str) or not re.fullmatch("[0-9a-f]{32}", run):
        raise MessageError("the server does not say which run it asks for")
    return run


def refuse(message: FlowerMessage, error: Exception, *known: str) -> FlowerMessage:
    """The answer of a node that cannot take part; known: paths that it does not tell."""
    return reply_to(message, {"error": without_folders(error, *known)}, {})


def _check_same(asked: Mapping[str, Any], recipe: Recipe) -> None:
    """Refuse a server that is another version of this package, or that runs another recipe."""
    if asked.get("version") != package_version():
        raise HeadstartError(f"the node runs headstart {package_version()}, the server {asked.get('version')}")
    if asked.get("recipe") != recipe_digest(recipe):
        raise HeadstartError("the server runs another recipe than the node was given")


def _asked(facts: Mapping[str, Any], given: Mapping[str, bytes]) -> NodeRequest:
    try:
        states: StatesInUse = [
            (int(number), int(slot), {str(n): tuple(shape) for n, shape in shapes.items()})
            for number, slot, shapes in facts["states"]
        ]
        message = Message.from_bytes(given["message"])
        asked = str(facts["session"]), int(facts["client"]), str(facts["setup"]), states, bool(facts["new"]), message
        done = int(facts.get("done", 0))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise MessageError(f"the server asks in an unknown way: {error!r}") from None
    return NodeRequest(*asked, done)
