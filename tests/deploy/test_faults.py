"""Federations of real processes under what happens to real machines: slow and lossy networks, restarts of every part,
certificates that end, clocks that are wrong, neighbours; several tasks."""

import json
import os
import re
import shutil
import signal
import ssl
import subprocess
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("flwr")

from flwr.supercore.protobuf.constants import PROTOBUF_MEDIA_TYPE
from flwr.supercore.protobuf.translation import PROTOBUF_REQUEST_TYPES

from headstart.config.recipe import Recipe
from headstart.deploy import keys
from headstart.deploy.admit import Server
from headstart.deploy.control import Control, listens
from headstart.runner import run
from tests.deploy.processes import (
    NODES,
    PATIENCE,
    Commands,
    assert_same_models,
    free_ports,
    played,
    recipe_of,
    silos,
    summary_of,
    wait_for,
)

pytestmark = [
    pytest.mark.minutes,
    pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="processes are found through /proc"),
]

PERSONAL: dict[str, Any] = {
    "method": "fedper", "train": "head", "head": "mlp", "hidden": 8, "rounds": 2, "lr": 0.01, "batch_size": 64,
    "evaluate_every": 10, "head_init": "random",
}  # fmt: skip


@pytest.fixture
def commands(tmp_path: Path) -> Iterator["Folders"]:
    folders = Folders(tmp_path)
    try:
        yield folders
    finally:
        for each in folders.made:
            each.stop()


class Folders:
    """Federations of a test, all of which end with it."""

    def __init__(self, home: Path) -> None:
        self.home, self.made = home, list[Commands]()
        silos(home)

    def recipe(self, *stages: dict[str, Any]) -> Recipe:
        return recipe_of(self.home, *stages)

    def make(self, recipe: Recipe, name: str = "federation", host: str = "127.0.0.1", **given: Any) -> Commands:
        (self.home / name).mkdir()
        self.made.append(Commands(self.home / name, recipe, host, **given))
        return self.made[-1]


# ------------------------------------------------------------------------------------------------------------- network

DELAY, LOSS = 0.05, 0.01
"""Of a packet, in each direction: a request and its answer take 100 ms more."""


def address(number: int) -> str:
    """Of the server (1), or of a node, in a network of this process."""
    return f"10.203.{os.getpid() % 250}.{number}"


def ip(*words: str) -> None:
    """Change the network; a test without the right to is skipped."""
    done = subprocess.run(["ip", *words], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"no network namespaces here: ip {' '.join(words)}: {done.stderr.strip()}")


@pytest.fixture
def namespaces() -> Iterator[dict[str, str]]:
    """A namespace for each node, with an address of its own, behind a cable that is slow and loses packets."""
    if not shutil.which("ip") or not os.access("/dev/net/tun", os.R_OK | os.W_OK):
        pytest.skip("no network namespaces here: `ip` (Debian: iproute2) or /dev/net/tun is missing")
    mark = f"hs{os.getpid() % 100000}"
    names, cables = {name: f"{mark}-{name}" for name in NODES}, list[subprocess.Popen[str]]()
    try:
        for number, space in enumerate(names.values(), start=2):
            inside, outside = f"{mark}i{number}", f"{mark}o{number}"
            command = [sys.executable, Path(__file__).with_name("cable.py"), inside, outside, DELAY, LOSS, number]
            cables.append(subprocess.Popen([*map(str, command)], stdout=subprocess.PIPE, text=True))
            told = cables[-1].stdout
            if told is None or told.readline() != "ready\n":
                pytest.skip("no TUN devices here")
            ip("netns", "add", space)
            ip("link", "set", inside, "netns", space)
            ip("addr", "add", address(1), "peer", address(number), "dev", outside)
            ip("link", "set", outside, "up")
            ip("-n", space, "addr", "add", address(number), "peer", address(1), "dev", inside)
            ip("-n", space, "link", "set", inside, "up")
            ip("-n", space, "link", "set", "lo", "up")  # a SuperNode's own processes talk over it
        yield names
    finally:
        for cable in cables:
            cable.kill()
            cable.wait(10)
        for space in names.values():
            subprocess.run(["ip", "netns", "del", space], capture_output=True)


ASK = """
import json, ssl, sys, httpx
authority, base, media, *paths = sys.argv[1:]
with httpx.Client(verify=ssl.create_default_context(cafile=authority), base_url=base, timeout=60) as client:
    headers = {"Content-Type": media}
    print(json.dumps({path: client.post(path, headers=headers).status_code for path in paths}))
"""


