"""Attacks by requests that fail with some examples and not with others, and by asking again: each learns nothing."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("flwr")

from flwr.supercore.task_identity import TaskIdentity

from headstart.channel.figures import FiguresChannel
from headstart.core.message import Message as Wire
from headstart.core.metrics import tally_classes
from headstart.core.seeds import Secret, extended, hiding
from headstart.deploy import apps
from headstart.engine.flower_messages import facts_of
from headstart.engine.node_errors import UntoldError
from headstart.engine.node_ledger import NodeLedger
from headstart.engine.setup import StageSetup
from tests.channel.test_attacks import CLASSES, DIM, HIDDEN, NCM, SGD, Silo, begun, model, statistics
from tests.engine.test_node import FOUR, LOCAL, Grid, InterruptedRunError, interrupt, recipe_of, serve, silos

__all__ = ["silos"]  # a fixture

UNTOLD = {"error": str(UntoldError())}
CENTRES: dict[str, Any] = {"method": "fedncm", "centres": 2, "iterations": 1}


@pytest.fixture(autouse=True)
def _identity(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_task_id", "_run_id", "_node_id"):
        monkeypatch.setattr(TaskIdentity, name, 1)


def centres(*numbers: int, round: int = 1) -> Wire:
    """A request of k-means; numbers: of the centres."""
    arrays = {"centres": np.zeros((len(numbers), DIM), np.float32), "numbers": np.array(numbers, np.int64)}
    return Wire(arrays, {"round": round})


# --------------------------------------------------------------------------------------------- requests that would fail


def test_a_request_that_fails_uses_up_its_round_and_does_not_say_why(tmp_path: Path) -> None:
    """The attack: 2,000 requests for one round, each of which fails where some class or example is there."""
    silo = Silo(tmp_path / "a", {**SGD, "privacy": HIDDEN})
    short = {name: array[: CLASSES - 1] for name, array in model().arrays.items()}
    assert silo.ask("answer", Wire(short, {"round": 0}))[0] == UNTOLD
    for _ in range(2):  # the same again may have failed for another reason; another one is refused, whatever it is
        assert silo.ask("answer", Wire(short, {"round": 0}))[0] == UNTOLD
        assert "replied to round 0 before" in silo.ask("answer", model())[0]["error"]
    assert "error" not in silo.ask("answer", model(round=1))[0]
    assert [entry["kind"] for entry in NodeLedger(silo.folder / "state").entries()] == [*3 * ["failed"], "answer"]


@pytest.mark.parametrize("extra", [{"privacy": HIDDEN}, {"secure": True}], ids=["privacy", "secure"])
def test_centres_do_not_tell_which_classes_a_node_has(tmp_path: Path, extra: dict[str, Any]) -> None:
    """The attack: the number of a centre beyond the last class, which is an index out of bounds for a class that is
    there, and nothing at all for one that is not."""
    kind = "secure" if "secure" in extra else "answer"
    told = {"told": begun("s", 5, 4)} if kind == "secure" else {}
    said = []
    for number, classes in enumerate(([0, 1, 2], [0, 2])):
        silo = Silo(tmp_path / str(number), {**CENTRES, **extra}, labels=classes)
        beyond = 2 * CLASSES  # the first number that is no centre's
        first = silo.ask(kind, centres(0, beyond), **told)[0]
        second = silo.ask(kind, centres(2, beyond), **told)[0]["error"]
        assert "replied to pass 1 before" in second
        said.append(first)
    assert said == [UNTOLD, UNTOLD]


def test_of_one_round_one_model_is_tested_even_where_the_test_fails(tmp_path: Path) -> None:
    silo = Silo(tmp_path / "a", {**SGD, "privacy": {**HIDDEN, "test_epsilon": 1.0}})
    poisoned = model()
    poisoned.arrays["model.head.weight"][0, 0] = np.nan
    assert silo.ask("evaluate", poisoned, done=0)[0] == UNTOLD
    assert "tested another model after round 0" in silo.ask("evaluate", model(), done=0)[0]["error"]
    assert silo.ask("evaluate", poisoned, done=0)[0] == UNTOLD
    assert "error" not in silo.ask("evaluate", model(), done=1)[0]


def test_what_is_wrong_with_the_data_stays_in_the_nodes_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The attack: a recipe that names another column, and the values of it in the error."""
    silo = Silo(tmp_path / "a", {"method": "fedncm"})
    path = tmp_path / "ward 7" / "patients.csv"
    path.parent.mkdir()
    path.write_text("x0,x1,label,split\n1,2,0,Mary Poppins\n3,4,1,train\n")
    monkeypatch.setattr(apps, "check_guarded", lambda kind: None)
    text, config = silo.recipe.to_toml(), {"name": "a", "data": str(path), "state": str(tmp_path / "state")}
    context: Any = SimpleNamespace(node_config=config, run_config={"recipe": text})
    facts, parts = facts_of(apps.answer(silo.message("join", Wire()), context))
    assert facts == UNTOLD
    assert not parts
    assert "Mary Poppins" in caplog.text


