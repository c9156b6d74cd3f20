"""Tables for the terminal, for pages and for papers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import numpy as np
import numpy.typing as npt
from rich.box import SIMPLE_HEAD
from rich.table import Table

from headstart.core.files import csv_text, write_text
from headstart.core.metrics import SHOWN, primary_metric
from headstart.records.record import Group

# As the papers write them.
_SYMBOLS = {"ridge": "λ", "shrinkage": "γ", "means_share": "a", "temperature": "T", "lr": "η"}
_METRICS = {
    "accuracy": "accuracy, %", "r2": "R²", "perplexity": "perplexity", "mae": "mean absolute error",
    "macro_f1": "macro-F1, %",
    "balanced_accuracy": "balanced accuracy, %", "roc_auc": "ROC AUC", "average_precision": "average precision",
    "calibration_error": "calibration error", "local_accuracy_worst_tenth": "lowest-accuracy tenth of clients, %",
    "exact_match": "exact match of sampled completions, %", "rouge_l": "ROUGE-L of sampled completions, %",
}  # fmt: skip
_NOISE = {"server": "by the server", "client": "by the client", "shared": "shared by the clients"}


def human_bytes(count: float) -> str:
    """Bytes in the units that the papers use: 1 MB is 10⁶ bytes."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(count) < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def stage_cells(stage: dict[str, Any]) -> list[str]:
    """One row of the summary table."""
    return [
        stage["method"] + _chosen(stage),
        score(stage),
        str(stage["rounds"]),
        human_bytes(stage["bytes_up"]),
        human_bytes(stage["bytes_down"]),
        human_bytes(stage["published_bytes"]),
        f"{stage['forward_passes']:,}",
        f"{stage['seconds']:.2f}",
    ]


def percent(accuracy: float | None) -> str:
    """An accuracy, where it is known."""
    return "not tested" if accuracy is None else f"{100 * accuracy:.2f} %"


def score(stage: Mapping[str, Any]) -> str:
    """How good a stage or a run is, in one figure: its accuracy, R² where it has no classes, or perplexity."""
    metric = primary_metric(stage)
    if metric == "accuracy":
        return percent(stage["accuracy"])
    return f"R² {stage['r2']:.4f}" if metric == "r2" else f"perplexity {stage['perplexity']:.2f}"


def metrics_of(stages: Sequence[Mapping[str, Any]]) -> list[str]:
    """The metrics that some of these stages have; an accuracy that nobody has measured, too."""
    there = [name for name in SHOWN if any(stage.get(name) is not None for stage in stages)]
    return there if {"accuracy", "r2", "perplexity"} & {*there} else ["accuracy", *there]


def metric_heading(name: str) -> str:
    """What a column of a metric is called, with its unit."""
    return _METRICS[name]


def metric_cell(name: str, stages: Sequence[Mapping[str, Any]]) -> str:
    """The mean of a metric over runs, with the standard deviation where there are several."""
    known = [value for stage in stages if (value := stage.get(name)) is not None]
    if not known:
        return percent(None) if name == "accuracy" else ""
    percents = _METRICS[name].endswith("%")
    shown = f"{100 * mean(known):.2f}" if percents else f"{mean(known):.4g}"
    if len(known) == 1:
        return shown
    return f"{shown} ± " + (f"{100 * stdev(known):.2f}" if percents else f"{round(stdev(known), 6):.2g}")


def quality(stage: Mapping[str, Any]) -> str | None:
    """The metrics of a stage beside the one in its table, in one line."""
    first, parts = primary_metric(stage), []
    if "accuracy_interval" in stage:
        low, high = (f"{100 * bound:.1f}" for bound in stage["accuracy_interval"])
        parts.append(f"of {stage['test_examples']:,} examples (95 % confidence: {low} to {high} %)")
    parts += [metric_text(name, stage) for name in SHOWN if name != first and stage.get(name) is not None]
    return f"{stage['method']}: {', '.join(parts)}" if parts else None


