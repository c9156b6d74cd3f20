"""The closed-form heads as scikit-learn classifiers: for any features, with or without a federation."""

from __future__ import annotations

import zlib
from abc import ABC, abstractmethod
from collections.abc import Hashable
from dataclasses import replace
from typing import Any, Literal, Self

import numpy as np
import numpy.typing as npt
from scipy.special import softmax
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, validate_data

from headstart.core.statistics import ClientStatistics, Features, Floats, Ints, random_parts, summarise
from headstart.errors import HeadstartError
from headstart.heads.base import FLOATS, RandomFeaturesEstimator, client_numbers
from headstart.heads.calibrate import temperature_of
from headstart.heads.centres import k_means
from headstart.heads.cof import Covariance, Within, cof_head, moments_for
from headstart.heads.lda import Prior, ridge_lda_head
from headstart.heads.linear import LinearHead
from headstart.heads.ncm import ncm_head
from headstart.heads.ridge import ridge_head, ridge_optimism


class _ClosedFormClassifier(ClassifierMixin, BaseEstimator, ABC):  # type: ignore[misc]
    """Statistics by client, then a head.

    After ``fit``: ``classes_`` [C], ``coef_`` [C, d], ``intercept_`` [C], ``temperature_``, and ``head_`` with what was
    chosen. ``temperature = "auto"`` is fitted on the training examples, for Fed3R as if each had been left out.
    """

    temperature: float | Literal["auto"]

    def fit(self, X: Any, y: Any, client: Any = None) -> Self:
        """Fit on features X [n, d] and labels y [n]; ``client`` [n] says who holds each example."""
        X, y = validate_data(self, X, y, dtype=FLOATS)
        check_classification_targets(y)
        self.classes_, labels = np.unique(y, return_inverse=True)
        if len(self.classes_) < 2:
            raise HeadstartError(f"the data hold one class only ({self.classes_[0]}); a classifier needs two classes")
        clients = client_numbers(client, len(y))
        labels = labels.astype(np.int64)
        self._kept: dict[Hashable, ClientStatistics] = {}
        statistics = self._statistics(X, labels, clients)
        self._set_head(self._head(statistics))
        self.temperature_ = 1.0 if self.temperature == "auto" else float(self.temperature)
        if self.temperature == "auto":
            factor, own = self._optimism(statistics)
            scores = factor * self.head_.scores(X).astype(np.float64)
            scores[np.arange(len(labels)), labels] -= own[labels]
            self.temperature_ = temperature_of(scores, labels)
        return self

    def partial_fit(self, X: Any, y: Any, classes: Any = None, client: Any = None) -> Self:
        """Add examples: X [n, d], y [n], and ``client`` [n], or one for all; without it a call is a client of its own.

        ``classes``: all that there will be, at the first call; later, more than before adds classes. What each client
        has said is kept, so that `forget` can take it out again: with Fed3R a matrix [d, d] each. Probabilities are
        those of a temperature of 1, where none is given, until `calibrate` is called.
        """
        first = not getattr(self, "_kept", None)
        if first and hasattr(self, "head_"):
            raise HeadstartError("fit keeps nothing that partial_fit could add to; begin with partial_fit")
        X, y = validate_data(self, X, y, dtype=FLOATS, reset=first)
        check_classification_targets(y)
        self._extend_classes(classes, first)
        labels = self._places(y)
        if client is None:
            client = f"call {self._calls}"
        who = np.full(len(y), client) if np.ndim(client) == 0 else np.asarray(client)
        if who.shape != y.shape:
            raise HeadstartError(f"client has shape {who.shape}; give one client for each of {len(y)} examples")
        self._calls += 1
        for name in np.unique(who):
            mine = who == name
            number = np.full(int(mine.sum()), _number(name.item()))
            said = self._statistics(X[mine], labels[mine], number)
            before = self._kept.get(name.item())
            self._kept[name.item()] = self._merged(said if before is None else before.merge(said))
        return self._solve_kept()

    def forget(self, client: Any) -> Self:
        """Take a client's examples out: to the bit, the head of those that are left."""
        kept = getattr(self, "_kept", {})
        if client not in kept:
            known = ", ".join(map(str, kept)) or "none: partial_fit keeps them, fit does not"
            raise HeadstartError(f"forget: {client!r} is no client that was kept; known: {known}")
        if len(kept) == 1:
            raise HeadstartError(f"forget: {client!r} is the last client; fit anew instead")
        del kept[client]
        return self._solve_kept()

    def _solve_kept(self) -> Self:
        """In the order of the clients' names, since floating-point sums depend on their order."""
        names = sorted(self._kept, key=lambda name: (str(type(name)), name))
        first, *others = (replace(self._kept[name], n_classes=len(self.classes_)) for name in names)
        self._set_head(self._head(first.merge(*others)))
        self.temperature_ = 1.0 if self.temperature == "auto" else float(self.temperature)
        return self

    def _extend_classes(self, classes: Any, first: bool) -> None:
        """The classes of a first call, or those of a later one, among which all earlier ones are."""
        if first:
            if classes is None:
                raise HeadstartError("classes must be given at the first call of partial_fit")
            self.classes_, self._kept, self._calls = np.unique(classes), {}, 0
        elif classes is not None:
            wider = np.unique(classes)
            if missing := sorted(set(self.classes_.tolist()) - set(wider.tolist())):
                raise HeadstartError(f"classes lacks {missing}, which were there before; give them all")
            places = np.searchsorted(wider, self.classes_)
            self._kept = {name: replace(each, labels=places[each.labels]) for name, each in self._kept.items()}
            self.classes_ = wider

    def _merged(self, statistics: ClientStatistics) -> ClientStatistics:
        """What a client has said in several calls: one row for each class."""
        return statistics.pooled()

    def _places(self, y: Any) -> Ints:
        """The numbers [n] of classes."""
        places = np.searchsorted(self.classes_, y).clip(max=len(self.classes_) - 1)
        if unknown := sorted(set(np.asarray(y)[self.classes_[places] != y].tolist())):
            raise HeadstartError(f"labels {unknown} are not among classes; partial_fit(classes=…) adds classes")
        return np.asarray(places, np.int64)

    def calibrate(self, X: Any, y: Any) -> Self:
        """Set the temperature of `predict_proba` by held-out features X [n, d] and labels y [n]."""
        scores = self._scores(X)
        self.temperature_ = temperature_of(scores, self._places(y))
        return self

    def _set_head(self, head: LinearHead) -> None:
        self.head_, self.coef_, self.intercept_ = head, head.weight, head.bias

    def decision_function(self, X: Any) -> npt.NDArray[np.float32]:
        """Scores [n, C]; for two classes the margin [n] of the second, as scikit-learn has it."""
        scores = self._scores(X)
        return scores if len(self.classes_) > 2 else scores[:, 1] - scores[:, 0]

    def predict(self, X: Any) -> npt.NDArray[Any]:
        """The class of each row of X [n, d]."""
        best = self._scores(X).argmax(axis=1)
        return np.asarray(self.classes_[best])

    def predict_proba(self, X: Any) -> npt.NDArray[np.float32]:
        """Probabilities [n, C]: the softmax of the scores over ``temperature_``."""
        return np.asarray(softmax(self._scores(X) / np.float32(self.temperature_), axis=1))

    def _scores(self, X: Any) -> npt.NDArray[np.float32]:
        check_is_fitted(self)
        return self.head_.scores(validate_data(self, X, dtype=FLOATS, reset=False))

    @abstractmethod
    def _statistics(self, X: Features, labels: Ints, clients: Ints | None) -> ClientStatistics:
        """What clients [n] say of their features [n, d] and labels [n]."""

    @abstractmethod
    def _head(self, statistics: ClientStatistics) -> LinearHead:
        """The head that statistics make."""

    def _optimism(self, statistics: ClientStatistics) -> tuple[float, Floats]:
        """How much better the head fits its own examples than others, as `ridge_optimism` has it."""
        return 1.0, np.zeros(len(self.classes_))


