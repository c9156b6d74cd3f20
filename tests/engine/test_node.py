"""Nodes and servers that lose something, are told nonsense, or run out of room. No processes of Flower: its messages go
from the server to the nodes within this process."""

import csv
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from safetensors.torch import save_file
from sklearn.datasets import load_digits

pytest.importorskip("flwr")

from flwr.app import ArrayRecord, ConfigRecord, Error, Message, RecordDict
from flwr.common.constant import ErrorCode
from flwr.supercore.task_identity import TaskIdentity

from headstart.backbones.nets import FourConv
from headstart.config.node import NodeLimits
from headstart.config.recipe import Recipe
from headstart.core.files import secret
from headstart.core.message import Message as Wire
from headstart.core.seeds import Secret, Seed
from headstart.data import Federation
from headstart.engine.flower_messages import RECORD, facts_of, noise_keys, package_version, recipe_digest
from headstart.engine.grid import Nodes
from headstart.engine.node import Node
from headstart.engine.node_errors import StateLostError
from headstart.engine.node_stage import NodeRequest
from headstart.engine.respond import respond, run_of
from headstart.engine.server import draw
from headstart.engine.server_log import ServerLog
from headstart.engine.setup import digest
from headstart.errors import HeadstartError, MessageError
from headstart.heads import LinearHead
from headstart.report import remarks, summary_table
from headstart.runner import Result, run, run_federation
from tests.helpers import identities

NAMES = ("a", "b", "c")
FOUR = (*NAMES, "d")
"""The fewest nodes of a secure sum that tolerate one absence."""
LOCAL = {"train": "head", "rounds": 3, "lr": 0.01, "batch_size": 20, "evaluate_every": 10, "min_replies": 1}
MLP = LOCAL | {"head": "mlp", "hidden": 4}
Change = Callable[[int, int, Message], "Message | None"]
"""Of a node, the number of the question and the question: what is heard in place of the node's reply."""


