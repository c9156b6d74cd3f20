"""The largest directions of the scatter of features around class means: of each client, or of a sum over clients."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache

import numpy as np
import numpy.typing as npt
from scipy import linalg

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Blocks = Callable[[], Iterable[Floats]]
"""The rows of a matrix [n, d], some at a time, as often as it is called."""

# Halko, Martinsson and Tropp (2011, section 4.5): a few columns and passes more make the found directions the largest.
_MORE, _PASSES = 10, 6
_BLOCK_BYTES = 32 << 20


def sent_directions(examples: Ints, rows: Ints, rank: int, dim: int, min_examples: int = 1) -> Ints:
    """How many directions [M] each of M clients tells, with so many examples around the means of so many rows.

    Around R means n examples have n − R directions at most. All of them would tell the examples themselves: of
    ``min_examples`` directions a client tells one.
    """
    return np.asarray(np.minimum(min(rank, dim), (examples - rows) // min_examples))


def directions_by_client(
    deviations: Callable[[slice], Floats], clients: Ints, examples: Ints, sent: Ints, dim: int, seed: tuple[int, ...]
) -> Floats:
    """The largest directions [Q, d] of every client, client after client, from the seed and the client alone.

    deviations: some examples [n, d], client after client, around the means of their rows; examples, sent: [M] how many
    examples each of the clients [M] has, and how many directions it tells.
    """
    found, step = [np.zeros((0, dim))], max(1, _BLOCK_BYTES // (8 * dim))
    for client, stop, size, count in zip(clients, np.cumsum(examples), examples, sent, strict=True):
        if not count:
            continue
        start = stop - size
        parts = [slice(first, min(first + step, stop)) for first in range(start, stop, step)]

        def blocks(parts: list[slice] = parts) -> Iterable[Floats]:
            return map(deviations, parts)

        found.append(largest_directions(blocks, dim, int(count), (*seed, int(client))))
    return np.concatenate(found)


def largest_directions(blocks: Blocks, dim: int, count: int, seed: tuple[int, ...]) -> Floats:
    """Rows √λ v [count, d] of the largest eigenvalues λ and eigenvectors v of A = ZᵀZ, Z [n, d] block by block.

    By randomised subspace iteration: a few passes over Z, and never more than a block of it, or a matrix
    [d, count + 10], in memory. The last pass is Nyström's: never larger than A along any direction.
    """

    def product(basis: Floats) -> Floats:
        return np.asarray(sum((block.T @ (block @ basis) for block in blocks()), np.zeros_like(basis)))

    width = min(count + _MORE, dim)
    basis: Floats = np.eye(dim, width)
    if width < dim:
        basis = np.random.default_rng([0xD1B, *seed]).standard_normal((dim, width))
        for _ in range(_PASSES):
            basis = linalg.qr(product(basis), mode="economic", check_finite=False)[0].astype(np.float64, copy=False)
    found = nystrom(basis, product(basis))[:count]
    return np.concatenate([found, np.zeros((count - len(found), dim))])


def nystrom(basis: Floats, product: Floats, least: float = 0.0) -> Floats:
    """Rows √λ v [at most l, d] of A Q (QᵀAQ)⁻¹ QᵀA, the largest first, from Q [d, l] and A Q [d, l].

    Eigenvalues of QᵀAQ up to ``least``, or up to rounding, count as none.
    """
    inner = basis.T @ product
    values, vectors = linalg.eigh((inner + inner.T) / 2, check_finite=False)
    kept = values > max(least, basis.shape[1] * np.finfo(np.float64).eps * values[-1])
    if not kept.any():
        return np.zeros((0, len(basis)))
    left, sizes, _ = linalg.svd(product @ vectors[:, kept] / np.sqrt(values[kept]), False, check_finite=False)
    return np.asarray((left * sizes).T)


@cache
def sketching_basis(dim: int, width: int) -> Floats:
    """Random orthonormal columns [dim, width], the same for everybody: ΩᵀXᵀX adds up over clients, as XᵀX does."""
    drawn = np.random.default_rng([0x5CE7, dim, width]).standard_normal((dim, width))
    basis = np.asarray(linalg.qr(drawn, mode="economic", check_finite=False)[0], np.float64)
    basis.flags.writeable = False
    return basis
