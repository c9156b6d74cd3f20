"""Flower's messages: a few facts as JSON, and bytes."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from headstart.config.recipe import Recipe
from headstart.engine.setup import digest
from headstart.errors import MessageError

if TYPE_CHECKING:  # Flower takes seconds to load
    from flwr.app import Message as FlowerMessage

RECORD = "headstart"
LARGEST_COUNT, LONGEST_REASON = 10**15, 500


def count_of(facts: Mapping[str, Any], name: str = "passes") -> int:
    """A number of examples in a reply; by default, how many went through the backbone."""
    count = facts.get(name)
    if type(count) is not int or not 0 <= count <= LARGEST_COUNT:
        raise MessageError(f"the reply does not say how many {name} there were")
    return count


def reason_of(facts: Mapping[str, Any]) -> str:
    """Why a node refused or failed: a short line of printable characters, whoever wrote it."""
    text = " ".join(str(facts.get("error", "no reason given"))[:LONGEST_REASON].split())
    return "".join(character if character.isprintable() else "?" for character in text)


def noise_keys(facts: Mapping[str, Any], parts: int) -> dict[int, bytes]:
    """The keys of the parts of a client's noise that a sum does not need, by number, below so many."""
    try:
        found = {int(number): bytes.fromhex(key) for number, key in dict(facts.get("noise", {})).items()}
    except (TypeError, ValueError, OverflowError):
        raise MessageError("the keys of its noise are none") from None
    if any(len(key) != 32 or not 0 < number < parts for number, key in found.items()):
        raise MessageError("the keys of its noise are of other parts than there are, or not of 32 bytes")
    return found


def reply_to(message: FlowerMessage, facts: dict[str, Any], parts: dict[str, bytes]) -> FlowerMessage:
    """A reply with these facts and parts."""
    from flwr.app import ConfigRecord, RecordDict
    from flwr.app import Message as FlowerMessage

    return FlowerMessage(RecordDict({RECORD: ConfigRecord({"facts": json.dumps(facts), **parts})}), reply_to=message)


def read_reply(reply: FlowerMessage | str) -> tuple[dict[str, Any], bytes]:
    """Facts and bytes of a reply; one that is none is refused."""
    if isinstance(reply, str):
        return {"error": reply}, b""
    if reply.has_error():
        reason = re.sub(r"\x1b\[[0-9;]*m", "", str(reply.error.reason or reply.error.code))
        return {"error": f"Flower: {reason.strip()[-300:]}"}, b""  # the cause is at the end
    facts, parts = facts_of(reply)
    return facts, parts.get("message", b"")


def is_unavailable(reply: FlowerMessage) -> bool:
    """Whether Flower replies in the place of a node that has left."""
    from flwr.common.constant import ErrorCode

    return reply.has_error() and reply.error.code == ErrorCode.NODE_UNAVAILABLE


def facts_of(message: FlowerMessage) -> tuple[dict[str, Any], dict[str, bytes]]:
    """The facts and the parts of a message of ours."""
    try:
        record = dict(message.content.config_records[RECORD])
        facts = json.loads(str(record.pop("facts")), parse_constant=_refused)
    except (KeyError, ValueError, RecursionError) as error:
        raise MessageError(f"not a message of headstart: {error!r}") from None
    if not isinstance(facts, dict) or not all(isinstance(part, bytes) for part in record.values()):
        raise MessageError("not a message of headstart: its parts are of other kinds")
    return facts, record  # type: ignore[return-value]


def _refused(constant: str) -> float:
    """NaN and infinity are not JSON, whatever Python's reader takes."""
    raise ValueError(f"{constant} is no number")


def request_digest(facts: Mapping[str, Any], message: bytes) -> str:
    """The same for the same request to a client, whichever process of the server sends it."""
    about = [facts[name] for name in ("client", "setup", "states", "new")]
    return digest(json.dumps([*about, facts.get("done", 0)]).encode() + message)


def recipe_digest(recipe: Recipe) -> str:
    """The same for the same recipe, however it is written."""
    return digest(recipe.to_toml().encode())


def package_version() -> str:
    """Of headstart: server and nodes have to be of the same."""
    from importlib.metadata import version

    return version("headstart")
