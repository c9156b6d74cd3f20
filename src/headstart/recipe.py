"""Typed recipes: what a run reads, in TOML, with every default in this file and nowhere else."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import tomli_w
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ValidationError,
)

from headstart.errors import RecipeError

Auto = Literal["auto"]
MODULES = ("lora", "adapter", "vpt")


class _Table(BaseModel):
    """A table of the recipe: unknown keys are refused, values do not change after validation."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )


# ---------------------------------------------------------------------------------------------- who holds which example


class _Partition(_Table):
    test: Literal["shared", "follow"] = "shared"
    """Whether clients share one test split, or each gets a part of it that follows its training classes."""


class IID(_Partition):
    """Examples dealt at random, sizes equal to within one."""

    kind: Literal["iid"]
    clients: PositiveInt = 100


class Dirichlet(_Partition):
    """Equal sizes, class shares per client from Dirichlet(alpha), clients filled in turn (FedNCM, FedCOF)."""

    kind: Literal["dirichlet"] = "dirichlet"
    clients: PositiveInt = 100
    alpha: PositiveFloat = 0.1
    leftovers: Literal["report", "assign"] = "report"
    """What becomes of the examples that do not fill a client evenly: reported as unused (papers), or dealt out."""


class DirichletByClass(_Partition):
    """Each class cut among the clients by Dirichlet(alpha) shares (Yurochkin et al.); sizes vary."""

    kind: Literal["dirichlet-by-class"]
    clients: PositiveInt = 100
    alpha: PositiveFloat = 0.1
    min_examples: PositiveInt = 1


class Shards(_Partition):
    """So many single-class shards per client (FedBABU, LG-FedAvg, FedRep)."""

    kind: Literal["shards"]
    clients: PositiveInt = 100
    shards_per_client: PositiveInt = 2


class Classes(_Partition):
    """So many distinct classes per client, the same number of examples of each (FedYolo)."""

    kind: Literal["classes"]
    clients: PositiveInt = 20
    classes_per_client: PositiveInt = 2
    examples_per_client: PositiveInt | None = None
    """Rounded down to a multiple of the classes; None: as many as every client can have."""


class Natural(_Partition):
    """The clients that the data name."""

    kind: Literal["natural"]
    clients: PositiveInt | None = None
    """Keep so many of them, drawn at random; None keeps all."""
    min_examples: PositiveInt = 1
    max_examples: PositiveInt | None = None


class Domains(_Partition):
    """Each domain of the data is held by its own clients."""

    kind: Literal["domains"]
    clients_per_domain: PositiveInt = 1


Partition = Annotated[
    IID | Dirichlet | DirichletByClass | Shards | Classes | Natural | Domains, Field(discriminator="kind")
]


class Data(_Table):
    """Where the examples come from and who holds them."""

    dataset: Annotated[str, Field(min_length=1)]
    """A known name (`headstart datasets`), a Hugging Face dataset id, or a path."""
    partition: Partition = Dirichlet()
    input_column: str | Annotated[tuple[str, str], Field(strict=False)] | None = None
    label_column: str | None = None
    client_column: str | None = None
    domain_column: str | None = None
    train_examples: PositiveInt | None = None
    """Keep a class-balanced random part of the training split."""
    test_examples: PositiveInt | None = None
    test_fraction: float = Field(default=0.2, gt=0, lt=1)
    """Share held out for the test where the data come without a test split."""


class Model(_Table):
    """The body that turns an example into a feature vector."""

    backbone: str = "efficientnet-lite0"
    weights: str | None = None
    """A safetensors file, a `weights_only` checkpoint, or "random"."""
    preprocess: Literal["auto", "torch", "cifar10", "half", "lite", "caffe"] = "auto"
    resize: Literal["squash"] | PositiveInt = "squash"
    """"squash" to a square; a number: the shorter side to so many pixels, then a centre crop."""
    image_size: PositiveInt | None = None
    pooling: Literal["auto", "cls", "mean"] = "auto"
    max_tokens: PositiveInt = 128
    prompt: str | None = None
    """A cloze for a masked language model, such as "{text} It was {mask}."; {second} is the second text of a pair."""
    label_words: Annotated[tuple[str, ...], Field(strict=False)] | None = None
    """The word that stands for each class where the prompt has its {mask}, in the order of the classes."""


# -------------------------------------------------------------------------------------------------------------- stages


