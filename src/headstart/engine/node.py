"""A node: it answers for a client, on the client's own machine or in a simulation, from what it is sent and what it
keeps on disk. Nothing depends on the process that answered before.

A node on a machine of its own does not trust the server to ask only what the recipe says. Within a run it is one
client, answers every round of a stage once, and tests one model after every round. The record of that is on its disk
before an answer leaves: the same question gets the same answer again, another one for the same round is refused. Where
noise or secure sums protect a stage, this holds over all runs of its recipe: a new run gets no new answers. All that
leaves is in the node's ledger, and within the limits of its owner.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from scipy.special import log_softmax

from headstart.channel.figures import FiguresChannel
from headstart.config.node import NodeLimits
from headstart.config.recipe import Recipe
from headstart.config.stage import ClosedForm, Rounds
from headstart.core.files import write_atomically, write_json
from headstart.core.message import Message, Scalar
from headstart.core.metrics import tally_classes, tally_targets
from headstart.core.reply import ClientState, Reply
from headstart.core.statistics import Ints
from headstart.data import Federation
from headstart.engine.body import Body
from headstart.engine.client import ClientRuntime
from headstart.engine.client_states import ClientStates
from headstart.engine.flower_messages import question_digest
from headstart.engine.node_ledger import NodeLedger, promise_key
from headstart.engine.setup import StageSetup, digest, plan_of
from headstart.errors import HeadstartError, MessageError
from headstart.solvers.cohort import Cohort

if TYPE_CHECKING:  # a node without secure sums does not load their cryptography
    from headstart.channel.secure import Identity

StatesInUse = Sequence[tuple[int, int, Mapping[str, tuple[int, ...]]]]
"""Of this stage, and of those that it goes on from: the stage's number, the slot that holds the client's state, -1 for
none, and the names and shapes of it."""

WRITTEN: ClientState = {"": np.zeros(0, np.float32)}
"""In the place of a state that a node has written to its own disk."""


class StateLostError(MessageError):
    """The node does not have what it was sent, or kept, before."""


@dataclass(frozen=True, eq=False)
class NodeRequest:
    """A request as a node receives it."""

    session: str
    """The server's process: what an earlier one was told does not count."""
    client: int
    setup: str
    """The digest of what the client was told of the stage."""
    states: StatesInUse
    new: bool
    message: Message
    done: int = 0
    """Of a model to be tested: the rounds behind it."""

    @property
    def digest(self) -> str:
        """The same for the same question, whichever process of the server asks."""
        return question_digest(vars(self), self.message.to_bytes())


@dataclass(frozen=True, eq=False)
class _Stage:
    stage: ClosedForm | Rounds
    setup: StageSetup
    runtime: ClientRuntime
    figures: FiguresChannel
    body: Body
    source: Any

    @property
    def method(self) -> Any:
        """The method of the stage."""
        return self.runtime.method

    @property
    def rounds(self) -> int:
        """Rounds of the stage, as the recipe has them."""
        return self.stage.rounds_for(self.setup.clients)


