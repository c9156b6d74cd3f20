"""The model of a finished run: rebuilt from its directory, and asked for predictions."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open
from safetensors.numpy import load_file
from scipy.special import softmax

from headstart.config.recipe import Data, Recipe
from headstart.core.files import csv_text, write_text
from headstart.core.metrics import label_shares
from headstart.core.statistics import Ints
from headstart.core.target import Target
from headstart.data.examples import Examples, Kind, numbered
from headstart.engine.model_store import PRETRAINED, ModelStore, Module, Version
from headstart.errors import HeadstartError, nearest, no_run
from headstart.export.inputs import held, read
from headstart.heads import LinearHead
from headstart.records import RunDirectory, StageModel
from headstart.records.readers import read_rows, unreadable

if TYPE_CHECKING:
    import pandas

Arrays = dict[str, npt.NDArray[Any]]

_FEW = 256  # a compiled body, a cache and a progress bar do not pay for fewer examples


@dataclass(frozen=True, eq=False, repr=False)
class Predictions:
    """What a model says of some inputs: the class [n] with the highest score, and all probabilities [n, C].

    Of targets that are no classes: the numbers themselves [n, q], or the share of examples like it that have each label
    [n, q], in the place of probabilities.
    """

    inputs: list[str]
    classes: tuple[str, ...]
    labels: Ints
    probabilities: npt.NDArray[np.float64]
    target: Target = "classes"

    @property
    def names(self) -> list[str]:
        """The class [n] of each input, by its name."""
        return [self.classes[label] for label in self.labels]

    def to_frame(self) -> pandas.DataFrame:
        """A row for each input: the class or the labels, and a column for every class, label or number."""
        import pandas

        columns, rows = self._whole()
        return pandas.DataFrame(rows, columns=columns)

    def __len__(self) -> int:
        return len(self.inputs)

    def __repr__(self) -> str:
        return f"<Predictions: {len(self):,} inputs, {len(self.classes):,} {self.target}>"

    def _repr_html_(self) -> str:
        html: str = self.to_frame()._repr_html_()
        return html

    def table(self) -> tuple[list[str], list[list[str]]]:
        """Columns and rows for a reader: each input with its class and the probability of that, with its numbers, or
        with its labels."""
        if self.target == "classes":
            return ["input", "class", "probability"], [[given, name, f"{p:.4f}"] for given, name, p in self.best()]
        if self.target == "multilabel":
            return ["input", "labels"], [[given, names] for given, names in zip(self.inputs, self._has(), strict=True)]
        found = zip(self.inputs, self.probabilities, strict=True)
        return ["input", *self.classes], [[given, *(f"{value:.6g}" for value in row)] for given, row in found]

    def _has(self) -> list[str]:
        """The labels of each input, one after the other."""
        return [
            "; ".join(name for name, share in zip(self.classes, row, strict=True) if share > 0.5)
            for row in self.probabilities
        ]

    def best(self) -> list[tuple[str, str, float]]:
        """Each input with its class and the probability of that."""
        found = zip(self.inputs, self.labels, self.probabilities, strict=True)
        return [(each, self.classes[label], float(row[label])) for each, label, row in found]

    def _whole(self) -> tuple[list[str], list[list[Any]]]:
        """Columns and rows with all numbers."""
        named = {"classes": self.names, "multilabel": self._has()}.get(self.target)
        columns = ["input", *(["predicted"] if named else []), *self.classes]
        found = enumerate(zip(self.inputs, self.probabilities.tolist(), strict=True))
        return columns, [[each, *([named[place]] if named else []), *row] for place, (each, row) in found]

    def write(self, path: Path) -> None:
        """A CSV file: the input, the class or the labels, and a column for every class, label or number."""
        columns, rows = self._whole()
        shown = [[f"{value:.6g}" if isinstance(value, float) else value for value in row] for row in rows]
        try:
            write_text(path, csv_text([columns, *shown]))
        except OSError as error:
            raise HeadstartError(f"--out {path}: cannot write there: {error.strerror or error}") from None


@dataclass(frozen=True, eq=False, repr=False)
class Model:
    """The model of a finished run: the one of all clients, or a client's own."""

    recipe: Recipe
    data: Data
    """The data of the task: they say which columns its inputs are in."""
    classes: tuple[str, ...]
    head: LinearHead
    store: ModelStore
    retrained: bool
    """Whether the body has other weights than those that the backbone's name stands for."""
    target: Target = "classes"

    @classmethod
    def load(
        cls, run: Path | str, task: str | None = None, client: str | None = None, module: Path | str | None = None
    ) -> Model:
        """Rebuild it from the run's directory; ``module``: a file to put on the body instead, with the head in it."""
        run, module = Path(run), None if module is None else Path(module)
        if client is not None and module is not None:
            raise HeadstartError("--client and --module: a client's own model has its own module; give one of the two")
        recipe, named = _finished(run)
        last = len(recipe.stages) - 1
        model = RunDirectory(run).load_model(last)[0]
        own: Arrays = {}
        if client is not None:
            task, own = _client(run, last, model, client, task, named)
        if task is None and len(named) > 1 and module is None:
            raise HeadstartError(f"{run} has several tasks: {', '.join(named)}; choose one with --task")
        task = task or next(iter(named))
        if task not in named:
            raise HeadstartError(f"--task: {task!r} is no task of {run}; {nearest(task, named)}")
        folder, classes = run / "model", tuple(named[task])
        head = _arrays(folder / (f"head-{task}.safetensors" if len(named) > 1 else "head.safetensors"))
        weights = _arrays(folder / "model.safetensors") if (folder / "model.safetensors").is_file() else Arrays()
        file, made = module or folder / f"module-{task}.safetensors", None
        if module is not None or file.is_file():
            made, head = _module(file)
            classes = classes if module is None else _classes_beside(file, len(head["bias"]))
        recipe = recipe.model_copy(update={"model": recipe.model_of(list(named).index(task))})
        store = ModelStore(recipe.model, None)
        if any(name.startswith("body.") for name in own):
            weights = weights or dict(store.arrays())
        parts = {"head": head, "module": dict(made.values[0]) if made else {}, "body": weights}
        for name, array in own.items():
            part, _, plain = name.partition(".")
            parts[part][plain] = array
        made = made and Module(made.kind, made.settings, (parts["module"],))
        stage = recipe.stages[model.body] if model.body != PRETRAINED else None
        norm_statistics = stage.norm_statistics if stage else "freeze"
        version = Version(0 if weights else PRETRAINED, norm_statistics, weights or None, made)
        _build(store, version, file, width_of(head))
        data = recipe.data or next(each for each in recipe.tasks if each.name == task)
        retrained = bool(weights) or recipe.model.weights is not None
        target = (RunDirectory(run).summary() or {}).get("target", "classes")
        return cls(recipe, data, classes, LinearHead.of_arrays(parts["head"]), store, retrained, target)

    def __repr__(self) -> str:
        return f"<Model {self.recipe.name}: {self.recipe.model.backbone}, {len(self.classes):,} {self.target}>"

    @property
    def kind(self) -> Kind:
        """What the model reads."""
        return self.store.backbone.kind if self.store.backbone else "features"

    @property
    def cloze(self) -> bool:
        """Whether the body is a masked language model under a prompt."""
        return "{mask}" in (self.recipe.model.prompt or "")

    @property
    def auto(self) -> str:
        """The class of `transformers` that loads the body."""
        core: Any = self.store.backbone.core if self.store.backbone else None
        if self.recipe.model.label_words is None and not self.store.generates:
            return "AutoModel"
        answers = "Seq2SeqLM" if core.config.is_encoder_decoder else "CausalLM"
        return f"AutoModelFor{'MaskedLM' if self.cloze else answers}"

    @property
    def speaks(self) -> bool:
        """Whether the body is a language model with its vocabulary, under a prompt."""
        return self.auto != "AutoModel"

    def scores(self, examples: Examples) -> npt.NDArray[np.float32]:
        """Scores [n, C]; minus infinity for a class that is masked."""
        return self.head.scores(self.features(examples))

    def features(self, examples: Examples) -> npt.NDArray[np.float32]:
        """Features [n, d]."""
        if self.store.backbone is None:
            return examples.features()
        from headstart.backbones import embed, extract

        return (embed if len(examples) < _FEW else extract)(self.store.backbone, examples, "inputs")

    def predict(self, inputs: Any, skip_unreadable: bool = False) -> Predictions:
        """The classes, numbers or labels of new inputs: a list of files and folders (`pathlib.Path`), features [n, d],
        images [n, H, W, 3] or a list of PIL images, or a list of texts or of pairs of texts.

        skip_unreadable: files of images, and rows of tables, that cannot be read are left out, as they are where the
        run's recipe says so.
        """
        if _are_paths(inputs):
            inputs, examples = self.read(inputs, skip_unreadable)
        else:
            inputs, examples = held(inputs, self.kind, self.width)
        scores = self.scores(examples).astype(np.float64)
        values = {"regression": scores, "multilabel": label_shares(scores)}.get(self.target)
        shown = softmax(scores, axis=1) if values is None else values
        return Predictions(inputs, self.classes, scores.argmax(axis=1), shown, self.target)

    def read(self, paths: Sequence[Path], skip_unreadable: bool = False) -> tuple[list[str], Examples]:
        """Inputs from files and folders: how each is to be shown, and all as examples."""
        data = self.data.model_copy(update={"skip_unreadable": True}) if skip_unreadable else self.data
        return read(paths, self.kind, data, self.width)

    @property
    def width(self) -> int:
        """Length of the feature vectors that the head reads."""
        return width_of(self.head.arrays())


