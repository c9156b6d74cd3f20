"""Several tasks, and models of the clients' own, on nodes that hold their own data: the same figures as in process."""

import csv
import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file
from sklearn.datasets import load_digits

pytest.importorskip("flwr")

from headstart.config.recipe import Recipe
from headstart.core.message import Message as Wire
from headstart.data import Federation
from headstart.engine.grid import Nodes
from headstart.engine.node import Node
from headstart.engine.node_stage import NodeRequest
from headstart.engine.setup import StageSetup
from headstart.errors import HeadstartError
from headstart.runner import Result, run
from tests.engine.test_node import (
    Grid,
    InterruptedRunError,
    _identity,  # noqa: F401 (a fixture)
    assert_same_models,
    dropped,
    interrupt,
    serve,
)

NODES = {"a": "low", "b": "low", "c": "low", "d": "high", "e": "high", "f": "high"}
"""Each node's task, in the order of the clients in process."""
CLASSES = {"low": [0, 1, 2, 3, 4], "high": [5, 6, 7, 8, 9]}
LOCAL = {"train": "head", "rounds": 3, "lr": 0.01, "batch_size": 20, "evaluate_every": 2, "start": "pretrained"}
MLP = LOCAL | {"head": "mlp", "hidden": 4}
NOT_COMPARED = (
    "seconds", "peak_rss_bytes", "loss", "calibration_error", "test_bytes_up", "test_bytes_down",
    "published_bytes", "published_compute", "published_formula",
)  # fmt: skip


