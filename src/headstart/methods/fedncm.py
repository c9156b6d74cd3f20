"""FedNCM: nearest class mean in one round (Legate et al., "Guiding the last layer in federated learning with
pre-trained models", NeurIPS 2023, Algorithm 1).

Travels up: the sum of the features of each class the client has, and how many there were. The server divides and scales
each mean to length one. With privacy and the cosine distance counts do not travel. Who holds which example does not
change the result.

``centres = k`` finds several means of each class by k-means: clients count and sum their examples of a class by centre,
the server divides, sends the new centres down, and asks again. What travels up is the statistics of k times as many
classes, in every pass.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from pydantic import PositiveInt

from headstart.config.stage import ClosedFormStage
from headstart.core.message import Message
from headstart.core.statistics import ClientStatistics, Ints, Summary, shorten
from headstart.errors import MessageError
from headstart.heads import LinearHead, ncm_head
from headstart.heads.centres import nearest, split
from headstart.methods.base import Received
from headstart.methods.closed_form import ClosedForm, ClosedFormState
from headstart.methods.registry import register
from headstart.solvers.cohort import Cohort


class FedNCMStage(ClosedFormStage):
    """Nearest class mean (Legate et al., NeurIPS 2023)."""

    method: Literal["fedncm"]
    distance: Literal["cosine", "euclidean"] = "cosine"
    """By which the nearest class mean is chosen."""
    centres: PositiveInt = 1
    """Of each class, found by k-means; an example belongs to the class of the nearest."""
    iterations: PositiveInt = 10
    """Of k-means, where there are several centres: every client participates once in each, after twice at first."""

    @property
    def passes(self) -> int:
        """For class means, for the first centres, and for each iteration."""
        return super().passes + (1 + self.iterations if self.centres > 1 else 0)


class FedNCM(ClosedForm):
    """Class sums and counts up; class means as the head."""

    @property
    def summary(self) -> Summary:
        """In directions the counts cancel: with privacy, where everything that is sent has its price, they stay out.

        k-means needs the centres themselves. A centre is a class of its own.
        """
        stage, summary = self.stage, super().summary
        counts = stage.privacy is None or stage.distance == "euclidean" or stage.centres > 1
        return replace(summary, n_classes=summary.n_classes * stage.centres, counts=counts)

    def broadcast_arrays(self, state: ClosedFormState, number: int) -> dict[str, npt.NDArray[Any]]:
        """The centres after the pass before."""
        parts = state.parts if state.number < number else state.earlier
        if not number or not parts:
            return {}
        known = self._total(ClosedFormState(parts)).pooled()
        means = known.sums / known.counts[:, None]
        return {"centres": means.astype(np.float32), "numbers": known.labels}

    def check_received(self, message: Message, round: int) -> None:
        """The centres are of classes that there are, each once."""
        if self.stage.centres == 1 or "centres" not in message.arrays:
            super().check_received(message, round)
            return
        numbers = message.array("numbers", "int64", (None,))
        message.array("centres", "float32", (len(numbers), None))
        places = self.summary.n_classes
        if not np.isin(numbers, np.arange(places)).all() or len(np.unique(numbers)) < len(numbers):
            raise MessageError(f"the numbers of the centres are not some of those from 0 to {places - 1}")

    def labels(self, cohort: Cohort, received: Received) -> Ints:
        """The number of each example's centre: the first of its class, a random one, then the nearest."""
        given, k, number = received[""], self.stage.centres, self.pass_of(received.round)
        if k == 1 or "centres" not in given:
            return np.asarray(cohort.labels * k)
        rows, ones = given["centres"], np.ones(len(given["centres"]), np.int64)
        known = ClientStatistics(self.summary.n_classes, given["numbers"].astype(np.int64), ones, rows)
        features = cohort.features[cohort.rows]
        features = features if cohort.clip is None else shorten(features, cohort.clip)
        if number == 1:
            return split(features, cohort.labels, known, k, self.context.seed[0])
        return nearest(features, cohort.labels, known, k)

    def solve(self, total: ClientStatistics) -> LinearHead:
        """Class means, scaled to length one unless the distance is Euclidean."""
        head = replace(ncm_head(total, self.stage.distance), centres=self.stage.centres)
        if total.longest is None or self.stage.distance == "cosine":
            return head
        # Distances to means of clipped features are those of features that are clipped, too.
        return replace(head, longest=total.longest)


register(FedNCMStage, FedNCM)
