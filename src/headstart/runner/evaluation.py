"""What is known of a tested model: of its scores on labelled examples, as a whole and at each client."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

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
from headstart.core.statistics import Features, Floats, Ints
from headstart.core.target import Target
from headstart.heads import LinearHead
from headstart.runner.client_metrics import ClientMetrics, of_classes, of_owners, of_tallies, of_target_owners

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
    predictions: tuple[Ints, Ints] | None = None
    """Labels [n] and predicted classes [n], where both are known here."""
    other_metrics: Mapping[str, float | None] = field(default_factory=lambda: class_metrics({}))
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
        figures: Metrics = {"accuracy": self.accuracy, "loss": self.loss, **self.other_metrics}
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
    predictions, losses = _predicted(scores, labels)
    correct, client_accuracy = predictions == labels, None
    by_client: Callable[[], ClientMetrics] = dict
    if counts is not None and owners is not None:
        client_accuracy = _accuracies(correct, owners, len(counts))
        by_client = partial(of_owners, scores, labels, owners, len(counts))
    elif counts is not None:
        client_accuracy = _weighted(_accuracies(correct, labels, counts.shape[1]), counts)
        by_client = partial(of_classes, scores, labels, counts)
    return Evaluation(
        float(correct.mean()),
        _mean(losses),
        client_accuracy,
        (labels, predictions),
        class_metrics(tally_classes(scores, labels)),
        by_client=by_client,
        examples=len(labels),
    )


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
        return Evaluation(None, None, other_metrics=target_metrics({}, kind))
    tally = tally_targets(scores, targets, kind)
    examples, correct, _, loss = tally["figures"]
    ranking = ranking_metrics(scores, targets) if kind == "multilabel" else {}
    accuracy = None if kind == "regression" else float(correct / examples)
    by_client = {} if owners is None else of_target_owners(scores, targets, owners, clients, kind)
    return Evaluation(
        accuracy,
        float(loss / examples),
        by_client.get("accuracy"),
        other_metrics={**target_metrics(tally, kind), **ranking},
        by_client=lambda: by_client,
        examples=len(targets),
    )


def evaluate_completions(features: Features, owners: Ints | None, clients: int) -> Evaluation:
    """Evaluate losses and numbers of tokens [n, 2] of completions; owners: [n] whose they are, where that is known."""
    losses, tokens = features.astype(np.float64).T
    loss, client_perplexity = float(losses.sum() / tokens.sum()), None
    if owners is not None:
        owned = owners >= 0
        sums = [np.bincount(owners[owned], each[owned], clients) for each in (losses, tokens)]
        with np.errstate(invalid="ignore"):
            client_perplexity = np.exp(sums[0] / np.where(sums[1] > 0, sums[1], np.nan))
    return Evaluation(None, loss, perplexity=float(np.exp(loss)), client_perplexity=client_perplexity)


def evaluate_each(scorers: Iterable[Scorer], labels: Ints, owners: Ints | None, counts: Ints) -> Evaluation:
    """Evaluate a model for each client, on its own examples or, where the split is shared, on those of its classes.

    The accuracy is the share of correct predictions over all clients; where the split is shared, clients count by their
    training examples: each prediction for a client on a class by its examples of it, over those of the split.
    """
    client_accuracy, tallies = np.full(len(counts), np.nan), list[Tally | None]([None] * len(counts))
    labels_of, predictions_of, correct_of, losses_of = [], [], [], []
    own_scores, tested = np.zeros((len(labels), counts.shape[1]), np.float32), np.full(len(labels), -1)
    share = counts / np.maximum(np.bincount(labels, minlength=counts.shape[1]), 1)
    for client, scorer in enumerate(scorers):
        rows = np.flatnonzero(counts[client][labels] > 0 if owners is None else owners == client)
        if not len(rows):
            continue
        scores, weights = scorer(rows), None if owners is not None else share[client][labels[rows]]
        predictions, losses = _predicted(scores, labels[rows])
        correct = predictions == labels[rows]
        tallies[client] = tally_classes(scores, labels[rows], weights)
        labels_of.append(labels[rows])
        predictions_of.append(predictions)
        losses_of.append(losses)
        if owners is None:
            accuracies = _accuracies(correct, labels[rows], counts.shape[1])
            client_accuracy[client] = _weighted(accuracies, counts[client : client + 1])[0]
        else:
            own_scores[rows], tested[rows] = scores, client
            client_accuracy[client] = correct.mean()
            correct_of.append(correct)
    known = np.isfinite(client_accuracy)
    sizes = counts.sum(axis=1)[known]
    pooled = np.concatenate(correct_of).mean() if correct_of else np.average(client_accuracy[known], weights=sizes)
    by_client = partial(of_tallies, tallies)
    if owners is not None:
        by_client = partial(of_owners, own_scores, labels, tested, len(counts))
    return Evaluation(
        float(pooled),
        _mean(np.concatenate(losses_of)),
        client_accuracy,
        (np.concatenate(labels_of), np.concatenate(predictions_of)),
        class_metrics(added([tally for tally in tallies if tally is not None])),
        by_client=by_client,
        examples=len(labels) if owners is None else int((tested >= 0).sum()),
    )


def combined(parts: list[Evaluation], starts: Sequence[int]) -> Evaluation:
    """Several tasks as one: the mean of their metrics, the perplexity of the mean loss, all their clients, and labels
    and predictions in the classes of all tasks, where each task's begin at a number of ``starts``."""
    accuracies = [part.accuracy for part in parts if part.accuracy is not None]
    losses = [part.loss for part in parts if part.loss is not None]
    clients = [part.client_accuracy for part in parts if part.client_accuracy is not None]
    pairs = [np.stack(part.predictions) + start for part, start in zip(parts, starts, strict=True) if part.predictions]
    others = {
        name: [value for part in parts if (value := part.other_metrics[name]) is not None]
        for name in parts[0].other_metrics
    }
    labels, predictions = np.concatenate(pairs, axis=1) if pairs else (None, None)
    loss = float(np.mean(losses)) if losses else None
    generates = any(part.perplexity is not None for part in parts)
    perplexities = [part.client_perplexity for part in parts if part.client_perplexity is not None]
    return Evaluation(
        float(np.mean(accuracies)) if accuracies else None,
        loss,
        np.concatenate(clients) if clients else None,
        (labels, predictions) if labels is not None and predictions is not None else None,
        {name: float(np.mean(values)) if values else None for name, values in others.items()},
        perplexity=float(np.exp(loss)) if generates and loss is not None else None,
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


def _predicted(scores: npt.NDArray[np.float32], labels: Ints) -> tuple[Ints, npt.NDArray[np.float32]]:
    """Predicted classes [n], and the cross-entropy of the examples of classes that are not masked."""
    known = np.isfinite(scores[np.arange(len(labels)), labels])
    losses: npt.NDArray[np.float32] = -log_softmax(scores[known], axis=1)[np.arange(int(known.sum())), labels[known]]
    return scores.argmax(axis=1), losses


def _mean(losses: npt.NDArray[np.float32]) -> float | None:
    return float(losses.mean()) if len(losses) else None


def _weighted(accuracies: Floats, counts: Ints) -> Floats:
    """Each client's mean [K] of the accuracies by class [C], weighted by its examples [K, C] of those that have one."""
    shares = counts * np.isfinite(accuracies)
    total = shares.sum(axis=1)
    return np.where(total > 0, shares @ np.nan_to_num(accuracies) / np.maximum(total, 1), np.nan)


def _accuracies(correct: npt.NDArray[np.bool_], groups: Ints, count: int) -> npt.NDArray[np.float64]:
    """Share of correct predictions in each group [count], NaN for an empty one; a negative number is no group."""
    grouped = groups >= 0
    sizes = np.bincount(groups[grouped], minlength=count)
    hits = np.bincount(groups[grouped], weights=correct[grouped], minlength=count)
    return np.where(sizes > 0, hits / np.maximum(sizes, 1), np.nan)


def own_metric(found: Evaluation) -> tuple[str, Floats]:
    """What says how good a model is at each client [K]: its perplexity where it completes prompts, or its accuracy."""
    if found.client_perplexity is not None:
        return "perplexity", found.client_perplexity
    assert found.client_accuracy is not None
    return "accuracy", found.client_accuracy


def personalised(found: Evaluation, epoch: int) -> dict[str, Any]:
    """How good the clients' own models are after an epoch of making them their own, and before the first."""
    metric, values = own_metric(found)
    figures: dict[str, Any] = spread(f"personalised_{metric}", values)
    return figures if epoch else figures | spread(f"initial_{metric}", values)
