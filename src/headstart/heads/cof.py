"""Covariances from class means, and from what clients tell besides: the head of FedCOF (Goswami et al., 2025, equations
7 to 11)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Literal

import numpy as np
from scipy import linalg

from headstart.core.statistics import ClientStatistics, Floats, Ints, Moments
from headstart.errors import HeadstartError
from headstart.heads.lda import Prior, lda_head
from headstart.heads.linear import LinearHead, unit_rows
from headstart.heads.ridge import solve

Covariance = Literal["estimated", "full", "diagonal", "spherical"]

Within = Literal["estimated", "trace", "diagonal", "auto"]

_MOMENTS: dict[str, Moments | None] = {
    "estimated": None,
    "full": "full",
    "diagonal": "diagonal",
    "spherical": "diagonal",
    "trace": "trace",
    "auto": "trace",
}


def moments_for(covariance: Covariance, within: Within) -> Moments | None:
    """The second moments that clients must send for a kind of covariance."""
    return _MOMENTS[within if covariance == "estimated" else covariance]


_BLOCK = 4096


def cof_head(
    statistics: ClientStatistics,
    shrinkage: float | Literal["auto"],
    covariance: Covariance = "estimated",
    within: Within = "estimated",
    head: Literal["ridge", "lda"] = "ridge",
    prior: Prior = "empirical",
) -> LinearHead:
    """W = Ĝ⁻¹ B, rows scaled to length one, with Ĝ = Σ_c (N_c − 1)(Σ̂_c + γI) + N μ_g μ_gᵀ and B = [N_c μ_c].

    "estimated": Σ̂_c = 1/(K_c − 1) Σ_k n_kc (μ_kc − μ_c)(μ_kc − μ_c)ᵀ from the means of the K_c rows of class c, or,
    by ``within``, from these and what clients tell of the scatter around them (`_told_scatter`).
    All classes together are one matrix product of scaled deviations; no d × d matrix per class is ever held.
    The oracles need second moments: Σ_c (N_c − 1) S_c = XᵀX − Σ_c N_c μ_c μ_cᵀ ("full"), its diagonal ("diagonal"),
    or the mean of its diagonal ("spherical").

    ``head = "lda"``: linear discriminant analysis with Σ = Σ_c (N_c − 1) Σ̂_c / (N − C) + γI instead (`lda_head`).

    One example of each class, or one class alone, has no Σ̂_c to solve with: the head is then that of the class means,
    which W tends to as γ grows, and later rounds may bring more.
    """
    total = statistics.pooled()
    means = total.sums / total.counts[:, None]
    notes: dict[str, float] = {}
    if total.counts.sum() == len(total.labels) or len(total.labels) == 1:
        weight = means.T
    else:
        weight, notes = _solved(statistics, total, means, shrinkage, covariance, within, head == "lda")
    if head == "lda":
        return lda_head(total, weight, prior, **notes)
    rows, directed, _ = unit_rows(np.ascontiguousarray(weight.T))
    if not directed.any():
        raise HeadstartError("every class mean is zero; there is nothing to tell the classes apart by")
    present = total.labels[directed]
    return LinearHead.from_classes(total.n_classes, present, rows[directed], np.zeros(len(present)), **notes)


@dataclass(frozen=True, eq=False)
class _Scatter:
    """The scatter within the classes, FᵀF + diag(rest), as far as it is known."""

    factor: Floats
    """F [Q, d], or, where Q is d or more, FᵀF [d, d]."""
    spread: float
    """What the within-class variance is taken from: a trace."""
    known: int
    """The number of examples beyond one per class behind it."""
    rest: Floats = field(default_factory=lambda: np.zeros(1))
    """[1] or [d]."""
    common: float = 1.0
    """How much N μ_g μ_gᵀ counts beside it."""
    notes: dict[str, float] = field(default_factory=dict)


def _solved(
    statistics: ClientStatistics,
    total: ClientStatistics,
    means: Floats,
    shrinkage: float | Literal["auto"],
    covariance: Covariance,
    within: Within,
    lda: bool,
) -> tuple[Floats, dict[str, float]]:
    """Ĝ⁻¹ B [d, C], or Σ⁻¹ μ, and what was chosen; means: [C, d]."""
    freedom = int(total.counts.sum()) - len(total.labels)
    if covariance == "estimated":
        scatter = _told_scatter(statistics, total, means, within)
    else:
        exact = _exact_scatter(total, means, covariance)
        scatter = _Scatter(exact, float(np.trace(exact)), freedom)
    centre = total.sums.sum(axis=0, keepdims=True) / np.sqrt(total.counts.sum())
    chosen = _auto(scatter, means, centre, freedom) if shrinkage == "auto" else float(shrinkage)
    targets = total.sums.T.astype(np.float64)
    if lda:  # without the common mean, and targets of the classes' means
        centre, targets = np.zeros_like(centre), freedom * means.T
    ridge, rest, factor, centre = chosen * freedom, scatter.rest, scatter.factor, centre * np.sqrt(scatter.common)
    if len(factor) == total.dim:
        gram = factor + centre.T @ centre
        gram[np.diag_indices(total.dim)] += rest
        weight = solve(gram, targets, ridge, "shrinkage × (examples − classes)")
    else:
        weight = _solve_dual(np.vstack([factor, centre]), targets, rest + ridge)
    return weight, {"shrinkage": chosen, **scatter.notes}


def _told_scatter(statistics: ClientStatistics, total: ClientStatistics, means: Floats, within: Within) -> _Scatter:
    """Σ_c f_c B_c, the directions that clients told, and what they told of the rest, by the kind of `within`.

    B_c = Σ_k n_kc (μ_kc − μ_c)(μ_kc − μ_c)ᵀ. "estimated": f_c = (N_c − 1)/(K_c − 1). The others have f_c = 1, which is
    exact, and add the scatter within clients of trace T: the directions that they told, and the rest, of trace R,
    spread over all dimensions ("trace"), or as its diagonal ("diagonal"). "auto": the share a is the paper's estimate
    E, in units of what was told, with as much of N μ_g μ_gᵀ beside it as the paper has, and 1 − a is "trace": with
    a = 1 the head is the paper's. Where clients differ by chance alone, E has in expectation the trace of the whole
    scatter. Where it has ratio times that, 1/ratio of E is chance, and the rest is how clients' features differ. Where
    chance is less than a standard error e of E's trace, √(tr E²)/tr E times that of an entry (`_error`), it cannot be
    told from the rest, and counts for less: a is min(1, 1/(e · ratio)), times the part of N − C that is in classes
    which several hold, the only ones that E is of, and times R/T, since what was told in directions has its shape
    already.
    """
    statistics = statistics.sketched_directions()
    classes = np.searchsorted(total.labels, statistics.labels)
    holders = np.bincount(classes, minlength=len(total.labels))
    inflation = np.where(holders > 1, (total.counts - 1) / np.maximum(holders - 1, 1), 0.0)
    known, freedom = int((total.counts - 1)[holders > 1].sum()), int((total.counts - 1).sum())
    if within == "estimated":
        factor = _factor(statistics, means, classes, inflation)
        spread = np.trace(factor) if len(factor) == total.dim else np.vdot(factor, factor)
        return _Scatter(factor, float(spread), known)
    between, inflated = np.zeros((2, total.dim))  # diagonals of B and of E
    for part, block in _deviations(statistics, means, classes, np.sqrt(statistics.counts)):
        squares = np.square(block)
        between += squares.sum(axis=0)
        inflated += inflation[classes[part]] @ squares
    estimate, inside = float(inflated.sum()), _told(statistics, within)
    error = _error(total.counts, holders)
    if 3 * error < 1:
        most = statistics.folded(freedom / known * inflated / (1 - 3 * error) - between)
        inside, statistics = _at_most(most, inside, statistics)
    spread, whole = float(between.sum() + inside.sum()), float(inside.sum())
    if statistics.directions is not None:
        squares = np.square(statistics.directions, dtype=np.float64).sum(axis=0)
        inside = np.maximum(inside - statistics.folded(squares), 0.0)
    if within != "auto":
        rest = inside if within == "diagonal" else inside / total.dim
        return _Scatter(_factor(statistics, means, classes, np.ones(len(means))), spread, freedom, rest)
    left = float(inside.sum())
    trusted = spread / freedom * known / estimate / error if estimate > 0 else 0.0
    if 0 < trusted < 1:  # the trace of many dimensions has a smaller error than an entry
        square = _factor(replace(statistics, directions=None), means, classes, inflation)
        trusted *= estimate / float(np.linalg.norm(square if len(square) == total.dim else square @ square.T))
    notes = {"means_share": _rounded(min(1.0, trusted) * known / freedom)}
    share = notes["means_share"] * left / whole if whole > 0 else 0.0
    scale = share * (float(between.sum()) + left) / estimate if share else 0.0
    rest = np.array([(1 - share) * left / total.dim])
    factor = _factor(statistics, means, classes, 1 - share + scale * inflation)
    return _Scatter(factor, spread, freedom, rest, 1 - share + scale, notes)


def _told(statistics: ClientStatistics, within: Within) -> Floats:
    """The trace [1] or the diagonal [d] of the scatter around the rows' means."""
    moments = statistics.moments
    if moments is None or moments.shape != (statistics.dim if within == "diagonal" else 1,):
        raise HeadstartError(f"within = {within!r} needs second moments of the features; these have none")
    return np.maximum(statistics.around_means(), 0.0)


