"""Stages whose clients are drawn and charged, and never asked: the ledger of a stage that trains, before it runs.

What a message weighs depends on the names, types and shapes of its arrays and on a few whole numbers, never on the
values: so messages are made of zeros by the real methods and channels, and weighed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from headstart.config.stage import ClosedForm, Rounds
from headstart.core.ledger import Ledger
from headstart.core.message import Message
from headstart.core.params import Params
from headstart.core.plan import Plan
from headstart.core.reply import ClientResult
from headstart.core.state import pack
from headstart.core.statistics import Features, Ints
from headstart.core.update import Blocks, Total, array_name
from headstart.engine.client_states import RemoteStates
from headstart.engine.server import check_sum, draw
from headstart.runner.costs import batch_examples, seen_examples
from headstart.runner.run_stage import StageRun
from headstart.solvers.cohort import Cohort


@dataclass(frozen=True, eq=False)
class Bill:
    """What one stage costs, before it runs."""

    settings: ClosedForm | Rounds
    rounds: int
    ledger: Ledger
    setup: Ints
    """[K] Bytes of earlier stages' work that are among each client's bytes down."""
    asked: Ints
    """[K] Rounds that each client is asked in."""
    first_passes: Ints
    """[K] Of the forward passes, those of a client's first round, after which its features are at hand."""
    kept: int
    """Bytes that stay with each client."""
    state: int
    """Bytes of the server's state after the last round."""
    total: int
    """Bytes of what the server adds up in a round."""
    held: int = 0
    """Bytes that the server holds of every reply of a round until the round is over."""
    state_per_client: float = 0.0
    """Of the state, what every further client that replies adds."""
    exact: bool = True
    """Whether the bytes depend on no value that only the run will know."""


class DryStage(StageRun, ABC):
    """A stage whose clients are drawn and charged, and never asked."""

    def _embed(self) -> None:
        """No features are needed."""

    def _give_validation(self) -> None:
        """Nothing is calibrated."""

    def _before(self) -> None:
        """Nothing changes."""

    def _source(self) -> Features:
        """As many features as there are examples, in the memory of one number."""
        return np.broadcast_to(np.float32(0), (len(self.federation.dataset.train), self.run.store.dim))

    def _states(self, slots: Any) -> RemoteStates:
        """Who has kept something, and nothing of it."""
        return RemoteStates(self.federation.n_clients, self.runtime.client_state, slots, self.begin.states)

    @cached_property
    def clock(self) -> None:
        """No time passes."""

    # --------------------------------------------------------------------------------------------------- the rounds

    def bill(self) -> Bill:
        """All rounds, charged."""
        ledger, federation, settings = self.ledger, self.federation, self.settings
        count = federation.n_clients
        setup, firsts, asked = np.zeros((3, count), np.int64)
        needs, everybody = self.costs.setup_bytes, np.ones(count, np.bool_)
        drawing = settings
        if settings.buffer:  # whoever replies first: as many as the server waits for
            drawing = settings.model_copy(update={"clients_per_round": settings.buffer, "participation": None})
        for round in range(self.rounds):
            drawn = draw(drawing, federation, self.draw_seed, round, everybody)
            if settings.secure:
                check_sum(settings, round + 1, len(drawn))
            new = ledger.last_round[drawn] < 0
            down = self._down(round, drawn)
            up, passes = self._up(round, drawn, new)
            if settings.communicates:
                ledger.bytes_down[drawn] += down
                ledger.bytes_up[drawn] += up
            ledger.bytes_down[drawn] += needs[drawn] * new
            setup[drawn] += needs[drawn] * new
            ledger.forward_passes[drawn] += passes
            firsts[drawn] += 0 if self.plan.changes_features else passes
            asked[drawn] += 1
            ledger.last_round[drawn] = round
            self._advance(round)
        for client in np.flatnonzero(asked).tolist() if self.states.shapes else ():
            self.states.accept(client)
        self.states.commit()
        kept = 4 * sum(int(np.prod(shape)) for shape in self.runtime.client_state.values())
        return Bill(settings, self.rounds, ledger, setup, asked, firsts, kept, **self._on_server(asked > 0))

    def _down(self, round: int, drawn: Ints) -> Ints:
        """Bytes [M] that the request of a round sends to each client."""
        since = self.ledger.last_round[drawn] if self.method.replays else np.full(len(drawn), -1)
        kinds, which = np.unique(np.stack([self.federation.tasks_of(drawn), since]), axis=1, return_inverse=True)
        sizes = [self._request(round, int(task), int(last)) for task, last in kinds.T]
        return np.array(sizes, np.int64)[which.ravel()]

    @abstractmethod
    def _request(self, round: int, task: int, since: int) -> int:
        """Bytes that a client of a task is sent that took part in round ``since`` last."""

    @abstractmethod
    def _up(self, round: int, drawn: Ints, new: Any) -> tuple[Ints, Ints]:
        """Bytes [M] that the reply of each client sends, and its forward passes [M]."""

    @abstractmethod
    def _on_server(self, asked: Any) -> dict[str, Any]:
        """What the server holds, under the names that a bill has for it; asked: [K] whether a client was."""

    def _advance(self, round: int) -> None:
        """The state after a round, as far as messages depend on it."""

    def _vector(self, round: int) -> int:
        """Bytes of what a client adds to a secure sum."""
        shapes = self.channel.vector_shapes(round)
        return Message({name: np.broadcast_to(np.float64(0), shape) for name, shape in shapes.items()}).nbytes


