"""Examples: rows of a memory-mapped table, or of an array, with labels; subsets are index views, never copies."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageOps, UnidentifiedImageError

from headstart.core.target import Target
from headstart.data.dicom import dicom_image, is_dicom
from headstart.errors import HeadstartError, listed

Ints = npt.NDArray[np.int64]
Kind = Literal["image", "text", "features"]
_REPLACE = "; replace it or remove it"
_ANY_RANGE = (0.0, 1.0)  # which values are black and white is the model's to say, and does not make a file unreadable


@dataclass(frozen=True, eq=False)
class Examples:
    """One split of a data set.

    source: an array of images [S, H, W] or features [S, d], a Hugging Face table with the input columns, or several
    splits one after the other; rows: [n] positions in the source; labels: [n]; clients, domains: [n] ids, or None
    where the data name none.
    """

    kind: Kind
    source: Any
    columns: tuple[str, ...]
    rows: Ints
    labels: Ints
    clients: Ints | None = None
    domains: Ints | None = None
    targets: npt.NDArray[np.float64] | None = None
    """[n, q] numbers, or 0 and 1 for labels, where these are learned and not classes; every label is then 0."""

    def __len__(self) -> int:
        return len(self.rows)

    def take(self, index: Ints) -> Examples:
        """The examples at these positions, as a view."""
        return replace(
            self,
            rows=self.rows[index],
            labels=self.labels[index],
            clients=None if self.clients is None else self.clients[index],
            domains=None if self.domains is None else self.domains[index],
            targets=None if self.targets is None else self.targets[index],
        )

    def relabelled(self, labels: Ints) -> Examples:
        """The same examples under other labels [n]."""
        return replace(self, labels=labels)

    @property
    def dim(self) -> int:
        """Length d of the features of examples that already are features."""
        return self.source.parts[0].dim if isinstance(self.source, Joined) else int(self.source.shape[1])

    def features(self) -> npt.NDArray[np.floating]:
        """The feature matrix [n, d] of examples that already are features; a view where they lie side by side."""
        if isinstance(self.source, Joined):
            return np.concatenate([part.features() for part in self.source.parts])[self.rows]
        first = int(self.rows[0]) if len(self.rows) else 0
        together = np.array_equal(self.rows, np.arange(first, first + len(self.rows)))
        return np.asarray(self.source[first : first + len(self.rows)] if together else self.source[self.rows])

    def raw(self, start: int, stop: int) -> list[Any]:
        """Undecoded inputs of a range of examples: image files or arrays, texts or pairs of texts."""
        rows = self.rows[start:stop]
        if isinstance(self.source, Joined):
            return self.source.raw(rows)
        if not self.columns:
            return list(self.source[rows])
        batch = self.source[rows.tolist()]
        if len(self.columns) == 1:
            return list(batch[self.columns[0]])
        return list(zip(*(batch[column] for column in self.columns), strict=True))

    def parts(self, index: Ints) -> Ints:
        """Of several splits one after the other: the number of the one that each of these examples [n] is from."""
        joined = isinstance(self.source, Joined)
        return self.source.parts_of(self.rows[index]) if joined else np.zeros(len(index), np.int64)

    @cached_property
    def digests(self) -> npt.NDArray[np.uint8]:
        """A hash [n, 16] of each input: the same contents have the same features, wherever they lie."""
        found = bytearray()
        for start in range(0, len(self), 1024):
            for value in self.raw(start, start + 1024):
                found += hashlib.blake2b(bytes_of(value), digest_size=16).digest()
        return np.frombuffer(found, np.uint8).reshape(len(self), 16)

    def fingerprint(self) -> str:
        """Hash of the inputs, in order."""
        digest = hashlib.blake2b(self.kind.encode(), digest_size=16)
        digest.update(self.digests.data)
        return digest.hexdigest()


@dataclass(frozen=True, eq=False)
class Joined:
    """Splits of several data sets as one source, part after part."""

    parts: tuple[Examples, ...]

    @cached_property
    def _stops(self) -> Ints:
        """Behind the last position of each part."""
        return np.cumsum([len(part) for part in self.parts])

    def parts_of(self, rows: Ints) -> Ints:
        """The number of the part that each position [n] is in."""
        return np.searchsorted(self._stops, rows, side="right")

    def raw(self, rows: Ints) -> list[Any]:
        """Undecoded inputs at these positions, in their order."""
        stops, owners = self._stops, self.parts_of(rows)
        values: list[Any] = [None] * len(rows)
        for number, part in enumerate(self.parts):
            mine = np.flatnonzero(owners == number)
            if len(mine):
                chosen = part.take(rows[mine] - (stops[number] - len(part)))
                for place, value in zip(mine, chosen.raw(0, len(chosen)), strict=True):
                    values[place] = value
        return values


@dataclass(frozen=True, eq=False)
class Dataset:
    """The splits of a data set and the names of its classes, clients and domains."""

    name: str
    classes: tuple[str, ...]
    train: Examples
    test: Examples
    validation: Examples | None = None
    clients: tuple[str, ...] = ()
    domains: tuple[str, ...] = ()
    target: Target = "classes"
    """What is learned; where it is no class, ``classes`` are the names of the q targets."""
    notes: tuple[str, ...] = ()
    """What is odd about the data, a sentence each."""
    fingerprint: str | None = None
    """Of data in memory: a hash of their contents. Others are known by the recipe that names them."""

    @property
    def kind(self) -> Kind:
        """What the examples are."""
        return self.train.kind

    @property
    def splits(self) -> dict[str, Examples]:
        """The splits that there are, by name."""
        found = {"train": self.train, "validation": self.validation, "test": self.test}
        return {split: examples for split, examples in found.items() if examples is not None}


class UnreadableError(HeadstartError):
    """An image that cannot be read, or several of them."""


class NoRangeError(UnreadableError):
    """Grey of 32 bits, and no ``model.pixel_range`` to scale it by."""


def in_dicom(value: Any) -> bool:
    """Whether an image record, or an array, is a DICOM file."""
    if isinstance(value, np.ndarray):
        return False
    return (value["bytes"] is None and str(value["path"]).lower().endswith(".dcm")) or is_dicom(value["bytes"] or b"")


def decode_image(value: Any, where: str, pixel_range: tuple[float, float] | None = None) -> Image.Image:
    """`upright` of a Hugging Face image record or an array [H, W] or [H, W, 3]; a damaged image is an error."""
    if isinstance(value, np.ndarray):
        return upright(Image.fromarray(value), pixel_range)
    image = None
    try:
        if in_dicom(value):
            return dicom_image(bytes_of(value))
        with Image.open(io.BytesIO(value["bytes"]) if value["bytes"] is not None else value["path"]) as image:
            return upright(image, pixel_range)
    except Exception as error:  # every format's decoder raises what it likes
        name = f" ({value['path']})" if value.get("path") else ""
        if isinstance(error, ValueError) and image is not None and image.mode in ("I", "F"):
            raise NoRangeError(f"{where}{name}: {error}") from None
        reason = "no known format" if isinstance(error, UnidentifiedImageError) else error
        raise UnreadableError(f"{where}{name} is not a readable image: {reason}{_REPLACE}") from None


def unreadable(
    examples: Examples, pixel_range: tuple[float, float] | None, what: str = ""
) -> dict[int, UnreadableError]:
    """Images that cannot be read: their positions, and why; what: what is said before the number of an example."""
    found: dict[int, UnreadableError] = {}
    for start in range(0, len(examples), 256):
        for place, value in enumerate(examples.raw(start, start + 256), start):
            try:
                decode_image(value, f"{what}example {place}", pixel_range)
            except UnreadableError as error:
                found[place] = error
    return found


def problems_of(errors: Iterable[UnreadableError]) -> list[str]:
    """A sentence for each image that cannot be read, and one for all that lack a range."""
    errors = list(errors)
    bare = [error for error in errors if isinstance(error, NoRangeError)]
    each = [str(error) for error in errors if not isinstance(error, NoRangeError)]
    return each + ([f"{len(bare)} images, the first {bare[0]}"] if len(bare) > 1 else [str(error) for error in bare])


def all_unreadable(
    what: str, splits: Mapping[str, Examples], pixel_range: tuple[float, float] | None, error: UnreadableError
) -> UnreadableError:
    """What is wrong with every image of some splits, once one of them cannot be read."""
    bad = [
        problem
        for split, examples in splits.items()
        for problem in unreadable(examples, pixel_range, f"{split}: " if split else "").values()
    ]
    if len(bad) < 2:
        return error
    lines = "\n".join(f"  - {problem}" for problem in problems_of(bad))
    count = sum(map(len, splits.values()))
    bare = all(isinstance(problem, NoRangeError) for problem in bad)
    skip = "--skip-unreadable" if what == "inputs" else "data.skip_unreadable = true"
    fix = "" if bare else f"; {skip} leaves them out"
    return UnreadableError(f"{what}: {len(bad)} of {count} images cannot be read{fix}:\n{lines}")


def readable(dataset: Dataset) -> Dataset:
    """The data set without the images that cannot be read, and a note of them."""
    notes: list[str] = []
    parts: dict[str, Any] = {}
    for split, examples in dataset.splits.items():
        kept, note = only_readable(examples)
        if note:
            parts[split] = kept
            notes.append(f"{split}: {note}")
    return replace(dataset, notes=(*dataset.notes, *notes), **parts)


def only_readable(examples: Examples) -> tuple[Examples, str]:
    """The examples without the images that cannot be read, and a note of them; empty where all can."""
    bad = unreadable(examples, _ANY_RANGE)
    if not bad:
        return examples, ""
    kept = examples.take(np.setdiff1d(np.arange(len(examples)), list(bad)))
    names = listed(str(problem).removesuffix(_REPLACE) for problem in bad.values())
    cannot = "image cannot be read, and is left out" if len(bad) == 1 else "images cannot be read, and are left out"
    return kept, f"{len(bad)} {cannot}: {names}"


# Exports show this function as it is written here: it must not need anything but numpy and Pillow.
def upright(image: Image.Image, pixel_range: tuple[float, float] | None = None) -> Image.Image:
    """The image turned as its EXIF data say, in RGB; grey of 16 bits in "F", from 0 to 255 and not rounded.

    pixel_range: the values of grey of more than 8 bits that are black and white.
    """
    # Pillow's "I" is 16 bits too where the format has no more; its conversion to RGB would cut values off at 255.
    wide = image.mode.startswith("I;16") or (image.mode == "I" and image.format in ("PNG", "PPM"))
    bits = getattr(image, "tag_v2", {}).get(258, (16,))[0]  # a TIFF may have 12
    image = ImageOps.exif_transpose(image)
    if pixel_range and (wide or image.mode in ("I", "F")):
        black, white = pixel_range
        shades = (np.asarray(image, np.float64) - black) * (255 / (white - black))
        return Image.fromarray(np.clip(shades, 0, 255).astype(np.float32))
    if wide:
        return Image.fromarray(np.asarray(image, np.float32) / np.float32((2**bits - 1) / 255))
    if image.mode in ("I", "F"):
        raise ValueError(
            "grey of 32 bits does not say which value is white; set model.pixel_range, or save 8 or 16 bits"
        )
    return image.convert("RGB")


def balanced(labels: Ints, count: int, rng: np.random.Generator, what: str) -> Ints:
    """Positions of ``count`` examples, the classes as equal as they can be, in the order of the data."""
    if count > len(labels):
        raise HeadstartError(f"{what} = {count} is more than the {len(labels)} examples there are")
    order = rng.permutation(len(labels))
    ranked = _rank_within(labels[order])
    return np.sort(order[np.argsort(ranked, kind="stable")[:count]])


def held_out(groups: Ints, fraction: float, rng: np.random.Generator) -> npt.NDArray[np.bool_]:
    """Mask [n] of the examples held out: this share of every group, rounded to the nearest, at random."""
    kept = np.floor(np.bincount(groups) * fraction + 0.5)
    return np.asarray(random_rank(groups, rng) < kept[groups])


def random_rank(groups: Ints, rng: np.random.Generator) -> Ints:
    """0, 1, 2, … within each group [n], in random order."""
    order = rng.permutation(len(groups))
    rank = np.empty(len(groups), np.int64)
    rank[order] = _rank_within(groups[order])
    return rank


def _rank_within(groups: Ints) -> Ints:
    """0, 1, 2, … within each group, in order of appearance."""
    order = np.argsort(groups, kind="stable")
    sizes = np.bincount(groups)
    starts = np.concatenate([[0], np.cumsum(sizes)[:-1]])
    rank = np.empty(len(groups), np.int64)
    rank[order] = np.arange(len(groups)) - np.repeat(starts, sizes)
    return rank


def bytes_of(value: Any) -> bytes:
    """What makes an undecoded input the same as another."""
    if isinstance(value, np.ndarray):
        return str(value.shape).encode() + value.tobytes()
    if isinstance(value, dict):
        if value["bytes"] is not None:
            return bytes(value["bytes"])
        try:
            with open(value["path"] or "", "rb") as file:
                return file.read()
        except OSError as error:
            raise HeadstartError(f"cannot read the image {value['path']}: {error.strerror}") from None
    if isinstance(value, str):
        return value.encode()
    return b"\0".join(str(part).encode() for part in value)


def codes(values: Iterable[Any]) -> tuple[Ints, tuple[str, ...]]:
    """Numbers 0, 1, … for arbitrary ids, and the ids' names in that order."""
    if isinstance(values, np.ndarray) and values.dtype.kind in "iu":  # a text for each number, not for each example
        known, places = np.unique(values, return_inverse=True)
        numbers, names = codes(known.tolist())
        return numbers[places], names
    found, numbers = np.unique(np.asarray([str(value) for value in values]), return_inverse=True)
    return numbers.astype(np.int64), tuple(str(name) for name in found)


