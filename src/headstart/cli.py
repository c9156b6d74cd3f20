"""The commands: they parse, call and print."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import StrEnum
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from headstart.errors import HeadstartError

app = typer.Typer(
    help="Federated learning that starts from a pre-trained model.", no_args_is_help=True, add_completion=False,
    pretty_exceptions_enable=False,
)  # fmt: skip

deploy = typer.Typer(help="A federation of real machines.", no_args_is_help=True)
app.add_typer(deploy, name="deploy")


class Engine(StrEnum):
    """Who runs the rounds."""

    local = "local"
    flower = "flower"


class Log(StrEnum):
    """Who is told of a run's evaluations."""

    tensorboard = "tensorboard"
    mlflow = "mlflow"
    wandb = "wandb"


class Format(StrEnum):
    """A whole model as one graph."""

    onnx = "onnx"
    openvino = "openvino"


RecipeFile = Annotated[Path, typer.Argument(help="A recipe (TOML).")]
Run = Annotated[Path, typer.Argument(help="The directory of a finished run.")]
TaskName = Annotated[str | None, typer.Option("--task", help="Of a run with several tasks, the one that is meant.")]
ClientName = Annotated[
    str | None, typer.Option("--client", help="A client's own model: its name as in clients.csv, or its number.")
]
Settings = Annotated[list[str] | None, typer.Option("--set", help="Change a key: stages.0.shrinkage=0.1 (repeatable).")]

_SHOWN = 20  # predictions in the table
_WIDEST = 80  # characters of an input there

DEMO = {
    "name": "demo",
    "data": {"dataset": "mnist-mini", "partition": {"kind": "dirichlet", "clients": 50, "alpha": 0.1}},
    "model": {"backbone": "efficientnet-lite0"},
    "stages": [{"method": "fedncm"}, {"method": "fed3r"}, {"method": "fedcof"}],
}


def main() -> None:
    """Run the command line; a user's mistake is one sentence and exit status 2."""
    try:
        app()
    except HeadstartError as error:
        print(f"headstart: {error}", file=sys.stderr)
        raise SystemExit(2) from None


@app.command()
def run(
    recipe: RecipeFile,
    settings: Settings = None,
    out: Annotated[Path | None, typer.Option(help="Run directory; by default the first free runs/NAME.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the interrupted run in --out.")] = False,
    engine: Annotated[
        Engine, typer.Option(help="local: all clients in this process; flower: a node each on Flower's simulation.")
    ] = Engine.local,
    log: Annotated[
        list[Log] | None, typer.Option("--log", help="Also log every evaluation there (repeatable).")
    ] = None,
) -> None:
    """Run a recipe: a table here, and a run directory with metrics, model and report."""
    from headstart.config.recipe import Recipe

    loaded = Recipe.load(recipe, settings or ())
    if out is None and resume:
        raise HeadstartError("--resume needs --out, the directory of the run to go on with")
    _run_and_show(loaded, out or _free(loaded.name), resume, engine, log or ())


@app.command()
def compare(
    recipes: Annotated[list[Path], typer.Argument(help="Recipes (TOML); lists in the place of values are tried out.")],
    settings: Settings = None,
    out: Annotated[
        Path | None, typer.Option(help="A directory for all runs; by default the first free runs/compare.")
    ] = None,
) -> None:
    """Run recipes, and every combination of values they list; a table of means over the seeds.

    With --out of an interrupted comparison, finished runs stay and the others go on.
    """
    from headstart.config.recipe import read_table
    from headstart.records import Record
    from headstart.report import percent, write_report
    from headstart.runner.sweep import compared, expand, refuse_other_tables, sweep, write_tables

    points = expand([read_table(recipe, settings or ()) for recipe in recipes])
    where = out or _free("compare")
    refuse_other_tables(points, where)

    def say(point: object, summary: dict[str, Any]) -> None:
        print(f"{getattr(point, 'folder', '')}: {percent(summary['accuracy'])}", flush=True)

    with _interrupted(where):
        columns, rows = compared(points, sweep(points, where, say))
    table = Table(*columns)
    for row in rows:
        table.add_row(*(escape(cell) for cell in row))
    _console().print(table)
    print(f"tables: {', '.join(str(path) for path in write_tables(where, columns, rows))}")
    write_report(where / "report.html", [Record.read(where / point.folder) for point in points])
    print(f"open {where / 'report.html'}")


