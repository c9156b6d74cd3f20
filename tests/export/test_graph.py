"""A whole model as one graph: other runtimes give the probabilities that the run's own model gives."""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers
from PIL import Image
from scipy.special import softmax
from sklearn.datasets import load_digits
from sklearn.linear_model import Ridge, RidgeClassifier

from headstart.config.recipe import Recipe
from headstart.errors import HeadstartError
from headstart.export import Model, export
from headstart.runner import run
from tests.export.test_export import (  # noqa: F401 (fixtures among them)
    FEDPER,
    FOOD,
    LORA,
    SPORT,
    base_of,
    digits,
    headstart,
    loaded,
    lora,
    npz,
    text_run,
    texts,
    two,
)

pytestmark = pytest.mark.usefixtures("no_report")

VPT = {"method": "fedavg", "train": "vpt", "tokens": 3, "rounds": 1, "lr": 0.5, "batch_size": 4}

formats = pytest.mark.parametrize("form", ["onnx", "openvino"])


def agree(model: Model, inputs: Path, names: dict[str, Any], *given: list[Any]) -> np.ndarray:
    """What the README's code says of all inputs at once and of the first alone, compared with the run's own model."""
    expected = model.predict([inputs]).probabilities
    found: np.ndarray = names["probabilities"](*given)
    np.testing.assert_allclose(found, expected, atol=1e-4, rtol=0)
    np.testing.assert_allclose(names["probabilities"](*(each[:1] for each in given)), expected[:1], atol=1e-4, rtol=0)
    assert names["classes"] == list(model.classes)
    return found


# ------------------------------------------------------------------------------------------------------------- features


@formats
@pytest.mark.parametrize(
    "stage",
    [
        {"method": "fedcof"},
        {"method": "fed3r", "random_features": 50},
    ],
    ids=lambda stage: str(stage["method"]),
)
def test_features(stage: dict[str, Any], form: Any, tmp_path: Path) -> None:
    test = digits(tmp_path / "run", stage).federation.dataset.test.features()[:41]
    files = export(tmp_path / "run", tmp_path / "out", format=form)
    graph = ["model.onnx"] if form == "onnx" else ["model.bin", "model.xml"]
    assert files == ["README.md", "classes.json", *graph]
    test = np.concatenate([test, np.zeros((1, 64), np.float32)])  # a vector without a direction is no NaN
    agree(Model.load(tmp_path / "run"), npz(tmp_path / "x.npz", test), loaded(tmp_path / "out"), test)


