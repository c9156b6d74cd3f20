"""Messages answered by forks of a warm process, with real processes: a SuperLink, a node, and an app that says what it
finds where it runs."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tomli_w

pytest.importorskip("flwr")

from headstart.backbones import load_backbone
from headstart.config.recipe import Recipe
from headstart.core.files import write_text
from headstart.deploy.guard import app_digest
from tests.backbones.test_language import folder_of, scores
from tests.deploy.processes import recipe_of, wait_for
from tests.deploy.test_deployment import Machines, set_variables
from tests.runner.test_choose import recipe_of as recipe_of_words

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="processes are found through /proc"),
]

PROBE = {
    "pyproject.toml": """
[project]
name = "probe"
version = "1.0.0"
license = "Apache-2.0"
dependencies = []

[tool.flwr.app]
publisher = "headstart"
config = { out = "", commands = "" }

[tool.flwr.app.components]
serverapp = "probe.server:app"
clientapp = "probe.client:app"
""",
    "probe/__init__.py": "",
    "probe/server.py": """
import json
import time
from pathlib import Path

from flwr.app import ConfigRecord, Message, RecordDict
from flwr.serverapp import ServerApp

app = ServerApp()


@app.main()
def main(grid, context):
    out, replies = Path(context.run_config["out"]), []
    while not (nodes := list(grid.get_node_ids())):
        time.sleep(0.2)
    for command in context.run_config["commands"].split():
        while command == "pause" and not (out / "go").exists():
            time.sleep(0.1)
        if command == "pause":
            continue
        content = RecordDict({"probe": ConfigRecord({"command": command})})
        (reply,) = grid.send_and_receive([Message(content, nodes[0], "query")])
        said = {"error": reply.error.reason} if reply.has_error() else json.loads(reply.content["probe"]["said"])
        replies.append(said)
        (out / "replies.tmp").write_text(json.dumps(replies))
        (out / "replies").unlink(missing_ok=True)
        (out / "replies.tmp").rename(out / "replies")
""",
    "probe/client.py": """
import json
import os
import random
import signal
import sys
import threading

import numpy as np
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.clientapp import ClientApp

from headstart.deploy import apps

app = ClientApp()


@app.query()
def answer(message, context):
    command = message.content["probe"]["command"]
    if command == "crash":
        os._exit(3)
    if command == "raise":
        raise ZeroDivisionError("of the app")
    if command == "torch":
        import torch

        assert (torch.ones(500, 500) @ torch.ones(500, 500) == 500).all()
    said = {
        "pid": os.getpid(),
        "parent": os.getppid(),
        "name": open("/proc/self/comm").read().strip(),
        "left": [len(apps._NODES), os.environ.get("LEFT"), "/left" in sys.path],
        "torch": "torch" in sys.modules,
        "random": [random.random(), np.random.random(), X25519PrivateKey.generate().private_bytes_raw().hex()],
        "folder": os.getcwd(),
        "guarded": os.environ.get("HEADSTART_GUARDED"),
        "stdin": os.readlink("/proc/self/fd/0"),
        "descriptors": [os.readlink(f"/proc/self/fd/{n}") for n in os.listdir("/proc/self/fd") if int(n) > 2
                        and os.path.exists(f"/proc/self/fd/{n}")],
        "product": float((np.ones((300, 300)) @ np.ones((300, 300))).sum()),
    }
    apps._NODES["left", "behind"] = None
    os.environ["LEFT"] = "behind"
    sys.path.append("/left")
    return Message(RecordDict({"probe": ConfigRecord({"said": json.dumps(said)})}), reply_to=message)
""",
}


class Probed(Machines):
    """A SuperLink and one node that executes headstart's app and the probe."""

    def __init__(self, folder: Path) -> None:
        data = folder.parent / "data.npz"
        np.savez(data, X=np.ones((4, 2), np.float32), y=np.array([0, 1, 0, 1]), split=np.zeros(4))
        super().__init__(folder, recipe_of(folder.parent, {"method": "fedncm"}))
        self.app = folder.parent / "probe"
        for name, text in PROBE.items():
            (self.app / name).parent.mkdir(parents=True, exist_ok=True)
            (self.app / name).write_text(text.lstrip())
        digests = f"{app_digest(folder / 'app')},{app_digest(self.app)}"
        set_variables(folder / "node-a.sh", data=str(data), app=digests)

    def ask_node(self, out: Path, commands: str) -> None:
        config = f"out='{out}' commands='{commands}'"
        done = self.ask("127.0.0.1", "run", self.app, "federation", "--run-config", config)
        assert json.loads(done.stdout)["success"], done.stdout

    def replies(self, out: Path, count: int) -> list[dict[str, Any]]:
        """What the node has said, once it is so much."""

        def found() -> list[dict[str, Any]] | None:
            try:
                said: list[dict[str, Any]] = json.loads((out / "replies").read_text())
            except FileNotFoundError:
                return None
            return said if len(said) >= count else None

        said: list[dict[str, Any]] = wait_for(found)
        return said

    def warm(self) -> list[int]:
        """The node's warm process, and forks of it."""
        return self.of_node("a", "headstart.deploy.warm\0serve")


