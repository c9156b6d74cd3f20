"""Attacks across stages, runs and sums: what a node is told of its own past, and what it spends at the same time."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("flwr")

from flwr.supercore.task_identity import TaskIdentity
from PIL import Image

from headstart.channel.secure import SecureClient, SecureSum
from headstart.config.node import NodeLimits
from headstart.config.recipe import Recipe
from headstart.core.message import Message as Wire
from headstart.core.metrics import class_shapes
from headstart.engine.node_ledger import NodeLedger
from headstart.engine.setup import StageSetup
from headstart.errors import HeadstartError
from headstart.runner import run
from tests.channel.test_attacks import CLASSES, DIM, HIDDEN, NCM, SGD, Silo, begun, head, model, statistics
from tests.channel.test_attacks import Sum as SumOfFour
from tests.helpers import identities

SHARED = {"epsilon": 3.0, "clip": 1.0, "noise": "shared"}
KEYS = {"share_keys": "share_key", "mask_keys": "mask_key", "exponents": "exponents", "signatures": "signature"}


@pytest.fixture(autouse=True)
def _identity(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_task_id", "_run_id", "_node_id"):
        monkeypatch.setattr(TaskIdentity, name, 1)


class Limited(Silo):
    """A node whose owner has set limits."""

    limits: NodeLimits | None = None

    def node(self, run: str = "0" * 32, limits: NodeLimits | None = None) -> Any:
        return super().node(run, self.limits)


def zeros_like_those_of(silo: Silo, run: str) -> tuple[dict[str, np.ndarray], bytes]:
    """What other clients add to the sum that a node has begun in a run, and what it is about."""
    (state,) = (silo.folder / "state" / run).glob("secret-*")
    saved = Wire.from_bytes(state.read_bytes())
    values = {n.removeprefix("value."): np.zeros_like(a) for n, a in saved.arrays.items() if n.startswith("value.")}
    return values, bytes.fromhex(str(saved.scalars["context"]))


class SumOfThree:
    """A secure sum of a node and two that help the server, in two exchanges."""

    def __init__(self, silo: Silo, session: str, **facts: Any) -> None:
        self.silo, self.session, self.facts = silo, session, facts

    def begin(self, question: Wire) -> dict[str, Any]:
        facts, answer = self.silo.ask("secure", question, told=begun(self.session, 3, 3), **self.facts)
        assert "error" not in facts
        values, context = zeros_like_those_of(self.silo, self.facts.get("run", "0" * 32))
        others = {n: SecureClient(self.session, 3, 3, identities(8)[n], values, context) for n in (1, 2)}
        keys = {0: answer.arrays} | {n: other.keys().arrays for n, other in others.items()}
        listed = {many: np.stack([keys[n][one] for n in range(3)]) for many, one in KEYS.items()}
        self.told = Wire(
            {"numbers": np.arange(3), **listed}, {"session": self.session.encode().hex(), "step": "masked"}
        )
        return facts

    def finish(self) -> dict[str, Any]:
        return self.silo.ask("secure", Wire(), told=self.told, **self.facts)[0]


def of_stage(silo: Silo, number: int) -> dict[str, Any]:
    return {"setup": silo.setup(number), "states": [[number, -1, {}]]}


def spent(silo: Silo) -> dict[int, float]:
    found = NodeLedger(silo.folder / "state").guarantees()
    return {key[1]: round(float(privacy["epsilon"]), 2) for key, privacy in found.items()}


# ------------------------------------------------------------------------------------------------- limits and spending


def test_sums_that_are_begun_together_do_not_spend_more_than_one_after_the_other(tmp_path: Path) -> None:
    """The attack: nothing is spent when a sum is begun, and when its values are sent the limit was looked at before."""
    silo = Limited(tmp_path / "a", *6 * [{"method": "fedncm", "secure": True, "privacy": SHARED}])
    silo.limits = NodeLimits.model_validate({"epsilon": {"example": 6.0}})
    sums = [SumOfThree(silo, f"s{n}", run=f"{n:032x}", **of_stage(silo, n)) for n in range(6)]
    for each in sums:
        each.begin(statistics())
    said = [each.finish().get("error", "") for each in sums]
    assert said[:2] == ["", ""]
    assert all("limits.epsilon.example is 6; with fedncm the node would have spent 9" in why for why in said[2:])
    assert spent(silo) == {0: 3.0, 1: 3.0}


def test_a_sum_of_an_earlier_round_does_not_put_back_what_was_spent(tmp_path: Path) -> None:
    """The attack: round 0 is begun in another run, and goes on when all rounds are over: the last promise was the
    smallest, and the ledger counted that."""

    class Sum(SumOfFour):
        def begin(self, question: Wire) -> tuple[dict[str, Any], Wire]:
            facts, answer = self.exchange(begun(self.session, 4, 3), question)
            values, context = zeros_like_those_of(self.silo, self.facts.get("run", "0" * 32))
            for one in identities(4)[1:]:
                self.others[one.number] = SecureClient(self.session, 4, 3, one, values, context)
            self.begun = facts, answer
            return facts, answer

    private = {**SGD, "rounds": 3, "secure": True, "privacy": SHARED}
    silo = Limited(tmp_path / "a", private)
    old = Sum(silo, "old", run="1" * 32)
    old.begin(model())
    for number in range(3):
        each = Sum(silo, f"r{number}")
        assert "error" not in each.until_agree(model(round=number))
        assert each.reveal([0, 1, 2, 3])[1].arrays
    assert spent(silo) == {0: 3.0}
    keys = {0: old.begun[1].arrays} | {number: client.keys().arrays for number, client in old.others.items()}
    listed = {many: np.stack([keys[n][one] for n in range(4)]) for many, one in KEYS.items()}
    facts, _ = old.exchange(old.told("shares", numbers=[0, 1, 2, 3], **listed))
    assert facts == {"error": "the node has replied to another request since"}
    ledger = NodeLedger(silo.folder / "state")
    first = next(entry for entry in ledger.entries() if entry["kind"] == "masked")
    ledger.append(
        {name: first[name] for name in ("kind", "run", "recipe", "stage", "method", "round", "of", "privacy")}
    )
    assert spent(silo) == {0: 3.0}  # whatever comes last


def test_a_stage_that_the_limits_refuse_reads_no_example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The attack: weights of the backbone with which features overflow where a pixel is brighter than so much. What a
    refusal said depended on it, for as many setups as anybody likes."""
    from headstart.engine import node_stage

    def read(*given: Any, **named: Any) -> None:
        raise AssertionError("examples were read")

    monkeypatch.setattr(node_stage, "ModelStore", read)
    silo = Limited(tmp_path / "a", {**SGD, "privacy": HIDDEN}, {"method": "fedncm"})
    silo.limits = NodeLimits.model_validate({"epsilon": {"example": 9.0}})
    why = silo.ask("answer", statistics(), **of_stage(silo, 1))[0]["error"]
    assert why == "node.toml: limits.epsilon.example is 9; with fedncm the node would have spent inf"


