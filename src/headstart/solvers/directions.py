"""Random directions that anybody can rebuild from a seed: of a parameter's name and shape, and nothing else.

The generator is Philox, which is counter-based: block b of the direction of a parameter depends on (seed, number, name,
b) alone, so neither the order of parameters nor the number of threads nor the device changes a bit.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import TypeVar

import numpy as np
import numpy.typing as npt

T = TypeVar("T")

BLOCK = 1 << 18
"""Values that are drawn from one key."""
_WORDS = 1 << 16  # of 64 signs each, in a block


def direction(seed: int, number: int, name: str, size: int) -> npt.NDArray[np.float32]:
    """Independent standard normal values [size]: the ``number``-th direction of a seed, for the parameter ``name``."""
    values = np.empty(size, np.float32)
    for block, part in blocks(seed, number, name, size):
        values[block * BLOCK : block * BLOCK + len(part)] = part
    return values


def blocks(
    seed: int, number: int, name: str, size: int, wanted: Sequence[int] | None = None
) -> Iterator[tuple[int, npt.NDArray[np.float32]]]:
    """A direction as its blocks [BLOCK], in order, each with its number: all, or those that are wanted."""

    def drawn(block: int) -> tuple[int, npt.NDArray[np.float32]]:
        generator = np.random.Generator(_generator(f"{seed}/{number}/{name}/{block}"))
        return block, generator.standard_normal(min(BLOCK, size - block * BLOCK), dtype=np.float32)

    return _each(drawn, range(-(-size // BLOCK)) if wanted is None else wanted)


def signs(seed: int, number: int, name: str, size: int) -> npt.NDArray[np.uint8]:
    """Independent fair bits, eight in each of [ceil(size / 8)] bytes, the lowest first: 1 for +1 and 0 for −1 in the
    ``number``-th direction of a seed, for the parameter ``name``."""
    bits = np.empty(-(-size // 64), "<u8")

    def fill(block: int) -> None:
        part = bits[block * _WORDS : (block + 1) * _WORDS]
        part[:] = _generator(f"signs/{seed}/{number}/{name}/{block}").random_raw(len(part))

    for _ in _each(fill, range(-(-len(bits) // _WORDS))):
        pass
    return bits.view(np.uint8)[: -(-size // 8)]


def _generator(name: str) -> np.random.Philox:
    key = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=16).digest(), "little")
    return np.random.Philox(key=key)


def _each(make: Callable[[int], T], numbers: Sequence[int]) -> Iterator[T]:
    """What is made of each number, in order; several at a time where there are several."""
    return map(make, numbers) if len(numbers) == 1 else _pool().map(make, numbers)


@cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(os.cpu_count() or 1)
