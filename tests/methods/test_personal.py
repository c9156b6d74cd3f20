"""Personalised methods: against plain loops in double precision, by what they become at their limits, and whole runs.

Below the last linear layer is a small network, or the hidden layers of a head on features that are computed once; both
go through the same checks.
"""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from headstart.config.recipe import Recipe
from headstart.data import Federation
from headstart.engine.client_states import ClientStates, collect
from headstart.errors import HeadstartError, RecipeError
from headstart.heads import LinearHead
from headstart.heads.estimators import Fed3R, FedCOF, FedNCM
from headstart.methods.fedper import FedPerStage
from headstart.methods.lg_fedavg import LGFedAvgStage
from headstart.methods.personalise import blended_head
from headstart.records import RunDirectory
from headstart.runner import run
from headstart.solvers.heads import batches
from headstart.solvers.objective import Objective
from tests.helpers import drawing
from tests.methods.test_bodies import (
    HEAD,
    MLP,
    SIZES,
    D,
    K,
    N,
    Normed,
    Plain,
    Run,
    Y,
    backbone_of,
    close,
    loss_of,
    model_of,
    named,
    rows_of,
    stage_of,
)
from tests.methods.test_methods import holds, overheard
from tests.runner.test_stages import _light, metrics_of, same_bits, same_run, with_interruptions  # noqa: F401 (a fixture among them)

TOP = ("head.weight", "head.bias")
LOCAL = {"batch_size": 4, "local_epochs": 2, "rounds": 3, "momentum": 0.7, "lr": 0.1}
BODIES = {
    "network": {"train": "all", "previous": HEAD},
    "hidden layers": {"train": "head", "previous": MLP, "head": "mlp", "hidden": 4},
}
# Everybody is asked, but not in every round, and one of them not before the last.
ASKED = [[0, 1], [1], [0, 1, 2]]

Values = dict[str, Tensor]


def run_of(folder: Path, body: str, network: nn.Module | None = None, **keys: Any) -> Run:
    keys = LOCAL | BODIES[body] | keys
    if body == "network" and keys["method"] == "fedbabu":
        keys["train"] = "body"
    return Run(folder, backbone_of(network or Plain()), **keys)


@pytest.fixture
def _some_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    drawing(monkeypatch, *ASKED)


# --------------------------------------------------------------------------------------------- the methods, written out


def values(model: nn.Sequential, names: Any = None) -> Values:
    return {name: value.detach().clone() for name, value in named(model).items() if names is None or name in names}


def put(model: nn.Sequential, given: Values) -> None:
    with torch.no_grad():
        for name, value in given.items():
            named(model)[name].copy_(value)


def gradients(model: nn.Sequential, names: list[str], rows: np.ndarray) -> Values:
    moving = [named(model)[name] for name in names]
    return dict(zip(names, torch.autograd.grad(loss_of(model, rows), moving), strict=True))


def descend(
    model: nn.Sequential,
    names: list[str],
    plan: list[np.ndarray],
    proximal: float = 0.0,
    centre: Values | None = None,
    velocity: Values | None = None,
    rate: float = LOCAL["lr"],
) -> None:
    """SGD with momentum on some of the parameters, batch after batch."""
    velocity = {} if velocity is None else velocity
    for rows in plan:
        for name, gradient in gradients(model, names, rows).items():
            here = named(model)[name]
            with torch.no_grad():
                if centre is not None:
                    gradient = gradient + proximal * (here - centre[name])
                velocity[name] = LOCAL["momentum"] * velocity.get(name, 0.0) + gradient
                here -= rate * velocity[name]


def plan_of(run: Run, client: int, round: int, objective: Objective | None = None) -> list[np.ndarray]:
    """Rows of a client's batches."""
    cohort = run.cohort(client)
    found = batches(cohort, run.stage, round, run.seed, objective or Objective())[0]
    return [cohort.rows[batch[batch >= 0]] for batch in found if (batch >= 0).any()]


def written_out(run: Run, method: str, body: str, asked: list[list[int]] = ASKED) -> tuple[Values, list[Values]]:
    """What is shared, and what is each client's own, after the rounds."""
    model = model_of(Plain(), BODIES[body]["previous"])
    below = [n for n in named(model) if n not in TOP and (body == "network" or n.startswith("head."))]
    everything = [*below, *TOP]
    start = values(model)
    shared = {"fedper": below, "fedrep": below, "lg-fedavg": [*TOP], "local-only": [], "ditto": everything}[method]
    mine = everything if method == "ditto" else [name for name in everything if name not in shared]
    known = {name: start[name] for name in shared}
    own: list[Values] = [{name: start[name] for name in mine} for _ in range(K)]
    velocities: list[Values] = [{} for _ in range(K)]
    for round, clients in enumerate(asked):
        ends = []
        for k in clients:
            put(model, start | known | ({} if method == "ditto" else own[k]))
            plan = plan_of(run, k, round)
            if method == "fedrep":
                descend(model, [*TOP], plan_of(run, k, round, Objective(epochs=run.stage.head_epochs, phase=1)))
                descend(model, below, plan)
            else:
                descend(model, everything, plan, velocity=velocities[k] if method == "local-only" else None)
            ends.append((SIZES[k], values(model, shared)))
            if method == "ditto":
                put(model, own[k])
                descend(model, everything, plan, run.stage.lambda_ditto, known)
            own[k] = values(model, mine)
        total = sum(size for size, _ in ends)
        known = {name: sum(size / total * end[name] for size, end in ends) for name in shared}
    return known, own


@pytest.mark.usefixtures("_some_asked")
@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize(
    ("method", "keys"),
    [
        ("fedper", {}),
        ("fedrep", {"head_epochs": 3}),
        ("lg-fedavg", {}),
        ("local-only", {}),
        ("ditto", {"lambda_ditto": 0.8}),
    ],
)
def test_a_method_is_its_plain_loop(method: str, keys: dict[str, Any], body: str, tmp_path: Path) -> None:
    """A head, or a body, goes on from where its client left it; who was not asked in a round keeps what it had."""
    run = run_of(tmp_path, body, method=method, **keys).play()
    known, own = written_out(run, method, body)
    close(run.state.params, known)
    found = run.own()
    for k in range(K):
        close({name: value[k] for name, value in found.items()}, own[k])
    start = run.method.personal_params(lambda name, value: value[None].repeat(K, 0))
    assert all(not np.allclose(found[name], value, rtol=1e-3) for name, value in start.items())


