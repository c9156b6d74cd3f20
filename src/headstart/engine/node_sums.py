"""Secure sums on a node: which it takes part in, and what it keeps between two exchanges."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from headstart.channel.secure import SecureClient
from headstart.core.files import write_atomically
from headstart.core.message import Message
from headstart.engine.node import StateLostError
from headstart.errors import HeadstartError, MessageError

if TYPE_CHECKING:
    from headstart.engine.node import Node, NodeRequest


def next_exchange(node: Node, asked: NodeRequest, told: Message) -> tuple[dict[str, Any], Message]:
    """The node's answer to an exchange of a secure sum, with its facts; to be called under the node's lock."""
    path = node.folder / f"secret-{asked.client}.safetensors"
    step, facts = told.scalars.get("step"), {"passes": 0, "kept": False}
    about: dict[str, Any] = {"stage": node._told(asked).number}
    if step == "keys":
        client = SecureClient(*_settings(node, asked, told))
        answer = client.keys()
    elif not path.is_file():
        raise StateLostError("the node no longer has its keys of this sum")
    else:
        saved = Message.from_bytes(path.read_bytes())
        client = SecureClient.from_message(saved)
        if saved.scalars["stage"] != about["stage"]:
            raise MessageError("the sum was begun for another stage")
        if step == "shares":
            answer = client.share(told)
        elif step == "masked":
            reply, stage = node._once(asked), node._load(asked)
            answer = client.mask(told, stage.runtime.vector(reply, asked.message))
            facts = {"passes": int(reply.forward_passes[0]), "kept": bool(reply.state)}
            about["question"] = asked.digest
        else:
            answer = client.reveal(told)
            _note_survivors(node, saved, told)
            path.unlink()  # nothing of this sum is needed any more, and nobody is to find it
            return facts, answer
    node.folder.mkdir(parents=True, exist_ok=True)
    state = client.to_message()
    state = Message(state.arrays, {**state.scalars, **about})
    write_atomically(path, lambda file: file.write_bytes(state.to_bytes()), private=True)
    return facts, answer


def _settings(node: Node, asked: NodeRequest, told: Message) -> tuple[bytes, int, int, int, int]:
    """Session, number, clients, threshold and bits of a sum that the node's recipe allows."""
    try:
        session = bytes.fromhex(str(told.scalars["session"]))
        clients, threshold, bits = (int(told.scalars[name]) for name in ("clients", "threshold", "bits"))
    except (KeyError, ValueError) as error:
        raise MessageError(f"the server begins a sum in an unknown way: {error!r}") from None
    stage = node.recipe.stages[node._told(asked).number]
    if not stage.secure:
        raise HeadstartError("the recipe has no secure sums in this stage")
    if threshold != (least := stage.survivors(clients)):
        raise HeadstartError(
            f"the server would open a sum of {clients} clients with {threshold} of them; by the node's recipe "
            f"{least} have to stay"
        )
    return session, asked.client, clients, threshold, bits


def _note_survivors(node: Node, saved: Message, told: Message) -> None:
    """A round is opened for one list of survivors, whatever the sum: two totals would differ by single clients."""
    if not node.alone:
        return
    path = node._answered(int(saved.scalars["stage"]))
    record, heard = Message.from_bytes(path.read_bytes()), told.arrays["survivors"]
    if record.scalars["question"] != saved.scalars["question"]:
        raise HeadstartError("the node has answered another question since")
    if not np.array_equal(record.arrays.get("survivors", heard), heard):
        raise HeadstartError("the sum of this round was opened before, for another list of survivors")
    noted = Message({**record.arrays, "survivors": heard}, record.scalars)
    write_atomically(path, lambda file: file.write_bytes(noted.to_bytes()), private=True)
