"""The keys that the families of stages have in common, with their defaults."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import ceil, sqrt
from typing import Annotated, Any, ClassVar, Literal, Self

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
from headstart.errors import HeadstartError

Auto = Literal["auto"]
MODULES = ("lora", "adapter", "prefix", "vpt")


class Table(BaseModel):
    """A table of the recipe: unknown keys are refused, values do not change after validation."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )


@dataclass(frozen=True)
class Named:
    """Text that is one of some names, which users may add to."""

    names: Callable[[], list[str]]

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self._check, handler(source))

    def _check(self, value: str) -> str:
        if value not in self.names():
            raise ValueError(f"must be one of {', '.join(self.names())}")
        return value


class Privacy(Table):
    """Differential privacy of a stage: what is released hides whether any one unit participated."""

    epsilon: PositiveFloat
    """ε: the smaller, the more private."""
    delta: float = Field(default=1e-5, gt=0, lt=1)
    """δ: below one over the number of units that are hidden."""
    clip: PositiveFloat = 1.0
    """Largest norm of what one unit contributes: an example's features in a closed form, a client's update in
    training. What is longer is shortened to it, and the noise grows with it. Most closed forms use directions only: any
    clip up to the usual length of the features serves them equally well."""
    noise: Literal["server", "client", "shared"] = "server"
    """Who adds the noise: the server, once, to the total (clients trust it); every client to what it sends (nobody is
    trusted; more noise); or all clients together, each a share of what hides their sum (needs secure =
    true; as little noise as the server's, and the other clients are trusted to add their share)."""
    test_epsilon: PositiveFloat | None = None
    """ε of all tests on nodes in the stage, beside that of what is learned; unset: nodes of a deployment test no
    models."""

    @property
    def from_server(self) -> bool:
        """Whether units are hidden from the server, too."""
        return self.noise != "server"


class StageKeys(Table):
    """Keys of every stage, and what a family says of itself."""

    pooled: ClassVar[bool] = False
    """Whether one machine holds everybody's examples."""
    communicates: ClassVar[bool] = True
    """Whether anything travels from round to round."""
    any_target: ClassVar[bool] = False
    """Whether it learns numbers and labels, too, and not classes alone."""
    one_task: ClassVar[str] = ""
    """Why the method is for a single task only, and what to do instead; empty: it is for several, too."""
    personalises: ClassVar[bool] = False
    """Whether clients make the model their own, an epoch a round."""
    replays: ClassVar[bool] = False
    """Whether the model is a log of steps, from which it can be rebuilt."""
    representation: ClassVar[Role] = "shared"
    """Of what is trained below the last linear layer: backbone, module, hidden layers."""
    classifier: ClassVar[Role] = "shared"
    """Of the last linear layer, where it is trained."""
    lora_b: ClassVar[Role | None] = None
    """Of LoRA's factors B A, that of B where it is another than that of the rest."""
    sends: ClassVar[tuple[str, ...]] = ("update",)
    """What a client sends, one array per shared parameter each."""
    numbers: ClassVar[tuple[str, ...]] = ()
    """Numbers that a client sends beside them."""
    accumulates: ClassVar[Mapping[str, str]] = {}
    """Kinds of client state that add up what was sent, and of which of `sends`."""
    twin: ClassVar[bool] = False
    """Whether a client has a copy of its own of what is shared, too."""
    plain_sgd: ClassVar[bool] = False
    """Whether the method is defined for local SGD without momentum only."""
    sgd_only: ClassVar[bool] = False
    """Whether the method counts on steps that are gradients times a rate, with momentum or without."""
    products: ClassVar[bool] = False
    """Whether the server adds up the products of clients' LoRA factors, too."""
    folds: ClassVar[bool] = False
    """Whether the server changes the weights below a module, too."""
    phased: ClassVar[bool] = False
    """Whether its first rounds train other parameters than its last, below a module of its own."""
    method: str
    """What the stage does: a name of `headstart methods`."""
    head_init: Literal["previous", "zeros", "random"] = "previous"
    """Where a trained head starts from; a closed-form head is computed and starts from nothing."""
    evaluate_every: PositiveInt = 1
    """Rounds from one evaluation to the next; the last round is always evaluated."""
    eval_split: Literal["test", "validation"] = "test"
    """What accuracy is measured on."""
    start: Literal["previous", "pretrained"] | NonNegativeInt = "previous"
    """The model to start from: that of the stage before, the pre-trained one, or that of a stage by its number."""
    min_replies: PositiveInt | None = None
    """A round with fewer usable answers stops the run; its checkpoint stays good for --resume. Unset: 1; in a
    deployment, all nodes that it started with."""
    deadline: PositiveFloat | None = None
    """Seconds after which a client's answer no longer counts in its round. Unset: none; in a deployment, an hour."""

    def deployed(self, nodes: int) -> Self:
        """The same with the defaults of a deployment that started with so many nodes."""
        defaults = {"min_replies": max(nodes, 1), "deadline": 3600.0}
        return self.model_copy(update={key: value for key, value in defaults.items() if getattr(self, key) is None})

    @property
    def protected(self) -> bool:
        """Whether noise or secure aggregation hides what a client sends."""
        return getattr(self, "privacy", None) is not None or getattr(self, "secure", False)

    @property
    def tests_on_nodes(self) -> bool:
        """Whether nodes of a deployment may tell how good a model is on their data."""
        privacy: Privacy | None = getattr(self, "privacy", None)
        return privacy is None or privacy.test_epsilon is not None

    @property
    def validates_temperature(self) -> bool:
        """Whether the temperature is chosen on the server's validation split."""
        return False

    @property
    def needs_shared_body(self) -> bool:
        """Whether it starts only from a backbone that all clients have in common."""
        return False

    @property
    def needs_all_examples(self) -> bool:
        """Whether it is evaluated on examples of everybody."""
        return False


