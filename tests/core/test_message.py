import contextlib
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from headstart.core.message import FileArrays, Message
from headstart.errors import HeadstartError, MessageError

ARRAYS = hnp.arrays(
    st.sampled_from([np.dtype(name) for name in ("float32", "float64", "int32", "int64", "uint8", "bool")]),
    hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=7),
    elements={"allow_nan": False, "allow_infinity": False},
)
NUMBERS = st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False, allow_infinity=False) | st.booleans()
MESSAGES = st.builds(
    Message,
    st.dictionaries(st.text("abcxyz.é", min_size=1, max_size=5), ARRAYS, max_size=5),
    st.dictionaries(st.text('abc"é', min_size=1, max_size=4), NUMBERS | st.text(max_size=4), max_size=3),
)


@given(MESSAGES)
@settings(deadline=None)
def test_a_message_survives_the_wire_and_knows_its_size(message: Message) -> None:
    data = message.to_bytes()
    again = Message.from_bytes(data)
    assert len(data) == message.nbytes
    assert again.scalars == message.scalars
    assert [type(value) for value in again.scalars.values()] == [type(value) for value in message.scalars.values()]
    assert again.arrays.keys() == message.arrays.keys()
    for name, array in message.arrays.items():
        assert again.arrays[name].dtype == array.dtype
        np.testing.assert_array_equal(again.arrays[name], array)


@given(MESSAGES)
@settings(deadline=None)
def test_a_message_in_a_file_is_its_bytes_and_is_read_piece_by_piece(
    tmp_path_factory: pytest.TempPathFactory, message: Message
) -> None:
    path = tmp_path_factory.mktemp("messages") / "one.safetensors"
    message.to_file(path)
    assert path.read_bytes() == message.to_bytes()
    again = Message.from_file(path)
    assert again.scalars == message.scalars
    assert sorted(again.arrays) == sorted(message.arrays)
    for name, array in message.arrays.items():
        assert again.arrays[name].dtype == array.dtype
        np.testing.assert_array_equal(again.arrays[name], array)
    behind = FileArrays(path, "a")
    assert {f"a{name}" for name in behind} == {name for name in message.arrays if name.startswith("a")}
    with pytest.raises(KeyError):
        behind["not there"]


def test_what_nobody_would_read_is_not_written_either_and_a_damaged_file_is_named(tmp_path: Path) -> None:
    many = Message({"x" * 200 + str(number): np.zeros(1, np.float32) for number in range(10_000)})
    with pytest.raises(HeadstartError, match="the names and shapes of 10000 arrays take"):
        many.to_file(tmp_path / "many")
    Message({"x": np.zeros(100, np.float32)}).to_file(tmp_path / "cut")
    (tmp_path / "cut").write_bytes((tmp_path / "cut").read_bytes()[:-1])
    with pytest.raises(MessageError, match="cut is not a message: "):
        Message.from_file(tmp_path / "cut")


@given(MESSAGES, st.data())
@settings(deadline=None)
def test_damaged_bytes_are_refused_or_read_never_a_crash(message: Message, data: st.DataObject) -> None:
    raw = bytearray(message.to_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(raw)))
    for damaged in (bytes(raw), bytes(raw[:cut])):
        with contextlib.suppress(MessageError):  # anything else is a failure
            Message.from_bytes(damaged)


def test_arrays_are_in_the_order_of_the_bytes_and_belong_to_the_reader() -> None:
    """By dtype and name, every time; who writes into one changes neither another nor what was sent."""
    names = [f"{letter}{number}" for letter in "zyx" for number in range(9)]
    data = Message({name: np.full(2, 7, np.float32) for name in names} | {"last": np.ones(3, np.int64)}).to_bytes()
    copy = bytes(bytearray(data))
    message = Message.from_bytes(data)
    assert list(message.arrays) == ["last", *sorted(names)]
    message.arrays["x0"][:] = 5  # type: ignore[index]
    assert data == copy
    assert all((array == 7).all() for name, array in message.arrays.items() if name not in ("x0", "last"))


def test_not_a_message() -> None:
    header = json.dumps({"__metadata__": {"scalars": "[1, 2]"}}).encode()
    for data in (
        b"",
        b"\x80\x04pickle",
        (1 << 62).to_bytes(8, "little") + b"{}",
        len(header).to_bytes(8, "little") + header,
    ):
        with pytest.raises(MessageError, match="not a message"):
            Message.from_bytes(data)


@pytest.mark.parametrize(
    ("array", "why"),
    [
        (None, "missing"),
        (np.zeros((2, 3), np.float64), "float64, not float32"),
        (np.zeros((2, 4), np.float32), r"shape \[2, 4\], not \[any, 3\]"),
        (np.zeros(3, np.float32), r"shape \[3\]"),
        (np.full((1, 3), np.nan, np.float32), "NaN or infinity"),
        (np.full((1, 3), np.inf, np.float32), "NaN or infinity"),
    ],
)
def test_arrays_are_checked_before_use(array: np.ndarray | None, why: str) -> None:
    message = Message({} if array is None else {"sums": array})
    with pytest.raises(MessageError, match=why):
        message.array("sums", "float32", (None, 3))
