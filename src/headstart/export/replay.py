"""The model of a FedMeZO run from the weights it started from and its log of seeds and scalars, and nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from headstart.config.recipe import Recipe
from headstart.core.state import unpack
from headstart.engine.model_store import ModelStore
from headstart.engine.setup import plan_of
from headstart.errors import HeadstartError
from headstart.heads import LinearHead
from headstart.methods import StageContext, Task, build
from headstart.records import RunDirectory


def replay(path: Path, out: Path) -> list[str]:
    """Rebuild what a finished run's last FedMeZO stage made, from the weights it started from and its log alone.

    Writes the model to ``out`` and returns the names of its files that differ from those of the run by any bit: none,
    where the run ended with that stage. ``out`` is written over only where it is the run's own folder `replay`.
    """
    ours = out.resolve() == (path / "replay").resolve()
    if (out / "recipe.toml").exists() or (out.exists() and not ours and (not out.is_dir() or any(out.iterdir()))):
        raise HeadstartError(f"--out {out}: already used; give another directory")
    recipe = Recipe.load(path / "recipe.toml")
    directory = RunDirectory.reopen(path, recipe)
    numbers = [number for number, stage in enumerate(recipe.stages) if stage.replays]
    if not numbers:
        raise HeadstartError(f"{path} is no run of fedmezo: there is no log to replay")
    number = numbers[-1]
    stage, log = recipe.stages[number], directory.load_log(number)
    first, *others = recipe.models
    store = ModelStore(first, None, others=others)
    begin = number - 1 if stage.start == "previous" else -1 if stage.start == "pretrained" else stage.start
    finals, _ = directory.load_model(number)
    tasks = range(len(finals.heads))
    heads: Sequence[LinearHead | None] = [store.label_words(task) for task in tasks]
    for earlier in range(number):
        earlier_model, version = directory.load_model(earlier)
        if version is not None:
            store.remember(earlier, version)
        if earlier == begin:
            heads = earlier_model.heads
            store.load(earlier_model.body)
    named = directory.classes()
    made = [head.arrays() for head in finals.heads if head is not None]
    dim = store.backbone.dim if store.backbone else made[0].get("hidden.0.weight", made[0]["weight"]).shape[1]
    seed, plan = (recipe.seed, number), plan_of(stage, frozenset(), store.fixed_head)
    values = store.module.values if store.module else ()
    known = [
        Task(name, len(made[task]["weight"]), head=heads[task], module=values[task] if values else None)
        for task, name in enumerate(named)
    ]
    store.attach(stage, plan, seed)
    method = build(stage, StageContext(tuple(known), dim, seed, plan, store.model))
    state: Any = unpack(method.state_type, log)
    rebuilt_heads, rebuilt_values = [], []
    for task in reversed(tasks):  # the first task's module is what stays on the backbone
        rebuilt_heads.append(method.load(method.model(state, task), task))
        rebuilt_values.append(store.module_values())
    rebuilt = RunDirectory(out)
    (out / "model").mkdir(parents=True, exist_ok=True)
    if plan.changes_features:
        store.keep(number, stage.norm_statistics, rebuilt_values[::-1], plan.body == "shared")
    trained = store if plan.changes_features else None
    rebuilt.save_final(trained, rebuilt_heads[::-1], list(named), list(named.values()))
    return [
        file.name
        for file in sorted((out / "model").iterdir())
        if not (path / "model" / file.name).is_file() or file.read_bytes() != (path / "model" / file.name).read_bytes()
    ]
