"""Bodies that train: against plain torch, by plan, with every kind of batch-norm statistics, and one matrix of methods.

Networks are real but tiny, and read images of 6 x 6 pixels; what they are compared with is torch's autograd and
optimisers, in double precision where nothing says otherwise.
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import clip_grad_norm_, parameters_to_vector, vector_to_parameters

from headstart.backbones import Backbone, Inputs, embed
from headstart.backbones.transforms import NORMALISATIONS, ImageInput, ImageTransform, TextTransform
from headstart.config.recipe import Recipe
from headstart.core.ledger import Ledger, Published
from headstart.core.message import Message
from headstart.core.params import Params
from headstart.core.plan import Plan
from headstart.core.reply import Reply
from headstart.core.state import pack, unpack
from headstart.data import Dataset, Examples, Federation
from headstart.engine.client import ClientRuntime
from headstart.engine.client_states import ClientStates
from headstart.errors import HeadstartError
from headstart.heads import LinearHead
from headstart.heads.linear import HiddenLayers
from headstart.runner.costs import paper_cost
from headstart.solvers.cohort import Cohort
from headstart.solvers.heads import batches
from headstart.solvers.objective import Objective
from tests.helpers import Bench, context_of, drawing, play, round_trip
from tests.variants import LOCAL, PERSONAL, TRAINING

RNG = np.random.default_rng(0)
SIDE, C, D = 6, 3, 5
SIZES = (5, 9, 6)
K, N = len(SIZES), sum(SIZES)
NAMES = ("ann", "bob", "cy")
IMAGES = RNG.integers(0, 256, (N, SIDE, SIDE, 3), dtype=np.uint8)
Y = RNG.integers(0, C, N)
WHO = RNG.permutation(np.repeat(np.arange(K), SIZES))
PICTURES = Examples("image", IMAGES, (), np.arange(N), Y)
HEAD = LinearHead(RNG.normal(size=(C, D)).astype(np.float32), RNG.normal(size=C).astype(np.float32))
HIDDEN = [(RNG.normal(size=(4, width)).astype(np.float32), np.full(4, 0.5, np.float32)) for width in (D, 4)]
MLP = LinearHead(RNG.normal(size=(C, 4)).astype(np.float32), HEAD.bias, HiddenLayers(tuple(HIDDEN)))
SEED = (3, 0)


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    """A network this small gains nothing from a second thread, and waits for it where the machine is busy."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


# -------------------------------------------------------------------------------------------------------- tiny networks


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """The same weights every time, and the random numbers of others left alone."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        yield


class Pixels(nn.Module):
    """No parameters: [B, H, W, 3] → [B, 3 H W]; remembers what it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Tensor] = []

    def forward(self, images: Tensor) -> Tensor:
        self.seen.append(images.clone())
        return images.flatten(1) / 255


class Scaled(Pixels):
    """The same times a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, images: Tensor) -> Tensor:
        return super().forward(images) * self.scale


class Plain(nn.Module):
    """Two convolutions: [B, 3, 6, 6] → [B, 5]."""

    def __init__(self) -> None:
        super().__init__()
        with seeded(11):
            self.one, self.two = nn.Conv2d(3, 4, 3), nn.Conv2d(4, D, 3)

    def forward(self, pixels: Tensor) -> Tensor:
        return self.two(self.one(pixels).tanh()).mean(dim=(2, 3))


class Normed(nn.Module):
    """Batch norm between two convolutions, a parameter without dimensions, and one that no feature depends on.

    As a pre-trained network's, the running statistics are not those of a new layer.
    """

    def __init__(self, momentum: float | None = 0.1) -> None:
        super().__init__()
        with seeded(12):
            self.one, self.norm, self.two = nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4), nn.Conv2d(4, D, 3)
        self.scale, self.spare = nn.Parameter(torch.tensor(1.5)), nn.Parameter(torch.tensor([0.25, -4.0]))
        self.norm.momentum = momentum
        self.norm.running_mean.copy_(torch.tensor([0.1, -0.2, 0.05, 0.3]))
        self.norm.running_var.copy_(torch.tensor([0.5, 0.2, 0.9, 0.3]))
        self.norm.num_batches_tracked.fill_(7)

    def forward(self, pixels: Tensor) -> Tensor:
        return self.two(self.norm(self.one(pixels)).relu()).mean(dim=(2, 3)) * self.scale


NORMED_PARAMETERS = 3 * 4 * 9 + 2 * 4 + (4 * D * 9 + D) + 1  # but for the two that no feature depends on


def backbone_of(network: nn.Module, dim: int = D) -> Backbone:
    """As the registry makes them: in evaluation mode, without gradients; the network reads pixels from -1 to 1."""
    body = ImageInput(network, NORMALISATIONS["half"]).eval().requires_grad_(False)
    return Backbone("tiny", "image", dim, body, network, ImageTransform(SIDE), "tiny")


def pixels_backbone(kind: type[Pixels] = Pixels) -> Backbone:
    body = kind().requires_grad_(False)
    return Backbone("pixels", "image", 3 * SIDE**2, body, body, ImageTransform(SIDE), "pixels")


def bits(module: nn.Module) -> dict[str, bytes]:
    return {name: value.detach().numpy().tobytes() for name, value in module.state_dict().items()}


# -------------------------------------------------------------------------------------------------- what headstart does


def stage_of(**keys: Any) -> Any:
    full = {"method": "fedavg", "train": "all", "batch_size": "full", "rounds": 2, "lr": 0.2, "augment": "none"} | keys
    return Recipe.parse({"data": {"dataset": "x"}, "stages": [full]}).stages[0]


MATRIX = TRAINING | PERSONAL
OWN_BODY = ("lg-fedavg", "local-only", "local-only-plain")
# What travels of a head: nothing, the hidden layers of 12 units, or the linear one; all of it where nothing is said.
HEAD_FLOATS = dict.fromkeys(("fedper", "fedrep"), D * 12 + 12 + 12 * 12 + 12) | {"fedbabu": 0}


def variant_of(name: str) -> dict[str, Any]:
    """A variant of the shared matrix on these small clients, whose last batches are short: 4 + 1, 4 + 4 + 1, 4 + 2."""
    train = "body" if name == "fedbabu" else "all"
    return LOCAL | MATRIX[name] | {"train": train, "batch_size": 4, "lr": 0.05, "rounds": 3}


SHORT = {"rounds": 2, "local_epochs": 1}


class Run:
    """A stage in this process, on the clients above."""

    def __init__(
        self,
        folder: Path,
        backbone: Backbone,
        seed: tuple[int, int] = SEED,
        previous: LinearHead | None = None,
        who: np.ndarray = WHO,
        examples: Examples = PICTURES,
        slots: np.ndarray | None = None,
        pooled: bool = False,
        plan: Plan | None = None,
        **keys: Any,
    ) -> None:
        self.stage, self.seed, self.backbone = stage_of(**keys), seed, backbone
        federation = Federation(Dataset("x", ("a", "b", "c"), examples, examples), who, None, NAMES)
        self.federation = federation.pooled() if pooled else federation
        clients = self.federation.n_clients
        context = context_of(self.stage, C, backbone.dim, seed, clients, N, previous, plan=plan, backbone=backbone)
        self.bench = Bench(self.stage, context)
        self.method = self.bench.method
        self.states = ClientStates(folder, clients, self.method.client_state, slots)
        self.ledger = Ledger.open(clients)
        self.source: Any = embed(backbone, examples, "x") if self.stage.train == "head" else self.inputs(examples)
        self.state: Any = self.bench.init()

    def inputs(self, examples: Examples) -> Inputs:
        return Inputs(self.backbone, examples, "x train")

    def play(self, after: Any = lambda *_: None, first_round: int = 0) -> "Run":
        arguments = (self.bench, self.federation, self.source, self.ledger, self.states, after)
        self.state = play(*arguments, state=self.state, first_round=first_round)
        return self

    def load(self) -> LinearHead:
        """The head, once the model is in the body."""
        return self.bench.head(self.state)

    def cohort(self, client: int) -> Cohort:
        rows, owners = self.federation.rows_of(np.array([client]))
        kept = partial(self.states.read, clients=np.array([client]))
        return Cohort(np.array([client]), self.source, rows, Y[rows], owners, np.array([True]), kept)

    def broadcast(self, round: int) -> Message:
        """What a client that was never asked before is sent."""
        return self.bench.broadcast(self.state, round)

    def answer(self, client: int, round: int = 0) -> Reply:
        (reply,) = self.bench.answer(self.cohort(client), self.broadcast(round))
        return reply

    def batches(self, client: int, round: int) -> list[np.ndarray]:
        """Rows of the images of each batch of a client, in its order."""
        cohort = self.cohort(client)
        plan = batches(cohort, self.stage, round, self.seed)[0]
        return [cohort.rows[batch[batch >= 0]] for batch in plan]

    def published(self, rounds: int) -> Published:
        """What the papers charge for so many rounds."""
        tasks, dim, counts = self.bench.context.tasks, self.backbone.dim, self.federation.counts
        return paper_cost(self.stage, self.method, tasks, dim, rounds, counts, self.state)

    def bits(self) -> dict[str, bytes]:
        """Everything that the server knows."""
        return {name: array.tobytes() for name, array in pack(self.state).arrays.items()}

    def own(self) -> dict[str, np.ndarray]:
        """What is each client's own [K, …]."""
        found: dict[str, np.ndarray] = self.method.personal_params(partial(self.states.read, clients=np.arange(K)))
        return found

    def own_bits(self) -> dict[str, bytes]:
        """Everything that is the clients' own."""
        return {name: array.tobytes() for name, array in self.own().items()}


