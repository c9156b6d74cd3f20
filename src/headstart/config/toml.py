"""Tables of TOML files: read, with single keys set from outside; and their values by path."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from headstart.config.catalog import KNOWN
from headstart.errors import RecipeError, similar_path


def read_table(path: Path | str, settings: Sequence[str] = ()) -> dict[str, Any]:
    """A TOML file with ``key=value`` settings applied, before it is validated."""
    try:
        table = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise RecipeError([f"cannot read {path}: {error.strerror or error}{similar_path(Path(path))}"]) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise RecipeError([f"{path} is not valid TOML: {error}"]) from None
    problems = [problem for setting in settings if (problem := _apply(table, setting))]
    if problems:
        raise RecipeError(problems)
    return _beside(table, Path(path).parent)


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
    path, equals, text = setting.partition("=")
    if not equals or not path.strip():
        return f"--set {setting}: write it as key=value, for example stages.0.shrinkage=0.1"
    try:
        value = tomllib.loads(f"value = {text}")["value"] if text.strip() else None
    except tomllib.TOMLDecodeError:
        value = text.strip()
    *parents, last = path.strip().split(".")
    node: Any = table
    key: str | int
    for depth, key in enumerate([*parents, last]):
        if isinstance(node, list):
            if not key.isdigit() or int(key) >= len(node):
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