@app.command()
def report(
    runs: Annotated[list[Path], typer.Argument(help="Run directories, or folders of them; finished or not.")],
    out: Annotated[
        Path | None, typer.Option(help="A folder; by default the one given, or the first free runs/report for several.")
    ] = None,
) -> None:
    """One page about some runs, with every picture as SVG and PNG and the table as CSV, Markdown and LaTeX."""
    from headstart.records import Record, find
    from headstart.report import write_folder

    found = find(runs)
    if not found:
        raise HeadstartError(f"{', '.join(map(str, runs))}: there is no run; headstart run RECIPE --out DIR makes one")
    where = out or (runs[0] if len(runs) == 1 else _free("report"))
    files = write_folder(where, [Record.read(path) for path in found])
    print(f"{where}: {', '.join(files)}")
    print(f"open {where / 'report.html'}")


@app.command()
def dashboard(
    folders: Annotated[list[Path], typer.Argument(help="Run directories, or folders of them, as they come.")],
    port: Annotated[int, typer.Option(help="0: any that is free.")] = 8050,
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


@app.command()
def reproduce(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="[ROWS]...", help="Rows, tables (fedncm/2) or papers; all by default.")
    ] = None,
    show: Annotated[bool, typer.Option("--list", help="Only show the rows, and which of them can run here.")] = False,
    out: Annotated[
        Path | None, typer.Option(help="A directory for all runs; by default the first free runs/reproduce.")
    ] = None,
) -> None:
    """The papers' printed figures beside those of a run or of a formula.

    Data are looked for in HEADSTART_DATA, weights in HEADSTART_WEIGHTS. With --out of an interrupted reproduction,
    finished runs stay and the others go on.
    """
    from headstart.published import COLUMNS, Found, published, reproduce, select, why_not

    rows = select(names or [])
    if show:
        for row in rows:
            able = "by formula" if row.formula else why_not(row) or "runs"
            print(f"{row.id}: {published(row) or 'not at hand'}; {able}")
        return
    where = out or _free("reproduce")

    def say(found: Found) -> None:
        row, printed, measured, difference, _, note = found.cells
        beside = f"published {printed or 'not at hand'}" + (f", difference {difference}" if difference else "")
        print(f"{row}: {measured}; {beside}" if measured else f"{row}: left out: {note}", flush=True)

    found = reproduce(rows, where, say)
    table = Table(*COLUMNS)
    for each in found:
        table.add_row(*(escape(cell) for cell in each.cells))
    _console().print(table)
    print(f"tables: {where} (open {where / 'reproduce.html'})")


@app.command()
def demo(
    out: Annotated[Path | None, typer.Option(help="Run directory; by default the first free runs/demo.")] = None,
) -> None:
    """FedNCM, Fed3R and FedCOF on 50 clients over MNIST, through EfficientNet-Lite0: real weights, real data."""
    from headstart.config.recipe import Recipe

    _run_and_show(Recipe.parse(DEMO), out or _free("demo"), False)


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

    _needs_flower()
    from headstart.deploy.folder import init

    commands = init(folder, Recipe.load(recipe), [name.strip() for name in nodes.split(",")], host, port)
    print(f"{folder} is ready; {folder / 'README.md'} says what goes where. On one machine, each in a terminal:")
    print("\n".join(f"  {command}" for command in commands))


@app.command()
def replay(
    run: Annotated[Path, typer.Argument(help="The directory of a finished run of fedmezo.")],
    out: Annotated[Path | None, typer.Option(help="Where the model goes; by default RUN/replay.")] = None,
) -> None:
    """Rebuild the model of a FedMeZO run from the pre-trained weights and its log of seeds and scalars."""
    from headstart.export.replay import replay

    where = out or run / "replay"
    differ = replay(run, where)
    verdict = f"differs from the run's in {', '.join(differ)}" if differ else "is the run's, bit for bit"
    print(f"{where / 'model'}: the model {verdict}")


