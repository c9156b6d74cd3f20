"""The first sentence of a page, and what tells series apart."""

import csv
import json
import re
import warnings
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from matplotlib.figure import Figure
from scipy.stats import binomtest

import headstart
from headstart.core.metrics import wilson_interval
from headstart.records import Record
from headstart.records.record import Curve, curves, grouped
from headstart.report import report_body
from headstart.report.figures import curve_figure, hover_texts, looks, partition_figure, svg
from headstart.report.panels import all_clients_figure, score_figure

TABLE: dict[str, Any] = {
    "name": "digits",
    "data": {"dataset": "digits", "partition": {"kind": "iid", "clients": 4}},
    "model": {"backbone": "features"},
}


@pytest.mark.parametrize(("right", "count"), [(0, 7), (7, 7), (330, 359), (1, 1000)])
def test_the_interval_is_wilsons(right: int, count: int) -> None:
    expected = binomtest(right, count).proportion_ci(method="wilson")
    assert wilson_interval(right / count, count) == pytest.approx((expected.low, expected.high), abs=1e-5)


def test_a_page_opens_with_one_number_of_how_many_against_what_for_how_many_bytes(tmp_path: Path) -> None:
    headstart.run({**TABLE, "stages": [{"method": "fedcof"}]}, tmp_path / "run")
    page = (tmp_path / "run" / "report.html").read_text()
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    with (tmp_path / "run" / "confusion.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    tested: dict[str, int] = {}
    for row in rows:
        tested[row["class"]] = tested.get(row["class"], 0) + int(row["examples"])
    total, usual = sum(tested.values()), max(tested, key=lambda name: tested[name])
    lead = re.search(r'<p class="lead">(.*?)</p>', page)
    assert lead is not None
    text = re.sub("<.*?>", "", lead[1])
    assert text.startswith(f"{100 * summary['accuracy']:.2f} % of {total} test examples (95 % confidence interval ")
    assert f"always predicting '{usual}' gives {100 * tested[usual] / total:.1f} %" in text
    assert text.endswith(f"by fedcof; the 4 clients sent {summary['bytes_up'] / 1000:.1f} kB.")
    assert page.index('class="lead"') < page.index("<table")
    assert "Sensitivity and precision" in page
    # One accuracy at one cost is no curve; of the recipe, what was changed stands before the defaults.
    assert "accuracy against" not in page
    assert page.index("clients = 4") < page.index("with every default") < page.index("evaluate_every = 1")


def test_several_runs_open_with_the_best(tmp_path: Path) -> None:
    for method in ("fedncm", "fed3r"):
        headstart.run({**TABLE, "name": method, "stages": [{"method": method}]}, tmp_path / method)
    records = [Record.read(tmp_path / method) for method in ("fedncm", "fed3r")]
    scores = {record.recipe.name: (record.summary or {})["accuracy"] for record in records}
    best, other = sorted(scores, key=lambda name: -scores[name])
    body = report_body(records)
    assert f"<b>{100 * scores[best]:.2f} %</b> of 359 test examples: {best}, one run" in body
    assert f"next is {other} with {100 * scores[other]:.2f} %" in body
    assert "What the recipes differ in" in body
    assert "stages.0.method" in body
    assert re.findall("<h3>(.*?)</h3><pre>", body) == ["fedncm", "fed3r"]  # whose recipe it is


def test_a_method_has_its_colour_wherever_it_is_and_twelve_series_differ() -> None:
    first, second = looks(["fedavg", "fedcof"]), looks(["fedcof", "scaffold", "fedavg"])
    assert (first[0].colour, first[1].colour) == (second[2].colour, second[0].colour)
    methods = ["fedncm", "fed3r", "fedcof", "fedavg", "fedprox", "fedavgm", "fedadam", "fedyogi", "fedadagrad",
               "feddyn", "scaffold", "a-method-of-ones-own"]  # fmt: skip
    assert len({*looks(methods)}) == 12
    assert len({*looks(["fedavg"] * 12)}) == 12
    assert len({look.colour for look in looks(["fedavg"] * 5)}) == 1


def _boxes(figure: Figure) -> tuple[Any, Any]:
    figure.draw_without_rendering()
    legend = figure.legends[0].get_window_extent()
    return legend, figure.axes[0].get_window_extent()


def test_training_after_different_heads_has_different_colours(tmp_path: Path) -> None:
    data = {"X": np.eye(8), "y": np.arange(8) % 2, "client": np.arange(8) // 4}
    train = {"method": "fedavg", "train": "head", "rounds": 2, "lr": 0.1}
    for name, stages in {"a": [{"method": "fedcof"}, train], "b": [{"method": "fedncm"}, train], "c": [train]}.items():
        recipe = {"name": name, "data": {"test_fraction": 0.5}, "model": {"backbone": "features"}, "stages": stages}
        headstart.run(recipe, tmp_path / name, data=data)
    groups = grouped([Record.read(tmp_path / name) for name in "abc"])
    assert [group.method for group in groups] == ["fedcof → fedavg", "fedncm → fedavg", "fedavg"]
    assert [curve.method for curve in curves(groups)] == [group.method for group in groups]
    assert len({look.colour for look in looks([group.method for group in groups])}) == 3


def test_the_legend_covers_no_data() -> None:
    costs = {name: np.array([1.0, 2.0, 3.0]) for name in ("round", "bytes", "forward_passes")}
    accuracy = np.array([0.1, 0.5, 0.9])
    drawn = [Curve(f"series {n}", costs, accuracy, 0 * accuracy, method="fedavg") for n in range(12)]
    legend, axes = _boxes(curve_figure(drawn, "round"))
    assert legend.y1 <= axes.y0
    assert legend.y0 >= 0
    assert axes.height > 200


def test_points_say_what_they_are_under_the_pointer() -> None:
    costs = {name: np.array([1.0, 20.0, 3000.0]) for name in ("round", "bytes", "forward_passes")}
    drawn = [Curve(label, costs, np.array([0.1, 0.5, 0.9]), np.zeros(3), method="fedavg") for label in ("a & b", "c")]
    text = svg(curve_figure(drawn, "bytes", legend=False), "curves", hover_texts(drawn, "bytes"))
    said = re.findall(r"<use [^>]*><title>(.*?)</title></use>", text)
    assert said[2] == "a &amp; b: 90.00 % at 3,000 bytes sent by all clients"
    assert said[3] == "c: 10.00 % at 1 bytes sent by all clients"
    assert len(said) == 6
    ElementTree.fromstring(text)


def test_clients_are_named_and_counted_in_the_heat_map() -> None:
    figure = partition_figure(np.array([[3, 0], [1, 41]]), ("cat", "dog"), ("north", "south"))
    axes = figure.axes[0]
    assert [label.get_text() for label in axes.get_xticklabels()] == ["north", "south"]
    assert sorted(text.get_text() for text in axes.texts) == ["1", "3", "41"]


def test_many_series_are_in_panels_that_say_what_they_show() -> None:
    costs = {name: np.arange(1.0, 5.0) for name in ("round", "bytes", "forward_passes")}
    accuracy = np.linspace(0.2, 0.8, 4)
    methods = ["fedavg", "fedprox", "fedadam", "scaffold", "feddyn"]
    drawn = [
        Curve(f"{method}, alpha {alpha}", costs, accuracy, accuracy / 10, method=method)
        for alpha in (0.1, 1.0)
        for method in methods
    ]
    figure = score_figure(drawn, "round", 2)
    figure.canvas.draw()
    panels = [axes for axes in figure.axes if axes.get_legend() is not None]
    said = [[text.get_text() for text in axes.get_legend().get_texts()] for axes in panels]
    assert said == [[f"{method}, alpha 0.1", f"{method}, alpha 1.0"] for method in methods]
    for axes, method in zip(panels, methods, strict=True):
        mine = [line for line in axes.lines if line.get_gid()]
        assert {line.get_color() for line in mine} == {looks([method])[0].colour}  # as in every other picture
        assert len({line.get_linestyle() for line in mine}) == 2
        assert axes.get_legend().get_window_extent().y0 >= axes.get_window_extent().y1 - 1  # above the data
    text = svg(figure, "curves", hover_texts(drawn, "round"))
    assert len(re.findall(r"<title>.*?</title></use>", text)) == 4 * len(drawn)
    # A dozen values of one key are of one method: a few of them in each panel.
    several = [Curve(f"lr {n}", costs, accuracy, 0 * accuracy, method="fedavg") for n in range(12)]
    panels = [axes for axes in score_figure(several, "round").figure.axes if axes.get_legend() is not None]
    assert [len(axes.get_legend().get_texts()) for axes in panels] == [4, 4, 4]


def test_clients_of_many_runs_are_boxes_under_the_names_of_the_runs() -> None:
    accuracies = {f"fedavg, lr {n}": [0.1 * n, 0.5, 0.9] for n in range(9)}
    axes = all_clients_figure(accuracies, ["fedavg"] * 9).axes[0]
    assert [label.get_text() for label in axes.get_yticklabels()] == list(accuracies)
    assert len(axes.patches) == 9


@pytest.mark.parametrize("count", [10, 60])
def test_boxes_have_room_beside_long_names(count: int) -> None:
    accuracies = {f"lr {n}, {'W' * 60}": [0.1, 0.5, 0.9] for n in range(count)}
    figure = all_clients_figure(accuracies, ["fedavg"] * count)
    with warnings.catch_warnings(action="error"):  # of axes that collapsed
        figure.canvas.draw()
    assert figure.axes[0].get_window_extent().width / figure.dpi > 2.5


def test_names_say_what_differs_and_no_defaults_of_a_method(tmp_path: Path) -> None:
    train = {"train": "head", "rounds": 1, "lr": 0.01}
    tables: list[dict[str, Any]] = [
        {**TABLE, "data": {**TABLE["data"], "partition": {"kind": "iid", "clients": clients}}, "stages": [stage]}
        for clients in (4, 5)
        for stage in ({**train, "method": "fedadam"}, {**train, "method": "fedavgm"})
    ]
    records = [Record(tmp_path, headstart.Recipe.parse(table), [], None) for table in tables]
    assert [group.label for group in grouped(records)] == [
        "fedadam, clients 4", "fedavgm, clients 4", "fedadam, clients 5", "fedavgm, clients 5",
    ]  # fmt: skip


def test_classes_without_test_examples_are_named_on_the_page(tmp_path: Path) -> None:
    split = np.repeat([0, 0, 2], 10)
    labels = np.arange(30) % 3
    X = np.random.default_rng(0).normal(size=(30, 4))
    kept = (split == 0) | (labels < 2)
    recipe = {"model": {"backbone": "features"}, "stages": [{"method": "fedncm"}]}
    data = {"X": X[kept], "y": labels[kept], "split": split[kept], "client": np.arange(30)[kept] % 2}
    headstart.run(recipe, tmp_path / "run", data=data)
    assert "No test examples: 2; accuracy says nothing" in (tmp_path / "run" / "report.html").read_text()
