"""Linear probing with and without a head start: CIFAR-10 features of SqueezeNet 1.1, 30 % of the clients in a round."""

from __future__ import annotations

from typing import Any

from benchmarks.closed_form import recipe
from benchmarks.common import SHARED, show
from headstart.config.recipe import Recipe
from headstart.runner import run

PROBE = {"method": "fedavg", "train": "head", "rounds": 200, "participation": 0.3, "lr": 0.01}
STARTS = ("random", "fedncm", "fed3r", "fedcof")
ROUNDS = (1, 5, 10, 50, 100, 200)


def probe(start: str, partition: dict[str, Any] | None = None, seed: int = 0, **keys: Any) -> dict[int, dict[str, Any]]:
    """Metrics of a linear probe by round; round 0 is the head it starts from."""
    table = recipe(seed).model_dump(exclude_none=True)
    table["data"]["partition"] |= partition or {}
    head = [] if start == "random" else [{"method": start}]
    table["stages"] = [*head, PROBE | {"evaluate_every": 1 if not keys else 50} | keys]
    lines: list[dict[str, Any]] = []
    run(Recipe.parse(table), on_metrics=lines.append)
    return {line["round"] if line["method"] == "fedavg" else 0: line for line in lines}


def percent(metrics: dict[int, dict[str, Any]], round: int) -> str:
    return f"{100 * metrics[round]['accuracy']:.2f}" if round in metrics else ""


def main() -> None:
    if not SHARED.is_dir():
        print("\ntraining: set HEADSTART_SHARED to a folder with data/cifar10 and weights/; skipped")
        return
    rows = []
    for start in STARTS:
        found = probe(start)
        before = found[0]["seconds"] if 0 in found else 0.0
        cells = [percent(found, round) for round in (0, *ROUNDS)]
        rows.append((start, *cells, f"{found[200]['seconds'] - before:.1f}"))
    columns = ("head from", "closed form", *(f"round {round}" for round in ROUNDS), "seconds, with 200 evaluations")
    show("Accuracy by round: 100 clients, α 0.1, lr 0.01, one local epoch of batches of 64", columns, rows)
    long = probe("random", rounds=800, lr=0.03)
    print(
        f"\n800 rounds from random, lr 0.03: {percent(long, 800)} % (published for 200 passes over all clients: 82.5)."
    )

    settings: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
        **{f"α = {alpha:g}": ({"alpha": alpha}, {}) for alpha in (0.01, 0.1, 100.0)},
        **{f"{epochs} local epochs": ({}, {"local_epochs": epochs}) for epochs in (5, 10)},
        **{f"{clients:,} clients": ({"clients": clients}, {}) for clients in (10, 1000)},
    }
    rows = []
    for name, (partition, keys) in settings.items():
        keys = {"evaluate_every": 200, **keys}
        probes = [probe(start, partition, **keys) for start in ("random", "fedncm", "fedcof")]
        rows.append((name, *(f"{percent(found, 0)} → {percent(found, 200)}".lstrip(" →") for found in probes)))
    show("After 200 rounds, one thing changed at a time", ("", "random", "fedncm → probe", "fedcof → probe"), rows)
