"""Covariances from class means: the head of FedCOF (Goswami et al., 2025, equations 7 to 11)."""

from __future__ import annotations

from typing import Literal

import numpy as np
from scipy import linalg

from headstart.core.statistics import ClientStatistics, Floats, Moments
from headstart.errors import HeadstartError
from headstart.heads.lda import Prior, lda_head
from headstart.heads.linear import LinearHead, unit_rows
from headstart.heads.ridge import solve

Covariance = Literal["estimated", "full", "diagonal", "spherical"]

MOMENTS_FOR: dict[Covariance, Moments | None] = {
    "estimated": None,
    "full": "full",
    "diagonal": "diagonal",
    "spherical": "diagonal",
}
"""The second moments that clients must send for each kind of covariance."""

_BLOCK = 4096


def cof_head(
    statistics: ClientStatistics,
    shrinkage: float | Literal["auto"],
    covariance: Covariance,
    head: Literal["ridge", "lda"] = "ridge",
    prior: Prior = "empirical",
) -> LinearHead:
    """W = Ĝ⁻¹ B, rows scaled to length one, with Ĝ = Σ_c (N_c − 1)(Σ̂_c + γI) + N μ_g μ_gᵀ and B = [N_c μ_c].

    "estimated": Σ̂_c = 1/(K_c − 1) Σ_k n_kc (μ_kc − μ_c)(μ_kc − μ_c)ᵀ from the means of the K_c rows of class c.
    All classes together are one matrix product of scaled deviations; no d × d matrix per class is ever held.
    The oracles need second moments: Σ_c (N_c − 1) S_c = XᵀX − Σ_c N_c μ_c μ_cᵀ ("full"), its diagonal ("diagonal"),
    or the mean of its diagonal ("spherical").

    ``head = "lda"``: linear discriminant analysis with Σ = Σ_c (N_c − 1) Σ̂_c / (N − C) + γI instead (`lda_head`).

    One example of each class, or one class alone, has no Σ̂_c to solve with: the head is then that of the class means,
    which W tends to as γ grows, and later rounds may bring more.
    """
    total = statistics.pooled()
    freedom = int(total.counts.sum()) - len(total.labels)
    means = total.sums / total.counts[:, None]
    notes = {}
    if freedom == 0 or len(total.labels) == 1:
        weight = means.T
    else:
        weight, notes["shrinkage"] = _solved(statistics, total, means, freedom, shrinkage, covariance, head == "lda")
    if head == "lda":
        return lda_head(total, weight, prior, **notes)
    rows, directed, _ = unit_rows(np.ascontiguousarray(weight.T))
    if not directed.any():
        raise HeadstartError("every class mean is zero; there is nothing to tell the classes apart by")
    present = total.labels[directed]
    return LinearHead.from_classes(total.n_classes, present, rows[directed], np.zeros(len(present)), **notes)


def _solved(
    statistics: ClientStatistics,
    total: ClientStatistics,
    means: Floats,
    freedom: int,
    shrinkage: float | Literal["auto"],
    covariance: Covariance,
    lda: bool,
) -> tuple[Floats, float]:
    """Ĝ⁻¹ B [d, C], or Σ⁻¹ μ, and γ; means: [C, d], freedom: N − C."""
    scatter, known = (
        _estimated_scatter(statistics, total, means)
        if covariance == "estimated"
        else (_exact_scatter(total, means, covariance), freedom)
    )
    centre = total.sums.sum(axis=0, keepdims=True) / np.sqrt(total.counts.sum())
    chosen = _auto(scatter, known, means, centre, freedom) if shrinkage == "auto" else float(shrinkage)
    targets = total.sums.T.astype(np.float64)
    if lda:  # without the common mean, and targets of the classes' means
        centre, targets = np.zeros_like(centre), freedom * means.T
    if scatter.shape[0] == scatter.shape[1]:
        weight = solve(scatter + centre.T @ centre, targets, chosen * freedom, "shrinkage × (examples − classes)")
    else:
        weight = _solve_dual(np.vstack([scatter, centre]), targets, chosen * freedom)
    return weight, chosen