@pytest.fixture(autouse=True)
def _identity(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who sends messages, as Flower sets it in its own processes."""
    for name in ("_task_id", "_run_id", "_node_id"):
        monkeypatch.setattr(TaskIdentity, name, 1)


@pytest.fixture(scope="module")
def silos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Digits at three clients: all in one file, and each in its own; and more of them at a fourth."""
    folder = tmp_path_factory.mktemp("silos")
    features, labels = load_digits(return_X_y=True)
    np.savez(folder / "d.npz", X=features[400:500].astype(np.float32), y=labels[400:500], split=np.zeros(100, int))
    features, labels = features[:400].astype(np.float32), labels[:400]
    rng = np.random.default_rng(0)
    owners = np.where(rng.random(400) < 0.6, labels % 3, rng.integers(0, 3, 400))
    split = np.where(rng.random(400) < 0.2, 2, 0)
    np.savez(folder / "all.npz", X=features, y=labels, client=owners, split=split)
    for number, name in enumerate(NAMES):
        mine = owners == number
        np.savez(folder / f"{name}.npz", X=features[mine], y=labels[mine], split=split[mine])
    return folder


def recipe_of(silos: Path, *stages: dict[str, Any]) -> Recipe:
    partition = {"kind": "natural", "test": "follow"}
    data = {"dataset": str(silos / "all.npz"), "classes": list(range(10)), "partition": partition}
    return Recipe.parse({"data": data, "model": {"backbone": "features"}, "stages": list(stages)})


class Grid:
    """Nodes that answer when they are asked, each from its own data and its own folder.

    said: every question, as node, kind, and the names of its parts; tasks: of nodes, where the recipe has several.
    """

    def __init__(
        self, recipe: Recipe, silos: Path, state: Path, change: Change | None = None, names: tuple[str, ...] = NAMES
    ) -> None:
        self.recipe, self.silos, self.state, self.change, self.names = recipe, silos, state, change, names
        self.online = dict(enumerate(names, start=10))
        self.tasks: dict[str, str] = {}
        self.limits = NodeLimits()
        self.said: list[tuple[str, str, set[str]]] = []
        self.replies: dict[str, Message] = {}
        self.asked = 0

    def get_nodes(self) -> list[Any]:
        return [SimpleNamespace(node_id=n, name=name, last_activated_at="") for n, name in self.online.items()]

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        names = []
        for message in messages:
            self.asked += 1
            message.metadata.__dict__["_message_id"] = str(self.asked)
            node = message.metadata.dst_node_id
            facts, parts = facts_of(message)
            self.said.append((self.online[node], facts["kind"], set(parts)))
            changed = self.change(node, self.asked, message) if self.change else None
            self.replies[str(self.asked)] = changed or self.node(node, message)
            names.append(str(self.asked))
        return names

    def pull_messages(self, names: Iterable[str]) -> list[Message]:
        return [self.replies.pop(name) for name in names]

    def node(self, number: int, message: Message) -> Message:
        """The reply of a process that has only just started."""
        name = self.online[number]
        federation = Federation.silo(self.recipe, str(self.data(name)), name, self.tasks.get(name, ""))
        secure = any(stage.secure for stage in self.recipe.stages)
        identity = identities(len(self.names))[self.names.index(name)] if secure else None
        folder = self.folder(name) / run_of(message)
        return respond(message, Node(self.recipe, federation, folder, True, identity, self.limits), name)

    def data(self, name: str) -> Path:
        return self.silos / f"{name}.npz"

    def folder(self, name: str) -> Path:
        return self.state / name


def serve(
    grid: Any,
    out: Path,
    resume: bool = False,
    on_metrics: Callable[[dict[str, Any]], object] | None = None,
    expected: int | None = None,
    test: str | None = None,
    audit: ServerLog | None = None,
) -> Result:
    """As the ServerApp of a deployment does."""
    nodes = Nodes(grid, grid.recipe, {name: number for number, name in enumerate(grid.names)}, audit)
    nodes.available(expected or len(grid.names))
    nodes.agree({})
    sizes = np.array([nodes.node_info.get(number, {"examples": 0})["examples"] for number in range(len(grid.names))])
    members = np.array([nodes.task_of(number) for number in range(len(grid.names))]) if grid.recipe.tasks else None
    federation = Federation.apart(grid.recipe, grid.names, sizes, nodes.agreed["dim"], test, members)
    return run_federation(grid.recipe, federation, out, resume, on_metrics, nodes)


def model_of(out: Path, stage: int) -> dict[str, np.ndarray]:
    return load_file(out / "checkpoint" / f"stage-{stage}.safetensors")


def assert_same_models(here: Path, there: Path, stages: int) -> None:
    for stage in range(stages):
        ours, theirs = model_of(here, stage), model_of(there, stage)
        assert ours.keys() == theirs.keys()
        for name in ours:
            np.testing.assert_array_equal(theirs[name], ours[name], err_msg=name)


class InterruptedRunError(Exception):
    pass


def interrupt(evaluations: int) -> Callable[[dict[str, Any]], None]:
    """Stops a run at an evaluation: after its round has been answered, and before the checkpoint is written."""
    left = [evaluations]

    def stop(line: dict[str, Any]) -> None:
        left[0] -= 1
        if not left[0]:
            raise InterruptedRunError

    return stop


def clients_of(out: Path) -> str:
    """`clients.csv`, with the numbers by which the data call clients as names; without what needs every score, and what
    is added up in another order: the area under the ROC curve, and calibration."""
    text = re.sub(r"(?m),[^,\n]*,[^,\n]*$", "", (out / "clients.csv").read_text())
    return re.sub(r"(?m)^(\d+),(\d),", lambda row: f"{row[1]},{NAMES[int(row[2])]},", text)


# ------------------------------------------------------------------------------------------------- what a node may lose


def dropped(result: Result, stage: int = 0) -> list[tuple[int, str, str]]:
    return [(drop["round"], drop["clients"], drop["why"]) for drop in result.summary["stages"][stage]["dropped"]]


def test_nodes_give_the_model_of_the_same_run_in_process(silos: Path, tmp_path: Path) -> None:
    recipe = recipe_of(silos, {**MLP, "method": "fedper"}, {**LOCAL, "method": "fedmezo", "start": "pretrained"})
    run(recipe, tmp_path / "here")
    result = serve(Grid(recipe, silos, tmp_path / "state"), tmp_path / "there")
    assert_same_models(tmp_path / "here", tmp_path / "there", 2)
    assert dropped(result) == []


def test_closed_forms_that_hear_nodes_more_than_once(silos: Path, tmp_path: Path) -> None:
    """Centres, a temperature, and training that is told of it; a pass asks every node once, and only once."""
    first = {"min_examples": 2, "temperature": "auto"}  # a node has at least two examples of what it speaks of
    recipe = recipe_of(
        silos,
        {**first, "method": "fedncm", "centres": 2, "iterations": 2},
        {**first, "method": "fedcof"},
        {**LOCAL, "method": "fedavg", "temperature": "auto"},
    )
    here = run(recipe, tmp_path / "here").summary
    grid = Grid(recipe, silos, tmp_path / "state")
    grid.limits = NodeLimits(min_examples=1)  # the recipe says two, and centres of fewer are not left out
    there = serve(grid, tmp_path / "there").summary
    assert_same_models(tmp_path / "here", tmp_path / "there", 3)
    assert [stage["rounds"] for stage in there["stages"][:2]] == [5, 2]
    for ours, theirs in zip(here["stages"], there["stages"], strict=True):
        assert (theirs["bytes_up"], theirs["bytes_down"]) == (ours["bytes_up"], ours["bytes_down"])
        assert theirs["dropped"] == []
        assert theirs["forward_passes"] == ours["forward_passes"]
    assert LinearHead.load(tmp_path / "there" / "model" / "head.safetensors").temperature == pytest.approx(
        here["stages"][1]["chosen"]["temperature"]
    )


def test_secure_sums_of_every_pass(silos: Path, tmp_path: Path) -> None:
    """Three nodes, added up: the centres and the temperature of the same run in process."""
    stage = {"method": "fedncm", "centres": 2, "iterations": 1, "temperature": "auto", "secure": True}
    recipe = recipe_of(silos, stage)
    run(recipe, tmp_path / "here")
    result = serve(Grid(recipe, silos, tmp_path / "state"), tmp_path / "there")
    assert dropped(result) == []
    ours, theirs = (LinearHead.load(tmp_path / each / "model" / "head.safetensors") for each in ("here", "there"))
    np.testing.assert_allclose(theirs.weight, ours.weight, rtol=1e-5, atol=1e-6)
    assert theirs.temperature == pytest.approx(ours.temperature, rel=1e-5)


def test_compressed_updates_of_nodes_are_those_of_the_same_run_in_process(silos: Path, tmp_path: Path) -> None:
    """To the bit, whatever is rounded or left out: in the updates, and in what clients keep of them."""
    stages = [
        {**LOCAL, "method": method, "compress": how, "start": "pretrained", "clients_per_round": 2, "rounds": 3}
        for method, how in zip(
            ("fedavg", "scaffold", "feddyn", "fednova"), ("int8", "top-k", "sign", "top-k"), strict=True
        )
    ]
    recipe = recipe_of(silos, *stages, {**MLP, "method": "ditto", "compress": "sign", "start": "pretrained"})
    here = run(recipe, tmp_path / "here").summary
    there = serve(Grid(recipe, silos, tmp_path / "state"), tmp_path / "there").summary
    assert_same_models(tmp_path / "here", tmp_path / "there", 5)
    for ours, theirs in zip(here["stages"], there["stages"], strict=True):
        assert (theirs["bytes_up"], theirs["bytes_down"]) == (ours["bytes_up"], ours["bytes_down"])
        assert theirs["dropped"] == []
    assert clients_of(tmp_path / "there") == clients_of(tmp_path / "here")


def test_a_node_that_lost_its_folder_is_asked_again_as_a_new_one(silos: Path, tmp_path: Path) -> None:
    recipe = recipe_of(silos, {**MLP, "method": "fedper", "rounds": 3})
    grid = Grid(recipe, silos, tmp_path / "state")

    def lose(node: int, number: int, message: Message) -> None:
        if number == 3 + 3 + 2:  # three joined, three answered in the first round; b is asked for the second time
            shutil.rmtree(grid.folder("b"))

    grid.change = lose
    result = serve(grid, tmp_path / "out")
    assert dropped(result) == []
    answers = [parts for name, kind, parts in grid.said if name == "b" and kind == "answer"]
    assert answers == [{"message", "setup"}, {"message"}, {"message", "setup"}, {"message"}]
    (kept,) = grid.folder("b").glob("*/clients-0/personal.bin")
    slots = np.frombuffer(kept.read_bytes(), np.float32).reshape(2, -1)
    assert slots.any(axis=1).tolist() == [True, True]  # of the round that it was asked for again, and of the last


@pytest.mark.parametrize("secure", [False, True])
def test_a_node_that_lost_what_a_client_kept_in_an_earlier_stage_takes_part_again(
    silos: Path, tmp_path: Path, secure: bool
) -> None:
    stages = [{**MLP, "method": "fedper", "rounds": 1}, {**MLP, "method": "fedper", "secure": secure}]
    recipe = recipe_of(silos, *stages)
    grid = Grid(recipe, silos, tmp_path / "state", names=FOUR)

    def lose(node: int, number: int, message: Message) -> None:
        facts, parts = facts_of(message)
        if grid.online[node] == "b" and "setup" in parts and facts["states"][0][0] == 1 and facts["states"][1][1] >= 0:
            for folder in grid.folder("b").glob("*/clients-0"):
                shutil.rmtree(folder)

    grid.change = lose
    result = serve(grid, tmp_path / "out")
    # A sum goes on without it, and for the next one it is new; alone it is asked again at once.
    assert dropped(result, 1) == ([(1, "b", "the node no longer has the client's state")] if secure else [])
    (kept,) = grid.folder("b").glob("*/clients-1/personal.bin")
    assert any(kept.read_bytes())


def test_a_node_that_leaves_in_a_round_that_needs_it_is_asked_again_when_it_is_back(
    silos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It had answered before it left, or had not: the model is the same."""
    monkeypatch.setattr("headstart.engine.grid._REFRESH", 0.0)
    stage = {**MLP, "method": "fedper", "min_replies": 3, "deadline": 60}
    recipe = recipe_of(silos, stage)
    run(recipe, tmp_path / "here")
    grid = Grid(recipe, silos, tmp_path / "state")

    def leave(node: int, number: int, message: Message) -> Message | None:
        if number not in (3 + 2, 3 + 3 + 1 + 3):  # b in the first round, and c in the second, when b is asked twice
            return None
        if number == 3 + 2:
            grid.node(node, message)
        return Message(Error(ErrorCode.NODE_UNAVAILABLE, "it has left"), reply_to=message)

    grid.change = leave
    result = serve(grid, tmp_path / "there")
    assert dropped(result) == []
    assert [name for name, kind, _ in grid.said if kind == "answer"] == [*"abcb", *"abcc", *"abc"]
    assert_same_models(tmp_path / "here", tmp_path / "there", 1)

    # Where a round can go on without it, nobody waits.
    grid = Grid(recipe_of(silos, stage | {"min_replies": 2}), silos, tmp_path / "other", leave)
    assert [drop[:2] for drop in dropped(serve(grid, tmp_path / "out"))] == [(1, "b"), (3, "a")]


def test_a_node_that_lost_its_log_is_told_everything_again(silos: Path, tmp_path: Path) -> None:
    recipe = recipe_of(silos, {**LOCAL, "method": "fedmezo", "rounds": 4})
    grid = Grid(recipe, silos, tmp_path / "state")

    def lose(node: int, number: int, message: Message) -> None:
        if number == 3 + 3 + 3 + 1:  # a is asked for the third time
            (log,) = grid.folder("a").glob("*/log-0-0.safetensors")
            log.unlink()

    grid.change = lose
    result = serve(grid, tmp_path / "out")
    assert dropped(result) == []
    (log,) = grid.folder("a").glob("*/log-0-0.safetensors")
    (other,) = grid.folder("b").glob("*/log-0-1.safetensors")
    ours, theirs = Wire.from_bytes(log.read_bytes()), Wire.from_bytes(other.read_bytes())
    assert len(theirs.arrays["seeds"]) == 3
    for name in ("seeds", "slopes"):
        np.testing.assert_array_equal(ours.arrays[name], theirs.arrays[name])


def test_a_client_without_what_it_was_sent_says_so(silos: Path, tmp_path: Path) -> None:
    recipe = recipe_of(silos, {**MLP, "method": "fedper"})
    grid = Grid(recipe, silos, tmp_path / "state")
    serve(grid, tmp_path / "out")
    (folder,) = (path for path in grid.folder("a").iterdir() if path.is_dir())
    node = Node(recipe, Federation.silo(recipe, str(silos / "a.npz"), "a"), folder, deployed=True)
    (setup,) = folder.glob("setup-*.safetensors")
    name = node.remember(setup.read_bytes())
    with pytest.raises(StateLostError, match="no longer has what the stage starts from"):
        node.answer(NodeRequest("s", 0, "0" * 64, [(0, -1, {})], False, Wire()))
    kept = [(0, 0, {"memory.head.weight": (2,)})]
    (folder / "answered-0.safetensors").unlink()  # or another question for the round would be refused
    with pytest.raises(StateLostError, match="no longer has the client's state"):
        node.answer(NodeRequest("s", 0, name, kept, False, Wire(scalars={"round": 0})))


# ----------------------------------------------------------------------------------------------- what a server may lose


@pytest.mark.parametrize(
    "stage",
    [
        {**MLP, "method": "fedper"},
        {**MLP, "method": "ditto"},
        {**LOCAL, "method": "fedmezo"},
        {**LOCAL, "method": "scaffold"},
        {**LOCAL, "method": "scaffold", "compress": "int8"},
        {**LOCAL, "method": "scaffold", "compress": "top-k"},
    ],
    ids=lambda stage: stage["method"] + stage.get("compress", ""),
)
def test_a_server_goes_on_from_its_checkpoint_with_nodes_that_are_ahead_of_it(
    silos: Path, tmp_path: Path, stage: dict[str, Any]
) -> None:
    recipe = recipe_of(silos, {**stage, "rounds": 4, "evaluate_every": 1})
    run(recipe, tmp_path / "here")
    with pytest.raises(InterruptedRunError):
        serve(Grid(recipe, silos, tmp_path / "state"), tmp_path / "there", on_metrics=interrupt(3))
    serve(Grid(recipe, silos, tmp_path / "state"), tmp_path / "there", True)
    assert_same_models(tmp_path / "here", tmp_path / "there", 1)
    assert clients_of(tmp_path / "there") == clients_of(tmp_path / "here")


def test_a_run_that_goes_on_without_a_node_keeps_what_is_the_others_own(silos: Path, tmp_path: Path) -> None:
    recipe = recipe_of(silos, {**MLP, "method": "fedper", "rounds": 2, "evaluate_every": 1, "min_replies": 2})
    with pytest.raises(InterruptedRunError):
        serve(Grid(recipe, silos, tmp_path / "state"), tmp_path / "out", on_metrics=interrupt(2))
    grid = Grid(recipe, silos, tmp_path / "state")
    before = {name: personal(grid, name) for name in NAMES}
    del grid.online[12]
    result = serve(grid, tmp_path / "out", True, expected=2)
    assert dropped(result) == []
    for name in "ab":
        after = personal(grid, name)
        np.testing.assert_array_equal(after[0], before[name][0])  # of the first round
        assert after[1].any()


def personal(grid: Grid, name: str) -> np.ndarray:
    """Both slots of what a client has of its own [2, n]."""
    (kept,) = grid.folder(name).glob("*/clients-0/personal.bin")
    return np.frombuffer(kept.read_bytes(), np.float32).reshape(2, -1)


# ------------------------------------------------------------------------------------------------------------- nonsense


def question(facts: Any, **parts: Any) -> Message:
    text = facts if isinstance(facts, str) else json.dumps(facts)
    return Message(RecordDict({"headstart": ConfigRecord({"facts": text, **parts})}), 10, "query")


def reply_of(message: Message, node: Node) -> dict[str, Any]:
    answer = respond(message, node, "a")
    assert set(answer.content.config_records["headstart"]) == {"facts"}
    facts: dict[str, Any] = json.loads(str(answer.content.config_records["headstart"]["facts"]))
    return facts


@pytest.fixture
def node(silos: Path, tmp_path: Path) -> Node:
    recipe = recipe_of(silos, {"method": "fedncm"})
    return Node(recipe, Federation.silo(recipe, str(silos / "a.npz"), "a"), tmp_path / "node", deployed=True)


def about(node: Node, **facts: Any) -> dict[str, Any]:
    same = {"session": "s", "run": "0" * 32, "recipe": recipe_digest(node.recipe), "version": package_version()}
    return same | facts


def test_a_node_says_who_it_is(node: Node, silos: Path) -> None:
    examples = int((np.load(silos / "a.npz")["split"] == 0).sum())
    assert reply_of(question(about(node, kind="join")), node) == {"name": "a", "examples": examples, "dim": 64}


def test_a_node_refuses_another_version_and_another_recipe(node: Node, silos: Path) -> None:
    other = about(node, kind="join", version="0.0.1")
    assert reply_of(question(other), node) == {
        "error": f"the node runs headstart {package_version()}, the server 0.0.1"
    }
    other = about(node, kind="join", recipe=recipe_digest(recipe_of(silos, {"method": "fed3r"})))
    assert reply_of(question(other), node) == {"error": "the server runs another recipe than the node was given"}


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (FileNotFoundError(2, "No such file", "/srv/St Mary, ward 3/x.npz"), "[Errno 2] No such file: 'x.npz'"),
        (OSError(18, "Invalid link", "/a/b.tmp", None, "/c d/e.npz"), "[Errno 18] Invalid link: 'b.tmp' -> 'e.npz'"),
        (HeadstartError("cannot write to /home/mary poppins/.cache/f: full"), "cannot write to f: full"),
        (HeadstartError("~/data/p.csv:3: bad row; see (/srv/x/y.csv)"), "p.csv:3: bad row; see (y.csv)"),
        (HeadstartError("model.weights='/opt/w.safetensors'"), "model.weights='w.safetensors'"),
        (HeadstartError("hf/org/name, 3 / 4, and/or https://x.org/y"), "hf/org/name, 3 / 4, and/or https://x.org/y"),
    ],
)
def test_errors_leave_a_node_without_its_folders_and_its_log_has_them(
    node: Node, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: Exception, said: str
) -> None:
    def fail() -> None:
        raise error

    monkeypatch.setattr(node, "node_info", fail)
    found = reply_of(question(about(node, kind="join")), node)["error"]
    assert found.removeprefix(f"the node failed: {type(error).__name__}: ") == said
    assert str(error) in caplog.text


GOOD = Wire().to_bytes()


@pytest.mark.parametrize(
    "message",
    [
        lambda node: Message(RecordDict(), 10, "query"),
        lambda node: Message(RecordDict({"headstart": ArrayRecord()}), 10, "query"),
        lambda node: Message(RecordDict({"other": ConfigRecord({"facts": "{}"})}), 10, "query"),
        lambda node: question("["),
        lambda node: question("[]"),
        lambda node: question("[" * 100_000),
        lambda node: question('{"kind":' * 50_000),
        lambda node: question(about(node, kind="join"), message="text"),
        lambda node: question({}),
        lambda node: question(about(node, kind="nothing")),
        lambda node: question(about(node, kind=[])),
        lambda node: question(about(node, kind="answer")),
        lambda node: question(about(node, kind="answer"), message=GOOD),
        lambda node: question(about(node, kind="answer", client=0, setup="x", states=[[]], new=True), message=GOOD),
        lambda node: question(about(node, kind="answer", client=0, setup="x", states=[], new=True), message=GOOD),
        lambda node: question(about(node, kind="answer", client=1e999, setup="", states=[], new=1), message=GOOD),
        lambda node: question(about(node, kind="answer", client=0, setup="\0", states=[], new=1), message=GOOD),
        lambda node: question(about(node, kind="evaluate", client=0, setup="/x", states=[], new=1), message=b"nothing"),
        lambda node: question(about(node, kind="secure", client=0, setup="", states=[], new=False), message=GOOD),
        lambda node: question(
            about(node, kind="secure", client=0, setup="", states=[], new=False), message=GOOD, told=GOOD
        ),
        lambda node: question(
            about(node, kind="answer", client=0, setup="", states=[], new=True), setup=b"x", message=GOOD
        ),
    ],
)
def test_a_node_answers_nonsense_with_an_error(node: Node, message: Callable[[Node], Message]) -> None:
    said = reply_of(message(node), node)
    assert said.keys() <= {"error", "state_lost"}
    assert said["error"]


@pytest.mark.parametrize(
    "run", ["../x", "..", "", "/etc", "0" * 31, "0" * 33, "G" * 32, "0" * 32 + "\n", None, 7, ["0" * 32]]
)
def test_a_run_is_no_path(run: Any) -> None:
    with pytest.raises(MessageError, match="the request names no run"):
        run_of(question({"run": run}))
    assert run_of(question({"run": "0a" * 16})) == "0a" * 16


def garbage(node: int, message: Message) -> list[Message]:
    """Replies of a node that is broken, or worse."""
    return [
        Message(RecordDict(), reply_to=message),
        Message(RecordDict({"headstart": ConfigRecord({"facts": "[" * 100_000})}), reply_to=message),
        Message(RecordDict({"headstart": ConfigRecord({"facts": "{}", "message": b"x"})}), reply_to=message),
        Message(
            RecordDict({"headstart": ConfigRecord({"facts": '{"passes": -1, "examples": 1, "right": 2}'})}),
            reply_to=message,
        ),
        Message(
            RecordDict({"headstart": ConfigRecord({"facts": '{"passes": 1, "examples": 1e999}', "message": GOOD})}),
            reply_to=message,
        ),
        Message(Error(2, "it\nfailed\x1b[2J"), reply_to=message),
    ]


@pytest.mark.parametrize("kind", range(6))
@pytest.mark.parametrize("secure", [False, True])
def test_a_server_goes_on_without_a_node_that_answers_nonsense(
    silos: Path, tmp_path: Path, kind: int, secure: bool
) -> None:
    stage = {**LOCAL, "method": "fedavg", "rounds": 1, "secure": secure}
    recipe = recipe_of(silos, stage)

    def change(node: int, number: int, message: Message) -> Message | None:
        facts, _ = facts_of(message)
        return garbage(node, message)[kind] if node == 11 and facts["kind"] != "join" else None

    result = serve(Grid(recipe, silos, tmp_path / "state", change, FOUR), tmp_path / "out")
    ((number, client, why),) = dropped(result)
    assert (number, client) == (1, "b")
    assert why.isprintable()
    rows = [line.split(",") for line in (tmp_path / "out" / "clients.csv").read_text().splitlines()]
    assert [row[1] for row in rows if row[2] in ("", "nan")] == (list(FOUR) if secure else ["b"])


@pytest.mark.parametrize("kind", range(6))
def test_a_server_starts_without_a_node_that_introduces_itself_with_nonsense(
    silos: Path, tmp_path: Path, kind: int
) -> None:
    recipe = recipe_of(silos, {"method": "fedncm"})

    def change(node: int, number: int, message: Message) -> Message | None:
        facts, _ = facts_of(message)
        return garbage(node, message)[kind] if node == 11 and facts["kind"] == "join" else None

    result = serve(Grid(recipe, silos, tmp_path / "state", change), tmp_path / "out")
    assert result.summary["examples"] == sum(int((np.load(silos / f"{n}.npz")["split"] == 0).sum()) for n in "ac")


def test_nobody_waits_for_a_node_that_calls_itself_by_anothers_name(
    silos: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    recipe = recipe_of(silos, {"method": "fedncm"})
    grid = Grid(recipe, silos, tmp_path / "state")

    def change(node: int, number: int, message: Message) -> Message | None:
        return respond(message, Node(recipe, silo, tmp_path / "x", deployed=True), "b") if node in (10, 9) else None

    silo = Federation.silo(recipe, str(silos / "a.npz"), "b")
    grid.online[9] = "stranger"
    grid.change = change
    nodes = Nodes(grid, recipe, {name: number for number, name in enumerate(NAMES)})  # type: ignore[arg-type]
    assert nodes.available(3, 20) == {1, 2}
    assert nodes.ids == {1: 11, 2: 12}
    assert nodes.refusals == {"a": "a: it is registered as 'a' and says that it is 'b'"}
    assert "a node is excluded: a: it is registered as 'a' and says that it is 'b'" in caplog.text
    assert "a node is excluded: stranger: it is registered as 'stranger' and says that it is 'b'" in caplog.text


# ------------------------------------------------------------------------------------------------------- room and locks

LIMITED = """
import resource, signal, sys
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv.pop(1)),) * 2)
from headstart.cli import main
main()
"""


@pytest.fixture
def command(silos: Path, tmp_path: Path) -> list[str]:
    keys = {"train": "head", "head": "mlp", "hidden": 40, "lr": 0.01, "rounds": 4, "evaluate_every": 1}
    recipe = recipe_of(silos, {"method": "fedncm"}, {**keys, "method": "ditto", "start": "pretrained"})
    (tmp_path / "recipe.toml").write_text(recipe.to_toml())
    return ["run", str(tmp_path / "recipe.toml"), "--out", str(tmp_path / "out")]


def test_a_full_disk_is_a_sentence_and_loses_nothing(command: list[str], tmp_path: Path) -> None:
    recipe = Recipe.load(tmp_path / "recipe.toml")
    run(recipe, tmp_path / "here")
    largest = max(path.stat().st_size for path in (tmp_path / "here" / "checkpoint").rglob("*") if path.is_file())
    limited = [sys.executable, "-c", LIMITED, str(largest // 2)]
    plain = {name: value for name, value in os.environ.items() if not name.startswith("COVERAGE")}  # it writes too
    failed = subprocess.run([*limited, *command], capture_output=True, text=True, timeout=120, env=plain)
    assert failed.returncode == 2, failed.stderr
    assert "File too large; make room, and continue with --resume" in failed.stderr
    assert "Traceback" not in failed.stderr
    done = (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()
    assert 1 <= len(done) < 5
    assert not (tmp_path / "out" / "summary.json").exists()
    again = subprocess.run(
        [sys.executable, "-m", "headstart.cli", *command, "--resume"], capture_output=True, text=True, timeout=120
    )
    assert again.returncode == 0, again.stderr
    assert_same_models(tmp_path / "here", tmp_path / "out", 2)
    assert (tmp_path / "here" / "clients.csv").read_text() == (tmp_path / "out" / "clients.csv").read_text()
    lines = (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["round"] for line in lines] == [1, 1, 2, 3, 4]


BUSY = """
import sys, time
from pathlib import Path
from headstart.config.node import NodeLimits
from headstart.config.recipe import Recipe
from headstart.runner import run
def wait(line):
    while not Path(sys.argv[3]).exists():
        time.sleep(0.05)
