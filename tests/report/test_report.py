"""What a page says of runs is what their files say; it needs nothing from elsewhere."""

import csv
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from sklearn.metrics import confusion_matrix

from headstart.config.recipe import Recipe
from headstart.data import Federation
from headstart.errors import HeadstartError
from headstart.records import Record, find
from headstart.records.record import curves, grouped
from headstart.report import report_body, write_folder
from headstart.report.page import html_table
from headstart.report.tables import human_bytes, partition_table, summary_table
from headstart.runner import run

STAGE = {
    "method": "fedcof",
    "accuracy": 0.9431,
    "rounds": 1,
    "bytes_up": 329_900_000,
    "bytes_down": 2_800,
    "published_bytes": 328_600_000,
    "forward_passes": 1_234_567,
    "seconds": 12.345,
    "chosen": {"shrinkage": 0.01779},
}
PROBE = {"method": "fedavg", "train": "head", "rounds": 4, "lr": 0.1, "clients_per_round": 5}


def recipe_of(*stages: dict[str, Any], name: str = "digits", seed: int = 0, alpha: float = 0.5) -> Recipe:
    shares = {"kind": "dirichlet", "clients": 20, "alpha": alpha, "test": "follow"}
    data = {"dataset": "digits", "partition": shares}
    return Recipe.parse(
        {"name": name, "seed": seed, "data": data, "model": {"backbone": "features"}, "stages": list(stages)}
    )


def printed(table: object, width: int) -> str:
    console = Console(width=width, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(table)
    return console.export_text()


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (974_464, "974.5 kB"), (5e9, "5.0 GB"), (7e12, "7.0 TB")],
)
def test_bytes_in_the_units_of_the_papers(count: float, text: str) -> None:
    assert human_bytes(count) == text


def test_the_summary_fits_a_terminal_of_eighty_columns() -> None:
    text = printed(summary_table({"name": "demo", "clients": 50, "examples": 4000, "stages": [STAGE]}), 80)
    assert "…" not in text
    for cell in ("fedcof γ 0.0178", "94.31 %", "329.9 MB", "2.8 kB", "328.6 MB", "1,234,567", "12.35"):
        assert cell in text, text


def test_the_partition_table_says_what_it_leaves_out() -> None:
    counts = np.ones((25, 30), np.int64)
    counts[0, 0] = 0
    text = printed(partition_table(tuple(f"c{k}" for k in range(25)), tuple(f"k{c}" for c in range(30)), counts), 300)
    assert "25 clients, 30 classes, 749 training examples" in text
    assert "… 5 more" in text
    assert "10 more" in text
    first = next(line for line in text.splitlines() if " c0 " in line)
    assert "·" in first
    assert first.split("│")[-3:-1] == ["      29 ", "       29 "]


def test_the_partition_table_of_completions_has_no_classes() -> None:
    text = printed(partition_table(("a", "b"), ("text",), np.array([[3], [4]])), 80)
    assert "2 clients, 7 training examples" in " ".join(text.split())
    assert "class" not in text
    assert [line.split("│")[1:-1] for line in text.splitlines() if " b " in line] == [[" b      ", "        4 "]]


def test_who_holds_what_and_what_was_taken_for_what(tmp_path: Path) -> None:
    recipe = recipe_of({"method": "fedncm"}, {"method": "fedcof"})
    head = run(recipe, tmp_path / "run").head
    federation = Federation.of(recipe)
    record = Record.read(tmp_path / "run")

    held, train = record.holdings(), federation.dataset.train
    assert held is not None
    for client, name in enumerate(held.rows):
        mine = [int((train.labels[federation.owners == client] == int(label)).sum()) for label in held.columns]
        assert (name, held.counts[client].tolist()) == (federation.names[client], mine)

    confusion, test = record.confusion(), federation.dataset.test
    assert confusion is not None
    assert confusion.rows == tuple("0123456789")
    answers = head.scores(test.features()).argmax(axis=1)
    np.testing.assert_array_equal(confusion.counts, confusion_matrix(test.labels, answers))
    assert np.trace(confusion.counts) / confusion.counts.sum() == pytest.approx(record.metrics[-1]["accuracy"])

    found = record.client_metrics()
    for client, name in enumerate(federation.names):
        mine = federation.test_owners == client  # type: ignore[assignment]
        right = answers[mine] == test.labels[mine]
        assert found[name]["accuracy"] == pytest.approx(right.mean(), abs=1e-6)


