"""What simulated clients keep to themselves: on disk, memory-mapped, so that thousands of them cost no memory."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from headstart.methods import Reply
from headstart.statistics import Ints

Arrays = Mapping[str, npt.NDArray[np.float32]]


class ClientStore:
    """One float32 array [K, …] per name; zeros, and no disk space, for clients that have kept nothing yet."""

    def __init__(self, folder: Path, n_clients: int, shapes: Mapping[str, tuple[int, ...]], fresh: bool) -> None:
        self._folder = folder
        self._arrays = {}
        if shapes:
            folder.mkdir(parents=True, exist_ok=True)
        for name, shape in shapes.items():
            path, whole = folder / f"{name}.npy", (n_clients, *shape)
            new = fresh or not path.exists()
            self._arrays[name] = np.lib.format.open_memmap(path, "w+" if new else "r+", np.float32, whole)

    def read(self, name: str, clients: Ints) -> npt.NDArray[np.float32]:
        """What these clients kept under a name [M, …]."""
        return np.asarray(self._arrays[name][clients])

    def write(self, clients: Ints, kept: Arrays) -> None:
        """Replace what these clients kept [M, …]; writing the same again changes nothing."""
        for name, values in kept.items():
            self._arrays[name][clients] = values
            self._arrays[name].flush()

    def discard(self) -> None:
        """Forget everything, once a stage is over."""
        if self._arrays:  # otherwise the folder is not ours
            self._arrays.clear()
            shutil.rmtree(self._folder, ignore_errors=True)


def gather(replies: Sequence[Reply]) -> tuple[Ints, Arrays]:
    """The clients [M] of a round that keep something, and what they keep, stacked by name [M, …]."""
    keeping = [reply for reply in replies if reply.kept]
    if not keeping:
        return np.zeros(0, np.int64), {}
    clients = np.concatenate([reply.clients for reply in keeping])
    return clients, {name: np.stack([reply.kept[name] for reply in keeping]) for name in keeping[0].kept}
