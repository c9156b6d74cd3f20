"""What privacy costs: secure sums in bytes and seconds, secure groups and noise in accuracy."""

from __future__ import annotations

import json
import math
import os
import sys
import time
from itertools import product
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from tests.helpers import Bench, context_of, play

from benchmarks.common import SHARED, THREADS, in_fresh_process, show
from headstart.channel.fixed import exponents_of, from_fixed, largest_exponents, to_fixed
from headstart.channel.secure import Identity, SecureClient, SecureSum
from headstart.config.recipe import Recipe
from headstart.core.files import write_atomically
from headstart.core.ledger import Ledger
from headstart.core.message import Message
from headstart.core.statistics import message_nbytes
from headstart.data import Federation
from headstart.engine.client_states import ClientStates
from headstart.engine.model_store import ModelStore
from headstart.runner import run
from headstart.runner.evaluation import evaluate

SEEDS = (0, 1, 2)
METHODS = ("fedncm", "fed3r", "fedcof")
PLOT = Path(__file__).parents[1] / "docs" / "privacy-accuracy.png"
DATA: dict[str, dict[str, Any]] = {
    "CIFAR-10 / SqueezeNet": {
        "data": {"dataset": "cifar10", "partition": {"kind": "dirichlet", "clients": 100, "alpha": 0.1}},
        "model": {
            "backbone": "squeezenet1_1",
            "weights": str(SHARED / "weights" / "squeezenet1_1-caffe.safetensors"),
            "preprocess": "caffe",
        },
    },
    "MNIST 4,000 / Lite0": {
        "data": {"dataset": "mnist-mini", "partition": {"kind": "dirichlet", "clients": 50, "alpha": 0.1}},
        "model": {"backbone": "efficientnet-lite0"},
    },
}


def recipe(data: str, stages: list[dict[str, Any]], seed: int) -> Recipe:
    """The stages on one of the data sets; the seed draws the partition and the noise."""
    os.environ.setdefault("HEADSTART_DATA", str(SHARED / "data"))
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", THREADS)))
    return Recipe.parse({"seed": seed, **DATA[data], "stages": stages})


def at_hand() -> list[str]:
    """Data sets that are there."""
    return [name for name in DATA if SHARED.is_dir() or "MNIST" in name]


def spread(values: list[float]) -> str:
    """Mean ± standard deviation in per cent."""
    return f"{100 * mean(values):.1f} ± {100 * stdev(values):.1f}" if len(values) > 1 else f"{100 * values[0]:.1f}"


# --------------------------------------------------------------------------------------------------------- secure sums

CLASSES, THRESHOLD = 10, 0.67
# Statistics, length of the features, clients, share that drops out.
CELLS = (
    ("fedncm", 512, 10, 0.0),
    ("fedncm", 512, 10, 0.3),
    ("fedncm", 512, 100, 0.0),
    ("fedncm", 512, 100, 0.3),
    ("fedncm", 1280, 100, 0.3),
    ("fed3r", 512, 10, 0.3),
    ("fed3r", 512, 100, 0.0),
    ("fed3r", 512, 100, 0.3),
    ("fed3r", 1280, 10, 0.0),
    ("fed3r", 1280, 10, 0.3),
    ("fed3r", 1280, 100, 0.0),
    ("fed3r", 1280, 100, 0.3),
)


