"""Time and memory of the three heads as the clients grow: CIFAR-10 features, 100 to 10,000 clients."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import numpy as np

from benchmarks.common import SHARED, THREADS, in_fresh_process, show

METHODS = ("fedncm", "fed3r", "fedcof")
CLIENTS = (100, 1_000, 10_000)


def main() -> None:
    rows = []
    for clients in CLIENTS:
        found = in_fresh_process("benchmarks.clients", clients)
        cells = [f"{found[method]['seconds']:.2f} s, {100 * found[method]['accuracy']:.2f} %" for method in METHODS]
        rows.append((f"{clients:,}", f"{found['partition']:.2f} s", *cells, f"{found['peak'] / 2**20:.0f} MiB"))
    source = "CIFAR-10, SqueezeNet 1.1" if SHARED.is_dir() else "random numbers of that size"
    title = f"Clients: 50,000 × 512 cached features ({source}), α 0.1, {THREADS} threads"
    show(title, ("clients", "partition", *METHODS, "peak memory"), rows)


def measure(clients: int) -> dict[str, object]:
    from tests.helpers import Bench, context_of, play
    from threadpoolctl import threadpool_limits

    from headstart.config.partition import Dirichlet
    from headstart.config.recipe import Recipe
    from headstart.core.ledger import Ledger, peak_memory
    from headstart.data import Dataset, Examples, Federation
    from headstart.data.partition import partition
    from headstart.engine.client_states import ClientStates
    from headstart.runner.evaluation import evaluate

    features, labels, test, test_labels = _features()
    found: dict[str, object] = {}
    with threadpool_limits(THREADS):
        train = Examples("features", features, (), np.arange(len(labels)), labels)
        start = time.perf_counter()
        owners = partition(train, 10, Dirichlet(clients=clients, alpha=0.1), 0)
        found["partition"] = time.perf_counter() - start
        names = tuple(str(client) for client in range(clients))
        federation = Federation(Dataset("cifar10", tuple("0123456789"), train, train), owners, None, names)
        for name in METHODS:
            stage = Recipe.parse({"data": {"dataset": "x"}, "stages": [{"method": name}]}).stages[0]
            bench = Bench(stage, context_of(stage, 10, features.shape[1], (0, 0), clients, len(labels)))
            states = ClientStates(Path(), clients, {})
            start = time.perf_counter()
            head = bench.head(play(bench, federation, features, Ledger.open(clients), states))
            seconds = time.perf_counter() - start
            found[name] = {"seconds": seconds, "accuracy": evaluate(head, test, test_labels).accuracy}
    found["peak"] = peak_memory()
    return found


def _features() -> tuple[np.ndarray, ...]:
    if not SHARED.is_dir():
        rng = np.random.default_rng(0)
        labels = rng.integers(0, 10, 60_000)
        features = rng.standard_normal((60_000, 512), np.float32) + rng.standard_normal((10, 512), np.float32)[labels]
        return features[:50_000], labels[:50_000], features[50_000:], labels[50_000:]
    from benchmarks.closed_form import features_of_cifar10

    return features_of_cifar10()


if __name__ == "__main__":
    print(json.dumps(measure(int(sys.argv[1]))))
