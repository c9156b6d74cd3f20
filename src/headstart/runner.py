"""A recipe from its data to its report."""

from __future__ import annotations

import platform
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from headstart.data import Federation
from headstart.engine import PRETRAINED, Body, ClientStore, RunDirectory, play, rounds_of
from headstart.errors import HeadstartError
from headstart.evaluation import Evaluation, evaluate
from headstart.heads import LinearHead
from headstart.ledger import Ledger, peak_memory
from headstart.methods import Setting, build
from headstart.methods.plan import Plan
from headstart.recipe import FedMeZOStage, Recipe, Rounds, Stage
from headstart.report import write_report
from headstart.wire import Message

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
    on_metrics: Callable[[dict[str, Any]], object] | None = None,
) -> Result:
    """Run a recipe; with ``out``, leave a run directory, and with ``resume`` go on with an interrupted one.

    ``on_metrics`` is called with every evaluation, as it is written to `metrics.jsonl`.
    """
    path = Path(out) if out is not None else None
    if path is not None and not resume:
        RunDirectory.check_free(path)
    if resume and path is None:
        raise HeadstartError("--resume needs --out, the directory of the run to go on with")
    federation = Federation.of(recipe)
    for number, stage in enumerate(recipe.stages):
        if stage.eval_split == "validation" and federation.dataset.validation is None:
            raise HeadstartError(f"stages.{number}.eval_split: the data have no validation split; use 'test'")
    words, classes = recipe.model.label_words, federation.dataset.classes
    if words is not None and len(words) != len(classes):
        raise HeadstartError(f"model.label_words: {len(words)} words for {len(classes)} classes; give one for each")
    directory = None
    if path is not None:
        directory = RunDirectory.reopen(path, recipe) if resume else RunDirectory.create(path, recipe)
    try:
        returns = any(stage.start != "previous" for stage in recipe.stages)
        body = Body(recipe.model, federation.dataset, keep_pretrained=returns)
        return _Run(recipe, federation, body, directory, on_metrics or (lambda line: None)).play()
    except BaseException:
        if directory is not None and not resume and not directory.metrics():
            directory.discard()
        raise


@dataclass(frozen=True, eq=False)
class _Handed:
    """What a stage hands on: its head, and the number of the stage that made its body."""

    head: LinearHead | None
    body: int