# ------------------------------------------------------------------------------------------------------- secure tests


class Peer(Silo):
    """One of five nodes, with test examples of its own."""

    def __init__(self, folder: Path, number: int, stage: dict[str, Any]) -> None:
        super().__init__(folder, stage)
        self.identity, rng, tests = identities(5)[number], np.random.default_rng(number), 6 + number
        x, y = rng.normal(size=(tests, DIM)).astype(np.float32), rng.integers(0, CLASSES, tests)
        split = np.repeat([0, 2], [len(self.y), tests])
        np.savez(self.data, X=np.concatenate([self.x, x]), y=np.concatenate([self.y, y]), split=split)


def figures_of(peers: list[Peer], who: range, done: int) -> np.ndarray | str:
    """The figures that a secure sum of some nodes' tests gives, or why there are none."""
    threshold = peers[0].recipe.stages[0].survivors(len(who))
    shapes = {"figures": (4,), **class_shapes(CLASSES)}
    server = SecureSum(f"t{done}{len(who)}".encode(), [*who], threshold, shapes)
    while server.step:
        step = server.step
        for number, told in server.instructions().items():
            question = head(3) if step == "keys" else Wire()
            facts, answer = peers[number].ask("secure-test", question, told=told, client=number, done=done)
            if "error" in facts:
                return str(facts["error"])
            server.receive(number, answer)
        server.next()
    return np.asarray(server.total()["figures"])


def test_the_same_model_is_not_tested_with_one_node_fewer(tmp_path: Path) -> None:
    """The attack: five nodes test a head before the round, and four of them after it."""
    peers = [Peer(tmp_path / str(n), n, {"method": "fedncm", "secure": True}) for n in range(5)]
    for peer in peers:
        peer.recipe = peers[0].recipe
    whole = figures_of(peers, range(5), 0)
    assert whole[0] == sum(6 + n for n in range(5))
    assert "tests of the data were added up before with other participants" in str(figures_of(peers, range(4), 1))
    np.testing.assert_allclose(figures_of(peers, range(5), 1), whole)  # type: ignore[arg-type]


# --------------------------------------------------------------------------------------------------- states of a client

