"""What servers do that do not follow the recipe, in place of the ServerApp's run; see `sitecustomize.py` here."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np


def attack(recipe: Any, federation: Any, out: Path, resume: bool, log: Any, nodes: Any) -> Any:
    """The attack that the file `lie` names; what nodes say is in said.json."""
    lie = (Path(os.environ["HEADSTART_FEDERATION"]) / "lie").read_text()
    said = {"questions": questions, "statistics": statistics, "sums": sums}[lie](nodes)
    out.mkdir(parents=True)
    (out / "said.json").write_text(json.dumps(said))
    return SimpleNamespace(summary={"stages": []})


def questions(nodes: Any) -> dict[str, Any]:
    """Ask one node for noisy statistics again and again, test models on it."""
    from headstart.core.message import Message
    from headstart.engine.flower_messages import read_reply
    from headstart.engine.setup import StageSetup, digest

    setup = StageSetup(0, 0, (("default", 10, 3, 100),), (None,)).to_message().to_bytes()
    other = StageSetup(0, 0, (("default", 10, 2, 100),), (None,)).to_message().to_bytes()
    dim = 64
    head = {"weight": np.ones((10, dim), np.float32), "bias": np.zeros(10, np.float32)}

    def ask(kind: str, message: Message, run: int = 0, client: int = 0, told: bytes = setup) -> dict[str, Any]:
        nodes.run = f"{run:032x}"
        facts = {"kind": kind, "client": client, "setup": digest(told), "states": [[0, -1, {}]], "new": True}
        question = facts, {"message": message.to_bytes(), "setup": told}
        ((_, reply),) = nodes.send({nodes.ids[0]: question}, 120, {})
        said, data = read_reply(reply)
        return {"error": said.get("error"), "answer": digest(data) if data else None}

    statistics = Message(scalars={"round": 0})
    return {
        "first": ask("answer", statistics),
        "again": ask("answer", statistics),
        "new run": ask("answer", statistics, run=1),
        "fewer clients": ask("answer", statistics, run=2, told=other),
        "another number": ask("answer", statistics, client=1),
        "beyond the stage": ask("answer", Message(scalars={"round": 7})),
        "a model": ask("evaluate", Message(head)),
    }


def statistics(nodes: Any) -> dict[str, Any]:
    """All that the last node sends in three closed forms."""
    from headstart.core.message import Message
    from headstart.engine.flower_messages import read_reply
    from headstart.engine.setup import StageSetup, digest

    client, said = max(nodes.ids), dict[str, Any]()
    for stage, method in enumerate(("fedncm", "fedcof", "fed3r")):
        setup = StageSetup(stage, 0, (("default", 10, 4, 100),), (None,)).to_message().to_bytes()
        facts = {"kind": "answer", "client": client, "setup": digest(setup), "states": [[stage, -1, {}]], "new": True}
        question = facts, {"message": Message(scalars={"round": 0}).to_bytes(), "setup": setup}
        ((_, reply),) = nodes.send({nodes.ids[client]: question}, 120, {})
        _, data = read_reply(reply)
        said[method] = {name: array.tolist() for name, array in Message.from_bytes(data).arrays.items()}
    return said


class _Sums:
    """Secure sums of four nodes for the second stage of a recipe; what a node refuses is noted."""

    def __init__(self, nodes: Any) -> None:
        from headstart.engine.setup import StageSetup

        self.nodes = nodes
        self.setup = StageSetup(1, 0, (("default", 10, 4, 100),), (None,)).to_message().to_bytes()

    def ask(self, told: Mapping[int, Any], run: int = 0) -> dict[int, tuple[str | None, Any]]:
        """An exchange: of each client, why it refuses, or its answer."""
        from headstart.core.message import Message
        from headstart.engine.flower_messages import read_reply

        self.nodes.run = f"{run:032x}"
        asked = {self.nodes.ids[client]: self.question(client, message) for client, message in told.items()}
        clients, found = {node: client for client, node in self.nodes.ids.items()}, {}
        for node, reply in self.nodes.send(asked, 120, {}):
            said, data = read_reply(reply)
            found[clients[node]] = said.get("error"), Message.from_bytes(data) if data else None
        return found

    def question(self, client: int, told: Any) -> tuple[dict[str, Any], dict[str, bytes]]:
        from headstart.core.message import Message
        from headstart.engine.setup import digest

        facts = {"kind": "secure", "client": client, "setup": digest(self.setup), "states": [[1, -1, {}]], "new": True}
        message = Message(scalars={"round": 0}).to_bytes()
        return facts, {"message": message, "setup": self.setup, "exchange": told.to_bytes()}

    def play(
        self,
        session: str,
        clients: list[int],
        until: str = "",
        lie: Callable[[str, Any], Any] | None = None,
        run: int = 0,
    ) -> tuple[Any, dict[str, Any]]:
        """The protocol, up to an exchange, with what a lie makes of each message; the sum, and refusals by exchange."""
        from headstart.channel.secure import SecureSum

        server = SecureSum(session, clients, 3, {"counts": (10,), "sums": (10, 64)})
        refused: dict[str, Any] = {}
        while server.step and server.step != until:
            step, told = server.step, server.instructions()
            answers = self.ask({c: lie(step, one) if lie else one for c, one in told.items()}, run)
            refused[step] = {str(client): error for client, (error, _) in answers.items() if error}
            if refused[step]:
                return server, refused
            for client, (_, answer) in sorted(answers.items()):
                server.receive(client, answer)
            server.next()
        return server, refused

    def at_once(self, client: int, told: list[Any]) -> list[str | None]:
        """Several messages to one node at the same time; why it refuses each."""
        from headstart.engine.flower_messages import read_reply

        self.nodes.run = f"{0:032x}"
        node, waiting, found = self.nodes.ids[client], dict[str, int](), list[str | None]([""] * len(told))
        for place, one in enumerate(told):
            ((_, message),) = self.nodes._push({node: self.question(client, one)}, {})
            waiting[message] = place
        while waiting:
            for reply in self.nodes.grid.pull_messages(list(waiting)):
                found[waiting.pop(reply.metadata.reply_to_message_id)] = read_reply(reply)[0].get("error")
            time.sleep(0.1)
        return found


def _swapped(step: str, told: Any) -> Any:
    """The list of everybody's keys with a key of the server's in the place of one client's."""
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

    from headstart.core.message import Message

    if step != "shares":
        return told
    keys = told.arrays["mask_keys"].copy()
    keys[1] = np.frombuffer(X25519PrivateKey.generate().public_key().public_bytes_raw(), np.uint8)
    return Message({**told.arrays, "mask_keys": keys}, told.scalars)


