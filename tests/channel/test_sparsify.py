"""`compress = "top-k" | "sign"`: hand computations, error feedback, exact bytes, and what cannot go with it."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

from headstart.channel.sparsify import Sign, TopK
from headstart.config.recipe import Recipe
from headstart.core.message import Message
from headstart.core.params import Params, norm
from headstart.core.reply import ClientResult, Sender
from headstart.errors import MessageError, RecipeError
from headstart.runner import run
from headstart.solvers.cohort import Cohort
from tests.channel.test_quantise import LOCAL, recipe_of
from tests.helpers import Bench, context_of, round_trip

UPDATE = {
    "update.head.weight": np.array([[0.5, -2.0, 0.25], [0.0, 1.0, -0.25]], np.float32),
    "update.head.bias": np.array([-3.0, 0.75], np.float32),
}
EXPECTED = {name: array.shape for name, array in UPDATE.items()}
SENDER = Sender(0, 0, 0, EXPECTED)
WAYS = {"top-k": {"compress": "top-k", "top_k": 0.02}, "sign": {"compress": "sign"}}


# ----------------------------------------------------------------------------------------------------------- by hand


def test_the_largest_values_travel_with_their_positions() -> None:
    """Of the eight numbers in the order of names, bias first, the three largest are -3 at 0, -2 at 3 and 1 at 6."""
    link = TopK(0.4)  # 3.2 of 8
    sent = link.encode(Message(UPDATE, {"examples": 9}), SENDER)
    assert {name: (str(array.dtype), array.tolist()) for name, array in sent.arrays.items()} == {
        "values.update": ("float32", [-3.0, -2.0, 1.0]),
        "positions.update": ("int32", [0, 3, 6]),
    }
    assert sent.scalars == {"examples": 9}
    read = link.decode(round_trip(sent), SENDER).arrays
    assert read["update.head.bias"].tolist() == [-3.0, 0.0]
    assert read["update.head.weight"].tolist() == [[0.0, -2.0, 0.0], [0.0, 1.0, 0.0]]


def test_signs_travel_as_bits_with_the_mean_of_every_array() -> None:
    """Means: (3 + 0.75) / 2 = 1.875 and 4 / 6; signs − + | + − + + + −, zero counting as +: 0b01101110."""
    link = Sign()
    sent = link.encode(Message(UPDATE), SENDER)
    assert sent.arrays["signs.update"].tolist() == [0b01101110]
    np.testing.assert_array_equal(sent.arrays["scales.update"], np.array([1.875, 4 / 6], np.float32))
    read = link.decode(round_trip(sent), SENDER).arrays
    assert read["update.head.bias"].tolist() == [-1.875, 1.875]
    np.testing.assert_allclose(read["update.head.weight"] * 1.5, [[1, -1, 1], [1, 1, -1]], rtol=1e-6)


@pytest.mark.parametrize("link", [TopK(0.5), Sign()], ids=["top-k", "sign"])
def test_control_variates_are_packed_by_themselves_and_values_stay(link: TopK | Sign) -> None:
    """A variance of batch norm that is read as zero, or as the mean of all, is another network."""
    control = {"control.head.bias": np.array([1e-3, -2e-3], np.float32)}
    whole = {"statistics.body.bn.running_var": np.array([0.1, 7.0, 2.0], np.float32), "steps": np.array(17.3, "f4")}
    expected = {name: array.shape for name, array in {**UPDATE, **control, **whole}.items()}
    sender = Sender(0, 0, 0, expected)
    read = link.decode(round_trip(link.encode(Message({**UPDATE, **control, **whole}), sender)), sender).arrays
    for name, array in whole.items():
        np.testing.assert_array_equal(read[name], array)
    assert 0 < np.abs(read["control.head.bias"]).max() <= np.float32(2e-3)
    assert np.abs(read["update.head.bias"]).max() >= 1


# ----------------------------------------------------------------------------------------------------- error feedback


def bench_of(**keys: Any) -> Bench:
    (stage,) = recipe_of(LOCAL | {"method": "fedavg"} | keys).stages
    return Bench(stage, context_of(stage, 10, 64, (0, 0), 8, 100))


def given(kept: dict[str, Any], name: str, start: Any) -> Any:
    return kept[name]


def rounds_of(bench: Bench, updates: list[dict[str, np.ndarray]]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """What the server reads of a client's updates, and what is left with the client after the last."""
    kept = {name: np.zeros((1, *shape), np.float32) for name, shape in bench.runtime.client_state.items()}
    one, read = np.zeros(1, np.int64), []
    for round, update in enumerate(updates):
        cohort = Cohort(one, np.zeros((1, 64), "f4"), one, one, one, np.array([False]), partial(given, kept))
        blocks = {"update": Params({name.removeprefix("update."): array[None] for name, array in update.items()})}
        (reply,) = bench.channel.encode(
            ClientResult(blocks, one, {"examples": one + 1, "steps": one + 1}), cohort, round
        )
        read.append(bench.total(bench.init(), [reply], round).sums)
        kept = {name: array[None] for name, array in reply.state.items()}
    return read, {name.removeprefix("error."): array[0] for name, array in kept.items()}


