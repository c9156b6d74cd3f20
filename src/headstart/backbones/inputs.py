"""Examples as a body reads them, batch by batch: what training needs where features cannot be cached."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from headstart.backbones.backbone import Backbone
from headstart.backbones.prefix import Prefix, Prefixed, StateFile
from headstart.data import Examples
from headstart.data.examples import Ints, UnreadableError, all_unreadable

# Prepared examples are kept up to so many bytes; the others are prepared again whenever they are asked for.
_ROOM = 1 << 30


@dataclass(frozen=True, eq=False)
class _Ready:
    """What can be had of a batch without the model: prepared examples, and the states that are there, by row."""

    rows: Ints
    values: dict[int, Any]
    batch: tuple[Tensor, ...]
    states: dict[int, npt.NDArray[np.float32]]


class Inputs:
    """Batches of a split: decoded and resized once where there is room, the next batch while this one is used.

    With a prefix, batches carry the states behind it. They hold for as long as the body keeps the prefix's weights.
    """

    def __init__(
        self,
        backbone: Backbone,
        examples: Examples,
        what: str,
        prefix: Prefix | None = None,
        others: Sequence[Backbone] = (),
        states: Path | None = None,
    ) -> None:
        """others: the backbone as further tasks see it, where the examples are those of several, one after the
        other; states: a file that keeps the states behind the prefix for the next process."""
        self._views = (backbone, *others)
        self._examples, self._what = examples, what
        self._prepared: dict[int, Any] = {}
        self._room = _ROOM
        self._prefix, self._states = prefix, StateFile(states)

    def batches(self, batches: Iterable[Ints]) -> Iterator[tuple[Tensor, ...]]:
        """What the body reads for each batch of rows [B]."""
        waiting = None
        with ThreadPoolExecutor(1) as pool:
            for rows in batches:
                ahead = pool.submit(self._ready, rows)
                if waiting is not None:
                    yield self._completed(waiting.result())
                waiting = ahead
            if waiting is not None:
                yield self._completed(waiting.result())

    def own_states(self) -> None:
        """In a process that was forked: states behind the prefix go into a file of its own from now on."""
        self._states = StateFile()

    def by_length(self, rows: Ints) -> Ints:
        """Positions in ``rows``, shortest example first, so that little is padded when they are read in this order."""
        lengths = [len(value) for row in rows for value in self._prepare([int(row)]).values()]
        return np.argsort(np.array(lengths, np.int64), kind="stable")

    def groups(self, rows: Ints, most: int, pass_cost: int) -> list[Ints]:
        """Positions in ``rows`` as batches of so many at most. Texts are with others of like length; a batch more is
        worth it where it saves ``pass_cost`` tokens of padding."""
        order = np.arange(len(rows))
        if self._views[0].kind != "text":  # images are all of one length, and to ask for it would decode them
            return np.split(order, range(most, len(order), most))
        order = self.by_length(rows)
        lengths = [len(value) for row in rows[order] for value in self._prepare([int(row)]).values()]
        return np.split(order, _cuts(np.array(lengths, np.int64), most, pass_cost))

    def _view(self, row: int) -> Backbone:
        """The backbone as it reads this example."""
        (part,) = self._examples.parts(np.array([row])) if len(self._views) > 1 else (0,)
        return self._views[part]

    def _ready(self, rows: Ints) -> _Ready:
        values = self._prepare([int(row) for row in rows])
        batch = self._view(int(rows[0])).transform.collate([values[int(row)] for row in rows])
        return _Ready(rows, values, batch, {row: self._states.read(row) for row in values if row in self._states})

    def _completed(self, ready: _Ready) -> tuple[Tensor, ...]:
        """The batch with its states, in the thread of whoever uses the model, as no two can run it at a time."""
        if self._prefix is None:
            return ready.batch
        for row in ready.values.keys() - ready.states.keys():
            if row not in self._states:
                # Alone: in a batch, an example's last digits would depend on who comes with it, and a run that was
                # resumed would differ from one that was not. On a CPU it takes less than twice the time, once.
                view = self._view(row)
                (states,) = self._prefix.states(view.transform.collate([ready.values[row]]), view.body)
                self._states.write(row, states.cpu().numpy())
            ready.states[row] = self._states.read(row)
        each = [ready.states[int(row)] for row in ready.rows]
        # Zeros behind a shorter text: what is there is masked.
        padded = np.zeros((len(each), max(len(states) for states in each), each[0].shape[1]), np.float32)
        for place, states in zip(padded, each, strict=True):
            place[: len(states)] = states
        return Prefixed(ready.batch, torch.from_numpy(padded), self._prefix)

    def _prepare(self, rows: list[int]) -> dict[int, Any]:
        """Prepared examples by row, kept while there is room."""
        missing = [row for row in dict.fromkeys(rows) if row not in self._prepared]
        raw = self._examples.take(np.array(missing, np.int64)).raw(0, len(missing)) if missing else []
        try:
            named = zip(missing, raw, strict=True)
            new = {row: self._view(row).transform(value, f"{self._what}: example {row}") for row, value in named}
        except UnreadableError as error:
            raise all_unreadable(self._what, {"": self._examples}, self._views[0].pixel_range, error) from None
        for row, value in new.items():
            if value.nbytes <= self._room:
                self._room -= value.nbytes
                self._prepared[row] = value
        return {row: new[row] if row in new else self._prepared[row] for row in rows}


def _cuts(lengths: Ints, most: int, pass_cost: int) -> list[int]:
    """Where to cut ascending lengths [n] into groups of so many at most, so that they take the least: each is padded to
    its longest, and costs ``pass_cost`` more."""
    count = len(lengths)
    least, stop = np.zeros(count + 1, np.int64), np.zeros(count, np.int64)
    for first in reversed(range(count)):
        stops = np.arange(min(first + most, count), first, -1)  # the largest of those that take as much
        taken = lengths[stops - 1] * (stops - first) + pass_cost + least[stops]
        best = int(taken.argmin())
        least[first], stop[first] = taken[best], stops[best]
    cuts, at = [], 0
    while at < count and stop[at] < count:
        at = int(stop[at])
        cuts.append(at)
    return cuts
