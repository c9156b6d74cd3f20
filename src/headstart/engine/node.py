"""A node: it answers for a client, on the client's own machine or in a simulation, from what it is sent and what it
keeps on disk. Nothing depends on the process that answered before."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from scipy.special import log_softmax

from headstart.data import Federation
from headstart.engine.begin import Begin, digest
from headstart.engine.body import Body
from headstart.engine.rounds import SMALLEST_SUM
from headstart.engine.store import ClientStore
from headstart.errors import HeadstartError, MessageError
from headstart.files import secret, write_atomically
from headstart.heads import LinearHead
from headstart.methods import Cohort, Reply
from headstart.methods.plan import Plan
from headstart.recipe import Recipe
from headstart.stages import ClosedForm, Rounds
from headstart.statistics import Ints
from headstart.wire import Message

Kept = Sequence[tuple[int, int, Mapping[str, tuple[int, ...]]]]
"""Of this stage, and of those that it goes on from: the stage's number, the slot that holds what the client kept, -1
for none, and the names and shapes of it."""


class ForgottenError(MessageError):
    """The node does not have what it was sent, or kept, before."""


@dataclass(frozen=True, eq=False)
class Asked:
    """A question as a client hears it."""

    session: str
    """The server's process: what an earlier one was told does not count."""
    client: int
    begin: str
    """The digest of what the client was told of the stage."""
    kept: Kept
    new: bool
    message: Message


@dataclass(frozen=True, eq=False)
class _Stage:
    stage: ClosedForm | Rounds
    begin: Begin
    method: Any
    body: Body
    source: Any


