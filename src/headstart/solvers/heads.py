"""What a client does with a head: SGD over cached features, for many clients at once.

Clients whose batches are as wide take their steps together, one NumPy call for a stack of heads that fits into a core's
cache, and stacks are dealt to as many threads as torch may use, where that is found to be faster. What a client learns
depends neither on who else is in its stack nor on the threads: every client has matrix products of its own, on batches
padded to a width that follows from its own examples.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from threadpoolctl import ThreadpoolController

from headstart.config.stage import Training
from headstart.core.device import accelerator
from headstart.core.params import Params
from headstart.core.statistics import Features, Ints
from headstart.solvers.adam import Moments
from headstart.solvers.cohort import Cohort
from headstart.solvers.device_heads import DeviceHeads
from headstart.solvers.objective import LocalResult, Objective, learning_rate

# What a stack reads and writes in a step: about the second cache of a core.
_STACK_BYTES = 1 << 20
# Where several heads fit, batches are padded to a multiple of so many examples: clients of like sizes share a stack.
_PADDING = 8
# A client's rows that are this much of a range are read in order first, unless that takes longer than a call.
_DENSE, _MUCH_BYTES = 0.75, 64 << 10
# Bytes that memory gives at once.
_LINE = 64
# How often one and several threads are measured.
_TRIALS = 2
# Several threads are to take this share of one thread's time at most: on a busy machine a trial may be lucky.
_CLEARLY = 0.85

Values = npt.NDArray[np.float32]
Stacked = dict[str, Values]
"""Arrays [m, …] by the names of parameters, for some of the clients."""
Who = slice | Ints
"""Which clients of a cohort; of a slice, arrays are views."""
Batch = tuple[Values, Ints, Values]
"""Features [m, B, d], the places [m, B] of the right classes in scores [m, C, B] that lie flat, and the share of each
example in the mean loss [m, 1, B]."""
Stack = tuple[Who, Ints, tuple[int, ...]]
"""Clients [m], their batches [m, S, B] as places in the cohort's examples, padded with -1, and the width of each."""


class HeadSolver:
    """Local SGD on the heads of a cohort, over features that were computed once."""

    def __init__(self, stage: Training, seed: tuple[int, ...], trained: Iterable[str]) -> None:
        self.stage, self.seed, self.trained = stage, seed, frozenset(trained)
        self._pace = Pace()

    def __call__(self, start: Params, cohort: Cohort, round: int, objective: Objective) -> LocalResult:
        """start: stacked parameters [M, …] of the heads."""
        plans = batches(cohort, self.stage, round, self.seed, objective)
        moves = self.trained if objective.trains is None else objective.trains & self.trained
        rate = learning_rate(self.stage, round)
        if (device := accelerator()) is not None:
            there = DeviceHeads(self.stage, objective, device, layers_of(list(start)), start, moves)
            return there.result(there.descend(cohort, plans, rate))
        own = frozenset[str]() if np.any(objective.proximal) else objective.in_place
        params = {name: value.numpy() if name in own else value.numpy().copy() for name, value in start.items()}
        given = objective.velocity or {}
        velocity = {n: given[n].numpy() if n in given else np.zeros(v.shape, np.float32) for n, v in params.items()}
        steps = np.zeros(len(plans), np.int64)
        classes = params["head.bias"].shape[1]

        def train(stack: Stack) -> None:
            who, plan, widths = stack
            heads = _Heads(self.stage, objective, objective.centre or start, params, velocity, moves, who)
            steps[who] = heads.descend(_read(cohort, plan, widths, self.stage, classes), len(widths), rate)
            if not isinstance(who, slice):
                for everybody, theirs in ((params, heads.params), (velocity, heads.velocity)):
                    for name, value in theirs.items():
                        everybody[name][who] = value

        size, work = sum(value[0].size for value in params.values()), sum(plan.size for plan in plans)
        threads, start_time = self._pace.threads(max(1, min(torch.get_num_threads(), len(plans)))), time.perf_counter()
        _in_parallel(train, list(_stacks(plans, cohort.features.shape[1], size, threads)), threads)
        self._pace.note(threads, (time.perf_counter() - start_time) / max(work, 1))
        made = (Params({name: torch.from_numpy(v) for name, v in each.items()}) for each in (params, velocity))
        return LocalResult(next(made), steps, np.zeros_like(steps), next(made))


