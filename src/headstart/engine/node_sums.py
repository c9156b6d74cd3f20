"""Secure aggregation on a node: which sums it takes part in, as whom it signs, and what it keeps between exchanges."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from headstart.channel.fixed import check_values
from headstart.channel.secure import Identity, SecureClient
from headstart.channel.shared_noise import KEY_BYTES, SharedNoise
from headstart.core.files import write_atomically
from headstart.core.message import Array, Message
from headstart.core.seeds import Secret
from headstart.engine.node import sent
from headstart.engine.node_errors import StateLostError
from headstart.engine.node_stage import NodeRequest
from headstart.engine.setup import digest
from headstart.errors import HeadstartError, MessageError

if TYPE_CHECKING:
    from headstart.engine.node import Node


def check_identity(identity: Identity | None) -> Identity:
    """What a deployed node needs for secure aggregation; an error with what to do where it is missing."""
    if identity is None:
        raise HeadstartError(
            "the recipe has secure aggregation, in which nodes sign what they send to each other: make a key with "
            "ssh-keygen -t ed25519, and give the node signing_key (the private key) and peers (everybody's public keys)"
        )
    return identity


def next_exchange(node: Node, request: NodeRequest, received: Message, test: bool) -> tuple[dict[str, Any], Message]:
    """The node's reply to an exchange of a secure sum, with its facts; to be called under the node's lock.

    test: whether metrics of a test are added up, and not updates of a round.
    """
    path = node.folder / f"secret-{request.client}.safetensors"
    if received.scalars.get("step") == "keys":
        return _begin(node, request, received, path, test)
    if not path.is_file():
        raise StateLostError("the node no longer has its keys of this sum")
    saved = Message.from_bytes(path.read_bytes())
    guarantee, question = json.loads(str(saved.scalars["promise"])), str(saved.scalars["question"])
    identity = _identity(node, bytes.fromhex(str(saved.scalars["session"])), request.client)
    client = SecureClient.from_message(saved, identity)
    if guarantee["stage"] != node.stages.setup_of(request).number:
        raise MessageError("the sum was begun for another stage")
    _refuse_superseded(node, guarantee, question)
    answers = {"shares": client.share, "masked": client.mask, "agree": client.agree, "reveal": client.reveal}
    if (step := str(received.scalars.get("step"))) not in answers:
        raise MessageError(f"secure aggregation has no exchange {step!r}")
    if step == "masked":  # other sums may have been begun, and their values sent, since the first exchange
        node.check_spending(guarantee)
    answer, privacy, unneeded = answers[step](received), guarantee.pop("privacy"), dict[str, Any]()
    more = {"privacy": privacy} if step == "masked" else {}
    if client.agreed:  # with this reply the total is known
        more |= _note_survivors(node, guarantee, saved, client.survivors)
        unneeded = _unneeded_noise(node, request, saved, guarantee, client.agreed)
    _keep(path, client, {name: saved.scalars[name] for name in ("promise", "question")})
    node.enter(step, **guarantee, **sent(question, answer), **more, **unneeded)
    if client.agreed:
        path.unlink()  # nothing of this sum is needed any more, and no one is to find it
    return {"passes": 0, "kept": False, **unneeded}, answer


def _begin(
    node: Node, request: NodeRequest, received: Message, path: Path, test: bool
) -> tuple[dict[str, Any], Message]:
    """The reply to the first exchange; what is to be added is fixed from here on."""
    session, clients, threshold = _settings(node, request, received)
    identity = _identity(node, session, request.client)
    stage, facts = node.stages.of(request), dict[str, Any](passes=0, kept=False)
    if test:
        figures = node.tested(request, threshold)
        values: Mapping[str, Array] = stage.figures.to_sum(figures)
    else:
        reply, round = node.reply_once(request), int(request.message.scalars["round"])
        with node.untold(stage.stage):
            values = vector = stage.runtime.vector(reply, request.message)
        if (shared := _shared(node, request, request.digest)) is not None:
            values = shared.noised(vector, request.client, round, clients, threshold)
        facts = {"passes": int(reply.forward_passes[0]), "kept": bool(reply.state)}
    with node.untold(stage.stage):
        check_values(values, clients)
    client = SecureClient(session, clients, threshold, identity, values, _context(node, request, test))
    answer, guarantee = client.keys(), node.guarantee(request, test)
    _keep(path, client, {"promise": json.dumps(guarantee), "question": request.digest})
    del guarantee["privacy"]  # nothing of the values has left yet
    node.enter("keys", **guarantee, **sent(request.digest, answer))
    return facts, answer


def _refuse_superseded(node: Node, guarantee: Mapping[str, Any], question: str) -> None:
    """Refuse a sum of which the node has replied to another request since, or tested another model."""
    if not node.deployed:
        return
    record = node.records.read("tested" if guarantee["of"] == "test" else "answered", guarantee["stage"])
    if record.scalars["question"] != question:
        raise HeadstartError("the node has replied to another request since")


def _shared(node: Node, request: NodeRequest, question: str) -> SharedNoise | None:
    """The noise that the clients of a sum share; on a deployed node, the same for the same request.

    With other noise every time, a server that repeats its request could average it away.
    """
    stage = node.stages.of(request)
    shared = stage.runtime.channel.shared
    if shared is None or not node.deployed:
        return shared
    record = node.records.read("noise", stage.setup.number)
    if record.scalars.get("question") != question:
        record = Message({"key": np.frombuffer(os.urandom(KEY_BYTES), np.uint8)}, {"question": question})
        node.records.write("noise", stage.setup.number, record)
    return replace(shared, seed=Secret(record.arrays["key"].tobytes()))


def _unneeded_noise(
    node: Node, request: NodeRequest, saved: Message, guarantee: Mapping[str, Any], survivors: int
) -> dict[str, Any]:
    """The keys of the parts of the node's noise that a sum, whose survivors so many have signed for, does not need."""
    shared = _shared(node, request, str(saved.scalars["question"])) if guarantee["of"] == "answer" else None
    if shared is None:
        return {}
    clients, threshold = (int(saved.scalars[name]) for name in ("clients", "threshold"))
    keys = shared.revealed(request.client, guarantee["round"], clients, threshold, survivors)
    return {"noise": {number: key.hex() for number, key in keys.items()}}


