"""Deep visual prompts (Jia et al., ECCV 2022): learned tokens behind the first one, new ones at every block.

A text transformer gets the same: its attention mask is extended by tokens that every position sees.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from headstart.modules.blocks import Detachable, put_on

_PATCH = 16  # of the initialisation's bound, as in the authors' code


def prompts(body: nn.Module, blocks: list[nn.Module], width: int, tokens: int) -> Detachable:
    """``tokens`` prompts for every block."""
    bound = math.sqrt(6 / (3 * _PATCH**2 + width))
    device = next(body.parameters()).device
    learned = nn.ParameterList(nn.Parameter(torch.empty(tokens, width).uniform_(-bound, bound)) for _ in blocks)
    learned.to(device)

    def before(number: int) -> Callable[..., Any]:
        def hook(block: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
            states: Tensor = given[0]
            prompt = learned[number].to(states.dtype).expand(states.shape[0], -1, -1)
            rest = states[:, 1:] if number == 0 else states[:, 1 + tokens :]
            given = (
                torch.cat([states[:, :1], prompt, rest], dim=1),
                *(_with_tokens(each, tokens) for each in given[1:]),
            )
            return given, {name: _with_tokens(value, tokens) for name, value in named.items()}

        return hook

    def after(block: nn.Module, inputs: object, output: Any) -> Any:
        states = output[0] if isinstance(output, tuple) else output
        states = torch.cat([states[:, :1], states[:, 1 + tokens :]], dim=1)
        return (states, *output[1:]) if isinstance(output, tuple) else states

    handles = [block.register_forward_pre_hook(before(n), with_kwargs=True) for n, block in enumerate(blocks)]
    handles.append(blocks[-1].register_forward_hook(after))
    return dict(learned.named_parameters()), put_on(body, "prompts", learned, handles)


def _with_tokens(value: Any, tokens: int) -> Any:
    """An attention mask [B, 1, Q, T] with so many more tokens behind the first; anything else as it is."""
    if not isinstance(value, Tensor) or value.dim() != 4:
        return value
    seen = value.new_ones(()) if value.dtype == torch.bool else value.new_zeros(())
    columns = seen.expand(*value.shape[:3], tokens)
    value = torch.cat([value[..., :1], columns, value[..., 1:]], dim=3)
    if value.shape[2] == 1:
        return value
    rows = value[:, :, :1].expand(-1, -1, tokens, -1)
    return torch.cat([value[:, :, :1], rows, value[:, :, 1:]], dim=2)