# ---------------------------------------------------------------------------------------------------- the same in torch


def pixels(rows: np.ndarray) -> Tensor:
    """Images as a network reads them [B, 3, 6, 6], in double precision."""
    return torch.tensor(IMAGES[rows] / 127.5 - 1).permute(0, 3, 1, 2)


def model_of(network: nn.Module, head: LinearHead = HEAD) -> nn.Sequential:
    """The network and its head as one torch module, in double precision."""
    layers: list[nn.Module] = []
    hidden = head.feature_map.layers if isinstance(head.feature_map, HiddenLayers) else ()
    for weight, bias in (*hidden, (head.weight, head.bias)):
        linear = nn.Linear(weight.shape[1], weight.shape[0])
        linear.load_state_dict({"weight": torch.tensor(weight), "bias": torch.tensor(bias)})
        layers += [linear, nn.ReLU()]
    return nn.Sequential(copy.deepcopy(network), *layers[:-1]).double().requires_grad_(True)


def named(model: nn.Sequential) -> dict[str, Tensor]:
    """Parameters of such a module, under headstart's names."""
    network, *layers = model
    found = {f"body.{name}": parameter for name, parameter in network.named_parameters()}
    linear = [layer for layer in layers if isinstance(layer, nn.Linear)]
    for prefix, layer in zip([f"head.hidden.{n}" for n in range(len(linear) - 1)] + ["head"], linear, strict=True):
        found |= {f"{prefix}.weight": layer.weight, f"{prefix}.bias": layer.bias}
    return found


def loss_of(model: nn.Module, rows: np.ndarray, temperature: float = 1.0) -> Tensor:
    return functional.cross_entropy(model(pixels(rows)) / temperature, torch.tensor(Y[rows]))


def rows_of(client: int) -> np.ndarray:
    return np.flatnonzero(client == WHO)


def close(found: Any, expected: dict[str, Tensor], **tolerance: float) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        wanted = value.detach().numpy()
        limits = {"rtol": 2e-4, "atol": 2e-5} | tolerance
        np.testing.assert_allclose(np.asarray(found[name]), wanted, err_msg=name, **limits)


# ------------------------------------------------------------------------------------ heads behind a body that is fixed


@pytest.mark.parametrize("variant", [name for name in MATRIX if name != "fedbabu"])
def test_a_body_without_parameters_is_training_a_head_on_its_features(variant: str, tmp_path: Path) -> None:
    keys = variant_of(variant)
    whole = Run(tmp_path / "all", pixels_backbone(), **keys).play()
    head = Run(tmp_path / "head", pixels_backbone(), **keys | {"train": "head"}).play()
    np.testing.assert_array_equal(head.source, (IMAGES / 255).reshape(N, -1).astype(np.float32))
    assert whole.method.network is not None
    assert head.method.network is None
    assert whole.state.params.keys() == head.state.params.keys()
    for name, value in head.state.params.items():
        np.testing.assert_allclose(whole.state.params[name], value, rtol=1e-4, atol=1e-6, err_msg=name)
        assert not np.allclose(value, head.bench.init().params[name], rtol=1e-2, atol=1e-4)
    np.testing.assert_array_equal(whole.ledger.bytes_up, head.ledger.bytes_up)
    np.testing.assert_array_equal(whole.ledger.bytes_down, head.ledger.bytes_down)
    for name in whole.method.client_state:
        everybody = np.arange(K)
        np.testing.assert_allclose(
            whole.states.read(name, None, everybody), head.states.read(name, None, everybody), rtol=1e-3, atol=1e-6
        )


