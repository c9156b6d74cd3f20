"""Prefix-tuning (Li & Liang, ACL 2021): learned keys and values that every token sees, before its own, at every block.

They begin as those of tokens drawn at random, as in MeZO (Malladi et al., NeurIPS 2023). What the model reads keeps its
positions.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from headstart.modules.blocks import Detachable, put_on


class _Learned(nn.Module):
    """Keys and values [heads, tokens, width] of a block."""

    def __init__(self, key: Tensor, value: Tensor) -> None:
        super().__init__()
        self.key, self.value = nn.Parameter(key), nn.Parameter(value)

    def forward(self, rows: int) -> tuple[Tensor, Tensor]:
        """For so many texts [B, heads, tokens, width]; a call, as FedMeZO changes parameters for a call alone."""
        return self.key.expand(rows, -1, -1, -1), self.value.expand(rows, -1, -1, -1)


def key_values(body: nn.Module, core: Any, tokens: int) -> Detachable:
    """``tokens`` keys and values before those of every text."""
    from transformers import DynamicCache

    drawn = torch.randint(core.config.vocab_size, (1, tokens), device=next(core.parameters()).device)
    with torch.no_grad():
        begin = core(input_ids=drawn, use_cache=True).past_key_values
    learned = nn.ModuleList(_Learned(layer.keys[0].clone(), layer.values[0].clone()) for layer in begin.layers)

    def before(model: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        ids, cache, positions = named["input_ids"], named.get("past_key_values"), named.get("position_ids")
        if cache is None or not cache.get_seq_length():  # else it is in the cache of what is being completed
            cache = DynamicCache() if cache is None else cache
            for number, layer in enumerate(learned):
                cache.update(*layer(len(ids)), number)
            positions = torch.arange(ids.shape[1], device=ids.device)[None] if positions is None else positions
        made = {"past_key_values": cache, "position_ids": positions}
        if (mask := named.get("attention_mask")) is not None:  # None: every token sees all before it
            made["attention_mask"] = _with_tokens(mask, tokens)
        return given, {**named, **made}

    handle = core.register_forward_pre_hook(before, with_kwargs=True)
    return dict(learned.named_parameters()), put_on(body, "key_values", learned, [handle])


def _with_tokens(mask: Any, tokens: int) -> Any:
    """An attention mask, [B, T] or added to scores [B, 1, Q, T], with so many more tokens in front, which all see;
    where a model has several kinds of attention, one of each."""
    if isinstance(mask, dict):
        return {kind: _with_tokens(each, tokens) for kind, each in mask.items()}
    seen = mask.new_ones(()) if mask.dim() == 2 else mask.new_zeros(())
    return torch.cat([seen.expand(*mask.shape[:-1], tokens), mask], dim=-1)
