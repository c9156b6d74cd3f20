"""Ridge regression on one-hot labels: the head of Fed3R (Fanì et al., ICML 2024)."""

from __future__ import annotations

from typing import Literal

import numpy as np
from scipy import linalg

from headstart.core.statistics import ClientStatistics, Floats
from headstart.errors import HeadstartError
from headstart.heads.linear import LinearHead, unit_rows

# Of the mean eigenvalue of the Gram matrix: a ridge that makes it regular and no difference otherwise.
LEAST_RIDGE = 1e-6


def ridge_head(statistics: ClientStatistics, ridge: float | Literal["auto"], bias: bool) -> LinearHead:
    """W = (G + λI)⁻¹ B with G = XᵀX and B = XᵀY, each row scaled to length one with its bias.

    ``bias`` adds a column of ones to X, regularised like the others, as the official code does: the statistics
    already hold its entries, the sums and the count. Where λ is chosen here, the column has the root mean square of the
    features instead of 1, so that the head follows their scale. Without counts there is no bias and no
    cross-validation: the eigenvalues of the Gram matrix are not below the noise (`ClientStatistics.solvable`), which
    does what a ridge is for, and the λ that is chosen only keeps the solve regular.
    """
    total = statistics.pooled()
    gram, targets, size = _system(total, ridge, bias)
    if ridge == "auto" and not total.counted:
        ridge = LEAST_RIDGE * float(np.trace(gram)) / total.dim
    if ridge == "auto":
        weight, chosen = cross_validated(gram, targets, int(total.counts.sum()))
    else:
        weight, chosen = solve(gram, targets, ridge, "ridge"), float(ridge)
    rows, offsets = (weight[:-1].T, size * weight[-1]) if bias else (weight.T, np.zeros(weight.shape[1]))
    rows, directed, lengths = unit_rows(rows)
    if not directed.any():
        raise HeadstartError("every feature is zero; there is nothing to regress on")
    return LinearHead.from_classes(
        total.n_classes, total.labels[directed], rows[directed], (offsets / lengths[:, 0])[directed], ridge=chosen
    )


def _system(total: ClientStatistics, ridge: float | Literal["auto"], bias: bool) -> tuple[Floats, Floats, float]:
    """XᵀX and XᵀY, with a column of a constant in X where there is a bias, and that constant."""
    if total.moments is None or total.moments.ndim != 2:
        raise HeadstartError("ridge regression needs the Gram matrix of the features; this message has none")
    gram, targets = total.moments, total.sums.T.astype(np.float64)
    if not bias:
        return gram, targets, 1.0
    if not total.counted:
        raise HeadstartError("a bias needs the number of examples of each class; set bias = false")
    count = total.counts.sum(dtype=np.float64)
    size = float(np.sqrt(np.trace(gram) / (count * total.dim))) if ridge == "auto" else 1.0
    column = size * total.sums.sum(axis=0)[:, None]
    gram = np.block([[gram, column], [column.T, size**2 * count]])
    return gram, np.vstack([targets, size * total.counts[None, :]]), size


def ridge_optimism(
    statistics: ClientStatistics, head: LinearHead, ridge: float | Literal["auto"], bias: bool
) -> tuple[float, Floats]:
    """How much better the head fits its own examples than others: a factor, and a score [C] of an example's own class.

    Without the example, the regression would answer (ŷ − h y)/(1 − h) for it, h being its leverage: its scores of the
    head are then s · factor, less ``own`` of its class, with factor = 1/(1 − h) and own = h / ((1 − h) ‖w_c‖). Here h
    is the mean leverage tr(G (G + λI)⁻¹) / N, as in generalised cross-validation, and ‖w_c‖ the length that the row
    was scaled from: (G + λI) w_c is known.
    """
    total = statistics.pooled()
    gram, targets, size = _system(total, ridge, bias)
    chosen = head.notes["ridge"]
    values = np.maximum(linalg.eigvalsh(gram, check_finite=False), 0.0)
    freedom = float(np.sum(values / (values + chosen))) if chosen else float(np.count_nonzero(values))
    leverage = min(freedom / int(total.counts.sum()), 0.99)
    rows = head.weight[total.labels].astype(np.float64)
    if bias:
        rows = np.column_stack([rows, head.bias[total.labels] / size])
    there = np.isfinite(rows).all(axis=1)
    own = np.zeros(total.n_classes)
    reached = np.linalg.norm(rows[there] @ gram + chosen * rows[there], axis=1)
    lengths = np.linalg.norm(targets[:, there], axis=0) / reached
    own[total.labels[there]] = leverage / ((1 - leverage) * lengths)
    return 1 / (1 - leverage), own


def cross_validated(gram: Floats, targets: Floats, examples: int, squares: float | None = None) -> tuple[Floats, float]:
    """The ridge solution [d, C] whose λ has the least generalised cross-validation error, and that λ.

    With the nonzero eigenvalues e and eigenvectors U of the Gram matrix, q = ‖UᵀB‖²/e is the part of the targets along
    each direction of the examples; squares: ‖Y‖², which is N for one-hot labels. Of the targets, a ridge leaves
    residual(λ) = Σ q (λ/(e+λ))² + (‖Y‖² − Σ q), with N − Σ e/(e+λ) = Σ λ/(e+λ) + (N − rank) degrees of freedom to
    spare; the criterion is residual/(freedom to spare)² (Golub, Heath, Wahba 1979). Written so, nothing cancels when
    there are fewer examples than dimensions. One eigendecomposition; each λ then costs O(d). The clients send nothing
    more.
    """
    values, vectors = linalg.eigh(gram, check_finite=False)
    if values[-1] <= 0:
        raise HeadstartError("every feature is zero; there is nothing to regress on")
    # The examples span at most as many directions as there are examples; rounding makes the other eigenvalues.
    kept = values > len(gram) * np.finfo(np.float64).eps * values[-1]
    kept[: max(0, len(values) - examples)] = False
    values, vectors = values[kept], vectors[:, kept]
    projected = vectors.T @ targets
    explained = np.einsum("dc,dc->d", projected, projected) / values
    spare = examples - len(values)
    unexplained = max((examples if squares is None else squares) - explained.sum(), 0.0) if spare else 0.0

    def criterion(ridge: float) -> float:
        left = ridge / (values + ridge)
        return float((np.sum(explained * left**2) + unexplained) / (np.sum(left) + spare) ** 2)

    # Below the rounding of the largest eigenvalue a ridge has no effect; above it everything is shrunk to zero.
    ridge = min(values[-1] * np.logspace(-12, 1, 261), key=criterion)
    return vectors @ (projected / (values + ridge)[:, None]), float(ridge)


def solve(gram: Floats, targets: Floats, ridge: float, key: str) -> Floats:
    """(G + λI)⁻¹ B [d, C] by Cholesky; a singular system is refused with the key of the recipe that mends it."""
    regularised = gram + ridge * np.eye(len(gram))
    try:
        factor, lower = linalg.cho_factor(regularised, check_finite=False)
        pivots = np.diagonal(factor) ** 2
        singular = pivots.min() <= len(gram) * np.finfo(np.float64).eps * pivots.max()
    except linalg.LinAlgError:
        singular = True
    if singular:
        raise HeadstartError(
            f"{key} = {ridge:g} leaves the {len(gram)} × {len(gram)} Gram matrix singular: "
            f"raise it, to about {1e-6 * np.trace(gram) / len(gram):.1g} or more, or set it to 'auto'"
        )
    return np.asarray(linalg.cho_solve((factor, lower), targets, check_finite=False))
