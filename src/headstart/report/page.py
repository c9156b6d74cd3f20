"""One self-contained HTML page per run: it opens offline, and it is its own archive."""

from __future__ import annotations

from html import escape
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from headstart.files import write_text
from headstart.recipe import Recipe
from headstart.report.figures import cost_figure, curve_figure, partition_figure, svg
from headstart.report.tables import COLUMNS, human_bytes, remarks, stage_cells

_STYLE = """
:root { color-scheme: light dark; --ink: #1c2330; --paper: #fff; --line: #d8dde6; --soft: #f4f6fa; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e9ef; --paper: #14171d; --line: #333a46; --soft: #1d222b; } }
body { font: 16px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); max-width: 62rem;
  margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; display: block; overflow-x: auto; }
th, td { padding: .35rem .55rem; font-size: .92rem; border-bottom: 1px solid var(--line); text-align: right;
  white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
figure { margin: 1.5rem 0; background: #fff; border: 1px solid var(--line); border-radius: .5rem; padding: .5rem; }
svg { width: 100%; height: auto; }
pre { background: var(--soft); padding: 1rem; border-radius: .5rem; overflow-x: auto; font-size: .85rem; }
small { opacity: .75; }
"""


def write_report(
    path: Path,
    recipe: Recipe,
    summary: dict[str, Any],
    metrics: list[dict[str, Any]],
    classes: tuple[str, ...],
    counts: npt.NDArray[np.int64] | None,
) -> None:
    """Write the page of a run; metrics: every evaluation; counts: [K, C] who holds which class, where that is known."""
    stages, curves = summary["stages"], curve_figure(metrics)
    unused = f", {summary['unused_examples']:,} left unused" if summary["unused_examples"] else ""
    formulas = "".join(f"<li>{escape(s['method'])}: {escape(s['published_formula'])}</li>" for s in stages)
    said = "".join(f"<li>{escape(remark)}</li>" for stage in stages for remark in remarks(stage))
    dropped = [f"{s['method']}, round {d['round']}: {d['clients']}: {d['why']}" for s in stages for d in s["dropped"]]
    left_out = f"<h2>Left out</h2><ul>{''.join(f'<li>{escape(line)}</li>' for line in dropped)}</ul>" if dropped else ""
    held = ""
    if counts is not None:
        held = f"<h2>Who holds which class</h2><figure>{svg(partition_figure(counts, classes))}</figure>"
    versions = ", ".join(f"{name} {number}" for name, number in summary["versions"].items())
    write_text(
        path,
        f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(recipe.name)} · headstart</title><style>{_STYLE}</style></head><body>
<h1>{escape(recipe.name)}</h1>
<p>{escape(recipe.datasets)} through {escape(recipe.model.backbone)}: {summary["clients"]:,} clients,
{summary["examples"]:,} training examples{unused}, {summary["classes"]:,} classes.
Peak memory {human_bytes(summary["peak_rss_bytes"])}.</p>
<h2>Accuracy and cost</h2>
{_table(COLUMNS, [stage_cells(stage) for stage in stages])}
<p><small>Bytes are those of the serialised messages; beside them, as the papers count:</small></p>
<ul><small>{formulas}</small></ul>
{f"<ul>{said}</ul>" if said else ""}
<figure>{svg(cost_figure(stages))}</figure>
{f"<figure>{svg(curves)}</figure>" if curves else ""}
{held}
{left_out}
<h2>Recipe</h2>
<pre>{escape(recipe.to_toml())}</pre>
<p><small>{escape(versions)}</small></p>
</body></html>
""",
    )


def _table(columns: tuple[str, ...], rows: list[list[str]]) -> str:
    head = "".join(f"<th>{escape(column)}</th>" for column in columns)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
