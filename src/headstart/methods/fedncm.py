"""FedNCM: nearest class mean in one round (Legate et al., "Guiding the last layer in federated learning with
pre-trained models", NeurIPS 2023, Algorithm 1).

Travels up: the sum of the features of each class the client has, and how many there were. The server divides and scales
each mean to length one. With privacy and the cosine distance counts do not travel. Who holds which example does not
change the result.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from headstart.config.stage import ClosedFormStage
from headstart.core.statistics import ClientStatistics, Summary
from headstart.heads import LinearHead, ncm_head
from headstart.methods.closed_form import ClosedForm
from headstart.methods.registry import register


class FedNCMStage(ClosedFormStage):
    """Nearest class mean (Legate et al., NeurIPS 2023)."""

    method: Literal["fedncm"]
    distance: Literal["cosine", "euclidean"] = "cosine"


class FedNCM(ClosedForm):
    """Class sums and counts up; class means as the head."""

    @property
    def summary(self) -> Summary:
        """In directions the counts cancel: with privacy, where everything that is said has its price, they stay out."""
        return replace(super().summary, counts=self.stage.privacy is None or self.stage.distance == "euclidean")

    def solve(self, total: ClientStatistics) -> LinearHead:
        """Class means, scaled to length one unless the distance is Euclidean."""
        head = ncm_head(total, self.stage.distance)
        if total.longest is None or self.stage.distance == "cosine":
            return head
        # Distances to means of clipped features are those of features that are clipped, too.
        return replace(head, longest=total.longest)


register(FedNCMStage, FedNCM)
