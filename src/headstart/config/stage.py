"""The stages of a recipe: one table per method, with the defaults of its keys."""

from __future__ import annotations

from functools import cache
from importlib.metadata import entry_points
from math import ceil
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
)
from pydantic_core import CoreSchema, core_schema

from headstart.core.plan import Plan, Role

Auto = Literal["auto"]
MODULES = ("lora", "adapter", "vpt")


class Table(BaseModel):
    """A table of the recipe: unknown keys are refused, values do not change after validation."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )


class Privacy(Table):
    """Differential privacy of a stage: what is released hides whether any one unit took part."""

    epsilon: PositiveFloat
    delta: float = Field(default=1e-5, gt=0, lt=1)
    clip: PositiveFloat = 1.0
    """Largest norm of what one unit contributes: an example's features in a closed form, a client's update in
    training. What is longer is shortened to it, and the noise grows with it. Most closed forms use directions only: any
    clip up to the usual length of the features serves them equally well."""
    noise: Literal["server", "client"] = "server"
    """Who adds the noise: the server, once, to the total (clients trust it), or every client to what it sends (nobody
    is trusted; more noise)."""


class _Stage(Table):
    pools: ClassVar[bool] = False
    """Whether one machine holds everybody's examples."""
    silent: ClassVar[bool] = False
    """Whether nothing travels from round to round."""
    one_task: ClassVar[bool] = False
    """Whether the method is defined for a single task only."""
    method: str
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

    @property
    def protected(self) -> bool:
        """Whether noise or secure sums hide what a client sends."""
        return getattr(self, "privacy", None) is not None or getattr(self, "secure", False)


class _Sampled(_Stage):
    clients_per_round: PositiveInt | None = None
    participation: float | None = Field(default=None, gt=0, le=1)
    """Share of the clients in a round; everybody where neither key is set."""
    sampling: Literal["clients", "tasks"] = "clients"
    """With several tasks, a round draws from all clients alike, or as many from each task, in turn where it must."""
    secure: bool = False
    """Of what clients send, a server that follows the protocol learns the sum only; answers are rounded to 24 binary
    places."""
    secure_group: Annotated[int, Field(ge=3)] | None = None
    """Clients are added up in groups of at least so many, and the server learns each group's sum; None: all clients of
    a round in one group. FedCOF, which needs several means of a class, takes a group for a client."""
    secure_threshold: float = Field(default=0.67, gt=0, le=1)
    """Share of a group that has to stay to the end for its sum to be opened, more than two thirds. The rest may drop
    out: nobody of three clients, one of four."""

    def sampled(self, n_clients: int) -> int:
        """Clients in a round."""
        share = 1.0 if self.participation is None else self.participation
        return min(self.clients_per_round or max(1, round(share * n_clients)), n_clients)

    def survivors(self, clients: int) -> int:
        """How many clients of a secure sum have to stay to the end; of fewer than three, each would know too much."""
        return max(3, ceil(self.secure_threshold * clients))


class ClosedFormStage(_Sampled):
    """Statistics of the clients' features, each client heard once, and a head that the server computes from them."""

    rounds: PositiveInt | None = None
    """None: as many as it takes to hear every client once."""
    privacy: Privacy | None = None
    """Hides any one example of any client, in what it sends or in the head."""


class CountNoise(Table):
    """Noise on the counts alone (FedCOF paper, appendix I): an experiment on robustness, not differential privacy.

    A count becomes max(n + noise, 0); a smaller ε means more noise.
    """

    kind: Literal["uniform", "gaussian", "laplace"]
    """"uniform": n · U(−(1 − ε), 1 − ε), nothing from ε = 1 on; "gaussian": N(0, 1/ε), of variance 1/ε; "laplace":
    Lap(1/ε). The noisy count is rounded to a whole number; a class that comes out at zero is not sent."""
    epsilon: PositiveFloat


class FedNCMStage(ClosedFormStage):
    """Nearest class mean (Legate et al., NeurIPS 2023)."""

    method: Literal["fedncm"]
    distance: Literal["cosine", "euclidean"] = "cosine"


