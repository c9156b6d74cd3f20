"""Statistics of features: what a client may send of them, made from its features here, and read from its message."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from headstart.core.client_statistics import ClientStatistics, Summary, message_nbytes
from headstart.core.directions import directions_by_client, sent_directions
from headstart.core.moments import Features, Floats, Ints, Moments, Transform, segment_sums, shorten
from headstart.core.read_statistics import read_statistics
from headstart.errors import HeadstartError

__all__ = [
    "ClientStatistics", "Features", "Floats", "Ints", "Moments", "Summary", "Transform", "message_nbytes",
    "random_parts", "read_statistics", "shorten", "summarise",
]  # fmt: skip


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
    sketch: int = 0,
    seed: tuple[int, ...] = (),
    min_examples: int = 1,
) -> tuple[ClientStatistics, Ints]:
    """Statistics of many clients at once, and the client [R] behind each row; rows are in client, class, part order.

    features: [n, d]; labels, clients, parts: [m], about ``features[rows]``; by default all rows belong to client 0.
    ``parts`` numbers random parts of a client's class, each of which speaks for itself; ``transform`` is a map
    [n, d] → [n, D] applied to the features first. Accumulates in float64, in blocks, so that memory does not grow with
    the examples. Of each client's scatter around its rows' means, the largest ``rank`` directions are kept, one for
    ``min_examples`` at most; they depend on the seed and on the client alone. ``sketch``: rows of a sketch of all.
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
        sums, second, drawn = segment_sums(
            features, rows[order], segments[order], len(keys), moments, transform, sketch
        )
    for name, values in (("features", sums), ("squares of the features", second), ("squares of the features", drawn)):
        if values is not None and not np.isfinite(values).all():
            raise HeadstartError(f"the {name} hold NaN, infinity or values too large to add up; clean or scale them")
    who, what = np.divmod(keys // width, n_classes)
    found = ClientStatistics(n_classes, what, counts.astype(np.int64), sums, second, sketch=drawn)
    if not rank:
        return found, who
    means, change = sums / counts[:, None], transform or (lambda values: values)

    def deviations(part: slice) -> Floats:
        return np.asarray(change(features[rows[order[part]]]) - means[segments[order[part]]])

    holders, starts = np.unique(who, return_index=True)
    examples, dim = np.add.reduceat(counts, starts), sums.shape[1]
    sent = sent_directions(examples, np.diff(np.append(starts, len(who))), rank, dim, min_examples)
    return replace(found, directions=directions_by_client(deviations, holders, examples, sent, dim, seed)), who


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
