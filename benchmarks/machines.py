"""Processes of a deployment on this machine, and an app of empty messages."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil  # type: ignore[import-untyped]

from headstart.channel.secure.graph import LARGEST_CLIQUE

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


@dataclass
class Machines:
    """A SuperLink and its nodes, started from a folder of `headstart deploy init`."""

    folder: Path
    app: Path
    """The one of empty messages."""
    names: tuple[str, ...]
    link: list[subprocess.Popen[bytes]] = field(default_factory=list)
    nodes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def run_empty(self, out: Path, rounds: int) -> dict[str, Any]:
        """Empty rounds; seconds of each, by how the server looks for replies."""
        began = time.perf_counter()
        values = out.with_suffix(".toml")
        values.write_text(f'out = "{out}"\nnodes = {len(self.names)}\nrounds = {rounds}\n', encoding="utf-8")
        arguments = ("federation", "--run-config", str(values), "--format", "json")
        answer = flower(self.folder, "run", str(self.app), *arguments)
        run = re.search(r'"run-id": "(\d+)"', answer)
        assert run is not None, answer
        flower(self.folder, "log", run[1], "federation")
        found: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
        messages = sum(map(len, found.values())) * len(self.names)
        return {**found, "messages": messages, "seconds": time.perf_counter() - began}

    def run_recipe(self, recipe: Any, out: Path) -> dict[str, Any]:
        """A recipe of one stage by `run.sh`; seconds of each round, and the ledger's bytes."""
        began = time.perf_counter()
        (self.folder / "recipe.toml").write_text(recipe.to_toml(), encoding="utf-8")
        put(self.folder / "run.sh", "out", str(out))
        subprocess.run([self.folder / "run.sh"], env=environment(), check=True, capture_output=True, timeout=600)
        summary = json.loads((out / "summary.json").read_text(encoding="utf-8"))
        lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
        clock = [0.0, *(line["seconds"] for line in lines)]
        found = {"rounds": np.diff(clock).tolist(), "accuracy": summary["accuracy"]}
        found |= {key: summary[key] for key in ("bytes_up", "bytes_down")}
        assert not summary["stages"][0]["dropped"]
        stage = recipe.stages[0]
        exchanges = exchanges_of(len(self.names), stage.survivors(len(self.names))) if stage.secure else 1
        messages = len(self.names) * (1 + exchanges * len(lines))  # one to join
        return {**found, "messages": messages, "seconds": time.perf_counter() - began}

    def cpu(self) -> tuple[float, float]:
        """Seconds that the processes of the SuperLink and of the nodes have computed, those that ended included."""
        return sum(map(cpu_seconds, self.link)), sum(map(cpu_seconds, self.nodes))


@contextmanager
def federation_of(
    root: Path,
    recipe: Any,
    data: Mapping[str, Path],
    test: Path,
    through: Callable[[int], int] = lambda port: port,
    guarded: bool = True,
) -> Iterator[Machines]:
    """A SuperLink and its nodes; ended with all their processes.

    data: of every node; through: the port at which nodes reach that of the SuperLink; guarded: as headstart starts
    them, or by Flower's own commands with all its defaults.
    """
    from headstart.deploy.folder import init
    from headstart.deploy.guard import app_digest

    app = root / "app"
    (app / "empty").mkdir(parents=True)
    (app / "pyproject.toml").write_text(APP, encoding="utf-8")
    (app / "empty" / "__init__.py").touch()
    (app / "empty" / "apps.py").write_text(EMPTY, encoding="utf-8")
    folder, port, names = root / "federation", free_ports(len(data) + 1), tuple(data)
    init(folder, recipe, names, "127.0.0.1", port)
    if not guarded:
        for script in (folder / "superlink.sh", *(folder / f"node-{name}.sh" for name in names)):
            unguard(script)
    machines = Machines(folder, app, names)
    try:
        machines.link.append(start(folder / "superlink.sh"))
        wait_for(port)
        home = folder / "state" / "run"
        home.mkdir(parents=True)
        certificate = folder / "certificates" / "ca.pem"
        address = f'address = "127.0.0.1:{port}"\nroot-certificates = "{certificate}"\n'
        (home / "config.toml").write_text(f"[superlink.federation]\n{address}", encoding="utf-8")
        put(folder / "run.sh", "test", str(test))
        reached = through(port)
        for name in names:
            flower(folder, "supernode", "register", str(folder / "keys" / f"{name}.pub"), "federation", "--name", name)
            script = folder / f"node-{name}.sh"
            put(script, "port", str(reached))
            put(script, "data", str(data[name]))
            put(script, "app", f"{app_digest(folder / 'app')},{app_digest(app)}")
            machines.nodes.append(start(script))
        yield machines
    finally:
        for process in (*machines.nodes, *machines.link):  # nodes say goodbye while there is a SuperLink
            end(process)


def exchanges_of(clients: int, threshold: int) -> int:
    """Of a secure sum in which nobody drops out."""
    return 2 if threshold == clients else 4 if clients <= LARGEST_CLIQUE else 5


def unguard(script: Path) -> None:
    """Start Flower's own command, with its defaults."""
    text = script.read_text(encoding="utf-8")
    text, changed = re.subn(r'python3 -P -m headstart.deploy.guard (supernode "\$app"|superlink)', _command, text)
    assert changed == 1
    text, changed = re.subn(r"(?m)^export FLWR_SUPEREXEC_TASK_POLL_INTERVAL=.*\n", "", text)
    assert changed <= 1
    script.write_text(text, encoding="utf-8")


def _command(match: re.Match[str]) -> str:
    return f"flower-{match[1].split()[0]}"


def cpu_seconds(process: subprocess.Popen[bytes]) -> float:
    """Of a process and all that it started."""
    total, root = 0.0, psutil.Process(process.pid)
    for each in (root, *root.children(recursive=True)):
        with suppress(psutil.NoSuchProcess):
            total += sum(each.cpu_times()[:4])  # user and system, its own and of children that ended
    return total


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