class _Run:
    """The stages of one run, with their costs and checkpoints."""

    def __init__(
        self,
        recipe: Recipe,
        federation: Federation,
        body: Body,
        directory: RunDirectory | None,
        on_metrics: Callable[[dict[str, Any]], object],
    ) -> None:
        self.recipe, self.federation, self.body, self.directory = recipe, federation, body, directory
        self.on_metrics = on_metrics
        self.stages: list[dict[str, Any]] = []
        self.spent: dict[str, float] = dict.fromkeys(COSTS, 0)
        self.evaluations = 0
        self.handed: list[_Handed] = []

    def play(self) -> Result:
        saved = self.directory.load_checkpoint() if self.directory else None
        start = 0
        if self.directory and saved is not None:
            progress = saved[3]
            start, self.stages, self.evaluations = progress["stage"], progress["stages"], progress["evaluations"]
            self.spent = progress["spent"]
            for number in range(start):
                head, body, version = self.directory.load_model(number)
                if version is not None:
                    self.body.remember(number, version)
                self.handed.append(_Handed(head, body))
        for number, stage in enumerate(self.recipe.stages):
            if number >= start:
                # Where nobody looks for a run directory, what clients keep lives as long as the stage.
                with TemporaryDirectory() as temporary:
                    folder = self.directory.path / "checkpoint" if self.directory else Path(temporary)
                    self._play_stage(number, stage, saved if number == start else None, folder / f"clients-{number}")
        return self._finish()

    def _play_stage(self, number: int, stage: Stage, saved: Any, folder: Path) -> None:
        seed = (self.recipe.seed, number)
        federation = self.federation.pooled() if stage.pools else self.federation
        begin = self._begin(number, stage)
        self.body.load(begin.body)
        needs = self._handed_over(begin, stage)
        changes = isinstance(stage, Rounds) and Plan.of(stage).changes_features
        setting = Setting(
            len(federation.dataset.classes),
            self.body.dim,
            seed,
            federation.n_clients,
            int(federation.sizes.sum()),
            begin.head,
            self.body.backbone,
            self.body.attach(stage, seed),
        )
        method = build(stage, setting)
        validates = isinstance(stage, Rounds) and self.federation.dataset.validation is not None
        if not changes:  # before the clock of the stage starts, and with a progress bar of its own
            for split in ("train", stage.eval_split, *(["validation"] if validates else [])):
                self.body.features(split)
        ledger, state, played, slots = Ledger.open(federation.n_clients), None, 0, None
        metrics: dict[str, Any] = {}
        best: dict[str, Any] = {}  # the round that validation chooses, and what the test says of it
        if saved is not None:
            message, ledger, slots, progress = saved
            state, played = method.thaw(message), progress["round"]
            metrics, best = progress["metrics"], progress["best"]
        store = ClientStore(folder, federation.n_clients, method.kept_shapes, slots)
        rounds, _ = rounds_of(stage, federation.n_clients)

        def after_round(index: int, state: Any) -> None:
            done = index + 1
            if done == rounds or done % stage.evaluate_every == 0:
                head = method.head(state)
                method.place(state)
                found = self._evaluate(head, stage.eval_split, changes)
                metrics.update(found.metrics())
                if validates:
                    metrics["validation_accuracy"] = self._evaluate(head, "validation", changes).accuracy
                    if metrics["validation_accuracy"] > best.get("best_validation_accuracy", -1.0):
                        best["best_validation_accuracy"] = metrics["validation_accuracy"]
                        best["best_accuracy"], best["best_round"] = metrics["accuracy"], done
                ledger.tick()
                costs = {name: round(self.spent[name] + cost, 3) for name, cost in ledger.totals().items()}
                line = {"stage": number, "method": stage.method, "round": done, **metrics, **costs}
                self.evaluations += 1
                if self.directory:
                    self.directory.log(line)
                    if done == rounds:
                        self.directory.write_clients(number, federation.names, ledger, found.client_accuracy)
                self.on_metrics(line)
            if self.directory:
                where = {"stage": number, "round": done, "stages": self.stages, "spent": self.spent}
                where |= {"evaluations": self.evaluations, "metrics": metrics, "best": best}
                self.directory.save_checkpoint(method.freeze(state), ledger, store.slots, where)

        source = self.body.inputs() if changes else self.body.features("train")
        state = play(method, stage, federation, source, seed, ledger, store, after_round, state, played, needs)
        store.discard()
        head = method.head(state)
        handed, version = _Handed(head, begin.body), None
        if isinstance(stage, Rounds) and changes:
            method.place(state)
            handed, version = _Handed(head, number), self.body.keep(number, stage.norm_statistics)
        self.handed.append(handed)
        if self.directory:
            self.directory.save_model(number, head, handed.body, version)
            if method.catches_up:
                self.directory.save_log(number, method.freeze(state))
        published = method.published(state, federation.counts[ledger.forward_passes > 0])
        self.stages.append(
            {
                "method": stage.method,
                "rounds": rounds,
                **metrics,
                **best,
                **ledger.totals(),
                "published_bytes": published.bytes,
                "published_compute": published.forward_passes,
                "published_formula": published.formula,
                "chosen": dict(head.notes),
                "dropped": ledger.dropped,
            }
        )
        self.spent = {name: round(self.spent[name] + cost, 3) for name, cost in ledger.totals().items()}

    def _begin(self, number: int, stage: Stage) -> _Handed:
        """What a stage starts from."""
        if stage.start == "pretrained" or (stage.start == "previous" and number == 0):
            return _Handed(self.body.label_words(), PRETRAINED)
        return self.handed[number - 1 if stage.start == "previous" else stage.start]

    def _handed_over(self, begin: _Handed, stage: Stage) -> int:
        """Bytes of what earlier stages made and this one freezes: a client needs it before its first answer."""
        frozen: dict[str, Any] = {}
        module = self.body.module()
        if begin.body != PRETRAINED and not (isinstance(stage, Rounds) and Plan.of(stage).body == "shared"):
            frozen |= {} if module is None else module[2]
            if module is None or any(getattr(one, "train", "") in ("all", "body") for one in self.recipe.stages):
                frozen |= self.body.arrays()
        elif begin.body != PRETRAINED and isinstance(stage, Rounds) and stage.norm_statistics == "freeze":
            statistics = ("running_mean", "running_var")
            frozen |= {name: array for name, array in self.body.arrays().items() if name.endswith(statistics)}
        if isinstance(stage, Rounds) and stage.train == "body" and stage.head_init == "previous" and begin.head:
            frozen |= begin.head.arrays()
        return Message(frozen).nbytes if frozen else 0

    def _evaluate(self, head: LinearHead, split: str, changes: bool) -> Evaluation:
        test = split == "test"
        labels = getattr(self.federation.dataset, split).labels
        features = self.body.embedded(split) if changes else self.body.features(split)
        owners = self.federation.test_owners if test else None
        return evaluate(head, features, labels, owners, self.federation.counts if test else None)

    def _finish(self) -> Result:
        federation, head = self.federation, self.handed[-1].head
        assert head is not None
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
        if self.directory:
            self.directory.save_final(self.body if self.handed[-1].body != PRETRAINED else None, head)
            report = self.directory.path / "report.html"
            metrics = self.directory.metrics()
            write_report(report, self.recipe, summary, metrics, federation.dataset.classes, federation.counts)
            self.directory.finish(summary)
        return Result(summary, head, federation, self.directory.path if self.directory else None)


