"""A head knows the temperature that it was trained with: in the loss, in its file, in predictions and in exports."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file
from scipy.special import log_softmax, softmax

from headstart.config.recipe import Recipe
from headstart.config.stage import STAGES, TrainingStage, ZerothOrderStage
from headstart.errors import HeadstartError
from headstart.export import Model, export
from headstart.heads import LinearHead
from headstart.records import RunDirectory
from headstart.runner import run
from tests.export.test_export import digits, loaded, npz
from tests.helpers import Bench, context_of, round_trip
from tests.variants import ON_MODULES

pytestmark = pytest.mark.usefixtures("no_report")

T = 0.2
PROBE = {"method": "fedavg", "train": "head", "rounds": 2, "lr": 0.01, "temperature": T}


def by_hand(head: dict[str, np.ndarray], X: np.ndarray, temperature: float) -> np.ndarray:
    """Logarithms of the probabilities [n, C] of a linear head's two arrays."""
    return np.asarray(log_softmax((X.astype(np.float64) @ head["weight"].T + head["bias"]) / temperature, axis=1))


@pytest.mark.parametrize(
    "stages",
    [
        [PROBE],
        [{"method": "fedncm"}, PROBE],
        [{**PROBE, "temperature": 3.0}, PROBE],
        [{**PROBE, "method": "fedmezo", "lr": 1e-5}],
    ],
    ids=["fedavg", "after a closed form", "after another temperature", "fedmezo"],
)
def test_loss_file_and_predictions_have_the_temperature_of_the_last_stage(
    stages: list[dict[str, Any]], tmp_path: Path
) -> None:
    result = digits(tmp_path / "run", *stages)
    test = result.federation.dataset.test
    X, head = test.features(), load_file(tmp_path / "run" / "model" / "head.safetensors")
    assert {name: array.shape for name, array in head.items()} == {
        "weight": (10, 64), "bias": (10,), "temperature": (),
    }  # fmt: skip
    assert float(head["temperature"]) == pytest.approx(T)
    expected = by_hand(head, X, T)
    assert np.abs(np.exp(expected) - np.exp(by_hand(head, X, 1))).max() > 0.01
    found = RunDirectory(tmp_path / "run").metrics()[-1]
    assert found["loss"] == pytest.approx(-expected[np.arange(len(X)), test.labels].mean(), rel=1e-4)
    predicted = Model.load(tmp_path / "run").predict([npz(tmp_path / "x.npz", X)]).probabilities
    np.testing.assert_allclose(predicted, np.exp(expected), atol=1e-4)


def test_a_temperature_of_one_is_not_written(tmp_path: Path) -> None:
    result = digits(tmp_path / "run", {**PROBE, "temperature": 1.0})
    path = tmp_path / "run" / "model" / "head.safetensors"
    assert load_file(path).keys() == {"weight", "bias"}  # as files were before there was one
    assert LinearHead.load(path).temperature == 1
    assert result.head.temperature == 1


def test_the_next_stage_has_its_own_temperature(tmp_path: Path) -> None:
    digits(tmp_path / "one", PROBE, {**PROBE, "temperature": 1.0})
    assert load_file(tmp_path / "one" / "model" / "head.safetensors").keys() == {"weight", "bias"}
    own = {"method": "personalise", "update": "head", "epochs": 1, "temperature": 0.5}
    digits(tmp_path / "two", PROBE, own)
    assert Model.load(tmp_path / "two", client="0").head.temperature == 0.5


