"""A recipe from its data to its report."""

from __future__ import annotations

import errno
import logging
import platform
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import numpy as np

from headstart.config.recipe import MEMORY, Recipe
from headstart.core.ledger import peak_memory
from headstart.core.metrics import SHOWN
from headstart.core.progress import reported
from headstart.data import Federation
from headstart.data.examples import UnreadableError, all_unreadable
from headstart.data.memory import names_clients
from headstart.engine.client_states import RemoteStates, collect
from headstart.engine.model_store import PRETRAINED, ModelStore
from headstart.engine.server import SMALLEST_SUM
from headstart.errors import HeadstartError
from headstart.records import Checkpoint, NoDirectory, Record, RunDirectory, StageModel, privacy_spent
from headstart.report import human_bytes, score, write_report
from headstart.runner.check_federation import check_federation
from headstart.runner.result import Result
from headstart.runner.run_stage import run_stage

if TYPE_CHECKING:  # Flower takes seconds to load
    from headstart.engine.grid import Nodes

log = logging.getLogger("headstart")

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

OnMetrics = Callable[[dict[str, Any]], object]

COSTS = ("bytes_up", "bytes_down", "forward_passes", "seconds")


def run(
    recipe: Recipe | Mapping[str, Any] | Path | str,
    out: Path | str | None = None,
    resume: bool = False,
    on_metrics: OnMetrics | None = None,
    *,
    data: Any = None,
    report: bool = True,
) -> Result:
    """Run a recipe: itself, a table, or the path of a TOML file; with ``out``, leave a run directory, and with
    ``resume`` go on with an interrupted one.

    ``on_metrics`` is called with every evaluation, as it is written to `metrics.jsonl`. ``data``: the examples, where
    they are in memory and not in what the recipe names: a pair (X, y); a mapping with X and y, and optionally split,
    client and domain; a DataFrame; a Hugging Face or torch data set; or a mapping of splits to any of these. X may be
    features [n, d], images [n, H, W], [n, H, W, 3] or [n, 3, H, W], a list of PIL images, or a list of texts.
    ``report``: whether the directory has a report.html, which takes seconds to draw.
    """
    recipe = Recipe.of(recipe, None if data is None else in_memory(data))
    path = Path(out) if out is not None else None
    if path is not None and not resume:
        RunDirectory.check_free(path)
    if resume and path is None:
        raise HeadstartError("--resume needs --out, the directory of the run to continue")
    return run_federation(recipe, Federation.of(recipe, data), path, resume, on_metrics, report=report)


def in_memory(data: Any) -> dict[str, Any]:
    """The keys of [data] for data in memory, where a recipe does not say otherwise."""
    return {"dataset": MEMORY, **({"partition": {"kind": "natural"}} if names_clients(data) else {})}


def run_federation(
    recipe: Recipe,
    federation: Federation,
    out: Path | None = None,
    resume: bool = False,
    on_metrics: OnMetrics | None = None,
    nodes: Nodes | None = None,
    states: Path | None = None,
    report: bool = True,
) -> Result:
    """Run a recipe with the clients of a federation: in this process, or on the nodes of a Flower grid.

    states: where the states of clients of this machine are; in the run directory, where that is None and there is one.
    """
    check_federation(recipe, federation)
    if recipe.clients is not None and nodes is not None:
        raise HeadstartError("clients: nodes have their own speed; leave the table out, or simulate in one process")
    directory: RunDirectory | NoDirectory = NoDirectory()
    if out is not None:
        directory = RunDirectory.reopen(out, recipe) if resume else RunDirectory.create(out, recipe)
    try:
        with directory.lock():
            try:
                noted = directory.path / "checkpoint" / "progress.json" if directory.path else None
                with reported(noted), directory.logged(), TemporaryDirectory() as temporary:
                    if nodes is not None and isinstance(directory, RunDirectory):
                        nodes.run = directory.identity()
                    if federation.remote_sizes is not None:
                        federation = _known(recipe, federation, directory)
                        if nodes is not None:
                            nodes.begin(federation.members)
                    directory.refuse_other_data(federation.dataset.fingerprint)
                    if resume and isinstance(directory, RunDirectory) and directory.finished(len(recipe.stages)):
                        page = directory.path / "report.html"
                        if report and not page.is_file():
                            write_report(page, [Record.read(directory.path)])
                        return replace(Result.load(directory.path), _federation=federation)
                    folder = states or (directory.path / "checkpoint" if directory.path else Path(temporary))
                    run = Run(recipe, federation, directory, on_metrics or (lambda line: None), folder, nodes)
                    return run.play(report)
            except BaseException as error:
                if directory.has_checkpoint:
                    directory.note(f"stopped: {type(error).__name__}: {' '.join(str(error).split())}", "ERROR")
                elif not resume:
                    directory.discard()
                raise
    except OSError as error:
        if error.errno not in _FULL:
            raise
        safe = directory.has_checkpoint
        how = "continue with --resume: what the last checkpoint holds is safe" if safe else "start again"
        raise HeadstartError(f"{error.filename or out}: {error.strerror}; make room, and {how}") from None


