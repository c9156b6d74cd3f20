"""Bottleneck adapters (Houlsby et al., ICML 2019), one after each block: h + W_up gelu(W_down h).

Down is random and up is zero: the outputs start as the body's own, and the gradient of up does not vanish.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn
from torch.nn import functional


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


def adapters(
    body: nn.Module, blocks: list[nn.Module], width: int, bottleneck: int
) -> tuple[dict[str, nn.Parameter], Callable[[], None]]:
    """An adapter after every block; the parameters, and how to take them off."""
    device = next(body.parameters()).device
    modules = nn.ModuleList(Adapter(width, bottleneck) for _ in blocks).to(device)
    body.add_module("adapters", modules)  # so that the features' cache knows them

    def behind(adapter: nn.Module) -> Callable[..., object]:
        def hook(block: nn.Module, inputs: object, output: object) -> object:
            if isinstance(output, tuple):
                return (adapter(output[0]), *output[1:])
            return adapter(output)

        return hook

    handles = [block.register_forward_hook(behind(adapter)) for block, adapter in zip(blocks, modules, strict=True)]

    def detach() -> None:
        for handle in handles:
            handle.remove()
        del body.adapters

    return dict(modules.named_parameters()), detach
