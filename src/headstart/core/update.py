"""What the updates of a round add up to.

An update is a message whose arrays are named `BLOCK.PARAMETER`. A block is what has one meaning, such as `update` (how
far a client has moved the model), `control` (SCAFFOLD's control variates) or `statistics` (those of batch norm). Where
there are several tasks, the names of what belongs to one of them end in `@TASK`, and it is a block of its own. A block
that is one array is called `BLOCK`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from headstart.core.aggregation import Rule
from headstart.core.message import Array
from headstart.core.params import Params
from headstart.core.statistics import ClientStatistics, Features, Floats, Summary
from headstart.errors import HeadstartError

Blocks = Mapping[str, tuple[int, ...]]
"""Names and shapes of the arrays of an update."""


def block_of(name: str) -> str:
    """The block of an array by its name: `update`, or `update@TASK`."""
    plain, at, task = name.partition("@")
    return plain.partition(".")[0] + at + task


def parameter_of(name: str) -> str:
    """The parameter that an array belongs to, without the name of its task."""
    return name.partition("@")[0].partition(".")[2]


def array_name(block: str, parameter: str) -> str:
    """The name of an array: of a block that is one array, the parameter is empty, or `@TASK`."""
    return f"{block}.{parameter}" if parameter.partition("@")[0] else f"{block}{parameter}"


def block(arrays: Mapping[str, Any], name: str) -> Params:
    """The arrays of a block, by the parameters' names."""
    return Params({parameter_of(full): array for full, array in arrays.items() if block_of(full) == name})


@dataclass(eq=False)
class Total:
    """Σ weight · array of every array, and Σ weight of every block."""

    sums: dict[str, Floats] = field(default_factory=dict)
    weights: dict[str, float] = field(default_factory=dict)

    def add(self, arrays: Mapping[str, Array], weight: float) -> None:
        """Add the update of a client that counts so much."""
        for name, array in arrays.items():
            # An array without dimensions times a number is a number, which nothing can be added to in place.
            scaled = np.asarray(weight * array.astype(np.float64))
            self.sums[name] = np.add(self.sums[name], scaled, out=scaled) if name in self.sums else scaled
        self._count(arrays, weight)

    def _count(self, arrays: Mapping[str, Any], weight: float) -> None:
        for name in dict.fromkeys(map(block_of, arrays)):
            self.weights[name] = self.weight(name) + weight

    def weight(self, name: str) -> float:
        """How much all replies with a block count together."""
        return self.weights.get(name, 0.0)

    def sum(self, name: str) -> Params:
        """Σ weight · array of a block, by the parameters' names."""
        return block(self.sums, name)

    def mean(self, name: str) -> Params:
        """Σ weight · array / Σ weight of a block, by the parameters' names."""
        return self.sum(name) / self.weight(name)

    def vector(self, blocks: Blocks) -> dict[str, Floats]:
        """The same names and shapes whichever clients replied: what a secure sum adds."""
        sums = {name: self.sums.get(name, np.zeros(shape)) for name, shape in blocks.items()}
        return {**sums, "weights": np.array([self.weight(name) for name in _names(blocks)])}

    def add_vector(self, values: Mapping[str, Floats], blocks: Blocks) -> None:
        """Add the sum of what `vector` made at several clients."""
        weights = dict(zip(_names(blocks), values["weights"].tolist(), strict=True))
        for name in blocks:
            if weights[block_of(name)] > 0:
                self.sums[name] = self.sums[name] + values[name] if name in self.sums else values[name]
        for name, weight in weights.items():
            if weight > 0:
                self.weights[name] = self.weight(name) + weight

    def part(self, task: str) -> Total:
        """What is common to all tasks where ``task`` is empty, or one task's own, under plain names."""
        return Total(_of_task(self.sums, task), _of_task(self.weights, task))


