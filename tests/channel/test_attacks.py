"""Attacks of a server that does not follow the recipe, on real nodes: each is to fail, and to be told why."""

import json
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("flwr")

from flwr.app import ConfigRecord, Message, RecordDict
from flwr.supercore.task_identity import TaskIdentity

from headstart.channel.accounting import noise_multiplier
from headstart.channel.links import ClientNoise
from headstart.channel.noise import generators_of
from headstart.channel.secure import SecureClient
from headstart.config.node import NodeLimits
from headstart.config.recipe import Recipe
from headstart.core.message import Message as Wire
from headstart.core.seeds import SecureGenerator
from headstart.core.statistics import ClientStatistics
from headstart.data import Federation
from headstart.engine.flower_messages import facts_of, package_version, recipe_digest
from headstart.engine.node import Node
from headstart.engine.respond import respond, run_of
from headstart.engine.setup import StageSetup, digest
from tests.helpers import Bench, cohort_of, context_of, identities

CLASSES, DIM = 3, 4
COUNTS = (18, 5, 7)
HIDDEN = {"epsilon": 1.0, "clip": 1.0, "noise": "client"}
NCM: dict[str, Any] = {"method": "fedncm", "privacy": HIDDEN}
SGD: dict[str, Any] = {"method": "fedavg", "train": "head", "rounds": 3, "lr": 0.1, "weighting": "uniform"}


