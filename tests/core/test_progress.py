import io
import json
import sys
from pathlib import Path

import pytest

from headstart.core import progress as module
from headstart.core.progress import progress, reported


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_silent_when_nobody_watches(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = io.StringIO()
    monkeypatch.setattr(sys, "stderr", pipe)
    with progress("work", 3) as advance:
        advance(3)
    assert pipe.getvalue() == ""


@pytest.mark.parametrize(("patience", "shown"), [(0.0, True), (60.0, False)])
def test_a_bar_with_the_time_left_for_work_that_lasts(
    patience: float, shown: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(module, "_PATIENCE", patience)
    monkeypatch.setenv("TERM", "xterm")
    with progress("work through a network", 100, done=20) as advance:
        for _ in range(8):
            advance(10)
    assert ("work through a network" in terminal.getvalue()) == shown
    assert ("100/100" in terminal.getvalue()) == shown


def test_who_looks_on_reads_how_far_work_has_come(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_PATIENCE", 0.0)
    note = tmp_path / "progress.json"
    with reported(note):
        assert not note.exists()
        with progress("outer", 10, done=4) as advance:
            assert {"what": "outer", "first": 4, "done": 4, "total": 10}.items() <= json.loads(note.read_text()).items()
            with progress("inner", 3) as within:
                within(2)
                assert json.loads(note.read_text())["what"] == "inner"
            advance(5)
            found = json.loads(note.read_text())
            assert (found["what"], found["done"]) == ("outer", 9)
            assert found["seconds"] >= 0
    assert not note.exists()
    with progress("unwatched", 1) as advance:
        advance(1)
    assert not note.exists()
