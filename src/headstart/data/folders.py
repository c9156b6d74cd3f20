"""Folders of images as tables: by class, by client and class, or with a file `metadata` that says what each one is."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import datasets
from datasets.packaged_modules.imagefolder.imagefolder import IMAGE_EXTENSIONS

from headstart.errors import HeadstartError, listed, nearest_path

IMAGE_SUFFIXES = frozenset(IMAGE_EXTENSIONS) | ({".dcm"} if find_spec("pydicom") else frozenset())
_SPLIT_NAMES = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "val", "dev"),
    "test": ("test", "testing"),
}
_MISSED = {
    ".dcm": "pip install 'headstart[dicom]' reads DICOM",
    ".heic": "save them as JPEG or PNG",
    ".heif": "save them as JPEG or PNG",
}
_OTHER = {
    **dict.fromkeys((".xlsx", ".xls", ".ods"), "save the sheet as CSV"),
    **dict.fromkeys((".zip", ".tar", ".gz", ".tgz", ".7z", ".rar"), "unpack it"),
}


def is_image(file: Path | str) -> bool:
    """Whether a file's name ends as that of an image that can be read."""
    return os.path.splitext(file)[1].lower() in IMAGE_SUFFIXES


def image_files(folder: Path) -> list[Path]:
    """All images of a folder and those inside it, in the order of their paths; hidden ones are not seen."""
    return [file for file in _files(folder) if is_image(file)]


def _split_in(name: str) -> str | None:
    """The split that a name speaks of: ``train``, ``test-00000-of-00001``, ``birds_val``."""
    words = re.split(r"[\W_]+", name.lower())
    return next((split for word in words for split, names in _SPLIT_NAMES.items() if word in names), None)


def split_of(name: str) -> str:
    """The split of a file or table; a name that says nothing is training."""
    return _split_in(name) or "train"


def names_split(value: object) -> bool:
    """Whether a value is the name of a split and nothing else."""
    return isinstance(value, str) and any(value.strip().lower() in names for names in _SPLIT_NAMES.values())


def image_roots(path: Path) -> dict[str, list[Path]]:
    """The folders of images by split: those named after splits, or else all of it, for a class may be a train."""
    folders = [folder for folder in sorted(path.iterdir()) if folder.is_dir() and not folder.name.startswith(".")]
    named = [folder for folder in folders if _split_in(folder.name)]
    by_class = all(file.is_dir() or not is_image(file) for folder in named for file in folder.iterdir())
    roots: dict[str, list[Path]] = {}
    for folder in named if named and (by_class or named == folders) else [path]:
        roots.setdefault(split_of(folder.name) if folder != path else "train", []).append(folder)
    return roots


def image_tables(roots: Mapping[str, Sequence[Path]], notes: list[str]) -> dict[str, Any]:
    """Tables by split of the images below some folders: `image`, `label`, the folder that an image lies in, and
    `client`, the folder above all others, where every image lies in two at least, and most in two.

    What is odd about the folders is added to the notes.
    """
    found = {split: [(root, file) for root in folders for file in _files(root)] for split, folders in roots.items()}
    _note_skipped([file for files in found.values() for _, file in files], notes)
    images = {split: [pair for pair in files if is_image(pair[1])] for split, files in found.items()}
    everywhere = [pair for pairs in images.values() for pair in pairs]
    _note_folders({root for root, _ in everywhere}, everywhere, notes)
    depths = Counter(len(file.relative_to(root).parts) for root, file in everywhere)
    names = sorted({file.parent.name for _, file in everywhere})
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=names)})
    if min(depths) == depths.most_common(1)[0][0] == 3:
        features["client"] = datasets.Value("string")
    tables = {}
    for split, pairs in images.items():
        columns = {"image": [str(file) for _, file in pairs], "label": [file.parent.name for _, file in pairs]}
        if "client" in features:
            columns["client"] = [file.relative_to(root).parts[0] for root, file in pairs]
        tables[split] = datasets.Dataset.from_dict(columns, features=features)
    return tables


