"""Commands about a recipe and its data before a run: check, new."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Annotated

import typer

from headstart.cli.shared import Imports, RecipeFile, Settings, check_new_file, show_table
from headstart.errors import HeadstartError

_SHOWN = 50  # classes in the table


def check(recipe: RecipeFile, settings: Settings = None, imports: Imports = None) -> None:
    """Every mistake of a recipe, its paths, data and backbone in one pass, and a report on the data.

    Exit status 0: it can be run; 2: it cannot.
    """
    from headstart.runner.check import check, class_rows

    found = check(recipe, settings or ())
    for name, (federation, description) in found.federations.items():
        dataset = federation.dataset
        splits = {"training": dataset.train, "validation": dataset.validation, "test": dataset.test}
        sizes = {split: len(examples) for split, examples in splits.items() if examples is not None}
        print(f"{name}: {dataset.name}: " + ", ".join(f"{count:,} {split}" for split, count in sizes.items()))
        for line in (*description.facts, *_clients(federation.sizes.tolist(), federation.unused)):
            print(f"  {line}")
        if dataset.target == "classes" and len(dataset.classes) > 1:  # texts that are completed may have no categories
            rows = class_rows(dataset)
            show_table(("class", *sizes), rows[:_SHOWN])
            if len(rows) > _SHOWN:
                print(f"  and {len(rows) - _SHOWN:,} more classes")
        for warning in description.warnings:
            print(f"  warning: {warning}")
    if found.problems:
        lines = "\n".join(f"  - {problem}" for problem in found.problems)
        if any("is not a readable image" in problem for problem in found.problems):
            lines += "\n  data.skip_unreadable = true leaves out images that cannot be read"
        many = (
            f"{len(found.problems)} problems, all of them found in one pass" if len(found.problems) > 1 else "a problem"
        )
        raise HeadstartError(f"{recipe}: {many}:\n{lines}")
    print(f"{recipe}: can be run")


def _clients(sizes: list[int], unused: int) -> list[str]:
    """How many clients there are, and how large."""
    held = f"{min(sizes):,} to {max(sizes):,} training examples"
    if min(sizes) == max(sizes):
        held = f"{min(sizes):,} training examples each"
    spread = f"{len(sizes):,} {'client' if len(sizes) == 1 else 'clients'} with {held}"
    return [spread + (f"; {unused:,} examples are not assigned to any client" if unused else "")]


def new(
    data: Annotated[
        Path, typer.Argument(help="A folder of images, a table (.csv, .jsonl, .parquet, …), or an .npz file.")
    ],
    out: Annotated[Path, typer.Option(help="The new recipe.")] = Path("recipe.toml"),
) -> None:
    """Look at data and write a commented recipe for them, and beside it the schema that editors check it by."""
    from headstart.config.describe import write_recipe
    from headstart.runner.new_recipe import new_recipe

    check_new_file(out)
    data = data.expanduser()
    shown = str(data) if out.resolve().parent == Path.cwd().resolve() else os.path.abspath(data)
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", data.resolve().stem).strip("-._") or "new"
    found = new_recipe(data, shown, name)
    write_recipe(out, found.text)
    print(f"{data}: {found.seen}")
    print(f"recipe: {out}; look at it, then headstart check {out}, then headstart run {out}")
