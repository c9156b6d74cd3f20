"""Shamir's secret sharing (CACM 22, 1979) over GF(2**31 - 1), for all limbs, recipients and secrets at once.

A secret is cut into limbs of 30 bits, each the constant term of a polynomial of its own of degree threshold - 1 whose
other coefficients are uniform in the field. A share is the values of all polynomials at the recipient's point, a number
from 1 on. The field holds every limb, products of two of its elements fit into 64 bits, and any threshold - 1 shares
are uniform whatever the secret.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

PRIME = 2**31 - 1
LIMB_BITS = 30

Elements = npt.NDArray[np.uint64]
"""Elements of the field, 0 to PRIME - 1."""

_P = np.uint64(PRIME)


def limbs_of(length: int) -> int:
    """Limbs of a secret of so many bytes."""
    return -(-8 * length // LIMB_BITS)


def share_bytes(length: int) -> int:
    """Bytes of a share of a secret of so many bytes."""
    return 4 * limbs_of(length)


def split(secret: bytes, threshold: int, points: Sequence[int]) -> npt.NDArray[np.uint8]:
    """Shares of a secret for these points: [points, share_bytes]; any ``threshold`` of them give it back."""
    limbs = _to_limbs(secret)
    return _packed(_evaluate(limbs, uniform((threshold - 1, len(limbs))), points))


def combine(points: npt.NDArray[np.int64], shares: npt.NDArray[np.uint8], length: int) -> list[bytes]:
    """Secrets of ``length`` bytes, each from the shares at its points.

    points: [secrets, threshold]; shares: [secrets, threshold, share_bytes]. Shares that do not belong together give
    another secret, which the caller has to find out.
    """
    values = _unpacked(shares)
    coefficients = _lagrange(points)
    total = np.zeros((values.shape[0], values.shape[2]), np.uint64)
    for place in range(values.shape[1]):
        total += coefficients[:, place, None] * values[:, place] % _P
    return [_from_limbs(row, length) for row in (total % _P).tolist()]


def uniform(shape: tuple[int, ...]) -> Elements:
    """Elements of the field from the operating system's generator, each as likely as any other."""
    drawn = _draw(int(np.prod(shape)))
    while len(over := np.flatnonzero(drawn == PRIME)):  # one value of the 2**31 that 31 bits have is not in the field
        drawn[over] = _draw(len(over))
    return drawn.astype(np.uint64).reshape(shape)


def _draw(count: int) -> npt.NDArray[np.uint32]:
    return np.frombuffer(os.urandom(4 * count), "<u4") & np.uint32(PRIME)


def _evaluate(constant: Elements, others: Elements, points: Sequence[int]) -> Elements:
    """Values of polynomials, by Horner's rule; constant: [limbs], others: [degree, limbs], result: [points, limbs]."""
    x = np.array(points, np.uint64)[:, None]
    values = np.zeros((len(points), len(constant)), np.uint64)
    for coefficient in others[::-1]:
        values = (values + coefficient) * x % _P
    return (values + constant) % _P


def _lagrange(points: npt.NDArray[np.int64]) -> Elements:
    """What the values at these points count for the value at zero: Π x_j / (x_j - x_i) over j ≠ i, row by row."""
    rows, inverse = np.unique(points, axis=0, return_inverse=True)
    x = rows.astype(np.uint64)
    above, below = np.ones_like(x), np.ones_like(x)
    for place in range(x.shape[1]):
        other = x[:, place, None]
        same = np.arange(x.shape[1]) == place
        above = above * np.where(same, 1, other) % _P
        below = below * np.where(same, 1, (other + _P - x) % _P) % _P
    return (above * _inverse(below) % _P)[inverse.reshape(-1)]


def _inverse(values: Elements) -> Elements:
    """By Fermat's theorem: the power PRIME - 2."""
    result, power = np.ones_like(values), values
    for bit in f"{PRIME - 2:b}"[::-1]:
        result = result * power % _P if bit == "1" else result
        power = power * power % _P
    return result


def _to_limbs(secret: bytes) -> Elements:
    number, mask = int.from_bytes(secret, "little"), (1 << LIMB_BITS) - 1
    return np.array([number >> LIMB_BITS * place & mask for place in range(limbs_of(len(secret)))], np.uint64)


def _from_limbs(limbs: Sequence[int], length: int) -> bytes:
    number = sum(limb << LIMB_BITS * place for place, limb in enumerate(limbs))
    return (number & (1 << 8 * length) - 1).to_bytes(length, "little")


def _packed(values: Elements) -> npt.NDArray[np.uint8]:
    return values.astype("<u4").view(np.uint8)


def _unpacked(shares: npt.NDArray[np.uint8]) -> Elements:
    return np.ascontiguousarray(shares).view("<u4").astype(np.uint64) % _P
