"""Zeroth-order tuning: the slope of the loss along a direction, from two forward passes, and a step along it.

No second model and no gradient: a layer's parameters are perturbed when its turn in the forward pass comes and are
back, bit for bit, when it is over. Beyond inference this needs the memory of the largest layer, and of the directions
where they are small.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from headstart.backbones import Backbone, evaluating, run_body, some
from headstart.core.params import Params
from headstart.core.statistics import Ints
from headstart.errors import HeadstartError
from headstart.solvers.cohort import Cohort
from headstart.solvers.directions import direction, signs
from headstart.solvers.network import Network
from headstart.solvers.objective import LocalResult, Objective, learning_rate

# Bytes of directions that are kept between two passes.
_ROOM = 64 << 20
# Examples in a forward pass: as many as stay small beside the weights, since the direction is drawn anew for each pass.
# Of completions, every token is weighed against the whole vocabulary.
BATCHES = {"image": 32, "text": 256, "completions": 16, "features": 8192}


class _Reads(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the names of parameters that an operation reads while they are not perturbed; all of them by identity."""

    def __init__(self, names: Mapping[int, str], perturbed: set[int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names, self.perturbed = names, perturbed
        self.unperturbed: set[str] = set()

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """The operation as it is."""
        read = {id(value) for value in tree_leaves((args, kwargs))} - self.perturbed
        self.unperturbed |= {self.names[each] for each in read & self.names.keys()}
        return operation(*args, **(kwargs or {}))


class ZerothOrder:
    """A network that is probed and moved along directions."""

    def __init__(self, network: Network, epsilon: float) -> None:
        self.network, self.epsilon = network, epsilon
        self._names = {id(parameter): name for name, parameter in network.trained.items()}
        self._velocity: dict[str, Tensor] = {}
        self._seed, self._drawn = -1, dict[tuple[int, str], Tensor]()
        """The directions of the last seed, by number and name, where there is room for all of them."""
        stage: Any = network.stage
        self._signs = stage.perturbation == "rademacher"
        size = sum(parameter.numel() for parameter in network.trained.values()) * stage.num_directions
        self._has_room = (size // 8 if self._signs else 4 * size) <= _ROOM
        if network.backbone:
            self._check(network.backbone)

    @torch.inference_mode()
    def _check(self, backbone: Backbone) -> None:
        """Refuse a backbone that reads trained parameters while they are not perturbed: slopes would not see them."""
        with (
            evaluating(backbone.body),
            self._perturbed(0, 0, self.epsilon) as perturbed,
            _Reads(self._names, perturbed) as reads,
        ):
            run_body(backbone.body, backbone.sample())
        if reads.unperturbed:
            raise HeadstartError(
                f"{self.network.stage.method} cannot probe {some(sorted(reads.unperturbed))} of {backbone.name}, which "
                "reads the weights of these layers without calling them; train 'head' or 'adapter', or use a method "
                "with gradients, such as fedavg"
            )

    def slopes(self, cohort: Cohort, rows: Ints, seed: int, number: int) -> npt.NDArray[np.float64]:
        """(L(θ + εz) − L(θ − εz)) / 2ε of each example [n]; rows: [n] positions in the cohort's examples."""
        return self._combined(cohort, rows, (seed, number), {1: 1, -1: -1}) / (2 * self.epsilon)

    def bends(self, cohort: Cohort, rows: Ints, seed: int, number: int) -> npt.NDArray[np.float64]:
        """(L(θ + εz) − 2 L(θ) + L(θ − εz)) / 2ε of each example [n]: times 2/ε, the curvature along z."""
        return self._combined(cohort, rows, (seed, number), {1: 1, -1: 1, 0: -2}) / (2 * self.epsilon)

    @torch.inference_mode()
    def _combined(
        self, cohort: Cohort, rows: Ints, which: tuple[int, int], factors: Mapping[int, int]
    ) -> npt.NDArray[np.float64]:
        """Σ factor · L(θ + sign · εz) of each example [n]; which: the seed and the number of the direction."""
        self.network.model.set_mode(False, "freeze")
        order = rows if isinstance(cohort.source, np.ndarray) else rows[cohort.inputs.by_length(cohort.rows[rows])]
        kind = self.network.backbone.kind if self.network.backbone else "features"
        size = BATCHES["completions" if self.network.generates else kind]
        groups = np.split(order, range(size, len(order), size))
        total = np.zeros(len(cohort.rows))
        for group, batch in zip(groups, _batches(cohort, groups), strict=True):
            labels = torch.from_numpy(cohort.labels[group]).to(self.network.device)
            for sign, factor in factors.items():
                with self._perturbed(*which, sign * self.epsilon) if sign else nullcontext():
                    losses = self.network.losses(batch, labels)
                total[group] += factor * losses.double().cpu().numpy()
        return total[rows]

    @torch.no_grad()
    def step(
        self, seed: int, slopes: npt.NDArray[np.float32], rate: float, decay: float = 0.0, momentum: float = 0.0
    ) -> None:
        """v ← momentum · v + η Σ_p g_p z_p / P; θ ← θ − v − η · decay · θ, in float32, rounded alike everywhere."""
        for name, parameter in self.network.trained.items():
            if decay:
                self.network.model.subtract(parameter, parameter * np.float32(rate * decay).item())
            velocity = self._velocity.get(name)
            if momentum:
                self._velocity[name] = velocity = (
                    torch.zeros_like(parameter) if velocity is None else velocity.mul_(np.float32(momentum).item())
                )
            for number, slope in enumerate(slopes):
                factor = np.float32(rate * float(slope) / len(slopes)).item()
                change = self._along(seed, number, name, parameter, factor)
                if velocity is None:
                    self.network.model.subtract(parameter, change)
                else:
                    velocity.add_(change)
            if velocity is not None:
                self.network.model.subtract(parameter, velocity)

    def rest(self) -> None:
        """Forget the velocity of earlier steps."""
        self._velocity.clear()

    def _along(self, seed: int, number: int, name: str, parameter: Tensor, factor: float) -> Tensor:
        """A direction times a factor; drawn once for all batches, both signs and the step where there is room."""
        if seed != self._seed:
            self._seed, self._drawn = seed, {}
        found, size = self._drawn.get((number, name)), parameter.numel()
        if found is None:
            drawn = (signs if self._signs else direction)(seed, number, name, size)
            found = torch.from_numpy(drawn).to(parameter.device)
            if self._has_room:
                self._drawn[number, name] = found
        if self._signs:
            return self._signed(found, factor)[:size].view(parameter.shape)
        scaled = found.mul(factor) if self._has_room else found.mul_(factor)
        return scaled.view(parameter.shape)

    def _signed(self, packed: Tensor, factor: float) -> Tensor:
        """Packed signs [n] → plus and minus the factor [8 n], eight of them at a time."""
        byte = torch.arange(256, device=packed.device)[:, None]
        table = torch.where(byte >> torch.arange(8, device=packed.device) & 1 == 1, factor, -factor).float()
        return functional.embedding(packed.int(), table).flatten()

    @contextmanager
    def _perturbed(self, seed: int, number: int, epsilon: float) -> Iterator[set[int]]:
        """Parameters of a layer are θ + εz while the layer computes, θ before and after; gives the perturbed, by id."""
        found: dict[int, list[tuple[nn.Parameter, Tensor]]] = {}
        perturbed: set[int] = set()
        model = self.network.model

        def own(module: nn.Module) -> list[tuple[nn.Parameter, str]]:
            parts = [module]
            if isinstance(module, nn.MultiheadAttention):  # it reads this layer's parameters and never calls the layer
                parts.append(module.out_proj)
            parameters = [parameter for part in parts for parameter in part.parameters(recurse=False)]
            return [(p, self._names[id(p)]) for p in parameters if id(p) in self._names]

        def perturb(key: int, pairs: list[tuple[nn.Parameter, str]]) -> None:
            found[key] = [(parameter, parameter.data) for parameter, _ in pairs]
            for parameter, name in pairs:
                moved = self._along(seed, number, name, parameter, epsilon).add_(parameter.data)
                model.substitute(parameter, moved)

        def restore(key: int) -> None:
            for parameter, original in found.pop(key, []):
                model.substitute(parameter, original)
                perturbed.discard(id(parameter))

        def before(module: nn.Module, inputs: Any) -> None:
            perturbed.update(id(parameter) for parameter, _ in own(module))
            perturb(id(module), own(module))

        def after(module: nn.Module, inputs: Any, output: Any) -> None:
            restore(id(module))

        body = model.backbone.body if model.backbone else nn.Identity()
        layers = [module for module in body.modules() if own(module)]
        handles = [layer.register_forward_pre_hook(before) for layer in layers]
        handles += [layer.register_forward_hook(after, always_call=True) for layer in layers]
        try:
            perturb(id(self), [(p, n) for n, p in self.network.trained.items() if n.startswith("head.")])
            yield perturbed
        finally:
            for key in list(found):  # the head, and after an interrupt, which does not wait for hooks, a layer
                restore(key)
            for handle in handles:
                handle.remove()


def _batches(cohort: Cohort, groups: list[Ints]) -> Iterator[tuple[Tensor, ...]]:
    """What the backbone, or the head on cached features, reads for each group of positions."""
    if isinstance(cohort.source, np.ndarray):
        for group in groups:
            yield (torch.from_numpy(np.asarray(cohort.features[cohort.rows[group]], np.float32)),)
    else:
        yield from cohort.inputs.batches(cohort.rows[group] for group in groups)


class ZerothSolver:
    """Local MeZO steps of one client at a time, on batches of its own."""

    def __init__(self, network: Network, stage: Any, seed: tuple[int, ...]) -> None:
        self.network, self.stage, self.seed = network, stage, seed
        self.model = ZerothOrder(network, stage.epsilon)

    def __call__(self, start: Params, cohort: Cohort, round: int, objective: Objective) -> LocalResult:
        """start: parameters [1, …]; the cohort is one client."""
        stage, rate = self.stage, learning_rate(self.stage, round)
        (client,) = cohort.clients
        self.network.load({name: value[0] for name, value in start.items()})
        rng = np.random.default_rng([0xD157, *self.seed, round, int(client)])
        size = len(cohort.rows)
        count = size if stage.batch_size == "full" else min(stage.batch_size, size)
        for _ in range(stage.local_steps):
            rows, seed = np.sort(rng.permutation(size)[:count]), int(rng.integers(2**31))
            slopes = [self.model.slopes(cohort, rows, seed, n).mean() for n in range(stage.num_directions)]
            self.model.step(seed, np.array(slopes, np.float32), rate, stage.weight_decay)
        trained = {name: parameter.detach().cpu()[None].clone() for name, parameter in self.network.trained.items()}
        steps = np.array([stage.local_steps])
        return LocalResult(Params(trained), steps, 2 * stage.num_directions * count * steps, Params())
