"""A recipe from its data to its report."""

from __future__ import annotations

import platform
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from headstart.data import Dataset, Federation
from headstart.engine import ClientStore, Finished, RunDirectory, play, rounds_of
from headstart.errors import HeadstartError
from headstart.evaluation import Evaluation, evaluate
from headstart.heads import LinearHead
from headstart.ledger import Ledger, peak_memory
from headstart.methods import Setting, build
from headstart.recipe import Recipe, Stage, Training
from headstart.report import write_report
from headstart.statistics import Features
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
    directory = None
    if path is not None:
        directory = RunDirectory.reopen(path, recipe) if resume else RunDirectory.create(path, recipe)
    try:
        features = features_of(recipe, federation.dataset)
        return _Run(recipe, federation, features, directory, on_metrics or (lambda line: None)).play()
    except BaseException:
        if directory is not None and not resume and not directory.metrics():
            directory.discard()
        raise


def features_of(recipe: Recipe, dataset: Dataset) -> dict[str, Features]:
    """Features [n, d] of every split the recipe needs: from the cache, or one pass through the frozen body."""
    needed = {"train", *(stage.eval_split for stage in recipe.stages)}
    if dataset.validation is not None and any(isinstance(stage, Training) for stage in recipe.stages):
        needed.add("validation")  # chooses the best round
    splits = {split: getattr(dataset, split) for split in ("train", "validation", "test") if split in needed}
    if (dataset.kind == "features") != (recipe.model.backbone == "features"):
        kind = "already features" if dataset.kind == "features" else f"{dataset.kind}s, not features"
        fix = '"features"' if dataset.kind == "features" else "a backbone that reads them (see headstart backbones)"
        raise HeadstartError(f"model.backbone: the data of {dataset.name} are {kind}; set it to {fix}")
    if dataset.kind == "features":
        return {split: examples.features() for split, examples in splits.items()}
    from headstart.backbones import extract, load_backbone  # torch is not needed where the data are features

    backbone = load_backbone(recipe.model)
    return {split: extract(backbone, examples, f"{dataset.name} {split}") for split, examples in splits.items()}


class _Run:
    """The stages of one run, with their costs and checkpoints."""

    def __init__(
        self,
        recipe: Recipe,
        federation: Federation,
        features: dict[str, Features],
        directory: RunDirectory | None,
        on_metrics: Callable[[dict[str, Any]], object],
    ) -> None:
        self.recipe, self.federation, self.features, self.directory = recipe, federation, features, directory
        self.on_metrics = on_metrics
        self.stages: list[dict[str, Any]] = []
        self.spent: dict[str, float] = dict.fromkeys(COSTS, 0)
        self.evaluations = 0
        self.head: LinearHead | None = None

    def play(self) -> Result:
        saved = self.directory.load_checkpoint() if self.directory else None
        start = 0
        if saved is not None:
            progress = saved[3]
            start, self.stages, self.evaluations = progress["stage"], progress["stages"], progress["evaluations"]
            self.spent = progress["spent"]
        for number, stage in enumerate(self.recipe.stages):
            if number >= start:
                # Where nobody looks for a run directory, what clients keep lives as long as the stage.
                with TemporaryDirectory() as temporary:
                    folder = self.directory.path / "checkpoint" if self.directory else Path(temporary)
                    self._play_stage(number, stage, saved if number == start else None, folder / f"clients-{number}")
        return self._finish()

    def _play_stage(self, number: int, stage: Stage, saved: Any, folder: Path) -> None:
        seed, federation = (self.recipe.seed, number), self.federation
        setting = Setting(
            len(federation.dataset.classes),
            self.features["train"].shape[1],
            seed,
            federation.n_clients,
            int(federation.sizes.sum()),
            self.head,
        )
        method = build(stage, setting)
        ledger, state, played = Ledger.open(federation.n_clients), None, 0
        store = ClientStore(folder, federation.n_clients, method.kept_shapes, fresh=saved is None)
        metrics: dict[str, Any] = {}
        best: dict[str, Any] = {}  # the round that validation chooses, and what the test says of it
        if saved is not None:
            message, ledger, kept, progress = saved
            state, played = method.thaw(message), progress["round"]
            metrics, best = progress["metrics"], progress["best"]
            store.write(progress["kept_by"], kept.arrays)  # the crash may have come before it was written
        rounds, _ = rounds_of(stage, federation.n_clients)
        self.head = None

        def after_round(finished: Finished) -> None:
            done = finished.number + 1
            if done == rounds or done % stage.evaluate_every == 0:
                self.head = method.head(finished.state)
                metrics.update(self._evaluate(self.head, stage.eval_split).metrics())
                if isinstance(stage, Training) and "validation" in self.features:
                    metrics["validation_accuracy"] = self._evaluate(self.head, "validation").accuracy
                    if metrics["validation_accuracy"] > best.get("best_validation_accuracy", -1.0):
                        best["best_validation_accuracy"] = metrics["validation_accuracy"]
                        best["best_accuracy"], best["best_round"] = metrics["accuracy"], done
                ledger.tick()
                costs = {name: round(self.spent[name] + cost, 3) for name, cost in ledger.totals().items()}
                line = {"stage": number, "method": stage.method, "round": done, **metrics, **costs}
                self.evaluations += 1
                if self.directory:
                    self.directory.log(line)
                self.on_metrics(line)
            if self.directory:
                where = {"stage": number, "round": done, "stages": self.stages, "spent": self.spent}
                where |= {"evaluations": self.evaluations, "metrics": metrics, "best": best}
                where["kept_by"] = finished.clients.tolist()
                self.directory.save_checkpoint(method.freeze(finished.state), ledger, Message(finished.kept), where)

        state = play(method, stage, federation, self.features["train"], seed, ledger, store, after_round, state, played)
        store.discard()
        if self.head is None:  # a finished stage, resumed
            self.head = method.head(state)
        published = method.published(state, self.federation.counts[ledger.forward_passes > 0])
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
                "chosen": dict(self.head.notes),
                "dropped": ledger.dropped,
            }
        )
        self.spent = {name: round(self.spent[name] + cost, 3) for name, cost in ledger.totals().items()}

    def _evaluate(self, head: LinearHead, split: str) -> Evaluation:
        owners = self.federation.test_owners if split == "test" else None
        labels = getattr(self.federation.dataset, split).labels
        return evaluate(head, self.features[split], labels, owners, self.federation.n_clients)

    def _finish(self) -> Result:
        assert self.head is not None
        federation = self.federation
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
            self.head.save(self.directory.path / "model" / "head.safetensors")
            report = self.directory.path / "report.html"
            metrics = self.directory.metrics()
            write_report(report, self.recipe, summary, metrics, federation.dataset.classes, federation.counts)
            self.directory.finish(summary)
        return Result(summary, self.head, federation, self.directory.path if self.directory else None)


def _versions() -> dict[str, str]:
    packages = ("headstart", "torch", "transformers", "datasets", "numpy", "scipy", "scikit-learn")
    return {"python": platform.python_version(), **{name: version(name) for name in packages}}
