"""A commented recipe for some data, from a look at them."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import tomli_w

from headstart.config.recipe import Data, Recipe
from headstart.config.toml import check_text
from headstart.data import Dataset, load_dataset
from headstart.data.csv_files import guess_csv
from headstart.data.describe import grey_range
from headstart.data.examples import numbered
from headstart.data.folders import is_image
from headstart.data.tables import FORMATS, completion_columns, local_tables, split_column
from headstart.errors import HeadstartError, nearest_path
from headstart.runner.advise import BACKBONES

_LABELS = ("label", "labels", "class", "target", "category", "diagnosis", "y")
_CLIENTS = (
    "client", "client_id", "hospital", "hospital_id", "site", "site_id", "center", "centre", "institution", "clinic",
    "user", "user_id", "writer_id", "patient", "patient_id", "subject", "device",
)  # fmt: skip
_INPUTS = ("image", "img", "file_name", "path", "file", "filename", "image_path", "text", "sentence")
_EACH = 20  # training examples that a client is given, where the data name no clients
_FEW = 10  # clients: a covariance from so few means is worth little
_COMPLETES = """\
[model]
backbone = "smollm2-135m"  # or hf/ID, or a folder: any causal or sequence-to-sequence model of transformers
task = "generate"
max_tokens = 256  # of a prompt with its completion; a run says how many examples have more, and are cut

[[stages]]
method = "fedavg"  # fedmezo sends a seed and a few numbers a round; headstart methods lists them all
train = "lora"
optimiser = "adamw"
lr = 1e-3
rounds = 10
batch_size = 8
"""


@dataclass(frozen=True)
class NewRecipe:
    """The text of a recipe, and what was seen, in a sentence, with the columns of a table in a second line."""

    text: str
    seen: str


def new_recipe(path: Path, shown: str, name: str) -> NewRecipe:
    """A recipe for the data in a file or folder; shown: the path as the recipe is to name it."""
    if not path.exists():
        raise HeadstartError(f"{path}: {nearest_path(str(path))}")
    check_text(shown)
    columns = None if path.suffix.lower() == ".npz" else _columns(path)
    completes = columns is not None and columns.completes
    keys: dict[str, Any] = dict(columns.keys) if columns else {}
    alone = {"partition": {"kind": "iid", "clients": 1}} if "client_column" not in keys else {"partition": _NATURAL}
    wanted = {"dataset": str(path), "split_seed": 0, **alone}
    try:
        dataset = load_dataset(Data.model_validate({**wanted, **keys}), unlabelled=completes)
    except HeadstartError as error:
        if "skip_unreadable" not in str(error):
            raise
        keys["skip_unreadable"] = True  # the recipe says so, and loading tells what is left out
        dataset = load_dataset(Data.model_validate({**wanted, **keys}))
    if used := _used(dataset):
        keys["classes"] = used
        dataset = load_dataset(Data.model_validate({**wanted, **keys}))
    clients = len(dataset.clients)
    how: Mapping[str, Any] = _NATURAL if clients else _dealt(dataset, completes)
    count = clients or how["clients"]
    model = _COMPLETES if completes else _model(dataset, count)
    text = _text(name, {"dataset": shown, **keys}, how, columns) + model
    Recipe.parse(tomllib.loads(text))  # what is written can be run
    things = "features" if dataset.kind == "features" else f"{dataset.kind}s"
    learned = f"{len(dataset.classes)} classes" if dataset.target == "classes" else f"targets ({dataset.target})"
    learned = "to be completed" if completes else learned
    held = f"{clients} clients" if clients else f"no clients: the recipe deals them out to {count}"
    count = sum(map(len, dataset.splits.values()))
    return NewRecipe(text, f"{count:,} {things}, {learned}, {held}" + (f"\n{columns}" if str(columns or "") else ""))


_NATURAL: Mapping[str, Any] = {"kind": "natural", "test": "follow"}


def _used(dataset: Dataset) -> list[int]:
    """Labels that are numbers and do not number the classes 0, 1, …: those that there are; otherwise none."""
    labels = np.unique(np.concatenate([examples.labels for examples in dataset.splits.values()]))
    complete = len(labels) == len(dataset.classes) or dataset.target != "classes"
    return [] if complete or dataset.classes != numbered(len(dataset.classes)) else labels.tolist()


@dataclass(frozen=True)
class _Columns:
    """Which column of a table is what, and the keys of [data] that say so and how files are written."""

    keys: dict[str, str]
    used: dict[str, str | None]
    others: tuple[str, ...]
    """Those that are not read."""
    named: bool
    """Whether somebody has named the columns: those of a folder of images are its folders."""
    completes: bool = False
    """Whether they are prompts with their completions, or chats."""

    def __str__(self) -> str:
        if not self.named:
            return ""
        used = ", ".join(f"{what} = {name or 'none'}" for what, name in self.used.items())
        return f"columns: {used}" + (f"; not read: {', '.join(self.others)}" if self.others else "")


def _columns(path: Path) -> _Columns:
    """A guess at the columns, by their names or else their contents."""
    files = [path] if path.is_file() else sorted(path.iterdir())
    tables = [file for file in files if FORMATS.get(file.suffix.lower()) == "csv" and not file.name.startswith(".")]
    keys: dict[str, str] = guess_csv(tables[0]) if tables else {}
    found = local_tables(path, Data.model_validate({"dataset": str(path), "skip_unreadable": True, **keys}), [])
    table = found.get("train", next(iter(found.values())))
    split = split_column(found)
    columns = {column: table.features[column] for column in table.column_names if column != split}
    client = _first(_CLIENTS, columns)
    label = _first(_LABELS, columns)
    completed = () if label else completion_columns(columns)
    others = [column for column in columns if column not in (client, *completed)]
    used: dict[str, str | None] = {}
    if completed:
        used |= zip(("prompt", "completion") if len(completed) == 2 else ("chat",), completed, strict=True)
    else:
        given, guess = _labelled(path, table, others, label)
        usual = {"input_column": (given, _INPUTS), "label_column": (guess, ("label", "labels", "class"))}
        keys |= {key: name for key, (name, known) in usual.items() if name not in known}
        used |= {"input": given, "label": label or f"{guess} (a guess: it has the fewest values)"}
        others = [column for column in others if column not in (given, guess)]
    keys |= {"client_column": client} if client else {}
    likely = None if client else _fewest(table, others)
    unnamed = f"none (write client_column = {likely!r} if its values are the clients)" if likely else None
    used |= {"client": client or unnamed} | ({"split": split} if split else {})
    named = any(file.suffix.lower() in FORMATS for file in files)
    return _Columns(keys, used, tuple(others), named, bool(completed))


def _labelled(path: Path, table: Any, columns: list[str], label: str | None) -> tuple[str, str]:
    """The columns of inputs and of labels; label: the latter, where its name says so."""
    label = label or _fewest(table, columns)
    others = [column for column in columns if column != label]
    given = _first(_INPUTS, others) or _longest(table, others)
    if label is None or given is None:
        raise HeadstartError(
            f"{path}: which column is the input, and which the label? The columns are "
            f"{', '.join(table.column_names)}; name them image or text, and label, or prompt and completion, or write "
            "a recipe with data.input_column and data.label_column"
        )
    return given, label


def _first(names: Iterable[str], columns: Iterable[str]) -> str | None:
    """The first of these names that a column has, whatever its case."""
    there = {column.lower(): column for column in columns}
    return next((there[name] for name in names if name in there), None)


def _fewest(table: Any, columns: Iterable[str]) -> str | None:
    """The column with the fewest values but for case, spaces and gaps, if there are few of them beside the rows."""
    plain = [
        column
        for column in columns
        if isinstance(table.features[column], datasets.ClassLabel | datasets.Value)
        and not re.match("float|double|binary", getattr(table.features[column], "dtype", ""))
    ]
    values = {column: [each for each in table.unique(column) if each is not None] for column in plain}
    sizes = {
        column: len({" ".join(str(each).split()).casefold() for each in found}) for column, found in values.items()
    }
    few = {column: size for column, size in sizes.items() if 2 <= size <= max(2, len(table) // 5)}
    return min(few, key=few.__getitem__) if few else None


def _longest(table: Any, columns: Iterable[str]) -> str | None:
    """The column of images, of their paths, or else of the longest texts."""
    lengths = {}
    for column in columns:
        feature = table.features[column]
        if isinstance(feature, datasets.Image):
            return column
        if isinstance(feature, datasets.Value) and "string" in feature.dtype:
            values = [str(value or "") for value in table[:200][column]]
            lengths[column] = float("inf") if is_image(values[0]) else sum(map(len, values))
    return max(lengths, key=lengths.__getitem__) if lengths else None


def _dealt(dataset: Dataset, completes: bool) -> dict[str, Any]:
    """A partition for data that name no clients."""
    clients = max(2, min(10, len(dataset.train) // _EACH))
    if completes or dataset.target != "classes":
        return {"kind": "iid", "clients": clients}
    return {"kind": "dirichlet", "clients": clients, "alpha": 0.5, "leftovers": "assign"}


def _text(name: str, keys: Mapping[str, Any], how: Mapping[str, Any], columns: _Columns | None) -> str:
    """The recipe as far as it is about data."""
    natural = how["kind"] == "natural"
    dealt = "deals the examples out; leave this table out where data.client_column names clients"
    why = "the clients that the data name" if natural else dealt
    skip = "# skip_unreadable = true # leave out what cannot be read, instead of stopping\n"
    skip = "" if "skip_unreadable" in keys else skip
    keys_of = "input_column" if columns and columns.completes else "input_column, label_column"
    guessed = f"# {columns}; {keys_of} and client_column name others\n" if str(columns or "") else ""
    return f"""\
