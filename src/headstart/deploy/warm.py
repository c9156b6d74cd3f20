"""A warm process for every node: it has loaded Flower, numpy and headstart, and forks for every message.

Flower 1.41 starts `flwr-clientapp` for every message, which loads all of them for seconds. Here three processes belong
to a node:

- the SuperNode, which `headstart.deploy.guard` starts, and which looks for messages (`headstart.deploy.polling`);
- Flower's SuperExec (`python -m headstart.deploy.warm superexec`), which asks the next one;
- the warm process (`python -m headstart.deploy.warm serve`), which only imports and loads: no threads of its own, no
  computation. For a message it forks, and the child runs Flower's `flwr-clientapp`. All that comes back from a child is
  the names of modules that it had to import, which the next one finds loaded: torch, where something is trained. Once a
  child had to load a backbone, the warm process has its pre-trained weights, too, which children share with it.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from logging import ERROR
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from headstart.config.recipe import Recipe

LOADED = ("flwr.supernode.cli.flwr_clientapp", "headstart.deploy.apps", "headstart.data", "headstart.engine.respond")
"""What answers any message."""
RECIPE = "HEADSTART_RECIPE"
"""Environment variable: the file of the recipe that the node takes part in."""
LEARNED = (
    "anyio", "certifi", "flwr", "h11", "headstart", "httpcore", "httpx", "numpy", "peft", "scipy", "sklearn", "torch",
    "transformers",
)  # fmt: skip
"""Packages whose modules the warm process imports once a child has."""
LOADS = "headstart.backbones.registry"
"""What a child imports to load a backbone."""
AGAIN = 5.0
"""Seconds between two starts of a warm process that ends by itself."""


# ---------------------------------------------------------------------------------------------------------- SuperExec


class Warm:
    """The warm process of a node as its SuperExec sees it."""

    def __init__(self) -> None:
        self._start()

    def _start(self) -> None:
        command = (sys.executable, "-P", "-m", "headstart.deploy.warm", "serve")
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, bufsize=0)
        self.started = time.monotonic()

    def revive(self) -> None:
        """Start the process again if it has ended."""
        from flwr.supercore import log

        if (status := self.process.poll()) is not None:
            log(ERROR, "The process that answers messages ended with status %d and is started again.", status)
            self._start()

    def launch(self, command: Sequence[str], **_: object) -> None:
        """In the place of a new process for Flower's command: a fork, which gets the same arguments."""
        from flwr.supercore import log

        if command[0] != "flwr-clientapp":
            log(ERROR, "Refused: %s; this node answers messages and runs nothing else.", command[0])
            return
        self.revive()
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):  # ended just now: Flower says so to the server, as of any child that ends
            self.process.stdin.write(json.dumps(command).encode() + b"\n")

    def sleep(self, seconds: float) -> None:
        """Until the SuperNode says that there is a task, at most so long."""
        if time.monotonic() - self.started > AGAIN:
            self.revive()
        ready, _, _ = select.select([0], [], [], seconds)
        if ready and not os.read(0, 4096):
            time.sleep(seconds)  # the SuperNode has ended, which Flower notices


def superexec(arguments: Sequence[str]) -> None:
    """Run `flower-superexec` with a warm process."""
    from flwr.supercore.cli.flower_superexec import flower_superexec

    loop: Any = importlib.import_module("flwr.supercore.superexec.run_superexec")
    executor: Any = importlib.import_module("flwr.supercore.superexec.executor.subprocess_executor")
    warm = Warm()
    loop.time = SimpleNamespace(sleep=warm.sleep)
    executor.subprocess = SimpleNamespace(Popen=warm.launch, DEVNULL=subprocess.DEVNULL)
    sys.argv = ["flower-superexec", *arguments]
    flower_superexec()


# ------------------------------------------------------------------------------------------------------- warm process


