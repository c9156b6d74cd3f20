"""What is noted after each round: who participated, how good the model is, what it has cost, a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from headstart.core.message import Message
from headstart.core.metrics import goodness, primary_metric
from headstart.core.state import pack, unpack
from headstart.core.texts import exact_match, rouge_l
from headstart.data import Examples
from headstart.methods.personalise import PersonaliseStage
from headstart.records import Checkpoint, StageCheckpoint
from headstart.runner.evaluation import Evaluation, similarity
from headstart.runner.evaluators import sampled

if TYPE_CHECKING:
    from headstart.runner.run_stage import StageRun


@dataclass
class StageRecord:
    """What is known of a stage so far."""

    done: int = 0
    """Rounds that have been played."""
    metrics: dict[str, Any] = field(default_factory=dict)
    best: dict[str, Any] = field(default_factory=dict)
    """The round that validation chooses, and what the evaluated split says of it."""


class Observers:
    """What looks on after every round, one after the other."""

    def __init__(self, stage: StageRun) -> None:
        self.stage, self.record, self.settings = stage, stage.record, stage.settings
        self.directory = stage.run.directory

    def __call__(self, index: int, state: Any) -> bool:
        """After the round with this number, from 0, or before the first; returns whether it is the last."""
        self.record.done = index + 1
        self.write_round(state)
        if self.stage.noises_totals and self._is_evaluated:
            # The noise is part of the state. A round that was played again after somebody saw the model could have
            # another total, and would be one more release than was accounted for.
            self.save(state, evaluated=False)
        return self.finish_round(state)

    def finish_round(self, state: Any) -> bool:
        """The evaluation of a round, and the checkpoint after it; returns whether it is the last."""
        self.evaluate(state)
        self.write_metrics(state)
        self.save(state)
        return self._is_last

    @property
    def _is_evaluated(self) -> bool:
        return self.record.done == self.stage.rounds or self.record.done % self.settings.evaluate_every == 0

    @property
    def _is_last(self) -> bool:
        return self.record.done == self.stage.rounds or self.out_of_patience

    @property
    def out_of_patience(self) -> bool:
        """Whether validation has not improved for too long."""
        patience = self.settings.patience
        return patience is not None and self.record.best.get("evaluations_since_best", 0) >= patience

    def write_round(self, state: Any) -> None:
        """Who was asked, and what each moved."""
        if self.record.done:
            ledger, names = self.stage.ledger, self.stage.federation.names
            self.directory.log_round(self.stage.number, self.record.done, names, ledger)

    def write_metrics(self, state: Any) -> None:
        """A line of `metrics.jsonl`, with the costs of the run so far."""
        if not self._is_evaluated:
            return
        run, stage = self.stage.run, self.stage
        stage.ledger.tick()
        costs = {name: round(run.spent[name] + cost, 3) for name, cost in stage.ledger.totals().items()}
        about = {"stage": stage.number, "method": self.settings.method, "round": self.record.done}
        line = {**about, **self.record.metrics, **costs, **stage.privacy()}
        run.evaluations += 1
        self.directory.log(line)
        run.tell(line)

    # ------------------------------------------------------------------------------------------------------ evaluation

    def evaluate(self, state: Any) -> None:
        """How good the model is, every so many rounds and after the last one."""
        if not self._is_evaluated:
            return
        found = self._measure(state)
        if found.perplexity is not None and found.nbytes is None:  # it is here, and so are the prompts
            self._sample(state)
        if self.stage.validates:
            self._validate(state)
        if self._is_last:
            self._conclude(state, found)

    def _measure(self, state: Any) -> Evaluation:
        """On the split of the stage."""
        settings, metrics, evaluator = self.settings, self.record.metrics, self.stage.evaluator
        found, by_task = evaluator(state, settings.eval_split)
        metrics.update(found.metrics())
        for name, count in zip(("test_bytes_up", "test_bytes_down"), found.nbytes or (), strict=False):
            metrics[name] = metrics.get(name, 0) + count
        if len(by_task) > 1:
            metrics["tasks"] = {name: part.metrics() for name, part in by_task.items()}
        if settings.personalises:
            metrics.update(
                evaluator.personalised(cast(PersonaliseStage, settings), state, self.record.done, found, metrics)
            )
        return found

    def _sample(self, state: Any) -> None:
        """What the model of a state completes some test prompts of each task with: at first and at the end; not where
        every client has its own."""
        metrics, stage, recipe = self.record.metrics, self.stage, self.stage.run.recipe.model
        for name in ("exact_match", "rouge_l"):
            metrics.pop(name, None)
        if stage.method.personal or not recipe.samples or not (self._is_last or not self.record.done):
            return
        federation, split, method = stage.run.federation, self.settings.eval_split, stage.method
        examples: Examples = getattr(federation.dataset, split)
        found, several = [], len(federation.tasks) > 1
        for task, name in enumerate(federation.tasks):
            method.load(method.model(state, task), task)
            some = examples.take(federation.examples_of(task, split)[: recipe.samples])
            rows = sampled(stage.run.store, some, recipe.max_new_tokens)
            found.append({"exact_match": _mean(exact_match, rows), "rouge_l": _mean(rouge_l, rows)})
            self.directory.write_samples(stage.number, self.record.done, rows, name if several else None)
            if several:
                metrics["tasks"][name] |= found[-1]
        metrics.update({name: sum(each[name] for each in found) / len(found) for name in found[0]})

    def _validate(self, state: Any) -> None:
        """Whether this is the best round so far, on the validation split."""
        metrics, best, done = self.record.metrics, self.record.best, self.record.done
        found = self.stage.evaluator(state, "validation")[0].metrics()
        what = primary_metric(found)
        metrics[f"validation_{what}"] = chosen = found[what]
        if chosen is None:  # nobody may test
            return
        if "best_round" not in best or goodness(what, chosen) > goodness(what, best[f"best_validation_{what}"]):
            best[f"best_validation_{what}"] = chosen
            best[f"best_{what}"], best["best_round"] = metrics[what], done
            best["evaluations_since_best"] = 0
            if self.settings.keep == "best":
                self.directory.save_best(self.stage.number, done, pack(state))
        else:
            best["evaluations_since_best"] += 1

    def _conclude(self, state: Any, found: Evaluation) -> None:
        """What is noted of the model that the stage ends with, clients and confusion included."""
        stage = self.stage
        if stage.before is not None:
            similar = similarity(stage.before, stage.evaluator.features(state, self.settings.eval_split))
            self.record.metrics["feature_similarity"] = similar
        more = {} if self.directory.path is None else {"train_examples": self._sizes(), **found.by_client()}
        what, each = "accuracy", found.client_accuracy
        target = stage.federation.dataset.target
        if found.perplexity is not None:
            what, each = "perplexity", found.client_perplexity
        elif target == "regression":
            what, each = "r2", more.get("r2")
        self.directory.write_clients(stage.number, stage.federation.names, stage.ledger, each, what, more, target)
        if found.predictions is not None:
            self.directory.write_confusion(stage.number, stage.run.federation.dataset.classes, *found.predictions)

    def _sizes(self) -> Any:
        """Training examples [K] of every client; not where noise is to hide them."""
        privacy = self.settings.privacy
        hidden = privacy is not None and privacy.from_server
        return np.full(self.stage.federation.n_clients, np.nan) if hidden else self.stage.federation.sizes

    # ----------------------------------------------------------------------------------------------------- checkpoints

    def save(self, state: Any, evaluated: bool = True) -> None:
        """A checkpoint to go on from; the states of rounds that it no longer names are removed after it."""
        stage, record = self.stage, self.record
        about = {"metrics": record.metrics, "best": record.best, "evaluated": evaluated}
        where = stage.run.progress(stage.number, record.done) | about
        flights = stage.server.under_way
        under_way = Message() if flights is None else pack(flights)
        saved = StageCheckpoint(pack(state), stage.ledger, stage.states.slots, under_way)
        # With privacy it holds what the noise hides; or the statistics of each client.
        hidden = self.settings.privacy is not None or self.settings.keep_statistics
        self.directory.save_checkpoint(Checkpoint(where, saved), private=hidden)
        if self.settings.keep == "best":
            self.directory.collect_best(stage.number, record.best.get("best_round"))

    def kept(self, state: Any) -> Any:
        """The state that the stage ends with: the last one, or that of the best round, evaluated anew."""
        best = self.record.best
        if self.settings.keep == "last" or best.get("best_round", self.record.done) == self.record.done:
            return state
        saved = self.directory.load_best(self.stage.number, best["best_round"])
        state = unpack(self.stage.method.state_type, saved)
        found = self._measure(state)
        chosen = {name: value for name, value in best.items() if name.startswith("best_validation_")}
        self.record.metrics |= {name.removeprefix("best_"): value for name, value in chosen.items()}
        self._conclude(state, found)
        return state


def _mean(score: Callable[[str, str], float], rows: Sequence[tuple[str, str, str]]) -> float:
    """Of the scores of completions against those that were meant."""
    return sum(score(completion, meant) for _, meant, completion in rows) / len(rows)
