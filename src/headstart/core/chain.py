"""A file that only grows: a line is an entry as JSON, and names the digest of the line before.

So none can be changed or taken out unseen, but for the last ones: who wants to know whether lines are missing at the
end notes the digest of the last line elsewhere, or compares with what others have on file.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from filelock import FileLock

from headstart.core.files import append_text
from headstart.errors import HeadstartError

Entry = Mapping[str, Any]
_FIRST = "0" * 64
_PART = 1 << 16


class Chain:
    """The entries of a file, for the eyes of its owner only."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def append(self, *entries: Entry) -> None:
        """Write entries, durably, after the last whole one; what a killed process left of a line never happened."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(self.path.with_suffix(".lock")):
            previous, lines = self._mended(), []
            time = datetime.now(UTC).isoformat(timespec="seconds")
            for entry in entries:
                facts = {"previous": previous, "time": time, **entry}
                lines.append(json.dumps(facts, ensure_ascii=False, allow_nan=False) + "\n")
                previous = _digest(lines[-1].encode())
            append_text(self.path, "".join(lines))
            os.chmod(self.path, 0o600)

    def entries(self) -> list[dict[str, Any]]:
        """All entries, from the first on; a chain that does not hold is refused."""
        return self._read()[0]

    def head(self) -> str:
        """The digest of the last line of a chain that holds: zeros where there is none."""
        return self._read()[1]

    def _read(self) -> tuple[list[dict[str, Any]], str]:
        data = self.path.read_bytes() if self.path.is_file() else b""
        found, previous = [], _FIRST
        for number, line in enumerate(data[: data.rfind(b"\n") + 1].splitlines(keepends=True), start=1):
            try:
                entry = json.loads(line)
                holds = entry["previous"] == previous
            except (ValueError, KeyError, TypeError):
                holds = False
            if not holds:
                raise HeadstartError(f"{self.path}, line {number}: the chain is broken; the file was changed")
            found.append(entry)
            previous = _digest(line)
        return found, previous

    def _mended(self) -> str:
        """Cut off what is left of a line at the end; returns the digest of the last whole line, which alone is read."""
        if not self.path.is_file():
            return _FIRST
        with self.path.open("rb+") as file:
            start, tail = file.seek(0, os.SEEK_END), b""
            while start and tail.count(b"\n") < 2:
                step = min(_PART, start)
                start = file.seek(start - step)
                tail = file.read(step) + tail
            whole = tail[: tail.rfind(b"\n") + 1]
            if len(whole) < len(tail):
                file.truncate(start + len(whole))
        lines = whole.split(b"\n")
        return _digest(lines[-2] + b"\n") if len(lines) > 1 else _FIRST


def _digest(line: bytes) -> str:
    return hashlib.sha256(line).hexdigest()
