"""Modules on a frozen all-MiniLM-L6-v2: several tasks at once, few examples, and the speed of a round."""

from __future__ import annotations

import json
import os
import sys
from statistics import mean, stdev
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from tests.helpers import Bench, context_of, play
from torch.nn import functional

from benchmarks.common import SHARED, THREADS, alternate, in_fresh_process, show
from headstart.backbones import Inputs
from headstart.config.recipe import Recipe
from headstart.core.ledger import Ledger
from headstart.data import Federation
from headstart.engine.client_states import ClientStates
from headstart.engine.model_store import ModelStore
from headstart.methods import Population, Task
from headstart.methods.fedyolo import FedYoloStage
from headstart.runner import run
from headstart.solvers.heads import batches

SEEDS = (0, 1, 2)
TASKS = ("ag_news", "sst2", "trec", "sst5")
# Of 4, 2, 5 and 5 classes. TREC's smallest class has too few questions for 20 clients of 100 and is left out.
CLASSES_PER_CLIENT = {"ag_news": 2, "sst2": 1, "trec": 2, "sst5": 2}
CLASSES: dict[str, list[int]] = {"trec": [0, 1, 3, 4, 5]}
ROUNDS = 10
COMMON = {"batch_size": 32, "momentum": 0.9, "schedule": "cosine", "precision": "bfloat16", "weighting": "uniform"}
FEDERATED = {**COMMON, "rounds": ROUNDS, "evaluate_every": ROUNDS, "sampling": "tasks"}
# LoRA's was chosen among 0.03, 0.1 and 0.3, everything's among 0.01, 0.03 and 0.1, on seed 99, which is not shown.
LR = {"all": 0.03, "lora": 0.1, "adapter": 0.1, "vpt": 0.1, "head": 0.3}


def task(name: str, iid: bool = False) -> dict[str, Any]:
    partition: dict[str, Any] = {"kind": "classes", "clients": 20, "classes_per_client": CLASSES_PER_CLIENT[name]}
    partition |= {"examples_per_client": 100, "test": "follow"}
    found: dict[str, Any] = {"name": name, "dataset": name, "partition": partition, "test_examples": 400}
    if name in CLASSES:
        found["classes"] = CLASSES[name]
    if iid:
        found |= {"partition": {"kind": "iid", "clients": 20, "test": "follow"}, "train_examples": 2000}
    return found


def recipe(names: tuple[str, ...], stages: list[dict[str, Any]], seed: int, iid: bool = False) -> Recipe:
    os.environ.setdefault("HEADSTART_DATA", str(SHARED / "data"))
    model = {"backbone": "all-MiniLM-L6-v2", "max_tokens": 32}
    tasks = [task(name, iid) for name in names]
    if len(tasks) > 1:
        return Recipe.parse({"seed": seed, "tasks": tasks, "model": model, "stages": stages})
    data = {key: value for key, value in tasks[0].items() if key != "name"}
    return Recipe.parse({"seed": seed, "data": data, "model": model, "stages": stages})


def stages_of(kind: str, tasks: int) -> list[dict[str, Any]]:
    """The stages of a way to learn several tasks; five clients of each task take part in a round."""
    sampled = {"clients_per_round": 5 * tasks}
    personalise = {
        "method": "personalise",
        "epochs": 2,
        "precision": "bfloat16",
        "batch_size": 32,
        "lr": LR["lora"] / 10,
    }
    return {
        "fedyolo": [{"method": "fedyolo", "train": "lora", "lr": LR["lora"], **FEDERATED, **sampled}],
        "fedyolo+local": [
            {"method": "fedyolo", "train": "lora", "lr": LR["lora"], **FEDERATED, **sampled},
            {**personalise, "update": "lora", "evaluate_every": 2, "forgetting": True},
        ],
        "fedavg+local": [
            {"method": "fedavg", "train": "all", "lr": LR["all"], **FEDERATED, **sampled},
            {**personalise, "update": "all", "lr": LR["all"] / 10, "evaluate_every": 2, "forgetting": True},
        ],
        "feddyn": [
            {"method": "feddyn", "alpha_dyn": 0.1, "train": "all", "lr": LR["all"], **FEDERATED, **sampled}
        ],
        "fedavg": [{"method": "fedavg", "train": "all", "lr": LR["all"], **FEDERATED, **sampled}],
        "fedprox": [{"method": "fedprox", "mu": 0.1, "train": "all", "lr": LR["all"], **FEDERATED, **sampled}],
        "head": [{"method": "fedavg", "train": "head", "lr": LR["head"], **FEDERATED, **sampled}],
        "local": [
            {"method": "local-only", "train": "lora", "lr": LR["lora"], **COMMON, "rounds": 3, "evaluate_every": 3},
            {"method": "personalise", "update": "lora", "epochs": 0, "forgetting": True},  # on the whole test split
        ],
    }[kind]  # fmt: skip


