"""Prompts with label words: a masked language model whose first head is what it would say at the mask."""

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
import transformers
from tokenizers import ByteLevelBPETokenizer, pre_tokenizers

from headstart.backbones import Backbone, Inputs, load_backbone
from headstart.backbones.transforms import TextTransform
from headstart.config.recipe import Model, Recipe
from headstart.data import Examples
from headstart.engine.model_store import ModelStore
from headstart.errors import HeadstartError, RecipeError
from headstart.methods import build
from headstart.runner import run
from tests.backbones import tiny_backbones
from tests.helpers import context_of

PROMPT = "{text} sat {mask}"
WORDS = ("cat", "the", "Cat")
MASK, SAT = 8, 6
TEXTS = ["the cat", "Cat", "the the sat cat Cat the", "", "cat cat"]


def folder_of(place: Path, kind: str = "bert", segments: bool = True, mask: bool = True) -> Path:
    """A random masked language model of 8 dimensions and 12 positions, biases and all, and its tokenizer."""
    torch.manual_seed(31)
    keys: dict[str, Any] = {"vocab_size": 9, "pad_token_id": 1, "initializer_range": 0.5}
    if kind == "distilbert":
        config = transformers.DistilBertConfig(
            dim=8, n_layers=2, n_heads=2, hidden_dim=16, max_position_embeddings=12, **keys
        )
    else:
        shape = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
        # RoBERTa numbers positions from behind the padding's.
        positions = 14 if kind == "roberta" else 12
        classes = {"bert": transformers.BertConfig, "roberta": transformers.RobertaConfig}
        config = classes[kind](**shape, max_position_embeddings=positions, type_vocab_size=2, **keys)
    model = transformers.AutoModelForMaskedLM.from_config(config)
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    model.save_pretrained(place)
    tokenizer = tiny_backbones.tokenizer(segments=segments)
    if mask:
        tokenizer.add_special_tokens({"mask_token": "[MASK]"})
        assert tokenizer.mask_token_id == MASK
    tokenizer.save_pretrained(place)
    return place


def model_of(place: Path, **keys: Any) -> Model:
    return Model(**{"backbone": str(place), "prompt": PROMPT, "label_words": WORDS} | keys)


def sentences(texts: list[Any]) -> Examples:
    class Table:
        def __getitem__(self, rows: list[int]) -> dict[str, list[Any]]:
            return {"text": [texts[row] for row in rows]}

    return Examples("text", Table(), ("text",), np.arange(len(texts)), np.zeros(len(texts), np.int64))


def features(backbone: Backbone, texts: list[Any]) -> npt.NDArray[np.float32]:
    """All in one batch, so that the shorter ones are padded."""
    (batch,) = Inputs(backbone, sentences(texts), "x").batches([np.arange(len(texts))])
    with torch.no_grad():
        found: npt.NDArray[np.float32] = backbone.body(*batch).numpy()
    return found


@pytest.mark.parametrize(
    ("kind", "segments"), [("bert", True), ("bert", False), ("roberta", False), ("distilbert", False)]
)
def test_scores_are_the_whole_models_logits_of_the_words_at_the_mask(kind: str, segments: bool, tmp_path: Path) -> None:
    place = folder_of(tmp_path / "model", kind, segments)
    backbone = load_backbone(model_of(place))
    assert (backbone.kind, backbone.dim) == ("text", 8)
    assert backbone.label_words is not None
    weight, bias = backbone.label_words
    assert (weight.shape, bias.shape) == ((3, 8), (3,))
    scores = features(backbone, TEXTS) @ weight.T + bias
    whole = transformers.AutoModelForMaskedLM.from_pretrained(place).eval()
    numbers = {word: number for number, word in enumerate(tiny_backbones.WORDS)}
    for text, found in zip(TEXTS, scores, strict=True):
        ids = [0, *(numbers[word] for word in text.split()), SAT, MASK, 2]
        with torch.no_grad():
            logits = whole(input_ids=torch.tensor([ids])).logits[0, ids.index(MASK)].numpy()
        np.testing.assert_allclose(found, logits[[numbers[word] for word in WORDS]], rtol=1e-4, atol=1e-5)
    assert np.ptp(scores, axis=0).min() > 0.05  # the text matters
    head = ModelStore(model_of(place), None).label_words()
    assert head is not None
    np.testing.assert_allclose(head.scores(features(backbone, TEXTS)), scores, rtol=1e-5, atol=1e-6)


