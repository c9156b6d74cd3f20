"""Noise on statistics: the sensitivity it is scaled to, the size it has, and what is made of noisy values."""

from dataclasses import replace
from itertools import combinations_with_replacement
from math import exp, sqrt
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import optimize, stats

from headstart.channel.noise import blur_counts, every_class, scaled
from headstart.config.recipe import Recipe
from headstart.config.stage import CountNoise
from headstart.core.message import Message
from headstart.core.reply import Reply
from headstart.core.statistics import ClientStatistics, shorten, summarise
from headstart.errors import HeadstartError, MessageError, RecipeError
from headstart.heads import ncm_head, ridge_head
from headstart.heads.estimators import Fed3R, FedCOF, FedNCM
from headstart.methods import Task
from headstart.solvers.cohort import Cohort
from tests.helpers import Bench, context_of, round_trip

CLASSES, DIM, CLIENTS = 4, 6, 8
METHODS: dict[str, dict[str, Any]] = {
    "fedncm": {"method": "fedncm"},
    "fedncm-euclidean": {"method": "fedncm", "distance": "euclidean"},
    "fed3r": {"method": "fed3r"},
    "fed3r-random-features": {"method": "fed3r", "random_features": 5},
    "fedcof": {"method": "fedcof"},
    "fedcof-trace": {"method": "fedcof", "within": "trace"},
    "fedcof-told": {"method": "fedcof", "within": "diagonal"},
    "fedcof-rank": {"method": "fedcof", "rank": 2},
    "fedcof-full": {"method": "fedcof", "covariance": "full"},
    "fedcof-diagonal": {"method": "fedcof", "covariance": "diagonal"},
}
BY_ROW = ("fedcof", "fedcof-trace", "fedcof-told", "fedcof-rank")
BLOCKS = {"fedncm": 1, "fed3r-random-features": 3, **dict.fromkeys((*BY_ROW[1:], "fedcof-full", "fedcof-diagonal"), 3)}
BLOCKS["fedcof-rank"] = 4
"""Blocks of numbers that are released: class sums, and counts, second moments and a sketch where the head needs
them."""
UNCOUNTED = ("fedncm", "fed3r")
NOISES = ("server", "client")


def stages_of(**keys: Any) -> Any:
    data = {"dataset": "digits", "partition": {"kind": "iid", "clients": CLIENTS}}
    return Recipe.parse({"data": data, "model": {"backbone": "features"}, "stages": [keys]}).stages


def bench_of(name: str, dim: int = DIM, classes: int = CLASSES, tasks: tuple[Task, ...] = (), **keys: Any) -> Bench:
    (stage,) = stages_of(**METHODS[name], **keys)
    return Bench(stage, context_of(stage, classes, dim, (3, 0), CLIENTS, tasks=tasks))


def private(name: str, epsilon: float = 1.0, noise: str = "server", clip: float = 1.0, **keys: Any) -> Bench:
    return bench_of(name, privacy={"epsilon": epsilon, "noise": noise, "clip": clip}, **keys)


def cohort_of(x: np.ndarray, y: np.ndarray, owners: np.ndarray, clients: np.ndarray | None = None) -> Cohort:
    clients = np.unique(owners) if clients is None else clients
    rows = np.arange(len(x))
    new = np.ones(len(clients), bool)

    def nothing(name: str, start: Any) -> Any:
        raise AssertionError(name)

    return Cohort(clients, x, rows, np.asarray(y), np.asarray(owners), new, nothing)


def answer(bench: Bench, cohort: Cohort, round: int = 0) -> Reply:
    """What the clients of a cohort say, in one message, as it arrives."""
    (reply,) = bench.answer(cohort, bench.broadcast(bench.init(), round))
    return replace(reply, message=round_trip(reply.message))


def received(bench: Bench, *cohorts: Cohort) -> ClientStatistics:
    """All that the server hears of these cohorts in a round, before it adds noise of its own."""
    found: ClientStatistics = bench.total(bench.init(), [answer(bench, cohort) for cohort in cohorts]).merged()
    return found


def heard(bench: Bench, *cohorts: Cohort, state: Any = None, round: int = 0) -> Any:
    """The server's state after a round in which these cohorts have answered."""
    replies = [answer(bench, cohort, round) for cohort in cohorts]
    return bench.after(bench.init() if state is None else state, replies, round)


def merged(state: Any) -> ClientStatistics:
    """Everything that a state holds."""
    found: ClientStatistics = state.parts[0].merge(*state.parts[1:])
    return found


