"""Data in memory give what the same data in files give."""

from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pandas
import pytest
import torch
from PIL import Image
from sklearn.datasets import load_digits

import headstart
from headstart.config.recipe import Data
from headstart.data.examples import codes, decode_image
from headstart.data.memory import from_memory, inputs, names_clients
from headstart.errors import HeadstartError

X, Y = (array[:300] for array in load_digits(return_X_y=True))
SPLIT, CLIENT = np.where(np.arange(300) % 5 == 4, 2, 0), np.arange(300) % 7
RECIPE: dict[str, Any] = {"model": {"backbone": "features"}, "stages": [{"method": "fedcof"}]}
MEMORY = Data(dataset="memory")


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> headstart.Result:
    """The run of the same examples in a file, which `_from_npz` reads."""
    path = tmp_path_factory.mktemp("features") / "digits.npz"
    np.savez(path, X=X, y=Y, split=SPLIT, client=CLIENT)
    return headstart.run({**RECIPE, "data": {"dataset": str(path), "partition": {"kind": "natural"}}})


def frame(rows: Any) -> pandas.DataFrame:
    return pandas.DataFrame(X[rows], columns=[f"f{number}" for number in range(64)])


@pytest.mark.parametrize(
    "data",
    [
        {"X": X, "y": Y, "split": SPLIT, "client": CLIENT},
        {"X": X, "y": Y, "split": np.where(SPLIT == 2, "test", "train"), "client": [str(c) for c in CLIENT]},
        {"X": torch.tensor(X), "y": torch.tensor(Y), "split": torch.tensor(SPLIT), "client": CLIENT.tolist()},
        {"X": X.tolist(), "y": Y.tolist(), "split": SPLIT.tolist(), "client": pandas.Series(CLIENT)},
        {
            name: {"X": frame(rows), "y": pandas.Series(Y[rows]), "client": CLIENT[rows]}
            for name, rows in (("train", SPLIT == 0), ("test", SPLIT == 2))
        },
    ],
    ids=["arrays", "names", "tensors", "lists", "frames by split"],
)
def test_arrays_give_the_model_of_the_same_file(data: Any, expected: headstart.Result) -> None:
    found = headstart.run(RECIPE, data=data)
    assert found.head.weight.tobytes() == expected.head.weight.tobytes()
    assert found.accuracy == expected.accuracy
    assert found.federation.names == expected.federation.names == tuple("0123456")


def test_a_pair_and_a_torch_data_set_are_the_same() -> None:
    table = {**RECIPE, "data": {"partition": {"kind": "iid", "clients": 3}}}
    whole = torch.utils.data.TensorDataset(torch.tensor(X), torch.tensor(Y))
    found = [headstart.run(table, data=data) for data in ((X, Y), whole)]
    assert found[0].head.weight.tobytes() == found[1].head.weight.tobytes()
    assert (found[0].accuracy or 0) > 0.8


def test_images_of_every_kind_are_the_same_pixels() -> None:
    rng = np.random.default_rng(0)
    pixels = rng.integers(0, 256, (4, 6, 5, 3), np.uint8)
    kinds: dict[str, Any] = {
        "bytes": pixels,
        "colours first": torch.tensor(pixels).permute(0, 3, 1, 2),
        "shares": pixels / 255,
        "list of arrays": list(pixels),
        "PIL": [Image.fromarray(each) for each in pixels],
    }
    for name, given in kinds.items():
        kind, source = inputs(given)
        assert kind == "image", name
        shown = [np.asarray(decode_image(value, name)) for value in source]
        np.testing.assert_array_equal(np.stack(shown), pixels, name)
    assert inputs(pixels[:, None, :, :, 0])[1].shape == (4, 6, 5)  # [n, 1, H, W]


def test_an_image_keeps_its_sixteen_bits_and_is_turned_upright() -> None:
    deep = np.array([[0, 257], [32896, 65535]], np.uint16)
    (_, source) = inputs([Image.fromarray(deep)])
    np.testing.assert_array_equal(np.asarray(decode_image(source[0], "")), deep / 257)
    lying = Image.fromarray(np.arange(6, dtype=np.uint8).reshape(2, 3))
    lying.getexif()[0x0112] = 6  # to be turned by a quarter
    assert decode_image(inputs([lying])[1][0], "").size == (2, 3)


@pytest.mark.parametrize("kind", [np.float32, np.int32])
def test_an_image_of_32_bits_keeps_them_and_one_in_inks_is_read(kind: type) -> None:
    deep = np.array([[0, 100_000]], kind)
    (_, source) = inputs([Image.fromarray(deep)])
    np.testing.assert_array_equal(np.asarray(decode_image(source[0], "", (0, 200_000))), [[0, 127.5]])
    with pytest.raises(HeadstartError, match=r"^example 0: grey of 32 bits"):
        decode_image(source[0], "example 0")
    (_, source) = inputs([Image.new("CMYK", (1, 1), (255, 0, 0, 0))])
    np.testing.assert_array_equal(np.asarray(decode_image(source[0], "")), [[[0, 255, 255]]])


def test_tables_and_texts() -> None:
    texts, labels = ["a b", "c d", "e f", "g h"] * 3, ["x", "y"] * 6
    table = {"text": texts, "label": labels, "site": ["p", "q", "r"] * 4}
    data = Data(dataset="memory", client_column="site", partition={"kind": "natural"})
    for given in (
        pandas.DataFrame(table),
        datasets.Dataset.from_dict(table),
        datasets.DatasetDict(train=datasets.Dataset.from_dict(table)),
    ):
        found = from_memory(given, data)
        assert (found.kind, found.classes, found.clients) == ("text", ("x", "y"), ("p", "q", "r"))
        assert found.train.raw(0, 2) == ["a b", "c d"]
    pairs = from_memory(([("a", "b"), ("c", "d")], ["x", "y"]), MEMORY)
    assert pairs.train.raw(0, 2) == [("a", "b"), ("c", "d")]


