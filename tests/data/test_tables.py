"""Tables and image folders as splits of examples, the columns and labels they have, and what is refused."""

import csv
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from headstart.config.catalog import KNOWN
from headstart.config.recipe import Data
from headstart.data import Dataset, load_dataset
from headstart.data.examples import Examples, decode_image
from headstart.errors import HeadstartError

Rows = Sequence[dict[str, Any]]
WORDS = ("spring", "summer", "autumn", "winter")
TRAIN = [{"text": f"day {i}", "label": WORDS[i % 4]} for i in range(12)]
TEST = [{"text": f"night {i}", "label": WORDS[i % 3]} for i in range(5)]


def load(path: Path | str, **settings: Any) -> Dataset:
    return load_dataset(Data(dataset=str(path), **settings))


def write(file: Path, rows: Rows) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    match file.suffix.lower():
        case ".csv" | ".tsv":
            with file.open("w", newline="", encoding="utf-8") as stream:
                writer = csv.DictWriter(stream, list(rows[0]), delimiter="\t" if file.suffix == ".tsv" else ",")
                writer.writeheader()
                writer.writerows(rows)
        case ".jsonl":
            file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        case ".json":
            file.write_text(json.dumps(list(rows)), encoding="utf-8")
        case ".parquet":
            pq.write_table(pa.Table.from_pylist(list(rows)), file)
    return file


def png(shade: int, size: int = 4) -> bytes:
    buffer = io.BytesIO()
    Image.new("L", (size, size), shade).save(buffer, "PNG")
    return buffer.getvalue()


def draw(folder: Path, shades: Sequence[int], suffix: str = ".png") -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for shade in shades:
        (folder / f"{shade:03}{suffix}").write_bytes(png(shade))


def named_labels(dataset: Dataset, examples: Examples) -> list[str]:
    return [dataset.classes[label] for label in examples.labels]


def pairs(dataset: Dataset, examples: Examples) -> list[tuple[Any, str]]:
    return list(zip(examples.raw(0, len(examples)), named_labels(dataset, examples), strict=True))


def as_pairs(rows: Rows) -> list[tuple[Any, str]]:
    return [(row["text"], str(row["label"])) for row in rows]


# --------------------------------------------------------------------------------------------------------------- files


@pytest.mark.parametrize("suffix", [".csv", ".tsv", ".jsonl", ".json", ".parquet", ".CSV"])
def test_split_files_of_every_kind(tmp_path: Path, suffix: str) -> None:
    write(tmp_path / f"train{suffix}", TRAIN)
    write(tmp_path / f"test{suffix}", TEST)
    dataset = load(tmp_path)
    assert dataset.kind == "text"
    assert dataset.classes == ("autumn", "spring", "summer", "winter")
    assert pairs(dataset, dataset.train) == as_pairs(TRAIN)
    assert pairs(dataset, dataset.test) == as_pairs(TEST)
    assert dataset.validation is None


@pytest.mark.parametrize(
    ("train", "test", "validation"),
    [
        ("train-00000-of-00001", "test-00000-of-00001", "validation-00000-of-00001"),
        ("Training", "TESTING", "dev"),
        ("fashion_train", "fashion_test", "fashion.val"),
    ],
)
def test_names_of_split_files(tmp_path: Path, train: str, test: str, validation: str) -> None:
    for name, rows in ((train, TRAIN), (test, TEST), (validation, TEST[:2])):
        write(tmp_path / f"{name}.parquet", rows)
    dataset = load(tmp_path)
    assert dataset.validation is not None
    assert [len(part) for part in (dataset.train, dataset.test, dataset.validation)] == [12, 5, 2]


def test_parts_of_a_split_are_joined_in_order(tmp_path: Path) -> None:
    write(tmp_path / "train-00001-of-00002.csv", TRAIN[8:])
    write(tmp_path / "train-00000-of-00002.csv", TRAIN[:8])
    write(tmp_path / "test.csv", TEST)
    dataset = load(tmp_path)
    assert pairs(dataset, dataset.train) == as_pairs(TRAIN)


