"""Files that are either whole or absent, and stay so when the power fails."""

from __future__ import annotations

import csv
import hashlib
import io
import json
import os
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError
from safetensors.numpy import save_file

BINARY = getattr(os, "O_BINARY", 0)
"""For `os.open`: on Windows, bytes as they are."""
_OPENS_FOLDERS = os.name != "nt"
_SEEKING = Lock()  # of threads, where a system cannot read at a place without moving there
_DISK_ERROR = re.compile(r"([^:]*) \(os error (\d+)\)")  # in what safetensors says
_TEMPORARY = ".headstart-"  # how the name of a file begins that is not whole yet
# What a spreadsheet computes, and what it looks like once it does not; apostrophes that were there before stay.
_FORMULA, _ESCAPED = re.compile(r"'*[=+\-@\t\r]"), re.compile(r"'+[=+\-@\t\r]")


def write_atomically(path: Path, write: Callable[[Path], object], private: bool = False) -> None:
    """Let ``write`` fill a temporary sibling of ``path``, flush it to disk and rename it into place, durably.

    private: for the eyes of its owner only.
    """
    with _named(path):
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=_TEMPORARY, suffix=path.suffix)
        os.close(handle)
        temporary = Path(name)
        try:
            write(temporary)
            with temporary.open("rb+") as file:
                os.fsync(file.fileno())
            # mkstemp makes private files; a run directory is as readable as the user's umask says.
            umask = os.umask(0)
            os.umask(umask)
            temporary.chmod(0o600 if private else 0o666 & ~umask)
            temporary.replace(path)
            sync_folder(path.parent)
        finally:
            temporary.unlink(missing_ok=True)


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """An error of the disk that names no file, or a temporary one, names this one."""
    try:
        yield
    except OSError as error:
        temporary = Path(str(error.filename)).name.startswith(_TEMPORARY)
        if error.errno is not None and (error.filename is None or temporary):
            error.filename = str(path)
        raise


def save_arrays(
    path: Path, arrays: Mapping[str, npt.NDArray[np.generic]], metadata: Mapping[str, str] | None = None
) -> None:
    """Write arrays as safetensors; an `OSError` where the disk does not take them."""
    try:
        save_file(dict(arrays), path, metadata=dict(metadata) if metadata else None)
    except SafetensorError as error:
        found = _DISK_ERROR.search(str(error))
        if found is None:
            raise
        number = int(found[2])  # on Windows its own, which the fourth argument says
        raise OSError(number, found[1].strip(), str(path), number) from None


def sync_folder(folder: Path) -> None:
    """Make the names of a folder's files durable: a rename is lost with the power before that.

    Windows opens no folders, and its file system keeps a journal of names.
    """
    if not _OPENS_FOLDERS:
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        with _named(folder):
            os.fsync(handle)
    finally:
        os.close(handle)


def make_folder(folder: Path) -> None:
    """A folder that is there after a power cut, too, and the folders that it is in."""
    if folder.is_dir():
        return
    make_folder(folder.parent)
    folder.mkdir(exist_ok=True)
    sync_folder(folder.parent)


def rename_folder(draft: Path, folder: Path) -> None:
    """Give a folder that is whole its name, durably: what is in it is on disk before the name is."""
    for place, _, names in os.walk(draft):
        for name in names:
            path = Path(place, name)
            with path.open("rb" if _OPENS_FOLDERS else "rb+") as file, _named(path):
                os.fsync(file.fileno())
        sync_folder(Path(place))
    draft.replace(folder)
    sync_folder(folder.parent)


def sha256(path: Path) -> str:
    """The SHA-256 of a file's bytes, in hexadecimal digits."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def append_text(path: Path, text: str) -> None:
    """Append to a file, durably; a crash may leave a part of ``text``."""
    new = not path.exists()
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | BINARY, 0o666)
    try:
        data = memoryview(text.encode())
        with _named(path):
            while len(data):  # a nearly full disk takes a part
                data = data[os.write(handle, data) :]
            os.fsync(handle)
    finally:
        os.close(handle)
    if new:
        sync_folder(path.parent)


def read_at(handle: int, count: int, place: int) -> bytes:
    """So many bytes of an open file, from a place on."""
    if hasattr(os, "pread"):
        return os.pread(handle, count, place)
    with _SEEKING:
        os.lseek(handle, place, os.SEEK_SET)
        return os.read(handle, count)


def read_into(handle: int, memory: memoryview, place: int) -> None:
    """Fill memory with what an open file holds from a place on."""
    while len(memory):
        if hasattr(os, "preadv"):
            count = os.preadv(handle, [memory], place)
        else:
            data = read_at(handle, len(memory), place)
            count = len(data)
            memory[:count] = data
        if not count:
            raise OSError(f"a file ends {len(memory)} bytes too early")
        memory, place = memory[count:], place + count


def write_at(handle: int, data: bytes | memoryview, place: int) -> None:
    """Write all of the bytes into an open file, from a place on."""
    rest = memoryview(data)
    while len(rest):  # a nearly full disk takes a part
        if hasattr(os, "pwrite"):
            written = os.pwrite(handle, rest, place)
        else:
            with _SEEKING:
                os.lseek(handle, place, os.SEEK_SET)
                written = os.write(handle, rest)
        rest, place = rest[written:], place + written


def temporaries(folder: Path) -> list[Path]:
    """The temporary files in a folder: of somebody who is writing there, or of a process that was killed."""
    return list(folder.glob(f"{_TEMPORARY}*"))


def secret(path: Path) -> bytes:
    """32 random bytes that only the owner of the file knows; drawn when they are asked for the first time."""
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, lambda temporary: temporary.write_bytes(os.urandom(32)), private=True)
    return path.read_bytes()


def write_text(path: Path, text: str, private: bool = False) -> None:
    """Write ``text`` atomically."""
    write_atomically(path, lambda temporary: temporary.write_text(text, encoding="utf-8"), private)


def csv_text(rows: Iterable[Sequence[Any]]) -> str:
    """Rows as the text of a CSV file; a text that a spreadsheet would take for a formula begins with an apostrophe."""
    lines = []
    for row in rows:
        line = io.StringIO()
        csv.writer(line, lineterminator="\r\n").writerow([_inert(cell) for cell in row])  # which quotes both of them
        lines.append(line.getvalue()[:-2] + "\n")
    return "".join(lines)


def read_csv(path: Path) -> list[list[str]]:
    """The rows of a file that `csv_text` wrote; a line cut short by a crash, or within a letter, does not count."""
    whole, end, _ = path.read_bytes().rpartition(b"\n")
    return parse_csv(whole + end)


def parse_csv(data: bytes) -> list[list[str]]:
    """The rows of whole lines of a file that `csv_text` wrote."""
    lines = io.StringIO(data.decode(), newline="")
    return [[cell[1:] if _ESCAPED.match(cell) else cell for cell in row] for row in csv.reader(lines)]


def _inert(cell: Any) -> Any:
    if not isinstance(cell, str) or not _FORMULA.match(cell):
        return cell
    try:
        float(cell)
    except ValueError:
        return f"'{cell}"
    return cell


def write_json(path: Path, value: Any, private: bool = False) -> None:
    """Write ``value`` as JSON atomically; NaN and infinity are refused, since they are not JSON."""
    write_text(path, json.dumps(value, indent=2, allow_nan=False, ensure_ascii=False) + "\n", private)
