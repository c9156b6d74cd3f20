"""A recipe from its data to its report."""

from __future__ import annotations

import errno
import logging
import platform
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from headstart.config.recipe import Recipe
from headstart.config.stage import PersonaliseStage, Rounds, Stage
from headstart.core.files import secret
from headstart.core.ledger import Ledger, peak_memory
from headstart.core.message import Message
from headstart.core.progress import reported
from headstart.core.statistics import Features, Ints
from headstart.data import Federation
from headstart.engine import (
    PRETRAINED,
    Begin,
    Body,
    ClientStore,
    RemoteStore,
    collect,
    method_of,
    play,
    play_rounds,
    rounds_of,
    shared_examples,
)
from headstart.errors import HeadstartError
from headstart.heads import LinearHead
from headstart.methods import Method, TaskSetting
from headstart.records import Checkpoint, Handed, Record, RunDirectory, StageCheckpoint
from headstart.report import write_report
from headstart.runner.evaluate import Evaluation, Examiner, RemoteExaminer, similarity

if TYPE_CHECKING:  # Flower takes seconds to load
    from headstart.engine.flower import Nodes

log = logging.getLogger("headstart")

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

OnMetrics = Callable[[dict[str, Any]], object]

COSTS = ("bytes_up", "bytes_down", "forward_passes", "seconds")


@dataclass(frozen=True, eq=False)
class Result:
    """What a run found: the summary as it is saved, the final head, and the federation it came from."""

    summary: dict[str, Any]
    head: LinearHead
    federation: Federation
    out: Path | None


def run(
    recipe: Recipe,
    out: Path | str | None = None,
    resume: bool = False,
    on_metrics: OnMetrics | None = None,
) -> Result:
    """Run a recipe; with ``out``, leave a run directory, and with ``resume`` go on with an interrupted one.

    ``on_metrics`` is called with every evaluation, as it is written to `metrics.jsonl`.
    """
    path = Path(out) if out is not None else None
    if path is not None and not resume:
        RunDirectory.check_free(path)
    if resume and path is None:
        raise HeadstartError("--resume needs --out, the directory of the run to go on with")
    return conduct(recipe, Federation.of(recipe), path, resume, on_metrics)


def conduct(
    recipe: Recipe,
    federation: Federation,
    out: Path | None = None,
    resume: bool = False,
    on_metrics: OnMetrics | None = None,
    nodes: Nodes | None = None,
    kept: Path | None = None,
) -> Result:
    """Run a recipe with the clients of a federation: in this process, or on the nodes of a Flower grid.

    kept: where clients of this machine keep what they keep; in the run directory, where that is None and there is one.
    """
    _check(recipe, federation)
    directory = None
    if out is not None:
        directory = RunDirectory.reopen(out, recipe) if resume else RunDirectory.create(out, recipe)
    try:
        noted = directory.path / "checkpoint" / "progress.json" if directory else None
        with directory.lock() if directory else nullcontext(), reported(noted), TemporaryDirectory() as temporary:
            returns = any(stage.start != "previous" for stage in recipe.stages)
            owners = {"train": federation.owners, "test": federation.test_owners}
            body = Body(recipe.model, federation.dataset, returns, owners)
            if nodes is not None and directory is not None:
                nodes.run = directory.identity()
            if federation.announced is not None and directory is not None:
                federation = replace(federation, announced=directory.known(federation.announced))
            kept = kept or (directory.path / "checkpoint" if directory else Path(temporary))
            return _Run(recipe, federation, body, directory, on_metrics or (lambda line: None), kept, nodes).play()
    except BaseException as error:
        if directory is not None and not resume and not directory.has_checkpoint:
            directory.discard()
        if isinstance(error, OSError) and error.errno in _FULL:
            safe = directory is not None and directory.has_checkpoint
            how = "go on with --resume: what the last checkpoint holds is safe" if safe else "start again"
            raise HeadstartError(f"{error.filename or out}: {error.strerror}; make room, and {how}") from None
        raise


