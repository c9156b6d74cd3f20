"""The ledger of a node, and the limits that its owner sets."""

import csv
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("flwr")

from flwr.supercore.task_identity import TaskIdentity
from scipy.stats import norm
from sklearn.metrics import balanced_accuracy_score, f1_score

from headstart.channel.accounting import doubled, noise_multiplier
from headstart.config.node import NodeLimits
from headstart.core.message import Message as Wire
from headstart.data import Federation
from headstart.engine.flower_messages import facts_of, recipe_digest
from headstart.engine.node_ledger import NodeLedger
from headstart.engine.respond import respond, run_of
from headstart.errors import HeadstartError
from tests.channel.test_attacks import NCM, SGD, Silo, head, model, statistics
from tests.engine.test_node import FOUR, LOCAL, NAMES, Grid, recipe_of, serve, silos

__all__ = ["silos"]  # a fixture

METRICS = ("accuracy", "loss", "macro_f1", "balanced_accuracy", "calibration_error")


@pytest.fixture(autouse=True)
def _identity(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_task_id", "_run_id", "_node_id"):
        monkeypatch.setattr(TaskIdentity, name, 1)


def ask(silo: Silo, limits: dict[str, Any], kind: str, message: Wire, **facts: Any) -> tuple[dict[str, Any], Wire]:
    """As `Silo.ask`, of a node with limits."""
    question = silo.message(kind, message, **facts)
    node = silo.node(run_of(question), NodeLimits.model_validate(limits))
    said, parts = facts_of(respond(question, node, "a"))
    return said, Wire.from_bytes(parts["message"]) if "message" in parts else Wire()


def ledger_of(silo: Silo) -> NodeLedger:
    return NodeLedger(silo.folder / "state")


# ----------------------------------------------------------------------------------------------------------- the ledger


def test_all_that_leaves_is_in_the_ledger_with_its_bytes(tmp_path: Path) -> None:
    silo = Silo(tmp_path / "a", SGD)
    silo.ask("join", Wire())
    _, said = silo.ask("answer", model())
    _, tested = silo.ask("evaluate", head(0), done=1)
    _, again = silo.ask("answer", model())
    entries = ledger_of(silo).entries()
    assert [entry["kind"] for entry in entries] == ["join", "answer", "test", "answer"]
    assert entries[0]["examples"] == 30
    left = [len(message.to_bytes()) for message in (said, tested, again)]
    assert [entry["bytes"] for entry in entries if "bytes" in entry] == left
    assert entries[1]["question"] == entries[3]["question"]
    assert entries[1]["answer"] == entries[3]["answer"]
    assert {entry["recipe"] for entry in entries} == {recipe_digest(silo.recipe)}
    assert (silo.folder / "state" / "ledger.jsonl").stat().st_mode & 0o077 == 0


def test_nothing_leaves_that_is_not_in_the_ledger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    silo = Silo(tmp_path / "a", SGD)

    def full(*args: Any, **kwargs: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("headstart.core.chain.append_text", full)
    for kind, message in (("join", Wire()), ("answer", model()), ("evaluate", head(0))):
        facts, parts = silo.ask(kind, message)
        assert facts == {"error": "the node failed: OSError: [Errno 28] No space left on device"}
        assert not parts.arrays


def test_a_human_reads_the_ledger(tmp_path: Path) -> None:
    from typer.testing import CliRunner

    from headstart.cli import app

    silo = Silo(tmp_path / "a", NCM)
    silo.ask("join", Wire())
    _, said = silo.ask("answer", statistics())
    shown = CliRunner().invoke(app, ["node", "ledger", str(silo.folder / "state")])
    assert shown.exit_code == 0, shown.output
    assert "0: fedncm" in shown.output
    cells = [[cell.strip() for cell in line.split("│")] for line in shown.output.splitlines()]
    assert {row[5] for row in cells if "0: fedncm" in row[4:5]} == {"1"}  # 0 in the file
    assert f"2 entries, {len(said.to_bytes()):,} bytes; the chain is whole" in shown.output
    assert "example" in shown.output
    missing = CliRunner().invoke(app, ["node", "ledger", str(tmp_path)])
    assert isinstance(missing.exception, HeadstartError)


# ----------------------------------------------------------------------------------------------------------- the limits


def test_a_nodes_owner_says_which_methods_and_recipes_may_run(tmp_path: Path) -> None:
    silo = Silo(tmp_path / "a", SGD)
    mine = recipe_digest(silo.recipe)[:16]
    assert "error" not in ask(silo, {"methods": ["fedavg"], "recipes": [mine]}, "answer", model())[0]
    for limits, why in (
        ({"methods": ["fedncm", "fed3r"]}, "node.toml: limits.methods does not allow fedavg"),
        ({"recipes": ["0" * 16]}, f"node.toml: limits.recipes does not name the recipe {mine}"),
        ({"recipes": [mine[:3]]}, f"node.toml: limits.recipes does not name the recipe {mine}"),
    ):
        for kind, message in (("join", Wire()), ("answer", model()), ("evaluate", head(0))):
            facts, parts = ask(silo, limits, kind, message)
            assert facts == {"error": why}
            assert not parts.arrays


def test_a_nodes_owner_may_keep_figures_of_tests(tmp_path: Path) -> None:
    silo = Silo(tmp_path / "a", SGD)
    facts, _ = ask(silo, {"evaluation": False}, "evaluate", head(0))
    assert facts == {"error": "node.toml: limits.evaluation is false; this node tests no models"}


@pytest.mark.parametrize("method", ["fedncm", "fed3r", "fedcof"])
def test_a_class_with_one_example_does_not_leave(tmp_path: Path, method: str) -> None:
    """The attack: the sum of such a class is its one example, bit for bit."""
    silo = Silo(tmp_path / "a", {"method": method})
    labels = np.where(silo.y == 1, 0, silo.y)
    labels[3] = 1
    split = np.repeat([0, 2], [len(labels), 9])
    x, y = np.concatenate([silo.x, silo.x[:9]]), np.concatenate([labels, labels[:9]])
    np.savez(silo.folder / "data.npz", X=x, y=y, split=split)
    _, exact = ask(silo, {"min_examples": 1}, "answer", statistics(), run="1" * 32)
    row = exact.arrays["labels"].tolist().index(1)
    if method != "fed3r":  # which sums features with a column of ones
        np.testing.assert_array_equal(exact.arrays["sums"][row], silo.x[3])
    _, said = silo.ask("answer", statistics())
    assert said.arrays["labels"].tolist() == [0, 2]
    if "moments" in said.arrays:
        rest = np.delete(silo.x, 3, axis=0).astype(np.float64)
        triangle = (rest.T @ rest)[np.triu_indices(rest.shape[1])]
        got = said.arrays["moments"]
        assert np.isclose(got[:, None], triangle[None, :], rtol=1e-12).any(axis=0).all()
    _, fewer = ask(silo, {"min_examples": 8}, "answer", statistics(), run="2" * 32)
    assert fewer.arrays["labels"].tolist() == [0]


def epsilons(silo: Silo, limits: dict[str, Any], message: Wire, **facts: Any) -> str:
    return str(ask(silo, limits, "answer", message, **facts)[0].get("error", ""))


def test_answers_end_where_the_owners_epsilon_does(tmp_path: Path) -> None:
    private = {**SGD, "privacy": {"epsilon": 2.0, "clip": 1.0, "noise": "client"}}
    silo = Silo(tmp_path / "a", NCM, private)  # 1 for an example, then 2 for a client
    second = {"setup": silo.setup(1), "states": [[1, -1, {}]]}
    limits = {"epsilon": {"example": 2.0}}
    assert epsilons(silo, limits, statistics()) == ""
    why = epsilons(silo, limits, model(round=2), **second)
    assert why == "node.toml: limits.epsilon.example is 2; with fedavg the node would have spent 3"
    assert epsilons(silo, {"epsilon": {"example": 3.0}}, model(round=2), **second) == ""
    assert (
        epsilons(silo, {"epsilon": {"example": 3.0}}, model(round=2), **second) == ""
    )  # the same answer costs nothing
    assert "limits.epsilon.client is 9; with fedncm the node would have spent inf" in epsilons(
        Silo(tmp_path / "b", NCM), {"epsilon": {"client": 9.0}}, statistics()
    )


def test_an_example_costs_more_than_its_client_where_updates_come_and_go(tmp_path: Path) -> None:
    """An example that is replaced moves the sum by twice the clip, which the noise for a client was not made for: the
    attack tells two such data sets apart better than ε = 2 allows."""
    private = {**SGD, "rounds": 1, "privacy": {"epsilon": 2.0, "clip": 1.0, "noise": "server"}}
    multiplier = noise_multiplier(2.0, 1e-5)
    cut, delta = np.linspace(-20, 20, 40_001) * multiplier, 1e-5  # of the likelihood ratio of N(0, m²) and N(2, m²)
    told = norm.sf(cut, 2, multiplier) - delta > np.exp(2.0) * norm.sf(cut, 0, multiplier)
    assert told.any()
    for unit, most, spent in (("client", 2.0, ""), ("example", 2.0, "4.39"), ("example", 4.4, "")):
        silo = Silo(tmp_path / f"{unit}-{most}", private)
        why = epsilons(silo, {"trust_server": True, "epsilon": {unit: most}}, model())
        assert why.rpartition(" would have spent ")[2] == spent
    for epsilon in (0.5, 2.0, 8.0):  # no cut is good enough for what is promised
        promised = doubled(epsilon, delta)
        multiplier = noise_multiplier(epsilon, delta)
        excess = norm.sf(cut, 2, multiplier) - np.exp(promised) * norm.sf(cut, 0, multiplier)
        assert excess.max() == pytest.approx(delta, rel=1e-3)


def test_an_epsilon_is_nothing_without_its_delta(tmp_path: Path) -> None:
    """The attack: a recipe with δ = 0.99 promises a small ε, and gives the data away."""
    loose = {**NCM, "privacy": {**NCM["privacy"], "epsilon": 0.01, "delta": 0.99}}
    why = epsilons(Silo(tmp_path / "a", loose), {"epsilon": {"example": 1.0}}, statistics())
    assert why == "node.toml: limits.delta is 0.0001; with fedncm the δ of all promises would be 0.99"
    assert epsilons(Silo(tmp_path / "b", loose), {}, statistics()) == ""  # without a limit on ε, nothing is counted
    several = Silo(tmp_path / "c", *3 * [{**NCM, "privacy": {**NCM["privacy"], "delta": 4e-5}}])
    limits = {"epsilon": {"example": 9.0}, "delta": 1e-4}
    asked = [{"setup": several.setup(number), "states": [[number, -1, {}]]} for number in range(3)]
    said = [epsilons(several, limits, statistics(), **facts) for facts in asked]
    assert said[:2] == ["", ""]
    assert "the δ of all promises would be 0.00012" in said[2]


@pytest.mark.parametrize(
    "stage", [{"method": "fedncm"}, {**NCM, "privacy": {**NCM["privacy"], "noise": "server"}}], ids=["none", "server"]
)
def test_a_limit_refuses_what_promises_nothing_or_the_servers_word(tmp_path: Path, stage: dict[str, Any]) -> None:
    silo = Silo(tmp_path / "a", stage)
    limits = {"epsilon": {"example": 5.0}}
    assert "would have spent inf" in epsilons(silo, limits, statistics())
    trusted = epsilons(silo, {**limits, "trust_server": True}, statistics())
    assert ("inf" in trusted) == (stage == {"method": "fedncm"})


def test_noise_of_the_server_is_spent_in_every_run_anew(tmp_path: Path) -> None:
    silo = Silo(tmp_path / "a", {**NCM, "privacy": {**NCM["privacy"], "noise": "server"}})
    limits = {"epsilon": {"example": 2.0}, "trust_server": True}
    said = [epsilons(silo, limits, statistics(), run=digit * 32) for digit in "012"]
    assert said[:2] == ["", ""]
    assert "would have spent 3" in said[2]


def test_mistakes_in_node_toml_are_told_at_once(tmp_path: Path) -> None:
    path = tmp_path / "node.toml"
    path.write_text('[limits]\nmin_examples = 0\nmethod = "fedncm"\n[limits.epsilon]\nexample = -1\n')
    with pytest.raises(HeadstartError) as caught:
        NodeLimits.load(path)
    for part in ("limits.min_examples", "limits.method:", "limits.epsilon.example", "accepted: methods, recipes"):
        assert part in str(caught.value)
    path.write_text("[limits]\nmin_examples = 3\n")
    assert NodeLimits.load(path).min_examples == 3
    path.write_text("no toml")
    with pytest.raises(HeadstartError, match=r"node\.toml"):
        NodeLimits.load(path)


# ---------------------------------------------------------------------------------------------------------- secure sums


def grid_of(silos: Path, state: Path, stage: dict[str, Any], names: tuple[str, ...] = FOUR, **keys: Any) -> Grid:
    recipe = recipe_of(silos, stage)
    return Grid(recipe.model_copy(update=keys), silos, state, names=names)


@pytest.mark.parametrize(
    ("names", "steps"), [(NAMES, ["keys", "masked"]), (FOUR, ["keys", "shares", "masked", "reveal"])], ids=len
)
def test_a_secure_run_is_audited_from_a_nodes_ledger(
    silos: Path, tmp_path: Path, names: tuple[str, ...], steps: list[str]
) -> None:
    """Everything that left one node, with the bytes of the server's own account."""
    stage = {**LOCAL, "method": "fedavg", "secure": True, "rounds": 2, "evaluate_every": 1}
    grid = grid_of(silos, tmp_path / "state", stage, names)
    summary = serve(grid, tmp_path / "out").summary
    entries = NodeLedger(grid.folder("a")).entries()
    assert [entry["kind"] for entry in entries] == ["join", *4 * steps]
    assert [entry["of"] for entry in entries[1 :: len(steps)]] == ["answer", "test", "answer", "test"]
    with (tmp_path / "out" / "clients.csv").open(newline="") as file:
        (mine,) = [row for row in csv.DictReader(file) if row["client"] == "a"]
    left = sum(entry["bytes"] for entry in entries if entry.get("of") == "answer")
    assert left == int(mine["bytes_up"])
    assert all("privacy" in entry for entry in entries if entry["kind"] == "masked")
    assert [len(entry["participants"]) for entry in entries if "participants" in entry] == 4 * [len(names)]
    assert all(("participants" in entry) == (entry["kind"] == steps[-1]) for entry in entries)
    assert 0.2 < summary["accuracy"] <= 1


def test_figures_of_a_secure_test_are_those_of_an_open_one(silos: Path, tmp_path: Path) -> None:
    stage = {**LOCAL, "method": "fedavg", "weighting": "uniform", "rounds": 1}
    found = []
    for secure in (False, True):
        grid = grid_of(silos, tmp_path / str(secure), {**stage, "secure": secure})
        result = serve(grid, tmp_path / f"out-{secure}")
        (line,) = result.summary["stages"]
        found.append([line[name] for name in METRICS])
        entries = [entry for name in FOUR for entry in NodeLedger(grid.folder(name)).entries()]
        told = [entry["bytes"] for entry in entries if "test" in (entry["kind"], entry.get("of"))]
        assert line["test_bytes_up"] == sum(told) > 0
        tests = [Federation.silo(grid.recipe, str(silos / f"{name}.npz"), name).dataset.test for name in FOUR]
        labels = np.concatenate([test.labels for test in tests])
        answers = result.head.scores(np.concatenate([test.features() for test in tests])).argmax(axis=1)
        assert line["macro_f1"] == pytest.approx(f1_score(labels, answers, average="macro"), rel=1e-5)
        assert line["balanced_accuracy"] == pytest.approx(balanced_accuracy_score(labels, answers), rel=1e-5)
        assert (result.summary["stages"][0]["local_accuracy_mean"] is None) == secure
    assert found[1] == pytest.approx(found[0], rel=1e-5)


def test_the_same_statistics_are_not_added_up_with_other_participants(silos: Path, tmp_path: Path) -> None:
    """The attack: totals of four nodes and of three differ by one hospital's counts and sums, exactly."""
    stage = {"method": "fedncm", "secure": True}
    serve(grid_of(silos, tmp_path / "state", stage), tmp_path / "four")
    again = serve(grid_of(silos, tmp_path / "state", stage), tmp_path / "again")  # the same nodes get the same total
    assert again.summary["stages"][0]["dropped"] == []
    fewer = grid_of(silos, tmp_path / "state", stage, FOUR)
    fewer.online.popitem()
    with pytest.raises(HeadstartError, match="a new run needs another recipe, to which nodes agree"):
        serve(fewer, tmp_path / "three", expected=3)
    # Recipes that the nodes agree to anew: whatever is asked, the class sums of three nodes would be in it.
    same = {"model": fewer.recipe.model.model_copy(update={"samples": 3})}
    for number, (again, keys) in enumerate([(stage, {"seed": 7}), (stage, same), ({**stage, "method": "fed3r"}, {})]):
        other = grid_of(silos, tmp_path / "state", again, FOUR, **keys)
        other.online.popitem()
        with pytest.raises(HeadstartError, match="with other participants"):
            serve(other, tmp_path / f"other-{number}", expected=3)
    for name in FOUR[:3]:
        entries = NodeLedger(other.folder(name)).entries()
        assert len([entry for entry in entries if entry["kind"] == "reveal" and entry["of"] == "answer"]) == 2


def test_a_nodes_owner_may_allow_other_participants(silos: Path, tmp_path: Path) -> None:
    stage = {"method": "fedncm", "secure": True}
    serve(grid_of(silos, tmp_path / "state", stage), tmp_path / "four")
    other = grid_of(silos, tmp_path / "state", stage, FOUR, seed=7)
    other.limits = NodeLimits(other_participants=True)
    other.online.popitem()
    assert serve(other, tmp_path / "other", expected=3).summary["stages"][0]["dropped"] == []
