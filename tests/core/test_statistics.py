import warnings
from dataclasses import replace
from math import inf
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headstart.channel.noise import every_class
from headstart.core import moments as blockwise
from headstart.core.message import Message
from headstart.core.statistics import (
    ClientStatistics,
    Summary,
    message_nbytes,
    random_parts,
    read_statistics,
    shorten,
    summarise,
)
from headstart.core.update import StatisticsTotal
from headstart.errors import HeadstartError, MessageError
from headstart.heads import ridge_head

RNG = np.random.default_rng(0)
N, D, C, K = 300, 5, 4, 7
X = RNG.normal(size=(N, D)).astype(np.float32)
Y = RNG.integers(0, C - 1, N)  # class 3 is nobody's
WHO = RNG.integers(0, K, N)


def by_hand() -> dict[tuple[int, int], tuple[int, np.ndarray]]:
    """(client, class) → count and sum, one example at a time."""
    rows: dict[tuple[int, int], tuple[int, np.ndarray]] = {}
    for x, y, k in zip(X, Y, WHO, strict=True):
        count, total = rows.get((int(k), int(y)), (0, np.zeros(D)))
        rows[int(k), int(y)] = (count + 1, total + x.astype(np.float64))
    return rows


def test_rows_are_what_adding_up_by_hand_gives() -> None:
    found, owners = summarise(X, Y, C, clients=WHO)
    expected = by_hand()
    assert list(zip(owners.tolist(), found.labels.tolist(), strict=True)) == sorted(expected)
    for row, key in enumerate(sorted(expected)):
        count, total = expected[key]
        assert found.counts[row] == count
        # The same additions in the same order: the same bits.
        np.testing.assert_array_equal(found.sums[row], total)


