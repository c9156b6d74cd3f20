"""Calibration: the temperature that makes the softmax of a head's scores probabilities (Guo et al., ICML 2017).

One number divides all scores, so that no prediction changes. It is the one of a grid, refined by a parabola, at which
the examples' cross-entropy is least; the sums of the losses at each value of the grid are all that has to be known of
the examples.
"""

from __future__ import annotations

import numpy as np
from scipy.special import logsumexp

from headstart.core.statistics import Features, Floats, Ints

# Of the spread of the scores: wide enough for any head, fine enough for a parabola in between.
_GRID = np.geomspace(1e-3, 1e2, 81)
N_TEMPERATURES = len(_GRID)
_ROWS = 8192


def temperatures(scores: Features) -> Floats:
    """The grid [G] of temperatures to try, by the spread of scores [n, C] over classes; ones where they are equal."""
    there = np.asarray(scores[:, np.isfinite(scores).all(axis=0)], np.float64)
    spread = float(np.std(there - there.mean(axis=1, keepdims=True))) if there.size else 0.0
    return _GRID * spread if spread > 0 else np.ones_like(_GRID)


def losses(scores: Features, labels: Ints, grid: Floats) -> Floats:
    """Cross-entropy [n, G] of examples with these scores [n, C] and labels [n] at each temperature [G]."""
    found = np.empty((len(labels), len(grid)))
    for start in range(0, len(labels), _ROWS):
        block = np.asarray(scores[start : start + _ROWS], np.float64)
        margins = block - block[np.arange(len(block)), labels[start : start + _ROWS]][:, None]
        for place, temperature in enumerate(grid):
            found[start : start + _ROWS, place] = logsumexp(margins / temperature, axis=1)
    return found


def least(grid: Floats, total: Floats) -> float:
    """The temperature with the least loss: the minimum of a parabola through the best of the grid and its neighbours.

    grid, total: [G]. Of several with the same loss, as where every example is far on the right side, the largest. To
    four digits, which is more than the parabola knows: the bits below depend on how many examples were scored at once.
    """
    best, step = len(total) - 1 - int(np.argmin(total[::-1])), 0.0
    if 0 < best < len(grid) - 1:
        before, here, after = total[best - 1 : best + 2]
        curvature = before - 2 * here + after
        step = 0.5 * (before - after) / curvature if curvature > 0 else 0.0
    return float(f"{grid[best] * (grid[1] / grid[0]) ** step:.4g}")


def temperature_of(scores: Features, labels: Ints) -> float:
    """The temperature that calibrates scores [n, C] of examples with labels [n]; those of masked classes do not count.

    1 where no example counts.
    """
    known = np.isfinite(scores[np.arange(len(labels)), labels])
    if not known.any():
        return 1.0
    grid = temperatures(scores[known])
    return least(grid, losses(scores[known], labels[known], grid).sum(axis=0))