def metric_text(name: str, stage: Mapping[str, Any]) -> str:
    """A metric of a stage with its name and unit."""
    what, _, unit = _METRICS[name].partition(", ")
    return f"{what} {metric_cell(name, [stage])}{f' {unit}' if unit else ''}"


def _chosen(stage: dict[str, Any]) -> str:
    """What the server has chosen itself."""
    return "".join(f" {_SYMBOLS.get(key, key)} {value:.3g}" for key, value in stage["chosen"].items())


def _plain(stage: dict[str, Any], name: str) -> str:
    return f"{stage[f'{name}_mean']:.2f} ± {stage[f'{name}_std']:.2f}"


def remarks(stage: dict[str, Any]) -> list[str]:
    """What else is to be said of a stage: its tasks, its clients' own models, the round that validation chooses."""
    found = []
    if took := stage.get("simulated_seconds"):
        found.append(f"simulated time: {took:,.0f} s ({took / 3600:,.2f} h)")
    if "tasks" in stage:
        found.append(f"by task: {', '.join(f'{name} {score(part)}' for name, part in stage['tasks'].items())}")
    if "initial_accuracy_mean" in stage:
        initial, own = _spread(stage, "initial_accuracy"), _spread(stage, "personalised_accuracy")
        found.append(
            f"on clients' own examples: {initial} at first, {own} personalised (mean ± standard deviation over clients)"
        )
    if "initial_perplexity_mean" in stage:
        initial, own = _plain(stage, "initial_perplexity"), _plain(stage, "personalised_perplexity")
        found.append(
            f"perplexity of clients' own completions: {initial} at first, {own} personalised (mean ± standard "
            "deviation over clients)"
        )
    if "headless_accuracy_mean" in stage:
        initial, own = _spread(stage, "initial_headless_accuracy"), _spread(stage, "headless_accuracy")
        found.append(
            f"without a head, by the nearest mean of a client's classes: {initial} at first, {own} personalised"
        )
    if stage.get("local_perplexity_mean"):
        found.append(f"perplexity over clients: {_plain(stage, 'local_perplexity')} (mean ± standard deviation)")
    if "forgetting_ratio" in stage:
        found.append(
            f"on the whole {_split(stage)} split: {100 * stage['initial_whole_accuracy']:.2f} % at first, "
            f"{100 * stage['whole_accuracy']:.2f} % personalised; forgetting ratio {stage['forgetting_ratio']:.3f}"
        )
    if "whole_perplexity" in stage:
        found.append(
            f"perplexity on the whole {_split(stage)} split: {stage['initial_whole_perplexity']:.2f} at first, "
            f"{stage['whole_perplexity']:.2f} personalised"
        )
    if "privacy" in stage:
        spent = stage["privacy"]
        found.append(
            f"differential privacy of any one {spent['unit']}: ε = {spent['epsilon']:.3g}, δ = {spent['delta']:.1g}, "
            f"noise {_NOISE[spent['noise']]}" + (f"; released: {spent['released']}" if "released" in spent else "")
        )
        found += [spent["warning"]] if "warning" in spent else []
    if "test_privacy" in stage:
        spent = stage["test_privacy"]
        found.append(
            f"tests on nodes, of any one {spent['unit']}: ε = {spent['epsilon']:.3g}, δ = {spent['delta']:.1g}"
        )
    if "feature_similarity" in stage:
        found.append(f"cosine of features before and after: {stage['feature_similarity']:.4f}")
    if "best_round" in stage:
        then = score({name: stage.get(f"best_{name}") for name in ("accuracy", "perplexity")})
        best = f"round {stage['best_round']}, {then} on the {_split(stage)} split"
        kept = "the stage ends with it" if stage.get("keep") == "best" else "the table shows the last round"
        found.append(f"validation chooses {best}; {kept}")
    if absent := stage.get("absent"):
        missed = "; ".join(f"{name} from {_rounds(rounds)}" for name, rounds in absent.items())
        found.append(f"of {stage['rounds']} rounds, clients were absent: {missed}")
    return [f"{stage['method']}: {remark}" for remark in found]