@dataclass(eq=False)
class HeldTotal(Total):
    """The updates themselves; a rule makes their mean. Memory for all clients of a round."""

    rule: Rule = field(kw_only=True)
    held: list[tuple[Mapping[str, Array], float]] = field(default_factory=list)
    """The update of each client, and how much it counts."""

    def add(self, arrays: Mapping[str, Array], weight: float) -> None:
        """Hold the update of a client."""
        self.held.append((arrays, weight))
        self._count(arrays, 1.0)

    def sum(self, name: str) -> Params:
        """What the rule makes of a block, as often as there are clients."""
        return self.mean(name) * self.weight(name)

    def mean(self, name: str) -> Params:
        """What the rule makes of a block."""
        found = [(part, weight) for arrays, weight in self.held if (part := block(arrays, name))]
        if not found:
            return Params()
        stacks = {each: np.stack([part[each] for part, _ in found]).astype(np.float64) for each in found[0][0]}
        step = {each: np.asarray(array) for each, array in self.rule(stacks, np.array([w for _, w in found])).items()}
        wrong = [each for each in stacks if each not in step or step[each].shape != stacks[each].shape[1:]]
        if wrong or len(step) > len(stacks):
            raise HeadstartError(
                "combine: an aggregation rule returns an array for each parameter that it is given, without the axis "
                f"of the clients; look at {wrong[0] if wrong else next(each for each in step if each not in stacks)!r}"
            )
        return Params(step)

    def part(self, task: str) -> HeldTotal:
        """What is common to all tasks where ``task`` is empty, or one task's own, under plain names."""
        held = [(mine, weight) for arrays, weight in self.held if (mine := _of_task(arrays, task))]
        return HeldTotal(weights=_of_task(self.weights, task), rule=self.rule, held=held)  # type: ignore[arg-type]


@dataclass(eq=False)
class StatisticsTotal:
    """The statistics of a round: added up, or every client's rows side by side."""

    summary: Summary
    parts: tuple[ClientStatistics, ...] = ()
    kept: dict[int, ClientStatistics] = field(default_factory=dict)
    """Each client's, where they are kept."""
    _sums: _Rows = field(default_factory=lambda: _Rows())
    """The sums of all parts, where rows are side by side; the parts have none."""

    def add(self, statistics: ClientStatistics, clients: Sequence[int] = ()) -> None:
        """Add the statistics of one client or of several."""
        if self.summary.kept:
            (client,) = clients
            self.kept[client] = statistics
        if self.summary.rows:
            self._sums.append(statistics.sums)
            self.parts = (*self.parts, replace(statistics, sums=statistics.sums[:0]))
        else:
            self.parts = ((self.parts[0] if self.parts else self.summary.empty()).merge(statistics).pooled(),)

    def merged(self) -> ClientStatistics:
        """All replies of the round."""
        first, *others = self.parts or (self.summary.empty(),)
        found = first.merge(*others)
        return replace(found, sums=rows) if len(rows := self._sums.values) else found


@dataclass(eq=False)
class _Rows:
    """Rows [R, d] that are added to in place: those of a million clients are not held twice."""

    room: Features = field(default_factory=lambda: np.zeros((0, 0)))
    used: int = 0

    def append(self, rows: Features) -> None:
        """Add rows [r, d]; an eighth more room than is needed, so that room is rarely made."""
        if not self.used:
            self.room = np.zeros((0, rows.shape[1]), rows.dtype)
        if (used := self.used + len(rows)) > len(self.room):
            self.room.resize((used + used // 8, rows.shape[1]))  # refuses where `values` is still in use
        self.room[self.used : used], self.used = rows, used

    @property
    def values(self) -> Features:
        """All of them; a view."""
        return self.room[: self.used]


def _of_task(values: Mapping[str, Any], task: str) -> dict[str, Any]:
    """The values under names of a task, without its name."""
    split = {name: name.partition("@") for name in values}
    return {plain: values[name] for name, (plain, _, mine) in split.items() if mine == task}


def _names(blocks: Blocks) -> list[str]:
    """The blocks of these arrays, each once."""
    return list(dict.fromkeys(map(block_of, blocks)))
