"""Training methods against the same methods written out client by client, in plain loops and double precision."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headstart.config.recipe import Recipe
from headstart.core.ledger import Ledger
from headstart.core.params import Params
from headstart.core.update import Total
from headstart.data import Dataset, Examples, Federation
from headstart.engine.client_states import ClientStates
from headstart.heads import LinearHead
from headstart.solvers.cohort import Cohort
from headstart.solvers.heads import HeadSolver, batches
from headstart.solvers.objective import Objective, learning_rate
from tests.helpers import Bench, context_of, play

C, D = 3, 4
RNG = np.random.default_rng(0)
SIZES = (5, 9, 14)
K, N = len(SIZES), sum(SIZES)
X = RNG.normal(size=(N, D)).astype(np.float32)
Y = RNG.integers(0, C, N)
WHO = np.repeat(np.arange(K), SIZES)
START = LinearHead(RNG.normal(size=(C, D)).astype(np.float32), RNG.normal(size=C).astype(np.float32))

Head = tuple[np.ndarray, np.ndarray]


def stage_of(**keys: Any) -> Any:
    full = {"train": "head", "batch_size": "full", "rounds": 3, "lr": 0.3} | keys
    return Recipe.parse({"data": {"dataset": "x"}, "stages": [full]}).stages[0]


def bench_of(head: LinearHead | None = START, **keys: Any) -> Bench:
    """A stage of the three clients, from the head given."""
    stage = stage_of(**keys)
    return Bench(stage, context_of(stage, C, D, clients=K, examples=N, head=head))


def federated(tmp_path: Path, **keys: Any) -> Head:
    """What headstart computes."""
    examples = Examples("features", X, (), np.arange(N), Y)
    federation = Federation(Dataset("x", ("a", "b", "c"), examples, examples), WHO, None, ("0", "1", "2"))
    bench = bench_of(**keys)
    state = play(bench, federation, X, Ledger.open(K), ClientStates(tmp_path, K, bench.method.client_state))
    return state.params["head.weight"], state.params["head.bias"]


def gradient(head: Head, client: int | None) -> Head:
    """Of the mean cross-entropy over a client's examples, or over all, by torch's autograd."""
    mine = slice(None) if client is None else client == WHO
    weight, bias = (torch.tensor(np.asarray(part, np.float64), requires_grad=True) for part in head)
    scores = torch.tensor(X[mine], dtype=torch.float64) @ weight.T + bias
    torch.nn.functional.cross_entropy(scores, torch.tensor(Y[mine])).backward()
    return weight.grad.numpy(), bias.grad.numpy()


def start() -> np.ndarray:
    return flat((START.weight.astype(np.float64), START.bias.astype(np.float64)))


def flat(head: Head) -> np.ndarray:
    return np.concatenate([head[0].ravel(), head[1]])


def g(vector: np.ndarray, client: int | None) -> np.ndarray:
    return flat(gradient((vector[: C * D].reshape(C, D), vector[C * D :]), client))


def close(found: Head, expected: np.ndarray) -> None:
    np.testing.assert_allclose(flat(found), expected, rtol=2e-4, atol=2e-5)


def test_fedavg_with_one_full_step_of_everybody_is_gradient_descent(tmp_path: Path) -> None:
    x = start()
    for _ in range(3):
        x = x - 0.3 * g(x, None)
    close(federated(tmp_path, method="fedavg"), x)


def test_fedavg_weighted_and_uniform(tmp_path: Path) -> None:
    for weighting, shares in (("examples", np.array(SIZES) / N), ("uniform", np.full(K, 1 / K))):
        x = start()
        for _ in range(3):
            ends = []
            for k in range(K):
                w = x.copy()
                for _ in range(4):
                    w -= 0.3 * g(w, k)
                ends.append(w)
            x = shares @ np.stack(ends)
        close(federated(tmp_path, method="fedavg", local_steps=4, weighting=weighting), x)


def test_fedprox(tmp_path: Path) -> None:
    x = start()
    for _ in range(3):
        ends = []
        for k in range(K):
            w = x.copy()
            for _ in range(4):
                w -= 0.3 * (g(w, k) + 0.5 * (w - x))
            ends.append(w)
        x = np.array(SIZES) / N @ np.stack(ends)
    close(federated(tmp_path, method="fedprox", local_steps=4, mu=0.5), x)
    without, plain = (
        federated(tmp_path, method=method, local_steps=4, **keys)
        for method, keys in (("fedprox", {"mu": 0.0}), ("fedavg", {}))
    )
    np.testing.assert_array_equal(without[0], plain[0])


def test_scaffold_option_two(tmp_path: Path) -> None:
    x, c, mine = start(), np.zeros(C * D + C), np.zeros((K, C * D + C))
    for _ in range(3):
        ends, changes = [], []
        for k in range(K):
            y = x.copy()
            for _ in range(4):
                y -= 0.3 * (g(y, k) - mine[k] + c)
            new = mine[k] - c + (x - y) / (4 * 0.3)
            changes.append(new - mine[k])
            mine[k] = new
            ends.append(y)
        x = x + 0.7 * (np.array(SIZES) / N @ (np.stack(ends) - x))
        c = c + np.array(SIZES) / N @ np.stack(changes)
    close(federated(tmp_path, method="scaffold", local_steps=4, server_lr=0.7), x)


@pytest.mark.parametrize("adaptive", [True, False])
def test_feddyn(adaptive: bool, tmp_path: Path) -> None:
    cloud, h = start(), np.zeros((K, C * D + C))
    for _ in range(3):
        ends = []
        for k in range(K):
            alpha = 0.2 * (N / (K * SIZES[k]) if adaptive else 1.0)
            w = cloud.copy()
            for _ in range(4):
                # The official code's loss: cross-entropy + α⟨w, h − cloud⟩ + α/2 ‖w‖².
                w -= 0.3 * (g(w, k) + alpha * (h[k] - cloud) + alpha * w)
            h[k] += w - cloud
            ends.append(w)
        cloud = np.mean(ends, axis=0) + h.mean(axis=0)
    close(federated(tmp_path, method="feddyn", local_steps=4, alpha_dyn=0.2, adaptive=adaptive), cloud)


def nova(momentum: float, mu: float) -> np.ndarray:
    """With one local epoch in batches of 1 replaced by full-batch steps: client k takes k + 2 of them."""
    x = start()
    shares = np.array(SIZES) / N
    for _ in range(3):
        normalised, efforts = [], []
        for k in range(K):
            steps, w, v, counter, a = k + 2, x.copy(), 0.0, 0.0, 0.0
            for _ in range(steps):
                v = momentum * v + g(w, k) + mu * (w - x)
                w = w - 0.3 * v
                # The authors' counting, for one of the two at a time.
                counter = momentum * counter + 1
                a = a + counter if not mu else (1 - 0.3 * mu) * a + 1
            normalised.append((w - x) / a)
            efforts.append(steps if mu else a)
        x = x + (shares @ np.array(efforts)) * (shares @ np.stack(normalised))
    return x


def uneven(cohort: Cohort, *_: Any) -> np.ndarray:
    """Client k takes k + 2 steps, each on all of its examples."""
    batches = np.full((K, K + 1, max(SIZES)), -1)
    for k in range(K):
        batches[k, : k + 2, : SIZES[k]] = np.flatnonzero(cohort.owners == k)
    return batches


@pytest.mark.parametrize(("momentum", "mu"), [(0.0, 0.0), (0.6, 0.0), (0.0, 0.4)])
def test_fednova(momentum: float, mu: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headstart.solvers.heads.batches", uneven)
    close(federated(tmp_path, method="fednova", momentum=momentum, mu=mu), nova(momentum, mu))


def test_fednova_with_equal_steps_is_fedavg(tmp_path: Path) -> None:
    keys = {"local_steps": 3, "momentum": 0.5}
    left = federated(tmp_path / "a", method="fednova", **keys)
    close(federated(tmp_path / "b", method="fedavg", **keys), flat(left))


# ------------------------------------------------------------------------------------------------- server optimisers

MEANS = [
    {"head.weight": np.array([[0.3]]), "head.bias": np.array([-0.2])},
    {"head.weight": np.array([[-0.1]]), "head.bias": np.array([0.4])},
]


def stepped(**keys: Any) -> tuple[float, float]:
    """A problem of two parameters, both 1 at the start, after the two mean updates above."""
    stage = stage_of(**keys)
    bench = Bench(stage, context_of(stage, 1, 1))
    state = replace(bench.init(), params=Params({"head.weight": np.array([[1.0]]), "head.bias": np.array([1.0])}))
    for number, mean in enumerate(MEANS):
        total = Total({f"update.{name}": value for name, value in mean.items()}, {"update": 1.0})
        state = bench.method.server_update(state, total, number)
    return float(state.params["head.weight"][0, 0]), float(state.params["head.bias"][0])


def test_fedavg_by_hand() -> None:
    # w = 1 + 0.5·(0.3 − 0.1). Likewise −0.2, 0.4.
    assert stepped(method="fedavg", server_lr=0.5) == pytest.approx((1.1, 1.1))


def test_fedavgm_by_hand() -> None:
    # v₁ = 0.3, v₂ = 0.9·0.3 − 0.1 = 0.17; w = 1 + 0.5·(0.3 + 0.17). Likewise −0.2, 0.22.
    assert stepped(method="fedavgm", server_lr=0.5) == pytest.approx((1.235, 1.01))


def test_fedadam_of_reddi_by_hand() -> None:
    # m₁ = 0.03, v₁ = 0.99·τ² + 0.01·0.09; m₂ = 0.9·0.03 − 0.01 = 0.017, v₂ = 0.99·v₁ + 0.01·0.01.
    v1 = 0.99e-6 + 9e-4
    v2 = 0.99 * v1 + 1e-4
    weight = 1 + 0.1 * (0.03 / (v1**0.5 + 1e-3) + 0.017 / (v2**0.5 + 1e-3))
    u1 = 0.99e-6 + 4e-4
    u2 = 0.99 * u1 + 16e-4
    bias = 1 + 0.1 * (-0.02 / (u1**0.5 + 1e-3) + (0.9 * -0.02 + 0.04) / (u2**0.5 + 1e-3))
    assert stepped(method="fedadam", server_lr=0.1) == pytest.approx((weight, bias), rel=1e-9)


def test_fedadam_with_bias_correction_is_torch_adam() -> None:
    parameters = [torch.ones(1, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    adam = torch.optim.Adam(parameters, lr=0.1, betas=(0.9, 0.999), eps=1e-8)
    for mean in MEANS:
        for parameter, value in zip(parameters, mean.values(), strict=True):
            parameter.grad = -torch.tensor(value).reshape(1)
        adam.step()
    found = stepped(method="fedadam", server_lr=0.1, beta2=0.999, tau=1e-8, bias_correction=True)
    assert found == pytest.approx([parameter.item() for parameter in parameters], rel=1e-9)


def test_fedyogi_by_hand() -> None:
    # v₁ = τ² + 0.01·0.09 (the square is larger, so it adds); v₂ = v₁ + 0.01·0.01, for 0.01 > v₁ again.
    v1 = 1e-6 + 9e-4
    v2 = v1 + 1e-4
    weight = 1 + 0.1 * (0.03 / (v1**0.5 + 1e-3) + 0.017 / (v2**0.5 + 1e-3))
    assert stepped(method="fedyogi", server_lr=0.1)[0] == pytest.approx(weight, rel=1e-9)


def test_fedadagrad_by_hand() -> None:
    v1 = 1e-6 + 0.09
    weight = 1 + 0.1 * (0.3 / (v1**0.5 + 1e-3) - 0.1 / ((v1 + 0.01) ** 0.5 + 1e-3))
    assert stepped(method="fedadagrad", server_lr=0.1)[0] == pytest.approx(weight, rel=1e-9)


# ------------------------------------------------------------------------------------------------------ local solver


def cohort(*clients: int) -> Cohort:
    rows = np.flatnonzero(np.isin(WHO, clients))
    new = np.ones(len(clients), bool)
    return Cohort(np.array(clients), X, rows, Y[rows], WHO[rows], new, lambda name, start: np.zeros(0))


@pytest.mark.parametrize(("clip", "decay", "pull"), [(0.9, 0.0, 0.0), (None, 0.3, 0.0), (0.9, 0.8, 0.5)])
def test_local_sgd_is_torch_sgd_on_the_same_batches(clip: float | None, decay: float, pull: float) -> None:
    """The gradient of the loss is clipped, as clip_grad_norm_ does before a step adds what else the step is along."""
    keys = {"weight_decay": decay} | ({} if clip is None else {"clip": clip})
    stage = stage_of(method="fedavg", batch_size=4, local_epochs=2, momentum=0.7, lr=0.2, temperature=0.5, **keys)
    some = cohort(0, 1, 2)
    plan = batches(some, stage, 1, (7, 0))
    weights, biases = torch.tensor(START.weight).expand(K, C, D), torch.tensor(START.bias).expand(K, C)
    begin = Params({"head.weight": weights, "head.bias": biases})
    correction = {name: pull * torch.ones_like(value) for name, value in begin.items()}
    objective = Objective(np.full(K, pull), correction) if pull else Objective()
    found = HeadSolver(stage, (7, 0), begin)(begin, some, 1, objective)
    assert found.steps.tolist() == [2 * 2, 2 * 3, 2 * 4]  # ⌈5/4⌉, ⌈9/4⌉ and ⌈14/4⌉ batches, twice
    for k in range(K):
        weight, bias = (torch.tensor(part, requires_grad=True) for part in (START.weight, START.bias))
        sgd = torch.optim.SGD([weight, bias], lr=0.2, momentum=0.7, weight_decay=decay)
        for batch in plan[k]:
            rows = some.rows[batch[batch >= 0]]
            if len(rows):
                sgd.zero_grad()
                scores = (torch.tensor(X[rows]) @ weight.T + bias) / 0.5
                torch.nn.functional.cross_entropy(scores, torch.tensor(Y[rows])).backward()
                torch.nn.utils.clip_grad_norm_([weight, bias], clip or float("inf"))
                for parameter, first in ((weight, START.weight), (bias, START.bias)):
                    parameter.grad += pull * (parameter.detach() - torch.tensor(first)) + pull
                sgd.step()
        np.testing.assert_allclose(found.params["head.weight"][k], weight.detach(), rtol=1e-4, atol=1e-6)
        np.testing.assert_allclose(found.params["head.bias"][k], bias.detach(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("stack", [1, 1 << 20])
def test_what_a_client_learns_depends_neither_on_the_cohort_nor_on_threads(
    stack: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headstart.solvers.heads._STACK_BYTES", stack)
    stage = stage_of(method="fedavg", batch_size=4, local_epochs=2, momentum=0.7, lr=0.2)
    threads = torch.get_num_threads()

    def trained(count: int, *clients: int) -> list[bytes]:
        torch.set_num_threads(count)
        shape = (len(clients), *START.weight.shape)
        begin = {"head.weight": torch.tensor(START.weight).expand(shape), "head.bias": torch.tensor(START.bias)}
        begin["head.bias"] = begin["head.bias"].expand(shape[:2])
        found = HeadSolver(stage, (7, 0), begin)(Params(begin), cohort(*clients), 1, Objective())
        return [found.params["head.weight"][k].numpy().tobytes() for k in range(len(clients))]

    try:
        alone = [trained(1, k)[0] for k in range(K)]
        assert len({*alone}) == K
        assert trained(1, *range(K)) == trained(3, *range(K)) == alone
    finally:
        torch.set_num_threads(threads)


def test_every_example_is_seen_once_an_epoch_in_an_order_of_the_clients_own() -> None:
    stage = stage_of(method="fedavg", batch_size=4)
    together, alone = batches(cohort(0, 2), stage, 3, (1, 0)), batches(cohort(2), stage, 3, (1, 0))
    seen = together[1][together[1] >= 0]
    assert sorted(seen - SIZES[0]) == list(range(SIZES[2]))
    assert seen.tolist() != sorted(seen)
    np.testing.assert_array_equal(alone[0][alone[0] >= 0], seen - SIZES[0])
    assert not np.array_equal(batches(cohort(2), stage, 4, (1, 0)), alone)


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({}, [1, 1, 1, 1, 1, 1, 1, 1]),
        ({"schedule": "step"}, [1, 1, 1, 1, 0.1, 0.1, 0.01, 0.01]),
        ({"schedule": "cosine"}, [0.5 * (1 + np.cos(np.pi * r / 8)) for r in range(8)]),
        ({"warmup_rounds": 3}, [0.25, 0.5, 0.75, 1, 1, 1, 1, 1]),
    ],
)
def test_schedules(keys: dict[str, Any], expected: list[float]) -> None:
    stage = stage_of(method="fedavg", lr=1.0, rounds=8, **keys)
    assert [learning_rate(stage, round) for round in range(8)] == pytest.approx(expected)


def test_fedyolo_warms_up_by_default_and_decays_as_its_paper_says() -> None:
    """Linear for a tenth of the 150 rounds, the peak in the sixteenth, then half a cosine over the other 135."""
    stage = stage_of(method="fedyolo", train="lora", lr=1.0, rounds=150)
    rates = [learning_rate(stage, round) for round in range(150)]
    assert rates[:15] == pytest.approx([(round + 1) / 16 for round in range(15)])
    assert rates[15:] == pytest.approx([0.5 * (1 + np.cos(np.pi * round / 135)) for round in range(135)])
    assert learning_rate(stage_of(method="fedyolo", train="lora", lr=1.0, warmup_rounds=0), 0) == 1.0
    assert learning_rate(stage_of(method="fedavg", lr=1.0, rounds=150), 0) == 1.0


@pytest.mark.parametrize("method", ["feddyn", "scaffold"])
def test_what_a_client_keeps_never_travels(method: str) -> None:
    bench = bench_of(method=method)
    shapes = bench.method.client_state
    before = {name: RNG.normal(size=(1, *shape)).astype(np.float32) for name, shape in shapes.items()}
    one = replace(cohort(1), state=lambda name, _: before[name])
    (reply,) = bench.answer(one, bench.broadcast(bench.init()))
    data = reply.message.to_bytes()
    assert set(reply.state) == set(before)
    for name, array in reply.state.items():
        assert not np.array_equal(array, before[name][0])
        assert array.tobytes() not in data
        assert before[name].tobytes() not in data


@pytest.mark.parametrize(("init", "expected"), [("previous", START.weight), ("zeros", np.zeros((C, D)))])
def test_where_a_head_starts(init: str, expected: np.ndarray) -> None:
    state = bench_of(method="fedavg", head_init=init).init()
    np.testing.assert_array_equal(state.params["head.weight"], expected)


def test_a_random_head_has_torchs_bounds_and_a_masked_class_can_be_learned() -> None:
    stage = stage_of(method="fedavg", head_init="random")
    weight = Bench(stage, context_of(stage, 20, 100, clients=K, examples=N)).init().params["head.weight"]
    assert np.abs(weight).max() <= 0.1
    assert weight.std() == pytest.approx(0.1 / 3**0.5, rel=0.05)
    masked = LinearHead(START.weight, np.array([0, -np.inf, 1], np.float32))
    assert bench_of(masked, method="fedavg").init().params["head.bias"].tolist() == [0, 0, 1]
