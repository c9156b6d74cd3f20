"""Personalise: every client makes the model that it starts from its own; nothing travels.

Fine-tuning of the head, the backbone or all, an epoch a round (the protocol of Oh et al., ICLR 2022). Or, with
``compute``, a head in closed form from the client's own examples, on its own classes, blended with the head of the
earlier stage: (1 − s) g / σ_g + s p / σ_p, where σ is the spread of each head's scores on the client's examples. s = 0
is the head of the earlier stage. Where s is not given, each client chooses it by cross-validation on its own examples.

Where the earlier head masks a class that the client has, it starts from the mean of the other classes there.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Literal

import numpy as np
import numpy.typing as npt
from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from headstart.config.stage import Auto, LocalStage, Part
from headstart.core.params import Params
from headstart.core.reply import ClientResult
from headstart.core.statistics import Features, Ints
from headstart.heads import LinearHead
from headstart.methods.base import Arrays, Received
from headstart.methods.local_only import LocalOnly
from headstart.methods.registry import register
from headstart.solvers.cohort import Cohort
from headstart.solvers.objective import LocalResult

STRENGTHS = tuple(np.round(np.linspace(0, 1, 11), 1).tolist())
_FOLDS = 5
_TIE = 1e-5  # scores that differ by less, relative to their size, differ by float32's rounding


class PersonaliseStage(LocalStage):
    """Every client makes the model that it starts from its own, and nothing travels: fine-tuned, or a computed head."""

    method: Literal["personalise"]
    update: Part = "all"
    """What a client changes; a module is the one that an earlier stage has left on the backbone."""
    epochs: NonNegativeInt = 5
    """Of fine-tuning; the model is evaluated after each, and before the first."""
    compute: Literal["fedncm", "fed3r", "fedcof"] | None = None
    """Instead of fine-tuning: a head in closed form from the client's own examples, blended with the one it has."""
    blend: Annotated[float, Field(ge=0, le=1)] | Auto = "auto"
    """Share of the computed head; "auto": each client chooses by cross-validation on its own examples."""
    without_head: bool = False
    """Evaluate without the head too, by the nearest mean of a client's own classes, before the first epoch and after
    the last."""
    forgetting: bool = False
    """Evaluate every client's model on the whole test split too, before the first epoch and after the last."""
    batch_size: PositiveInt | Literal["full"] = 50
    lr: PositiveFloat = 1e-3
    momentum: float = Field(default=0.9, ge=0, lt=1)

    @property
    def train(self) -> Part:
        """What changes."""
        return "head" if self.compute else self.update

    @property
    def rounds(self) -> int:
        """A round is an epoch; a head is computed in one."""
        return 1 if self.compute else self.epochs

    @property
    def needs_shared_body(self) -> bool:
        """A head is computed on features that all clients have in common."""
        return self.compute is not None

    @property
    def needs_all_examples(self) -> bool:
        """What looks at everybody's examples."""
        return self.without_head or self.forgetting


class Personalise(LocalOnly[PersonaliseStage]):
    """Local training of what `update` names, or a computed head."""

    def client_update(self, cohort: Cohort, received: Received) -> ClientResult:
        """Fine-tuning, or the blended head of every client."""
        from headstart.solvers.network import tensors

        if self.stage.compute is None:
            return super().client_update(cohort, replace(received, model=self._unmasked(received.model, cohort)))
        found: dict[str, list[npt.NDArray[np.float32]]] = {name: [] for name in received.model}
        for row, client in enumerate(cohort.clients):
            arrays = {name.removeprefix("head."): value[row].numpy() for name, value in received.model.items()}
            computed = self._computed(LinearHead.of_arrays(arrays), cohort, cohort.owners == client)
            for name, values in found.items():
                plain = name.removeprefix("head.")
                values.append(computed.get(plain, arrays[plain]))
        params = tensors({name: np.stack(each) for name, each in found.items()})
        velocity = Params({name: value.new_zeros(value.shape) for name, value in params.items()})
        ones = np.ones(len(cohort.clients), np.int64)
        local = LocalResult(params, ones, 0 * ones, velocity)
        return self.result(cohort, local, {"velocity": velocity} if self.keeps else {})

    def _computed(self, given: LinearHead, cohort: Cohort, mine: npt.NDArray[np.bool_]) -> Arrays:
        """Weight and bias of the blended head of the client with these examples."""
        assert self.stage.compute is not None
        features = np.asarray(cohort.features[cohort.rows[mine]], np.float32)
        if given.feature_map is not None:
            features = given.feature_map(features)
        flat = LinearHead(given.weight, given.bias)
        head = blended_head(flat, features, cohort.labels[mine], self.stage.compute, self.stage.blend)
        return {"weight": head.weight, "bias": head.bias}

    def _unmasked(self, start: Params, cohort: Cohort) -> Params:
        """The heads of a cohort, where they are trained, with no class masked that its client has."""
        from headstart.solvers.network import tensors

        if not self.plan.trains("head.bias") or not start["head.bias"].isneginf().any():
            return start
        heads = [
            unmasked(LinearHead(weight.numpy(), bias.numpy()), np.unique(cohort.labels[cohort.owners == client]))
            for client, weight, bias in zip(cohort.clients, start["head.weight"], start["head.bias"], strict=True)
        ]
        stacks = {f"head.{name}": np.stack([getattr(head, name) for head in heads]) for name in ("weight", "bias")}
        return start | tensors(stacks)


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
    from sklearn.model_selection import KFold

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
    from headstart.heads.estimators import Fed3R, FedCOF, FedNCM

    present = np.unique(labels)
    if len(present) == 1:
        return LinearHead.from_classes(n_classes, present, np.zeros((1, features.shape[1])), np.zeros(1))
    estimator = {"fedncm": FedNCM, "fed3r": Fed3R, "fedcof": FedCOF}[kind](temperature=1.0)
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


register(PersonaliseStage, Personalise)
