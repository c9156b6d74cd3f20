"""The model of a FedMeZO run from the weights it started from and its log of seeds and scalars, and nothing else."""

from __future__ import annotations

import json
from pathlib import Path

from headstart.config.recipe import Recipe
from headstart.config.stage import FedMeZOStage
from headstart.engine import Body
from headstart.errors import HeadstartError
from headstart.methods import Setting, build
from headstart.records import RunDirectory


def replay(path: Path, out: Path) -> list[str]:
    """Rebuild what a finished run's last FedMeZO stage made, from the weights it started from and its log alone.

    Writes the model to ``out`` and returns the names of its files that differ from those of the run by any bit: none,
    where the run ended with that stage.
    """
    recipe = Recipe.load(path / "recipe.toml")
    directory = RunDirectory.reopen(path, recipe)
    numbers = [number for number, stage in enumerate(recipe.stages) if isinstance(stage, FedMeZOStage)]
    if not numbers:
        raise HeadstartError(f"{path} is no run of fedmezo: there is no log to replay")
    number = numbers[-1]
    stage, log = recipe.stages[number], directory.load_log(number)
    assert isinstance(stage, FedMeZOStage)
    body = Body(recipe.model, None)
    begin = number - 1 if stage.start == "previous" else -1 if stage.start == "pretrained" else stage.start
    head = body.label_words()
    for earlier in range(number):
        handed, version = directory.load_model(earlier)
        if version is not None:
            body.remember(earlier, version)
        if earlier == begin:
            head = handed.heads[0]
            body.load(handed.body)
    (final,) = directory.load_model(number)[0].heads
    assert final is not None
    made = final.arrays()
    classes = len(made["weight"])
    dim = body.backbone.dim if body.backbone else made.get("hidden.0.weight", made["weight"]).shape[1]
    seed = (recipe.seed, number)
    method = build(
        stage, Setting(classes, dim, seed, previous=head, backbone=body.backbone, module=body.attach(stage, seed))
    )
    state = method.thaw(log)
    method.place(state)
    rebuilt = RunDirectory(out)
    (out / "model").mkdir(parents=True, exist_ok=True)
    changes = stage.plan.changes_features
    if changes:
        body.keep(number, stage.norm_statistics, [body.module_values()], stage.plan.body == "shared")
    named = json.loads((path / "model" / "classes.json").read_text(encoding="utf-8"))
    rebuilt.save_final(body if changes else None, [method.head(state)], list(named), list(named.values()))
    return [
        file.name
        for file in sorted((out / "model").iterdir())
        if not (path / "model" / file.name).is_file() or file.read_bytes() != (path / "model" / file.name).read_bytes()
    ]
