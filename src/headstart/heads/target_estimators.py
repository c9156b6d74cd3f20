"""Fed3R of numbers and of labels as scikit-learn estimators: for any features, with or without a federation."""

from __future__ import annotations

from typing import Any, Literal, Self, cast

import numpy as np
import numpy.typing as npt
from sklearn.base import ClassifierMixin, MultiOutputMixin, RegressorMixin
from sklearn.utils.multiclass import type_of_target
from sklearn.utils.validation import check_is_fitted, validate_data

from headstart.core.metrics import label_shares
from headstart.core.statistics import ClientStatistics, Features, Floats, summarise
from headstart.errors import HeadstartError
from headstart.heads.base import FLOATS, RandomFeaturesEstimator, client_numbers
from headstart.heads.targets import Beside, encoded, ridge_of_targets


class _Ridge(RandomFeaturesEstimator):
    """The Gram matrix of each client, with the targets beside the features, and the ridge solution of their sum.

    After ``fit``: ``coef_`` [q, d], ``intercept_`` [q], and the λ that was chosen as ``ridge_``.
    """

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

    def _fit(self, X: Features, targets: Floats, client: Any) -> tuple[Floats, Floats]:
        """Weights [q, d] and biases [q]; targets: [n, q]."""
        clients, self._drawn = client_numbers(client, len(targets)), self._map()
        who = np.zeros(len(targets), np.int64) if clients is None else clients
        parts = []
        for number in range(int(who.max()) + 1):
            mine = np.flatnonzero(who == number)
            vectors = cast(Features, Beside(self._mapped(X[mine]), targets[mine]))
            parts.append(summarise(vectors, np.zeros(len(mine), np.int64), 1, moments="full")[0])
        total: ClientStatistics = parts[0].merge(*parts[1:])
        weight, bias, self.ridge_ = ridge_of_targets(total, targets.shape[1], self.ridge, self.bias)
        return weight, bias

    def _mapped(self, X: Features) -> Features:
        return X if self._drawn is None else self._drawn(X)

    def _scores(self, X: Any) -> Floats:
        """[n, q], or [n] where the targets were one column."""
        check_is_fitted(self)
        X = validate_data(self, X, dtype=FLOATS, reset=False)
        return np.asarray(self._mapped(X).astype(np.float64) @ np.transpose(self.coef_) + self.intercept_)

    coef_: Floats
    intercept_: Any


class Fed3RRegressor(MultiOutputMixin, RegressorMixin, _Ridge):  # type: ignore[misc]
    """Ridge regression of numbers from clients' Gram matrices. Who holds which example does not matter.

    ``bias`` is an intercept that is not regularised: with a number as ``ridge``, the result is that of scikit-learn's
    ``Ridge(alpha=ridge)`` on all examples in one place.
    """

    def fit(self, X: Any, y: Any, client: Any = None) -> Self:
        """Fit on features X [n, d] and targets y [n] or [n, q]; ``client`` [n] says who holds each example."""
        X, y = validate_data(self, X, y, dtype=FLOATS, multi_output=True, y_numeric=True)
        y = np.asarray(y, np.float64)
        weight, bias = self._fit(X, y.reshape(len(y), -1), client)
        self.coef_, self.intercept_ = (weight[0], float(bias[0])) if y.ndim == 1 else (weight, bias)
        return self

    def predict(self, X: Any) -> Floats:
        """Numbers [n] or [n, q], as in `fit`."""
        return self._scores(X)


class Fed3RMultiLabel(ClassifierMixin, _Ridge):  # type: ignore[misc]
    """Which of several labels an example has, by ridge regression on −1 and 1 from clients' Gram matrices.

    With a number as ``ridge``, the result is that of scikit-learn's ``RidgeClassifier(alpha=ridge)``.
    """

    def fit(self, X: Any, y: Any, client: Any = None) -> Self:
        """Fit on features X [n, d] and labels y [n, q] of 0 and 1; ``client`` [n] says who holds each example."""
        X, y = validate_data(self, X, y, dtype=FLOATS, multi_output=True)
        if type_of_target(y) != "multilabel-indicator":
            raise HeadstartError(f"y must be 0 and 1, a column for each label; it is {type_of_target(y)}")
        self.classes_ = np.arange(y.shape[1])
        self.coef_, self.intercept_ = self._fit(X, encoded(np.asarray(y, np.float64), "multilabel"), client)
        return self

    def decision_function(self, X: Any) -> Floats:
        """Scores [n, q]; above 0 an example has the label."""
        return self._scores(X)

    def predict(self, X: Any) -> npt.NDArray[np.int64]:
        """Labels [n, q] of 0 and 1."""
        return (self._scores(X) > 0).astype(np.int64)

    def predict_proba(self, X: Any) -> Floats:
        """The share of examples like it that have each label [n, q], as far as it is linear; not calibrated."""
        return label_shares(self._scores(X))

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.classifier_tags.multi_label = True
        return tags
