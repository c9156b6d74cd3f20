"""Which client holds which example. A partition is one array: the owner of each example, or -1 for an example that is
not assigned to any client."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from headstart.config.partition import IID, Classes, Dirichlet, DirichletByClass, Domains, Natural, Partition, Shards
from headstart.data.examples import Examples, Ints, random_rank
from headstart.errors import HeadstartError

UNUSED = -1


def partition(examples: Examples, n_classes: int, how: Partition, seed: int) -> Ints:
    """Owner [n] of each example; owners are 0 to K − 1 and each holds at least one example."""
    rng = np.random.default_rng([seed, 0xDEA1])
    labels = examples.labels
    clients = getattr(how, "clients", None)
    if clients is not None and clients > len(labels):
        default = "" if "clients" in how.model_fields_set else " (the default)"
        raise HeadstartError(
            f"data.partition.clients = {clients}{default}: there are only {len(labels)} training examples; "
            f"at most {len(labels)} clients can have one each"
        )
    match how:
        case IID():
            owners = _iid(len(labels), how.clients, rng)
        case Dirichlet():
            owners = _dirichlet(labels, n_classes, how, rng)
        case DirichletByClass():
            owners = _dirichlet_by_class(labels, n_classes, how, rng)
        case Shards():
            owners = _shards(labels, n_classes, how, rng)
        case Classes():
            owners = _classes(labels, n_classes, how, rng)
        case Natural():
            owners = _natural(examples, how, rng)
        case Domains():
            owners = _domains(examples, how, rng)
    return owners


def follow(train_counts: Ints, labels: Ints, seed: int) -> Ints:
    """Owner [n] of each test example: each class (or domain) is shared out in proportion to training counts [K, C].

    Shares are rounded by largest remainder, so that every example of a class that is held has one owner.
    """
    rng = np.random.default_rng([seed, 0x7E57, 1])
    totals = np.maximum(train_counts.sum(axis=0), 1)
    available = np.bincount(labels, minlength=train_counts.shape[1])
    exact = train_counts * (available / totals)
    shares = np.floor(exact).astype(np.int64)
    missing = np.where(train_counts.sum(axis=0) > 0, available, 0) - shares.sum(axis=0)
    # Among equal remainders chance decides, or the first clients would get every odd example.
    ties = rng.permuted(np.broadcast_to(np.arange(len(exact))[:, None], exact.shape), axis=0)
    rank = np.argsort(np.lexsort((ties, shares - exact), axis=0), axis=0)
    shares += rank < missing
    return _deal(labels, shares, rng)


def _iid(n: int, clients: int, rng: np.random.Generator) -> Ints:
    owners = np.empty(n, np.int64)
    owners[rng.permutation(n)] = np.arange(n) % clients
    return owners


def _dirichlet(labels: Ints, n_classes: int, how: Dirichlet, rng: np.random.Generator) -> Ints:
    """Clients filled in turn from their own class shares; a class that runs out is taken from the shares of the rest.

    The papers' code draws one example at a time. Drawing a client's counts at once and drawing again what an
    exhausted class cannot give has the same distribution, and ends: each new draw exhausts a class or is the last.
    A client whose classes have all run out takes from what is left, in proportion.
    """
    size, leftover = divmod(len(labels), how.clients)
    sizes = np.full(how.clients, size)
    if how.leftovers == "assign":
        sizes[rng.permutation(how.clients)[:leftover]] += 1
    remaining = np.bincount(labels, minlength=n_classes)
    shares = rng.dirichlet(np.full(n_classes, how.alpha), how.clients)
    counts = np.zeros((how.clients, n_classes), np.int64)
    for client in range(how.clients):
        while (wanted := sizes[client] - counts[client].sum()) > 0:
            open_shares = np.where(remaining > 0, shares[client], 0.0)
            # Shares that add up to almost nothing are not numerically meaningful any more.
            open_shares = open_shares if open_shares.sum() > 1e-12 else remaining.astype(np.float64)
            bounds = np.cumsum(open_shares)
            drawn = np.searchsorted(bounds, rng.random(wanted) * bounds[-1], side="right")
            given = np.minimum(np.bincount(np.minimum(drawn, n_classes - 1), minlength=n_classes), remaining)
            counts[client] += given
            remaining -= given
    return _deal(labels, counts, rng)


def _dirichlet_by_class(labels: Ints, n_classes: int, how: DirichletByClass, rng: np.random.Generator) -> Ints:
    """Each class cut by Dirichlet shares over the clients; clients below the minimum are filled from the largest."""
    clients, least = how.clients, how.min_examples
    if clients * least > len(labels):
        raise HeadstartError(
            f"data.partition: {clients} clients with {least} examples each need {clients * least}, there are "
            f"{len(labels)}; lower clients to {len(labels) // least} or min_examples to {len(labels) // clients}"
        )
    sizes = np.bincount(labels, minlength=n_classes)
    shares = rng.dirichlet(np.full(clients, how.alpha), n_classes)
    counts = np.stack([rng.multinomial(size, share) for size, share in zip(sizes, shares, strict=True)], axis=1)
    owners = _deal(labels, counts, rng)
    held = np.bincount(owners, minlength=clients)
    poor = np.flatnonzero(held < least)
    if len(poor):
        # Everybody keeps the minimum; what exceeds it is given away from the largest holders down.
        rank = random_rank(owners, rng)
        spare = np.flatnonzero(rank >= least)
        spare = spare[np.argsort(-rank[spare], kind="stable")]
        takers = np.repeat(poor, least - held[poor])
        owners[spare[: len(takers)]] = takers
    return owners


def _shards(labels: Ints, n_classes: int, how: Shards, rng: np.random.Generator) -> Ints:
    """Classes cut into equal shards, s·K in all, dealt s to a client; a client may draw a class twice."""
    sizes = np.bincount(labels, minlength=n_classes)
    present = np.flatnonzero(sizes)
    total = how.shards_per_client * how.clients
    per_class, rest = divmod(total, len(present))
    if rest or per_class == 0:
        step = len(present) // np.gcd(len(present), how.shards_per_client)
        nearby = max(step, how.clients // step * step)
        raise HeadstartError(
            f"data.partition: {how.clients} clients × {how.shards_per_client} shards = {total} shards cannot be cut "
            f"evenly from {len(present)} classes; with {how.shards_per_client} shards per client, use a multiple of "
            f"{step} clients, for example {nearby}"
        )
    if sizes[present].min() < per_class:
        raise HeadstartError(
            f"data.partition: {per_class} shards per class need at least as many examples in every class; the smallest "
            f"has {sizes[present].min()}: lower clients or shards_per_client"
        )
    dealt = rng.permutation(np.repeat(present, per_class)).reshape(how.clients, how.shards_per_client)
    # Shard number within its class, in order of dealing; the first shards take what does not divide evenly.
    counts = np.zeros((how.clients, n_classes), np.int64)
    for label in present:
        holders = np.repeat(np.arange(how.clients), (dealt == label).sum(axis=1))
        sizes_of_shards = np.full(per_class, sizes[label] // per_class)
        sizes_of_shards[: sizes[label] % per_class] += 1
        np.add.at(counts[:, label], holders, rng.permutation(sizes_of_shards))
    return _deal(labels, counts, rng)


def _classes(labels: Ints, n_classes: int, how: Classes, rng: np.random.Generator) -> Ints:
    """Distinct classes per client, spread evenly over the classes, the same number of examples of each."""
    sizes = np.bincount(labels, minlength=n_classes)
    present = np.flatnonzero(sizes)
    per_client = how.classes_per_client
    if per_client > len(present):
        raise HeadstartError(
            f"data.partition.classes_per_client = {per_client}: there are only {len(present)} classes; lower it"
        )
    # Each client draws from the classes that the fewest clients hold so far, ties broken at random.
    holders = np.where(sizes > 0, 0, how.clients + 1)
    hands = np.empty((how.clients, per_client), np.int64)
    for client in range(how.clients):
        hands[client] = np.argsort(holders + rng.random(n_classes))[:per_client]
        holders[hands[client]] += 1
    held = np.unique(hands)
    possible = int((sizes[held] // holders[held]).min())
    each = possible if how.examples_per_client is None else how.examples_per_client // per_client
    if each < 1 or each > possible:
        raise HeadstartError(
            f"data.partition: {how.examples_per_client or per_client} examples of {per_client} classes for each of "
            f"{how.clients} clients cannot be had; "
            + (
                f"set examples_per_client to between {per_client} and {possible * per_client}"
                if possible
                else "a class has fewer examples than clients that hold it: lower clients or classes_per_client"
            )
        )
    counts = np.zeros((how.clients, n_classes), np.int64)
    counts[np.arange(how.clients)[:, None], hands] = each
    return _deal(labels, counts, rng)


def _natural(examples: Examples, how: Natural, rng: np.random.Generator) -> Ints:
    """The clients that the data name, renumbered; those below the minimum or above the maximum are left out."""
    ids = _ids(examples.clients, "natural", "client")
    sizes = np.bincount(ids)
    most = how.max_examples if how.max_examples is not None else len(ids)
    kept = np.flatnonzero((sizes >= how.min_examples) & (sizes <= most))
    if how.clients is not None and how.clients < len(kept):
        kept = np.sort(rng.permutation(kept)[: how.clients])
    if len(kept) == 0 or (how.clients is not None and len(kept) < how.clients):
        raise HeadstartError(
            f"data.partition: only {len(kept)} clients have between {how.min_examples} and {most} examples "
            f"(sizes range from {sizes[sizes > 0].min()} to {sizes.max()}); widen the limits or lower clients"
        )
    number = np.full(len(sizes), UNUSED)
    number[kept] = np.arange(len(kept))
    return number[ids]


def _domains(examples: Examples, how: Domains, rng: np.random.Generator) -> Ints:
    ids = np.unique(_ids(examples.domains, "domains", "domain"), return_inverse=True)[1].astype(np.int64)
    smallest = int(np.bincount(ids).min())
    if how.clients_per_domain > smallest:
        raise HeadstartError(
            f"data.partition.clients_per_domain = {how.clients_per_domain}: the smallest domain has {smallest} examples"
        )
    owners = np.empty(len(ids), np.int64)
    for domain in range(ids.max() + 1):
        members = np.flatnonzero(ids == domain)
        owners[members] = domain * how.clients_per_domain + _iid(len(members), how.clients_per_domain, rng)
    return owners


def _ids(ids: Ints | None, kind: str, what: str) -> Ints:
    if ids is None:
        raise HeadstartError(
            f"data.partition.kind = {kind!r}: the data name no {what}s; set data.{what}_column (or an array {what!r} "
            "in an .npz), or choose iid or dirichlet"
        )
    return ids


def _deal(labels: Ints, counts: npt.NDArray[np.int64], rng: np.random.Generator) -> Ints:
    """Owner [n]: client k gets counts[k, c] random examples of class c; what is left over stays unused."""
    owners = np.full(len(labels), UNUSED)
    shuffled = rng.permutation(len(labels))
    by_class = shuffled[np.argsort(labels[shuffled], kind="stable")]
    starts = np.searchsorted(labels[by_class], np.arange(counts.shape[1]))
    givers = np.repeat(np.tile(np.arange(counts.shape[0]), counts.shape[1]), counts.T.ravel())
    given = counts.sum(axis=0)
    within = np.arange(len(givers)) - np.repeat(np.cumsum(given) - given, given)
    owners[by_class[np.repeat(starts, given) + within]] = givers
    return owners
