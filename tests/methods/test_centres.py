"""FedNCM with several centres per class against scikit-learn's k-means on the pooled examples."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from sklearn.cluster import KMeans

from headstart import FedNCM
from headstart.channel.accounting import spent
from headstart.channel.noise import generators_of
from headstart.config.recipe import Recipe
from headstart.core.statistics import ClientStatistics
from headstart.errors import HeadstartError
from headstart.export import Model, export
from headstart.export.graph import Whole
from headstart.heads.centres import split
from headstart.runner import Result, run
from tests.export.test_export import loaded, npz

pytestmark = pytest.mark.usefixtures("no_report")

K, ITERATIONS = 3, 4
STAGE = {"method": "fedncm", "centres": K, "iterations": ITERATIONS, "distance": "euclidean"}


def played(out: Path | None, *more: dict[str, Any], seed: int = 3, **keys: Any) -> Result:
    data = {"dataset": "digits", "partition": {"kind": "dirichlet", "clients": 8, "alpha": 0.3}}
    table = {"seed": seed, "data": data, "model": {"backbone": "features"}, "stages": [STAGE | keys, *more]}
    return run(Recipe.parse(table), out)


def pooled(x: np.ndarray, y: np.ndarray, seed: int) -> np.ndarray:
    """Centres [C · K, d]: each class is split along random directions from its mean, then k-means."""
    directions = np.random.Generator(np.random.Philox(key=seed)).standard_normal((K, x.shape[1]))
    found = []
    for label in range(10):
        mine = x[y == label]
        side = ((mine - mine.mean(axis=0)) @ directions.T).argmax(axis=1)
        start = np.stack([mine[side == j].mean(axis=0) for j in range(K)])
        means = KMeans(K, init=start, n_init=1, max_iter=ITERATIONS, tol=0, algorithm="lloyd").fit(mine)
        found.append(means.cluster_centers_)
    return np.concatenate(found)


@pytest.mark.parametrize("keys", [{}, {"clients_per_round": 3}, {"secure": True, "secure_group": 4}])
def test_federated_centres_are_those_of_the_pooled_examples(keys: dict[str, Any], tmp_path: Path) -> None:
    result = played(tmp_path / "run", **keys)
    train, test = result.federation.dataset.train, result.federation.dataset.test
    mine = result.federation.owners >= 0
    expected = pooled(train.features()[mine].astype(np.float64), train.labels[mine], 3)
    np.testing.assert_allclose(result.head.weight, expected, rtol=1e-4, atol=1e-4)
    distances = ((test.features()[:, None] - expected) ** 2).sum(axis=2)
    answers = distances.argmin(axis=1) // K
    assert result.summary["accuracy"] == (answers == test.labels).mean()
    assert result.summary["accuracy"] > 0.95  # one mean each: 0.91
    rounds = 3 if "clients_per_round" in keys else 1
    assert result.summary["stages"][0]["rounds"] == (2 + ITERATIONS) * rounds
    assert result.summary["forward_passes"] == mine.sum()
    estimator = FedNCM("euclidean", centres=K, iterations=ITERATIONS, random_state=3)
    estimator.fit(train.features()[mine], train.labels[mine])
    np.testing.assert_array_equal(estimator.predict(test.features()), answers)


def test_the_head_in_its_file_in_predictions_and_in_a_graph(tmp_path: Path) -> None:
    result = played(tmp_path / "run", distance="cosine", temperature="auto")
    x = result.federation.dataset.test.features()
    saved = load_file(tmp_path / "run" / "model" / "head.safetensors")
    shapes = {name: array.shape for name, array in saved.items()}
    assert shapes == {"weight": (10 * K, 64), "bias": (10 * K,), "centres": (), "temperature": ()}
    rows = (x @ saved["weight"].T + saved["bias"]) / saved["temperature"]
    expected = np.stack([rows[:, K * c : K * c + K].max(axis=1) for c in range(10)], axis=1)
    model = Model.load(tmp_path / "run")
    np.testing.assert_allclose(model.head.scores(x), expected, rtol=1e-5)
    found = model.predict([npz(tmp_path / "x.npz", x)])
    np.testing.assert_array_equal(found.labels, expected.argmax(axis=1))
    logits, _ = Whole(model)(torch.from_numpy(x))
    np.testing.assert_allclose(logits.detach().numpy(), expected, rtol=1e-4, atol=1e-4)
    export(tmp_path / "run", tmp_path / "out", format="onnx")
    np.testing.assert_allclose(loaded(tmp_path / "out")["probabilities"](x), found.probabilities, atol=1e-5)


@pytest.mark.parametrize(
    "then",
    [
        {"method": "fedavg", "train": "head", "rounds": 1},
        {"method": "personalise", "update": "head", "epochs": 1},
        {"method": "fedmezo", "train": "head", "rounds": 1},
    ],
)
def test_training_needs_a_linear_head(then: dict[str, Any]) -> None:
    with pytest.raises(HeadstartError, match=r"stages\.1\.head_init: the earlier stage's head has 3 centres"):
        played(None, then)
    if then["method"] == "fedavg":
        assert played(None, then | {"head_init": "random"}).head.centres == 1


@pytest.mark.parametrize("noise", ["server", "client", "shared"])
def test_the_budget_is_that_of_all_passes(noise: str) -> None:
    keys: dict[str, Any] = {"privacy": {"epsilon": 3.0, "delta": 1e-5, "clip": 60.0, "noise": noise}}
    result = played(None, **keys, **({"secure": True} if noise == "shared" else {}))
    promise = result.summary["stages"][0]["privacy"]
    # Six Gaussian mechanisms, one after the other: by the accountant, no more than the budget and most of it.
    total = spent(promise["noise_multiplier"], 1e-5, rounds=2 + ITERATIONS)
    assert 2.9 < total <= 3.0
    assert promise["epsilon"] == 3.0


def test_hardly_any_noise_leaves_the_centres_of_shortened_features() -> None:
    x = (result := played(None, privacy={"epsilon": 1e9, "clip": 40.0})).federation.dataset.train.features()
    mine, y = result.federation.owners >= 0, result.federation.dataset.train.labels
    short = x * np.minimum(1, 40 / np.linalg.norm(x, axis=1, keepdims=True))
    np.testing.assert_allclose(result.head.weight, pooled(short[mine].astype(float), y[mine], 3), rtol=0.01, atol=0.02)


def test_a_client_has_other_noise_in_every_pass() -> None:
    """The same noise twice would be subtracted."""
    clients = np.array([0, 1])
    first, again, later = ([g.random(4).tolist() for g in generators_of((7,), 0, clients, r)] for r in (0, 0, 5))
    assert first == again
    assert not any(one in first for one in later)


def test_examples_stay_in_their_class_where_noise_has_taken_its_first_centre() -> None:
    """Counts with noise may leave of a class any of its rows: a split numbers by the class, not by the first row."""
    rng = np.random.default_rng(0)
    features, labels = rng.standard_normal((60, 4)), np.repeat([0, 1, 2], 20)
    left = np.array([1, 5, 6])  # the second centre of class 0, the third of class 1, the first of class 2
    known = ClientStatistics(3 * K, left, np.ones(3, np.int64), rng.standard_normal((3, 4)))
    assert (split(features, labels, known, K, seed=0) // K == labels).all()
