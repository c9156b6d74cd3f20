"""Every method through a full disk, a killed process and a power cut, at every operation on the disk: what a resumed
run leaves is what an uninterrupted run leaves, file for file."""

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from headstart.config.recipe import Recipe
from headstart.core import files
from headstart.core.ledger import Ledger
from headstart.data import federation
from headstart.errors import HeadstartError
from headstart.records import RunDirectory
from headstart.runner import run, run_recipe
from tests.disk import FAULTS, Disk, Fault, Killed, contents
from tests.variants import VARIANTS

DIGITS = {"dataset": "digits", "train_examples": 60, "test_examples": 30}
MNIST = {"dataset": "mnist-mini", "train_examples": 24, "test_examples": 10, "classes": [0, 1, 2]}
CLIENTS = {"partition": {"kind": "iid", "clients": 3}}
TASKS = [DIGITS | CLIENTS | {"name": "low", "classes": [0, 1]}, DIGITS | CLIENTS | {"name": "high", "classes": [2, 3]}]
MLP = {"head": "mlp", "hidden": 4, "train": "head", "rounds": 2, "clients_per_round": 2}
BODY = {"train": "all", "rounds": 2, "batch_size": 4, "augment": "none"}
TUNE = {"method": "personalise", "epochs": 1}
CHAINS: dict[str, list[dict[str, Any]]] = {
    "fedcof-fedavg": [{"method": "fedcof"}, {"method": "fedavg", "train": "head", "rounds": 2}],
    "fedper-personalise": [MLP | {"method": "fedper"}, TUNE | {"update": "head"}],
    "lg-fedavg-personalise": [MLP | {"method": "lg-fedavg"}, TUNE | {"update": "head"}],
    "ditto-personalise": [MLP | {"method": "ditto"}, TUNE | {"update": "head"}],
    "three-stages": [MLP | {"method": "lg-fedavg"}, TUNE | {"update": "head"}, {"method": "fedncm"}],
    "start-again": [MLP | {"method": "fedper"}, {"method": "fedncm"}, TUNE | {"start": 0, "update": "head"}],
}
VALIDATED: dict[str, list[dict[str, Any]]] = {
    "best": [{"method": "scaffold", "train": "head", "rounds": 4, "lr": 3.0, "keep": "best"}, {"method": "fedncm"}],
    "patience": [{"method": "fedmezo", "train": "head", "rounds": 5, "lr": 5.0, "keep": "best", "patience": 1}],
}
BODIES: dict[str, list[dict[str, Any]]] = {
    "fedavg-body": [BODY | {"method": "fedavg"}, {"method": "fedncm"}],
    "fedper-body": [BODY | {"method": "fedper"}, TUNE | {"update": "body", "augment": "none"}],
    "ditto-body": [BODY | {"method": "ditto"}, TUNE | {"update": "head", "augment": "none"}],
    "fedmezo-body": [{"method": "fedmezo", "train": "all", "rounds": 2}],
    "slora": [BODY | {"method": "slora", "train": "lora", "rank": 2, "priming": 0.5}],
    "fedavg-lora": [BODY | {"method": "fedavg", "train": "lora", "rank": 2}],
}
TASK_STAGES: dict[str, list[dict[str, Any]]] = {
    "tasks-scaffold": [{"method": "scaffold", "train": "head", "rounds": 2}],
    "tasks-fedncm": [{"method": "fedncm"}],
}
HEAD = {"method": "fedavg", "train": "head", "rounds": 4, "clients_per_round": 2}
TIMED: dict[str, list[dict[str, Any]]] = {
    "buffer": [{"method": "fedncm"}, HEAD | {"buffer": 1, "compress": "top-k"}],
    "over-selection": [HEAD | {"over_selection": 0.5}, MLP | {"method": "fedper", "buffer": 2, "start": "pretrained"}],
}
# One of each kind of state: in `make faults` these are struck at every operation.
EVERYWHERE = [
    "fedncm", "fedcof-fedavg", "scaffold", "fedmezo", "best", "patience", "fedper-personalise", "ditto-personalise",
    "three-stages", "start-again", "fedavg-body", "fedper-body", "fedmezo-body", "slora",
    "tasks-scaffold", "tasks-fedncm", "buffer",
]  # fmt: skip
CASES = [*VARIANTS, *CHAINS, *VALIDATED, *BODIES, *TASK_STAGES, *TIMED]


