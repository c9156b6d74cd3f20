"""A federation against the plain lists of who holds what."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headstart.config.recipe import Recipe
from headstart.data import Federation
from headstart.errors import HeadstartError

# 24 training and 12 test examples; users 12 and 7 train on 10 and 8, user 3 on 6, and user 99 only tests.
Y = np.concatenate([np.arange(24) % 3, np.arange(12) % 3])
USERS = np.concatenate([np.repeat([12, 7, 3], (10, 8, 6)), np.repeat([3, 7, 99, 12], 3)])
DOMAINS = np.concatenate([np.repeat([5, 2], 12), np.repeat([2, 5], 6)])
SPLIT = np.repeat([0, 2], (24, 12))


@pytest.fixture
def features(tmp_path: Path) -> str:
    file = tmp_path / "features.npz"
    np.savez(file, X=np.arange(36.0)[:, None], y=Y, split=SPLIT, client=USERS, domain=DOMAINS)
    return str(file)


def federate(dataset: str, seed: int = 0, **how: Any) -> Federation:
    data = {"dataset": dataset, "partition": how}
    return Federation.of(Recipe.parse({"seed": seed, "data": data, "stages": [{"method": "fedncm"}]}))


@pytest.mark.parametrize(
    "how",
    [
        {"kind": "iid", "clients": 5},
        {"kind": "dirichlet", "clients": 5, "alpha": 0.2},
        {"kind": "shards", "clients": 6, "shards_per_client": 2},
        {"kind": "classes", "clients": 5, "classes_per_client": 2},
        {"kind": "natural", "min_examples": 7},
        {"kind": "domains", "clients_per_domain": 2},
    ],
    ids=lambda how: how["kind"],
)
def test_counts_sizes_and_rows_are_those_of_the_owners(features: str, how: dict[str, Any]) -> None:
    federation = federate(features, **how)
    labels = federation.dataset.train.labels
    held = [[row for row in range(24) if federation.owners[row] == client] for client in range(federation.n_clients)]
    assert min(map(len, held)) > 0
    assert federation.sizes.tolist() == [len(rows) for rows in held]
    assert federation.counts.tolist() == [[sum(labels[rows] == c) for c in range(3)] for rows in held]
    assert federation.unused == 24 - sum(map(len, held))
    assert len(set(federation.names)) == federation.n_clients
    last_first = np.arange(federation.n_clients)[::-1]
    rows, owners = federation.rows_of(last_first)
    assert rows.tolist() == [row for client in last_first for row in held[client]]
    assert owners.tolist() == federation.owners[rows].tolist()


def test_rows_of_some_clients_and_of_none(features: str) -> None:
    federation = federate(features, kind="dirichlet", clients=5)
    assert federation.unused == 4
    rows, owners = federation.rows_of(np.array([3, 1]))
    assert rows.tolist() == [*np.flatnonzero(federation.owners == 3), *np.flatnonzero(federation.owners == 1)]
    assert owners.tolist() == [3] * 4 + [1] * 4
    rows, owners = federation.rows_of(np.zeros(0, np.int64))
    assert (len(rows), len(owners)) == (0, 0)


def test_clients_are_numbered_where_nobody_names_them(features: str) -> None:
    assert federate(features, kind="iid", clients=3).names == ("client-0", "client-1", "client-2")


def test_natural_clients_have_their_own_names_and_examples(features: str) -> None:
    federation = federate(features, kind="natural", min_examples=7)
    assert set(federation.names) == {"12", "7"}
    assert federation.unused == 6
    for client, name in enumerate(federation.names):
        assert np.flatnonzero(federation.owners == client).tolist() == np.flatnonzero(USERS[:24] == int(name)).tolist()


def test_domains_name_their_clients(features: str) -> None:
    federation = federate(features, kind="domains")
    assert set(federation.names) == {"2", "5"}
    for client, name in enumerate(federation.names):
        assert (DOMAINS[:24][federation.owners == client] == int(name)).all()
    several = federate(features, kind="domains", clients_per_domain=3)
    assert sorted(name.split("-")[0] for name in several.names) == ["2"] * 3 + ["5"] * 3
    assert several.sizes.tolist() == [4] * 6


def test_the_test_split_is_shared_unless_it_follows(features: str) -> None:
    assert federate(features, kind="iid", clients=3).test_owners is None


def test_the_test_split_follows_the_training_classes(features: str) -> None:
    federation = federate(features, kind="classes", clients=3, classes_per_client=1, test="follow")
    assert federation.test_owners is not None
    # Three clients with one class each: a test example belongs to the one that trains on its class.
    owner_of_class = federation.counts.argmax(axis=0)
    assert federation.counts[owner_of_class, np.arange(3)].tolist() == [8, 8, 8]
    assert federation.test_owners.tolist() == owner_of_class[Y[24:]].tolist()


def test_natural_clients_test_on_their_own_examples(features: str) -> None:
    federation = federate(features, kind="natural", min_examples=7, test="follow")
    assert federation.test_owners is not None
    # User 3 is too small, and user 99 never trained.
    names = [federation.names[owner] if owner >= 0 else None for owner in federation.test_owners]
    assert names == [None] * 3 + ["7"] * 3 + [None] * 3 + ["12"] * 3


def test_each_client_gets_a_test_of_its_own_where_the_data_are_cut() -> None:
    federation = federate("digits", kind="shards", clients=20, shards_per_client=2, test="follow")
    assert federation.test_owners is not None
    test_labels = federation.dataset.test.labels
    assert (federation.test_owners >= 0).all()
    for client in range(20):
        tested = set(test_labels[federation.test_owners == client].tolist())
        assert tested == set(np.flatnonzero(federation.counts[client]).tolist())
        assert len(tested) <= 2


@pytest.mark.parametrize("how", [{"kind": "iid", "clients": 5}, {"kind": "dirichlet", "clients": 5, "test": "follow"}])
def test_a_recipe_and_its_seed_reproduce_the_federation(features: str, how: dict[str, Any]) -> None:
    first, again, other = (federate(features, seed=seed, **how) for seed in (4, 4, 5))
    assert np.array_equal(first.owners, again.owners)
    assert not np.array_equal(first.owners, other.owners)
    if first.test_owners is not None:
        assert again.test_owners is not None
        assert np.array_equal(first.test_owners, again.test_owners)


@pytest.mark.parametrize(
    ("how", "sentence"),
    [
        ({"kind": "iid", "clients": 25}, "only 24 training examples; at most 24 clients"),
        ({"kind": "dirichlet", "clients": 25}, "only 24 training examples"),
        ({"kind": "natural", "clients": 4}, "only 3 clients have between 1 and 24 examples"),
        ({"kind": "natural", "max_examples": 5}, "only 0 clients .*sizes range from 6 to 10"),
    ],
)
def test_clients_that_would_hold_nothing_are_refused(features: str, how: dict[str, Any], sentence: str) -> None:
    with pytest.raises(HeadstartError, match=sentence):
        federate(features, **how)


def test_data_without_clients_are_refused_as_natural() -> None:
    with pytest.raises(HeadstartError, match="name no clients"):
        federate("digits", kind="natural")


def test_follow_deals_a_domains_test_examples_to_its_own_clients(tmp_path: Path) -> None:
    domain = np.repeat([3, 7], 60)
    np.savez(
        tmp_path / "domains.npz",
        X=np.random.default_rng(0).normal(size=(120, 2)),
        y=np.arange(120) % 2,
        domain=domain,
        split=np.tile([0, 0, 2], 40),
    )
    partition = {"kind": "domains", "clients_per_domain": 2, "test": "follow"}
    table = {
        "data": {"dataset": str(tmp_path / "domains.npz"), "partition": partition},
        "stages": [{"method": "fedncm"}],
    }
    federation = Federation.of(Recipe.parse(table))
    test = federation.dataset.test
    assert federation.test_owners is not None
    assert np.bincount(federation.test_owners).tolist() == [10, 10, 10, 10]
    np.testing.assert_array_equal(federation.test_owners // 2, test.domains)
    assert federation.names == ("3-0", "3-1", "7-0", "7-1")
