"""The FedBABU protocol on CIFAR-10: initial and personalised accuracy of every method, and what personalising costs."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from tests.helpers import Bench, context_of, play

from benchmarks.common import SHARED, THREADS, alternate, in_fresh_process, show
from headstart.config.recipe import Recipe
from headstart.core.ledger import Ledger
from headstart.data import Federation
from headstart.engine.client_states import ClientStates
from headstart.engine.model_store import ModelStore
from headstart.methods.fedavg import FedAvgStage
from headstart.methods.personalise import PersonaliseStage
from headstart.runner import run
from headstart.solvers.heads import batches

CLIENTS = 100
SHARDS = (2, 5, 10)
METHODS = ("fedavg", "fedbabu", "fedprox+babu", "fedper", "fedrep", "lg-fedavg", "per-fedavg", "ditto", "local-only")
TUNING = {"method": "personalise", "epochs": 5, "lr": 1e-3, "momentum": 0.9, "batch_size": 50}
COMPUTED = ("fedncm", "fed3r", "fedcof")
NETS: dict[str, dict[str, Any]] = {
    # Fewer images and rounds than the paper's: what two cores can do. With more shards, fewer still.
    "conv4": {
        "data": {"dataset": "cifar10", "train_examples": 20_000, "test_examples": 5_000},
        "model": {"backbone": "conv4", "weights": "random"},
        "local": {"lr": 0.1, "rounds": 60, "precision": "bfloat16"},
        "below": {"train": "body"},
        "both": {"train": "all"},
        "tuned": {"update": "all", "precision": "bfloat16"},
    },
    # Hidden layers of an MLP are what is below the head.
    "features": {
        "data": {"dataset": "cifar10"},
        "model": {
            "backbone": "squeezenet1_1",
            "weights": str(SHARED / "weights" / "squeezenet1_1-caffe.safetensors"),
            "preprocess": "caffe",
        },
        "local": {"lr": 0.01, "rounds": 80},
        "below": {"train": "head", "head": "mlp"},
        "both": {"train": "head", "head": "mlp"},
        "tuned": {"update": "head"},
    },
}


def stages_of(method: str, net: str) -> list[dict[str, Any]]:
    """A method's own stages, then five epochs of fine-tuning, then computed heads in their place."""
    made = NETS[net]
    local = {"participation": 0.1, "momentum": 0.9, "schedule": "step", "batch_size": 50, **made["local"]}
    local["evaluate_every"] = local["rounds"]
    both, rounds = {**local, **made["both"]}, local["rounds"]
    own: dict[str, list[dict[str, Any]]] = {
        "fedavg": [{"method": "fedavg", **both}],
        "fedbabu": [{"method": "fedbabu", **local, **made["below"]}],
        "fedprox+babu": [{"method": "fedbabu", "mu": 0.01, **local, **made["below"]}],
        "fedper": [{"method": "fedper", **both}],
        "fedrep": [{"method": "fedrep", "head_epochs": 1, **both}],
        # As in its paper it starts from FedAvg, and goes on for a quarter of the rounds at the last rate.
        "lg-fedavg": [
            {"method": "fedavg", **both},
            {"method": "lg-fedavg", **both, "rounds": rounds // 4, "evaluate_every": rounds // 4,
             "lr": made["local"]["lr"] / 100, "schedule": "constant"},
        ],
        "per-fedavg": [{"method": "per-fedavg", "inner_lr": made["local"]["lr"] / 10, **both}],
        "ditto": [{"method": "ditto", "lambda_ditto": 0.75, **both}],
        # A client of the others takes part in a tenth of the rounds; alone it can use twice that.
        "local-only": [
            {"method": "local-only", **both, "participation": 1.0, "rounds": rounds // 5, "evaluate_every": rounds // 5}
        ],
    }  # fmt: skip
    stages = own[method]
    last = len(stages) - 1
    stages = [*stages, {**TUNING, **made["tuned"], "without_head": True}]
    if method in ("fedavg", "fedbabu"):
        stages += [{"method": "personalise", "compute": kind, "update": "head", "start": last} for kind in COMPUTED]
    return stages


def one(method: str, net: str, shards: str, lr: str = "") -> None:
    """One run in a process of its own; prints every evaluation of its personalising stages."""
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", THREADS)))
    os.environ.setdefault("HEADSTART_DATA", str(SHARED / "data"))
    made = NETS[net]
    partition = {"kind": "shards", "clients": CLIENTS, "shards_per_client": int(shards), "test": "follow"}
    stages, data = stages_of(method, net), made["data"]
    if net == "conv4" and int(shards) > 2:
        images = {5: 10_000, 10: 5_000}[int(shards)]
        data = {**data, "train_examples": images, "test_examples": images // 4}
    if lr:
        stages[0]["lr"] = float(lr)
    lines: list[dict[str, Any]] = []
    run(
        Recipe.parse({"data": {**data, "partition": partition}, "model": made["model"], "stages": stages}),
        on_metrics=lines.append,
    )
    print(json.dumps({"method": method, "net": net, "shards": int(shards), "lr": lr, "lines": lines}))


def figures(found: dict[str, Any]) -> list[str]:
    """Cells of a row: at first, after one and five epochs, without the head; and computed heads where there are."""
    lines = [line for line in found["lines"] if line["method"] == "personalise"]
    first = min(line["stage"] for line in lines)
    tuned = {line["round"]: line for line in lines if line["stage"] == first}
    cells = [cell(tuned[epoch], "personalised_accuracy") for epoch in (0, 1, 5)]
    cells.append(cell(tuned[0], "initial_headless_accuracy"))
    computed = [line for line in lines if line["stage"] > first and line["round"] == 1]
    return cells + [cell(line, "personalised_accuracy") for line in computed] + [""] * (3 - len(computed))


def cell(line: dict[str, Any], name: str) -> str:
    """Mean ± standard deviation over clients, in per cent."""
    return f"{100 * line[f'{name}_mean']:.1f} ± {100 * line[f'{name}_std']:.1f}"


def show_all(found: list[dict[str, Any]]) -> None:
    """A table for each network and number of shards."""
    for net, shards in sorted({(each["net"], each["shards"]) for each in found}):
        rows = [(e["method"], *figures(e)) for e in found if (e["net"], e["shards"]) == (net, shards)]
        show(
            f"CIFAR-10, {net}, {CLIENTS} clients, {shards} shards each: accuracy on clients' own test examples",
            ("method", "at first", "1 epoch", "5 epochs", "without head", "NCM head", "ridge head", "COF head"),
            rows,
        )


def cost(*chosen: str) -> None:
    """Five epochs of fine-tuning for all 100 clients beside the same steps in a plain loop; of the networks chosen."""
    threads = int(os.environ.get("OMP_NUM_THREADS", THREADS))
    torch.set_num_threads(threads)
    rows = []
    for net in chosen or NETS:
        found = alternate(sides(net), 5)
        kept, safe, plain = found.values()
        rows.append((net, f"{plain:.2f}", f"{kept:.2f}", f"{kept / plain:.2f}", f"{safe:.2f}", f"{safe / plain:.2f}"))
    show(
        f"Personalising {CLIENTS} clients of 50 images, five epochs, {threads} threads, median of 5",
        ("network", "a plain loop, s", "headstart, s", "ratio", "waiting for the disk after each epoch, s", "ratio"),
        rows,
    )


def sides(net: str) -> dict[str, Callable[[], None]]:
    """The stage as in a run without a directory and with one, and its steps in a loop that forgets every client."""
    os.environ.setdefault("HEADSTART_DATA", str(SHARED / "data"))
    made, changes = NETS[net], net == "conv4"
    data = {**made["data"], "train_examples": 5_000, "test_examples": 1_000}
    partition = {"kind": "shards", "clients": CLIENTS, "shards_per_client": 2, "test": "follow"}
    stages = [{"method": "fedavg", **made["both"]}, {**TUNING, **made["tuned"], "precision": "float32"}]
    recipe = Recipe.parse({"data": {**data, "partition": partition}, "model": made["model"], "stages": stages})
    first, stage = recipe.stages
    assert isinstance(first, FedAvgStage)
    assert isinstance(stage, PersonaliseStage)
    federation = Federation.of(recipe)
    store = ModelStore(recipe.model, federation.dataset)
    random = Bench(first, context_of(first, 10, store.dim, backbone=store.backbone))
    head = random.head(random.init())
    bench = Bench(stage, context_of(stage, 10, store.dim, (0, 1), CLIENTS, 5_000, head, backbone=store.backbone))
    source: Any = store.inputs() if changes else store.features("train")

    def tune(durable: bool) -> None:
        with TemporaryDirectory() as folder:
            states = ClientStates(Path(folder) / "clients", CLIENTS, bench.method.client_state, durable=durable)
            play(bench, federation, source, Ledger.open(CLIENTS), states)

    plans = []
    for client in range(CLIENTS):
        mine, owners = federation.rows_of(np.array([client]))
        labels = federation.dataset.train.labels[mine]
        given: Any = SimpleNamespace(clients=np.array([client]), owners=owners)
        rows = [row[row >= 0] for epoch in range(5) for row in batches(given, stage, epoch, (0, 1))[0]]
        plans.append([(mine[each], torch.from_numpy(labels[each])) for each in rows])

    def plain() -> None:
        for plan in plans:
            widths = [store.dim, 10] if changes else [store.dim, 256, 256, 10]
            layers: list[torch.nn.Module] = [store.backbone.body] if changes and store.backbone else []
            for wide, narrow in pairwise(widths):
                layers += [torch.nn.Linear(wide, narrow), torch.nn.ReLU()]
            network = torch.nn.Sequential(*layers[:-1]).train().requires_grad_(True)
            optimiser = torch.optim.SGD(network.parameters(), lr=1e-9, momentum=0.9)
            inputs_of = (
                source.batches(r for r, _ in plan) if changes else ((torch.from_numpy(source[r]),) for r, _ in plan)
            )
            for inputs, (_, labels) in zip(inputs_of, plan, strict=True):
                optimiser.zero_grad()
                torch.autograd.backward(torch.nn.functional.cross_entropy(network(*inputs), labels))
                optimiser.step()

    return {"kept": partial(tune, False), "safe": partial(tune, True), "plain": plain}


def main() -> None:
    """Everything; the convolutional net takes an hour or two on two cores."""
    cost()
    show_all(
        [
            in_fresh_process("benchmarks.personal", "one", method, net, shards)
            for net in NETS
            for shards in SHARDS
            for method in METHODS
        ]
    )


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
