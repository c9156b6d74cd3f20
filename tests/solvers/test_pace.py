"""More threads are never chosen where they were measured to be slower."""

import pytest

from headstart.solvers.heads import Pace


@pytest.mark.parametrize(
    ("one", "four", "chosen"), [([3.0, 2.0], [2.5, 9.0], 1), ([3.0, 2.0], [9.0, 1.5], 4), ([3.0, 2.0], [9.0, 1.9], 1)]
)
def test_each_is_tried_twice_in_turns_and_the_faster_one_stays(
    one: list[float], four: list[float], chosen: int
) -> None:
    pace, left = Pace(), {1: list(one), 4: list(four)}
    tried = []
    for _ in range(4):
        tried.append(pace.threads(4))
        pace.note(tried[-1], left[tried[-1]].pop(0))
    assert tried == [1, 4, 1, 4]
    for seconds in (100.0, 0.001):  # later ones change nothing
        assert pace.threads(4) == chosen
        pace.note(chosen, seconds)


def test_one_thread_is_not_tried_against_itself() -> None:
    pace = Pace()
    for seconds in (1.0, 2.0, 3.0):
        assert pace.threads(1) == 1
        pace.note(1, seconds)
    assert pace.threads(2) == 2  # a cohort of several clients after some of one
