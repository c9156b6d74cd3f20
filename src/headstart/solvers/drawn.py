"""Directions of a network's parameters as tensors, piece by piece; drawn once for all that reads them where there is
room."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cache, lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headstart.solvers.directions import ALIGNED, DISTRIBUTIONS, Codes, Floats

# Bytes of codes that are kept between two passes.
_ROOM = 64 << 20
# Numbers in a piece.
_PIECE = 1 << 20

Parts = Callable[[int, int], Iterator[tuple[int, Codes]]]
"""The codes of a direction's numbers between two places, some at a time, with where they begin."""


class Drawn:
    """The directions of a seed for some parameters, by number and name.

    No more than a piece of a direction is numbers at a time: what adds it to a parameter does so piece by piece.
    """

    def __init__(self, parameters: Mapping[str, Tensor], stage: Any) -> None:
        self._distribution = DISTRIBUTIONS[stage.perturbation]
        size = sum(parameter.numel() for parameter in parameters.values()) * stage.num_directions
        self._has_room = size // self._distribution.per_block * 16 <= _ROOM
        self._seed, self._kept = -1, dict[tuple[int, str], Codes]()
        """The codes of the last seed, where there is room for all of them."""
        self._piece = np.empty(0, np.float32)

    def pieces(
        self, seed: int, number: int, name: str, parameter: Tensor, factor: float
    ) -> Iterator[tuple[int, int, Tensor]]:
        """A direction times a factor: where each piece begins and ends among the parameter's numbers, and the piece,
        which may be changed and holds until the next."""
        size, table = parameter.numel(), _times(self._distribution.name, factor)
        parts = self._parts(seed, number, name, size)
        for start in range(0, size, _PIECE):
            stop = min(start + _PIECE, size)
            if parameter.device.type == "cpu":
                piece = self._filled(parts, start, stop, table)
            else:
                piece = looked_up(table, np.concatenate([codes for _, codes in parts(start, stop)]), parameter.device)
            yield start, stop, piece[: stop - start]

    def rows(self, seed: int, number: int, name: str, parameter: Tensor, factor: float, rows: Tensor) -> Tensor:
        """Some rows [r, d] of a direction times a factor."""
        width = parameter.numel() // len(parameter)
        found = self._distribution.rows(seed, number, name, rows.cpu().numpy(), width)
        return torch.from_numpy(np.multiply(found, np.float32(factor), out=found)).to(parameter.device)

    def _parts(self, seed: int, number: int, name: str, size: int) -> Parts:
        """Codes that are drawn when they are asked for, or that are kept."""

        def drawn(start: int, stop: int) -> Iterator[tuple[int, Codes]]:
            return self._distribution.codes(seed, number, name, start, stop)

        if not self._has_room:
            return drawn
        if seed != self._seed:
            self._seed, self._kept = seed, {}
        if (number, name) not in self._kept:
            self._kept[number, name] = np.concatenate([codes for _, codes in drawn(0, size)])
        kept, per_code = self._kept[number, name], self._distribution.per_code
        return lambda start, stop: iter([(start, kept[start // per_code : -(-stop // per_code)])])

    def _filled(self, parts: Parts, start: int, stop: int, table: Floats) -> Tensor:
        """A direction's numbers from ``start`` to ``stop`` at least, by as many threads as torch uses."""
        threads, per_code = torch.get_num_threads(), table.shape[1]
        share = -(-(stop - start) // (threads * ALIGNED)) * ALIGNED
        if len(self._piece) < stop - start:
            self._piece = np.empty(-(-(stop - start) // ALIGNED) * ALIGNED, np.float32)

        def fill(first: int) -> None:
            for place, codes in parts(first, min(first + share, stop)):
                out = self._piece[place - start :][: len(codes) * per_code].reshape(-1, per_code)
                np.take(table, codes, axis=0, out=out, mode="wrap")  # which checks nothing: every code is in the table

        # This thread takes a share as well, which costs less than to wait for others to begin.
        others = [_pool(threads, os.getpid()).submit(fill, first) for first in range(start + share, stop, share)]
        fill(start)
        for other in others:
            other.result()
        return torch.from_numpy(self._piece)


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