run(Recipe.load(Path(sys.argv[1])), sys.argv[2], on_metrics=wait)
"""


def test_a_second_process_in_a_run_directory_is_refused_and_the_first_goes_on(
    command: list[str], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    first = subprocess.Popen([sys.executable, "-c", BUSY, command[1], str(out), str(tmp_path / "go")])
    try:
        until = time.monotonic() + 60
        while not (out / "metrics.jsonl").is_file():
            assert first.poll() is None
            assert time.monotonic() < until
            time.sleep(0.05)
        for more in ([], ["--resume"]):
            second = subprocess.run(
                [sys.executable, "-m", "headstart.cli", *command, *more], capture_output=True, text=True, timeout=60
            )
            assert second.returncode == 2
            expected = "another process is running there; wait for it, or stop it" if more else "already used"
            assert expected in second.stderr
        (tmp_path / "go").touch()
        assert first.wait(60) == 0
    finally:
        first.kill()
        first.wait()
    assert json.loads((out / "summary.json").read_text())["stages"][1]["rounds"] == 4


# ------------------------------------------------------------------------------------ who comes, goes, and keeps quiet


def test_a_node_that_comes_late_takes_part_from_then_on_and_one_that_leaves_is_missed(
    silos: Path, tmp_path: Path
) -> None:
    recipe = recipe_of(silos, {**LOCAL, "method": "fedavg", "rounds": 4, "evaluate_every": 1})
    grid = Grid(recipe, silos, tmp_path / "state")
    late = grid.online.popitem()

    def after(line: dict[str, Any]) -> None:
        if line["round"] == 2:
            grid.online[late[0]] = late[1]
        if line["round"] == 3:
            del grid.online[10]

    serve(grid, tmp_path / "out", on_metrics=after, expected=2)
    with (tmp_path / "out" / "rounds.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    taken = [(int(row["round"]), row["client"]) for row in rows if not row["left_out"]]
    assert taken == [(1, "a"), (1, "b"), (2, "a"), (2, "b"), (3, "a"), (3, "b"), (3, "c"), (4, "b"), (4, "c")]
    answers = [parts for name, kind, parts in grid.said if name == "c" and kind == "answer"]
    assert answers == [{"message", "setup"}, {"message"}]
    when = r"absent since \d{4}-\d\d-\d\d \d\d:\d\d:\d\d: "
    absent = [(int(row["round"]), row["client"], row["left_out"]) for row in rows if row["left_out"]]
    assert [each[:2] for each in absent] == [(1, "c"), (2, "c"), (4, "a")]
    assert re.fullmatch(when + "no node has joined", absent[0][2])
    assert re.fullmatch(when + "the node has left", absent[2][2])
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert summary["stages"][0]["absent"] == {"c": [1, 2], "a": [4]}
    told = "fedavg: of 4 rounds, clients were absent: c from 2 rounds, the first 1; a from round 4"
    assert remarks(summary["stages"][0]) == [told]
    assert told in (tmp_path / "out" / "report.html").read_text()
    assert "3 clients (2 absent at times)" in str(summary_table(summary).title)


def test_a_deployment_stops_where_nodes_that_it_started_with_have_left(
    silos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless its recipe says that fewer are enough; by default after an hour."""
    waits: list[float | None] = []
    available = Nodes.available

    def hurried(self: Nodes, wait_for: int, patience: float | None = None) -> set[int]:
        waits.append(patience)
        return available(self, wait_for, None if patience is None else 0.0)

    monkeypatch.setattr(Nodes, "available", hurried)

    class Leaving(Grid):
        def get_nodes(self) -> list[Any]:
            if any(kind != "join" for _, kind, _ in self.said):
                self.online = {10: "a"}
            return super().get_nodes()

    stage = {key: value for key, value in LOCAL.items() if key != "min_replies"} | {"method": "fedavg", "rounds": 2}
    grid = Leaving(recipe_of(silos, stage), silos, tmp_path / "state")
    why = r"fedavg: 1 of 3 nodes are available, min_replies = 3; missing: b \(absent since .*: the node has left\); c "
    with pytest.raises(HeadstartError, match=why):
        serve(grid, tmp_path / "out")
    assert waits[1:] == [3600.0, 3600.0]
    grid.online = {10: "a"}  # the others do not come back in time, and the run was theirs, too
    with pytest.raises(HeadstartError, match="fedavg: 1 of 3 nodes are available, min_replies = 3"):
        serve(grid, tmp_path / "out", resume=True, expected=1)
    fewer = Leaving(recipe_of(silos, {**stage, "min_replies": 1, "deadline": 5}), silos, tmp_path / "fewer")
    summary = serve(fewer, tmp_path / "fewer-out").summary
    assert summary["stages"][0]["absent"] == {"b": [2], "c": [2]}


