"""What a recipe asks for and its data or clients do not have, all of it at once."""

from __future__ import annotations

import logging

from headstart.config.recipe import Recipe
from headstart.config.stage import Stage
from headstart.config.stage_checks import idle_keys
from headstart.core.target import Target
from headstart.data import Federation
from headstart.engine.server import SMALLEST_SUM
from headstart.errors import RecipeError

log = logging.getLogger("headstart")


def check_federation(recipe: Recipe, federation: Federation) -> None:
    """Refuse what a recipe asks for and its data or clients do not have, all of it at once."""
    problems = list[str]()
    for number, stage in enumerate(recipe.stages):
        found = [*_split_errors(stage, federation), *_client_errors(stage, federation.n_clients)]
        if len(federation.tasks) > 1 and stage.one_task:
            found.append(f".method: {stage.method} {stage.one_task}")
        if (target := federation.dataset.target) != "classes" and not stage.any_target:
            found.append(
                f".method: {stage.method} learns classes, and the targets of the data are "
                f"{'numbers' if target == 'regression' else 'labels'} ({target}); use fed3r"
            )
        if federation.remote_sizes is not None:
            found += _remote_errors(stage, target)
            _warn_of_absences(number, stage, federation.n_clients)
        problems += [f"stages.{number}{problem}" for problem in found]
        for warning in (*idle_keys(stage), *_too_many(stage, federation.n_clients)):
            log.warning(f"stages.{number}.{warning}")
    for number, model in enumerate(recipe.models):
        words, classes = model.label_words, federation.classes_of(number)
        if words is not None and len(words) != classes.stop - classes.start:
            problems.append(
                f"{f'tasks.{number}' if recipe.tasks else 'model'}.label_words: {len(words)} words for "
                f"{classes.stop - classes.start} classes; give one for each"
            )
    if problems:
        raise RecipeError(problems)


def _split_errors(stage: Stage, federation: Federation) -> list[str]:
    """What a stage needs a validation split for, where there is none."""
    if federation.dataset.validation is not None:
        return []
    asked = {
        ".eval_split: the data have no validation split; use 'test'": stage.eval_split == "validation",
        ".temperature: the data have no validation split; use 'auto'": stage.validates_temperature,
        ": keep = 'best' and patience need a validation split in the data": stage.keep == "best" or stage.patience,
    }
    return [problem for problem, is_asked in asked.items() if is_asked]


def _client_errors(stage: Stage, clients: int) -> list[str]:
    """What so many clients are too few for."""
    problems = []
    if (stage.buffer or 0) > clients:
        problems.append(f".buffer: {stage.buffer} updates of different clients, and there are {clients}; use fewer")
    if stage.secure and (count := min(stage.sampled(clients), stage.secure_group or clients)) < SMALLEST_SUM:
        problems.append(
            f".secure: {count} clients are in a sum, which hides none of them; it takes {SMALLEST_SUM} or more: add "
            "clients, raise clients_per_round, or leave secure out"
        )
    return problems


def _too_many(stage: Stage, clients: int) -> list[str]:
    """What a stage asks of more clients than there are."""
    asked = getattr(stage, "clients_per_round", None) or 0
    if asked <= clients:
        return []
    return [f"clients_per_round: {asked}, and there are {clients} clients: all take part in every round"]


def _remote_errors(stage: Stage, target: Target) -> list[str]:
    """What clients that hold their own data do not do."""
    asked = {
        ": clients that hold their own data do not give them away": stage.pooled or stage.share,
        ": without_head and forgetting look at everybody's examples": stage.needs_all_examples,
        ": sums of features by label can show single examples, and nodes do not tell them; set secure = true, or "
        "privacy": target == "multilabel" and not stage.protected,
    }
    return [problem for problem, is_asked in asked.items() if is_asked]


def _warn_of_absences(number: int, stage: Stage, clients: int) -> None:
    if not stage.secure:
        return
    group = stage.secure_group or stage.sampled(clients)
    if stage.survivors(group) == group:
        log.warning(
            "stages.%d: with secure aggregation all of %d clients have to stay to the end; four are the fewest that "
            "tolerate one absence", number, group,
        )  # fmt: skip
