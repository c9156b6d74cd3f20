"""The channel of a stage: the links that updates pass, what the updates of a round add up to, and who may see what."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Protocol

import numpy as np

from headstart.channel.links import (
    Check,
    ClientNoise,
    Clip,
    HideTask,
    Link,
    ServerNoise,
    SumNoise,
    median,
    trimmed_mean,
)
from headstart.channel.quantise import Quantise
from headstart.channel.shared_noise import SharedNoise
from headstart.channel.sparsify import Sign, TopK
from headstart.channel.statistics import PassChannels, StatisticsChannel, TaskChannels
from headstart.config.stage import ClosedForm, Rounds
from headstart.core.aggregation import RULES
from headstart.core.message import Message
from headstart.core.reply import ClientResult, ClientState, Reply, Sender, scalars_of
from headstart.core.seeds import Seed
from headstart.core.statistics import Floats
from headstart.core.update import Blocks, HeldTotal, Total, array_name, block_of
from headstart.errors import HeadstartError, MessageError
from headstart.solvers.cohort import Cohort

_MOST_EXAMPLES = 10**12
# Of client state: what is left of a client's updates, by array.
_ERROR = "error."


class Sends(Protocol):
    """What a channel has to know of a method."""

    @property
    def blocks(self) -> Blocks:
        """All that clients send, of all tasks."""

    def expected(self, task: int) -> Blocks:
        """Of these, what a client of a task sends."""

    @property
    def weighting(self) -> str:
        """How clients count in a mean."""

    @property
    def accumulates(self) -> Mapping[str, str]:
        """Kinds of client state that add up what was sent of a block."""

    def check(self, message: Message) -> None:
        """`MessageError` where no client of the method sends such an update."""

    def counted(self, arrays: Mapping[str, Any]) -> Mapping[str, Any]:
        """Of a client's update, what is added up."""


