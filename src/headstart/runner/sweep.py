"""Sweeps: a recipe with lists in the place of values is one run for every combination of them."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from headstart.config.describe import write_schema
from headstart.config.recipe import Recipe
from headstart.errors import HeadstartError, RecipeError
from headstart.records import RunDirectory
from headstart.runner.run_recipe import run

_LONGEST, _DIGITS = 120, 16  # bytes of a folder's name, and of a digest in it
# Keys whose own value is a list: a sweep over one of them is a list of lists.
_LISTS = ("classes", "label_words", "input_column", "label_column")
SEED = "seed"
UNSET = "unset"
"""In a list of values: the key is left out, so that its default holds."""
RESERVED = ("recipe", "stage", "method", "runs", "rounds", "bytes_up", "bytes_down", "forward_passes", "seconds")
"""Columns of the tables of a comparison: no value that is tried out has one of these names."""


@dataclass(frozen=True)
class Point:
    """One run of a sweep: its recipe, and what sets it apart from the others."""

    recipe: Recipe
    values: Mapping[str, Any]
    settings: tuple[str, ...] = ()
    """Of the values, those that are about the data: what methods are compared under."""

    @property
    def folder(self) -> str:
        """The name of its run directory: its values, or of many the first ones and a digest of all of them."""
        parts = [
            f"{key}={json.dumps(value) if isinstance(value, list) else value}" for key, value in self.values.items()
        ]
        whole = ",".join(parts) or self.recipe.name
        name = re.sub(r"[^A-Za-z0-9._=,+-]+", "-", whole)
        if len(name) <= _LONGEST:
            return name
        digest = hashlib.sha256(whole.encode()).hexdigest()[:_DIGITS]
        return f"{name[: _LONGEST - _DIGITS - 1]}-{digest}"


OnRun = Callable[[Point, dict[str, Any]], object]


def expand(tables: Sequence[Mapping[str, Any]]) -> list[Point]:
    """All runs of some recipes, in the order in which their lists are written; every mistake at once."""
    points, problems, combinations = list[Point](), dict[str, list[str]](), 0
    for table in tables:
        axes = dict(_axes(table, ()))
        if any(not values for values in axes.values()):
            empty = ", ".join(".".join(map(str, path)) for path, values in axes.items() if not values)
            problems[f"{empty}: an empty list sweeps over nothing"] = []
            continue
        names = _names(list(axes))
        for chosen in product(*axes.values()):
            filled = deepcopy(dict(table))
            for path, value in zip(axes, chosen, strict=True):
                _put(filled, path, value)
            values = {names[path]: UNSET if value is None else value for path, value in zip(axes, chosen, strict=True)}
            if len(tables) > 1:
                values = {"recipe": str(table.get("name", "run")), **values}
            combinations += 1
            settings = tuple(names[path] for path in axes if path[0] in ("data", "tasks"))
            try:
                points.append(Point(Recipe.parse(filled), values, settings))
            except RecipeError as error:
                for problem in error.problems:
                    problems.setdefault(problem, []).append(", ".join(f"{k} = {v}" for k, v in values.items()))
    if problems:
        raise RecipeError([_placed(problem, where, combinations) for problem, where in problems.items()])
    folders = [point.folder for point in points]
    if len(set(folders)) < len(folders):
        twice = sorted({folder for folder in folders if folders.count(folder) > 1})
        raise HeadstartError(f"two runs would be the same: {', '.join(twice)}; give recipes names of their own")
    return points


def _placed(problem: str, where: list[str], combinations: int) -> str:
    """A problem behind the combination of values that has it, unless all have."""
    if not where or len(where) == combinations:
        return problem
    return f"with {where[0]}{f' and {len(where) - 1} more' if len(where) > 1 else ''}: {problem}"


def _axes(table: Mapping[str, Any], path: tuple[str | int, ...]) -> Iterator[tuple[tuple[str | int, ...], list[Any]]]:
    """Every list that stands where a value is expected, and where it stands."""
    for key, value in table.items():
        here = (*path, key)
        if isinstance(value, Mapping):
            yield from _axes(value, here)
        elif isinstance(value, list) and value and all(isinstance(each, Mapping) for each in value):
            for number, each in enumerate(value):
                yield from _axes(each, (*here, number))
        elif isinstance(value, list) and (key not in _LISTS or any(isinstance(each, list) for each in value)):
            yield here, value


def _names(paths: list[tuple[str | int, ...]]) -> dict[tuple[str | int, ...], str]:
    """What an axis is called: its last key, or its whole path where two end alike or a table has such a column."""
    ends = [str(path[-1]) for path in paths]
    return {
        path: end if ends.count(end) == 1 and end not in RESERVED else ".".join(map(str, path))
        for path, end in zip(paths, ends, strict=True)
    }


def _put(table: Any, path: tuple[str | int, ...], value: Any) -> None:
    for key in path[:-1]:
        table = table[key]
    if value in (None, UNSET):
        del table[path[-1]]
    else:
        table[path[-1]] = value


def sweep(
    points: Sequence[Point], out: Path | None, on_run: OnRun = lambda point, summary: None, data: Any = None
) -> list[dict[str, Any]]:
    """Run every point in a directory of its own under ``out``; what is finished stays, what was cut short goes on.
    The directories have no page of their own: a comparison has one of all of them.

    Returns the summaries; ``on_run`` is called with each as it comes; data: where they are in memory.
    """
    summaries = []
    for point in points:
        summaries.append(_summary(point, out, data))
        if out is not None:
            write_schema(out)  # one for the recipes of all that follow
        on_run(point, summaries[-1])
    return summaries


def _summary(point: Point, out: Path | None, data: Any) -> dict[str, Any]:
    if out is None:
        return run(point.recipe, data=data).summary
    folder = out / point.folder
    summary = RunDirectory(folder).summary()
    if summary is None:
        resume = (folder / "recipe.toml").is_file()
        return run(point.recipe, folder, resume=resume, data=data, report=False).summary
    if Recipe.load(folder / "recipe.toml") != point.recipe:
        raise HeadstartError(f"{folder} is a run of another recipe; give another --out")
    return summary


def refuse_other_tables(points: Sequence[Point], out: Path) -> None:
    """Refuse a folder with the tables of runs that are not among these: they would be written over."""
    if not (out / "compare.csv").exists():
        return
    there = sorted(path.parent.name for path in out.glob("*/recipe.toml"))
    others = [name for name in there if name not in {point.folder for point in points}]
    if others:
        listed = ", ".join(others[:3]) + (f" and {len(others) - 3} more" if len(others) > 3 else "")
        raise HeadstartError(
            f"{out} holds the tables of another comparison, with the runs {listed}, which this one has not; "
            "give another --out, or compare those too"
        )
