"""Zeroth-order tuning: the slope of the loss along a direction, from two forward passes, and a step along it.

No second model and no gradient: a layer's parameters are perturbed when its turn in the forward pass comes and are
back, bit for bit, when it is over. Beyond inference this needs the memory of the largest layer, and of the directions
where they are small.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from headstart.backbones import Backbone, evaluating, rows_read, run_body, some
from headstart.core.params import Params
from headstart.core.statistics import Ints
from headstart.errors import HeadstartError
from headstart.solvers.cohort import Cohort
from headstart.solvers.network import Network
from headstart.solvers.objective import LocalResult, Objective, learning_rate
from headstart.solvers.perturbation import Perturbation

# Examples in a forward pass at most: as many as stay small beside the weights, since the direction is drawn anew for
# each pass. Of completions, every token is weighed against the whole vocabulary.
BATCH_SIZES = {"image": 32, "text": 256, "completions": 16, "features": 8192}
# Tokens of padding that a forward pass more has to save. Drawing a direction anew takes a CPU as long as 60 tokens of
# SmolLM2 do, and a GPU as long as many thousands.
PASS_COST, _PASS_COST_BESIDE_GPU = 128, 1 << 16


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


class ZerothOrderProbe:
    """Measures slopes and curvatures of a network's loss along directions."""

    def __init__(self, network: Network, epsilon: float) -> None:
        self.network, self.epsilon = network, epsilon
        self.perturbation = Perturbation(network.trained, network.stage)
        self._names = {id(parameter): name for name, parameter in network.trained.items()}
        self._spare = defaultdict[int, list[Tensor]](list)
        """Memory of perturbed parameters, by its size, for the next layer: new memory costs as much as the addition."""
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

    def curvatures(self, cohort: Cohort, rows: Ints, seed: int, number: int) -> npt.NDArray[np.float64]:
        """(L(θ + εz) − 2 L(θ) + L(θ − εz)) / 2ε of each example [n]: times 2/ε, the curvature along z."""
        return self._combined(cohort, rows, (seed, number), {1: 1, -1: 1, 0: -2}) / (2 * self.epsilon)

    @torch.inference_mode()
    def _combined(
        self, cohort: Cohort, rows: Ints, which: tuple[int, int], factors: Mapping[int, int]
    ) -> npt.NDArray[np.float64]:
        """Σ factor · L(θ + sign · εz) of each example [n]; which: the seed and the number of the direction."""
        self.network.model.set_mode(False, "freeze")
        groups = self.groups(cohort, rows)
        total = np.zeros(len(cohort.rows))
        for group, batch in zip(groups, _batches(cohort, groups), strict=True):
            labels = torch.from_numpy(cohort.labels[group]).to(self.network.device)
            for sign, factor in factors.items():
                with self._perturbed(*which, sign * self.epsilon) if sign else nullcontext():
                    losses = self.network.losses(batch, labels)
                total[group] += factor * losses.double().cpu().numpy()
        self._spare.clear()
        return total[rows]

    def groups(self, cohort: Cohort, rows: Ints) -> list[Ints]:
        """The rows of each forward pass."""
        kind = self.network.backbone.kind if self.network.backbone else "features"
        most = BATCH_SIZES["completions" if self.network.generates else kind]
        if isinstance(cohort.source, np.ndarray):
            return np.split(rows, range(most, len(rows), most))
        pass_cost = PASS_COST if self.network.device.type == "cpu" else _PASS_COST_BESIDE_GPU
        return [rows[group] for group in cohort.inputs.groups(cohort.rows[rows], most, pass_cost)]

    def _moved(
        self, which: tuple[int, int], name: str, parameter: Tensor, epsilon: float, rows: Tensor | None
    ) -> Tensor:
        """θ + εz in memory of its own; where a layer reads some rows alone, whatever there was in the others."""
        spare = self._spare[parameter.numel()]
        found = spare.pop() if spare else torch.empty(parameter.numel(), device=parameter.device)
        values = parameter.data.reshape(-1)
        if rows is not None:
            some = self.perturbation.rows(*which, name, parameter, epsilon, rows)
            width = some.shape[1]
            found.view(-1, width).index_copy_(0, rows, some.add_(values.view(-1, width)[rows]))
        else:
            self.perturbation.add(*which, name, epsilon, values, found)
        return found.view(parameter.shape)

    def _own(self, module: nn.Module) -> list[tuple[nn.Parameter, str]]:
        """The trained parameters that a layer reads itself, with their names."""
        parts = [module]
        if isinstance(module, nn.MultiheadAttention):  # it reads this layer's parameters and never calls the layer
            parts.append(module.out_proj)
        parameters = [parameter for part in parts for parameter in part.parameters(recurse=False)]
        return [(each, self._names[id(each)]) for each in parameters if id(each) in self._names]

    @contextmanager
    def _perturbed(self, seed: int, number: int, epsilon: float) -> Iterator[set[int]]:
        """Parameters of a layer are θ + εz while the layer computes, θ before and after; gives the perturbed, by id."""
        found: dict[int, list[tuple[nn.Parameter, Tensor]]] = {}
        perturbed: set[int] = set()
        model = self.network.model
        body = model.backbone.body if model.backbone else nn.Identity()
        layers = {module: pairs for module in body.modules() if (pairs := self._own(module))}

        def perturb(key: int, pairs: list[tuple[nn.Parameter, str]], rows: Tensor | None = None) -> None:
            found[key] = [(parameter, parameter.data) for parameter, _ in pairs]
            for parameter, name in pairs:
                model.substitute(parameter, self._moved((seed, number), name, parameter, epsilon, rows))

        def restore(key: int, output: Any = None) -> None:
            given = {each.untyped_storage().data_ptr() for each in tree_leaves(output) if isinstance(each, Tensor)}
            for parameter, original in found.pop(key, []):
                moved = parameter.data
                model.substitute(parameter, original)
                perturbed.discard(id(parameter))
                # Not after an interrupt that came before the substitute, nor where a layer hands its parameter on.
                if moved.data_ptr() != original.data_ptr() and moved.untyped_storage().data_ptr() not in given:
                    self._spare[moved.numel()].append(moved.view(-1))

        def before(module: nn.Module, inputs: Any) -> None:
            perturbed.update(id(parameter) for parameter, _ in layers[module])
            perturb(id(module), layers[module], rows_read(module, inputs))

        def after(module: nn.Module, inputs: Any, output: Any) -> None:
            restore(id(module), output)

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


