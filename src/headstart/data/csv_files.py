"""CSV files as people have them: other separators and encodings, rows with too many fields."""

from __future__ import annotations

import codecs
import csv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headstart.config.recipe import Data
from headstart.errors import HeadstartError, listed

_CHUNK = 1 << 20
_UTF16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
_SEPARATORS = {",": "a comma", ";": "a semicolon", "\t": "a tab", "|": "a bar"}


def csv_settings(files: Sequence[Path], data: Data, notes: list[str]) -> dict[str, Any]:
    """How pandas is to read some CSV files; what it could not, or would misread, is said with the key that mends it."""
    if not all(_is_text(file, data.encoding) for file in files):
        return {}  # as the reader proper says
    separator = data.separator or ("\t" if files[0].suffix.lower() == ".tsv" else ",")
    for file in files:
        _check_header(file, separator, data)
    extra: dict[str, Any] = {} if separator == "," else {"sep": separator}
    if data.encoding:
        extra["encoding"] = data.encoding
    found = {file: _odd_rows(file, separator, data) for file in files}
    long = {file: rows.long for file, rows in found.items() if rows.long}
    if not long:  # rows without a value are the reader's to refuse or to leave out
        return extra
    if not data.skip_unreadable:
        problems = "; ".join(f"{file}: {rows}" for file, rows in found.items() if rows.long or rows.short)
        raise HeadstartError(
            f"{problems}; quote texts that hold a {separator!r}, or set data.skip_unreadable = true to leave them out"
        )
    more = "more fields than columns in line"
    if len(files) > 1:
        problems = "; ".join(f"{file}: {more} {listed(rows.values())}" for file, rows in long.items())
        raise HeadstartError(f"{problems}; of several files, none can be skipped: mend them")
    lines = long[files[0]]
    left = "it is left out" if len(lines) == 1 else "they are left out"
    notes.append(f"{more} {listed(lines.values())}; {left}")
    return {**extra, "skiprows": list(lines)}


def guess_csv(file: Path) -> dict[str, str]:
    """The keys of [data] that a CSV file needs to be read: an encoding, a separator, or none."""
    with file.open("rb") as stream:
        encoding = "utf-16" if stream.read(2) in _UTF16 else None
    try:
        _is_text(file, encoding)
    except HeadstartError:
        encoding = "cp1252"
    with file.open(encoding=encoding or "utf-8-sig", newline="", errors="replace") as text:
        header = text.readline()
    usual = "\t" if file.suffix.lower() == ".tsv" else ","
    separator = next((each for each in (usual, *_SEPARATORS) if each in header), usual)
    keys = {"encoding": encoding or "", "separator": separator if separator != usual else ""}
    return {key: value for key, value in keys.items() if value}


def _is_text(file: Path, encoding: str | None) -> bool:
    """Whether a file is text at all; one in another encoding is refused, with the first line that is."""
    try:
        decoder = codecs.getincrementaldecoder(encoding or "utf-8")()
    except LookupError:
        raise HeadstartError(f"data.encoding: {encoding!r} is not known; use 'utf-8', 'cp1252', 'latin-1'…") from None
    line = 1
    with file.open("rb") as stream:
        while chunk := stream.read(_CHUNK):
            try:
                decoder.decode(chunk)
            except UnicodeDecodeError as error:
                if b"\0" in chunk and chunk[:2] not in _UTF16:
                    return False
                guess = "utf-16" if line == 1 and chunk[:2] in _UTF16 else "cp1252"
                line += chunk[: max(error.start, 0)].count(b"\n")
                raise HeadstartError(
                    f"{file} is not {encoding or 'UTF-8'}, the first time in line {line}; save it as UTF-8, or set "
                    f"data.encoding, perhaps to {guess!r}"
                ) from None
            line += chunk.count(b"\n")
    return True


def _check_header(file: Path, separator: str, data: Data) -> None:
    """Refuse a first line that has no separator in it and another one instead."""
    with file.open(encoding=data.encoding or "utf-8-sig", newline="", errors="replace") as stream:
        header = stream.readline()
    other = next((each for each in _SEPARATORS if each in header), None)
    if separator not in header and other is not None:
        raise HeadstartError(
            f"{file} has {_SEPARATORS[other]} between its columns, where {separator!r} is expected; set "
            f"data.separator = {other!r}"
        )


@dataclass(frozen=True)
class _OddRows:
    """Rows with more fields than the header, by their numbers from 0, which is the header, and rows that lack a value
    which a recipe reads: the line each ends at."""

    long: dict[int, int]
    short: list[int]

    def __str__(self) -> str:
        found = {"more fields than columns": self.long.values(), "no value in a column that is read": self.short}
        return ", and ".join(f"{what} in line {listed(lines)}" for what, lines in found.items() if lines)


def _odd_rows(file: Path, separator: str, data: Data) -> _OddRows:
    long, short = dict[int, int](), list[int]()
    named = (data.input_column or "text", data.label_column or "label", data.client_column or "")
    read = {name for each in named for name in ([each] if isinstance(each, str) else each)}
    with file.open(encoding=data.encoding or "utf-8-sig", newline="", errors="replace") as stream:
        reader = csv.reader(stream, delimiter=separator)
        try:
            header = next(reader, [])
            places = [place for place, name in enumerate(header) if name in read]
            for number, row in enumerate(reader, 1):
                if len(row) > len(header):
                    long[number] = reader.line_num
                elif row and not all(place < len(row) and row[place] for place in places):
                    short.append(reader.line_num)
        except csv.Error:  # what it cannot read, the reader proper says
            return _OddRows({}, [])
    return _OddRows(long, short)
