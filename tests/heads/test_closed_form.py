"""The three closed-form heads against computations written out class by class."""

from dataclasses import replace

import numpy as np
import pytest

from headstart.core.statistics import ClientStatistics, summarise
from headstart.errors import HeadstartError
from headstart.heads import LinearHead, RandomFeatures, cof_head, ncm_head, ridge_head
from headstart.heads.cof import _told_scatter, moments_for
from headstart.heads.ridge import cross_validated, solve

RNG = np.random.default_rng(0)
C, D, K = 4, 6, 9
CENTRES = RNG.normal(0, 2, (C, D))
Y = RNG.integers(0, C, 400)
X = CENTRES[Y] + RNG.normal(0, 1, (400, D)) @ RNG.normal(0, 1, (D, D))
WHO = RNG.integers(0, K, 400)


def statistics(
    moments: str | None = None, x: np.ndarray = X, y: np.ndarray = Y, who: np.ndarray = WHO
) -> ClientStatistics:
    return summarise(x, y, C, clients=who, moments=moments)[0]


def unit(rows: np.ndarray) -> np.ndarray:
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


# ------------------------------------------------------------------------------------------------------------- FedNCM


def test_ncm_by_hand() -> None:
    means = np.stack([X[Y == c].mean(axis=0) for c in range(C)])
    head = ncm_head(statistics(), "cosine")
    np.testing.assert_allclose(head.weight, unit(means), rtol=1e-6)
    assert head.bias.tolist() == [0.0] * C
    distances = ((X[:, None] - means) ** 2).sum(axis=2)
    euclidean = ncm_head(statistics(), "euclidean")
    np.testing.assert_array_equal(euclidean.scores(X).argmax(axis=1), distances.argmin(axis=1))


def test_ncm_does_not_depend_on_who_holds_what() -> None:
    heads = [ncm_head(statistics(who=who), "cosine") for who in (WHO, np.zeros_like(WHO), np.arange(len(Y)))]
    for head in heads[1:]:
        np.testing.assert_allclose(head.weight, heads[0].weight, rtol=1e-6)


def test_ncm_class_without_a_direction_is_masked() -> None:
    x = np.array([[1.0, 0], [-1, 0], [0, 2], [3, 0]])
    head = ncm_head(summarise(x, np.array([0, 0, 1, 2]), 3)[0], "cosine")
    assert head.bias.tolist() == [-np.inf, 0, 0]
    with pytest.raises(HeadstartError, match="every class mean is zero"):
        ncm_head(summarise(x * 0, np.array([0, 0, 1, 2]), 3)[0], "cosine")


# -------------------------------------------------------------------------------------------------------------- Fed3R


@pytest.mark.parametrize("bias", [False, True])
def test_ridge_is_the_regression_on_pooled_data(bias: bool) -> None:
    design = np.hstack([X, np.ones((len(X), 1))]) if bias else X
    solution = np.linalg.solve(design.T @ design + 0.7 * np.eye(design.shape[1]), design.T @ np.eye(C)[Y])
    norms = np.linalg.norm(solution[:D], axis=0)
    head = ridge_head(statistics("full"), 0.7, bias)
    np.testing.assert_allclose(head.weight, (solution[:D] / norms).T, rtol=1e-5)
    np.testing.assert_allclose(head.bias, solution[D] / norms if bias else np.zeros(C), rtol=1e-5)


@pytest.mark.parametrize("examples", [400, 5])
def test_auto_ridge_has_the_least_generalised_cross_validation_error(examples: int) -> None:
    x, y = X[:examples], Y[:examples]
    head = ridge_head(statistics("full", x, y, WHO[:examples]), "auto", False)
    targets = np.eye(C)[y]

    def criterion(ridge: float) -> float:
        hat = x @ np.linalg.solve(x.T @ x + ridge * np.eye(D), x.T)
        residual = ((targets - hat @ targets) ** 2).sum()
        return float(residual / (1 - np.trace(hat) / examples) ** 2)

    chosen = head.notes["ridge"]
    largest = np.linalg.eigvalsh(x.T @ x).max()
    others = largest * np.logspace(-6, 1, 200)
    assert criterion(chosen) <= min(map(criterion, others)) * (1 + 1e-6)
    solution = np.linalg.solve(x.T @ x + chosen * np.eye(D), x.T @ targets)[:, np.unique(y)]
    np.testing.assert_allclose(head.weight[np.unique(y)], unit(solution.T), rtol=1e-4, atol=1e-5)


