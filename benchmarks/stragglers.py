"""Accuracy against simulated time, where clients differ in speed: waiting, over-selection, buffered aggregation.

python -m benchmarks.heads extract cifar10-squeezenet      once: HEADSTART_DATA/features-cifar10-squeezenet.npz
python -m benchmarks stragglers
"""

from __future__ import annotations

import statistics
import sys
from typing import Any

from benchmarks.common import show
from benchmarks.compression import HEAD, SEEDS
from benchmarks.heads import file_of
from headstart.config.recipe import Recipe
from headstart.runner import run

MACHINES = {"uplink": 1e6, "downlink": 10e6, "speed_spread": 1.0}
# All with 2,000 updates that count, at the learning rate of `benchmarks.compression`.
WAYS: dict[str, dict[str, Any]] = {
    "waiting for all 10": {},
    "13 asked, the first 10": {"over_selection": 0.3},
    "20 asked, the first 10": {"over_selection": 1.0},
    "buffer of 10, 10 at work": {"buffer": 10},
    "buffer of 5, 10 at work": {"buffer": 5, "rounds": 400, "evaluate_every": 10},
    "buffer of 10, 30 at work": {"buffer": 10, "clients_per_round": 30},
}


def curve(stage: dict[str, Any], seed: int) -> list[dict[str, Any]]:
    """Every evaluation of a head that starts at zero."""
    partition = {"kind": "dirichlet", "clients": 100, "alpha": 0.1}
    table = {
        "seed": seed, "clients": MACHINES, "stages": [stage], "model": {"backbone": "features"},
        "data": {"dataset": str(file_of("cifar10-squeezenet")), "partition": partition},
    }  # fmt: skip
    lines: list[dict[str, Any]] = []
    run(Recipe.parse(table), on_metrics=lines.append)
    return lines


def main() -> None:
    if not file_of("cifar10-squeezenet").is_file():
        print("\nstragglers: features-cifar10-squeezenet.npz is missing; skipped")
        return
    rows: list[tuple[object, ...]] = []
    goal: dict[int, float] = {}
    for name, keys in WAYS.items():
        runs = {seed: curve(HEAD | {"lr": 0.003} | keys, seed) for seed in SEEDS}
        ends = [100 * lines[-1]["accuracy"] for lines in runs.values()]
        took, sent = (
            statistics.mean(lines[-1][what] for lines in runs.values()) for what in ("simulated_seconds", "bytes_up")
        )
        goal = goal or {seed: lines[-1]["accuracy"] - 0.02 for seed, lines in runs.items()}
        there = [next((at for at in lines if at["accuracy"] >= goal[seed]), None) for seed, lines in runs.items()]
        reached = [at["simulated_seconds"] for at in there if at]
        until = f"{statistics.mean(reached):.0f}" if len(reached) == len(SEEDS) else "not reached"
        spread = f"{statistics.mean(ends):.1f} ± {statistics.pstdev(ends):.1f}"
        rows.append((name, f"{took:.0f}", spread, until, f"{sent / 1e6:.1f}"))
        print(rows[-1], file=sys.stderr, flush=True)
    columns = ("", "simulated s", "accuracy at the end, %", "simulated s to within 2 points of waiting's end", "MB up")
    about = "100 clients (α 0.1), 1 Mbit/s up, speeds log-normal with σ = 1, 2,000 updates, lr 0.003, seeds 0, 1, 2"
    show(f"Stragglers, heads on 7,500 features of CIFAR-10: {about}", columns, rows)
