"""The command that says which head, and which stage after it, suits some data and budgets."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer

from headstart.cli.shared import Imports, check_new_file, show_table
from headstart.errors import HeadstartError

_UNITS = {"": 1.0, "b": 1.0, "kb": 1e3, "mb": 1e6, "gb": 1e9}


def advise(
    source: Annotated[str, typer.Argument(metavar="DATA_OR_RECIPE", help="A recipe (.toml), or data as in [data].")],
    clients: Annotated[int | None, typer.Option(min=1, help="How many clients hold the data.")] = None,
    most_bytes: Annotated[
        str | None, typer.Option("--bytes", help="Most that one client may send in all: 500kB, 20MB.")
    ] = None,
    epsilon: Annotated[
        float | None, typer.Option(help="Differential privacy of any one example: its ε, at δ = 1e-5.")
    ] = None,
    examples: Annotated[
        int | None, typer.Option(min=1, help="Of the sample: 20,000 features, 2,000 images or texts by default.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Also write the recipe to a new file.")] = None,
    imports: Imports = None,
) -> None:
    """Which head to compute, and which stage to train after it: candidates measured on a sample, and a recipe."""
    import tomli_w

    from headstart.config.describe import write_recipe
    from headstart.runner.advise import advise

    check_new_file(out)
    if epsilon is not None and not 0 < epsilon < float("inf"):
        raise HeadstartError(f"--epsilon {epsilon:g}: must be greater than 0")
    found = advise(source, clients, None if most_bytes is None else parse_bytes(most_bytes), epsilon, examples)
    show_table(found.columns, found.rows())
    for note in found.notes:
        print(note)
    if found.chosen.metrics.get("r2") is None:
        print(f"one standard error of the best accuracy is {100 * found.error:.2f} %")
    text = tomli_w.dumps(found.recipe)
    print(f"\n# the advised recipe; headstart run FILE.toml runs it\n{text}")
    if out is not None:
        write_recipe(out, text)
        print(f"recipe: {out}")


def parse_bytes(text: str) -> float:
    """Bytes from a number with a unit: 500kB, 20 MB, 1e6."""
    found = re.fullmatch(r"\s*([0-9.]+(?:e[0-9]+)?)\s*([a-z]*)\s*", text.lower())
    try:
        if found is None:
            raise ValueError(text)
        return float(found[1]) * _UNITS[found[2]]
    except (ValueError, KeyError):
        raise HeadstartError(f"--bytes {text}: give a number of bytes, such as 500kB, 20MB or 1e6") from None
