"""Simulated time: how fast each client is, when it can be asked, and how long a round of them takes.

A reply takes what `headstart plan` says of one: its bytes down, its forward passes and its bytes up, over the client's
downlink, arithmetic and uplink, each so many times as fast as the client's machine is.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from headstart.config.recipe import Clients
from headstart.core.reply import AnyReply, Failure, GroupReply, Reply
from headstart.core.statistics import Floats, Ints
from headstart.errors import HeadstartError

DAY = 86_400.0
_HOUR = 3600.0

Bools = npt.NDArray[np.bool_]


class Rates(Protocol):
    """Of a client, in bits and operations a second."""

    @property
    def uplink(self) -> float:
        """Bits that it sends."""

    @property
    def downlink(self) -> float:
        """Bits that it receives."""

    @property
    def flops(self) -> float:
        """Of its arithmetic."""


def reply_seconds(down: Any, operations: Any, up: Any, rates: Rates) -> dict[str, Any]:
    """What a reply spends its time on, from the bytes that it takes and the operations."""
    return {
        "the clients' downlinks": 8 * down / rates.downlink,
        "the clients' arithmetic": operations / rates.flops,
        "the clients' uplinks": 8 * up / rates.uplink,
    }


@dataclass(eq=False)
class Clock:
    """The machines of K clients, and what time it is."""

    rates: Clients
    speed: Floats
    """[K] How many times as fast as the rates each client is."""
    owner: Ints
    """[W] The client of each stretch of a day in which it can be asked; clients without any always can."""
    begins: Floats
    """[W] Seconds after midnight."""
    lasts: Floats
    """[W]"""
    operations: float = 0.0
    """Of a forward pass."""
    began: float = 0.0
    """When the stage began, in seconds from the first midnight on."""
    now: float = 0.0
    """Seconds since then."""
    ends: float = 0.0
    """When the requests of the round under way, which all begin now, have their replies."""

    @classmethod
    def of(cls, clients: Clients, names: Sequence[str], seed: int) -> Clock:
        """Drawn from the seed of the run, or as a trace has them."""
        rng, count = np.random.default_rng([0xC10C, seed]), len(names)
        speed = np.exp(clients.speed_spread * rng.standard_normal(count))
        begins, some = DAY * rng.random(count), clients.availability < 1
        owner = np.arange(count if some else 0)
        clock = cls(clients, speed, owner, begins[owner], np.full(len(owner), clients.availability * DAY))
        return clock if clients.trace is None else clock._traced(_rows(clients.trace, names))

    def _traced(self, rows: Sequence[tuple[int, float | None, float | None, float | None]]) -> Clock:
        for client, speed, _, _ in rows:
            self.speed[client] = self.speed[client] if speed is None else speed
        stretches = [(client, since, until) for client, _, since, until in rows if since is not None is not until]
        others = ~np.isin(self.owner, [client for client, _, _ in stretches])
        owner = np.array([client for client, _, _ in stretches], np.int64)
        begins = np.array([since * _HOUR for _, since, _ in stretches])
        lasts = np.array([((until - since) % 24 or 24) * _HOUR for _, since, until in stretches])
        return replace(
            self,
            owner=np.append(self.owner[others], owner),
            begins=np.append(self.begins[others], begins),
            lasts=np.append(self.lasts[others], lasts),
        )

    # ------------------------------------------------------------------------------------------------- who is there

    def available(self) -> Bools:
        """[K] Whether each client can be asked now."""
        return self.left() > 0

    def left(self) -> Floats:
        """[K] Seconds that each client can still be asked in from now on; 0 where it cannot."""
        left = np.full(len(self.speed), np.inf)
        left[self.owner] = 0.0
        since = (self.began + self.now - self.begins) % DAY
        np.maximum.at(left, self.owner, np.where(self.lasts >= DAY, np.inf, np.maximum(self.lasts - since, 0.0)))
        return left

    def waits(self, clients: Ints) -> Floats:
        """[M] Seconds until each of some clients can be asked."""
        wait = np.full(len(self.speed), np.inf)
        np.minimum.at(wait, self.owner, (self.begins - self.began - self.now) % DAY)
        return np.where(self.available(), 0.0, wait)[clients]

    def wait(self, clients: Bools) -> None:
        """Let time pass until one of some clients [K] can be asked."""
        while not (clients & self.available()).any():
            self.now += float(self.waits(np.flatnonzero(clients)).min()) + 1e-3  # or rounding might leave it short

    # ------------------------------------------------------------------------------------------- how long it takes

    def seconds(self, clients: Ints, down: Ints, up: Ints, passes: Ints) -> Floats:
        """[M] Of replies that take so many bytes and forward passes."""
        parts = reply_seconds(down, passes * self.operations, up, self.rates)
        return np.asarray(sum(parts.values())) / self.speed[clients]

    def timed(self, replies: Iterable[AnyReply], down: Ints, deadline: float | None) -> Iterator[Reply]:
        """Replies of single clients that start now: with the seconds until each has come, or is given up.

        down: [K] bytes that clients were sent.
        """
        left = self.left()
        for reply in replies:
            assert isinstance(reply, Reply)
            (client,) = reply.clients.tolist()
            took = float(self.seconds(reply.clients, down[reply.clients], reply.bytes_up, reply.forward_passes)[0])
            seconds, late = took, ""
            if deadline is not None and min(took, left[client]) > deadline:
                seconds, late = deadline, f"late: {took:.1f} s, and the deadline is {deadline:g} s"
            elif took > left[client]:
                seconds = float(left[client])
                late = f"it could not be reached any more after {seconds:.0f} s"
            yield replace(reply, seconds=seconds, late=late)

    def round(self, replies: Iterable[AnyReply], down: Ints, stage: Any, count: int) -> Iterator[AnyReply]:
        """The replies to a request, of whom the first ``count`` clients count; down: [K] bytes that they were sent."""
        if stage.secure or not (stage.trains and stage.communicates):
            yield from self._waited(replies, down, stage)
            return
        timed = self.timed(replies, down, stage.deadline)
        held = list(timed) if stage.over_selection else None  # who is first is known when all are
        good = sorted((reply.seconds, int(reply.clients[0])) for reply in held or () if not reply.late)
        last = good[count - 1] if len(good) >= count else (np.inf, 0)
        for reply in timed if held is None else held:
            if not reply.late and (reply.seconds, int(reply.clients[0])) > last:
                reply = replace(reply, late=f"late: {count} others were faster")
            self.ends = max(self.ends, self.now + min(reply.seconds, last[0]))
            yield reply

    def _waited(self, replies: Iterable[AnyReply], down: Ints, stage: Any) -> Iterator[AnyReply]:
        """Replies of clients that all count; where each is asked once, it is waited for, however long that takes."""
        for reply in replies:
            if not isinstance(reply, Failure):
                who = reply.sampled if isinstance(reply, GroupReply) else reply.clients
                up = reply.bytes_up * stage.communicates
                took = self.seconds(who, down[who], up, reply.forward_passes)
                took += 0.0 if stage.trains else self.waits(who)
                self.ends = max(self.ends, self.now + float(took.max(initial=0.0)))
            yield reply


def _rows(path: str, names: Sequence[str]) -> list[tuple[int, float | None, float | None, float | None]]:
    """The client, speed and hours of each row of a trace; every mistake at once."""
    numbers, found, wrong = {name: number for number, name in enumerate(names)}, [], []
    try:
        with open(path, encoding="utf-8-sig", newline="") as file:
            table = csv.DictReader(file)
            columns, rows = table.fieldnames or (), list(table)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise HeadstartError(f"clients.trace: cannot read {path}: {error}") from None
    unknown = [column for column in columns if column not in ("client", "speed", "from", "until")]
    if "client" not in columns or unknown or ("from" in columns) != ("until" in columns):
        raise HeadstartError(
            f"clients.trace: {path} has the columns {', '.join(columns)}; give client, and "
            "speed, or from and until, or all four"
        )
    for line, row in enumerate(rows, 2):
        name = str(row["client"])
        client = numbers.get(name, int(name) if name.isdecimal() and int(name) < len(names) else None)
        if client is None:
            wrong.append(f"line {line}: there is no client {name!r}")
            continue
        values: dict[str, float | None] = {}
        for key in ("speed", "from", "until"):
            text = row.get(key) or ""
            try:
                values[key] = float(text) if text else None
            except ValueError:
                values[key] = -1.0
            value = values[key]
            if value is not None and not (0 < value < np.inf if key == "speed" else 0 <= value <= 24):
                accepted = "a number greater than 0" if key == "speed" else "an hour from 0 to 24"
                wrong.append(f"line {line}: {key} must be {accepted} (got {text})")
        found.append((client, values["speed"], values["from"], values["until"]))
    if wrong:
        raise HeadstartError(f"clients.trace: {path}: {'; '.join(wrong)}")
    return found
