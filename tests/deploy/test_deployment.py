"""A federation of real processes on this machine: a SuperLink and its nodes, over TLS, and what becomes of a run when
something stops, is not what it says, or does not belong."""

import csv
import json
import os
import re
import signal
import ssl
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

pytest.importorskip("flwr")

import httpx
from flwr.supercore.protobuf.constants import PROTOBUF_MEDIA_TYPE
from flwr.supercore.protobuf.translation import PROTOBUF_REQUEST_TYPES

from headstart.config.recipe import Recipe
from headstart.deploy.admit import Server
from headstart.deploy.control import Control
from headstart.deploy.control import main as admit
from headstart.deploy.folder import init
from headstart.deploy.guard import app_digest
from headstart.engine.flower_messages import recipe_digest
from headstart.engine.node_ledger import NodeLedger
from headstart.engine.server_log import ServerLog
from headstart.runner import run
from tests.deploy.processes import (
    FOURTH,
    NODES,
    PATIENCE,
    TRAINING,
    WRONG,
    Machines,
    assert_same_models,
    free_ports,
    played,
    recipe_of,
    rows,
    set_variables,
    summary_of,
    wait_for,
)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="processes are found through /proc"),
]

STAGES: list[dict[str, Any]] = [
    {"method": "fedncm", "deadline": 120},
    {**TRAINING, "method": "fedper", "train": "head", "head": "mlp", "hidden": 8, "head_init": "random"},
    {"method": "personalise", "update": "head", "epochs": 1, "lr": 0.01, "deadline": 120},
    {**TRAINING, "method": "fedavg", "train": "head", "start": 0},
]


@pytest.mark.parametrize("count", [2, pytest.param(4, marks=pytest.mark.minutes)])
def test_models_bytes_and_accuracies_are_those_of_the_same_run_in_process(
    machines: Machines, data: Path, tmp_path: Path, count: int
) -> None:
    recipe = recipe_of(data, *STAGES[:count])
    here = run(recipe, tmp_path / "here").out
    there = machines.run(recipe, f"same-{count}")
    assert here is not None
    assert_same_models(here, there)
    assert rows(there) == rows(here)
    assert {row[1] for row in rows(there)[1:]} == set(NODES)
    # Losses and confidences are added up in another order; here nobody sends the figures of tests.
    skipped = ("seconds", "loss", "calibration_error", "peak_rss_bytes", "test_bytes_up", "test_bytes_down")
    for ours, theirs in zip(summary_of(here)["stages"], summary_of(there)["stages"], strict=True):
        assert {k: v for k, v in theirs.items() if k not in skipped} == {
            k: v for k, v in ours.items() if k not in skipped
        }
        for name in ("loss", "calibration_error"):
            assert theirs[name] == pytest.approx(ours[name], rel=1e-5)

    # What is the clients' own is with them, and nowhere else.
    heads = []
    for name in NODES:
        folders = (machines.folder / "state" / name).glob("*/clients-1/personal.bin")
        kept = max(folders, key=lambda path: path.stat().st_mtime)
        values = np.frombuffer(kept.read_bytes(), np.float32).reshape(2, -1)
        heads.append(next(half for half in values if half.any()).tobytes())
        examples = np.load(data / f"{name}.npz")["X"]
        heads.append(examples[examples.any(axis=1)][0].tobytes())
    everything = [path for path in there.rglob("*") if path.is_file()]
    everything += sorted((machines.folder / "state").glob("superlink.db*"))
    assert len([path for path in everything if path.name.startswith("superlink.db")]) >= 1
    server = b"\n".join(path.read_bytes() for path in everything)
    for secret in heads:
        assert server.count(secret[:64]) == 0
    shared = load_file(there / "checkpoint" / "stage-1.safetensors")["head.0.hidden.0.weight"].tobytes()
    assert server.count(shared[:64]) > 0  # what is looked for would be found