def _identity(node: Node, session: bytes, client: int) -> Identity:
    """The key of a deployed node; in a simulation, one that anybody can compute."""
    if not node.deployed:
        return Identity.derived(session, client)
    return check_identity(node.identity)


def _context(node: Node, request: NodeRequest, test: bool) -> bytes:
    """What the node replies to in this sum: the recipe, run, stage and round, and what all clients are sent alike.

    Where clients are sent the part of a log that they have missed, that is the log from its start on. With several
    tasks, or personal parameters, clients are sent different messages, which are then left out.
    """
    stage = node.stages.of(request)
    setup, question = stage.setup, request.message.to_bytes()
    if stage.method.replays and not test:
        question = (node.folder / f"log-{setup.number}-{request.client}.safetensors").read_bytes()
    alike = [digest(question)] if len(setup.tasks) == 1 else []
    alike += [request.setup] if len(setup.tasks) == 1 and not setup.personal else []
    round = ["test", request.done] if test else request.message.scalars.get("round")
    facts = [node.recipe_digest, node.folder.name, setup.number, round, alike]
    return bytes.fromhex(digest(json.dumps(facts).encode()))


def _keep(path: Path, client: SecureClient, about: dict[str, Any]) -> None:
    """Write the client's secrets before its reply leaves."""
    path.parent.mkdir(parents=True, exist_ok=True)
    state = client.to_message()
    data = Message(state.arrays, {**state.scalars, **about}).to_bytes()
    write_atomically(path, lambda file: file.write_bytes(data), private=True)


def _settings(node: Node, request: NodeRequest, received: Message) -> tuple[bytes, int, int]:
    """Session, clients and threshold of a sum that the node's recipe allows."""
    try:
        session = bytes.fromhex(str(received.scalars["session"]))
        clients, threshold = (int(received.scalars[name]) for name in ("clients", "threshold"))
    except (KeyError, ValueError) as error:
        raise MessageError(f"the settings of secure aggregation cannot be read: {error!r}") from None
    stage = node.recipe.stages[node.stages.setup_of(request).number]
    if not stage.secure:
        raise HeadstartError("the recipe has no secure aggregation in this stage")
    if threshold != (least := stage.survivors(clients)):
        raise HeadstartError(
            f"the server would open a sum of {clients} clients with {threshold} of them; by the node's recipe "
            f"{least} have to stay"
        )
    return session, clients, threshold


def _note_survivors(node: Node, guarantee: Mapping[str, Any], saved: Message, survivors: Array) -> dict[str, Any]:
    """A round is opened for one list of survivors, whatever the sum: two totals would differ by single clients.

    Nor are statistics of the data added up again with others, in any run of any recipe; nor metrics of tests, where no
    noise is on them. They need not be the same ones: those of nearly the same features, of a method that sends more, or
    of nearly the same model tell of a node as well.
    """
    if not node.deployed:
        return {}
    what, number = "tested" if guarantee["of"] == "test" else "answered", guarantee["stage"]
    record = node.records.read(what, number)
    clients = saved.scalars["clients"]  # on which the noise depends that they share
    same = record.scalars.get("clients", clients) == clients
    if not same or not np.array_equal(record.arrays.get("survivors", survivors), survivors):
        raise HeadstartError("the sum of this round was opened before, for another list of survivors")
    stage = node.recipe.stages[number]
    kind = "statistics" if what == "answered" and not stage.trains else ""
    kind = "tests" if what == "tested" and stage.privacy is None else kind
    facts = {"participants": _participants(node, survivors), **({kind: True} if kind else {})}
    if kind and not node.limits.other_participants:
        for entry in node.ledger.entries():
            if entry.get(kind) and entry["participants"] != facts["participants"]:
                raise HeadstartError(
                    f"{kind} of the data were added up before with other participants, and the difference of the two "
                    "totals would tell of single nodes; limits.other_participants in node.toml allows it"
                )
    noted = Message({**record.arrays, "survivors": survivors}, {**record.scalars, "clients": clients})
    node.records.write(what, number, noted)
    return facts


def _participants(node: Node, survivors: Array) -> list[str]:
    """Whoever is in a sum, by the first digits of the digests of their public keys."""
    peers = check_identity(node.identity).peers
    return sorted(digest(peers[int(number)])[:16] for number in survivors)
