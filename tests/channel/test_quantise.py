"""`compress = "int8"`: right on average, a quarter of the bytes, and nothing that a client could not mean."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headstart.channel.quantise import Quantise
from headstart.config.recipe import Recipe
from headstart.core.ledger import Ledger
from headstart.core.message import Message
from headstart.core.params import norm
from headstart.core.reply import Reply, Sender
from headstart.core.update import block
from headstart.data import Federation
from headstart.engine.client_states import ClientStates
from headstart.errors import MessageError, RecipeError
from headstart.runner import run
from headstart.solvers.cohort import Cohort
from tests.helpers import Bench, cohort_of, context_of, play, round_trip

RNG = np.random.default_rng(5)
UPDATE = {
    "update.head.weight": RNG.normal(size=(6, 7)).astype(np.float32),
    "update.head.bias": (1e-4 * RNG.normal(size=6)).astype(np.float32),
    "update.body.scale": np.array(-0.25, np.float32),
    "update.body.still": np.zeros(3, np.float32),
}
LOCAL = {"train": "head", "rounds": 3, "lr": 0.01, "batch_size": 20}
INT8 = {"compress": "int8"}
CLIENTS = 8


def there_and_back(seed: int, arrays: dict[str, np.ndarray], round: int = 0, client: int = 0) -> dict[str, Any]:
    link, sender = Quantise((seed, 0)), Sender(client, round)
    return dict(link.decode(round_trip(link.encode(Message(arrays), sender)), sender).arrays)


def steps_of(arrays: dict[str, np.ndarray]) -> dict[str, float]:
    """The distance between two neighbouring values of each array."""
    return {name: float(np.abs(array).max(initial=0.0)) / 127 for name, array in arrays.items()}


# ------------------------------------------------------------------------------------------------------------ rounding


def test_rounding_is_right_on_average_and_as_uncertain_as_it_must_be() -> None:
    draws = 4000
    found = [there_and_back(seed, UPDATE) for seed in range(draws)]
    for name, step in steps_of(UPDATE).items():
        values, exact = np.stack([each[name] for each in found]).astype(np.float64), UPDATE[name].astype(np.float64)
        chance = exact / step % 1 if step else np.zeros_like(exact)  # of rounding up
        deviation = step * np.sqrt(chance * (1 - chance))
        # Within five standard errors, and float32's own rounding.
        assert (np.abs(values.mean(axis=0) - exact) <= 5 * deviation / draws**0.5 + 1e-5 * step).all(), name
        np.testing.assert_allclose(values.std(axis=0), deviation, atol=0.05 * step, err_msg=name)


def test_values_are_rounded_to_one_of_their_two_neighbours() -> None:
    for seed in range(50):
        found = there_and_back(seed, UPDATE)
        for name, step in steps_of(UPDATE).items():
            assert found[name].dtype == np.float32
            assert found[name].shape == UPDATE[name].shape
            assert (np.abs(found[name] - UPDATE[name]) <= step * (1 + 1e-5)).all(), name
            assert (found[name] * UPDATE[name] >= 0).all()  # no sign changes
            largest = np.abs(UPDATE[name]).argmax()
            assert found[name].flat[largest] == pytest.approx(UPDATE[name].flat[largest], rel=1e-6)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_no_array_is_off_by_more_than_a_step(data: st.DataObject) -> None:
    size = data.draw(st.integers(0, 30))
    numbers = st.floats(-1, 1, width=32) | st.sampled_from([0.0, 1.0, -1.0, 1 / 127, -126.5 / 127])
    values = np.array(data.draw(st.lists(numbers, min_size=size, max_size=size)), np.float32)
    values *= np.float32(10.0 ** data.draw(st.integers(-25, 29)))
    arrays = {"update.x": values}
    found = there_and_back(data.draw(st.integers(0, 2**32)), arrays)["update.x"]
    assert (np.abs(found - values) <= steps_of(arrays)["update.x"] * (1 + 1e-5)).all()


def test_rounding_depends_on_seed_round_and_client_and_on_nothing_else() -> None:
    def weight(*key: int) -> bytes:
        seed, round, client = key
        return bytes(there_and_back(seed, UPDATE, round, client)["update.head.weight"].tobytes())

    keys = [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1), (0, 1, 1)]
    assert len({weight(*key) for key in keys}) == len(keys)
    assert all(weight(*key) == weight(*key) for key in keys)
    turned = dict(reversed(UPDATE.items()))  # safetensors has an order of its own
    assert {n: a.tobytes() for n, a in there_and_back(0, turned).items()} == {
        n: a.tobytes() for n, a in there_and_back(0, UPDATE).items()
    }


def test_what_is_no_parameters_stays_as_it_is() -> None:
    number = {"steps": np.array(17.3, np.float32), "present": np.array([0, 1], np.float32)}
    link, sender = Quantise((0, 0)), Sender(0, 0)
    sent = link.encode(Message({**UPDATE, **number}, {"examples": 9}), sender)
    assert {name: str(array.dtype) for name, array in sent.arrays.items()} == {
        **dict.fromkeys(UPDATE, "int8"), **dict.fromkeys([*number, "scales"], "float32"),
    }  # fmt: skip
    assert sent.scalars == {"examples": 9}
    found = link.decode(sent, sender)
    assert found.arrays.keys() == UPDATE.keys() | number.keys()
    for name, value in number.items():
        np.testing.assert_array_equal(found.arrays[name], value)


# -------------------------------------------------------------------------------------------------- clients and servers


@pytest.fixture(scope="module")
def digits() -> Federation:
    return Federation.of(recipe_of({"method": "fedncm"}))


def recipe_of(*stages: dict[str, Any]) -> Recipe:
    data = {"dataset": "digits", "partition": {"kind": "dirichlet", "clients": CLIENTS, "alpha": 0.3}}
    return Recipe.parse({"data": data, "model": {"backbone": "features"}, "stages": list(stages)})


def bench_of(federation: Federation, **keys: Any) -> Bench:
    (stage,) = recipe_of(LOCAL | {"method": "fedavg"} | INT8 | keys).stages
    return Bench(stage, context_of(stage, 10, 64, (0, 0), CLIENTS, int(federation.sizes.sum())))


def answer(bench: Bench, federation: Federation, client: int) -> Reply:
    train, (rows, _) = federation.dataset.train, federation.rows_of(np.array([client]))
    cohort = cohort_of(bench, client, train.features(), rows, train.labels[rows])
    (reply,) = bench.answer(cohort, bench.broadcast(bench.init()))
    return reply


def test_a_client_rounds_alike_alone_and_among_others(digits: Federation) -> None:
    bench = bench_of(digits, batch_size="full", local_steps=1)
    train, (rows, owners) = digits.dataset.train, digits.rows_of(np.arange(CLIENTS))
    nobody = cohort_of(bench, 0, train.features(), rows, train.labels[rows])
    everybody = Cohort(
        np.arange(CLIENTS), train.features(), rows, train.labels[rows], owners, np.ones(CLIENTS, bool), nobody.state
    )
    together = bench.answer(everybody, bench.broadcast(bench.init()))
    for client, reply in enumerate(together):
        alone = answer(bench, digits, client)
        assert reply.bytes_up.tolist() == alone.bytes_up.tolist() == [len(reply.message.to_bytes())]
        for name, array in alone.message.arrays.items():
            # Stacked matrix products differ in their last bits; where those decide, by one whole number.
            far = np.abs(reply.message.arrays[name].astype(float) - array.astype(float))
            assert (far <= (1 if array.dtype == np.int8 else 1e-6)).all()
            assert (far > 1e-6).mean() < 0.02


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ten classes of 1,280 features, as those of EfficientNet."""
    rng = np.random.default_rng(0)
    path, y = tmp_path_factory.mktemp("wide") / "wide.npz", np.arange(120) % 10
    centres = rng.normal(size=(10, 1280))
    np.savez(path, X=(centres[y] + rng.normal(size=(120, 1280))).astype(np.float32), y=y, split=2 * (y > 8))
    return path


