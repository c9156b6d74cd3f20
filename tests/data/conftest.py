"""Tables are cached in a folder of the test session, and no hub is asked."""

from pathlib import Path

import datasets
import huggingface_hub.constants
import pytest


@pytest.fixture(scope="session")
def tables_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tables")


@pytest.fixture(autouse=True)
def _own_tables_cache(tables_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tables_cache)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.delenv("HEADSTART_DATA", raising=False)
