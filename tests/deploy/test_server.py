"""The commands `headstart server` and `headstart node run` as real processes, from keys to a finished run and after."""

import json
import os
import re
import signal
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

pytest.importorskip("flwr")

from headstart.deploy.admit import Server, add
from headstart.deploy.apps import Progress
from headstart.deploy.attend import plain
from headstart.deploy.control import listens
from headstart.deploy.kit import init_node
from headstart.deploy.serve import Shown
from headstart.engine.node_ledger import NodeLedger
from headstart.records import FederationState
from headstart.records.federation import moment
from tests.deploy.processes import NODES, PATIENCE, TRAINING, Commands, recipe_of, wait_for

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def commands(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Commands]:
    home = tmp_path_factory.mktemp("homes") / "o'brien and sons"
    home.mkdir()
    found = Commands(home)
    try:
        yield found
    finally:
        found.stop()


def test_a_run_with_kits_and_one_without_a_revoked_node(commands: Commands) -> None:
    server = commands.command("server", "server", commands.server)
    wait_for(lambda: "missing: a (has never connected), b" in commands.log("server"))
    kit, data = commands.server / "kits" / "a.kit", commands.home / "data" / "a.npz"
    words = ("node", "check", kit, "--data", data, "--folder", commands.home / "a")
    assert commands.command("check", *words).wait(120) == 0, commands.log("check")
    assert "ok       clock" in commands.log("check")
    state = FederationState.read(commands.server)
    assert (state.phase, state.live) == ("waiting", True)
    assert {(node.name, node.present, node.since, node.seen) for node in state.nodes} == {
        (name, False, "", "") for name in NODES
    }
    nodes = {name: commands.node(name) for name in NODES}
    assert server.wait(PATIENCE) == 0, commands.log("server") + commands.log("a")
    said = commands.log("server")
    assert "the run starts with 3 of 3 nodes" in said
    assert f"finished: {commands.server / 'run'}" in said
    assert "Traceback" not in said
    assert json.loads((commands.server / "run" / "summary.json").read_text())["accuracy"] > 0.8
    for name in NODES:
        assert "connected to 127.0.0.1" in commands.log(name), commands.log(name)
        assert "answered round 1 of stage 0" in commands.log(name), commands.log(name)
        ledger = NodeLedger(commands.home / name / "state").entries()
        mine = [e for e in Server.load(commands.server).log.entries() if (e["event"], e["node"]) == ("replied", name)]
        same = ("run", "recipe", "kind", "stage", "round", "answer", "bytes", "examples")
        assert [[e.get(key) for key in same] for e in mine] == [[e.get(key) for key in same] for e in ledger]
        assert [e["kind"] for e in ledger] == ["join", "answer", "test"]
    state = FederationState.read(commands.server)
    assert (state.phase, state.live, state.run) == ("finished", False, "run")
    for node in state.nodes:  # heartbeats come every 30 seconds, less a random part
        assert node.present, state
        assert timedelta() <= moment(node.seen) - moment(node.since) + timedelta(seconds=1) < timedelta(minutes=10)
        assert abs(moment(node.seen) - datetime.now(UTC)) < timedelta(minutes=1)
    assert "run: stage 1 of 1, fedncm: 1 of 1 rounds were played" in commands.said("deploy", "status", commands.server)
    assert commands.command("again", "server", commands.server).wait(60) == 0
    assert "is finished; --out names" in commands.log("again")

    add(Server.load(commands.server), [init_node(commands.home / "d", "d")])
    second = commands.server / "second run"
    server = commands.command("second", "server", commands.server, "--out", second)
    wait_for(lambda: "missing: d (has never connected)" in commands.log("second"))
    assert commands.command("revoke", "deploy", "revoke", commands.server, "c").wait(60) == 0
    assert "no longer registered at the SuperLink" in commands.log("revoke")
    wait_for(lambda: "refused by 127.0.0.1" in commands.log("c"))
    assert commands.command("revoke", "deploy", "revoke", commands.server, "d").wait(60) == 0
    assert server.wait(PATIENCE) == 0, commands.log("second")
    assert "the run starts with 2 of 2 nodes" in commands.log("second")
    state = FederationState.read(commands.server)
    assert {node.name for node in state.nodes if node.revoked} == {"c", "d"}
    assert state.run == "second run"
    assert (second / "summary.json").is_file()
    with (second / "clients.csv").open() as file:
        assert {line.split(",")[2] for line in file} & {*NODES} <= {"a", "b"}
    assert nodes["c"].poll() is None


