"""Test metrics that nodes report: exact figures, or figures with noise that is accounted for.

Without privacy nodes tell sums for every class and bin of confidence, too (`core.metrics`): macro-F1, balanced accuracy
and calibration come of them; of labels, how many scores are in each of 256 bins, of which come the area under the ROC
curve and average precision. With privacy they do not: the sums of one example would grow from 2 to √10 in norm, which
is 1.6 times the noise on the accuracy, and counts of classes with few examples would be noise alone.

With privacy the unit is that of the stage. An example adds at most 1 to each of the four figures, its loss as a share
of the largest that counts; where the unit is a client, it tells means over its examples instead of sums. Either way one
unit moves the four by at most 2 in Euclidean norm, with rounding a little more; so does an example in a client's means
that is replaced. One Gaussian mechanism covers all tests of the stage.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from math import sqrt
from typing import Any

import numpy as np

from headstart.channel.accounting import noise_multiplier
from headstart.config.stage import ClosedForm, Privacy, Rounds
from headstart.core.message import Array, Message
from headstart.core.metrics import Metrics, Tally, class_metrics, class_shapes, target_metrics, target_shapes
from headstart.core.seeds import Seed, generator_of, hiding
from headstart.core.statistics import Floats
from headstart.core.target import Target
from headstart.errors import HeadstartError, MessageError

_LARGEST_LOSS = 10.0
# Of whole numbers for 1, in a secure sum; rounding moves each figure by half of one at most.
_STEPS = 2.0**24
_SENSITIVITY = 2.0 + 4 / _STEPS
_TEST = 0x7E57


@dataclass(frozen=True)
class FiguresChannel:
    """Figures of the tests of a stage between nodes and server.

    times: tests in the stage; seed: what noise is drawn from; n_classes: C, or how many targets there are.
    """

    privacy: Privacy | None
    """Where there is none, figures are exact."""
    unit: str
    times: int
    seed: Seed
    n_classes: int
    target: Target = "classes"

    @classmethod
    def of(
        cls, stage: ClosedForm | Rounds, clients: int, seed: Seed, n_classes: int, target: Target = "classes"
    ) -> FiguresChannel:
        """That of a stage with so many clients and classes."""
        times = stage.rounds_for(clients) // stage.evaluate_every + 2  # before the first round, and after the last
        return cls(stage.privacy, "client" if stage.trains else "example", times, seed, n_classes, target)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Names and shapes of what a node tells; figures: examples, right answers, examples of classes that the head
        knows, and their loss."""
        if self.target != "classes":
            return target_shapes(self.n_classes, self.target)
        return {"figures": (4,), **({} if self.privacy else class_shapes(self.n_classes))}

    @cached_property
    def deviation(self) -> float:
        """Of the noise on each figure; 0 without privacy."""
        if self.privacy is None or self.privacy.test_epsilon is None:
            return 0.0
        return _SENSITIVITY * noise_multiplier(self.privacy.test_epsilon, self.privacy.delta, self.times)

    def encode(self, examples: int, right: int, losses: Floats, tally: Tally, survivors: int = 1) -> Message:
        """What a node tells; losses: of the examples whose class the head knows; tally: of all, by class and by
        confidence; survivors: of a secure sum, at least so many clients share the noise."""
        loss = float(losses.sum())
        if self.privacy is not None:  # a loss that is no number, of a model that is none, counts as the largest
            bounded = np.where(np.isfinite(losses), np.clip(losses, 0.0, _LARGEST_LOSS), _LARGEST_LOSS)
            loss = float(bounded.sum() / _LARGEST_LOSS)
        figures = np.array([examples, right, len(losses), loss], np.float64)
        if self.privacy is not None and self.unit == "client":
            figures /= max(examples, 1)
        if self.privacy is not None and self.privacy.noise != "server":
            share = sqrt(survivors) if self.privacy.noise == "shared" else 1.0
            figures += self.deviation / share * generator_of(None).standard_normal(4)
        return Message({"figures": figures, **({} if self.privacy else tally)})

    def encode_targets(self, tally: Tally) -> Message:
        """What a node tells of a test on targets that are no classes; without privacy, for errors have no bound."""
        if self.privacy is not None:
            raise HeadstartError(f"with privacy a node does not test {self.target}: its errors have no largest value")
        return Message(tally)

    def to_sum(self, message: Message) -> dict[str, Array]:
        """What a node adds in a secure sum; with privacy whole numbers, whose sizes are not known beforehand."""
        arrays = {name: array.astype(np.float64) for name, array in message.arrays.items()}
        if self.privacy is None:
            return dict(arrays)
        return {name: np.rint(_STEPS * array).astype(np.int64) for name, array in arrays.items()}

    def of_sum(self, total: Mapping[str, Array]) -> dict[str, Floats]:
        """The sum over clients, of a secure sum."""
        return {name: array.astype(np.float64) / (_STEPS if self.privacy else 1.0) for name, array in total.items()}

    def read(self, message: Message) -> dict[str, Floats]:
        """What a node tells, checked."""
        found = {n: message.array(n, "float64", shape).astype(np.float64) for n, shape in self.shapes.items()}
        if self.privacy is None and not (_possible if self.target == "classes" else _possible_errors)(found):
            raise MessageError("its figures make no sense")
        return found

    def finish(self, total: Tally, done: int, task: int = 0) -> tuple[float | None, float | None, Metrics]:
        """Accuracy, loss and the other metrics of the summed counts of a task, after so many rounds; with the
        server's noise where it adds it."""
        figures = total["figures"]
        if self.privacy is not None and self.privacy.noise == "server":
            seed = hiding(self.seed, [figures])
            figures = figures + self.deviation * generator_of(seed, _TEST, done, task).standard_normal(4)
        examples, right, known, loss = figures.tolist()
        scale = _LARGEST_LOSS if self.privacy else 1.0
        accuracy = min(max(right / examples, 0.0), 1.0) if examples > 0 and self.target != "regression" else None
        more = self.metrics({} if self.privacy else total)
        return accuracy, max(scale * loss / known, 0.0) if known > 0 else None, more

    def metrics(self, total: Tally) -> Metrics:
        """The metrics beside accuracy and loss of what was added up; None for each of nothing."""
        return class_metrics(total) if self.target == "classes" else target_metrics(total, self.target)

    @property
    def guarantee(self) -> dict[str, Any] | None:
        """The guarantee of all tests of the stage."""
        if self.privacy is None or self.privacy.test_epsilon is None:
            return None
        privacy = self.privacy
        example = {"example_epsilon": privacy.test_epsilon} if self.unit == "client" else {}  # its part in a mean
        return {
            "epsilon": privacy.test_epsilon, "delta": privacy.delta, "unit": self.unit, "noise": privacy.noise,
            **example,
        }  # fmt: skip