def test_splits_may_differ_in_kind_of_file(tmp_path: Path) -> None:
    write(tmp_path / "train.parquet", TRAIN)
    write(tmp_path / "test.tsv", TEST)
    dataset = load(tmp_path)
    assert pairs(dataset, dataset.test) == as_pairs(TEST)


def test_a_single_file_is_cut_whatever_its_name(tmp_path: Path) -> None:
    dataset = load(write(tmp_path / "test.csv", TRAIN), test_fraction=0.34)
    # A third of three examples of each of four classes.
    assert np.bincount(dataset.test.labels).tolist() == [1] * 4
    assert sorted(pairs(dataset, dataset.train) + pairs(dataset, dataset.test)) == sorted(as_pairs(TRAIN))


@pytest.mark.parametrize("folder", ["größe ü", "a[1]", "b*?", "{c}"])
def test_strange_folder_names(tmp_path: Path, folder: str) -> None:
    write(tmp_path / folder / "train.csv", [{**row, "label": f"{row['label']} für ☃"} for row in TRAIN])
    dataset = load(tmp_path / folder, test_fraction=0.34)
    assert dataset.classes[0] == "autumn für ☃"
    draw(tmp_path / "images" / folder / "kätzchen", range(5))
    draw(tmp_path / "images" / folder / "hund", range(5))
    assert load(tmp_path / "images" / folder).classes == ("hund", "kätzchen")


# -------------------------------------------------------------------------------------------------------------- labels


@pytest.mark.parametrize(
    ("labels", "classes", "numbers"),
    [
        (["b", "a", "b", "c"], ("a", "b", "c"), [1, 0, 1, 2]),
        ([3, 0, 1, 3], ("0", "1", "2", "3"), [3, 0, 1, 3]),
        ([True, False, False, True], ("0", "1"), [1, 0, 0, 1]),
    ],
)
@pytest.mark.parametrize("suffix", [".csv", ".jsonl", ".parquet"])
def test_kinds_of_labels(
    tmp_path: Path, suffix: str, labels: list[Any], classes: tuple[str, ...], numbers: list[int]
) -> None:
    rows = [{"text": "words", "label": label} for label in labels]
    write(tmp_path / f"train{suffix}", rows)
    write(tmp_path / f"test{suffix}", rows[:2])
    dataset = load(tmp_path)
    assert dataset.classes == classes
    assert dataset.train.labels.tolist() == numbers
    assert dataset.test.labels.tolist() == numbers[:2]


def write_class_labels(file: Path, labels: list[int], names: list[str]) -> None:
    features = datasets.Features({"text": datasets.Value("string"), "label": datasets.ClassLabel(names=names)})
    values = {"text": [f"words {i}" for i in range(len(labels))], "label": labels}
    file.parent.mkdir(parents=True, exist_ok=True)
    datasets.Dataset.from_dict(values, features=features).to_parquet(file)


def test_class_labels_keep_their_names_and_order(tmp_path: Path) -> None:
    write_class_labels(tmp_path / "train.parquet", [2, 0, 2, 0], ["zebra", "ape", "mouse"])
    write_class_labels(tmp_path / "test.parquet", [1, 2], ["zebra", "ape", "mouse"])
    dataset = load(tmp_path)
    assert dataset.classes == ("zebra", "ape", "mouse")
    assert named_labels(dataset, dataset.train) == ["mouse", "zebra"] * 2
    assert named_labels(dataset, dataset.test) == ["ape", "mouse"]


def test_class_labels_in_another_order_are_refused(tmp_path: Path) -> None:
    write_class_labels(tmp_path / "train.parquet", [0, 1], ["ape", "zebra"])
    write_class_labels(tmp_path / "test.parquet", [0, 1], ["zebra", "ape"])
    with pytest.raises(HeadstartError, match="test: 'label' lists other classes"):
        load(tmp_path)


