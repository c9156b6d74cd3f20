"""What a server makes of the updates of a round when it does not trust, or must not know, a single client.

Coordinate-wise median and trimmed mean (Yin et al., ICML 2018) withstand a minority of clients that send anything;
updates that are shortened to a largest norm bound what one client can do to a mean. DP-FedAvg (McMahan et al., ICLR
2018) shortens every client's update and adds Gaussian noise, so that what is released hides whether any one client
took part.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any

import numpy as np

from headstart.channel.noise import Seed, generator_of
from headstart.config.stage import DistMeZOStage, Privacy, Training
from headstart.core.params import Vectors
from headstart.core.statistics import Floats

RobustMean = Callable[[Floats], Floats]
"""The centre [...] of the values of all clients [n, ...], every client alike."""

# What sets the generator of the noise apart from those that shuffle and draw.
_NOISE = 0xD1FF


def robust_mean_of(stage: Training | DistMeZOStage) -> RobustMean | None:
    """What a stage names in the place of the mean; None for the mean, which needs no more than a running sum."""
    kind = getattr(stage, "combine", "mean")
    if kind == "median":
        return median
    if kind == "trimmed-mean":
        return lambda values: trimmed_mean(values, getattr(stage, "trim", 0.1))
    return None


def median(values: Floats) -> Floats:
    """Of each coordinate of values [n, ...] by itself."""
    return np.asarray(np.median(values, axis=0))


def trimmed_mean(values: Floats, trim: float) -> Floats:
    """Of each coordinate of values [n, ...]: without the share ``trim`` at each end, and one at least where n >= 3."""
    count = len(values)
    cut = max(int(trim * count), 1 if count >= 3 else 0)
    return np.asarray(np.sort(values, axis=0)[cut : count - cut].mean(axis=0))


def norm_of(vectors: Mapping[str, np.ndarray]) -> float:
    """Euclidean norm over all names."""
    return float(np.sqrt(sum(np.sum(np.square(vector, dtype=np.float64)) for vector in vectors.values())))


def shortened(vectors: Mapping[str, np.ndarray], longest: float) -> dict[str, np.ndarray]:
    """The vectors, brought to the norm ``longest`` where they are longer."""
    norm = norm_of(vectors)
    if norm <= longest:
        return dict(vectors)
    return {name: np.asarray(vector * np.float64(longest / norm)) for name, vector in vectors.items()}


class ClientPrivacy:
    """DP-FedAvg: what a client adds to the model is at most ``clip`` long, and noise hides it.

    The unit is a client with all its examples and rounds. With the server's noise, what is hidden from whoever sees the
    models is whether a client took part; where a round draws some of the clients, the server keeps to itself whom. The
    sum of a round is divided by the number of clients that were asked, which everybody knows, not by how many answered.
    With the clients' noise, what is hidden from the server is the update itself: any two updates of length ``clip`` are
    2 · clip apart at most. The server sees who takes part, so every round counts in full, and a client that is drawn
    less often has spent less than what is said here.

    In a simulation noise comes from the recipe's seed: **the guarantee is void towards anybody who knows the seed**. In
    a deployment the server's comes from a secret of the run, so that a resumed run is the one that was interrupted, and
    a client's from the operating system's generator.
    """

    def __init__(self, privacy: Privacy, rounds: int, asked: int, clients: int, seed: Seed) -> None:
        self.privacy, self.rounds, self.asked, self.clients, self.seed = privacy, rounds, asked, clients, seed
        self.on_server = privacy.noise == "server"
        self._drawn = (asked, clients) if self.on_server else (None, None)

    @cached_property
    def multiplier(self) -> float:
        """Standard deviation of the noise in units of the sensitivity."""
        from headstart.channel.accounting import noise_multiplier

        return noise_multiplier(self.privacy.epsilon, self.privacy.delta, self.rounds, *self._drawn)

    @property
    def deviation(self) -> float:
        """Standard deviation of the noise on each number of the sum, or of a client's update."""
        from headstart.channel.accounting import sensitivity

        clip = self.privacy.clip
        return self.multiplier * (sensitivity(clip, self.asked, self.clients) if self.on_server else 2 * clip)

    def bounded(self, update: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """An update no longer than ``clip``; zeros for one that is not finite, which must not show."""
        if not np.isfinite(norm_of(update)):
            return {name: np.zeros_like(value) for name, value in update.items()}
        return shortened(update, self.privacy.clip)

    def noised(self, vectors: Mapping[str, np.ndarray], *key: int) -> Vectors:
        """The vectors with noise on every number; key: the round, and the client where it is a client's noise."""
        rng = generator_of(self.seed, _NOISE, *key)
        return {name: np.asarray(rng.normal(value, self.deviation)) for name, value in vectors.items()}

    def spent(self, rounds: int) -> dict[str, Any]:
        """The guarantee of so many rounds."""
        from headstart.channel.accounting import spent

        privacy = self.privacy
        epsilon = spent(self.multiplier, privacy.delta, rounds, *self._drawn) if rounds else 0.0
        return {
            "epsilon": epsilon,
            "delta": privacy.delta,
            "unit": "client",
            "noise": privacy.noise,
            "noise_multiplier": self.multiplier,
            "clip": privacy.clip,
        }