def sums(nodes: Any) -> dict[str, Any]:
    """Lies about thresholds, keys and dropouts, two lists at once, and the same statistics with fewer participants."""
    from headstart.core.message import Message

    four, said, server = [0, 1, 2, 3], dict[str, Any](), _Sums(nodes)

    def told(step: str, **arrays: Any) -> Message:
        named = {name: np.asarray(each) for name, each in arrays.items()}
        return Message(named, {"session": b"lists".hex(), "step": step})

    few = Message({}, {"session": b"few".hex(), "step": "keys", "clients": 4, "threshold": 2})
    said["threshold"] = [error for error, _ in server.ask(dict.fromkeys(four, few)).values()]
    said["keys"] = server.play("keys", four, lie=_swapped)[1]["shares"]

    # Two of them are told that client 3 has dropped out, two that client 0 has.
    sum_, _ = server.play("lists", four, until="reveal")
    signed = {number: answer["signature"] for number, answer in sum_._answers["masked"].items()}
    lists = {0: [0, 1, 2], 1: [0, 1, 2], 2: [1, 2, 3], 3: [1, 2, 3]}
    agreed = {
        client: told("agree", survivors=one, signers=one, signatures=np.stack([signed[n] for n in one]))
        for client, one in lists.items()
    }
    answers = {client: answer.arrays["signature"] for client, (_, answer) in server.ask(agreed).items()}
    opened = {
        client: told("reveal", signers=one, signatures=np.stack([answers[n] for n in one]))
        for client, one in lists.items()
    }
    said["lists"] = [error for error, _ in server.ask(opened).values()]

    # To open it for everybody, and to agree on a list without client 3, at once.
    sum_, _ = server.play("lists", four, until="reveal")
    signed = {number: answer["signature"] for number, answer in sum_._answers["masked"].items()}
    three = told("agree", survivors=[0, 1, 2], signers=[0, 1, 2], signatures=np.stack([signed[n] for n in range(3)]))
    said["at once"] = server.at_once(0, [sum_.instructions()[0], three])

    opened_sum, refused = server.play("honest", four)
    said["honest"] = [refused, None if opened_sum.step else opened_sum.total()["counts"].tolist()]
    said["fewer"] = server.play("fewer", [0, 1, 2], run=1)[1]
    return said
