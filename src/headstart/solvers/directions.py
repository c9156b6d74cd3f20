"""Random directions that anybody can rebuild from a seed: of a parameter's name and shape, and nothing else.

The generator is Philox, which is counter-based: block b of the direction of a parameter depends on (seed, number, name,
b) alone, so neither the order of parameters nor the number of threads nor the device changes a bit.
"""

from __future__ import annotations

import hashlib
import os
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import numpy as np
import numpy.typing as npt

_BLOCK = 1 << 18


def direction(seed: int, number: int, name: str, size: int) -> npt.NDArray[np.float32]:
    """Independent standard normal values [size]: the ``number``-th direction of a seed, for the parameter ``name``."""
    values = np.empty(size, np.float32)
    starts = range(0, size, _BLOCK)

    def fill(start: int) -> None:
        text = f"{seed}/{number}/{name}/{start // _BLOCK}".encode()
        key = int.from_bytes(hashlib.blake2b(text, digest_size=16).digest(), "little")
        part = values[start : start + _BLOCK]
        np.random.Generator(np.random.Philox(key=key)).standard_normal(out=part, dtype=np.float32)

    if len(starts) == 1:
        fill(0)
    else:
        list(_pool().map(fill, starts))
    return values


@cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(os.cpu_count() or 1)
