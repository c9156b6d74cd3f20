"""Frozen backbones of few bits: against matrices rounded by hand, under a LoRA, exported, and refused elsewhere."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from peft import PeftModel

from headstart.backbones import load_backbone, quantised
from headstart.config.recipe import Model, Recipe
from headstart.core.files import write_text
from headstart.data import Federation
from headstart.engine.model_store import ModelStore
from headstart.errors import HeadstartError, RecipeError
from headstart.export import Model as Exported
from headstart.export import export
from headstart.runner import run
from tests.backbones.test_language import PROMPT, SHORT, TEXTS, VOCABULARY, folder_of, model_of, scores
from tests.runner.test_choose import lines, recipe_of

# The values of NormalFloat, as the appendix of the QLoRA paper (Dettmers et al., NeurIPS 2023) lists them.
NORMAL = np.array(
    [-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
     -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
     0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0]
)  # fmt: skip


def rounded(weight: torch.Tensor, kind: str) -> torch.Tensor:
    """Of a matrix: each block of 64 values to multiples of its largest, or each row to 127 steps."""
    values = weight.double().numpy()
    if kind == "int8":
        steps = np.abs(values).max(axis=1, keepdims=True) / 127
        return torch.from_numpy(np.round(values / steps) * steps).float()
    blocks = np.pad(values.ravel(), (0, -values.size % 64)).reshape(-1, 64)
    largest = np.abs(blocks).max(axis=1, keepdims=True)
    nearest = np.abs(blocks[:, :, None] / largest[:, :, None] - NORMAL).argmin(axis=2)
    return torch.from_numpy((NORMAL[nearest] * largest).ravel()[: values.size].reshape(values.shape)).float()


@pytest.mark.parametrize(("kind", "error"), [("nf4", 1e-4), ("int8", 0.1)])  # int8 rounds what is multiplied, too
@pytest.mark.parametrize("name", ["llama", "mt5"])
def test_matrices_are_rounded_and_nothing_else(name: str, kind: Any, error: float, tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    place = folder_of(tmp_path / name, name)
    plain, found = load_backbone(model_of(place)), load_backbone(model_of(place, quantise=kind))
    before, after = scores(plain, TEXTS), scores(found, TEXTS)
    core: Any = plain.core
    few = {n for n, each in found.core.named_parameters() if each.dtype in (torch.int8, torch.uint8)}
    assert len(few) == (14 if name == "llama" else 32)  # of two blocks: not the vocabulary, nor the wo of a T5
    with torch.no_grad():
        for each in few:
            core.get_parameter(each).copy_(rounded(core.get_parameter(each), kind))
    np.testing.assert_allclose(after, scores(plain, TEXTS), atol=error)
    if kind == "nf4":  # a model that was not rounded would not pass
        assert np.abs(after - before).max() > error
    else:
        for each in few:
            kept = found.core.get_parameter(each)
            scales = found.core.state_dict()[each.removesuffix("weight") + "SCB"]
            off = (kept * scales[:, None] / 127 - core.get_parameter(each)).abs() / scales[:, None] * 127
            assert off.max() < 1.05  # of a step: what lies between two of them may go either way in 16 bits
            assert (off > 0.1).float().mean() < 0.05
    for text, row in zip(TEXTS, after, strict=True):  # nor does anything depend on the rest of the batch
        np.testing.assert_allclose(scores(found, [text])[0], row, atol=1e-5)
    assert found.fingerprint() != plain.fingerprint()


@pytest.mark.parametrize("kind", ["nf4", "int8"])
@pytest.mark.parametrize("method", ["fedavg", "fedmezo"])
def test_a_lora_learns_on_it_and_is_exported_with_it(
    method: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("bitsandbytes")
    lr = 0.1 if method == "fedavg" else 0.05
    table = recipe_of(tmp_path, method=method, train="lora", lr=lr, rounds=3).model_dump(mode="json", exclude_none=True)
    table["model"]["quantise"] = kind
    recipe = Recipe.parse({key: table[key] for key in ("data", "model", "stages")})
    run(recipe, tmp_path / "run")
    first, *_, last = lines(tmp_path / "run")
    assert last["loss"] != first["loss"] if method == "fedmezo" else last["loss"] < first["loss"]
    run(recipe, tmp_path / "again")
    assert [line["loss"] for line in lines(tmp_path / "again")] == [line["loss"] for line in lines(tmp_path / "run")]
    with pytest.raises(HeadstartError, match="--merge: a backbone of few bits cannot take a lora in"):
        export(tmp_path / "run", tmp_path / "merged", merge=True)
    export(tmp_path / "run", tmp_path / "out")
    write_text(tmp_path / "new.txt", "the cat sat\nvery good bad film\nthe dog")
    found = Exported.load(tmp_path / "run").predict([tmp_path / "new.txt"])
    monkeypatch.chdir(tmp_path / "out")
    body: Any = transformers.AutoModelForCausalLM.from_pretrained("body", dtype=torch.float32)
    # Its kernel for some processors wants matrices of 32 rows and more, and computes in bfloat16.
    body = PeftModel.from_pretrained(quantised.as_floats(body), ".").eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained("body")
    words = [VOCABULARY.index(word) for word in SHORT]
    for text, row in zip(found.inputs, found.probabilities, strict=True):
        with torch.inference_mode():
            logits = body(**tokenizer(PROMPT.replace("{text}", text), return_tensors="pt")).logits[0, -1, words]
        np.testing.assert_allclose(logits.softmax(0), row, atol=1e-4)


def test_heads_are_computed_on_its_features(tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    table = recipe_of(tmp_path).model_dump(mode="json", exclude_none=True)
    model = {"backbone": table["model"]["backbone"], "quantise": "nf4"}
    recipe = Recipe.parse({"data": table["data"], "model": model, "stages": [{"method": "fedncm"}]})
    run(recipe, tmp_path / "run")
    store = ModelStore(recipe.model, Federation.of(recipe).dataset)
    plain = ModelStore(Model(backbone=model["backbone"]), Federation.of(recipe).dataset)
    assert not np.allclose(store.features("test"), plain.features("test"), atol=1e-3)  # the cache keeps them apart


@pytest.mark.parametrize(
    ("model", "stage", "sentence"),
    [
        ({}, {"train": "all"}, "stages.0.train: a backbone that model.quantise rounds stays frozen; use 'lora'"),
        ({}, {"train": "norms"}, "stages.0.train: a backbone that model.quantise rounds stays frozen"),
        ({}, {"method": "slora"}, "stages.0.method: slora changes weights that model.quantise rounds; use fedavg"),
        ({}, {"method": "fedex-lora"}, "stages.0.method: fedex-lora changes weights that model.quantise rounds"),
        ({"weights": "x"}, {"train": "lora"}, "model.weights: weights of few bits come with the backbone"),
        ({"quantise": "int4"}, {"train": "lora"}, "model.quantise: 'int4' is not accepted"),
    ],
)
def test_what_stays_frozen_is_not_trained(model: dict[str, Any], stage: dict[str, Any], sentence: str) -> None:
    table = {"backbone": "hf/x", "quantise": "nf4"} | model
    with pytest.raises(RecipeError) as caught:
        Recipe.parse({"data": {"dataset": "sst2"}, "model": table, "stages": [{"method": "fedavg", "lr": 0.1} | stage]})
    assert sentence in str(caught.value)


def test_it_is_refused_where_it_cannot_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(HeadstartError, match=r"model\.quantise: conv4 is no network of transformers"):
        load_backbone(Model(backbone="conv4", weights="random", quantise="int8"))
    monkeypatch.setattr(quantised, "find_spec", lambda name: None)
    with pytest.raises(HeadstartError, match=r"'nf4' needs bitsandbytes; pip install 'headstart\[quantise\]', or"):
        load_backbone(model_of(folder_of(tmp_path / "llama"), quantise="nf4"))


@pytest.mark.parametrize("name", ["llama", "mt5"])
def test_matrices_are_held_in_bfloat16_and_nothing_else(name: str, tmp_path: Path) -> None:
    place = folder_of(tmp_path / name, name)
    plain, found = load_backbone(model_of(place)), load_backbone(model_of(place, quantise="bfloat16"))
    half = {n for n, each in found.core.named_parameters() if each.dtype == torch.bfloat16}
    assert {each.dtype for each in found.core.parameters()} == {torch.bfloat16, torch.float32}
    linear = {n for n, each in plain.core.named_modules() if isinstance(each, torch.nn.Linear) and n != "lm_head"}
    assert half == {f"{each}.weight" for each in linear}
    for each in half:
        assert torch.equal(found.core.get_parameter(each), plain.core.get_parameter(each).bfloat16())
    held, before = (sum(each.nbytes for each in body.core.parameters()) for body in (found, plain))
    assert before - held == 2 * sum(plain.core.get_parameter(each).numel() for each in half)
    np.testing.assert_allclose(scores(found, TEXTS), scores(plain, TEXTS), atol=0.1)
    assert found.fingerprint() != plain.fingerprint()


@pytest.mark.parametrize("method", ["fedavg", "fedmezo"])
def test_small_modules_train_in_float32_on_bfloat16(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lr = 0.05 if method == "fedmezo" else 0.5
    table = recipe_of(tmp_path, method=method, train="lora", lr=lr, rounds=3).model_dump(mode="json", exclude_none=True)
    table["model"]["quantise"] = "bfloat16"
    recipe = Recipe.parse({key: table[key] for key in ("data", "model", "stages")})
    run(recipe, tmp_path / "run")
    first, *_, last = lines(tmp_path / "run")
    assert last["loss"] != first["loss"] if method == "fedmezo" else last["loss"] < first["loss"]
    model = Exported.load(tmp_path / "run")
    values = model.store.module_values()
    assert {each.dtype for each in values.values()} == {np.dtype(np.float32)}
    moved = [each for name, each in values.items() if ".lora_B." in name]
    assert any((each != torch.from_numpy(each).bfloat16().float().numpy()).any() for each in moved)
    arrays = model.store.arrays()
    assert {each.dtype for each in arrays.values()} == {np.dtype(np.float32)}
    write_text(tmp_path / "new.txt", "the cat sat\nvery good bad film\nthe dog")
    found = model.predict([tmp_path / "new.txt"])
    export(tmp_path / "run", tmp_path / "out")
    monkeypatch.chdir(tmp_path / "out")
    body: Any = transformers.AutoModelForCausalLM.from_pretrained("body", dtype=torch.float32)
    body = PeftModel.from_pretrained(body, ".").eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained("body")
    words = [VOCABULARY.index(word) for word in SHORT]
    for text, row in zip(found.inputs, found.probabilities, strict=True):
        with torch.inference_mode():
            logits = body(**tokenizer(PROMPT.replace("{text}", text), return_tensors="pt")).logits[0, -1, words]
        np.testing.assert_allclose(logits.softmax(0), row, atol=0.03)  # products in float32, and in bfloat16


def test_a_checkpoint_in_bfloat16_is_float32_where_nobody_asks_for_less(tmp_path: Path) -> None:
    place = folder_of(tmp_path / "llama")
    network = transformers.AutoModelForCausalLM.from_pretrained(place).bfloat16()
    network.save_pretrained(place)
    found = load_backbone(model_of(place))
    assert {each.dtype for each in found.core.parameters()} == {torch.float32}
