"""Pictures of a run."""

from __future__ import annotations

from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from matplotlib.figure import Figure

from headstart.files import write_atomically


def partition_figure(counts: npt.NDArray[np.int64], classes: tuple[str, ...]) -> Figure:
    """Who holds which class, as a heat map of counts [K, C]: one column per client, one row per class."""
    figure = Figure(figsize=(9, min(9, 1.6 + 0.28 * min(len(classes), 24))), layout="constrained")
    axes = figure.subplots()
    shown = np.ma.masked_equal(counts.T, 0)
    image = axes.imshow(shown, aspect="auto", interpolation="nearest", cmap="YlGnBu")
    axes.set(xlabel="client", ylabel="class", title="Who holds which class")
    if len(classes) <= 24:
        axes.set_yticks(range(len(classes)), classes)
    figure.colorbar(image, ax=axes, label="training examples")
    return figure


def cost_figure(stages: list[dict[str, Any]]) -> Figure:
    """Accuracy against bytes sent by the clients, one point per stage."""
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    axes = figure.subplots()
    for stage in stages:
        point = (max(stage["bytes_up"], 1), 100 * stage["accuracy"])
        axes.scatter(*point, s=60, zorder=3)
        axes.annotate(stage["method"], point, xytext=(7, -3), textcoords="offset points")
    axes.set(xscale="log", xlabel="bytes sent by all clients", ylabel="test accuracy (%)", title="What accuracy costs")
    axes.margins(x=0.15, y=0.2)
    axes.grid(alpha=0.3)
    return figure


def curve_figure(metrics: list[dict[str, Any]]) -> Figure | None:
    """Accuracy against rounds, one line per stage that was evaluated more than once; None where there is none."""
    stages = {number: [line for line in metrics if line["stage"] == number] for number in {m["stage"] for m in metrics}}
    curves = {number: lines for number, lines in sorted(stages.items()) if len(lines) > 1}
    if not curves:
        return None
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    axes = figure.subplots()
    for number, lines in curves.items():
        label = f"{lines[0]['method']} (stage {number + 1})"
        axes.plot([m["round"] for m in lines], [100 * m["accuracy"] for m in lines], label=label, marker=".")
    axes.set(xlabel="round", ylabel="test accuracy (%)", title="Accuracy by round")
    axes.legend()
    axes.grid(alpha=0.3)
    return figure


def save(figure: Figure, path: Path) -> None:
    """Write a figure as PNG, SVG or PDF, by the suffix, atomically."""
    write_atomically(path, lambda temporary: figure.savefig(temporary, dpi=150))


def svg(figure: Figure) -> str:
    """A figure as an <svg> element to put into a page."""
    buffer = BytesIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None})
    text = buffer.getvalue().decode()
    return text[text.index("<svg") :]
