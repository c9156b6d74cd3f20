"""Bottleneck adapters (Houlsby et al., ICML 2019), one after each block: h + W_up gelu(W_down h).

Down is random and up is zero: the outputs start as the body's own, and the gradient of up does not vanish.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.nn import functional

from headstart.modules.blocks import Detachable, put_on


class Adapter(nn.Module):
    """[B, T, width] → [B, T, width]."""

    def __init__(self, width: int, bottleneck: int) -> None:
        super().__init__()
        self.down, self.up = nn.Linear(width, bottleneck), nn.Linear(bottleneck, width)
        nn.init.zeros_(self.up.weight)
        nn.init.zeros_(self.up.bias)

    def forward(self, states: Tensor) -> Tensor:
        """The residual is inside."""
        change: Tensor = self.up(functional.gelu(self.down(states)))
        return states + change


def adapters(body: nn.Module, blocks: list[nn.Module], width: int, bottleneck: int) -> Detachable:
    """An adapter after every block."""
    device = next(body.parameters()).device
    modules = nn.ModuleList(Adapter(width, bottleneck) for _ in blocks).to(device)
    pairs = zip(blocks, modules, strict=True)
    handles = [block.register_forward_hook(partial(_adapted, adapter)) for block, adapter in pairs]
    return dict(modules.named_parameters()), put_on(body, "adapters", modules, handles)


def _adapted(adapter: nn.Module, block: nn.Module, inputs: object, output: Any) -> Any:
    return (adapter(output[0]), *output[1:]) if isinstance(output, tuple) else adapter(output)
