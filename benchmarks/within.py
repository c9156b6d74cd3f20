"""FedCOF's default beside the paper's, example by example; PACS by what clients tell and by split; published figures.

    python -m benchmarks.within paired [NAME …]    default − paper's, with the standard error of the paired difference
    python -m benchmarks.within fresh [NAME …]     the same on test images in devices that no table has used
    python -m benchmarks.within shares [NAME …]    every share of the means, whichever the default would choose
    python -m benchmarks.within pacs               the four domains as clients, several splits
    python -m benchmarks.within groups             directions in secure groups and under privacy
    python -m benchmarks.within published          FedNCM, FedCOF and Fed3R beside the papers' figures
    python -m benchmarks.within centres            FedNCM with five centres beside pooled k-means of scikit-learn
    python -m benchmarks.within lda                head = "lda" beside the plain head, classes alike and 100:1

They read the features that `python -m benchmarks.heads extract`, or `fresh`, has written.
"""

from __future__ import annotations

import csv
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import combinations
from typing import Any

import numpy as np

from benchmarks.common import SHARED, show
from benchmarks.heads import ALPHA, CLIENTS, SETS, dealt, features, file_of
from headstart.heads.estimators import Fed3R, FedCOF, FedNCM

PARTITIONS = 5
PUBLISHED = {"CUB-200": "cub200-mobilenet", "Stanford Cars": "cars-mobilenet", "CIFAR-100": "cifar100-mobilenet"}


def right(head: Any, name: str, owners: np.ndarray, chosen: Sequence[int] = ()) -> np.ndarray:
    """Whether each test example [n] is predicted right by a head of these clients [N]; NaN where its domain is not
    among the ``chosen``, which alone are learned from, too."""
    data = features(name)
    mine = np.isin(data["domain"], chosen) if len(chosen) else np.ones(len(data["y"]), bool)
    train, test = data["split"] == 0, data["split"] == 2
    head.fit(data["X"][train & mine], data["y"][train & mine], client=owners[mine[train]])
    found = np.full(len(data["y"]), np.nan)
    found[test & mine] = head.predict(data["X"][test & mine]) == data["y"][test & mine]
    return np.asarray(found[test])


def dealings(name: str) -> dict[str, list[tuple[np.ndarray, Sequence[int]]]]:
    """Of "clients partitions": who holds each training example [N], and which domains take part, for each partition.

    Three clients of several domains are each three of them; test examples are those of the same domains.
    """
    data = features(name)
    train = data["split"] == 0
    y, domain = data["y"][train], data["domain"][train]
    domains = int(domain.max()) + 1
    found: dict[str, list[tuple[np.ndarray, Sequence[int]]]] = {}
    if domains > 1:
        some = list(combinations(range(domains), 3))
        found[f"3 {len(some)}"] = [(domain, chosen) for chosen in some]
    for clients in (domains, 2 * domains, 5 * domains, 100, 1000) if domains > 1 else CLIENTS:
        partitions = 1 if clients == domains > 1 else PARTITIONS
        if clients <= train.sum() // 4:
            found[f"{clients} {partitions}"] = [(dealt(y, domain, clients, seed), ()) for seed in range(partitions)]
    return found


def differences(name: str) -> dict[int, tuple[int, np.ndarray, np.ndarray]]:
    """Of each number of clients: partitions, and how often each test example [n] is right by the paper's FedCOF and by
    the default; kept in a file beside the features."""
    kept, rows = file_of(name).with_name(f"paired-{name}.npz"), dealings(name)
    found = dict(np.load(kept)) if kept.exists() else {}
    for key in [key for key in rows if key not in found]:
        heads = FedCOF(within="estimated"), FedCOF()
        found[key] = np.array([np.nanmean([right(head, name, *each) for each in rows[key]], axis=0) for head in heads])
        print(name, key, found[key].mean(axis=1), file=sys.stderr, flush=True)
        np.savez(kept, **found)
    return {int(key.split()[0]): (int(key.split()[1]), *found[key]) for key in rows}


def paired(names: list[str]) -> None:
    """The mean over partitions of each example's difference, its standard error over the test examples, and whether the
    lowest and the highest of all rows are more than chance."""
    rows, changes = [], []
    for name in names:
        found = differences(name)
        changes.append(np.array([100 * (new - old) for _, old, new in found.values()]))
        for (clients, (partitions, old, new)), change in zip(found.items(), changes[-1], strict=True):
            cells = f"{100 * old.mean():.2f}", f"{100 * new.mean():.2f}"
            error = change.std() / np.sqrt(len(change))
            rows.append((name, clients, partitions, *cells, f"{change.mean():+.2f} ± {error:.2f}"))
    columns = ("features", "clients", "partitions", 'FedCOF (`within = "estimated"`)', "default", "difference")
    show("FedCOF's default and the paper's: difference ± standard error over the test examples", columns, rows)
    joint(changes)


