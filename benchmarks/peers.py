"""Rounds of FedAvg on a head beside other libraries and the machine's limit, each peer in an environment of its own.

    make bench-peers                    (python -m benchmarks.peers [TURNS [SIDE …]])

Of the sides that are named, or of all. 30 of 100 clients of 500 examples, 512 features, 10 classes, one epoch of
batches of 64. An environment sees the torch and NumPy of this one, so that all sides compute with the same libraries.
The sides take turns; a figure is the median
over the turns of the median round. A side whose environment cannot be made is left out, and the page says so. Then
what headstart does beside such rounds, next to its limits (`benchmarks.limits`). Writes benchmarks/peers.json and
docs/peers.md.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
import time
import venv
from functools import partial
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from benchmarks import limits

ROOT = Path(__file__).parents[1]
CLIENTS, SAMPLED, EXAMPLES, DIM, CLASSES, BATCH, RATE, ROUNDS = 100, 30, 500, 512, 10, 64, 0.01, 20
PEERS = {
    # The packages of an environment; None: this one. Threads: those that a side is measured with.
    "headstart": (None, (1, 2)),
    "plain": (None, (1, 2)),
    "pfl": (["pfl==0.6.0"], (1,)),
    "flower": (["flwr[simulation]==1.41.0"], (1,)),
    "pooled": (None, (1,)),
    "limit": (None, (1, 2)),
}
NOTES = (
    "What bounds a round of heads: `python -m benchmarks.profile`, and the text beside its table in the "
    "[measurements](measurements.md).",
    "",
    "NVFlare's simulator is not among the sides: it has a process for a client at a time, which it starts anew when "
    "another client's turn comes; see the [measurements](measurements.md).",
)
OWN = ("mezo", "raw", "lora", "startup")
TITLES = {
    "headstart": "headstart", "plain": "a plain PyTorch loop", "pfl": "pfl-research", "flower": "Flower's simulation",
}  # fmt: skip


def data() -> tuple[np.ndarray, ...]:
    """Features and labels: 50,000 to train on, client after client, and 10,000 to test."""
    rng, count = np.random.default_rng(0), CLIENTS * EXAMPLES + 10_000
    y = rng.integers(0, CLASSES, count)
    means = 0.15 * rng.standard_normal((CLASSES, DIM), np.float32)
    X = rng.standard_normal((count, DIM), np.float32) + means[y]
    return X[:-10_000], y[:-10_000], X[-10_000:], y[-10_000:]


def now() -> tuple[float, float]:
    """The wall clock, and the CPU time of this process, which others on the machine disturb less."""
    return time.perf_counter(), time.process_time()


def per_round(times: list[tuple[float, float]]) -> dict[str, float]:
    """The median wall and CPU seconds between two rounds; the first is for warming up."""
    seconds, cpu = np.median(np.diff(times, axis=0)[1:], axis=0).tolist()
    return {"seconds": seconds, "cpu": cpu}


# ------------------------------------------------------------------------------------------------------------ the sides


def table_of() -> dict[str, Any]:
    """The same as what `headstart.runner.run` is given."""
    X, y, T, t = data()
    return {
        "X": np.concatenate([X, T]), "y": np.concatenate([y, t]),
        "split": np.repeat(["train", "test"], [len(y), len(t)]),
        "client": np.concatenate([np.arange(len(y)) // EXAMPLES, np.zeros(len(t), np.int64)]),
    }  # fmt: skip


def headstart() -> dict[str, Any]:
    from headstart.runner import run

    stage = {"method": "fedavg", "train": "head", "rounds": 2 * ROUNDS, "clients_per_round": SAMPLED, "lr": RATE}
    stage |= {"batch_size": BATCH, "head_init": "zeros", "evaluate_every": ROUNDS}
    found, times = list[dict[str, Any]](), list[float]()

    def note(metrics: dict[str, Any]) -> None:
        found.append(metrics)
        times.append(time.process_time())

    run({"model": {"backbone": "features"}, "stages": [stage]}, data=table_of(), on_metrics=note)
    half, whole = found
    seconds, cpu = whole["seconds"] - half["seconds"], times[1] - times[0]
    return {"seconds": seconds / ROUNDS, "cpu": cpu / ROUNDS, "accuracy": half["accuracy"]}


def plain() -> dict[str, Any]:
    import torch

    X, y, T, t = (torch.from_numpy(each) for each in data())
    rng = np.random.default_rng(0)
    weights = [torch.zeros(CLASSES, DIM), torch.zeros(CLASSES)]
    times = [now()]
    for _ in range(ROUNDS):
        totals = [torch.zeros_like(each) for each in weights]
        for client in rng.choice(CLIENTS, SAMPLED, replace=False):
            totals = [a + b for a, b in zip(totals, trained(X, y, int(client), weights), strict=True)]
        weights = [each / SAMPLED for each in totals]
        times.append(now())
    accuracy = float(((T @ weights[0].T + weights[1]).argmax(1) == t).float().mean())
    return {**per_round(times), "accuracy": accuracy}


def trained(X: Any, y: Any, client: int, weights: list[Any]) -> list[Any]:
    """What a client makes of the weights, as one writes it in PyTorch."""
    import torch

    model = torch.nn.Linear(DIM, CLASSES)
    with torch.no_grad():
        for parameter, value in zip(model.parameters(), weights, strict=True):
            parameter.copy_(value)
    optimiser = torch.optim.SGD(model.parameters(), lr=RATE)
    for rows in torch.split(client * EXAMPLES + torch.randperm(EXAMPLES), BATCH):
        optimiser.zero_grad()
        torch.autograd.backward(torch.nn.functional.cross_entropy(model(X[rows]), y[rows]))
        optimiser.step()
    return [parameter.detach() for parameter in model.parameters()]


def pfl() -> dict[str, Any]:
    import torch
    from pfl.aggregate.simulate import SimulatedBackend
    from pfl.aggregate.weighting import WeightByDatapoints
    from pfl.algorithm.base import NNAlgorithmParams
    from pfl.algorithm.federated_averaging import FederatedAveraging
    from pfl.callback.base import TrainingProcessCallback
    from pfl.data.dataset import Dataset
    from pfl.data.federated_dataset import FederatedDataset
    from pfl.data.sampling import get_user_sampler
    from pfl.hyperparam import NNTrainHyperParams
    from pfl.metrics import Metrics
    from pfl.model.pytorch import PyTorchModel

    X, y, T, t = (torch.from_numpy(each) for each in data())

    class Head(torch.nn.Linear):
        def loss(self, inputs: Any, labels: Any, eval: bool = False) -> Any:
            return torch.nn.functional.cross_entropy(self(inputs), labels)

        def metrics(self, inputs: Any, labels: Any, eval: bool = True) -> dict[str, Any]:
            return {}

    times = [now()]

    class Clock(TrainingProcessCallback):  # type: ignore[misc]
        def after_central_iteration(self, metrics: Any, model: Any, *, central_iteration: int) -> tuple[bool, Any]:
            times.append(now())
            return False, Metrics()

    def client(number: int) -> Any:
        rows = torch.arange(number * EXAMPLES, (number + 1) * EXAMPLES)[torch.randperm(EXAMPLES)]
        return Dataset((X[rows], y[rows]))

    head = Head(DIM, CLASSES)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.zero_()
    model = PyTorchModel(head, torch.optim.SGD, torch.optim.SGD(head.parameters(), lr=1.0))
    clients = FederatedDataset(client, get_user_sampler("random", list(range(CLIENTS))))
    FederatedAveraging().run(
        NNAlgorithmParams(
            central_num_iterations=ROUNDS, evaluation_frequency=1000, train_cohort_size=SAMPLED, val_cohort_size=0
        ),
        SimulatedBackend(clients, clients, [WeightByDatapoints()]),
        model,
        NNTrainHyperParams(local_batch_size=BATCH, local_num_epochs=1, local_learning_rate=RATE),
        callbacks=[Clock()],
    )
    accuracy = float((head(T).argmax(1) == t).float().mean())
    return {**per_round(times), "accuracy": accuracy}


def flower() -> dict[str, Any]:
    from flwr.app import ArrayRecord, MetricRecord
    from flwr.clientapp import ClientApp
    from flwr.serverapp import ServerApp
    from flwr.serverapp.strategy import FedAvg
    from flwr.simulation import run_simulation

    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    _, _, T, t = data()
    server, client, found = ServerApp(), ClientApp(), dict[str, Any]()

    @client.train()
    def train(message: Any, context: Any) -> Any:
        from benchmarks.peers import answer_of_flower

        return answer_of_flower(message, context)

    @server.main()
    def main(grid: Any, context: Any) -> None:
        times = list[tuple[float, float]]()

        def tick(number: int, arrays: Any) -> Any:
            times.append(now())
            found["last"] = arrays.to_numpy_ndarrays()
            return MetricRecord({"round": number})

        strategy = FedAvg(fraction_train=SAMPLED / CLIENTS, fraction_evaluate=0.0, min_available_nodes=CLIENTS)
        start = ArrayRecord([np.zeros((CLASSES, DIM), np.float32), np.zeros(CLASSES, np.float32)])
        strategy.start(grid, start, num_rounds=ROUNDS, evaluate_fn=tick)
        found["seconds"] = per_round(times)["seconds"]

    config: Any = {"client_resources": {"num_cpus": 1, "num_gpus": 0.0}}
    run_simulation(server, client, CLIENTS, backend_config=config)
    weight, bias = found.pop("last")
    return {**found, "accuracy": float(((T @ weight.T + bias).argmax(1) == t).mean())}


_MINE: dict[str, Any] = {}


def answer_of_flower(message: Any, context: Any) -> Any:
    """A client of Flower's simulation, in a process that keeps the data."""
    import torch
    from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict

    if not _MINE:
        torch.set_num_threads(1)
        _MINE["X"], _MINE["y"], *_ = (torch.from_numpy(each) for each in data())
    given = [torch.from_numpy(each.copy()) for each in message.content["arrays"].to_numpy_ndarrays()]
    made = trained(_MINE["X"], _MINE["y"], int(context.node_config["partition-id"]), given)
    content: Any = {
        "arrays": ArrayRecord([each.numpy() for each in made]),
        "metrics": MetricRecord({"num-examples": 500}),
    }
    return Message(RecordDict(content), reply_to=message)