def test_a_class_that_only_the_test_has_is_a_class(tmp_path: Path) -> None:
    write(tmp_path / "train.csv", TRAIN[:2])
    write(tmp_path / "test.csv", TEST)
    dataset = load(tmp_path)
    assert dataset.classes == ("autumn", "spring", "summer")
    assert pairs(dataset, dataset.test) == as_pairs(TEST)


@pytest.mark.parametrize(
    "test",
    [
        [{"text": "unknown", "label": -1}] * 3,
        [{"text": "unknown", "label": None}] * 3,
        [{"text": "unknown"}] * 3,
    ],
    ids=["minus one", "null", "no column"],
)
def test_an_unlabelled_test_gives_way_to_validation(tmp_path: Path, test: Rows) -> None:
    numbers = [{"text": f"day {i}", "label": i % 2} for i in range(10)]
    write(tmp_path / "train.parquet", numbers)
    write(tmp_path / "validation.parquet", numbers[3:7])
    write(tmp_path / "test.parquet", test)
    dataset = load(tmp_path)
    assert dataset.validation is None
    assert len(dataset.train) == 10
    assert pairs(dataset, dataset.test) == as_pairs(numbers[3:7])


def test_an_unlabelled_test_without_validation_is_cut_from_training(tmp_path: Path) -> None:
    numbers = [{"text": f"day {i}", "label": i % 2} for i in range(10)]
    write(tmp_path / "train.parquet", numbers)
    write(tmp_path / "test.parquet", [{"text": "unknown", "label": -1}] * 3)
    dataset = load(tmp_path)
    assert sorted(pairs(dataset, dataset.train) + pairs(dataset, dataset.test)) == as_pairs(numbers)
    assert np.bincount(dataset.test.labels).tolist() == [1, 1]


@pytest.mark.parametrize(
    ("labels", "sentence"),
    [
        ([1.0, 2.0, 1.0], "label holds whole numbers, as float64: where they are classes, write them as integers"),
        (["a", None, "b", None], "train: 2 examples have no 'label', in row 1"),
        ([0, 1, None], "train: 1 examples have no 'label', in row 2"),
        ([None, None], "no example has a label in column 'label'"),
        ([-1, -1], "no example has a label"),
        ([0, 1, -1], "label -1 at row 2 is out of range; number the classes from 0"),
        ([0, 1, 5000], "label 5000 at row 2 is out of range; number the classes from 0 to 999"),
        ([0, 2**63], "go beyond 64 bits; number the classes from 0"),
        ([[0], [1]], r"labels in 'label' are List.* give text or whole numbers"),
        ([{"a": 0}, {"a": 1}], "labels in 'label' are .*give text or whole numbers"),
        ([b"a", b"b"], "labels in 'label' are bytes values"),
        (["a"] * 10, r"one class only \(a\); at least two are needed"),
    ],
)
def test_labels_that_cannot_be_used_are_refused(tmp_path: Path, labels: list[Any], sentence: str) -> None:
    column = pa.array(labels, pa.uint64()) if 2**63 in labels else pa.array(labels)
    pq.write_table(pa.table({"text": ["words"] * len(labels), "label": column}), tmp_path / "train.parquet")
    with pytest.raises(HeadstartError, match=sentence):
        load(tmp_path)


def test_labels_of_several_types_in_a_file_are_refused(tmp_path: Path) -> None:
    file = write(tmp_path / "train.jsonl", [{"text": "words", "label": label} for label in (0, "a", 1)])
    with pytest.raises(HeadstartError, match=r"labels in 'label' are .*; give text or whole numbers"):
        load(file)


@pytest.mark.parametrize(("label", "sentence"), [(1, "text in one of train and test only"), (0.5, "test: .*float")])
def test_labels_of_another_type_in_the_test_are_refused(tmp_path: Path, label: Any, sentence: str) -> None:
    write(tmp_path / "train.parquet", TRAIN)
    write(tmp_path / "test.parquet", [{"text": "words", "label": label}])
    with pytest.raises(HeadstartError, match=sentence):
        load(tmp_path)


