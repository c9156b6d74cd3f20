"""What some data are, before anything is learned from them: sizes, modes, lengths, duplicates, unreadable images."""

from __future__ import annotations

import hashlib
import io
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image

from headstart.core.progress import progress
from headstart.data.examples import (
    Dataset,
    Examples,
    NoRangeError,
    UnreadableError,
    bytes_of,
    decode_image,
    in_dicom,
    problems_of,
)
from headstart.errors import HeadstartError, counted, listed

_BLOCK = 256
_DARK = 64  # of 255
_FEW = 16  # images that are looked at before a pass


@dataclass(frozen=True)
class Description:
    """Warnings are what a person should look at; facts are what there is; problems are what a run would refuse."""

    facts: tuple[str, ...]
    warnings: tuple[str, ...]
    problems: tuple[str, ...]


def describe(dataset: Dataset, pixel_range: tuple[float, float] | None = None) -> Description:
    """Look at every example once; pixel_range: as in [model]."""
    seen: dict[bytes, list[tuple[str, int]]] = defaultdict(list)
    facts, errors = Counter[str](), list[UnreadableError]()
    sizes: list[tuple[int, ...]] = []
    brightest: float | None = None  # of grey of more than 8 bits
    shades: list[float] = []  # of grey of 32 bits that nothing says the range of
    splits = dataset.splits
    with progress(f"examples of {dataset.name}", sum(map(len, splits.values()))) as advance:
        for split, examples in splits.items():
            for place, value in _values(examples):
                seen[hashlib.blake2b(bytes_of(value), digest_size=16).digest()].append((split, place))
                advance(1)
                if dataset.kind == "image":
                    try:
                        image = decode_image(value, f"{split}: example {place}", pixel_range)
                        mode, size = _mode(value)
                    except UnreadableError as error:
                        errors.append(error)
                        shades += _shades(value) if isinstance(error, NoRangeError) else ()
                        continue
                    facts[mode] += 1
                    if image.mode == "F" and not in_dicom(value):
                        brightest = max(brightest or 0.0, float(np.asarray(image).max()))
                    sizes.append(size)
                elif dataset.kind == "text":
                    sizes.append((sum(map(len, [value] if isinstance(value, str) else map(str, value))),))
    labels = {split: examples.labels for split, examples in splits.items()}
    warnings = [*_warnings(dataset, seen, sizes, labels)]
    if pixel_range is None:
        warnings += _darkness(brightest)
    problems = problems_of(errors)
    if shades:
        problems[-1] += f"; these images have values from {min(shades):g} to {max(shades):g}"
    return Description(_facts(dataset, sizes, facts), tuple(warnings), tuple(problems))


def darkness(examples: Examples) -> list[str]:
    """A warning where a few images, from all over the examples, are grey of 16 bits and nearly black."""
    return _darkness(_brightest(examples))


def grey_range(examples: Examples) -> tuple[float, float] | None:
    """What ``model.pixel_range`` should be by a few images of grey of 32 bits, or of 16 and nearly black; or None."""
    shades: list[float] = []
    for value in _some(examples):
        try:
            decode_image(value, "example")
        except NoRangeError:
            shades += _shades(value)
        except UnreadableError:
            continue
    if shades and min(shades) < max(shades):
        return min(shades), max(shades)
    brightest = _brightest(examples)
    return (0, _white(brightest)) if brightest is not None and brightest < _DARK else None


def _some(examples: Examples) -> Iterator[Any]:
    """A few images from all over the examples."""
    for place in np.unique(np.linspace(0, len(examples) - 1, min(len(examples), _FEW)).astype(np.int64)):
        yield from examples.raw(place, place + 1)


def _brightest(examples: Examples) -> float | None:
    """The highest value of grey of 16 bits in a few images, of 255."""
    found = []
    for value in (value for value in _some(examples) if not in_dicom(value)):
        with suppress(HeadstartError):  # whoever reads all of them says which cannot be read
            image = decode_image(value, "example")
            found += [float(np.asarray(image).max())] if image.mode == "F" else []
    return max(found, default=None)