@pytest.mark.parametrize("moments", [None, "diagonal", "full"])
def test_blocks_do_not_change_the_sums(moments: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, _ = summarise(X, Y, C, clients=WHO, moments=moments)
    for name in ("_BLOCK_BYTES", "_BLOCK_BYTES_OF_MOMENTS"):
        monkeypatch.setattr(blockwise, name, 8 * D * 11)  # eleven examples at a time
    blocks, _ = summarise(X, Y, C, clients=WHO, moments=moments)
    np.testing.assert_array_equal(blocks.sums, whole.sums)
    if moments is None:
        assert blocks.moments is None
    else:
        gram = X.astype(np.float64).T @ X.astype(np.float64)
        np.testing.assert_allclose(blocks.moments, gram if moments == "full" else np.diag(gram), rtol=1e-12)


def test_a_client_says_the_same_alone_and_among_others() -> None:
    together, owners = summarise(X, Y, C, clients=WHO)
    for client in range(K):
        rows = np.flatnonzero(client == WHO)
        alone, _ = summarise(X, Y[rows], C, rows=rows)
        np.testing.assert_array_equal(alone.sums, together.sums[owners == client])
        np.testing.assert_array_equal(alone.labels, together.labels[owners == client])


def test_merging_is_associative_and_order_free() -> None:
    parts = [summarise(X[WHO == k], Y[WHO == k], C, moments="full")[0] for k in range(K)]
    left = parts[0]
    for part in parts[1:]:
        left = left.merge(part)
    right = parts[-1]
    for part in reversed(parts[:-1]):
        right = part.merge(right)
    np.testing.assert_array_equal(left.sums, right.sums)
    np.testing.assert_array_equal(parts[0].merge(*parts[1:]).sums, left.sums)
    order = RNG.permutation(K)
    shuffled = parts[order[0]].merge(*(parts[k] for k in order[1:])).pooled()
    pooled, everything = left.pooled(), summarise(X, Y, C, moments="full")[0]
    for other in (shuffled, everything):
        np.testing.assert_array_equal(other.labels, pooled.labels)
        np.testing.assert_array_equal(other.counts, pooled.counts)
        np.testing.assert_allclose(other.sums, pooled.sums, rtol=1e-12)
        np.testing.assert_allclose(other.moments, pooled.moments, rtol=1e-12)
    assert pooled.labels.tolist() == [0, 1, 2]
    assert pooled.counts.tolist() == np.bincount(Y).tolist()


def test_nothing_heard_is_neutral() -> None:
    some, _ = summarise(X, Y, C, clients=WHO)
    merged = Summary(C, D).empty().merge(some)
    np.testing.assert_array_equal(merged.sums, some.sums)
    assert len(Summary(C, D).empty().pooled().labels) == 0


@pytest.mark.parametrize("moments", [None, "trace", "diagonal", "full"])
def test_what_travels(moments: str | None) -> None:
    sent, _ = summarise(X[WHO == 2], Y[WHO == 2], C, moments=moments)
    message = sent.to_message()
    assert message.nbytes == message_nbytes(len(sent.labels), D, moments)
    assert len(message.to_bytes()) == message.nbytes
    got = read_statistics(Message.from_bytes(message.to_bytes()), Summary(C, D, moments))
    assert got.labels.tolist() == sent.labels.tolist()  # only classes that are there
    if moments == "full":
        np.testing.assert_array_equal(got.sums, sent.sums)
        np.testing.assert_array_equal(got.moments, sent.moments)
    else:
        np.testing.assert_array_equal(got.sums, sent.sums.astype(np.float32))
    if moments in ("trace", "diagonal"):
        np.testing.assert_allclose(got.around_means(), sent.around_means(), rtol=1e-9)


def test_a_gram_matrix_travels_in_the_precision_that_a_small_ridge_needs() -> None:
    """Collinear features, ridge 0.01, as in the papers: what is sent can be solved, and not its float32 rounding."""
    base = np.abs(np.random.default_rng(1).normal(3, 1, (4000, 8)))
    x, y = base @ np.random.default_rng(2).normal(size=(8, 40)), base[:, :3].argmax(axis=1)
    message = Message.from_bytes(summarise(x, y, 3, moments="full")[0].to_message().to_bytes())
    got = read_statistics(message, Summary(3, 40, "full"))
    # The regression by its dual, which the precision of the Gram matrix has no part in.
    left, values, right = np.linalg.svd(x, full_matrices=False)
    weight = right.T @ ((values / (values**2 + 0.01))[:, None] * (left.T @ np.eye(3)[y]))
    expected = (weight / np.linalg.norm(weight, axis=0)).T
    np.testing.assert_allclose(ridge_head(got, 0.01, False).weight, expected, atol=1e-4)
    assert got.moments is not None
    with pytest.raises(HeadstartError, match="singular"):
        ridge_head(replace(got, moments=got.moments.astype(np.float32).astype(np.float64)), 0.01, False)


def message(**changes: np.ndarray) -> Message:
    arrays = {
        "labels": np.array([0, 2], np.int32),
        "counts": np.array([1, 3], np.int32),
        "sums": np.ones((2, D), np.float32),
    }
    return Message(arrays | changes)


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        (message(labels=np.array([0, C], np.int32)), "between 0 and 3"),
        (message(labels=np.array([-1, 2], np.int32)), "between 0 and 3"),
        (message(labels=np.array([0, 1, 2], np.int32)), "counts"),
        (message(counts=np.array([1, 0], np.int32)), "below 1"),
        (message(counts=np.array([1, -5], np.int32)), "below 1"),
        (message(sums=np.ones((2, D + 1), np.float32)), "shape"),
        (message(sums=np.full((2, D), np.nan, np.float32)), "NaN"),
        (message(sums=np.full((2, D), 2e15, np.float32)), r"a class sum is larger than features of 1e\+15"),
        (message(sums=np.ones((2, D), np.float64)), "float64"),
        (Message({}), "missing"),
    ],
)
def test_bad_statistics_are_refused(bad: Message, why: str) -> None:
    with pytest.raises(MessageError, match=why):
        read_statistics(bad, Summary(C, D))


def test_negative_squares_are_refused() -> None:
    for moments, size in (("diagonal", D), ("trace", 1)):
        sent = message(within=np.full(size, -1.0))
        with pytest.raises(MessageError, match="negative"):
            read_statistics(sent, Summary(C, D, moments))
        read_statistics(sent, Summary(C, D, moments), noisy=True)