def one(kind: str, names: str, seed: str, iid: str = "", lr: str = "") -> None:
    """One run in a process of its own; prints what it found."""
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", THREADS)))
    chosen = tuple(names.split(","))
    stages = stages_of(kind, len(chosen))
    if lr:
        stages = [stage | {"lr": float(lr)} if number == 0 else stage for number, stage in enumerate(stages)]
    result = run(recipe(chosen, stages, int(seed), bool(iid)))
    first, last = result.summary["stages"][0], result.summary["stages"][-1]
    found = {"kind": kind, "names": names, "seed": int(seed), "iid": iid, "lr": lr, **last}
    found["bytes"] = first["bytes_up"] / first["rounds"]
    print(json.dumps(found))


SHOTS = (1, 2, 4, 8, 16)
KINDS = ("lora", "adapter", "vpt", "head", "all")
FEW_ROUNDS = 40


def few_shot(train: str, seed: str, lr: str = "", shots: str = ",".join(map(str, SHOTS))) -> None:
    """AG News with so many examples per class, on two to four clients that all take part; prints the accuracies."""
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", THREADS)))
    os.environ.setdefault("HEADSTART_DATA", str(SHARED / "data"))
    rate = float(lr or LR[train])
    tuning = {"method": "fedavg", "train": train, "lr": rate, **COMMON, "batch_size": 16, "head_init": "random"}
    accuracy, start = {}, {}
    for count in map(int, shots.split(",")):
        partition = {"kind": "iid", "clients": min(4, 2 * count)}
        data = {"dataset": "ag_news", "train_examples": 4 * count, "test_examples": 400, "partition": partition}
        model = {"backbone": "all-MiniLM-L6-v2", "max_tokens": 32}
        stages = [{"method": "fedncm"}, {**tuning, "rounds": FEW_ROUNDS, "evaluate_every": FEW_ROUNDS}]
        found = run(Recipe.parse({"seed": int(seed), "data": data, "model": model, "stages": stages})).summary
        start[count], accuracy[count] = (stage["accuracy"] for stage in found["stages"])
    print(json.dumps({"train": train, "seed": int(seed), "lr": rate, "start": start, "accuracy": accuracy}))


def speed() -> None:
    """Rounds with modules beside the same steps in plain `peft` and PyTorch, on the same batches."""
    torch.set_num_threads(THREADS)
    show(
        f"Rounds per second: LoRA, 4 clients of 100 texts, batches of 32, {THREADS} threads, median of 3",
        ("LoRA in", "headstart", "plain peft and PyTorch", "ratio"),
        [speed_of(None), speed_of(2)],
    )