def test_nodes_on_machines_of_their_own_behind_a_slow_and_lossy_network(
    commands: Folders, namespaces: dict[str, str], tmp_path: Path
) -> None:
    recipe = commands.recipe({"method": "fedncm"}, PERSONAL)
    here = run(recipe, tmp_path / "here").out
    federation = commands.make(recipe, host=address(1))
    server = federation.command("server", "server", federation.server)
    for name, space in namespaces.items():
        federation.node(name, prefix=("ip", "netns", "exec", space))
    wait_for(lambda: listens(Server.load(federation.server)))
    paths = sorted({path for _, path in PROTOBUF_REQUEST_TYPES})
    port = Server.load(federation.server).port
    asked = [sys.executable, "-c", ASK, str(federation.server / "certificates" / "ca.pem")]
    asked += [f"https://{address(1)}:{port}", PROTOBUF_MEDIA_TYPE, *paths]
    outside = ["ip", "netns", "exec", namespaces["a"], *asked]
    done = subprocess.run(outside, capture_output=True, text=True, timeout=PATIENCE, check=True)
    expected = {path: 401 if path.startswith("/v1/fleet/") else 403 for path in paths}
    assert json.loads(done.stdout) == expected
    assert {path.split("/")[2] for path in expected} == {"fleet", "control", "runtime"}
    assert server.wait(2 * PATIENCE) == 0, federation.log("server")
    assert here is not None
    assert_same_models(here, federation.server / "run")
    assert [stage["dropped"] for stage in summary_of(federation.server / "run")["stages"]] == [[], []]


# ------------------------------------------------------------------------------------------------------------ restarts


def test_a_rolling_restart_of_every_part_leaves_the_model_as_it_would_have_been(
    commands: Folders, tmp_path: Path
) -> None:
    recipe = commands.recipe({**PERSONAL, "rounds": 60, "evaluate_every": 100})
    here = run(recipe, tmp_path / "here").out
    federation = commands.make(recipe)
    out, statuses = federation.server / "run", list[int]()

    def server() -> subprocess.Popen[bytes]:
        return federation.command("server", "server", federation.server)

    def go_on(process: subprocess.Popen[bytes], rounds: int) -> subprocess.Popen[bytes]:
        """Until so many rounds are played; as systemd would, start a server again that has failed."""

        def reached() -> bool:
            nonlocal process
            if process.poll() is not None and played(out) < rounds:
                statuses.append(process.returncode)
                process = server()
            return played(out) >= rounds

        wait_for(reached, pause=0.05)
        return process

    nodes = {name: federation.node(name) for name in NODES}
    process = go_on(server(), 1)
    for name in NODES:  # each in its turn
        nodes[name].send_signal(signal.SIGTERM)
        assert nodes[name].wait(60) == 130
        nodes[name] = federation.node(name)
        wait_for(lambda name=name: federation.log(name).count("connected to 127.0.0.1") >= 2)  # type: ignore[misc]
        process = go_on(process, played(out) + 2)
    assert statuses == []  # a node that is not away for longer than the deadline stops nobody
    process.kill()  # the command alone: the SuperLink and the run go on
    process.wait(10)
    process = server()
    wait_for(lambda: "a run is under way" in federation.log("server"))
    link = int((federation.server / "state" / "superlink.pid").read_text())
    os.killpg(link, signal.SIGKILL)
    wait_for(lambda: not listens(Server.load(federation.server)))
    assert process.wait(PATIENCE) == 1, federation.log("server")
    assert "the same command continues from the last checkpoint" in federation.log("server").lower()
    process = server()
    while process.wait(PATIENCE) != 0:
        statuses.append(process.returncode)
        assert len(statuses) < 10, federation.log("server")
        process = server()
    assert set(statuses) <= {1}
    assert "Traceback" not in federation.log("server")
    assert here is not None
    assert_same_models(here, out)


# -------------------------------------------------------------------------------------------------------- certificates