def serve() -> None:
    """Fork for every command, a line on standard input, until that ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal, which SuperNode and children hear as well
    # Modules that are imported ask whether there is a GPU; by CUDA itself, no fork could use it any more.
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    _load((*LOADED, *_needed()))
    requests, children = b"", dict[int, tuple[int, bytearray]]()
    while True:
        ready, _, _ = select.select([0, *children], [], [])
        for each in ready:
            data = os.read(each, 1 << 16)
            if each != 0 and data:
                children[each][1].extend(data)
            elif each != 0:
                _end(each, *children.pop(each))
            elif not data:
                return
            else:
                *lines, requests = (requests + data).split(b"\n")
                for line in lines:
                    _fork(json.loads(line), children)


def _recipe() -> Recipe | None:
    """The node's recipe; a child says what is wrong with it."""
    from headstart.config.recipe import Recipe

    try:
        return Recipe.load(Path(os.environ[RECIPE]))
    except (KeyError, OSError, ValueError):
        return None


def _needed() -> tuple[str, ...]:
    """torch, where the node's recipe trains something or has a backbone."""
    recipe = _recipe()
    if recipe is None:
        return ()
    trains = any(stage.trains for stage in recipe.stages)
    return ("torch",) if trains or recipe.model.backbone != "features" else ()


def hold() -> None:
    """Load the backbone of the node's recipe for all children to come; one that does not load, a child speaks of.

    Not one that a user has added, nor one of few bits: they may start threads, or a GPU, which no fork could use then.
    """
    import torch

    from headstart.backbones import BACKBONES, hold_backbones

    recipe, threads = _recipe(), torch.get_num_threads()
    if recipe is None or recipe.model.backbone == "features" or recipe.model.quantise:
        return
    if (known := BACKBONES.get(recipe.model.backbone)) and known.registered:
        return
    torch.set_num_threads(1)  # threads of OpenMP do not survive a fork, and whoever needs them then waits for ever
    with suppress(Exception):
        hold_backbones(recipe.models)
    torch.set_num_threads(threads)
    _load(())


def _load(names: Sequence[str], *skipped: type[Exception]) -> None:
    """Import modules; the garbage collector of children does not look through them, which would copy them."""
    for name in names:
        with suppress(*skipped):
            importlib.import_module(name)
    gc.collect()
    gc.freeze()


def _fork(command: Sequence[str], children: dict[int, tuple[int, bytearray]]) -> None:
    """A child for a command; its report, a pipe, is noted with its process."""
    reader, writer = os.pipe()
    if child := os.fork():
        os.close(writer)
        children[reader] = child, bytearray()
        return
    for other in (reader, *children):
        os.close(other)
    _answer(command, writer)


def _answer(command: Sequence[str], report: int) -> NoReturn:
    """In a child: what the command `flwr-clientapp` does, which ends the process."""
    import numpy as np
    from flwr.supernode.cli.flwr_clientapp import flwr_clientapp

    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    np.random.seed()  # noqa: NPY002 - Python's own generator starts anew after a fork, numpy's global one does not
    with suppress(OSError):
        Path("/proc/self/comm").write_text("flwr-clientapp")
    known = set(sys.modules)
    sys.argv = [*command]
    status: object = 1
    try:
        flwr_clientapp()
    except SystemExit as end:
        status = end.code
    except BaseException:
        traceback.print_exc()
    new = [name for name in sys.modules if name not in known and name.partition(".")[0] in LEARNED]
    with suppress(OSError):
        os.write(report, "\n".join(new).encode())
    # As multiprocessing ends a fork: to take everything that is loaded apart would copy all of it.
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status if isinstance(status, int) else int(status is not None))


def _end(report: int, child: int, names: bytearray) -> None:
    """A child has ended: what it had to import is there for the next one."""
    os.close(report)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        print(f"flwr-clientapp {child} was ended by signal {os.WTERMSIG(status)}", file=sys.stderr, flush=True)
    if names:
        new = names.decode().split()
        _load(new, ImportError)  # some are made by other modules, and not found
        if LOADS in new:
            hold()


if __name__ == "__main__":
    superexec(sys.argv[2:]) if sys.argv[1] == "superexec" else serve()
