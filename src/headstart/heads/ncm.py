"""Nearest class mean: the head of FedNCM (Legate et al., NeurIPS 2023)."""

from __future__ import annotations

from typing import Literal

import numpy as np

from headstart.core.statistics import ClientStatistics
from headstart.errors import HeadstartError
from headstart.heads.linear import LinearHead, unit_rows


def ncm_head(statistics: ClientStatistics, distance: Literal["cosine", "euclidean"]) -> LinearHead:
    """Class means as a linear head.

    Cosine (the paper): w_c = μ_c / ‖μ_c‖, b = 0. Euclidean: argmin ‖f − μ_c‖² is argmax μ_c·f − ‖μ_c‖²/2.
    """
    total = statistics.pooled()
    if not total.counted and distance == "euclidean":
        raise HeadstartError("distances to class means need the number of examples of each class")
    means = total.sums / total.counts[:, None]  # in a direction the count cancels
    if distance == "euclidean":
        return LinearHead.from_classes(total.n_classes, total.labels, means, -0.5 * np.sum(means**2, axis=1))
    weight, directed, _ = unit_rows(means)
    if not directed.any():
        raise HeadstartError("every class mean is zero, so none has a direction; use distance = 'euclidean'")
    # A class whose mean is exactly zero has no direction to be near to: it is masked, it does not win with a zero.
    present = total.labels[directed]
    return LinearHead.from_classes(total.n_classes, present, weight[directed], np.zeros(len(present)))
