"""Nodes that hold prompts and completions of their own: the model and the perplexity of a run in process."""

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("flwr")

from flwr.supercore.task_identity import TaskIdentity

from headstart.backbones import Prefix
from headstart.config.recipe import Recipe
from headstart.core.files import write_text
from headstart.engine import local
from headstart.engine.node_stages import NodeStages
from headstart.runner import run
from tests.backbones.test_language import folder_of
from tests.engine.test_node import Grid, assert_same_models, model_of, serve
from tests.runner.test_choose import lines
from tests.runner.test_generate import PAIRS

NAMES = ("a", "b", "c")


@pytest.fixture(autouse=True)
def task(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_task_id", "_run_id", "_node_id"):
        monkeypatch.setattr(TaskIdentity, name, 1)


class Folders(Grid):
    """Every node has a folder with training and test examples."""

    def data(self, name: str) -> Path:
        return self.silos / name


def write_pairs(folder: Path, name: str, rows: list[dict[str, str]]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / f"{name}.jsonl", "\n".join(map(json.dumps, rows)))


@pytest.mark.parametrize("secure", [False, True])
@pytest.mark.parametrize(
    "stage",
    [
        {"method": "fedavg", "train": "lora", "rank": 2, "lr": 0.3, "batch_size": 4},
        {"method": "fedmezo", "train": "norms", "lr": 0.01, "batch_size": 3},
    ],
    ids=["fedavg", "fedmezo"],
)
def test_nodes_learn_to_complete_as_clients_in_process_do(stage: dict[str, Any], secure: bool, tmp_path: Path) -> None:
    folder_of(tmp_path / "model")
    for split, count in (("train", 24), ("test", 9)):
        pairs = [{"prompt": p, "completion": c} for p, c in (PAIRS * 5)[:count]]
        mine = {name: pairs[place::3] for place, name in enumerate(NAMES)}
        for name, rows in mine.items():
            write_pairs(tmp_path / "silos" / name, split, rows)
        write_pairs(tmp_path / "all", split, [row | {"who": name} for name, rows in mine.items() for row in rows])
    here = {"client_column": "who", "partition": {"kind": "natural", "test": "follow"}}
    table = {
        "data": {"dataset": str(tmp_path / "all"), **here},
        "model": {"backbone": str(tmp_path / "model"), "task": "generate", "samples": 0},
        "stages": [stage | {"rounds": 2, "secure": secure, "weighting": "uniform"}],
    }
    run(Recipe.parse(table), tmp_path / "here")
    there = Recipe.parse(table | {"data": {"dataset": "x"}})
    serve(Folders(there, tmp_path / "silos", tmp_path / "state", None, NAMES), tmp_path / "there")
    assert_same_models(tmp_path / "here", tmp_path / "there", 1)
    ours, theirs = lines(tmp_path / "here"), lines(tmp_path / "there")
    assert [line["round"] for line in theirs] == [1, 2]  # nodes are asked after rounds
    for one, other in zip(ours[1:], theirs, strict=True):
        assert other["perplexity"] == pytest.approx(one["perplexity"], rel=1e-5)
        assert other["accuracy"] is None
    if not secure:  # a sum does not tell whose test went how
        both = []
        for name in ("here", "there"):
            with (tmp_path / name / "clients.csv").open() as file:
                both.append([float(row["perplexity"]) for row in csv.DictReader(file)])
        assert both[0] == pytest.approx(both[1], rel=1e-4)


def test_frozen_blocks_read_an_example_once_in_all_processes_of_a_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three rounds and their tests, each of a process that has just started: one pass for each of 24 + 9 examples."""
    folder_of(tmp_path / "model")
    for split, count in (("train", 24), ("test", 9)):
        pairs = [{"prompt": p, "completion": f"{c} {' on' * (n // 5)}"} for n, (p, c) in enumerate((PAIRS * 5)[:count])]
        for place, name in enumerate(NAMES):
            write_pairs(tmp_path / "silos" / name, split, pairs[place::3])
    lora = {"method": "fedavg", "train": "lora", "rank": 2, "blocks": 1, "lr": 0.3, "batch_size": 4, "rounds": 3}
    table = {
        "data": {"dataset": "x"},
        "model": {"backbone": str(tmp_path / "model"), "task": "generate", "samples": 0},
        "stages": [lora, {"method": "fedavg", "train": "all", "start": "pretrained", "rounds": 1, "lr": 0.1}],
    }
    passed: list[int] = []
    states = Prefix.states
    monkeypatch.setattr(Prefix, "states", lambda *given: passed.append(1) or states(*given))
    kept = []

    def look(line: dict[str, Any]) -> None:
        kept.append(len(list((tmp_path / "state").glob("*/*/states-*/*.bin"))))

    grid = Folders(Recipe.parse(table), tmp_path / "silos", tmp_path / "state", None, NAMES)
    serve(grid, tmp_path / "kept", on_metrics=look)
    assert len(passed) == 24 + 9
    assert kept == [6, 6, 6, 0]  # of three nodes, training and test examples; nothing of a stage that is over
    monkeypatch.setattr(NodeStages, "_prefix_states", lambda *given: None)
    grid = Folders(Recipe.parse(table), tmp_path / "silos", tmp_path / "anew", None, NAMES)
    serve(grid, tmp_path / "again")
    assert len(passed) == 24 + 9 + 3 * (24 + 9)
    assert_same_models(tmp_path / "kept", tmp_path / "again", 2)


MEMBERS = {"a": "on", "b": "on", "c": "back", "d": "back"}
CHOICES = {"on": ("film : {text} :", ["good", "bad"]), "back": ("the {text} very", ["good", "very bad", "very very"])}


@pytest.mark.parametrize("secure", [False, True])
@pytest.mark.parametrize("kind", ["choose", "generate"])
@pytest.mark.parametrize("method", ["fedyolo", "fedmezo"])
def test_nodes_of_two_tasks_train_modules_as_clients_in_process_do(
    method: str, kind: str, secure: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder_of(tmp_path / "model")
    members = MEMBERS | ({"e": "on", "f": "back"} if secure else {})
    for split, count in (("train", 24), ("test", 9)):
        for task in CHOICES:
            pairs = (PAIRS if task == "on" else [(b, a or "the") for a, b in PAIRS]) * 5
            rows = [{"prompt": p, "completion": c} for p, c in pairs[:count]]
            if kind == "choose":
                classes = len(CHOICES[task][1])
                rows = [{"text": p or "the", "label": n % classes} for n, (p, _) in enumerate(pairs[:count])]
            names = [name for name, its in members.items() if its == task]
            mine = {name: rows[place :: len(names)] for place, name in enumerate(names)}
            for name, own in mine.items():
                write_pairs(tmp_path / "silos" / name, split, own)
            write_pairs(tmp_path / task, split, [row | {"who": name} for name, own in mine.items() for row in own])
    here, there = [], []
    for task, (prompt, words) in CHOICES.items():
        more = {"prompt": prompt, "label_words": words, "classes": [*range(len(words))]} if kind == "choose" else {}
        data = {"client_column": "who", "partition": {"kind": "natural", "test": "follow"}}
        here.append({"name": task, "dataset": str(tmp_path / task), **data, **more})
        there.append({"name": task, "dataset": "x", **more})
    stage = {"method": method, "train": "lora", "rank": 2, "batch_size": 4, "rounds": 2, "secure": secure}
    stage |= {"lr": 0.1} if method == "fedyolo" else {"lr": 0.01, "epsilon": 0.1}
    table = {
        "model": {"backbone": str(tmp_path / "model"), "task": kind, "samples": 0},
        "stages": [stage | ({"hide_task": True} if secure and method == "fedyolo" else {})],
    }
    run(Recipe.parse(table | {"tasks": here}), tmp_path / "together")
    monkeypatch.setattr(local, "_COHORT_EXAMPLES", 1)
    run(Recipe.parse(table | {"tasks": here}), tmp_path / "here")
    names = tuple(sorted(members, key=lambda name: (members[name] != "on", name)))
    grid = Folders(Recipe.parse(table | {"tasks": there}), tmp_path / "silos", tmp_path / "state", None, names)
    grid.tasks = members
    serve(grid, tmp_path / "there")
    assert_same_models(tmp_path / "here", tmp_path / "there", 1)
    if method == "fedyolo":
        assert_same_models(tmp_path / "together", tmp_path / "there", 1)
    else:  # texts of several clients are in one batch, and their losses are rounded with others
        ours, theirs = (model_of(tmp_path / place, 0) for place in ("together", "there"))
        for name in ours:
            np.testing.assert_allclose(theirs[name], ours[name], atol=1e-5, err_msg=name)
    what = "perplexity" if kind == "generate" else "accuracy"
    for one, other in zip(lines(tmp_path / "here")[1:], lines(tmp_path / "there"), strict=True):
        assert other[what] == pytest.approx(one[what], rel=1e-5)
        for task in CHOICES:
            assert other["tasks"][task]["loss"] == pytest.approx(one["tasks"][task]["loss"], rel=1e-5)