def test_a_protected_stage_is_begun_from_one_setup(tmp_path: Path) -> None:
    """The attack: weights of the backbone, heads and counts of clients at will, and what fails with each."""
    silo = Silo(tmp_path / "a", NCM)
    assert "error" not in silo.ask("answer", statistics())[0]
    other = silo.ask("answer", statistics(), setup=silo.setup(clients=50))[0]["error"]
    assert other.startswith("the node has begun this stage from another setup")
    again = silo.ask("answer", statistics(), setup=silo.setup(clients=50), run="1" * 32)[0]["error"]
    assert again == other
    plain = Silo(tmp_path / "b", {"method": "fedncm"})
    for digit, clients in (("0", 5), ("1", 50)):
        setup = plain.setup(clients=clients)
        assert "error" not in plain.ask("answer", statistics(), setup=setup, run=digit * 32)[0]


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"tasks": (("default", CLASSES + 1, 5, 100),)}, "the setup is of 4 classes, and the data have 3"),
        ({"tasks": (("default", CLASSES - 1, 5, 100),)}, "the setup is of 2 classes, and the data have 3"),
        ({"heads": ({"weight": (2, DIM), "bias": (2,)},)}, "the setup's head of default is none of 3 classes"),
        ({"heads": ({"weight": (3, DIM), "bias": (6,)},)}, "the setup's head of default is none of 3 classes"),
        ({"arrays": {"body.conv.weight": np.zeros(3, np.float32)}}, "no earlier stage makes it"),
        ({"arrays": {"module.lora_A": np.zeros(3, np.float32)}}, "no earlier stage makes it"),
        ({"arrays": {"head.weight": np.zeros((3, DIM), np.float32)}}, "no earlier stage makes it"),
    ],
)
def test_a_setup_that_no_server_sends_is_refused(tmp_path: Path, changed: dict[str, Any], why: str) -> None:
    silo = Silo(tmp_path / "a", NCM)
    given = {"tasks": (("default", CLASSES, 5, 100),), "heads": (None,), "temperatures": (1.0,)} | changed
    setup = StageSetup(0, 0, **given).to_message().to_bytes()
    assert why in silo.ask("answer", statistics(), setup=setup)[0]["error"]
    assert "error" not in silo.ask("answer", statistics())[0]  # it began nothing


def test_a_head_that_starts_from_no_numbers_is_refused(tmp_path: Path) -> None:
    silo = Silo(tmp_path / "a", {"method": "fedncm"}, {**SGD, "privacy": HIDDEN})
    shapes = {"weight": (CLASSES, DIM), "bias": (CLASSES,)}
    masked = np.array([0, -np.inf, 0], np.float32)  # of a class that nobody has
    for bias, error in ((masked, None), (-masked, "holds NaN or infinity")):
        arrays = {"head.weight": np.zeros(shapes["weight"], np.float32), "head.bias": bias}
        setup = StageSetup(1, 0, (("default", CLASSES, 5, 100),), (shapes,), temperatures=(1.0,), arrays=arrays)
        facts, _ = silo.ask("answer", model(), setup=setup.to_message().to_bytes(), states=[[1, -1, {}]])
        assert (error or "replied to round 0") in facts.get("error", "replied to round 0")


# --------------------------------------------------------------------------------------------------------- asking again


def test_k_means_is_answered_once_in_every_pass(tmp_path: Path) -> None:
    """The attack: one client a round, so that a stage has many rounds, each with fresh noise on the same sums."""
    silo = Silo(tmp_path / "a", {**CENTRES, "clients_per_round": 1, "privacy": HIDDEN})
    passes, clients = 3, 5
    said = [silo.ask("answer", statistics(round))[0] for round in range(passes * clients)]
    assert [round for round, facts in enumerate(said) if "error" not in facts] == [0, 5, 10]
    many = silo.ask("answer", statistics(4000), setup=silo.setup(clients=10_000))[0]
    assert "begun this stage from another setup" in many["error"]
    for turn in range(3):
        assert f"replied to pass {turn} before" in said[5 * turn + 1]["error"]


def test_centres_leave_a_node_only_where_something_hides_them(tmp_path: Path) -> None:
    """The attack: the sum of a class, less that of all its centres but one of a single example, is that example."""
    silo = Silo(tmp_path / "a", CENTRES)
    facts, said = silo.ask("answer", statistics())
    assert facts["error"].startswith("node.toml: limits.min_examples is 2, and sums of fedncm with several centres")
    assert not said.arrays
    for number, extra in enumerate(({"secure": True}, {"privacy": HIDDEN})):
        kind, told = ("secure", {"told": begun("s", 5, 4)}) if "secure" in extra else ("answer", {})
        hidden = Silo(tmp_path / str(number), {**CENTRES, **extra})
        assert "error" not in hidden.ask(kind, statistics(), **told)[0]


