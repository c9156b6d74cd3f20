"""LoRA finds its layers in every family of transformers; models are built from their configurations."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from headstart.backbones import Backbone, load_backbone, run_body
from headstart.config.recipe import Model
from headstart.errors import HeadstartError
from headstart.modules import attach
from tests.backbones import test_language, tiny_backbones
from tests.modules.test_modules import shaken

WORDS = len(tiny_backbones.WORDS)
SIZES: dict[str, Any] = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 12}
GROUPED = SIZES | {"num_key_value_heads": 1, "head_dim": 4, "vocab_size": WORDS, "pad_token_id": 1}
FAMILIES: dict[str, tuple[Any, set[str]]] = {
    "llama": (transformers.LlamaConfig(**GROUPED), {"q_proj", "v_proj"}),
    "qwen2": (transformers.Qwen2Config(**GROUPED), {"q_proj", "v_proj"}),
    "qwen3": (transformers.Qwen3Config(**GROUPED), {"q_proj", "v_proj"}),
    "gemma": (transformers.GemmaConfig(**GROUPED), {"q_proj", "v_proj"}),
    "gemma2": (transformers.Gemma2Config(**GROUPED), {"q_proj", "v_proj"}),
    "gpt2": (transformers.GPT2Config(vocab_size=WORDS, n_embd=8, n_layer=2, n_head=2, n_positions=16), {"c_attn"}),
    "neox": (transformers.GPTNeoXConfig(**SIZES, vocab_size=WORDS), {"query_key_value"}),
    "phi3": (transformers.Phi3Config(**SIZES, vocab_size=WORDS, pad_token_id=1), {"qkv_proj"}),
    "bert": (transformers.BertConfig(**SIZES, vocab_size=WORDS), {"query", "value"}),
    "modernbert": (transformers.ModernBertConfig(**SIZES, vocab_size=WORDS, pad_token_id=1), {"Wqkv"}),
    "mpnet": (transformers.MPNetConfig(**SIZES, vocab_size=WORDS), {"q", "v"}),
    "deberta": (transformers.DebertaConfig(**SIZES, vocab_size=WORDS), {"in_proj"}),
    "deberta-v2": (transformers.DebertaV2Config(**SIZES, vocab_size=WORDS), {"query_proj", "value_proj"}),
    "t5": (transformers.T5Config(vocab_size=WORDS, d_model=8, d_kv=4, d_ff=12, num_layers=2, num_heads=2), {"q", "v"}),
}
SETTINGS = {"rank": 2, "alpha_lora": 6.0}


def backbone_of(name: str, place: Path) -> Backbone:
    torch.manual_seed(7)
    transformers.AutoModel.from_config(FAMILIES[name][0]).save_pretrained(place)
    tiny_backbones.tokenizer(segments=False).save_pretrained(place)
    return load_backbone(Model(backbone=str(place)))


def layers(module: Any) -> set[str]:
    """Names of the layers that a LoRA is on, within their blocks."""
    return {name.partition(".lora_")[0].rpartition(".")[2] for name in module.parameters}


@pytest.mark.parametrize("name", FAMILIES)
def test_lora_is_on_queries_and_values_and_changes_what_they_make(name: str, tmp_path: Path) -> None:
    backbone = backbone_of(name, tmp_path)
    batch = backbone.sample()
    before = run_body(backbone.body, batch)
    module = attach("lora", backbone, SETTINGS, seed=1)
    assert layers(module) == FAMILIES[name][1]
    assert len(module.parameters) == 2 * 2 * len(FAMILIES[name][1])  # two factors of each layer in two blocks
    assert torch.allclose(run_body(backbone.body, batch), before, atol=1e-6)
    with torch.no_grad():
        for parameter in module.parameters.values():
            parameter.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(len(parameter))))
    changed = run_body(backbone.body, batch)
    assert (changed - before).abs().max() > 1e-3
    for layer in backbone.core.modules():  # merged = unmerged
        if hasattr(layer, "lora_A"):
            layer.merge()
    assert torch.allclose(run_body(backbone.body, batch), changed, atol=1e-4)
    for layer in backbone.core.modules():
        if hasattr(layer, "lora_A"):
            layer.unmerge()
    module.detach()
    assert torch.allclose(run_body(backbone.body, batch), before, atol=1e-5)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_a_mask_on_its_own_entries_is_a_change_of_the_weight(name: str, tmp_path: Path) -> None:
    """GPT-2 keeps its matrices the other way round."""
    backbone = backbone_of(name, tmp_path)
    batch, target = backbone.sample(), {"gpt2": "h.0.attn.c_attn", "llama": "layers.0.self_attn.q_proj"}[name]
    module = attach("mask", backbone, {"density": 1.0}, seed=1)
    layer: Any = backbone.core.get_submodule(target)
    shape = layer.weight.shape[::-1] if name == "gpt2" else layer.weight.shape
    change = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        module.parameters[target].copy_(change.flatten())
    found = run_body(backbone.body, batch)
    module.detach()
    with torch.no_grad():
        layer.weight += change.T if name == "gpt2" else change
    assert torch.allclose(run_body(backbone.body, batch), found, atol=1e-5)


def test_targets_are_named_or_all(tmp_path: Path) -> None:
    backbone = backbone_of("llama", tmp_path)
    every = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    for targets, expected in (("all-linear", every), (["o_proj"], {"o_proj"}), (["mlp.up_proj"], {"up_proj"})):
        module = attach("lora", backbone, SETTINGS | {"targets": targets}, seed=1)
        assert layers(module) == expected
        module.detach()
    last = attach("lora", backbone, SETTINGS | {"targets": "all-linear", "blocks": 1}, seed=1)
    assert {name.split(".")[1] for name in last.parameters} == {"1"}
    last.detach()
    with pytest.raises(HeadstartError, match=r"is called query; they are called q_proj, .*down_proj; or set 'all-lin"):
        attach("lora", backbone, SETTINGS | {"targets": ["query"]}, seed=1)


def test_layers_of_unknown_names_are_found_where_they_attend(tmp_path: Path) -> None:
    class Attention(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mix, self.out = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)

        def forward(self, states: torch.Tensor) -> torch.Tensor:
            return self.out(torch.softmax(self.mix(states) @ states.mT, -1) @ states)

    class Block(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention, self.mlp = Attention(), torch.nn.Linear(4, 4)

        def forward(self, states: torch.Tensor) -> torch.Tensor:
            return self.mlp(self.attention(states))

    class Network(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.Sequential(Block(), Block())

        def forward(self, images: torch.Tensor) -> torch.Tensor:
            return self.layers(images.float()[:, 0, :, :1].expand(-1, -1, 4)).mean(1)

    core = Network()
    backbone = Backbone("mine", "image", 4, core, core, tiny_backbones.ImageTransform(8), "mine")
    module = attach("lora", backbone, SETTINGS, seed=1)
    assert layers(module) == {"mix", "out"}
    module.detach()


# Of two encoder and two decoder blocks: the projections to queries and values, and the other linear layers.
ANSWERING = {
    "mt5": (
        [
            *(f"encoder.block.{n}.layer.0.SelfAttention" for n in range(2)),
            *(f"decoder.block.{n}.layer.{at}" for n in range(2) for at in ("0.SelfAttention", "1.EncDecAttention")),
        ],
        ("q", "v"), ("k", "o"),
        [
            f"{part}.block.{n}.layer.{last}.DenseReluDense.{name}"
            for part, last in (("encoder", 1), ("decoder", 2)) for n in range(2) for name in ("wi_0", "wi_1", "wo")
        ],
    ),
    "bart": (
        [
            *(f"model.encoder.layers.{n}.self_attn" for n in range(2)),
            *(f"model.decoder.layers.{n}.{at}" for n in range(2) for at in ("self_attn", "encoder_attn")),
        ],
        ("q_proj", "v_proj"), ("k_proj", "out_proj"),
        [f"model.{part}coder.layers.{n}.{name}" for part in ("en", "de") for n in range(2) for name in ("fc1", "fc2")],
    ),
}  # fmt: skip


def answering(name: str, place: Path) -> Backbone:
    return load_backbone(test_language.model_of(test_language.folder_of(place / name, name), test_language.LONG))


@pytest.mark.parametrize("name", ANSWERING)
def test_lora_is_in_the_encoder_and_in_the_decoder(name: str, tmp_path: Path) -> None:
    attentions, projections, others, dense = ANSWERING[name]
    backbone = answering(name, tmp_path)
    usual = {f"{attention}.{each}" for attention in attentions for each in projections}
    every = usual | {f"{attention}.{each}" for attention in attentions for each in others} | set(dense)
    crossing = {each for each in usual if "EncDec" in each or "encoder_attn" in each}
    ends = sorted({".".join(each.split(".")[-2:]) for each in crossing})  # such as EncDecAttention.q
    for targets, expected in ((None, usual), (projections, usual), ("all-linear", every), (ends, crossing)):
        module = attach("lora", backbone, SETTINGS | {"targets": targets}, seed=1)
        assert {each.partition(".lora_")[0] for each in module.parameters} == expected
        module.detach()


@pytest.mark.parametrize("name", ANSWERING)
def test_adapters_are_behind_the_blocks_of_the_encoder_and_of_the_decoder(name: str, tmp_path: Path) -> None:
    """Against the plain model, whose blocks' states get h + U gelu(D h) added by hand, one word at a time."""
    backbone = answering(name, tmp_path)
    module = shaken(attach("adapter", backbone, {"bottleneck": 3}, seed=1))
    found = test_language.scores(backbone, test_language.TEXTS)
    values = {each: parameter.detach() for each, parameter in module.parameters.items()}
    plain: Any = transformers.AutoModelForSeq2SeqLM.from_pretrained(tmp_path / name).eval()
    stacks = (plain.encoder.block, plain.decoder.block) if name == "mt5" else (
        plain.model.encoder.layers, plain.model.decoder.layers
    )  # fmt: skip

    def changed(number: int, output: Any) -> Any:
        down, before, up, behind = (
            values[f"{number}.{each}"] for each in ("down.weight", "down.bias", "up.weight", "up.bias")
        )
        states = output[0] if isinstance(output, tuple) else output
        states = states + torch.nn.functional.gelu(states @ down.T + before) @ up.T + behind
        return (states, *output[1:]) if isinstance(output, tuple) else states

    assert len(values) == 4 * 4
    for number, block in enumerate([*stacks[0], *stacks[1]]):
        block.register_forward_hook(lambda _, given, output, number=number: changed(number, output))
    for text, row in zip(test_language.TEXTS, found, strict=True):
        prompt = [0, *test_language.numbers(test_language.PROMPT.replace("{text}", text))]
        for word, score in zip(test_language.LONG, row, strict=True):
            answer = test_language.numbers(word)
            with torch.no_grad():
                given = torch.tensor([[1, *answer[:-1]]])
                logits = plain(input_ids=torch.tensor([prompt]), decoder_input_ids=given).logits[0].log_softmax(-1)
            assert float(score) == pytest.approx(sum(float(logits[n, t]) for n, t in enumerate(answer)), abs=2e-4)


@pytest.mark.parametrize("kind", ["lora", "adapter"])
def test_an_encoder_and_a_decoder_have_no_last_blocks(kind: str, tmp_path: Path) -> None:
    with pytest.raises(
        HeadstartError, match=r"its last 1 blocks cannot be trained alone; leave blocks out, for all of"
    ):
        attach(kind, answering("mt5", tmp_path), SETTINGS | {"bottleneck": 2, "blocks": 1}, seed=1)
