"""Fed3R of numbers and of labels: scikit-learn's Ridge and RidgeClassifier, from sums over clients."""

import numpy as np
import pytest
from sklearn.datasets import load_diabetes, load_digits
from sklearn.linear_model import Ridge, RidgeClassifier
from sklearn.utils.estimator_checks import parametrize_with_checks

from headstart import Fed3RMultiLabel, Fed3RRegressor, HeadstartError
from headstart.core.statistics import Summary, read_statistics, summarise
from headstart.heads.targets import Beside, ridge_of_targets, target_head

X, Y = load_diabetes(return_X_y=True)
TWO = np.stack([Y, 1e3 * X[:, 2] + np.sin(Y)], axis=1)
WHO = np.random.default_rng(0).integers(0, 7, len(Y))
DIGITS, CLASS = load_digits(return_X_y=True)
LABELS = np.stack([CLASS % 2, CLASS > 4, np.isin(CLASS, (0, 6, 8, 9))], axis=1).astype(int)


@parametrize_with_checks([Fed3RRegressor(), Fed3RRegressor(ridge=0.1, bias=False), Fed3RRegressor(random_features=50)])
def test_scikit_learn_contract(estimator: object, check) -> None:
    check(estimator)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("y", [Y, TWO], ids=["one", "two"])
def test_the_result_is_scikit_learns_ridge(y: np.ndarray, bias: bool) -> None:
    found = Fed3RRegressor(ridge=0.3, bias=bias).fit(X, y, client=WHO)
    expected = Ridge(alpha=0.3, fit_intercept=bias).fit(X, y)
    np.testing.assert_allclose(found.coef_, expected.coef_, rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(found.intercept_, expected.intercept_, rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(found.predict(X), expected.predict(X), rtol=1e-9)
    assert found.coef_.shape == expected.coef_.shape


def test_labels_are_those_of_scikit_learns_ridge_classifier() -> None:
    who = np.random.default_rng(1).integers(0, 5, len(CLASS))
    found = Fed3RMultiLabel(ridge=2.0).fit(DIGITS, LABELS, client=who)
    expected = RidgeClassifier(alpha=2.0).fit(DIGITS, LABELS)
    np.testing.assert_allclose(found.coef_, expected.coef_, rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(found.intercept_, expected.intercept_, rtol=1e-9, atol=1e-9)
    np.testing.assert_array_equal(found.predict(DIGITS), expected.predict(DIGITS))
    assert found.score(DIGITS, LABELS) == expected.score(DIGITS, LABELS) > 0.5
    shares = found.predict_proba(DIGITS)
    np.testing.assert_array_equal(shares > 0.5, found.predict(DIGITS) == 1)
    with pytest.raises(HeadstartError, match="y must be 0 and 1"):
        Fed3RMultiLabel().fit(DIGITS, CLASS)


def test_by_hand() -> None:
    """x = 0, 1, 2 and y = 1, 3, 5, centred: G = 2, B = 4; with λ = 2 the slope is 1, through (1, 3)."""
    found = Fed3RRegressor(ridge=2.0).fit([[0.0], [1.0], [2.0]], [1.0, 3.0, 5.0], client=["a", "b", "b"])
    assert found.coef_ == pytest.approx([1.0])
    assert found.intercept_ == pytest.approx(2.0)


def generalised_cross_validation(x: np.ndarray, y: np.ndarray, ridge: float) -> float:
    """Of the hat matrix with an intercept, written out [n, n]."""
    n = len(x)
    centred = x - x.mean(axis=0)
    inverse = np.linalg.inv(centred.T @ centred + ridge * np.eye(x.shape[1]))
    hat = np.full((n, n), 1 / n) + centred @ inverse @ centred.T
    return float(((y - hat @ y) ** 2).sum() / (n - np.trace(hat)) ** 2)


def test_the_ridge_is_that_of_the_least_cross_validation_error() -> None:
    noisy = Y + 200 * np.random.default_rng(3).standard_normal(len(Y))
    chosen = Fed3RRegressor().fit(X[:80], noisy[:80]).ridge_
    tried = chosen * np.array([0.2, 0.7, 1.0, 1.4, 5.0])
    assert np.argmin([generalised_cross_validation(X[:80], noisy[:80], ridge) for ridge in tried]) == 2


def test_the_unit_of_a_target_does_not_matter() -> None:
    found = Fed3RRegressor().fit(X, TWO)
    other = Fed3RRegressor().fit(X, TWO * [1e-6, 1e3] + [5, -7])
    assert other.ridge_ == pytest.approx(found.ridge_)
    np.testing.assert_allclose(other.predict(X), found.predict(X) * [1e-6, 1e3] + [5, -7], rtol=1e-6)


def test_statistics_that_travelled_give_the_same_head() -> None:
    parts = []
    for client in range(7):
        mine = np.flatnonzero(WHO == client)
        made, _ = summarise(Beside(X[mine], TWO[mine]), np.zeros(len(mine), np.int64), 1, moments="full")  # type: ignore[arg-type]
        parts.append(read_statistics(made.to_message(), Summary(1, X.shape[1] + 2, "full")))
    weight, bias, ridge = ridge_of_targets(parts[0].merge(*parts[1:]), 2, "auto", True)
    there = Fed3RRegressor().fit(X, TWO)
    np.testing.assert_allclose(weight, there.coef_, rtol=1e-6)
    np.testing.assert_allclose(bias, there.intercept_, rtol=1e-9)
    assert ridge == pytest.approx(there.ridge_)
    assert target_head(parts[0], 2, "auto", True).weight.shape == (2, X.shape[1])


def test_of_what_does_not_vary_the_mean_is_all_there_is_to_know() -> None:
    for x, y, mean in ((X, np.full(len(X), 3.0), 3.0), (np.full_like(X, 0.1), Y, Y.mean())):
        np.testing.assert_allclose(Fed3RRegressor().fit(x, y).predict(X), mean)


def test_a_client_for_each_example() -> None:
    with pytest.raises(HeadstartError, match="give one client for each"):
        Fed3RRegressor().fit(X, Y, client=[1, 2])
