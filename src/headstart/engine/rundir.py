"""A run directory: the recipe, metrics, checkpoint, summary, model and report of one run."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

from headstart.errors import HeadstartError
from headstart.files import write_atomically, write_json, write_text
from headstart.ledger import Ledger
from headstart.recipe import Recipe
from headstart.wire import Message


class RunDirectory:
    """Everything a run leaves. Files appear whole or not at all; `metrics.jsonl` grows a line at a time."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._is_ours = not path.exists()

    @classmethod
    def create(cls, path: Path, recipe: Recipe) -> RunDirectory:
        """A new directory with the resolved recipe; one that is in use is refused."""
        cls.check_free(path)
        run = cls(path)
        try:
            for folder in (path, path / "model", path / "checkpoint"):
                folder.mkdir(parents=True, exist_ok=True)
            write_text(path / "recipe.toml", recipe.to_toml())
        except OSError as error:
            raise HeadstartError(f"--out {path}: cannot write there: {error.strerror or error}") from None
        return run

    @staticmethod
    def check_free(path: Path) -> None:
        """Refuse a path that is taken, before any work is done."""
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            raise HeadstartError(f"--out {path}: already used; give another directory, or --resume to go on with a run")

    @classmethod
    def reopen(cls, path: Path, recipe: Recipe) -> RunDirectory:
        """The directory of an interrupted run of the same recipe."""
        saved = path / "recipe.toml"
        if not saved.is_file():
            raise HeadstartError(f"--resume: {path} holds no run")
        if Recipe.load(saved) != recipe:
            raise HeadstartError(f"--resume: {path} is a run of another recipe; compare {saved}")
        return cls(path)

    def discard(self) -> None:
        """Remove what `create` made, when a run ends before its first result."""
        (self.path / "recipe.toml").unlink(missing_ok=True)
        for folder in ("model", "checkpoint"):
            shutil.rmtree(self.path / folder, ignore_errors=True)
        if self._is_ours:
            self.path.rmdir()

    def log(self, metrics: dict[str, Any]) -> None:
        """Append one evaluation to `metrics.jsonl`."""
        with (self.path / "metrics.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(metrics, allow_nan=False) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def metrics(self) -> list[dict[str, Any]]:
        """All evaluations so far; a line cut short by a crash does not count."""
        path = self.path / "metrics.jsonl"
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def save_checkpoint(self, state: Message, ledger: Ledger, kept: Message, progress: dict[str, Any]) -> None:
        """State, ledger, what clients are about to keep, and progress after a round, in one file."""
        costs = {"bytes_up": ledger.bytes_up, "bytes_down": ledger.bytes_down, "forward_passes": ledger.forward_passes}
        arrays = {f"state.{name}": array for name, array in state.arrays.items()}
        arrays |= {f"ledger.{name}": array for name, array in costs.items()}
        arrays |= {f"kept.{name}": array for name, array in kept.arrays.items()}
        progress = {**progress, "seconds": ledger.seconds, "dropped": ledger.dropped, "state": dict(state.scalars)}
        scalars = {"progress": json.dumps(progress)}
        data = Message(arrays, scalars).to_bytes()
        write_atomically(self.path / "checkpoint" / "state.safetensors", lambda file: file.write_bytes(data))

    def load_checkpoint(self) -> tuple[Message, Ledger, Message, dict[str, Any]] | None:
        """What `save_checkpoint` wrote last, and metrics cut back to it; None where there is none."""
        path = self.path / "checkpoint" / "state.safetensors"
        if not path.is_file():
            (self.path / "metrics.jsonl").unlink(missing_ok=True)
            return None
        saved = Message.from_bytes(path.read_bytes())
        progress = json.loads(str(saved.scalars["progress"]))
        costs = {name: saved.arrays[f"ledger.{name}"] for name in ("bytes_up", "bytes_down", "forward_passes")}
        ledger = Ledger(**costs, seconds=progress["seconds"], dropped=progress["dropped"])  # type: ignore[arg-type]
        state, kept = (
            {name.removeprefix(part): a for name, a in saved.arrays.items() if name.startswith(part)}
            for part in ("state.", "kept.")
        )
        lines = [json.dumps(line) + "\n" for line in self.metrics()[: progress["evaluations"]]]
        write_text(self.path / "metrics.jsonl", "".join(lines))
        return Message(state, progress["state"]), ledger, Message(kept), progress

    def finish(self, summary: dict[str, Any]) -> None:
        """The summary: written last, its presence says that the run is complete."""
        write_json(self.path / "summary.json", summary)

    def summary(self) -> dict[str, Any] | None:
        """The summary of a complete run."""
        path = self.path / "summary.json"
        found: dict[str, Any] | None = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None
        return found