@pytest.mark.parametrize("method", ["fedavg", "scaffold", "fednova"])
def test_a_quarter_of_the_bytes_go_up_and_all_come_down(wide: Path, method: str) -> None:
    stage = {"method": method, "train": "head", "rounds": 2, "lr": 0.01, "clients_per_round": 3}
    data = {"dataset": str(wide), "partition": {"kind": "iid", "clients": 5}}
    tables = [{"data": data, "model": {"backbone": "features"}, "stages": [stage | keys]} for keys in ({}, INT8)]
    plain, small = (run(Recipe.parse(table)).summary["stages"][0] for table in tables)
    assert 0.25 <= small["bytes_up"] / plain["bytes_up"] <= 0.27
    assert small["bytes_down"] == plain["bytes_down"]
    assert plain["bytes_up"] > 2 * 3 * 4 * 12810 * (2 if method == "scaffold" else 1)


@pytest.mark.parametrize("method", ["fedavg", "fedadam", "scaffold", "feddyn", "fednova"])
def test_accuracy_is_that_of_the_uncompressed_run(method: str) -> None:
    keys = LOCAL | {"method": method, "rounds": 10, "clients_per_round": 4}
    plain, small = (run(recipe_of(keys | more)) for more in ({}, INT8))
    accuracies = [result.summary["stages"][0]["accuracy"] for result in (plain, small)]
    assert min(accuracies) > 0.75
    assert abs(accuracies[0] - accuracies[1]) < 0.025
    assert not np.array_equal(plain.head.weight, small.head.weight)
    cosine = np.sum(plain.head.weight * small.head.weight) / norm({"": plain.head.weight}) / norm(
        {"": small.head.weight}
    )  # fmt: skip
    assert cosine > 0.98


