"""Metrics of a test beside accuracy and loss, each from sums that add up over clients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import ceil, sqrt
from typing import Any

import numpy as np
import numpy.typing as npt

from headstart.core.statistics import Floats, Ints
from headstart.core.target import Target

Scores = npt.NDArray[np.floating]
Tally = Mapping[str, Floats]
"""Sums over examples, by name."""
Metrics = dict[str, float | None]

BINS = 15
"""Of equal width, in which confidence is compared with accuracy (Guo et al., ICML 2017)."""
RANKS = 256
"""Of scores, by their arctangent: clients count examples in these, and none of their scores leaves."""
CLASSIFICATION = ("macro_f1", "balanced_accuracy", "calibration_error")
SHOWN = (
    "accuracy", "r2", "perplexity", "mae", "macro_f1", "balanced_accuracy", "roc_auc", "average_precision",
    "calibration_error", "local_accuracy_worst_tenth", "exact_match", "rouge_l",
)  # fmt: skip
"""Metrics of a model that are shown of every stage, as far as it has them."""


def primary_metric(figures: Mapping[str, Any]) -> str:
    """The metric that says in one number how good a model is: accuracy, R² of numbers, or perplexity of completions."""
    return next((name for name in ("r2", "accuracy", "perplexity") if figures.get(name) is not None), "accuracy")


def goodness(metric: str, value: float) -> float:
    """A value of a primary metric, turned so that more is better."""
    return -value if metric == "perplexity" else value


def wilson_interval(share: float, count: int, deviations: float = 1.959964) -> tuple[float, float]:
    """Where a share that was measured on so many examples lies with 95 % confidence (Wilson, JASA 1927)."""
    squared = deviations**2 / count
    centre = (share + squared / 2) / (1 + squared)
    half = deviations / (1 + squared) * sqrt(share * (1 - share) / count + squared / (4 * count))
    return max(0.0, centre - half), min(1.0, centre + half)


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


def target_shapes(outputs: int, kind: Target) -> dict[str, tuple[int, ...]]:
    """Names and shapes of what `tally_targets` makes."""
    ranks = {"ranks": (2, outputs, RANKS)} if kind == "multilabel" else {}
    return {"figures": (4,), "outputs": (4, outputs), **ranks}


def tally_targets(scores: Scores, targets: Floats, kind: Target) -> dict[str, Floats]:
    """figures [4]: examples, of labels those with every label right, examples again, and the sum of their squared
    errors; outputs [4, q]: Σ y, Σ y², squared and absolute errors, or, of labels, how many examples have each, are
    predicted to, and both, and squared errors; of labels, ranks [2, q, RANKS]: how many with each, and without, have a
    score in each bin. scores, targets: [n, q]."""
    values, ranks = scores.astype(np.float64), {}
    if kind == "regression":
        errors = values - targets
        outputs = np.stack([targets.sum(0), (targets**2).sum(0), (errors**2).sum(0), np.abs(errors).sum(0)])
        right = 0
    else:
        errors, predicted, has = label_shares(values) - targets, values > 0, targets > 0
        outputs = np.stack([has.sum(0), predicted.sum(0), (has & predicted).sum(0), (errors**2).sum(0)])
        right = int((has == predicted).all(axis=1).sum())
        place = np.minimum(RANKS * (0.5 + np.arctan(values) / np.pi), RANKS - 1).astype(np.int64)
        place += RANKS * np.arange(values.shape[1])
        counts = [np.bincount(place[those], minlength=RANKS * values.shape[1]) for those in (has, ~has)]
        ranks = {"ranks": np.reshape(counts, (2, -1, RANKS)).astype(np.float64)}
    loss = float((errors**2).mean(axis=1).sum())
    figures = np.array([len(targets), right, len(targets), loss])
    return {"figures": figures, "outputs": outputs.astype(np.float64), **ranks}


def target_metrics(tally: Tally, kind: Target) -> Metrics:
    """R² and mean absolute error, averaged over the outputs, as in scikit-learn; of labels, macro-F1, and what their
    ranks tell (`_binned_ranking`)."""
    if not tally:
        names = ("r2", "mae") if kind == "regression" else ("macro_f1", "roc_auc", "average_precision")
        return dict.fromkeys(names)
    examples, outputs = tally["figures"][0], tally["outputs"]
    if kind == "multilabel":
        true, predicted, right, _ = outputs
        return {"macro_f1": _mean_ratio(2 * right, true + predicted), **_binned_ranking(tally["ranks"])}
    total, squares, squared, absolute = outputs
    spread = squares - total**2 / max(examples, 1)
    varies = spread > 1e-12 * squares  # of a constant nothing can be explained
    r2 = float((1 - squared[varies] / spread[varies]).mean()) if varies.any() else None
    return {"r2": r2, "mae": float(absolute.mean() / examples) if examples else None}


def _binned_ranking(ranks: Floats) -> Metrics:
    """Area under the ROC curve and average precision of scores that are known by their bin: those of one bin are ties.

    The area is off by at most half the share of pairs of an example with and one without the label that share a bin.
    """
    both = ranks.sum(axis=2).all(axis=0)
    if not both.any():
        return {"roc_auc": None, "average_precision": None}
    has, others = ranks[:, both, ::-1]  # from the highest scores on
    above, rest = has.cumsum(axis=1), others.cumsum(axis=1)
    pairs = (others * (above - has / 2)).sum(axis=1)
    precision = above / np.maximum(above + rest, 1)
    total = has.sum(axis=1)
    return {
        "roc_auc": float((pairs / (total * others.sum(axis=1))).mean()),
        "average_precision": float(((precision * has).sum(axis=1) / total).mean()),
    }


def ranking_metrics(scores: Scores, targets: Floats) -> Metrics:
    """Area under the ROC curve and average precision, averaged over the labels that some examples have and some have
    not, as in scikit-learn; they need all scores in one place."""
    from sklearn.metrics import average_precision_score, roc_auc_score

    both = (targets > 0).any(axis=0) & (targets <= 0).any(axis=0)
    if not both.any() or not np.isfinite(scores).all():
        return {"roc_auc": None, "average_precision": None}
    has, given = targets[:, both] > 0, scores[:, both]
    return {
        "roc_auc": float(np.mean([roc_auc_score(has[:, c], given[:, c]) for c in range(has.shape[1])])),
        "average_precision": float(
            np.mean([average_precision_score(has[:, c], given[:, c]) for c in range(has.shape[1])])
        ),
    }


def label_shares(scores: Scores) -> Floats:
    """The share of examples with such scores [n, q] that have each label, as far as it is linear; a label is predicted
    above one half."""
    return np.asarray(np.clip((scores.astype(np.float64) + 1) / 2, 0, 1))


def added(tallies: Sequence[Tally]) -> dict[str, Floats]:
    """The tally of all examples together."""
    return {name: np.sum([each[name] for each in tallies], axis=0) for name in tallies[0]} if tallies else {}


def spread(name: str, values: Floats) -> Metrics:
    """Mean, standard deviation and median over the clients that have a value, and the mean of the worst tenth of them,
    at least one: those of the highest perplexity, or of the lowest value otherwise."""
    there = np.sort(values[np.isfinite(values)])
    worst = (there[::-1] if name.endswith("perplexity") else there)[: ceil(len(there) / 10)]
    found = (there.mean(), there.std(), np.median(there), worst.mean()) if len(there) else (None,) * 4
    names = (f"{name}_{kind}" for kind in ("mean", "std", "median", "worst_tenth"))
    return {key: None if value is None else float(value) for key, value in zip(names, found, strict=True)}


def _mean_ratio(part: Floats, whole: Floats) -> float | None:
    """The mean of part/whole [C] over those that have a whole."""
    there = whole > 0
    return float((part[there] / whole[there]).mean()) if there.any() else None
