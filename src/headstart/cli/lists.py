"""Commands that list what a recipe can name: methods, backbones, datasets."""

from __future__ import annotations

from typing import Annotated

import typer

from headstart.cli.shared import show_table
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
        fields = {key: field for key, field in STAGES[name].model_fields.items() if key != "method"}
        defaults = ["required" if field.is_required() else repr(field.default) for field in fields.values()]
        meanings = [" ".join((field.description or "").split()) for field in fields.values()]
        rows = list(zip(fields, defaults, meanings, strict=True))
        show_table(("key", "default", "what it is"), rows, f"{name}: {(STAGES[name].__doc__ or '').strip()}")
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
    from headstart.data import KNOWN

    rows = [
        (name, known.task, str(known.classes), known.client or known.domain or "", known.hub or "", known.note)
        for name, known in KNOWN.items()
    ]
    show_table(("dataset", "task", "classes", "clients by", "hub", "note"), rows)
