"""The commands: they parse, call and print."""

from __future__ import annotations

import sys

import typer

from headstart.cli.advise import advise
from headstart.cli.data import check, new
from headstart.cli.deployment import deploy, node, server
from headstart.cli.lists import backbones, datasets, methods
from headstart.cli.models import export, predict, push, replay, update
from headstart.cli.plan import plan
from headstart.cli.reports import dashboard, partition, report
from headstart.cli.runs import compare, demo, reproduce, run
from headstart.errors import HeadstartError

app = typer.Typer(
    help="Federated learning that starts from a pre-trained model.", no_args_is_help=True, add_completion=False,
    pretty_exceptions_enable=False,
)  # fmt: skip

_COMMANDS = (
    new, check, run, compare, advise, plan, report, dashboard, reproduce, demo, replay, predict, export, push, update,
    partition, methods, backbones, datasets, server,
)  # fmt: skip
for _command in _COMMANDS:  # --help shows them in this order
    app.command()(_command)
app.add_typer(deploy, name="deploy")
app.add_typer(node, name="node")


def main() -> None:
    """Run the command line; a user's mistake is one sentence and exit status 2."""
    try:
        app()
    except HeadstartError as error:
        print(f"headstart: {error}", file=sys.stderr)
        raise SystemExit(2) from None
