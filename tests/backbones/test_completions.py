"""Where a chat's completion ends, what a model is asked to go on with, and what it says, by hand and token by token."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tokenizers import Tokenizer, models

from headstart.backbones import Backbone, load_backbone
from headstart.backbones.completions import CompletionTransform
from headstart.config.recipe import Model
from headstart.errors import HeadstartError
from tests.backbones.test_language import VOCABULARY, folder_of, numbers

TURNS = "{% for m in messages %}{% if m.role == 'user' %}film {{ m.content }} :{% else %} {{ m.content }} "
CHAT = [{"role": "user", "content": "the dog"}, {"role": "assistant", "content": "ran very"}]


def generator(place: Path, **keys: Any) -> Backbone:
    return load_backbone(Model(backbone=str(place), task="generate", **keys))


def with_template(place: Path, template: str, *special: str) -> Path:
    """The chat template, and further tokens that are special."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(place)
    if special:
        tokenizer.add_special_tokens({"additional_special_tokens": list(special)})
    tokenizer.chat_template = template
    tokenizer.save_pretrained(place)
    return place


@torch.inference_mode()
def test_what_the_template_writes_behind_the_end_does_not_count(tmp_path: Path) -> None:
    place = with_template(folder_of(tmp_path), TURNS + "</s> bad {% endif %}{% endfor %}")
    backbone = generator(place)
    twice = [*CHAT, {"role": "user", "content": "cat"}, {"role": "assistant", "content": "sat"}]
    ids, targets = backbone.transform(twice, "x").T
    words = ["film", "the", "dog", ":", "ran", "very", "</s>", "bad", "film", "cat", ":", "sat", "</s>"]
    assert [VOCABULARY[number] for number in ids] == words
    assert targets.tolist() == [0] * 11 + [1, 1]
    loss, tokens = backbone.body(*backbone.transform.collate([backbone.transform(CHAT, "x")]))[0].tolist()
    model = transformers.AutoModelForCausalLM.from_pretrained(place).eval()
    before, after = numbers("film the dog :"), numbers("ran very </s>")
    plain = model(torch.tensor([before + after]), labels=torch.tensor([[-100] * len(before) + after])).loss
    assert (tokens, loss / tokens) == (3, pytest.approx(float(plain), rel=1e-4))


def characters(template: str) -> CompletionTransform:
    """Tokens are characters, but for ":x", which is one."""
    alphabet = ["</s>", ":", "q", "x", "y", ":x"]
    model = models.BPE({token: number for number, token in enumerate(alphabet)}, [(":", "x")])
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=Tokenizer(model), eos_token="</s>")
    tokenizer.chat_template = template
    return CompletionTransform(tokenizer, 16, open=True)


def test_an_answer_whose_beginning_joins_the_token_before_it() -> None:
    turns = "{% for m in messages %}{{ m.content }}{{ ':' if m.role == 'user' else '</s>' }}{% endfor %}"
    transform = characters(turns)
    chat = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "xy"}]
    assert transform.chat_tokens(chat, opens=False) == [2, 5, 4, 0]
    assert transform(chat, "x").tolist() == [[2, 0], [1, 0], [3, 1], [4, 1], [0, 1]]
    assert transform.chat_tokens(chat[:1]) == [2, 1]  # what a completion starts from
    forgets = characters("{% for m in messages[-1:] %}{{ m.content }}{% endfor %}")
    with pytest.raises(HeadstartError, match="here: the chat template writes a question anew once it has its answer; "):
        forgets(chat, "here")
