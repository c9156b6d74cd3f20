"""A node: it replies for a client, on the client's own machine or in a simulation, from what it is sent and what it
keeps on disk. Nothing depends on the process that replied before.

A deployed node does not trust the server to request only what the recipe says. Within a run it is one client, replies
to every round of a stage once (in a closed form, to every pass), and evaluates one model after every round. A request
is on its disk before the node computes, and the reply before it leaves: the same request gets the same reply again,
another one for the same round is refused, whether the first was answered or failed. Where noise or secure aggregation
protects a stage, this holds over all runs of its recipe, and a request that fails does not say why. All that leaves is
in the node's ledger, and within the limits of its owner.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
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
from headstart.data import Federation
from headstart.engine.node_errors import StateLostError, UntoldError, untold
from headstart.engine.node_ledger import NodeLedger, guarantee_key
from headstart.engine.node_records import AGREE_ANEW, NodeRecords
from headstart.engine.node_stage import WRITTEN, NodeRequest
from headstart.engine.node_stages import NodeStages
from headstart.engine.setup import digest
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
        self.records = NodeRecords(recipe, self.recipe_digest, self.ledger.home, folder)
        self.stages = NodeStages(recipe, federation, folder, deployed, self.records, self.limits)

    def node_info(self) -> dict[str, Any]:
        """What the server must know before the first stage."""
        if self.deployed and any(stage.secure for stage in self.recipe.stages):
            from headstart.engine.node_sums import check_identity

            check_identity(self.identity)
        train = self.federation.dataset.train
        dim = train.dim if train.kind == "features" else 1
        examples = int(self.federation.sizes.sum())
        if self._hides_sizes:
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

    @property
    def _hides_sizes(self) -> bool:
        """Whether the server is not to know how many examples there are."""
        return self.deployed and any(stage.privacy and stage.privacy.from_server for stage in self.recipe.stages)

    def remember(self, setup: bytes) -> str:
        """Keep what a stage starts from; returns its digest."""
        with self._locked():
            return self.stages.remember(setup)

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
    def _as(self, request: NodeRequest) -> Iterator[None]:
        """One message at a time, and always for the client of the node's first request; a failure is in the ledger."""
        client = request.client
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
            try:
                yield
            except UntoldError:
                self.enter("failed", stage=self.stages.setup_of(request).number, question=request.digest)
                raise

    def answer(self, request: NodeRequest) -> Reply:
        """The client's reply; its new state is on disk when this returns."""
        with self._as(request):
            stage = self.stages.of(request)
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
        stage = self.stages.of(request)
        round = request.done - 1 if test else int(request.message.scalars["round"])
        privacy = stage.figures.guarantee if test else stage.runtime.channel.spent(round + 1)
        facts = {"stage": stage.setup.number, "method": stage.stage.method, "round": round}
        facts |= {"of": "test" if test else "answer", "privacy": privacy}
        self.check_spending(facts)
        return facts

    def check_spending(self, facts: Mapping[str, Any]) -> None:
        """Refuse a reply, by what its guarantee says, after which more than the node's owner allows would be spent."""
        if self.deployed:
            key = guarantee_key({**facts, "run": self.folder.name, "recipe": self.recipe_digest})
            stage = self.recipe.stages[facts["stage"]]
            self.limits.check_spending(stage, facts["privacy"], self.ledger.other_guarantees(key))

    def reply_once(self, request: NodeRequest) -> Reply:
        """The reply to a request; on a deployed node, the one reply of the client to this round, or to this pass."""
        if not self.deployed:
            return self._client_update(request, self._complete(request))
        setup = self.stages.setup_of(request)
        settings, number = self.recipe.stages[setup.number], request.message.scalars.get("round")
        rounds = settings.rounds_for(setup.clients)
        if type(number) is not int or not 0 <= number < rounds:
            raise HeadstartError(f"the stage has {rounds} rounds, from 0; the request is for round {number!r}")
        if not self.federation.sizes.sum():
            raise HeadstartError("there are no training examples here")
        self._refuse_single_labels(settings)
        self.limits.check_statistics(settings)
        self.guarantee(request)
        record, turn = self.records.read("answered", setup.number), settings.turn(number, setup.clients)
        fresh = record.scalars.get("question") != request.digest
        if fresh and turn <= (last := int(record.scalars.get("round", -1))):
            what = f"round {last}" if settings.trains else f"pass {last}" if settings.passes > 1 else "this stage"
            anew = AGREE_ANEW if settings.protected else ""
            raise HeadstartError(f"the node has replied to {what} before, and replies to no other request for it{anew}")
        message = self._complete(request)
        if fresh or "answer" not in record.arrays:
            if fresh:
                record = Message(scalars={"question": request.digest, "round": turn})
                self.records.write("answered", setup.number, record)
            with self.untold(settings):
                reply = self._client_update(request, message)
            passes = 0 if self._hides_sizes else int(reply.forward_passes[0])
            facts: dict[str, Scalar] = {"passes": passes, "kept": bool(reply.state)}
            answer = np.frombuffer(reply.message.to_bytes(), np.uint8)
            record = Message({"answer": answer}, {**record.scalars, **facts, "task": reply.task})
            self.records.write("answered", setup.number, record)
        sent, passes = Message.from_bytes(record.arrays["answer"].tobytes()), int(record.scalars["passes"])
        state = WRITTEN if record.scalars["kept"] else {}
        sizes = np.array([sent.nbytes]), np.array([passes])
        return Reply(np.array([request.client]), sent, *sizes, state, int(record.scalars["task"]))

    def untold(self, stage: ClosedForm | Rounds) -> AbstractContextManager[None]:
        """Where a deployed node reads examples and computes with them."""
        return untold(stage.protected) if self.deployed else nullcontext()

    def _client_update(self, request: NodeRequest, message: Message) -> Reply:
        """The client's reply, and its new state on the disk; message: with all of a log that it holds a part of."""
        stage = self.stages.of(request)
        number, here = np.array([request.client]), 0 if self.deployed else request.client
        rows, _ = self.federation.rows_of(np.array([here]))
        first = 0 if self.deployed else self.federation.class_starts[stage.setup.task]
        train = self.federation.dataset.train
        labels = train.labels[rows] - first
        states = self.stages.states_of(request)
        read = partial(states.read, clients=np.array([here]))
        owners = np.full(len(rows), request.client)
        new, task = np.array([request.new]), stage.setup.task
        cohort = Cohort(number, stage.source, rows, labels, owners, new, read, task, targets=train.targets)
        (reply,) = stage.runtime.answer(cohort, message)
        if reply.state:
            states.write(here, reply.state)
            states.commit()
        return reply

    def add(self, request: NodeRequest, received: Message, test: bool = False) -> tuple[dict[str, Any], Message]:
        """The next exchange of a secure sum; what the client must not lose is on disk before a reply leaves."""
        from headstart.engine.node_sums import next_exchange

        with self._as(request):
            return next_exchange(self, request, received, test)

    def evaluate(self, request: NodeRequest) -> Message:
        """The metrics of the server's model on the client's test examples: one model after every round.

        A server that may send any model learns sums of the test examples, class by class.
        """
        with self._as(request):
            if self.stages.of(request).stage.secure:
                raise HeadstartError("the stage has secure aggregation; metrics of tests are masked, too")
            figures = self.tested(request)
            self.enter("test", **self.guarantee(request, test=True), **sent(request.digest, figures))
            return figures

    def tested(self, request: NodeRequest, survivors: int = 1) -> Message:
        """The metrics of a model after a round; the same again for the same request, and none for another.

        survivors: how many clients of a secure sum share its noise at least.
        """
        stage = self.stages.of(request)
        if not stage.stage.tests_on_nodes:
            raise HeadstartError(
                "with privacy a node tests no models: its metrics would be exact; set privacy.test_epsilon, or give "
                "the server test data of its own"
            )
        if not self.deployed:
            return self._evaluate(request, survivors)
        if not self.limits.evaluation:
            raise HeadstartError("node.toml: limits.evaluation is false; this node tests no models")
        number, every = stage.setup.number, stage.stage.evaluate_every
        rounds = stage.stage.rounds_for(stage.setup.clients)
        if request.done not in (rounds, *range(0, rounds, every)):
            raise HeadstartError(
                f"the stage has {rounds} rounds, and tests after every {every}; the request is for a test after "
                f"{request.done}"
            )
        self.guarantee(request, test=True)
        record = self.records.read("tested", number)
        # The noise depends on it: a server that changed it would get less of it.
        about: dict[str, Scalar] = {"survivors": survivors} if stage.stage.privacy else {}
        if any(record.scalars.get(name, value) != value for name, value in about.items()):
            raise HeadstartError("the node has tested a model of this stage before, for a sum of more or fewer clients")
        if request.done > (last := int(record.scalars.get("done", -1))):
            record = Message(scalars={"done": request.done, "question": request.digest, **about})
            self.records.write("tested", number, record)
        elif record.scalars["question"] != request.digest:
            raise HeadstartError(f"the node has tested another model after round {last} of this stage")
        if not record.arrays:
            with self.untold(stage.stage):
                record = Message(self._evaluate(request, survivors).arrays, record.scalars)
            self.records.write("tested", number, record)
        return Message({name: record.arrays[name] for name in stage.figures.shapes})

    def _evaluate(self, request: NodeRequest, survivors: int) -> Message:
        read = partial(self.stages.states_of(request).read, clients=np.array([0 if self.deployed else request.client]))
        return self.stages.of(request).evaluate(request.message, read, self.federation.dataset, survivors)

    def _refuse_single_labels(self, stage: ClosedForm | Rounds) -> None:
        """A client sends sums of the features with each label, and how many examples two labels share: where one has an
        example more than another, their sums differ by that example."""
        if self.deployed and self.federation.dataset.target == "multilabel" and not stage.protected:
            raise HeadstartError(
                "sums of features by label can show single examples, where two labels differ by one; set secure = true "
                "or privacy in the stage"
            )

    def _complete(self, request: NodeRequest) -> Message:
        """The message of a request; of a log all from its start on, for a process that was not there before."""
        stage = self.stages.of(request)
        if not stage.method.replays:
            return request.message
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
