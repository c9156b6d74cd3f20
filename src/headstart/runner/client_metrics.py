"""Metrics of every client beside its accuracy: on its own test examples, or on the shared ones by its classes."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt
from scipy.special import softmax

from headstart.core.metrics import (
    BINS,
    Metrics,
    Tally,
    class_metrics,
    ranking_metrics,
    tally_classes,
    tally_targets,
    target_metrics,
)
from headstart.core.statistics import Floats, Ints
from headstart.core.target import Target

ClientMetrics = dict[str, Floats]
"""[K] by name, NaN for a client that has none."""

Scores = npt.NDArray[np.float32]


def of_owners(scores: Scores, labels: Ints, owners: Ints, clients: int) -> ClientMetrics:
    """On each client's own test examples: how many there are, macro-F1, balanced accuracy, calibration error, and the
    area under the ROC curve. scores: [n, C]; labels, owners: [n], a negative number being nobody."""
    found: list[Metrics] = []
    for rows in _rows_of(owners, clients):
        known = class_metrics(tally_classes(scores[rows], labels[rows]) if len(rows) else {})
        found.append({**known, "roc_auc": roc_auc(scores[rows], labels[rows])})
    return {"test_examples": _sizes(owners, clients), **_columns(found)}


def of_target_owners(scores: Scores, targets: Floats, owners: Ints, clients: int, kind: Target) -> ClientMetrics:
    """`of_owners` of targets [n, q] that are no classes: R² and mean absolute error, or, of labels, the share of
    examples with every label right, macro-F1, area under the ROC curve and average precision."""
    found = []
    for rows in _rows_of(owners, clients):
        known = _of_tally(tally_targets(scores[rows], targets[rows], kind) if len(rows) else {}, kind)
        found.append(known | (ranking_metrics(scores[rows], targets[rows]) if kind == "multilabel" else {}))
    return {"test_examples": _sizes(owners, clients), **_columns(found)}


def of_target_tallies(tallies: Sequence[Tally], kind: Target) -> ClientMetrics:
    """Of each client's tally of targets that are no classes; an empty one: it has no test examples."""
    return _columns([_of_tally(tally, kind) for tally in tallies])


def _of_tally(tally: Tally, kind: Target) -> Metrics:
    tally = tally if tally and tally["figures"][0] else {}
    accuracy = {"accuracy": float(tally["figures"][1] / tally["figures"][0]) if tally else None}
    return {**(accuracy if kind == "multilabel" else {}), **target_metrics(tally, kind)}


def _rows_of(owners: Ints, clients: int) -> list[Ints]:
    """The examples of each client, whose owners are [n]."""
    order = np.argsort(owners, kind="stable")
    bounds = np.searchsorted(owners[order], np.arange(clients + 1))
    return [order[start:stop] for start, stop in pairwise(bounds)]


def _sizes(owners: Ints, clients: int) -> Floats:
    return np.bincount(owners[owners >= 0], minlength=clients).astype(np.float64)


def _columns(found: Sequence[Metrics]) -> ClientMetrics:
    """Each metric of all clients."""
    return {name: np.array([np.nan if (v := each[name]) is None else v for each in found]) for name in found[0]}


def of_classes(scores: Scores, labels: Ints, counts: Ints) -> ClientMetrics:
    """On shared test examples, each class counting as often as the client has training examples [K, C] of it."""
    n_classes = counts.shape[1]
    parts = [tally_classes(scores[labels == label], labels[labels == label]) for label in range(n_classes)]
    sizes = np.bincount(labels, minlength=n_classes)
    weights = counts * (sizes > 0) / np.maximum(sizes, 1)  # of a test example of each class [K, C]
    true, predicted, right = (weights @ np.stack([part["classes"][row] for part in parts]) for row in range(3))
    bins = np.einsum("kc,cib->ikb", weights, np.stack([part["bins"] for part in parts]))
    classes = np.stack([true, predicted, right], axis=1)
    found = of_tallies([{"classes": classes[client], "bins": bins[:, client]} for client in range(len(counts))])
    return {**found, "roc_auc": _weighted_auc(scores, labels, weights)}


def _weighted_auc(scores: Scores, labels: Ints, weights: Floats) -> Floats:
    """`roc_auc` [K] where the examples of a class have the weights [K, C]: from how many pairs each class wins."""
    shares, sizes = softmax(scores.astype(np.float64), axis=1), np.bincount(labels, minlength=weights.shape[1])
    if not np.isfinite(shares).all():
        return np.full(len(weights), np.nan)
    wins = np.zeros((len(sizes), len(sizes)))  # of an example of class c against all of class e, by the share of c
    for label in np.flatnonzero(sizes):
        own, given = np.sort(shares[labels == label, label]), shares[:, label]
        beaten = len(own) - (np.searchsorted(own, given, "left") + np.searchsorted(own, given, "right")) / 2
        wins[label] = np.bincount(labels, beaten, len(sizes)) / len(own)
    np.fill_diagonal(wins, 0.0)
    others = (weights * sizes).sum(axis=1, keepdims=True) - weights * sizes  # [K, C]
    counted = (weights > 0) & (others > 0)
    areas = np.where(counted, weights @ wins.T / np.where(counted, others, 1.0), 0.0)
    return np.where(counted.any(axis=1), areas.sum(axis=1) / np.maximum(counted.sum(axis=1), 1), np.nan)


def of_tallies(tallies: Sequence[Tally | None]) -> ClientMetrics:
    """Of each client's tally; None: it has no test examples."""
    empty: Tally = {"classes": np.zeros((3, 1)), "bins": np.zeros((3, BINS))}
    return _columns([class_metrics(tally or empty) for tally in tallies])


def roc_auc(scores: Scores, labels: Ints) -> float | None:
    """Area under the ROC curve of each class against the others, averaged over the classes [C] that some examples [n]
    have and some have not, as in scikit-learn; None where no class has both."""
    shares = softmax(scores.astype(np.float64), axis=1)
    present = np.bincount(labels, minlength=scores.shape[1])
    classes = np.flatnonzero((present > 0) & (present < len(labels)))
    if not len(classes) or not np.isfinite(shares).all():
        return None
    ranks = np.stack([_ranks(shares[:, label]) for label in classes], axis=1)
    own = labels[:, None] == classes[None]
    positive = own.sum(axis=0)
    above = (ranks * own).sum(axis=0) - positive * (positive + 1) / 2
    return float((above / (positive * (len(labels) - positive))).mean())


def _ranks(values: Floats) -> Floats:
    """Ranks [n] from 1 on, equal values sharing the mean of theirs, without the third of a second of `scipy.stats`."""
    _, place, counts = np.unique(values, return_inverse=True, return_counts=True)
    ranks: Floats = (np.cumsum(counts) - (counts - 1) / 2)[place]
    return ranks