def test_a_certificate_that_ends_during_a_run_is_renewed_and_the_run_goes_on(
    commands: Folders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = commands.recipe({**PERSONAL, "rounds": 8})
    here = run(recipe, tmp_path / "here").out
    federation = commands.make(recipe)
    folder, out = Server.load(federation.server), federation.server / "run"
    certificate = folder.folder / "certificates" / "server.pem"

    def served() -> bool:
        """Whether the SuperLink shows the certificate that is in the file."""
        return ssl.get_server_certificate(("127.0.0.1", folder.port)).split() == certificate.read_text().split()

    process = federation.command("server", "server", folder.folder)
    for name in NODES:
        federation.node(name)
    wait_for(lambda: played(out) >= 2, pause=0.05)
    serverapp = federation.processes(command="flwr-serverapp")
    federation.signal(serverapp, signal.SIGSTOP)  # the run would be finished before the end of the certificate
    monkeypatch.setattr(keys, "DAYS", timedelta(seconds=5) / timedelta(days=1))
    keys.write_server_certificate(certificate.parent, "127.0.0.1")
    wait_for(served)  # without a restart
    ended = f"no connection with 127.0.0.1:{folder.port}: certificate: it, or its authority's, is not valid now"
    for name in NODES:
        wait_for(lambda name=name: ended in federation.log(name))  # type: ignore[misc]
    wait_for(lambda: "server.pem ended, and nobody can connect any more" in federation.log("server"))
    federation.signal(serverapp, signal.SIGCONT)
    assert played(out) < 8
    renewed = federation.command("renew", "deploy", "renew", folder.folder)
    assert renewed.wait(60) == 0, federation.log("renew")
    wait_for(served)
    for _ in range(3):  # a server that has failed is started again, as systemd would
        if process.wait(PATIENCE) == 0:
            break
        process = federation.command("server", "server", folder.folder)
    assert process.returncode == 0, federation.log("server")
    assert "Traceback" not in federation.log("server")
    assert here is not None
    assert_same_models(here, out)


# -------------------------------------------------------------------------------------------------------------- clocks


def test_a_node_whose_clock_is_wrong_says_so_and_takes_part_when_it_is_right(commands: Folders, tmp_path: Path) -> None:
    library = tmp_path / "clock.so"
    if (compiler := shutil.which("cc")) is None:
        pytest.skip("no clocks to change here: there is no C compiler")
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, Path(__file__).with_name("clock.c")], check=True)
    federation = commands.make(commands.recipe({"method": "fedncm"}))
    port = Server.load(federation.server).port
    process = federation.command("server", "server", federation.server)
    wait_for(lambda: listens(Server.load(federation.server)))
    nodes = {
        name: federation.node(name, prefix=("env", f"LD_PRELOAD={library}", f"CLOCK_OFFSET={off}"))
        for name, off in {"a": 600, "b": -2 * 24 * 3600, "c": -120}.items()
    }
    where = f"no connection with 127.0.0.1:{port}"
    wait_for(lambda: re.search(rf"{where}: clock: (599|60\d) s ahead of the server's", federation.log("a")))
    wait_for(lambda: f"{where}: certificate: it, or its authority's, is not valid now" in federation.log("b"))
    wait_for(lambda: "connected to 127.0.0.1" in federation.log("c"))
    for name in ("a", "b"):
        nodes[name].send_signal(signal.SIGTERM)
        assert nodes[name].wait(60) == 130
        federation.node(name)
    assert process.wait(PATIENCE) == 0, federation.log("server")
    assert summary_of(federation.server / "run")["stages"][0]["dropped"] == []


# ---------------------------------------------------------------------------------------------------------- neighbours


def test_two_federations_on_one_machine_do_not_see_each_other(commands: Folders, tmp_path: Path) -> None:
    """At the same time, with nodes of the same names, and data and recipes of their own."""
    recipes = {"one": commands.recipe({"method": "fedncm"}), "two": commands.recipe({"method": "fed3r"})}
    port = free_ports(2)
    both = {name: commands.make(recipes[name], name, port=port + number) for number, name in enumerate(recipes)}
    processes = {name: one.command("server", "server", one.server) for name, one in both.items()}
    for one in both.values():
        for name in NODES:
            one.node(name)
    known = {}
    for name, one in both.items():
        wait_for(lambda one=one: "the run starts with 3 of 3 nodes" in one.log("server"))  # type: ignore[misc]
        with Control.of(Server.load(one.server)) as control:
            known[name] = {node.public_key for node in control.nodes()}
    assert len(known["one"] | known["two"]) == 6
    for name, one in both.items():
        assert processes[name].wait(PATIENCE) == 0, one.log("server")
        here = run(recipes[name], tmp_path / f"here-{name}").out
        assert here is not None
        assert_same_models(here, one.server / "run")

    # A third one at the port of another says so.
    clash = commands.make(recipes["one"], "three", port=port)
    other = both["one"].command("again", "server", both["one"].server, "--out", tmp_path / "again")
    wait_for(lambda: "the SuperLink listens" in both["one"].log("again"))
    assert clash.command("server", "server", clash.server).wait(PATIENCE) == 1
    assert "who answers at the port is not this server" in clash.log("server")
    assert other.poll() is None


# --------------------------------------------------------------------------------------------------------------- tasks