def _check(recipe: Recipe, federation: Federation) -> None:
    """What a recipe asks for and its data do not have."""
    for number, stage in enumerate(recipe.stages):
        if federation.dataset.validation is None:
            if stage.eval_split == "validation":
                raise HeadstartError(f"stages.{number}.eval_split: the data have no validation split; use 'test'")
            if isinstance(stage, Rounds) and (stage.keep == "best" or stage.patience):
                raise HeadstartError(f"stages.{number}: keep = 'best' and patience need a validation split in the data")
        if len(federation.tasks) > 1 and stage.one_task:
            raise HeadstartError(f"stages.{number}.method: {stage.method} is for one task; give [data] instead")
        if federation.announced is not None and (stage.pools or (isinstance(stage, Rounds) and stage.share)):
            raise HeadstartError(f"stages.{number}: clients that hold their own data do not give them away")
        if federation.announced is not None and not isinstance(stage, PersonaliseStage) and stage.secure:
            asked = stage.sampled(federation.n_clients)
            if stage.survivors(stage.secure_group or asked) == (stage.secure_group or asked):
                log.warning(
                    "stages.%d: every client of a secure sum of %d has to stay to the end; four are the fewest that "
                    "tolerate one absence", number, stage.secure_group or asked,
                )  # fmt: skip
        personal = isinstance(stage, PersonaliseStage) and (stage.without_head or stage.forgetting)
        if federation.announced is not None and personal:
            raise HeadstartError(f"stages.{number}: without_head and forgetting look at everybody's examples")
    words, classes = recipe.model.label_words, federation.dataset.classes
    if words is not None and len(words) != len(classes):
        raise HeadstartError(f"model.label_words: {len(words)} words for {len(classes)} classes; give one for each")


