import numpy as np
import pytest

from headstart import statistics
from headstart.errors import HeadstartError, MessageError
from headstart.statistics import ClientStatistics, message_nbytes, random_parts, summarise
from headstart.wire import Message

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
    monkeypatch.setattr(statistics, "_BLOCK_BYTES", 8 * D * 11)  # eleven examples at a time
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
    merged = ClientStatistics.empty(C, D).merge(some)
    np.testing.assert_array_equal(merged.sums, some.sums)
    assert len(ClientStatistics.empty(C, D).pooled().labels) == 0


@pytest.mark.parametrize("moments", [None, "diagonal", "full"])
def test_what_travels(moments: str | None) -> None:
    sent, _ = summarise(X[WHO == 2], Y[WHO == 2], C, moments=moments)
    message = sent.to_message()
    assert message.nbytes == message_nbytes(len(sent.labels), D, moments)
    assert len(message.to_bytes()) == message.nbytes
    got = ClientStatistics.from_message(Message.from_bytes(message.to_bytes()), C, D, moments)
    assert got.labels.tolist() == sent.labels.tolist()  # only classes that are there
    if moments is None:
        np.testing.assert_array_equal(got.sums, sent.sums.astype(np.float32))
    else:
        np.testing.assert_array_equal(got.sums, sent.sums)
        np.testing.assert_array_equal(got.moments, sent.moments)


def test_gram_matrix_rounded_to_float32_would_be_indefinite() -> None:
    """Why second moments travel in float64: collinear features, ridge 0.01, as in the papers."""
    base = np.abs(np.random.default_rng(1).normal(3, 1, (4000, 8)))
    features = base @ np.random.default_rng(2).normal(size=(8, 40))
    gram = features.T @ features
    assert np.linalg.eigvalsh(gram.astype(np.float32).astype(np.float64) + 0.01 * np.eye(40)).min() < 0
    assert np.linalg.eigvalsh(gram + 0.01 * np.eye(40)).min() > 0


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
        (message(sums=np.ones((2, D), np.float64)), "float64"),
        (Message({}), "missing"),
    ],
)
def test_bad_statistics_are_refused(bad: Message, why: str) -> None:
    with pytest.raises(MessageError, match=why):
        ClientStatistics.from_message(bad, C, D, None)


def test_negative_squares_are_refused() -> None:
    sent = message(sums=np.ones((2, D)), moments=np.full(D, -1.0))
    with pytest.raises(MessageError, match="negative"):
        ClientStatistics.from_message(sent, C, D, "diagonal")


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


def test_parts_depend_on_the_client_and_the_seed_alone() -> None:
    whole = random_parts(Y, WHO, 3, (1, 2))
    assert whole is not None
    for client in range(K):
        mine = WHO == client
        np.testing.assert_array_equal(random_parts(Y[mine], WHO[mine], 3, (1, 2)), whole[mine])
    other = random_parts(Y, WHO, 3, (1, 3))
    assert not np.array_equal(other, whole)
    assert random_parts(Y, WHO, 1, (0,)) is None
