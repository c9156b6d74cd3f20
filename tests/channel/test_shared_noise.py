"""Noise that clients share: its law, what dropouts leave of it, what it costs, and the stages that use it."""

from collections.abc import Callable
from decimal import Decimal
from math import ceil, exp, log, sqrt
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("cryptography")

from scipy import stats

from headstart.channel import shared_noise
from headstart.channel.shared_noise import (
    SharedNoise,
    discrete_gaussian,
    part_variances,
    survivor_levels,
    unneeded,
)
from headstart.config.recipe import Recipe
from headstart.config.stage import Privacy
from headstart.core.seeds import SecureGenerator, stream
from headstart.errors import HeadstartError, RecipeError
from headstart.runner import run

SOURCES: dict[str, Callable[[], Any]] = {
    "a seed": lambda: np.random.default_rng(5),
    "a key": lambda: stream(bytes(range(32))),
}


def probabilities(variance: int, numbers: np.ndarray) -> np.ndarray:
    """Of the discrete Gaussian, from its definition."""
    reach = np.arange(-int(60 * sqrt(variance)) - 60, int(60 * sqrt(variance)) + 61)
    whole = np.exp(-(reach.astype(float) ** 2) / (2 * variance)).sum()
    return np.asarray(np.exp(-(numbers.astype(float) ** 2) / (2 * variance)) / whole)


# ----------------------------------------------------------------------------------------------------------------- law


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("variance", [1, 2, 9, 60, 1000])
def test_small_numbers_have_the_probabilities_of_the_definition(variance: int, source: str) -> None:
    size = 200_000
    drawn = discrete_gaussian(SOURCES[source](), variance, size)
    reach = int(3 * sqrt(variance))
    inside = np.arange(-reach, reach + 1)
    seen = np.array([np.count_nonzero(drawn == number) for number in inside])
    expected = probabilities(variance, inside)
    outside = size - seen.sum(), size * (1 - expected.sum())
    assert stats.chisquare([*seen, outside[0]], [*(size * expected), outside[1]], sum_check=False).pvalue > 1e-4


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("deviation", [2**12, 2**12 - 1, 100_003, 2**40])
def test_large_numbers_are_normal(deviation: int, source: str) -> None:
    size = 100_000
    drawn = discrete_gaussian(SOURCES[source](), deviation**2, size) / deviation
    assert abs(drawn.mean()) < 5 / sqrt(size)
    assert drawn.var() == pytest.approx(1, abs=5 * sqrt(2 / size))
    assert stats.kstest(drawn, stats.norm.cdf).pvalue > 1e-4
    assert abs(np.corrcoef(drawn[1:], drawn[:-1])[0, 1]) < 5 / sqrt(size)
    assert discrete_gaussian(SOURCES[source](), deviation**2, 0).shape == (0,)


def test_numbers_do_not_depend_on_the_arithmetic(monkeypatch: pytest.MonkeyPatch) -> None:
    """All decisions with a hundred digits and more: the same numbers as in float64."""
    usual = discrete_gaussian(stream(bytes(32)), 12_345**2, 500)
    monkeypatch.setattr(shared_noise, "_DOUBT", 2.0)
    np.testing.assert_array_equal(discrete_gaussian(stream(bytes(32)), 12_345**2, 500), usual)


@pytest.mark.parametrize("mean", [2, 5, 8])
def test_a_word_at_a_threshold_is_settled_by_the_next(mean: int) -> None:
    def geometric(word: int, following: int) -> int:
        further = SecureGenerator(lambda count: bytes([following]) * count)
        return int(shared_noise._geometric(further, np.array([word], np.uint64), mean)[0])

    for steps in (1, 3, 20):
        threshold = int((Decimal(-steps) / mean).exp() * 2**64)  # 28 digits are enough
        assert geometric(threshold, 0) == geometric(threshold - 1, 0) == steps
        assert geometric(threshold, 255) == geometric(threshold + 1, 0) == steps - 1
    assert geometric(2**64 - 1, 255) == 0
    assert geometric(0, 255) == int(mean * 64 * log(2))  # 0.00…0111… is as good as 2⁻⁶⁴
    assert geometric(0, 1) > 45 * mean