# headstart check FILE shows what is wrong with this recipe and odd about its data; headstart run FILE runs it.
{tomli_w.dumps({"name": name})}seed = 0

[data]  # a path is relative to where the command runs, or to this file
{guessed}{tomli_w.dumps(dict(keys))}test_fraction = 0.2    # held out for the test, where the data have no test split
split_seed = 0         # the same test examples whatever the seed of the run
# strict = true          # refuse data with warnings: labels alike but for case, classes without examples
{skip}
[data.partition]  # {why}
{tomli_w.dumps(dict(how))}
"""


def _model(dataset: Dataset, clients: int) -> str:
    """The recipe from the backbone on, for a head from statistics."""
    method = "fedcof" if dataset.target == "classes" and clients >= _FEW else "fed3r"
    reason = {
        "fedcof": "class means and counts of each client, in one round",
        "fed3r": "second moments of each client, in one round"
        + ("; with few clients it is more accurate than fedcof" if dataset.target == "classes" else ""),
    }[method]
    shades = grey_range(dataset.train) if dataset.kind == "image" else None
    black_white = (
        "pixel_range = [{:g}, {:g}]  # black and white, by a few of the images\n".format(*shades) if shades else ""
    )
    return f"""\
[model]
backbone = "{BACKBONES[dataset.kind]}"  # headstart backbones lists others
{black_white}
[[stages]]
method = "{method}"  # {reason}
# headstart advise FILE measures which method suits these data; headstart methods lists them all
"""
