"""What no single key of a recipe shows: tables and keys that exclude each other, in words."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from headstart.config.partition import PARTITIONS, WITHOUT_CLASSES, Dirichlet, by_classes
from headstart.config.stage_checks import RecipeContext, stage_errors


def cross_field_errors(table: Mapping[str, Any]) -> list[str]:
    """What no single key shows: keys that exclude each other, and values with a rule of their own."""
    problems = []
    name, stages = table.get("name", "run"), table.get("stages")
    if isinstance(name, str) and not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
        problems.append(f"name: {name!r} names the run directory; use letters, digits, dots, dashes and underscores")
    if isinstance(stages, list) and not stages:
        problems.append("stages: empty; add a [[stages]] table with a method")
    tasks = table.get("tasks")
    if "data" not in table and not tasks:
        problems.append("data: missing; add a [data] table, or a [[tasks]] table for each of several tasks")
    if "data" in table and tasks:
        problems.append("tasks: give [data] for one task, or [[tasks]] for several, not both")
    if isinstance(tasks, list) and len(tasks) == 1:
        problems.append("tasks: there is one; give it as [data], or add another")
    if isinstance(table.get("seed"), list):
        problems.append("seed: a list of seeds is a sweep; headstart compare runs them all")
    given = tasks if isinstance(tasks, list) else []
    names = [str(task["name"]) for task in given if isinstance(task, dict) and "name" in task]
    if len(set(names)) < len(names):
        problems.append("tasks: two have the same name")
    tables = {"data": table.get("data"), **{f"tasks.{number}": task for number, task in enumerate(given)}}
    for where, data in tables.items():
        found = [*_column_errors(data), *_target_errors(data)] if isinstance(data, dict) else []
        problems += [f"{where}.{problem}" for problem in found]
    model = table.get("model")
    context = RecipeContext.of(table)
    problems += _model_errors(model, context.several_tasks) if isinstance(model, dict) else []
    problems += _prompt_errors(given, context.model_task)
    for number, stage in enumerate(stages if isinstance(stages, list) else ()):
        problems += stage_errors(number, stage, context) if isinstance(stage, dict) else []
    return problems


def _model_errors(model: Mapping[str, Any], tasks: bool) -> list[str]:
    """What is wrong with the table of a model as a whole."""
    problems, prompt, chooses = [], model.get("prompt"), model.get("task") == "choose"
    if isinstance(shades := model.get("pixel_range"), list | tuple) and len(set(shades)) == 1:
        problems.append("model.pixel_range: give two values, of black and of white; they are the same")
    if tasks and "label_words" in model:
        problems.append(
            "model.label_words: they are those of one task; with task = 'choose', give a prompt and label_words in "
            "each of the [[tasks]]"
        )
    if model.get("quantise") and "weights" in model:
        problems.append("model.weights: weights of few bits come with the backbone; leave it out, or quantise")
    if model.get("task", "classify") != "classify" and "weights" in model:
        problems.append("model.weights: a language model comes with its own; leave it out, and name its folder instead")
    if model.get("task") == "generate":
        generates = [("prompt", "prompts are in the data"), ("label_words", "there are no classes")]
        problems += [
            f"model.{key}: with task = 'generate', {why}; leave it out" for key, why in generates if key in model
        ]
        return problems
    if chooses and tasks:
        return [*problems, *(["model.prompt: with several tasks, give each its own"] if "prompt" in model else [])]
    if chooses and not {"prompt", "label_words"} <= model.keys():
        problems.append("model.task: to choose, a model needs a prompt, and label_words to choose from; give both")
    elif ("prompt" in model) < ("label_words" in model) or ("{mask}" in str(prompt)) > ("label_words" in model):
        problems.append("model: prompt and label_words belong together; give both or neither")
    if isinstance(prompt, str) and chooses and (prompt.count("{mask}") > 1 or "{text}" not in prompt):
        problems.append("model.prompt: write {text} where the text goes, and {mask} at most once")
    if isinstance(prompt, str) and "label_words" not in model and "{text}" not in prompt:
        problems.append("model.prompt: write {text} where the text goes")
    if isinstance(prompt, str) and not chooses and "label_words" in model and prompt.count("{mask}") != 1:
        problems.append(
            "model.prompt: write {mask} once, and {text} where the text goes; for words that follow the prompt, set "
            "task = 'choose'"
        )
    return problems


def _prompt_errors(tasks: Sequence[Any], how: str) -> list[str]:
    """What is wrong with the prompts of several tasks; how: what the model is to do with them."""
    problems = []
    for number, task in enumerate(tasks):
        given = {"prompt", "label_words"} & task.keys() if isinstance(task, dict) else set[str]()
        prompt = task.get("prompt") if isinstance(task, dict) else None
        masks = prompt.count("{mask}") if isinstance(prompt, str) else 0
        if given and how == "generate":
            problems.append(
                f"tasks.{number}: prompts are in the data, and there are no classes; leave {min(given)} out"
            )
        elif ("label_words" in given or masks) and how == "classify":
            problems.append(
                f"tasks.{number}: words to choose from are for model.task = 'choose'; set it, or leave them"
            )
        elif how == "choose" and len(given) < 2:
            problems.append(f"tasks.{number}: to choose, a task needs a prompt, and label_words to choose from")
        elif isinstance(prompt, str) and (masks > 1 or "{text}" not in prompt):
            problems.append(f"tasks.{number}.prompt: write {{text}} where the text goes, and {{mask}} at most once")
    return problems


def _column_errors(data: Mapping[str, Any]) -> list[str]:
    """Columns that the partition of a table of data does not read."""
    problems, how = [], data.get("partition", {"kind": Dirichlet().kind})
    kind = how.get("kind") if isinstance(how, Mapping) else None
    for column, reader in (("client_column", "natural"), ("domain_column", "domains")):
        if data.get(column) is not None and kind in PARTITIONS and kind != reader:
            problems.append(
                f"{column}: {data[column]!r} is read with partition.kind = {reader!r} only, and the kind is {kind!r}; "
                f"write partition = {{kind = {reader!r}}}, or leave {column} out"
            )
    return problems


def _target_errors(data: Mapping[str, Any]) -> list[str]:
    """What does not go with the targets of a table of data."""
    target, how, classes = data.get("target"), data.get("partition"), data.get("classes")
    kind = how.get("kind") if isinstance(how, Mapping) else Dirichlet().kind
    if target in ("regression", "multilabel"):
        return [f"partition.{by_classes(str(kind))}"] if kind in PARTITIONS and kind not in WITHOUT_CLASSES else []
    if isinstance(classes, list | tuple) and len(classes) == 1:
        return ["classes: there is one; a classifier needs two classes"]
    return []