class Fed3RStage(ClosedFormStage):
    """Federated recursive ridge regression (Fanì et al., ICML 2024)."""

    method: Literal["fed3r"]
    ridge: NonNegativeFloat | Auto = "auto"
    """"auto": generalised cross-validation on the server; the papers use 0.01."""
    bias: bool = True
    """True: a ones column, as the official code; False: as in the FedCOF paper. With privacy there is none, except for
    random features: a bias that goes with shortened features does not go with those that the head is used on."""
    random_features: NonNegativeInt = 0
    """So many random Fourier features of the unit-length features; 0 for none."""
    random_features_width: PositiveFloat = 1.0
    """Width of the Gaussian kernel that the random features approximate."""


class FedCOFStage(ClosedFormStage):
    """Covariances estimated from class means (Goswami et al., 2025)."""

    method: Literal["fedcof"]
    shrinkage: NonNegativeFloat | Auto = "auto"
    """"auto": follows the estimated within-class variance; the papers use 1 (0.1 for MobileNetV2)."""
    means_per_client: PositiveInt = 1
    covariance: Literal["estimated", "full", "diagonal", "spherical"] = "estimated"
    count_noise: CountNoise | None = None


class _Optimiser(_Stage):
    """Steps along slopes of the loss, over batches of a client's examples."""

    representation: ClassVar[Role] = "shared"
    """Of what is trained below the last linear layer: body, module, hidden layers."""
    classifier: ClassVar[Role] = "shared"
    """Of the last linear layer, where it is trained."""
    batch_size: PositiveInt | Literal["full"] = 64
    lr: PositiveFloat = 0.1
    weight_decay: NonNegativeFloat = 0.0
    temperature: PositiveFloat = 1.0
    """Scores are divided by it: heads with rows of length one need less than 1."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """Arithmetic of the body where it trains; parameters stay in float32."""

    @property
    def plan(self) -> Plan:
        """What is frozen, shared and personal: what ``train`` and ``norm_statistics`` name, in the method's roles."""
        train, norm_statistics = getattr(self, "train"), getattr(self, "norm_statistics")  # noqa: B009 (of a subclass)
        body: Role = self.representation if train in ("all", "body") else "frozen"
        module: Role = self.representation if train in MODULES else "frozen"
        hidden: Role = "frozen" if train == "body" else self.representation
        head: Role = "frozen" if train == "body" else self.classifier
        return Plan(body, module, hidden, head, body if norm_statistics == "aggregate" else "frozen")


class _SGD(_Optimiser):
    momentum: float = Field(default=0.0, ge=0, lt=1)
    clip: PositiveFloat | None = None
    """Largest norm of the gradient of the loss, before weight decay and what a method adds to it."""
    norm_statistics: Literal["aggregate", "freeze", "batch"] = "aggregate"
    """Running statistics of batch norm where the body trains: averaged like the parameters; those of the pre-trained
    model, in training too; or none, every batch being normalised by its own, in evaluation too."""
    augment: Literal["flip", "none"] = "flip"
    """Random horizontal flips where the body trains on images."""


Part = Literal["head", "body", "all", "lora", "adapter", "vpt"]


class _Rounds(_Sampled, _Optimiser):
    """Anything that is trained round after round."""

    train: Part
    """What is trained: the head, on cached features of the frozen body; the body under a frozen head; both; or the head
    and a small module on a frozen transformer: low-rank updates, adapters, or prompts."""
    head: Literal["linear", "mlp"] = "linear"
    """"mlp": two hidden layers of rectified units before the linear one (the FedNCM paper's three-layer head)."""
    hidden: PositiveInt = 256
    """Width of the hidden layers."""
    rounds: PositiveInt = 100
    schedule: Literal["constant", "step", "cosine"] = "constant"
    """"step": a tenth after half and after three quarters of the rounds."""
    warmup_rounds: NonNegativeInt | Auto = 0
    """Rounds over which the learning rate rises to its value; "auto": a tenth of the rounds."""
    weighting: Literal["examples", "uniform"] = "examples"
    keep: Literal["last", "best"] = "last"
    """The model that the stage ends with: that of its last round, or that of the evaluated round with the highest
    accuracy on the validation split."""
    patience: PositiveInt | None = None
    """Stop after so many evaluations without a higher accuracy on the validation split; None: play every round."""
    rank: PositiveInt = 8
    """Of LoRA's updates."""
    alpha_lora: PositiveFloat = 16.0
    """LoRA's updates are scaled by alpha_lora / rank."""
    bottleneck: PositiveInt = 8
    """Width of adapters."""
    tokens: PositiveInt = 8
    """Prompts at every block."""
    blocks: PositiveInt | None = None
    """The module sits in the last so many blocks, and what comes before is computed once (not where images are flipped:
    set augment to "none"); None: in all of them."""


