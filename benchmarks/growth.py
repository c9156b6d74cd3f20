"""How time, memory and bytes of a run grow with clients, classes, dimensions and examples: fitted exponents.

    python -m benchmarks.growth

Features drawn at random, natural partition, one process for every point, one thread. An exponent is the slope of
log(cost) against log(size) over ×1, ×4, ×16; memory is what a run adds to the peak of the process before it.
"""

import json
import multiprocessing
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np

import headstart.solvers.network  # noqa: F401 (before the fork)
from headstart.config.recipe import Recipe
from headstart.core.ledger import peak_memory
from headstart.data import Federation
from headstart.runner.dry_run import dry_run
from headstart.runner.run_recipe import run_federation

BASE = {"clients": 100, "classes": 10, "dimensions": 64, "examples": 20}
STAGES: dict[str, dict[str, Any]] = {
    "fedncm": {"method": "fedncm"},
    "fedcof": {"method": "fedcof"},
    "fed3r": {"method": "fed3r"},
    "fedavg": {"method": "fedavg", "train": "head", "rounds": 5, "participation": 0.1, "evaluate_every": 5},
}


def features(path: Path, clients: int, classes: int, dimensions: int, examples: int) -> None:
    """Every client has as many examples; a tenth more, of nobody, are for testing."""
    rng = np.random.default_rng(0)
    count = clients * examples
    y = rng.permutation(np.arange(count) % classes)
    X = rng.standard_normal((count, dimensions), np.float32) + rng.standard_normal((classes, dimensions), np.float32)[y]
    split = np.where(rng.random(count) < 0.1, 2, 0)
    np.savez(path, X=X, y=y, split=split, client=np.repeat(np.arange(clients), examples))


def measure(stage: dict[str, Any], sizes: dict[str, int], pipe: Any) -> None:
    """One run: its seconds, what it adds to the peak of the memory, its bytes, and those of the plan."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "features.npz"
        features(path, **sizes)
        data = {"dataset": str(path), "partition": {"kind": "natural"}}
        recipe = Recipe.parse({"data": data, "model": {"backbone": "features"}, "stages": [stage]})
        federation = Federation.of(recipe)
        before = peak_memory()
        summary = run_federation(recipe, federation).summary
        memory = peak_memory() - before
        (_, bill) = dry_run(recipe, federation)[1][0]
    totals = bill.ledger.totals()
    pipe.send(
        {
            "seconds": summary["seconds"],
            "memory": memory,
            "bytes": summary["bytes_up"] + summary["bytes_down"],
            "planned": totals["bytes_up"] + totals["bytes_down"],
        }
    )


def point(stage: dict[str, Any], sizes: dict[str, int]) -> dict[str, float]:
    """Measured in a process of its own."""
    fork = multiprocessing.get_context("fork")
    here, there = fork.Pipe()
    process = fork.Process(target=measure, args=(stage, sizes, there))
    process.start()
    found: dict[str, float] = here.recv()
    process.join()
    return found


def main() -> None:
    """A table of exponents, and the points as JSON on the error stream."""
    print("| method | against | time | memory | bytes | planned bytes are measured bytes |")
    print("|---|---|---|---|---|---|")
    for name, stage in STAGES.items():
        base = point(stage, BASE)
        for axis in BASE:
            points = [base] + [point(stage, {**BASE, axis: BASE[axis] * by}) for by in (4, 16)]
            print(json.dumps({"method": name, "axis": axis, "points": points}), file=sys.stderr)
            slopes = [
                np.polyfit(np.log([1, 4, 16]), np.log([max(each[cost], 1e-3) for each in points]), 1)[0]
                for cost in ("seconds", "memory", "bytes")
            ]
            same = all(each["bytes"] == each["planned"] for each in points)
            print(
                f"| {name} | {axis} | {' | '.join(f'{s:.2f}' for s in slopes)} | {'yes' if same else 'no'} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
