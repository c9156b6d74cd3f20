"""What several commands share: arguments, where a run goes, and how tables and interruptions are shown."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from headstart.errors import HeadstartError

RecipeFile = Annotated[Path, typer.Argument(help="A recipe (TOML).")]
Settings = Annotated[list[str] | None, typer.Option("--set", help="Change a key: stages.0.shrinkage=0.1 (repeatable).")]


def console() -> Console:
    """Where tables are printed; a pipe has no width of its own, and rows stay whole there."""
    return Console() if sys.stdout.isatty() else Console(width=160)


def show_table(columns: Sequence[str], rows: Iterable[Sequence[str]], title: str | None = None) -> None:
    """Print a table; brackets in it are text."""
    table = Table(*columns, title=title)
    for row in rows:
        table.add_row(*map(escape, row))
    console().print(table)


def free_path(name: str) -> Path:
    """The first of runs/NAME, runs/NAME-2, … that is not taken."""
    path, number = Path("runs") / name, 1
    while path.exists():
        number += 1
        path = Path("runs") / f"{name}-{number}"
    return path


def check_new_file(out: Path | None) -> None:
    """Refuse a file for --out that exists, or whose directory does not."""
    if out is not None and (out.exists() or not out.parent.is_dir()):
        raise HeadstartError(f"--out {out}: " + ("already exists" if out.exists() else f"{out.parent} is no directory"))


def require_flower() -> None:
    """Refuse to go on without Flower, and say how to install it."""
    if find_spec("flwr") is None:
        raise HeadstartError("Flower is missing; install it with: pip install 'headstart[federation]'")


def require_forks() -> None:
    """Refuse to be a server or a node where processes cannot be forked, and say where they can."""
    if not hasattr(os, "fork"):
        raise HeadstartError("servers and nodes run on Linux and macOS; on Windows, run them in WSL or in a container")


@contextmanager
def interruptible(out: Path, *options: str) -> Iterator[None]:
    """Ctrl-C says how to go on."""
    try:
        yield
    except KeyboardInterrupt:
        how = f"continue with the same command and {' '.join(['--out', str(out), *options])}"
        kept = how if out.is_dir() else "there was no result yet; features that were computed are kept"
        print(f"\nheadstart: interrupted; {kept}", file=sys.stderr)
        raise SystemExit(130) from None
