"""Differential privacy of statistics: any one example of any client is hidden.

A neighbouring data set has one example more or less. Every vector that is summed is shortened to a bound B, so that one
example moves one class's count by 1, that class's sum by at most B, and the second moments by at most B² in Frobenius
norm, and so a sketch, which is the second moments times orthonormal columns. The blocks are scaled to
sensitivity one each (counts, sums / B, moments / B², sketch / B²) and laid side by side, and one
Gaussian mechanism covers them all: the joint sensitivity of k blocks is √k. A block that the head does not need is not
released, and not paid for: the counts cancel in the directions of class means, and in a ridge without a bias. Every
class of every client takes part, present or not, so that neither noise nor length of a message tells which classes a
client has. Everything that is computed from the noisy values is post-processing.

In a simulation the noise is drawn from the recipe's seed by NumPy's generator, so that a run can be repeated; whoever
knows the seed can subtract it. In a deployment it is cryptographic (`core.seeds`): a client's comes from the operating
system's generator, anew for every answer, and the server's from a stream of AES-256 whose key is derived from a secret
of the run, which is deleted when the run is complete. The noise is drawn in floating point;
attacks on its lowest bits (Mironov, 2012) are outside the guarantee, and so are the figures of cost under the server's
noise, which count examples exactly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import sqrt

import numpy as np

from headstart.config.stage import CountNoise
from headstart.core.seeds import Generator, Seed, generator_of
from headstart.core.statistics import ClientStatistics, Floats, Ints, Moments

_STATISTICS, _COUNTS = 0xD9, 0xC0
_LARGEST_COUNT = 2**31 - 1  # what travels as int32


def every_class(statistics: ClientStatistics, owners: Ints, clients: Ints) -> ClientStatistics:
    """A row for every class of every client, in this order, from the rows of the classes present.

    owners: [R] the client behind each row, one row per class; clients: [M] in ascending order. An absent class has
    count 0 and sum 0; without counts every row counts 1.
    """
    rows = len(clients) * statistics.n_classes
    place = np.searchsorted(clients, owners) * statistics.n_classes + statistics.labels
    counts, sums = np.full(rows, 0 if statistics.counted else 1), np.zeros((rows, statistics.dim))
    counts[place], sums[place] = statistics.counts, statistics.sums
    labels = np.tile(np.arange(statistics.n_classes), len(clients))
    return replace(statistics, labels=labels, counts=counts, sums=sums)


def scaled(statistics: ClientStatistics, bound: float) -> Floats:
    """All values of the statistics as one vector, row after row, each block scaled to sensitivity one.

    Of a Gram matrix the upper triangle is taken, with the entries off the diagonal times √2: its norm is then the
    Frobenius norm of the whole matrix, ‖x‖² for one example x. Of the squares alone the norm is no more than that.
    """
    sums = statistics.sums.astype(np.float64, copy=False) / bound
    rows = np.column_stack([statistics.counts, sums]).ravel() if statistics.counted else sums.ravel()
    moments, sketch = statistics.moments, statistics.sketch
    if moments is not None and moments.ndim == 2:
        moments = (moments * _twice_off_diagonal(statistics.dim))[np.triu_indices(statistics.dim)]
    squares = [values.ravel() / bound**2 for values in (moments, sketch) if values is not None]
    return np.concatenate([rows, *squares])


def unscaled(values: Floats, statistics: ClientStatistics, bound: float) -> ClientStatistics:
    """Statistics of the same shape with the values of such a vector; counts are rounded to whole numbers."""
    size = _rows_size(statistics)
    rows, counts = values[:size].reshape(len(statistics.labels), -1), statistics.counts
    if statistics.counted:
        counts = np.rint(np.clip(rows[:, 0], -_LARGEST_COUNT, _LARGEST_COUNT)).astype(np.int64)
        rows = rows[:, 1:]
    sketch, end = statistics.sketch, len(values)
    if sketch is not None:
        end -= sketch.size
        sketch = values[end:].reshape(sketch.shape) * bound**2
    moments = None if statistics.moments is None else values[size:end] * bound**2
    if moments is not None and len(moments) > statistics.dim:
        square = np.zeros((statistics.dim, statistics.dim))
        square[np.triu_indices(statistics.dim)] = moments
        moments = (square + np.triu(square, 1).T) / _twice_off_diagonal(statistics.dim)
    return replace(statistics, counts=counts, sums=rows * bound, moments=moments, sketch=sketch)


@dataclass(frozen=True)
class StatisticsNoise:
    """The Gaussian mechanism on statistics of vectors no longer than ``bound``."""

    multiplier: float
    """Standard deviation of the noise over the joint sensitivity of all blocks."""
    bound: float
    moments: Moments | None
    counts: bool = True
    sketch: bool = False

    @property
    def sensitivity(self) -> float:
        """How far one example moves the scaled statistics: each of their blocks by one."""
        return sqrt(1 + (self.moments is not None) + self.counts + self.sketch)

    @property
    def deviation(self) -> float:
        """Standard deviation of the noise on each entry of the scaled statistics."""
        return self.multiplier * self.sensitivity

    def add(self, statistics: ClientStatistics, generators: Sequence[Generator]) -> ClientStatistics:
        """Noise on every entry, from as many generators as there are sets of rows of equal size.

        Each client of a cohort has a generator of its own, and its noise is what it would be if it were alone; the
        moments and the sketch, which are sums over the cohort, get everybody's. With one generator, rows that come
        first get the same noise whatever follows them.
        """
        values = scaled(statistics, self.bound)
        size = _rows_size(statistics)
        for number, rng in enumerate(generators):
            rows = slice(number * size // len(generators), (number + 1) * size // len(generators))
            values[rows] += self.deviation * rng.standard_normal(rows.stop - rows.start)
            values[size:] += self.deviation * rng.standard_normal(len(values) - size)
        return unscaled(values, statistics, self.bound)

    def floor(self, dim: int, times: int) -> float:
        """Largest eigenvalue that the noise alone gives a Gram matrix [dim, dim] that so many noises were added to.

        A symmetric Gaussian matrix with deviation s off the diagonal has eigenvalues up to 2 s √dim.
        """
        return self.deviation * self.bound**2 * sqrt(2 * dim * times)


def generators_of(seed: Seed, task: int, clients: Ints | None = None, round: int = 0) -> list[Generator]:
    """The server's generator of a task in a round (from 0), or one for each client there."""
    if clients is None:
        return [generator_of(seed, _STATISTICS, task, *([0, round] if round else []))]
    turn = [round] if round else []
    return [generator_of(seed, _STATISTICS, task, 1 + int(client), *turn) for client in clients]


