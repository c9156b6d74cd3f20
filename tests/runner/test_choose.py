"""Runs of models that choose: zero-shot first, FedMeZO as MeZO on the pooled data, LoRA with FedAvg, replay, export."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from peft import PeftModel

from headstart.config.recipe import Recipe
from headstart.core.files import write_text
from headstart.data import Federation
from headstart.engine.model_store import ModelStore
from headstart.errors import HeadstartError
from headstart.export import Model, export
from headstart.export.replay import replay
from headstart.modules import LocalModel
from headstart.runner import run
from headstart.solvers.directions import DISTRIBUTIONS
from headstart.solvers.objective import learning_rate
from tests.backbones.test_language import LONG, PROMPT, SHORT, VOCABULARY, folder_of
from tests.methods.test_bodies import Plain, backbone_of

TEXTS = [f"{a} {b} {c}" for a in ("the", "very") for b in ("cat", "dog", "film", "good") for c in ("sat", "ran", "bad")]


def recipe_of(
    folder: Path, words: tuple[str, ...] = SHORT, clients: int = 3, name: str = "llama", **stage: Any
) -> Recipe:
    """Texts of which those that end in "sat" are of the first class."""
    if not (folder / "model").is_dir():
        folder_of(folder / "model", name)
        rows = [f"{text},{min(('sat', 'ran', 'bad').index(text.split()[2]), len(words) - 1)}" for text in TEXTS]
        write_text(folder / "train.csv", "\n".join(["text,label", *rows, *rows]))
    return Recipe.parse(
        {
            "data": {
                "dataset": str(folder / "train.csv"), "test_fraction": 0.5,
                "partition": {"kind": "dirichlet-by-class", "clients": clients, "alpha": 0.5},
            },
            "model": {
                "backbone": str(folder / "model"), "task": "choose", "prompt": PROMPT, "label_words": list(words),
            },
            "stages": [{"method": "fedmezo", "train": "all", "rounds": 3, "lr": 1e-2, "batch_size": "full"} | stage],
        }
    )  # fmt: skip


def lines(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def test_round_0_is_the_model_as_it_comes(tmp_path: Path) -> None:
    recipe = recipe_of(tmp_path)
    run(recipe, tmp_path / "run")
    federation, store = Federation.of(recipe), ModelStore(recipe.model, Federation.of(recipe).dataset)
    scores, labels = store.features("test"), federation.dataset.test.labels
    first, *others = lines(tmp_path / "run")
    assert (first["round"], first["bytes_up"], [line["round"] for line in others]) == (0, 0, [1, 2, 3])
    assert first["accuracy"] == pytest.approx(np.mean(scores.argmax(axis=1) == labels))
    given = torch.tensor(scores)
    chosen = given[torch.arange(len(labels)), torch.from_numpy(labels)]
    assert first["loss"] == pytest.approx(float((given.logsumexp(1) - chosen).mean()), rel=1e-5)


@pytest.mark.parametrize("words", [SHORT, LONG])
@pytest.mark.parametrize(
    ("name", "train", "blocks", "count"),  # of the llama's two blocks: two norms each, and the last one
    [
        ("llama", "all", None, 20), ("llama", "norms", None, 5), ("llama", "norms", 1, 3), ("llama", "norms", 0, 1),
        # Of the BART's, shifts and biases too: 2 · (4 + 2 + 2 + 2) and 2 · (4 + 2 + 4 + 2 + 2 + 2), and 2 · 2 before.
        ("bart", "norms", None, 56),
    ],
)  # fmt: skip
def test_fedmezo_is_mezo_on_the_pooled_data(
    name: str, train: str, blocks: int | None, count: int, words: tuple[str, ...], tmp_path: Path
) -> None:
    """Whoever holds what: the loop below knows no clients, and perturbs the whole model at once."""
    recipe = recipe_of(tmp_path, words, clients=4, name=name, train=train, blocks=blocks)
    stage: Any = recipe.stages[0]
    run(recipe, tmp_path / "run")
    dataset = Federation.of(recipe).dataset
    backbone = ModelStore(recipe.model, dataset).backbone
    assert backbone is not None
    names = {n: p for n, p in backbone.core.named_parameters() if train == "all" or p.ndim == 1}
    for left_out in range(0 if blocks is None else 2 - blocks):
        names = {n: p for n, p in names.items() if f"layers.{left_out}." not in n}
    assert len(names) == count
    batch = backbone.transform.collate([backbone.transform(text, "x") for text in dataset.train.raw(0, 1000)])
    labels = torch.from_numpy(dataset.train.labels)

    def loss(step: dict[str, torch.Tensor], factor: float) -> float:
        for name, parameter in names.items():
            parameter.data += factor * step[name]
        found = torch.nn.functional.cross_entropy(backbone.body(*batch), labels)
        for name, parameter in names.items():
            parameter.data -= factor * step[name]
        return float(found)

    with torch.no_grad():
        for round in range(stage.rounds):
            seed = int(np.random.default_rng([0x5EED, recipe.seed, 0, round]).integers(2**31))
            step = {n: _drawn("gaussian", seed, 0, f"body.{n}", p) for n, p in names.items()}
            slope = (loss(step, stage.epsilon) - loss(step, -stage.epsilon)) / (2 * stage.epsilon)
            for name, parameter in names.items():
                parameter.data -= learning_rate(stage, round) * slope * step[name]
    from safetensors.torch import load_file

    found = load_file(tmp_path / "run" / "model" / "model.safetensors")
    start = dict(ModelStore(recipe.model, None).backbone.core.named_parameters())  # type: ignore[union-attr]
    for name, parameter in names.items():
        assert torch.allclose(found[name], parameter, atol=2e-4)
        assert (found[name] - start[name]).abs().max() > 1e-3


@pytest.mark.parametrize("stage", [{"train": "norms", "blocks": 0}, {"method": "fedavg", "train": "lora", "blocks": 1}])
def test_the_last_blocks_of_an_encoder_with_a_decoder_are_refused(stage: dict[str, Any], tmp_path: Path) -> None:
    sentence = (
        r"has an encoder and a decoder, and its last \d blocks cannot be trained alone; leave blocks out, for all"
    )
    with pytest.raises(HeadstartError, match=sentence):
        run(recipe_of(tmp_path, LONG, name="bart", **stage), tmp_path / "run")


def test_signs_are_directions_of_mezo_on_the_pooled_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kept in memory or drawn anew, over one client or four, and beside a loop that moves the whole model at once."""
    stage: dict[str, Any] = {"perturbation": "rademacher", "rounds": 2, "epsilon": 1e-3, "num_directions": 2}
    recipe = recipe_of(tmp_path, SHORT, clients=4, **stage)
    run(recipe, tmp_path / "four")
    run(recipe_of(tmp_path, SHORT, clients=1, **stage), tmp_path / "one")
    monkeypatch.setattr("headstart.solvers.perturbation._ROOM", 0)
    run(recipe, tmp_path / "anew")
    from safetensors.torch import load_file

    four, one, anew = (load_file(tmp_path / each / "model" / "model.safetensors") for each in ("four", "one", "anew"))
    dataset = Federation.of(recipe).dataset
    backbone = ModelStore(recipe.model, dataset).backbone
    assert backbone is not None
    names = dict(backbone.core.named_parameters())
    batch = backbone.transform.collate([backbone.transform(text, "x") for text in dataset.train.raw(0, 1000)])
    labels = torch.from_numpy(dataset.train.labels)
    with torch.no_grad():
        for round in range(2):
            seed = int(np.random.default_rng([0x5EED, recipe.seed, 0, round]).integers(2**31))
            slopes, steps = [], []
            for number in range(2):
                step = {n: _drawn("rademacher", seed, number, f"body.{n}", p) for n, p in names.items()}
                losses = []
                for factor in (1e-3, -2e-3):
                    for name, parameter in names.items():
                        parameter.data += factor * step[name]
                    losses.append(float(torch.nn.functional.cross_entropy(backbone.body(*batch), labels)))
                for name, parameter in names.items():
                    parameter.data += 1e-3 * step[name]
                slopes.append((losses[0] - losses[1]) / 2e-3)
                steps.append(step)
            for name, parameter in names.items():
                parameter.data -= 1e-2 * sum(g * step[name] for g, step in zip(slopes, steps, strict=True)) / 2
    for name, parameter in names.items():
        assert torch.equal(four[name], anew[name])
        assert torch.allclose(four[name], one[name], atol=1e-5)
        assert torch.allclose(four[name], parameter, atol=2e-4)


