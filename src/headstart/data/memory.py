"""Data that are in memory: arrays, tensors, data frames, Hugging Face data sets, lists of images or of texts."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageOps

from headstart.config.recipe import Data
from headstart.data.examples import (
    Dataset,
    Examples,
    Ints,
    Kind,
    check_labels,
    codes,
    not_finite,
    numbered,
    read_targets,
)
from headstart.errors import HeadstartError

SPLITS = ("train", "validation", "test")
_PNG_MODES = ("1", "L", "LA", "P", "RGB", "RGBA", "I", "I;16", "I;16B")
_COLUMNS = ("X", "y", "split", "client", "domain")
_ACCEPTED = (
    "a pair (X, y), a mapping with X and y and optionally split, client and domain, a DataFrame, a Hugging Face data "
    "set, a torch data set of pairs, or a mapping of train, validation and test to any of these"
)


def from_memory(given: Any, data: Data, unlabelled: bool = False) -> Dataset:
    """A data set from what a caller holds; without a test split, `test` is empty and is to be cut from `train`.

    unlabelled: whether it is a table of prompts and completions.
    """
    dataset = _read(given, data, unlabelled)
    return replace(dataset, fingerprint=_fingerprint(dataset))


def _read(given: Any, data: Data, unlabelled: bool) -> Dataset:
    tables = _tables(given)
    if tables is not None:
        from headstart.data.tables import from_tables, of_completions

        return of_completions(data, tables) if unlabelled else from_tables(data, None, tables, [])
    if unlabelled:
        raise HeadstartError("data: prompts and completions are columns; give a DataFrame or a Hugging Face data set")
    parts = [_columns(given)]
    if isinstance(given, Mapping) and given and set(given) <= set(SPLITS):
        parts = [_columns(part) | {"split": [split] * len(_columns(part)["X"])} for split, part in given.items()]
    kinds = {kind for kind, _ in (inputs(part["X"]) for part in parts)}
    if len(kinds) > 1:
        raise HeadstartError(f"data: X is {' and '.join(sorted(kinds))} in different splits; give one kind")
    return _dataset(kinds.pop(), {name: _joined([p[name] for p in parts]) for name in parts[0]}, data)


def _fingerprint(dataset: Dataset) -> str:
    """Hash of inputs, labels and targets: whether two runs see the same data."""
    digest = hashlib.blake2b(digest_size=16)
    for split in (dataset.train, dataset.validation, dataset.test):
        if split is not None:
            digest.update(split.fingerprint().encode() + split.labels.tobytes())
            digest.update(b"" if split.targets is None else split.targets.tobytes())
    return digest.hexdigest()


def names_clients(given: Any) -> bool:
    """Whether the data say whose an example is, in what is called or in a column `client`."""
    parts = given.values() if isinstance(given, Mapping) and set(given) <= set(SPLITS) else [given]
    return all("client" in _names(part) for part in parts)


def _names(part: Any) -> Any:
    """What is told of every example: of a mapping, a Hugging Face data set or a data frame."""
    return part if isinstance(part, Mapping) else getattr(part, "column_names", getattr(part, "columns", ()))


def inputs(X: Any) -> tuple[Kind, Any]:
    """What some inputs are, and all of them as the source of examples [n, …]: an array, or records of any kind."""
    values = X if isinstance(X, list | tuple) else _array(X)
    if isinstance(values, np.ndarray) and values.dtype.kind in "OU":
        values = list(values)
    if isinstance(values, np.ndarray):
        if values.ndim == 2 and values.dtype.kind in "fiu":
            return "features", values
        return "image", _pixels(values)
    if not values:
        raise HeadstartError("data: X is empty; give at least one example")
    if all(isinstance(value, str) for value in values) or all(_is_pair(value) for value in values):
        return "text", np.fromiter(map(_tuple, values), object, len(values))
    if all(isinstance(value, Image.Image | Path) for value in values):
        return "image", np.fromiter(map(_record, values), object, len(values))
    arrays = [_array(value) for value in values]
    if len({array.shape for array in arrays}) > 1:
        raise HeadstartError("data: arrays in X have different shapes; give images of several sizes as PIL images")
    return inputs(np.stack(arrays))


def _tables(given: Any) -> dict[str, Any] | None:
    """Hugging Face tables by split, where that, or a data frame with columns of inputs, is what was given."""
    import datasets
    import pandas

    if isinstance(given, datasets.Dataset):
        return {"train": given}
    if isinstance(given, pandas.DataFrame):
        return {"train": datasets.Dataset.from_dict({str(name): given[name].tolist() for name in given.columns})}
    if isinstance(given, Mapping) and given and not set(given) & {"X", "y"}:
        found = {str(split): _tables(part) for split, part in given.items()}
        if all(found.values()):
            return {split: table["train"] for split, table in found.items() if table}
    return None


def _columns(given: Any) -> dict[str, Any]:
    """X, y and what else is told of each example, by name."""
    if isinstance(given, Mapping) and not (given and set(given) <= set(SPLITS)):
        if missing := [name for name in ("X", "y") if name not in given]:
            there = ", ".join(map(str, given)) or "nothing"
            raise HeadstartError(f"data: a mapping without {' and '.join(missing)}: it has {there}; give {_ACCEPTED}")
        if unknown := [str(name) for name in given if name not in _COLUMNS]:
            raise HeadstartError(f"data: {', '.join(unknown)} is not known; accepted: {', '.join(_COLUMNS)}")
        found = dict(given)
    elif isinstance(given, tuple | list) and len(given) == 2:
        found = {"X": given[0], "y": given[1]}
    elif isinstance(given, Mapping):
        return {"X": [], "y": []}  # its parts are read one by one
    elif hasattr(given, "__getitem__") and hasattr(given, "__len__") and not isinstance(given, np.ndarray | str):
        pairs = [given[number] for number in range(len(given))]
        if not pairs or any(not isinstance(pair, tuple | list) or len(pair) != 2 for pair in pairs):
            raise HeadstartError(f"data: a {type(given).__name__} is not understood; give {_ACCEPTED}")
        found = {"X": [pair[0] for pair in pairs], "y": [pair[1] for pair in pairs]}
    else:
        raise HeadstartError(f"data: a {type(given).__name__} is not understood; give {_ACCEPTED}")
    for name, values in found.items():
        if len(values) != len(found["X"]):
            raise HeadstartError(f"data: {name} has {len(values)} values for {len(found['X'])} examples in X")
    return found


def _dataset(kind: Kind, columns: Mapping[str, Any], data: Data) -> Dataset:
    _, source = inputs(columns["X"])
    if kind == "features":
        with np.errstate(over="ignore"):
            source = source.astype(np.float32, order="C", copy=False)
        if len(bad := not_finite(source)):
            raise HeadstartError(
                f"data: {len(bad)} of {len(source)} rows of X hold NaN, infinity or values beyond float32, the first "
                f"at row {bad[0]}; clean them or scale them down"
            )
    y = _array(columns["y"])
    targets = read_targets({"": y}, data.target, "data: y") if y.dtype.kind in "fiub" else None
    if targets is not None:
        values, classes = targets[1][""], tuple(f"y{number}" for number in range(targets[1][""].shape[1]))
        labels, classes = np.zeros(len(y), np.int64), classes if len(classes) > 1 else ("y",)
    else:
        values, (labels, classes) = None, _labels(y)
    nobody: tuple[None, tuple[str, ...]] = (None, ())
    clients, client_names = codes(_array(columns["client"])) if "client" in columns else nobody
    domains, domain_names = codes(_array(columns["domain"])) if "domain" in columns else nobody
    whole = Examples(kind, source, (), np.arange(len(source)), labels, clients, domains, values)
    split = _split(columns.get("split", np.zeros(len(source), np.int64)))
    train, validation, test = (whole.take(np.flatnonzero(split == number)) for number in range(3))
    if not len(train):
        raise HeadstartError("data: no example is in the training split; its split is 0, or 'train'")
    target = targets[0] if targets else "classes"
    kept = validation if len(validation) else None
    return Dataset(data.dataset, classes, train, test, kept, client_names, domain_names, target)


def _labels(y: npt.NDArray[Any]) -> tuple[Ints, tuple[str, ...]]:
    """Labels [n] as numbers from 0, and the names of the classes."""
    if y.ndim != 1:
        raise HeadstartError(f"data: y must be labels [n]; it is {y.dtype} {list(y.shape)}")
    if y.dtype.kind in "iub":
        check_labels(y.astype(np.int64), "data: y")
        return y.astype(np.int64), numbered(int(y.max()) + 1)
    if not all(isinstance(value, str) for value in y.tolist()):
        raise HeadstartError(f"data: labels in y are {y.dtype}; give text or whole numbers")
    return codes(y)


def _split(given: Any) -> Ints:
    """0 train, 1 validation, 2 test [n], from the same or from their names."""
    split = _array(given)
    if split.dtype.kind not in "iu":
        split = np.array([SPLITS.index(name) if name in SPLITS else -1 for name in split.tolist()])
    if len(split) and (split.min() < 0 or split.max() > 2):
        raise HeadstartError("data: split must be 0 (train), 1 (validation) or 2 (test), or these names")
    return split.astype(np.int64)


def _array(values: Any) -> npt.NDArray[Any]:
    """A tensor, series, frame or list as an array."""
    if hasattr(values, "detach"):
        values = values.detach().cpu()
    if hasattr(values, "to_numpy"):
        values = values.to_numpy()
    return np.asarray(values)


def _pixels(values: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
    """Images [n, H, W] or [n, H, W, 3] of bytes, from bytes or shares of 1, colours last or first."""
    if values.ndim == 4 and values.shape[1] in (1, 3) and values.shape[3] not in (1, 3):
        values = np.moveaxis(values, 1, 3)
    if values.ndim == 4 and values.shape[3] == 1:
        values = values[..., 0]
    if values.ndim not in (3, 4) or (values.ndim == 4 and values.shape[3] != 3):
        raise HeadstartError(
            f"data: X is {values.dtype} {list(values.shape)}; give features [n, d], or images [n, H, W], "
            "[n, H, W, 3] or [n, 3, H, W]"
        )
    if values.dtype.kind == "f":
        if not (values.min() >= 0 and values.max() <= 1):  # NaN, too
            raise HeadstartError("data: images of floats are shares between 0 and 1; give bytes, or divide by 255")
        values = np.rint(values * 255)
    elif values.dtype != np.uint8 and (values.min() < 0 or values.max() > 255):
        raise HeadstartError(
            "data: images of whole numbers are bytes between 0 and 255; scale them, or give PIL images"
        )
    return np.ascontiguousarray(values.astype(np.uint8))


def _record(value: Image.Image | Path) -> dict[str, Any]:
    """An image as the record that Hugging Face's tables have; grey keeps its 16 or 32 bits."""
    if isinstance(value, Path):
        return {"bytes": None, "path": str(value)}
    written = io.BytesIO()
    image = ImageOps.exif_transpose(value)
    # Pillow's "I" is 16 bits where the format has no more; a PNG would cut 32 bits off.
    if image.mode == "F" or (image.mode == "I" and value.format not in ("PNG", "PPM")):
        image.save(written, "TIFF")
    else:
        image = image if image.mode in _PNG_MODES else image.convert("RGB")
        image.save(written, "PNG", compress_level=1)
    return {"bytes": written.getvalue(), "path": None}


def _is_pair(value: Any) -> bool:
    return isinstance(value, tuple | list) and len(value) == 2 and all(isinstance(part, str) for part in value)


def _tuple(value: Any) -> Any:
    return value if isinstance(value, str) else tuple(value)


def _joined(parts: Sequence[Any]) -> Any:
    """A column of all splits, one after the other."""
    if len(parts) == 1:
        return parts[0]
    if all(isinstance(part, list | tuple) for part in parts):
        return [value for part in parts for value in part]
    return np.concatenate([_array(part) for part in parts])
