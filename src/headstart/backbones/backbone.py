"""A backbone: a body, what it reads, and where its weights come from."""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from headstart.backbones.prefix import Prefixed, evaluating
from headstart.backbones.transforms import NORMALISATIONS, ImageInput, ImageTransform, Normalisation, TextTransform
from headstart.config.recipe import Model
from headstart.core.files import sha256
from headstart.errors import HeadstartError, first_line, nearest_path

# Parameters of the classifier that a checkpoint may carry and a body has no use for.
_HEADS = ("classifier.", "fc.", "_fc.", "head.", "heads.", "pooler.")


@dataclass(frozen=True, eq=False)
class Backbone:
    """A body without its head: ``body(*transform.collate([transform(x) …]))`` is [B, d]."""

    name: str
    kind: Literal["image", "text"]
    dim: int
    body: nn.Module
    core: nn.Module
    """The part of the body that has the parameters, under the names that its checkpoints use."""
    transform: ImageTransform | TextTransform
    key: str
    """Everything but the weights that the features depend on: preprocessing and pooling."""
    convolutional: bool = False
    label_words: tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]] | None = None
    """Weight [C, d] and bias [C] of the head that a language model under a prompt has before any training."""
    task: Literal["classify", "choose", "generate"] = "classify"
    """"choose": the classes are words of the model itself, and the head that reads them off is not to be trained.
    "generate": features [B, 2] are the negative log-likelihood of a completion and the number of its tokens."""
    under: Callable[[Model], Backbone] | None = None
    """Of a model that reads prompts: itself under the prompt and the label words of another task, on the same
    network."""
    finite: Literal["checked", "forced"] = "checked"
    """What becomes of features that are NaN or infinity: an error, or zeros in their place."""

    @property
    def pixel_range(self) -> tuple[float, float] | None:
        """The values of grey that are black and white, where they are given."""
        return self.transform.pixel_range if isinstance(self.transform, ImageTransform) else None

    @property
    def by_batch(self) -> bool:
        """Whether batch norm goes by each batch's own statistics: a feature depends on the rest of its batch then."""
        norms = [each for each in self.body.modules() if isinstance(each, _BatchNorm)]
        return any(norm.training or norm.running_mean is None for norm in norms)

    def sample(self) -> tuple[Tensor, ...]:
        """A batch of one example that is made up, where the body is: what a check of the body runs on."""
        # Several tokens: what should have one value for each of them must not pass for one that all share.
        text = ("a a", "a a") if self.task == "generate" else "a a a a"
        value = text if self.kind == "text" else np.zeros((8, 8, 3), np.uint8)
        batch = self.transform.collate([self.transform(value, "a made-up example")])
        return moved(batch, next(self.body.parameters(), torch.empty(0)).device)

    def fingerprint(self) -> str:
        """Hash of the key and of every parameter and buffer, by name; and of layers that normalise by the batch."""
        return self._hash(self.key)

    def weights_digest(self) -> str:
        """The same on every machine that has the same weights."""
        return self._hash("")

    def _hash(self, key: str) -> str:
        digest = hashlib.blake2b(key.encode(), digest_size=16)
        for name, tensor in sorted(self.body.state_dict().items()):
            digest.update(f"{name}{tuple(tensor.shape)}{tensor.dtype}".encode())
            digest.update(tensor.detach().cpu().float().numpy().tobytes())
        for name, module in self.body.named_modules():
            if module.training:
                digest.update(f"{name} in training mode".encode())
        return digest.hexdigest()


def unused(
    backbone: Backbone, parameters: Mapping[str, nn.Parameter], batch: tuple[Tensor, ...] | None = None
) -> list[str]:
    """Names of the parameters that the features of a batch do not depend on (None: a made-up one): one forward pass,
    and the graph behind it."""
    required = [parameter.requires_grad for parameter in parameters.values()]
    try:
        for parameter in parameters.values():
            parameter.requires_grad_(True)
        with evaluating(backbone.body), torch.enable_grad(), torch.random.fork_rng():
            waiting: list[Any] = [run_body(backbone.body, backbone.sample() if batch is None else batch).grad_fn]
    finally:
        for parameter, before in zip(parameters.values(), required, strict=True):
            parameter.requires_grad_(before)
    seen, reached = {None}, set()
    while waiting:
        if (node := waiting.pop()) not in seen:
            seen.add(node)
            reached.add(id(getattr(node, "variable", None)))  # a leaf of the graph knows its parameter
            waiting += [before for before, _ in node.next_functions]
    return [name for name, parameter in parameters.items() if id(parameter) not in reached]


