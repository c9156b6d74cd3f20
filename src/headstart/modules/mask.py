"""Sparse updates: of every projection to queries and values, a few entries chosen by the seed may change.

The entries' changes are the module's parameters, zero at first; all other entries stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional


def masks(
    body: nn.Module, core: nn.Module, targets: list[str], density: float, seed: int
) -> tuple[dict[str, nn.Parameter], Callable[[], None]]:
    """A share ``density`` of each target's entries; the parameters [nnz] by target, and how to take them off."""
    device = next(body.parameters()).device
    parameters: dict[str, nn.Parameter] = {}
    handles = []
    for number, name in enumerate(targets):
        layer = core.get_submodule(name)
        assert isinstance(layer.weight, Tensor)
        where = torch.from_numpy(entries(layer.weight.numel(), density, seed, number)).to(device)
        parameters[name.removesuffix(".base_layer")] = values = nn.Parameter(torch.zeros(len(where), device=device))
        handles.append(layer.register_forward_hook(_adding(values, where, layer.weight.shape)))
    listed = nn.ParameterList(parameters.values())
    body.add_module("masks", listed)  # so that the features' cache knows them

    def detach() -> None:
        for handle in handles:
            handle.remove()
        if hasattr(body, "masks"):
            del body.masks

    return parameters, detach


def entries(size: int, density: float, seed: int, number: int) -> np.ndarray:
    """Which entries of the ``number``-th matrix may change: sorted positions, the same wherever the seed is known."""
    rng = np.random.Generator(np.random.Philox(key=(seed << 32) + number))
    return np.sort(rng.permutation(size)[: max(1, round(density * size))])


def dense(values: Tensor, where: Tensor, shape: torch.Size | tuple[int, ...]) -> Tensor:
    """Values [nnz] at their places in a matrix of zeros."""
    flat = values.new_zeros(int(np.prod(shape)))
    return flat.index_put((where,), values).view(tuple(shape))


def _adding(values: nn.Parameter, where: Tensor, shape: torch.Size) -> Callable[..., Any]:
    def hook(layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        return output + functional.linear(inputs[0], dense(values, where, shape).to(inputs[0].dtype))

    return hook
