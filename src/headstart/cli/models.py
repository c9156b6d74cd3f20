"""Commands about the model of a finished run: predict, export, push, update, replay."""

from __future__ import annotations

import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from headstart.cli.shared import Imports, check_folder, check_new_file, show_table
from headstart.errors import HeadstartError

Run = Annotated[Path, typer.Argument(help="The directory of a finished run.")]
TaskName = Annotated[str | None, typer.Option("--task", help="Of a run with several tasks, the one that is meant.")]
ClientName = Annotated[
    str | None, typer.Option("--client", help="A client's own model: its name as in clients.csv, or its number.")
]

_SHOWN = 20  # predictions in the table
_WIDEST = 80  # characters of an input there


class Format(StrEnum):
    """A whole model as one graph, or as the file of a language model."""

    onnx = "onnx"
    openvino = "openvino"
    gguf = "gguf"


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
        Path | None,
        typer.Option(help="Also write a CSV file: the probabilities of all classes, all numbers, or completions."),
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Of a completion: the most tokens.")] = 64,
    temperature: Annotated[float, typer.Option(min=0, help="Of a completion: 0 takes the likeliest tokens.")] = 0.0,
    top_p: Annotated[float, typer.Option(min=0, max=1, help="Sample from the likeliest tokens of this share.")] = 1.0,
    seed: Annotated[int, typer.Option(min=0, help="Of completions that are sampled.")] = 0,
    chat: Annotated[bool, typer.Option("--chat", help="Prompts are what a user says, in the chat template.")] = False,
    skip_unreadable: Annotated[
        bool, typer.Option("--skip-unreadable", help="Leave out images, and rows of tables, that cannot be read.")
    ] = False,
    imports: Imports = None,
) -> None:
    """The classes, numbers or labels of new inputs, or completions of prompts, by the model of a finished run."""
    from headstart.export import Model

    check_new_file(out)
    model = Model.load(run, task, client, module)
    if model.store.generates:
        from headstart.backbones.completions import Sampling
        from headstart.export.completions import completions, write_completions

        how, streams = Sampling(max_new_tokens, temperature, top_p, seed, chat), sys.stdout.isatty()
        completed: list[tuple[str, str]] = []
        begun: list[str] = []

        def show(prompt: str, piece: str) -> None:
            if len(begun) == len(completed):  # the first piece of the next completion
                begun.append(prompt)
                print(f"{_short(prompt)}\n    ", end="")
            print(piece, end="", flush=True)

        for prompt, completion in completions(model, inputs, how, show if streams else None):
            completed.append((prompt, completion))
            print("" if streams else f"{_short(prompt)}\n    {completion.strip()}", flush=True)
        if out is not None:
            write_completions(out, completed)
            print(f"completions: {out}")
        return
    found = model.predict(inputs, skip_unreadable)
    columns, rows = found.table()
    show_table(columns, [[_short(given), *cells] for given, *cells in rows[:_SHOWN]])
    if len(rows) > _SHOWN:
        print(f"and {len(rows) - _SHOWN:,} more" + ("" if out else "; --out FILE.csv writes all of them"))
    if out is not None:
        found.write(out)
        print(f"predictions: {out}")


def _short(text: str) -> str:
    return text if len(text) <= _WIDEST else text[: _WIDEST - 1] + "…"


def export(
    run: Run,
    out: Annotated[Path, typer.Option(help="A new directory.")],
    task: TaskName = None,
    client: ClientName = None,
    merge: Annotated[
        bool, typer.Option("--merge", help="Add a LoRA to the backbone's weights; with --format it always is.")
    ] = False,
    format: Annotated[
        Format | None,
        typer.Option(
            help="The whole model as one graph, from preprocessed inputs to probabilities; or as a GGUF file."
        ),
    ] = None,
    imports: Imports = None,
) -> None:
    """Write the model of a finished run as files that peft, transformers or a recipe load, or as one graph."""
    from headstart.export import export

    check_folder(out)
    files = export(run, out, task, client, merge, format.value if format else None)
    print(f"{out}: {', '.join(files)}")


def push(
    run: Run,
    repo: Annotated[str, typer.Argument(help="A repository on the Hugging Face hub, USER/NAME; made if need be.")],
    task: TaskName = None,
    client: ClientName = None,
    merge: Annotated[bool, typer.Option("--merge", help="Add a LoRA to the backbone's weights.")] = False,
    private: Annotated[bool, typer.Option("--private", help="A new repository is private.")] = False,
) -> None:
    """Export the model of a finished run to the Hugging Face hub, with a card that says what was trained and how."""
    from headstart.export.hub import push

    print(push(run, repo, task, client, merge, private))


def update(
    run: Run,
    add: Annotated[
        list[str] | None, typer.Option(help="Data of a new client, or NAME=DATA; read as the recipe's (repeatable).")
    ] = None,
    remove: Annotated[
        list[str] | None, typer.Option(help="A client to forget, by its name in clients.csv (repeatable).")
    ] = None,
    classes: Annotated[list[str] | None, typer.Option("--class", help="A new class (repeatable).")] = None,
) -> None:
    """Add clients to a finished closed form, remove them, add classes: the head is solved for again, exactly.

    The last stage must have keep_statistics = true. Nobody else is asked.
    """
    from headstart.export import update

    named = [each.split("=", 1) if "=" in each else [Path(each).stem, each] for each in add or ()]
    if len({name for name, _ in named}) < len(named):
        raise HeadstartError("--add: two clients have the same name; give NAME=DATA")
    found = update(run, dict(named), remove or (), classes or ())
    print(f"{run}: {len(found.clients)} clients, {len(found.classes)} classes, {found.examples:,} examples")
    if found.empty:
        print(f"nobody has an example of: {', '.join(found.empty)}; a class has the name, or the number, in the data")
    if found.test_examples:
        from headstart.report.tables import metric_cell, metric_heading, metrics_of

        both = found.before, found.after
        rows = [[metric_heading(n), *(metric_cell(n, [each]) for each in both)] for n in metrics_of(both)]
        show_table(["metric", "before", "after"], rows)
        print(f"tested on {found.test_examples:,} examples: the run's test split, and those of clients that were added")
    else:
        print("not tested: the run's test split is not here, and no client that was added has test examples")
    print(f"head: {run / 'model' / 'head.safetensors'}; the stages of the run's summary are as before the update")


def replay(
    run: Annotated[Path, typer.Argument(help="The directory of a finished run of fedmezo.")],
    out: Annotated[Path | None, typer.Option(help="Where the model goes; by default RUN/replay.")] = None,
) -> None:
    """Rebuild the model of a FedMeZO run from the pre-trained weights and its log of seeds and scalars."""
    from headstart.export.replay import replay

    check_folder(out)
    where = out or run / "replay"
    differ = replay(run, where)
    verdict = f"differs from the run's in {', '.join(differ)}" if differ else "is bitwise identical to the run's"
    print(f"{where / 'model'}: the model {verdict}")
