"""Fed3R: ridge regression in one round (Fanì et al., "Accelerating heterogeneous federated learning with closed-form
classifiers", ICML 2024).

Travels up: the Gram matrix of the client's features (upper triangle), the sum of the features of each class the
client has, and how many there were, where the bias or the choice of λ needs it. The server adds them up and solves
(G + λI) W = B. Who holds which example does not change the result. With ``random_features`` the client first maps its
features through random cosines that the run's seed determines.
"""

from __future__ import annotations

from dataclasses import replace
from math import sqrt
from typing import Literal

from pydantic import NonNegativeFloat, NonNegativeInt, PositiveFloat

from headstart.config.stage import Auto, ClosedFormStage
from headstart.core.statistics import ClientStatistics, Floats, Summary
from headstart.heads import LinearHead, RandomFeatures, ridge_head, ridge_optimism
from headstart.heads.lda import ridge_lda_head
from headstart.methods.base import StageContext
from headstart.methods.closed_form import ClosedForm
from headstart.methods.registry import register


class Fed3RStage(ClosedFormStage):
    """Federated recursive ridge regression (Fanì et al., ICML 2024)."""

    method: Literal["fed3r"]
    ridge: NonNegativeFloat | Auto = "auto"
    """"auto": generalised cross-validation on the server; with privacy next to none, since eigenvalues below the noise
    are raised to it, which does the same. The papers use 0.01."""
    bias: bool = True
    """True: a ones column, as the official code; False: as in the FedCOF paper. With privacy there is none, except for
    random features: a bias that goes with shortened features does not go with those that the head is used on."""
    head: Literal["ridge", "lda"] = "ridge"
    """"lda": linear discriminant analysis with the within-class covariance of the same Gram matrix."""
    prior: Literal["empirical", "uniform"] = "empirical"
    """Of the classes, with "lda": their shares of the examples, or the same for all."""
    random_features: NonNegativeInt = 0
    """So many random Fourier features of the unit-length features; 0 for none."""
    random_features_width: PositiveFloat = 1.0
    """Width of the Gaussian kernel that the random features approximate."""


class Fed3R(ClosedForm):
    """Gram matrix and class sums up; a ridge solve as the head."""

    moments = "full"

    def __init__(self, stage: Fed3RStage, context: StageContext) -> None:
        super().__init__(stage, context)
        self.random: RandomFeatures | None = None
        if stage.random_features:
            self.random = self.transform = RandomFeatures.draw(
                context.dim, stage.random_features, stage.random_features_width, context.seed[0]
            )

    @property
    def summary(self) -> Summary:
        """Of the random features, where there are any; none of those is longer than √2.

        Counts are for the bias and for the choice of λ: with privacy there is no bias, and the noise is its own ridge.
        """
        summary = replace(super().summary, counts=self.stage.privacy is None or self._bias)
        return replace(summary, dim=self.stage.random_features, longest=sqrt(2)) if self.transform else summary

    def solve(self, total: ClientStatistics) -> LinearHead:
        """The ridge solution, each row scaled to length one with its bias.

        Features that are clipped in training are not when the head is used; without a bias, their length is no matter.
        """
        stage = self.stage
        if stage.head == "lda":
            return ridge_lda_head(total, stage.ridge, self._bias, stage.prior).behind(self.random)
        return ridge_head(total, stage.ridge, self._bias).behind(self.random)

    def optimism(self, total: ClientStatistics, head: LinearHead) -> tuple[float, Floats]:
        """By the mean leverage of an example; the analysis has none."""
        if self.stage.head == "lda":
            return super().optimism(total, head)
        return ridge_optimism(total, head, self.stage.ridge, self._bias)

    @property
    def _bias(self) -> bool:
        return bool(self.stage.bias and (self.stage.privacy is None or self.random is not None))


register(Fed3RStage, Fed3R)
