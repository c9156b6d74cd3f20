"""What becomes of hidden states: the last token of a causal model, and every patch of a masked autoencoder."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from headstart.backbones import Backbone, load_backbone
from headstart.backbones.hugging_face import _Pooled
from headstart.config.recipe import Model
from tests.backbones import tiny_backbones

WORDS = len(tiny_backbones.WORDS)
SIZES = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "initializer_range": 0.5}
CAUSAL: dict[str, Any] = {
    "gpt2": transformers.GPT2Config(vocab_size=WORDS, n_embd=8, n_layer=2, n_head=2, n_positions=16),
    "llama": transformers.LlamaConfig(**SIZES, vocab_size=WORDS, intermediate_size=12),
    "opt": transformers.OPTConfig(**SIZES, vocab_size=WORDS, ffn_dim=12, word_embed_proj_dim=8, init_std=0.5),
}
# [CLS] the cat sat [SEP], [CLS] cat [SEP], [CLS] the [SEP]
TEXTS = {"the cat sat": [0, 4, 5, 6, 2], "cat": [0, 5, 2], "the": [0, 4, 2]}


def folder_of(config: Any, folder: Path) -> Path:
    torch.manual_seed(5)
    transformers.AutoModel.from_config(config).save_pretrained(folder)
    tiny_backbones.tokenizer(segments=False).save_pretrained(folder)
    return folder


def states(folder: Path, ids: list[int]) -> np.ndarray:
    """Last hidden states [L, d] of one text, without padding."""
    with torch.inference_mode():
        encoder = transformers.AutoModel.from_pretrained(folder).eval()
        return encoder(input_ids=torch.tensor([ids])).last_hidden_state[0].numpy()


def features(backbone: Backbone, values: list[Any]) -> np.ndarray:
    with torch.inference_mode():
        batch = backbone.transform.collate([backbone.transform(value, "x") for value in values])
        return backbone.body(*batch).numpy()


@pytest.mark.parametrize("name", CAUSAL)
def test_a_causal_model_is_read_at_its_last_token(name: str, tmp_path: Path) -> None:
    folder = folder_of(CAUSAL[name], tmp_path / name)
    found = features(load_backbone(Model(backbone=str(folder))), list(TEXTS))
    expected = [states(folder, ids) for ids in TEXTS.values()]
    np.testing.assert_allclose(found, [each[-1] for each in expected], atol=1e-5)
    assert np.ptp([each[0] for each in expected], axis=0).max() < 1e-5  # the first token has seen no other
    assert np.ptp(found, axis=0).max() > 0.01


def test_the_last_token_is_the_last_that_is_not_padding() -> None:
    class Positions(torch.nn.Module):
        def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> Any:
            number = torch.arange(input_ids.shape[1]).float().expand(*input_ids.shape)
            return transformers.modeling_outputs.BaseModelOutput(last_hidden_state=number.unsqueeze(2))

    mask = torch.tensor([[1, 1, 1, 0, 0], [0, 0, 1, 1, 1], [1, 1, 1, 1, 1], [0, 1, 1, 0, 0], [1, 0, 0, 0, 0]])
    found = _Pooled(Positions(), "last", image=False)(torch.zeros_like(mask), mask)
    assert found[:, 0].tolist() == [2, 4, 4, 2, 0]


@pytest.mark.parametrize(
    ("settings", "place"),
    [
        ({"pooling_mode": "lasttoken"}, -1),
        ({"pooling_mode_cls_token": False, "pooling_mode_lasttoken": True}, -1),
        ({"pooling_mode": "cls"}, 0),
        ({"pooling_mode_cls_token": True}, 0),
        ({"pooling_mode": "mean"}, None),
        ({"pooling_mode_mean_tokens": True}, None),
    ],
)
@pytest.mark.parametrize("name", ["bert", "gpt2"])
def test_a_folder_that_says_its_pooling_is_believed(
    name: str, settings: dict[str, Any], place: int | None, tmp_path: Path
) -> None:
    """In the words of sentence-transformers 6, and in those before."""
    bert = transformers.BertConfig(**SIZES, vocab_size=WORDS, intermediate_size=12)
    folder = folder_of({"bert": bert, **CAUSAL}[name], tmp_path / name)
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(settings))
    found = features(load_backbone(Model(backbone=str(folder))), ["the cat sat", "cat"])
    for row, ids in zip(found, ([0, 4, 5, 6, 2], [0, 5, 2]), strict=True):
        each = states(folder, ids)
        np.testing.assert_allclose(row, each.mean(axis=0) if place is None else each[place], atol=1e-5)


def test_of_a_model_that_answers_the_part_that_reads_is_taken(tmp_path: Path) -> None:
    config = transformers.MT5Config(vocab_size=WORDS, d_model=8, d_kv=4, d_ff=12, num_layers=1, num_heads=2)
    folder = folder_of(config, tmp_path / "mt5")
    found = features(load_backbone(Model(backbone=str(folder))), ["the cat sat", "cat"])
    reader = transformers.MT5EncoderModel.from_pretrained(folder).eval()
    for row, ids in zip(found, ([0, 4, 5, 6, 2], [0, 5, 2]), strict=True):
        with torch.inference_mode():
            expected = reader(input_ids=torch.tensor([ids])).last_hidden_state[0].mean(dim=0)
        np.testing.assert_allclose(row, expected, atol=1e-5)


@pytest.mark.parametrize("pooling", ["auto", "mean", "last"])
@pytest.mark.parametrize("name", CAUSAL)
def test_features_of_a_causal_model_do_not_depend_on_the_padding(name: str, pooling: Any, tmp_path: Path) -> None:
    backbone = load_backbone(Model(backbone=str(folder_of(CAUSAL[name], tmp_path / name)), pooling=pooling))
    for text in TEXTS:
        alone, among = features(backbone, [text]), features(backbone, [*TEXTS, text])
        np.testing.assert_allclose(among[-1:], alone, atol=1e-5)


# -------------------------------------------------------------------------------------------- a masked autoencoder

MAE = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 20}
MAE |= {"image_size": 32, "patch_size": 8, "initializer_range": 0.5}


@pytest.mark.parametrize("pooling", ["auto", "mean"])
def test_a_masked_autoencoder_sees_every_patch_in_every_pass(pooling: Any, tmp_path: Path) -> None:
    """Its encoder is a ViT, which reads the same weights under the same names and hides nothing."""
    torch.manual_seed(7)
    autoencoder = transformers.ViTMAEModel(transformers.ViTMAEConfig(**MAE)).eval()
    autoencoder.save_pretrained(tmp_path / "mae")
    pictures = list(np.random.default_rng(0).integers(0, 256, (3, 32, 32, 3), dtype=np.uint8))
    backbone = load_backbone(Model(backbone=str(tmp_path / "mae"), image_size=32, pooling=pooling))
    found = features(backbone, pictures)
    np.testing.assert_array_equal(features(backbone, pictures), found)  # nothing is drawn, not even an order
    vit = transformers.ViTModel(transformers.ViTConfig(**MAE), add_pooling_layer=False).eval()
    vit.load_state_dict(autoencoder.state_dict())
    pixels = torch.from_numpy(np.stack(pictures) / 127.5 - 1).permute(0, 3, 1, 2).float()
    with torch.inference_mode():
        tokens = vit(pixel_values=pixels).last_hidden_state
    assert tokens.shape == (3, 17, 16)
    np.testing.assert_allclose(found, tokens.mean(dim=1) if pooling == "mean" else tokens[:, 0], atol=1e-4)


def test_features_of_an_autoencoder_that_hid_patches_are_not_taken_from_the_cache(tmp_path: Path) -> None:
    """The key of an autoencoder holds the share that is hidden: none."""
    prints = []
    for share in (0.75, 0.0):
        torch.manual_seed(7)
        config = transformers.ViTMAEConfig(**MAE, mask_ratio=share)
        transformers.ViTMAEModel(config).save_pretrained(tmp_path / str(share))
        prints.append(load_backbone(Model(backbone=str(tmp_path / str(share)), image_size=32)).fingerprint())
    assert prints[0] == prints[1]
