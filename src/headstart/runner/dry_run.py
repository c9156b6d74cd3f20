"""A recipe's stages without any client: the real methods, channels and draws, and messages of zeros.

What a message weighs depends on the names, types and shapes of its arrays and on a few whole numbers, never on the
values. So the ledger of a dry run is that of the run, to the byte, wherever those do not depend on the values either;
where they do (k-means, noise that makes classes vanish), rows are counted as they are expected.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import numpy as np

from headstart.channel.statistics import PassChannels, StatisticsChannel, TaskChannels
from headstart.config.recipe import Recipe
from headstart.config.stage import ClosedForm
from headstart.core.client_statistics import sums_dtype
from headstart.core.directions import sent_directions
from headstart.core.state import pack
from headstart.core.statistics import ClientStatistics, Ints, Summary
from headstart.core.update import StatisticsTotal
from headstart.data import Federation
from headstart.heads import LinearHead
from headstart.heads.calibrate import N_TEMPERATURES
from headstart.methods.closed_form import ClosedFormState
from headstart.methods.tasks import ClosedFormStates
from headstart.records import NoDirectory, StageModel
from headstart.runner.dry_stage import Bill, DryStage, DryTraining
from headstart.runner.run_recipe import Run
from headstart.solvers.cohort import Cohort


def dry_run(recipe: Recipe, federation: Federation) -> tuple[Run, list[tuple[DryStage, Bill]]]:
    """The bills of all stages; nothing is computed of any example."""
    run = Run(recipe, federation, NoDirectory(), lambda line: None, Path(), None)
    stages: list[tuple[DryStage, Bill]] = []
    for number, settings in enumerate(recipe.stages):
        stage = (DryTraining if settings.trains else DryClosedForm)(run, number, None)
        stages.append((stage, stage.bill()))
        stage.leave(stage.server.state)
    return run, stages


class DryClosedForm(DryStage):
    """A stage that computes a head from statistics."""

    def __init__(self, *given: Any) -> None:
        self._requests: dict[tuple[int, ...], int] = {}
        self._messages: dict[int, tuple[Ints, Ints]] = {}
        """By pass: bytes [K] of each client's statistics, and the examples [K] behind them."""
        super().__init__(*given)

    @property
    def stage(self) -> ClosedForm:
        """The table of the recipe."""
        return cast(ClosedForm, self.settings)

    def leave(self, state: Any) -> None:
        """A head of the right shapes for later stages to start from."""
        parts = zip(self.method.methods, self.tasks, strict=True)
        heads = tuple(_head(method, task.n_classes, self.stage.rows_per_class) for method, task in parts)
        self.run.models.append(StageModel(heads, self.begin.body))

    def _request(self, round: int, task: int, since: int) -> int:
        """What a pass tells of the one before."""
        number = self._pass(round)
        key = (task, len(str(round)), number)
        if key not in self._requests:
            state = self._before_passes[task][number]
            self._requests[key] = self.method.methods[task].broadcast(state, round, since).nbytes
        return self._requests[key]

    def _pass(self, round: int) -> int:
        method: Any = self.method.methods[0]
        return int(method.pass_of(round))

    def _channels(self, number: int) -> list[StatisticsChannel]:
        """The channel of each task in a pass over the clients."""
        channel: Any = self.channel
        tasks = channel.channels if isinstance(channel, TaskChannels) else [channel]
        return [each.channels[number] if isinstance(each, PassChannels) else each for each in tasks]

    def _up(self, round: int, drawn: Ints, new: Any) -> tuple[Ints, Ints]:
        """By the rows that each client has."""
        number, privacy = self._pass(round), self.stage.privacy
        if number not in self._messages:
            rows, examples = self._rows(number)
            nbytes = np.zeros(self.federation.n_clients, np.int64)
            for task, channel in enumerate(self._channels(number)):
                mine = self.federation.clients_of(task)
                nbytes[mine] = channel.nbytes(rows[mine], examples[mine])
            self._messages[number] = nbytes, examples
        nbytes, examples = self._messages[number]
        hidden = privacy is not None and privacy.from_server  # how many examples clients have
        passes = np.where(new & (not hidden), examples[drawn], 0)
        return np.full(len(drawn), self._vector(round)) if self.stage.secure else nbytes[drawn], passes

    def _rows(self, number: int) -> tuple[Ints, Ints]:
        """Rows [K] that each client sends in a pass, and the examples [K] behind them."""
        federation, settings = self.federation, self.stage
        rows, examples = np.zeros((2, federation.n_clients), np.int64)
        for task, channel in enumerate(self._channels(number)):
            cohort, method = self._cohort(task), self.method.methods[task]
            mine, summary = cohort.clients, channel.summary
            cohort = channel.prepare(cohort, 0)
            calibrates = number == settings.passes - 1 and settings.temperature == "auto"
            labels = 0 * cohort.labels if calibrates else cohort.labels
            parts = None if calibrates else method.parts(cohort)  # type: ignore[attr-defined]
            parts = 0 * labels if parts is None else parts
            width = int(parts.max(initial=0)) + 1
            keys, counts = np.unique((cohort.owners * summary.n_classes + labels) * width + parts, return_counts=True)
            kept = counts >= channel.min_examples
            who = keys[kept] // width // summary.n_classes
            each = np.ones(kept.sum())
            if self.stage.rows_per_class > 1 and number and not calibrates:  # distinct ones of k, drawn so often
                each = self.stage.rows_per_class * (1 - (1 - 1 / self.stage.rows_per_class) ** counts[kept])
            rows[mine] = np.rint(np.bincount(who, each, federation.n_clients))[mine]
            examples[mine] = np.bincount(who, counts[kept], federation.n_clients)[mine]
            if channel.private:
                rows[mine] = summary.n_classes
        return rows, examples

    def _cohort(self, task: int) -> Cohort:
        """All clients of a task."""
        federation = self.federation
        mine = federation.clients_of(task)
        rows, owners = federation.rows_of(mine)
        labels = federation.dataset.train.labels[rows] - federation.class_starts[task]
        return Cohort(mine, self._source(), rows, labels, owners, np.ones(len(mine), np.bool_), nothing, task)

    @cached_property
    def _before_passes(self) -> list[list[Any]]:
        """Of each task: the server's state before each pass, from made-up clients that have every class."""
        return [list(self._rehearsed(task)) for task in range(len(self.tasks))]

    def _rehearsed(self, task: int) -> Iterator[Any]:
        method: Any = self.method.methods[task]
        state, length = method.init(), self.stage.rounds_per_pass(self.federation.n_clients)
        yield state
        present = np.unique(self._cohort(task).labels)
        labels = np.repeat(present, 4 * self.stage.rows_per_class)
        rng = np.random.default_rng([0xD2F])
        for number in range(self.stage.passes - 1):
            total = StatisticsTotal(method.summaries[number])
            for client in range(3):  # covariances are estimated from how clients' means differ
                rows, owners = np.arange(len(labels)), np.full(len(labels), client)
                source = rng.standard_normal((len(labels), self.run.store.dim)).astype(np.float32)
                one = np.array([client])
                cohort = Cohort(one, source, rows, labels, owners, np.array([True]), nothing, task)
                message = method.broadcast(state, number * length, -1)
                found = method.client_update(cohort, method.receive(cohort, message)).statistics
                total.add(replace(found, counted=method.summaries[number].counts), [client])
            state = method.server_update(state, total, number * length)
            yield state

    def _on_server(self, asked: Any) -> dict[str, Any]:
        """Sums, or every client's rows."""
        settings, privacy = self.stage, self.stage.privacy
        by_client = privacy is not None and privacy.noise == "client"
        calibrates = settings.temperature == "auto"
        learned = settings.passes - calibrates
        rows, examples = self._rows(learned - 1)
        length, states, growing, total = settings.rounds_per_pass(self.federation.n_clients), [], 0.0, 0
        for task, method in enumerate(self.method.methods):
            summary, mine = method.summary, self.federation.clients_of(task)  # type: ignore[attr-defined]
            mine = mine[asked[mine]]
            pooled = len(np.unique(self._cohort(task).labels)) * self.stage.rows_per_class
            added = _statistics(summary, pooled)
            total += pack(added).nbytes
            parts: tuple[ClientStatistics, ...] = (added,)
            if summary.rows:
                count, directions = int(rows[mine].sum()), 0
                if settings.secure:  # a group is a client
                    groups = np.array_split(mine, max(1, len(mine) // (settings.secure_group or len(mine))))
                    held = [int(self.federation.counts[part].any(axis=0).sum()) for part in groups]
                    count = sum(held) * self.stage.rows_per_class
                elif summary.rank:
                    sent = sent_directions(examples[mine], rows[mine], summary.rank, summary.dim, settings.min_examples)
                    directions = int(sent.sum())
                noisy = privacy is not None and not by_client  # noise is added in float64
                dtype = sums_dtype(settings.secure or noisy or summary.moments == "full")
                first = count - (length - 1) * (count // length)
                shares = [first, *[count // length] * (length - 1)]
                parts = tuple(_statistics(summary, n, directions // length, dtype) for n in shares)
                growing += count * (16 + np.dtype(dtype).itemsize * summary.dim) + 4 * directions * summary.dim
            if summary.kept:
                each = _statistics(summary, round(rows[mine].mean()))
                growing += len(mine) * pack(each).nbytes
            losses = (_statistics(Summary(1, N_TEMPERATURES), 1),) if calibrates else ()
            states.append(ClosedFormState(parts, losses, (added,) if learned > 1 else (), learned - 1))
        whole = ClosedFormStates(tuple(states)) if len(states) > 1 else states[0]
        kept = growing if settings.keep_statistics else 0.0
        return {
            "state": pack(whole).nbytes + round(kept), "total": total, "state_per_client": growing / int(asked.sum()),
            "exact": not (calibrates or self.stage.rows_per_class > 1 or settings.noise_on_counts or by_client),
        }  # fmt: skip


def _statistics(summary: Summary, rows: int, directions: int = 0, dtype: str = "float64") -> ClientStatistics:
    """So many rows as a summary has them, in the memory of one number each."""
    none, dim = np.broadcast_to(np.int64(0), rows), summary.dim
    return replace(
        summary.empty(), labels=none, counts=none, sums=np.broadcast_to(np.zeros((), dtype), (rows, dim)),
        directions=np.broadcast_to(np.float32(0), (directions, dim)) if summary.rank else None,
    )  # fmt: skip


def _head(method: Any, n_classes: int, centres: int) -> LinearHead:
    """A head of zeros of the shapes that a closed form computes."""
    random = getattr(method, "random", None)
    shape = centres * n_classes, method.context.dim if random is None else len(random.phase)
    return LinearHead(np.zeros(shape, np.float32), np.zeros(shape[:1], np.float32), random, centres=centres)


def nothing(name: str, start: Any) -> Any:
    """The client state of nobody."""
    raise AssertionError("nobody is asked")