@pytest.mark.minutes
def test_a_run_survives_the_superlink_and_a_second_server_stays_out(
    machines: Machines, data: Path, tmp_path: Path
) -> None:
    stage = {**TRAINING, "method": "fedper", "train": "head", "head": "mlp", "hidden": 8, "rounds": 6}
    recipe = recipe_of(data, {**stage, "evaluate_every": 3})
    here = run(recipe, tmp_path / "here").out
    assert here is not None
    link = machines.superlink_process
    out = machines.folder / "runs" / "killed"
    first = machines.begin(recipe, "killed")
    wait_for((out / "checkpoint" / "state.safetensors").is_file, pause=0.02)
    server = machines.processes(command="flwr-serverapp")
    (machines.folder / "state" / "run" / "run").unlink()  # as if the first had been started from elsewhere
    with machines.slowed(server):  # it would be done before another one has started
        second = machines.start(machines.folder / "run.sh", log="second")
        wait_for(lambda: second.poll() is not None)
    assert second.returncode == 1
    assert "another process is running there; wait for it, or stop it" in machines.log("second")
    assert first.poll() is None, machines.log("run-killed")
    wait_for(lambda: played(out) >= 4, pause=0.02)  # of six rounds
    os.kill(link.pid, signal.SIGKILL)
    link.wait(10)
    assert not (out / "summary.json").exists()
    wait_for(lambda: not machines.listens())
    wait_for(lambda: not machines.processes(command="flwr-serverapp"))
    machines.superlink()
    assert first.wait(PATIENCE) == 1
    lines = (out / "metrics.jsonl").read_text().splitlines()
    machines.run(recipe, "killed")
    assert_same_models(here, out)
    assert rows(out) == rows(here)
    after = (out / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["round"] for line in after] == [3, 6]
    assert after[0] == lines[0]


@pytest.mark.minutes
def test_run_sh_follows_the_run_that_a_lost_terminal_has_started(machines: Machines, data: Path) -> None:
    recipe = recipe_of(data, {"method": "fedncm"})
    lost = machines.begin(recipe, "followed", (*NODES, FOURTH))  # which is not there yet
    wait_for(lambda: "waiting for nodes: 3 of 4" in machines.log("run-followed"))
    os.killpg(lost.pid, signal.SIGKILL)
    again = machines.start(machines.folder / "run.sh", log="again")
    wait_for(lambda: "a run is under way" in machines.log("again"))
    machines.admit_fourth(data / "a.npz")
    key = machines.folder / "keys" / f"{FOURTH}.pub"
    assert machines.ask("127.0.0.1", "supernode", "register", key, "federation", "--name", FOURTH).returncode == 0
    assert again.wait(PATIENCE) == 0, machines.log("again")
    assert "waiting for nodes: 3 of 4" in machines.log("again")  # from the beginning
    assert summary_of(machines.folder / "runs" / "followed")["accuracy"] > 0.8


@pytest.mark.minutes
def test_a_round_ends_without_a_node_that_is_killed_and_one_that_is_stuck(machines: Machines, data: Path) -> None:
    # Sooner than Flower can miss a node: it waits for two heartbeats, 60 s, and the last may be 27 s old.
    recipe = recipe_of(data, {**TRAINING, "method": "fedavg", "train": "head", "rounds": 3, "deadline": 25})
    out = machines.folder / "runs" / "faults"
    process = machines.begin(recipe, "faults", test=str(data / "test.npz"))
    wait_for((out / "recipe.toml").is_file)  # everybody has joined
    wait_for(lambda: machines.of_node("c", "flwr-clientapp"), pause=0.05)
    machines.signal(machines.of_node("c"), signal.SIGKILL)
    wait_for(lambda: played(out) == 1)
    stuck = wait_for(lambda: machines.of_node("b", "flwr-clientapp") and machines.of_node("b"), pause=0.05)
    try:
        machines.signal(stuck, signal.SIGSTOP)
        wait_for(lambda: played(out) == 2)
    finally:
        machines.signal(stuck, signal.SIGCONT)
    assert process.wait(PATIENCE) == 0, machines.log("run-faults")
    (stage,) = summary_of(out)["stages"]
    why = {(drop["round"], drop["clients"]): drop["why"] for drop in stage["dropped"]}
    assert why[2, "b"] == "no reply within 25 s"
    assert re.fullmatch(
        r"no reply within 25 s|Flower: Error: Node Unavailable.*|the node was started anew|the node has left",
        why[1, "c"],
    )
    assert not {(1, "a"), (2, "a"), (1, "b")} & why.keys()
    assert stage["accuracy"] > 0.5
    # Its script starts it again, and the SuperLink takes it back: the next run is with everybody.


