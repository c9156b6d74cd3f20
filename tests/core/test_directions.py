import tracemalloc
from dataclasses import replace

import numpy as np
import pytest

from headstart import FedCOF
from headstart.core.directions import largest_directions, sent_directions, sketching_basis
from headstart.core.message import Message
from headstart.core.statistics import Summary, message_nbytes, read_statistics, summarise
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
    merged = Summary(4, 40, "trace", rank=2).empty().merge(*parts)
    assert merged.directions is not None
    assert merged.directions.shape == (6, 40)
    assert merged.pooled().directions is merged.directions


def scatter_of(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    return np.asarray(sum(len(mine) * np.cov(mine.T, bias=True) for mine in (x[y == c] for c in range(4))))


def test_sketches_of_clients_add_up_to_that_of_everybody() -> None:
    parts = [summarise(Z[WHO == k], Y[WHO == k], 4, moments="trace", sketch=6)[0] for k in range(3)]
    merged, whole = Summary(4, 40, "trace", sketch=6).empty().merge(*parts), summarise(Z, Y, 4, sketch=6)[0]
    assert merged.sketch is not None
    assert merged.sketch.shape == (6, 40)
    np.testing.assert_allclose(merged.sketch, whole.sketch, rtol=1e-9, atol=1e-6)
    np.testing.assert_allclose(merged.sketch, sketching_basis(40, 6).T @ Z.T @ Z, rtol=1e-9, atol=1e-6)
    inside = sum(scatter_of(Z[WHO == k], Y[WHO == k]) for k in range(3))  # around each client's own means
    found = merged.sketched_directions()
    assert found.sketch is None
    assert found.directions is not None
    assert np.linalg.eigvalsh(inside - found.directions.T @ found.directions).min() > -1e-6


def test_a_sketch_as_wide_as_the_scatter_tells_all_of_it() -> None:
    """Of 40 dimensions the examples of every class vary along three, and as many numbers of each are enough."""
    thin = Z[:, :3] @ np.linalg.qr(RNG.normal(size=(40, 40)))[0][:3] + 5.0
    for width, closeness in ((3, 1e-7), (40, 1e-7), (60, 1e-7)):
        found = summarise(thin, Y, 4, moments="trace", sketch=width)[0].sketched_directions().directions
        assert found is not None
        exact = scatter_of(thin, Y)
        np.testing.assert_allclose(found.T @ found, exact, atol=closeness * np.trace(exact))
    two = summarise(thin, Y, 4, moments="trace", sketch=2)[0].sketched_directions().directions
    assert two is not None
    assert np.trace(two.T @ two) < 0.999 * np.trace(scatter_of(thin, Y))


def test_noise_makes_no_directions() -> None:
    """Of a sketch of noise alone, no direction is above the largest eigenvalue that noise has, and none is told that is
    larger than the scatter."""
    sent = summarise(Z, Y, 4, moments="trace", sketch=6)[0]
    assert sent.sketch is not None
    noise = np.random.default_rng(1).normal(size=(6, 40))
    around = sent.sums @ sketching_basis(40, 6)
    means = around.T @ (sent.sums / sent.counts[:, None])
    nothing = replace(sent, sketch=means + 1e6 * noise, noise_floor=1e6 * np.sqrt(80)).sketched_directions()
    assert nothing.directions is not None
    assert len(nothing.directions) == 0
    loud = replace(sent, sketch=means + 1e6 * noise).sketched_directions()
    assert loud.directions is not None
    assert np.vdot(loud.directions, loud.directions) == pytest.approx(sent.around_means().sum(), rel=1e-9)


def test_a_sketch_that_no_features_have_is_refused() -> None:
    sent = summarise(Z, Y, 4, moments="trace", sketch=3)[0]
    message, summary = sent.to_message(), Summary(4, 40, "trace", sketch=3)
    assert message.nbytes == message_nbytes(4, 40, "trace", True, None, 3) == len(message.to_bytes())
    got = read_statistics(Message.from_bytes(message.to_bytes()), summary)
    np.testing.assert_array_equal(got.sketch, sent.sketch)
    sketch = message.arrays["sketch"]
    attacks = {
        "missing": None,
        "larger than the sums of squares": 100 * sketch,
        "of no features": sketch[::-1].copy(),
        "NaN": np.full((3, 40), np.nan),
        "shape": np.zeros((4, 40)),
    }
    for why, other in attacks.items():
        arrays = {name: array for name, array in message.arrays.items() if name != "sketch"}
        with pytest.raises(MessageError, match=why):
            read_statistics(Message(arrays if other is None else {**arrays, "sketch": other}), summary)
    huge = {**message.arrays, "sketch": np.full((3, 40), 1e300)}
    with pytest.raises(MessageError, match="larger than features"):
        read_statistics(Message(huge), summary, noisy=True)


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


def test_no_matrix_of_dimensions_by_dimensions_is_ever_held() -> None:
    """With 20,000 dimensions it would have 3.2 GB, at the client or at the server."""
    x = RNG.normal(size=(48, 20_000)).astype(np.float32)
    tracemalloc.start()
    head = FedCOF(rank=4).fit(x, np.arange(48) % 2, client=np.arange(48) % 3)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert head.coef_.shape == (2, 20_000)
    assert peak < 200e6
