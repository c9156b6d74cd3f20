"""Messages between a server and its clients: named arrays and a few scalars, as safetensors bytes, checked."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError
from safetensors import numpy as safetensors_numpy

from headstart.errors import MessageError

Array = npt.NDArray[np.generic]
Scalar = str | int | float | bool

# In the order in which safetensors lays arrays out.
_DTYPE_NAMES = {"int64": "I64", "float64": "F64", "float32": "F32", "int32": "I32", "uint8": "U8", "bool": "BOOL"}
_SCALARS = "scalars"


@dataclass(frozen=True, eq=False)
class Message:
    """Ordered names to arrays, plus a few scalars."""

    arrays: Mapping[str, Array] = field(default_factory=dict)
    scalars: Mapping[str, Scalar] = field(default_factory=dict)

    def to_bytes(self) -> bytes:
        """The message as safetensors bytes; the scalars travel in its metadata."""
        arrays = {name: np.asarray(array, order="C") for name, array in self.arrays.items()}
        return safetensors_numpy.save(arrays, metadata=self._metadata())

    @classmethod
    def from_bytes(cls, data: bytes) -> Message:
        """Read a message; anything but a well-formed one is refused."""
        try:
            arrays = safetensors_numpy.load(data)
            length = int.from_bytes(data[:8], "little")
            metadata = json.loads(data[8 : 8 + length]).get("__metadata__", {})
            scalars = json.loads(metadata.get(_SCALARS, "{}"))
        except (SafetensorError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise MessageError(f"not a message: {error}") from None
        if not isinstance(scalars, dict) or not all(isinstance(v, str | int | float | bool) for v in scalars.values()):
            raise MessageError("not a message: its scalars are not a table of names and values")
        return cls(arrays, scalars)

    @property
    def nbytes(self) -> int:
        """Length of `to_bytes()`, without making the bytes."""
        return layout_nbytes({n: (str(a.dtype), a.shape) for n, a in self.arrays.items()}, self._metadata())

    def array(self, name: str, dtype: str, shape: tuple[int | None, ...]) -> Array:
        """The array of that name, checked: present, of this dtype and shape (None is any length), finite."""
        array = self.arrays.get(name)
        if array is None:
            raise MessageError(f"array {name!r} is missing")
        if str(array.dtype) != dtype:
            raise MessageError(f"array {name!r} is {array.dtype}, not {dtype}")
        if len(array.shape) != len(shape) or any(b not in (None, a) for a, b in zip(array.shape, shape, strict=True)):
            wanted = "[" + ", ".join("any" if size is None else str(size) for size in shape) + "]"
            raise MessageError(f"array {name!r} has shape {list(array.shape)}, not {wanted}")
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            raise MessageError(f"array {name!r} holds NaN or infinity")
        return array

    def _metadata(self) -> dict[str, str] | None:
        return {_SCALARS: json.dumps(dict(self.scalars), allow_nan=False)} if self.scalars else None


def layout_nbytes(layout: Mapping[str, tuple[str, tuple[int, ...]]], metadata: Mapping[str, str] | None = None) -> int:
    """Bytes of a safetensors file with arrays of these names, dtypes and shapes: 8, a padded JSON header, the data."""
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    offset = 0
    rank = list(_DTYPE_NAMES)
    for name, (dtype, shape) in sorted(layout.items(), key=lambda item: (rank.index(item[1][0]), item[0])):
        end = offset + np.dtype(dtype).itemsize * int(np.prod(shape, dtype=np.int64))
        header[name] = {"dtype": _DTYPE_NAMES[dtype], "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = len(json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode())
    return 8 + -(-text // 8) * 8 + offset
