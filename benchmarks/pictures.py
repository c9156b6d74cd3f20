"""``python -m benchmarks.pictures``: the drawings of the documentation, those of results from the tables of RESULTS.md.

They take their ink from the page around them (``currentColor``): one file is right in the light and in the dark.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path

ROOT = Path(__file__).parents[1]
ASSETS = ROOT / "docs" / "assets"
INK = "svg:root { color: #1c2330; } @media (prefers-color-scheme: dark) { svg:root { color: #e6e9ef; } }"
COLOURS = {  # readable on white and on black
    "FedNCM": "#2f7ed8", "fedncm": "#2f7ed8", "Fed3R": "#e4572e", "fed3r": "#e4572e", "auto": "#3aa655",
    "fedcof": "#3aa655", "rank 16": "#a15bd0", "random": "#7f8c8d", "norms": "#e4572e", "lora": "#a15bd0",
    "fedavg": "#2f7ed8", "slora": "#c98a00", "zero-shot": "#7f8c8d",
}  # fmt: skip
DASHES = {"FedNCM": "2 3", "fedncm": "2 3", "rank 16": "7 3", "random": "1 4", "lora": "7 3", "zero-shot": "1 4"}
SETS = {"trec": "TREC", "sst5": "SST-5", "ag_news": "AG News", "sst2": "SST-2", "mnli": "MNLI"}
ROOMS = (
    ("values and parts", "errors core config data backbones heads modules solvers"),
    ("a method", "channel combiners methods"),
    ("a run", "engine records report runner"),
    ("around it", "published export deploy cli"),
)


def drawing(width: int, height: int, parts: Iterable[str]) -> str:
    """A whole file. ``svg:root`` is an image of its own; within a page the page's ink is taken."""
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="system-ui, sans-serif"'
    return "\n".join([f'{head} font-size="13" fill="currentColor">', f"<style>{INK}</style>", *parts, "</svg>\n"])


