"""The channel of a closed form: what happens to statistics of features between client and server.

With privacy, clients clip the vectors that they sum and send every class. Where they add the noise themselves, the
server takes it as it comes. Where the server adds it, it does so once a round, before anything else sees the total: a
recipe with noise on totals therefore samples all clients in one round, since the heads of two rounds would differ by
exact sums. Noise on rows stays with its row, and rounds may be as many as there are clients.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from math import inf
from types import MappingProxyType
from typing import Any

import numpy as np

from headstart.channel.accounting import noise_multiplier
from headstart.channel.noise import StatisticsNoise, blur_counts, every_class, generators_of, scaled, unscaled
from headstart.channel.shared_noise import SharedNoise
from headstart.config.stage import CountNoise, Privacy
from headstart.core.directions import sent_directions
from headstart.core.reply import Reply, Sender, StatisticsResult
from headstart.core.seeds import Seed, hiding
from headstart.core.statistics import ClientStatistics, Floats, Ints, Summary, message_nbytes, read_statistics
from headstart.core.update import Blocks, StatisticsTotal
from headstart.solvers.cohort import Cohort


class StatisticsChannel:
    """Statistics of one task."""

    client_state: Blocks = MappingProxyType({})
    """Nothing stays with a client."""

    def __init__(
        self,
        summary: Summary,
        privacy: Privacy | None,
        count_noise: CountNoise | None,
        clients: int,
        seed: Seed,
        task: int = 0,
        sums: int = 1,
        min_examples: int = 1,
        releases: int = 1,
    ) -> None:
        """clients: all of the task; seed: what noise is drawn from; task: no two have the same noise; sums: how many
        secure sums the clients are in; releases: how often each client participates in the stage."""
        self.summary, self.privacy, self.count_noise, self.clients = summary, privacy, count_noise, clients
        self.seed, self.task, self.sums, self.min_examples, self.releases = seed, task, sums, min_examples, releases
        self.private = privacy is not None
        self.by_client = privacy is not None and privacy.noise == "client"

    @cached_property
    def noise(self) -> StatisticsNoise | None:
        """The noise that the stage's privacy asks for, of each release."""
        if self.privacy is None:
            return None
        if self.shared is not None:
            return self._noise(self.shared.deviation / self._noise(1.0).sensitivity)
        return self._noise(noise_multiplier(self.privacy.epsilon, self.privacy.delta, self.releases))

    def _noise(self, multiplier: float) -> StatisticsNoise:
        summary, longest = self.summary, self.privacy.clip if self.privacy else inf
        bound, sketch = min(longest, summary.longest), summary.sketch > 0
        return StatisticsNoise(multiplier, bound, summary.moments, summary.counts, sketch)

    @cached_property
    def shared(self) -> SharedNoise | None:
        """The noise that clients add to a secure sum together."""
        if self.privacy is None or self.privacy.noise != "shared":
            return None
        noise, dim = self._noise(1.0), len(scaled(self._nothing, 1.0))
        return SharedNoise.of(self.privacy, noise.sensitivity, dim, self.clients, self.releases, self.seed)

    @property
    def _nothing(self) -> ClientStatistics:
        """A row of zeros for every class."""
        empty = self.summary.empty()
        return every_class(empty, empty.labels, np.zeros(1, np.int64))

    @property
    def memory_per_client(self) -> int:
        """With privacy, a row for every class, and room to add noise to it; the directions, or the sketch."""
        summary, rows = self.summary, self.summary.rank + self.summary.sketch
        return 4 * 8 * (summary.n_classes * (summary.dim + 1) * self.private + rows * summary.dim)

    # ----------------------------------------------------------------------------------------------- on the clients

    def prepare(self, cohort: Cohort, round: int = 0) -> Cohort:
        """With privacy, no vector that is summed is longer than the clip; classes of too few examples are left out."""
        if self.noise is not None:
            return replace(cohort, clip=self.noise.bound)
        if self.min_examples == 1:
            return cohort
        classes = cohort.owners * (int(cohort.labels.max(initial=0)) + 1) + cohort.labels
        _, which, sizes = np.unique(classes, return_inverse=True, return_counts=True)
        kept = sizes[which] >= self.min_examples
        return replace(cohort, rows=cohort.rows[kept], labels=cohort.labels[kept], owners=cohort.owners[kept])

    def encode(self, result: StatisticsResult, cohort: Cohort, round: int) -> list[Reply]:
        """The statistics of a cohort in one reply: with privacy, of every class."""
        counted = replace(result.statistics, counted=self.summary.counts)
        statistics, owners = self._encoded(counted, result.owners, cohort.clients, round)
        places, everybody = np.searchsorted(cohort.clients, owners), len(cohort.clients)
        rows = np.bincount(places, minlength=everybody)
        nbytes = self.nbytes(rows, np.bincount(places, statistics.counts, everybody).astype(np.int64))
        hidden = self.privacy is not None and self.privacy.from_server  # how many examples they have
        passes = np.zeros_like(result.passes) if hidden else result.passes
        message = statistics.to_message(precise=self.shared is not None, noisy=self.by_client)
        return [Reply(cohort.clients, message, nbytes, passes, task=cohort.task)]

    def nbytes(self, rows: Ints, examples: Ints) -> Ints:
        """Bytes [M] of the messages of clients that speak of so many rows [M], of so many examples [M]."""
        summary = self.summary
        sent: list[int | None] = [None] * len(rows)
        if summary.rank:
            sent = sent_directions(examples, rows, summary.rank, summary.dim, self.min_examples).tolist()
        dim, kinds, each = summary.dim, (summary.moments, summary.counts), zip(rows.tolist(), sent, strict=True)
        return np.array([message_nbytes(n, dim, *kinds, some, summary.sketch) for n, some in each])

    def _encoded(
        self, statistics: ClientStatistics, owners: Ints, clients: Ints, round: int
    ) -> tuple[ClientStatistics, Ints]:
        if self.count_noise is not None:
            return blur_counts(statistics, owners, self.count_noise, self.seed)
        if self.noise is None:
            kept = np.flatnonzero(statistics.counts >= self.min_examples)  # a class may be sent in parts
            return statistics.rows(kept), owners[kept]
        statistics = every_class(statistics, owners, clients)
        owners = np.repeat(clients, self.summary.n_classes)
        if not self.by_client:
            return statistics, owners
        statistics = self.noise.add(
            statistics, generators_of(self.seed, self.task, clients, round if self.releases > 1 else 0)
        )
        if not self.summary.by_row:  # leaving rows out would bias the sums
            return statistics, owners
        statistics, kept = statistics.present()
        return statistics, owners[kept]

    def vector(self, reply: Reply, sender: Sender) -> dict[str, Floats]:
        """Counts, sums and moments of a reply, as what can be added up; scaled where clients share the noise."""
        if self.shared is not None and self.noise is not None:
            return {"values": scaled(self._read(reply), self.noise.bound)}
        return self._read(reply).vector()

    # ------------------------------------------------------------------------------------------------ on the server

    def total(self, round: int = 0) -> StatisticsTotal:
        """Nothing received yet in this round."""
        return StatisticsTotal(self.summary)

    def add(self, total: StatisticsTotal, reply: Reply, sender: Sender) -> None:
        """Add a reply to the total of the round; statistics that no features have are refused."""
        total.add(self._read(reply), reply.clients.tolist())

    def _read(self, reply: Reply) -> ClientStatistics:
        summary = self.summary
        statistics = read_statistics(
            reply.message,
            summary,
            clients=len(reply.clients),
            every_class=self.private and not (summary.by_row and self.by_client),
            noisy=self.by_client,
            longest=inf if self.noise is None else self.noise.bound,
            precise=self.shared is not None,
        )
        return self._marked(statistics)

    def _marked(self, statistics: ClientStatistics) -> ClientStatistics:
        """Statistics that know of their clipping and their noise."""
        if self.noise is None:
            return statistics
        floor = self.noise.floor(self.summary.dim, self.clients) if self.by_client else None
        return replace(statistics, longest=self.noise.bound, noise_floor=floor)

    def add_vector(self, total: StatisticsTotal, values: Mapping[str, Any]) -> None:
        """Add the sum of several clients' vectors, as if one client had all their examples."""
        if self.shared is not None and self.noise is not None:
            noisy = unscaled(self.shared.read(values)["values"], self._nothing, self.noise.bound)
            total.add(replace(noisy, longest=self.noise.bound, noise_floor=self.noise.floor(noisy.dim, self.sums)))
            return
        total.add(self._marked(ClientStatistics.from_vector(values, self.summary.moments, self.private)))

    def vector_shapes(self, round: int = 0) -> dict[str, tuple[int, ...]]:
        """Names and shapes of what clients add in a secure sum."""
        return {name: values.shape for name, values in self.zeros(round).items()}

    def zeros(self, round: int = 0) -> dict[str, Floats]:
        """What adds nothing to a secure sum."""
        return {"values": np.zeros(self.shared.dim)} if self.shared is not None else self.summary.empty().vector()

    def finish(self, total: StatisticsTotal, round: int) -> StatisticsTotal:
        """With the server's noise, where it adds it: nothing exact is left."""
        if self.noise is None or self.by_client or self.shared is not None or not total.parts:
            return total
        statistics = total.merged()
        statistics = statistics if self.summary.by_row else statistics.pooled()
        parts = (statistics.counts, statistics.sums, statistics.moments, statistics.sketch)
        seed = hiding(self.seed, [part for part in parts if part is not None])
        noisy = self.noise.add(statistics, generators_of(seed, self.task, round=round))
        return StatisticsTotal(self.summary, (replace(noisy, noise_floor=self.noise.floor(self.summary.dim, 1)),))

    def spent(self, rounds: int) -> dict[str, Any] | None:
        """Everything, once any client has replied: examples of one client are hidden apart from those of another."""
        if self.privacy is None or self.noise is None:
            return None
        return {
            "epsilon": self.privacy.epsilon if rounds else 0.0,
            "delta": self.privacy.delta,
            "unit": "example",
            "noise": self.privacy.noise,
            "noise_multiplier": self.noise.multiplier,
            "clip": self.noise.bound,
            "released": self._released,
        }

    @property
    def _released(self) -> str:
        """What anybody sees that the guarantee is about."""
        if self.by_client:
            return "every client's statistics, once"
        if self.shared is not None:
            return "one total" if self.sums == 1 else f"{self.sums} totals of groups of clients"
        if self.releases > 1:
            return f"{self.releases} totals"
        return "a head after every round" if self.summary.by_row else "one head"


