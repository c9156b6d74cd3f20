"""The heads of a cohort on a device: features, labels and batches go there once a round, and heads come back once.

The same steps as `headstart.solvers.heads` takes with NumPy, for all clients together. Between two steps nothing is
read on the host or sent from there. Clients with fewer batches than others stand still at the end.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headstart.config.stage import Training
from headstart.core.device import to_device, to_host
from headstart.core.params import Params
from headstart.core.statistics import Ints
from headstart.solvers.adam import Moments
from headstart.solvers.cohort import Cohort
from headstart.solvers.objective import LocalResult, Objective

Tensors = dict[str, Tensor]


class DeviceHeads:
    """Heads [M, …] of clients on a device, their examples and batches, and what moves them."""

    def __init__(
        self,
        stage: Training,
        objective: Objective,
        device: torch.device,
        layers: list[str],
        start: Mapping[str, Tensor],
        moves: frozenset[str],
    ) -> None:
        self.stage, self.inner, self.device, self.layers = stage, objective.inner_lr, device, layers
        self.params = self._there(start)
        given = objective.velocity or {}
        self.velocity = self._there({n: given[n] if n in given else torch.zeros(start[n].shape) for n in start})
        self.moves = [name for name in start if name in moves]
        factor = np.broadcast_to(objective.proximal, len(start["head.bias"])).astype(np.float32)
        self.proximal = to_device(factor, device) if factor.any() else None
        centre = objective.centre or start
        self.centre = {} if self.proximal is None else self._there({name: centre[name] for name in self.moves})
        self.correction = self._there(objective.correction or {})
        adam = stage.optimiser == "adamw"
        self.moments = {name: Moments(self.params[name]) for name in self.moves} if adam else {}

    def _there(self, values: Mapping[str, Any]) -> Tensors:
        """Copies on the device."""
        return {name: to_device(np.array(value.numpy(), np.float32), self.device) for name, value in values.items()}

    def descend(self, cohort: Cohort, plans: Sequence[Ints], rate: float) -> Ints:
        """A step on each batch, or on each pair of them; returns how many steps each client took."""
        pairs = 1 if self.inner is None else 2
        taken = np.array([len(plan) // pairs for plan in plans], np.int64)
        features = to_device(np.asarray(cohort.features[cohort.rows], np.float32), self.device)
        place, labels, share, going = self._batches(cohort, plans, taken)
        for step in range(int(taken.max(initial=0))):
            origin, last = self.params, step * pairs + pairs - 1
            if self.inner is not None:
                first = self._gradients(features[place[last - 1]], labels[last - 1], share[last - 1])
                self.params = origin | {name: origin[name] - self.inner * each for name, each in first.items()}
            gradients = self._gradients(features[place[last]], labels[last], share[last])
            self.params = origin
            for name, gradient in gradients.items():
                moving = _wide(going[step], gradient)
                change = self._change(name, gradient, moving) * moving
                self.params[name] = self.params[name].sub(change, alpha=rate)
        return taken

    def _batches(self, cohort: Cohort, plans: Sequence[Ints], taken: Ints) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Of all steps at once: places [S, M, B], labels [S, M, B], shares in the mean loss [S, M, B, 1], and whether
        each client has a step [S, M]."""
        count, width = (max((plan.shape[axis] for plan in plans), default=0) for axis in (0, 1))
        whole = np.full((count, len(plans), width), -1, np.int64)
        for client, plan in enumerate(plans):
            whole[: len(plan), client, : plan.shape[1]] = plan
        present, place = whole >= 0, np.maximum(whole, 0)
        of_batch = np.maximum(present.sum(axis=2, keepdims=True), 1)
        share = (present / (self.stage.known_temperature * of_batch)).astype(np.float32)[..., None]
        going = (np.arange(int(taken.max(initial=0)))[:, None] < taken).astype(np.float32)
        arrays = place, cohort.labels[place], share, going
        return tuple(to_device(array, self.device) for array in arrays)  # type: ignore[return-value]

    def _gradients(self, features: Tensor, labels: Tensor, share: Tensor) -> Tensors:
        """Of each client's objective on its batch [M, B, d]."""
        values, inputs = features, list[Tensor]()
        for layer in self.layers:
            inputs.append(values)
            weight, bias = self.params[f"{layer}.weight"], self.params[f"{layer}.bias"]
            values = torch.baddbmm(bias[:, None], values, weight.transpose(1, 2))
            values = values if layer == "head" else values.relu()
        error = torch.softmax(values / self.stage.known_temperature, dim=2)
        error = error.scatter_add(2, labels[..., None], -torch.ones_like(error[..., :1])) * share
        gradients = Tensors()
        for layer, given in zip(reversed(self.layers), reversed(inputs), strict=True):
            if f"{layer}.weight" in self.moves:
                gradients[f"{layer}.weight"] = error.transpose(1, 2) @ given
            if f"{layer}.bias" in self.moves:
                gradients[f"{layer}.bias"] = error.sum(dim=1)
            if layer != self.layers[0]:
                error = (error @ self.params[f"{layer}.weight"]) * (given > 0)
        if self.stage.clip is not None:
            squares = [each.flatten(1).square().sum(dim=1) for each in gradients.values()]
            factor = (self.stage.clip / torch.stack(squares).sum(dim=0).sqrt().clamp(min=1e-12)).clamp(max=1.0)
            gradients = {name: each * _wide(factor, each) for name, each in gradients.items()}
        return {name: self._with_terms(name, each) for name, each in gradients.items()}

    def _with_terms(self, name: str, gradient: Tensor) -> Tensor:
        """With the gradients of weight decay, of the proximal term and of the correction."""
        value = self.params[name]
        if self.stage.weight_decay and not self.moments:
            gradient = gradient.add(_pulled(name, value), alpha=self.stage.weight_decay)
        if self.proximal is not None:
            gradient = gradient + _wide(self.proximal, gradient) * _pulled(name, value - self.centre[name])
        return gradient + self.correction[name] if self.correction else gradient

    def _change(self, name: str, gradient: Tensor, moving: Tensor) -> Tensor:
        """What is subtracted, before the learning rate; a client without a step keeps its velocity."""
        if self.moments:
            decay = _pulled(name, self.params[name])
            return self.moments[name].direction(gradient).add(decay, alpha=self.stage.weight_decay)
        if not self.stage.momentum:
            return gradient
        velocity = self.velocity[name]
        velocity.add_((velocity * (self.stage.momentum - 1) + gradient) * moving)
        return velocity

    def result(self, steps: Ints) -> LocalResult:
        """Parameters and velocities on the host."""
        params, velocity = (
            Params({name: torch.from_numpy(to_host(value)) for name, value in each.items()})
            for each in (self.params, self.velocity)
        )
        return LocalResult(params, steps, np.zeros_like(steps), velocity)


def _wide(values: Tensor, like: Tensor) -> Tensor:
    """Values [M] shaped to multiply a stack [M, …]."""
    return values.reshape(-1, *([1] * (like.ndim - 1)))


def _pulled(name: str, value: Tensor) -> Tensor:
    """What decay and proximal terms pull at: the bias of a masked class is minus infinity, and stays there."""
    return value.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0) if name == "head.bias" else value
