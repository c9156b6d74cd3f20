"""Closed forms as stages of a run: what their heads do with what a round, or privacy, leaves them."""

import csv
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.datasets import load_wine

from headstart.config.recipe import Recipe
from headstart.export.graph import Whole
from headstart.export.model import Model
from headstart.methods.fedcof import FedCOF
from headstart.runner import run
from tests.runner.test_stages import metrics_of


def users(folder: Path, **keys: Any) -> Recipe:
    """Forty users of two examples each, in five dimensions, and 200 test examples of the same three classes."""
    rng = np.random.default_rng(0)
    y = rng.integers(0, 3, 280)
    x = rng.normal(0, 3, (3, 5))[y] + rng.normal(size=(280, 5))
    split, client = np.repeat([0, 2], [80, 200]), np.concatenate([np.arange(80) // 2, np.full(200, -1)])
    np.savez(folder / "users.npz", X=x.astype(np.float32), y=y, split=split, client=client)
    data = {"dataset": str(folder / "users.npz"), "partition": {"kind": "natural"}}
    return Recipe.parse({"data": data, "model": {"backbone": "features"}, "stages": [{"method": "fedcof", **keys}]})


@pytest.mark.parametrize("covariance", ["estimated", "full"])
def test_fedcof_has_class_means_until_there_is_a_covariance(covariance: str, tmp_path: Path) -> None:
    """One user of two examples a round: the first rounds have one class, or one example of each of two."""
    recipe = users(tmp_path, covariance=covariance, clients_per_round=1, evaluate_every=1)
    result = run(recipe, tmp_path / "one by one")
    rates = [line["accuracy"] for line in metrics_of(tmp_path / "one by one")]
    assert len(rates) == 40
    once = run(users(tmp_path, covariance=covariance), tmp_path / "at once")
    assert rates[-1] == once.summary["accuracy"]
    assert rates[-1] > 0.9
    # The first round's head is the class means of the one user that was asked.
    federation = result.federation
    with (tmp_path / "one by one" / "rounds.csv").open() as file:
        (first,) = (line for line in csv.DictReader(file) if line["round"] == "1")
    mine = federation.owners == federation.names.index(first["client"])
    x, y = federation.dataset.train.features()[mine], federation.dataset.train.labels[mine]
    means = np.stack([x[y == c].mean(axis=0) for c in np.unique(y)])
    test = federation.dataset.test
    nearest = (test.features() @ (means / np.linalg.norm(means, axis=1, keepdims=True)).T).argmax(axis=1)
    assert rates[0] == (np.unique(y)[nearest] == test.labels).mean()


@pytest.mark.parametrize("clip", [1.0, 3.0, 100.0])
def test_private_euclidean_distances_are_those_of_shortened_features(clip: float, tmp_path: Path) -> None:
    """Wine, with hardly any noise: the nearest mean of the shortened features, for examples shortened alike."""
    x, y = load_wine(return_X_y=True)
    x, split = ((x - x.mean(axis=0)) / x.std(axis=0)).astype(np.float32), np.arange(len(y)) % 3 // 2 * 2
    np.savez(tmp_path / "wine.npz", X=x, y=y, split=split)
    data = {"dataset": str(tmp_path / "wine.npz"), "partition": {"kind": "iid", "clients": 10}}
    stage = {"method": "fedncm", "distance": "euclidean", "privacy": {"epsilon": 1e7, "clip": clip}}
    recipe = Recipe.parse({"data": data, "model": {"backbone": "features"}, "stages": [stage]})
    rate = run(recipe, tmp_path / "run").summary["accuracy"]
    short = x / np.maximum(np.linalg.norm(x, axis=1, keepdims=True) / clip, 1)
    means = np.stack([short[(split == 0) & (y == c)].mean(axis=0) for c in range(3)])
    test = split == 2
    nearest = ((short[test, None] - means) ** 2).sum(axis=2).argmin(axis=1)
    assert rate == (nearest == y[test]).mean()
    assert rate > 0.94
    # The head is saved with the length, and another stage starts from its weights.
    model = Model.load(tmp_path / "run")
    assert (model.head.scores(x[test]).argmax(axis=1) == nearest).all()
    logits, _ = Whole(model)(torch.from_numpy(x[test]))
    np.testing.assert_allclose(logits.detach().numpy(), model.head.scores(x[test]), atol=1e-5)
    probe = {"method": "fedavg", "train": "head", "rounds": 1, "lr": 1e-9}
    then = run(
        Recipe.parse({"data": data, "model": {"backbone": "features"}, "stages": [stage, probe]}), tmp_path / "two"
    )
    assert then.summary["stages"][0]["accuracy"] == rate
    np.testing.assert_allclose(Model.load(tmp_path / "two").head.weight, model.head.weight, atol=1e-5)


@pytest.mark.parametrize(("keys", "rounds"), [({}, 1), ({"clients_per_round": 20}, 2)])
def test_a_head_is_solved_for_once_for_what_is_known(
    keys: dict[str, Any], rounds: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    solve, solved = FedCOF.solve, []

    def counted(self: FedCOF, total: Any) -> Any:
        solved.append(len(total.labels))
        return solve(self, total)

    monkeypatch.setattr(FedCOF, "solve", counted)
    run(users(tmp_path, **keys), tmp_path / "run")
    assert len(solved) == rounds
    assert solved == sorted(set(solved))  # each with more than the one before
