"""Containers: what is written is a Containerfile and a compose file, with what a service needs and no more.

No container is started here. `hadolint` checks the one where it is installed.
"""

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

pytest.importorskip("flwr")

from headstart.deploy.admit import Server, init_server
from headstart.deploy.kit import init_node
from headstart.engine.flower_messages import package_version
from headstart.errors import HeadstartError
from tests.deploy.test_kit import RECIPE, command

OWNER = (os.getuid(), os.getgid()) if os.getuid() else (1234, 1234)


def written(home: Path, name: str) -> dict[str, Any]:
    service: dict[str, Any] = yaml.safe_load((home / "compose.yaml").read_text())["services"].pop(name)
    return service


@pytest.fixture
def server(tmp_path: Path) -> Server:
    folder = tmp_path / "o'brien $HOME: #1" / "server"
    init_server(folder, RECIPE, "fl.example.org", 9443)
    os.chown(folder, *OWNER)
    return Server.load(folder)


def test_a_server_in_a_container(server: Server, tmp_path: Path) -> None:
    np.savez(tmp_path / "test set.npz", X=np.zeros((1, 2)), y=[0])
    words = ["--wait", "60", "--test", tmp_path / "test set.npz", "--out", server.folder / "second"]
    said = command("server", server.folder, *words, "--container", tmp_path / "image")
    assert "docker compose up --build" in said
    service = written(tmp_path / "image", "server")
    assert service["command"] == [
        "server", "/federation", "--out", "/federation/second", "--wait", "60.0", "--test", "/data/test set.npz"
    ]  # fmt: skip
    assert service["volumes"] == [
        {"type": "bind", "source": str(server.folder).replace("$", "$$"), "target": "/federation", "read_only": False},
        {"type": "bind", "source": str(tmp_path / "test set.npz"), "target": "/data/test set.npz", "read_only": True},
    ]
    assert service["ports"] == ["9443:9443"]
    assert service["user"] == f"{OWNER[0]}:{OWNER[1]}"
    assert (service["read_only"], service["cap_drop"]) == (True, ["ALL"])
    assert service["environment"]["HEADSTART_CACHE"] == "/federation/state/cache"
    with pytest.raises(HeadstartError, match="exists: name another folder"):
        command("server", server.folder, "--container", tmp_path / "image")
    with pytest.raises(HeadstartError, match="a container writes into"):
        command("server", server.folder, "--out", tmp_path / "elsewhere", "--container", tmp_path / "other")


def test_a_node_in_a_container(tmp_path: Path) -> None:
    init_node(tmp_path / "node", "a")
    os.chown(tmp_path / "node", *OWNER)
    (tmp_path / "photos").mkdir()
    for kit, there in ((tmp_path / "node" / "a.kit", "/node/a.kit"), (tmp_path / "a.kit", "/kit/a.kit")):
        image = tmp_path / f"image {kit.parent.name}"
        words = ["node", "run", kit, "--data", tmp_path / "photos", "--folder", tmp_path / "node"]
        command(*words, "--container", image)
        service = written(image, "node")
        assert service["command"] == ["node", "run", there, "--data", "/data/photos", "--folder", "/node"]
        sources = {volume["target"]: (volume["source"], volume["read_only"]) for volume in service["volumes"]}
        assert sources["/node"] == (str(tmp_path / "node"), False)
        assert sources["/data/photos"] == (str(tmp_path / "photos"), True)
        assert ("/kit/a.kit" in sources) == (there == "/kit/a.kit")
        assert "ports" not in service
    hub = ["node", "run", tmp_path / "node" / "a.kit", "--data", "owner/name", "--container", tmp_path / "hub"]
    command(*hub)
    assert "owner/name" in written(tmp_path / "hub", "node")["command"]


def test_no_container_runs_as_root_or_where_nobody_reaches_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    init_server(tmp_path / "server", RECIPE, "127.0.0.1", 9443)
    with pytest.raises(HeadstartError, match="on this machine only"):
        command("server", tmp_path / "server", "--container", tmp_path / "image")
    init_node(tmp_path / "node", "a")
    if os.getuid() == 0:
        with pytest.raises(HeadstartError, match="belongs to root"):
            command("node", "run", tmp_path / "node" / "a.kit", "--data", "x", "--container", tmp_path / "image")
    assert not (tmp_path / "image").exists()


def test_the_containerfile_installs_this_version_and_is_what_hadolint_accepts(server: Server, tmp_path: Path) -> None:
    command("server", server.folder, "--container", tmp_path / "image")
    text = (tmp_path / "image" / "Containerfile").read_text()
    assert f'"headstart[federation]=={package_version()}"' in text
    lines = text.splitlines()
    assert lines.index("USER 10001:10001") < next(n for n, line in enumerate(lines) if line.startswith("ENTRYPOINT"))
    if (hadolint := shutil.which("hadolint")) is None:
        pytest.skip("there is no hadolint")
    done = subprocess.run([hadolint, tmp_path / "image" / "Containerfile"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
