"""What a client does with a head: SGD over cached features, for many clients at once.

The heads of a cohort are stacked, and every step is one batched matrix product. Clients of different sizes take
different numbers of steps, and their last batch may be short: padding is masked out of the loss, and a client that has
no step left does not move. A cohort of one client is the same code.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional

from headstart.config.stage import Training
from headstart.core.params import Params
from headstart.core.statistics import Features
from headstart.solvers.adam import Moments
from headstart.solvers.cohort import Cohort
from headstart.solvers.objective import LocalResult, Objective, learning_rate


class HeadSolver:
    """Local SGD on the stacked heads of a cohort, over features that were computed once."""

    def __init__(self, stage: Training, seed: tuple[int, ...], trained: Iterable[str]) -> None:
        self.stage, self.seed, self.trained = stage, seed, frozenset(trained)

    def __call__(self, start: Params, cohort: Cohort, round: int, objective: Objective) -> LocalResult:
        """start: stacked parameters [M, …] of the heads."""
        stage, rate = self.stage, learning_rate(self.stage, round)
        # [M, S, B], -1 where there is no example
        index = torch.from_numpy(batches(cohort, stage, round, self.seed, objective))
        source, rows, labels = _shared(cohort.features), torch.from_numpy(cohort.rows), torch.from_numpy(cohort.labels)
        parameters = Params({name: value.clone() for name, value in start.items()})
        moves = self.trained if objective.trains is None else objective.trains & self.trained
        velocity = Params({n: torch.zeros_like(value) for n, value in start.items()}) | (objective.velocity or {})
        centre, proximal = objective.centre or start, _by_client(objective.proximal, len(cohort.clients))
        inner, origin = objective.inner_lr, parameters
        moments = {name: Moments(start[name]) for name in moves} if stage.optimiser == "adamw" else {}
        for step in range(index.shape[1] if inner is None else index.shape[1] // 2 * 2):
            present, batch = index[:, step] >= 0, index[:, step].clamp(min=0)
            active = present.any(dim=1)
            features = functional.embedding(rows[batch], source).float()  # [M, B, d]; faster than an index
            gradients = _gradients(parameters, features, labels[batch], present, stage)
            gradients = gradients.select(name for name in gradients if name in moves)
            if stage.clip is not None:
                clip_norms(gradients, stage.clip)
            for name, gradient in gradients.items():
                if stage.weight_decay and not moments:
                    gradient += stage.weight_decay * pulled(name, parameters[name])
                if proximal is not None:
                    gradient += wide(proximal, gradient) * pulled(name, parameters[name] - centre[name])
                if objective.correction is not None:
                    gradient += objective.correction[name]
            if inner is not None and step % 2 == 0:
                origin = parameters
                parameters = origin | {name: origin[name] - inner * gradient for name, gradient in gradients.items()}
                continue
            parameters = Params(origin) if inner is not None else parameters
            for name, gradient in gradients.items():
                moving = wide(active, gradient)
                if moments:
                    change = moments[name].direction(gradient)
                    change += stage.weight_decay * pulled(name, parameters[name])
                    parameters[name] = torch.where(moving, parameters[name] - rate * change, parameters[name])
                    continue
                velocity[name] = torch.where(moving, stage.momentum * velocity[name] + gradient, velocity[name])
                parameters[name] = torch.where(moving, parameters[name] - rate * velocity[name], parameters[name])
        if inner is not None:
            index = index[:, 1::2]
        steps = (index >= 0).any(dim=2).sum(dim=1).numpy().astype(np.int64)
        return LocalResult(parameters, steps, np.zeros_like(steps), velocity)


def _by_client(factor: float | np.ndarray, clients: int) -> Tensor | None:
    """A factor for each client [M], in float32; None where they are all zero."""
    if not np.any(factor):
        return None
    return torch.from_numpy(np.broadcast_to(factor, clients).astype(np.float32))


def _shared(features: Features) -> Tensor:
    """Features as a tensor on the same memory, which is only read."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch would rather have memory that it may write to
        return torch.from_numpy(features)


