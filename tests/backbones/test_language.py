"""Models that choose: how likely each label word is after a prompt, against the whole model one word at a time."""

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from headstart.backbones import Backbone, Inputs, load_backbone, run_body
from headstart.backbones.language import continuation
from headstart.config.recipe import Model, Recipe
from headstart.data import Examples
from headstart.errors import HeadstartError, RecipeError
from headstart.modules import attach, prefix_of

VOCABULARY = ["<s>", "<pad>", "</s>", "<unk>", "the", "cat", "sat", "dog", "ran", "good", "bad", "very", ":", "film"]
SIZES: dict[str, Any] = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 12}
CAUSAL = SIZES | {"vocab_size": len(VOCABULARY), "initializer_range": 0.5, "pad_token_id": 1, "bos_token_id": 0}
CONFIGS: dict[str, Any] = {
    "llama": transformers.LlamaConfig(**CAUSAL, num_key_value_heads=1, tie_word_embeddings=True),
    "qwen3": transformers.Qwen3Config(**CAUSAL, num_key_value_heads=1, head_dim=4),
    "gemma2": transformers.Gemma2Config(**CAUSAL, head_dim=4, num_key_value_heads=1, final_logit_softcapping=2.0),
    "neox": transformers.GPTNeoXConfig(**CAUSAL),
    "gpt2": transformers.GPT2Config(
        vocab_size=len(VOCABULARY), n_embd=8, n_layer=2, n_head=2, n_positions=32, initializer_range=0.5
    ),
    "mt5": transformers.MT5Config(
        vocab_size=len(VOCABULARY), d_model=8, d_kv=4, d_ff=12, num_layers=2, num_heads=2, pad_token_id=1,
        decoder_start_token_id=1, eos_token_id=2, initializer_factor=1.0,
    ),
    "bart": transformers.BartConfig(
        vocab_size=len(VOCABULARY), d_model=8, encoder_layers=2, decoder_layers=2, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=12, decoder_ffn_dim=12, max_position_embeddings=64, pad_token_id=1,
        bos_token_id=0, eos_token_id=2, decoder_start_token_id=1, forced_eos_token_id=2, init_std=0.5,
    ),
}  # fmt: skip
PROMPT = "film : {text} :"
TEXTS = ["the cat sat", "the dog", "", "the cat ran the dog sat the cat"]
SHORT, LONG = ("good", "bad"), ("good", "very bad", "very very good")
ONE_TO_FOUR = ("good", "very bad", "very very good", "the very bad film")


def folder_of(place: Path, name: str = "llama", ends: bool = False) -> Path:
    """A random language model with its tokenizer: whole words behind <s>, and </s> after them where ``ends``."""
    torch.manual_seed(11)
    config = CONFIGS[name]
    auto = transformers.AutoModelForSeq2SeqLM if config.is_encoder_decoder else transformers.AutoModelForCausalLM
    auto.from_config(config).save_pretrained(place)
    backend = Tokenizer(models.WordLevel({word: n for n, word in enumerate(VOCABULARY)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    template = "<s> $A </s>" if ends else "<s> $A"
    backend.post_processor = processors.TemplateProcessing(single=template, special_tokens=[("<s>", 0), ("</s>", 2)])
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", pad_token="<pad>", unk_token="<unk>"
    )
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m.role == 'user' %}film {{ m.content }} :"
        "{% else %} {{ m.content }} </s>{% endif %}{% endfor %}"
    )
    tokenizer.save_pretrained(place)
    return place


def model_of(place: Path, words: tuple[str, ...] = SHORT, **keys: Any) -> Model:
    return Model(**{"backbone": str(place), "task": "choose", "prompt": PROMPT, "label_words": words} | keys)


def scores(backbone: Backbone, texts: list[Any], pad: int = 0) -> npt.NDArray[np.float32]:
    """Of all texts in one batch, with so much more padding on the right."""
    ids, mask = backbone.transform.collate([backbone.transform(text, "x") for text in texts])[:2]
    ids, mask = (torch.nn.functional.pad(each, (0, pad)) for each in (ids, mask))
    with torch.inference_mode():
        return backbone.body(ids, mask).numpy()


def numbers(text: str) -> list[int]:
    return [VOCABULARY.index(word) for word in text.split()]


@torch.inference_mode()
def expected(place: Path, text: str, word: str) -> float:
    """log p(word | prompt) by the whole model, token by token and without padding."""
    prompt, answer = [0, *numbers(PROMPT.replace("{text}", text))], numbers(word)
    if CONFIGS[place.name].is_encoder_decoder:
        model = transformers.AutoModelForSeq2SeqLM.from_pretrained(place).eval()
        given = torch.tensor([[1, *answer[:-1]]])
        logits = model(input_ids=torch.tensor([prompt]), decoder_input_ids=given).logits[0]
    else:
        model = transformers.AutoModelForCausalLM.from_pretrained(place).eval()
        logits = model(input_ids=torch.tensor([[*prompt, *answer]])).logits[0, len(prompt) - 1 : -1]
    found = logits.log_softmax(-1)
    return sum(float(found[place, token]) for place, token in enumerate(answer))


