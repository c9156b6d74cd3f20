"""Where a run stands, and what its stages have left: what a checkpoint holds."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from headstart.core.ledger import Ledger
from headstart.core.message import Array, Message
from headstart.core.statistics import Ints
from headstart.engine.client_states import ClientStates
from headstart.errors import HeadstartError
from headstart.heads import LinearHead

_FORMAT = 3
"""Of checkpoints; another one is of another version of headstart."""
_COSTS = ("bytes_up", "bytes_down", "forward_passes", "last_round")


@dataclass(frozen=True, eq=False)
class StageModel:
    """The model that a stage leaves: the head of each task, the number of the stage that made its backbone, and the
    states of clients that have a part of their own."""

    heads: tuple[LinearHead | None, ...]
    body: int
    states: ClientStates | None = None


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """Where a run stands: within a stage, after a round, or between two stages."""

    progress: Mapping[str, Any]
    """The stage (the next one, between stages), its round, and what earlier stages came to."""
    stage: StageCheckpoint | None = None

    def to_message(self) -> Message:
        """All of it."""
        arrays: dict[str, Array] = {}
        progress = dict(self.progress)
        if self.stage is not None:
            state, ledger = self.stage.state, self.stage.ledger
            arrays |= {f"state.{name}": array for name, array in state.arrays.items()}
            arrays |= {f"ledger.{name}": getattr(ledger, name) for name in _COSTS}
            arrays["slots"] = self.stage.slots
            progress |= {"seconds": ledger.seconds, "dropped": ledger.dropped, "state": dict(state.scalars)}
            progress |= {"absent": ledger.absent, "simulated_seconds": ledger.simulated_seconds}
            arrays |= {f"under_way.{name}": array for name, array in self.stage.under_way.arrays.items()}
            progress["under_way"] = dict(self.stage.under_way.scalars)
        arrays["progress"] = np.frombuffer(json.dumps(progress | {"format": _FORMAT}).encode(), np.uint8)  # may be long
        return Message(arrays)

    @classmethod
    def from_message(cls, message: Message) -> Checkpoint:
        """What `to_message` made."""
        progress = json.loads(message.arrays["progress"].tobytes())
        if progress.pop("format", 1) != _FORMAT:
            raise HeadstartError(
                "--resume: the run was begun by an earlier headstart; continue it there, or start again"
            )
        if "state" not in progress:
            return cls(progress)
        costs = {name: message.arrays[f"ledger.{name}"] for name in _COSTS}
        ledger = Ledger(**costs, seconds=progress["seconds"], dropped=progress["dropped"])  # type: ignore[arg-type]
        ledger.absent, ledger.simulated_seconds = progress["absent"], progress.get("simulated_seconds")
        state, under_way = (
            {name.removeprefix(what): a for name, a in message.arrays.items() if name.startswith(what)}
            for what in ("state.", "under_way.")
        )
        slots = message.arrays["slots"].astype(np.int64)
        flights = Message(under_way, progress.get("under_way", {}))
        return cls(progress, StageCheckpoint(Message(state, progress["state"]), ledger, slots, flights))


@dataclass(frozen=True, eq=False)
class StageCheckpoint:
    """A stage after a round: the server's state, what it has cost, and where clients keep what they keep [K]."""

    state: Message
    ledger: Ledger
    slots: Ints
    under_way: Message = field(default_factory=Message)
    """Updates of asynchronous clients that have not come yet."""