def not_finite(features: npt.NDArray[np.floating]) -> Ints:
    """Positions of the rows [n, d] that hold NaN or infinity; looked at some at a time."""
    found = [np.zeros(0, np.int64)]
    for start in range(0, len(features), step := 1 << 16):
        found.append(start + np.flatnonzero(~np.isfinite(features[start : start + step]).all(axis=1)))
    return np.concatenate(found)


def check_labels(labels: Ints, where: str, n_classes: int | None = None) -> None:
    """Labels number the classes 0, 1, …; a number beyond any plausible class is a mistake, not a class."""
    limit = n_classes if n_classes is not None else max(1000, 10 * len(labels))
    bad = np.flatnonzero((labels < 0) | (labels >= limit))
    if len(bad):
        above = "" if labels[bad[0]] < 0 else f" to {limit - 1}"
        raise HeadstartError(
            f"{where}: label {labels[bad[0]]} at row {bad[0]} is out of range; number the classes from 0{above}"
        )


def numbered(n_classes: int) -> tuple[str, ...]:
    """Names of classes that have none: their numbers."""
    return tuple(str(label) for label in range(n_classes))


def read_targets(
    given: Mapping[str, npt.NDArray[Any]], asked: Target | None, where: str
) -> tuple[Target, dict[str, npt.NDArray[np.float64]]] | None:
    """The kind of some values [n] or [n, q] by split, and the values as targets [n, q]; None where they are classes.

    Where nothing is asked for: several columns of 0 and 1 are labels, other numbers that are not whole are regressed.
    """
    flat = all(values.ndim == 1 for values in given.values())
    numbers = all(values.dtype.kind in "fiub" for values in given.values())
    whole = all(values.dtype.kind in "iub" for values in given.values())
    if asked == "classes" or (asked is None and flat and (whole or not numbers)):
        return None
    if not numbers or any(values.ndim not in (1, 2) or 0 in values.shape[1:] for values in given.values()):
        kinds = ", ".join(dict.fromkeys(f"{values.dtype} {list(values.shape)}" for values in given.values()))
        raise HeadstartError(f"{where} must be numbers [n] or [n, q]; it is {kinds}")
    found = {split: values.astype(np.float64).reshape(len(values), -1) for split, values in given.items()}
    if not all(np.isfinite(values).all() for values in found.values()):
        raise HeadstartError(f"{where} holds NaN or infinity; every target of every example must be known")
    binary = all(np.isin(values, (0, 1)).all() for values in found.values())
    rounded = all((values == np.rint(values)).all() for values in found.values())
    if asked is None and rounded and (flat or not binary):
        raise HeadstartError(
            f"{where} holds whole numbers, as {next(iter(given.values())).dtype}: where they are classes, write them "
            "as integers in one column; otherwise set data.target = 'regression'"
        )
    if asked == "multilabel" and not binary:
        raise HeadstartError(f"{where} must be 0 and 1, a column for each label; it holds other numbers")
    return asked or ("multilabel" if binary else "regression"), found