@pytest.mark.parametrize(
    ("keys", "kind"),
    [
        ({"method": "scaffold"}, "control"),
        ({"method": "scaffold", "weighting": "uniform"}, "control"),
        ({"method": "feddyn", "alpha_dyn": 0.1}, "dual"),
        ({"method": "feddyn", "alpha_dyn": 0.1, "max_norm": 0.05}, "dual"),
    ],
)
def test_server_and_clients_add_up_the_same(
    digits: Federation, tmp_path: Path, keys: dict[str, Any], kind: str
) -> None:
    """What the server remembers is the weighted mean of what the clients keep, after every round."""
    bench = bench_of(digits, clients_per_round=3, **keys)
    states = ClientStates(tmp_path / "states", CLIENTS, bench.method.client_state)
    weights = digits.sizes / digits.sizes.sum() if bench.method.weighting == "examples" else np.ones(CLIENTS) / CLIENTS
    seen = []

    def compare(number: int, state: Any) -> None:
        for name, mean in state.memory[kind].items():
            kept = states.read(f"{kind}.{name}", None, np.arange(CLIENTS)).astype(np.float64)
            largest = np.abs(kept).max()
            assert largest > 0
            # float32's rounding of each sum; one step of the compression would be 1/127 of the largest value.
            np.testing.assert_allclose(mean, np.tensordot(weights, kept, 1), atol=3e-6 * largest)
        seen.append(number)

    play(bench, digits, digits.dataset.train.features(), Ledger.open(CLIENTS), states, compare)
    assert seen == [0, 1, 2]


def test_a_client_keeps_what_was_read_and_not_what_it_meant(digits: Federation) -> None:
    plain, small = (answer(bench_of(digits, method="scaffold", **keys), digits, 2) for keys in ({"compress": None}, {}))
    bench = bench_of(digits, method="scaffold")
    read = bench.total(bench.init(), [small]).mean("control")
    for name, value in read.items():
        np.testing.assert_allclose(small.state[f"control.{name}"], value, rtol=1e-6)
        meant = plain.message.arrays[f"control.{name}"]
        assert np.abs(small.state[f"control.{name}"] - meant).max() > 0.1 * np.abs(meant).max() / 127
    np.testing.assert_array_equal(plain.state["control.head.weight"], plain.message.arrays["control.head.weight"])