def _are_paths(inputs: Any) -> bool:
    return isinstance(inputs, list | tuple) and bool(inputs) and all(isinstance(each, Path) for each in inputs)


def _finished(run: Path) -> tuple[Recipe, dict[str, list[str]]]:
    """The recipe of a finished run, and the classes of each of its tasks."""
    if not (run / "recipe.toml").is_file():
        raise no_run(run)
    if not (run / "summary.json").is_file():
        raise HeadstartError(f"the run in {run} is not finished; continue it with headstart run --resume --out {run}")
    return Recipe.load(run / "recipe.toml"), RunDirectory(run).classes()


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise HeadstartError(f"cannot read {path}: {error}") from None


def _arrays(path: Path) -> Arrays:
    try:
        return dict(load_file(path))
    except (OSError, SafetensorError) as error:
        raise HeadstartError(f"cannot read {path}: {error}") from None


def _module(path: Path) -> tuple[Module, Arrays]:
    """A module from its file, and the head beside it."""
    arrays = _arrays(path)
    with safe_open(path, "np") as file:
        facts = file.metadata() or {}
    heads = {name.removeprefix("head."): arrays.pop(name) for name in [*arrays] if name.startswith("head.")}
    if "module" not in facts or not {"weight", "bias"} <= heads.keys():
        raise HeadstartError(f"{path} is no module with its head; give a run's model/module-TASK.safetensors")
    settings: dict[str, Any] = json.loads(facts["module"])
    return Module(settings.pop("kind"), settings, (arrays,)), heads


