"""Aggregation rules by name: what the server makes of the updates of a round, where it sees each of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from headstart.core.statistics import Floats
from headstart.errors import HeadstartError

Rule = Callable[[Mapping[str, Floats], Floats], Mapping[str, Floats]]
"""From the updates of M clients, by parameter [M, …], and their weights [M], to the step, by parameter […]."""

BUILT_IN = ("mean", "median", "trimmed-mean")
RULES: dict[str, Rule] = {}
"""Rules of users; `register_aggregation` adds to them."""


def register_aggregation(name: str, rule: Rule) -> None:
    """Add an aggregation rule: stages that train may set ``combine`` to its name from now on.

    rule: called once a round with the updates of all clients that were heard, by parameter [M, …] in float64, and their
    weights [M] (numbers of examples, or ones where ``weighting`` is "uniform"); returns the step that the server takes,
    by parameter […]. Where running statistics of batch norm are averaged, it is called with them, too.
    """
    if name in BUILT_IN:
        raise HeadstartError(f"{name!r} is an aggregation rule already; choose another name")
    if not callable(rule):
        raise HeadstartError(f"{name!r}: an aggregation rule is a function of updates and weights; this is {rule!r}")
    RULES[name] = rule


def aggregations() -> list[str]:
    """Every name that ``combine`` may have."""
    return [*BUILT_IN, *RULES]
