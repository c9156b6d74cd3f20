"""The same recipes on Flower: every method gives the model that it gives in process."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from headstart.apps import simulate
from headstart.recipe import Recipe
from headstart.runner import run
from headstart.stages import STAGES

LOCAL = {"train": "head", "rounds": 2, "lr": 0.01, "batch_size": 20, "clients_per_round": 2, "start": "pretrained"}
MLP = LOCAL | {"head": "mlp", "hidden": 8}
# Every method once; a stage that goes on from another one follows it.
ON_FEATURES: list[dict[str, Any]] = [
    {"method": "fedncm"},
    {"method": "fed3r", "clients_per_round": 3, "start": "pretrained"},
    {"method": "fedcof", "means_per_client": 2, "start": "pretrained"},
    {**LOCAL, "method": "fedavg", "start": 2, "momentum": 0.5},
    {**LOCAL, "method": "fedprox", "mu": 0.1},
    {**LOCAL, "method": "fedavgm"},
    {**LOCAL, "method": "fedadam"},
    {**LOCAL, "method": "fedyogi"},
    {**LOCAL, "method": "fedadagrad"},
    {**LOCAL, "method": "feddyn", "alpha_dyn": 0.1},
    {**LOCAL, "method": "scaffold", "rounds": 3},
    {**LOCAL, "method": "fednova", "momentum": 0.5},
    {**LOCAL, "method": "centralised", "clients_per_round": None},
    {**LOCAL, "method": "fedmezo", "num_directions": 2, "rounds": 4},
    {**LOCAL, "method": "distmezo", "local_steps": 2},
    {**MLP, "method": "fedbabu", "mu": 0.1},
    {**MLP, "method": "fedper", "rounds": 3},
    {"method": "personalise", "update": "head", "epochs": 2, "lr": 0.01, "batch_size": 20, "start": "previous"},
    {**MLP, "method": "fedrep", "head_epochs": 2},
    {**MLP, "method": "lg-fedavg"},
    {**MLP, "method": "per-fedavg"},
    {**MLP, "method": "ditto"},
    {**LOCAL, "method": "local-only", "momentum": 0.9},
    {**LOCAL, "method": "fedavg", "share": 0.3},
    {"method": "personalise", "compute": "fedncm"},
]
CLOCK = ("seconds", "peak_rss_bytes", "versions")


def clean(stage: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in stage.items() if value is not None}


def features(stages: list[dict[str, Any]], clients: int = 4) -> Recipe:
    data = {"dataset": "digits", "partition": {"kind": "dirichlet", "clients": clients, "alpha": 0.5}}
    stages = [clean(stage) for stage in stages]
    return Recipe.parse({"data": data, "model": {"backbone": "features"}, "stages": stages})


def assert_same(first: Path, second: Path, rtol: float = 0.0) -> None:
    """The models of all stages, what clients kept, who is how good, and what everything cost."""
    for path in sorted((first / "checkpoint").glob("stage-*.safetensors")):
        ours, theirs = load_file(path), load_file(second / "checkpoint" / path.name)
        assert ours.keys() == theirs.keys()
        for name in ours:
            np.testing.assert_allclose(theirs[name], ours[name], rtol=rtol, atol=rtol, err_msg=f"{path.name} {name}")
    if not rtol:
        assert (first / "clients.csv").read_text() == (second / "clients.csv").read_text()


@pytest.mark.slow
def test_every_method_gives_the_same_model_on_flower(tmp_path: Path) -> None:
    recipe = features(ON_FEATURES)
    assert {stage.method for stage in recipe.stages} == STAGES.keys() - {"slora", "fedyolo"}  # they need a body
    here = run(recipe, tmp_path / "here").summary
    there = simulate(recipe, tmp_path / "there").summary
    for ours, theirs in zip(here["stages"], there["stages"], strict=True):
        assert {k: v for k, v in theirs.items() if k not in CLOCK} == {k: v for k, v in ours.items() if k not in CLOCK}
    assert_same(tmp_path / "here", tmp_path / "there")
