"""Commands that run recipes: run, compare, reproduce, demo."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headstart.cli.shared import (
    Imports,
    Quiet,
    Settings,
    Verbose,
    check_folder,
    console,
    free_path,
    interruptible,
    require_flower,
    show_table,
)
from headstart.errors import HeadstartError, similar_path

if TYPE_CHECKING:
    from headstart.config.recipe import Recipe
    from headstart.runner import OnMetrics, Result

DEMO = {
    "name": "demo",
    "data": {"dataset": "mnist-mini", "partition": {"kind": "dirichlet", "clients": 50, "alpha": 0.1}},
    "model": {"backbone": "efficientnet-lite0"},
    "stages": [{"method": "fedncm"}, {"method": "fed3r"}, {"method": "fedcof"}],
}


_TESTS = 10  # paired tests that are printed


class Engine(StrEnum):
    """Who runs the rounds."""

    local = "local"
    flower = "flower"


class Log(StrEnum):
    """Who is told of a run's evaluations."""

    tensorboard = "tensorboard"
    mlflow = "mlflow"
    wandb = "wandb"


def run(
    recipe: Annotated[Path | None, typer.Argument(help="A recipe (TOML); with --resume, the one in --out.")] = None,
    settings: Settings = None,
    out: Annotated[Path | None, typer.Option(help="Run directory; by default the first free runs/NAME.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the interrupted run in --out.")] = False,
    engine: Annotated[
        Engine, typer.Option(help="local: all clients in this process; flower: a node each on Flower's simulation.")
    ] = Engine.local,
    log: Annotated[
        list[Log] | None, typer.Option("--log", help="Also log every evaluation there (repeatable).")
    ] = None,
    imports: Imports = None,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Run a recipe: a table here, and a run directory with metrics, model and report."""
    from headstart.config.recipe import Recipe

    if out is None and resume:
        raise HeadstartError("--resume needs --out, the directory of the run to continue")
    if recipe is None and not resume:
        raise HeadstartError("which recipe? give a TOML file, or --resume --out DIR to continue a run")
    if recipe is None and out is not None:
        recipe = out / "recipe.toml"
        if not recipe.is_file():
            raise HeadstartError(f"--resume: {out} holds no run{similar_path(out)}")
    loaded = Recipe.load(recipe or "", settings or ())
    _run_and_show(loaded, out or free_path(loaded.name), resume, engine, log or (), quiet)


def compare(
    recipes: Annotated[list[Path], typer.Argument(help="Recipes (TOML); lists in the place of values are tried out.")],
    settings: Settings = None,
    out: Annotated[
        Path | None, typer.Option(help="A directory for all runs; by default the first free runs/compare.")
    ] = None,
    choose: Annotated[
        list[str] | None, typer.Option(help="A key of which only the value that is best on validation data is shown.")
    ] = None,
    imports: Imports = None,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Run recipes, and every combination of values they list; a table of means over the seeds.

    With --out of an interrupted comparison, finished runs stay and the others go on.
    """
    from headstart.report import score
    from headstart.runner.compare import compare

    where = out or free_path("compare")

    def say(point: object, summary: dict[str, Any]) -> None:
        if not quiet:
            print(f"{getattr(point, 'folder', '')}: {score(summary)}", flush=True)

    with interruptible(where, "the same command and"):
        found = compare(recipes, where, settings or (), say, choose=choose or ())
    if quiet:
        return
    show_table(*found.table())
    tests = found.tests()
    for test in tests[:_TESTS]:
        print(_tested(test))
    if len(tests) > _TESTS:
        print(f"and {len(tests) - _TESTS} more tests, in {where / 'compare-tests.csv'}")
    print(f"tables: {', '.join(str(where / f'compare.{ending}') for ending in ('csv', 'md', 'tex'))}")
    print(f"open {where / 'report.html'}")


def _tested(test: dict[str, Any]) -> str:
    """A paired test in a line."""
    known = {"best", "other", "stage", "seeds", "difference", "p_value", "p_holm"}
    under = ", ".join(f"{key} {value}" for key, value in test.items() if key not in known)
    p = "no spread over the seeds" if test["p_holm"] is None else f"p = {test['p_holm']:.2g}"
    return (
        f"{f'{under}: ' if under else ''}{test['best']} − {test['other']}: {100 * test['difference']:.2f} points over "
        f"{test['seeds']} seeds ({p}, paired t-test, Holm)"
    )


def reproduce(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="[ROWS]...", help="Rows, tables (fedncm/2) or papers; all by default.")
    ] = None,
    show: Annotated[bool, typer.Option("--list", help="Only show the rows, and which of them can run here.")] = False,
    out: Annotated[
        Path | None, typer.Option(help="A directory for all runs; by default the first free runs/reproduce.")
    ] = None,
    as_published: Annotated[
        bool, typer.Option("--as-published", help="Closed forms by the papers' own code, too, where it differs.")
    ] = False,
    mirrored: Annotated[
        bool, typer.Option("--mirrored", help="With --as-published: half of the training images mirrored, as there.")
    ] = False,
    noisy: Annotated[
        bool, typer.Option("--noisy", help="With --as-published: by its second code, which adds images with noise.")
    ] = False,
    closed_form: Annotated[
        bool, typer.Option("--closed-form", help="Only heads in closed form: minutes, once features are cached.")
    ] = False,
    formulas: Annotated[
        bool, typer.Option("--formulas", help="Only what a formula gives: costs, in seconds; needs no data.")
    ] = False,
) -> None:
    """The papers' printed figures beside those of a run or of a formula.

    Data are looked for in HEADSTART_DATA, weights in HEADSTART_WEIGHTS. With --out of an interrupted reproduction,
    finished runs stay and the others go on.
    """
    from headstart.published import COLUMNS, Found, listed, published_or_why, reproduce, select

    check_folder(out)
    rows = select(names or [], closed_form, formulas)
    if show:
        for line in listed(rows):
            print(line)
        return
    where = out or free_path("reproduce")

    def say(found: Found, left: float | None) -> None:
        row, _, measured, difference, _, note = found.cells
        beside = f"published {published_or_why(found.row)}" + (f", difference {difference}" if difference else "")
        print(f"{row}: {measured}; {beside}" if measured else f"{row}: left out: {note}", flush=True)
        if left and sys.stderr.isatty():
            print(f"about {left / 60:.0f} min left" if left > 90 else f"about {left:.0f} s left", file=sys.stderr)

    with interruptible(where, "the same command and"):
        found = reproduce(rows, where, say, as_published or mirrored or noisy, mirrored, noisy)
    show_table(COLUMNS, [each.cells for each in found])
    print(f"tables: {where} (open {where / 'reproduce.html'}); the page of results: {where / 'results.md'}")


