"""What a recipe may say, in words and as a JSON schema: every key with what it accepts, its default and its meaning."""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from headstart.config.partition import PARTITIONS
from headstart.config.recipe import Clients, Data, Model, Recipe, Task
from headstart.config.stage import STAGES, CountNoise, Named, Privacy, load_plugins
from headstart.core.files import write_text
from headstart.errors import HeadstartError, nearest

SCHEMA = "recipe.schema.json"
_BESIDE = f"#:schema {SCHEMA}"
_WORDS = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}
_BOUNDS = {"gt": ">", "ge": "≥", "lt": "<", "le": "≤"}


def tables() -> dict[str, type[BaseModel]]:
    """The tables of a recipe by name; a method names its table of [[stages]]."""
    load_plugins()
    partitions = {f"data.partition.{kind}": table for kind, table in PARTITIONS.items()}
    fixed: dict[str, type[BaseModel]] = {
        "recipe": Recipe, "data": Data, "tasks": Task, "model": Model, "clients": Clients, **partitions,
    }  # fmt: skip
    return {**fixed, "stages.privacy": Privacy, "stages.count_noise": CountNoise, **STAGES}


def keys_of(name: str) -> tuple[str, list[tuple[str, str, str, str]]]:
    """What a table is, and of each key its name, what it accepts, its default and its meaning; required keys first."""
    known = tables()
    if name not in known:
        raise HeadstartError(f"{name!r} is not a table of a recipe or a method; {nearest(name, known)}")
    table = known[name]
    fields = {key: field for key, field in table.model_fields.items() if not (name in STAGES and key == "method")}
    rows = [
        (key, accepted(field), _default(field), " ".join(_meaning(table, key).split())) for key, field in fields.items()
    ]
    return (table.__doc__ or "").strip(), sorted(rows, key=lambda row: row[2] != "required")


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    if isinstance(field.default, BaseModel):
        return ", ".join(f"{key} = {value!r}" for key, value in field.default.model_dump(exclude_none=True).items())
    return "unset" if field.default is None else repr(field.default)


def _meaning(table: type[BaseModel], key: str) -> str:
    """The description of a key: its own, or that of the family where it has another default only."""
    families: list[dict[str, FieldInfo]] = [getattr(base, "model_fields", {}) for base in table.__mro__]
    fields = [fields[key] for fields in families if key in fields]
    return next((field.description for field in fields if field.description), "")


def accepted(field: FieldInfo) -> str:
    """What a key accepts: values, kinds of values with their bounds, names, or a table."""
    return " or ".join(dict.fromkeys(_accepted(field.annotation, list(field.metadata))))


def _accepted(kind: Any, metadata: list[Any]) -> list[str]:
    named = [each.names() for each in metadata if isinstance(each, Named)]
    if named:
        return list(named[0])
    if get_origin(kind) is Annotated:
        inner, *more = get_args(kind)
        return _accepted(inner, [*metadata, *(part for each in more for part in getattr(each, "metadata", [each]))])
    if get_origin(kind) is Literal:
        return [repr(value) if isinstance(value, str) else str(value) for value in get_args(kind)]
    if get_origin(kind) in (Union, UnionType):
        return [word for part in get_args(kind) if part is not type(None) for word in _accepted(part, metadata)]
    if get_origin(kind) is tuple:
        words = [word for part in get_args(kind) if part is not ... for word in _accepted(part, [])]
        return [f"a list of {' or '.join(dict.fromkeys(words))}"]
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return [f"a table of {', '.join(kind.model_fields)}"]
    return [_WORDS[kind] + _bounds(metadata)] if kind in _WORDS else []


def _bounds(metadata: list[Any]) -> str:
    """> 0, < 1."""
    pairs = [(sign, getattr(each, name)) for each in metadata for name, sign in _BOUNDS.items() if hasattr(each, name)]
    bounds = [f"{sign} {bound:g}" for sign, bound in pairs]
    return f" {' and '.join(bounds)}" if bounds else ""


def schema() -> str:
    """The JSON schema of recipes, for editors; methods that are registered are in it."""
    load_plugins()
    return _schema(tuple(STAGES.values()))


@lru_cache(1)
def _schema(stages: tuple[type[BaseModel], ...]) -> str:
    Recipe.rebuild()
    found = Recipe.model_json_schema()
    titled = {"$schema": "https://json-schema.org/draft/2020-12/schema", **found, "title": "A recipe of headstart"}
    return json.dumps(titled, separators=(",", ":"), ensure_ascii=False) + "\n"


def write_schema(folder: Path) -> None:
    """Write the schema that recipes in a folder, and in the folders in it, are checked by; one that is there stays."""
    if not (path := folder / SCHEMA).exists():
        write_text(path, schema())


def naming_schema(path: Path, text: str) -> str:
    """A recipe for a file, whose first line names the schema that editors check it by: that of the folder above where
    there is one, and otherwise one beside it."""
    above = (path.absolute().parent.parent / SCHEMA).exists() and not path.with_name(SCHEMA).exists()
    return f"#:schema {'../' * above}{SCHEMA}\n{text}"


def add_schema(path: Path) -> None:
    """Write the schema that a recipe names, where that is one beside it."""
    with path.open(encoding="utf-8") as file:
        if file.readline() == f"{_BESIDE}\n":
            write_schema(path.parent)


def write_recipe(path: Path, text: str) -> None:
    """Write a recipe, and the schema that it names."""
    write_text(path, naming_schema(path, text))
    add_schema(path)
