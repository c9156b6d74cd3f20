"""Preprocessing against numbers worked out by hand."""

import io
import struct
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from PIL import Image
from torch import nn

from headstart.backbones.transforms import NORMALISATIONS, ImageInput, ImageTransform, TextTransform
from headstart.errors import HeadstartError
from tests.backbones import tiny_backbones


def grey(rows: list[list[int]]) -> npt.NDArray[np.uint8]:
    return np.array(rows, np.uint8)


def encoded(image: npt.NDArray[np.uint8] | Image.Image, suffix: str, **settings: Any) -> bytes:
    file = io.BytesIO()
    (Image.fromarray(image) if isinstance(image, np.ndarray) else image).save(file, suffix, **settings)
    return file.getvalue()


def record(data: bytes | None, path: str | None = None) -> dict[str, Any]:
    """An image as a Hugging Face table holds it."""
    return {"bytes": data, "path": path}


NOISE = np.random.default_rng(0).integers(0, 256, (48, 64, 3), dtype=np.uint8)


# -------------------------------------------------------------------------------------------------------------- resize


def test_squash_halves_the_longer_side_with_a_triangle_filter() -> None:
    # Four columns to two: a triangle of half-width 2 around 1.0 weighs the columns at 0.5, 1.5, 2.5 by 3 : 3 : 1, so
    # that the left pixel is 255 / 7 = 36.4 and the right one, by symmetry, 255 · 6 / 7 = 218.6.
    image = ImageTransform(2)(grey([[0, 0, 255, 255]] * 2), "x")
    np.testing.assert_allclose(image[..., 0], [[255 / 7, 255 * 6 / 7]] * 2, rtol=1e-5)
    assert image.shape == (2, 2, 3)
    assert image.dtype == np.float32


@pytest.mark.parametrize(
    ("resize", "expected"),
    [
        ("squash", [0, 200]),
        # Twice as wide, the columns are 0, 50, 150, 200; the crop keeps the middle two.
        (2, [50, 150]),
        # Fewer pixels than the crop needs would leave a border; the crop decides.
        (1, [50, 150]),
    ],
)
def test_a_wide_image_is_squashed_or_cropped(resize: Any, expected: list[int]) -> None:
    image = ImageTransform(2, resize)(grey([[0, 200]]), "x")
    np.testing.assert_array_equal(image[..., 1], [expected, expected])


def test_crop_takes_the_centre_of_a_tall_image_without_interpolating() -> None:
    columns = grey([[10 * row + column for column in range(4)] for row in range(8)])
    image = ImageTransform(2, 4)(columns, "x")  # 4 is the shorter side already
    np.testing.assert_array_equal(image[..., 2], [[31, 32], [41, 42]])


def test_crop_keeps_the_aspect_ratio() -> None:
    # A square of 3 x 3 in an image of 9 x 3 stays a square when the shorter side becomes 6.
    picture = np.zeros((3, 9), np.uint8)
    picture[:, 3:6] = 240
    image = ImageTransform(6, 6)(picture, "x")[..., 0]
    np.testing.assert_array_equal(image, np.tile(image[0], (6, 1)))
    # Edges between pixels: 60 and 180 beside them, by linear interpolation; the crop starts at column 6 of 18.
    np.testing.assert_array_equal(image[0], [180, 240, 240, 240, 240, 180])


@pytest.mark.parametrize("shape", [(5, 9), (9, 5), (7, 7), (1, 300), (300, 1)])
@pytest.mark.parametrize("resize", ["squash", 8, 11])
def test_every_shape_becomes_a_square(shape: tuple[int, int], resize: Any) -> None:
    image = ImageTransform(8, resize)(np.full(shape, 77, np.uint8), "x")
    np.testing.assert_array_equal(image, np.full((8, 8, 3), 77))


def test_images_are_stacked_in_order() -> None:
    values = [np.full((2, 2, 3), value, np.uint8) for value in (7, 9)]
    (batch,) = ImageTransform.collate(values)
    assert batch.dtype == torch.uint8
    assert batch.shape == (2, 2, 2, 3)
    assert batch[:, 0, 0, 0].tolist() == [7, 9]


# -------------------------------------------------------------------------------------------------------------- decode


