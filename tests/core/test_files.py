"""Text of others in tables: a spreadsheet computes nothing of it, and it is read back as it was. Arrays on a disk that
does not take them."""

import csv
import errno
import io
from pathlib import Path

import numpy as np
import pytest

from headstart.core.files import csv_text, read_csv, save_arrays, write_atomically, write_text


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


def test_arrays_that_a_disk_does_not_take_are_an_error_of_the_disk_and_leave_nothing(tmp_path: Path) -> None:
    resource = pytest.importorskip("resource")
    path, arrays = tmp_path / "large.safetensors", {"x": np.zeros(1 << 20, np.float32)}
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, before[1]))
    try:
        with pytest.raises(OSError, match="File too large") as refused:
            write_atomically(path, lambda temporary: save_arrays(temporary, arrays))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert refused.value.errno == errno.EFBIG
    assert not list(tmp_path.iterdir())
