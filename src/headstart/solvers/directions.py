"""Random directions that anybody can rebuild from a seed: of a parameter's name and shape, and nothing else.

The bits are AES-256 in counter mode under a key of (seed, number, name). A byte stands for one of 256 numbers of the
normal distribution, or a bit for a sign. So any part of a direction is drawn without the rest, and neither the
order of parameters nor the number of threads nor the device nor the release of a library changes a bit.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy import special

from headstart.core.seeds import key_blocks, key_stream

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int64]
Codes = npt.NDArray[np.unsignedinteger]

ALIGNED = 128
"""A part of a direction begins at a multiple of so many numbers: a block of the cipher at least."""
AT_ONCE = 1 << 17
"""Numbers that are drawn at a time, few enough to stay in a core's cache beside their codes and the table."""


@dataclass(frozen=True)
class Distribution:
    """What the independent numbers of a direction are drawn from; all have mean 0 and variance 1."""

    name: str
    table: Floats
    """[codes, numbers]: what each code stands for; all are as likely."""
    code: np.dtype[np.unsignedinteger]

    @property
    def per_code(self) -> int:
        """Numbers that a code stands for."""
        return int(self.table.shape[1])

    @property
    def per_block(self) -> int:
        """Numbers of a block of the cipher, 16 bytes."""
        return 16 // self.code.itemsize * self.per_code

    def codes(self, seed: int, number: int, name: str, start: int, stop: int) -> Iterator[tuple[int, Codes]]:
        """Of the ``number``-th direction of a seed for the parameter ``name``, the codes of its numbers from ``start``,
        a multiple of 128, to ``stop``: some at a time, with where they begin."""
        read = key_stream(self._key(seed, number, name), start // self.per_block)
        for first in range(start, stop, AT_ONCE):
            count = -(-(min(first + AT_ONCE, stop) - first) // self.per_code)
            yield first, np.frombuffer(read(count * self.code.itemsize), self.code)

    def direction(self, seed: int, number: int, name: str, size: int) -> Floats:
        """All numbers [size] of a direction."""
        parts = [self.table[codes].reshape(-1) for _, codes in self.codes(seed, number, name, 0, size)]
        return np.concatenate(parts)[:size]

    def rows(self, seed: int, number: int, name: str, rows: Ints, width: int) -> Floats:
        """The numbers [r, width] of a direction in these rows [r] of a matrix."""
        first, offset = np.divmod(rows * width, self.per_block)
        blocks = first[:, None] + np.arange(-(-(width - 1) // self.per_block) + 1)
        codes = np.frombuffer(key_blocks(self._key(seed, number, name), blocks), self.code)
        numbers = self.table[codes].reshape(len(rows), -1)
        return np.take_along_axis(numbers, offset[:, None] + np.arange(width), axis=1)

    def _key(self, seed: int, number: int, name: str) -> bytes:
        return hashlib.blake2b(f"{self.name}/{seed}/{number}/{name}".encode(), digest_size=32).digest()


def _normal() -> Floats:
    """[65536, 2]: of every two bytes, the lower first, a number each: the means of the standard normal distribution
    between its 256-quantiles, scaled to variance 1 and rounded, so that the last bit of a platform's functions does not
    show."""
    edges = special.ndtri(np.arange(128, 257) / 256)
    density = np.exp(-(edges**2) / 2)  # whose differences are the means, but for a factor
    upper = density[:-1] - density[1:]
    upper = np.round(upper / np.sqrt(np.square(upper).mean()) * (1 << 16)) / (1 << 16)
    levels = np.concatenate([-upper[::-1], upper]).astype(np.float32)
    return np.stack([np.tile(levels, 256), np.repeat(levels, 256)], axis=1)


def _signs() -> Floats:
    """[256, 8]: of every byte, +1 and −1 for its bits, the lowest first."""
    return np.where(np.arange(256)[:, None] >> np.arange(8) & 1 == 1, np.float32(1), np.float32(-1))


DISTRIBUTIONS = {
    "gaussian": Distribution("gaussian", _normal(), np.dtype("<u2")),
    "rademacher": Distribution("rademacher", _signs(), np.dtype("u1")),
}