def test_auto_ridge_with_a_bias_is_the_regression_on_features_of_size_one() -> None:
    """λ and the bias are chosen as if the features had been scaled to a root mean square of 1 first."""
    x = 1e-3 * X
    size = np.sqrt((x**2).mean())
    design = np.hstack([x / size, np.ones((len(x), 1))])
    head = ridge_head(statistics("full", x), "auto", True)
    chosen = head.notes["ridge"] / size**2
    solution = np.linalg.solve(design.T @ design + chosen * np.eye(D + 1), design.T @ np.eye(C)[Y])
    norms = np.linalg.norm(solution[:D] / size, axis=0)
    np.testing.assert_allclose(head.weight, (solution[:D] / size / norms).T, rtol=1e-5)
    np.testing.assert_allclose(head.bias, solution[D] / norms, rtol=1e-5)


@pytest.mark.parametrize("bias", [False, True])
def test_auto_ridge_follows_the_scale_of_the_features(bias: bool) -> None:
    expected = ridge_head(statistics("full"), "auto", bias)
    for factor in (1e-12, 1e-6, 1e6, 1e12):
        head = ridge_head(statistics("full", X * factor), "auto", bias)
        assert head.notes["ridge"] == pytest.approx(factor**2 * expected.notes["ridge"], rel=1e-6)
        np.testing.assert_array_equal(head.scores(X * factor).argmax(axis=1), expected.scores(X).argmax(axis=1))
    assert (expected.scores(X).argmax(axis=1) == Y).mean() > 0.6


def test_a_ridge_that_leaves_the_matrix_singular_is_refused() -> None:
    x = np.hstack([X, X[:, :1]])  # a repeated feature
    total = summarise(x, Y, C, moments="full")[0]
    with pytest.raises(HeadstartError, match="ridge = 0 leaves the 7 × 7 Gram matrix singular: raise it, to about"):
        ridge_head(total, 0.0, False)
    assert np.isfinite(ridge_head(total, "auto", False).weight).all()


@pytest.mark.parametrize(("smallest", "singular"), [(1e-15, False), (3e-16, True), (0.0, True)])
def test_a_system_is_singular_where_a_pivot_is_rounding_beside_the_largest(smallest: float, singular: bool) -> None:
    """Two dimensions: below 2 · 2.2e-16 of the largest pivot, though the decomposition itself may still succeed."""
    gram = np.diag([1e6, 1e6 * smallest])
    if singular:
        with pytest.raises(HeadstartError, match="leaves the 2 × 2 Gram matrix singular"):
            solve(gram, np.ones((2, 1)), 0.0, "ridge")
    else:
        np.testing.assert_allclose(solve(gram, np.ones((2, 1)), 0.0, "ridge"), [[1e-6], [1e9]], rtol=1e-12)


def test_auto_ridge_looks_at_the_directions_that_the_examples_span_and_at_no_others() -> None:
    """Repeated features, and fewer examples than features: λ is that of the hat matrix, which knows no eigenvalues."""
    rng = np.random.default_rng(1)
    few, some = rng.normal(size=(12, 30)) * np.where(np.arange(30) < 3, 3, 0.7), np.arange(12) % 4
    few[:, :2] += 4 * (some[:, None] == [1, 2])
    wide = X @ rng.normal(size=(D, 12))
    for x, y, error in ((np.hstack([X, X, X[:, :1]]), Y, 0.0), (wide, Y, 0.0), (few, some, 1e-9)):
        total = summarise(x, y, C, moments="full")[0]
        # A secure sum rounds to fixed point, more coarsely than float64.
        noise = error * np.trace(total.moments) * rng.normal(size=total.moments.shape)
        chosen = ridge_head(replace(total, moments=total.moments + noise + noise.T), "auto", False).notes["ridge"]
        targets = np.eye(C)[y]

        def criterion(ridge: float, x: np.ndarray = x, targets: np.ndarray = targets) -> float:
            left, values, _ = np.linalg.svd(x, full_matrices=False)
            hat = (left * (values**2 / (values**2 + ridge))) @ left.T
            return float(((targets - hat @ targets) ** 2).sum() / (len(x) - np.trace(hat)) ** 2)

        largest = np.linalg.norm(x, 2) ** 2
        best = min(largest * np.logspace(-12, 1, 261), key=criterion)
        assert chosen == pytest.approx(best, rel=0.13)  # a step of the grid is 12 %


