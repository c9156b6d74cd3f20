"""Hugging Face tables, from files or from the hub, as splits of examples."""

from __future__ import annotations

import glob
import logging
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import numpy.typing as npt

from headstart.config.catalog import Known
from headstart.config.recipe import Data
from headstart.core.target import Target
from headstart.data.csv_files import csv_settings
from headstart.data.examples import Dataset, Examples, Ints, Kind, check_labels, codes, numbered, read_targets
from headstart.data.folders import (
    described,
    image_files,
    image_roots,
    image_tables,
    instead,
    is_image,
    names_split,
    split_of,
)
from headstart.errors import HeadstartError, first_line, listed

Tables = dict[str, Any]

FORMATS = {".parquet": "parquet", ".csv": "csv", ".tsv": "csv", ".jsonl": "json", ".json": "json"}
_COMPLETIONS = (("prompt", "completion"), "messages", ("question", "answer"), ("instruction", "output"))
_PATHS = ("file_name", "path", "file", "filename", "image_path")
_USUAL = Known("image", 0, ("image", "img", "text", "sentence", *_PATHS), ("label", "labels", "class"))


def local_tables(path: Path, data: Data, notes: list[str]) -> Tables:
    """Tables by split from a file, a folder of split files, or a folder of images by class."""
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    splits: dict[str, list[Path]] = {}
    for file in files:
        if file.suffix.lower() in FORMATS and not file.name.startswith("."):
            splits.setdefault(split_of(file.stem) if path.is_dir() else "train", []).append(file)
    for split, parts in splits.items():
        if len({part.suffix.lower() for part in parts}) > 1:
            names = ", ".join(part.name for part in parts)
            raise HeadstartError(f"{path}: the {split} split is in files of several kinds ({names}); keep one kind")
    try:
        with _quiet():
            if splits:
                # One by one: a test split may have no labels, and so other columns than the training split.
                return {split: _read(parts, data, notes) for split, parts in splits.items()}
            if path.is_dir() and image_files(path):
                return _of_folders(path, data, notes)
    except HeadstartError:
        raise
    except Exception as error:  # the readers raise many kinds; all mean that the files are not what they should be
        reason = " ".join(str(error.__cause__ or error).split()) or type(error).__name__
        if "corresponds to no data" in reason:  # of a table with a header alone
            raise HeadstartError(f"{path} holds no example: a table needs a row below its header") from None
        raise HeadstartError(
            f"cannot read the data in {path}: {reason}; each file must be what its ending says and hold an example"
        ) from None
    raise HeadstartError(
        f"{path} holds no data: expected split files ({', '.join(FORMATS)}), a folder of images by class, or an .npz"
        f"{instead(path)}"
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
        raise HeadstartError(f"cannot fetch {repository} from the hub: {first_line(error)}; or {place}") from None


def from_tables(data: Data, known: Known | None, tables: Tables, notes: list[str]) -> Dataset:
    """A data set from tables by split; without a labelled test split, `test` is empty and is to be cut from `train`."""
    tables = tables if known else _by_split_column(tables, data)
    known = known or _USUAL
    columns = tables.get("train", next(iter(tables.values()))).column_names
    inputs = _column(data.input_column, known.inputs, columns, "input")
    label = _column(data.label_column, known.labels, columns, "label")
    named_client = known.client or ("client" if data.partition.kind == "natural" else None)
    tables = _labelled_splits(tables, label)
    if data.skip_unreadable:
        ids = (data.client_column or named_client, data.domain_column or known.domain)
        tables = {split: _complete(table, (*inputs, *label, *ids), split, notes) for split, table in tables.items()}
    found = _targets(tables, label, data.target)
    if found is None:
        classes, labels = _labels(tables, label[0])
    else:
        classes, labels = label, {split: np.zeros(len(table), np.int64) for split, table in tables.items()}
    clients, client_names = _ids(tables, data.client_column, named_client, "client")
    if not client_names and data.client_column is None and "client" in columns:
        notes.append("the data name clients, in 'client'; set data.client_column = 'client' to deal examples out by it")
    domains, domain_names = _ids(tables, data.domain_column, known.domain, "domain")
    is_image = _are_images(tables, inputs)
    splits = {}
    for split, table in tables.items():
        source = table.select_columns(list(dict.fromkeys(inputs)))
        source = source.cast_column(inputs[0], datasets.Image(decode=False)) if is_image else source
        kind: Kind = "image" if is_image else "text"
        rows = np.arange(len(table))
        splits[split] = Examples(kind, source, inputs, rows, labels[split], clients.get(split), domains.get(split))
        if found is not None:
            splits[split] = replace(splits[split], targets=found[1][split])
    if found is None and known.only and set(known.only) <= set(classes):
        splits = {split: _keep(examples, classes, known.only) for split, examples in splits.items()}
        classes = known.only
    train = splits["train"]
    test = splits.get("test", train.take(np.zeros(0, np.int64)))
    target = found[0] if found else "classes"
    validation = splits.get("validation")
    return Dataset(
        data.dataset, classes, train, test, validation, client_names, domain_names, target, tuple(notes)
    )  # fmt: skip


def of_completions(data: Data, tables: Tables) -> Dataset:
    """Prompts with their completions, or chats whose last message is the completion, by split; all of one class."""
    tables = _by_split_column(tables, data)
    columns = tables.get("train", next(iter(tables.values()))).column_names
    inputs = _column(data.input_column, _COMPLETIONS, columns, "input")
    tables = {split_of(name): table for name, table in tables.items()}
    tables = {"train": tables.pop(next(iter(tables)))} if len(tables) == 1 else tables
    if "train" not in tables:
        raise HeadstartError(f"there is no training split, only {' and '.join(tables)}; name one file train")
    if "test" not in tables and "validation" in tables:
        tables["test"] = tables.pop("validation")
    clients, client_names = _ids(tables, data.client_column, None, "client")
    domains, domain_names = _ids(tables, data.domain_column, None, "domain")
    splits = {}
    for split, table in tables.items():
        for name in inputs:
            _refuse_missing({split: table}, name)
            is_text = getattr(table.features[name], "dtype", None) in ("string", "large_string")
            if is_text != (len(inputs) == 2):
                raise HeadstartError(
                    f"data.input_column: {name!r} of the {split} split holds {table.features[name]}; give two columns "
                    "of text, a prompt and its completion, or one of messages"
                )
        rows = np.arange(len(table))
        source, labels = table.select_columns(list(inputs)), np.zeros(len(table), np.int64)
        splits[split] = Examples("text", source, inputs, rows, labels, clients.get(split), domains.get(split))
    train = splits["train"]
    test = splits.get("test", train.take(np.zeros(0, np.int64)))
    return Dataset(data.dataset, ("text",), train, test, splits.get("validation"), client_names, domain_names)


def completion_columns(features: Mapping[str, Any]) -> tuple[str, ...]:
    """The columns of prompts and their completions, or that of chats, by their usual names; none without these."""
    for names in _COMPLETIONS:
        pair = names if isinstance(names, tuple) else (names,)
        if all(name in features for name in pair):
            is_text = [isinstance(features[name], datasets.Value) for name in pair]
            return pair if all(each == (len(pair) == 2) for each in is_text) else ()
    return ()


def split_column(tables: Tables) -> str | None:
    """The column `split` of the only table, where all of its values, or some of them, name splits."""
    if len(tables) > 1:
        return None
    (table,) = tables.values()
    found = next((column for column in table.column_names if column.lower() == "split"), None)
    feature = table.features[found] if found else None
    is_text = isinstance(feature, datasets.Value) and "string" in feature.dtype
    return found if is_text and any(map(names_split, table.unique(found))) else None


def _by_split_column(tables: Tables, data: Data) -> Tables:
    """The only table cut into splits as its column `split` says, where it has one."""
    column = split_column(tables)
    if column is None or column in (data.label_column, data.client_column, data.domain_column, data.input_column):
        return tables
    (table,) = tables.values()
    values = _values(table, column)
    other = {row: value for row, value in enumerate(values) if not names_split(value)}
    if other:
        raise HeadstartError(
            f"the column {column!r} names splits, and in row {listed(other)} (from 0) it is "
            f"{listed(repr(value) for value in dict.fromkeys(other.values()))}; write train, validation or test, or "
            "give the column another name"
        )
    splits = [split_of(value) for value in values]
    return {
        split: table.select([row for row, each in enumerate(splits) if each == split])
        for split in dict.fromkeys(splits)
    }


def _read(files: Sequence[Path], data: Data, notes: list[str]) -> Any:
    """The table in files of one kind; columns of paths are images, and lie where their file does."""
    suffix = files[0].suffix.lower()
    extra = csv_settings(files, data, notes) if FORMATS[suffix] == "csv" else {}
    names = [glob.escape(str(file)) for file in files]
    table = datasets.load_dataset(FORMATS[suffix], data_files=names, split="train", **extra)
    wanted = data.input_column if isinstance(data.input_column, str) else None
    for name in [wanted] if wanted else ("image", "img", *_PATHS):
        feature = table.features.get(name)
        if isinstance(feature, datasets.Value) and "string" in feature.dtype and is_image(str(table[0][name])):
            return described(table, name, files[0].parent, data.skip_unreadable, notes)
    return table


def _of_folders(path: Path, data: Data, notes: list[str]) -> Tables:
    """Tables of a folder of images; where the folders of all splits have a file `metadata`, that says what they are."""
    roots = image_roots(path)
    files = {split: [file for folder in folders for file in _metadata(folder)] for split, folders in roots.items()}
    if all(files.values()):
        return {split: _read(parts, data, notes) for split, parts in files.items()}
    return image_tables(roots, notes)


def _metadata(folder: Path) -> list[Path]:
    return [file for file in sorted(folder.iterdir()) if file.stem == "metadata" and file.suffix.lower() in FORMATS]


def _targets(
    tables: Tables, columns: tuple[str, ...], asked: Target | None
) -> tuple[Target, dict[str, npt.NDArray[np.float64]]] | None:
    """Numbers or labels [n, q] by split, and which they are, from a column each; None where they are classes."""
    if asked == "classes" and len(columns) > 1:
        raise HeadstartError("data.label_column: a class is in one column; name one, or leave data.target out")
    for column in columns:
        _refuse_missing(tables, column)
    feature = tables["train"].features[columns[0]]
    if len(columns) == 1 and asked is None and not (isinstance(feature, datasets.Value) and "float" in feature.dtype):
        return None
    where = f"data.label_column: {', '.join(columns)}"
    values = {split: [np.asarray(_values(table, column)) for column in columns] for split, table in tables.items()}
    if len(columns) == 1:
        return read_targets({split: part[0] for split, part in values.items()}, asked, where)
    return read_targets({split: np.stack(part, axis=1) for split, part in values.items()}, asked, where)


def _labelled_splits(tables: Tables, labels: tuple[str, ...]) -> Tables:
    """Splits under our names. A split without labels, as GLUE's tests, is left out; validation then serves as test."""
    splits: Tables = {}
    label = labels[0]
    for name, table in tables.items():
        if not set(labels) <= set(table.column_names):
            continue
        if not isinstance(table.features[label], datasets.ClassLabel | datasets.Value):
            raise HeadstartError(f"labels in {label!r} are {table.features[label]}; give text or whole numbers")
        if not set(table.unique(label)) <= {-1, None}:
            splits.setdefault(split_of(name), table)
    if not splits:
        raise HeadstartError(f"no example has a label in column {label!r}")
    if "train" not in splits:
        if len(splits) > 1:
            raise HeadstartError(f"there is no training split, only {' and '.join(splits)}; name one file train")
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
    _refuse_missing(tables, column)
    values = {split: _values(table, column) for split, table in tables.items()}
    for split, part in values.items():
        if not isinstance(part[0], str | bool | int):
            kind = type(part[0]).__name__
            raise HeadstartError(f"{split}: labels in {column!r} are {kind} values; give text or whole numbers")
        if isinstance(part[0], str) != isinstance(values["train"][0], str):
            raise HeadstartError(f"labels in {column!r} are text in one of train and {split} only; write them alike")
    if isinstance(values["train"][0], str):
        names = tuple(sorted({value for part in values.values() for value in part}))
        number = {name: index for index, name in enumerate(names)}
        return names, {split: np.array([number[value] for value in part], np.int64) for split, part in values.items()}
    try:
        labels = {split: np.array(part, np.int64) for split, part in values.items()}
    except OverflowError:
        raise HeadstartError(f"labels in {column!r} go beyond 64 bits; number the classes from 0") from None
    listed = _class_names(tables["train"], column)
    for split, numbers in labels.items():
        names = _class_names(tables[split], column)
        if listed and names and names != listed:
            raise HeadstartError(
                f"{split}: {column!r} lists other classes than the training split, or in another order"
            )
        check_labels(numbers, f"{split}, column {column!r}", len(listed) or None)
    return listed or numbered(int(max(numbers.max() for numbers in labels.values())) + 1), labels


def _values(table: Any, column: str) -> list[Any]:
    """A whole column at once: row by row a million takes ten seconds."""
    values: list[Any] = table.select_columns([column])[:][column]
    return values


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
    _refuse_missing({split: tables[split] for split in have}, str(column))
    values = []
    for split in have:
        feature, ids = tables[split].features[column], _values(tables[split], str(column))
        values.append(feature.int2str(ids) if hasattr(feature, "int2str") else ids)
    numbers, names = codes([value for part in values for value in part])
    bounds = np.cumsum([len(part) for part in values])[:-1]
    return dict(zip(have, np.split(numbers, bounds), strict=True)), names


def _are_images(tables: Tables, inputs: tuple[str, ...]) -> bool:
    """Whether the inputs are images; where they are not, they are texts, and anything else is refused."""
    kinds = set()
    for split, table in tables.items():
        for name in inputs:
            if name not in table.column_names:
                raise HeadstartError(f"{split}: no column {name!r}; the columns are {', '.join(table.column_names)}")
            feature = table.features[name]
            as_bytes = feature == datasets.Value("binary") or (
                isinstance(feature, dict) and {"bytes", "path"} <= {*feature}
            )
            is_text = isinstance(feature, datasets.Value) and "string" in feature.dtype
            kinds.add("image" if isinstance(feature, datasets.Image) or as_bytes else "text" if is_text else "other")
            if "other" in kinds or (len(inputs) > 1 and "image" in kinds) or len(kinds) > 1:
                raise HeadstartError(
                    f"data.input_column: {name!r} of the {split} split holds {feature}; give images, texts or two texts"
                )
            _refuse_missing({split: table}, name)
    return kinds == {"image"}


def _class_names(table: Any, column: str) -> tuple[str, ...]:
    return tuple(str(name) for name in getattr(table.features[column], "names", None) or ())


def _missing(table: Any, column: str) -> Ints:
    """Rows where a column has no value."""
    return np.flatnonzero(table.data.column(column).is_null().to_numpy())


def _refuse_missing(tables: Tables, column: str) -> None:
    missing = {split: rows for split, table in tables.items() if len(rows := _missing(table, column))}
    if missing:
        problems = [
            f"{split}: {len(rows)} examples have no {column!r}, in row {listed(rows)}"
            for split, rows in missing.items()
        ]
        raise HeadstartError(f"{'; '.join(problems)}; data.skip_unreadable = true leaves them out")


def _complete(table: Any, columns: Iterable[str | None], split: str, notes: list[str]) -> Any:
    """The rows of a table that have a value in all of these columns."""
    there = [column for column in dict.fromkeys(columns) if column in table.column_names]
    missing = np.unique(np.concatenate([_missing(table, str(column)) for column in there]))
    if not len(missing):
        return table
    names = ", ".join(map(str, there))
    lack = f"{len(missing)} of {len(table)} rows lack one of {names}"
    notes.append(f"{split}: {lack}, and are left out: {listed(missing)} (from 0)")
    with _quiet():  # flat, since a selection's own table still has the rows that were left out
        return table.select(np.setdiff1d(np.arange(len(table)), missing)).flatten_indices()


def _keep(examples: Examples, classes: tuple[str, ...], only: tuple[str, ...]) -> Examples:
    """The examples of some classes, renumbered in the order given."""
    number = np.full(len(classes), -1)
    number[[classes.index(name) for name in only]] = np.arange(len(only))
    return examples.relabelled(number[examples.labels]).take(np.flatnonzero(number[examples.labels] >= 0))


@contextmanager
def _quiet() -> Iterator[None]:
    """No log lines of the library underneath: headstart says what is wrong."""
    were_on, level = datasets.is_progress_bar_enabled(), datasets.logging.get_verbosity()
    if not sys.stderr.isatty():  # on a terminal, a long download may show itself
        datasets.disable_progress_bars()
    datasets.logging.set_verbosity(logging.CRITICAL)
    try:
        yield
    finally:
        datasets.logging.set_verbosity(level)
        if were_on:
            datasets.enable_progress_bars()