@pytest.mark.parametrize("more", [{}, {"max_norm": 1.5}], ids=["plain", "max_norm"])
@pytest.mark.parametrize("way", WAYS)
def test_what_the_server_reads_adds_up_to_the_updates(way: str, more: dict[str, Any]) -> None:
    """All that was meant has been read, or is still with the client, which does not grow with the rounds."""
    bench, rng = bench_of(**WAYS[way], **more), np.random.default_rng(4)
    direction = {"update.head.weight": rng.normal(size=(10, 64)), "update.head.bias": rng.normal(size=10)}
    updates = [
        {
            name: (0.05 * (array + 0.3 * rng.normal(size=array.shape))).astype(np.float32)
            for name, array in direction.items()
        }
        for _ in range(200)
    ]
    read, left = rounds_of(bench, updates)
    lengths, sizes = [], []
    for name in direction:
        total, meant = np.sum([each[name] for each in read], axis=0), np.sum([each[name] for each in updates], axis=0)
        np.testing.assert_allclose(total + left[name], meant, atol=2e-5)
        lengths.append(np.square(meant - total).sum())
        sizes.append(np.square(meant).sum())
    if more:  # no round counts for more, and what that leaves stays with the client
        assert max(norm(each) for each in read) <= 1.5 * (1 + 1e-6)
        return
    assert sum(lengths) < (0.35 if way == "top-k" else 0.05) * sum(sizes)
    # Without what was left, every round would lose the same coordinates.
    alone = [rounds_of(bench, [update])[0][0] for update in updates[:40]]
    lost = np.sum([each["update.head.weight"] for each in alone], axis=0)
    meant = np.sum([each["update.head.weight"] for each in updates[:40]], axis=0)
    assert np.square(meant - lost).sum() > (0.7 if way == "top-k" else 0.1) * np.square(meant).sum()


@pytest.mark.parametrize("way", WAYS)
def test_a_client_that_has_diverged_is_refused_and_keeps_nothing_of_it(way: str) -> None:
    bench = bench_of(**WAYS[way])
    bad = {"update.head.weight": np.full((10, 64), np.inf, np.float32), "update.head.bias": np.ones(10, np.float32)}
    with pytest.raises(MessageError, match="holds NaN or infinity"):
        rounds_of(bench, [bad])


def test_scaffold_keeps_errors_of_updates_alone() -> None:
    """Its control variates are differences to what the server has read, and bring back by themselves what was left."""
    state = bench_of(method="scaffold", **WAYS["top-k"]).runtime.client_state
    assert {name for name in state if name.startswith("error.")} == {
        "error.update.head.weight",
        "error.update.head.bias",
    }


# -------------------------------------------------------------------------------------------------------------- attacks


def changed(name: str, make: Callable[[Any], Any]) -> Callable[[Message], Message]:
    return lambda message: Message({**message.arrays, name: make(message.arrays[name])}, message.scalars)


