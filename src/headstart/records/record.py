"""Runs as they lie in their directories, finished or under way, and what several of them say together."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from operator import add
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from headstart.config.recipe import Recipe
from headstart.core.metrics import primary_metric
from headstart.core.statistics import Floats, Ints
from headstart.errors import HeadstartError, no_run, similar_path
from headstart.records import RunDirectory
from headstart.records.federation import FILE
from headstart.records.readers import read_rows

AXES = {
    "round": "rounds", "bytes": "bytes sent by all clients", "forward_passes": "forward passes of all clients",
    "simulated_seconds": "simulated seconds",
}  # fmt: skip
"""What a score is drawn against."""


_LONGEST = 80  # characters of what sets a group of runs apart


@dataclass(frozen=True, eq=False)
class Matrix:
    """Counts [n, m] under names."""

    rows: tuple[str, ...]
    columns: tuple[str, ...]
    counts: Ints


@dataclass(frozen=True, eq=False)
class Record:
    """A run as its directory tells it."""

    path: Path
    recipe: Recipe
    metrics: list[dict[str, Any]]
    summary: dict[str, Any] | None
    """None while the run is not finished."""

    @classmethod
    def read(cls, path: Path, summary: dict[str, Any] | None = None) -> Record:
        """The run in a directory; ``summary`` where it is not written yet."""
        directory = RunDirectory(path)
        if not (path / "recipe.toml").is_file():
            raise no_run(path)
        return cls(path, Recipe.read(path / "recipe.toml"), directory.metrics(), summary or directory.summary())

    @property
    def stages(self) -> list[dict[str, Any]]:
        """What is known of each stage: as summarised, or, while the run goes on, as its last evaluation says."""
        if self.summary is not None:
            return list(self.summary["stages"])
        return [
            {**self.metrics[number], **self._own(number), "rounds": self.metrics[number]["round"], "chosen": {}}
            for number in self._ends.values()
        ]

    def holdings(self) -> Matrix | None:
        """Training examples [K, C] of each class at each client, where that is known."""
        return _matrix(self._rows("holdings.csv"), "client", "class")

    def confusion(self) -> Matrix | None:
        """How often each class [C] was predicted as each [C] after the last stage that was finished."""
        rows = self._rows("confusion.csv")
        last = [row for row in rows if row["stage"] == rows[-1]["stage"]]
        predicted = "predicted as" if last and "predicted as" in last[0] else "taken for"  # of earlier versions
        names = list(dict.fromkeys(row["class"] for row in last)) + [row[predicted] for row in last]
        return _matrix(last, "class", predicted, tuple(dict.fromkeys(names)))

    def samples(self) -> list[dict[str, str]]:
        """Prompts with the completions of the data, of the first model and, as "after", of the last."""
        rows = self._rows("samples.csv")

        def like(end: dict[str, str]) -> list[dict[str, str]]:
            return [row for row in rows if (row["stage"], row["round"]) == (end["stage"], end["round"])]

        pairs = zip(like(rows[0]), like(rows[-1]), strict=False) if rows else ()
        return [{**first, "after": last["completion"]} for first, last in pairs]

    def client_metrics(self) -> dict[str, dict[str, float]]:
        """The figures of each client that are known, by name, after the last stage that was finished."""
        rows = self._rows("clients.csv")
        mine = [row for row in rows if row["stage"] == rows[-1]["stage"]]
        return {
            row["client"]: {
                name: float(cell)
                for name, cell in row.items()
                if name not in ("stage", "client") and cell not in ("", "nan")
            }
            for row in mine
        }

    def left_out(self) -> list[dict[str, str]]:
        """Which clients were excluded from which round, and why."""
        return [row for row in self._rows("rounds.csv") if row["left_out"]]

    @property
    def evaluated(self) -> tuple[int, int]:
        """Stage (from 0) and round of the last evaluation."""
        return (self.metrics[-1]["stage"], self.metrics[-1]["round"]) if self.metrics else (0, 0)

    @property
    def privacy(self) -> dict[str, Any]:
        """What was spent so far, as far as the last evaluation tells; as in the summary, and nothing without noise."""
        if self.summary is not None:
            return dict(self.summary.get("privacy", {}))
        return privacy_spent(self.stages)

    def costs(self, number: int) -> dict[str, float]:
        """What it took to come to an evaluation, from the pre-trained model on: rounds, bytes and forward passes.

        Stages that it does not build on do not count.
        """
        line, own = self.metrics[number], self._own(number)
        total = {"round": line["round"], "bytes": own["bytes_up"], "forward_passes": own["forward_passes"]}
        total["simulated_seconds"] = own["simulated_seconds"]
        before = self.builds_on(line["stage"])
        if before in self._ends:
            total = {name: total[name] + cost for name, cost in self.costs(self._ends[before]).items()}
        return total

    def builds_on(self, stage: int) -> int | None:
        """The stage whose work a stage goes on from: its head, or a backbone that it has trained."""
        table = self.recipe.stages[stage]
        origin = table.start if isinstance(table.start, int) else None if table.start == "pretrained" else stage - 1
        if origin is None or origin < 0:
            return None
        needs_head = table.trains and table.head_init == "previous"
        return origin if needs_head or self._trained(origin) else None

    def _trained(self, stage: int | None) -> bool:
        """Whether the backbone has been changed by a stage or by one that it builds on."""
        while stage is not None:
            table = self.recipe.stages[stage]
            if table.plan.changes_features:
                return True
            stage = self.builds_on(stage)
        return False

    def _own(self, number: int) -> dict[str, float]:
        """The costs of an evaluation's own stage so far."""
        line = self.metrics[number]
        end = max((end for stage, end in self._ends.items() if stage < line["stage"]), default=None)
        before = self.metrics[end] if end is not None else dict.fromkeys(line, 0)
        names = ("bytes_up", "bytes_down", "forward_passes", "seconds", "simulated_seconds")
        return {name: line.get(name, 0.0) - before.get(name, 0.0) for name in names}

    @cached_property
    def _ends(self) -> dict[int | None, int]:
        """The number of each stage's last evaluation."""
        return {line["stage"]: number for number, line in enumerate(self.metrics)}

    def _rows(self, name: str) -> list[dict[str, str]]:
        """The rows of one of its tables; a line that is being written does not count."""
        path = self.path / name
        if not path.is_file():
            return []
        columns, *rows = read_rows(path) or [[]]
        return [dict(zip(columns, row, strict=True)) for row in rows if len(row) == len(columns)]