def layers_of(names: list[str]) -> list[str]:
    """Layers of a head, from the features to the scores: hidden ones by number, then the linear one."""
    return sorted({name.rpartition(".")[0] for name in names}, key=lambda layer: (layer == "head", layer))


def _gradients(parameters: Params, features: Tensor, labels: Tensor, present: Tensor, stage: Training) -> Params:
    """Gradients of the mean cross-entropy of each client's batch; features: [M, B, d], labels, present: [M, B]."""
    layers, inputs, values = layers_of(list(parameters)), [], features
    for layer in layers:
        inputs.append(values)
        weight, bias = parameters[f"{layer}.weight"], parameters[f"{layer}.bias"]
        values = torch.baddbmm(bias.unsqueeze(1), values, weight.transpose(1, 2))
        values = values if layer == "head" else values.relu_()
    error = functional.softmax(values / stage.known_temperature, dim=2)
    error -= functional.one_hot(labels, error.shape[2])
    share = present / (stage.known_temperature * present.sum(dim=1, keepdim=True).clamp(min=1))
    error *= share.unsqueeze(2)
    gradients = Params()
    for layer, given in zip(reversed(layers), reversed(inputs), strict=True):
        gradients[f"{layer}.weight"] = torch.bmm(error.transpose(1, 2), given)
        gradients[f"{layer}.bias"] = error.sum(dim=1)
        if layer != layers[0]:
            error = torch.bmm(error, parameters[f"{layer}.weight"]) * (given > 0)
    return gradients


def clip_norms(vectors: Mapping[str, Tensor], largest: float) -> None:
    """Scale each client's gradient, or update, down to the largest norm allowed, in place."""
    squares = [vector.flatten(1).square().sum(dim=1) for vector in vectors.values()]
    norms = torch.stack(squares).sum(dim=0).sqrt()
    factor = (largest / norms.clamp(min=1e-12)).clamp(max=1.0)
    for vector in vectors.values():
        vector *= wide(factor, vector)


def pulled(name: str, value: Tensor) -> Tensor:
    """What decay and proximal terms pull at: the bias of a masked class is minus infinity, and stays there."""
    return value.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0) if name == "head.bias" else value


def wide(values: Tensor, like: Tensor) -> Tensor:
    """Values [M] shaped to multiply a stack [M, …]."""
    return values.view(-1, *([1] * (like.dim() - 1)))


def batches(
    cohort: Cohort,
    stage: Training,
    round: int,
    seed: tuple[int, ...],
    objective: Objective = Objective(),  # noqa: B008
) -> npt.NDArray[np.int64]:
    """Positions in the cohort's examples [M, S, B] of every batch of every client, padded with -1."""
    plans = []
    starts = np.searchsorted(cohort.owners, cohort.clients)
    sizes = np.searchsorted(cohort.owners, cohort.clients, side="right") - starts
    for client, start, size in zip(cohort.clients, starts, sizes, strict=True):
        rng = np.random.default_rng([0xBA7C, *seed, round, int(client), objective.phase])
        whole = int(size) if objective.inner_lr is None else -(-int(size) // 2)  # a pair has two batches
        width = whole if stage.batch_size == "full" else min(stage.batch_size, whole)
        per_epoch = -(-int(size) // width)
        each = 1 if objective.inner_lr is None else 2  # batches of a step
        steps = each * stage.local_steps if stage.local_steps else per_epoch * (stage.local_epochs or 1)
        steps = steps if objective.epochs is None else per_epoch * objective.epochs
        epochs = [
            np.pad(start + rng.permutation(size), (0, per_epoch * width - size), constant_values=-1)
            for _ in range(-(-steps // per_epoch))
        ]
        plans.append(np.concatenate([*epochs, np.zeros(0, np.int64)]).astype(np.int64).reshape(-1, width)[:steps])
    longest, widest = (max(plan.shape[axis] for plan in plans) for axis in (0, 1))
    batches = np.full((len(plans), longest, widest), -1, np.int64)
    for row, plan in zip(batches, plans, strict=True):
        row[: plan.shape[0], : plan.shape[1]] = plan
    return batches