PERSONAL = {"method": "personalise", "update": "head", "epochs": 3, "lr": 0.5, "momentum": 0.9, "batch_size": "full"}


def test_what_stays_with_a_client_is_what_its_own_stages_leave(tmp_path: Path) -> None:
    """The attack: the file of one stage under the names of another: what is left of updates is added to what is sent,
    and a file that is said to be short is cut."""
    silo = Silo(tmp_path / "a", PERSONAL, {**SGD, "compress": "top-k", "top_k": 1.0, "lr": 1e-9})
    facts, _ = silo.ask("answer", Wire(scalars={"round": 0}))
    assert facts["kept"]
    folder = silo.folder / "state" / ("0" * 32) / "clients-0"
    sizes = {path.name: path.stat().st_size for path in folder.iterdir()}
    assert all(path.stat().st_mode & 0o077 == 0 for path in folder.glob("*.bin"))
    renamed = {"error.update.head.weight": [CLASSES, DIM], "error.update.head.bias": [CLASSES]}
    for states in (
        [[0, 0, renamed]],
        [[1, -1, {}], [1, 0, renamed]],
        [[1, -1, {}], [0, 2, {}]],
        [[1, 0, {}], [-1, 0, {}]],
    ):
        facts, said = silo.ask("answer", model(), setup=silo.setup(1), states=states)
        assert "the request counts on" in facts["error"]
        assert not said.arrays
    facts, said = silo.ask("answer", model(), setup=silo.setup(1), states=[[1, -1, renamed], [0, 0, renamed]])
    numbers = [array for array in said.arrays.values() if array.dtype == np.float32]
    assert max(np.abs(array).max() for array in numbers) < 1e-6  # nothing but its own tiny step
    silo.ask("evaluate", model(), done=1, states=[[0, 0, {"personal.x": [1]}]])
    assert {path.name: path.stat().st_size for path in folder.iterdir()} == sizes


def test_what_does_not_communicate_says_nothing_of_sizes(tmp_path: Path) -> None:
    """The attack: a recipe that hides how many examples there are, and a later stage that counts them."""
    silo = Silo(tmp_path / "a", NCM, PERSONAL)
    assert silo.ask("join", Wire())[0]["examples"] == 1
    facts, said = silo.ask("answer", Wire(scalars={"round": 0}), **of_stage(silo, 1))
    assert facts == {"passes": 0, "kept": True}
    assert (said.arrays, said.scalars) == ({}, {})


def test_a_secure_log_is_answered_the_same_in_a_new_run(tmp_path: Path) -> None:
    stage = {"method": "fedmezo", "train": "head", "rounds": 3, "secure": True, "weighting": "uniform"}
    silo = Silo(tmp_path / "a", stage)
    log = {"seeds": np.zeros(0, np.int64), "slopes": np.zeros((0, 1), np.float32)}
    question = Wire(log, {"round": 0, "seed": 5, "first": 0})
    for digit in "01":
        assert "error" not in silo.ask("secure", question, told=begun("s", 4, 3), run=digit * 32)[0]


# ----------------------------------------------------------------------------------------------------- batch statistics


def test_noise_for_an_example_needs_features_that_are_its_own(tmp_path: Path) -> None:
    """The attack: batch norm by the batch, of the backbone itself or of the server's setup: one example moves the sums
    by five times what the noise was made for."""
    for split, number in (("train", 12), ("test", 2)):
        for place, image in enumerate(np.random.default_rng(0).integers(0, 255, (number, 32, 32, 3), np.uint8)):
            path = tmp_path / "images" / split / str(place % 2) / f"{place}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(image).save(path)
    data = {"dataset": str(tmp_path / "images"), "partition": {"kind": "iid", "clients": 3}}
    private = {"method": "fedncm", "privacy": HIDDEN}
    table = {"data": data, "model": {"backbone": "conv4", "weights": "random"}, "stages": [private]}
    with pytest.raises(HeadstartError, match=r"^stages\.0\.privacy: the backbone normalises by the batch"):
        run(Recipe.parse(table))


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"norm_statistics": "batch"}, "no earlier stage leaves norm_statistics 'batch'"),
        ({"module": ("lora", {"rank": 10**6})}, "no earlier stage leaves a module 'lora' with these settings"),
    ],
)
def test_a_setup_is_of_what_earlier_stages_leave(tmp_path: Path, changed: dict[str, Any], why: str) -> None:
    silo = Silo(tmp_path / "a", NCM)
    setup = StageSetup(0, 0, (("default", CLASSES, 5, 100),), (None,), **changed).to_message().to_bytes()
    assert silo.ask("answer", statistics(), setup=setup)[0] == {"error": why}
