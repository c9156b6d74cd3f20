"""Self-contained HTML pages: they open offline, in the light and in the dark, on a phone and in print."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from headstart.core.files import write_text
from headstart.core.metrics import SHOWN, goodness, primary_metric
from headstart.errors import listed
from headstart.records.directory import RunDirectory
from headstart.records.record import AXES, Curve, Group, Matrix, Record, curves, grouped
from headstart.report.figures import (
    confusion_figure,
    heat_map,
    hover_texts,
    looks,
    partition_figure,
    save,
    svg,
)
from headstart.report.opening import opening
from headstart.report.panels import MANY, all_clients_figure, score_figure
from headstart.report.tables import cost_table, human_bytes, metric_cell, metric_heading, remarks, write_tables

STYLE = """
:root { color-scheme: light dark; --ink: #1c2330; --paper: #fff; --line: #d8dde6; --soft: #f4f6fa; --accent: #2f7ed8; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6e9ef; --paper: #14171d; --line: #333a46; --soft: #1d222b; } }
* { box-sizing: border-box; }
body { font: 16px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); max-width: 78rem;
  margin: 0 auto; padding: 1.5rem 1rem 4rem; }
h1 { margin: 0 0 .3rem; font-size: 1.7rem; } h2 { margin: 2.2rem 0 .6rem; font-size: 1.2rem; }
h3 { margin: 1.2rem 0 .4rem; font-size: 1rem; }
.scroll { overflow-x: auto; margin: .8rem 0; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .35rem .6rem; font-size: .9rem; border-bottom: 1px solid var(--line); text-align: right;
  white-space: nowrap; }
th { opacity: .75; font-weight: 600; white-space: normal; vertical-align: bottom; }
th:first-child, td:first-child, .word, .text { text-align: left; }
td.text { white-space: normal; min-width: 14rem; }
.figures { display: grid; gap: 1rem; grid-template-columns: repeat(auto-fit, minmax(min(19rem, 100%), 1fr));
  align-items: start; } .panels { grid-template-columns: repeat(auto-fit, minmax(min(30rem, 100%), 1fr)); }
figure { margin: 0; border: 1px solid var(--line); border-radius: .6rem; padding: .6rem; break-inside: avoid; }
figure.half, .figures > figure:only-child { max-width: 40rem; }
figure .scroll { margin: 0; } figcaption { font-size: .85rem; opacity: .75; }
svg { display: block; width: 100%; height: auto; } svg text { fill: currentColor; }
.legend { display: flex; flex-wrap: wrap; gap: .3rem 1.2rem; margin: .4rem 0 .8rem; font-size: .9rem; }
.legend i { display: inline-block; width: .9rem; height: .9rem; border-radius: .2rem; margin-right: .4rem;
  vertical-align: -.1rem; } svg.key { display: inline-block; width: 2.1rem; height: .7rem; margin-right: .4rem; }
