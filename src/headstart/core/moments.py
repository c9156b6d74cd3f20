"""Sums and second moments of features, added up in float64, block by block."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import numpy as np
import numpy.typing as npt
from scipy import sparse

from headstart.core.device import accelerator
from headstart.core.directions import sketching_basis

Floats = npt.NDArray[np.float64]
Features = npt.NDArray[np.floating]
Ints = npt.NDArray[np.int64]
Moments = Literal["full", "diagonal", "trace"]
Transform = Callable[[Features], Features]

# Sums alone are fastest in blocks that stay in the processor's cache; products of matrices want larger ones.
_BLOCK_BYTES = 4 << 20
_BLOCK_BYTES_OF_MOMENTS = 32 << 20


def segment_sums(
    features: Features,
    rows: Ints,
    segments: Ints,
    n_segments: int,
    moments: Moments | None = None,
    transform: Transform | None = None,
    sketch: int = 0,
) -> tuple[Floats, Floats | None, Floats | None]:
    """Sums [S, d] of ``features[rows]`` by (sorted) segment, their second moments, and so many rows ΩᵀXᵀX [l, d] of
    their sketch, in float64, block by block.

    Each segment is added up in the order of its rows, whatever the blocks: a client alone and the same client among
    thousands give the same bits.
    """
    if (device := accelerator()) is not None:
        from headstart.core.device_moments import device_sums

        return device_sums(features, rows, segments, n_segments, moments, transform, sketch, device)
    transform = transform or (lambda values: values)
    dim = transform(features[:1]).shape[1]
    sums = np.zeros((n_segments, dim))
    second, drawn = zero_moments(dim, moments), zero_sketch(dim, sketch)
    step = max(1, (_BLOCK_BYTES_OF_MOMENTS if moments == "full" else _BLOCK_BYTES) // (8 * dim))
    # One for all blocks: large memory that is asked for anew is cleared by the operating system each time.
    room = np.empty((min(step, len(rows)) + 1, dim))
    for start in range(0, len(rows), step):
        members = segments[start : start + step]
        first, last = int(members[0]), int(members[-1])
        block = room[: len(members) + 1]
        block[0] = sums[first]  # what the previous block left in the segment that the two share
        block[1:] = transform(features[rows[start : start + step]])
        lengths = np.bincount(members - first, minlength=last - first + 1)
        lengths[0] += 1
        pointers = np.concatenate([[0], np.cumsum(lengths)])
        gather = sparse.csr_array((np.ones(len(block)), np.arange(len(block)), pointers))
        sums[first : last + 1] = gather @ block
        if second is not None:
            values = block[1:]
            squares = values.T @ values if moments == "full" else np.einsum("nd,nd->d", values, values)
            second += squares.sum() if moments == "trace" else squares
        if drawn is not None:
            drawn += (block[1:] @ sketching_basis(dim, len(drawn))).T @ block[1:]
    return sums, second, drawn


def zero_moments(dim: int, moments: Moments | None) -> Floats | None:
    """Of no features at all; None where none are asked for."""
    return None if moments is None else np.zeros((dim, dim) if moments == "full" else moments_length(dim, moments))


def zero_sketch(dim: int, width: int) -> Floats | None:
    """Of no features at all; None where none is asked for."""
    return np.zeros((min(width, dim), dim)) if width else None


def moments_length(dim: int, moments: Moments) -> int:
    """How many numbers they are in a message: of a Gram matrix, its upper triangle."""
    return {"full": dim * (dim + 1) // 2, "diagonal": dim, "trace": 1}[moments]


def unpacked(triangle: Floats, dim: int) -> Floats:
    """The symmetric matrix [dim, dim] of an upper triangle, row after row."""
    square = np.zeros((dim, dim))
    square[np.triu_indices(dim)] = triangle
    return np.asarray(square + np.triu(square, 1).T)


def shorten(features: Features, bound: float) -> Floats:
    """Rows [n, d] that are longer than the bound, shortened to it."""
    values = np.asarray(features, np.float64)
    lengths = np.linalg.norm(values, axis=1, keepdims=True)
    return np.asarray(values * (bound / np.maximum(lengths, bound)))
