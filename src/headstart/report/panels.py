"""Pictures of many series, which one plot could not tell apart: small panels, and clients as boxes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from headstart.records.record import AXES, Curve
from headstart.report.figures import (
    UNITS,
    Look,
    clients_figure,
    curve_figure,
    draw_curve,
    looks,
    scale_axes,
    score_label,
)

if TYPE_CHECKING:  # matplotlib takes a third of a second to load, and most commands draw nothing
    from matplotlib.figure import Figure

MANY = 8
"""Series that one plot still tells apart."""
_EACH = 4  # series of a panel, at most: they have the colour of their method, and other dashes


def score_figure(curves: Sequence[Curve], against: str, columns: int = 3, legend: bool = True) -> Figure:
    """`curve_figure`; of many series a panel for each method, the others grey behind it, so many panels in a row.

    All panels have the same axes, and each says above its plot what is drawn in it.
    """
    if len(curves) <= MANY:
        return curve_figure(curves, against, legend)
    from matplotlib.figure import Figure

    panels = _panels(curves)
    rows = -(-len(panels) // columns)
    figure = Figure(figsize=(2.4 * columns, (1.5 + 0.2 * max(map(len, panels))) * rows), layout="constrained")
    grid = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
    for axes in grid.flat[len(panels) :]:
        axes.set_axis_off()
    for axes, members in zip(grid.flat, panels, strict=False):
        for other in curves:
            drawn = UNITS[other.metric] * other.score
            axes.plot(other.costs[against], drawn, color="#888888", alpha=0.35, linewidth=0.6)
        for dash, place in enumerate(members):
            (look,) = looks([curves[place].method])
            draw_curve(axes, curves[place], against, Look(look.colour, dash), place)
        scale_axes(axes, curves, against)
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(labelsize=7, labelbottom=True)
        axes.legend(
            loc="lower left", bbox_to_anchor=(-0.05, 1.0), fontsize=7, frameon=False, handlelength=2.6, borderpad=0.1
        )
    figure.supxlabel(AXES[against], fontsize=9)
    figure.supylabel(score_label(curves), fontsize=9)
    return figure


def _panels(curves: Sequence[Curve]) -> list[list[int]]:
    """Places of the curves of each panel: of one method, a few in each."""
    methods: dict[str, list[int]] = {}
    for place, curve in enumerate(curves):
        methods.setdefault(curve.method, []).append(place)
    return [mine[start : start + _EACH] for mine in methods.values() for start in range(0, len(mine), _EACH)]


def all_clients_figure(
    accuracies: Mapping[str, Sequence[float]], methods: Sequence[str] = (), legend: bool = True
) -> Figure:
    """`clients_figure`; of many runs a box for each: the quarters of its clients, and the farthest of them."""
    if len(accuracies) <= MANY:
        return clients_figure(accuracies, methods, legend)
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.8, 0.9 + 0.24 * len(accuracies)), layout="constrained")
    axes = figure.subplots()
    values = [100 * np.array(each) for each in accuracies.values()]
    drawn = axes.boxplot(values, orientation="horizontal", widths=0.6, whis=(0, 100), patch_artist=True)
    for box, middle, method in zip(drawn["boxes"], drawn["medians"], list(methods) or list(accuracies), strict=True):
        (look,) = looks([method])
        box.set(facecolor=look.colour, edgecolor=look.colour, alpha=0.75)
        middle.set(color="#000000")
    for line in (*drawn["whiskers"], *drawn["caps"]):
        line.set_color("#888888")
    axes.set_yticks(range(1, len(accuracies) + 1), list(accuracies), parse_math=False, fontsize=7)
    longest = max(label.get_window_extent().width for label in axes.get_yticklabels()) / figure.dpi
    figure.set_figwidth(max(4.8, 3.2 + longest))
    axes.invert_yaxis()
    axes.set_xlabel("clients' accuracy (%): range, middle half, median", fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25, axis="x")
    return figure
