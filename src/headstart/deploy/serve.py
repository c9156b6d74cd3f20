"""`headstart server`: the SuperLink of a federation, its nodes, and one run from its start to its end."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import threading
import time
import tomllib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import Any

import tomli_w

from headstart.core.files import write_text
from headstart.deploy.admit import Server
from headstart.deploy.attend import flower_environment, stop, stoppable
from headstart.deploy.control import Control, ControlError, listens
from headstart.deploy.guard import check_flower
from headstart.errors import HeadstartError

LOOK = 3.0
"""Seconds between two looks at who is there."""
JOIN = 120.0
"""Seconds that a run waits for a node that left, or was revoked, just when the run began."""
START = 120.0
"""Seconds that a SuperLink may take to listen."""
Say = Callable[[str], None]


def serve(folder: Path, say: Say, out: Path | None = None, wait: float | None = None, test: str = "") -> int:
    """Run the recipe of a server's folder with its nodes; returns the exit status.

    wait: seconds after which the run starts without those that are missing; test: the server's own data to test on.
    """
    check_flower()
    server = Server.load(folder)
    out = (out or server.folder / "run").absolute()
    if not server.admitted:
        raise HeadstartError(f"no node is admitted yet: headstart deploy add {server.folder} NAME.request")
    server.check_kits()
    for line in server.warnings():
        say(f"warning: {line}")
    if (out / "summary.json").is_file():
        say(f"the run in {out} is finished; --out names a folder for another one")
        return 0
    values = {"out": str(out), "test": str(Path(test).absolute()) if test else "", "wait": str(JOIN)}
    with stoppable():
        try:
            with _superlink(server, say), Control.of(server) as control:
                return _run(server, control, values, wait, say)
        except ControlError as error:
            server.note(phase="failed", reason=str(error))
            say(f"failed: {error}; {_log(server)} says more. The same command continues from the last checkpoint")
            return 1
        except BaseException:
            server.note(phase="stopped")
            raise


# ---------------------------------------------------------------------------------------------------------- SuperLink


def _log(server: Server) -> Path:
    return server.folder / "state" / "superlink.log"


def superlink_command(server: Server) -> list[str]:
    """Flower's SuperLink, started by `headstart.deploy.guard`."""
    place = server.folder / "certificates"
    return [
        sys.executable, "-P", "-m", "headstart.deploy.guard", "superlink", "--host", server.listen,
        "--port", str(server.port), "--ssl-ca-certfile", str(place / "ca.pem"),
        "--ssl-certfile", str(place / "server.pem"), "--ssl-keyfile", str(place / "server.key"),
        "--enable-supernode-auth", "--database", str(server.folder / "state" / "superlink.db"),
        "--disable-runtime-dependency-installation",
    ]  # fmt: skip


@contextmanager
def _superlink(server: Server, say: Say) -> Iterator[None]:
    """A SuperLink that listens: the one that runs already, or one that ends with this command."""
    noted = server.folder / "state" / "superlink.pid"
    if listens(server):
        who = f" (process {noted.read_text(encoding='utf-8').strip()})" if noted.is_file() else ""
        say(f"a SuperLink{who} listens at {server.local}:{server.port} already; it runs on when this command ends")
        yield
        return
    environment = flower_environment(server.folder / "state" / "superlink")
    environment["FLWR_SUPEREXEC_TASK_POLL_INTERVAL"] = "0.2"
    with _log(server).open("a", encoding="utf-8") as log:
        process = subprocess.Popen(
            superlink_command(server), env=environment, cwd=server.folder, stdin=subprocess.DEVNULL, stdout=log,
            stderr=subprocess.STDOUT, text=True, start_new_session=True,
        )  # fmt: skip
    write_text(noted, f"{process.pid}\n")
    try:
        until = time.monotonic() + START
        while not listens(server):
            if process.poll() is not None or time.monotonic() > until:
                raise ControlError("the SuperLink did not start")
            time.sleep(0.2)
        say(f"the SuperLink listens at {server.listen}:{server.port}; nodes call {server.host}:{server.port}")
        yield
    finally:
        stop(process, signal.SIGTERM)
        noted.unlink(missing_ok=True)


# -------------------------------------------------------------------------------------------------------------- nodes


class Roll:
    """Who is there, and what is said of it when it changes; run: the directory, for those who watch."""

    def __init__(self, server: Server, say: Say, run: str) -> None:
        self.server, self.say, self.last, self.run = server, say, None, run
        self.phase, self.reason = "waiting", ""
        self.warned = set(server.warnings())

    last: dict[str, str] | None
    """Missing nodes, and since when, as they were last spoken of."""

    def call(self, control: Control) -> dict[str, str]:
        """Tell the SuperLink who is admitted, and look who is missing; says so if it is not as before."""
        names = [node.name for node in self.server.admitted]
        control.admit(self.server.admitted)
        found = control.nodes()
        missing = missing_nodes(names, found)
        self.tell(self.phase, found=found)
        if missing != self.last:
            came = [name for name in self.last or names if name in names and name not in missing]
            if came:
                self.say(f"connected: {', '.join(came)}")
            if missing:
                self.say("missing: " + ", ".join(f"{name} ({since})" for name, since in missing.items()))
            self.last = missing
        return missing

    def tell(self, phase: str, reason: str = "", found: Sequence[Any] | None = None) -> None:
        """Tell those who watch; a look that is under way when the run ends tells of its end, too."""
        self.phase, self.reason = phase, reason or self.reason
        self.server.note(found, run=self.run, phase=phase, reason=self.reason)

    def watch(self, ended: threading.Event) -> None:
        """Look again and again, until the run has ended."""
        with Control.of(self.server) as control:
            while not ended.wait(LOOK):
                with suppress(ControlError, HeadstartError):
                    for line in set(self.server.warnings()) - self.warned:
                        self.say(f"warning: {line}")
                        self.warned.add(line)
                    self.call(control)