# --------------------------------------------------------------------------------------------- formulas, by plain torch


@pytest.mark.parametrize("head", [HEAD, MLP], ids=["linear", "mlp"])
@pytest.mark.parametrize("train", ["all", "body"])
def test_fedavg_with_one_full_step_of_everybody_is_gradient_descent(
    train: str, head: LinearHead, tmp_path: Path
) -> None:
    model = model_of(Plain(), head)
    trained = {name: value for name, value in named(model).items() if train == "all" or name.startswith("body.")}
    before = {name: value.detach().clone() for name, value in named(model).items()}
    for _ in range(4):
        gradients = torch.autograd.grad(loss_of(model, np.arange(N)), list(trained.values()))
        with torch.no_grad():
            for parameter, gradient in zip(trained.values(), gradients, strict=True):
                parameter -= 0.5 * gradient
    shape = {} if head is HEAD else {"head": "mlp", "hidden": 4}
    run = Run(tmp_path, backbone_of(Plain()), previous=head, train=train, rounds=4, lr=0.5, **shape).play()
    close(run.state.params, trained)
    for name, value in trained.items():
        assert not np.allclose(before[name], value.detach(), rtol=1e-2)
    # Scores of the run's body and head are those of the model.
    scores = run.load().scores(embed(run.backbone, PICTURES, "x"))
    np.testing.assert_allclose(scores, model(pixels(np.arange(N))).detach(), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(("clip", "decay", "proximal"), [(4.0, 0.0, 0.0), (None, 0.3, 0.0), (4.0, 0.3, 0.5)])
@pytest.mark.parametrize("train", ["all", "body"])
def test_local_sgd_is_torch_sgd_on_the_same_batches(
    train: str, clip: float | None, decay: float, proximal: float, tmp_path: Path
) -> None:
    """The gradient of the loss is clipped, as clip_grad_norm_ does before a step adds what else the step is along."""
    keys = {"weight_decay": decay} | ({} if clip is None else {"clip": clip})
    keys |= {"train": train, "batch_size": 4, "local_epochs": 3, "momentum": 0.7, "temperature": 0.5}
    run = Run(tmp_path, backbone_of(Plain()), previous=HEAD, **keys)
    model = model_of(Plain())
    trained = {name: value for name, value in named(model).items() if train == "all" or name.startswith("body.")}
    sgd = torch.optim.SGD(trained.values(), lr=0.2, momentum=0.7, weight_decay=decay)
    first = {name: value.detach().clone() for name, value in trained.items()}
    plan = run.batches(1, round=1)
    assert [len(rows) for rows in plan] == 3 * [4, 4, 1]
    norms = []
    for rows in plan:
        sgd.zero_grad()
        loss_of(model, rows, temperature=0.5).backward()
        norms.append(float(clip_grad_norm_(list(trained.values()), clip or float("inf"))))
        for name, value in trained.items():
            value.grad += proximal * (value.detach() - first[name]) + proximal
        sgd.step()
    assert clip is None or min(norms) < clip < max(norms)
    begin = Params({name: torch.tensor(value, dtype=torch.float32)[None] for name, value in run.state.params.items()})
    correction = {name: proximal * torch.ones_like(value) for name, value in begin.items()}
    objective = Objective(proximal, correction) if proximal else Objective()
    found = run.method.solve(begin, run.cohort(1), 1, objective)
    assert found.steps.tolist() == [9]
    close({name: value[0] for name, value in found.params.items()}, trained)
    momenta = {name: sgd.state[value]["momentum_buffer"] for name, value in trained.items()}
    close({name: value[0] for name, value in found.velocity.items()}, momenta, atol=1e-4)


def test_momentum_of_two_parameters_with_one_gradient(tmp_path: Path) -> None:
    """Autograd gives the terms of a sum the same tensor; a velocity in it must not be theirs in common."""

    class Shifted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right = nn.Parameter(torch.zeros(D)), nn.Parameter(torch.ones(D))

        def forward(self, images: Tensor) -> Tensor:
            return images[:, :, :D].mean(dim=(1, 3)) + (self.left + self.right)

    model = model_of(Shifted())
    sgd = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.7)
    run = Run(tmp_path, backbone_of(Shifted()), previous=HEAD, local_steps=4, momentum=0.7)
    for rows in run.batches(0, 0):
        sgd.zero_grad()
        functional.cross_entropy(model(pixels(rows)), torch.tensor(Y[rows])).backward()
        sgd.step()
    start = {name: value.astype(np.float32) for name, value in run.state.params.items()}
    update = run.answer(0).message.arrays
    close({name: value + update[f"update.{name}"] for name, value in start.items()}, named(model))


def test_centralised_is_torch_sgd_that_never_stops(tmp_path: Path) -> None:
    """Two epochs of each of three rounds over the pooled examples, with the momentum of the round before."""
    keys = {"method": "centralised", "batch_size": 8, "local_epochs": 2, "momentum": 0.9, "rounds": 3, "lr": 0.05}
    run = Run(tmp_path, backbone_of(Plain()), previous=HEAD, pooled=True, **keys)
    model = model_of(Plain())
    sgd = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for round in range(3):
        plan = run.batches(0, round)
        assert [len(rows) for rows in plan] == 2 * [8, 8, 4]
        for rows in plan:
            sgd.zero_grad()
            loss_of(model, rows).backward()
            sgd.step()
    close(run.play().state.params, named(model))
    assert run.ledger.totals()["bytes_up"] == run.ledger.totals()["bytes_down"] == 0
    assert run.ledger.forward_passes.tolist() == [3 * 3 * 2 * N]


def g(model: nn.Module, vector: Tensor, client: int) -> Tensor:
    """The gradient of a client's loss at a vector of parameters."""
    vector_to_parameters(vector, model.parameters())
    model.zero_grad()
    loss_of(model, rows_of(client)).backward()
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