def _darkness(brightest: float | None) -> list[str]:
    """brightest: the highest value of grey of 16 bits, of 255."""
    if brightest is None or brightest >= _DARK:
        return []
    most, white = round(brightest * 257), _white(brightest)
    return [f"grey of 16 bits goes up to {most:,} of 65,535 and is nearly black; set model.pixel_range = [0, {white}]"]


def _white(brightest: float) -> int:
    """What a detector of as many bits as this value of 255 has in 16 calls white."""
    return int(2 ** max(1, round(brightest * 257).bit_length()) - 1)


def _shades(value: Any) -> tuple[float, float]:
    """The lowest and the highest value of an image file."""
    with _opened(value) as image:
        shades = np.asarray(image)
    return float(shades.min()), float(shades.max())


def _opened(value: Any) -> Image.Image:
    """An image file as Pillow sees it before it is decoded."""
    return Image.open(io.BytesIO(value["bytes"]) if value["bytes"] is not None else value["path"])


def _values(examples: Examples) -> Iterator[tuple[int, Any]]:
    for start in range(0, len(examples), _BLOCK):
        yield from enumerate(examples.raw(start, start + _BLOCK), start)


def _mode(value: Any) -> tuple[str, tuple[int, int]]:
    """What Pillow says of a file before it is decoded."""
    if isinstance(value, np.ndarray):
        return "array", (value.shape[1], value.shape[0])
    if in_dicom(value):
        return "DICOM", decode_image(value, "").size
    with _opened(value) as image:
        return f"{image.format} {image.mode}", image.size


def _facts(dataset: Dataset, sizes: list[tuple[int, ...]], modes: Counter[str]) -> tuple[str, ...]:
    if dataset.kind == "features":
        return (f"features of length {dataset.train.dim}",)
    if not sizes:
        return ()
    if dataset.kind == "text":
        lengths = [size[0] for size in sizes]
        middle = int(np.median(lengths))
        return (f"texts of {min(lengths):,} to {max(lengths):,} characters, half of them up to {middle:,}",)
    common, count = Counter(sizes).most_common(1)[0]
    width, height = zip(*sizes, strict=True)
    shapes = f"{common[0]} × {common[1]} pixels"
    if count < len(sizes):
        shapes = f"{min(width)} × {min(height)} to {max(width)} × {max(height)} pixels, most often {shapes} ({count:,})"
    return f"images of {shapes}", "modes: " + ", ".join(f"{mode} ({n:,})" for mode, n in modes.most_common())


def _warnings(
    dataset: Dataset,
    seen: dict[bytes, list[tuple[str, int]]],
    sizes: list[tuple[int, ...]],
    labels: dict[str, Any],
) -> Iterator[str]:
    """Examples that are there twice, and texts without a character."""
    repeated = [places for places in seen.values() if len(places) > 1]
    leaked = [places for places in repeated if {split for split, _ in places} >= {"train", "test"}]
    if leaked:
        tested = sum(split == "test" for places in leaked for split, _ in places)
        where = listed((_shown(dataset, *each) for each in leaked[0]), 4)
        yield f"{counted(tested, 'test example')} also in the training split, the first: {where}; accuracy is too high"
    within = sum(len(places) - 1 for places in repeated) - sum(len(places) - 1 for places in leaked)
    if within > 0:
        yield f"{counted(within, 'example')} a copy of another of the same split"
    if dataset.target == "classes":
        torn = [places for places in repeated if len({int(labels[split][place]) for split, place in places}) > 1]
        if torn:
            where = listed((f"{_shown(dataset, s, p)} as {dataset.classes[labels[s][p]]}" for s, p in torn[0]), 4)
            yield f"{counted(len(torn), 'example')} under several labels, the first: {where}"
    if dataset.kind == "text" and (empty := sum(size[0] == 0 for size in sizes)):
        yield f"{counted(empty, 'text')} empty"


def _shown(dataset: Dataset, split: str, place: int) -> str:
    """An example: the split, and its file or else its place there."""
    (value,) = getattr(dataset, split).raw(place, place + 1)
    path = value.get("path") if isinstance(value, dict) else None
    return f"{split} {path or place}"