def pooled() -> dict[str, Any]:
    """Not a federation: what all examples in one place give."""
    from sklearn.linear_model import LogisticRegression

    X, y, T, t = data()
    start = time.perf_counter()
    model = LogisticRegression(C=0.01, max_iter=100).fit(X, y)
    return {"seconds": time.perf_counter() - start, "accuracy": float(model.score(T, t))}


def limit(clock: Any = time.perf_counter) -> dict[str, Any]:
    """A round's rows read once at the speed that memory is read in order, and its two products of every batch, at the
    very shapes and by the faster of NumPy's and torch's library."""
    import torch

    big = torch.ones(64 << 20)  # zeros would be one page of memory, read again and again
    head, rows = torch.ones(CLASSES, DIM), torch.ones(BATCH, DIM)
    sides: Any = ((head, rows, rows.T), (head.numpy(), rows.numpy(), rows.numpy().T))
    reads, products = list[float](), list[float]()

    def pairs(left: Any, batch: Any, turned: Any) -> None:
        for _ in range(1000):
            (left @ turned) @ batch

    for _ in range(9):
        reads.append(seconds_of(big.sum, clock))
        products.append(min(seconds_of(partial(pairs, *side), clock) for side in sides))
    bandwidth, pair = 4 * big.numel() / min(reads), min(products) / 1000
    reading = 4 * SAMPLED * EXAMPLES * DIM / bandwidth
    of_products = SAMPLED * EXAMPLES / BATCH * pair
    return {
        "seconds": reading + of_products, "reading": reading, "products": of_products,
        "gigabytes_per_second": bandwidth / 1e9, "gigaflops": 4 * BATCH * DIM * CLASSES / pair / 1e9,
    }  # fmt: skip


