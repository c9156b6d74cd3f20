"""One matrix: every registered method through the same checks."""

from typing import Any

import numpy as np
import pytest

from headstart.data import Federation
from headstart.engine import local
from headstart.engine.local import play, rounds_of
from headstart.errors import HeadstartError, MessageError
from headstart.heads import LinearHead
from headstart.heads.estimators import Fed3R, FedCOF, FedNCM
from headstart.ledger import Ledger
from headstart.methods import METHODS, Reply, Setting
from headstart.recipe import STAGES, Recipe
from headstart.wire import Message

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
CLIENTS = 12


def recipe_of(variant: str, **keys: Any) -> Recipe:
    partition = {"kind": "dirichlet", "clients": CLIENTS, "alpha": 0.2}
    return Recipe.parse(
        {
            "data": {"dataset": "digits", "partition": partition},
            "model": {"backbone": "features"},
            "stages": [VARIANTS[variant] | keys],
        }
    )


def played(variant: str, **keys: Any) -> tuple[LinearHead, Ledger, Any, Federation]:
    recipe = recipe_of(variant, **keys)
    federation = Federation.of(recipe)
    features = federation.dataset.train.features()
    stage = recipe.stages[0]
    method = METHODS[stage.method](stage, Setting(10, 64, (0, 0)))
    ledger = Ledger.open(federation.n_clients)
    state = play(method, stage, federation, features, (0, 0), ledger, lambda number, state: None)
    return method.head(state), ledger, method, federation


def test_the_matrix_covers_every_method() -> None:
    assert {keys["method"] for keys in VARIANTS.values()} == set(METHODS) == set(STAGES)


@pytest.mark.parametrize("variant", VARIANTS)
def test_many_clients_at_once_say_what_they_say_one_by_one(variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    together, costs, method, _ = played(variant)
    monkeypatch.setattr(local, "_COHORT_EXAMPLES", 1)  # every client is a cohort of its own
    alone, alone_costs, _, _ = played(variant)
    if method.moments is None:
        np.testing.assert_array_equal(alone.weight, together.weight)
    else:  # one product of all clients' examples adds in another order than a product for each
        np.testing.assert_allclose(alone.weight, together.weight, rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(alone_costs.bytes_up, costs.bytes_up)
    np.testing.assert_array_equal(alone_costs.bytes_down, costs.bytes_down)
    np.testing.assert_array_equal(alone_costs.forward_passes, costs.forward_passes)


@pytest.mark.parametrize("variant", VARIANTS)
def test_bytes_are_those_of_the_serialised_messages(variant: str) -> None:
    _, ledger, method, federation = played(variant)
    features = federation.dataset.train.features()
    instruction = method.instruct(method.open(), 0)
    for client in range(CLIENTS):
        rows, owners = federation.rows_of(np.array([client]))
        cohort = local.Cohort(np.array([client]), features, rows, federation.dataset.train.labels[rows], owners)
        reply = method.answer(cohort, Message.from_bytes(instruction.to_bytes()))
        assert len(reply.message.to_bytes()) == ledger.bytes_up[client]
        assert len(instruction.to_bytes()) == ledger.bytes_down[client]
        assert ledger.forward_passes[client] == federation.sizes[client]


@pytest.mark.parametrize("variant", VARIANTS)
def test_several_rounds_accumulate_to_the_one_round_head(variant: str) -> None:
    once, _, _, _ = played(variant)
    later, ledger, _, federation = played(variant, clients_per_round=5)
    np.testing.assert_allclose(later.weight, once.weight, rtol=1e-4, atol=1e-5)
    assert ledger.forward_passes.sum() == federation.sizes.sum()  # nobody is heard twice
    early, ledger, _, _ = played(variant, clients_per_round=5, rounds=1)
    assert np.count_nonzero(ledger.bytes_up) == 5
    assert not np.allclose(early.weight, once.weight, atol=1e-3)


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_state_survives_its_checkpoint(variant: str) -> None:
    recipe = recipe_of(variant, clients_per_round=5)
    federation, stage = Federation.of(recipe), recipe.stages[0]
    method = METHODS[stage.method](stage, Setting(10, 64, (0, 0)))
    frozen: list[Message] = []
    state = play(
        method, stage, federation, federation.dataset.train.features(), (0, 0), Ledger.open(CLIENTS),
        lambda number, state: frozen.append(Message.from_bytes(method.freeze(state).to_bytes())),
    )  # fmt: skip
    resumed = play(
        method, stage, federation, federation.dataset.train.features(), (0, 0), Ledger.open(CLIENTS),
        lambda number, state: None, method.thaw(frozen[0]), 1,
    )  # fmt: skip
    np.testing.assert_array_equal(method.head(resumed).weight, method.head(state).weight)


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_seed_reproduces(variant: str) -> None:
    np.testing.assert_array_equal(played(variant)[0].weight, played(variant)[0].weight)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("damage", ["nan", "shape", "nothing"])
def test_a_bad_message_is_refused_and_the_round_goes_on(
    variant: str, damage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "_COHORT_EXAMPLES", 1)
    kind = type(METHODS[VARIANTS[variant]["method"]](recipe_of(variant).stages[0], Setting(10, 64, (0, 0))))
    honest = kind.answer

    def answer(self: Any, cohort: Any, message: Message) -> Reply:
        reply = honest(self, cohort, message)
        if cohort.clients[0] != 3:
            return reply
        arrays = dict(reply.message.arrays)
        bad = {
            "nan": {"sums": arrays["sums"] * np.nan},
            "shape": {"sums": arrays["sums"][:, 1:]},
            "nothing": {"labels": arrays["labels"][:0]},
        }[damage]
        return Reply(reply.clients, Message(arrays | bad), reply.nbytes, reply.forward_passes)

    monkeypatch.setattr(kind, "answer", answer)
    head, ledger, _, _ = played(variant)
    assert [(drop["round"], drop["clients"]) for drop in ledger.dropped] == [(1, "client-3")]
    assert np.isfinite(head.weight).all()


def test_no_usable_answer_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    def fold(self: Any, state: Any, reply: Reply) -> Any:
        raise MessageError("array 'sums' holds NaN or infinity")

    monkeypatch.setattr(METHODS["fedncm"], "fold", fold)
    with pytest.raises(HeadstartError, match="no client gave a usable answer"):
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


def test_published_costs_by_hand() -> None:
    """The papers' formulas, with their own numbers: FedNCM's CIFAR-10 row and FedCOF's CIFAR-100 rows."""
    cifar10 = np.ones((100, 10), np.int64)
    fedncm = METHODS["fedncm"](recipe_of("fedncm").stages[0], Setting(10, 512, (0, 0)))
    assert fedncm.published(fedncm.open(), cifar10).bytes == 2 * 512 * 10 * 100 * 4
    counts = np.zeros((100, 100), np.int64)
    counts.ravel()[:2870] = 1  # P = 2,870 means, MobileNetV2 features
    fed3r = METHODS["fed3r"](recipe_of("fed3r").stages[0], Setting(100, 1280, (0, 0)))
    assert round(fed3r.published(fed3r.open(), counts).bytes / 1e6, 1) == 670.1
    _, _, fedcof, federation = played("fedcof")
    recipe = recipe_of("fedcof")
    state = play(
        fedcof, recipe.stages[0], federation, federation.dataset.train.features(), (0, 0), Ledger.open(CLIENTS),
        lambda number, state: None,
    )  # fmt: skip
    assert fedcof.published(state, federation.counts).bytes == np.count_nonzero(federation.counts) * 64 * 4


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
