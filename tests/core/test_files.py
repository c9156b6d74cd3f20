"""Text of others in tables: a spreadsheet computes nothing of it, and it is read back as it was."""

import csv
import io
from pathlib import Path

import pytest

from headstart.core.files import csv_text, read_csv, write_text


@pytest.mark.parametrize(
    "cell", ['=HYPERLINK("http://x","a")', "+1+cmd|' /C calc'!A0", "-2+3", "@SUM(A1)", "\t=1", "\r=1", "'=1", "''@x"]
)
def test_a_cell_that_would_be_a_formula_is_text_and_is_read_back_as_it_was(tmp_path: Path, cell: str) -> None:
    path = tmp_path / "table.csv"
    write_text(path, csv_text([["client", "why"], ["a", cell]]))
    with path.open(newline="", encoding="utf-8") as file:
        assert list(csv.reader(file))[1] == ["a", f"'{cell}"]
    assert read_csv(path)[1] == ["a", cell]
    write_text(path, csv_text(read_csv(path)))
    assert read_csv(path)[1] == ["a", cell]


def test_numbers_and_other_texts_stay_as_they_are() -> None:
    row = [-1, -0.5, "-1", "+2e-3", "-inf", "a=b", "it's", "'quoted'", ""]
    assert next(csv.reader(io.StringIO(csv_text([row])))) == [str(cell) for cell in row]
