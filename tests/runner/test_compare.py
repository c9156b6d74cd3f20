"""Comparisons: tidy numbers, methods × settings, tests over seeds."""

import csv
import io
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import numpy as np
import pytest
from scipy.stats import ttest_rel

import headstart
from headstart.errors import HeadstartError, RecipeError
from headstart.records import Record
from headstart.records.record import grouped
from headstart.runner.compare import Comparison, _holm
from headstart.runner.sweep import Point, expand

DATA = {"dataset": "digits", "partition": {"kind": "dirichlet", "clients": 5, "alpha": [0.1, 100.0]}}
TABLE: dict[str, Any] = {"seed": [0, 1, 2], "data": DATA, "model": {"backbone": "features"}}
RECIPES = [
    {**TABLE, "name": "means", "stages": [{"method": "fedncm"}]},
    {**TABLE, "name": "covariance", "stages": [{"method": "fedcof", "shrinkage": 1.0}]},
]


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory, no_report: None) -> tuple[Comparison, Path]:
    out = tmp_path_factory.mktemp("all")
    return headstart.compare(RECIPES, out), out


def accuracies(found: Comparison, recipe: str, alpha: float) -> list[float]:
    pairs = zip(found.points, found.summaries, strict=True)
    return [s["accuracy"] for p, s in pairs if (p.values["recipe"], p.values["alpha"]) == (recipe, alpha)]


def test_the_table_is_numbers_and_no_two_columns_have_one_name(compared: tuple[Comparison, Path]) -> None:
    found, out = compared
    columns, *rows = list(csv.reader(io.StringIO((out / "compare.csv").read_text())))
    assert len(set(columns)) == len(columns)
    assert columns[:7] == ["recipe", "alpha", "stage", "method", "runs", "test_examples", "accuracy_mean"]
    assert len(rows) == 4
    for row in rows:
        line = dict(zip(columns, row, strict=True))
        values = accuracies(found, line["recipe"], float(line["alpha"]))
        assert float(line["accuracy_mean"]) == pytest.approx(mean(values), rel=1e-9)
        assert float(line["accuracy_std"]) == pytest.approx(stdev(values), rel=1e-9)
        assert (line["runs"], line["test_examples"]) == ("3", "359")
        for name in ("bytes_up", "bytes_down", "forward_passes", "seconds", "rounds"):
            float(line[name])
    table = found.to_frame()
    assert table["accuracy_mean"].dtype == float
    assert table["bytes_up"].tolist() == pytest.approx([float(row[columns.index("bytes_up")]) for row in rows])


def test_methods_that_are_listed_are_one_column(no_report: None) -> None:
    data = {"dataset": "digits", "partition": {"kind": "iid", "clients": 3}}
    table = {"seed": [0, 1], "data": data, "model": {"backbone": "features"}}
    found = headstart.compare({**table, "stages": [{"method": ["fedncm", "fedcof"]}]})
    assert found.to_frame().columns[:3].tolist() == ["stage", "method", "runs"]
    assert found.to_frame()["method"].tolist() == ["fedncm", "fedcof"]
    assert {(each["best"], each["other"]) for each in found.tests()} == {("fedcof", "fedncm")}
    stages = [{"method": "fedncm"}, {"method": "fedcof"}, {"method": "fedcof", "rank": 4}]
    recipes = [headstart.Recipe.parse({**table, "seed": 0, "stages": [stage]}) for stage in stages]
    records = [Record(Path(), recipe, [], None) for recipe in recipes]
    assert [group.label for group in grouped(records)] == [
        "fedncm", "fedcof, rank 0", "fedcof, rank 4",
    ]  # fmt: skip
    # Of several stages, which one a method is of has to be said.
    two = {**table, "seed": 0, "stages": [{"method": ["fedncm", "fedcof"]}, {"method": "fed3r"}]}
    frame = headstart.compare(two).to_frame()
    assert frame[["stages.0.method", "method"]].to_numpy().tolist() == [
        ["fedncm", "fedncm"], ["fedncm", "fed3r"], ["fedcof", "fedcof"], ["fedcof", "fed3r"],
    ]  # fmt: skip