@app.command()
def predict(
    run: Run,
    inputs: Annotated[
        list[Path], typer.Argument(help="Images, folders of images, .txt (a text on every line), .csv, or .npz with X.")
    ],
    task: TaskName = None,
    client: ClientName = None,
    module: Annotated[
        Path | None, typer.Option(help="Another module file for the same backbone: it is used with the head in it.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Also write a CSV file with the probabilities of all classes.")
    ] = None,
) -> None:
    """The classes of new inputs, by the model of a finished run."""
    from headstart.export import Model

    if out is not None and (out.exists() or not out.parent.is_dir()):
        raise HeadstartError(f"--out {out}: " + ("already exists" if out.exists() else f"{out.parent} is no directory"))
    found = Model.of(run, task, client, module).predict(inputs)
    table, rows = Table("input", "class", "probability"), found.best()
    for given, name, probability in rows[:_SHOWN]:
        shown = given if len(given) <= _WIDEST else given[: _WIDEST - 1] + "…"
        table.add_row(escape(shown), escape(name), f"{probability:.4f}")
    _console().print(table)
    if len(rows) > _SHOWN:
        print(f"and {len(rows) - _SHOWN:,} more" + ("" if out else "; --out FILE.csv writes all of them"))
    if out is not None:
        found.write(out)
        print(f"predictions: {out}")


@app.command()
def export(
    run: Run,
    out: Annotated[Path, typer.Option(help="A new directory.")],
    task: TaskName = None,
    client: ClientName = None,
    merge: Annotated[
        bool, typer.Option("--merge", help="Add a LoRA to the body's weights; with --format it always is.")
    ] = False,
    format: Annotated[
        Format | None, typer.Option(help="The whole model as one graph, from preprocessed inputs to probabilities.")
    ] = None,
) -> None:
    """Write the model of a finished run as files that peft, transformers or a recipe load, or as one graph."""
    from headstart.export import export

    files = export(run, out, task, client, merge, format.value if format else None)
    print(f"{out}: {', '.join(files)}")


@app.command()
def partition(
    recipe: RecipeFile,
    settings: Settings = None,
    out: Annotated[Path | None, typer.Option(help="Also write a heat map: a .png, .svg or .pdf file.")] = None,
) -> None:
    """Who holds which class, as a table and, with --out, as a heat map."""
    from headstart.config.recipe import Recipe
    from headstart.data import Federation
    from headstart.report import partition_figure, partition_table, save

    if out is not None and out.suffix not in (".png", ".svg", ".pdf"):
        raise HeadstartError(f"--out {out}: give a name that ends in .png, .svg or .pdf")
    if out is not None and (out.exists() or not out.parent.is_dir()):
        raise HeadstartError(f"--out {out}: " + ("already exists" if out.exists() else f"{out.parent} is no directory"))
    federation = Federation.of(Recipe.load(recipe, settings or ()))
    dataset = federation.dataset
    _console().print(partition_table(federation.names, dataset.classes, federation.counts))
    if federation.unused:
        print(f"{federation.unused:,} of {len(federation.owners):,} training examples are held by nobody")
    if out is not None:
        save(partition_figure(federation.counts, dataset.classes), out)
        print(f"heat map: {out}")