def test_a_direction_of_rounding_takes_no_part_in_the_cross_validation() -> None:
    """Its eigenvalue is below 2 · 2.2e-16 of the largest, and sums that were rounded more coarsely fill it."""
    gram, targets = np.diag([4.0, 1e-15]), np.array([[2.0, 1.5], [1e-6, -1e-6]])
    weight, chosen = cross_validated(gram, targets, 5)
    alone, expected = cross_validated(gram[:1, :1], targets[:1], 5)
    assert chosen == expected
    np.testing.assert_allclose(weight, [alone[0], [0, 0]])


def test_rounding_of_labels_that_the_examples_explain_does_not_raise_the_ridge() -> None:
    """As many directions as examples: no part of the labels is unexplained, whatever their sum is off by.

    With eigenvalues e = (1, 100), labels q = (0.01, 1.99) along them and r = (1 + λ)/(100 + λ), the criterion is
    (0.01 + 1.99 r²)/(1 + r)², which grows with r, and r with λ: the smaller λ, the better.
    """
    targets = np.array([[0.1], [np.sqrt(199) * (1 - 1e-13)]])
    assert cross_validated(np.diag([1.0, 100.0]), targets, 2)[1] < 1e-6


def test_the_grid_of_ridges() -> None:
    """20 values for each power of ten, up to ten times the largest eigenvalue: labels q = (1.99, 0.01) ask for that."""
    targets = np.array([[np.sqrt(1.99)], [1.0]])
    assert cross_validated(np.diag([1.0, 100.0]), targets, 2)[1] == pytest.approx(1000, rel=1e-12)
    chosen = ridge_head(statistics("full"), "auto", False).notes["ridge"]
    places = 20 * np.log10(chosen / np.linalg.eigvalsh(X.T @ X).max())
    assert places == pytest.approx(round(places), abs=1e-6)
    assert -240 < places < 20


def test_ridge_needs_the_gram_matrix_and_a_feature() -> None:
    with pytest.raises(HeadstartError, match="Gram"):
        ridge_head(statistics(), 0.1, True)
    for ridge in ("auto", 0.1):
        with pytest.raises(HeadstartError, match="every feature is zero"):
            ridge_head(statistics("full", X * 0), ridge, False)


def test_random_features_approximate_the_gaussian_kernel() -> None:
    width, random = 0.8, RandomFeatures.draw(D, 20_000, 0.8, seed=3)
    unit_x = unit(X[:20])
    exact = np.exp(-((unit_x[:, None] - unit_x) ** 2).sum(axis=2) / (2 * width**2))
    features = random(X[:20].astype(np.float32))
    # The Monte Carlo error of 20,000 cosines is below 1/√20,000 · √2.
    np.testing.assert_allclose(features @ features.T, exact, atol=0.04)
    again = RandomFeatures.draw(D, 20_000, 0.8, seed=3)
    np.testing.assert_array_equal(again.projection, random.projection)
    assert np.isfinite(random(np.zeros((1, D), np.float32))).all()


# ------------------------------------------------------------------------------------------------------------- FedCOF