@pytest.fixture(autouse=True)
def _identity(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who sends messages, as Flower sets it in its own processes."""
    for name in ("_task_id", "_run_id", "_node_id"):
        monkeypatch.setattr(TaskIdentity, name, 1)


class Silo:
    """A node with its own data and folder, and a server that may ask it anything. Every answer is a new process's."""

    def __init__(
        self, folder: Path, *stages: dict[str, Any], data: Path | None = None, labels: list[int] | None = None
    ) -> None:
        """data: where the examples are; with the node by default. labels: the classes that it has, by default all."""
        self.folder, self.data = folder, (data or folder) / "data.npz"
        self.identity = identities(8)[0] if any(stage.get("secure") for stage in stages) else None
        folder.mkdir(exist_ok=True)
        rng = np.random.default_rng(7)
        self.y = np.repeat(np.arange(CLASSES), COUNTS)
        if labels is not None:
            self.y = np.resize(labels, len(self.y))
        self.x = rng.normal(size=(len(self.y), DIM)).astype(np.float32)
        self.x /= 2 * np.linalg.norm(self.x, axis=1, keepdims=True)
        np.savez(
            self.data,
            X=np.concatenate([self.x, self.x[:9]]),
            y=np.concatenate([self.y, self.y[:9]]),
            split=np.repeat([0, 2], [len(self.y), 9]),
        )
        table = {"dataset": str(self.data), "classes": list(range(CLASSES))}
        self.recipe = Recipe.parse({"data": table, "model": {"backbone": "features"}, "stages": list(stages)})

    def node(self, run: str = "0" * 32, limits: NodeLimits | None = None) -> Node:
        federation = Federation.silo(self.recipe, str(self.data), "a")
        return Node(self.recipe, federation, self.folder / "state" / run, True, self.identity, limits)

    def setup(self, stage: Any = 0, clients: int = 5) -> bytes:
        return StageSetup(stage, 0, (("default", CLASSES, clients, 100),), (None,)).to_message().to_bytes()

    def message(self, kind: str, message: Wire, run: str = "0" * 32, **facts: Any) -> Message:
        setup = facts.pop("setup", None) or self.setup()
        told = {"exchange": told.to_bytes()} if (told := facts.pop("told", None)) else {}
        about = {"session": "s", "recipe": recipe_digest(self.recipe), "version": package_version(), "run": run}
        about |= {"kind": kind, "client": 0, "setup": digest(setup), "states": [[0, -1, {}]], "new": True} | facts
        record = ConfigRecord({"facts": json.dumps(about), "message": message.to_bytes(), "setup": setup, **told})
        return Message(RecordDict({"headstart": record}), 10, "query")

    def ask(self, kind: str, message: Wire, **facts: Any) -> tuple[dict[str, Any], Wire]:
        """Facts and bytes of a node's reply."""
        question = self.message(kind, message, **facts)
        facts, parts = facts_of(respond(question, self.node(run_of(question)), "a"))
        return facts, Wire.from_bytes(parts["message"]) if "message" in parts else Wire()


def statistics(round: Any = 0) -> Wire:
    return Wire(scalars={"round": round})


def model(weight: float = 0.0, round: Any = 0) -> Wire:
    arrays = {"model.head.weight": np.full((CLASSES, DIM), weight, np.float32)}
    return Wire({**arrays, "model.head.bias": np.zeros(CLASSES, np.float32)}, {"round": round})


def head(seed: int) -> Wire:
    weight = np.random.default_rng(seed).normal(size=(CLASSES, DIM)).astype(np.float32)
    return Wire({"weight": weight, "bias": np.zeros(CLASSES, np.float32)})


# ------------------------------------------------------------------------------------------------------- clients' noise


def test_asking_under_many_client_numbers_does_not_average_the_noise_away(tmp_path: Path) -> None:
    silo = Silo(tmp_path / "a", NCM)
    said = [silo.ask("answer", statistics(), client=number) for number in range(40)]
    assert [number for number, (facts, _) in enumerate(said) if "error" not in facts] == [0]
    assert said[7][0] == {"error": "the node is client 0 of this run, and the request is to client 7"}


def test_a_model_that_cannot_be_trained_does_not_bring_out_the_noise_alone(tmp_path: Path) -> None:
    silo = Silo(tmp_path / "a", {**SGD, "privacy": HIDDEN})
    facts, update = silo.ask("answer", model())
    assert facts == {"passes": 0, "kept": False}
    assert set(update.arrays) == {"update.head.weight", "update.head.bias"}
    refused, nothing = silo.ask("answer", model(3e38))
    assert refused["error"].startswith(
        "the node has replied to round 0 before, and replies to no other request for it; "
    )
    assert not nothing.arrays
    assert "no other request" in silo.ask("answer", model(), new=False)[0]["error"]
    assert "no longer has the client's state" in silo.ask("answer", model(), states=[[0, 0, {}]])[0]["error"]
    assert "begun this stage from another setup" in silo.ask("answer", model(), setup=silo.setup(clients=6))[0]["error"]


def at_once(*asks: Callable[[], Any]) -> list[Any]:
    """What comes of asking at the same time."""
    said: list[Any] = []
    threads = [threading.Thread(target=lambda ask=ask: said.append(ask())) for ask in asks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return said


def test_two_questions_at_once_get_one_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    silo = Silo(tmp_path / "a", {**SGD, "privacy": HIDDEN})
    quick = Node._client_update

    def slow(self: Node, asked: Any, message: Wire) -> Any:
        reply = quick(self, asked, message)
        time.sleep(0.3)
        return reply

    monkeypatch.setattr(Node, "_client_update", slow)
    said = at_once(lambda: silo.ask("answer", model()), lambda: silo.ask("answer", model(3e38)))
    assert sorted("error" in facts for facts, _ in said) == [False, True]


def test_what_a_killed_process_left_of_a_secret_is_removed(tmp_path: Path) -> None:
    silo = Silo(tmp_path / "a", {**SGD, "privacy": HIDDEN})
    silo.ask("answer", model())
    folder = tmp_path / "a" / "state" / ("0" * 32)
    (folder / ".headstart-half.safetensors").write_bytes(b"half a secret")
    silo.ask("answer", model())
    assert not list(folder.glob(".headstart-*"))


@pytest.mark.parametrize(("stage", "question"), [(NCM, statistics), ({**SGD, "privacy": HIDDEN}, model)])
def test_the_same_question_gets_the_same_answer_in_any_process(
    tmp_path: Path, stage: dict[str, Any], question: Callable[[], Wire]
) -> None:
    silo = Silo(tmp_path / "a", stage)
    first, again, later = (silo.ask("answer", question(), session=session) for session in ("s", "s", "another"))
    assert first[1].arrays
    assert first[0] == again[0] == later[0]
    assert first[1].to_bytes() == again[1].to_bytes() == later[1].to_bytes()
    (record,) = (tmp_path / "a" / "state").glob("answered-*-0.safetensors")
    assert record.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize(("stage", "question"), [(NCM, statistics), ({**SGD, "privacy": HIDDEN}, model)])
def test_a_new_run_gets_no_other_noise_for_the_same_data(
    tmp_path: Path, stage: dict[str, Any], question: Callable[[], Wire]
) -> None:
    silo = Silo(tmp_path / "a", stage)
    (first, said), (again, repeated) = (silo.ask("answer", question(), run=digit * 32) for digit in "01")
    assert first == again
    assert said.to_bytes() == repeated.to_bytes()
    for changed in ({"setup": silo.setup(clients=4)}, {"new": False}):
        other = silo.ask("answer", question(), run="2" * 32, **changed)[0]["error"]
        assert other.endswith("; a new run needs another recipe, to which nodes agree")


def test_a_stage_without_protection_is_answered_in_every_run(tmp_path: Path) -> None:
    silo = Silo(tmp_path / "a", SGD)
    said = [silo.ask("answer", model(weight), run=digit * 32)[1].arrays for digit, weight in (("0", 0.0), ("1", 1.0))]
    assert all(arrays for arrays in said)
    assert (said[0]["update.head.weight"] != said[1]["update.head.weight"]).any()


def test_rounds_that_the_recipe_does_not_have_are_refused(tmp_path: Path) -> None:
    silo = Silo(tmp_path / "a", {**SGD, "privacy": HIDDEN})
    for number in (3, 10**9, -1, True, 0.0, "0"):
        facts, _ = silo.ask("answer", model(round=number))
        assert facts == {"error": f"the stage has 3 rounds, from 0; the request is for round {number!r}"}
    for number in (0, 2):
        assert "error" not in silo.ask("answer", model(round=number))[0]
    assert "replied to round 2 before" in silo.ask("answer", model(round=1))[0]["error"]  # it was passed over
    for number in (-1, 1, True, 0.0):
        facts, _ = silo.ask("answer", model(), setup=silo.setup(number))
        assert facts == {"error": f"the recipe has 1 stages, from 0, and none {number!r}"}


def test_a_closed_form_is_answered_in_one_round(tmp_path: Path) -> None:
    silo = Silo(tmp_path / "a", {**NCM, "clients_per_round": 1})
    assert "error" not in silo.ask("answer", statistics(3))[0]
    for number in (4, 2):
        assert "replied to this stage before" in silo.ask("answer", statistics(number))[0]["error"]


def test_an_answer_is_recorded_before_it_leaves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A node whose disk is full says nothing: without the record it would answer again."""
    silo = Silo(tmp_path / "a", NCM)

    def full(*args: Any, **kwargs: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr("headstart.engine.node_records.write_atomically", full)
        node = silo.node()
        node.folder.mkdir(parents=True)
        facts, parts = facts_of(respond(silo.message("answer", statistics()), node, "a"))
    assert facts == {"error": "the node failed: OSError: [Errno 28] No space left on device"}
    assert not parts


@pytest.mark.parametrize(("stage", "question"), [(NCM, statistics), ({**SGD, "privacy": HIDDEN}, model)])
def test_noise_is_no_function_of_the_question_or_of_what_is_on_the_disk(
    tmp_path: Path, stage: dict[str, Any], question: Callable[[], Wire]
) -> None:
    silo = Silo(tmp_path / "a", stage)
    silo.node().remember(silo.setup())
    silo.ask("evaluate", head(0))  # whatever a node writes before its first answer
    shutil.copytree(tmp_path / "a" / "state", tmp_path / "before")
    said = [silo.ask("answer", question())[1].arrays]
    shutil.rmtree(tmp_path / "a" / "state")
    shutil.copytree(tmp_path / "before", tmp_path / "a" / "state")
    said.append(silo.ask("answer", question())[1].arrays)
    for name in said[0]:
        if said[0][name].dtype.kind == "f":
            assert not np.isclose(said[0][name], said[1][name]).any(), name


def known(silo: Silo) -> Bench:
    """The stage as whoever knows the recipe can build it."""
    (stage,) = silo.recipe.stages
    return Bench(stage, context_of(stage, CLASSES, DIM, (silo.recipe.seed, 0), 5))


def simulated(silo: Silo, bench: Bench, question: Wire) -> dict[str, np.ndarray]:
    """What the node would say in a simulation."""
    (reply,) = bench.answer(cohort_of(bench, 0, silo.x, np.arange(len(silo.y)), silo.y), question)
    return dict(reply.message.arrays)


def test_whoever_knows_the_recipe_cannot_subtract_a_nodes_noise(tmp_path: Path) -> None:
    """The attack: everything that a simulation draws its noise from is public, and there it succeeds."""
    silo = Silo(tmp_path / "a", NCM)
    _, said = silo.ask("answer", statistics())
    bench = known(silo)
    channel = bench.channel
    zeros = np.zeros((CLASSES, DIM))
    nothing = ClientStatistics(CLASSES, np.arange(CLASSES), np.ones(CLASSES, np.int64), zeros, counted=False)
    guessed = channel.noise.add(nothing, generators_of(channel.seed, 0, np.array([0])))
    exact = np.stack([silo.x[silo.y == label].sum(axis=0) for label in range(CLASSES)])
    assert channel.noise.deviation > 3
    assert np.abs(said.arrays["sums"] - guessed.sums - exact).max() > 1
    np.testing.assert_allclose(simulated(silo, bench, statistics())["sums"] - guessed.sums, exact, atol=1e-4)

    silo = Silo(tmp_path / "b", {**SGD, "privacy": HIDDEN, "lr": 1e-6})  # the update is nothing, what is sent is noise
    _, sent = silo.ask("answer", model())
    bench = known(silo)
    (noise,) = (link for link in bench.channel.links if isinstance(link, ClientNoise))
    assert noise.deviation > 3
    zeros = {name: np.zeros(shape) for name, shape in bench.method.blocks.items()}
    guess = noise.noised(zeros, 0, 0)
    for name in zeros:
        assert np.abs(sent.arrays[name] - guess[name]).max() > 0.1, name
        np.testing.assert_allclose(simulated(silo, bench, model())[name], guess[name], atol=1e-4)


def test_the_operating_systems_noise_is_gaussian() -> None:
    drawn = SecureGenerator().standard_normal(200_000)
    assert abs(drawn.mean()) < 6 / 200_000**0.5
    assert drawn.std() == pytest.approx(1, abs=0.01)
    inside = [(np.abs(drawn) < bound).mean() for bound in (0.6744897501960817, 1.959963984540054, 2.5758293035489004)]
    assert inside == pytest.approx([0.5, 0.95, 0.99], abs=0.006)
    assert abs(np.corrcoef(drawn[1:], drawn[:-1])[0, 1]) < 0.02
    for byte in (0, 255):  # the first and the last number that there are
        generator = SecureGenerator(lambda size, byte=byte: bytes([byte]) * size)
        assert 8 < abs(generator.standard_normal(1)[0]) < 9
    moved = SecureGenerator().normal(np.full((300, 300), 5.0), 0.5)
    assert moved.shape == (300, 300)
    assert (moved.mean(), moved.std()) == pytest.approx((5.0, 0.5), abs=0.01)


# ----------------------------------------------------------------------------------------------------------- evaluation


@pytest.mark.parametrize("keys", [{"privacy": HIDDEN}, {"privacy": {**HIDDEN, "noise": "server"}}, {"secure": True}])
@pytest.mark.parametrize("stage", [{"method": "fedncm"}, SGD], ids=["fedncm", "fedavg"])
def test_a_protected_stage_is_no_oracle(tmp_path: Path, stage: dict[str, Any], keys: dict[str, Any]) -> None:
    silo = Silo(tmp_path / "a", {**stage, **keys})
    for shown in (head(0), head(1)):
        facts, figures = silo.ask("evaluate", shown if stage["method"] == "fedncm" else model())
        assert ("with privacy a node tests no models" in facts["error"]) == ("privacy" in keys)
        assert ("metrics of tests are" in facts["error"]) == ("secure" in keys)
        assert not figures.arrays


@pytest.mark.parametrize("stage", [{"method": "fedncm"}, SGD], ids=["fedncm", "fedavg"])
def test_figures_of_a_private_test_have_noise_that_no_question_removes(tmp_path: Path, stage: dict[str, Any]) -> None:
    """The unit's part in the four figures is at most 2; the noise is what ε asks for over all tests of the stage."""
    privacy = {**HIDDEN, "test_epsilon": 1.0}
    found = []
    for number in range(30):
        silo = Silo(tmp_path / str(number), {**stage, "privacy": privacy})
        shown, other = (head(0), head(1)) if stage["method"] == "fedncm" else (model(), model(1.0))
        figures = [silo.ask("evaluate", shown, run=digit * 32)[1].arrays["figures"] for digit in "001"]
        np.testing.assert_array_equal(figures[0], figures[1])
        np.testing.assert_array_equal(figures[0], figures[2])  # nor does a new run
        assert "another model" in silo.ask("evaluate", other)[0]["error"]
        found.append(figures[0])
    times = 3 if stage["method"] == "fedncm" else 5
    deviation = 2 * noise_multiplier(1.0, 1e-5, times)
    spread = (np.array(found) - np.mean(found, axis=0)).std()
    assert spread == pytest.approx(deviation, rel=0.3)


def test_a_model_with_more_classes_does_not_sort_the_test_examples(tmp_path: Path) -> None:
    """The attack: a head of a thousand rows, and counts of what was predicted as each."""
    silo = Silo(tmp_path / "a", {"method": "fedncm"})
    many = Wire({"weight": np.ones((1000, DIM), np.float32), "bias": np.zeros(1000, np.float32)})
    facts, said = silo.ask("evaluate", many, done=0)
    assert facts["error"] == f"the model to be tested has 1000 classes, and not {CLASSES}"
    assert not said.arrays
    facts, said = silo.ask("evaluate", head(0), done=1)
    assert {name: array.shape for name, array in said.arrays.items()} == {
        "figures": (4,), "classes": (3, CLASSES), "bins": (3, 15)
    }  # fmt: skip


def test_a_node_tests_one_model_after_each_round(tmp_path: Path) -> None:
    """132 heads of the server's choice give the class sums of the test examples; three rounds give four figures."""
    silo = Silo(tmp_path / "a", {**SGD, "rounds": 3})
    found = []
    for done in (0, 0, 0, 1, 1, 0, 2, 3, 4, 400, -1):
        facts, said = silo.ask("evaluate", model(weight=len(found)), done=done)
        found.append((done, said.arrays.get("figures", [0])[0], facts.get("error")))
    assert [done for done, examples, _ in found if examples == 9] == [0, 1, 2, 3]
    assert found[2][2] == "the node has tested another model after round 0 of this stage"
    assert found[-2][2] == "the stage has 3 rounds, and tests after every 1; the request is for a test after 400"
    same = [silo.ask("evaluate", model(weight=7), done=3)[1].to_bytes() for _ in range(2)]
    assert same[0] == same[1]
    silo = Silo(tmp_path / "b", {**SGD, "rounds": 5, "evaluate_every": 2})
    said = [silo.ask("evaluate", model(), done=done)[1].arrays for done in range(6)]
    assert [done for done, arrays in enumerate(said) if arrays] == [0, 2, 4, 5]


# ---------------------------------------------------------------------------------------------------------- secure sums


SECURE: dict[str, Any] = {"method": "fedncm", "secure": True}


def begun(session: str, clients: int, threshold: int) -> Wire:
    facts: dict[str, Any] = {"session": session.encode().hex(), "step": "keys"}
    return Wire({}, {**facts, "clients": clients, "threshold": threshold})


def test_a_node_takes_the_threshold_from_its_own_recipe(tmp_path: Path) -> None:
    for share, count, wanted in ((0.95, 5, 5), (0.67, 5, 4), (0.67, 4, 3), (0.67, 3, 3)):
        silo = Silo(tmp_path / str(share), {**SECURE, "secure_threshold": share})
        for threshold in set(range(1, count + 1)) - {wanted}:
            facts, _ = silo.ask("secure", statistics(), told=begun("s", count, threshold))
            assert facts["error"].endswith(f"by the node's recipe {wanted} have to stay")
        assert "error" not in silo.ask("secure", statistics(), told=begun("s", count, wanted))[0]
    silo = Silo(tmp_path / "few", SECURE)
    for count in (1, 2):
        facts, _ = silo.ask("secure", statistics(), told=begun("s", count, 3))
        assert facts == {"error": f"secure aggregation needs at least 3 clients, not {count}"}
    plain = Silo(tmp_path / "plain", {"method": "fedncm"})
    facts, _ = plain.ask("secure", Wire(), told=begun("s", 4, 3))
    assert facts == {"error": "the recipe has no secure aggregation in this stage"}


class Sum:
    """A secure sum of three clients played by the server, who know their keys, and a node that does not help it."""

    def __init__(self, silo: Silo, session: str, **facts: Any) -> None:
        self.silo, self.session, self.facts = silo, session, facts
        self.others: dict[int, SecureClient] = {}

    def exchange(self, told: Wire, message: Wire | None = None) -> tuple[dict[str, Any], Wire]:
        return self.silo.ask("secure", message or Wire(), told=told, **self.facts)

    def told(self, step: str, **arrays: Any) -> Wire:
        named = {name: np.asarray(each) for name, each in arrays.items()}
        return Wire(named, {"session": self.session.encode().hex(), "step": step})

    def begin(self, question: Wire) -> tuple[dict[str, Any], Wire]:
        """The node's keys; the others take the node's word for what the sum is about."""
        facts, answer = self.exchange(begun(self.session, 4, 3), question)
        if "error" not in facts:
            (state,) = secrets_of(self.silo)
            context = bytes.fromhex(str(Wire.from_bytes(state.read_bytes()).scalars["context"]))
            zeros = {"counts": np.zeros(CLASSES), "sums": np.zeros((CLASSES, DIM))}
            for one in identities(4)[1:]:
                self.others[one.number] = SecureClient(self.session, 4, 3, one, zeros, context)
        return facts, answer

    def until_agree(self, question: Wire) -> dict[str, Any]:
        facts, answer = self.begin(question)
        if "error" in facts:
            return facts
        keys = {0: answer.arrays} | {number: client.keys().arrays for number, client in self.others.items()}
        names = {"share_keys": "share_key", "mask_keys": "mask_key", "exponents": "exponents"}
        names["signatures"] = "signature"
        listed = {many: np.stack([keys[n][one] for n in range(4)]) for many, one in names.items()}
        everyone = self.told("shares", numbers=[0, 1, 2, 3], **listed)
        mine = self.exchange(everyone)[1].arrays["parts"]
        parts = {number: client.share(everyone).arrays["parts"] for number, client in self.others.items()}
        told = self.told("masked", sharers=[0, 1, 2, 3], parts=np.stack([parts[number][0] for number in (1, 2, 3)]))
        self.signed = {0: self.exchange(told)[1].arrays["signature"]}
        for number, client in self.others.items():
            senders = [n for n in range(4) if n != number]
            rows = [mine[number - 1] if n == 0 else parts[n][number - (number > n)] for n in senders]
            masked = client.mask(self.told("masked", sharers=[0, 1, 2, 3], parts=np.stack(rows)))
            self.signed[number] = masked.arrays["signature"]
        return facts

    def proposal(self, survivors: list[int]) -> Wire:
        """The request to agree on a list, with everybody's signatures of who has sent parts."""
        signatures = np.stack([self.signed[number] for number in survivors])
        return self.told("agree", survivors=survivors, signers=survivors, signatures=signatures)

    def agree(self, survivors: list[int]) -> tuple[dict[str, Any], Wire]:
        """The request to reveal, with the signatures of everybody on the list."""
        told = self.proposal(survivors)
        facts, answer = self.exchange(told)
        signed = {0: answer.arrays.get("signature", np.zeros(64, np.uint8))}
        signed |= {n: self.others[n].agree(told).arrays["signature"] for n in survivors if n}
        return facts, self.told("reveal", signers=survivors, signatures=np.stack([signed[n] for n in survivors]))

    def reveal(self, survivors: list[int]) -> tuple[dict[str, Any], Wire]:
        facts, request = self.agree(survivors)
        return (facts, Wire()) if "error" in facts else self.exchange(request)


def secrets_of(silo: Silo) -> list[Path]:
    return list((silo.folder / "state").rglob("secret-*"))


def test_secrets_of_a_sum_are_gone_once_it_is_open(tmp_path: Path) -> None:
    silo = Silo(tmp_path / "a", SECURE)
    sum_ = Sum(silo, "s")
    assert sum_.until_agree(statistics()) == {"passes": sum(COUNTS), "kept": False}
    (path,) = secrets_of(silo)
    assert path.stat().st_mode & 0o077 == 0
    _, request = sum_.agree([0, 1, 2, 3])
    assert sum_.exchange(request)[1].arrays["seed_shares"].shape == (4, 20)
    assert not secrets_of(silo)
    assert "no longer has its keys" in sum_.exchange(request)[0]["error"]


def test_a_round_is_opened_for_one_list_of_survivors(tmp_path: Path) -> None:
    """Two sums of one round, of four clients and of three, would differ by the values of one."""
    silo = Silo(tmp_path / "a", SECURE)
    first = Sum(silo, "first")
    first.until_agree(statistics())
    assert first.reveal([0, 1, 2, 3])[1].arrays
    second = Sum(silo, "second")
    assert "error" not in second.until_agree(statistics())  # the server was interrupted, say
    facts, _ = second.reveal([0, 1, 2])
    assert facts == {"error": "the sum of this round was opened before, for another list of survivors"}
    third = Sum(silo, "third")
    third.until_agree(statistics())
    assert third.reveal([0, 1, 2, 3])[1].arrays  # shows nothing new
    other = Sum(silo, "other", new=False)
    assert "replied to this stage before" in other.until_agree(statistics())["error"]


def test_a_node_opens_nothing_without_the_signatures_of_enough_others(tmp_path: Path) -> None:
    silo = Silo(tmp_path / "a", SECURE)
    sum_ = Sum(silo, "s")
    sum_.until_agree(statistics())
    _, request = sum_.agree([0, 1, 2, 3])
    few = sum_.told("reveal", signers=[0, 1], signatures=request.arrays["signatures"][:2])
    assert sum_.exchange(few)[0] == {"error": "2 survivors have signed the list of survivors, 3 are needed"}
    forged = sum_.told("reveal", signers=[0, 1, 2, 3], signatures=request.arrays["signatures"][[0, 0, 0, 0]])
    assert sum_.exchange(forged)[0] == {"error": "1 survivors have signed the list of survivors, 3 are needed"}
    assert sum_.exchange(request)[1].arrays


def test_what_a_node_signs_is_of_one_run_stage_round_and_question(tmp_path: Path) -> None:
    found = []
    for number, (stages, facts, question) in enumerate(
        [
            ([{**SGD, "secure": True}], {}, model()),
            ([{**SGD, "secure": True}], {}, model()),
            ([{**SGD, "secure": True}], {"run": "1" * 32}, model()),
            ([{**SGD, "secure": True}], {}, model(round=1)),
            ([{**SGD, "secure": True}], {}, model(weight=1.0)),
            ([{**SGD, "secure": True}], {"setup": Silo(tmp_path / "x", SGD).setup(clients=6)}, model()),
            ([{**SGD, "secure": True, "lr": 0.2}], {}, model()),
        ]
    ):
        silo = Silo(tmp_path / str(number), *stages, data=tmp_path)
        assert "error" not in silo.ask("secure", question, told=begun("s", 4, 3), **facts)[0]
        (state,) = secrets_of(silo)
        found.append(Wire.from_bytes(state.read_bytes()).scalars["context"])
    assert found[0] == found[1]
    assert len(set(found)) == 6


def test_a_node_without_a_signing_key_says_what_to_do(tmp_path: Path) -> None:
    silo = Silo(tmp_path / "a", SECURE)
    silo.identity = None
    facts, _ = silo.ask("secure", statistics(), told=begun("s", 4, 3))
    assert "make a key with ssh-keygen -t ed25519, and give the node signing_key" in facts["error"]
    assert facts == silo.ask("join", Wire())[0]


@pytest.mark.parametrize(("kind", "stage"), [("secure", SECURE), ("answer", NCM), ("answer", {"method": "fedncm"})])
def test_a_node_is_the_client_that_its_list_of_peers_says(tmp_path: Path, kind: str, stage: dict[str, Any]) -> None:
    silo = Silo(tmp_path / "a", stage)
    silo.identity = identities(8)[0]
    for number in (1, 7):
        facts, _ = silo.ask(kind, statistics(), told=begun("s", 4, 3), client=number)
        assert facts == {"error": f"the node is number 0 of its list of peers, and the request is to client {number}"}


def test_a_sum_is_not_begun_for_one_stage_and_given_the_values_of_another(tmp_path: Path) -> None:
    silo = Silo(tmp_path / "a", SECURE, {**SECURE, "secure_threshold": 1.0})
    sum_ = Sum(silo, "s")
    sum_.begin(statistics())
    facts, _ = silo.ask("secure", Wire(), told=sum_.told("shares"), setup=silo.setup(1))
    assert facts == {"error": "the sum was begun for another stage"}


def test_two_lists_at_once_are_not_both_signed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    silo = Silo(tmp_path / "a", SECURE)
    sum_ = Sum(silo, "s")
    sum_.until_agree(statistics())
    quick = SecureClient.agree

    def slow(self: SecureClient, survivors: Wire) -> Wire:
        answer = quick(self, survivors)
        time.sleep(0.3)
        return answer

    monkeypatch.setattr(SecureClient, "agree", slow)
    asks = [sum_.proposal(survivors) for survivors in ([0, 1, 2, 3], [0, 1, 2])]
    said = at_once(*(lambda told=told: sum_.exchange(told) for told in asks))
    assert sorted("error" in facts for facts, _ in said) == [False, True]