class PassChannels:
    """The channels of a closed form's passes over the clients; each may have a summary of its own."""

    client_state: Blocks = MappingProxyType({})

    def __init__(self, channels: Sequence[StatisticsChannel], rounds_per_pass: int) -> None:
        self.channels, self.rounds_per_pass = channels, rounds_per_pass
        self.private, self.spent = channels[0].private, channels[0].spent
        self.memory_per_client = max(channel.memory_per_client for channel in channels)

    def at(self, round: int) -> StatisticsChannel:
        """The channel of a round (from 0)."""
        return self.channels[min(round // self.rounds_per_pass, len(self.channels) - 1)]

    @property
    def shared(self) -> SharedNoise | None:
        """The same in all passes: with privacy they have one summary."""
        return self.channels[0].shared

    def prepare(self, cohort: Cohort, round: int = 0) -> Cohort:
        """As the pass's own."""
        return self.at(round).prepare(cohort, round)

    def encode(self, result: StatisticsResult, cohort: Cohort, round: int) -> list[Reply]:
        """As the pass's own."""
        return self.at(round).encode(result, cohort, round)

    def vector(self, reply: Reply, sender: Sender) -> dict[str, Floats]:
        """As the pass's own."""
        return self.at(sender.round).vector(reply, sender)

    def total(self, round: int = 0) -> StatisticsTotal:
        """As the pass's own."""
        return self.at(round).total(round)

    def add(self, total: StatisticsTotal, reply: Reply, sender: Sender) -> None:
        """As the pass's own."""
        self.at(sender.round).add(total, reply, sender)

    def add_vector(self, total: StatisticsTotal, values: Mapping[str, Any]) -> None:
        """As that of the pass which the total is of."""
        next(each for each in self.channels if each.summary is total.summary).add_vector(total, values)

    def vector_shapes(self, round: int = 0) -> dict[str, tuple[int, ...]]:
        """As the pass's own."""
        return self.at(round).vector_shapes(round)

    def zeros(self, round: int = 0) -> dict[str, Floats]:
        """As the pass's own."""
        return self.at(round).zeros(round)

    def finish(self, total: StatisticsTotal, round: int) -> StatisticsTotal:
        """As the pass's own."""
        return self.at(round).finish(total, round)


class TaskChannels:
    """The channels of several tasks, of which nothing is common."""

    client_state: Blocks = MappingProxyType({})

    def __init__(self, channels: Sequence[StatisticsChannel | PassChannels]) -> None:
        self.channels, self.shared = channels, None
        self.private = channels[0].private
        self.memory_per_client = max(channel.memory_per_client for channel in channels)

    def prepare(self, cohort: Cohort, round: int = 0) -> Cohort:
        """As the task's own."""
        return self.channels[cohort.task].prepare(cohort, round)

    def encode(self, result: StatisticsResult, cohort: Cohort, round: int) -> list[Reply]:
        """As the task's own."""
        return self.channels[cohort.task].encode(result, cohort, round)

    def vector(self, reply: Reply, sender: Sender) -> dict[str, Floats]:
        """As the task's own, and zeros for the other tasks."""
        found: dict[str, Floats] = {}
        for number, channel in enumerate(self.channels):
            mine = number == reply.task
            values = channel.vector(reply, sender) if mine else channel.zeros(sender.round)
            found |= {f"{number}.{name}": value for name, value in values.items()}
        return found

    def total(self, round: int = 0) -> list[StatisticsTotal]:
        """One for each task."""
        return [channel.total(round) for channel in self.channels]

    def add(self, total: list[StatisticsTotal], reply: Reply, sender: Sender) -> None:
        """To the total of the reply's task."""
        self.channels[reply.task].add(total[reply.task], reply, sender)

    def add_vector(self, total: list[StatisticsTotal], values: Mapping[str, Any]) -> None:
        """Each task's part to its total."""
        for number, channel in enumerate(self.channels):
            mine = {n.removeprefix(f"{number}."): v for n, v in values.items() if n.startswith(f"{number}.")}
            channel.add_vector(total[number], mine)

    def vector_shapes(self, round: int = 0) -> dict[str, tuple[int, ...]]:
        """Those of all tasks."""
        parts = enumerate(self.channels)
        return {f"{t}.{name}": shape for t, channel in parts for name, shape in channel.vector_shapes(round).items()}

    def finish(self, total: list[StatisticsTotal], round: int) -> list[StatisticsTotal]:
        """Each task's own."""
        return [channel.finish(part, round) for channel, part in zip(self.channels, total, strict=True)]

    def spent(self, rounds: int) -> dict[str, Any] | None:
        """The most that any task has spent: an example is one task's."""
        each = [spent for channel in self.channels if (spent := channel.spent(rounds))]
        return max(each, key=lambda one: float(one["epsilon"]), default=None)
