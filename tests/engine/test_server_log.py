"""The server's log: what it says of a run is what the nodes' ledgers say."""

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr")

from flwr.app import Message
from flwr.supercore.task_identity import TaskIdentity
from typer.testing import CliRunner

from headstart.cli import app
from headstart.engine.node_ledger import NodeLedger
from headstart.engine.respond import refuse
from headstart.engine.server_log import ServerLog
from headstart.errors import HeadstartError
from tests.engine.test_node import FOUR, LOCAL, Grid, recipe_of, serve, silos

__all__ = ["silos"]  # a fixture

SAME = ("run", "recipe", "kind", "stage", "round", "of", "answer", "bytes", "examples", "dim")


@pytest.fixture(autouse=True)
def _identity(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_task_id", "_run_id", "_node_id"):
        monkeypatch.setattr(TaskIdentity, name, 1)


def said(entries: list[dict[str, Any]], names: tuple[str, ...] = SAME) -> list[dict[str, Any]]:
    return [{name: entry[name] for name in names if name in entry} for entry in entries]


@pytest.mark.parametrize("secure", [False, True], ids=["plain", "secure"])
def test_the_log_has_the_bytes_and_digests_of_the_nodes_ledgers(silos: Path, tmp_path: Path, secure: bool) -> None:
    stages = ({"method": "fedncm", "secure": secure}, {**LOCAL, "method": "fedavg", "rounds": 2, "secure": secure})
    grid = Grid(recipe_of(silos, *stages), silos, tmp_path / "state", names=FOUR)
    log = ServerLog(tmp_path / "server" / "log.jsonl")
    serve(grid, tmp_path / "out", audit=log)
    entries = log.entries()
    assert {entry["event"] for entry in entries} == {"asked", "replied"}
    for name in FOUR:
        ledger = NodeLedger(grid.folder(name)).entries()
        mine = [entry for entry in entries if entry["node"] == name]
        replied = [entry for entry in mine if entry["event"] == "replied"]
        asked = [entry for entry in mine if entry["event"] == "asked"]
        assert said(replied) == said(ledger)
        assert said(asked, SAME[:6]) == said(ledger, SAME[:6])
        # Three rounds of two stages, and a test after each stage; of a sum, the first exchange has the question.
        first = [number for number, entry in enumerate(ledger) if entry["kind"] in ("answer", "test", "keys")]
        assert len(first) == 5
        assert [asked[number]["question"] for number in first] == [ledger[number]["question"] for number in first]
        assert all(entry["bytes"] > 0 for entry in asked if entry["kind"] != "join")


def test_refusals_and_absences_are_in_the_log(silos: Path, tmp_path: Path) -> None:
    def change(node: int, number: int, message: Message) -> Message | None:
        if node == 11 and number > len(FOUR):
            return refuse(message, HeadstartError("/home/ward 3/x.csv: no\nsuch [file]"))
        return None

    stage = {**LOCAL, "method": "fedavg", "rounds": 1, "min_replies": 1}
    grid = Grid(recipe_of(silos, stage), silos, tmp_path / "state", change, FOUR)
    log = ServerLog(tmp_path / "state" / "log.jsonl")
    serve(grid, tmp_path / "out", audit=log)
    refused = [entry for entry in log.entries() if entry["event"] == "refused"]
    assert {(entry["node"], entry["kind"], entry["why"]) for entry in refused} == {
        ("b", "answer", "x.csv: no such [file]"),
        ("b", "test", "x.csv: no such [file]"),
    }
    shown = CliRunner().invoke(app, ["deploy", "log", str(tmp_path)])
    assert shown.exit_code == 0, shown.output
    assert "such [file]" in " ".join(shown.output.replace("│", " ").split())
    assert {entry["round"] for entry in log.entries() if "round" in entry} == {0}  # and on the screen from 1
    cells = [[cell.strip() for cell in line.split("│")] for line in shown.output.splitlines() if "│" in line]
    assert {row[7] for row in cells if row[2] in ("replied", "refused")} == {"", "1"}  # nothing for a join
    assert f"the last line has the digest {log.head()}" in shown.output
    changed = log.path.read_text().replace('"refused"', '"replied"', 1)
    log.path.write_text(changed)
    broken = CliRunner().invoke(app, ["deploy", "log", str(tmp_path)])
    assert isinstance(broken.exception, HeadstartError)
    assert "the chain is broken" in str(broken.exception)


def test_a_folder_without_a_log_is_named(tmp_path: Path) -> None:
    missing = CliRunner().invoke(app, ["deploy", "log", str(tmp_path)])
    assert isinstance(missing.exception, HeadstartError)
    assert "there is no log" in str(missing.exception)
