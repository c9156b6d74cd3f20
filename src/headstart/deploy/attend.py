"""`headstart node run`: a node's SuperNode from its kit, until it is told to stop, in plain words."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import tomllib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import tomli_w

from headstart.config.describe import write_schema
from headstart.config.recipe import Recipe
from headstart.core.files import write_text
from headstart.deploy.guard import check_flower
from headstart.deploy.kit import Kit, check_keys
from headstart.deploy.reach import trouble
from headstart.engine.flower_messages import package_version
from headstart.errors import HeadstartError

AGAIN = 5.0
"""Seconds between two attempts to connect."""
PROBE = 30.0
"""Seconds between two looks at the server's certificate and clock: of what is wrong with them, Flower says little."""
Say = Callable[[str], None]

_WORDS = {
    r"SuperNode ID: ": "connected to {address}",
    r"\[code: 2001\]|\[code: 2004\]|\[code: 2002\]": (
        "refused by {address}: the server has not admitted this key, or has revoked it, or a node with this key is "
        "online or was killed less than a minute ago; asking again"
    ),
    r"Connection attempt failed|ConnectError|Connection refused": "nobody answers at {address}; asking again",
    r"(Refused: the app of this run .*)": "{found}",
    r"refused: \w+: (.*)": "the server's question is refused: {found}",
    r"(The process that answers messages ended .*)": "{found}",
    r"headstart: (.*)": "{found}",
}
"""What Flower's log says, and what a user reads."""


def attend(path: Path, data: str, folder: Path, say: Say, task: str = "") -> int:
    """Run the node of a kit until it is told to stop; returns the exit status.

    task: the node's own, where the recipe has several.
    """
    check_flower()
    kit = Kit.load(path)
    check_version(kit, path)
    check_keys(kit, folder)
    if "://" not in data and not Path(data).exists():
        raise HeadstartError(f"--data {data}: there is nothing")
    Recipe.parse(tomllib.loads(kit.recipe)).task_number(task)
    folder = folder.absolute()
    _unpack(kit, data, task, folder, say)
    say(f"{kit.name}: the kit's fingerprint is {kit.fingerprint()}")
    voice = _Voice(say)
    with stoppable():
        while True:
            # Flower's SuperNode ends with 0 when it is unregistered, too; 2: a mistake that trying again does not mend
            if _attempt(kit, folder, voice) == 2:
                return 2
            time.sleep(AGAIN)


def check_version(kit: Kit, path: Path) -> None:
    """Refuse the kit of another version."""
    if kit.version != package_version():
        raise HeadstartError(
            f"{path} is of headstart {kit.version}, and this is {package_version()}: install the server's version"
        )


def _unpack(kit: Kit, data: str, task: str, folder: Path, say: Say) -> None:
    """Write the files that the SuperNode reads; say which keys of other nodes have changed since the kit before."""
    place = folder / "kit"
    place.mkdir(exist_ok=True)
    before = dict(line.split(" ", 1) for line in _lines(place / "peers"))
    for node in kit.nodes:
        if before.get(node.name, node.signing) != node.signing:
            say(f"{node.name} has other keys than in the kit before: ask its owner whether it made new ones")
    write_text(place / "ca.pem", kit.authority)
    write_text(place / "recipe.toml", kit.recipe)
    write_schema(place)
    write_text(place / "peers", kit.peers)
    path = Path(data)
    config = {
        "name": kit.name, "data": str(path.absolute()) if path.exists() else data, "task": task,
        "recipe": str(place / "recipe.toml"), "limits": str(folder / "node.toml"), "state": str(folder / "state"),
        "signing_key": str(folder / "signing"), "peers": str(place / "peers"),
    }  # fmt: skip
    write_text(place / "node-config.toml", tomli_w.dumps(config))


def _lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").splitlines() if path.is_file() else []


