"""Rounds on Flower: nodes that fail and lie, and what a deployed round costs beside an empty one."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import signal
import sys
import threading
import time
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from statistics import mean, median
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.common import in_fresh_process, show
from benchmarks.machines import federation_of

if TYPE_CHECKING:  # Flower takes seconds to load
    from flwr.app import Context
    from flwr.app import Message as FlowerMessage

MNIST = {"dataset": "mnist-mini", "partition": {"kind": "dirichlet", "clients": 100, "alpha": 0.5}}
LITE0 = {"backbone": "efficientnet-lite0"}

# -------------------------------------------------------------------------------------------- nodes that fail and lie

FAIL, LIE = 0.20, 0.05
LIES = ("random bytes", "huge arrays", "a wrong shape")
HUGE = 1e6


def soak(seeds: str = "3", rounds: str = "50") -> None:
    """Rounds with faulty nodes, for so many seeds of faults, beside the same recipe without faults in process."""
    clean = in_fresh_process("benchmarks.federation", "clean_run", rounds)
    rows, reasons = [], []
    for seed in range(int(seeds)):
        found = in_fresh_process("benchmarks.federation", "faulty_run", seed, rounds)
        made, dropped = found["made"], found["dropped"]
        cells = [f"{dropped.get(kind, 0)} of {made.get(kind, 0)}" for kind in ("failure", *LIES)]
        accuracies = (f"{100 * found['accuracy']:.1f}", f"{100 * clean['accuracy']:.1f}")
        seconds = (f"{found['seconds']:.0f}", f"{clean['seconds']:.0f}")
        rows.append((seed, found["rounds"], *cells, dropped.get("none", 0), *accuracies, *seconds))
        reasons += [(seed, kind, why, count) for (kind, why), count in found["reasons"]]
    show(
        f"FedAvg of the head, MNIST / Lite0, 100 nodes on Flower's simulation, 20 in each of {rounds} rounds, of which "
        f"{FAIL:.0%} raise an error and {LIE:.0%} send garbage (huge: {HUGE:g} times normal numbers): dropped of "
        "those made to",
        ("seed", "rounds finished", "raised", *LIES, "dropped without a fault", "accuracy, %", "without faults, %",
         "seconds", "without faults, in process"),
        rows,
    )  # fmt: skip
    show("Why they were dropped", ("seed", "fault", "reason in summary.json, numbers as #", "times"), reasons)


def soak_recipe(rounds: str) -> Any:
    from headstart.config.recipe import Recipe

    stage = {"method": "fedavg", "train": "head", "rounds": int(rounds), "evaluate_every": int(rounds)}
    stage |= {"clients_per_round": 20, "lr": 0.01, "batch_size": 16}
    return Recipe.parse({"data": MNIST, "model": LITE0, "stages": [stage]})


def clean_run(rounds: str) -> None:
    """In process, without faults; prints accuracy and seconds."""
    from headstart.runner import run

    (stage,) = run(soak_recipe(rounds)).summary["stages"]
    print(json.dumps({"accuracy": stage["accuracy"], "seconds": stage["seconds"]}))


def faulty_run(seed: str, rounds: str) -> None:
    """As `headstart.deploy.apps.simulate`, with nodes that fail and lie; prints what came of it."""
    from flwr.clientapp import ClientApp
    from flwr.serverapp import Grid, ServerApp
    from flwr.simulation import run_simulation

    from headstart.data import Federation
    from headstart.engine.grid import Nodes
    from headstart.runner import Result, run_federation

    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    logging.getLogger("flwr").setLevel(logging.CRITICAL)
    logging.getLogger("headstart").setLevel(logging.ERROR)
    recipe = soak_recipe(rounds)
    federation, text = Federation.of(recipe), recipe.to_toml()
    found: list[Result] = []
    server, client = ServerApp(), ClientApp()
    with TemporaryDirectory() as temporary:
        folder = Path(temporary)

        @server.main()
        def main(grid: Grid, context: Context) -> None:
            nodes = Nodes(grid, recipe, {name: number for number, name in enumerate(federation.names)})
            nodes.available(federation.n_clients)
            found.append(run_federation(recipe, federation, None, False, None, nodes, folder))

        @client.query()
        def answer(message: FlowerMessage, context: Context) -> FlowerMessage:
            from benchmarks.federation import faulty

            return faulty(int(seed), text, folder, message, context)

        config: Any = {
            "init_args": {"include_dashboard": False, "logging_level": "error", "log_to_driver": False},
            "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
        }
        run_simulation(server, client, federation.n_clients, backend_config=config)
        faults = dict(path.name.split(" ", 1) for path in (folder / "faults").iterdir())
    (stage,) = found[0].summary["stages"]
    number = {name: str(place) for place, name in enumerate(federation.names)}
    dropped, reasons = Counter[str](), Counter[tuple[str, str]]()
    for line in stage["dropped"]:
        kind = faults.get(f"{line['round']}-{number[line['clients']]}", "none")
        dropped[kind] += 1
        reasons[kind, re.sub(r"\d+(\.\d+)?(e[+-]?\d+)?", "#", line["why"])[:80]] += 1
    kept = {"rounds": stage["rounds"], "accuracy": stage["accuracy"], "seconds": stage["seconds"]}
    print(json.dumps(kept | {"made": Counter(faults.values()), "dropped": dropped, "reasons": reasons.most_common()}))


def faulty(seed: int, text: str, folder: Path, message: FlowerMessage, context: Context) -> FlowerMessage:
    """The answer of a simulated node, or a fault that the round and the client decide; each leaves a file."""
    from headstart.core.message import Message
    from headstart.deploy.apps import simulated_node
    from headstart.engine.respond import respond

    def answered() -> FlowerMessage:
        node = simulated_node(text, folder)
        return respond(message, node, node.federation.names[int(context.node_config["partition-id"])])

    given: Any = message.content.config_records["headstart"]
    facts = json.loads(given["facts"])
    if facts["kind"] != "answer":
        return answered()
    number = int(Message.from_bytes(given["message"]).scalars["round"])
    rng = np.random.default_rng([seed, number, facts["client"]])
    draw = rng.random()
    if draw > FAIL + LIE:
        return answered()
    fault = "failure" if draw < FAIL else LIES[int(rng.integers(len(LIES)))]
    (folder / "faults").mkdir(exist_ok=True)
    (folder / "faults" / f"{number + 1}-{facts['client']} {fault}").touch()
    if fault == "failure":
        raise RuntimeError("the power is out")
    reply = answered()
    record: Any = reply.content.config_records["headstart"]
    said = Message.from_bytes(record["message"])
    if fault == "random bytes":
        record["message"] = rng.bytes(len(record["message"]))
    elif fault == "huge arrays":
        huge = {n: (HUGE * rng.standard_normal(a.shape)).astype(a.dtype) for n, a in said.arrays.items()}
        record["message"] = Message(huge, said.scalars).to_bytes()
    else:
        record["message"] = Message({n: a[..., :-1] for n, a in said.arrays.items()}, said.scalars).to_bytes()
    return reply


# -------------------------------------------------------------------------------------------------------- a deployment

NODES = ("north", "east", "south", "west")
EMPTY_ROUNDS = 5
IDLE = 30
TRAINED = {"train": "head", "rounds": 5, "head_init": "zeros"}
STAGES: dict[str, dict[str, Any]] = {
    "fedncm": {},
    "fedcof": {},
    "fedavg": {**TRAINED, "lr": 0.01, "batch_size": 16},
    "fedmezo": {**TRAINED, "lr": 0.001},
}
ORDER = ("empty", "fedncm", "fedcof", "empty", "fedavg", "fedmezo", "empty")


def deployment(rounds: str = "") -> None:
    """A SuperLink and four SuperNodes with TLS and node authentication on this machine; rounds: of what trains."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that what was started is ended
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in ORDER}
    empty_rounds = int(rounds or EMPTY_ROUNDS)
    with TemporaryDirectory() as temporary:
        root = Path(temporary)
        test = cut_silos(root)
        wire = Wire()
        data = {name: root / f"{name}.npz" for name in NODES}
        with federation_of(root, deployed_recipe("fedncm"), data, test, wire.towards) as machines:
            machines.run_empty(root / "first.json", 1)  # until all nodes are there
            before = wire.seen
            time.sleep(IDLE)
            idle = [(late - early) / IDLE for early, late in zip(before, wire.seen, strict=True)]
            for place, name in enumerate(ORDER):
                before = wire.seen
                if name == "empty":
                    result = machines.run_empty(root / f"empty-{place}.json", empty_rounds)
                else:
                    result = machines.run_recipe(deployed_recipe(name, rounds), root / f"run-{name}")
                after = wire.seen
                found[name].append({**result, "wire_up": after[0] - before[0], "wire_down": after[1] - before[1]})
                print(f"{name}: {found[name][-1]}", file=sys.stderr, flush=True)
        wire.close()
    rows = []
    for kind, what in (("own", "nothing, `send_and_receive`"), ("polled", "nothing, looking as often as headstart")):
        seconds = [one for each in found["empty"] for one in each[kind]]
        rows.append((what, len(seconds), *times(seconds)))
    for name in STAGES:
        (each,) = found[name]
        rows.append((name, len(each["rounds"]), *times(each["rounds"])))
    show(
        "A deployed round, 4 SuperNodes and a SuperLink on one machine of two cores, TLS and node authentication, "
        f"MNIST / Lite0 features, in the order {', '.join(ORDER)}; seconds with the test on the server",
        ("what the nodes do", "rounds", "median s", "least", "most"),
        rows,
    )
    rows = []
    for name in (*STAGES, "empty"):
        each = {key: mean(run[key] for run in found[name]) for key in ("wire_up", "wire_down", "messages", "seconds")}
        cells = []
        for way, rate in zip(("up", "down"), idle, strict=True):
            ledger, crossed = mean(run.get(f"bytes_{way}", 0) for run in found[name]), each[f"wire_{way}"]
            beyond = (crossed - rate * each["seconds"] - ledger) / each["messages"]
            cells += [f"{value / 1e3:,.1f}" for value in (ledger, crossed, beyond)]
        what = "nothing" if name == "empty" else name
        rows.append((what, f"{each['messages']:.0f}", f"{each['seconds']:.0f}", *cells))
    show(
        "Bytes of whole runs, from `flwr run` to its end: the ledger's, and those that crossed the connections between "
        "nodes and SuperLink, counted by a proxy between them (TLS, HTTP, joining, the app, asking for messages); idle "
        f"nodes make {idle[0] / 1e3:.2f} kB/s up and {idle[1] / 1e3:.2f} kB/s down, which the differences leave out",
        ("method", "messages to nodes", "seconds", "ledger, kB up", "wire, kB up", "difference per message, kB up",
         "ledger, kB down", "wire, kB down", "difference per message, kB down"),
        rows,
    )  # fmt: skip


