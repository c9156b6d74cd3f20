"""The first sentence of a report: one number, of how many examples, against what, for how many bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from statistics import mean
from typing import Any

import numpy as np

from headstart.core.metrics import goodness, primary_metric, wilson_interval
from headstart.records.record import Group, Record, score_of
from headstart.report.tables import human_bytes, metric_cell


def opening(groups: Sequence[Group]) -> str:
    """One sentence about one run, or about the best of several groups; nothing where nobody has tested."""
    scored = [(group, found) for group in groups if (found := _score(group)) is not None]
    if not scored:
        return ""
    if len(groups) == 1 and len(groups[0].runs) == 1:
        return f'<p class="lead">{_of_one(groups[0].runs[0])}</p>'
    scored.sort(key=lambda each: -goodness(primary_metric(each[0].runs[0].stages[-1]), each[1]))
    best = scored[0][0]
    first = _cell(best)
    text = f"<b>{first[0].upper()}{first[1:]}</b>{_tested(best)}: {escape(best.label)}, {_runs(best)}, {_sent(best)}"
    if len(scored) > 1:
        text += f"; next is {escape(scored[1][0].label)} with {_cell(scored[1][0])}, {_sent(scored[1][0])}"
    return f'<p class="lead">{text}.</p>'


def _of_one(record: Record) -> str:
    stage, method = record.stages[-1], escape(record.stages[-1]["method"])
    summary: Mapping[str, Any] = record.summary or {}
    clients = f"{summary['clients']:,} clients" if "clients" in summary else "clients"
    sent = f"the {clients} sent {human_bytes(stage['bytes_up'])}"
    if len(record.stages) > 1:  # which may build on those before it, or start afresh
        sent += f" in this stage, {human_bytes(sum(each['bytes_up'] for each in record.stages))} in all stages"
    if stage.get("r2") is not None:
        return f"<b>R² {stage['r2']:.4f}</b> (variance explained) by {method}; {sent}."
    if primary_metric(stage) == "perplexity":
        return f"{_surprised(record)} by {method}; {sent}."
    return f"{correct(stage, record)} by {method}; {sent}."


def _surprised(record: Record) -> str:
    """The perplexity of a run's last stage, and that before any training."""
    text = f"<b>Perplexity {record.stages[-1]['perplexity']:.2f}</b> of test completions"
    first = record.metrics[0] if record.metrics else {}
    return f"{text} ({first['perplexity']:.2f} before training)" if first.get("round") == 0 else text


def correct(stage: Mapping[str, Any], record: Record | None = None) -> str:
    """The accuracy of a stage, of how many examples, and its confidence interval; against the most frequent class."""
    accuracy, examples = stage["accuracy"], stage.get("test_examples")
    split = stage.get("eval_split", "test")
    of = f" of {examples:,} {split} examples" if examples else f" on the {split} split"
    text = f"<b>{100 * accuracy:.2f} %</b>{of}"
    if stage.get("average_precision") is not None:  # of several labels
        text += " with every label right"
    notes = []
    if examples:
        low, high = wilson_interval(accuracy, examples)
        notes.append(f"95 % confidence interval {100 * low:.1f} to {100 * high:.1f} %")
    confusion = record.confusion() if record is not None else None
    if confusion is not None:
        counts = confusion.counts.sum(axis=1)
        usual = confusion.rows[int(np.argmax(counts))]
        notes.append(f"always predicting {escape(usual)!r} gives {100 * counts.max() / counts.sum():.1f} %")
    return f"{text} ({'; '.join(notes)})" if notes else text


def _score(group: Group) -> float | None:
    """Mean score of the last stage over the seeds."""
    known = [score for record in group.runs if record.stages and (score := score_of(record.stages[-1])) is not None]
    return mean(known) if known else None


def _cell(group: Group) -> str:
    stages = [record.stages[-1] for record in group.runs if record.stages]
    metric = primary_metric(stages[0])
    shown = metric_cell(metric, stages)
    return {"r2": f"R² {shown}", "perplexity": f"perplexity {shown}"}.get(metric, f"{shown} %")


def _tested(group: Group) -> str:
    """Of how many examples an accuracy is."""
    counts = [count for record in group.runs if (count := record.stages[-1].get("test_examples"))]
    return f" of {round(mean(counts)):,} test examples" if counts else ""


def _runs(group: Group) -> str:
    return f"{len(group.runs)} seeds" if len(group.runs) > 1 else "one run"


def _sent(group: Group) -> str:
    sums = [sum(stage["bytes_up"] for stage in record.stages) for record in group.runs]
    return f"{human_bytes(mean(sums))} up"
