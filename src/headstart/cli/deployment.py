"""Commands of `headstart deploy` and `headstart node`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from headstart.cli.shared import RecipeFile, console, require_flower
from headstart.errors import HeadstartError

deploy = typer.Typer(help="A federation of real machines.", no_args_is_help=True)
node = typer.Typer(help="A machine that holds data of its own.", no_args_is_help=True)


@deploy.command()
def init(
    folder: Annotated[Path, typer.Argument(help="A new folder.")],
    recipe: RecipeFile,
    nodes: Annotated[str, typer.Option(help="Names of the nodes, with commas: hospital-a,hospital-b.")],
    host: Annotated[str, typer.Option(help="Name or address of the server, as nodes reach it.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="The server's port.")] = 9443,
) -> None:
    """Write what a federation of real machines needs: Flower's app, keys, certificates, start scripts."""
    from headstart.config.recipe import Recipe

    require_flower()
    from headstart.deploy.folder import init

    commands = init(folder, Recipe.load(recipe), [name.strip() for name in nodes.split(",")], host, port)
    print(f"{folder} is ready; {folder / 'README.md'} says what goes where. On one machine, each in a terminal:")
    print("\n".join(f"  {command}" for command in commands))


@node.command()
def ledger(state: Annotated[Path, typer.Argument(help="The node's state folder.")]) -> None:
    """All that ever left a node about its data: what was asked, what was answered, and the privacy spent."""
    from rich.table import Table

    from headstart.engine.node_ledger import NodeLedger

    found = NodeLedger(state)
    if not found.path.is_file():
        raise HeadstartError(f"{state}: there is no ledger; name the folder of a node, state/NAME in a deployment")
    left = Table("time", "run", "recipe", "stage", "round", "what", "question", "bytes", "other facts")
    for entry in (entries := found.entries()):
        known = (
            "previous",
            "time",
            "run",
            "recipe",
            "stage",
            "round",
            "kind",
            "question",
            "bytes",
            "privacy",
            "answer",
        )
        stage = f"{entry['stage']}: {entry['method']}" if "method" in entry else str(entry.get("stage", ""))
        facts = ", ".join(f"{name} {value}" for name, value in entry.items() if name not in (*known, "method"))
        cells = entry["time"], entry["run"][:8], entry["recipe"][:16], stage, str(entry.get("round", "")), entry["kind"]
        left.add_row(*cells, entry.get("question", "")[:8], f"{entry.get('bytes', 0):,}", facts)
    spent = Table("recipe", "stage", "what", "run", "unit", "epsilon", "delta", "noise by", title="privacy spent")
    for (recipe, number, what, run), privacy in found.promises().items():
        promise = [str(privacy[name]) for name in ("unit", "epsilon", "delta", "noise")] if privacy else ["no promise"]
        spent.add_row(recipe[:16], str(number), what, (run or "all")[:8], *promise)
    console().print(left, spent)
    print(f"{len(entries)} entries, {sum(entry.get('bytes', 0) for entry in entries):,} bytes; the chain is whole")