def times(seconds: list[float]) -> tuple[str, ...]:
    """Median, least and most."""
    return tuple(f"{value:.1f}" for value in (median(seconds), min(seconds), max(seconds)))


def cut_silos(root: Path) -> Path:
    """Features of the nodes, unlike each other, in a file each; returns the file of the server's test examples."""
    from headstart.config.recipe import Recipe
    from headstart.data import Federation
    from headstart.engine.model_store import ModelStore

    partition = {"kind": "dirichlet", "clients": len(NODES), "alpha": 1.0, "test": "follow"}
    data = {"dataset": "mnist-mini", "partition": partition}
    recipe = Recipe.parse({"data": data, "model": LITE0, "stages": [{"method": "fedncm"}]})
    federation = Federation.of(recipe)
    store = ModelStore(recipe.model, federation.dataset)
    train, test = np.asarray(store.features("train")), np.asarray(store.features("test"))
    labels, test_labels = federation.dataset.train.labels, federation.dataset.test.labels
    for client, name in enumerate(NODES):
        assert federation.test_owners is not None
        mine, tested = federation.owners == client, federation.test_owners == client
        split = np.repeat([0, 2], [int(mine.sum()), int(tested.sum())])
        X, y = np.concatenate([train[mine], test[tested]]), np.concatenate([labels[mine], test_labels[tested]])
        np.savez(root / f"{name}.npz", X=X, y=y, split=split)
    path = root / "test.npz"
    np.savez(path, X=test, y=test_labels, split=np.full(len(test), 2))
    return path


