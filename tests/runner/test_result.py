"""Results in Python: short to look at, tables in notebooks, and the same from the run's directory."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import headstart
from headstart.errors import HeadstartError

TABLE: dict[str, Any] = {
    "name": "digits",
    "data": {"dataset": "digits", "partition": {"kind": "iid", "clients": 4}},
    "model": {"backbone": "features"},
    "stages": [{"method": "fedncm"}, {"method": "fedavg", "train": "head", "rounds": 2, "lr": 0.01}],
}


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory, no_report: None) -> headstart.Result:
    return headstart.run(TABLE, tmp_path_factory.mktemp("runs") / "run")


def test_a_recipe_is_itself_a_table_or_a_path(tmp_path: Path, result: headstart.Result) -> None:
    recipe = headstart.Recipe.parse(TABLE)
    (tmp_path / "recipe.toml").write_text(recipe.to_toml())
    for given in (recipe, tmp_path / "recipe.toml", str(tmp_path / "recipe.toml")):
        assert headstart.run(given).head.weight.tobytes() == result.head.weight.tobytes()


def test_a_result_is_short_to_look_at(result: headstart.Result) -> None:
    shown = repr(result)
    assert len(shown) < 200
    assert f"fedavg {100 * result.summary['accuracy']:.2f} %, 4 clients" in shown
    html = result._repr_html_()
    assert html.count("<tr>") == 3  # a heading and two stages
    assert "fedncm" in html
    for name in ("macro_f1", "balanced_accuracy"):
        assert all(f"{100 * stage[name]:.2f} %" in html for stage in result.summary["stages"])


def test_every_evaluation_is_a_row(result: headstart.Result) -> None:
    assert result.out is not None
    lines = [json.loads(line) for line in (result.out / "metrics.jsonl").read_text().splitlines()]
    table = result.to_frame()
    assert table[["method", "round"]].to_numpy().tolist() == [["fedncm", 1], ["fedavg", 1], ["fedavg", 2]]
    assert table["accuracy"].tolist() == [line["accuracy"] for line in lines]
    assert result.metrics == lines


def test_a_result_comes_back_from_its_directory(result: headstart.Result) -> None:
    assert result.out is not None
    again = headstart.Result.load(str(result.out))
    assert again.summary == result.summary
    assert (again.metrics, again.accuracy, again.recipe) == (result.metrics, result.accuracy, result.recipe)
    np.testing.assert_array_equal(again.head.weight, result.head.weight)
    np.testing.assert_array_equal(again.federation.owners, result.federation.owners)


def test_a_run_that_is_not_finished_has_no_result(tmp_path: Path) -> None:
    def stop(line: dict[str, Any]) -> None:
        if line["stage"] == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        headstart.run(TABLE, tmp_path / "run", on_metrics=stop)
    with pytest.raises(HeadstartError, match="is not finished; continue it with headstart run --resume --out"):
        headstart.Result.load(tmp_path / "run")
    resumed = headstart.run(TABLE, tmp_path / "run", True)
    assert [(line["stage"], line["round"]) for line in resumed.metrics] == [(0, 1), (1, 1), (1, 2)]
    with pytest.raises(HeadstartError, match=r"holds no run: there is no recipe\.toml; each of these in it does: run$"):
        headstart.Result.load(tmp_path)
    with pytest.raises(HeadstartError, match=r"holds no run: there is no recipe\.toml; did you mean '.*run'"):
        headstart.Model.load(tmp_path / "runs")


def test_a_summary_tells_when(result: headstart.Result) -> None:
    from datetime import datetime

    began, ended = (datetime.fromisoformat(result.summary[name]) for name in ("started", "ended"))
    assert began <= ended
    assert abs((ended - began).total_seconds() - result.summary["total_seconds"]) <= 1
    assert result.summary["total_seconds"] >= result.summary["seconds"]


def test_a_finished_run_that_is_resumed_keeps_its_times(tmp_path: Path) -> None:
    first, again = (headstart.run(TABLE, tmp_path / "run", resume).summary for resume in (False, True))
    assert all(first[name] == again[name] for name in ("started", "ended", "total_seconds"))


def test_the_log_of_a_run_has_every_evaluation(result: headstart.Result) -> None:
    assert result.out is not None
    lines = (result.out / "run.log").read_text().splitlines()
    assert "INFO started digits, seed 0, with headstart" in lines[0]
    assert sum("INFO stage 1, fedavg, round" in line for line in lines) == 2
    assert f"finished: {100 * result.summary['accuracy']:.2f} %" in lines[-1]
