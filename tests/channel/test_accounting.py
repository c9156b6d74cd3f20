"""Accounting against the exact formula of the Gaussian mechanism, other accountants, and numerical integration."""

from itertools import pairwise
from math import exp, inf, log, sqrt

import numpy as np
import pytest
from dp_accounting import GaussianDpEvent, pld
from scipy import optimize, stats

from headstart.channel.accounting import large_delta, noise_multiplier, sensitivity, spent
from headstart.errors import HeadstartError


def exact_delta(sigma: float, epsilon: float) -> float:
    """Balle and Wang (2018), theorem 8, for sensitivity 1."""
    below, above = 0.5 / sigma - epsilon * sigma, -0.5 / sigma - epsilon * sigma
    return float(stats.norm.cdf(below) - exp(epsilon) * stats.norm.cdf(above))


@pytest.mark.parametrize("epsilon", [0.01, 0.5, 1.0, 4.0, 20.0])
@pytest.mark.parametrize("delta", [1e-3, 1e-6])
def test_the_multiplier_is_that_of_the_analytic_gaussian_mechanism(epsilon: float, delta: float) -> None:
    expected = optimize.brentq(lambda sigma: exact_delta(sigma, epsilon) - delta, 1e-2, 1e4, xtol=1e-13)
    found = noise_multiplier(epsilon, delta)
    assert found == pytest.approx(expected, rel=1e-5)
    assert exact_delta(found, epsilon) <= delta
    assert spent(found, delta) == pytest.approx(epsilon, rel=1e-4)


@pytest.mark.parametrize("epsilon", [1e-3, 0.1, 1.0, 10.0, 1e3, 1e6, 1e9])
def test_the_budget_is_never_exceeded(epsilon: float) -> None:
    assert 0.999 * epsilon < spent(noise_multiplier(epsilon, 1e-5, 3), 1e-5, 3) <= epsilon


def test_rounds_without_sampling_are_one_round_with_less_noise() -> None:
    for rounds in (1, 4, 50):
        assert spent(3.0 * sqrt(rounds), 1e-5, rounds) == pytest.approx(spent(3.0, 1e-5), rel=1e-9)
        assert noise_multiplier(2.0, 1e-5, rounds) == pytest.approx(sqrt(rounds) * noise_multiplier(2.0, 1e-5))
    accountant = pld.PLDAccountant().compose(GaussianDpEvent(5.0), 9)
    assert spent(5.0, 1e-5, 9) == pytest.approx(accountant.get_epsilon(1e-5), rel=1e-3)
    assert spent(5.0, 1e-5, 0) == 0
    assert spent(0.0, 1e-5) == inf


def test_more_of_anything_costs_more() -> None:
    def rises(values: list[float]) -> bool:
        return all(left < right for left, right in pairwise(values))

    assert rises([-noise_multiplier(epsilon, 1e-5) for epsilon in (0.1, 1.0, 2.0, 9.0)])
    assert rises([-noise_multiplier(1.0, delta) for delta in (1e-9, 1e-6, 1e-3)])
    assert rises([-spent(multiplier, 1e-5, 20, 5, 100) for multiplier in (0.5, 1.0, 2.0, 4.0)])
    assert rises([spent(2.0, 1e-5, rounds, 5, 100) for rounds in (1, 5, 20, 100)])
    assert rises([spent(2.0, 1e-5, 20, sampled, 100) for sampled in (1, 5, 20, 50)])
    assert rises([-spent(2.0, 1e-5, 20, 5, clients) for clients in (10, 50, 200, 1000)])
    assert rises([-spent(2.0, delta, 20, 5, 100) for delta in (1e-9, 1e-6, 1e-3)])


def test_sampling_saves_noise_down_to_the_budget() -> None:
    found = noise_multiplier(2.0, 1e-5, 50, 5, 100)
    assert found < 0.5 * noise_multiplier(2.0, 1e-5, 50)
    assert spent(found, 1e-5, 50, 5, 100) <= 2.0 < spent(0.998 * found, 1e-5, 50, 5, 100)
    assert noise_multiplier(2.0, 1e-5, 50, 100, 100) == noise_multiplier(2.0, 1e-5, 50)
    # The bound for sampling is loose where nearly everybody is drawn, and is then not used.
    assert spent(30.0, 1e-5, 10, 99, 100) <= spent(30.0, 1e-5, 10)


@pytest.mark.parametrize(("sampled", "clients", "multiplier"), [(1, 10, 1.0), (5, 100, 0.8), (50, 100, 3.0)])
def test_a_round_with_sampling_lies_between_a_real_pair_and_a_bound_by_hand(
    sampled: int, clients: int, multiplier: float
) -> None:
    """The pair: a unit at +clip replaced by one at −clip, all others at zero, integrated numerically.

    The bound: order 2 of Wang, Balle and Kasiviswanathan (2019), theorem 9, turned into ε by Mironov (2017).
    """
    rate, delta = sampled / clients, 1e-5
    x = np.linspace(-12 * multiplier, 12 * multiplier, 200_001)
    noise = stats.norm(scale=multiplier)
    one, other = ((1 - rate) * noise.pdf(x) + rate * noise.pdf(x - shift) for shift in (0.5, -0.5))

    def leak(epsilon: float) -> float:
        return float(np.maximum(one - exp(epsilon) * other, 0).sum() * (x[1] - x[0])) - delta

    least = optimize.brentq(leak, 0, 50) if leak(0) > 0 else 0.0
    grown = exp(1 / multiplier**2)
    most = log(1 + rate**2 * min(4 * (grown - 1), 2 * grown)) + log(1 / delta)
    assert 0 < least <= spent(multiplier, delta, 1, sampled, clients) <= most


def test_sensitivity_is_doubled_where_a_unit_is_replaced() -> None:
    assert sensitivity(0.7) == 0.7
    assert sensitivity(0.7, 10, 10) == 0.7
    assert sensitivity(0.7, 9, 10) == 1.4


@pytest.mark.parametrize(("sampled", "clients"), [(0, 10), (11, 10), (3, None)])
def test_impossible_samples_are_refused(sampled: int, clients: int | None) -> None:
    with pytest.raises(HeadstartError, match="cannot draw"):
        noise_multiplier(1.0, 1e-5, 1, sampled, clients)


def test_a_delta_of_one_over_the_units_is_too_large() -> None:
    assert large_delta(9.9e-6, "example", 100_000) is None
    assert large_delta(1e-4, "client", 9_999) is None
    said = large_delta(1e-4, "client", 10_000)
    assert said is not None
    assert said.startswith("delta = 0.0001 is no smaller than 1 / 10,000 clients")
    assert said.endswith("set delta below 0.0001")