class _Run:
    """The stages of one run, with their costs and checkpoints."""

    def __init__(
        self,
        recipe: Recipe,
        federation: Federation,
        body: Body,
        directory: RunDirectory | None,
        on_metrics: OnMetrics,
        kept: Path,
        nodes: Nodes | None,
    ) -> None:
        self.recipe, self.federation, self.body, self.directory = recipe, federation, body, directory
        self.on_metrics, self.kept, self.nodes = on_metrics, kept, nodes
        self.stages: list[dict[str, Any]] = []
        self.spent: dict[str, float] = dict.fromkeys(COSTS, 0)
        self.evaluations = 0
        self.handed: list[Handed] = []

    def play(self) -> Result:
        saved = self.directory.load_checkpoint() if self.directory else None
        start = 0
        if self.directory and self.federation.announced is None:
            federation = self.federation
            self.directory.write_holdings(federation.names, federation.dataset.classes, federation.counts)
        if self.directory and saved is not None:
            progress = saved.progress
            start, self.stages, self.evaluations = progress["stage"], progress["stages"], progress["evaluations"]
            self.spent = progress["spent"]
            for number in range(start):
                handed, version = self.directory.load_model(number)
                if version is not None:
                    self.body.remember(number, version)
                self.handed.append(handed)
            self._collect_garbage()
        for number, stage in enumerate(self.recipe.stages):
            if number >= start:
                within = saved.stage if saved is not None and number == start else None
                progress = saved.progress if saved is not None and within is not None else {}
                self._play_stage(number, stage, within, progress)
                if self.directory:
                    self.directory.save_checkpoint(Checkpoint(self._progress(number + 1, 0)))
                self._collect_garbage()
        return self._finish()

    def _progress(self, stage: int, round: int) -> dict[str, Any]:
        """Where the run stands, for a checkpoint."""
        return {
            "stage": stage, "round": round, "stages": self.stages, "spent": self.spent, "evaluations": self.evaluations,
        }  # fmt: skip

    def _collect_garbage(self) -> None:
        """Remove what finished stages no longer need, and what their clients kept where no later stage starts from it.

        Only once a checkpoint says that those stages are finished: until then a resumed run needs all of it.
        """
        done = len(self.handed)
        needed = {self._origin(number, stage) for number, stage in enumerate(self.recipe.stages) if number >= done}
        for number, handed in enumerate(self.handed):
            if self.directory:
                self.directory.collect_best(number, None)
            if not isinstance(handed.store, RemoteStore):
                last = number == len(self.recipe.stages) - 1  # the user's
                collect(self.kept / f"clients-{number}", handed.store is not None and (last or number in needed))

    def _play_stage(
        self, number: int, stage: Stage, saved: StageCheckpoint | None, progress: Mapping[str, Any]
    ) -> None:
        """Play a stage; saved, progress: after the round to go on from, where it was interrupted."""
        seed = (self.recipe.seed, number)
        federation = self.federation.pooled() if stage.pools else self.federation
        begin = self._begin(number, stage)
        self.body.load(begin.body)
        plain = stage
        stage, moves = self._widened(number, stage, begin)
        changes = isinstance(stage, Rounds) and stage.plan.changes_features
        shares = isinstance(stage, Rounds) and "shared" in (stage.plan.body, stage.plan.module)
        before = self.body.known(stage.eval_split) if shares and federation.announced is None else None
        left, norm_statistics = self.body.module(), self.body.norm_statistics
        tasks = self._tasks(federation, begin)
        privacy = getattr(stage, "privacy", None)
        noise = secret(self.kept / "noise.secret") if privacy and federation.announced is not None else ()
        method = method_of(stage, seed, self.body, tasks, moves, noise)
        own_names = {name.partition("@")[0] for name in begin.store.shapes} if begin.store else set()
        weights = self._weights()
        begins = {
            (task, owns): Begin.of(
                number, task, tasks, stage, plain, moves, method.catches_up, weights, left, norm_statistics,
                own_names if owns else set(),
            )
            for task in range(len(tasks))
            for owns in (False, True)
        }  # fmt: skip
        validates = isinstance(stage, Rounds) and self.federation.dataset.validation is not None
        if not changes:  # before the clock of the stage starts, and with a progress bar of its own
            for split in ("train", stage.eval_split, *(["validation"] if validates else [])):
                if len(getattr(federation.dataset, split)):  # a server may hold none
                    self.body.features(split)
        ledger, state, played, slots = Ledger.open(federation.n_clients), None, 0, None
        metrics: dict[str, Any] = {}
        best: dict[str, Any] = {}
        if saved is not None:
            ledger, slots = saved.ledger, saved.slots
            state, played = method.thaw(saved.state), progress["round"]
            metrics, best = progress["metrics"], progress["best"]
        store = self._store(federation, stage, method, self.kept / f"clients-{number}", slots, begin)
        members = federation.tasks_of(np.arange(federation.n_clients))
        remote = None
        if self.nodes is not None and not stage.pools:
            from headstart.engine.flower import FlowerClients

            earlier = self._earlier(number, plain)
            remote = FlowerClients(self.nodes, stage, number, members, begins, store, earlier)
        look: Examiner | RemoteExaminer = Examiner(self.federation, self.body, method, store, changes)
        if remote and federation.announced is not None and (method.personal or not len(federation.dataset.test)):
            look = RemoteExaminer(federation, method, remote)
            if stage.protected:
                log.warning(
                    "stages.%d: nodes test no models under privacy or secure sums%s: the accuracy is not known", number,
                    "" if method.personal else ", and the server was given no test data",
                )  # fmt: skip
        rounds, _ = rounds_of(stage, federation.n_clients)
        watch = _Watch(
            self, number, stage, rounds, method, look, ledger, store, before, validates, metrics, best, played
        )
        if isinstance(stage, PersonaliseStage) and state is None:
            state = method.open()
            watch(-1, state)
        if watch.out_of_patience:
            played = rounds
        owns = [begin.store is not None and begin.store.has(client) for client in range(federation.n_clients)]
        needs = np.array([begins[int(task), has].nbytes for task, has in zip(members, owns, strict=True)])
        about = (ledger, store, watch, state, played, needs)
        if remote is None:
            state = play(method, stage, federation, self._source(changes), seed, *about)
        else:
            server = None
            if isinstance(stage, Rounds) and stage.share:
                server = shared_examples(stage, federation, self._source(changes), seed)
            # Sampling amplifies privacy only where nobody knows who was drawn: with it, a secret draws.
            state = play_rounds(method, stage, federation, remote, (*noise, *seed), *about, server)
        if store.settle(
            partial(self._own, federation, method, store)
        ):  # to go on from here, what earlier stages have left with the clients is not needed
            watch.save(state)
        counts = federation.counts[(ledger.forward_passes > 0) | (ledger.last_round >= 0)]
        if privacy and privacy.noise == "client":  # how many examples there are is not to be known
            counts = np.zeros_like(counts)
        published = method.published(state, counts)
        state = watch.kept(state)
        self._hand_on(number, stage, method, state, begin, store, changes)
        self.stages.append(
            {
                "method": stage.method,
                "rounds": watch.done,
                "eval_split": stage.eval_split,
                **({"keep": "best"} if watch.keeps_best else {}),
                **metrics,
                **{name: value for name, value in best.items() if name.startswith("best_")},
                **ledger.totals(),
                "published_bytes": published.bytes,
                "published_compute": published.forward_passes,
                "published_formula": published.formula,
                "chosen": dict(method.head(state).notes) if len(tasks) == 1 else {},
                **({"privacy": guarantee} if (guarantee := method.spent(state)) else {}),
                "dropped": ledger.dropped,
            }
        )
        self.spent = {name: round(self.spent[name] + cost, 3) for name, cost in ledger.totals().items()}

    def _store(
        self, federation: Federation, stage: Stage, method: Method[Any], folder: Path, slots: Ints | None, begin: Handed
    ) -> ClientStore:
        """Where clients keep what they keep: here, or on machines of their own."""
        if federation.announced is not None:
            return RemoteStore(federation.n_clients, method.kept_shapes, slots, begin.store)

        def inherits(name: str) -> bool:
            return stage.head_init == "previous" or not name.startswith("personal.head.")

        return ClientStore(folder, federation.n_clients, method.kept_shapes, slots, begin.store, inherits)

    @staticmethod
    def _own(federation: Federation, method: Method[Any], store: ClientStore, client: int) -> dict[str, Any]:
        """What is a client's own now, by the names of the store."""
        task = int(federation.tasks_of(np.array([client]))[0])
        kept = method.own(partial(store.read, clients=np.array([client])), task)
        names = {f"personal.{name}{end}": name for name in kept for end in ("", f"@{federation.tasks[task]}")}
        return {full: kept[name][0] for full, name in names.items() if full in store.shapes}

    def _weights(self) -> Mapping[str, Any]:
        """The weights of the body where earlier stages have trained it; on nodes they are needed as they are now."""
        if self.body.weights == PRETRAINED:
            return {}
        arrays = self.body.arrays()
        return arrays if self.nodes is None else {name: array.copy() for name, array in arrays.items()}

    def _source(self, changes: bool) -> Any:
        """What clients read here: examples where the body changes, features where it does not."""
        return self.body.inputs() if changes else self.body.features("train")

    def _origin(self, number: int, stage: Stage) -> int:
        """The number of the stage that a stage starts from."""
        if stage.start == "pretrained":
            return PRETRAINED
        return number - 1 if stage.start == "previous" else stage.start

    def _begin(self, number: int, stage: Stage) -> Handed:
        """What a stage starts from."""
        origin = self._origin(number, stage)
        if origin == PRETRAINED:
            return Handed((self.body.label_words(),) * len(self.federation.tasks), PRETRAINED)
        return self.handed[origin]

    def _earlier(self, number: int, stage: Stage) -> list[tuple[int, ClientStore]]:
        """The stages whose clients have something of their own that a stage goes on from, the last one first."""
        found = []
        while (number := self._origin(number, stage)) != PRETRAINED and (
            store := self.handed[number].store
        ) is not None:
            found.append((number, store))
            if not isinstance(store, RemoteStore):  # it has brought along all there was before
                break
            stage = self.recipe.stages[number]
        return found

    def _widened(self, number: int, stage: Stage, begin: Handed) -> tuple[Stage, Literal["head", "body"] | None]:
        """Personalise on top of what is already the clients' own: all of it is loaded, and the part asked for moves."""
        if not isinstance(stage, PersonaliseStage) or begin.store is None:
            return stage, None
        names = [name.removeprefix("personal.") for name in begin.store.shapes]
        below = [name for name in names if not name.startswith("head.")]
        if below and stage.compute:
            raise HeadstartError(
                f"stages.{number}.compute: the earlier stage gave every client a body of its own; fine-tune instead"
            )
        if stage.train == "head" and below:
            module = self.body.module()
            return stage.model_copy(update={"update": module.kind if module else "all"}), "head"
        if stage.train == "body" and len(below) < len(names):
            return stage.model_copy(update={"update": "all"}), "body"
        return stage, None

    def _tasks(self, federation: Federation, begin: Handed) -> tuple[TaskSetting, ...]:
        """What is known of each task."""
        module = self.body.module()
        tasks = []
        for number, name in enumerate(federation.tasks):
            classes, clients = federation.classes_of(number), federation.clients_of(number)
            tasks.append(
                TaskSetting(
                    name,
                    classes.stop - classes.start,
                    clients.stop - clients.start,
                    int(federation.sizes[clients].sum()),
                    begin.heads[number],
                    module.values[number] if module and module.values else None,
                )
            )
        return tuple(tasks)

    def _hand_on(
        self,
        number: int,
        stage: Stage,
        method: Method[Any],
        state: Any,
        begin: Handed,
        store: ClientStore,
        changes: bool,
    ) -> None:
        """Remember what a stage has made."""
        tasks = range(len(self.federation.tasks))
        heads = tuple(method.head(state, task) for task in tasks)
        version, body = None, begin.body
        if isinstance(stage, Rounds) and changes:
            values = []
            for task in reversed(tasks):  # the first task's module is the one that stays on the body
                method.place(state, task)
                values.append(self.body.module_values())
            trained = stage.plan.body == "shared"
            version, body = self.body.keep(number, stage.norm_statistics, values[::-1], trained), number
        self.handed.append(Handed(heads, body, store if store.shapes else None))
        if self.directory:
            self.directory.save_model(number, self.handed[-1], version)
            if method.catches_up:
                self.directory.save_log(number, method.freeze(state))

    def _finish(self) -> Result:
        federation, heads = self.federation, self.handed[-1].heads
        assert heads[0] is not None
        summary = {
            "name": self.recipe.name,
            "stages": self.stages,
            "accuracy": self.stages[-1]["accuracy"],
            **{name: self.spent[name] for name in COSTS},
            "clients": federation.n_clients,
            "classes": len(federation.dataset.classes),
            "examples": int(federation.sizes.sum()),
            "unused_examples": federation.unused,
            "peak_rss_bytes": peak_memory(),
            "versions": _versions(),
        }
        if hidden := [stage["privacy"] for stage in self.stages if "privacy" in stage]:
            # Guarantees of one unit add up over the stages; a stage without one is not covered by the others'.
            units = {
                unit: {name: sum(one[name] for one in hidden if one["unit"] == unit) for name in ("epsilon", "delta")}
                for unit in dict.fromkeys(one["unit"] for one in hidden)
            }
            uncovered = [stage["method"] for stage in self.stages if "privacy" not in stage]
            summary["privacy"] = {**units, "uncovered": uncovered}
        if self.directory:
            final = [head for head in heads if head is not None]
            self.body.load(self.handed[-1].body)
            self.directory.save_final(
                self.body if self.handed[-1].body != PRETRAINED else None,
                final,
                federation.tasks,
                federation.class_names,
            )
            (self.kept / "noise.secret").unlink(missing_ok=True)  # nothing is left to be drawn from it
            report = self.directory.path / "report.html"
            write_report(report, [Record.read(self.directory.path, summary)])
            self.directory.finish(summary)
        return Result(summary, heads[0], federation, self.directory.path if self.directory else None)