def test_a_key_gives_the_same_numbers_again_and_another_others() -> None:
    first, again, other = (discrete_gaussian(stream(bytes([n]) * 32), 2**40, 1000) for n in (1, 1, 2))
    np.testing.assert_array_equal(first, again)
    assert (first == other).mean() < 0.01


# ----------------------------------------------------------------------------------------------------------- dropouts


@pytest.mark.parametrize(("clients", "threshold"), [(3, 3), (4, 3), (5, 4), (10, 7), (100, 67), (1000, 670), (30, 30)])
def test_survivors_have_the_noise_that_a_total_needs_and_little_more(clients: int, threshold: int) -> None:
    total = (2**12 * clients) ** 2
    levels, variances = survivor_levels(clients, threshold), part_variances(total, clients, threshold)
    assert (levels[0], levels[-1], len(levels)) == (clients, threshold, len(variances))
    assert min(variances) >= 2**24  # every part is made of many steps
    for survivors in range(threshold, clients + 1):
        gone = unneeded(clients, threshold, survivors)
        left = survivors * sum(v for number, v in enumerate(variances) if number not in gone)
        assert total <= left <= 1.09 * total
    assert len(unneeded(clients, threshold, clients)) == len(variances) - 1
    assert total <= clients * variances[0] < total + clients
    with pytest.raises(HeadstartError, match="are needed to open the sum"):
        unneeded(clients, threshold, threshold - 1)


