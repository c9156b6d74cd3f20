"""The commands: they parse, call and print."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from typing import Annotated, NoReturn

import typer

from headstart import __version__
from headstart.cli.advise import advise
from headstart.cli.data import check, new
from headstart.cli.deployment import deploy, node, server
from headstart.cli.lists import backbones, datasets, keys, methods, schema
from headstart.cli.models import export, predict, push, replay, update
from headstart.cli.plan import plan
from headstart.cli.reports import dashboard, partition, report
from headstart.cli.runs import compare, demo, reproduce, run
from headstart.cli.shared import logging_to_terminal, of_disk
from headstart.errors import HeadstartError

app = typer.Typer(
    help="Federated learning that starts from a pre-trained model.", no_args_is_help=True,
    pretty_exceptions_enable=False,
)  # fmt: skip

_COMMANDS = (
    new, check, run, compare, advise, plan, report, dashboard, reproduce, demo, replay, predict, export, push, update,
    partition, methods, keys, schema, backbones, datasets, server,
)  # fmt: skip
for _command in _COMMANDS:  # --help shows them in this order
    app.command()(_command)
app.add_typer(deploy, name="deploy")
app.add_typer(node, name="node")


def _show_version(asked: bool) -> None:
    if asked:
        print(f"headstart {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    pass


def main() -> None:
    """Run the command line; a mistake of the user, or of their disk, is one sentence and exit status 2."""
    try:
        with logging_to_terminal():
            app()
    except SystemExit as ended:
        lost = _lost_output()
        if lost is None or ended.code:
            raise
        if isinstance(lost, BrokenPipeError):
            raise SystemExit(1) from None
        _stop(of_disk(lost))
    except HeadstartError as error:
        _stop(str(error))
    except OSError as error:
        if error.errno is None and error.filename is None:
            raise  # no disk says so
        _stop(of_disk((None if error.filename else _lost_output()) or error))


def _stop(why: str) -> NoReturn:
    print(f"headstart: {why}", file=sys.stderr)
    _lost_output()
    raise SystemExit(2) from None


def _lost_output() -> OSError | None:
    """Why what was printed cannot be written, if it cannot; it goes nowhere then, at the end of the process too."""
    try:
        print(end="", flush=True)
    except OSError as error:
        with suppress(OSError), open(os.devnull, "w", encoding="utf-8") as nowhere:
            os.dup2(nowhere.fileno(), sys.stdout.fileno())
        error.filename = "standard output"
        return error
    return None
