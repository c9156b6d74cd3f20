"""Statistics on a device: the same as with NumPy, whatever the blocks; features go there once, totals come back once.

There is no GPU here; the same code runs on the processor in its place.
"""

import numpy as np
import pytest
import torch

from headstart.core import device_moments, moments
from headstart.core.device import accelerator
from headstart.core.statistics import summarise

N, D, CLASSES = 57, 5, 4


@pytest.mark.parametrize("block", [1, 3, 1000])
@pytest.mark.parametrize("kind", [None, "full", "diagonal", "trace"])
def test_the_same_as_with_numpy(monkeypatch: pytest.MonkeyPatch, kind: moments.Moments | None, block: int) -> None:
    rng = np.random.default_rng(0)
    X, y, who = rng.standard_normal((N, D)).astype(np.float32), rng.integers(0, CLASSES, N), rng.integers(0, 3, N)
    rows = rng.permutation(N)[:50]
    given = {"clients": who[rows], "rows": rows, "moments": kind, "sketch": 3}
    expected, owners = summarise(X, y[rows], CLASSES, **given)  # type: ignore[arg-type]
    monkeypatch.setattr(moments, "accelerator", lambda: torch.device("cpu"))
    monkeypatch.setattr(device_moments, "_BLOCK_BYTES", 8 * D * block)
    back, real = [], device_moments.to_host
    monkeypatch.setattr(device_moments, "to_host", lambda tensor: (back.append(1), real(tensor))[1])
    found, there = summarise(X, y[rows], CLASSES, **given)  # type: ignore[arg-type]
    assert len(back) == (2 if kind is None else 3)  # whatever the blocks
    assert owners.tolist() == there.tolist()
    for name in ("labels", "counts", "sums", "moments", "sketch"):
        left, right = getattr(found, name), getattr(expected, name)
        if right is None:
            assert left is None
        else:
            assert left.dtype == right.dtype
            np.testing.assert_allclose(left, right, rtol=1e-12, atol=1e-12)


def test_a_client_alone_and_among_others_has_the_same_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(1)
    X, who = rng.standard_normal((N, D)).astype(np.float32), np.sort(rng.integers(0, 3, N))
    monkeypatch.setattr(moments, "accelerator", lambda: torch.device("cpu"))
    monkeypatch.setattr(device_moments, "_BLOCK_BYTES", 8 * D * 7)
    together, owners = summarise(X, np.zeros(N, np.int64), 1, clients=who)
    for client in range(3):
        alone, _ = summarise(X[who == client], np.zeros(int((who == client).sum()), np.int64), 1)
        assert np.array_equal(alone.sums, together.sums[owners == client])


def test_a_transform_is_applied_on_the_way(monkeypatch: pytest.MonkeyPatch) -> None:
    X = np.arange(12, dtype=np.float32).reshape(6, 2)
    monkeypatch.setattr(moments, "accelerator", lambda: torch.device("cpu"))
    found, _ = summarise(X, np.array([0, 0, 0, 1, 1, 1]), 2, moments="full", transform=lambda values: values[:, :1] + 1)
    assert found.sums.tolist() == [[9.0], [27.0]]  # 1 + 3 + 5 and 7 + 9 + 11
    assert found.moments is not None
    assert found.moments.tolist() == [[286.0]]


def test_without_a_gpu_there_is_no_accelerator() -> None:
    assert accelerator() is None or torch.cuda.is_available()
