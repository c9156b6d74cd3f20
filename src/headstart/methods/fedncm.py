"""FedNCM: nearest class mean in one round (Legate et al., "Guiding the last layer in federated learning with
pre-trained models", NeurIPS 2023, Algorithm 1).

Travels up: the sum of the features of each class the client has, and how many there were. The server divides and
scales each mean to length one. Who holds which example does not change the result.
"""

from __future__ import annotations

from dataclasses import replace

from headstart.config.stage import FedNCMStage
from headstart.core.ledger import Published
from headstart.core.statistics import ClientStatistics, Ints
from headstart.heads import LinearHead, ncm_head
from headstart.methods.base import Heard, Setting, StatisticsMethod


class FedNCMMethod(StatisticsMethod):
    """Class sums and counts up; class means as the head."""

    def __init__(self, stage: FedNCMStage, setting: Setting) -> None:
        super().__init__(setting, stage.privacy)
        self.stage = stage

    def solve(self, total: ClientStatistics) -> LinearHead:
        """Class means, scaled to length one unless the distance is Euclidean."""
        head = ncm_head(total, self.stage.distance)
        if self.noise is None or self.stage.distance == "cosine":
            return head
        # Distances to means of shortened features are those of features that are shortened, too.
        return replace(head, longest=self.noise.bound)

    def published(self, state: Heard, counts: Ints) -> Published:
        """Appendix A: counted like one round of linear probing; its table prints the compute as 1."""
        total = 2 * self.setting.n_classes * self.dim * len(counts) * 4
        return Published(total, int(counts.sum()), "FedNCM paper, appendix A: 2 · C · d · K · 4 bytes, up and down")
