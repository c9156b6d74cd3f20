"""The closed-form heads as scikit-learn classifiers: for any features, with or without a federation."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Literal, Self

import numpy as np
import numpy.typing as npt
from scipy.special import softmax
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, validate_data

from headstart.core.statistics import Features, Ints, random_parts, summarise
from headstart.errors import HeadstartError
from headstart.heads.cof import Covariance, Within, cof_head, moments_for
from headstart.heads.linear import LinearHead, RandomFeatures
from headstart.heads.ncm import ncm_head
from headstart.heads.ridge import ridge_head

_FLOATS = [np.float64, np.float32]


class _ClosedFormClassifier(ClassifierMixin, BaseEstimator, ABC):  # type: ignore[misc]
    """Statistics by client, then a head.

    After ``fit``: ``classes_`` [C], ``coef_`` [C, d], ``intercept_`` [C], and ``head_`` with what was chosen.
    """

    def fit(self, X: Any, y: Any, client: Any = None) -> Self:
        """Fit on features X [n, d] and labels y [n]; ``client`` [n] says who holds each example."""
        X, y = validate_data(self, X, y, dtype=_FLOATS)
        check_classification_targets(y)
        self.classes_, labels = np.unique(y, return_inverse=True)
        if len(self.classes_) < 2:
            raise HeadstartError(f"the data hold one class only ({self.classes_[0]}); a classifier needs two classes")
        if client is not None and np.shape(client) != np.shape(y):
            raise HeadstartError(f"client has shape {np.shape(client)}; give one client for each of {len(y)} examples")
        clients = None if client is None else np.unique(client, return_inverse=True)[1].astype(np.int64)
        self.head_ = self._solve(X, labels.astype(np.int64), clients)
        self.coef_, self.intercept_ = self.head_.weight, self.head_.bias
        return self

    def decision_function(self, X: Any) -> npt.NDArray[np.float32]:
        """Scores [n, C]; for two classes the margin [n] of the second, as scikit-learn has it."""
        scores = self._scores(X)
        return scores if len(self.classes_) > 2 else scores[:, 1] - scores[:, 0]

    def predict(self, X: Any) -> npt.NDArray[Any]:
        """The class of each row of X [n, d]."""
        best = self._scores(X).argmax(axis=1)
        return np.asarray(self.classes_[best])

    def predict_proba(self, X: Any) -> npt.NDArray[np.float32]:
        """Softmax of the scores [n, C]; not calibrated."""
        return np.asarray(softmax(self._scores(X), axis=1))

    def _scores(self, X: Any) -> npt.NDArray[np.float32]:
        check_is_fitted(self)
        return self.head_.scores(validate_data(self, X, dtype=_FLOATS, reset=False))

    @abstractmethod
    def _solve(self, X: Features, labels: Ints, clients: Ints | None) -> LinearHead:
        """The head from features [n, d], labels [n] and clients [n]."""


class FedNCM(_ClosedFormClassifier):
    """Nearest class mean (Legate et al., NeurIPS 2023). Who holds which example does not matter."""

    def __init__(self, distance: Literal["cosine", "euclidean"] = "cosine") -> None:
        self.distance = distance

    def _solve(self, X: Features, labels: Ints, clients: Ints | None) -> LinearHead:
        statistics, _ = summarise(X, labels, len(self.classes_), clients=clients)
        return ncm_head(statistics, self.distance)


class Fed3R(_ClosedFormClassifier):
    """Ridge regression (Fanì et al., ICML 2024). Who holds which example does not matter."""

    def __init__(
        self,
        ridge: float | Literal["auto"] = "auto",
        bias: bool = True,
        random_features: int = 0,
        random_features_width: float = 1.0,
        random_state: int = 0,
    ) -> None:
        self.ridge = ridge
        self.bias = bias
        self.random_features = random_features
        self.random_features_width = random_features_width
        self.random_state = random_state

    def _solve(self, X: Features, labels: Ints, clients: Ints | None) -> LinearHead:
        random = None
        if self.random_features:
            width = self.random_features_width
            random = RandomFeatures.draw(X.shape[1], self.random_features, width, self.random_state)
        statistics, _ = summarise(X, labels, len(self.classes_), clients=clients, moments="full", transform=random)
        return ridge_head(statistics, self.ridge, self.bias).behind(random)


class FedCOF(_ClosedFormClassifier):
    """Covariances estimated from class means (Goswami et al., 2025).

    Without ``client`` every example speaks for itself, and the estimate is the exact within-class covariance.
    """

    def __init__(
        self,
        shrinkage: float | Literal["auto"] = "auto",
        means_per_client: int = 1,
        covariance: Covariance = "estimated",
        random_state: int = 0,
        within: Within = "auto",
        rank: int = 0,
    ) -> None:
        self.shrinkage = shrinkage
        self.means_per_client = means_per_client
        self.covariance = covariance
        self.random_state = random_state
        self.within = within
        self.rank = rank

    def _solve(self, X: Features, labels: Ints, clients: Ints | None) -> LinearHead:
        clients = np.arange(len(labels)) if clients is None else clients
        parts = random_parts(labels, clients, self.means_per_client, (self.random_state,))
        if self.rank and (self.covariance != "estimated" or self.within == "estimated"):
            raise HeadstartError("rank: directions are told beside a trace or a diagonal; set within = 'auto'")
        moments, n_classes, seed = moments_for(self.covariance, self.within), len(self.classes_), (self.random_state,)
        statistics, _ = summarise(
            X, labels, n_classes, clients=clients, parts=parts, moments=moments, rank=self.rank, seed=seed
        )
        return cof_head(statistics, self.shrinkage, self.covariance, self.within)
