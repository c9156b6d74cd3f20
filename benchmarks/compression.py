"""Accuracy against the bytes that clients send: heads on features of CIFAR-10, and all of SqueezeNet 1.1.

python -m benchmarks.heads extract cifar10-squeezenet      once: HEADSTART_DATA/features-cifar10-squeezenet.npz
python -m benchmarks compression
"""

from __future__ import annotations

import statistics
import sys
from typing import Any

from benchmarks.common import SHARED, show
from benchmarks.finetuning import curve
from benchmarks.heads import file_of
from headstart.config.recipe import Recipe
from headstart.runner import run

SEEDS = (0, 1, 2)
WAYS: dict[str, dict[str, Any]] = {
    "float32": {},
    "int8": {"compress": "int8"},
    "top-k, 10 %": {"compress": "top-k", "top_k": 0.1},
    "top-k, 1 %": {"compress": "top-k", "top_k": 0.01},
    "sign": {"compress": "sign"},
}
# The learning rate of heads is that of float32 which was best of 1e-4, 3e-4, 1e-3, 3e-3 on seed 99.
HEAD = {"method": "fedavg", "train": "head", "rounds": 200, "clients_per_round": 10, "evaluate_every": 5}
BODY = {
    "method": "fedavg", "train": "all", "rounds": 40, "clients_per_round": 5, "lr": 0.003, "evaluate_every": 4,
    "batch_size": 16,
}  # fmt: skip
CIFAR = {"dataset": "cifar10", "train_examples": 1000, "test_examples": 1000}


def head_curve(stage: dict[str, Any], seed: int) -> list[dict[str, Any]]:
    """Every evaluation of a head that starts at zero."""
    partition = {"kind": "dirichlet", "clients": 100, "alpha": 0.1}
    data = {"dataset": str(file_of("cifar10-squeezenet")), "partition": partition}
    lines: list[dict[str, Any]] = []
    recipe = Recipe.parse({"seed": seed, "data": data, "model": {"backbone": "features"}, "stages": [stage]})
    run(recipe, on_metrics=lines.append)
    return lines


def body_curve(stage: dict[str, Any], seed: int) -> list[dict[str, Any]]:
    """Every evaluation of a fine-tuned SqueezeNet after FedNCM."""
    data = CIFAR | {"partition": {"kind": "dirichlet", "clients": 10, "alpha": 0.5}}
    return curve(data, [{"method": "fedncm"}, stage], seed, 64)[1:]


def chosen(rates: tuple[float, ...]) -> float:
    """The learning rate of float32 with the highest accuracy on a seed that is not reported."""
    return max(rates, key=lambda lr: float(head_curve(HEAD | {"lr": lr}, 99)[-1]["accuracy"]))


def table(title: str, curves: Any, stage: dict[str, Any], seeds: tuple[int, ...]) -> None:
    """Of each way: what is sent, how good it gets, and what it takes to within two points of float32's end."""
    rows: list[tuple[object, ...]] = []
    whole, goal = 0.0, dict[int, float]()
    for name, keys in WAYS.items():
        runs = {seed: curves(stage | keys, seed) for seed in seeds}
        ends = [100 * lines[-1]["accuracy"] for lines in runs.values()]
        sent = statistics.mean(lines[-1]["bytes_up"] for lines in runs.values())
        whole = whole or sent
        goal = goal or {seed: lines[-1]["accuracy"] - 0.02 for seed, lines in runs.items()}
        there = {seed: next((at for at in each if at["accuracy"] >= goal[seed]), None) for seed, each in runs.items()}
        reached = [at for at in there.values() if at]
        until = "not reached" if len(reached) < len(seeds) else (
            f"{statistics.mean(at['bytes_up'] for at in reached) / 1e6:.2f}, "
            f"round {statistics.mean(at['round'] for at in reached):.0f}"
        )  # fmt: skip
        spread = f"{statistics.mean(ends):.1f} ± {statistics.pstdev(ends):.1f}"
        rows.append((name, f"{sent / 1e6:.2f}", f"{whole / sent:.1f}", spread, until))
        print(rows[-1], file=sys.stderr, flush=True)
    columns = ("", "MB up", "times fewer", "accuracy at the end, %", "MB up to within 2 points of float32's end")
    show(title, columns, rows)


def main() -> None:
    if not file_of("cifar10-squeezenet").is_file() or not SHARED.is_dir():
        print("\ncompression: features-cifar10-squeezenet.npz or the folder of HEADSTART_SHARED is missing; skipped")
        return
    head = HEAD | {"lr": chosen((1e-4, 3e-4, 1e-3, 3e-3))}
    about = f"100 clients (α 0.1), 10 in each of 200 rounds, lr {head['lr']:g}, seeds 0, 1, 2"
    table(f"Bytes up, heads on 7,500 features of CIFAR-10: {about}", head_curve, head, SEEDS)
    about = "10 clients (α 0.5), 5 in each of 40 rounds, after FedNCM, seed 0"
    table(f"Bytes up, all of SqueezeNet 1.1 on 1,000 images of CIFAR-10 at 64 px: {about}", body_curve, BODY, SEEDS[:1])
