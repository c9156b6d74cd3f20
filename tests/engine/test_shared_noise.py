"""Noise that nodes share, over the exchanges of the protocol: what is left in a total, and what a server gets again."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("flwr")

from flwr.app import Message

from headstart.channel.accounting import noise_multiplier
from headstart.channel.secure import client, server
from headstart.channel.shared_noise import SharedNoise, discrete_gaussian, part_variances
from headstart.channel.statistics import StatisticsChannel
from headstart.core.message import Message as Wire
from headstart.core.seeds import Secret, generator_of
from headstart.data import Federation
from headstart.engine import node_sums
from headstart.engine.flower_messages import facts_of, noise_keys, reply_to
from headstart.engine.node import Node
from headstart.engine.node_records import NodeRecords
from headstart.engine.node_stage import NodeRequest
from headstart.errors import HeadstartError, MessageError
from tests.engine.test_node import FOUR, Grid, _identity, recipe_of, serve, silos  # noqa: F401
from tests.helpers import identities

NCM = {
    "method": "fedncm",
    "secure": True,
    "min_replies": 1,
    "privacy": {"epsilon": 1.0, "clip": 20.0, "noise": "shared"},
}
CLIENTS, THRESHOLD = 4, 3


@pytest.fixture
def totals(monkeypatch: pytest.MonkeyPatch) -> list[tuple[SharedNoise, np.ndarray]]:
    """What the server makes of every sum, as whole numbers, with the noise that it is said to have."""
    found: list[tuple[SharedNoise, np.ndarray]] = []
    add = StatisticsChannel.add_vector

    def noted(self: StatisticsChannel, total: Any, values: Any) -> None:
        assert self.shared is not None
        assert values["values"].dtype == np.int64
        found.append((self.shared, values["values"]))
        add(self, total, values)

    monkeypatch.setattr(StatisticsChannel, "add_vector", noted)
    return found


def exact(silos: Path, names: tuple[str, ...], noise: SharedNoise) -> np.ndarray:  # noqa: F811
    """The class sums of these clients, clipped and rounded as each of them does."""
    total = np.zeros((10, 64), np.int64)
    for name in names:
        train = Federation.silo(recipe_of(silos, NCM), str(silos / f"{name}.npz"), name).dataset.train
        x, y = train.features().astype(np.float64), train.labels
        x *= 20 / np.maximum(np.linalg.norm(x, axis=1, keepdims=True), 20)
        sums = np.stack([x[y == label].sum(axis=0) for label in range(10)]) / 20
        total += np.rint(sums * 2**noise.bits).astype(np.int64)
    return total.ravel()


def noise_of(grid: Grid, name: str, noise: SharedNoise, parts: int) -> np.ndarray:
    """The first so many parts of a node's noise, from the secret on its disk."""
    (path,) = grid.folder(name).glob("noise-*-0.safetensors")
    mine = replace(noise, seed=Secret(Wire.from_bytes(path.read_bytes()).arrays["key"].tobytes()))
    client, variances = FOUR.index(name), part_variances(noise.variance, CLIENTS, THRESHOLD)
    base = discrete_gaussian(generator_of(mine.seed, 0x5A9E, 0, client, CLIENTS), variances[0], noise.dim)
    keys = mine.keys(client, 0, CLIENTS, THRESHOLD)
    return base + mine.parts(noise.dim, CLIENTS, THRESHOLD, {n: key for n, key in keys.items() if n < parts})


def silent(name: str, step: str) -> Any:
    """A node that does not answer an exchange."""

    def change(node: int, number: int, message: Message) -> Message | None:
        facts, parts = facts_of(message)
        gone = facts["kind"] == "secure" and Wire.from_bytes(parts["exchange"]).scalars["step"] == step
        return reply_to(message, {"error": "gone"}, {}) if gone and node == 10 + FOUR.index(name) else None

    return change