def fresh(names: list[str]) -> None:
    """Default − paper's on test images that no table has used, by the heads of the same training images."""
    rows = []
    for name in names:
        data, tests = features(name), features(f"{name}-fresh")
        train = data["split"] == 0
        x, y, domain = data["X"][train], data["y"][train], data["domain"][train]
        for clients in (5, 10, 25):
            found = []
            for seed in range(1 if clients == 5 else PARTITIONS):
                owners = dealt(y, domain, clients, seed)
                both = [FedCOF(within="estimated").fit(x, y, client=owners), FedCOF().fit(x, y, client=owners)]
                found.append([head.predict(tests["X"]) == tests["y"] for head in both])
            old, new = 100 * np.mean(found, axis=0)
            error = (new - old).std() / np.sqrt(len(old))
            cells = f"{old.mean():.2f}", f"{new.mean():.2f}", f"{(new - old).mean():+.2f} ± {error:.2f}"
            rows.append((name, len(old), clients, len(found), *cells))
            print(*rows[-1], file=sys.stderr, flush=True)
    columns = "features", "images", "clients", "partitions", 'FedCOF (`within = "estimated"`)', "default", "difference"
    show("FedCOF's default and the paper's on images that no table has used", columns, rows)


def shares(names: list[str]) -> None:
    """Accuracy with each share of the means, worked out anew in float64 with whole d × d matrices, beside the default:
    what a better choice of the share could gain."""
    rows, tried = [], (0.0, 0.25, 0.5, 0.75, 1.0)
    for name in names:
        data = features(name)
        test = data["split"] == 2
        for key, parts in dealings(name).items():
            if int(key.split()[0]) > 25:
                continue
            found = []
            for owners, chosen in parts:
                mine = np.isin(data["domain"], chosen) if len(chosen) else np.ones(len(data["y"]), bool)
                ends = _ends(name, owners, mine)
                at = data["X"][test & mine] @ np.stack([_solved(share, *ends) for share in tried]).astype(np.float32)
                right_by_share = np.mean(at.argmax(axis=2) == data["y"][test & mine], axis=1)
                found.append([np.nanmean(right(FedCOF(), name, owners, chosen)), *right_by_share])
            rows.append((name, *key.split(), *(f"{100 * each:.2f}" for each in np.mean(found, axis=0))))
            print(*rows[-1], file=sys.stderr, flush=True)
    columns = "features", "clients", "partitions", "default", *(f"share {share:g}" for share in tried)
    show("FedCOF by the share of the means", columns, rows)


