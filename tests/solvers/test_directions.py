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
from headstart.solvers.perturbation import Perturbation, looked_up

KINDS = tuple(DISTRIBUTIONS)
GOLDEN: dict[tuple[str, int, int, str], list[float]] = {
    ("gaussian", 0, 0, "head.weight"): [-0.86590576171875, 1.03515625, -0.7570037841796875, 0.2930908203125],
    ("gaussian", 7, 2, "head.bias"): [0.0637054443359375, -0.86590576171875, 0.668609619140625, 1.0185699462890625],
    ("gaussian", 2**31 - 1, 1, "module.x"): [
        -0.0637054443359375,
        0.6933135986328125,
        0.272705078125,
        -1.052032470703125,
    ],
    ("rademacher", 0, 0, "head.weight"): [-1.0, -1.0, 1.0, 1.0],
}


def means() -> np.ndarray:
    """[256]: the means of the standard normal distribution between its 256-quantiles, scaled to variance 1."""
    normal = NormalDist()
    density = [0.0, *(normal.pdf(normal.inv_cdf(place / 256)) for place in range(1, 256)), 0.0]
    found = -256 * np.diff(density)
    return found / np.sqrt(np.square(found).mean())


def by_hand(kind: str, seed: int, number: int, name: str, size: int) -> np.ndarray:
    """AES-256 in counter mode from 0, a byte for a normal number, to 16 binary places, or a bit for a sign, the lowest
    first."""
    key = hashlib.blake2b(f"{kind}/{seed}/{number}/{name}".encode(), digest_size=32).digest()
    cipher = AES.new(key, AES.MODE_CTR, counter=Counter.new(128, initial_value=0))
    if kind == "rademacher":
        bits = np.unpackbits(np.frombuffer(cipher.encrypt(bytes(-(-size // 8))), np.uint8), bitorder="little")
        return bits[:size] * 2.0 - 1
    return np.round(65_536 * means()[list(cipher.encrypt(bytes(size)))]) / 65_536


@pytest.mark.parametrize("which", GOLDEN)
def test_directions_are_the_same_for_ever(which: tuple[str, int, int, str]) -> None:
    kind, *rest = which
    found = DISTRIBUTIONS[kind].direction(*rest, 4)  # type: ignore[arg-type]
    np.testing.assert_array_equal(found, np.array(GOLDEN[which], np.float32))


def test_the_table_of_normal_numbers_is_the_same_for_ever() -> None:
    table = DISTRIBUTIONS["gaussian"].table
    assert hashlib.sha256(table.astype("<f4").tobytes()).hexdigest()[:16] == "1cb51e68641c0bb2"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [1, 8, 9, 127, 129, 1000])
def test_directions_are_looked_up_by_the_bits_of_aes(kind: str, size: int) -> None:
    found = DISTRIBUTIONS[kind].direction(5, 1, "body.wide", size)
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, by_hand(kind, 5, 1, "body.wide", size))


def test_every_byte_stands_for_its_part_of_the_normal_distribution() -> None:
    """The means between quantiles lack 0.07 % of the variance, which the scale puts back; the tails above 3 lack."""
    table = DISTRIBUTIONS["gaussian"].table.astype(np.float64)
    np.testing.assert_array_equal(table.reshape(256, 256, 2)[:, :, 0], np.tile(table[:256, 0], (256, 1)))  # low byte
    np.testing.assert_array_equal(table.reshape(256, 256, 2)[:, :, 1].T, np.tile(table[:256, 0], (256, 1)))  # high byte
    values = table[:256, 0]
    np.testing.assert_allclose(values, means(), atol=0.5001 / 65_536)
    assert (values == -values[::-1]).all()
    assert np.square(values).mean() == pytest.approx(1, abs=1e-6)
    assert (values**4).mean() == pytest.approx(2.9636, abs=1e-4)  # the normal distribution: 3
    assert (np.diff(values) > 0).all()


def test_no_platform_rounds_a_normal_number_to_another_one() -> None:
    """The numbers before they are rounded are no nearer to a half than a function that errs in its 9th digit."""
    apart = np.abs((65_536 * means()) % 1 - 0.5)
    assert apart.min() > 65_536 * 1e-9


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
def test_what_is_added_is_the_whole(kind: str, room: int, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """By several threads or one, kept or not, some at a time; 1,301 numbers end within a code and a block."""
    monkeypatch.setattr("headstart.solvers.perturbation._ROOM", room)
    monkeypatch.setattr("headstart.solvers.perturbation._SHARE", 256)
    monkeypatch.setattr("headstart.solvers.directions.AT_ONCE", 128)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    parameters = {"x": torch.arange(1301.0), "y": torch.zeros(5)}
    perturbation = Perturbation(parameters, SimpleNamespace(perturbation=kind, num_directions=2))
    for seed, number, name, factor in [(3, 0, "x", 0.3), (3, 1, "x", -2.0), (3, 0, "y", 1.0), (4, 0, "x", 0.3)]:
        values = parameters[name]
        whole = DISTRIBUTIONS[kind].direction(seed, number, name, len(values))
        expected = values.numpy() + whole * np.float32(factor)
        found = torch.full_like(values, torch.nan)
        perturbation.add(seed, number, name, factor, values, found)
        np.testing.assert_array_equal(found.numpy(), expected)
        in_place = values.clone()
        perturbation.add(seed, number, name, factor, in_place, in_place)
        assert torch.equal(in_place, found)


def added() -> torch.Tensor:
    values = torch.zeros(2 << 17)
    perturbation = Perturbation({"x": values}, SimpleNamespace(perturbation="gaussian", num_directions=1))
    perturbation.add(1, 0, "x", 1.0, values, values)
    return values


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no process is forked there")
def test_threads_of_a_process_that_was_forked_are_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    expected = added()  # the pool has threads now, which a fork lacks
    child = multiprocessing.get_context("fork").Process(target=lambda: os._exit(int(torch.equal(added(), expected))))
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
