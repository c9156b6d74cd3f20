"""Temperatures against scipy's minimiser and against regressions that leave an example out."""

import numpy as np
import pytest
from scipy.optimize import minimize_scalar
from scipy.special import softmax
from sklearn.datasets import load_digits
from sklearn.metrics import log_loss
from sklearn.utils import shuffle

from headstart import Fed3R, FedCOF, FedNCM
from headstart.core.statistics import summarise
from headstart.errors import HeadstartError
from headstart.heads import ridge_head, ridge_optimism
from headstart.heads.calibrate import temperature_of

RNG = np.random.default_rng(0)
X, Y = shuffle(*load_digits(return_X_y=True), random_state=0)  # the last writers are others than the first


def best(scores: np.ndarray, labels: np.ndarray) -> float:
    """The minimum of scikit-learn's log loss, by Brent's method on the logarithm."""

    def loss(log: float) -> float:
        return float(log_loss(labels, softmax(scores / np.exp(log), axis=1), labels=np.arange(scores.shape[1])))

    return float(np.exp(minimize_scalar(loss, bracket=(-2, 2)).x))


@pytest.mark.parametrize("scale", [1e-9, 1e-2, 1, 37, 1e9])
def test_the_temperature_is_that_of_the_least_log_loss(scale: float) -> None:
    labels = RNG.integers(0, 5, 800)
    scores = RNG.normal(0, 1, (800, 5)) + 1.3 * np.eye(5)[labels]
    expected = best(scores, labels)
    assert temperature_of(scale * scores, labels) == pytest.approx(scale * expected, rel=0.01)
    masked = np.column_stack([scale * scores, np.full(800, -np.inf)])
    assert temperature_of(masked, labels) == pytest.approx(scale * expected, rel=0.01)
    absent = np.where(np.arange(800) < 10, 5, labels)  # of the masked class: they do not count
    assert temperature_of(masked, absent) == pytest.approx(temperature_of(masked[10:], labels[10:]))


def test_where_nothing_tells_a_temperature() -> None:
    assert temperature_of(np.zeros((3, 2)), np.array([0, 1, 1])) == 1
    assert temperature_of(np.full((2, 2), -np.inf), np.array([0, 1])) == 1
    sure = temperature_of(np.eye(2)[[0, 1, 1]] * 100, np.array([0, 1, 1]))  # the least loss is at no temperature
    assert 0 < sure <= 100


@pytest.mark.parametrize("ridge", [0.5, 3.0])
def test_optimism_is_what_leaving_an_example_out_changes(ridge: float) -> None:
    """Every unit vector four times: all leverages are the same, and the mean is each of them."""
    x, y = np.tile(np.eye(6), (4, 1)), RNG.integers(0, 3, 24)
    total = summarise(x, y, 3, moments="full")[0]
    head = ridge_head(total, ridge, False)
    factor, own = ridge_optimism(total, head, ridge, False)
    solution = np.linalg.solve(x.T @ x + ridge * np.eye(6), x.T @ np.eye(3)[y])
    lengths = np.linalg.norm(solution, axis=0)
    for left in range(24):
        kept = np.arange(24) != left
        without = np.linalg.solve(x[kept].T @ x[kept] + ridge * np.eye(6), x[kept].T @ np.eye(3)[y[kept]])
        expected = x[left] @ without / lengths
        found = factor * head.scores(x[left : left + 1])[0] - own * (np.arange(3) == y[left])
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("bias", [False, True])
def test_optimism_of_any_examples_is_that_of_their_mean_leverage(bias: bool) -> None:
    x, y = X[:200], Y[:200]
    total = summarise(x, y, 10, moments="full")[0]
    head = ridge_head(total, "auto", bias)
    factor, own = ridge_optimism(total, head, "auto", bias)
    design = np.column_stack([x, np.full(200, np.sqrt((x**2).mean()))]) if bias else x
    inverse = np.linalg.inv(design.T @ design + head.notes["ridge"] * np.eye(design.shape[1]))
    leverage = np.einsum("nd,de,ne->n", design, inverse, design).mean()
    lengths = np.linalg.norm((inverse @ design.T @ np.eye(10)[y])[: x.shape[1]], axis=0)
    assert factor == pytest.approx(1 / (1 - leverage), rel=1e-6)
    np.testing.assert_allclose(own, leverage / (1 - leverage) / lengths, rtol=1e-4)


@pytest.mark.parametrize("estimator", [FedNCM, Fed3R, FedCOF])
def test_probabilities_of_estimators_are_calibrated(estimator: type) -> None:
    """Within 2 % of the least log loss that any temperature has on the test examples."""
    train, test = slice(0, 1000), slice(1000, None)
    client = np.arange(1000) % 30
    plain = estimator(temperature=1.0).fit(X[train], Y[train], client=client)
    head = estimator().fit(X[train], Y[train], client=client)
    np.testing.assert_array_equal(plain.predict(X[test]), head.predict(X[test]))
    np.testing.assert_array_equal(plain.coef_, head.coef_)
    losses = [log_loss(Y[test], each.predict_proba(X[test])) for each in (plain, head)]
    least = log_loss(Y[test], softmax(head.decision_function(X[test]) / best_on_test(head, test), axis=1))
    assert least <= losses[1] <= min(1.02 * least, losses[0])
    again = head.calibrate(X[test], Y[test])
    assert again.temperature_ == pytest.approx(best_on_test(head, test), rel=0.01)


def best_on_test(head: FedNCM, test: slice) -> float:
    return best(head.decision_function(X[test]), Y[test])


def test_two_classes_and_unknown_labels() -> None:
    two = Y < 2
    head = FedNCM().fit(X[two], Y[two])
    np.testing.assert_allclose(head.predict_proba(X[two]).sum(axis=1), 1, rtol=1e-6)
    with pytest.raises(HeadstartError, match=r"labels \[2, 7\] are not among classes"):
        head.calibrate(X[:3], [7, 1, 2])


def test_fed3r_is_calibrated_as_if_it_had_not_seen_the_example() -> None:
    """120 examples in 64 dimensions: on its own examples a smaller temperature is best, and a worse one on others."""
    head = Fed3R(ridge=1.0).fit(X[:120], Y[:120])
    naive = best(head.decision_function(X[:120]), Y[:120])
    scores = head.decision_function(X[120:])
    found, other = (log_loss(Y[120:], softmax(scores / each, axis=1)) for each in (head.temperature_, naive))
    assert found < 0.8 * other
