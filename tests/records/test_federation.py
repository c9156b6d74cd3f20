"""What a federation leaves for those who watch, and the rounds of a run as they come."""

from collections import Counter
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from headstart.core.files import csv_text
from headstart.errors import HeadstartError
from headstart.records import FederationState, NodeState, RoundsLog, find, find_federations
from headstart.records.rounds import LISTED, SHOWN, Absence, outcome

HEAD = ["stage", "round", "client", "bytes_up", "bytes_down", "left_out"]
NASTY = '=HYPERLINK("http://x"),\nsecond line, "quoted"'


def test_what_is_written_is_read(tmp_path: Path) -> None:
    nodes = NodeState("a", "2026-01-01T00:00:00+00:00", "", True, "x", "y"), NodeState('<b>"ü', present=False)
    state = FederationState("host", 9443, {"ca": "z"}, nodes, "other run", "failed", "a <reason>", "w")
    state.write(tmp_path)
    assert FederationState.read(tmp_path) == state
    assert [path.name for path in (tmp_path / "state").iterdir()] == ["federation.json"]


@pytest.mark.parametrize("text", ["", "{}", "[]", "{", '{"nodes": [{"nom": "a"}]}', '{"nodes": [], "more": 1}'])
def test_another_file_is_a_sentence(tmp_path: Path, text: str) -> None:
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / "federation.json").write_text(text)
    with pytest.raises(HeadstartError, match="does not tell of a federation"):
        FederationState.read(tmp_path)


@pytest.mark.parametrize(
    ("phase", "seconds", "live"),
    [("running", 5, True), ("waiting", 5, True), ("running", 60, False), ("finished", 5, False), ("", 5, False)],
)
def test_a_server_that_writes_lives(phase: str, seconds: int, live: bool) -> None:
    written = (datetime.now(UTC) - timedelta(seconds=seconds)).isoformat()
    assert FederationState("host", 1, phase=phase, written=written).live is live


def test_federations_are_found_and_their_folder_is_no_run(tmp_path: Path) -> None:
    for name in ("one", "deep/two"):
        folder = tmp_path / name
        (folder / "run" / "checkpoint").mkdir(parents=True)
        for recipe in (folder, folder / "run"):
            (recipe / "recipe.toml").write_text("")
        FederationState("host", 1).write(folder)
    assert find_federations([tmp_path]) == [tmp_path / "deep/two", tmp_path / "one"]
    assert find_federations([tmp_path / "one", tmp_path]) == [tmp_path / "one", tmp_path / "deep/two"]
    assert find([tmp_path / "one"]) == [tmp_path / "one" / "run"]


def test_rounds_are_read_as_they_come_byte_by_byte(tmp_path: Path) -> None:
    rows = [[0, 1, "a", 10, 20, ""], [0, 1, "b", 0, 20, NASTY], [1, 1, "a", 5, 6, "late: it took 9 s"]]
    data, file = csv_text([HEAD, *rows]).encode(), tmp_path / "rounds.csv"
    log = RoundsLog(file).read()
    assert (log.dropped, log.rounds) == (0, {})
    for end in range(len(data) + 1):
        file.open("ab").write(data[end - 1 : end] if end else b"")
        log.read()
    assert log.rounds == {(0, 1): {"a": "", "b": NASTY}, (1, 1): {"a": "late: it took 9 s"}}
    assert log.absences == [Absence(0, 1, "b", NASTY), Absence(1, 1, "a", "late: it took 9 s")]
    assert (log.dropped, log.taken) == (2, Counter(a=1))
    assert (log.bytes_up["a"], log.bytes_down["a"], log.bytes_down["b"]) == (15, 26, 20)


def test_a_file_that_was_cut_back_is_read_anew_even_if_it_is_longer_again(tmp_path: Path) -> None:
    file = tmp_path / "rounds.csv"
    file.write_text(csv_text([HEAD, [0, 1, "a", 1, 1, ""], [0, 2, "a", 1, 1, "the node has left"]]))
    log = RoundsLog(file).read()
    (tmp_path / "new").write_text(csv_text([HEAD, *([0, number, "a", 1, 1, ""] for number in range(1, 9))]))
    (tmp_path / "new").replace(file)
    assert (log.read().dropped, log.taken["a"]) == (0, 8)
    file.unlink()
    assert log.read().taken["a"] == 0


def test_long_runs_are_remembered_in_part_and_counted_as_a_whole(tmp_path: Path) -> None:
    file = tmp_path / "rounds.csv"
    file.write_text(csv_text([HEAD, *([0, number, "a", 1, 2, "x" * (number % 2)] for number in range(1, 1001))]))
    log = RoundsLog(file).read()
    assert (len(log.rounds), len(log.absences)) == (SHOWN, LISTED)
    assert (log.dropped, log.taken["a"], log.bytes_up["a"], log.bytes_down["a"]) == (500, 500, 1000, 2000)
    assert next(reversed(log.rounds)) == (0, 1000)
    assert log.where([1000, 5]) == (1, 0)
    assert log.where([1001, 5]) == (0, 1000)
    assert log.where([1000, 5], (1, 2)) == (1, 2)


@pytest.mark.parametrize(
    ("why", "word"),
    [
        ("", "participated"),
        ("late: it took 4.4 s, and the deadline is 4 s", "late"),
        ("no reply within 60 s", "late"),
        ("not sampled: it has missed a deadline", "late"),
        ("no answer within 60 s", "late"),  # as earlier versions wrote it
        ("not asked: it has missed a deadline", "late"),
        ("absent since 2026-01-01 00:00:00: the node has left", "absent"),
        ("the node has left", "absent"),
        ("the node failed: late: x", "excluded"),
    ],
)
def test_reasons_in_a_word(why: str, word: str) -> None:
    assert outcome(why) == word
