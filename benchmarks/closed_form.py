"""CIFAR-10 through SqueezeNet 1.1 (Caffe's weights), 100 clients, α 0.1: measured beside the published figures."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

from benchmarks.common import SHARED, show
from headstart.config.recipe import Recipe
from headstart.data import Federation
from headstart.engine.model_store import ModelStore
from headstart.runner import run

RECIPE = Path(__file__).parents[1] / "recipes" / "cifar10-closed-form.toml"
# The FedNCM paper's table 2; the others are not published for these weights.
PUBLISHED = {"fedncm": "64.8"}


def recipe(seed: int = 0) -> Recipe:
    os.environ.setdefault("HEADSTART_DATA", str(SHARED / "data"))
    weights = SHARED / "weights" / "squeezenet1_1-caffe.safetensors"
    return Recipe.load(RECIPE, [f"model.weights={weights}", f"seed={seed}"])


def features_of_cifar10() -> tuple[np.ndarray, ...]:
    dataset = Federation.of(recipe()).dataset
    store = ModelStore(recipe().model, dataset)
    return store.features("train"), dataset.train.labels, store.features("test"), dataset.test.labels


def main() -> None:
    if not SHARED.is_dir():
        print("\nclosed_form: set HEADSTART_SHARED to a folder with data/cifar10 and weights/; skipped")
        return
    runs = [run(recipe(seed)).summary["stages"] for seed in range(3)]
    rows = []
    for stages in zip(*runs, strict=True):
        accuracies = [100 * stage["accuracy"] for stage in stages]
        first = stages[0]
        chosen = ", ".join(f"{key} {value:.3g}" for key, value in first["chosen"].items())
        name = first["method"] + (f" ({chosen})" if chosen else "")
        megabytes = (f"{first['bytes_up'] / 1e6:.2f}", f"{first['published_bytes'] / 1e6:.2f}")
        spread = f"{np.mean(accuracies):.2f} ± {np.std(accuracies):.2f}"
        rows.append((name, PUBLISHED.get(first["method"], ""), spread, *megabytes, f"{first['seconds']:.2f}"))
    columns = ("method", "published", "measured, 3 partitions", "MB up", "MB as papers count", "seconds")
    show("CIFAR-10, SqueezeNet 1.1 (Caffe), 100 clients, α 0.1", columns, rows)
