"""The same recipes on Flower: every method gives the model that it gives in process."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.numpy import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

pytest.importorskip("flwr")
pytest.importorskip("ray")

from headstart.config.recipe import Recipe
from headstart.config.stage import STAGES
from headstart.deploy.apps import simulate
from headstart.runner import run
from tests.backbones.test_language import LONG
from tests.runner.test_choose import recipe_of as choice_of
from tests.runner.test_generate import table as completions_of
from tests.variants import ON_MODULES

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
    {**LOCAL, "method": "scaffold", "rounds": 3, "compress": "int8"},
    {**LOCAL, "method": "scaffold", "rounds": 3, "compress": "top-k", "top_k": 0.05},
    {**LOCAL, "method": "fednova", "momentum": 0.5, "rounds": 3, "compress": "sign"},
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
CLOCK = ("seconds", "peak_rss_bytes", "versions", "started", "ended", "total_seconds")
INTERRUPTED = """
import sys
from pathlib import Path
from headstart import Recipe
from headstart.deploy.apps import simulate

recipe, out, stop = sys.argv[1:]

def interrupt(line):
    if str(3 * line["stage"] + line["round"]) == stop:
        raise KeyError("interrupted")

try:
    simulate(Recipe.load(Path(recipe)), Path(out), Path(out).exists(), interrupt)
except KeyError as error:
    raise SystemExit(3 if error.args == ("interrupted",) else 1)
