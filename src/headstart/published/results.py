"""The page of results: published figures, the same by the papers' own code, and ours."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import groupby
from statistics import mean, stdev
from typing import TYPE_CHECKING

from headstart.published.tables import rows, shortest
from headstart.report import markdown

if TYPE_CHECKING:
    from headstart.published.reproduce import Found

COLUMNS = (
    "row", "published", "as published", "ours", "difference", "standard error", "verdict",
    "seeds", "seconds", "versions",
)  # fmt: skip
_UNPRINTED = ("row", "ours", "seeds", "seconds", "versions", "what is known")
_LOWER = ("row", "difference", "standard error", "verdict", "what was tried, and what is known")
_POINTS = 8
"""Of a curve."""
_OPENING = """# Results

Accuracies in %, each in three columns:

- **published**: as printed.
- **as published**: computed again the way FedCOF's own code does it, where that differs from what the paper describes:
  by a pseudo-inverse in float32. With `--mirrored` half of the training images are mirrored, too, as in that code. With
  `--noisy` it is by the second code of that paper, for what is trained after a head: images that a client has of a
  class are added a second time, with noise, where they are all in one batch of 64.
- **ours**: what the paper describes, by headstart.

Over each table stands the command that computes it; `headstart reproduce ROW --as-published` computes one row of it.
Both write this page, and the figures of every seed as `results.json`, to `--out`. What data and weights they need is in
[Published figures](reproduce.md). Seconds are of all seeds, by the clock, on a machine that did more than this; a row
whose features were not in the cache yet has those of computing them.

A difference is ours − published; its standard error has the printed deviation, that of our seeds, and the rounding of
the printed figure. The verdict is **agrees** within two standard errors. Beyond them it is **the paper's code** where
the column "as published" is within two standard errors of the printed figure, **mostly the paper's code** where that
column is at most half as far from it as ours; **rounds of the paper's code** where that makes more of them than the
paper says; **other weights** where the published weights are not at hand (SqueezeNet
1.1 is read as it was trained in Caffe, not as in torchvision); **setting not published** where a learning rate or a
width had to be chosen; otherwise **unexplained**.

Where FedCOF's code differs from the paper in its setting, the rows of the early version, which prints the same figures,
are computed as in the code, and those of version 3 as in the paper: the code normalises CIFAR-100 by the constants of
CIFAR-10, and 200 rounds of 30 of 100 clients are 200 epochs there, of four rounds each.

