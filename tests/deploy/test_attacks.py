"""A federation of real processes whose server does not follow the recipe, and what it gets; the attacks of
docs/threats.md."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

pytest.importorskip("flwr")

from headstart.data import Federation
from headstart.engine.flower_messages import recipe_digest
from headstart.engine.node_ledger import NodeLedger
from headstart.engine.server import draw
from tests.deploy.processes import FOURTH, NODES, PATIENCE, Machines, played, recipe_of, summary_of, wait_for

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="processes are found through /proc"),
]


def test_a_server_that_lies_gets_one_answer_from_a_node(machines: Machines, data: Path) -> None:
    """Real processes on both sides; the server asks what no recipe asks."""
    privacy = {"epsilon": 1.0, "clip": 1.0, "noise": "client"}
    recipe = recipe_of(data, {"method": "fedncm", "privacy": privacy})
    said = machines.lie("questions", recipe)
    assert len({said[name]["answer"] for name in ("first", "again", "new run")}) == 1
    assert said["first"]["answer"] is not None
    for name, why in (
        ("fewer clients", "the node has begun this stage from another setup, and keeps to it"),
        ("another number", "the node is number 0 of its list of peers, and the request is to client 1"),
        ("beyond the stage", "the stage has 1 rounds, from 0; the request is for round 7"),
        ("a model", "with privacy a node tests no models"),
    ):
        assert why in said[name]["error"], said[name]
        assert said[name]["answer"] is None
    entries = NodeLedger(machines.folder / "state" / NODES[0]).entries()
    assert [entry["kind"] for entry in entries if entry["recipe"] == recipe_digest(recipe)].count("answer") == 3


@pytest.mark.minutes
def test_a_server_that_lies_opens_no_secure_sum_but_the_one_of_everybody(machines: Machines, data: Path) -> None:
    """Real processes on both sides: thresholds, swapped keys, lies about dropouts, two lists at once, differencing."""
    recipe = recipe_of(data, {"method": "fedncm"}, {"method": "fedncm", "secure": True})
    machines.admit_fourth(data / "alone.npz")
    said = machines.lie("sums", recipe, (*NODES, FOURTH))
    threshold = "the server would open a sum of 4 clients with 2 of them; by the node's recipe 3 have to stay"
    assert said["threshold"] == [threshold] * 4
    assert said["keys"] == {
        str(client): "the public keys listed for client 1 are not its own"
        if client == 1
        else "the keys listed for client 1 are not signed by it for this sum"
        for client in range(4)
    }
    assert len(said["lists"]) == 4
    assert all("2 survivors have signed the list of survivors, 3 are needed" in error for error in said["lists"])
    assert sorted(error is None for error in said["at once"]) == [False, True]
    owners = [np.load(data / f"{name}.npz") for name in (*NODES, "alone")]
    counts = sum(np.bincount(one["y"][one["split"] == 0], minlength=10) for one in owners)
    assert said["honest"] == [{step: {} for step in ("keys", "shares", "masked", "reveal")}, counts.tolist()]
    refused = [error for errors in said["fewer"].values() for error in errors.values()]
    assert len(refused) == 3
    assert set(refused) == {"the sum of this round was opened before, for another list of survivors"}


def test_a_class_of_one_example_does_not_leave_its_node(machines: Machines, data: Path) -> None:
    """The attack: a mean of one example is that example. The server reads every statistic that a node sends."""
    recipe = recipe_of(data, *({"method": method} for method in ("fedncm", "fedcof", "fed3r")))
    machines.admit_fourth(data / "alone.npz")
    said = machines.lie("statistics", recipe, (*NODES, FOURTH))
    alone = np.load(data / "alone.npz")
    x, y = (alone[name][alone["split"] == 0] for name in ("X", "y"))
    assert (y == 7).sum() == 1
    others = [label for label in range(10) if label != 7]
    sums = np.stack([x[y == label].sum(axis=0, dtype=np.float64) for label in others])
    unit = x / np.linalg.norm(x, axis=1, keepdims=True)
    for method, sent in said.items():
        assert sent["labels"] == others, method
        of = unit if method == "fedncm" else x
        assert not any(np.allclose(of[y == 7], row, rtol=1e-3) for row in sent["sums"])
    np.testing.assert_allclose(said["fed3r"]["sums"], sums, rtol=1e-6)
    several = x[y != 7].astype(np.float64)
    np.testing.assert_allclose(said["fed3r"]["moments"], (several.T @ several)[np.triu_indices(64)], rtol=1e-6)


@pytest.mark.minutes
def test_whoever_knows_the_recipe_does_not_know_who_was_drawn(machines: Machines, data: Path) -> None:
    """The attack: the draw of a simulation, which follows from the seed. And nothing exact is left on the server."""
    privacy = {"epsilon": 5.0, "clip": 1.0, "noise": "server"}
    stage: dict[str, Any] = {"method": "fedavg", "train": "head", "rounds": 16, "lr": 0.1, "batch_size": 64}
    stage |= {"clients_per_round": 1, "weighting": "uniform", "evaluate_every": 16, "privacy": privacy}
    recipe = recipe_of(data, {"method": "fedncm", "privacy": privacy}, stage)
    process, out = machines.begin(recipe, "drawn", test=str(data / "test.npz")), machines.folder / "runs" / "drawn"
    wait_for(lambda: played(out) > 1, pause=0.02)
    assert (out / "checkpoint" / "state.safetensors").stat().st_mode & 0o077 == 0
    assert process.wait(PATIENCE) == 0, machines.log("run-drawn")
    asked = {
        entry["round"]: number
        for number, name in enumerate(NODES)
        for entry in NodeLedger(machines.folder / "state" / name).entries()
        if (entry["recipe"], entry["kind"], entry.get("stage")) == (recipe_digest(recipe), "answer", 1)
    }
    federation = Federation.of(recipe)
    there = np.ones(3, np.bool_)
    guessed = {
        number: int(draw(recipe.stages[1], federation, (recipe.seed, 1), number, there)[0]) for number in range(16)
    }
    assert asked.keys() == guessed.keys()
    assert asked != guessed  # by chance once in 3 ** 16

    assert {"example", "client"} < summary_of(out)["privacy"].keys()  # never added up
    assert not list(machines.folder.rglob("noise.secret"))
    owners = [np.load(data / f"{name}.npz") for name in NODES]
    sums = sum(
        np.stack([one["X"][(one["split"] == 0) & (one["y"] == label)].sum(axis=0) for label in range(10)])
        for one in owners
    )
    for path in out.rglob("*.safetensors"):  # what was released is left, and nothing else
        arrays = load_file(path)
        assert not [name for name in arrays if name.startswith("state.")], path
        assert all(np.abs(array - sums).max() > 1 for array in arrays.values() if array.shape == sums.shape), path