class Pace:
    """Whether several threads are faster than one, by what was measured: they wait for each other between any two
    calls of NumPy, which is longer than short calls take on some machines. Results do not depend on it."""

    def __init__(self) -> None:
        self._seconds: dict[int, list[float]] = {}

    def threads(self, most: int) -> int:
        """One or ``most``: each for its trials at first, in turns, then one unless several were clearly faster."""
        tried = {count: self._seconds.get(count, []) for count in {1, most}}
        fewest = min(tried, key=lambda count: (len(tried[count]), count))
        if len(tried[fewest]) < _TRIALS:
            return fewest
        return most if min(tried[most]) < _CLEARLY * min(tried[1]) else 1

    def note(self, threads: int, seconds: float) -> None:
        """How long a piece of work took."""
        taken = self._seconds.setdefault(threads, [])
        if len(taken) < _TRIALS:
            taken.append(seconds)


class _Heads:
    """The heads of a stack of clients [m], and what moves them."""

    def __init__(
        self,
        stage: Training,
        objective: Objective,
        centre: Mapping[str, Any],
        params: Stacked,
        velocity: Stacked,
        moves: frozenset[str],
        who: Who,
    ) -> None:
        self.stage, self.inner, self.layers = stage, objective.inner_lr, layers_of(list(params))
        self.params = {name: value[who] for name, value in params.items()}
        self.velocity = {name: velocity[name][who] for name in params if name in moves}
        factor = np.broadcast_to(objective.proximal, len(params["head.bias"])).astype(np.float32)[who]
        self.proximal = factor if factor.any() else None
        self.centre = {} if self.proximal is None else {name: centre[name].numpy()[who] for name in self.velocity}
        correction = objective.correction or {}
        self.correction = {name: value.numpy()[who] for name, value in correction.items()}
        self.moments = (
            {name: Moments(torch.from_numpy(self.params[name])) for name in self.velocity}
            if stage.optimiser == "adamw"
            else {}
        )

    def descend(self, read: Iterator[Batch], count: int, rate: float) -> int:
        """Take a step on each of so many batches, or on each pair of them; returns how many steps there were."""
        count = count if self.inner is None else count // 2
        with np.errstate(all="ignore"):  # what diverges is refused where it arrives
            for _, batch in zip(range(count), read, strict=False):
                origin = self.params
                if self.inner is not None:
                    there = {name: origin[name] - self.inner * g for name, g in self._gradients(batch).items()}
                    self.params = origin | there
                    batch = next(read)
                gradients, self.params = self._gradients(batch), origin
                self._step(gradients, np.float32(rate))
        return count

    def _step(self, gradients: Stacked, rate: np.float32) -> None:
        """Move along the gradients, whose memory is used."""
        for name, gradient in gradients.items():
            self.params[name] -= np.multiply(self._change(name, gradient), rate, out=gradient)

    def _gradients(self, batch: Batch) -> Stacked:
        """Of each client's objective on its batch."""
        features, right, share = batch
        scores, inputs = self._forward(features)
        gradients = self._backward(_errors(scores, right, share, self.stage.known_temperature), inputs)
        if self.stage.clip is not None:
            _clip(gradients, self.stage.clip)
        for name, gradient in gradients.items():
            self._add_terms(name, gradient)
        return gradients

    def _forward(self, features: Values) -> tuple[Values, list[Values]]:
        """Scores [m, C, B], and what each layer was given."""
        values, inputs = features.transpose(0, 2, 1), list[Values]()
        for layer in self.layers:
            inputs.append(values)
            values = self.params[f"{layer}.weight"] @ values  # [m, outputs, B]
            values += self.params[f"{layer}.bias"][:, :, None]
            values = values if layer == "head" else np.maximum(values, 0, out=values)
        return values, inputs

    def _backward(self, error: Values, inputs: list[Values]) -> Stacked:
        """Gradients of what moves; error [m, C, B]: that of the scores."""
        gradients = {}
        for layer, given in zip(reversed(self.layers), reversed(inputs), strict=True):
            if f"{layer}.weight" in self.velocity:
                gradients[f"{layer}.weight"] = error @ given.transpose(0, 2, 1)
            if f"{layer}.bias" in self.velocity:
                gradients[f"{layer}.bias"] = error.sum(axis=2)
            if layer != self.layers[0]:
                error = self.params[f"{layer}.weight"].transpose(0, 2, 1) @ error
                error *= given > 0
        return gradients

    def _add_terms(self, name: str, gradient: Values) -> None:
        """Add the gradients of weight decay, of the proximal term and of the correction."""
        value = self.params[name]
        if self.stage.weight_decay and not self.moments:
            gradient += np.float32(self.stage.weight_decay) * _pulled(name, value)
        if self.proximal is not None:
            gradient += _wide(self.proximal, gradient) * _pulled(name, value - self.centre[name])
        if self.correction:
            gradient += self.correction[name]

    def _change(self, name: str, gradient: Values) -> Values:
        """What is subtracted, before the learning rate."""
        if self.moments:
            change: Values = self.moments[name].direction(torch.from_numpy(gradient)).numpy()
            change += np.float32(self.stage.weight_decay) * _pulled(name, self.params[name])
            return change
        if not self.stage.momentum:
            return gradient
        velocity = self.velocity[name]
        velocity *= np.float32(self.stage.momentum)
        velocity += gradient
        return velocity