def sums(*cells: str) -> None:
    """Secure sums beside plain messages; cells: numbers of the rows, all by default."""
    chosen = [CELLS[int(number)] for number in cells] or CELLS
    rows = []
    for cell in chosen:
        found = in_fresh_process("benchmarks.privacy", "one_sum", *cell)
        method, dim, clients, lost = cell
        rows.append(
            (
                method,
                dim,
                f"{found['values']:,}",
                clients,
                f"{lost:.0%} ({found['early']} + {found['late']})",
                f"{found['plain_up']:,}",
                f"{found['up']:,}",
                f"{found['up'] / found['plain_up']:.2f}",
                f"{found['plain_down']:,}",
                f"{found['down']:,}",
                f"{found['client_seconds']:.3f}",
                f"{found['server_seconds']:.2f}",
                "yes" if found["equal"] else "NO",
            )
        )
    show(
        f"Secure sums of {CLASSES} classes, threshold {THRESHOLD}: bytes and CPU seconds of one client that stays to "
        "the end (mean); dropouts before `masked` + before `reveal`",
        ("statistics of", "d", "values", "clients", "dropouts", "up, plain", "up, secure", "ratio", "down, plain",
         "down, secure", "CPU s per client", "CPU s, server", "total equals the plain fixed-point sum"),
        rows,
    )  # fmt: skip


def one_sum(method: str, dim: str, clients: str, lost: str) -> None:
    """One sum of random values among state machines in this process; prints what it cost."""
    d, count, gone = int(dim), int(clients), round(float(lost) * int(clients))
    early = gone // 2
    # The last clients leave before their values arrive, those before them after that.
    silent = {"masked": set(range(count - early, count)), "reveal": set(range(count - gone, count))}
    shapes: dict[str, tuple[int, ...]] = {"counts": (CLASSES,), "sums": (CLASSES, d)}
    if method == "fed3r":
        shapes["moments"] = (d * (d + 1) // 2,)
    threshold = math.ceil(THRESHOLD * count)
    server = SecureSum(b"benchmark", range(count), threshold, shapes)
    values = [values_of(number, shapes) for number in range(count)]
    members = [
        SecureClient(b"benchmark", count, threshold, Identity.derived(b"benchmark", number), values[number])
        for number in range(count)
    ]
    exponents = largest_exponents(exponents_of(value) for value in values)
    up, down = np.zeros(count, np.int64), np.zeros(count, np.int64)
    client_seconds, server_seconds = np.zeros(count), 0.0
    plain = {name: np.zeros(shape, np.int64) for name, shape in shapes.items()}
    while step := server.step:
        start = time.process_time()
        instructions = server.instructions()
        server_seconds += time.process_time() - start
        for number, told in instructions.items():
            down[number] += told.nbytes
            if number in silent.get(step, ()):
                continue
            start = time.process_time()
            answer = answer_of(members[number], step, told)
            client_seconds[number] += time.process_time() - start
            up[number] += answer.nbytes
            if step == "masked":
                for name, value in to_fixed(values[number], exponents, count).items():
                    plain[name] += value
            start = time.process_time()
            server.receive(number, answer)
            server_seconds += time.process_time() - start
        server.next()
    start = time.process_time()
    total = server.total()
    server_seconds += time.process_time() - start
    for name, expected in from_fixed(plain, exponents, count).items():
        np.testing.assert_array_equal(total[name], expected)
    stayed = slice(0, count - gone)
    asked = Message(scalars={"round": 0}).nbytes
    print(
        json.dumps(
            {
                "values": sum(math.prod(shape) for shape in shapes.values()),
                "early": early,
                "late": gone - early,
                "plain_up": message_nbytes(CLASSES, d, "full" if method == "fed3r" else None),
                "plain_down": asked,
                "up": round(up[stayed].mean()),
                "down": asked + round(down[stayed].mean()),
                "client_seconds": client_seconds[stayed].mean(),
                "server_seconds": server_seconds,
                "equal": True,
            }
        )
    )


def values_of(number: int, shapes: dict[str, tuple[int, ...]]) -> dict[str, np.ndarray]:
    """Random values of a client."""
    rng = np.random.default_rng(number)
    return {name: 100 * rng.standard_normal(shape) for name, shape in shapes.items()}


def answer_of(client: SecureClient, step: str, told: Message) -> Message:
    """A client's answer to an exchange."""
    answers = {"shares": client.share, "masked": client.mask, "agree": client.agree, "reveal": client.reveal}
    return client.keys() if step == "keys" else answers[step](told)


# ------------------------------------------------------------------------------------------------------- secure groups

GROUPS = (3, 5, 10)


def groups() -> None:
    """FedCOF that sees sums of groups, beside what sees every client, and what a secure sum leaves as it is."""
    stages: list[dict[str, Any]] = [{"method": name} for name in METHODS]
    stages += [{"method": "fedcof", "secure": True, "secure_group": size} for size in GROUPS]
    names = [*METHODS, *(f"fedcof, groups of {size}" for size in GROUPS)]
    rows = [[name] for name in names]
    for data in at_hand():
        runs = [run(recipe(data, stages, seed)).summary["stages"] for seed in SEEDS]
        clients = DATA[data]["data"]["partition"]["clients"]
        for row, found in zip(rows, zip(*runs, strict=True), strict=True):
            row.append(spread([each["accuracy"] for each in found]))
            row.append(f"{mean(each['bytes_up'] for each in found) / clients / 1e3:,.1f}")
    columns = [f"{data}{what}" for data in at_hand() for what in (", %", ", kB up per client")]
    show(
        "FedCOF with secure groups: accuracy over three partitions (Dirichlet 0.1); bytes without those of keys and "
        "shares",
        ("method", *columns),
        rows,
    )


# --------------------------------------------------------------------------------------------------------------- noise

EPSILONS = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0)
SIDES = ("server", "client", "shared")
BY = {"server": "the server", "client": "the client", "shared": "all clients together"}
COUNT_NOISE = ("uniform", "gaussian", "laplace")
COUNT_EPSILONS = (0.1, 0.5, 0.9)  # the paper's range
TRAINED_EPSILONS = (1.0, 3.0, 10.0, 30.0)
# Tried on this seed, which is not shown, at this epsilon.
TUNING_SEED, TUNING_EPSILON = 99, 10.0
CLIPS = (0.01, 0.1, 1.0)
LR = 0.01
ROUNDS = 20