@pytest.mark.parametrize(
    ("image", "expected"),
    [
        (Image.new("RGB", (2, 2), (1, 2, 3)), (1, 2, 3)),
        (Image.new("L", (2, 2), 9), (9, 9, 9)),
        (Image.new("RGBA", (2, 2), (1, 2, 3, 128)), (1, 2, 3)),
        (Image.new("1", (2, 2), 1), (255, 255, 255)),
        (Image.new("RGB", (2, 2), (250, 0, 5)).convert("P", palette=Image.Palette.ADAPTIVE), (250, 0, 5)),
    ],
    ids=["RGB", "L", "RGBA", "1", "P"],
)
def test_every_mode_becomes_rgb(image: Image.Image, expected: tuple[int, int, int]) -> None:
    pixels = ImageTransform(2)(record(encoded(image, "PNG")), "x")
    np.testing.assert_array_equal(pixels, np.full((2, 2, 3), expected))


def test_bytes_path_and_array_are_the_same_image(tmp_path: Path) -> None:
    path = tmp_path / "image.png"
    path.write_bytes(encoded(NOISE, "PNG"))
    transform = ImageTransform(16)
    array = transform(NOISE, "x")
    np.testing.assert_array_equal(transform(record(path.read_bytes()), "x"), array)
    np.testing.assert_array_equal(transform(record(None, str(path)), "x"), array)
    assert len(np.unique(array)) > 50


@pytest.mark.parametrize("suffix", ["PNG", "JPEG", "GIF", "BMP", "WEBP", "TIFF", "PPM"])
@pytest.mark.parametrize("share", [0.0, 0.02, 0.6])
def test_truncated_image_is_an_error_that_names_it(suffix: str, share: float) -> None:
    data = encoded(NOISE, suffix)
    whole = ImageTransform(16)(record(data), "x")
    assert whole.shape == (16, 16, 3)
    with pytest.raises(HeadstartError, match=r"^train: example 7 is not a readable image: ") as raised:
        ImageTransform(16)(record(data[: int(len(data) * share)]), "train: example 7")
    assert "replace it or remove it" in str(raised.value)


@pytest.mark.parametrize(
    "data",
    [
        b"not an image at all",
        b"P6\n2x 2\n255\n" + bytes(12),  # the decoder raises ValueError
        encoded(NOISE, "PNG").replace(b"IDAT", b"IDAQ"),
        encoded(NOISE, "PNG")[:60] + bytes(40) + encoded(NOISE, "PNG")[100:],
    ],
    ids=["text", "header", "chunk", "zeros"],
)
def test_damaged_image_is_an_error_that_names_it(data: bytes) -> None:
    with pytest.raises(HeadstartError, match=r"^test: example 3 \(cats/4\.png\) is not a readable image: "):
        ImageTransform(16)(record(data, "cats/4.png"), "test: example 3")


def test_missing_image_file_is_an_error_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(HeadstartError, match=r"example 0 \(.*gone\.png\) is not a readable image"):
        ImageTransform(16)(record(None, str(tmp_path / "gone.png")), "example 0")


STEPS = np.linspace(0, 255, 12).astype(np.uint8).reshape(3, 4)
WIDE = np.linspace(0, 65535, 12).astype(np.uint16).reshape(3, 4)


def pgm(white: int) -> bytes:
    """Two bytes a pixel, the high one first; Pillow opens it as "I"."""
    return b"P5 4 3 %d\n" % white + np.round(WIDE / 65535 * white).astype(">u2").tobytes()


@pytest.mark.parametrize(
    ("data", "accuracy"),
    [
        (encoded(Image.fromarray(WIDE), "PNG"), 1e-4),
        (encoded(Image.fromarray(WIDE), "TIFF"), 1e-4),
        (encoded(Image.frombytes("I;16B", (4, 3), WIDE.astype(">u2").tobytes()), "TIFF"), 1e-4),
        (pgm(65535), 1e-4),
        (pgm(1000), 255 / 1000),
    ],
    ids=["PNG", "TIFF", "TIFF big-endian", "PGM", "PGM to 1000"],
)
def test_grey_of_sixteen_bits_is_scaled(data: bytes, accuracy: float) -> None:
    pixels = ImageTransform(3, 3)(record(data), "x")  # the first three columns, as they are
    np.testing.assert_allclose(pixels, np.stack([WIDE[:, :3] / 257] * 3, axis=2), atol=accuracy)


@pytest.mark.parametrize("size", [2, 3, 9])
def test_grey_of_sixteen_bits_is_the_image_of_eight(size: int) -> None:
    data = encoded(Image.fromarray(STEPS.astype(np.uint16) * 257), "PNG")
    np.testing.assert_array_equal(ImageTransform(size)(record(data), "x"), ImageTransform(size)(STEPS, "x"))


