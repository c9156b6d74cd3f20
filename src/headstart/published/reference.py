"""Closed forms as the papers' own code computes them, where it differs from what the papers describe.

Goswami et al. solve by a pseudo-inverse in float32, whose cut-off (d · 2⁻²³ of the largest singular value) drops small
directions of Fed3R's Gram matrix; the ridge of 0.01 is far below it. Like Legate et al., they mirror each training
image with a probability of one half as they read it, once.

Goswami et al. have a second code, for what is trained after a head, which computes the same heads first. Where all
images that a client has of a class are in one batch, it adds them a second time, with noise of variance 0.1 on every
feature; it means to do so where there is one image alone, of which there is no covariance. On a client with fewer
images than a batch of 64 every image counts twice. Its full covariances are divided by a count that stays at zero; here
they are those that it means.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.functional import normalize

from headstart.backbones import Backbone, extract, load_backbone
from headstart.backbones.transforms import ImageTransform
from headstart.config.recipe import Recipe
from headstart.data import Federation

BATCH, NOISE = 64, 0.1


@dataclass(frozen=True)
class Mirrored(ImageTransform):
    """An image with left and right exchanged."""

    def __call__(self, value: Any, where: str) -> npt.NDArray[np.float32]:
        """One image [size, size, 3]."""
        return np.ascontiguousarray(super().__call__(value, where)[:, ::-1])


def mirrored(backbone: Backbone) -> Backbone:
    """A backbone that sees every image mirrored; its features are cached as those of another one."""
    seen = backbone.transform
    assert isinstance(seen, ImageTransform)
    transform = Mirrored(seen.size, seen.resize, seen.pixel_range)
    return replace(backbone, transform=transform, key=f"{backbone.key} mirrored")


def reference_accuracy(recipe: Recipe, mirror: bool, noisy: bool) -> float:
    """Of the recipe's one closed form, by the papers' own code; mirror: with its mirrored images, too; noisy: by the
    second code."""
    federation, backbone = Federation.of(recipe), load_backbone(recipe.model)
    data, name = federation.dataset, federation.dataset.name
    features = np.array(extract(backbone, data.train, f"{name} train"))
    if mirror:
        turned = np.random.default_rng([0xF11B, recipe.seed]).random(len(features)) < 0.5
        features[turned] = extract(mirrored(backbone), data.train, f"{name} train, mirrored")[turned]
    held = federation.owners >= 0
    x, y, owners = (torch.from_numpy(each[held]) for each in (features, data.train.labels, federation.owners))
    counted = counted_twice(x, y, owners, recipe.seed) if noisy else (x, y, owners)
    weight = reference_head(*counted, len(data.classes), recipe.stages[0], gram_of=x)
    scores = torch.from_numpy(np.array(extract(backbone, data.test, f"{name} test"))) @ weight.T
    return float((scores.argmax(1).numpy() == data.test.labels).mean())


def counted_twice(x: Tensor, y: Tensor, owners: Tensor, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Features [n, d], labels [n] and owners [n], and those of one batch once more; clients read in a random order."""
    rng, clients, classes = np.random.default_rng([0x2B1E, seed]), owners.numpy(), y.numpy()
    order = rng.permutation(len(clients))
    order = order[np.argsort(clients[order], kind="stable")]
    sizes, batch = np.bincount(clients), np.empty(len(clients), np.int64)
    batch[order] = (np.arange(len(clients)) - np.repeat(np.cumsum(sizes) - sizes, sizes)) // BATCH
    held, pair = np.unique(clients * (classes.max() + 1) + classes, return_inverse=True)
    first, last = np.full(len(held), len(clients)), np.zeros(len(held), np.int64)
    np.minimum.at(first, pair, batch)
    np.maximum.at(last, pair, batch)
    one = torch.from_numpy((first == last)[pair])
    noise = torch.from_numpy(rng.standard_normal((int(one.sum()), x.shape[1]), dtype=np.float32))
    return torch.cat([x, x[one] + NOISE**0.5 * noise]), torch.cat([y, y[one]]), torch.cat([owners, owners[one]])


def reference_head(
    x: Tensor, y: Tensor, owners: Tensor, classes: int, stage: Any, gram_of: Tensor | None = None
) -> Tensor:
    """Weights [C, d] in float32 of features [n, d], labels [n] and owners [n]; gram_of: Fed3R's matrix is of these."""
    counts = torch.bincount(y, minlength=classes).float()
    sums = torch.zeros(classes, x.shape[1]).index_add_(0, y, x)
    means = sums / counts.clamp(min=1)[:, None]
    if stage.method == "fedncm":
        return normalize(means)
    if stage.method == "fed3r":
        seen = x if gram_of is None else gram_of
        gram = seen.T @ seen + stage.ridge * torch.eye(x.shape[1])
    else:
        full = stage.covariance == "full"
        gram = (_full_scatter(x, y, means) if full else _estimated_scatter(x, y, owners, counts, means)).float()
        gram += stage.shrinkage * (counts - 1).clamp(min=0).sum() * torch.eye(x.shape[1])
        centre = sums.sum(0) / counts.sum()
        gram += counts.sum() * torch.outer(centre, centre)
    return normalize((torch.linalg.pinv(gram) @ sums.T).T)


def _full_scatter(x: Tensor, y: Tensor, means: Tensor) -> Tensor:
    """Σ_c (N_c − 1) S_c [d, d]."""
    deviations = x - means[y]
    return deviations.T @ deviations


def _estimated_scatter(x: Tensor, y: Tensor, owners: Tensor, counts: Tensor, means: Tensor) -> Tensor:
    """Σ_c (N_c − 1)/(K_c − 1) Σ_k n_kc (μ_kc − μ_c)(μ_kc − μ_c)ᵀ [d, d]; K_c clients have class c."""
    pairs, rows, sizes = torch.unique(owners * len(means) + y, return_inverse=True, return_counts=True)
    label = pairs % len(means)
    held = torch.zeros(len(pairs), x.shape[1]).index_add_(0, rows, x) / sizes[:, None]
    holders = torch.bincount(label, minlength=len(means)).float()
    factor = ((counts - 1).clamp(min=0) / (holders - 1).clamp(min=1))[label]
    deviations: Tensor = (held - means[label]) * (factor * sizes).sqrt()[:, None]
    return deviations.T @ deviations
