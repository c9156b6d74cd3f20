"""Where numbers are computed beside the processor: the GPU that torch has found, and the way there and back."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:  # closed-form methods do not wait for torch
    import torch
    from torch import Tensor


def accelerator() -> torch.device | None:
    """The GPU, where torch is loaded and has one; closed forms on features do not load torch to ask."""
    torch = sys.modules.get("torch")
    return torch.device("cuda") if torch is not None and torch.cuda.is_available() else None


def to_device(array: npt.NDArray[Any], device: torch.device) -> Tensor:
    """A copy on a device."""
    import torch

    return torch.from_numpy(np.ascontiguousarray(array)).to(device)


def to_host(tensor: Tensor) -> npt.NDArray[Any]:
    """A tensor of a device as an array here; waits for what computes it."""
    values: npt.NDArray[Any] = tensor.cpu().numpy()
    return values
