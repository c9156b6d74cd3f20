"""Random directions that anybody can rebuild from a seed: of a parameter's name and shape, and nothing else.

The generator is Philox, which is counter-based: block b of the direction of a parameter depends on (seed, number, name,
b) alone, so neither the order of parameters nor the number of threads nor the device changes a bit.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import numpy as np
import numpy.typing as npt

_BLOCK = 1 << 18
_WORDS = 1 << 16  # of 64 signs each, in a block


def direction(seed: int, number: int, name: str, size: int) -> npt.NDArray[np.float32]:
    """Independent standard normal values [size]: the ``number``-th direction of a seed, for the parameter ``name``."""
    values = np.empty(size, np.float32)

    def fill(block: int) -> None:
        part = values[block * _BLOCK : (block + 1) * _BLOCK]
        generator = _generator(f"{seed}/{number}/{name}/{block}")
        np.random.Generator(generator).standard_normal(out=part, dtype=np.float32)

    _for_each(fill, -(-size // _BLOCK))
    return values


def signs(seed: int, number: int, name: str, size: int) -> npt.NDArray[np.uint8]:
    """Independent fair bits, eight in each of [ceil(size / 8)] bytes, the lowest first: 1 for +1 and 0 for −1 in the
    ``number``-th direction of a seed, for the parameter ``name``."""
    bits = np.empty(-(-size // 64), "<u8")

    def fill(block: int) -> None:
        part = bits[block * _WORDS : (block + 1) * _WORDS]
        part[:] = _generator(f"signs/{seed}/{number}/{name}/{block}").random_raw(len(part))

    _for_each(fill, -(-len(bits) // _WORDS))
    return bits.view(np.uint8)[: -(-size // 8)]


def _generator(name: str) -> np.random.Philox:
    key = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=16).digest(), "little")
    return np.random.Philox(key=key)


def _for_each(fill: Callable[[int], None], blocks: int) -> None:
    """Fill the blocks of a direction, several at a time where there are several."""
    if blocks == 1:
        fill(0)
    else:
        list(_pool().map(fill, range(blocks)))


@cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(os.cpu_count() or 1)