def cells() -> list[tuple[str, str]]:
    """Methods, and who adds the noise; FedCOF's is on every client's means, which nobody can share."""
    return [(method, side) for method in METHODS for side in SIDES if (method, side) != ("fedcof", "shared")]


def one_noise(data: str, seed: str) -> None:
    """Closed forms with and without noise, in a process of its own; prints their accuracies."""
    plain: list[dict[str, Any]] = [{"method": method} for method in METHODS]
    made = recipe(data, plain, int(seed))
    federation = Federation.of(made)
    store = ModelStore(made.model, federation.dataset)
    features, test = store.features("train"), store.features("test")
    clip = float(np.median([np.linalg.norm(row) for row in features]))
    stages = dict(zip(METHODS, plain, strict=True))
    for (method, side), epsilon in product(cells(), EPSILONS):
        privacy = {"epsilon": epsilon, "clip": clip, "noise": side}
        stages[f"{method} {side} {epsilon:g}"] = {"method": method, "privacy": privacy, "secure": side == "shared"}
    for kind, epsilon in product(COUNT_NOISE, COUNT_EPSILONS):
        stages[f"{kind} {epsilon:g}"] = {"method": "fedcof", "count_noise": {"kind": kind, "epsilon": epsilon}}
    found, clients = {}, federation.n_clients
    for number, (name, stage) in enumerate(
        zip(stages, recipe(data, [*stages.values()], int(seed)).stages, strict=True)
    ):
        key = (int(seed), number)
        classes = len(federation.dataset.classes)
        bench = Bench(stage, context_of(stage, classes, store.dim, key, clients, len(features)))
        state = play(bench, federation, features, Ledger.open(clients), ClientStates(Path(), clients, {}))
        found[name] = evaluate(bench.head(state), test, federation.dataset.test.labels).accuracy
    print(json.dumps({"clip": clip, "accuracy": found}))