def test_costs_are_those_of_the_stages_that_a_stage_builds_on(tmp_path: Path) -> None:
    alone = PROBE | {"head_init": "random"}
    run(recipe_of({"method": "fed3r"}, {"method": "fedcof"}, PROBE, alone, PROBE | {"start": 0}), tmp_path / "run")
    record = Record.read(tmp_path / "run")
    assert [record.builds_on(stage) for stage in range(5)] == [None, None, 1, None, 0]
    spent = [stage["bytes_up"] for stage in record.stages]
    ends = {curve.label: curve for curve in curves(grouped([record]))}
    assert set(ends) == {"fedcof → fedavg", "fedavg", "fed3r → fedavg"}
    assert ends["fedcof → fedavg"].costs["bytes"][0] == spent[1]
    assert ends["fedcof → fedavg"].costs["bytes"][-1] == spent[1] + spent[2]
    assert ends["fedcof → fedavg"].costs["round"].tolist() == [1, 2, 3, 4, 5]
    assert ends["fedcof → fedavg"].score[0] == record.stages[1]["accuracy"]
    assert ends["fedavg"].costs["bytes"][-1] == spent[3]
    assert ends["fed3r → fedavg"].costs["bytes"][-1] == spent[0] + spent[4]


def test_a_band_is_the_deviation_over_seeds(tmp_path: Path) -> None:
    for seed in range(3):
        for alpha in (0.1, 100.0):
            run(recipe_of({"method": "fedcof"}, PROBE, seed=seed, alpha=alpha), tmp_path / f"{alpha}-{seed}")
    records = [Record.read(path) for path in find([tmp_path])]
    groups = grouped(records)
    assert [(group.label, len(group.runs)) for group in groups] == [
        ("alpha 0.1", 3),
        ("alpha 100.0", 3),
    ]
    accuracy = np.array([[line["accuracy"] for line in record.metrics] for record in groups[0].runs])
    curve = curves(groups)[0]
    assert curve.label == "alpha 0.1"
    np.testing.assert_allclose(curve.score, accuracy.mean(axis=0))
    np.testing.assert_allclose(curve.deviation, accuracy.std(axis=0, ddof=1))

    files = write_folder(tmp_path / "out", records)
    assert {f"figures/accuracy-by-{axis}.{ending}" for axis in ("round", "bytes", "forward-passes") for ending in
            ("svg", "png", "pdf")} <= set(files)  # fmt: skip
    assert all((tmp_path / "out" / file).stat().st_size for file in files)
    with (tmp_path / "out" / "costs.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    last = 100 * accuracy[:, -1]
    assert rows[1]["accuracy, %"] == f"{last.mean():.2f} ± {last.std(ddof=1):.2f}"
    balanced = 100 * np.mean([record.metrics[-1]["macro_f1"] for record in groups[0].runs])
    assert rows[1]["macro-F1, %"].startswith(f"{balanced:.2f} ± ")
    assert {"balanced accuracy, %", "calibration error", "lowest-accuracy tenth of clients, %"} <= rows[1].keys()
    assert (rows[1]["run"], rows[1]["method"], rows[1]["runs"]) == ("alpha 0.1", "fedavg", "3")
    assert (tmp_path / "out" / "costs.md").read_text().count("\n") == 2 + len(rows)
    assert r"\pm" in (tmp_path / "out" / "costs.tex").read_text()


def test_a_page_needs_nothing_from_elsewhere_and_says_what_there_is_to_say(tmp_path: Path) -> None:
    private = {"method": "fedncm", "privacy": {"epsilon": 3.0, "delta": 1e-5, "clip": 50.0, "noise": "server"}}
    run(recipe_of(private, PROBE), tmp_path / "run")
    page = (tmp_path / "run" / "report.html").read_text()
    assert not re.search(r"<(script|link|iframe|img)|url\((?!#)|@import|src=", page)
    assert set(re.findall(r"https?://[^\"' )<]*", page)) <= {
        "http://www.w3.org/2000/svg",
        "http://www.w3.org/1999/xlink",
    }
    for said in (
        "Privacy spent",
        "Data distribution across clients",
        "Lowest-accuracy clients",
        "predicted as",
        "epsilon = 3.0",
        "torch 2.",
    ):
        assert said in page, said
    assert "<tbody></tbody>" not in page
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert f"{100 * summary['accuracy']:.2f}" in page
    assert human_bytes(summary["stages"][1]["published_bytes"]) in page
    assert page.count('role="img"') == 6
    assert "prefers-color-scheme: dark" in page
    assert "@media print" in page
    assert "currentColor" in page
    # Under the pointer the heat maps say what is in the files, cell by cell, in place.
    record = Record.read(tmp_path / "run")
    held, confusion = record.holdings(), record.confusion()
    assert held is not None
    assert confusion is not None
    cells = re.findall(r'<rect x="([\d.]+)" y="([\d.]+)"[^>]*><title>(.*?)</title>', page)
    for said, x, y in (
        (f"{held.rows[1]}, 3: {held.counts[1, 3]}", 1, 3),
        (f"3 predicted as 1: {confusion.counts[3, 1]} of {confusion.counts[3].sum()}", 1, 3),
    ):
        mine = [cell for cell in cells if (", " if "," in said else "predicted as") in cell[2]]
        xs, ys = (sorted({float(cell[axis]) for cell in mine}) for axis in (0, 1))
        (place,) = [cell for cell in mine if cell[2] == said]
        assert (xs.index(float(place[0])), ys.index(float(place[1]))) == (x, y)


def test_names_are_shown_as_they_are(tmp_path: Path) -> None:
    run(recipe_of({"method": "fedncm"}), tmp_path / "run")
    for name in ("confusion.csv", "holdings.csv"):
        text = (tmp_path / "run" / name).read_text()
        (tmp_path / "run" / name).write_text(re.sub(r",7,", ",<script>$x^ & _</script>,", text))
    body = report_body([Record.read(tmp_path / "run")])
    assert "<script>" not in body
    assert body.count("&lt;script&gt;$x^ &amp; _&lt;/script&gt;") >= 3


def test_a_run_that_was_cut_short_has_a_page_too(tmp_path: Path) -> None:
    run(recipe_of({"method": "fedcof"}, PROBE), tmp_path / "run")
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "run" / "metrics.jsonl").write_text("".join(lines[:3]) + lines[3][:20])
    (tmp_path / "run" / "summary.json").unlink()
    (tmp_path / "run" / "rounds.csv").open("a").write('1,3,client-3,100,100,"cannot be reached"\n1,3,clie')
    record = Record.read(tmp_path / "run")
    assert [stage["rounds"] for stage in record.stages] == [1, 2]
    body = report_body([record])
    assert "not finished" in body
    assert "cannot be reached" in body
    (tmp_path / "run" / "metrics.jsonl").unlink()
    assert "not finished" in report_body([Record.read(tmp_path / "run")])


def test_where_there_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(HeadstartError, match="no such directory"):
        find([tmp_path / "nowhere"])
    assert find([tmp_path]) == []
    with pytest.raises(HeadstartError, match=r"there is no recipe\.toml"):
        Record.read(tmp_path)


def test_words_are_on_the_left_of_a_table_and_numbers_on_the_right() -> None:
    """The style sheet puts cells on the right, but for those of these classes."""
    rows = [["a", "fedavg", "93.04 ± 0.74", "", "−1.5", "word " * 9], ["b", "ditto", "not tested", "7", "+2", "short"]]
    head, *_ = html_table(("run", "method", "accuracy, %", "rounds", "difference", "why"), rows).partition("</thead>")
    assert re.findall(r"<th( class=\w+)?>([^<]*)</th>", head) == [
        (" class=word", "run"), (" class=word", "method"), ("", "accuracy, %"), ("", "rounds"), ("", "difference"),
        (" class=text", "why"),
    ]  # fmt: skip
