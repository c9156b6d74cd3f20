"""Random numbers of different purposes never come from one generator."""

import ast
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import headstart
from headstart.core.statistics import random_parts
from headstart.engine import server
from headstart.methods.head_init import head_start
from headstart.solvers.cohort import Cohort
from headstart.solvers.heads import batches
from tests.helpers import context_of
from tests.variants import recipe_of

SOURCE = Path(headstart.__file__).parent
# Who holds what begins with the run's seed and a constant, where others have the number of a stage; noise begins with
# a secret, where there is one.
APART = ("data", "channel", "seeds.py")


def streams() -> dict[str, list[ast.expr]]:
    """What each generator of the package is made from, by file and line."""
    found = {}
    for path in sorted(SOURCE.rglob("*.py")):
        where = path.relative_to(SOURCE)
        for node in ast.walk(ast.parse(path.read_text())):
            name = node.func.attr if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) else ""
            if name == "default_rng" and not set(APART) & set(where.parts):
                assert isinstance(node, ast.Call)
                given = node.args[0]
                assert isinstance(given, ast.List), f"{where}:{node.lineno}: write the list of what it is made from"
                found[f"{where}:{node.lineno}"] = given.elts
    return found


def test_every_generator_begins_with_a_constant_of_its_own() -> None:
    """numpy takes [3, 1, 5143] for [3, 1, 5143, 0]: a constant behind numbers that count can be one of these."""
    constants = []
    for where, parts in streams().items():
        first, *rest = parts
        assert isinstance(first, ast.Constant), where
        assert not any(isinstance(part, ast.Constant) for part in rest), where
        constants.append(first.value)
    assert min(constants) > 100  # no stage has such a number
    constants.append(server._DRAW)  # of clients, from a secret where there is one
    assert [value for value, times in Counter(constants).items() if times > 1] == []


@pytest.mark.parametrize("round", [0, 1, 0x1417, 0x0DE, 0x5EED, 0x5A4E])
def test_batches_are_not_drawn_as_a_head_was(round: int, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[int, ...]] = []
    real = np.random.default_rng
    monkeypatch.setattr(np.random, "default_rng", lambda seed: made.append(states(seed)) or real(seed))
    stage: Any = recipe_of("fedavg", head_init="random").stages[0]
    head_start(stage, context_of(stage, 3, 4, (3, 1)))
    first = np.zeros(5, np.int64)
    new = np.array([True])
    one = Cohort(first[:1], np.zeros((5, 4)), np.arange(5), first, first, new, lambda *_: np.zeros(0, np.float32))
    batches(one, stage, round, (3, 1))
    random_parts(first, first, 2, (3, 1))
    assert len(set(made)) == len(made) == 3


def states(seed: Any) -> tuple[int, ...]:
    return tuple(np.random.SeedSequence(seed).generate_state(4).tolist())
