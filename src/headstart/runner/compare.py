"""Comparisons: recipes and every combination of the values that they list, as runs, tables and tests over seeds."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from statistics import mean, stdev
from typing import TYPE_CHECKING, Any

import numpy as np

from headstart.config.recipe import Recipe
from headstart.config.toml import read_table
from headstart.core.files import csv_text, write_text
from headstart.core.metrics import goodness, primary_metric
from headstart.data import Federation
from headstart.errors import HeadstartError
from headstart.records import Record
from headstart.report import (
    html_table,
    human_bytes,
    latex,
    markdown,
    metric_cell,
    metric_heading,
    metrics_of,
    write_figures,
    write_report,
)
from headstart.runner.run_recipe import in_memory
from headstart.runner.sweep import SEED, OnRun, Point, expand, refuse_other_tables, sweep

if TYPE_CHECKING:
    import pandas

_BESIDE = ("balanced_accuracy", "calibration_error")  # metrics that a table for a reader leaves to compare.csv
_COSTS = ("rounds", "bytes_up", "bytes_down", "forward_passes", "seconds")


def compare(
    recipes: Recipe | Mapping[str, Any] | Path | str | Sequence[Recipe | Mapping[str, Any] | Path | str],
    out: Path | str | None = None,
    settings: Sequence[str] = (),
    on_run: OnRun = lambda point, summary: None,
    *,
    data: Any = None,
    choose: Sequence[str] = (),
) -> Comparison:
    """Run recipes (tables, or paths of TOML files), and every combination of values where a list stands in the place
    of a value; means and tests over the seeds.

    With ``out``, every run has a directory under it, finished ones stay and interrupted ones go on; without, nothing is
    written. ``settings``: as of ``--set``; ``on_run`` is called with each point and its summary; ``data``: as of `run`.
    ``choose``: of these keys, only the values with the best mean score over the seeds on the validation split, at
    the end of the run; the first of equals.
    """
    given = [recipes] if isinstance(recipes, Recipe | Mapping | Path | str) else list(recipes)
    tables = [_table(each, settings, data) for each in given]
    points, where = expand(tables), Path(out) if out is not None else None
    if where is not None:
        refuse_other_tables(points, where)
    choose = _named(points, choose)
    if data is None:
        _refuse_unvalidated([point for point in points if set(choose) & point.values.keys()])
    summaries = sweep(points, where, on_run, data)
    found = Comparison(*_chosen(points, summaries, choose), tuple(choose)) if choose else Comparison(points, summaries)
    if where is not None:
        found.write(where)
    return found


def _named(points: Sequence[Point], choose: Sequence[str]) -> list[str]:
    """The keys to choose by the names that tables have for them; what the recipes do not list is refused."""
    listed = dict.fromkeys(key for point in points for key in point.values if key not in (SEED, "recipe"))
    named = [next((key for key in listed if each == key or each.endswith(f".{key}")), each) for each in choose]
    if unknown := [key for key in named if key not in listed]:
        there = ", ".join(listed) or "nothing but seeds"
        raise HeadstartError(f"choose: no recipe lists values of {', '.join(unknown)}; they list {there}")
    return named


def _refuse_unvalidated(points: Sequence[Point]) -> None:
    """Refuse to choose where there is nothing to choose by, before anything is run."""
    for point in {str(point.recipe.data): point for point in points}.values():
        if Federation.of(point.recipe).dataset.validation is None:
            raise HeadstartError(
                f"choose: the data of {point.folder} have no validation split to choose by; give them one"
            )


def _chosen(
    points: Sequence[Point], summaries: Sequence[dict[str, Any]], choose: Sequence[str]
) -> tuple[list[Point], list[dict[str, Any]]]:
    """The runs with the chosen values: those of a group that differs in nothing else, by the validation split."""
    scores: dict[str, dict[str, list[float]]] = {}
    places = []
    for point, summary in zip(points, summaries, strict=True):
        free = str({key: value for key, value in point.values.items() if key in choose})
        same = str({key: value for key, value in point.values.items() if key not in (*choose, SEED)})
        places.append((same, free))
        stage = summary["stages"][-1]
        metric = primary_metric(stage)
        score = stage.get(f"validation_{metric}")
        if free != "{}" and score is None:
            raise HeadstartError(f"choose: {point.folder} has no {metric} on a validation split; give the data one")
        scores.setdefault(same, {}).setdefault(free, []).append(goodness(metric, score or 0.0))
    best = {same: max(tried, key=lambda free: mean(tried[free])) for same, tried in scores.items()}
    kept = [place for place, (same, free) in enumerate(places) if best[same] == free]
    return [points[place] for place in kept], [summaries[place] for place in kept]


def _table(recipe: Any, settings: Sequence[str], data: Any) -> dict[str, Any]:
    table = recipe.model_dump(mode="json", exclude_none=True) if isinstance(recipe, Recipe) else recipe
    if isinstance(table, Mapping) and settings:
        raise HeadstartError("settings are for recipes in files; change the table instead")
    table = dict(table) if isinstance(table, Mapping) else read_table(table, settings)
    if not table.get("tasks"):
        table.pop("tasks", None)
    return table if data is None else {**table, "data": {**in_memory(data), **table.get("data", {})}}


@dataclass(frozen=True, eq=False)
class Row:
    """A stage of runs that differ in nothing but the seed."""

    values: dict[str, Any]
    """What sets these runs apart from the others."""
    number: int
    """Of the stage, from 0."""
    stages: dict[int, dict[str, Any]]
    """The stage as each seed's run summarises it."""
    recipe: Recipe
    """Of one of these runs."""

    @property
    def until(self) -> str:
        """The recipe up to this stage, which is all that it may build on; but for its name and the seed."""
        stages = self.recipe.stages[: self.number + 1]
        return self.recipe.model_copy(update={"name": "", "seed": 0, "stages": stages}).model_dump_json()

    @property
    def is_last(self) -> bool:
        """Whether the runs end with this stage."""
        return self.number + 1 == len(self.recipe.stages)

    @property
    def method(self) -> str:
        """Of the stage."""
        return str(next(iter(self.stages.values()))["method"])

    @property
    def tested(self) -> int | None:
        """How many examples the accuracies are of, on average over the seeds; None where nobody has tested."""
        known = [stage["test_examples"] for stage in self.stages.values() if stage.get("test_examples")]
        return round(mean(known)) if known else None


