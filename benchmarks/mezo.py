"""FedMeZO on all-MiniLM-L6-v2: its memory beside inference and backpropagation, its seconds beside two forward passes,
and its accuracy beside other ways to tune a sentence encoder."""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

import numpy as np
import torch

from benchmarks.common import SHARED, THREADS, alternate, in_fresh_process, show
from headstart.data import Federation
from headstart.engine import Body, ClientStore, play
from headstart.ledger import Ledger, peak_memory
from headstart.methods import Setting, build
from headstart.methods.zeroth import BATCHES
from headstart.recipe import FedMeZOStage, Recipe
from headstart.runner import run

EXAMPLES = 256
TASKS = ("sst2", "sst5", "trec", "ag_news")


def recipe(task: str, stages: list[dict[str, Any]], clients: int = 10, alpha: float = 100.0, **data: Any) -> Recipe:
    os.environ.setdefault("HEADSTART_DATA", str(SHARED / "data"))
    partition = {"kind": "dirichlet", "clients": clients, "alpha": alpha, "leftovers": "assign"}
    table = {"dataset": task, "partition": partition, "train_examples": EXAMPLES, "test_examples": 1000, **data}
    model = {"backbone": "all-MiniLM-L6-v2", "max_tokens": 64}
    return Recipe.parse({"data": table, "model": model, "stages": stages})


def prepared(clients: int) -> tuple[FedMeZOStage, Federation, Body]:
    found = recipe("sst2", [{"method": "fedmezo", "train": "all", "rounds": 1, "lr": 1e-6}], clients)
    stage, federation = found.stages[0], Federation.of(found)
    assert isinstance(stage, FedMeZOStage)
    return stage, federation, Body(found.model, federation.dataset)


def batches(body: Body, federation: Federation) -> list[tuple[torch.Tensor, ...]]:
    """The batches of a FedMeZO round, in its order."""
    inputs = body.inputs()
    order = inputs.by_length(np.arange(len(federation.owners)))
    size = BATCHES["text"]
    return list(inputs.batches(np.split(order, range(size, len(order), size))))


def seconds() -> None:
    """A round over the same 256 sentences, whoever holds them, beside the two forward passes it cannot do without."""
    torch.set_num_threads(THREADS)
    rows = []
    for clients in (1, 10, 100):
        stage, federation, body = prepared(clients)
        assert body.backbone is not None
        network, given, inputs = body.backbone.body, batches(body, federation), body.inputs()
        setting = Setting(2, body.dim, (0, 0), clients, EXAMPLES, None, body.backbone)
        method = build(stage, setting)
        state = [method.open()]

        def round_(made: Any = (method, stage, federation, inputs), state: Any = state) -> None:
            ledger, store = Ledger.open(made[2].n_clients), ClientStore(SHARED, made[2].n_clients, {}, None)
            method, stage, federation, inputs = made
            state[0] = play(method, stage, federation, inputs, (0, 0), ledger, store, lambda *_: None, state[0])

        @torch.inference_mode()
        def limit(network: Any = network, given: Any = given) -> None:
            for _ in range(2):
                for batch in given:
                    network(*batch)

        found = alternate({"round": round_, "limit": limit}, 5)
        ratio = found["round"] / found["limit"]
        rows.append((f"{clients:,}", f"{found['limit']:.2f}", f"{found['round']:.2f}", f"{ratio:.2f}"))
    show(
        f"FedMeZO, all parameters, {EXAMPLES} sentences of SST-2, {THREADS} threads, median of 5",
        ("clients", "two forward passes, s", "round, s", "ratio"),
        rows,
    )


def memory() -> None:
    """Peak memory of fresh processes that do one thing with the same batches."""
    whats = ("inference", "fedmezo", "backpropagation")
    peaks = {what: in_fresh_process(__name__, what)["peak"] / 2**20 for what in whats}
    largest = 30_522 * 384 * 4 / 2**20
    bound = 1.1 * peaks["inference"] + largest
    rows = [(what, f"{peak:.0f} MiB", f"{peak / peaks['inference']:.2f}") for what, peak in peaks.items()]
    show("Peak memory over 256 sentences in one batch", ("", "peak", "of inference"), rows)
    print(f"\nThe largest layer, the embeddings, is {largest:.0f} MiB; 1.1 × inference + that is {bound:.0f} MiB.")


def _peak(what: str) -> dict[str, int]:
    stage, federation, body = prepared(10)
    assert body.backbone is not None
    network = body.backbone.body
    if what == "fedmezo":
        method = build(stage, Setting(2, body.dim, (0, 0), 10, EXAMPLES, None, body.backbone))
        ledger, store = Ledger.open(10), ClientStore(SHARED, 10, {}, None)
        state = play(method, stage, federation, body.inputs(), (0, 0), ledger, store, lambda *_: None)
        method.place(state)
        return {"peak": peak_memory()}
    for batch in batches(body, federation):
        if what == "inference":
            with torch.inference_mode():
                network(*batch)
        else:
            network.requires_grad_(True).train()
            torch.autograd.backward(network(*batch).square().mean())
    return {"peak": peak_memory()}


def accuracy(rounds: int = 200) -> None:
    """Ten clients; 256 examples to tune on and 1,000 to test; FedMeZO does not know who holds what."""
    zeroth = {"method": "fedmezo", "rounds": rounds, "evaluate_every": rounds}
    first = {"rounds": 40, "evaluate_every": 40, "batch_size": 16}
    cof = {"method": "fedcof"}
    probe = {"method": "fedavg", "train": "head", "lr": 0.5, **first}
    ways: dict[str, list[dict[str, Any]]] = {
        "FedCOF": [cof],
        "LP, 40 rounds": [probe],
        "FedMeZO, head": [zeroth | {"train": "head", "rounds": 2000, "evaluate_every": 2000, "lr": 0.05}],
        "FedCOF → FedMeZO, head": [cof, zeroth | {"train": "head", "rounds": 2000, "evaluate_every": 2000, "lr": 0.05}],
        "FedMeZO, LoRA": [zeroth | {"train": "lora", "lr": 1e-3}],
        "FedCOF → FedMeZO, LoRA": [cof, zeroth | {"train": "lora", "lr": 1e-3}],
        "SLoRA, 20 rounds": [{"method": "slora", "lr": 0.1, **first, "rounds": 20, "evaluate_every": 20}],
    }
    for task in TASKS:
        rows = []
        for name, stages in ways.items():
            cells = []
            for alpha in (100.0, 0.1):
                start = time.perf_counter()
                last = run(recipe(task, stages, alpha=alpha)).summary
                cells += [f"{100 * last['accuracy']:.1f}", f"{(last['bytes_up'] + last['bytes_down']) / 1e6:.2f}"]
                cells.append(f"{time.perf_counter() - start:.0f}")
            rows.append((name, *cells))
        show(
            f"{task}, 256 examples, 10 clients",
            ("", "α 100, %", "MB", "s", "α 0.1, %", "MB", "s"),
            rows,
        )


def main() -> None:
    if not SHARED.is_dir():
        print("\nmezo: set HEADSTART_SHARED to a folder with data/; skipped")
        return
    seconds()
    memory()
    accuracy()


if __name__ == "__main__":
    print(json.dumps(_peak(sys.argv[1])))
