"""Where a transformer can be adapted: its blocks, and the linear layers inside them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

Detachable = tuple[dict[str, nn.Parameter], Callable[[], object]]
"""The parameters of a module, and how to take it off."""

# What architectures call the projections to queries and values; a fused one serves for both.
_PROJECTIONS = (
    "query", "value", "q_lin", "v_lin", "query_proj", "value_proj", "in_proj", "Wqkv",  # BERT, DeBERTa, ModernBERT
    "q_proj", "v_proj", "qkv_proj", "c_attn", "query_key_value",  # LLaMA, Qwen, Gemma, Phi, GPT-2, NeoX
    "q", "v", "qkv",  # T5, MPNet, timm
)  # fmt: skip


def is_linear(module: object) -> bool:
    """Whether a layer multiplies by a matrix: torch's own, or GPT-2's, which keeps it the other way round."""
    # By its name: networks of other libraries do not wait for transformers.
    return isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"


def widths(layer: Any) -> tuple[int, int]:
    """Of a linear layer: how many values go out and in."""
    return (layer.out_features, layer.in_features) if isinstance(layer, nn.Linear) else tuple(layer.weight.shape[::-1])


def blocks_of(network: nn.Module) -> list[nn.Module]:
    """The blocks of a transformer, first to last; where it has an encoder and a decoder, those of both."""
    return [block for stack in stacks_of(network) for block in stack]


def stacks_of(network: Any) -> list[list[nn.Module]]:
    """The blocks of each part of a transformer: of its encoder and of its decoder, or all of them where it has but one
    of the two."""
    if getattr(getattr(network, "config", None), "is_encoder_decoder", False):
        for module in network.modules():
            parts = [getattr(module, name, None) for name in ("encoder", "decoder")]
            stacks = [_longest(part) for part in parts if isinstance(part, nn.Module)]
            if len(stacks) == 2 and all(stacks):
                return stacks
    return [_longest(network)]


def _longest(network: nn.Module) -> list[nn.Module]:
    """The longest list of like modules that have projections in them."""
    best: list[nn.Module] = []
    for module in network.modules():
        if isinstance(module, nn.ModuleList | nn.Sequential):
            children = list(module)
            alike = len({type(child) for child in children}) == 1
            if alike and len(children) > len(best) and projections_of(children[0]):
                best = children
    return best


def projections_of(network: nn.Module) -> list[str]:
    """Names of the linear layers that make queries and values: by the names that architectures give them, and where
    those are of another kind, all that attend. LoRA's own layers keep the original inside."""
    linear = [name for name, module in network.named_modules() if is_linear(module) and ".lora_" not in name]
    known = [name for name in linear if _plain(name).rpartition(".")[2] in _PROJECTIONS]
    return known or [name for name in linear if "att" in _plain(name).rpartition(".")[0].lower()]


def linear_in(network: nn.Module, names: Sequence[str] | None) -> list[str]:
    """Names of the linear layers that are called so, by the end of their path; None: of all of them."""
    linear = [name for name, module in network.named_modules() if is_linear(module) and ".lora_" not in name]
    if names is None:
        return linear
    return [name for name in linear if any(f".{_plain(name)}".endswith(f".{each}") for each in names)]


def _plain(name: str) -> str:
    return name.removesuffix(".base_layer")


def put_on(body: nn.Module, name: str, module: nn.Module, handles: Sequence[RemovableHandle]) -> Callable[[], None]:
    """List a module under the body, so that the features' cache knows it; how to take it off, hooks included."""
    body.add_module(name, module)

    def detach() -> None:
        for handle in handles:
            handle.remove()
        body._modules.pop(name, None)

    return detach
