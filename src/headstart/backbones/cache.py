"""Features on disk: one .npy file per (weights, transform, contents), filled block by block, each with a checksum.

Features tell what the examples were, which may be patients: files and folders are for the eyes of their owner only.

Whatever happens to the file (a killed process, a truncation, a flipped bit), opening it tells which blocks are whole;
only the others are computed again. One process fills a file at a time; the others wait, then read. Examples that
another file of the same backbone has are copied from there: with another seed or split, no image is passed again.
"""

from __future__ import annotations

import io
import json
import os
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from filelock import FileLock

from headstart.core.files import write_atomically, write_json
from headstart.errors import HeadstartError

BLOCK = 256


def cache_root() -> Path:
    """``HEADSTART_CACHE``, or headstart's folder in the user's cache directory."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("HEADSTART_CACHE") or Path(base) / "headstart")


class FeatureFile:
    """Features [rows, dim] in float32 under a key."""

    def __init__(self, key: str, rows: int, dim: int) -> None:
        self.folder = cache_root() / "features" / key
        self.rows, self.dim, self.block = rows, dim, BLOCK
        self._facts = {"rows": rows, "dim": dim, "block": BLOCK}
        header = io.BytesIO()
        np.lib.format.write_array_header_1_0(header, {"descr": "<f4", "fortran_order": False, "shape": (rows, dim)})
        self._header, self._length = header.getvalue(), header.tell() + rows * dim * 4
        self._data, self._manifest = self.folder / "features.npy", self.folder / "blocks.json"
        try:
            self.folder.parent.parent.mkdir(parents=True, exist_ok=True)
            for folder in (self.folder.parent, self.folder):
                folder.mkdir(mode=0o700, exist_ok=True)
            for path, mode in ((self.folder.parent, 0o700), (self.folder, 0o700), (self._data, 0o600)):
                # One of an earlier version; Windows has no such owners.
                if path.exists() and hasattr(os, "getuid") and path.stat().st_uid == os.getuid():
                    path.chmod(mode)
        except OSError as error:
            raise self.failure(error) from None
        self.lock = FileLock(self.folder / "lock")
        self._checksums: list[int | None] = []

    def missing(self) -> list[int]:
        """Numbers of the blocks that are absent or damaged; this reads the whole file."""
        self._checksums = self._read_manifest()
        features = self._map() if any(checksum is not None for checksum in self._checksums) else None
        for number, expected in enumerate(self._checksums):
            if expected is not None and (features is None or _checksum(features[self.span(number)]) != expected):
                self._checksums[number] = None
        return [number for number, checksum in enumerate(self._checksums) if checksum is None]

    def span(self, number: int) -> slice:
        """Rows of a block."""
        return slice(number * BLOCK, min((number + 1) * BLOCK, self.rows))

    def fill(self, blocks: Iterable[tuple[int, npt.NDArray[np.float32]]]) -> None:
        """Write blocks as they come; each is on disk, and listed, before the next is asked for. Needs the lock."""
        try:
            if not self._data.exists():
                self._data.touch(mode=0o600)
                self._checksums = [None] * len(self._checksums)
            self._restore()
            with self._data.open("r+b") as file:
                for number, features in blocks:
                    file.seek(len(self._header) + number * BLOCK * self.dim * 4)
                    file.write(np.ascontiguousarray(features, np.float32).tobytes())
                    file.flush()
                    os.fsync(file.fileno())
                    self._checksums[number] = _checksum(features)
                    write_json(self._manifest, {**self._facts, "checksums": self._checksums}, private=True)
        except OSError as error:
            raise self.failure(error) from None

    def note_examples(self, backbone: str, digests: npt.NDArray[np.uint8]) -> None:
        """Say which examples the rows are of, by hashes [rows, 16], so that others of the backbone can copy them."""
        path = self.folder / f"examples-{backbone}.npy"
        try:
            if not path.exists():
                write_atomically(path, lambda file: file.write_bytes(_npy(digests)), private=True)
        except OSError as error:
            raise self.failure(error) from None

    def open(self) -> npt.NDArray[np.float32]:
        """The whole matrix, memory-mapped, read-only."""
        features = self._map()
        if features is None:
            raise HeadstartError(f"the feature cache {self.folder} was removed while it was in use; run again")
        return features

    def _map(self) -> np.memmap[Any, np.dtype[np.float32]] | None:
        try:
            self._restore()
            return np.memmap(self._data, np.dtype("<f4"), "r", len(self._header), (self.rows, self.dim))
        except (OSError, ValueError):
            return None

    def _restore(self) -> None:
        """Give a damaged file its header and its length back; the checksums tell what else is whole."""
        with self._data.open("rb") as file:
            if file.read(len(self._header)) == self._header and file.seek(0, os.SEEK_END) == self._length:
                return
        with self._data.open("r+b") as file:
            file.write(self._header)
            file.truncate(self._length)

    def _read_manifest(self) -> list[int | None]:
        nothing: list[int | None] = [None] * -(-self.rows // BLOCK)
        try:
            manifest = json.loads(self._manifest.read_text(encoding="utf-8"))
            checksums = manifest.pop("checksums")
        except (OSError, ValueError, KeyError, AttributeError, TypeError):
            return nothing
        same = manifest == self._facts and isinstance(checksums, list) and len(checksums) == len(nothing)
        return checksums if same else nothing

    def failure(self, error: OSError) -> HeadstartError:
        """What to tell a user whose cache cannot be written."""
        return HeadstartError(
            f"cannot write features to {self.folder}: {error.strerror or error}; free space, or set HEADSTART_CACHE"
        )


class Lenders:
    """Features of the same backbone that other files have already, of examples that are known by their hashes."""

    def __init__(self, backbone: str, digests: npt.NDArray[np.uint8], dim: int) -> None:
        """digests: [n, 16] of the examples that are looked for."""
        wanted: dict[bytes, list[int]] = {}
        for place, digest in enumerate(_keys(digests)):
            wanted.setdefault(digest, []).append(place)
        self.source = np.full(len(digests), -1)
        """[n] The number of the file that has an example, -1 for none."""
        self._row, self._files = np.zeros(len(digests), np.int64), list[npt.NDArray[np.float32]]()
        for path in sorted((cache_root() / "features").glob(f"*/examples-{backbone}.npy")):
            if not wanted:
                break
            try:
                theirs = np.load(path, allow_pickle=False)
            except (OSError, ValueError, EOFError):  # damaged, or gone
                continue
            found = {row: digest for row, digest in enumerate(_keys(theirs)) if digest in wanted}
            if found:
                self._take(FeatureFile(path.parent.name, len(theirs), dim), found, wanted)

    def _take(self, file: FeatureFile, found: dict[int, bytes], wanted: dict[bytes, list[int]]) -> None:
        damaged = set(file.missing())
        whole = {row: digest for row, digest in found.items() if row // BLOCK not in damaged}
        if not whole:
            return
        for row, digest in whole.items():
            for place in wanted.pop(digest, ()):
                self.source[place], self._row[place] = len(self._files), row
        self._files.append(file.open())

    def fill(self, features: npt.NDArray[np.float32], places: npt.NDArray[np.int64]) -> None:
        """Write the features of the examples at these places [m] into the rows [m, d] of those that are there."""
        for number, file in enumerate(self._files):
            mine = np.flatnonzero(self.source[places] == number)
            features[mine] = file[self._row[places[mine]]]


def _keys(digests: npt.NDArray[np.uint8]) -> list[bytes]:
    data = np.ascontiguousarray(digests, np.uint8).tobytes()
    return [data[start : start + 16] for start in range(0, len(data), 16)]


def _npy(array: npt.NDArray[Any]) -> bytes:
    written = io.BytesIO()
    np.save(written, array, allow_pickle=False)
    return written.getvalue()


def _checksum(features: npt.NDArray[np.float32]) -> int:
    return zlib.crc32(np.ascontiguousarray(features, np.float32).tobytes())
