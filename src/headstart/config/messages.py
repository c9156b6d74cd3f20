"""What does not validate in a recipe, in words: where, what was given, what is accepted, the nearest spelling."""

from __future__ import annotations

from typing import Any, Literal, get_args

from pydantic import BaseModel, ValidationError

from headstart.config.partition import PARTITIONS
from headstart.config.recipe import Clients, Data, Model, Recipe, Task
from headstart.config.stage import STAGES, CountNoise, Named, Privacy
from headstart.errors import nearest

_TABLES: dict[str, type[BaseModel]] = {"privacy": Privacy, "count_noise": CountNoise}
"""Tables within the table of a stage."""
_TYPES: dict[Any, str] = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}
_BOUNDS = ("greater_than", "greater_than_equal", "less_than", "less_than_equal")


def messages(error: ValidationError) -> list[str]:
    """One message for each place that does not validate."""
    found: dict[str, str] = {}
    for item in error.errors():
        place, message = _message(dict(item))
        if place not in found or item["type"] in _BOUNDS:  # a union of types complains once for each of them
            found[place] = message
    return list(found.values())


def _table_at(place: tuple[Any, ...]) -> tuple[type[BaseModel], tuple[Any, ...]]:
    """The table an error points into, and the place without pydantic's union tags."""
    match place:
        case ("data", "partition", str(kind), *rest) if kind in PARTITIONS:
            return PARTITIONS[kind], ("data", "partition", *rest)
        case ("stages", int(index), str(method), str(table), str(key), *rest) if method in STAGES and table in _TABLES:
            return _TABLES[table], ("stages", index, table, key, *rest)
        case ("stages", int(index), str(method), *rest) if method in STAGES:
            return STAGES[method], ("stages", index, *rest)
        case ("tasks", int(index), "partition", str(kind), *rest) if kind in PARTITIONS:
            return PARTITIONS[kind], ("tasks", index, "partition", *rest)
        case ("data", *_):
            return Data, place
        case ("tasks", int(), *_):
            return Task, place
        case ("model", *_):
            return Model, place
        case ("clients", *_):
            return Clients, place
        case _:
            return Recipe, place


def _accepted(table: type[BaseModel], key: Any) -> list[str]:
    """What a key accepts: the values of its literals and the names of its types."""
    field = table.model_fields.get(str(key))
    named = [each.names() for each in (field.metadata if field else ()) if isinstance(each, Named)]
    if named:
        return list(named[0])
    words: list[str] = []
    todo: list[Any] = [field.annotation] if field else []
    while todo:
        kind = todo.pop(0)
        if kind in _TYPES:
            words.append(_TYPES[kind])
        elif getattr(kind, "__origin__", None) is Literal:
            words += [str(value) for value in get_args(kind)]
        else:
            todo = list(get_args(kind)) + todo
    return list(dict.fromkeys(words))


def _elsewhere(key: Any, table: type[BaseModel], outermost: Any) -> list[str]:
    """The other tables of a recipe that have this key: other than this stage, or than this partition."""
    kinds: dict[str, list[type[BaseModel]]] = {
        "[model]": [Model],
        "[data]": [Data],
        "[tasks.partition]" if outermost == "tasks" else "[data.partition]": list(PARTITIONS.values()),
        "[[stages]]": list(STAGES.values()),
        "[stages.privacy]": [Privacy],
        "the recipe itself": [Recipe],
    }
    return [name for name, each in kinds.items() if table not in each and any(key in one.model_fields for one in each)]


def _message(error: dict[str, Any]) -> tuple[str, str]:
    """Where a pydantic error is, and a message: where, what was given, what is accepted."""
    table, place = _table_at(tuple(error["loc"]))
    kind, given = error["type"], error["input"]
    # Unions of types append the member that failed ("float", "literal['auto']"); the key is the part that counts.
    known = [
        depth
        for depth, key in enumerate(place)
        if key in table.model_fields or place[:depth] in (("stages",), ("tasks",))
    ]
    if known and kind != "extra_forbidden":
        place = place[: known[-1] + 1]
    where, key = ".".join(map(str, place)), place[-1] if place else ""
    accepted = _accepted(table, key)
    if kind in ("union_tag_invalid", "union_tag_not_found"):
        tag = error["ctx"]["discriminator"].strip("'")
        where = f"{where}.{tag}"
        names = list(PARTITIONS if tag == "kind" else STAGES)
        if kind == "union_tag_not_found":
            return where, f"{where}: missing; accepted: {', '.join(names)}"
        return where, f"{where}: {given[tag]!r} is not known; {nearest(given[tag], names)}"
    if kind == "extra_forbidden":
        others = [name for name, each in PARTITIONS.items() if key in each.model_fields]
        if table in PARTITIONS.values() and others:
            return where, f"{where}: goes with kind = {' or '.join(map(repr, others))} only; leave it out"
        if found := _elsewhere(key, table, place[0] if place else ""):
            return where, f"{where}: unknown key; {key} is a key of {' and of '.join(found)}"
        return where, f"{where}: unknown key; {nearest(str(key), table.model_fields)}"
    if kind == "missing":
        return where, f"{where}: missing" + (f"; give {' or '.join(accepted)}" if accepted else "; add this table")
    if kind in ("model_type", "model_attributes_type", "dict_type"):
        return where, f"{where}: must be a table, {{key = value, …}} (got {given!r})"
    if kind in ("tuple_type", "list_type"):
        tables = f" of tables, [[{where}]]" if isinstance(given, dict) else ""
        return where, f"{where}: must be a list{tables} (got {given!r})"
    if not accepted or isinstance(given, list | tuple) or (isinstance(given, str) and _TYPES[str] in accepted):
        message = (
            error["msg"].removeprefix("Value error, ").replace("Input should", "must").replace("String should", "must")
        )
        return where, f"{where}: {message} (got {given!r})"
    if isinstance(given, str) and set(accepted) - set(_TYPES.values()):
        return where, f"{where}: {given!r} is not accepted; {nearest(given, accepted)}"
    bound = " that is finite" if kind == "finite_number" else ""
    if kind in _BOUNDS:
        bound = error["msg"].removeprefix("Input should be")
    wanted = [word + bound if word in (_TYPES[int], _TYPES[float]) else word for word in accepted]
    return where, f"{where}: must be {' or '.join(wanted)} (got {given!r})"
