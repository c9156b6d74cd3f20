"""Where a transformer can be adapted: its blocks, and the projections to queries and values inside them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import nn
from torch.utils.hooks import RemovableHandle

Detachable = tuple[dict[str, nn.Parameter], Callable[[], object]]
"""The parameters of a module, and how to take it off."""

# What architectures call the projections to queries and values; a fused one serves for both.
_PROJECTIONS = ("query", "value", "q_proj", "v_proj", "q_lin", "v_lin", "qkv", "query_key_value")


def blocks_of(network: nn.Module) -> list[nn.Module]:
    """The blocks of a transformer, first to last: the longest list of like modules that have projections in them."""
    best: list[nn.Module] = []
    for module in network.modules():
        if isinstance(module, nn.ModuleList | nn.Sequential):
            children = list(module)
            alike = len({type(child) for child in children}) == 1
            if alike and len(children) > len(best) and projections_of(children[0]):
                best = children
    return best


def projections_of(network: nn.Module) -> list[str]:
    """Names of the linear layers that make queries and values; LoRA's own layers keep the original inside."""
    return [
        name
        for name, module in network.named_modules()
        if isinstance(module, nn.Linear) and name.removesuffix(".base_layer").rpartition(".")[2] in _PROJECTIONS
    ]


def put_on(body: nn.Module, name: str, module: nn.Module, handles: Sequence[RemovableHandle]) -> Callable[[], None]:
    """List a module under the body, so that the features' cache knows it; how to take it off, hooks included."""
    body.add_module(name, module)

    def detach() -> None:
        for handle in handles:
            handle.remove()
        body._modules.pop(name, None)

    return detach
