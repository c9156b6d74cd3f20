"""How good a model is: on a whole split, and at each client; the same for all clients, or each client's own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt
from scipy.special import log_softmax

from headstart.core.metrics import (
    Metrics,
    Tally,
    added,
    class_metrics,
    ranking_metrics,
    spread,
    tally_classes,
    tally_targets,
    target_metrics,
)
from headstart.core.progress import progress
from headstart.core.statistics import Features, Floats, Ints, summarise
from headstart.core.target import Target
from headstart.data import Examples, Federation
from headstart.engine.client_states import ClientStates
from headstart.engine.model_store import ModelStore
from headstart.heads import LinearHead
from headstart.heads.ncm import ncm_head
from headstart.methods import Method
from headstart.methods.personalise import PersonaliseStage
from headstart.runner.client_metrics import (
    ClientMetrics,
    of_classes,
    of_owners,
    of_tallies,
    of_target_owners,
    of_target_tallies,
)

if TYPE_CHECKING:  # Flower takes seconds to load
    from headstart.engine.flower import FlowerClients

Scorer = Callable[[Ints], npt.NDArray[np.float32]]
"""Scores [n, C] of a split's examples at these positions."""


@dataclass(frozen=True, eq=False)
class Evaluation:
    """Accuracy between 0 and 1, None where no one tests; mean cross-entropy over examples of classes that the head
    knows."""

    accuracy: float | None
    loss: float | None
    client_accuracy: npt.NDArray[np.float64] | None = None
    """[K], NaN for a client without test examples of its classes."""
    answers: tuple[Ints, Ints] | None = None
    """Labels [n] and what the model takes each example for [n], where both are known here."""
    more: Mapping[str, float | None] = field(default_factory=lambda: class_metrics({}))
    """The other metrics of the model by their names, None where they are not known."""
    nbytes: tuple[int, int] | None = None
    """Bytes up and down, where nodes were asked."""
    perplexity: float | None = None
    """Of a model that generates: exp of the loss of a completion's token, over all tokens of all completions."""
    client_perplexity: npt.NDArray[np.float64] | None = None
    """[K], NaN for a client without test examples of its own."""
    by_client: Callable[[], ClientMetrics] = dict
    """Computes the other metrics of every client, where there are any."""
    examples: int | None = None
    """That were tested, where that is known."""

    def metrics(self) -> Metrics:
        """All of them under their names."""
        figures: Metrics = {"accuracy": self.accuracy, "loss": self.loss, **self.more}
        if self.examples is not None:
            figures["test_examples"] = self.examples
        if self.client_accuracy is not None:
            figures |= spread("local_accuracy", self.client_accuracy)
        if self.perplexity is not None:
            figures["perplexity"] = self.perplexity
        if self.client_perplexity is not None:
            figures |= spread("local_perplexity", self.client_perplexity)
        return figures


def evaluate(
    head: LinearHead, features: Features, labels: Ints, owners: Ints | None = None, counts: Ints | None = None
) -> Evaluation:
    """Evaluate a head on features [n, d] with labels [n]; counts: [K, C] training examples adds the clients' accuracy.

    A client's accuracy is that on its own test examples where ``owners`` [n] says whose they are. Where clients share
    the test split, it is the accuracy on each class, weighted by the client's training examples of it.
    """
    scores = head.scores(features)
    answers, losses = _judged(scores, labels)
    right, by_client = answers == labels, None
    each: Callable[[], ClientMetrics] = dict
    if counts is not None and owners is not None:
        by_client = _rates(right, owners, len(counts))
        each = partial(of_owners, scores, labels, owners, len(counts))
    elif counts is not None:
        by_client = _weighted(_rates(right, labels, counts.shape[1]), counts)
        each = partial(of_classes, scores, labels, counts)
    more, asked = class_metrics(tally_classes(scores, labels)), (labels, answers)
    return Evaluation(float(right.mean()), _mean(losses), by_client, asked, more, by_client=each, examples=len(labels))