def _known(recipe: Recipe, federation: Federation, directory: RunDirectory | NoDirectory) -> Federation:
    """Clients that hold their own data, with what is known of them from before the run was interrupted."""
    sizes = directory.known("sizes", federation.remote_sizes, 0) if federation.remote_sizes is not None else None
    members = federation.members
    if members is not None:
        members = directory.known("tasks", members, -1)
        fewest = SMALLEST_SUM if any(stage.secure for stage in recipe.stages) else 1
        counts = np.bincount(members[members >= 0], minlength=len(federation.tasks))
        for task, count in zip(federation.tasks, counts, strict=True):
            if not count:
                raise HeadstartError(f"no node has the task {task!r}; start when one is there, or leave the task out")
            if count < fewest:
                raise HeadstartError(
                    f"secure: the task {task!r} has {count} of {fewest} nodes; its part of a sum would show their own"
                )
    return replace(federation, remote_sizes=sizes, members=members)


class Run:
    """The stages of one run, with their costs and checkpoints."""

    def __init__(
        self,
        recipe: Recipe,
        federation: Federation,
        directory: RunDirectory | NoDirectory,
        on_metrics: OnMetrics,
        folder: Path,
        nodes: Nodes | None,
    ) -> None:
        """folder: of the clients' states."""
        self.recipe, self.federation, self.directory = recipe, federation, directory
        self.folder, self.nodes, self._on_metrics = folder, nodes, on_metrics
        self.metrics: list[dict[str, Any]] = []
        """Every evaluation so far."""
        returns = any(stage.start != "previous" for stage in recipe.stages)
        owners = {"train": federation.owners, "test": federation.test_owners}
        first, *others = recipe.models
        self.store = ModelStore(first, federation.dataset, returns, owners, others)
        if cut := self.store.cut():
            log.warning(
                "model.max_tokens: %d of %d training examples have more than %d tokens and are cut",
                cut, len(federation.dataset.train), recipe.model.max_tokens,
            )  # fmt: skip
        self.stages: list[dict[str, Any]] = []
        """What is in the summary of each finished stage."""
        simulated = () if recipe.clients is None else ("simulated_seconds",)
        self.spent: dict[str, float] = dict.fromkeys((*COSTS, *simulated), 0)
        self.evaluations = 0
        self.models: list[StageModel] = []
        """What each finished stage left."""

    def play(self, report: bool = True) -> Result:
        """All stages, from the last checkpoint on; report: whether to leave report.html."""
        saved = self.directory.load_checkpoint()
        start = self._restore(saved) if saved is not None else 0
        federation, dataset, stages = self.federation, self.federation.dataset, len(self.recipe.stages)
        self.say(
            f"{'resumed' if saved else 'started'} {self.recipe.name}, seed {self.recipe.seed}, with headstart "
            f"{version('headstart')}: {federation.n_clients:,} clients, {stages} stage{'s' if stages > 1 else ''}"
        )
        for note in () if saved else dataset.notes:  # they were told when the data were loaded, before there was a log
            self.directory.note(f"{dataset.name}: {note}", "WARNING")
        if federation.remote_sizes is None and dataset.target == "classes":
            self.directory.write_holdings(federation.names, dataset.classes, federation.counts)
        try:
            for number in range(start, stages):
                within = saved if saved is not None and number == start and saved.stage is not None else None
                run_stage(self, number, within)
                self.directory.save_checkpoint(Checkpoint(self.progress(number + 1, 0)))
                self._collect_garbage()
        except UnreadableError as error:
            raise all_unreadable(dataset.name, dataset.splits, self.recipe.model.pixel_range, error) from None
        return self._finish(report)

    def say(self, message: str) -> None:
        """A line of the run's log, and of the caller's logging."""
        log.info(message)
        self.directory.note(message)

    def tell(self, line: dict[str, Any]) -> None:
        """What an evaluation found, to those who wait for it."""
        self.metrics.append(line)
        self.say(
            f"stage {line['stage']}, {line['method']}, round {line['round']}: {score(line)}, "
            f"{human_bytes(line['bytes_up'])} up, {line['seconds']:.1f} s"
        )
        self._on_metrics(line)

    def _restore(self, saved: Checkpoint) -> int:
        """What a checkpoint knows of finished stages; the number of the stage to go on with."""
        progress = saved.progress
        self.stages, self.evaluations, self.spent = progress["stages"], progress["evaluations"], progress["spent"]
        assert isinstance(self.directory, RunDirectory)
        self.metrics += self.directory.metrics()
        for number in range(progress["stage"]):
            model, version = self.directory.load_model(number)
            if version is not None:
                self.store.remember(number, version)
            self.models.append(model)
        self._collect_garbage()
        return int(progress["stage"])

    def progress(self, stage: int, round: int) -> dict[str, Any]:
        """Where the run stands, for a checkpoint."""
        return {
            "stage": stage, "round": round, "stages": self.stages, "spent": self.spent, "evaluations": self.evaluations,
        }  # fmt: skip

    def origin(self, number: int) -> int:
        """The number of the stage that a stage starts from."""
        start = self.recipe.stages[number].start
        if start == "pretrained":
            return PRETRAINED
        return number - 1 if start == "previous" else start

    def _collect_garbage(self) -> None:
        """Remove what finished stages no longer need, and states of their clients that no later stage starts from.

        Only once a checkpoint says that those stages are finished: until then a resumed run needs all of it.
        """
        done = len(self.models)
        needed = {self.origin(number) for number in range(done, len(self.recipe.stages))}
        for number, model in enumerate(self.models):
            self.directory.collect_best(number, None)
            if not isinstance(model.states, RemoteStates):
                last = number == len(self.recipe.stages) - 1  # the user's
                collect(self.folder / f"clients-{number}", model.states is not None and (last or number in needed))

    def _finish(self, report: bool) -> Result:
        federation, model = self.federation, self.models[-1]
        heads = model.heads
        assert heads[0] is not None
        summary = {
            "name": self.recipe.name,
            "stages": self.stages,
            **{name: self.stages[-1][name] for name in SHOWN if name in self.stages[-1]},
            **self.spent,
            "clients": federation.n_clients,
            "target": federation.dataset.target,
            "classes": len(federation.dataset.classes),
            "examples": int(federation.sizes.sum()),
            "unused_examples": federation.unused,
            "peak_rss_bytes": peak_memory(),
            "versions": _versions(),
            **self._times(),
        }
        if spent := privacy_spent(self.stages):
            summary["privacy"] = spent
        final = [head for head in heads if head is not None]
        self.store.load(model.body)
        store = self.store if model.body != PRETRAINED else None
        self.directory.save_final(store, final, federation.tasks, federation.class_names)
        (self.folder / "noise.secret").unlink(missing_ok=True)  # nothing is left to be drawn from it
        if self.directory.path and report:
            write_report(self.directory.path / "report.html", [Record.read(self.directory.path, summary)])
        self.directory.finish(summary)
        self.say(f"finished: {score(summary)} after {summary['total_seconds']:.1f} s")
        return Result(self.recipe, summary, heads[0], self.metrics, self.directory.path, federation)

    def _times(self) -> dict[str, Any]:
        """When the run began and ended, in UTC, and the seconds between, interruptions included."""
        began, ended = self.directory.started, datetime.now(UTC)
        shown = {name: when.isoformat(timespec="seconds") for name, when in (("started", began), ("ended", ended))}
        return {**shown, "total_seconds": round((ended - began).total_seconds(), 3)}


def _versions() -> dict[str, str]:
    packages = ("headstart", "torch", "transformers", "datasets", "numpy", "scipy", "scikit-learn", "openvino")
    there = [name for name in packages if name != "openvino" or find_spec(name)]  # optional
    return {"python": platform.python_version(), **{name: version(name) for name in there}}
