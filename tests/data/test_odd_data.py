"""Data as people have them: what is odd is said in one line, what cannot be read is listed at once."""

import csv
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from headstart.config.recipe import Data, Recipe
from headstart.data import Dataset, Federation, load_dataset
from headstart.data.examples import Examples
from headstart.errors import HeadstartError


def load(path: Path | str, seed: int = 0, **settings: Any) -> Dataset:
    return load_dataset(Data.model_validate({"dataset": str(path), **settings}), seed)


def notes(path: Path | str, **settings: Any) -> str:
    return "\n".join(load(path, **settings).notes)


def table(path: Path, labels: list[str], encoding: str = "utf-8", separator: str = ",") -> Path:
    lines = [separator.join(("text", "label")), *(f"schön {n}{separator}{label}" for n, label in enumerate(labels))]
    path.write_bytes("\n".join(lines).encode(encoding))
    return path


def draw(path: Path, shade: int = 0) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("L", (4, 4), shade).save(path)
    return path


def folder(root: Path, *classes: str, each: int = 5) -> Path:
    for number, name in enumerate(classes):
        for shade in range(each):
            draw(root / name / f"{shade}.png", 40 * number + shade)
    return root


def per_class(dataset: Dataset, examples: Examples) -> dict[str, int]:
    return dict(
        zip(dataset.classes, np.bincount(examples.labels, minlength=len(dataset.classes)).tolist(), strict=True)
    )


# ---------------------------------------------------------------------------------------------------- labels and splits