def _error(counts: Ints, holders: Ints) -> float:
    """The relative standard error of an entry of E's diagonal where clients differ by chance; counts, holders: [C].

    Of normal features an entry of B_c is a variance times χ² of K_c − 1 degrees of freedom, so that E's has the
    relative variance 2/f, 1/f = Σ_c (N_c − 1)²/(K_c − 1) / (Σ_c N_c − 1)² over the classes that several hold.
    """
    freedom = counts[holders > 1] - 1.0
    if not freedom.sum():
        return np.inf
    return float(np.sqrt(2 * (freedom**2 / (holders[holders > 1] - 1)).sum()) / freedom.sum())


def _at_most(most: Floats, inside: Floats, statistics: ClientStatistics) -> tuple[Floats, ClientStatistics]:
    """What was told of the scatter around the means, and its directions, no larger than ``most`` ([1] or [d]).

    E has the scatter's diagonal in expectation, or more, since clients' means differ by chance at least: what is told
    beyond three standard errors is a client's lie, and counts for no more than that.
    """
    if (inside <= most).all():
        return inside, statistics
    part = np.clip(most / np.maximum(inside, np.finfo(np.float64).tiny), 0.0, 1.0)
    if statistics.directions is not None:
        statistics = replace(statistics, directions=statistics.directions * np.sqrt(part))
    return part * inside, statistics


