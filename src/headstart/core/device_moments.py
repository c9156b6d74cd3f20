"""Sums and second moments of features on a device: blocks of features go there, and the totals come back once."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from headstart.core.device import to_device, to_host
from headstart.core.directions import sketching_basis
from headstart.core.moments import Features, Floats, Ints, Moments, Transform

if TYPE_CHECKING:
    import torch

_BLOCK_BYTES = 64 << 20


def device_sums(
    features: Features,
    rows: Ints,
    segments: Ints,
    n_segments: int,
    moments: Moments | None,
    transform: Transform | None,
    sketch: int,
    device: torch.device,
) -> tuple[Floats, Floats | None, Floats | None]:
    """What `headstart.core.moments.segment_sums` gives, in float64 on a device.

    Every segment is added up in the order of its rows, so that a block boundary changes nothing.
    """
    import torch

    transform = transform or (lambda values: values)
    dim = transform(features[:1]).shape[1]
    like = {"dtype": torch.float64, "device": device}
    sums = torch.zeros((n_segments, dim), **like)  # type: ignore[call-overload]
    second = torch.zeros((dim, dim) if moments == "full" else (dim,), **like) if moments else None  # type: ignore[call-overload]
    basis = to_device(sketching_basis(dim, min(sketch, dim)), device) if sketch else None
    drawn = torch.zeros((min(sketch, dim), dim), **like) if sketch else None  # type: ignore[call-overload]
    step = max(1, _BLOCK_BYTES // (8 * dim))
    for start in range(0, len(rows), step):
        members = segments[start : start + step]
        first, last = int(members[0]), int(members[-1])
        lengths = np.bincount(members - first, minlength=last - first + 1)
        lengths[0] += 1  # what the previous block left in the segment that the two share
        block = to_device(transform(features[rows[start : start + step]]), device).double()
        whole = torch.cat([sums[first : first + 1], block])
        sums[first : last + 1] = torch.segment_reduce(whole, "sum", lengths=to_device(lengths, device), unsafe=True)
        if second is not None:
            second += block.T @ block if moments == "full" else block.square().sum(dim=0)
        if drawn is not None and basis is not None:
            drawn += (block @ basis).T @ block
    if second is not None and moments == "trace":
        second = second.sum().reshape(1)
    return to_host(sums), None if second is None else to_host(second), None if drawn is None else to_host(drawn)
