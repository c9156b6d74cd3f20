"""Text of others in tables: a spreadsheet computes nothing of it, and it is read back as it was. Arrays on a disk that
does not take them."""

import csv
import errno
import io
from pathlib import Path

import numpy as np
import pytest

from headstart.core.files import csv_text, read_csv, rename_folder, save_arrays, write_atomically, write_text
from tests.disk import Order


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


def test_a_folder_is_on_disk_before_its_name_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order, draft = Order(monkeypatch), tmp_path / "draft"
    (draft / "inner").mkdir(parents=True)
    (draft / "one").write_text("1")
    (draft / "inner" / "two").write_text("2")
    rename_folder(draft, tmp_path / "whole")
    order.check(tmp_path / "whole")
    assert (tmp_path / "whole" / "inner" / "two").read_text() == "2"


def test_an_error_of_the_disk_names_the_file_that_was_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(FileNotFoundError) as refused:
        write_text(tmp_path / "nowhere" / "a.txt", "")
    assert refused.value.filename == str(tmp_path / "nowhere" / "a.txt")

    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="full") as refused_by_disk:
        write_text(tmp_path / "a.txt", "")
    assert refused_by_disk.value.filename == str(tmp_path / "a.txt")

    def broken(temporary: Path) -> None:
        raise OSError("a mistake of the program")

    with pytest.raises(OSError, match="a mistake of the program") as mistaken:
        write_atomically(tmp_path / "a.txt", broken)
    assert mistaken.value.filename is None
