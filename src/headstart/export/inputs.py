"""New inputs for a model: images, texts or features, from files and folders."""

from __future__ import annotations

import csv
import logging
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from headstart.config.catalog import KNOWN
from headstart.config.recipe import Data
from headstart.data.csv_files import guess_csv
from headstart.data.examples import Examples, Kind, only_readable
from headstart.data.folders import image_files
from headstart.data.memory import inputs
from headstart.errors import HeadstartError, listed, similar_path

log = logging.getLogger("headstart")

_KINDS: Mapping[str, Kind] = {".txt": "text", ".csv": "text", ".tsv": "text", ".npz": "features"}
_READS = {
    "image": "images; give image files, or folders of them",
    "text": "texts; give .txt files with a text on every line, or .csv or .tsv files",
    "features": "features; give .npz files with X [N, d]",
}
_HELD: Mapping[Kind, str] = {"image": "images", "text": "texts", "features": "features [n, d]"}


def read(paths: Sequence[Path], kind: Kind, data: Data, width: int) -> tuple[list[str], Examples]:
    """Inputs of a kind from files and folders, in their order: how each is to be shown, and all as examples.

    data: says which columns texts are in, and whether images and rows that cannot be read are left out; width: of
    feature vectors.
    """
    names: list[str] = []
    values: list[Any] = []
    for path in paths:
        if not path.exists():
            raise HeadstartError(f"{path}: there is no such file or folder{similar_path(path)}")
        if kind != ("image" if path.is_dir() else _KINDS.get(path.suffix.lower(), "image")):
            raise HeadstartError(f"{path}: the model reads {_READS[kind]}")
        if kind == "image":
            files = _images(path)
            names += map(str, files)
            values += [{"bytes": None, "path": str(file)} for file in files]
        elif kind == "text":
            texts = _texts(path, data)
            names += [text if isinstance(text, str) else " | ".join(text) for text in texts]
            values += texts
        else:
            matrix = _matrix(path, width)
            names += [f"{path}:{row}" for row in range(len(matrix))]
            values += list(matrix)
    if not values:
        raise HeadstartError(f"{', '.join(map(str, paths))}: there is nothing to predict for")
    count = len(values)
    source = np.stack(values) if kind == "features" else np.fromiter(values, object, count)
    examples = Examples(kind, source, (), np.arange(count), np.zeros(count, np.int64))
    if kind == "image" and data.skip_unreadable:
        examples, note = only_readable(examples)
        if note:
            log.warning(f"warning: {note}")
    return [names[row] for row in examples.rows], examples


def held(given: Any, kind: Kind, width: int) -> tuple[list[str], Examples]:
    """Inputs of a kind that are in memory: how each is to be shown, and all as examples; width: of feature vectors."""
    found, source = inputs(given)
    if found != kind:
        raise HeadstartError(f"inputs: the model reads {_HELD[kind]}; these are {_HELD[found]}")
    if kind == "features":
        source = _checked(source, width, "inputs")
    shown = [f"{number}" for number in range(len(source))]
    if kind == "text":
        shown = [text if isinstance(text, str) else " | ".join(text) for text in source]
    count = len(source)
    return shown, Examples(kind, source, (), np.arange(count), np.zeros(count, np.int64))


def _images(path: Path) -> list[Path]:
    """An image file, or all of a folder and those inside it, sorted."""
    return image_files(path) if path.is_dir() else [path]


def _texts(path: Path, data: Data) -> list[Any]:
    """Texts from the lines that are not blank, or texts or pairs of texts from the columns of a table."""
    known = KNOWN[data.dataset].inputs if data.dataset in KNOWN else ()
    usual = [data.input_column, *known, "text", "sentence"]
    wanted = [names if isinstance(names, tuple) else (names,) for names in usual if names]
    wanted = [names for names in wanted if len(names) == len(wanted[0])]
    try:
        if path.suffix.lower() != ".txt":
            how = guess_csv(path)
            separator = how.get("separator", "\t" if path.suffix.lower() == ".tsv" else ",")
            encoding = (data.encoding or how["encoding"]) if "encoding" in how else "utf-8-sig"
            with path.open(newline="", encoding=encoding) as file:
                rows = list(csv.reader(file, delimiter=separator, strict=True))
            return _columns(path, _fitting(path, rows, separator, data.skip_unreadable), wanted)
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise HeadstartError(f"cannot read texts from {path}: {error}") from None
    if len(wanted[0]) == 2:
        raise HeadstartError(f"{path}: the model reads pairs of texts; give a .csv file with {' and '.join(wanted[0])}")
    return [line for line in lines if line.strip()]


def _fitting(path: Path, rows: list[list[str]], separator: str, skip: bool) -> list[list[str]]:
    """The header and the rows that are not blank; those with another number of fields are listed, or left out."""
    rows = [row for row in rows if row]
    bad = {number: row for number, row in enumerate(rows) if len(row) != len(rows[0])}
    if not bad:
        return rows
    problems = listed(f"row {number} has {len(row)} fields" for number, row in bad.items())
    problems = f"{path}: {problems} under {len(rows[0])} columns"
    if not skip:
        raise HeadstartError(
            f"{problems}; quote texts that hold a {separator!r}, or leave such rows out with --skip-unreadable"
        )
    log.warning(f"warning: {problems}, and {'is' if len(bad) == 1 else 'are'} left out")
    return [row for number, row in enumerate(rows) if number not in bad]


def _columns(path: Path, rows: list[list[str]], wanted: Sequence[tuple[str, ...]]) -> list[Any]:
    """The first columns asked for that are there, or the only ones that hold text."""
    columns, rows = (rows[0], rows[1:]) if rows else ([], [])
    chosen = next((names for names in wanted if set(names) <= set(columns)), None)
    if chosen is None:
        chosen = tuple(name for place, name in enumerate(columns) if not all(_is_number(row[place]) for row in rows))
        if len(chosen) != len(wanted[0]):
            expected = " and ".join(map(repr, wanted[0]))
            raise HeadstartError(f"{path}: there is no {expected}; the columns are {', '.join(columns) or 'none'}")
    places = [columns.index(name) for name in chosen]
    return [row[places[0]] if len(places) == 1 else tuple(row[place] for place in places) for row in rows]


def _is_number(value: str) -> bool:
    try:
        float(value)
    except ValueError:
        return False
    return True


def _matrix(path: Path, width: int) -> npt.NDArray[np.float32]:
    """X [N, d] of a features file."""
    try:
        with np.load(path, allow_pickle=False) as file:
            X = np.asarray(file["X"])
    except (
        OSError,
        ValueError,
        KeyError,
        EOFError,
        zipfile.BadZipFile,
        zlib.error,
        TypeError,
        AttributeError,
    ) as error:
        raise HeadstartError(f"cannot read features X [N, d] from {path}: {error}") from None
    return _checked(X, width, f"{path}: X")


def _checked(X: npt.NDArray[Any], width: int, what: str) -> npt.NDArray[np.float32]:
    """Features [n, width], finite."""
    if X.ndim != 2 or X.dtype.kind not in "fiu" or X.shape[1] != width:
        raise HeadstartError(f"{what} must be numbers [N, {width}], as in training; it is {X.dtype} {list(X.shape)}")
    with np.errstate(over="ignore"):
        X = X.astype(np.float32, order="C", copy=False)
    if not np.isfinite(X).all():
        raise HeadstartError(f"{what} holds NaN, infinity or values beyond float32")
    return X
