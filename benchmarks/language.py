"""SmolLM2-135M that chooses between words: accuracy against rounds and bytes, and what a round takes.

``python -m benchmarks.language sst2`` plays all methods on one data set, ``… sst2 norms,lora 0.1`` two of them at one
α; what comes before the blocks that train is computed once for all. ``… costs`` measures memory, bytes and (``paces``,
alone) seconds; ``… paces 128 2 "all gaussian"`` those of 128 sentences by the clock on two threads; ``… crowds`` the
memory of 10 and of 100 clients; ``… choices`` what it takes to compare candidates. ``… learns FOLDER trec,sst2 0.1`` is
FedMeZO with more tests, rounds and seeds; what is in the folder already is not run again, or goes on.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, ClassVar
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor

from benchmarks.common import SHARED, alternate, in_fresh_process, show
from headstart.backbones import Inputs
from headstart.backbones.language import continuation
from headstart.backbones.prefix import StateFile
from headstart.config.recipe import Recipe
from headstart.core.ledger import peak_memory
from headstart.core.statistics import Ints
from headstart.data import Federation
from headstart.engine.model_store import ModelStore
from headstart.engine.setup import method_of, plan_of
from headstart.methods import Population, Received, Task
from headstart.modules import prefix_of
from headstart.modules.blocks import blocks_of
from headstart.runner import run
from headstart.solvers.cohort import Cohort
from headstart.solvers.directions import AT_ONCE as DRAWN_AT_ONCE
from headstart.solvers.directions import DISTRIBUTIONS

TRAIN, TEST, CLIENTS, TUNED, REPEATS, AT_ONCE = 256, 300, 10, 1, 3, 16
PROMPTS: dict[str, tuple[str, list[str]]] = {
    "sst2": ("Review: {text}\nSentiment:", ["negative", "positive"]),
    "sst5": ("Review: {text}\nSentiment:", ["terrible", "bad", "okay", "good", "great"]),
    "ag_news": ("{text}\nThis article is about", ["politics", "sports", "business", "technology"]),
    "trec": ("{text}\nThe answer is a", ["abbreviation", "entity", "description", "human", "location", "number"]),
    "mnli": ("{text}\nQuestion: {second} Yes, maybe or no?\nAnswer:", ["Yes", "Maybe", "No"]),
}
LORA = {"train": "lora", "blocks": TUNED, "targets": "all-linear"}
# Slopes divided by their root mean square, which makes one rate serve all data.
ZEROTH = {"method": "fedmezo", "epsilon": 1e-2, "beta2": 0.9, "schedule": "cosine"}
TUNING: dict[str, Any] = LORA | {"optimiser": "adamw", "lr": 4e-3, "batch_size": 8, "evaluate_every": 3, "rounds": 6}
STAGES: dict[str, dict[str, Any]] = {
    # The scale of the last norm, 576 numbers: of what was tried on halves of 300 training examples, what held best.
    "norms": ZEROTH
    | {"train": "norms", "blocks": 0, "num_directions": 4, "lr": 0.06, "rounds": 150, "evaluate_every": 50},
    # On the state of the prompt's last token behind that norm.
    "fedcof": {"method": "fedcof"},
    "fedavg": TUNING | {"method": "fedavg"},
    "slora": TUNING | {"method": "slora"},
    # B alone: what descended fastest of a few tries on 128 training examples of TREC.
    "lora": LORA | ZEROTH | {"freeze_a": True, "batch_size": 4, "lr": 0.08, "rounds": 60, "evaluate_every": 30},
}
# All tests that there are, but of AG News, which has 7,600.
TESTS, SEEDS, ROUNDS = {"trec": 500, "sst2": 1821, "sst5": 2210, "ag_news": 2000, "mnli": 1000}, (0, 1, 2), 250
# LoRA last, as it stays on the backbone.
PACES = (("all", "rademacher"), ("all", "gaussian"), ("norms", "gaussian"), ("lora", "gaussian"))
COSTS: dict[str, dict[str, Any]] = {
    "FedMeZO, LoRA": {"method": "fedmezo", "train": "lora"},
    "FedMeZO, norms": {"method": "fedmezo", "train": "norms"},
    "FedMeZO, all": {"method": "fedmezo", "train": "all"},
    "FedAvg, LoRA": {"method": "fedavg", "train": "lora", "local_steps": 1},
}


def partition(alpha: float) -> dict[str, Any]:
    return {"kind": "dirichlet", "clients": CLIENTS, "alpha": alpha, "leftovers": "assign"}


def recipe(
    task: str, stage: dict[str, Any], alpha: float, train: int = TRAIN, test: int = TEST, seed: int = 0
) -> Recipe:
    os.environ.setdefault("HEADSTART_DATA", str(SHARED / "data"))
    prompt, words = PROMPTS[task]
    return Recipe.parse(
        {
            "seed": seed,
            "data": {
                "dataset": task, "train_examples": train, "test_examples": test, "partition": partition(alpha),
            },
            "model": {
                "backbone": "smollm2-135m", "task": "choose", "prompt": prompt, "label_words": words, "max_tokens": 96,
            },
            "stages": [stage],
        }
    )  # fmt: skip


class _Shared(Inputs):
    """Batches whose states, from before what trains, are computed once for all runs of this process."""

    files: ClassVar[dict[tuple[str, int], StateFile]] = {}

    def __init__(self, backbone: Any, examples: Any, what: str, prefix: Any = None, *others: Any) -> None:
        super().__init__(backbone, examples, what, prefix, *others)
        if prefix is not None:
            key, count = examples.fingerprint(), len(blocks_of(backbone.core))
            before, behind = (self.files.setdefault((key, each), StateFile()) for each in (count - TUNED, count))
            self._states = before if len(prefix._blocks) < count else behind
            if self._states is behind:
                self._fill(prefix, before, behind)

    @torch.inference_mode()
    def _fill(self, prefix: Any, before: StateFile, behind: StateFile) -> None:
        """One pass over all examples, several of like length at a time, leaves states behind all blocks and those that
        LoRA in the last ones goes on from."""
        seen: list[Tensor] = []

        def see(block: object, given: tuple[Tensor, ...], named: dict[str, Tensor]) -> None:
            seen.append(given[0] if given else next(iter(named.values())))

        handle = prefix._blocks[-TUNED].register_forward_pre_hook(see, with_kwargs=True)
        rows = np.array([row for row in range(len(self._examples)) if row not in behind], np.int64)
        order = rows[self.by_length(rows)]
        for group in np.split(order, range(AT_ONCE, len(order), AT_ONCE)) if len(order) else []:
            values = list(self._prepare(group.tolist()).values())
            states = prefix.states(self._views[0].transform.collate(values), self._views[0].body)
            for row, value, *both in zip(group.tolist(), values, states, seen.pop(), strict=True):
                for file, each in zip((behind, before), both, strict=True):
                    file.write(row, each[: len(value)].numpy())
        handle.remove()


@torch.inference_mode()
def features(task: str) -> dict[str, dict[str, Any]]:
    """By split, the states [n, 576] of the prompts' last tokens behind the last norm, from those that are at hand."""
    found, splits = recipe(task, STAGES["norms"], 100.0), {}
    dataset = Federation.of(found).dataset
    backbone: Any = ModelStore(found.model, dataset).backbone
    prefix = prefix_of(backbone, len(blocks_of(backbone.core)))
    for split in ("train", "test"):
        examples = getattr(dataset, split)
        batches: Any = _Shared(backbone, examples, f"{dataset.name} {split}", prefix).batches(
            np.arange(len(examples))[:, None]
        )
        states = [backbone.core.model.norm(batch.states[0, -1]).numpy() for batch in batches]
        splits[split] = {"X": np.stack(states), "y": examples.labels}
    return splits


