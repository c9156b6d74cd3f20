"""Frozen backbones of eight or four bits through `bitsandbytes`, as QLoRA has them; on this machine, or refused."""

from __future__ import annotations

import logging
from importlib.util import find_spec
from typing import Any

import torch

from headstart.config.recipe import Model
from headstart.errors import HeadstartError

# It says of every layer that it rounds; where it is merely installed, `peft` imports it, and it says what it lacks.
logging.getLogger("bitsandbytes").setLevel(logging.ERROR)


def how_to_load(model: Model) -> dict[str, Any]:
    """What `from_pretrained` is given beside the place: of a recipe that asks for few bits, how to round."""
    if model.quantise is None:
        return {}
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
    return bool(getattr(network, "is_quantized", False))


def as_floats(network: Any) -> Any:
    """The network in float32, for evaluation; what is of few bits stays so, and the rest of it is float32 already."""
    if not is_quantised(network):
        return network.float().eval()
    for layer in network.modules():
        # Otherwise some processors would compute in bfloat16 in evaluation, and not in training.
        if hasattr(layer, "support_avx512bf16_for_cpu"):
            layer.support_avx512bf16_for_cpu = False
    return network.eval()
