"""A node: it replies for a client, on the client's own machine or in a simulation, from what it is sent and what it
keeps on disk. Nothing depends on the process that replied before.

A deployed node does not trust the server to request only what the recipe says. Within a run it is one client, replies
to every round of a stage once, and evaluates one model after every round. The record of that is on its disk before a
reply leaves: the same request gets the same reply again, another one for the same round is refused. Where noise or
secure aggregation protects a stage, this holds over all runs of its recipe: a new run gets no new replies. All that
leaves is in the node's ledger, and within the limits of its owner.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from headstart.config.node import NodeLimits
from headstart.config.recipe import Recipe
from headstart.config.stage import ClosedForm, Rounds
from headstart.core.files import write_atomically, write_json
from headstart.core.message import Message, Scalar
from headstart.core.reply import Reply
from headstart.core.statistics import Ints
from headstart.data import Federation
from headstart.engine.client_states import ClientStates
from headstart.engine.node_ledger import NodeLedger, guarantee_key
from headstart.engine.node_stage import WRITTEN, NodeRequest, NodeStage, StateLostError
from headstart.engine.setup import StageSetup, digest
from headstart.errors import HeadstartError, MessageError
from headstart.solvers.cohort import Cohort

if TYPE_CHECKING:  # a node without secure aggregation does not load its cryptography
    from headstart.channel.secure import Identity


class Node:
    """Examples of one client, or of all clients of a simulation, and a folder for what is to last.

    ``deployed``: whether this is the client's own machine: the federation holds the examples of that client, whatever
    its number, and the folder is that of a run, in the node's own, which has the ledger. ``identity``: as whom such a
    node signs what it sends in secure aggregation; ``limits``: what may leave it.
    """

    def __init__(
        self,
        recipe: Recipe,
        federation: Federation,
        folder: Path,
        deployed: bool,
        identity: Identity | None = None,
        limits: NodeLimits | None = None,
    ) -> None:
        self.recipe, self.federation, self.folder, self.deployed = recipe, federation, folder, deployed
        self.recipe_digest = digest(recipe.to_toml().encode())
        self.identity, self.limits, self.ledger = identity, limits or NodeLimits(), NodeLedger(folder.parent)
        self._stage: tuple[str, NodeStage] | None = None

    def node_info(self) -> dict[str, Any]:
        """What the server must know before the first stage."""
        if self.deployed and any(stage.secure for stage in self.recipe.stages):
            from headstart.engine.node_sums import check_identity

            check_identity(self.identity)
        train = self.federation.dataset.train
        dim = train.dim if train.kind == "features" else 1
        examples = int(self.federation.sizes.sum())
        if any(stage.privacy and stage.privacy.from_server for stage in self.recipe.stages):  # is not to be known
            examples = min(examples, 1)
        found: dict[str, Any] = {"examples": examples, "dim": dim}
        if self.deployed and self.recipe.tasks:
            (found["task"],) = self.federation.tasks
        if self.deployed:
            if self.recipe.model.backbone != "features":
                from headstart.backbones import load_backbone

                found["weights"] = load_backbone(self.recipe.model_of(0)).weights_digest()
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
        """One message at a time, on a deployed node."""
        if not self.deployed:
            self.folder.mkdir(parents=True, exist_ok=True)
            yield
            return
        with self.ledger.locked(self.folder):
            yield

    @contextmanager
    def _as(self, client: int) -> Iterator[None]:
        """One message at a time, and always for the client of the node's first request."""
        if self.identity is not None and self.identity.number != client:
            raise HeadstartError(
                f"the node is number {self.identity.number} of its list of peers, and the request is to client {client}"
            )
        with self._locked():
            if self.deployed:
                self.limits.check(self.recipe, self.recipe_digest)
            path = self.folder / "client.json"
            if self.deployed and not path.is_file():
                write_json(path, client)
            if self.deployed and (own := json.loads(path.read_text(encoding="utf-8"))) != client:
                raise HeadstartError(f"the node is client {own} of this run, and the request is to client {client}")
            yield

    def answer(self, request: NodeRequest) -> Reply:
        """The client's reply; its new state is on disk when this returns."""
        with self._as(request.client):
            stage = self.stage_of(request)
            if stage.stage.secure:
                raise HeadstartError("the stage has secure aggregation; nothing is sent that is not masked")
            reply = self.reply_once(request)
            self.enter("answer", **self.guarantee(request), **sent(request.digest, reply.message))
            return reply

    def enter(self, kind: str, **facts: Any) -> None:
        """Write into the ledger what is about to leave."""
        if self.deployed:
            self.ledger.append({"kind": kind, "run": self.folder.name, "recipe": self.recipe_digest, **facts})

    def guarantee(self, request: NodeRequest, test: bool = False) -> dict[str, Any]:
        """The privacy guarantee after the reply to a request, or after a test, and the stage and round of it.

        Where that is more than the node's owner allows, the request is refused.
        """
        stage = self.stage_of(request)
        round = request.done - 1 if test else int(request.message.scalars["round"])
        privacy = stage.figures.guarantee if test else stage.runtime.channel.spent(round + 1)
        facts = {"stage": stage.setup.number, "method": stage.stage.method, "round": round}
        facts |= {"of": "test" if test else "answer", "privacy": privacy}
        if self.deployed:
            key = guarantee_key({**facts, "run": self.folder.name, "recipe": self.recipe_digest})
            self.limits.check_spending(stage.stage, privacy, self.ledger.spent(self.limits, key))
        return facts

    def reply_once(self, request: NodeRequest) -> Reply:
        """The reply to a request; on a deployed node, the one reply of the client to this round."""
        if not self.deployed:
            return self._client_update(request)
        stage, number = self.stage_of(request), request.message.scalars.get("round")
        if type(number) is not int or not 0 <= number < stage.rounds:
            raise HeadstartError(f"the stage has {stage.rounds} rounds, from 0; the request is for round {number!r}")
        self.guarantee(request)
        path = self.record("answered", stage.setup.number)
        record = Message.from_bytes(path.read_bytes()) if path.is_file() else Message(scalars={"round": -1})
        if record.scalars.get("question") != request.digest:
            last, once = int(record.scalars["round"]), stage.method.one_shot
            if number <= last or (once and last >= 0):
                what = "this stage" if once else f"round {last}"
                anew = "; a new run needs another recipe, to which nodes agree" if stage.stage.protected else ""
                raise HeadstartError(
                    f"the node has replied to {what} before, and replies to no other request for it{anew}"
                )
            reply = self._client_update(request)
            facts: dict[str, Scalar] = {"question": request.digest, "round": number, "task": reply.task}
            facts |= {"passes": int(reply.forward_passes[0]), "kept": bool(reply.state)}
            record = Message({"answer": np.frombuffer(reply.message.to_bytes(), np.uint8)}, facts)
            write_atomically(path, lambda file: file.write_bytes(record.to_bytes()), private=True)
        answer, passes = Message.from_bytes(record.arrays["answer"].tobytes()), int(record.scalars["passes"])
        state = WRITTEN if record.scalars["kept"] else {}
        sizes = np.array([answer.nbytes]), np.array([passes])
        return Reply(np.array([request.client]), answer, *sizes, state, int(record.scalars["task"]))

    def record(self, what: str, number: int) -> Path:
        """The file of the last request of a stage and its reply, with the survivors once a secure sum is open; or
        of the last test. Of a run; of all runs of the recipe where the stage is protected."""
        if self.deployed and self.recipe.stages[number].protected:
            return self.ledger.home / f"{what}-{self.recipe_digest[:32]}-{number}.safetensors"
        return self.folder / f"{what}-{number}.safetensors"

    def _client_update(self, request: NodeRequest) -> Reply:
        stage = self.stage_of(request)
        number, here = np.array([request.client]), 0 if self.deployed else request.client
        rows, _ = self.federation.rows_of(np.array([here]))
        if not len(rows):
            raise HeadstartError("there are no training examples here")
        first = 0 if self.deployed else self.federation.class_starts[stage.setup.task]
        train = self.federation.dataset.train
        labels = train.labels[rows] - first
        states = self._states(request)
        read = partial(states.read, clients=np.array([here]))
        owners = np.full(len(rows), request.client)
        self._refuse_single_labels(stage.stage)
        new, task = np.array([request.new]), stage.setup.task
        cohort = Cohort(number, stage.source, rows, labels, owners, new, read, task, targets=train.targets)
        message = self._caught_up(stage, request) if stage.method.replays else request.message
        (reply,) = stage.runtime.answer(cohort, message)
        if reply.state:
            states.write(here, reply.state)
            states.commit()
        return reply

    def add(self, request: NodeRequest, received: Message, test: bool = False) -> tuple[dict[str, Any], Message]:
        """The next exchange of a secure sum; what the client must not lose is on disk before a reply leaves."""
        from headstart.engine.node_sums import next_exchange

        with self._as(request.client):
            return next_exchange(self, request, received, test)

    def evaluate(self, request: NodeRequest) -> Message:
        """The metrics of the server's model on the client's test examples: one model after every round.

        A server that may send any model learns sums of the test examples, class by class.
        """
        with self._as(request.client):
            if self.stage_of(request).stage.secure:
                raise HeadstartError("the stage has secure aggregation; metrics of tests are masked, too")
            figures = self.tested(request)
            self.enter("test", **self.guarantee(request, test=True), **sent(request.digest, figures))
            return figures

    def tested(self, request: NodeRequest, survivors: int = 1) -> Message:
        """The metrics of a model after a round; the same again for the same request, and none for another.

        survivors: how many clients of a secure sum share its noise at least.
        """
        stage = self.stage_of(request)
        if not stage.stage.tests_on_nodes:
            raise HeadstartError(
                "with privacy a node tests no models: its metrics would be exact; set privacy.test_epsilon, or give "
                "the server test data of its own"
            )
        if not self.deployed:
            return self._evaluate(request, survivors)
        if not self.limits.evaluation:
            raise HeadstartError("node.toml: limits.evaluation is false; this node tests no models")
        rounds, every = stage.rounds, stage.stage.evaluate_every
        if request.done not in (rounds, *range(0, rounds, every)):
            raise HeadstartError(
                f"the stage has {rounds} rounds, and tests after every {every}; the request is for a test after "
                f"{request.done}"
            )
        self.guarantee(request, test=True)
        path = self.record("tested", stage.setup.number)
        record = Message.from_bytes(path.read_bytes()) if path.is_file() else Message(scalars={"done": -1})
        # The noise depends on these: a server that changed them would get less of it.
        about: dict[str, Scalar] = {"setup": request.setup, "survivors": survivors} if stage.stage.privacy else {}
        if any(record.scalars.get(name, value) != value for name, value in about.items()):
            raise HeadstartError("the setup of this stage is not the one with which the node tested a model before")
        if request.done > int(record.scalars["done"]):
            figures = self._evaluate(request, survivors).arrays
            record = Message(figures, {"done": request.done, "question": request.digest, **about})
            write_atomically(path, lambda file: file.write_bytes(record.to_bytes()), private=True)
        elif record.scalars["question"] != request.digest:
            last = record.scalars["done"]
            raise HeadstartError(f"the node has tested another model after round {last} of this stage")
        return Message(record.arrays)

    def _evaluate(self, request: NodeRequest, survivors: int) -> Message:
        read = partial(self._states(request).read, clients=np.array([0 if self.deployed else request.client]))
        return self.stage_of(request).evaluate(request.message, read, self.federation.dataset, survivors)

    def _refuse_single_labels(self, stage: ClosedForm | Rounds) -> None:
        """A client sends sums of the features with each label, and how many examples two labels share: where one has an
        example more than another, their sums differ by that example."""
        if self.deployed and self.federation.dataset.target == "multilabel" and not stage.protected:
            raise HeadstartError(
                "sums of features by label can show single examples, where two labels differ by one; set secure = true "
                "or privacy in the stage"
            )

    def stage_of(self, request: NodeRequest) -> NodeStage:
        """The stage of a request; the one before it is unloaded."""
        key = request.session + request.setup
        if self._stage is None or self._stage[0] != key:
            setup = self.setup_of(request)
            self._stage = None  # a backbone less in memory while the next one is loaded
            limited = self.limits.applied(self.recipe) if self.deployed else self.recipe
            states = self._states_of(request.setup) if self.deployed else None
            self._stage = key, NodeStage.load(self.recipe, limited, self.federation, setup, self.deployed, states)
        return self._stage[1]

    def _states_of(self, setup: str) -> Path:
        """Where a stage keeps what its frozen blocks make of the examples, for the process of the next message; what
        other stages and runs have kept goes."""
        folder = self.folder / f"states-{setup[:32]}"
        for other in self.ledger.home.glob("*/states-*"):
            if other != folder:
                shutil.rmtree(other, ignore_errors=True)
        return folder

    def setup_of(self, request: NodeRequest) -> StageSetup:
        """The setup of the stage, as the server sent it."""
        path = self._setup(request.setup)
        if not path.is_file():
            raise StateLostError("the node no longer has what the stage starts from")
        setup = StageSetup.from_message(Message.from_bytes(path.read_bytes()))
        if type(setup.number) is not int or not 0 <= setup.number < len(self.recipe.stages):
            raise MessageError(f"the recipe has {len(self.recipe.stages)} stages, from 0, and none {setup.number!r}")
        tasks = [name for name, *_ in setup.tasks]
        if self.deployed and (tuple(tasks), tasks[setup.task : setup.task + 1]) != (
            self.recipe.task_names, [*self.federation.tasks],
        ):  # fmt: skip
            raise HeadstartError(f"the node's task is {self.federation.tasks[0]!r}, and the request is for another")
        return setup

    def _states(self, request: NodeRequest) -> ClientStates:
        """The client's states, of this stage and of those that it continues."""
        states = None
        count = 1 if self.deployed else self.federation.n_clients
        here = 0 if self.deployed else request.client
        for number, slot, shapes in reversed(request.states):
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

    def _caught_up(self, stage: NodeStage, request: NodeRequest) -> Message:
        """The log from the start of the stage on: a process that was not there before needs all of it."""
        from headstart.methods.fedmezo import joined

        path = self.folder / f"log-{stage.setup.number}-{request.client}.safetensors"
        earlier = Message.from_bytes(path.read_bytes()) if path.is_file() and not request.new else None
        try:
            message = joined(earlier, request.message)
        except MessageError as error:
            raise StateLostError(str(error)) from None
        write_atomically(path, lambda file: file.write_bytes(message.to_bytes()))
        return message


def sent(request: str, reply: Message) -> dict[str, Any]:
    """What the ledger says of a reply: the digests of the request and of the reply, and its bytes."""
    data = reply.to_bytes()
    return {"question": request, "answer": digest(data), "bytes": len(data)}
