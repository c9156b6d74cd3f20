from dataclasses import dataclass, field

import numpy as np

from headstart.core.message import Message
from headstart.core.params import Params
from headstart.core.state import pack, unpack


@dataclass(frozen=True)
class Count:
    clients: int
    share: float | None = None


@dataclass(frozen=True)
class Part:
    params: Params
    count: Count


@dataclass(frozen=True)
class Whole:
    parts: tuple[Part, ...]
    memory: dict[str, Params] = field(default_factory=dict)
    spare: Params = field(default_factory=Params)
    count: Count = field(default_factory=lambda: Count(1))


def test_a_state_of_states_comes_back_from_its_bytes() -> None:
    weights = [Params({"head.weight": np.array([[value, 2.0]]), "scale": np.array(value)}) for value in (1.0, 3.0)]
    state = Whole(
        tuple(Part(each, Count(4 + n, 0.5)) for n, each in enumerate(weights)), {"m": weights[0], "none": Params()}
    )
    found = unpack(Whole, Message.from_bytes(pack(state).to_bytes()))
    assert [part.count for part in found.parts] == [Count(4, 0.5), Count(5, 0.5)]
    assert found.count == Count(1, None)
    assert found.spare == {}
    assert found.memory.keys() == {"m", "none"}
    assert found.memory["none"] == {}
    params = [*(part.params for part in found.parts), found.memory["m"]]
    for mine, expected in zip(params, [*weights, weights[0]], strict=True):
        assert isinstance(mine, Params)
        assert mine.shapes == expected.shapes
        assert all(np.array_equal(mine[name], value) for name, value in expected.items())


def test_an_empty_state_comes_back_too() -> None:
    assert unpack(Whole, Message.from_bytes(pack(Whole(())).to_bytes())) == Whole(())