class SamplingKeys(StageKeys):
    """Keys of stages that sample clients."""

    clients_per_round: PositiveInt | None = None
    """Clients that are drawn in a round."""
    participation: float | None = Field(default=None, gt=0, le=1)
    """Share of the clients in a round; everybody where neither key is set."""
    sampling: Literal["clients", "tasks"] = "clients"
    """With several tasks, a round draws from all clients alike, or as many from each task, in turn where it must."""
    secure: bool = False
    """Of what clients send, a server that follows the protocol learns the sum only; answers are rounded to 24 binary
    places."""
    secure_group: Annotated[int, Field(ge=3)] | None = None
    """Clients are added up in groups of at least so many, and the server learns each group's sum; unset: all clients of
    a round in one group. FedCOF, which needs several means of a class, takes a group for a client."""
    secure_threshold: float = Field(default=0.67, gt=0, le=1)
    """Share of a group that has to stay to the end for its sum to be opened, more than two thirds. The rest may drop
    out: nobody of three clients, one of four. Where nobody may, a sum takes two exchanges instead of four or five."""

    def sampled(self, n_clients: int) -> int:
        """Clients in a round."""
        share = 1.0 if self.participation is None else self.participation
        return min(self.clients_per_round or max(1, round(share * n_clients)), n_clients)

    def asked(self, n_clients: int) -> int:
        """Clients that a round asks: more than count, where the first ones do."""
        more: float = getattr(self, "over_selection")  # noqa: B009 (of a subclass)
        return min(ceil(round((1 + more) * self.sampled(n_clients), 6)), n_clients)

    def survivors(self, clients: int) -> int:
        """How many clients have to stay to the end of a secure aggregation; of fewer than three, each would know too
        much."""
        return max(3, ceil(self.secure_threshold * clients))


Part = Literal["head", "body", "all", "norms", "lora", "adapter", "prefix", "vpt"]


