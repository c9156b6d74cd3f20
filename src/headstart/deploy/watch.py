"""What the server of a federation tells those who watch it, in a file of its folder (`records/federation.py`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from headstart.deploy.keys import certificate_end
from headstart.errors import HeadstartError
from headstart.records import FederationState, NodeState

CERTIFICATES = ("ca", "server")


def note(
    folder: Path,
    place: tuple[str, int],
    nodes: Sequence[NodeState],
    found: Mapping[int, Any] | None = None,
    **facts: Any,
) -> None:
    """Write what is known of a federation; a disk that takes no more does not end it.

    nodes: all that were ever admitted; found: Flower's `NodeInfo` by their number here, where a SuperLink was asked;
    facts: `run`, `phase` and `reason`; what is not given stays as it was written before. Only a server that runs has
    them to tell, and with them when that was.
    """
    if facts or found is not None:
        facts["written"] = now()
    with suppress(HeadstartError):  # nothing was written before
        before = FederationState.read(folder)
        known = {(node.name, node.admitted): node for node in before.nodes}
        nodes = [replace(known.get((node.name, node.admitted), node), revoked=node.revoked) for node in nodes]
        facts = {name: getattr(before, name) for name in ("run", "phase", "reason", "written")} | facts
    if found is not None:
        nodes = [presence(node, found.get(number)) for number, node in enumerate(nodes)]
    with suppress(OSError):
        ends = {name: certificate_end(folder / "certificates" / f"{name}.pem").isoformat() for name in CERTIFICATES}
        FederationState(*place, ends, tuple(nodes), **facts).write(folder)


def presence(node: NodeState, info: Any | None) -> NodeState:
    """A node as a SuperLink sees it; info: Flower's `NodeInfo`, None where it does not know the node."""
    from flwr.common.constant import HEARTBEAT_PATIENCE

    if info is None or not info.last_activated_at:
        return replace(node, present=False, since="", seen="")
    if info.status == "online":
        beat = info.online_until - HEARTBEAT_PATIENCE * info.heartbeat_interval
        seen = datetime.fromtimestamp(beat, UTC).isoformat(timespec="seconds")
        return replace(node, present=True, since=info.last_activated_at, seen=seen)
    # A SuperLink does not tell an end that was announced from one that it noticed after two heartbeats.
    left = info.last_deactivated_at or info.unregistered_at
    return replace(node, present=False, since=left, seen=node.seen or left)


def now() -> str:
    """The time in ISO 8601."""
    return datetime.now(UTC).isoformat(timespec="seconds")
