"""What tests with the real processes of a federation share: processes that end whatever happens, data, and figures."""

import csv
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file
from sklearn.datasets import load_digits

from headstart.config.recipe import Recipe
from headstart.deploy.admit import Server, add, init_server
from headstart.deploy.kit import init_node

NODES = ("a", "b", "c")
PATIENCE = 240.0
TRAINING = {"rounds": 2, "lr": 0.01, "batch_size": 64, "deadline": 120, "evaluate_every": 10, "min_replies": 1}


def wait_for(what: Callable[[], Any], seconds: float = PATIENCE, pause: float = 0.2) -> Any:
    """What it returns, once that is true."""
    until = time.monotonic() + seconds
    while not (found := what()):
        assert time.monotonic() < until, f"nothing happened within {seconds:g} s"
        time.sleep(pause)
    return found


# Blocks of ports for this process, none twice: a port of a node that has not been started is nobody else's.
_PORTS = iter(range(21000 + os.getpid() * 160 % 10000, 40000, 16))


def free_ports(count: int) -> int:
    """The first of so many ports in a row that nobody listens on."""
    assert count <= 16
    for first in _PORTS:
        with suppress(OSError), ExitStack() as stack:
            for port in range(first, first + count):
                stack.enter_context(socket.create_server(("127.0.0.1", port)))
            return first
    raise AssertionError("no free ports")


def own_address() -> str:
    """Of this machine as others see it, so that what connects there is not on the loopback address; or none else."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as one:
        try:
            one.connect(("192.0.2.1", 9))  # which sends nothing
        except OSError:
            return "127.0.0.1"
        return str(one.getsockname()[0])


class Processes:
    """Processes that are started in a folder, and all that those start."""

    def __init__(self, home: Path) -> None:
        self.home, self.logs = home, home / "logs"
        self.logs.mkdir()
        self.environment = {
            **os.environ,
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "HEADSTART_CACHE": str(home / "cache"),
            "HEADSTART_FEDERATION": str(home),
            "OMP_NUM_THREADS": "1",
        }
        self.started: list[subprocess.Popen[bytes]] = []

    def start(self, *command: str | Path, log: str, **environment: str) -> subprocess.Popen[bytes]:
        """Start something in a process group of its own; what it says is in a file."""
        with (self.logs / log).open("ab") as file:
            process = subprocess.Popen(
                [str(part) for part in command], stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT,
                env=self.environment | environment, start_new_session=True,
            )  # fmt: skip
        self.started.append(process)
        return process

    def log(self, name: str) -> str:
        return (self.logs / name).read_text(errors="replace")

    def processes(self, holds: str = "", command: str = "") -> list[int]:
        """Processes of this federation by what is in their environment and in their command line."""
        found = []
        for entry in Path("/proc").iterdir():
            try:
                environment = (entry / "environ").read_bytes().split(b"\0") if entry.name.isdigit() else []
                line = (entry / "cmdline").read_bytes() + (entry / "comm").read_bytes()
            except OSError:
                continue
            mine = f"HEADSTART_FEDERATION={self.home}".encode() in environment
            if mine and command.encode() in line and (not holds or holds.encode() in environment):
                found.append(int(entry.name))
        return found

    def signal(self, processes: list[int], number: int) -> None:
        for process in processes:
            with suppress(ProcessLookupError):
                os.kill(process, number)

    def stop(self) -> None:
        """End everything, whatever state it is in."""
        until = time.monotonic() + 60
        while (left := self.processes()) and time.monotonic() < until:
            self.signal(left, signal.SIGKILL)
            for process in self.started:
                process.poll()
            time.sleep(0.1)
        for process in self.started:
            process.wait(10)


class Commands(Processes):
    """The folders of a server and of its nodes, and the commands that run there."""

    def __init__(
        self, home: Path, recipe: Recipe | None = None, host: str = "127.0.0.1", names: Sequence[str] = NODES,
        port: int | None = None,
    ) -> None:  # fmt: skip
        super().__init__(home)
        self.environment["PATH"] = "/usr/bin:/bin"  # as a service manager has it, without Flower's commands
        self.server, self.data, self.names = home / "server", home / "data", names
        self.data.mkdir()
        silos(self.data)
        init_server(self.server, recipe or recipe_of(self.data, {"method": "fedncm"}), host, port or free_ports(1))
        add(Server.load(self.server), [init_node(home / name, name) for name in names])

    def command(self, log: str, *words: str | Path, prefix: Sequence[str] = ()) -> subprocess.Popen[bytes]:
        """Start a command of headstart; prefix: what it is started by."""
        return self.start(*prefix, sys.executable, "-m", "headstart.cli", *words, log=log)

    def node(self, name: str, *options: str, prefix: Sequence[str] = (), data: str = "") -> subprocess.Popen[bytes]:
        """Start a node; data: of another one, by its name."""
        kit, path = self.server / "kits" / f"{name}.kit", self.data / f"{data or name}.npz"
        words = ("node", "run", kit, "--data", path, "--folder", self.home / name, *options)
        return self.command(name, *words, prefix=prefix)

    def said(self, *words: str | Path) -> str:
        """What a command says that ends at once."""
        log = "-".join(map(str, words[:2]))
        assert self.command(log, *words).wait(60) == 0, self.log(log)
        return self.log(log)

    def of_node(self, name: str, command: str = "") -> list[int]:
        """The processes of a node's SuperNode."""
        return self.processes(f"FLWR_HOME={self.home}/{name}/state/flower", command)

    def stop(self) -> None:
        """End everything: first it may say goodbye."""
        for process in self.started:
            with suppress(ProcessLookupError):
                process.send_signal(signal.SIGTERM)
        for process in self.started:
            with suppress(subprocess.TimeoutExpired):
                process.wait(60)
        super().stop()


