"""The commands: they parse, call and print."""

from __future__ import annotations

import sys
from typing import Annotated

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
from headstart.cli.shared import logging_to_terminal
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
    """Run the command line; a user's mistake is one sentence and exit status 2."""
    try:
        with logging_to_terminal():
            app()
    except HeadstartError as error:
        print(f"headstart: {error}", file=sys.stderr)
        raise SystemExit(2) from None
