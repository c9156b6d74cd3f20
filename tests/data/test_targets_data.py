"""Targets that are no classes: from .npz files and from columns of tables."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headstart.config.recipe import Data
from headstart.data import Dataset, load_dataset
from headstart.errors import HeadstartError

X = np.random.default_rng(0).standard_normal((20, 3)).astype(np.float32)
Y = np.arange(20) + 0.5


def npz(path: Path, y: np.ndarray, **data: Any) -> Dataset:
    np.savez(path / "f.npz", X=X, y=y, split=2 * (np.arange(20) % 5 == 0), client=np.arange(20) % 2)
    return load_dataset(Data.model_validate({"dataset": str(path / "f.npz"), **data}))


def test_what_is_learned_is_found_from_the_file(tmp_path: Path) -> None:
    numbers = npz(tmp_path, Y)
    assert (numbers.target, numbers.classes) == ("regression", ("y",))
    assert numbers.train.targets is not None
    np.testing.assert_array_equal(numbers.train.targets[:, 0], Y[np.arange(20) % 5 > 0])
    np.testing.assert_array_equal(numbers.train.labels, 0)
    assert (npz(tmp_path, np.stack([Y, Y], axis=1)).classes) == ("y0", "y1")
    labels = npz(tmp_path, np.eye(4, dtype=np.int8)[np.arange(20) % 4])
    assert (labels.target, len(labels.classes)) == ("multilabel", 4)
    assert npz(tmp_path, np.arange(20) % 3).target == "classes"


def test_a_recipe_may_say_what_is_learned(tmp_path: Path) -> None:
    whole = npz(tmp_path, np.arange(20), target="regression", classes=["age"])
    assert (whole.target, whole.classes) == ("regression", ("age",))
    assert npz(tmp_path, (np.arange(20) > 3).astype(float), target="multilabel").target == "multilabel"
    with pytest.raises(HeadstartError, match="y must be 0 and 1, a column for each label"):
        npz(tmp_path, np.arange(20), target="multilabel")
    with pytest.raises(HeadstartError, match=r"data\.classes: 3 names for 1 targets"):
        npz(tmp_path, Y, classes=["a", "b", "c"])
    with pytest.raises(HeadstartError, match="must be whole numbers"):
        npz(tmp_path, Y, target="classes")
    with pytest.raises(HeadstartError, match=r"data\.target: digits has classes, and no regression targets"):
        load_dataset(Data.model_validate({"dataset": "digits", "target": "regression"}))


def csv(path: Path, **data: Any) -> Dataset:
    rows = [f"note {n},{n / 4},{n % 2},{int(n > 9)},{n % 3}" for n in range(20)]
    (path / "notes.csv").write_text("\n".join(["text,dose,fever,cough,ward", *rows]) + "\n")
    return load_dataset(Data.model_validate({"dataset": str(path / "notes.csv"), **data}), seed=1)


def test_a_column_of_numbers_and_several_columns_of_labels(tmp_path: Path) -> None:
    dose = csv(tmp_path, label_column="dose")
    assert (dose.target, dose.classes, dose.kind) == ("regression", ("dose",), "text")
    assert dose.train.targets is not None
    assert dose.test.targets is not None
    assert len(dose.test) == 4
    both = np.concatenate([dose.train.targets, dose.test.targets])[:, 0]
    np.testing.assert_array_equal(np.sort(both), np.arange(20) / 4)
    texts = dose.train.raw(0, 16)
    assert [f"note {4 * value:.0f}" for value in dose.train.targets[:, 0]] == texts

    signs = csv(tmp_path, label_column=["fever", "cough"])
    assert (signs.target, signs.classes) == ("multilabel", ("fever", "cough"))
    assert signs.train.targets is not None
    for text, (fever, cough) in zip(signs.train.raw(0, 16), signs.train.targets, strict=True):
        number = int(text.split()[1])
        assert (fever, cough) == (number % 2, number > 9)
    assert csv(tmp_path, label_column=["dose", "fever"]).target == "regression"
    assert csv(tmp_path, label_column="ward").target == "classes"
    assert csv(tmp_path, label_column="ward", target="regression").target == "regression"
    with pytest.raises(HeadstartError, match="a class is in one column"):
        csv(tmp_path, label_column=["fever", "cough"], target="classes")
    with pytest.raises(HeadstartError, match=r"text must be numbers \[n\] or \[n, q\]"):
        csv(tmp_path, label_column="text", input_column="text", target="regression")
    with pytest.raises(HeadstartError, match=r"data\.label_column: \('fever', 'rash'\) is not there"):
        csv(tmp_path, label_column=["fever", "rash"])
