"""Commands that show runs and data: report, dashboard, partition."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headstart.cli.shared import (
    Imports,
    RecipeFile,
    Settings,
    check_folder,
    check_new_file,
    console,
    free_path,
    show_table,
)
from headstart.errors import HeadstartError

if TYPE_CHECKING:
    from headstart.config.recipe import Recipe
    from headstart.data import Federation


def report(
    runs: Annotated[list[Path], typer.Argument(help="Run directories, or folders of them; finished or not.")],
    out: Annotated[
        Path | None, typer.Option(help="A folder; by default the one given, or the first free runs/report for several.")
    ] = None,
) -> None:
    """One page about some runs, with every picture as SVG, PNG and PDF and the table as CSV, Markdown and LaTeX."""
    from headstart.records import Record, find
    from headstart.report import write_folder

    check_folder(out)
    found = find(runs)
    if not found:
        raise HeadstartError(f"{', '.join(map(str, runs))}: there is no run; headstart run RECIPE --out DIR makes one")
    where = out or (runs[0] if len(runs) == 1 else free_path("report"))
    files = write_folder(where, [Record.read(path) for path in found])
    print(f"{where}: {', '.join(files)}")
    print(f"open {where / 'report.html'}")


def dashboard(
    folders: Annotated[list[Path], typer.Argument(help="Run directories, or folders of them, as they come.")],
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any that is free.")] = 8050,
    host: Annotated[str, typer.Option(help="Who may look: by default this machine only.")] = "127.0.0.1",
) -> None:
    """A page on this machine that follows runs while they go on, and compares those that are chosen."""
    from headstart.report.dashboard import LOOPBACK, Dashboard

    with Dashboard(folders, host, port) as server:
        if host not in LOOPBACK:
            print(f"whoever reaches {host} can read these runs", file=sys.stderr)
        print(f"{server.url} shows the runs in {', '.join(map(str, folders))}; Ctrl-C stops it", flush=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print()


def partition(
    recipe: RecipeFile,
    settings: Settings = None,
    out: Annotated[Path | None, typer.Option(help="Also write a heat map: a .png, .svg or .pdf file.")] = None,
    show: Annotated[
        int, typer.Option(min=0, help="Show so many training texts as the model reads them, in its prompt or template.")
    ] = 0,
    imports: Imports = None,
) -> None:
    """Data distribution across clients, as a table and, with --out, a heat map; with --show, what the model reads."""
    from headstart.config.recipe import Recipe
    from headstart.data import Federation
    from headstart.report import partition_figure, partition_table, save

    if out is not None and out.suffix not in (".png", ".svg", ".pdf"):
        raise HeadstartError(f"--out {out}: give a name that ends in .png, .svg or .pdf")
    check_new_file(out)
    given = Recipe.load(recipe, settings or ())
    federation = Federation.of(given)
    dataset = federation.dataset
    if show:
        _show_texts(given, federation, show)
    if dataset.target != "classes":
        if out is not None:
            raise HeadstartError(f"--out {out}: a heat map is one of classes, and these data have none; leave it out")
        show_table(("client", "training examples"), zip(federation.names, map(str, federation.sizes), strict=True))
        print(f"{dataset.target}: {', '.join(dataset.classes)}")
        return
    console().print(partition_table(federation.names, dataset.classes, federation.counts))
    if federation.unused:
        print(f"{federation.unused:,} of {len(federation.owners):,} training examples are not assigned to any client")
    if out is not None:
        save(partition_figure(federation.counts, dataset.classes, federation.names), out)
        print(f"heat map: {out}")


def _show_texts(recipe: Recipe, federation: Federation, count: int) -> None:
    """Print some training texts of each task as the model reads them, cut as it cuts them, and what it is to answer."""
    from headstart.backbones import load_backbones

    dataset, models = federation.dataset, recipe.models
    if dataset.kind != "text":
        raise HeadstartError(f"--show: it shows texts as the model reads them, and these data are {dataset.kind}s")
    views, names = load_backbones(models), federation.class_names
    for task, name in enumerate(federation.tasks):
        if len(federation.tasks) > 1:
            print(f"{name}\n")
        rows = federation.examples_of(task, "train")[:count]
        labels = dataset.train.labels[rows] - federation.classes_of(task).start
        transform: Any = views[task if len(views) > 1 else 0].transform
        words = recipe.model_of(task).label_words or names[task]
        for number, (value, label) in enumerate(zip(dataset.train.take(rows).raw(0, count), labels, strict=True)):
            read, completion = transform.shown(value, f"training example {number}")
            print(f"{read}\n  → {completion or words[label]}\n")
