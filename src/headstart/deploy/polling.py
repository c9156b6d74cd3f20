"""When SuperNodes, SuperExecs and the ServerApp look for work: when there is some, instead of at fixed intervals.

Flower 1.41 asks for messages every 3 seconds, for a reply every 0.5 and for a task every second. Here the SuperLink
keeps a request for messages or tasks until there may be one (`Held`), at most as long as a node of Flower's pauses; a
node's SuperExec is told of a task; and where nobody tells, a pause is a twentieth of the time since there was work.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import Awaitable, Sequence
from contextlib import suppress
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

SHARE = 1 / 20
"""A pause as a part of the time waited."""
QUICKEST = 1 / 30
"""The shortest pause as a part of Flower's own: 0.1 s between two requests to the SuperLink."""
HOLD = 3.0
"""Seconds for which the SuperLink keeps a request for messages: those between two of them at Flower's SuperNode."""
QUIET = 0.03
"""Seconds without a push after which a message is taken to be whole: its parts follow it one by one."""
BACKOFF = 0.1
"""Seconds after which a SuperNode asks again for a part that is not there yet; Flower's 1 is long for one message."""


# ---------------------------------------------------------------------------------------------------------- SuperNode


def install(node: Any) -> None:
    """Change a SuperNode (``node`` is Flower's `start_client_internal`) before it starts."""
    pull, push, work = node._pull_and_store_message, node._push_messages, _Work()
    last: int | None = None

    def pull_and_tell(**given: Any) -> int | None:
        nonlocal last
        work.asked = time.monotonic()
        last = pull(**given)
        work.looked(last is not None)
        return last

    def push_for_the_last(state: Any, **given: Any) -> None:
        """Push replies until there is one for the run of the last message: the first may be of a run that ended while
        its message came, and Flower would then wait for another message before it pushes the reply to this one."""
        seen = set[int]()

        def replies(**which: Any) -> Sequence[Any]:
            found: Sequence[Any] = state.get_messages_legacy(**which)
            seen.update(reply.metadata.run_id for reply in found)
            return found

        names = ("get_message_processing_duration", "delete_messages")
        view = SimpleNamespace(get_messages_legacy=replies, **{name: getattr(state, name) for name in names})
        while last not in seen:
            push(state=view, **given)

    node._pull_and_store_message = pull_and_tell
    node._push_messages = push_for_the_last
    node.pull_objects = partial(node.pull_objects, initial_backoff=BACKOFF)
    node.time = SimpleNamespace(sleep=work.pause)
    node.subprocess = SimpleNamespace(Popen=work.start_superexec)


class _Work:
    """What a SuperNode waits for, and since when."""

    def __init__(self) -> None:
        self.since = self.asked = time.monotonic()
        self.found = False
        self.superexec: subprocess.Popen[bytes] | None = None

    def looked(self, found: bool) -> None:
        """A look for a message is over; what follows is waiting for a reply to it, or for the next message."""
        if found or self.found:
            self.since = time.monotonic()
        if found:
            self.asked = self.since
            if self.superexec is not None and self.superexec.stdin is not None:
                with suppress(OSError):
                    self.superexec.stdin.write(b"\n")
        self.found = found

    def pause(self, seconds: float) -> None:
        """In the place of a pause of Flower's: shorter, the less time has passed without work."""
        now = time.monotonic()
        pause = min(seconds, max(QUICKEST * seconds, SHARE * (now - self.since)))
        held = 0.0 if self.found else now - self.asked  # the SuperLink has paused in the node's place
        time.sleep(max(0.0, pause - held))

    def start_superexec(self, command: Sequence[str]) -> subprocess.Popen[bytes]:
        """In the place of `flower-superexec`; a byte on its standard input says that there is a task."""
        python = (sys.executable, "-P", "-m", "headstart.deploy.warm", "superexec", *command[1:])
        self.superexec = subprocess.Popen(python, stdin=subprocess.PIPE, bufsize=0)
        return self.superexec


# ---------------------------------------------------------------------------------------------------------- SuperLink


class Held:
    """ASGI middleware of the SuperLink: a request for messages or tasks is answered once there may be one.

    Who asks for the first time, or has not asked since the last push, is answered at once.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app
        node, server, task = _Bell(b"flwr-public-key"), _Bell(b"flwr-task-token"), _Bell(b"")
        self.pulls = {
            "/v1/fleet/pull-messages": node,
            "/v1/runtime/pull-messages": server,
            "/v1/runtime/acquire-task": task,
        }
        self.pushes = {
            "/v1/runtime/push-messages": node,
            "/v1/runtime/push-object": node,
            "/v1/fleet/push-messages": server,
            "/v1/fleet/push-object": server,
            "/v1/control/start-run": task,
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, now or later."""
        path = scope.get("path", "")
        if path in self.pulls:
            await self._pull(self.pulls[path], scope, receive, send)
        elif path in self.pushes:
            await self.pushes[path].pushed(self.app(scope, receive, send))
        else:
            await self.app(scope, receive, send)

    async def _pull(self, bell: _Bell, scope: Scope, receive: Receive, send: Send) -> None:
        who = next((value for name, value in scope["headers"] if name == bell.header), b"")
        request = [await receive()]
        while request[-1].get("more_body"):
            request.append(await receive())
        if bell.known.get(who) == bell.rung:
            gone = asyncio.ensure_future(receive())  # what comes after a whole request is the end of the connection
            rung = asyncio.ensure_future(bell.event.wait())
            done, _ = await asyncio.wait((gone, rung), timeout=HOLD, return_when=asyncio.FIRST_COMPLETED)
            for waiting in (gone, rung):
                waiting.cancel()
            if gone in done:  # nobody would get the message
                return
        rung_before = bell.rung

        async def again() -> Message:
            return request.pop(0) if request else await receive()

        async def answer(message: Message) -> None:
            if message.get("status") == 200:  # Flower knows them; of others nothing is kept
                bell.known[who] = rung_before
            await send(message)

        await self.app(scope, again, answer)


class _Bell:
    """Rings after something was pushed, once all its parts are there; header: names who waits for it."""

    def __init__(self, header: bytes) -> None:
        self.header = header
        self.rung, self.known = 0, dict[bytes, int]()
        """How often it rang, and had when somebody was last answered, by the header that says who."""
        self.event, self.under_way = asyncio.Event(), 0

    async def pushed(self, request: Awaitable[None]) -> None:
        """A push, after which the bell rings unless another one follows."""
        self.under_way += 1
        try:
            await request
        finally:
            self.under_way -= 1
            self.last = asyncio.get_running_loop().time()
            asyncio.get_running_loop().call_later(QUIET, self._ring, self.last)

    def _ring(self, last: float) -> None:
        if self.under_way == 0 and self.last == last:
            self.rung += 1
            self.event.set()
            self.event = asyncio.Event()
