"""Discriminants against scikit-learn's with the same covariance."""

import numpy as np
import pytest
from sklearn.base import BaseEstimator
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis

from headstart import Fed3R, FedCOF
from headstart.config.recipe import Recipe
from headstart.core.statistics import summarise
from headstart.errors import HeadstartError
from headstart.heads import cof_head
from headstart.heads.lda import ridge_lda_head

RNG = np.random.default_rng(4)
C, D, N = 4, 6, 300
Y = np.concatenate([np.arange(C), RNG.choice(C, N - C, p=[0.5, 0.3, 0.15, 0.05])])
X = RNG.normal(0, 2, (C, D))[Y] + 3 + RNG.normal(size=(N, D)) @ RNG.normal(size=(D, D))
WHO = RNG.integers(0, 9, N)


class Given(BaseEstimator):
    """A covariance that scikit-learn takes as it is."""

    def __init__(self, covariance: np.ndarray) -> None:
        self.covariance = covariance

    def fit(self, X: np.ndarray, y: object = None) -> "Given":
        self.covariance_ = self.covariance
        return self


def theirs(covariance: np.ndarray, prior: str, x: np.ndarray = X, y: np.ndarray = Y) -> LinearDiscriminantAnalysis:
    priors = None if prior == "empirical" else np.full(C, 1 / C)
    given = LinearDiscriminantAnalysis(solver="lsqr", covariance_estimator=Given(covariance), priors=priors)
    return given.fit(x, y)


def within() -> np.ndarray:
    """The pooled within-class covariance, class by class."""
    return sum(((Y == c).sum() - 1) * np.cov(X[Y == c].T) for c in range(C)) / (N - C)


def estimated() -> np.ndarray:
    """FedCOF's: from the clients' class means, class by class."""
    total = np.zeros((D, D))
    for c in range(C):
        holders, mean, found = np.unique(WHO[Y == c]), X[Y == c].mean(axis=0), np.zeros((D, D))
        for k in holders:
            mine = X[(Y == c) & (WHO == k)]
            found += len(mine) * np.outer(mine.mean(axis=0) - mean, mine.mean(axis=0) - mean)
        total += ((Y == c).sum() - 1) * found / max(len(holders) - 1, 1)
    return total / (N - C)


@pytest.mark.parametrize("prior", ["empirical", "uniform"])
def test_discriminants_are_those_of_scikit_learn(prior: str) -> None:
    rows = summarise(X, Y, C, clients=WHO, moments="full")[0]
    cases = [
        (cof_head(rows, 0.7, "estimated", head="lda", prior=prior), estimated() + 0.7 * np.eye(D)),
        (cof_head(rows, 0.7, "full", head="lda", prior=prior), within() + 0.7 * np.eye(D)),
        (ridge_lda_head(rows, 5.0, True, prior), within() + 5.0 / (N - C) * np.eye(D)),
    ]
    for head, covariance in cases:
        expected = theirs(covariance, prior)
        np.testing.assert_allclose(head.weight, expected.coef_, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(head.bias, expected.intercept_, rtol=1e-4, atol=1e-4)


def test_fewer_means_than_dimensions() -> None:
    """Woodbury's smaller system: 8 means in 30 dimensions, every class at four clients."""
    x, y, who = RNG.normal(1, 1, (60, 30)), np.repeat([0, 1], 30), np.tile([0, 1, 2, 3], 15)
    spread = np.zeros((30, 30))
    for c in (0, 1):
        mean = x[y == c].mean(axis=0)
        parts = [x[(y == c) & (who == k)] for k in range(4)]
        spread += 29 / 3 * sum(len(p) * np.outer(p.mean(axis=0) - mean, p.mean(axis=0) - mean) for p in parts)
    head = cof_head(summarise(x, y, 2, clients=who)[0], 0.3, "estimated", head="lda", prior="empirical")
    inverse = np.linalg.inv(spread / 58 + 0.3 * np.eye(30))
    means = np.stack([x[y == c].mean(axis=0) for c in (0, 1)])
    np.testing.assert_allclose(head.weight, means @ inverse, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(
        head.bias, -0.5 * np.einsum("cd,de,ce->c", means, inverse, means) + np.log(0.5), rtol=1e-4
    )


def test_a_uniform_prior_favours_rare_classes() -> None:
    rare, blurred = {}, X + RNG.normal(0, 5, X.shape)
    for prior in ("empirical", "uniform"):
        head = Fed3R(head="lda", prior=prior).fit(X, Y)
        rare[prior] = int((head.predict(blurred) == 3).sum())
        np.testing.assert_array_equal(head.predict(X), theirs(within(), prior).predict(X))  # λ is next to nothing
    assert rare["uniform"] > rare["empirical"]


def test_estimators_and_their_probabilities() -> None:
    head = FedCOF(head="lda", covariance="full", shrinkage=0.1).fit(X, Y, client=WHO)
    expected = theirs(within() + 0.1 * np.eye(D), "empirical")
    np.testing.assert_allclose(head.decision_function(X), expected.decision_function(X), rtol=1e-3, atol=1e-3)
    assert head.temperature_ == pytest.approx(1, abs=0.15)  # Gaussian classes of one covariance are its own model


def test_refusals() -> None:
    with pytest.raises(HeadstartError, match="head = 'lda' needs the Gram matrix"):
        ridge_lda_head(summarise(X, Y, C)[0], 0.1, False, "uniform")
    data = {"data": {"dataset": "digits"}, "model": {"backbone": "features"}}
    for stage, why in (
        ({"method": "fedcof", "head": "lda", "privacy": {"epsilon": 1.0}}, "length of features"),
        ({"method": "fed3r", "prior": "uniform"}, "only head = 'lda' has one"),
    ):
        with pytest.raises(HeadstartError, match=why):
            Recipe.parse(data | {"stages": [stage]})
