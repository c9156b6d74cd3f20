"""Messages between a server and its clients: named arrays and a few scalars, as safetensors bytes, checked."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, deserialize, safe_open
from safetensors import numpy as safetensors_numpy

from headstart.core.files import save_arrays
from headstart.errors import HeadstartError, MessageError

Array = npt.NDArray[np.generic]
Scalar = str | int | float | bool

# In the order in which safetensors lays arrays out.
_DTYPE_NAMES = {
    "int64": "I64", "float64": "F64", "float32": "F32", "int32": "I32", "int8": "I8", "uint8": "U8", "bool": "BOOL",
}  # fmt: skip
_DTYPES = {short: np.dtype(name) for name, short in _DTYPE_NAMES.items()}
_NAMED = {name: np.dtype(name) for name in _DTYPE_NAMES}
_to_json = json.JSONEncoder(allow_nan=False).encode
_METADATA = "__metadata__"
_SCALARS = "scalars"

# Reading a megabyte of names and shapes takes 43 MB and a second. A thousand arrays need a tenth of a megabyte.
_HEADER_BYTES = 2 << 20
# The sides of an array with entries are as long as its bytes allow. Those of an empty one are only numbers, and what
# is made of them must stay small.
_EMPTY_ENTRIES = 1 << 24
_DIMENSIONS = 32
# A refusal is kept and shown; parts of it are the sender's words.
_REASON_CHARACTERS = 200


@dataclass(frozen=True, eq=False)
class Message:
    """Ordered names to arrays, plus a few scalars."""

    arrays: Mapping[str, Array] = field(default_factory=dict)
    scalars: Mapping[str, Scalar] = field(default_factory=dict)

    def to_bytes(self) -> bytes:
        """The message as safetensors bytes; the scalars travel in its metadata."""
        data = safetensors_numpy.save(*self._parts())
        self._check_header(data[:8])
        return data

    def to_file(self, path: Path) -> None:
        """Write the same bytes, which are at no time in memory as a whole."""
        save_arrays(path, *self._parts())
        with path.open("rb") as file:
            self._check_header(file.read(8))

    @classmethod
    def from_file(cls, path: Path) -> Message:
        """What `to_file` wrote; an array is read when it is asked for."""
        try:
            with safe_open(path, "np") as file:
                scalars = _scalars((file.metadata() or {}).get(_SCALARS, "{}"))
            return cls(FileArrays(path), scalars)
        except (SafetensorError, ValueError, RecursionError) as error:
            raise MessageError(f"{path} is not a message: {error}") from None

    @classmethod
    def from_bytes(cls, data: bytes) -> Message:
        """Read a message; anything but a well-formed one is refused, and nothing in it sets memory aside unchecked."""
        length = int.from_bytes(data[:8], "little")
        if length > _HEADER_BYTES:
            raise MessageError(f"not a message: its header of {length} bytes is longer than {_HEADER_BYTES}")
        try:
            views = deserialize(data)  # type: ignore[no-untyped-call]
            found = {name: _array(name, view["dtype"], view["shape"], view["data"]) for name, view in views}
            header = _parsed(str(data[8 : 8 + length], "utf-8"))
            scalars = _scalars((header.pop(_METADATA, None) or {}).get(_SCALARS, "{}"))
        except (SafetensorError, ValueError, RecursionError) as error:
            reason = str(error)[:_REASON_CHARACTERS]
            raise MessageError(f"not a message: {reason if reason.isprintable() else ascii(reason)}") from None
        return cls({name: found[name] for name in header}, scalars)

    @property
    def nbytes(self) -> int:
        """Length of `to_bytes()`, without making the bytes."""
        layout = tuple((name, array.dtype, array.shape) for name, array in self.arrays.items())
        return _cached_nbytes(layout, self._scalars_text())

    def array(self, name: str, dtype: str, shape: tuple[int | None, ...]) -> Array:
        """The array of that name, checked: present, of this dtype and shape (None is any length), finite."""
        array = self.arrays.get(name)
        if array is None:
            raise MessageError(f"array {name!r} is missing")
        if array.dtype != _NAMED[dtype]:
            raise MessageError(f"array {name!r} is {array.dtype}, not {dtype}")
        if array.shape != shape and (
            len(array.shape) != len(shape) or any(b not in (None, a) for a, b in zip(array.shape, shape, strict=True))
        ):
            wanted = "[" + ", ".join("any" if size is None else str(size) for size in shape) + "]"
            raise MessageError(f"array {name!r} has shape {list(array.shape)}, not {wanted}")
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            raise MessageError(f"array {name!r} holds NaN or infinity")
        return array

    def whole_number(self, name: str, largest: int) -> int:
        """A scalar that counts something, from 1 on, checked."""
        value = self.scalars.get(name)
        if type(value) is not int or not 1 <= value <= largest:  # True is an int, too
            raise MessageError(f"a client says {name} = {value!r:.40}; a whole number from 1 to {largest} was expected")
        return value

    def _scalars_text(self) -> str | None:
        return _to_json(dict(self.scalars)) if self.scalars else None

    def _parts(self) -> tuple[dict[str, Array], dict[str, str] | None]:
        """Arrays and metadata, as safetensors takes them."""
        text = self._scalars_text()
        arrays = {name: np.asarray(array, order="C") for name, array in self.arrays.items()}
        return arrays, None if text is None else {_SCALARS: text}

    def _check_header(self, start: bytes) -> None:
        """Refuse a message that nobody would read, by its first eight bytes."""
        if (length := int.from_bytes(start, "little")) > _HEADER_BYTES:
            raise HeadstartError(
                f"the names and shapes of {len(self.arrays)} arrays take {length} bytes, more than {_HEADER_BYTES}: "
                "nobody would read the message; train fewer or larger parts"
            )


class FileArrays(Mapping[str, Array]):
    """Arrays of a safetensors file, by their names behind a prefix; each is read anew when it is asked for."""

    def __init__(self, path: Path, prefix: str = "") -> None:
        self.path, self.prefix = path, prefix
        with safe_open(path, "np") as file:
            self._names = [name.removeprefix(prefix) for name in file.keys() if name.startswith(prefix)]  # noqa: SIM118

    def __getitem__(self, name: str) -> Array:
        if name not in self._names:
            raise KeyError(name)
        with safe_open(self.path, "np") as file:
            found: Array = file.get_tensor(self.prefix + name)
        return found

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


@lru_cache(maxsize=4096)
def _cached_nbytes(layout: tuple[tuple[str, np.dtype[Any], tuple[int, ...]], ...], scalars: str | None) -> int:
    """Of messages with arrays of the same names, dtypes and shapes, and the same scalars."""
    named = {name: (str(dtype), shape) for name, dtype, shape in layout}
    return layout_nbytes(named, None if scalars is None else {_SCALARS: scalars})


def layout_nbytes(layout: Mapping[str, tuple[str, tuple[int, ...]]], metadata: Mapping[str, str] | None = None) -> int:
    """Bytes of a safetensors file with arrays of these names, dtypes and shapes: 8, a padded JSON header, the data."""
    header: dict[str, object] = {_METADATA: dict(metadata)} if metadata else {}
    offset = 0
    rank = list(_DTYPE_NAMES)
    for name, (dtype, shape) in sorted(layout.items(), key=lambda item: (rank.index(item[1][0]), item[0])):
        end = offset + np.dtype(dtype).itemsize * int(np.prod(shape, dtype=np.int64))
        header[name] = {"dtype": _DTYPE_NAMES[dtype], "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = len(json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode())
    return 8 + -(-text // 8) * 8 + offset


def _array(name: str, dtype: str, shape: list[int], data: bytearray) -> Array:
    if dtype not in _DTYPES:
        raise ValueError(f"array {name!r} is {dtype}; accepted: {', '.join(_DTYPES)}")
    if len(shape) > _DIMENSIONS:
        raise ValueError(f"array {name!r} has more than {_DIMENSIONS} dimensions")
    if not data and math.prod(side or 1 for side in shape) > _EMPTY_ENTRIES:
        raise ValueError(f"array {name!r} is empty and has sides that are too long")
    if dtype == "BOOL" and np.frombuffer(data, np.uint8).max(initial=0) > 1:
        raise ValueError(f"array {name!r} holds what is neither true nor false")
    return np.frombuffer(data, _DTYPES[dtype]).reshape(shape)


def _scalars(text: str) -> dict[str, Scalar]:
    scalars = _parsed(text)
    for name, value in scalars.items():
        if not isinstance(value, str | int | float | bool):
            raise ValueError(f"its scalar {name!r} is no text and no number")
        if isinstance(value, int) and not -(2**63) <= value < 2**63:
            raise ValueError(f"its scalar {name!r} does not fit into 64 bits")
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"its scalar {name!r} is NaN or infinity")
    json.dumps(scalars, ensure_ascii=False).encode()  # JSON can escape half a character, which no file can hold
    return scalars


def _parsed(text: str) -> dict[str, Any]:
    """A JSON object in which no name occurs twice; which of two would count is the reader's choice."""
    found = json.loads(text, object_pairs_hook=_unique)
    if not isinstance(found, dict):
        raise ValueError("a table of names and values was expected")
    return found


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) < len(pairs):
        raise ValueError("a name occurs twice")
    return table