class _Stage(_Table):
    pools: ClassVar[bool] = False
    """Whether one machine holds everybody's examples, so that nothing travels."""
    head_init: Literal["previous", "zeros", "random"] = "previous"
    """Where a trained head starts from; a closed-form head is computed and starts from nothing."""
    evaluate_every: PositiveInt = 1
    eval_split: Literal["test", "validation"] = "test"
    start: Literal["previous", "pretrained"] | NonNegativeInt = "previous"
    """The model to start from: that of the stage before, the pre-trained one, or that of a stage by its number."""
    min_replies: PositiveInt = 1
    """A round with fewer usable answers stops the run; its checkpoint stays good for --resume."""
    deadline: PositiveFloat | None = None
    """Seconds after which a client's answer no longer counts in its round."""


class _Sampled(_Stage):
    clients_per_round: PositiveInt | None = None
    participation: float | None = Field(default=None, gt=0, le=1)
    """Share of the clients in a round; everybody where neither key is set."""

    def sampled(self, n_clients: int) -> int:
        """Clients in a round."""
        share = 1.0 if self.participation is None else self.participation
        return min(self.clients_per_round or max(1, round(share * n_clients)), n_clients)


class _ClosedForm(_Sampled):
    rounds: PositiveInt | None = None
    """None: as many as it takes to hear every client once."""


class FedNCMStage(_ClosedForm):
    """Nearest class mean (Legate et al., NeurIPS 2023)."""

    method: Literal["fedncm"]
    distance: Literal["cosine", "euclidean"] = "cosine"


class Fed3RStage(_ClosedForm):
    """Federated recursive ridge regression (Fanì et al., ICML 2024)."""

    method: Literal["fed3r"]
    ridge: NonNegativeFloat | Auto = "auto"
    """"auto": generalised cross-validation on the server; the papers use 0.01."""
    bias: bool = True
    """True: a ones column, as the official code; False: as in the FedCOF paper."""
    random_features: NonNegativeInt = 0
    """So many random Fourier features of the unit-length features; 0 for none."""
    random_features_width: PositiveFloat = 1.0
    """Width of the Gaussian kernel that the random features approximate."""


class FedCOFStage(_ClosedForm):
    """Covariances estimated from class means (Goswami et al., 2025)."""

    method: Literal["fedcof"]
    shrinkage: NonNegativeFloat | Auto = "auto"
    """"auto": follows the estimated within-class variance; the papers use 1 (0.1 for MobileNetV2)."""
    means_per_client: PositiveInt = 1
    covariance: Literal["estimated", "full", "diagonal", "spherical"] = "estimated"


class _Rounds(_Sampled):
    """Anything that is trained round after round."""

    train: Literal["head", "body", "all", "lora", "adapter", "vpt"]
    """What is trained: the head, on cached features of the frozen body; the body under a frozen head; both; or the head
    and a small module on a frozen transformer: low-rank updates, adapters, or prompts."""
    head: Literal["linear", "mlp"] = "linear"
    """"mlp": two hidden layers of rectified units before the linear one (the FedNCM paper's three-layer head)."""
    hidden: PositiveInt = 256
    """Width of the hidden layers."""
    rounds: PositiveInt = 100
    batch_size: PositiveInt | Literal["full"] = 64
    lr: PositiveFloat = 0.1
    weight_decay: NonNegativeFloat = 0.0
    schedule: Literal["constant", "step", "cosine"] = "constant"
    """"step": a tenth after half and after three quarters of the rounds."""
    warmup_rounds: NonNegativeInt = 0
    """Rounds over which the learning rate rises to its value."""
    temperature: PositiveFloat = 1.0
    """Scores are divided by it: heads with rows of length one need less than 1."""
    weighting: Literal["examples", "uniform"] = "examples"
    precision: Literal["float32", "bfloat16"] = "float32"
    """Arithmetic of the body where it trains; parameters stay in float32."""
    rank: PositiveInt = 8
    """Of LoRA's updates."""
    alpha_lora: PositiveFloat = 16.0
    """LoRA's updates are scaled by alpha_lora / rank."""
    bottleneck: PositiveInt = 8
    """Width of adapters."""
    tokens: PositiveInt = 8
    """Prompts at every block."""