class TrainingStage(_Rounds, _SGD):
    """Local SGD on the clients, an average on the server, round after round."""

    local_epochs: PositiveInt | None = None
    """Passes over the local examples; 1 unless local_steps says otherwise."""
    local_steps: PositiveInt | None = None
    hide_task: bool = False
    """With several tasks, a client sends zeros for those that are not its own, and receives them all: the server does
    not learn its task from what it sends."""
    share: float = Field(default=0.0, ge=0, le=1)
    """The server holds this share of every client's examples and trains on them after each round (the motivation
    experiment of the FedBABU paper)."""
    share_train: Literal["body", "all"] = "all"
    """What the server trains on its share."""
    combine: Literal["mean", "median", "trimmed-mean"] = "mean"
    """What the server makes of the updates of a round, parameter by parameter. The median withstands any minority of
    clients that send anything, the trimmed mean the share that it trims; both count every client alike, and hold all
    updates of a round in memory."""
    trim: float = Field(default=0.1, gt=0, lt=0.5)
    """Share of the updates that a trimmed mean leaves out at each end."""
    max_norm: PositiveFloat | None = None
    """Largest norm of a client's update; a longer one is shortened to it."""
    privacy: Privacy | None = None
    """Hides any one client (DP-FedAvg): needs weighting = "uniform"."""


class FedAvgStage(TrainingStage):
    """Local SGD, then the mean (McMahan et al., AISTATS 2017)."""

    method: Literal["fedavg"]
    server_lr: PositiveFloat = 1.0


class FedProxStage(TrainingStage):
    """FedAvg with a pull towards the global model (Li et al., MLSys 2020)."""

    method: Literal["fedprox"]
    mu: NonNegativeFloat = 0.01
    server_lr: PositiveFloat = 1.0


class FedAvgMStage(TrainingStage):
    """FedAvg with momentum on the server (Hsu et al., 2019)."""

    method: Literal["fedavgm"]
    server_lr: PositiveFloat = 1.0
    server_momentum: float = Field(default=0.9, ge=0, lt=1)


class _Adaptive(TrainingStage):
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


class FedAdagradStage(TrainingStage):
    """Adagrad on the mean update (Reddi et al., ICLR 2021)."""

    method: Literal["fedadagrad"]
    server_lr: PositiveFloat = 0.01
    tau: PositiveFloat = 1e-3


class FedDynStage(TrainingStage):
    """A dynamic regulariser that aligns local and global optima (Acar et al., ICLR 2021)."""

    method: Literal["feddyn"]
    alpha_dyn: PositiveFloat = 0.01
    adaptive: bool = True
    """Divide alpha by a client's share of the examples, as the official code does."""


class ScaffoldStage(TrainingStage):
    """Control variates against client drift, option II (Karimireddy et al., ICML 2020)."""

    method: Literal["scaffold"]
    server_lr: PositiveFloat = 1.0


class FedNovaStage(TrainingStage):
    """Updates normalised by the local steps behind them (Wang et al., NeurIPS 2020)."""

    method: Literal["fednova"]
    mu: NonNegativeFloat = 0.0
    server_momentum: float = Field(default=0.0, ge=0, lt=1)


class CentralisedStage(TrainingStage):
    """The oracle: one machine holds everybody's examples; a round is so many epochs over all of them."""

    pools: ClassVar[bool] = True
    silent: ClassVar[bool] = True
    one_task: ClassVar[bool] = True
    method: Literal["centralised"]


