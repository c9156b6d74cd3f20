"""The files of a run as they are read: what is damaged or gone is said, with its name and what can be done."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any, TypeVar

from headstart.core.files import read_csv
from headstart.core.message import Message
from headstart.errors import HeadstartError, MessageError

AGAIN = "put it back from a copy, or start the run again in another directory"
"""What helps where nothing else holds what a file held."""
_Kind = TypeVar("_Kind")


def unreadable(path: Path, why: object, what: str = AGAIN) -> HeadstartError:
    """That a file cannot be read, and what can be done."""
    return HeadstartError(f"cannot read {path}: {why}; {what}")


def read_json(path: Path, kind: type[_Kind], what: str = AGAIN) -> _Kind:
    """A JSON file that holds one of this kind."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise unreadable(path, _reason(error), what) from None
    if not isinstance(found, kind):
        raise unreadable(path, "it holds something else", what)
    return found


def read_lines(path: Path, names: set[str]) -> list[dict[str, Any]]:
    """Tables with these names, one on every line of a file; a line that is being written does not count."""
    try:
        lines = path.read_bytes().rpartition(b"\n")[0].splitlines()
        found = [json.loads(line) for line in lines]
    except (OSError, ValueError, RecursionError) as error:
        raise unreadable(path, _reason(error)) from None
    if not all(isinstance(line, dict) and names <= line.keys() for line in found):
        raise unreadable(path, f"a line does not say {', '.join(sorted(names))}")
    return found


def read_rows(path: Path, numbered: int = 0) -> list[list[str]]:
    """The rows of a table, its columns first; those behind begin with so many whole numbers."""
    what = "put it back from a copy, or remove it"
    try:
        rows = read_csv(path)
    except (OSError, ValueError, csv.Error) as error:
        raise unreadable(path, _reason(error), what) from None
    if not all(len(row) >= numbered and all(map(str.isdecimal, row[:numbered])) for row in rows[1:]):
        raise unreadable(path, "a row does not begin with the number of a stage", what)
    return rows


def read_message(path: Path, whole: bool = True) -> Message:
    """A file of arrays; not whole: each is read when it is asked for."""
    try:
        return Message.from_bytes(path.read_bytes()) if whole else Message.from_file(path)
    except (OSError, MessageError) as error:
        raise unreadable(path, _reason(error).removeprefix(f"{path} is ")) from None


def _reason(error: Exception) -> str:
    return error.strerror if isinstance(error, OSError) and error.strerror else str(error)
