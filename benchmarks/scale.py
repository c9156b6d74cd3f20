"""Time and memory as clients become a million: 10 examples each, 64 dimensions, 10 classes, in process.

    python -m benchmarks.scale [CLIENTS …]

Without a run directory, one thread; every row is a process of its own. CPU seconds are those of the run; the peak is
that of the process, the caller's arrays among it.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

import numpy as np

from benchmarks.common import in_fresh_process, show

CLIENTS = (10_000, 100_000, 1_000_000)
EXAMPLES, DIM, CLASSES = 10, 64, 10
STAGES: dict[str, list[dict[str, Any]]] = {
    "fedncm": [{"method": "fedncm"}],
    "all": [
        {"method": "fedncm"},
        {"method": "fedcof"},
        {"method": "scaffold", "train": "head", "rounds": 100, "clients_per_round": 100, "lr": 0.01,
         "evaluate_every": 100},
    ],
}  # fmt: skip


def measure(clients: int, stages: str) -> dict[str, float]:
    """One run; the last hundredth of the examples is for testing."""
    from headstart.core.ledger import peak_memory
    from headstart.runner import run

    rng, count, block = np.random.default_rng(0), EXAMPLES * clients, 100_000
    y = rng.integers(0, CLASSES, count)
    means, X = rng.standard_normal((CLASSES, DIM), np.float32), np.empty((count, DIM), np.float32)
    for start in range(0, count, block):
        part = slice(start, start + block)
        X[part] = rng.standard_normal(X[part].shape, np.float32) + means[y[part]]
    split = np.where(np.arange(count) < count - count // 100, 0, 2)
    data = {"X": X, "y": y, "split": split, "client": np.arange(count) // EXAMPLES}
    before, start_time = peak_memory(), time.process_time()
    run({"model": {"backbone": "features"}, "stages": STAGES[stages]}, data=data)
    return {"seconds": time.process_time() - start_time, "before": before, "peak": peak_memory()}


def main(*clients: str) -> None:
    """A row for each number of clients."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    rows = []
    for number in map(int, clients or map(str, CLIENTS)):
        found = {stages: in_fresh_process("benchmarks.scale", "side", number, stages) for stages in STAGES}
        cells = [(f"{each['seconds']:.1f}", f"{each['peak'] / 2**30:.2f}") for each in found.values()]
        rows.append((f"{number:,}", *cells[0], *cells[1], f"{found['all']['before'] / 2**30:.2f}"))
    columns = ("clients", "FedNCM, CPU s", "peak, GiB", "FedNCM, FedCOF, 100 rounds of 100 clients of SCAFFOLD, CPU s",
               "peak, GiB", "of which the caller's data")  # fmt: skip
    show(f"Clients of {EXAMPLES} examples, {DIM} dimensions, {CLASSES} classes, in process, one thread", columns, rows)


if __name__ == "__main__":
    if sys.argv[1:2] == ["side"]:
        print(json.dumps(measure(int(sys.argv[2]), sys.argv[3])))
    else:
        main(*sys.argv[1:])