@pytest.mark.parametrize("noise", ["server", "client"])
def test_privacy_is_not_rounded_away(digits: Federation, noise: str) -> None:
    """Rounding can lengthen an update; under the server's noise it still counts for no more than the clip."""
    private = {"weighting": "uniform", "privacy": {"epsilon": 5.0, "clip": 0.1, "noise": noise}}
    bench = bench_of(digits, **private)
    replies = [answer(bench, digits, client) for client in range(CLIENTS)]
    assert all(not reply.message.scalars for reply in replies)
    decoded = [bench.channel.links[-1].decode(reply.message, Sender(0, 0)).arrays for reply in replies]
    lengths = [norm(block(bench.total(bench.init(), [reply]).sums, "update")) for reply in replies]
    if noise == "server":
        assert max(norm(arrays) for arrays in decoded) > 0.1
        assert max(lengths) <= 0.1 * (1 + 1e-9)
    else:
        deviation = next(link.deviation for link in bench.channel.links if hasattr(link, "deviation"))
        values = np.concatenate([array.ravel() for arrays in decoded for array in arrays.values()])
        assert values.std() == pytest.approx(deviation, rel=0.1)


def test_a_client_that_has_diverged_is_refused_and_keeps_what_it_had(digits: Federation) -> None:
    bench = bench_of(digits, method="scaffold", lr=1e20)
    train, (rows, _) = digits.dataset.train, digits.rows_of(np.array([0]))
    features = 1e30 * train.features().astype(np.float32)
    (reply,) = bench.answer(cohort_of(bench, 0, features, rows, train.labels[rows]), bench.broadcast(bench.init()))
    with pytest.raises(MessageError, match="'scales' holds NaN or infinity"):
        bench.total(bench.init(), [reply])
    assert not any(values.any() for values in reply.state.values())


# -------------------------------------------------------------------------------------------------------------- attacks


def changed(**given: Callable[[np.ndarray], np.ndarray | None]) -> Callable[[Message], Message]:
    def change(message: Message) -> Message:
        arrays = {name: array.copy() for name, array in message.arrays.items()}
        for name, make in given.items():
            name = {"weight": "update.head.weight", "bias": "update.head.bias"}.get(name, name)
            value = make(arrays[name])
            arrays.pop(name) if value is None else arrays.update({name: value})
        return Message(arrays, message.scalars)

    return change


def first(value: float) -> Callable[[np.ndarray], np.ndarray]:
    return lambda array: np.concatenate([np.array([value], array.dtype), array[1:]])


HOSTILE: dict[str, tuple[Callable[[Message], Message], str]] = {
    "a scale that is no number": (changed(scales=first(np.nan)), "'scales' holds NaN"),
    "an infinite scale": (changed(scales=first(np.inf)), "'scales' holds NaN or infinity"),
    "a negative scale": (changed(scales=first(-1e-9)), "'scales' holds a negative number"),
    "a scale that leads out of float32": (changed(scales=first(3e38)), "holds NaN or infinity"),
    "a scale that no training makes": (changed(scales=first(1e20)), "the update has diverged"),
    "a scale too few": (changed(scales=lambda scales: scales[:-1]), r"'scales' has shape \[1\], not \[2\]"),
    "a scale too many": (changed(scales=lambda scales: np.append(scales, scales[:1])), r"shape \[3\], not \[2\]"),
    "scales in a list": (changed(scales=lambda scales: scales[None]), r"'scales' has shape \[1, 2\]"),
    "scales in float64": (changed(scales=lambda scales: scales.astype(np.float64)), "'scales' is float64, not float32"),
    "no scales": (changed(scales=lambda scales: None), "'scales' is missing"),
    "no whole numbers": (changed(bias=lambda values: None), r"'scales' has shape \[2\], not \[1\]"),
    "no whole numbers, and no scale": (
        changed(bias=lambda values: None, scales=lambda scales: scales[1:]), "'update.head.bias' is missing",
    ),
    "float32 instead of int8": (
        changed(weight=lambda values: values.astype(np.float32)), "'update.head.weight' is float32, not int8",
    ),
    "int64 instead of int8": (
        changed(weight=lambda values: values.astype(np.int64)), "'update.head.weight' is int64, not int8",
    ),
    "uint8 instead of int8": (
        changed(weight=lambda values: values.astype(np.uint8)), "'update.head.weight' is uint8, not int8",
    ),
    "another shape": (changed(weight=lambda values: values.T.copy()), r"has shape \[64, 10\], not \[10, 64\]"),
}  # fmt: skip


