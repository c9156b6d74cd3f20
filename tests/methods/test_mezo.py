"""Zeroth-order training: directions, probes, and FedMeZO and DistMeZO against MeZO written out.

Where a formula is checked, it is computed here in double precision, or by really moving the weights of a copy.
"""

import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional

from headstart.backbones import Backbone, Inputs, embed
from headstart.backbones.hugging_face import _Pooled
from headstart.backbones.transforms import TextTransform
from headstart.config.recipe import Recipe
from headstart.core.ledger import Ledger
from headstart.core.message import Message
from headstart.core.reply import Reply
from headstart.core.state import pack
from headstart.data import Dataset, Examples, Federation
from headstart.engine import local
from headstart.engine.client import ClientRuntime
from headstart.engine.client_states import ClientStates
from headstart.errors import HeadstartError, MessageError, RecipeError
from headstart.heads import LinearHead
from headstart.methods import build
from headstart.methods.fedmezo import NO_STEP, joined
from headstart.modules import attach
from headstart.runner import run as play_recipe
from headstart.runner.costs import paper_cost
from headstart.solvers import network as networks
from headstart.solvers import zeroth
from headstart.solvers.cohort import Cohort
from headstart.solvers.directions import DISTRIBUTIONS
from headstart.solvers.zeroth import Descent
from tests.helpers import Bench, context_of, play, round_trip
from tests.methods.test_bodies import HEAD, IMAGES, PICTURES, SIDE, Normed, Plain, Y, backbone_of, bits

N, C = len(Y), 3
SEED = (3, 1)
direction = DISTRIBUTIONS["gaussian"].direction
RNG = np.random.default_rng(7)
TEXTS = [" ".join(RNG.choice(list("abcdefg"), RNG.integers(1, 7))) for _ in range(N)]
MODULES = {"rank": 2, "alpha_lora": 4.0, "bottleneck": 3, "tokens": 2}


# ---------------------------------------------------------------------------------------------------------- tiny bodies


class Letters:
    """As much of a tokenizer as a transform uses: every word of one letter is a token, after a first one."""

    pad_token_id, model_input_names = 0, ("input_ids", "token_type_ids", "attention_mask")

    def __call__(self, text: str, truncation: bool, max_length: int) -> dict[str, list[int]]:
        ids = [1, *(2 + ord(word) - ord("a") for word in text.split())][:max_length]
        return {"input_ids": ids, "token_type_ids": [0] * len(ids)}


class Table:
    def __getitem__(self, rows: list[int]) -> dict[str, list[str]]:
        return {"text": [TEXTS[row] for row in rows]}


SENTENCES = Examples("text", Table(), ("text",), np.arange(N), Y)
WIDTH = 8


