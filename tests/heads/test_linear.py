"""Heads as arrays: what maps make of features, and that nothing is lost on the way to a file and back."""

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from headstart.heads import HiddenLayers, LinearHead, RandomFeatures

RNG = np.random.default_rng(0)
X = RNG.normal(size=(7, 5)).astype(np.float32)


def normal(*shape: int) -> np.ndarray:
    return RNG.normal(size=shape).astype(np.float32)


def head_of(kind: str) -> LinearHead:
    if kind == "linear":
        return LinearHead(normal(3, 5), np.array([0.5, -np.inf, 0], np.float32))
    if kind == "centres":
        return LinearHead(normal(6, 5), np.array([0.5, -1, -np.inf, -np.inf, 0, 0], np.float32), centres=2)
    if kind == "random features":
        return LinearHead(normal(3, 8), normal(3), RandomFeatures.draw(5, 8, 0.7, 3))
    layers = HiddenLayers(((normal(4, 5), normal(4)), (normal(6, 4), normal(6))))
    return LinearHead(normal(3, 6), normal(3), layers)


KINDS = {
    "linear": {"weight": (3, 5), "bias": (3,)},
    "centres": {"weight": (6, 5), "bias": (6,), "centres": ()},
    "random features": {"weight": (3, 8), "bias": (3,), "projection": (8, 5), "phase": (8,)},
    "hidden layers": {
        "weight": (3, 6),
        "bias": (3,),
        "hidden.0.weight": (4, 5),
        "hidden.0.bias": (4,),
        "hidden.1.weight": (6, 4),
        "hidden.1.bias": (6,),
    },
}


def test_hidden_layers_by_hand() -> None:
    first = (np.array([[1, -1], [2, 0], [0, 1]], np.float32), np.array([0, -3, 1], np.float32))
    second = (np.array([[1, 1, -2]], np.float32), np.array([0.5], np.float32))
    x = np.array([[3, 1], [1, 2], [0, -5]])
    # (3, 1): 2, 3, 2 → 2 + 3 − 4 + 0.5. (1, 2): −1, −1, 3 → 0, 0, 3 → −5.5 → 0. (0, −5): 5, −3, −4 → 5, 0, 0 → 5.5.
    assert HiddenLayers((first,))(x).tolist() == [[2, 3, 2], [0, 0, 3], [5, 0, 0]]
    values = HiddenLayers((first, second))(x)
    assert values.tolist() == [[1.5], [0.0], [5.5]]
    assert values.dtype == np.float32
    # The linear layer on top is not rectified.
    head = LinearHead(np.array([[-2], [1]], np.float32), np.array([1, 0], np.float32), HiddenLayers((first, second)))
    assert head.scores(x).tolist() == [[-2.0, 1.5], [1.0, 0.0], [-10.0, 5.5]]


def test_a_head_of_hidden_layers_is_torchs_sequence_of_layers() -> None:
    import torch
    from torch import nn

    torch.manual_seed(0)
    layers = [nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3)]
    with torch.no_grad():
        expected = nn.Sequential(*layers)(torch.from_numpy(X)).numpy()
    first, second, last = (
        (layer.weight.detach().numpy(), layer.bias.detach().numpy()) for layer in layers if isinstance(layer, nn.Linear)
    )
    head = LinearHead(*last).behind(HiddenLayers((first, second)))
    np.testing.assert_allclose(head.scores(X), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_arrays_are_all_there_is_to_a_head(kind: str) -> None:
    head = head_of(kind)
    arrays = head.arrays()
    assert {name: array.shape for name, array in arrays.items()} == KINDS[kind]
    again = LinearHead.of_arrays(arrays)
    assert type(again.feature_map) is type(head.feature_map)
    np.testing.assert_array_equal(again.scores(X), head.scores(X))
    assert again.arrays().keys() == arrays.keys()
    # Every array counts: another one in its place gives other scores.
    for name in arrays:
        moved = arrays | {name: arrays[name] + np.float32(1)}
        assert not np.array_equal(LinearHead.of_arrays(moved).scores(X), head.scores(X)), name


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_holds_the_arrays_as_they_are(kind: str, tmp_path: Path) -> None:
    head = head_of(kind)
    head.save(tmp_path / "head.safetensors")
    saved = load_file(tmp_path / "head.safetensors")
    assert {name: array.shape for name, array in saved.items()} == KINDS[kind]
    for name, array in head.arrays().items():
        assert saved[name].dtype == np.float32
        assert saved[name].tobytes() == array.tobytes()
    np.testing.assert_array_equal(LinearHead.load(tmp_path / "head.safetensors").scores(X), head.scores(X))


def test_a_masked_class_stays_masked_behind_a_file(tmp_path: Path) -> None:
    head_of("linear").save(tmp_path / "head.safetensors")
    scores = LinearHead.load(tmp_path / "head.safetensors").scores(X)
    assert (scores[:, 1] == -np.inf).all()
    assert np.isfinite(scores[:, [0, 2]]).all()


def test_layers_are_read_by_their_numbers_whatever_the_order() -> None:
    head = head_of("hidden layers")
    backwards = dict(sorted(head.arrays().items(), reverse=True))
    np.testing.assert_array_equal(LinearHead.of_arrays(backwards).scores(X), head.scores(X))


def test_scores_do_not_depend_on_how_many_examples_come_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    head = head_of("hidden layers")
    expected = head.scores(X)
    monkeypatch.setattr("headstart.heads.linear._ROWS", 3)
    np.testing.assert_allclose(head.scores(X), expected, rtol=1e-5, atol=1e-6)