def seconds_of(work: Any, clock: Any) -> float:
    """How long a call takes."""
    start = clock()
    work()
    return float(clock() - start)


# ------------------------------------------------------------------------------------------------------------ the turns


def environment(folder: Path, packages: list[str] | None) -> Path | None:
    """The interpreter of a side; a new environment has what this one lacks. None where it cannot be had."""
    if packages is None:
        return Path(sys.executable)
    venv.create(folder, symlinks=True)
    python = folder / "bin" / "python"
    site = folder / "lib" / f"python3.{sys.version_info.minor}" / "site-packages"
    mine = [path for path in sys.path if Path(path).name == "site-packages"]
    (site / "parent.pth").write_text("\n".join(mine) + "\n", encoding="utf-8")
    done = subprocess.run(
        [python, "-m", "pip", "install", "--quiet", "--prefix", folder, *packages], capture_output=True, text=True
    )
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["pip failed"])[-1]
        print(f"{', '.join(packages)}: left out: {reason}", flush=True)
        return None
    return python


def measured(python: Path | None, side: str, threads: int) -> dict[str, Any]:
    """One turn of a side, in a process of its own."""
    pinned = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), str(threads))
    alone = {} if side in ("headstart", *OWN) else {"BENCHMARKS_PEER": side}
    environ = {**os.environ, **pinned, **alone}
    environ.pop("OMP_WAIT_POLICY", None)  # headstart's, for itself
    done = subprocess.run(
        [str(python), "-m", "benchmarks.peers", "side", side], cwd=ROOT, env=environ, capture_output=True, text=True
    )
    if done.returncode:
        raise SystemExit(f"{side}: {done.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def machine() -> dict[str, Any]:
    """What figures depend on."""
    model = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    versions = {name: version(name) for name in ("headstart", "torch", "numpy", "scikit-learn")}
    pinned = dict(each.split("==") for packages, _ in PEERS.values() for each in packages or ())
    return {
        "processor": model[0].partition(": ")[2] if model else platform.processor(),
        "cores": os.cpu_count(),
        "memory_gib": round(memory, 1),
        "python": platform.python_version(),
        **versions,
        **pinned,
    }


def page(report: dict[str, Any]) -> str:
    """The page of the docs."""
    rows, turns = report["rows"], f"{report['turns']} turn{'s' if report['turns'] > 1 else ''}"
    lines = [
        "# Beside other libraries",
        "",
        f"`make bench-peers`: {SAMPLED} of {CLIENTS} clients of {EXAMPLES} examples in a round, {DIM} features, "
        f"{CLASSES} classes, one epoch of batches of {BATCH}, FedAvg of a linear head at rate {RATE}; the median of "
        f"{ROUNDS} rounds, and of {turns}. Every side computes with the same torch and NumPy. The limit is the "
        "machine's: the rows of a round read once in order, and the two products of every batch at these shapes, both "
        "measured in the same run. The accuracy is after as many rounds.",
        "",
        "| | threads | a round, ms | its CPU, ms | of headstart's | of the limit | accuracy, % |",
        "|---|---|---|---|---|---|---|",
    ]
    for side, title in TITLES.items():
        for threads, row in rows.get(side, {}).items():
            mine, bound = rows["headstart"][threads]["seconds"], rows["limit"][threads]["seconds"]
            cpu = f"{1e3 * row['cpu']:.1f}" if "cpu" in row else ""
            lines.append(
                f"| {title} | {threads} | {1e3 * row['seconds']:.1f} | "
                f"{cpu} | {row['seconds'] / mine:.2f} | "
                f"{row['seconds'] / bound:.2f} | {100 * row['accuracy']:.2f} |"
            )
    for threads, row in rows["limit"].items():
        lines.append(
            f"| the limit: {row['gigabytes_per_second']:.1f} GB/s, {row['gigaflops']:.0f} GFLOP/s | {threads} | "
            f"{1e3 * row['seconds']:.1f} | | {row['seconds'] / rows['headstart'][threads]['seconds']:.2f} | 1.00 | |"
        )
    lines += ["", *notes(report), "", *beside_limits(report), "", *facts(report), ""]
    return "\n".join(lines)


def notes(report: dict[str, Any]) -> list[str]:
    """What is to be said of the sides."""
    rows = report["rows"]
    missing = [title for side, title in TITLES.items() if side not in rows]
    left_out = [f"Not in this run, since its environment could not be made: {', '.join(missing)}.", ""]
    found = [*(left_out if missing else []), "Flower's actors, one per core, have a thread each, and keep the data."]
    if "pooled" in rows:
        whole = rows["pooled"]["1"]
        found += ["", f"Logistic regression of scikit-learn on the pooled examples: {100 * whole['accuracy']:.2f} % in "
                  f"{whole['seconds']:.1f} s, {whole['seconds'] / rows['limit']['1']['seconds']:.0f} times the limit "
                  "of a round."]  # fmt: skip
    return [*found, "", *NOTES]


def beside_limits(report: dict[str, Any]) -> list[str]:
    """A table of what headstart does beside rounds of heads."""
    lines = [
        "## Beside its limits",
        "",
        "Two threads; what cannot be done without is measured in the same process, the fastest of three.",
        "",
        "| | s | what it cannot do without | s | times that |",
        "|---|---|---|---|---|",
    ]
    for name, each in report["own"].items():
        title, bound = limits.TITLES[name]
        cpu = f" ({each['cpu']:.2f} of CPU)" if "cpu" in each else ""
        ratio = each["seconds"] / each["limit"]
        lines.append(f"| {title} | {each['seconds']:.2f}{cpu} | {bound} | {each['limit']:.2f} | {ratio:.2f} |")
    return lines


def facts(report: dict[str, Any]) -> list[str]:
    """What figures depend on."""
    machine = ", ".join(f"{name} {value}" for name, value in report["machine"].items())
    return [f"The machine: {machine}. Its load over the last quarter of an hour, these runs among it: "
            f"{report['load']:.1f}."]  # fmt: skip


def main(turns: str = "3", *chosen: str) -> None:
    """All sides, turn by turn."""
    found: dict[str, dict[str, list[dict[str, Any]]]] = {
        side: {str(threads): [] for threads in each[1]} for side, each in PEERS.items() if side in (chosen or PEERS)
    }
    with TemporaryDirectory() as temporary:
        pythons = {side: environment(Path(temporary) / side, PEERS[side][0]) for side in found}
        found = {side: each for side, each in found.items() if pythons[side] is not None}
        for turn in range(int(turns)):
            for side, by_threads in found.items():
                for threads, turned in by_threads.items():
                    turned.append(measured(pythons[side], side, int(threads)))
                    print(f"turn {turn + 1}: {side}, {threads} thread(s): {turned[-1]}", flush=True)
    rows = {
        side: {threads: medians(given) for threads, given in by_threads.items()} for side, by_threads in found.items()
    }
    own: dict[str, list[dict[str, float]]] = {}
    for turn in range(int(turns)):
        for side in OWN:
            for name, each in measured(Path(sys.executable), side, 2).items():
                own.setdefault(name, []).append(each)
                print(f"turn {turn + 1}: {name}: {each}", flush=True)
    beside = {name: medians(each) for name, each in own.items()}
    report = {"machine": machine(), "turns": int(turns), "load": os.getloadavg()[2], "rows": rows, "own": beside}
    (ROOT / "benchmarks" / "peers.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    (ROOT / "docs" / "peers.md").write_text(page(report), encoding="utf-8")


def medians(turns: list[dict[str, Any]]) -> dict[str, float]:
    """Of every figure, over the turns."""
    return {name: statistics.median(each[name] for each in turns) for name in turns[0]}


def of_headstart(side: str) -> dict[str, Any]:
    """One turn of what headstart does beside rounds of heads: figures by name."""
    found = getattr(limits, side)()
    return dict(found) if side == "startup" else {side: found}


if __name__ == "__main__":
    if sys.argv[1:2] == ["side"]:
        side = sys.argv[2]
        print(json.dumps(of_headstart(side) if side in OWN else globals()[side]()))
    else:
        main(*sys.argv[1:])
