"""Tables of TOML files: read, with single keys set from outside; and their values by path."""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from headstart.config.catalog import KNOWN
from headstart.errors import HeadstartError, RecipeError, similar_path

_DEEPEST = 50  # tables and lists within each other, of which a recipe has a few
_BYTES = re.compile("[\ud800-\udfff]")


def read_table(path: Path | str, settings: Sequence[str] = ()) -> dict[str, Any]:
    """A TOML file with ``key=value`` settings applied, before it is validated."""
    try:
        table = _parsed(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise RecipeError([f"cannot read {path}: {error.strerror or error}{similar_path(Path(path))}"]) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise RecipeError([f"{path} is not valid TOML: {error}"]) from None
    problems = [problem for setting in settings if (problem := _apply(table, setting))]
    if problems:
        raise RecipeError(problems)
    if _too_deep(table):
        raise RecipeError([f"{path}: tables and lists are nested more than {_DEEPEST} deep, and a recipe's are not"])
    return _beside(table, Path(path).parent)


def _parsed(text: str) -> dict[str, Any]:
    """A table of TOML; what Python cannot hold is as wrong as what does not parse."""
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        raise
    except RecursionError:
        raise tomllib.TOMLDecodeError("tables or lists are nested too deep") from None
    except ValueError:
        raise tomllib.TOMLDecodeError("a number has too many digits") from None


def _too_deep(table: dict[str, Any]) -> bool:
    level: list[Any] = [table]
    for _ in range(_DEEPEST):
        inner = (value for each in level for value in (each.values() if isinstance(each, dict) else each))
        level = [value for value in inner if isinstance(value, dict | list)]
    return bool(level)


def check_text(text: str) -> None:
    """Refuse bytes of a command line that are no text: a recipe cannot name them."""
    if _BYTES.search(text):
        raise HeadstartError(f"{text!r}: this is not valid UTF-8, and a recipe has to be; rename it")


def _beside(table: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The table with paths that lie beside the recipe, where they are not there from where the command runs."""

    def found(value: Any) -> Any:
        if isinstance(value, list):  # of a sweep
            return [found(each) for each in value]
        if not isinstance(value, str) or value in KNOWN or os.path.exists(os.path.expanduser(value)):
            return value
        # What is nowhere is told with the names that are like it: here, or else beside the recipe.
        misspelt = similar_path(folder / value) and not similar_path(Path(value))
        return str(folder / value) if misspelt or os.path.exists(folder / value) else value

    tasks, model = table.get("tasks"), table.get("model")
    for part in [table.get("data"), *(tasks if isinstance(tasks, list) else ())]:
        if isinstance(part, dict) and "dataset" in part:
            part["dataset"] = found(part["dataset"])
    if isinstance(clients := table.get("clients"), dict) and "trace" in clients:
        clients["trace"] = found(clients["trace"])
    for key, value in list(model.items()) if isinstance(model, dict) else ():
        if key in ("backbone", "weights") and ("/" in str(value) or Path(str(value)).suffix):
            table["model"][key] = found(value)
    return table


def _apply(table: dict[str, Any], setting: str) -> str | None:
    """Write one ``key=value`` into the table; return what is wrong with it, if anything."""
    check_text(setting)
    path, equals, text = setting.partition("=")
    if not equals or not path.strip():
        return f"--set {setting}: write it as key=value, for example stages.0.shrinkage=0.1"
    try:
        value = _parsed(f"value = {text}")["value"] if text.strip() else None
    except tomllib.TOMLDecodeError:
        value = text.strip()
    *parents, last = path.strip().split(".")
    node: Any = table
    key: str | int
    for depth, key in enumerate([*parents, last]):
        if isinstance(node, list):
            if not re.fullmatch("[0-9]{1,9}", key) or int(key) >= len(node):
                return (
                    f"--set {path}: {'.'.join(parents[:depth])} has {len(node)} entries, numbered from 0, not {key!r}"
                )
            key = int(key)
        elif not isinstance(node, dict):
            return f"--set {path}: {'.'.join(parents[:depth])} is a value, not a table"
        if depth == len(parents) and value is None:
            if isinstance(node, dict) and key not in node:
                return f"--set {path}=: there is no such key to unset"
            del node[key]
        elif depth == len(parents):
            node[key] = value
        else:
            node = node.setdefault(key, {}) if isinstance(node, dict) else node[key]
    return None


def flattened(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """The values of a table by their paths; the tables of a list by their numbers."""
    if isinstance(value, list) and value and isinstance(value[0], dict):
        value = dict(enumerate(value))
    if isinstance(value, dict):
        for key, part in value.items():
            yield from flattened(part, f"{name}.{key}" if name else str(key))
    else:
        yield name, value
