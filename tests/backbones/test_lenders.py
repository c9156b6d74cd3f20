"""An example is passed through a body once, whichever split or seed asks for it."""

from pathlib import Path

import numpy as np
import pytest

from headstart.backbones import Backbone, extract
from headstart.backbones.cache import BLOCK
from tests.backbones.tiny_backbones import colour_means, means_backbone, pictures

COUNT = 2 * BLOCK + 10


def seen(backbone: Backbone) -> int:
    """Images that a backbone has seen."""
    return int(backbone.body.seen)


def test_another_split_of_the_same_examples_passes_none_again() -> None:
    backbone, examples = means_backbone(), pictures(COUNT)
    extract(backbone, examples)
    assert seen(backbone) == COUNT
    order = np.random.default_rng(0).permutation(COUNT)
    for part in (np.sort(order[:300]), order[:7], order):
        other = means_backbone()
        found = extract(other, examples.take(part))
        np.testing.assert_allclose(found, colour_means(examples.take(part)), rtol=1e-5)
        assert seen(other) == 0


def test_only_what_is_new_is_computed_and_it_lands_in_its_place() -> None:
    whole = pictures(COUNT)
    rng = np.random.default_rng(1)
    known = np.sort(rng.choice(COUNT, 300, replace=False))
    extract(means_backbone(), whole.take(known))
    backbone = means_backbone()
    found = extract(backbone, whole)
    np.testing.assert_allclose(found, colour_means(whole), rtol=1e-5)
    assert seen(backbone) == COUNT - 300


def test_a_lender_that_is_damaged_lends_its_whole_blocks_only(tmp_path: Path) -> None:
    examples = pictures(COUNT)
    extract(means_backbone(), examples)
    (path,) = (tmp_path / "cache" / "features").glob("*/features.npy")
    data = bytearray(path.read_bytes())
    data[-BLOCK * 3 * 4 - 200] ^= 1  # within the second block
    path.write_bytes(bytes(data))
    backbone = means_backbone()
    part = examples.take(np.arange(COUNT)[::-1].copy())
    np.testing.assert_allclose(extract(backbone, part), colour_means(part), rtol=1e-5)
    assert seen(backbone) == BLOCK
    (names,) = path.parent.glob("examples-*.npy")
    names.write_bytes(names.read_bytes()[:100])
    assert extract(means_backbone(), examples.take(np.arange(5))).shape == (5, 3)


def test_another_body_lends_nothing() -> None:
    examples = pictures(40)
    extract(means_backbone(), examples)
    other = means_backbone(2.0)
    np.testing.assert_allclose(extract(other, examples.take(np.arange(9))), 2 * colour_means(examples)[:9], rtol=1e-5)
    assert seen(other) == 9


@pytest.mark.parametrize("count", [1, BLOCK])
def test_the_same_example_twice_is_passed_once_more_at_most(count: int) -> None:
    examples = pictures(count)
    twice = examples.take(np.concatenate([np.arange(count), np.arange(count)]))
    extract(means_backbone(), examples)
    backbone = means_backbone()
    np.testing.assert_allclose(extract(backbone, twice), np.tile(colour_means(examples), (2, 1)), rtol=1e-5)
    assert seen(backbone) == 0
