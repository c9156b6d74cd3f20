"""Personalise: every client makes the model that it is handed its own; nothing travels.

Fine-tuning of the head, the body or all, an epoch a round (the protocol of Oh et al., ICLR 2022). Or, with ``compute``,
a head in closed form from the client's own examples, on its own classes, blended with the head it was handed:
(1 − s) g / σ_g + s p / σ_p, where σ is the spread of each head's scores on the client's examples. s = 0 is the head
it was handed. Where s is not given, each client chooses it by cross-validation on its own examples.

Where the head it was handed masks a class that the client has, it starts from the mean of the other classes there.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch
from sklearn.model_selection import KFold

from headstart.config.stage import PersonaliseStage
from headstart.core.message import Message
from headstart.core.statistics import Features, Ints
from headstart.heads import LinearHead
from headstart.heads.estimators import Fed3R, FedCOF, FedNCM
from headstart.methods.local_only import LocalOnlyMethod
from headstart.solvers.cohort import Cohort
from headstart.solvers.heads import LocalResult, Stack

STRENGTHS = tuple(np.round(np.linspace(0, 1, 11), 1).tolist())
_FOLDS = 5
_TIE = 1e-5  # scores that differ by less, relative to their size, differ by float32's rounding


class PersonaliseMethod(LocalOnlyMethod[PersonaliseStage]):
    """Local training of what `update` names, or a computed head."""

    def train(
        self, start: Stack, cohort: Cohort, message: Message, sizes: Ints
    ) -> tuple[LocalResult, dict[str, Stack], dict[str, Stack]]:
        """Fine-tuning, or the blended head of every client."""
        if self.stage.compute is None:
            return super().train(self._unmasked(start, cohort), cohort, message, sizes)
        found: dict[str, list[npt.NDArray[np.float32]]] = {name: [] for name in start}
        for row, client in enumerate(cohort.clients):
            mine = cohort.owners == client
            arrays = {name.removeprefix("head."): value[row].numpy() for name, value in start.items()}
            given = LinearHead.of_arrays(arrays)
            features = np.asarray(cohort.features[cohort.rows[mine]], np.float32)
            if given.feature_map is not None:
                features = given.feature_map(features)
            flat = LinearHead(given.weight, given.bias)
            head = blended_head(flat, features, cohort.labels[mine], self.stage.compute, self.stage.blend)
            for name in found:
                plain = name.removeprefix("head.")
                found[name].append({"weight": head.weight, "bias": head.bias}.get(plain, arrays[plain]))
        values = {name: torch.from_numpy(np.stack(each)) for name, each in found.items()}
        velocity = {name: torch.zeros_like(value) for name, value in values.items()}
        kept = {"velocity": velocity} if self.keeps else {}
        return LocalResult(values, np.ones(len(cohort.clients), np.int64), velocity), {}, kept

    def _unmasked(self, start: Stack, cohort: Cohort) -> Stack:
        """The heads of a cohort, where they are trained, with no class masked that its client has."""
        trained = self.plan.head != "frozen" and self.setting.moves != "body"
        if not trained or not start["head.bias"].isneginf().any():
            return start
        heads = [
            unmasked(LinearHead(weight.numpy(), bias.numpy()), np.unique(cohort.labels[cohort.owners == client]))
            for client, weight, bias in zip(cohort.clients, start["head.weight"], start["head.bias"], strict=True)
        ]
        weights, biases = (np.stack([getattr(head, name) for head in heads]) for name in ("weight", "bias"))
        return start | {"head.weight": torch.from_numpy(weights), "head.bias": torch.from_numpy(biases)}


def unmasked(head: LinearHead, held: Ints) -> LinearHead:
    """The head with the classes held [H] that it masks: each scores the mean of the others."""
    masked, known = held[np.isneginf(head.bias[held])], np.isfinite(head.bias)
    if not len(masked):
        return head
    weight, bias = head.weight.copy(), head.bias.copy()
    weight[masked], bias[masked] = weight[known].mean(axis=0), bias[known].mean()
    return replace(head, weight=weight, bias=bias)


def blended_head(given: LinearHead, features: Features, labels: Ints, kind: str, blend: float | str) -> LinearHead:
    """The head of a client with features [n, d] and labels [n] of its own."""
    strength = _choose(given, features, labels, kind) if blend == "auto" else float(blend)
    return _blend(given, _computed(kind, features, labels, len(given.bias)), features, strength)


def _choose(given: LinearHead, features: Features, labels: Ints, kind: str) -> float:
    """The strength with the most right answers on held-out examples; of several, the middle one."""
    right = np.zeros(len(STRENGTHS))
    if len(labels) < 2:
        return 0.0
    folds = KFold(min(_FOLDS, len(labels)), shuffle=True, random_state=0)
    for train, test in folds.split(features):
        computed = _computed(kind, features[train], labels[train], len(given.bias))
        for number, strength in enumerate(STRENGTHS):
            scores = _blend(given, computed, features[train], strength).scores(features[test])
            right[number] += np.count_nonzero(scores.argmax(axis=1) == labels[test])
    best = np.flatnonzero(right == right.max())
    return float(STRENGTHS[best[len(best) // 2]])


def _computed(kind: str, features: Features, labels: Ints, n_classes: int) -> LinearHead:
    """The closed-form head on the classes that are there; the others are masked. One class needs no solving."""
    present = np.unique(labels)
    if len(present) == 1:
        return LinearHead.from_classes(n_classes, present, np.zeros((1, features.shape[1])), np.zeros(1))
    estimator = {"fedncm": FedNCM, "fed3r": Fed3R, "fedcof": FedCOF}[kind]()
    estimator.fit(features, labels)
    return LinearHead.from_classes(n_classes, estimator.classes_, estimator.head_.weight, estimator.head_.bias)


def _blend(given: LinearHead, computed: LinearHead, features: Features, strength: float) -> LinearHead:
    """The heads added after their scores have been brought to the same spread; classes not there are masked."""
    if strength == 0:
        return given
    there = np.isfinite(computed.bias)
    given = unmasked(given, np.flatnonzero(there))
    weight, bias = np.zeros((there.sum(), features.shape[1])), np.zeros(there.sum())
    for head, share in ((given, 1 - strength), (computed, strength)):
        scores = head.scores(features)[:, there]
        spread = float(np.std(scores - scores.mean(axis=1, keepdims=True)))
        if spread <= _TIE * np.abs(scores).max():  # classes that the head has never seen all start alike
            spread = 1.0
        weight += share / spread * head.weight[there]
        bias += share / spread * head.bias[there]
    return LinearHead.from_classes(len(given.bias), np.flatnonzero(there), weight, bias)