@pytest.mark.minutes
def test_secure_sums_are_those_of_the_same_run_in_process(machines: Machines, data: Path, tmp_path: Path) -> None:
    secure = {"secure": True, "deadline": 120}
    recipe = recipe_of(
        data,
        {"method": "fedncm", **secure},
        {**TRAINING, "method": "fedavg", "train": "head", "rounds": 1, **secure},
    )
    here = run(recipe, tmp_path / "here").out
    there = machines.run(recipe, "secure", test=str(data / "test.npz"))
    assert here is not None
    assert_same_models(here, there)
    assert [stage["dropped"] for stage in summary_of(there)["stages"]] == [[], []]
    # Said before the first round, since nobody may leave.
    log = machines.log("run-secure")
    for stage in (0, 1):
        sentence = (
            f"stages.{stage}: with secure aggregation all of 3 clients have to stay to the end; four are the fewest"
        )
        assert log.index(sentence) < log.index("round 1 of 1")

    # An audit: all that left a node, from its own ledger, has the bytes of the server's account.
    heads, *lines = rows(there)
    for name in NODES:
        entries = NodeLedger(machines.folder / "state" / name).entries()
        left = [entry for entry in entries if entry["recipe"] == recipe_digest(recipe) and entry["kind"] != "join"]
        assert [entry["kind"] for entry in left] == 2 * ["keys", "masked"]
        told = [int(line[heads.index("bytes_up")]) for line in lines if line[1] == name]
        assert sum(entry["bytes"] for entry in left) == sum(told)
        log = ServerLog(machines.folder / "state" / "log.jsonl").entries()
        mine = [e for e in log if (e["node"], e["event"], e["recipe"]) == (name, "replied", recipe_digest(recipe))]
        mine = [entry for entry in mine if entry["kind"] != "join"]
        same = ("run", "kind", "stage", "round", "of", "answer", "bytes")
        assert [[entry[key] for key in same] for entry in mine] == [[entry[key] for key in same] for entry in left]


def test_strangers_get_nothing(machines: Machines, tmp_path: Path) -> None:
    """Another authority's certificate, a key that nobody admitted, and no key at all."""

    def known() -> set[str]:
        return {node["node-id"] for node in json.loads(machines.flwr("supernode", "list"))["nodes"]}

    before = known()
    folder, local = tmp_path / "stranger", str(free_ports(1))
    init(folder, Recipe.load(machines.folder / "recipe.toml"), ["a"], port=machines.port)
    set_variables(folder / "node-a.sh", local_port=local)

    def says(process: subprocess.Popen[bytes], log: str, *words: str) -> None:
        try:
            wait_for(lambda: all(word in machines.log(log) for word in words) or process.poll() is not None)
            assert all(word in machines.log(log) for word in words), machines.log(log)
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(10)

    says(
        machines.start(folder / "node-a.sh", log="forged"), "forged", "CERTIFICATE_VERIFY_FAILED", "a is not connected"
    )
    authority = machines.folder / "certificates" / "ca.pem"
    (folder / "certificates" / "ca.pem").write_bytes(authority.read_bytes())
    says(machines.start(folder / "node-a.sh", log="unknown"), "unknown", "[code: 2004]", "a is not connected")
    keyless = ("flower-supernode", "--superlink", f"127.0.0.1:{machines.port}", "--port", local)
    process = machines.start(
        *keyless, "--root-certificates", authority, log="keyless", FLWR_HOME=str(tmp_path / "flwr")
    )
    says(process, "keyless", "[code: 2001]")
    assert known() == before


