"""Heads by what clients tell: bytes against accuracy, from FedNCM to Fed3R, with clients that differ and that do not.

    python -m benchmarks.heads extract [NAME …]    features, once: HEADSTART_DATA/features-NAME.npz
    python -m benchmarks.heads fresh NAME …        those of test images in devices that the tables do not use
    python -m benchmarks heads                     the tables, of the features that are there
    python -m benchmarks.heads tables [NAME …]     the tables of these alone
    python -m benchmarks.heads picture             the picture, from the tables of RESULTS.md

Of a name that ends in "-sites", every image is seen through one of five devices (as it is, dark, blurred, of low
contrast, grey), drawn at random and kept: clients belong to one device each, and the test has all five. PACS has four
domains of its own.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FormatStrFormatter, NullFormatter
from PIL import Image, ImageEnhance, ImageFilter

from benchmarks.common import SHARED, show
from benchmarks.pictures import tables
from headstart.core.directions import sent_directions
from headstart.core.files import write_atomically
from headstart.core.statistics import message_nbytes
from headstart.heads.cof import moments_for
from headstart.heads.estimators import Fed3R, FedCOF, FedNCM

PLOT = Path(__file__).parents[1] / "docs" / "bytes-accuracy.png"
DOMAINS = ("art_painting", "cartoon", "photo", "sketch")
SQUEEZENET = {"backbone": "squeezenet1_1", "weights": "squeezenet1_1-caffe.safetensors", "preprocess": "caffe"}
MOBILENET = {"backbone": "mobilenet_v2", "weights": "mobilenet_v2-torchvision.safetensors"}
FEW = {"test_fraction": 0.3, "train_examples": 5000, "test_examples": 2000}
SOME = {"train_examples": 7500, "test_examples": 2000}
SETS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "pacs-squeezenet": (SQUEEZENET, {}),
    "flowers102-mobilenet": (MOBILENET, {"dataset": "flowers102", "test_examples": 3060}),
    "eurosat-mobilenet-sites": (MOBILENET, {"dataset": "eurosat", **FEW}),
    "eurosat-mobilenet": (MOBILENET, {"dataset": "eurosat", **FEW}),
    "cub200-mobilenet": (MOBILENET, {"dataset": "cub200", "test_examples": 3000}),
    "cub200-mobilenet-sites": (MOBILENET, {"dataset": "cub200", "test_examples": 2000}),
    "cars-mobilenet": (MOBILENET, {"dataset": "cars", "test_examples": 3136}),
    "cars-mobilenet-sites": (MOBILENET, {"dataset": "cars", "test_examples": 1960}),
    "cifar10-squeezenet": (SQUEEZENET, {"dataset": "cifar10", **SOME}),
    "cifar10-squeezenet-sites": (SQUEEZENET, {"dataset": "cifar10", **SOME}),
    "cifar100-mobilenet": (MOBILENET, {"dataset": "cifar100", **SOME}),
    "cifar100-mobilenet-sites": (MOBILENET, {"dataset": "cifar100", **SOME}),
}
CHOSEN_ON = ("pacs-squeezenet", "flowers102-mobilenet", "eurosat-mobilenet-sites", "cub200-mobilenet")
CLIENTS, ALPHA, SEEDS, MOST_DIRECTIONS = (3, 5, 10, 100, 1000), 0.1, 2, 100
HEADS: dict[str, Any] = {
    "FedNCM": FedNCM(),
    "FedCOF": FedCOF(within="estimated"),
    "auto": FedCOF(),
    "trace": FedCOF(within="trace"),
    "diagonal": FedCOF(within="diagonal"),
    "rank 4": FedCOF(rank=4),
    "rank 16": FedCOF(rank=16),
    "rank 64": FedCOF(rank=64),
    "Fed3R": Fed3R(),
}


# ------------------------------------------------------------------------------------------------------------ features


def seen_through(image: Image.Image, device: int) -> Image.Image:
    """What a device makes of an image."""
    if device == 1:
        return ImageEnhance.Brightness(image).enhance(0.4)
    if device == 2:
        return image.filter(ImageFilter.GaussianBlur(max(image.size) / 75))
    if device == 3:
        return ImageEnhance.Contrast(image).enhance(0.4)
    return image.convert("L").convert("RGB") if device == 4 else image


def extract(name: str) -> None:
    """X, y, split (0 train, 2 test) and domain of a data set, through its body, as a file that recipes read, too."""
    from headstart.backbones.extract import extract as cached
    from headstart.config.recipe import Data
    from headstart.data.load import load_dataset

    (_, keys), backbone = SETS[name], backbone_of(name)
    parts: list[tuple[np.ndarray, np.ndarray, int, np.ndarray]] = []
    if name.startswith("pacs"):
        for number, domain in enumerate(DOMAINS):
            dataset = load_dataset(Data(dataset=f"pacs-{domain}"))
            for split, part in ((0, dataset.train), (2, dataset.test)):
                parts.append(
                    (np.asarray(cached(backbone, part, domain)), part.labels, split, np.full(len(part), number))
                )
    else:
        dataset, rng = load_dataset(Data(**keys)), np.random.default_rng(19)
        for split, examples in ((0, dataset.train), (0, dataset.validation), (2, dataset.test)):
            if examples is None:
                continue
            if name.endswith("-sites"):
                sites = rng.integers(0, 5, len(examples))
                parts.append((through_devices(backbone, examples, sites), examples.labels, split, sites))
            else:
                found = np.asarray(cached(backbone, examples, name))
                parts.append((found, examples.labels, split, np.zeros(len(examples), int)))
    X, y, domains = (np.concatenate([part[i] for part in parts]) for i in (0, 1, 3))
    splits = np.concatenate([np.full(len(part[1]), part[2]) for part in parts])
    np.savez(file_of(name), X=X, y=y, split=splits, domain=domains)


def backbone_of(name: str) -> Any:
    from headstart.backbones import load_backbone
    from headstart.config.recipe import Model

    model = SETS[name][0]
    return load_backbone(Model(**{**model, "weights": str(SHARED / "weights" / model["weights"])}))


def through_devices(backbone: Any, examples: Any, sites: np.ndarray) -> np.ndarray:
    """Features [n, d] of images, each seen through its device [n]."""
    from headstart.backbones.extract import embed
    from headstart.data.examples import Examples, decode_image

    found = np.empty((len(examples), backbone.dim), np.float32)
    for start in range(0, len(examples), 1024):
        rows = np.arange(start, min(start + 1024, len(examples)))
        images = [decode_image(raw, "image").convert("RGB") for raw in examples.raw(start, start + 1024)]
        seen = np.stack([np.asarray(seen_through(i, s)) for i, s in zip(images, sites[rows], strict=True)])
        through = Examples("image", seen, (), np.arange(len(rows)), examples.labels[rows])
        found[rows] = embed(backbone, through, "images")
    return found


def extract_fresh(name: str) -> None:
    """X, y and domain of all test images of a data set in devices that its tables did not use: NAME-fresh."""
    from headstart.config.recipe import Data
    from headstart.data.load import load_dataset

    keys = SETS[name][1]
    whole, used = (load_dataset(Data(**each)).test for each in ({**keys, "test_examples": None}, keys))
    known = {digest.tobytes() for digest in used.digests}
    rest = whole.take(np.flatnonzero([digest.tobytes() not in known for digest in whole.digests]))
    sites = np.random.default_rng(20).integers(0, 5, len(rest))
    found = through_devices(backbone_of(name), rest, sites)
    np.savez(file_of(f"{name}-fresh"), X=found, y=rest.labels, domain=sites)


def file_of(name: str) -> Path:
    return Path(os.environ.get("HEADSTART_DATA", SHARED / "data")) / f"features-{name}.npz"


@cache
def features(name: str) -> dict[str, np.ndarray]:
    with np.load(file_of(name)) as file:
        return {key: file[key] for key in file.files}


# ------------------------------------------------------------------------------------------------------------- figures


def numbers_of(domains: int) -> tuple[int, ...]:
    """Numbers of clients; of several domains, with 3 clients only three of them take part."""
    return (3, domains, 10, 5 * domains, 100, 1000) if domains > 1 else CLIENTS


def part_of(name: str, split: int, clients: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Features [n, d], labels [n] and domains [n] of a split: of as many domains as there are clients, at most."""
    data = features(name)
    mine = (data["split"] == split) & (data["domain"] < clients if data["domain"].any() else True)
    return data["X"][mine], data["y"][mine], data["domain"][mine]