def _classes_beside(module: Path, count: int) -> tuple[str, ...]:
    """Names of a module's classes, where its run or its export says them; otherwise numbers."""
    beside = module.with_name("classes.json")
    named = _json(beside) if beside.is_file() else []
    names = named.get(module.stem.removeprefix("module-"), []) if isinstance(named, dict) else named
    return tuple(names) if len(names) == count else numbered(count)


def _build(store: ModelStore, version: Version, file: Path, width: int) -> None:
    """Put weights and a module, of this file, under a head of this width; batch norm is as the version says."""
    if store.backbone is None and version.module is not None:
        raise HeadstartError(f"--module {file}: the run's data are features, and there is no backbone to put it on")
    if store.backbone is None:
        return
    store.remember(0, version)
    try:
        store.load(0)
        fits = store.module_values().keys() == (version.module.values[0] if version.module else {}).keys()
    except (KeyError, RuntimeError):  # parameters that are not there, or of other shapes
        fits = False
    if not fits or width != store.backbone.dim:
        raise HeadstartError(f"{file} does not fit on {store.backbone.name}: it was made for another network")


def width_of(head: Mapping[str, npt.NDArray[Any]]) -> int:
    """Length of the feature vectors that a head reads."""
    first = next(name for name in ("projection", "hidden.0.weight", "weight") if name in head)
    return int(head[first].shape[1])


def _client(
    run: Path, last: int, model: StageModel, client: str, task: str | None, tasks: Iterable[str]
) -> tuple[str, Arrays]:
    """The task of a client, given by its name or number, and what is its own, by the name of the parameter.

    Nothing is its own where it has not taken part: it has everybody's model.
    """
    states = model.states
    if states is None or not (states.slots >= 0).any():
        raise HeadstartError(f"--client: in {run} no client has a model of its own; leave it out for everybody's")
    table = run / "clients.csv"
    names = [row[1] for row in read_rows(table)[1:] if len(row) > 1 and row[0] == str(last)]
    if len(names) != len(states.slots):
        raise unreadable(table, f"it names {len(names)} of {len(states.slots)} clients of the last stage")
    if client not in names and not (client.isdecimal() and int(client) < len(names)):
        alike = difflib.get_close_matches(client, names, n=20, cutoff=0)  # there may be thousands
        raise HeadstartError(
            f"--client: {client!r} is no client of {run}; {nearest(client, alike)}, or a number below {len(names)}"
        )
    number = names.index(client) if client in names else int(client)
    first, *others = tasks
    theirs = names[number].partition("/")[0] if others else first
    if task not in (None, theirs):
        raise HeadstartError(f"--client {client}: its task is {theirs}, not {task}; leave --task out")
    own: Arrays = {}
    for name in states.shapes if states.has(number) else ():
        plain, _, of = name.removeprefix("personal.").partition("@")
        if of in ("", theirs):
            own[plain] = states.read(name, None, np.array([number]))[0]
    return theirs, own
