"""Stages whose server learns sums only: the same heads and models, and nothing that needs single clients."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file
from sklearn.datasets import load_digits

from headstart.config.recipe import Recipe
from headstart.core.directions import sketching_basis
from headstart.core.message import Message
from headstart.core.statistics import summarise
from headstart.data import Federation
from headstart.engine.server import Request, Server
from headstart.errors import HeadstartError, RecipeError
from headstart.heads import cof_head
from headstart.heads.estimators import FedCOF
from headstart.runner import Result, run

K = 9
LOCAL = {"train": "head", "rounds": 3, "lr": 0.01, "batch_size": 20, "clients_per_round": 5}
MLP = LOCAL | {"head": "mlp", "hidden": 8}
TASKS = [
    {"name": name, "dataset": "digits", "classes": classes, "partition": {"kind": "iid", "clients": 4}}
    for name, classes in (("low", [0, 1, 2]), ("high", [5, 6, 7, 8]))
]


def recipe_of(*stages: dict[str, Any], **partition: Any) -> Recipe:
    data = {"dataset": "digits", "partition": {"kind": "dirichlet", "clients": K, "alpha": 0.5} | partition}
    return Recipe.parse({"data": data, "model": {"backbone": "features"}, "stages": list(stages)})


def both(*stages: dict[str, Any]) -> tuple[Result, Result]:
    return run(recipe_of(*stages)), run(recipe_of(*({**stage, "secure": True} for stage in stages)))


@pytest.mark.parametrize(
    "stage",
    [
        {"method": "fedncm"},
        {"method": "fedncm", "clients_per_round": 3},
        {"method": "fed3r", "ridge": 1.0},
        {"method": "fedcof", "covariance": "full"},
        {"method": "fedavg", **LOCAL},
        {"method": "fedavg", **LOCAL, "weighting": "uniform", "max_norm": 0.05},
        {"method": "fedadam", **LOCAL},
        {"method": "feddyn", **LOCAL},
        {"method": "scaffold", **LOCAL},
        {"method": "fednova", **LOCAL, "momentum": 0.5, "schedule": "cosine"},
        {"method": "fedmezo", **LOCAL, "num_directions": 2},
        {"method": "distmezo", **LOCAL, "local_steps": 2},
        {"method": "fedbabu", **MLP},
        {"method": "fedper", **MLP},
        {"method": "ditto", **MLP},
    ],
    ids=lambda stage: "-".join(str(stage[key]) for key in ("method", "covariance", "weighting") if key in stage),
)
def test_a_secure_sum_gives_the_model_of_the_plain_one(stage: dict[str, Any]) -> None:
    plain, secure = both(stage)
    for name, array in plain.head.arrays().items():
        np.testing.assert_allclose(secure.head.arrays()[name], array, rtol=2e-5, atol=2e-5)
    ours, theirs = plain.summary["stages"][0], secure.summary["stages"][0]
    assert theirs["forward_passes"] == ours["forward_passes"]
    assert abs(theirs["accuracy"] - ours["accuracy"]) < 0.01
    assert theirs["bytes_up"] > 0


def test_several_tasks_are_added_up_with_zeros_for_the_others() -> None:
    stages = [{"method": "fedncm"}, {"method": "fedavg", **LOCAL, "clients_per_round": 6, "hide_task": True}]
    found = []
    for secure in (False, True):
        lines: list[dict[str, Any]] = []
        table = {"tasks": TASKS, "model": {"backbone": "features"}, "stages": [{**s, "secure": secure} for s in stages]}
        run(Recipe.parse(table), on_metrics=lines.append)
        found.append([line["tasks"] for line in lines])
    for plain, secure in zip(*found, strict=True):
        for task in ("low", "high"):
            assert secure[task]["accuracy"] == plain[task]["accuracy"]
            assert secure[task]["loss"] == pytest.approx(plain[task]["loss"], rel=1e-5)


def test_a_group_of_clients_is_one_client_of_fedcof() -> None:
    recipe = recipe_of({"method": "fedcof", "shrinkage": 1.0, "secure": True, "secure_group": 3})
    federation = Federation.of(recipe)
    X, y = federation.dataset.train.features(), federation.dataset.train.labels
    held = federation.owners >= 0
    by_hand = FedCOF(shrinkage=1.0).fit(X[held], y[held], client=federation.owners[held] // 3)
    head = run(recipe).head
    np.testing.assert_allclose(head.weight, by_hand.head_.weight, rtol=1e-4, atol=1e-5)
    alone = FedCOF(shrinkage=1.0).fit(X[held], y[held], client=federation.owners[held])
    assert np.abs(head.weight - alone.head_.weight).max() > 0.01  # not what every client by itself would give


@pytest.mark.parametrize("rank", [5, 64])
def test_directions_pass_groups_as_a_sketch_of_everybodys_scatter(rank: int) -> None:
    """Of all groups together, worked out here: W Ω (Ωᵀ W Ω)⁺ Ωᵀ W, which is W itself for all 64 directions."""
    recipe = recipe_of({"method": "fedcof", "shrinkage": 1.0, "secure": True, "secure_group": 3, "rank": rank})
    federation = Federation.of(recipe)
    held = federation.owners >= 0
    X, y = federation.dataset.train.features()[held].astype(np.float64), federation.dataset.train.labels[held]
    group = federation.owners[held] // 3
    means = {(g, c): X[(group == g) & (y == c)].mean(axis=0) for g, c in {*zip(group, y, strict=True)}}
    deviations = X - np.stack([means[g, c] for g, c in zip(group, y, strict=True)])
    scatter, basis = deviations.T @ deviations, sketching_basis(64, rank)
    found = scatter @ basis @ np.linalg.pinv(basis.T @ scatter @ basis, 1e-12) @ basis.T @ scatter
    values, vectors = np.linalg.eigh(found)
    told = (vectors * np.sqrt(np.maximum(values, 0))).T
    told = told[(told**2).sum(axis=1) > 1e-9 * values[-1]]
    by_group, _ = summarise(X, y, 10, clients=group, moments="trace")
    by_hand = cof_head(replace(by_group, directions=told), 1.0, within="auto")
    head = run(recipe).head
    np.testing.assert_allclose(head.weight, by_hand.weight, rtol=1e-3, atol=1e-4)
    without = cof_head(by_group, 1.0, within="auto")
    assert np.abs(head.weight - without.weight).max() > 0.01
    if rank == 64:
        exact = FedCOF(shrinkage=1.0, covariance="full").fit(X, y)
        np.testing.assert_allclose(head.weight, exact.head_.weight, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    ("clients", "size", "groups"), [(9, 3, [3, 3, 3]), (9, 4, [5, 4]), (5, 3, [5]), (7, None, [7])]
)
def test_groups_have_at_least_the_size_that_is_asked_for(clients: int, size: int | None, groups: list[int]) -> None:
    stage = recipe_of({"method": "fedncm", "secure": True} | ({"secure_group": size} if size else {})).stages[0]
    numbers = np.arange(clients)
    server: Any = Server(stage, None, None, None, None)  # type: ignore[arg-type]
    found = server._groups(Request(0, numbers, [Message()] * clients, numbers, numbers > 0))
    assert [len(part.clients) for part in found] == groups
    assert np.concatenate([part.clients for part in found]).tolist() == numbers.tolist()
    assert [part.threshold for part in found] == [int(np.ceil(0.67 * count)) for count in groups]


def test_two_clients_hide_nobody() -> None:
    with pytest.raises(HeadstartError, match=r"stages\.0\.secure: 2 clients are in a sum, which hides none of them"):
        run(recipe_of({"method": "fedavg", **LOCAL, "clients_per_round": 2, "secure": True}))
    heard: list[dict[str, Any]] = []
    with pytest.raises(HeadstartError, match="round 3: a sum of 1 clients hides none of them"):
        run(recipe_of({"method": "fedncm", "clients_per_round": 4, "secure": True}), on_metrics=heard.append)
    assert not heard  # said before anybody was asked


@pytest.mark.parametrize("stage", [{"method": "fedncm", "distance": "euclidean"}, {"method": "fed3r"}])
@pytest.mark.parametrize("scale", [1e-5, 1e13])
def test_features_of_any_size_give_the_accuracy_of_the_digits(
    tmp_path: Path, stage: dict[str, Any], scale: float
) -> None:
    """A Gram matrix of 1e-8 needs other binary places than one of 1e4."""
    X, y = load_digits(return_X_y=True)
    found = []
    for factor, secure in ((1.0, False), (1.0, True), (scale, True)):
        np.savez(tmp_path / "scaled.npz", X=(X * factor).astype(np.float32), y=y)
        data = {"dataset": str(tmp_path / "scaled.npz"), "partition": {"kind": "iid", "clients": 4}}
        keys = {"ridge": 10.0 * factor**2} if stage["method"] == "fed3r" else {}
        table = {"data": data, "model": {"backbone": "features"}, "stages": [{**stage, **keys, "secure": secure}]}
        found.append(run(Recipe.parse(table)).summary["stages"][0]["accuracy"])
    assert found[0] > 0.85
    assert found[1] == found[0]
    assert abs(found[2] - found[0]) < 0.003  # float32 rounds the features, too


@pytest.mark.parametrize(
    ("stage", "sentence"),
    [
        ({"method": "fedcof"}, "stages.0.secure: fedcof needs the means of several clients .* set secure_group"),
        ({"method": "fedcof", "secure_group": 3, "means_per_client": 2}, "means_per_client: secure aggregation adds"),
        ({"method": "fedavg", **LOCAL, "combine": "median"}, "combine: median looks at each client's update"),
        ({"method": "local-only", "train": "head"}, "secure: with local-only nothing travels"),
        ({"method": "centralised", "train": "head"}, "secure: with centralised nothing travels"),
        ({"method": "fedncm", "secure_group": 2}, "secure_group"),
        ({"method": "fedncm", "secure_threshold": 0.5}, "secure_threshold"),
    ],
)
def test_what_sums_cannot_do_is_refused_with_a_sentence(stage: dict[str, Any], sentence: str) -> None:
    with pytest.raises(RecipeError, match=sentence):
        recipe_of({**stage, "secure": True})


def test_tasks_need_messages_of_one_shape() -> None:
    stages = [{"method": "fedavg", **LOCAL, "secure": True}]
    with pytest.raises(RecipeError, match="hide_task: sums over clients of several tasks"):
        Recipe.parse({"tasks": TASKS, "model": {"backbone": "features"}, "stages": stages})


def test_the_privacy_that_is_spent_is_in_the_summary(tmp_path: Path) -> None:
    hidden = {"epsilon": 3.0, "delta": 1e-5, "clip": 50.0}
    stages: list[dict[str, Any]] = [
        {"method": "fedncm", "privacy": hidden, "secure": True},
        {
            "method": "fedavg",
            **LOCAL,
            "clients_per_round": K,
            "weighting": "uniform",
            "privacy": hidden | {"clip": 1.0},
        },
        {"method": "fed3r"},
    ]
    summary = run(recipe_of(*stages), tmp_path / "run").summary
    first, second, third = (stage.get("privacy") for stage in summary["stages"])
    assert (first["epsilon"], first["unit"], second["unit"], third) == (3.0, "example", "client", None)
    assert 2.9 < second["epsilon"] <= 3.0
    # An example's guarantee says nothing of a client's: the two are not added up.
    assert summary["privacy"] == {
        "example": {"epsilon": 3.0, "delta": 1e-5, "uncovered": ["fedavg", "fed3r"]},
        "client": {"epsilon": second["epsilon"], "delta": 1e-5, "uncovered": ["fedncm", "fed3r"]},
        "uncovered": ["fed3r"],
    }
    page = (tmp_path / "run" / "report.html").read_text()
    spent = re.findall(r"<td[^>]*>([^<]*)</td>", page.partition("Privacy spent</h2>")[2].partition("</table>")[0])
    both = ["run", "example", "3", "1e-05", "fedavg, fed3r"], ["run", "client", "3", "1e-05", "fedncm, fed3r"]
    assert spent == [*both[0], *both[1]]
    assert "differential privacy of any one client: ε = 3, δ = 1e-05, noise by the server" in page
    assert [stage["released"] for stage in (first, second)] == ["one head", "a model after every round"]
    assert "released: a model after every round" in page
    assert "warning" not in first | second


def test_a_delta_that_allows_to_give_somebody_away_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """There are K clients and many more examples: one δ is too large for the former and small enough for the latter."""
    hidden = {"epsilon": 3.0, "delta": 1 / K, "clip": 50.0}
    training = {"method": "fedavg", **LOCAL, "weighting": "uniform", "privacy": hidden}
    few = {"method": "fedncm", "privacy": hidden | {"delta": 1e-4}}
    with caplog.at_level("WARNING", "headstart"):
        first, second = run(recipe_of(training, few), tmp_path / "run").summary["stages"]
    assert first["privacy"]["warning"].startswith(f"delta = {1 / K:g} is no smaller than 1 / {K} clients")
    assert "warning" not in second["privacy"]
    assert [record.message for record in caplog.records if "delta" in record.message] == [
        f"stages.0.privacy.delta: {first['privacy']['warning']}"
    ]
    assert first["privacy"]["warning"] in (tmp_path / "run" / "report.html").read_text()


def test_guarantees_of_one_unit_add_up() -> None:
    hidden = {"epsilon": 3.0, "delta": 1e-5, "clip": 50.0}
    stages = [{"method": "fedncm", "privacy": hidden}, {"method": "fed3r", "privacy": hidden | {"epsilon": 0.5}}]
    found = run(recipe_of(*stages)).summary["privacy"]
    whole = {"epsilon": 3.5, "delta": pytest.approx(2e-5), "uncovered": []}
    assert found == {"example": whole, "uncovered": []}


def test_what_a_private_stage_adds_up_is_not_left_behind(tmp_path: Path) -> None:
    hidden = {"epsilon": 1.0, "clip": 100.0}
    recipe, out = recipe_of({"method": "fedncm", "privacy": hidden}), tmp_path / "run"
    summary = run(recipe, out).summary
    path = out / "checkpoint" / "state.safetensors"
    assert not [name for name in load_file(path) if name.startswith("state.")]
    federation = Federation.of(recipe)
    X, y = federation.dataset.train.features(), federation.dataset.train.labels
    sums = np.stack([X[(federation.owners >= 0) & (y == label)].sum(axis=0, dtype=np.float64) for label in range(10)])
    for file in [file for file in out.rglob("*") if file.is_file()]:
        assert sums[3].tobytes()[:64] not in file.read_bytes(), file
    again = run(recipe, out, resume=True)  # there is nothing left to be done, and it can be done again
    clock = dict.fromkeys(("peak_rss_bytes", "ended", "total_seconds"))
    assert again.summary | clock == summary | clock
    np.testing.assert_array_equal(again.head.weight, load_file(out / "model" / "head.safetensors")["weight"])


def test_the_checkpoint_of_a_private_stage_is_its_owners(tmp_path: Path) -> None:
    stage = {"method": "fedavg", **LOCAL, "weighting": "uniform", "privacy": {"epsilon": 1.0}}

    def stop(line: dict[str, Any]) -> None:
        if line["round"] == 2:
            raise KeyError

    with pytest.raises(KeyError):
        run(recipe_of(stage), tmp_path / "run", on_metrics=stop)
    path = tmp_path / "run" / "checkpoint" / "state.safetensors"
    assert path.stat().st_mode & 0o777 == 0o600
    assert [name for name in load_file(path) if name.startswith("state.")]
    found = run(recipe_of(stage), tmp_path / "run", resume=True)
    np.testing.assert_array_equal(found.head.weight, run(recipe_of(stage)).head.weight)


def test_a_threshold_of_two_thirds_is_refused_with_what_is_needed() -> None:
    for share in (0.5, 0.6, 2 / 3):
        with pytest.raises(RecipeError, match=r"secure_threshold: .* use 0\.67 or more; four clients are the fewest"):
            recipe_of({"method": "fedncm", "secure": True, "secure_threshold": share})
    stage: Any = recipe_of({"method": "fedncm", "secure": True}).stages[0]
    assert [stage.survivors(clients) for clients in (3, 4, 5, 6, 7, 9, 100, 300)] == [3, 3, 4, 5, 5, 7, 67, 201]
