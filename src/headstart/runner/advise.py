"""Which head, and which stage after it, for some data, clients and budgets: measured on a sample of the training split.

A part of the sample is held out for choosing, and another one for the figures that are shown; the test split is not
looked at. Every candidate is a real run of a recipe on the features of the sample. Bytes are those of messages that the
methods make for clients with as many classes as the real ones have. Of candidates whose accuracy is within one standard
error of the best, the one that sends least is chosen (the rule of Breiman et al., 1984).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import ceil, sqrt
from typing import Any

import numpy as np

from headstart.channel.accounting import noise_multiplier
from headstart.channel.accounting import spent as epsilon_of
from headstart.channel.channel import channel_of
from headstart.channel.statistics import StatisticsChannel
from headstart.config.recipe import Data, Recipe, dealt_by_columns
from headstart.config.toml import check_text, read_table
from headstart.core.metrics import SHOWN
from headstart.core.progress import progress
from headstart.core.statistics import Features, Ints
from headstart.data import Dataset, Examples, Federation, load_dataset
from headstart.data.examples import held_out
from headstart.engine.model_store import ModelStore
from headstart.errors import HeadstartError
from headstart.methods import Population, StageContext, Task, build
from headstart.records.record import score_of
from headstart.report import human_bytes, score
from headstart.runner.run_recipe import run_federation

CLOSED_FORMS: Mapping[str, Mapping[str, Any]] = {
    "fedncm": {"method": "fedncm"},
    "fedcof": {"method": "fedcof"},
    **{f"fedcof, rank {rank}": {"method": "fedcof", "rank": rank} for rank in (4, 16, 64)},
    "fed3r": {"method": "fed3r"},
}
"""From the fewest bytes to the most: directions take FedCOF from FedNCM's to Fed3R's."""
BACKBONES = {"features": "features", "image": "efficientnet-lite0", "text": "all-MiniLM-L6-v2"}
_EXAMPLES = {"features": 20_000, "image": 2_000, "text": 2_000}
_FEWEST = 40  # of which 6 are held out for choosing and 6 for the figures
_ROUNDS, _PER_ROUND, _RATES = 30, 10, (0.01, 0.1, 1.0)


@dataclass(frozen=True)
class Candidate:
    """A head, or a head and a stage after it: what it was measured to be worth, and what it would cost."""

    name: str
    stages: tuple[Mapping[str, Any], ...] = ()
    chosen_by: float | None = None
    """Its score on the part of the sample that is for choosing."""
    metrics: Mapping[str, Any] = field(default_factory=dict)
    """On the part that is for showing."""
    per_client: int | None = None
    """Most bytes that one client sends."""
    bytes_up: int | None = None
    """Bytes that all clients send."""
    passes: int | None = None
    """Forward passes of all clients."""
    why_not: str = ""


@dataclass(frozen=True)
class Advice:
    """Candidates, the one that is advised, and the recipe of it."""

    candidates: tuple[Candidate, ...]
    chosen: Candidate
    recipe: Mapping[str, Any]
    error: float
    """One standard error of the best score, which is a share of right answers."""
    notes: tuple[str, ...]
    """What was assumed, and what is not known."""

    @property
    def columns(self) -> list[str]:
        """What is in each column of `rows`: metrics beside the first one are those that some candidate has."""
        beside = [_BESIDE[name] for name in self._beside]
        return ["candidate", "held out", *beside, "a client sends", "all clients send", "forward passes", "why"]

    @property
    def _beside(self) -> list[str]:
        return [name for name in _BESIDE if any(each.metrics.get(name) is not None for each in self.candidates)]

    def rows(self) -> Iterator[list[str]]:
        """Each candidate as a row under `columns`."""
        for each in self.candidates:
            known = each.metrics
            yield [
                each.name,
                score(known) if known else "not measured",
                *(_cell(name, known.get(name)) for name in self._beside),
                "" if each.per_client is None else human_bytes(each.per_client),
                "" if each.bytes_up is None else human_bytes(each.bytes_up),
                "" if each.passes is None else f"{each.passes:,}",
                self._reason(each),
            ]

    def _reason(self, each: Candidate) -> str:
        """Why a candidate is advised, or is not."""
        if each.why_not:
            return each.why_not
        best = max(c.chosen_by for c in self.candidates if c.chosen_by is not None and not c.why_not)
        assert each.chosen_by is not None
        if each is self.chosen:
            return "advised: " + ("the best" if each.chosen_by == best else "sends least, within one error of the best")
        if each.chosen_by < best - self.error:
            return "more than one error below the best"
        return "no better than one error, and sends more"


_BESIDE = {
    "mae": "mean absolute error", "macro_f1": "macro-F1", "balanced_accuracy": "balanced", "roc_auc": "ROC AUC",
    "average_precision": "average precision", "calibration_error": "calibration error",
    "local_accuracy_worst_tenth": "lowest tenth",
}  # fmt: skip
_NO_SHARES = ("mae", "roc_auc", "average_precision", "calibration_error")


def _cell(name: str, value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.4g}" if name in _NO_SHARES else f"{100 * value:.2f} %"


def advise(
    source: str,
    clients: int | None = None,
    most_bytes: float | None = None,
    epsilon: float | None = None,
    examples: int | None = None,
) -> Advice:
    """Advice for a recipe (a .toml file) or for data, as `[data] dataset` names them.

    clients: how many, where the data do not say; most_bytes: that one client may send; epsilon: of any one example, at
    δ = 1e-5; examples: of the sample.
    """
    table, notes = _table_of(source, clients)
    recipe = Recipe.parse({**table, "stages": [{"method": "fed3r"}]})
    if recipe.data is None:
        raise HeadstartError(f"{source} has several tasks; advise is for one: give a recipe with [data]")
    federation = Federation.of(recipe)
    bench = _Bench(recipe, federation, examples, epsilon)
    notes += bench.notes
    names = ["fed3r"]
    if federation.dataset.target == "classes":  # as many directions as dimensions are what Fed3R sends
        names = [name for name, stage in CLOSED_FORMS.items() if stage.get("rank", 0) < bench.features.shape[1]]
    found = []
    with progress("measuring", len(names) + len(_RATES)) as advance:
        for name in names:
            found.append(_affordable(bench.closed_form(name), most_bytes))
            advance(1)
        able = [each for each in found if not each.why_not]
        if not able:
            raise HeadstartError(_nothing_fits(found, most_bytes))
        best = max(able, key=lambda each: each.chosen_by or 0.0)
        if federation.dataset.target == "classes":
            found += [_affordable(each, most_bytes) for each in bench.after(best, most_bytes, lambda: advance(1))]
    able = [each for each in found if not each.why_not]
    best = max(able, key=lambda each: each.chosen_by or 0.0)
    error = bench.error(best)
    near = [each for each in able if (each.chosen_by or 0.0) >= (best.chosen_by or 0.0) - error]
    chosen = min(near, key=lambda each: (each.bytes_up or 0, -(each.chosen_by or 0.0)))
    advised = {"name": "advised", **table, "stages": [dict(stage) for stage in chosen.stages]}
    return Advice(tuple(found), chosen, advised, error, tuple(notes))


def _table_of(source: str, clients: int | None) -> tuple[dict[str, Any], list[str]]:
    """Data, model and seed of a recipe or of a data set, and what had to be assumed."""
    if source.endswith(".toml"):
        table = {key: value for key, value in read_table(source).items() if key != "stages"}
        data = table.get("data")
        if clients is not None and isinstance(data, dict):
            given = dealt_by_columns(data).get("partition", {"kind": "dirichlet"})
            table["data"] = {**data, "partition": {**given, "clients": clients}}
        return table, []
    if not source:
        raise HeadstartError("which data? give a file, a folder, or the name of a data set")
    check_text(source)
    dataset = load_dataset(Data(dataset=source))
    backbone = BACKBONES[dataset.kind]
    notes = [] if backbone == "features" else [f"the backbone is assumed to be {backbone}; a recipe can name another"]
    more = {} if clients is None else {"clients": clients}
    if dataset.clients:
        how: dict[str, Any] = {"kind": "natural", **more}
    elif dataset.domains and clients is None:
        how = {"kind": "domains"}
    else:
        how = {"kind": "dirichlet", "alpha": 0.1} if dataset.target == "classes" else {"kind": "iid"}
        how["clients"] = min(clients or 100, len(dataset.train))
        share = "by Dirichlet(0.1) shares of the classes" if dataset.target == "classes" else "evenly"
        notes.append(
            f"who holds which example is not known: {how['clients']} clients that hold them {share} are assumed; a "
            "recipe with [data.partition] can say otherwise"
        )
    return {"data": {"dataset": source, "partition": how}, "model": {"backbone": backbone}}, notes


class _Bench:
    """Features of a sample, and runs on them."""

    def __init__(self, recipe: Recipe, federation: Federation, examples: int | None, epsilon: float | None) -> None:
        self.recipe, self.whole, self.epsilon = recipe, federation, epsilon
        dataset = federation.dataset
        rng = np.random.default_rng([0xAD71CE, recipe.seed])
        held = np.flatnonzero(federation.owners >= 0)
        count = min(len(held), examples or _EXAMPLES[dataset.kind])
        if count < _FEWEST:
            raise HeadstartError(f"{count} training examples are too few to hold any out; {_FEWEST} are the fewest")
        rows = np.sort(rng.permutation(held)[:count])
        sample = dataset.train.take(rows)
        store = ModelStore(recipe.model, replace(dataset, train=sample))
        self.features, self.store = store.features("train"), store
        self.federation = _held_out(dataset, sample, self.features, federation.owners[rows], rng)
        self.examples = int(federation.sizes.sum())
        learned, chosen, shown = (len(part) for part in self._splits)
        self.share = learned / self.examples
        self.notes = [
            f"measured on {count:,} of {self.examples:,} training examples: {learned:,} to learn from, {chosen:,} to "
            f"choose by, {shown:,} for the figures; with all of them accuracy may be higher, and the order another"
        ]
        if epsilon is not None:
            self.notes.append(
                "the noise is the server's, which sees exact sums; with secure = true and privacy.noise = 'shared' it "
                "does not, for fedncm and fed3r"
            )

    @property
    def _splits(self) -> tuple[Examples, Examples, Examples]:
        dataset = self.federation.dataset
        assert dataset.validation is not None
        return dataset.train, dataset.validation, dataset.test

    def error(self, best: Candidate) -> float:
        """One standard error of the best score, of so many examples."""
        score = min(max(best.chosen_by or 0.0, 0.0), 1.0)
        return sqrt(score * (1 - score) / len(self._splits[1]))

    def _run(self, *stages: Mapping[str, Any]) -> list[dict[str, Any]]:
        table = {"seed": self.recipe.seed, "data": {"dataset": "sample", "partition": {"kind": "iid"}}}
        recipe = Recipe.parse({**table, "model": {"backbone": "features"}, "stages": [dict(each) for each in stages]})
        summaries: list[dict[str, Any]] = run_federation(recipe, self.federation).summary["stages"]
        return summaries

    def closed_form(self, name: str) -> Candidate:
        """A closed form on the sample, its noise as large beside it as it would be beside everything."""
        stage = dict(CLOSED_FORMS[name])
        measured = dict(stage)
        if self.epsilon is not None:
            stage["privacy"] = {"epsilon": self.epsilon}
            multiplier = self.share * noise_multiplier(self.epsilon, 1e-5)
            measured["privacy"] = {"epsilon": epsilon_of(multiplier, 1e-5)}
        try:
            shown, chosen = self._run(measured, {**measured, "eval_split": "validation"})
        except HeadstartError as error:
            return Candidate(name, why_not=f"not possible: {error}")
        per_client = self._messages(stage)
        return Candidate(
            name, (stage,), score_of(chosen), {name: shown[name] for name in SHOWN if name in shown},
            int(per_client.max()), int(per_client.sum()), self.examples,
        )  # fmt: skip

    def _messages(self, stage: Mapping[str, Any]) -> Ints:
        """Bytes [K] of what each real client would send in a closed form, by its classes and examples."""
        settings = Recipe.parse({**_ANY, "stages": [stage]}).stages[0]
        dim, names, count = self.features.shape[1], self.whole.dataset.classes, self.whole.n_clients
        task = Task("default", len(names), Population(count, self.examples), target=self.whole.dataset.target)
        context = StageContext((task,), dim, (0, 0), settings.plan)
        method = build(settings, context)
        channel = channel_of(settings, method, (0, 0), {"default": count}, context.noise_seed)
        assert isinstance(channel, StatisticsChannel)
        classes = np.count_nonzero(self.whole.counts, axis=1)
        rows = np.full(count, channel.summary.n_classes) if channel.private else classes
        return channel.nbytes(np.minimum(rows, channel.summary.n_classes), self.whole.sizes)

    def after(self, head: Candidate, most_bytes: float | None, advance: Any) -> Iterator[Candidate]:
        """Stages after a head: linear probing, measured, and training of the backbone, whose cost alone is known."""
        name = f"{head.name} → fedavg, head"
        if self.epsilon is not None:
            yield Candidate(name, why_not="not measured: privacy of training hides clients, and ε here is of examples")
            return
        message = 4 * (self.features.shape[1] + 1) * len(self.whole.dataset.classes)  # at least: a head in float32
        left = None if most_bytes is None else (most_bytes - (head.per_client or 0)) / message
        rounds = _ROUNDS if left is None else min(_ROUNDS, int(left / 1.1))
        if rounds < 1:
            yield Candidate(name, why_not=f"a round sends {human_bytes(message)} of a client, more than is left")
        else:
            yield self._probe(head, name, rounds, advance)
        if self.store.backbone is not None:
            size = sum(array.nbytes for array in self.store.arrays().values())
            why = f"not measured: every round sends the whole backbone, {human_bytes(size)} of a client, and takes a "
            yield Candidate(f"{head.name} → fedadam, all", why_not=why + "step through it for every example")

    def _probe(self, head: Candidate, name: str, rounds: int, advance: Any) -> Candidate:
        """Linear probing from a head, with the learning rate that is best for choosing."""
        clients, found = self.whole.n_clients, []
        for rate in _RATES:
            sampled = min(_PER_ROUND, self.federation.n_clients)
            stage: dict[str, Any] = {"method": "fedavg", "train": "head", "rounds": rounds, "lr": rate}
            stage |= {"clients_per_round": sampled, "evaluate_every": rounds}
            *_, last = self._run(*head.stages, stage)
            found.append((last["validation_accuracy"], last, stage))
            advance()
        chosen, shown, stage = max(found, key=lambda each: float(each[0]))
        stage = {**stage, "clients_per_round": min(_PER_ROUND, clients)}
        asked = rounds * int(stage["clients_per_round"])
        message = ceil(shown["bytes_up"] / (rounds * sampled))
        return Candidate(
            name, (*head.stages, stage), chosen, {name: shown[name] for name in SHOWN if name in shown},
            (head.per_client or 0) + rounds * message, (head.bytes_up or 0) + asked * message,
            (head.passes or 0) + round(asked * self.examples / clients),
        )  # fmt: skip


_ANY = {"data": {"dataset": "digits"}, "model": {"backbone": "features"}}


def _held_out(
    dataset: Dataset, sample: Examples, features: Features, owners: Ints, rng: np.random.Generator
) -> Federation:
    """The sample as features, 15 % of every class to choose by and as many for the figures, at its clients."""
    apart = held_out(sample.labels, 0.3, rng)
    half = held_out(sample.labels[apart], 0.5, rng)
    out = np.flatnonzero(apart)
    whole = replace(sample, kind="features", source=features, columns=(), rows=np.arange(len(features)))
    parts = [np.flatnonzero(~apart), out[half], out[~half]]
    present, mine = np.unique(owners[parts[0]], return_inverse=True)
    number = np.full(owners.max() + 1, -1)
    number[present] = np.arange(len(present))
    train, validation, test = (whole.take(part) for part in parts)
    if not len(validation) or not len(test):
        raise HeadstartError("the classes have too few examples for any to be held out; give more examples")
    names = tuple(f"client-{client}" for client in present)
    made = replace(dataset, train=train, validation=validation, test=test)
    return Federation(made, mine.astype(np.int64), number[owners[parts[2]]], names)


def _affordable(each: Candidate, most_bytes: float | None) -> Candidate:
    """The candidate, refused where a client would send more than it may."""
    if each.why_not or most_bytes is None or each.per_client is None or each.per_client <= most_bytes:
        return each
    return replace(each, why_not=f"sends more than {human_bytes(most_bytes)}")


def _nothing_fits(found: Sequence[Candidate], most_bytes: float | None) -> str:
    """Why there is nothing to advise."""
    sizes = [(each.per_client, each.name) for each in found if each.per_client is not None]
    if most_bytes is not None and sizes:
        least, name = min(sizes)
        return f"--bytes {most_bytes:g}: nothing fits; {name} sends least, {least} bytes of a client: raise it to that"
    return "no head can be computed: " + "; ".join(f"{each.name}: {each.why_not}" for each in found)