@pytest.mark.parametrize(
    ("step", "in_sum", "parts"),
    [
        ("", FOUR, dict.fromkeys(FOUR, 1)),  # nobody drops out: every removable part is removed
        ("masked", FOUR[:3], dict.fromkeys(FOUR[:3], 2)),
        ("agree", FOUR, dict.fromkeys(FOUR, 2)),  # three have signed, and are all that can be relied on
        ("reveal", FOUR, dict.fromkeys(FOUR[:3], 1) | {"d": 2}),  # four have signed, and one does not say its keys
    ],
)
def test_a_total_has_the_noise_of_its_survivors(
    silos: Path,  # noqa: F811
    tmp_path: Path,
    totals: list[tuple[SharedNoise, np.ndarray]],
    step: str,
    in_sum: tuple[str, ...],
    parts: dict[str, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if step == "agree":  # as among more than 50 clients, who agree even where nobody is missing
        for side in (client, server):
            monkeypatch.setattr(side, "LARGEST_CLIQUE", 0)
    grid = Grid(recipe_of(silos, NCM), silos, tmp_path / "state", silent("d", step), FOUR)
    summary = serve(grid, tmp_path / "out").summary
    ((noise, total),) = totals
    left = total - exact(silos, in_sum, noise)
    expected = np.sum([noise_of(grid, name, noise, count) for name, count in parts.items()], axis=0)
    assert np.abs(left - expected).max() <= len(in_sum)  # sums in another order are rounded otherwise
    variances = part_variances(noise.variance, CLIENTS, THRESHOLD)
    assert sum(sum(variances[:count]) for count in parts.values()) >= noise.variance
    assert summary["stages"][0]["privacy"]["released"] == "one total"


def test_a_server_that_asks_again_gets_the_same_noise(
    silos: Path,  # noqa: F811
    tmp_path: Path,
    totals: list[tuple[SharedNoise, np.ndarray]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It could average other noise away."""
    grid = Grid(recipe_of(silos, NCM), silos, tmp_path / "state", names=FOUR)
    add = StatisticsChannel.add_vector

    def lost(self: StatisticsChannel, total: Any, values: Any) -> None:
        add(self, total, values)
        raise HeadstartError("power failure")

    with monkeypatch.context() as patched:
        patched.setattr(StatisticsChannel, "add_vector", lost)
        with pytest.raises(HeadstartError, match="power failure"):
            serve(grid, tmp_path / "out")
    serve(grid, tmp_path / "again")
    (_, first), (_, second) = totals
    np.testing.assert_array_equal(first, second)


def test_a_sum_of_another_number_of_clients_is_not_opened_again(
    silos: Path,  # noqa: F811
    tmp_path: Path,
) -> None:
    """Of four clients with one gone, or of three: the same values with other noise."""
    grid = Grid(recipe_of(silos, NCM), silos, tmp_path / "state", silent("d", "masked"), FOUR)
    serve(grid, tmp_path / "out")
    grid.change = None
    del grid.online[13]
    with pytest.raises(HeadstartError, match="begun this stage from another setup"):
        serve(grid, tmp_path / "again", expected=3)

    heard = np.arange(3)
    saved, promise = Wire({}, {"question": "q", "clients": 4}), {"stage": 0, "of": "test"}
    recipe, identity = recipe_of(silos, NCM), identities(4)[0]
    records = NodeRecords(recipe, "0" * 64, tmp_path, tmp_path)
    records.write("tested", 0, Wire({"answer": np.zeros(1, np.uint8)}, {"question": "q"}))
    node: Any = SimpleNamespace(deployed=True, records=records, identity=identity, recipe=recipe)
    for _ in range(2):
        assert len(node_sums._note_survivors(node, promise, saved, heard)["participants"]) == 3
    for other, listed in ((Wire({}, {**saved.scalars, "clients": 3}), heard), (saved, heard[1:])):
        with pytest.raises(HeadstartError, match="opened before"):
            node_sums._note_survivors(node, promise, other, listed)


@pytest.mark.parametrize("noise", [{"0": "00" * 32}, {"2": "00" * 32}, {"1": "00" * 31}, {"1": "zz"}, {"1": 7}, 5])
def test_keys_that_are_none_are_refused(noise: Any) -> None:
    with pytest.raises(MessageError, match="keys of its noise"):
        noise_keys({"noise": noise}, 2)
    assert noise_keys({"noise": {"1": "ab" * 32}}, 2) == {1: bytes([0xAB]) * 32}
    assert noise_keys({}, 2) == {}


def test_figures_of_tests_have_the_noise_of_the_total_however_the_server_calls(
    silos: Path,  # noqa: F811
    tmp_path: Path,
) -> None:
    """The attack: a node that was told of many clients adds little noise, and is then asked in a sum of three."""
    stage = {**NCM, "privacy": {**NCM["privacy"], "test_epsilon": 1.0}}
    totals = []
    for number in range(12):
        grid = Grid(recipe_of(silos, stage), silos, tmp_path / str(number), names=FOUR)
        serve(grid, tmp_path / f"out-{number}")
        records = [Wire.from_bytes(next(grid.folder(n).glob("tested-*")).read_bytes()) for n in FOUR]
        totals.append(np.sum([record.arrays["figures"] for record in records], axis=0))
    share = 2 * noise_multiplier(1.0, 1e-5, 3)  # three of four stay at least, each with a third of the variance
    spread = (np.array(totals) - np.mean(totals, axis=0)).std()
    assert spread == pytest.approx(share * (4 / 3) ** 0.5, rel=0.4)
    federation = Federation.silo(grid.recipe, str(silos / "a.npz"), "a")
    folder = next(path for path in grid.folder("a").iterdir() if path.is_dir())
    node = Node(grid.recipe, federation, folder, True, identities(4)[0])
    (setup,) = folder.glob("setup-*")
    model = Wire({"weight": np.ones((10, 64), np.float32), "bias": np.zeros(10, np.float32)})
    asked = NodeRequest("s", 0, node.remember(setup.read_bytes()), [(0, -1, {})], True, model, 1)
    with pytest.raises(HeadstartError, match="for a sum of more or fewer clients"):
        node.tested(asked, 9)
