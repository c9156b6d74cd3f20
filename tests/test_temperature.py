"""A head knows the temperature that it was trained with: in the loss, in its file, in predictions and in exports."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file
from scipy.special import log_softmax, softmax

from headstart.config.recipe import Recipe
from headstart.config.stage import STAGES, TrainingStage, ZerothOrderStage
from headstart.export import Model, export
from headstart.heads import LinearHead
from headstart.records import RunDirectory
from tests.export.test_export import digits, loaded, npz
from tests.helpers import Bench, context_of, round_trip

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
    predicted = Model.of(tmp_path / "run").predict([npz(tmp_path / "x.npz", X)]).probabilities
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
    assert Model.of(tmp_path / "two", client="0").head.temperature == 0.5


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


MODULES_ONLY = ("slora", "fedyolo")  # their heads are FedAvg's
TRAINED = [n for n, s in STAGES.items() if issubclass(s, TrainingStage | ZerothOrderStage) and n not in MODULES_ONLY]


@pytest.mark.parametrize("method", TRAINED)
def test_every_method_that_trains_shows_nodes_a_head_with_its_temperature(method: str) -> None:
    keys = {"head": "mlp", "hidden": 4} if method == "fedbabu" else {}
    table = {"method": method, "train": "head", "temperature": T, **keys}
    recipe = {"data": {"dataset": "digits"}, "model": {"backbone": "features"}, "stages": [table]}
    stage = Recipe.parse(recipe).stages[0]
    bench = Bench(stage, context_of(stage, 10, 64, clients=3))
    assert bench.head(bench.init()).temperature == T
    assert bench.method.load(round_trip(bench.method.model(bench.init()))).temperature == T
