"""Every test has a cache of its own, the same random numbers, and no way to a hub."""

import gc
import os
import signal
from collections.abc import Iterator
from pathlib import Path

# The tests are small, and threads that wait for each other are slower than one: numpy's and torch's, here and in every
# process that a test starts.
os.environ["OMP_NUM_THREADS"] = "1"

import pytest
import torch

import headstart.methods  # noqa: F401 (registers them before tests are collected)
from tests.command import Command

# A job in the background ignores Ctrl-C, and so would every process that a test starts.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with slow tests come first, so that no worker waits at the end for another's."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)


def pytest_collection_finish() -> None:
    """What is imported and collected by now stays: it is not searched for garbage again and again."""
    gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    torch.manual_seed(0)  # before any fixture: what a test draws does not depend on the tests before it


@pytest.fixture(autouse=True)
def _isolated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADSTART_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.delenv("HEADSTART_DATA", raising=False)


@pytest.fixture(scope="module")
def no_report() -> Iterator[None]:
    """Runs of a module that does not look at their pages are spared drawing them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("headstart.runner.run_recipe.write_report", lambda path, records: None)
        yield


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    return Command(monkeypatch, capsys)