def demo(
    out: Annotated[Path | None, typer.Option(help="Run directory; by default the first free runs/demo.")] = None,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """FedNCM, Fed3R and FedCOF on 50 clients over MNIST, through EfficientNet-Lite0: real weights, real data."""
    from headstart.config.recipe import Recipe

    _run_and_show(Recipe.parse(DEMO), out or free_path("demo"), False, quiet=quiet)


def _run_and_show(
    recipe: Recipe,
    out: Path,
    resume: bool,
    engine: Engine = Engine.local,
    log: Sequence[Log] = (),
    quiet: bool = False,
) -> None:
    from headstart.report import quality, remarks, summary_table
    from headstart.runner import run
    from headstart.runner.trackers import trackers

    start: Callable[[Recipe, Path, bool, OnMetrics], Result] = run
    if engine == Engine.flower:
        require_flower()
        from headstart.deploy.apps import simulate

        start = simulate
    with interruptible(out, "headstart run --resume"), trackers([each.value for each in log], recipe, out) as tell:
        result = start(recipe, out, resume, tell)
    if quiet:
        return
    console().print(summary_table(result.summary))
    if result.federation.unused:
        print(f"{result.federation.unused:,} training examples are not assigned to any client")
    for stage in result.summary["stages"]:
        for remark in (quality(stage), *remarks(stage)):
            if remark:
                print(remark)
        for dropped in stage["dropped"]:
            print(f"excluded from {stage['method']}, round {dropped['round']}: {dropped['clients']}: {dropped['why']}")
    print(f"run directory: {out} (open {out / 'report.html'})")
