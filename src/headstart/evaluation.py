"""How good a head is: on a whole split, and at each client where clients have test examples of their own."""

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
    """[K], NaN for a client without test examples."""

    def metrics(self) -> dict[str, float | None]:
        """The figures under the names of the metrics."""
        figures: dict[str, float | None] = {"accuracy": self.accuracy, "loss": self.loss}
        if self.client_accuracy is not None:
            figures["local_accuracy_mean"] = float(np.nanmean(self.client_accuracy))
            figures["local_accuracy_std"] = float(np.nanstd(self.client_accuracy))
        return figures


def evaluate(
    head: LinearHead, features: Features, labels: Ints, owners: Ints | None = None, n_clients: int = 0
) -> Evaluation:
    """Evaluate a head on features [n, d] with labels [n]; ``owners`` [n] adds the accuracy at each client."""
    scores = head.scores(features)
    right = scores.argmax(axis=1) == labels
    known = np.isfinite(head.bias)[labels]
    chosen = log_softmax(scores[known], axis=1)[np.arange(int(known.sum())), labels[known]]
    by_client = None
    if owners is not None:
        mine = owners >= 0
        held = np.bincount(owners[mine], minlength=n_clients)
        hits = np.bincount(owners[mine], weights=right[mine], minlength=n_clients)
        by_client = np.where(held > 0, hits / np.maximum(held, 1), np.nan)
    return Evaluation(float(right.mean()), float(-chosen.mean()) if len(chosen) else None, by_client)
