"""A node's part in sums in which all have to stay: what it masks, for whom, how often, and what is left of it."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("flwr")

from flwr.app import Message

from headstart.channel.secure import Identity, SecureClient
from headstart.core.message import Message as Wire
from headstart.engine.flower_messages import facts_of
from headstart.engine.node import Node
from headstart.engine.node_ledger import NodeLedger
from headstart.errors import HeadstartError
from headstart.runner import run
from tests.channel.test_attacks import SECURE, SGD, Silo, _identity, begun, model, secrets_of, statistics  # noqa: F401
from tests.engine.test_node import LOCAL, Grid, assert_same_models, recipe_of, serve, silos  # noqa: F401
from tests.helpers import identities

NAMES = {"share_keys": "share_key", "mask_keys": "mask_key", "exponents": "exponents", "signatures": "signature"}


class Sum:
    """A secure sum of three: a node, and two clients that help the server."""

    def __init__(self, silo: Silo, session: str, numbers: tuple[int, int, int] = (0, 1, 2)) -> None:
        self.silo, self.session, self.numbers = silo, session, numbers

    def ask(self, told: Wire, message: Wire | None = None, **facts: Any) -> tuple[dict[str, Any], Wire]:
        return self.silo.ask("secure", message or Wire(), told=told, **facts)

    def begin(self, question: Wire, **facts: Any) -> Wire:
        """The request to mask, once the node has sent its keys."""
        said, answer = self.ask(begun(self.session, 3, 3), question, **facts)
        assert "error" not in said, said
        (state,) = secrets_of(self.silo)
        saved = Wire.from_bytes(state.read_bytes())
        context = bytes.fromhex(str(saved.scalars["context"]))
        self.values = {name.removeprefix("value."): a for name, a in saved.arrays.items() if name.startswith("value.")}
        zeros = {name: np.zeros_like(array) for name, array in self.values.items()}
        self.others = {n: SecureClient(self.session, 3, 3, identities(8)[n], zeros, context) for n in self.numbers if n}
        keys = {0: answer.arrays} | {number: one.keys().arrays for number, one in self.others.items()}
        rows = {many: np.stack([keys[n][one] for n in self.numbers]) for many, one in NAMES.items()}
        return Wire(
            {"numbers": np.array(self.numbers), **rows}, {"session": self.session.encode().hex(), "step": "masked"}
        )

    def play(self, question: Wire) -> tuple[dict[str, Any], Wire]:
        return self.ask(self.begin(question))


def test_a_node_masks_with_keys_that_it_has_once_and_keeps_nothing(tmp_path: Path) -> None:
    silo = Silo(tmp_path / "a", SECURE)
    sum_ = Sum(silo, "s")
    told = sum_.begin(statistics())
    (path,) = secrets_of(silo)
    assert path.stat().st_mode & 0o077 == 0
    facts, answer = sum_.ask(told)
    assert facts == {"passes": 0, "kept": False}
    total = {name: array.copy() for name, array in answer.arrays.items()}
    for one in sum_.others.values():
        total = {name: total[name] + array for name, array in one.mask(told).arrays.items()}
    places = 63 - 2 - 16  # three clients, counts and sums below 2**16
    for name, array in sum_.values.items():
        np.testing.assert_array_equal(total[f"value.{name}"], np.rint(np.ldexp(array, places)).astype(np.int64))
    assert not secrets_of(silo)
    assert "no longer has its keys" in sum_.ask(told)[0]["error"]  # the same keys for another sum
    entries = NodeLedger(silo.folder / "state").entries()
    assert [entry["kind"] for entry in entries] == ["keys", "masked"]
    assert "participants" not in entries[0]
    assert len(entries[1]["participants"]) == 3


def test_participants_are_not_swapped_once_a_round_is_masked(tmp_path: Path) -> None:
    """The attack: the server has the total of 0, 1 and 2, says that 2 has dropped out, and asks for one with 3."""
    silo = Silo(tmp_path / "a", {**SGD, "secure": True})
    assert Sum(silo, "first").play(model())[1].arrays
    second = Sum(silo, "second", (0, 1, 3))
    facts, answer = second.play(model())
    assert facts == {"error": "the sum of this round was opened before, for another list of survivors"}
    assert not answer.arrays
    again, _ = Sum(silo, "third").play(model())  # the server was interrupted, say: nothing new comes of it
    assert "error" not in again
    assert "error" not in Sum(silo, "next", (0, 1, 3)).play(model(round=1))[0]


def test_participants_are_not_swapped_after_the_keys(tmp_path: Path) -> None:
    """Keys are signed for a sum: those of a client that was called to another one are not taken."""
    silo = Silo(tmp_path / "a", {**SGD, "secure": True})
    sum_ = Sum(silo, "s")
    told = sum_.begin(model())
    zeros = {name: np.zeros_like(array) for name, array in sum_.values.items()}
    for other in (
        SecureClient("another", 3, 3, identities(8)[3], zeros, sum_.others[1]._context),
        SecureClient("s", 3, 3, identities(8)[3], zeros, b"another round"),
        SecureClient("s", 3, 3, Identity.derived(b"server", 3), zeros, sum_.others[1]._context),
    ):
        keys = other.keys().arrays
        rows = {m: np.concatenate([told.arrays[m][:2], keys[one][None]]) for m, one in NAMES.items()}
        facts, _ = sum_.ask(Wire({"numbers": np.array([0, 1, 3]), **rows}, told.scalars))
        assert facts == {"error": "the keys listed for client 3 are not signed by it for this sum"}
    assert sum_.ask(told)[1].arrays


def test_nothing_leaves_that_the_ledger_does_not_have(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that is full between the two answers; afterwards the same round is masked with keys of its own."""
    silo = Silo(tmp_path / "a", {**SGD, "secure": True})
    told = Sum(silo, "first").begin(model())
    enter = Node.enter

    def full(self: Node, kind: str, **facts: Any) -> None:
        if kind == "masked":
            raise OSError(28, "No space left on device")
        enter(self, kind, **facts)

    with monkeypatch.context() as patched:
        patched.setattr(Node, "enter", full)
        facts, answer = Sum(silo, "first").ask(told)
    assert "No space left" in facts["error"]
    assert not answer.arrays
    assert "value." not in "".join(Wire.from_bytes(secrets_of(silo)[0].read_bytes()).arrays)
    assert "next exchange is 'none'" in Sum(silo, "first").ask(told)[0]["error"]
    assert Sum(silo, "second").play(model())[1].arrays


@pytest.mark.parametrize("step", ["keys", "masked"])
def test_a_run_whose_keys_were_lost_goes_on_to_the_same_model(silos: Path, tmp_path: Path, step: str) -> None:  # noqa: F811
    recipe = recipe_of(silos, {**LOCAL, "method": "scaffold", "secure": True, "rounds": 4, "evaluate_every": 1})
    run(recipe, tmp_path / "here")
    grid, steps = Grid(recipe, silos, tmp_path / "state"), list[str]()

    def lose(node: int, number: int, message: Message) -> None:
        facts, parts = facts_of(message)
        if facts["kind"] == "secure" and grid.online[node] == "b":
            steps.append(str(Wire.from_bytes(parts["exchange"]).scalars["step"]))
            if steps.count(step) == 3 and steps[-1] == step == "masked":
                next(grid.folder("b").glob("*/secret-*")).unlink()
            if steps.count(step) == 3 and steps[-1] == step == "keys":
                raise KeyError("the server is killed")

    grid.change = lose
    with pytest.raises(HeadstartError if step == "masked" else KeyError):
        serve(grid, tmp_path / "there")
    grid.change = None
    serve(grid, tmp_path / "there", resume=True)
    assert_same_models(tmp_path / "here", tmp_path / "there", 1)