def cof_by_loop(x: np.ndarray, y: np.ndarray, who: np.ndarray, shrinkage: float) -> np.ndarray:
    """Equations 7, 8, 9 and 11 of the paper, one class and one client at a time."""
    n, d = x.shape
    gram, targets = n * np.outer(x.mean(axis=0), x.mean(axis=0)), []
    for c in np.unique(y):
        members = x[y == c]
        mean = members.mean(axis=0)
        holders = np.unique(who[y == c])
        covariance = np.zeros((d, d))
        for k in holders:
            part = x[(y == c) & (who == k)]
            deviation = part.mean(axis=0) - mean
            covariance += len(part) * np.outer(deviation, deviation)
        covariance /= max(len(holders) - 1, 1)
        gram += (len(members) - 1) * (covariance + shrinkage * np.eye(d))
        targets.append(len(members) * mean)
    return unit(np.linalg.solve(gram, np.stack(targets).T).T)


@pytest.mark.parametrize("shrinkage", [0.0, 0.01, 1.0])
def test_cof_equals_the_loop_over_classes(shrinkage: float) -> None:
    head = cof_head(statistics(), shrinkage, "estimated")
    np.testing.assert_allclose(head.weight, cof_by_loop(X, Y, WHO, shrinkage), rtol=1e-4, atol=1e-6)
    assert head.notes["shrinkage"] == shrinkage


def test_cof_with_fewer_means_than_dimensions() -> None:
    """Woodbury's smaller system against the same loop: 8 means in 30 dimensions."""
    rng = np.random.default_rng(3)
    x, y, who = rng.normal(1, 1, (60, 30)), np.repeat([0, 1], 30), np.tile([0, 1, 2, 3], 15)
    total = summarise(x, y, 2, clients=who)[0]
    assert len(total.labels) == 8
    np.testing.assert_allclose(
        cof_head(total, 0.3, "estimated").weight, cof_by_loop(x, y, who, 0.3), rtol=1e-4, atol=1e-6
    )
    with pytest.raises(HeadstartError, match="8 means do not span 30 dimensions"):
        cof_head(total, 0.0, "estimated")


