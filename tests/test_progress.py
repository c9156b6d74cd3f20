import io
import sys

import pytest

from headstart import progress as module
from headstart.progress import progress


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
