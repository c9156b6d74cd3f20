"""Metrics of a test beside accuracy and loss, each from sums that add up over clients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import ceil

import numpy as np
import numpy.typing as npt

from headstart.core.statistics import Floats, Ints

Scores = npt.NDArray[np.floating]
Tally = Mapping[str, Floats]
"""Sums over examples, by name."""
Metrics = dict[str, float | None]

BINS = 15
"""Of equal width, in which confidence is compared with accuracy (Guo et al., ICML 2017)."""
CLASSIFICATION = ("macro_f1", "balanced_accuracy", "calibration_error")
SHOWN = (
    "accuracy", "r2", "mae", "macro_f1", "balanced_accuracy", "roc_auc", "average_precision", "calibration_error",
    "local_accuracy_worst_tenth",
)  # fmt: skip
"""Metrics of a model that are shown of every stage, as far as it has them."""


def class_shapes(n_classes: int) -> dict[str, tuple[int, ...]]:
    """Names and shapes of what `tally_classes` makes."""
    return {"classes": (3, n_classes), "bins": (3, BINS)}


def tally_classes(scores: Scores, labels: Ints, weights: Floats | None = None) -> dict[str, Floats]:
    """classes [3, C]: examples of each class, examples predicted as it, and both; bins [3, BINS]: examples by their
    confidence, the sum of it, and how many are right. scores: [n, C]; labels, weights: [n]."""
    n_classes, weights = scores.shape[1], np.ones(len(labels)) if weights is None else weights
    predicted = scores.argmax(axis=1)
    right = weights * (predicted == labels)
    classes = [(labels, weights), (predicted, weights), (labels, right)]
    best = scores.max(axis=1, initial=-np.inf)
    sure = np.isfinite(best)  # a head that knows no class is confident of nothing
    confidence = 1 / np.exp(scores[sure] - best[sure, None]).sum(axis=1, dtype=np.float64)
    place = np.clip(np.ceil(BINS * confidence).astype(np.int64) - 1, 0, BINS - 1)
    bins = (weights[sure], weights[sure] * confidence, right[sure])
    return {
        "classes": np.stack([np.bincount(which, each, n_classes) for which, each in classes]),
        "bins": np.stack([np.bincount(place, each, BINS) for each in bins]),
    }


def class_metrics(tally: Tally) -> Metrics:
    """Macro-F1 over the classes that occur or are predicted, the mean recall of those that occur, as in scikit-learn,
    and the expected calibration error."""
    if not tally:
        return dict.fromkeys(CLASSIFICATION)
    true, predicted, right = tally["classes"]
    examples, confidence, hits = tally["bins"]
    error = float(np.abs(confidence - hits).sum() / examples.sum()) if examples.sum() > 0 else None
    return {
        "macro_f1": _mean_ratio(2 * right, true + predicted),
        "balanced_accuracy": _mean_ratio(right, true),
        "calibration_error": error,
    }


def added(tallies: Sequence[Tally]) -> dict[str, Floats]:
    """The tally of all examples together."""
    return {name: np.sum([each[name] for each in tallies], axis=0) for name in tallies[0]} if tallies else {}


def spread(name: str, values: Floats) -> Metrics:
    """Mean and standard deviation over the clients that have a value, and the mean of the lowest tenth of them, at
    least one."""
    there = np.sort(values[np.isfinite(values)])
    worst = there[: ceil(len(there) / 10)]
    found = (there.mean(), there.std(), worst.mean()) if len(there) else (None, None, None)
    names = (f"{name}_mean", f"{name}_std", f"{name}_worst_tenth")
    return {key: None if value is None else float(value) for key, value in zip(names, found, strict=True)}


def _mean_ratio(part: Floats, whole: Floats) -> float | None:
    """The mean of part/whole [C] over those that have a whole."""
    there = whole > 0
    return float((part[there] / whole[there]).mean()) if there.any() else None