@st.composite
def honest_clients(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray]:
    """Features [n, d] and labels [n]: any scale, an offset, equal, opposite and zero examples, constant features."""
    n, d = draw(st.integers(1, 40)), draw(st.integers(1, 6))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    x = rng.normal(draw(st.sampled_from([0.0, 1.0, 1e4])), 1, (n, d))
    if draw(st.booleans()):
        x = x[rng.integers(0, draw(st.integers(1, n)), n)]  # duplicates, or one example n times
    if draw(st.booleans()):
        x[n // 2 :] = -x[: n - n // 2]
    x[:, rng.random(d) < draw(st.sampled_from([0.0, 0.5]))] = draw(st.sampled_from([0.0, 3.0, 1e-30]))
    x[rng.random(n) < draw(st.sampled_from([0.0, 0.3]))] = 0
    # One scale for all, or for each feature its own: down to squares that are no longer numbers.
    scale = 10.0 ** draw(st.integers(-6, 6)) * 10.0 ** rng.integers(-draw(st.sampled_from([0, 6, 200])), 1, d)
    dtype = draw(st.sampled_from([np.float32, np.float64]))
    return (x * scale).astype(dtype), rng.integers(0, draw(st.integers(1, C)), n)


@given(honest_clients(), st.sampled_from([None, "trace", "diagonal", "full"]), st.sampled_from([inf, 1e-6, 1.0, 1e6]))
@settings(deadline=None, max_examples=300, derandomize=True)
def test_an_honest_client_is_never_refused(client: tuple[np.ndarray, np.ndarray], moments: Any, longest: float) -> None:
    x, y = client
    private = longest < inf
    rank = 0 if private or moments in (None, "full") else 2
    found, owners = summarise(shorten(x, longest) if private else x, y, C, moments=moments, rank=rank)
    if private:  # noise by the server: exact statistics of every class
        found = every_class(found, owners, np.array([0]))
    message = Message.from_bytes(found.to_message().to_bytes())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        got = read_statistics(message, Summary(C, x.shape[1], moments, rank=rank), every_class=private, longest=longest)
    np.testing.assert_array_equal(got.counts, found.counts)


HONEST = np.array([[3.0, 0, 4], [0, 2, 0], [1, 2, 2]])  # lengths 5, 2, 3


def sent(every: bool = False, **changes: Any) -> Message:
    """Two examples of class 0 and one of class 2, with some entries of the arrays set to something else."""
    found, owners = summarise(HONEST, np.array([0, 0, 2]), 3, moments="full")
    found = every_class(found, owners, np.array([0])) if every else found
    arrays = {name: array.copy() for name, array in found.to_message().arrays.items()}
    for name, (place, value) in changes.items():
        arrays[name][place] = value
    return Message(arrays)


# The Gram matrix is [[10, 2, 14], [2, 8, 4], [14, 4, 20]]; row after row, its upper triangle.
@pytest.mark.parametrize(
    ("bad", "why"),
    [
        (sent(moments=(1, 9.0)), "entry larger than its diagonal allows"),  # √(10 · 8) = 8.94
        (sent(moments=(1, -9.0)), "entry larger than its diagonal allows"),
        (sent(moments=(0, -1e-3)), "a sum of squares is negative"),
        # Σ s²/n of feature 0 is 3²/2 + 1²/1 = 5.5; with 4.3 it is 10.2, though 4.3² ≤ 2 · 10.
        (sent(sums=((0, 0), 4.3)), "larger than the sums of squares allow"),
        (sent(sums=((1, 2), -3.5)), "larger than the sums of squares allow"),  # 4²/2 + 3.5²/1 = 20.25 of feature 2
    ],
)
def test_statistics_that_no_features_have_are_refused(bad: Message, why: str) -> None:
    assert len(read_statistics(sent(), Summary(3, 3, "full")).labels) == 2
    for within in (sent(moments=(1, 8.9)), sent(moments=(1, -8.9)), sent(sums=((0, 0), 4.2))):
        read_statistics(within, Summary(3, 3, "full"))
    with pytest.raises(MessageError, match=why):
        read_statistics(bad, Summary(3, 3, "full"))


@pytest.mark.parametrize(
    ("bad", "longest", "why"),
    [
        (sent(True, counts=(1, -1)), 5.0, "a count below 0"),
        # The sum of class 2 has length 3, that of class 0 is (3, 2, 4), of length √29 = 5.385 from two examples.
        (sent(True), 2.9, r"the sum of class 2 has length 3: 1 examples no longer than 2\.9"),
        (sent(True, counts=(0, 1)), 5.0, r"the sum of class 0 has length 5\.39: 1 examples no longer than 5"),
        (sent(True, counts=(1, 0), sums=((1, 0), 1e-6)), 5.0, "the sum of class 1 has length 1e-06: 0 examples"),
        (sent(True), 3.0, "the sums of squares are larger than examples no longer than 3 make them"),  # 38 > 3 · 9
    ],
)
def test_statistics_that_no_short_features_have_are_refused(bad: Message, longest: float, why: str) -> None:
    got = read_statistics(sent(True), Summary(3, 3, "full"), every_class=True, longest=5.0)
    assert got.counts.tolist() == [2, 0, 1]
    with pytest.raises(MessageError, match=why):
        read_statistics(bad, Summary(3, 3, "full"), every_class=True, longest=longest)
    # Where clients add noise themselves, none of this is impossible.
    read_statistics(bad, Summary(3, 3, "full"), every_class=True, longest=longest, noisy=True)


@pytest.mark.parametrize("noisy", [False, True])
def test_with_privacy_every_class_is_sent_in_order(noisy: bool) -> None:
    for bad in (sent(), sent(True, labels=(slice(None), [1, 0, 2]))):
        with pytest.raises(MessageError, match="every class is sent, in order"):
            read_statistics(bad, Summary(3, 3, "full"), every_class=True, noisy=noisy)


def test_no_more_rows_than_were_asked_for() -> None:
    parts = np.array([0, 1, 0])
    rows, _ = summarise(HONEST, np.array([0, 0, 2]), 3, parts=parts)
    with pytest.raises(MessageError, match="class 0 is sent 2 times, more than 1"):
        read_statistics(rows.to_message(), Summary(3, 3))
    assert len(read_statistics(rows.to_message(), Summary(3, 3, means_per_client=2)).labels) == 3


def test_values_that_do_not_add_up() -> None:
    with pytest.raises(HeadstartError, match="NaN, infinity or values too large"):
        summarise(np.full((3, 2), np.inf), np.zeros(3, np.int64), 2)
    with pytest.raises(HeadstartError, match="squares"):
        summarise(np.full((3, 2), 1e200), np.zeros(3, np.int64), 2, moments="full")
    huge, _ = summarise(np.full((3, 2), 1e39), np.zeros(3, np.int64), 2)
    with pytest.raises(HeadstartError, match="float32"):
        huge.to_message()


@pytest.mark.parametrize(
    ("size", "expected"), [(1, [1]), (3, [3]), (4, [2, 2]), (5, [2, 3]), (9, [3, 3, 3]), (11, [3, 3, 5])]
)
def test_parts_of_a_class_have_the_sizes_of_the_papers_code(size: int, expected: list[int]) -> None:
    parts = random_parts(np.zeros(size, np.int64), np.zeros(size, np.int64), 3, (0,))
    assert parts is not None
    assert np.bincount(parts).tolist() == expected


def test_every_class_of_every_client_is_split_by_its_own_size() -> None:
    held = {(5, 0): (11, [3, 3, 5]), (5, 2): (9, [3, 3, 3]), (8, 1): (3, [3]), (8, 2): (5, [2, 3])}
    pairs = np.repeat(np.array(list(held)), [size for size, _ in held.values()], axis=0)
    clients, labels = np.random.default_rng(0).permutation(pairs).T
    parts = random_parts(labels, clients, 3, (0,))
    assert parts is not None
    for (client, label), (_, expected) in held.items():
        assert np.bincount(parts[(clients == client) & (labels == label)]).tolist() == expected


def test_parts_depend_on_the_client_and_the_seed_alone() -> None:
    whole = random_parts(Y, WHO, 3, (1, 2))
    assert whole is not None
    for client in range(K):
        mine = WHO == client
        np.testing.assert_array_equal(random_parts(Y[mine], WHO[mine], 3, (1, 2)), whole[mine])
    other = random_parts(Y, WHO, 3, (1, 3))
    assert not np.array_equal(other, whole)
    assert random_parts(Y, WHO, 1, (0,)) is None


def test_a_trace_around_many_means_is_added_up_in_the_order_of_the_rows() -> None:
    rng, count = np.random.default_rng(3), 20_000  # several blocks
    sums, counts = rng.normal(size=(count, 3)).astype(np.float32), rng.integers(1, 9, count)
    found = ClientStatistics(1, np.zeros(count, np.int64), counts, sums, np.zeros(3)).around_means()
    total = np.zeros(3)
    for row, often in zip(sums.astype(np.float64), counts, strict=True):
        total += row * (row / often)
    np.testing.assert_allclose(-found, total, rtol=1e-14)


def test_rows_of_many_replies_are_side_by_side_and_held_once() -> None:
    summary = Summary(C, D, rows=True)
    total, parts = StatisticsTotal(summary), [summarise(X[WHO == k], Y[WHO == k], C)[0] for k in range(K)]
    for part in parts:
        total.add(part)
    found = total.merged()
    assert np.array_equal(found.sums, np.concatenate([part.sums for part in parts]))
    assert np.array_equal(found.labels, np.concatenate([part.labels for part in parts]))
    assert found.sums.base is not None  # a view of what the total holds
    with pytest.raises(ValueError, match="resize"):  # not moved under whoever reads it
        total.add(summarise(X, np.arange(N), N)[0])


def test_no_rows_at_all_have_the_shape_of_rows() -> None:
    total = StatisticsTotal(Summary(C, D, rows=True))
    total.add(Summary(C, D).empty())
    assert total.merged().sums.shape == (0, D)
