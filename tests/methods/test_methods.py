"""One matrix: every registered method through the same checks."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from headstart.channel.statistics import StatisticsChannel
from headstart.config.recipe import Recipe
from headstart.config.stage import STAGES
from headstart.core.ledger import Ledger, Published
from headstart.core.message import Message
from headstart.core.reply import Reply
from headstart.core.state import pack
from headstart.data import Federation
from headstart.engine import local
from headstart.engine.client import ClientRuntime
from headstart.engine.client_states import ClientStates
from headstart.errors import HeadstartError, MessageError
from headstart.heads import LinearHead
from headstart.heads.estimators import Fed3R, FedCOF, FedNCM
from headstart.methods import METHODS
from headstart.methods.closed_form import ClosedFormState
from headstart.runner.costs import paper_cost
from headstart.solvers.cohort import Cohort
from tests.helpers import Bench, cohort_of, context_of, played_on, round_trip
from tests.variants import CLIENTS, CLOSED_FORM, ON_MODULES, PERSONAL_METHODS, SILENT, VARIANTS, recipe_of


def bench_of(recipe: Recipe, federation: Federation) -> Bench:
    stage, clients, examples = recipe.stages[0], federation.n_clients, int(federation.sizes.sum())
    return Bench(stage, context_of(stage, 10, 64, clients=clients, examples=examples))


def lone(variant: str, n_classes: int = 10, dim: int = 64, **keys: Any) -> Bench:
    """The stage of a variant, without a federation."""
    stage = recipe_of(variant, **keys).stages[0]
    return Bench(stage, context_of(stage, n_classes, dim))


def values_of(state: Any, own: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Everything that has come of a stage: what the server knows, and what is each client's own."""
    return {**pack(state).arrays, **{f"own {name}": value for name, value in own.items()}}


def same(left: dict[str, np.ndarray], right: dict[str, np.ndarray], **tolerance: float) -> None:
    assert left.keys() == right.keys()
    for name, value in left.items():
        if tolerance:
            np.testing.assert_allclose(value, right[name], err_msg=name, **tolerance)
        else:
            np.testing.assert_array_equal(value, right[name], err_msg=name)


class Played:
    """A variant played to its end."""

    def __init__(self, variant: str, **keys: Any) -> None:
        recipe = recipe_of(variant, **keys)
        self.federation = Federation.of(recipe)
        self.bench = bench_of(recipe, self.federation)
        self.ledger = Ledger.open(self.federation.n_clients)
        self.state, self.own = played_on(self.bench, self.federation, self.ledger)
        self.head: LinearHead = self.bench.head(self.state)

    @property
    def values(self) -> dict[str, np.ndarray]:
        return values_of(self.state, self.own)


def test_the_matrix_covers_every_method() -> None:
    assert set(METHODS) == set(STAGES)
    # What needs a transformer is tested on one, beside its formulas.
    assert {keys["method"] for keys in VARIANTS.values()} == set(METHODS) - set(ON_MODULES)


