"""Every test has a cache of its own."""

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty feature cache."""
    place = tmp_path / "cache"
    monkeypatch.setenv("HEADSTART_CACHE", str(place))
    return place


@pytest.fixture
def block(monkeypatch: pytest.MonkeyPatch) -> int:
    """Blocks of four rows, so that few examples fill several."""
    monkeypatch.setattr("headstart.backbones.cache.BLOCK", 4)
    return 4