class _Training(_Rounds):
    """Local SGD on the clients, an average on the server, round after round."""

    local_epochs: PositiveInt | None = None
    """Passes over the local examples; 1 unless local_steps says otherwise."""
    local_steps: PositiveInt | None = None
    momentum: float = Field(default=0.0, ge=0, lt=1)
    clip: PositiveFloat | None = None
    """Largest norm of a gradient."""
    norm_statistics: Literal["aggregate", "freeze", "batch"] = "aggregate"
    """Running statistics of batch norm where the body trains: averaged like the parameters; those of the pre-trained
    model, in training too; or none, every batch being normalised by its own, in evaluation too."""
    augment: Literal["flip", "none"] = "flip"
    """Random horizontal flips where the body trains on images."""


class FedAvgStage(_Training):
    """Local SGD, then the mean (McMahan et al., AISTATS 2017)."""

    method: Literal["fedavg"]
    server_lr: PositiveFloat = 1.0


class FedProxStage(_Training):
    """FedAvg with a pull towards the global model (Li et al., MLSys 2020)."""

    method: Literal["fedprox"]
    mu: NonNegativeFloat = 0.01
    server_lr: PositiveFloat = 1.0


class FedAvgMStage(_Training):
    """FedAvg with momentum on the server (Hsu et al., 2019)."""

    method: Literal["fedavgm"]
    server_lr: PositiveFloat = 1.0
    server_momentum: float = Field(default=0.9, ge=0, lt=1)


class _Adaptive(_Training):
    server_lr: PositiveFloat = 0.01
    beta1: float = Field(default=0.9, ge=0, lt=1)
    beta2: float = Field(default=0.99, ge=0, lt=1)
    tau: PositiveFloat = 1e-3
    """Adaptivity: added to the square root of the second moment, which starts at its square."""
    bias_correction: bool = False
    """False: Reddi et al.; true, with beta2 = 0.999 and tau = 1e-8: Adam of torch, as FLSim and the FedNCM paper."""


class FedAdamStage(_Adaptive):
    """Adam on the mean update (Reddi et al., ICLR 2021)."""

    method: Literal["fedadam"]


class FedYogiStage(_Adaptive):
    """Yogi on the mean update (Reddi et al., ICLR 2021)."""

    method: Literal["fedyogi"]


class FedAdagradStage(_Training):
    """Adagrad on the mean update (Reddi et al., ICLR 2021)."""

    method: Literal["fedadagrad"]
    server_lr: PositiveFloat = 0.01
    tau: PositiveFloat = 1e-3


class FedDynStage(_Training):
    """A dynamic regulariser that aligns local and global optima (Acar et al., ICLR 2021)."""

    method: Literal["feddyn"]
    alpha_dyn: PositiveFloat = 0.01
    adaptive: bool = True
    """Divide alpha by a client's share of the examples, as the official code does."""


class ScaffoldStage(_Training):
    """Control variates against client drift, option II (Karimireddy et al., ICML 2020)."""

    method: Literal["scaffold"]
    server_lr: PositiveFloat = 1.0


class FedNovaStage(_Training):
    """Updates normalised by the local steps behind them (Wang et al., NeurIPS 2020)."""

    method: Literal["fednova"]
    mu: NonNegativeFloat = 0.0
    server_momentum: float = Field(default=0.0, ge=0, lt=1)


class CentralisedStage(_Training):
    """The oracle: one machine holds everybody's examples; a round is so many epochs over all of them."""

    pools: ClassVar[bool] = True
    method: Literal["centralised"]


class SLoRAStage(_Training):
    """Sparse fine-tuning, whose low-rank part LoRA then starts from (Babakniya et al., 2023)."""

    method: Literal["slora"]
    train: Literal["lora"] = "lora"
    rank: PositiveInt = 16
    alpha_lora: PositiveFloat = 32.0
    density: float = Field(default=0.1, gt=0, le=1)
    """Share of the entries that priming trains."""
    priming: float = Field(default=0.2, ge=0, lt=1)
    """Share of the rounds that prime."""
    server_lr: PositiveFloat = 1.0


class _ZerothOrder(_Rounds):
    """Slopes along random directions instead of gradients; batch norm and dropout as in evaluation."""

    norm_statistics: ClassVar[Literal["freeze"]] = "freeze"
    train: Literal["head", "body", "all", "lora", "adapter"]
    lr: PositiveFloat = 1e-4
    epsilon: PositiveFloat = 1e-3
    """How far a probe goes along a direction, both ways."""
    num_directions: PositiveInt = 1
    """Directions, and so scalars, of a step."""


class FedMeZOStage(_ZerothOrder):
    """One seed and a few scalars per round (thesis, chapter 4)."""

    method: Literal["fedmezo"]
    batch_size: PositiveInt | Literal["full"] = "full"
    """Examples of each client that a round looks at: all of them, or so many."""


