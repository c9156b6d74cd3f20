"""A linear head: what every method ends with, and what a run saves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import inf
from pathlib import Path

import numpy as np
import numpy.typing as npt
from safetensors.numpy import load_file

from headstart.core.files import save_arrays, write_atomically
from headstart.core.statistics import Features, Floats, shorten
from headstart.errors import HeadstartError

_ROWS = 8192


@dataclass(frozen=True, eq=False)
class RandomFeatures:
    """Random Fourier features of unit-length features: z ↦ √(2/D) cos(Ω z/‖z‖ + β), an explicit Gaussian kernel.

    projection: [D, d] entries of N(0, 1/width²); phase: [D] uniform in [0, 2π).
    """

    projection: npt.NDArray[np.float32]
    phase: npt.NDArray[np.float32]

    @classmethod
    def draw(cls, dim: int, count: int, width: float, seed: int) -> RandomFeatures:
        """The same features for the same seed, on every client."""
        rng = np.random.Generator(np.random.Philox(key=seed))
        projection = rng.standard_normal((count, dim), dtype=np.float32) / np.float32(width)
        return cls(projection, rng.uniform(0, 2 * np.pi, count).astype(np.float32))

    def __call__(self, features: Features) -> npt.NDArray[np.float32]:
        """features: [n, d] → [n, D]."""
        values = np.asarray(features, np.float32)
        norms = np.linalg.norm(values, axis=1, keepdims=True)
        angles = (values / np.where(norms > 0, norms, 1)) @ self.projection.T + self.phase
        return np.asarray(np.sqrt(np.float32(2 / len(self.phase))) * np.cos(angles, out=angles))


@dataclass(frozen=True, eq=False)
class HiddenLayers:
    """Rectified layers before the linear one: z ↦ max(0, W z + b), layer after layer; W: [h, d], b: [h] each."""

    layers: tuple[tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]], ...]

    def __call__(self, features: Features) -> npt.NDArray[np.float32]:
        """features: [n, d] → [n, h]."""
        values = np.asarray(features, np.float32)
        for weight, bias in self.layers:
            values = np.maximum(values @ weight.T + bias, 0)
        return values


@dataclass(frozen=True, eq=False)
class LinearHead:
    """Scores ``(features @ weight.T + bias) / temperature``, of mapped features where the head has a map.

    weight: [C, d] float32; bias: [C] float32. The bias of a class that nobody has is -inf: any reader of the two
    arrays masks that class out of the prediction, without knowing that it is missing. With ``centres`` = k they are
    [C · k, d] and [C · k], k rows for a class after those of another, and a class scores the most that its rows do.
    """

    weight: npt.NDArray[np.float32]
    bias: npt.NDArray[np.float32]
    feature_map: RandomFeatures | HiddenLayers | None = None
    notes: Mapping[str, float] = field(default_factory=dict)
    """What was chosen on the way: the ridge, the shrinkage."""
    longest: float = inf
    """Longer features are shortened to it before they are scored, as privacy shortened those behind the head."""
    temperature: float = 1.0
    """What the loss divided the scores by when the head was trained: their softmax is the probabilities."""
    centres: int = 1
    """Rows of a class."""

    @classmethod
    def from_classes(
        cls, n_classes: int, present: npt.NDArray[np.int64], weight: Floats, bias: Floats, **notes: float
    ) -> LinearHead:
        """Weights [R, d] and biases [R] of the classes present [R]; all other classes are masked."""
        everything = np.zeros((n_classes, weight.shape[1]), np.float32)
        offsets = np.full(n_classes, -np.inf, np.float32)
        everything[present], offsets[present] = weight, bias
        if not np.isfinite(everything).all():
            raise HeadstartError("the head does not fit into float32; scale the features towards 1")
        return cls(everything, offsets, None, notes)

    def behind(self, feature_map: RandomFeatures | HiddenLayers | None) -> LinearHead:
        """The same head, to be applied to what the map makes of its input."""
        return replace(self, feature_map=feature_map)

    def scores(self, features: Features) -> npt.NDArray[np.float32]:
        """features: [n, d] → scores [n, C]; in blocks, since a map may widen the features."""
        scores = np.empty((len(features), len(self.bias) // self.centres), np.float32)
        for start in range(0, len(features), _ROWS):
            block = np.asarray(features[start : start + _ROWS], np.float32)
            block = shorten(block, self.longest).astype(np.float32) if self.longest < inf else block
            block = self.feature_map(block) if self.feature_map else block
            rows = (block @ self.weight.T + self.bias) / np.float32(self.temperature)
            scores[start : start + _ROWS] = rows.reshape(len(rows), -1, self.centres).max(axis=2)
        return scores

    def arrays(self) -> dict[str, npt.NDArray[np.float32]]:
        """What is saved: the parameters, and, where they say anything, `longest`, `temperature` and `centres` []."""
        facts = {"longest": (self.longest, inf), "temperature": (self.temperature, 1.0), "centres": (self.centres, 1)}
        said = {name: np.array(value, np.float32) for name, (value, default) in facts.items() if value != default}
        return {**self.parameters(), **said}

    def parameters(self) -> dict[str, npt.NDArray[np.float32]]:
        """`weight`, `bias`, and those of the map: `projection`, `phase`, or `hidden.N.weight`, `hidden.N.bias`."""
        arrays = {"weight": self.weight, "bias": self.bias}
        if isinstance(self.feature_map, RandomFeatures):
            arrays |= {"projection": self.feature_map.projection, "phase": self.feature_map.phase}
        elif self.feature_map:
            for number, (weight, bias) in enumerate(self.feature_map.layers):
                arrays |= {f"hidden.{number}.weight": weight, f"hidden.{number}.bias": bias}
        return arrays

    @classmethod
    def of_arrays(cls, arrays: Mapping[str, npt.NDArray[np.float32]]) -> LinearHead:
        """The head with these arrays."""
        feature_map: RandomFeatures | HiddenLayers | None = None
        depth = sum(name.startswith("hidden.") for name in arrays) // 2
        if depth:
            layers = ((arrays[f"hidden.{n}.weight"], arrays[f"hidden.{n}.bias"]) for n in range(depth))
            feature_map = HiddenLayers(tuple(layers))
        elif "phase" in arrays:
            feature_map = RandomFeatures(arrays["projection"], arrays["phase"])
        longest, temperature = float(arrays.get("longest", inf)), float(arrays.get("temperature", 1.0))
        centres, linear = int(arrays.get("centres", 1)), (arrays["weight"], arrays["bias"])
        return cls(*linear, feature_map, longest=longest, temperature=temperature, centres=centres)

    def save(self, path: Path) -> None:
        """Write the arrays as safetensors, atomically."""
        write_atomically(path, lambda temporary: save_arrays(temporary, self.arrays()))

    @classmethod
    def load(cls, path: Path) -> LinearHead:
        """Read what `save` wrote."""
        return cls.of_arrays(load_file(path))


def unit_rows(weight: Floats) -> tuple[Floats, npt.NDArray[np.bool_], Floats]:
    """Rows scaled to length one, which rows have a direction at all, and the lengths [R, 1] they were divided by."""
    # Scaling by the largest entry first keeps the squares of huge and tiny rows within range.
    largest = np.abs(weight).max(axis=1, keepdims=True, initial=0)
    directed = largest[:, 0] > 0
    largest = np.where(largest > 0, largest, 1)
    lengths = largest * np.linalg.norm(weight / largest, axis=1, keepdims=True)
    lengths = np.where(directed[:, None], lengths, 1)
    return weight / lengths, directed, lengths