def _rounds(rounds: Sequence[int]) -> str:
    """The rounds that a client has missed."""
    return f"round {rounds[0]}" if len(rounds) == 1 else f"{len(rounds)} rounds, the first {rounds[0]}"


def _split(stage: dict[str, Any]) -> str:
    """What its accuracy was measured on; runs of earlier versions do not say."""
    return str(stage.get("eval_split", "test"))


def _spread(stage: dict[str, Any], name: str) -> str:
    if stage[f"{name}_mean"] is None:
        return percent(None)
    return f"{100 * stage[f'{name}_mean']:.2f} ± {100 * stage[f'{name}_std']:.2f} %"


def cost_table(groups: Sequence[Group]) -> tuple[list[str], list[list[str]]]:
    """Columns and rows: metrics and cost of every stage of every group of runs, means over the seeds."""
    rows, shown = [], metrics_of([stage for group in groups for record in group.runs for stage in record.stages])
    for group in groups:
        for number in range(max(len(record.stages) for record in group.runs)):
            stages = [record.stages[number] for record in group.runs if number < len(record.stages)]
            means = {name: _mean([each.get(name) for each in stages]) for name in _COUNTED}
            chosen = _chosen(stages[0]) if len(stages) == 1 else ""
            rows.append(
                [
                    group.label,
                    stages[0]["method"] + chosen,
                    *(metric_cell(name, stages) for name in shown),
                    *_tested(stages),
                    str(len(stages)),
                    *(_count(means[name], name) for name in _COUNTED),
                ]
            )
    tested = ("95 % confidence interval", "test examples")
    return ["run", "method", *map(metric_heading, shown), *tested, "runs", *_COUNTED.values()], rows


def _tested(stages: Sequence[Mapping[str, Any]]) -> tuple[str, str]:
    """The confidence interval of the accuracy of one run, and of how many examples it is."""
    interval = stages[0].get("accuracy_interval") if len(stages) == 1 else None
    count = _mean([stage.get("test_examples") for stage in stages])
    shown = "" if interval is None else f"{100 * interval[0]:.1f} to {100 * interval[1]:.1f}"
    return shown, "" if count is None else f"{count:,.0f}"


_COUNTED = {
    "rounds": "rounds", "bytes_up": "bytes up", "bytes_down": "bytes down", "published_bytes": "bytes (paper)",
    "forward_passes": "forward passes", "published_compute": "forward passes (paper)", "seconds": "seconds",
}  # fmt: skip


def _mean(values: Sequence[float | None]) -> float | None:
    there = [value for value in values if value is not None]
    return mean(there) if there else None


def _count(value: float | None, name: str) -> str:
    if value is None:
        return ""
    return human_bytes(value) if "bytes" in name else f"{value:,.2f}" if name == "seconds" else f"{value:,.0f}"


