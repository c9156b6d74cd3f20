"""Clients that train a backbone one after the other, and several at once in processes (`HEADSTART_WORKERS`).

    python -m benchmarks.workers [NETWORK …]

FedAvg of all of a network with random weights, 8 clients of 32 images of 32 or 64 pixels, batches of 16; seconds of the
rounds after the first, the median of three turns. Every turn is a process of its own.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
from typing import Any

import numpy as np

from benchmarks.common import in_fresh_process, show

ROUNDS, CLIENTS, IMAGES, BATCH, TURNS = 4, 8, 32, 16, 3
NETS = {"conv4": 32, "squeezenet1_1": 64}
WAYS = {"one process, one thread": (1, 1), "one process, two threads": (1, 2), "two workers, one thread each": (2, 2)}


def measure(net: str, threads: int) -> dict[str, Any]:
    """Seconds of a round, and the loss in the end, which is the same for the same threads of a process."""
    import torch

    from headstart.runner import run

    torch.set_num_threads(threads)
    rng, side = np.random.default_rng(0), NETS[net]
    count = CLIENTS * IMAGES
    data = {
        "X": rng.integers(0, 255, (count + 32, side, side, 3), np.uint8), "y": np.arange(count + 32) % 4,
        "client": np.append(np.arange(count) // IMAGES, np.zeros(32, np.int64)),
        "split": np.repeat([0, 2], [count, 32]),
    }  # fmt: skip
    stage = {"method": "fedavg", "train": "all", "rounds": ROUNDS, "lr": 0.01, "batch_size": BATCH}
    model = {"backbone": net, "weights": "random", "image_size": side}
    found: list[dict[str, Any]] = []
    run({"model": model, "stages": [stage]}, data=data, on_metrics=found.append)
    seconds = np.diff([line["seconds"] for line in found if line["round"]])
    return {"seconds": float(np.median(seconds)), "loss": found[-1]["loss"]}


def main(*chosen: str) -> None:
    """A row for each network and way."""
    rows = []
    for net in chosen or NETS:
        found: dict[str, list[dict[str, Any]]] = {way: [] for way in WAYS}
        for _ in range(TURNS):
            for way, (workers, threads) in WAYS.items():
                os.environ |= {"HEADSTART_WORKERS": str(workers), "OMP_NUM_THREADS": str(threads)}
                found[way].append(in_fresh_process("benchmarks.workers", "side", net, threads))
        plain = statistics.median(each["seconds"] for each in found["one process, two threads"])
        for way, turns in found.items():
            seconds = statistics.median(each["seconds"] for each in turns)
            rows.append((net, way, f"{seconds:.2f}", f"{plain / seconds:.2f}", f"{turns[0]['loss']:.9f}"))
    title = f"A round of {CLIENTS} clients of {IMAGES} images, all of a backbone trained, median of {TURNS}"
    show(title, ("network", "how", "s", "× one process, two threads", "loss in the end"), rows)


if __name__ == "__main__":
    if sys.argv[1:2] == ["side"]:
        print(json.dumps(measure(sys.argv[2], int(sys.argv[3]))))
    else:
        main(*sys.argv[1:])