def test_sixteen_bits_are_not_rounded_to_eight() -> None:
    # Twelve bits in a file of sixteen, as from many scanners: 4,095 / 257 is 15.9, and steps of 1 / 257 count.
    data = encoded(Image.fromarray(np.array([[0, 100], [101, 4095]], np.uint16)), "PNG")
    expected = np.array([[0, 100], [101, 4095]]) / 257
    np.testing.assert_allclose(ImageTransform(2)(record(data), "x"), np.stack([expected] * 3, axis=2), rtol=1e-6)


def test_a_tiff_of_twelve_bits_has_its_own_white() -> None:
    # Width 2, height 1, 12 bits, no compression, black is zero, one strip of three bytes: 0x111 and 0xFFF.
    tags = [(256, 2), (257, 1), (258, 12), (259, 1), (262, 1), (273, 8 + 2 + 12 * 8 + 4), (278, 1), (279, 3)]
    table = b"".join(struct.pack("<HHII", tag, 3, 1, value) for tag, value in tags)
    data = b"II*\0" + struct.pack("<IH", 8, len(tags)) + table + bytes(4) + bytes([0x11, 0x1F, 0xFF])
    pixels = ImageTransform(1, 1)(record(data), "x")[0, 0]
    # The two pixels, 17 and 255, become one square of the shorter side's length: the middle of the two is cut out.
    np.testing.assert_allclose(pixels, [17, 17, 17], rtol=1e-6)


@pytest.mark.parametrize(
    ("values", "kind", "pixel_range", "expected"),
    [
        (np.array([[0, 2047], [4095, 9000]], np.uint16), "PNG", (0, 4095), [[0, 127.47], [255, 255]]),
        (np.array([[0.0, 0.25], [0.5, 2.0]], np.float32), "TIFF", (0, 1), [[0, 63.75], [127.5, 255]]),
        (np.array([[-160, 40], [240, 5000]], np.int32), "TIFF", (-160, 240), [[0, 127.5], [255, 255]]),
        (np.array([[0.0, 0.25], [0.5, 1.0]], np.float32), "TIFF", (1, 0), [[255, 191.25], [127.5, 0]]),
    ],
    ids=["twelve bits in sixteen", "floats", "32 bits with a sign", "negative"],
)
def test_a_pixel_range_says_what_is_black_and_white(
    values: npt.NDArray[Any], kind: str, pixel_range: tuple[float, float], expected: Any
) -> None:
    pixels = ImageTransform(2, "squash", pixel_range)(record(encoded(Image.fromarray(values), kind)), "x")
    np.testing.assert_allclose(pixels, np.stack([expected] * 3, axis=2), atol=0.01)
    eight = record(encoded(Image.fromarray(STEPS), "PNG"))  # grey of 8 bits is as it is
    np.testing.assert_array_equal(ImageTransform(2, "squash", pixel_range)(eight, "x"), ImageTransform(2)(eight, "x"))


@pytest.mark.parametrize("values", [np.array([[0.0, 0.5]], np.float32), np.array([[0, 70_000]], np.int32)])
def test_grey_without_a_white_is_refused(values: npt.NDArray[Any]) -> None:
    with pytest.raises(HeadstartError, match=r"^scan 3: grey of 32 bits .*8 or 16 bits$"):
        ImageTransform(2)(record(encoded(Image.fromarray(values), "TIFF")), "scan 3")


@pytest.mark.parametrize(
    ("orientation", "turned"),
    [
        (1, STEPS), (2, STEPS[:, ::-1]), (3, STEPS[::-1, ::-1]), (4, STEPS[::-1]),
        (5, STEPS.T), (6, np.rot90(STEPS, -1)), (7, STEPS[::-1, ::-1].T), (8, np.rot90(STEPS)),
    ],
)  # fmt: skip
@pytest.mark.parametrize(("suffix", "factor"), [("PNG", 1), ("PNG", 257), ("TIFF", 1), ("TIFF", 257)])
def test_images_are_turned_as_their_exif_data_say(
    orientation: int, turned: npt.NDArray[Any], suffix: str, factor: int
) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    image = Image.fromarray(STEPS if factor == 1 else STEPS.astype(np.uint16) * factor)
    pixels = ImageTransform(3, 3)(record(encoded(image, suffix, exif=exif)), "x")
    np.testing.assert_allclose(pixels, ImageTransform(3, 3)(np.ascontiguousarray(turned), "x"), atol=1e-3)


def test_exif_data_that_cannot_be_read_turn_nothing() -> None:
    plain, odd = (encoded(NOISE, "JPEG", **given) for given in ({}, {"exif": b"Exif\0\0no TIFF at all"}))
    np.testing.assert_array_equal(ImageTransform(16)(record(odd), "x"), ImageTransform(16)(record(plain), "x"))