def bert_backbone(dropout: float = 0.5) -> Backbone:
    """Two random layers; dropout shows where it is not off."""
    config = transformers.BertConfig(
        vocab_size=9, hidden_size=WIDTH, num_hidden_layers=2, num_attention_heads=2, intermediate_size=12,
        max_position_embeddings=16, hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout,
        initializer_range=0.4,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(5)
        encoder = transformers.BertModel(config, add_pooling_layer=False)
        for parameter in encoder.parameters():  # biases that are not zero
            parameter.data += 0.05 * torch.randn_like(parameter)
    body = _Pooled(encoder, "mean", image=False).eval().requires_grad_(False)
    return Backbone("bert", "text", WIDTH, body, encoder, TextTransform(Letters(), 16), "bert")


class Attentive(nn.Module):
    """Attention of torch itself, over rows of pixels."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(3)
            self.attention = nn.MultiheadAttention(3 * SIDE, 2, batch_first=True)
            self.last = nn.Linear(3 * SIDE, 5)
            nn.init.normal_(self.attention.out_proj.bias)

    def forward(self, pixels: Tensor) -> Tensor:
        rows = pixels.permute(0, 2, 1, 3).flatten(2)
        return self.last(self.attention(rows, rows, rows, need_weights=False)[0].mean(dim=1))


class Row(nn.Module):
    """Hands its parameter on, in the parameter's own memory."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(0.2 * torch.randn(5, 3 * SIDE**2))

    def forward(self, pixels: Tensor) -> Tensor:
        return self.weight.T


class Handing(nn.Module):
    """Reads the parameters of two layers of one size after both have been called."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(6)
            self.one, self.two = Row(), Row()

    def forward(self, pixels: Tensor) -> Tensor:
        one, two = self.one(pixels), self.two(pixels)
        return (pixels.flatten(1) @ one).tanh() + pixels.flatten(1) @ two


class Reading(Plain):
    """Reads the weights of its second layer without calling it; ``twice``, after a call."""

    def __init__(self, twice: bool) -> None:
        super().__init__()
        self.twice = twice

    def forward(self, pixels: Tensor) -> Tensor:
        maps = functional.conv2d(self.one(pixels).tanh(), self.two.weight, self.two.bias)
        if self.twice:
            maps = maps + self.two(self.one(pixels))
        return maps.mean(dim=(2, 3))


def bert_head() -> LinearHead:
    rng = np.random.default_rng(1)
    return LinearHead(rng.normal(size=(C, WIDTH)).astype(np.float32), rng.normal(size=C).astype(np.float32))


def stage_of(**keys: Any) -> Any:
    full = {"method": "fedmezo", "train": "all", "rounds": 3, "lr": 0.01} | keys
    return Recipe.parse({"data": {"dataset": "x"}, "stages": [full]}).stages[0]


class Run:
    """A stage in this process, on pictures, texts or features, by clients that ``who`` names."""

    def __init__(self, who: np.ndarray, kind: str = "plain", seed: tuple[int, int] = SEED, **keys: Any) -> None:
        self.stage, self.seed, self.kind = stage_of(**keys), seed, kind
        examples = SENTENCES if kind == "bert" else PICTURES
        nets = {"plain": Plain, "normed": Normed, "attentive": Attentive, "handing": Handing}
        self.backbone = bert_backbone() if kind == "bert" else backbone_of(nets[kind]())
        self.module = None
        if self.stage.train in ("lora", "adapter"):
            self.module = attach(self.stage.train, self.backbone, MODULES, seed=4)
            with torch.random.fork_rng():
                torch.manual_seed(8)
                for parameter in self.module.parameters.values():  # LoRA's B and the adapters' last layer are zero
                    parameter.data += 0.3 * torch.randn_like(parameter)
        clients = int(who.max()) + 1
        names = tuple(f"client-{number}" for number in range(clients))
        self.federation = Federation(Dataset("x", ("a", "b", "c"), examples, examples), who, None, names)
        previous = bert_head() if kind == "bert" else HEAD
        body = None if self.stage.train == "head" else self.backbone
        context = context_of(
            self.stage, C, self.backbone.dim, seed, clients, N, previous, backbone=body, module=self.module
        )
        self.bench = Bench(self.stage, context)
        self.method = self.bench.method
        self.source: Any = Inputs(self.backbone, examples, "x")
        if self.stage.train == "head":
            self.source = embed(self.backbone, examples, "x")
        self.ledger = Ledger.open(clients)
        self.state: Any = self.bench.init()

    def play(self, after: Any = lambda *_: None) -> "Run":
        with TemporaryDirectory() as folder:
            states = ClientStates(Path(folder), self.federation.n_clients, self.method.client_state)
            self.state = play(self.bench, self.federation, self.source, self.ledger, states, after, state=self.state)
        return self

    def cohort(self, *clients: int) -> Cohort:
        rows, owners = self.federation.rows_of(np.array(clients))
        new = np.ones(len(clients), bool)
        return Cohort(np.array(clients), self.source, rows, Y[rows], owners, new, {}.__getitem__)

    def trained(self) -> dict[str, np.ndarray]:
        """What the log so far makes of the trained parameters."""
        if self.method.replays:
            self.bench.head(self.state)  # takes the steps that are left
        return {name: p.detach().numpy().copy() for name, p in self.method.network.trained.items()}


EVERYBODY = np.zeros(N, np.int64)
KINDS = [
    ("plain", "all"), ("plain", "body"), ("plain", "head"), ("normed", "all"), ("attentive", "all"),
    ("handing", "all"),
    ("bert", "all"), ("bert", "lora"), ("bert", "adapter"), ("bert", "head"),
]  # fmt: skip


@contextmanager
def doubled(module: nn.Module) -> Iterator[None]:
    """Parameters and floating buffers in double precision for a while, then the very tensors that were there."""
    parameters = {parameter: parameter.data for parameter in module.parameters()}
    buffers = [(each, name, b) for each in module.modules() for name, b in each.named_buffers(recurse=False)]
    module.double()
    yield
    for parameter, values in parameters.items():
        parameter.data = values
    for each, name, values in buffers:
        setattr(each, name, values)


def exact_loss(run: Run, move: dict[str, Tensor]) -> Tensor:
    """Losses [N] in double precision of the model with its parameters really moved along these directions.

    Without headstart's own batches: one example at a time, without padding.
    """
    parameters = run.method.network.parameters
    head = {n: p.detach().double() + move.get(n, 0) for n, p in parameters.items() if n.startswith("head.")}
    losses = []
    with doubled(run.backbone.body), torch.no_grad():
        for name, step in move.items():
            if not name.startswith("head."):
                parameters[name].data = parameters[name].data + step
        for row in range(N):
            scores = features_of(run, row) @ head["head.weight"].T + head["head.bias"]
            losses.append(functional.cross_entropy(scores / run.stage.temperature, torch.tensor(Y[row : row + 1])))
    return torch.stack(losses)


def features_of(run: Run, row: int) -> Tensor:
    body: Any = run.backbone.body
    if run.kind == "bert":
        ids = torch.tensor([[1, *(2 + ord(word) - ord("a") for word in TEXTS[row].split())]])
        states: Tensor = body.encoder(input_ids=ids).last_hidden_state
        return states.mean(dim=1)
    pixels = torch.tensor(IMAGES[row : row + 1] / 127.5 - 1).permute(0, 3, 1, 2)
    features: Tensor = body.network(pixels)
    return features


def directions_of(run: Run, seed: int, number: int) -> dict[str, Tensor]:
    return {
        name: torch.tensor(direction(seed, number, name, p.numel()), dtype=torch.float64).view(p.shape)
        for name, p in run.method.network.trained.items()
    }


# -------------------------------------------------------------------------------------------------------------- probing


@pytest.mark.parametrize(("kind", "train"), KINDS)
def test_a_slope_is_the_central_difference_of_moved_weights(kind: str, train: str) -> None:
    run = Run(EVERYBODY, kind, train=train, epsilon=1e-2, temperature=0.7)
    before = bits(run.backbone.body), {n: p.detach().clone() for n, p in run.method.network.parameters.items()}
    rows = np.array([4, 0, 17, 9, 2])
    found = run.method.probes.slopes(run.cohort(0), rows, 77, 1)
    z = directions_of(run, 77, 1)
    up, down = (exact_loss(run, {n: sign * 1e-2 * v for n, v in z.items()}) for sign in (1, -1))
    expected = ((up - down) / 2e-2).detach().numpy()[rows]
    np.testing.assert_allclose(found, expected, rtol=1e-3, atol=2e-4)
    assert np.ptp(expected) > 0.1
    # Every parameter is back, bit for bit, and nothing is left on the layers.
    assert bits(run.backbone.body) == before[0]
    for name, parameter in run.method.network.parameters.items():
        assert torch.equal(parameter, before[1][name])
    assert not any(m._forward_pre_hooks for m in run.backbone.body.modules())


@pytest.mark.parametrize(("kind", "train"), [("plain", "all"), ("attentive", "body"), ("bert", "lora")])
def test_a_slope_approaches_the_derivative_along_the_direction(kind: str, train: str) -> None:
    run = Run(EVERYBODY, kind, train=train, epsilon=1e-3)
    z = directions_of(run, 5, 0)
    network = run.method.network
    for name, parameter in network.parameters.items():
        parameter.requires_grad_(name in z)
    scores = network.scores(next(run.source.batches([np.arange(N)])))
    loss = functional.cross_entropy(scores, torch.tensor(Y))
    gradients = torch.autograd.grad(loss, list(network.trained.values()), allow_unused=True)
    given = zip(z.values(), gradients, strict=True)
    slope = sum(float((v * g.double()).sum()) for v, g in given if g is not None)
    found = run.method.probes.slopes(run.cohort(0), np.arange(N), 5, 0).mean()
    assert found == pytest.approx(slope, rel=1e-2, abs=2e-3)
    assert abs(slope) > 0.05


@pytest.mark.parametrize("where", ["one", "two"])
def test_a_forward_pass_that_fails_leaves_the_weights_as_they_were(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(EVERYBODY, "plain")
    before = bits(run.backbone.body), {n: p.detach().clone() for n, p in run.method.network.parameters.items()}
    seen: list[bool] = []
    layer = getattr(run.backbone.core, where)

    def fail(values: Tensor) -> Tensor:
        seen.append(torch.equal(layer.weight, before[1][f"body.{where}.weight"]))
        raise RuntimeError("out of memory")

    monkeypatch.setattr(layer, "forward", fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        run.method.probes.slopes(run.cohort(0), np.arange(N), 1, 0)
    assert seen == [False]  # it failed while the layer was moved
    assert bits(run.backbone.body) == before[0]
    for name, parameter in run.method.network.parameters.items():
        assert torch.equal(parameter, before[1][name])
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in run.backbone.body.modules())


def test_dropout_is_off_and_a_body_in_training_mode_is_put_into_evaluation() -> None:
    run = Run(EVERYBODY, "bert", train="lora")
    first = run.method.probes.slopes(run.cohort(0), np.arange(N), 9, 0)
    run.backbone.body.train()
    np.testing.assert_array_equal(run.method.probes.slopes(run.cohort(0), np.arange(N), 9, 0), first)
    assert not any(module.training for module in run.backbone.body.modules())


def test_batch_norm_keeps_its_statistics() -> None:
    run = Run(EVERYBODY, "normed", lr=0.05)
    before = {name: value.clone() for name, value in run.backbone.core.named_buffers()}
    run.play()
    run.bench.head(run.state)
    for name, value in run.backbone.core.named_buffers():
        assert torch.equal(value, before[name])


@pytest.mark.parametrize("twice", [False, True])
@pytest.mark.parametrize("method", ["fedmezo", "distmezo"])
def test_a_body_that_reads_weights_outside_of_their_layer_is_refused(method: str, twice: bool) -> None:
    """Such a read is not perturbed: the slopes would not be those along the direction that the step takes."""
    backbone = backbone_of(Reading(twice))
    before = bits(backbone.body)

    def built(stage: Any, body: Backbone | None) -> Any:
        return build(stage, context_of(stage, C, backbone.dim, SEED, 1, N, HEAD, backbone=body))

    sentence = rf"{method} cannot probe 2 parameters \(body.two.bias, body.two.weight\) of tiny, .* train 'head' or"
    for train in ("all", "body"):
        with pytest.raises(HeadstartError, match=sentence):
            built(stage_of(method=method, train=train), backbone)
    assert bits(backbone.body) == before
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in backbone.body.modules())
    built(stage_of(method=method, train="head"), None)
    built(stage_of(train="all"), backbone_of(Plain()))


def test_a_parameter_that_no_feature_depends_on_does_not_move() -> None:
    run = Run(EVERYBODY, "normed", lr=0.05, weight_decay=0.1).play()
    assert "body.spare" not in run.trained()
    assert run.backbone.core.spare.tolist() == [0.25, -4.0]
    assert float(run.trained()["body.scale"]) != 1.5


# -------------------------------------------------------------------------------------------------------------- FedMeZO


def mezo(who: np.ndarray, weights: np.ndarray | None = None, **keys: Any) -> dict[str, np.ndarray]:
    """MeZO on the pooled examples: real moves, double precision, the mean loss (or one weighted by example)."""
    run = Run(who, seed=SEED, **keys)
    stage, share = run.stage, np.full(N, 1 / N) if weights is None else weights
    state = {n: p.detach().double().clone() for n, p in run.method.network.trained.items()}
    start = {n: v.clone() for n, v in state.items()}
    velocity = {n: torch.zeros_like(v) for n, v in state.items()}
    curvatures: list[float] = []
    squares: list[float] = []
    for round in range(stage.rounds):
        seed = int(run.bench.broadcast(run.bench.init(), round).scalars["seed"])
        total, slopes = {n: torch.zeros_like(v) for n, v in state.items()}, []
        for number in range(stage.num_directions):
            z = directions_of(run, seed, number)
            up, down, here = (
                exact_loss(run, {n: state[n] - start[n] + sign * stage.epsilon * z[n] for n in z}).detach().numpy()
                for sign in (1, -1, 0)
            )
            slopes.append(float(share @ (up - down)) / (2 * stage.epsilon))
            if round < stage.probe_rounds:
                curvatures.append(float(share @ (up - 2 * here + down)) / stage.epsilon**2)
            for name, value in z.items():
                total[name] += slopes[-1] * value / stage.num_directions
        if round < stage.probe_rounds:
            continue
        rate = stage.lr * (stage.num_directions / np.sqrt(np.mean(np.square(curvatures))) if curvatures else 1)
        if stage.beta2 is not None:  # the mean of all squares, each older one counting less by β₂
            squares.append(float(np.mean(np.square(slopes))))
            ages = np.arange(len(squares))[::-1]
            rate /= np.sqrt(np.average(squares, weights=stage.beta2**ages))
        for name in state:
            velocity[name] = stage.momentum * velocity[name] + rate * total[name]
            state[name] = state[name] - velocity[name] - rate * stage.weight_decay * state[name]
    return {name: value.numpy() for name, value in state.items()}


IID = np.arange(N) % 10
BY_CLASS = np.empty(N, np.int64)
BY_CLASS[np.argsort(Y, kind="stable")] = np.arange(N) // 2  # two examples of one class, mostly
PARTITIONS = {"iid": IID, "by-class": BY_CLASS, "one": EVERYBODY, "uneven": np.minimum(np.arange(N) // 7, 2)}


@pytest.mark.parametrize("keys", [
    {"train": "head", "lr": 0.05, "num_directions": 3},
    {"train": "all", "lr": 0.02, "weight_decay": 0.1, "epsilon": 1e-2},
    {"train": "lora", "kind": "bert", "lr": 0.02, "num_directions": 2, "temperature": 0.5, "epsilon": 1e-2},
    {"train": "head", "lr": 0.05, "momentum": 0.9, "rounds": 5},
    {"train": "all", "lr": 0.02, "beta2": 0.8, "momentum": 0.5, "epsilon": 1e-2},
    {"train": "head", "lr": 0.5, "probe_rounds": 2, "num_directions": 3, "rounds": 4, "epsilon": 1e-1},
], ids=["head", "all", "lora", "momentum", "adam", "probe"])  # fmt: skip
def test_any_partition_is_mezo_on_the_pooled_examples(keys: dict[str, Any]) -> None:
    expected = mezo(EVERYBODY, **keys)
    found = {name: Run(who, **keys).play().trained() for name, who in PARTITIONS.items()}
    begin = Run(EVERYBODY, **keys).trained()
    for each in found.values():
        assert each.keys() == expected.keys()
        for name, value in expected.items():
            np.testing.assert_allclose(each[name], value, rtol=2e-3, atol=2e-4, err_msg=name)
    # Among each other they agree to the rounding of their scalars, far below what the rounds have changed.
    for name, value in found["one"].items():
        moved = np.abs(value - begin[name]).max()
        assert moved > 5e-3
        for each in found.values():
            assert np.abs(each[name] - value).max() < 1e-3 * moved


def test_uniform_weighting_is_the_plain_mean_over_clients() -> None:
    who = PARTITIONS["uneven"]
    sizes = np.bincount(who)
    assert sizes.tolist() == [7, 7, 6]
    who = np.minimum(np.arange(N) // 3, 1)  # 3 and 17
    sizes = np.bincount(who)
    keys = {"train": "head", "lr": 0.05, "epsilon": 1e-2}
    expected = mezo(who, weights=1 / (2 * sizes[who]), **keys)
    uniform, examples = (Run(who, weighting=w, **keys).play() for w in ("uniform", "examples"))
    for name, value in uniform.trained().items():
        np.testing.assert_allclose(value, expected[name], rtol=1e-3, atol=1e-4)
        assert not np.allclose(value, examples.trained()[name], rtol=1e-2, atol=1e-3)
    # The scalars themselves, from what the clients said of the first round.
    first = Run(who, weighting="uniform", **keys)
    said = first.bench.answer(first.cohort(0, 1), first.bench.broadcast(first.state))
    slopes = np.array([reply.message.arrays["slopes"][0] for reply in said], np.float64)
    assert uniform.state.slopes[0, 0] == pytest.approx(slopes.mean(), rel=1e-5)
    assert examples.state.slopes[0, 0] == pytest.approx(slopes @ sizes / N, rel=1e-5)


def test_batches_are_so_many_examples_of_each_client_and_new_ones_every_round() -> None:
    who = np.minimum(np.arange(N) // 3, 1)
    run = Run(who, train="head", batch_size=5)
    cohort = run.cohort(0, 1)
    drawn = [run.method._rows(cohort, round) for round in range(20)]
    for rows in drawn:
        assert np.bincount(cohort.owners[rows]).tolist() == [3, 5]  # the first client has three only
        assert len(set(rows)) == len(rows)
    assert len({tuple(rows) for rows in drawn}) > 15
    assert len(set(np.concatenate(drawn))) == N
    (_, reply) = run.bench.answer(cohort, run.bench.broadcast(run.state))
    assert reply.message.scalars["examples"] == 17  # what the mean weighs by: all that the client has
    slopes = run.method.probes.slopes(cohort, drawn[0], run.method.seed_of(0), 0)[-5:]
    assert reply.message.arrays["slopes"][0] == pytest.approx(slopes.mean(), rel=1e-5)


def test_shares_of_batches_grow_with_the_client_and_the_mean_counts_examples_alike() -> None:
    who = np.repeat([0, 1], [4, N - 4])
    run = Run(who, train="head", batch_share=0.5)
    rows = run.method._rows(run.cohort(0, 1), 0)
    assert np.bincount(run.cohort(0, 1).owners[rows]).tolist() == [2, 8]
    assert len(np.unique(rows)) == 10
    replies = run.bench.answer(run.cohort(0, 1), run.bench.broadcast(run.state))
    total = run.bench.total(run.state, replies)
    each = run.method.probes.slopes(run.cohort(0, 1), rows, int(run.bench.broadcast(run.state).scalars["seed"]), 0)
    assert float(total.mean("slopes")[""][0]) == pytest.approx(each.mean(), rel=1e-5)


def test_batches_estimate_the_slope_of_the_pooled_loss() -> None:
    """The mean over 600 draws of two examples of each client, one of which has a class to itself."""
    who = (Y != np.bincount(Y).argmin()).astype(np.int64)
    assert np.bincount(who).tolist() == [4, 16]
    run = Run(who, train="head", batch_size=2)
    cohort, seed = run.cohort(0, 1), run.method.seed_of(0)
    slopes = run.method.probes.slopes(cohort, np.arange(N), seed, 0)
    found = []
    for round in range(600):
        message = Message(run.bench.broadcast(run.state).arrays, {"round": round, "first": 0, "seed": seed})
        found.append(float(run.bench.after(run.state, run.bench.answer(cohort, message)).slopes[0, 0]))
    error = np.std(found) / np.sqrt(len(found))
    by_batch = (slopes[cohort.owners == 0].mean() + slopes[cohort.owners == 1].mean()) / 2
    assert abs(slopes.mean() - by_batch) > 10 * error
    assert abs(np.mean(found) - slopes.mean()) < 4 * error


def test_the_estimate_is_unbiased_on_a_logistic_problem() -> None:
    """The mean of slope · z over 4,000 seeds, against the gradient by hand."""
    run = Run(EVERYBODY, train="head", epsilon=1e-3)
    network = run.method.network
    weight, bias = (network.parameters[f"head.{name}"].detach().double().numpy() for name in ("weight", "bias"))
    features = np.asarray(run.source, np.float64)
    scores = features @ weight.T + bias
    chances = np.exp(scores - scores.max(axis=1, keepdims=True))
    error = (chances / chances.sum(axis=1, keepdims=True) - np.eye(C)[Y]) / N
    gradient = np.concatenate([(error.T @ features).ravel(), error.sum(axis=0)])
    seeds, cohort = 4000, run.cohort(0)
    estimates = np.empty((seeds, len(gradient)))
    for seed in range(seeds):
        z = np.concatenate([direction(seed, 0, "head.weight", weight.size), direction(seed, 0, "head.bias", C)])
        estimates[seed] = run.method.probes.slopes(cohort, np.arange(N), seed, 0).mean() * z
    # Cov(g z) has the trace (n + 1) ‖g‖²: the mean over the seeds is off by that, divided by their number.
    length = np.linalg.norm(gradient)
    assert np.linalg.norm(estimates.mean(axis=0) - gradient) < 1.5 * length * np.sqrt((len(gradient) + 1) / seeds)
    errors = estimates.std(axis=0) / np.sqrt(seeds)
    assert (np.abs(estimates.mean(axis=0) - gradient) < 4.5 * errors).all()
    assert length > 10 * errors.max()


def test_the_estimate_is_exact_along_z_and_unbiased_on_a_quadratic(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half the squared scores of a linear head are quadratic in it: a central difference is the slope, to rounding."""
    quadratic = SimpleNamespace(
        linear=networks.functional.linear,
        cross_entropy=lambda scores, labels, reduction: 0.5 * scores.square().sum(dim=1),
    )
    monkeypatch.setattr(networks, "functional", quadratic)
    run = Run(EVERYBODY, train="head", epsilon=1e-2)
    network = run.method.network
    weight, bias = (network.parameters[f"head.{name}"].detach().double().numpy() for name in ("weight", "bias"))
    features = np.asarray(run.source, np.float64)
    scores = (features @ weight.T + bias) / N
    gradient = np.concatenate([(scores.T @ features).ravel(), scores.sum(axis=0)])
    seeds, cohort = 3000, run.cohort(0)
    estimates = np.empty((seeds, len(gradient)))
    for seed in range(seeds):
        z = np.concatenate([direction(seed, 0, "head.weight", weight.size), direction(seed, 0, "head.bias", C)])
        slope = run.method.probes.slopes(cohort, np.arange(N), seed, 0).mean()
        assert slope == pytest.approx(gradient @ z, rel=1e-3, abs=1e-3 * np.linalg.norm(gradient))
        estimates[seed] = slope * z
    errors = estimates.std(axis=0) / np.sqrt(seeds)
    assert (np.abs(estimates.mean(axis=0) - gradient) < 4.5 * errors).all()
    assert np.linalg.norm(gradient) > 10 * errors.max()


# ------------------------------------------------------------------------------------------------ who was not there


def test_clients_that_miss_rounds_have_the_same_bits() -> None:
    """Every client has a network of its own; rounds that it missed are in the log that it gets."""
    keys: dict[str, Any] = {"train": "all", "rounds": 12, "lr": 0.02, "num_directions": 2, "schedule": "cosine"}
    who = np.arange(N) % 4
    server = Run(who, **keys)
    clients = [Run(who, **keys) for _ in range(4)]
    heard, state = [-1] * 4, server.state
    rng = np.random.default_rng(2)
    longest = 0
    for round in range(12):
        present = [0, *(1 + np.flatnonzero(rng.random(3) < 0.3))]  # the first one sees all rounds
        replies = []
        for client in present:
            message = round_trip(server.bench.broadcast(state, round, heard[client]))
            longest = max(longest, len(message.arrays["seeds"]))
            replies += clients[client].bench.answer(clients[client].cohort(int(client)), message)
            heard[client] = round
        weights = [bits(clients[client].backbone.core) for client in present]
        assert all(each == weights[0] for each in weights)
        state = server.bench.after(state, replies, round)
    assert longest > 3  # somebody was away for a while
    # In the end everybody is told the rest; the server replays the log from nothing.
    for client in range(4):
        message = server.bench.broadcast(state, 12, heard[client])
        clients[client].bench.answer(clients[client].cohort(client), message)
    server.bench.head(state)
    expected = {n: p.detach().numpy().tobytes() for n, p in server.method.network.trained.items()}
    for client in clients:
        assert {n: p.detach().numpy().tobytes() for n, p in client.method.network.trained.items()} == expected
    assert expected.keys() >= {"head.weight", "body.one.weight"}
    assert bits(server.backbone.core) != bits(Plain())


def test_a_log_that_starts_too_late_is_refused() -> None:
    run = Run(EVERYBODY, train="head", rounds=4).play()
    late = Run(EVERYBODY, train="head", rounds=4)
    with pytest.raises(MessageError, match="the log starts at step 3, and the weights have taken 0"):
        late.bench.answer(late.cohort(0), run.bench.broadcast(run.state, 4, 3))


def test_weights_go_back_to_an_earlier_round_where_the_stage_may_end_with_one() -> None:
    """To the very bits; elsewhere nobody asks for it, and what they started from would take as much memory again."""
    keys: dict[str, Any] = {"train": "all", "rounds": 4, "momentum": 0.5}
    runs = {keep: Run(EVERYBODY, keep=keep, **keys).play() for keep in ("best", "last")}
    short = {name: array[:2] for name, array in runs["last"].state.message().arrays.items()}
    for run in runs.values():
        run.bench.head(run.state)
    fresh = Run(EVERYBODY, **keys)
    fresh.method.load(Message(short))
    runs["best"].method.load(Message(short))
    assert bits(runs["best"].backbone.core) == bits(fresh.backbone.core) != bits(runs["last"].backbone.core)
    with pytest.raises(MessageError, match="the log ends after step 2, and the weights have taken 4"):
        runs["last"].method.load(Message(short))


MEMORY = """
import gc, sys
import numpy as np, torch, torch._dynamo, headstart
from headstart.core.ledger import peak_memory
gc.disable()  # what only a collection of garbage would free counts
torch.set_num_threads(1)


class Wide(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(16)))

    def forward(self, pixels):
        return self.layers(torch.nn.functional.pad(pixels.flatten(1), (0, 832)))


headstart.register_backbone("wide", Wide(), image_size=8, preprocess="half")
labels = np.arange(40) % 4
images = np.random.default_rng(0).integers(0, 255, (40, 8, 8, 3)).astype(np.uint8)
zeroth = {"method": "fedmezo", "rounds": 2, "lr": 1e-6}
first = {"method": "fedavg", "rounds": 2, "lr": 1e-6, "train": "all"}
for name, stages in {
    "frozen": [{"method": "fedncm"}],
    "zeroth": [zeroth | {"train": part} for part in ("all", "norms", "body", "all")],
    "first": [first],
    "longer": [first | {"rounds": 4}],
}.items():
    model = {"backbone": "wide"}
    table = {"data": {"partition": {"kind": "iid", "clients": 2}}, "model": model, "stages": stages}
    headstart.run(table, f"{sys.argv[1]}/{name}", data=(images, labels), report=False)
    print(peak_memory())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="peak memory as Linux tells it")
def test_stages_that_train_the_whole_backbone_take_the_memory_of_inference(tmp_path: Path) -> None:
    """Weights of 64 MiB in sixteen layers: as much again would be a copy that nobody needs. What is kept of directions
    is a quarter of it. Stages and rounds leave nothing behind."""
    command, root = [sys.executable, "-c", MEMORY, str(tmp_path)], Path(__file__).parents[2]
    done = subprocess.run(command, cwd=root, check=True, capture_output=True, text=True, timeout=120)
    frozen, zeroth, first, longer = (int(line) / 2**20 for line in done.stdout.split())
    assert zeroth - frozen < 56
    assert longer - first < 56


def test_a_client_that_starts_again_from_a_checkpoint_needs_the_rest_of_the_log_only() -> None:
    run = Run(EVERYBODY, train="head", rounds=4).play()
    again = Run(EVERYBODY, train="head", rounds=4)
    again.state = run.bench.saved(run.state)
    again.bench.head(again.state)
    again.bench.answer(again.cohort(0), run.bench.broadcast(run.state, 4, 3))
    for name, value in run.trained().items():
        np.testing.assert_array_equal(again.trained()[name], value)


def test_bytes_down_are_those_of_each_clients_own_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "_COHORT_EXAMPLES", 4)  # several cohorts in a round
    who = np.arange(N) % 10
    run = Run(who, train="head", rounds=9, participation=0.4, num_directions=2)
    expected, last = np.zeros(10, np.int64), np.full(10, -1)
    states = [run.state]
    asked: list[np.ndarray] = []
    before = np.zeros(10, np.int64)

    def after(number: int, state: Any) -> None:
        states.append(state)
        asked.append(np.flatnonzero(run.ledger.bytes_up > before))
        before[:] = run.ledger.bytes_up

    run.play(after)
    for number, clients in enumerate(asked):
        assert len(clients) == 4
        for client in clients:
            first = max(int(last[client]), 0)
            message = Message(
                {"seeds": run.state.seeds[first:number], "slopes": run.state.slopes[first:number]},
                {"round": number, "first": first, "seed": int(run.state.seeds[number])},
            )
            expected[client] += len(message.to_bytes())
            last[client] = number
    np.testing.assert_array_equal(run.ledger.bytes_down, expected)
    assert len(set(expected.tolist())) > 2


def test_a_log_of_two_thousand_rounds_is_small() -> None:
    run = Run(EVERYBODY, train="head", rounds=2000)
    seeds, slopes = np.arange(2000), np.ones((2000, 1), np.float32)
    log = pack(replace(run.state, seeds=seeds, slopes=slopes)).to_bytes()
    assert 2000 * 12 <= len(log) < 50_000


# ------------------------------------------------------------------------------------------------------ refused scalars


@pytest.mark.parametrize(
    ("slope", "why"),
    [
        (np.nan, "array 'slopes' holds NaN or infinity"),
        (np.inf, "array 'slopes' holds NaN or infinity"),
        (2e5, "a slope of 2.0e[+]05 is absurd, more than 1.0e[+]05"),
        (-2e5, "a slope of 2.0e[+]05 is absurd"),
    ],
)
def test_scalars_that_cannot_be_right_are_refused_and_the_round_goes_on(
    slope: float, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(np.arange(N) % 4, train="head", rounds=2, lr=0.05)
    honest = ClientRuntime.answer

    def answer(self: Any, cohort: Cohort, message: Message) -> list[Reply]:
        bad = Message({"slopes": np.array([slope], np.float32)}, {"examples": 5})
        replies = honest(self, cohort, message)
        return [replace(r, message=bad) if r.clients[0] == 2 else r for r in replies]

    monkeypatch.setattr(ClientRuntime, "answer", answer)
    run.play()
    assert [(drop["round"], drop["clients"]) for drop in run.ledger.dropped] == [(1, "client-2"), (2, "client-2")]
    for drop in run.ledger.dropped:
        assert re.match(why, str(drop["why"]))
    # The mean is that of the three others.
    others = Run(np.arange(N) % 4, train="head", rounds=2, lr=0.05)
    said = honest(others.bench.runtime, others.cohort(0, 1, 3), others.bench.broadcast(others.state))
    slopes = [float(reply.message.arrays["slopes"][0]) for reply in said]
    assert run.state.slopes[0, 0] == pytest.approx(np.mean(slopes), rel=1e-5)  # five examples each


def test_the_largest_scalar_that_can_be_right_is_taken() -> None:
    run = Run(EVERYBODY, train="head", epsilon=0.5)
    for slope, good in ((200.0, True), (201.0, False)):
        message = Message({"slopes": np.array([slope], np.float32)}, {"examples": 5})
        reply = Reply(np.array([0]), message, np.array([0]), np.array([0]))
        if good:
            assert run.bench.total(run.state, [reply]).sums["slopes"].tolist() == [1000.0]
        else:
            with pytest.raises(MessageError, match="absurd"):
                run.bench.total(run.state, [reply])


def test_the_news_of_a_log_follow_what_was_told_before() -> None:
    seeds, slopes = np.arange(10, 15), np.arange(5, dtype=np.float32)[:, None]

    def told(first: int, last: int) -> Message:
        return Message({"seeds": seeds[first:last], "slopes": slopes[first:last]}, {"first": first, "round": last})

    whole = joined(told(0, 3), told(2, 5))
    assert whole.scalars == {"first": 0, "round": 5}
    np.testing.assert_array_equal(whole.arrays["seeds"], seeds)
    np.testing.assert_array_equal(whole.arrays["slopes"], slopes)
    with pytest.raises(MessageError, match="starts at step 3, and 2 steps are known"):
        joined(told(0, 2), told(3, 5))


# ---------------------------------------------------------------------------------------------------------------- costs


@pytest.mark.parametrize(
    ("keys", "clients", "bytes_per_round"),
    [
        ({}, 10, 30),  # the thesis: ten clients, one direction
        ({"num_directions": 4}, 10, 90),
        ({"participation": 0.1}, 100, 30),
        ({"clients_per_round": 10}, 100, 30),
        ({"clients_per_round": 50}, 10, 30),
        ({"participation": 0.01}, 10, 3),  # somebody is always asked
        ({"batch_size": 8}, 10, 30),
    ],
)
def test_the_published_cost(keys: dict[str, Any], clients: int, bytes_per_round: int) -> None:
    stage = stage_of(train="head", rounds=2621, **keys)
    bench = Bench(stage, context_of(stage, C, 5, SEED, clients))
    directions, counts = stage.num_directions, np.full((clients, C), 7)
    published = paper_cost(stage, bench.method, bench.context.tasks, 5, 2621, counts, bench.init())
    assert published.bytes == 2621 * bytes_per_round
    assert published.forward_passes == 2621 * 2 * directions * clients * (8 if "batch_size" in keys else C * 7)
    if not keys:
        assert published.bytes == 78_630


@pytest.mark.parametrize("train", ["all", "lora"])
def test_the_work_of_a_round_does_not_grow_with_the_clients(train: str) -> None:
    calls = {}
    for clients in (1, 5, 20):
        run = Run(np.arange(N) % clients, "bert" if train == "lora" else "plain", train=train, rounds=2)
        counted = [0]
        run.backbone.body.register_forward_hook(lambda *_, counted=counted: counted.__setitem__(0, counted[0] + 1))
        run.play()
        calls[clients] = counted[0]
        assert run.ledger.forward_passes.sum() == 2 * 2 * N  # two probes of every example in two rounds
        assert np.count_nonzero(run.ledger.bytes_up) == clients
    assert calls == {1: 4, 5: 4, 20: 4}


def test_where_only_the_head_moves_the_body_is_passed_once() -> None:
    run = Run(np.arange(N) % 4, train="head", rounds=3).play()
    assert run.ledger.forward_passes.tolist() == [5, 5, 5, 5]


# ------------------------------------------------------------------------------------------------------------- DistMeZO


def spied(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, np.ndarray]]:
    """Seeds and slopes of the steps that clients take."""
    taken: list[tuple[int, np.ndarray]] = []
    step = Descent.step

    def watch(self: Descent, seed: int, slopes: np.ndarray, *rest: Any) -> None:
        taken.append((seed, slopes.copy()))
        step(self, seed, slopes, *rest)

    monkeypatch.setattr(Descent, "step", watch)
    return taken


DIST: dict[str, Any] = {
    "method": "distmezo", "batch_size": "full", "local_steps": 1, "rounds": 1, "lr": 0.05, "epsilon": 1e-2,
}  # fmt: skip


@pytest.mark.parametrize("train", ["head", "all"])
def test_one_client_and_one_local_step_is_a_step_of_mezo(train: str, monkeypatch: pytest.MonkeyPatch) -> None:
    taken = spied(monkeypatch)
    run = Run(EVERYBODY, train=train, num_directions=2, weight_decay=0.2, **DIST)
    begin = {n: torch.tensor(v) for n, v in run.state.params.items()}
    run.play()
    ((seed, slopes),) = taken
    fresh = Run(EVERYBODY, train=train, num_directions=2, weight_decay=0.2, **DIST)
    total = {n: 0.2 * v for n, v in begin.items()}
    for number in range(2):
        z = directions_of(fresh, seed, number)
        up, down = (exact_loss(fresh, {n: s * 1e-2 * v for n, v in z.items()}).mean() for s in (1, -1))
        slope = float((up - down) / 2e-2)
        assert slopes[number] == pytest.approx(slope, rel=1e-3, abs=1e-4)
        total = {n: v + slope / 2 * z[n] for n, v in total.items()}
    for name, value in run.state.params.items():
        np.testing.assert_allclose(value, begin[name] - 0.05 * total[name], rtol=1e-3, atol=1e-4)
        assert not np.allclose(value, begin[name], atol=1e-3)


def test_clients_of_distmezo_have_directions_of_their_own_and_are_averaged_by_examples(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    taken = spied(monkeypatch)
    who = np.minimum(np.arange(N) // 5, 1)  # 5 and 15 examples
    run = Run(who, train="head", **DIST | {"local_steps": 3})
    begin = {n: v.copy() for n, v in run.state.params.items()}
    run.play()
    assert len({seed for seed, _ in taken}) == 6  # two clients, three steps
    ends = []
    for steps in (taken[:3], taken[3:]):
        end = {n: v.copy() for n, v in begin.items()}
        for seed, slopes in steps:
            end = {n: v - 0.05 * slopes[0] * direction(seed, 0, n, v.size).reshape(v.shape) for n, v in end.items()}
        ends.append(end)
    for name, value in run.state.params.items():
        np.testing.assert_allclose(value, 0.25 * ends[0][name] + 0.75 * ends[1][name], rtol=1e-4, atol=1e-5)
    # What travels is the whole of what is trained, as in FedAvg.
    size = sum(v.size for v in begin.values())
    assert (run.ledger.bytes_up > 4 * size).all()


def test_texts_of_one_batch_and_of_several_have_the_same_slopes(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(EVERYBODY, "bert", train="adapter")
    rows = RNG.permutation(N)
    once = run.method.probes.slopes(run.cohort(0), rows, 3, 0)
    for most, cost in ((3, 1 << 16), (N, 0)):
        monkeypatch.setitem(zeroth.BATCH_SIZES, "text", most)
        monkeypatch.setattr(zeroth, "PASS_COST", cost)
        assert 1 < len(run.method.probes.groups(run.cohort(0), rows)) < N
        np.testing.assert_allclose(run.method.probes.slopes(run.cohort(0), rows, 3, 0), once, rtol=1e-2, atol=2e-3)


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        ({"probe_rounds": 4}, "stages.0.lr: with probe_rounds it is a share of the rate that is measured"),
        ({"probe_rounds": 4, "lr": 0.3, "beta2": 0.9}, "stages.0.beta2: it makes the rate independent of the slopes"),
        ({"probe_rounds": 4, "lr": 0.3, "rounds": 4}, "stages.0.probe_rounds: all of the 4 rounds would measure"),
        ({"batch_share": 0.5, "batch_size": 4}, "stages.0: set batch_share or batch_size, not both"),
    ],
)
def test_what_does_not_go_together(keys: dict[str, Any], sentence: str) -> None:
    with pytest.raises(RecipeError, match=sentence):
        Recipe.parse({"data": {"dataset": "x"}, "stages": [{"method": "fedmezo", "train": "head"} | keys]})


def test_a_share_of_the_batch_is_in_a_recipe_with_every_default() -> None:
    """What a run leaves is read again for its report, to resume and to replay."""
    stage = {"method": "fedmezo", "train": "head", "batch_share": 0.5}
    recipe = Recipe.parse({"data": {"dataset": "x"}, "stages": [stage]})
    assert Recipe.parse(tomllib.loads(recipe.to_toml())) == recipe


def test_the_rate_that_was_found_is_told() -> None:
    run = Run(IID, train="head", lr=0.5, probe_rounds=2, rounds=4, epsilon=1e-1, num_directions=2).play()
    curvatures = 2 / 0.1 * run.state.slopes[:2].astype(np.float64)
    expected = 0.5 * 2 / np.sqrt(np.mean(np.square(curvatures)))
    assert run.method.selected(run.state) == {"lr": pytest.approx(expected)}
    assert Run(IID, train="head", rounds=1).method.selected(run.state) == {}


def test_rounds_without_a_reply_are_no_steps_of_the_running_mean() -> None:
    """A task that is first heard in round 13 takes the step that it would have taken in round 1: the mean of squares is
    of one, whatever the number of the round."""
    run = Run(IID, train="head", lr=0.5, beta2=0.99, rounds=13, epsilon=1e-1)
    log = replace(run.method.init(), seeds=np.array([7]), slopes=np.array([[0.25]], np.float32))
    late = replace(log, seeds=np.append(np.full(12, NO_STEP), 7), slopes=np.vstack([np.zeros((12, 1)), log.slopes]))
    moved = []
    for each in (log, late):
        fresh = Run(IID, train="head", lr=0.5, beta2=0.99, rounds=13, epsilon=1e-1).method
        moved.append(fresh.load(Message({"seeds": each.seeds, "slopes": each.slopes.astype(np.float32)})).weight)
    np.testing.assert_array_equal(moved[0], moved[1])
    step = moved[0] - run.method.load(pack(run.method.init())).weight
    assert np.sqrt(np.mean(np.square(step))) == pytest.approx(0.5, rel=0.5)  # rate · z, whatever the slope


def test_a_run_that_finds_its_rate_says_so_in_its_report(tmp_path: Path) -> None:
    stage = {"method": "fedmezo", "train": "head", "probe_rounds": 2, "lr": 0.3, "rounds": 4, "epsilon": 1e-1}
    data = {"dataset": "digits", "partition": {"kind": "iid", "clients": 3}}
    recipe = Recipe.parse({"data": data, "model": {"backbone": "features"}, "stages": [stage]})
    (done,) = play_recipe(recipe, tmp_path / "run").summary["stages"]
    assert f"η {done['chosen']['lr']:.3g}" in (tmp_path / "run" / "report.html").read_text()