def rows(task: str, stage: str, alpha: float) -> list[list[object]]:
    """Of every evaluation: the round, the accuracy with the standard error of the test set, the loss, the bytes."""
    found: list[list[object]] = []

    def note(line: dict[str, Any]) -> None:
        shown = _accuracy(line["accuracy"], TEST)
        found.append([task, stage, f"{alpha:g}", line["round"], shown, f"{line['loss']:.4f}", _megabytes(line)])
        print(*found[-1], file=sys.stderr, flush=True)

    if stage == "fedcof":
        table = {"model": {"backbone": "features"}, "data": {"partition": partition(alpha)}, "stages": [STAGES[stage]]}
        run(table, on_metrics=note, data=features(task))
    else:
        with patch("headstart.backbones.Inputs", _Shared):
            run(recipe(task, STAGES[stage], alpha), on_metrics=note)
    return found


def _error(accuracy: float, tests: int) -> float:
    """The standard error of an accuracy over so many tests."""
    return math.sqrt(accuracy * (1 - accuracy) / tests)


def _accuracy(accuracy: float, tests: int) -> str:
    return f"{100 * accuracy:.1f} ± {100 * _error(accuracy, tests):.1f}"


def _megabytes(line: dict[str, Any]) -> str:
    """Of all clients so far, both ways."""
    return f"{(line['bytes_up'] + line['bytes_down']) / 1e6:.2f}"


