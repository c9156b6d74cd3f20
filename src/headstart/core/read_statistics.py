"""The statistics of a client as they are read from its message, and checked: what no features have is refused."""

from __future__ import annotations

from dataclasses import replace
from math import inf

import numpy as np

from headstart.core.client_statistics import ClientStatistics, Summary, sums_dtype
from headstart.core.directions import sketching_basis
from headstart.core.message import Message
from headstart.core.moments import moments_length, unpacked
from headstart.errors import MessageError

# Features beyond this are no features: their squares, added up over all clients, must stay within range.
_LARGEST_FEATURE = 1e15
# Bounds that exact sums keep are checked with room for sums that were rounded to float32.
_ROUNDING = 1e-6


def read_statistics(
    message: Message,
    summary: Summary,
    *,
    clients: int = 1,
    every_class: bool = False,
    noisy: bool = False,
    longest: float = inf,
    precise: bool = False,
) -> ClientStatistics:
    """Read and check what clients sent, or raise `MessageError` with what is wrong.

    ``clients``: how many sent it together. ``every_class``: there is a row for every class, present or not. ``noisy``:
    clients added noise, and nothing is impossible. ``longest``: no feature vector is longer. ``precise``: sums are
    float64. Directions and a sketch are read where the summary has any.
    """
    n_classes, dim, moments, counted = summary.n_classes, summary.dim, summary.moments, summary.counts
    rows_per_class, directions = summary.means_per_client * clients, summary.rank * clients
    labels = message.array("labels", "int32", (None,)).astype(np.int64)
    counts = np.ones(len(labels), np.int64)
    if counted:
        counts = message.array("counts", "int32", (len(labels),)).astype(np.int64)
    sums = message.array("sums", sums_dtype(precise or moments == "full"), (len(labels), dim))
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
        second = message.array(name, "float64", (moments_length(dim, moments),)).astype(np.float64)
        if np.abs(second).max(initial=0) > _LARGEST_FEATURE**2 * examples.sum() * dim:
            raise MessageError(f"a sum of squares is larger than features of {_LARGEST_FEATURE:.0e} make it")
    received = ClientStatistics(n_classes, labels, counts, sums.astype(sums.dtype, copy=False), second, counted=counted)
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
        _refuse_impossible(received, longest)
    if summary.sketch:
        received = _with_sketch(received, message, summary.sketch, noisy)
    return _with_directions(received, message, directions) if directions else received


def _with_sketch(statistics: ClientStatistics, message: Message, width: int, noisy: bool) -> ClientStatistics:
    """With the sketch of a message; one that is larger than the sums of squares, or of no symmetric matrix, is
    refused."""
    dim, moments = statistics.dim, statistics.moments
    assert moments is not None
    found = message.array("sketch", "float64", (min(width, dim), dim)).astype(np.float64)
    inner, most = found @ sketching_basis(dim, len(found)), float(moments.sum())
    room = _ROUNDING * most + np.finfo(np.float32).tiny
    if not noisy and (np.linalg.norm(found) > most + room or np.abs(inner - inner.T).max(initial=0.0) > room):
        raise MessageError("the sketch is larger than the sums of squares allow, or of no features at all")
    if np.abs(found).max(initial=0.0) > _LARGEST_FEATURE**2 * np.maximum(np.abs(statistics.counts), 1).sum() * dim:
        raise MessageError(f"the sketch is larger than features of {_LARGEST_FEATURE:.0e} make it")
    return replace(statistics, sketch=found)


def _with_directions(statistics: ClientStatistics, message: Message, most: int) -> ClientStatistics:
    """With the directions of a message; more than were asked for, or larger ones than the scatter, are refused."""
    found = message.array("directions", "float32", (None, statistics.dim)).astype(np.float32, copy=False)
    if len(found) > (most := min(most, int(statistics.counts.sum()) - len(statistics.labels))):
        raise MessageError(f"{len(found)} directions are sent, more than {most}")
    within, squares = statistics.around_means(), statistics.folded(np.square(found, dtype=np.float64).sum(axis=0))
    # Of the sums, too, and of the largest direction: features that do not vary have a scatter of rounding.
    rounding = _ROUNDING * within + 1e-9 * (statistics.moments + within.sum()) + np.finfo(np.float32).tiny
    if (squares > within + rounding).any():
        raise MessageError("the directions are larger than the scatter that they are a part of")
    return replace(statistics, directions=found)


def _refuse_impossible(statistics: ClientStatistics, longest: float) -> None:
    """Raise `MessageError` where no feature vectors of at most this length have such statistics.

    By Cauchy–Schwarz |G_ij| ≤ √(G_ii G_jj) and Σ_r s_rj²/n_r ≤ G_jj over the rows r; by the triangle inequality
    ‖s_r‖ ≤ n_r · longest and tr G ≤ N · longest². Without counts only the first of these can be looked at. What
    passes can still be false.
    """
    counts, examples = statistics.counts, int(statistics.counts.sum())
    moments = statistics.moments
    squares = None if moments is None else moments.diagonal() if moments.ndim == 2 else moments
    if longest < inf and statistics.counted:
        lengths, room = np.linalg.norm(statistics.sums.astype(np.float64), axis=1), (1 + _ROUNDING) * longest
        if (far := lengths > counts * room + np.finfo(np.float32).tiny).any():
            row = far.argmax()
            raise MessageError(
                f"the sum of class {statistics.labels[row]} has length {lengths[row]:.3g}: "
                f"{counts[row]} examples no longer than {longest:g} have none so long"
            )
        if squares is not None and squares.sum() > examples * room**2:
            raise MessageError(f"the sums of squares are larger than examples no longer than {longest:g} make them")
    if moments is None or squares is None or moments.ndim == 1:
        return
    if squares.min(initial=0.0) < 0:
        raise MessageError("a sum of squares is negative")
    # Squares of the smallest numbers are zero, and their products with other features are not.
    squares = (1 + _ROUNDING) * (squares + examples * np.finfo(np.float64).tiny)
    least = np.einsum("rd,rd->d", statistics.sums, statistics.sums / np.maximum(counts, 1)[:, None])
    if statistics.counted and (least > squares).any():
        raise MessageError("the class sums are larger than the sums of squares allow: no features have both")
    roots = np.sqrt(squares)
    if (np.abs(moments) > np.outer(roots, roots)).any():
        raise MessageError("the Gram matrix has an entry larger than its diagonal allows: no features have it")