def test_the_body_is_that_of_its_prompt(tmp_path: Path) -> None:
    place = folder_of(tmp_path / "model")
    one, same, other, plain = (
        load_backbone(model)
        for model in (
            model_of(place), model_of(place, label_words=("sat", "cat")), model_of(place, prompt="{mask} {text}"),
            Model(backbone=str(place)),
        )
    )  # fmt: skip
    assert one.fingerprint() == same.fingerprint()  # words are the head's, not the body's
    assert len({each.fingerprint() for each in (one, other, plain)}) == 3
    assert plain.label_words is None
    assert not np.allclose(features(one, TEXTS), features(other, TEXTS), atol=1e-2)


def shown(backbone: Backbone, value: Any) -> list[int]:
    return [int(number) for number in backbone.transform(value, "x")[:, 0]]


def test_long_texts_are_cut_and_the_mask_survives(tmp_path: Path) -> None:
    place = folder_of(tmp_path / "model")
    backbone = load_backbone(model_of(place))
    long = "the cat the cat the Cat the cat " * 3
    # Twelve positions: eight words, between [CLS] and "sat [MASK] [SEP]".
    assert shown(backbone, long) == [0, 4, 5, 4, 5, 4, 7, 4, 5, SAT, MASK, 2]
    assert shown(load_backbone(model_of(place, max_tokens=7)), long) == [0, 4, 5, 4, SAT, MASK, 2]
    assert shown(backbone, "the cat the cat the Cat the cat") == shown(backbone, long)
    # Nothing of the text is left where the prompt fills the room, and the prompt is whole.
    assert shown(load_backbone(model_of(place, max_tokens=3)), long) == [0, SAT, MASK, 2]
    assert features(backbone, [long, "cat"]).shape == (2, 8)


def test_the_longer_text_of_a_pair_is_cut(tmp_path: Path) -> None:
    place = folder_of(tmp_path / "model")
    backbone = load_backbone(model_of(place, prompt="{text} {mask} {second}", max_tokens=8))
    assert shown(backbone, ("the", "cat sat")) == [0, 4, MASK, 5, 6, 2]
    assert shown(backbone, ("the", "cat sat cat sat cat sat")) == [0, 4, MASK, 5, 6, 5, 6, 2]
    assert shown(backbone, ("cat sat cat sat cat sat", "the")) == [0, 5, 6, 5, 6, MASK, 4, 2]


def test_a_text_cannot_bring_a_mask_or_a_placeholder_of_its_own(tmp_path: Path) -> None:
    backbone = load_backbone(model_of(folder_of(tmp_path / "model")))
    assert shown(backbone, "[MASK] the [MASK] cat") == [0, 4, 5, SAT, MASK, 2]
    assert shown(backbone, "the {mask} {text}").count(MASK) == 1


