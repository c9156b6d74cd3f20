"""Typed recipes: what a run reads, in TOML, with every default in this file and nowhere else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import tomli_w
from pydantic import (
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ValidationError,
    field_validator,
)

from headstart.config.partition import Dirichlet, Partition
from headstart.config.stage import STAGES, Stage, Table, load_plugins, of_family
from headstart.config.toml import flattened, read_table
from headstart.core.aggregation import aggregations
from headstart.core.target import Target
from headstart.errors import HeadstartError, RecipeError, nearest

ONE_TASK = "default"
"""The name of the task where a recipe has one."""
MEMORY = "memory"
"""The data set of a recipe whose data are given in Python, where it has no name."""


class Data(Table):
    """Where the examples come from and who holds them."""

    dataset: Annotated[str, Field(min_length=1)]
    """A known name (`headstart datasets`), a Hugging Face dataset id, or a path."""
    partition: Partition = Dirichlet()
    """Which client holds which example: a table with kind, and the keys of that kind."""
    input_column: str | Annotated[tuple[str, str], Field(strict=False)] | None = None
    """The column of images or texts, or two columns for pairs of texts; unset: the usual names."""
    label_column: str | Annotated[tuple[str, ...], Field(strict=False, min_length=1)] | None = None
    """The column of the label; several columns for targets of several numbers or labels."""
    client_column: str | None = None
    """The column that names the client of an example; without [data.partition], the kind is then "natural"."""
    domain_column: str | None = None
    """The column that names the domain of an example, for partition.kind = "domains"."""
    train_examples: PositiveInt | None = None
    """Keep a class-balanced random part of the training split."""
    test_examples: PositiveInt | None = None
    """Keep a class-balanced random part of the test split."""
    test_fraction: float = Field(default=0.2, gt=0, lt=1)
    """Share held out for the test where the data come without a test split."""
    split_seed: NonNegativeInt | None = None
    """What the examples held out for the test are drawn from; unset: the seed of the run, so that another seed is
    tested on other examples."""
    separator: Annotated[str, Field(min_length=1, max_length=1)] | None = None
    """Between the fields of a CSV file; unset: a comma, in a .tsv a tab."""
    encoding: str | None = None
    """Of a CSV file; unset: UTF-8."""
    skip_unreadable: bool = False
    """Leave out images that cannot be read and rows with missing or too many fields; otherwise they are an error."""
    strict: bool = False
    """Refuse data with warnings: labels alike but for case or spaces, classes without examples, files not read."""
    classes: Annotated[tuple[int | str, ...], Field(strict=False, min_length=1)] | None = None
    """Keep only these classes, by number or name, numbered in this order; of targets that are no classes, the names of
    all of them."""
    target: Target | None = None
    """What is learned: the class of an example, numbers ("regression"), or which of several labels it has
    ("multilabel"). Unset: what the data look like."""
    task: NonNegativeInt | None = None
    """Of a features file with several tasks, the one to take."""


class Task(Data):
    """One of several tasks that share a backbone: its data, and the clients that hold them."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
    """Names the task's files and clients."""
    prompt: str | None = None
    """The task's own prompt, in the place of model.prompt: that of its label words with model.task = "choose", or what
    its texts are read in where a head is on features."""
    label_words: Annotated[tuple[str, ...], Field(strict=False)] | None = None
    """With model.task = "choose": the words that stand for the task's classes, in their order."""


class Model(Table):
    """The backbone that turns an example into a feature vector."""

    backbone: str = "efficientnet-lite0"
    """A name of `headstart backbones`, hf/ID, torchvision/NAME, timm/NAME, a local folder, or "features"."""
    weights: str | None = None
    """A safetensors file, a `weights_only` checkpoint, or "random"."""
    preprocess: Literal["auto", "torch", "cifar10", "half", "lite", "caffe"] = "auto"
    """How pixels are normalised; "auto": as the backbone was trained."""
    resize: Literal["squash"] | PositiveInt = "squash"
    """"squash" to a square; a number: the shorter side to so many pixels, then a centre crop."""
    image_size: PositiveInt | None = None
    """Pixels of each side of what the backbone sees; unset: as it was trained."""
    pixel_range: Annotated[tuple[float, float], Field(strict=False)] | None = None
    """Of grey images of 16 or 32 bits, or of floats: the values that are black and white; unset: 0 and 65,535, and
    images of more bits are refused."""
    pooling: Literal["auto", "cls", "mean", "last"] = "auto"
    """What becomes of a transformer's hidden states: the first token's, their mean, the last token's; "auto": as its
    folder says, or the first, and the last in a causal model."""
    max_tokens: PositiveInt = 128
    """Longer texts are cut to so many tokens."""
    task: Literal["classify", "choose", "generate"] = "classify"
    """"classify": a head on features. "choose": a language model says which of the label words follows the prompt, or
    stands at its mask. "generate": it learns to go on from prompts as the completions in the data do.
    Of the last two, nothing but the model is trained."""
    prompt: str | None = None
    """With {text} where the text goes, and {second} for the second text of a pair: "Review: {text}\\nSentiment:" before
    the words of a causal or sequence-to-sequence model, "{text} It was {mask}." around those of a masked one. Without
    label_words, features are those of the prompt with its text: of a causal model, the state that it goes on from."""
    label_words: Annotated[tuple[str, ...], Field(strict=False)] | None = None
    """The word, or words, that stand for each class, in the order of the classes."""
    quantise: Literal["bfloat16", "int8", "nf4"] | None = None
    """Keep the matrices of a network of `transformers` in sixteen, eight or four bits, where they stay frozen: as
    bfloat16, or by LLM.int8() or QLoRA's NormalFloat, through `bitsandbytes`. Modules and heads on it train in
    float32."""
    samples: NonNegativeInt = 10
    """With task = "generate": test prompts that are completed before and after each stage, for the report and
    `samples.csv`; exact match and ROUGE-L are over them."""
    max_new_tokens: PositiveInt = 64
    """The most tokens of such a completion."""


