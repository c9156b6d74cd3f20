"""Messages from someone who means harm: damaged bytes, and well-formed answers that cannot be right.

Bytes are those of real messages of every method, damaged at random. Answers are those of real clients, altered in every
way that a sender could think of, one at a time and several at once. What counts is that each is refused with
`MessageError`, or used; nothing else may happen, and what is used must leave the server with finite numbers. Statistics
that no features have are refused; possible and false ones can still make a closed form unsolvable, which stops a run
with a sentence.
"""

import io
import json
import pickle
import tracemalloc
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from copy import deepcopy
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headstart.config.recipe import Recipe
from headstart.core.ledger import Ledger
from headstart.core.message import Message
from headstart.core.params import norm
from headstart.core.reply import Reply
from headstart.core.state import pack
from headstart.data import Federation
from headstart.engine import local
from headstart.engine.client import ClientRuntime
from headstart.errors import HeadstartError, MessageError
from headstart.methods import Population, Task
from headstart.solvers.cohort import Cohort
from tests.helpers import Bench, cohort_of, context_of, played_on, round_trip
from tests.variants import CLIENTS, LOCAL, VARIANTS, recipe_of

# Several tasks: each by itself, and with a server that must not know whose task is which.
TASKS = {
    "tasks fedcof": {"method": "fedcof"},
    "tasks scaffold": LOCAL | {"method": "scaffold"},
    "tasks fednova": LOCAL | {"method": "fednova"},
    "tasks hidden": LOCAL | {"method": "fedavg", "hide_task": True},
    "tasks hidden int8": LOCAL | {"method": "fedavg", "hide_task": True, "compress": "int8"},
}
# What else is done to updates on their way.
CHANNELS = {
    "int8": LOCAL | {"method": "scaffold", "compress": "int8"},
    "max_norm": LOCAL | {"method": "fedavg", "max_norm": 0.5},
    "median": LOCAL | {"method": "fedavg", "combine": "median"},
    "private": LOCAL | {"method": "fedavg", "weighting": "uniform", "privacy": {"epsilon": 50.0}},
    "private int8": LOCAL
    | {"method": "fedavg", "weighting": "uniform", "privacy": {"epsilon": 50.0, "noise": "client"}, "compress": "int8"},
}
ALL = (*VARIANTS, *TASKS, *CHANNELS)


def examples(count: int) -> settings:
    """The same ones in every run."""
    checks = list(HealthCheck)
    return settings(max_examples=count, deadline=None, derandomize=True, database=None, suppress_health_check=checks)


def shown(error: MessageError) -> bool:
    """Whether a refusal can be kept and shown, whatever the sender wrote."""
    return len(str(error)) < 1000 and str(error).isprintable()


# -------------------------------------------------------------------------------------------------------- real messages


@dataclass(frozen=True)
class Server:
    """In its second round, with two answers in, and the answer of a third client at the door."""

    bench: Bench
    state: Any
    total: Any
    """Of what was heard in the round."""
    reply: Reply
    messages: tuple[bytes, ...]
    """What has been sent in either direction, and a checkpoint."""

    def hear(self, message: Message) -> Any:
        """The total with the answer at the door in this form."""
        total = deepcopy(self.total)
        self.bench.add(total, self.state, replace(self.reply, message=message), 1)
        return total

    def after(self, total: Any) -> Any:
        """The state after the round."""
        return self.bench.method.server_update(self.state, self.bench.channel.finish(total, 1), 1)


@cache
def federation() -> Federation:
    return Federation.of(recipe_of("fedavg"))