def one_trained(data: str, seed: str, clip: str, side: str, *epsilons: str) -> None:
    """DP-FedAvg of the head in a process of its own, without noise where epsilon is "none"; prints its accuracies."""
    training = {"method": "fedavg", "train": "head", "rounds": ROUNDS, "evaluate_every": ROUNDS, "lr": LR}
    training |= {"weighting": "uniform", "head_init": "zeros", "start": "pretrained"}
    training |= {"secure": side == "shared"}
    private = [{"epsilon": float(e), "clip": float(clip), "noise": side} for e in epsilons if e != "none"]
    stages = [training] * ("none" in epsilons) + [training | {"privacy": each} for each in private]
    accuracies = [stage["accuracy"] for stage in run(recipe(data, stages, int(seed))).summary["stages"]]
    print(json.dumps({"clip": float(clip), "accuracy": dict(zip(epsilons, accuracies, strict=True))}))


def noise() -> None:
    """Accuracy against epsilon, and FedCOF's noise on counts: tables and a plot."""
    found = {data: measured_noise(data) for data in at_hand()}
    show_noise(found)
    plot(found)


def measured_noise(data: str) -> dict[str, Any]:
    """Runs of all seeds on a data set."""
    closed = [in_fresh_process("benchmarks.privacy", "one_noise", data, seed) for seed in SEEDS]
    tried = {
        clip: in_fresh_process(
            "benchmarks.privacy", "one_trained", data, TUNING_SEED, clip, "server", f"{TUNING_EPSILON:g}"
        )
        for clip in CLIPS
    }
    clip = max(tried, key=lambda clip: tried[clip]["accuracy"][f"{TUNING_EPSILON:g}"])
    epsilons = ["none", *(f"{epsilon:g}" for epsilon in TRAINED_EPSILONS)]
    trained = {
        side: [
            in_fresh_process("benchmarks.privacy", "one_trained", data, seed, clip, side, *epsilons) for seed in SEEDS
        ]
        for side in SIDES
    }
    return {"closed": closed, "tried": {str(clip): each for clip, each in tried.items()}, "trained": trained}


def accuracies(runs: list[dict[str, Any]], name: str) -> list[float]:
    """Of all seeds."""
    return [each["accuracy"][name] for each in runs]


def show_noise(found: dict[str, dict[str, Any]]) -> None:
    """A table for each data set, and one of noise on counts."""
    for data, runs in found.items():
        closed, trained, tried = runs["closed"], runs["trained"], runs["tried"]
        clip = trained["server"][0]["clip"]
        rows = [
            (
                method, BY[side],
                *(spread(accuracies(closed, f"{method} {side} {epsilon:g}")) for epsilon in EPSILONS),
                spread(accuracies(closed, method)),
            )
            for method, side in cells()
        ]  # fmt: skip
        blank = [""] * (len(EPSILONS) - len(TRAINED_EPSILONS))
        for side in SIDES:
            shown = [spread(accuracies(trained[side], f"{epsilon:g}")) for epsilon in TRAINED_EPSILONS]
            none = spread(accuracies(trained[side], "none"))
            rows.append(("DP-FedAvg (a client)", BY[side], *blank, *shown, none))
        scores = [f"{clip}: {100 * each['accuracy'][f'{TUNING_EPSILON:g}']:.1f}" for clip, each in tried.items()]
        show(
            f"{data}: accuracy by ε that hides one example (DP-FedAvg: one client) at δ = 1e-5, three seeds; clip "
            f"{mean(each['clip'] for each in closed):.3g}, the median norm of the training features, a look at the "
            f"data that is not paid for; DP-FedAvg of the head, {ROUNDS} rounds of all clients, clip "
            f"{clip:g}, chosen by test accuracy at ε = {TUNING_EPSILON:g} on seed {TUNING_SEED} "
            f"({', '.join(scores)})",
            ("method", "noise by", *(f"ε = {epsilon:g}" for epsilon in EPSILONS), "no noise"),
            rows,
        )
    rows = [
        (kind, data, *(spread(accuracies(runs["closed"], f"{kind} {epsilon:g}")) for epsilon in COUNT_EPSILONS),
         spread(accuracies(runs["closed"], "fedcof")))
        for data, runs in found.items() for kind in COUNT_NOISE
    ]  # fmt: skip
    show(
        "FedCOF with the paper's noise on counts, which hides nothing provably: accuracy, three seeds",
        ("noise", "data", *(f"ε = {epsilon:g}" for epsilon in COUNT_EPSILONS), "no noise"),
        rows,
    )


