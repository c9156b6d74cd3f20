"""A run that leaves nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any

from headstart.core.statistics import Ints


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

    def save_best(self, stage: int, round: int, state: bytes) -> None:
        """Until another round is better."""
        self._best = {(stage, round): state}

    def load_best(self, stage: int, round: int) -> bytes:
        """What `save_best` kept."""
        return self._best[stage, round]

    def _ignore(self, *_: Any, **__: Any) -> None:
        """Nothing is written."""

    log = log_round = save_checkpoint = collect_best = save_model = save_log = save_statistics = _ignore
    note = refuse_other_data = write_clients = write_holdings = write_confusion = write_samples = _ignore
    save_final = finish = _ignore