def text(x: float, y: float, words: str, anchor: str = "start", more: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" {more}>{escape(words)}</text>'


def box(x: float, y: float, width: float, lines: Sequence[str], colour: str = "currentColor") -> str:
    """A frame with centred lines, 18 high each; the first is bold."""
    frame = f'<rect x="{x}" y="{y}" width="{width}" height="{18 * len(lines) + 14}" rx="6" fill="{colour}"'
    words = [
        text(x + width / 2, y + 21 + 18 * row, line, "middle", 'font-weight="600"' if row == 0 else "")
        for row, line in enumerate(lines)
    ]
    return "\n".join([f'{frame} fill-opacity="0.08" stroke="{colour}" stroke-opacity="0.6"/>', *words])


def arrow(x: float, y: float, to: float, words: str = "") -> str:
    """A level arrow with words above it."""
    tip = -6 if to > x else 6
    head = f"M{to + tip} {y - 4} L{to} {y} L{to + tip} {y + 4}"
    line = f'<path d="M{x} {y} H{to} {head}" fill="none" stroke="currentColor" stroke-width="1.4"/>'
    return line + text((x + to) / 2, y - 7, words, "middle", 'font-size="12"')


def one_round() -> str:
    """What the server, the channel and a client do in a round, and what stays."""
    teal = "#12908e"
    parts = [
        *(text(x, 20, name, "middle", 'font-weight="700" font-size="15"')
          for x, name in ((110, "server"), (395, "channel"), (685, "client, one of many"))),
        box(10, 36, 200, ["sample clients"]),
        arrow(214, 52, 566, "request: the model; of a closed form, the round"),
        box(570, 36, 230, ["receive", "the backbone is there already"]),
        box(570, 108, 230, ["local work", "closed form: one pass, sums", "training: SGD on its examples"], teal),
        box(290, 190, 210, ["clip, noise, compress, mask", "as the stage asks for"], teal),
        arrow(566, 214, 504, "update"),
        arrow(286, 214, 214, "reply"),
        box(10, 190, 200, ["check, add up", "FedCOF: keep the means"]),
        box(10, 260, 200, ["step", "closed form: solve a head", "training: move the model"], teal),
        box(570, 190, 230, ["stays with the client", "examples, features,", "personal parts, client state"]),
        text(395, 298, "then evaluation, costs, a checkpoint", "middle", 'font-size="12"'),
    ]  # fmt: skip
    return drawing(810, 336, parts)


def layout() -> str:
    """The rooms of the package: a room imports only from those above it or to its left."""
    parts = []
    for row, (name, rooms) in enumerate(ROOMS):
        y = 10 + 62 * row
        parts.append(text(0, y + 21, name, more='font-weight="600"'))
        for place, room in enumerate(rooms.split()):
            parts.append(box(130 + 98 * place, y, 86, [room]))
            if place:
                parts.append(arrow(118 + 98 * place, y + 16, 130 + 98 * place))
        if row:
            parts.append(f'<path d="M30 {y - 34} V{y + 2} M26 {y - 4} L30 {y + 2} L34 {y - 4}" '
                         'fill="none" stroke="currentColor" stroke-width="1.4"/>')  # fmt: skip
    parts.append(text(130, 268, "Arrows: data. A room imports only from rooms before it.", more='font-size="12"'))
    return drawing(906, 280, parts)


def tables(title: str) -> list[list[dict[str, str]]]:
    """The tables under a heading of RESULTS.md and those below it, a dictionary for each row."""
    lines = (ROOT / "benchmarks/RESULTS.md").read_text(encoding="utf-8").splitlines()
    start = next(number for number, line in enumerate(lines) if line.lstrip("#") == f" {title}")
    level = lines[start].count("#", 0, 6)
    found: list[list[dict[str, str]]] = []
    columns: list[str] = []
    for line in lines[start + 1 :]:
        if line.startswith("#") and len(line) - len(line.lstrip("#")) <= level:
            break
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")] if line.startswith("|") else []
        if not cells:
            columns = []
        elif not columns:
            columns = cells
            found.append([])
        elif not line.startswith("|---"):
            found[-1].append(dict(zip(columns, cells, strict=True)))
    return found


def panel(
    x: int,
    y: int,
    title: str,
    series: Mapping[str, Sequence[tuple[float, float]]],
    below: str,
    size: tuple[int, int],
    ticks: Iterable[float] = (),
) -> list[str]:
    """Lines over a logarithmic axis, with these ticks or one at every point; names are in a legend of the drawing."""
    width, height = size
    everything = [point for points in series.values() for point in points]
    low, high = (5 * f(each[1] / 5 for each in everything) for f in (_floor, _ceil))
    left, right = math.log(min(each[0] for each in everything)), math.log(max(each[0] for each in everything))

    def place(point: tuple[float, float]) -> tuple[float, float]:
        across, up = (math.log(point[0]) - left) / (right - left), (point[1] - low) / (high - low)
        return x + 34 + across * (width - 50), y + 24 + (1 - up) * (height - 66)

    parts = [text(x + 34, y + 14, title, more='font-weight="600"')]
    step = 5 if high - low <= 30 else 10 if high - low <= 50 else 20
    for level in range(low, high + 1, step):
        _, at = place((math.exp(left), level))
        line = f'<path d="M{x + 34} {at:.1f} h{width - 50}" stroke="currentColor" stroke-opacity="0.15"/>'
        parts += [line, text(x + 28, at + 4, str(level), "end", 'font-size="11"')]
    for tick in sorted(ticks or {point[0] for point in everything}):
        at, _ = place((tick, low))
        parts.append(text(at, y + height - 24, f"{tick:g}", "middle", 'font-size="11"'))
    parts.append(text(x + width / 2 + 9, y + height - 8, below, "middle", 'font-size="11"'))
    for name, points in series.items():
        spots = [place(point) for point in points]
        path = "M" + " L".join(f"{across:.1f} {up:.1f}" for across, up in spots)
        style = f'stroke="{COLOURS[name]}" stroke-width="2.2" stroke-dasharray="{DASHES.get(name, "none")}"'
        parts.append(f'<path d="{path}" fill="none" {style}/>')
        for (across, up), (_, value) in zip(spots, points, strict=True):
            dot = f'<circle cx="{across:.1f}" cy="{up:.1f}" r="3" fill="{COLOURS[name]}">'
            parts.append(f"{dot}<title>{escape(name)}: {value:g} %</title></circle>")
    return parts


def _floor(values: Iterable[float]) -> int:
    return math.floor(min(values))


def _ceil(values: Iterable[float]) -> int:
    return math.ceil(max(values))


def legend(names: Mapping[str, str], y: int) -> list[str]:
    """A line and a name for each series, side by side."""
    parts = [text(850, y, "accuracy, %", "end")]
    for place, (name, shown) in enumerate(names.items()):
        x = 34 + 185 * place
        style = f'stroke="{COLOURS[name]}" stroke-width="2.2" stroke-dasharray="{DASHES.get(name, "none")}"'
        parts += [f'<path d="M{x} {y - 4} h30" fill="none" {style}/>', text(x + 38, y, shown)]
    return parts


def clients() -> str:
    """Accuracy against the number of clients, a panel for each data set of "Heads by what clients tell"."""
    names = {"FedNCM": "FedNCM", "auto": "FedCOF, the default", "rank 16": "FedCOF, rank 16", "Fed3R": "Fed3R"}
    data: dict[str, list[dict[str, str]]] = {}
    for table in tables("Heads by what clients tell"):
        for row in table:
            if names.keys() <= row.keys():
                data.setdefault(row["features"], []).append(row)
    data = {title: rows for title, rows in data.items() if len(rows) > 1}
    parts = legend(names, 16)
    for place, (title, rows) in enumerate(data.items()):
        series = {name: [(float(row["clients"]), float(row[name])) for row in rows] for name in names}
        parts += panel(place % 3 * 280, 30 + place // 3 * 220, title, series, "clients", (280, 215))
    return drawing(850, 40 + 220 * -(-len(data) // 3), parts)


def rounds() -> str:
    """Accuracy by round of linear probing, from each head."""
    names = {"random": "a random head", "fedncm": "FedNCM's head", "fedcof": "FedCOF's head", "fed3r": "Fed3R's head"}
    (table,) = tables("Accuracy by round: 100 clients, α 0.1, lr 0.01, one local epoch of batches of 64")
    series = {}
    for row in table:
        reached = [(float(key.split()[1]), float(row[key])) for key in row if key.startswith("round ")]
        series[row["head from"]] = reached
    return drawing(850, 330, [*legend(names, 16), *panel(0, 30, "CIFAR-10, SqueezeNet", series, "round", (850, 300))])


def language() -> str:
    """Accuracy of a language model that chooses, against bytes at both α, and against rounds."""
    names = {"fedcof": "FedCOF", "norms": "FedMeZO, last norm", "lora": "FedMeZO, LoRA", "fedavg": "FedAvg, LoRA"}
    more = {"slora": "SLoRA", "zero-shot": "before training"}
    (table,) = tables("SmolLM2-135M chooses: 256 examples, 10 clients, 300 tests")
    parts = [*legend(names, 16), *legend(more, 36)[1:]]
    trained = dict.fromkeys(row["data"] for row in table if row["round"] != "0")
    sets = {data: shown for data, shown in SETS.items() if data in trained}
    for line, (data, shown) in enumerate(sets.items()):
        for place, (alpha, across, below, ticks) in enumerate(
            (("100", "MB", "MB, both ways", (0.1, 1, 10, 100)), ("0.1", "MB", "MB, both ways", (0.1, 1, 10, 100)),
             ("0.1", "round", "round", (1, 10, 100)))
        ):  # fmt: skip
            series: dict[str, list[tuple[float, float]]] = {}
            for row in table:
                if row["data"] == data and row["α"] == alpha and row["round"] != "0":
                    reached = float(row["accuracy, %"].split()[0])
                    series.setdefault(row["method"], []).append((float(row[across]), reached))
            first = next(row for row in table if row["data"] == data and row["round"] == "0")
            start = float(first["accuracy, %"].split()[0])
            series["zero-shot"] = [(min(ticks) / 2, start), (1.5 * max(ticks), start)]
            parts += panel(place * 280, 50 + line * 220, f"{shown}, α {alpha}", series, below, (280, 215), ticks)
    return drawing(850, 60 + 220 * len(sets), parts)


PICTURES = {
    "round.svg": one_round, "layout.svg": layout, "clients.svg": clients, "rounds.svg": rounds,
    "language.svg": language,
}  # fmt: skip


def main() -> None:
    for name, draw in PICTURES.items():
        (ASSETS / name).write_text(draw(), encoding="utf-8")


if __name__ == "__main__":
    main()
