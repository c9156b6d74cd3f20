"""Where optimisers end up, and the parts of their formulas that a few equal rounds of everybody do not show."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from headstart.config.recipe import Recipe
from headstart.core.message import Message
from headstart.core.params import norm
from headstart.core.reply import Reply
from headstart.data import Federation
from headstart.errors import MessageError
from headstart.runner import run
from headstart.solvers import heads as solver
from tests.helpers import round_trip
from tests.methods.test_training import SIZES, WHO, C, D, K, N, X, Y, bench_of, cohort, flat, g, start, uneven


def trained(who: Iterable[Iterable[int]], summed: bool = False, **keys: Any) -> Any:
    """The state after rounds in which these clients take part; ``summed``: the server learns sums only."""
    bench = bench_of(**keys)
    state = bench.init()
    kept = {name: np.zeros((K, *shape), np.float32) for name, shape in bench.method.client_state.items()}
    for number, some in enumerate(who):
        clients, total = np.array(list(some)), bench.channel.total()
        mine = replace(cohort(*clients), state=lambda name, _, clients=clients: kept[name][clients])
        message = round_trip(bench.broadcast(state, number))
        for reply in bench.answer(mine, message):
            for name, value in reply.state.items():
                kept[name][reply.clients[0]] = value
            if summed:
                bench.channel.add_vector(total, bench.runtime.vector(reply, message))
            else:
                bench.add(total, state, reply, number)
        state = bench.method.server_update(state, bench.channel.finish(total, number), number)
    return state


def vector(state: Any) -> np.ndarray:
    return flat((state.params["head.weight"], state.params["head.bias"]))


SHARES = {"examples": np.array(SIZES) / N, "uniform": np.full(K, 1 / K)}


@pytest.mark.parametrize("weighting", SHARES)
def test_scaffold_of_some_clients_under_a_schedule_by_hand(weighting: str) -> None:
    """c moves by the part of all clients that was heard; η is the rate of the round, in the steps and in c_k."""
    shares, turns = SHARES[weighting], [(0, 2), (1,), (0, 1, 2), (1, 2)]
    x, c, mine = start(), np.zeros(C * D + C), np.zeros((K, C * D + C))
    for some, rate in zip(turns, [0.3, 0.3, 0.03, 0.003], strict=True):  # after a half and three quarters, a tenth
        moves, changes = [], []
        for k in some:
            y = x.copy()
            for _ in range(4):
                y -= rate * (g(y, k) - mine[k] + c)
            new = mine[k] - c + (x - y) / (4 * rate)
            changes.append(shares[k] * (new - mine[k]))
            moves.append(shares[k] * (y - x))
            mine[k] = new
        x = x + 0.7 * np.sum(moves, axis=0) / sum(shares[k] for k in some)
        c = c + np.sum(changes, axis=0)
        np.testing.assert_allclose(c, shares @ mine, atol=1e-12)  # what the rule is for
    keys = {"method": "scaffold", "local_steps": 4, "server_lr": 0.7, "schedule": "step", "rounds": 4}
    state = trained(turns, weighting=weighting, **keys)
    np.testing.assert_allclose(vector(state), x, rtol=2e-4, atol=2e-5)
    control = state.memory["control"]
    np.testing.assert_allclose(flat((control["head.weight"], control["head.bias"])), c, rtol=2e-3, atol=2e-4)


def reach(steps: int, rate: float, momentum: float, mu: float) -> float:
    """How far torch's SGD goes along a constant gradient of 1 under a proximal pull, in units of the rate."""
    w = torch.zeros(1, dtype=torch.float64, requires_grad=True)
    sgd = torch.optim.SGD([w], lr=rate, momentum=momentum)
    for _ in range(steps):
        w.grad = 1 + mu * w.detach()
        sgd.step()
    return -float(w.detach()[0]) / rate


