"""How far work has come: progress bars with the time left on a terminal, and a file for those who look on."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from headstart.core.files import write_json

_PATIENCE = 1.0  # seconds before a bar is shown, and between two notes in the file

_noted: Path | None = None


@contextmanager
def reported(path: Path | None) -> Iterator[None]:
    """Meanwhile, progress is noted in a file too: what is done, how much of it, and since when."""
    global _noted
    before, _noted = _noted, path
    try:
        yield
    finally:
        _noted = before
        if path is not None:
            path.unlink(missing_ok=True)


@contextmanager
def progress(description: str, total: int, done: int = 0) -> Iterator[Callable[[int], None]]:
    """Yield a function that advances the bar by so many steps; silent unless standard error is a terminal."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    bar = Progress(*columns, console=Console(stderr=True), transient=True)
    task = bar.add_task(description, total=total, completed=done)
    start, last, path, first = time.monotonic(), 0.0, _noted, done
    shown = sys.stderr.isatty()

    def advance(steps: int) -> None:
        nonlocal done, last
        done += steps
        now = time.monotonic()
        if path is not None and now - last > _PATIENCE:
            last, seconds = now, now - start
            write_json(path, {"what": description, "first": first, "done": done, "total": total, "seconds": seconds})
        if shown:
            bar.advance(task, steps)
            if not bar.live.is_started and now - start > _PATIENCE:
                bar.start()

    advance(0)
    try:
        yield advance
    finally:
        if shown:
            bar.stop()