def test_several_tasks_on_one_federation(commands: Folders, tmp_path: Path) -> None:
    """Each node says its own; the models, and every accuracy of every task, are those of the same run in process."""
    names = {"a": "low", "b": "low", "d": "high", "e": "high"}
    tasks, partition = [], {"kind": "natural", "test": "follow"}
    whole = np.load(tmp_path / "all.npz")
    for task, classes in {"low": range(5), "high": range(5, 10)}.items():
        mine = np.isin(whole["y"], list(classes)) & (whole["client"] < 2)
        arrays = {name: whole[name][mine] for name in ("X", "y", "split", "client")}
        np.savez(tmp_path / f"{task}.npz", **arrays)
        for number, name in enumerate(name for name in names if names[name] == task):
            own = arrays["client"] == number
            np.savez(tmp_path / f"{task}-{name}.npz", **{key: arrays[key][own] for key in ("X", "y", "split")})
        data = {"dataset": str(tmp_path / f"{task}.npz"), "classes": list(classes), "partition": partition}
        tasks.append({"name": task, **data})
    personalise = {"method": "personalise", "update": "head", "epochs": 1, "lr": 0.01}
    stages = [{"method": "fedncm"}, {**PERSONAL, "sampling": "tasks"}, personalise]
    recipe = Recipe.parse({"tasks": tasks, "model": {"backbone": "features"}, "stages": stages})
    here = run(recipe, tmp_path / "here").out
    federation = commands.make(recipe, names=tuple(names))
    for name, task in names.items():
        shutil.copy(tmp_path / f"{task}-{name}.npz", federation.data / f"{name}.npz")
    for options, why in (((), "the recipe has several tasks (low, high)"), (("--task", "lwo"), "did you mean 'low'?")):
        assert federation.node("a", *options).wait(60) == 2
        assert why in federation.log("a")
    process = federation.command("server", "server", federation.server)
    for name, task in names.items():
        federation.node(name, "--task", task)
    assert process.wait(PATIENCE) == 0, federation.log("server")
    assert here is not None
    assert_same_tasks(here, federation.server / "run", ("low", "high"))


def assert_same_tasks(here: Path, there: Path, tasks: tuple[str, str]) -> None:
    """The models bit for bit, and the figures of every task."""
    assert_same_models(here, there)
    for stage, other in zip(summary_of(here)["stages"], summary_of(there)["stages"], strict=True):
        for task in tasks:
            for name in ("accuracy", "local_accuracy_mean"):
                assert other["tasks"][task][name] == pytest.approx(stage["tasks"][task][name])
        assert other["dropped"] == []


WORDS = (["rain", "snow", "wind", "storm", "cloud"], ["goal", "team", "match", "score", "win"])


def test_modules_of_several_tasks_on_one_federation(commands: Folders, tmp_path: Path) -> None:
    """FedYolo on a sentence encoder: a module and a head for each task, and then a module of each node's own."""
    names = {"a": "one", "b": "one", "d": "two", "e": "two"}
    tasks, rng = [], np.random.default_rng(0)
    for task in ("one", "two"):
        rows = [
            (" ".join(rng.choice(WORDS[(number + (task == "two")) % 2], 3)), "yn"[number % 2], split, client)
            for client in (0, 1)
            for number, split in enumerate(["train"] * 8 + ["test"] * 4)
        ]
        table(tmp_path / task, rows)
        for number, name in enumerate(name for name in names if names[name] == task):
            table(tmp_path / name, [row for row in rows if row[3] == number])
        data = {"dataset": str(tmp_path / task), "client_column": "client", "classes": ["y", "n"]}
        tasks.append({"name": task, **data, "partition": {"kind": "natural", "test": "follow"}})
    module = {"train": "lora", "rank": 2, "blocks": 1, "lr": 0.1, "batch_size": 4, "rounds": 2, "evaluate_every": 2}
    stages = [
        {"method": "fedncm"},
        {**module, "method": "fedyolo", "sampling": "tasks"},
        {"method": "personalise", "update": "lora", "epochs": 1, "lr": 0.1, "batch_size": 4},
    ]
    model = {"backbone": "all-MiniLM-L6-v2", "max_tokens": 8}
    recipe = Recipe.parse({"tasks": tasks, "model": model, "stages": stages})
    here = run(recipe, tmp_path / "here").out
    federation = commands.make(recipe, names=tuple(names))
    process = federation.command("server", "server", federation.server)
    for name, task in names.items():
        (federation.data / f"{name}.npz").unlink(missing_ok=True)
        shutil.copytree(tmp_path / name, federation.data / f"{name}.texts")
        federation.node(name, "--task", task)
    assert process.wait(PATIENCE) == 0, federation.log("server")
    assert here is not None
    assert_same_tasks(here, federation.server / "run", ("one", "two"))
    # What each node made of its module stays with it.
    assert len(list(federation.home.glob("[abde]/state/*/clients-2/personal.bin"))) == 4
    assert not list((federation.server / "run").rglob("personal.bin"))


def table(folder: Path, rows: list[tuple[str, str, str, int]]) -> None:
    """Texts with a label, a split and a client, as a file for each split."""
    folder.mkdir()
    for split in ("train", "test"):
        lines = [f"{text},{label},{client}" for text, label, of, client in rows if of == split]
        (folder / f"{split}.csv").write_text("\n".join(["text,label,client", *lines]) + "\n")
