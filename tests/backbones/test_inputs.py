"""Batches for a body that trains: the right examples, prepared once where there is room."""

import io
import threading
from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from headstart.backbones import Backbone, Inputs
from headstart.backbones.inputs import _cuts
from headstart.backbones.transforms import ImageTransform, TextTransform
from headstart.data import Examples
from headstart.errors import HeadstartError
from tests.backbones import tiny_backbones
from tests.backbones.tiny_backbones import means_backbone, pictures

ONE = 4 * 4 * 3 * 4  # bytes of a prepared picture


class Counting(ImageTransform):
    """The usual transform, and a list of the examples it was asked for."""

    calls: list[str] = []  # noqa: RUF012 (a frozen dataclass; every test starts with an empty one)

    def __call__(self, value: Any, where: str) -> npt.NDArray[np.float32]:
        self.calls.append(where)
        return super().__call__(value, where)


@pytest.fixture
def counting(monkeypatch: pytest.MonkeyPatch) -> Backbone:
    monkeypatch.setattr(Counting, "calls", [])
    return replace(means_backbone(), transform=Counting(4))


def rows(*batches: list[int]) -> list[npt.NDArray[np.int64]]:
    return [np.array(batch, np.int64) for batch in batches]


def check(inputs: Inputs, examples: Examples, batches: list[npt.NDArray[np.int64]]) -> None:
    found = list(inputs.batches(batches))
    assert len(found) == len(batches)
    for (images,), batch in zip(found, batches, strict=True):
        assert images.dtype == torch.float32
        np.testing.assert_array_equal(images, examples.source[examples.rows[batch]])


def test_batches_come_in_order_with_their_examples() -> None:
    examples = pictures(10)
    check(Inputs(means_backbone(), examples, "train"), examples, rows([3, 1, 4], [1, 5, 9, 2], [6], [0, 3, 3]))


def test_positions_in_a_view_are_those_of_the_view() -> None:
    view = pictures(10).take(np.array([7, 2, 2, 9]))
    check(Inputs(means_backbone(), view, "train"), view, rows([0, 3], [1, 2]))


def test_no_batches() -> None:
    inputs = Inputs(means_backbone(), pictures(3), "train")
    assert list(inputs.batches([])) == []
    check(inputs, pictures(3), rows([2, 0]))


def test_an_example_is_prepared_once(counting: Backbone) -> None:
    examples = pictures(10)
    inputs = Inputs(counting, examples, "birds train")
    for batches in (rows([0, 1, 2], [3, 4]), rows([4, 0], [1, 3, 2]), rows([7, 2])):
        check(inputs, examples, batches)
    assert Counting.calls == [f"birds train: example {row}" for row in (0, 1, 2, 3, 4, 7)]