def evaluate_targets(
    head: LinearHead,
    features: Features,
    targets: Floats,
    kind: Target,
    owners: Ints | None = None,
    clients: int = 0,
) -> Evaluation:
    """Evaluate a head on features [n, d] with targets [n, q] that are no classes; of labels, the accuracy is the share
    of examples with every label right, and the loss is the squared error of the share of each.

    owners: [n] whose the examples are, where that is known, of so many clients.
    """
    scores = head.scores(features)
    if not np.isfinite(scores).all():  # no client has replied yet
        return Evaluation(None, None, more=target_metrics({}, kind))
    tally = tally_targets(scores, targets, kind)
    examples, right, _, loss = tally["figures"]
    ranking = ranking_metrics(scores, targets) if kind == "multilabel" else {}
    accuracy = None if kind == "regression" else float(right / examples)
    more = {**target_metrics(tally, kind), **ranking}
    each = {} if owners is None else of_target_owners(scores, targets, owners, clients, kind)
    return Evaluation(
        accuracy, float(loss / examples), each.get("accuracy"), more=more, by_client=lambda: each, examples=len(targets)
    )


def evaluate_completions(features: Features, owners: Ints | None, clients: int) -> Evaluation:
    """Evaluate losses and numbers of tokens [n, 2] of completions; owners: [n] whose they are, where that is known."""
    losses, tokens = features.astype(np.float64).T
    loss, by_client = float(losses.sum() / tokens.sum()), None
    if owners is not None:
        mine = owners >= 0
        sums = [np.bincount(owners[mine], each[mine], clients) for each in (losses, tokens)]
        with np.errstate(invalid="ignore"):
            by_client = np.exp(sums[0] / np.where(sums[1] > 0, sums[1], np.nan))
    return Evaluation(None, loss, perplexity=float(np.exp(loss)), client_perplexity=by_client)


def sampled(store: ModelStore, examples: Examples, max_new_tokens: int) -> list[tuple[str, str, str]]:
    """Of each example: the prompt, the completion in the data, and the model's own as it is now, greedy."""
    from headstart.backbones.completions import CompletionTransform, Sampling, complete

    backbone, found = store.backbone, []
    assert backbone is not None
    assert isinstance(backbone.transform, CompletionTransform)
    with progress("completing test prompts", len(examples)) as advance:
        for number, value in enumerate(examples.raw(0, len(examples))):
            shown, prompt, meant = backbone.transform.parts(value, f"test example {number}")
            found.append((shown, meant, complete(backbone, prompt, Sampling(max_new_tokens)).strip()))
            advance(1)
    return found


def evaluate_each(scorers: Iterable[Scorer], labels: Ints, owners: Ints | None, counts: Ints) -> Evaluation:
    """Evaluate a model for each client, on its own examples or, where the split is shared, on those of its classes.

    The accuracy is the share of right answers over all clients; where the split is shared, clients count by their
    training examples: each answer of a client on a class by its examples of it, over those of the split.
    """
    by_client, right_answers, losses = np.full(len(counts), np.nan), [], []
    asked, answered, tallies = [], [], []
    alone: list[Tally | None] = [None] * len(counts)
    everything, tested = np.zeros((len(labels), counts.shape[1]), np.float32), np.full(len(labels), -1)
    share = counts / np.maximum(np.bincount(labels, minlength=counts.shape[1]), 1)
    for client, scorer in enumerate(scorers):
        rows = np.flatnonzero(counts[client][labels] > 0 if owners is None else owners == client)
        if not len(rows):
            continue
        scores, weights = scorer(rows), None if owners is not None else share[client][labels[rows]]
        answers, loss = _judged(scores, labels[rows])
        tallies.append(tally_classes(scores, labels[rows], weights))
        alone[client] = tallies[-1]
        if owners is not None:
            everything[rows], tested[rows] = scores, client
        right = answers == labels[rows]
        losses.append(loss)
        asked.append(labels[rows])
        answered.append(answers)
        if owners is None:
            by_client[client] = _weighted(_rates(right, labels[rows], counts.shape[1]), counts[client : client + 1])[0]
        else:
            by_client[client] = right.mean()
            right_answers.append(right)
    there = np.isfinite(by_client)
    sizes = counts.sum(axis=1)[there]
    pooled = np.concatenate(right_answers).mean() if right_answers else np.average(by_client[there], weights=sizes)
    pairs = (np.concatenate(asked), np.concatenate(answered))
    each = partial(of_tallies, alone)
    if owners is not None:
        each = partial(of_owners, everything, labels, tested, len(counts))
    examples = len(labels) if owners is None else int((tested >= 0).sum())
    return Evaluation(
        float(pooled), _mean(np.concatenate(losses)), by_client, pairs, class_metrics(added(tallies)), by_client=each,
        examples=examples,
    )  # fmt: skip


