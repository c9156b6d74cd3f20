"""Hugging Face tables, from files or from the hub, as splits of examples."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import datasets
import numpy as np

from headstart.data.catalog import Known
from headstart.data.examples import Dataset, Examples, Ints, Kind, check_labels, codes, numbered
from headstart.errors import HeadstartError
from headstart.recipe import Data

Tables = dict[str, Any]

_SPLIT_NAMES = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "val", "dev"),
    "test": ("test", "testing"),
}
_FORMATS = {".parquet": "parquet", ".csv": "csv", ".tsv": "csv", ".jsonl": "json", ".json": "json"}
_IMAGE_SUFFIXES = {".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm"}
_USUAL = Known("image", 0, ("image", "img", "text", "sentence"), ("label", "labels", "class"))


def local_tables(path: Path) -> Tables:
    """Tables by split from a file, a folder of split files, or a folder of images by class."""
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    found = [file for file in files if file.suffix in _FORMATS and not file.name.startswith(".")]
    with _quiet():
        try:
            if found:
                splits: dict[str, list[str]] = {}
                for file in found:
                    splits.setdefault(_split_of(file.stem) if path.is_dir() else "train", []).append(str(file))
                extra = {"sep": "\t"} if found[0].suffix == ".tsv" else {}
                return dict(datasets.load_dataset(_FORMATS[found[0].suffix], data_files=splits, **extra))
            if path.is_dir() and any(file.suffix.lower() in _IMAGE_SUFFIXES for file in path.rglob("*")):
                return dict(datasets.load_dataset("imagefolder", data_dir=str(path), drop_labels=False))
        except (datasets.exceptions.DatasetGenerationError, ValueError, OSError) as error:
            raise HeadstartError(f"cannot read the data in {path}: {error.__cause__ or error}") from None
    raise HeadstartError(
        f"{path} holds no data: expected split files ({', '.join(_FORMATS)}), a folder of images by class, or an .npz"
    )


def hub_tables(name: str, known: Known | None) -> Tables:
    """Tables by split from the hub, only the splits that count."""
    repository = known.hub if known else name
    place = f"put train.parquet and test.parquet into HEADSTART_DATA/{name}"
    if repository is None:
        raise HeadstartError(f"{name} is not on the hub ({known.note if known else ''}); {place}")
    try:
        with _quiet():
            if known is None:
                return dict(datasets.load_dataset(repository))
            return {
                ours: datasets.load_dataset(repository, known.config, split=theirs)
                for ours, theirs in known.splits.items()
            }
    except Exception as error:  # the hub's client raises many kinds; all mean that the data cannot be had
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise HeadstartError(f"cannot fetch {repository} from the hub: {reason}; or {place}") from None


def from_tables(data: Data, known: Known | None, tables: Tables) -> Dataset:
    """A data set from tables by split; without a labelled test split, `test` is empty and is to be cut from `train`."""
    known = known or _USUAL
    columns = next(iter(tables.values())).column_names
    inputs = _column(data.input_column, known.inputs, columns, "input")
    label = _column(data.label_column, known.labels, columns, "label")[0]
    tables = _labelled_splits(tables, label)
    classes, labels = _labels(tables, label)
    clients, client_names = _ids(tables, data.client_column, known.client, "client")
    domains, domain_names = _ids(tables, data.domain_column, known.domain, "domain")
    is_image = isinstance(tables["train"].features[inputs[0]], datasets.Image)
    splits = {}
    for split, table in tables.items():
        source = table.select_columns(list(dict.fromkeys(inputs)))
        source = source.cast_column(inputs[0], datasets.Image(decode=False)) if is_image else source
        kind: Kind = "image" if is_image else "text"
        rows = np.arange(len(table))
        splits[split] = Examples(kind, source, inputs, rows, labels[split], clients.get(split), domains.get(split))
    if known.only and set(known.only) <= set(classes):
        splits = {split: _keep(examples, classes, known.only) for split, examples in splits.items()}
        classes = known.only
    train = splits["train"]
    test = splits.get("test", train.take(np.zeros(0, np.int64)))
    return Dataset(data.dataset, classes, train, test, splits.get("validation"), client_names, domain_names)


def _split_of(stem: str) -> str:
    """The split that a name speaks of: ``train``, ``test-00000-of-00001``; a name that says nothing is training."""
    word = stem.lower().replace("_", "-").split("-")[0]
    return next((split for split, names in _SPLIT_NAMES.items() if word in names), "train")


def _labelled_splits(tables: Tables, label: str) -> Tables:
    """Splits under our names. A split without labels, as GLUE's tests, is left out; validation then serves as test."""
    splits: Tables = {}
    for name, table in tables.items():
        if label in table.column_names and not set(table.unique(label)) <= {-1, None}:
            splits.setdefault(_split_of(name), table)
    if not splits:
        raise HeadstartError(f"no example has a label in column {label!r}")
    if "train" not in splits:
        splits["train"] = splits.pop(next(iter(splits)))
    if "test" not in splits and "validation" in splits:
        splits["test"] = splits.pop("validation")
    return splits


