"""What several commands share: arguments, where a run goes, and how tables and interruptions are shown."""

from __future__ import annotations

import errno
import logging
import os
import re
import signal
import sys
import threading
from _thread import interrupt_main
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from importlib import import_module
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from stat import S_ISDIR
from types import FrameType
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from headstart.core.progress import hide_progress
from headstart.errors import HeadstartError, first_line, nearest_path

_NUMBER = re.compile(r"([-−]?[\d.,]+(e[-+]?\d+)?( (%|[kMGT]?B|s))?( ± [\d.,]+)?)?")
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

RecipeFile = Annotated[Path, typer.Argument(help="A recipe (TOML).")]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", help="Change a key: stages.0.shrinkage=0.1; unset it: stages.0.shrinkage= (repeatable)."),
]


def _import(names: list[str] | None) -> list[str] | None:
    """Import modules, or files, from here or from what is installed."""
    for name in names or ():
        sys.path[:0] = [] if str(Path.cwd()) in sys.path else [str(Path.cwd())]
        try:
            if not name.endswith(".py"):
                import_module(name)
                continue
            if not Path(name).is_file():
                raise HeadstartError(f"--import {name}: {nearest_path(name)}")
            spec = spec_from_file_location(Path(name).stem, name)
            assert spec is not None
            assert spec.loader is not None
            sys.modules[spec.name] = module = module_from_spec(spec)
            spec.loader.exec_module(module)
        except HeadstartError:
            raise
        except Exception as error:  # a module of the user's raises what it likes
            raise HeadstartError(f"--import {name}: {type(error).__name__}: {first_line(error)}") from None
    return names


Imports = Annotated[
    list[str] | None,
    typer.Option(
        "--import", callback=_import, help="Import a module, or a .py file, that registers methods (repeatable)."
    ),
]


def _log_from(level: int) -> Callable[[typer.Context, bool], bool]:
    """What an option does that shows messages from this level on, until the command is done; above warnings, no
    progress."""

    def apply(context: typer.Context, asked: bool) -> bool:
        log = logging.getLogger("headstart")
        if asked:
            context.call_on_close(partial(log.setLevel, log.level))
            context.call_on_close(partial(hide_progress, False))
            log.setLevel(level)
            hide_progress(level > logging.WARNING)
        return asked

    return apply


Quiet = Annotated[
    bool,
    typer.Option(
        "--quiet", "-q", callback=_log_from(logging.ERROR), help="Print nothing but errors; run.log has the rest."
    ),
]
Verbose = Annotated[
    bool, typer.Option("--verbose", "-v", callback=_log_from(logging.INFO), help="Print every evaluation as it comes.")
]


class _Terminal(logging.Handler):
    """Messages to standard error, whatever that is at the moment."""

    def emit(self, record: logging.LogRecord) -> None:
        """One message, one line."""
        print(self.format(record), file=sys.stderr)


def of_disk(error: OSError) -> str:
    """What a disk, or whatever else a file stands for, did not do."""
    sentence = ": ".join(str(part) for part in (error.filename, error.strerror or error) if part)
    if error.errno not in _FULL:
        return sentence
    return f"{sentence}; make room and start again; a run that left a checkpoint goes on with --resume"


@contextmanager
def logging_to_terminal() -> Iterator[None]:
    """Meanwhile, messages of the library go to standard error: warnings and errors, unless --quiet or --verbose says
    otherwise."""
    log, handler = logging.getLogger("headstart"), _Terminal()
    log.addHandler(handler)
    try:
        yield
    finally:
        log.removeHandler(handler)


def console() -> Console:
    """Where tables are printed; a pipe has no width of its own, and rows stay whole there."""
    return Console() if sys.stdout.isatty() else Console(width=160)


def show_table(columns: Sequence[str], rows: Iterable[Sequence[str]], title: str | None = None) -> None:
    """Print a table, numbers to the right; brackets in it are text."""
    table, rows = Table(title=title), [*rows]
    for place, column in enumerate(columns):
        numeric = all(_NUMBER.fullmatch(row[place]) for row in rows)
        table.add_column(column, justify="right" if numeric else "left", overflow="fold")
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
        taken = "it already exists; give another name, or remove it"
        raise HeadstartError(
            f"--out {out}: {taken if out.exists() else f'{out.parent} is no directory; create it first'}"
        )


def check_folder(out: Path | None) -> None:
    """Refuse a place for --out where no folder can be: a file, or symbolic links that lead to themselves."""
    with suppress(FileNotFoundError, NotADirectoryError):
        if out is not None and not S_ISDIR(out.stat().st_mode):
            raise HeadstartError(f"--out {out}: this is a file; give a folder")


def require_flower() -> None:
    """Refuse to go on without Flower, and say how to install it."""
    if find_spec("flwr") is None:
        raise HeadstartError("Flower is missing; install it with: pip install 'headstart[federation]'")


def require_forks() -> None:
    """Refuse to be a server or a node where processes cannot be forked, and say where they can."""
    if not hasattr(os, "fork"):
        raise HeadstartError("servers and nodes run on Linux and macOS; on Windows, run them in WSL or in a container")


@contextmanager
def interruptible(out: Path, how: str) -> Iterator[None]:
    """Ctrl-C says how to go on; it waits where an import is under way or a finaliser would swallow it."""
    handler, print_ignored, waiting = signal.getsignal(signal.SIGINT), sys.unraisablehook, list[threading.Timer]()

    main = threading.get_ident()

    def again() -> None:
        if hasattr(signal, "pthread_kill"):  # wakes what sleeps or reads, which the other does not
            signal.pthread_kill(main, signal.SIGINT)
        else:
            interrupt_main()

    def wait() -> None:
        waiting.append(threading.Timer(0.05, again))
        waiting[-1].start()

    def interrupt(number: int, frame: FrameType | None) -> None:
        while frame is not None and frame.f_code.co_filename != "<frozen importlib._bootstrap>":
            frame = frame.f_back
        if frame is None:
            raise KeyboardInterrupt
        wait()  # torch ends the process if its import is interrupted

    def ignored(error: sys.UnraisableHookArgs) -> None:
        if issubclass(error.exc_type, KeyboardInterrupt):
            wait()
        else:
            print_ignored(error)

    if handler is signal.default_int_handler:  # a job in the background may ignore Ctrl-C
        signal.signal(signal.SIGINT, interrupt)
    sys.unraisablehook = ignored
    try:
        yield
    except KeyboardInterrupt:
        nothing = "there was no result yet; features that were computed are kept"
        kept = f"continue with {how} --out {out}" if out.is_dir() else nothing
        print(f"\nheadstart: interrupted; {kept}", file=sys.stderr)
        raise SystemExit(130) from None
    finally:
        for timer in waiting:
            timer.cancel()
        sys.unraisablehook = print_ignored
        signal.signal(signal.SIGINT, handler)
