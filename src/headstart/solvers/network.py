"""What a client does with a whole model: SGD on a backbone and a head, in memory once for all clients.

Shared parameters are loaded in place: no copy of the model, no new loader for a client. Where only the backbone trains,
the head stays as it is.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from headstart.backbones import Prefixed, moved, run_body, some, taken, unused
from headstart.config.stage import Rounds, Training
from headstart.core.params import Params
from headstart.core.plan import Plan
from headstart.errors import HeadstartError
from headstart.modules import LocalModel
from headstart.solvers.adam import Moments
from headstart.solvers.cohort import Cohort
from headstart.solvers.heads import batches, layers_of
from headstart.solvers.objective import LocalResult, Objective, learning_rate
from headstart.solvers.probe import choose


class Network:
    """What a stage trains of the local model, and a head on it; parameters and running statistics by name."""

    def __init__(
        self, model: LocalModel | None, head: Mapping[str, Tensor], stage: Rounds, plan: Plan, task: int = 0
    ) -> None:
        self.model = model = model if model and plan.changes_features else LocalModel()
        self.backbone, self.device, self.stage = model.view(task), model.device, stage
        self.precision: str = stage.precision
        self.memory_format: str = stage.memory_format
        model.arrange(self.memory_format)
        self.head_layers = layers_of(list(head))
        self.parameters = model.parameters()
        self.parameters |= {name: nn.Parameter(value.to(self.device)) for name, value in head.items()}
        self.trained = {name: each for name, each in self.parameters.items() if plan.role(name) != "frozen"}
        if stage.train == "norms":  # what has one value for a channel: scales, shifts, biases
            self.trained = {n: each for n, each in self.trained.items() if not n.startswith("body.") or each.ndim == 1}
        if stage.freeze_a:
            self.trained = {name: each for name, each in self.trained.items() if ".lora_A." not in name}
        below = {name: parameter for name, parameter in self.trained.items() if name.startswith("body.")}
        if self.backbone is not None and below:
            # What the features do not depend on, such as a pooler or what comes before a prefix that is computed once,
            # cannot be trained; it stays frozen.
            batch = self.backbone.sample()
            if model.prefix:
                batch = Prefixed.of(batch, model.prefix, self.backbone.body)
            frozen = unused(self.backbone, below, batch)
            if len(frozen) == len(below):
                raise HeadstartError(f"no parameter of {self.backbone.name} has a gradient; set train to 'head'")
            self.trained = {name: each for name, each in self.trained.items() if name not in frozen}
        model.require_gradients(self.parameters, self.trained)
        model.checkpoint_gradients(stage.checkpoint_gradients)
        norms = model.norms()
        counts = {name: norm.num_batches_tracked for name, norm in norms.items()}
        self._counts = {name: count for name, count in counts.items() if count is not None}
        self._counts_found = {name: count.clone() for name, count in self._counts.items()}
        self.statistics: dict[str, Tensor] = {}
        if plan.statistics != "frozen":
            both = ("running_mean", "running_var")
            found = {f"{name}.{what}": getattr(norm, what) for name, norm in norms.items() for what in both}
            self.statistics = {name: values for name, values in found.items() if values is not None}

    def load(self, arrays: Mapping[str, Tensor]) -> None:
        """Write parameters and statistics by name, in place.

        Batch norm's counts of batches go back to those that the stage found: how many a process has seen is no part of
        the model, and differs after a resumption.
        """
        self.model.write(self._counts, self._counts_found)
        self.model.write(self.parameters | self.statistics, arrays)

    @property
    def undecided(self) -> bool:
        """Whether the first batch has yet to say how the backbone computes."""
        return self.backbone is not None and "auto" in (self.precision, self.memory_format)

    @property
    def generates(self) -> bool:
        """Whether the backbone completes prompts, and is no classifier."""
        return self.backbone is not None and self.backbone.task == "generate"

    def features(self, batch: tuple[Tensor, ...]) -> Tensor:
        """The inputs of a batch, or its features where there is no backbone → features [B, d]."""
        device = self.device.type
        with torch.autocast(device, torch.bfloat16, enabled=self.precision == "bfloat16"):
            values: Tensor = batch[0].to(self.device)
            if self.backbone is not None:
                values = run_body(self.backbone.body, moved(batch, self.device))
        return values.float()

    def scores(self, batch: tuple[Tensor, ...]) -> Tensor:
        """The inputs of a batch, or its features where there is no backbone → scores [B, C]."""
        values = self.features(batch)
        for layer in self.head_layers:
            values = functional.linear(values, self.parameters[f"{layer}.weight"], self.parameters[f"{layer}.bias"])
            values = values if layer == "head" else values.relu()
        return values

    def losses(self, batch: tuple[Tensor, ...], labels: Tensor, reduction: str = "none") -> Tensor:
        """The loss of each example [B], or their mean: cross-entropy, or that of a completion's tokens, on average."""
        if self.undecided:
            choose(self, batch, labels)
        values = self.scores(batch) if not self.generates else self.features(batch)
        if self.generates:
            each = values[:, 0] / values[:, 1].clamp(min=1)
            return each.mean() if reduction == "mean" else each
        return functional.cross_entropy(values / self.stage.known_temperature, labels, reduction=reduction)