def test_labels_alike_but_for_case_or_spaces(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = table(tmp_path / "a.csv", ["pos"] * 6 + ["Pos"] * 5 + ["neg"] * 5 + ["po s"] * 5)
    dataset = load(path)
    assert len(dataset.classes) == 4
    said = "'Pos' (5), 'pos' (6) differ in case or spaces only, and are 2 classes; write them alike"
    assert said in caplog.text
    with pytest.raises(HeadstartError, match=r"data\.strict is set, and there are warnings:\n  - 'Pos' \(5\), 'pos'"):
        load(path, strict=True)


def test_labels_from_1_leave_class_0_without_examples(tmp_path: Path) -> None:
    found = notes(table(tmp_path / "a.csv", [str(1 + n % 4) for n in range(40)]))
    assert found == "no example is of class 0; labels that are numbers count from 0"


def test_a_class_with_one_example_is_named(tmp_path: Path) -> None:
    path = table(tmp_path / "a.csv", ["a"] * 10 + ["b"] * 10 + ["c"])
    assert notes(path) == (
        "no test example is of class c (1 in training): accuracy says nothing about it; too few for data.test_fraction"
    )


def test_a_class_that_only_the_test_has_is_named(tmp_path: Path) -> None:
    table(tmp_path / "train.csv", ["a"] * 4 + ["b"] * 4)
    table(tmp_path / "test.csv", ["a", "b", "c"])
    assert notes(tmp_path) == "no training example is of class c; add some, or leave it out with data.classes"


def test_nothing_odd_nothing_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    load(table(tmp_path / "a.csv", ["a", "b"] * 10), strict=True)
    load(folder(tmp_path / "photos", "cat", "dog"), strict=True)
    assert caplog.text == ""


def test_the_split_has_a_seed_of_its_own(tmp_path: Path) -> None:
    path = table(tmp_path / "a.csv", ["a", "b"] * 50)
    plain = [set(load(path, seed).test.rows.tolist()) for seed in (0, 1)]
    assert plain[0] != plain[1]
    fixed = [set(load(path, seed, split_seed=0).test.rows.tolist()) for seed in (0, 1, 2)]
    assert fixed == [plain[0]] * 3  # what a run with seed 0 has always been tested on


# ------------------------------------------------------------------------------------------------- folders of images


def test_what_a_folder_of_images_leaves_out_is_said(tmp_path: Path) -> None:
    root = folder(tmp_path / "photos", "cat", "dog")
    (root / "bird").mkdir()
    (root / "cat" / "a.heic").write_bytes(b"x")
    (root / "cat" / "b.txt").write_text("x")
    (root / "dog" / ".hidden").write_text("x")
    draw(root / "dog" / "old" / "1.png")
    draw(root / "dog" / "old" / "2.png")
    found = load(root)
    assert found.classes == ("cat", "dog", "old")
    heic = root / "cat" / "a.heic"
    assert found.notes[:3] == (
        f"2 files are not read as images (1 .heic, 1 .txt), the first {heic}; save them as JPEG or PNG",
        "1 folder holds no images, and is no class: bird",
        f"images lie at several depths, and the folder that an image lies in is its class: {Path('dog/old')} (2)",
    )


def test_a_class_of_which_a_client_has_a_folder_and_no_image_is_named(tmp_path: Path) -> None:
    for hospital in ("north", "south"):
        folder(tmp_path / hospital, "cat", "dog", each=5)
    (tmp_path / "south" / "bird").mkdir()
    (tmp_path / "east" / "cat").mkdir(parents=True)
    assert "2 folders hold no images, and are no classes: east, south/bird" in notes(tmp_path)


@pytest.mark.parametrize(("odd", "clients"), [("north/cat/old", ("north", "south")), ("north", ())])
def test_a_deeper_folder_leaves_the_clients_and_an_image_beside_the_classes_does_not(
    odd: str, clients: tuple[str, ...], tmp_path: Path
) -> None:
    """Nobody knows the class of an image that lies in its client's folder, so that it may be the class."""
    for hospital in ("north", "south"):
        folder(tmp_path / hospital, "cat", "dog", each=5)
    (tmp_path / odd).mkdir(exist_ok=True)
    draw(tmp_path / odd / "1.png")
    found = load(tmp_path, **({"client_column": "client"} if clients else {}))
    assert found.clients == clients
    assert any("images lie at several depths" in note for note in found.notes)


def test_folders_of_clients_and_classes(tmp_path: Path) -> None:
    root = tmp_path / "photos"
    for hospital in ("north", "south"):
        folder(root / hospital, "cat", "dog", each=5 if hospital == "north" else 10)
    assert "set data.client_column = 'client'" in notes(root)
    for said in ({"client_column": "client"}, {"partition": {"kind": "natural"}}):
        recipe = Recipe.parse({"data": {"dataset": str(root), **said}, "stages": [{"method": "fedcof"}]})
        federation = Federation.of(recipe)
        assert federation.names == ("north", "south")
        assert federation.sizes.tolist() == [8, 16]  # a fifth of 10 and of 20 is held out
        assert federation.dataset.classes == ("cat", "dog")
        assert federation.dataset.notes == ()


def test_folders_of_splits_clients_and_classes(tmp_path: Path) -> None:
    for split in ("train", "test"):
        for hospital in ("north", "south"):
            folder(tmp_path / "photos" / split / hospital, "cat", "dog")
    dataset = load(tmp_path / "photos", client_column="client", partition={"kind": "natural"})
    assert dataset.clients == ("north", "south")
    assert (len(dataset.train), len(dataset.test)) == (20, 20)
    assert dataset.test.clients is not None
    assert np.bincount(dataset.test.clients).tolist() == [10, 10]


def described(path: Path, column: str, rows: int = 20) -> Path:
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow([column, "label", "hospital"])
        writer.writerows([f"images/{n}.png", "ab"[n % 2], f"h{n % 3}"] for n in range(rows))
    return path


@pytest.mark.parametrize("name", ["metadata.csv", "list.csv"])
@pytest.mark.parametrize("column", ["file_name", "path", "image"])
def test_a_table_of_paths(name: str, column: str, tmp_path: Path) -> None:
    for number in range(20):
        draw(tmp_path / "images" / f"{number}.png", number)
    path = described(tmp_path / name, column)
    for where in (path, tmp_path):  # the file, or the folder that it lies in
        dataset = load(where, client_column="hospital", partition={"kind": "natural"})
        assert dataset.kind == "image"
        assert dataset.clients == ("h0", "h1", "h2")
        shades = [Image.open(value["path"]).getpixel((0, 0)) for value in dataset.train.raw(0, len(dataset.train))]
        assert shades == dataset.train.rows.tolist()
        assert [dataset.classes[label] for label in dataset.train.labels] == ["ab"[shade % 2] for shade in shades]


def test_metadata_in_the_folders_of_splits(tmp_path: Path) -> None:
    for split, rows in (("train", 12), ("test", 6)):
        for number in range(rows):
            draw(tmp_path / "scans" / split / "images" / f"{number}.png", number)
        described(tmp_path / "scans" / split / "metadata.csv", "file_name", rows)
    dataset = load(tmp_path / "scans", client_column="hospital", partition={"kind": "natural"})
    assert (len(dataset.train), len(dataset.test)) == (12, 6)
    assert dataset.classes == ("a", "b")


def test_a_column_of_paths_that_the_recipe_names(tmp_path: Path) -> None:
    for number in range(20):
        draw(tmp_path / "images" / f"{number}.png", number)
    assert load(described(tmp_path / "a.csv", "scan"), input_column="scan").kind == "image"


def test_paths_that_were_written_on_windows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(19):
        draw(tmp_path / "images" / f"{number}.png", number)
    path = described(tmp_path / "a.csv", "path")
    path.write_text(path.read_text().replace("images/", "images\\"))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        HeadstartError, match=r"1 of 20 files are not there: images\\19\.png; paths are relative to \.\. "
    ):
        load(Path("a.csv"))
    kept = load(Path("a.csv"), skip_unreadable=True)
    assert (len(kept.train) + len(kept.test), kept.kind) == (19, "image")
    assert kept.notes[0].endswith(r"1 of 20 files are not there: images\19.png; they are left out")


