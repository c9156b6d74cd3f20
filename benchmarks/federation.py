"""Rounds on Flower: nodes that fail and lie, and what a deployed round costs beside an empty one."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from statistics import mean, median
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import numpy as np
import psutil  # type: ignore[import-untyped]

from benchmarks.common import in_fresh_process, show

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
    from headstart.deploy.apps import simulated

    given: Any = message.content.config_records["headstart"]
    facts = json.loads(given["facts"])
    if facts["kind"] != "answer":
        return simulated(text, folder, message, context)
    number = int(Message.from_bytes(given["message"]).scalars["round"])
    rng = np.random.default_rng([seed, number, facts["client"]])
    draw = rng.random()
    if draw > FAIL + LIE:
        return simulated(text, folder, message, context)
    fault = "failure" if draw < FAIL else LIES[int(rng.integers(len(LIES)))]
    (folder / "faults").mkdir(exist_ok=True)
    (folder / "faults" / f"{number + 1}-{facts['client']} {fault}").touch()
    if fault == "failure":
        raise RuntimeError("the power is out")
    reply = simulated(text, folder, message, context)
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
APP = """\
[project]
name = "empty"
version = "1.0.0"
license = "Apache-2.0"
dependencies = ["flwr"]

[tool.flwr.app]
publisher = "headstart"

[tool.flwr.app.components]
serverapp = "empty.apps:server"
clientapp = "empty.apps:client"

[tool.flwr.app.config]
out = ""
nodes = 0
rounds = 0
"""
# Rounds of Flower's own `send_and_receive`, and rounds that look for replies as often as headstart does.
EMPTY = '''\
"""Rounds of empty messages."""

import json
import time
from pathlib import Path

from flwr.app import Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp

server = ServerApp()
client = ClientApp()


@server.main()
def main(grid, context):
    config = context.run_config
    while len(nodes := list(grid.get_node_ids())) < int(config["nodes"]):
        time.sleep(0.5)

    def messages():
        return [Message(RecordDict(), node, "query") for node in nodes]

    def own():
        grid.send_and_receive(messages())

    def polled():
        waiting, pause = set(grid.push_messages(messages())), 0.02
        while waiting:
            replies = {reply.metadata.reply_to_message_id for reply in grid.pull_messages(list(waiting))}
            waiting -= replies
            pause = 0.02 if replies else min(1.5 * pause, 0.5)
            time.sleep(pause)

    seconds = {"own": [], "polled": []}
    for _ in range(int(config["rounds"])):
        for name, play in (("own", own), ("polled", polled)):
            start = time.perf_counter()
            play()
            seconds[name].append(time.perf_counter() - start)
    Path(str(config["out"])).write_text(json.dumps(seconds))


@client.query()
def answer(message, context):
    return Message(RecordDict(), reply_to=message)
'''


def deployment(rounds: str = "") -> None:
    """A SuperLink and four SuperNodes with TLS and node authentication on this machine; rounds: of what trains."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that what was started is ended
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in ORDER}
    empty_rounds = int(rounds or EMPTY_ROUNDS)
    with TemporaryDirectory() as temporary:
        root = Path(temporary)
        test = cut_silos(root)
        with federation_of(root, test) as (folder, wire):
            run_empty(folder, root / "first.json", 1)  # until all nodes are there
            before = wire.seen
            time.sleep(IDLE)
            idle = [(late - early) / IDLE for early, late in zip(before, wire.seen, strict=True)]
            for place, name in enumerate(ORDER):
                before = wire.seen
                if name == "empty":
                    result = run_empty(folder, root / f"empty-{place}.json", empty_rounds)
                else:
                    result = run_stage(folder, root / f"run-{name}", name, rounds)
                after = wire.seen
                found[name].append({**result, "wire_up": after[0] - before[0], "wire_down": after[1] - before[1]})
                print(f"{name}: {found[name][-1]}", file=sys.stderr, flush=True)
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
    from headstart.engine.body import Body

    partition = {"kind": "dirichlet", "clients": len(NODES), "alpha": 1.0, "test": "follow"}
    data = {"dataset": "mnist-mini", "partition": partition}
    recipe = Recipe.parse({"data": data, "model": LITE0, "stages": [{"method": "fedncm"}]})
    federation = Federation.of(recipe)
    body = Body(recipe.model, federation.dataset)
    train, test = np.asarray(body.features("train")), np.asarray(body.features("test"))
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