@pytest.mark.parametrize("words", [SHORT, LONG])
@pytest.mark.parametrize("name", CONFIGS)
def test_scores_are_the_log_likelihoods_of_the_words(name: str, words: tuple[str, ...], tmp_path: Path) -> None:
    place = folder_of(tmp_path / name, name)
    backbone = load_backbone(model_of(place, words))
    assert (backbone.kind, backbone.dim, backbone.task) == ("text", len(words), "choose")
    found = scores(backbone, TEXTS)
    wanted = np.array([[expected(place, text, word) for word in words] for text in TEXTS])
    if words == SHORT and not CONFIGS[name].is_encoder_decoder:  # single tokens: among themselves
        wanted -= np.log(np.exp(wanted).sum(axis=1, keepdims=True))
    np.testing.assert_allclose(found, wanted, atol=2e-4)
    assert np.ptp(found[:, 1:] - found[:, :1], axis=0).min() > 0.01  # the text matters, to the odds of every word
    np.testing.assert_allclose(scores(backbone, TEXTS, pad=5), found, rtol=1e-5, atol=1e-5)  # and padding does not
    assert backbone.label_words is not None
    np.testing.assert_array_equal(backbone.label_words[0], np.eye(len(words)))


WINDOWS: dict[str, Any] = {
    "mistral": transformers.MistralConfig(**CAUSAL, num_key_value_heads=1, sliding_window=16),
    "gemma2": transformers.Gemma2Config(**CAUSAL, head_dim=4, num_key_value_heads=1, sliding_window=16),
    "gemma3": transformers.Gemma3TextConfig(
        **CAUSAL, head_dim=4, num_key_value_heads=1, sliding_window=16,
        layer_types=["sliding_attention", "full_attention"],
    ),
    "qwen3": transformers.Qwen3Config(
        **CAUSAL, num_key_value_heads=1, head_dim=4, use_sliding_window=True, sliding_window=16, max_window_layers=0
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WINDOWS)
def test_words_behind_a_prompt_that_is_longer_than_the_window(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(CONFIGS, name, WINDOWS[name])
    place = folder_of(tmp_path / name, name)
    backbone = load_backbone(model_of(place, ONE_TO_FOUR))
    # Prompts of 4 to 44 tokens; 14 to 16 with words of up to four are where some words reach over the window.
    texts = [*TEXTS, "cat the dog ran film " * 8, *("cat the dog ran film " * 2 + "the " * n for n in range(3))]
    wanted = np.array([[expected(place, text.strip(), word) for word in ONE_TO_FOUR] for text in texts])
    np.testing.assert_allclose(scores(backbone, texts), wanted, atol=2e-4)
    np.testing.assert_allclose(through_prefix(backbone, texts, 1), wanted, atol=2e-4)
    short = load_backbone(model_of(place, ONE_TO_FOUR, max_tokens=13))  # with four tokens, of which three are read
    np.testing.assert_allclose(scores(short, TEXTS), wanted[: len(TEXTS)], atol=2e-4)
    fixed = "cat the dog ran film " * 4 + ": {text} :"  # a prompt is never cut, whatever max_tokens is
    uncut = scores(load_backbone(model_of(place, ONE_TO_FOUR, max_tokens=8, prompt=fixed)), ["the cat"])
    monkeypatch.setattr("tests.backbones.test_language.PROMPT", fixed)
    np.testing.assert_allclose(uncut, [[expected(place, "", word) for word in ONE_TO_FOUR]], atol=2e-4)
    prefix = attach("prefix", backbone, {"tokens": 3}, seed=5)  # keys and values before a mask for each kind
    assert np.isfinite(scores(backbone, texts)).all()
    prefix.detach()
    np.testing.assert_allclose(scores(backbone, texts), wanted, atol=2e-4)


@pytest.mark.parametrize(
    "config",
    [
        transformers.GPTNeoConfig(
            vocab_size=len(VOCABULARY), hidden_size=8, num_layers=2, num_heads=2, window_size=16,
            attention_types=[[["global", "local"], 1]], max_position_embeddings=64, initializer_range=0.5,
        ),
        transformers.Llama4TextConfig(
            **CAUSAL, intermediate_size_mlp=12, num_key_value_heads=1, head_dim=4, attention_chunk_size=16,
            num_local_experts=1, num_experts_per_tok=1,
        ),
    ],
)  # fmt: skip
def test_windows_of_another_kind_are_refused_where_prompts_exceed_them(
    config: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(CONFIGS, "other", config)
    place = folder_of(tmp_path / "other", "other")
    with pytest.raises(HeadstartError, match=r"several tokens in one pass; .*, or set model\.max_tokens .* 16 tokens$"):
        load_backbone(model_of(place, LONG))
    found = scores(load_backbone(model_of(place, LONG, max_tokens=12)), TEXTS[:3])
    np.testing.assert_allclose(found, [[expected(place, text, word) for word in LONG] for text in TEXTS[:3]], atol=2e-4)


@torch.inference_mode()
@pytest.mark.parametrize("name", [name for name, config in CONFIGS.items() if not config.is_encoder_decoder])
def test_a_prompt_that_is_read_once_gives_what_a_cache_of_keys_and_values_gives(name: str, tmp_path: Path) -> None:
    """The prompt through `transformers` once, its cache repeated for every candidate, and then the candidates."""
    place = folder_of(tmp_path / name, name)
    found = scores(load_backbone(model_of(place, LONG)), TEXTS)
    model = transformers.AutoModelForCausalLM.from_pretrained(place).eval()
    answers = [numbers(word) for word in LONG]
    longest = max(map(len, answers))
    for text, ours in zip(TEXTS, found, strict=True):
        prompt = torch.tensor([[0, *numbers(PROMPT.replace("{text}", text))]])
        read = model(input_ids=prompt, past_key_values=transformers.DynamicCache(), use_cache=True)
        cache = read.past_key_values
        cache.batch_repeat_interleave(len(answers))
        given = torch.tensor([[*each, *[0] * (longest - len(each))] for each in answers])
        logits = model(input_ids=given, past_key_values=cache, use_cache=True).logits
        logits = torch.cat([read.logits[:, -1:].expand(len(answers), -1, -1), logits], 1).log_softmax(-1)
        wanted = [sum(float(row[n, t]) for n, t in enumerate(each)) for row, each in zip(logits, answers, strict=True)]
        np.testing.assert_allclose(ours, wanted, rtol=0, atol=1e-5)


class Table:
    def __init__(self, texts: list[str]) -> None:
        self.texts = texts

    def __getitem__(self, rows: list[int]) -> dict[str, list[str]]:
        return {"text": [self.texts[row] for row in rows]}


def through_prefix(backbone: Backbone, texts: list[str], depth: int) -> npt.NDArray[np.float32]:
    """Scores of all texts in one batch, from the states behind so many blocks, each of which was computed alone."""
    count = len(texts)
    examples = Examples("text", Table(texts), ("text",), np.arange(count), np.zeros(count, np.int64))
    inputs = Inputs(backbone, examples, "test", prefix_of(backbone, depth))
    with torch.inference_mode():
        (batch,) = inputs.batches([np.arange(count)])
        return run_body(backbone.body, batch).numpy()


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2"])
def test_scores_from_cached_states_are_those_of_the_plain_model(name: str, depth: int, tmp_path: Path) -> None:
    place = folder_of(tmp_path / name, name)
    texts = [*TEXTS, "very " * 24]  # which with the longest word fills all 32 positions of the GPT-2
    found = through_prefix(load_backbone(model_of(place, ONE_TO_FOUR)), texts, depth)
    wanted = [[expected(place, text, word) for word in ONE_TO_FOUR] for text in texts]
    np.testing.assert_allclose(found, wanted, atol=2e-4)


def test_nothing_ends_a_prompt_that_words_are_to_follow(tmp_path: Path) -> None:
    one, other = (load_backbone(model_of(folder_of(tmp_path / str(n), ends=bool(n)))) for n in (0, 1))
    np.testing.assert_allclose(scores(one, TEXTS), scores(other, TEXTS), atol=1e-6)


def test_a_text_is_cut_and_the_prompt_is_not(tmp_path: Path) -> None:
    backbone = load_backbone(model_of(folder_of(tmp_path / "m"), max_tokens=7))
    ids = backbone.transform("the cat ran the dog sat the cat", "x")[:, 0]
    assert [VOCABULARY[number] for number in ids] == ["<s>", "film", ":", "the", "cat", "ran", ":"]


def test_words_are_tokens_as_they_follow_the_prompt() -> None:
    class Pieces:
        """A tokenizer whose words carry their space."""

        def __call__(self, text: str, add_special_tokens: bool) -> dict[str, list[int]]:
            return {"input_ids": [hash(piece) for piece in text.replace(" ", "| ").split("|") if piece]}

    found = continuation(Pieces(), "Review: {text}\nSentiment:", "positive", False)
    assert found == [hash(" positive")]
    assert continuation(Pieces(), "{text}\n", "positive", False) == [hash("positive")]
    assert continuation(Pieces(), "{text}", "positive", True) == [hash("positive")]


def test_features_depend_on_the_words_and_the_prompt(tmp_path: Path) -> None:
    place = folder_of(tmp_path / "m")
    keys = [{}, {"words": LONG}, {"prompt": "{text} :"}]
    assert len({load_backbone(model_of(place, **each)).fingerprint() for each in keys}) == 3  # type: ignore[arg-type]


def test_a_model_that_does_not_keep_words_apart_is_refused(tmp_path: Path) -> None:
    """BLOOM's positions are in its attention, which knows nothing of two words at one place."""
    config = transformers.BloomConfig(vocab_size=len(VOCABULARY), hidden_size=8, n_layer=2, n_head=2)
    place = folder_of(tmp_path / "m")
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(place)
    with pytest.raises(
        HeadstartError, match=r"model.label_words: .* words of several tokens in one pass; choose words"
    ):
        load_backbone(model_of(place, LONG))
    assert load_backbone(model_of(place, SHORT)).dim == 2


def test_a_model_without_a_vocabulary_is_refused(tmp_path: Path) -> None:
    place = folder_of(tmp_path / "m", "qwen3")
    torch.manual_seed(0)
    transformers.AutoModel.from_config(CONFIGS["qwen3"]).save_pretrained(place)
    with pytest.raises(HeadstartError, match="it is no causal or sequence-to-sequence language model"):
        load_backbone(model_of(place))


@pytest.mark.parametrize(
    ("model", "stage", "sentence"),
    [
        ({"task": "choose"}, {}, "model.task: to choose, a model needs a prompt, and label_words to choose from"),
        ({"task": "choose", "prompt": "a", "label_words": ["a", "b"]}, {}, r"model.prompt: write \{text\} where"),
        ({}, {"train": "head"}, "stages.0.train: a model that answers in words has no head to train; use 'lora'"),
        ({}, {"head_init": "zeros"}, "stages.0: a model that answers in words has its own head"),
        ({}, {"method": "fedper"}, "stages.0.method: fedper gives clients heads of their own, and there are none"),
    ],
)
def test_what_a_model_that_chooses_cannot_do(model: dict[str, Any], stage: dict[str, Any], sentence: str) -> None:
    whole = {"task": "choose", "prompt": "{text} :", "label_words": ["a", "b"]}
    stages = [{"method": "fedavg", "train": "lora"} | stage]
    with pytest.raises(RecipeError, match=sentence):
        Recipe.parse({"data": {"dataset": "x"}, "model": model or whole, "stages": stages})


def test_features_are_of_the_text_in_its_prompt(tmp_path: Path) -> None:
    """Without label words, a causal model's last token is that of the prompt, by the plain model and by hand."""
    place = folder_of(tmp_path / "llama", ends=True)
    backbone = load_backbone(Model(backbone=str(place), prompt=PROMPT))
    assert (backbone.task, backbone.dim, backbone.label_words) == ("classify", 8, None)
    plain: Any = transformers.AutoModel.from_pretrained(place).eval()
    for text, row in zip(TEXTS, scores(backbone, TEXTS, pad=3), strict=True):
        ids = torch.tensor([[0, *numbers(PROMPT.replace("{text}", text))]])
        with torch.inference_mode():
            np.testing.assert_allclose(row, plain(input_ids=ids).last_hidden_state[0, -1], atol=1e-5)
    other = load_backbone(Model(backbone=str(place), prompt="the {text} :"))
    assert len({each.fingerprint() for each in (backbone, other, load_backbone(Model(backbone=str(place))))}) == 3


@pytest.mark.parametrize(
    ("model", "sentence"),
    [
        ({"prompt": "Review:"}, "model.prompt: write {text} where the text goes"),
        ({"prompt": "{text} {mask}"}, "model: prompt and label_words belong together"),
        ({"prompt": "{text}", "task": "choose"}, "model.task: to choose, a model needs a prompt, and label_words"),
    ],
)
def test_prompts_without_label_words(model: dict[str, Any], sentence: str) -> None:
    table = {"data": {"dataset": "sst2"}, "model": {"backbone": "hf/x"} | model, "stages": [{"method": "fedcof"}]}
    with pytest.raises(RecipeError) as caught:
        Recipe.parse(table)
    assert sentence in str(caught.value)


def test_a_prompt_is_for_texts() -> None:
    with pytest.raises(HeadstartError, match=r"model\.prompt: conv4 is no network of transformers for texts"):
        load_backbone(Model(backbone="conv4", weights="random", prompt="{text} :"))
