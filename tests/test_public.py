"""The names at the top: few, and cheap to import."""

import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import headstart
from tests.command import Command


def test_the_top_level_has_few_names_and_all_are_there() -> None:
    assert len(headstart.__all__) <= 19
    assert all(getattr(headstart, name) is not None for name in headstart.__all__)


def test_the_version_is_that_of_the_package(tmp_path: Path, command: Command) -> None:
    assert headstart.__version__ == version("headstart")
    done = command("--version", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, f"headstart {version('headstart')}\n")


def test_the_version_does_not_wait_for_torch() -> None:
    code = "import sys, headstart; headstart.__version__; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"