# ------------------------------------------------------------------------------------------------------------- columns


def test_columns_asked_for(tmp_path: Path) -> None:
    rows = [{"text": "wrong", "label": 0, "satz": f"Satz {i}", "größe": "ab"[i % 2]} for i in range(10)]
    file = write(tmp_path / "data.csv", rows)
    dataset = load(file, input_column="satz", label_column="größe")
    assert dataset.classes == ("a", "b")
    assert sorted(dataset.train.raw(0, 8) + dataset.test.raw(0, 2)) == [f"Satz {i}" for i in range(10)]


def test_a_pair_of_columns(tmp_path: Path) -> None:
    write(tmp_path / "train.csv", [{"q": f"q{i}", "a": f"a{i}", "label": i % 2} for i in range(4)])
    write(tmp_path / "test.csv", [{"q": "q", "a": "a", "label": 0}])
    dataset = load(tmp_path, input_column=("a", "q"))
    assert dataset.train.raw(1, 3) == [("a1", "q1"), ("a2", "q2")]
    assert dataset.train.fingerprint() != load(tmp_path, input_column=("q", "a")).train.fingerprint()


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"input_column": "txt"}, r"data\.input_column: 'txt' is not there; the columns are text, number, label"),
        ({"input_column": ("text", "txt")}, r"data\.input_column: \('text', 'txt'\) is not there"),
        ({"input_column": "number"}, r"'number' of the train split holds Value\('int64'\); give images, texts"),
        ({"label_column": "class"}, r"data\.label_column: 'class' is not there"),
        ({"client_column": "user"}, r"data\.client_column: 'user' is not there; the columns are text, number, label"),
        ({"domain_column": "style"}, r"data\.domain_column: 'style' is not there"),
    ],
)
def test_columns_that_are_not_there_are_refused(tmp_path: Path, settings: dict[str, Any], sentence: str) -> None:
    write(tmp_path / "train.csv", [{"text": f"t{i}", "number": i, "label": i % 2} for i in range(10)])
    with pytest.raises(HeadstartError, match=sentence):
        load(tmp_path, **settings)


def test_usual_columns_that_are_missing_are_refused(tmp_path: Path) -> None:
    with pytest.raises(HeadstartError, match="input_column: none of the usual names is there; the columns are a, b"):
        load(write(tmp_path / "one.csv", [{"a": "words", "b": "c"}]))
    with pytest.raises(HeadstartError, match="label_column: none of the usual names is there; the columns are text, b"):
        load(write(tmp_path / "two.csv", [{"text": "words", "b": "c"}]))


def test_a_test_split_without_the_input_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "train.csv", TRAIN)
    write(tmp_path / "test.csv", [{"txt": "words", "label": "winter"}])
    with pytest.raises(HeadstartError, match="test: no column 'text'; the columns are txt, label"):
        load(tmp_path)


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_missing_texts_are_refused(tmp_path: Path, suffix: str) -> None:
    file = write(tmp_path / f"train{suffix}", [*TRAIN, {"text": None, "label": "winter"}])
    with pytest.raises(HeadstartError, match="train: 1 examples have no 'text', in row 12"):
        load(file)


@pytest.mark.parametrize("text", [["a", "b"], [0.5, 1.5]])
def test_inputs_that_are_neither_text_nor_images_are_refused(tmp_path: Path, text: Any) -> None:
    file = write(tmp_path / "train.parquet", [{"text": text, "label": i % 2} for i in range(10)])
    with pytest.raises(HeadstartError, match="'text' of the train split holds List"):
        load(file)


def test_an_image_and_a_text_are_no_pair(tmp_path: Path) -> None:
    file = write(tmp_path / "train.parquet", [{"image": png(i), "text": "t", "label": i % 2} for i in range(10)])
    with pytest.raises(HeadstartError, match="give images, texts or two texts"):
        load(file, input_column=("image", "text"))


