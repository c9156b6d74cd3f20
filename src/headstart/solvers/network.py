"""What a client does with a whole model: SGD on a body and a head, in memory once for all clients.

Shared parameters are loaded in place: no copy of the model, no new loader for a client. Where only the body trains, the
head stays as it is.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm

from headstart.backbones import Backbone, moved, run_body, some, unused
from headstart.config.stage import Rounds, Training
from headstart.core.params import Params
from headstart.core.plan import Plan
from headstart.errors import HeadstartError
from headstart.modules import Attached, plain_parameters
from headstart.solvers.cohort import Cohort
from headstart.solvers.heads import batches, layers_of, pulled
from headstart.solvers.objective import LocalResult, Objective, learning_rate


class Network:
    """A body and a head; parameters and running statistics by name, as tensors that are written in place."""

    def __init__(
        self, backbone: Backbone | None, module: Attached | None, head: Mapping[str, Tensor], stage: Rounds, plan: Plan
    ) -> None:
        self.backbone, self.stage = backbone, stage
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.parameters: dict[str, nn.Parameter] = {}
        self.norms: dict[str, _BatchNorm] = {}
        if backbone is not None:
            backbone.body.to(self.device)
            core = backbone.core
            self.parameters |= {f"body.{name}": parameter for name, parameter in plain_parameters(core).items()}
            self.norms = {f"body.{name}": each for name, each in core.named_modules() if isinstance(each, _BatchNorm)}
        if module is not None:
            self.parameters |= {f"module.{name}": parameter for name, parameter in module.parameters.items()}
        self.parameters |= {name: nn.Parameter(value.to(self.device)) for name, value in head.items()}
        shapes = {name: tuple(parameter.shape) for name, parameter in self.parameters.items()}
        self.trained = {name: self.parameters[name] for name in plan.loaded(shapes)}
        below = {name: parameter for name, parameter in self.trained.items() if name.startswith("body.")}
        if backbone is not None and below:
            # What the features do not depend on, such as a pooler, cannot be trained; it stays frozen.
            frozen = unused(backbone, below)
            if len(frozen) == len(below):
                raise HeadstartError(f"no parameter of {backbone.name} has a gradient; set train to 'head'")
            self.trained = {name: each for name, each in self.trained.items() if name not in frozen}
        self.head_layers = layers_of(list(head))
        counts = [norm.num_batches_tracked for norm in self.norms.values()]
        self._counts = [(count, count.clone()) for count in counts if count is not None]
        self.statistics: dict[str, Tensor] = {}
        if plan.statistics != "frozen":
            for name, norm in self.norms.items():
                for what in ("running_mean", "running_var"):
                    if getattr(norm, what) is not None:
                        self.statistics[f"{name}.{what}"] = getattr(norm, what)
        for name, parameter in self.parameters.items():
            parameter.requires_grad_(name in self.trained)

    @torch.no_grad()
    def load(self, arrays: Mapping[str, Tensor]) -> None:
        """Write parameters and statistics by name, in place.

        Batch norm's counts of batches go back to those that the stage found: how many a process has seen is no part of
        the model, and differs after a resumption.
        """
        for count, found in self._counts:
            count.copy_(found)
        for name, value in arrays.items():
            here = self.statistics[name] if name in self.statistics else self.parameters[name]
            if here.shape != value.shape:  # heads of tasks with other classes
                here.data = torch.empty_like(value, device=here.device)
            here.copy_(value)

    def scores(self, batch: tuple[Tensor, ...]) -> Tensor:
        """The inputs of a batch, or its features where there is no body → scores [B, C]."""
        device = self.device.type
        with torch.autocast(device, torch.bfloat16, enabled=self.stage.precision == "bfloat16"):
            values: Tensor = batch[0].to(self.device)
            if self.backbone is not None:
                values = run_body(self.backbone.body, moved(batch, self.device))
        values = values.float()
        for layer in self.head_layers:
            values = functional.linear(values, self.parameters[f"{layer}.weight"], self.parameters[f"{layer}.bias"])
            values = values if layer == "head" else values.relu()
        return values


def tensors(arrays: Mapping[str, np.ndarray]) -> Params:
    """Float32 tensors of arrays, on the same memory where that can be."""
    return Params({name: torch.from_numpy(np.require(array, np.float32, "W")) for name, array in arrays.items()})


def set_mode(body: nn.Module, training: bool, norm_statistics: str) -> None:
    """Training or evaluation mode, batch norm as ``norm_statistics`` says."""
    body.train(training)
    for module in body.modules():
        if isinstance(module, _BatchNorm):
            # Without tracking, a layer in training mode normalises by the batch and leaves its statistics alone.
            module.track_running_stats = norm_statistics != "batch"
            module.train(norm_statistics == "batch" or (training and norm_statistics == "aggregate"))


class BodySolver:
    """Local SGD of one client at a time on a network that all clients share."""

    def __init__(self, network: Network, stage: Training, seed: tuple[int, ...]) -> None:
        self.network, self.stage, self.seed = network, stage, seed

    def __call__(self, start: Params, cohort: Cohort, round: int, objective: Objective) -> LocalResult:
        """start: parameters and statistics [1, …]; the cohort is one client."""
        network, stage, rate = self.network, self.stage, learning_rate(self.stage, round)
        assert network.backbone is not None
        (client,) = cohort.clients
        begin = {name: value[0].to(network.device) for name, value in start.items()}
        network.load(begin)
        moving = {n: p for n, p in network.trained.items() if objective.trains is None or n in objective.trains}
        # What trains a module or a head leaves the body alone, its running statistics too.
        frozen = not any(name.startswith("body.") for name in moving) and stage.norm_statistics == "aggregate"
        set_mode(network.backbone.body, True, "freeze" if frozen else stage.norm_statistics)
        for name, parameter in network.trained.items():
            parameter.requires_grad_(name in moving)
        names, parameters = list(moving), list(moving.values())
        centre = begin
        if objective.centre is not None:
            centre = {name: objective.centre[name][0].to(network.device) for name in names}
        velocity = _of(objective.velocity, names, network.device)
        correction = _of(objective.correction, names, network.device)
        proximal = float(np.float32(np.broadcast_to(objective.proximal, 1)[0]))
        plan = [row[row >= 0] for row in batches(cohort, stage, round, self.seed, objective)[0]]
        if objective.inner_lr is not None:
            plan = plan[: len(plan) // 2 * 2]
        rng = np.random.default_rng([0xF11, *self.seed, round, int(client), objective.phase])
        origin: list[Tensor] = []
        with torch.random.fork_rng():
            torch.manual_seed(int(rng.integers(2**62)))  # for dropout, where the body has it
            for rows, inputs in zip(plan, cohort.inputs.batches(cohort.rows[rows] for rows in plan), strict=True):
                if stage.augment == "flip" and network.backbone.kind == "image":
                    inputs = flipped(inputs, rng.random(len(rows)) < 0.5)
                labels = torch.from_numpy(cohort.labels[rows]).to(network.device)
                loss = functional.cross_entropy(network.scores(inputs) / stage.temperature, labels)
                gradients = _gradients(loss, moving)
                with torch.no_grad():
                    if stage.clip is not None:
                        norm = torch.linalg.vector_norm(torch.stack([gradient.norm() for gradient in gradients]))
                        factor = (stage.clip / norm.clamp(min=1e-12)).clamp(max=1.0)
                        gradients = [gradient * factor for gradient in gradients]
                    for number, (name, parameter) in enumerate(zip(names, parameters, strict=True)):
                        if stage.weight_decay:
                            gradients[number] = gradients[number].add(pulled(name, parameter), alpha=stage.weight_decay)
                        if proximal:
                            gradients[number] = gradients[number].add(
                                pulled(name, parameter - centre[name]), alpha=proximal
                            )
                        if correction:
                            gradients[number] = gradients[number] + correction[number]
                    if objective.inner_lr is not None and not origin:
                        origin = [parameter.clone() for parameter in parameters]
                        for parameter, gradient in zip(parameters, gradients, strict=True):
                            parameter.sub_(gradient, alpha=objective.inner_lr)
                        continue
                    for parameter, before in zip(parameters, origin, strict=False):
                        parameter.copy_(before)
                    origin = []
                    if stage.momentum and velocity:
                        pairs = zip(velocity, gradients, strict=True)
                        velocity = [before.mul_(stage.momentum).add_(gradient) for before, gradient in pairs]
                    else:  # autograd may give two parameters one tensor as their gradient
                        velocity = [gradient.clone() for gradient in gradients] if stage.momentum else gradients
                    for parameter, change in zip(parameters, velocity, strict=True):
                        parameter.sub_(change, alpha=rate)
        below = any(not name.startswith("head.") for name in moving)
        return LocalResult(
            Params({name: parameter.detach().cpu()[None] for name, parameter in network.trained.items()}),
            np.array([len(plan) if objective.inner_lr is None else len(plan) // 2]),
            np.array([(3 if below else 1) * sum(len(rows) for rows in plan)]),
            # None where a client is too small for a step.
            Params({name: value.cpu()[None] for name, value in zip(names, velocity, strict=bool(velocity))}),
            Params({name: value.cpu()[None].clone() for name, value in network.statistics.items()}),
        )


def _gradients(loss: Tensor, parameters: Mapping[str, nn.Parameter]) -> list[Tensor]:
    """The gradient of each parameter; one that the loss does not depend on has none, and that is no zero."""
    gradients = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
    missing = [name for name, gradient in zip(parameters, gradients, strict=True) if gradient is None]
    if missing:
        raise HeadstartError(
            f"the loss of a batch does not depend on {some(missing)}, though features do in evaluation; set what skips "
            "layers in training (layerdrop) to 0 in the network's configuration, or train another part"
        )
    return list(gradients)


def _of(stack: Mapping[str, Tensor] | None, names: list[str], device: torch.device) -> list[Tensor]:
    """A client's own part of a stack, in the order of the names; empty where there is none."""
    return [] if stack is None else [stack[name][0].to(device, copy=True) for name in names]


def flipped(inputs: tuple[Tensor, ...], which: np.ndarray) -> tuple[Tensor, ...]:
    """Images [B, H, W, 3] with some of them mirrored."""
    (images,) = inputs
    mask = torch.from_numpy(which).view(-1, 1, 1, 1)
    return (torch.where(mask, images.flip(2), images),)