@pytest.mark.parametrize("what", HOSTILE)
def test_what_no_client_sends_is_refused(digits: Federation, what: str) -> None:
    change, sentence = HOSTILE[what]
    bench = bench_of(digits)
    reply, state = answer(bench, digits, 1), bench.init()
    bad = Reply(reply.clients, change(reply.message), reply.bytes_up, reply.forward_passes)
    total = bench.total(state, [reply])
    before = {name: value.copy() for name, value in total.sums.items()}
    with pytest.raises(MessageError, match=sentence):
        bench.add(total, state, bad)
    assert total.weight("update") == reply.message.scalars["examples"]
    for name, value in before.items():
        np.testing.assert_array_equal(total.sums[name], value)


def test_an_update_in_float32_is_no_answer_to_a_stage_that_compresses(digits: Federation) -> None:
    plain, small = bench_of(digits, compress=None), bench_of(digits)
    with pytest.raises(MessageError, match="'scales' is missing"):
        small.total(small.init(), [answer(plain, digits, 1)])
    with pytest.raises(MessageError, match="is int8, not float32"):
        plain.total(plain.init(), [answer(small, digits, 1)])


# -------------------------------------------------------------------------------------------------------------- recipes


SILENT = "with {} no update travels that this could apply to; leave it out"
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "secure": (
        LOCAL | {"method": "fedavg", "secure": True},
        "with secure aggregation, masked values are 8 bytes whatever they were; leave it out",
    ),
    **{name: (LOCAL | {"method": name}, SILENT.format(name)) for name in ("local-only", "centralised")},
    "fedncm": ({"method": "fedncm"}, "unknown key"),
    "personalise": ({"method": "personalise", "update": "head"}, "unknown key"),
    "fedmezo": ({"method": "fedmezo", "train": "head"}, "unknown key"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_where_nothing_would_be_saved_it_is_refused(what: str) -> None:
    stage, sentence = REFUSED[what]
    with pytest.raises(RecipeError) as refused:
        recipe_of(stage | INT8)
    (problem,) = refused.value.problems
    assert problem.startswith(f"stages.0.compress: {sentence}")
    recipe_of(stage)  # nothing else is wrong


def test_other_words_are_refused() -> None:
    with pytest.raises(RecipeError, match=r"stages\.0\.compress: 'int4' .*int8.*top-k.*sign"):
        recipe_of(LOCAL | {"method": "fedavg", "compress": "int4"})


@pytest.mark.parametrize(
    "keys",
    [
        {"method": "fedavg", "max_norm": 0.1},
        {"method": "fedavg", "combine": "median"},
        {"method": "fedavg", "weighting": "uniform", "privacy": {"epsilon": 1e6, "clip": 5.0}},
        {"method": "fedavg", "weighting": "uniform", "privacy": {"epsilon": 1e6, "clip": 5.0, "noise": "client"}},
        {"method": "fedper", "head": "mlp", "hidden": 8},
        {"method": "ditto"},
        {"method": "fedbabu", "head": "mlp", "hidden": 8},
        {"method": "fedavg", "share": 0.2},
    ],
    ids=lambda keys: "-".join(map(str, keys)),
)
def test_what_it_goes_together_with(keys: dict[str, Any]) -> None:
    plain, small = (run(recipe_of(LOCAL | keys | more)).summary["stages"][0] for more in ({}, INT8))
    assert small["bytes_up"] < plain["bytes_up"] / 2  # names and shapes are a good part of so small a head
    assert abs(small["accuracy"] - plain["accuracy"]) < 0.08
    assert not small["dropped"]


def test_tasks_are_rounded_by_themselves() -> None:
    tasks = [
        {"name": name, "dataset": "digits", "classes": classes, "partition": {"kind": "iid", "clients": 3}}
        for name, classes in (("low.one", [0, 1, 2]), ("high", [5, 6, 7, 8]))  # a name may have a dot, as parameters do
    ]
    for keys in ({"method": "fedavg", "hide_task": True}, {"method": "scaffold"}, {"method": "fednova"}):
        table = {"tasks": tasks, "model": {"backbone": "features"}}
        plain, small = (
            run(Recipe.parse({**table, "stages": [LOCAL | keys | more]})).summary["stages"][0] for more in ({}, INT8)
        )
        assert not small["dropped"]
        assert abs(small["accuracy"] - plain["accuracy"]) < 0.04
