"""Closed forms as the papers' own code computes them, where it differs from what the papers describe.

Goswami et al. solve by a pseudo-inverse in float32, whose cut-off (d · 2⁻²³ of the largest singular value) drops small
directions of Fed3R's Gram matrix; the ridge of 0.01 is far below it. Like Legate et al., they mirror each training
image with a probability of one half as they read it, once.
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


def reference_accuracy(recipe: Recipe, mirror: bool) -> float:
    """Of the recipe's one closed form, by the papers' own code; mirror: with its mirrored images, too."""
    federation, backbone = Federation.of(recipe), load_backbone(recipe.model)
    data, name = federation.dataset, federation.dataset.name
    features = np.array(extract(backbone, data.train, f"{name} train"))
    if mirror:
        turned = np.random.default_rng([0xF11B, recipe.seed]).random(len(features)) < 0.5
        features[turned] = extract(mirrored(backbone), data.train, f"{name} train, mirrored")[turned]
    held = federation.owners >= 0
    x, y, owners = (torch.from_numpy(each[held]) for each in (features, data.train.labels, federation.owners))
    weight = reference_head(x, y, owners, len(data.classes), recipe.stages[0])
    scores = torch.from_numpy(np.array(extract(backbone, data.test, f"{name} test"))) @ weight.T
    return float((scores.argmax(1).numpy() == data.test.labels).mean())


def reference_head(x: Tensor, y: Tensor, owners: Tensor, classes: int, stage: Any) -> Tensor:
    """Weights [C, d] in float32 of features [n, d], labels [n] and owners [n]."""
    counts = torch.bincount(y, minlength=classes).float()
    sums = torch.zeros(classes, x.shape[1]).index_add_(0, y, x)
    means = sums / counts.clamp(min=1)[:, None]
    if stage.method == "fedncm":
        return normalize(means)
    if stage.method == "fed3r":
        gram = x.T @ x + stage.ridge * torch.eye(x.shape[1])
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