def tensors(arrays: Mapping[str, np.ndarray]) -> Params:
    """Float32 tensors of arrays, on the same memory where that can be."""
    return Params({name: torch.from_numpy(np.require(array, np.float32, "W")) for name, array in arrays.items()})


class BodySolver:
    """Local SGD of one client at a time on a network that all clients share."""

    def __init__(self, network: Network, stage: Training, seed: tuple[int, ...]) -> None:
        self.network, self.stage, self.seed = network, stage, seed

    def __call__(self, start: Params, cohort: Cohort, round: int, objective: Objective) -> LocalResult:
        """start: parameters and statistics [1, …]; the cohort is one client."""
        network, stage = self.network, self.stage
        assert network.backbone is not None
        (client,) = cohort.clients
        plan = [row[row >= 0] for row in batches(cohort, stage, round, self.seed, objective)[0]]
        if objective.inner_lr is not None:
            plan = plan[: len(plan) // 2 * 2]
        rng = np.random.default_rng([0xF11, *self.seed, round, int(client), objective.phase])
        steps = _Steps(network, stage, learning_rate(stage, round), start, objective)
        with torch.random.fork_rng():
            torch.manual_seed(int(rng.integers(2**62)))  # for dropout, where the backbone has it
            for rows, inputs in zip(plan, cohort.inputs.batches(cohort.rows[rows] for rows in plan), strict=True):
                if stage.augment == "flip" and network.backbone.kind == "image":
                    inputs = flipped(inputs, rng.random(len(rows)) < 0.5)
                labels = torch.from_numpy(cohort.labels[rows]).to(network.device)
                steps.take(inputs, labels)
        below = any(not name.startswith("head.") for name in steps.moving)
        return LocalResult(
            Params({name: parameter.detach().cpu()[None] for name, parameter in network.trained.items()}),
            np.array([len(plan) if objective.inner_lr is None else len(plan) // 2]),
            np.array([(3 if below else 1) * sum(len(rows) for rows in plan)]),
            # None where a client is too small for a step.
            Params(
                {n: value.cpu()[None] for n, value in zip(steps.moving, steps.velocity, strict=bool(steps.velocity))}
            ),
            Params({name: value.cpu()[None].clone() for name, value in network.statistics.items()}),
        )


class _Steps:
    """SGD steps of one client: the parameters that move, and what is in hand between two batches."""

    def __init__(self, network: Network, stage: Training, rate: float, start: Params, objective: Objective) -> None:
        self.network, self.stage, self.rate, self.inner_lr = network, stage, rate, objective.inner_lr
        begin = {name: value[0].to(network.device) for name, value in start.items()}
        network.load(begin)
        chosen = objective.trains
        self.moving = {name: each for name, each in network.trained.items() if chosen is None or name in chosen}
        # What trains a module or a head leaves the backbone alone, its running statistics too.
        frozen = not any(name.startswith("body.") for name in self.moving) and stage.norm_statistics == "aggregate"
        network.model.set_mode(True, "freeze" if frozen else stage.norm_statistics)
        network.model.require_gradients(network.trained, self.moving)
        self.parameters = list(self.moving.values())
        self.proximal = float(np.float32(np.broadcast_to(objective.proximal, 1)[0]))
        self.centre = [begin[name] for name in self.moving] if objective.centre is None else self._own(objective.centre)
        self.velocity, self.correction = self._own(objective.velocity), self._own(objective.correction)
        self.moments = [Moments(each) for each in self.parameters] if stage.optimiser == "adamw" else []
        self.origin: list[Tensor] = []
        """The parameters before an inner step."""

    def _own(self, stack: Mapping[str, Tensor] | None) -> list[Tensor]:
        """The client's part of a stack, in the order of the parameters; empty where there is none."""
        return [] if stack is None else [stack[name][0].to(self.network.device, copy=True) for name in self.moving]

    def _gradient(self, inputs: tuple[Tensor, ...], labels: Tensor) -> list[Tensor]:
        """The gradient of a batch's mean loss, at once or added up over parts of it."""
        size = self.stage.micro_batch or len(labels)
        if size >= len(labels):
            return _gradients(self.network.losses(inputs, labels, "mean"), self.moving)
        total: list[Tensor] = []
        for start in range(0, len(labels), size):
            part = torch.arange(start, min(start + size, len(labels)))
            loss = self.network.losses(taken(inputs, part), labels[part]).sum() / len(labels)
            found = _gradients(loss, self.moving)
            total = [a + b for a, b in zip(total, found, strict=True)] if total else found
        return total

    def take(self, inputs: tuple[Tensor, ...], labels: Tensor) -> None:
        """A step along the gradient of a batch's loss, or the inner step of a pair."""
        gradients, model = self._gradient(inputs, labels), self.network.model
        with torch.no_grad():
            gradients = self._with_terms(self._clipped(gradients))
            if self.inner_lr is not None and not self.origin:
                self.origin = [parameter.clone() for parameter in self.parameters]
                for parameter, gradient in zip(self.parameters, gradients, strict=True):
                    model.subtract(parameter, gradient, self.inner_lr)
                return
            if self.origin:
                model.write(self.moving, dict(zip(self.moving, self.origin, strict=True)))
                self.origin = []
            for parameter, change in zip(self.parameters, self._changes(gradients), strict=True):
                model.subtract(parameter, change, self.rate)

    def _changes(self, gradients: list[Tensor]) -> list[Tensor]:
        """What is subtracted, before the learning rate."""
        if not self.moments:
            self._accelerate(gradients)
            return self.velocity
        changes = [moment.direction(each) for moment, each in zip(self.moments, gradients, strict=True)]
        pairs = zip(changes, self.moving.items(), strict=True)
        return [change.add_(pulled(n, each), alpha=self.stage.weight_decay) for change, (n, each) in pairs]

    def _clipped(self, gradients: list[Tensor]) -> list[Tensor]:
        """Gradients of at most the norm that the stage allows."""
        if self.stage.clip is None:
            return gradients
        norm = torch.linalg.vector_norm(torch.stack([gradient.norm() for gradient in gradients]))
        factor = (self.stage.clip / norm.clamp(min=1e-12)).clamp(max=1.0)
        return [gradient * factor for gradient in gradients]

    def _with_terms(self, gradients: list[Tensor]) -> list[Tensor]:
        """Gradients with those of weight decay, of the proximal term and of the correction."""
        found = []
        for number, (name, gradient) in enumerate(zip(self.moving, gradients, strict=True)):
            parameter = self.parameters[number]
            if self.stage.weight_decay and not self.moments:
                gradient = gradient.add(pulled(name, parameter), alpha=self.stage.weight_decay)
            if self.proximal:
                gradient = gradient.add(pulled(name, parameter - self.centre[number]), alpha=self.proximal)
            found.append(gradient + self.correction[number] if self.correction else gradient)
        return found

    def _accelerate(self, gradients: list[Tensor]) -> None:
        """The velocity after these gradients; without momentum, the gradients themselves."""
        momentum = self.stage.momentum
        if momentum and self.velocity:
            pairs = zip(self.velocity, gradients, strict=True)
            self.velocity = [before.mul_(momentum).add_(gradient) for before, gradient in pairs]
        else:  # autograd may give two parameters one tensor as their gradient
            self.velocity = [gradient.clone() for gradient in gradients] if momentum else gradients


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


def pulled(name: str, value: Tensor) -> Tensor:
    """What decay and proximal terms pull at: the bias of a masked class is minus infinity, and stays there."""
    return value.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0) if name == "head.bias" else value


def flipped(inputs: tuple[Tensor, ...], which: np.ndarray) -> tuple[Tensor, ...]:
    """Images [B, H, W, 3] with some of them mirrored."""
    (images,) = inputs
    mask = torch.from_numpy(which).view(-1, 1, 1, 1)
    return (torch.where(mask, images.flip(2), images),)
