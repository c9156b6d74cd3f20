"""Who evaluates a model: this process, on examples that are here, or nodes, on examples of their own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from headstart.core.metrics import Tally, spread
from headstart.core.progress import progress
from headstart.core.statistics import Features, Floats, Ints, summarise
from headstart.data import Examples, Federation
from headstart.engine.client_states import ClientStates
from headstart.engine.model_store import ModelStore
from headstart.heads import LinearHead
from headstart.heads.ncm import ncm_head
from headstart.methods import Method
from headstart.methods.personalise import PersonaliseStage
from headstart.runner.client_metrics import ClientMetrics, of_tallies, of_target_tallies
from headstart.runner.evaluation import (
    Evaluation,
    Scorer,
    combined,
    evaluate,
    evaluate_completions,
    evaluate_each,
    evaluate_targets,
    forgetting_ratio,
    own_metric,
    personalised,
)

if TYPE_CHECKING:  # Flower takes seconds to load
    from headstart.engine.flower import FlowerClients


class Evaluator(Protocol):
    """Evaluates what a method has made so far."""

    def __call__(self, state: Any, split: str) -> tuple[Evaluation, dict[str, Evaluation]]:
        """On a split: all tasks together, and each by its name."""

    def features(self, state: Any, split: str) -> Features:
        """Features of a whole split by the global backbone, with each task's module."""

    def personalised(
        self, stage: PersonaliseStage, state: Any, epoch: int, found: Evaluation, before: dict[str, Any]
    ) -> dict[str, Any]:
        """The figures of clients that make the model their own; before: what this has returned so far."""


class NodeEvaluator:
    """Asks nodes, which hold their own data, for the metrics of a model there."""

    def __init__(
        self, federation: Federation, method: Method[Any], clients: FlowerClients, generates: bool = False
    ) -> None:
        """generates: whether the metrics are those of the tokens of completions."""
        self.federation, self.method, self.clients, self.generates = federation, method, clients, generates

    def __call__(self, state: Any, split: str) -> tuple[Evaluation, dict[str, Evaluation]]:
        """On the clients' test examples, whichever they are."""
        tasks = range(len(self.federation.tasks))
        tested = self.clients.evaluate([self.method.model(state, task) for task in tasks])
        tallies = {client: tally for one in tested for client, tally in one.each.items()}
        per_client = self._per_client(tallies)
        found = {}
        for task, name in enumerate(self.federation.tasks):
            total, nbytes = tested[task].total, tested[task].nbytes
            own = per_client[self.federation.clients_of(task)]
            accuracy, loss, others = self.clients.metrics_of(task, total)
            if self.generates:
                perplexity = None if loss is None else float(np.exp(loss))
                found[name] = Evaluation(None, loss, nbytes=nbytes, perplexity=perplexity, client_perplexity=own)
                continue
            found[name] = Evaluation(accuracy, loss, own, None, others, nbytes, examples=self._examples(total))
        whole = combined(list(found.values()), self.federation.class_starts)
        nbytes = sum(one.nbytes[0] for one in tested), sum(one.nbytes[1] for one in tested)
        if self.generates:
            return replace(whole, client_perplexity=per_client, nbytes=nbytes), found
        by_client = partial(self._by_client, tallies)
        return replace(whole, client_accuracy=per_client, nbytes=nbytes, by_client=by_client), found

    def _per_client(self, tallies: Mapping[int, Tally]) -> Floats:
        """Each client's accuracy [K], or its perplexity where it completes prompts; NaN where it tells none."""
        found = np.full(self.federation.n_clients, np.nan)
        if self.federation.dataset.target == "regression":
            return found
        for client, tally in tallies.items():
            examples, correct, known, loss = tally["figures"]
            found[client] = correct / examples if examples else np.nan
            if self.generates:
                found[client] = np.exp(loss / known) if known else np.nan
        return found

    def _examples(self, total: Tally) -> int | None:
        """How many were tested; nobody knows where noise hides it."""
        hidden = self.clients.stage.privacy is not None or "figures" not in total
        return None if hidden else round(float(total["figures"][0]))

    def _by_client(self, by_number: Mapping[int, Tally]) -> ClientMetrics:
        """The other metrics of clients whose tests are in the clear."""
        tallies = [by_number.get(client, {}) for client in range(self.federation.n_clients)]
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
