"""The body of a run: one in memory, loaded with what a stage starts from; features of any split on demand."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from headstart.data import Dataset
from headstart.data.examples import Examples
from headstart.errors import HeadstartError
from headstart.heads import LinearHead
from headstart.recipe import MODULES, Model, Rounds, Stage
from headstart.statistics import Features

if TYPE_CHECKING:  # torch is not needed where the data are features
    from headstart.backbones import Inputs
    from headstart.modules import Attached

Arrays = Mapping[str, np.ndarray]

PRETRAINED = -1


@dataclass(frozen=True, eq=False)
class Version:
    """A body that a stage has made: its weights, how it treats batch norm, and the module on it."""

    arrays: Arrays
    norm_statistics: str
    module: tuple[str, Mapping[str, Any], Arrays] | None = None


class Body:
    """A backbone and the weights that stages have given it, by the number of the stage; or features, and no body."""

    def __init__(self, model: Model, dataset: Dataset | None, keep_pretrained: bool = False) -> None:
        self._data = dataset
        if dataset is not None and (dataset.kind == "features") != (model.backbone == "features"):
            kind = "already features" if dataset.kind == "features" else f"{dataset.kind}s, not features"
            fix = '"features"' if dataset.kind == "features" else "a backbone that reads them (see headstart backbones)"
            raise HeadstartError(f"model.backbone: the data of {dataset.name} are {kind}; set it to {fix}")
        self.backbone = None
        self.loaded = PRETRAINED
        self._versions: dict[int, Version] = {}
        self._module: tuple[str, Mapping[str, Any], Attached] | None = None
        self._features: dict[str, Features] = {}
        if model.backbone != "features":
            from headstart.backbones import load_backbone

            self.backbone = load_backbone(model)
            if keep_pretrained:
                self.keep(PRETRAINED, "aggregate")

    @property
    def _dataset(self) -> Dataset:
        assert self._data is not None, "this body was made to be rebuilt, not to read examples"
        return self._data

    @property
    def dim(self) -> int:
        """Length d of a feature vector."""
        return self.backbone.dim if self.backbone else self._dataset.train.features().shape[1]

    def label_words(self) -> LinearHead | None:
        """The head of a prompt's label words, where the body is a masked language model."""
        if self.backbone is None or self.backbone.label_words is None:
            return None
        return LinearHead(*self.backbone.label_words)

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

    def attach(self, stage: Stage, seed: tuple[int, ...]) -> Attached | None:
        """The module that a stage trains: the one an earlier stage left on the body, or a new one."""
        if not isinstance(stage, Rounds) or stage.train == "head":
            return None
        keys = {"lora": ("rank", "alpha_lora"), "adapter": ("bottleneck",), "vpt": ("tokens",)}.get(stage.train, ())
        settings = {key: getattr(stage, key) for key in keys}
        if self._module is not None and (self._module[:2] != (stage.train, settings) or stage.method == "slora"):
            raise HeadstartError(
                f"stages.{seed[1]}.train: an earlier stage left a {self._module[0]} on the body; go on with it as it "
                "is, train the head, or set start to a stage before it"
            )
        if stage.train in MODULES and self._module is None:
            self._attach(stage.train, settings, seed[0] * 1000 + seed[1])
        return self._module[2] if self._module else None

    def _attach(self, kind: str, settings: Mapping[str, Any], seed: int = 0) -> None:
        from headstart.modules import attach

        assert self.backbone is not None
        self._module = kind, settings, attach(kind, self.backbone, settings, seed)

    def arrays(self) -> Arrays:
        """Parameters and buffers of the body as it is now, under the names that its checkpoints use."""
        from headstart.modules import plain_state

        assert self.backbone is not None
        state = plain_state(self.backbone.core)
        return {name: tensor.detach().cpu().contiguous().numpy() for name, tensor in state.items()}

    def module(self) -> tuple[str, Mapping[str, Any], Arrays] | None:
        """The module on the body: its kind, its settings and its parameters."""
        if self._module is None:
            return None
        kind, settings, attached = self._module
        return kind, settings, {name: p.detach().cpu().numpy() for name, p in attached.parameters.items()}

    def keep(self, number: int, norm_statistics: str) -> Version:
        """Remember the body as it is now under the number of the stage that made it."""
        arrays = {name: array.copy() for name, array in self.arrays().items()}
        module = self.module()
        if module is not None:
            module = module[0], module[1], {name: array.copy() for name, array in module[2].items()}
        self._versions[number] = Version(arrays, norm_statistics, module)
        self.loaded = number
        self._features.clear()
        return self._versions[number]

    def remember(self, number: int, version: Version) -> None:
        """A body that a stage made before the run was interrupted."""
        self._versions[number] = version

    def load(self, number: int) -> None:
        """Put what a stage made, or the pre-trained weights, into the body; nothing to do where they are there."""
        if number == self.loaded:
            return
        import torch

        from headstart.methods.network import set_mode
        from headstart.modules import plain_state

        assert self.backbone is not None
        version = self._versions[number]
        if self._module is not None:
            self._module[2].detach()
            self._module = None
        with torch.no_grad():
            for name, tensor in plain_state(self.backbone.core).items():
                tensor.copy_(torch.from_numpy(version.arrays[name]))
            if version.module is not None:
                kind, settings, arrays = version.module
                self._attach(kind, settings)
                assert self._module is not None
                for name, parameter in self._module[2].parameters.items():
                    parameter.copy_(torch.from_numpy(arrays[name]))
        set_mode(self.backbone.body, False, version.norm_statistics)
        self.loaded = number
        self._features.clear()