def test_where_there_is_no_room_examples_are_prepared_again(
    counting: Backbone, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headstart.backbones.inputs._ROOM", 3 * ONE + ONE // 2)
    examples = pictures(8)
    inputs = Inputs(counting, examples, "train")
    epoch = rows([5, 0, 1], [2, 7, 6], [3, 4])
    check(inputs, examples, epoch)
    assert len(Counting.calls) == 8
    for _ in range(2):
        Counting.calls.clear()
        check(inputs, examples, epoch)
        assert sorted(Counting.calls) == [f"train: example {row}" for row in (2, 3, 4, 6, 7)]  # not 5, 0 and 1


def test_no_room_at_all(counting: Backbone, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headstart.backbones.inputs._ROOM", 0)
    examples = pictures(4)
    inputs = Inputs(counting, examples, "train")
    for _ in range(2):
        check(inputs, examples, rows([0, 1], [2, 3, 0]))
    assert len(Counting.calls) == 2 * 5


def test_a_crop_does_not_keep_the_whole_image_in_memory() -> None:
    wide = np.random.default_rng(5).integers(0, 256, (2, 4, 40, 3), dtype=np.uint8)
    examples = Examples("image", wide, (), np.arange(2), np.zeros(2, np.int64))
    inputs = Inputs(replace(means_backbone(), transform=ImageTransform(4, resize=4)), examples, "train")
    ((images,),) = inputs.batches(rows([0, 1]))
    np.testing.assert_array_equal(images, wide[:, :, 18:22])
    kept = [value if value.base is None else value.base for value in inputs._prepared.values()]
    assert [value.nbytes for value in kept] == [ONE, ONE]


def test_one_batch_is_prepared_ahead_and_no_more(counting: Backbone) -> None:
    asked: list[int] = []

    def batches() -> Any:
        for number, batch in enumerate(rows([0, 1], [2, 3], [4, 5], [6, 7])):
            asked.append(number)
            yield batch

    found = Inputs(counting, pictures(8), "train").batches(batches())
    next(found)
    assert asked == [0, 1]
    next(found)
    assert asked == [0, 1, 2]


def test_the_next_batch_is_prepared_while_this_one_is_used(counting: Backbone) -> None:
    ready = threading.Event()

    class Telling(Counting):
        def __call__(self, value: Any, where: str) -> npt.NDArray[np.float32]:
            prepared = super().__call__(value, where)
            if where.endswith(" 2"):
                ready.set()
            return prepared

    found = Inputs(replace(counting, transform=Telling(4)), pictures(3), "train").batches(rows([0], [1], [2]))
    next(found)
    next(found)
    assert ready.wait(timeout=30)  # nobody has asked for it yet


@pytest.mark.parametrize("damage", [b"no image", None])
def test_a_damaged_image_is_named(damage: bytes | None) -> None:
    rng = np.random.default_rng(4)
    images = rng.integers(0, 256, (6, 4, 4, 3), dtype=np.uint8)
    records: list[dict[str, Any]] = []
    for number, image in enumerate(images):
        buffer = io.BytesIO()
        Image.fromarray(image).save(buffer, "PNG")
        records.append({"bytes": buffer.getvalue(), "path": f"{number}.png"})
    records[4]["bytes"] = damage or records[4]["bytes"][:-30]

    class Table:
        def __getitem__(self, rows: list[int]) -> dict[str, list[Any]]:
            return {"image": [records[row] for row in rows]}

    # Example 3 of the split is row 4 of the table.
    split = np.array([0, 1, 2, 4, 5])
    examples = Examples("image", Table(), ("image",), split, np.zeros(5, np.int64))
    inputs = Inputs(means_backbone(), examples, "birds train")
    found = inputs.batches(rows([0, 1], [2, 3], [4]))
    np.testing.assert_array_equal(next(found)[0], images[[0, 1]])
    with pytest.raises(HeadstartError, match=r"^birds train: example 3 \(4\.png\) is not a readable image: "):
        next(found)
    ((whole,),) = inputs.batches(rows([4, 0]))  # the others are still to be had
    np.testing.assert_array_equal(whole, images[[5, 0]])


def inputs_of(texts: list[str]) -> Inputs:
    class Table:
        def __getitem__(self, rows: list[int]) -> dict[str, list[str]]:
            return {"text": [texts[row] for row in rows]}

    count = len(texts)
    examples = Examples("text", Table(), ("text",), np.arange(count), np.zeros(count, np.int64))
    transform = TextTransform(tiny_backbones.tokenizer(segments=False), 64)
    return Inputs(replace(means_backbone(), kind="text", transform=transform), examples, "train")


def test_texts_are_padded_to_the_longest_of_their_batch() -> None:
    inputs = inputs_of(["cat", "the cat sat", "sat the", "the"])
    (ids, mask), (short, _) = inputs.batches(rows([0, 1], [3, 0]))
    # [CLS] is 0, padding 1, [SEP] 2, then "the", "cat" and "sat" from 4.
    assert ids.tolist() == [[0, 5, 2, 1, 1], [0, 4, 5, 6, 2]]
    assert mask.tolist() == [[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]]
    assert short.tolist() == [[0, 4, 2], [0, 5, 2]]


@given(st.lists(st.integers(1, 30), min_size=1, max_size=8), st.integers(1, 8), st.integers(0, 40))
def test_texts_are_cut_into_groups_that_take_the_least(lengths: list[int], most: int, price: int) -> None:
    ascending = np.sort(np.array(lengths))

    def taken(cuts: Sequence[int]) -> float:
        groups = np.split(ascending, cuts)
        return sum(len(each) * each[-1] + price if len(each) <= most else np.inf for each in groups)

    ways = (cuts for count in range(len(lengths)) for cuts in combinations(range(1, len(lengths)), count))
    assert taken(_cuts(ascending, most, price)) == min(map(taken, ways))


def test_images_are_in_full_groups_in_their_order_and_none_is_read_for_it(counting: Backbone) -> None:
    groups = Inputs(counting, pictures(10), "train").groups(np.array([7, 1, 3, 0, 2]), 2, 1 << 16)
    assert [each.tolist() for each in groups] == [[0, 1], [2, 3], [4]]
    assert not Counting.calls


def test_texts_are_in_groups_of_like_length() -> None:
    """A batch more for the long one, where it saves more than that costs: here 3 · 37 tokens of padding."""
    inputs = inputs_of([" ".join(["cat"] * count) for count in (3, 40, 2, 3)])
    dear, cheap = (inputs.groups(np.arange(4), 4, price) for price in (112, 110))
    assert [each.tolist() for each in dear] == [[2, 0, 3, 1]]
    assert [each.tolist() for each in cheap] == [[2, 0, 3], [1]]
