"""One matrix: every registered method through the same checks."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest

from headstart.config.recipe import Recipe
from headstart.config.stage import STAGES
from headstart.core.ledger import Ledger
from headstart.core.message import Message
from headstart.data import Federation
from headstart.engine import local
from headstart.engine.local import play
from headstart.engine.rounds import rounds_of
from headstart.engine.store import ClientStore
from headstart.errors import HeadstartError, MessageError
from headstart.heads import LinearHead
from headstart.heads.estimators import Fed3R, FedCOF, FedNCM
from headstart.methods import METHODS, Reply, Setting, StatisticsMethod, build
from headstart.solvers.cohort import Cohort

VARIANTS: dict[str, dict[str, Any]] = {
    "fedncm": {"method": "fedncm"},
    "fedncm-euclidean": {"method": "fedncm", "distance": "euclidean"},
    "fed3r": {"method": "fed3r"},
    "fed3r-paper": {"method": "fed3r", "ridge": 0.01, "bias": False},
    "fed3r-random-features": {"method": "fed3r", "random_features": 30},
    "fedcof": {"method": "fedcof"},
    "fedcof-paper": {"method": "fedcof", "shrinkage": 1.0},
    "fedcof-means": {"method": "fedcof", "means_per_client": 3},
    "fedcof-full": {"method": "fedcof", "covariance": "full"},
    "fedcof-diagonal": {"method": "fedcof", "covariance": "diagonal"},
    "fedcof-spherical": {"method": "fedcof", "covariance": "spherical"},
}
LOCAL = {"train": "head", "rounds": 4, "lr": 0.002, "batch_size": 20, "local_epochs": 2}
TRAINING: dict[str, dict[str, Any]] = {
    "fedavg": {"method": "fedavg"},
    "fedavg-everything": {
        "method": "fedavg", "momentum": 0.5, "weight_decay": 0.01, "clip": 5.0, "temperature": 0.5,
        "schedule": "cosine", "warmup_rounds": 1, "weighting": "uniform", "server_lr": 0.5, "head_init": "zeros",
    },
    "fedprox": {"method": "fedprox", "mu": 0.1},
    "fedavgm": {"method": "fedavgm"},
    "fedadam": {"method": "fedadam"},
    "fedadam-torch": {"method": "fedadam", "beta2": 0.999, "tau": 1e-8, "bias_correction": True},
    "fedyogi": {"method": "fedyogi"},
    "fedadagrad": {"method": "fedadagrad"},
    "feddyn": {"method": "feddyn", "alpha_dyn": 0.1},
    "scaffold": {"method": "scaffold"},
    "fednova": {"method": "fednova", "momentum": 0.5, "mu": 0.01},
    "centralised": {"method": "centralised", "momentum": 0.9},
    "fedavg-mlp": {"method": "fedavg", "head": "mlp", "hidden": 12, "lr": 0.01},
    "scaffold-mlp": {"method": "scaffold", "head": "mlp", "hidden": 12, "lr": 0.01},
}  # fmt: skip
ZEROTH: dict[str, dict[str, Any]] = {
    "fedmezo": {"method": "fedmezo", "num_directions": 3},
    "fedmezo-batches": {"method": "fedmezo", "batch_size": 8, "weighting": "uniform", "weight_decay": 0.1},
    "distmezo": {"method": "distmezo", "local_steps": 2, "num_directions": 2},
}
MLP = {"head": "mlp", "hidden": 12, "lr": 0.01, "momentum": 0.5}
PERSONAL: dict[str, dict[str, Any]] = {
    "fedbabu": MLP | {"method": "fedbabu", "mu": 0.1},
    "fedper": MLP | {"method": "fedper"},
    "fedrep": MLP | {"method": "fedrep", "head_epochs": 2},
    "lg-fedavg": MLP | {"method": "lg-fedavg"},
    "per-fedavg": {"method": "per-fedavg", "momentum": 0.5},
    "per-fedavg-mlp": MLP | {"method": "per-fedavg"},
    "ditto": {"method": "ditto", "momentum": 0.5},
    "ditto-mlp": MLP | {"method": "ditto", "lambda_ditto": 0.1},
    "local-only": {"method": "local-only", "momentum": 0.9},
    "local-only-plain": MLP | {"method": "local-only", "momentum": 0.0},
    "fedavg-share": {"method": "fedavg", "share": 0.3},
}
PERSONALISE: dict[str, dict[str, Any]] = {
    "personalise": {"method": "personalise", "update": "head", "epochs": 3, "lr": 0.002, "batch_size": 20},
    "personalise-computed": {"method": "personalise", "compute": "fedncm"},
}
PERSONAL_METHODS = ("fedper", "fedrep", "lg-fedavg", "ditto", "local-only", "personalise")
SILENT = ("local-only", "local-only-plain", *PERSONALISE)
CLOSED_FORM = list(VARIANTS)
VARIANTS |= {name: LOCAL | keys for name, keys in (TRAINING | PERSONAL).items()} | PERSONALISE
VARIANTS |= {name: {"train": "head", "rounds": 4, "lr": 1e-3} | keys for name, keys in ZEROTH.items()}
CLIENTS = 12


def recipe_of(variant: str, **keys: Any) -> Recipe:
    """With the keys that the variant has: the oracle has no clients to draw, and who personalises is everybody."""
    if variant in ("centralised", *PERSONALISE):
        keys = {name: value for name, value in keys.items() if name != "clients_per_round"}
    if variant in PERSONALISE and "rounds" in keys:
        keys["epochs"] = keys.pop("rounds")
    partition = {"kind": "dirichlet", "clients": CLIENTS, "alpha": 0.2}
    return Recipe.parse(
        {
            "data": {"dataset": "digits", "partition": partition},
            "model": {"backbone": "features"},
            "stages": [VARIANTS[variant] | keys],
        }
    )


def setting_of(federation: Federation) -> Setting:
    return Setting(10, 64, (0, 0), federation.n_clients, int(federation.sizes.sum()))


def play_on(method: Any, recipe: Recipe, federation: Federation, ledger: Ledger, after: Any = None, **keys: Any) -> Any:
    """The state after the stage; ``ends`` [K, …] of the method is then what is each client's own."""
    features = federation.dataset.train.features()
    with TemporaryDirectory() as folder:
        store = ClientStore(Path(folder), federation.n_clients, method.kept_shapes, None)
        for client, kept in keys.pop("kept", []):
            store.write(client, kept)
        store.commit()
        after = after or (lambda *_: None)
        state = play(method, recipe.stages[0], federation, features, (0, 0), ledger, store, after, **keys)
        method.ends = method.own(partial(store.read, clients=np.arange(federation.n_clients)))
        return state