def test_paths_that_are_not_there_are_all_listed(tmp_path: Path) -> None:
    for number in range(18):
        draw(tmp_path / "images" / f"{number}.png", number)
    path = described(tmp_path / "a.csv", "path")
    sentence = r"'path': 2 of 20 files are not there: images/18\.png, images/19\.png; paths are relative to"
    with pytest.raises(HeadstartError, match=sentence):
        load(path)
    kept = load(path, skip_unreadable=True)
    assert len(kept.train) + len(kept.test) == 18
    assert "2 of 20 files are not there" in kept.notes[0]
    path.write_text(path.read_text().replace("images/3", "imges/3"))
    lost = r"3 of 20 files .*; there is no folder .*imges; did you mean '.*images'\?"
    with pytest.raises(HeadstartError, match=lost):
        load(path)


def test_unreadable_images_are_left_out_on_request(tmp_path: Path) -> None:
    root = folder(tmp_path / "photos", "cat", "dog")
    (root / "cat" / "x.png").write_bytes(b"junk")
    whole = (root / "dog" / "0.png").read_bytes()
    (root / "dog" / "y.png").write_bytes(whole[: len(whole) // 2])  # its first bytes look well
    kept = load(root, skip_unreadable=True)
    assert len(kept.train) + len(kept.test) == 10
    (note,) = kept.notes
    assert note.startswith("train: 2 images cannot be read, and are left out: ")
    assert "x.png" in note
    assert "y.png" in note
    (root / "cat" / "x.png").unlink()
    (note,) = load(root, skip_unreadable=True).notes
    assert note.startswith("train: 1 image cannot be read, and is left out: ")


# -------------------------------------------------------------------------------------------------------- CSV files


@pytest.mark.parametrize(("encoding", "hint"), [("latin-1", "cp1252"), ("utf-16", "utf-16")])
def test_other_encodings(encoding: str, hint: str, tmp_path: Path) -> None:
    path = table(tmp_path / "a.csv", ["a", "b"] * 10, encoding)
    line = 2 if encoding == "latin-1" else 1
    with pytest.raises(HeadstartError, match=rf"a\.csv is not UTF-8, .* line {line}; .*set data.encoding, .* '{hint}'"):
        load(path)
    dataset = load(path, encoding=hint)
    assert dataset.train.raw(0, 1) == [f"schön {dataset.train.rows[0]}"]
    with pytest.raises(HeadstartError, match=r"data\.encoding: 'utf-9' is not known"):
        load(path, encoding="utf-9")


@pytest.mark.parametrize("separator", [";", "\t", "|"])
def test_other_separators(separator: str, tmp_path: Path) -> None:
    path = table(tmp_path / "a.csv", ["a", "b"] * 10, separator=separator)
    with pytest.raises(HeadstartError) as refused:
        load(path)
    assert str(refused.value).endswith(f"where ',' is expected; set data.separator = {separator!r}")
    assert load(path, separator=separator).classes == ("a", "b")
    with pytest.raises(HeadstartError, match=r"where '#' is expected; set data\.separator = "):
        load(path, separator="#")


def test_rows_with_too_many_fields_are_all_listed(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text('text,label\none, two,a\n"a\nb",a\n' + "x,a\ny,b\n" * 5 + "three, four,b\n")
    with pytest.raises(HeadstartError, match=r"more fields than columns in line 2, 15; quote texts that hold a ','"):
        load(path)
    kept = load(path, skip_unreadable=True)
    assert sorted(kept.train.source["text"]) == ["a\nb", *"xxxxxyyyyy"]
    assert "in line 2, 15; they are left out" in kept.notes[0]


def test_rows_that_lack_a_value_are_listed_with_them(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("text,label,note\none, two,a,\nalone\n,a,\n\n" + "x,a,\ny,b,\n" * 4 + "x,,\nx,a,\ny,b,\n")
    told = "more fields than columns in line 2, and no value in a column that is read in line 3, 4, 14; quote texts"
    with pytest.raises(HeadstartError, match=told):
        load(path)
    assert len(load(path, skip_unreadable=True).train) + len(load(path, skip_unreadable=True).test) == 10


def test_rows_without_a_value_are_left_out_on_request(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("text,label\n" + "x,a\ny,b\n" * 5 + "z,\n,a\n")
    with pytest.raises(HeadstartError, match=r"train: 1 examples have no 'label', in row 10; data\.skip_unreadable"):
        load(path)
    kept = load(path, skip_unreadable=True)
    assert kept.notes == ("train: 2 of 12 rows lack one of text, label, and are left out: 10, 11 (from 0)",)
    assert per_class(kept, kept.train) == {"a": 4, "b": 4}


# ---------------------------------------------------------------------------------------------------- clients and paths


def test_a_column_of_clients_makes_the_partition_natural() -> None:
    def partition(**data: Any) -> str:
        return Recipe.parse(
            {"data": {"dataset": "x.csv", **data}, "stages": [{"method": "fedcof"}]}
        ).data.partition.kind  # type: ignore[union-attr]

    assert partition() == "dirichlet"
    assert partition(client_column="hospital") == "natural"
    assert partition(domain_column="style") == "domains"
    with pytest.raises(HeadstartError, match=r"'hospital' is read with partition\.kind = 'natural' only"):
        partition(client_column="hospital", partition={"kind": "iid"})


def test_a_number_of_clients_that_nobody_wrote_is_a_default(tmp_path: Path) -> None:
    path = table(tmp_path / "a.csv", ["a", "b"] * 10)
    recipe = Recipe.parse({"data": {"dataset": str(path)}, "stages": [{"method": "fedcof"}]})
    with pytest.raises(HeadstartError, match=r"clients = 100 \(the default\): there are only 16 training examples"):
        Federation.of(recipe)


def test_paths_beside_the_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "study").mkdir()
    (tmp_path / "elsewhere").mkdir()
    table(tmp_path / "study" / "a.csv", ["a", "b"] * 10)
    (tmp_path / "study" / "digits").mkdir()  # a name that is known stays one
    monkeypatch.chdir(tmp_path / "elsewhere")
    beside = tmp_path / "study"
    found = {"a.csv": str(beside / "a.csv"), "digits": "digits", "unlike.parquet": "unlike.parquet"}
    found["b.csv"] = str(beside / "b.csv")  # so that what is like it is named
    for dataset, expected in found.items():
        (tmp_path / "study" / "r.toml").write_text(f'[data]\ndataset = "{dataset}"\n[[stages]]\nmethod = "fedcof"\n')
        recipe = Recipe.load(tmp_path / "study" / "r.toml")
        assert recipe.data is not None
        assert recipe.data.dataset == expected
    table(tmp_path / "elsewhere" / "a.csv", ["c", "d"] * 10)  # what is there from where the command runs comes first
    (tmp_path / "study" / "r.toml").write_text('[data]\ndataset = "a.csv"\n[[stages]]\nmethod = "fedcof"\n')
    assert Recipe.load(tmp_path / "study" / "r.toml").data.dataset == "a.csv"  # type: ignore[union-attr]


def test_the_nearest_name_of_a_misspelt_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table(tmp_path / "patients.csv", ["a", "b"] * 10)
    with pytest.raises(HeadstartError, match=r"it is not there; did you mean '.*patients\.csv'\?"):
        load(tmp_path / "pateints.csv")
    (tmp_path / "study").mkdir()
    with pytest.raises(HeadstartError, match=r"there is no folder .*stduy; did you mean '.*study'\?"):
        load(tmp_path / "stduy" / "a.npz")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert load("~/patients.csv").classes == ("a", "b")


def test_a_column_of_splits_is_read(tmp_path: Path) -> None:
    names = ["train", "Training", "test", "val"]
    rows = [f"text {n},{'ab'[n // 4 % 2]},{names[n % 4]}" for n in range(40)]
    path = tmp_path / "a.csv"
    path.write_text("\n".join(["text,label,Split", *rows]))
    found = load(path)
    assert [found.train.raw(0, 2), found.test.raw(0, 2)] == [["text 0", "text 1"], ["text 2", "text 6"]]
    assert found.validation is not None
    assert [len(found.train), len(found.validation), len(found.test)] == [20, 10, 10]
    path.write_text(path.read_text().replace("39,b,val", "39,b,later"))
    with pytest.raises(
        HeadstartError, match=r"'Split' names splits, and in row 39 \(from 0\) it is 'later'; write train"
    ):
        load(path)
    path.write_text("text,label,split\n" + "\n".join(f"text {n},{'ab'[n % 2]},{n % 3} of 3" for n in range(20)))
    assert len(load(path).test) == 4  # a column of something else


def test_a_label_that_is_called_split_is_a_label(tmp_path: Path) -> None:
    rows = [f"text {n},{('train', 'test')[n % 2]}" for n in range(20)]
    (tmp_path / "a.csv").write_text("\n".join(["text,split", *rows]))
    assert load(tmp_path / "a.csv", label_column="split").classes == ("test", "train")


def test_what_is_not_read_is_answered_with_what_to_do(tmp_path: Path) -> None:
    for name, fix in (("a.xlsx", "save the sheet as CSV"), ("b.zip", "unpack it")):
        (tmp_path / name).write_bytes(b"PK")
        with pytest.raises(HeadstartError, match=rf"{name} holds no data: .*, or an \.npz; {fix}$"):
            load(tmp_path / name)
    (tmp_path / "phone" / "cat").mkdir(parents=True)
    (tmp_path / "phone" / "cat" / "1.heic").write_bytes(b"1")
    with pytest.raises(HeadstartError, match=r"1 file is not read as images \(1 \.heic\).*; save them as JPEG or PNG$"):
        load(tmp_path / "phone")
    for number in range(10):
        draw(tmp_path / "flat" / f"{number}.png", number)
    with pytest.raises(
        HeadstartError, match=r"one class only \(flat\); .*the folder that an image lies in is its class"
    ):
        load(tmp_path / "flat")
