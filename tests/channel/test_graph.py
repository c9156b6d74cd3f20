"""Neighbourhoods of large secure sums: their sizes against exact probabilities, their shape, and sums with dropouts."""

import math
from fractions import Fraction

import numpy as np
import pytest

from headstart.channel.secure.graph import LARGEST_CLIQUE, Graph, neighbours_of
from headstart.core.message import Message
from headstart.errors import HeadstartError, MessageError
from tests.channel.test_secure import Federation, altered, same

X = {"x": (3,)}


def chance(count: int, neighbours: int) -> Fraction:
    """That some client loses more neighbours than its secrets bear, at most: in Python's own integers."""
    lost, others = (count - 1) // 3, count - 1
    worse = range(neighbours // 2 - 1, min(lost, neighbours) + 1)
    ways = sum(math.comb(lost, bad) * math.comb(others - lost, neighbours - bad) for bad in worse)
    return count * Fraction(ways, math.comb(others, neighbours))


@pytest.mark.parametrize("count", [51, 60, 100, 150, 300, 1000])
def test_neighbourhoods_are_the_smallest_that_open_as_good_as_always(count: int) -> None:
    found = neighbours_of(count)
    assert found % 2 == 0
    assert chance(count, found) <= Fraction(1, 2**20) < chance(count, found - 2)


def test_sizes_that_the_documentation_names() -> None:
    assert [neighbours_of(count) for count in (51, 100, 1000, 10_000)] == [36, 70, 244, 350]


def test_everybody_is_a_neighbour_in_a_small_sum() -> None:
    numbers = list(range(0, 2 * LARGEST_CLIQUE, 2))
    graph = Graph.of(b"digest", numbers, 34)
    assert (graph.neighbours, graph.needed) == (49, 34)
    assert all(graph.group(number) == tuple(numbers) for number in numbers)


def test_neighbourhoods_are_mutual_of_one_size_and_in_an_order_that_follows_the_list() -> None:
    numbers = [3 * n + 1 for n in range(80)]
    graph = Graph.of(b"digest", numbers, 60)
    groups = {number: graph.group(number) for number in numbers}
    assert (graph.neighbours, graph.needed) == (neighbours_of(80), neighbours_of(80) // 2 + 2)
    for number, group in groups.items():
        assert len(set(group)) == graph.neighbours + 1
        assert list(group) == sorted(group)
        assert all(number in groups[other] for other in group)
    assert sorted(graph.ring) == numbers
    assert graph.ring != tuple(numbers)
    assert Graph.of(b"digest", numbers, 60).ring == graph.ring
    assert Graph.of(b"another", numbers, 60).ring != graph.ring


def test_survivors_that_can_be_opened_are_connected_whoever_is_left_out() -> None:
    """The worst that a server can choose: as many neighbours in a row as a secret bears, anywhere on the ring."""
    numbers = list(range(200))
    graph = Graph.of(b"digest", numbers, 140)
    rng = np.random.default_rng(0)
    for _ in range(200):
        gone: set[int] = set()
        for start in rng.integers(0, 200, 3):
            length = int(rng.integers(1, graph.neighbours // 2 + 8))
            gone |= {graph.ring[(start + step) % 200] for step in range(length)}
        survivors = set(numbers) - gone
        if any(len(survivors & set(graph.group(n))) < graph.needed for n in survivors):
            continue  # some survivor's mask stays on, and so does the total
        reached, new = set[int](), {min(survivors)}
        while new:
            reached |= new
            new = {other for n in new for other in graph.group(n) if other in survivors} - reached
        assert reached == survivors


@pytest.mark.parametrize("step", ["keys", "shares", "masked", "agree", "reveal"])
def test_a_sum_of_neighbourhoods_opens_with_as_many_dropouts_as_it_tolerates(step: str) -> None:
    numbers = tuple(range(60))
    federation = Federation(numbers, 41, X).until(step)
    gone = set(np.random.default_rng(1).permutation(60)[:19].tolist())
    federation.exchange(silent=gone)
    federation.until(None)
    assert federation.server.dropped() == dict.fromkeys(gone, step)
    assert same(federation.server.total(), federation.expected())


def test_a_client_of_a_large_sum_shares_with_its_neighbours_only() -> None:
    federation = Federation(tuple(range(60)), 41, X).until("shares")
    answers = federation.exchange()
    group = set(federation.server._graph.group(7)) - {7}
    assert set(answers[7].arrays["recipients"].tolist()) == group
    assert len(group) == neighbours_of(60) == 42
    told = federation.server.instructions()[7]
    assert told.arrays["parts"].shape == (42, 84)
    assert len(told.arrays["sharers"]) == 60


def test_a_neighbourhood_with_too_few_left_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headstart.channel.secure.graph.neighbours_of", lambda count: 6)
    federation = Federation(tuple(range(60)), 41, X).until("reveal")
    graph = federation.server._graph
    assert graph.needed == 5
    silent = [number for number in graph.group(7) if number != 7][:3]
    federation.exchange(silent=silent)
    # The graph is another one every time: another client may have lost as many, and is then found first.
    left = {number: len(set(graph.group(number)) - set(silent)) for number in range(60)}
    assert left[7] == 4
    first = min(number for number, count in left.items() if count < 5)
    why = f"{left[first]} of client {first}'s neighbours are left, 5 are needed to open the sum"
    with pytest.raises(HeadstartError, match=f"^{why}$"):
        federation.server.total()


def test_a_server_cannot_show_a_client_fewer_senders_of_parts_than_its_neighbours() -> None:
    """It would share masks with those only, and the others could all be called survivors."""
    federation = Federation(tuple(range(60)), 41, X).until("masked")
    graph = federation.server._graph
    told = federation.server.instructions()[7]
    hidden = [number for number in graph.group(7) if number != 7][:18]
    keep = [number not in hidden for number in graph.group(7) if number != 7]
    sharers = np.array([number for number in range(60) if number not in hidden])
    federation.server.receive(7, federation.answer(7, altered(told, sharers=sharers, parts=told.arrays["parts"][keep])))
    federation.exchange()
    neighbour = next(number for number in graph.group(7) if number not in hidden and number != 7)
    with pytest.raises(MessageError, match=r"clients \[7\] have not signed that the same clients have sent parts"):
        federation.answer(neighbour)
    stranger = next(number for number in range(60) if number not in graph.group(7))
    assert isinstance(federation.answer(stranger), Message)