def dealt(labels: np.ndarray, domain: np.ndarray, clients: int, seed: int) -> np.ndarray:
    """The client [n] of each example: Dirichlet shares of every class, within each domain."""
    rng = np.random.default_rng(seed)
    owners = np.empty(len(labels), np.int64)
    each = max(1, clients // (int(domain.max()) + 1))
    for site in np.unique(domain):
        for label in np.unique(labels):
            mine = np.flatnonzero((domain == site) & (labels == label))
            owners[mine] = site * each + rng.choice(each, len(mine), p=rng.dirichlet(np.full(each, ALPHA)))
    return owners


def bytes_up(head: Any, labels: np.ndarray, owners: np.ndarray, dim: int) -> int:
    """Of the messages of all clients."""
    counts = np.zeros((owners.max() + 1, labels.max() + 1), np.int64)
    np.add.at(counts, (owners, labels), 1)
    counts = counts[counts.any(axis=1)]
    rows, rank = np.count_nonzero(counts, axis=1), getattr(head, "rank", 0)
    moments = {"FedNCM": None, "Fed3R": "full"}.get(type(head).__name__)
    if isinstance(head, FedCOF):
        moments = moments_for(head.covariance, head.within)
    told = sent_directions(counts.sum(axis=1), rows, rank, dim).tolist() if rank else [None] * len(rows)
    return sum(message_nbytes(n, dim, moments, True, some) for n, some in zip(rows.tolist(), told, strict=True))


def measured(name: str, clients: int, seeds: int = SEEDS) -> tuple[int, dict[str, tuple[float, float, float]]]:
    """Clients that hold something, and of each head its accuracy, its megabytes up and the share of the means."""
    (x, y, domain), (tests, labels, _) = part_of(name, 0, clients), part_of(name, 2, clients)
    owners = [dealt(y, domain, clients, seed) for seed in range(1 if clients == domain.max() + 1 > 1 else seeds)]
    found: dict[str, tuple[float, float, float]] = {}
    for title, head in HEADS.items():
        if getattr(head, "rank", 0) > 16 and clients > MOST_DIRECTIONS:
            continue
        scores, shares = [], []
        for who in owners[: 1 if title in ("FedNCM", "Fed3R") else None]:
            head.fit(x, y, client=who)
            scores.append(100 * head.score(tests, labels))
            shares.append(head.head_.notes.get("means_share", np.nan))
        found[title] = float(np.mean(scores)), bytes_up(head, y, owners[0], x.shape[1]) / 1e6, float(np.mean(shares))
    return len(np.unique(owners[0])), found


def main(names: Iterable[str] = SETS) -> None:
    os.environ.setdefault("HEADSTART_DATA", str(SHARED / "data"))
    pictures = {}
    for chosen in (True, False):
        rows: list[tuple[Any, ...]] = []
        for name in [name for name in names if file_of(name).exists() and (name in CHOSEN_ON) == chosen]:
            for clients in numbers_of(int(features(name)["domain"].max()) + 1):
                if clients > (features(name)["split"] == 0).sum() // 4:
                    continue
                holding, found = measured(name, clients)
                accuracies = [f"{found[title][0]:.1f}" if title in found else "" for title in HEADS]
                rows.append((name, holding, *accuracies, f"{found['auto'][2]:.2f}"))
                pictures[name, clients] = found
                print(*rows[-1], file=sys.stderr, flush=True)
        title = "Heads by what clients tell" + (" (the data that choices were made on)" if chosen else " (other data)")
        show(title, ("features", "clients", *HEADS, "share of the means"), rows)
    for key in (("pacs-squeezenet", 4), ("cub200-mobilenet", 5)):
        if key in pictures:
            cells = [(title, f"{mb:.3f}", f"{score:.1f}") for title, (score, mb, _) in pictures[key].items()]
            show(f"Bytes against accuracy: {key[0]}, {key[1]} clients", ("head", "MB up", "accuracy"), cells)


def picture() -> None:
    """The accuracies of the tables of RESULTS.md against the bytes of such clients."""
    rows = [row for table in tables("Heads by what clients tell") for row in table if "share of the means" in row]
    pictures: dict[tuple[str, int], dict[str, tuple[float, float]]] = {}
    for row in (row for row in rows if row["clients"] in ("4", "5")):
        name, clients = row["features"], int(row["clients"])
        data = features(name)
        train = data["split"] == 0
        y, dim = data["y"][train], data["X"].shape[1]
        owners = dealt(y, data["domain"][train], clients, 0)
        pictures[name, clients] = {
            title: (float(row[title]), bytes_up(head, y, owners, dim) / 1e6)
            for title, head in HEADS.items()
            if row[title]
        }
    draw(pictures)


def draw(pictures: dict[tuple[str, int], dict[str, tuple[float, float]]]) -> None:
    """Accuracy against megabytes, a panel for each data set."""
    columns = min(4, len(pictures))
    figure = Figure(figsize=(3.2 * columns, 2.8 * -(-len(pictures) // columns) + 0.5), layout="constrained")
    axes = np.atleast_1d(figure.subplots(-(-len(pictures) // columns), columns)).ravel()
    for axis in axes[len(pictures) :]:
        axis.remove()
    for axis, ((name, clients), found) in zip(axes, pictures.items(), strict=False):
        told = [found[title] for title in ("auto", "rank 4", "rank 16", "rank 64") if title in found]
        axis.plot([mb for _, mb in told], [score for score, _ in told], color="0.6", zorder=1)
        for title, (score, mb) in found.items():
            if title != "trace":  # as many bytes as "auto"
                axis.scatter(mb, score, s=24, zorder=2, label=title)
        axis.set(xscale="log", xlabel="MB up", ylabel="accuracy, %")
        axis.set_title(f"{name}, {clients} clients", fontsize=9)
        axis.xaxis.set_minor_formatter(NullFormatter())
        axis.xaxis.set_major_formatter(FormatStrFormatter("%g"))
        axis.margins(0.1, 0.1)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=len(HEADS) - 1)
    write_atomically(PLOT, lambda temporary: figure.savefig(temporary, dpi=100, facecolor="white"))


if __name__ == "__main__":
    if sys.argv[1] == "tables":
        main(sys.argv[2:] or SETS)
    elif sys.argv[1] == "picture":
        picture()
    elif sys.argv[1] == "fresh":
        for name in sys.argv[2:]:
            extract_fresh(name)
    else:
        for name in sys.argv[2:] or SETS:
            extract(name)
