"""Ridge regression of numbers, or of labels as −1 and 1, on features: Fed3R for targets that are no classes.

The statistics are those of one class whose vectors are the features with the targets beside them, z = [x, y]: their
Gram matrix holds XᵀX, B = XᵀY and YᵀY, their sum Σx and Σy. So they merge, travel, are checked, summed securely and
hidden by noise like any others.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from headstart.core.statistics import ClientStatistics, Features, Floats
from headstart.core.target import Target
from headstart.errors import HeadstartError
from headstart.heads.linear import LinearHead
from headstart.heads.ridge import LEAST_RIDGE, cross_validated, solve

# Of a sum of squares: what rounding leaves of numbers that do not vary, once their mean is taken off.
_ROUNDING = 1e-12


@dataclass(frozen=True, eq=False)
class Beside:
    """Features [N, d] with targets [N, q] beside them, row by row as they are asked for."""

    features: Features
    targets: Floats

    def __len__(self) -> int:
        return len(self.features)

    def __getitem__(self, rows: Any) -> Floats:
        return np.concatenate([self.features[rows], self.targets[rows]], axis=1, dtype=np.float64)


def encoded(targets: Floats, target: Target) -> Floats:
    """Targets [n, q] as they are regressed on: labels 0 and 1 as −1 and 1, so that a score above 0 says yes."""
    return 2 * targets - 1 if target == "multilabel" else targets


def ridge_of_targets(
    statistics: ClientStatistics, outputs: int, ridge: float | Literal["auto"], bias: bool
) -> tuple[Floats, Floats, float]:
    """Weights [q, d], biases [q] and λ: W = (G + λI)⁻¹ B with G = XᵀX and B = XᵀY.

    ``bias``: an intercept that is not regularised, as in scikit-learn's Ridge: G, B and YᵀY are those of features and
    targets less their means. "auto" is the λ of the least generalised cross-validation error, each target counted in
    units of its own deviation; where nothing varies, the weights are 0 and the biases the means.
    """
    total = statistics.pooled()
    if total.moments is None or total.moments.ndim != 2 or not len(total.labels):
        raise HeadstartError("ridge regression needs the Gram matrix of the features; this message has none")
    dim = total.dim - outputs
    gram, examples, means = total.moments, int(total.counts.sum()), np.zeros(total.dim)
    if bias:
        if not total.counted:
            raise HeadstartError("a bias needs the number of examples; set bias = false")
        means = total.sums[0].astype(np.float64) / examples
        gram = gram - examples * np.outer(means, means)
    targets, squares = gram[:dim, dim:], np.diagonal(gram)[dim:]
    gram = gram[:dim, :dim]
    if ridge == "auto" and not total.counted:
        ridge = LEAST_RIDGE * float(np.trace(gram)) / dim
    if ridge == "auto":
        sizes = _ROUNDING * np.diagonal(total.moments)
        varies = squares > sizes[dim:]
        if bias and not (varies.any() and np.trace(gram) > sizes[:dim].sum()):  # the mean is all there is to know
            return np.zeros((outputs, dim)), means[dim:], 0.0
        scale = np.sqrt(np.where(varies, squares, 1.0))
        weight, chosen = cross_validated(gram, targets / scale, examples - bias, float(varies.sum()))
        weight = weight * scale
    else:
        weight, chosen = solve(gram, targets, ridge, "ridge"), float(ridge)
    return weight.T, means[dim:] - means[:dim] @ weight, chosen


def target_head(statistics: ClientStatistics, outputs: int, ridge: float | Literal["auto"], bias: bool) -> LinearHead:
    """The head of `ridge_of_targets`: weight [q, d], bias [q]."""
    weight, offsets, chosen = ridge_of_targets(statistics, outputs, ridge, bias)
    everything: npt.NDArray[np.int64] = np.arange(outputs)
    return LinearHead.from_classes(outputs, everything, weight, offsets, ridge=chosen)
