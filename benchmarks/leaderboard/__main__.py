"""``python -m benchmarks.leaderboard``: the leaderboard of methods, as ``headstart compare`` finds it.

python -m benchmarks.leaderboard features [NAME …]   features, once: HEADSTART_DATA/leaderboard-NAME.npz
python -m benchmarks.leaderboard run [NAME …]        runs that are not there yet: runs/leaderboard/NAME
python -m benchmarks.leaderboard page                docs/leaderboard.md and its picture, of the runs that are there
"""

from __future__ import annotations

import csv
import os
import subprocess
import sys
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from benchmarks.common import SHARED
from benchmarks.heads import SOME, SQUEEZENET
from headstart.core.files import write_atomically, write_text
from headstart.report import human_bytes, markdown

HERE, ROOT = Path(__file__).parent, Path(__file__).parents[2]
RUNS = Path(os.environ.get("HEADSTART_RUNS", ROOT / "runs")) / "leaderboard"
MINILM = {"backbone": "all-MiniLM-L6-v2"}
SETS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "cifar10": ("CIFAR-10, 9,500 images, SqueezeNet 1.1", SQUEEZENET, SOME),
    "cifar100": (
        "CIFAR-100, 7,000 images, SqueezeNet 1.1",
        SQUEEZENET,
        {"train_examples": 5000, "test_examples": 2000},
    ),
    "cub200": ("CUB-200, SqueezeNet 1.1", SQUEEZENET, {}),
    "stanford-cars": ("Stanford Cars, SqueezeNet 1.1", SQUEEZENET, {}),
    "eurosat-sub": ("EuroSAT, 6,000 images, SqueezeNet 1.1", SQUEEZENET, {}),
    "flowers102": ("Flowers-102, SqueezeNet 1.1", SQUEEZENET, {}),
    "ag_news": ("AG News, 5,900 texts, MiniLM-L6", MINILM, {"train_examples": 4000, "test_examples": 1900}),
    "trec": ("TREC, MiniLM-L6", MINILM, {}),
}
VALIDATION, ALPHAS = 0.2, ("0.05", "0.5", "100")
TITLES = {
    "closed-form": "{method}",
    "trained": "{method}",
    "pooled": "{method} (no federation)",
    "started": "fedavg from {start}'s head",
    "personal": "{method}",
    "personalised": "{start}, then personalise",
}
GLOBAL = ("closed-form", "trained", "pooled", "started")
MARKERS = {"closed-form": "o", "trained": "x", "started": "*"}


def features(name: str) -> None:
    """X, y and split (0 train, 1 validation, 2 test): a fifth of the training examples of each class validates."""
    from headstart.backbones import extract, load_backbone
    from headstart.config.recipe import Data, Model
    from headstart.data import load_dataset

    _, model, keys = SETS[name]
    given = {"weights": str(SHARED / "weights" / model["weights"])} if "weights" in model else {}
    backbone, dataset = load_backbone(Model(**{**model, **given})), load_dataset(Data(dataset=name, **keys))
    parts = [part for part in (dataset.train, dataset.validation, dataset.test) if part is not None]
    x = np.concatenate([np.asarray(extract(backbone, part, name)) for part in parts])
    y = np.concatenate([part.labels for part in parts])
    split, rng = np.zeros(len(y), np.int64), np.random.default_rng(7)
    split[-len(dataset.test) :] = 2
    for label in np.unique(y):
        mine = rng.permutation(np.flatnonzero((y == label) & (split == 0)))
        split[mine[: round(VALIDATION * len(mine))]] = 1
    np.savez(file_of(name), X=x, y=y, split=split)


def file_of(name: str) -> Path:
    return Path(os.environ.get("HEADSTART_DATA", SHARED / "data")) / f"leaderboard-{name}.npz"


def run(name: str) -> None:
    """One call of headstart compare; what is finished stays."""
    recipes = sorted(map(str, HERE.glob("*.toml")))
    command = [
        str(Path(sys.executable).with_name("headstart")),
        "compare",
        *recipes,
        "--choose",
        "lr",
        "--out",
        str(RUNS / name),
    ]
    subprocess.run([*command, "--set", f"data.dataset={file_of(name)}"], check=True)