def table_files(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> dict[str, str]:
    """A table as CSV, Markdown and LaTeX, by the ending of a file."""
    return {"csv": csv_text([columns, *rows]), "md": markdown(columns, rows), "tex": latex(columns, rows)}


def write_tables(path: Path, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[Path]:
    """The files of a table, under a path without an ending."""
    files = {path.with_name(f"{path.name}.{ending}"): text for ending, text in table_files(columns, rows).items()}
    for file, text in files.items():
        write_text(file, text)
    return list(files)


def _right(rows: Sequence[Sequence[str]], column: int) -> bool:
    """Whether a column holds figures, which stand to the right."""
    cells = [row[column] for row in rows if row[column]]
    return bool(cells) and all(cell[0].isdigit() or cell[0] in "-−." for cell in cells)


Places = AbstractSet[tuple[int, int]]
"""Rows and columns of cells that stand out."""


def markdown(columns: Sequence[str], rows: Sequence[Sequence[str]], bold: Places = frozenset()) -> str:
    """A table in Markdown."""
    ruler = ["---:" if _right(rows, place) else "---" for place in range(len(columns))]
    marked = [[f"**{c}**" if (r, p) in bold else c for p, c in enumerate(row)] for r, row in enumerate(rows)]
    lines = [columns, ruler, *marked]
    return "".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |\n" for line in lines)


def latex(columns: Sequence[str], rows: Sequence[Sequence[str]], bold: Places = frozenset()) -> str:
    """A table in LaTeX, with the rules of the `booktabs` package."""
    special = {"\\": r"\textbackslash{}", "±": r"$\pm$", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
    special |= {character: f"\\{character}" for character in "&%$#_{}"} | {"²": r"\textsuperscript{2}", "→": r"$\to$"}
    lines = []
    for number, line in enumerate((columns, *rows), -1):
        cells = ["".join(special.get(c, c) for c in cell) for cell in line]
        cells = [rf"\textbf{{{cell}}}" if (number, place) in bold else cell for place, cell in enumerate(cells)]
        lines.append(" & ".join(cells) + r" \\")
    kinds = "".join("r" if _right(rows, place) else "l" for place in range(len(columns)))
    parts = [rf"\begin{{tabular}}{{{kinds}}}", r"\toprule", lines[0], r"\midrule", *lines[1:]]
    return "\n".join([*parts, r"\bottomrule", r"\end{tabular}", ""])


COLUMNS = ("method", "accuracy", "rounds", "bytes up", "bytes down", "bytes (paper)", "forward passes", "seconds")
_WITHOUT_CLASSES = ("method", "score", *COLUMNS[2:])


def summary_table(summary: dict[str, Any]) -> Table:
    """Score and cost of every stage."""
    absent = {name for stage in summary["stages"] for name in stage.get("absent", {})}
    clients = f"{summary['clients']:,} clients" + (f" ({len(absent):,} absent at times)" if absent else "")
    title = f"{summary['name']}: {clients}, {summary['examples']:,} training examples"
    # Narrow enough for a terminal of 80 columns: headings may wrap, figures may not.
    table = Table(title=title, box=SIMPLE_HEAD, padding=0, show_edge=False)
    classes = all(primary_metric(stage) == "accuracy" for stage in summary["stages"])
    for column in COLUMNS if classes else _WITHOUT_CLASSES:
        table.add_column(column.replace(" ", "\n"), justify="left" if column == "method" else "right", no_wrap=True)
    for stage in summary["stages"]:
        table.add_row(*stage_cells(stage))
    return table


def partition_table(names: tuple[str, ...], classes: tuple[str, ...], counts: npt.NDArray[np.int64]) -> Table:
    """Data distribution across clients: clients by class, the first 20 of each; no classes where all are of one, as
    texts that are completed are."""
    several, clients = len(classes) > 1, min(len(names), 20)
    shown = min(len(classes), 20) if several else 0
    of_classes = f"{len(classes)} classes, " if several else ""
    table = Table(title=f"{len(names)} clients, {of_classes}{counts.sum():,} training examples")
    table.add_column("client")
    more = [f"{len(classes) - shown} more"] if several and shown < len(classes) else []
    for heading in [*classes[:shown], *more, *(["classes"] if several else []), "examples"]:
        table.add_column(heading, justify="right")
    for client in range(clients):
        row = counts[client]
        cells = [str(count) if count else "·" for count in row[:shown]]
        rest = [str(row[shown:].sum())] if more else []
        present = [str(np.count_nonzero(row))] if several else []
        table.add_row(names[client], *cells, *rest, *present, str(row.sum()))
    if clients < len(names):
        table.add_row(f"… {len(names) - clients} more")
    return table
