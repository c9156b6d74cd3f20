"""Who may start a run, and which app a node executes; `test_deployment.py` attacks the processes themselves."""

import asyncio
import os
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr")

from headstart.config.recipe import Recipe
from headstart.deploy.folder import init
from headstart.deploy.guard import FLOWER, GUARDED, LocalOnly, app_digest, check_guarded
from headstart.errors import HeadstartError

DIGEST = "0" * 64


def status(path: str, client: tuple[str, int] | None, kind: str = "http") -> int:
    """Of the answer to a request from a peer: 200 where the app behind the middleware is reached."""
    sent: list[dict[str, Any]] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200})

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        raise AssertionError("nothing of a request is read before it is known whose it is")

    asyncio.run(LocalOnly(app)({"type": kind, "path": path, "client": client, "headers": []}, receive, send))
    return int(sent[0]["status"]) if sent else 0


@pytest.mark.parametrize(
    ("host", "local"),
    [
        ("127.0.0.1", True), ("127.8.9.10", True), ("::1", True), ("10.0.0.1", False), ("192.0.2.2", False),
        ("128.0.0.1", False), ("0.0.0.0", False), ("::", False), ("fe80::1%eth0", False), ("localhost", False),
        ("testclient", False), ("", False), (None, False),
    ],
)  # fmt: skip
def test_only_loopback_addresses_reach_more_than_fleet(host: str | None, local: bool) -> None:
    client = (host, 40000) if host is not None else None
    assert status("/v1/fleet/get-run", client) == 200
    for path in ("/v1/control/start-run", "/v1/runtime/acquire-task", "/docs", "/", "", "/v1/fleet", "/x/v1/fleet/"):
        assert status(path, client) == (200 if local else 403), path
        assert status(path, client, "websocket") == (200 if local else 0), path


def start(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "headstart.deploy.guard", *arguments]
    return subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("arguments", [["superlink", "--insecure"], ["supernode", DIGEST, "--insecure"]])
def test_another_version_of_flower_is_refused(tmp_path: Path, arguments: list[str]) -> None:
    (tmp_path / "flwr-1.42.0.dist-info").mkdir()
    (tmp_path / "flwr-1.42.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: flwr\nVersion: 1.42.0\n")
    done = start(*arguments, PYTHONPATH=os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    assert done.returncode == 2
    assert done.stderr == (
        "headstart: Flower 1.42.0 is installed; who can start a run was tested with 1.41.0 only: "
        "pip install 'flwr[simulation]==1.41.0'\n"
    )


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["superlink", "--host", "192.0.2.2"], "--host 192.0.2.2: must be 0.0.0.0 (all interfaces) or 127.0.0.1"),
        (["supernode", ""], "app '': must be the SHA-256 of headstart's app"),
        (["supernode", "--insecure"], "app '--insecure': must be the SHA-256 of headstart's app"),
        (["supernode", f"{DIGEST},"], "must be the SHA-256 of headstart's app"),
        (["supernode"], "superlink or supernode SHA256, then Flower's arguments"),
        (["serverapp"], "superlink or supernode SHA256, then Flower's arguments"),
    ],
)
def test_mistakes_are_one_sentence(arguments: list[str], sentence: str) -> None:
    done = start(*arguments)
    assert done.returncode == 2
    assert done.stderr.startswith("headstart: ")
    assert sentence in done.stderr
    assert done.stderr.count("\n") == 1


def test_an_app_says_so_if_it_was_started_without_the_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    from headstart.deploy.apps import serve

    monkeypatch.setenv(GUARDED, "supernode")
    check_guarded("supernode")
    for part in ("superlink", ""):
        with pytest.raises(HeadstartError, match="make a new folder with `headstart deploy init`"):
            check_guarded(part)
    monkeypatch.delenv(GUARDED)
    grid: Any = None
    with pytest.raises(HeadstartError, match="flower-superlink was started without headstart's checks"):
        serve(grid, grid)


def test_the_digest_is_that_of_flowers_bundle_and_changes_with_the_app(tmp_path: Path) -> None:
    data = {"dataset": "x", "classes": ["a", "b"]}
    recipe = Recipe.parse({"data": data, "model": {"backbone": "features"}, "stages": [{"method": "fedcof"}]})
    for name in ("one", "two"):
        init(tmp_path / name, recipe, ["a"])
    app = tmp_path / "one" / "app"
    digest = app_digest(app)
    assert digest == app_digest(tmp_path / "two" / "app")
    assert f"app={digest} " in (tmp_path / "one" / "node-a.sh").read_text()
    done = subprocess.run(
        [Path(sys.executable).with_name("flwr"), "build", "--app", app], cwd=tmp_path, capture_output=True, text=True,
        env=os.environ | {"FLWR_HOME": str(tmp_path / "home"), "FLWR_TELEMETRY_ENABLED": "0"},
    )  # fmt: skip
    assert f".{digest[:8]}.fab" in done.stdout
    (app / "more.py").write_text("pass")
    assert app_digest(app) != digest


def test_the_tested_version_is_the_one_that_headstart_installs() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert f"flwr[simulation]=={FLOWER[-1]}" in project["optional-dependencies"]["federation"]


def test_a_process_ends_with_its_command_whatever_its_threads_do() -> None:
    code = """
import atexit, sys, threading, time
from headstart.deploy.guard import leave

def command():
    threading.Thread(target=time.sleep, args=(600,)).start()
    atexit.register(print, "goodbye")
    sys.exit(3)

leave(command)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (3, "goodbye\n"), done.stderr
