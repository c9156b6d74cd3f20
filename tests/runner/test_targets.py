"""Runs whose targets are numbers or labels, from a file to a report and to predictions."""

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn.datasets import load_diabetes, load_digits
from sklearn.linear_model import Ridge, RidgeClassifier
from sklearn.metrics import (
    average_precision_score,
    f1_score,
    mean_absolute_error,
    mean_squared_error,
    r2_score,
    roc_auc_score,
)

from headstart.config.recipe import Recipe
from headstart.data import Federation
from headstart.errors import HeadstartError, RecipeError
from headstart.export import Model, export
from headstart.records import Record
from headstart.report import report_body, write_folder
from headstart.report.dashboard.gallery import Gallery
from headstart.runner import Result, run
from tests.command import Command

X, Y = load_diabetes(return_X_y=True)
TWO = np.stack([Y + 0.25, 1e3 * X[:, 2] + np.sin(Y)], axis=1)
DIGITS, CLASS = load_digits(return_X_y=True)
LABELS = np.stack([CLASS % 2, CLASS > 4, np.isin(CLASS, (0, 6, 8, 9))], axis=1).astype(np.int64)


def recipe_of(path: Path, x: np.ndarray, y: np.ndarray, *stages: dict[str, Any], **data: Any) -> Recipe:
    split = 2 * (np.arange(len(x)) % 4 == 0)
    np.savez(path, X=x.astype(np.float32), y=y, split=split, client=np.arange(len(x)) % 7)
    table = {"dataset": str(path), "partition": {"kind": "natural"}, **data}
    stages = stages or ({"method": "fed3r", "ridge": 0.5},)
    return Recipe.parse({"name": "targets", "data": table, "model": {"backbone": "features"}, "stages": list(stages)})


def parts(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, ...]:
    x, test = x.astype(np.float32).astype(np.float64), np.arange(len(x)) % 4 == 0
    return x[~test], y[~test], x[test], y[test]


