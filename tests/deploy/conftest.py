"""A federation of real processes for the tests of a file."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.deploy.processes import NODES, Machines, recipe_of, set_variables, silos


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("silos")
    silos(folder)
    return folder


@pytest.fixture(scope="module")
def machines(tmp_path_factory: pytest.TempPathFactory, data: Path) -> Iterator[Machines]:
    """A SuperLink and three nodes."""
    federation = Machines(tmp_path_factory.mktemp("o'brien") / "federation", recipe_of(data, {"method": "fedncm"}))
    for name in NODES:
        set_variables(federation.folder / f"node-{name}.sh", data=str(data / f"{name}.npz"))
    try:
        federation.superlink()
        for name in NODES:
            federation.node(name)
        yield federation
    finally:
        federation.stop()
