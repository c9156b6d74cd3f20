"""Commands that list what a recipe can name: methods, backbones, datasets."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from headstart.cli.shared import Imports, check_new_file, show_table
from headstart.errors import HeadstartError


def _complete_method(incomplete: str) -> list[str]:
    from headstart.config.stage import STAGES, load_plugins

    load_plugins()
    return [name for name in STAGES if name.startswith(incomplete)]


def _complete_table(incomplete: str) -> list[str]:
    from headstart.config.describe import tables

    return [name for name in tables() if name.startswith(incomplete)]


def methods(
    name: Annotated[
        str | None, typer.Argument(help="A method, to see every key of its stage.", autocompletion=_complete_method)
    ] = None,
    imports: Imports = None,
) -> None:
    """The methods and what is theirs alone; of one method, every key with what it accepts, its default and meaning."""
    from headstart.config.stage import STAGES, load_plugins
    from headstart.errors import nearest

    load_plugins()
    if name is not None and name not in STAGES:
        raise HeadstartError(f"{name!r} is not a method; {nearest(name, STAGES)}")
    if name is not None:
        show_keys(name)
        return
    rows = []
    for method, stage in STAGES.items():
        family = next(
            base
            for base in stage.__mro__
            if base.__name__ in ("ClosedFormStage", "TrainingStage", "RoundKeys", "SGDKeys")
        )
        usual = {key: field.default for key, field in family.model_fields.items()}  # type: ignore[attr-defined]
        own = {k: f.default for k, f in stage.model_fields.items() if not f.is_required() and k != "method"}
        keys = [f"{k} = {default!r}" for k, default in own.items() if k not in usual or usual[k] != default]
        rows.append((method, (stage.__doc__ or "").strip(), "\n".join(keys)))
    show_table(("method", "what it is", "its own keys and their defaults"), rows)
    print("headstart methods NAME shows every key of a method")


def keys(
    table: Annotated[
        str | None,
        typer.Argument(
            help="recipe, data, data.partition.KIND, model, tasks, or a method.", autocompletion=_complete_table
        ),
    ] = None,
    imports: Imports = None,
) -> None:
    """The keys of a table of a recipe: what each accepts, its default and what it means."""
    from headstart.config.describe import tables

    if table is None:
        show_table(("table", "what it is"), [(n, " ".join((t.__doc__ or "").split())) for n, t in tables().items()])
        print("headstart keys TABLE shows every key of a table")
        return
    show_keys(table)


def show_keys(table: str) -> None:
    """Print the keys of a table, or of a method's stage."""
    from headstart.config.describe import keys_of

    about, rows = keys_of(table)
    show_table(("key", "accepted", "default", "what it is"), rows, f"{table}: {about}")


def schema(
    out: Annotated[Path | None, typer.Option(help="Write it to a new file instead of printing it.")] = None,
    imports: Imports = None,
) -> None:
    """The JSON schema of recipes, for editors: a recipe names it in its first line, `#:schema FILE`."""
    from headstart.config.describe import schema
    from headstart.core.files import write_text

    check_new_file(out)
    if out is None:
        print(schema(), end="")
        return
    write_text(out, schema())
    print(f"schema: {out}; name it in the first line of a recipe: #:schema {out.name}")


def backbones() -> None:
    """The backbones that have a short name, and the other ways to name one."""
    from headstart.backbones import BACKBONES

    rows = [(name, str(entry.dim), entry.about) for name, entry in BACKBONES.items()]
    rows += [
        ("hf/ID, or a local folder", "", "any vision or text encoder of transformers; pooling cls or mean"),
        ("torchvision/NAME", "", "needs the extra headstart[torchvision]"),
        ("timm/NAME", "", "needs the extra headstart[timm]"),
        ("features", "", "the data already are features"),
    ]
    show_table(("backbone", "features", "about"), rows)


def datasets() -> None:
    """The known data sets; HEADSTART_DATA/NAME/SPLIT.parquet comes before the hub."""
    from headstart.config.catalog import KNOWN

    rows = [
        (name, known.task, str(known.classes), known.client or known.domain or "", known.hub or "", known.note)
        for name, known in KNOWN.items()
    ]
    show_table(("dataset", "task", "classes", "clients by", "hub", "note"), rows)