pre { background: var(--soft); padding: 1rem; border-radius: .6rem; overflow-x: auto; font-size: .82rem; }
.lead { font-size: 1.15rem; } .lead b { font-size: 1.6rem; }
small, .soft { opacity: .75; } summary { cursor: pointer; } ul { padding-left: 1.2rem; }
@media print {
  :root { color-scheme: light; --ink: #000; --paper: #fff; --line: #ccc; --soft: #f6f6f6; }
  body { max-width: none; padding: 0; font-size: 11pt; } .scroll { overflow: visible; }
  pre { white-space: pre-wrap; } h2 { break-after: avoid; }
  details:not([open]) > :not(summary) { display: block; } th, td { padding: .2rem .35rem; font-size: 8pt; } }
"""
_LONG = 40  # characters of a text that may wrap
_SHORT = 30  # classes that are listed without being asked for
_HEADINGS = {"accuracy": "Accuracy", "r2": "R²", "perplexity": "Perplexity"}
_WORST = 10  # clients and mistakes that are named
_LISTED = 200  # clients left out that are listed


def html_page(title: str, body: str) -> str:
    """A whole page."""
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)} · headstart</title><style>{STYLE}</style></head><body>
{body}
</body></html>
"""


def html_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table: numbers are on the right, words on the left, and long texts may wrap."""
    kinds = [_kind([row[place] for row in rows]) for place in range(len(columns))]
    head = "".join(f"<th{kind}>{escape(column)}</th>" for kind, column in zip(kinds, columns, strict=True))
    cells = ["".join(f"<td{kind}>{escape(c)}</td>" for kind, c in zip(kinds, row, strict=True)) for row in rows]
    body = "".join(f"<tr>{row}</tr>" for row in cells)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _kind(cells: Sequence[str]) -> str:
    """The class of the cells of a column, or nothing for numbers."""
    if any(len(cell) > _LONG for cell in cells):
        return " class=text"
    return "" if any(cell.lstrip("+-−<≤ ")[:1].isdigit() for cell in cells) else " class=word"


def write_report(path: Path, records: Sequence[Record]) -> None:
    """Write the page of some runs."""
    write_text(path, html_page(_title(records), report_body(records)))


def write_folder(folder: Path, records: Sequence[Record]) -> list[str]:
    """Write the page of some runs, every picture as SVG, PNG and PDF, and the table of costs as CSV, Markdown and
    LaTeX."""
    figures = write_figures(folder / "figures", records)
    tables = write_tables(folder / "costs", *cost_table(grouped(records)))
    write_report(folder / "report.html", records)
    return ["report.html", *(table.name for table in tables), *(f"figures/{name}" for name in figures)]


def write_figures(folder: Path, records: Sequence[Record]) -> list[str]:
    """Write every picture of some runs as SVG, PNG and PDF; their names."""
    folder.mkdir(parents=True, exist_ok=True)
    groups = grouped(records)
    drawn = curves(groups)
    written = {
        f"{metric}-by-{name.replace('_', '-')}": score_figure(mine, name)
        for metric, mine in _by_metric(drawn).items()
        for name in AXES
        if _spent(mine, name)
    }
    if accuracies := _accuracies(groups):
        written["clients"] = all_clients_figure(accuracies, _methods(groups, accuracies))
    if len(records) == 1 and (held := records[0].holdings()) is not None:
        written["who-holds-what"] = partition_figure(held.counts, held.columns, held.rows)
    if len(records) == 1 and (confusion := records[0].confusion()) is not None:
        written["confusion"] = confusion_figure(confusion)
    names = {f"{name}.{ending}": figure for name, figure in written.items() for ending in ("svg", "png", "pdf")}
    for name, figure in names.items():
        save(figure, folder / name)
    return list(names)


def _methods(groups: Sequence[Group], labels: Iterable[str]) -> list[str]:
    """The last method of the groups with these labels."""
    known = {group.label: group.method for group in groups}
    return [known[label] for label in labels]


def _title(records: Sequence[Record]) -> str:
    return " · ".join(dict.fromkeys(record.recipe.name for record in records))


def report_body(records: Sequence[Record]) -> str:
    """What there is to see of some runs, finished or not: scores and cost together, then each run on its own."""
    groups = grouped(records)
    drawn = curves(groups)
    parts = [f"<h1>{escape(_title(records))}</h1>", opening(groups)]
    if len(records) == 1:
        parts.append(_about(records[0]))
    columns, rows = cost_table(groups)
    if rows:
        metrics = _by_metric(drawn) or ["accuracy"]
        parts.append(f"<h2>{' and '.join(_HEADINGS[metric] for metric in metrics)} and cost</h2>")
        if any(_varies(drawn, name) for name in AXES):
            # Many series are in panels, which say themselves what is drawn in them.
            legend = _legend({curve.label: curve.method for curve in drawn}) if len(drawn) <= MANY else ""
            parts += [legend, _curves(drawn)]
        alone = {*(["run"] if len(groups) == 1 else ()), *(["runs"] if len(records) == 1 else ())}
        there = [any(row[place] for row in rows) for place in range(len(columns))]
        shown = [place for place, column in enumerate(columns) if there[place] and column not in alone]
        parts.append(html_table([columns[place] for place in shown], [[row[place] for place in shown] for row in rows]))
        parts.append(_formulas(records))
    parts += [_differences(groups), _remarks(groups), _privacy(records), _clients(groups)]
    if len(records) == 1:
        confusion = records[0].confusion()
        held = records[0].holdings()
        parts += [_holdings(held), _confusion(confusion), _by_class(confusion, held)]
        parts.append(_samples(records[0].samples()))
    parts += [_left_out(records), _recipes(groups), _versions(records)]
    return "\n".join(part for part in parts if part)


def _about(record: Record) -> str:
    recipe, summary = record.recipe, record.summary
    nodes = RunDirectory(record.path).nodes
    data = f"data of {nodes:,} {'node' if nodes == 1 else 'nodes'}," if nodes else escape(recipe.datasets)
    text = f"{data} through {escape(recipe.model.backbone)}"
    if summary is None:
        return f"<p>{text}. The run is not finished.</p>"
    clients = "" if nodes else f"{summary['clients']:,} {'client' if summary['clients'] == 1 else 'clients'}, "
    unused = f", {summary['unused_examples']:,} not assigned to any client" if summary["unused_examples"] else ""
    return (
        f"<p>{text}: {clients}{summary['examples']:,} training examples{unused}"
        f"{_learned(summary)}. Peak memory {human_bytes(summary['peak_rss_bytes'])}.</p>"
    )


def _learned(summary: Mapping[str, Any]) -> str:
    """How many of what is learned, if it is no text; runs of earlier versions had classes."""
    if primary_metric(summary) == "perplexity":
        return ""
    one, several = {"regression": ("target", "targets"), "multilabel": ("label", "labels")}.get(
        summary.get("target", "classes"), ("class", "classes")
    )
    return f", {summary['classes']:,} {several if summary['classes'] != 1 else one}"


def _legend(methods: Mapping[str, str]) -> str:
    """Names of the series, by which the method of each is found; with their colours and dashes."""
    chips = [
        f'<span><svg class="key" viewBox="0 0 34 10" aria-hidden="true"><line x1="1" y1="5" x2="33" y2="5" '
        f'stroke="{look.colour}" stroke-width="3" stroke-dasharray="{look.svg}"/>'
        f"{look.point}</svg>{escape(label)}</span>"
        for label, look in zip(methods, looks(list(methods.values())), strict=True)
    ]
    return f'<div class="legend">{"".join(chips)}</div>'


def _curves(drawn: Sequence[Curve]) -> str:
    pictures = [
        svg(score_figure(mine, name, 2, legend=False), f"{metric} against {label}", hover_texts(mine, name))
        for metric, mine in _by_metric(drawn).items()
        for name, label in AXES.items()
        if _varies(mine, name)
    ]
    kind = "figures panels" if len(drawn) > MANY else "figures"
    return f'<div class="{kind}">{"".join(f"<figure>{picture}</figure>" for picture in pictures)}</div>'


def _by_metric(drawn: Sequence[Curve]) -> dict[str, list[Curve]]:
    """The curves of each metric, which have pictures of their own."""
    found: dict[str, list[Curve]] = {}
    for curve in drawn:
        found.setdefault(curve.metric, []).append(curve)
    return found


def _spent(drawn: Sequence[Curve], against: str) -> bool:
    """Whether there is any cost of a kind: not all runs simulate time."""
    return any(curve.costs[against].any() for curve in drawn)


def _varies(drawn: Sequence[Curve], against: str) -> bool:
    """Whether there is anything to see: scores at more than one cost."""
    return len({float(cost) for curve in drawn for cost in curve.costs[against]}) > 1


def _by_class(confusion: Matrix | None, held: Matrix | None) -> str:
    """Sensitivity and precision of each class, the lowest first; and the classes that nobody has tested."""
    if confusion is None:
        return ""
    counts = confusion.counts
    right, true, predicted = np.diag(counts), counts.sum(axis=1), counts.sum(axis=0)
    order = np.argsort(right / np.maximum(true, 1), kind="stable")
    rows = [
        [confusion.rows[c], f"{true[c]:,}", _share(right[c], true[c]), _share(right[c], predicted[c])] for c in order
    ]
    table = html_table(("class", "test examples", "sensitivity (recall), %", "precision, %"), rows)
    opened = " open" if len(rows) <= _SHORT else ""
    untested = [name for name in (held.columns if held is not None else ()) if name not in confusion.rows]
    text = f"<p>No test examples: {escape(listed(untested))}; accuracy says nothing about them.</p>" if untested else ""
    return f"<h2>Classes</h2>{text}<details{opened}><summary>Sensitivity and precision</summary>{table}</details>"


def _share(part: int, whole: int) -> str:
    return f"{100 * part / whole:.2f}" if whole else "none"


def _differences(groups: Sequence[Group]) -> str:
    """The keys of the recipes that differ between some groups of runs."""
    tables = [group.runs[0].recipe.settings() for group in groups]
    keys = [key for key in dict.fromkeys(key for table in tables for key in table) if key not in ("seed", "name")]
    apart = [key for key in keys if len({str(table.get(key)) for table in tables}) > 1]
    if len(groups) < 2 or not apart:
        return ""
    rows = [[group.label, *(str(t.get(key, "")) for key in apart)] for group, t in zip(groups, tables, strict=True)]
    return f"<details><summary>What the recipes differ in</summary>{html_table(('run', *apart), rows)}</details>"


def _formulas(records: Sequence[Record]) -> str:
    stages = [stage for record in records for stage in record.stages if "published_formula" in stage]
    if not stages:
        return ""
    formulas = dict.fromkeys(f"{stage['method']}: {stage['published_formula']}" for stage in stages)
    lines = "".join(f"<li>{escape(line)}</li>" for line in formulas)
    return (
        "<details><summary><small>Bytes are those of the serialised messages; beside them, as the papers count"
        f"</small></summary><ul><small>{lines}</small></ul></details>"
    )


def _remarks(groups: Sequence[Group]) -> str:
    lines = [
        f"{group.label}: {remark}" if len(groups) > 1 else remark
        for group in groups
        for stage in group.runs[0].stages
        for remark in remarks(stage)
    ]
    return f"<ul>{''.join(f'<li>{escape(line)}</li>' for line in lines)}</ul>" if lines else ""


def _privacy(records: Sequence[Record]) -> str:
    rows = []
    for record in records:
        if spent := (record.summary or {}).get("privacy"):
            for unit in [unit for unit in ("example", "client") if unit in spent]:
                total = spent[unit]
                uncovered = ", ".join(total["uncovered"]) or "none"
                rows.append([record.recipe.name, unit, f"{total['epsilon']:.3g}", f"{total['delta']:.1g}", uncovered])
    columns = ("run", "of any one", "ε", "δ", "stages that it does not cover")
    return "<h2>Privacy spent</h2>" + html_table(columns, rows) if rows else ""


def _accuracies(groups: Sequence[Group]) -> dict[str, list[float]]:
    """The accuracy of each client of each group, where clients have one."""
    found = {
        g.label: [each["accuracy"] for run in g.runs for each in run.client_metrics().values() if "accuracy" in each]
        for g in groups
    }
    return {label: values for label, values in found.items() if values}


def _clients(groups: Sequence[Group]) -> str:
    """The clients at which the model is worst: by accuracy, of numbers by R², of completions by perplexity."""
    accuracies = _accuracies(groups)
    table, shown, everybody = _worst(groups, "accuracy")
    others = {"lowest R²": _worst(groups, "r2")[0], "highest perplexity": _worst(groups, "perplexity")[0]}
    numbers = "".join(
        f"<h2>Clients</h2><p class='soft'>Clients with the {what}</p>{each}" for what, each in others.items() if each
    )
    if not accuracies:
        return numbers
    spread = "; ".join(
        (f"{escape(label)}: " if len(groups) > 1 else "")
        + f"{100 * np.mean(values):.2f} ± {100 * np.std(values):.2f} %"
        for label, values in accuracies.items()
    )
    spread = f"Mean ± standard deviation over clients: {spread}" if len(accuracies) <= MANY else ""
    if everybody == shown:  # all of them can be read
        return f"{numbers}<h2>Clients</h2>{table}<p class='soft'>{spread}</p>"
    methods = _methods(groups, accuracies)
    picture = svg(all_clients_figure(accuracies, methods, legend=False), "how many clients have which accuracy")
    legend = _legend(dict(zip(accuracies, methods, strict=True))) if 1 < len(accuracies) <= MANY else ""
    return (
        f"{numbers}<h2>Clients</h2>{legend}<div class='figures'><figure>{picture}<figcaption>{spread}</figcaption>"
        f"</figure><div><p class='soft'>Lowest-accuracy clients</p>{table}</div></div>"
    )


def _worst(groups: Sequence[Group], by: str) -> tuple[str, int, int]:
    """A table of the clients with the worst value of a metric, with their other metrics; how many it has, and how many
    clients have that metric."""
    everybody = []
    for group in groups:
        for record in group.runs:
            seed = f", seed {record.recipe.seed}" if len(group.runs) > 1 else ""
            found = [(name, each) for name, each in record.client_metrics().items() if by in each]
            everybody += [(each, [group.label + seed, name]) for name, each in found]
    if not everybody:
        return "", 0, 0
    worst = sorted(everybody, key=lambda client: goodness(by, client[0][by]))[:_WORST]
    metrics = [name for name in SHOWN if any(name in each for each, _ in worst)]
    rows = [[*who, *(metric_cell(name, [each]) for name in metrics)] for each, who in worst]
    columns = ["run", "client", *map(metric_heading, metrics)]
    if any("test_examples" in each for each, _ in worst):  # clients have their own
        columns.append("test examples")
        rows = [[*row, f"{each.get('test_examples', 0):,.0f}"] for row, (each, _) in zip(rows, worst, strict=True)]
    named = 0 if sum(len(group.runs) for group in groups) > 1 else 1
    return html_table(columns[named:], [row[named:] for row in rows]), len(rows), len(everybody)


def _holdings(held: Matrix | None) -> str:
    if held is None:
        return ""
    cells = [
        [f"{client}, {label}: {n:,}" for client, n in zip(held.rows, row, strict=True)]
        for label, row in zip(held.columns, held.counts.T, strict=True)
    ]
    figure = partition_figure(held.counts, held.columns, held.rows)
    picture = heat_map(figure, "data distribution across clients", cells)
    classes, sizes = np.count_nonzero(held.counts, axis=1), held.counts.sum(axis=1)
    text = f"A client holds {classes.mean():.1f} of {len(held.columns)} classes on average, {classes.min()} at least."
    if len(held.columns) == 1:  # of texts that are completed, or in a column that says nothing
        each = f"{sizes.min():,} to {sizes.max():,} examples, {sizes.mean():,.1f} on average"
        text = f"A client holds {each if np.ptp(sizes) else f'{sizes.max():,} examples'}."
    return f"<h2>Data distribution across clients</h2><figure>{picture}<figcaption>{text}</figcaption></figure>"


def _confusion(confusion: Matrix | None) -> str:
    if confusion is None:
        return ""
    names, counts = confusion.rows, confusion.counts
    wrong = counts * ~np.eye(len(names), dtype=bool)
    worst = [divmod(int(place), len(names)) for place in np.argsort(-wrong, axis=None, kind="stable")[:_WORST]]
    rows = [
        [names[a], names[b], f"{wrong[a, b]:,}", f"{100 * wrong[a, b] / counts[a].sum():.1f}"]
        for a, b in worst
        if wrong[a, b]
    ]
    cells = [
        [f"{a} predicted as {b}: {n:,} of {row.sum():,}" for b, n in zip(names, row, strict=True)]
        for a, row in zip(names, counts, strict=True)
    ]
    picture = heat_map(confusion_figure(confusion), "what each class was predicted as, in percent", cells)
    table = html_table(("class", "predicted as", "examples", "% of the class"), rows)
    errors = f"<div><p class='soft'>The most frequent errors</p>{table}</div>" if rows else ""
    return f"<h2>Confusion matrix</h2><div class='figures'><figure class='half'>{picture}</figure>{errors}</div>"


def _samples(samples: Sequence[Mapping[str, str]]) -> str:
    if not samples:
        return ""
    columns = {"prompt": "prompt", "reference": "in the data", "completion": "before", "after": "after"}
    columns = {"task": "task", **columns} if "task" in samples[0] else columns
    rows = [[each[name] for name in columns] for each in samples]
    return "<h2>Completions</h2>" + html_table(tuple(columns.values()), rows)


def _left_out(records: Sequence[Record]) -> str:
    rows = []
    for record in records:
        for row in record.left_out():
            method = record.recipe.stages[int(row["stage"])].method
            rows.append([record.recipe.name, method, row["round"], row["client"], row["left_out"]])
    if not rows:
        return ""
    more = f"<p>and {len(rows) - _LISTED:,} more</p>" if len(rows) > _LISTED else ""
    return "<h2>Excluded</h2>" + html_table(("run", "method", "round", "client", "why"), rows[:_LISTED]) + more


def _recipes(groups: Sequence[Group]) -> str:
    """The recipe of each group: what it says itself, and folded with every default."""
    parts = ["<h2>Recipe</h2>" if len(groups) == 1 else "<h2>Recipes</h2>"]
    for group in groups:
        recipe = group.runs[0].recipe
        changed, full = escape(recipe.to_toml(defaults=False)), escape(recipe.to_toml())
        parts += [f"<h3>{escape(group.label)}</h3>"] if len(groups) > 1 else []
        parts.append(f"<pre>{changed}</pre><details><summary>with every default</summary><pre>{full}</pre></details>")
    return "".join(parts)


def _versions(records: Sequence[Record]) -> str:
    versions = [(record.summary or {}).get("versions", {}) for record in records]
    lines = dict.fromkeys(", ".join(f"{name} {version}" for name, version in each.items()) for each in versions)
    return "".join(f"<p><small>{escape(line)}</small></p>" for line in lines if line)