def _estimated_scatter(statistics: ClientStatistics, total: ClientStatistics, means: Floats) -> tuple[Floats, int]:
    """Σ_c (N_c − 1) Σ̂_c, and the number of examples beyond one per class behind it.

    The scatter is ZᵀZ of the rows z_p = √(n_p (N_c − 1)/(K_c − 1)) (μ_p − μ_c). With fewer rows than dimensions the
    factor Z [P, d] itself is returned, otherwise ZᵀZ [d, d], added up in blocks so that Z is never held.
    A class that a single row speaks of has no spread to estimate and adds nothing.
    """
    classes = np.searchsorted(total.labels, statistics.labels)
    holders = np.bincount(classes, minlength=len(total.labels))
    scale = (total.counts - 1) / np.maximum(holders - 1, 1)
    weights = np.sqrt(statistics.counts * scale[classes])
    known = int((total.counts - 1)[holders > 1].sum())

    def rows(start: int, stop: int) -> Floats:
        block = statistics.sums[start:stop] / statistics.counts[start:stop, None]
        block -= means[classes[start:stop]]
        block *= weights[start:stop, None]
        return np.asarray(block)

    if len(classes) + 1 < total.dim:
        return rows(0, len(classes)), known
    scatter = np.zeros((total.dim, total.dim))
    for start in range(0, len(classes), _BLOCK):
        block = rows(start, start + _BLOCK)
        scatter += block.T @ block
    return scatter, known


def _exact_scatter(total: ClientStatistics, means: Floats, covariance: Covariance) -> Floats:
    """Σ_c (N_c − 1) S_c [d, d] from the second moments and the class means."""
    moments = total.moments
    if moments is None or (covariance == "full" and moments.ndim != 2):
        raise HeadstartError(f"covariance = {covariance!r} needs second moments of the features; these have none")
    if covariance == "full":
        return np.asarray(moments - means.T @ total.sums)
    squares = moments.diagonal() if moments.ndim == 2 else moments
    diagonal = np.maximum(squares - np.einsum("cd,cd->d", means, total.sums), 0.0)
    return np.diag(diagonal if covariance == "diagonal" else np.full(len(diagonal), diagonal.mean()))


def _auto(scatter: Floats, known: int, means: Floats, centre: Floats, freedom: int) -> float:
    """Half the mean within-class variance per dimension, so that the shrinkage follows the scale of the features.

    Where no class is held twice, or none varies, the spread of the class means is the only scale there is.
    """
    spread = np.trace(scatter) if scatter.shape[0] == scatter.shape[1] else np.vdot(scatter, scatter)
    between = means - means.mean(axis=0)
    dim = means.shape[1]
    # What rounding leaves of classes that do not vary: less shrinkage than this leaves the Gram matrix singular.
    least = 4 * dim * np.finfo(np.float64).eps * (spread + np.vdot(centre, centre)) / freedom
    for variance, count in ((spread, known), (np.vdot(between, between), len(means))):
        if count and (chosen := 0.5 * variance / (dim * count)) > least:
            return float(chosen)
    raise HeadstartError(
        "the features do not vary beside their size, so shrinkage = 'auto' has no scale to follow; check or centre them"
    )


def _solve_dual(factor: Floats, targets: Floats, ridge: float) -> Floats:
    """(ZᵀZ + aI)⁻¹ B through the smaller matrix ZZᵀ + aI (Woodbury)."""
    if ridge <= 0:
        raise HeadstartError(
            f"shrinkage = 0 leaves the Gram matrix singular: {len(factor) - 1} means do not span "
            f"{factor.shape[1]} dimensions; raise it, or set it to 'auto'"
        )
    try:
        inner = linalg.cho_factor(factor @ factor.T + ridge * np.eye(len(factor)), check_finite=False)
    except linalg.LinAlgError:
        raise HeadstartError(
            f"shrinkage × (examples − classes) = {ridge:g} is nothing beside the spread of the class means, and leaves "
            "the Gram matrix singular; raise it, or set it to 'auto'"
        ) from None
    return np.asarray((targets - factor.T @ linalg.cho_solve(inner, factor @ targets)) / ridge)
