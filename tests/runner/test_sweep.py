"""Sweeps: every combination runs once, in the order written, and what is finished stays."""

import csv
import json
from pathlib import Path
from statistics import mean, stdev
from subprocess import CompletedProcess
from typing import Any

import pytest

from headstart.config.recipe import Recipe
from headstart.errors import HeadstartError, RecipeError
from headstart.runner import run
from headstart.runner.compare import Comparison
from headstart.runner.sweep import expand, sweep
from tests.command import Command

TABLE: dict[str, Any] = {
    "name": "digits",
    "seed": [0, 1, 2],
    "data": {"dataset": "digits", "partition": {"kind": "dirichlet", "clients": 5, "alpha": [0.1, 100.0]}},
    "model": {"backbone": "features"},
    "stages": [{"method": "fedncm"}, {"method": "fedcof", "shrinkage": 1.0}],
}


def test_lists_in_the_place_of_values_are_tried_out_in_order() -> None:
    points = expand([TABLE])
    assert [point.values for point in points] == [
        {"seed": seed, "alpha": alpha} for seed in (0, 1, 2) for alpha in (0.1, 100.0)
    ]
    one = points[3].recipe
    assert one.data is not None
    assert (one.seed, one.data.partition.alpha) == (1, 100.0)  # type: ignore[union-attr]
    assert points[3].folder == "seed=1,alpha=100.0"
    assert TABLE["seed"] == [0, 1, 2]  # what was given is left as it is


@pytest.mark.parametrize("nothing", ["unset", None])
def test_a_key_of_a_list_can_be_left_out(nothing: str | None) -> None:
    left, set_ = expand([TABLE | {"seed": 0, "stages": [{"method": "fedcof", "shrinkage": [nothing, 2.0]}],
                                  "data": {"dataset": "digits"}}])  # fmt: skip
    assert (left.values, left.folder) == ({"shrinkage": "unset"}, "shrinkage=unset")
    plain = TABLE | {"seed": 0, "stages": [{"method": "fedcof"}], "data": {"dataset": "digits"}}
    assert left.recipe == Recipe.parse(plain) != set_.recipe


def test_a_point_of_many_values_has_a_name_that_a_folder_can_have(tmp_path: Path) -> None:
    keys = {"lr": [0.1], "weight_decay": [1e-11], "momentum": [0.9], "batch_size": [8, 16]}
    stage = {"method": "fedavg", "train": "head", "rounds": [1], "local_epochs": [1]} | keys
    data = {"dataset": "digits", "train_examples": 40, "partition": {"kind": "iid", "clients": 2}}
    table = TABLE | {"seed": 0, "data": data, "stages": [stage] * 3}
    points = expand([table])
    folders = [point.folder for point in points]
    assert len(set(folders)) == 8
    assert {len(folder) for folder in folders} == {120}
    assert all(folder.startswith("stages.0.rounds=1,stages.0.local_epochs=1,stages.0.lr=0.1,") for folder in folders)
    assert folders[0].endswith("-eb52d6dbe2abef56")  # on every machine
    first = sweep(points[:1], tmp_path)
    assert sweep(points[:1], tmp_path) == first  # what is finished stays


def test_keys_that_end_alike_are_called_by_their_paths() -> None:
    stages = [
        {"method": "fedavg", "train": "head", "lr": [0.1, 0.2]},
        {"method": "fedprox", "train": "head", "lr": [1.0]},
    ]
    (first, _) = expand([TABLE | {"seed": 0, "data": {"dataset": "digits"}, "stages": stages}])
    assert first.values == {"stages.0.lr": 0.1, "stages.1.lr": 1.0}


def test_keys_whose_value_is_a_list_are_swept_by_lists_of_lists() -> None:
    data = {"dataset": "digits", "classes": [0, 1, 2]}
    assert len(expand([TABLE | {"seed": 0, "data": data}])) == 1
    points = expand([TABLE | {"seed": 0, "data": data | {"classes": [[0, 1], [2, 3, 4]]}}])
    assert [point.recipe.data.classes for point in points if point.recipe.data] == [(0, 1), (2, 3, 4)]


def test_every_mistake_of_every_combination_is_told_once() -> None:
    table = TABLE | {"stages": [{"method": "fedcof", "shrinkage": [1.0, -1.0, "much"]}]}
    with pytest.raises(RecipeError) as caught:
        expand([table])
    assert len(caught.value.problems) == 2
    with pytest.raises(RecipeError, match="an empty list sweeps over nothing"):
        expand([TABLE | {"seed": []}])
    with pytest.raises(HeadstartError, match="two runs would be the same"):
        expand([TABLE | {"seed": 0, "data": {"dataset": "digits"}}] * 2)
    with pytest.raises(RecipeError, match="seed: a list of seeds is a sweep; headstart compare"):
        Recipe.parse(TABLE)