class FedYoloStage(TrainingStage):
    """A module and a head for each task on one frozen transformer, averaged per task (Zhang et al., 2023)."""

    method: Literal["fedyolo"]
    train: Literal["lora", "adapter", "vpt"] = "lora"
    rounds: PositiveInt = 150
    batch_size: PositiveInt | Literal["full"] = 32
    momentum: float = Field(default=0.9, ge=0, lt=1)
    schedule: Literal["constant", "step", "cosine"] = "cosine"
    warmup_rounds: NonNegativeInt | Auto = "auto"
    """The paper warms up and does not say for how long; "auto": for a tenth of the rounds."""
    weighting: Literal["examples", "uniform"] = "uniform"


class FedBABUStage(TrainingStage):
    """The body under a head that stays as it starts; clients fine-tune afterwards (Oh et al., ICLR 2022)."""

    classifier: ClassVar[Role] = "frozen"
    method: Literal["fedbabu"]
    train: Part = "body"
    """What is trained below the head: the body, a module, or, with "head", the hidden layers of an MLP."""
    mu: NonNegativeFloat = 0.0
    """Pull towards the global model: FedProx+BABU where it is not 0."""


class FedPerStage(TrainingStage):
    """The body is averaged, every client keeps a head of its own (Arivazhagan et al., 2019)."""

    classifier: ClassVar[Role] = "personal"
    method: Literal["fedper"]
    train: Part = "all"


class FedRepStage(TrainingStage):
    """As FedPer, but each client trains its head first, then the body (Collins et al., ICML 2021)."""

    classifier: ClassVar[Role] = "personal"
    method: Literal["fedrep"]
    train: Part = "all"
    head_epochs: NonNegativeInt = 10
    """Epochs on the head, before local_epochs on the body."""


class LGFedAvgStage(TrainingStage):
    """The head is averaged, every client keeps a body of its own (Liang et al., 2020)."""

    representation: ClassVar[Role] = "personal"
    method: Literal["lg-fedavg"]
    train: Part = "all"


class PerFedAvgStage(TrainingStage):
    """A model that one step of a client makes good, first-order variant (Fallah et al., NeurIPS 2020)."""

    method: Literal["per-fedavg"]
    train: Part = "all"
    inner_lr: PositiveFloat = 0.01
    """Of the step whose result the meta step looks at."""


class DittoStage(TrainingStage):
    """FedAvg, and beside it a model of each client's own that is pulled towards the global one (Li et al., 2021)."""

    method: Literal["ditto"]
    train: Part = "all"
    lambda_ditto: NonNegativeFloat = 1.0
    """Strength of the pull."""


class LocalOnlyStage(TrainingStage):
    """Every client trains for itself, and nothing travels."""

    silent: ClassVar[bool] = True
    representation: ClassVar[Role] = "personal"
    classifier: ClassVar[Role] = "personal"
    method: Literal["local-only"]
    train: Part = "all"


class PersonaliseStage(_SGD):
    """Every client makes the model that it is handed its own, and nothing travels: fine-tuned, or a computed head."""

    silent: ClassVar[bool] = True
    local_epochs: ClassVar[int] = 1
    local_steps: ClassVar[None] = None
    schedule: ClassVar[Literal["constant"]] = "constant"
    warmup_rounds: ClassVar[int] = 0
    weighting: ClassVar[Literal["uniform"]] = "uniform"
    keep: ClassVar[Literal["last"]] = "last"
    patience: ClassVar[None] = None
    hide_task: ClassVar[bool] = False
    share: ClassVar[float] = 0.0
    representation: ClassVar[Role] = "personal"
    classifier: ClassVar[Role] = "personal"
    method: Literal["personalise"]
    update: Part = "all"
    """What a client changes; a module is the one that an earlier stage has left on the body."""
    epochs: NonNegativeInt = 5
    """Of fine-tuning; the model is evaluated after each, and before the first."""
    compute: Literal["fedncm", "fed3r", "fedcof"] | None = None
    """Instead of fine-tuning: a head in closed form from the client's own examples, blended with the one it has."""
    blend: Annotated[float, Field(ge=0, le=1)] | Auto = "auto"
    """Share of the computed head; "auto": each client chooses by cross-validation on its own examples."""
    without_head: bool = False
    """Evaluate without the head too, by the nearest mean of a client's own classes, before the first epoch and after
    the last."""
    forgetting: bool = False
    """Evaluate every client's model on the whole test split too, before the first epoch and after the last."""
    batch_size: PositiveInt | Literal["full"] = 50
    lr: PositiveFloat = 1e-3
    momentum: float = Field(default=0.9, ge=0, lt=1)

    @property
    def train(self) -> Part:
        """What changes."""
        return "head" if self.compute else self.update

    @property
    def rounds(self) -> int:
        """A round is an epoch; a head is computed in one."""
        return 1 if self.compute else self.epochs

    def sampled(self, n_clients: int) -> int:
        """Everybody."""
        return n_clients


