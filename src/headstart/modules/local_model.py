"""The model of a process: one backbone for all its clients and stages, and the modules on it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from headstart.backbones import Backbone, Prefix
from headstart.backbones.transforms import ImageInput
from headstart.errors import HeadstartError
from headstart.modules.attach import Attached, attach, plain_parameters, plain_state


class LocalModel:
    """A backbone and the modules on it, or neither, under a head.

    Nothing else writes their weights, says which of them have gradients, sets their mode, attaches or detaches.
    """

    def __init__(self, backbone: Backbone | None = None, *modules: Attached, others: Sequence[Backbone] = ()) -> None:
        """others: the same network as further tasks see it, where each has a prompt of its own."""
        self.backbone, self.modules = backbone, list(modules)
        self.views = () if backbone is None else (backbone, *others)
        """The backbone as each task sees it; one, where all see it alike."""
        self.prefix: Prefix | None = None
        """What comes before all that a stage trains, where it is computed once."""
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        if backbone is not None:
            backbone.body.to(self.device)

    def view(self, task: int) -> Backbone | None:
        """The backbone as a task sees it."""
        return self.views[task] if len(self.views) > 1 else self.backbone

    # --------------------------------------------------------------------------------------------------------- modules

    def attach(self, kind: str, settings: Mapping[str, Any], seed: int) -> Attached:
        """Put a new module on the backbone, on top of those that are there."""
        assert self.backbone is not None
        self.modules.append(attach(kind, self.backbone, settings, seed))
        return self.modules[-1]

    def detach(self, count: int | None = None) -> None:
        """Take modules off again: so many, the last one first, or all of them."""
        for _ in range(len(self.modules) if count is None else count):
            self.modules.pop().detach()

    # --------------------------------------------------------------------------------------------------------- weights

    def state(self) -> dict[str, Tensor]:
        """Parameters and buffers of the backbone, under its own names."""
        assert self.backbone is not None
        return plain_state(self.backbone.core)

    def parameters(self) -> dict[str, nn.Parameter]:
        """Parameters of the backbone, as `body.…`, and of the module that was attached last, as `module.…`."""
        found = {}
        if self.backbone is not None:
            found = {f"body.{name}": each for name, each in plain_parameters(self.backbone.core).items()}
        if self.modules:
            found |= {f"module.{name}": each for name, each in self.modules[-1].parameters.items()}
        return found

    @torch.no_grad()
    def write(self, tensors: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
        """Write values into tensors of the same names, in place."""
        for name, value in values.items():
            tensors[name].copy_(value)

    @torch.no_grad()
    def subtract(self, parameter: Tensor, change: Tensor, rate: float = 1.0) -> None:
        """θ ← θ − rate · change, in place."""
        parameter.sub_(change, alpha=rate)

    @torch.no_grad()
    def change(self, parameter: Tensor, by: Callable[[Tensor], object]) -> None:
        """Let a function change a parameter's numbers [size] in place."""
        values = parameter.data.reshape(-1)  # a copy where a layer has its numbers in another order
        by(values)
        if not parameter.is_contiguous():
            parameter.copy_(values.view(parameter.shape))

    def substitute(self, parameter: nn.Parameter, values: Tensor) -> None:
        """Let a parameter have the memory of these values, without a copy; its own is not touched."""
        parameter.data = values

    def require_gradients(self, parameters: Mapping[str, nn.Parameter], names: Iterable[str]) -> None:
        """Of these parameters, some have gradients."""
        wanted = set(names)
        for name, parameter in parameters.items():
            parameter.requires_grad_(name in wanted)

    def checkpoint_gradients(self, on: bool) -> None:
        """Whether a transformer's blocks are computed again for their gradients instead of kept."""
        core: Any = self.backbone.core if self.backbone else None
        can = getattr(core, "supports_gradient_checkpointing", False)
        if on and not can:
            raise HeadstartError("checkpoint_gradients: no blocks of the backbone can be computed again; leave it out")
        # Their names before and since transformers 5.
        what = "activation" if hasattr(core, "activation_checkpointing_enable") else "gradient"
        if on:
            getattr(core, f"{what}_checkpointing_enable")({"use_reentrant": False})
        elif can and any(getattr(module, "gradient_checkpointing", False) for module in core.modules()):
            getattr(core, f"{what}_checkpointing_disable")()

    def arrange(self, memory_format: str) -> None:
        """How a backbone of images has its numbers in memory: "contiguous", or channels last."""
        body = self.backbone.body if self.backbone else None
        wanted = torch.contiguous_format if memory_format == "contiguous" else torch.channels_last
        if isinstance(body, ImageInput) and body.memory_format != wanted:
            body.memory_format = wanted
            with torch.inference_mode(False):  # parameters that are made in it never have gradients
                body.to(memory_format=wanted)  # type: ignore[call-overload]

    # ------------------------------------------------------------------------------------------------------------ mode

    def norms(self) -> dict[str, _BatchNorm]:
        """Layers of batch norm, as `body.…`."""
        layers = self.backbone.core.named_modules() if self.backbone else ()
        return {f"body.{name}": layer for name, layer in layers if isinstance(layer, _BatchNorm)}

    def set_mode(self, training: bool, norm_statistics: str) -> None:
        """Training or evaluation mode, batch norm as ``norm_statistics`` says."""
        if self.backbone is None:
            return
        self.backbone.body.train(training)
        for module in self.backbone.body.modules():
            if isinstance(module, _BatchNorm):
                # Without tracking, a layer in training mode normalises by the batch and leaves its statistics alone.
                module.track_running_stats = norm_statistics != "batch"
                module.train(norm_statistics == "batch" or (training and norm_statistics == "aggregate"))