def test_a_regression_from_a_file_to_predictions(tmp_path: Path) -> None:
    result = run(recipe_of(tmp_path / "two.npz", X, TWO), tmp_path / "run")
    x, y, there, expected = parts(X, TWO)
    model = Ridge(alpha=0.5).fit(x, y)
    np.testing.assert_allclose(result.head.weight, model.coef_, rtol=1e-4)
    np.testing.assert_allclose(result.head.bias, model.intercept_, rtol=1e-5)
    predicted = model.predict(there)
    (stage,) = result.summary["stages"]
    for found in (stage, result.summary, Record.read(tmp_path / "run").metrics[-1]):
        assert found["accuracy"] is None
        assert found["r2"] == pytest.approx(r2_score(expected, predicted), rel=1e-5)
        assert found["mae"] == pytest.approx(mean_absolute_error(expected, predicted), rel=1e-5)
    assert stage["loss"] == pytest.approx(mean_squared_error(expected, predicted), rel=1e-5)
    assert (result.summary["target"], result.summary["classes"]) == ("regression", 2)

    np.savez(tmp_path / "new.npz", X=there.astype(np.float32))
    told = Model.load(tmp_path / "run").predict([tmp_path / "new.npz"])
    np.testing.assert_allclose(told.probabilities, predicted, rtol=1e-4)
    told.write(tmp_path / "out.csv")
    with (tmp_path / "out.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert float(rows[3]["y1"]) == pytest.approx(predicted[3, 1], rel=1e-4)
    assert told.table()[0] == ["input", "y0", "y1"]


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize("kind", ["regression", "multilabel"])
def test_every_client_has_metrics_on_its_own_examples(tmp_path: Path, kind: str) -> None:
    x, y = (X, TWO) if kind == "regression" else (DIGITS, LABELS)
    recipe = recipe_of(tmp_path / "a.npz", x, y, partition={"kind": "natural", "test": "follow"})
    result = run(recipe, tmp_path / "run")
    rows, test = rows_of(tmp_path / "run" / "clients.csv"), np.arange(len(x)) % 4 == 0
    assert len(rows) == 7
    shown = []
    for client, row in enumerate(rows):
        mine = test & (np.arange(len(x)) % 7 == client)
        scores, expected = result.head.scores(x[mine].astype(np.float32)), y[mine]
        assert int(row["test_examples"]) == mine.sum()
        figures = {"r2": r2_score, "mae": mean_absolute_error}
        if kind == "multilabel":
            figures = {"roc_auc": roc_auc_score, "average_precision": average_precision_score}
            right = ((scores > 0) == expected).all(axis=1).mean()
            assert float(row["accuracy"]) == pytest.approx(right, abs=1e-5)
            f1 = f1_score(expected, scores > 0, average="macro")
            assert float(row["macro_f1"]) == pytest.approx(f1, abs=1e-5)
            shown.append((right, f"{100 * right:.2f}", f"{100 * f1:.2f}"))
        for name, figure in figures.items():
            assert float(row[name]) == pytest.approx(figure(expected, scores), rel=1e-4), name
        if kind == "regression":
            assert "accuracy" not in row
            shown.append((float(row["r2"]), f"{float(row['r2']):.4g}", f"{float(row['mae']):.4g}"))
    # The report lists them, the lowest first.
    page = report_body([Record.read(tmp_path / "run")])
    cells = [f"<td>{first}</td><td>{second}</td>" for _, first, second in sorted(shown)]
    places = [page.index(cell) for cell in cells]
    assert places == sorted(places)
    assert ("lowest R²" in page) == (kind == "regression")
    assert ("test examples with every label right" in page) == (kind == "multilabel")


def test_labels_from_a_file_to_predictions(tmp_path: Path) -> None:
    named = ["odd", "large", "round"]
    result = run(recipe_of(tmp_path / "labels.npz", DIGITS, LABELS, classes=named), tmp_path / "run")
    x, y, there, expected = parts(DIGITS, LABELS)
    model = RidgeClassifier(alpha=0.5).fit(x, y)
    np.testing.assert_allclose(result.head.weight, model.coef_, rtol=1e-3, atol=1e-5)
    scores, predicted = model.decision_function(there), model.predict(there)
    found = result.summary
    assert found["target"] == "multilabel"
    assert found["accuracy"] == pytest.approx((predicted == expected).all(axis=1).mean())
    assert found["macro_f1"] == pytest.approx(f1_score(expected, predicted, average="macro"))
    assert found["roc_auc"] == pytest.approx(roc_auc_score(expected, scores))
    assert found["average_precision"] == pytest.approx(average_precision_score(expected, scores))

    np.savez(tmp_path / "new.npz", X=there.astype(np.float32))
    told = Model.load(tmp_path / "run").predict([tmp_path / "new.npz"])
    names = [named[place] for place in np.flatnonzero(predicted[5])]
    assert told.table()[1][5][1] == "; ".join(names)
    told.write(tmp_path / "out.csv")
    with (tmp_path / "out.csv").open(newline="") as file:
        row = list(csv.DictReader(file))[5]
    assert row["predicted"] == "; ".join(names)
    assert float(row["round"]) == pytest.approx(np.clip((scores[5, 2] + 1) / 2, 0, 1), abs=1e-4)


@pytest.mark.parametrize(
    "stage",
    [
        {"method": "fed3r", "ridge": 0.5, "secure": True},
        {"method": "fed3r", "ridge": 0.5, "clients_per_round": 2},
        {"method": "fed3r", "ridge": 0.5, "min_examples": 3},
    ],
    ids=["secure", "rounds", "min"],
)
def test_however_sums_travel_the_head_is_the_same(tmp_path: Path, stage: dict[str, Any]) -> None:
    here = run(recipe_of(tmp_path / "a.npz", X, TWO)).head
    there = run(recipe_of(tmp_path / "b.npz", X, TWO, stage)).head
    np.testing.assert_allclose(there.weight, here.weight, rtol=1e-4)
    np.testing.assert_allclose(there.bias, here.bias, rtol=1e-4)


def test_random_features_are_of_the_features_alone(tmp_path: Path) -> None:
    stage = {"method": "fed3r", "random_features": 300, "random_features_width": 2.0}
    linear = run(recipe_of(tmp_path / "a.npz", DIGITS, LABELS)).summary["macro_f1"]
    assert run(recipe_of(tmp_path / "b.npz", DIGITS, LABELS, stage)).summary["macro_f1"] > linear + 0.05


def test_noise_hides_targets_too(tmp_path: Path) -> None:
    """One example moves the total of its clipped vectors, targets included, by no more than the noise is scaled to."""
    y = (3 * DIGITS[:, 20] - DIGITS[:, 30]) / 16 + 0.5

    def of(epsilon: float, name: str) -> Result:
        stage = {"method": "fed3r", "privacy": {"epsilon": epsilon, "clip": 1.0}}
        return run(recipe_of(tmp_path / name, DIGITS / 16, y, stage))

    weak, strong = of(1e5, "a.npz"), of(0.1, "b.npz")
    assert weak.summary["stages"][0]["privacy"]["epsilon"] == 1e5
    assert weak.summary["r2"] > 0.9
    assert (strong.summary["r2"] or -1) < weak.summary["r2"] - 0.1
    assert not weak.head.bias.any()


def test_a_page_and_a_command_say_what_is_learned(tmp_path: Path, command: Command) -> None:
    recipe = recipe_of(tmp_path / "two.npz", X, TWO, {"method": "fed3r"})
    (tmp_path / "recipe.toml").write_text(recipe.to_toml())
    done = command("run", "recipe.toml", "--out", "run", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "R² 0." in done.stdout
    assert "fed3r: mean absolute error" in done.stdout
    page = report_body([Record.read(tmp_path / "run")])
    assert "2 targets" in page
    assert "variance explained" in page
    assert "Data distribution" not in page
    write_folder(tmp_path / "report", [Record.read(tmp_path / "run")])
    with (tmp_path / "report" / "costs.csv").open(newline="") as file:
        (row,) = csv.DictReader(file)
    r2 = json.loads((tmp_path / "run" / "summary.json").read_text())["r2"]
    assert float(row["R²"]) == pytest.approx(r2, abs=1e-4)
    (status,) = Gallery([tmp_path / "run"]).statuses()
    assert status.score == f"R² {r2:.4f} of 111 test examples"
    shown = command("partition", "recipe.toml", cwd=tmp_path)
    assert "regression: y0, y1" in shown.stdout
    np.savez(tmp_path / "new.npz", X=X[:3].astype(np.float32))
    told = command("predict", "run", "new.npz", cwd=tmp_path)
    assert told.returncode == 0, told.stderr
    assert "y1" in told.stdout
    export(tmp_path / "run", tmp_path / "out")
    assert "the numbers themselves" in (tmp_path / "out" / "README.md").read_text()


@pytest.mark.parametrize("method", ["fedncm", "fedcof", "fedavg", "fedmezo", "personalise", "centralised"])
def test_other_methods_say_that_they_learn_classes(tmp_path: Path, method: str) -> None:
    stage = {"method": method, **({"train": "head"} if method in ("fedavg", "fedmezo", "centralised") else {})}
    with pytest.raises(HeadstartError, match=f"stages.0.method: {method} learns classes.*use fed3r"):
        run(recipe_of(tmp_path / "a.npz", X, TWO, stage))
    with pytest.raises(RecipeError, match=r"data\.target is 'regression'; use fed3r"):
        recipe_of(tmp_path / "a.npz", X, TWO, stage, target="regression")


def test_a_partition_by_classes_is_refused(tmp_path: Path) -> None:
    how, why = {"kind": "dirichlet", "clients": 3}, r"'dirichlet' deals examples out by their classes.*use iid, natural"
    with pytest.raises(HeadstartError, match=why):
        Federation.of(recipe_of(tmp_path / "a.npz", X, TWO, partition=how))
    with pytest.raises(RecipeError, match="'shards' deals examples out by their classes"):
        recipe_of(tmp_path / "a.npz", X, TWO, partition={"kind": "shards"}, target="regression")
    followed = recipe_of(tmp_path / "a.npz", X, TWO, partition={"kind": "iid", "clients": 4, "test": "follow"})
    federation = Federation.of(followed)
    assert federation.test_owners is not None
    assert np.bincount(federation.test_owners).tolist() == [28, 28, 28, 27]


def test_a_class_that_only_a_later_client_has_just_works(tmp_path: Path) -> None:
    """Class-incremental: the head after the last round is that of all examples at once, whoever brought which class."""
    split, late = 2 * (np.arange(len(CLASS)) % 4 == 0), CLASS // 2
    np.savez(tmp_path / "late.npz", X=DIGITS.astype(np.float32), y=CLASS, split=split, client=late)
    table: dict[str, Any] = {"dataset": str(tmp_path / "late.npz"), "partition": {"kind": "natural"}}
    for method in ("fedncm", "fed3r", "fedcof"):
        stage = {"method": method, "clients_per_round": 1}
        recipe = Recipe.parse({"data": table, "model": {"backbone": "features"}, "stages": [stage]})
        lines: list[dict[str, Any]] = []
        found = run(recipe, on_metrics=lines.append)
        accuracy = [line["accuracy"] for line in lines]
        assert len(lines) == 5
        assert accuracy[0] <= 0.25  # of two classes of ten
        assert (np.diff(accuracy) > 0.05).all()
        stage.pop("clients_per_round")  # type: ignore[arg-type]
        recipe = Recipe.parse({"data": table, "model": {"backbone": "features"}, "stages": [stage]})
        np.testing.assert_allclose(found.head.weight, run(recipe).head.weight, rtol=1e-4, atol=1e-6)