@app.command()
def methods(
    name: Annotated[str | None, typer.Argument(help="A method, to see every key of its stage.")] = None,
) -> None:
    """The methods and what is theirs alone; of one method, every key with its default and what it means."""
    from headstart.config.stage import STAGES, load_plugins
    from headstart.errors import nearest

    load_plugins()
    if name is not None and name not in STAGES:
        raise HeadstartError(f"{name!r} is not a method; {nearest(name, STAGES)}")
    if name is not None:
        table = Table("key", "default", "what it is", title=f"{name}: {(STAGES[name].__doc__ or '').strip()}")
        for key, field in STAGES[name].model_fields.items():
            if key != "method":
                default = "required" if field.is_required() else repr(field.default)
                table.add_row(key, default, " ".join((field.description or "").split()))
        _console().print(table)
        return
    table = Table("method", "what it is", "its own keys and their defaults")
    for method, stage in STAGES.items():
        family = next(
            base for base in stage.__mro__ if base.__name__ in ("ClosedFormStage", "TrainingStage", "_Rounds", "_SGD")
        )
        usual = {key: field.default for key, field in family.model_fields.items()}  # type: ignore[attr-defined]
        own = {k: f.default for k, f in stage.model_fields.items() if not f.is_required() and k != "method"}
        keys = [f"{k} = {default!r}" for k, default in own.items() if k not in usual or usual[k] != default]
        table.add_row(method, (stage.__doc__ or "").strip(), "\n".join(keys))
    _console().print(table)
    print("headstart methods NAME shows every key of a method")


@app.command()
def backbones() -> None:
    """The backbones that have a short name, and the other ways to name one."""
    from headstart.backbones import BACKBONES

    table = Table("backbone", "features", "about")
    for name, entry in BACKBONES.items():
        table.add_row(name, str(entry.dim), entry.about)
    for name, about in (
        ("hf/ID, or a local folder", "any vision or text encoder of transformers; pooling cls or mean"),
        ("torchvision/NAME", "needs the extra headstart\\[torchvision]"),
        ("timm/NAME", "needs the extra headstart\\[timm]"),
        ("features", "the data already are features"),
    ):
        table.add_row(name, "", about)
    _console().print(table)


@app.command()
def datasets() -> None:
    """The known data sets; HEADSTART_DATA/NAME/SPLIT.parquet comes before the hub."""
    from headstart.data import KNOWN

    table = Table("dataset", "task", "classes", "clients by", "hub", "note")
    for name, known in KNOWN.items():
        by = known.client or known.domain or ""
        table.add_row(name, known.task, str(known.classes), by, known.hub or "", known.note)
    _console().print(table)


def _run_and_show(
    recipe: object, out: Path, resume: bool, engine: Engine = Engine.local, log: Sequence[Log] = ()
) -> None:
    from headstart.config.recipe import Recipe
    from headstart.report import remarks, summary_table
    from headstart.runner import run
    from headstart.runner.trackers import trackers

    assert isinstance(recipe, Recipe)
    if engine == Engine.flower:
        _needs_flower()
        from headstart.deploy.apps import simulate as run
    with _interrupted(out, "--resume"), trackers([each.value for each in log], recipe, out) as tell:
        result = run(recipe, out, resume, tell)
    _console().print(summary_table(result.summary))
    if result.federation.unused:
        print(f"{result.federation.unused:,} training examples were held by nobody")
    for stage in result.summary["stages"]:
        for remark in remarks(stage):
            print(remark)
        for dropped in stage["dropped"]:
            print(f"left out of {stage['method']}, round {dropped['round']}: {dropped['clients']}: {dropped['why']}")
    print(f"run directory: {out} (open {out / 'report.html'})")


@contextmanager
def _interrupted(out: Path, *options: str) -> Iterator[None]:
    """Ctrl-C says how to go on."""
    try:
        yield
    except KeyboardInterrupt:
        how = f"go on with the same command and {' '.join(['--out', str(out), *options])}"
        kept = how if out.is_dir() else "there was no result yet; features that were computed are kept"
        print(f"\nheadstart: interrupted; {kept}", file=sys.stderr)
        raise SystemExit(130) from None


def _needs_flower() -> None:
    if find_spec("flwr") is None:
        raise HeadstartError("Flower is missing; install it with: pip install 'headstart[federation]'")


def _console() -> Console:
    # A pipe has no width of its own: rows stay whole there.
    return Console() if sys.stdout.isatty() else Console(width=160)


def _free(name: str) -> Path:
    """The first of runs/NAME, runs/NAME-2, … that is not taken."""
    path, number = Path("runs") / name, 1
    while path.exists():
        number += 1
        path = Path("runs") / f"{name}-{number}"
    return path


if __name__ == "__main__":
    main()
