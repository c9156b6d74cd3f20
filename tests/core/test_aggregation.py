"""Aggregation rules of one's own see every update with its weight, and take the server's step."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pytest

import headstart
from headstart.core import aggregation
from headstart.errors import HeadstartError, RecipeError

TABLE: dict[str, Any] = {
    "data": {"dataset": "digits", "partition": {"kind": "dirichlet", "clients": 5, "alpha": 0.5}},
    "model": {"backbone": "features"},
}


@pytest.fixture(autouse=True)
def _as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(aggregation, "RULES", aggregation.RULES)
    before = dict(aggregation.RULES)
    yield
    aggregation.RULES.clear()
    aggregation.RULES.update(before)


def trained(combine: str, **more: Any) -> headstart.Result:
    stage = {"method": "fedavg", "train": "head", "rounds": 2, "lr": 0.01, "combine": combine, **more}
    return headstart.run({**TABLE, "stages": [stage]})


def test_the_weighted_mean_as_a_rule_is_the_mean() -> None:
    seen: list[tuple[dict[str, tuple[int, ...]], list[float]]] = []

    def rule(updates: Mapping[str, Any], weights: Any) -> dict[str, Any]:
        seen.append(({name: array.shape for name, array in updates.items()}, weights.tolist()))
        return {name: np.average(array, axis=0, weights=weights) for name, array in updates.items()}

    headstart.register_aggregation("my-mean", rule)
    mine, plain = trained("my-mean"), trained("mean")
    np.testing.assert_allclose(mine.head.weight, plain.head.weight, rtol=1e-6, atol=1e-9)
    assert seen[0][0] == {"head.weight": (5, 10, 64), "head.bias": (5, 10)}
    assert seen[0][1] == mine.federation.sizes.tolist()


def test_a_rule_may_follow_one_client_alone() -> None:
    headstart.register_aggregation("first", lambda updates, weights: {name: a[0] for name, a in updates.items()})
    headstart.register_aggregation("second", lambda updates, weights: {name: a[1] for name, a in updates.items()})
    assert trained("first").head.weight.tobytes() != trained("second").head.weight.tobytes()
    heads = [trained(rule, weighting="uniform").head.weight for rule in ("first", "median")]
    assert heads[0].tobytes() != heads[1].tobytes()


def test_what_is_no_rule_or_not_known_is_refused() -> None:
    with pytest.raises(HeadstartError, match="'median' is an aggregation rule already"):
        headstart.register_aggregation("median", lambda updates, weights: updates)
    with pytest.raises(HeadstartError, match="is a function of updates and weights"):
        headstart.register_aggregation("nothing", None)  # type: ignore[arg-type]
    with pytest.raises(RecipeError, match=r"stages.0.combine: .*'meann'.*did you mean 'mean'"):
        trained("meann")
    headstart.register_aggregation("all", lambda updates, weights: updates)
    with pytest.raises(HeadstartError, match=r"without the axis of the clients; look at 'head\.weight'"):
        trained("all")
    with pytest.raises(RecipeError, match="combine: all looks at each client's update"):
        trained("all", secure=True)
