"""Any state as a message, and back: dataclasses of arrays, named arrays, numbers and such dataclasses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any, TypeVar, cast, get_args, get_origin, get_type_hints

import numpy as np

from headstart.core.message import Array, Message, Scalar

T = TypeVar("T")
_NUMBERS = (bool, int, float, str)


def pack(state: Any) -> Message:
    """A dataclass as a message: arrays and numbers under the path that leads to them, such as `params/head.weight`."""
    arrays: dict[str, Array] = {}
    scalars: dict[str, Scalar] = {}
    _pack(state, "", arrays, scalars)
    return Message(arrays, scalars)


# A function of the module, as the next one: one within a function that calls itself keeps all that it knows, here the
# arrays of a state, until garbage is collected.
def _pack(value: Any, path: str, arrays: dict[str, Array], scalars: dict[str, Scalar]) -> None:
    """Put the arrays and numbers of a value under their paths."""
    if is_dataclass(value):
        for each in fields(value):
            _pack(getattr(value, each.name), _under(path, each.name), arrays, scalars)
    elif isinstance(value, tuple):
        scalars[_under(path, "length")] = len(value)
        for number, part in enumerate(value):
            _pack(part, _under(path, str(number)), arrays, scalars)
    elif isinstance(value, Mapping):
        if not value:
            scalars[path] = ""  # where it is one of several, its name counts
        for name, part in value.items():
            _pack(part, _under(path, name), arrays, scalars)
    elif isinstance(value, _NUMBERS):
        scalars[path] = value
    elif value is not None:
        arrays[path] = np.asarray(value)


def unpack(kind: type[T], message: Message) -> T:
    """The dataclass that `pack` was given, by the types of its fields."""
    found: T = _unpack(kind, "", {**message.arrays, **message.scalars})
    return found


def _unpack(annotation: Any, path: str, values: Mapping[str, Any]) -> Any:
    """What the values under a path are, by its annotation."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if is_dataclass(annotation):
        hints, made = get_type_hints(annotation), cast(Any, annotation)
        parts = {each.name: (hints[each.name], _under(path, each.name)) for each in fields(annotation)}
        return made(**{name: _unpack(hint, below, values) for name, (hint, below) in parts.items()})
    if origin is tuple:
        return tuple(_unpack(arguments[0], f"{path}/{n}", values) for n in range(values[f"{path}/length"]))
    if isinstance(annotation, type) and issubclass(annotation, dict):
        return annotation({name: values[f"{path}/{name}"] for name in _names(path, values)})
    if origin is dict:
        return {name: _unpack(arguments[1], f"{path}/{name}", values) for name in _names(path, values)}
    return values.get(path)


def _names(path: str, values: Mapping[str, Any]) -> list[str]:
    """The next parts of what is under a path, in their order."""
    found = (name.removeprefix(f"{path}/").partition("/")[0] for name in values if name.startswith(f"{path}/"))
    return list(dict.fromkeys(found))


def _under(path: str, name: str) -> str:
    return f"{path}/{name}" if path else name