def _possible(found: Tally) -> bool:
    """Whether these sums are possible for any test set."""
    (examples, right, known, loss), (true, predicted, both) = found["figures"], found["classes"]
    size, confidence, hits = found["bins"]
    whole = np.isclose([true.sum(), predicted.sum(), both.sum(), size.sum()], [examples, examples, right, examples])
    return bool(
        0 <= right <= examples <= 1e15
        and 0 <= known <= examples
        and loss >= 0
        and (whole[:3].all() and (whole[3] or not size.any()))
        and min(both.min(initial=0), hits.min(), confidence.min()) >= 0
        and (both <= np.minimum(true, predicted)).all()
        and (np.maximum(hits, confidence) <= size * (1 + 1e-9)).all()
    )


def _possible_errors(found: Tally) -> bool:
    """Whether a test on targets that are no classes has these sums."""
    (examples, right, known, loss), outputs = found["figures"], found["outputs"]
    possible = 0 <= right <= examples <= 1e15 and known == examples and loss >= 0 and (outputs[1:] >= 0).all()
    if "ranks" in found:
        true, predicted, both, _ = outputs
        possible &= bool((found["ranks"] >= 0).all() and (both <= np.minimum(true, predicted)).all())
        possible &= np.allclose(found["ranks"].sum(axis=2), [true, examples - true])
    return bool(possible)