class Node:
    """Examples of one client, or of all clients of a simulation, and a folder for what is to last.

    ``alone``: whether the federation holds the examples of the client that is asked, whatever its number; the folder
    is then that of a run, in the node's own, which has the ledger. ``identity``: as whom such a node signs what it
    sends to secure sums; ``limits``: what may leave it.
    """

    def __init__(
        self,
        recipe: Recipe,
        federation: Federation,
        folder: Path,
        alone: bool,
        identity: Identity | None = None,
        limits: NodeLimits | None = None,
    ) -> None:
        self.recipe, self.federation, self.folder, self.alone = recipe, federation, folder, alone
        self.recipe_digest = digest(recipe.to_toml().encode())
        self.identity, self.limits, self.ledger = identity, limits or NodeLimits(), NodeLedger(folder.parent)
        self._stage: tuple[str, _Stage] | None = None

    def node_info(self) -> dict[str, Any]:
        """What a server has to know before the first stage."""
        if self.alone and any(stage.secure for stage in self.recipe.stages):
            from headstart.engine.node_sums import check_identity

            check_identity(self.identity)
        train = self.federation.dataset.train
        dim = train.features().shape[1] if train.kind == "features" else 1
        examples = int(self.federation.sizes.sum())
        if any(stage.privacy and stage.privacy.from_server for stage in self.recipe.stages):  # is not to be known
            examples = min(examples, 1)
        found: dict[str, Any] = {"examples": examples, "dim": dim}
        if self.alone and self.recipe.tasks:
            (found["task"],) = self.federation.tasks
        if self.alone:
            if self.recipe.model.backbone != "features":
                from headstart.backbones import load_backbone

                found["weights"] = load_backbone(self.recipe.model).weights_digest()
            self.limits.check(self.recipe, self.recipe_digest)
            with self.ledger.locked():
                self.enter("join", **found)
        return found

    def remember(self, setup: bytes) -> str:
        """Keep what a stage starts from; returns its digest."""
        name = digest(setup)
        path = self._setup(name)
        with self._locked():
            if not path.is_file():
                write_atomically(path, lambda file: file.write_bytes(setup))
        return name

    def _setup(self, name: str) -> Path:
        return self.folder / f"setup-{name[:32]}.safetensors"

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """One message at a time, on a machine of its own."""
        if not self.alone:
            self.folder.mkdir(parents=True, exist_ok=True)
            yield
            return
        with self.ledger.locked(self.folder):
            yield

    @contextmanager
    def _as(self, client: int) -> Iterator[None]:
        """One message at a time, and always for the client that the node was first asked as."""
        if self.identity is not None and self.identity.number != client:
            raise HeadstartError(
                f"the node is number {self.identity.number} of its list of peers, and is asked as client {client}"
            )
        with self._locked():
            if self.alone:
                self.limits.check(self.recipe, self.recipe_digest)
            path = self.folder / "client.json"
            if self.alone and not path.is_file():
                write_json(path, client)
            if self.alone and (own := json.loads(path.read_text(encoding="utf-8"))) != client:
                raise HeadstartError(f"the node is client {own} of this run, and is asked as client {client}")
            yield

    def answer(self, asked: NodeRequest) -> Reply:
        """What the client says; what it wants to keep is on disk when this returns."""
        with self._as(asked.client):
            stage = self._load(asked)
            if stage.stage.secure:
                raise HeadstartError("in this stage clients are added up; nothing is sent that is not masked")
            reply = self._once(asked)
            self.enter("answer", **self.promise(asked), **sent(asked.digest, reply.message))
            return reply

    def enter(self, kind: str, **facts: Any) -> None:
        """Write into the ledger what is about to leave."""
        if self.alone:
            self.ledger.append({"kind": kind, "run": self.folder.name, "recipe": self.recipe_digest, **facts})

    def promise(self, asked: NodeRequest, test: bool = False) -> dict[str, Any]:
        """The privacy guarantee once a question is answered, or a model tested, with what it is about.

        Where that is more than the node's owner allows, the question is refused.
        """
        stage = self._load(asked)
        round = asked.done - 1 if test else int(asked.message.scalars["round"])
        privacy = stage.figures.promise if test else stage.runtime.channel.spent(round + 1)
        facts = {"stage": stage.setup.number, "method": stage.stage.method, "round": round}
        facts |= {"of": "test" if test else "answer", "privacy": privacy}
        if self.alone:
            key = promise_key({**facts, "run": self.folder.name, "recipe": self.recipe_digest})
            self.limits.check_spending(stage.stage, privacy, self.ledger.spent(self.limits, key))
        return facts

    def _once(self, asked: NodeRequest) -> Reply:
        """The answer to a question; on a machine of its own, the one answer of the client to this round."""
        if not self.alone:
            return self._answer(asked)
        stage, number = self._load(asked), asked.message.scalars.get("round")
        if type(number) is not int or not 0 <= number < stage.rounds:
            raise HeadstartError(f"the stage has {stage.rounds} rounds, from 0; the server asks for round {number!r}")
        self.promise(asked)
        path = self.record("answered", stage.setup.number)
        record = Message.from_bytes(path.read_bytes()) if path.is_file() else Message(scalars={"round": -1})
        if record.scalars.get("question") != asked.digest:
            last, once = int(record.scalars["round"]), stage.method.one_shot
            if number <= last or (once and last >= 0):
                what = "this stage" if once else f"round {last}"
                anew = "; a new run needs another recipe, to which nodes agree" if stage.stage.protected else ""
                raise HeadstartError(f"the node has answered {what} before, and answers no other question for it{anew}")
            reply = self._answer(asked)
            facts: dict[str, Scalar] = {"question": asked.digest, "round": number, "task": reply.task}
            facts |= {"passes": int(reply.forward_passes[0]), "kept": bool(reply.state)}
            record = Message({"answer": np.frombuffer(reply.message.to_bytes(), np.uint8)}, facts)
            write_atomically(path, lambda file: file.write_bytes(record.to_bytes()), private=True)
        answer, passes = Message.from_bytes(record.arrays["answer"].tobytes()), int(record.scalars["passes"])
        state = WRITTEN if record.scalars["kept"] else {}
        sizes = np.array([answer.nbytes]), np.array([passes])
        return Reply(np.array([asked.client]), answer, *sizes, state, int(record.scalars["task"]))

    def record(self, what: str, number: int) -> Path:
        """The last question of a stage that was answered, with the answer and, once a sum is open, its survivors; or
        the last model that was tested. Of a run; of all runs of the recipe where the stage is protected."""
        if self.alone and self.recipe.stages[number].protected:
            return self.ledger.home / f"{what}-{self.recipe_digest[:32]}-{number}.safetensors"
        return self.folder / f"{what}-{number}.safetensors"

    def _answer(self, asked: NodeRequest) -> Reply:
        stage = self._load(asked)
        number, here = np.array([asked.client]), 0 if self.alone else asked.client
        rows, _ = self.federation.rows_of(np.array([here]))
        if not len(rows):
            raise HeadstartError("there are no training examples here")
        first = 0 if self.alone else self.federation.class_starts[stage.setup.task]
        train = self.federation.dataset.train
        labels = train.labels[rows] - first
        states = self._states(asked)
        read = partial(states.read, clients=np.array([here]))
        owners = np.full(len(rows), asked.client)
        self._refuse_single_labels(stage.stage)
        new, task = np.array([asked.new]), stage.setup.task
        cohort = Cohort(number, stage.source, rows, labels, owners, new, read, task, targets=train.targets)
        message = self._caught_up(stage, asked) if stage.method.replays else asked.message
        (reply,) = stage.runtime.answer(cohort, message)
        if reply.state:
            states.write(here, reply.state)
            states.commit()
        return reply

    def add(self, asked: NodeRequest, told: Message, test: bool = False) -> tuple[dict[str, Any], Message]:
        """The next exchange of a secure sum; what the client must not lose is on disk before anybody hears of it."""
        from headstart.engine.node_sums import next_exchange

        with self._as(asked.client):
            return next_exchange(self, asked, told, test)

    def evaluate(self, asked: NodeRequest) -> Message:
        """How good the model that the server shows is on the client's test examples: one model after every round.

        A server that may show any model learns sums of the test examples, class by class.
        """
        with self._as(asked.client):
            if self._load(asked).stage.secure:
                raise HeadstartError("in this stage clients are added up; figures of tests are, too")
            figures = self.tested(asked)
            self.enter("test", **self.promise(asked, test=True), **sent(asked.digest, figures))
            return figures

    def tested(self, asked: NodeRequest, survivors: int = 1) -> Message:
        """The figures of a model after a round; the same again for the same question, and none for another.

        survivors: how many clients of a secure sum share its noise at least.
        """
        stage = self._load(asked)
        if not stage.stage.tests_on_nodes:
            raise HeadstartError(
                "with privacy a node tests no models: its figures would be exact; set privacy.test_epsilon, or give "
                "the server test data of its own"
            )
        if not self.alone:
            return self._evaluate(asked, survivors)
        if not self.limits.evaluation:
            raise HeadstartError("node.toml: limits.evaluation is false; this node tests no models for others")
        rounds, every = stage.rounds, stage.stage.evaluate_every
        if asked.done not in (rounds, *range(0, rounds, every)):
            raise HeadstartError(
                f"the stage has {rounds} rounds, and tests after every {every}; the server asks after {asked.done}"
            )
        self.promise(asked, test=True)
        path = self.record("tested", stage.setup.number)
        record = Message.from_bytes(path.read_bytes()) if path.is_file() else Message(scalars={"done": -1})
        # On these the noise depends: a server that told the node otherwise of them would get less of it.
        about: dict[str, Scalar] = {"setup": asked.setup, "survivors": survivors} if stage.stage.privacy else {}
        if any(record.scalars.get(name, value) != value for name, value in about.items()):
            raise HeadstartError("the node was told otherwise of this stage when it tested a model before")
        if asked.done > int(record.scalars["done"]):
            figures = self._evaluate(asked, survivors).arrays
            record = Message(figures, {"done": asked.done, "question": asked.digest, **about})
            write_atomically(path, lambda file: file.write_bytes(record.to_bytes()), private=True)
        elif record.scalars["question"] != asked.digest:
            last = record.scalars["done"]
            raise HeadstartError(f"the node has tested another model after round {last} of this stage")
        return Message(record.arrays)

    def _evaluate(self, asked: NodeRequest, survivors: int) -> Message:
        """The model that the server shows, with what is the client's own, on the client's test examples."""
        stage, dataset = self._load(asked), self.federation.dataset
        read = partial(self._states(asked).read, clients=np.array([0 if self.alone else asked.client]))
        own = {name: values[0] for name, values in stage.method.own(read, stage.setup.task).items()}
        head = stage.method.load(asked.message, stage.setup.task, own)
        if self.alone and len(head.bias) != len(dataset.classes):  # more would sort examples as finely as anybody likes
            raise HeadstartError(f"the model to be tested has {len(head.bias)} classes, and not {len(dataset.classes)}")
        if dataset.test.targets is not None:
            scores = head.scores(stage.body.features("test") if len(dataset.test) else np.zeros((0, stage.body.dim)))
            return stage.figures.encode_targets(tally_targets(scores, dataset.test.targets, dataset.target))
        if not len(dataset.test):
            nothing = tally_classes(np.zeros((0, len(head.bias))), np.zeros(0, np.int64))
            return stage.figures.encode(0, 0, np.zeros(0), nothing, survivors)
        changes = not isinstance(stage.source, np.ndarray)
        features = stage.body.embedded("test") if changes else stage.body.features("test")
        if stage.body.generates:  # a token of a completion counts as an example, none of which is right
            totals, tokens = features.astype(np.float64).T
            losses = np.repeat(totals / tokens, tokens.astype(np.int64))
            tally = tally_classes(np.zeros((len(losses), 1)), np.zeros(len(losses), np.int64))
            tally["classes"][2], tally["bins"][:] = 0, 0
            return stage.figures.encode(len(losses), 0, losses, tally, survivors)
        scores, labels = head.scores(features), dataset.test.labels
        known = np.isfinite(scores[np.arange(len(labels)), labels])
        losses = -log_softmax(scores[known], axis=1)[np.arange(int(known.sum())), labels[known]]
        right = int(np.count_nonzero(scores.argmax(axis=1) == labels))
        return stage.figures.encode(len(labels), right, losses, tally_classes(scores, labels), survivors)

    def _refuse_single_labels(self, stage: ClosedForm | Rounds) -> None:
        """Sums of the features with each label are told beside how many examples two labels share: where one has an
        example more than another, their sums differ by that example."""
        if self.alone and self.federation.dataset.target == "multilabel" and not stage.protected:
            raise HeadstartError(
                "sums of features by label can show single examples, where two labels differ by one; set secure = true "
                "or privacy in the stage"
            )

    def _load(self, asked: NodeRequest) -> _Stage:
        """The stage that is asked about; the one before it is forgotten."""
        key = asked.session + asked.setup
        if self._stage is None or self._stage[0] != key:
            setup = self._told(asked)
            self._stage = None  # a body less in memory while the next one is loaded
            owners = {"train": self.federation.owners, "test": self.federation.test_owners}
            body = Body(self.recipe.model, self.federation.dataset, owners=owners)
            recipe = self.limits.applied(self.recipe) if self.alone else self.recipe
            target, stage = self.federation.dataset.target, self.recipe.stages[setup.number]
            method, channel = setup.method(recipe, body, None if self.alone else (), target)
            figures = FiguresChannel.of(stage, setup.clients, None, setup.tasks[setup.task][1], target)
            changes = plan_of(stage, frozenset(setup.personal), body.fixed_head).changes_features
            source: Any = body.inputs() if changes else body.features("train")
            self._stage = key, _Stage(stage, setup, ClientRuntime(method, channel), figures, body, source)
        return self._stage[1]

    def _told(self, asked: NodeRequest) -> StageSetup:
        """What the server has told of the stage."""
        path = self._setup(asked.setup)
        if not path.is_file():
            raise StateLostError("the node no longer has what the stage starts from")
        setup = StageSetup.from_message(Message.from_bytes(path.read_bytes()))
        if type(setup.number) is not int or not 0 <= setup.number < len(self.recipe.stages):
            raise MessageError(f"the recipe has {len(self.recipe.stages)} stages, from 0, and none {setup.number!r}")
        tasks = [name for name, *_ in setup.tasks]
        if self.alone and (tuple(tasks), tasks[setup.task : setup.task + 1]) != (
            self.recipe.task_names, [*self.federation.tasks],
        ):  # fmt: skip
            raise HeadstartError(f"the node's task is {self.federation.tasks[0]!r}, and the server asks for another")
        return setup

    def _states(self, asked: NodeRequest) -> ClientStates:
        """The client's states, of this stage and of those that it goes on from."""
        states = None
        count = 1 if self.alone else self.federation.n_clients
        here = 0 if self.alone else asked.client
        for number, slot, shapes in reversed(asked.states):
            slots: Ints = np.full(count, -1)
            slots[here] = slot
            folder = self.folder / f"clients-{number}"
            if slot >= 0 and not ClientStates.is_there(folder, shapes):
                raise StateLostError("the node no longer has the client's state")
            from_head = self.recipe.stages[number].head_init == "previous"

            def inherits(name: str, from_head: bool = from_head) -> bool:
                return from_head or not name.startswith("personal.head.")

            states = ClientStates(folder, count, shapes, slots, states, inherits)
        assert states is not None
        return states

    def _caught_up(self, stage: _Stage, asked: NodeRequest) -> Message:
        """What the client was told from the start of the stage on; a process that was not there before needs it all."""
        from headstart.methods.fedmezo import joined

        path = self.folder / f"log-{stage.setup.number}-{asked.client}.safetensors"
        earlier = Message.from_bytes(path.read_bytes()) if path.is_file() and not asked.new else None
        try:
            message = joined(earlier, asked.message)
        except MessageError as error:
            raise StateLostError(str(error)) from None
        write_atomically(path, lambda file: file.write_bytes(message.to_bytes()))
        return message


def sent(question: str, answer: Message) -> dict[str, Any]:
    """What the ledger says of an answer: to which question, which one, and how long it is."""
    data = answer.to_bytes()
    return {"question": question, "answer": digest(data), "bytes": len(data)}
