import numpy as np
import pytest
from sklearn.base import clone
from sklearn.datasets import load_digits
from sklearn.model_selection import cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import parametrize_with_checks

from headstart import Fed3R, FedCOF, FedNCM, HeadstartError

X, Y = load_digits(return_X_y=True)
WHO = np.random.default_rng(0).integers(0, 15, len(Y))


@parametrize_with_checks(
    [
        FedNCM(),
        FedNCM("euclidean"),
        Fed3R(),
        Fed3R(ridge=0.1, bias=False),
        Fed3R(random_features=50),
        FedCOF(),
        FedCOF(1.0),
    ],
    expected_failed_checks=lambda _: {"check_fit_score_takes_y": "fit keeps nothing that partial_fit could add to"},
)
def test_scikit_learn_contract(estimator: object, check) -> None:
    check(estimator)


@pytest.mark.parametrize(
    ("head", "least"),
    [
        (FedNCM(), 0.85),
        (Fed3R(), 0.85),
        (Fed3R(random_features=500), 0.96),
        (FedCOF(), 0.9),
        (FedCOF(means_per_client=3), 0.9),
    ],
)
def test_accuracy_on_real_digits(head: FedNCM, least: float) -> None:
    """scikit-learn's NearestCentroid scores 0.90 here; scaling its rows to length one costs a ridge some points."""
    rows = np.random.default_rng(1).permutation(len(Y))
    train, test = rows[:1400], rows[1400:]
    assert clone(head).fit(X[train], Y[train], client=WHO[train]).score(X[test], Y[test]) > least


def test_clients_may_have_any_names_and_labels_any_type() -> None:
    names = np.array([f"hospital {k}" for k in WHO])
    words = np.array(["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"])[Y]
    by_name = FedCOF().fit(X, words, client=names)
    by_number = FedCOF().fit(X, Y, client=WHO)
    assert (by_name.predict(X) == words).mean() == pytest.approx((by_number.predict(X) == Y).mean(), abs=0.01)
    assert by_name.classes_.tolist() == sorted(set(words))


def test_who_holds_what_matters_to_fedcof_alone() -> None:
    for head in (FedNCM(), Fed3R()):
        np.testing.assert_allclose(head.fit(X, Y, client=WHO).coef_, clone(head).fit(X, Y).coef_, rtol=1e-3, atol=1e-5)
    assert not np.allclose(FedCOF().fit(X, Y, client=WHO).coef_, FedCOF().fit(X, Y).coef_, atol=1e-3)


def test_without_clients_fedcof_has_the_exact_within_class_covariance() -> None:
    classes = [X[Y == label] for label in range(10)]
    gram = sum((len(each) - 1) * (np.cov(each.T) + 2.0 * np.eye(64)) for each in classes)
    gram = gram + len(X) * np.outer(X.mean(axis=0), X.mean(axis=0))
    weight = np.linalg.solve(gram, np.stack([each.sum(axis=0) for each in classes], axis=1)).T
    expected = weight / np.linalg.norm(weight, axis=1, keepdims=True)
    np.testing.assert_allclose(FedCOF(2.0).fit(X, Y).coef_, expected, rtol=1e-4, atol=1e-6)


def test_probabilities_and_pipelines() -> None:
    head = FedCOF().fit(X, Y, client=WHO)
    np.testing.assert_allclose(head.predict_proba(X).sum(axis=1), 1, rtol=1e-5)
    assert (head.predict_proba(X).argmax(axis=1) == head.predict(X)).all()
    assert cross_val_score(make_pipeline(StandardScaler(), Fed3R()), X, Y, cv=3).mean() > 0.85


def test_refusals() -> None:
    with pytest.raises(HeadstartError, match="one class only"):
        FedNCM().fit(X[:5], np.zeros(5))
    with pytest.raises(HeadstartError, match="one client for each of 10 examples"):
        FedCOF().fit(X[:10], Y[:10], client=[1, 2])
    with pytest.raises(ValueError, match="NaN"):
        FedNCM().fit(np.full((4, 2), np.nan), [0, 1, 0, 1])