@dataclass(eq=False)
class _Watch:
    """What is noted after each round of a stage: how good the model is, what it has cost, and a checkpoint."""

    run: _Run
    number: int
    stage: Stage
    rounds: int
    method: Method[Any]
    look: Examiner | RemoteExaminer
    ledger: Ledger
    store: ClientStore
    before: Features | None
    """Features of the evaluated split before the stage, where it changes those of all clients."""
    validates: bool
    metrics: dict[str, Any]
    best: dict[str, Any]
    """The round that validation chooses, and what the evaluated split says of it."""
    done: int
    """Rounds that have been played."""
    _best_state: bytes | None = None

    def __call__(self, index: int, state: Any) -> bool:
        """After the round with this number, from 0; returns whether it is the last."""
        self.done = index + 1
        if self.run.directory and self.done:
            self.run.directory.log_round(self.number, self.done, self._names, self.ledger)
        if self.done == self.rounds or self.done % self.stage.evaluate_every == 0:
            found = self._evaluate(state)
            if self.validates:
                self._validate(state)
            if self._is_last:
                self._conclude(state, found)
            self.ledger.tick()
            spent = self.run.spent
            costs = {name: round(spent[name] + cost, 3) for name, cost in self.ledger.totals().items()}
            line = {"stage": self.number, "method": self.stage.method, "round": self.done, **self.metrics, **costs}
            self.run.evaluations += 1
            if self.run.directory:
                self.run.directory.log(line)
            self.run.on_metrics(line)
        self.save(state)
        return self._is_last

    @property
    def _names(self) -> tuple[str, ...]:
        return self.run.federation.pooled().names if self.stage.pools else self.run.federation.names

    @property
    def out_of_patience(self) -> bool:
        """Whether validation has not improved for too long."""
        patience = self.stage.patience if isinstance(self.stage, Rounds) else None
        return patience is not None and self.best.get("evaluations_since_best", 0) >= patience

    @property
    def _is_last(self) -> bool:
        return self.done == self.rounds or self.out_of_patience

    @property
    def keeps_best(self) -> bool:
        """Whether the stage ends with the round that validation chooses."""
        return isinstance(self.stage, Rounds) and self.stage.keep == "best"

    def _evaluate(self, state: Any) -> Evaluation:
        """On the split of the stage."""
        stage, metrics = self.stage, self.metrics
        found, by_task = self.look(state, stage.eval_split)
        metrics.update(found.metrics())
        if len(by_task) > 1:
            metrics["tasks"] = {name: part.metrics() for name, part in by_task.items()}
        if isinstance(stage, PersonaliseStage):
            metrics.update(self.look.personalised(stage, state, self.done, found, metrics))
        return found

    def _validate(self, state: Any) -> None:
        """Whether this is the best round so far, on the validation split."""
        metrics, best = self.metrics, self.best
        metrics["validation_accuracy"] = chosen = self.look(state, "validation")[0].accuracy
        if chosen is None:  # nobody may test
            return
        if chosen > best.get("best_validation_accuracy", -1.0):
            best["best_validation_accuracy"] = chosen
            best["best_accuracy"], best["best_round"] = metrics["accuracy"], self.done
            best["evaluations_since_best"] = 0
            if self.keeps_best:
                self._best_state = self.method.freeze(state).to_bytes()
                if self.run.directory:
                    self.run.directory.save_best(self.number, self.done, self._best_state)
        else:
            best["evaluations_since_best"] += 1

    def _conclude(self, state: Any, found: Evaluation) -> None:
        """What is noted of the model that the stage ends with, clients and confusion included."""
        if self.before is not None:
            similar = similarity(self.before, self.look.features(state, self.stage.eval_split))
            self.metrics["feature_similarity"] = similar
        if self.run.directory:
            self.run.directory.write_clients(self.number, self._names, self.ledger, found.client_accuracy)
            if found.answers is not None:
                classes = self.run.federation.dataset.classes
                self.run.directory.write_confusion(self.number, classes, *found.answers)

    def kept(self, state: Any) -> Any:
        """The state that the stage ends with: the last one, or that of the best round, evaluated anew."""
        if not self.keeps_best or self.best.get("best_round", self.done) == self.done:
            return state
        if self._best_state is None:  # saved before the run was interrupted
            assert self.run.directory is not None
            self._best_state = self.run.directory.load_best(self.number, self.best["best_round"])
        state = self.method.thaw(Message.from_bytes(self._best_state))
        found = self._evaluate(state)
        self.metrics["validation_accuracy"] = self.best["best_validation_accuracy"]
        self._conclude(state, found)
        return state

    def save(self, state: Any) -> None:
        """A checkpoint to go on from."""
        if self.run.directory:
            where = self.run._progress(self.number, self.done) | {"metrics": self.metrics, "best": self.best}
            stage = StageCheckpoint(self.method.freeze(state), self.ledger, self.store.slots)
            # With privacy it holds what the noise hides.
            private = getattr(self.stage, "privacy", None) is not None
            self.run.directory.save_checkpoint(Checkpoint(where, stage), private)
            if self.keeps_best:
                self.run.directory.collect_best(self.number, self.best.get("best_round"))


def _versions() -> dict[str, str]:
    packages = ("headstart", "torch", "transformers", "datasets", "numpy", "scipy", "scikit-learn")
    return {"python": platform.python_version(), **{name: version(name) for name in packages}}
