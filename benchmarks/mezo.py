"""FedMeZO on all-MiniLM-L6-v2: its memory beside inference and backpropagation, its seconds beside two forward passes,
and its accuracy beside other ways to tune a sentence encoder."""

from __future__ import annotations

import json
import os
import sys
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
from headstart.methods.fedmezo import FedMeZOStage
from headstart.runner import run
from headstart.solvers.zeroth import BATCH_SIZES, PASS_COST

EXAMPLES = 256
TASKS = ("sst2", "sst5", "trec", "ag_news")


def recipe(task: str, stages: list[dict[str, Any]], clients: int = 10, alpha: float = 100.0, **data: Any) -> Recipe:
    os.environ.setdefault("HEADSTART_DATA", str(SHARED / "data"))
    partition = {"kind": "dirichlet", "clients": clients, "alpha": alpha, "leftovers": "assign"}
    table = {"dataset": task, "partition": partition, "train_examples": EXAMPLES, "test_examples": 1000, **data}
    model = {"backbone": "all-MiniLM-L6-v2", "max_tokens": 64}
    return Recipe.parse({"data": table, "model": model, "stages": stages})


def prepared(clients: int, examples: int) -> tuple[FedMeZOStage, Federation, ModelStore]:
    stages = [{"method": "fedmezo", "train": "all", "rounds": 1, "lr": 1e-6}]
    found = recipe("sst2", stages, clients, train_examples=examples)
    stage, federation = found.stages[0], Federation.of(found)
    assert isinstance(stage, FedMeZOStage)
    return stage, federation, ModelStore(found.model, federation.dataset)


def batches(store: ModelStore, federation: Federation) -> list[tuple[torch.Tensor, ...]]:
    """The batches of a FedMeZO round, in its order."""
    inputs, rows = store.inputs(), np.arange(len(federation.owners))
    return list(inputs.batches(inputs.groups(rows, BATCH_SIZES["text"], PASS_COST)))


def seconds() -> None:
    """A round over the same sentences, whoever holds them, beside the two forward passes it cannot do without."""
    torch.set_num_threads(THREADS)
    rows = []
    for clients in (1, 10, 100, 1000):
        stage, federation, store = prepared(clients, 1000)
        assert store.backbone is not None
        network, given, inputs = store.backbone.body, batches(store, federation), store.inputs()
        bench = Bench(stage, context_of(stage, 2, store.dim, (0, 0), clients, 1000, backbone=store.backbone))
        state = [bench.init()]

        def round_(made: Any = (bench, federation, inputs), state: Any = state) -> None:
            bench, federation, inputs = made
            clients = federation.n_clients
            ledger, states = Ledger.open(clients), ClientStates(SHARED, clients, {})
            state[0] = play(bench, federation, inputs, ledger, states, state=state[0])

        @torch.inference_mode()
        def limit(network: Any = network, given: Any = given) -> None:
            for _ in range(2):
                for batch in given:
                    network(*batch)

        found = alternate({"round": round_, "limit": limit}, 3)
        ratio = found["round"] / found["limit"]
        rows.append((f"{clients:,}", f"{found['limit']:.2f}", f"{found['round']:.2f}", f"{ratio:.2f}"))
    show(
        f"FedMeZO, all parameters, 1,000 sentences of SST-2, {THREADS} threads, median of 3",
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
    stage, federation, store = prepared(10, EXAMPLES)
    assert store.backbone is not None
    network = store.backbone.body
    if what == "fedmezo":
        bench = Bench(stage, context_of(stage, 2, store.dim, (0, 0), 10, EXAMPLES, backbone=store.backbone))
        ledger, states = Ledger.open(10), ClientStates(SHARED, 10, {})
        bench.head(play(bench, federation, store.inputs(), ledger, states))
        return {"peak": peak_memory()}
    for batch in batches(store, federation):
        if what == "inference":
            with torch.inference_mode():
                network(*batch)
        else:
            network.requires_grad_(True).train()
            torch.autograd.backward(network(*batch).square().mean())
    return {"peak": peak_memory()}


def accuracy(tasks: tuple[str, ...] = TASKS) -> None:
    """Ten clients; 128 examples to tune on and 500 to test. Bytes are those of all messages, both ways."""

    def zeroth(train: str, rounds: int, lr: float) -> dict[str, Any]:
        return {"method": "fedmezo", "train": train, "rounds": rounds, "lr": lr, "evaluate_every": rounds}

    cof, head, low_rank = {"method": "fedcof"}, zeroth("head", 2000, 0.03), zeroth("lora", 40, 0.01)
    probe = {"method": "fedavg", "train": "head", "lr": 0.5, "rounds": 40, "evaluate_every": 40}
    naive = {"method": "distmezo", "train": "lora", "lr": 0.01, "local_steps": 5, "rounds": 5, "evaluate_every": 5}
    ways: dict[str, tuple[list[dict[str, Any]], tuple[float, ...]]] = {
        "FedCOF": ([cof], (100.0, 0.1)),
        "LP": ([probe], (100.0, 0.1)),
        "FedMeZO, head": ([head], (100.0, 0.1)),
        "FedCOF → FedMeZO, head": ([cof, head], (100.0, 0.1)),
        "FedMeZO, LoRA": ([low_rank], (100.0, 0.1)),
        "FedCOF → FedMeZO, LoRA": ([cof, low_rank], (0.1,)),
        "DistMeZO, LoRA": ([naive], (0.1,)),
        "SLoRA": ([{"method": "slora", "lr": 0.1, "rounds": 10, "evaluate_every": 10}], (0.1,)),
    }
    for task in tasks:
        rows = []
        for name, (stages, alphas) in ways.items():
            found = {}
            # Who holds what is nothing to FedMeZO; once is enough to see it where a round takes seconds.
            for alpha in alphas if task == TASKS[0] or "LoRA" not in name else (0.1,):
                summary = run(recipe(task, stages, alpha=alpha, train_examples=128, test_examples=500)).summary
                found[alpha] = summary
            last = found[0.1]
            traffic = f"{(last['bytes_up'] + last['bytes_down']) / 1e6:.2f}"
            shown = [f"{100 * found[alpha]['accuracy']:.1f}" if alpha in found else "" for alpha in (100.0, 0.1)]
            rows.append((name, last["stages"][-1]["rounds"], *shown, traffic, f"{last['seconds']:.0f}"))
        show(f"{task}: 128 examples, 10 clients", ("", "rounds", "α 100, %", "α 0.1, %", "MB", "seconds"), rows)


def main() -> None:
    if not SHARED.is_dir():
        print("\nmezo: set HEADSTART_SHARED to a folder with data/; skipped")
        return
    seconds()
    memory()
    accuracy()


if __name__ == "__main__":
    print(json.dumps(_peak(sys.argv[1])))
