"""Directions against AES of another library, and the normal distribution of Python's own."""

import hashlib
import multiprocessing
import os
from statistics import NormalDist
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from Crypto.Cipher import AES
from Crypto.Util import Counter

from headstart.solvers.directions import DISTRIBUTIONS
from headstart.solvers.drawn import Drawn, looked_up

KINDS = tuple(DISTRIBUTIONS)
GOLDEN: dict[tuple[str, int, int, str], list[float]] = {
    ("gaussian", 0, 0, "head.weight"): [1.029645324, 0.290174723, -0.377714783, 0.146341696],
    ("gaussian", 7, 2, "head.bias"): [-0.865222335, 1.022264957, 0.73377043, 1.261898994],
    ("gaussian", 2**31 - 1, 1, "module.x"): [0.692729533, -1.049805284, 0.409622461, 0.057614435],
    ("rademacher", 0, 0, "head.weight"): [-1.0, -1.0, 1.0, 1.0],
}


def normal(code: int) -> float:
    """The mean of the standard normal distribution between two of its 65,536-quantiles, but for the scale."""
    edges = [code / 65_536, (code + 1) / 65_536]
    low, high = (NormalDist().pdf(NormalDist().inv_cdf(edge)) if 0 < edge < 1 else 0.0 for edge in edges)
    return 65_536 * (low - high)