def changed_join(**facts: Any) -> Callable[[Message], Message]:
    def change(message: Message) -> Message:
        record = ConfigRecord({"facts": json.dumps(facts)})
        return Message(RecordDict({RECORD: record}), reply_to=message)

    return change


@pytest.mark.parametrize(
    ("facts", "why"),
    [
        ({"dim": 65}, "b: the length of its features is 65, and the federation's is 64"),
        ({"dim": 10**10}, "b: the length of its features is 10000000000, and 65536 is the most"),
        ({"dim": 64, "weights": "0f"}, "b: the digest of its backbone's weights is 0f, and the federation's is None"),
        ({"dim": 64, "weights": [1]}, "b: the digest of its backbone's weights is none"),
    ],
)
def test_a_node_that_differs_from_the_others_is_refused_by_name_and_they_go_on(
    silos: Path, tmp_path: Path, facts: dict[str, Any], why: str
) -> None:
    recipe = recipe_of(silos, {"method": "fedncm"})
    grid = Grid(recipe, silos, tmp_path / "state")
    # Whoever comes first is not believed for that.
    grid.online = {11: "b", 10: "a", 12: "c"}

    def change(node: int, number: int, message: Message) -> Message | None:
        kind = facts_of(message)[0]["kind"]
        return changed_join(name="b", examples=9, **facts)(message) if node == 11 and kind == "join" else None

    grid.change = change
    nodes = Nodes(grid, recipe, {name: number for number, name in enumerate(NAMES)})  # type: ignore[arg-type]
    nodes.available(3)
    nodes.agree({})
    assert (nodes.ids, nodes.refusals, nodes.agreed["dim"]) == ({0: 10, 2: 12}, {"b": why}, 64)
    summary = serve(grid, tmp_path / "out").summary
    assert summary["stages"][0]["absent"] == {"b": [1]}
    assert why.removeprefix("b: ") in (tmp_path / "out" / "rounds.csv").read_text()


