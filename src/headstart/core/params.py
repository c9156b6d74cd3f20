"""Named arrays, and arithmetic name by name."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

Shapes = dict[str, tuple[int, ...]]


class Params(dict[str, Any]):
    """Arrays by the name of the parameter they belong to: x + lr * d, x - y, d / steps, name by name.

    On the server NumPy arrays in float64, which adds and steps in double precision; on clients stacked float32 tensors
    [M, …], and a vector [M] multiplies client by client.
    """

    def __add__(self, other: Mapping[str, Any]) -> Params:
        return Params({name: value + other[name] for name, value in self.items()})

    def __sub__(self, other: Mapping[str, Any]) -> Params:
        return Params({name: value - other[name] for name, value in self.items()})

    def __neg__(self) -> Params:
        return Params({name: -value for name, value in self.items()})

    def __mul__(self, factor: Any) -> Params:
        return Params({name: value * _wide(factor, value) for name, value in self.items()})

    __rmul__ = __mul__

    def __truediv__(self, divisor: Any) -> Params:
        return Params({name: value / _wide(divisor, value) for name, value in self.items()})

    def __or__(self, other: Mapping[str, Any]) -> Params:  # type: ignore[override]
        return Params({**self, **other})

    def select(self, names: Iterable[str]) -> Params:
        """Some of the parameters, by name."""
        return Params({name: self[name] for name in names})

    @property
    def shapes(self) -> Shapes:
        """The shape of each."""
        return {name: tuple(value.shape) for name, value in self.items()}

    @classmethod
    def zeros(cls, shapes: Mapping[str, tuple[int, ...]]) -> Params:
        """Zeros of these shapes, in float64."""
        return cls({name: np.zeros(shape) for name, shape in shapes.items()})


def norm(arrays: Mapping[str, Any]) -> float:
    """Euclidean norm over all names."""
    total = 0.0
    for array in arrays.values():
        values = np.ravel(array).astype(np.float64, copy=False)
        total += float(values @ values)
    return math.sqrt(total)


def clipped(arrays: Mapping[str, Any], longest: float) -> dict[str, Any]:
    """The arrays, scaled down to the norm ``longest`` where theirs is larger."""
    length = norm(arrays)
    if length <= longest:
        return dict(arrays)
    return {name: np.asarray(array * np.float64(longest / length)) for name, array in arrays.items()}


def _wide(factor: Any, like: Any) -> Any:
    """A number as it is; a vector [M] shaped to multiply a stack [M, …], as a tensor where that is one."""
    if np.ndim(factor) == 0:
        return factor
    values = like.new_tensor(factor) if hasattr(like, "new_tensor") else factor
    return values.reshape(-1, *([1] * (like.ndim - 1)))