@pytest.mark.parametrize("answering", ["all", "none"])
def test_what_is_left_in_a_total_after_dropouts(answering: str) -> None:
    """Clients that are silent at the end leave too much noise in, never too little."""
    clients, threshold, size = 9, 7, 40_000
    noise = SharedNoise.of(Privacy(epsilon=1.0, noise="shared"), 1.0, size, clients, seed=(1,))
    values = {"b": np.arange(size // 2) / 100, "a": np.full((2, size // 4), 7.0)}
    whole = {name: np.rint(array * 2**noise.bits).astype(np.int64) for name, array in values.items()}
    sent = {c: noise.noised(values, c, 0, clients, threshold) for c in range(clients)}
    for survivors in range(threshold, clients + 1):
        total = {name: sum(sent[c][name] for c in range(survivors)) for name in values}
        speaking = range(survivors) if answering == "all" else ()
        revealed = [noise.revealed(c, 0, clients, threshold, survivors) for c in speaking]
        opened = noise.removed(total, clients, threshold, revealed)  # type: ignore[arg-type]
        left = np.concatenate([(opened[name] - survivors * whole[name]).ravel() for name in values])
        share = left.var() / noise.variance
        if answering == "all":
            assert 1 - 5 * sqrt(2 / size) < share < 1.15 + 5 * sqrt(2 / size)
        else:
            assert share == pytest.approx(survivors / threshold, rel=5 * sqrt(2 / size))
        assert stats.kstest(left / left.std(), stats.norm.cdf).pvalue > 1e-4


# ---------------------------------------------------------------------------------------------------------- the account


@pytest.mark.parametrize("epsilon", [0.1, 1.0, 8.0])
def test_the_guarantee_by_adding_up_probabilities(epsilon: float) -> None:
    """One value: δ of the discrete Gaussian between neighbours as far apart as can be, from its definition."""
    privacy = Privacy(epsilon=epsilon, delta=1e-5, noise="shared")
    noise = SharedNoise.of(privacy, 1.0, 1, 3)
    moved = 2**noise.bits + 1
    reach = np.arange(-int(8 * sqrt(noise.variance)) - moved, int(8 * sqrt(noise.variance)) + moved)
    log_p = -(reach.astype(float) ** 2) / (2 * noise.variance)
    log_q = -((reach - moved).astype(float) ** 2) / (2 * noise.variance)
    whole = np.exp(log_p).sum()
    delta = (np.maximum(np.exp(log_p) - np.exp(epsilon + log_q), 0) / whole).sum()
    assert 0.98e-5 < delta <= 1e-5
    assert noise.spent(1) == pytest.approx(epsilon, rel=1e-5)
    assert noise.spent(0) == 0


@pytest.mark.parametrize("deviation", [2.0, 7.5, 40.0])
def test_the_rounded_and_the_discrete_gaussian_differ_by_no_more_than_claimed(deviation: float) -> None:
    reach = 6.0
    numbers = np.arange(-int(reach * deviation), int(reach * deviation) + 1)
    law = stats.norm(0, deviation)
    rounded = np.where(
        numbers > 0, law.sf(numbers - 0.5) - law.sf(numbers + 0.5), law.cdf(numbers + 0.5) - law.cdf(numbers - 0.5)
    )
    discrete = np.exp(-(numbers**2) / (2 * deviation**2))
    discrete /= np.exp(-(np.arange(-2000, 2001) ** 2) / (2 * deviation**2)).sum()
    difference = np.abs(np.log(rounded / discrete))
    assert difference.max() <= reach**2 / (8 * deviation**2)
    assert difference.max() > 0.1 * reach**2 / (8 * deviation**2)  # not idle


@pytest.mark.parametrize("epsilon", [0.01, 1.0, 100.0, 1e6])
@pytest.mark.parametrize("dim", [10, 1_000_000])
@pytest.mark.parametrize("clients", [3, 1000])
def test_the_grid_costs_next_to_nothing(epsilon: float, dim: int, clients: int) -> None:
    noise = SharedNoise.of(Privacy(epsilon=epsilon, noise="shared"), sqrt(2), dim, clients, rounds=7)
    central = shared_noise.noise_multiplier(epsilon, 1e-5, 7) * sqrt(2)
    assert central < noise.deviation < 1.0005 * central
    assert noise.difference <= min(1e-4 * epsilon, 1e-2)
    assert min(part_variances(noise.variance, clients, ceil(0.67 * clients))) >= 2**24
    rng = np.random.default_rng(0)
    one, other = rng.normal(size=dim), rng.normal(size=dim)
    other = one + sqrt(2) * (other - one) / np.linalg.norm(other - one)
    apart = np.linalg.norm(np.rint(one * 2**noise.bits) - np.rint(other * 2**noise.bits))
    assert sqrt(noise.variance) / apart >= noise.multiplier
    assert 0 < noise.spent(3) < noise.spent(7) <= epsilon


def test_what_whole_numbers_cannot_hold_is_refused() -> None:
    for epsilon, clip in ((1.0, 1e-12), (1e-9, 1.0)):
        with pytest.raises(HeadstartError, match="raise epsilon or clip"):
            SharedNoise.of(Privacy(epsilon=epsilon, delta=1e-9, clip=clip, noise="shared"), clip, 10**7, 100)


def test_delta_pays_for_the_difference() -> None:
    noise = SharedNoise.of(Privacy(epsilon=1.0, delta=1e-5, noise="shared"), 1.0, 100, 10)
    assert noise.delta == pytest.approx(1e-5 * exp(-noise.difference / 2) * (1 - 2 * exp(-14)))
    assert noise.delta < 1e-5


# -------------------------------------------------------------------------------------------------------------- stages

K = 12
DATA = {"dataset": "digits", "partition": {"kind": "dirichlet", "clients": K, "alpha": 0.5}}
HIDDEN = {"epsilon": 2.0, "clip": 40.0, "noise": "shared"}
STAGES: dict[str, dict[str, Any]] = {
    "fedncm": {"method": "fedncm"},
    "fedncm-groups": {"method": "fedncm", "secure_group": 4},
    "fedncm-euclidean": {"method": "fedncm", "distance": "euclidean"},
    "fed3r": {"method": "fed3r"},
    "fedavg": {"method": "fedavg", "train": "head", "rounds": 3, "lr": 0.01, "weighting": "uniform"},
    "fedadam": {"method": "fedadam", "train": "head", "rounds": 2, "weighting": "uniform", "participation": 0.5},
}


def recipe_of(stage: dict[str, Any], seed: int = 0, **privacy: Any) -> Recipe:
    stages = [{"secure": True, "privacy": HIDDEN | privacy, **stage}]
    return Recipe.parse({"seed": seed, "data": DATA, "model": {"backbone": "features"}, "stages": stages})


@pytest.mark.parametrize("name", STAGES)
def test_a_stage_adds_the_claimed_noise_and_nothing_else(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first total with the noise, and without it: the exact one is that of the clients' clipped values."""
    totals: list[dict[str, np.ndarray]] = []
    noises: list[SharedNoise] = []
    plain, sums = SharedNoise.noised, {"fedncm-groups": 3}.get(name, 1)

    def noised(self: SharedNoise, values: Any, client: int, round: int, clients: int, threshold: int) -> Any:
        found = plain(self, values, client, round, clients, threshold)
        if round == 0:
            noises.append(self)
            totals.append({key: found[key] - np.rint(values[key] * 2**self.bits).astype(int) for key in values})
        return found

    monkeypatch.setattr(SharedNoise, "noised", noised)
    result = run(recipe_of(STAGES[name]))
    assert len(totals) == (K // 2 if name == "fedadam" else K)
    noise = noises[0]
    total = np.concatenate([sum(each[key] for each in totals).ravel() for key in totals[0]])  # type: ignore[attr-defined]
    assert total.size == noise.dim
    assert total.var() == pytest.approx(sums * noise.variance, rel=6 * sqrt(2 / total.size))
    spent = result.summary["stages"][0]["privacy"]
    assert spent["noise"] == "shared"
    assert spent["unit"] == ("client" if "fedavg" in name or "adam" in name else "example")
    assert 1.99 < spent["epsilon"] <= 2.0
    assert result.summary["stages"][0]["forward_passes"] == 0  # how many examples there are


@pytest.mark.parametrize("name", STAGES)
def test_with_next_to_no_noise_a_stage_is_as_under_the_servers(name: str) -> None:
    stage = {key: value for key, value in STAGES[name].items() if key != "participation"}
    stage |= {"ridge": 1.0} if name == "fed3r" else {}
    heads = [
        run(recipe_of(stage, epsilon=1e8, noise=noise, clip=10.0)).head.weight
        for noise in ("shared", "server")
        if noise == "shared" or "groups" not in name
    ]
    if len(heads) == 2:
        np.testing.assert_allclose(heads[0], heads[1], atol=0.05)


@pytest.mark.parametrize("name", ["fedncm", "fedavg"])
def test_a_seed_gives_the_same_noise_again(name: str) -> None:
    first, again, other = (run(recipe_of(STAGES[name], seed)).head.weight for seed in (0, 0, 1))
    np.testing.assert_array_equal(first, again)
    assert not np.isclose(first, other).all()


@pytest.mark.parametrize(
    ("stage", "why"),
    [
        ({"method": "fedncm", "secure": False}, r"privacy\.noise: clients share the noise of secure aggregation"),
        ({"method": "fedcof", "secure_group": 3}, r"privacy\.noise: fedcof needs every client's means"),
        ({"method": "fed3r", "clients_per_round": 5}, r"privacy\.noise: noise is added to a total once"),
        ({**STAGES["fedavg"], "weighting": "examples"}, "weighting: with privacy every client counts alike"),
    ],
)
def test_recipes_whose_clients_cannot_share_noise(stage: dict[str, Any], why: str) -> None:
    with pytest.raises(RecipeError, match=why):
        recipe_of(stage)


def test_all_that_is_wrong_is_said_at_once() -> None:
    table = {"name": "digits", "dataset": "digits", "partition": {"kind": "iid", "clients": 4}}
    tasks = [table, table | {"name": "other"}]
    stage = {"method": "slora", "rounds": 4, "weighting": "uniform", "privacy": HIDDEN}
    with pytest.raises(RecipeError) as error:
        Recipe.parse({"tasks": tasks, "model": {"backbone": "features"}, "stages": [stage]})
    for sentence in ("set secure = true", "share the noise of one task", "sends other values in its first rounds"):
        assert sentence in str(error.value)


def test_the_report_names_the_noise(tmp_path: Path) -> None:
    run(recipe_of(STAGES["fedncm"]), tmp_path / "run")
    page = (tmp_path / "run" / "report.html").read_text()
    assert "ε = 2, δ = 1e-05, noise shared by the clients; released: one total" in page
