"""Closed forms as the papers' code computes them, against numpy, and against ours where both must agree."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from headstart.backbones.transforms import ImageTransform
from headstart.heads.estimators import FedCOF
from headstart.published.reference import Mirrored, counted_twice, reference_head

RNG = np.random.default_rng(5)
X = (RNG.normal(size=(400, 12)) + 0.3).astype(np.float32)
Y = RNG.integers(0, 4, 400)
OWNERS = RNG.integers(0, 9, 400)


def head(x: np.ndarray, **stage: object) -> np.ndarray:
    """Rows of length one."""
    given = (torch.from_numpy(each) for each in (x, Y, OWNERS))
    return reference_head(*given, 4, SimpleNamespace(**stage)).numpy()


def test_the_pseudo_inverse_of_float32_drops_small_directions() -> None:
    x = X.copy()
    x[:, -1] *= 1e-4  # 1e-8 of the largest direction's variance, below 12 · 2⁻²³
    gram = x.T.astype(float) @ x
    sums = np.stack([x[Y == c].sum(0, dtype=float) for c in range(4)])
    cut, exact = ((inverse @ sums.T).T for inverse in (np.linalg.pinv(gram, rcond=12 * 2.0**-23), np.linalg.inv(gram)))
    cut, exact = (each / np.linalg.norm(each, axis=1, keepdims=True) for each in (cut, exact))
    assert head(x, method="fed3r", ridge=0.0) == pytest.approx(cut, abs=1e-3)
    assert np.abs(exact[:, -1]).min() > 0.5  # an exact solve leans on it


@pytest.mark.parametrize(("covariance", "within"), [("estimated", "estimated"), ("full", "estimated")])
def test_where_nothing_is_dropped_it_is_the_head_of_the_paper(covariance: str, within: str) -> None:
    ours = FedCOF(shrinkage=0.5, covariance=covariance, within=within).fit(X, Y, client=OWNERS).head_.weight
    found = head(X, method="fedcof", shrinkage=0.5, covariance=covariance)
    assert found == pytest.approx(ours, abs=2e-4)


def test_means_are_those_of_the_classes() -> None:
    means = np.stack([X[Y == c].mean(0) for c in range(4)])
    assert head(X, method="fedncm") == pytest.approx(means / np.linalg.norm(means, axis=1, keepdims=True), abs=1e-5)


def test_a_mirrored_image_has_left_and_right_exchanged() -> None:
    image = RNG.integers(0, 255, (8, 6, 3)).astype(np.uint8)
    plain, turned = ImageTransform(4)(image, "x"), Mirrored(4)(image, "x")
    assert np.array_equal(turned[:, ::-1], plain)
    assert not np.array_equal(turned, plain)


def test_images_of_one_batch_count_twice_the_second_time_with_noise() -> None:
    owners = np.repeat([0, 1, 2], [40, 60, 300])
    x, y, of = (each.numpy() for each in counted_twice(*map(torch.from_numpy, (X, Y, owners)), 0))
    added = x[400:]
    assert np.array_equal(x[:400], X)
    assert np.array_equal(y[:400], Y)
    assert np.array_equal(np.bincount(of[400:]), [40, 60])  # of 300 images, every class is in all of five batches
    assert np.array_equal(y[400:], Y[:100])
    assert np.std(added - X[:100]) == pytest.approx(0.1**0.5, rel=0.1)
    again = counted_twice(*map(torch.from_numpy, (X, Y, owners)), 1)[0].numpy()
    assert not np.array_equal(again[400:], added)


def test_what_is_added_is_in_the_sums_of_fed3r_and_not_in_its_matrix() -> None:
    twice = counted_twice(*map(torch.from_numpy, (X, Y, np.arange(400) // 50)), 0)
    stage = SimpleNamespace(method="fed3r", ridge=0.01)
    found = reference_head(*twice, 4, stage, gram_of=torch.from_numpy(X)).numpy()
    sums = np.stack([twice[0].numpy()[twice[1].numpy() == c].sum(0, dtype=float) for c in range(4)])
    solved = np.linalg.solve(X.T.astype(float) @ X + 0.01 * np.eye(12), sums.T).T
    assert found == pytest.approx(solved / np.linalg.norm(solved, axis=1, keepdims=True), abs=1e-3)