@pytest.mark.parametrize("variant", VARIANTS)
def test_many_clients_at_once_say_what_they_say_one_by_one(variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    together = Played(variant)
    monkeypatch.setattr(local, "_COHORT_EXAMPLES", 1)  # every client is a cohort of its own
    alone = Played(variant)
    if variant in CLOSED_FORM and together.bench.method.moments is None:
        np.testing.assert_array_equal(alone.head.weight, together.head.weight)
    else:  # a batched product may add in another order than a product for each
        np.testing.assert_allclose(alone.head.weight, together.head.weight, rtol=1e-4, atol=1e-5)
    if variant not in CLOSED_FORM:
        same(alone.values, together.values, rtol=1e-3, atol=1e-5)
    np.testing.assert_array_equal(alone.ledger.bytes_up, together.ledger.bytes_up)
    np.testing.assert_array_equal(alone.ledger.bytes_down, together.ledger.bytes_down)
    np.testing.assert_array_equal(alone.ledger.forward_passes, together.ledger.forward_passes)


@pytest.mark.parametrize("variant", [name for name in VARIANTS if name != "centralised"])
def test_bytes_are_those_of_the_serialised_messages(variant: str) -> None:
    done = Played(variant, rounds=1)
    bench, ledger = bench_of(recipe_of(variant, rounds=1), done.federation), done.ledger
    travels, state = variant not in SILENT, bench.init()
    up, down = np.zeros(CLIENTS, np.int64), np.zeros(CLIENTS, np.int64)
    for round in range(bench.stage.rounds_for(CLIENTS)):  # more than one where clients are heard again
        message, replies = bench.broadcast(state, round), []
        for client in range(CLIENTS):
            (reply,) = bench.answer(first_cohort(bench, done.federation, client), round_trip(message))
            assert bool(reply.message.arrays) is travels
            up[client] += len(reply.message.to_bytes()) if travels else 0
            down[client] += len(message.to_bytes()) if travels else 0
            replies.append(reply)
        state = bench.after(state, replies, round) if travels else state
    np.testing.assert_array_equal(ledger.bytes_up, up)
    np.testing.assert_array_equal(ledger.bytes_down, down)
    np.testing.assert_array_equal(ledger.forward_passes, done.federation.sizes)


def first_cohort(bench: Bench, federation: Federation, client: int) -> Cohort:
    """A client by itself, in its first round."""
    rows, _ = federation.rows_of(np.array([client]))
    train = federation.dataset.train
    return cohort_of(bench, client, train.features(), rows, train.labels[rows])


@pytest.mark.parametrize("variant", [name for name, keys in VARIANTS.items() if keys["method"] in PERSONAL_METHODS])
def test_what_is_a_clients_own_never_travels(variant: str) -> None:
    """Neither by name nor by its bytes, in any message of any round; what travels and what is own is everything."""
    recipe = recipe_of(variant)
    federation = Federation.of(recipe)
    bench = bench_of(recipe, federation)
    messages, kept = overheard(bench)
    state, own = played_on(bench, federation, Ledger.open(CLIENTS))
    assert bench.method.personal
    travelled = {name.split(".", 1)[1] for message in messages for name in message.arrays}
    assert travelled == set(state.params)
    if not bench.method.twin:
        assert not travelled & own.keys()
        assert travelled | own.keys() == {f"head.{name}" for name in bench.head(state).arrays()}
    assert len(kept) >= CLIENTS
    assert not any(holds(messages, array) for array in kept if len(set(array.ravel().tolist())) > 5)


def overheard(bench: Bench) -> tuple[list[Message], list[np.ndarray]]:
    """Lists that fill with all that travels from now on, and all that clients keep."""
    messages: list[Message] = []
    kept: list[np.ndarray] = []

    class Listening(ClientRuntime):
        def answer(self, cohort: Cohort, message: Message) -> list[Reply]:
            replies = super().answer(cohort, message)
            messages.extend(reply.message for reply in replies)
            kept.extend(array for reply in replies for array in reply.state.values())
            return replies

    broadcast = bench.method.broadcast

    def sent(*arguments: Any) -> Message:
        messages.append(broadcast(*arguments))
        return messages[-1]

    bench.runtime, bench.method.broadcast = Listening(bench.method, bench.channel), sent
    return messages, kept


def holds(messages: list[Message], array: np.ndarray) -> bool:
    """Whether the bytes of an array are in any of the messages."""
    return any(array.tobytes() in message.to_bytes() for message in messages)


@pytest.mark.parametrize("variant", CLOSED_FORM)
def test_several_rounds_accumulate_to_the_one_round_head(variant: str) -> None:
    once, later = Played(variant), Played(variant, clients_per_round=5)
    np.testing.assert_allclose(later.head.weight, once.head.weight, rtol=1e-4, atol=1e-5)
    assert later.ledger.forward_passes.sum() == later.federation.sizes.sum()  # nobody is heard twice
    early = Played(variant, clients_per_round=5, rounds=1)
    assert np.count_nonzero(early.ledger.bytes_up) == 5
    assert not np.allclose(early.head.weight, once.head.weight, atol=1e-3)


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_state_survives_its_checkpoint(variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = recipe_of(variant, clients_per_round=5)
    federation = Federation.of(recipe)
    bench = bench_of(recipe, federation)
    saved: list[Any] = []
    kept: list[Any] = []
    write = ClientStates.write

    def watch(self: ClientStates, client: int, values: Any) -> None:
        write(self, client, values)
        if not saved:
            kept.append((client, {name: value.copy() for name, value in values.items()}))

    monkeypatch.setattr(ClientStates, "write", watch)
    state, own = played_on(
        bench, federation, Ledger.open(CLIENTS), lambda number, state: saved.append(bench.saved(state))
    )
    again = bench_of(recipe, federation)
    resumed, own_again = played_on(again, federation, Ledger.open(CLIENTS), state=saved[0], first_round=1, kept=kept)
    np.testing.assert_array_equal(again.head(resumed).weight, bench.head(state).weight)
    same(values_of(resumed, own_again), values_of(state, own))


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_seed_reproduces(variant: str) -> None:
    one, two = (Played(variant) for _ in range(2))
    np.testing.assert_array_equal(one.head.weight, two.head.weight)
    same(one.values, two.values)


@pytest.mark.parametrize("variant", [name for name in VARIANTS if name not in SILENT])
@pytest.mark.parametrize("damage", ["nan", "shape", "absent"])
def test_a_bad_message_is_refused_and_the_round_goes_on(
    variant: str, damage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "_COHORT_EXAMPLES", 1)
    honest = ClientRuntime.answer
    name = "sums" if variant in CLOSED_FORM else "slopes" if variant.startswith("fedmezo") else "update.head.weight"
    name = "update.head.hidden.0.weight" if variant in ("fedbabu", "fedper", "fedrep") else name

    def answer(self: Any, cohort: Any, message: Message) -> list[Reply]:
        (reply,) = honest(self, cohort, message)
        if cohort.clients[0] != 3:
            return [reply]
        arrays = dict(reply.message.arrays)
        if damage == "absent":
            del arrays[name]
        else:
            arrays[name] = arrays[name] * np.float32(np.nan) if damage == "nan" else arrays[name][..., 1:]
        return [replace(reply, message=Message(arrays, reply.message.scalars))]

    monkeypatch.setattr(ClientRuntime, "answer", answer)
    done = Played(variant)
    assert {drop["clients"] for drop in done.ledger.dropped} == {"client-3"}
    assert [drop["round"] for drop in done.ledger.dropped] == [*range(1, 1 + len(done.ledger.dropped))]
    assert np.isfinite(done.head.weight).all()


def test_a_diverged_update_is_refused() -> None:
    bench = lone("fedavg")
    arrays = {"update.head.weight": np.full((10, 64), 1e6, np.float32), "update.head.bias": np.zeros(10, np.float32)}
    reply = Reply(np.array([0]), Message(arrays, {"examples": 5, "steps": 1}), np.array([0]), np.array([0]))
    with pytest.raises(MessageError, match="has diverged"):
        bench.total(bench.init(), [reply])


@pytest.mark.parametrize("scalar", [{"examples": 0}, {"examples": 2.5}, {"examples": -3}, {}])
def test_an_impossible_number_of_examples_is_refused(scalar: dict[str, Any]) -> None:
    bench = lone("fedavg")
    arrays = {"update.head.weight": np.zeros((10, 64), np.float32), "update.head.bias": np.zeros(10, np.float32)}
    reply = Reply(np.array([0]), Message(arrays, scalar), np.array([0]), np.array([0]))
    with pytest.raises(MessageError, match="examples"):
        bench.total(bench.init(), [reply])


def test_no_usable_answer_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    def add(self: Any, total: Any, reply: Reply, sender: Any) -> None:
        raise MessageError("array 'sums' holds NaN or infinity")

    monkeypatch.setattr(StatisticsChannel, "add", add)
    with pytest.raises(HeadstartError, match="fedncm, round 1: 0 of 12 clients sent a usable reply"):
        Played("fedncm")


@pytest.mark.parametrize(
    ("variant", "estimator"),
    [("fedncm", FedNCM()), ("fed3r", Fed3R()), ("fedcof", FedCOF()), ("fedcof-full", FedCOF(covariance="full"))],
)
def test_a_federation_gives_the_estimators_head(variant: str, estimator: FedNCM) -> None:
    done = Played(variant)
    federation = done.federation
    held = federation.owners >= 0
    x, y = federation.dataset.train.features()[held], federation.dataset.train.labels[held]
    direct = estimator.fit(x, y, client=federation.owners[held])
    np.testing.assert_allclose(done.head.weight, direct.coef_, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("variant", "most"), [("fedncm", 1), ("fedcof-means", 3)])
def test_a_client_speaks_of_a_class_as_often_as_its_method_asks(variant: str, most: int) -> None:
    bench = lone(variant, 3, 2)
    for times in (most, most + 1):
        rows = np.ones(times, np.int32)
        arrays = {"labels": rows, "counts": rows, "sums": np.ones((times, 2), np.float32), "within": np.zeros(1)}
        message = Message(arrays)
        reply = Reply(np.array([0]), message, np.array([0]), np.array([0]))
        if times == most:
            assert len(bench.total(bench.init(), [reply]).merged().labels) == most
        else:
            with pytest.raises(MessageError, match=f"class 1 is sent {times} times, more than {most}"):
                bench.total(bench.init(), [reply])


def cost_of(bench: Bench, counts: np.ndarray, state: Any = None, rounds: int = 1) -> Published:
    """What a stage costs as its paper counts it."""
    tasks, dim = bench.context.tasks, bench.context.dim
    return paper_cost(bench.stage, bench.method, tasks, dim, rounds, counts, bench.init() if state is None else state)


def test_published_costs_by_hand() -> None:
    """The papers' formulas, with their own numbers: FedNCM's CIFAR-10 row and FedCOF's CIFAR-100 rows."""
    cifar10 = np.ones((100, 10), np.int64)
    assert cost_of(lone("fedncm", 10, 512), cifar10).bytes == 2 * 512 * 10 * 100 * 4
    counts = np.zeros((100, 100), np.int64)
    counts.ravel()[:2870] = 1  # P = 2,870 means, MobileNetV2 features
    assert round(cost_of(lone("fed3r", 100, 1280), counts).bytes / 1e6, 1) == 670.1
    done = Played("fedcof-paper")
    published = cost_of(done.bench, done.federation.counts, done.state)
    assert published.bytes == np.count_nonzero(done.federation.counts) * 64 * 4
    # Linear probing on CIFAR-10 in table 2: 200 rounds of 100 clients are 0.82 GB, both ways.
    probe = recipe_of("fedavg").stages[0]
    bench = Bench(probe, context_of(probe, 10, 512, clients=100))
    published = cost_of(bench, np.full((100, 10), 50), rounds=200)
    assert published.bytes == 2 * 512 * 10 * 100 * 200 * 4
    assert published.forward_passes == 200 * 2 * 50_000  # two local epochs


@pytest.mark.parametrize(
    ("keys", "extra"),
    [
        ({"within": "estimated"}, 0),
        ({"covariance": "full"}, 6 * 64 * 64),
        ({"covariance": "diagonal"}, 6 * 64),
        ({"covariance": "spherical"}, 6),
        # Of each of two clients a number, or as many as dimensions; 15 examples around 3 means have 12 directions.
        ({"within": "trace"}, 2),
        ({"within": "diagonal"}, 2 * 64),
        ({"rank": 5}, 2 + 2 * 5 * 64),
        ({"rank": 20}, 2 + 2 * 12 * 64),
        ({"rank": 20, "min_examples": 3}, 2 + 2 * 4 * 64),
    ],
)
def test_published_costs_of_what_fedcofs_clients_tell(keys: dict[str, Any], extra: int) -> None:
    """A mean [64] for each class of each client, and what they send besides: the oracles, of each class."""
    bench = lone("fedcof", 3, **keys)
    none = bench.method.summary.empty()
    heard = replace(none, labels=np.arange(3), counts=np.full(3, 5), sums=np.ones((3, 64)))
    published = cost_of(bench, np.full((2, 3), 5), ClosedFormState((heard, heard)))
    assert published.bytes == (2 * 3 * 64 + extra) * 4


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({}, (1, 12)),
        ({"clients_per_round": 5}, (3, 5)),
        ({"participation": 0.5}, (2, 6)),
        ({"participation": 0.01}, (12, 1)),
        ({"clients_per_round": 100}, (1, 12)),
        ({"clients_per_round": 5, "rounds": 2}, (2, 5)),
    ],
)
def test_rounds(keys: dict[str, Any], expected: tuple[int, int]) -> None:
    stage = recipe_of("fedncm", **keys).stages[0]
    assert (stage.rounds_for(CLIENTS), stage.sampled(CLIENTS)) == expected