def deployed_recipe(name: str, rounds: str = "") -> Any:
    from headstart.config.recipe import Recipe

    stage = {"method": name, **STAGES[name]}
    if rounds and "rounds" in stage:
        stage["rounds"] = int(rounds)
    data = {"dataset": "of the nodes", "classes": list(range(10))}
    return Recipe.parse({"name": name, "data": data, "model": {"backbone": "features"}, "stages": [stage]})


class Wire:
    """A proxy between nodes and the SuperLink that counts bytes; it sees what crosses the network, encrypted."""

    def __init__(self) -> None:
        self.target, self.seen = 0, (0, 0)
        """The SuperLink's port; bytes up and down."""
        self.loop = asyncio.new_event_loop()
        self.server = self.loop.run_until_complete(asyncio.start_server(self._connected, "127.0.0.1", 0))
        self.port: int = self.server.sockets[0].getsockname()[1]
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()

    def towards(self, target: int) -> int:
        """The proxy's port, from now on of the SuperLink at ``target``."""
        self.target = target
        return self.port

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            answers, asks = await asyncio.open_connection("127.0.0.1", self.target)
        except OSError:
            writer.close()
            return
        await asyncio.gather(self._copy(reader, asks, 0), self._copy(answers, writer, 1))

    async def _copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, way: int) -> None:
        try:
            while data := await reader.read(1 << 16):
                up, down = self.seen
                self.seen = (up + len(data), down) if way == 0 else (up, down + len(data))
                writer.write(data)
                await writer.drain()
        except OSError:
            pass  # either side may hang up
        finally:
            writer.close()

    def close(self) -> None:
        """Stop."""
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(10)