class SLoRAStage(TrainingStage):
    """Sparse fine-tuning, whose low-rank part LoRA then starts from (Babakniya et al., 2023)."""

    one_task: ClassVar[bool] = True
    method: Literal["slora"]
    train: Literal["lora"] = "lora"
    rank: PositiveInt = 16
    alpha_lora: PositiveFloat = 32.0
    density: float = Field(default=0.1, gt=0, le=1)
    """Share of the entries that priming trains."""
    priming: float = Field(default=0.2, ge=0, lt=1)
    """Share of the rounds that prime: one at least, or none where it is 0."""
    server_lr: PositiveFloat = 1.0


class ZerothOrderStage(_Rounds):
    """Slopes along random directions instead of gradients; batch norm and dropout as in evaluation."""

    one_task: ClassVar[bool] = True
    norm_statistics: ClassVar[Literal["freeze"]] = "freeze"
    hide_task: ClassVar[bool] = False
    share: ClassVar[float] = 0.0
    train: Literal["head", "body", "all", "lora", "adapter"]
    lr: PositiveFloat = 1e-4
    epsilon: PositiveFloat = 1e-3
    """How far a probe goes along a direction, both ways."""
    num_directions: PositiveInt = 1
    """Directions, and so scalars, of a step."""


class FedMeZOStage(ZerothOrderStage):
    """One seed and a few scalars per round (thesis, chapter 4)."""

    method: Literal["fedmezo"]
    batch_size: PositiveInt | Literal["full"] = "full"
    """Examples of each client that a round looks at: all of them, or so many."""


class DistMeZOStage(ZerothOrderStage):
    """Every client takes MeZO steps of its own, with seeds of its own; then the mean of the weights."""

    method: Literal["distmezo"]
    local_steps: PositiveInt = 10
    server_lr: PositiveFloat = 1.0


Training = TrainingStage | PersonaliseStage
"""Local SGD."""
Rounds = Training | ZerothOrderStage
"""Anything that is trained round after round."""
ClosedForm = ClosedFormStage
FAMILIES = (ClosedFormStage, TrainingStage, ZerothOrderStage)
"""What the stage of another method is a subclass of."""


STAGES: dict[str, type[ClosedForm] | type[Training] | type[ZerothOrderStage]] = {
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
    "fedyolo": FedYoloStage,
    "fedbabu": FedBABUStage,
    "fedper": FedPerStage,
    "fedrep": FedRepStage,
    "lg-fedavg": LGFedAvgStage,
    "per-fedavg": PerFedAvgStage,
    "ditto": DittoStage,
    "local-only": LocalOnlyStage,
    "personalise": PersonaliseStage,
    "fedmezo": FedMeZOStage,
    "distmezo": DistMeZOStage,
}
"""The stage of every method; `headstart.register` adds to it."""


class _ByMethod:
    """Tells pydantic that a stage is one of `STAGES`, whichever its key `method` names."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        stages = {name: handler.generate_schema(stage) for name, stage in STAGES.items()}
        return core_schema.tagged_union_schema(stages, discriminator="method")


Stage = Annotated[ClosedForm | Rounds, _ByMethod()]


@cache
def load_plugins() -> None:
    """Import what installed packages name under the entry point group `headstart`: they register their methods."""
    for plugin in entry_points(group="headstart"):
        plugin.load()
