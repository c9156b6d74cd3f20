"""Several centres per class, by k-means that needs no more than counts and sums (Lloyd, 1982).

Centre j of class c has the number c · k + j. The start does not send an example: the examples of a class are split by
which of k random directions, drawn from the seed, they lie furthest along from the class mean.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from headstart.core.statistics import ClientStatistics, Features, Floats, Ints, summarise


def split(features: Features, labels: Ints, known: ClientStatistics, centres: int, seed: int) -> Ints:
    """The first centre [n] of each example; known: of each class the first row counts, its mean."""
    rng = np.random.Generator(np.random.Philox(key=seed))
    directions = rng.standard_normal((centres, features.shape[1]))

    def side(mine: Floats, rows: Floats, numbers: Ints) -> Ints:
        return np.asarray(numbers[0] // centres * centres + ((mine - rows[0]) @ directions.T).argmax(axis=1))

    return _by_class(features, labels, known, centres, side)


def nearest(features: Features, labels: Ints, known: ClientStatistics, centres: int) -> Ints:
    """The nearest centre [n] of each example's own class, by Euclidean distance."""

    def closest(mine: Floats, rows: Floats, numbers: Ints) -> Ints:
        return np.asarray(numbers[(mine @ rows.T - 0.5 * np.einsum("rd,rd->r", rows, rows)).argmax(axis=1)])

    return _by_class(features, labels, known, centres, closest)


def _by_class(
    features: Features,
    labels: Ints,
    known: ClientStatistics,
    centres: int,
    choose: Callable[[Floats, Floats, Ints], Ints],
) -> Ints:
    """Numbers [n] of centres, chosen among those of each class; a class without any has its first."""
    found = labels * centres
    means = known.sums / known.counts[:, None].astype(np.float64)
    for label in np.unique(labels):
        rows, mine = known.labels // centres == label, labels == label
        if rows.any():
            found[mine] = choose(np.asarray(features[mine], np.float64), means[rows], known.labels[rows])
    return found


def k_means(
    features: Features, labels: Ints, n_classes: int, centres: int, iterations: int, seed: int
) -> ClientStatistics:
    """Counts and sums at each centre after so many iterations, all examples being here."""
    total = summarise(features, labels * centres, n_classes * centres)[0]
    numbers = split(features, labels, total, centres, seed)
    for _ in range(iterations):
        total = summarise(features, numbers, n_classes * centres)[0]
        numbers = nearest(features, labels, total, centres)
    return summarise(features, numbers, n_classes * centres)[0]
