"""Examples as a body reads them, batch by batch: what training needs where features cannot be cached."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from torch import Tensor

from headstart.backbones.backbone import Backbone
from headstart.data import Examples
from headstart.data.examples import Ints

# Prepared examples are kept up to so many bytes; the others are prepared again whenever they are asked for.
_ROOM = 1 << 30


class Inputs:
    """Batches of a split: decoded and resized once where there is room, the next batch while this one is used."""

    def __init__(self, backbone: Backbone, examples: Examples, what: str) -> None:
        self._transform, self._examples, self._what = backbone.transform, examples, what
        self._prepared: dict[int, Any] = {}
        self._room = _ROOM
        self._pool = ThreadPoolExecutor(1)

    def batches(self, batches: Iterable[Ints]) -> Iterator[tuple[Tensor, ...]]:
        """What the body reads for each batch of rows [B]."""
        waiting = None
        for rows in batches:
            ahead = self._pool.submit(self._batch, rows)
            if waiting is not None:
                yield waiting.result()
            waiting = ahead
        if waiting is not None:
            yield waiting.result()

    def by_length(self, rows: Ints) -> Ints:
        """Positions in ``rows``, shortest example first, so that little is padded when they are read in this order."""
        lengths = [len(value) for row in rows for value in self._prepare([int(row)]).values()]
        return np.argsort(np.array(lengths, np.int64), kind="stable")

    def _batch(self, rows: Ints) -> tuple[Tensor, ...]:
        values = self._prepare([int(row) for row in rows])
        return self._transform.collate([values[int(row)] for row in rows])

    def _prepare(self, rows: list[int]) -> dict[int, Any]:
        """Prepared examples by row, kept while there is room."""
        missing = [row for row in dict.fromkeys(rows) if row not in self._prepared]
        raw = self._examples.take(np.array(missing, np.int64)).raw(0, len(missing)) if missing else []
        new = {
            row: self._transform(value, f"{self._what}: example {row}") for row, value in zip(missing, raw, strict=True)
        }
        for row, value in new.items():
            if value.nbytes <= self._room:
                self._room -= value.nbytes
                self._prepared[row] = value
        return {row: new[row] if row in new else self._prepared[row] for row in rows}
