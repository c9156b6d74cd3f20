"""Numbers and labels on nodes that hold their own data: the head of a simulation, and metrics from sums."""

import csv
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn.datasets import load_digits
from sklearn.metrics import average_precision_score, f1_score, mean_absolute_error, r2_score, roc_auc_score

pytest.importorskip("flwr")

from flwr.supercore.task_identity import TaskIdentity

from headstart.config.recipe import Recipe
from headstart.core.message import Message
from headstart.data import Federation
from headstart.engine.node import Node
from headstart.engine.node_stage import NodeRequest
from headstart.errors import HeadstartError
from headstart.runner import run
from tests.engine.test_node import FOUR, serve
from tests.engine.test_node_ledger import Grid

DIGITS, CLASS = load_digits(return_X_y=True)
X = DIGITS[:400].astype(np.float32)
TARGETS = {
    "regression": np.stack([X[:, 20] - 2 * X[:, 30] + 0.5, X[:, 40] * 0.1 + 100], axis=1),
    "multilabel": np.stack([CLASS % 2, CLASS > 4], axis=1)[:400].astype(np.int64),
}
WHO, SPLIT = np.arange(400) % 4, 2 * (np.arange(400) % 5 == 0)


@pytest.fixture(autouse=True)
def _identity(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_task_id", "_run_id", "_node_id"):
        monkeypatch.setattr(TaskIdentity, name, 1)


def recipe_of(folder: Path, kind: str, **stage: Any) -> Recipe:
    folder.mkdir()
    y = TARGETS[kind]
    np.savez(folder / "all.npz", X=X, y=y, client=WHO, split=SPLIT)
    for number, name in enumerate(FOUR):
        mine = WHO == number
        np.savez(folder / f"{name}.npz", X=X[mine], y=y[mine], split=SPLIT[mine])
    data = {"dataset": str(folder / "all.npz"), "classes": ["one", "two"], "target": kind}
    data["partition"] = {"kind": "natural"}  # type: ignore[assignment]
    stages = [{"method": "fed3r", "ridge": 0.5, **stage}]
    return Recipe.parse({"data": data, "model": {"backbone": "features"}, "stages": stages})


@pytest.mark.parametrize(("kind", "secure"), [("regression", False), ("regression", True), ("multilabel", True)])
def test_nodes_learn_what_a_simulation_learns(tmp_path: Path, kind: str, secure: bool) -> None:
    recipe = recipe_of(tmp_path / "silos", kind, secure=secure)
    result = serve(Grid(recipe, tmp_path / "silos", tmp_path / "state", names=FOUR), tmp_path / "out")
    here = run(recipe)
    np.testing.assert_allclose(result.head.weight, here.head.weight, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(result.head.bias, here.head.bias, rtol=1e-4)
    scores, expected, found = here.head.scores(X[SPLIT == 2]), TARGETS[kind][SPLIT == 2], result.summary
    if kind == "regression":
        assert found["r2"] == pytest.approx(r2_score(expected, scores), rel=1e-4)
        assert found["mae"] == pytest.approx(mean_absolute_error(expected, scores), rel=1e-4)
        assert found["accuracy"] is None
        with (tmp_path / "out" / "clients.csv").open(newline="") as file:
            told = [row["mae"] for row in csv.DictReader(file)]
        each = [(SPLIT == 2) & (WHO == client) for client in range(4)]
        alone = [mean_absolute_error(TARGETS[kind][mine], here.head.scores(X[mine])) for mine in each]
        if secure:  # a node's test is in nothing but a sum
            assert told == [""] * 4
        else:
            assert [float(value) for value in told] == pytest.approx(alone, rel=1e-2)
    else:
        assert found["macro_f1"] == pytest.approx(f1_score(expected, scores > 0, average="macro"), rel=1e-6)
        assert found["accuracy"] == pytest.approx(((scores > 0) == expected).all(axis=1).mean())
        # From how many scores are in each bin: ties in a bin cost at most half the pairs in it.
        assert found["roc_auc"] == pytest.approx(roc_auc_score(expected, scores), abs=5e-3)
        assert found["average_precision"] == pytest.approx(average_precision_score(expected, scores), abs=1e-2)
        assert found["roc_auc"] != here.summary["roc_auc"]  # no score has left a node
    assert found["stages"][0]["local_accuracy_mean"] is None


def test_sums_by_label_that_may_differ_by_one_example_do_not_leave_a_node(tmp_path: Path) -> None:
    """The attack: XᵀY of two labels that differ by one example differ by its features."""
    recipe = recipe_of(tmp_path / "silos", "multilabel")
    with pytest.raises(HeadstartError, match="sums of features by label can show single examples"):
        serve(Grid(recipe, tmp_path / "silos", tmp_path / "state", names=FOUR), tmp_path / "out")
    # A server that asks all the same, as it would for a recipe with secure sums.
    secure = recipe_of(tmp_path / "others", "multilabel", secure=True)
    grid = Grid(secure, tmp_path / "others", tmp_path / "there", names=FOUR)
    serve(grid, tmp_path / "served")
    folder = next(path for path in grid.folder("a").iterdir() if path.is_dir())
    federation = Federation.silo(recipe, str(tmp_path / "silos" / "a.npz"), "a")
    node = Node(recipe, federation, tmp_path / "alone" / "run", True)
    (setup,) = folder.glob("setup-*")
    asked = NodeRequest("s", 0, node.remember(setup.read_bytes()), [(0, -1, {})], True, Message(scalars={"round": 0}))
    with pytest.raises(HeadstartError, match="set secure = true or privacy in the stage"):
        node.answer(asked)


def test_a_recipe_for_nodes_says_what_is_learned(tmp_path: Path) -> None:
    recipe = recipe_of(tmp_path / "silos", "regression")
    assert recipe.data is not None
    silent = recipe.model_copy(update={"data": recipe.data.model_copy(update={"target": None})})
    with pytest.raises(HeadstartError, match=r"set data\.target = 'regression'"):
        Federation.silo(silent, str(tmp_path / "silos" / "a.npz"), "a")
