"""Modules on a transformer: sizes of the FedYolo paper, outputs at the start, formulas, and no trace once off."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor, nn

from headstart.backbones import Backbone
from headstart.backbones.hugging_face import _Pooled
from headstart.backbones.transforms import ImageTransform, TextTransform
from headstart.errors import HeadstartError
from headstart.modules import Attached, attach, plain_parameters, plain_state
from headstart.modules.blocks import blocks_of, projections_of
from headstart.modules.mask import entries

SETTINGS: dict[str, Any] = {"rank": 2, "alpha_lora": 6.0, "bottleneck": 3, "tokens": 4, "density": 0.25}
KINDS = ("lora", "adapter", "vpt", "mask")
WIDTH = 8


def seeded(make: Callable[[], nn.Module]) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        network = make()
        for parameter in network.parameters():  # biases and positions that are not zero
            parameter.data += 0.1 * torch.randn_like(parameter)
    return network.eval().requires_grad_(False)


class Numbers:
    """A tokenizer of numbers, between 1 and 2, padded with 0; any other word is 3."""

    pad_token_id = 0
    model_input_names = ("input_ids", "token_type_ids", "attention_mask")

    def __call__(self, text: str, truncation: bool, max_length: int) -> dict[str, list[int]]:
        return {"input_ids": [1, *(int(word) if word.isdigit() else 3 for word in text.split()), 2][:max_length]}


class ChannelsFirst(ImageTransform):
    """For bodies that read [B, 3, H, W], as those of transformers do."""

    @staticmethod
    def collate(values: list[Any]) -> tuple[Tensor, ...]:
        return (torch.from_numpy(np.stack(values)).permute(0, 3, 1, 2),)


def bert(attention: str = "sdpa") -> Backbone:
    config = transformers.BertConfig(
        vocab_size=11, hidden_size=WIDTH, num_hidden_layers=3, num_attention_heads=2, intermediate_size=12,
        max_position_embeddings=16, initializer_range=0.4, attn_implementation=attention,
    )  # fmt: skip
    encoder = seeded(lambda: transformers.BertModel(config, add_pooling_layer=False))
    body = _Pooled(encoder, "mean", image=False).eval()
    return Backbone("bert", "text", WIDTH, body, encoder, TextTransform(Numbers(), 16), "bert")


def vit(width: int = WIDTH, blocks: int = 3, heads: int = 2, size: int = 8) -> nn.Module:
    config = transformers.ViTConfig(
        hidden_size=width, num_hidden_layers=blocks, num_attention_heads=heads, intermediate_size=4 * width,
        image_size=size, patch_size=size // 2, initializer_range=0.4,
    )  # fmt: skip
    return transformers.ViTModel(config, add_pooling_layer=False)


def tiny_vit() -> Backbone:
    encoder = seeded(vit)
    body = _Pooled(encoder, "cls", image=True).eval()
    return Backbone("vit", "image", WIDTH, body, encoder, ChannelsFirst(8), "vit")


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 5, 3))

    def forward(self, pixels: Tensor) -> Tensor:
        return self.layers(pixels).mean(dim=(2, 3))


BODIES = {"bert": bert, "vit": tiny_vit}
IDS = torch.tensor([[1, 4, 5, 6, 7], [1, 9, 3, 0, 0]])
MASK = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]])


def batch(backbone: Backbone) -> tuple[Tensor, ...]:
    if backbone.kind == "text":
        return IDS, MASK, torch.zeros_like(IDS)
    return (torch.from_numpy(np.random.default_rng(0).normal(size=(2, 3, 8, 8)).astype(np.float32)),)


def features(backbone: Backbone) -> Tensor:
    with torch.no_grad():
        return backbone.body(*batch(backbone))


def shaken(module: Attached) -> Attached:
    """The module after some training: no parameter is what it was at first."""
    with torch.random.fork_rng():
        torch.manual_seed(9)
        for parameter in module.parameters.values():
            parameter.data += 0.5 * torch.randn_like(parameter)
    return module


# ---------------------------------------------------------------------------------------------------------------- sizes

VITS = {"tiny": (192, 12, 3), "small": (384, 12, 6), "base": (768, 12, 12), "large": (1024, 24, 16)}
TABLE_3 = {
    "adapter": {"tiny": 58_564, "small": 116_932, "base": 233_668, "large": 520_484},
    "lora": {"tiny": 93_028, "small": 185_956, "base": 371_812, "large": 888_932},
    "vpt": {"tiny": 37_732, "small": 75_364, "base": 150_628, "large": 299_108},
}


@pytest.mark.parametrize("size", VITS)
@pytest.mark.parametrize("kind", TABLE_3)
def test_modules_are_as_large_as_in_the_fedyolo_paper(kind: str, size: str) -> None:
    """Table 3, with a head of 100 classes; rank, bottleneck and prompts are eight."""
    width, blocks, heads = VITS[size]
    with torch.device("meta"):
        encoder = vit(width, blocks, heads, size=224)
        body = _Pooled(encoder, "cls", image=True)
        backbone = Backbone(size, "image", width, body, encoder, ChannelsFirst(224), size)
        settings = {"rank": 8, "alpha_lora": 16.0, "bottleneck": 8, "tokens": 8}
        module = attach(kind, backbone, settings, seed=0)
    count = sum(parameter.numel() for parameter in module.parameters.values())
    assert count + 100 * width + 100 == TABLE_3[kind][size]


def test_a_mask_has_its_share_of_every_projection() -> None:
    module = attach("mask", bert(), SETTINGS, seed=0)
    assert [parameter.shape for parameter in module.parameters.values()] == 6 * [(16,)]  # a quarter of 8 x 8
    few = attach("mask", bert(), {"density": 1e-6}, seed=0)
    assert [parameter.shape for parameter in few.parameters.values()] == 6 * [(1,)]


def test_entries_of_a_mask_are_distinct_sorted_and_of_the_seed() -> None:
    found = entries(1000, 0.2, 7, 3)
    assert len(set(found.tolist())) == 200
    assert (np.diff(found) > 0).all()
    assert 0 <= found.min() < 50
    assert 950 < found.max() < 1000
    np.testing.assert_array_equal(entries(1000, 0.2, 7, 3), found)
    for other in (entries(1000, 0.2, 8, 3), entries(1000, 0.2, 7, 4)):
        assert np.intersect1d(found, other).size < 80  # 40 by chance
    np.testing.assert_array_equal(entries(6, 1.0, 1, 1), np.arange(6))


# -------------------------------------------------------------------------------------------------------- on and off


@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize("kind", ["lora", "adapter", "mask"])
def test_outputs_at_the_start_are_the_bodys_own(kind: str, body: str) -> None:
    backbone = BODIES[body]()
    before = features(backbone)
    module = attach(kind, backbone, SETTINGS, seed=1)
    assert torch.equal(features(backbone), before)
    shaken(module)
    assert (features(backbone) - before).abs().max() > 1e-2


@pytest.mark.parametrize("body", BODIES)
def test_prompts_change_the_outputs(body: str) -> None:
    backbone = BODIES[body]()
    before = features(backbone)
    module = attach("vpt", backbone, SETTINGS, seed=1)
    first = features(backbone)
    assert (first - before).abs().max() > 1e-3
    assert [tuple(p.shape) for p in module.parameters.values()] == 3 * [(4, WIDTH)]
    for parameter in module.parameters.values():  # every block reads prompts of its own
        kept = parameter.data.clone()
        parameter.data += torch.linspace(-1, 1, WIDTH) ** 3  # what is the same everywhere, a normalisation takes away
        assert (features(backbone) - first).abs().max() > 1e-4
        parameter.data = kept
    assert torch.equal(features(backbone), first)


@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_module_comes_off_without_a_trace(kind: str, body: str) -> None:
    backbone = BODIES[body]()
    names = [name for name, _ in backbone.body.named_modules()]
    state = {name: value.clone() for name, value in backbone.body.state_dict().items()}
    outputs, fingerprint = features(backbone), backbone.fingerprint()
    for seed in (1, 2):  # and can be put on again
        module = shaken(attach(kind, backbone, SETTINGS, seed))
        assert (features(backbone) - outputs).abs().max() > 1e-3
        # Under its own names the body is what it was, module or not.
        plain = plain_state(backbone.core)
        assert plain.keys() == {name.removeprefix("encoder.") for name in state}
        assert all(torch.equal(value, state[f"encoder.{name}"]) for name, value in plain.items())
        assert plain_parameters(backbone.core).keys() <= plain.keys()
        module.detach()
        assert [name for name, _ in backbone.body.named_modules()] == names
        after = backbone.body.state_dict()
        assert after.keys() == state.keys()
        assert all(torch.equal(value, state[name]) for name, value in after.items())
        assert torch.equal(features(backbone), outputs)
        assert not any(m._forward_hooks or m._forward_pre_hooks for m in backbone.body.modules())
        assert backbone.fingerprint() == fingerprint


def test_the_cache_knows_what_is_attached() -> None:
    prints = [bert().fingerprint()]
    for kind in KINDS:
        backbone = bert()
        module = attach(kind, backbone, SETTINGS, seed=1)
        prints.append(backbone.fingerprint())
        shaken(module)
        prints.append(backbone.fingerprint())
    assert len(set(prints)) == 1 + 2 * len(KINDS)
    assert bert().fingerprint() == prints[0]


@pytest.mark.parametrize("kind", ["lora", "adapter", "vpt"])
def test_a_seed_gives_the_same_values_and_leaves_torchs_generator_alone(kind: str) -> None:
    torch.manual_seed(0)
    before = torch.get_rng_state()
    one = attach(kind, bert(), SETTINGS, seed=1).parameters
    assert torch.equal(torch.get_rng_state(), before)
    torch.rand(3)
    again, other = (attach(kind, bert(), SETTINGS, seed).parameters for seed in (1, 2))
    assert one.keys() == again.keys()
    assert all(torch.equal(value, again[name]) for name, value in one.items())
    assert not all(torch.equal(value, other[name]) for name, value in one.items())


# ------------------------------------------------------------------------------------------------------------- formulas


def test_lora_is_a_low_rank_update_of_queries_and_values() -> None:
    backbone = bert()
    module = shaken(attach("lora", backbone, SETTINGS, seed=1))
    expected = features(backbone)
    update = {name: parameter.detach().clone() for name, parameter in module.parameters.items()}
    module.detach()
    targets = [f"encoder.layer.{n}.attention.self.{name}" for n in range(3) for name in ("query", "value")]
    assert update.keys() == {f"{target}.lora_{letter}.weight" for target in targets for letter in "AB"}
    for target in targets:  # W + alpha / rank · B A, with 6 / 2
        b, a = update[f"{target}.lora_B.weight"], update[f"{target}.lora_A.weight"]
        assert (b.shape, a.shape) == ((WIDTH, 2), (2, WIDTH))
        backbone.core.get_submodule(target).weight.data += 3.0 * (b @ a)
    torch.testing.assert_close(features(backbone), expected, atol=1e-4, rtol=1e-4)


def test_an_adapter_works_behind_each_block() -> None:
    backbone = bert()
    module = shaken(attach("adapter", backbone, SETTINGS, seed=1))
    expected = features(backbone)
    values = {name: parameter.detach().clone() for name, parameter in module.parameters.items()}
    module.detach()
    encoder: Any = backbone.core
    with torch.no_grad():
        states = encoder.embeddings(input_ids=IDS)
        wide = torch.zeros(2, 1, 1, 5).masked_fill(MASK[:, None, None, :] == 0, -1e9)
        for n, layer in enumerate(encoder.encoder.layer):
            output = layer(states, wide)
            states = output[0] if isinstance(output, tuple) else output
            hidden = states @ values[f"{n}.down.weight"].T + values[f"{n}.down.bias"]
            hidden = hidden * 0.5 * (1 + torch.erf(hidden / 2**0.5))
            states = states + hidden @ values[f"{n}.up.weight"].T + values[f"{n}.up.bias"]
        weights = MASK[:, :, None].float()
        pooled = (states * weights).sum(dim=1) / weights.sum(dim=1)
    torch.testing.assert_close(expected, pooled, atol=1e-4, rtol=1e-4)


def test_a_mask_adds_its_values_to_its_entries() -> None:
    backbone = bert()
    module = shaken(attach("mask", backbone, SETTINGS, seed=1))
    expected = features(backbone)
    values = {name: parameter.detach().clone() for name, parameter in module.parameters.items()}
    module.detach()
    for number, (name, value) in enumerate(values.items()):
        weight = backbone.core.get_submodule(name).weight.data
        for place, change in zip(entries(64, 0.25, 1, number), value, strict=True):
            weight[place // WIDTH, place % WIDTH] += change
    torch.testing.assert_close(features(backbone), expected, atol=1e-4, rtol=1e-4)


def test_prompts_are_tokens_behind_the_first_one_of_every_block() -> None:
    backbone = tiny_vit()
    module = attach("vpt", backbone, SETTINGS, seed=1)
    expected = features(backbone)
    prompts = [parameter.detach().clone() for parameter in module.parameters.values()]
    module.detach()
    encoder: Any = backbone.core
    with torch.no_grad():
        states = encoder.embeddings(batch(backbone)[0])
        for prompt, block in zip(prompts, blocks_of(encoder), strict=True):
            wide = torch.cat([states[:, :1], prompt.expand(2, -1, -1), states[:, 1:]], dim=1)
            output = block(wide)
            output = output[0] if isinstance(output, tuple) else output
            states = torch.cat([output[:, :1], output[:, 5:]], dim=1)
        states = encoder.layernorm(states)
    torch.testing.assert_close(expected, states[:, 0], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_padding_does_not_change_a_texts_features_under_prompts(attention: str) -> None:
    backbone = bert(attention)
    attach("vpt", backbone, SETTINGS, seed=1)
    short = IDS[1:, :3]
    with torch.no_grad():
        alone = backbone.body(short, torch.ones_like(short), torch.zeros_like(short))
        padded = backbone.body(*batch(backbone))[1:]
        other = IDS.clone()
        other[1, 3:] = 8
        filled = backbone.body(other, MASK, torch.zeros_like(IDS))[1:]
    torch.testing.assert_close(padded, alone, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(filled, alone, atol=1e-5, rtol=1e-4)


# --------------------------------------------------------------------------------------------------------------- places


def test_blocks_and_projections_of_a_text_transformer() -> None:
    encoder: Any = bert().core
    assert blocks_of(encoder) == list(encoder.encoder.layer)
    assert projections_of(encoder) == [
        f"encoder.layer.{n}.attention.self.{name}" for n in range(3) for name in ("query", "value")
    ]


def test_blocks_and_projections_of_a_vision_transformer() -> None:
    encoder: Any = tiny_vit().core
    blocks = blocks_of(encoder)
    assert len(blocks) == 3
    assert {type(block).__name__ for block in blocks} == {"ViTLayer"}
    names = projections_of(encoder)
    assert len(names) == 6  # queries and values of every block, and no keys
    for name in names:
        layer = encoder.get_submodule(name)
        assert (layer.in_features, layer.out_features) == (WIDTH, WIDTH)
    assert not any("key" in name or "k_proj" in name for name in names)


def test_names_of_targets_are_the_same_under_lora() -> None:
    backbone = bert()
    before = projections_of(backbone.core)
    attach("lora", backbone, SETTINGS, seed=0)
    assert [name.removesuffix(".base_layer") for name in projections_of(backbone.core)] == before


@pytest.mark.parametrize("kind", KINDS)
def test_a_convolutional_network_has_no_place_for_a_module(kind: str) -> None:
    network = Convolutions()
    assert blocks_of(network) == []
    assert projections_of(network) == []
    backbone = Backbone("lenet", "image", 5, network, network, ImageTransform(8), "lenet")
    sentence = f"lenet has no transformer blocks for a {kind}; set train to 'all' or 'head'"
    with pytest.raises(HeadstartError, match=sentence):
        attach(kind, backbone, SETTINGS, seed=0)