STYLES: dict[str, dict[str, str]] = {
    "server": {"linestyle": "-", "marker": "o"},
    "client": {"linestyle": ":", "marker": "^"},
    "shared": {"linestyle": "-.", "marker": "x"},
}


def plot(found: dict[str, dict[str, Any]], path: Path = PLOT) -> None:
    """Accuracy against epsilon on a log axis, a panel for each data set."""
    figure = Figure(figsize=(9, 4.8), layout="constrained")
    panels = figure.subplots(1, len(found), sharey=True, squeeze=False)[0]
    colours = {"fedncm": "tab:blue", "fed3r": "tab:orange", "fedcof": "tab:green", "trained": "tab:red"}
    names = {"fedncm": "FedNCM", "fed3r": "Fed3R", "fedcof": "FedCOF"}
    for axes, (data, runs) in zip(panels, found.items(), strict=True):
        for method, side in cells():
            points = [100 * mean(accuracies(runs["closed"], f"{method} {side} {epsilon:g}")) for epsilon in EPSILONS]
            label = f"{names[method]}, noise by {BY[side]}"
            axes.plot(EPSILONS, points, color=colours[method], label=label, markersize=5, **STYLES[side])
        for method in METHODS:
            reference = 100 * mean(accuracies(runs["closed"], method))
            axes.axhline(reference, color=colours[method], ls="--", lw=1, alpha=0.6)
        for side in SIDES:
            trained = runs["trained"][side]
            points = [100 * mean(accuracies(trained, f"{epsilon:g}")) for epsilon in TRAINED_EPSILONS]
            label = f"DP-FedAvg (hides a client), {BY[side]}"
            axes.plot(TRAINED_EPSILONS, points, color=colours["trained"], label=label, markersize=5, **STYLES[side])
        reference = 100 * mean(accuracies(runs["trained"]["server"], "none"))
        axes.axhline(reference, color=colours["trained"], ls="--", lw=1, alpha=0.6)
        axes.set(xscale="log", xlabel="ε at δ = 1e-5", title=data, ylim=(0, 100))
        axes.set_xticks(EPSILONS, [f"{epsilon:g}" for epsilon in EPSILONS])
        axes.minorticks_off()
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("test accuracy (%)")
    panels[0].plot([], [], color="grey", ls="--", lw=1, label="the same without noise")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, fontsize=8.5, frameon=False)
    write_atomically(path, lambda temporary: figure.savefig(temporary, dpi=100, facecolor="white"))


# ------------------------------------------------------------------------------------------------------- small classes


def small_classes() -> None:
    """What it costs to say nothing of a client's class with one example."""
    rows = []
    for data, method in product(at_hand(), METHODS):
        both = [[float(run(recipe(data, [{"method": method, "min_examples": least}], seed)).summary["accuracy"])
                 for seed in SEEDS] for least in (1, 2)]  # fmt: skip
        rows.append((data, method, spread(both[0]), spread(both[1]), f"{100 * (mean(both[1]) - mean(both[0])):+.2f}"))
    show(
        "Accuracy, %, with and without classes of which a client has one example",
        ("data", "method", "min_examples = 1", "2", "difference"),
        rows,
    )


def main() -> None:
    """Everything."""
    sums()
    groups()
    noise()
    small_classes()


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