def test_numbers_are_regressed() -> None:
    found = from_memory((X, X[:, :2] / 3 + 0.1), MEMORY)
    assert (found.target, found.classes) == ("regression", ("y0", "y1"))
    np.testing.assert_array_equal(found.train.targets, X[:, :2] / 3 + 0.1)


@pytest.mark.parametrize(
    ("data", "fault"),
    [
        ((X, Y[:3]), "y has 3 values for 300 examples"),
        ({"X": X, "y": Y, "weight": Y}, "weight is not known; accepted: X, y, split, client, domain"),
        ({"X": X, "y": Y, "split": SPLIT + 1}, "split must be 0 (train), 1 (validation) or 2 (test)"),
        ({"X": X, "y": Y, "split": ["tset"] * 300}, "split must be 0 (train)"),
        ((X * np.nan, Y), "300 of 300 rows of X hold NaN"),
        ((np.zeros((4, 5, 6, 7)), np.arange(4)), "give features [n, d], or images"),
        ((np.full((4, 5, 6, 3), 200.0), np.arange(4)), "shares between 0 and 1"),
        (([np.zeros((2, 2), np.uint8), np.zeros((3, 2), np.uint8)], [0, 1]), "as PIL images"),
        (([], []), "X is empty"),
        ({"image": X, "label": Y}, "a mapping without X and y: it has image, label; give a pair (X, y)"),
        ({"X": X}, "a mapping without y: it has X; give"),
        (3, "a int is not understood; give a pair (X, y)"),
        ((X, np.array([None] * 300)), "give text or whole numbers"),
    ],
)
def test_what_is_no_data_is_refused_with_a_sentence(data: Any, fault: str) -> None:
    with pytest.raises(HeadstartError) as caught:
        headstart.run(RECIPE, data=data)
    assert fault in str(caught.value)


def test_a_run_goes_on_with_its_own_data_only(tmp_path: Path) -> None:
    def stop(line: dict[str, Any]) -> None:
        if line["round"] == 2:
            raise KeyboardInterrupt

    table = {**RECIPE, "data": {"partition": {"kind": "iid", "clients": 3}}}
    table["stages"] = [{"method": "fedavg", "train": "head", "rounds": 3, "lr": 0.01}]
    with pytest.raises(KeyboardInterrupt):
        headstart.run(table, tmp_path / "run", on_metrics=stop, data=(X, Y))
    with pytest.raises(HeadstartError, match="is a run on other data"):
        headstart.run(table, tmp_path / "run", True, data=(X + 1, Y))
    with pytest.raises(HeadstartError, match="is a run on other data"):
        headstart.run(table, tmp_path / "run", True, data=(X, 9 - Y))
    resumed = headstart.run(table, tmp_path / "run", True, data=(X, Y))
    assert resumed.head.weight.tobytes() == headstart.run(table, data=(X, Y)).head.weight.tobytes()
    with pytest.raises(HeadstartError, match="the data of this run were in memory"):
        headstart.Result.load(tmp_path / "run").federation  # noqa: B018


def test_several_tasks_have_data_in_their_recipe() -> None:
    task = {"dataset": "digits", "name": "a"}
    with pytest.raises(HeadstartError, match="several tasks have data each"):
        headstart.run({**RECIPE, "tasks": [task, task | {"name": "b"}]}, data=(X, Y))


def test_a_column_client_says_who_holds_an_example() -> None:
    frame = pandas.DataFrame({"text": ["a", "b", "c"] * 2, "label": ["x", "y"] * 3, "client": list("pqr") * 2})
    for given in (
        frame,
        datasets.Dataset.from_pandas(frame),
        {"train": frame, "test": frame},
        datasets.DatasetDict(train=datasets.Dataset.from_pandas(frame)),
    ):
        assert names_clients(given)
    for given in (frame.drop(columns="client"), {"train": frame, "test": frame.drop(columns="client")}, (X, Y)):
        assert not names_clients(given)


def test_clients_with_numbers_are_in_the_order_of_their_names() -> None:
    ids = np.array([10, 2, 10, -1, 100], np.int64)
    for values in (ids, ids.tolist(), [str(each) for each in ids]):
        numbers, names = codes(values)
        assert names == ("-1", "10", "100", "2")
        assert numbers.tolist() == [1, 3, 1, 0, 2]


def test_features_that_lie_side_by_side_are_not_copied() -> None:
    given, y = np.arange(40, dtype=np.float32).reshape(10, 4), np.arange(10) % 2
    ends, mixed = np.repeat([2, 0, 2], [1, 7, 2]), np.arange(10) % 2 * 2
    together = from_memory({"X": given, "y": y, "split": ends}, MEMORY).train
    assert np.shares_memory(together.features(), given)
    assert np.array_equal(together.features(), given[1:8])
    apart = from_memory({"X": given, "y": y, "split": mixed}, MEMORY).train
    assert np.array_equal(apart.features(), given[::2])
    assert (together.dim, apart.dim) == (4, 4)


def test_a_row_that_is_not_finite_is_named_wherever_it_is() -> None:
    given = np.zeros((70_000, 2), np.float32)  # several blocks
    given[69_999, 1] = np.inf
    with pytest.raises(HeadstartError, match=r"1 of 70000 rows .* at row 69999"):
        from_memory((given, np.zeros(70_000, np.int64)), MEMORY)