def replay(path: Path, out: Path) -> list[str]:
    """Rebuild what a finished run's last FedMeZO stage made, from the weights it started from and its log alone.

    Writes the model to ``out`` and returns the names of its files that differ from those of the run by any bit: none,
    where the run ended with that stage.
    """
    recipe = Recipe.load(path / "recipe.toml")
    directory = RunDirectory.reopen(path, recipe)
    numbers = [number for number, stage in enumerate(recipe.stages) if isinstance(stage, FedMeZOStage)]
    if not numbers:
        raise HeadstartError(f"{path} is no run of fedmezo: there is no log to replay")
    number = numbers[-1]
    stage, log = recipe.stages[number], directory.load_log(number)
    assert isinstance(stage, FedMeZOStage)
    body = Body(recipe.model, None)
    begin = number - 1 if stage.start == "previous" else -1 if stage.start == "pretrained" else stage.start
    head = body.label_words()
    for earlier in range(number):
        found, made_by, version = directory.load_model(earlier)
        if version is not None:
            body.remember(earlier, version)
        if earlier == begin:
            head, loaded = found, made_by
            body.load(loaded)
    made = directory.load_model(number)[0].arrays()
    classes = len(made["weight"])
    dim = body.backbone.dim if body.backbone else made.get("hidden.0.weight", made["weight"]).shape[1]
    seed = (recipe.seed, number)
    method = build(
        stage, Setting(classes, dim, seed, previous=head, backbone=body.backbone, module=body.attach(stage, seed))
    )
    state = method.thaw(log)
    method.place(state)
    rebuilt = RunDirectory(out)
    (out / "model").mkdir(parents=True, exist_ok=True)
    rebuilt.save_final(body if Plan.of(stage).changes_features else None, method.head(state))
    return [
        file.name
        for file in sorted((out / "model").iterdir())
        if not (path / "model" / file.name).is_file() or file.read_bytes() != (path / "model" / file.name).read_bytes()
    ]


def _versions() -> dict[str, str]:
    packages = ("headstart", "torch", "transformers", "datasets", "numpy", "scipy", "scikit-learn")
    return {"python": platform.python_version(), **{name: version(name) for name in packages}}
