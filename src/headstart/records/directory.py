"""A run directory: the recipe, metrics, checkpoint, summary, model and report of one run."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock, Timeout

from headstart.config.describe import add_schema, naming_schema
from headstart.config.recipe import Recipe
from headstart.core.files import (
    append_text,
    save_arrays,
    secret,
    sync_folder,
    temporaries,
    write_atomically,
    write_json,
    write_text,
)
from headstart.core.message import Array, FileArrays, Message, Scalar
from headstart.core.statistics import Ints
from headstart.engine.client_states import ClientStates, RemoteStates
from headstart.engine.model_store import PRETRAINED, ModelStore, Module, Version
from headstart.errors import HeadstartError
from headstart.heads import LinearHead
from headstart.records.checkpoint import Checkpoint, StageModel
from headstart.records.readers import read_json, read_lines, read_message, unreadable
from headstart.records.tables import RunTables

Arrays = Mapping[str, np.ndarray]

_COPY = "put it back from a copy"
_ANEW = f"{_COPY}, or remove it and resume the run, which writes it anew"
_ANEW_FROM = f"{_COPY}, or remove summary.json and resume the run, which writes it anew"


class RunDirectory(RunTables):
    """Everything a run leaves. Files appear whole or not at all; `metrics.jsonl` grows a line at a time."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._checkpoints = path / "checkpoint"
        self._state, self._lock = self._checkpoints / "state.safetensors", self._checkpoints / "lock"
        self._is_ours, self._discarded = not path.exists(), False

    @classmethod
    def create(cls, path: Path, recipe: Recipe) -> RunDirectory:
        """A new directory with the resolved recipe; one that is in use is refused.

        Of processes that begin at the same moment, the one with the lock writes, and the others remove nothing.
        """
        cls.check_free(path)
        run = cls(path)
        try:
            run._checkpoints.mkdir(parents=True, exist_ok=True)
            sync_folder(path.parent)
            with run.lock():
                cls.check_free(path)
                try:
                    write_text(path / "recipe.toml", naming_schema(path / "recipe.toml", recipe.to_toml()))
                    run._make_folders()
                except OSError:
                    run.discard()
                    raise
        except OSError as error:
            run._remove_empty()
            raise HeadstartError(f"--out {path}: cannot write there: {error.strerror or error}") from None
        return run

    @classmethod
    def check_free(cls, path: Path) -> None:
        """Refuse a path that is taken, before any work is done; a lock without a run takes none."""
        if not path.exists():
            return
        run = cls(path)
        there = set(path.iterdir()) - {*temporaries(path), run._checkpoints} if path.is_dir() else {path}
        if run._checkpoints.is_dir():
            there |= set(run._checkpoints.iterdir()) - {run._lock}
        if there:
            raise HeadstartError(f"--out {path}: already used; give another directory, or --resume to continue a run")

    @classmethod
    def reopen(cls, path: Path, recipe: Recipe) -> RunDirectory:
        """The directory of an interrupted run of the same recipe."""
        saved = path / "recipe.toml"
        if not saved.is_file():
            raise HeadstartError(f"--resume: {path} holds no run")
        if Recipe.load(saved) != recipe:
            raise HeadstartError(f"--resume: {path} is a run of another recipe; compare {saved}")
        run = cls(path)
        run._make_folders()
        return run

    def _make_folders(self) -> None:
        for name in ("model", "checkpoint"):
            (self.path / name).mkdir(exist_ok=True)
        sync_folder(self.path)

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Nobody else runs in this directory meanwhile."""
        lock = FileLock(self._lock)
        try:
            lock.acquire(timeout=1)  # who only looks whether somebody runs here holds it for an instant
        except Timeout:
            raise HeadstartError(
                f"--out {self.path}: another process is running there; wait for it, or stop it"
            ) from None
        try:
            for folder in (self.path, self.path / "model", self._checkpoints):
                for path in temporaries(folder):  # of a process that was killed
                    path.unlink()
            yield
        finally:
            lock.release()
            if self._discarded:
                self._remove_empty()

    @contextmanager
    def logged(self) -> Iterator[None]:
        """Meanwhile, warnings of the library are written to `run.log`, too."""
        log, handler = logging.getLogger("headstart"), _LogFile(self)
        alone = not log.hasHandlers()  # then Python itself would print warnings, which it does not beside a handler
        handlers = [handler, *([logging.lastResort] if alone and logging.lastResort else [])]
        for each in handlers:
            log.addHandler(each)
        try:
            yield
        finally:
            for each in handlers:
                log.removeHandler(each)

    def note(self, message: str, level: str = "INFO") -> None:
        """Append a line to `run.log`; a log that cannot be written does not stop a run."""
        now = datetime.now(UTC).isoformat(timespec="seconds")
        with suppress(OSError), (self.path / "run.log").open("a", encoding="utf-8") as file:
            file.write(f"{now} {level} {message}\n")

    @property
    def started(self) -> datetime:
        """When the run was begun: its recipe is written first, and once."""
        return datetime.fromtimestamp((self.path / "recipe.toml").stat().st_mtime, UTC)

    @property
    def running(self) -> bool:
        """Whether a process runs in this directory now."""
        if not self._lock.is_file():
            return False
        try:
            with FileLock(self._lock, timeout=0):
                return False
        except Timeout:
            return True
        except OSError:  # somebody else's
            return False

    def identity(self) -> str:
        """32 hexadecimal digits that no other run has."""
        return secret(self._checkpoints / "identity")[:16].hex()

    def known(self, what: str, values: Ints, unknown: int) -> Ints:
        """What clients report of themselves [K], as they first did in this run: nodes reply to the requests of a round
        once, which therefore stay the same."""
        path = self._checkpoints / f"{what}.json"
        before = np.array(read_json(path, list)) if path.is_file() else values
        known = np.where(before != unknown, before, values)
        write_json(path, known.tolist())
        return known

    @property
    def nodes(self) -> int:
        """How many nodes with data of their own the run is with; 0 where its clients are simulated."""
        path = self._checkpoints / "sizes.json"
        return len(read_json(path, list)) if path.is_file() else 0

    def refuse_other_data(self, fingerprint: str | None) -> None:
        """Refuse to go on with data in memory that are not those of the run so far."""
        path = self._checkpoints / "data.json"
        before = read_json(path, str) if path.is_file() else fingerprint
        if before != fingerprint:
            raise HeadstartError(f"--resume: {self.path} is a run on other data; give those that it was begun with")
        if fingerprint is not None:
            write_json(path, fingerprint)

    @property
    def has_checkpoint(self) -> bool:
        """Whether there is anything to go on from."""
        return self._state.is_file()

    def discard(self) -> None:
        """Remove what a run made that ended before its first checkpoint: for who holds the lock, which goes last."""
        tables = ("clients", "rounds", "holdings", "confusion", "samples")
        for name in ("recipe.toml", "metrics.jsonl", "run.log", *(f"{table}.csv" for table in tables)):
            (self.path / name).unlink(missing_ok=True)
        for folder in ("model", "checkpoint"):
            shutil.rmtree(self.path / folder, ignore_errors=True)
        self._discarded = True

    def _remove_empty(self) -> None:
        """Remove the folders of a run that has left nothing, where nobody has come to use them."""
        with suppress(OSError):
            if self._checkpoints.is_dir():
                self._checkpoints.rmdir()
            if self._is_ours:
                self.path.rmdir()

    def log(self, metrics: dict[str, Any]) -> None:
        """Append one evaluation to `metrics.jsonl`."""
        append_text(self.path / "metrics.jsonl", json.dumps(metrics, allow_nan=False) + "\n")

    def metrics(self) -> list[dict[str, Any]]:
        """All evaluations so far; a line cut short by a crash does not count."""
        path = self.path / "metrics.jsonl"
        return read_lines(path, {"stage", "round"}) if path.exists() else []

    def save_checkpoint(self, checkpoint: Checkpoint, private: bool = False) -> None:
        """Replace the checkpoint before; private: for the eyes of its owner only."""
        _write(self._state, checkpoint.to_message(), private)

    def load_checkpoint(self) -> Checkpoint | None:
        """What `save_checkpoint` wrote last, metrics and rounds cut back to it; None where there is none yet.

        Where files are gone that a checkpoint builds on, or that are only there after one, nothing is written.
        """
        if not self.has_checkpoint:
            if any(path.exists() for path in (self.path / "summary.json", self._model(0))):
                raise unreadable(self._state, "it is gone, and says where the run stands")
            for name in ("metrics.jsonl", "rounds.csv"):
                (self.path / name).unlink(missing_ok=True)
            return None
        for path in self._checkpoints.glob("statistics-*.safetensors"):
            if "updates" in read_message(path, whole=False).scalars:
                raise unreadable(self.path / "summary.json", "the run was updated, and to go on would undo that", _COPY)
        saved, metrics = self._checkpoint(), self.metrics()
        count, path = saved.progress["evaluations"], self.path / "metrics.jsonl"
        if len(metrics) < count:
            raise unreadable(path, f"it has {len(metrics)} of {count} evaluations")
        last = saved.progress["stage"], saved.progress["round"]
        rounds = self.rounds_until(*last)
        write_text(path, "".join(json.dumps(line) + "\n" for line in metrics[:count]))
        if rounds is not None:
            write_text(self.path / "rounds.csv", rounds)
        return saved

    def _checkpoint(self) -> Checkpoint:
        message = read_message(self._state)
        if "progress" not in message.arrays:
            raise unreadable(self._state, "it is no checkpoint")
        return Checkpoint.from_message(message)

    def save_best(self, stage: int, round: int, state: Message) -> None:
        """The state after the best round so far of a stage that may end with it."""
        _write(self._best(stage, round), state)

    def load_best(self, stage: int, round: int) -> Message:
        """What `save_best` wrote."""
        return read_message(self._best(stage, round))

    def collect_best(self, stage: int, round: int | None) -> None:
        """Remove the states of a stage's other rounds, once a checkpoint no longer names them."""
        for path in self._checkpoints.glob(f"best-{stage}-*.safetensors"):
            if round is None or path != self._best(stage, round):
                path.unlink()

    def _best(self, stage: int, round: int) -> Path:
        return self._checkpoints / f"best-{stage}-{round}.safetensors"

    def save_model(self, stage: int, model: StageModel, version: Version | None) -> None:
        """The model that a stage leaves, and the backbone where it is new."""
        heads = [head.arrays() for head in model.heads if head is not None]
        arrays: dict[str, Array] = {f"head.{task}.{n}": a for task, each in enumerate(heads) for n, a in each.items()}
        facts: dict[str, Scalar] = {"body": model.body, "tasks": len(model.heads)}
        if model.states is not None and model.states.shapes:
            arrays["slots"] = model.states.slots
            facts |= {"personal": json.dumps(model.states.shapes), "remote": isinstance(model.states, RemoteStates)}
        if version is not None:
            arrays |= {f"body.{name}": array for name, array in (version.arrays or {}).items()}
            facts |= {"norm_statistics": version.norm_statistics, "weights": version.weights}
            if version.module is not None:
                for task, values in enumerate(version.module.values):
                    arrays |= {f"module.{task}.{name}": array for name, array in values.items()}
                facts |= {"module": version.module.kind, "settings": json.dumps(dict(version.module.settings))}
        _write(self._model(stage), Message(arrays, facts))

    def kept(self, stage: int, version: Version) -> Version:
        """The backbone that `save_model` wrote, its weights read when they are asked for."""
        return replace(version, arrays=self._weights(stage, version.weights))

    def load_model(self, stage: int) -> tuple[StageModel, Version | None]:
        """What `save_model` wrote."""
        saved = read_message(self._model(stage), whole=False)

        def under(prefix: str) -> dict[str, np.ndarray]:
            return dict(FileArrays(self._model(stage), prefix))

        facts, version = saved.scalars, None
        states: ClientStates | None = None
        tasks = range(int(facts["tasks"]))
        heads = tuple(LinearHead.of_arrays(under(f"head.{task}.")) for task in tasks)
        if "norm_statistics" in facts:
            module = None
            if "module" in facts:
                values = tuple(under(f"module.{task}.") for task in tasks)
                module = Module(str(facts["module"]), json.loads(str(facts["settings"])), values)
            weights = int(facts["weights"])
            version = Version(weights, str(facts["norm_statistics"]), self._weights(stage, weights), module)
        if "personal" in facts:
            shapes = {name: tuple(shape) for name, shape in json.loads(str(facts["personal"])).items()}
            slots = saved.arrays["slots"].astype(np.int64)
            if facts["remote"]:
                states = RemoteStates(len(slots), shapes, slots)
            elif self.clients(stage).is_dir():  # gone once no later stage started from it
                states = ClientStates(self.clients(stage), len(slots), shapes, slots)
        return StageModel(heads, int(facts["body"]), states), version

    def _weights(self, stage: int, of: int) -> FileArrays | None:
        """The backbone's weights in the file of a stage, where they are the stage's own."""
        return FileArrays(self._model(stage), "body.") if of == stage else None

    def clients(self, stage: int) -> Path:
        """Where the clients of a stage keep what they keep."""
        return self._checkpoints / f"clients-{stage}"

    def _model(self, stage: int) -> Path:
        return self._checkpoints / f"stage-{stage}.safetensors"

    def save_final(
        self,
        store: ModelStore | None,
        heads: Sequence[LinearHead],
        tasks: Sequence[str],
        classes: Sequence[Sequence[str]],
    ) -> None:
        """The final head of each task, and the names of its classes; a trained backbone or module under its own
        names."""
        folder, several = self.path / "model", len(tasks) > 1
        parts = [{f"head.{name}": array for name, array in head.arrays().items()} for head in heads]
        write_json(folder / "classes.json", {task: list(names) for task, names in zip(tasks, classes, strict=True)})
        module = store.module if store else None
        for number, (task, head) in enumerate(zip(tasks, heads, strict=True)):
            head.save(folder / (f"head-{task}.safetensors" if several else "head.safetensors"))
            if module is not None:
                arrays = {**module.values[number], **parts[number]}
                # One entry: safetensors writes several in any order, and files of the same model would differ.
                facts = {"module": json.dumps({"kind": module.kind, **module.settings})}
                path = folder / f"module-{task}.safetensors"
                write_atomically(path, partial(save_arrays, arrays=arrays, metadata=facts))
        if store is not None and store.weights != PRETRAINED:
            arrays = {**store.arrays(), **({} if several else parts[0])}
            write_atomically(folder / "model.safetensors", partial(save_arrays, arrays=arrays))

    def save_statistics(self, stage: int, state: Message, about: Mapping[str, Scalar]) -> None:
        """The statistics of every client of a closed form, for updates; for the eyes of its owner only."""
        facts = {**about, "state": json.dumps(dict(state.scalars))}
        _write(self._statistics(stage), Message(state.arrays, facts), private=True)

    def load_statistics(self, stage: int) -> Message:
        """What `save_statistics` wrote."""
        return read_message(self._statistics(stage))

    def _statistics(self, stage: int) -> Path:
        return self._checkpoints / f"statistics-{stage}.safetensors"

    def save_log(self, stage: int, log: Message) -> None:
        """The log of a stage that can be replayed: seeds and scalars."""
        _write(self._log(stage), log)

    def load_log(self, stage: int) -> Message:
        """What `save_log` wrote."""
        path = self._log(stage)
        if not path.is_file():
            raise HeadstartError(f"{path.parent.parent} holds no log of stage {stage}: only a finished fedmezo has one")
        return read_message(path)

    def _log(self, stage: int) -> Path:
        return self.path / "model" / f"log-{stage}.safetensors"

    def finish(self, summary: dict[str, Any]) -> None:
        """The summary: written last, its presence says that the run is complete; before it the schema of the recipe,
        and what was removed is gone for good."""
        add_schema(self.path / "recipe.toml")
        for folder in (self._checkpoints, *self._checkpoints.glob("clients-*")):
            sync_folder(folder)
        write_json(self.path / "summary.json", summary)

    def finished(self, stages: int) -> bool:
        """Whether there is nothing left to do: the summary is there, and the checkpoint is behind all of the stages."""
        if self.summary() is None or not self.has_checkpoint:
            return False
        return bool(self._checkpoint().progress["stage"] == stages)

    def summary(self) -> dict[str, Any] | None:
        """The summary of a complete run."""
        path = self.path / "summary.json"
        if not path.is_file():
            return None
        found = read_json(path, dict, _ANEW)
        if not isinstance(found.get("stages"), list):
            raise unreadable(path, "it does not tell of stages", _ANEW)
        return found

    def classes(self) -> dict[str, list[str]]:
        """The names of the classes of each task of a complete run."""
        path = self.path / "model" / "classes.json"
        found = read_json(path, dict, _ANEW_FROM)
        if not found or not all(isinstance(names, list) for names in found.values()):
            raise unreadable(path, "it does not name the classes of a task", _ANEW_FROM)
        return found


class _LogFile(logging.Handler):
    """Warnings as lines of a run's log."""

    def __init__(self, directory: RunDirectory) -> None:
        super().__init__(logging.WARNING)
        self.directory = directory

    def emit(self, record: logging.LogRecord) -> None:
        """One message, one line."""
        self.directory.note(" ".join(record.getMessage().split()), record.levelname)


def _write(path: Path, message: Message, private: bool = False) -> None:
    write_atomically(path, message.to_file, private)
