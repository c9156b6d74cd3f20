"""Heads on a device: the same as with NumPy, and no step that waits for the host.

There is no GPU here. The same code runs on the processor in its place; and on torch's device `meta`, whose tensors have
no values: whatever reads one on the host fails there.
"""

from typing import Any

import numpy as np
import pytest
import torch

from headstart.config.recipe import Recipe
from headstart.core.params import Params
from headstart.solvers import device_heads, heads
from headstart.solvers.cohort import Cohort
from headstart.solvers.device_heads import DeviceHeads
from headstart.solvers.heads import HeadSolver, batches, layers_of
from headstart.solvers.objective import LocalResult, Objective

SIZES, D, C = (20, 9, 1, 13), 6, 3


def cohort() -> Cohort:
    rng = np.random.default_rng(0)
    count, clients = sum(SIZES), np.arange(len(SIZES))
    X = rng.standard_normal((2 * count, D)).astype(np.float32)
    rows, y = np.sort(rng.permutation(2 * count)[:count]), rng.integers(0, C, count)
    return Cohort(clients, X, rows, y, np.repeat(clients, SIZES), np.zeros(len(SIZES), bool), lambda *_: X)


def stage_of(**keys: Any) -> Any:
    table = {"method": "fedavg", "train": "head", "rounds": 3, "lr": 0.1, "batch_size": 4, **keys}
    return Recipe.parse({"data": {"dataset": "x.npz"}, "model": {"backbone": "features"}, "stages": [table]}).stages[0]


def start_of(hidden: bool, masked: bool = False) -> Params:
    rng = np.random.default_rng(1)
    shapes = {"head.weight": (C, 5 if hidden else D), "head.bias": (C,)}
    shapes |= {"0.weight": (5, D), "0.bias": (5,)} if hidden else {}
    made = {n: rng.standard_normal((len(SIZES), *shape)).astype(np.float32) for n, shape in shapes.items()}
    if masked:
        made["head.bias"][1, 2] = -np.inf
    return Params({name: torch.from_numpy(value) for name, value in made.items()})


def like(start: Params, seed: int) -> Params:
    rng = np.random.default_rng(seed)
    return Params(
        {n: torch.from_numpy(0.1 * rng.standard_normal(v.shape).astype(np.float32)) for n, v in start.items()}
    )


START, MLP = start_of(False), start_of(True)
CASES: dict[str, tuple[dict[str, Any], Params, Objective]] = {
    "plain": ({}, START, Objective()),
    "two epochs": ({"local_epochs": 2}, START, Objective()),
    "steps": ({"local_steps": 3}, START, Objective()),
    "all examples": ({"batch_size": "full"}, START, Objective()),
    "momentum": ({"momentum": 0.9}, START, Objective(velocity=like(START, 2))),
    "decay and clipping": ({"weight_decay": 0.1, "clip": 0.3}, start_of(False, True), Objective()),
    "adamw": ({"optimiser": "adamw", "weight_decay": 0.1}, MLP, Objective()),
    "temperature": ({"temperature": 0.3}, START, Objective()),
    "hidden layers": ({}, MLP, Objective()),
    "some move": ({}, MLP, Objective(trains=frozenset({"0.weight", "0.bias"}))),
    "proximal": ({}, MLP, Objective(proximal=0.7, centre=like(MLP, 3))),
    "proximal by client": ({}, START, Objective(proximal=np.array([0.1, 0.0, 2.0, 0.3]))),
    "correction": ({}, START, Objective(correction=like(START, 4))),
    "pairs": ({"momentum": 0.5}, START, Objective(inner_lr=0.2)),
}


@pytest.mark.parametrize("case", CASES)
def test_the_same_as_with_numpy(monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    keys, start, objective = CASES[case]
    found: list[LocalResult] = []
    for device in (None, torch.device("cpu")):
        monkeypatch.setattr(heads, "accelerator", lambda device=device: device)
        velocity = {name: value.clone() for name, value in (objective.velocity or {}).items()} or None
        given = Objective(**(vars(objective) | {"velocity": velocity}))
        found.append(HeadSolver(stage_of(**keys), (0, 0), list(start))(start, cohort(), 1, given))
    here, there = found
    assert here.steps.tolist() == there.steps.tolist()
    for what in ("params", "velocity"):
        for name, value in getattr(here, what).items():
            if what == "params" or (name in (objective.trains or start) and keys.get("momentum")):
                np.testing.assert_allclose(getattr(there, what)[name], value, rtol=2e-5, atol=2e-6, err_msg=name)


@pytest.mark.parametrize("case", CASES)
def test_no_step_reads_anything_on_the_host_or_sends_anything_there(monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    keys, start, objective = CASES[case]
    sent, real = list[int](), device_heads.to_device
    monkeypatch.setattr(device_heads, "to_device", lambda *given: (sent.append(1), real(*given))[1])
    counts = []
    for rounds in (1, 4):  # as many times the steps
        stage = stage_of(**({"local_epochs": rounds} if "local_steps" not in keys else {}) | keys)
        there = DeviceHeads(stage, objective, torch.device("meta"), layers_of(list(start)), start, frozenset(start))
        there.descend(cohort(), batches(cohort(), stage, 0, (0, 0), objective), 0.1)
        counts.append(len(sent))
        sent.clear()
        with pytest.raises(NotImplementedError):  # so would every step that reads a value
            there.result(np.zeros(len(SIZES), np.int64))
    assert counts[0] == counts[1]
