"""Fine-tuning with and without a head start: 90 images of CIFAR-10, and Flowers-102; and what it costs."""

from __future__ import annotations

import copy
import json
import os
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tests.helpers import Bench, context_of, play

from benchmarks.common import SHARED, THREADS, alternate, in_fresh_process, show
from headstart.config.recipe import Recipe
from headstart.core.ledger import Ledger, peak_memory
from headstart.data import Federation
from headstart.engine.client_states import ClientStates
from headstart.engine.model_store import ModelStore
from headstart.methods.fedavg import FedAvgStage
from headstart.runner import run

# Learning rates were chosen on seed 99, which is not among those reported.
SEEDS = (0, 1, 2)
NINETY = {"dataset": "cifar10", "train_examples": 90, "test_examples": 2000}
FAST = {"precision": "bfloat16"}
NINETY_CLIENTS = {"kind": "dirichlet", "clients": 5, "alpha": 0.1}


def recipe(data: dict[str, Any], stages: list[dict[str, Any]], seed: int, size: int = 224) -> Recipe:
    os.environ.setdefault("HEADSTART_DATA", str(SHARED / "data"))
    weights = str(SHARED / "weights" / "squeezenet1_1-caffe.safetensors")
    model = {"backbone": "squeezenet1_1", "weights": weights, "preprocess": "caffe", "image_size": size}
    return Recipe.parse({"seed": seed, "data": data, "model": model, "stages": stages})


def curve(data: dict[str, Any], stages: list[dict[str, Any]], seed: int, size: int = 224) -> list[dict[str, Any]]:
    """Every evaluation of a run."""
    lines: list[dict[str, Any]] = []
    run(recipe(data, stages, seed, size), on_metrics=lines.append)
    return lines


def ninety() -> None:
    """The FedNCM paper's appendix D: 9 images of each class, 5 clients."""
    data = NINETY | {"partition": NINETY_CLIENTS}
    tune = {"method": "fedavg", "train": "all", "rounds": 100, "lr": 0.003, "evaluate_every": 100} | FAST
    probe = {"method": "fedavg", "train": "head", "rounds": 200, "lr": 0.01, "evaluate_every": 200}
    ncm = {"method": "fedncm"}
    published = {"LP": 53.8, "FT": 45.2, "FedNCM": 55.6, "FedNCM + FT": 56.7}
    settings: dict[str, list[dict[str, Any]]] = {
        "LP": [probe],
        "FT": [tune],
        "FedNCM": [ncm],
        "FedNCM + FT": [ncm, tune],
    }
    rows = []
    for name, stages in settings.items():
        found = [100 * curve(data, stages, seed)[-1]["accuracy"] for seed in SEEDS]
        spread = f"{statistics.mean(found):.1f} ± {statistics.pstdev(found):.1f}"
        rows.append((name, f"{published[name]:.1f}", spread, ", ".join(f"{value:.1f}" for value in found)))
    show(
        "90 images of CIFAR-10, 5 clients, α 0.1; last round, on 2,000 test images",
        ("", "published", "measured", "seeds 0, 1, 2"),
        rows,
    )