class UpdateChannel:
    """Updates pass the links in order on the client and in reverse on the server, and add up by their weights."""

    memory_per_client = 0

    def __init__(self, method: Sends, links: tuple[Link, ...], total: type[Total] | partial[HeldTotal]) -> None:
        self.method, self.links, self._total = method, links, total
        self.private = any(isinstance(link, ServerNoise | ClientNoise | SumNoise) for link in links)
        self._feeds_back = any(link.feeds_back for link in links)
        self._hides_passes = any(isinstance(link, ClientNoise | SumNoise) for link in links)

    @property
    def shared(self) -> SharedNoise | None:
        """The noise that clients add to a secure sum together."""
        return next((link.shared for link in self.links if isinstance(link, SumNoise)), None)

    @property
    def client_state(self) -> Blocks:
        """What stays with a client beside what the method keeps: what the server has not read of its updates."""
        return _errors(self.method.blocks) if self._feeds_back else {}

    # ----------------------------------------------------------------------------------------------- on the clients

    def prepare(self, cohort: Cohort, round: int = 0) -> Cohort:
        """The examples as they are."""
        return cohort

    def encode(self, result: ClientResult, cohort: Cohort, round: int) -> list[Reply]:
        """What each client of a cohort sends, and what stays with it."""
        names = _errors(self.method.expected(cohort.task)) if self._feeds_back else {}
        errors, replies = {name: cohort.state(name, None) for name in names}, []
        stacks = {
            array_name(block, name): np.asarray(values)
            for block, each in result.blocks.items()
            for name, values in each.items()
        }
        for row, client in enumerate(cohort.clients.tolist()):
            sender = Sender(client, round, cohort.task)
            arrays = {name: np.asarray(values[row]) for name, values in stacks.items()}
            meant = Message(arrays, scalars_of(result.scalars, row) if arrays else {})
            sent, error = meant, {name: values[row] for name, values in errors.items()}
            for link in self.links:
                if link.feeds_back:
                    error = {name: sent.arrays[name.removeprefix(_ERROR)] + left for name, left in error.items()}
                    full = {name.removeprefix(_ERROR): array for name, array in error.items()}
                    sent = Message({**sent.arrays, **full}, sent.scalars)
                sent = link.encode(sent, sender)
            passes = 0 if self._hides_passes else int(result.passes[row])  # how many examples it has
            state = self._state(result, row, error, meant, sent, sender)
            replies.append(
                Reply(np.array([client]), sent, np.array([sent.nbytes]), np.array([passes]), state, cohort.task)
            )
        return replies

    def _state(
        self, result: ClientResult, row: int, error: ClientState, meant: Message, sent: Message, sender: Sender
    ) -> ClientState:
        """What stays with a client; where that adds up what it sends, then what the server reads of it.

        error: what it had to say, with what was left from its round before.
        """
        accumulates = self.method.accumulates
        read: Mapping[str, Any] = meant.arrays
        if error or (accumulates and any(link.lossy for link in self.links)):
            expected = {name: array.shape for name, array in meant.arrays.items()}
            try:
                read = self._read(sent, Sender(sender.client, sender.round, sender.task, expected)).arrays
            except MessageError:  # the server refuses it, and nothing counts
                read = {name: np.zeros_like(array) for name, array in meant.arrays.items()}
        state = {name: (full - read[name.removeprefix(_ERROR)]).astype(np.float32) for name, full in error.items()}
        for kind, each in result.state.items():
            for name, values in each.items():
                value = np.asarray(values[row])
                if kind in accumulates:
                    value = (value + read[f"{accumulates[kind]}.{name}"]).astype(np.float32)
                state[f"{kind}.{name}"] = value
        return state

    def vector(self, reply: Reply, sender: Sender) -> dict[str, Floats]:
        """What the server would know if it had received this reply only, as what can be added up."""
        alone = self._total()
        self.add(alone, reply, sender)
        return self._hidden(alone.vector(self.method.blocks))

    def _hidden(self, vector: dict[str, Floats]) -> dict[str, Floats]:
        """Where clients share the noise, they do not say how much they count: everybody counts one."""
        return vector if self.shared is None else {name: v for name, v in vector.items() if name != "weights"}

    # ------------------------------------------------------------------------------------------------ on the server

    def total(self, round: int = 0) -> Total:
        """Nothing received yet in this round."""
        return self._total()

    def add(self, total: Total, reply: Reply, sender: Sender) -> None:
        """Add a reply to the total of the round; one that cannot be right raises `MessageError` and changes nothing."""
        message = self._read(reply.message, sender)
        self.method.check(message)
        arrays = message.arrays
        if reply.discount != 1:  # of the update itself, not of its weight: a buffer of old updates is a short step
            arrays = {name: a * reply.discount if _is_update(name) else a for name, a in arrays.items()}  # type: ignore[operator]
        total.add(self.method.counted(arrays), self._weight(reply.message))

    def _read(self, message: Message, sender: Sender) -> Message:
        for link in reversed(self.links):
            message = link.decode(message, sender)
        return message

    def _weight(self, message: Message) -> float:
        """How much a client counts in a mean; with privacy, or where nothing is added up, it does not say how many
        examples it has."""
        if self.private or not self.method.blocks:
            return 1.0
        examples = message.whole_number("examples", _MOST_EXAMPLES)
        return float(examples) if self.method.weighting == "examples" else 1.0

    def add_vector(self, total: Total, values: Mapping[str, Any]) -> None:
        """Add the sum of several clients' vectors."""
        if self.shared is not None:
            values = {**self.shared.read(values), "weights": np.ones(1)}
        total.add_vector(values, self.method.blocks)

    def vector_shapes(self, round: int = 0) -> dict[str, tuple[int, ...]]:
        """Names and shapes of what clients add in a secure sum."""
        return {name: value.shape for name, value in self._hidden(self._total().vector(self.method.blocks)).items()}

    def finish(self, total: Total, round: int) -> Total:
        """What the server steps along."""
        for link in self.links:
            total = link.finish(total, round)
        return total

    def spent(self, rounds: int) -> dict[str, Any] | None:
        """The privacy guarantee after so many rounds."""
        return next((spent for link in self.links if (spent := link.spent(rounds))), None)


Channel = UpdateChannel | StatisticsChannel | PassChannels | TaskChannels


