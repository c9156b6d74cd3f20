"""What nodes tell of a test of the model: exact figures, or figures with noise that is accounted for.

With privacy the unit is that of the stage. An example adds at most 1 to each of the four figures, its loss as a share
of the largest that counts; where the unit is a client, it tells means over its examples instead of sums. Either way one
unit moves the four by at most 2 in Euclidean norm, with rounding a little more. One Gaussian mechanism covers all tests
of the stage.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import sqrt
from typing import Any

import numpy as np

from headstart.channel.accounting import noise_multiplier
from headstart.config.stage import ClosedForm, Privacy, Rounds
from headstart.core.message import Array, Message
from headstart.core.seeds import Seed, generator_of
from headstart.core.statistics import Floats
from headstart.errors import MessageError

SHAPES: dict[str, tuple[int, ...]] = {"figures": (4,)}
"""Examples, right answers, examples of classes that the head knows, and their loss."""

_LARGEST_LOSS = 10.0
# Of whole numbers for 1, in a secure sum; rounding moves each figure by half of one at most.
_STEPS = 2.0**24
_SENSITIVITY = 2.0 + 4 / _STEPS
_TEST = 0x7E57


@dataclass(frozen=True)
class FiguresChannel:
    """Figures of the tests of a stage between nodes and server.

    times: tests in the stage; seed: what noise is drawn from.
    """

    privacy: Privacy | None
    """Where there is none, figures are exact."""
    unit: str
    times: int
    seed: Seed

    @classmethod
    def of(cls, stage: ClosedForm | Rounds, clients: int, seed: Seed) -> FiguresChannel:
        """That of a stage with so many clients."""
        times = stage.rounds_for(clients) // stage.evaluate_every + 2  # before the first round, and after the last
        return cls(stage.privacy, "client" if stage.trains else "example", times, seed)

    @cached_property
    def deviation(self) -> float:
        """Of the noise on each figure; 0 without privacy."""
        if self.privacy is None or self.privacy.test_epsilon is None:
            return 0.0
        return _SENSITIVITY * noise_multiplier(self.privacy.test_epsilon, self.privacy.delta, self.times)

    def encode(self, examples: int, right: int, losses: Floats, survivors: int = 1) -> Message:
        """What a node tells; losses: of the examples whose class the head knows; survivors: of a secure sum, at least
        so many clients share the noise."""
        loss = float(np.minimum(losses, _LARGEST_LOSS).sum() / _LARGEST_LOSS) if self.privacy else float(losses.sum())
        figures = np.array([examples, right, len(losses), loss], np.float64)
        if self.privacy is not None and self.unit == "client":
            figures /= max(examples, 1)
        if self.privacy is not None and self.privacy.noise != "server":
            share = sqrt(survivors) if self.privacy.noise == "shared" else 1.0
            figures += self.deviation / share * generator_of(None).standard_normal(4)
        return Message({"figures": figures})

    def to_sum(self, message: Message) -> dict[str, Array]:
        """What a node adds in a secure sum; with privacy whole numbers, whose sizes nobody is told beforehand."""
        figures = message.arrays["figures"].astype(np.float64)
        return {"figures": np.rint(_STEPS * figures).astype(np.int64) if self.privacy else figures}

    def of_sum(self, total: Array) -> Floats:
        """The figures of a secure sum."""
        return total.astype(np.float64) / (_STEPS if self.privacy else 1.0)

    def read(self, message: Message) -> Floats:
        """A node's figures, checked."""
        figures = message.array("figures", "float64", (4,)).astype(np.float64)
        examples, right, known, loss = figures
        if self.privacy is None and not (0 <= right <= examples and 0 <= known <= examples <= 1e15 and loss >= 0):
            raise MessageError("its figures make no sense")
        return figures

    def finish(self, total: Floats, done: int, task: int = 0) -> tuple[float | None, float | None]:
        """Accuracy and loss of a task's figures, after so many rounds; with the server's noise where it adds it."""
        if self.privacy is not None and self.privacy.noise == "server":
            total = total + self.deviation * generator_of(self.seed, _TEST, done, task).standard_normal(4)
        examples, right, known, loss = total.tolist()
        scale = _LARGEST_LOSS if self.privacy else 1.0
        accuracy = min(max(right / examples, 0.0), 1.0) if examples > 0 else None
        return accuracy, max(scale * loss / known, 0.0) if known > 0 else None

    @property
    def promise(self) -> dict[str, Any] | None:
        """The guarantee of all tests of the stage."""
        if self.privacy is None or self.privacy.test_epsilon is None:
            return None
        privacy = self.privacy
        return {
            "epsilon": privacy.test_epsilon, "delta": privacy.delta, "unit": self.unit, "noise": privacy.noise
        }  # fmt: skip