class Clients(Table):
    """The machines of simulated clients: how fast they are, and when they can be asked. With it, a run has a clock."""

    uplink: PositiveFloat = 10e6
    """Bits a second that a client sends."""
    downlink: PositiveFloat = 50e6
    """Bits a second that a client receives."""
    flops: PositiveFloat = 10e9
    """Floating-point operations a second of a client."""
    speed_spread: NonNegativeFloat = 0.0
    """How much machines differ: the standard deviation of the logarithm of their speeds, by which links and arithmetic
    of a client are all multiplied; 0: all alike."""
    availability: float = Field(default=1.0, gt=0, le=1)
    """Share of a day in which a client can be asked: one stretch, every day, that begins at an hour of its own."""
    trace: str | None = None
    """A CSV file with the columns client (name or number), and speed (a factor), or from and until (hours of the day),
    or all; several rows of a client are several stretches. Who is not in it is as the other keys say."""

    @field_validator("trace")
    @classmethod
    def _is_path(cls, value: str | None) -> str | None:
        if value is not None and "\0" in value:
            raise ValueError("no path has a NUL character")
        return value


class Recipe(Table):
    """A run: data, model, and stages that hand the model on."""

    name: str = "run"
    """Names the run directory: letters, digits, dots, dashes, underscores."""
    seed: NonNegativeInt = 0
    """All random numbers come from it; `headstart compare` takes a list of seeds."""
    data: Data | None = None
    """Where the examples come from and who holds them."""
    tasks: Annotated[tuple[Task, ...], Field(strict=False)] = ()
    """Instead of data: several tasks, each with its own, on one backbone."""
    model: Model = Model()
    """The backbone that turns an example into a feature vector."""
    stages: Annotated[tuple[Stage, ...], Field(strict=False)]
    """Methods with their settings, in order; each starts from the model of the one before, or as its start says."""
    clients: Clients | None = None
    """The machines of simulated clients: then costs have simulated seconds, too."""
    _stages: ClassVar[dict[str, Any]] = {}
    """The stages that the recipe was built with."""

    @classmethod
    def parse(cls, table: Mapping[str, Any]) -> Recipe:
        """Validate a table, or raise one `RecipeError` that lists every problem."""
        from headstart.config.checks import cross_field_errors
        from headstart.config.messages import messages

        load_plugins()
        cls.rebuild()
        table = _by_columns(_on_features(table))
        problems = cross_field_errors(table)
        try:
            recipe = cls.model_validate(table)
        except ValidationError as error:
            raise RecipeError([*messages(error), *problems]) from None
        if problems:
            raise RecipeError(problems)
        return recipe

    @classmethod
    def rebuild(cls) -> None:
        """Take in the methods that were registered since."""
        if cls._stages != dict(STAGES):
            cls.model_rebuild(force=True)
            cls._stages = dict(STAGES)

    @classmethod
    def load(cls, path: Path | str, settings: Sequence[str] = ()) -> Recipe:
        """Read a TOML file and apply ``key=value`` settings such as ``stages.0.shrinkage=0.1``."""
        return cls.parse(read_table(path, settings))

    @classmethod
    def read(cls, path: Path | str) -> Recipe:
        """The recipe of a run, to look at: methods and aggregation rules that nobody has registered in this process are
        taken as they are."""
        table = read_table(path)
        load_plugins()
        given = [stage for stage in table.get("stages", ()) if isinstance(stage, dict)]
        foreign = [stage.get("method") not in STAGES for stage in given]
        rules = [stage.get("combine", "mean") for stage in given]
        own = [{} if rule in aggregations() else {"combine": rule} for rule in rules]
        known = [
            {"method": "fedncm"} if other else {**stage, **dict.fromkeys(keys, "mean")}
            for stage, other, keys in zip(given, foreign, own, strict=True)
        ]
        if known == given:
            return cls.parse(table)
        recipe = cls.parse({**table, "stages": known})
        stages = [
            of_family(stage) if other else parsed.model_copy(update=keys)
            for stage, other, keys, parsed in zip(given, foreign, own, recipe.stages, strict=True)
        ]
        return recipe.model_copy(update={"stages": tuple(stages)})

    @classmethod
    def of(cls, source: Recipe | Mapping[str, Any] | Path | str, data: Mapping[str, Any] | None = None) -> Recipe:
        """A recipe from itself, from a table, or from the path of a TOML file.

        data: keys of [data] that hold unless the table says otherwise, where the examples are in memory.
        """
        if isinstance(source, Recipe) and (data is None or source.data is not None):
            return source
        if isinstance(source, Recipe):
            raise HeadstartError("data: several tasks have data each; name them in the recipe's [[tasks]]")
        table = source if isinstance(source, Mapping) else read_table(source)
        if data is not None and "tasks" not in table and isinstance(table.get("data", {}), Mapping):
            table = {**table, "data": {**data, **table.get("data", {})}}
        return cls.parse(table)

    def to_toml(self, defaults: bool = True) -> str:
        """The recipe with every default filled in, or without them; keys that are unset are left out."""
        table = self.model_dump(mode="json", exclude_none=True, exclude_defaults=not defaults, warnings=False)
        if not self.tasks:
            table.pop("tasks", None)
        return tomli_w.dumps(table)

    def settings(self, defaults: bool = True) -> dict[str, Any]:
        """Every value, or those that are no default, under the name that ``--set`` uses, such as stages.0.shrinkage."""
        table = self.model_dump(mode="json", exclude_none=True, exclude_defaults=not defaults, warnings=False)
        return dict(flattened(table))

    @property
    def datasets(self) -> str:
        """What the run learns from, in words."""
        return self.data.dataset if self.data else ", ".join(task.dataset for task in self.tasks)

    @property
    def task_names(self) -> tuple[str, ...]:
        """Of its tasks, in their order."""
        return tuple(task.name for task in self.tasks) or (ONE_TASK,)

    @property
    def models(self) -> tuple[Model, ...]:
        """The model of each task: one, which all share, or one under the prompt and the label words of each."""
        if not any(task.prompt for task in self.tasks or ()):
            return (self.model,)
        own = [{"prompt": task.prompt or self.model.prompt, "label_words": task.label_words} for task in self.tasks]
        return tuple(self.model.model_copy(update=each) for each in own)

    def model_of(self, task: int) -> Model:
        """The model of a task, by its number."""
        return self.models[task if len(self.models) > 1 else 0]

    def task_number(self, name: str) -> int:
        """The number of a node's task by its name, which is empty where there is one task."""
        if not self.tasks and name:
            raise HeadstartError(f"task {name!r}: the recipe has one task, without a name; leave it out")
        if self.tasks and not name:
            raise HeadstartError(
                f"the recipe has several tasks ({', '.join(self.task_names)}): name the node's own, as --task or as "
                "`task` in its script"
            )
        if self.tasks and name not in self.task_names:
            raise HeadstartError(f"task {name!r}: {nearest(name, self.task_names)}")
        return self.task_names.index(name) if self.tasks else 0


