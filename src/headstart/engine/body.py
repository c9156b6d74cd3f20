"""The body of a run: one in memory, loaded with what a stage starts from; features of any split on demand."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from headstart.data import Dataset
from headstart.data.examples import Examples
from headstart.errors import HeadstartError
from headstart.recipe import Model
from headstart.statistics import Features

if TYPE_CHECKING:  # torch is not needed where the data are features
    from headstart.backbones import Inputs

Arrays = Mapping[str, np.ndarray]

PRETRAINED = -1


class Body:
    """A backbone and the weights that stages have given it, by the number of the stage; or features, and no body."""

    def __init__(self, model: Model, dataset: Dataset, keep_pretrained: bool = False) -> None:
        self._dataset = dataset
        if (dataset.kind == "features") != (model.backbone == "features"):
            kind = "already features" if dataset.kind == "features" else f"{dataset.kind}s, not features"
            fix = '"features"' if dataset.kind == "features" else "a backbone that reads them (see headstart backbones)"
            raise HeadstartError(f"model.backbone: the data of {dataset.name} are {kind}; set it to {fix}")
        self.backbone = None
        self.loaded = PRETRAINED
        self._versions: dict[int, tuple[Arrays, str]] = {}
        self._features: dict[str, Features] = {}
        if dataset.kind != "features":
            from headstart.backbones import load_backbone

            self.backbone = load_backbone(model)
            if keep_pretrained:
                self.keep(PRETRAINED, "aggregate")

    @property
    def dim(self) -> int:
        """Length d of a feature vector."""
        return self.backbone.dim if self.backbone else self._dataset.train.features().shape[1]

    def features(self, split: str) -> Features:
        """Features [n, d] of a split by the body as it is loaded, from the cache where they are there."""
        if split not in self._features:
            examples: Examples = getattr(self._dataset, split)
            if self.backbone is None:
                self._features[split] = examples.features()
            else:
                from headstart.backbones import extract

                self._features[split] = extract(self.backbone, examples, f"{self._dataset.name} {split}")
        return self._features[split]

    def embedded(self, split: str) -> Features:
        """Features [n, d] of a split by the body as it is now, in the middle of its training."""
        from headstart.backbones import embed

        assert self.backbone is not None
        return embed(self.backbone, getattr(self._dataset, split), f"{self._dataset.name} {split}")

    def inputs(self) -> Inputs:
        """Batches of the training split, for a body that trains."""
        from headstart.backbones import Inputs

        assert self.backbone is not None
        return Inputs(self.backbone, self._dataset.train, f"{self._dataset.name} train")

    def arrays(self) -> Arrays:
        """Parameters and buffers of the body as it is now, under the names that its checkpoints use."""
        assert self.backbone is not None
        state: dict[str, Any] = self.backbone.core.state_dict()
        return {name: tensor.detach().cpu().contiguous().numpy() for name, tensor in state.items()}

    def keep(self, version: int, norm_statistics: str, arrays: Arrays | None = None) -> Arrays:
        """Remember the weights under the number of the stage that made them: these, or those in the body now."""
        if arrays is None:
            arrays = {name: array.copy() for name, array in self.arrays().items()}
            self.loaded = version
        self._versions[version] = arrays, norm_statistics
        self._features.clear()
        return arrays

    def load(self, version: int) -> None:
        """Put the weights of a stage, or the pre-trained ones, into the body; nothing to do where they are there."""
        if version == self.loaded:
            return
        import torch

        from headstart.methods.network import set_mode

        assert self.backbone is not None
        arrays, norm_statistics = self._versions[version]
        self.backbone.core.load_state_dict({name: torch.from_numpy(array) for name, array in arrays.items()})
        set_mode(self.backbone.body, False, norm_statistics)
        self.loaded = version
        self._features.clear()
