"""A stage as a node has loaded it: the request, the method on the node's backbone, and the metrics of a model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from scipy.special import log_softmax

from headstart.channel.figures import FiguresChannel
from headstart.config.recipe import Recipe
from headstart.config.stage import ClosedForm, Rounds
from headstart.core.message import Message
from headstart.core.metrics import tally_classes, tally_targets
from headstart.core.reply import ClientState
from headstart.core.update import Blocks
from headstart.data import Dataset, Federation
from headstart.engine.client import ClientRuntime
from headstart.engine.flower_messages import request_digest
from headstart.engine.model_store import ModelStore
from headstart.engine.setup import StageSetup, plan_of
from headstart.errors import MessageError
from headstart.heads import LinearHead

StatesInUse = Sequence[tuple[int, int, Mapping[str, tuple[int, ...]]]]
"""Of this stage, and of those that it continues: the stage's number, the slot that holds the client's state, -1 for
none, and the names and shapes of it."""

WRITTEN: ClientState = {"": np.zeros(0, np.float32)}
"""In the place of a state that a node has written to its own disk."""


@dataclass(frozen=True, eq=False)
class NodeRequest:
    """A request as a node receives it."""

    session: str
    """The server's process: what an earlier one sent does not count."""
    client: int
    setup: str
    """The digest of the setup that the client was sent."""
    states: StatesInUse
    new: bool
    message: Message
    done: int = 0
    """Of a model to be tested: the rounds behind it."""

    @property
    def digest(self) -> str:
        """The same for the same request, whichever process of the server sends it."""
        return request_digest(vars(self), self.message.to_bytes())


@dataclass(frozen=True, eq=False)
class NodeStage:
    """A stage with its method, channel and examples, once a node has loaded it."""

    stage: ClosedForm | Rounds
    setup: StageSetup
    runtime: ClientRuntime
    figures: FiguresChannel
    store: ModelStore
    source: Any
    deployed: bool
    client_state: Blocks
    """Names and shapes of what stays with the client."""

    @property
    def method(self) -> Any:
        """The method of the stage."""
        return self.runtime.method

    @classmethod
    def load(
        cls,
        recipe: Recipe,
        limited: Recipe,
        federation: Federation,
        setup: StageSetup,
        deployed: bool,
        states: Path | None = None,
    ) -> NodeStage:
        """A stage by its setup; limited: the recipe within the limits of the node's owner; states: a folder for what
        frozen blocks make of the examples."""
        owners = {"train": federation.owners, "test": federation.test_owners}
        target, stage = federation.dataset.target, recipe.stages[setup.number]
        # One example that weights of the server's choice make infinite must not stop all others: it would tell of it.
        finite: Literal["checked", "forced"] = "forced" if deployed else "checked"
        store = ModelStore(recipe.model_of(setup.task), federation.dataset, owners=owners, states=states, finite=finite)
        method, channel = setup.method(limited, store, None if deployed else (), target)
        figures = FiguresChannel.of(stage, setup.clients, None, setup.tasks[setup.task][1], target)
        changes = plan_of(stage, frozenset(setup.personal), store.fixed_head).changes_features
        source: Any = store.inputs() if changes else store.features("train")
        runtime = ClientRuntime(method, channel)
        return cls(stage, setup, runtime, figures, store, source, deployed, runtime.client_state)

    def evaluate(self, model: Message, read: Callable[..., Any], dataset: Dataset, survivors: int) -> Message:
        """The server's model, with the client's personal parameters, on the client's test examples.

        read: what the client keeps; survivors: how many clients of a secure sum share its noise at least.
        """
        own = {name: values[0] for name, values in self.method.personal_params(read, self.setup.task).items()}
        head = self.method.load(model, self.setup.task, own)
        classes = len(dataset.classes)
        if self.deployed:
            self._check_head(head, classes)
        if dataset.test.targets is not None:
            scores = head.scores(self.store.features("test") if len(dataset.test) else np.zeros((0, self.store.dim)))
            return self.figures.encode_targets(tally_targets(scores, dataset.test.targets, dataset.target))
        if not len(dataset.test):
            nothing = tally_classes(np.zeros((0, len(head.bias))), np.zeros(0, np.int64))
            return self.figures.encode(0, 0, np.zeros(0), nothing, survivors)
        changes = not isinstance(self.source, np.ndarray)
        features = self.store.embedded("test") if changes else self.store.features("test")
        if self.store.generates:  # a token of a completion counts as an example, none of which is right
            totals, tokens = features.astype(np.float64).T
            losses = np.repeat(totals / tokens, tokens.astype(np.int64))
            tally = tally_classes(np.zeros((len(losses), 1)), np.zeros(len(losses), np.int64))
            tally["classes"][2], tally["bins"][:] = 0, 0
            return self.figures.encode(len(losses), 0, losses, tally, survivors)
        with np.errstate(over="ignore", invalid="ignore"):  # of a model that has diverged
            scores = head.scores(features)
        labels = dataset.test.labels
        known = np.isfinite(scores[np.arange(len(labels)), labels])
        losses = -log_softmax(scores[known], axis=1)[np.arange(int(known.sum())), labels[known]]
        right = int(np.count_nonzero(scores.argmax(axis=1) == labels))
        return self.figures.encode(len(labels), right, losses, tally_classes(scores, labels), survivors)

    @staticmethod
    def _check_head(head: LinearHead, classes: int) -> None:
        """Refuse a model that would sort examples as finely as anybody likes, or fail with some of them."""
        if len(head.bias) != classes * head.centres:
            raise MessageError(f"the model to be tested has {len(head.bias)} classes, and not {classes}")
        if not (np.isfinite(head.weight).all() and (np.isfinite(head.bias) | np.isneginf(head.bias)).all()):
            raise MessageError("the head of the model to be tested holds NaN or infinity")