def learns(folder: str, tasks: str = ",".join(TESTS), alphas: str = "0.1") -> None:
    """FedMeZO on the last norm, by seeds, each of which draws training examples, clients and directions of its own."""
    shown: list[list[object]] = []
    each = [(task, alpha, seed) for task in tasks.split(",") for alpha in alphas.split(",") for seed in SEEDS]
    for task, alpha, seed in each:
        out = Path(folder) / f"{task}-{alpha}-{seed}"
        found = recipe(task, STAGES["norms"] | {"rounds": ROUNDS}, float(alpha), TRAIN, TESTS[task], seed)
        if not (out / "summary.json").exists():
            with patch("headstart.backbones.Inputs", _Shared):
                run(found, out, resume=out.exists(), report=False)
            (out / "model" / "model.safetensors").unlink()  # 651 MB, which the log beside it gives again
        first, *middle, last = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
        gained = last["accuracy"] - first["accuracy"]
        error = math.hypot(*(_error(line["accuracy"], TESTS[task]) for line in (first, last)))
        row = [task, alpha, seed, TESTS[task], _accuracy(first["accuracy"], TESTS[task])]
        row += [f"{100 * line['accuracy']:.1f}" for line in middle] + [_accuracy(last["accuracy"], TESTS[task])]
        row += [f"{100 * gained:+.1f}", f"{gained / error:.1f}"]
        shown.append([*row, f"{first['loss']:.3f} → {last['loss']:.3f}", _megabytes(last)])
        print(*shown[-1], file=sys.stderr, flush=True)
    rounds = range(50, ROUNDS + 1, 50)
    columns = ("data", "α", "seed", "tests", "zero-shot, %", *map(str, rounds), "gain", "of its error", "loss", "MB")
    show(f"SmolLM2-135M chooses, FedMeZO on the last norm: {TRAIN} examples, {CLIENTS} clients", columns, shown)


def costs() -> None:
    """What a round of 32 questions takes of memory, in processes of their own, and of bytes; then its seconds."""
    least, shown = 0.0, []
    for name in ("inference", *COSTS):
        each = in_fresh_process("benchmarks.language", "cost", name)
        least = least or each["peak"]
        row = [name, f"{each['peak'] / 2**20:.0f}", f"{each['peak'] / least:.2f}"]
        shown.append([*row, f"{each['up']:,}", f"{each['down']:,}"])
        print(*shown[-1], file=sys.stderr, flush=True)
    columns = ("", "peak, MiB", "of inference", "bytes up", "bytes down")
    show("SmolLM2-135M, a round over 32 questions of TREC at one client", columns, shown)
    paces()


@torch.inference_mode()
def choices(count: int = 16) -> None:
    """Processor seconds of the scores of six candidates of several tokens: in one pass with the prompt, each after a
    cache of the prompt's keys and values, and each with a prompt of its own."""
    torch.set_num_threads(1)
    kinds = ["an abbreviation", "an entity", "a description", "a human being", "a location", "a number"]
    table = recipe("trec", STAGES["norms"], 100.0, count, 1).model_dump(mode="json", exclude_none=True)
    table["model"] |= {"prompt": "{text}\nThe answer is", "label_words": kinds}
    found = Recipe.parse(table)
    dataset = Federation.of(found).dataset
    backbone: Any = ModelStore(found.model, dataset).backbone
    values = [backbone.transform(text, "x") for text in dataset.train.raw(0, count)]
    prompts = [torch.from_numpy(np.asarray(value))[None, :, 0] for value in values]
    words = [continuation(backbone.transform.tokenizer, found.model.prompt or "", kind, False) for kind in kinds]
    longest = max(map(len, words))
    padded = torch.tensor([[*each, *[0] * (longest - len(each))] for each in words])

    def likelihoods(logits: Tensor) -> list[float]:
        rows = zip(logits.log_softmax(-1), words, strict=True)
        return [sum(float(row[place, token]) for place, token in enumerate(each)) for row, each in rows]

    def plain(prompt: Tensor) -> list[float]:
        ids = torch.cat([prompt.expand(len(words), -1), padded], 1)
        return likelihoods(backbone.core(input_ids=ids, use_cache=False, logits_to_keep=longest + 1).logits)

    def cached(prompt: Tensor) -> list[float]:
        read = backbone.core(input_ids=prompt, use_cache=True, logits_to_keep=1)
        read.past_key_values.batch_repeat_interleave(len(words))
        behind = backbone.core(input_ids=padded[:, :-1], past_key_values=read.past_key_values, use_cache=True).logits
        return likelihoods(torch.cat([read.logits.expand(len(words), -1, -1), behind], 1))

    def packed(value: Any) -> list[float]:
        scores: list[float] = backbone.body(*backbone.transform.collate([value]))[0].tolist()
        return scores

    ways = {"one pass": (packed, values), "a cache": (cached, prompts), "a prompt each": (plain, prompts)}
    scored = {name: np.array([way(each) for each in given]) for name, (way, given) in ways.items()}
    sides = {name: partial(lambda way, given: [way(each) for each in given], *both) for name, both in ways.items()}
    took = alternate(sides, REPEATS, time.process_time)
    apart = {name: np.abs(scored[name] - scored["a prompt each"]).max() for name in ways}
    shown = [[name, f"{took[name]:.2f}", f"{apart[name]:.1e}"] for name in ways]
    columns = ("the prompt is read in", "processor seconds", "largest difference of a log-likelihood")
    show(f"SmolLM2-135M, {count} questions of TREC one by one, {len(kinds)} candidates", columns, shown)