Names that begin with `unprinted` are of what a paper draws without figures, or prints for a setting that takes days
here and is shown at a small one; they have no verdict.
"""


def results_page(found: Sequence[Found]) -> str:
    """Everything that was computed of some rows, as Markdown; over each table the command that computes it."""
    parts = [_OPENING]
    measured = [each for each in found if each.figures and not each.row.formula]
    editions = list(dict.fromkeys(each.computed for each in measured))
    if measured:
        parts.append(_counted(measured, editions))
        parts.append(_coverage(measured))
    for (source, table), group in groupby(measured, key=lambda each: (each.row.source, each.row.table)):
        mine = list(group)
        commands = "\n".join(_commands(mine))
        parts.append(f"## {source}, {_named(table)}\n\n```text\n{commands}\n```\n")
        parts.append(_table([(each, str(editions.index(each.computed) + 1)) for each in mine]))
    parts += [*_curves(measured), *_open(measured), *_formulas([each for each in found if each.row.formula])]
    parts += _not_run(measured)
    return "\n".join(parts)


def _commands(mine: Sequence[Found]) -> Iterator[str]:
    """What computes these rows again, once for those of each code; figures that no code has come with any of them."""
    groups: dict[tuple[str, ...], list[Found]] = {}
    for each in mine:
        options = tuple(option for option in each.command.split() if option.startswith("--"))
        groups.setdefault(() if options == ("--as-published",) else options, []).append(each)
    for options, group in sorted(groups.items()):
        plain = ("--as-published",) if any(each.command.endswith("--as-published") for each in group) else ()
        yield " ".join(["headstart reproduce", *shortest([each.row.id for each in group]), *(options or plain)])


def _table(lines: Sequence[tuple[Found, str]]) -> str:
    """Rows with the number of their versions; where no figure is printed, what is known instead of a difference."""
    if any(each.row.value is not None for each, _ in lines):
        return markdown(COLUMNS, [[*_cells(each), versions] for each, versions in lines])
    cells = []
    for each, versions in lines:
        name, _, _, ours, _, _, _, seeds, seconds = _cells(each)
        cells.append([name, ours, seeds, seconds, versions, each.row.note])
    return markdown(_UNPRINTED, cells)


def _named(table: str) -> str:
    return f"table {table}" if table[:1].isdigit() else table


def _counted(measured: Sequence[Found], editions: Sequence[str]) -> str:
    """How many figures there are, by verdict, and by the day and the versions behind them."""
    counted = Counter(each.verdict or "not printed" for each in measured)
    said = ", ".join(f"{count} {name}" for name, count in counted.most_common())
    runs = {(each.row.recipe, each.row.set): each.seconds for each in measured}  # some rows share their runs
    of = Counter(each.computed for each in measured)
    listed = "".join(f"\n{number}. {of[each]} of {each}" for number, each in enumerate(editions, 1))
    took = f"Their runs took {sum(runs.values()) / 60:.0f} minutes."
    return f"{len(measured)} figures: {said}. {took} By the number in the column of versions:\n{listed}\n"


def _curves(measured: Sequence[Found]) -> Iterator[str]:
    """Accuracies along the training of rows that are tested on the way."""
    curved = [each for each in measured if each.curve]
    if curved:
        yield "## Curves\n\nAccuracy after so many rounds of the last stage, the mean over the seeds.\n"
    by_rounds: dict[tuple[int, ...], list[list[str]]] = {}
    for each in curved:
        last = len(each.curve) - 1
        shown = dict(each.curve[round(last * step / (_POINTS - 1))] for step in range(_POINTS))
        cells = [f"`{each.row.id}`", *(f"{accuracy:.2f}" for accuracy in shown.values())]
        by_rounds.setdefault(tuple(shown), []).append(cells)
    for rounds, lines in by_rounds.items():
        yield markdown(("rounds", *map(str, rounds)), lines)


def _open(measured: Sequence[Found]) -> Iterator[str]:
    """What is lower than printed, and what is beyond two standard errors for no reason that is known."""
    if lower := [each for each in measured if each.row.value is not None and _below(each)]:
        cells = [[f"`{each.row.id}`", *_cells(each)[4:7], each.row.note] for each in lower]
        yield f"## Not reached\n\nLower than published by more than two standard errors:\n\n{markdown(_LOWER, cells)}"
    if open_ := [each for each in measured if "unexplained" in each.verdict or "mostly" in each.verdict]:
        cells = [[f"`{each.row.id}`", _cells(each)[4], each.row.note] for each in open_]
        yield f"## Not explained, or not fully\n\n{markdown(('row', 'difference', _LOWER[-1]), cells)}"


def _not_run(measured: Sequence[Found]) -> Iterator[str]:
    """Rows that have a recipe and are not on the page, by table."""
    here = {each.row.id for each in measured}
    rest = [row for row in rows() if row.recipe and row.id not in here]
    cells = []
    for (source, table), group in groupby(rest, key=lambda row: (row.source, row.table)):
        names = [row.id for row in group]
        cells.append(
            [f"{source}, {_named(table)}", str(len(names)), ", ".join(f"`{each}`" for each in shortest(names))]
        )
    if measured and cells:
        yield (
            "## Not run\n\nRows with a recipe that are not on this page; `headstart reproduce --list` says which of "
            "them run with the data and the weights that are at hand.\n"
        )
        yield markdown(("table", "figures", "rows"), cells)


def _below(found: Found) -> bool:
    """Whether the mean is lower than the printed figure by more than two standard errors."""
    return mean(found.figures) < (found.row.value or 0.0) - 2 * found.error(found.figures)


def _coverage(measured: Sequence[Found]) -> str:
    """How many figures of each paper are printed, have a recipe or a formula, and are on the page."""
    here = Counter(each.row.source for each in measured if each.row.printed)
    cells = []
    for source in dict.fromkeys(row.source for row in rows()):
        mine = [row for row in rows() if row.source == source and row.printed]
        able = sum(bool(row.recipe) for row in mine), sum(bool(row.formula) for row in mine)
        cells.append([source, str(len(mine)), *map(str, able), str(here[source])])
    return markdown(("paper", "figures printed", "with a recipe", "with a formula", "run here"), cells)


def _cells(found: Found) -> list[str]:
    """A line of a table."""
    row, figures = found.row, found.figures
    printed = f"{row.value:g}" if row.value is not None else ""
    spread = f" ± {row.deviation:g}" if row.deviation is not None else ""
    difference = "" if row.value is None else f"{mean(figures) - row.value:+.2f}"
    error = "" if row.value is None else f"{found.error(figures):.2f}"
    last = f" (last round {mean(found.last):.2f})" if found.last else ""
    shown = [f"`{row.id}`", printed + spread, _spread(found.reference), _spread(figures) + last]
    seeds = ", ".join(map(str, found.seeds))
    return [*shown, difference, error, found.verdict, seeds, f"{found.seconds:.0f}"]


def _spread(figures: Sequence[float]) -> str:
    if not figures:
        return ""
    return f"{mean(figures):.2f}" + (f" ± {stdev(figures):.2f}" if len(figures) > 1 else "")


def _formulas(found: Sequence[Found]) -> Iterator[str]:
    """How many costs come out as they are printed, and those that do not."""
    if not found:
        return
    others = [each for each in found if each.row.value is not None and not _printed(each)]
    same = f"{len(found) - len(others)} of {len(found)}"
    yield (
        "## Costs by formula\n\n```text\nheadstart reproduce --formulas\n```\n\n"
        f"{same} come out as they are printed, to a unit of the last place.\n"
    )
    if others:
        cells = [[f"`{each.row.id}`", *each.cells[1:4], each.row.note] for each in others]
        yield markdown(("row", "published", "computed", "difference", "note"), cells)


def _printed(found: Found) -> bool:
    """Whether a figure is the printed one, but for a unit of the last of its digits, and what printing cuts off."""
    value = found.row.value or 0.0
    digits = f"{value:.10g}"
    places = len(digits.partition(".")[2])
    step = 10.0**-places if places else 10.0 ** (len(digits) - len(digits.rstrip("0")))
    return abs(found.figures[0] - value) <= 1.2 * step
