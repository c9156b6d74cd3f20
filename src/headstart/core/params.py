"""Named arrays, and arithmetic name by name."""

from __future__ import annotations

import numpy as np

from headstart.core.statistics import Floats

Shapes = dict[str, tuple[int, ...]]
Vectors = dict[str, Floats]
"""Arrays by the name of the parameter they belong to, in float64: the server adds and steps in double precision."""


def added(left: Vectors, right: Vectors, factor: float) -> Vectors:
    """left + factor · right, name by name."""
    return {name: value + factor * right[name] for name, value in left.items()}


def zeros(shapes: Shapes) -> Vectors:
    """Zeros of these shapes."""
    return {name: np.zeros(shape) for name, shape in shapes.items()}
