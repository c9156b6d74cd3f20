"""How a backbone computes, where a stage leaves it open: as its first batch is fastest on this machine.

The last digits of what is learned depend on it, and so on the machine. What was chosen is logged; a recipe that names
it gives the same everywhere.
"""

from __future__ import annotations

import logging
import time
from itertools import product
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from headstart.solvers.network import Network

log = logging.getLogger("headstart")

# How often the batch is computed each way, after once to warm up.
_TRIALS = 2
# What is less exact has to be this much faster.
_GAIN = 1.1
_PRECISIONS, _FORMATS = ("float32", "bfloat16"), ("channels-last", "contiguous")


def choose(network: Network, batch: tuple[Tensor, ...], labels: Tensor) -> None:
    """Measure the loss of a batch, and its gradient where there are any, in each way that the stage leaves open, and
    go on with the fastest."""
    assert network.backbone is not None
    precisions: tuple[str, ...] = _PRECISIONS if network.precision == "auto" else (network.precision,)
    formats: tuple[str, ...] = _FORMATS if network.memory_format == "auto" else (network.memory_format,)
    if network.backbone.kind != "image":
        formats = formats[:1]
    buffers = dict(network.backbone.body.named_buffers())
    before = {name: buffer.clone() for name, buffer in buffers.items()}
    seconds = dict[tuple[str, str], float]()
    with torch.random.fork_rng():
        for precision, memory_format in product(precisions, formats):
            network.precision, network.memory_format = precision, memory_format
            network.model.arrange(memory_format)
            taken = min([_seconds(network, batch, labels) for _ in range(1 + _TRIALS)][1:])
            seconds[precision, memory_format] = taken * (_GAIN if precision == "bfloat16" else 1)
    network.model.write(buffers, before)  # running statistics have seen the batch several times
    network.precision, network.memory_format = min(seconds, key=lambda way: seconds[way])
    network.model.arrange(network.memory_format)
    log.info("%s: precision = %r, memory_format = %r", network.stage.method, network.precision, network.memory_format)


def _seconds(network: Network, batch: tuple[Tensor, ...], labels: Tensor) -> float:
    """How long a batch takes, its gradient included; infinity where its loss is no number."""
    start = time.perf_counter()
    loss = network.losses(batch, labels).mean()
    if loss.requires_grad:
        torch.autograd.grad(loss, [each for each in network.trained.values() if each.requires_grad], allow_unused=True)
    finite = bool(loss.isfinite())  # waits for a GPU
    return time.perf_counter() - start if finite else float("inf")
