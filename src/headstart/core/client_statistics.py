"""What a client may send of its features: class counts and sums; where asked, second moments, directions, a sketch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from math import inf

import numpy as np
import numpy.typing as npt
from scipy import linalg

from headstart.core.directions import nystrom, sketching_basis
from headstart.core.message import Message, layout_nbytes
from headstart.core.moments import (
    Features,
    Floats,
    Ints,
    Moments,
    moments_length,
    segment_sums,
    unpacked,
    zero_moments,
    zero_sketch,
)
from headstart.errors import HeadstartError

# Rows that are looked at together.
_BLOCK = 1 << 13


@dataclass(frozen=True, eq=False)
class ClientStatistics:
    """Statistics of the features of one client, or of many merged.

    A row is about one class of one client, or of one random part of that.

    labels: [R] the class of each row; counts: [R] examples behind it; sums: [R, d] sum of their features;
    moments: the Gram matrix XᵀX [d, d], its diagonal [d] or its trace [1], of all the examples; None where no method
    asked. directions: [Q, d] the largest of each client's scatter around its rows' means, UᵀU; None likewise.
    sketch: ΩᵀXᵀX [l, d] of all the examples, Ω being everybody's (`sketching_basis`), from which directions of their
    scatter can be found where clients' own do not add up; None likewise.
    longest: no feature vector behind them is longer, where they were clipped. noise_floor: the largest eigenvalue that
    noise alone gives the Gram matrix, where there is noise. counted: whether clients send their counts; where they do
    not, every row counts 1.
    """

    n_classes: int
    labels: Ints
    counts: Ints
    sums: Features
    moments: Floats | None = None
    longest: float | None = None
    noise_floor: float | None = None
    counted: bool = True
    directions: Features | None = None
    sketch: Floats | None = None

    @property
    def dim(self) -> int:
        """Feature dimension d."""
        return int(self.sums.shape[1])

    def around_means(self) -> Floats:
        """Second moments [d] or [1] around the means of the rows, from a diagonal or a trace around zero.

        Rounding and noise may leave them below zero.
        """
        assert self.moments is not None
        squares = np.zeros(self.dim)
        for start in range(0, len(self.sums), _BLOCK):  # in float64 some rows at a time, added up in their order
            sums, counts = self.sums[start : start + _BLOCK], np.maximum(self.counts[start : start + _BLOCK], 1)
            left = np.vstack([squares, sums], dtype=np.float64)
            right = np.vstack([np.ones(self.dim), left[1:] / counts[:, None]])
            squares = np.einsum("rd,rd->d", left, right)
        return self.moments - self.folded(squares)

    def sketched_directions(self) -> ClientStatistics:
        """With the directions of the scatter around the means of the rows that the sketch tells, in its place.

        No larger than the scatter, whose trace is known: noise may have made them so.
        """
        if self.sketch is None:
            return self
        basis, sums = sketching_basis(self.dim, len(self.sketch)), self.sums.astype(np.float64, copy=False)
        around = self.sketch - (sums @ basis).T @ (sums / np.maximum(self.counts, 1)[:, None])
        found = nystrom(basis, around.T, self.noise_floor or 0.0)
        whole, kept = max(float(self.around_means().sum()), 0.0), float(np.vdot(found, found))
        return replace(self, directions=found * np.sqrt(min(1.0, whole / kept)) if kept else found, sketch=None)

    def folded(self, squares: Floats) -> Floats:
        """Squares [d], one for each dimension, as the second moments have them: a trace is their sum."""
        return squares.sum(keepdims=True) if self.moments is not None and len(self.moments) == 1 else squares

    def merge(self, *others: ClientStatistics) -> ClientStatistics:
        """All rows side by side, moments added: associative, and commutative up to the order of the rows."""
        if not others:
            return self
        everyone = (self, *others)
        moments = [each.moments for each in everyone if each.moments is not None]
        directions = [each.directions for each in everyone if each.directions is not None]
        sketches = [each.sketch for each in everyone if each.sketch is not None]
        return ClientStatistics(
            self.n_classes,
            np.concatenate([each.labels for each in everyone]),
            np.concatenate([each.counts for each in everyone]),
            np.concatenate([each.sums for each in everyone if len(each.sums)] or [self.sums]),
            np.sum(moments, axis=0) if moments else None,
            everyone[-1].longest,
            everyone[-1].noise_floor,
            everyone[-1].counted,
            np.concatenate(directions) if directions else None,
            np.sum(sketches, axis=0) if sketches else None,
        )

    def pooled(self) -> ClientStatistics:
        """One row per class present, in class order: what a sum over all clients knows. Rows are added in order."""
        present, segments = np.unique(self.labels, return_inverse=True)
        counts = np.zeros(len(present), np.int64)
        np.add.at(counts, segments, self.counts)
        order = np.argsort(segments, kind="stable")
        sums, *_ = segment_sums(self.sums, order, segments[order], len(present))
        return replace(self, labels=present, counts=counts, sums=sums)

    def present(self) -> tuple[ClientStatistics, Ints]:
        """The rows with a count of 1 or more, and their places: with noise, a class below that counts as absent."""
        kept = np.flatnonzero(self.counts >= 1)
        return self.rows(kept), kept

    def rows(self, kept: Ints) -> ClientStatistics:
        """Some of the rows; second moments are those of all."""
        if len(kept) == len(self.labels):
            return self
        return replace(self, labels=self.labels[kept], counts=self.counts[kept], sums=self.sums[kept])

    def solvable(self) -> ClientStatistics:
        """What a solve can use: as they are, or, of noisy ones, classes with a positive count and a possible Gram
        matrix.

        Without noise, the Gram matrix less Σ_c N_c μ_c μ_cᵀ is the scatter within the classes, which has no negative
        eigenvalue. With noise its eigenvalues are raised to ``noise_floor``, below which they are noise: the Gram
        matrix, the one with a column of ones, and the scatter itself are then all positive semi-definite. Without
        counts, those of the Gram matrix are raised.
        """
        if self.noise_floor is None:
            return self
        total, _ = self.present()
        if not len(total.labels):
            raise HeadstartError("the noise hides every class; raise privacy.epsilon, or have more examples")
        if total.moments is None or total.moments.ndim != 2:
            return total
        between = np.zeros_like(total.moments)
        if total.counted:
            between = (total.sums / total.counts[:, None]).T @ total.sums
        values, vectors = linalg.eigh(total.moments - between)
        return replace(total, moments=between + (vectors * np.maximum(values, self.noise_floor)) @ vectors.T)

    def vector(self) -> dict[str, Floats]:
        """Counts and sums of every class, present or not, second moments and sketch: what a secure sum adds."""
        total = self.pooled()
        counts, sums = np.zeros(self.n_classes), np.zeros((self.n_classes, self.dim))
        counts[total.labels], sums[total.labels] = total.counts, total.sums
        moments = total.moments
        if moments is not None and moments.ndim == 2:
            moments = moments[np.triu_indices(self.dim)]
        found = {"counts": counts, "sums": sums, "moments": moments, "sketch": total.sketch}
        return {name: v for name, v in found.items() if v is not None and (self.counted or name != "counts")}

    @classmethod
    def from_vector(cls, values: Mapping[str, Floats], moments: Moments | None, every_class: bool) -> ClientStatistics:
        """As the statistics of one client with everybody's examples, from the sum of what `vector` made."""
        sums, counted = values["sums"], "counts" in values
        counts = np.rint(values["counts"]).astype(np.int64) if counted else np.ones(len(sums), np.int64)
        labels = np.arange(len(counts)) if every_class else np.flatnonzero(counts > 0)
        second = values.get("moments")
        if second is not None and moments == "full":
            second = unpacked(second, sums.shape[1])
        sketch = values.get("sketch")
        return cls(len(counts), labels, counts[labels], sums[labels], second, counted=counted, sketch=sketch)

    def to_message(self, precise: bool = False, noisy: bool = False) -> Message:
        """What travels: present classes only; class sums in float32, or in float64 where they are to be precise.

        A Gram matrix travels in float64, and so do its sums, as its upper triangle: the solve subtracts them from each
        other, so that rounding to float32 makes a badly conditioned Gram matrix indefinite. A triangle in float64 costs
        what the papers count for the full square in float32. A diagonal or a trace travels as what it is around the
        means, from which nothing is subtracted any more (below zero it is rounding, unless it is ``noisy``), and in
        float64, since those of clients that reply together are added before they are rounded, and so does a sketch.
        """
        full = self.moments is not None and self.moments.ndim == 2
        precision = sums_dtype(precise or full)
        with np.errstate(over="ignore"):  # checked below, with a sentence
            sums = self.sums.astype(precision)
        if not np.isfinite(sums).all():
            raise HeadstartError(f"class sums do not fit into {precision}; scale the features down")
        arrays: dict[str, npt.NDArray[np.generic]] = {
            "labels": self.labels.astype(np.int32),
            **({"counts": self.counts.astype(np.int32)} if self.counted else {}),
            "sums": sums,
        }
        if self.moments is not None and full:
            arrays["moments"] = self.moments[np.triu_indices(self.dim)]
        elif self.moments is not None:
            around = self.around_means()
            arrays["within"] = around if noisy else np.maximum(around, 0)
        if self.directions is not None:
            arrays["directions"] = self.directions.astype(np.float32)
        if self.sketch is not None:
            arrays["sketch"] = self.sketch
        return Message(arrays)


