"""What a client may say about its features: class counts and sums; where asked, second moments and directions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from math import inf
from typing import Literal

import numpy as np
import numpy.typing as npt
from scipy import linalg, sparse

from headstart.core.directions import directions_by_client, told_directions
from headstart.core.message import Message, layout_nbytes
from headstart.errors import HeadstartError, MessageError

Floats = npt.NDArray[np.float64]
Features = npt.NDArray[np.floating]
Ints = npt.NDArray[np.int64]
Moments = Literal["full", "diagonal", "trace"]
Transform = Callable[[Features], Features]

# Sums alone are fastest in blocks that stay in the processor's cache; products of matrices want larger ones.
_BLOCK_BYTES = 4 << 20
_BLOCK_BYTES_OF_MOMENTS = 32 << 20
# Features beyond this are no features: their squares, added up over all clients, must stay within range.
_LARGEST_FEATURE = 1e15
# Bounds that exact sums keep are checked with room for sums that were rounded to float32.
_ROUNDING = 1e-6


@dataclass(frozen=True, eq=False)
class ClientStatistics:
    """Statistics of the features of one client, or of many merged.

    A row is what one client (or one random part of a client's class) says about one class.

    labels: [R] the class of each row; counts: [R] examples behind it; sums: [R, d] sum of their features;
    moments: the Gram matrix XᵀX [d, d], its diagonal [d] or its trace [1], of all the examples; None where no method
    asked. directions: [Q, d] the largest of each client's scatter around its rows' means, UᵀU; None likewise.
    longest: no feature vector behind them is longer, where they were clipped. noise_floor: the largest eigenvalue that
    noise alone gives the Gram matrix, where there is noise. counted: whether clients say their counts; where they do
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

    @classmethod
    def empty(
        cls, n_classes: int, dim: int, moments: Moments | None = None, counted: bool = True, rank: int = 0
    ) -> ClientStatistics:
        """Nothing heard yet."""
        none, nothing = np.zeros(0, np.int64), np.zeros((0, dim))
        second, directions = _zero_moments(dim, moments), nothing if rank else None
        return cls(n_classes, none, none, nothing, second, counted=counted, directions=directions)

    @property
    def dim(self) -> int:
        """Feature dimension d."""
        return int(self.sums.shape[1])

    def around_means(self) -> Floats:
        """Second moments [d] or [1] around the means of the rows, from a diagonal or a trace around zero.

        Rounding and noise may leave them below zero.
        """
        assert self.moments is not None
        sums = self.sums.astype(np.float64, copy=False)
        return self.moments - self.folded(np.einsum("rd,rd->d", sums, sums / np.maximum(self.counts, 1)[:, None]))

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
        )

    def pooled(self) -> ClientStatistics:
        """One row per class present, in class order: what a sum over all clients knows. Rows are added in order."""
        present, segments = np.unique(self.labels, return_inverse=True)
        counts = np.zeros(len(present), np.int64)
        np.add.at(counts, segments, self.counts)
        order = np.argsort(segments, kind="stable")
        sums, _ = _segment_sums(self.sums, order, segments[order], len(present))
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
        """Counts and sums of every class, present or not, and the second moments: what a secure sum adds."""
        total = self.pooled()
        counts, sums = np.zeros(self.n_classes), np.zeros((self.n_classes, self.dim))
        counts[total.labels], sums[total.labels] = total.counts, total.sums
        moments = total.moments
        if moments is not None and moments.ndim == 2:
            moments = moments[np.triu_indices(self.dim)]
        found = {"counts": counts, "sums": sums, "moments": moments}
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
        return cls(len(counts), labels, counts[labels], sums[labels], second, counted=counted)

    def to_message(self, precise: bool = False, noisy: bool = False) -> Message:
        """What travels: present classes only; class sums in float32, or in float64 where they are to be precise.

        A Gram matrix travels in float64, and so do its sums, as its upper triangle: the solve subtracts them from each
        other, so that rounding to float32 makes a badly conditioned Gram matrix indefinite. A triangle in float64 costs
        what the papers count for the full square in float32. A diagonal or a trace travels as what it is around the
        means, from which nothing is subtracted any more (below zero it is rounding, unless it is ``noisy``), and in
        float64, since those of clients that answer together are added before they are rounded.
        """
        full = self.moments is not None and self.moments.ndim == 2
        precision = _sums_dtype(precise or full)
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
        return Message(arrays)

    @classmethod
    def from_message(
        cls,
        message: Message,
        n_classes: int,
        dim: int,
        moments: Moments | None,
        *,
        every_class: bool = False,
        noisy: bool = False,
        rows_per_class: int = 1,
        longest: float = inf,
        counted: bool = True,
        precise: bool = False,
        directions: int = 0,
    ) -> ClientStatistics:
        """Read and check what a client sent, or raise `MessageError` with what is wrong.

        ``every_class``: there is a row for every class, present or not. ``noisy``: clients added noise, and nothing is
        impossible. ``rows_per_class``: rows that a class may have. ``longest``: no feature vector is longer.
        ``counted``: the counts are sent. ``precise``: in float64. ``directions``: how many there may be; none are read
        where there may be none.
        """
        labels = message.array("labels", "int32", (None,)).astype(np.int64)
        counts = np.ones(len(labels), np.int64)
        if counted:
            counts = message.array("counts", "int32", (len(labels),)).astype(np.int64)
        sums = message.array("sums", _sums_dtype(precise or moments == "full"), (len(labels), dim))
        if len(labels) and (labels.min() < 0 or labels.max() >= n_classes):
            raise MessageError(f"class labels must lie between 0 and {n_classes - 1}")
        if (often := np.bincount(labels, minlength=1)).max() > rows_per_class:
            raise MessageError(f"class {often.argmax()} is sent {often.max()} times, more than {rows_per_class}")
        everything = np.tile(np.arange(n_classes), max(1, len(labels) // n_classes))
        if every_class and not np.array_equal(labels, everything):
            raise MessageError("with privacy every class is sent, in order, present or not")
        if not (every_class and noisy) and counts.min(initial=1) < (least := 0 if every_class else 1):
            raise MessageError(f"a class is sent with a count below {least}")
        examples = np.maximum(np.abs(counts), 1)
        if (np.abs(sums).max(axis=1, initial=0) > _LARGEST_FEATURE * examples).any():
            raise MessageError(f"a class sum is larger than features of {_LARGEST_FEATURE:.0e} make it")
        second = None
        if moments is not None:
            name = "moments" if moments == "full" else "within"
            second = message.array(name, "float64", (_moments_length(dim, moments),)).astype(np.float64)
            if np.abs(second).max(initial=0) > _LARGEST_FEATURE**2 * examples.sum() * dim:
                raise MessageError(f"a sum of squares is larger than features of {_LARGEST_FEATURE:.0e} make it")
        received = cls(n_classes, labels, counts, sums.astype(sums.dtype, copy=False), second, counted=counted)
        if second is not None and moments == "full":
            received = replace(received, moments=unpacked(second, dim))
        elif second is not None:
            if not noisy and second.min(initial=0.0) < 0:
                raise MessageError("a sum of squares is negative")
            around_zero = second - received.around_means()  # of the means themselves
            alone = counted and not noisy and counts.max(initial=0) <= 1
            if alone and second.sum() > 1e-9 * around_zero.sum() + np.finfo(np.float32).tiny:
                raise MessageError("a scatter around the means is sent, and no class has two examples to differ")
            received = replace(received, moments=second + around_zero)
        if not noisy:
            received._refuse_impossible(longest)
        return received._with_directions(message, directions) if directions else received

    def _with_directions(self, message: Message, most: int) -> ClientStatistics:
        """With the directions of a message; more than were asked for, or larger ones than the scatter, are refused."""
        found = message.array("directions", "float32", (None, self.dim)).astype(np.float32, copy=False)
        if len(found) > (most := min(most, int(self.counts.sum()) - len(self.labels))):
            raise MessageError(f"{len(found)} directions are sent, more than {most}")
        within, squares = self.around_means(), self.folded(np.square(found, dtype=np.float64).sum(axis=0))
        # Of the sums, too, and of the largest direction: features that do not vary have a scatter of rounding.
        rounding = _ROUNDING * within + 1e-9 * (self.moments + within.sum()) + np.finfo(np.float32).tiny
        if (squares > within + rounding).any():
            raise MessageError("the directions are larger than the scatter that they are a part of")
        return replace(self, directions=found)

    def _refuse_impossible(self, longest: float) -> None:
        """Raise `MessageError` where no feature vectors of at most this length have such statistics.

        By Cauchy–Schwarz |G_ij| ≤ √(G_ii G_jj) and Σ_r s_rj²/n_r ≤ G_jj over the rows r; by the triangle inequality
        ‖s_r‖ ≤ n_r · longest and tr G ≤ N · longest². Without counts only the first of these can be looked at. What
        passes can still be false.
        """
        counts, examples = self.counts, int(self.counts.sum())
        squares = None if self.moments is None else self.moments.diagonal() if self.moments.ndim == 2 else self.moments
        if longest < inf and self.counted:
            lengths, room = np.linalg.norm(self.sums.astype(np.float64), axis=1), (1 + _ROUNDING) * longest
            if (far := lengths > counts * room + np.finfo(np.float32).tiny).any():
                row = far.argmax()
                raise MessageError(
                    f"the sum of class {self.labels[row]} has length {lengths[row]:.3g}: "
                    f"{counts[row]} examples no longer than {longest:g} have none so long"
                )
            if squares is not None and squares.sum() > examples * room**2:
                raise MessageError(f"the sums of squares are larger than examples no longer than {longest:g} make them")
        if self.moments is None or squares is None or self.moments.ndim == 1:
            return
        if squares.min(initial=0.0) < 0:
            raise MessageError("a sum of squares is negative")
        # Squares of the smallest numbers are zero, and their products with other features are not.
        squares = (1 + _ROUNDING) * (squares + examples * np.finfo(np.float64).tiny)
        least = np.einsum("rd,rd->d", self.sums, self.sums / np.maximum(counts, 1)[:, None])
        if self.counted and (least > squares).any():
            raise MessageError("the class sums are larger than the sums of squares allow: no features have both")
        roots = np.sqrt(squares)
        if (np.abs(self.moments) > np.outer(roots, roots)).any():
            raise MessageError("the Gram matrix has an entry larger than its diagonal allows: no features have it")


@dataclass(frozen=True)
class Summary:
    """What the clients of a closed form say of their features."""

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
    """Whether clients say how many examples of a class they have."""
    rank: int = 0
    """Directions of its scatter that a client may send."""
    kept: bool = False
    """Whether the server keeps what every client says, by client."""

    def empty(self) -> ClientStatistics:
        """Nothing heard yet."""
        return ClientStatistics.empty(self.n_classes, self.dim, self.moments, self.counts, self.rank)


def summarise(
    features: Features,
    labels: Ints,
    n_classes: int,
    *,
    clients: Ints | None = None,
    parts: Ints | None = None,
    moments: Moments | None = None,
    rows: Ints | None = None,
    transform: Transform | None = None,
    rank: int = 0,
    seed: tuple[int, ...] = (),
    min_examples: int = 1,
) -> tuple[ClientStatistics, Ints]:
    """Statistics of many clients at once, and the client [R] behind each row; rows are in client, class, part order.

    features: [n, d]; labels, clients, parts: [m], about ``features[rows]``; by default all rows belong to client 0.
    ``parts`` numbers random parts of a client's class, each of which speaks for itself; ``transform`` is a map
    [n, d] → [n, D] applied to the features first. Accumulates in float64, in blocks, so that memory does not grow with
    the examples. Of each client's scatter around its rows' means, the largest ``rank`` directions are told, one for
    ``min_examples`` at most; they depend on the seed and on the client alone.
    """
    rows = np.arange(len(features)) if rows is None else rows
    clients = np.zeros(len(rows), np.int64) if clients is None else clients
    parts = np.zeros(len(rows), np.int64) if parts is None else parts
    width = int(parts.max(initial=0)) + 1
    keys, segments, counts = np.unique(
        (clients * n_classes + labels) * width + parts, return_inverse=True, return_counts=True
    )
    order = np.argsort(segments, kind="stable")
    with np.errstate(over="ignore", invalid="ignore"):  # checked below, with a sentence
        sums, second = _segment_sums(features, rows[order], segments[order], len(keys), moments, transform)
    for name, values in (("features", sums), ("squares of the features", second)):
        if values is not None and not np.isfinite(values).all():
            raise HeadstartError(f"the {name} hold NaN, infinity or values too large to add up; clean or scale them")
    who, what = np.divmod(keys // width, n_classes)
    found = ClientStatistics(n_classes, what, counts.astype(np.int64), sums, second)
    if not rank:
        return found, who
    means, change = sums / counts[:, None], transform or (lambda values: values)

    def deviations(part: slice) -> Floats:
        return np.asarray(change(features[rows[order[part]]]) - means[segments[order[part]]])

    holders, starts = np.unique(who, return_index=True)
    examples, dim = np.add.reduceat(counts, starts), sums.shape[1]
    told = told_directions(examples, np.diff(np.append(starts, len(who))), rank, dim, min_examples)
    return replace(found, directions=directions_by_client(deviations, holders, examples, told, dim, seed)), who


def random_parts(
    labels: Ints, clients: Ints, means_per_client: int, seed: tuple[int, ...], min_examples: int = 1
) -> Ints | None:
    """Part [n] of each example: up to ``means_per_client`` random parts of each client's class; None for one part.

    As in FedCOF's code: a class of fewer than four examples stays whole, a part has at least two examples (or
    ``min_examples``), and the last part takes the remainder. A client's parts depend on the seed and on the client
    alone.
    """
    if means_per_client == 1:
        return None
    parts, least = np.zeros(len(labels), np.int64), max(2, min_examples)
    by_client = np.argsort(clients, kind="stable")
    bounds = np.flatnonzero(np.diff(clients[by_client])) + 1
    for members in np.split(by_client, bounds):
        rng = np.random.default_rng([0x9A27, *seed, int(clients[members[0]])])
        shuffled = rng.permutation(members)
        shuffled = shuffled[np.argsort(labels[shuffled], kind="stable")]
        sizes = np.bincount(labels[shuffled])[labels[shuffled]]
        rank = np.arange(len(shuffled)) - np.searchsorted(labels[shuffled], labels[shuffled])
        wanted = np.maximum(np.minimum(means_per_client, sizes // least), 1)
        parts[shuffled] = np.minimum(rank // (sizes // wanted), wanted - 1)
    return parts


@cache
def message_nbytes(
    rows: int, dim: int, moments: Moments | None, counted: bool = True, directions: int | None = None
) -> int:
    """Bytes of the message of a client that speaks of so many rows."""
    layout: dict[str, tuple[str, tuple[int, ...]]] = {
        "labels": ("int32", (rows,)),
        **({"counts": ("int32", (rows,))} if counted else {}),
        "sums": (_sums_dtype(moments == "full"), (rows, dim)),
    }
    if moments is not None:
        layout["moments" if moments == "full" else "within"] = ("float64", (_moments_length(dim, moments),))
    if directions is not None:
        layout["directions"] = ("float32", (directions, dim))
    return layout_nbytes(layout)


def _segment_sums(
    features: Features,
    rows: Ints,
    segments: Ints,
    n_segments: int,
    moments: Moments | None = None,
    transform: Transform | None = None,
) -> tuple[Floats, Floats | None]:
    """Sums [S, d] of ``features[rows]`` by (sorted) segment, and their second moments, in float64, block by block.

    Each segment is added up in the order of its rows, whatever the blocks: a client alone and the same client among
    thousands give the same bits.
    """
    transform = transform or (lambda values: values)
    dim = transform(features[:1]).shape[1]
    sums = np.zeros((n_segments, dim))
    second = _zero_moments(dim, moments)
    step = max(1, (_BLOCK_BYTES_OF_MOMENTS if moments == "full" else _BLOCK_BYTES) // (8 * dim))
    # One for all blocks: large memory that is asked for anew is cleared by the operating system each time.
    room = np.empty((min(step, len(rows)) + 1, dim))
    for start in range(0, len(rows), step):
        members = segments[start : start + step]
        first, last = int(members[0]), int(members[-1])
        block = room[: len(members) + 1]
        block[0] = sums[first]  # what the previous block left in the segment that the two share
        block[1:] = transform(features[rows[start : start + step]])
        lengths = np.bincount(members - first, minlength=last - first + 1)
        lengths[0] += 1
        pointers = np.concatenate([[0], np.cumsum(lengths)])
        gather = sparse.csr_array((np.ones(len(block)), np.arange(len(block)), pointers))
        sums[first : last + 1] = gather @ block
        if second is not None:
            values = block[1:]
            squares = values.T @ values if moments == "full" else np.einsum("nd,nd->d", values, values)
            second += squares.sum() if moments == "trace" else squares
    return sums, second


def _zero_moments(dim: int, moments: Moments | None) -> Floats | None:
    return None if moments is None else np.zeros((dim, dim) if moments == "full" else _moments_length(dim, moments))


def _moments_length(dim: int, moments: Moments) -> int:
    return {"full": dim * (dim + 1) // 2, "diagonal": dim, "trace": 1}[moments]


def _sums_dtype(precise: bool) -> str:
    return "float64" if precise else "float32"


def unpacked(triangle: Floats, dim: int) -> Floats:
    """The symmetric matrix [dim, dim] of an upper triangle, row after row."""
    square = np.zeros((dim, dim))
    square[np.triu_indices(dim)] = triangle
    return np.asarray(square + np.triu(square, 1).T)


def shorten(features: Features, bound: float) -> Floats:
    """Rows [n, d] that are longer than the bound, shortened to it."""
    values = np.asarray(features, np.float64)
    lengths = np.linalg.norm(values, axis=1, keepdims=True)
    return np.asarray(values * (bound / np.maximum(lengths, bound)))