class DryTraining(DryStage):
    """A stage that trains."""

    def __init__(self, *given: Any) -> None:
        self._requests: dict[tuple[int, int], int] = {}
        self._replies: dict[tuple[int, int, int], tuple[int, int]] = {}
        super().__init__(*given)

    def leave(self, state: Any) -> None:
        """The model that it starts from, for later stages to start from."""
        self.states.finalise(self.own)
        self._save(state)

    def _advance(self, round: int) -> None:
        """The state after a round, as far as messages depend on it."""
        state, method = self.server.state, self.method
        if method.replays:
            zeros = {name: np.zeros(shape) for name, shape in method.blocks.items()}
            self.server.state = method.server_update(state, Total(zeros, dict.fromkeys(zeros, 1.0)), round)
        elif self.settings.phased and round + 1 == method.switch:  # type: ignore[attr-defined]
            self.server.state = replace(state, primed=True, inner=method.tuning.init())  # type: ignore[attr-defined]
            method.broadcast(self.server.state, round + 1, -1)  # blocks are those of what was sent last
            self._requests.clear()
            self._replies.clear()

    def _request(self, round: int, task: int, since: int) -> int:
        """A log grows; of everything else the number of the round is all that changes."""
        if self.method.replays:
            return self.method.broadcast(self.server.state, round, since, task).nbytes
        key = (task, len(str(round)))
        if key not in self._requests:
            self._requests[key] = self.method.broadcast(self.server.state, round, since, task).nbytes
        return self._requests[key]

    def _up(self, round: int, drawn: Ints, new: Any) -> tuple[Ints, Ints]:
        """By the digits of what a client says beside its update."""
        sizes = self.federation.sizes[drawn]
        passes = np.where(new, sizes, 0)
        if self.plan.changes_features:
            passes = client_passes(self.settings, self.plan, sizes)
        tasks, found = self.federation.tasks_of(drawn), []
        for task, size in zip(tasks.tolist(), sizes.tolist(), strict=True):
            key = (task, len(str(size)), len(str(self.settings.steps_for(size))))  # type: ignore[union-attr]
            if key not in self._replies:
                self._replies[key] = self._reply(round, *key)
            found.append(self._replies[key])
        up, shown = np.array(found, np.int64).reshape(-1, 2).T
        if self.settings.secure:
            up = np.full(len(drawn), self._vector(round))
        return up, passes * shown

    def _reply(self, round: int, task: int, size: int, taken: int) -> tuple[int, int]:
        """Bytes of the reply of a client whose examples and steps have so many digits; 1 where its passes show."""
        one = np.ones(1, np.int64)
        scalars = {"examples": 10 ** (size - 1) * one} | (
            {} if self.method.replays else {"steps": 10 ** (taken - 1) * one}
        )

        def kept(name: str, start: Any) -> Any:
            return np.zeros((1, *self.runtime.client_state[name]), np.float32)

        cohort = Cohort(0 * one, self._source(), one[:0], one[:0], one[:0], one > 0, kept, task)
        result = ClientResult(_zeros(self.method.expected(task)), one, scalars)
        (reply,) = self.channel.encode(result, cohort, round)  # type: ignore[arg-type]
        return int(reply.bytes_up[0]), int(reply.forward_passes[0])

    def _on_server(self, asked: Any) -> dict[str, Any]:
        """Parameters in float64; a robust mean holds all updates of a round."""
        total = 8 * sum(int(np.prod(shape)) for shape in self.method.blocks.values())
        held = total // 2 if self.settings.combine != "mean" else 0  # type: ignore[union-attr]
        clients = self.run.recipe.clients  # who is there when it is drawn, and who replies first
        known = not self.settings.buffer and (clients is None or (clients.availability == 1 and clients.trace is None))
        return {"state": pack(self.server.state).nbytes, "total": total, "held": held, "exact": known}


def client_passes(stage: Any, plan: Plan, sizes: Ints) -> Ints:
    """Forward passes [M] of a round of clients with so many examples [M], where features change; a step counts as
    three."""
    if stage.directions:
        return np.asarray(2 * stage.directions * stage.local_steps * seen_examples(stage, sizes))
    below = any(plan.trains(f"{part}.weight") for part in ("body", "module"))
    seen = np.array([batch_examples(stage, size) for size in sizes.tolist()], np.int64)
    trained = (3 if below else 1) * seen * (2 if stage.twin else 1)
    return np.asarray(trained + stage.head_passes * sizes)


def _zeros(blocks: Blocks) -> dict[str, Params]:
    """Arrays [1, …] of these names and shapes in the memory of one number each, by block."""
    found: dict[str, Params] = {}
    for name, shape in blocks.items():
        block, dot, parameter = name.partition(".")
        if not dot:
            block, at, task = name.partition("@")
            parameter = at + task
        assert array_name(block, parameter) == name
        found.setdefault(block, Params())[parameter] = np.broadcast_to(np.float32(0), (1, *shape))
    return found
