"""When a SuperNode looks for messages and for replies: often while there is work, at Flower's intervals otherwise.

Flower 1.41 asks the SuperLink for messages every 3 seconds, and looks every 0.5 seconds for the reply to one and every
second for a task. Here a pause is a twentieth of the time since there was work: what waits, waits 5 % longer than it
has to, and a node without work is back at Flower's intervals after a minute. The SuperExec is told of a task.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

SHARE = 1 / 20
"""The pause as a part of the time waited."""
QUICKEST = 1 / 30
"""The shortest pause as a part of Flower's: 0.1 s between two requests to the SuperLink."""


def install(node: Any) -> None:
    """Change a SuperNode (``node`` is Flower's `start_client_internal`) before it starts."""
    pull, work = node._pull_and_store_message, _Work()

    def pull_and_tell(**given: Any) -> int | None:
        run: int | None = pull(**given)
        work.looked(run is not None)
        return run

    node._pull_and_store_message = pull_and_tell
    node.time = SimpleNamespace(sleep=work.pause)
    node.subprocess = SimpleNamespace(Popen=work.start_superexec)


class _Work:
    """What a SuperNode waits for, and since when."""

    def __init__(self) -> None:
        self.since, self.found = time.monotonic(), False
        self.superexec: subprocess.Popen[bytes] | None = None

    def looked(self, found: bool) -> None:
        """A look for a message is over; what follows is waiting for a reply to it, or for the next message."""
        if found or self.found:
            self.since = time.monotonic()
        self.found = found
        if found and self.superexec is not None and self.superexec.stdin is not None:
            with suppress(OSError):
                self.superexec.stdin.write(b"\n")

    def pause(self, seconds: float) -> None:
        """In the place of a pause of Flower's: shorter, the less time has passed without work."""
        waited = time.monotonic() - self.since
        time.sleep(min(seconds, max(QUICKEST * seconds, SHARE * waited)))

    def start_superexec(self, command: Sequence[str]) -> subprocess.Popen[bytes]:
        """In the place of `flower-superexec`; a byte on its standard input says that there is a task."""
        python = (sys.executable, "-P", "-m", "headstart.deploy.warm", "superexec", *command[1:])
        self.superexec = subprocess.Popen(python, stdin=subprocess.PIPE, bufsize=0)
        return self.superexec