@dataclass(frozen=True, eq=False, repr=False)
class Comparison:
    """Finished runs, and what they say together."""

    points: Sequence[Point]
    summaries: Sequence[dict[str, Any]]
    chosen: tuple[str, ...] = ()
    """Keys whose values the validation split chose: they set no rows apart."""

    @cached_property
    def keys(self) -> list[str]:
        """What sets runs apart, but for the seed, and for the method of a single stage, which has a column anyway."""
        found = dict.fromkeys(key for point in self.points for key in point.values if key != SEED)
        methods = [[stage.method for stage in point.recipe.stages] for point in self.points]
        return [key for key in found if [[point.values.get(key)] for point in self.points] != methods]

    @cached_property
    def settings(self) -> list[str]:
        """Of these, what is about the data: methods are compared under each combination of them."""
        return [key for key in self.keys if any(key in point.settings for point in self.points)]

    @cached_property
    def _others(self) -> list[str]:
        """What names a row of the pivot beside its method."""
        return [key for key in self.keys if key not in (*self.settings, *self.chosen)]

    @cached_property
    def rows(self) -> list[Row]:
        """Every stage of every group of runs."""
        found: dict[str, Row] = {}
        for point, summary in zip(self.points, self.summaries, strict=True):
            values = {key: value for key, value in point.values.items() if key != SEED}
            for number, stage in enumerate(summary["stages"]):
                row = found.setdefault(f"{values} {number}", Row(values, number, {}, point.recipe))
                row.stages[point.recipe.seed] = stage
        return list(found.values())

    @cached_property
    def results(self) -> list[Row]:
        """The rows, but a stage that runs have in common, with all that comes before it, is one: that of the runs that
        end with it, if there are any, or else named by what the runs have in common."""
        groups: dict[str, list[Row]] = {}
        for row in self.rows:
            groups.setdefault(row.until, []).append(row)
        found = []
        for group in groups.values():
            first, *others = [row for row in group if row.is_last] or group
            common = {k: v for k, v in first.values.items() if all(v == each.values.get(k) for each in others)}
            stages = {seed: stage for row in reversed(group) for seed, stage in row.stages.items()}
            found.append(replace(first, values=common, stages=stages))
        return found

    @cached_property
    def _metrics(self) -> list[str]:
        return metrics_of([stage for row in self.rows for stage in row.stages.values()])

    @cached_property
    def _primary(self) -> str:
        """The metric that rows are compared by."""
        return next(name for name in ("accuracy", "r2", "perplexity") if name in self._metrics)

    def records(self) -> Iterator[dict[str, Any]]:
        """Numbers, tidy: a row for every stage of every combination, with mean and standard deviation over the seeds of
        each metric, the number of runs, and means of the costs."""
        for row in self.rows:
            found: dict[str, Any] = {key: row.values.get(key) for key in self.keys}
            found |= {"stage": row.number, "method": row.method, "runs": len(row.stages)}
            found["test_examples"] = row.tested
            for name in self._metrics:
                known = _known(name, row.stages.values())
                found[f"{name}_mean"] = mean(known) if known else None
                found[f"{name}_std"] = stdev(known) if len(known) > 1 else None
            yield found | {name: mean(stage[name] for stage in row.stages.values()) for name in _COSTS}

    def to_frame(self) -> pandas.DataFrame:
        """`records` as a data frame."""
        import pandas

        return pandas.DataFrame(self.records())

    def table(self) -> tuple[list[str], list[list[str]]]:
        """Columns and rows for a reader: mean ± standard deviation over the seeds; `records` has more metrics."""
        metrics = [name for name in self._metrics if name not in _BESIDE]
        columns = [*self.keys, "method", *map(metric_heading, metrics), "test examples", "runs", "bytes up"]
        rows = []
        for row in self.results:
            stages = list(row.stages.values())
            rows.append(
                [
                    *(str(row.values.get(key, "")) for key in self.keys),
                    row.method,
                    *(metric_cell(name, stages) for name in metrics),
                    "" if row.tested is None else f"{row.tested:,}",
                    str(len(stages)),
                    human_bytes(mean(stage["bytes_up"] for stage in stages)),
                    f"{mean(stage['seconds'] for stage in stages):.2f}",
                ]
            )
        return [*columns, "seconds"], rows

    def _named(self, row: Row) -> tuple[str, ...]:
        """What a row of the pivot is called: the method, and what is set apart beside the data."""
        return (*(str(row.values.get(key, "")) for key in self._others), row.method, str(row.number))

    def _under(self, row: Row) -> str:
        """The setting of the data that a row belongs to."""
        return ", ".join(f"{key} {row.values.get(key, '')}" for key in self.settings)

    def pivot(self) -> tuple[list[str], list[list[str]], set[tuple[int, int]]]:
        """Methods × settings: columns, rows, and the places of the best figure of each setting.

        A cell is the mean ± standard deviation over the seeds of accuracy (in %), of R² where there are no classes, or
        of perplexity.
        """
        metric = self._primary
        under = list(dict.fromkeys(self._under(row) for row in self.results))
        named = list(dict.fromkeys(map(self._named, self.results)))
        cells = {(self._named(row), self._under(row)): list(row.stages.values()) for row in self.results}
        several = len({(*name[:-1],) for name in named}) < len(named)  # a method more than once in a recipe
        columns = [*self._others, "method", *(["stage"] if several else [])]
        fixed = len(columns)
        columns += [f"{metric_heading(metric)}{f', {each}' if each else ''}" for each in under] + ["bytes up"]
        rows, best = [], set()
        for name in named:
            mine = [cells.get((name, each), []) for each in under]
            sent = mean(stage["bytes_up"] for stages in mine for stage in stages)
            shown = [metric_cell(metric, stages) if stages else "" for stages in mine]
            rows.append([*(name if several else name[:-1]), *shown, human_bytes(sent)])
        for place, each in enumerate(under):
            known = [_known(metric, cells.get((name, each), [])) for name in named]
            means = [goodness(metric, mean(values)) if values else None for values in known]
            highest = max((value for value in means if value is not None), default=None)
            best |= {(row, fixed + place) for row, value in enumerate(means) if value == highest is not None}
        return columns, rows, best

    def tests(self) -> list[dict[str, Any]]:
        """Paired t-tests over the seeds: in each setting of the data, the best row against each of the others.

        `difference` is the mean of best − other over the seeds that both have, at least two; `p_value` is two-sided;
        `p_holm` holds for all tests of a setting together (Holm, 1979).
        """
        found: list[dict[str, Any]] = []
        for under in dict.fromkeys(map(self._under, self.results)):
            mine = [
                (row, scores) for row in self.results if self._under(row) == under and (scores := self._scores(row))
            ]
            if not mine:
                continue
            best, top = max(mine, key=lambda each: goodness(self._primary, mean(each[1].values())))
            tested = [self._test(best, top, row, scores) for row, scores in mine if row is not best]
            found += _holm([each for each in tested if each is not None])
        return found

    def _scores(self, row: Row) -> dict[int, float]:
        """The primary metric by seed, where it is known."""
        return {
            seed: stage[self._primary] for seed, stage in row.stages.items() if stage.get(self._primary) is not None
        }

    def _test(
        self, best: Row, top: Mapping[int, float], row: Row, scores: Mapping[int, float]
    ) -> dict[str, Any] | None:
        from scipy.stats import ttest_rel

        seeds = [seed for seed in top if seed in scores]
        if len(seeds) < 2:
            return None
        ours, theirs = (np.array([each[seed] for seed in seeds]) for each in (top, scores))
        constant = np.ptp(ours - theirs) < 1e-12  # no spread to compare a difference with
        named = [" ".join(filter(None, self._named(each)[:-1])) for each in (best, row)]
        return {
            **{key: row.values.get(key) for key in self.settings},
            "best": named[0], "other": named[1], "stage": row.number, "seeds": len(seeds),
            "difference": float((ours - theirs).mean()),
            "p_value": None if constant else float(ttest_rel(ours, theirs).pvalue),
        }  # fmt: skip

    def write(self, folder: Path) -> list[Path]:
        """`compare.csv` (tidy), `compare.md` and `compare.tex` (methods × settings), `compare-tests.csv`, figures, and
        the page of all runs; returns the tables."""
        columns, rows, best = self.pivot()
        texts = {
            "compare.csv": _csv(list(self.records())),
            "compare.md": markdown(columns, rows, best),
            "compare.tex": latex(columns, rows, best),
        }
        if tests := self.tests():
            texts["compare-tests.csv"] = _csv(tests)
        for name, text in texts.items():
            write_text(folder / name, text)
        records = [Record.read(folder / point.folder) for point in self.points]
        write_figures(folder / "figures", records)
        write_report(folder / "report.html", records)
        return [folder / name for name in texts]

    def __repr__(self) -> str:
        varied = dict.fromkeys(key for point in self.points for key in point.values if key != SEED)
        return f"<Comparison of {len(self.points)} runs: {', '.join(varied) or 'one recipe'}>"

    def _repr_html_(self) -> str:
        """The table, for notebooks."""
        return html_table(*self.table())


def _known(metric: str, stages: Iterable[Mapping[str, Any]]) -> list[float]:
    """Its values in some stages, where it has one."""
    return [value for stage in stages if (value := stage.get(metric)) is not None]


def _holm(tests: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same tests with p-values that hold for all of them together."""
    known = sorted((each for each in tests if each["p_value"] is not None), key=lambda each: float(each["p_value"]))
    highest, adjusted = 0.0, dict[int, float]()
    for place, each in enumerate(known):
        highest = max(highest, min(1.0, (len(known) - place) * each["p_value"]))
        adjusted[id(each)] = highest
    return [{**each, "p_holm": adjusted.get(id(each))} for each in tests]


def _csv(records: Sequence[Mapping[str, Any]]) -> str:
    """Records as CSV; what is not known is empty."""
    columns = list(dict.fromkeys(name for each in records for name in each))
    return csv_text([columns, *([_plain(each.get(name)) for name in columns] for each in records)])


def _plain(value: Any) -> Any:
    return "" if value is None else f"{value:.10g}" if isinstance(value, float) else value