@pytest.fixture(scope="module")
def machines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Probed]:
    federation = Probed(tmp_path_factory.mktemp("warm") / "federation")
    try:
        federation.superlink()
        key = federation.folder / "keys" / "a.pub"
        assert federation.ask("127.0.0.1", "supernode", "register", key, "federation", "--name", "a").returncode == 0
        federation.node("a")
        yield federation
    finally:
        federation.stop()


def test_every_message_has_a_fresh_process_that_finds_nothing_of_the_one_before(
    machines: Probed, tmp_path: Path
) -> None:
    machines.ask_node(tmp_path, "state torch raise state")
    first, second, failed, third = machines.replies(tmp_path, 4)
    (server,) = wait_for(lambda: len(found := machines.warm()) == 1 and found)
    assert failed == {"error": "<class 'ZeroDivisionError'>:<'of the app'>"}
    answers = (first, second, third)
    assert len({answer["pid"] for answer in answers} | {server}) == 4
    for answer in answers:
        assert answer["parent"] == server
        assert answer["name"] == "flwr-clientapp"
        assert answer["left"] == [0, None, False]
        assert answer["folder"] == str(machines.folder)
        assert answer["guarded"] == "supernode"
        assert answer["stdin"] == "/dev/null"
        assert sum(path.startswith("pipe:") for path in answer["descriptors"]) == 1  # its own report
        assert answer["product"] == 300**3
    for column in zip(*(answer["random"] for answer in answers), strict=True):
        assert len(set(column)) == 3
    # The recipe trains nothing; what one child imported is loaded for the next.
    assert [answer["torch"] for answer in answers] == [False, True, True]


HELD = """
import os, shutil, sys
from pathlib import Path
from headstart.deploy import warm

os.environ[warm.RECIPE] = sys.argv[1]
warm.hold()
shutil.rmtree(sys.argv[2])  # from here on, weights are in memory or nowhere
for number in range(2):
    if not os.fork():
        import torch
        from headstart.backbones import load_backbone
        from headstart.config.recipe import Recipe

        torch.set_num_threads(2)
        assert (torch.ones(500, 500) @ torch.ones(500, 500) == 500).all()
        backbone = load_backbone(Recipe.load(Path(sys.argv[1])).model)
        with torch.no_grad():
            ids, mask = backbone.transform.collate([backbone.transform("the cat", "x")])[:2]
            print(number, *backbone.body(ids, mask)[0].tolist(), flush=True)
            for parameter in backbone.body.parameters():
                parameter.zero_()  # nobody else's
        os._exit(0)
    os.wait()
"""


def test_children_share_the_weights_that_the_warm_process_has_loaded(tmp_path: Path) -> None:
    place = folder_of(tmp_path / "llama")
    recipe = recipe_of_words(tmp_path).model_dump(mode="json", exclude_none=True)
    recipe["model"]["backbone"] = str(place)
    write_text(tmp_path / "recipe.toml", tomli_w.dumps({key: recipe[key] for key in ("data", "model", "stages")}))
    expected = scores(load_backbone(Recipe.load(tmp_path / "recipe.toml").model), ["the cat"])[0]
    command = [sys.executable, "-c", HELD, tmp_path / "recipe.toml", place]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    for number, line in enumerate(done.stdout.splitlines()):
        first, *found = line.split()
        assert int(first) == number
        np.testing.assert_allclose([float(each) for each in found], expected, rtol=1e-5)
    assert number == 1


def test_a_warm_process_that_is_killed_is_started_again(machines: Probed, tmp_path: Path) -> None:
    machines.ask_node(tmp_path, "state pause state state")
    (first,) = machines.replies(tmp_path, 1)
    (server,) = wait_for(lambda: len(found := machines.warm()) == 1 and found)
    assert first["parent"] == server
    os.kill(server, signal.SIGKILL)
    (tmp_path / "go").touch()
    _, second, third = machines.replies(tmp_path, 3)
    (after,) = wait_for(lambda: len(found := machines.warm()) == 1 and found)
    assert second["parent"] == third["parent"] == after != server
    assert "The process that answers messages ended with status -9 and is started again." in machines.log("a")


@pytest.mark.minutes
def test_a_child_that_crashes_is_flowers_error_and_the_next_message_is_answered(
    machines: Probed, tmp_path: Path
) -> None:
    machines.ask_node(tmp_path, "state crash state")
    first, crashed, after = machines.replies(tmp_path, 3)
    assert crashed == {"error": "ClientApp stopped responding."}
    assert after["parent"] == first["parent"]
    assert after["pid"] != first["pid"]


def test_the_processes_end_with_the_supernode(machines: Probed) -> None:
    wait_for(machines.warm)
    (node,) = machines.of_node("a", "headstart.deploy.guard\0supernode")
    others = {*machines.of_node("a")} - {node}
    assert len(others) >= 2  # its SuperExec and the warm process
    os.kill(node, signal.SIGKILL)
    wait_for(lambda: not others & {*machines.of_node("a")}, 30)  # the script starts new ones
