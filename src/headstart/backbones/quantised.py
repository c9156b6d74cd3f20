"""Frozen backbones of sixteen bits, and of eight or four through `bitsandbytes`, as QLoRA has them; on this machine, or
refused."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from headstart.config.recipe import Model
from headstart.errors import HeadstartError

# It says of every layer that it rounds; where it is merely installed, `peft` imports it, and it says what it lacks.
logging.getLogger("bitsandbytes").setLevel(logging.ERROR)


class _Halved(nn.Linear):
    """A linear layer whose matrix is in bfloat16, and its products too; what comes in and goes out is float32."""

    def forward(self, values: Tensor) -> Tensor:
        """[…, in] → […, out]."""
        found = functional.linear(values.to(self.weight.dtype), self.weight).to(values.dtype)
        return found if self.bias is None else found + self.bias


def how_to_load(model: Model) -> dict[str, Any]:
    """What `from_pretrained` is given beside the place: of a recipe that asks for few bits, how to round."""
    if model.quantise is None:
        return {}
    if model.quantise == "bfloat16":
        return {"dtype": torch.bfloat16}
    if find_spec("bitsandbytes") is None:
        raise HeadstartError(
            f"model.quantise: {model.quantise!r} needs bitsandbytes; pip install 'headstart[quantise]', or leave it out"
        )
    from transformers import BitsAndBytesConfig

    bits: dict[str, Any] = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": torch.float32}
    if model.quantise == "int8":
        # A threshold would take columns out by what else is in the batch: features would depend on it.
        bits = {"load_in_8bit": True, "llm_int8_threshold": 0.0}
    return {"quantization_config": BitsAndBytesConfig(**bits), "dtype": torch.float32}


def is_quantised(network: object) -> bool:
    """Whether the weights of a network of `transformers` are of few bits."""
    halved = isinstance(network, nn.Module) and any(isinstance(layer, _Halved) for layer in network.modules())
    return halved or bool(getattr(network, "is_quantized", False))


def as_floats(network: Any, how: Mapping[str, Any] | None = None) -> Any:
    """The network in float32, for evaluation; what is of few bits stays so, and the rest of it is float32 already.

    how: as it was loaded, by `how_to_load`; a checkpoint in bfloat16 becomes float32 where nobody asks for less.
    """
    if how and how.get("dtype") == torch.bfloat16:
        return _halved(network).eval()
    if not is_quantised(network):
        return network.float().eval()
    for layer in network.modules():
        # Otherwise some processors would compute in bfloat16 in evaluation, and not in training.
        if hasattr(layer, "support_avx512bf16_for_cpu"):
            layer.support_avx512bf16_for_cpu = False
    return network.eval()


def _halved(network: Any) -> Any:
    """The matrices of linear layers stay in bfloat16, the vocabulary and all else is float32."""
    vocabulary = network.get_output_embeddings()
    layers = [each for each in network.modules() if type(each) is nn.Linear and each is not vocabulary]
    kept = [layer.weight.data.bfloat16() for layer in layers]  # some are loaded in float32 whatever is asked for
    for layer in layers:
        layer.weight.data = torch.empty(0)  # so that none is ever there in float32
    network.float()
    for layer, weight in zip(layers, kept, strict=True):
        layer.__class__, layer.weight.data = _Halved, weight
    return network