FOREIGN = {
    "pyproject.toml": """
[project]
name = "foreign"
version = "1.0.0"
license = "Apache-2.0"
dependencies = []

[tool.flwr.app]
publisher = "somebody"
config = { out = "" }

[tool.flwr.app.components]
serverapp = "foreign.server:app"
clientapp = "foreign.client:app"
""",
    "foreign/__init__.py": "",
    "foreign/server.py": """
import json
import time
from pathlib import Path

from flwr.app import Message, RecordDict
from flwr.serverapp import ServerApp

app = ServerApp()


@app.main()
def main(grid, context):
    out = Path(context.run_config["out"])
    (out / "started").touch()
    while len(nodes := [node.node_id for node in grid.get_nodes()]) < 3:
        time.sleep(0.2)
    replies = grid.send_and_receive([Message(RecordDict(), node, "query") for node in nodes])
    (out / "replies.tmp").write_text(json.dumps([reply.error.reason if reply.has_error() else "" for reply in replies]))
    (out / "replies.tmp").rename(out / "replies")
""",
    "foreign/client.py": """
import os
from pathlib import Path

from flwr.app import Message, RecordDict
from flwr.clientapp import ClientApp

app = ClientApp()
Path(OUT, f"code-{os.getpid()}").touch()


@app.query()
def answer(message, context):
    return Message(RecordDict(), reply_to=message)
""",
}
"""An app of somebody else's, whose code leaves a file behind on whatever machine it runs."""


def submit(machines: Machines, host: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """The foreign app, handed to the SuperLink at an address of this machine."""
    for name, text in FOREIGN.items():
        path = folder / "app" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text.replace("OUT", repr(str(folder))).lstrip())
    return machines.ask(host, "run", folder / "app", "federation", "--run-config", f"out='{folder}'")


def listening(process: int) -> set[int]:
    """The TCP ports that a process listens on."""
    sockets = {link.readlink().name for link in Path(f"/proc/{process}/fd").iterdir() if link.is_symlink()}
    tables = [Path("/proc/net/tcp"), Path("/proc/net/tcp6")]
    lines = [line.split() for table in tables if table.exists() for line in table.read_text().splitlines()[1:]]
    return {int(line[1].split(":")[1], 16) for line in lines if line[3] == "0A" and f"socket:[{line[9]}]" in sockets}


def test_who_reaches_the_port_from_elsewhere_starts_nothing(machines: Machines, tmp_path: Path) -> None:
    if machines.host == "127.0.0.1":
        pytest.skip("this machine has no other address than the loopback address")
    done = submit(machines, machines.host, tmp_path)
    assert not json.loads(done.stdout)["success"]
    assert "Only the SuperLink's own machine may ask this, at 127.0.0.1." in done.stdout
    assert not (tmp_path / "started").exists()
    paths = {path for _, path in PROTOBUF_REQUEST_TYPES}
    fleet = {path for path in paths if path.startswith("/v1/fleet/")}
    closed = paths - fleet | {
        "/", "/docs", "/openapi.json", "/health", "/v1/runtime/responses", "/v1/fleet", "//v1/fleet/x", "/V1/fleet/x",
    }  # fmt: skip
    assert len(fleet) == 12
    assert {path.split("/")[2] for path in paths - fleet} == {"control", "runtime"}
    protobuf = {"Content-Type": PROTOBUF_MEDIA_TYPE}
    context = ssl.create_default_context(cafile=str(machines.folder / "certificates" / "ca.pem"))
    with (
        httpx.Client(verify=context, base_url=f"https://{machines.host}:{machines.port}", headers=protobuf) as outside,
        httpx.Client(verify=context, base_url=f"https://127.0.0.1:{machines.port}", headers=protobuf) as inside,
    ):
        for path in sorted(closed):
            assert outside.post(path).status_code == 403, path
        for headers in (
            {"X-Forwarded-For": "127.0.0.1"}, {"X-Real-IP": "127.0.0.1"}, {"Forwarded": "for=127.0.0.1"},
            {"Host": "127.0.0.1"}, {"Host": "x/v1/fleet/?"}, {"X-Forwarded-Prefix": "/v1/fleet"},
            {"X-Original-URL": "/v1/fleet/get-run"},
        ):  # fmt: skip
            assert outside.post("/v1/control/list-runs", headers=headers).status_code == 403, headers
        for path in (
            "/v1/fleet/../control/list-runs",
            "/v1/fleet/%2e%2e/control/list-runs",
            "/v1/fleet//control/list-runs",
        ):
            request = outside.build_request("POST", "/")
            request.url = request.url.copy_with(raw_path=path.encode())
            assert outside.send(request).status_code in (403, 404), path
        for path in sorted(fleet):  # Flower itself asks for a signature
            assert outside.post(path).status_code == 401, path
        assert inside.post("/v1/control/list-runs").status_code == 200
        # A proxy on the server's machine does not open what is closed.
        assert inside.post("/v1/control/list-runs", headers={"X-Forwarded-For": machines.host}).status_code == 403
    assert listening(machines.superlink_process.pid) == {machines.port}