@pytest.mark.parametrize("summed", [False, True])
@pytest.mark.parametrize(("momentum", "mu"), [(0.6, 1.5), (0.0, 1.5), (0.6, 0.0)])
def test_fednova_with_momentum_and_a_pull_under_a_schedule(
    momentum: float, mu: float, summed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """a_k depends on η μ, and η is the rate of the round."""
    monkeypatch.setattr(solver, "batches", uneven)
    x, velocity, shares = start(), np.zeros(C * D + C), SHARES["examples"]
    for rate in [0.3, 0.3, 0.03, 0.003]:
        normalised, efforts = [], []
        for k in range(K):
            steps, w, v = k + 2, x.copy(), np.zeros_like(x)
            for _ in range(steps):
                v = momentum * v + g(w, k) + mu * (w - x)
                w = w - rate * v
            a = reach(steps, rate, momentum, mu)
            normalised.append((w - x) / a)
            efforts.append(steps if mu else a)
        velocity = 0.5 * velocity + (shares @ np.array(efforts)) * (shares @ np.stack(normalised))
        x = x + velocity
    keys = {"momentum": momentum, "mu": mu, "server_momentum": 0.5, "schedule": "step", "rounds": 4}
    state = trained([(0, 1, 2)] * 4, summed, method="fednova", **keys)
    np.testing.assert_allclose(vector(state), x, rtol=2e-4, atol=2e-5)


# ------------------------------------------------------------------------------------------------------- least squares


def least_squares(scores: np.ndarray, right: np.ndarray, share: np.ndarray, _: float) -> np.ndarray:
    """Without the softmax: gradients are those of the mean of ½ ‖W z + b − onehot‖² of each client's batch."""
    scores.reshape(-1)[right] -= 1
    return scores * share


def optimum(shares: np.ndarray) -> np.ndarray:
    """What minimises the clients' mean squared errors, each by its share: the normal equations in double precision."""
    weights = (shares / np.array(SIZES))[WHO][:, None]
    design = np.column_stack([X, np.ones(N)]).astype(np.float64)
    solved = np.linalg.solve(design.T @ (weights * design), design.T @ (weights * np.eye(C)[Y]))
    return flat((solved[:D].T, solved[D]))


# All pairs of clients, and each by itself: nobody is heard in every round.
TURNS = [(0, 1), (2,), (1, 2), (0,), (0, 2), (1,)]


@pytest.mark.parametrize(("who", "summed"), [([(0, 1, 2)], False), (TURNS, False), (TURNS, True)])
@pytest.mark.parametrize("weighting", SHARES)
def test_scaffold_ends_at_the_optimum_of_the_loss_that_its_weights_name(
    weighting: str, who: Any, summed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(solver, "_errors", least_squares)
    assert np.linalg.norm(optimum(SHARES["examples"]) - optimum(SHARES["uniform"])) > 0.1
    keys = {"method": "scaffold", "weighting": weighting, "local_steps": 4, "lr": 0.1, "rounds": 240}
    state = trained(who * (240 // len(who)), summed, **keys)
    assert np.linalg.norm(vector(state) - optimum(SHARES[weighting])) < 1e-4
    assert np.linalg.norm(flat(tuple(state.memory["control"].values()))) < 1e-4  # nothing pulls at the optimum


@pytest.mark.parametrize("summed", [False, True])
@pytest.mark.parametrize(("adaptive", "weighting"), [(True, "examples"), (False, "uniform")])
def test_feddyn_with_short_updates_ends_at_the_optimum(
    adaptive: bool, weighting: str, summed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the first rounds every update is longer than ``max_norm``."""
    monkeypatch.setattr(solver, "_errors", least_squares)
    keys = {"method": "feddyn", "alpha_dyn": 0.3, "adaptive": adaptive, "max_norm": 0.1, "local_steps": 8, "lr": 0.2}
    first = trained([(0, 1, 2)], summed, rounds=120, **keys)
    # All of length 0.1: neither the mean of the models nor that of the duals can be further away.
    assert 0.05 < np.linalg.norm(vector(first) - start()) <= 0.2
    end = trained([(0, 1, 2)] * 120, summed, rounds=120, **keys)
    assert np.linalg.norm(vector(end) - optimum(SHARES[weighting])) < 1e-4


def test_a_client_of_feddyn_keeps_the_dual_of_what_the_server_hears() -> None:
    bench = bench_of(method="feddyn", max_norm=0.01, local_steps=3)
    nothing = {name: np.zeros((K, *shape), np.float32) for name, shape in bench.method.client_state.items()}
    everybody = replace(cohort(*range(K)), state=lambda name, _: nothing[name])
    for reply in bench.answer(everybody, bench.broadcast(bench.init())):
        sent = {name: array for name, array in reply.message.arrays.items() if name.startswith("update.")}
        assert norm(sent) == pytest.approx(0.01, rel=1e-5)
        for name, dual in reply.state.items():
            np.testing.assert_array_equal(dual, sent[name.replace("dual.", "update.")])


def test_scaffold_of_uneven_clients_under_secure_sums() -> None:
    partition = {"kind": "dirichlet-by-class", "clients": 5, "alpha": 0.3}
    stage = {"method": "scaffold", "train": "head", "rounds": 4, "lr": 0.01, "batch_size": 20, "clients_per_round": 3}
    data = {"dataset": "digits", "partition": partition}
    recipes = [
        Recipe.parse({"data": data, "model": {"backbone": "features"}, "stages": [stage | {"secure": secure}]})
        for secure in (False, True)
    ]
    assert len(set(Federation.of(recipes[0]).sizes.tolist())) > 3
    plain, secure = (run(recipe).head for recipe in recipes)
    np.testing.assert_allclose(secure.weight, plain.weight, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize(
    ("steps", "taken"),
    [(1.0, True), (2.5, True), (9.9e6, True), (1e7, False), (0.0, False), (-1.0, False), (np.nan, False)],
)
def test_fednova_takes_a_number_of_steps_that_can_be(steps: float, taken: bool) -> None:
    bench = bench_of(method="fednova")
    arrays = {"update.head.weight": np.ones((C, D), np.float32), "update.head.bias": np.ones(C, np.float32)}
    message = Message(arrays | {"steps": np.array(steps, np.float32)}, {"examples": 5})
    reply = Reply(np.array([0]), message, np.array([0]), np.array([0]))
    if taken:
        total = bench.total(bench.init(), [reply])
        assert total.sums["steps"] == 5 * steps
        assert total.weight("steps") == 5
    else:
        with pytest.raises(MessageError, match="steps"):
            bench.total(bench.init(), [reply])
