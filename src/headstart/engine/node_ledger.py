"""The ledger of a node: all that ever left it about its data, in a chain of entries.

An entry is on disk before what it tells of leaves. The file is the node's own: no server reads or writes it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock

from headstart.core.chain import Chain, Entry
from headstart.core.files import make_folder, temporaries

GuaranteeKey = tuple[str, int, str, str | None]


class NodeLedger(Chain):
    """What left a node about one data set: the folder ``home`` is the node's, and holds its runs."""

    def __init__(self, home: Path) -> None:
        super().__init__(home / "ledger.jsonl")
        self.home = home

    @contextmanager
    def locked(self, *folders: Path) -> Iterator[None]:
        """One message at a time; temporary files of a process that was killed are removed from the folders."""
        make_folder(self.home)
        with FileLock(self.home / "node.lock"):
            for folder in (self.home, *folders):
                make_folder(folder)
                for path in temporaries(folder):
                    path.unlink()
            yield

    def guarantees(self) -> dict[GuaranteeKey, Any]:
        """The largest privacy guarantee of each stage that was answered or tested; None where there was none."""
        found: dict[GuaranteeKey, Any] = {}
        for entry in self.entries():
            if "privacy" not in entry:
                continue
            privacy, key = entry["privacy"], guarantee_key(entry)
            if key not in found or (found[key] and privacy and privacy["epsilon"] >= found[key]["epsilon"]):
                found[key] = privacy
        return found

    def other_guarantees(self, than: GuaranteeKey) -> list[Any]:
        """All guarantees but one."""
        return [each for key, each in self.guarantees().items() if key != than]


def guarantee_key(entry: Entry) -> GuaranteeKey:
    """Recipe, stage, whether it is an answer or a test, and, where it is not the node that adds noise, the run.

    What a node has noised is answered once over all runs, and so spent once.
    """
    privacy = entry["privacy"]
    own = privacy is not None and privacy["noise"] != "server"
    return entry["recipe"], entry["stage"], entry["of"], None if own else entry["run"]