def combined(parts: list[Evaluation], starts: Sequence[int]) -> Evaluation:
    """Several tasks as one: the mean of their metrics, the perplexity of the mean loss, all their clients, and answers
    in the classes of all tasks, where each task's begin at a number of ``starts``."""
    accuracies = [part.accuracy for part in parts if part.accuracy is not None]
    losses = [part.loss for part in parts if part.loss is not None]
    clients = [part.client_accuracy for part in parts if part.client_accuracy is not None]
    pairs = [np.stack(part.answers) + start for part, start in zip(parts, starts, strict=True) if part.answers]
    known = {name: [value for part in parts if (value := part.more[name]) is not None] for name in parts[0].more}
    answers = np.concatenate(pairs, axis=1) if pairs else None
    loss = float(np.mean(losses)) if losses else None
    speaks = loss is not None and any(part.perplexity is not None for part in parts)
    perplexities = [part.client_perplexity for part in parts if part.client_perplexity is not None]
    return Evaluation(
        float(np.mean(accuracies)) if accuracies else None,
        loss,
        np.concatenate(clients) if clients else None,
        (answers[0], answers[1]) if answers is not None else None,
        {name: float(np.mean(values)) if values else None for name, values in known.items()},
        perplexity=float(np.exp(loss)) if speaks and loss is not None else None,
        client_perplexity=np.concatenate(perplexities) if perplexities else None,
        by_client=lambda: _side_by_side([part.by_client() for part in parts]),
        examples=None if any(part.examples is None for part in parts) else sum(part.examples or 0 for part in parts),
    )


def _side_by_side(parts: Sequence[ClientMetrics]) -> ClientMetrics:
    """Metrics of the clients of several tasks, one task after the other, as far as all have them."""
    names = [name for name in parts[0] if all(name in part for part in parts)]
    return {name: np.concatenate([part[name] for part in parts]) for name in names}


def similarity(before: Features, after: Features) -> float:
    """Mean cosine between each example's features before and after [n, d] (the FedYolo paper's feature similarity)."""
    norms = np.linalg.norm(before, axis=1) * np.linalg.norm(after, axis=1)
    return float(np.mean(np.einsum("nd,nd->n", before, after) / np.where(norms > 0, norms, 1)))


def forgetting_ratio(before: float, after: float) -> float:
    """Share of the accuracy on the whole test split that personalisation has cost (the FedYolo paper)."""
    return (before - after) / before if before else 0.0


def heterogeneity_drop(alike: float, unlike: float) -> float:
    """Share of the accuracy that is lost when clients hold unlike classes (the FedYolo paper)."""
    return (alike - unlike) / alike if alike else 0.0


def _judged(scores: npt.NDArray[np.float32], labels: Ints) -> tuple[Ints, npt.NDArray[np.float32]]:
    """Answers [n], and the cross-entropy of the examples of classes that are not masked."""
    known = np.isfinite(scores[np.arange(len(labels)), labels])
    losses: npt.NDArray[np.float32] = -log_softmax(scores[known], axis=1)[np.arange(int(known.sum())), labels[known]]
    return scores.argmax(axis=1), losses


def _mean(losses: npt.NDArray[np.float32]) -> float | None:
    return float(losses.mean()) if len(losses) else None


def _weighted(rates: Floats, counts: Ints) -> Floats:
    """Each client's mean [K] of the rates by class [C], weighted by its examples [K, C] of those that have one."""
    shares = counts * np.isfinite(rates)
    total = shares.sum(axis=1)
    return np.where(total > 0, shares @ np.nan_to_num(rates) / np.maximum(total, 1), np.nan)


