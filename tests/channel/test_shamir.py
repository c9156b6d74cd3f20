"""Shamir's sharing against polynomials in Python's own integers, and against what t - 1 holders could find out."""

import os
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headstart.channel.secure import shamir
from headstart.channel.secure.shamir import PRIME, combine, limbs_of, share_bytes, split


def elements(shares: np.ndarray) -> list[list[int]]:
    """Shares as numbers: [points, limbs]."""
    return [[int.from_bytes(row[i : i + 4].tobytes(), "little") for i in range(0, len(row), 4)] for row in shares]


def value_at_zero(points: list[tuple[int, int]]) -> int:
    """Of the polynomial through these points, by Lagrange's formula."""
    total = 0
    for x, y in points:
        above = below = 1
        for other, _ in points:
            if other != x:
                above, below = above * other % PRIME, below * (other - x) % PRIME
        total += y * above * pow(below, -1, PRIME)
    return total % PRIME


def opened(shares: np.ndarray, places: list[int], length: int) -> bytes:
    points = np.array([[place + 1 for place in places]])
    return combine(points, shares[None, places], length)[0]


def test_shares_worked_out_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """5 + 3 x + 2 x² at 1, 2, 3 is 10, 19, 32."""
    monkeypatch.setattr(shamir, "uniform", lambda shape: np.array([[3], [2]], np.uint64))
    shares = split(bytes([5]), 3, [1, 2, 3])
    assert elements(shares) == [[10], [19], [32]]
    assert opened(shares, [0, 1, 2], 1) == bytes([5])
    # 3 · 10 - 3 · 19 + 32 = 5, and the limbs of 40 bits are the low 30 and the high 10
    monkeypatch.setattr(shamir, "uniform", lambda shape: np.full(shape, PRIME - 1, np.uint64))
    assert elements(split((7 << 30 | 9).to_bytes(5, "little"), 2, [1, 4])) == [[8, 6], [5, 3]]


@settings(max_examples=40, deadline=None)
@given(st.binary(min_size=1, max_size=40), st.integers(1, 9), st.integers(0, 5), st.randoms())
def test_any_threshold_shares_give_the_secret_back(secret: bytes, threshold: int, more: int, random: object) -> None:
    count = threshold + more
    shares = split(secret, threshold, range(1, count + 1))
    assert shares.shape == (count, share_bytes(len(secret)))
    places = sorted(random.sample(range(count), threshold))  # type: ignore[attr-defined]
    assert opened(shares, places, len(secret)) == secret
    held = elements(shares)
    by_hand = [value_at_zero([(p + 1, held[p][limb]) for p in places]) for limb in range(limbs_of(len(secret)))]
    assert sum(limb << 30 * place for place, limb in enumerate(by_hand)) == int.from_bytes(secret, "little")


def test_secrets_of_different_holders_are_rebuilt_at_once() -> None:
    secrets = [os.urandom(32) for _ in range(4)]
    holders = [[1, 2, 3], [2, 5, 9], [1, 2, 3], [7, 8, 1000]]
    shares = np.stack([split(secret, 3, points) for secret, points in zip(secrets, holders, strict=True)])
    assert combine(np.array(holders), shares, 32) == secrets


@pytest.mark.parametrize("threshold", [2, 3, 4])
def test_one_share_too_few_fits_every_secret_equally(threshold: int) -> None:
    """Whatever limb is taken for the secret, exactly one polynomial goes through it and the shares of t - 1 holders."""
    shares = elements(split(b"\x2a", threshold, range(1, 6)))
    for holders in combinations(range(5), threshold - 1):
        known = [(place + 1, shares[place][0]) for place in holders]
        guesses = (0, 1, 42, 255, PRIME - 1)
        # What the next holder would have to hold: another share for each guess, so the shares tell none of them apart.
        needed = {value_at_zero([(-6 % PRIME, guess), *((x - 6, y) for x, y in known)]) for guess in guesses}
        assert len(needed) == len(guesses)


def test_shares_of_too_few_holders_are_uniform_whatever_the_secret() -> None:
    """Chi-square of 64 bins over 20,000 pairs of shares: mean 63, standard deviation 11."""
    for secret in (bytes(3750), b"\xff" * 3750):  # 1,000 limbs of zeros, and of ones
        drawn = np.concatenate([np.array(elements(split(secret, 3, [1, 2]))) for _ in range(20)], axis=1)
        assert drawn.shape == (2, 20_000)
        for row in (drawn[0], drawn[1], (drawn[0] - drawn[1]) % PRIME):
            counts = np.histogram(row, 64, (0, PRIME))[0]
            assert ((counts - 312.5) ** 2 / 312.5).sum() < 63 + 6 * 11.3


def test_coefficients_are_drawn_without_bias(monkeypatch: pytest.MonkeyPatch) -> None:
    """31 bits that say PRIME, which would be a second zero, are drawn again."""
    given = iter([b"\xff\xff\xff\xff\x05\x00\x00\x80", b"\xff\xff\xff\x7f", b"\x07\x00\x00\x00"])
    monkeypatch.setattr(shamir.os, "urandom", lambda size: next(given))
    assert shamir.uniform((2,)).tolist() == [7, 5]


def test_shares_that_do_not_belong_together_give_another_secret() -> None:
    secret = os.urandom(16)
    shares = split(secret, 3, [1, 2, 3])
    shares[1, 0] ^= 1
    assert opened(shares, [0, 1, 2], 16) != secret
    shares = np.full((1, 2, 4), 255, np.uint8)  # both say 2**32 - 1, which is 1 modulo PRIME
    assert combine(np.array([[1, 2]]), shares, 1) == [b"\x01"]


def test_sizes() -> None:
    assert [limbs_of(length) for length in (1, 3, 4, 16, 32)] == [1, 1, 2, 5, 9]
    assert share_bytes(32) == 36
