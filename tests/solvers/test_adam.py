"""AdamW on clients against torch's own, on stacked heads and on a body."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from headstart.config.recipe import Recipe
from headstart.data import Federation
from headstart.engine.model_store import ModelStore
from headstart.errors import RecipeError
from headstart.runner import run
from tests.runner.test_choose import recipe_of

ADAM: dict[str, Any] = {"method": "fedavg", "optimiser": "adamw", "lr": 0.05, "weight_decay": 0.1, "batch_size": "full"}


def test_heads_of_clients_step_as_torch_does(tmp_path: Path) -> None:
    """Clients of different sizes take different numbers of steps; the moments of each round are new."""
    rng = np.random.default_rng(5)
    X, y, client = rng.normal(size=(14, 3)).astype(np.float32), np.arange(14) % 2, np.array([0] * 3 + [1] * 11)
    np.savez(tmp_path / "x.npz", X=X, y=y, client=client, split=np.where(np.arange(14) == 13, 2, 0))
    stage = ADAM | {"train": "head", "rounds": 2, "head_init": "zeros", "batch_size": 3, "local_epochs": 2}
    recipe = Recipe.parse(
        {
            "data": {"dataset": str(tmp_path / "x.npz"), "partition": {"kind": "natural"}},
            "model": {"backbone": "features"},
            "stages": [stage],
        }
    )
    found, federation = run(recipe).head, Federation.of(recipe)
    from headstart.solvers.cohort import Cohort
    from headstart.solvers.heads import batches

    values = {"weight": torch.zeros(2, 3), "bias": torch.zeros(2)}
    features, labels = torch.from_numpy(federation.dataset.train.features()), federation.dataset.train.labels
    for round in range(2):
        mean = {name: torch.zeros_like(value) for name, value in values.items()}
        for k in range(2):
            rows, owners = federation.rows_of(np.array([k]))
            cohort = Cohort(np.array([k]), features.numpy(), rows, labels[rows], owners, np.ones(1, bool), None)  # type: ignore[arg-type]
            own = {name: value.clone().requires_grad_() for name, value in values.items()}
            optimiser = torch.optim.AdamW(own.values(), lr=0.05, weight_decay=0.1)
            for batch in batches(cohort, recipe.stages[0], round, (recipe.seed, 0))[0]:  # type: ignore[arg-type]
                chosen = rows[batch[batch >= 0]]
                scores = features[chosen] @ own["weight"].T + own["bias"]
                optimiser.zero_grad()
                torch.nn.functional.cross_entropy(scores, torch.from_numpy(labels[chosen])).backward()
                optimiser.step()
            for name in mean:
                mean[name] += own[name].detach() * len(rows) / 13
        values = mean
    np.testing.assert_allclose(found.weight, values["weight"], atol=1e-5)
    np.testing.assert_allclose(found.bias, values["bias"], atol=1e-5)
    assert np.abs(found.weight).max() > 0.1


def test_a_body_steps_as_torch_does(tmp_path: Path) -> None:
    recipe = recipe_of(tmp_path, clients=1, **ADAM | {"train": "norms", "rounds": 1, "local_steps": 3})
    run(recipe, tmp_path / "run")
    dataset = Federation.of(recipe).dataset
    backbone = ModelStore(recipe.model, None).backbone
    assert backbone is not None
    batch = backbone.transform.collate([backbone.transform(text, "x") for text in dataset.train.raw(0, 1000)])
    norms = {name: each.requires_grad_() for name, each in backbone.core.named_parameters() if each.ndim == 1}
    optimiser = torch.optim.AdamW(norms.values(), lr=0.05, weight_decay=0.1)
    for _ in range(3):
        optimiser.zero_grad()
        torch.nn.functional.cross_entropy(backbone.body(*batch), torch.from_numpy(dataset.train.labels)).backward()
        optimiser.step()
    from safetensors.torch import load_file

    found = load_file(tmp_path / "run" / "model" / "model.safetensors")
    start = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model").state_dict()
    for name, parameter in norms.items():
        assert torch.allclose(found[name], parameter, atol=1e-4), name
        assert (found[name] - start[name]).abs().max() > 0.05


@pytest.mark.parametrize(
    ("stage", "sentence"),
    [
        ({"method": "scaffold"}, "stages.0.optimiser: scaffold is defined for local SGD; use 'sgd'"),
        ({"method": "fednova"}, "stages.0.optimiser: fednova is defined for local SGD; use 'sgd'"),
        ({"method": "fedavg", "momentum": 0.9}, "stages.0.momentum: adamw has its own; leave it out"),
    ],
)
def test_what_does_not_go_with_it(stage: dict[str, Any], sentence: str) -> None:
    table = {"data": {"dataset": "digits"}, "model": {"backbone": "features"}}
    with pytest.raises(RecipeError, match=sentence):
        Recipe.parse(table | {"stages": [{"train": "head", "optimiser": "adamw"} | stage]})
