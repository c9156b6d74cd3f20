"""Commands of `headstart deploy`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from headstart.cli.shared import RecipeFile, require_flower

deploy = typer.Typer(help="A federation of real machines.", no_args_is_help=True)


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
