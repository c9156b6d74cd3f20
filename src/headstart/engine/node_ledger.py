"""The ledger of a node: all that ever left it about its data, in a file that only grows.

A line is an entry as JSON; each names the digest of the line before, so that none can be taken out or changed unseen.
An entry is on disk before what it tells of leaves. The file is the node's own: no server reads or writes it.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from filelock import FileLock

from headstart.config.node import NodeLimits
from headstart.core.files import append_text, temporaries
from headstart.errors import HeadstartError

_FIRST = "0" * 64
Entry = Mapping[str, Any]
PromiseKey = tuple[str, int, str, str | None]


class NodeLedger:
    """What left a node about one data set: the folder ``home`` is the node's, and holds its runs."""

    def __init__(self, home: Path) -> None:
        self.home, self.path = home, home / "ledger.jsonl"

    @contextmanager
    def locked(self, *folders: Path) -> Iterator[None]:
        """One message at a time; temporary files of a process that was killed are removed from the folders."""
        self.home.mkdir(parents=True, exist_ok=True)
        with FileLock(self.home / "node.lock"):
            for folder in (self.home, *folders):
                folder.mkdir(exist_ok=True)
                for path in temporaries(folder):
                    path.unlink()
            yield

    def append(self, entry: Entry) -> None:
        """Write an entry, durably, after the last whole one; what a killed process left of a line never happened."""
        lines = self._lines()
        torn = self.path.stat().st_size - sum(map(len, lines)) if self.path.is_file() else 0
        if torn:
            with self.path.open("rb+") as file:
                file.truncate(sum(map(len, lines)))
        facts = {
            "previous": _digest(lines[-1]) if lines else _FIRST,
            "time": datetime.now(UTC).isoformat(timespec="seconds"),
            **entry,
        }
        append_text(self.path, json.dumps(facts, ensure_ascii=False, allow_nan=False) + "\n")
        os.chmod(self.path, 0o600)

    def entries(self) -> list[dict[str, Any]]:
        """All entries, from the first on; a chain that does not hold is refused."""
        found, previous = [], _FIRST
        for number, line in enumerate(self._lines(), start=1):
            try:
                entry = json.loads(line)
                holds = entry["previous"] == previous
            except (ValueError, KeyError, TypeError):
                holds = False
            if not holds:
                raise HeadstartError(f"{self.path}, line {number}: the chain is broken; the ledger was changed")
            found.append(entry)
            previous = _digest(line)
        return found

    def promises(self) -> dict[PromiseKey, Any]:
        """The last privacy guarantee of each stage that was answered or tested; None where there was none."""
        return {promise_key(entry): entry["privacy"] for entry in self.entries() if "privacy" in entry}

    def spent(self, limits: NodeLimits, other_than: PromiseKey) -> dict[str, float]:
        """ε by unit of all promises but one."""
        promises = [each for key, each in self.promises().items() if key != other_than]
        return {unit: sum(limits.cost(each, unit) for each in promises) for unit in ("example", "client")}

    def _lines(self) -> list[bytes]:
        """The whole lines."""
        data = self.path.read_bytes() if self.path.is_file() else b""
        return data[: data.rfind(b"\n") + 1].splitlines(keepends=True)


def promise_key(entry: Entry) -> PromiseKey:
    """Recipe, stage, whether it is an answer or a test, and, where it is not the node that adds noise, the run.

    What a node has noised is answered once over all runs, and so spent once.
    """
    privacy = entry["privacy"]
    own = privacy is not None and privacy["noise"] != "server"
    return entry["recipe"], entry["stage"], entry["of"], None if own else entry["run"]


def _digest(line: bytes) -> str:
    return hashlib.sha256(line).hexdigest()