def test_fedprox(tmp_path: Path) -> None:
    model = model_of(Plain())
    x = parameters_to_vector(model.parameters()).detach()
    for _ in range(3):
        mean = torch.zeros_like(x)
        for k in range(K):
            w = x.clone()
            for _ in range(4):
                w -= 0.2 * (g(model, w, k) + 0.5 * (w - x))
            mean += SIZES[k] / N * w
        x = mean
    vector_to_parameters(x, model.parameters())
    keys = {"local_steps": 4, "rounds": 3}
    run = Run(tmp_path, backbone_of(Plain()), previous=HEAD, method="fedprox", mu=0.5, **keys).play()
    close(run.state.params, named(model))
    free = Run(tmp_path, backbone_of(Plain()), previous=HEAD, **keys).play()
    assert any(not np.allclose(free.state.params[n], v, rtol=1e-2) for n, v in run.state.params.items())


def test_scaffold_option_two(tmp_path: Path) -> None:
    model = model_of(Plain())
    x = parameters_to_vector(model.parameters()).detach()
    c, mine = torch.zeros_like(x), torch.zeros(K, len(x), dtype=torch.float64)
    for _ in range(3):
        mean, change = torch.zeros_like(x), torch.zeros_like(x)
        for k in range(K):
            y = x.clone()
            for _ in range(4):
                y -= 0.2 * (g(model, y, k) - mine[k] + c)
            new = mine[k] - c + (x - y) / (4 * 0.2)
            change += SIZES[k] / N * (new - mine[k])
            mine[k] = new
            mean += SIZES[k] / N * (y - x)
        x, c = x + 0.7 * mean, c + change
    run = Run(
        tmp_path, backbone_of(Plain()), previous=HEAD, method="scaffold", local_steps=4, rounds=3, server_lr=0.7
    ).play()
    vector_to_parameters(x, model.parameters())
    close(run.state.params, named(model))
    vector_to_parameters(c, model.parameters())
    close(run.state.memory["control"], named(model))
    for k in range(K):
        vector_to_parameters(mine[k], model.parameters())
        found = {name: run.states.read(f"control.{name}", None, np.array([k]))[0] for name in run.method.shapes}
        close(found, named(model), atol=1e-4)


# ------------------------------------------------------------------------------------------------ batch-norm statistics


def as_batch_normalised(model: nn.Sequential) -> nn.Sequential:
    """The same network with a batch norm of torch's that has no running statistics at all."""
    before = model[0].norm
    after = nn.BatchNorm2d(4, track_running_stats=False).double()
    after.load_state_dict({"weight": before.weight, "bias": before.bias})
    model[0].norm = after
    return model


def torch_round(model: nn.Sequential, plans: list[list[np.ndarray]], frozen: bool) -> nn.Sequential:
    """FedAvg of torch's own training of each client, of parameters and running statistics alike."""
    mean = {name: torch.zeros_like(value) for name, value in model.state_dict().items()}
    for k, plan in enumerate(plans):
        mine = copy.deepcopy(model).train()
        if frozen:
            mine[0].norm.eval()
        sgd = torch.optim.SGD(mine.parameters(), lr=0.2)
        for rows in plan:
            sgd.zero_grad()
            loss_of(mine, rows).backward()
            sgd.step()
        for name, value in mine.state_dict().items():
            if value.is_floating_point():
                mean[name] += SIZES[k] / N * value
            else:
                mean[name] = model.state_dict()[name]
    model = copy.deepcopy(model)
    model.load_state_dict(mean)
    return model