def values_of(method: Any, state: Any) -> dict[str, np.ndarray]:
    """Everything that has come of a stage: what the server knows, and what is each client's own."""
    return {**method.freeze(state).arrays, **{f"own {name}": value for name, value in method.ends.items()}}


def same(left: dict[str, np.ndarray], right: dict[str, np.ndarray], **tolerance: float) -> None:
    assert left.keys() == right.keys()
    for name, value in left.items():
        if tolerance:
            np.testing.assert_allclose(value, right[name], err_msg=name, **tolerance)
        else:
            np.testing.assert_array_equal(value, right[name], err_msg=name)


def played(variant: str, **keys: Any) -> tuple[LinearHead, Ledger, Any, Federation]:
    recipe = recipe_of(variant, **keys)
    federation = Federation.of(recipe)
    method = build(recipe.stages[0], setting_of(federation))
    ledger = Ledger.open(federation.n_clients)
    state = play_on(method, recipe, federation, ledger)
    method.made = values_of(method, state)
    return method.head(state), ledger, method, federation


def test_the_matrix_covers_every_method() -> None:
    assert set(METHODS) == set(STAGES)
    # What needs a transformer is tested on one, beside its formulas.
    assert {keys["method"] for keys in VARIANTS.values()} == set(METHODS) - {"slora", "fedyolo"}