def silos(folder: Path) -> None:
    """Digits in three parts of different classes: all in one file, and each in its own."""
    features, labels = load_digits(return_X_y=True)
    features = features.astype(np.float32)
    rng = np.random.default_rng(0)
    owners = np.where(rng.random(len(labels)) < 0.6, labels % 3, rng.integers(0, 3, len(labels)))
    split = np.where(rng.random(len(labels)) < 0.2, 2, 0)
    np.savez(folder / "all.npz", X=features, y=labels, client=owners, split=split)
    for number, name in enumerate(NODES):
        mine = owners == number
        np.savez(folder / f"{name}.npz", X=features[mine], y=labels[mine], split=split[mine])
    test = split == 2
    np.savez(folder / "test.npz", X=features[test], y=labels[test], split=split[test])
    np.savez(folder / "empty.npz", X=features[test], y=labels[test], split=split[test])


def recipe_of(folder: Path, *stages: dict[str, Any]) -> Recipe:
    data = {
        "dataset": str(folder / "all.npz"),
        "classes": list(range(10)),
        "partition": {"kind": "natural", "test": "follow"},
    }
    return Recipe.parse({"data": data, "model": {"backbone": "features"}, "stages": list(stages)})


def rows(out: Path) -> list[list[str]]:
    """`clients.csv`, with the numbers by which the data call clients as names."""
    with (out / "clients.csv").open(newline="") as file:
        return [[row[0], NODES[int(row[1])] if row[1].isdigit() else row[1], *row[2:]] for row in csv.reader(file)]


def summary_of(out: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((out / "summary.json").read_text())
    return found


def played(out: Path) -> int:
    """Rounds in the checkpoint of a run."""
    path = out / "checkpoint" / "state.safetensors"
    return int(json.loads(load_file(path)["progress"].tobytes())["round"]) if path.is_file() else 0


def assert_same_models(here: Path, there: Path) -> None:
    """Bit for bit: what every stage handed on, and the final model."""
    names = {
        path.relative_to(here) for folder in ("checkpoint", "model") for path in (here / folder).glob("*.safetensors")
    }
    assert names == {
        path.relative_to(there) for folder in ("checkpoint", "model") for path in (there / folder).glob("*.safetensors")
    }
    for name in sorted(names - {Path("checkpoint/state.safetensors")}):  # which holds seconds
        ours, theirs = load_file(here / name), load_file(there / name)
        assert ours.keys() == theirs.keys()
        for key in ours:
            np.testing.assert_array_equal(theirs[key], ours[key], err_msg=f"{name} {key}")
