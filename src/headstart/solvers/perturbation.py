"""Directions of a network's parameters, added to tensors; drawn once for all that reads them where there is room."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cache, lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headstart.solvers import directions
from headstart.solvers.directions import ALIGNED, DISTRIBUTIONS, Codes, Floats

# Bytes of codes that are kept between two passes.
_ROOM = 64 << 20
# Numbers that a device other than the processor is sent at a time.
_PIECE = 1 << 20
# Numbers that are worth waking a thread for.
_SHARE = 1 << 16

Parts = Callable[[int, int], Iterator[tuple[int, Codes]]]
"""The codes of a direction's numbers between two places, some at a time, with where they begin."""


class Perturbation:
    """The directions of a seed for some parameters, by number and name.

    What is drawn is added at once, a part that stays in a core's cache at a time: no direction is numbers in memory.
    """

    def __init__(self, parameters: Mapping[str, Tensor], stage: Any) -> None:
        self._distribution = DISTRIBUTIONS[stage.perturbation]
        size = sum(parameter.numel() for parameter in parameters.values()) * stage.num_directions
        self._has_room = size // self._distribution.per_block * 16 <= _ROOM
        self._seed, self._kept = -1, dict[tuple[int, str], Codes]()
        """The codes of the last seed, where there is room for all of them."""
        self._spare: list[Floats] = []
        """Memory for a part of a direction, one for each thread."""

    def add(self, seed: int, number: int, name: str, factor: float, values: Tensor, out: Tensor) -> None:
        """out ← values + factor · z, z a direction of a parameter; out, values: [size], which may be the same."""
        size, table = len(values), _times(self._distribution.name, factor)
        parts = self._parts(seed, number, name, size)
        if values.device.type == "cpu":
            self._add_by_threads(parts, table, values.numpy(), out.numpy())
            return
        for start in range(0, size, _PIECE):
            part = slice(start, min(start + _PIECE, size))
            codes = np.concatenate([codes for _, codes in parts(part.start, part.stop)])
            piece = looked_up(table, codes, values.device)[: part.stop - start]
            torch.add(values[part], piece, out=out[part])

    def rows(self, seed: int, number: int, name: str, parameter: Tensor, factor: float, rows: Tensor) -> Tensor:
        """Some rows [r, d] of a direction times a factor."""
        width = parameter.numel() // len(parameter)
        found = self._distribution.rows(seed, number, name, rows.cpu().numpy(), width)
        return torch.from_numpy(np.multiply(found, np.float32(factor), out=found)).to(parameter.device)

    def _parts(self, seed: int, number: int, name: str, size: int) -> Parts:
        """Codes that are drawn when they are asked for, or that are kept."""

        def draw(start: int, stop: int) -> Iterator[tuple[int, Codes]]:
            return self._distribution.codes(seed, number, name, start, stop)

        if not self._has_room:
            return draw
        if seed != self._seed:
            self._seed, self._kept = seed, {}
        if (number, name) not in self._kept:
            self._kept[number, name] = np.concatenate([codes for _, codes in draw(0, size)])
        kept, per_code = self._kept[number, name], self._distribution.per_code

        def again(start: int, stop: int) -> Iterator[tuple[int, Codes]]:
            for first in range(start, stop, directions.AT_ONCE):
                yield first, kept[first // per_code : -(-min(first + directions.AT_ONCE, stop) // per_code)]

        return again

    def _add_by_threads(self, parts: Parts, table: Floats, values: Floats, out: Floats) -> None:
        """out ← values + what the codes stand for, by as many threads as torch uses."""
        threads, size = torch.get_num_threads(), len(values)
        share = -(-max(-(-size // threads), _SHARE) // ALIGNED) * ALIGNED
        while len(self._spare) < threads:
            self._spare.append(np.empty(directions.AT_ONCE, np.float32))

        def add(first: int) -> None:
            spare = self._spare[first // share]
            for start, codes in parts(first, min(first + share, size)):
                piece = spare[: codes.size * table.shape[1]]
                # "wrap" checks nothing: every code is in the table.
                np.take(table, codes, axis=0, out=piece.reshape(-1, table.shape[1]), mode="wrap")
                stop = min(start + len(piece), first + share, size)
                np.add(values[start:stop], piece[: stop - start], out=out[start:stop])

        # This thread takes a share as well, which costs less than to wait for others to begin.
        others = [_pool(threads, os.getpid()).submit(add, first) for first in range(share, size, share)]
        add(0)
        for other in others:
            other.result()


def looked_up(table: Floats, codes: Codes, device: torch.device) -> Tensor:
    """What codes stand for, looked up on a device, to which less is sent that way."""
    places = torch.from_numpy(codes.astype(np.int32)).to(device)
    return torch.from_numpy(table).to(device).index_select(0, places).view(-1)


@lru_cache(maxsize=8)
def _times(distribution: str, factor: float) -> Floats:
    """The table of a distribution times a factor, rounded as a product of its numbers is."""
    return DISTRIBUTIONS[distribution].table * np.float32(factor)


@cache
def _pool(threads: int, process: int) -> ThreadPoolExecutor:
    """Threads of this process: those of the one that it was forked from are not there."""
    return ThreadPoolExecutor(threads)
