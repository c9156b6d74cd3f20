"""Pictures of runs: for the page, and as files for papers."""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from io import BytesIO
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from headstart.config.stage import STAGES
from headstart.core.files import write_atomically
from headstart.records.record import AXES, Curve, Matrix

if TYPE_CHECKING:  # matplotlib takes a third of a second to load, and most commands draw nothing
    from matplotlib.axes import Axes
    from matplotlib.colors import ListedColormap
    from matplotlib.figure import Figure

COLOURS = ("#2f7ed8", "#e4572e", "#3aa655", "#a15bd0", "#c98a00", "#17a2b8", "#d6568c", "#7f8c8d")
"""They can be told apart on white and on black."""
_DASHES: tuple[Any, ...] = ("-", (0, (4, 2)), (0, (1, 1.5)), (0, (6, 2, 1, 2)), (0, (3, 1, 1, 1, 1, 1)))
"""Of series with the same colour."""
UNITS = {"accuracy": 100, "r2": 100, "perplexity": 1}
"""By what a score is multiplied where it is drawn."""
_LABELS = {
    "accuracy": "test accuracy (%)", "r2": "variance explained, R² (%)", "perplexity": "perplexity of test completions",
}  # fmt: skip
_POINTS = 60  # of a line that are marked
_MANY = 24  # names along an axis that can still be read
_CELLS = 3000  # of a heat map that say what they are under the pointer