@pytest.fixture(scope="module")
def silos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Digits at six clients, three with low and three with high ones: all in a file per task, and each in its own."""
    folder = tmp_path_factory.mktemp("silos")
    features, labels = load_digits(return_X_y=True)
    features, labels = features[:600].astype(np.float32), labels[:600]
    rng = np.random.default_rng(0)
    owners, split = rng.integers(0, 3, 600), np.where(rng.random(600) < 0.3, 2, 0)
    for task, classes in CLASSES.items():
        mine = np.isin(labels, classes)
        arrays = {"X": features[mine], "y": labels[mine], "split": split[mine]}
        np.savez(folder / f"{task}.npz", client=owners[mine], **arrays)
        for number, name in enumerate(name for name in NODES if NODES[name] == task):
            own = owners[mine] == number
            np.savez(folder / f"{name}.npz", **{key: values[own] for key, values in arrays.items()})
    return folder


def recipe_of(silos: Path, *stages: dict[str, Any]) -> Recipe:
    partition = {"kind": "natural", "test": "follow"}
    tasks = [
        {"name": task, "dataset": str(silos / f"{task}.npz"), "classes": classes, "partition": partition}
        for task, classes in CLASSES.items()
    ]
    return Recipe.parse({"tasks": tasks, "model": {"backbone": "features"}, "stages": list(stages)})


def grid_of(recipe: Recipe, silos: Path, state: Path, names: tuple[str, ...] = tuple(NODES)) -> Grid:
    grid = Grid(recipe, silos, state, names=names)
    grid.tasks = dict(NODES)
    return grid


def neighbour(path: Path) -> Path:
    """The same file of another node with the same task."""
    name = path.parts[-4]
    other = next(node for node in NODES if node != name and NODES[node] == NODES[name])
    (found,) = path.parents[3].glob(f"{other}/*/{path.parent.name}/{path.name}")
    return found


def accuracies(out: Path) -> list[str]:
    with (out / "clients.csv").open(newline="") as file:
        return [row["accuracy"] for row in csv.DictReader(file)]


def assert_same_figures(here: Result, there: Result) -> None:
    """Of every stage and task: accuracy, accuracy by client, and bytes; losses are added up in another order."""
    for ours, theirs in zip(here.summary["stages"], there.summary["stages"], strict=True):
        skipped = (*NOT_COMPARED, "tasks")
        assert {k: v for k, v in theirs.items() if k not in skipped} == {
            k: v for k, v in ours.items() if k not in skipped
        }
        for name in ("loss", "calibration_error"):
            assert theirs[name] == pytest.approx(ours[name], rel=1e-5)
        for task, figures in ours.get("tasks", {}).items():
            assert theirs["tasks"][task] == pytest.approx(figures, rel=1e-5)
    assert here.out is not None
    assert there.out is not None
    assert accuracies(there.out) == accuracies(here.out)


def test_tasks_on_nodes_give_the_models_and_figures_of_the_same_run_in_process(silos: Path, tmp_path: Path) -> None:
    stages = [
        {"method": "fedncm"},
        {**LOCAL, "method": "fedavg", "sampling": "tasks", "clients_per_round": 4, "start": 0},
        {**LOCAL, "method": "scaffold", "clients_per_round": 3},
        {**MLP, "method": "fedper"},
        {"method": "personalise", "update": "head", "epochs": 2, "lr": 0.01, "batch_size": 20},
        {**LOCAL, "method": "fedavg", "hide_task": True},
        {**LOCAL, "method": "fedmezo", "clients_per_round": 4, "num_directions": 2, "start": 0},
    ]
    recipe = recipe_of(silos, *stages)
    here = run(recipe, tmp_path / "here")
    there = serve(grid_of(recipe, silos, tmp_path / "state"), tmp_path / "there")
    assert_same_models(tmp_path / "here", tmp_path / "there", len(stages))
    assert_same_figures(here, there)
    assert [dropped(there, number) for number in range(len(stages))] == [[]] * len(stages)


@pytest.mark.parametrize("stage", [{"method": "fedavg", "hide_task": True}, {"method": "fedmezo"}])
def test_secure_sums_over_tasks_are_tested_task_by_task(stage: dict[str, Any], silos: Path, tmp_path: Path) -> None:
    recipe = recipe_of(silos, {**LOCAL, **stage, "secure": True})
    here = run(recipe, tmp_path / "here")
    there = serve(grid_of(recipe, silos, tmp_path / "state"), tmp_path / "there")
    assert_same_models(tmp_path / "here", tmp_path / "there", 1)
    (ours,), (theirs,) = here.summary["stages"], there.summary["stages"]
    assert theirs["accuracy"] == pytest.approx(ours["accuracy"])
    for task in CLASSES:
        assert theirs["tasks"][task]["accuracy"] == pytest.approx(ours["tasks"][task]["accuracy"])


@pytest.mark.parametrize("tasks", [False, True])
def test_models_of_the_clients_own_are_tested_where_they_are(silos: Path, tmp_path: Path, tasks: bool) -> None:
    """The accuracy of every client's own model is that in process, and the server has no byte of it."""
    stages = [
        {**MLP, "method": "fedbabu"},
        {"method": "personalise", "update": "head", "epochs": 2, "lr": 0.01, "batch_size": 20},
        {**MLP, "method": "fedrep", "head_epochs": 2},
        {**MLP, "method": "lg-fedavg"},
        {**MLP, "method": "ditto"},
        {**LOCAL, "method": "per-fedavg"},
        {**LOCAL, "method": "local-only"},
    ]
    recipe = recipe_of(silos, *stages)
    names = tuple(NODES)
    if not tasks:
        names = tuple(name for name, task in NODES.items() if task == "low")
        data = recipe.tasks[0].model_dump(exclude={"name"}, exclude_none=True, mode="json")
        recipe = Recipe.parse({"data": data, "model": {"backbone": "features"}, "stages": stages})
    here = run(recipe, tmp_path / "here")
    grid = grid_of(recipe, silos, tmp_path / "state", names)
    grid.tasks = grid.tasks if tasks else {}
    there = serve(grid, tmp_path / "there")
    assert_same_models(tmp_path / "here", tmp_path / "there", len(stages))
    assert_same_figures(here, there)
    server = b"\n".join(path.read_bytes() for path in (tmp_path / "there").rglob("*") if path.is_file())
    kept = sorted((tmp_path / "state").glob("*/*/clients-*/personal.bin"))
    assert len(kept) >= 5 * len(names)
    for path in kept:
        own, other = (np.frombuffer(place.read_bytes(), np.float32) for place in (path, neighbour(path)))
        changed = np.convolve(own != other, np.ones(4), "valid") == 4  # not what all clients start from
        secrets = [own[place : place + 4].tobytes() for place in np.flatnonzero(changed)]
        assert len(secrets) > 4, path
        assert not any(secret in server for secret in secrets), path


def test_nodes_of_tasks_in_any_order_are_asked_about_their_own(silos: Path, tmp_path: Path) -> None:
    """Closed forms do not depend on the order: the head of each task is that of its own clients."""
    recipe = recipe_of(silos, {"method": "fed3r"})
    run(recipe, tmp_path / "here")
    grid = grid_of(recipe, silos, tmp_path / "state", ("d", "a", "e", "b", "c", "f"))
    serve(grid, tmp_path / "there")
    ours, theirs = (load_file(tmp_path / name / "checkpoint" / "stage-0.safetensors") for name in ("here", "there"))
    assert ours.keys() == theirs.keys()
    for name in ours:
        np.testing.assert_allclose(theirs[name], ours[name], rtol=1e-4, atol=1e-6)


