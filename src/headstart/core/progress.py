"""How far work has come: progress bars with the time left on a terminal, and a file for those who look on."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from headstart.core.files import write_json

_PATIENCE = 1.0  # seconds before a bar is shown, and between two notes in the file

_noted: Path | None = None
_hidden = False


def hide_progress(hidden: bool = True) -> None:
    """From now on, no bars are shown in this process."""
    global _hidden
    _hidden = hidden


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
    """Yield a function that advances the bar by so many steps; silent unless standard error is a terminal, or this is a
    notebook."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    bar = Progress(*columns, console=Console(stderr=True), transient=True)
    task = bar.add_task(description, total=total, completed=done)
    start, last, path, first = time.monotonic(), 0.0, _noted, done
    shown = sys.stderr.isatty() and not _hidden
    notebook = None if shown or _hidden else _notebook()

    def advance(steps: int) -> None:
        nonlocal done, last
        done += steps
        now = time.monotonic()
        if path is not None and now - last > _PATIENCE:
            last, seconds = now, now - start
            write_json(path, {"what": description, "first": first, "done": done, "total": total, "seconds": seconds})
        if notebook is not None and now - start > _PATIENCE and steps:
            notebook(f"{description}: {done:,} of {total:,}, {_left((now - start) / (done - first) * (total - done))}")
        if shown:
            bar.advance(task, steps)
            if not bar.live.is_started and now - start > _PATIENCE:
                bar.start()

    advance(0)
    try:
        yield advance
    finally:
        if notebook is not None:
            notebook("")
        if shown:
            bar.stop()


def _left(seconds: float) -> str:
    return f"{seconds:.0f} s left" if seconds < 90 else f"{seconds / 60:.0f} min left"


def _notebook() -> Callable[[str], None] | None:
    """What shows a line of text in the cell of a notebook, again and again in the same place; None elsewhere."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    if shell is None or not hasattr(shell, "kernel"):
        return None
    from IPython.display import display

    place: Any = None
    last = 0.0

    def show(text: str) -> None:
        nonlocal place, last
        if text and time.monotonic() - last < _PATIENCE / 4:
            return
        last = time.monotonic()
        if place is None and text:
            place = display({"text/plain": text}, raw=True, display_id=True)  # type: ignore[no-untyped-call]
        elif place is not None:
            place.update({"text/plain": text}, raw=True)

    return show
