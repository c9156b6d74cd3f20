"""FedCOF: covariances from class means (Goswami et al., "Covariances for free: exploiting mean distributions for
training-free federated learning", 2025, equations 7 to 11 and algorithm 1).

Travels up: the sum of the features of each class the client has, and how many there were; exactly what FedNCM sends.
The means of one class differ from client to client by chance, and by how much tells the class's covariance: the
server estimates it and solves as ridge regression would. It has to see each client's means, so rows are kept.
``means_per_client`` splits a client's class at random into several means; the oracles also send second moments;
``count_noise`` blurs the counts before they are sent. ``within`` and ``rank`` go beyond the paper: what clients tell
of the scatter around their means, which the paper estimates; one number each by default.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from pydantic import NonNegativeFloat, NonNegativeInt, PositiveInt

from headstart.config.stage import Auto, ClosedFormStage, CountNoise
from headstart.core.statistics import ClientStatistics, Ints, Summary, random_parts
from headstart.heads import LinearHead, cof_head
from headstart.heads.cof import Within, moments_for
from headstart.methods.base import StageContext
from headstart.methods.closed_form import ClosedForm
from headstart.methods.registry import register
from headstart.solvers.cohort import Cohort


class FedCOFStage(ClosedFormStage):
    """Covariances estimated from class means (Goswami et al., 2025)."""

    method: Literal["fedcof"]
    shrinkage: NonNegativeFloat | Auto = "auto"
    """"auto": follows the within-class variance, sent or estimated; the papers use 1 (0.1 for MobileNetV2)."""
    means_per_client: PositiveInt = 1
    """Random parts that a client splits the examples of a class into; each sends a mean."""
    covariance: Literal["estimated", "full", "diagonal", "spherical"] = "estimated"
    """Where covariances come from: from the means (the method), or, as oracles, from clients that send their own."""
    head: Literal["ridge", "lda"] = "ridge"
    """"lda": linear discriminant analysis with the same covariance, whose rows keep their length and have a bias."""
    prior: Literal["empirical", "uniform"] = "empirical"
    """Of the classes, with "lda": their shares of the examples, or the same for all."""
    count_noise: CountNoise | None = None
    """Noise on the counts alone: a table with kind and epsilon."""
    within: Literal["estimated", "trace", "diagonal", "auto"] = "auto"
    """What clients send about their within-class covariance. "estimated": nothing, as in the paper. "trace": one
    number, spread evenly over all dimensions. "diagonal": one for each dimension. "auto": one number, of which a share
    takes the shape of the paper's estimate, smaller where clients' features differ; as "estimated" with count_noise,
    and with privacy unless there is a rank."""
    rank: NonNegativeInt = 0
    """Leading eigenvectors that a client also sends, as many rows as so many classes; with secure or privacy, as many
    rows of a sketch, whose sum over the clients gives the leading eigenvectors of theirs."""

    @property
    def sent_within(self) -> Within:
        """What clients send of it: with noise, no more than is needed."""
        noisy = (self.privacy is not None and not self.rank) or self.count_noise is not None
        return "estimated" if self.within == "auto" and noisy else self.within

    @property
    def sketched(self) -> bool:
        """Whether directions are found in the sum of the clients' sketches: their own do not add up."""
        return self.rank > 0 and (self.secure or self.privacy is not None)

    @property
    def noise_on_counts(self) -> CountNoise | None:
        """As the recipe has it."""
        return self.count_noise


class FedCOF(ClosedForm):
    """Class means and counts up; covariances from their spread, then a solve, as the head."""

    def __init__(self, stage: FedCOFStage, context: StageContext) -> None:
        super().__init__(stage, context)
        self.moments = moments_for(stage.covariance, stage.sent_within)

    @property
    def summary(self) -> Summary:
        """Covariances are estimated from how clients' rows differ; the oracles need sums alone."""
        estimated = self.stage.covariance == "estimated"
        means = self.stage.means_per_client
        directions = {"sketch" if self.stage.sketched else "rank": self.stage.rank}
        return replace(super().summary, rows=True, by_row=estimated, means_per_client=means, **directions)

    def parts(self, cohort: Cohort) -> Ints | None:
        """Random parts of each client's class, each with a mean of its own."""
        means, least = self.stage.means_per_client, self.stage.min_examples
        return random_parts(cohort.labels, cohort.owners, means, self.context.seed, least)

    def solve(self, total: ClientStatistics) -> LinearHead:
        """The solve with estimated covariances, each row scaled to length one unless it is a discriminant's."""
        stage = self.stage
        return cof_head(total, stage.shrinkage, stage.covariance, stage.sent_within, stage.head, stage.prior)


register(FedCOFStage, FedCOF)
