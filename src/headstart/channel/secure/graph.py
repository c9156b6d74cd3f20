"""Who shares secrets and masks with whom: everybody with everybody, or neighbours on a ring in random order.

Beyond 50 clients each has k neighbours, k / 2 on either side of a ring (a Harary graph), after Bell et al., "Secure
Single-Server Aggregation with (Poly)Logarithmic Overhead" (CCS 2020). The order of the ring follows from a hash of the
sum and of everyone's keys. A client's secrets are shared with itself and its neighbours, and k / 2 + 2 of these k + 1
open one: with the client itself gone or not, more than half of its neighbours.

Why that is enough, where a client that opens a seed has seen that its owner knows the same senders of parts, and all
open for one list of survivors (`agree`): a survivor's own mask comes off only if more than k / 2 of its neighbours
survive, so at least one on either side. It shares masks with these, which come off only in a total that contains them,
and so on round the ring: without help from clients, the only total that opens is that of all survivors. Where c of a
survivor's neighbours help the server, a total that contains its values also contains those of k / 2 + 1 - c others.

k is the smallest even number such that, whichever third of the clients is lost at random, every secret still opens with
a probability of 1 - 2**-20. The threshold of a sum tolerates less than a third.

The order is random to all who do not choose among many keys or lists. A server can leave out up to n - t clients, and
clients that help it can choose their keys after they have seen the others': each try is a hash. Of 1,000 clients each
has 244 neighbours; the chance that more than half of them are among the server's clients is 2**-122 if these are a
fifth of all, which no number of tries makes likely, but 2**-33 if they are a third.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt
from scipy.special import gammaln

LARGEST_CLIQUE = 50
"""Up to so many clients, everybody shares with everybody."""
_CHANCE = 2.0**-20
"""That some secret does not open though no more clients are lost than the sum tolerates."""


@dataclass(frozen=True)
class Graph:
    """The clients of a sum in the order of the ring, the neighbours of each, and how many shares open a secret."""

    ring: tuple[int, ...]
    neighbours: int
    needed: int

    @classmethod
    def of(cls, list_digest: bytes, numbers: Sequence[int], threshold: int) -> Graph:
        """Of the clients with keys; list_digest: of their list, which the order follows from."""
        count = len(numbers)
        neighbours = neighbours_of(count) if count > LARGEST_CLIQUE else count - 1
        if neighbours == count - 1:
            return cls(tuple(numbers), neighbours, threshold)
        places = sorted(range(count), key=lambda place: hashlib.sha256(list_digest + struct.pack("<q", place)).digest())
        return cls(tuple(numbers[place] for place in places), neighbours, neighbours // 2 + 2)

    def group(self, number: int) -> tuple[int, ...]:
        """Who holds shares of a client's secrets: its neighbours and itself, in rising order."""
        count = len(self.ring)
        if self.neighbours == count - 1:
            return tuple(sorted(self.ring))
        place, reach = self.ring.index(number), self.neighbours // 2
        return tuple(sorted(self.ring[(place + step) % count] for step in range(-reach, reach + 1)))


@lru_cache
def neighbours_of(count: int) -> int:
    """Neighbours of each of so many clients; all others, where fewer are too few."""
    fewer = (even for even in range(4, count - 1, 2) if count * _fails(count, even) <= _CHANCE)
    return next(fewer, count - 1)


def _fails(count: int, neighbours: int) -> float:
    """The chance that a client's secret does not open: too many of its neighbours are among the third that is lost.

    The tail of a hypergeometric law. Of a client that is lost itself, k / 2 + 2 of its k neighbours have to stay.
    """
    lost, others = (count - 1) // 3, count - 1
    bad = np.arange(neighbours // 2 - 1, min(lost, neighbours) + 1)
    ways = _log_choices(lost, bad) + _log_choices(others - lost, neighbours - bad)
    return float(np.exp(ways - _log_choices(others, np.array(neighbours))).sum())


def _log_choices(count: int, chosen: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    return np.asarray(gammaln(count + 1) - gammaln(chosen + 1) - gammaln(count - chosen + 1))
