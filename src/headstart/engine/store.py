"""What simulated clients keep to themselves: on disk, memory-mapped, so that thousands of them cost no memory."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt

from headstart.statistics import Ints

Arrays = Mapping[str, npt.NDArray[np.float32]]


class ClientStore:
    """One float32 array [2, K, …] per name; zeros, and no disk space, for clients that have kept nothing yet.

    Every client has two slots. What it wants to keep goes into the one that is not in use; a checkpoint that names the
    slots in use makes it count. A crash before that leaves what the client kept before.
    """

    def __init__(self, folder: Path, n_clients: int, shapes: Mapping[str, tuple[int, ...]], slots: Ints | None) -> None:
        self._folder = folder
        self._arrays = {}
        self._changed: set[int] = set()
        self.slots = np.zeros(n_clients, np.int64) if slots is None else slots
        if shapes:
            folder.mkdir(parents=True, exist_ok=True)
        for name, shape in shapes.items():
            path, whole = folder / f"{name}.npy", (2, n_clients, *shape)
            mode = "w+" if slots is None or not path.exists() else "r+"
            self._arrays[name] = np.lib.format.open_memmap(path, mode, np.float32, whole)

    def read(self, name: str, clients: Ints) -> npt.NDArray[np.float32]:
        """What these clients kept under a name [M, …]."""
        return np.asarray(self._arrays[name][self.slots[clients], clients])

    def write(self, client: int, kept: Arrays) -> None:
        """What a client wants to keep from this round on."""
        for name, values in kept.items():
            self._arrays[name][1 - self.slots[client], client] = values
        if kept:
            self._changed.add(client)

    def commit(self) -> None:
        """The round is over: everything written counts from now on, once a checkpoint holds `slots`."""
        for array in self._arrays.values():
            array.flush()
        changed = sorted(self._changed)
        self.slots[changed] = 1 - self.slots[changed]
        self._changed.clear()

    def discard(self) -> None:
        """Forget everything, once a stage is over."""
        if self._arrays:  # otherwise the folder is not ours
            self._arrays.clear()
            shutil.rmtree(self._folder, ignore_errors=True)
