"""Sweeps: a recipe with lists in the place of values is one run for every combination of them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import mean
from typing import Any

from headstart.config.recipe import Recipe
from headstart.errors import HeadstartError, RecipeError
from headstart.records import RunDirectory
from headstart.report import human_bytes, metric_cell, metric_heading, metrics_of
from headstart.runner import run

# Keys whose own value is a list: a sweep over one of them is a list of lists.
_LISTS = ("classes", "label_words", "input_column", "label_column")
SEED = "seed"


@dataclass(frozen=True)
class Point:
    """One run of a sweep: its recipe, and what sets it apart from the others."""

    recipe: Recipe
    values: Mapping[str, Any]

    @property
    def folder(self) -> str:
        """The name of its run directory."""
        parts = [
            f"{key}={json.dumps(value) if isinstance(value, list) else value}" for key, value in self.values.items()
        ]
        return re.sub(r"[^A-Za-z0-9._=,+-]+", "-", ",".join(parts)) or self.recipe.name


def expand(tables: Sequence[Mapping[str, Any]]) -> list[Point]:
    """All runs of some recipes, in the order in which their lists are written; every mistake at once."""
    points, problems = [], dict[str, None]()
    for table in tables:
        axes = dict(_axes(table, ()))
        if any(not values for values in axes.values()):
            empty = ", ".join(".".join(map(str, path)) for path, values in axes.items() if not values)
            problems[f"{empty}: an empty list sweeps over nothing"] = None
            continue
        names = _names(list(axes))
        for chosen in product(*axes.values()):
            filled = deepcopy(dict(table))
            for path, value in zip(axes, chosen, strict=True):
                _put(filled, path, value)
            values = {names[path]: value for path, value in zip(axes, chosen, strict=True)}
            if len(tables) > 1:
                values = {"recipe": str(table.get("name", "run")), **values}
            try:
                points.append(Point(Recipe.parse(filled), values))
            except RecipeError as error:
                problems |= dict.fromkeys(error.problems)
    if problems:
        raise RecipeError(list(problems))
    folders = [point.folder for point in points]
    if len(set(folders)) < len(folders):
        twice = sorted({folder for folder in folders if folders.count(folder) > 1})
        raise HeadstartError(f"two runs would be the same: {', '.join(twice)}; give recipes names of their own")
    return points


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
    """What an axis is called: its last key, or its whole path where two end alike."""
    ends = [str(path[-1]) for path in paths]
    return {
        path: end if ends.count(end) == 1 else ".".join(map(str, path)) for path, end in zip(paths, ends, strict=True)
    }


def _put(table: Any, path: tuple[str | int, ...], value: Any) -> None:
    for key in path[:-1]:
        table = table[key]
    table[path[-1]] = value


def sweep(
    points: Sequence[Point], out: Path, on_run: Callable[[Point, dict[str, Any]], object]
) -> list[dict[str, Any]]:
    """Run every point in a directory of its own under ``out``; what is finished stays, what was cut short goes on.

    Returns the summaries; ``on_run`` is called with each as it comes.
    """
    summaries = []
    for point in points:
        folder = out / point.folder
        summary = RunDirectory(folder).summary()
        if summary is None:
            summary = run(point.recipe, folder, resume=(folder / "recipe.toml").is_file()).summary
        elif Recipe.load(folder / "recipe.toml") != point.recipe:
            raise HeadstartError(f"{folder} is a run of another recipe; give another --out")
        summaries.append(summary)
        on_run(point, summary)
    return summaries


def compared(points: Sequence[Point], summaries: Sequence[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Columns and rows: what sets runs apart, and for each stage the mean ± standard deviation over the seeds."""
    keys = list(dict.fromkeys(key for point in points for key in point.values if key != SEED))
    groups: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for point, summary in zip(points, summaries, strict=True):
        groups.setdefault(tuple(str(point.values.get(key, "")) for key in keys), []).append(summary)
    rows, shown = [], metrics_of([stage for each in summaries for stage in each["stages"]])
    for values, runs in groups.items():
        for number in range(max(len(each["stages"]) for each in runs)):
            stages = [each["stages"][number] for each in runs if number < len(each["stages"])]
            rows.append(
                [
                    *values,
                    stages[0]["method"],
                    *(metric_cell(name, stages) for name in shown),
                    str(len(stages)),
                    human_bytes(mean(stage["bytes_up"] for stage in stages)),
                    f"{mean(stage['forward_passes'] for stage in stages):,.0f}",
                    f"{mean(stage['seconds'] for stage in stages):.2f}",
                ]
            )
    metrics = map(metric_heading, shown)
    return [*keys, "method", *metrics, "runs", "bytes up", "forward passes", "seconds"], rows


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