def test_a_head_on_hidden_layers_has_a_temperature(tmp_path: Path) -> None:
    digits(tmp_path / "run", {**PROBE, "head": "mlp", "hidden": 8})
    head = LinearHead.load(tmp_path / "run" / "model" / "head.safetensors")
    assert head.temperature == pytest.approx(T)
    X = np.random.default_rng(0).normal(size=(5, 64)).astype(np.float32)
    assert head.feature_map is not None
    np.testing.assert_allclose(
        head.scores(X) * T, head.feature_map(X) @ head.weight.T + head.bias, rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize("form", ["onnx", "openvino"])
def test_graphs_have_the_temperature(form: Any, tmp_path: Path) -> None:
    X = digits(tmp_path / "run", PROBE).federation.dataset.test.features()[:20]
    export(tmp_path / "run", tmp_path / "out", format=form)
    head = load_file(tmp_path / "run" / "model" / "head.safetensors")
    np.testing.assert_allclose(loaded(tmp_path / "out")["probabilities"](X), np.exp(by_hand(head, X, T)), atol=1e-4)


def test_an_exported_head_has_the_temperature(tmp_path: Path) -> None:
    X = digits(tmp_path / "run", PROBE).federation.dataset.test.features()[:20]
    export(tmp_path / "run", tmp_path / "out")
    head = load_file(tmp_path / "run" / "model" / "head.safetensors")
    scores = loaded(tmp_path / "out")["head"].scores(X)
    np.testing.assert_allclose(softmax(scores, axis=1), np.exp(by_hand(head, X, T)), atol=1e-4)


# ------------------------------------------------------------------------------------------------------ closed forms


def files(folder: Path, validation: bool = True) -> dict[str, Any]:
    """600 examples of 5 overlapping classes for 12 clients, 300 to validate on, 300 to test."""
    rng = np.random.default_rng(1)
    y = rng.integers(0, 5, 1200)
    x = (rng.normal(0, 1.2, (5, 20))[y] + 2 + rng.normal(0, 1.5, (1200, 20))).astype(np.float32)
    split = np.repeat([0, 1 if validation else 0, 2], [600, 300, 300])
    np.savez(folder / "data.npz", X=x, y=y, split=split)
    partition = {"kind": "dirichlet", "clients": 12, "alpha": 0.5}
    return {"data": {"dataset": str(folder / "data.npz"), "partition": partition}, "model": {"backbone": "features"}}


def least(scores: np.ndarray, labels: np.ndarray) -> float:
    """The temperature of the least loss, by a search in small steps."""
    tried = np.geomspace(0.01, 100, 4000)
    losses = [-log_softmax(scores / each, axis=1)[np.arange(len(labels)), labels].mean() for each in tried]
    return float(tried[int(np.argmin(losses))])


@pytest.mark.parametrize("keys", [{}, {"secure": True, "secure_group": 3}, {"clients_per_round": 5}, {"rounds": 1}])
@pytest.mark.parametrize("method", ["fedncm", "fed3r", "fedcof"])
def test_auto_is_the_least_loss_of_the_training_examples(method: str, keys: dict[str, Any], tmp_path: Path) -> None:
    table = files(tmp_path)
    stage = {"method": method, **keys}
    plain = run(Recipe.parse(table | {"stages": [stage]}), tmp_path / "plain")
    found = run(Recipe.parse(table | {"stages": [stage | {"temperature": "auto"}]}), tmp_path / "auto")
    np.testing.assert_allclose(found.head.weight, plain.head.weight, rtol=1e-6, atol=1e-7)
    assert found.summary["accuracy"] == plain.summary["accuracy"]
    train = found.federation.dataset.train
    mine = found.federation.owners >= 0
    x, y = train.features()[mine].astype(np.float64), train.labels[mine]
    scores = x @ found.head.weight.T + found.head.bias
    if method == "fed3r":  # as if each example had been left out, by the mean leverage
        design = np.column_stack([x, np.full(len(x), np.sqrt((x**2).mean()))])
        inverse = np.linalg.inv(design.T @ design + found.summary["stages"][0]["chosen"]["ridge"] * np.eye(21))
        h, solution = np.einsum("nd,de,ne->n", design, inverse, design).mean(), inverse @ design.T @ np.eye(5)[y]
        scores = (design @ solution - h * np.eye(5)[y]) / (1 - h) / np.linalg.norm(solution[:20], axis=0)
    stage_summary, saved = found.summary["stages"][0], load_file(tmp_path / "auto" / "model" / "head.safetensors")
    assert stage_summary["rounds"] == 2 * plain.summary["stages"][0]["rounds"]
    assert stage_summary["forward_passes"] == plain.summary["stages"][0]["forward_passes"]
    assert stage_summary["chosen"]["temperature"] == pytest.approx(least(scores, y), rel=0.01)
    assert float(saved["temperature"]) == pytest.approx(stage_summary["chosen"]["temperature"])
    assert stage_summary["loss"] < plain.summary["stages"][0]["loss"]


def test_validation_is_the_least_loss_there_and_no_further_round(tmp_path: Path) -> None:
    stage = {"method": "fed3r", "temperature": "validation"}
    found = run(Recipe.parse(files(tmp_path) | {"stages": [stage]}))
    split = found.federation.dataset.validation
    assert split is not None
    scores = split.features() @ found.head.weight.T + found.head.bias
    assert found.head.temperature == pytest.approx(least(scores, split.labels), rel=0.01)
    assert found.summary["stages"][0]["rounds"] == 1
    hidden = stage | {"privacy": {"epsilon": 10.0}, "secure": True}
    private = run(Recipe.parse(files(tmp_path) | {"stages": [hidden]}))
    assert private.summary["stages"][0]["chosen"]["temperature"] != 1
    with pytest.raises(HeadstartError, match=r"stages\.0\.temperature: the data have no validation split"):
        run(Recipe.parse(files(tmp_path, validation=False) | {"stages": [stage]}))
    with pytest.raises(HeadstartError, match=r"stages\.0\.temperature: losses of training examples"):
        Recipe.parse(files(tmp_path) | {"stages": [hidden | {"temperature": "auto"}]})


def test_training_starts_with_the_temperature_of_the_head_that_it_starts_from(tmp_path: Path) -> None:
    first, then = {"method": "fedcof", "temperature": "auto"}, {**PROBE, "temperature": "auto", "lr": 1e-9}
    both = run(Recipe.parse(files(tmp_path) | {"stages": [first, then]}), tmp_path / "run")
    chosen = both.summary["stages"][0]["chosen"]["temperature"]
    assert both.head.temperature == pytest.approx(chosen)
    assert both.summary["stages"][1]["loss"] == pytest.approx(both.summary["stages"][0]["loss"], rel=1e-4)
    by_hand = run(Recipe.parse(files(tmp_path) | {"stages": [first, {**then, "temperature": chosen}]}))
    np.testing.assert_array_equal(by_hand.head.weight, both.head.weight)
    new = run(Recipe.parse(files(tmp_path) | {"stages": [first, {**then, "head_init": "zeros"}]}))
    assert new.head.temperature == 1


TRAINED = [n for n, s in STAGES.items() if issubclass(s, TrainingStage | ZerothOrderStage) and n not in ON_MODULES]


@pytest.mark.parametrize("method", TRAINED)
def test_every_method_that_trains_shows_nodes_a_head_with_its_temperature(method: str) -> None:
    keys = {"head": "mlp", "hidden": 4} if method == "fedbabu" else {}
    table = {"method": method, "train": "head", "temperature": T, **keys}
    recipe = {"data": {"dataset": "digits"}, "model": {"backbone": "features"}, "stages": [table]}
    stage = Recipe.parse(recipe).stages[0]
    bench = Bench(stage, context_of(stage, 10, 64, clients=3))
    assert bench.head(bench.init()).temperature == T
    assert bench.method.load(round_trip(bench.method.model(bench.init()))).temperature == T