def blobs(n: int, seed: int, dim: int = DIM) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Features around four centres, their classes, and who holds them; lengths differ widely."""
    centres = 3 * np.random.default_rng(0).normal(size=(CLASSES, dim))
    rng = np.random.default_rng(seed)
    y = rng.integers(0, CLASSES, n)
    x = centres[y] + rng.normal(size=(n, dim))
    return x * rng.uniform(0.5, 2, (n, 1)), y, np.sort(rng.integers(0, CLIENTS, n))


def multiplier_of(epsilon: float, delta: float = 1e-5) -> float:
    """Balle and Wang (2018), theorem 8."""

    def leak(sigma: float) -> float:
        below, above = 0.5 / sigma - epsilon * sigma, -0.5 / sigma - epsilon * sigma
        return float(stats.norm.cdf(below) - exp(epsilon) * stats.norm.cdf(above)) - delta

    return float(optimize.brentq(leak, 1e-2, 1e4))


# ------------------------------------------------------------------------------------------------------- sensitivity


@pytest.mark.parametrize("name", METHODS)
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_one_example_moves_the_scaled_statistics_by_no_more_than_claimed(name: str, data: st.DataObject) -> None:
    size = data.draw(st.integers(1, 5))
    clip = data.draw(st.floats(0.1, 10))
    numbers = st.floats(-100, 100).map(lambda value: round(value, 3))
    x = np.array(data.draw(st.lists(st.lists(numbers, min_size=3, max_size=3), min_size=size + 1, max_size=size + 1)))
    y = np.array(data.draw(st.lists(st.integers(0, 1), min_size=size + 1, max_size=size + 1)))
    owners = np.zeros(size + 1, np.int64)
    bench = private(name, clip=clip, dim=3, classes=2)
    more, less = (
        received(bench, cohort_of(x[part], y[part], owners[part], np.array([0])))
        for part in (slice(None), slice(1, None))
    )
    bound = bench.channel.spent(0)["clip"]
    moved = np.linalg.norm(scaled(more, bound) - scaled(less, bound))
    assert moved <= sqrt(BLOCKS.get(name, 2)) * (1 + 1e-4)  # class sums travel in float32
    if name not in UNCOUNTED:
        assert moved >= 1 - 1e-4  # the count


def test_the_claim_is_reached_by_an_example_at_the_clip() -> None:
    for name in ("fedncm", "fedncm-euclidean", "fed3r", "fedcof", "fedcof-trace", "fedcof-full"):
        bench = private(name, clip=2.0)
        far = np.full((2, DIM), 50.0)
        both, one = (received(bench, cohort_of(far[:n], np.zeros(n, int), np.zeros(n, int))) for n in (2, 1))
        moved = np.linalg.norm(scaled(both, 2.0) - scaled(one, 2.0))
        assert moved == pytest.approx(sqrt(BLOCKS.get(name, 2)), rel=1e-6)


@pytest.mark.parametrize(("name", "claim"), [("fedncm", 1.0), ("fedncm-euclidean", sqrt(2)), ("fed3r", sqrt(2))])
def test_the_sensitivity_by_brute_force_over_neighbouring_data_sets(name: str, claim: float) -> None:
    """All data sets of up to three examples from a grid of vectors, with every one of them taken away.

    What is released is worked out here, from its definition: clipped sums by class over B, the Gram matrix over B² and
    the counts; no more of them than travels.
    """
    bench, bound = private(name, clip=2.0, dim=2, classes=2), 2.0
    assert bench.channel.noise.sensitivity == pytest.approx(claim)
    grid = [(np.array([a, b]), label) for a in (-3.0, 0.0, 2.0) for b in (0.5, 9.0) for label in (0, 1)]

    def released(examples: list[tuple[np.ndarray, int]]) -> np.ndarray:
        parts, names = [], ("labels", "counts", "sums", "moments")
        short = [(x * min(1.0, bound / max(np.linalg.norm(x), 1e-9)), label) for x, label in examples]
        x, y = np.array([x for x, _ in examples]), np.array([label for _, label in examples])
        sent = answer(bench, cohort_of(x, y, np.zeros(len(y), int), np.array([0]))).message.arrays
        assert set(sent) <= set(names)
        for label in (0, 1):
            mine = [x for x, other in short if other == label]
            parts += [np.sum(mine, axis=0) / bound if mine else np.zeros(2)]
            parts += [np.array([len(mine)])] if "counts" in sent else []
        if "moments" in sent:
            parts.append(np.ravel(sum(np.outer(x, x) for x, _ in short)) / bound**2)
        exact = scaled(received(bench, cohort_of(x, y, np.zeros(len(y), int))), bound)
        assert np.linalg.norm(exact) == pytest.approx(np.linalg.norm(np.concatenate(parts)), rel=1e-5)
        return np.concatenate(parts)

    moved = []
    for size in (2, 3):
        for examples in combinations_with_replacement(grid[:: size - 1], size):
            whole = released(list(examples))
            moved += [np.linalg.norm(whole - released([*examples[:k], *examples[k + 1 :]])) for k in range(size)]
    assert max(moved) == pytest.approx(claim, rel=1e-6)  # never more, and reached


@pytest.mark.parametrize("noise", NOISES)
@pytest.mark.parametrize("name", METHODS)
def test_counts_travel_only_where_the_head_needs_them(name: str, noise: str) -> None:
    x, y, owners = blobs(60, 1)
    bench = private(name, noise=noise)
    reply, secure = answer(bench, cohort_of(x, y, owners)), bench.channel.vector_shapes()
    assert ("counts" in reply.message.arrays) == ("counts" in secure) == (name not in UNCOUNTED)
    one = answer(bench, cohort_of(x[:5], y[:5], np.zeros(5, int)))
    assert one.bytes_up.tolist() == [len(one.message.to_bytes())]
    plain = answer(bench_of(name), cohort_of(x, y, owners))
    assert "counts" in plain.message.arrays


def test_without_counts_the_noise_is_its_own_ridge() -> None:
    bench = private("fed3r", epsilon=2.0, clip=5.0)
    state = heard(bench, cohort_of(*blobs(300, 6)))
    total = merged(state).solvable()
    assert total.moments is not None
    assert 0 < bench.method.selected(state)["ridge"] < 1e-5 * np.linalg.eigvalsh(total.moments).max()
    assert np.linalg.eigvalsh(total.moments).min() >= bench.channel.noise.floor(DIM, 1) * (1 - 1e-9)
    quiet = private("fed3r", epsilon=1e9, clip=5.0)
    assert np.isfinite(quiet.head(heard(quiet, cohort_of(*blobs(300, 6)))).weight).all()


def test_heads_that_need_counts_say_so() -> None:
    total = ClientStatistics(2, np.arange(2), np.ones(2, np.int64), np.ones((2, 3)), np.eye(3), counted=False)
    with pytest.raises(HeadstartError, match="need the number of examples"):
        ncm_head(total, "euclidean")
    with pytest.raises(HeadstartError, match="bias needs the number of examples"):
        ridge_head(total, 1.0, bias=True)


def test_random_features_are_shortened_after_the_map() -> None:
    x = 40 * np.random.default_rng(0).normal(size=(30, DIM))
    for clip, bound in ((0.5, 0.5), (9.0, sqrt(2))):  # random cosines are never longer than √2
        bench = private("fed3r-random-features", clip=clip)
        assert bench.channel.spent(0)["clip"] == pytest.approx(bound)
        for row in x:
            total = received(bench, cohort_of(row[None], np.array([0]), np.array([0])))
            assert np.linalg.norm(total.sums) <= bound * (1 + 1e-9)


def test_shortening_leaves_what_is_short() -> None:
    x = np.array([[3.0, 4.0], [0.3, 0.4], [0.0, 0.0]])
    np.testing.assert_allclose(shorten(x, 1.0), [[0.6, 0.8], [0.3, 0.4], [0.0, 0.0]])


# ------------------------------------------------------------------------------------------------------------- noise


@pytest.mark.parametrize("name", ["fedncm", "fed3r", "fedcof-diagonal"])
def test_the_noise_of_a_message_has_the_claimed_size(name: str) -> None:
    clip = 2.0
    x, y = np.array([[0.5] * DIM, [-0.2] * DIM]), np.array([1, 1])
    bench = private(name, epsilon=0.5, noise="client", clip=clip)
    exact, _ = summarise(x, y, CLASSES, moments=bench.method.moments)
    exact = every_class(exact, np.array([0]), np.array([0]))
    found: dict[str, list[np.ndarray]] = {"counts": [], "sums": [], "moments": []}
    for draw in range(400):
        bench.channel.seed = (draw,)
        sent = received(bench, cohort_of(x, y, np.zeros(2, int)))
        for key in found:
            if getattr(exact, key) is not None:
                found[key].append(getattr(sent, key) - getattr(exact, key))
    unit = multiplier_of(0.5) * sqrt(BLOCKS.get(name, 2))
    counts, sums = np.array(found["counts"]), np.array(found["sums"])
    if name not in UNCOUNTED:
        assert counts.std() == pytest.approx(sqrt(unit**2 + 1 / 12), rel=0.07)  # rounded to whole numbers
        assert abs(counts.mean()) < 5 * unit / sqrt(counts.size)
    assert sums.std() == pytest.approx(unit * clip, rel=0.04)
    assert abs(sums.mean()) < 5 * unit * clip / sqrt(sums.size)
    # Classes that the client does not have are as noisy as the one that it has.
    assert sums[:, 1].std() == pytest.approx(sums[:, 0].std(), rel=0.08)
    if name == "fed3r":
        moments = np.array(found["moments"])
        np.testing.assert_allclose(moments, moments.transpose(0, 2, 1))
        on = np.array([moment.diagonal() for moment in moments])
        off = np.array([moment[np.triu_indices(DIM, 1)] for moment in moments])
        assert on.std() == pytest.approx(unit * clip**2, rel=0.06)
        assert off.std() == pytest.approx(unit * clip**2 / sqrt(2), rel=0.04)
    if name == "fedcof-diagonal":
        assert np.array(found["moments"]).std() == pytest.approx(unit * clip**2, rel=0.06)


def test_the_noise_of_a_sketch_has_the_claimed_size() -> None:
    x, y, owners = blobs(60, 1)
    bench = private("fedcof-rank", epsilon=0.5, clip=2.0)
    exact = received(bench, cohort_of(x, y, owners))
    assert exact.sketch is not None
    noise = bench.channel.noise
    found = np.array([noise.add(exact, [np.random.default_rng(seed)]).sketch - exact.sketch for seed in range(400)])
    assert found.shape == (400, 2, DIM)
    assert found.std() == pytest.approx(multiplier_of(0.5) * sqrt(4) * 2.0**2, rel=0.04)
    assert abs(found.mean()) < 5 * found.std() / sqrt(found.size)


@pytest.mark.parametrize("noise", NOISES)
@pytest.mark.parametrize("name", ["fedncm", "fed3r", "fedcof"])
def test_no_two_clients_and_no_two_tasks_have_the_same_noise(name: str, noise: str) -> None:
    x, y, _ = blobs(40, 1)
    zero, one = np.zeros(40, int), np.ones(40, int)
    if noise == "client":
        sent = [received(private(name, noise="client"), cohort_of(x, y, owner)).sums for owner in (zero, one)]
        assert sent[0].shape != sent[1].shape or not np.isclose(sent[0], sent[1]).any()
    both = private(name, 5.0, noise, tasks=(Task("a", CLASSES), Task("b", CLASSES)))
    cohorts = [replace(cohort_of(x, y, zero), task=task) for task in (0, 1)]
    state = heard(both, *cohorts)
    assert not np.isclose(both.head(state, 0).weight, both.head(state, 1).weight).all()


def test_the_noise_of_a_gram_matrix_has_the_spectrum_that_is_taken_for_noise() -> None:
    noise = private("fed3r", epsilon=1.0, clip=3.0).channel.noise
    empty = ClientStatistics(1, np.array([0]), np.array([0]), np.zeros((1, 200)), np.zeros((200, 200)))
    rngs = [np.random.default_rng(seed) for seed in range(5)]
    noisy = noise.add(empty, rngs).moments
    assert np.linalg.norm(noisy, 2) == pytest.approx(noise.floor(200, 5), rel=0.06)


# ---------------------------------------------------------------------------------------------- clients and messages


@pytest.mark.parametrize("noise", NOISES)
@pytest.mark.parametrize("name", METHODS)
def test_many_clients_at_once_say_what_they_say_one_by_one(name: str, noise: str) -> None:
    x, y, owners = blobs(300, 2)
    bench = private(name, epsilon=20.0, noise=noise, clip=5.0)
    together = heard(bench, cohort_of(x, y, owners))
    alone = heard(bench, *(cohort_of(x[owners == k], y[owners == k], owners[owners == k]) for k in range(CLIENTS)))
    left, right = merged(together), merged(alone)
    np.testing.assert_array_equal(left.labels, right.labels)
    np.testing.assert_array_equal(left.counts, right.counts)
    np.testing.assert_allclose(left.sums, right.sums, rtol=1e-6)
    np.testing.assert_allclose(bench.head(together).weight, bench.head(alone).weight, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("noise", NOISES)
@pytest.mark.parametrize("name", ["fedncm", "fed3r", "fedcof-full"])
def test_a_message_does_not_tell_which_classes_a_client_has(name: str, noise: str) -> None:
    bench = private(name, noise=noise)
    sent = []
    for y in ([0, 0, 0], [1, 2, 3]):
        reply = answer(bench, cohort_of(np.ones((3, DIM)), np.array(y), np.zeros(3, int)))
        assert reply.message.arrays["labels"].tolist() == [0, 1, 2, 3]
        assert reply.bytes_up.tolist() == [len(reply.message.to_bytes())]
        sent.append(reply)
    assert sent[0].bytes_up.tolist() == sent[1].bytes_up.tolist()


def test_a_client_of_fedcof_leaves_out_what_its_noise_makes_zero() -> None:
    """Absent classes are sent as often as the noise alone brings a count of 0 to 1 or more."""
    bench = private("fedcof", noise="client")
    rows = []
    for draw in range(500):
        bench.channel.seed = (draw,)
        reply = answer(bench, cohort_of(np.ones((20, DIM)), np.zeros(20, int), np.zeros(20, int)))
        assert (reply.message.arrays["counts"] >= 1).all()
        assert reply.bytes_up.tolist() == [len(reply.message.to_bytes())]
        rows += reply.message.arrays["labels"].tolist()
    unit = multiplier_of(1.0) * sqrt(2)
    expected = 500 * stats.norm.sf(0.5 / unit)
    for absent in (1, 2, 3):
        assert rows.count(absent) == pytest.approx(expected, abs=4 * sqrt(500 / 4))
    assert rows.count(0) == pytest.approx(500 * stats.norm.sf(-19.5 / unit), abs=10)


@pytest.mark.parametrize("name", ["fedncm", "fed3r"])
def test_a_private_message_without_some_class_is_refused(name: str) -> None:
    bench = private(name, noise="client", epsilon=0.1)
    x, y, _ = blobs(20, 1)
    reply = answer(bench, cohort_of(x, y, np.zeros(20, int)))
    if name not in UNCOUNTED:
        assert (reply.message.arrays["counts"] < 1).any()  # which is no reason to refuse it
    bench.total(bench.init(), [reply])
    for rows in (slice(1, None), slice(0, 0), slice(None, None, -1)):
        arrays = {key: array[rows] for key, array in reply.message.arrays.items() if key != "moments"}
        bad = Reply(reply.clients, Message(dict(reply.message.arrays) | arrays), reply.bytes_up, reply.forward_passes)
        with pytest.raises(MessageError, match="every class"):
            bench.total(bench.init(), [bad])


# ------------------------------------------------------------------------------------------------------------- heads


@pytest.mark.parametrize("noise", NOISES)
@pytest.mark.parametrize(
    ("name", "keys", "estimator"),
    [
        ("fedncm", {}, FedNCM()),
        ("fedncm-euclidean", {}, FedNCM("euclidean")),
        ("fed3r", {"ridge": 1.0}, Fed3R(1.0, bias=False)),
        ("fedcof", {"shrinkage": 0.1}, FedCOF(0.1, within="estimated")),
        ("fedcof-trace", {"shrinkage": 0.1}, FedCOF(0.1, within="trace")),
        ("fedcof-told", {"shrinkage": 0.1}, FedCOF(0.1, within="diagonal")),
        ("fedcof-full", {"shrinkage": 0.1}, FedCOF(0.1, covariance="full")),
        ("fedcof-diagonal", {"shrinkage": 0.1}, FedCOF(0.1, covariance="diagonal")),
    ],
)
def test_without_noise_to_speak_of_the_head_is_that_of_shortened_features(
    name: str, keys: dict[str, Any], estimator: FedNCM, noise: str
) -> None:
    x, y, owners = blobs(4000, 3)
    clip = 4.0
    short = x / np.maximum(np.linalg.norm(x, axis=1, keepdims=True) / clip, 1)
    assert 0.2 < (np.linalg.norm(x, axis=1) > clip).mean() < 0.999
    expected = estimator.fit(short, y, client=owners).head_
    bench = private(name, epsilon=1e6, noise=noise, clip=clip, **keys)
    head = bench.head(heard(bench, cohort_of(x, y, owners)))
    np.testing.assert_allclose(head.weight, expected.weight, atol=2e-3)
    np.testing.assert_allclose(head.bias, expected.bias, atol=2e-3)
    plain = bench_of(name, **keys)
    unshortened = plain.head(heard(plain, cohort_of(x, y, owners)))
    assert not np.allclose(unshortened.weight, expected.weight, atol=4e-3)


def accuracy(name: str, epsilon: float, noise: str) -> float:
    x, y, owners = blobs(1200, 4)
    unseen, truth, _ = blobs(500, 5)
    found = []
    for draw in range(3):
        bench = private(name, epsilon=epsilon, noise=noise, clip=5.0)
        bench.channel.seed = (draw,)
        head = bench.head(heard(bench, cohort_of(x, y, owners)))
        found.append((head.scores(unseen).argmax(axis=1) == truth).mean())
    return float(np.mean(found))


@pytest.mark.parametrize("noise", NOISES)
@pytest.mark.parametrize("name", METHODS)
def test_accuracy_falls_gracefully_with_the_budget(name: str, noise: str) -> None:
    ample, some, none = (accuracy(name, epsilon, noise) for epsilon in (1e6, 4.0, 0.02))
    plain = bench_of(name)
    x, y, owners = blobs(1200, 4)
    unseen, truth, _ = blobs(500, 5)
    open_head = plain.head(heard(plain, cohort_of(x, y, owners)))
    assert ample > (open_head.scores(unseen).argmax(axis=1) == truth).mean() - 0.03
    assert some > ample - 0.15
    assert none < some - 0.15


@pytest.mark.parametrize("noise", NOISES)
@pytest.mark.parametrize("name", METHODS)
def test_a_stage_has_one_noise_that_a_checkpoint_keeps(name: str, noise: str) -> None:
    x, y, owners = blobs(300, 6)
    first, second = (cohort_of(x[part], y[part], owners[part]) for part in (owners < 4, owners >= 4))
    bench = private(name, epsilon=5.0, noise=noise, clip=5.0)
    state = heard(bench, first, second)
    head = bench.head(state)
    np.testing.assert_array_equal(bench.head(bench.saved(state)).weight, head.weight)
    again = private(name, epsilon=5.0, noise=noise, clip=5.0)
    np.testing.assert_array_equal(again.head(heard(again, first, second)).weight, head.weight)
    earlier = heard(bench, first)
    whole, resumed = (
        each.head(heard(each, second, state=at, round=1)).weight
        for each, at in ((bench, earlier), (again, again.saved(earlier)))
    )
    np.testing.assert_array_equal(resumed, whole)
    if noise == "client":  # whose noise comes with what they say, whenever that is
        np.testing.assert_array_equal(whole, head.weight)
    other = private(name, epsilon=5.0, noise=noise, clip=5.0)
    other.channel.seed = (99,)
    assert not np.allclose(other.head(heard(other, first, second)).weight, head.weight, atol=1e-3)


@pytest.mark.parametrize("name", METHODS)
def test_under_the_servers_noise_nothing_exact_outlasts_the_round(name: str) -> None:
    bench, cohort = private(name, clip=5.0), cohort_of(*blobs(300, 6))
    exact, saved = received(bench, cohort), merged(bench.saved(heard(bench, cohort)))
    exact = exact if name in BY_ROW else exact.pooled()
    assert saved.labels.tolist() == exact.labels.tolist()
    assert not np.isclose(saved.sums, exact.sums, rtol=1e-6).any()
    if name not in UNCOUNTED:
        assert (saved.counts == exact.counts).mean() < 0.5  # they are rounded to whole numbers
    if exact.moments is not None:
        assert not np.isclose(saved.moments, exact.moments, rtol=1e-6).any()


def test_the_servers_noise_on_rows_does_not_change_when_more_follow() -> None:
    x, y, owners = blobs(300, 6)
    bench = private("fedcof")
    first = cohort_of(x[owners < 4], y[owners < 4], owners[owners < 4])
    early, late = heard(bench, first), heard(bench, cohort_of(x, y, owners))
    left, right = merged(early).solvable(), merged(late).solvable()
    np.testing.assert_array_equal(left.sums, right.sums[: len(left.sums)])
    later = heard(bench, first, state=early, round=1)  # in another round, another noise
    np.testing.assert_array_equal(merged(later).sums[: len(early.parts[0].sums)], early.parts[0].sums)
    assert not np.isclose(later.parts[0].sums, later.parts[1].sums).any()


def test_noisy_second_moments_become_possible_ones() -> None:
    rng = np.random.default_rng(7)
    sums, counts = 4 * rng.normal(size=(3, 5)), np.array([4, 9, -2])
    noisy = rng.normal(size=(5, 5))
    total = ClientStatistics(3, np.arange(3), counts, sums, noisy + noisy.T)
    made = replace(total, noise_floor=0.25).solvable()
    assert made.labels.tolist() == [0, 1]
    assert made.moments is not None
    between = sum(np.outer(row, row) / count for row, count in zip(made.sums, made.counts, strict=True))
    values = np.linalg.eigvalsh(made.moments - between)
    assert values.min() == pytest.approx(0.25)
    before = np.linalg.eigvalsh(noisy + noisy.T - between)
    assert values.max() == pytest.approx(max(before.max(), 0.25))
    column = made.sums.sum(axis=0)[:, None]
    with_ones = np.block([[made.moments, column], [column.T, made.counts.sum()]])
    assert np.linalg.eigvalsh(with_ones).min() > -1e-9


def test_noise_that_hides_every_class_is_said_so() -> None:
    nobody = ClientStatistics(2, np.arange(2), np.array([0, -3]), np.ones((2, 3)), noise_floor=0.0)
    with pytest.raises(HeadstartError, match=r"raise privacy\.epsilon"):
        nobody.solvable()


# ------------------------------------------------------------------------------------------------------ what is spent


@pytest.mark.parametrize("noise", NOISES)
def test_what_is_spent(noise: str) -> None:
    channel = private("fed3r", epsilon=2.0, noise=noise, clip=3.0).channel
    assert channel.spent(0)["epsilon"] == 0
    found = channel.spent(1)
    multiplier = found.pop("noise_multiplier")
    assert found.pop("released") == {"server": "one head", "client": "every client's statistics, once"}[noise]
    assert found == {"epsilon": 2.0, "delta": 1e-5, "unit": "example", "noise": noise, "clip": 3.0}
    assert multiplier == pytest.approx(multiplier_of(2.0), rel=1e-5)
    assert bench_of("fed3r").channel.spent(1) is None


def test_what_several_tasks_spend() -> None:
    tasks = (Task("a", CLASSES), Task("b", CLASSES))
    channel = private("fedncm", 2.0, tasks=tasks).channel
    assert channel.spent(0)["epsilon"] == 0
    assert channel.spent(1)["epsilon"] == 2.0
    assert bench_of("fedncm", tasks=tasks).channel.spent(1) is None


# ------------------------------------------------------------------------------------------------ FedCOF's count noise


def rows_of(count: int, clients: int) -> tuple[ClientStatistics, np.ndarray]:
    sums = np.random.default_rng(0).normal(size=(2 * clients, 3)) * count
    rows = ClientStatistics(2, np.tile([0, 1], clients), np.full(2 * clients, count), sums)
    return rows, np.repeat(np.arange(clients), 2)


@pytest.mark.parametrize(
    ("kind", "deviation", "mean_absolute"),
    [
        ("uniform", 50 / sqrt(3), 25),
        ("gaussian", 20.0, 20 * sqrt(2 / np.pi)),
        ("laplace", 20 * sqrt(2), 20),
    ],
)
def test_count_noise_has_the_moments_of_its_kind(kind: str, deviation: float, mean_absolute: float) -> None:
    rows, owners = rows_of(1000, 4000)
    epsilon = {"uniform": 0.95, "gaussian": 0.0025, "laplace": 0.05}[kind]
    blurred, who = blur_counts(rows, owners, CountNoise(kind=kind, epsilon=epsilon), (0, 0))  # type: ignore[arg-type]
    noise = blurred.counts - 1000.0
    assert who.tolist() == owners.tolist()
    assert abs(noise.mean()) < 5 * deviation / sqrt(8000)
    assert noise.std() == pytest.approx(deviation, rel=0.05)
    assert np.abs(noise).mean() == pytest.approx(mean_absolute, rel=0.05)
    if kind == "uniform":
        assert np.abs(noise).max() <= 50
    means = blurred.sums / blurred.counts[:, None]
    np.testing.assert_allclose(means, rows.sums / 1000)


@pytest.mark.parametrize(("kind", "law"), [("gaussian", stats.norm(0, 2)), ("laplace", stats.laplace(0, 4))])
def test_classes_whose_count_becomes_zero_are_not_sent(kind: str, law: Any) -> None:
    rows, owners = rows_of(2, 2000)
    blurred, who = blur_counts(rows, owners, CountNoise(kind=kind, epsilon=0.25), (0, 0))  # type: ignore[arg-type]
    assert len(who) == len(blurred.labels) == len(blurred.sums)
    assert blurred.counts.min() == 1
    expected = law.sf(0.5 - 2)
    assert len(who) == pytest.approx(4000 * expected, abs=5 * sqrt(4000 * expected * (1 - expected)))


def test_count_noise_on_the_wire() -> None:
    """Each client's noise is its own, alone or in a cohort; what is sent is valid, and a seed reproduces it."""
    x, y, owners = blobs(60, 8)
    bench = bench_of("fedcof", count_noise={"kind": "gaussian", "epsilon": 0.3})
    together = heard(bench, cohort_of(x, y, owners))
    alone = heard(bench, *(cohort_of(x[owners == k], y[owners == k], owners[owners == k]) for k in range(CLIENTS)))
    left, right = merged(together), merged(alone)
    np.testing.assert_array_equal(left.counts, right.counts)
    np.testing.assert_array_equal(left.sums, right.sums)
    plain, _ = summarise(x, y, CLASSES, clients=owners)
    assert len(left.labels) < len(plain.labels)
    assert np.isfinite(bench.head(together).weight).all()
    reply = answer(bench, cohort_of(x[:3], y[:3], owners[:3]))
    assert reply.bytes_up.tolist() == [len(reply.message.to_bytes())]


