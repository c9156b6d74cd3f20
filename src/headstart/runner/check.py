"""Everything that is wrong with a recipe, its data and its backbone in one pass, and what the data are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from pydantic import ValidationError

from headstart.config.recipe import Data, Model, Recipe, Task, dealt_by_columns
from headstart.config.stage import MODULES
from headstart.config.toml import read_table
from headstart.data import Federation
from headstart.data.describe import Description, describe
from headstart.data.examples import Dataset
from headstart.data.load import absent, is_absent
from headstart.engine.model_store import ModelStore
from headstart.engine.setup import plan_of
from headstart.errors import HeadstartError, RecipeError
from headstart.runner.check_federation import check_federation

Part = TypeVar("Part", Data, Model)


@dataclass
class Checked:
    """What was found: the problems that a run would stop at, and the data of each task with a look at them."""

    problems: list[str] = field(default_factory=list)
    federations: dict[str, tuple[Federation, Description]] = field(default_factory=dict)


def check(path: Path | str, settings: Sequence[str] = ()) -> Checked:
    """Read a recipe, load its data and its backbone, and go on after every mistake."""
    checked = Checked()
    try:
        table = read_table(path, settings)
    except RecipeError as error:
        return Checked([*error.problems])
    recipe = None
    try:
        recipe = Recipe.parse(table)
    except RecipeError as error:
        checked.problems += error.problems
    model = _part(Model, table.get("model", {}))
    unlabelled = model is not None and model.task == "generate"
    seed = table.get("seed") if isinstance(table.get("seed"), int) else 0
    for name, data in _data(table):
        if isinstance(data, str):
            checked.problems.append(data)
            continue
        try:
            federation = Federation.of_data(data, int(seed or 0), unlabelled)
        except HeadstartError as error:
            checked.problems.append(str(error))
            continue
        found = describe(federation.dataset, model.pixel_range if model else None)
        checked.problems += found.problems
        checked.federations[name] = federation, found
    datasets = [federation.dataset for federation, _ in checked.federations.values()]
    if model is not None:
        models = (model,) if recipe is None else recipe.models
        checked.problems += _of_backbone(models, datasets, recipe)
    if recipe is not None and recipe.data is not None and checked.federations:
        try:
            check_federation(recipe, next(iter(checked.federations.values()))[0])
        except RecipeError as error:
            checked.problems += error.problems
    return checked


def _data(table: dict[str, Any]) -> Iterator[tuple[str, Data | str]]:
    """The tables of data that can be read by themselves, whatever is wrong with the rest; of one that cannot, what is
    wrong with its path, if anything."""
    tasks = table.get("tasks")
    given: list[tuple[type[Data], Any]] = [(Data, table.get("data"))]
    given += [(Task, task) for task in (tasks if isinstance(tasks, list) else ())]
    for kind, part in given:
        data = _part(kind, dealt_by_columns(part))
        if data is not None:
            yield getattr(data, "name", "data"), data
        elif isinstance(part, dict) and is_absent(part.get("dataset")):
            yield "data", absent(part["dataset"])


def _part(kind: type[Part], table: Any) -> Part | None:
    try:
        return kind.model_validate(table)
    except ValidationError:  # the recipe as a whole has said so
        return None


def _of_backbone(models: Sequence[Model], datasets: Sequence[Dataset], recipe: Recipe | None) -> Iterator[str]:
    """What is wrong with the backbone: it does not load, reads something else than the data are, or has no place for
    the module of a stage.

    models: that of each task, where each has its own prompt.
    """
    kinds, model = {dataset.kind for dataset in datasets}, models[0]
    if model.backbone == "features":
        if kinds - {"features"}:
            yield f"model.backbone: the data are {kinds.pop()}s, not features; see headstart backbones"
        return
    try:
        store = ModelStore(model, None, others=models[1:])
    except HeadstartError as error:
        yield str(error)
        return
    backbone = store.backbone
    assert backbone is not None
    for number, stage in enumerate(recipe.stages if recipe else ()):
        if stage.train in MODULES and not stage.personalises:
            try:
                store.attach(stage, plan_of(stage, frozenset(), store.fixed_head), (0, number))
            except HeadstartError as error:
                yield str(error)
            store.reset()
    for kind in sorted(kinds - {backbone.kind}):
        fix = 'set it to "features"' if kind == "features" else "see headstart backbones"
        data = kind.removesuffix("s")
        yield f"model.backbone: {backbone.name} reads {backbone.kind}s, and the data are {data}s; {fix}"


def class_rows(dataset: Dataset) -> list[list[str]]:
    """Each class with its examples in training, validation and test."""
    splits = [dataset.train, dataset.validation, dataset.test]
    counts = [np.bincount(s.labels, minlength=len(dataset.classes)) for s in splits if s is not None]
    return [[name, *(f"{count[label]:,}" for count in counts)] for label, name in enumerate(dataset.classes)]