@contextmanager
def federation_of(root: Path, test: Path) -> Iterator[tuple[Path, Wire]]:
    """A SuperLink and its nodes, which reach it through a counting proxy; ended with all their processes."""
    from headstart.deploy.folder import init
    from headstart.deploy.guard import app_digest

    app = root / "app"
    (app / "empty").mkdir(parents=True)
    (app / "pyproject.toml").write_text(APP, encoding="utf-8")
    (app / "empty" / "__init__.py").touch()
    (app / "empty" / "apps.py").write_text(EMPTY, encoding="utf-8")
    folder, port = root / "federation", free_ports(len(NODES) + 1)
    init(folder, deployed_recipe("fedncm"), NODES, "127.0.0.1", port)
    started: list[subprocess.Popen[bytes]] = []
    wire = Wire(port)
    try:
        started.append(start(folder / "superlink.sh"))
        wait_for(port)
        home = folder / "state" / "run"
        home.mkdir(parents=True)
        certificate = folder / "certificates" / "ca.pem"
        address = f'address = "127.0.0.1:{port}"\nroot-certificates = "{certificate}"\n'
        (home / "config.toml").write_text(f"[superlink.federation]\n{address}", encoding="utf-8")
        put(folder / "run.sh", "test", str(test))
        for name in NODES:
            flower(folder, "supernode", "register", str(folder / "keys" / f"{name}.pub"), "federation", "--name", name)
            script = folder / f"node-{name}.sh"
            put(script, "port", str(wire.port))
            put(script, "data", str(root / f"{name}.npz"))
            put(script, "app", f"{app_digest(folder / 'app')},{app_digest(app)}")
            started.append(start(script))
        yield folder, wire
    finally:
        for process in reversed(started):  # nodes say goodbye while there is a SuperLink
            end(process)
        wire.close()


def run_empty(folder: Path, out: Path, rounds: int) -> dict[str, Any]:
    """Empty rounds; seconds of each, by how the server looks for replies."""
    began = time.perf_counter()
    values = out.with_suffix(".toml")
    values.write_text(f'out = "{out}"\nnodes = {len(NODES)}\nrounds = {rounds}\n', encoding="utf-8")
    app = str(folder.parent / "app")
    answer = flower(folder, "run", app, "federation", "--run-config", str(values), "--format", "json")
    run = re.search(r'"run-id": "(\d+)"', answer)
    assert run is not None, answer
    flower(folder, "log", run[1], "federation")
    found: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
    return {**found, "messages": 2 * rounds * len(NODES), "seconds": time.perf_counter() - began}


def run_stage(folder: Path, out: Path, name: str, rounds: str) -> dict[str, Any]:
    """One of the stages by `run.sh`; seconds of each round, and the ledger's bytes."""
    began = time.perf_counter()
    recipe = deployed_recipe(name, rounds)
    (folder / "recipe.toml").write_text(recipe.to_toml(), encoding="utf-8")
    put(folder / "run.sh", "out", str(out))
    subprocess.run([folder / "run.sh"], env=environment(), check=True, capture_output=True, timeout=600)
    summary = json.loads((out / "summary.json").read_text(encoding="utf-8"))
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    clock = [0.0, *(line["seconds"] for line in lines)]
    found = {"rounds": np.diff(clock).tolist(), "accuracy": summary["accuracy"]}
    found |= {key: summary[key] for key in ("bytes_up", "bytes_down")}
    assert not summary["stages"][0]["dropped"]
    messages = len(NODES) * (1 + len(lines))  # one to join
    return {**found, "messages": messages, "seconds": time.perf_counter() - began}


class Wire:
    """A proxy between nodes and the SuperLink that counts bytes; it sees what crosses the network, encrypted."""

    def __init__(self, target: int) -> None:
        self.target, self.seen = target, (0, 0)
        """Bytes up and down."""
        self.loop = asyncio.new_event_loop()
        self.server = self.loop.run_until_complete(asyncio.start_server(self._connected, "127.0.0.1", 0))
        self.port: int = self.server.sockets[0].getsockname()[1]
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()

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


def environment() -> dict[str, str]:
    """With this interpreter's commands, and the cores shared by all processes."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1"}


def flower(folder: Path, *arguments: str) -> str:
    """What `flwr` answers."""
    home = {"FLWR_HOME": str(folder / "state" / "run"), "FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1"}
    command = ["flwr", *arguments]
    done = subprocess.run(command, env=environment() | home, check=True, capture_output=True, text=True, timeout=600)
    return done.stdout


def put(script: Path, variable: str, value: str) -> None:
    """Set a variable at the top of a script."""
    text, changed = re.subn(rf"(?m)^{variable}=\S*", f"{variable}={value}", script.read_text(encoding="utf-8"), count=1)
    assert changed
    script.write_text(text, encoding="utf-8")


def start(script: Path) -> subprocess.Popen[bytes]:
    """A script in a process group of its own, with a log beside it."""
    with script.with_suffix(".log").open("wb") as log:
        return subprocess.Popen([script], env=environment(), stdout=log, stderr=log, start_new_session=True)


def end(process: subprocess.Popen[bytes]) -> None:
    """Ask a script to stop, then end what is left of its processes, some of which are in groups of their own."""
    family = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(30)
    if process.poll() is None:
        process.kill()
    for each in family:
        with suppress(psutil.NoSuchProcess):
            each.kill()
    process.wait()


def free_ports(count: int) -> int:
    """The first of so many free ports in a row."""
    rng = np.random.default_rng()
    while True:
        first = int(rng.integers(20_000, 60_000))
        try:
            for port in range(first, first + count):
                socket.create_server(("127.0.0.1", port)).close()
        except OSError:
            continue
        return first


def wait_for(port: int, seconds: float = 120) -> None:
    """Until somebody listens at a port."""
    until = time.monotonic() + seconds
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
            return
        except OSError:
            if time.monotonic() > until:
                raise
            time.sleep(0.5)


def main() -> None:
    """Everything."""
    soak()
    deployment()


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