def described(table: Any, column: str, folder: Path, skip: bool, notes: list[str]) -> Any:
    """The table with a column of paths, relative to a folder, as images; those that are not there are listed."""
    paths = [_place(folder, str(value)) for value in table[column]]
    absent = [row for row, path in enumerate(paths) if not os.path.isfile(path)]
    if absent:
        names = listed(table[row][column] for row in absent)
        message = f"{column!r}: {len(absent)} of {len(paths)} files are not there: {names}"
        lost = [path for path in map(paths.__getitem__, absent) if not os.path.isdir(os.path.dirname(path) or ".")]
        hint = f"; {nearest_path(lost[0])}" if lost else ""
        if not skip:
            where = f"paths are relative to {folder}{hint}"
            raise HeadstartError(f"{message}; {where}. data.skip_unreadable = true leaves them out")
        notes.append(f"{message}{hint}; they are left out")
        kept = sorted(set(range(len(paths))) - set(absent))
        table, paths = table.select(kept), [paths[row] for row in kept]
    table = table.remove_columns([column])
    return table.add_column(column, paths).cast_column(column, datasets.Image())


def instead(path: Path) -> str:
    """A clause on what to do with a file, or with the files of a folder, that are not read; or nothing."""
    if path.is_file():
        return "".join(f"; {fix}" for suffix, fix in _OTHER.items() if path.suffix.lower() == suffix)
    notes: list[str] = []
    _note_skipped(_files(path), notes)
    return "".join(f"; {note}" for note in notes)


def _place(folder: Path, written: str) -> str:
    """Where a file of a table is; a path that was written on Windows is read as what it is here, too."""
    path = folder / os.path.expanduser(written)
    if "\\" in written and not path.is_file():
        path = folder / os.path.expanduser(written.replace("\\", "/"))
    return str(path)


def _files(folder: Path) -> list[Path]:
    """All files below a folder but hidden ones, in the order of their paths."""
    found: list[Path] = []
    for place, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith((".", "__"))]
        found += [Path(place, name) for name in files if not name.startswith((".", "__"))]
    return sorted(found, key=lambda file: file.as_posix())


def _note_skipped(files: Iterable[Path], notes: list[str]) -> None:
    others = [file for file in files if not is_image(file)]
    counts = Counter(file.suffix.lower() for file in others)
    if counts:
        kinds = listed(f"{count} {suffix or 'without an ending'}" for suffix, count in sorted(counts.items()))
        fixes = "".join(f"; {fix}" for fix in dict.fromkeys(_MISSED[each] for each in counts if each in _MISSED))
        read = "file is" if len(others) == 1 else "files are"
        notes.append(f"{len(others)} {read} not read as images ({kinds}), the first {others[0]}{fixes}")


def _note_folders(roots: Iterable[Path], images: Sequence[tuple[Path, Path]], notes: list[str]) -> None:
    """Folders without images, and images deeper than others."""
    within = {file.parent for _, file in images}
    above = {folder for each in within for folder in each.parents}
    for root in sorted(roots):
        beside = {root} | {folder for folder in above if folder.is_relative_to(root)}
        folders = [each for folder in beside for each in folder.iterdir() if each.is_dir()]
        bare = [each for each in folders if each not in within | above and not each.name.startswith((".", "__"))]
        if empty := sorted(each.relative_to(root).as_posix() for each in bare):
            one, many = "folder holds no images, and is no class", "folders hold no images, and are no classes"
            notes.append(f"{len(empty)} {one if len(empty) == 1 else many}: {listed(empty)}")
    depth: Callable[[tuple[Path, Path]], int] = lambda pair: len(pair[1].relative_to(pair[0]).parts)  # noqa: E731
    depths = Counter(map(depth, images))
    if len(depths) > 1:
        usual = depths.most_common(1)[0][0]
        odd = Counter(str(file.parent.relative_to(root)) for root, file in images if depth((root, file)) != usual)
        places = listed(f"{place} ({count})" for place, count in sorted(odd.items()))
        notes.append(f"images lie at several depths, and the folder that an image lies in is its class: {places}")
