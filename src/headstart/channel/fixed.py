"""Fixed-point numbers: sums of them are exact, whatever the order."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from headstart.core.message import Array
from headstart.errors import HeadstartError

BITS = 24
"""Binary places of what clients send to a secure sum."""


def to_fixed(values: Mapping[str, Array], clients: int, bits: int) -> dict[str, npt.NDArray[np.int64]]:
    """The float64 arrays as integers with `bits` fractional bits; refused where `clients` of them could overflow."""
    if not values:
        raise HeadstartError("a secure sum needs at least one array of values")
    largest = (2**63 - 1) // clients
    limit = float(largest)
    if int(limit) > largest:
        limit = math.nextafter(limit, 0.0)
    fixed = {}
    for name, array in values.items():
        array = np.asarray(array)
        if array.dtype != np.float64:
            raise HeadstartError(f"array {name!r} is {array.dtype}; a secure sum takes float64, convert it first")
        if not np.isfinite(array).all():
            raise HeadstartError(f"array {name!r} holds NaN or infinity, which a secure sum cannot carry")
        with np.errstate(over="ignore"):
            rounded = np.asarray(np.rint(np.ldexp(array, bits)))
        if rounded.size and np.abs(rounded).max() > limit:
            raise HeadstartError(
                f"array {name!r} reaches {float(np.abs(array).max())!r} in size; with {clients} clients and {bits} "
                f"fractional bits the largest value allowed is {math.ldexp(limit, -bits)!r}: scale the values "
                f"down or use fewer bits"
            )
        fixed[name] = rounded.astype(np.int64)
    return fixed


def from_fixed(array: npt.NDArray[np.int64], bits: int) -> npt.NDArray[np.float64]:
    """Integers with `bits` fractional bits as float64, rounded once."""
    return np.asarray(np.ldexp(array.astype(np.float64), -bits), dtype=np.float64)
