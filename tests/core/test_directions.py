import numpy as np
import pytest

from headstart.core.directions import largest_directions, sent_directions
from headstart.core.message import Message
from headstart.core.statistics import ClientStatistics, Summary, message_nbytes, read_statistics, summarise
from headstart.errors import MessageError

RNG = np.random.default_rng(0)
# Spread along its dimensions by 1, 2, 3 … from the last on.
Z = RNG.normal(size=(500, 40)) * np.arange(40, 0, -1) @ np.linalg.qr(RNG.normal(size=(40, 40)))[0]
Y, WHO = np.arange(500) % 4, np.sort(RNG.integers(0, 3, 500))


@pytest.mark.parametrize("count", [1, 5, 29, 30, 40])
def test_the_largest_directions(count: int) -> None:
    found = largest_directions(lambda: np.array_split(Z, 7), 40, count, (3,))
    values, vectors = np.linalg.eigh(Z.T @ Z)
    best = (vectors[:, -count:] * values[-count:]) @ vectors[:, -count:].T
    assert found.shape == (count, 40)
    assert np.trace(found.T @ found) == pytest.approx(np.trace(best), rel=1e-2 if count < 30 else 1e-9)
    # Nowhere is more told than there is.
    assert np.linalg.eigvalsh(Z.T @ Z - found.T @ found).min() > -1e-8 * values[-1]
    np.testing.assert_array_equal(found, largest_directions(lambda: np.array_split(Z, 7), 40, count, (3,)))


def test_a_direction_for_so_many_examples() -> None:
    """Ten examples around two means have eight directions; of two examples of one class, one would tell both."""
    examples, rows = np.array([10, 10, 2, 1, 300]), np.array([2, 2, 1, 1, 4])
    assert sent_directions(examples, rows, 16, 40).tolist() == [8, 8, 1, 0, 16]
    assert sent_directions(examples, rows, 16, 40, min_examples=2).tolist() == [4, 4, 0, 0, 16]
    assert sent_directions(examples, rows, 16, 3).tolist() == [3, 3, 1, 0, 3]


def test_a_client_tells_the_same_alone_and_among_others() -> None:
    together, _ = summarise(Z, Y, 4, clients=WHO, moments="trace", rank=3, seed=(7,))
    assert together.directions is not None
    assert together.directions.shape == (9, 40)
    for client in range(3):
        rows = np.flatnonzero(client == WHO)
        alone, _ = summarise(Z, Y[rows], 4, clients=WHO[rows], rows=rows, moments="trace", rank=3, seed=(7,))
        np.testing.assert_array_equal(alone.directions, together.directions[3 * client : 3 * client + 3])
        scatter = sum(len(m) * np.cov(m.T, bias=True) for m in (Z[rows][Y[rows] == c] for c in range(4)))
        values = np.linalg.eigvalsh(scatter)[-3:]
        np.testing.assert_allclose((alone.directions**2).sum(axis=1), values[::-1], rtol=1e-3)


def test_directions_add_up_side_by_side() -> None:
    parts = [summarise(Z[WHO == k], Y[WHO == k], 4, moments="trace", rank=2)[0] for k in range(3)]
    merged = ClientStatistics.empty(4, 40, "trace", rank=2).merge(*parts)
    assert merged.directions is not None
    assert merged.directions.shape == (6, 40)
    assert merged.pooled().directions is merged.directions


def test_what_travels_and_what_is_refused() -> None:
    sent, _ = summarise(Z, Y, 4, moments="trace", rank=3)
    message = sent.to_message()
    assert message.nbytes == message_nbytes(4, 40, "trace", True, 3) == len(message.to_bytes())
    got = read_statistics(Message.from_bytes(message.to_bytes()), Summary(4, 40, "trace", rank=3))
    np.testing.assert_allclose(got.directions, sent.directions, rtol=1e-6)
    attacks = {
        "3 directions are sent, more than 2": (message.arrays, 2),
        "missing": ({k: v for k, v in message.arrays.items() if k != "directions"}, 3),
        "larger than the scatter": ({**message.arrays, "directions": 10 * message.arrays["directions"]}, 3),
        "NaN": ({**message.arrays, "directions": np.full((3, 40), np.nan, np.float32)}, 3),
        "shape": ({**message.arrays, "directions": np.ones((3, 41), np.float32)}, 3),
    }
    for why, (arrays, most) in attacks.items():
        with pytest.raises(MessageError, match=why):
            read_statistics(Message(arrays), Summary(4, 40, "trace", rank=most))
    few = summarise(Z[:6], Y[:6], 4, moments="trace", rank=3)[0].to_message().arrays  # six examples around four means
    zeros = np.zeros((3, 40), np.float32)
    with pytest.raises(MessageError, match="3 directions are sent, more than 2"):
        read_statistics(Message({**few, "directions": zeros}), Summary(4, 40, "trace", rank=3))
