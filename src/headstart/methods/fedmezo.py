"""FedMeZO: training with one seed and a few scalars per round (thesis, chapter 4; MeZO: Malladi et al., NeurIPS 2023).

Travels down: a seed, and the mean slopes of the rounds that the client has missed. Every client measures the slope of
its loss along the directions of the seed, g_k = (L_k(θ + εz) − L_k(θ − εz)) / 2ε, over all its examples or a random
batch of them. Travels up: one scalar per direction. The mean over the clients, weighted by all their examples, is the
slope of the pooled loss, or an unbiased estimate of it, whoever holds what; everybody then takes the same step θ ← θ −
η Σ_p g_p z_p / P. The server needs no weights, and the run is its log of seeds and scalars: whoever has the log and the
pre-trained weights has the model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch

from headstart.config.stage import FedMeZOStage
from headstart.core.ledger import Published
from headstart.core.message import Array, Message
from headstart.core.statistics import Ints
from headstart.errors import MessageError
from headstart.heads import LinearHead
from headstart.methods.base import Arrays, Reply, Setting, weight_of
from headstart.methods.head_init import head_start
from headstart.solvers.cohort import Cohort, Kept
from headstart.solvers.heads import learning_rate
from headstart.solvers.network import Network, set_mode
from headstart.solvers.zeroth import ZerothOrder

# A slope that would need a loss to change by so much over the probe is no slope.
_ABSURD = 200.0


@dataclass(frozen=True)
class MeZOState:
    """The log: seeds [T] and mean slopes [T, P]; and the sums of this round so far."""

    seeds: Ints
    slopes: npt.NDArray[np.float32]
    sums: npt.NDArray[np.float64]
    weight: float = 0.0


class FedMeZOMethod:
    """Two forward passes per direction on the clients; a mean of scalars on the server."""

    hears_once = False
    catches_up = True
    personal = False
    kept_shapes: Mapping[str, tuple[int, ...]] = {}
    bytes_per_client = 0

    def __init__(self, stage: FedMeZOStage, setting: Setting) -> None:
        self.stage, self.setting, self.plan = stage, setting, stage.plan
        head = head_start(stage, setting, setting.each[0])
        tensors = {name: torch.from_numpy(value.astype(np.float32)) for name, value in head.items()}
        backbone = setting.backbone if self.plan.changes_features else None
        self.network = Network(backbone, setting.module, tensors, stage)
        self.model = ZerothOrder(self.network, stage.epsilon, stage.temperature)
        self.rounds_known = 0
        """Steps of the log that the weights have taken."""
        self._start = {name: parameter.detach().clone() for name, parameter in self.network.trained.items()}

    # ------------------------------------------------------------------------------------------------ on the server

    def open(self) -> MeZOState:
        """An empty log."""
        directions = self.stage.num_directions
        return MeZOState(np.zeros(0, np.int64), np.zeros((0, directions), np.float32), np.zeros(directions))

    def instruct(self, state: MeZOState, round: int, since: int, task: int = 0) -> Message:
        """This round's seed, and the log since the last round that the client heard of."""
        first = max(since, 0)
        arrays: dict[str, Array] = {"seeds": state.seeds[first:], "slopes": state.slopes[first:]}
        return Message(arrays, {"round": round, "first": first, "seed": self._seed(round)})

    def told(self, earlier: Message | None, message: Message) -> Message:
        """The message as if the client had never heard anything: what it was told before, and then the news."""
        first = int(message.scalars["first"])
        if not first:
            return message
        known = 0 if earlier is None else len(earlier.arrays["seeds"])
        if earlier is None or known < first:
            raise MessageError(f"the log starts at step {first}, and {known} steps are known")
        arrays = {n: np.concatenate([earlier.arrays[n][:first], message.arrays[n]]) for n in ("seeds", "slopes")}
        return Message(arrays, {**message.scalars, "first": 0})

    def _seed(self, round: int) -> int:
        return int(np.random.default_rng([0x5EED, *self.setting.seed, round]).integers(2**31))

    def fold(self, state: MeZOState, reply: Reply) -> MeZOState:
        """Add the weighted slopes of a client; slopes that cannot be right are refused."""
        slopes = reply.message.array("slopes", "float32", (self.stage.num_directions,)).astype(np.float64)
        largest = _ABSURD / (2 * self.stage.epsilon)
        if np.abs(slopes).max() > largest:
            raise MessageError(f"a slope of {np.abs(slopes).max():.1e} is absurd, more than {largest:.1e}")
        weight = weight_of(reply, self.stage.weighting)
        return replace(state, sums=state.sums + weight * slopes, weight=state.weight + weight)

    def summand(self, reply: Reply, round: int) -> dict[str, npt.NDArray[np.float64]]:
        """The weighted slopes, and the weight."""
        alone = self.fold(self.open(), reply)
        return {"slopes": alone.sums, "weight": np.array([alone.weight])}

    def summands(self, state: MeZOState) -> dict[str, tuple[int, ...]]:
        """A slope for each direction, and the weight."""
        return {"slopes": (self.stage.num_directions,), "weight": (1,)}

    def fold_sum(self, state: MeZOState, values: Mapping[str, npt.NDArray[np.float64]]) -> MeZOState:
        """Add the sums of several clients."""
        return replace(state, sums=state.sums + values["slopes"], weight=state.weight + float(values["weight"][0]))

    def close(self, state: MeZOState) -> MeZOState:
        """The mean slopes enter the log; without any reply they are zero."""
        round = len(state.seeds)
        slopes = (state.sums / max(state.weight, 1e-300) if state.weight else state.sums).astype(np.float32)
        return MeZOState(
            np.append(state.seeds, self._seed(round)), np.vstack([state.slopes, slopes]), np.zeros_like(state.sums)
        )

    def refine(self, state: MeZOState, cohort: Cohort) -> MeZOState:
        """Nothing is trained on the server."""
        return state

    def spent(self, state: MeZOState) -> None:
        """Slopes are sent as they are."""
        return None

    def head(self, state: MeZOState, task: int = 0, own: Arrays | None = None) -> LinearHead:
        """The head after every step of the log."""
        self._follow(0, state.seeds, state.slopes)
        heads = {n.removeprefix("head."): p for n, p in self.network.parameters.items() if n.startswith("head.")}
        head = LinearHead.of_arrays({name: p.detach().cpu().numpy().copy() for name, p in heads.items()})
        return replace(head, temperature=self.stage.temperature)

    def place(self, state: MeZOState, task: int = 0, own: Arrays | None = None) -> None:
        """Take the steps of the log that the weights have not taken."""
        self._follow(0, state.seeds, state.slopes)
        if self.network.backbone:
            set_mode(self.network.backbone.body, False, "freeze")

    def own(self, kept: Kept, task: int = 0) -> dict[str, npt.NDArray[np.float32]]:
        """Nothing."""
        return {}

    def show(self, state: MeZOState, task: int = 0) -> Message:
        """The whole log."""
        return self.instruct(state, len(state.seeds), -1)

    def shown(self, message: Message, task: int = 0, own: Arrays | None = None) -> LinearHead:
        """The head after every step of the log."""
        seeds, slopes = message.arrays["seeds"].astype(np.int64), message.arrays["slopes"].astype(np.float32)
        state = MeZOState(seeds, slopes, np.zeros(self.stage.num_directions))
        self.place(state)
        return self.head(state)

    def published(self, state: MeZOState, counts: Ints) -> Published:
        """The thesis counts one byte for a seed and for a scalar."""
        per_round = self.stage.sampled(self.setting.n_clients)
        directions, rounds = self.stage.num_directions, len(state.seeds)
        total = rounds * per_round * (1 + 2 * directions)
        sizes = counts.sum(axis=1)
        seen = sizes if self.stage.batch_size == "full" else np.minimum(sizes, self.stage.batch_size)
        passes = 2 * directions * rounds * int(seen.sum())
        return Published(total, passes, "thesis, Eq. 6: R · (K + 2 · K · num_z) bytes, up and down")

    def freeze(self, state: MeZOState) -> Message:
        """The log."""
        return Message({"seeds": state.seeds, "slopes": state.slopes})

    def thaw(self, message: Message) -> MeZOState:
        """The state that `freeze` wrote; clients that were told a part of the log before are told the rest only."""
        seeds, slopes = message.arrays["seeds"].astype(np.int64), message.arrays["slopes"].astype(np.float32)
        self._follow(0, seeds, slopes)
        return MeZOState(seeds, slopes, np.zeros(self.stage.num_directions))

    # ----------------------------------------------------------------------------------------------- on the clients

    def answer(self, cohort: Cohort, message: Message) -> list[Reply]:
        """Catch up with the log, then measure; all clients have the same weights, so one pass serves all of them."""
        first, seed, round = (int(message.scalars[name]) for name in ("first", "seed", "round"))
        self._follow(first, message.arrays["seeds"].astype(np.int64), message.arrays["slopes"].astype(np.float32))
        rows = self._rows(cohort, round)
        place = np.searchsorted(cohort.clients, cohort.owners[rows])
        seen = np.bincount(place, minlength=len(cohort.clients))
        sizes = np.bincount(np.searchsorted(cohort.clients, cohort.owners), minlength=len(cohort.clients))
        slopes = np.stack(
            [
                np.bincount(place, self.model.slopes(cohort, rows, seed, number), len(cohort.clients)) / seen
                for number in range(self.stage.num_directions)
            ],
            axis=1,
        ).astype(np.float32)
        replies = []
        for row, client in enumerate(cohort.clients):
            answer = Message({"slopes": slopes[row]}, {"examples": int(sizes[row])})
            passes = 2 * self.stage.num_directions * int(seen[row])
            if not self.plan.changes_features:  # the body is passed once, and the head is nothing beside it
                passes = int(sizes[row]) if cohort.new[row] else 0
            replies.append(Reply(np.array([client]), answer, np.array([answer.nbytes]), np.array([passes])))
        return replies

    def _rows(self, cohort: Cohort, round: int) -> Ints:
        """Positions of the examples that this round looks at: all, or so many of each client, drawn at random."""
        if self.stage.batch_size == "full":
            return np.arange(len(cohort.rows))
        starts = np.searchsorted(cohort.owners, cohort.clients)
        ends = np.searchsorted(cohort.owners, cohort.clients, side="right")
        drawn = []
        for client, start, end in zip(cohort.clients, starts, ends, strict=True):
            rng = np.random.default_rng([0x3E20, *self.setting.seed, round, int(client)])
            drawn.append(np.sort(start + rng.permutation(end - start)[: self.stage.batch_size]))
        return np.concatenate(drawn)

    def _follow(self, first: int, seeds: Ints, slopes: npt.NDArray[np.float32]) -> None:
        """Take the steps of a log that starts at step ``first``, from where the weights are, or from the start where
        they have taken more."""
        if first + len(seeds) < self.rounds_known:
            with torch.no_grad():
                for name, value in self._start.items():
                    self.network.parameters[name].copy_(value)
            self.rounds_known = 0
        if first > self.rounds_known:
            raise MessageError(f"the log starts at step {first}, and the weights have taken {self.rounds_known}")
        for number in range(self.rounds_known, first + len(seeds)):
            rate = learning_rate(self.stage, number)
            self.model.step(int(seeds[number - first]), slopes[number - first], rate, self.stage.weight_decay)
            self.rounds_known = number + 1
