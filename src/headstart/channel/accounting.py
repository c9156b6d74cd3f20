"""What noise a privacy budget asks for, and what it has spent.

A noise multiplier is the standard deviation of the Gaussian noise over the sensitivity of what it is added to. Which
data sets are neighbours depends on the sampling:

- everybody takes part in every round: one unit is added or removed, and moves a sum by the clip at most;
- a round draws its units without replacement: one unit is replaced by another, and moves a sum by twice the clip.

`sensitivity` is that length. The multiplier that `noise_multiplier` returns is to be multiplied by it.
"""

from __future__ import annotations

from functools import cache, lru_cache
from math import inf, sqrt
from typing import Any

import numpy as np

from headstart.errors import HeadstartError

# Solutions are rounded up by this share, so that the accountant's own rounding does not exceed the budget.
_MARGIN = 1e-6
_SEARCH = 1e-3
# Any order gives a valid bound; these are as tight as ten times as many.
_ORDERS = (1.1, 1.2, 1.5, 1.75, 2, 2.5, 3, 3.5, *range(4, 33), 40, 48, 56, 64, 96, 128)


def sensitivity(clip: float, sampled: int | None = None, clients: int | None = None) -> float:
    """How far one unit of norm ``clip`` or less moves a sum: the clip, or twice that where a round samples.

    Without sampling, neighbours differ by one unit that is there or not; under sampling, by one that is replaced.
    """
    return 2 * clip if _samples(sampled, clients) else clip


def spent(
    multiplier: float, delta: float, rounds: int = 1, sampled: int | None = None, clients: int | None = None
) -> float:
    """The ε at ``delta`` of so many rounds of the Gaussian mechanism with this noise multiplier.

    Without sampling (``sampled`` is None, or all of the ``clients``): R rounds are one round with the multiplier over
    √R, whose ε is exact (Balle and Wang, 2018); neighbours differ by one unit added or removed. Under sampling: Rényi
    accounting of rounds that draw ``sampled`` of ``clients`` without replacement (Wang, Balle and Kasiviswanathan,
    2019); neighbours differ by one unit replaced. That bound is loose for large samples, and never used where it
    exceeds that of rounds without sampling: what a unit shows in the rounds it is drawn for is no more than what it
    would show in all.
    """
    if rounds == 0:
        return 0.0
    if multiplier <= 0:
        return inf
    get_epsilon_gaussian = _library().get_epsilon_gaussian

    with np.errstate(divide="ignore"):  # a δ of zero, whose logarithm is minus infinity
        everybody = float(get_epsilon_gaussian(multiplier / sqrt(rounds), delta))
    if not _samples(sampled, clients):
        return everybody
    return min(everybody, _sampled(multiplier, delta, rounds, int(sampled or 0), int(clients or 0)))


def doubled(epsilon: float, delta: float) -> float:
    """The ε at δ of a Gaussian mechanism that promises ``epsilon`` at ``delta``, for what moves its sum twice as far.

    Where a client's update may be there or not, one of its examples that is replaced moves the sum by twice the clip.
    """
    return spent(noise_multiplier(epsilon, delta) / (2 * (1 + 2 * _MARGIN)), delta) if epsilon else 0.0


@cache
def noise_multiplier(
    epsilon: float, delta: float, rounds: int = 1, sampled: int | None = None, clients: int | None = None
) -> float:
    """The least noise multiplier with which so many rounds spend at most (``epsilon``, ``delta``), as `spent` counts.

    Neighbours differ by one unit added or removed, or, where a round draws ``sampled`` of ``clients`` without
    replacement, by one unit replaced: multiply by `sensitivity` to get the standard deviation of the noise. Found to
    one part in a million without sampling, and in a thousand with it; never below the least.
    """
    get_sigma_gaussian = _library().get_sigma_gaussian

    with np.errstate(divide="ignore"):
        upper = float(get_sigma_gaussian(epsilon, delta)) * sqrt(rounds) * (1 + _MARGIN)
    if not _samples(sampled, clients):
        return upper
    # Sampling never asks for more noise than no sampling: start from there, halve, and bisect.
    lower = upper / 2
    while spent(lower, delta, rounds, sampled, clients) <= epsilon:
        lower, upper = lower / 2, lower
    while upper > lower * (1 + _SEARCH):
        middle = sqrt(lower * upper)
        if spent(middle, delta, rounds, sampled, clients) <= epsilon:
            upper = middle
        else:
            lower = middle
    return upper


def large_delta(delta: float, unit: str, units: int) -> str | None:
    """What to say of a δ that is no smaller than one over the number of units; None where it is smaller.

    With such a δ a mechanism that gives one unit away, chosen at random, keeps its promise.
    """
    if delta * units < 1:
        return None
    return (
        f"delta = {delta:g} is no smaller than 1 / {units:,} {unit}s: it allows one of them to be given away entirely; "
        f"set delta below {1 / units:.1g}"
    )


def _sampled(multiplier: float, delta: float, rounds: int, sampled: int, clients: int) -> float:
    """The bound of Rényi accounting for rounds that draw without replacement."""
    with np.errstate(all="ignore"):  # orders whose bound overflows are infinite, and are not the least
        one_round = _sampled_rdp(multiplier, sampled, clients)
        return float(_library().rdp.compute_epsilon(_ORDERS, rounds * one_round, delta)[0])


@lru_cache(maxsize=8)
def _sampled_rdp(multiplier: float, sampled: int, clients: int) -> Any:
    """Rényi differential privacy of one such round, by order; it adds up over the rounds."""
    dp = _library()

    accountant = dp.rdp.RdpAccountant(_ORDERS, neighboring_relation=dp.NeighboringRelation.REPLACE_ONE)
    event = dp.SampledWithoutReplacementDpEvent(clients, sampled, dp.GaussianDpEvent(multiplier))
    return accountant.compose(event).rdp


def _samples(sampled: int | None, clients: int | None) -> bool:
    """Whether a round draws some of the clients rather than all."""
    if sampled is None:
        return False
    if clients is None or not 1 <= sampled <= clients:
        raise HeadstartError(
            f"a round cannot draw {sampled} of {clients} clients; give 1 or more, and no more than all"
        )
    return sampled < clients


def _library() -> Any:
    try:
        import dp_accounting
    except ImportError:
        raise HeadstartError("privacy: dp-accounting is missing; pip install 'headstart[federation]'") from None
    return dp_accounting
