"""A module that a body would not train, or could not run with, is refused when it is attached."""

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional

from headstart.backbones import Backbone, unused
from headstart.backbones.hugging_face import _Pooled
from headstart.backbones.transforms import ImageTransform, TextTransform
from headstart.errors import HeadstartError
from headstart.modules import attach, plain_parameters
from tests.modules.test_modules import SETTINGS, WIDTH, ChannelsFirst, Numbers, bert, seeded, tiny_vit

KINDS = ("lora", "adapter", "vpt", "mask")


class Reading(nn.Module):
    """Attention that reads the weight of its layer instead of calling it, as torchvision's Swin and timm's BEiT do."""

    def __init__(self, calls: bool) -> None:
        super().__init__()
        self.qkv, self.calls = nn.Linear(WIDTH, 3 * WIDTH), calls

    def forward(self, states: Tensor) -> Tensor:
        joined = self.qkv(states) if self.calls else functional.linear(states, self.qkv.weight, self.qkv.bias)
        return states + functional.scaled_dot_product_attention(*joined.chunk(3, dim=-1))


class Layers(nn.Module):
    """Blocks of which some call their layers: [B, H, W, 3] → [B, WIDTH]."""

    def __init__(self, *calls: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Reading(each) for each in calls)

    def forward(self, images: Tensor) -> Tensor:
        states = images.reshape(len(images), -1, WIDTH) / 255
        for block in self.blocks:
            states = block(states)
        return states.mean(dim=1)


def layers(*calls: bool) -> Backbone:
    body = seeded(lambda: Layers(*calls))
    return Backbone("layers", "image", WIDTH, body, body, ImageTransform(8), "layers")


def trace(backbone: Backbone) -> tuple[list[str], list[bool], list[bool], int]:
    """What a check could leave behind."""
    body = backbone.body
    hooks = sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in body.modules())
    modes = [module.training for module in body.modules()]
    return [*body.state_dict()], modes, [parameter.requires_grad for parameter in body.parameters()], hooks


@pytest.mark.parametrize("kind", ["lora", "mask"])
@pytest.mark.parametrize("calls", [(False, False), (True, False)])
def test_layers_that_are_read_and_not_called_are_refused(kind: str, calls: tuple[bool, ...]) -> None:
    backbone = layers(*calls)
    before = trace(backbone)
    with pytest.raises(HeadstartError) as caught:
        attach(kind, backbone, SETTINGS, seed=0)
    count = {"lora": 2, "mask": 1}[kind] * (2 - sum(calls))
    assert re.search(rf"{kind} does not work on layers: the features do not depend on {count} para", str(caught.value))
    assert ("blocks.0.qkv" in str(caught.value)) is not calls[0]
    assert "blocks.1.qkv" in str(caught.value)
    assert str(caught.value).endswith("set train to 'adapter', 'all' or 'head'")
    assert trace(backbone) == before


def test_what_the_refusal_advises_works() -> None:
    """Adapters and prompts act around a block, and LoRA where every layer in its reach is called."""
    for kind in ("adapter", "vpt"):
        backbone = layers(False, False)
        assert unused(backbone, attach(kind, backbone, SETTINGS, seed=0).parameters) == []
    assert attach("lora", layers(True, True), SETTINGS, seed=0).depth == 0
    assert attach("lora", layers(False, True), {**SETTINGS, "blocks": 1}, seed=0).depth == 1


def test_a_block_that_never_runs_is_refused() -> None:
    class Skipping(Layers):
        def forward(self, images: Tensor) -> Tensor:
            return self.blocks[0](images.reshape(len(images), -1, WIDTH) / 255).mean(dim=1)

    body = seeded(lambda: Skipping(True, True))
    for kind, missed in {"lora": 2, "adapter": 4, "vpt": 1, "mask": 1}.items():
        backbone = Backbone("skipping", "image", WIDTH, body, body, ImageTransform(8), "skipping")
        sentence = rf"{kind} does not work on skipping: .* depend on {missed} parameters \("
        with pytest.raises(HeadstartError, match=sentence):
            attach(kind, backbone, SETTINGS, seed=0)