def _axes(size: tuple[float, float] | None = None) -> tuple[Figure, Axes]:
    """A figure of a size in inches, laid out by what is in it; or one for a plot of numbers, whose margins are known.

    That one is small, so that letters are large enough on a phone.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained") if size else Figure(figsize=(4.8, 3.3))
    if not size:
        figure.subplots_adjust(left=0.14, bottom=0.16, right=0.95, top=0.97)
    axes = figure.subplots()
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _heat() -> ListedColormap:
    """The more, the stronger, on a white page and on a black one: what is little lets the page through."""
    from matplotlib.colors import ListedColormap

    return ListedColormap([(0.18, 0.38, 0.78, share) for share in np.linspace(0.12, 1, 256)], "heat")


# Points have no dashes: a circle, a square, a triangle, a diamond, a triangle on its tip.
_MARKERS = (
    ("o", "M17 1 a4 4 0 1 0 0.01 0 z"),
    ("s", "M13 1 h8 v8 h-8 z"),
    ("^", "M17 0 l5 9 h-10 z"),
    ("D", "M17 0 l5 5 l-5 5 l-5 -5 z"),
    ("v", "M17 10 l5 -9 h-10 z"),
)


@dataclass(frozen=True)
class Look:
    """How a series is drawn."""

    colour: str
    dash: int
    """A number of `_DASHES`."""

    @property
    def line(self) -> Any:
        """Its line style, as matplotlib has it."""
        return _DASHES[self.dash]

    @property
    def marker(self) -> str:
        """The shape of its points, as matplotlib has it."""
        return _MARKERS[self.dash][0]

    @property
    def point(self) -> str:
        """The same shape in a legend of a page, 34 by 10."""
        return f'<path d="{_MARKERS[self.dash][1]}" fill="{self.colour}"/>'

    @property
    def svg(self) -> str:
        """Its dashes in a legend of a page."""
        return "none" if self.dash == 0 else " ".join(f"{2 * part:g}" for part in _DASHES[self.dash][1])


def looks(methods: Sequence[str]) -> list[Look]:
    """How the series of these methods are drawn: a method has its colour in every picture; further series of the colour
    are dashed, and where dashes do not suffice, have the next colour."""
    known, found = list(STAGES), list[Look]()
    for method in methods:
        first = known.index(method) if method in known else zlib.crc32(method.encode())
        colours = [COLOURS[(first + shift) % len(COLOURS)] for shift in range(len(COLOURS))]
        free = (look for colour in colours for dash in range(len(_DASHES)) if (look := Look(colour, dash)) not in found)
        found.append(next(free, Look(colours[0], 0)))
    return found


def _legend(figure: Figure, axes: Axes) -> None:
    """The names of the series below the picture, where they cover nothing."""
    names = axes.get_legend_handles_labels()[1]
    rows = len(names)
    height = figure.get_figheight()
    more = 0.22 * rows + 0.1
    figure.set_figheight(height + more)
    place = figure.subplotpars
    figure.subplots_adjust(
        bottom=(place.bottom * height + more) / (height + more), top=(place.top * height + more) / (height + more)
    )
    figure.legend(loc="lower left", bbox_to_anchor=(0.03, 0.0), fontsize="small", frameon=False, handlelength=3.2)


def curve_figure(curves: Sequence[Curve], against: str, legend: bool = True) -> Figure:
    """Scores against rounds, bytes or forward passes (one of `AXES`), with a band of one deviation over seeds.

    Where a curve begins is a point, and so is a stage of one evaluation. Costs are on a logarithmic scale.
    """
    figure, axes = _axes()
    for number, (look, curve) in enumerate(zip(looks([curve.method for curve in curves]), curves, strict=True)):
        draw_curve(axes, curve, against, look, number)
    scale_axes(axes, curves, against)
    axes.set(xlabel=AXES[against], ylabel=score_label(curves))
    if legend and curves:
        _legend(figure, axes)
    return figure


def draw_curve(axes: Axes, curve: Curve, against: str, look: Look, number: int) -> None:
    """A line with its band; number: of the series, which `hover_texts` knows it by."""
    colour, x, y = look.colour, curve.costs[against], UNITS[curve.metric] * curve.score
    marker, band = "." if len(x) < _POINTS else "", UNITS[curve.metric] * curve.deviation
    marker = look.marker if len(x) == 1 else marker
    (line,) = axes.plot(x, y, color=colour, marker=marker, label=curve.label, linewidth=1.6, linestyle=look.line)
    line.set_gid(f"series-{number}")
    if len(x) > 1 and "→" in curve.label:  # where the stage begins
        axes.axvline(x[0], color="#888888", linewidth=0.8, linestyle=":")
    axes.plot(x[:1], y[:1], color=colour, marker=look.marker, zorder=3)
    if band.any() and len(x) == 1:
        axes.errorbar(x, y, band, color=colour, capsize=3)
    elif band.any():
        axes.fill_between(x, y - band, y + band, color=colour, alpha=0.2, linewidth=0)


def scale_axes(axes: Axes, curves: Sequence[Curve], against: str) -> None:
    """Rounds from 0 on, costs on a logarithmic scale with their units, and so is perplexity."""
    from matplotlib.ticker import EngFormatter, LogLocator, MaxNLocator, NullFormatter, ScalarFormatter

    drawn = np.concatenate([curve.costs[against] for curve in curves]) if curves else np.zeros(0)
    if against != "round" and len(drawn) and drawn.min() > 0 and drawn.max() < 4 * drawn.min():
        axes.xaxis.set_major_locator(MaxNLocator(4))  # a logarithmic scale would have no round numbers
    elif against != "round" and len(drawn) and drawn.min() > 0:
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(subs=(1,) if drawn.max() > 50 * drawn.min() else (1, 2, 5)))
        axes.xaxis.set_minor_formatter(NullFormatter())
    if against == "round":
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set_xlim(left=0, right=None if drawn.size and drawn.max() > 1 else 2)
    else:
        axes.xaxis.set_major_formatter(EngFormatter("B" if against == "bytes" else "", sep=" "))
    if any(curve.metric == "perplexity" for curve in curves):
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter(ScalarFormatter())
        axes.yaxis.set_minor_formatter(NullFormatter())
    axes.margins(x=0.08, y=0.12)
    axes.grid(alpha=0.25)


def score_label(curves: Sequence[Curve]) -> str:
    """What is drawn upwards; all curves of a picture have the same metric."""
    return _LABELS[curves[0].metric] if curves else ""


def hover_texts(curves: Sequence[Curve], against: str) -> dict[str, list[str]]:
    """What the points of `curve_figure` say, by the series that they belong to."""
    found = {}
    for number, curve in enumerate(curves):
        points = zip(curve.costs[against], UNITS[curve.metric] * curve.score, strict=True)
        unit = {"accuracy": " %", "r2": " % (R²)"}.get(curve.metric, f" ({curve.metric})")
        found[f"series-{number}"] = [f"{curve.label}: {s:.2f}{unit} at {c:,.0f} {AXES[against]}" for c, s in points]
    return found


def partition_figure(counts: npt.NDArray[np.int64], classes: Sequence[str], clients: Sequence[str] = ()) -> Figure:
    """Data distribution across clients, as a heat map of counts [K, C]: one column per client, one row per class."""
    from matplotlib.ticker import MaxNLocator

    wide, high = min(len(counts), _MANY), min(len(classes), _MANY)
    figure, axes = _axes((max(4.6, min(8.0, 3 + 0.35 * wide)), min(8.0, 1.7 + 0.26 * high)))
    shown = np.ma.masked_equal(counts.T, 0)
    image = axes.imshow(shown, aspect="auto", interpolation="nearest", cmap=_heat(), vmin=0)
    axes.set(xlabel="client", ylabel="class" if len(classes) > 1 else "")
    if len(classes) == 1:
        axes.set_yticks([])
    elif len(classes) <= _MANY:
        axes.set_yticks(range(len(classes)), classes, parse_math=False)
    if 0 < len(clients) <= _MANY:
        axes.set_xticks(range(len(clients)), clients, rotation=45, ha="right", parse_math=False)
    if len(counts) <= _MANY and len(classes) <= _MANY:
        for client, label in np.argwhere(counts):
            ink = "white" if counts[client, label] > 0.5 * counts.max() else "black"
            axes.text(client, label, str(counts[client, label]), ha="center", va="center", color=ink, size=7)
    whole = MaxNLocator(integer=True, min_n_ticks=1)
    figure.colorbar(image, ax=axes, label="training examples", ticks=whole)
    return figure


def confusion_figure(confusion: Matrix) -> Figure:
    """What each class was predicted as, in shares of its test examples."""
    from matplotlib.ticker import PercentFormatter

    names, counts = confusion.rows, confusion.counts
    share = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    side = min(7.5, 3 + 0.3 * len(names))
    figure, axes = _axes((side, side * 0.92))
    image = axes.imshow(np.ma.masked_equal(share, 0), vmin=0, vmax=1, interpolation="nearest", cmap=_heat())
    axes.set(xlabel="predicted as", ylabel="class")
    if len(names) <= _MANY:
        axes.set_xticks(range(len(names)), names, rotation=45, ha="right", parse_math=False)
        axes.set_yticks(range(len(names)), names, parse_math=False)
    if len(names) <= 12:
        for row, column in np.argwhere(share >= 0.005):
            ink = "white" if share[row, column] > 0.5 else "black"
            axes.text(column, row, f"{100 * share[row, column]:.0f}", ha="center", va="center", color=ink, size=8)
    figure.colorbar(image, ax=axes, format=PercentFormatter(1.0), shrink=0.8)
    return figure


def clients_figure(
    accuracies: Mapping[str, Sequence[float]], methods: Sequence[str] = (), legend: bool = True
) -> Figure:
    """How many clients have which accuracy, by the name of the run; methods: of each, for its colour."""
    from matplotlib.ticker import MaxNLocator

    figure, axes = _axes()
    bins = np.linspace(0, 100, 21)
    for look, (label, values) in zip(looks(list(methods) or list(accuracies)), accuracies.items(), strict=True):
        style = {"alpha": 0.75} if len(accuracies) == 1 else {"histtype": "step", "linewidth": 1.8}
        style |= {"linestyle": look.line} if len(accuracies) > 1 else {}
        axes.hist(100 * np.array(values), bins=bins, color=look.colour, label=label, **style)  # type: ignore[arg-type]
    axes.set(xlabel="a client's accuracy (%)", ylabel="clients")
    axes.yaxis.set_major_locator(MaxNLocator(6, integer=True))
    axes.grid(alpha=0.25)
    if legend and len(accuracies) > 1:
        _legend(figure, axes)
    return figure


def save(figure: Figure, path: Path) -> None:
    """Write a figure as PNG, SVG or PDF, by the suffix, atomically."""
    write_atomically(path, lambda temporary: figure.savefig(temporary, dpi=150))


def svg(
    figure: Figure,
    title: str,
    hover: Mapping[str, Sequence[str]] = MappingProxyType({}),
    cells: Sequence[Sequence[str]] = (),
) -> str:
    """A figure as an <svg> element for a page: its ink is that of the page, in the light and in the dark.

    hover: texts for the points of a line, by the name of its group; cells: of a heat map, row by row.
    """
    from matplotlib import rc_context

    buffer = BytesIO()
    # Names inside are made from the salt: two figures of a page must not share them.
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": title}):
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None}, transparent=True)
    text = buffer.getvalue().decode()
    text = text[text.index("<svg") :].replace("#000000", "currentColor").replace("stroke: #b0b0b0", "stroke: #888")
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    for group, texts in hover.items():
        text = _titled(text, group, texts)
    text = text.replace("</svg>", f"{_cells(figure, cells)}</svg>")
    return re.sub(r"(<svg[^>]*)>", rf'\1 role="img" aria-label="{title}">', text, count=1)


def _titled(text: str, group: str, texts: Sequence[str]) -> str:
    """The markers of a group with a text each, which browsers show under the pointer."""
    start = text.find(f'<g id="{group}">')
    stop = text.find('<g id="', start + 1)
    marks = re.findall(r"<use [^>]*/>", text[start:stop]) if start >= 0 else []
    if len(marks) != len(texts):  # a long line has none
        return text
    part = text[start:stop]
    for mark, value in zip(marks, texts, strict=True):
        part = part.replace(mark, f"{mark[:-2]}><title>{escape(value)}</title></use>", 1)
    return text[:start] + part + text[stop:]


def heat_map(figure: Figure, title: str, cells: Sequence[Sequence[str]]) -> str:
    """A heat map for a page: it says its values under the pointer, scrolls where it would be too small to read, and
    grows by a third at most."""
    width = 72 * figure.get_size_inches()[0]
    style = f"min-width:{width:.0f}px; max-width:{4 / 3 * width:.0f}px"
    return f'<div class="scroll"><div style="{style}">{svg(figure, title, cells=cells)}</div></div>'


def _cells(figure: Figure, texts: Sequence[Sequence[str]]) -> str:
    """A text over each cell of the heat map in the first axes of a figure that has been laid out."""
    if not texts or len(texts) * len(texts[0]) > _CELLS:
        return ""
    place, (width, height) = figure.axes[0].get_position(), 72 * figure.get_size_inches()
    wide, high = place.width * width / len(texts[0]), place.height * height / len(texts)
    return "".join(
        f'<rect x="{place.x0 * width + column * wide:.1f}" y="{(1 - place.y1) * height + row * high:.1f}" '
        f'width="{wide:.1f}" height="{high:.1f}" fill="none" pointer-events="all"><title>{escape(text)}</title></rect>'
        for row, line in enumerate(texts)
        for column, text in enumerate(line)
    )
