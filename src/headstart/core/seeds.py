"""Random numbers that hide something: from the operating system's generator, or from a secret that can give them again.

NumPy's generators are made for simulations: whoever sees enough of their numbers knows the rest. What is to hide
something in a deployment comes from here instead.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from scipy import special

if TYPE_CHECKING:  # most runs draw nothing from a key
    from cryptography.hazmat.primitives.ciphers import Cipher

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


class SecureGenerator:
    """Numbers from a source of bytes that nobody can predict; by default the operating system's."""

    def __init__(self, read: Callable[[int], bytes] = os.urandom) -> None:
        """read: as many bytes as it is asked for."""
        self._read = read

    def words(self, size: int) -> npt.NDArray[np.uint64]:
        """So many numbers [size], each of 64 bits."""
        return np.frombuffer(self._read(8 * size), "<u8").astype(np.uint64, copy=False)

    def standard_normal(self, size: int) -> Floats:
        """So many numbers [size], by the inverse of the distribution function at odd multiples of 2⁻⁵³: never 0, 1."""
        return np.asarray(special.ndtri(((self.words(size) >> np.uint64(12)) + 0.5) * 2.0**-52))

    def normal(self, mean: Floats, deviation: float) -> Floats:
        """Numbers around these means [...]."""
        return np.asarray(mean + deviation * self.standard_normal(mean.size).reshape(mean.shape))

    def permutation(self, size: int) -> Ints:
        """The numbers below ``size`` in the order of as many words, of which no two are the same but once in 2⁶⁴."""
        return np.argsort(self.words(size), kind="stable")


@dataclass(frozen=True)
class Secret:
    """A key of 32 bytes that only its owner knows, and what is drawn from it."""

    key: bytes = field(repr=False)
    purpose: tuple[int, ...] = ()

    def generator(self, *purpose: int) -> SecureGenerator:
        """A generator for a purpose: AES-256 in counter mode, its key derived from the secret by HKDF."""
        from cryptography.hazmat.primitives.hashes import SHA256
        from cryptography.hazmat.primitives.kdf.hkdf import HKDF

        info = "headstart noise " + " ".join(map(str, (*self.purpose, *purpose)))
        return stream(HKDF(algorithm=SHA256(), length=32, salt=None, info=info.encode()).derive(self.key))


def stream(key: bytes) -> SecureGenerator:
    """The numbers of a key of 32 bytes."""
    return SecureGenerator(key_stream(key))


def key_stream(key: bytes, block: int = 0) -> Callable[[int], bytes]:
    """AES-256 in counter mode under a key of 32 bytes, from this block of 16 bytes on: as many bytes as it is asked
    for."""
    encryptor = _cipher(key, block.to_bytes(16, "big")).encryptor()
    return lambda count: encryptor.update(bytes(count))


def key_blocks(key: bytes, blocks: Ints) -> bytes:
    """Of a key's stream the blocks of 16 bytes with these numbers [...], one behind the other."""
    counters = np.zeros((blocks.size, 2), ">u8")
    counters[:, 1] = blocks.reshape(-1)
    return _cipher(key).encryptor().update(counters.tobytes())


def _cipher(key: bytes, counter: bytes | None = None) -> Cipher[Any]:
    """AES-256: of counters from this one on, or of what it is given."""
    from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

    return Cipher(algorithms.AES256(key), modes.ECB() if counter is None else modes.CTR(counter))


Seed = tuple[int, ...] | Secret | None
"""What random numbers are drawn from: a seed that anybody may know, a secret, or None, the operating system's
generator."""
Generator = np.random.Generator | SecureGenerator


def generator_of(seed: Seed, *purpose: int) -> Generator:
    """The generator of a seed for a purpose; the operating system's has no use for either."""
    if seed is None:
        return SecureGenerator()
    if isinstance(seed, Secret):
        return seed.generator(*purpose)
    return np.random.default_rng([*seed, *purpose])


def hiding(seed: Seed, values: Iterable[npt.NDArray[Any]]) -> Seed:
    """The seed of the noise that hides these values: of a secret, other values get other noise.

    The same noise on two totals, as of a round that is played again with other clients, would cancel in their
    difference; other noise on the same total would average away.
    """
    if not isinstance(seed, Secret):
        return seed
    digest = hashlib.sha256()
    for array in values:
        digest.update(f"{array.dtype.str}{array.shape}".encode() + np.ascontiguousarray(array).tobytes())
    return extended(seed, int.from_bytes(digest.digest(), "big"))


def extended(seed: Seed, *purpose: int) -> Seed:
    """The same seed for what is drawn for a purpose."""
    if seed is None:
        return None
    if isinstance(seed, Secret):
        return Secret(seed.key, (*seed.purpose, *purpose))
    return (*seed, *purpose)
