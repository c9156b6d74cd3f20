"""Commands that list what a recipe can name: methods, backbones, datasets."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.table import Table

from headstart.cli.shared import console
from headstart.errors import HeadstartError


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
        console().print(table)
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
    console().print(table)
    print("headstart methods NAME shows every key of a method")


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
    console().print(table)


def datasets() -> None:
    """The known data sets; HEADSTART_DATA/NAME/SPLIT.parquet comes before the hub."""
    from headstart.data import KNOWN

    table = Table("dataset", "task", "classes", "clients by", "hub", "note")
    for name, known in KNOWN.items():
        by = known.client or known.domain or ""
        table.add_row(name, known.task, str(known.classes), by, known.hub or "", known.note)
    console().print(table)
