"""FedCOF with what clients tell of the scatter around their means, against numbers worked out by hand."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from headstart import FedCOF, HeadstartError
from headstart.core.message import Message
from headstart.core.statistics import ClientStatistics, Summary, read_statistics, summarise
from headstart.heads import cof_head
from headstart.heads.cof import _error

# Two clients, two classes, each pair ten times. Means of class 0: (2, 0) and (4, 64), together (3, 32); of class 1:
# (1, 5) and (1, 69), together (1, 37). The clients' scatters are diag(20, 5) and diag(0, 100).
PAIRS = [[1, 0], [3, 0], [4, 62], [4, 66], [1, 4.5], [1, 5.5], [1, 68], [1, 70]]
X = np.repeat(np.array(PAIRS, float), 10, axis=0)
Y, WHO = np.repeat([0, 1], 40), np.tile(np.repeat([0, 1], 20), 2)
BETWEEN = 40 * np.array(
    [[1.0, 32], [32, 2048]]
)  # Σ n (μ_kc − μ_c)(μ_kc − μ_c)ᵀ: 40 (1, 32)(1, 32)ᵀ + 40 (0, 32)(0, 32)ᵀ
INSIDE = np.diag([20.0, 105.0])
FREEDOM, TRACE = 78, 40 * 2049 + 125  # N − C, and the trace of the whole scatter within the classes
# The estimate is (N_c − 1)/(K_c − 1) = 39 times B: its trace, in units of the whole, is 39 · 81,960 / 82,085.
RATIO = 39 * 81960 / 82085


def statistics(within: str, rank: int = 0, x: np.ndarray = X) -> ClientStatistics:
    moments = {"estimated": None, "diagonal": "diagonal"}.get(within, "trace")
    return summarise(x, Y, 2, clients=WHO, moments=moments, rank=rank)[0]


def head_of(scatter: np.ndarray, shrinkage: float, common: float = 1.0) -> np.ndarray:
    """W = Ĝ⁻¹ B with rows of length one; the sums of the classes are (120, 1280) and (40, 1480)."""
    sums = np.array([[120.0, 1280], [40, 1480]])
    centre = common * np.outer(sums.sum(axis=0), sums.sum(axis=0)) / 80
    weight = np.linalg.solve(scatter + shrinkage * FREEDOM * np.eye(2) + centre, sums.T).T
    return np.asarray(weight / np.linalg.norm(weight, axis=1, keepdims=True))


# Two means of each of two classes have a standard error of √(2/2) along one dimension. E's own, of B's shape, are 2,049
# of trace and 1 + 2 · 32² + 2048² of squares, so that its trace has 0.99976 times that.
SHARE = 2049 / np.sqrt(4196353) / RATIO
LEFT = SHARE * 5 / 125
# Of the paper's matrix, E and the common mean alike, as much as makes E's trace the share of what is not in directions.
COMMON = {0: 1 - SHARE + SHARE * (81960 + 125) / (39 * 81960), 1: 1 - LEFT + LEFT * (81960 + 5) / (39 * 81960)}
BY_HAND: dict[tuple[str, int], np.ndarray] = {
    ("estimated", 0): 39 * BETWEEN,
    ("trace", 0): BETWEEN + 125 / 2 * np.eye(2),
    ("diagonal", 0): BETWEEN + INSIDE,
    ("auto", 0): BETWEEN * (1 + SHARE * 125 / 81960) + (1 - SHARE) * 125 / 2 * np.eye(2),
    # The largest direction of the first client is (√20, 0), of the second (0, 10): 5 of 125 are left.
    ("trace", 1): BETWEEN + np.diag([20, 100]) + 5 / 2 * np.eye(2),
    ("diagonal", 1): BETWEEN + INSIDE,
    ("auto", 1): BETWEEN * (1 + SHARE * 5 / 125 * 5 / 81960)
    + np.diag([20, 100])
    + (1 - SHARE * 5 / 125) * 5 / 2 * np.eye(2),
    ("auto", 2): BETWEEN + INSIDE,
}


@pytest.mark.parametrize(("within", "rank"), BY_HAND)
def test_by_hand(within: Any, rank: int) -> None:
    head = cof_head(statistics(within, rank), 0.3, within=within)
    common = COMMON.get(rank, 1.0) if within == "auto" else 1.0
    np.testing.assert_allclose(head.weight, head_of(BY_HAND[within, rank], 0.3, common), rtol=2e-6)
    assert head.notes["shrinkage"] == 0.3
    assert head.notes.get("means_share") == (pytest.approx(0.0256863, abs=1e-6) if within == "auto" else None)


@pytest.mark.parametrize("within", ["trace", "diagonal", "auto"])
@pytest.mark.parametrize("rank", [0, 1])
def test_auto_shrinkage_is_half_the_told_variance(within: Any, rank: int) -> None:
    half = 0.5 * TRACE / (2 * FREEDOM)
    chosen = cof_head(statistics(within, rank), "auto", within=within).notes["shrinkage"]
    assert chosen == float(f"{half:.10g}")
    assert cof_head(statistics("estimated"), "auto").notes["shrinkage"] == float(f"{RATIO * half:.10g}")


def test_what_is_chosen_does_not_show_how_clients_were_added_up() -> None:
    rng = np.random.default_rng(1)
    x, y, who = rng.normal(size=(200, 7)), rng.integers(0, 3, 200), rng.integers(0, 9, 200)
    together, _ = summarise(x, y, 3, clients=who, moments="trace")
    first, *others = (summarise(x[who == k], y[who == k], 3, moments="trace")[0] for k in range(9))
    alone = first.merge(*others)
    assert alone.moments != together.moments  # in the last bits
    assert cof_head(alone, "auto", within="auto").notes == cof_head(together, "auto", within="auto").notes


def test_many_dimensions_are_solved_through_the_smaller_matrix() -> None:
    """Forty more dimensions, turned about: two examples of a pair lie one apart along each, so that B is as before."""
    rng = np.random.default_rng(0)
    turn, _ = np.linalg.qr(rng.normal(size=(42, 42)))
    more = np.tile([-0.5, 0.5], 40)[:, None] * np.ones(40)
    wide = np.hstack([X, more]) @ turn.T
    inside = np.zeros((42, 42))
    for client in (0, 1):
        for label in (0, 1):
            mine = wide[(client == WHO) & (label == Y)]
            inside += (mine - mine.mean(axis=0)).T @ (mine - mine.mean(axis=0))
    between = turn[:, :2] @ BETWEEN @ turn[:, :2].T
    sums = np.stack([wide[label == Y].sum(axis=0) for label in (0, 1)])
    models = {
        "trace": between + np.trace(inside) / 42 * np.eye(42),
        "diagonal": between + np.diag(np.diag(inside)),
    }
    for within, scatter in models.items():
        gram = scatter + 0.3 * FREEDOM * np.eye(42) + np.outer(sums.sum(axis=0), sums.sum(axis=0)) / 80
        weight = np.linalg.solve(gram, sums.T).T
        head = cof_head(statistics(within, x=wide), 0.3, within=within)  # type: ignore[arg-type]
        np.testing.assert_allclose(
            head.weight, weight / np.linalg.norm(weight, axis=1, keepdims=True), rtol=1e-4, atol=1e-6
        )


RNG = np.random.default_rng(1)
CLOUD = RNG.normal(size=(300, 12)) @ RNG.normal(size=(12, 12)) + 3 * RNG.normal(size=(3, 12))[np.arange(300) % 3]
LABELS, HOLDERS = np.arange(300) % 3, RNG.integers(0, 5, 300)


@pytest.mark.parametrize("within", ["trace", "diagonal", "auto"])
@pytest.mark.parametrize("shrinkage", ["auto", 0.1])
def test_all_directions_are_the_exact_covariances(within: str, shrinkage: Any) -> None:
    """B + Σ_k W_k is the scatter within the classes: told in full, the head is that of the oracle."""
    exact = FedCOF(shrinkage, covariance="full").fit(CLOUD, LABELS, client=HOLDERS)
    told = FedCOF(shrinkage, within=within, rank=12).fit(CLOUD, LABELS, client=HOLDERS)  # type: ignore[arg-type]
    np.testing.assert_allclose(told.coef_, exact.coef_, rtol=1e-4, atol=1e-6)
    assert told.head_.notes["shrinkage"] == pytest.approx(exact.head_.notes["shrinkage"], rel=1e-9)


def test_the_estimate_has_the_trace_of_the_scatter_where_clients_differ_by_chance() -> None:
    """E[B] = (K − 1) Σ, over all three ways to deal 0, 1, 3 and 8 to two clients: B is 25, 9 and 4, their mean 38/3."""
    x, y = np.array([[0.0], [1], [3], [8]]), np.zeros(4, np.int64)
    ratios = []
    for who in ([0, 0, 1, 1], [0, 1, 0, 1], [0, 1, 1, 0]):
        rows = summarise(x, y, 2, clients=np.array(who), moments="trace")[0]
        between = 38 - float(rows.around_means()[0])
        ratios.append(3 * between / 38)
    assert ratios == pytest.approx([75 / 38, 27 / 38, 12 / 38])
    assert np.mean(ratios) == pytest.approx(1)


def test_where_every_example_speaks_for_itself_nothing_is_left_to_tell() -> None:
    for within in ("estimated", "trace", "diagonal", "auto"):
        head = FedCOF(0.2, within=within).fit(CLOUD, LABELS)  # type: ignore[arg-type]
        exact = FedCOF(0.2, covariance="full").fit(CLOUD, LABELS)
        np.testing.assert_allclose(head.coef_, exact.coef_, rtol=1e-4, atol=1e-6)


def test_one_client_has_no_means_to_compare() -> None:
    head = cof_head(summarise(CLOUD, LABELS, 3, moments="trace")[0], "auto", within="auto")
    assert head.notes["means_share"] == 0
    np.testing.assert_array_equal(
        head.weight, cof_head(summarise(CLOUD, LABELS, 3, moments="trace")[0], "auto", within="trace").weight
    )


@pytest.mark.parametrize("shift", [0.0, 3.0, 30.0])
def test_the_shape_of_the_means_is_trusted_up_to_a_standard_error(shift: float) -> None:
    """Three classes of 100 at five clients: f = (3 · 99)² / (3 · 99²/4) = 12, and e = √(2/12 · tr E²)/tr E."""
    x = CLOUD + shift * np.random.default_rng(2).normal(size=(5, 12))[HOLDERS]
    estimate, within = np.zeros((12, 12)), 0.0
    for label in range(3):
        mine = [x[(label == LABELS) & (client == HOLDERS)] for client in range(5)]
        centre = x[label == LABELS].mean(axis=0)
        estimate += 99 / 4 * sum(len(m) * np.outer(*[m.mean(axis=0) - centre] * 2) for m in mine)
        within += ((x[label == LABELS] - centre) ** 2).sum()
    share = FedCOF().fit(x, LABELS, client=HOLDERS).head_.notes["means_share"]
    assert share == pytest.approx(min(1.0, within * np.sqrt(12 / 2 / np.trace(estimate @ estimate))), rel=1e-6)
    assert (share == 1) == (shift == 0)


def test_where_the_means_are_trusted_the_head_is_the_papers() -> None:
    """Up to the scale of the matrix, which the length of the rows hides: shift or none, as long as the share is one."""
    for shift in (0.0, 0.3):
        x = CLOUD + shift * np.random.default_rng(2).normal(size=(5, 12))[HOLDERS]
        found = FedCOF().fit(x, LABELS, client=HOLDERS)
        assert found.head_.notes["means_share"] == 1
        paper = FedCOF(within="estimated").fit(x, LABELS, client=HOLDERS)
        np.testing.assert_allclose(found.coef_, paper.coef_, rtol=1e-5, atol=1e-7)


def test_the_standard_error_is_that_of_means_which_differ_by_chance() -> None:
    """One dimension, two classes of 40 and 10 examples at five and at two clients, drawn 4,000 times."""
    rng, who = np.random.default_rng(0), np.concatenate([np.arange(40) % 5, np.arange(10) % 2])
    y, traces = np.repeat([0, 1], [40, 10]), []
    for _ in range(4000):
        rows = summarise(rng.normal(size=(50, 1)), y, 2, clients=who)[0]
        means = rows.sums[:, 0] / rows.counts
        centres = np.array([np.average(means[rows.labels == c], weights=rows.counts[rows.labels == c]) for c in (0, 1)])
        between = np.bincount(rows.labels, rows.counts * (means - centres[rows.labels]) ** 2)
        traces.append(39 / 4 * between[0] + 9 * between[1])
    found = _error(np.array([40, 10]), np.array([5, 2]))
    assert found == pytest.approx(np.std(traces) / np.mean(traces), rel=0.05)
    assert found == pytest.approx(np.sqrt(2 * (39**2 / 4 + 9**2)) / 48)


def test_the_share_of_the_means_is_of_the_classes_that_several_hold() -> None:
    """Class 2 is the first client's alone: 40 of (7, 7) and (9, 7), a scatter of diag(40, 0); N − C = 117, M = 78."""
    x = np.vstack([X, np.tile([[7.0, 7], [9, 7]], (20, 1))])
    y, who = np.append(Y, np.full(40, 2)), np.append(WHO, np.zeros(40, np.int64))
    head = cof_head(summarise(x, y, 3, clients=who, moments="trace")[0], 0.3, within="auto")
    ratio = (39 * 81960 / 78) / (82125 / 117)
    share = 2049 / np.sqrt(4196353) / ratio * 78 / 117
    assert head.notes["means_share"] == pytest.approx(share, rel=1e-9)
    scatter = BETWEEN * (1 + share * 165 / 81960) + (1 - share) * 165 / 2 * np.eye(2)
    sums = np.array([[120.0, 1280], [40, 1480], [320, 280]])
    centre = sums.sum(axis=0)
    common = 1 - share + share * (81960 + 165) / (39 * 81960)
    weight = np.linalg.solve(scatter + 0.3 * 117 * np.eye(2) + common * np.outer(centre, centre) / 120, sums.T).T
    np.testing.assert_allclose(head.weight, weight / np.linalg.norm(weight, axis=1, keepdims=True), rtol=2e-6)


