"""Fed3R: ridge regression in one round (Fanì et al., "Accelerating heterogeneous federated learning with closed-form
classifiers", ICML 2024).

Travels up: the Gram matrix of the client's features (upper triangle), the sum of the features of each class the
client has, and how many there were, where the bias or the choice of λ needs it. The server adds them up and solves
(G + λI) W = B. Who holds which example does not change the result. With ``random_features`` the client first maps its
features through random cosines that the run's seed determines.

Numbers and labels in the place of classes: what travels is the Gram matrix of the features with the targets beside
them, of which B = XᵀY is a part, and the head is their regression (`heads.targets`).
"""

from __future__ import annotations

from dataclasses import replace
from math import sqrt
from typing import Literal, cast

import numpy as np
from pydantic import NonNegativeFloat, NonNegativeInt, PositiveFloat

from headstart.config.stage import Auto, ClosedFormStage
from headstart.core.statistics import ClientStatistics, Features, Floats, Summary
from headstart.errors import HeadstartError
from headstart.heads import LinearHead, RandomFeatures, ridge_head, ridge_optimism, target_head
from headstart.heads.lda import ridge_lda_head
from headstart.heads.targets import Beside, encoded
from headstart.methods.base import StageContext
from headstart.methods.closed_form import ClosedForm
from headstart.methods.registry import register
from headstart.solvers.cohort import Cohort


class Fed3RStage(ClosedFormStage):
    """Federated recursive ridge regression (Fanì et al., ICML 2024)."""

    any_target = True
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
        self.target = context.task.target
        if self.target != "classes" and (stage.temperature != 1.0 or stage.head != "ridge"):
            raise HeadstartError(f"fed3r: temperature and head are of classes, and the targets are {self.target}")
        if stage.random_features:
            self.random = self.transform = RandomFeatures.draw(
                context.dim, stage.random_features, stage.random_features_width, context.seed[0]
            )
        if self.random is not None and self.target != "classes":
            self.transform = self._mapped

    @property
    def summary(self) -> Summary:
        """Of the random features, where there are any; none of those is longer than √2.

        Counts are for the bias and for the choice of λ: with privacy there is no bias, and the noise is its own ridge.
        """
        summary = replace(super().summary, counts=self.stage.privacy is None or self._bias)
        if self.target != "classes":
            dim = (self.stage.random_features or self.context.dim) + self.context.task.n_classes
            return replace(summary, n_classes=1, dim=dim)
        return replace(summary, dim=self.stage.random_features, longest=sqrt(2)) if self.transform else summary

    def solve(self, total: ClientStatistics) -> LinearHead:
        """The ridge solution, each row scaled to length one with its bias.

        Features that are clipped in training are not when the head is used; without a bias, their length is no matter.
        """
        stage = self.stage
        if self.target != "classes":
            return target_head(total, self.context.task.n_classes, stage.ridge, self._bias).behind(self.random)
        if stage.head == "lda":
            return ridge_lda_head(total, stage.ridge, self._bias, stage.prior).behind(self.random)
        return ridge_head(total, stage.ridge, self._bias).behind(self.random)

    def optimism(self, total: ClientStatistics, head: LinearHead) -> tuple[float, Floats]:
        """By the mean leverage of an example; the analysis has none."""
        if self.stage.head == "lda":
            return super().optimism(total, head)
        return ridge_optimism(total, head, self.stage.ridge, self._bias)

    def vectors(self, cohort: Cohort) -> Features:
        """The features, with the targets beside them where these are no classes."""
        if cohort.targets is None:
            return cohort.features
        return cast(Features, Beside(cohort.features, encoded(cohort.targets, self.target)))

    def _mapped(self, vectors: Features) -> Features:
        """Random features, with the targets beside them."""
        assert self.random is not None
        dim = self.context.dim
        return np.concatenate([self.random(vectors[:, :dim]), vectors[:, dim:]], axis=1, dtype=np.float64)

    @property
    def _bias(self) -> bool:
        bounded = self.random is not None and self.target == "classes"
        return bool(self.stage.bias and (self.stage.privacy is None or bounded))


register(Fed3RStage, Fed3R)
