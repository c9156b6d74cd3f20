"""LoRA (Hu et al., ICLR 2022) through `peft`: low-rank updates of linear layers."""

from __future__ import annotations

import warnings
from typing import Any

from torch import nn

from headstart.modules.blocks import Detachable


def lora(core: nn.Module, targets: list[str], rank: int, alpha: float, rslora: bool = False) -> Detachable:
    """W + alpha/rank · B A on every target, or with alpha/√rank (rsLoRA), B zero at first."""
    from peft import LoraConfig, LoraModel  # only where it is used: it takes a second to import
    from peft.tuners.lora import LoraLayer

    scale: Any = alpha  # peft divides it by the rank, and a fraction is as good as a whole number
    config = LoraConfig(r=rank, lora_alpha=scale, use_rslora=rslora, target_modules=targets, bias="none")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "fan_in_fan_out")  # it finds out by itself which way a layer multiplies
        tuner = LoraModel(core, {"default": config}, "default")
    for layer in core.modules():
        if isinstance(layer, LoraLayer):  # it takes after the layer below, which may be of fewer bits
            layer.lora_A.float()
            layer.lora_B.float()
    parameters = {
        name.replace(".default.", "."): parameter for name, parameter in core.named_parameters() if ".lora_" in name
    }
    return parameters, tuner.unload