def test_a_server_that_was_killed_is_attached_to_again(commands: Commands) -> None:
    out = commands.server / "third"
    killed = commands.command("killed", "server", commands.server, "--out", out)
    wait_for(lambda: "the run starts with 2 of 2" in commands.log("killed"))
    killed.kill()
    noted = int((commands.server / "state" / "superlink.pid").read_text())
    try:
        assert commands.command("attached", "server", commands.server, "--out", out).wait(PATIENCE) == 0
        assert f"a SuperLink (process {noted}) listens at" in commands.log("attached")
        assert "a run is under way" in commands.log("attached")
        assert f"finished: {out}" in commands.log("attached")
    finally:
        os.killpg(noted, signal.SIGKILL)
    wait_for(lambda: not listens(Server.load(commands.server)))


def test_mistakes_are_a_sentence_and_an_interruption_is_130(commands: Commands, tmp_path: Path) -> None:
    assert commands.command("none", "server", tmp_path).wait(60) == 2
    assert "is no server's folder" in commands.log("none")
    kit = commands.server / "kits" / "a.kit"
    assert commands.command("keys", "node", "run", kit, "--data", tmp_path, "--folder", tmp_path).wait(60) == 2
    assert "the folder of `headstart node init`" in commands.log("keys")
    waits = commands.command("waits", "server", commands.server, "--out", tmp_path / "run")
    wait_for(lambda: "the SuperLink listens" in commands.log("waits"))
    waits.send_signal(signal.SIGINT)
    assert waits.wait(60) == 130
    assert "Traceback" not in commands.log("none") + commands.log("keys") + commands.log("waits")
    assert not listens(Server.load(commands.server))


def test_what_is_no_bug_is_shown_without_a_traceback() -> None:
    said: list[str] = []
    shown = Shown(said.append)
    shown.take("\x1b[92mINFO \x1b[0m: Flower\nround 1\nTraceback (most recent call last):\n  File x\n    raise\n")
    shown.take("headstart.errors.HeadstartError: none of the nodes came: a\nTraceback (most recent call last):\n")
    shown.take("  File y\nKeyError: 1\n")
    shown.take(
        "\x1b[91mERROR \x1b[0m:     ServerApp raised an exception\n\x1b[91mERROR \x1b[0m:     Exit Code: 201\n\n"
    )
    shown.take(
        "An unhandled exception occurred in the ServerApp.\nFor more information, visit: <https://flower.ai/x>\n"
    )
    assert shown.reason == "none of the nodes came: a"
    assert said == ["round 1", "Traceback (most recent call last):", "  File y", "KeyError: 1"]
    said.clear()
    shown.take(
        "\x1b[91mERROR \x1b[0m:     SSL/TLS handshake error detected.\nTraceback (most recent call last):\n  File z\n"
    )
    shown.take("httpcore.ConnectError: [SSL: CERTIFICATE_VERIFY_FAILED] certificate has expired\n\n")
    shown.take(
        "The above exception was the direct cause of the following exception:\n\nTraceback (most recent call last):\n"
    )
    shown.take("  File z\nhttpx.ConnectError: [SSL: CERTIFICATE_VERIFY_FAILED] certificate has expired\n")
    assert said == []
    assert shown.reason == "the server's certificate is not valid now: run `headstart deploy renew`"


def test_progress_is_a_sentence(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = recipe_of(Path(), {"method": "fedncm"}, {**TRAINING, "method": "fedavg", "train": "head", "rounds": 9})
    clock = iter([100.0, 104.0, 110.0, 116.0])
    monkeypatch.setattr("headstart.deploy.apps.time.monotonic", lambda: next(clock))
    progress, costs = Progress(recipe, 3), {"bytes_up": 8544, "bytes_down": 168}
    progress({"stage": 0, "method": "fedncm", "round": 1, "accuracy": 0.89474, "loss": 0.35421, **costs})
    progress({"stage": 1, "method": "fedavg", "round": 1, "accuracy": None, **costs})
    progress({"stage": 1, "method": "fedavg", "round": 4, "accuracy": 0.5, **costs})
    assert capsys.readouterr().out.splitlines() == [
        "stage 0 (fedncm), round 1 of 1: accuracy 0.8947, loss 0.3542, 8,544 bytes up, 168 down",
        "stage 1 (fedavg), round 1 of 9: 8,544 bytes up, 168 down, about 48 s left in the stage",
        "stage 1 (fedavg), round 4 of 9: accuracy 0.5000, 8,544 bytes up, 168 down, about 10 s left in the stage",
    ]


def test_flowers_words_are_plain() -> None:
    facts = {"address": "h:1"}
    assert plain("INFO : SuperNode ID: 12", facts) == "connected to h:1"
    assert re.match("refused by h:1: .* revoked", str(plain("[code: 2004] Failed to activate", facts)))
    assert plain("headstart: app 'x': must be", facts) == "app 'x': must be"
    assert plain("INFO : Received successfully", facts) is None
    said = plain("refused: HeadstartError: node.toml: limits.methods does not allow fedavg", facts)
    assert said == "the server's question is refused: node.toml: limits.methods does not allow fedavg"