@dataclass(frozen=True)
class Summary:
    """What the clients of a closed form send of their features."""

    n_classes: int
    dim: int
    """Length of the vectors that are summed."""
    moments: Moments | None = None
    rows: bool = False
    """Whether the server keeps every client's rows, instead of adding them up."""
    by_row: bool = False
    """Whether the head depends on every client's rows, and not on their sums alone."""
    means_per_client: int = 1
    """Rows that a client may send of a class."""
    longest: float = inf
    """No vector that is summed is longer, whatever the features."""
    counts: bool = True
    """Whether clients send how many examples of a class they have."""
    rank: int = 0
    """Directions of its scatter that a client may send."""
    sketch: int = 0
    """Rows of a sketch that a client sends, whose sum over clients tells as many directions of their scatter."""
    kept: bool = False
    """Whether the server keeps the statistics of every client apart."""

    def empty(self) -> ClientStatistics:
        """Nothing received yet."""
        none, nothing = np.zeros(0, np.int64), np.zeros((0, self.dim))
        second, sketch = zero_moments(self.dim, self.moments), zero_sketch(self.dim, self.sketch)
        directions = nothing if self.rank else None
        return ClientStatistics(
            self.n_classes, none, none, nothing, second, counted=self.counts, directions=directions, sketch=sketch
        )


@cache
def message_nbytes(
    rows: int, dim: int, moments: Moments | None, counted: bool = True, directions: int | None = None, sketch: int = 0
) -> int:
    """Bytes of the message of a client that speaks of so many rows."""
    layout: dict[str, tuple[str, tuple[int, ...]]] = {
        "labels": ("int32", (rows,)),
        **({"counts": ("int32", (rows,))} if counted else {}),
        "sums": (sums_dtype(moments == "full"), (rows, dim)),
    }
    if moments is not None:
        layout["moments" if moments == "full" else "within"] = ("float64", (moments_length(dim, moments),))
    if directions is not None:
        layout["directions"] = ("float32", (directions, dim))
    if sketch:
        layout["sketch"] = ("float64", (min(sketch, dim), dim))
    return layout_nbytes(layout)


def sums_dtype(precise: bool) -> str:
    """Of the sums in a message."""
    return "float64" if precise else "float32"