def _column(asked: Any, candidates: Iterable[Any], columns: list[str], what: str) -> tuple[str, ...]:
    """The column or pair of columns that a recipe asks for, or the first candidate that is there."""
    for names in [asked] if asked is not None else candidates:
        names = names if isinstance(names, tuple) else (names,)
        if all(name in columns for name in names):
            return tuple(names)
    hint = f"{asked!r} is not there" if asked is not None else "none of the usual names is there"
    raise HeadstartError(f"data.{what}_column: {hint}; the columns are {', '.join(columns)}")


def _labels(tables: Tables, column: str) -> tuple[tuple[str, ...], dict[str, Ints]]:
    """Names of the classes, and labels by split; labels may be class labels, whole numbers, true/false or text."""
    values = {split: list(table[column]) for split, table in tables.items()}
    for split, part in values.items():
        missing = [row for row, value in enumerate(part) if value is None]
        if missing:
            raise HeadstartError(f"{split}: {len(missing)} examples have no {column!r}, the first at row {missing[0]}")
    first = next(value for part in values.values() for value in part)
    if isinstance(first, str):
        names = tuple(sorted({value for part in values.values() for value in part}))
        number = {name: index for index, name in enumerate(names)}
        return names, {split: np.array([number[value] for value in part], np.int64) for split, part in values.items()}
    if not isinstance(first, bool | int):
        raise HeadstartError(f"labels in {column!r} are {type(first).__name__} values; give text or whole numbers")
    labels = {split: np.array(part, np.int64) for split, part in values.items()}
    listed = tuple(str(name) for name in getattr(tables["train"].features[column], "names", None) or ())
    for split, numbers in labels.items():
        check_labels(numbers, f"{split}, column {column!r}", len(listed) or None)
    return listed or numbered(int(max(numbers.max() for numbers in labels.values())) + 1), labels


def _ids(tables: Tables, asked: str | None, usual: str | None, what: str) -> tuple[Mapping[str, Ints], tuple[str, ...]]:
    """Numbers by split for a column of ids, and the ids' names; empty where the data name none."""
    column = asked or usual
    have = [split for split, table in tables.items() if column in table.column_names]
    if asked is not None and "train" not in have:
        raise HeadstartError(
            f"data.{what}_column: {asked!r} is not there; the columns are {', '.join(tables['train'].column_names)}"
        )
    if not have:
        return {}, ()
    values = []
    for split in have:
        feature, ids = tables[split].features[column], list(tables[split][column])
        values.append(feature.int2str(ids) if hasattr(feature, "int2str") else ids)
    numbers, names = codes([value for part in values for value in part])
    bounds = np.cumsum([len(part) for part in values])[:-1]
    return dict(zip(have, np.split(numbers, bounds), strict=True)), names


def _keep(examples: Examples, classes: tuple[str, ...], only: tuple[str, ...]) -> Examples:
    """The examples of some classes, renumbered in the order given."""
    number = np.full(len(classes), -1)
    number[[classes.index(name) for name in only]] = np.arange(len(only))
    return examples.relabelled(number[examples.labels]).take(np.flatnonzero(number[examples.labels] >= 0))


@contextmanager
def _quiet() -> Iterator[None]:
    """No progress bars of the library underneath: headstart shows its own."""
    were_on = datasets.is_progress_bar_enabled()
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        if were_on:
            datasets.enable_progress_bars()