@formats
def test_a_client_has_a_graph_of_its_own(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    test = digits(tmp_path / "run", FEDPER).federation.dataset.test.features()[:41]
    arguments = ["export", tmp_path / "run", "--out", tmp_path / "out", "--client", "client-2", "--format", form]
    done, said = headstart(monkeypatch, capsys, *arguments)
    assert (done, "README.md, classes.json, model." in said) == (0, True), said
    found = agree(
        Model.load(tmp_path / "run", client="2"), npz(tmp_path / "x.npz", test), loaded(tmp_path / "out"), test
    )
    everybodys = Model.load(tmp_path / "run").predict([tmp_path / "x.npz"]).probabilities
    assert np.abs(found - everybodys).max() > 1e-3
    done, said = headstart(monkeypatch, capsys, *arguments)
    assert (done, "already used" in said) == (2, True)


@formats
def test_a_masked_class_has_no_probability(form: Any, tmp_path: Path) -> None:
    digits(tmp_path / "run", {"method": "fedncm", "clients_per_round": 1, "rounds": 1}, clients=5, alpha=0.5)
    model = Model.load(tmp_path / "run")
    masked = np.isneginf(model.head.bias)
    assert 0 < masked.sum() < 9
    export(tmp_path / "run", tmp_path / "out", format=form)
    names, X = loaded(tmp_path / "out"), np.full((5, 64), 3, np.float32)
    found = agree(model, npz(tmp_path / "x.npz", X), names, X)
    assert (found[:, masked] == 0).all()
    if form == "onnx":
        logits = names["session"].run(["logits"], names["inputs"](X))[0]
    else:
        logits = names["graph"](names["inputs"](X))["logits"]
    assert np.isfinite(logits).all()
    np.testing.assert_allclose(softmax(logits[:, ~masked], axis=1), found[:, ~masked], atol=1e-6)


@formats
@pytest.mark.parametrize("kind", ["regression", "multilabel"])
def test_numbers_and_labels_have_no_softmax(kind: str, form: Any, tmp_path: Path) -> None:
    """What comes out is what scikit-learn's ridge regression of the same examples says."""
    x, digit = load_digits(return_X_y=True)
    x, train = x.astype(np.float32), np.arange(len(digit)) % 4 > 0
    numbers = np.stack([100 * digit + 0.5, x[:, 20] - x[:, 30]], axis=1)
    y = numbers if kind == "regression" else np.stack([digit % 2, digit > 4, digit == 0], axis=1)
    np.savez(tmp_path / "data.npz", X=x, y=y, split=2 * ~train, client=np.arange(len(digit)) % 3)
    table = {"dataset": str(tmp_path / "data.npz"), "partition": {"kind": "natural"}}
    stages = [{"method": "fed3r", "ridge": 0.5}]
    run(Recipe.parse({"data": table, "model": {"backbone": "features"}, "stages": stages}), tmp_path / "run")
    export(tmp_path / "run", tmp_path / "out", format=form)
    names = loaded(tmp_path / "out")
    if kind == "regression":
        expected = Ridge(alpha=0.5).fit(x[train], y[train]).predict(x[~train])
        np.testing.assert_allclose(names["values"](x[~train]), expected, rtol=1e-3, atol=1e-2)
    else:
        scores = RidgeClassifier(alpha=0.5).fit(x[train], y[train]).decision_function(x[~train])
        shares = names["shares"](x[~train])
        np.testing.assert_allclose(shares, np.clip((scores + 1) / 2, 0, 1), atol=1e-4)
        np.testing.assert_array_equal((shares > 0.5)[np.abs(scores) > 1e-3], (scores > 0)[np.abs(scores) > 1e-3])
    told = Model.load(tmp_path / "run").predict([npz(tmp_path / "x.npz", x[~train])])
    np.testing.assert_allclose(
        names["values" if kind == "regression" else "shares"](x[~train]), told.probabilities, rtol=1e-3, atol=1e-3
    )
    assert names["classes"] == list(told.classes)


# --------------------------------------------------------------------------------------------------------------- images


def pictures(folder: Path) -> list[Path]:
    """Images of several sizes, one of them grey; the first turned by its EXIF data, and the grey one in 16 bits."""
    rng, paths = np.random.default_rng(0), []
    folder.mkdir()
    for number, shape in enumerate([(40, 70, 3), (90, 50, 3), (64, 64, 3), (33, 33), (20, 200, 3)]):
        paths.append(folder / f"{number}.png")
        # Smooth pictures: resizing noise would make all of them alike.
        small = Image.fromarray(rng.integers(0, 256, (4, 4, *shape[2:]), np.uint8))
        small.resize((shape[1], shape[0])).save(paths[-1])
    turned = Image.Exif()
    turned[0x0112] = 6
    paths += [folder / "5.png", folder / "6.png"]
    Image.open(paths[0]).save(paths[5], exif=turned)
    Image.fromarray(np.asarray(Image.open(paths[3])).astype(np.uint16) * 257).save(paths[6])
    return paths


def image_run(out: Path, *stages: dict[str, Any], **model: Any) -> None:
    shares = {"kind": "iid", "clients": 2}
    data = {"dataset": "mnist-mini", "train_examples": 40, "test_examples": 10, "partition": shares}
    run(Recipe.parse({"data": data, "model": model, "stages": list(stages)}), out)


@formats
def test_images(form: Any, tmp_path: Path) -> None:
    model = {"backbone": "squeezenet1_1", "weights": "random", "preprocess": "caffe", "resize": 40, "image_size": 32}
    image_run(tmp_path / "run", {"method": "fed3r"}, **model)
    export(tmp_path / "run", tmp_path / "out", format=form)
    paths = pictures(tmp_path / "pictures")
    found = agree(Model.load(tmp_path / "run"), tmp_path / "pictures", loaded(tmp_path / "out"), paths)
    assert np.ptp(found, axis=0).max() > 1e-3  # the pictures are told apart
    assert np.abs(found[5] - found[0]).max() > 1e-3  # so is a turned one
    np.testing.assert_allclose(found[6], found[3], atol=1e-6)  # 16 bits and 8 are the same picture
    said = (tmp_path / "out" / "README.md").read_text()
    assert "`images` [n, 32, 32, 3], float32: pixels from 0 to 255" in said
    assert "(blue, green, red), pixel · (1, 1, 1) − (103.939, 116.779, 123.68)" in said
    assert "shorter side brought to 40 pixels" in said
    assert str(tmp_path) not in said
    for path in (tmp_path / "out").glob("model.*"):
        assert b"site-packages" not in path.read_bytes()  # nothing of the machine that wrote it


def test_prompts_of_a_vision_transformer(tmp_path: Path) -> None:
    config = transformers.ViTConfig(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16, image_size=32, patch_size=8
    )
    transformers.ViTModel(config, add_pooling_layer=False).save_pretrained(tmp_path / "vit")
    settings = {"size": {"height": 32, "width": 32}, "image_mean": [0.4] * 3, "image_std": [0.3] * 3}
    (tmp_path / "vit" / "preprocessor_config.json").write_text(json.dumps(settings))
    image_run(tmp_path / "run", {**VPT, "augment": "none"}, backbone=str(tmp_path / "vit"))
    export(tmp_path / "run", tmp_path / "out", format="openvino")
    paths = pictures(tmp_path / "pictures")
    agree(Model.load(tmp_path / "run"), tmp_path / "pictures", loaded(tmp_path / "out"), paths)
    said = (tmp_path / "out" / "README.md").read_text()
    assert "(red, green, blue), pixel · (0.0130719, 0.0130719, 0.0130719) − (1.33333, 1.33333, 1.33333)" in said
    assert "sides brought to that size, whatever their ratio" in said


@pytest.mark.parametrize("statistics", ["aggregate", "batch"])
def test_batch_norm_by_the_batch_is_refused(statistics: str, tmp_path: Path) -> None:
    config = transformers.ResNetConfig(embedding_size=8, hidden_sizes=[8, 8], depths=[1, 1], layer_type="basic")
    transformers.ResNetModel(config).save_pretrained(tmp_path / "resnet")
    stage = {"method": "local-only", "train": "all", "rounds": 3, "batch_size": 10, "augment": "none"}
    model = {"backbone": str(tmp_path / "resnet"), "image_size": 28}
    image_run(tmp_path / "run", {**stage, "norm_statistics": statistics}, **model)
    if statistics == "batch":
        with pytest.raises(HeadstartError, match="--format onnx: batch norm of this backbone goes by each batch's own"):
            export(tmp_path / "run", tmp_path / "out", client="1", format="onnx")
        assert {path.name for path in tmp_path.iterdir()} <= {"cache", "resnet", "run"}
        return
    export(tmp_path / "run", tmp_path / "out", client="1", format="onnx")
    paths = pictures(tmp_path / "pictures")
    agree(Model.load(tmp_path / "run", client="1"), tmp_path / "pictures", loaded(tmp_path / "out"), paths)


def test_a_network_without_running_statistics_is_refused(tmp_path: Path) -> None:
    image_run(tmp_path / "run", {"method": "fedncm"}, backbone="conv4", weights="random")
    with pytest.raises(HeadstartError, match="a backbone that keeps statistics"):
        export(tmp_path / "run", tmp_path / "out", format="openvino")
    assert not (tmp_path / "out").exists()


# ---------------------------------------------------------------------------------------------------------------- texts


def lines(path: Path, *given: str) -> Path:
    path.write_text("\n".join(given))
    return path


@formats
def test_texts_through_a_lora(lora: Path, form: Any, tmp_path: Path) -> None:  # noqa: F811
    files = export(lora, tmp_path / "out", format=form)
    assert "tokenizer/tokenizer.json" in files
    given = [*SPORT, "goal", *FOOD, "a text of more tokens than training has ever seen, of which the end is cut"]
    names = loaded(tmp_path / "out")
    found = agree(Model.load(lora), lines(tmp_path / "a.txt", *given), names, given)
    assert names["inputs"](given)["input_ids"].shape == (14, 8)
    assert names["inputs"](["goal"])["input_ids"].shape == (1, 3)  # the length is free, too
    assert np.abs(found - found.mean(axis=0)).max() > 1e-3


def test_texts_of_a_task_through_its_adapter(two: Path, tmp_path: Path) -> None:  # noqa: F811
    with pytest.raises(HeadstartError, match="choose one with --task"):
        export(two, tmp_path / "out", format="onnx")
    export(two, tmp_path / "out", task="mood", format="onnx")
    given = [*SPORT, *FOOD]
    agree(Model.load(two, "mood"), lines(tmp_path / "a.txt", *given), loaded(tmp_path / "out"), given)


@pytest.fixture(scope="module")
def bert(texts: Path, lora: Path) -> Path:  # noqa: F811
    """A small masked language model with a real tokenizer."""
    config = transformers.BertConfig(
        vocab_size=30522, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16
    )
    transformers.BertForMaskedLM(config).save_pretrained(texts / "bert")
    transformers.AutoTokenizer.from_pretrained(base_of(lora)).save_pretrained(texts / "bert")
    return texts / "bert"


def test_prompts_of_a_text_transformer(texts: Path, bert: Path, tmp_path: Path) -> None:  # noqa: F811
    text_run(tmp_path / "run", texts, VPT, backbone=str(bert))
    export(tmp_path / "run", tmp_path / "out", format="onnx")
    given = [*SPORT, *FOOD]
    agree(Model.load(tmp_path / "run"), lines(tmp_path / "a.txt", *given), loaded(tmp_path / "out"), given)


def test_a_cloze(texts: Path, bert: Path, tmp_path: Path) -> None:  # noqa: F811
    cloze = {"backbone": str(bert), "prompt": "{text} about {mask}.", "label_words": ["food", "sport"]}
    text_run(tmp_path / "run", texts, {"method": "fedavg", "train": "all", "rounds": 2, "lr": 0.5}, **cloze)
    export(tmp_path / "run", tmp_path / "out", format="openvino")
    given = [*SPORT, "a [MASK] of {mask}", *FOOD]
    names = loaded(tmp_path / "out")
    agree(Model.load(tmp_path / "run"), lines(tmp_path / "a.txt", *given), names, given)
    assert names["filled"](cloze["prompt"], ["a [MASK]"], names["tokenizer"], 32)[0] == "a  about [MASK]."


# ------------------------------------------------------------------------------------------------------------ refusals


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("onnxscript", "openvino"):
        monkeypatch.setitem(sys.modules, name, None)  # as if it were not installed
    with pytest.raises(HeadstartError, match=r"needs onnxscript; .* pip install 'headstart\[onnx\]'"):
        export(tmp_path / "run", tmp_path / "out", format="onnx")
    with pytest.raises(HeadstartError, match=r"needs openvino; .* pip install 'headstart\[openvino\]'"):
        export(tmp_path / "run", tmp_path / "out", format="openvino")
