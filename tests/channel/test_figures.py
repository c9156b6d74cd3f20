"""What nodes tell of a test: sums that some test has, and, with privacy, no more than the noise is accounted for."""

from dataclasses import replace

import numpy as np
import pytest

from headstart.channel.figures import FiguresChannel
from headstart.config.recipe import Recipe
from headstart.core.message import Message
from headstart.core.metrics import tally_classes, tally_targets
from headstart.errors import MessageError

SCORES = np.random.default_rng(0).standard_normal((40, 3))
LABELS = np.random.default_rng(1).integers(0, 3, 40)


def channel_of(**keys: object) -> FiguresChannel:
    table = {"data": {"dataset": "digits"}, "model": {"backbone": "features"}, "stages": [{"method": "fedncm", **keys}]}
    return FiguresChannel.of(Recipe.parse(table).stages[0], 4, (0,), 3)


def told(channel: FiguresChannel) -> Message:
    right = int((SCORES.argmax(axis=1) == LABELS).sum())
    return channel.encode(40, right, np.full(40, 0.5), tally_classes(SCORES, LABELS))


def test_what_a_node_tells_has_the_names_and_shapes_that_a_sum_needs() -> None:
    for channel in (channel_of(), channel_of(privacy={"epsilon": 1.0, "test_epsilon": 1.0})):
        message = told(channel)
        assert {name: array.shape for name, array in message.arrays.items()} == channel.shapes
        np.testing.assert_equal(channel.of_sum(channel.to_sum(message)), channel.read(message))


def test_with_privacy_nothing_leaves_but_the_four_figures() -> None:
    """The attack: counts by class without noise, or with noise that their sensitivity was not counted for."""
    channel = channel_of(privacy={"epsilon": 1.0, "test_epsilon": 1.0, "noise": "client"})
    assert set(told(channel).arrays) == {"figures"}
    assert channel.finish({"figures": np.array([40.0, 20, 40, 2])}, 1)[2] == dict.fromkeys(
        ("macro_f1", "balanced_accuracy", "calibration_error")
    )


@pytest.mark.parametrize(
    ("name", "place", "value"),
    [
        ("figures", (1,), 41.0),
        ("classes", (0, 0), 100.0),
        ("classes", (2, 1), -1.0),
        ("classes", (2, 1), 40.0),
        ("bins", (0, 3), 100.0),
        ("bins", (1, 0), 7.0),
        ("bins", (2, 14), -1.0),
    ],
)
def test_sums_that_no_test_has_are_refused(name: str, place: tuple[int, ...], value: float) -> None:
    channel = channel_of()
    arrays = {key: array.copy() for key, array in told(channel).arrays.items()}
    channel.read(Message(arrays))
    arrays[name][place] = value
    with pytest.raises(MessageError, match="its figures make no sense"):
        channel.read(Message(arrays))


@pytest.mark.parametrize(
    ("name", "place", "value"),
    [("ranks", (0, 1, 7), -1.0), ("ranks", (1, 0, 3), 50.0), ("outputs", (2, 1), 41.0), ("figures", (0,), 39.0)],
)
def test_ranks_that_no_test_has_are_refused(name: str, place: tuple[int, ...], value: float) -> None:
    """The attack: one node that counts scores it has not, or fewer than none, moves everybody's ROC AUC."""
    channel = replace(channel_of(), target="multilabel")
    has = (LABELS[:, None] == np.arange(3)).astype(np.float64)
    arrays = {key: array.copy() for key, array in tally_targets(SCORES, has, "multilabel").items()}
    assert set(channel.read(channel.encode_targets(arrays))) == {"figures", "outputs", "ranks"}
    arrays[name][place] = value
    with pytest.raises(MessageError, match="its figures make no sense"):
        channel.read(Message(arrays))