def _deviations(
    statistics: ClientStatistics, means: Floats, classes: Ints, weights: Floats
) -> Iterator[tuple[slice, Floats]]:
    """w_p (μ_p − μ_c) of the rows p, some at a time, so that they are never all held; weights: [P]."""
    for start in range(0, len(classes), _BLOCK):
        part = slice(start, start + _BLOCK)
        block = statistics.sums[part] / statistics.counts[part, None]
        block -= means[classes[part]]
        block *= weights[part, None]
        yield part, np.asarray(block)


def _factor(statistics: ClientStatistics, means: Floats, classes: Ints, factors: Floats) -> Floats:
    """F [Q, d] with FᵀF = Σ_c f_c B_c and the directions told; where Q is not below d, FᵀF [d, d]."""
    told = () if statistics.directions is None else (statistics.directions.astype(np.float64),)
    weights = np.sqrt(statistics.counts * factors[classes])
    blocks = chain((block for _, block in _deviations(statistics, means, classes, weights)), told)
    if len(classes) + sum(map(len, told)) + 1 < statistics.dim:
        return np.concatenate(list(blocks))
    scatter = np.zeros((statistics.dim, statistics.dim))
    for block in blocks:
        scatter += block.T @ block
    return scatter


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


def _auto(scatter: _Scatter, means: Floats, centre: Floats, freedom: int) -> float:
    """Half the mean within-class variance per dimension, so that the shrinkage follows the scale of the features.

    Where no class is held twice, or none varies, the spread of the class means is the only scale there is.
    """
    between = means - means.mean(axis=0)
    dim = means.shape[1]
    # What rounding leaves of classes that do not vary: less shrinkage than this leaves the Gram matrix singular.
    least = 4 * dim * np.finfo(np.float64).eps * (scatter.spread + np.vdot(centre, centre)) / freedom
    for variance, count in ((scatter.spread, scatter.known), (np.vdot(between, between), len(means))):
        if count and (chosen := 0.5 * variance / (dim * count)) > least:
            return _rounded(float(chosen))
    raise HeadstartError(
        "the features do not vary beside their size, so shrinkage = 'auto' has no scale to follow; check or centre them"
    )


def _rounded(chosen: float) -> float:
    """To ten digits: sums of squares differ in their last bits with the order in which clients are added up."""
    return float(f"{chosen:.10g}")


def _solve_dual(factor: Floats, targets: Floats, ridge: Floats) -> Floats:
    """(ZᵀZ + D)⁻¹ B through the smaller matrix ZZᵀ + aI (Woodbury); ridge: [1] for D = aI, or [d] its diagonal."""
    if ridge.min() <= 0:
        raise HeadstartError(
            f"shrinkage = 0 leaves the Gram matrix singular: {len(factor) - 1} means do not span "
            f"{factor.shape[1]} dimensions; raise it, or set it to 'auto'"
        )
    if len(ridge) > 1:  # in units in which D is one
        scale = 1 / np.sqrt(ridge)
        return scale[:, None] * _solve_dual(factor * scale, scale[:, None] * targets, np.ones(1))
    try:
        inner = linalg.cho_factor(factor @ factor.T + ridge * np.eye(len(factor)), check_finite=False)
    except linalg.LinAlgError:
        raise HeadstartError(
            f"shrinkage × (examples − classes) = {ridge[0]:g} is nothing beside the spread of the class means, and "
            "leaves the Gram matrix singular; raise it, or set it to 'auto'"
        ) from None
    return np.asarray((targets - factor.T @ linalg.cho_solve(inner, factor @ targets)) / ridge)
