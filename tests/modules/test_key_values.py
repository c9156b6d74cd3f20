"""A prefix of keys and values: real tokens to begin with, in one pass, in batches and token by token."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from headstart.backbones import load_backbone
from headstart.backbones.completions import Sampling, complete
from headstart.config.recipe import Model
from headstart.errors import HeadstartError
from headstart.modules import attach
from tests.backbones.test_language import LONG, SHORT, TEXTS, VOCABULARY, folder_of, model_of, numbers, scores
from tests.modules.test_modules import bert, shaken

SETTINGS = {"tokens": 3}


def plain_model(place: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(place).eval()


@torch.inference_mode()
def expected(place: Path, text: str, word: str) -> float:
    """log p(word | prompt) where the drawn tokens come first, and positions begin anew behind them."""
    with torch.random.fork_rng():
        torch.manual_seed(5)
        drawn = torch.randint(len(VOCABULARY), (1, 3))[0].tolist()
    prompt, answer = [0, *numbers(f"film : {text} :")], numbers(word)
    ids = [*drawn, *prompt, *answer]
    positions = torch.tensor([[*range(3), *range(len(ids) - 3)]])
    causal = torch.full((1, 1, len(ids), len(ids)), torch.finfo(torch.float32).min).triu(1)
    found = plain_model(place)(input_ids=torch.tensor([ids]), attention_mask=causal, position_ids=positions).logits[0]
    start = len(ids) - len(answer) - 1
    return sum(float(found[start + n].log_softmax(-1)[token]) for n, token in enumerate(answer))


@pytest.mark.parametrize("words", [SHORT, LONG])
@pytest.mark.parametrize("name", ["llama", "gpt2", "qwen3"])
def test_a_prefix_begins_as_real_tokens(name: str, words: tuple[str, ...], tmp_path: Path) -> None:
    place = folder_of(tmp_path / name, name)
    backbone = load_backbone(model_of(place, words))
    before = scores(backbone, TEXTS)
    module = attach("prefix", backbone, SETTINGS, seed=5)
    found = scores(backbone, TEXTS)
    wanted = np.array([[expected(place, text, word) for word in words] for text in TEXTS])
    if words == SHORT:  # single tokens: among themselves
        wanted -= np.log(np.exp(wanted).sum(axis=1, keepdims=True))
    np.testing.assert_allclose(found, wanted, atol=2e-4)
    np.testing.assert_allclose(scores(backbone, TEXTS, pad=5), found, atol=1e-5)
    shaken(module)
    assert np.abs(scores(backbone, TEXTS) - found).max() > 1e-3
    module.detach()
    np.testing.assert_array_equal(scores(backbone, TEXTS), before)


def test_a_model_goes_on_behind_a_prefix(tmp_path: Path) -> None:
    place = folder_of(tmp_path / "llama", "llama")
    backbone = load_backbone(Model(backbone=str(place), task="generate"))
    shaken(attach("prefix", backbone, SETTINGS, seed=5))
    prompt, core = [0, *numbers("the cat ran")], backbone.core
    ids = list(prompt)
    with torch.inference_mode():
        for _ in range(6):  # the whole text anew for every token, without a cache
            given = torch.tensor([ids])
            ids.append(int(core(input_ids=given, attention_mask=torch.ones_like(given)).logits[0, -1].argmax()))
    transform: Any = backbone.transform
    assert complete(backbone, prompt, Sampling(max_new_tokens=6)) == transform.tokenizer.decode(
        ids[len(prompt) :], skip_special_tokens=True
    )


def test_an_encoder_has_no_place_for_a_prefix() -> None:
    with pytest.raises(HeadstartError, match=r"^prefix does not work on bert: it has none\. It needs a causal "):
        attach("prefix", bert(), SETTINGS, seed=0)
