"""Fed3R: ridge regression in one round (Fanì et al., "Accelerating heterogeneous federated learning with closed-form
classifiers", ICML 2024).

Travels up: the Gram matrix of the client's features (upper triangle) and the sum of the features of each class the
client has. The server adds both up and solves (G + λI) W = B. Who holds which example does not change the result.
With ``random_features`` the client first maps its features through random cosines that the run's seed determines.
"""

from __future__ import annotations

from math import sqrt

import numpy as np

from headstart.config.stage import Fed3RStage
from headstart.core.ledger import Published
from headstart.core.statistics import ClientStatistics, Ints
from headstart.heads import LinearHead, RandomFeatures, ridge_head
from headstart.methods.base import Heard, Setting, StatisticsMethod


class Fed3RMethod(StatisticsMethod):
    """Gram matrix and class sums up; a ridge solve as the head."""

    moments = "full"

    def __init__(self, stage: Fed3RStage, setting: Setting) -> None:
        super().__init__(setting, stage.privacy)
        self.stage = stage
        self.random: RandomFeatures | None = None
        # Features are shortened for privacy, but not when the head is used; without a bias, their length is no matter.
        self.bias = stage.bias and (stage.privacy is None or stage.random_features > 0)
        if stage.random_features:
            self.dim = stage.random_features
            self.random = RandomFeatures.draw(setting.dim, self.dim, stage.random_features_width, setting.seed[0])
            self.transform = self.random
            self.longest = sqrt(2)

    def solve(self, total: ClientStatistics) -> LinearHead:
        """The ridge solution, each row scaled to length one with its bias."""
        return ridge_head(total, self.stage.ridge, self.bias).behind(self.random)

    def published(self, state: Heard, counts: Ints) -> Published:
        """As the FedCOF paper counts it; half of the symmetric Gram matrix is redundant."""
        rows = int(np.count_nonzero(counts))
        total = (rows * self.dim + len(counts) * self.dim**2) * 4
        return Published(total, int(counts.sum()), "FedCOF paper, appendix H: (P · d + K · d²) · 4 bytes, up")