def test_clients_and_domains_have_one_numbering_over_the_splits(tmp_path: Path) -> None:
    def rows(users: str, styles: str) -> Rows:
        return [
            {"text": f"t{i}", "label": i % 2, "user": user, "style": style}
            for i, (user, style) in enumerate(zip(users, styles, strict=True))
        ]

    write(tmp_path / "train.csv", rows("zzaab", "qrqrq"))
    write(tmp_path / "test.csv", rows("cba", "srq"))
    dataset = load(tmp_path, client_column="user", domain_column="style")
    for examples, users, styles in ((dataset.train, "zzaab", "qrqrq"), (dataset.test, "cba", "srq")):
        assert examples.clients is not None
        assert examples.domains is not None
        assert "".join(dataset.clients[number] for number in examples.clients) == users
        assert "".join(dataset.domains[number] for number in examples.domains) == styles
    assert load(tmp_path).train.clients is None


@pytest.mark.parametrize("key", ["client_column", "domain_column"])
def test_examples_of_nobody_are_refused(tmp_path: Path, key: str) -> None:
    rows = [{"text": f"t{i}", "label": i % 2, "id": None if i == 6 else i % 3} for i in range(10)]
    with pytest.raises(HeadstartError, match="train: 1 examples have no 'id', in row 6"):
        load(write(tmp_path / "train.csv", rows), **{key: "id"})


# -------------------------------------------------------------------------------------------------------------- images


def shades(examples: Examples) -> list[int]:
    values = examples.raw(0, len(examples))
    return [decode_image(value, "here").getpixel((0, 0))[0] for value in values]  # type: ignore[index]


@pytest.mark.parametrize("suffix", [".png", ".PNG"])
def test_an_image_folder_by_class_is_cut(tmp_path: Path, suffix: str) -> None:
    draw(tmp_path / "dark", range(0, 10), suffix)
    draw(tmp_path / "light", range(200, 205), suffix)
    (tmp_path / "light" / "notes.txt").write_text("no image")
    dataset = load(tmp_path)
    assert dataset.kind == "image"
    assert dataset.classes == ("dark", "light")
    assert np.bincount(dataset.test.labels).tolist() == [2, 1]
    for examples in (dataset.train, dataset.test):
        assert [int(shade >= 200) for shade in shades(examples)] == examples.labels.tolist()
    assert sorted(shades(dataset.train) + shades(dataset.test)) == [*range(10), *range(200, 205)]


def test_an_image_folder_by_split_and_class(tmp_path: Path) -> None:
    draw(tmp_path / "train" / "a", range(4))
    draw(tmp_path / "train" / "b", range(100, 103))
    draw(tmp_path / "test" / "b", range(150, 152))
    draw(tmp_path / "unlabelled", range(240, 250))
    dataset = load(tmp_path)
    assert dataset.classes == ("a", "b")
    assert shades(dataset.train) == [*range(4), *range(100, 103)]
    assert shades(dataset.test) == [150, 151]
    assert named_labels(dataset, dataset.test) == ["b", "b"]