def test_a_stage_that_runs_have_in_common_is_one_result(no_report: None) -> None:
    """What comes before the stage that differs is not tested against itself; numbers have it with every run."""
    data = {"dataset": "digits", "partition": {"kind": "iid", "clients": 3}}
    second = {"method": ["fedavg", "fedprox"], "train": "head", "rounds": 1, "lr": [0.1, 1.0]}
    table = {"seed": [0, 1], "data": data, "model": {"backbone": "features"}}
    started = {**table, "stages": [{"method": "fedncm"}, second]}
    found = headstart.compare(started)
    columns, rows = found.table()
    assert columns[:3] == ["stages.1.method", "lr", "method"]
    assert [row[:3] for row in rows] == [
        ["", "", "fedncm"], ["fedavg", "0.1", "fedavg"], ["fedavg", "1.0", "fedavg"], ["fedprox", "0.1", "fedprox"],
        ["fedprox", "1.0", "fedprox"],
    ]  # fmt: skip
    assert [row[columns.index("runs")] for row in rows] == ["2"] * 5
    assert [row[:3] for row in found.pivot()[1]] == [row[:3] for row in rows]
    assert len(found.tests()) == 4
    assert found.to_frame()["method"].tolist() == ["fedncm", "fedavg"] * 2 + ["fedncm", "fedprox"] * 2
    # Where a recipe ends with that stage, it is that recipe's.
    alone = {**table, "name": "alone", "stages": [{"method": "fedncm"}]}
    found = headstart.compare([{**started, "name": "more"}, alone])
    assert [row.values.get("recipe") for row in found.results] == ["alone", *["more"] * 4]
    # A stage of the same settings behind another one is another stage.
    first = {"method": ["fedncm", "fedcof"]}
    found = headstart.compare(
        {**table, "seed": 0, "stages": [first, {"method": "fedavg", "train": "head", "rounds": 1}]}
    )
    assert [row.method for row in found.results] == ["fedncm", "fedavg", "fedcof", "fedavg"]


def test_methods_meet_settings_and_the_best_is_bold(compared: tuple[Comparison, Path]) -> None:
    found, out = compared
    lines = [line.strip("| \n").split(" | ") for line in (out / "compare.md").read_text().splitlines()]
    assert lines[0] == ["recipe", "method", "accuracy, %, alpha 0.1", "accuracy, %, alpha 100.0", "bytes up"]
    assert lines[1] == ["---", "---", "---:", "---:", "---:"]
    for place, alpha in ((2, 0.1), (3, 100.0)):
        means = {name: mean(accuracies(found, name, alpha)) for name in ("means", "covariance")}
        for line in lines[2:]:
            assert line[place].startswith("**") == (means[line[0]] == max(means.values()))
            assert f"{100 * means[line[0]]:.2f} ±" in line[place]
    tex = (out / "compare.tex").read_text()
    assert r"\begin{tabular}{llrrr}" in tex
    assert tex.count(r"\textbf{") == 2


def test_differences_are_tested_over_the_seeds(compared: tuple[Comparison, Path]) -> None:
    found, out = compared
    tests = found.tests()
    assert len(tests) == 2
    for test in tests:
        one, other = (np.array(accuracies(found, name, test["alpha"])) for name in ("means", "covariance"))
        if test["best"].startswith("covariance"):
            one, other = other, one
        assert test["difference"] == pytest.approx((one - other).mean())
        assert test["p_value"] == pytest.approx(ttest_rel(one, other).pvalue)
        assert test["p_holm"] == test["p_value"]  # the only one of its setting
    assert (out / "compare-tests.csv").read_text().startswith("alpha,best,other,stage,seeds,difference,p_value,p_holm")


def test_p_values_of_several_tests_hold_together() -> None:
    # Holm, 1979: 3 · 0.01, then 2 · 0.03, then the largest so far, since 1 · 0.04 would be less.
    tests = [{"p_value": p} for p in (0.04, 0.01, None, 0.03)]
    assert [each["p_holm"] for each in _holm(tests)] == pytest.approx([0.06, 0.03, None, 0.06])


def test_a_setting_without_several_seeds_has_no_test() -> None:
    stage = {
        "method": "a",
        "accuracy": 0.5,
        "bytes_up": 1,
        "bytes_down": 1,
        "forward_passes": 1,
        "seconds": 1,
        "rounds": 1,
    }
    points = expand([{**each, "seed": 0} for each in RECIPES])
    found = Comparison(points, [{"stages": [stage]} for _ in points])
    assert found.tests() == []
    same = expand(RECIPES)
    constant = Comparison(same, [{"stages": [stage]} for _ in same])
    assert [test["p_holm"] for test in constant.tests()] == [None, None]
    # A perplexity is no better than an accuracy because it is larger, nor worse: they are not compared.
    silent = stage | {"accuracy": None, "perplexity": 7.0}
    mixed = [{"stages": [silent if point.values["recipe"] == "means" else stage]} for point in same]
    assert Comparison(same, mixed).tests() == []
    columns, rows, best = Comparison(same, mixed).pivot()
    assert {rows[row][columns.index("recipe")] for row, _ in best} == {"covariance"}


def test_problems_stand_behind_their_combination() -> None:
    with pytest.raises(RecipeError) as caught:
        expand([{**RECIPES[1], "seed": 0, "stages": [{"method": "fed3r", "ridge": [1.0, -1.0]}]}])
    (problem,) = caught.value.problems
    assert problem.startswith("with alpha = 0.1, ridge = -1.0 and 1 more: stages.0.ridge:")
    with pytest.raises(RecipeError) as caught:
        expand([{**RECIPES[1], "stages": [{"method": "fed4r"}]}])
    assert caught.value.problems[0].startswith("stages.0.method: 'fed4r'")