def results() -> dict[str, list[dict[str, str]]]:
    """The last stage of every row of every comparison that is finished, with the bytes of the stages before it."""
    found = {}
    for name in SETS:
        if (RUNS / name / "compare.csv").is_file():
            with (RUNS / name / "compare.csv").open(newline="", encoding="utf-8") as file:
                rows = list(csv.DictReader(file))
            last = list[dict[str, str]]()
            for row in rows:
                if row["stage"] != "0":
                    before = last.pop()
                    row |= {key: str(float(row[key]) + float(before[key])) for key in ("bytes_up", "bytes_down")}
                last.append(row)
            found[name] = last
    return found


def titled(row: dict[str, str]) -> str:
    return TITLES[row["recipe"]].format(method=row["method"], start=row["stages.0.method"] or "fedcof")


def table(rows: list[dict[str, str]]) -> str:
    """Methods × partitions, with bytes and the chosen rates; best first where clients are least alike."""
    lines = []
    for title in dict.fromkeys(map(titled, rows)):
        mine = [row for alpha in ALPHAS for row in rows if titled(row) == title and row["alpha"] == alpha]
        cells = [f"{100 * float(row['accuracy_mean']):.1f} ± {100 * float(row['accuracy_std']):.1f}" for row in mine]
        rates = ", ".join(filter(None, (row.get("lr") for row in mine)))
        sent = [human_bytes(mean(float(row[key]) for row in mine)) for key in ("bytes_up", "bytes_down")]
        lines.append([title, *cells, *sent, mine[0]["rounds"].split(".")[0], rates])
    lines.sort(key=lambda line: -float(line[1].split()[0]))
    return markdown(("method", *(f"α = {a}" for a in ALPHAS), "up", "down", "rounds", "lr by α"), lines)


def tables(found: dict[str, list[dict[str, str]]]) -> str:
    """Two tables for each data set: one model for everybody, and models of the clients' own."""
    parts = []
    for name, rows in found.items():
        parts.append(f"## {SETS[name][0]}\n\n{table([row for row in rows if row['recipe'] in GLOBAL])}")
        own = table([row for row in rows if row["recipe"] not in GLOBAL])
        parts.append(f"On test examples of each client's own classes:\n\n{own}")
    return "\n".join(parts)


def draw(found: dict[str, list[dict[str, str]]], path: Path) -> None:
    """Accuracy at α = 0.05 against bytes up, a panel for each data set."""
    columns = min(3, len(found))
    figure = Figure(figsize=(10, 2.8 * -(-len(found) // columns) + 1.1), layout="constrained")
    axes = np.atleast_1d(figure.subplots(-(-len(found) // columns), columns)).ravel()
    for axis in axes[len(found) :]:
        axis.remove()
    for axis, (name, rows) in zip(axes, found.items(), strict=False):
        for row in (row for row in rows if row["alpha"] == ALPHAS[0] and row["recipe"] in MARKERS):
            point = float(row["bytes_up"]) / 1e6, 100 * float(row["accuracy_mean"])
            axis.scatter(*point, s=30, marker=MARKERS[row["recipe"]], label=titled(row))
        axis.set(xscale="log", xlabel="MB up", ylabel="accuracy, %", title=SETS[name][0].split(",")[0])
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize=8)
    write_atomically(path, lambda temporary: figure.savefig(temporary, dpi=100, facecolor="white"))


def page() -> None:
    """docs/leaderboard.md: the opening that is there, and the tables."""
    found, path = results(), ROOT / "docs" / "leaderboard.md"
    opening = path.read_text(encoding="utf-8").partition("\n## ")[0].rstrip()
    missing = ", ".join(SETS[name][0].split(",")[0] for name in SETS if name not in found)
    rest = f"\n## Not run yet\n\n{missing}.\n" if missing else ""
    write_text(path, f"{opening}\n\n{tables(found)}{rest}")
    draw(found, ROOT / "docs" / "leaderboard.png")


if __name__ == "__main__":
    what, *names = sys.argv[1:]
    if what == "page":
        page()
    for name in names or SETS if what != "page" else ():
        {"features": features, "run": run}[what](name)