def test_a_class_may_be_called_train(tmp_path: Path) -> None:
    for number, name in enumerate(("bus", "car", "train")):
        draw(tmp_path / name, range(100 * number, 100 * number + 5))
    (tmp_path / "bus" / "000.png").rename(tmp_path / "bus" / "test_000.png")
    dataset = load(tmp_path)
    assert dataset.classes == ("bus", "car", "train")
    assert np.bincount(dataset.train.labels).tolist() == [4, 4, 4]
    assert [shade // 100 for shade in shades(dataset.train)] == dataset.train.labels.tolist()


@pytest.mark.parametrize("folders", [["."], ["cat"], ["train", "test"]])
def test_images_of_one_class_are_refused(tmp_path: Path, folders: list[str]) -> None:
    for folder in folders:
        draw(tmp_path / folder, range(10))
    with pytest.raises(HeadstartError, match=r"one class only .*at least two are needed"):
        load(tmp_path)


@pytest.mark.parametrize("as_record", [True, False])
def test_images_as_bytes_in_a_table(tmp_path: Path, as_record: bool) -> None:
    def image(i: int) -> Any:
        return {"bytes": png(i), "path": None} if as_record else png(i)

    write(tmp_path / "train.parquet", [{"img": image(i), "label": i % 2} for i in range(4)])
    write(tmp_path / "test.parquet", [{"img": image(i), "label": i % 2} for i in range(4, 6)])
    dataset = load(tmp_path)
    assert dataset.kind == "image"
    assert (shades(dataset.train), shades(dataset.test)) == ([0, 1, 2, 3], [4, 5])


def test_the_same_images_have_one_fingerprint_in_a_folder_and_in_a_table(tmp_path: Path) -> None:
    draw(tmp_path / "folder" / "train" / "a", range(3))
    draw(tmp_path / "folder" / "train" / "b", range(3, 6))
    draw(tmp_path / "folder" / "test" / "b", [9])
    write(tmp_path / "table" / "train.parquet", [{"image": png(i), "label": i // 3} for i in range(6)])
    write(tmp_path / "table" / "test.parquet", [{"image": png(9), "label": 1}])
    folder, table = load(tmp_path / "folder"), load(tmp_path / "table")
    assert folder.train.fingerprint() == table.train.fingerprint()
    assert folder.test.fingerprint() == table.test.fingerprint() != folder.train.fingerprint()


def test_damaged_and_vanished_images_are_refused(tmp_path: Path) -> None:
    draw(tmp_path / "train" / "a", range(3))
    draw(tmp_path / "train" / "b", range(3))
    draw(tmp_path / "test" / "a", range(3))
    dataset = load(tmp_path)
    (tmp_path / "train" / "a" / "001.png").write_bytes(png(1)[:40])
    with pytest.raises(HeadstartError, match=r"image 1 \(.*001\.png\) is not a readable image: .*replace it or remove"):
        decode_image(dataset.train.raw(1, 2)[0], "image 1")
    (tmp_path / "train" / "a" / "001.png").unlink()
    with pytest.raises(HeadstartError, match=r"cannot read the image .*001\.png: No such file"):
        dataset.train.fingerprint()


def test_images_without_contents_are_refused(tmp_path: Path) -> None:
    rows = [{"image": {"bytes": None if i == 2 else png(i), "path": None}, "label": i % 2} for i in range(10)]
    write(tmp_path / "train.parquet", rows)
    write(tmp_path / "test.parquet", rows[4:])
    dataset = load(tmp_path)
    with pytest.raises(HeadstartError, match="cannot read the image"):
        dataset.train.fingerprint()
    rows[3]["image"] = None
    write(tmp_path / "train.parquet", rows)
    with pytest.raises(HeadstartError, match="train: 1 examples have no 'image', in row 3"):
        load(tmp_path)


# ------------------------------------------------------------------------------------------------------- strange files


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("empty.csv", b"", "each file must be what its ending says and hold an example"),
        ("header.csv", b"text,label\n", "header.csv holds no example: a table needs a row below its header"),
        ("latin.csv", "text,label\nschön,a\n".encode("latin-1"), "is not UTF-8, the first time in line 2; .*encoding"),
        ("quote.csv", b'text,label\n"words,a\nmore,b\n', "cannot read the data"),
        ("semicolon.csv", b"text;label\nwords;a\n", "has a semicolon between its .*; set data.separator = ';'"),
        ("binary.csv", bytes(range(256)) * 4, "cannot read the data"),
        ("one.csv", b"text,label\nwords,a\n", r"class's examples \(at most 1\) leaves none .*; raise it, or give"),
        ("empty.parquet", b"", "cannot read the data"),
        ("text.parquet", b"no parquet", "cannot read the data"),
        ("empty.jsonl", b"", "cannot read the data"),
        ("cut.jsonl", b'{"text": "words", "label": 0}\n{"text": ', "cannot read the data"),
        ("number.json", b"3", "cannot read the data"),
        ("notes.txt", b"words", r"holds no data: expected split files \(\.parquet, \.csv.*folder of images.*\.npz"),
    ],
)  # fmt: skip
def test_files_that_are_no_data_are_refused_in_one_line(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], name: str, content: bytes, sentence: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(HeadstartError, match=sentence) as refusal:
        load(tmp_path / name)
    assert "\n" not in str(refusal.value)
    assert capfd.readouterr().err == ""


def test_folders_without_data_are_refused(tmp_path: Path) -> None:
    with pytest.raises(HeadstartError, match="holds no data"):
        load(tmp_path)
    (tmp_path / "readme.txt").write_text("words")
    (tmp_path / ".hidden.csv").write_text("text,label\na,b\n")
    with pytest.raises(HeadstartError, match="holds no data"):
        load(tmp_path)


def test_a_split_in_files_of_several_kinds_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "train.parquet", TRAIN)
    write(tmp_path / "dataset_infos.json", [{"version": 1}])
    with pytest.raises(HeadstartError, match=r"train split .*several kinds \(dataset_infos\.json, train\.parquet\)"):
        load(tmp_path)


def test_duplicate_columns(tmp_path: Path) -> None:
    names = ["text", "label", "label"]
    table = pa.Table.from_arrays([pa.array(["a", "b"]), pa.array([0, 1]), pa.array([0, 1])], names=names)
    pq.write_table(table, tmp_path / "train.parquet")
    with pytest.raises(HeadstartError, match="cannot read the data"):
        load(tmp_path)


# ---------------------------------------------------------------------------------------------------------- known sets


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HEADSTART_DATA", str(tmp_path))
    return tmp_path


def test_mnli_is_pairs_tested_on_validation(home: Path) -> None:
    rows = [{"premise": f"p{i}", "hypothesis": f"h{i}", "label": i % 3} for i in range(9)]
    write(home / "mnli" / "train.parquet", rows)
    write(home / "mnli" / "validation_matched.parquet", rows[:4])
    dataset = load("mnli")
    assert dataset.name == "mnli"
    assert dataset.train.raw(7, 9) == [("p7", "h7"), ("p8", "h8")]
    assert dataset.test.raw(0, 1) == [("p0", "h0")]
    assert dataset.test.labels.tolist() == [0, 1, 2, 0]


def test_domainnet_keeps_ten_classes_in_the_order_of_the_papers(home: Path) -> None:
    kept = KNOWN["domainnet"].only
    names = sorted([*kept, "aircraft_carrier", "lion", "zigzag"], reverse=True)
    styles = ["sketch", "real"]

    def table(labels: list[int]) -> datasets.Dataset:
        return datasets.Dataset.from_dict(
            {
                "image": [{"bytes": png(label), "path": None} for label in labels],
                "label": labels,
                "domain": [label % 2 for label in labels],
            },
            features=datasets.Features(
                {
                    "image": datasets.Image(),
                    "label": datasets.ClassLabel(names=names),
                    "domain": datasets.ClassLabel(names=styles),
                }
            ),
        )

    (home / "domainnet").mkdir()
    table([*range(13), *range(13)]).to_parquet(home / "domainnet" / "train.parquet")
    table(list(range(13))).to_parquet(home / "domainnet" / "test.parquet")
    dataset = load("domainnet")
    assert dataset.classes == kept
    assert np.bincount(dataset.train.labels).tolist() == [2] * 10
    assert np.bincount(dataset.test.labels).tolist() == [1] * 10
    assert dataset.train.domains is not None
    # The shade of an image is its number among the thirteen.
    for shade, label, domain in zip(shades(dataset.train), dataset.train.labels, dataset.train.domains, strict=True):
        assert names[shade] == kept[label]
        assert dataset.domains[domain] == styles[shade % 2]


def write_eurosat(home: Path, train: int, test: int) -> None:
    for split, count in (("train", train), ("test", test)):
        image, labels = pa.array([png(0)] * count), np.arange(count) ** 2 % 10
        labels[:2] = 2, 3
        write_to = home / "eurosat-sub" / f"{split}.parquet"
        write_to.parent.mkdir(exist_ok=True)
        pq.write_table(pa.table({"image": image, "label": labels}), write_to)


def test_eurosat_sub_is_the_papers_part(home: Path) -> None:
    write_eurosat(home, 6000, 1200)
    dataset = load("eurosat-sub")
    assert (len(dataset.train), len(dataset.test)) == (5000, 1000)
    part = load("eurosat-sub", train_examples=60, test_examples=12)
    # Squares end in 0, 1, 4, 5, 6 or 9, and there is one example of each of 2 and 3.
    assert sorted(np.bincount(part.train.labels, minlength=10).tolist()) == [0, 0, 1, 1, 9, 9, 10, 10, 10, 10]
    assert sorted(np.bincount(part.test.labels, minlength=10).tolist()) == [0, 0, 1, 1, 1, 1, 2, 2, 2, 2]


@pytest.mark.parametrize(
    ("train", "test", "sentence"),
    [(100, 1000, "train_examples = 5000 .* 100 examples"), (5000, 20, "test_examples = 1000 .* 20 examples")],
)
def test_eurosat_sub_of_fewer_examples_is_refused(home: Path, train: int, test: int, sentence: str) -> None:
    write_eurosat(home, train, test)
    with pytest.raises(HeadstartError, match=sentence):
        load("eurosat-sub")


def test_femnist_writers_are_clients_and_each_is_cut(home: Path) -> None:
    rows = [{"image": png(i), "character": i % 5, "writer_id": f"f{i // 10:04}"} for i in range(30)]
    write(home / "femnist" / "train.parquet", rows)
    dataset = load("femnist")
    assert dataset.clients == ("f0000", "f0001", "f0002")
    assert dataset.train.clients is not None
    assert dataset.test.clients is not None
    assert np.bincount(dataset.train.clients).tolist() == [8, 8, 8]
    assert np.bincount(dataset.test.clients).tolist() == [2, 2, 2]


@pytest.mark.parametrize(
    ("name", "columns", "label"),
    [
        ("cifar100", {"img": png(0), "coarse_label": 9}, "fine_label"),
        ("cifar100", {"image": png(0)}, "label"),
        ("trec", {"text": "why?", "label": 7}, "label_coarse"),
        ("sst2", {"sentence": "fine"}, "label"),
        ("imagenet-r", {"image": png(0), "label": 0}, "wnid"),
    ],
)
def test_the_columns_of_known_sets(home: Path, name: str, columns: dict[str, Any], label: str) -> None:
    for split in ("train", "test"):
        write(home / name / f"{split}.parquet", [{**columns, label: i % 4} for i in range(6)])
    dataset = load(name)
    assert dataset.kind == KNOWN[name].task
    assert dataset.train.labels.tolist() == [0, 1, 2, 3, 0, 1]


def test_local_data_under_any_name_come_before_the_hub(home: Path) -> None:
    write(home / "me" / "mine" / "train.csv", TRAIN)
    write(home / "me" / "mine" / "test.csv", TEST)
    dataset = load("me/mine")
    assert pairs(dataset, dataset.test) == as_pairs(TEST)


def test_a_hub_table_has_the_splits_of_the_catalogue(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def fetch(repository: str, config: str | None, split: str) -> datasets.Dataset:
        asked.append((repository, config, split))
        return datasets.Dataset.from_dict({"premise": ["p"] * 3, "hypothesis": ["h"] * 3, "label": [0, 1, 2]})

    monkeypatch.setattr(datasets, "load_dataset", fetch)
    load("mnli")
    assert asked == [("nyu-mll/multi_nli", None, "train"), ("nyu-mll/multi_nli", None, "validation_matched")]
