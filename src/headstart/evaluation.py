"""How good a head is: on a whole split, and at each client."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.special import log_softmax

from headstart.heads import LinearHead
from headstart.statistics import Features, Ints


@dataclass(frozen=True, eq=False)
class Evaluation:
    """Accuracy between 0 and 1; mean cross-entropy over the examples of classes that the head knows."""

    accuracy: float
    loss: float | None
    client_accuracy: npt.NDArray[np.float64] | None = None
    """[K], NaN for a client without test examples of its classes."""

    def metrics(self) -> dict[str, float | None]:
        """The figures under the names of the metrics."""
        figures: dict[str, float | None] = {"accuracy": self.accuracy, "loss": self.loss}
        if self.client_accuracy is not None:
            figures["local_accuracy_mean"] = float(np.nanmean(self.client_accuracy))
            figures["local_accuracy_std"] = float(np.nanstd(self.client_accuracy))
        return figures


def evaluate(
    head: LinearHead, features: Features, labels: Ints, owners: Ints | None = None, counts: Ints | None = None
) -> Evaluation:
    """Evaluate a head on features [n, d] with labels [n]; counts: [K, C] training examples adds the clients' accuracy.

    A client's accuracy is that on its own test examples where ``owners`` [n] says whose they are. Where clients share
    the test split, it is the accuracy on each class, weighted by the client's training examples of it.
    """
    scores = head.scores(features)
    right = scores.argmax(axis=1) == labels
    known = np.isfinite(head.bias)[labels]
    chosen = log_softmax(scores[known], axis=1)[np.arange(int(known.sum())), labels[known]]
    by_client = None
    if counts is not None and owners is not None:
        by_client = _rates(right, owners, len(counts))
    elif counts is not None:
        rates = _rates(right, labels, counts.shape[1])
        shares = counts * np.isfinite(rates)
        total = shares.sum(axis=1)
        by_client = np.where(total > 0, shares @ np.nan_to_num(rates) / np.maximum(total, 1), np.nan)
    return Evaluation(float(right.mean()), float(-chosen.mean()) if len(chosen) else None, by_client)


def _rates(right: npt.NDArray[np.bool_], groups: Ints, count: int) -> npt.NDArray[np.float64]:
    """Share of right answers in each group [count], NaN for an empty one; a negative number is no group."""
    mine = groups >= 0
    sizes = np.bincount(groups[mine], minlength=count)
    hits = np.bincount(groups[mine], weights=right[mine], minlength=count)
    return np.where(sizes > 0, hits / np.maximum(sizes, 1), np.nan)
