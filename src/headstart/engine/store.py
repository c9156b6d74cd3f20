"""What simulated clients keep to themselves: on disk, so that thousands of them cost no memory."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt

from headstart.statistics import Ints

Arrays = Mapping[str, npt.NDArray[np.float32]]


class ClientStore:
    """One file of float32 values [2, K, …] per name; zeros, and no disk space, for clients that have kept nothing yet.

    Every client has two slots. What it wants to keep goes into the one that is not in use; a checkpoint that names the
    slots in use makes it count. A crash before that leaves what the client kept before. The files are read and written
    at their places rather than memory-mapped: mapped pages would count as memory of the process.
    """

    def __init__(self, folder: Path, n_clients: int, shapes: Mapping[str, tuple[int, ...]], slots: Ints | None) -> None:
        self._folder, self._shapes = folder, dict(shapes)
        self._files: dict[str, int] = {}
        self._changed: set[int] = set()
        self.slots = np.zeros(n_clients, np.int64) if slots is None else slots
        if shapes:
            folder.mkdir(parents=True, exist_ok=True)
        for name in shapes:
            fresh = os.O_TRUNC if slots is None else 0
            self._files[name] = os.open(folder / f"{name}.bin", os.O_RDWR | os.O_CREAT | fresh, 0o666)
            os.ftruncate(self._files[name], 2 * n_clients * self._nbytes(name))

    def _nbytes(self, name: str) -> int:
        return 4 * int(np.prod(self._shapes[name], dtype=np.int64))

    def read(self, name: str, clients: Ints) -> npt.NDArray[np.float32]:
        """What these clients kept under a name [M, …]."""
        values, size = np.empty((len(clients), *self._shapes[name]), np.float32), self._nbytes(name)
        rows = values.reshape(len(clients), -1)
        for row, client in enumerate(clients):
            place = (int(self.slots[client]) * len(self.slots) + int(client)) * size
            rows[row] = np.frombuffer(os.pread(self._files[name], size, place), np.float32)
        return values

    def write(self, client: int, kept: Arrays) -> None:
        """What a client wants to keep from this round on."""
        for name, values in kept.items():
            place = ((1 - int(self.slots[client])) * len(self.slots) + client) * self._nbytes(name)
            os.pwrite(self._files[name], np.ascontiguousarray(values, np.float32).tobytes(), place)
        if kept:
            self._changed.add(client)

    def commit(self) -> None:
        """The round is over: everything written counts from now on, once a checkpoint holds `slots`."""
        for file in self._files.values() if self._changed else ():
            os.fsync(file)
        changed = sorted(self._changed)
        self.slots[changed] = 1 - self.slots[changed]
        self._changed.clear()

    def discard(self) -> None:
        """Forget everything, once a stage is over."""
        for file in self._files.values():
            os.close(file)
        if self._files:  # otherwise the folder is not ours
            self._files.clear()
            shutil.rmtree(self._folder, ignore_errors=True)