def blur_counts(
    statistics: ClientStatistics, owners: Ints, noise: CountNoise, seed: Seed
) -> tuple[ClientStatistics, Ints]:
    """FedCOF's noise on counts (its appendix I): ñ = max(n + noise, 0), to the nearest whole number.

    A row whose count becomes zero is not sent; the sum of any other becomes mean · ñ, so that its mean stays as it is.
    owners: [R] the client behind each row, in ascending order; a client's noise depends on the seed and on it alone.
    """
    counts = statistics.counts.astype(np.float64)
    starts = np.flatnonzero(np.diff(owners, prepend=-1))
    for start, stop in zip(starts, [*starts[1:], len(owners)], strict=True):
        key = [*seed, _COUNTS, int(owners[start])] if isinstance(seed, tuple) else None
        rng, mine = np.random.default_rng(key), slice(start, stop)
        if noise.kind == "uniform":
            counts[mine] *= 1 + rng.uniform(-1, 1, stop - start) * max(0.0, 1 - noise.epsilon)
        elif noise.kind == "gaussian":
            counts[mine] += rng.normal(0, sqrt(1 / noise.epsilon), stop - start)
        else:
            counts[mine] += rng.laplace(0, 1 / noise.epsilon, stop - start)
    blurred = np.rint(np.clip(counts, 0, _LARGEST_COUNT)).astype(np.int64)
    means = statistics.sums / statistics.counts[:, None]
    sent, kept = replace(statistics, counts=blurred, sums=means * blurred[:, None]).present()
    return sent, owners[kept]


def _rows_size(statistics: ClientStatistics) -> int:
    """Numbers in all rows."""
    return len(statistics.labels) * (statistics.dim + statistics.counted)


def _twice_off_diagonal(dim: int) -> Floats:
    """√2 off the diagonal, 1 on it."""
    return np.asarray(np.where(np.eye(dim, dtype=bool), 1.0, sqrt(2)))
