"""A training step of a backbone as it is, in other memory layouts and precisions, and by `torch.compile`.

    python -m benchmarks.compiled [NETWORK …]

Random weights, batches of 16, one thread; every way takes its turns, and the fastest of them counts. The first step
compiles; a stage has to take `steps until it pays` to have that back, for every shape of a batch.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.common import show

THREADS, BATCH, STEPS = 1, 16, 15
NETS = {"conv4": 32, "squeezenet1_1": 64, "mobilenet_v2": 64}


def step_of(name: str, precision: str, memory_format: Any, compiles: bool) -> Callable[[], None]:
    """A forward and a backward pass through a network."""
    from headstart.backbones import load_backbone
    from headstart.config.recipe import Model

    torch.manual_seed(0)
    side = NETS[name]
    backbone = load_backbone(Model(backbone=name, weights="random", image_size=side))
    body = backbone.body.train()
    body.memory_format = memory_format
    body.to(memory_format=memory_format)  # type: ignore[call-overload]
    parameters = [each.requires_grad_(True) for each in body.parameters()]
    images = torch.randint(0, 255, (BATCH, side, side, 3), dtype=torch.uint8)
    network: Any = torch.compile(body) if compiles else body

    def step() -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bfloat16"):
            loss = network(images).float().square().mean()
        torch.autograd.grad(loss, parameters, allow_unused=True)

    return step


def timed(step: Callable[[], None]) -> float:
    """Seconds of a call."""
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


def main(*chosen: str) -> None:
    """A row for each network and way."""
    torch.set_num_threads(THREADS)
    last, plain = torch.channels_last, torch.contiguous_format
    ways = {
        "float32, channels last": ("float32", last, False), "float32, contiguous": ("float32", plain, False),
        "bfloat16, channels last": ("bfloat16", last, False), "bfloat16, contiguous": ("bfloat16", plain, False),
        "float32, channels last, compiled": ("float32", last, True),
    }  # fmt: skip
    rows = []
    for name in chosen or NETS:
        steps = {way: step_of(name, *given) for way, given in ways.items()}
        first = {way: timed(step) for way, step in steps.items()}
        seconds: dict[str, list[float]] = {way: [] for way in ways}
        for _ in range(STEPS):
            for way, step in steps.items():
                seconds[way].append(timed(step))
        base = min(seconds["float32, channels last"])
        for way, each in seconds.items():
            fastest = min(each)
            gained = base - fastest
            pays = f"{first[way] / gained:,.0f}" if gained > 0 else "never"
            compiling = (f"{first[way]:.0f}", pays) if "compiled" in way else ("", "")
            rows.append((name, NETS[name], way, f"{1e3 * fastest:.1f}", f"{base / fastest:.2f}", *compiling))
    columns = ("network", "px", "way", "ms a step", "× float32, channels last", "first step, s", "steps until it pays")
    show(f"A training step, batches of {BATCH}, {THREADS} thread, fastest of {STEPS}", columns, rows)


if __name__ == "__main__":
    main(*sys.argv[1:])