def _ends(name: str, owners: np.ndarray, mine: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """The paper's matrix in units of the scatter that was told, and that of `within = "trace"`, both [d, d] and with
    N μ_g μ_gᵀ; the shrinkage that both have; N_c μ_c [d, C]."""
    data = features(name)
    train = (data["split"] == 0) & mine
    x, y, client = data["X"][train].astype(np.float64), data["y"][train], owners[mine[data["split"] == 0]]
    counts = np.bincount(y)
    means = np.stack([x[y == c].mean(axis=0) for c in range(len(counts))])
    between, inflated, inside, dim = *np.zeros((2, x.shape[1], x.shape[1])), 0.0, x.shape[1]
    for c, count in enumerate(counts):
        own = [x[(y == c) & (client == k)] for k in np.unique(client[y == c])]
        deviations = np.stack([np.sqrt(len(each)) * (each.mean(axis=0) - means[c]) for each in own])
        between += deviations.T @ deviations
        inflated += (count - 1) / max(1, len(own) - 1) * deviations.T @ deviations
        inside += sum(float(np.square(each - each.mean(axis=0)).sum()) for each in own)
    common = len(x) * np.outer(x.mean(axis=0), x.mean(axis=0))
    spread = np.trace(between) + inside
    paper = spread / np.trace(inflated) * (inflated + common)
    return paper, between + inside / dim * np.eye(dim) + common, 0.5 * spread / dim * np.eye(dim), means.T * counts


def _solved(share: float, paper: np.ndarray, trace: np.ndarray, ridge: np.ndarray, targets: np.ndarray) -> np.ndarray:
    weight = np.linalg.solve(share * paper + (1 - share) * trace + ridge, targets)
    return np.asarray(weight / np.linalg.norm(weight, axis=0))


def joint(changes: list[np.ndarray], flips: int = 10_000) -> None:
    """Over all rows at once: how often chance alone makes a row as low, and one as high, as the lowest and the highest.

    changes: of each data set, the differences [rows, n] of its test examples. Were the two heads alike, each example's
    differences would have either sign: all rows of a data set are flipped together, example by example, so that what
    its rows have in common stays. The statistic is the lowest (highest) difference in standard errors.
    """
    rng = np.random.default_rng(0)
    observed, chance = [], []
    for each in changes:
        error = np.maximum(each.std(axis=1), 1e-12)[:, None] * np.sqrt(each.shape[1])
        observed.append((each / error).sum(axis=1))
        signs = rng.integers(0, 2, (each.shape[1], flips), dtype=np.int8) * np.float32(2) - np.float32(1)
        chance.append((each / error).astype(np.float32) @ signs)
    seen, flipped = np.concatenate(observed), np.concatenate(chance)
    lowest, highest = (flipped.min(axis=0) <= seen.min()).mean(), (flipped.max(axis=0) >= seen.max()).mean()
    cells = [("lowest", f"{seen.min():.1f}", f"{lowest:.4f}"), ("highest", f"{seen.max():.1f}", f"{highest:.4f}")]
    show(f"All {len(seen)} rows at once, {flips:,} flips of signs", ("row", "standard errors", "p"), cells)


def pacs() -> None:
    """Accuracy over all test images, and the mean of the four domains' accuracies, for several splits."""
    data = features("pacs-squeezenet")
    x, y, domain = data["X"], data["y"], data["domain"]
    heads: dict[str, Any] = {
        "FedNCM": FedNCM(),
        "FedCOF, γ = 1": FedCOF(1.0, within="estimated"),
        "FedCOF, γ auto": FedCOF(within="estimated"),
        "2 means, γ = 1": FedCOF(1.0, 2, within="estimated"),
        "10 means, γ = 1": FedCOF(1.0, 10, within="estimated"),
        "default": FedCOF(),
        "trace": FedCOF(within="trace"),
        "diagonal": FedCOF(within="diagonal"),
        **{f"rank {rank}": FedCOF(rank=rank) for rank in (4, 16, 64)},
        "Fed3R, λ = 0.01": Fed3R(0.01),
        "Fed3R, λ auto": Fed3R(),
    }
    splits = {"a fifth of every class and domain": data["split"] == 2}
    for share in (0.2, 0.5):
        splits |= {f"{share:.0%} at random, seed {s}": np.random.default_rng(s).random(len(y)) < share for s in (0, 1)}
    splits["the training images themselves"] = np.ones(len(y), bool)
    rows = []
    for title, head in heads.items():
        cells = []
        for split, test in splits.items():
            train = test if split.startswith("the training") else ~test
            head.fit(x[train], y[train], client=domain[train])
            hits = head.predict(x[test]) == y[test]
            each = np.mean([hits[domain[test] == site].mean() for site in range(4)])
            cells.append(f"{100 * hits.mean():.1f} / {100 * each:.1f}")
        rows.append((title, *cells))
        print(*rows[-1], file=sys.stderr, flush=True)
    show("PACS, four clients: over all test images / mean of the domains, by test split", ("head", *splits), rows)


def groups() -> None:
    """FedCOF with directions in secure groups, and under differential privacy, beside FedNCM and Fed3R; three seeds."""
    import headstart

    name = "cifar10-squeezenet"
    data = features(name)
    clip = float(np.median(np.linalg.norm(data["X"][data["split"] == 0], axis=1)))
    settings: list[dict[str, Any]] = [{"method": "fedcof"}, {"method": "fedcof", "rank": 16}]
    settings += [{"method": method, "secure": True} for method in ("fedncm", "fed3r")]
    ranks = [{"method": "fedcof", "rank": rank} for rank in (0, 4, 16, 64)]
    settings += [{**each, "secure": True, "secure_group": size} for size in (3, 10) for each in ranks]
    others: list[dict[str, Any]] = [{"method": "fedncm"}, {"method": "fed3r"}, {"method": "fedcof", "within": "trace"}]
    settings += [{**each, "privacy": {"epsilon": e, "clip": clip}} for e in (10.0, 1.0) for each in (*others, *ranks)]
    partition = {"kind": "dirichlet", "clients": 100, "alpha": ALPHA}
    table = {"data": {"dataset": str(file_of(name)), "partition": partition}, "model": {"backbone": "features"}}
    rows = []
    for stage in settings:
        runs = [headstart.run({**table, "seed": seed, "stages": [stage]}) for seed in range(3)]
        found = [100 * (run.accuracy or 0.0) for run in runs]
        keys = {key: value for key, value in stage.items() if key not in ("method", "privacy")}
        keys |= {"ε": stage["privacy"]["epsilon"]} if "privacy" in stage else {}
        said = ", ".join(f"{key} {value}" for key, value in keys.items() if value is not True and value != 0)
        accuracy, sent = f"{np.mean(found):.1f} ± {np.std(found):.1f}", runs[0].summary["bytes_up"] / 1e6
        rows.append((stage["method"], said, accuracy, f"{sent:.2f}"))
        print(*rows[-1], file=sys.stderr, flush=True)
    show(
        "Directions in secure groups and under privacy: cifar10-squeezenet, 100 clients",
        ("method", "keys", "accuracy", "MB up"),
        rows,
    )


def published() -> None:
    """MobileNetV2, 100 clients: the FedCOF paper's Table 2 and what is measured here, mean of two partitions."""
    with (SHARED / "published" / "fedcof.csv").open(newline="", encoding="utf-8") as file:
        table = [row for row in csv.DictReader(file) if row["table"] == "2" and row["quantity"] == "accuracy"]
    heads = {"FedNCM": FedNCM(), "FedCOF": FedCOF(0.1, within="estimated"), "Fed3R": Fed3R(0.01, bias=False)}
    rows = []
    for dataset, name in PUBLISHED.items():
        if not file_of(name).exists():
            continue
        data = features(name)
        train = data["split"] == 0
        owners = [dealt(data["y"][train], data["domain"][train], 100, seed) for seed in (0, 1)]
        for method, head in heads.items():
            (row,) = [
                r for r in table if (r["method"], r["dataset"], r["backbone"]) == (method, dataset, "MobileNetV2")
            ]
            found = 100 * np.mean([right(head, name, who).mean() for who in owners])
            ours = FedCOF() if method == "FedCOF" else Fed3R() if method == "Fed3R" else head
            usual = 100 * np.mean([right(ours, name, who).mean() for who in owners])
            rows.append((dataset, method, f"{row['value']} ± {row['deviation']}", f"{found:.1f}", f"{usual:.1f}"))
            print(*rows[-1], file=sys.stderr, flush=True)
    columns = ("data", "method", "published", "its settings, here", "headstart's defaults")
    show("MobileNetV2, 100 clients, Dirichlet 0.1", columns, rows)


@dataclass(frozen=True)
class Split:
    """Features [N, d] and labels [N] to learn from, and [n, d], [n] to test on."""

    x: np.ndarray
    y: np.ndarray
    test: np.ndarray
    labels: np.ndarray

    def pooled(self, init: str, n_init: int, seed: int) -> float:
        """Accuracy of five centres of each class by scikit-learn's k-means, all examples being in one place."""
        from sklearn.cluster import KMeans

        k_means = [KMeans(5, init=init, n_init=n_init, random_state=seed).fit(self.x[self.y == c]) for c in range(10)]
        rows = np.concatenate([each.cluster_centers_ for each in k_means])
        scores = self.test @ (rows / np.linalg.norm(rows, axis=1, keepdims=True)).T
        return float((scores.argmax(axis=1) // 5 == self.labels).mean())

    def federated(self, centres: int, iterations: int, seed: int) -> float:
        """Accuracy of FedNCM's."""
        head = FedNCM(centres=centres, iterations=iterations, random_state=seed).fit(self.x, self.y)
        return float(head.score(self.test, self.labels))

    def imbalanced(self, ratio: float, seed: int) -> Split:
        """Of the training examples, classes in random order, from all of the first to 1/ratio as many of the last."""
        rng, classes = np.random.default_rng(seed), int(self.y.max()) + 1
        most = np.bincount(self.y).min()
        sizes = np.rint(most * ratio ** -np.linspace(0, 1, classes)).astype(int)[rng.permutation(classes)]
        kept = [rng.permutation(np.flatnonzero(self.y == c))[: max(1, size)] for c, size in enumerate(sizes)]
        rows = np.sort(np.concatenate(kept))
        return Split(self.x[rows], self.y[rows], self.test, self.labels)

    def recalls(self, head: Any, owners: np.ndarray) -> np.ndarray:
        """The share [C] of each class's test examples that a head of these clients [N] predicts right."""
        right = head.fit(self.x, self.y, client=owners).predict(self.test) == self.labels
        return np.bincount(self.labels, right) / np.bincount(self.labels)


def bundled(name: str, backbone: str | None) -> Split:
    """Examples that come with headstart, or their features."""
    from headstart.backbones import load_backbone
    from headstart.backbones.extract import extract
    from headstart.config.recipe import Data, Model
    from headstart.data.load import load_dataset

    dataset = load_dataset(Data(dataset=name))
    body = load_backbone(Model(backbone=backbone)) if backbone else None
    x, test = (
        np.asarray(extract(body, part, name) if body else part.features(), np.float64)
        for part in (dataset.train, dataset.test)
    )
    return Split(x, dataset.train.labels, test, dataset.test.labels)


def extracted(name: str) -> Split:
    """Features that were written by `benchmarks.heads extract`."""
    data = features(name)
    train, test = data["split"] == 0, data["split"] == 2
    return Split(data["X"][train], data["y"][train], data["X"][test], data["y"][test])


def discriminants() -> None:
    """`head = "lda"` with both priors beside the plain head, 100 clients (MNIST: 50), Dirichlet 0.1, three seeds.

    Accuracy on the test split as it is, and, where classes are 100:1, also with each class counting by its share of the
    training examples.
    """
    alike = ("cub200-mobilenet", "cars-mobilenet", "mnist-mini")
    unlike = ("mnist-mini", "cifar10-squeezenet", "eurosat-mobilenet", "cifar100-mobilenet")
    ways: dict[str, dict[str, Any]] = {"plain": {}, "lda": {"head": "lda"}}
    ways["lda, uniform prior"] = {"head": "lda", "prior": "uniform"}
    rows = []
    for name, ratio in [(name, 1) for name in alike] + [(name, 100) for name in unlike]:
        whole = bundled(name, "efficientnet-lite0") if name == "mnist-mini" else extracted(name)
        clients = 50 if name == "mnist-mini" else 100
        for method in (Fed3R, FedCOF):
            cells = []
            for keys in ways.values():
                found = []
                for seed in range(3):
                    data = whole.imbalanced(ratio, seed) if ratio > 1 else whole
                    owners = dealt(data.y, np.zeros(len(data.y), int), clients, seed)
                    recalls, shares = data.recalls(method(**keys), owners), np.bincount(data.y) / len(data.y)
                    tested = np.bincount(data.labels) / len(data.labels)
                    found.append([100 * recalls @ tested, 100 * recalls @ shares])
                mean = np.mean(found, axis=0)
                cells.append(f"{mean[0]:.1f}" if ratio == 1 else f"{mean[0]:.1f} / {mean[1]:.1f}")
            rows.append((name, f"{ratio}:1", method.__name__, *cells))
            print(*rows[-1], file=sys.stderr, flush=True)
    show("Linear discriminant analysis beside the plain head", ("features", "classes", "method", *ways), rows)


def centres() -> None:
    """FedNCM with five centres of each class, and as many by k-means on the pooled examples."""
    rows = []
    for name, backbone in (("mnist-mini", "efficientnet-lite0"), ("digits", None)):
        data = bundled(name, backbone)
        ways: dict[str, Callable[[int], float]] = {"one centre": partial(data.federated, 1, 1)}
        ways |= {f"headstart, {n} iterations": partial(data.federated, 5, n) for n in (10, 30, 100)}
        for init, n in (("random", 1), ("k-means++", 1), ("k-means++", 10)):
            ways[f"scikit-learn, {init}, best of {n}"] = partial(data.pooled, init, n)
        for title, way in ways.items():
            found = 100 * np.array([way(seed) for seed in range(5)])
            spread = f"{found.min():.1f} to {found.max():.1f}"
            rows.append((name, title, f"{found.mean():.1f} ± {found.std(ddof=1):.1f}", spread))
            print(*rows[-1], file=sys.stderr, flush=True)
    show("Five centres of each class, cosine, five seeds", ("data", "k-means", "accuracy", "from, to"), rows)


def main() -> None:
    os.environ.setdefault("HEADSTART_DATA", str(SHARED / "data"))
    what, *names = sys.argv[1:]
    if what == "paired":
        paired(names or [name for name in SETS if file_of(name).exists()])
    elif what == "fresh":
        fresh(names or [name for name in SETS if file_of(f"{name}-fresh").exists()])
    elif what == "shares":
        shares(
            names or [name for name in SETS if name.endswith(("-sites", "pacs-squeezenet")) and file_of(name).exists()]
        )
    else:
        commands = {"pacs": pacs, "groups": groups, "published": published, "centres": centres, "lda": discriminants}
        commands[what]()


if __name__ == "__main__":
    main()