def test_a_node_without_a_task_or_with_another_stays_out_by_name(
    silos: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    recipe = recipe_of(silos, {"method": "fedncm"})
    for task, why in {
        "": "the recipe has several tasks (low, high): name the node's own",
        "hihg": "task 'hihg': did you mean 'high'? accepted: low, high",
    }.items():
        with pytest.raises(HeadstartError, match=re.escape(why)):
            Federation.silo(recipe, str(silos / "f.npz"), "f", task)
    data = {"dataset": "digits", "classes": [0, 1]}
    alone = Recipe.parse({"data": data, "model": {"backbone": "features"}, "stages": [{"method": "fedncm"}]})
    with pytest.raises(HeadstartError, match="the recipe has one task"):
        Federation.silo(alone, str(silos / "f.npz"), "f", "low")

    # A node that the server cannot trust to have looked.
    nodes = Nodes(grid := grid_of(recipe, silos, tmp_path / "state"), recipe, {n: i for i, n in enumerate(NODES)})
    nodes.available(len(NODES))
    nodes.node_info[5]["task"] = "hihg"
    nodes.agree({})
    assert nodes.refusals == {"f": "f: its task is 'hihg', and the recipe's are low, high"}
    assert [nodes.task_of(number) for number in range(6)] == [0, 0, 0, 1, 1, -1]
    assert grid.online[15] == "f"


def test_a_run_waits_for_a_node_of_every_task(silos: Path, tmp_path: Path) -> None:
    recipe = recipe_of(silos, {"method": "fedncm"})
    grid = grid_of(recipe, silos, tmp_path / "state")
    grid.online = {number: name for number, name in grid.online.items() if NODES[name] == "low"}
    with pytest.raises(HeadstartError, match="no node has the task 'high'"):
        serve(grid, tmp_path / "out", expected=3)
    assert not (tmp_path / "out").exists()
    hidden = recipe_of(silos, {**LOCAL, "method": "fedavg", "hide_task": True, "secure": True})
    grid = grid_of(hidden, silos, tmp_path / "other", ("a", "b", "c", "d", "e"))
    with pytest.raises(HeadstartError, match="the task 'high' has 2 of 3 nodes; its part of a sum would"):
        serve(grid, tmp_path / "out")


def test_an_interrupted_run_keeps_the_tasks_of_its_nodes(
    silos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a node that is absent when the run goes on, and of one that comes back with another task."""
    recipe = recipe_of(silos, {**LOCAL, "method": "fedavg", "evaluate_every": 1, "min_replies": 1})
    grid = grid_of(recipe, silos, tmp_path / "state")
    with pytest.raises(InterruptedRunError):
        serve(grid, tmp_path / "out", on_metrics=interrupt(2))
    del grid.online[14]  # e
    grid.tasks["f"] = "low"
    monkeypatch.setattr(grid, "data", lambda name: silos / f"{'a' if name == 'f' else name}.npz")
    result = serve(grid, tmp_path / "out", resume=True, expected=5)
    assert json.loads((tmp_path / "out" / "checkpoint" / "tasks.json").read_text()) == [0, 0, 0, 1, 1, 1]
    (stage,) = result.summary["stages"]
    assert "its task is 'low', and was 'high' when the run began" in (tmp_path / "out" / "rounds.csv").read_text()
    assert stage["absent"] == {"e": [2, 3], "f": [2, 3]}


def test_a_node_answers_for_its_own_task_only(silos: Path, tmp_path: Path) -> None:
    recipe = recipe_of(silos, {"method": "fedncm"})
    silo = Federation.silo(recipe, str(silos / "d.npz"), "d", "high")
    node = Node(recipe, silo, tmp_path / "node" / "run", deployed=True)
    tasks = (("low", 5, 3, 200), ("high", 5, 3, 200))
    for number, told, good in ((1, tasks, True), (0, tasks, False), (0, tasks[::-1], False), (7, tasks, False)):
        setup = StageSetup(0, number, told, (None, None)).to_message().to_bytes()
        asked = NodeRequest("s", 3, node.remember(setup), [(0, -1, {})], True, Wire(scalars={"round": 0}))
        if good:
            assert node.answer(asked).task == 1
        else:
            with pytest.raises(HeadstartError, match="the node's task is 'high', and the request is for another"):
                node.answer(asked)


def test_the_server_tests_every_task_on_data_of_its_own(silos: Path, tmp_path: Path) -> None:
    recipe = recipe_of(silos, {"method": "fedncm"})
    (tmp_path / "test").mkdir()
    for task in CLASSES:
        shutil.copy(silos / f"{task}.npz", tmp_path / "test")
    here = run(recipe, tmp_path / "here").summary["stages"][0]
    grid = grid_of(recipe, silos, tmp_path / "state")
    there = serve(grid, tmp_path / "there", test=str(tmp_path / "test")).summary["stages"][0]
    assert there["accuracy"] == here["accuracy"]
    assert {task: there["tasks"][task]["accuracy"] for task in CLASSES} == {
        task: here["tasks"][task]["accuracy"] for task in CLASSES
    }
    assert {kind for _, kind, _ in grid.said} == {"join", "answer"}
    (tmp_path / "test" / "high.npz").unlink()
    with pytest.raises(HeadstartError, match="called as the task; for 'high' it has 0"):
        serve(grid_of(recipe, silos, tmp_path / "again"), tmp_path / "third", test=str(tmp_path / "test"))