@pytest.mark.parametrize("method", ["fedper", "fedrep", "lg-fedavg", "ditto", "local-only"])
def test_who_is_asked_first_starts_from_the_start_and_who_is_never_asked_stays_there(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawing(monkeypatch, [0], [0, 1])
    run = run_of(tmp_path, "network", method=method, rounds=2)
    start = run.method.personal_params(lambda name, value: value[None].repeat(K, 0))
    seen: list[tuple[int, dict[str, np.ndarray]]] = []
    own = run.method.personal_params

    def watch(kept: Any, task: int = 0) -> Any:
        found = own(kept, task)
        seen.append((len(seen), {name: value.copy() for name, value in found.items()}))
        return found

    run.method.personal_params = watch
    run.play()
    first, again, late = (each for _, each in seen)  # client 0 in round 1, clients 0 and 1 in round 2
    for name, value in start.items():
        np.testing.assert_array_equal(first[name], value[:1])
        np.testing.assert_array_equal(late[name], value[1:2])
        assert not np.array_equal(again[name], value[:1])
        np.testing.assert_array_equal(run.own()[name][2], value[2])


# ------------------------------------------------------------------------------------------------------ at their limits


def same_parameters(left: Run, right: Run) -> None:
    """What both share is the same, bit for bit, and there is something."""
    both = left.bits().keys() & right.bits().keys()
    assert any(name.startswith("params/") for name in both)
    assert {name: left.bits()[name] for name in both} == {name: right.bits()[name] for name in both}


@pytest.mark.parametrize("network", [Plain, Normed])
@pytest.mark.parametrize(("mu", "other"), [(0.0, {"method": "fedavg"}), (0.5, {"method": "fedprox", "mu": 0.5})])
def test_fedbabu_is_fedavg_or_fedprox_on_the_body(
    mu: float, other: dict[str, Any], network: type[nn.Module], tmp_path: Path
) -> None:
    one = run_of(tmp_path / "one", "network", network(), method="fedbabu", mu=mu).play()
    two = run_of(tmp_path / "two", "network", network(), train="body", **other).play()
    assert one.bits() == two.bits()
    np.testing.assert_array_equal(one.ledger.bytes_up, two.ledger.bytes_up)
    assert not one.method.personal


@pytest.mark.parametrize("body", BODIES)
def test_the_head_of_fedbabu_stays_and_never_travels(body: str, tmp_path: Path) -> None:
    run = run_of(tmp_path, body, method="fedbabu")
    messages, kept = overheard(run.bench)
    heads: list[bytes] = []
    run.play(lambda number, state: heads.append(run.bench.head(state).weight.tobytes()))
    head = BODIES[body]["previous"]
    assert heads == 3 * [head.weight.tobytes()]
    assert run.load().bias.tobytes() == head.bias.tobytes()
    assert len(messages) == 3 * (1 + K)
    assert not kept
    prefix = "body." if body == "network" else "head.hidden."
    for message in messages:
        assert all(name.split(".", 1)[1].startswith(prefix) for name in message.arrays)
    assert not holds(messages, head.weight)
    assert not holds(messages, head.bias)
    for name, value in run.bench.init().params.items():
        assert not np.allclose(value, run.state.params[name], rtol=1e-3)


@pytest.mark.parametrize("network", [Plain, Normed])
def test_fedper_with_a_shared_head_is_fedavg(
    network: type[nn.Module], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    average = run_of(tmp_path / "average", "network", network(), method="fedavg").play()
    personal = run_of(tmp_path / "personal", "network", network(), method="fedper").play()
    monkeypatch.setattr(FedPerStage, "classifier", "shared")
    shared = run_of(tmp_path / "shared", "network", network(), method="fedper").play()
    assert shared.bits() == average.bits()
    assert shared.method.client_state == {}
    assert personal.bits()["params/body.one.weight"] != average.bits()["params/body.one.weight"]


@pytest.mark.parametrize("method", ["fedper", "fedrep", "lg-fedavg", "ditto", "local-only"])
def test_what_is_a_clients_own_never_travels(method: str, tmp_path: Path) -> None:
    """Neither by name nor by its bytes: running statistics of a body of its own do not either."""
    run = run_of(tmp_path, "network", Normed(), method=method)
    messages, kept = overheard(run.bench)
    run.play()
    travelled = {name.split(".", 1)[1] for message in messages for name in message.arrays}
    assert travelled == run.state.params.keys() | run.state.statistics.keys()
    if method != "ditto":
        assert not travelled & run.own().keys()
    trained = Normed().state_dict().keys() - {"norm.num_batches_tracked", "spare"}
    whole = {f"body.{name}" for name in trained} | {*TOP}
    assert travelled | run.own().keys() == whole
    assert len(kept) >= 3 * K * len(run.own())
    assert not any(holds(messages, array) for array in kept if len(set(array.ravel().tolist())) > 3)
    assert method != "local-only" or not any(message.arrays for message in messages)


@pytest.mark.parametrize("body", BODIES)
def test_fedrep_without_epochs_of_the_head_is_fedbabu(body: str, tmp_path: Path) -> None:
    one = run_of(tmp_path / "one", body, method="fedrep", head_epochs=0).play()
    two = run_of(tmp_path / "two", body, method="fedbabu").play()
    same_parameters(one, two)
    assert one.bits().keys() == two.bits().keys()
    for k in range(K):
        np.testing.assert_array_equal(one.own()["head.weight"][k], BODIES[body]["previous"].weight)


def test_each_phase_of_fedrep_leaves_the_other_part_alone(tmp_path: Path) -> None:
    """With momentum, weight decay and batch norm; the running statistics are the body's."""
    network = Normed()
    run = run_of(tmp_path, "network", network, method="fedrep", head_epochs=2, weight_decay=0.1)
    seen: list[tuple[dict[str, bytes], dict[str, bytes]]] = []
    solve = run.method.solve

    def watched(start: Any, *arguments: Any) -> Any:
        result = solve(start, *arguments)
        after = {**result.params, **result.statistics}
        seen.append(tuple({n: v.numpy().tobytes() for n, v in each.items()} for each in (start, after)))
        return result

    run.method.solve = watched
    run.answer(1)
    for (before, after), moves in zip(seen, ("head.", "body."), strict=True):
        changed = {name for name in before if before[name] != after[name]}
        assert changed == {name for name in before if name.startswith(moves)}
    fitted, trained = seen
    assert trained[0]["head.weight"] == fitted[1]["head.weight"]
    assert trained[0]["body.one.weight"] == fitted[0]["body.one.weight"]


def test_the_phases_of_fedrep_see_other_batches_and_cost_what_they_take(tmp_path: Path) -> None:
    run = run_of(tmp_path, "network", method="fedrep", head_epochs=2, rounds=1).play()
    # Three passes for a step on the body, in two epochs; one for the head's, in two.
    assert run.ledger.forward_passes.tolist() == [(3 * 2 + 2) * size for size in SIZES]
    one, two = (np.concatenate(plan_of(run, 1, 0, o)) for o in (Objective(), Objective(epochs=2, phase=1)))
    assert sorted(one) == sorted(two)
    assert one.tolist() != two.tolist()


@pytest.mark.parametrize("body", BODIES)
def test_lg_fedavg_with_a_head_of_ones_own_is_local_only(
    body: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = run_of(tmp_path / "alone", body, method="local-only", momentum=0.0).play()
    monkeypatch.setattr(LGFedAvgStage, "classifier", "personal")
    whole = run_of(tmp_path / "whole", body, method="lg-fedavg", momentum=0.0).play()
    assert whole.own_bits() == alone.own_bits()
    assert whole.bits() == alone.bits() == {}


@pytest.mark.parametrize("network", [Plain, Normed])
def test_the_global_model_of_ditto_is_that_of_fedavg(network: type[nn.Module], tmp_path: Path) -> None:
    ditto = run_of(tmp_path / "ditto", "network", network(), method="ditto").play()
    average = run_of(tmp_path / "average", "network", network(), method="fedavg").play()
    assert ditto.bits() == average.bits()
    np.testing.assert_array_equal(ditto.ledger.bytes_up, average.ledger.bytes_up)
    assert ditto.ledger.forward_passes.tolist() == (2 * average.ledger.forward_passes).tolist()
    free = run_of(tmp_path / "free", "network", network(), method="ditto", lambda_ditto=0.0, momentum=0.0).play()
    alone = run_of(tmp_path / "alone", "network", network(), method="local-only", momentum=0.0).play()
    assert free.own_bits() == alone.own_bits()
    assert ditto.own_bits() != alone.own_bits()


def test_a_pull_of_one_over_the_rate_puts_ditto_one_step_from_the_global_model(tmp_path: Path) -> None:
    """v − η (g + (v − w) / η) = w − η g, and w is the model that was received, not what became of it."""
    keys = {"momentum": 0.0, "batch_size": "full", "local_epochs": 1, "lambda_ditto": 10.0, "rounds": 2}
    run = run_of(tmp_path, "network", method="ditto", **keys)
    received: list[Values] = []
    run.play(lambda number, state: received.append({n: torch.tensor(v) for n, v in state.params.items()}))
    model = model_of(Plain())
    start = values(model)
    for k in range(K):
        put(model, start)
        slope = gradients(model, list(start), rows_of(k))
        first = {name: start[name] - 0.1 * slope[name] for name in start}
        put(model, first)
        slope = gradients(model, list(start), rows_of(k))
        expected = {name: received[0][name] - 0.1 * slope[name] for name in start}
        close({name: value[k] for name, value in run.own().items()}, expected)


# ----------------------------------------------------------------------------------------------------------- per-fedavg


def test_a_step_of_per_fedavg_by_hand(tmp_path: Path) -> None:
    """θ' = θ − α ∇L(θ; D₁), then θ ← θ − β ∇L(θ'; D₂), in numpy, for clients of several sizes at once."""
    keys = {"method": "per-fedavg", "batch_size": "full", "inner_lr": 0.5, "lr": 0.3, "rounds": 1}
    run = Run(tmp_path, backbone_of(Plain()), train="head", previous=HEAD, **keys)
    x = np.concatenate([run.source.astype(np.float64), np.ones((N, 1))], axis=1)
    theta = np.concatenate([HEAD.weight, HEAD.bias[:, None]], axis=1).astype(np.float64)

    def slope(weights: np.ndarray, rows: np.ndarray) -> np.ndarray:
        scores = np.exp(x[rows] @ weights.T)
        error = scores / scores.sum(axis=1, keepdims=True) - np.eye(3)[Y[rows]]
        return error.T @ x[rows] / len(rows)

    total = np.zeros_like(theta)
    for k in range(K):
        one, two = plan_of(run, k, 0, Objective(inner_lr=0.5))
        assert sorted([*one, *two]) == rows_of(k).tolist()
        assert len(one) - len(two) in (0, 1)
        inner = theta - 0.5 * slope(theta, one)
        total += SIZES[k] / N * (theta - 0.3 * slope(inner, two))
    run.play()
    found = np.concatenate([run.state.params["head.weight"], run.state.params["head.bias"][:, None]], axis=1)
    np.testing.assert_allclose(found, total, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("body", BODIES)
def test_per_fedavg_goes_from_pair_to_pair_and_leaves_an_odd_batch(body: str, tmp_path: Path) -> None:
    run = run_of(tmp_path, body, method="per-fedavg", inner_lr=0.4, rounds=1, local_epochs=1)
    model = model_of(Plain(), BODIES[body]["previous"])
    names = [name for name in named(model) if body == "network" or name.startswith("head.")]
    start = values(model)
    mean = dict.fromkeys(names, 0.0)
    sizes = []
    for k in range(K):
        put(model, start)
        plan, velocity = plan_of(run, k, 0, Objective(inner_lr=0.4)), dict.fromkeys(names, 0.0)
        sizes.append([len(rows) for rows in plan])
        for one, two in zip(plan[::2], plan[1::2], strict=False):
            here = values(model, names)
            slope = gradients(model, names, one)
            put(model, {name: here[name] - 0.4 * slope[name] for name in names})
            slope = gradients(model, names, two)
            velocity = {name: 0.7 * velocity[name] + slope[name] for name in names}
            put(model, {name: here[name] - 0.1 * velocity[name] for name in names})
        mean = {name: mean[name] + SIZES[k] / N * values(model)[name] for name in names}
    assert sizes == [[3, 2], [4, 4, 1], [3, 3]]  # two halves at least; the last batch of the second has no other
    replies = [run.answer(k).message.scalars["steps"] for k in range(K)]
    assert replies == [1, 1, 1]
    run.play()
    close(run.state.params, mean)
    passes = [3 * 5, 3 * 8, 3 * 6] if body == "network" else [*SIZES]
    assert run.ledger.forward_passes.tolist() == passes


@pytest.mark.parametrize(
    ("keys", "examples"),
    [
        ({"batch_size": "full"}, (5, 9, 6)),
        ({"batch_size": 64, "local_epochs": 2}, (10, 18, 12)),
        ({"batch_size": 1}, (4, 8, 6)),
    ],
)
def test_the_passes_of_per_fedavg_are_those_of_its_pairs(
    keys: dict[str, Any], examples: tuple[int, ...], tmp_path: Path
) -> None:
    seen = [0]
    network = Plain()
    run = run_of(tmp_path, "network", network, method="per-fedavg", **{"rounds": 1, "local_epochs": 1} | keys)
    network.register_forward_hook(lambda module, given, made: seen.__setitem__(0, seen[0] + len(made)))
    run.play()
    assert run.ledger.forward_passes.tolist() == [3 * count for count in examples]
    assert seen[0] == sum(examples)


@pytest.mark.parametrize("body", BODIES)
def test_a_step_of_per_fedavg_is_a_pair_of_batches(body: str, tmp_path: Path) -> None:
    """Batches of one example, two epochs: as many pairs as the client has examples."""
    run = run_of(tmp_path, body, method="per-fedavg", batch_size=1, rounds=1, local_epochs=2)
    assert [run.answer(k).message.scalars["steps"] for k in range(K)] == [*SIZES]


@pytest.mark.parametrize("body", BODIES)
def test_a_client_of_one_example_has_no_pair(body: str, tmp_path: Path) -> None:
    who = np.where(np.arange(N) == 0, 0, 1 + np.arange(N) % 2)
    run = run_of(tmp_path, body, method="per-fedavg", who=who, rounds=1, local_epochs=1)
    reply = run.answer(0)
    assert reply.message.scalars["steps"] == 0
    assert not any(array.any() for array in reply.message.arrays.values())
    run.play()
    assert not run.ledger.dropped


# ----------------------------------------------------------------------------------------------------------- local only


@pytest.mark.parametrize("body", BODIES)
def test_local_only_is_torch_sgd_that_never_stops_and_nothing_travels(body: str, tmp_path: Path) -> None:
    run = run_of(tmp_path, body, method="local-only", local_epochs=1, weight_decay=0.1).play()
    for k in range(K):
        model = model_of(Plain(), BODIES[body]["previous"])
        mine = {name: value for name, value in named(model).items() if body == "network" or name.startswith("head.")}
        sgd = torch.optim.SGD(mine.values(), lr=0.1, momentum=0.7, weight_decay=0.1)
        for rows in (rows for round in range(3) for rows in plan_of(run, k, round)):
            sgd.zero_grad()
            loss_of(model, rows).backward()
            sgd.step()
        close({name: value[k] for name, value in run.own().items()}, mine)
        velocity = {name: run.states.read(f"velocity.{name}", None, np.array([k]))[0] for name in mine}
        close(velocity, {name: sgd.state[value]["momentum_buffer"] for name, value in mine.items()}, atol=1e-4)
    assert run.ledger.bytes_up.tolist() == run.ledger.bytes_down.tolist() == [0] * K
    assert run.published(3).bytes == 0


# ---------------------------------------------------------------------------------------------- whole runs: personalise

CLIENTS = 8
ROUNDS = {"train": "head", "head": "mlp", "hidden": 12, "rounds": 2, "lr": 0.005, "batch_size": 20}
AVERAGE = ROUNDS | {"method": "fedavg"}
PER = ROUNDS | {"method": "fedper", "clients_per_round": 5, "rounds": 1}
TUNE = {"method": "personalise", "update": "head", "epochs": 2, "lr": 0.002, "batch_size": 20}
CONV = {"rounds": 1, "batch_size": 3, "lr": 0.01}

Arrays = dict[str, np.ndarray]


def digits(*stages: dict[str, Any], **partition: Any) -> Recipe:
    how = {"kind": "dirichlet", "clients": CLIENTS, "alpha": 0.3, "test": "follow"} | partition
    data = {"dataset": "digits", "train_examples": 240, "test_examples": 200, "partition": how}
    return Recipe.parse({"data": data, "model": {"backbone": "features"}, "stages": list(stages)})


def images(*stages: dict[str, Any]) -> Recipe:
    how = {"kind": "shards", "clients": 5, "test": "follow"}
    data = {"dataset": "mnist-mini", "train_examples": 30, "test_examples": 20, "partition": how}
    model = {"backbone": "conv4", "weights": "random"}
    return Recipe.parse({"data": data, "model": model, "stages": list(stages)})


def handed(out: Path, stage: int) -> Arrays:
    """The global model after a stage, by the names of the plan."""
    found, version = RunDirectory(out).load_model(stage)
    (head,) = found.heads
    body = {} if version is None else {f"body.{name}": array for name, array in (version.arrays or {}).items()}
    return {f"head.{name}": array for name, array in head.arrays().items()} | body


def own_of(out: Path, stage: int) -> list[Arrays]:
    """What is each client's own after a stage; nothing for those that never took part."""
    states = RunDirectory(out).load_model(stage)[0].states
    assert states is not None
    clients = range(len(states.slots))
    return [
        {n.removeprefix("personal."): states.read(n, None, np.array([k]))[0] for n in states.shapes}
        if states.has(k)
        else {}
        for k in clients
    ]


def same_arrays(left: Arrays, right: Arrays) -> None:
    assert left.keys() == right.keys()
    for name, value in left.items():
        np.testing.assert_array_equal(value, right[name], err_msg=name)


def scores_of(arrays: Arrays, x: np.ndarray) -> np.ndarray:
    """A head written out, linear or behind two hidden layers."""
    return below(arrays, x) @ arrays["head.weight"].T + arrays["head.bias"]


def below(arrays: Arrays, x: np.ndarray) -> np.ndarray:
    for layer in ("head.hidden.0", "head.hidden.1"):
        if f"{layer}.weight" in arrays:
            x = np.maximum(x @ arrays[f"{layer}.weight"].T + arrays[f"{layer}.bias"], 0)
    return x


def accuracies(federation: Federation, models: list[Arrays]) -> np.ndarray:
    """Each client's model on its own part of the test split."""
    test, owners = federation.dataset.test, federation.test_owners
    rates = []
    for k, model in enumerate(models):
        mine = owners == k
        right = scores_of(model, test.features()[mine]).argmax(axis=1) == test.labels[mine]
        rates.append(right.mean() if mine.any() else np.nan)
    return np.array(rates)


def spread(rates: np.ndarray) -> list[float]:
    return [pytest.approx(np.nanmean(rates), abs=1e-12), pytest.approx(np.nanstd(rates), abs=1e-12)]


def figures(line: dict[str, Any], name: str) -> list[float]:
    return [line[f"{name}_mean"], line[f"{name}_std"]]


def tuned(model: Arrays, recipe: Recipe, federation: Federation, client: int, stage: int) -> Arrays:
    """Torch's SGD on the batches of a personalise stage, in double precision."""
    x, y = federation.dataset.train.features(), federation.dataset.train.labels
    rows, owners = federation.rows_of(np.array([client]))
    cohort: Any = type("Rows", (), {"clients": np.array([client]), "owners": owners})
    parameters = {name: torch.tensor(value, dtype=torch.float64, requires_grad=True) for name, value in model.items()}
    how: Any = recipe.stages[stage]
    sgd = torch.optim.SGD(parameters.values(), lr=how.lr, momentum=how.momentum)
    for epoch in range(how.epochs):
        for batch in batches(cohort, how, epoch, (recipe.seed, stage))[0]:
            chosen = rows[batch[batch >= 0]]
            values = torch.tensor(x[chosen], dtype=torch.float64)
            for layer in ("head.hidden.0", "head.hidden.1", "head"):
                if f"{layer}.weight" in parameters:
                    values = values @ parameters[f"{layer}.weight"].T + parameters[f"{layer}.bias"]
                    values = values if layer == "head" else values.relu()
            sgd.zero_grad()
            torch.nn.functional.cross_entropy(values, torch.tensor(y[chosen])).backward()
            sgd.step()
    return {name: value.detach().numpy() for name, value in parameters.items()}


@pytest.mark.parametrize("first", [AVERAGE, PER, ROUNDS | {"method": "lg-fedavg"}, {"method": "fedncm"}])
def test_personalise_is_plain_sgd_from_what_each_client_has(first: dict[str, Any], tmp_path: Path) -> None:
    """The global model, with what the stage before has made the client's own; and the figures over the clients."""
    recipe = digits(first, TUNE)
    result = run(recipe, tmp_path)
    federation = result.federation
    model = handed(tmp_path, 0)
    personal = first["method"] in ("fedper", "lg-fedavg")
    # What stage 0 kept is gone by now; a run of that stage alone still has it.
    if personal:
        run(digits(first), tmp_path / "alone")
        begin = [model | own for own in own_of(tmp_path / "alone", 0)]
        assert any(own == {} for own in own_of(tmp_path / "alone", 0)) == ("clients_per_round" in first)
    else:
        begin = [model] * CLIENTS
    ends = own_of(tmp_path, 1)
    for k in range(CLIENTS):
        expected = tuned(begin[k], recipe, federation, k, 1)
        assert ends[k].keys() == expected.keys()
        for name, value in expected.items():
            np.testing.assert_allclose(ends[k][name], value, rtol=1e-3, atol=1e-4, err_msg=name)
            assert not np.array_equal(ends[k][name], begin[k][name])
    lines = [line for line in metrics_of(tmp_path) if line["stage"] == 1]
    assert [line["round"] for line in lines] == [0, 1, 2]
    before, after = accuracies(federation, begin), accuracies(federation, ends)
    for line in lines:
        assert figures(line, "initial_accuracy") == spread(before)
    assert figures(lines[0], "personalised_accuracy") == spread(before)
    assert figures(lines[-1], "personalised_accuracy") == spread(after)
    assert before.mean() != after.mean()
    summary = result.summary["stages"][1]
    assert figures(summary, "personalised_accuracy") == spread(after)
    assert summary["bytes_up"] == 0
    # Every test example of the clients counts once.
    sizes = np.bincount(federation.test_owners[federation.test_owners >= 0], minlength=CLIENTS)
    assert summary["accuracy"] == pytest.approx(np.nansum(after * sizes) / sizes.sum())
    same_arrays(handed(tmp_path, 1), model)


@pytest.mark.parametrize("first", [AVERAGE, PER])
def test_no_epochs_change_nothing(first: dict[str, Any], tmp_path: Path) -> None:
    result = run(digits(first, TUNE | {"epochs": 0}, TUNE | {"epochs": 0}), tmp_path)
    alone = run(digits(first), tmp_path / "alone")
    stages = result.summary["stages"]
    for stage in stages[1:]:
        assert figures(stage, "initial_accuracy") == figures(stage, "personalised_accuracy")
        assert stage["accuracy"] == stages[0]["accuracy"]
        assert figures(stage, "initial_accuracy") == figures(stages[0], "local_accuracy")
    assert [line["round"] for line in metrics_of(tmp_path) if line["stage"] == 1] == [0]
    if first is PER:
        for kept, before in zip(own_of(tmp_path, 2), own_of(tmp_path / "alone", 0), strict=True):
            assert {name: kept[name] for name in before}.keys() == before.keys()
            same_arrays({name: kept[name] for name in before}, before)
    assert alone.summary["accuracy"] == stages[2]["accuracy"]


def test_two_personalise_stages_go_on_from_each_other(tmp_path: Path) -> None:
    recipe = digits(AVERAGE, TUNE, TUNE | {"lr": 0.001, "momentum": 0.0, "epochs": 1})
    federation = run(recipe, tmp_path / "both").federation
    run(digits(AVERAGE, TUNE), tmp_path / "one")
    begin, ends = own_of(tmp_path / "one", 1), own_of(tmp_path / "both", 2)
    for k in range(CLIENTS):
        for name, value in tuned(begin[k], recipe, federation, k, 2).items():
            np.testing.assert_allclose(ends[k][name], value, rtol=1e-3, atol=1e-4, err_msg=name)
    one, two = (json.loads((tmp_path / each / "summary.json").read_text())["stages"] for each in ("one", "both"))
    assert two[2]["initial_accuracy_mean"] == one[1]["personalised_accuracy_mean"]
    assert two[2]["accuracy"] != one[1]["initial_accuracy_mean"]


@pytest.mark.parametrize(("start", "stage"), [(0, 0), ("pretrained", None)])
def test_personalise_starts_where_it_is_told(start: Any, stage: int | None, tmp_path: Path) -> None:
    between = AVERAGE | {"lr": 0.02}
    recipe = digits(AVERAGE, between, TUNE | {"start": start})
    federation = run(recipe, tmp_path / "run").federation
    model = handed(tmp_path / "run", 2)
    if stage is None:  # a new linear head, the same for all
        assert {name: value.shape for name, value in model.items()} == {"head.weight": (10, 64), "head.bias": (10,)}
    else:
        same_arrays(model, handed(tmp_path / "run", stage))
    ends = own_of(tmp_path / "run", 2)
    for k in (0, CLIENTS - 1):
        for name, value in tuned(model, recipe, federation, k, 2).items():
            np.testing.assert_allclose(ends[k][name], value, rtol=1e-3, atol=1e-4, err_msg=name)


def test_a_head_that_starts_anew_is_not_the_one_that_a_client_had(tmp_path: Path) -> None:
    fresh = {"epochs": 0, "head_init": "zeros"}
    own = run(digits(PER | {"clients_per_round": 8}, TUNE | fresh), tmp_path)
    zeros = run(digits(AVERAGE, TUNE | fresh))
    assert own.summary["stages"][1]["accuracy"] == zeros.summary["stages"][1]["accuracy"]
    assert own.summary["stages"][1]["accuracy"] != own.summary["stages"][0]["accuracy"]


@pytest.mark.parametrize(
    ("first", "update"),
    [
        ("fedper", "head"), ("fedper", "body"), ("fedper", "all"),
        ("lg-fedavg", "head"), ("lg-fedavg", "body"), ("lg-fedavg", "all"),
        ("fedavg", "head"), ("fedavg", "body"), ("ditto", "head"),
    ],
)  # fmt: skip
def test_a_part_that_is_not_updated_stays_as_each_client_has_it(first: str, update: str, tmp_path: Path) -> None:
    before = CONV | {"method": first, "train": "all"}
    tune = {"method": "personalise", "update": update, "epochs": 1, "lr": 0.05, "batch_size": 3}
    run(images(before), tmp_path / "first")
    result = run(images(before, tune), tmp_path / "both")
    personal = first != "fedavg"
    begin = own_of(tmp_path / "first", 0) if personal else [{}] * 5
    model = handed(tmp_path / "both", 0)
    for had, has in zip(begin, own_of(tmp_path / "both", 1), strict=True):
        assert had.keys() <= has.keys()
        known = {name: (model | had)[name] for name in has if name in (model | had)}
        moved = {name for name in known if not np.array_equal(known[name], has[name])}
        parts = {name.partition(".")[0] for name in moved}
        assert parts == ({"head", "body"} if update == "all" else {update})
        assert moved == {name for name in known if name.startswith(tuple(parts))}
    line, stage = metrics_of(tmp_path / "both")[-2], result.summary["stages"][0]
    assert line["round"] == 0
    # This network normalises by the batch: that of a client for its own body, that of everybody for one in common.
    if first in ("lg-fedavg", "ditto") or update == "head":
        assert figures(line, "initial_accuracy") == figures(stage, "local_accuracy")
    same_arrays(handed(tmp_path / "both", 1) | {n: a for n, a in model.items() if n.startswith("body.")}, model)


@pytest.mark.parametrize("moves", ["head", "body"])
def test_the_part_that_does_not_move_is_left_alone_with_its_statistics(moves: str, tmp_path: Path) -> None:
    """As a stage is played whose clients have everything of their own, and which updates one part of it."""
    keys = {"method": "local-only", "weight_decay": 0.1}
    plan = replace(stage_of(**keys).plan, still=frozenset({"head", "body"} - {moves}))
    run = run_of(tmp_path, "network", Normed(), plan=plan, **keys)
    start = {
        name: value.tobytes() for name, value in run.method.personal_params(lambda name, value: value.copy()).items()
    }
    run.play()
    assert len(start) == 6 + 2 + 2  # of the body, its statistics, the head
    for k in range(K):
        changed = {name for name, value in run.own().items() if value[k].tobytes() != start[name]}
        assert changed == {name for name in start if name.startswith(f"{moves}.")}


def test_fedbabu_is_fedavg_on_the_body_of_a_real_network(tmp_path: Path) -> None:
    babu, body = (
        run(images(CONV | keys), tmp_path / keys["method"])
        for keys in ({"method": "fedbabu", "rounds": 2}, {"method": "fedavg", "train": "body", "rounds": 2})
    )
    for name in ("head", "model"):
        same_bits(*(tmp_path / method / "model" / f"{name}.safetensors" for method in ("fedbabu", "fedavg")))
    short = run(images(CONV | {"method": "fedbabu", "rounds": 1}), tmp_path / "short")
    same_bits(*(tmp_path / name / "model" / "head.safetensors" for name in ("fedbabu", "short")))
    assert short.head.weight.std() > 0
    assert babu.summary["bytes_up"] == body.summary["bytes_up"]
    with pytest.raises(AssertionError, match="differ"):
        same_bits(*(tmp_path / name / "model" / "model.safetensors" for name in ("fedbabu", "short")))


def test_who_takes_no_part_keeps_all_that_it_had(tmp_path: Path) -> None:
    """Heads of their own, then everything of their own: who was in neither has nothing, who was in one has all."""
    alone = PER | {"method": "local-only", "clients_per_round": 2}
    run(digits(PER), tmp_path / "first")
    result = run(digits(PER, alone, TUNE | {"epochs": 0}), tmp_path / "all")
    before, after = own_of(tmp_path / "first", 0), own_of(tmp_path / "all", 2)
    model = handed(tmp_path / "all", 0)
    trained = [
        k for k in range(CLIENTS) if after[k] and any((after[k][n] != model[n]).any() for n in hidden_of(after[k]))
    ]
    assert len(trained) == 2
    idle = [k for k in range(CLIENTS) if before[k] and k not in trained]
    assert len(idle) >= 3
    for k in idle:
        same_arrays(after[k], model | before[k])
    assert [k for k in range(CLIENTS) if not after[k]] == [
        k for k in range(CLIENTS) if not before[k] and k not in trained
    ]
    rates = accuracies(result.federation, [model | each for each in after])
    assert figures(result.summary["stages"][2], "personalised_accuracy") == spread(rates)
    assert result.summary["stages"][1]["accuracy"] == result.summary["stages"][2]["accuracy"]


def hidden_of(arrays: Arrays) -> list[str]:
    return [name for name in arrays if name.startswith("head.hidden.")]


def test_what_no_later_stage_starts_from_leaves_the_disk(tmp_path: Path) -> None:
    seen: dict[int, list[str]] = {}

    def look(line: dict[str, Any]) -> None:
        seen[line["stage"]] = sorted(path.name for path in (tmp_path / "checkpoint").glob("clients-*"))

    run(digits(PER, TUNE, TUNE | {"start": 0}, AVERAGE | {"rounds": 1}, TUNE), tmp_path, on_metrics=look)
    assert seen == {
        0: ["clients-0"],
        1: ["clients-0", "clients-1"],
        2: ["clients-0", "clients-2"],  # it starts from stage 0
        3: ["clients-2"],
        4: ["clients-4"],  # the average has made nothing anybody's own
    }
    left = sorted(path.name for path in (tmp_path / "checkpoint").glob("clients-*"))
    assert left == ["clients-4"]  # the last stage's stays for the user
    kept = [path.name for path in (tmp_path / "checkpoint" / "clients-4").iterdir()]
    assert kept == ["personal.bin"]  # velocities have gone


@pytest.mark.parametrize("recipe", [
    digits(PER, TUNE, TUNE | {"epochs": 0}, PER | {"method": "ditto"}, TUNE | {"start": 0, "without_head": True}),
    images(CONV | {"method": "lg-fedavg", "clients_per_round": 3}, TUNE),
], ids=["heads", "bodies"])  # fmt: skip
def test_an_interrupted_run_ends_in_the_same_bits(recipe: Recipe, tmp_path: Path) -> None:
    run(recipe, tmp_path / "whole")
    assert with_interruptions(recipe, tmp_path / "cut") >= 3
    same_run(tmp_path / "whole", tmp_path / "cut")
    last = len(recipe.stages) - 1
    for one, other in zip(own_of(tmp_path / "whole", last), own_of(tmp_path / "cut", last), strict=True):
        assert one
        same_arrays(one, other)


def test_a_run_stopped_after_the_disk_was_cleared_still_has_what_clients_brought_along(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the stage before kept is gone, and no checkpoint of the next stage is there yet."""
    recipe = digits(PER, TUNE | {"epochs": 0}, TUNE)
    run(recipe, tmp_path / "whole")

    def stop(folder: Path, personal: bool) -> None:
        collect(folder, personal)
        if not personal:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("headstart.runner.run_recipe.collect", stop)
        with pytest.raises(KeyboardInterrupt):
            run(recipe, tmp_path / "cut")
    run(recipe, tmp_path / "cut", resume=True)
    same_run(tmp_path / "whole", tmp_path / "cut")
    for one, other in zip(own_of(tmp_path / "whole", 2), own_of(tmp_path / "cut", 2), strict=True):
        same_arrays(one, other)


# ------------------------------------------------------------------------------ without the head, and what is forgotten


def nearest(model: Arrays, federation: Federation, x: tuple[np.ndarray, np.ndarray]) -> np.ndarray:
    """Of each client, with its model: the nearest mean of its own classes in what the last layer reads."""
    train, test = federation.dataset.train.labels, federation.dataset.test.labels
    rates = []
    for k in range(federation.n_clients):
        mine, own = np.flatnonzero(federation.owners == k), federation.test_owners == k
        inputs, asked = below(model[k], x[0][mine].astype(np.float64)), below(model[k], x[1][own].astype(np.float64))
        classes = np.unique(train[mine])  # the others are no candidates
        means = np.stack([inputs[train[mine] == label].mean(axis=0) for label in classes])
        distances = ((asked[:, None] - means[None]) ** 2).sum(axis=2)
        rates.append((classes[distances.argmin(axis=1)] == test[own]).mean() if own.any() else np.nan)
    return np.array(rates)


@pytest.mark.parametrize("first", [AVERAGE, {"method": "fedncm"}, PER | {"clients_per_round": 8}])
def test_without_the_head_it_is_the_nearest_mean_of_the_clients_own_classes(
    first: dict[str, Any], tmp_path: Path
) -> None:
    result = run(digits(first, TUNE | {"without_head": True, "lr": 0.01}), tmp_path)
    federation, line = result.federation, result.summary["stages"][1]
    x = federation.dataset.train.features(), federation.dataset.test.features()
    before = nearest([handed(tmp_path, 0)] * CLIENTS, federation, x)
    after = nearest(own_of(tmp_path, 1), federation, x)
    assert figures(line, "initial_headless_accuracy") == spread(before)
    assert figures(line, "headless_accuracy") == spread(after)
    assert (federation.counts == 0).any()
    if "head" in first:  # hidden layers are below the head, and they have changed
        assert before.tolist() != after.tolist()
    lines = [each for each in metrics_of(tmp_path) if each["stage"] == 1]
    assert ["headless_accuracy_mean" in each for each in lines] == [False, False, True]


def test_what_is_forgotten_by_hand(tmp_path: Path) -> None:
    result = run(digits(AVERAGE | {"rounds": 20}, TUNE | {"forgetting": True, "lr": 0.02}), tmp_path)
    test, line = result.federation.dataset.test, result.summary["stages"][1]

    def whole(models: list[Arrays]) -> float:
        found = [(scores_of(model, test.features()).argmax(axis=1) == test.labels).mean() for model in models]
        return float(np.mean(found))

    before, after = whole([handed(tmp_path, 0)]), whole(own_of(tmp_path, 1))
    assert line["initial_whole_accuracy"] == pytest.approx(before)
    assert line["whole_accuracy"] == pytest.approx(after)
    assert line["forgetting_ratio"] == pytest.approx((before - after) / before)
    assert line["forgetting_ratio"] > 0.05


# ------------------------------------------------------------------------------------------------------- computed heads

ESTIMATORS = {"fedncm": FedNCM, "fed3r": Fed3R, "fedcof": FedCOF}


@pytest.mark.parametrize("first", [AVERAGE, PER, {"method": "fedncm"}], ids=["average", "own", "closed"])
@pytest.mark.parametrize("kind", ESTIMATORS)
def test_a_computed_head_is_the_estimators_on_the_clients_own_examples(
    kind: str, first: dict[str, Any], tmp_path: Path
) -> None:
    compute = {"method": "personalise", "compute": kind, "blend": 1.0}
    result = run(digits(first, compute), tmp_path / "one")
    federation = result.federation
    train, test = federation.dataset.train, federation.dataset.test
    run(digits(first), tmp_path / "first")
    model = handed(tmp_path / "first", 0)
    own = own_of(tmp_path / "first", 0) if first is PER else [{}] * CLIENTS
    rates = []
    for k, end in enumerate(own_of(tmp_path / "one", 1)):
        begin, mine, asked = model | own[k], federation.owners == k, federation.test_owners == k
        inputs = below(begin, train.features()[mine].astype(np.float32))
        estimator = ESTIMATORS[kind]().fit(inputs, train.labels[mine])
        expected = estimator.predict(below(begin, test.features()[asked].astype(np.float32)))
        found = scores_of(end, test.features()[asked].astype(np.float32))
        np.testing.assert_array_equal(found.argmax(axis=1), expected)
        absent = np.setdiff1d(np.arange(10), train.labels[mine])
        assert np.isneginf(end["head.bias"][absent]).all()
        for name in hidden_of(begin):
            np.testing.assert_array_equal(end[name], begin[name])
        rates.append((expected == test.labels[asked]).mean() if asked.any() else np.nan)
    line = result.summary["stages"][1]
    assert figures(line, "personalised_accuracy") == spread(np.array(rates))
    assert line["rounds"] == 1
    assert line["bytes_up"] == 0
    none = run(digits(first, compute | {"blend": 0.0})).summary["stages"]
    assert figures(none[1], "personalised_accuracy") == figures(none[1], "initial_accuracy")
    assert figures(none[1], "initial_accuracy") == figures(none[0], "local_accuracy")
    assert none[1]["accuracy"] == none[0]["accuracy"]


@pytest.mark.parametrize("train", ["head", "all"])
def test_a_computed_head_can_be_fine_tuned_and_what_it_masks_stays_masked(train: str, tmp_path: Path) -> None:
    compute = {"method": "personalise", "compute": "fedncm", "blend": 1.0}
    tune = TUNE | {"update": train, "weight_decay": 0.1, "epochs": 1}
    first = {"head": AVERAGE, "all": CONV | {"method": "fedavg", "train": "all"}}[train]
    result = run({"head": digits, "all": images}[train](first, compute, tune), tmp_path)
    federation = result.federation
    for k, end in enumerate(own_of(tmp_path, 2)):
        masked = np.isneginf(end["head.bias"])
        np.testing.assert_array_equal(masked, federation.counts[k] == 0)
        assert masked.any()
        assert all(np.isfinite(value[~masked] if name == "head.bias" else value).all() for name, value in end.items())


# One client is heard, and a class that only others have is masked in the head.
FEW = {"method": "fedncm", "clients_per_round": 1, "rounds": 1}


def unmasked(model: Arrays, held: np.ndarray) -> Arrays:
    """The head with a client's own classes [C] that it masks as the mean of its other classes."""
    bias, weight = model["head.bias"].copy(), model["head.weight"].copy()
    known = np.isfinite(bias)
    bias[held & ~known], weight[held & ~known] = bias[known].mean(), weight[known].mean(axis=0)
    return model | {"head.bias": bias, "head.weight": weight}


def test_fine_tuning_learns_a_class_that_the_head_handed_on_masks(tmp_path: Path) -> None:
    recipe = digits(FEW, TUNE | {"lr": 0.01, "epochs": 3})
    federation = run(recipe, tmp_path).federation
    model, test = handed(tmp_path, 0), federation.dataset.test
    learned = 0
    for k, end in enumerate(own_of(tmp_path, 1)):
        held = federation.counts[k] > 0
        expected = tuned(unmasked(model, held), recipe, federation, k, 1)
        for name, value in expected.items():
            np.testing.assert_allclose(end[name], value, rtol=1e-3, atol=1e-4, err_msg=name)
        # What the client does not have stays as it was handed on.
        np.testing.assert_array_equal(np.isneginf(end["head.bias"]), np.isneginf(model["head.bias"]) & ~held)
        new = np.isin(test.labels, np.flatnonzero(np.isneginf(model["head.bias"]) & held))
        learned += (scores_of(end, test.features()[new]).argmax(axis=1) == test.labels[new]).sum()
    assert learned > 100


@pytest.mark.parametrize("update", ["all", "body"])
def test_a_class_that_the_head_masks_is_learned_where_the_head_is_trained(update: str, tmp_path: Path) -> None:
    first = {"method": "fedncm", "clients_per_round": 1, "rounds": 1}
    federation = run(images(first, TUNE | {"update": update, "epochs": 1}), tmp_path).federation
    masked = np.isneginf(handed(tmp_path, 0)["head.bias"])
    for k, end in enumerate(own_of(tmp_path, 1)):
        if update == "all":
            np.testing.assert_array_equal(np.isneginf(end["head.bias"]), masked & (federation.counts[k] == 0))
        assert all(not np.isnan(value).any() for value in end.values())
    assert ("head.bias" in end) == (update == "all")


@pytest.mark.parametrize("kind", ESTIMATORS)
@pytest.mark.parametrize("blend", ["auto", 0.0, 0.5, 1.0])
def test_a_computed_head_has_the_classes_that_the_head_handed_on_masks(kind: str, blend: Any, tmp_path: Path) -> None:
    result = run(digits(FEW, {"method": "personalise", "compute": kind, "blend": blend}), tmp_path)
    federation, model = result.federation, handed(tmp_path, 0)
    train, test = federation.dataset.train, federation.dataset.test
    masked = np.isneginf(model["head.bias"])
    new = 0
    for k, end in enumerate(own_of(tmp_path, 1)):
        held = federation.counts[k] > 0
        there = np.isfinite(end["head.bias"])
        # Where s is 0 the head is the one handed on; otherwise it has the client's own classes and no other.
        np.testing.assert_array_equal(there, ~masked if blend == 0 or there[~held].any() else held)
        if blend != 0.5:
            continue
        mine = federation.owners == k
        given = unmasked(model, held)
        head = LinearHead(given["head.weight"], given["head.bias"])
        x, asked = train.features()[mine].astype(np.float32), test.features().astype(np.float32)
        expected = blended_by_hand(head, ESTIMATORS[kind](), x, train.labels[mine], asked, 0.5)
        np.testing.assert_array_equal(scores_of(end, asked).argmax(axis=1), expected)
        new += (masked & held).sum()
    assert new > 5 or blend != 0.5


def blended_by_hand(
    given: LinearHead, estimator: Any, x: np.ndarray, y: np.ndarray, asked: np.ndarray, s: float
) -> Any:
    """Classes of the asked [m, d] by (1 − s) g / σ_g + s p / σ_p over the client's classes, or by g where s is 0."""
    if s == 0:
        return (asked @ given.weight.T + given.bias).argmax(axis=1)
    fitted = estimator.fit(x, y)
    total = 0.0
    for weight, bias, share in (
        (given.weight[fitted.classes_], given.bias[fitted.classes_], 1 - s),
        (fitted.coef_, fitted.intercept_, s),
    ):
        scores = x @ weight.T + bias
        spread = np.sqrt(((scores - scores.mean(axis=1, keepdims=True)) ** 2).mean())
        spread = spread if spread > 1e-5 * np.abs(scores).max() else 1.0  # a tie: classes that all start as one mean
        total = total + share / spread * (asked @ weight.T + bias)
    return fitted.classes_[total.argmax(axis=1)]


@pytest.mark.parametrize("kind", ESTIMATORS)
def test_the_strength_of_a_blend_is_chosen_by_cross_validation(kind: str) -> None:
    """Five folds; the most right answers; of several, the one in the middle, the later of two."""
    from sklearn.model_selection import KFold

    chosen = set()
    for seed, noise in ((0, 0.3), (1, 1.0), (2, 3.0), (3, 30.0)):
        rng = np.random.default_rng(seed)
        centres = rng.normal(size=(4, 6))
        y = np.repeat(np.arange(3), 9)  # nobody here has class 3
        x = (centres[y] + rng.normal(size=(27, 6))).astype(np.float32)
        given = LinearHead((centres + noise * rng.normal(size=(4, 6))).astype(np.float32), np.zeros(4, np.float32))
        right = np.zeros(11)
        for train, test in KFold(5, shuffle=True, random_state=0).split(x):
            for number in range(11):
                found = blended_by_hand(given, ESTIMATORS[kind](), x[train], y[train], x[test], number / 10)
                right[number] += (found == y[test]).sum()
        best = np.flatnonzero(right == right.max())
        strength = best[len(best) // 2] / 10
        chosen.add(strength)
        auto, fixed = (blended_head(given, x, y, kind, blend) for blend in ("auto", float(strength)))
        np.testing.assert_array_equal(auto.weight, fixed.weight)
        np.testing.assert_array_equal(auto.bias, fixed.bias)
        asked = rng.normal(size=(50, 6)).astype(np.float32)
        expected = blended_by_hand(given, ESTIMATORS[kind](), x, y, asked, strength)
        np.testing.assert_array_equal(auto.scores(asked).argmax(axis=1), expected)
    assert len(chosen) > 1


@pytest.mark.parametrize("kind", ESTIMATORS)
@pytest.mark.parametrize("blend", ["auto", 0.0, 0.5, 1.0])
def test_a_client_of_one_class_or_one_example_has_a_head_too(kind: str, blend: Any) -> None:
    x = np.random.default_rng(0).normal(size=(4, D)).astype(np.float32)
    for count in (1, 2, 4):
        head = blended_head(HEAD, x[:count], np.full(count, 2), kind, blend)
        # A strength of 0 leaves the head as it is; any other leaves one class.
        untouched = blend == 0 or (blend == "auto" and np.isfinite(head.bias).all())
        expected = HEAD.scores(x).argmax(axis=1) if untouched else [2] * 4
        np.testing.assert_array_equal(head.scores(x).argmax(axis=1), expected)
    np.testing.assert_array_equal(blended_head(HEAD, x[:1], np.array([2]), kind, "auto").weight, HEAD.weight)
    run(digits(AVERAGE, {"method": "personalise", "compute": kind, "blend": blend}, alpha=0.01))


# --------------------------------------------------------------------------------------------------------- data sharing


@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize(("share", "given"), [(0.3, (2, 3, 2)), (0.01, (1, 1, 1)), (1.0, SIZES)])
def test_a_server_trains_on_the_share_that_it_was_given(
    share: float, given: tuple[int, ...], body: str, tmp_path: Path
) -> None:
    """One step on all of it after FedAvg's round: max(1, round(p n)) examples of each client, always the same."""
    keys = {"method": "fedavg", "batch_size": "full", "local_epochs": 1, "momentum": 0.0}
    shared = run_of(tmp_path / "shared", body, share=share, **keys)
    cohorts: list[Any] = []
    train = shared.method.train_on_server
    shared.method.train_on_server = lambda state, cohort, round: (
        cohorts.append((state, cohort)) or train(state, cohort, round)
    )
    ends: list[Any] = []
    shared.play(lambda number, state: ends.append(state))
    rows = cohorts[0][1].rows
    assert tuple(np.bincount(shared.federation.owners[rows], minlength=K)) == given
    assert len(set(rows.tolist())) == len(rows)
    assert all(np.array_equal(cohort.rows, rows) for _, cohort in cohorts)
    np.testing.assert_array_equal(cohorts[0][1].labels, Y[rows])
    plain = run_of(tmp_path / "plain", body, **keys | {"rounds": 1}).play()
    same = {n: v.tobytes() for n, v in plain.state.params.items()}
    assert same == {n: v.tobytes() for n, v in cohorts[0][0].params.items()}
    model = model_of(Plain(), BODIES[body]["previous"])
    for (before, _), after in zip(cohorts, ends, strict=True):
        put(model, {name: torch.tensor(value) for name, value in before.params.items()})
        slope = gradients(model, list(before.params), rows)
        expected = {name: torch.tensor(value) - 0.1 * slope[name] for name, value in before.params.items()}
        close(after.params, expected, atol=1e-5)
    np.testing.assert_array_equal(shared.ledger.bytes_up, 3 * plain.ledger.bytes_up)


@pytest.mark.parametrize("body", BODIES)
def test_a_server_trains_as_a_client_of_the_round_would_under_a_head_that_stays(body: str, tmp_path: Path) -> None:
    """FedBABU's server, several steps after each round: at the round's rate, on the round's batches."""
    shared = run_of(tmp_path, body, method="fedbabu", share=0.7, schedule="step", rounds=4)
    given: list[Any] = []
    ends: list[Any] = []
    train = shared.method.train_on_server
    shared.method.train_on_server = lambda state, cohort, round: (
        given.append((state, cohort)) or train(state, cohort, round)
    )
    shared.play(lambda number, state: ends.append(state))
    model = model_of(Plain(), BODIES[body]["previous"])
    for number, rate in enumerate([0.1, 0.1, 0.01, 0.001]):
        before, cohort = given[number]
        assert not set(TOP) & before.params.keys()
        put(model, {name: torch.tensor(value) for name, value in before.params.items()})
        plan = [cohort.rows[batch[batch >= 0]] for batch in batches(cohort, shared.stage, number, shared.seed)[0]]
        descend(model, list(before.params), plan, rate=rate)
        close(ends[number].params, values(model, before.params))


def test_a_server_may_train_the_body_alone(tmp_path: Path) -> None:
    network = Normed()
    run = run_of(tmp_path, "network", network, method="fedavg", share=0.5, share_train="body", rounds=1)
    seen: list[Any] = []
    train = run.method.train_on_server
    run.method.train_on_server = lambda state, cohort, round: seen.append(state) or train(state, cohort, round)
    run.play()
    (before,) = seen
    moved = {name for name, value in run.state.params.items() if not np.array_equal(value, before.params[name])}
    assert moved == {name for name in before.params if name.startswith("body.")}
    for name, value in run.state.statistics.items():
        assert not np.array_equal(value, before.statistics[name])
    run.load()
    np.testing.assert_array_equal(network.one.weight.detach(), run.state.params["body.one.weight"].astype(np.float32))


# ----------------------------------------------------------------------------------------------------- costs and memory


@pytest.mark.parametrize(("method", "below_travels"), [("fedbabu", True), ("fedper", True), ("lg-fedavg", False)])
def test_what_a_stage_does_not_send_comes_once_from_the_stage_before(
    method: str, below_travels: bool, tmp_path: Path
) -> None:
    from headstart.core.message import Message

    stages = run(digits(AVERAGE, ROUNDS | {"method": method}), tmp_path).summary["stages"]
    arrays = handed(tmp_path, 0)
    sent = {f"model.{name}": array for name, array in arrays.items() if (name not in TOP) == below_travels}
    rest = {name: array for name, array in arrays.items() if f"model.{name}" not in sent}
    down = 2 * Message(sent, {"round": 0}).nbytes + Message(rest).nbytes
    assert stages[1]["bytes_down"] == CLIENTS * down


MEMORY = """
import resource, sys
from pathlib import Path
import numpy as np
import torch
from headstart.config.recipe import Recipe
from headstart.core.ledger import Ledger
from headstart.data import Dataset, Examples, Federation
from headstart.engine.client_states import ClientStates
from tests.helpers import Bench, context_of, play
torch.set_num_threads(1)
folder = Path(sys.argv[1])
keys = {"method": "local-only", "train": "head", "head": "mlp", "hidden": 160, "rounds": 30, "clients_per_round": 40}
stage = Recipe.parse({"data": {"dataset": "x"}, "model": {"backbone": "features"}, "stages": [keys]}).stages[0]
x = np.random.default_rng(0).normal(size=(4000, 64)).astype(np.float32)
examples = Examples("features", x, (), np.arange(4000), np.arange(4000) % 3)
for clients in (40, 2000):
    names = tuple(map(str, range(clients)))
    federation = Federation(Dataset("x", ("a", "b", "c"), examples, examples), np.arange(4000) % clients, None, names)
    if clients == 40:
        federation = Federation(federation.dataset, np.where(np.arange(4000) < 80, federation.owners, -1), None, names)
    bench = Bench(stage, context_of(stage, 3, 64, (0, 0), clients, 4000))
    states = ClientStates(folder / str(clients), clients, bench.method.client_state)
    ledger = Ledger.open(clients)
    play(bench, federation, x, ledger, states)
    heard = int((ledger.last_round >= 0).sum())
    values = sum(int(np.prod(shape)) for shape in bench.method.client_state.values())
    disk = sum(file.stat().st_blocks * 512 for file in (folder / str(clients)).iterdir())
    print(heard, 4 * values, disk, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
"""


def test_thousands_of_clients_cost_disk_where_they_were_heard_and_no_memory(tmp_path: Path) -> None:
    command, root = [sys.executable, "-c", MEMORY, str(tmp_path)], Path(__file__).parents[2]
    done = subprocess.run(command, cwd=root, check=True, capture_output=True, text=True, timeout=60)
    few, many = ([int(word) for word in line.split()] for line in done.stdout.splitlines())
    assert few[0] == 40
    assert 800 < many[0] < 1000  # of 2,000
    all_of_them = many[0] * many[1]
    assert all_of_them > 100e6
    assert all_of_them * 0.95 < many[2] < 2.1 * all_of_them + 2000 * 8 * 4096  # two slots, in whole blocks
    assert many[2] < 2000 * many[1]
    assert many[3] - few[3] < 40e6


def test_no_batch_of_a_network_that_normalises_by_the_batch_mixes_clients() -> None:
    lines: list[dict[str, Any]] = []
    stages = [CONV | {"method": "fedavg", "train": "all"}]
    stages += [{"method": "personalise", "start": 0, "update": part, "epochs": 0} for part in ("all", "body", "head")]
    found = run(images(*stages), on_metrics=lines.append)
    assert len({(line["local_accuracy_mean"], line["local_accuracy_std"], line["loss"]) for line in lines}) == 1
    # The loss is that of each client's examples by themselves.
    assert found.federation.test_owners is not None
    assert np.bincount(found.federation.test_owners).tolist() == [4] * 5


# ------------------------------------------------------------------------------------------------------------- mistakes


@pytest.mark.parametrize(
    ("stage", "sentence"),
    [
        ({"method": "fedper", "train": "body"}, "stages.0.train: fedper trains a head too; use 'all'"),
        ({"method": "fedrep", "train": "body"}, "stages.0.train: fedrep trains a head too; use 'all'"),
        ({"method": "lg-fedavg", "train": "body"}, "stages.0.train: lg-fedavg trains a head too; use 'all'"),
        ({"method": "fedbabu", "train": "all"}, "stages.0.train: fedbabu's head stays as it is; use 'body'"),
        (
            {"method": "fedbabu", "train": "head"},
            "stages.0.train: fedbabu trains what is below the head; with 'head' alone, set head to 'mlp', whose hidden "
            "layers are what is below",
        ),
        (
            {"method": "fedper", "share": 0.1},
            "stages.0.share: a server that trains on a share is for one task and one model",
        ),
        (
            {"method": "fedavg", "train": "head", "share": 0.1, "share_train": "body"},
            "stages.0.share_train: no backbone is trained; use 'all'",
        ),
        (
            {"method": "personalise", "blend": 1.5},
            "stages.0.blend: must be a number less than or equal to 1 or auto (got 1.5)",
        ),
    ],
)
def test_a_mistake_is_one_sentence(stage: dict[str, Any], sentence: str) -> None:
    with pytest.raises(RecipeError) as refused:
        images(stage)
    assert refused.value.problems == (sentence,)


def test_features_have_no_body() -> None:
    for stage, key in (({"method": "fedper"}, "train"), ({"method": "personalise"}, "update")):
        with pytest.raises(
            RecipeError, match=rf"stages\.0\.{key}: the data are features, there is no backbone to train"
        ):
            digits(stage | {key: "all"})
        (made,) = digits(stage).stages  # what is trained by default is what there is
        assert made.train == "head"  # type: ignore[union-attr]
    digits({"method": "personalise", "compute": "fedncm"})


@pytest.mark.parametrize("method", [{"method": "fedper"}, {"method": "fedrep", "head_epochs": 1}])
def test_a_personal_linear_head_over_features_is_local_training(method: dict[str, Any]) -> None:
    keys = {"rounds": 3, "lr": 0.002, "batch_size": "full"}  # a batch of everything is the same however it is drawn
    alone, found = (run(digits({**each, **keys})).summary["stages"][0] for each in ({"method": "local-only"}, method))
    assert found["local_accuracy_mean"] == alone["local_accuracy_mean"]
    assert found["loss"] == pytest.approx(alone["loss"], rel=1e-5)


def test_a_head_cannot_be_computed_on_bodies_of_the_clients_own() -> None:
    compute = {"method": "personalise", "compute": "fedncm"}
    for first in ({"method": "lg-fedavg"}, {"method": "ditto"}, {"method": "local-only"}):
        with pytest.raises(HeadstartError, match=r"stages\.1\.compute: .* a backbone of its own; fine-tune instead"):
            run(images(CONV | first, compute))
    run(images(CONV | {"method": "fedper"}, compute))


@pytest.mark.parametrize("damage", ["gone", "empty", "half"])
def test_client_states_that_were_cut_short_are_not_read_as_zeros(tmp_path: Path, damage: str) -> None:
    shapes = {"personal.head.weight": (2, 3)}
    states = ClientStates(tmp_path / "clients", 4, shapes)
    states.write(1, {"personal.head.weight": np.ones((2, 3), np.float32)})
    states.commit()
    path = tmp_path / "clients" / "personal.bin"
    whole = path.read_bytes()
    path.unlink()
    if damage != "gone":
        path.write_bytes(whole[: 0 if damage == "empty" else len(whole) // 2])
    with pytest.raises(HeadstartError, match=rf"personal\.bin has .* bytes and not {len(whole)}"):
        ClientStates(tmp_path / "clients", 4, shapes, states.slots)
    path.write_bytes(whole)
    read = ClientStates(tmp_path / "clients", 4, shapes, states.slots).read("personal.head.weight", None, np.array([1]))
    assert (read == 1).all()