# ----------------------------------------------------------------------------------------------- the server's own noise


def test_the_noise_of_a_secret_hides_one_total_only() -> None:
    total, other = [np.arange(3.0)], [np.array([0.0, 1.0, 2.5])]
    seed = extended(Secret(bytes(32)), 7, 1)
    drawn = [hiding(seed, values).generator(5).standard_normal(4) for values in (total, total, other)]  # type: ignore[union-attr]
    np.testing.assert_array_equal(drawn[0], drawn[1])
    assert (drawn[0] != drawn[2]).all()
    assert hiding((1, 2), total) == (1, 2)  # a simulation draws the same numbers whatever they hide
    assert hiding(None, total) is None


@pytest.mark.parametrize("method", ["fedavg", "fedncm"])
def test_a_round_whose_model_was_seen_is_not_played_again(silos: Path, tmp_path: Path, method: str) -> None:
    """The attack: the server stops after its nodes have tested a model, and goes on without one of them. The same noise
    on the total of the others would show what that one had sent."""
    privacy = {"epsilon": 50.0, "clip": 50.0, "noise": "server", "test_epsilon": 50.0}
    stage: dict[str, Any] = {"method": method, "privacy": privacy, "evaluate_every": 1, "min_replies": 3}
    if method == "fedavg":
        stage |= {**LOCAL, "rounds": 2, "weighting": "uniform", "evaluate_every": 1, "min_replies": 3}
    recipe = recipe_of(silos, stage)
    serve(Grid(recipe, silos, tmp_path / "state", names=FOUR), tmp_path / "whole")
    grid = Grid(recipe, silos, tmp_path / "other", names=FOUR)
    with pytest.raises(InterruptedRunError):
        serve(grid, tmp_path / "out", on_metrics=interrupt(1))
    answered = [name for name, kind, _ in grid.said if kind == "answer"]
    assert answered == list(FOUR)
    tested = Wire.from_bytes(next(grid.folder("a").glob("tested-*")).read_bytes())
    grid.said.clear()
    del grid.online[13]
    result = serve(grid, tmp_path / "out", True, expected=3)
    again = [name for name, kind, _ in grid.said if kind == "answer"]
    assert again == ([*"abc"] if method == "fedavg" else [])  # of the second round
    (stage_done,) = result.summary["stages"]
    assert stage_done["dropped"] == []
    assert len((tmp_path / "out" / "metrics.jsonl").read_text().splitlines()) == stage_done["rounds"]
    tests = [kind for name, kind, _ in grid.said if kind == "evaluate" and name == "a"]
    assert len(tests) == stage_done["rounds"]
    assert stage_done["loss"] is not None  # nodes were asked about the round that it was, and not about the first
    if method == "fedncm":  # the same model was tested again, and so the same figures came
        same = Wire.from_bytes(next(grid.folder("a").glob("tested-*")).read_bytes())
        assert same.to_bytes() == tested.to_bytes()


def test_every_stage_has_test_noise_of_its_own(
    silos: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The attack: two stages that test the same model, whose figures would differ by nothing."""
    seeds = []
    finish = FiguresChannel.finish

    def seen(self: FiguresChannel, *given: Any) -> Any:
        seeds.append(self.seed)
        return finish(self, *given)

    monkeypatch.setattr(FiguresChannel, "finish", seen)
    privacy = {"epsilon": 50.0, "clip": 50.0, "noise": "server", "test_epsilon": 50.0}
    recipe = recipe_of(silos, *2 * [{"method": "fedncm", "privacy": privacy}])
    serve(Grid(recipe, silos, tmp_path / "state"), tmp_path / "out")
    assert len(seeds) == 2
    assert len({seed.key for seed in seeds}) == 1
    assert len({seed.purpose for seed in seeds}) == 2


def test_nothing_of_a_test_counts_for_more_than_its_bound(tmp_path: Path) -> None:
    """The attack: a model whose losses are no numbers, or below zero, for some examples: the noise adds to NaN."""
    silo = Silo(tmp_path / "a", {**NCM, "privacy": {**HIDDEN, "noise": "server", "test_epsilon": 1.0}})
    channel = FiguresChannel.of(silo.recipe.stages[0], 5, None, CLASSES)
    losses = np.array([np.nan, np.inf, -np.inf, -7.0, 0.5, 12.0])
    tally = tally_classes(np.zeros((6, CLASSES)), np.zeros(6, np.int64))
    figures = channel.encode(6, 3, losses, tally).arrays["figures"]
    np.testing.assert_allclose(figures, [6, 3, 6, 1 + 1 + 1 + 0 + 0.05 + 1])
