"""Published figures again: by their formula, or by a run of their recipe."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from html import escape
from itertools import groupby
from math import sqrt
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import numpy as np
from filelock import FileLock

from headstart.core.files import write_json, write_text
from headstart.errors import HeadstartError
from headstart.published.formulas import FORMULAS
from headstart.published.results import results_page
from headstart.published.tables import CLOSED_FORM, Row, rows, why_not
from headstart.records import Record
from headstart.report import html_page, html_table, human_bytes, write_tables
from headstart.runner.sweep import Point, sweep

COLUMNS = ("row", "published", "measured", "difference", "published bytes", "note")
_SEEDS = {"fedcof": 5, "fedcof-early": 5, "fedncm": 3, "fedbabu": 100}
"""Runs behind a printed deviation: seeds, as FedNCM's text and FedCOF's code say; FedBABU's is over clients."""
_REASONS = {
    "epochs are 800 rounds": "rounds of the paper's code",
    "Caffe": "other weights",
    "not published": "setting not published",
}
"""Words of a note, and what they say about a difference; the first that are there."""
_SCALES = {"MB": 1e6, "GB": 1e9}
BEST, HELD = "best accuracy", "clients per class"
RESULTS = "results.json"
_RECORDED = ("command", "figures", "seeds", "last", "reference", "curve", "seconds", "computed")
_PACKAGES = ("headstart", "numpy", "scipy", "torch", "openvino")
_METRICS = {
    "accuracy": "accuracy",
    BEST: "accuracy",
    "initial accuracy": "initial_accuracy_mean",
    "personalised accuracy": "personalised_accuracy_mean",
    "headless accuracy": "headless_accuracy_mean",
}


@dataclass(frozen=True)
class Found:
    """A row, and its figure by every seed in the unit of the row; none where it cannot be computed."""

    row: Row
    figures: Sequence[float]
    reason: str | None = None
    last: Sequence[float] = ()
    """The figure of the last round, where that of the best one is printed."""
    reference: Sequence[float] = ()
    """The figure by the paper's own code, where that differs from what the paper describes."""
    seeds: Sequence[int] = ()
    """One for each figure."""
    curve: Sequence[tuple[int, float]] = ()
    """Where something is trained and tested along the way: rounds, and the accuracy after them over all seeds."""
    seconds: float = 0.0
    """Of all its runs."""
    computed: str = ""
    """The day on which its last run ended, and the versions behind it."""
    command: str = ""
    """What computed it."""

    @property
    def verdict(self) -> str:
        """Whether the figures agree within two standard errors of their difference, and otherwise why not."""
        row = self.row
        if row.value is None or not self.figures:
            return ""
        if self._near(self.figures):
            return "agrees"
        if self.reference and self._near(self.reference):
            return "the paper's code"
        if self.reference and 2 * abs(mean(self.reference) - row.value) <= abs(mean(self.figures) - row.value):
            return "mostly the paper's code"
        return next((why for words, why in _REASONS.items() if words in row.note), "unexplained")

    def _near(self, figures: Sequence[float]) -> bool:
        return abs(mean(figures) - (self.row.value or 0.0)) <= 2 * self.error(figures)

    def error(self, figures: Sequence[float]) -> float:
        """The standard error of the difference between these figures' mean and the printed one, which is rounded."""
        paper, _, _ = self.row.id.partition("/")
        printed = (self.row.deviation or 0.0) ** 2 / _SEEDS.get(paper, 1)
        ours = stdev(figures) ** 2 / len(figures) if len(figures) > 1 else 0.0
        return sqrt(printed + ours + 0.1**2 / 12)

    @property
    def cells(self) -> list[str]:
        """A line of the table of results."""
        row, figures = self.row, self.figures
        charged = "" if row.bytes is None else human_bytes(row.bytes)
        if not figures:
            return [row.id, published(row), "", "", charged, str(self.reason)]
        places = 2 if row.unit in ("%", "MB", "GB", "clients") else 0
        measured = f"{_spread(figures, places)} {row.unit}"
        difference = "" if row.value is None else f"{round(mean(figures) - row.value, places) + 0.0:+,.{places}f}"
        how = f"by formula {row.formula}" if row.formula else f"{len(figures)} seed{'s' if len(figures) > 1 else ''}"
        if self.last:
            how += f"; the round that is best on test data, as in the paper; the last: {_spread(self.last, places)}"
        return [row.id, published(row), measured, difference, charged, "; ".join(filter(None, (how, row.note)))]


def _spread(figures: Sequence[float], places: int) -> str:
    """The mean, with the standard deviation where there are several."""
    return f"{mean(figures):,.{places}f}" + (f" ± {stdev(figures):.{places}f}" if len(figures) > 1 else "")