# ------------------------------------------------------------------------------------------------------- normalisation


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        # (255, 128, 0) / 255 = (1, 0.5019608, 0), less the mean, over the deviation.
        ("torch", (2.2489083, 0.2051821, -1.8044444)),
        ("cifar10", (2.0591093, 0.0811531, -1.7068043)),
        ("half", (1.0, 0.0039216, -1.0)),
        # (x − 127) / 128
        ("lite", (1.0, 0.0078125, -0.9921875)),
        # blue, green, red, less their means
        ("caffe", (-103.939, 11.221, 131.32)),
    ],
)
def test_normalisation(name: str, expected: tuple[float, float, float]) -> None:
    images = torch.tensor([255, 128, 0], dtype=torch.uint8).expand(2, 5, 4, 3)
    pixels = ImageInput(nn.Identity(), NORMALISATIONS[name])(images)
    assert pixels.shape == (2, 3, 5, 4)
    torch.testing.assert_close(pixels, torch.tensor(expected).view(1, 3, 1, 1).expand(2, 3, 5, 4), rtol=0, atol=2e-5)


def test_the_table_of_normalisations_is_tested_in_full() -> None:
    assert set(NORMALISATIONS) == {"torch", "cifar10", "half", "lite", "caffe"}


@pytest.mark.parametrize(("name", "order"), [("lite", [0, 1, 2]), ("caffe", [2, 1, 0])])
def test_pixels_keep_their_places(name: str, order: list[int]) -> None:
    image = np.arange(24, dtype=np.uint8).reshape(1, 2, 4, 3)
    pixels = ImageInput(nn.Identity(), NORMALISATIONS[name])(torch.from_numpy(image)).numpy()
    mean, std = {"lite": ([127, 127, 127], 128), "caffe": ([103.939, 116.779, 123.68], 1)}[name]
    for channel, source in enumerate(order):
        expected = (image[0, :, :, source].astype(float) - mean[channel]) / std
        np.testing.assert_allclose(pixels[0, channel], expected, atol=1e-5)


# ---------------------------------------------------------------------------------------------------------------- text


def test_tokens_of_texts_and_pairs() -> None:
    transform = TextTransform(tiny_backbones.tokenizer(), 16)
    # [CLS] the cat [SEP]; an unknown word is number 3
    assert transform("the cat", "x").tolist() == [[0, 0], [4, 0], [5, 0], [2, 0]]
    assert transform("dog", "x").tolist() == [[0, 0], [3, 0], [2, 0]]
    assert transform("", "x").tolist() == [[0, 0], [2, 0]]
    pair = [[0, 0], [4, 0], [2, 0], [5, 1], [6, 1], [2, 1]]
    assert transform(("the", "cat sat"), "x").tolist() == pair
    assert transform(["the", "cat sat"], "x").tolist() == pair


def test_tokens_are_cut_inside_the_special_ones() -> None:
    transform = TextTransform(tiny_backbones.tokenizer(), 4)
    assert transform("the cat sat the cat sat", "x")[:, 0].tolist() == [0, 4, 5, 2]
    # Of a pair the longer text is cut first, until both are equal.
    pair = TextTransform(tiny_backbones.tokenizer(), 6)(("the cat", "cat sat the cat"), "x")
    assert pair.tolist() == [[0, 0], [4, 0], [2, 0], [5, 1], [6, 1], [2, 1]]


def test_collate_pads_masks_and_tells_pairs_apart() -> None:
    transform = TextTransform(tiny_backbones.tokenizer(), 16)
    ids, mask, segments = transform.collate([transform(value, "x") for value in ("cat", ("the", "cat sat"), "the cat")])
    assert ids.tolist() == [[0, 5, 2, 1, 1, 1], [0, 4, 2, 5, 6, 2], [0, 4, 5, 2, 1, 1]]
    assert mask.tolist() == [[1, 1, 1, 0, 0, 0], [1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0]]
    assert segments.tolist() == [[0] * 6, [0, 0, 0, 1, 1, 1], [0] * 6]
    assert {tensor.dtype for tensor in (ids, mask, segments)} == {torch.int64}


def test_collate_gives_segments_only_to_networks_that_read_them() -> None:
    transform = TextTransform(tiny_backbones.tokenizer(segments=False), 16)
    batch = transform.collate([transform(("the", "cat"), "x"), transform("sat", "x")])
    assert [tensor.tolist() for tensor in batch] == [[[0, 4, 2, 5, 2], [0, 6, 2, 1, 1]], [[1] * 5, [1, 1, 1, 0, 0]]]