def node_command(kit: Kit, folder: Path) -> list[str]:
    """Flower's SuperNode, started by `headstart.deploy.guard`."""
    with socket.create_server(("127.0.0.1", 0)) as one:
        port = one.getsockname()[1]
    return [
        sys.executable, "-P", "-m", "headstart.deploy.guard", "supernode", kit.app,
        "--superlink", f"{kit.host}:{kit.port}", "--port", str(port),
        "--root-certificates", str(folder / "kit" / "ca.pem"), "--auth-supernode-private-key", str(folder / "key"),
        "--node-config", str(folder / "kit" / "node-config.toml"),
    ]  # fmt: skip


def flower_environment(home: Path) -> dict[str, str]:
    """The environment of a process of Flower's that keeps its files in a folder."""
    home.mkdir(parents=True, exist_ok=True)
    quiet = {
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.2",
    }
    # Flower starts its own commands by name, which a service manager that starts this one by its path does not know.
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    return {**os.environ, **quiet, "PATH": path, "FLWR_HOME": str(home), "PYTHONUNBUFFERED": "1"}


def _attempt(kit: Kit, folder: Path, say: Say) -> int:
    """One SuperNode, from its start to its end."""
    environment = flower_environment(folder / "state" / "flower")
    process = subprocess.Popen(
        node_command(kit, folder), env=environment, cwd=folder, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, errors="replace", start_new_session=True,
    )  # fmt: skip
    reader = threading.Thread(target=_follow_log, args=(process, kit, folder, say), daemon=True)
    reader.start()
    answers = _Answers(folder / "state" / "ledger.jsonl")
    looked = -PROBE
    try:
        while process.poll() is None:
            for line in answers.new():
                say(line)
            if time.monotonic() - looked > PROBE:
                looked = time.monotonic()
                if wrong := trouble(kit):
                    say(wrong)
            time.sleep(0.5)
        for line in answers.new():
            say(line)
        reader.join(5)
        return process.returncode
    finally:
        stop(process, signal.SIGINT)


def stop(process: subprocess.Popen[str], number: int, patience: float = 20.0) -> None:
    """End a process, which is a session of its own: first it may say goodbye, then all of it is killed."""
    until = time.monotonic() + patience
    while process.poll() is None and time.monotonic() < until:
        with suppress(ProcessLookupError):
            process.send_signal(number)  # Flower hears the first, and ignores the others
        with suppress(subprocess.TimeoutExpired):
            process.wait(1)
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _follow_log(process: subprocess.Popen[str], kit: Kit, folder: Path, say: Say) -> None:
    """Keep the log of a SuperNode, and say what is in it that a user can act on."""
    refused = False
    assert process.stdout is not None
    with (folder / "state" / "node.log").open("a", encoding="utf-8") as log:
        for line in process.stdout:
            log.write(line)
            log.flush()
            message = plain(line, {"address": f"{kit.host}:{kit.port}"})
            if message and not refused:  # what follows is how the processes of a refused node end
                say(message)
                refused = message.startswith("refused")


class _Voice:
    """Says nothing twice in a row."""

    def __init__(self, say: Say) -> None:
        self.say, self.last = say, ""

    def __call__(self, line: str) -> None:
        """Say a line, unless it was the last."""
        if line != self.last:
            self.say(line)
        self.last = line


def plain(line: str, facts: Mapping[str, str]) -> str | None:
    """A line of Flower's log in plain words; None if it says nothing to a user."""
    for pattern, words in _WORDS.items():
        if found := re.search(pattern, line):
            return words.format(found=found[1] if found.groups() else "", **facts)
    return None


class _Answers:
    """What has been added to a node's ledger since it was last looked at."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.read = path.stat().st_size if path.is_file() else 0

    def new(self) -> Iterator[str]:
        """A sentence for every answer."""
        if not self.path.is_file():
            return
        with self.path.open("rb") as file:
            file.seek(self.read)
            for line in file:
                if not line.endswith(b"\n"):  # not whole yet
                    return
                self.read += len(line)
                entry = json.loads(line)
                if "round" in entry:
                    what = {"answer": "answered", "test": "tested the model after"}.get(entry["kind"])
                    what = what or f"sent {entry['kind']} of the secure aggregation in"
                    yield f"{what} round {int(entry['round']) + 1} of stage {entry.get('stage', 0)}"


@contextmanager
def stoppable() -> Iterator[None]:
    """SIGTERM ends as Ctrl-C does."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