def test_without_a_majority_nobody_is_believed_and_what_the_server_knows_decides(silos: Path, tmp_path: Path) -> None:
    recipe = recipe_of(silos, {"method": "fedncm"})

    def change(node: int, number: int, message: Message) -> Message | None:
        return changed_join(name="b", examples=9, dim=65)(message) if node == 11 else None

    def nodes() -> Nodes:
        grid: Any = Grid(recipe, silos, tmp_path / "state", change, NAMES[:2])
        found = Nodes(grid, recipe, {"a": 0, "b": 1})
        found.available(2)
        return found

    with pytest.raises(HeadstartError, match="the length of the features, without a majority: a: 64, b: 65"):
        nodes().agree({})
    (told := nodes()).agree({"dim": 65})
    assert told.ids == {1: 11}
    with pytest.raises(HeadstartError, match=r"no node can participate: a: .* is 64, and the federation's is 66; b: "):
        nodes().agree({"dim": 66})
    alike: Any = Grid(recipe, silos, tmp_path / "alike", names=NAMES[:2])
    (both := Nodes(alike, recipe, {"a": 0, "b": 1})).available(2)
    with pytest.raises(HeadstartError, match=r"no node can participate: a, b: .* is 64, and the federation's is 66$"):
        both.agree({"dim": 66})


