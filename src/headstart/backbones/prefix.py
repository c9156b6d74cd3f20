"""The frozen beginning of a transformer: computed once for an example, then skipped.

Nothing here knows an architecture. The body's own forward runs every time, with its own masks and its own pooling; only
the leading blocks hand on what they are given, and the first block behind them reads states from before. The embeddings
still run, as the body asks for their shape; they are cheap beside a block.

States are those of evaluation. A body that trains would draw dropout in its frozen blocks too (MiniLM has 0.1 there);
what is kept cannot be drawn again, so with a prefix dropout acts in the blocks that are not skipped alone. Nor do the
states depend on the precision that training asks for: they are float32.
"""

from __future__ import annotations

import os
import struct
import tempfile
import threading
import weakref
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from headstart.backbones.cache import cache_root
from headstart.core.files import BINARY, read_at, write_at
from headstart.errors import HeadstartError

if TYPE_CHECKING:
    from headstart.backbones.backbone import Backbone


class _Reached(Exception):  # noqa: N818 (not an error: the way out of a forward that has done its part)
    """The forward has come to the first block that is not skipped."""

    def __init__(self, states: Tensor) -> None:
        super().__init__()
        self.states = states


@contextmanager
def evaluating(body: nn.Module) -> Iterator[None]:
    """Evaluation mode for a while, then every layer in the mode that it was in."""
    training = [module for module in body.modules() if module.training]
    body.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