def test_the_recipes_of_a_comparison_share_a_schema(compared: tuple[Comparison, Path]) -> None:
    _, out = compared
    named = [
        path.parent / path.read_text().splitlines()[0].removeprefix("#:schema ") for path in out.glob("*/recipe.toml")
    ]
    assert len(named) == 12
    assert all(path.is_file() for path in named)
    assert len({path.resolve() for path in named}) == 2  # the first run's own, and that of all others


def test_series_are_called_by_what_differs_and_never_by_a_seed(compared: tuple[Comparison, Path]) -> None:
    _, out = compared
    groups = grouped([Record.read(path.parent) for path in sorted(out.glob("*/recipe.toml"))])
    assert [len(group.runs) for group in groups] == [3] * 4
    assert all("seed" not in group.label and "alpha" in group.label for group in groups)


def test_a_comparison_is_shown_as_a_table(compared: tuple[Comparison, Path]) -> None:
    found, out = compared
    assert repr(found) == "<Comparison of 12 runs: recipe, alpha>"
    assert found._repr_html_().count("<tr>") == 5
    assert {path.suffix for path in (out / "figures").iterdir()} == {".svg", ".png", ".pdf"}
    with pytest.raises(HeadstartError, match="settings are for recipes in files"):
        headstart.compare(RECIPES, settings=["seed=0"])


def test_data_in_memory_are_compared(no_report: None) -> None:
    rng = np.random.default_rng(0)
    y = np.arange(90) % 3
    data = {"X": rng.normal(size=(90, 4)) + np.eye(3, 4)[y] * 3, "y": y, "client": np.arange(90) % 5}
    table = {"seed": [0, 1], "model": {"backbone": "features"}, "stages": [{"method": "fedncm"}]}
    found = headstart.compare(table, data=data)
    assert found.to_frame()["runs"].tolist() == [2]
    assert isinstance(found.points[0], Point)
    assert found.summaries[0]["clients"] == 5


def test_values_are_chosen_on_the_validation_split_and_not_on_the_test(no_report: None) -> None:
    """Validation labels are the wrong ones: the rate that learns nothing is best there, and worst on the test."""
    rng = np.random.default_rng(0)
    y = rng.integers(0, 2, 300)
    x = np.column_stack([2.0 * y - 1, rng.normal(size=300)]).astype(np.float32)
    splits = np.repeat([0, 1, 2], 100)
    data = {"X": x, "y": np.where(splits == 1, 1 - y, y), "split": splits}
    trained = {"method": ["fedavg", "fedprox"], "train": "head", "rounds": 2, "lr": [1.0, 1e-9]}
    federation = {"partition": {"kind": "dirichlet", "clients": 3, "alpha": 10.0}}
    recipe = {"seed": [0, 1], "data": federation, "model": {"backbone": "features"}, "stages": [trained]}
    everything = headstart.compare(recipe, data=data)
    scores = {row.values["lr"]: mean(s["accuracy"] for s in row.stages.values()) for row in everything.rows}
    assert scores[1.0] > scores[1e-9] + 0.2
    found = headstart.compare(
        [recipe, {**recipe, "name": "ncm", "stages": [{"method": "fedncm"}]}], data=data, choose=["lr"]
    )
    assert [(row.method, row.values.get("lr"), len(row.stages)) for row in found.rows] == [
        ("fedavg", 1e-9, 2), ("fedprox", 1e-9, 2), ("fedncm", None, 2)
    ]  # fmt: skip
    assert found.pivot()[0][:3] == ["recipe", "stages.0.method", "method"]
    with pytest.raises(HeadstartError, match=r"values of momentum; they list stages\.0\.method, lr"):
        headstart.compare(recipe, data=data, choose=["momentum"])
    kept = {key: value[splits != 1] for key, value in data.items()}
    with pytest.raises(HeadstartError, match="has no accuracy on a validation split"):
        headstart.compare(recipe, data=kept, choose=["lr"])


def test_what_cannot_be_chosen_is_said_before_anything_is_run(tmp_path: Path) -> None:
    trained = {"method": "fedavg", "train": "head", "rounds": 1, "lr": [0.1, 0.01]}
    recipe = {
        "data": {"dataset": "digits"},
        "model": {"backbone": "features"},
        "stages": [{"method": "fedncm"}, trained],
    }
    for key in ("lr", "stages.1.lr"):  # as tables name it, or in full
        with pytest.raises(HeadstartError, match="have no validation split to choose by"):
            headstart.compare(recipe, tmp_path / "all", choose=[key])
    assert not list(tmp_path.glob("all/*/metrics.jsonl"))
