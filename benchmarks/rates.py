"""Learning rates that a paper does not print: chosen on training data, by one rule.

    python -m benchmarks.rates [--rates 0.1,0.03,0.01] [--share 0.2] ROW …    rows that train a head: fedncm/2/cub200/lp

A fifth of the training examples of every class is put aside, and the row's recipe is run on the others with each of the
rates, with its clients and rounds (with --share, only the first part of them), and with a seed that is none of its own.
The best is the one whose best round is highest on what was put aside; test data take no part. Features come from the
cache that `headstart reproduce` fills. Runs that are finished stay: HEADSTART_RUNS/rates.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import show
from headstart.backbones import extract, load_backbone
from headstart.config.recipe import MEMORY, Recipe
from headstart.data import Federation
from headstart.published import select
from headstart.records import Record
from headstart.runner.sweep import expand, sweep

ASIDE, SEED, RATES = 0.2, 7, (0.1, 0.03, 0.01)
COLUMNS = ("row", "rounds", "rate", "best round", "last round", "seconds")
RUNS = Path(os.environ.get("HEADSTART_RUNS", "runs")) / "rates"


def put_aside(labels: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """split [n]: 2, to test by, for a fifth of the examples of every class, rounded; 0 for the others."""
    split, rng = np.zeros(len(labels), np.int64), np.random.default_rng(SEED)
    for label in np.unique(labels):
        mine = rng.permutation(np.flatnonzero(labels == label))
        split[mine[: round(ASIDE * len(mine))]] = 2
    return split


def tried(recipe: Recipe, rates: list[float], share: float, out: Path) -> list[tuple[float, int, float, float, float]]:
    """Of each rate: the best accuracy on what was put aside, its round, the last accuracy, and the seconds."""
    backbone, data = load_backbone(recipe.model), Federation.of(recipe).dataset
    features = np.asarray(extract(backbone, data.train, f"{data.name} train"))
    given = {"X": features, "y": data.train.labels, "split": put_aside(data.train.labels)}
    table = recipe.model_dump(mode="json", exclude_none=True, exclude={"tasks"})
    clients = {"dataset": MEMORY, "partition": table["data"]["partition"]}
    table |= {"seed": SEED, "model": {"backbone": "features"}, "data": clients}
    stage = table["stages"][0]
    stage |= {"lr": rates, "rounds": round(share * stage["rounds"])}
    points = expand([table])
    lines = []
    for point, summary in zip(points, sweep(points, out, lambda point, summary: None, given), strict=True):
        tests = {line["round"]: line["accuracy"] for line in Record.read(out / point.folder).metrics}
        best = max(tests, key=lambda after: tests[after])
        lines.append((point.values["lr"], best, tests[best], tests[max(tests)], summary["total_seconds"]))
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="+")
    parser.add_argument("--rates", default=",".join(map(str, RATES)))
    parser.add_argument("--share", type=float, default=1.0)
    asked = parser.parse_args()
    rates, lines = [float(rate) for rate in asked.rates.split(",")], []
    for row in select(asked.rows):
        if row.recipe == "probe":
            recipe = row.points()[0].recipe
            rounds = f"{round(asked.share * recipe.stages[0].rounds):,} of {recipe.stages[0].rounds:,}"
            found = tried(recipe, rates, asked.share, RUNS / row.id / f"{asked.share:g}")
            best = max(found, key=lambda each: each[2])[0]
            for rate, after, highest, last, seconds in found:
                shown = [f"{100 * highest:.2f} (round {after})", f"{100 * last:.2f}", f"{seconds:.0f}"]
                lines.append([f"`{row.id}`", rounds, f"{rate:g}{', chosen' if rate == best else ''}", *shown])
    show("Learning rates on a fifth of the training data", COLUMNS, lines)


if __name__ == "__main__":
    main()
