"""Client states: what stays with simulated clients, on disk, so that thousands of them cost no memory."""

from __future__ import annotations

import os
import shutil
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt

from headstart.core.files import BINARY, make_folder, read_into, sync_folder, write_at
from headstart.core.statistics import Ints
from headstart.errors import HeadstartError

Values = npt.NDArray[np.float32]
Arrays = Mapping[str, Values]

_OWN, _KEPT = "personal.bin", "kept.bin"


class ClientStates:
    """A record of float32 values for every client, in two files: what is the client's own, and what else it keeps.

    Records take no disk space before a client has kept anything. Every client has two slots. What it wants to keep goes
    into the one that is not in use; a checkpoint that names the slots in use makes it count. A crash before that leaves
    what the client kept before. The files are read and written at their places rather than memory-mapped: mapped pages
    would count as memory of the process.
    """

    def __init__(
        self,
        folder: Path,
        n_clients: int,
        shapes: Mapping[str, tuple[int, ...]],
        slots: Ints | None = None,
        earlier: ClientStates | None = None,
        inherits: Callable[[str], bool] = lambda name: True,
        durable: bool = True,
    ) -> None:
        """slots: [K] the slot in use of each client, -1 for none; earlier: where to look for what is not here yet;
        inherits: the names that are looked for there; durable: whether what counts outlives a crash."""
        self._durable = durable
        self._folder, self.shapes, self._earlier = folder, dict(shapes), earlier
        self._inherited = {name for name in shapes if earlier and name in earlier.shapes and inherits(name)}
        self._changed: set[int] = set()
        self.slots = np.full(n_clients, -1) if slots is None else slots
        self._places: dict[str, int] = {}
        """Where a name's values begin in a record, in bytes."""
        self._records: dict[str, int] = {}
        """Bytes of a record in each file."""
        for name, shape in shapes.items():
            file = _file_of(name)
            self._places[name] = self._records.get(file, 0)
            self._records[file] = self._places[name] + 4 * int(np.prod(shape, dtype=np.int64))
        self._files: dict[str, int] = {}
        weakref.finalize(self, _close, self._files)
        if shapes:
            make_folder(folder)
        for file, record in self._records.items():
            self._files[file] = os.open(folder / file, os.O_RDWR | os.O_CREAT | BINARY, 0o600)
            self._make_room(folder / file, 2 * n_clients * record)
        if self._files:
            sync_folder(folder)

    def _make_room(self, path: Path, size: int) -> None:
        """A file of this size; one that somebody counts on is never another."""
        found = os.fstat(self._files[path.name]).st_size
        if (self.slots >= 0).any() and found != size:
            raise HeadstartError(
                f"{path} has {found} bytes and not {size}: what clients keep is lost or damaged; start the run again, "
                "or bring the file back"
            )
        if found != size:
            os.ftruncate(self._files[path.name], size)

    @staticmethod
    def is_there(folder: Path, shapes: Mapping[str, tuple[int, ...]]) -> bool:
        """Whether the files of such a store are in a folder."""
        return all((folder / _file_of(name)).is_file() for name in shapes)

    def _place(self, name: str, slot: int, client: int) -> tuple[int, int]:
        """The file of a name, and where a client's values begin in it."""
        file = _file_of(name)
        return self._files[file], (slot * len(self.slots) + client) * self._records[file] + self._places[name]

    def read(self, name: str, start: Values | None, clients: Ints) -> Values:
        """What these clients kept under a name [M, …]; ``start``, or zeros, for those that have kept nothing."""
        values, new = np.empty((len(clients), *self.shapes[name]), np.float32), self.slots[clients] < 0
        if new.any() and self._earlier is not None and name in self._inherited:
            values[new] = self._earlier.read(name, start, clients[new])
        else:
            values[new] = 0 if start is None else start
        for row in np.flatnonzero(~new).tolist():
            client = int(clients[row])
            read_into(*_bytes_at(self._place(name, int(self.slots[client]), client), values[row : row + 1]))
        return values

    def write(self, client: int, kept: Arrays) -> None:
        """What a client wants to keep from this round on."""
        for name, values in kept.items():
            place = self._place(name, self._other(client), client)
            write_at(*_bytes_at(place, np.ascontiguousarray(values, np.float32)))
        if kept:
            self._changed.add(client)

    def accept(self, client: int) -> None:
        """The client itself has written what it wants to keep, into the slot that is not in use."""
        self._changed.add(client)

    def _other(self, client: int) -> int:
        """The slot of a client that is not in use."""
        return 1 - int(self.slots[client]) if self.slots[client] >= 0 else 0

    def commit(self) -> None:
        """The round is over: everything written counts from now on, once a checkpoint holds `slots`."""
        for file in self._files.values() if self._changed and self._durable else ():
            os.fsync(file)
        for client in self._changed:
            self.slots[client] = self._other(client)
        self._changed.clear()

    def has(self, client: int) -> bool:
        """Whether a client has kept anything, in this stage or before."""
        return bool(self.slots[client] >= 0) or (self._earlier is not None and self._earlier.has(client))

    def finalise(self, own: Callable[[int], Arrays]) -> bool:
        """A stage is over: only what is the clients' own counts from now on, for later stages and for the user.

        Clients that had something of their own before, and took no part in this stage, bring it along. own: all that
        such a client has now, by the names of the files. Returns whether there was anybody.
        """
        if self._inherited:
            for client in np.flatnonzero(self.slots < 0).tolist():
                if self.has(client):
                    self.write(client, own(client))
        brought = bool(self._changed)
        self.commit()
        self._earlier = None
        self.shapes = {name: shape for name, shape in self.shapes.items() if _file_of(name) == _OWN}
        return brought


def collect(folder: Path, personal: bool) -> None:
    """Remove what clients kept during a finished stage; ``personal``: what is their own stays."""
    if personal:
        (folder / _KEPT).unlink(missing_ok=True)
    else:
        shutil.rmtree(folder, ignore_errors=True)


class RemoteStates(ClientStates):
    """What clients keep on machines of their own: here is which slot of theirs is in use, and nothing else."""

    def __init__(
        self,
        n_clients: int,
        shapes: Mapping[str, tuple[int, ...]],
        slots: Ints | None = None,
        earlier: ClientStates | None = None,
    ) -> None:
        super().__init__(Path(), n_clients, {}, slots, earlier)
        self.shapes = dict(shapes)

    def finalise(self, own: Callable[[int], Arrays]) -> bool:
        """Clients look for what they have not kept in this stage where they kept it before."""
        self.shapes = {name: shape for name, shape in self.shapes.items() if _file_of(name) == _OWN}
        return False


def _bytes_at(place: tuple[int, int], values: Values) -> tuple[int, memoryview, int]:
    """A file, the bytes of some values, and where they are in it."""
    return place[0], values.reshape(-1).view(np.uint8).data, place[1]


def _file_of(name: str) -> str:
    return _OWN if name.startswith("personal.") else _KEPT


def _close(files: dict[str, int]) -> None:
    """Close what is still open."""
    while files:
        os.close(files.popitem()[1])