class DistMeZOStage(_ZerothOrder):
    """Every client takes MeZO steps of its own, with seeds of its own; then the mean of the weights."""

    method: Literal["distmezo"]
    local_steps: PositiveInt = 10
    server_lr: PositiveFloat = 1.0


Training = (
    FedAvgStage | FedProxStage | FedAvgMStage | FedAdamStage | FedYogiStage | FedAdagradStage
    | FedDynStage | ScaffoldStage | FedNovaStage | CentralisedStage | SLoRAStage
)  # fmt: skip
"""Local SGD."""
Rounds = Training | FedMeZOStage | DistMeZOStage
"""Anything that is trained round after round."""
ClosedForm = FedNCMStage | Fed3RStage | FedCOFStage
Stage = Annotated[ClosedForm | Rounds, Field(discriminator="method")]


class Recipe(_Table):
    """A run: data, model, and stages that hand the model on."""

    name: str = "run"
    seed: NonNegativeInt = 0
    data: Data
    model: Model = Model()
    stages: Annotated[tuple[Stage, ...], Field(strict=False)]

    @classmethod
    def parse(cls, table: Mapping[str, Any]) -> Recipe:
        """Validate a table, or raise one `RecipeError` that lists every problem."""
        from headstart.mistakes import contradictions, sentences

        problems = contradictions(table)
        try:
            recipe = cls.model_validate(table)
        except ValidationError as error:
            raise RecipeError([*sentences(error), *problems]) from None
        if problems:
            raise RecipeError(problems)
        return recipe

    @classmethod
    def load(cls, path: Path | str, settings: Sequence[str] = ()) -> Recipe:
        """Read a TOML file and apply ``key=value`` settings such as ``stages.0.shrinkage=0.1``."""
        try:
            table = tomllib.loads(Path(path).read_text(encoding="utf-8"))
        except OSError as error:
            raise RecipeError([f"cannot read {path}: {error.strerror or error}"]) from None
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise RecipeError([f"{path} is not valid TOML: {error}"]) from None
        problems = [problem for setting in settings if (problem := _apply(table, setting))]
        if problems:
            raise RecipeError(problems)
        return cls.parse(table)

    def to_toml(self) -> str:
        """The recipe with every default filled in; keys that are unset are left out."""
        return tomli_w.dumps(self.model_dump(mode="json", exclude_none=True))


PARTITIONS: dict[str, type[_Partition]] = {
    "iid": IID,
    "dirichlet": Dirichlet,
    "dirichlet-by-class": DirichletByClass,
    "shards": Shards,
    "classes": Classes,
    "natural": Natural,
    "domains": Domains,
}
STAGES: dict[str, type[_Stage]] = {
    "fedncm": FedNCMStage,
    "fed3r": Fed3RStage,
    "fedcof": FedCOFStage,
    "fedavg": FedAvgStage,
    "fedprox": FedProxStage,
    "fedavgm": FedAvgMStage,
    "fedadam": FedAdamStage,
    "fedyogi": FedYogiStage,
    "fedadagrad": FedAdagradStage,
    "feddyn": FedDynStage,
    "scaffold": ScaffoldStage,
    "fednova": FedNovaStage,
    "centralised": CentralisedStage,
    "slora": SLoRAStage,
    "fedmezo": FedMeZOStage,
    "distmezo": DistMeZOStage,
}


def _apply(table: dict[str, Any], setting: str) -> str | None:
    """Write one ``key=value`` into the table; return what is wrong with it, if anything."""
    path, equals, text = setting.partition("=")
    if not equals or not path.strip():
        return f"--set {setting}: write it as key=value, for example stages.0.shrinkage=0.1"
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text.strip()
    *parents, last = path.strip().split(".")
    node: Any = table
    key: str | int
    for depth, key in enumerate([*parents, last]):
        if isinstance(node, list):
            if not key.isdigit() or int(key) >= len(node):
                return (
                    f"--set {path}: {'.'.join(parents[:depth])} has {len(node)} entries, numbered from 0, not {key!r}"
                )
            key = int(key)
        elif not isinstance(node, dict):
            return f"--set {path}: {'.'.join(parents[:depth])} is a value, not a table"
        if depth == len(parents):
            node[key] = value
        else:
            node = node.setdefault(key, {}) if isinstance(node, dict) else node[key]
    return None