def test_a_sum_over_a_group_is_what_one_client_with_all_its_examples_tells() -> None:
    """Second moments around zero add up; around the group's means they have in them how its members differ."""
    for moments in ("trace", "diagonal"):
        members = [
            summarise(CLOUD[HOLDERS == k], LABELS[HOLDERS == k], 3, moments=moments)[0].vector() for k in range(5)
        ]
        added = {name: np.sum([each[name] for each in members], axis=0) for name in members[0]}
        group = ClientStatistics.from_vector(added, moments, False)  # type: ignore[arg-type]
        whole, _ = summarise(CLOUD, LABELS, 3, moments=moments)  # type: ignore[arg-type]
        np.testing.assert_allclose(group.around_means(), whole.around_means(), rtol=1e-9)


def test_far_from_zero_what_is_told_survives_the_wire() -> None:
    """Features of 10,000 ± 1: squares around zero in float32 would hide what is around the means."""
    moved = CLOUD + 1e4
    sent, _ = summarise(moved, LABELS, 3, moments="diagonal", rank=2)
    message = Message.from_bytes(sent.to_message().to_bytes())
    got = read_statistics(message, Summary(3, 12, "diagonal", rank=2))
    exact = sum(np.var(CLOUD[label == LABELS], axis=0) * 100 for label in range(3))
    np.testing.assert_allclose(got.around_means(), exact, rtol=1e-5)


def test_refusals() -> None:
    with pytest.raises(HeadstartError, match="within = 'trace' needs second moments"):
        cof_head(statistics("estimated"), 0.1, within="trace")
    with pytest.raises(HeadstartError, match="within = 'diagonal' needs second moments"):
        cof_head(statistics("trace"), 0.1, within="diagonal")
    for keys in ({"within": "estimated"}, {"covariance": "full"}):
        with pytest.raises(HeadstartError, match="rank: directions are sent beside"):
            FedCOF(rank=2, **keys).fit(CLOUD, LABELS, client=HOLDERS)
    wide = np.hstack([CLOUD, np.zeros((300, 40))])  # a diagonal of zeros, and nothing else to solve with
    total = summarise(wide, LABELS, 3, clients=HOLDERS, moments="diagonal")[0]
    with pytest.raises(HeadstartError, match="shrinkage = 0 leaves the Gram matrix singular"):
        cof_head(total, 0.0, within="diagonal")


def test_noise_that_makes_a_trace_negative_leaves_a_head() -> None:
    noisy = replace(statistics("auto"), moments=np.array([-5.0]), noise_floor=1.0)
    assert np.isfinite(cof_head(noisy.solvable(), "auto", within="auto").weight).all()
