"""The `headstart` command in this process, which is quicker; `cli` shows that a process of its own does the same."""

import subprocess
import sys
from pathlib import Path

import pytest

from headstart.cli import main


class Command:
    """Called with the command's arguments, gives its exit status and what it printed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self.monkeypatch, self.capsys = monkeypatch, capsys

    def __call__(self, *arguments: object, cwd: Path) -> subprocess.CompletedProcess[str]:
        self.monkeypatch.chdir(cwd)
        self.monkeypatch.setattr(sys, "argv", ["headstart", *map(str, arguments)])
        self.capsys.readouterr()
        with pytest.raises(SystemExit) as stopped:
            main()
        out, err = self.capsys.readouterr()
        return subprocess.CompletedProcess([], int(stopped.value.code or 0), out, err)