class Silent(Grid):
    """A grid with a node that is registered and never answers some kinds of questions."""

    silent: tuple[str, ...] = ("join",)

    def pull_messages(self, names: Iterable[str]) -> list[Message]:
        return [self.replies.pop(name) for name in names if name in self.replies]

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        names = super().push_messages(messages)
        for name, (who, kind, _) in zip(names, self.said[-len(names) :], strict=True):
            if who == "b" and kind in self.silent:
                del self.replies[name]
        return names


def test_a_node_that_does_not_say_who_it_is_is_named_and_costs_no_time_once_it_is_not_waited_for(
    silos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("headstart.engine.grid._REPORT", 0.6)
    monkeypatch.setattr("headstart.engine.grid._JOINING", 0.3)
    recipe = recipe_of(silos, {**LOCAL, "method": "fedavg", "rounds": 3, "evaluate_every": 1})
    grid: Any = Silent(recipe, silos, tmp_path / "state")
    nodes = Nodes(grid, recipe, {name: number for number, name in enumerate(NAMES)})
    assert nodes.available(3, 2.0) == {0, 2}
    waits = re.findall(r"waiting for nodes: 2 of 3 are available; missing: b \(absent since [^)]*: (.*)\)", caplog.text)
    assert waits == ["the node has not replied to the join request"] * len(waits)
    assert len(waits) in (2, 3)
    assert re.search(r"continuing without b \(absent since", caplog.text)
    began = time.monotonic()
    summary = serve(grid, tmp_path / "out", expected=2).summary
    assert time.monotonic() - began < 10
    assert summary["stages"][0]["absent"] == {"b": [1, 2, 3]}
    assert [kind for name, kind, _ in grid.said if name == "b"] == ["join", "join"]  # of two processes of the server


def test_a_node_that_misses_a_deadline_is_left_out_and_asked_again_in_the_third_round_after(
    silos: Path, tmp_path: Path
) -> None:
    stage = {**LOCAL, "method": "fedavg", "rounds": 5, "evaluate_every": 1, "deadline": 0.5}
    grid = Silent(recipe_of(silos, stage), silos, tmp_path / "state")
    grid.silent = ("answer", "evaluate")
    (found,) = serve(grid, tmp_path / "out").summary["stages"]
    assert [(drop["round"], drop["clients"]) for drop in found["dropped"]] == [(1, "b"), (4, "b")]
    assert found["absent"] == {"b": [2, 3, 5]}
    assert [kind for name, kind, _ in grid.said if name == "b"] == ["join", "answer", "answer"]
    assert "not sampled: it has missed a deadline" in (tmp_path / "out" / "rounds.csv").read_text()


def test_a_node_of_a_secure_stage_says_nothing_that_is_not_masked(silos: Path, tmp_path: Path) -> None:
    recipe = recipe_of(silos, {"method": "fedncm", "secure": True})
    grid = Grid(recipe, silos, tmp_path / "state")

    def plainly(node: int, number: int, message: Message) -> Message | None:
        facts, parts = facts_of(message)
        if facts["kind"] != "secure" or Wire.from_bytes(parts["exchange"]).scalars["step"] != "masked":
            return None
        facts["kind"] = "answer"
        message.content[RECORD]["facts"] = json.dumps(facts)
        return None

    grid.change = plainly
    with pytest.raises(HeadstartError, match="fedncm, round 1: 0 of 3 clients"):
        serve(grid, tmp_path / "out")
    reply = grid.node(10, asked_of(grid))
    assert facts_of(reply) == (
        {"error": "the stage has secure aggregation; nothing is sent that is not masked"}, {}
    )  # fmt: skip


def asked_of(grid: Grid) -> Message:
    """A question in the clear about a stage that a node of the grid knows."""
    (setup,) = grid.folder("a").glob("*/setup-*")
    data, run = setup.read_bytes(), setup.parent.name
    facts = {"session": "0" * 32, "run": run, "recipe": recipe_digest(grid.recipe), "version": package_version()}
    facts |= {"kind": "answer", "client": 0, "setup": digest(data), "states": [[0, -1, {}]], "new": True}
    record = ConfigRecord({"facts": json.dumps(facts), "message": Wire(scalars={"round": 0}).to_bytes()})
    return Message(RecordDict({RECORD: record}), 10, "query")


def test_a_node_with_noise_of_its_own_does_not_say_how_many_examples_it_has(silos: Path, tmp_path: Path) -> None:
    hidden = {"method": "fedncm", "privacy": {"epsilon": 100.0, "clip": 50.0, "noise": "client"}}
    for stages, known in (([hidden], 0), ([{**hidden, "privacy": hidden["privacy"] | {"noise": "server"}}], 1)):  # type: ignore[operator]
        recipe = recipe_of(silos, *stages)
        grid = Grid(recipe, silos, tmp_path / f"state-{known}")
        summary = serve(grid, tmp_path / f"out-{known}").summary
        assert (summary["examples"] > 3, summary["stages"][0]["forward_passes"] > 0) == (bool(known), bool(known))


@pytest.mark.parametrize(
    ("stage", "published"),
    [({"method": "fedncm"}, 2 * 10 * 64 * 3 * 4), ({**LOCAL, "method": "fedavg", "weighting": "uniform"}, None)],
)
def test_costs_under_clients_noise_are_those_of_the_same_run_in_process(
    silos: Path, tmp_path: Path, stage: dict[str, Any], published: int | None
) -> None:
    recipe = recipe_of(silos, {**stage, "privacy": {"epsilon": 50.0, "noise": "client"}})
    here = run(recipe).summary["stages"][0]
    there = serve(Grid(recipe, silos, tmp_path / "state"), tmp_path / "out").summary["stages"][0]
    for name in ("bytes_up", "bytes_down", "forward_passes", "published_bytes", "published_compute"):
        assert there[name] == here[name], name
    assert here["forward_passes"] == here["published_compute"] == 0  # how many examples there are is not to be known
    assert here["published_bytes"] == published or published is None
    assert here["published_bytes"] > 0


def participants(out: Path) -> list[tuple[int, str]]:
    with (out / "rounds.csv").open(newline="") as file:
        return [(int(row["round"]), dict(zip("012", NAMES, strict=True)).get(c := row["client"], c))
                for row in csv.DictReader(file) if not row["left_out"]]  # fmt: skip


DRAWS = {**LOCAL, "method": "fedavg", "clients_per_round": 1, "weighting": "uniform", "privacy": {"epsilon": 5.0}}


def test_whom_a_private_round_draws_is_not_in_the_recipe(silos: Path, tmp_path: Path) -> None:
    """Sampling amplifies privacy only towards those who do not know who was drawn; the recipe is public."""
    recipe = recipe_of(silos, {**DRAWS, "rounds": 13})
    run(recipe, tmp_path / "here")
    serve(Grid(recipe, silos, tmp_path / "state"), tmp_path / "there")
    here, there = participants(tmp_path / "here"), participants(tmp_path / "there")
    assert [round for round, _ in here] == [round for round, _ in there] == list(range(1, 14))
    assert here != there  # once in 3¹³ runs by chance


def test_who_is_absent_from_a_private_round_is_missing(silos: Path, tmp_path: Path) -> None:
    """The rate of the account is asked / all: with two of three there, nobody is drawn more often for that."""
    recipe = recipe_of(silos, {**DRAWS, "rounds": 8, "evaluate_every": 1})
    grid, secrets = Grid(recipe, silos, tmp_path / "state"), []
    del grid.online[12]

    def look(line: dict[str, Any]) -> None:
        secrets.append(secret(tmp_path / "out" / "checkpoint" / "noise.secret"))

    serve(grid, tmp_path / "out", on_metrics=look, expected=2)
    federation = Federation.of(recipe)

    def drawn(key: Seed, there: list[bool]) -> list[tuple[int, str]]:
        found = [draw(recipe.stages[0], federation, key, number, np.array(there)) for number in range(8)]
        return [(number + 1, NAMES[client]) for number, clients in enumerate(found) for client in clients]

    everybody = drawn(Secret(secrets[0], (0, 0)), [True] * 3)
    assert participants(tmp_path / "out") == [each for each in everybody if each[1] != "c"]
    assert drawn((0, 0), [True, True, False]) == [each for each in drawn((0, 0), [True] * 3) if each[1] != "c"]
    assert "c" in {name for _, name in drawn((0, 0), [True] * 3)}
    assert drawn((0, 0), [False] * 3) == []


@pytest.mark.parametrize("stage", [{"method": "fedncm"}, {**LOCAL, "method": "fedavg", "weighting": "uniform"}])
def test_the_servers_noise_is_not_in_the_recipe_either(silos: Path, tmp_path: Path, stage: dict[str, Any]) -> None:
    recipe = recipe_of(silos, {**stage, "privacy": {"epsilon": 50.0}})
    heads = [run(recipe).head.weight]
    for number in range(2):
        grid = Grid(recipe, silos, tmp_path / f"state-{number}")
        heads.append(serve(grid, tmp_path / f"out-{number}").head.weight)
        assert not list(tmp_path.rglob("noise.secret"))  # it is of no use when the run is complete
    for one, other in ((0, 1), (0, 2), (1, 2)):
        assert not np.isclose(heads[one], heads[other], rtol=1e-4).all(axis=1).any()


def test_accuracy_is_not_known_where_nobody_may_test(
    silos: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    privacy = {"epsilon": 50.0, "noise": "client"}
    recipe = recipe_of(silos, {"method": "fedncm", "privacy": privacy})
    grid = Grid(recipe, silos, tmp_path / "state")
    summary = serve(grid, tmp_path / "out").summary
    assert summary["accuracy"] is None
    assert json.loads((tmp_path / "out" / "metrics.jsonl").read_text())["accuracy"] is None
    assert "evaluate" not in {kind for _, kind, _ in grid.said}
    assert "nodes test no models under privacy without test_epsilon, and the server was given no test" in caplog.text
    page = (tmp_path / "out" / "report.html").read_text()
    assert ">not tested<" in page
    assert f"<p>data of {len(grid.names)} nodes, through features: {summary['examples']:,} training examples" in page
    assert [list(column.cells) for column in summary_table(summary).columns][1] == ["not tested"]
    known = serve(Grid(recipe, silos, tmp_path / "again"), tmp_path / "tested", test=str(silos / "all.npz"))
    assert known.summary["accuracy"] > 0.2
    for noise in ("client", "server"):
        recipe = recipe_of(silos, {"method": "fedncm", "privacy": {**privacy, "noise": noise, "test_epsilon": 50.0}})
        grid = Grid(recipe, silos, tmp_path / noise)
        found = serve(grid, tmp_path / f"noisy-{noise}").summary
        assert abs(found["accuracy"] - known.summary["accuracy"]) < 0.2
        assert found["stages"][0]["test_privacy"]["epsilon"] == 50.0
        assert found["privacy"]["example"]["epsilon"] == pytest.approx(50.0)
        assert "tests on nodes, of any one example: ε = 50" in (tmp_path / f"noisy-{noise}" / "report.html").read_text()
        assert all(np.isnan(value) or value is None for value in [found["stages"][0]["local_accuracy_mean"] or np.nan])


def test_a_node_that_lost_its_log_in_a_secure_stage_is_told_everything_again(silos: Path, tmp_path: Path) -> None:
    recipe = recipe_of(silos, {**LOCAL, "method": "fedmezo", "secure": True, "rounds": 4})
    grid = Grid(recipe, silos, tmp_path / "state", names=FOUR)

    def lose(node: int, number: int, message: Message) -> None:
        facts, parts = facts_of(message)
        if facts["kind"] == "secure" and grid.online[node] == "b":
            told = Wire.from_bytes(parts["exchange"]).scalars["step"]
            steps.append(str(told))
            if steps.count("keys") == 3 and told == "keys":
                next(grid.folder("b").glob("*/log-*")).unlink()

    steps: list[str] = []
    grid.change = lose
    assert [drop[:2] for drop in dropped(serve(grid, tmp_path / "out"))] == [(3, "b")]


def test_a_node_says_the_digest_of_the_weights_that_it_would_use(tmp_path: Path) -> None:
    def told(folder: str, stem: float | None) -> dict[str, Any]:
        torch.manual_seed(0)
        weights = {name: value.contiguous() for name, value in FourConv().state_dict().items()}
        if stem is not None:
            next(iter(weights.values())).view(-1)[0] = stem
        path = tmp_path / folder / "weights.safetensors"
        path.parent.mkdir()
        save_file(weights, path)
        data = {"dataset": "mnist-mini", "classes": list(range(10)), "train_examples": 10, "test_examples": 5}
        model = {"backbone": "conv4", "weights": str(path)}
        recipe = Recipe.parse({"data": data, "model": model, "stages": [{"method": "fedncm"}]})
        silo = Federation.silo(recipe, "mnist-mini", folder)
        return Node(recipe, silo, tmp_path / folder / "node", deployed=True).node_info()

    one, same, other = told("a", None), told("b", None), told("c", 0.5)
    assert re.fullmatch("[0-9a-f]{32}", one["weights"])
    assert one["weights"] == same["weights"] != other["weights"]


@pytest.mark.parametrize("secure", [False, True])
def test_a_deployment_that_needs_all_nodes_goes_on_where_one_has_lost_its_state(
    silos: Path, tmp_path: Path, secure: bool
) -> None:
    """Its disk was replaced. By its checkpoint the server counts on that state, in every attempt to go on."""
    stage = {**MLP, "method": "fedper", "rounds": 3, "evaluate_every": 1, "min_replies": 3, "secure": secure}
    recipe = recipe_of(silos, stage)
    with pytest.raises(InterruptedRunError):
        serve(Grid(recipe, silos, tmp_path / "state"), tmp_path / "out", on_metrics=interrupt(2))
    grid = Grid(recipe, silos, tmp_path / "state")
    shutil.rmtree(grid.folder("b"))
    assert dropped(serve(grid, tmp_path / "out", True)) == []


@pytest.mark.parametrize("facts", ['{"state_lost": true}', '{"error": Infinity}', '{"passes": NaN, "kept": false}'])
def test_a_reply_of_nonsense_excludes_its_node_alone(silos: Path, tmp_path: Path, facts: str) -> None:
    def change(node: int, number: int, message: Message) -> Message | None:
        if node != 11 or number <= len(NAMES):
            return None
        return Message(RecordDict({RECORD: ConfigRecord({"facts": facts})}), reply_to=message)

    grid = Grid(recipe_of(silos, {**LOCAL, "method": "fedavg", "rounds": 1}), silos, tmp_path / "state", change)
    assert [drop[:2] for drop in dropped(serve(grid, tmp_path / "out"))] == [(1, "b")]


def test_keys_of_noise_are_numbered_by_numbers() -> None:
    with pytest.raises(MessageError, match="the keys of its noise are none"):
        noise_keys({"noise": [[float("inf"), "00"]]}, 3)