def _read(cohort: Cohort, plan: Ints, widths: tuple[int, ...], stage: Training, classes: int) -> Iterator[Batch]:
    """The batches of a plan [m, S, B], one after the other in the same memory."""
    source, clients = cohort.features, len(plan)
    present = plan >= 0
    place = np.where(present, plan, plan[:, :1, :1])  # padding is an example of the client that counts nothing
    rows, labels = cohort.rows.take(place), cohort.labels.take(place)
    shares = present * (1 / (stage.known_temperature * present.sum(axis=2, keepdims=True))).astype(np.float32)
    first, within = classes * np.arange(clients)[:, None, None] + labels, np.arange(plan.shape[2])
    right = {width: first * width + within for width in set(widths)}
    memory = np.empty((clients * max(widths, default=0), source.shape[1]), np.float32)
    _read_in_order(source, rows)
    for step, width in enumerate(widths):
        features, chosen = memory[: clients * width], rows[:, step, :width].reshape(-1)
        _gather(source, chosen, features)
        yield features.reshape(clients, width, -1), right[width][:, step, :width], shares[:, None, step, :width]


def _read_in_order(source: Features, rows: Ints) -> None:
    """Bring the rows [m, S, B] of clients into the caches, where each client's are next to each other: memory gives
    them in order at several times the speed that it gives them one by one."""
    size = source.dtype.itemsize * source.shape[1]
    if not _MUCH_BYTES <= rows[0].size * size <= 2 * _STACK_BYTES:
        return
    for each in rows:
        first, last = int(each.min()), int(each.max()) + 1
        if _DENSE * (last - first) <= each.size:
            source[first:last, :: _LINE // source.dtype.itemsize].max()


def _gather(source: Features, rows: Ints, out: Values) -> None:
    """Rows [n] of features, in float32."""
    if source.dtype == np.float32:
        np.take(source, rows, axis=0, out=out, mode="clip")  # checked indices would be copied once more
    else:
        out[...] = source[rows]


def _stacks(plans: Sequence[Ints], dim: int, size: int, threads: int) -> Iterator[Stack]:
    """Clients with batches of the same padded widths; size: of a head, in numbers."""
    alike = dict[tuple[int, ...], list[int]]()

    def fitting(widest: int) -> int:
        return _STACK_BYTES // (4 * (widest * dim + size))

    for client, plan in enumerate(plans):
        counts = (plan >= 0).sum(axis=1)
        multiple = _PADDING if fitting(counts.max(initial=0)) > 1 else 1
        alike.setdefault(tuple((-(-counts[counts > 0] // multiple) * multiple).tolist()), []).append(client)
    for widths, members in alike.items():
        widest = max(widths, default=0)
        most = max(1, min(fitting(widest), -(-len(members) // threads)))
        for start in range(0, len(members), most):
            who = np.array(members[start : start + most])
            stack = np.full((len(who), len(widths), widest), -1, np.int64)
            for row, client in zip(stack, who, strict=True):
                plan = plans[client][: len(widths), :widest]
                row[:, : plan.shape[1]] = plan
            together = who[-1] - who[0] == len(who) - 1
            yield (slice(int(who[0]), int(who[-1]) + 1) if together else who), stack, widths


def _in_parallel(work: Callable[[Stack], None], stacks: list[Stack], threads: int) -> None:
    """Every stack on one thread, matrix products included."""
    with _libraries().limit(limits=1, user_api="blas"):
        if min(threads, len(stacks)) <= 1:
            for stack in stacks:
                work(stack)
            return
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(work, stacks))


@cache
def _libraries() -> ThreadpoolController:
    """The libraries of this process that have threads of their own; looking for them takes milliseconds."""
    return ThreadpoolController()


def _errors(scores: Values, right: Ints, share: Values, temperature: float) -> Values:
    """The gradients of the loss in the place of the scores [m, C, B]: probabilities less the right class, by share."""
    if temperature != 1:
        scores /= np.float32(temperature)
    scores -= np.maximum.reduce(scores, axis=1, keepdims=True)
    np.exp(scores, out=scores)
    scores /= np.add.reduce(scores, axis=1, keepdims=True)
    scores.reshape(-1)[right] -= 1
    scores *= share
    return scores


def _clip(gradients: Stacked, largest: float) -> None:
    """Scale each client's gradient down to the largest norm allowed, in place."""
    squares = [np.square(gradient).reshape(len(gradient), -1).sum(axis=1) for gradient in gradients.values()]
    factor = np.minimum(largest / np.maximum(np.sqrt(sum(squares)), 1e-12), 1).astype(np.float32)
    for gradient in gradients.values():
        gradient *= _wide(factor, gradient)


def _pulled(name: str, value: Values) -> Values:
    """What decay and proximal terms pull at: the bias of a masked class is minus infinity, and stays there."""
    return np.where(np.isfinite(value), value, np.float32(0)) if name == "head.bias" else value


def _wide(values: Values, like: Values) -> Values:
    """Values [m] shaped to multiply a stack [m, …]."""
    return values.reshape(-1, *([1] * (like.ndim - 1)))


def layers_of(names: list[str]) -> list[str]:
    """Layers of a head, from the features to the scores: hidden ones by number, then the linear one."""
    return sorted({name.rpartition(".")[0] for name in names}, key=lambda layer: (layer == "head", layer))


def batches(
    cohort: Cohort,
    stage: Training,
    round: int,
    seed: tuple[int, ...],
    objective: Objective = Objective(),  # noqa: B008
) -> list[Ints]:
    """Of each client its batches [S, B], as places in the cohort's examples, padded with -1."""
    plans = []
    starts = np.searchsorted(cohort.owners, cohort.clients)
    sizes = np.searchsorted(cohort.owners, cohort.clients, side="right") - starts
    pairs = objective.inner_lr is not None  # a pair has two batches
    for client, start, size in zip(cohort.clients.tolist(), starts.tolist(), sizes.tolist(), strict=True):
        rng = np.random.default_rng([0xBA7C, *seed, round, client, objective.phase])
        whole = -(-size // 2) if pairs else size
        width = whole if stage.batch_size == "full" else min(stage.batch_size, whole)
        per_epoch = -(-size // width)
        steps = (1 + pairs) * stage.local_steps if stage.local_steps else per_epoch * (stage.local_epochs or 1)
        steps = steps if objective.epochs is None else per_epoch * objective.epochs
        epochs = -(-steps // per_epoch)
        plan = np.full((epochs, per_epoch * width), -1, np.int64)
        for epoch in plan:  # a batch of all examples needs no order, and its sums do not depend on the client's number
            epoch[:size] = start + (rng.permutation(size) if per_epoch > 1 else np.arange(size))
        plans.append(plan.reshape(-1, width)[:steps])
    return plans