class Prefix:
    """The leading blocks of a body, none of which trains or carries a module, and the block that follows them."""

    def __init__(self, backbone: Backbone, blocks: Sequence[nn.Module], following: nn.Module) -> None:
        self._backbone, self._blocks, self._following = backbone, list(blocks), following
        self._others: int | None = None  # what a block returns beside its states, where it returns a tuple

    def states(self, batch: tuple[Tensor, ...], body: nn.Module | None = None) -> Tensor:
        """What the body reads for a batch → the states [B, T, D] that enter the first block that is not skipped.

        body: another one on the same network.
        """
        body = body or self._backbone.body
        device = next(body.parameters()).device
        handles = [block.register_forward_hook(self._learn) for block in self._blocks]
        # Before the hooks of a module on the block: prompts are no part of the prefix.
        handles.append(self._following.register_forward_pre_hook(_stop, with_kwargs=True, prepend=True))
        try:
            with evaluating(body), torch.no_grad(), torch.autocast(device.type, enabled=False):
                body(*(tensor.to(device) for tensor in batch))
        except _Reached as reached:
            return reached.states.float()
        finally:
            for handle in handles:
                handle.remove()
        raise HeadstartError(f"{self._backbone.name} never runs the block behind its first {len(self._blocks)}")

    @contextmanager
    def given(self, states: Tensor) -> Iterator[None]:
        """Inside, the body skips the leading blocks and goes on from these states [B, T, D]; `states` was run once."""

        def skipped(*inputs: Any, **named: Any) -> Any:
            first = _first(inputs, named)
            return first if self._others is None else (first, *[None] * self._others)

        def feed(block: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
            if inputs:
                return (states, *inputs[1:]), named
            return inputs, {**named, next(iter(named)): states}

        before = [vars(block).get("forward") for block in self._blocks]
        handle = self._following.register_forward_pre_hook(feed, with_kwargs=True, prepend=True)
        try:
            for block in self._blocks:
                vars(block)["forward"] = skipped
            yield
        finally:
            handle.remove()
            for block, forward in zip(self._blocks, before, strict=True):
                if forward is None:
                    vars(block).pop("forward", None)
                else:
                    vars(block)["forward"] = forward

    def _learn(self, block: nn.Module, inputs: object, output: object) -> None:
        """What a block returns: its states, or a tuple of them and nothing else."""
        if isinstance(output, tuple):
            if any(other is not None for other in output[1:]):
                raise HeadstartError(
                    f"the blocks of {self._backbone.name} hand on more than hidden states, so that none of them can "
                    "be skipped; put the module on all blocks"
                )
            self._others = len(output) - 1


def _first(inputs: tuple[Any, ...], named: dict[str, Any]) -> Any:
    return inputs[0] if inputs else next(iter(named.values()))


def _stop(block: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
    raise _Reached(_first(inputs, named))


class Prefixed(tuple[Tensor, ...]):
    """What a body reads for a batch, with the states [B, T, D] from which it can go on behind a prefix."""

    states: Tensor
    prefix: Prefix

    def __new__(cls, tensors: Iterable[Tensor], states: Tensor, prefix: Prefix) -> Prefixed:
        """The tensors are those of the plain batch."""
        batch = super().__new__(cls, tensors)
        batch.states, batch.prefix = states, prefix
        return batch

    @classmethod
    def of(cls, batch: tuple[Tensor, ...], prefix: Prefix, body: nn.Module) -> Prefixed:
        """A batch with its states."""
        return cls(batch, prefix.states(batch, body), prefix)


class StateFile:
    """States [T, D] in float32 of the examples that have been asked for, T of their own; on disk, by row.

    It is read and written at places rather than memory-mapped: mapped pages would count as memory of the process.
    Without a path it goes with its owner; with one it stays for the next process, which is to be alone with it, and
    what a crash has left of a record there is not read.
    """

    _RECORD = struct.Struct("<3qI")  # row, T, D and a checksum of the states, which follow

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self._file: int | None = None
        self._places: dict[int, tuple[int, tuple[int, int]]] = {}
        """By row, where its states begin, and their shape."""
        self._unchecked: dict[int, int] = {}
        """By row, the checksums of states that another process has left."""
        self._checking = threading.Lock()
        self._end = 0
        if path is not None and path.exists():
            self._file = self._open()
            self._find(self._file)

    def __contains__(self, row: int) -> bool:
        """Whether this example's states are there."""
        with self._checking:
            if row in self._unchecked and zlib.crc32(self.read(row).tobytes()) != self._unchecked.pop(row):
                del self._places[row]
            return row in self._places

    def write(self, row: int, states: npt.NDArray[np.float32]) -> None:
        """Keep the states [T, D] of an example."""
        data = np.ascontiguousarray(states, np.float32).tobytes()
        length, width = states.shape
        record = self._RECORD.pack(row, length, width, zlib.crc32(data)) + data
        try:
            if self._file is None:
                self._file = self._open()
            write_at(self._file, record, self._end)
        except OSError as error:
            raise HeadstartError(
                f"cannot write hidden states to {self._path or cache_root()}: {error.strerror or error}; free space"
                + ("" if self._path else ", or set HEADSTART_CACHE")
            ) from None
        # Last, as whoever sees the row may read it from another thread.
        self._places[row] = self._end + self._RECORD.size, (length, width)
        self._end += len(record)

    def read(self, row: int) -> npt.NDArray[np.float32]:
        """The states [T, D] of an example."""
        assert self._file is not None
        place, (length, width) = self._places[row]
        return np.frombuffer(read_at(self._file, 4 * length * width, place), np.float32).reshape(length, width)

    def _find(self, file: int) -> None:
        """The records of a file, one behind the other; the last may not be whole."""
        size = os.fstat(file).st_size
        while (begin := self._end + self._RECORD.size) <= size:
            row, length, width, checksum = self._RECORD.unpack(read_at(file, self._RECORD.size, self._end))
            if length < 1 or width < 1 or begin + 4 * length * width > size:
                break
            self._places[row], self._unchecked[row] = (begin, (length, width)), checksum
            self._end = begin + 4 * length * width

    def _open(self) -> int:
        if self._path is not None:  # states tell what the examples were: for the eyes of their owner only
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            handle = os.open(self._path, os.O_RDWR | os.O_CREAT | BINARY, 0o600)
            weakref.finalize(self, os.close, handle)
            return handle
        cache_root().mkdir(parents=True, exist_ok=True)
        file = tempfile.TemporaryFile(dir=cache_root())  # noqa: SIM115 (closed with its owner)
        weakref.finalize(self, file.close)
        return file.fileno()
