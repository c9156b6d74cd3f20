"""What the closed forms have in common as scikit-learn estimators: clients by number, and random features."""

from __future__ import annotations

from typing import Any

import numpy as np
from sklearn.base import BaseEstimator

from headstart.core.statistics import Ints
from headstart.errors import HeadstartError
from headstart.heads.linear import RandomFeatures

FLOATS = [np.float64, np.float32]


def client_numbers(client: Any, examples: int) -> Ints | None:
    """The number [n] of each example's client, from 0; None where no clients are given."""
    if client is None:
        return None
    if np.shape(client) != (examples,):
        raise HeadstartError(f"client has shape {np.shape(client)}; give one client for each of {examples} examples")
    return np.unique(client, return_inverse=True)[1].astype(np.int64)


class RandomFeaturesEstimator(BaseEstimator):  # type: ignore[misc]
    """An estimator behind a random map of the features, where ``random_features`` are asked for."""

    random_features: int
    random_features_width: float
    random_state: int

    def _map(self) -> RandomFeatures | None:
        if not self.random_features:
            return None
        width = self.random_features_width
        return RandomFeatures.draw(self.n_features_in_, self.random_features, width, self.random_state)
