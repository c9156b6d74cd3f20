"""Every test has a cache of its own, the same random numbers, and no way to a hub."""

from pathlib import Path

import pytest
import torch

torch.set_num_threads(1)  # the tests are small, and threads that wait for each other are slower than one


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    torch.manual_seed(0)  # before any fixture: what a test draws does not depend on the tests before it


@pytest.fixture(autouse=True)
def _isolated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADSTART_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.delenv("HEADSTART_DATA", raising=False)