"""


def clean(stage: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in stage.items() if value is not None}


def features(stages: list[dict[str, Any]], clients: int = 4) -> Recipe:
    data = {"dataset": "digits", "partition": {"kind": "dirichlet", "clients": clients, "alpha": 0.5}}
    stages = [clean(stage) for stage in stages]
    return Recipe.parse({"data": data, "model": {"backbone": "features"}, "stages": stages})


def assert_same(first: Path, second: Path, costs: bool = True) -> None:
    """Bit for bit: the models of all stages, and where clients keep what they keep; who is how good at which costs."""
    assert list((first / "checkpoint").glob("stage-*.safetensors"))
    for path in sorted((first / "checkpoint").glob("stage-*.safetensors")):
        ours, theirs = load_file(path), load_file(second / "checkpoint" / path.name)
        assert ours.keys() == theirs.keys()
        for name in ours:
            np.testing.assert_array_equal(theirs[name], ours[name], err_msg=f"{path.name} {name}")
    if costs:  # of secure sums, those in process are not what the protocol sends
        assert (first / "clients.csv").read_text() == (second / "clients.csv").read_text()


@pytest.mark.slow
def test_every_method_gives_the_same_model_on_flower(tmp_path: Path) -> None:
    recipe = features(ON_FEATURES)
    assert {stage.method for stage in recipe.stages} == STAGES.keys() - set(ON_MODULES)
    run(recipe, tmp_path / "here")
    (tmp_path / "recipe.toml").write_text(recipe.to_toml())
    command = [sys.executable, "-m", "headstart.cli", "run", "recipe.toml", "--out", "there", "--engine", "flower"]
    done = subprocess.run(
        [*command, "--log", "tensorboard"], cwd=tmp_path, capture_output=True, text=True, check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1"},  # as here: of two threads, the sums differ in the last bit
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    here, there = (json.loads((tmp_path / name / "summary.json").read_text()) for name in ("here", "there"))
    for ours, theirs in zip(here["stages"], there["stages"], strict=True):
        assert {k: v for k, v in theirs.items() if k not in CLOCK} == {k: v for k, v in ours.items() if k not in CLOCK}
    assert_same(tmp_path / "here", tmp_path / "there")
    logged = EventAccumulator(str(tmp_path / "there" / "tensorboard")).Reload().Scalars("accuracy")
    lines = (tmp_path / "here" / "metrics.jsonl").read_text().splitlines()
    assert [point.value for point in logged] == pytest.approx([json.loads(line)["accuracy"] for line in lines])


@pytest.mark.slow
def test_secure_sums_give_the_same_model_on_flower(tmp_path: Path) -> None:
    shared = {"epsilon": 5.0, "noise": "shared"}
    stages = [
        {"method": "fedncm"},
        {"method": "fed3r", "start": "pretrained", "clients_per_round": 4},
        {**LOCAL, "method": "fedavg", "start": 1, "clients_per_round": 4},
        {**LOCAL, "method": "scaffold", "rounds": 3, "clients_per_round": 4},
        {**LOCAL, "method": "fedmezo", "rounds": 4, "clients_per_round": 4},
        {**MLP, "method": "fedper", "rounds": 2, "clients_per_round": 4},
        {"method": "fedncm", "privacy": shared | {"clip": 50.0}},
        {**LOCAL, "method": "fedavg", "clients_per_round": 4, "weighting": "uniform", "privacy": shared},
    ]
    recipe = features([{**stage, "secure": True} for stage in stages], clients=8)
    run(recipe, tmp_path / "here")
    (tmp_path / "recipe.toml").write_text(recipe.to_toml())
    command = [sys.executable, "-m", "headstart.cli", "run", "recipe.toml", "--out", "there", "--engine", "flower"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    summary = json.loads((tmp_path / "there" / "summary.json").read_text())
    assert [stage["dropped"] for stage in summary["stages"]] == [[]] * len(stages)
    assert_same(tmp_path / "here", tmp_path / "there", costs=False)


@pytest.mark.slow
def test_a_simulation_that_is_interrupted_ends_as_if_it_had_not_been(tmp_path: Path) -> None:
    """With what is each client's own: a head that a later stage goes on from, and a whole model."""
    stages = [
        {**MLP, "method": "fedper", "rounds": 3, "evaluate_every": 1},
        {**MLP, "method": "ditto", "rounds": 3, "evaluate_every": 1},
        {"method": "personalise", "update": "head", "epochs": 2, "lr": 0.01, "batch_size": 20, "start": 0},
    ]
    recipe, there = features(stages), tmp_path / "there"
    run(recipe, tmp_path / "here")
    (tmp_path / "recipe.toml").write_text(recipe.to_toml())
    for stop in (5, None):  # after the second round of the second stage; not at all
        seen = len((there / "metrics.jsonl").read_text().splitlines()) if there.exists() else 0
        # In a process of its own: Ray forks, and must not do so beside threads that other tests have left.
        command = [sys.executable, "-c", INTERRUPTED, str(tmp_path / "recipe.toml"), str(there), str(stop)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        assert done.returncode == (0 if stop is None else 3), done.stderr
        assert len((there / "metrics.jsonl").read_text().splitlines()) > seen
    assert_same(tmp_path / "here", there)
    rounds = [json.loads(line)["round"] for line in (there / "metrics.jsonl").read_text().splitlines()]
    assert rounds == [1, 2, 3, 1, 2, 3, 0, 1, 2]


@pytest.mark.minutes
def test_bodies_with_norm_statistics_are_the_same_on_flower(tmp_path: Path) -> None:
    config = transformers.ResNetConfig(
        embedding_size=4, hidden_sizes=[4, 6], depths=[1, 1], layer_type="basic", num_channels=3
    )
    with torch.random.fork_rng():
        torch.manual_seed(3)
        transformers.ResNetModel(config).save_pretrained(tmp_path / "resnet")
    part = {"train_examples": 40, "test_examples": 20, "partition": {"kind": "iid", "clients": 3, "test": "follow"}}
    body = {"rounds": 2, "lr": 0.05, "batch_size": 5, "momentum": 0.5}
    recipe = Recipe.parse(
        {
            "data": {"dataset": "mnist-mini", **part},
            "model": {"backbone": str(tmp_path / "resnet"), "image_size": 16},
            "stages": [
                {**body, "method": "fedavg", "train": "all", "norm_statistics": "aggregate"},
                {**body, "method": "fedbabu", "train": "body"},
                {**body, "method": "fedrep", "train": "all", "clients_per_round": 2},
                {"method": "fedcof", "head_init": "zeros"},
                {**body, "method": "fedavgm", "train": "body", "norm_statistics": "freeze"},
            ],
        }
    )
    here = run(recipe, tmp_path / "here").summary
    there = simulate(recipe, tmp_path / "there").summary
    assert_same(tmp_path / "here", tmp_path / "there")
    trained = load_file(tmp_path / "there" / "checkpoint" / "stage-0.safetensors")
    assert any(name.endswith("running_mean") for name in trained)
    for ours, theirs in zip(here["stages"], there["stages"], strict=True):
        assert {k: v for k, v in theirs.items() if k not in CLOCK} == {k: v for k, v in ours.items() if k not in CLOCK}


WORDS = {"weather": ["rain", "wind", "sunny", "cold"], "food": ["bread", "soup", "apple", "rice"]}


def texts(path: Path, labels: tuple[str, str], seed: int) -> str:
    """A few short sentences of two classes."""
    rng = np.random.default_rng(seed)
    rows = ["text,label,split"]
    for number in range(24):
        label = number % 2
        words = " ".join(rng.choice(list(WORDS.values())[(label + seed) % 2], 3))
        rows.append(f"{words},{labels[label]},{'test' if number >= 16 else 'train'}")
    path.write_text("\n".join(rows) + "\n")
    return str(path)


@pytest.mark.minutes
def test_modules_of_several_tasks_are_the_same_on_flower(tmp_path: Path) -> None:
    tasks = [
        {
            "name": name,
            "dataset": texts(tmp_path / f"{name}.csv", ("yes", "no"), seed),
            "partition": {"kind": "iid", "clients": clients},
        }
        for seed, (name, clients) in enumerate({"one": 2, "two": 3}.items())
    ]
    module = {"method": "fedyolo", "train": "lora", "rank": 2, "blocks": 1, "lr": 0.1, "batch_size": 4, "rounds": 2}
    recipe = Recipe.parse(
        {
            "tasks": tasks,
            "model": {"backbone": "all-MiniLM-L6-v2", "max_tokens": 8},
            "stages": [
                {"method": "fedncm"},
                {**module, "sampling": "tasks", "clients_per_round": 4},
                {**module, "hide_task": True, "secure": True},
            ],
        }
    )
    run(recipe, tmp_path / "here")
    simulate(recipe, tmp_path / "there")
    assert_same(tmp_path / "here", tmp_path / "there", costs=False)


@pytest.mark.minutes
def test_factors_and_scalars_are_the_same_on_flower(tmp_path: Path) -> None:
    data = {"dataset": texts(tmp_path / "texts.csv", ("wet", "good"), 0), "partition": {"kind": "iid", "clients": 2}}
    module = {"train": "lora", "rank": 2, "blocks": 1, "batch_size": 4}
    again = {**module, "rounds": 2, "lr": 0.05, "start": "pretrained"}
    recipe = Recipe.parse(
        {
            "data": data,
            "model": {"backbone": "all-MiniLM-L6-v2", "max_tokens": 8},
            "stages": [
                {**module, "method": "slora", "rounds": 2, "priming": 0.5, "lr": 0.05},
                {**module, "method": "fedmezo", "rounds": 3, "clients_per_round": 1, "start": "pretrained"},
                *({**again, "method": method} for method in ("fedex-lora", "flexlora", "fedsa-lora")),
            ],
        }
    )
    run(recipe, tmp_path / "here")
    simulate(recipe, tmp_path / "there")
    assert_same(tmp_path / "here", tmp_path / "there")


@pytest.mark.minutes
def test_models_that_speak_are_the_same_on_flower(tmp_path: Path) -> None:
    lora = {"method": "fedavg", "train": "lora", "rank": 2, "lr": 0.1, "rounds": 2, "optimiser": "adamw"}
    mezo = {"method": "fedmezo", "train": "norms", "blocks": 0, "lr": 0.01, "rounds": 2, "start": "pretrained"}
    prefix = {**mezo, "method": "fedavg", "train": "prefix", "tokens": 2, "blocks": None}
    chooses = choice_of(tmp_path, LONG, **lora).model_dump(mode="json", exclude_none=True)
    (tmp_path / "pairs").mkdir()
    generates = completions_of(tmp_path / "pairs", **lora)
    for name, table in (("choose", chooses), ("generate", generates)):
        recipe = Recipe.parse(table | {"tasks": [], "stages": [*table["stages"], mezo, prefix]})
        run(recipe, tmp_path / name / "here")
        simulate(recipe, tmp_path / name / "there")
        assert_same(tmp_path / name / "here", tmp_path / name / "there", costs=False)
