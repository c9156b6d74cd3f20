"""What the clients of a cohort have done, and their replies."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from headstart.core.message import Array, Message
from headstart.core.params import Params
from headstart.core.statistics import ClientStatistics, Ints
from headstart.core.update import Blocks

ClientState = Mapping[str, npt.NDArray[np.float32]]
"""What stays with a client, by name: `KIND.PARAMETER`, where the kind `personal` is its part of the model."""


@dataclass(frozen=True, eq=False)
class ClientResult:
    """What the clients of a cohort [M] have done, stacked: all arrays [M, …]."""

    blocks: Mapping[str, Params]
    """What they send, by block."""
    passes: Ints
    """Examples through the backbone."""
    scalars: Mapping[str, Ints] = field(default_factory=dict)
    """Whole numbers that they send."""
    state: Mapping[str, Params] = field(default_factory=dict)
    """What stays with them, by kind: the new values, or, where the method accumulates a kind, those before."""


@dataclass(frozen=True, eq=False)
class StatisticsResult:
    """Statistics of the features of a cohort's clients [M], and the client [R] behind each row."""

    statistics: ClientStatistics
    owners: Ints
    passes: Ints


@dataclass(frozen=True, eq=False)
class Sender:
    """Who sends an update, in which round (from 0), of which task, and what is known of it beforehand."""

    client: int
    round: int
    task: int = 0
    expected: Blocks = field(default_factory=dict)
    """Names and shapes of what it may send."""
    model_norm: float | None = None
    """Of the model that it was sent, where that is known."""


@dataclass(frozen=True, eq=False)
class Reply:
    """The message of a client, or of several together, and what each of them [M] spent on it."""

    clients: Ints
    message: Message
    bytes_up: Ints
    forward_passes: Ints
    state: ClientState = field(default_factory=dict)
    """What stays with the client from this round on; it never travels."""
    task: int = 0
    seconds: float = 0.0
    """How long it took."""
    late: str = ""
    """Why it came too late to count, where it did."""
    discount: float = 1.0
    """What its update is multiplied by, where it was made from an older model."""


@dataclass(frozen=True, eq=False)
class GroupReply:
    """The secure sum of a group: whose updates are in it, and what each sampled client [M] spent on it."""

    clients: Ints
    sampled: Ints
    values: Mapping[str, Array]
    bytes_up: Ints
    bytes_down: Ints
    forward_passes: Ints
    state: Mapping[int, ClientState] = field(default_factory=dict)
    """What stays with each client from this round on."""
    dropped: Mapping[int, str] = field(default_factory=dict)
    """Why others are not in the sum."""
    state_lost: tuple[int, ...] = ()
    """Clients that have lost their state, or what they were sent before."""


@dataclass(frozen=True, eq=False)
class Failure:
    """Why there is no reply of some clients."""

    clients: Ints
    why: str
    state_lost: tuple[int, ...] = ()
    """Those that have lost their state, or what they were sent before."""


AnyReply = Reply | GroupReply | Failure


def scalars_of(values: Mapping[str, Ints], row: int) -> dict[str, Any]:
    """The scalars of one client of a cohort."""
    return {name: int(value[row]) for name, value in values.items()}
