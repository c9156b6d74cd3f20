"""The notebooks of examples/ run from top to bottom, and are kept without what they printed."""

import json
import os
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOKS = sorted((Path(__file__).parents[1] / "examples").glob("*.ipynb"))


def test_there_are_three() -> None:
    assert [path.stem for path in NOTEBOOKS] == ["compare-methods", "own-images", "tune-a-text-model"]


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    monkeypatch.setenv("JUPYTER_PLATFORM_DIRS", "1")
    book = nbformat.read(path, as_version=4)
    client = NotebookClient(
        book, timeout=240, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}},
    )  # fmt: skip
    client.execute(env=dict(os.environ))
    shown = [output for cell in book.cells if cell.cell_type == "code" for output in cell.outputs]
    assert any("text/html" in output.get("data", {}) for output in shown)
    assert not [output for output in shown if output.output_type == "error"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_kept_without_outputs(path: Path) -> None:
    cells = [cell for cell in json.loads(path.read_text(encoding="utf-8"))["cells"] if cell["cell_type"] == "code"]
    assert cells
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in cells)


def test_progress_is_shown_in_one_place_of_a_cell(tmp_path: Path) -> None:
    code = """
from headstart.core import progress
progress._PATIENCE = 0
with progress.progress("work", 3) as advance:
    advance(1)
    advance(1)
    first = progress._notebook()
    first("other work")
"""
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(code)])
    NotebookClient(book, timeout=120, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}).execute()
    shown = [output["data"]["text/plain"] for output in book.cells[0].outputs]
    assert shown == ["", "other work"]  # the first is emptied when the work is done
