"""Run directories as they come: how far each run has come, and what there is to see of those that are chosen."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock

from headstart.core.metrics import goodness, primary_metric
from headstart.errors import HeadstartError
from headstart.records import FederationState, Record, RoundsLog, RunDirectory, find, find_federations
from headstart.records.record import score_of
from headstart.report import report_body
from headstart.report.dashboard.federation import Federation, panel
from headstart.report.tables import score

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
    score: str
    """How good its last finished stage is, on how many examples: an accuracy, R² or perplexity; empty where there is
    none."""
    goodness: float | None
    """The same as a number of which more is better."""
    dropped: int
    version: str
    """Another one means that there is more to see."""
    began: float
    """Seconds since 1970."""
    report: bool
    """Whether there is a page of it."""


@dataclass
class Gallery:
    """The runs and federations below some folders."""

    folders: Sequence[Path]
    _records: dict[str, tuple[str, Record]] = field(default_factory=dict)
    _rounds: dict[Path, RoundsLog] = field(default_factory=dict)
    _bodies: dict[str, tuple[str, str]] = field(default_factory=dict)
    _lock: Lock = field(default_factory=Lock)
    _reading: Lock = field(default_factory=Lock)
    """Of those who read on in the rounds of a run."""

    def paths(self) -> dict[str, Path]:
        """The run directories that there are now, by their names in the page; a federation's may be elsewhere."""
        runs = [folder / state.run for folder, state in self._federations()]
        found = dict.fromkeys([*find(self.folders), *(run for run in runs if (run / "checkpoint").is_dir())])
        return {self._name(path): path for path in found}

    def _name(self, path: Path) -> str:
        one = self.folders[0] if len(self.folders) == 1 else None
        return str(path.relative_to(one) if one and path != one and path.is_relative_to(one) else path)

    def report(self, chosen: Sequence[str]) -> str:
        """The page that a run has left in its directory."""
        known = self.paths()
        if len(chosen) != 1 or chosen[0] not in known or not (known[chosen[0]] / "report.html").is_file():
            raise HeadstartError("there is no report of this run")
        return (known[chosen[0]] / "report.html").read_text(encoding="utf-8")

    def statuses(self) -> list[Status]:
        """Every run that can be read, the newest first; what is being deleted or is no run of this version is left
        out."""
        found = []
        for name, path in self.paths().items():
            try:
                found.append(self._status(name, path))
            except (HeadstartError, OSError, ValueError, KeyError):
                continue
        return sorted(found, key=lambda status: -status.began)

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

    def panels(self, chosen: Sequence[str]) -> str:
        """What there is to see of the federations whose run is chosen, or has not begun."""
        with self._reading:
            shown = [one for one in self.federations() if not (one.id and chosen) or one.id in chosen]
            return "".join(map(panel, shown))

    def federations(self) -> list[Federation]:
        """Every federation that can be read, with its run."""
        found, known = [], self.paths()
        for folder, state in self._federations():
            path, title = folder / state.run, folder.absolute().name
            if (name := self._name(path)) in known:
                record, running = self._record(name, path)[1], RunDirectory(path).running
                found.append(Federation(title, state, name, record, running, self._log(path)))
            else:
                found.append(Federation(title, state))
        return found

    def _federations(self) -> list[tuple[Path, FederationState]]:
        """Those that can be read."""
        found = []
        for folder in find_federations(self.folders):
            with suppress(HeadstartError):
                found.append((folder, FederationState.read(folder)))
        return found

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
        stages, done = record.recipe.stages, record.stages
        rounds = [stage.rounds or 1 for stage in stages]
        with self._reading:
            dropped, (number, played) = self._log(path).dropped, self._log(path).where(rounds, record.evaluated)
        tested = score(done[-1]) if done else ""
        found = score_of(done[-1]) if done else None
        rank = None if found is None else goodness(primary_metric(done[-1]), found)
        if count := done[-1].get("test_examples") if done else None:
            tested += f" of {count:,} test examples"
        state = "finished" if record.summary else "running" if RunDirectory(path).running else "stopped"
        doing, share, left = state, 1.0, None
        if record.summary is None:
            doing = f"stage {number + 1} of {len(stages)}: {stages[number].method}, round {played} of {rounds[number]}"
            share = min((sum(rounds[:number]) + played) / sum(rounds), 1.0)
            if state == "running":
                doing, left = _under_way(path, doing)
        began, page = (path / "recipe.toml").stat().st_mtime, (path / "report.html").is_file()
        return Status(name, record.recipe.name, state, doing, share, left, tested, rank, dropped, version, began, page)

    def _log(self, path: Path) -> RoundsLog:
        """Which clients participated in the rounds of a run so far."""
        return self._rounds.setdefault(path, RoundsLog(path / "rounds.csv")).read()


def _under_way(path: Path, doing: str) -> tuple[str, float | None]:
    """What a run that goes on is doing, and the seconds that this may still take."""
    file = path / "checkpoint" / "progress.json"
    try:
        note, age = json.loads(file.read_text(encoding="utf-8")), time.time() - file.stat().st_mtime
    except (OSError, ValueError):
        return doing, None
    steps = note["done"] - note["first"]
    text = f"{doing}; {note['what']}: {note['done']:,} of {note['total']:,}"
    if not steps:
        return text, None
    return text, max(0.0, note["seconds"] / steps * (note["total"] - note["done"]) - age)