def published(row: Row) -> str:
    """The printed figure with its unit; empty where there is none, or it was not at hand."""
    spread = "" if row.deviation is None else f" ± {row.deviation:g}"
    return "" if row.value is None else f"{row.value:,.10g}{spread} {row.unit}"


def published_or_why(row: Row) -> str:
    """The printed figure, or why there is none."""
    return published(row) or ("not at hand" if row.printed else "without a figure")


def listed(chosen: Sequence[Row]) -> Iterator[str]:
    """Rows by paper and table, one line each: what is printed, and whether it can be computed with what is at hand."""
    for (source, table), group in groupby(chosen, key=lambda row: (row.source, row.table)):
        lines, able = [], Counter[str]()
        for row in group:
            how = "by formula" if row.formula else why_not(row) or "runs"
            able[how if how in ("by formula", "runs") else "not computed"] += 1
            lines.append(f"  {row.id}: {published_or_why(row)}; {how}")
        where = f"table {table}" if table[:1].isdigit() else table
        yield f"{source}, {where}: {', '.join(f'{count} {how}' for how, count in sorted(able.items()))}"
        yield from lines


def reproduce(
    chosen: Sequence[Row],
    out: Path,
    on_row: Callable[[Found, float | None], object],
    as_published: bool = False,
    mirror: bool = False,
    noisy: bool = False,
) -> list[Found]:
    """Compute rows; runs go to ``out/ROWID``, where finished ones stay and those cut short go on.

    ``on_row`` is called with each row as it comes, and with the seconds that the others may take; what goes wrong with
    one is told, and the others come. ``as_published``: closed forms by the papers' own code, too; ``mirror``: with its
    mirrored images; ``noisy``: by its second code, which counts images twice. Leaves reproduce.html, .csv, .md and .tex
    in ``out``, and results.json and results.md, of everything that was ever computed there: by several processes at
    once, too.
    """
    out.mkdir(parents=True, exist_ok=True)
    read_results(out / RESULTS)  # one that is damaged is refused before anything is computed
    found, start, steps = list[Found](), time.monotonic(), Steps(chosen, out)
    code = Code(mirror, noisy) if as_published else None
    for row in chosen:
        try:
            reason = why_not(row)
            found.append(Found(row, [], reason) if reason else _compute(row, out, code))
        except HeadstartError as error:
            found.append(Found(row, [], str(error)))
        if not row.formula:  # whatever ends the next row
            record_results(out, found[-1:])
        on_row(found[-1], steps.left(row, time.monotonic() - start))
    cells = [each.cells for each in found]
    sources = "".join(f"<li>{escape(source)}</li>" for source in dict.fromkeys(row.source for row in chosen))
    body = f"<h1>Published and measured</h1><ul>{sources}</ul>{html_table(COLUMNS, cells)}"
    write_text(out / "reproduce.html", html_page("Published and measured", body))
    write_tables(out / "reproduce", COLUMNS, cells)
    record_results(out, found)
    return found


def record_results(out: Path, found: Sequence[Found]) -> None:
    """Add rows that have figures to the record of a folder, where another process may have added some since."""
    with FileLock(out / "results.lock"):
        record = read_results(out / RESULTS)
        record |= {each.row.id: _kept(each, record.get(each.row.id)) for each in found if each.figures}
        write_results(out, list(record.values()))


def _kept(found: Found, earlier: Found | None) -> Found:
    """A row as it goes on record: with the figures by the paper's own code from before, where these are the same."""
    if found.reference or earlier is None or list(earlier.figures) != list(found.figures):
        return found
    return replace(found, reference=earlier.reference, command=earlier.command or found.command)


def read_results(path: Path) -> dict[str, Found]:
    """Rows by id as an earlier reproduction recorded them; those that are published no more are left out."""
    if not path.is_file():
        return {}
    by_id = {row.id: row for row in rows()}
    try:
        recorded = json.loads(path.read_text(encoding="utf-8"))
        return {name: Found(by_id[name], **each) for name, each in recorded.items() if name in by_id}
    except (ValueError, TypeError, AttributeError):
        raise HeadstartError(f"{path} is no record of results; remove it, or give another --out") from None


def write_results(out: Path, found: Sequence[Found]) -> None:
    """results.json and results.md: these rows in the order of the files."""
    place = {row.id: number for number, row in enumerate(rows())}
    ordered = sorted(found, key=lambda each: place.get(each.row.id, len(place)))
    recorded = {each.row.id: {key: getattr(each, key) for key in _RECORDED} for each in ordered}
    there = {name: {key: value for key, value in facts.items() if value} for name, facts in recorded.items()}
    write_json(out / RESULTS, there)
    write_text(out / "results.md", results_page(ordered))


