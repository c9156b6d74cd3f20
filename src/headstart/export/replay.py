"""The model of a FedMeZO run from the weights it started from and its log of seeds and scalars, and nothing else."""

from __future__ import annotations

import json
from pathlib import Path

from headstart.config.recipe import Recipe
from headstart.core.state import unpack
from headstart.engine.model_store import ModelStore
from headstart.engine.setup import plan_of
from headstart.errors import HeadstartError
from headstart.methods import StageContext, Task, build
from headstart.records import RunDirectory


def replay(path: Path, out: Path) -> list[str]:
    """Rebuild what a finished run's last FedMeZO stage made, from the weights it started from and its log alone.

    Writes the model to ``out`` and returns the names of its files that differ from those of the run by any bit: none,
    where the run ended with that stage.
    """
    recipe = Recipe.load(path / "recipe.toml")
    directory = RunDirectory.reopen(path, recipe)
    numbers = [number for number, stage in enumerate(recipe.stages) if stage.replays]
    if not numbers:
        raise HeadstartError(f"{path} is no run of fedmezo: there is no log to replay")
    number = numbers[-1]
    stage, log = recipe.stages[number], directory.load_log(number)
    store = ModelStore(recipe.model, None)
    begin = number - 1 if stage.start == "previous" else -1 if stage.start == "pretrained" else stage.start
    head = store.label_words()
    for earlier in range(number):
        earlier_model, version = directory.load_model(earlier)
        if version is not None:
            store.remember(earlier, version)
        if earlier == begin:
            head = earlier_model.heads[0]
            store.load(earlier_model.body)
    (final,) = directory.load_model(number)[0].heads
    assert final is not None
    made = final.arrays()
    classes = len(made["weight"])
    dim = store.backbone.dim if store.backbone else made.get("hidden.0.weight", made["weight"]).shape[1]
    seed, plan = (recipe.seed, number), plan_of(stage, frozenset(), store.fixed_head)
    store.attach(stage, plan, seed)
    context = StageContext((Task("default", classes, head=head),), dim, seed, plan, store.model)
    method = build(stage, context)
    rebuilt_head = method.load(method.model(unpack(method.state_type, log)))
    rebuilt = RunDirectory(out)
    (out / "model").mkdir(parents=True, exist_ok=True)
    if plan.changes_features:
        store.keep(number, stage.norm_statistics, [store.module_values()], plan.body == "shared")
    named = json.loads((path / "model" / "classes.json").read_text(encoding="utf-8"))
    trained = store if plan.changes_features else None
    rebuilt.save_final(trained, [rebuilt_head], list(named), list(named.values()))
    return [
        file.name
        for file in sorted((out / "model").iterdir())
        if not (path / "model" / file.name).is_file() or file.read_bytes() != (path / "model" / file.name).read_bytes()
    ]