def test_rows_below_one_are_absent() -> None:
    rows = ClientStatistics(4, np.arange(4), np.array([3, 0, -1, 1]), np.arange(8.0).reshape(4, 2))
    kept, places = rows.present()
    assert kept.labels.tolist() == places.tolist() == [0, 3]
    np.testing.assert_array_equal(kept.sums, [[0, 1], [6, 7]])


# ------------------------------------------------------------------------------------------------------------ recipes


@pytest.mark.parametrize(
    ("keys", "why"),
    [
        ({"privacy": {"epsilon": 1.0}, "means_per_client": 2}, "means_per_client: one example changes"),
        (
            {"privacy": {"epsilon": 1.0}, "count_noise": {"kind": "laplace", "epsilon": 1.0}},
            "count_noise: privacy puts noise",
        ),
        ({"count_noise": {"kind": "laplace", "epsilon": 1.0}, "covariance": "full"}, "use covariance = 'estimated'"),
        ({"count_noise": {"kind": "laplace", "epsilon": 1.0}, "within": "trace"}, "use within = 'estimated'"),
        ({"count_noise": {"kind": "laplace", "epsilon": 1.0}, "rank": 2}, "does not hide directions; use rank = 0"),
        ({"within": "estimated", "rank": 2}, "use within = 'auto', or rank = 0"),
        ({"covariance": "full", "rank": 2}, "rank: covariance = 'full' is exact already; leave rank out"),
        ({"covariance": "full", "within": "trace"}, "within: covariance = 'full' is exact already"),
        ({"privacy": {"noise": "client"}}, r"stages\.0\.privacy\.epsilon: missing"),
        (
            {"privacy": {"epsilon": 1.0, "noise": "sever"}},
            r"privacy\.noise: 'sever' is not accepted; did you mean 'server'",
        ),
        ({"privacy": {"epsilon": 1.0, "klip": 1.0}}, r"privacy\.klip: unknown key; did you mean 'clip'"),
        ({"count_noise": {"kind": "unifrm", "epsilon": 1.0}}, r"count_noise\.kind: .* did you mean 'uniform'"),
    ],
)
def test_recipes_that_cannot_hide_what_they_say(keys: dict[str, Any], why: str) -> None:
    with pytest.raises(RecipeError, match=why):
        stages_of(method="fedcof", **keys)


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("keys", [{"clients_per_round": 2}, {"participation": 0.5}])
def test_noise_on_totals_is_for_one_round(name: str, keys: dict[str, Any]) -> None:
    def parse(noise: str, **keys: Any) -> None:
        stages_of(**METHODS[name], **keys, privacy={"epsilon": 1.0, "noise": noise})

    parse("client", **keys)
    parse("server", participation=1.0)
    if name in BY_ROW:
        parse("server", **keys)
    else:
        with pytest.raises(RecipeError, match=r"privacy\.noise: .* differ by exact sums"):
            parse("server", **keys)