class FedNCM(_ClosedFormClassifier):
    """Nearest class mean (Legate et al., NeurIPS 2023). Who holds which example does not matter.

    With ``centres`` = k, nearest of k means of each class, by k-means; ``coef_`` then has k rows for each class.
    """

    def __init__(
        self,
        distance: Literal["cosine", "euclidean"] = "cosine",
        temperature: float | Literal["auto"] = "auto",
        centres: int = 1,
        iterations: int = 10,
        random_state: int = 0,
    ) -> None:
        self.distance = distance
        self.temperature = temperature
        self.centres = centres
        self.iterations = iterations
        self.random_state = random_state

    def _statistics(self, X: Features, labels: Ints, clients: Ints | None) -> ClientStatistics:
        if self.centres > 1:
            return k_means(X, labels, len(self.classes_), self.centres, self.iterations, self.random_state)
        return summarise(X, labels, len(self.classes_), clients=clients)[0]

    def _merged(self, statistics: ClientStatistics) -> ClientStatistics:
        if self.centres > 1:
            raise HeadstartError(
                "partial_fit: with several centres every client would have to participate again; use fit"
            )
        return super()._merged(statistics)

    def _head(self, statistics: ClientStatistics) -> LinearHead:
        return replace(ncm_head(statistics, self.distance), centres=self.centres)