def crowds() -> None:
    """Peak memory of a round over 100 questions at 10 and at 100 clients, in processes of their own."""
    shown: list[list[object]] = []
    for name in ("FedAvg, LoRA", "FedMeZO, LoRA"):
        few, many = (in_fresh_process("benchmarks.language", "crowd", name, each)["peak"] for each in (10, 100))
        shown.append([name, f"{few / 2**20:.0f}", f"{many / 2**20:.0f}", f"{many / few:.3f}"])
        print(*shown[-1], file=sys.stderr, flush=True)
    columns = ("", "10 clients, MiB", "100 clients, MiB", "ratio")
    show("SmolLM2-135M, a round over 100 questions of TREC, peak memory", columns, shown)


def _crowd(name: str, clients: int) -> int:
    """Peak memory of a round in which so many clients train LoRA in the last block."""
    stage = COSTS[name] | {"blocks": TUNED, "rounds": 1, "batch_size": "full", "lr": 1e-6}
    table = recipe("trec", stage, 100.0, 100, 1).model_dump(mode="json", exclude_none=True)
    table["data"]["partition"] = {"kind": "iid", "clients": clients}
    run(Recipe.parse(table))
    return peak_memory()


def _cost(name: str) -> dict[str, int]:
    """Peak memory and bytes of a round, or of two forward passes."""
    stage = COSTS.get(name, COSTS["FedMeZO, LoRA"]) | {"rounds": 1, "batch_size": "full", "lr": 1e-6}
    table = recipe("trec", stage, 100.0, 32, 1).model_dump(mode="json", exclude_none=True)
    table["data"]["partition"] = {"kind": "iid", "clients": 1}
    found = Recipe.parse(table)
    if name == "inference":
        _passes(ModelStore(found.model, Federation.of(found).dataset), [np.arange(32)])
        return {"peak": peak_memory(), "up": 0, "down": 0}
    lines: list[dict[str, Any]] = []
    run(found, on_metrics=lines.append)
    return {"peak": peak_memory(), "up": lines[-1]["bytes_up"], "down": lines[-1]["bytes_down"]}


@torch.inference_mode()
def _passes(store: ModelStore, groups: list[Ints]) -> None:
    """Two forward passes over examples, by batches."""
    assert store.backbone is not None
    for batch in store.inputs().batches(groups):
        for _ in range(2):
            store.backbone.body(*batch)