class Descent:
    """Steps of some of a network's parameters along directions, with momentum."""

    def __init__(self, network: Network, perturbation: Perturbation, names: Iterable[str]) -> None:
        self.parameters = {name: network.trained[name] for name in names}
        self._model, self._perturbation = network.model, perturbation
        self._velocity: dict[str, Tensor] = {}

    @torch.no_grad()
    def step(
        self, seed: int, slopes: npt.NDArray[np.float32], rate: float, decay: float = 0.0, momentum: float = 0.0
    ) -> None:
        """v ← momentum · v + η Σ_p g_p z_p / P; θ ← θ − v − η · decay · θ, in float32, rounded alike everywhere."""
        factors = [np.float32(rate * float(slope) / len(slopes)).item() for slope in slopes]
        for name, parameter in self.parameters.items():
            if decay:
                self._model.subtract(parameter, parameter * np.float32(rate * decay).item())

            def add(values: Tensor, sign: int, name: str = name) -> None:
                for number, factor in enumerate(factors):
                    self._perturbation.add(seed, number, name, sign * factor, values, values)

            if momentum:
                velocity = self._velocity.setdefault(name, torch.zeros(parameter.numel(), device=parameter.device))
                add(velocity.mul_(np.float32(momentum).item()), 1)
                self._model.subtract(parameter, velocity.view(parameter.shape))
            else:
                self._model.change(parameter, partial(add, sign=-1))

    def reset(self) -> None:
        """Forget the velocity of earlier steps."""
        self._velocity.clear()


class ZerothSolver:
    """Local MeZO steps of one client at a time, on batches of its own."""

    def __init__(self, network: Network, stage: Any, seed: tuple[int, ...]) -> None:
        self.network, self.stage, self.seed = network, stage, seed
        self.probes = ZerothOrderProbe(network, stage.epsilon)
        self.descent = Descent(network, self.probes.perturbation, network.trained)

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
            slopes = [self.probes.slopes(cohort, rows, seed, n).mean() for n in range(stage.num_directions)]
            self.descent.step(seed, np.array(slopes, np.float32), rate, stage.weight_decay)
        trained = {name: parameter.detach().cpu()[None].clone() for name, parameter in self.network.trained.items()}
        steps = np.array([stage.local_steps])
        return LocalResult(Params(trained), steps, 2 * stage.num_directions * count * steps, Params())
