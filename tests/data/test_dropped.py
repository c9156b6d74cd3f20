"""What a recipe's keys leave out of the data is said; a key that nothing reads is refused."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headstart.config.recipe import Data, Recipe
from headstart.data import load_dataset
from headstart.data.load import load_silo
from headstart.errors import HeadstartError, RecipeError


def table(path: Path, labels: list[str]) -> str:
    path.write_text("\n".join(["text,label", *(f"text {n},{label}" for n, label in enumerate(labels))]))
    return str(path)


def silo(path: Path, labels: list[str], classes: list[Any]) -> list[int]:
    """Training and test examples of each class."""
    data = load_silo(Data(dataset="silo", classes=tuple(classes)), table(path, labels))
    return np.bincount(np.concatenate([data.train.labels, data.test.labels]), minlength=len(classes)).tolist()


@pytest.mark.parametrize("alone", [False, True])
def test_labels_that_are_not_named_are_counted(alone: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    labels = ["cat"] * 6 + ["dog"] * 6 + ["bird"] * 11 + ["fox"] * 7
    data = Data(dataset=table(tmp_path / "animals.csv", labels), classes=("dog", "cat"))
    found = load_dataset(data, alone=alone)
    assert len(found.train) + len(found.test) == 12
    said = caplog.text
    assert "18 of 30 examples are left out: data.classes does not name bird (11), fox (7)" in said


def test_many_labels_that_are_not_named_are_not_all_listed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    labels = [f"{number:02}" for number in range(20) for _ in range(5)]
    load_dataset(Data(dataset=table(tmp_path / "many.csv", [f"c{each}" for each in labels]), classes=("c00", "c19")))
    said = caplog.text
    assert "90 of 100 examples" in said
    assert "c01 (5), " in said
    assert said.rstrip().endswith("and 8 more")


def test_nothing_is_said_where_nothing_is_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert silo(tmp_path / "animals.csv", ["cat", "dog"] * 5, ["dog", "cat", "fox"]) == [5, 5, 0]
    assert caplog.text == ""


@pytest.mark.parametrize("odd", ["Cat", "CAT", "cat "])
@pytest.mark.parametrize("alone", [False, True])
def test_labels_that_differ_in_case_or_spaces_are_refused(odd: str, alone: bool, tmp_path: Path) -> None:
    labels = ["dog"] * 4 + [odd] * 3 + ([] if alone else ["cat"] * 4)
    data = Data(dataset=table(tmp_path / "animals.csv", labels), classes=("dog", "cat"))
    with pytest.raises(HeadstartError, match=rf"3 examples are labelled '{odd}', and data\.classes names 'cat'; write"):
        load_dataset(data, alone=alone)


def test_labels_that_differ_in_case_may_be_two_classes(tmp_path: Path) -> None:
    assert silo(tmp_path / "letters.csv", ["a"] * 3 + ["A"] * 2, ["A", "a"]) == [2, 3]


def test_numbers_do_not_name_the_text_labels_of_a_silo(tmp_path: Path) -> None:
    # Each silo sorts its own labels: with cats missing, number 0 would be the dogs.
    with pytest.raises(HeadstartError, match=r"data\.classes: .* labels are text \(dog, fox\).*give their names"):
        silo(tmp_path / "animals.csv", ["dog", "fox"] * 3, [0, 1])


def parsed(data: dict[str, Any]) -> Recipe:
    return Recipe.parse({"data": data, "stages": [{"method": "fedncm"}]})


@pytest.mark.parametrize(("column", "kind"), [("client_column", "natural"), ("domain_column", "domains")])
def test_a_column_that_the_partition_does_not_read_is_refused(column: str, kind: str) -> None:
    with pytest.raises(RecipeError) as refused:
        parsed({"dataset": "a.csv", column: "ward", "partition": {"kind": "iid", "clients": 3}})
    assert refused.value.problems == (
        f"data.{column}: 'ward' is read with partition.kind = '{kind}' only, and the kind is 'iid'; "
        f"write partition = {{kind = '{kind}'}}, or leave {column} out",
    )
    parsed({"dataset": "a.csv", column: "ward", "partition": {"kind": kind}})


def test_a_key_of_another_kind_of_partition_is_named_with_its_kind() -> None:
    with pytest.raises(RecipeError) as refused:
        parsed({"dataset": "a.csv", "client_column": "ward", "partition": {"kind": "natural", "alpha": 0.5, "alfa": 1}})
    alpha, alfa = refused.value.problems
    assert alpha == "data.partition.alpha: goes with kind = 'dirichlet' or 'dirichlet-by-class' only; leave it out"
    assert alfa.startswith("data.partition.alfa: unknown key; ")


def test_a_column_that_the_partition_of_a_task_does_not_read_is_refused() -> None:
    iid = {"kind": "iid", "clients": 3}
    tasks = [{"name": name, "dataset": "a.csv", "client_column": "ward", "partition": iid} for name in ("one", "two")]
    with pytest.raises(RecipeError, match=r"(?s)tasks\.0\.client_column: 'ward'.*tasks\.1\.client_column: 'ward'"):
        Recipe.parse({"tasks": tasks, "stages": [{"method": "fedncm"}]})


@pytest.mark.parametrize("column", ["input_column", "label_column", "client_column", "domain_column", "encoding"])
@pytest.mark.parametrize("dataset", ["features.npz", "digits", "mnist-mini"])
def test_columns_are_for_tables(column: str, dataset: str, tmp_path: Path) -> None:
    np.savez(tmp_path / "features.npz", X=np.eye(8), y=np.arange(8) % 2)
    dataset = str(tmp_path / dataset) if dataset.endswith(".npz") else dataset
    with pytest.raises(HeadstartError, match=rf"data\.{column}: .* has no columns"):
        load_dataset(Data(dataset=dataset, **{column: "ward"}))


def test_a_task_is_for_features(tmp_path: Path) -> None:
    with pytest.raises(HeadstartError, match=r"data\.task: .*only an \.npz file"):
        load_dataset(Data(dataset=table(tmp_path / "animals.csv", ["cat", "dog"] * 5), task=0))
