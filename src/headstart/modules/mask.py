"""Sparse updates: of every projection to queries and values, a few entries chosen by the seed may change.

The entries' changes are the module's parameters, zero at first; all other entries stay as they are.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from headstart.modules.blocks import Detachable, put_on, widths


def masks(body: nn.Module, core: nn.Module, targets: list[str], density: float, seed: int) -> Detachable:
    """A share ``density`` of each target's entries: parameters [nnz] by target."""
    device = next(body.parameters()).device
    parameters: dict[str, nn.Parameter] = {}
    handles = []
    for number, name in enumerate(targets):
        layer = core.get_submodule(name)
        out, width = widths(layer)
        where = torch.from_numpy(entries(out * width, density, seed, number)).to(device)
        parameters[name.removesuffix(".base_layer")] = values = nn.Parameter(torch.zeros(len(where), device=device))
        handles.append(layer.register_forward_hook(partial(_masked, values, where)))
    return parameters, put_on(body, "masks", nn.ParameterList(parameters.values()), handles)


def entries(size: int, density: float, seed: int, number: int) -> np.ndarray:
    """Which entries of the ``number``-th matrix may change: sorted positions, the same wherever the seed is known."""
    rng = np.random.Generator(np.random.Philox(key=(seed << 32) + number))
    return np.sort(rng.permutation(size)[: max(1, round(density * size))])


def dense(values: Tensor, where: Tensor, shape: torch.Size | tuple[int, ...]) -> Tensor:
    """Values [nnz] at their places in a matrix of zeros."""
    flat = values.new_zeros(int(np.prod(shape)))
    return flat.index_put((where,), values).view(tuple(shape))


def _masked(values: Tensor, where: Tensor, layer: Any, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
    return output + functional.linear(inputs[0], dense(values, where, widths(layer)).to(inputs[0].dtype))