HOSTILE: dict[str, tuple[TopK | Sign, Callable[[Message], Message], str]] = {
    "a position twice": (TopK(0.4), changed("positions.update", lambda p: p * 0), "out of order"),
    "a position beyond": (TopK(0.4), changed("positions.update", lambda p: p + 2), "out of order or beyond 8"),
    "a negative position": (TopK(0.4), changed("positions.update", lambda p: p - 1), "out of order"),
    "out of order": (TopK(0.4), changed("positions.update", lambda p: p[::-1].copy()), "out of order"),
    "positions in int64": (TopK(0.4), changed("positions.update", lambda p: p.astype(np.int64)), "int64, not int32"),
    "a value that is none": (TopK(0.4), changed("values.update", lambda v: v * np.nan), "holds NaN"),
    "more than a share": (TopK(0.4), changed("values.update", lambda v: np.append(v, v)), r"shape \[6\], not \[3\]"),
    "a scale that is none": (Sign(), changed("scales.update", lambda s: s * np.inf), "holds NaN or infinity"),
    "a negative scale": (Sign(), changed("scales.update", lambda s: -s), "holds a negative number"),
    "a scale too few": (Sign(), changed("scales.update", lambda s: s[:1]), r"shape \[1\], not \[2\]"),
    "signs of a larger model": (Sign(), changed("signs.update", lambda s: np.append(s, s)), r"shape \[2\], not \[1\]"),
    "no update": (Sign(), lambda message: Message({}, message.scalars), "'signs.update' is missing"),
}  # fmt: skip


@pytest.mark.parametrize("what", HOSTILE)
def test_what_no_client_sends_is_refused(what: str) -> None:
    link, change, sentence = HOSTILE[what]
    with pytest.raises(MessageError, match=sentence):
        link.decode(change(link.encode(Message(UPDATE), SENDER)), SENDER)


# -------------------------------------------------------------------------------------------------------------- recipes


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "secure": ({"method": "fedavg", "secure": True}, "with secure aggregation, masked values are 8 bytes"),
    "privacy": (
        {"method": "fedavg", "weighting": "uniform", "privacy": {"epsilon": 5.0}},
        "'sign' adds what was left out of an update to the next, and privacy's noise is for each by itself",
    ),
    "median": ({"method": "fedavg", "combine": "median"}, "'sign' makes sums right, and combine = 'median' is none"),
    "slora": ({"method": "slora", "train": "lora"}, "'sign' adds rounds up, and slora sends other values"),
    "flexlora": ({"method": "flexlora"}, "'sign' adds rounds up, and flexlora multiplies the factors"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_where_errors_cannot_be_fed_back_it_is_refused(what: str) -> None:
    keys, sentence = REFUSED[what]
    table = recipe_of({"method": "fedncm"}).model_dump(mode="json", exclude_none=True)
    stage = {"rounds": 3, "lr": 0.01, **keys} if "lora" in what else LOCAL | keys
    model = {"backbone": "all-minilm-l6-v2"} if "lora" in what else table["model"]
    with pytest.raises(RecipeError) as refused:
        Recipe.parse({**table, "model": model, "tasks": [], "stages": [stage | {"compress": "sign"}]})
    (problem,) = refused.value.problems
    assert problem.startswith(f"stages.0.compress: {sentence}")


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "keys",
    [{"method": "fedper", "head": "mlp", "hidden": 8}, {"method": "ditto"}, {"method": "fedavg", "share": 0.2}],
    ids=["fedper", "ditto", "share"],
)
def test_what_it_goes_together_with(keys: dict[str, Any], way: str) -> None:
    stage = LOCAL | keys | {"rounds": 20}
    plain, small = (run(recipe_of(stage | more)).summary["stages"][0] for more in ({}, WAYS[way]))
    assert small["bytes_up"] < plain["bytes_up"] / 4  # names and shapes are most of what is left of so small a head
    assert abs(small["accuracy"] - plain["accuracy"]) < 0.1
    assert not small["dropped"]


@pytest.mark.parametrize("way", WAYS)
def test_hidden_tasks_are_packed_with_their_zeros(way: str) -> None:
    tasks = [
        {"name": name, "dataset": "digits", "classes": classes, "partition": {"kind": "iid", "clients": 3}}
        for name, classes in (("low.one", [0, 1, 2]), ("high", [5, 6, 7, 8]))
    ]
    table = {"tasks": tasks, "model": {"backbone": "features"}}
    for keys in ({"hide_task": True}, {}):
        stage = LOCAL | {"method": "fedavg", "rounds": 12} | keys
        plain, small = (
            run(Recipe.parse({**table, "stages": [stage | more]})).summary["stages"][0] for more in ({}, WAYS[way])
        )
        assert not small["dropped"]
        assert small["bytes_up"] < plain["bytes_up"] / 2
        assert abs(small["accuracy"] - plain["accuracy"]) < 0.06