def test_nodes_execute_no_code_of_another_app(machines: Machines, tmp_path: Path) -> None:
    known = json.loads(machines.flwr("supernode", "list"))["nodes"]  # from an earlier test
    for name in NODES if not known else ():
        key = machines.folder / "keys" / f"{name}.pub"
        assert machines.ask("127.0.0.1", "supernode", "register", key, "federation", "--name", name).returncode == 0
    done = submit(machines, "127.0.0.1", tmp_path)
    assert json.loads(done.stdout)["success"], done.stdout
    replies = json.loads(wait_for(lambda: (tmp_path / "replies").exists() and (tmp_path / "replies").read_text()))
    assert len(replies) >= len(NODES)
    assert all("could not be verified" in reply for reply in replies), replies
    assert not list(tmp_path.glob("code-*"))
    own, foreign = app_digest(machines.folder / "app"), app_digest(tmp_path / "app")
    for name in NODES:
        sentence = f"Refused: the app of this run has SHA-256 {foreign}; this node executes only {own}."
        assert sentence in machines.log(name)
        assert not list((machines.folder / "state" / name / "flower").glob("apps/somebody*"))


SHIM = """
import importlib.metadata
true = importlib.metadata.version
importlib.metadata.version = lambda name: "0.0.1" if name == "headstart" else true(name)
"""


def test_nodes_that_cannot_take_part_stay_out_and_the_run_says_why(
    machines: Machines, data: Path, tmp_path: Path
) -> None:
    scripts = {name: machines.folder / f"node-{name}.sh" for name in WRONG}
    for name, script in scripts.items():
        (machines.folder.parent / f"{name}.pub").rename(machines.folder / "keys" / f"{name}.pub")
        set_variables(script, data=str(data / ("empty.npz" if name == "empty" else "a.npz")))
    other = recipe_of(data, {"method": "fedncm", "distance": "euclidean"})
    (tmp_path / "other.toml").write_text(other.to_toml())
    set_variables(scripts["other"], recipe=str(tmp_path / "other.toml"))
    text = scripts["false"].read_text()
    assert 'name = $(toml "$name")' in text
    scripts["false"].write_text(text.replace('name = $(toml "$name")', "name = 'a'"))
    text, found = re.subn(
        r"python3 -P -m headstart.deploy.guard supernode \S+", "flower-supernode", scripts["unguarded"].read_text()
    )
    assert found == 1
    scripts["unguarded"].write_text(text)
    (tmp_path / "sitecustomize.py").write_text(SHIM)

    old = {"PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])}
    started = [machines.node(name, **(old if name == "old" else {})) for name in WRONG]
    try:
        recipe = recipe_of(data, {"method": "fedncm", "deadline": 120})
        out = machines.run(recipe, "wrong", NODES + WRONG, test=str(data / "test.npz"))
    finally:
        for process in started:
            os.killpg(process.pid, signal.SIGKILL)
    log = machines.log("run-wrong")
    for name, why in {
        "empty": "no training examples",
        "other": "the server runs another recipe than the one that this node agreed to",
        "old": "the node runs headstart 0.0.1, the server",
        "false": "false is not the private key of what peers lists for a",
        "unguarded": "flower-supernode was started without headstart's checks",
    }.items():
        assert re.search(f"a node is excluded: {name}: .*{re.escape(why)}", log), log
    summary = summary_of(out)
    assert summary["examples"] == sum(int((np.load(data / f"{name}.npz")["split"] == 0).sum()) for name in NODES)
    assert summary["accuracy"] > 0.8
    with (out / "clients.csv").open(newline="") as file:
        assert {row["client"] for row in csv.DictReader(file) if int(row["bytes_up"])} == set(NODES)

    # Whose key is taken away is unregistered by the next run.
    (machines.folder / "keys" / "empty.pub").unlink()
    admit(str(machines.folder), "127.0.0.1", str(machines.port))
    with Control.of(Server(machines.folder, "127.0.0.1", machines.port)) as control:
        gone = {node.name for node in control.nodes() if node.status == "unregistered"}
    assert gone == {"empty"}