def test_a_character_of_several_tokens_is_cut_as_a_whole() -> None:
    """Byte-level tokenizers write an emoji as four tokens, which all end at the same place."""
    letters = {letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = ByteLevelBPETokenizer(vocab=letters, merges=[])
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=backend._tokenizer, mask_token="<mask>")
    for room in range(1, 14):
        ids = TextTransform(tokenizer, room, "{text}{mask}")("ab 😀😀", "x")[:, 0]
        assert len(ids) <= room
        assert list(ids).count(tokenizer.mask_token_id) == 1
        assert ids[-1] == tokenizer.mask_token_id
        kept = {0: 0, 1: 1, 2: 2, 3: 2, 4: 2, 5: 2, 6: 2, 7: 7, 8: 7, 9: 7, 10: 7, 11: 11, 12: 11}[room - 1]
        assert len(ids) - 1 == kept  # "a", "ab", then a whole emoji with its space, then the other


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        ({"label_words": ("cat", "the cat")}, "the cat are not single tokens of .* vocabulary; choose shorter words"),
        ({"label_words": ("cat sat", "the", "cat the")}, "cat sat, cat the are not single tokens"),
    ],
)
def test_words_of_several_tokens_are_refused(keys: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    place = folder_of(tmp_path / "model")
    with pytest.raises(HeadstartError, match=rf"model.label_words: {sentence}"):
        load_backbone(model_of(place, **keys))


def test_a_tokenizer_without_a_mask_is_refused(tmp_path: Path) -> None:
    with pytest.raises(HeadstartError, match=r"model.prompt: the tokenizer of .* has no mask"):
        load_backbone(model_of(folder_of(tmp_path / "model", mask=False)))


@pytest.mark.parametrize(
    ("model", "sentence"),
    [
        ({"prompt": PROMPT}, "model: prompt and label_words belong together; give both or neither"),
        ({"label_words": ["a", "b"]}, "model: prompt and label_words belong together"),
        ({"prompt": "{text} sat", "label_words": ["a", "b"]}, r"model.prompt: write \{mask\} once"),
        ({"prompt": "{mask} {mask}", "label_words": ["a", "b"]}, r"model.prompt: write \{mask\} once"),
    ],
)
def test_half_a_prompt_is_refused(model: dict[str, Any], sentence: str) -> None:
    table = {"data": {"dataset": "x"}, "model": model, "stages": [{"method": "fedncm"}]}
    with pytest.raises(RecipeError, match=sentence):
        Recipe.parse(table)


def recipe_of(place: Path, csv: Path, **stage: Any) -> Recipe:
    rows = ["text,label", *(f"{text},{label}" for text, label in zip(TEXTS * 6, "xyz" * 10, strict=True) if text)]
    csv.write_text("\n".join(rows))
    first = {"method": "fedavg", "train": "head", "rounds": 1, "lr": 1e-9} | stage
    return Recipe.parse(
        {
            "data": {"dataset": str(csv), "partition": {"kind": "iid", "clients": 2}},
            "model": {"backbone": str(place), "prompt": PROMPT, "label_words": list(WORDS)},
            "stages": [first],
        }
    )


@pytest.mark.parametrize("method", ["fedavg", "fedmezo"])
@pytest.mark.parametrize("train", ["head", "all", "lora"])
def test_the_first_stage_starts_from_the_words(method: str, train: str, tmp_path: Path) -> None:
    place = folder_of(tmp_path / "model")
    recipe = recipe_of(place, tmp_path / "texts.csv", method=method, train=train)
    whole = transformers.BertForMaskedLM.from_pretrained(place)
    numbers = [tiny_backbones.WORDS.index(word) for word in WORDS]
    decoder = whole.get_output_embeddings()
    head = run(recipe).head
    np.testing.assert_allclose(head.weight, decoder.weight.detach().numpy()[numbers], atol=1e-6)
    np.testing.assert_allclose(head.bias, decoder.bias.detach().numpy()[numbers], atol=1e-6)
    other = run(recipe_of(place, tmp_path / "texts.csv", method=method, train=train, head_init="random")).head
    assert not np.allclose(other.weight, head.weight, atol=1e-2)


def test_another_number_of_words_than_classes_is_refused(tmp_path: Path) -> None:
    stage: Any = recipe_of(tmp_path, tmp_path / "texts.csv").stages[0]
    store = ModelStore(model_of(folder_of(tmp_path / "model")), None)
    with pytest.raises(HeadstartError, match="head_init"):
        build(stage, context_of(stage, 4, 8, head=store.label_words()))
