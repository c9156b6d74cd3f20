"""Published figures again: by their formula, or by a run of their recipe."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from itertools import groupby
from pathlib import Path
from statistics import mean, stdev

import numpy as np

from headstart.core.files import write_text
from headstart.errors import HeadstartError
from headstart.published.formulas import FORMULAS
from headstart.published.tables import Row, rows, why_not
from headstart.records import Record
from headstart.report import html_page, html_table, human_bytes, write_tables
from headstart.runner.sweep import sweep

COLUMNS = ("row", "published", "measured", "difference", "published bytes", "note")
_SCALES = {"MB": 1e6, "GB": 1e9}
BEST, HELD = "best accuracy", "clients per class"
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
    """The printed figure with its unit; empty where it was not at hand."""
    spread = "" if row.deviation is None else f" ± {row.deviation:g}"
    return "" if row.value is None else f"{row.value:,.10g}{spread} {row.unit}"


def listed(chosen: Sequence[Row]) -> Iterator[str]:
    """Rows by paper and table, one line each: what is printed, and whether it can be computed with what is at hand."""
    for (source, table), group in groupby(chosen, key=lambda row: (row.source, row.table)):
        lines, able = [], Counter[str]()
        for row in group:
            how = "by formula" if row.formula else why_not(row) or "runs"
            able[how if how in ("by formula", "runs") else "not computed"] += 1
            lines.append(f"  {row.id}: {published(row) or 'not at hand'}; {how}")
        where = f"table {table}" if table[:1].isdigit() else table
        yield f"{source}, {where}: {', '.join(f'{count} {how}' for how, count in sorted(able.items()))}"
        yield from lines


def reproduce(chosen: Sequence[Row], out: Path, on_row: Callable[[Found], object]) -> list[Found]:
    """Compute rows; runs go to ``out/ROWID``, where finished ones stay and those cut short go on.

    ``on_row`` is called with each row as it comes; what goes wrong with one is told, and the others come. Leaves
    reproduce.html, .csv, .md and .tex in ``out``.
    """
    out.mkdir(parents=True, exist_ok=True)
    found = []
    for row in chosen:
        try:
            reason = why_not(row)
            found.append(Found(row, [], reason) if reason else _compute(row, out))
        except HeadstartError as error:
            found.append(Found(row, [], str(error)))
        on_row(found[-1])
    cells = [each.cells for each in found]
    sources = "".join(f"<li>{escape(source)}</li>" for source in dict.fromkeys(row.source for row in chosen))
    body = f"<h1>Published and measured</h1><ul>{sources}</ul>{html_table(COLUMNS, cells)}"
    write_text(out / "reproduce.html", html_page("Published and measured", body))
    write_tables(out / "reproduce", COLUMNS, cells)
    return found


def _compute(row: Row, out: Path) -> Found:
    """The figure of a row, of every seed; rows with the same recipe and settings share their runs."""
    if row.formula:
        return Found(row, [FORMULAS[row.formula](**row.arguments) / _SCALES.get(row.unit, 1)])
    first = next(other for other in rows() if (other.recipe, other.set) == (row.recipe, row.set))
    points = row.points()
    summaries = sweep(points, out / first.id, lambda point, summary: None)
    runs = [Record.read(out / first.id / point.folder) for point in points]
    if row.quantity == HELD:
        held = [run.holdings() for run in runs]
        return Found(row, [np.count_nonzero(each.counts) / len(each.columns) for each in held if each])
    figures = [100 * summary["stages"][-1][_METRICS[row.quantity]] for summary in summaries]
    if row.quantity != BEST:
        return Found(row, figures)
    last = len(runs[0].recipe.stages) - 1
    best = [100 * max(line["accuracy"] for line in run.metrics if line["stage"] == last) for run in runs]
    return Found(row, best, last=figures)