@pytest.mark.parametrize("perturbation", ["gaussian", "rademacher"])
def test_directions_are_the_same_kept_or_drawn_anew_whole_or_by_rows(
    perturbation: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the vocabulary, rows that are read are perturbed alone; 128 numbers at a time end within a matrix."""
    monkeypatch.setattr("headstart.solvers.directions.AT_ONCE", 128)
    monkeypatch.setattr("headstart.solvers.perturbation._SHARE", 256)
    keys: dict[str, Any] = {"perturbation": perturbation, "num_directions": 2, "momentum": 0.5}
    recipe = recipe_of(tmp_path, SHORT, **keys)
    run(recipe, tmp_path / "kept")
    monkeypatch.setattr("headstart.solvers.perturbation._ROOM", 0)
    run(recipe, tmp_path / "anew")
    monkeypatch.setattr("headstart.solvers.zeroth.rows_read", lambda layer, inputs: None)
    run(recipe, tmp_path / "whole")
    kept, *others = (
        (tmp_path / name / "model" / "model.safetensors").read_bytes() for name in ("kept", "anew", "whole")
    )
    assert others == [kept, kept]


def _drawn(kind: str, seed: int, number: int, name: str, parameter: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(DISTRIBUTIONS[kind].direction(seed, number, name, parameter.numel())).view(parameter.shape)


@pytest.mark.parametrize("perturbation", ["gaussian", "rademacher"])
@pytest.mark.parametrize("train", ["all", "norms", "lora", "prefix"])
def test_a_log_gives_the_model_again_to_the_bit(train: str, perturbation: str, tmp_path: Path) -> None:
    recipe = recipe_of(tmp_path, LONG, train=train, num_directions=2, perturbation=perturbation)
    run(recipe, tmp_path / "run")
    assert replay(tmp_path / "run", tmp_path / "again") == []


@pytest.mark.parametrize("blocks", [None, 1])
def test_lora_learns_to_choose_and_the_words_stay(blocks: int | None, tmp_path: Path) -> None:
    recipe = recipe_of(tmp_path, LONG, method="fedavg", train="lora", lr=0.5, rounds=12, blocks=blocks, batch_size=8)
    result = run(recipe, tmp_path / "run")
    first, *_, last = lines(tmp_path / "run")
    assert last["loss"] < first["loss"] - 0.2
    np.testing.assert_array_equal(result.head.weight, np.eye(3))
    assert not result.head.bias.any()


@pytest.mark.parametrize("keys", [{"micro_batch": 3}, {"checkpoint_gradients": True}])
@pytest.mark.parametrize("blocks", [None, 1])
def test_less_memory_takes_the_same_steps(blocks: int | None, keys: dict[str, Any], tmp_path: Path) -> None:
    from safetensors.numpy import load_file

    stage = {"method": "fedavg", "train": "lora", "lr": 0.5, "rounds": 2, "batch_size": 8, "blocks": blocks}
    for name, more in (("plain", {}), ("less", keys)):
        run(recipe_of(tmp_path, **stage, **more), tmp_path / name)
    plain, less = (load_file(tmp_path / name / "model" / "module-default.safetensors") for name in ("plain", "less"))
    for name, value in plain.items():
        np.testing.assert_allclose(less[name], value, rtol=1e-4, atol=1e-5)
    assert max(np.abs(value).max() for name, value in plain.items() if ".lora_B." in name) > 1e-2


def test_blocks_that_cannot_be_computed_again_are_refused(tmp_path: Path) -> None:
    model = LocalModel(backbone_of(Plain()))
    with pytest.raises(HeadstartError, match="checkpoint_gradients: no blocks of the backbone can be computed again"):
        model.checkpoint_gradients(True)


@pytest.mark.parametrize("merge", [False, True])
def test_what_is_exported_says_the_same(merge: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Merged or not, `transformers` and `peft` alone give the scores of the run."""
    recipe = recipe_of(tmp_path, method="fedavg", train="lora", lr=0.5, rounds=3)
    run(recipe, tmp_path / "run")
    export(tmp_path / "run", tmp_path / "out", merge=merge)
    write_text(tmp_path / "new.txt", "the cat sat\nvery good bad film\nthe dog")
    found = Model.load(tmp_path / "run").predict([tmp_path / "new.txt"])
    monkeypatch.chdir(tmp_path / "out")
    body: Any = transformers.AutoModelForCausalLM.from_pretrained("body")
    body = body if merge else PeftModel.from_pretrained(body, ".").eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained("body")
    words = [VOCABULARY.index(word) for word in SHORT]
    for text, row in zip(found.inputs, found.probabilities, strict=True):
        with torch.inference_mode():
            logits = body(**tokenizer(PROMPT.replace("{text}", text), return_tensors="pt")).logits[0, -1, words]
        np.testing.assert_allclose(logits.softmax(0), row, atol=1e-4)
    with pytest.raises(HeadstartError, match="--format onnx: a model that speaks is written for transformers"):
        export(tmp_path / "run", tmp_path / "graph", format="onnx")