def test_cof_where_every_example_speaks_for_itself_has_the_exact_covariance() -> None:
    alone = cof_head(statistics(who=np.arange(len(Y))), 0.5, "estimated")
    oracle = cof_head(statistics("full"), 0.5, "full")
    np.testing.assert_allclose(alone.weight, oracle.weight, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("covariance", ["full", "diagonal", "spherical"])
def test_cof_oracles_by_hand(covariance: str) -> None:
    gram = len(X) * np.outer(X.mean(axis=0), X.mean(axis=0))
    for c in range(C):
        exact = np.cov(X[Y == c].T)
        kept = {"full": exact, "diagonal": np.diag(np.diag(exact)), "spherical": np.diag(exact).mean() * np.eye(D)}
        gram += ((Y == c).sum() - 1) * (kept[covariance] + 0.2 * np.eye(D))
    targets = np.stack([X[Y == c].sum(axis=0) for c in range(C)])
    head = cof_head(statistics(moments_for(covariance, "estimated")), 0.2, covariance)
    np.testing.assert_allclose(head.weight, unit(np.linalg.solve(gram, targets.T).T), rtol=1e-4, atol=1e-6)
    # A Gram matrix has the squares on its diagonal.
    np.testing.assert_allclose(cof_head(statistics("full"), 0.2, covariance).weight, head.weight, rtol=1e-5, atol=1e-6)


def test_cof_estimate_is_unbiased() -> None:
    """Equation 7 over many random splits of one class: its mean is the class's covariance."""
    rng = np.random.default_rng(5)
    factor = rng.normal(size=(3, 3))
    truth = factor @ factor.T
    total = np.zeros((3, 3))
    for _ in range(400):
        x = rng.normal(size=(60, 3)) @ factor.T
        rows, _ = summarise(x, np.zeros(60, np.int64), 1, clients=rng.integers(0, 12, 60))
        pooled = rows.pooled()
        total += _told_scatter(rows, pooled, pooled.sums / 60, "estimated").factor / 59
    np.testing.assert_allclose(total / 400, truth, atol=0.12 * np.abs(truth).max())


def test_auto_shrinkage_is_half_the_within_class_variance_and_follows_the_scale() -> None:
    scale = np.mean([np.diag(np.cov(X[Y == c].T)).mean() * ((Y == c).sum() - 1) for c in range(C)]) * C / (len(Y) - C)
    exact = cof_head(statistics("full"), "auto", "full").notes["shrinkage"]
    assert exact == pytest.approx(0.5 * scale, rel=1e-9)
    # The estimate from means is unbiased and noisy.
    assert cof_head(statistics(), "auto", "estimated").notes["shrinkage"] == pytest.approx(exact, rel=0.35)
    predictions = [
        cof_head(statistics(x=X * factor), "auto", "estimated").scores(X).argmax(axis=1) for factor in (1e-12, 1, 1e12)
    ]
    np.testing.assert_array_equal(predictions[0], predictions[1])
    np.testing.assert_array_equal(predictions[2], predictions[1])


def test_cof_classes_held_by_one_client_only() -> None:
    """No spread to estimate: the solve is γI and the common mean, with a scale from the class means."""
    head = cof_head(statistics(who=Y), "auto", "estimated")
    assert np.isfinite(head.weight).all()
    fixed = cof_head(statistics(who=Y), 2.0, "estimated")
    np.testing.assert_allclose(fixed.weight, cof_by_loop(X, Y, Y, 2.0), rtol=1e-4, atol=1e-6)


def test_auto_shrinkage_does_not_count_classes_of_one_client() -> None:
    """Class 0 is one client's: its examples say nothing about the spread, and do not make it look smaller."""
    who = np.where(Y == 0, 0, WHO)
    spread = freedom = 0.0
    for c in range(1, C):
        members = Y == c
        holders = np.unique(who[members])
        deviations = [X[members & (who == k)].mean(axis=0) - X[members].mean(axis=0) for k in holders]
        sizes = [(members & (who == k)).sum() for k in holders]
        estimate = sum(n * np.outer(v, v) for n, v in zip(sizes, deviations, strict=True)) / (len(holders) - 1)
        spread += (members.sum() - 1) * np.trace(estimate)
        freedom += members.sum() - 1
    head = cof_head(statistics(who=who), "auto", "estimated")
    assert head.notes["shrinkage"] == pytest.approx(0.5 * spread / (D * freedom), rel=1e-9)


def test_cof_one_example_in_a_class_counts_nothing() -> None:
    x, y, who = np.vstack([X, X[:1] + 3]), np.append(Y, 0), np.append(WHO, 0)
    y = np.where(np.arange(len(y)) == 400, 0, np.maximum(y, 1))  # class 0 has the one added example
    head = cof_head(statistics(None, x, y, who), 0.3, "estimated")
    np.testing.assert_allclose(head.weight, cof_by_loop(x, y, who, 0.3), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("covariance", ["estimated", "full", "diagonal", "spherical"])
@pytest.mark.parametrize("shrinkage", ["auto", 0.0, 1.0])
def test_cof_without_any_covariance_has_the_class_means(shrinkage: float | str, covariance: str) -> None:
    """One example of each class, or examples of one class alone: nothing tells the spread of the classes."""
    for y in ([0, 1, 3], [2, 2, 2]):
        total = statistics(moments_for(covariance, "estimated"), X[:3], np.array(y), np.zeros(3, np.int64))
        head = cof_head(total, shrinkage, covariance)
        means = np.stack([X[:3][np.array(y) == c].mean(axis=0) for c in np.unique(y)])
        np.testing.assert_allclose(head.weight[np.unique(y)], unit(means), rtol=1e-6)
        assert np.flatnonzero(head.bias == 0).tolist() == np.unique(y).tolist()
        assert "shrinkage" not in head.notes
    with pytest.raises(HeadstartError, match="every class mean is zero"):
        cof_head(
            statistics(moments_for(covariance, "estimated"), 0 * X[:2], np.array([0, 1]), np.zeros(2)),
            shrinkage,
            covariance,
        )


@pytest.mark.parametrize("covariance", ["estimated", "full", "diagonal", "spherical"])
@pytest.mark.parametrize("dim", [6, 60])
@pytest.mark.parametrize("noise", [0.0, 1e-9])
def test_auto_shrinkage_of_classes_that_do_not_vary(covariance: str, dim: int, noise: float) -> None:
    """Rounding of what is the same in all examples of a class is no scale: that of the class means is."""
    rng = np.random.default_rng(0)
    y, who = np.repeat([0, 1], 20), np.arange(40) % 4
    x = (rng.normal(size=(2, dim)) + 0.1)[y] + noise * rng.normal(size=(40, dim))
    total = summarise(x, y, 2, clients=who, moments=moments_for(covariance, "estimated"))[0]
    head = cof_head(total, "auto", covariance)
    assert (head.scores(x).argmax(axis=1) == y).all()
    means = x[[0, 20]]
    if noise == 0:
        assert head.notes["shrinkage"] == pytest.approx(0.25 * ((means - means.mean(axis=0)) ** 2).mean(axis=1).sum())


@pytest.mark.parametrize("covariance", ["estimated", "full", "diagonal", "spherical"])
def test_auto_shrinkage_never_advises_itself(covariance: str) -> None:
    y, who = np.repeat([0, 1], 20), np.arange(40) % 4
    for x in (np.full((40, D), np.pi), 1e8 + RNG.normal(size=(40, D))):
        total = summarise(x, y, 2, clients=who, moments=moments_for(covariance, "estimated"))[0]
        with pytest.raises(HeadstartError, match="do not vary beside their size") as refusal:
            cof_head(total, "auto", covariance)
        assert "set it to 'auto'" not in str(refusal.value)


def test_features_that_do_not_vary() -> None:
    constant = np.ones((8, D))
    y, who = np.tile([0, 1], 4), np.repeat([0, 1], 4)
    with pytest.raises(HeadstartError, match="do not vary"):
        cof_head(statistics(None, constant, y, who), "auto", "estimated")
    with pytest.raises(HeadstartError, match="second moments"):
        cof_head(statistics(), "auto", "full")


def test_a_constant_feature_is_harmless() -> None:
    x = np.hstack([X, np.full((len(X), 1), 5.0), np.zeros((len(X), 1))])
    total = summarise(x, Y, C, clients=WHO, moments="full")[0]
    for head in (ncm_head(total, "cosine"), ridge_head(total, "auto", True), cof_head(total, "auto", "estimated")):
        assert np.isfinite(head.weight).all()
        assert (head.scores(x).argmax(axis=1) == Y).mean() > 0.5


# ---------------------------------------------------------------------------------------------------------- all heads


@pytest.mark.parametrize("kind", ["ncm", "euclidean", "ridge", "cof"])
def test_a_class_that_nobody_has_never_wins(kind: str) -> None:
    """All other scores are made negative, so that a score of zero would win."""
    present = Y != 2
    x = X[present] - 50
    total = summarise(x, Y[present], C, clients=WHO[present], moments="full")[0]
    head = {
        "ncm": lambda: ncm_head(total, "cosine"),
        "euclidean": lambda: ncm_head(total, "euclidean"),
        "ridge": lambda: ridge_head(total, "auto", True),
        "cof": lambda: cof_head(total, "auto", "estimated"),
    }[kind]()
    assert head.bias[2] == -np.inf
    assert not head.weight[2].any()
    scores = head.scores(-x)
    assert not np.isnan(scores).any()
    assert (scores.argmax(axis=1) != 2).all()


def test_a_head_is_saved_and_read_back(tmp_path) -> None:
    head = ridge_head(statistics("full"), 0.1, True)
    random = RandomFeatures.draw(D, 8, 1.0, 0)
    head.save(tmp_path / "head.safetensors")
    again = LinearHead.load(tmp_path / "head.safetensors")
    np.testing.assert_array_equal(again.scores(X), head.scores(X))
    wide = LinearHead(RNG.normal(size=(C, 8)).astype(np.float32), np.zeros(C, np.float32), random)
    wide.save(tmp_path / "wide.safetensors")
    np.testing.assert_array_equal(LinearHead.load(tmp_path / "wide.safetensors").scores(X), wide.scores(X))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["head.safetensors", "wide.safetensors"]