def built(variant: str) -> Bench:
    if variant in VARIANTS:
        (stage,) = recipe_of(variant).stages
    else:
        (stage,) = Recipe.parse({"data": {"dataset": "x"}, "stages": [(TASKS | CHANNELS)[variant]]}).stages
    tasks = tuple(Task(name, 5, Population(CLIENTS // 2, 700)) for name in ("low", "high"))
    examples = int(federation().sizes.sum())
    return Bench(stage, context_of(stage, 10, 64, (0, 0), CLIENTS, examples, tasks=tasks if variant in TASKS else ()))


def asked(client: int, bench: Bench, variant: str) -> Cohort:
    train = federation().dataset.train
    rows, _ = federation().rows_of(np.array([client]))
    labels, task = train.labels[rows], 0
    if variant in TASKS:
        task = client % 2
        mine = labels // 5 == task
        rows, labels = rows[mine], labels[mine] % 5
    return cohort_of(bench, client, train.features(), rows, labels, task=task)


@cache
def server(variant: str) -> Server:
    bench = built(variant)
    state, messages = bench.init(), []
    for number, clients in enumerate(([0, 1, 2, 3], [4, 5, 6])):
        total = bench.channel.total()
        for client in clients:
            cohort = asked(client, bench, variant)
            instruction = bench.broadcast(state, number, -1, cohort.task)
            (reply,) = bench.answer(cohort, round_trip(instruction))
            messages += [instruction, reply.message]
            if client == 6:
                reply = replace(reply, message=round_trip(reply.message))
                messages.append(pack(state))
                return Server(bench, state, total, reply, tuple(message.to_bytes() for message in messages[-5:]))
            bench.add(total, state, reply, number)
        state = bench.method.server_update(state, bench.channel.finish(total, number), number)
    raise AssertionError


@cache
def corpus() -> tuple[bytes, ...]:
    """Different messages of all methods, small ones first."""
    found = {message for variant in ALL for message in server(variant).messages}
    return tuple(sorted(found, key=lambda message: (len(message), message)))


# --------------------------------------------------------------------------------------------------------------- bytes


def read(data: bytes) -> Message | None:
    """The message, or None where it is refused; memory is bounded by what was sent, and pickle is not asked."""
    message, sentence = None, True
    tracemalloc.start()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            message = Message.from_bytes(data)
    except MessageError as error:
        sentence = shown(error)
    finally:
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert sentence
    assert peak < 40 * len(data) + 100_000
    if message is None:
        return None
    # What was read can be weighed, sent on, and is the same when it arrives.
    again = message.to_bytes()
    assert message.nbytes == len(again)
    assert read_arrays(Message.from_bytes(again)) == read_arrays(message)
    return message


def read_arrays(message: Message) -> tuple[Any, ...]:
    arrays = {name: (str(a.dtype), a.shape, a.tobytes()) for name, a in message.arrays.items()}
    return arrays, {name: (type(value), value) for name, value in message.scalars.items()}


def packed(header: bytes | dict[str, Any], data: bytes = b"", length: int | None = None) -> bytes:
    header = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(header) if length is None else length).to_bytes(8, "little") + header + data


def parted(message: bytes) -> tuple[dict[str, Any], bytes]:
    length = int.from_bytes(message[:8], "little")
    return json.loads(message[8 : 8 + length]), message[8 + length :]


INTEGERS = st.sampled_from([-1, 0, 1, 2, 7, 2**31, 2**40, 2**62, 2**63 - 1, 2**63, 2**64 - 1, 2**64, 10**30])
JSON = st.recursive(
    st.none() | st.booleans() | st.floats() | INTEGERS | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=6,
)
DTYPES = st.sampled_from(
    ["F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2", "F4", "I64", "I8", "U64", "U8", "BOOL", "C64", "O", "", "f32"]
)


@st.composite
def damaged(draw: st.DrawFn) -> bytes:
    """A real message after one to three accidents, or attacks, on its bytes."""
    data = bytearray(draw(st.sampled_from(corpus())))
    place = st.integers(0, max(len(data) - 1, 0)) | st.integers(0, min(len(data) - 1, 300))
    for _ in range(draw(st.integers(1, 3))):
        kind = draw(st.sampled_from(["flip", "cut", "insert", "delete", "splice", "length", "append", "byte"]))
        where = min(draw(place), max(len(data) - 1, 0))
        if kind == "flip" and data:
            data[where] ^= 1 << draw(st.integers(0, 7))
        elif kind == "byte" and data:
            data[where] = draw(st.sampled_from(b'\x00\xff{}[]",:-0189eE.\\u'))
        elif kind == "cut":
            del data[where:]
        elif kind == "insert":
            data[where:where] = draw(st.binary(min_size=1, max_size=20))
        elif kind == "delete":
            del data[where : where + draw(st.integers(1, 30))]
        elif kind == "splice":
            other = draw(st.sampled_from(corpus()))
            data[where:] = other[min(draw(place), len(other)) :]
        elif kind == "length":
            value = draw(st.integers(0, 2 * len(data)) | st.sampled_from([2**25, 2**31, 2**63, 2**64 - 1]))
            data[:8] = value.to_bytes(8, "little")
        else:
            data += draw(st.binary(min_size=1, max_size=20))
    return bytes(data)


@st.composite
def rewritten(draw: st.DrawFn) -> bytes:
    """A real message whose header says something else: dtypes, shapes, offsets, names, scalars."""
    header, data = parted(draw(st.sampled_from(corpus())))
    for _ in range(draw(st.integers(1, 3))):
        names = [name for name in header if name != "__metadata__"]
        kind = draw(st.sampled_from(["dtype", "shape", "side", "data_offsets", "entry", "name", "metadata", "scalars"]))
        if kind == "metadata":
            header["__metadata__"] = draw(JSON)
        elif kind == "scalars":
            text = draw(st.builds(json.dumps, JSON) | st.text(max_size=10) | st.just("[" * 3000))
            header["__metadata__"] = {"scalars": text}
        elif names:
            name = draw(st.sampled_from(names))
            about = header[name]
            if not isinstance(about, dict) or kind == "entry":
                header[name] = draw(JSON)
            elif kind == "name":
                header[draw(st.text(max_size=8))] = header.pop(name)
            elif kind == "dtype":
                about["dtype"] = draw(DTYPES | JSON)
            elif kind == "side" and isinstance(about.get("shape"), list):
                about["shape"] = draw(st.permutations([*about["shape"], draw(INTEGERS)]))
            else:
                about[kind if kind != "side" else "shape"] = draw(st.lists(INTEGERS, max_size=4) | JSON)
    return packed(header, data)


@examples(200)
@given(st.binary(max_size=300) | st.builds(packed, st.binary(max_size=200), st.binary(max_size=50)))
def test_any_bytes_are_refused_or_read(data: bytes) -> None:
    read(data)


@examples(250)
@given(damaged())
def test_damaged_messages_are_refused_or_read(data: bytes) -> None:
    read(data)


@examples(250)
@given(rewritten())
def test_messages_with_another_header_are_refused_or_read(data: bytes) -> None:
    read(data)


def test_all_real_messages_are_read() -> None:
    assert len(corpus()) > len(VARIANTS)
    for data in corpus():
        assert read(data) is not None


def entry(dtype: str = "F32", shape: object = (1,), offsets: object = (0, 4), **more: object) -> dict[str, Any]:
    return {"a": {"dtype": dtype, "shape": shape, "data_offsets": offsets, **more}}


def scalars(text: str) -> bytes:
    return packed({"__metadata__": {"scalars": text}})


NOTHING = b'{"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]'
REFUSED = {
    "no bytes": b"",
    "no header": bytes(8),
    "a header as long as memory": packed(b"{}", length=2**64 - 1),
    "a header longer than the message": packed(b"{}", length=3),
    "a header longer than any of ours": packed(b"{}" + b" " * (2 << 20)),
    "a list": packed(b"[]"),
    "two objects": packed(b"{}{}"),
    "deep JSON": packed(b"[" * 100_000),
    "deep scalars": scalars("[" * 100_000),
    "deep tables of scalars": scalars('{"a":' * 100_000),
    "a name twice": packed(NOTHING + b"}," + NOTHING[1:] + b"}}"),
    "a scalar twice": scalars('{"a": 1, "a": 2}'),
    "metadata twice": packed(b'{"__metadata__":{},"__metadata__":{}}'),
    "UTF-16": packed(json.dumps(entry()).encode("utf-16"), b"0000"),
    "half a character as a name": packed(b'{"\\ud800":' + NOTHING[5:] + b"}}"),
    "half a character as a scalar": scalars('{"a": "\\ud800"}'),
    "half a character as a scalar's name": scalars('{"\\ud800": 1}'),
    "trailing bytes": packed(entry(), b"00000"),
    "missing bytes": packed(entry(), b"000"),
    "two arrays on the same bytes": packed({**entry(), "b": entry()["a"]}, b"0000"),
    "a hole": packed({**entry(), "b": entry(offsets=(8, 12))["a"]}, bytes(12)),
    "offsets backwards": packed(entry(offsets=(4, 0)), b"0000"),
    "negative offsets": packed(entry(offsets=(-4, 0)), b"0000"),
    "a negative side": packed(entry(shape=(-1,)), b"0000"),
    "a broken side": packed(entry(shape=(1.0,)), b"0000"),
    "a side that is true": packed(entry(shape=(True,)), b"0000"),
    "a side beyond 64 bits": packed(entry(shape=(2**70,)), b"0000"),
    "sides whose product overflows": packed(entry(shape=(2**32, 2**32, 4)), b"0000"),
    "an empty array with a giant side": packed(entry(shape=(0, 2**62), offsets=(0, 0))),
    "an empty array with a large side": packed(entry(shape=(2**25, 0), offsets=(0, 0))),
    "an empty array with many giant sides": packed(entry(shape=(0, *[2**63 - 1] * 100_000), offsets=(0, 0))),
    "too many dimensions": packed(entry(shape=[1] * 33), b"0000"),
    "bfloat16": packed(entry("BF16", (2,)), b"0000"),
    "float16": packed(entry("F16", (2,)), b"0000"),
    "float8": packed(entry("F8_E4M3", (4,)), b"0000"),
    "float4": packed(entry("F4", (8,)), b"0000"),
    "complex numbers": packed(entry("C64", (1,), (0, 8)), bytes(8)),
    "Python objects": packed(entry("O", (1,), (0, 8)), bytes(8)),
    "truth that is neither true nor false": packed(entry("BOOL", (4,)), b"\x00\x01\x02\xff"),
    "NaN as a scalar": scalars('{"a": NaN}'),
    "infinity as a scalar": scalars('{"a": -Infinity}'),
    "a float too large for a float": scalars('{"a": 1e999}'),
    "an integer of 65 bits": scalars(json.dumps({"a": 2**63})),
    "an integer of 4,000 digits": scalars('{"a": -' + "9" * 4000 + "}"),
    "an integer of 5,000 digits": scalars('{"a": ' + "9" * 5000 + "}"),
    "nothing as a scalar": scalars('{"a": null}'),
    "a list as a scalar": scalars('{"a": [1]}'),
    "a table as a scalar": scalars('{"a": {"b": 1}}'),
    "a list of scalars": scalars("[1]"),
    "no JSON as scalars": scalars("{'a': 1}"),
    "scalars that are no text": packed({"__metadata__": {"scalars": 1}}),
    "a long name with control characters": packed(b'{"' + b"\\u001b[2J" * 10_000 + b'":{"dtype":"F16"}}'),
}


@pytest.mark.parametrize("what", REFUSED)
def test_attacks_by_name_are_refused(what: str) -> None:
    assert read(REFUSED[what]) is None


def test_the_limits_themselves_are_within() -> None:
    """What is just small enough is read: a test above that refuses for another reason would not show it."""
    for data in (
        packed(b"{}" + b" " * ((2 << 20) - 2)),
        packed(entry(shape=(0, 2**24), offsets=(0, 0))),
        packed(entry(shape=[1] * 32), b"0000"),
        packed(entry("BOOL", (4,)), b"\x00\x01\x01\x00"),
        packed(b"{" + NOTHING[1:] + b"}," + NOTHING[1:].replace(b"a", b"b", 1) + b"}}"),
        scalars(json.dumps({"a": 2**63 - 1, "b": -(2**63), "c": 1.7e308, "d": True, "e": "\U0001f600\x00"})),
        packed(entry(more={"unknown": [1]}), b"0000"),
    ):
        assert read(data) is not None
    with pytest.raises(MessageError, match="header of 2097153 bytes is longer than 2097152"):
        Message.from_bytes(packed(b"{}", length=(2 << 20) + 1))


@pytest.mark.parametrize("fill", [b"{}", b"[]", b'{"":0}', b"0", b'"ab"', b"-1.5"])
def test_memory_is_bounded_by_the_length_of_what_was_sent(fill: bytes) -> None:
    many = b",".join([fill] * (100_000 // (len(fill) + 1)))
    assert read(packed(NOTHING + b',"more":[' + many + b"]}}")) is not None
    assert read(scalars('{"a": [' + many.decode() + "]}")) is None


def test_empty_arrays_by_the_megabyte_are_refused_before_they_are_read() -> None:
    """28 MB of names without values used to take 1.1 GB and 23 s."""
    arrays = b",".join(b'"%d":' % number + NOTHING[5:] + b"}" for number in range(500_000))
    data = packed(b"{" + arrays + b"}")
    assert len(data) > 27e6
    tracemalloc.start()
    with pytest.raises(MessageError, match="longer than 2097152"):
        Message.from_bytes(data)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 100_000


def test_what_could_not_be_read_back_is_not_written() -> None:
    names = {f"{number}{'x' * 990}": np.zeros(0) for number in range(2000)}
    assert Message.from_bytes(Message(names).to_bytes()).arrays.keys() == names.keys()
    with pytest.raises(HeadstartError, match=r"the names and shapes of 2100 arrays take .* bytes, more than 2097152"):
        Message(names | {f"{number}{'y' * 990}": np.zeros(0) for number in range(100)}).to_bytes()


def test_many_names_take_memory_in_proportion() -> None:
    arrays = b",".join(b'"%d":' % number + NOTHING[5:] + b"}" for number in range(2000))
    assert read(packed(b"{" + arrays + b"}")) is not None
    assert read(scalars(json.dumps({str(number): number for number in range(5000)}))) is not None


# -------------------------------------------------------------------------------------------------------------- pickle


class Trap:
    """Unpickled, it writes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


def test_nothing_is_ever_unpickled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trap = tmp_path / "sprung"
    payload = pickle.dumps(Trap(trap))
    npy = io.BytesIO()
    np.save(npy, np.array([Trap(trap)], object), allow_pickle=True)
    npz = io.BytesIO()
    np.savez(npz, a=np.array([Trap(trap)], object))
    hidden = packed({"a": {"dtype": "U8", "shape": [len(payload)], "data_offsets": [0, len(payload)]}}, payload)
    pickle.loads(payload)
    assert trap.exists()  # the trap works
    trap.unlink()

    def sprung(*_: Any, **__: Any) -> None:
        raise AssertionError("something was unpickled")

    for name in ("load", "loads", "Unpickler"):
        monkeypatch.setattr(pickle, name, sprung)
    for data in (payload, npy.getvalue(), npz.getvalue(), packed(payload), packed(entry("O", (1,), (0, 8)), bytes(8))):
        assert read(data) is None
    for data in (*corpus(), hidden):
        assert read(data) is not None
    message = read(hidden)
    assert message is not None
    assert message.arrays["a"].tobytes() == payload  # bytes stay bytes
    assert not trap.exists()


# ------------------------------------------------------------------------------------------------------------- answers


Alteration = Callable[[dict[str, Any], dict[str, Any]], None]
"""Changes the arrays and the scalars of an answer."""


def put(name: str, change: Callable[[np.ndarray], np.ndarray | None]) -> Alteration:
    def alter(arrays: dict[str, Any], scalars: dict[str, Any]) -> None:
        # What an earlier alteration has left may be nothing that this one can be done to.
        with suppress(KeyError, TypeError, ValueError, OverflowError):
            changed = change(arrays[name])
            arrays.pop(name) if changed is None else arrays.update({name: changed})

    return alter


def renamed(name: str, to: str) -> Alteration:
    def alter(arrays: dict[str, Any], scalars: dict[str, Any]) -> None:
        if name in arrays:
            arrays[to] = arrays.pop(name)

    return alter


def said(name: str, value: Any) -> Alteration:
    def alter(arrays: dict[str, Any], scalars: dict[str, Any]) -> None:
        scalars.pop(name, None)
        if value is not None:
            scalars[name] = value

    return alter


def filled(value: float) -> Callable[[np.ndarray], np.ndarray]:
    return lambda array: np.full_like(array, value)


def first(value: float) -> Callable[[np.ndarray], np.ndarray]:
    def change(array: np.ndarray) -> np.ndarray:
        array = array.copy()
        array.ravel()[:1] = value
        return array

    return change


SHAPES: dict[str, Callable[[np.ndarray], np.ndarray | None]] = {
    "removed": lambda array: None,
    "flat": lambda array: array.reshape(-1, 1),
    "in a list": lambda array: array[None],
    "transposed": lambda array: np.ascontiguousarray(array.T)[::-1],
    "one row less": lambda array: array[:-1] if array.ndim else array[None],
    "one row more": lambda array: np.concatenate([array, array[:1]]) if array.ndim else array[None],
    "empty": lambda array: array.ravel()[:0].reshape(0, *array.shape[1:]),
    "without dimensions": lambda array: array.ravel()[:1].reshape(()),
    "negative": lambda array: -array,
    "doubled": lambda array: 2 * array,
    "reversed": lambda array: array[::-1].copy() if array.ndim else array,
}
INTS = (-(2**31), -1, 0, 1, 5, 9, 10, 2**31 - 1)
NUMBERS = (np.nan, np.inf, -np.inf, 0.0, 1.0, -1e-45, 1e-30, 1e3, -1e9, 1e19, 1e30, -1e38, 3.4e38)
WIDE = (1e100, -1e154, 1.7e308)
SAID = (
    None, -1, 0, 1, 2, 10**6, 10**7, 10**12, 2**63 - 1, -(2**63), 0.0, 1.5, -1e300, 1e300, np.nan, np.inf,
    True, False, "", "5", "\x1b[2J" * 30_000,
)  # fmt: skip


def alterations(message: Message) -> Iterator[tuple[str, Alteration]]:
    """Everything that is tried on the answer of a method, with what it is called."""
    for name, array in message.arrays.items():
        for what, change in SHAPES.items():
            yield f"{name} {what}", put(name, change)
        for dtype in ("float64", "float32", "int64", "int32", "uint8", "bool", "float16", "complex64", "object", "U3"):
            if dtype != str(array.dtype):
                yield f"{name} as {dtype}", put(name, lambda array, dtype=dtype: array.astype(dtype))  # type: ignore[misc]
        numbers = INTS if array.dtype.kind == "i" else NUMBERS + (WIDE if array.dtype == np.float64 else ())
        for value in numbers:
            yield f"{name} all {value}", put(name, filled(value))
            yield f"{name} with {value}", put(name, first(value))
        yield f"{name} by another name", renamed(name, name + "x")
        for other in message.arrays:
            if other != name:
                yield f"{name} as {other}", renamed(name, other)
    for name in ("examples", "steps"):
        for value in SAID:
            yield f"{name} = {value!r:.20}", said(name, value)


def altered(message: Message, *changes: Alteration) -> Message:
    arrays: dict[str, Any] = {name: array.copy() for name, array in message.arrays.items()}
    scalars: dict[str, Any] = dict(message.scalars)
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for change in changes:
            change(arrays, scalars)
    return Message(arrays, scalars)


def fingerprint(value: Any) -> Any:
    """All that a state holds, to the last bit."""
    if is_dataclass(value):
        return [(part.name, fingerprint(getattr(value, part.name))) for part in fields(value)]
    if isinstance(value, dict):
        return [(name, fingerprint(each)) for name, each in value.items()]
    if isinstance(value, tuple | list):
        return [fingerprint(each) for each in value]
    return (str(value.dtype), value.shape, value.tobytes()) if isinstance(value, np.ndarray) else repr(value)


def meet(there: Server, message: Message) -> bool:
    """Whether the server takes the answer. If not, all is as before; if so, what it makes of it is finite."""
    bench, method, task = there.bench, there.bench.method, there.reply.task
    before, total, refused = fingerprint((there.state, there.total)), deepcopy(there.total), None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            bench.add(total, there.state, replace(there.reply, message=message), 1)
        except MessageError as error:
            refused = error
        if refused is not None:
            assert shown(refused)
            assert fingerprint((there.state, total)) == before
            return False
        closed = there.after(total)
        assert fingerprint(there.state) == before[0]
        # A head may need the steps of a log, which are taken once: those of this one must not be taken for others.
        judge = deepcopy(method) if method.replays else method
        head = None
        with nullcontext() if bench.stage.trains else suppress(HeadstartError):
            head = judge.load(judge.model(closed, task), task)
        told = bench.broadcast(closed, 2, -1, task)
    for name, array in {**pack(closed).arrays, **told.arrays, **(head.arrays() if head else {})}.items():
        masked = np.isneginf(array) if name == "bias" else np.zeros(array.shape, bool)
        assert (np.isfinite(array) | masked).all(), f"{name} is not finite"
    assert head is None or np.isfinite(head.bias).any()
    return True


@pytest.mark.parametrize("variant", ALL)
def test_an_altered_answer_is_refused_or_does_no_harm(variant: str) -> None:
    there = server(variant)
    assert meet(there, there.reply.message)
    failures = []
    for what, change in alterations(there.reply.message):
        try:
            meet(there, altered(there.reply.message, change))
        except Exception as error:
            failures.append(f"{what}: {type(error).__name__}: {error!s:.150}")
    assert not failures, "\n" + "\n".join(failures)


def gram(change: Callable[[np.ndarray], np.ndarray]) -> Alteration:
    """Another Gram matrix [64, 64] in the place of a client's own."""

    def packed(triangle: np.ndarray) -> np.ndarray:
        square = np.zeros((64, 64))
        square[np.triu_indices(64)] = triangle
        return np.asarray(change(square + np.triu(square, 1).T)[np.triu_indices(64)])

    return put("moments", packed)


SERVER = {"privacy": {"epsilon": 50.0, "clip": 60.0}}
COUNTED = {"method": "fedncm", "distance": "euclidean", **SERVER}  # by cosine, no counts are sent
IMPOSSIBLE: dict[str, tuple[dict[str, Any], Alteration]] = {
    "entries that the diagonal does not allow": (
        {"method": "fed3r"},
        gram(lambda g: np.where(np.eye(64, dtype=bool), g, -1e7)),
    ),
    "no squares": ({"method": "fed3r", "ridge": 0.01}, put("moments", filled(0.0))),
    "a negative matrix": ({"method": "fed3r", "ridge": 0.01}, gram(lambda g: -100 * g)),
    "sums of more examples": ({"method": "fed3r"}, put("sums", lambda sums: -1000 * sums)),
    "a scatter below zero": ({"method": "fedcof"}, put("within", filled(-1.0))),
    "no scatter that the directions are of": ({"method": "fedcof", "rank": 2}, put("within", filled(0.0))),
    "directions that the scatter does not allow": (
        {"method": "fedcof", "within": "diagonal", "rank": 2},
        put("directions", lambda directions: 100 * directions),
    ),
    "a sketch that the squares do not allow": (
        {"method": "fedcof", "rank": 2, **SERVER},
        put("sketch", lambda sketch: -100 * sketch),
    ),
    "longer vectors than all have": (COUNTED, put("sums", lambda sums: -1e4 * sums)),
    "larger squares than all have": (
        {"method": "fed3r", "random_features": 400, **SERVER},
        put("moments", lambda values: 1e6 * values),
    ),
    "fewer examples than none": (COUNTED, put("counts", lambda counts: -50 * counts)),
    "sums of nobody": (COUNTED, put("counts", lambda counts: 0 * counts)),
}


@pytest.mark.parametrize("what", IMPOSSIBLE)
def test_a_client_whose_statistics_cannot_be_true_is_left_out_by_name(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of twenty: the head is the one that the other nineteen make without it."""
    table, alteration = IMPOSSIBLE[what]
    data = {"dataset": "digits", "partition": {"kind": "iid", "clients": 20}}
    recipe = Recipe.parse({"data": data, "model": {"backbone": "features"}, "stages": [table]})
    there, heads = Federation.of(recipe), []
    monkeypatch.setattr(local, "_COHORT_EXAMPLES", 1)  # every client answers for itself
    for lie in (alteration, put("sums", lambda sums: None)):  # the second: nothing that could be used
        (stage,) = recipe.stages
        bench = Bench(stage, context_of(stage, 10, 64, (0, 0), 20, int(there.sizes.sum())))

        class Liar(ClientRuntime):
            def answer(self, cohort: Cohort, message: Message, lie: Alteration = lie) -> list[Reply]:
                (reply,) = super().answer(cohort, message)
                return [replace(reply, message=altered(reply.message, lie)) if cohort.clients[0] == 3 else reply]

        bench.runtime = Liar(bench.method, bench.channel)
        ledger = Ledger.open(20)
        state, _ = played_on(bench, there, ledger)
        heads.append(bench.head(state))
        assert [drop["clients"] for drop in ledger.dropped] == ["client-3"]
    np.testing.assert_array_equal(heads[0].weight, heads[1].weight)
    test = there.dataset.test
    assert (heads[0].scores(test.features()).argmax(axis=1) == test.labels).mean() > 0.8


@pytest.mark.parametrize("variant", ALL)
@examples(8)
@given(data=st.data())
def test_several_alterations_at_once(variant: str, data: st.DataObject) -> None:
    there = server(variant)
    choices = dict(alterations(there.reply.message))
    names = data.draw(st.lists(st.sampled_from(sorted(choices)), min_size=2, max_size=4))
    meet(there, altered(there.reply.message, *(choices[name] for name in names)))


@pytest.mark.parametrize("variant", ALL)
def test_what_must_be_refused_is_refused(variant: str) -> None:
    """A server that took anything would pass where nothing is finite to begin with; it would not pass here."""
    there = server(variant)
    for name, array in there.reply.message.arrays.items():
        bad = [put(name, lambda array: None), put(name, lambda array: array[None]), renamed(name, name + "x")]
        if array.dtype.kind == "f":
            bad += [put(name, first(value)) for value in (np.nan, np.inf)]
        bad += [put(name, lambda array: array.astype(np.float16))]
        bad += [put(name, filled(-1)), put(name, filled(10))] if name == "labels" else []
        bad += [put(name, first(0)), put(name, first(-5))] if name == "counts" else []
        bad += [put(name, filled(value)) for value in (0, -1, 1e13)] if name.startswith("steps") else []
        bad += [put(name, first(-1))] if name == "scales" else []
        for change in bad:
            assert not meet(there, altered(there.reply.message, change))
    needed = [name for name in there.reply.message.scalars if name == "examples"]
    bench = built(variant)  # what sends nothing says nothing of how much it counts
    assert needed or not bench.stage.trains or not bench.method.blocks or variant in ("private", "private int8")
    for name in needed:
        for value in (None, 0, -1, 1.5, 2**63 - 1, "5", np.nan):
            assert not meet(there, altered(there.reply.message, said(name, value)))


@pytest.mark.parametrize("variant", ALL)
def test_what_nobody_asked_for_is_ignored(variant: str) -> None:
    there = server(variant)
    more = {"more": np.full(3, np.nan), "update.body.x": np.ones(2, np.float32), "": np.zeros((0, 5), np.int64)}
    message = there.reply.message
    with_more = Message({**message.arrays, **more}, {**message.scalars, "more": "x", "round": -1})
    if "scales" in message.arrays:  # which must be as many as there are arrays of parameters
        with pytest.raises(MessageError, match="scales"):
            there.hear(with_more)
        return
    plain, other = there.hear(message), there.hear(with_more)
    assert fingerprint(plain) == fingerprint(other)
    assert (fingerprint(plain) != fingerprint(there.total)) == bool(message.arrays)  # what was asked for is not


@pytest.mark.parametrize("variant", [name for name in ALL if built(name).stage.trains])
def test_a_client_that_lies_in_every_round_as_much_as_it_may(variant: str) -> None:
    """Whatever is accepted is accepted again and again; no number of rounds leads out of the range of float32."""
    there = server(variant)
    bench, state, message = there.bench, there.state, there.reply.message
    reach = dict.fromkeys(message.arrays, 4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for number in range(2, 26):
            total = bench.channel.total()
            for name in message.arrays:
                for power in range(min(38, reach[name] + 4), -3, -1):  # the largest that is let in
                    change = put(name, filled(3 * 10.0**power if name != "present" else 1.0))
                    with suppress(MessageError):
                        bench.add(total, state, replace(there.reply, message=altered(message, change)), number)
                        reach[name] = power
                        break
            total = bench.channel.finish(total, number)
            if total.weights or not message.arrays:  # nobody is heard any more once the model is as large as may be
                state = bench.method.server_update(state, total, number)
            told = bench.broadcast(state, number, number - 1, there.reply.task)
            assert all(np.isfinite(array).all() for array in told.arrays.values())
    assert all(np.isfinite(array).all() for array in pack(state).arrays.values())


def test_two_liars_of_fednova_do_not_lead_out_of_float32_together() -> None:
    """One sends an update as long as may be, the other as many steps as may be: the server multiplies the two."""
    there = server("fednova")
    bench, message = there.bench, there.reply.message
    state = replace(there.state, params=there.state.params * (1e26 / norm(there.state.params)))  # after earlier lies
    total = bench.channel.total()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for name in ("update.head.weight", "steps"):
            for power in range(32, 0, -1):  # the largest that is let in
                change = put(name, filled(9 * 10.0**power))
                with suppress(MessageError):
                    bench.add(total, state, replace(there.reply, message=altered(message, change)), 2)
                    break
        told = bench.broadcast(bench.method.server_update(state, total, 2), 3)
    assert total.weight("update") == 2 * message.scalars["examples"]
    assert 1e27 < norm(total.mean("update"))
    assert all(np.isfinite(array).all() for array in told.arrays.values())