def _rates(right: npt.NDArray[np.bool_], groups: Ints, count: int) -> npt.NDArray[np.float64]:
    """Share of right answers in each group [count], NaN for an empty one; a negative number is no group."""
    mine = groups >= 0
    sizes = np.bincount(groups[mine], minlength=count)
    hits = np.bincount(groups[mine], weights=right[mine], minlength=count)
    return np.where(sizes > 0, hits / np.maximum(sizes, 1), np.nan)


def own_metric(found: Evaluation) -> tuple[str, Floats]:
    """What says how good a model is at each client [K]: its perplexity where it completes prompts, or its accuracy."""
    if found.client_perplexity is not None:
        return "perplexity", found.client_perplexity
    assert found.client_accuracy is not None
    return "accuracy", found.client_accuracy


def personalised(found: Evaluation, epoch: int) -> dict[str, Any]:
    """How good the clients' own models are after an epoch of making them their own, and before the first."""
    what, each = own_metric(found)
    figures: dict[str, Any] = spread(f"personalised_{what}", each)
    return figures if epoch else figures | spread(f"initial_{what}", each)


class Evaluator(Protocol):
    """Looks at what a method has made so far."""

    def __call__(self, state: Any, split: str) -> tuple[Evaluation, dict[str, Evaluation]]:
        """On a split: all tasks together, and each by its name."""

    def features(self, state: Any, split: str) -> Features:
        """Features of a whole split by the global backbone, with each task's module."""

    def personalised(
        self, stage: PersonaliseStage, state: Any, epoch: int, found: Evaluation, before: dict[str, Any]
    ) -> dict[str, Any]:
        """The figures of clients that make the model their own; before: what this has returned so far."""


class NodeEvaluator:
    """Asks clients that hold their own data how good a model is there."""

    def __init__(
        self, federation: Federation, method: Method[Any], clients: FlowerClients, generates: bool = False
    ) -> None:
        """generates: whether what nodes tell is of the tokens of completions."""
        self.federation, self.method, self.clients, self.generates = federation, method, clients, generates

    def __call__(self, state: Any, split: str) -> tuple[Evaluation, dict[str, Evaluation]]:
        """On the clients' test examples, whichever they are."""
        tasks = range(len(self.federation.tasks))
        tested = self.clients.evaluate([self.method.model(state, task) for task in tasks])
        by_client = np.full(self.federation.n_clients, np.nan)
        for client, tally in (pair for one in tested for pair in one.each.items()):
            examples, right, known, loss = tally["figures"]
            by_client[client] = right / examples if examples else np.nan
            if self.generates:
                by_client[client] = np.exp(loss / known) if known else np.nan
        if self.federation.dataset.target == "regression":
            by_client = np.full_like(by_client, np.nan)
        found = {}
        for task, name in enumerate(self.federation.tasks):
            mine = by_client[self.federation.clients_of(task)]
            accuracy, loss, more = self.clients.metrics_of(task, tested[task].total)
            if self.generates:
                perplexity = None if loss is None else float(np.exp(loss))
                found[name] = Evaluation(
                    None, loss, nbytes=tested[task].nbytes, perplexity=perplexity, client_perplexity=mine
                )
                continue
            found[name] = Evaluation(
                accuracy, loss, mine, None, more, tested[task].nbytes, examples=self._examples(tested[task].total)
            )
        whole = combined(list(found.values()), self.federation.class_starts)
        nbytes = sum(one.nbytes[0] for one in tested), sum(one.nbytes[1] for one in tested)
        each = {client: tally for one in tested for client, tally in one.each.items()}
        if self.generates:
            return replace(whole, client_perplexity=by_client, nbytes=nbytes), found
        return replace(whole, client_accuracy=by_client, nbytes=nbytes, by_client=partial(self._by_client, each)), found

    def _examples(self, total: Tally) -> int | None:
        """How many were tested; nobody knows where noise hides it."""
        hidden = self.clients.stage.privacy is not None or "figures" not in total
        return None if hidden else round(float(total["figures"][0]))

    def _by_client(self, each: Mapping[int, Tally]) -> ClientMetrics:
        """What clients tell of their tests in the clear."""
        tallies = [each.get(client, {}) for client in range(self.federation.n_clients)]
        examples = np.array([tally["figures"][0] if "figures" in tally else np.nan for tally in tallies])
        kind = self.federation.dataset.target
        if kind == "classes":
            return {
                "test_examples": examples,
                **of_tallies([tally if "classes" in tally else None for tally in tallies]),
            }
        return {"test_examples": examples, **of_target_tallies(tallies, kind)}

    def features(self, state: Any, split: str) -> Features:
        """They stay with the clients."""
        raise AssertionError("features of clients' examples stay with them")

    def personalised(
        self, stage: PersonaliseStage, state: Any, epoch: int, found: Evaluation, before: dict[str, Any]
    ) -> dict[str, Any]:
        """How good the clients' own models are, at first and now."""
        return personalised(found, epoch)


