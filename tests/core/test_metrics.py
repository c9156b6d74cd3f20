"""Metrics beside accuracy: against scikit-learn on real predictions, and by hand."""

import warnings

import numpy as np
import pytest
from scipy.special import softmax
from scipy.stats import binomtest
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import average_precision_score, balanced_accuracy_score, f1_score, roc_auc_score

from headstart.core.metrics import (
    BINS,
    RANKS,
    added,
    class_metrics,
    ranking_metrics,
    spread,
    tally_classes,
    tally_targets,
    target_metrics,
    target_shapes,
    wilson_interval,
)


@pytest.fixture(scope="module")
def judged() -> tuple[np.ndarray, np.ndarray]:
    """Scores of a real classifier that has learned little, and the labels of other digits, unevenly many of each."""
    X, y = load_digits(return_X_y=True)
    model = LogisticRegression(tol=0.1, max_iter=500).fit(X[:100], y[:100])
    rest = np.flatnonzero((np.arange(len(y)) >= 100) & ((y > 3) | (np.arange(len(y)) % 5 == 0)))
    return model.decision_function(X[rest]), y[rest]


def test_macro_f1_and_balanced_accuracy_are_those_of_scikit_learn(judged: tuple[np.ndarray, np.ndarray]) -> None:
    scores, labels = judged
    found = class_metrics(tally_classes(scores, labels))
    assert found["macro_f1"] == pytest.approx(f1_score(labels, scores.argmax(1), average="macro"), abs=1e-12)
    assert found["balanced_accuracy"] == pytest.approx(balanced_accuracy_score(labels, scores.argmax(1)), abs=1e-12)
    # A class that does not occur and is predicted counts in the first, and not in the second.
    some = labels > 4
    found = class_metrics(tally_classes(scores[some], labels[some]))
    assert found["macro_f1"] == pytest.approx(f1_score(labels[some], scores[some].argmax(1), average="macro"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # scikit-learn says so
        assert found["balanced_accuracy"] == pytest.approx(
            balanced_accuracy_score(labels[some], scores[some].argmax(1))
        )


def test_weights_are_scikit_learns_sample_weights(judged: tuple[np.ndarray, np.ndarray]) -> None:
    scores, labels = judged
    weights = np.random.default_rng(0).uniform(0, 3, len(labels))
    found = class_metrics(tally_classes(scores, labels, weights))
    keys = {"sample_weight": weights}
    assert found["macro_f1"] == pytest.approx(f1_score(labels, scores.argmax(1), average="macro", **keys))
    assert found["balanced_accuracy"] == pytest.approx(balanced_accuracy_score(labels, scores.argmax(1), **keys))


def test_calibration_error_bin_by_bin(judged: tuple[np.ndarray, np.ndarray]) -> None:
    """Guo et al. (2017), equation 3: Σ_m |B_m|/n · |accuracy − confidence|, bins open to the left."""
    scores, labels = judged
    probabilities = softmax(scores.astype(np.float64), axis=1)
    confidence, right = probabilities.max(axis=1), probabilities.argmax(axis=1) == labels
    error = 0.0
    for number in range(BINS):
        members = (confidence > number / BINS) & (confidence <= (number + 1) / BINS)
        if members.any():
            error += members.mean() * abs(right[members].mean() - confidence[members].mean())
    assert error > 0.01
    assert class_metrics(tally_classes(scores, labels))["calibration_error"] == pytest.approx(error, abs=1e-12)


def test_calibration_error_by_hand() -> None:
    # Confidences 0.9 (right), 0.9 (wrong) and 0.6 (right), in two bins: (|1.8 − 1| + |0.6 − 1|)/3.
    odds = np.log(np.array([[9.0, 1], [9, 1], [4, 6]]))
    assert class_metrics(tally_classes(odds, np.array([0, 1, 1])))["calibration_error"] == pytest.approx(0.4)


def test_tallies_of_parts_add_up_to_that_of_the_whole(judged: tuple[np.ndarray, np.ndarray]) -> None:
    scores, labels = judged
    parts = np.array_split(np.random.default_rng(1).permutation(len(labels)), 7)
    total = added([tally_classes(scores[part], labels[part]) for part in parts])
    for name, values in tally_classes(scores, labels).items():
        np.testing.assert_allclose(total[name], values, rtol=1e-12)


def test_a_head_that_knows_no_class_is_confident_of_nothing() -> None:
    found = class_metrics(tally_classes(np.full((3, 2), -np.inf), np.array([0, 1, 1])))
    assert found["calibration_error"] is None
    assert class_metrics(tally_classes(np.zeros((0, 2)), np.zeros(0, np.int64))) == dict.fromkeys(found)


def test_ranks_are_scikit_learns_of_scores_that_share_a_bin(judged: tuple[np.ndarray, np.ndarray]) -> None:
    scores, labels = judged
    has = (labels[:, None] == np.arange(10)).astype(np.float64)
    tally = added([tally_targets(scores[part::3], has[part::3], "multilabel") for part in range(3)])
    assert {name: array.shape for name, array in tally.items()} == target_shapes(10, "multilabel")
    found = target_metrics(tally, "multilabel")
    binned = np.floor(RANKS * (0.5 + np.arctan(scores) / np.pi))
    assert found["roc_auc"] == pytest.approx(roc_auc_score(has, binned), abs=1e-12)
    assert found["average_precision"] == pytest.approx(average_precision_score(has, binned), abs=1e-12)
    exact = ranking_metrics(scores, has)
    assert exact["roc_auc"] == pytest.approx(roc_auc_score(has, scores), abs=1e-12)
    # Off by half the pairs that share a bin, at most.
    with_label, without = tally["ranks"]
    bound = ((with_label * without).sum(axis=1) / (2 * with_label.sum(axis=1) * without.sum(axis=1))).mean()
    assert abs(found["roc_auc"] - exact["roc_auc"]) <= bound < 0.05  # type: ignore[operator]


def test_ranks_by_hand() -> None:
    """Scores −1, 0, 1 and 0 with labels no, yes, yes, no: the tie counts half, so 3.5 of 4 pairs are in order."""
    found = target_metrics(
        tally_targets(np.array([[-1.0], [0], [1], [0]]), np.array([[0.0], [1], [1], [0]]), "multilabel"), "multilabel"
    )
    assert found["roc_auc"] == 3.5 / 4
    assert found["average_precision"] == pytest.approx(0.5 * 1 + 0.5 * 2 / 3)
    one = target_metrics(tally_targets(np.ones((3, 1)), np.ones((3, 1)), "multilabel"), "multilabel")
    assert (one["roc_auc"], one["average_precision"]) == (None, None)  # there are no pairs


def test_the_worst_tenth_of_the_clients() -> None:
    values = np.append(np.arange(21) / 20, np.nan)
    found = spread("local_accuracy", np.random.default_rng(2).permutation(values))
    assert found["local_accuracy_worst_tenth"] == pytest.approx(0.05)  # of 21 clients, 0, 0.05 and 0.1
    assert spread("local_accuracy", np.array([0.3, 0.5]))["local_accuracy_worst_tenth"] == 0.3
    assert spread("local_accuracy", np.array([np.nan]))["local_accuracy_worst_tenth"] is None
    assert spread("local_perplexity", np.array([3.0, 9.0, 5.0]))["local_perplexity_worst_tenth"] == 9.0


def test_the_median_of_the_clients_is_not_moved_by_one_of_them() -> None:
    assert spread("local_perplexity", np.array([3.0, 9e9, 5.0, np.nan]))["local_perplexity_median"] == 5.0
    assert spread("local_accuracy", np.array([0.5, 0.2]))["local_accuracy_median"] == pytest.approx(0.35)
    assert spread("local_accuracy", np.array([np.nan]))["local_accuracy_median"] is None


@pytest.mark.parametrize(("right", "count"), [(0, 5), (5, 5), (71, 77), (1, 1), (900, 1000)])
def test_the_interval_of_an_accuracy(right: int, count: int) -> None:
    expected = binomtest(right, count).proportion_ci(0.95, method="wilson")
    assert wilson_interval(right / count, count) == pytest.approx((expected.low, expected.high), abs=1e-7)
