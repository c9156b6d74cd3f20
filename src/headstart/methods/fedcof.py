"""FedCOF: covariances from class means (Goswami et al., "Covariances for free: exploiting mean distributions for
training-free federated learning", 2025, equations 7 to 11 and algorithm 1).

Travels up: the sum of the features of each class the client has, and how many there were; exactly what FedNCM sends.
The means of one class differ from client to client by chance, and by how much tells the class's covariance: the
server estimates it and solves as ridge regression would. It has to see each client's means, so rows are kept.
``means_per_client`` splits a client's class at random into several means; the oracles also send second moments;
``count_noise`` blurs the counts before they are sent.
"""

from __future__ import annotations

from headstart.channel.noise import blur_counts
from headstart.config.stage import FedCOFStage
from headstart.core.ledger import Published
from headstart.core.statistics import ClientStatistics, Ints, random_parts
from headstart.heads import LinearHead, cof_head
from headstart.heads.cof import MOMENTS_FOR
from headstart.methods.base import Heard, Setting, StatisticsMethod
from headstart.solvers.cohort import Cohort


class FedCOFMethod(StatisticsMethod):
    """Class means and counts up; covariances from their spread, then a solve, as the head."""

    keeps_rows = True

    def __init__(self, stage: FedCOFStage, setting: Setting) -> None:
        super().__init__(setting, stage.privacy)
        self.stage = stage
        self.moments = MOMENTS_FOR[stage.covariance]
        self.means_per_client = stage.means_per_client

    @property
    def by_row(self) -> bool:
        """Covariances are estimated from how clients differ; the oracles need sums alone."""
        return self.stage.covariance == "estimated"

    def said(self, statistics: ClientStatistics, owners: Ints, cohort: Cohort) -> tuple[ClientStatistics, Ints]:
        """As any statistics, or with the paper's noise on the counts."""
        if self.stage.count_noise is None:
            return super().said(statistics, owners, cohort)
        return blur_counts(statistics, owners, self.stage.count_noise, self.noise_seed)

    def parts(self, cohort: Cohort) -> Ints | None:
        """Random parts of each client's class, each with a mean of its own."""
        return random_parts(cohort.labels, cohort.owners, self.means_per_client, self.setting.seed)

    def solve(self, total: ClientStatistics) -> LinearHead:
        """The solve with estimated covariances, each row scaled to length one."""
        return cof_head(total, self.stage.shrinkage, self.stage.covariance)

    def published(self, state: Heard, counts: Ints) -> Published:
        """Bytes up of the P means; the paper does not charge the counts."""
        d, means = self.dim, sum(len(heard.labels) for heard in state)
        extra = {"estimated": 0, "full": d * d, "diagonal": d, "spherical": 1}[self.stage.covariance]
        what = "P · d" if not extra else f"P (d + {'d²' if extra == d * d else 'd' if extra == d else '1'})"
        return Published(means * (d + extra) * 4, int(counts.sum()), f"FedCOF paper, appendix H: {what} · 4 bytes, up")
