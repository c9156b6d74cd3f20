"""What tests with the real processes of a federation share: processes that end whatever happens, data, and figures."""

import csv
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from threading import Event, Thread
from typing import Any

import numpy as np
from safetensors.numpy import load_file
from sklearn.datasets import load_digits

from headstart.config.recipe import Recipe
from headstart.deploy.admit import Server, add, init_server
from headstart.deploy.folder import init
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

    @contextmanager
    def slowed(self, processes: list[int]) -> Iterator[None]:
        """They stand still, but for a tenth of a second every 15 s: Flower gives up what has no heartbeat for 60 s."""
        done = Event()

        def hold() -> None:
            self.signal(processes, signal.SIGSTOP)
            while not done.wait(15):
                self.signal(processes, signal.SIGCONT)
                done.wait(0.1)
                self.signal(processes, signal.SIGSTOP)

        holding = Thread(target=hold)
        holding.start()
        try:
            yield
        finally:
            done.set()
            holding.join()
            self.signal(processes, signal.SIGCONT)

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
        kit, (path,) = self.server / "kits" / f"{name}.kit", self.data.glob(f"{data or name}.*")
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


FOURTH = "d"
"""A node that is not admitted from the start."""
WRONG = ("empty", "other", "old", "false", "unguarded")
"""Nodes that are registered, and that no run can take."""


def set_variables(script: Path, **values: str) -> None:
    """Change what is at the top of a script."""
    text = script.read_text()
    for name, value in values.items():
        line = f'{name}="{value}"'.replace("\\", r"\\")
        text, found = re.subn(rf"(?m)^{name}=.*$", line, text)
        assert found == 1
    script.write_text(text)


class Machines(Processes):
    """The processes of a federation, as its scripts start them."""

    def __init__(self, folder: Path, recipe: Recipe) -> None:
        super().__init__(folder.parent)
        self.folder = folder
        self.host, self.port = own_address(), free_ports(2 + len(NODES + WRONG))
        init(folder, recipe, (*NODES, FOURTH, *WRONG), self.host, self.port)
        for name in (FOURTH, *WRONG):  # admitted by the test that needs them: every key costs run.sh seconds
            (folder / "keys" / f"{name}.pub").rename(folder.parent / f"{name}.pub")

    def superlink(self) -> None:
        """Start the SuperLink, and wait until it listens."""
        # Whoever sets these opens nothing.
        careless = {"FORWARDED_ALLOW_IPS": "*", "FLWR_INTERNAL_GRPC_CONTROL_API": "1"}
        path = [str(Path(__file__).parent / "lying"), *filter(None, [os.environ.get("PYTHONPATH")])]
        careless["PYTHONPATH"] = os.pathsep.join(path)
        self.superlink_process = self.start(self.folder / "superlink.sh", log="superlink", **careless)
        wait_for(lambda: self.superlink_process.poll() is None and self.listens())

    def listens(self) -> bool:
        with socket.socket() as one:
            return one.connect_ex(("127.0.0.1", self.port)) == 0

    def node(self, name: str, **environment: str) -> subprocess.Popen[bytes]:
        return self.start(self.folder / f"node-{name}.sh", log=name, **environment)

    def begin(
        self, recipe: Recipe, name: str, nodes: tuple[str, ...] = NODES, test: str = ""
    ) -> subprocess.Popen[bytes]:
        """Start a run of a recipe that all nodes but the one with another recipe have agreed to."""
        (self.folder / "recipe.toml").write_text(recipe.to_toml())
        out = self.folder / "runs" / name
        set_variables(self.folder / "run.sh", out=str(out), nodes=",".join(nodes), test=test)
        return self.start(self.folder / "run.sh", log=f"run-{name}")

    def run(self, recipe: Recipe, name: str, nodes: tuple[str, ...] = NODES, test: str = "") -> Path:
        """A whole run; returns its directory."""
        status = self.begin(recipe, name, nodes, test).wait(PATIENCE + 120)
        assert status == 0, self.log(f"run-{name}")
        return self.folder / "runs" / name

    def lie(self, attack: str, recipe: Recipe, nodes: tuple[str, ...] = NODES) -> dict[str, Any]:
        """What nodes say to a server that plays an attack of `lying_server`."""
        (self.home / "lie").write_text(attack)
        try:
            out = self.run(recipe, f"lie-{attack}", nodes)
        finally:
            (self.home / "lie").unlink()
        said: dict[str, Any] = json.loads((out / "said.json").read_text())
        return said

    def admit_fourth(self, data: Path) -> None:
        """With one node more from here on, that has these data."""
        if (key := self.home / f"{FOURTH}.pub").exists():
            key.rename(self.folder / "keys" / key.name)
            set_variables(self.folder / f"node-{FOURTH}.sh", data=str(data))
            self.node(FOURTH)

    def ask(self, host: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
        """Flower's command, for the SuperLink at an address of this machine."""
        home = self.logs.parent / "home"
        home.mkdir(exist_ok=True)
        authority = self.folder / "certificates" / "ca.pem"
        (home / "config.toml").write_text(
            f'[superlink.federation]\naddress = "{host}:{self.port}"\nroot-certificates = "{authority}"\n'
        )
        environment = self.environment | {"FLWR_HOME": str(home), "FLWR_TELEMETRY_ENABLED": "0"}
        command = ["flwr", *map(str, arguments), "--format", "json"]
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)

    def flwr(self, *arguments: str) -> str:
        """What Flower's command says of the running SuperLink."""
        done = self.ask("127.0.0.1", *arguments, "federation")
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def of_node(self, name: str, command: str = "") -> list[int]:
        """A node's processes, but for the script that starts them."""
        return self.processes(f"FLWR_HOME={self.folder}/state/{name}/flower", command)


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
    sevens = np.flatnonzero((owners == 0) & ~test & (labels == 7))
    alone = np.setdiff1d(np.flatnonzero(owners == 0), sevens[1:])  # a class of one example
    np.savez(folder / "alone.npz", X=features[alone], y=labels[alone], split=split[alone])
    np.savez(folder / "empty.npz", X=features[test], y=labels[test], split=split[test])


def recipe_of(folder: Path, *stages: dict[str, Any]) -> Recipe:
    data = {
        "dataset": str(folder / "all.npz"),
        "classes": list(range(10)),
        "partition": {"kind": "natural", "test": "follow"},
    }
    return Recipe.parse({"data": data, "model": {"backbone": "features"}, "stages": list(stages)})


def rows(out: Path) -> list[list[str]]:
    """`clients.csv`, with the numbers by which the data call clients as names; without its last two columns, which need
    every score or are added up in another order."""
    with (out / "clients.csv").open(newline="") as file:
        return [[row[0], NODES[int(row[1])] if row[1].isdigit() else row[1], *row[2:-2]] for row in csv.reader(file)]


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