def run_body(body: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    """Features [B, d] of a batch; a batch that carries states goes on from them."""
    try:
        with batch.prefix.given(batch.states) if isinstance(batch, Prefixed) else nullcontext():
            features: Tensor = body(*batch)
    except ValueError as error:
        if "more than 1 value per channel" not in str(error):
            raise
        raise HeadstartError(
            "a batch of one example has no statistics to normalise by where maps are of one pixel; "
            "set norm_statistics = 'freeze', another batch_size, or a larger model.image_size"
        ) from None
    return features


def moved(batch: tuple[Tensor, ...], device: torch.device) -> tuple[Tensor, ...]:
    """A batch on a device, with the states that it carries."""
    tensors = tuple(tensor.to(device) for tensor in batch)
    return Prefixed(tensors, batch.states.to(device), batch.prefix) if isinstance(batch, Prefixed) else tensors


def taken(batch: tuple[Tensor, ...], rows: Tensor) -> tuple[Tensor, ...]:
    """Some examples of a batch, with the states that it carries."""
    tensors = tuple(tensor[rows] for tensor in batch)
    return Prefixed(tensors, batch.states[rows], batch.prefix) if isinstance(batch, Prefixed) else tensors


def image_backbone(
    network: nn.Module,
    dim: int,
    size: int,
    preprocess: str | Normalisation,
    model: Model,
    convolutional: bool = True,
    pooling: str = "mean",
    core: nn.Module | None = None,
) -> Backbone:
    """An image backbone; ``size`` and ``preprocess`` hold unless the recipe says otherwise."""
    size = model.image_size or size
    preprocess = model.preprocess if model.preprocess != "auto" else preprocess
    normalisation = NORMALISATIONS[preprocess] if isinstance(preprocess, str) else preprocess
    body = ImageInput(network, normalisation).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    # "upright": features that were cached before EXIF data and 16 bits were heeded are not taken for these.
    key = f"image upright {size} {model.resize} {normalisation} {pooling}"
    key += f" {model.pixel_range}" if model.pixel_range else ""
    transform = ImageTransform(size, model.resize, model.pixel_range)
    return Backbone(model.backbone, "image", dim, body, core or network, transform, key, convolutional)


def check_digest(file: Path, expected: str | None) -> str:
    """The SHA-256 of a file of weights; what another package brings must be what headstart was tested with."""
    try:
        digest = sha256(file)
    except OSError as error:
        raise HeadstartError(f"model.backbone: cannot read {file}: {error.strerror or error}") from None
    if digest != (expected or digest):
        raise HeadstartError(
            f"model.backbone: {file} is not the file that headstart knows under this name (its SHA-256 is "
            f"{digest[:12]}…, not {str(expected)[:12]}…); install it again, or give it another name"
        )
    return digest


def load_weights(module: nn.Module, path: Path) -> None:
    """Load a safetensors file or a ``weights_only`` checkpoint by name; only a classifier may be left over."""
    path = path.expanduser()
    if not path.is_file():
        raise HeadstartError(f"model.weights: there is no file {path}; {nearest_path(str(path))}")
    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            state: Mapping[str, Tensor] = load_file(path)
        else:
            state = torch.load(path, map_location="cpu", weights_only=True)
        missing, left = module.load_state_dict(state, strict=False)
    except Exception as error:  # a damaged file, a pickle that is more than weights, or other shapes
        reason = (str(error).strip().splitlines() or [type(error).__name__])[-1].strip()
        if isinstance(error, pickle.UnpicklingError | EOFError):  # torch's own advice is to trust the file
            reason = "it is damaged, or holds more than weights; save its state dict as safetensors"
        raise HeadstartError(f"model.weights: cannot load {path}: {reason}") from None
    left = [name for name in left if not name.startswith(_HEADS)]
    missing = needed(missing)
    if missing or left:
        parts = [f"{what} {some(names)}" for what, names in (("lacks", missing), ("has unknown", left)) if names]
        raise HeadstartError(f"model.weights: {path} is of another network: it {' and '.join(parts)}")


def needed(missing: Iterable[str]) -> list[str]:
    """What a body cannot do without: features are taken before a pooler, and counts of batches only serve training."""
    return [name for name in missing if not name.startswith("pooler.") and not name.endswith("num_batches_tracked")]


def some(names: list[str]) -> str:
    """How many parameters, and the first few of them."""
    return f"{len(names)} parameters ({', '.join(names[:3])}{' …' if len(names) > 3 else ''})"


def cannot_load(name: str, error: Exception) -> HeadstartError:
    """What to tell a user whose backbone does not load."""
    return HeadstartError(f"model.backbone: cannot load {name!r}: {first_line(error)}")