@pytest.mark.parametrize("mode", ["aggregate", "freeze", "batch"])
def test_norm_statistics_are_torchs(mode: str, tmp_path: Path) -> None:
    network = Normed()
    buffers = {name: value.numpy().tobytes() for name, value in network.named_buffers()}
    run = Run(
        tmp_path, backbone_of(network), previous=HEAD, norm_statistics=mode, batch_size=4, local_epochs=2, rounds=2
    )
    model = model_of(Normed())
    model = as_batch_normalised(model) if mode == "batch" else model
    for round in range(2):
        model = torch_round(model, [run.batches(k, round) for k in range(K)], frozen=mode == "freeze")
    run.play()
    close(run.state.params, {name: value for name, value in named(model).items() if name != "body.spare"})
    run.load()
    if mode == "aggregate":
        mean, variance = model[0].norm.running_mean, model[0].norm.running_var
        close(run.state.statistics, {"body.norm.running_mean": mean, "body.norm.running_var": variance})
        assert not np.allclose(mean, Normed().norm.running_mean, rtol=0.1)
        np.testing.assert_allclose(network.norm.running_mean, mean, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(network.norm.running_var, variance, rtol=1e-4, atol=1e-5)
    else:
        assert run.state.statistics == {}
        assert {name: value.numpy().tobytes() for name, value in network.named_buffers()} == buffers
    assert network.norm.num_batches_tracked == 7
    # Evaluation: by the running statistics of the server, those of the start, or the batch itself.
    model = model.train() if mode == "batch" else model.eval()
    found = embed(run.backbone, PICTURES, "x")
    np.testing.assert_allclose(found, model[0](pixels(np.arange(N))).detach(), rtol=1e-3, atol=1e-5)


def test_normalising_by_the_batch_in_evaluation_by_hand(tmp_path: Path) -> None:
    network = Normed()
    run = Run(tmp_path, backbone_of(network), norm_statistics="batch").play()
    run.load()
    found: list[Tensor] = []
    network.norm.register_forward_hook(lambda module, given, made: found.extend([given[0], made]))
    embed(run.backbone, PICTURES.take(np.arange(7)), "x")
    maps, made = (each.double().numpy() for each in found)
    mean, variance = maps.mean(axis=(0, 2, 3)), maps.var(axis=(0, 2, 3))
    gain, shift = (value.detach().double().numpy() for value in (network.norm.weight, network.norm.bias))
    channels = [(maps[:, c] - mean[c]) / np.sqrt(variance[c] + network.norm.eps) * gain[c] + shift[c] for c in range(4)]
    np.testing.assert_allclose(made, np.stack(channels, axis=1), rtol=1e-4, atol=1e-5)
    assert not network.two.training


@pytest.mark.parametrize("method", ["fedavg", "fedadam", "fedavgm", "fednova", "scaffold"])
def test_statistics_are_averaged_by_examples_whatever_the_server_does(method: str, tmp_path: Path) -> None:
    """One local step each: the statistics are those of the start, moved a tenth of the way to the client's own."""
    run = Run(tmp_path, backbone_of(Normed()), method=method, rounds=1).play()
    before = Normed().double()
    mean, variance = torch.zeros(4, dtype=torch.float64), torch.zeros(4, dtype=torch.float64)
    for k in range(K):
        maps = before.one(pixels(rows_of(k)))
        mean += SIZES[k] / N * (0.9 * before.norm.running_mean + 0.1 * maps.mean(dim=(0, 2, 3)))
        own = maps.transpose(0, 1).flatten(1).var(dim=1, unbiased=True)
        variance += SIZES[k] / N * (0.9 * before.norm.running_var + 0.1 * own)
    close(
        run.state.statistics,
        {"body.norm.running_mean": mean, "body.norm.running_var": variance},
        rtol=1e-5,
        atol=1e-6,
    )


@pytest.mark.parametrize("mode", ["aggregate", "freeze", "batch"])
def test_statistics_travel_only_where_they_are_averaged(mode: str, tmp_path: Path) -> None:
    network = Normed()
    run = Run(tmp_path, backbone_of(network), norm_statistics=mode)
    before = [network.norm.running_mean.numpy().tobytes(), network.norm.running_var.numpy().tobytes()]
    down = run.broadcast(0)
    reply = run.answer(0)
    after = [network.norm.running_mean.numpy().tobytes(), network.norm.running_var.numpy().tobytes()]
    names = {"statistics.body.norm.running_mean", "statistics.body.norm.running_var"}
    shared = mode == "aggregate"
    assert (after != before) is shared
    for message, values in ((down, before), (reply.message, after)):
        assert {name for name in message.arrays if "running" in name} == (names if shared else set())
        assert not any("tracked" in name for name in message.arrays)
        assert all((value in message.to_bytes()) is shared for value in values)


def test_a_cumulative_average_does_not_count_the_batches_of_other_clients(tmp_path: Path) -> None:
    """Without a momentum, torch's batch norm weighs a batch by how many it has seen: 7 before, 8 with the client's."""
    network = Normed(momentum=None)
    run = Run(tmp_path, backbone_of(network))
    replies = [run.answer(k) for k in (0, 1, 2, 1)]
    before = Normed().double()
    for k, reply in zip((0, 1, 2, 1), replies, strict=True):
        own = before.one(pixels(rows_of(k))).mean(dim=(0, 2, 3))
        expected = (7 * before.norm.running_mean + own) / 8
        found = reply.message.arrays["statistics.body.norm.running_mean"]
        np.testing.assert_allclose(found, expected.detach(), rtol=1e-4, atol=1e-6)


def test_a_batch_of_one_example_without_statistics_is_a_sentence(tmp_path: Path) -> None:
    class Point(nn.Module):
        """One position after the convolution."""

        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm = nn.Conv2d(3, D, SIDE), nn.BatchNorm2d(D)

        def forward(self, pixels: Tensor) -> Tensor:
            return self.norm(self.conv(pixels)).flatten(1)

    for mode in ("aggregate", "batch"):  # clients of 5 examples have a batch of 4 and one of 1
        with pytest.raises(HeadstartError, match=r"a batch of one example has no statistics .* norm_statistics = 'fre"):
            Run(tmp_path, backbone_of(Point()), batch_size=4, norm_statistics=mode).play()
    Run(tmp_path, backbone_of(Point()), batch_size=4, norm_statistics="freeze").play()
    Run(tmp_path, backbone_of(Point()), batch_size=3, local_steps=1).play()


def test_a_bodys_own_value_error_is_not_taken_for_that(tmp_path: Path) -> None:
    class Broken(nn.Module):
        def forward(self, pixels: Tensor) -> Tensor:
            raise ValueError("an odd number of heads")

    with pytest.raises(ValueError, match="an odd number of heads"):
        Run(tmp_path, backbone_of(Broken())).play()


# ---------------------------------------------------------------------------------------------------------------- plans


def test_training_the_head_leaves_the_body_bit_for_bit(tmp_path: Path) -> None:
    network = Normed()
    before = bits(network)
    run = Run(tmp_path, backbone_of(network), previous=HEAD, train="head").play()
    run.load()
    assert bits(network) == before
    assert run.state.params.keys() == {"head.weight", "head.bias"}
    assert not np.allclose(run.state.params["head.weight"], HEAD.weight, rtol=1e-3)
    assert not any("body" in name for name in run.broadcast(0).arrays)


@pytest.mark.parametrize("method", ["fedavg", "scaffold", "feddyn", "centralised"])
def test_training_the_body_leaves_the_head_bit_for_bit_and_at_home(method: str, tmp_path: Path) -> None:
    network = Normed()
    before = bits(network)
    run = Run(tmp_path, backbone_of(network), previous=HEAD, train="body", method=method)
    messages = [run.broadcast(0), run.answer(0).message]
    run.play()
    messages += [run.broadcast(1), run.answer(0).message, pack(run.state)]
    for message in messages:
        assert not any("head" in name for name in message.arrays)
        assert HEAD.weight.tobytes() not in message.to_bytes()
    assert not any("head" in name for name in run.method.client_state)
    head = run.load()
    assert head.weight.tobytes() == HEAD.weight.tobytes()
    assert head.bias.tobytes() == HEAD.bias.tobytes()
    changed = {name for name, value in bits(network).items() if value != before[name]}
    assert changed == before.keys() - {"spare", "norm.num_batches_tracked"}
    for name, parameter in run.method.network.parameters.items():
        assert parameter.requires_grad is (name.startswith("body.") and name != "body.spare")


def test_training_everything_changes_everything_that_matters(tmp_path: Path) -> None:
    network = Normed()
    before = bits(network)
    run = Run(tmp_path, backbone_of(network), previous=HEAD).play()
    head = run.load()
    after = bits(network)
    assert {name for name in after if after[name] == before[name]} == {"spare", "norm.num_batches_tracked"}
    assert (head.weight != HEAD.weight).all()
    assert (head.bias != HEAD.bias).all()
    for name, value in network.state_dict().items():  # what is evaluated is what the server knows
        if name not in ("spare", "norm.num_batches_tracked"):
            known = run.state.params | run.state.statistics
            np.testing.assert_array_equal(value, known[f"body.{name}"].astype(np.float32))


@pytest.mark.parametrize("keys", [{}, {"method": "fedadam"}, {"method": "scaffold"}, {"method": "fedprox"}])
def test_a_parameter_that_no_feature_depends_on_is_frozen(keys: dict[str, Any], tmp_path: Path) -> None:
    network = Normed()
    run = Run(tmp_path, backbone_of(network), weight_decay=0.1, **keys).play()
    run.load()
    assert network.spare.tolist() == [0.25, -4.0]  # weight decay would shrink it
    assert not any("spare" in name for name in (*run.state.params, *run.broadcast(1).arrays))
    assert float(run.state.params["body.scale"]) != 1.5


# -------------------------------------------------------------------------------------------- one matrix of all methods


@pytest.mark.parametrize("variant", MATRIX)
def test_a_seed_reproduces_bit_for_bit(variant: str, tmp_path: Path) -> None:
    keys = variant_of(variant) | SHORT | {"augment": "flip"}
    one, two, other = (
        Run(tmp_path / str(number), backbone_of(Normed()), seed, **keys).play()
        for number, seed in enumerate((SEED, SEED, (4, 0)))
    )
    assert one.bits() == two.bits()
    own, again, others = (each.own_bits() if each.method.personal else {} for each in (one, two, other))
    assert own == again
    name = "body.one.weight"
    for mine, theirs in ((one.bits(), other.bits()), (own, others)):
        assert all(mine[n] != theirs[n] for n in (f"params/{name}", name) if n in mine)
    assert f"params/{name}" in one.bits() or name in own
    np.testing.assert_array_equal(one.ledger.bytes_up, two.ledger.bytes_up)


class Interrupted(Exception):  # noqa: N818
    """The run stops here."""


@pytest.mark.parametrize("variant", MATRIX)
def test_a_state_survives_its_checkpoint_bit_for_bit(variant: str, tmp_path: Path) -> None:
    keys = variant_of(variant) | {"augment": "flip"}
    keys |= {} if variant == "centralised" else {"clients_per_round": 2}
    whole = Run(tmp_path / "whole", backbone_of(Normed()), **keys).play()
    first = Run(tmp_path / "parts", backbone_of(Normed()), **keys)
    saved: list[tuple[bytes, np.ndarray]] = []

    def stop(number: int, state: Any) -> None:
        saved.append((pack(state).to_bytes(), first.states.slots.copy()))
        raise Interrupted

    with pytest.raises(Interrupted):
        first.play(stop)
    ((data, slots),) = saved
    # In a new process there is a new body, as the stage found it.
    resumed = Run(tmp_path / "parts", backbone_of(Normed()), slots=slots, **keys)
    resumed.state = unpack(resumed.method.state_type, Message.from_bytes(data))
    assert resumed.bits() == {n: a.tobytes() for n, a in Message.from_bytes(data).arrays.items()}
    resumed.play(first_round=1)
    assert resumed.bits() == whole.bits()
    assert not whole.method.personal or resumed.own_bits() == whole.own_bits()
    for run in (resumed, whole):
        run.load()
    assert bits(resumed.backbone.body) == bits(whole.backbone.body)


@pytest.mark.parametrize("variant", [name for name in MATRIX if name != "centralised" and "local" not in name])
def test_bytes_are_those_of_the_serialised_messages(variant: str, tmp_path: Path) -> None:
    run = Run(tmp_path, backbone_of(Normed()), **variant_of(variant) | {"rounds": 1})
    down = run.broadcast(0)
    up = [len(run.answer(k).message.to_bytes()) for k in range(K)]
    for k in range(K):  # a client that reads the bytes says the same
        (reply,) = run.bench.answer(run.cohort(k), round_trip(down))
        assert reply.message.to_bytes() == run.answer(k).message.to_bytes()
    run.play()
    assert run.ledger.bytes_up.tolist() == up
    assert run.ledger.bytes_down.tolist() == [len(down.to_bytes())] * K
    # Twice as much for SCAFFOLD; the running statistics go once.
    head = sum(v.size for n, v in run.state.params.items() if n.startswith("head."))
    body = NORMED_PARAMETERS * (variant not in OWN_BODY)
    floats = (body + head) * (2 if "scaffold" in variant else 1) + 2 * 4 * (body > 0)
    assert head == HEAD_FLOATS.get(variant, head)
    assert 4 * floats < up[0] < 4 * floats + 4000


@pytest.mark.parametrize("variant", [name for name in MATRIX if name not in OWN_BODY])
def test_a_bad_message_is_refused_and_the_others_count(
    variant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = variant_of(variant) | SHORT
    runs: dict[str, Run] = {}
    for damage, why in (
        ("nan", "'update.body.one.weight' holds NaN"),
        ("variance", "'statistics.body.norm.running_var' holds a negative variance"),
        ("shape", "'update.body.one.weight' has shape [3, 3, 3, 3], not [4, 3, 3, 3]"),
    ):
        bad = runs[damage] = Run(tmp_path / damage, backbone_of(Normed()), **keys)
        bad.bench.runtime = Damaging(bad.method, bad.bench.channel, damage)
        bad.play()
        (drop,) = bad.ledger.dropped
        assert (drop["round"], drop["clients"]) == (1, "bob")
        assert why in str(drop["why"])
    # It is as if he had not been asked in that round, and what he would have kept is forgotten.
    drawing(monkeypatch, [0, 2], range(K))
    without = Run(tmp_path / "without", backbone_of(Normed()), **keys).play()
    for bad in runs.values():
        assert bad.bits() == without.bits()
        for name in bad.method.client_state:
            kept = [run.states.read(name, None, np.arange(K)).tobytes() for run in (bad, without)]
            assert kept[0] == kept[1]
        if variant != "centralised":  # the message has travelled all the same
            assert bad.ledger.bytes_up[1] == pytest.approx(2 * without.ledger.bytes_up[1], rel=0.2)


@dataclass(frozen=True, eq=False)
class Damaging(ClientRuntime):
    """Clients of which the second says something impossible in the first round."""

    damage: str

    def answer(self, cohort: Cohort, message: Message) -> list[Reply]:
        (reply,) = super().answer(cohort, message)
        if cohort.clients[0] != 1 or message.scalars["round"] != 0:
            return [reply]
        arrays = dict(reply.message.arrays)
        name = "statistics.body.norm.running_var" if self.damage == "variance" else "update.body.one.weight"
        wrong = {"nan": arrays[name] * np.float32(np.nan), "variance": -arrays[name], "shape": arrays[name][1:]}
        message = Message(arrays | {name: wrong[self.damage]}, reply.message.scalars)
        return [replace(reply, message=message, bytes_up=np.array([message.nbytes]))]


@pytest.mark.parametrize("variant", MATRIX)
def test_the_order_of_the_clients_does_not_matter(variant: str, tmp_path: Path) -> None:
    """They share one network in memory, and none of them leaves anything in it."""
    keys = variant_of(variant) | {"augment": "flip"}
    run = Run(tmp_path, backbone_of(Normed()), **keys)
    one, two = ({k: run.answer(k) for k in order} for order in ((0, 1, 2), (2, 1, 0)))
    for k in range(K):
        assert one[k].message.to_bytes() == two[k].message.to_bytes()
        assert {n: a.tobytes() for n, a in one[k].state.items()} == {n: a.tobytes() for n, a in two[k].state.items()}
    orders = ((0, 1, 2), (1, 2, 0), (2, 1, 0))
    ends = [pack(run.bench.after(run.bench.init(), [one[k] for k in order])).arrays for order in orders]
    for end in ends[1:]:
        for name, array in end.items():
            np.testing.assert_allclose(array, ends[0][name], rtol=1e-9, atol=1e-12, err_msg=name)


# Which examples are given to the server, or are in the first of two batches, is drawn by the number of the client.
@pytest.mark.parametrize("variant", [name for name in MATRIX if MATRIX[name]["method"] != "per-fedavg"][:-1])
def test_the_numbering_of_the_clients_does_not_matter(variant: str, tmp_path: Path) -> None:
    keys = variant_of(variant) | {"batch_size": "full"}
    one = Run(tmp_path / "one", backbone_of(Normed()), **keys).play()
    two = Run(tmp_path / "two", backbone_of(Normed()), who=np.array([2, 0, 1])[WHO], **keys).play()
    for what in ("params", "statistics"):
        for name, value in getattr(one.state, what).items():
            np.testing.assert_allclose(getattr(two.state, what)[name], value, rtol=1e-3, atol=1e-5, err_msg=name)
    if one.method.personal:
        mine, theirs = one.own(), two.own()
        for name, value in mine.items():
            np.testing.assert_allclose(theirs[name][[2, 0, 1]], value, rtol=1e-3, atol=1e-5, err_msg=name)


# ---------------------------------------------------------------------------------------------------- flips and dropout


def flips(folder: Path, client: int = 1, round: int = 0, seed: tuple[int, int] = SEED, augment: str = "flip") -> Any:
    """Which image of the source every image that the body saw in four epochs is, and whether it was mirrored."""
    backbone = pixels_backbone()
    Run(folder, backbone, seed, local_epochs=4, augment=augment).answer(client, round)
    assert isinstance(backbone.body, Pixels)
    assert len(backbone.body.seen) == 4
    rows, mirrored = [], []
    for image in torch.cat(backbone.body.seen).numpy():
        straight = [row for row in rows_of(client) if np.array_equal(image, IMAGES[row])]
        reverse = [row for row in rows_of(client) if np.array_equal(image, IMAGES[row][:, ::-1])]
        ((row, flip),) = [(row, False) for row in straight] + [(row, True) for row in reverse]
        rows.append(row)
        mirrored.append(flip)
    return rows, mirrored


def test_an_image_is_itself_or_its_mirror_image(tmp_path: Path) -> None:
    rows, mirrored = flips(tmp_path)
    for epoch in np.split(np.array(rows), 4):
        assert sorted(epoch) == rows_of(1).tolist()
    assert 0.25 < np.mean(mirrored) < 0.75
    # The same image is mirrored in one epoch and not in another.
    assert any(len({flip for row, flip in zip(rows, mirrored, strict=True) if row == one}) == 2 for one in rows_of(1))


def test_flips_are_seeded_by_seed_round_and_client(tmp_path: Path) -> None:
    usual = flips(tmp_path)
    np.random.seed(1)  # noqa: NPY002
    torch.manual_seed(1)
    assert flips(tmp_path) == usual
    others = [flips(tmp_path, **keys)[1] for keys in ({"round": 1}, {"seed": (4, 0)}, {"seed": (3, 1)}, {"client": 2})]
    patterns = {tuple(pattern[:20]) for pattern in (usual[1], *others)}
    assert len(patterns) == 5


def test_without_augmentation_images_are_left_alone(tmp_path: Path) -> None:
    assert not any(flips(tmp_path, augment="none")[1])


def test_images_are_not_mirrored_in_evaluation(tmp_path: Path) -> None:
    run = Run(tmp_path, pixels_backbone(), augment="flip").play()
    run.load()
    np.testing.assert_array_equal(embed(run.backbone, PICTURES, "x"), IMAGES.reshape(N, -1).astype(np.float32) / 255)


class Words:
    """As much of a tokenizer as a transform uses: every letter is a token."""

    pad_token_id = 0
    model_input_names = ("input_ids", "attention_mask")

    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        return {"input_ids": [ord(letter) - ord("a") + 1 for letter in text if letter != " "]}


class Letters(nn.Module):
    """The mean of the embeddings of a text's letters, which come in order of the alphabet."""

    def __init__(self) -> None:
        super().__init__()
        with seeded(13):
            self.embedding = nn.Embedding(9, D)
        self.seen: list[list[int]] = []

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        self.seen += [row[row > 0].tolist() for row in ids]
        weights = mask.unsqueeze(2).float()
        return (self.embedding(ids) * weights).sum(dim=1) / weights.sum(dim=1)


def test_texts_are_not_flipped(tmp_path: Path) -> None:
    texts = ["abcdefgh"[row % 3 : 4 + row % 5] for row in range(N)]

    class Table:
        def __getitem__(self, rows: list[int]) -> dict[str, list[str]]:
            return {"text": [texts[row] for row in rows]}

    examples = Examples("text", Table(), ("text",), np.arange(N), Y)
    runs = []
    for augment in ("flip", "none"):
        body = Letters()
        backbone = Backbone("letters", "text", D, body, body, TextTransform(Words(), 8), "letters")
        runs.append(Run(tmp_path / augment, backbone, examples=examples, augment=augment, batch_size=4).play())
        assert len(body.seen) == 1 + 2 * N  # once to see what the features depend on
        assert all(letters == sorted(letters) for letters in body.seen)
    assert runs[0].bits() == runs[1].bits()
    assert not np.allclose(runs[0].state.params["body.embedding.weight"], Letters().embedding.weight.detach())


class Dropping(nn.Module):
    """A convolution with dropout on its features."""

    def __init__(self, share: float) -> None:
        super().__init__()
        self.plain, self.dropout = Plain(), nn.Dropout(share)

    def forward(self, pixels: Tensor) -> Tensor:
        return self.dropout(self.plain(pixels))


def test_dropout_is_on_in_training_off_in_evaluation_and_seeded(tmp_path: Path) -> None:
    one, two = (Run(tmp_path, backbone_of(Dropping(0.5)), previous=HEAD, batch_size=4) for _ in range(2))
    for seed, run in enumerate((one, two)):
        torch.manual_seed(seed)  # which must not matter
        run.play()
    assert one.bits() == two.bits()
    # Full batches are the same in any order, so that only dropout could tell the seeds apart.
    full = [
        Run(tmp_path, backbone_of(Dropping(share)), seed, HEAD).play().state.params["body.plain.one.weight"]
        for share, seed in ((0.5, SEED), (0.5, (4, 0)), (0.0, SEED), (0.0, (4, 0)))
    ]
    np.testing.assert_allclose(full[2], full[3], rtol=1e-4, atol=1e-6)
    assert not np.allclose(full[0], full[1], rtol=1e-2, atol=1e-3)
    assert not np.allclose(full[0], full[2], rtol=1e-2, atol=1e-3)
    one.load()
    plain = Plain().double()
    plain.load_state_dict({n: torch.tensor(one.state.params[f"body.plain.{n}"]) for n in plain.state_dict()})
    found = embed(one.backbone, PICTURES, "x")
    np.testing.assert_allclose(found, plain(pixels(np.arange(N))).detach(), rtol=1e-4, atol=1e-5)


def test_training_leaves_the_random_numbers_of_others_alone(tmp_path: Path) -> None:
    run = Run(tmp_path, backbone_of(Dropping(0.5)), previous=HEAD, augment="flip")
    before = torch.get_rng_state()
    run.play()
    assert torch.equal(torch.get_rng_state(), before)


# ------------------------------------------------------------------------------------------ precision, memory and costs


def test_bfloat16_is_close_to_float32_and_keeps_parameters_in_it(tmp_path: Path) -> None:
    network = Normed()
    runs = {
        precision: Run(
            tmp_path / precision, backbone_of(body), previous=HEAD, precision=precision, batch_size=4, lr=0.05
        )
        for precision, body in (("float32", Normed()), ("bfloat16", network))
    }
    arrays = runs["bfloat16"].answer(0).message.arrays
    assert {str(array.dtype) for array in arrays.values()} == {"float32"}
    for run in runs.values():
        run.play()
        run.load()
    assert {value.dtype for value in network.state_dict().values()} == {torch.float32, torch.int64}
    begin = runs["float32"].bench.init()
    for what in ("params", "statistics"):
        exact, rough = (getattr(run.state, what) for run in runs.values())
        start = getattr(begin, what)
        moved, off = (
            np.sqrt(sum(np.sum((left[name] - right[name]) ** 2) for name in exact))
            for left, right in ((exact, start), (rough, exact))
        )
        assert 0 < off < 0.05 * moved


def test_there_is_one_model_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    network = Normed()
    backbone = backbone_of(network)
    run = Run(tmp_path, backbone, method="scaffold", batch_size=4)

    def places() -> dict[str, tuple[int, int]]:
        parts = [*backbone.body.named_parameters(), *backbone.body.named_buffers()]
        return {name: (id(part), part.data_ptr()) for name, part in parts}

    def deepcopy(*_: Any) -> Any:
        raise AssertionError("a copy")

    before = places()
    monkeypatch.setattr(copy, "deepcopy", deepcopy)
    run.play()
    run.load()
    assert places() == before
    assert len(before) == 7 + 3
    assert run.method.network.backbone is backbone
    assert {id(p) for n, p in run.method.network.parameters.items() if n.startswith("body.")} == {
        id(parameter) for parameter in network.parameters()
    }


@pytest.mark.parametrize(
    ("keys", "examples"),
    [
        ({}, (5, 9, 6)),
        ({"local_epochs": 3}, (15, 27, 18)),
        ({"batch_size": 4, "local_epochs": 2}, (10, 18, 12)),
        # 4 + 1 + 4 + 1, 4 + 4 + 1 + 4 and 4 + 2 + 4 + 2
        ({"batch_size": 4, "local_steps": 4}, (10, 13, 12)),
        ({"batch_size": 4, "local_steps": 1}, (4, 4, 4)),
        ({"local_steps": 3}, (15, 27, 18)),
        # 5 + 5 + 5, 8 + 1 + 8 and 6 + 6 + 6
        ({"batch_size": 8, "local_steps": 3}, (15, 17, 18)),
    ],
)
def test_a_step_on_the_body_is_three_passes_of_its_examples(
    keys: dict[str, Any], examples: tuple[int, ...], tmp_path: Path
) -> None:
    for kind, passes in ((Scaled, 3), (Pixels, 1)):  # where the body has nothing to train, a step is on the head alone
        backbone = pixels_backbone(kind)
        run = Run(tmp_path / kind.__name__, backbone, rounds=2, **keys)
        assert isinstance(backbone.body, Pixels)
        backbone.body.seen.clear()  # it was looked at to see what the features depend on
        run.play()
        assert run.ledger.forward_passes.tolist() == [2 * passes * count for count in examples]
        assert sum(len(images) for images in backbone.body.seen) == 2 * sum(examples)


@pytest.mark.parametrize(
    ("keys", "per_round", "examples"),
    [
        ({}, K, N),
        ({"local_epochs": 2}, K, 2 * N),
        ({"local_steps": 3}, K, 3 * N),
        # Three batches of at most 4 are 4 + 1 + 4, 4 + 4 + 1 and 4 + 2 + 4 of 5, 9 and 6 examples.
        ({"local_steps": 3, "batch_size": 4}, K, 28),
        # Six batches of at most half: 3 + 2 three times, 4 + 4 + 1 twice, 3 + 3 three times.
        ({"local_steps": 3, "batch_size": 4, "method": "per-fedavg"}, K, 51),
        ({"clients_per_round": 2}, 2, N),
        ({"participation": 0.6}, 2, N),
        # Somebody is always asked, and nobody twice.
        ({"participation": 0.1}, 1, N),
        ({"clients_per_round": 50}, K, N),
    ],
)
def test_published_cost_of_fine_tuning(keys: dict[str, Any], per_round: int, examples: int, tmp_path: Path) -> None:
    run = Run(tmp_path, backbone_of(Normed()), **keys)
    assert NORMED_PARAMETERS == sum(parameter.numel() for parameter in Normed().parameters()) - 2 == 302
    cost = run.published(7)
    assert cost.bytes == 2 * (C * D + 302) * per_round * 7 * 4
    assert cost.forward_passes == 3 * 7 * examples
    assert "(C · d + P)" in cost.formula
    alone = Run(tmp_path, backbone_of(Normed()), train="body", **keys)
    assert alone.published(7).bytes == 2 * 302 * per_round * 7 * 4
