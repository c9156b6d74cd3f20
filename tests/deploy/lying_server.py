"""What a server does that does not follow the recipe, in place of the ServerApp's run; see `sitecustomize.py` here."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np


def attack(recipe: Any, federation: Any, out: Path, resume: bool, log: Any, nodes: Any) -> Any:
    """Ask one node for noisy statistics again and again, test models on it; what it says is in said.json."""
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
    said = {
        "first": ask("answer", statistics),
        "again": ask("answer", statistics),
        "new run": ask("answer", statistics, run=1),
        "fewer clients": ask("answer", statistics, run=2, told=other),
        "another number": ask("answer", statistics, client=1),
        "beyond the stage": ask("answer", Message(scalars={"round": 7})),
        "a model": ask("evaluate", Message(head)),
    }
    out.mkdir(parents=True)
    (out / "said.json").write_text(json.dumps(said))
    return SimpleNamespace(summary={"stages": []})
