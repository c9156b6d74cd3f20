"""The backbone of a run: one in memory, loaded with what a stage starts from; features of any split on demand."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from headstart.config.recipe import Model
from headstart.config.stage import MODULES, Stage
from headstart.core.plan import Plan
from headstart.core.statistics import Features
from headstart.data import Dataset
from headstart.data.describe import darkness
from headstart.data.examples import Examples, Ints, Joined
from headstart.errors import HeadstartError
from headstart.heads import LinearHead

if TYPE_CHECKING:  # torch is not needed where the data are features
    from torch import Tensor

    from headstart.backbones import Backbone, Inputs
    from headstart.modules import LocalModel

log = logging.getLogger("headstart")

Arrays = Mapping[str, np.ndarray]

PRETRAINED = -1


@dataclass(frozen=True, eq=False)
class Module:
    """A module that a stage has made: its kind, its settings, and its values for each task."""

    kind: str
    settings: Mapping[str, Any]
    values: tuple[Arrays, ...]


@dataclass(frozen=True, eq=False)
class Version:
    """A backbone that a stage has made: its weights, how it treats batch norm, and the module on it."""

    weights: int
    """The number of the stage whose weights it has: another one's, or the pre-trained ones, under a new module."""
    norm_statistics: str
    arrays: Arrays | None = None
    """The weights, where they are this stage's own: in a file, as a run may have many."""
    module: Module | None = None


