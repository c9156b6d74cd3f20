"""A client that lies about the scatter around its means: what no features have is refused, and the round is that of the
others; what is possible and absurd is no more than the means allow, and leaves a head as good as the paper's."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from headstart.core.message import Message
from headstart.core.reply import Reply
from headstart.engine import local
from headstart.engine.client import ClientRuntime
from tests.methods.test_methods import Played

Arrays = dict[str, Any]
LIAR = 3


def lying(monkeypatch: pytest.MonkeyPatch, lie: Callable[[Arrays], Arrays]) -> None:
    """Client 3 says something else than its features."""
    monkeypatch.setattr(local, "_COHORT_EXAMPLES", 1)  # every client is a cohort of its own
    honest = ClientRuntime.answer

    def answer(self: Any, cohort: Any, message: Message) -> list[Reply]:
        (reply,) = honest(self, cohort, message)
        if cohort.clients[0] != LIAR:
            return [reply]
        arrays = dict(reply.message.arrays)
        return [replace(reply, message=Message(arrays | lie(arrays), reply.message.scalars))]

    monkeypatch.setattr(ClientRuntime, "answer", answer)


def silent(monkeypatch: pytest.MonkeyPatch, **keys: Any) -> Played:
    """The round of the others: client 3 sends nothing that can be read."""
    with monkeypatch.context() as patch:
        lying(patch, lambda arrays: {"sums": arrays["sums"] * np.float32(np.nan)})
        return Played("fedcof", **keys)


IMPOSSIBLE: dict[str, tuple[dict[str, Any], Callable[[Arrays], Arrays]]] = {
    "a negative trace": ({}, lambda a: {"within": -a["within"]}),
    "no number": ({}, lambda a: {"within": a["within"] * np.nan}),
    "infinity": ({}, lambda a: {"within": a["within"] + np.inf}),
    "beyond any feature": ({}, lambda a: {"within": np.full(1, 1e60)}),
    "a diagonal for a trace": ({}, lambda a: {"within": np.ones(64)}),
    "one negative of a diagonal": ({"within": "diagonal"}, lambda a: {"within": a["within"] - 2 * a["within"].max()}),
    "a short diagonal": ({"within": "diagonal"}, lambda a: {"within": a["within"][1:]}),
    "a trace below the directions": ({"rank": 3}, lambda a: {"within": a["within"] / 1e3}),
    "directions above the trace": ({"rank": 3}, lambda a: {"directions": 100 * a["directions"]}),
    "too many directions": ({"rank": 3}, lambda a: {"directions": np.zeros((40, 64), np.float32)}),
    "directions that are no numbers": ({"rank": 3}, lambda a: {"directions": np.full_like(a["directions"], np.inf)}),
    "a direction where the diagonal has nothing": (
        {"within": "diagonal", "rank": 3},
        lambda a: {"directions": np.roll(a["directions"], 7, axis=1)},
    ),
    "a scatter of single examples": ({}, lambda a: {"counts": np.ones_like(a["counts"]), "within": np.full(1, 9.0)}),
}


@pytest.mark.parametrize("name", IMPOSSIBLE)
def test_what_no_features_have_is_refused_and_the_round_is_that_of_the_others(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys, lie = IMPOSSIBLE[name]
    others = silent(monkeypatch, **keys)
    lying(monkeypatch, lie)
    done = Played("fedcof", **keys)
    assert {drop["clients"] for drop in done.ledger.dropped} == {f"client-{LIAR}"}
    np.testing.assert_array_equal(done.head.weight, others.head.weight)


def accuracy(done: Played) -> float:
    test = done.federation.dataset.test
    return float((done.head.scores(test.features()).argmax(axis=1) == test.labels).mean())


ABSURD: dict[str, tuple[dict[str, Any], Callable[[Arrays], Arrays]]] = {
    "trace": ({}, lambda a: {"within": np.full(1, 1e25)}),
    "nothing": ({}, lambda a: {"within": np.zeros(1)}),
    "spread evenly": ({"within": "trace"}, lambda a: {"within": np.full(1, 1e25)}),
    "diagonal": ({"within": "diagonal"}, lambda a: {"within": np.where(np.arange(64) % 2, 1e25, 0.0)}),
    "beside directions": ({"rank": 3}, lambda a: {"within": np.full(1, 1e25)}),
    "directions": (
        {"rank": 3},
        lambda a: {"within": np.full(1, 1e25), "directions": np.eye(3, 64, 20, dtype=np.float32) * np.float32(1e12)},
    ),
}


@pytest.mark.parametrize("name", ABSURD)
def test_what_is_possible_and_absurd_spoils_no_round(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some features have a trace of 1e25; the means of the others say that these have not."""
    keys, lie = ABSURD[name]
    papers = accuracy(Played("fedcof", within="estimated"))
    lying(monkeypatch, lie)
    done = Played("fedcof", **keys)
    assert not done.ledger.dropped
    assert np.isfinite(done.head.weight).all()
    assert accuracy(done) >= papers - 0.03
