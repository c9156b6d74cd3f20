"""FedCOF's server at the scale of iNaturalist-Users-120K: against one matrix product and a loop over classes."""

from __future__ import annotations

import json
import sys
import time

import numpy as np
from threadpoolctl import threadpool_limits

from benchmarks.common import THREADS, alternate, in_fresh_process, show
from headstart.core.ledger import peak_memory
from headstart.core.statistics import ClientStatistics
from headstart.heads import cof_head

MEANS, CLASSES, DIM = 54_590, 1_203, 1_280


def received() -> ClientStatistics:
    """What the server holds when all clients have spoken: float32 rows, as they travel."""
    rng = np.random.default_rng(0)
    labels = np.sort(np.concatenate([np.arange(CLASSES).repeat(2), rng.integers(0, CLASSES, MEANS - 2 * CLASSES)]))
    counts = rng.integers(1, 5, MEANS)
    sums = rng.standard_normal((MEANS, DIM), np.float32)
    sums += rng.standard_normal((CLASSES, DIM), np.float32)[labels]
    sums *= counts[:, None].astype(np.float32)
    return ClientStatistics(CLASSES, labels, counts, sums)


def loop_with_pseudo_inverse(statistics: ClientStatistics, shrinkage: float) -> np.ndarray:
    """One class after the other, a d × d covariance for each, a pseudo-inverse at the end: as public code does it."""
    labels, counts, means = statistics.labels, statistics.counts, statistics.sums / statistics.counts[:, None]
    gram, targets = np.zeros((DIM, DIM)), np.zeros((CLASSES, DIM))
    for label in range(CLASSES):
        mine = labels == label
        n, k = counts[mine], means[mine].astype(np.float64)
        mean = n @ k / n.sum()
        covariance = (k - mean).T @ ((k - mean) * n[:, None]) / max(len(n) - 1, 1) + shrinkage * np.eye(DIM)
        gram += (n.sum() - 1) * covariance
        targets[label] = n.sum() * mean
    total = targets.sum(axis=0) / counts.sum()
    gram += counts.sum() * np.outer(total, total)
    weight = targets @ np.linalg.pinv(gram)
    return np.asarray(weight / np.linalg.norm(weight, axis=1, keepdims=True))


def main() -> None:
    memory = in_fresh_process("benchmarks.fedcof_server", "memory")
    statistics = received()
    left = statistics.sums.astype(np.float64)
    right = left.copy()
    with threadpool_limits(THREADS):
        seconds = alternate(
            {"product": lambda: left.T @ right, "server": lambda: cof_head(statistics, 1.0, "estimated")}, 5
        )
        start = time.perf_counter()
        expected = loop_with_pseudo_inverse(statistics, 1.0)
        loop = time.perf_counter() - start
    difference = np.abs(cof_head(statistics, 1.0, "estimated").weight - expected).max()
    rows = [
        ("one float64 product [d, P] × [P, d]", f"{seconds['product']:.2f}", "1"),
        ("headstart's server, all of it", f"{seconds['server']:.2f}", f"{seconds['server'] / seconds['product']:.2f}"),
        ("loop over classes, pseudo-inverse", f"{loop:.1f}", f"{loop / seconds['product']:.1f}"),
    ]
    show(f"FedCOF's server: {MEANS:,} means, {CLASSES:,} classes, {DIM:,} dimensions", ("", "seconds", "ratio"), rows)
    times = f"{loop / seconds['server']:.1f}"
    print(f"\nThe loop takes {times} times as long; the weights differ by at most {difference:.1e}.")
    held, peak = MEANS * DIM * 4 / 2**30, memory["peak"] / 2**30
    print(f"Peak memory of a process that receives the means ({held:.2f} GiB) and solves: {peak:.2f} GiB.")


if __name__ == "__main__" and sys.argv[1:] == ["memory"]:
    cof_head(received(), 1.0, "estimated")
    print(json.dumps({"peak": peak_memory()}))