class ModelStore:
    """A backbone and the weights that stages have given it, by the number of the stage; or features, and no
    backbone."""

    def __init__(
        self,
        model: Model,
        dataset: Dataset | None,
        keep_pretrained: bool = False,
        owners: Mapping[str, Ints | None] | None = None,
        others: Sequence[Model] = (),
        states: Path | None = None,
        finite: Literal["checked", "forced"] = "checked",
    ) -> None:
        """owners: by split, who holds each example, where that is known; others: the same network for further tasks,
        each under a prompt of its own; states: of a stage that is loaded again and again, a folder for what its frozen
        blocks make of the examples; finite: as `Backbone` has it."""
        self._data, self._owners, self._states = dataset, owners or {}, states
        if dataset is not None and (dataset.kind == "features") != (model.backbone == "features"):
            kind = "already features" if dataset.kind == "features" else f"{dataset.kind}s, not features"
            fix = '"features"' if dataset.kind == "features" else "a backbone that reads them (see headstart backbones)"
            raise HeadstartError(f"model.backbone: the data of {dataset.name} are {kind}; set it to {fix}")
        self.model: LocalModel | None = None
        """The backbone and the module on it; None where the data are features."""
        self.loaded = PRETRAINED
        self.weights = PRETRAINED
        """The stage whose weights the backbone has."""
        self._versions: dict[int, Version] = {}
        self.module: Module | None = None
        """The module on the backbone, with the values that the last stage which trained it made."""
        self._features: dict[str, Features] = {}
        self._inputs: dict[str, Inputs] = {}
        if model.backbone != "features":
            from headstart.backbones import load_backbones
            from headstart.modules import LocalModel

            first, *rest = (replace(backbone, finite=finite) for backbone in load_backbones((model, *others)))
            self.model = LocalModel(first, others=rest)
            if dataset is not None and dataset.kind == "image" and model.pixel_range is None:
                for warning in darkness(dataset.train):
                    log.warning(f"warning: {dataset.name}: {warning}")
            if keep_pretrained:
                copied = {name: array.copy() for name, array in self.arrays().items()}
                self._versions[PRETRAINED] = Version(PRETRAINED, "aggregate", copied)

    @property
    def _dataset(self) -> Dataset:
        assert self._data is not None, "this store was made to be rebuilt, not to read examples"
        return self._data

    @property
    def backbone(self) -> Backbone | None:
        """The backbone; None where the data are features."""
        return self.model.backbone if self.model else None

    def view(self, task: int) -> Backbone | None:
        """The backbone as a task sees it; None where the data are features."""
        return self.model.view(task) if self.model else None

    def _view_of(self, split: str, rows: Ints | None) -> Backbone:
        """The backbone as the task of these examples sees it."""
        examples: Examples = getattr(self._dataset, split)
        found = self.view(int(examples.parts(rows[:1])[0]) if rows is not None and len(rows) else 0)
        assert found is not None
        return found

    @property
    def dim(self) -> int:
        """Length d of a feature vector."""
        return self.backbone.dim if self.backbone else self._dataset.train.dim

    @property
    def norm_statistics(self) -> str:
        """How the backbone as it is loaded treats batch norm."""
        version = self._versions.get(self.loaded)
        return version.norm_statistics if version else "aggregate"

    @property
    def fixed_head(self) -> bool:
        """Whether the head is the backbone's own, and stays as it is."""
        return self.backbone is not None and self.backbone.task != "classify"

    @property
    def generates(self) -> bool:
        """Whether the backbone completes prompts."""
        return self.backbone is not None and self.backbone.task == "generate"

    def cut(self) -> int:
        """How many training examples of a backbone that answers in words have more tokens than it reads."""
        if not self.fixed_head or self.backbone is None:
            return 0
        from headstart.backbones.transforms import TextTransform

        if not isinstance(self.backbone.transform, TextTransform):
            return 0
        examples = self._dataset.train
        transforms: list[Any] = [view.transform for view in self.model.views] if self.model else []
        which = examples.parts(np.arange(len(examples))) if len(transforms) > 1 else np.zeros(len(examples), np.int64)
        given = enumerate(zip(which, examples.raw(0, len(examples)), strict=True))
        return sum(transforms[part].is_cut(each, f"example {number}") for number, (part, each) in given)

    def label_words(self, task: int = 0) -> LinearHead | None:
        """The head that a language model under a prompt has before any training; None for other backbones."""
        view = self.view(task)
        return None if view is None or view.label_words is None else LinearHead(*view.label_words)

    # ------------------------------------------------------------------------------------------- what it makes of data

    def features(self, split: str) -> Features:
        """Features [n, d] of a split by the backbone as it is loaded, from the cache where they are there.

        Where a module has values of its own for each task, a task's examples are read with its own.
        """
        if split not in self._features:
            examples: Examples = getattr(self._dataset, split)
            if self.backbone is None:
                self._features[split] = examples.features()
            elif self._by_client(split) is not None:  # the cache knows nothing of clients
                self._features[split] = self.known(split)
            else:
                self._features[split] = self._extracted(examples, split)
        return self._features[split]

    def _by_client(self, split: str) -> Ints | None:
        """Whose examples are to be seen apart: where layers normalise by the batch, no batch may mix clients."""
        from torch.nn.modules.batchnorm import _BatchNorm

        assert self.backbone is not None
        norms = [module for module in self.backbone.body.modules() if isinstance(module, _BatchNorm)]
        by_batch = any(norm.training or norm.running_mean is None for norm in norms)
        return self._owners.get(split) if by_batch else None

    def _extracted(self, examples: Examples, split: str) -> Features:
        from headstart.backbones import extract

        assert self.backbone is not None
        if not isinstance(examples.source, Joined):
            return extract(self.backbone, examples, f"{self._dataset.name} {split}")
        parts = []
        for task, part in enumerate(examples.source.parts):
            self.use(task)
            view = self.view(task)
            assert view is not None
            parts.append(extract(view, part, f"{self._dataset.name.split('+')[task]} {split}"))
        return np.concatenate(parts)

    def known(self, split: str) -> Features:
        """Features [n, d] of a split by the backbone as it is loaded: those at hand, or new ones that no cache
        keeps."""
        if split in self._features:
            return self._features[split]
        examples: Examples = getattr(self._dataset, split)
        if not isinstance(examples.source, Joined):
            return self.embedded(split)
        stops = np.cumsum([len(part) for part in examples.source.parts])
        parts = []
        for task, rows in enumerate(np.split(np.arange(stops[-1]), stops[:-1])):
            self.use(task)
            parts.append(self.embedded(split, rows))
        return np.concatenate(parts)

    def embedded(self, split: str, rows: Ints | None = None) -> Features:
        """Features [n, d] of a split, or of some of its examples, by the backbone as it is now, while it is trained."""
        from headstart.backbones import embed, embed_rows

        backbone = self._view_of(split, rows)
        examples, what = getattr(self._dataset, split), f"{self._dataset.name} {split}"
        owners = self._by_client(split)
        if rows is None and owners is None and not (self.model and self.model.prefix):
            return embed(backbone, examples, what)
        rows = np.arange(len(examples)) if rows is None else rows
        if owners is None:
            return embed_rows(backbone, self.inputs(split), rows, what)
        features = np.empty((len(rows), self.dim), np.float32)
        for owner in np.unique(owners[rows]):
            mine = owners[rows] == owner
            features[mine] = embed_rows(backbone, self.inputs(split), rows[mine], what)
        return features

    @cached_property
    def flops_per_pass(self) -> float:
        """Floating-point operations of a forward pass of one example; 0 where the data are features."""
        if self.backbone is None:
            return 0.0
        from torch.utils.flop_counter import FlopCounterMode

        rows = np.arange(min(8, len(self._dataset.train)))
        with FlopCounterMode(display=False) as counter:
            self.embedded("train", rows)
        return float(counter.get_total_flops()) / len(rows)

    def inputs(self, split: str = "train") -> Inputs:
        """Batches of a split, for a backbone that trains."""
        from headstart.backbones import Inputs

        assert self.model is not None
        if split not in self._inputs:
            examples, what = getattr(self._dataset, split), f"{self._dataset.name} {split}"
            first, *others = self.model.views
            folder = self._states if self.model.prefix else None
            states = folder and folder / f"{split}-{examples.fingerprint()}.bin"
            self._inputs[split] = Inputs(first, examples, what, self.model.prefix, others, states)
        return self._inputs[split]

    def _forget(self) -> None:
        """The backbone is another one now: what was computed with it no longer holds."""
        self._features.clear()
        self._inputs.clear()

    # --------------------------------------------------------------------------------------------------------- modules

    def attach(self, stage: Stage, plan: Plan, seed: tuple[int, ...]) -> None:
        """Prepare the backbone for a stage: with the module that it trains, or that clients have values of their own
        for, which is the one that an earlier stage left there, or a new one."""
        self._inputs.clear()
        self._drop_prefix()
        if not plan.changes_features or self.model is None:
            return
        here = self.module
        kind = stage.train if not plan.still else here.kind if here and plan.module != "frozen" else "all"
        settings = stage.module_settings
        changed = here is not None and any(here.settings.get(key) != value for key, value in settings.items())
        if here is not None and (here.kind != kind or changed or stage.phased):
            key = "update" if stage.personalises else "train"
            raise HeadstartError(
                f"stages.{seed[1]}.{key}: an earlier stage left a {here.kind} on the backbone; continue with it as it "
                "is, train the head, or set start to a stage before it"
            )
        if kind in MODULES and here is None:
            if stage.personalises:
                raise HeadstartError(f"stages.{seed[1]}.update: no earlier stage left a {kind} on the backbone")
            made = {key: value for key, value in settings.items() if value is not None}
            try:
                self._attach(Module(kind, made, ()), seed[0] * 1000 + seed[1])
            except HeadstartError as error:
                raise HeadstartError(f"stages.{seed[1]}.train: {error}") from None
        flips = stage.augment == "flip" and self.model.backbone and self.model.backbone.kind == "image"
        if not flips and (kind in MODULES or kind == "norms"):
            self._cache_prefix(stage)

    def _cache_prefix(self, stage: Stage) -> None:
        """What comes before all that a stage trains is computed once."""
        from headstart.modules import depth_of, prefix_of

        assert self.model is not None
        assert self.backbone is not None
        modules = self.model.modules
        depth = modules[-1].depth if modules else depth_of(self.backbone, stage.blocks)
        self.model.prefix = prefix_of(self.backbone, depth)

    def _drop_prefix(self) -> None:
        if self.model is not None:
            self.model.prefix = None

    def _attach(self, module: Module, seed: int = 0) -> None:
        assert self.model is not None
        self.model.attach(module.kind, module.settings, seed)
        self.module = module
        self.use(0)

    def use(self, task: int) -> None:
        """Give the module the values of a task, where it has values for each."""
        if self.model is not None and self.module is not None and self.module.values:
            self._write(self.model.modules[0].parameters, self.module.values[task])

    def module_values(self) -> Arrays:
        """What the module's parameters are now; nothing where there is no module."""
        parameters = self.model.modules[0].parameters if self.model and self.model.modules else {}
        return {name: parameter.detach().cpu().numpy().copy() for name, parameter in parameters.items()}

    # -------------------------------------------------------------------------------------------------------- versions

    def arrays(self) -> Arrays:
        """Parameters and buffers of the backbone as it is now, under the names that its checkpoints use."""
        import torch

        assert self.model is not None
        state = {name: tensor.detach().cpu().contiguous() for name, tensor in self.model.state().items()}
        # Arrays have no bfloat16; back in the tensor, the value is the same.
        return {n: (each.float() if each.dtype == torch.bfloat16 else each).numpy() for n, each in state.items()}

    def keep(self, number: int, norm_statistics: str, values: Sequence[Arrays], trained: bool) -> Version:
        """The backbone as it is now, which is what a stage has made: to be saved, and to be remembered as it was saved.

        values: the module's, by task; trained: whether the backbone's own weights have changed.
        """
        if self.module is not None:
            self.module = replace(self.module, values=tuple(values))
        self.weights = number if trained else self.weights
        self.loaded = number
        self._drop_prefix()
        self._forget()
        return Version(self.weights, norm_statistics, self.arrays() if trained else None, self.module)

    def remember(self, number: int, version: Version) -> None:
        """A backbone that a stage has made."""
        self._versions[number] = version

    def reset(self) -> None:
        """The backbone without any module."""
        if self.model is not None:
            self.model.detach()
        self.module = None

    def load(self, number: int) -> None:
        """Put what a stage made, or the pre-trained weights, into the backbone; nothing to do where they are there."""
        if number == self.loaded:
            return
        assert self.model is not None
        version = self._versions[number]
        self.reset()
        if version.weights != self.weights:
            arrays = self._versions[version.weights].arrays
            assert arrays is not None
            self._write(self.model.state(), arrays)
            self.weights = version.weights
        if version.module is not None:
            self._attach(version.module)
        self.model.set_mode(False, version.norm_statistics)
        self.loaded = number
        self._drop_prefix()
        self._forget()

    def _write(self, tensors: Mapping[str, Tensor], arrays: Arrays) -> None:
        """Every one of the tensors from the array of its name; a `KeyError` where there is none."""
        import torch

        assert self.model is not None
        for name in tensors:  # one by one: they may come from a file
            self.model.write(tensors, {name: torch.from_numpy(np.asarray(arrays[name]))})
