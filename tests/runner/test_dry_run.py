"""The bill before the run, beside the ledger of the run: every method, to the byte where the layout is fixed."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers

from headstart.config.recipe import Recipe
from headstart.core.ledger import Ledger
from headstart.data import Federation
from headstart.records import NoDirectory
from headstart.runner.dry_run import dry_run
from headstart.runner.run_recipe import run_federation
from tests.variants import VARIANTS, recipe_of

# Which centre an example is nearest to only the run knows.
GUESSED = ("fedncm-centres",)


def measured(recipe: Recipe, federation: Federation, patch: pytest.MonkeyPatch) -> list[tuple[Ledger, int]]:
    """Of every stage of a real run: its ledger, and the bytes of the server's state after the last round."""
    found: dict[int, tuple[Ledger, int]] = {}

    def note(self: Any, checkpoint: Any, private: bool = False) -> None:
        if checkpoint.stage is not None:
            found[checkpoint.progress["stage"]] = checkpoint.stage.ledger, checkpoint.stage.state.nbytes

    patch.setattr(NoDirectory, "save_checkpoint", note)
    run_federation(recipe, federation)
    return [found[number] for number in sorted(found)]


def assert_same(recipe: Recipe, patch: pytest.MonkeyPatch, near: float = 0.0) -> None:
    federation = Federation.of(recipe)
    _, stages = dry_run(recipe, federation)
    ledgers = measured(recipe, federation, patch)
    assert len(stages) == len(ledgers)
    for (_, bill), (ledger, state) in zip(stages, ledgers, strict=True):
        for name in ("bytes_up", "bytes_down", "forward_passes", "last_round"):
            ours, real = getattr(bill.ledger, name), getattr(ledger, name)
            if near and name.startswith("bytes"):
                assert ours.sum() == pytest.approx(real.sum(), rel=near), name
            else:
                np.testing.assert_array_equal(ours, real, name)
        assert bill.state == pytest.approx(state, rel=0.1)


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_bill_is_the_ledger_of_the_run(variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = recipe_of(variant, clients_per_round=5)
    calibrates = variant.endswith("-temperature")  # the text of one number is as long as it happens to be
    assert_same(recipe, monkeypatch, near=0.1 if variant in GUESSED else 0.005 if calibrates else 0.0)


LOCAL = {"train": "head", "rounds": 3, "lr": 0.01, "batch_size": 20, "clients_per_round": 5}
HIDDEN = {"weighting": "uniform", "privacy": {"epsilon": 5.0}}
CHANNELS: dict[str, dict[str, Any]] = {
    "int8": LOCAL | {"method": "scaffold", "compress": "int8"},
    "top-k": LOCAL | {"method": "scaffold", "compress": "top-k", "top_k": 0.03},
    "sign": LOCAL | {"method": "fednova", "compress": "sign"},
    "secure": LOCAL | {"method": "fedavg", "secure": True},
    "groups": LOCAL | {"method": "scaffold", "secure": True, "secure_group": 3, "clients_per_round": 7},
    "norm": LOCAL | {"method": "fedprox", "max_norm": 0.5},
    "median": LOCAL | {"method": "fedavg", "combine": "median"},
    "noise": LOCAL | {"method": "fedavg", **HIDDEN},
    "own-noise": LOCAL | {"method": "fedavg", "weighting": "uniform", "privacy": {"epsilon": 5.0, "noise": "client"}},
    "shared-noise": LOCAL
    | {"method": "fedavg", "secure": True, "weighting": "uniform", "privacy": {"epsilon": 5.0, "noise": "shared"}},
    "secure-fedncm": {"method": "fedncm", "secure": True},
    "secure-fed3r": {"method": "fed3r", "secure": True, "clients_per_round": 4},
    "noisy-fedncm": {"method": "fedncm", "privacy": {"epsilon": 5.0}},
    "noisy-fed3r": {"method": "fed3r", "privacy": {"epsilon": 50.0, "noise": "client"}},
    "secure-rank": {"method": "fedcof", "rank": 2, "secure": True, "secure_group": 3},
    "noisy-rank": {"method": "fedcof", "rank": 2, "privacy": {"epsilon": 50.0}},
    "few": {"method": "fedcof", "min_examples": 3, "rank": 2, "clients_per_round": 5},
}


@pytest.mark.parametrize("channel", CHANNELS)
def test_the_bill_knows_what_the_channel_does_to_a_message(channel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    table = recipe_of("fedncm").model_dump(mode="json", exclude_none=True)
    assert_same(Recipe.parse({**table, "tasks": [], "stages": [CHANNELS[channel]]}), monkeypatch)


def test_stages_that_start_from_others_are_charged_for_what_those_made(monkeypatch: pytest.MonkeyPatch) -> None:
    mlp = LOCAL | {"head": "mlp", "hidden": 8, "start": "pretrained"}
    stages = [
        {"method": "fed3r"},
        LOCAL | {"method": "fedmezo", "rounds": 12},  # clients catch up with different parts of the log
        mlp | {"method": "fedper"},
        {"method": "personalise", "update": "head", "epochs": 2, "lr": 0.01, "batch_size": 20},
        {"method": "personalise", "compute": "fedncm", "start": 0},
    ]
    table = recipe_of("fedncm").model_dump(mode="json", exclude_none=True)
    assert_same(Recipe.parse({**table, "tasks": [], "stages": stages}), monkeypatch)


def tiny(path: Path, kind: str) -> dict[str, Any]:
    """A tiny network of random weights in a folder: a ResNet with batch norm, or a vision transformer."""
    resnet = transformers.ResNetConfig(embedding_size=4, hidden_sizes=[4, 6], depths=[1, 1], layer_type="basic")
    vit = transformers.ViTConfig(
        hidden_size=8, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16, image_size=8, patch_size=4
    )
    made = transformers.ResNetModel(resnet) if kind == "resnet" else transformers.ViTModel(vit, add_pooling_layer=False)
    made.save_pretrained(path)
    return {"backbone": str(path), "image_size": 16 if kind == "resnet" else 8}


def images(model: dict[str, Any], *stages: dict[str, Any]) -> Recipe:
    part = {"train_examples": 40, "test_examples": 10, "partition": {"kind": "dirichlet", "clients": 3, "alpha": 1.0}}
    return Recipe.parse({"data": {"dataset": "mnist-mini", **part}, "model": model, "stages": list(stages)})


BODY = {"rounds": 2, "lr": 0.01, "batch_size": 5, "clients_per_round": 2}


def test_backbones_that_train_are_charged_to_the_byte_and_the_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stages = [
        BODY | {"method": "fedavg", "train": "all", "local_epochs": 2},
        {"method": "fedncm"},  # needs the backbone that the first has trained
        BODY | {"method": "fedrep", "train": "all", "head_epochs": 3},
        BODY | {"method": "ditto", "train": "all", "start": "pretrained", "local_steps": 3},
    ]
    assert_same(images(tiny(tmp_path, "resnet"), *stages), monkeypatch)


def test_modules_and_seeds_are_charged_to_the_byte_and_the_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lora = BODY | {"train": "lora", "rank": 2}
    stages = [
        lora | {"method": "slora", "rounds": 3, "priming": 0.4},
        lora | {"method": "fedmezo", "rounds": 4, "start": "pretrained"},
        *(lora | {"method": name, "start": "pretrained"} for name in ("fedex-lora", "flexlora", "fedsa-lora")),
        lora | {"method": "distmezo", "local_steps": 2, "num_directions": 2, "start": "pretrained"},
    ]
    assert_same(images(tiny(tmp_path, "vit"), *stages), monkeypatch)