# ------------------------------------------------------------------------------------------ seconds of a deployed round

PLAIN = {"method": "fedavg", "train": "head", "head_init": "zeros", "lr": 0.01, "batch_size": 64}
EXAMPLES, DIM = 500, 1280


def rounds(nodes: str = "3", repeats: str = "3", count: str = "5") -> None:
    """Rounds of FedAvg on features, plain and secure, beside empty rounds of Flower's own commands, in turns."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    names = tuple(f"node-{number}" for number in range(int(nodes)))
    seconds: dict[str, list[float]] = {"own": [], "polled": [], "plain": [], "secure": []}
    spent: dict[str, list[tuple[float, float, int, int]]] = {"empty": [], "plain": [], "secure": []}
    with TemporaryDirectory() as temporary, ExitStack() as stack:
        root = Path(temporary)
        data, test = random_silos(root, names)
        first = round_recipe(int(count), False)
        flower = stack.enter_context(federation_of(root / "flower", first, data, test, guarded=False))
        ours = stack.enter_context(federation_of(root / "headstart", first, data, test))
        flower.run_empty(root / "first.json", 1)  # until all nodes are there
        for turn in range(int(repeats)):
            for name in spent:
                machines = flower if name == "empty" else ours
                before = machines.cpu()
                if name == "empty":
                    found = machines.run_empty(root / f"empty-{turn}.json", int(count))
                    for kind in ("own", "polled"):
                        seconds[kind] += found[kind]
                else:
                    recipe = round_recipe(int(count), name == "secure", turn)
                    found = machines.run_recipe(recipe, root / f"run-{name}-{turn}")
                    seconds[name] += found["rounds"]
                link, node = (late - early for early, late in zip(before, machines.cpu(), strict=True))
                played = len(found["own"]) * 2 if name == "empty" else len(found["rounds"])
                spent[name].append((link, node, played, found["messages"]))
                print(f"{turn} {name}: {found}, {spent[name][-1]}", file=sys.stderr, flush=True)
    show_rounds(int(nodes), seconds, spent)


def show_rounds(
    nodes: int, seconds: dict[str, list[float]], spent: dict[str, list[tuple[float, float, int, int]]]
) -> None:
    """The table of `rounds`."""
    what = {
        "own": "nothing: Flower's commands, `send_and_receive`",
        "polled": "nothing: Flower's commands, looking as often as headstart",
        "plain": "FedAvg on features",
        "secure": "FedAvg on features, secure sums",
    }
    least, table = median(seconds["own"]), []
    for name, values in seconds.items():
        link, node, played, messages = (sum(column) for column in zip(*spent.get(name, spent["empty"]), strict=True))
        cells = f"{link / played:.2f}", f"{node / played:.2f}", f"{node / messages:.2f}"
        table.append((what[name], len(values), *times(values), f"{median(values) / least:.2f}", *cells))
    show(
        f"Seconds of a deployed round, {nodes} SuperNodes and a SuperLink on one machine, TLS and node keys; headstart "
        "and Flower's own commands in turns. CPU seconds are those of whole runs, from `flwr run` to its end, starting "
        "the ServerApp and joining included",
        ("what the nodes do", "rounds", "median s", "least", "most", "ratio", "CPU s of the SuperLink per round",
         "CPU s of the nodes per round", "CPU s of a node per message"),
        table,
    )  # fmt: skip


def random_silos(root: Path, names: tuple[str, ...]) -> tuple[dict[str, Path], Path]:
    """Features of every node around the means of ten classes, in a file each, and the server's test examples."""
    rng = np.random.default_rng(0)
    means = rng.standard_normal((10, DIM), np.float32)
    paths = {name: root / f"{name}.npz" for name in names}
    test = root / "test.npz"
    for path in (*paths.values(), test):
        y = rng.integers(0, 10, EXAMPLES)
        X = means[y] + 3 * rng.standard_normal((EXAMPLES, DIM), np.float32)
        np.savez(path, X=X, y=y, split=np.full(EXAMPLES, 2 if path == test else 0))
    return paths, test


def round_recipe(count: int, secure: bool, seed: int = 0) -> Any:
    """A stage of so many rounds; seed: nodes answer a protected recipe once, so that every run needs another."""
    from headstart.config.recipe import Recipe

    stage = {**PLAIN, "rounds": count, "secure": secure}
    data = {"dataset": "of the nodes", "classes": list(range(10))}
    return Recipe.parse({"seed": seed, "data": data, "model": {"backbone": "features"}, "stages": [stage]})


def main() -> None:
    """Everything."""
    soak()
    deployment()
    rounds()
    rounds("8")


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