@pytest.mark.parametrize("make", [bert, tiny_vit])
@pytest.mark.parametrize("training", [True, False])
def test_the_check_leaves_modes_gradients_and_random_numbers_alone(
    make: Callable[[], Backbone], training: bool
) -> None:
    backbone = make()
    backbone.body.train(training)
    next(backbone.body.parameters()).requires_grad_(True)
    before, state = trace(backbone), torch.get_rng_state()
    assert unused(backbone, plain_parameters(backbone.core)) == []
    assert trace(backbone) == before
    assert torch.equal(torch.get_rng_state(), state)


def test_a_pooler_is_what_the_features_do_not_depend_on() -> None:
    config = transformers.BertConfig(
        vocab_size=11, hidden_size=WIDTH, num_hidden_layers=1, num_attention_heads=2, intermediate_size=12
    )
    encoder = seeded(lambda: transformers.BertModel(config))
    body = _Pooled(encoder, "mean", image=False).eval()
    backbone = Backbone("bert", "text", WIDTH, body, encoder, TextTransform(Numbers(), 16), "bert")
    assert unused(backbone, plain_parameters(encoder)) == ["pooler.dense.weight", "pooler.dense.bias"]


# ------------------------------------------------------------------------------------- architectures that do not fit

TEXT = {"vocab_size": 11, "num_hidden_layers": 2, "num_attention_heads": 2, "max_position_embeddings": 16}
TEXT |= {"hidden_size": WIDTH, "intermediate_size": 12}
SWIN = {"image_size": 16, "patch_size": 2, "embed_dim": 8, "depths": [1, 2], "num_heads": [2, 2], "window_size": 4}
MOBILE = {"hidden_sizes": [16, 24, 32], "neck_hidden_sizes": [8, 8, 16, 24, 32, 32, 40], "num_attention_heads": 2}
ODD: dict[str, Any] = {
    "llama": transformers.LlamaConfig(**TEXT),
    "roformer": transformers.RoFormerConfig(**TEXT, embedding_size=WIDTH),
    "mobilebert": transformers.MobileBertConfig(**TEXT, embedding_size=8, intra_bottleneck_size=4),
    "swin": transformers.SwinConfig(**SWIN),
    "mobilevit": transformers.MobileViTConfig(**MOBILE, image_size=64),
}
ROTARY = ("llama", "roformer")


def odd(name: str) -> Backbone:
    encoder: Any = seeded(lambda: transformers.AutoModel.from_config(ODD[name]))
    image = encoder.main_input_name == "pixel_values"
    body = _Pooled(encoder, "mean", image).eval()
    transform = ChannelsFirst(ODD[name].image_size) if image else TextTransform(Numbers(), 16)
    return Backbone(name, "image" if image else "text", 0, body, encoder, transform, name)


@pytest.mark.parametrize("name", ODD)
@pytest.mark.parametrize("kind", KINDS)
def test_modules_on_rotary_windowed_and_bottlenecked_encoders(kind: str, name: str) -> None:
    backbone = odd(name)
    before = trace(backbone)
    if kind in ("lora", "mask") or (kind == "adapter" and name in ROTARY):
        values = attach(kind, backbone, SETTINGS, seed=0).parameters.values()
        value = "4 5 6" if backbone.kind == "text" else np.eye(8, dtype=np.uint8) * 200
        features = backbone.body(*backbone.transform.collate([backbone.transform(value, "x")]))
        gradients = torch.autograd.grad(features.square().sum(), list(values))
        assert max(float(gradient.abs().max()) for gradient in gradients) > 0
        return
    needs = "blocks that hand on hidden states of one width" if kind == "adapter" else "any number of tokens"
    sentence = (
        rf"^{kind} does not work on {name}: a forward pass with it fails \(.*{needs}.*set train to 'lora', 'all' or"
    )
    with pytest.raises(HeadstartError, match=sentence):
        attach(kind, backbone, SETTINGS, seed=0)
    assert trace(backbone) == before


def test_positions_of_a_single_token_would_pass_for_those_of_all() -> None:
    """A tokenizer without special tokens: rotary positions [1, 1, D] fit any number of tokens, those of a text none."""

    class Bare(Numbers):
        def __call__(self, text: str, truncation: bool, max_length: int) -> dict[str, list[int]]:
            return {"input_ids": [3 for _ in text.split()][:max_length]}

    backbone = replace(odd("llama"), transform=TextTransform(Bare(), 16))
    with pytest.raises(HeadstartError, match="vpt does not work on llama"):
        attach("vpt", backbone, SETTINGS, seed=0)
