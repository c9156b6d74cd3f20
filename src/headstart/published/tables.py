"""The papers' tables as rows: what is printed, and the recipe or the formula that gives it again."""

from __future__ import annotations

import csv
import os
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from headstart.config.toml import read_table
from headstart.errors import HeadstartError
from headstart.runner.sweep import Point, expand

HERE = Path(__file__).parent
CLOSED_FORM = "closed-form"


@dataclass(frozen=True)
class Row:
    """One printed figure; its id is PAPER/TABLE/…, unique over all files."""

    id: str
    source: str
    table: str
    method: str
    dataset: str
    backbone: str
    setting: str
    quantity: str
    """accuracy of the last round, best accuracy (of the round that is best on test data, as some papers print it),
    initial, personalised, headless or training accuracy, communication, compute, parameters, clients per class."""
    value: float | None
    """None: the printed figure was not at hand or, with a recipe, none is printed."""
    deviation: float | None
    unit: str
    bytes: float | None
    """The communication that is printed for the same method, in bytes."""
    recipe: str
    """A file of published/recipes, without its ending."""
    set: str
    """Keys of the recipe that differ, or the arguments of the formula: key=value; key=value."""
    formula: str
    note: str
    """Slips of the printed figure, and what is different here."""

    @property
    def printed(self) -> bool:
        """Whether a paper prints a figure, be it one that cannot be read; some runs only follow its protocol."""
        return self.value is not None or not self.recipe

    @property
    def settings(self) -> list[str]:
        """What differs, one by one."""
        return [part.strip() for part in self.set.split(";") if part.strip()]

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments of the formula."""
        pairs = (setting.split("=", 1) for setting in self.settings)
        return {key: text if text.isalpha() else tomllib.loads(f"value = {text}")["value"] for key, text in pairs}

    def points(self) -> list[Point]:
        """The runs that give the figure: one for every seed."""
        table = read_table(HERE / "recipes" / f"{self.recipe}.toml", self.settings)
        if table["model"].get("weights", "random") != "random":
            table["model"]["weights"] = str(Path(os.environ.get("HEADSTART_WEIGHTS", "")) / table["model"]["weights"])
        return expand([table])


@cache
def rows() -> tuple[Row, ...]:
    """All rows of all papers."""
    found = []
    for path in sorted(HERE.glob("*.csv")):
        with path.open(newline="", encoding="utf-8") as file:
            for line in csv.DictReader(file):
                numbers = {key: float(line[key]) if line[key] else None for key in ("value", "deviation", "bytes")}
                found.append(Row(**(line | numbers)))  # type: ignore[arg-type]
    return tuple(found)


def select(names: list[str], closed_form: bool = False, formulas: bool = False) -> list[Row]:
    """The rows of these ids, tables (fedncm/2) or papers (fedncm), in the order of the files; without names, all.

    closed_form: of these, heads in closed form; formulas: those with a formula; with both, either.
    """
    chosen = {name: [row for row in rows() if f"{row.id}/".startswith(name.rstrip("/") + "/")] for name in names}
    known = dict.fromkeys("/".join(row.id.split("/")[:depth]) for row in rows() for depth in range(1, 7))
    for name, found in chosen.items():
        if not found:
            close = ", ".join(get_close_matches(name, known, n=3, cutoff=0.3))
            raise HeadstartError(
                f"{name!r} is no published row or table; nearest: {close}; headstart reproduce --list shows all"
            )
    wanted = {row.id for found in chosen.values() for row in found}
    found = [row for row in rows() if not names or row.id in wanted]
    if not (closed_form or formulas):
        return found
    return [row for row in found if (closed_form and row.recipe == CLOSED_FORM) or (formulas and row.formula)]


def shortest(ids: Sequence[str]) -> list[str]:
    """The shortest names (tables, or more of an id) that stand for these rows and no others that have a recipe."""
    others = [f"{row.id}/" for row in rows() if row.recipe and row.id not in ids]
    names: dict[str, None] = {}
    for each in ids:
        parts = each.split("/")
        wider = ("/".join(parts[:depth]) for depth in range(2, len(parts)))
        names[next((name for name in wider if not any(o.startswith(f"{name}/") for o in others)), each)] = None
    return list(names)


def why_not(row: Row) -> str | None:
    """Why a row cannot be computed with what is at hand; None where it can."""
    if row.formula:
        return None
    if not row.recipe:
        return f"no recipe: {row.note}"
    recipe = row.points()[0].recipe
    folder = Path(os.environ.get("HEADSTART_DATA", ""))
    if "HEADSTART_DATA" not in os.environ or not (folder / recipe.datasets).is_dir():
        return f"{recipe.datasets} is not in HEADSTART_DATA"
    package, slash, _ = recipe.model.backbone.partition("/")
    if slash and find_spec(package) is None:
        return f"{recipe.model.backbone} needs headstart[{package}]"
    weights = recipe.model.weights
    if weights not in (None, "random") and not Path(weights).is_file():
        return f"{Path(weights).name} is not in HEADSTART_WEIGHTS"
    return None
