"""Fixed-point numbers: sums of them are exact, whatever the order.

How many binary places an array gets follows from a public exponent: as many as let the values of all clients add up
within 63 bits. The exponent is that of the largest value of any client, rounded up to a multiple of 16: it tells a
client's largest value within a factor of 65,536 and nothing else of it. For the largest value of all, 48 bits or more
are left, less those that count the clients.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
import numpy.typing as npt

from headstart.core.message import Array
from headstart.errors import HeadstartError

GRID = 16
"""Exponents are multiples of this."""
SMALLEST, LARGEST = -1072, 1024
"""Exponents of the smallest and of the largest numbers that float64 has."""

Fixed = npt.NDArray[np.int64]


def check_values(values: Mapping[str, Array], clients: int) -> None:
    """Refuse what a sum cannot carry: no arrays, other types than float64 and int64, NaN, integers that overflow."""
    if not values:
        raise HeadstartError("secure aggregation needs at least one array of values")
    for name, array in values.items():
        if array.dtype == np.int64:
            largest = max(abs(int(array.min(initial=0))), abs(int(array.max(initial=0))))
            if largest > (2**63 - 1) // clients:
                raise HeadstartError(f"array {name!r} holds {largest}, which {clients} clients cannot add in 64 bits")
        elif array.dtype != np.float64:
            raise HeadstartError(f"array {name!r} is {array.dtype}; secure aggregation takes float64 or int64")
        elif not np.isfinite(array).all():
            raise HeadstartError(f"array {name!r} holds NaN or infinity, which secure aggregation cannot carry")


def exponents_of(values: Mapping[str, Array]) -> dict[str, int]:
    """Of every float64 array: the exponent that its values stay below, a multiple of 16; none for integers."""
    return {name: _exponent(array) for name, array in values.items() if array.dtype == np.float64}


def _exponent(array: Array) -> int:
    largest = float(np.abs(array).max(initial=0.0))
    return -(-int(np.frexp(largest)[1]) // GRID) * GRID if largest else SMALLEST


def largest_exponents(each: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """The exponents that hold for all clients, of those of each."""
    found: dict[str, int] = {}
    for exponents in each:
        found |= {name: max(exponent, found.get(name, SMALLEST)) for name, exponent in exponents.items()}
    return found


def fractional_bits(exponent: int, clients: int) -> int:
    """Binary places with which the values of so many clients, each below 2**exponent, add up to less than 2**63."""
    return 63 - clients.bit_length() - exponent


def to_fixed(values: Mapping[str, Array], exponents: Mapping[str, int], clients: int) -> dict[str, Fixed]:
    """Float64 arrays as integers with the places that the exponents leave; int64 arrays as they are."""
    check_values(values, clients)
    fixed: dict[str, Fixed] = {}
    for name, array in values.items():
        if array.dtype == np.int64:
            fixed[name] = array.astype(np.int64)
            continue
        if _exponent(array) > exponents[name]:
            raise HeadstartError(f"array {name!r} holds values of 2**{exponents[name]} or more, which would overflow")
        fixed[name] = np.rint(_scaled(array, fractional_bits(exponents[name], clients))).astype(np.int64)
    return fixed


def from_fixed(totals: Mapping[str, Fixed], exponents: Mapping[str, int], clients: int) -> dict[str, Array]:
    """What `to_fixed` made, added up: float64 arrays, rounded once; those without an exponent as they are."""
    found: dict[str, Array] = {}
    for name, total in totals.items():
        with np.errstate(over="ignore"):
            scaled = name in exponents
            found[name] = _scaled(total, -fractional_bits(exponents[name], clients)) if scaled else total.copy()
        if scaled and not np.isfinite(found[name]).all():
            raise HeadstartError(f"the total of array {name!r} is larger than float64 holds")
    return found


def _scaled(array: Array, bits: int) -> npt.NDArray[np.float64]:
    return np.asarray(np.ldexp(array.astype(np.float64), bits), dtype=np.float64)