class Steps:
    """How much of some rows is left: by the runs that are not in ``out`` yet, each recipe counted once."""

    def __init__(self, chosen: Sequence[Row], out: Path) -> None:
        able = [row for row in chosen if row.recipe and why_not(row) is None]
        self._runs = {(row.recipe, row.set): _unfinished(row, out) for row in able}
        self._all = sum(self._runs.values())

    def left(self, row: Row, seconds: float) -> float | None:
        """Seconds that the rows after this one may take, once so many have passed; None where that is not known."""
        self._runs.pop((row.recipe, row.set), None)
        rest = sum(self._runs.values())
        if not rest:
            return 0.0
        return seconds * rest / (self._all - rest) if rest < self._all else None


def _unfinished(row: Row, out: Path) -> int:
    folder = _folder(row, out)
    return sum(not (folder / point.folder / "summary.json").is_file() for point in row.points())


def _folder(row: Row, out: Path) -> Path:
    """Where the runs of a row are: rows with the same recipe and settings share them."""
    return out / next(other.id for other in rows() if (other.recipe, other.set) == (row.recipe, row.set))


@dataclass(frozen=True)
class Code:
    """Which of the papers' own code computes closed forms, too."""

    mirror: bool
    noisy: bool

    @property
    def options(self) -> list[str]:
        """Of the command, without dashes."""
        asked = [name for name, given in (("mirrored", self.mirror), ("noisy", self.noisy)) if given]
        return asked or ["as-published"]


def _compute(row: Row, out: Path, code: Code | None) -> Found:
    """The figure of a row, of every seed."""
    found = Found(row, [], command=f"headstart reproduce {row.id}")
    if row.formula:
        return replace(found, figures=[FORMULAS[row.formula](**row.arguments) / _SCALES.get(row.unit, 1)])
    folder, points = _folder(row, out), row.points()
    summaries = sweep(points, folder, lambda point, summary: None)
    seconds = sum(summary["total_seconds"] for summary in summaries)
    found = replace(found, seeds=[point.recipe.seed for point in points], seconds=seconds, computed=_behind(summaries))
    runs = [Record.read(folder / point.folder) for point in points]
    if row.quantity == HELD:
        held = [run.holdings() for run in runs]
        return replace(found, figures=[np.count_nonzero(each.counts) / len(each.columns) for each in held if each])
    figures, tests = [100 * summary["stages"][-1][_METRICS[row.quantity]] for summary in summaries], _tests(runs)
    curved = len(tests[0]) > 1 and row.quantity not in ("initial accuracy", "headless accuracy")
    curve = [(after, 100 * mean(each[after] for each in tests)) for after in tests[0]] if curved else []
    if row.quantity == BEST:
        return replace(found, figures=[100 * max(each.values()) for each in tests], last=figures, curve=curve)
    # Of several means, the reference leaves the code out.
    several = getattr(points[0].recipe.stages[0], "means_per_client", 1) > 1
    if code is None or row.recipe != CLOSED_FORM or several:
        return replace(found, figures=figures, curve=curve)
    reference = [_by_reference(point, folder, code) for point in points]
    command = " ".join([found.command, *(f"--{option}" for option in code.options)])
    return replace(found, figures=figures, reference=reference, command=command)


def _tests(runs: Sequence[Record]) -> list[dict[int, float]]:
    """Of every run, accuracies on test data by the round of the last stage after which they were measured."""
    last = len(runs[0].recipe.stages) - 1
    return [
        {line["round"]: line["accuracy"] for line in run.metrics if line["stage"] == last and "accuracy" in line}
        for run in runs
    ]


def _behind(summaries: Sequence[dict[str, Any]]) -> str:
    """The day on which the last of some runs ended, and its versions."""
    last = max(summaries, key=lambda summary: str(summary["ended"]))
    named = [f"{name} {last['versions'][name]}" for name in _PACKAGES if name in last["versions"]]
    return f"{last['ended'][:10]}: Python {last['versions']['python']}, {', '.join(named)}"


def _by_reference(point: Point, folder: Path, code: Code) -> float:
    """The figure of a run by the paper's own code, kept beside the run."""
    path = folder / f"{point.folder}.{'-'.join(code.options)}.json"
    if not path.is_file():
        from headstart.published.reference import reference_accuracy

        start = time.monotonic()
        accuracy = reference_accuracy(point.recipe, code.mirror, code.noisy)
        write_json(path, {"accuracy": accuracy, "seconds": time.monotonic() - start})
    return 100 * float(json.loads(path.read_text(encoding="utf-8"))["accuracy"])
