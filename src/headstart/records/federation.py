"""What the server of a federation leaves in its folder for those who watch: who is there, its certificates, its run.

Whoever watches reads this file and asks nobody.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path

from headstart.core.files import write_json
from headstart.errors import HeadstartError

FILE = Path("state") / "federation.json"
SILENCE = timedelta(seconds=30)
"""How long a server that runs may write nothing; it writes every few seconds."""


@dataclass(frozen=True)
class NodeState:
    """A node that was admitted; times are in ISO 8601."""

    name: str
    admitted: str = ""
    revoked: str = ""
    """When its keys were, or nothing."""
    present: bool | None = None
    """None where no server has looked."""
    since: str = ""
    """Since when it is present or missing; nothing where it has never connected."""
    seen: str = ""
    """When its last heartbeat came."""


@dataclass(frozen=True)
class FederationState:
    """A federation as its server saw it last."""

    host: str
    port: int
    certificates: dict[str, str] = field(default_factory=dict)
    """When each ends, in ISO 8601."""
    nodes: tuple[NodeState, ...] = ()
    run: str = "run"
    """The run directory, from the folder."""
    phase: str = ""
    """What `headstart server` does: `waiting`, `running`, `finished`, `failed`, `stopped`; nothing before its start."""
    reason: str = ""
    """Why it failed."""
    written: str = ""

    @classmethod
    def read(cls, folder: Path) -> FederationState:
        """What was written last into the folder of a federation."""
        path = folder / FILE
        try:
            facts = json.loads(path.read_text(encoding="utf-8"))
            nodes = tuple(NodeState(**node) for node in facts.pop("nodes"))
            return cls(**facts, nodes=nodes)
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise HeadstartError(f"{path} does not tell of a federation: {error}") from None

    def write(self, folder: Path) -> None:
        """Take the place of what was written before."""
        path = folder / FILE
        path.parent.mkdir(exist_ok=True)
        write_json(path, asdict(self))

    @property
    def admitted(self) -> list[NodeState]:
        """The nodes of the federation, without those that were revoked."""
        return [node for node in self.nodes if not node.revoked]

    @property
    def live(self) -> bool:
        """Whether a server runs here, as far as the file tells."""
        return self.phase in ("waiting", "running") and datetime.now(UTC) - moment(self.written) < SILENCE


def moment(text: str) -> datetime:
    """A time in ISO 8601, on this machine's clock."""
    return datetime.fromisoformat(text).astimezone()


def find_federations(folders: Iterable[Path]) -> list[Path]:
    """The folders of federations among some folders and everything inside them."""
    found: dict[Path, None] = {}
    for folder in folders:
        for here, below, _ in os.walk(folder):
            if FILE.parent.name in below and (Path(here) / FILE).is_file():
                found[Path(here)] = None
                below.clear()  # its runs, keys and Flower's own files
            below[:] = sorted(name for name in below if not name.startswith("."))
    return list(found)