def channel_of(
    stage: ClosedForm | Rounds, method: Any, seed: tuple[int, ...], clients: Mapping[str, int], noise: Seed
) -> Channel:
    """The channel of a stage: nothing else reads its privacy, its robust mean, its largest norm or its compression.

    seed: the run's, and the stage's number; clients: how many each task has; noise: what noise is drawn from.
    """
    if stage.trains:
        return _update_channel(stage, method, seed, clients, noise)
    least, everybody = 1 if stage.protected else stage.min_examples, sum(clients.values())
    sums = max(1, everybody // stage.secure_group) if stage.secure_group else 1
    channels: list[StatisticsChannel | PassChannels] = []
    for task, (one, count) in enumerate(zip(method.methods, clients.values(), strict=True)):
        settings = stage.privacy, stage.noise_on_counts, count, noise, task, sums, least, stage.passes
        passes = [StatisticsChannel(summary, *settings) for summary in one.summaries]
        channels.append(passes[0] if len(passes) == 1 else PassChannels(passes, stage.rounds_per_pass(everybody)))
    return channels[0] if len(channels) == 1 else TaskChannels(channels)


def _update_channel(
    stage: Rounds, method: Sends, seed: tuple[int, ...], clients: Mapping[str, int], noise: Seed
) -> UpdateChannel:
    links: list[Link] = []
    privacy, deviation = stage.privacy, 0.0
    everybody, several = sum(clients.values()), len(clients) > 1
    if any(block_of(name).partition("@")[0] == "statistics" for name in method.blocks):
        for key, given, undone in (("privacy", privacy, "hides"), ("max_norm", stage.max_norm, "bounds")):
            if given is not None:
                raise HeadstartError(
                    f"stages.{seed[1]}.norm_statistics: with {key}, clients cannot send running statistics of "
                    f"batch norm, which nothing {undone}; use 'freeze' or 'batch'"
                )
    if stage.max_norm is not None:
        links.append(Clip(stage.max_norm))
    if privacy is not None:
        if privacy.noise == "server":
            by_task = {f"update@{task}": count for task, count in clients.items() if several}
            by_block, asked = {"update": everybody, **by_task}, stage.sampled(everybody)
            links.append(ServerNoise(privacy, stage.rounds, asked, by_block, lambda: method.blocks, noise))
        elif privacy.noise == "shared":
            links.append(SumNoise(privacy, stage.rounds, stage.sampled(everybody), lambda: method.blocks, noise))
        else:
            hidden = ClientNoise(privacy, stage.rounds, None, noise)
            links.append(hidden)
            deviation = hidden.deviation
    links.append(Check(deviation))
    if stage.hide_task and several:
        links.append(HideTask(list(clients), partial(_sent, method, len(clients))))
    padded = method.blocks if stage.hide_task and several else None
    compressions: dict[str, Callable[[], Link]] = {
        "int8": partial(Quantise, seed), "top-k": partial(TopK, stage.top_k, padded), "sign": partial(Sign, padded),
    }  # fmt: skip
    if stage.compress is not None:
        links.append(compressions[stage.compress]())
    if stage.combine == "mean":
        return UpdateChannel(method, tuple(links), Total)
    robust: dict[str, Callable[[Floats], Floats]] = {
        "median": median,
        "trimmed-mean": partial(trimmed_mean, trim=stage.trim),
    }
    rule = RULES.get(stage.combine) or partial(_by_coordinate, robust[stage.combine])
    return UpdateChannel(method, tuple(links), partial(HeldTotal, rule=rule))


def _sent(method: Sends, tasks: int) -> Blocks:
    """What clients of all tasks send, without what the server makes of it."""
    sent = {name for task in range(tasks) for name in method.expected(task)}
    return {name: shape for name, shape in method.blocks.items() if name in sent}


def _errors(blocks: Blocks) -> Blocks:
    """What clients keep for error feedback, by the names of their state.

    Of the block `update` alone: SCAFFOLD's `control` is the difference to what the server has read already.
    """
    return {_ERROR + name: shape for name, shape in blocks.items() if _is_update(name)}


def _is_update(name: str) -> bool:
    """Whether an array is of the block `update`, of whichever task."""
    return block_of(name).partition("@")[0] == "update"


def _by_coordinate(centre: Callable[[Floats], Floats], updates: Mapping[str, Floats], _: Floats) -> dict[str, Floats]:
    """Coordinate-wise median or trimmed mean, clients unweighted."""
    return {name: centre(values) for name, values in updates.items()}