def test_a_sweep_runs_each_once_and_goes_on_where_it_was_cut(tmp_path: Path) -> None:
    points = expand([TABLE])
    seen: list[str] = []

    def stop(point: Any, summary: dict[str, Any]) -> None:
        seen.append(point.folder)
        if len(seen) == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        sweep(points, tmp_path, stop)
    written = {path: path.stat().st_mtime_ns for path in tmp_path.glob("*/summary.json")}
    assert len(written) == 4
    summaries = sweep(points, tmp_path, lambda point, summary: seen.append(point.folder))
    assert len(summaries) == 6
    assert all(path.stat().st_mtime_ns == when for path, when in written.items())
    alone = run(points[5].recipe).summary
    assert summaries[5]["accuracy"] == alone["accuracy"]
    columns, rows = Comparison(points, summaries).table()
    assert columns[:3] == ["alpha", "method", "accuracy, %"]
    assert [row[:2] for row in rows] == [[a, m] for a in ("0.1", "100.0") for m in ("fedncm", "fedcof")]
    figures = [
        100 * s["stages"][1]["accuracy"] for p, s in zip(points, summaries, strict=True) if p.values["alpha"] == 0.1
    ]
    assert rows[1][2] == f"{mean(figures):.2f} ± {stdev(figures):.2f}"
    assert rows[1][columns.index("runs")] == "3"
    other = expand([TABLE | {"stages": [{"method": "fed3r"}]}])
    with pytest.raises(HeadstartError, match="is a run of another recipe"):
        sweep(other, tmp_path, lambda point, summary: None)


def test_the_command_compares_recipes_and_writes_tables(tmp_path: Path, command: Command) -> None:
    for name, method in (("one", "fedncm"), ("two", "fed3r")):
        (tmp_path / f"{name}.toml").write_text(
            f'name = "{name}"\n[data]\ndataset = "digits"\n[data.partition]\nkind = "iid"\nclients = 4\n'
            f'[model]\nbackbone = "features"\n[[stages]]\nmethod = "{method}"\n'
        )
    done = command("compare", "one.toml", "two.toml", "--set", "seed=[0, 1]", "--out", "all", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    with (tmp_path / "all" / "compare.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["recipe"], row["method"], row["runs"]) for row in rows] == [
        ("one", "fedncm", "2"),
        ("two", "fed3r", "2"),
    ]
    summary = json.loads((tmp_path / "all" / "recipe=one,seed=0" / "summary.json").read_text())
    assert f"recipe=one,seed=0: {100 * summary['accuracy']:.2f} %" in done.stdout
    # One page of all runs, and none of each: drawing it would take longer than the run.
    assert [path.parent.name for path in (tmp_path / "all").rglob("report.html")] == ["all"]
    assert (tmp_path / "all" / "compare.md").read_text().count("\n") == 4
    tex = (tmp_path / "all" / "compare.tex").read_text()
    assert r"accuracy, \%" in tex
    assert r"$\pm$" in tex


def test_another_comparison_does_not_write_over_the_tables_of_the_first(tmp_path: Path, command: Command) -> None:
    (tmp_path / "one.toml").write_text(
        'name = "one"\n[data]\ndataset = "digits"\n[data.partition]\nkind = "iid"\nclients = 4\n'
        '[model]\nbackbone = "features"\n[[stages]]\nmethod = "fedcof"\n'
    )

    def compare(*settings: str) -> CompletedProcess[str]:
        flags = [word for setting in settings for word in ("--set", setting)]
        return command("compare", "one.toml", "--out", "all", *flags, cwd=tmp_path)

    assert compare("seed=[0, 1]").returncode == 0
    files = {path: path.read_bytes() for path in (tmp_path / "all").rglob("*") if path.is_file()}
    for other in (["stages.0.shrinkage=[0.1, 1.0]"], ["seed=[0, 2]"]):
        done = compare(*other)
        assert done.returncode == 2, done.stdout
        assert "all holds the tables of another comparison, with the runs seed=" in done.stderr
        assert "give another --out" in done.stderr
        assert {path: path.read_bytes() for path in (tmp_path / "all").rglob("*") if path.is_file()} == files
    # The same again, and with more runs: the tables lose nothing.
    assert compare("seed=[0, 1]").returncode == 0
    assert compare("seed=[0, 1, 2]").returncode == 0
    with (tmp_path / "all" / "compare.csv").open(newline="") as file:
        assert [row["runs"] for row in csv.DictReader(file)] == ["3"]
