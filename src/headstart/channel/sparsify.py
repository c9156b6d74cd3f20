"""`compress = "top-k" | "sign"`: few numbers of an update, or one bit of each, with error feedback.

Both leave something out, and neither is right on average: what the server did not read of a client's update is added to
the next one (error feedback), so that over the rounds nothing is lost. The client keeps it, as client state; the
channel adds it and notes what is left (`UpdateChannel.encode`).

Covered are the blocks that are differences to what both sides know: `update` and SCAFFOLD's `control`, each by itself.
Running statistics of batch norm are values, and travel as they are.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from headstart.channel.links import Link
from headstart.core.message import Array, Message
from headstart.core.reply import Sender
from headstart.core.update import Blocks, block_of
from headstart.errors import MessageError

Values = npt.NDArray[np.float32]

_DIFFERENCES = ("update", "control")


class _Packed(Link):
    """The arrays of a block travel as parts `PART.BLOCK`, made of all its numbers."""

    lossy = True
    feeds_back = True

    def __init__(self, padded: Blocks | None = None) -> None:
        """padded: what every client sends, whatever its task, where the task is hidden."""
        self.padded = padded

    def encode(self, message: Message, sender: Sender) -> Message:
        """Packed, block by block."""
        arrays = dict(message.arrays)
        for block, names in _covered(arrays).items():
            vectors = [arrays.pop(name).ravel().astype(np.float32, copy=False) for name in names]
            arrays |= {f"{part}.{block}": packed for part, packed in self.pack(vectors).items()}
        return Message(arrays, message.scalars)

    def decode(self, message: Message, sender: Sender) -> Message:
        """Float32 again, of the shapes that are expected."""
        expected = sender.expected if self.padded is None else self.padded
        arrays = dict(message.arrays)
        for block, names in _covered(expected).items():
            sizes = [int(np.prod(expected[name])) for name in names]
            flat = self.unpack(message, block, sizes)
            parts = np.split(flat, np.cumsum(sizes)[:-1])
            arrays |= {name: part.reshape(expected[name]) for name, part in zip(names, parts, strict=True)}
        return Message(arrays, message.scalars)

    @abstractmethod
    def pack(self, vectors: Sequence[Values]) -> Mapping[str, Array]:
        """What travels of the flat arrays of a block, by part."""

    @abstractmethod
    def unpack(self, message: Message, block: str, sizes: Sequence[int]) -> Values:
        """All numbers of a block, from its parts; `MessageError` where they cannot be right."""


class TopK(_Packed):
    """Of a block, the share with the largest absolute values (Stich, Cordonnier and Jaggi, NeurIPS 2018).

    Travels: their values as float32 and their positions as int32, in order; the others are read as zero.
    """

    def __init__(self, share: float, padded: Blocks | None = None) -> None:
        super().__init__(padded)
        self.share = share

    def _kept(self, size: int) -> int:
        return min(size, max(1, round(self.share * size)))

    def pack(self, vectors: Sequence[Values]) -> dict[str, Array]:
        """Values [k] and positions [k]."""
        flat = np.concatenate(vectors)
        left = len(flat) - self._kept(len(flat))
        positions = np.sort(np.argpartition(np.abs(flat), left)[left:] if left else np.arange(len(flat)))
        return {"values": flat[positions], "positions": positions.astype(np.int32)}

    def unpack(self, message: Message, block: str, sizes: Sequence[int]) -> Values:
        """Zeros but for k of them."""
        flat = np.zeros(sum(sizes), np.float32)
        shape = (self._kept(len(flat)),)
        values = message.array(f"values.{block}", "float32", shape)
        positions = message.array(f"positions.{block}", "int32", shape).astype(np.int64)
        if (np.diff(positions, prepend=-1, append=len(flat)) < 1).any():
            raise MessageError(f"array 'positions.{block}' holds positions out of order or beyond {len(flat)}")
        flat[positions] = values
        return flat


class Sign(_Packed):
    """The sign of every number times the mean absolute value of its array (Karimireddy et al., ICML 2019).

    Travels: eight signs in a byte, set for what is not negative, and the mean of every array as float32.
    """

    def pack(self, vectors: Sequence[Values]) -> dict[str, Array]:
        """Signs [n / 8] and scales [A]."""
        scales = [np.abs(vector).mean(dtype=np.float64) if vector.size else 0.0 for vector in vectors]
        return {"signs": np.packbits(np.concatenate(vectors) >= 0), "scales": np.array(scales, np.float32)}

    def unpack(self, message: Message, block: str, sizes: Sequence[int]) -> Values:
        """Plus or minus the scale of the array."""
        signs = message.array(f"signs.{block}", "uint8", (-(-sum(sizes) // 8),))
        scales = message.array(f"scales.{block}", "float32", (len(sizes),)).astype(np.float32, copy=False)
        if scales.min(initial=0.0) < 0:
            raise MessageError(f"array 'scales.{block}' holds a negative number")
        positive = np.unpackbits(signs, count=sum(sizes)).astype(np.bool_)  # type: ignore[arg-type]
        each = np.repeat(scales, sizes)
        return np.where(positive, each, -each)


def _covered(names: Iterable[str]) -> dict[str, list[str]]:
    """Names of differences by block, whichever the task, in an order that does not depend on how they travel."""
    found: dict[str, list[str]] = {}
    for name in sorted(names):
        if (block := block_of(name).partition("@")[0]) in _DIFFERENCES:
            found.setdefault(block, []).append(name)
    return found
