"""Run directories as they come: how far each run has come, and what there is to see of those that are chosen."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock

from headstart.errors import HeadstartError
from headstart.records import Record, RunDirectory, find
from headstart.report import report_body

_WATCHED = ("recipe.toml", "metrics.jsonl", "summary.json", "clients.csv", "confusion.csv")


@dataclass(frozen=True)
class Status:
    """How far a run has come."""

    id: str
    name: str
    state: str
    """`running`, `finished` or `stopped`."""
    doing: str
    share: float
    """Between 0 and 1."""
    left: float | None
    """Seconds that what it is doing may still take."""
    accuracy: float | None
    dropped: int
    version: str
    """Another one means that there is more to see."""


@dataclass
class Gallery:
    """The runs below some folders."""

    folders: Sequence[Path]
    _records: dict[str, tuple[str, Record]] = field(default_factory=dict)
    _dropped: dict[str, tuple[int, int]] = field(default_factory=dict)
    _bodies: dict[str, tuple[str, str]] = field(default_factory=dict)
    _lock: Lock = field(default_factory=Lock)

    def paths(self) -> dict[str, Path]:
        """The run directories that there are now, by their names in the page."""
        one = self.folders[0] if len(self.folders) == 1 else None
        return {str(path.relative_to(one) if one and path != one else path): path for path in find(self.folders)}

    def statuses(self) -> list[Status]:
        """Every run that can be read; what is being deleted or is no run of this version is left out."""
        found = []
        for name, path in self.paths().items():
            try:
                found.append(self._status(name, path))
            except (HeadstartError, OSError, ValueError, KeyError):
                continue
        return found

    def body(self, chosen: Sequence[str]) -> str:
        """What there is to see of the chosen runs together."""
        known = self.paths()
        names = [name for name in dict.fromkeys(chosen) if name in known]
        if not names:
            return "<p class='soft'>Choose a run.</p>"
        version = "|".join(self._version(known[name]) for name in names)
        key = "|".join(names)
        with self._lock:  # one picture at a time: a run needs the processor more
            if self._bodies.get(key, ("", ""))[0] != version:
                records = [self._record(name, known[name])[1] for name in names]
                self._bodies[key] = (version, report_body(records))
            return self._bodies[key][1]

    def _version(self, path: Path) -> str:
        files = [path / name for name in _WATCHED]
        facts = [file.stat() for file in files if file.exists()]
        return "-".join(f"{fact.st_mtime_ns:x}.{fact.st_size:x}" for fact in facts)

    def _record(self, name: str, path: Path) -> tuple[str, Record]:
        """A run, read again only where its files have changed, and the version that it has at least."""
        version = self._version(path)
        if self._records.get(name, ("",))[0] != version:
            self._records[name] = (version, Record.read(path))
        return self._records[name]

    def _status(self, name: str, path: Path) -> Status:
        version, record = self._record(name, path)
        stages, done, dropped = record.recipe.stages, record.stages, self._left_out(name, path)
        accuracy = done[-1]["accuracy"] if done else None
        state = "finished" if record.summary else "running" if RunDirectory(path).running else "stopped"
        doing, share, left = state, 1.0, None
        if record.summary is None:
            number, played = (record.metrics[-1][key] for key in ("stage", "round")) if record.metrics else (0, 0)
            rounds = [stage.rounds or 1 for stage in stages]
            if played >= rounds[number] and number + 1 < len(stages):
                number, played = number + 1, 0
            doing = f"stage {number + 1} of {len(stages)}: {stages[number].method}, round {played} of {rounds[number]}"
            share = min((sum(rounds[:number]) + played) / sum(rounds), 1.0)
            if state == "running":
                doing, left = _under_way(path, doing)
        return Status(name, record.recipe.name, state, doing, share, left, accuracy, dropped, version)

    def _left_out(self, name: str, path: Path) -> int:
        """How often a client was left out of a round; the file only grows, and is read on from where it was."""
        file, (place, count) = path / "rounds.csv", self._dropped.get(name, (0, 0))
        if not file.is_file():
            return 0
        with file.open("rb") as lines:
            if lines.seek(0, 2) < place:  # a resumed run has cut it back
                place, count = 0, 0
            lines.seek(place)
            whole, _, _ = lines.read().rpartition(b"\n")
        if whole:
            place += len(whole) + 1
            count += sum(not line.endswith((b",", b"left_out")) for line in whole.split(b"\n"))
        self._dropped[name] = (place, count)
        return count


def _under_way(path: Path, doing: str) -> tuple[str, float | None]:
    """What a run that goes on is doing, and the seconds that this may still take."""
    file = path / "checkpoint" / "progress.json"
    try:
        note, age = json.loads(file.read_text(encoding="utf-8")), time.time() - file.stat().st_mtime
    except (OSError, ValueError):
        return doing, None
    steps = note["done"] - note["first"]
    told = f"{doing}; {note['what']}: {note['done']:,} of {note['total']:,}"
    if not steps:
        return told, None
    return told, max(0.0, note["seconds"] / steps * (note["total"] - note["done"]) - age)
