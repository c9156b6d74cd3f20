"""The families of stages: what the tables of a recipe have in common, with the defaults of their keys.

The stage of a method is a subclass of one of them, beside the method, in its file of `headstart.methods`.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import Field, GetCoreSchemaHandler, NonNegativeFloat, PositiveFloat, PositiveInt
from pydantic_core import CoreSchema, core_schema

from headstart.config.keys import (
    MODULES,
    Auto,
    Named,
    Part,
    Plain,
    Privacy,
    RoundKeys,
    SamplingKeys,
    SGDKeys,
    Table,
)
from headstart.core.aggregation import aggregations
from headstart.core.plan import FROZEN, Plan, Role
from headstart.errors import HeadstartError

__all__ = [
    "FAMILIES", "MODULES", "STAGES", "AdaptiveStage", "Auto", "ClosedForm", "ClosedFormStage", "CountNoise",
    "LocalStage", "Named", "Part", "Privacy", "Rounds", "Stage", "Table", "Training", "TrainingStage",
    "ZerothOrderStage", "load_plugins", "method_name", "of_family",
]  # fmt: skip


class CountNoise(Table):
    """Noise on the counts alone (FedCOF paper, appendix I): an experiment on robustness, not differential privacy.

    A count becomes max(n + noise, 0); a smaller ε means more noise.
    """

    kind: Literal["uniform", "gaussian", "laplace"]
    """"uniform": n · U(−(1 − ε), 1 − ε), nothing from ε = 1 on; "gaussian": N(0, 1/ε), of variance 1/ε; "laplace":
    Lap(1/ε). The noisy count is rounded to a whole number; a class that comes out at zero is not sent."""
    epsilon: PositiveFloat
    """ε: the smaller, the more noise."""


class ClosedFormStage(SamplingKeys):
    """Statistics of the clients' features, each client participating once; the server computes a head from them."""

    rounds: PositiveInt | None = None
    """Unset: as many as it takes for every client to participate once. Of each pass, where there are several."""
    privacy: Privacy | None = None
    """Hides any one example of any client, in what it sends or in the head."""
    temperature: PositiveFloat | Literal["auto", "validation"] = 1.0
    """What the head's scores are divided by, for their softmax to be probabilities; no prediction changes. "auto": in
    one more round, clients send the loss of their training examples at some temperatures, and the server takes the one
    with the least; Fed3R's scores are first brought to those of a head that has not seen the example. "validation":
    on the server's validation split, without another round."""
    keep_statistics: bool = False
    """The server keeps every client's statistics with the run, readable by its owner only, so that `headstart update`
    can add and remove clients. Whoever reads that file knows what each client has sent."""
    min_examples: PositiveInt = 1
    """Of a class with fewer examples a client sends nothing, where neither noise nor secure aggregation hides it.
    Nodes of a deployment have a limit of their own in `node.toml`, 2 by default."""
    trains: ClassVar[Literal[False]] = False
    plan: ClassVar[Plan] = FROZEN
    train: ClassVar[Literal["head"]] = "head"
    keep: ClassVar[Literal["last"]] = "last"
    patience: ClassVar[None] = None
    share: ClassVar[float] = 0.0
    norm_statistics: ClassVar[Literal["aggregate"]] = "aggregate"
    augment: ClassVar[Literal["none"]] = "none"
    module_settings: ClassVar[dict[str, Any]] = {}
    blocks: ClassVar[None] = None
    hide_task: ClassVar[bool] = False
    buffer: ClassVar[None] = None
    over_selection: ClassVar[float] = 0.0

    @property
    def rows_per_class(self) -> int:
        """Of the head: one, or as many as the method finds centres."""
        centres: int = getattr(self, "centres", 1)
        return centres

    @property
    def validates_temperature(self) -> bool:
        """Whether the recipe asks for it."""
        return self.temperature == "validation"

    @property
    def noise_on_counts(self) -> CountNoise | None:
        """Noise on the counts alone."""
        return None

    @property
    def passes(self) -> int:
        """How often every client participates: for its statistics, and for what depends on those of all clients."""
        return 1 + (self.temperature == "auto")

    def rounds_per_pass(self, n_clients: int) -> int:
        """Rounds for so many clients to participate once each."""
        every = -(-n_clients // self.sampled(n_clients))
        return every if self.rounds is None else min(self.rounds, every)

    def turn(self, round: int, n_clients: int) -> int:
        """The pass over so many clients that a round (from 0) belongs to: in each a client replies once."""
        return min(round // self.rounds_per_pass(n_clients), self.passes - 1)

    def rounds_for(self, n_clients: int) -> int:
        """Rounds of all passes over so many clients."""
        return self.passes * self.rounds_per_pass(n_clients)


class TrainingStage(RoundKeys, SGDKeys):
    """Local SGD on the clients, an average on the server, round after round."""

    local_epochs: PositiveInt | None = None
    """Passes over the local examples; 1 unless local_steps says otherwise."""
    local_steps: PositiveInt | None = None
    """Steps of a client in a round, instead of passes."""
    optimiser: Literal["sgd", "adamw"] = "sgd"
    """Of the clients' steps. AdamW's moments start anew in every round, and its weight decay is no part of the loss."""
    micro_batch: PositiveInt | None = None
    """Where a backbone or module trains, the gradient of a batch is added up over so many examples at a time: the same
    steps in less memory."""
    checkpoint_gradients: bool = False
    """A transformer's blocks are computed again on the way back instead of kept: the same steps, in less memory and
    a third more time."""
    hide_task: bool = False
    """With several tasks, a client sends zeros for those that are not its own, and receives them all: the server does
    not learn its task from what it sends."""
    share: float = Field(default=0.0, ge=0, le=1)
    """The server holds this share of every client's examples and trains on them after each round (the motivation
    experiment of the FedBABU paper)."""
    share_train: Literal["body", "all"] = "all"
    """What the server trains on its share."""
    combine: Annotated[str, Named(aggregations)] = "mean"
    """What the server makes of the updates of a round, parameter by parameter: "mean", "median", "trimmed-mean", or a
    rule of your own (`headstart.register_aggregation`). The median withstands any minority of clients that send
    anything, the trimmed mean the share that it trims; both count every client alike. All but the mean hold all updates
    of a round in memory."""
    trim: float = Field(default=0.1, gt=0, lt=0.5)
    """Share of the updates that a trimmed mean leaves out at each end."""
    max_norm: PositiveFloat | None = None
    """Largest norm of a client's update; a longer one is shortened to it."""
    privacy: Privacy | None = None
    """Hides any one client (DP-FedAvg): needs weighting = "uniform"."""
    compress: Literal["int8", "top-k", "sign"] | None = None
    """What travels of an update: "int8", whole numbers of eight bits, a quarter of the bytes, rounded at random and
    right on average; "top-k", the numbers of largest absolute value; "sign", a bit for every number. What "top-k" and
    "sign" leave out, the client keeps and adds to its next update (error feedback)."""
    top_k: float = Field(default=0.01, gt=0, le=1)
    """Share of the numbers of an update that compress = "top-k" sends."""
    over_selection: NonNegativeFloat = 0.0
    """Of simulated clients with speeds, a round asks this share more than it needs, and the first to reply count."""
    buffer: PositiveInt | None = None
    """Asynchronous clients (FedBuff, Nguyen et al., AISTATS 2022): a round is a step of the server, as soon as so many
    updates have come, while as many clients as a round otherwise draws are at work at any time. Unset: a round waits
    for its clients."""
    staleness: NonNegativeFloat = 0.5
    """With buffer, an update counts for (1 + s)^-staleness of itself, where s is how many steps the server has taken
    since the client was sent the model."""


class AdaptiveStage(TrainingStage):
    """An adaptive optimiser on the server."""

    server_lr: PositiveFloat = 0.01
    """Learning rate of the server's step along the mean update."""
    beta1: float = Field(default=0.9, ge=0, lt=1)
    """Decay of the mean of updates."""
    beta2: float = Field(default=0.99, ge=0, lt=1)
    """Decay of the mean of squared updates."""
    tau: PositiveFloat = 1e-3
    """Adaptivity: added to the square root of the second moment, which starts at its square."""
    bias_correction: bool = False
    """False: Reddi et al.; true, with beta2 = 0.999 and tau = 1e-8: Adam of torch, as FLSim and the FedNCM paper."""


class ZerothOrderStage(Plain, RoundKeys):
    """Slopes along random directions instead of gradients; batch norm and dropout as in evaluation."""

    checkpoint_gradients: ClassVar[bool] = False
    norm_statistics: ClassVar[Literal["freeze"]] = "freeze"
    augment: ClassVar[Literal["none"]] = "none"
    train: Literal["head", "body", "all", "norms", "lora", "adapter", "prefix"]
    lr: PositiveFloat = 1e-4
    epsilon: PositiveFloat = 1e-3
    """How far a probe goes along a direction, both ways."""
    num_directions: PositiveInt = 1
    """Directions, and so scalars, of a step."""
    perturbation: Literal["gaussian", "rademacher"] = "gaussian"
    """What directions are drawn from: normal numbers, as in MeZO, or signs, +1 and −1 (Spall's SPSA), a bit for each
    parameter in the place of four bytes: drawn once a round whatever the model."""


class LocalStage(Plain, SGDKeys):
    """Every client by itself: it makes the model its own, an epoch a round, and nothing travels."""

    communicates: ClassVar[bool] = False
    personalises: ClassVar[bool] = True
    representation: ClassVar[Role] = "personal"
    classifier: ClassVar[Role] = "personal"
    secure: ClassVar[bool] = False
    secure_group: ClassVar[None] = None
    sampling: ClassVar[Literal["clients"]] = "clients"
    sends: ClassVar[tuple[str, ...]] = ()
    local_epochs: ClassVar[int] = 1
    local_steps: ClassVar[None] = None
    optimiser: ClassVar[Literal["sgd"]] = "sgd"
    micro_batch: ClassVar[None] = None
    checkpoint_gradients: ClassVar[bool] = False
    schedule: ClassVar[Literal["constant"]] = "constant"
    warmup_rounds: ClassVar[int] = 0
    weighting: ClassVar[Literal["uniform"]] = "uniform"
    keep: ClassVar[Literal["last"]] = "last"
    patience: ClassVar[None] = None
    head: ClassVar[None] = None
    """Whatever head there is."""
    hidden: ClassVar[int] = 0
    freeze_a: ClassVar[bool] = False
    module_settings: ClassVar[dict[str, Any]] = {}
    """Those of the module that there is."""
    blocks: ClassVar[None] = None

    @property
    def train(self) -> Part:
        """What changes."""
        raise NotImplementedError

    @property
    def rounds(self) -> int:
        """A round is an epoch."""
        raise NotImplementedError

    def sampled(self, n_clients: int) -> int:
        """Everybody."""
        return n_clients

    asked = sampled

    def survivors(self, clients: int) -> int:
        """Nothing is added up."""
        return clients


Training = TrainingStage | LocalStage
"""Local SGD."""
Rounds = Training | ZerothOrderStage
"""Anything that is trained round after round."""
ClosedForm = ClosedFormStage
FAMILIES = (ClosedFormStage, TrainingStage, ZerothOrderStage, LocalStage)
"""What the stage of another method is a subclass of."""


STAGES: dict[str, type[ClosedForm] | type[Rounds]] = {}
"""The stage of every method; `headstart.register` adds to it."""


def method_name(stage: type[Any]) -> str:
    """The method that a class of stages is for; refused where it is none, or is for none or another's."""
    if not (isinstance(stage, type) and issubclass(stage, FAMILIES)):
        families = ", ".join(family.__name__ for family in FAMILIES)
        raise HeadstartError(
            f"{stage!r} is no stage: make it a subclass of one of {families} in headstart.config.stage"
        )
    names = get_args(stage.model_fields["method"].annotation)
    if len(names) != 1 or not isinstance(names[0], str):
        raise HeadstartError(f'{stage.__name__} names no method: give it the key method: Literal["its-name"]')
    taken = STAGES.get(names[0], stage)
    if (taken.__module__, taken.__qualname__) != (stage.__module__, stage.__qualname__):
        raise HeadstartError(f"{names[0]!r} is the method of {taken.__name__} already; choose another name")
    return names[0]


def of_family(table: Mapping[str, Any]) -> ClosedForm | Rounds:
    """A stage of a method that is not registered here, unchecked: of the family that its keys are of."""
    family = TrainingStage if "lr" in table else ClosedFormStage
    kind = type(family.__name__, (family,), {"model_config": {"extra": "allow"}, "__module__": __name__})
    found: ClosedForm | Rounds = kind.model_construct(**table)  # type: ignore[attr-defined]
    return found


class _ByMethod:
    """Tells pydantic that a stage is one of `STAGES`, whichever its key `method` names."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        stages = {name: handler.generate_schema(stage) for name, stage in STAGES.items()}
        if not stages:  # before any method is registered
            return core_schema.any_schema()
        return core_schema.tagged_union_schema(stages, discriminator="method")


Stage = Annotated[ClosedForm | Rounds, _ByMethod()]


@cache
def load_plugins() -> None:
    """Import what registers methods: our own, and what installed packages name under the entry point `headstart`."""
    import_module("headstart.methods")
    for plugin in entry_points(group="headstart"):
        plugin.load()
