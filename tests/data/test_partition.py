"""Who holds which example: invariants of every partition, numbers of each, and what is refused."""

from collections import Counter
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from headstart.config.partition import IID, Classes, Dirichlet, DirichletByClass, Domains, Natural, Shards
from headstart.data.examples import Examples
from headstart.data.partition import follow, partition
from headstart.errors import HeadstartError

Ints = npt.NDArray[np.int64]


def examples(labels: Any, clients: Any = None, domains: Any = None) -> Examples:
    labels = np.asarray(labels, np.int64)
    clients, domains = (None if ids is None else np.asarray(ids, np.int64) for ids in (clients, domains))
    source = np.zeros((len(labels), 1), np.float32)
    return Examples("features", source, (), np.arange(len(labels)), labels, clients, domains)


def table(owners: Ints, labels: Ints, clients: int, n_classes: int) -> Ints:
    """Counts [K, C], one example at a time."""
    counts = np.zeros((clients, n_classes), np.int64)
    for owner, label in zip(owners, labels, strict=True):
        if owner >= 0:
            counts[owner, label] += 1
    return counts


# 203 examples of 5 classes, in mixed order; class sizes 80, 60, 31, 20, 12.
LABELS = np.random.default_rng(5).permutation(np.repeat(np.arange(5), (80, 60, 31, 20, 12)))
USERS = np.arange(203) % 7
DOMAINS = np.arange(203) % 3

EVERY = [
    (IID(kind="iid", clients=10), 10),
    (Dirichlet(clients=10, alpha=0.01), 10),
    (Dirichlet(clients=10, alpha=100.0, leftovers="assign"), 10),
    (DirichletByClass(kind="dirichlet-by-class", clients=10, alpha=0.05), 10),
    (Shards(kind="shards", clients=10, shards_per_client=2), 10),
    (Classes(kind="classes", clients=10, classes_per_client=3), 10),
    (Natural(kind="natural"), 7),
    (Domains(kind="domains", clients_per_domain=2), 6),
]
NAMES = [f"{how.kind}-{number}" for number, (how, _) in enumerate(EVERY)]


@pytest.mark.parametrize(("how", "clients"), EVERY, ids=NAMES)
def test_owners_are_numbered_without_gaps(how: Any, clients: int) -> None:
    owners = partition(examples(LABELS, USERS, DOMAINS), 5, how, seed=3)
    assert owners.shape == (203,)
    assert np.issubdtype(owners.dtype, np.integer)
    assert set(owners.tolist()) - {-1} == set(range(clients))


@pytest.mark.parametrize(("how", "clients"), EVERY, ids=NAMES)
def test_a_seed_reproduces(how: Any, clients: int) -> None:
    data = examples(LABELS, USERS, DOMAINS)
    first = partition(data, 5, how, seed=3)
    assert np.array_equal(first, partition(data, 5, how, seed=3))
    if how.kind != "natural":
        assert not np.array_equal(first, partition(data, 5, how, seed=4))


@pytest.mark.parametrize(
    "how",
    [
        IID(kind="iid", clients=10),
        Dirichlet(clients=10, alpha=0.1, leftovers="assign"),
        DirichletByClass(kind="dirichlet-by-class", clients=10),
        Shards(kind="shards", clients=10),
        Natural(kind="natural"),
        Domains(kind="domains"),
    ],
    ids=lambda how: how.kind,
)
def test_nothing_is_left_unused(how: Any) -> None:
    assert partition(examples(LABELS, USERS, DOMAINS), 5, how, seed=0).min() == 0


@pytest.mark.parametrize("kind", [IID(kind="iid", clients=10), Dirichlet(clients=10, leftovers="assign")])
def test_sizes_are_equal_to_within_one(kind: Any) -> None:
    sizes = Counter(partition(examples(LABELS), 5, kind, seed=1).tolist())
    assert sorted(sizes.values()) == [20] * 7 + [21] * 3


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("alpha", [1e-300, 0.01, 0.1, 1.0, 1000.0, 1e308])
def test_dirichlet_gives_equal_sizes_and_reports_the_rest(alpha: float, seed: int) -> None:
    sizes = Counter(partition(examples(LABELS), 5, Dirichlet(clients=10, alpha=alpha), seed).tolist())
    assert sizes == {-1: 3, **dict.fromkeys(range(10), 20)}


def test_dirichlet_of_a_class_without_examples() -> None:
    labels = np.repeat([0, 2, 5], 30)
    owners = partition(examples(labels), 7, Dirichlet(clients=9, alpha=0.05), seed=0)
    assert table(owners, labels, 9, 7).sum(axis=0).tolist() == [30, 0, 30, 0, 0, 30, 0]


