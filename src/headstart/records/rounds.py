"""`rounds.csv` as it grows: who participated in which round, who did not and why, and what each has moved."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from headstart.core.files import parse_csv

SHOWN = 60
"""Rounds that are remembered one by one."""
LISTED = 200
"""Absences that are remembered one by one."""


@dataclass(frozen=True)
class Absence:
    """A client that did not count in a round (from 1) of a stage, and why."""

    stage: int
    round: int
    client: str
    why: str


@dataclass
class RoundsLog:
    """The rounds of a run so far; the file only grows, and is read on from where it was."""

    path: Path
    rounds: dict[tuple[int, int], dict[str, str]] = field(default_factory=dict)
    """Of each of the last rounds, by stage and round, the clients, and why one of them did not count."""
    absences: list[Absence] = field(default_factory=list)
    """The last ones."""
    dropped: int = 0
    """How often a client did not count."""
    taken: Counter[str] = field(default_factory=Counter)
    """In how many rounds each client counted."""
    bytes_up: Counter[str] = field(default_factory=Counter)
    bytes_down: Counter[str] = field(default_factory=Counter)
    _place: int = 0
    _file: int = 0

    def read(self) -> RoundsLog:
        """Take in what has come; where a resumed run has cut the file back, begin anew."""
        if not self.path.is_file():
            return self._anew()
        with self.path.open("rb") as file:
            facts = self.path.stat()
            if facts.st_size < self._place or (self._place and facts.st_ino != self._file):
                return self._anew().read()
            self._file = facts.st_ino
            file.seek(self._place)
            whole, end, _ = file.read().rpartition(b"\n")
        if end and whole.count(b'"') % 2 == 0:  # a text that is being written may have ends of lines
            self._place += len(whole) + 1
            for row in parse_csv(whole):
                self._take(row)
        return self

    def where(self, rounds: Sequence[int], evaluated: tuple[int, int] = (0, 0)) -> tuple[int, int]:
        """The stage under way (from 0), and how many rounds of it were played.

        rounds: of each stage; evaluated: stage and round of the last evaluation.
        """
        stage, played = max(next(reversed(self.rounds), (0, 0)), evaluated)
        return (stage + 1, 0) if played >= rounds[stage] and stage + 1 < len(rounds) else (stage, played)

    def _anew(self) -> RoundsLog:
        vars(self).update(vars(RoundsLog(self.path)))
        return self

    def _take(self, row: list[str]) -> None:
        if len(row) != 6 or not row[0].isdecimal():  # the names of the columns, or a line of a process that was killed
            return
        stage, round, client, up, down, why = int(row[0]), int(row[1]), row[2], int(row[3]), int(row[4]), row[5]
        self.rounds.setdefault((stage, round), {})[client] = why
        if len(self.rounds) > SHOWN:
            del self.rounds[next(iter(self.rounds))]
        self.bytes_up[client] += up
        self.bytes_down[client] += down
        if not why:
            self.taken[client] += 1
            return
        self.dropped += 1
        self.absences = [*self.absences[-LISTED + 1 :], Absence(stage, round, client, why)]


# As the files of earlier runs have it.
_EARLIER = ("no answer within ", "not asked: it has missed a deadline")


def outcome(why: str) -> str:
    """What became of a client in a round, in a word, by why it did not count."""
    kinds = {
        "late": ("late: ", "no reply within ", "not sampled: it has missed a deadline", *_EARLIER),
        "absent": ("absent since ", "the node has left", "the node was started anew"),
    }
    if not why:
        return "participated"
    return next((kind for kind, beginnings in kinds.items() if why.startswith(beginnings)), "excluded")