@pytest.fixture(scope="module", autouse=True)
def _light() -> Iterator[None]:
    """Data that are read once, no clock, and no pictures: a report is made of files that are compared anyway."""
    load, loaded = federation.load_dataset, {}

    def once(data: Any, seed: int, **how: bool) -> Any:
        key = f"{data!r} {seed} {how}"
        return loaded[key] if key in loaded else loaded.setdefault(key, load(data, seed, **how))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(federation, "load_dataset", once)
        patch.setattr(os, "fsync", lambda handle: None)  # what it is for is what `Disk` models
        patch.setattr(Ledger, "tick", lambda self: None)
        patch.setattr(run_recipe, "peak_memory", lambda: 0)
        now = datetime(2026, 1, 1, tzinfo=UTC)
        patch.setattr(run_recipe, "datetime", SimpleNamespace(now=lambda zone: now))
        patch.setattr(RunDirectory, "started", now)
        patch.setattr(RunDirectory, "note", lambda *line: None)  # with the time
        patch.setattr(run_recipe, "write_report", lambda path, records: files.write_text(path, "no pictures"))
        yield


@pytest.fixture(scope="module")
def vit(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A vision transformer of two blocks."""
    config = transformers.ViTConfig(
        hidden_size=8, num_hidden_layers=2, num_attention_heads=2, intermediate_size=8, image_size=8, patch_size=4
    )
    place = tmp_path_factory.mktemp("vit")
    with torch.random.fork_rng():
        torch.manual_seed(3)
        transformers.ViTModel(config, add_pooling_layer=False).save_pretrained(place)
    return {"backbone": str(place), "image_size": 8}


@pytest.fixture(scope="module")
def features(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A features file with a validation split."""
    path = tmp_path_factory.mktemp("features") / "data.npz"
    rng, y = np.random.default_rng(0), np.arange(90) % 3
    np.savez(path, X=np.eye(3)[y] + rng.normal(0, 0.8, (90, 3)), y=y, split=np.arange(90) // 3 % 3)
    return str(path)


@pytest.fixture
def recipe(request: pytest.FixtureRequest, vit: dict[str, Any], features: str) -> Recipe:
    """The recipe of a case."""
    return recipe_of(request.param, vit, features)


def recipe_of(case: str, vit: dict[str, Any], features: str) -> Recipe:
    if case in VALIDATED:
        data = {"dataset": features, **CLIENTS}
        return Recipe.parse({"data": data, "model": {"backbone": "features"}, "stages": VALIDATED[case]})
    if case in BODIES:
        return Recipe.parse({"data": MNIST | CLIENTS, "model": vit, "stages": BODIES[case]})
    data: dict[str, Any] = {"tasks": TASKS} if case in TASK_STAGES else {"data": DIGITS | CLIENTS}
    data |= {"clients": {"speed_spread": 1.0, "availability": 0.8}} if case in TIMED else {}
    stages = (CHAINS | TASK_STAGES | TIMED).get(case)
    if stages is None:
        short = {"rounds": 2} if "rounds" in VARIANTS[case] else {"epochs": 2} if "epochs" in VARIANTS[case] else {}
        stages = [VARIANTS[case] | short | ({"probe_rounds": 1} if "probe_rounds" in VARIANTS[case] else {})]
    return Recipe.parse(data | {"model": {"backbone": "features"}, "stages": stages})


@contextmanager
def _told() -> Iterator[None]:
    """Whoever fills the disk is told so in a sentence."""
    try:
        yield
    except HeadstartError as error:
        if "No space left on device" not in str(error):
            raise


def strike(recipe: Recipe, root: Path, fault: Fault, at: int) -> Disk:
    """Run until something happens at the n-th operation on the disk."""
    with pytest.MonkeyPatch.context() as patch:
        disk = Disk(root, patch, fault, at)
        with suppress(Killed) if fault != "full" else _told():
            run(recipe, root / "run")
    if fault == "power":
        disk.cut_power()
    return disk


def survives(recipe: Recipe, root: Path, fault: Fault, at: int, whole: dict[str, bytes]) -> None:
    """A run that is struck, and resumed where there is anything to go on with, leaves every file of a whole run."""
    root.mkdir()
    strike(recipe, root, fault, at)
    out = root / "run"
    run(recipe, out, resume=(out / "recipe.toml").is_file())
    found = contents(out)
    assert found.keys() == whole.keys(), f"{fault} at {at}"
    assert [name for name in whole if found[name] != whole[name]] == [], f"{fault} at {at}"


def operations(recipe: Recipe, root: Path) -> tuple[int, dict[str, bytes]]:
    """How many operations a whole run takes, and what it leaves."""
    root.mkdir()
    disk = strike(recipe, root, "killed", 1 << 40)
    return disk.done, contents(root / "run")


@pytest.mark.parametrize(("recipe", "number"), [(c, n) for n, c in enumerate(CASES)], indirect=["recipe"], ids=CASES)
def test_a_run_that_is_struck_anywhere_resumes_to_the_same_files(recipe: Recipe, number: int, tmp_path: Path) -> None:
    count, whole = operations(recipe, tmp_path / "whole")
    assert count > 20
    for place, fault in enumerate(FAULTS):  # elsewhere for each method, from the first operation to the last
        at = 1 + (number * 7 + place * count // 3) % count
        survives(recipe, tmp_path / fault, fault, at, whole)


@pytest.mark.parametrize("recipe", ["lg-fedavg-personalise"], indirect=True)
def test_stages_that_hand_personal_models_on_lose_none_of_them(recipe: Recipe, tmp_path: Path) -> None:
    count, whole = operations(recipe, tmp_path / "whole")
    for at in range(1, count + 1):
        survives(recipe, tmp_path / str(at), "power", at, whole)


@pytest.mark.minutes
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("recipe", EVERYWHERE, indirect=True)
def test_a_run_that_is_struck_at_every_operation(recipe: Recipe, fault: Fault, tmp_path: Path) -> None:
    count, whole = operations(recipe, tmp_path / "whole")
    for at in range(1, count + 1):
        survives(recipe, tmp_path / str(at), fault, at, whole)


def test_a_run_that_stops_before_its_first_evaluation_keeps_its_checkpoint(tmp_path: Path) -> None:
    stage = {"method": "fedavg", "train": "head", "rounds": 4, "evaluate_every": 200}
    recipe = Recipe.parse({"data": DIGITS | CLIENTS, "model": {"backbone": "features"}, "stages": [stage]})
    count, whole = operations(recipe, tmp_path / "whole")
    (tmp_path / "cut").mkdir()
    strike(recipe, tmp_path / "cut", "full", count // 2)
    assert (tmp_path / "cut" / "run" / "checkpoint" / "state.safetensors").is_file()
    run(recipe, tmp_path / "cut" / "run", resume=True)
    assert contents(tmp_path / "cut" / "run") == whole


def test_a_file_and_its_name_are_on_disk_before_writing_it_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("before")
    for write in (files.write_text, files.append_text):
        with monkeypatch.context() as patch:
            disk = Disk(tmp_path, patch, "power")
            write(tmp_path / "file", "after")
            write(tmp_path / f"new-{write.__name__}", "after")
            files.secret(tmp_path / f"secret-{write.__name__}")
        disk.cut_power()
        assert (tmp_path / f"new-{write.__name__}").read_text() == "after"
        assert len((tmp_path / f"secret-{write.__name__}").read_bytes()) == 32
    assert (tmp_path / "file").read_text() == "afterafter"


def test_what_a_killed_process_left_half_written_is_cleared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = Recipe.parse(
        {"data": DIGITS | CLIENTS, "model": {"backbone": "features"}, "stages": [{"method": "fedncm"}]}
    )
    for at in range(1, 100):
        root = tmp_path / str(at)
        root.mkdir()
        strike(recipe, root, "killed", at)
        left = files.temporaries(root / "run" / "checkpoint")
        if left:
            break
    assert all(stat.S_IMODE(os.stat(path).st_mode) == 0o600 for path in left)  # others may not read a part either
    run(recipe, root / "run", resume=True)
    assert files.temporaries(root / "run" / "checkpoint") == []
