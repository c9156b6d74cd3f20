"""Where a chat's completion ends, what a model is asked to go on with, and what it says, by hand and token by token."""

import csv
import json
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tokenizers import Tokenizer, models

from headstart.backbones import Backbone, load_backbone
from headstart.backbones.completions import CompletionTransform, Sampling, complete
from headstart.config.recipe import Model, Recipe
from headstart.errors import HeadstartError
from headstart.runner import run
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


def without_beginning(place: Path, *names: str) -> Path:
    """A tokenizer that puts no token before a text, and does not know these tokens by their names."""
    file, settings = place / "tokenizer.json", place / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"post_processor": None}))
    kept = {name: value for name, value in json.loads(settings.read_text()).items() if name not in names}
    settings.write_text(json.dumps(kept))
    return place


@torch.inference_mode()
def said(place: Path, prompt: Sequence[int], most: int, ends: Collection[int] = (2,)) -> str:
    """The likeliest token at every step of the plain model, without a cache, up to one that ends."""
    model, ids = transformers.AutoModelForCausalLM.from_pretrained(place).eval(), list(prompt)
    for _ in range(most):
        token = int(model(torch.tensor([ids])).logits[0, -1].argmax())
        if token in ends:
            break
        ids.append(token)
    return " ".join(VOCABULARY[number] for number in ids[len(prompt) :] if number > 3)


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


def test_a_completion_ends_where_the_template_or_the_checkpoint_ends_a_turn(tmp_path: Path) -> None:
    """Greedily, the model says "bad bad film bad : ran" after "the cat"."""
    plain, by_template, by_checkpoint = (tmp_path / name for name in ("plain", "template", "checkpoint"))
    cat = [0, *numbers("the cat")]
    assert said(folder_of(plain), cat, 6) == "bad bad film bad : ran"
    assert complete(generator(plain), cat, Sampling(6)) == "bad bad film bad : ran"
    # "film" and ":" are no ends in the tokenizer's own settings.
    with_template(folder_of(by_template), TURNS.replace("film", "") + "film{% endif %}{% endfor %}", "film")
    transformers.GenerationConfig(eos_token_id=[2, numbers(":")[0]]).save_pretrained(folder_of(by_checkpoint))
    for place, expected in ((by_template, "bad bad"), (by_checkpoint, "bad bad film bad")):
        pieces: list[str] = []
        assert complete(generator(place), cat, Sampling(6), pieces.append) == expected
        assert "".join(pieces).strip() == expected
    ids, targets = generator(by_template).transform(CHAT, "x").T
    assert [VOCABULARY[number] for number in ids[targets == 1]] == ["ran", "very", "film"]


def test_a_template_for_other_conversations_ends_nothing(tmp_path: Path) -> None:
    place = with_template(folder_of(tmp_path), "{{ raise_exception('a system message comes first') }}")
    prompt = [0, *numbers("the cat")]
    assert complete(generator(place), prompt, Sampling(6)) == said(place, prompt, 6)


@pytest.mark.parametrize(
    "settings", [{"repetition_penalty": 1.5}, {"num_beams": 4}, {"no_repeat_ngram_size": 2}, {"min_new_tokens": 8}]
)
def test_the_checkpoints_own_way_to_generate_is_not_taken(settings: dict[str, Any], tmp_path: Path) -> None:
    place = folder_of(tmp_path / "model")
    before = [complete(generator(place), [0, 13, 9], Sampling(10, 1.5, seed=seed)) for seed in range(3)]
    transformers.GenerationConfig(bos_token_id=0, eos_token_id=2, pad_token_id=1, **settings).save_pretrained(place)
    backbone = generator(place)
    kept: Any = backbone.core.generation_config
    for text in ("the cat", "film good"):
        pieces: list[str] = []
        prompt = [0, *numbers(text)]
        expected = said(place, prompt, 10)
        assert complete(backbone, prompt, Sampling(10), pieces.append) == expected
        assert "".join(pieces).strip() == expected
    assert [complete(backbone, [0, 13, 9], Sampling(10, 1.5, seed=seed)) for seed in range(3)] == before
    assert backbone.core.generation_config is kept


def test_a_prompt_is_cut_to_the_room_of_the_model(tmp_path: Path) -> None:
    """GPT-2 has 32 positions here; <s> stays, and half of them are the prompt's."""
    place = folder_of(tmp_path / "gpt2", "gpt2")
    backbone = generator(place)
    words = numbers("the cat sat dog ran good bad very : film " * 4)
    for prompt in ([0, *words], words):
        begin = prompt[:1] if prompt[0] == 0 else []
        for most, new, room in ((4, 4, 28), (20, 16, 16), (64, 16, 16)):
            cut = [*begin, *words[len(words) - room + len(begin) :]]
            assert complete(backbone, prompt, Sampling(most)) == said(place, cut, new)
    short = [0, *words[:4]]
    assert complete(backbone, short, Sampling(64)) == said(place, short, 32 - 5)


@pytest.mark.parametrize(("name", "begins"), [("bos_token", 2), ("", 0)])
def test_an_empty_prompt_starts_from_a_token_that_begins_or_ends_a_text(name: str, begins: int, tmp_path: Path) -> None:
    place = without_beginning(folder_of(tmp_path / "model"), name)
    transform: Any = generator(place).transform
    assert transform.prompt_tokens("") == []
    assert complete(generator(place), [], Sampling(5)) == said(place, [begins], 5)


def test_samples_of_a_run_are_of_prompts_as_training_cuts_them(tmp_path: Path) -> None:
    place = without_beginning(folder_of(tmp_path / "gpt2", "gpt2"))
    prompts = ["", "the cat sat dog ran good bad very : film " * 4]
    rows = [{"prompt": prompts[n % 2], "completion": "sat ran", "who": "ab"[n // 2 % 2]} for n in range(8)]
    (tmp_path / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "test.jsonl").write_text("\n".join(map(json.dumps, rows[:4])))
    partition = {"kind": "natural", "test": "follow"}
    recipe = {
        "data": {"dataset": str(tmp_path), "client_column": "who", "partition": partition},
        "model": {"backbone": str(place), "task": "generate", "max_tokens": 12},
        "stages": [{"method": "fedavg", "train": "lora", "rounds": 1, "lr": 1e-2, "batch_size": 4}],
    }
    run(Recipe.parse(recipe), tmp_path / "run")
    with (tmp_path / "run" / "samples.csv").open() as file:
        samples = [row for row in csv.DictReader(file) if row["round"] == "0"]
    expected = {"": said(place, [0], 31), prompts[1]: said(place, numbers(prompts[1])[-12:], 20)}
    assert len(samples) == 4
    assert {row["prompt"]: row["completion"] for row in samples} == expected
