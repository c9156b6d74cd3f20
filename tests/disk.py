"""A disk that fills up, a process that is killed and a power cut, at the n-th operation below a folder."""

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest

Fault = Literal["full", "killed", "power"]
FAULTS: tuple[Fault, ...] = ("full", "killed", "power")

_WRITES = ("open", "mkdir", "write", "pwrite", "ftruncate", "fsync", "replace")
_REMOVES = ("unlink", "rmdir")


class Killed(BaseException):
    """The process is no more; nothing that runs after this changes the disk."""


class Disk:
    """Counts the operations below ``root``; after the n-th of them there is no more room, no process, or no power.

    A power cut takes back what was not flushed: the contents of a file since its last fsync, and the names in a folder
    (created, renamed, removed) since the folder's last fsync.
    """

    def __init__(self, root: Path, patch: pytest.MonkeyPatch, fault: Fault = "killed", at: int | None = None) -> None:
        self.root, self.fault, self.at = root, fault, at
        self.done, self.struck = 0, False
        self._undo: list[tuple[Path, Callable[[], object]]] = []
        self._flushed: set[Path] = set()
        for name in (*_WRITES, *_REMOVES):
            patch.setattr(os, name, self._watched(name, getattr(os, name)))

    def _watched(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def operation(first: Any, *rest: Any, **keys: Any) -> Any:
            path = self._path(rest[0] if name == "replace" else first, keys.get("dir_fd"))
            changes = name != "open" or bool(rest and rest[0] & (os.O_CREAT | os.O_TRUNC))
            if path is None or not path.is_relative_to(self.root) or not changes:
                return real(first, *rest, **keys)
            self._strike(name)
            undo = self._taken_back(name, path, first)
            found = real(first, *rest, **keys)
            self._undo += undo
            if name == "fsync":
                self._undo = [(held, undo) for held, undo in self._undo if held != path]
                self._flushed.add(path)
            return found

        return operation

    def _strike(self, name: str) -> None:
        self.done += 1
        if self.at is None or self.done < self.at:
            return
        self.struck = True
        if self.fault != "full":
            raise Killed
        if name in _WRITES:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.root))

    def _taken_back(self, name: str, path: Path, first: Any) -> list[tuple[Path, Callable[[], object]]]:
        """How to take back an operation, and the file or folder whose fsync makes it last."""
        if self.fault != "power" or name in ("fsync", "rmdir"):
            return []
        if name == "mkdir":
            return [(path.parent, lambda: shutil.rmtree(path, ignore_errors=True))]
        before = path.read_bytes() if path.is_file() else None
        names = name in ("unlink", "replace") or before is None
        undo: list[tuple[Path, Callable[[], object]]] = [
            (path.parent if names else path, lambda: _restore(path, before))
        ]
        if name == "replace" and Path(first) not in self._flushed:
            undo.append((path, lambda: path.is_file() and path.write_bytes(b"")))
        return undo

    def cut_power(self) -> None:
        """Take back what was not flushed, the latest first."""
        for _, undo in reversed(self._undo):
            undo()

    def _path(self, path: Any, folder: int | None) -> Path | None:
        try:
            if isinstance(path, int):
                return Path(os.readlink(f"/proc/self/fd/{path}"))
            return Path(os.readlink(f"/proc/self/fd/{folder}")) / path if folder is not None else Path(path).absolute()
        except OSError:
            return None


class Order:
    """What is flushed and what gets its name, as it comes: an operation, and the inode of a file or folder."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.done: list[tuple[str, int]] = []
        flush, replace = os.fsync, os.replace

        def fsync(handle: int) -> None:
            flush(handle)
            self.done.append(("fsync", os.fstat(handle).st_ino))

        def rename(first: Path, second: Path) -> None:
            replace(first, second)
            self.done.append(("rename", os.stat(second).st_ino))

        patch.setattr(os, "fsync", fsync)
        patch.setattr(os, "replace", rename)

    def check(self, folder: Path) -> None:
        """Everything in a folder was flushed before the folder got its name, and the name after that."""
        named = self.done.index(("rename", folder.stat().st_ino))
        for path in (folder, *folder.rglob("*")):
            assert ("fsync", path.stat().st_ino) in self.done[:named], path
        assert ("fsync", folder.parent.stat().st_ino) in self.done[named:]


def _restore(path: Path, before: bytes | None) -> None:
    if before is None:
        path.unlink(missing_ok=True)
    elif path.parent.is_dir():
        path.write_bytes(before)


def contents(root: Path) -> dict[str, bytes]:
    """Every file below a folder."""
    return {str(path.relative_to(root)): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}