class Node:
    """Examples of one client, or of all clients of a simulation, and a folder for what is to last.

    ``alone``: whether the federation holds the examples of the client that is asked, whatever its number.
    """

    def __init__(self, recipe: Recipe, federation: Federation, folder: Path, alone: bool) -> None:
        self.recipe, self.federation, self.folder, self.alone = recipe, federation, folder, alone
        self._stage: tuple[str, _Stage] | None = None

    def introduction(self) -> dict[str, Any]:
        """What a server has to know before the first stage."""
        train = self.federation.dataset.train
        dim = train.features().shape[1] if train.kind == "features" else 1
        examples = int(self.federation.sizes.sum())
        guarded = [privacy for stage in self.recipe.stages if (privacy := getattr(stage, "privacy", None))]
        if any(privacy.noise == "client" for privacy in guarded):  # how many there are is not to be known
            examples = min(examples, 1)
        return {"examples": examples, "dim": dim}

    def remember(self, begin: bytes) -> str:
        """Keep what a stage begins with; returns its digest."""
        name = digest(begin)
        path = self._begin(name)
        if not path.is_file():
            self.folder.mkdir(parents=True, exist_ok=True)
            write_atomically(path, lambda file: file.write_bytes(begin))
        return name

    def _begin(self, name: str) -> Path:
        return self.folder / f"begin-{name[:32]}.safetensors"

    def answer(self, asked: Asked) -> Reply:
        """What the client says; what it wants to keep is on disk when this returns."""
        if getattr(self._load(asked).stage, "secure", False):
            raise HeadstartError("in this stage clients are added up; nothing is sent that is not masked")
        return self._answer(asked)

    def _answer(self, asked: Asked) -> Reply:
        stage = self._load(asked)
        number, here = np.array([asked.client]), 0 if self.alone else asked.client
        rows, _ = self.federation.rows_of(np.array([here]))
        if not len(rows):
            raise HeadstartError("there are no training examples here")
        first = 0 if self.alone else self.federation.class_starts[stage.begin.task]
        labels = self.federation.dataset.train.labels[rows] - first
        store = self._store(stage, asked)
        place = np.array([here])
        kept = partial(store.read, clients=place)
        owners = np.full(len(rows), asked.client)
        cohort = Cohort(number, stage.source, rows, labels, owners, np.array([asked.new]), kept, stage.begin.task)
        message = asked.message
        if stage.method.catches_up:
            message = self._caught_up(stage, asked)
        replies: list[Reply] = stage.method.answer(cohort, message)
        (reply,) = replies
        if reply.kept:
            store.write(here, reply.kept)
            store.commit()
        privacy = getattr(stage.stage, "privacy", None)
        if privacy is not None and privacy.noise == "client":  # how many examples there are is not to be known
            return replace(reply, forward_passes=np.zeros(1, np.int64))
        return reply

    def add(self, asked: Asked, told: Message) -> tuple[dict[str, Any], Message]:
        """The next exchange of a secure sum; what the client must not lose is on disk before anybody hears of it."""
        from headstart.privacy.secure import SecureClient

        path = self.folder / f"secret-{asked.client}.safetensors"
        step, facts = told.scalars.get("step"), {"passes": 0, "kept": False}
        if step == "keys":
            try:
                session = bytes.fromhex(str(told.scalars["session"]))
                figures = [int(told.scalars[name]) for name in ("clients", "threshold", "bits")]
            except (KeyError, ValueError) as error:
                raise MessageError(f"the server begins a sum in an unknown way: {error!r}") from None
            if figures[0] < SMALLEST_SUM:
                raise HeadstartError(f"a sum of {figures[0]} clients hides nobody")
            client = SecureClient(session, asked.client, *figures)
            answer = client.keys()
        elif not path.is_file():
            raise ForgottenError("the node no longer has its keys of this sum")
        else:
            client = SecureClient.from_message(Message.from_bytes(path.read_bytes()))
            if step == "shares":
                answer = client.share(told)
            elif step == "masked":
                reply = self._answer(asked)
                number = int(asked.message.scalars["round"])
                answer = client.mask(told, self._load(asked).method.summand(reply, number))
                facts = {"passes": int(reply.forward_passes[0]), "kept": bool(reply.kept)}
            else:
                answer = client.reveal(told)
        self.folder.mkdir(parents=True, exist_ok=True)
        write_atomically(path, lambda file: file.write_bytes(client.to_message().to_bytes()), private=True)
        return facts, answer

    def examine(self, asked: Asked) -> dict[str, Any]:
        """How good the model that the server shows, with what is the client's own, is on the client's test examples."""
        stage, dataset = self._load(asked), self.federation.dataset
        kept = partial(self._store(stage, asked).read, clients=np.array([0 if self.alone else asked.client]))
        own = {name: values[0] for name, values in stage.method.own(kept, stage.begin.task).items()}
        head: LinearHead = stage.method.shown(asked.message, stage.begin.task, own)
        if not len(dataset.test):
            return {"examples": 0, "right": 0, "loss": 0.0, "known": 0}
        changes = not isinstance(stage.source, np.ndarray)
        features = stage.body.embedded("test") if changes else stage.body.features("test")
        scores, labels = head.scores(features), dataset.test.labels
        known = np.isfinite(scores[np.arange(len(labels)), labels])
        losses = -log_softmax(scores[known], axis=1)[np.arange(int(known.sum())), labels[known]]
        right = int(np.count_nonzero(scores.argmax(axis=1) == labels))
        return {"examples": len(labels), "right": right, "loss": float(losses.sum()), "known": int(known.sum())}

    def _load(self, asked: Asked) -> _Stage:
        """The stage that is asked about; the one before it is forgotten."""
        key = asked.session + asked.begin
        if self._stage is None or self._stage[0] != key:
            path = self._begin(asked.begin)
            if not path.is_file():
                raise ForgottenError("the node no longer has what the stage begins with")
            begin = Begin.from_message(Message.from_bytes(path.read_bytes()))
            self._stage = None  # a body less in memory while the next one is loaded
            owners = {"train": self.federation.owners, "test": self.federation.test_owners}
            body = Body(self.recipe.model, self.federation.dataset, owners=owners)
            noise = secret(self.folder / "noise.secret") if self.alone else None
            stage, method = begin.method(self.recipe, body, noise)
            changes = isinstance(stage, Rounds) and Plan.of(stage).changes_features
            source: Any = body.inputs() if changes else body.features("train")
            self._stage = key, _Stage(stage, begin, method, body, source)
        return self._stage[1]

    def _store(self, stage: _Stage, asked: Asked) -> ClientStore:
        """Where the client finds what it kept, in this stage and in those that it goes on from."""
        store = None
        count = 1 if self.alone else self.federation.n_clients
        here = 0 if self.alone else asked.client
        for number, slot, shapes in reversed(asked.kept):
            slots: Ints = np.full(count, -1)
            slots[here] = slot
            folder = self.folder / f"clients-{number}"
            if slot >= 0 and not ClientStore.is_there(folder, shapes):
                raise ForgottenError("the node no longer has what the client kept")
            from_head = self.recipe.stages[number].head_init == "previous"

            def inherits(name: str, from_head: bool = from_head) -> bool:
                return from_head or not name.startswith("personal.head.")

            store = ClientStore(folder, count, shapes, slots, store, inherits)
        assert store is not None
        return store

    def _caught_up(self, stage: _Stage, asked: Asked) -> Message:
        """What the client was told from the start of the stage on; a process that was not there before needs it all."""
        path = self.folder / f"told-{stage.begin.number}-{asked.client}.safetensors"
        earlier = Message.from_bytes(path.read_bytes()) if path.is_file() and not asked.new else None
        try:
            message: Message = stage.method.told(earlier, asked.message)
        except MessageError as error:
            raise ForgottenError(str(error)) from None
        write_atomically(path, lambda file: file.write_bytes(message.to_bytes()))
        return message
