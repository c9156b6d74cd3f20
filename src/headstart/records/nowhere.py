"""A run that leaves nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from headstart.core.message import Message
from headstart.core.statistics import Ints
from headstart.engine.model_store import Version


class NoDirectory:
    """A run that leaves nothing: every line goes nowhere; states of best rounds stay in memory."""

    path = None
    has_checkpoint = False

    def __init__(self) -> None:
        self._started = datetime.now(UTC)
        self._best: dict[tuple[int, int], bytes] = {}

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Nobody else knows of it."""
        yield

    @contextmanager
    def logged(self) -> Iterator[None]:
        """Warnings go where the caller's logging sends them."""
        yield

    @property
    def started(self) -> datetime:
        """When this was made."""
        return self._started

    def discard(self) -> None:
        """There is nothing to remove."""

    def known(self, what: str, values: Ints, unknown: int) -> Ints:
        """What clients say."""
        return values

    def load_checkpoint(self) -> None:
        """There is none."""

    def summary(self) -> None:
        """There is none."""

    def save_best(self, stage: int, round: int, state: Message) -> None:
        """Until another round is better."""
        self._best = {(stage, round): state.to_bytes()}

    def load_best(self, stage: int, round: int) -> Message:
        """What `save_best` kept."""
        return Message.from_bytes(self._best[stage, round])

    def kept(self, stage: int, version: Version) -> Version:
        """The backbone that a stage made, its weights copied in memory."""
        arrays = version.arrays and {name: array.copy() for name, array in version.arrays.items()}
        return replace(version, arrays=arrays)

    def _ignore(self, *_: Any, **__: Any) -> None:
        """Nothing is written."""

    log = log_round = save_checkpoint = collect_best = save_model = save_log = save_statistics = _ignore
    note = refuse_other_data = write_clients = write_holdings = write_confusion = write_samples = _ignore
    save_final = finish = _ignore