def paces(sentences: str = "16", threads: str = "1", only: str = "") -> None:
    """A round of FedMeZO, its step included, beside two forward passes over the same sentences, in one batch and in
    those of the round, in turns: processor seconds on one thread, which do not depend on what else the machine does,
    seconds by the clock on several."""
    count, alone = int(sentences), threads == "1"
    torch.set_num_threads(int(threads))
    clock, seconds = (time.process_time, "processor seconds") if alone else (time.perf_counter, "seconds")
    found = recipe("sst2", STAGES["norms"], 100.0, count, 8)
    dataset = Federation.of(found).dataset
    store, shown = ModelStore(found.model, dataset), []
    task = Task("default", 2, Population(1, count), store.label_words())
    labels, nothing = dataset.train.labels, np.zeros(0, np.float32)
    for train, drawn in PACES:
        if only not in f"{train} {drawn}":
            continue
        keys = {"method": "fedmezo", "train": train, "perturbation": drawn, "lr": 1e-6}
        stage = recipe("sst2", keys, 100.0).stages[0]
        method: Any = method_of(stage, plan_of(stage, frozenset(), True), (0, 0), store, (task,))[0]
        rows, owners = np.arange(count), np.zeros(count, np.int64)
        cohort = Cohort(owners[:1], store.inputs(), rows, labels, owners, np.array([True]), lambda *_: nothing)
        seeds = iter(range(100))

        def round_(method: Any = method, cohort: Cohort = cohort, seeds: Any = seeds) -> None:
            seed = next(seeds)
            reply = method.client_update(cohort, Received(0, scalars={"seed": seed}))
            method.replay.descent.step(seed, reply.blocks["slopes"][""][0], 1e-6)

        sides: dict[str, list[Ints]] = {"one": [rows], "own": method.probes.groups(cohort, rows)}
        works = {name: partial(_passes, store, groups) for name, groups in sides.items()}
        took = alternate({**works, "round": round_}, REPEATS, clock)
        ratios = [f"{took['round'] / took[name]:.2f}" for name in sides]
        shown.append([train, drawn, *(f"{each:.2f}" for each in took.values()), *ratios])
        print(*shown[-1], file=sys.stderr, flush=True)
        if train == "all" and alone:
            _profile(drawn, method, took["one"] / 2, store.flops_per_pass * count)
    columns = (
        "`train`", "`perturbation`", "two forward passes in one batch, s", "in the round's batches, s", "round, s",
        "of the first", "of the second",
    )  # fmt: skip
    title = f"FedMeZO on SmolLM2-135M, {count} sentences, threads: {threads}, {seconds}, median of {REPEATS}"
    show(title, columns, shown)


@torch.inference_mode()
def _profile(drawn: str, method: Any, passed: float, operations: float) -> None:
    """What a round is made of: drawing directions, adding them to the weights, a step, a forward pass; seconds each."""
    parameters, probes = method.network.trained, method.probes
    size = sum(each.numel() for each in parameters.values())
    room = np.empty((DRAWN_AT_ONCE, DISTRIBUTIONS[drawn].table.shape[1]), np.float32)

    def draw() -> None:
        for name, each in parameters.items():
            for _ in DISTRIBUTIONS[drawn].codes(7, 0, name, 0, each.numel()):
                pass

    def look_up() -> None:
        table = DISTRIBUTIONS[drawn].table
        for name, each in parameters.items():
            for _, codes in DISTRIBUTIONS[drawn].codes(7, 0, name, 0, each.numel()):
                np.take(table, codes, axis=0, out=room[: len(codes)], mode="wrap")

    def add() -> None:
        for name, each in parameters.items():
            probes._moved((7, 0), name, each, 1e-3, None)

    def step() -> None:
        method.replay.descent.step(7, np.ones(1, np.float32), 1e-9)

    sides = {"random bits": draw, "… as numbers": look_up, "… added to the weights": add, "step": step}
    took = alternate(sides, REPEATS, time.process_time)
    rates = {what: f"{4 * size / seconds / 1e9:.2f} GB of weights/s" for what, seconds in took.items()}
    rates["forward pass"], took["forward pass"] = f"{operations / passed / 1e9:.0f} GFlop/s", passed
    rows = [[what, f"{seconds:.3f}", rates[what]] for what, seconds in took.items()]
    columns = ("", "processor seconds", "rate of one core")
    show(f"Directions of {size / 1e6:.1f} M parameters, {drawn}", columns, rows)


def main(arguments: tuple[str, ...] = ()) -> None:
    if not SHARED.is_dir():
        print("\nlanguage: set HEADSTART_SHARED to a folder with data/; skipped")
        return
    measures: dict[str, Callable[..., None]] = {"costs": costs, "paces": paces, "crowds": crowds, "choices": choices}
    measures |= {"learns": learns}
    if arguments and arguments[0] in measures:
        measures[arguments[0]](*arguments[1:])
        return
    task, stage, alpha = (*arguments, *("", "", "")[len(arguments) :])
    found = [
        row
        for each in (task.split(",") if task else PROMPTS)
        for method in (stage.split(",") if stage else STAGES)
        for degree in ([float(alpha)] if alpha else (100.0, 0.1))
        for row in rows(each, method, degree)
    ]
    columns = ("data", "method", "α", "round", "accuracy, %", "loss", "MB")
    show(f"SmolLM2-135M chooses: {TRAIN} examples, {CLIENTS} clients, {TEST} tests", columns, found)
    if not arguments:
        costs()


if __name__ == "__main__":
    if sys.argv[1:2] == ["cost"]:
        print(json.dumps(_cost(sys.argv[2])))
    elif sys.argv[1:2] == ["crowd"]:
        print(json.dumps({"peak": _crowd(sys.argv[2], int(sys.argv[3]))}))
    else:
        main(tuple(sys.argv[1:]))