def missing_nodes(names: Iterable[str], nodes: Iterable[Any]) -> dict[str, str]:
    """Names of nodes that are not online, and since when."""
    known = {node.name: node for node in nodes if node.status != "unregistered"}
    missing = {}
    for name in names:
        node = known.get(name)
        if node is None or node.status != "online":
            left = node.last_deactivated_at if node is not None else ""
            when = f"{datetime.fromisoformat(left).astimezone():%Y-%m-%d %H:%M:%S}" if left else ""
            missing[name] = f"since {when}" if when else "has never connected"
    return missing


# ---------------------------------------------------------------------------------------------------------------- run


def _run(server: Server, control: Control, values: dict[str, str], wait: float | None, say: Say) -> int:
    """Start the run when everybody is there, or follow the one that is under way; returns the exit status."""
    out = Path(values["out"])
    roll = Roll(server, say, str(out.relative_to(server.folder) if out.is_relative_to(server.folder) else out))
    until = time.monotonic() + wait if wait else None
    missing = roll.call(control)
    run = next((run for run, (status, *_) in control.runs().items() if status != "finished"), None)
    if run is not None:
        say("a run is under way; this is what it says, from its start")
    else:
        while missing and (until is None or time.monotonic() < until):
            time.sleep(LOOK)
            missing = roll.call(control)
        names = [node.name for node in server.admitted]
        _note(server, values["out"], names)
        recipe = (server.folder / "recipe.toml").read_text(encoding="utf-8")
        run = control.start(server.folder / "app", {**values, "recipe": recipe, "nodes": ",".join(names)})
        say(f"the run starts with {len(names) - len(missing)} of {len(names)} nodes")
    roll.phase = "running"
    reason = _follow(run, roll, control, say)
    status, how, details = control.runs()[run]
    if (status, how) == ("finished", "completed"):
        roll.tell("finished")
        say(f"finished: {values['out']}")
        return 0
    reason = reason or details or how
    roll.tell("failed", reason)
    say(f"failed: {reason}")
    return 1


def _note(server: Server, out: str, names: list[str]) -> None:
    """Remember who a run began with; refuse to go on with others."""
    path = server.folder / "state" / "run.toml"
    known = tomllib.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    if known.get("out") == out and known["nodes"] != names and Path(out, "recipe.toml").is_file():
        raise HeadstartError(
            f"{out} was begun with {', '.join(known['nodes'])}, and the nodes are now {', '.join(names)}: "
            "--out names a folder for a new run"
        )
    write_text(path, tomli_w.dumps({"out": out, "nodes": names}))


def _follow(run: int, roll: Roll, control: Control, say: Say) -> str:
    """Show what a run prints until it ends; returns why it failed, where it says so."""
    ended = threading.Event()
    watcher = threading.Thread(target=roll.watch, args=(ended,), daemon=True)
    watcher.start()
    shown = Shown(say)
    try:
        for text in control.log(run):
            shown.take(text)
        while control.runs()[run][0] != "finished":
            time.sleep(0.2)
    finally:
        ended.set()
        watcher.join(LOOK)
    return shown.reason


_NOISE = re.compile(
    r"(\x1b\[\d+m)*(INFO|DEBUG)\b|Successfully installed |.*(ServerApp raised an exception|Exit Code: 201)"
    r"|An unhandled exception occurred in the ServerApp|For more information, visit: <https://flower|\s*$"
    r"|.*SSL/TLS handshake error detected|The above exception was the direct cause of"
)
"""Of Flower's, about its own processes, and that a ServerApp failed: why is said by its error, or its traceback."""


class Shown:
    """The log of a run as a user sees it: of a traceback that ends in an error of headstart's, or in a certificate that
    is not valid, that alone."""

    def __init__(self, say: Say) -> None:
        self.say, self.reason = say, ""
        self._rest, self._traceback = "", list[str]()

    def take(self, text: str) -> None:
        """Show a part of the log, line by line."""
        *lines, self._rest = (self._rest + text).split("\n")
        for line in lines:
            self._line(line)

    def _line(self, line: str) -> None:
        if line.startswith("Traceback (most recent call last)") or (self._traceback and line[:1] in (" ", "")):
            self._traceback.append(line)
        elif found := re.match(r"headstart\.errors\.\w+: (.*)", line):
            self.reason, self._traceback = found[1], []
        elif re.match(r"http\w+\.\w+: .*CERTIFICATE_VERIFY_FAILED", line):
            self.reason, self._traceback = "the server's certificate is not valid now: run `headstart deploy renew`", []
        elif not _NOISE.match(line):
            for held in (*self._traceback, line):
                self.say(held)
            self._traceback = []