def by_hand(kind: str, seed: int, number: int, name: str, size: int) -> np.ndarray:
    """AES-256 in counter mode from 0, two bytes for a normal number, the low one first, or a bit for a sign, the lowest
    first."""
    key = hashlib.blake2b(f"{kind}/{seed}/{number}/{name}".encode(), digest_size=32).digest()
    cipher = AES.new(key, AES.MODE_CTR, counter=Counter.new(128, initial_value=0))
    if kind == "rademacher":
        bits = np.unpackbits(np.frombuffer(cipher.encrypt(bytes(-(-size // 8))), np.uint8), bitorder="little")
        return bits[:size] * 2.0 - 1
    stream = cipher.encrypt(bytes(2 * size))
    return np.array([normal(low + 256 * high) for low, high in zip(stream[::2], stream[1::2], strict=True)])


@pytest.mark.parametrize("which", GOLDEN)
def test_directions_are_the_same_for_ever(which: tuple[str, int, int, str]) -> None:
    kind, *rest = which
    found = DISTRIBUTIONS[kind].direction(*rest, 4)  # type: ignore[arg-type]
    np.testing.assert_array_equal(found, np.array(GOLDEN[which], np.float32))


def test_the_table_of_normal_numbers_is_the_same_for_ever() -> None:
    table = DISTRIBUTIONS["gaussian"].table
    assert hashlib.sha256(table.astype("<f4").tobytes()).hexdigest()[:16] == "e1762b378ac53eb1"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [1, 8, 9, 127, 129, 1000])
def test_directions_are_looked_up_by_the_bits_of_aes(kind: str, size: int) -> None:
    found = DISTRIBUTIONS[kind].direction(5, 1, "body.wide", size)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, by_hand(kind, 5, 1, "body.wide", size), rtol=2e-5)


def test_normal_numbers_have_the_moments_of_the_normal_distribution() -> None:
    """The means between quantiles lack 1.6e-5 of the variance, which the scale puts back; the tails above 4.4 lack."""
    values = DISTRIBUTIONS["gaussian"].table[:, 0].astype(np.float64)
    assert values.mean() == 0
    assert (values[:32_768] == -values[:32_767:-1]).all()
    assert np.square(values).mean() == pytest.approx(1, abs=1e-7)
    assert (values**4).mean() == pytest.approx(3, abs=3e-3)
    assert (np.diff(values) > 0).all()
    assert 4.3 < values[-1] < 4.5
    quantiles = np.array([NormalDist().cdf(value) for value in values[::97]])
    assert np.abs(quantiles - (np.arange(0, 65_536, 97) + 0.5) / 65_536).max() < 1 / 65_536


@pytest.mark.parametrize("kind", KINDS)
def test_directions_are_standard_and_nearly_orthogonal(kind: str) -> None:
    size = 3 << 16
    one, other = (
        DISTRIBUTIONS[kind].direction(11, number, "body.weight", size).astype(np.float64) for number in (0, 1)
    )
    for values in (one, other):
        assert abs(values.mean()) < 5 / np.sqrt(size)  # five standard errors
        assert abs(values.var() - 1) < 5 * np.sqrt(2 / size)
        assert abs((values**3).mean()) < 5 * np.sqrt(15 / size)
        assert abs(values[1:] @ values[:-1] / size) < 5 / np.sqrt(size)
    assert abs(one @ other / size) < 5 / np.sqrt(size)


@pytest.mark.parametrize("kind", KINDS)
def test_other_seeds_numbers_and_names_give_other_directions(kind: str) -> None:
    names = [(1, 0, "a"), (2, 0, "a"), (1, 1, "a"), (1, 0, "b"), (0, 1, "a")]
    found = [DISTRIBUTIONS[kind].direction(*which, 640) for which in names]
    for row, one in enumerate(found):
        for other in found[:row]:
            assert abs(one @ other) < 5 * np.sqrt(640)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("width", [1, 3, 8, 130])
def test_rows_are_those_of_the_whole(kind: str, width: int) -> None:
    whole = DISTRIBUTIONS[kind].direction(3, 2, "x", 40 * width).reshape(40, width)
    rows = np.array([0, 1, 7, 38, 39])
    np.testing.assert_array_equal(DISTRIBUTIONS[kind].rows(3, 2, "x", rows, width), whole[rows])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("room", [0, 1 << 20])
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_pieces_are_those_of_the_whole(kind: str, room: int, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawn by several threads or one, kept or not, some at a time; 1,301 numbers end within a code and a block."""
    monkeypatch.setattr("headstart.solvers.drawn._ROOM", room)
    monkeypatch.setattr("headstart.solvers.drawn._PIECE", 512)
    monkeypatch.setattr("headstart.solvers.directions._AT_ONCE", 128)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    parameters = {"x": torch.zeros(1301), "y": torch.zeros(5)}
    drawn = Drawn(parameters, SimpleNamespace(perturbation=kind, num_directions=2))
    for seed, number, name, factor in [(3, 0, "x", 0.3), (3, 1, "x", -2.0), (3, 0, "y", 1.0), (4, 0, "x", 0.3)]:
        size = len(parameters[name])
        found = torch.full((size,), torch.nan)
        for start, stop, piece in drawn.pieces(seed, number, name, parameters[name], factor):
            found[start:stop] = piece
        whole = DISTRIBUTIONS[kind].direction(seed, number, name, size)
        np.testing.assert_array_equal(found.numpy(), whole * np.float32(factor))


def first_piece() -> torch.Tensor:
    parameters = {"x": torch.zeros(2000)}
    drawn = Drawn(parameters, SimpleNamespace(perturbation="gaussian", num_directions=1))
    ((_, _, piece),) = drawn.pieces(1, 0, "x", parameters["x"], 1.0)
    return piece.clone()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no process is forked there")
def test_threads_of_a_process_that_was_forked_are_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    expected = first_piece()  # the pool has threads now, which a fork lacks
    child = multiprocessing.get_context("fork").Process(
        target=lambda: os._exit(int(torch.equal(first_piece(), expected)))
    )
    child.start()
    child.join(60)
    child.kill()
    assert child.exitcode == 1


@pytest.mark.parametrize("kind", KINDS)
def test_a_device_looks_up_the_same_numbers(kind: str) -> None:
    distribution = DISTRIBUTIONS[kind]
    codes = np.concatenate([each for _, each in distribution.codes(3, 0, "x", 0, 700)])
    found = looked_up(distribution.table, codes, torch.device("cpu"))[:700]
    np.testing.assert_array_equal(found.numpy(), distribution.direction(3, 0, "x", 700))
