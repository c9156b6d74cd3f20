"""Advice is what runs say: on held-out training examples, with the bytes and within the budgets of the real thing."""

import csv
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn.datasets import load_diabetes, load_digits

from headstart.channel.accounting import noise_multiplier
from headstart.cli.advise import parse_bytes
from headstart.config.recipe import Recipe
from headstart.errors import HeadstartError
from headstart.runner import run
from headstart.runner.advise import Advice, Candidate, advise
from tests.command import Command

X, Y = load_digits(return_X_y=True)


def digits(path: Path, test_labels: np.ndarray | None = None) -> str:
    split = 2 * (np.arange(len(Y)) % 5 == 0)
    y = Y if test_labels is None else np.where(split == 2, test_labels, Y)
    np.savez(path, X=X.astype(np.float32), y=y, split=split, client=np.arange(len(Y)) % 12)
    return str(path)


@pytest.fixture(scope="module")
def advice(tmp_path_factory: pytest.TempPathFactory) -> Advice:
    return advise(digits(tmp_path_factory.mktemp("digits") / "digits.npz"))


def of(advice: Advice, name: str) -> Candidate:
    return next(each for each in advice.candidates if each.name == name)


def sent(candidate: Candidate, advice: Advice, folder: Path) -> tuple[int, int]:
    """Bytes of all clients in a real run of a candidate's stages on all data, and the most of one client."""
    run(Recipe.parse({**advice.recipe, "stages": [dict(stage) for stage in candidate.stages]}), folder)
    with (folder / "clients.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    by_client: dict[str, int] = {}
    for row in rows:
        by_client[row["client"]] = by_client.get(row["client"], 0) + int(row["bytes_up"])
    return sum(by_client.values()), max(by_client.values())


@pytest.mark.parametrize("name", ["fedncm", "fedcof", "fedcof, rank 16", "fed3r"])
def test_a_head_costs_what_a_real_run_of_it_costs(advice: Advice, tmp_path: Path, name: str) -> None:
    each = of(advice, name)
    assert sent(each, advice, tmp_path / "run") == (each.bytes_up, each.per_client)
    assert each.passes == np.count_nonzero(np.arange(len(Y)) % 5)


def test_a_stage_after_it_costs_no_more_than_it_says(advice: Advice, tmp_path: Path) -> None:
    (each,) = [each for each in advice.candidates if "fedavg" in each.name]
    total, most = sent(each, advice, tmp_path / "run")
    assert total == each.bytes_up
    assert most <= (each.per_client or 0)


def test_the_cheapest_of_those_within_one_error_of_the_best_is_advised(advice: Advice) -> None:
    able = [each for each in advice.candidates if not each.why_not]
    best = max(each.chosen_by or 0.0 for each in able)
    assert advice.error == pytest.approx((best * (1 - best) / 216) ** 0.5, rel=0.02)
    near = [each for each in able if (each.chosen_by or 0.0) >= best - advice.error]
    assert advice.chosen.bytes_up == min(each.bytes_up or 0 for each in near)
    (reason,) = [row[-1] for row in advice.rows() if row[0] == advice.chosen.name]
    assert reason.startswith("advised")


def test_the_calibration_error_is_a_fraction_as_everywhere_else(advice: Advice) -> None:
    place = advice.columns.index("calibration error")
    (shown,) = [row[place] for row in advice.rows() if row[0] == advice.chosen.name]
    assert shown == f"{advice.chosen.metrics['calibration_error']:.4g}"


def test_the_test_split_is_not_looked_at(advice: Advice, tmp_path: Path) -> None:
    """The mutation: with other labels in the test split, nothing changes."""
    other = advise(digits(tmp_path / "other.npz", np.zeros(len(Y), np.int64)))
    assert [dict(each.metrics) for each in other.candidates] == [dict(each.metrics) for each in advice.candidates]
    assert [each.chosen_by for each in other.candidates] == [each.chosen_by for each in advice.candidates]


def test_figures_are_of_examples_that_nothing_learned_from(advice: Advice) -> None:
    """Accuracy on the real test split, of heads that learned from all training examples, is no lower by much."""
    for name in ("fedncm", "fed3r"):
        each = of(advice, name)
        there = run(Recipe.parse({**advice.recipe, "stages": [dict(stage) for stage in each.stages]})).summary
        assert each.metrics["accuracy"] == pytest.approx(there["accuracy"], abs=0.07)


def test_a_budget_of_bytes_is_kept(advice: Advice, tmp_path: Path) -> None:
    source = digits(tmp_path / "digits.npz")
    most = (of(advice, "fed3r").per_client or 0) - 1
    found = advise(source, most_bytes=most)
    assert of(found, "fed3r").why_not.startswith("sends more than")
    (after,) = [each for each in found.candidates if "fedavg" in each.name]
    assert not after.name.startswith("fed3r")
    assert (after.per_client or 0) <= most
    assert sent(found.chosen, found, tmp_path / "run")[1] <= most
    least = of(advice, "fedncm").per_client
    with pytest.raises(HeadstartError, match=f"nothing fits; .* sends least, {least} bytes of a client"):
        advise(source, most_bytes=100)


def test_noise_is_as_large_beside_the_sample_as_it_would_be_beside_everything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[float] = []

    def watched(recipe: Recipe, *rest: Any) -> Any:
        seen.extend(stage.privacy.epsilon for stage in recipe.stages if stage.privacy is not None)
        from headstart.runner.run_recipe import run_federation

        return run_federation(recipe, *rest)

    monkeypatch.setattr("headstart.runner.advise.run_federation", watched)
    found = advise(digits(tmp_path / "digits.npz"), epsilon=2.0, examples=600)
    assert of(found, "fedcof, rank 4").metrics["accuracy"] > 0  # a sketch under noise
    learned = 600 - 2 * 90
    share = noise_multiplier(seen[0], 1e-5) / noise_multiplier(2.0, 1e-5)
    assert share == pytest.approx(learned / 1437, rel=0.02)
    assert all(stage["privacy"] == {"epsilon": 2.0} for stage in found.recipe["stages"])
    (after,) = [each for each in found.candidates if "fedavg" in each.name]
    assert after.why_not.startswith("not measured: privacy of training hides clients")


def test_numbers_have_one_method(tmp_path: Path) -> None:
    x, y = load_diabetes(return_X_y=True)
    np.savez(tmp_path / "numbers.npz", X=x, y=y + 0.5)
    found = advise(str(tmp_path / "numbers.npz"), clients=5)
    assert [each.name for each in found.candidates] == ["fed3r"]
    assert found.chosen.metrics["r2"] > 0.3
    (row,) = found.rows()
    shown = dict(zip(found.columns, row, strict=True))
    assert shown["held out"] == f"R² {found.chosen.metrics['r2']:.4f}"
    assert shown["mean absolute error"] == f"{found.chosen.metrics['mae']:.4g}"
    assert "macro-F1" not in shown
    assert any("5 clients that hold them evenly are assumed" in note for note in found.notes)
    assert sent(found.chosen, found, tmp_path / "run") == (found.chosen.bytes_up, found.chosen.per_client)


def test_the_command_prints_a_recipe_that_runs(tmp_path: Path, command: Command) -> None:
    (tmp_path / "mine.toml").write_text(
        'name = "mine"\nseed = 3\n[data]\ndataset = "digits"\n[data.partition]\nkind = "iid"\nclients = 6\n'
        '[model]\nbackbone = "features"\n[[stages]]\nmethod = "fedncm"\n'
    )
    done = command("advise", "mine.toml", "--clients", 8, "--bytes", "1MB", "--out", "advised.toml", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "advised: " in done.stdout
    _, _, printed = done.stdout.partition("runs it\n")
    assert tomllib.loads(printed.partition("recipe: ")[0]) == tomllib.loads((tmp_path / "advised.toml").read_text())
    recipe = Recipe.load(tmp_path / "advised.toml")
    assert recipe.data is not None
    assert (recipe.name, recipe.seed, recipe.data.partition.clients) == ("mine", 3, 8)  # type: ignore[union-attr]
    assert (tmp_path / "advised.toml").read_text().startswith("#:schema recipe.schema.json\n")
    assert (tmp_path / "recipe.schema.json").is_file()
    ran = command("run", "advised.toml", "--out", "run", cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["digitz"], "did you mean 'digits'?"),
        (["digits", "--bytes", "many"], "--bytes many: give a number of bytes, such as 500kB"),
        (["digits", "--epsilon", "0"], "--epsilon 0: must be greater than 0"),
        (["none.toml"], "cannot read none.toml"),
        (["digits", "--examples", "10"], "10 training examples are too few to hold any out; 40 are the fewest"),
    ],
)
def test_mistakes_are_sentences(tmp_path: Path, command: Command, arguments: list[str], sentence: str) -> None:
    done = command("advise", *arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert sentence in done.stderr


def test_bytes_have_units() -> None:
    assert [parse_bytes(text) for text in ("500kB", "20 MB", "1e6", "12", "1.5GB")] == [5e5, 2e7, 1e6, 12, 1.5e9]
