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

    def visit(value: Any, path: str) -> None:
        if is_dataclass(value):
            for each in fields(value):
                visit(getattr(value, each.name), _under(path, each.name))
        elif isinstance(value, tuple):
            scalars[_under(path, "length")] = len(value)
            for number, part in enumerate(value):
                visit(part, _under(path, str(number)))
        elif isinstance(value, Mapping):
            if not value:
                scalars[path] = ""  # where it is one of several, its name counts
            for name, part in value.items():
                visit(part, _under(path, name))
        elif isinstance(value, _NUMBERS):
            scalars[path] = value
        elif value is not None:
            arrays[path] = np.asarray(value)

    visit(state, "")
    return Message(arrays, scalars)


def unpack(kind: type[T], message: Message) -> T:
    """The dataclass that `pack` was given, by the types of its fields."""
    values: dict[str, Any] = {**message.arrays, **message.scalars}

    def visit(annotation: Any, path: str) -> Any:
        origin, arguments = get_origin(annotation), get_args(annotation)
        if is_dataclass(annotation):
            hints, made = get_type_hints(annotation), cast(Any, annotation)
            return made(**{each.name: visit(hints[each.name], _under(path, each.name)) for each in fields(annotation)})
        if origin is tuple:
            return tuple(visit(arguments[0], f"{path}/{number}") for number in range(values[f"{path}/length"]))
        if isinstance(annotation, type) and issubclass(annotation, dict):
            return annotation({name: values[f"{path}/{name}"] for name in under(path)})
        if origin is dict:
            return {name: visit(arguments[1], f"{path}/{name}") for name in under(path)}
        return values.get(path)

    def under(path: str) -> list[str]:
        names = (name.removeprefix(f"{path}/").partition("/")[0] for name in values if name.startswith(f"{path}/"))
        return list(dict.fromkeys(names))

    found: T = visit(kind, "")
    return found


def _under(path: str, name: str) -> str:
    return f"{path}/{name}" if path else name