def _on_features(table: Mapping[str, Any]) -> Mapping[str, Any]:
    """Where the data are features, what a stage trains by default is the head: there is nothing else."""
    model, stages = table.get("model"), table.get("stages")
    if not isinstance(model, dict) or model.get("backbone") != "features" or not isinstance(stages, list):
        return table
    changed = []
    for stage in stages:
        kind = STAGES.get(str(stage.get("method"))) if isinstance(stage, dict) else None
        fields = kind.model_fields if kind else {}
        usual = {key: fields[key].default for key in ("train", "update") if key in fields}
        heads = {key: "head" for key, default in usual.items() if default in ("all", "body")}
        changed.append({**heads, **stage} if isinstance(stage, dict) else stage)
    return {**table, "stages": changed}


def dealt_by_columns(data: Any) -> Any:
    """A table of data that names a column of clients, or of domains, is dealt out by it unless it says otherwise."""
    if not isinstance(data, dict) or "partition" in data:
        return data
    kinds = {"client_column": "natural", "domain_column": "domains"}
    kind = next((kind for column, kind in kinds.items() if data.get(column) is not None), None)
    return {**data, "partition": {"kind": kind}} if kind else data


def _by_columns(table: Mapping[str, Any]) -> Mapping[str, Any]:
    tasks = table.get("tasks")
    changed = {"data": dealt_by_columns(table["data"])} if "data" in table else {}
    if isinstance(tasks, list):
        changed["tasks"] = [dealt_by_columns(task) for task in tasks]
    return {**table, **changed}
