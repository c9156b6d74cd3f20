"""Classifiers whose clients come and go: to the bit those of whoever is left, and to rounding those of one fit."""

from typing import Any

import numpy as np
import pytest
from sklearn.datasets import load_digits

from headstart import Fed3R, FedCOF, FedNCM
from headstart.errors import HeadstartError

X, Y = load_digits(return_X_y=True)
X, Y = X[:600], Y[:600]
WHO = np.random.default_rng(0).integers(0, 6, 600)
MAKERS = {
    "fedncm": FedNCM,
    "fed3r": Fed3R,
    "fed3r-lda": lambda: Fed3R(head="lda"),
    "fed3r-random": lambda: Fed3R(random_features=30),
    "fedcof": FedCOF,
    "fedcof-means": lambda: FedCOF(means_per_client=2),
}


def bits(head: Any) -> tuple[bytes, bytes]:
    return head.coef_.tobytes(), head.intercept_.tobytes()


def told(make: Any, clients: list[int], batch: int = 1) -> Any:
    """A classifier that has heard clients in this order, ``batch`` of them in a call."""
    head = make()
    for start in range(0, len(clients), batch):
        mine = np.isin(WHO, clients[start : start + batch])
        head.partial_fit(X[mine], Y[mine], classes=np.arange(10), client=WHO[mine])
    return head


@pytest.mark.parametrize("kind", MAKERS)
def test_a_forgotten_client_was_never_there(kind: str) -> None:
    never = told(MAKERS[kind], [0, 1, 3, 4, 5])
    for order in ([0, 1, 2, 3, 4, 5], [2, 5, 4, 3, 1, 0], [3, 0, 5, 1, 4, 2]):
        head = told(MAKERS[kind], order)
        assert bits(head) != bits(never)
        assert bits(head.forget(2)) == bits(never)
    assert bits(told(MAKERS[kind], [5, 3, 2, 1, 0, 4], batch=3).forget(2)) == bits(never)


@pytest.mark.parametrize("kind", ["fedncm", "fed3r", "fed3r-lda", "fedcof"])
def test_clients_one_by_one_are_those_of_one_fit(kind: str) -> None:
    together = MAKERS[kind]().fit(X, Y, client=WHO)
    apart = told(MAKERS[kind], [4, 2, 0, 1, 3, 5])
    np.testing.assert_allclose(apart.coef_, together.coef_, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(apart.intercept_, together.intercept_, rtol=1e-4, atol=1e-5)
    # A client that comes twice is one client.
    twice = MAKERS[kind]()
    for half in (slice(0, 300), slice(300, 600)):
        twice.partial_fit(X[half], Y[half], classes=np.arange(10), client=WHO[half])
    np.testing.assert_allclose(twice.coef_, together.coef_, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", MAKERS)
def test_classes_that_come_later(kind: str) -> None:
    few = Y < 7
    head, names = MAKERS[kind](), np.array(list("abcdefghij"))
    head.partial_fit(X[few], names[Y[few]], classes=[*names[1:7], "a", "g"], client=WHO[few])
    before = bits(head)
    assert head.classes_.tolist() == list("abcdefg")
    with pytest.raises(HeadstartError, match=r"labels \['h', 'i', 'j'\] are not among classes"):
        head.partial_fit(X[~few], names[Y[~few]], client="new")
    head.partial_fit(X[~few], names[Y[~few]], classes=names, client="new")
    assert head.coef_.shape[0] == 10
    assert head.score(X, names[Y]) > 0.75
    head.forget("new")  # what it brought is gone; the classes stay, and nobody has them
    assert np.isneginf(head.intercept_[7:]).all()
    assert (head.coef_[:7].tobytes(), head.intercept_[:7].tobytes()) == before
    assert set(head.predict(X)) <= set("abcdefg")
    assert (head.predict_proba(X)[:, 7:] == 0).all()


def test_calls_without_clients_are_clients_of_their_own() -> None:
    head = FedCOF()
    for part in range(4):
        head.partial_fit(X[part::4], Y[part::4], classes=np.arange(10))
    named = FedCOF().fit(X, Y, client=np.arange(600) % 4)
    np.testing.assert_allclose(head.coef_, named.coef_, rtol=1e-4, atol=1e-5)
    assert head.forget("call 3").score(X, Y) > 0.8


def test_probabilities_wait_to_be_calibrated() -> None:
    head = told(Fed3R, [0, 1, 2])
    assert head.temperature_ == 1
    rest = WHO > 2
    assert head.calibrate(X[rest], Y[rest]).temperature_ != 1
    assert head.forget(0).temperature_ == 1  # nothing of the client is left there, either


def test_refusals() -> None:
    with pytest.raises(HeadstartError, match="classes must be given at the first call"):
        FedNCM().partial_fit(X, Y)
    with pytest.raises(HeadstartError, match=r"forget: 3 is no client that was kept; known: none: partial_fit keeps"):
        FedNCM().fit(X, Y, client=WHO).forget(3)
    head = told(FedNCM, [0, 1])
    with pytest.raises(HeadstartError, match=r"9 is no client that was kept; known: 0, 1"):
        head.forget(9)
    with pytest.raises(HeadstartError, match=r"classes lacks \[9\]"):
        head.partial_fit(X, Y, classes=np.arange(9), client=2)
    with pytest.raises(HeadstartError, match="is the last client"):
        head.forget(0).forget(1)
    with pytest.raises(HeadstartError, match="with several centres"):
        FedNCM(centres=2).partial_fit(X, Y, classes=np.arange(10))
    anew = told(FedNCM, [0, 1]).fit(X, Y)
    assert bits(anew) == bits(FedNCM().fit(X, Y))
    with pytest.raises(HeadstartError, match="fit keeps nothing that partial_fit could add to"):
        anew.partial_fit(X, Y, client=2)