def speed_of(blocks: int | None) -> tuple[str, ...]:
    """A row: where the LoRA is, rounds per second here and in the loop, and their ratio."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModel

    table = {"method": "fedyolo", "train": "lora", "rounds": 1, "lr": 0.01, "clients_per_round": 4}
    made = recipe(("ag_news", "trec"), [table | ({"blocks": blocks} if blocks else {})], 0)
    stage, federation = made.stages[0], Federation.of(made)
    assert isinstance(stage, FedYoloStage)
    store = ModelStore(made.model, federation.dataset)
    store.attach(stage, stage.plan, (0, 0))
    assert store.backbone is not None
    tasks = tuple(Task(name, count, Population(20, 2000)) for name, count in (("ag_news", 4), ("trec", 5)))
    bench = Bench(stage, context_of(stage, 9, store.dim, tasks=tasks, model=store.model))
    state, inputs, asked = bench.init(), store.inputs(), Ledger.open(40)

    def round_() -> None:
        asked.last_round[:] = -1
        play(bench, federation, inputs, asked, ClientStates(SHARED, 40, {}), state=state)

    round_()
    given, texts = [], Inputs(store.backbone, federation.dataset.train, "texts")
    for client in np.flatnonzero(asked.last_round == 0):
        rows, owners = federation.rows_of(np.array([client]))
        task = int(federation.tasks_of(np.array([client]))[0])
        labels = federation.dataset.train.labels[rows] - federation.class_starts[task]
        cohort: Any = SimpleNamespace(clients=np.array([client]), owners=owners)
        members = [row[row >= 0] for row in batches(cohort, stage, 0, (0, 0))[0]]
        read = texts.batches(rows[each] for each in members)
        given.append([(batch, torch.from_numpy(labels[each])) for batch, each in zip(read, members, strict=True)])
    where = [4, 5] if blocks else None
    config = LoraConfig(r=8, lora_alpha=16, target_modules=["query", "value"], layers_to_transform=where)
    core: Any = store.backbone.core
    plain: Any = get_peft_model(AutoModel.from_pretrained(core.name_or_path), config)
    plain.train()

    def loop() -> None:
        for client in given:
            head = torch.nn.Linear(384, 5)
            trained = [p for p in plain.parameters() if p.requires_grad] + list(head.parameters())
            optimiser = torch.optim.SGD(trained, lr=0.01, momentum=0.9)
            for (ids, mask, kinds), labels in client:
                states = plain(input_ids=ids, attention_mask=mask, token_type_ids=kinds).last_hidden_state
                weight = mask.unsqueeze(2).float()
                loss = functional.cross_entropy(head((states * weight).sum(1) / weight.sum(1)), labels)
                optimiser.zero_grad()
                torch.autograd.backward(loss)
                optimiser.step()

    found = alternate({"headstart": round_, "plain": loop}, 3)
    what = "all six blocks" if blocks is None else f"the last {blocks} blocks"
    ratio = found["plain"] / found["headstart"]
    return what, f"{1 / found['headstart']:.3f}", f"{1 / found['plain']:.3f}", f"{ratio:.2f}"


def main() -> None:
    """Everything; the runs take hours on two cores."""
    speed()
    found = {}
    for seed in SEEDS:
        for kind in ("fedyolo", "fedavg", "local", "head"):
            for count in range(1, 5) if kind == "fedavg" else (4,):
                names = ",".join(TASKS[:count])
                found[kind, count, seed] = in_fresh_process("benchmarks.modules", "one", kind, names, seed)
    show_tasks(found)
    show_few_shot(
        [in_fresh_process("benchmarks.modules", "few_shot", train, seed) for seed in SEEDS for train in KINDS]
    )


def spread(values: list[float]) -> str:
    """Mean ± standard deviation in per cent."""
    return f"{100 * mean(values):.1f} ± {100 * stdev(values):.1f}" if len(values) > 1 else f"{100 * values[0]:.1f}"


def show_tasks(found: dict[tuple[str, int, int], dict[str, Any]]) -> None:
    """Accuracy of each task as tasks are added; with modules a task does not notice the others."""
    rows = []
    for kind, count in sorted({key[:2] for key in found}, key=lambda key: (key[0] != "fedavg", *key)):
        runs = [value for (k, c, _), value in found.items() if (k, c) == (kind, count)]
        cells = [
            spread([(r["tasks"][name] if count > 1 else r)["local_accuracy_mean"] for r in runs])
            if place < count else "" for place, name in enumerate(TASKS)
        ]  # fmt: skip
        whole = spread([each.get("initial_whole_accuracy", each["accuracy"]) for each in runs])
        rows.append((kind, count, *cells, whole, f"{runs[0]['bytes'] / (5 * count) / 1e6:.3f}"))
    show(
        f"Tasks on one body: local accuracy after {ROUNDS} rounds, {len({key[2] for key in found})} seeds",
        ("method", "tasks", *TASKS, "whole test split", "MB up per client and round"),
        rows,
    )


def show_few_shot(found: list[dict[str, Any]]) -> None:
    """Accuracy by examples per class."""

    def cells(what: str, runs: list[dict[str, Any]]) -> list[str]:
        return [spread([each[what][str(count)] for each in runs]) for count in SHOTS]

    rows = [(train, *cells("accuracy", [each for each in found if each["train"] == train])) for train in KINDS]
    start = ("FedNCM", *cells("start", [each for each in found if each["train"] == KINDS[0]]))
    show(
        f"AG News, examples per class: accuracy after {FEW_ROUNDS} rounds",
        ("trained", *map(str, SHOTS)),
        [start, *rows],
    )


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