def flowers(rounds: int = 80) -> None:
    """1,020 images at 128 pixels, 100 clients, everybody in every round, as in the papers."""
    data = {"dataset": "flowers102", "partition": {"kind": "dirichlet", "clients": 100, "alpha": 0.1}}
    tune = {"method": "fedavg", "train": "all", "rounds": rounds, "lr": 0.003, "evaluate_every": rounds // 5} | FAST
    rows = []
    for name, start in (("FT", []), ("FedNCM + FT", [{"method": "fedncm"}]), ("FedCOF + FT", [{"method": "fedcof"}])):
        lines = curve(data, [*start, tune], 0, 128)
        by_round = {line["round"] if line["method"] == "fedavg" else 0: line for line in lines}
        shown = list(range(0, rounds + 1, rounds // 5))
        cells = [f"{100 * by_round[r]['accuracy']:.1f}" if r in by_round else "" for r in shown]
        rows.append((name, *cells, f"{lines[-1]['seconds'] / 60:.0f}"))
    columns = ("", *("closed form" if r == 0 else f"round {r}" for r in shown), "minutes")
    show("Flowers-102 at 128 px, test split of 6,149", columns, rows)


def throughput() -> None:
    """Samples per second of our rounds and of a plain loop over the same clients, batches and model."""
    torch.set_num_threads(THREADS)
    rows = []
    for size in (224, 128):
        data = {"dataset": "cifar10", "train_examples": 256, "partition": {"kind": "iid", "clients": 8}}
        stage = {"method": "fedavg", "train": "all", "rounds": 1, "lr": 1e-4, "batch_size": 16, "augment": "none"}
        sides = _sides(recipe(data, [stage], 0, size))
        seconds = alternate(sides, 5)
        ours, plain = (256 / seconds[side] for side in ("ours", "plain"))
        rows.append((f"SqueezeNet 1.1, {size} px", f"{plain:.1f}", f"{ours:.1f}", f"{ours / plain:.2f}"))
    title = (
        f"Full fine-tuning, samples per second: 8 clients of 32 images, batches of 16, {THREADS} threads, median of 5"
    )
    show(title, ("", "plain PyTorch loop", "headstart", "ratio"), rows)


def _sides(recipe: Recipe) -> dict[str, Callable[[], object]]:
    stage, federation = recipe.stages[0], Federation.of(recipe)
    assert isinstance(stage, FedAvgStage)
    store, labels = ModelStore(recipe.model, federation.dataset), torch.from_numpy(federation.dataset.train.labels)
    assert store.backbone is not None
    bench = Bench(stage, context_of(stage, 10, store.dim, (0, 0), 8, 256, backbone=store.backbone))
    states, inputs = ClientStates(Path(), 8, {}), store.inputs()

    def ours() -> None:
        play(bench, federation, inputs, Ledger.open(8), states)

    # The peer: images in memory, one model, its state loaded for each client and averaged by hand.
    images = torch.cat([images for (images,) in inputs.batches(np.split(np.arange(256), 8))])
    model = torch.nn.Sequential(copy.deepcopy(store.backbone.body), torch.nn.Linear(store.dim, 10))
    model.requires_grad_(True).train()
    start = {name: value.clone() for name, value in model.state_dict().items()}
    rows_of = [torch.from_numpy(federation.rows_of(np.array([client]))[0]) for client in range(8)]

    def plain() -> None:
        mean = {name: torch.zeros_like(value) for name, value in start.items()}
        for mine in rows_of:
            model.load_state_dict(start)
            sgd = torch.optim.SGD(model.parameters(), lr=1e-4)
            for batch in torch.split(mine[torch.randperm(len(mine))], 16):
                sgd.zero_grad()
                torch.autograd.backward(torch.nn.functional.cross_entropy(model(images[batch]), labels[batch]))
                sgd.step()
            for name, value in model.state_dict().items():
                mean[name] += value * (len(mine) / 256)

    return {"ours": ours, "plain": plain}


def memory() -> None:
    """Peak memory of fine-tuning rounds of 10, 100 and 1,000 clients, all of them in every round."""
    rows = []
    for method in ("fedavg", "scaffold"):
        found = [in_fresh_process(__name__, method, clients) for clients in (10, 100, 1000)]
        rows.append((method, *(f"{each['peak'] / 2**20:.0f} MiB" for each in found)))
    columns = ("", "10 clients", "100 clients", "1,000 clients")
    show("Peak memory: 1,000 images of CIFAR-10 at 64 px, all of SqueezeNet 1.1 trained, two rounds", columns, rows)


def _peak(method: str, clients: int) -> dict[str, int]:
    partition = {"kind": "iid", "clients": clients}
    data = {"dataset": "cifar10", "train_examples": 1000, "test_examples": 100, "partition": partition}
    run(recipe(data, [{"method": method, "train": "all", "rounds": 2, "lr": 1e-4, "evaluate_every": 2}], 0, 64))
    return {"peak": peak_memory()}


def main() -> None:
    if not SHARED.is_dir():
        print("\nfinetuning: set HEADSTART_SHARED to a folder with data/ and weights/; skipped")
        return
    throughput()
    memory()
    ninety()
    flowers()


if __name__ == "__main__":
    print(json.dumps(_peak(sys.argv[1], int(sys.argv[2]))))