class OptimiserKeys(StageKeys):
    """Steps along slopes of the loss, over batches of a client's examples."""

    trains: ClassVar[Literal[True]] = True
    """Whether the model is trained, round after round, rather than computed."""
    keep_statistics: ClassVar[Literal[False]] = False
    """There are none."""
    batch_size: PositiveInt | Literal["full"] = 64
    """Examples of a local step; "full": all of the client's."""
    lr: PositiveFloat = 0.1
    """Learning rate of local steps."""
    weight_decay: NonNegativeFloat = 0.0
    """Of local steps: this share of the parameters is added to the gradient."""
    temperature: PositiveFloat | Auto = 1.0
    """Scores are divided by it: heads with rows of length one need less than 1. "auto": the temperature of the head
    that the stage starts from."""
    precision: Literal["float32", "bfloat16"] | Auto = "float32"
    """Arithmetic of the backbone where it trains; parameters stay in float32. "auto": the one that the first batch is
    faster in, on this machine."""
    memory_format: Literal["channels-last", "contiguous"] | Auto = "channels-last"
    """How a backbone of images that trains has its numbers in memory. "auto": as the first batch is faster, on this
    machine."""

    def rounds_for(self, n_clients: int) -> int:
        """As many as the recipe says, however many clients there are."""
        rounds: int = getattr(self, "rounds")  # noqa: B009 (of a subclass)
        return rounds

    def turn(self, round: int, n_clients: int) -> int:
        """In each round (from 0) a client replies once."""
        return round

    def seen(self, size: int) -> int:
        """Examples that a step looks at, of a client with so many."""
        return size if self.batch_size == "full" else min(self.batch_size, size)

    def steps_for(self, size: int) -> int:
        """Steps of a client with so many examples in a round."""
        steps, epochs = getattr(self, "local_steps", None), getattr(self, "local_epochs", None)
        return steps or -(-size // max(self.seen(size), 1)) * (epochs or 1)

    @property
    def directions(self) -> int:
        """Directions that slopes are measured along; none where there are gradients."""
        count: int = getattr(self, "num_directions", 0)
        return count

    @property
    def head_passes(self) -> int:
        """Epochs on the head alone, before the others of a round."""
        epochs: int = getattr(self, "head_epochs", 0)
        return epochs

    @property
    def known_temperature(self) -> float:
        """The temperature, once it is known which head the stage starts from."""
        if isinstance(self.temperature, str):
            raise HeadstartError("temperature = 'auto' is that of a head, and none is given yet")
        return self.temperature

    @property
    def server_step(self) -> float:
        """How far the server goes along the mean update: all of it, unless the method has the key `server_lr`."""
        length: float = getattr(self, "server_lr", 1.0)
        return length

    @property
    def plan(self) -> Plan:
        """What is frozen, shared and personal: what ``train`` and ``norm_statistics`` name, in the method's roles."""
        train, norm_statistics = getattr(self, "train"), getattr(self, "norm_statistics")  # noqa: B009 (of a subclass)
        body: Role = self.representation if train in ("all", "body", "norms") else "frozen"
        module: Role = self.representation if train in MODULES else "frozen"
        hidden: Role = "frozen" if train == "body" else self.representation
        head: Role = "frozen" if train == "body" else self.classifier
        statistics: Role = body if norm_statistics == "aggregate" else "frozen"
        return Plan(body, module, hidden, head, statistics, lora_b=self.lora_b)


class SGDKeys(OptimiserKeys):
    """Keys of local SGD."""

    momentum: float = Field(default=0.0, ge=0, lt=1)
    """Of local steps."""
    clip: PositiveFloat | None = None
    """Largest norm of the gradient of the loss, before weight decay and what a method adds to it."""
    norm_statistics: Literal["aggregate", "freeze", "batch"] = "aggregate"
    """Running statistics of batch norm where the backbone trains: averaged like the parameters; those of the
    pre-trained model, in training too; or none, every batch being normalised by its own, in evaluation too."""
    augment: Literal["flip", "none"] = "flip"
    """Random horizontal flips where the backbone trains on images."""


class RoundKeys(SamplingKeys, OptimiserKeys):
    """Anything that is trained round after round."""

    train: Part
    """What is trained: the head, on cached features of the frozen backbone; the backbone under a frozen head; both; the
    head and, of the backbone, norms and biases alone; or the head and a small module on a frozen transformer: low-rank
    updates, adapters, prompts, or a prefix of keys and values."""
    head: Literal["linear", "mlp"] = "linear"
    """"mlp": two hidden layers of rectified units before the linear one (the FedNCM paper's three-layer head)."""
    hidden: PositiveInt = 256
    """Width of the hidden layers."""
    rounds: PositiveInt = 100
    """How often the server asks clients."""
    schedule: Literal["constant", "step", "cosine"] = "constant"
    """"step": a tenth after half and after three quarters of the rounds."""
    warmup_rounds: NonNegativeInt | Auto = 0
    """Rounds over which the learning rate rises to its value; "auto": a tenth of the rounds."""
    weighting: Literal["examples", "uniform"] = "examples"
    """How much a client counts in the mean: by its training examples, or all alike."""
    keep: Literal["last", "best"] = "last"
    """The model that the stage ends with: that of its last round, or that of the evaluated round with the highest
    accuracy on the validation split, or the lowest perplexity of completions."""
    patience: PositiveInt | None = None
    """Stop after so many evaluations that are no better on the validation split; unset: play every round."""
    rank: PositiveInt = 8
    """Of LoRA's updates."""
    alpha_lora: PositiveFloat = 16.0
    """LoRA's updates are scaled by alpha_lora / rank."""
    rslora: bool = False
    """rsLoRA (Kalajdzievski, 2023): updates are scaled by alpha_lora / √rank, and larger ranks learn as fast."""
    freeze_a: bool = False
    """FFA-LoRA (Sun et al., ICLR 2024): of LoRA's factors B A, A stays as it was drawn, so that the mean of clients'
    factors is the mean of their updates, and half as much travels."""
    targets: Literal["all-linear"] | Annotated[tuple[str, ...], Field(strict=False, min_length=1)] | None = None
    """Linear layers that LoRA is on, by the ends of their names, such as ["q_proj", "v_proj"], or all in the blocks;
    Unset: the projections to queries and values."""
    bottleneck: PositiveInt = 8
    """Width of adapters."""
    tokens: PositiveInt = 8
    """Prompts, or keys and values of a prefix, at every block."""
    blocks: NonNegativeInt | None = None
    """The module, or the norms that train, are those of the last so many blocks, and what comes before is computed once
    (not where images are flipped: set augment to "none"); 0: norms behind the blocks alone; unset: all of them."""

    @property
    def module_settings(self) -> dict[str, Any]:
        """What the module is made by, where one is trained."""
        sizes = {"lora": ("rank", "alpha_lora", "targets"), "adapter": ("bottleneck",)}
        keys = (sizes | dict.fromkeys(("prefix", "vpt"), ("tokens",))).get(self.train)
        values = {key: getattr(self, key) for key in (*keys, "blocks")} if keys else {}
        if self.train == "lora":
            values["rslora"] = self.rslora or None  # None: not told, as with files from before
        # As they are read back from a file, where there are no tuples.
        return {key: list(value) if isinstance(value, tuple) else value for key, value in values.items()}

    @property
    def lora_scale(self) -> float:
        """What B A is multiplied by."""
        return self.alpha_lora / (sqrt(self.rank) if self.rslora else self.rank)


class Plain(StageKeys):
    """Without the keys of a `TrainingStage` for privacy, robust means, compression, shares or hidden tasks."""

    hide_task: ClassVar[bool] = False
    share: ClassVar[float] = 0.0
    share_train: ClassVar[Literal["all"]] = "all"
    combine: ClassVar[str] = "mean"
    trim: ClassVar[float] = 0.0
    max_norm: ClassVar[None] = None
    privacy: ClassVar[None] = None
    compress: ClassVar[None] = None
    top_k: ClassVar[float] = 0.0
    over_selection: ClassVar[float] = 0.0
    buffer: ClassVar[None] = None
    staleness: ClassVar[float] = 0.0