def privacy_spent(stages: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Guarantees of one unit add up over the stages; `uncovered`: the stages without one of that unit, and without any.

    So do those of tests, for a client; an example is tested or learned from, and has the larger of the two.
    """
    units: dict[str, dict[str, Any]] = {}
    promised = [stage["privacy"]["unit"] if "privacy" in stage else "" for stage in stages]
    for unit in dict.fromkeys(filter(None, promised)):
        both = add if unit == "client" else max
        others = [stage["method"] for stage, given in zip(stages, promised, strict=True) if given != unit]
        units[unit] = {"uncovered": others}
        for name in ("epsilon", "delta"):
            learned, tested = (
                sum(stage[what][name] for stage in stages if what in stage and stage[what]["unit"] == unit)
                for what in ("privacy", "test_privacy")
            )
            units[unit][name] = both(learned, tested)
    none = [stage["method"] for stage, given in zip(stages, promised, strict=True) if not given]
    return {**units, "uncovered": none} if units else {}


def _matrix(rows: list[dict[str, str]], by: str, under: str, names: tuple[str, ...] | None = None) -> Matrix | None:
    """Rows of `examples` by two columns, as counts; names: of both, where they are the same."""
    if not rows:
        return None
    left = names or tuple(dict.fromkeys(row[by] for row in rows))
    top = names or tuple(sorted({row[under] for row in rows}, key=_natural))
    at = {name: place for place, name in enumerate(left)}, {name: place for place, name in enumerate(top)}
    counts = np.zeros((len(left), len(top)), np.int64)
    for row in rows:
        counts[at[0][row[by]], at[1][row[under]]] = int(row["examples"])
    return Matrix(left, top, counts)


def _natural(name: str) -> tuple[bool, float, str]:
    """Numbers by their value, before words."""
    return (not name.isdecimal(), float(name) if name.isdecimal() else 0.0, name)


def find(paths: Iterable[Path]) -> list[Path]:
    """The run directories among some folders and everything inside them."""
    found: dict[Path, None] = {}
    for path in paths:
        if not path.is_dir():
            raise HeadstartError(f"{path}: there is no such directory{similar_path(path)}")
        is_run = (path / "recipe.toml").is_file() and not (path / FILE).is_file()
        found |= dict.fromkeys([path] if is_run else sorted(_runs_below(path)))
    return list(found)


def _runs_below(folder: Path) -> Iterator[Path]:
    """Directories of runs below a folder; what a run keeps inside its own directory is no run."""
    for here, folders, files in os.walk(folder):
        if "recipe.toml" in files and "checkpoint" in folders:
            yield Path(here)
            folders.clear()
        folders[:] = [name for name in folders if not name.startswith(".")]


@dataclass(frozen=True, eq=False)
class Group:
    """Runs that differ in nothing but the seed, and what they are called."""

    label: str
    runs: list[Record]

    @property
    def method(self) -> str:
        """The methods that led to the last stage."""
        return chain(self.runs[0], len(self.runs[0].recipe.stages) - 1)


def grouped(records: Sequence[Record]) -> list[Group]:
    """Runs by what sets them apart."""
    groups: dict[str, list[Record]] = {}
    for record in records:
        groups.setdefault(record.recipe.model_copy(update={"seed": 0}).to_toml(), []).append(record)
    several = list(groups.values())
    names = [runs[0].recipe.name for runs in several]
    tables = [runs[0].recipe.settings() for runs in several]
    peers: dict[str, list[dict[str, Any]]] = {}
    for name, table in zip(names, tables, strict=True):
        peers.setdefault(name, []).append(table)
    changed = [runs[0].recipe.settings(defaults=False) for runs in several]
    texts = [_apart(t, own, peers[name]) for name, t, own in zip(names, tables, changed, strict=True)]
    one = len(peers) == 1  # then the name of the recipe sets nothing apart
    labels = [(text if one else f"{name}: {text}") if text else name for name, text in zip(names, texts, strict=True)]
    twice = {label for label in labels if labels.count(label) > 1}  # what differs is long: its beginning does not tell
    labels = [f"{label} ({place})" if label in twice else label for place, label in enumerate(labels, 1)]
    return [Group(label, runs) for label, runs in zip(labels, several, strict=True)]


def _apart(table: Mapping[str, Any], changed: Mapping[str, Any], peers: Sequence[Mapping[str, Any]]) -> str:
    """What sets a recipe apart from others of its name, methods first; never a seed, nor defaults of its method."""
    keys = [key for key in dict.fromkeys(key for peer in peers for key in peer) if key != "seed"]
    apart = [key for key in keys if len({json.dumps(peer.get(key)) for peer in peers}) > 1]
    ends = [key.rpartition(".")[2] for key in apart]
    called = {key: end if ends.count(end) == 1 else key for key, end in zip(apart, ends, strict=True)}
    shown = [key for key in apart if key in table and _tells(key, table, changed, peers)]
    shown.sort(key=lambda key: not key.endswith(".method"))
    text = ", ".join(str(table[key]) if called[key] == "method" else f"{called[key]} {table[key]}" for key in shown)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"


def _tells(key: str, table: Mapping[str, Any], changed: Mapping[str, Any], peers: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a key is worth naming: recipes with the same method in that stage have other values, or somebody has
    given this one and another method has another."""
    method = f"{key.rpartition('.')[0]}.method"
    alike = peers if key == method else [peer for peer in peers if peer.get(method) == table.get(method)]
    if len({json.dumps(peer.get(key)) for peer in alike}) > 1:
        return True
    return key in changed and len({json.dumps(peer[key]) for peer in peers if key in peer}) > 1


@dataclass(frozen=True, eq=False)
class Curve:
    """The score of a stage over its evaluations, and what each took: the mean over seeds, and their deviation."""

    label: str
    costs: dict[str, npt.NDArray[np.float64]]
    """[n] for each of `AXES`."""
    score: Floats
    """[n]: accuracy between 0 and 1, R² or perplexity."""
    deviation: Floats
    """[n] over the seeds; 0 where there is one."""
    metric: str = "accuracy"
    """Which of them the score is."""
    method: str = ""
    """Those that led to the stage: the same have the same colour in every picture."""


def curves(groups: Sequence[Group]) -> list[Curve]:
    """The curves of all groups: called by their methods, by their runs, or by both where that is needed."""
    found = [_curves(group) for group in groups]
    if len(groups) > 1:
        alone = all(len(drawn) < 2 for drawn in found)
        named = zip(groups, found, strict=True)
        found = [[replace(c, label=g.label if alone else f"{g.label}: {c.label}") for c in drawn] for g, drawn in named]
    return [curve for drawn in found for curve in drawn]


def _curves(group: Group) -> list[Curve]:
    """A curve for every stage of a group; a stage of one evaluation is the beginning of those that build on it."""
    first, stages = group.runs[0], range(len(group.runs[0].recipe.stages))
    lines = [[each for record in group.runs if (each := _evaluations(record, stage))] for stage in stages]
    begun = {first.builds_on(stage) for stage in stages if lines[stage]}
    found = []
    for stage in stages:
        length = max(map(len, lines[stage]), default=0)
        if not length or (length == 1 and stage in begun):
            continue
        steps = [[each[place] for each in lines[stage] if place < len(each)] for place in range(length)]
        costs = {name: np.array([np.mean([c[name] for c, _ in step]) for step in steps]) for name in AXES}
        score = np.array([np.mean([a for _, a in step]) for step in steps])
        deviation = np.array([np.std([a for _, a in step], ddof=len(step) > 1) for step in steps])
        scored = (line for record in group.runs for line in record.metrics if score_of(line) is not None)
        methods = chain(first, stage)
        found.append(Curve(methods, costs, score, deviation, primary_metric(next(scored)), methods))
    return found


def _evaluations(record: Record, stage: int) -> list[tuple[dict[str, float], float]]:
    """Costs and score of a stage's evaluations, after the one that it goes on from."""
    mine = [number for number, line in enumerate(record.metrics) if line["stage"] == stage]
    before = record.builds_on(stage)
    if before is not None and mine and record.metrics[mine[0]]["round"] > 0:
        mine = [number for number in [record._ends.get(before)] if number is not None] + mine
    scores = {number: score_of(record.metrics[number]) for number in mine}
    return [(record.costs(number), score) for number, score in scores.items() if score is not None]


def score_of(line: Mapping[str, Any]) -> float | None:
    """How good a model is, in one number: its primary metric."""
    score: float | None = line.get(primary_metric(line))
    return score


def chain(record: Record, stage: int) -> str:
    """The methods that led to a stage."""
    before = record.builds_on(stage)
    method = record.recipe.stages[stage].method
    return method if before is None else f"{chain(record, before)} → {method}"
