"""Linear discriminant analysis: Gaussian classes of one covariance, from the same statistics as the regressions."""

from __future__ import annotations

from typing import Literal

import numpy as np

from headstart.core.statistics import ClientStatistics, Floats
from headstart.errors import HeadstartError
from headstart.heads.linear import LinearHead
from headstart.heads.ridge import ridge_head, solve

Prior = Literal["empirical", "uniform"]


def lda_head(total: ClientStatistics, weight: Floats, prior: Prior, **notes: float) -> LinearHead:
    """w_c = Σ⁻¹ μ_c, b_c = −½ μ_cᵀ Σ⁻¹ μ_c + log π_c; rows keep their length.

    total: one row per class; weight: Σ⁻¹ μ [d, C]. π_c is the share of the class, or the same for all.
    """
    if not total.counted:
        raise HeadstartError("class means need the number of examples of each class; use head = 'ridge'")
    means = total.sums / total.counts[:, None]
    shares = total.counts / total.counts.sum() if prior == "empirical" else np.full(len(means), 1 / len(means))
    bias = -0.5 * np.einsum("cd,dc->c", means, weight) + np.log(shares)
    return LinearHead.from_classes(total.n_classes, total.labels, weight.T, bias, **notes)


def ridge_lda_head(
    statistics: ClientStatistics, ridge: float | Literal["auto"], bias: bool, prior: Prior
) -> LinearHead:
    """From the Gram matrix: Σ = (XᵀX − Σ_c N_c μ_c μ_cᵀ + λI) / (N − C), with the λ of the ridge regression."""
    total = statistics.pooled()
    freedom = int(total.counts.sum()) - len(total.labels)
    chosen = ridge_head(total, ridge, bias).notes["ridge"] if ridge == "auto" else float(ridge)
    if total.moments is None or not total.counted or freedom == 0:
        raise HeadstartError("head = 'lda' needs the Gram matrix, the class counts, and a class of two examples")
    means = total.sums / total.counts[:, None]
    weight = solve(total.moments - means.T @ total.sums, freedom * means.T, chosen, "ridge")
    return lda_head(total, weight, prior, ridge=chosen)