class Fed3R(_ClosedFormClassifier, RandomFeaturesEstimator):
    """Ridge regression (Fanì et al., ICML 2024). Who holds which example does not matter."""

    def __init__(
        self,
        ridge: float | Literal["auto"] = "auto",
        bias: bool = True,
        random_features: int = 0,
        random_features_width: float = 1.0,
        random_state: int = 0,
        temperature: float | Literal["auto"] = "auto",
        head: Literal["ridge", "lda"] = "ridge",
        prior: Prior = "empirical",
    ) -> None:
        self.ridge = ridge
        self.bias = bias
        self.random_features = random_features
        self.random_features_width = random_features_width
        self.random_state = random_state
        self.temperature = temperature
        self.head = head
        self.prior = prior

    def _statistics(self, X: Features, labels: Ints, clients: Ints | None) -> ClientStatistics:
        classes = len(self.classes_)
        return summarise(X, labels, classes, clients=clients, moments="full", transform=self._map())[0]

    def _head(self, statistics: ClientStatistics) -> LinearHead:
        if self.head == "lda":
            return ridge_lda_head(statistics, self.ridge, self.bias, self.prior).behind(self._map())
        return ridge_head(statistics, self.ridge, self.bias).behind(self._map())

    def _optimism(self, statistics: ClientStatistics) -> tuple[float, Floats]:
        if self.head == "lda":
            return super()._optimism(statistics)
        return ridge_optimism(statistics, self.head_, self.ridge, self.bias)


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
        temperature: float | Literal["auto"] = "auto",
        head: Literal["ridge", "lda"] = "ridge",
        prior: Prior = "empirical",
    ) -> None:
        self.shrinkage = shrinkage
        self.means_per_client = means_per_client
        self.covariance = covariance
        self.random_state = random_state
        self.within = within
        self.rank = rank
        self.temperature = temperature
        self.head = head
        self.prior = prior

    def _statistics(self, X: Features, labels: Ints, clients: Ints | None) -> ClientStatistics:
        clients = np.arange(len(labels)) if clients is None else clients
        parts = random_parts(labels, clients, self.means_per_client, (self.random_state,))
        if self.rank and (self.covariance != "estimated" or self.within == "estimated"):
            raise HeadstartError("rank: directions are sent beside a trace or a diagonal; set within = 'auto'")
        moments, n_classes, seed = moments_for(self.covariance, self.within), len(self.classes_), (self.random_state,)
        return summarise(
            X, labels, n_classes, clients=clients, parts=parts, moments=moments, rank=self.rank, seed=seed
        )[0]

    def _merged(self, statistics: ClientStatistics) -> ClientStatistics:
        return statistics if self.means_per_client > 1 else statistics.pooled()

    def _head(self, statistics: ClientStatistics) -> LinearHead:
        return cof_head(statistics, self.shrinkage, self.covariance, self.within, self.head, self.prior)


def _number(client: Any) -> int:
    """A number of a client that depends on its name alone: what its random parts are drawn from."""
    return client if isinstance(client, int) and client >= 0 else zlib.crc32(str(client).encode())