def one_at_a_time(labels: Ints, clients: int, alpha: float, rng: np.random.Generator) -> Ints:
    """Counts [K, C] as the papers draw them: client after client, example after example, over classes that are left."""
    n_classes = labels.max() + 1
    remaining = np.bincount(labels).astype(np.float64)
    counts = np.zeros((clients, n_classes), np.int64)
    for client in range(clients):
        share = rng.dirichlet(np.full(n_classes, alpha))
        for _ in range(len(labels) // clients):
            p = np.where(remaining > 0, share, 0)
            p = p if p.sum() > 1e-12 else remaining
            label = rng.choice(n_classes, p=p / p.sum())
            counts[client, label] += 1
            remaining[label] -= 1
    return counts


@pytest.mark.parametrize("alpha", [0.1, 1.0])
def test_dirichlet_has_the_distribution_of_one_draw_at_a_time(alpha: float) -> None:
    labels = np.repeat(np.arange(4), (100, 60, 60, 20))
    clients, trials = 12, 120
    rng = np.random.default_rng(11)

    def moments(counts: Ints) -> list[float]:
        """Concentration of early and of late clients (who meet empty classes), and of the rarest class."""
        concentration = ((counts / 20.0) ** 2).sum(axis=1)
        return [concentration[:6].mean(), concentration[6:].mean(), (counts[:, 3] ** 2).mean(), counts[:3, 0].mean()]

    how = Dirichlet(clients=clients, alpha=alpha)
    ours = [moments(table(partition(examples(labels), 4, how, seed), labels, clients, 4)) for seed in range(trials)]
    reference = [moments(one_at_a_time(labels, clients, alpha, rng)) for _ in range(trials)]
    difference = np.mean(ours, axis=0) - np.mean(reference, axis=0)
    error = np.sqrt((np.var(ours, axis=0) + np.var(reference, axis=0)) / trials)
    assert np.all(np.abs(difference) < 3.5 * error), difference / error


@pytest.mark.parametrize(("size", "n_classes", "published"), [(50_000, 100, 2870), (5_994, 200, 2353)])
def test_dirichlet_gives_as_many_class_means_as_the_fedcof_paper_counts(
    size: int, n_classes: int, published: int
) -> None:
    """Of CIFAR-100 and CUB-200, whose classes are of one size, with 100 clients and alpha = 0.1 (appendix H)."""
    labels = np.arange(size) % n_classes
    means = []
    for seed in range(10):
        owners = partition(examples(labels), n_classes, Dirichlet(clients=100, alpha=0.1), seed)
        means.append(len(np.unique((owners * n_classes + labels)[owners >= 0])))
    assert abs(np.mean(means) - published) < 2.5 * np.std(means, ddof=1)  # theirs is one draw


def test_dirichlet_concentrates_as_alpha_falls() -> None:
    labels = np.repeat(np.arange(10), 200)
    seen = [
        np.count_nonzero(table(partition(examples(labels), 10, Dirichlet(clients=40, alpha=a), 0), labels, 40, 10))
        for a in (0.01, 1.0, 100.0)
    ]
    # With 50 examples a client misses next to no class of ten at alpha = 100, and hardly has two at 0.01.
    assert seen[0] < 3 * 40 < seen[1] < seen[2]
    assert seen[2] > 9.5 * 40


def test_dirichlet_by_class_cuts_classes_by_dirichlet_shares() -> None:
    labels = np.repeat(np.arange(30), 400)
    how = DirichletByClass(kind="dirichlet-by-class", clients=10, alpha=0.5)
    counts = np.concatenate([table(partition(examples(labels), 30, how, s), labels, 10, 30).T for s in range(4)])
    assert counts.sum(axis=1).tolist() == [400] * 120
    # E[sum of squared shares] = (alpha + 1) / (K alpha + 1) = 0.25, and (1 - 0.25) / 400 from drawing 400 examples.
    concentration = ((counts / 400) ** 2).sum(axis=1)
    expected = 0.25 + 0.75 / 400
    assert abs(concentration.mean() - expected) < 4 * concentration.std() / np.sqrt(120)


@pytest.mark.parametrize("least", [1, 5, 20])
def test_dirichlet_by_class_keeps_the_minimum(least: int) -> None:
    how = DirichletByClass(kind="dirichlet-by-class", clients=10, alpha=0.02, min_examples=least)
    for seed in range(5):
        owners = partition(examples(LABELS), 5, how, seed)
        sizes = np.bincount(owners, minlength=10)
        assert sizes.min() >= least
        assert sizes.sum() == 203


@pytest.mark.parametrize(("clients", "shards"), [(10, 2), (5, 1), (25, 3), (4, 5)])
def test_shards_limit_the_classes_of_a_client(clients: int, shards: int) -> None:
    labels = np.repeat(np.arange(5), 60)
    counts = table(
        partition(examples(labels), 5, Shards(kind="shards", clients=clients, shards_per_client=shards), 2),
        labels,
        clients,
        5,
    )
    assert ((counts > 0).sum(axis=1) <= shards).all()
    size = 300 // (clients * shards)  # every case divides evenly, so that shards are equal
    assert counts.sum(axis=1).tolist() == [size * shards] * clients
    assert (counts % size == 0).all()


def test_shards_of_uneven_classes_differ_by_one_within_a_class() -> None:
    counts = table(
        partition(examples(LABELS), 5, Shards(kind="shards", clients=10, shards_per_client=1), 0), LABELS, 10, 5
    )
    # Two shards of each class: 80, 60, 31, 20 and 12 examples.
    by_class = sorted(sorted(column[column > 0].tolist()) for column in counts.T)
    assert by_class == [[6, 6], [10, 10], [15, 16], [30, 30], [40, 40]]


def test_the_test_split_follows_shards() -> None:
    labels, test_labels = np.repeat(np.arange(5), 60), np.repeat(np.arange(5), 24)
    train = table(partition(examples(labels), 5, Shards(kind="shards", clients=10), 7), labels, 10, 5)
    test = table(follow(train, test_labels, seed=7), test_labels, 10, 5)
    # 4 shards of 15 a class in training, so 6 test examples a shard.
    assert np.array_equal(test, train // 15 * 6)


def test_follow_rounds_by_largest_remainder() -> None:
    # Class 0: 10 x (5, 3, 2) / 10 is exact. Class 1: 5 x (6, 3, 1) / 10 = 3, 1.5, 0.5: the tie goes to the first.
    # Class 2: 7 x (1, 1, 2) / 4 = 1.75, 1.75, 3.5. Class 3: nobody has trained on it.
    train = np.array([[5, 6, 1, 0], [3, 3, 1, 0], [2, 1, 2, 0]])
    labels = np.random.default_rng(0).permutation(np.repeat([0, 1, 2, 3], (10, 5, 7, 4)))
    owners = follow(train, labels, seed=0)
    assert table(owners, labels, 3, 4).tolist() == [[5, 3, 2, 0], [3, 2, 2, 0], [2, 0, 3, 0]]
    assert set(labels[owners == -1]) == {3}


def test_follow_gives_every_example_of_a_held_class_one_owner_in_proportion() -> None:
    train = table(partition(examples(LABELS), 5, Dirichlet(clients=10, alpha=0.3), 0), LABELS, 10, 5)
    labels = np.random.default_rng(1).integers(0, 5, 500)
    counts = table(follow(train, labels, seed=1), labels, 10, 5)
    assert np.array_equal(counts.sum(axis=0), np.bincount(labels, minlength=5))
    exact = train / train.sum(axis=0) * np.bincount(labels, minlength=5)
    assert np.abs(counts - exact).max() < 1


@pytest.mark.parametrize(("clients", "per_client"), [(10, 2), (7, 3), (3, 5), (20, 1)])
def test_classes_are_distinct_equal_and_evenly_held(clients: int, per_client: int) -> None:
    labels = np.repeat(np.arange(5), 60)
    how = Classes(kind="classes", clients=clients, classes_per_client=per_client)
    counts = table(partition(examples(labels), 5, how, 1), labels, clients, 5)
    assert ((counts > 0).sum(axis=1) == per_client).all()
    assert len(set(counts[counts > 0].tolist())) == 1
    holders = (counts > 0).sum(axis=0)
    assert holders.max() - holders.min() <= 1
    assert counts.max() == 60 // holders.max()  # as many as the class with the most holders can give to each


def test_classes_take_the_number_asked_for_and_pass_over_empty_classes() -> None:
    labels = np.repeat([0, 2, 3], 40)
    how = Classes(kind="classes", clients=6, classes_per_client=2, examples_per_client=9)
    counts = table(partition(examples(labels), 4, how, 0), labels, 6, 4)
    assert counts[:, 1].tolist() == [0] * 6
    assert counts.sum(axis=1).tolist() == [8] * 6  # 9 does not divide by 2
    assert set(counts.ravel().tolist()) == {0, 4}


def test_natural_clients_keep_their_own_examples() -> None:
    users = [4, 9, 4, 2, 9, 4]
    owners = partition(examples([0, 1] * 3, users), 2, Natural(kind="natural"), 0)
    assert owners.tolist() == [1, 2, 1, 0, 2, 1]


@pytest.mark.parametrize(
    ("how", "kept"),
    [
        (Natural(kind="natural", min_examples=2), {1, 2}),
        (Natural(kind="natural", max_examples=2), {0, 1}),
        (Natural(kind="natural", min_examples=2, max_examples=2), {1}),
    ],
)
def test_natural_clients_outside_the_limits_are_left_out(how: Natural, kept: set[int]) -> None:
    users = np.array([0, 1, 1, 2, 2, 2])
    owners = partition(examples([0, 1] * 3, users), 2, how, 0)
    assert set(users[owners >= 0].tolist()) == kept
    assert set(owners[owners >= 0].tolist()) == set(range(len(kept)))


def test_natural_clients_can_be_drawn() -> None:
    users = np.repeat(np.arange(20), 3)
    drawn = set()
    for seed in range(10):
        owners = partition(examples(users % 2, users), 2, Natural(kind="natural", clients=4), seed)
        assert np.bincount(owners[owners >= 0]).tolist() == [3] * 4
        drawn |= set(users[owners >= 0].tolist())
    assert len(drawn) > 12


def test_domains_are_dealt_among_their_own_clients() -> None:
    domains = np.repeat([7, 3, 5], (10, 7, 4))
    owners = partition(examples(np.arange(21) % 2, None, domains), 2, Domains(kind="domains", clients_per_domain=2), 0)
    assert {domain: set(owners[domains == domain].tolist()) for domain in (3, 5, 7)} == {
        3: {0, 1},
        5: {2, 3},
        7: {4, 5},
    }
    assert np.bincount(owners).tolist() == [4, 3, 2, 2, 5, 5]


@pytest.mark.parametrize(
    ("how", "sentence"),
    [
        (IID(kind="iid", clients=204), "only 203 training examples; at most 203 clients"),
        (Natural(kind="natural", clients=300), "at most 203 clients"),
        (
            DirichletByClass(kind="dirichlet-by-class", clients=20, min_examples=11),
            "need 220, there are 203; lower clients to 18 or min_examples to 10",
        ),
        (
            Shards(kind="shards", clients=7, shards_per_client=2),
            "14 shards .* 5 classes; .* multiple of 5 .* example 5",
        ),
        (Shards(kind="shards", clients=13, shards_per_client=2), "example 10"),
        (Shards(kind="shards", clients=50, shards_per_client=2), "20 shards per class .* smallest has 12: lower"),
        (Classes(kind="classes", clients=5, classes_per_client=6), "only 5 classes; lower it"),
        (
            Classes(kind="classes", clients=5, classes_per_client=2, examples_per_client=500),
            "500 examples of 2 classes .* set examples_per_client to between 2 and 12",
        ),
        (
            Classes(kind="classes", clients=5, classes_per_client=2, examples_per_client=1),
            "1 examples of 2 classes .* set examples_per_client to between 2 and 12",
        ),
        (Classes(kind="classes", clients=100, classes_per_client=5), "lower clients or classes_per_client"),
        (Natural(kind="natural", clients=8), "only 7 clients .*sizes range from 29 to 29"),
        (Natural(kind="natural", min_examples=30), "only 0 clients have between 30 and 203 examples"),
        (Natural(kind="natural", min_examples=9, max_examples=8), "widen the limits"),
        (
            Domains(kind="domains", clients_per_domain=68),
            "clients_per_domain = 68: the smallest domain has 67 examples",
        ),
    ],
)
def test_what_cannot_be_dealt_is_refused_with_what_could(how: Any, sentence: str) -> None:
    with pytest.raises(HeadstartError, match=sentence):
        partition(examples(LABELS, USERS, DOMAINS), 5, how, 0)


@pytest.mark.parametrize(
    ("asked", "offered"),
    [
        (
            Shards(kind="shards", clients=13, shards_per_client=2),
            Shards(kind="shards", clients=10, shards_per_client=2),
        ),
        (
            Classes(kind="classes", clients=5, classes_per_client=2, examples_per_client=500),
            Classes(kind="classes", clients=5, classes_per_client=2, examples_per_client=12),
        ),
        (
            DirichletByClass(kind="dirichlet-by-class", clients=20, min_examples=11),
            DirichletByClass(kind="dirichlet-by-class", clients=18, min_examples=11),
        ),
    ],
    ids=lambda how: how.kind,
)
def test_what_a_refusal_offers_is_possible(asked: Any, offered: Any) -> None:
    with pytest.raises(HeadstartError):
        partition(examples(LABELS), 5, asked, 0)
    owners = partition(examples(LABELS), 5, offered, 0)
    assert len(set(owners.tolist()) - {-1}) == offered.clients


@pytest.mark.parametrize("how", [Natural(kind="natural"), Domains(kind="domains")], ids=lambda how: how.kind)
def test_data_that_name_no_owners_are_refused(how: Any) -> None:
    with pytest.raises(HeadstartError, match=r"name no (client|domain)s; set data\.(client|domain)_column"):
        partition(examples(LABELS), 5, how, 0)
