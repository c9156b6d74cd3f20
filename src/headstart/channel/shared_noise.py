"""Noise that the clients of a secure sum share: every client adds a little, all of it hides as much as the server's.

The distributed discrete Gaussian (Kairouz, Liu and Steinke, ICML 2021). Clipped values are multiplied by a public power
of two, rounded to whole numbers, and get discrete Gaussian noise before they are masked: of n clients each adds 1/n of
the variance σ² that the total needs, and nobody but the clients themselves ever sees less noise than that. Where c of
the clients tell the server what they added, the others' noise has the variance (1 − c/n) σ².

**Clients that drop out** take their noise with them, so that each adds more than its share, in parts, and says
afterwards which parts were too many ("add, then remove", Jiang, Wang and Chen, EuroSys 2024). For the numbers of
survivors n = s₀ > s₁ > … > s_L = threshold, a client's first part has the variance σ²/n, and part j the variance
σ²/s_j − σ²/s_{j−1}: with parts 0 to j each of s_j clients has σ²/s_j. Later parts are drawn from keys of their own.
When the survivors are known, a client reveals the keys of the parts that so many survivors do not need, and the server
subtracts them. Who does not answer any more leaves too much noise in, never too little. The s_j fall by equal factors,
so that at worst about 8 % of the variance (4 % of the deviation) is too much, and none where nobody drops out.

**The guarantee** is that of a Gaussian mechanism, with what is different counted. Lengths are in steps of the grid; d
is the number of values of all releases together, ε and δ the budget.

1. Rounding moves a value by half a step: neighbours that are Δ apart are at most Δ + √d apart afterwards.
2. A sum of discrete Gaussians is one, nearly: with variances s² and t², and 1/ρ² = 1/s² + 1/t², the probability of any
   number differs by the factor (1 ± 3 exp(−2π²ρ²))² at most (Poisson summation). Each part's deviation is 2¹² steps or
   more, which makes that less than 1 ± 10⁻⁷⁰⁰⁰⁰⁰⁰⁰.
3. Let q be the law of a rounded normal number and p the discrete Gaussian's. With u uniform on [−½, ½],
   q(k) / p(k) = E[exp(−u²/2σ²) cosh(ku/σ²)] up to (2), which is between exp(−1/8σ²) and exp(k²/8σ⁴). For |k| ≤ Kσ,
   K ≥ 1, these are within exp(±η), η = K²/8σ². A normal vector that is rounded after adding whole numbers is
   post-processing of the Gaussian mechanism, so (ε₀, δ₀) of that becomes ε = ε₀ + 2dη and
   δ = exp(dη) δ₀ + (1 + exp(ε)) τ, where τ ≤ 4d exp(−K²/2) bounds the chance that a number is beyond Kσ under either
   law. K² = 2 (ε + ln(4d/δ) + 14) makes the second term 2 exp(−14) δ.

The grid is chosen so fine that (1) costs less than 10⁻⁴ of the noise and (3) less than 10⁻⁴ of ε. Numbers are drawn
exactly (`discrete_gaussian`), so that the server gets the same ones from a seed as the client, on any processor.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal, localcontext
from fractions import Fraction
from functools import cache, partial
from itertools import pairwise
from math import ceil, exp, isqrt, log, sqrt

import numpy as np
import numpy.typing as npt

from headstart.channel.accounting import noise_multiplier, spent
from headstart.config.stage import Privacy
from headstart.core.message import Array
from headstart.core.seeds import Generator, SecureGenerator, Seed, generator_of, stream
from headstart.core.statistics import Floats, Ints
from headstart.errors import HeadstartError

KEY_BYTES = 32
_LEVELS = 5
# Steps of the grid: of the sensitivity over √d, and of the smallest part's deviation.
_ROUNDING, _PART = 2.0**14, 2.0**12
# What the difference between the discrete and the rounded Gaussian may cost, of ε and at all.
_DIFFERENCE, _LARGEST_DIFFERENCE = 1e-4, 1e-2
_LARGEST_DEVIATION = 2.0**50
_MOST_BITS = 52
_TOO_FINE = (
    "privacy: whole numbers of 64 bits do not hold values of length {:g} with this noise; "
    "raise epsilon or clip, or use noise = 'client'"
)
# What sets the generators of this noise apart from others, and from each other.
_SHARED, _KEYS = 0x5A9E, 0x5A9F
# Candidates that are drawn at once.
_BATCH = 1 << 17
# Probabilities in float64 are nearer than this to what they stand for.
_DOUBT = 2.0**-40

Words = npt.NDArray[np.uint64]


@dataclass(frozen=True)
class SharedNoise:
    """The noise of secure sums with this many values, as each of their clients adds it."""

    epsilon: float
    delta: float
    dim: int
    rounds: int
    multiplier: float
    """Of a Gaussian mechanism with what is left of the budget."""
    bits: int
    """Binary places of what is added up."""
    variance: int
    """Of the noise that a total needs, in steps of the grid."""
    difference: float
    """Of ε, the share of the difference between the discrete and the rounded Gaussian, over all rounds."""
    seed: Seed = None
    """What a client's noise is drawn from: in a simulation the recipe's seed, on a node a secret of the round, so that
    the same question gets the same noise."""

    @classmethod
    def of(
        cls, privacy: Privacy, sensitivity: float, dim: int, clients: int, rounds: int = 1, seed: Seed = None
    ) -> SharedNoise:
        """The noise for a budget; sensitivity: how far one unit moves the sum, before it is rounded.

        clients: the most that a sum has; dim: values of a sum; rounds: sums that a unit is in.
        """
        least = noise_multiplier(privacy.epsilon, privacy.delta, rounds)
        for bits in range(_MOST_BITS + 1):
            steps = sensitivity * 2.0**bits
            moved = steps + sqrt(dim)
            difference = _difference(privacy, rounds * dim, least * moved)
            fine = steps >= _ROUNDING * sqrt(dim) and least * steps >= _PART * clients
            if fine and difference <= min(_DIFFERENCE * privacy.epsilon, _LARGEST_DIFFERENCE):
                break
        else:
            raise HeadstartError(_TOO_FINE.format(sensitivity))
        delta = privacy.delta * exp(-difference / 2) * (1 - 2 * exp(-14))
        multiplier = noise_multiplier(privacy.epsilon - difference, delta, rounds)
        if multiplier * moved > _LARGEST_DEVIATION:
            raise HeadstartError(_TOO_FINE.format(sensitivity))
        variance = ceil((multiplier * moved) ** 2)
        return cls(privacy.epsilon, delta, dim, rounds, multiplier, bits, variance, difference, seed)

    @property
    def deviation(self) -> float:
        """Of the noise of a total, in the units of the values."""
        return sqrt(self.variance) / 2.0**self.bits

    def spent(self, rounds: int) -> float:
        """The ε of so many sums."""
        share = self.difference * rounds / self.rounds
        return min(spent(self.multiplier, self.delta, rounds) + share, self.epsilon) if rounds else 0.0

    def noised(
        self, values: Mapping[str, Floats], client: int, round: int, clients: int, threshold: int
    ) -> dict[str, Ints]:
        """What one of so many clients adds to a sum, as whole numbers: its values and all parts of its noise."""
        size = sum(array.size for array in values.values())
        rng = generator_of(self.seed, _SHARED, round, client, clients)
        noise = discrete_gaussian(rng, part_variances(self.variance, clients, threshold)[0], size)
        noise += self.parts(size, clients, threshold, self.keys(client, round, clients, threshold))
        whole = {name: np.rint(np.ldexp(array, self.bits)).astype(np.int64) for name, array in values.items()}
        return _added(whole, noise, 1)

    def read(self, total: Mapping[str, Array]) -> dict[str, Floats]:
        """A total in the units of the values."""
        return {name: np.ldexp(array.astype(np.float64), -self.bits) for name, array in total.items()}

    def keys(self, client: int, round: int, clients: int, threshold: int) -> dict[int, bytes]:
        """The keys of the parts of a client's noise that can be removed, by the number of the part from 1."""
        count = len(survivor_levels(clients, threshold)) - 1
        rng = generator_of(self.seed, _KEYS, round, client, clients, threshold)
        data = _words(rng, KEY_BYTES // 8 * count).tobytes()
        return {number: data[KEY_BYTES * (number - 1) : KEY_BYTES * number] for number in range(1, count + 1)}

    def revealed(self, client: int, round: int, clients: int, threshold: int, survivors: int) -> dict[int, bytes]:
        """Those of the keys that a total of so many survivors, at least, does not need."""
        keys = self.keys(client, round, clients, threshold)
        return {number: keys[number] for number in unneeded(clients, threshold, survivors)}

    def parts(self, size: int, clients: int, threshold: int, keys: Mapping[int, bytes]) -> Ints:
        """The sum [size] of the parts of a client's noise that have these keys, by the number of the part from 1."""
        variances = part_variances(self.variance, clients, threshold)
        noise = np.zeros(size, np.int64)
        for number, key in keys.items():
            noise += discrete_gaussian(stream(key), variances[number], size)
        return noise

    def removed(
        self, total: Mapping[str, Array], clients: int, threshold: int, revealed: Sequence[Mapping[int, bytes]]
    ) -> dict[str, Ints]:
        """A total without the parts whose keys its survivors have revealed."""
        size = sum(array.size for array in total.values())
        noise = np.zeros(size, np.int64)
        for keys in revealed:
            noise += self.parts(size, clients, threshold, keys)
        return _added({name: array.astype(np.int64) for name, array in total.items()}, noise, -1)


def _difference(privacy: Privacy, dim: int, deviation: float) -> float:
    """2dη of step 3."""
    beyond = 2 * (privacy.epsilon + log(4 * dim / privacy.delta) + 14)
    return 2 * dim * beyond / (8 * deviation**2)


def _added(values: Mapping[str, Ints], noise: Ints, sign: int) -> dict[str, Ints]:
    """Arrays with a vector of noise added, in the order of their names, modulo 2⁶⁴."""
    found, start = {}, 0
    for name in sorted(values):
        part = noise[start : start + values[name].size].reshape(values[name].shape)
        found[name] = values[name] + sign * part
        start += part.size
    return found


# --------------------------------------------------------------------------------------------------------------- parts


@cache
def survivor_levels(clients: int, threshold: int) -> tuple[int, ...]:
    """The numbers of survivors s₀ > s₁ > … that the parts of a client's noise are for, from all to the threshold."""
    steps = min(_LEVELS, clients - threshold)
    found = [round(clients * (threshold / clients) ** (step / max(steps, 1))) for step in range(steps + 1)]
    return tuple(sorted(set(found), reverse=True))


@cache
def part_variances(total: int, clients: int, threshold: int) -> tuple[int, ...]:
    """The variance of each part of a client's noise: with the first j + 1, that of s_j clients is ``total`` or more."""
    shares = [-(-total // survivors) for survivors in survivor_levels(clients, threshold)]
    return (shares[0], *(more - less for less, more in pairwise(shares)))


def unneeded(clients: int, threshold: int, survivors: int) -> range:
    """The parts, from 1, that a total of so many survivors does not need."""
    levels = survivor_levels(clients, threshold)
    if survivors < threshold:
        raise HeadstartError(f"{survivors} clients are left, {threshold} are needed to open the sum")
    return range(next(number for number, least in enumerate(levels) if least <= survivors) + 1, len(levels))


# ------------------------------------------------------------------------------------------------------------- numbers


def discrete_gaussian(generator: Generator, variance: int, size: int) -> Ints:
    """So many whole numbers [size] with probabilities proportional to exp(−k²/2σ²), exactly.

    By rejection, as Canonne, Kamath and Steinke (NeurIPS 2020), many at once: with w a power of two and t = mw just
    above σ, a candidate is |k| = U + wV, U uniform below w, V geometric with P(V ≥ v) = exp(−v/m), and counts with the
    probability exp(−(k²/2σ² + σ²/2t² − V/m)), about two times in three. Probabilities are compared in float64, and
    where that leaves a doubt, about once in 2³⁹ times, with as many digits as it takes: the numbers depend on the
    generator's bits and on nothing else.
    """
    found, have = np.empty(size, np.int64), 0
    while have < size:
        accepted = _accepted(generator, variance, min(3 * (size - have) // 2 + 64, _BATCH))[: size - have]
        found[have : have + len(accepted)] = accepted
        have += len(accepted)
    return found


def _accepted(generator: Generator, variance: int, count: int) -> Ints:
    """Those of so many candidates that count."""
    shift = max(isqrt(variance).bit_length() - 3, 0)
    mean = (isqrt(variance) >> shift) + 1  # m, from 2 to 8
    first, coins = _words(generator, count), _words(generator, count)
    steps = _geometric(generator, _words(generator, count), mean)
    sizes = (first & np.uint64((1 << shift) - 1)).astype(np.int64) + (steps << shift)
    negative = (first >> np.uint64(63)).astype(bool)
    least = Fraction(variance, 2 * mean**2 * 4**shift)
    chances = np.exp(steps / mean - sizes.astype(np.float64) ** 2 / (2 * variance) - float(least))
    thrown = coins * 2.0**-64
    counts = thrown < chances
    for place in np.flatnonzero(np.abs(thrown - chances) < _DOUBT):
        exponent = Fraction(int(sizes[place]) ** 2, 2 * variance) + least - Fraction(int(steps[place]), mean)
        counts[place] = _settled(generator, int(coins[place]), partial(_below, exponent))
    counts &= ~(negative & (sizes == 0))  # zero has no sign
    return np.where(negative, -sizes, sizes)[counts]


@cache
def _thresholds(mean: int) -> Words:
    """exp(−v/m) in units of 2⁻⁶⁴, rounded down, as far as it is not zero, and zero; the smallest first."""
    with localcontext() as context:
        context.prec = 100
        found = [int((Decimal(-v) / mean).exp() * 2**64) for v in range(1, 45 * mean + 1)]
    return np.array(found[::-1], np.uint64)


def _geometric(generator: Generator, words: Words, mean: int) -> Ints:
    """V with P(V ≥ v) = exp(−v/m) for each word: how many exp(−v/m) are above it."""
    table = _thresholds(mean)
    above = np.searchsorted(table, words, side="right")
    found = len(table) - above
    for place in np.flatnonzero(table[above - 1] == words):  # the smallest is 0, so that there is one
        found[place] = _settled(generator, int(words[place]), partial(_steps, mean))
    return found


def _settled(generator: Generator, word: int, decide: Callable[[Decimal, Decimal], int | None]) -> int:
    """What ``decide`` makes of a number whose first binary places are a word, with as many more as it asks for."""
    bits = 64
    with localcontext() as context:
        context.prec = 400
        while (found := decide(Decimal(word) / 2**bits, Decimal(word + 1) / 2**bits)) is None:
            word, bits = (word << 64) | int(_words(generator, 1)[0]), bits + 64
    return found


def _below(exponent: Fraction, low: Decimal, high: Decimal) -> int | None:
    """Whether a number between the two is below exp(−exponent)."""
    chance = (-Decimal(exponent.numerator) / exponent.denominator).exp()
    return None if low < chance < high else int(high <= chance)


def _steps(mean: int, low: Decimal, high: Decimal) -> int | None:
    """The whole part of −m ln of a number between the two."""
    if not low:
        return None
    least, most = int(-mean * high.ln()), int(-mean * low.ln())
    return most if least == most else None


def _words(generator: Generator, count: int) -> Words:
    if isinstance(generator, SecureGenerator):
        return generator.words(count)
    return np.asarray(generator.bit_generator.random_raw(count), np.uint64)