@pytest.mark.parametrize("variant", VARIANTS)
def test_many_clients_at_once_say_what_they_say_one_by_one(variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    together, costs, method, _ = played(variant)
    everything = method.made
    monkeypatch.setattr(local, "_COHORT_EXAMPLES", 1)  # every client is a cohort of its own
    alone, alone_costs, again, _ = played(variant)
    if variant in CLOSED_FORM and method.moments is None:
        np.testing.assert_array_equal(alone.weight, together.weight)
    else:  # a batched product may add in another order than a product for each
        np.testing.assert_allclose(alone.weight, together.weight, rtol=1e-4, atol=1e-5)
    if variant not in CLOSED_FORM:
        same(again.made, everything, rtol=1e-3, atol=1e-5)
    np.testing.assert_array_equal(alone_costs.bytes_up, costs.bytes_up)
    np.testing.assert_array_equal(alone_costs.bytes_down, costs.bytes_down)
    np.testing.assert_array_equal(alone_costs.forward_passes, costs.forward_passes)


@pytest.mark.parametrize("variant", [name for name in VARIANTS if name != "centralised"])
def test_bytes_are_those_of_the_serialised_messages(variant: str) -> None:
    _, ledger, method, federation = played(variant, rounds=1)
    features = federation.dataset.train.features()
    instruction = method.instruct(method.open(), 0, -1)
    for client in range(CLIENTS):
        (reply,) = method.answer(cohort_of(client, federation, features, method), round_trip(instruction))
        travels = variant not in SILENT
        assert bool(reply.message.arrays) is travels
        assert ledger.bytes_up[client] == (len(reply.message.to_bytes()) if travels else 0)
        assert ledger.bytes_down[client] == (len(instruction.to_bytes()) if travels else 0)
        assert ledger.forward_passes[client] == federation.sizes[client]


def round_trip(message: Message) -> Message:
    return Message.from_bytes(message.to_bytes())


def cohort_of(client: int, federation: Federation, features: np.ndarray, method: Any) -> Cohort:
    rows, owners = federation.rows_of(np.array([client]))
    labels = federation.dataset.train.labels[rows]

    def nothing(name: str, start: np.ndarray | None) -> np.ndarray:
        return np.zeros((1, *method.kept_shapes[name]), np.float32) + (0 if start is None else start)

    return Cohort(np.array([client]), features, rows, labels, owners, np.array([True]), nothing)


@pytest.mark.parametrize("variant", [name for name, keys in VARIANTS.items() if keys["method"] in PERSONAL_METHODS])
def test_what_is_a_clients_own_never_travels(variant: str) -> None:
    """Neither by name nor by its bytes, in any message of any round; what travels and what is own is everything."""
    recipe = recipe_of(variant)
    federation = Federation.of(recipe)
    method: Any = build(recipe.stages[0], setting_of(federation))
    messages, kept = overheard(method)
    state = play_on(method, recipe, federation, Ledger.open(CLIENTS))
    assert method.personal
    travelled = {name.split(".", 1)[1] for message in messages for name in message.arrays}
    assert travelled == set(state.parameters)
    if not method.copies:
        assert not travelled & method.ends.keys()
        assert travelled | method.ends.keys() == {f"head.{name}" for name in method.head(state).arrays()}
    assert len(kept) >= CLIENTS
    assert not any(holds(messages, array) for array in kept if len(set(array.ravel().tolist())) > 5)


def overheard(method: Any) -> tuple[list[Message], list[np.ndarray]]:
    """Lists that fill with all that travels from now on, and all that clients keep."""
    messages: list[Message] = []
    kept: list[np.ndarray] = []
    answer, instruct = method.answer, method.instruct

    def answered(cohort: Cohort, message: Message) -> list[Reply]:
        replies: list[Reply] = answer(cohort, message)
        messages.extend(reply.message for reply in replies)
        kept.extend(array for reply in replies for array in reply.kept.values())
        return replies

    def instructed(*arguments: Any) -> Message:
        messages.append(instruct(*arguments))
        return messages[-1]

    method.answer, method.instruct = answered, instructed
    return messages, kept


def holds(messages: list[Message], array: np.ndarray) -> bool:
    """Whether the bytes of an array are in any of the messages."""
    return any(array.tobytes() in message.to_bytes() for message in messages)


@pytest.mark.parametrize("variant", CLOSED_FORM)
def test_several_rounds_accumulate_to_the_one_round_head(variant: str) -> None:
    once, _, _, _ = played(variant)
    later, ledger, _, federation = played(variant, clients_per_round=5)
    np.testing.assert_allclose(later.weight, once.weight, rtol=1e-4, atol=1e-5)
    assert ledger.forward_passes.sum() == federation.sizes.sum()  # nobody is heard twice
    early, ledger, _, _ = played(variant, clients_per_round=5, rounds=1)
    assert np.count_nonzero(ledger.bytes_up) == 5
    assert not np.allclose(early.weight, once.weight, atol=1e-3)


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_state_survives_its_checkpoint(variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = recipe_of(variant, clients_per_round=5)
    federation = Federation.of(recipe)
    method = build(recipe.stages[0], setting_of(federation))
    frozen: list[Any] = []
    kept: list[Any] = []
    write = ClientStore.write

    def watch(self: ClientStore, client: int, values: Any) -> None:
        write(self, client, values)
        if not frozen:
            kept.append((client, {name: value.copy() for name, value in values.items()}))

    def freeze(number: int, state: Any) -> None:
        frozen.append(round_trip(method.freeze(state)))

    monkeypatch.setattr(ClientStore, "write", watch)
    state = play_on(method, recipe, federation, Ledger.open(CLIENTS), freeze)
    expected = values_of(method, state)
    ledger = Ledger.open(CLIENTS)
    again = build(recipe.stages[0], setting_of(federation))
    resumed = play_on(again, recipe, federation, ledger, state=again.thaw(frozen[0]), first_round=1, kept=kept)
    np.testing.assert_array_equal(again.head(resumed).weight, method.head(state).weight)
    same(values_of(again, resumed), expected)


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_seed_reproduces(variant: str) -> None:
    one, two = (played(variant) for _ in range(2))
    np.testing.assert_array_equal(one[0].weight, two[0].weight)
    same(one[2].made, two[2].made)


@pytest.mark.parametrize("variant", [name for name in VARIANTS if name not in SILENT])
@pytest.mark.parametrize("damage", ["nan", "shape", "absent"])
def test_a_bad_message_is_refused_and_the_round_goes_on(
    variant: str, damage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "_COHORT_EXAMPLES", 1)
    kind = type(build(recipe_of(variant).stages[0], Setting(10, 64, (0, 0))))
    honest = kind.answer
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

    monkeypatch.setattr(kind, "answer", answer)
    head, ledger, _, _ = played(variant)
    assert {drop["clients"] for drop in ledger.dropped} == {"client-3"}
    assert [drop["round"] for drop in ledger.dropped] == [*range(1, 1 + len(ledger.dropped))]
    assert np.isfinite(head.weight).all()


def test_an_exploded_update_is_refused() -> None:
    method: Any = build(recipe_of("fedavg").stages[0], Setting(10, 64, (0, 0)))
    arrays = {"update.head.weight": np.full((10, 64), 1e6, np.float32), "update.head.bias": np.zeros(10, np.float32)}
    reply = Reply(np.array([0]), Message(arrays, {"examples": 5, "steps": 1}), np.array([0]), np.array([0]))
    with pytest.raises(MessageError, match="exploded"):
        method.fold(method.open(), reply)


@pytest.mark.parametrize("scalar", [{"examples": 0}, {"examples": 2.5}, {"examples": -3}, {}])
def test_an_impossible_number_of_examples_is_refused(scalar: dict[str, Any]) -> None:
    method = build(recipe_of("fedavg").stages[0], Setting(10, 64, (0, 0)))
    arrays = {"update.head.weight": np.zeros((10, 64), np.float32), "update.head.bias": np.zeros(10, np.float32)}
    reply = Reply(np.array([0]), Message(arrays, scalar), np.array([0]), np.array([0]))
    with pytest.raises(MessageError, match="examples"):
        method.fold(method.open(), reply)


def test_no_usable_answer_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    def fold(self: Any, state: Any, reply: Reply) -> Any:
        raise MessageError("array 'sums' holds NaN or infinity")

    monkeypatch.setattr(StatisticsMethod, "fold", fold)
    with pytest.raises(HeadstartError, match="fedncm, round 1: 0 of 12 clients gave a usable answer"):
        played("fedncm")


@pytest.mark.parametrize(
    ("variant", "estimator"),
    [("fedncm", FedNCM()), ("fed3r", Fed3R()), ("fedcof", FedCOF()), ("fedcof-full", FedCOF(covariance="full"))],
)
def test_a_federation_gives_the_estimators_head(variant: str, estimator: FedNCM) -> None:
    head, _, _, federation = played(variant)
    held = federation.owners >= 0
    x, y = federation.dataset.train.features()[held], federation.dataset.train.labels[held]
    direct = estimator.fit(x, y, client=federation.owners[held])
    np.testing.assert_allclose(head.weight, direct.coef_, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("keys", "most"), [({}, 1), ({"method": "fedcof", "means_per_client": 3}, 3)])
def test_a_client_speaks_of_a_class_as_often_as_its_method_asks(keys: dict[str, Any], most: int) -> None:
    stage = {"method": "fedncm", **keys}
    table = {"data": {"dataset": "digits"}, "model": {"backbone": "features"}, "stages": [stage]}
    method = build(Recipe.parse(table).stages[0], Setting(3, 2, (0, 0)))
    for times in (most, most + 1):
        rows = np.ones(times, np.int32)
        message = Message({"labels": rows, "counts": rows, "sums": np.ones((times, 2), np.float32)})
        reply = Reply(np.array([0]), message, np.array([0]), np.array([0]))
        if times == most:
            assert sum(len(heard.labels) for heard in method.fold(method.open(), reply)) == most
        else:
            with pytest.raises(MessageError, match=f"class 1 is sent {times} times, more than {most}"):
                method.fold(method.open(), reply)


def test_published_costs_by_hand() -> None:
    """The papers' formulas, with their own numbers: FedNCM's CIFAR-10 row and FedCOF's CIFAR-100 rows."""
    cifar10 = np.ones((100, 10), np.int64)
    fedncm = build(recipe_of("fedncm").stages[0], Setting(10, 512, (0, 0)))
    assert fedncm.published(fedncm.open(), cifar10).bytes == 2 * 512 * 10 * 100 * 4
    counts = np.zeros((100, 100), np.int64)
    counts.ravel()[:2870] = 1  # P = 2,870 means, MobileNetV2 features
    fed3r = build(recipe_of("fed3r").stages[0], Setting(100, 1280, (0, 0)))
    assert round(fed3r.published(fed3r.open(), counts).bytes / 1e6, 1) == 670.1
    recipe = recipe_of("fedcof")
    federation = Federation.of(recipe)
    fedcof = build(recipe.stages[0], setting_of(federation))
    state = play_on(fedcof, recipe, federation, Ledger.open(CLIENTS))
    assert fedcof.published(state, federation.counts).bytes == np.count_nonzero(federation.counts) * 64 * 4
    # Linear probing on CIFAR-10 in table 2: 200 rounds of 100 clients are 0.82 GB, both ways.
    probe = build(recipe_of("fedavg").stages[0], Setting(10, 512, (0, 0), n_clients=100))
    published = probe.published(replace(probe.open(), round=200), np.full((100, 10), 50))
    assert published.bytes == 2 * 512 * 10 * 100 * 200 * 4
    assert published.forward_passes == 200 * 2 * 50_000  # two local epochs


@pytest.mark.parametrize(
    ("covariance", "extra"), [("estimated", 0), ("full", 64 * 64), ("diagonal", 64), ("spherical", 1)]
)
def test_published_costs_of_fedcofs_oracles(covariance: str, extra: int) -> None:
    """A mean [64] and, where clients send them, the second moments of its class, for each class of each client."""
    fedcof = build(recipe_of("fedcof", covariance=covariance).stages[0], Setting(3, 64, (0, 0)))
    none = fedcof.open()[0]
    heard = replace(none, labels=np.arange(3), counts=np.full(3, 5), sums=np.ones((3, 64)))
    assert fedcof.published((heard, heard), np.full((2, 3), 5)).bytes == 2 * 3 * (64 + extra) * 4


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
    assert rounds_of(recipe_of("fedncm", **keys).stages[0], CLIENTS) == expected