class LocalEvaluator:
    """The global model on examples that are here, or every client's own model where clients have one."""

    def __init__(
        self, federation: Federation, store: ModelStore, method: Method[Any], states: ClientStates, changes: bool
    ) -> None:
        """changes: whether the method changes the features, so that they cannot be computed once."""
        self.federation, self.store, self.method, self.states, self.changes = federation, store, method, states, changes

    def __call__(self, state: Any, split: str) -> tuple[Evaluation, dict[str, Evaluation]]:
        """On a split: all tasks together, and each by its name."""
        found = {}
        examples: Examples = getattr(self.federation.dataset, split)
        if examples.targets is not None:
            head, features = self._global(state, 0, split)
            owners = self.federation.test_owners if split == "test" else None
            kind, clients = self.federation.dataset.target, self.federation.n_clients
            whole = evaluate_targets(head, features, examples.targets, kind, owners, clients)
            return whole, {self.federation.tasks[0]: whole}
        for task, name in enumerate(self.federation.tasks):
            labels, owners, counts = self._facts(task, split)
            if self.method.personal and self.store.generates:
                sums = self._own_completions(state, task, split, owners)
                found[name] = evaluate_completions(sums, np.arange(len(sums)), len(sums))
            elif self.method.personal:
                found[name] = evaluate_each(self._scorers(state, task, split), labels, owners, counts)
            else:
                head, features = self._global(state, task, split)
                if self.store.generates:
                    found[name] = evaluate_completions(features, owners, len(counts))
                    continue
                known = split == "test" and self.federation.remote_sizes is None
                found[name] = evaluate(head, features, labels, owners, counts if known else None)
        parts = list(found.values())
        return (parts[0] if len(parts) == 1 else combined(parts, self.federation.class_starts)), found

    def features(self, state: Any, split: str) -> Features:
        """Features of a whole split by the global backbone, with each task's module."""
        return np.concatenate([self._global(state, task, split)[1] for task in range(len(self.federation.tasks))])

    def personalised(
        self, stage: PersonaliseStage, state: Any, epoch: int, found: Evaluation, before: dict[str, Any]
    ) -> dict[str, Any]:
        """The figures of the FedBABU and FedYolo papers; before: what this has returned so far."""
        figures = personalised(found, epoch)
        if stage.without_head and epoch in (0, stage.rounds):
            figures |= spread("headless_accuracy" if epoch else "initial_headless_accuracy", self._headless(state))
        if stage.forgetting and epoch in (0, stage.rounds):
            whole, what = self._on_everything(state, stage.eval_split), own_metric(found)[0]
            figures[f"whole_{what}" if epoch else f"initial_whole_{what}"] = whole
            if epoch and what == "accuracy":
                figures["forgetting_ratio"] = forgetting_ratio(before["initial_whole_accuracy"], whole)
        return figures

    def _facts(self, task: int, split: str) -> tuple[Ints, Ints | None, Ints]:
        """Of a task: labels and owners of a split, and who holds which class, all numbered within the task."""
        rows, classes = self.federation.examples_of(task, split), self.federation.classes_of(task)
        clients, owners = self.federation.clients_of(task), self.federation.test_owners
        labels = getattr(self.federation.dataset, split).labels[rows] - classes.start
        mine = None
        if split == "test" and owners is not None:
            place = np.full(self.federation.n_clients + 1, -1)  # the last is nobody's
            place[clients] = np.arange(len(clients))
            mine = place[owners[rows]]
        return labels, mine, self.federation.counts[clients, classes]

    def _global(self, state: Any, task: int, split: str) -> tuple[LinearHead, Features]:
        """The head of a task, and features of its part of a split, by the global model."""
        several = len(self.federation.tasks) > 1
        rows = self.federation.examples_of(task, split) if several else None
        head = self.method.load(self.method.model(state, task), task)
        if self.changes:
            return head, self.store.embedded(split, rows)
        return head, self.store.features(split) if rows is None else self.store.features(split)[rows]

    def _models(self, state: Any, task: int) -> Iterator[tuple[int, LinearHead, bool]]:
        """Each client of a task, with its head, its backbone loaded, and whether that backbone is its own."""
        clients, model = self.federation.clients_of(task), self.method.model(state, task)
        for client in clients.tolist():
            own = {}
            if self.states.has(client):
                read = partial(self.states.read, clients=np.array([client]))
                own = {name: values[0] for name, values in self.method.personal_params(read, task).items()}
            yield client, self.method.load(model, task, own), any(not name.startswith("head.") for name in own)

    def _scorers(self, state: Any, task: int, split: str) -> Iterator[Scorer]:
        """Each client's scores of a task's part of a split; what the backbone of all clients makes of it is made
        once."""
        where, shared = self.federation.examples_of(task, split), None
        for _, head, below in self._models(state, task):
            if below:
                yield lambda rows, head=head: head.scores(self.store.embedded(split, where[rows]))  # type: ignore[misc]
            else:
                shared = self._global(state, task, split)[1] if shared is None else shared
                yield lambda rows, head=head, shared=shared: head.scores(shared[rows])  # type: ignore[misc]

    def _own_completions(self, state: Any, task: int, split: str, owners: Ints | None) -> Features:
        """Of each of a task's clients' own model: losses and tokens [K, 2] of its completions, or of all where they
        are shared."""
        sums, where = np.zeros((len(self.federation.clients_of(task)), 2)), self.federation.examples_of(task, split)
        whole = where if len(self.federation.tasks) > 1 else None
        for place, _ in enumerate(self._models(state, task)):
            rows = whole if owners is None else where[owners == place]
            if rows is None or len(rows):
                sums[place] = self.store.embedded(split, rows).astype(np.float64).sum(axis=0)
        return sums

    def _headless(self, state: Any) -> Floats:
        """Accuracy of each client by the nearest mean of its own classes, in what its last linear layer reads."""
        found = []
        for task in range(len(self.federation.tasks)):
            labels, owners, counts = self._facts(task, "test")
            found.append(evaluate_each(self._nearest(state, task), labels, owners, counts).client_accuracy)
        return np.concatenate([each for each in found if each is not None])

    def _nearest(self, state: Any, task: int) -> Iterator[Scorer]:
        """Each client's scores of a task's test examples by the means of its own classes."""
        where, train = self.federation.examples_of(task, "test"), self.federation.dataset.train
        classes = self.federation.classes_of(task)

        def features(split: str, rows: Ints, own: LinearHead) -> Features:
            found = self.store.embedded(split, rows) if self.changes else self.store.features(split)[rows]
            return own.feature_map(found) if own.feature_map else found

        for client, own, _ in self._models(state, task):
            rows, _ = self.federation.rows_of(np.array([client]))
            labels = train.labels[rows] - classes.start
            means, _ = summarise(features("train", rows, own), labels, classes.stop - classes.start)
            head = ncm_head(means, "euclidean")
            yield lambda chosen, head=head, own=own: head.scores(features("test", where[chosen], own))  # type: ignore[misc]

    def _on_everything(self, state: Any, split: str) -> float:
        """Mean over the clients of their models' accuracy, or perplexity, on the whole of their task's split."""
        rates: list[float] = []
        for task in range(len(self.federation.tasks)):
            if self.store.generates:
                losses, tokens = self._own_completions(state, task, split, None).T
                rates += np.exp(losses / tokens).tolist()
                continue
            labels, _, _ = self._facts(task, split)
            for scorer in self._scorers(state, task, split):
                rates.append(float((scorer(np.arange(len(labels))).argmax(axis=1) == labels).mean()))
        return float(np.mean(rates))
