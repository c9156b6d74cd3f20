"""A stage on a bench: its method and its channel, the server's half and the clients', without a run around them."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import numpy as np

from headstart.channel.channel import channel_of
from headstart.core.ledger import Ledger
from headstart.core.message import Message
from headstart.core.plan import Plan
from headstart.core.reply import Reply
from headstart.core.state import pack, unpack
from headstart.data import Federation
from headstart.engine.client import ClientRuntime, sender_of
from headstart.engine.client_states import ClientStates
from headstart.engine.local import LocalClients, shared_examples
from headstart.engine.round import AfterRound, Costs, play_rounds
from headstart.engine.server import Server
from headstart.heads import LinearHead
from headstart.methods import Population, StageContext, Task, build
from headstart.solvers.cohort import Cohort

if TYPE_CHECKING:  # benchmarks of memory use these, too
    import pytest

    from headstart.channel.secure import Identity


def context_of(
    stage: Any,
    n_classes: int,
    dim: int,
    seed: tuple[int, ...] = (0, 0),
    clients: int = 1,
    examples: int = 1,
    head: LinearHead | None = None,
    tasks: tuple[Task, ...] = (),
    plan: Plan | None = None,
    backbone: Any = None,
    module: Any = None,
    **more: Any,
) -> StageContext:
    """The context of a stage with one task of so many classes, or with these tasks."""
    tasks = tasks or (Task("default", n_classes, Population(clients, examples), head),)
    if backbone is not None:
        from headstart.modules import LocalModel

        more["model"] = LocalModel(backbone, *([module] if module else []))
    return StageContext(tasks, dim, seed, plan or stage.plan, **more)


class Bench:
    """The method and the channel of a stage, and what a server and clients do with them, step by step."""

    def __init__(self, stage: Any, context: StageContext) -> None:
        self.stage, self.context = stage, context
        self.method: Any = build(stage, context)
        clients = {task.name: task.population.clients for task in context.tasks}
        self.channel: Any = channel_of(stage, self.method, context.seed, clients, context.noise_seed)
        self.runtime = ClientRuntime(self.method, self.channel)

    def init(self) -> Any:
        """The state before the first round."""
        return self.method.init()

    def broadcast(self, state: Any, round: int = 0, since: int = -1, task: int = 0) -> Message:
        """What a client is sent."""
        message: Message = self.method.broadcast(state, round, since, task)
        return message

    def answer(self, cohort: Cohort, message: Message) -> list[Reply]:
        """What the clients of a cohort say."""
        return self.runtime.answer(cohort, message)

    def add(self, total: Any, state: Any, reply: Reply, round: int = 0) -> None:
        """Add a reply to a total as the server does; `MessageError` where it does not count."""
        message = self.broadcast(state, round, task=reply.task)
        sender = sender_of(self.method, int(reply.clients[0]), round, reply.task, message)
        self.channel.add(total, reply, sender)

    def total(self, state: Any, replies: Iterable[Reply], round: int = 0) -> Any:
        """What the replies of a round add up to."""
        total = self.channel.total()
        for reply in replies:
            self.add(total, state, reply, round)
        return total

    def after(self, state: Any, replies: Iterable[Reply], round: int = 0) -> Any:
        """The state after a round with these replies."""
        total = self.channel.finish(self.total(state, replies, round), round)
        return self.method.server_update(state, total, round)

    def head(self, state: Any, task: int = 0, own: Any = None) -> LinearHead:
        """The head of a state, once its model is loaded."""
        head: LinearHead = self.method.load(self.method.model(state, task), task, own)
        return head

    def saved(self, state: Any) -> Any:
        """The state as it comes out of a checkpoint."""
        return unpack(self.method.state_type, Message.from_bytes(pack(state).to_bytes()))


def cohort_of(
    bench: Bench, client: int, source: Any, rows: np.ndarray, labels: np.ndarray, *, new: bool = True, task: int = 0
) -> Cohort:
    """A client by itself, with these examples, that has kept nothing yet."""

    def nothing(name: str, start: np.ndarray | None) -> np.ndarray:
        return np.zeros((1, *bench.runtime.client_state[name]), np.float32) + (0 if start is None else start)

    owners = np.full(len(rows), client)
    return Cohort(np.array([client]), source, rows, labels, owners, np.array([new]), nothing, task)


def drawing(patch: pytest.MonkeyPatch, *rounds: Iterable[int]) -> None:
    """Rounds ask these clients, over and over, as far as there are so many."""

    def draw(stage: Any, federation: Federation, seed: Any, round: int, available: Any) -> np.ndarray:
        return np.array([client for client in rounds[round % len(rounds)] if client < federation.n_clients], np.int64)

    patch.setattr("headstart.engine.round.draw", draw)


def round_trip(message: Message) -> Message:
    """A message as it comes out of its bytes."""
    return Message.from_bytes(message.to_bytes())


def play(
    bench: Bench,
    federation: Federation,
    source: Any,
    ledger: Ledger,
    states: ClientStates,
    after_round: AfterRound = lambda *_: None,
    *,
    state: Any = None,
    first_round: int = 0,
    setup_bytes: np.ndarray | None = None,
) -> Any:
    """Play the rounds of a stage with clients in this process; the state after them."""
    stage, seed = bench.stage, bench.context.seed
    server = Server(stage, bench.method, bench.channel, federation, bench.init() if state is None else state)
    if stage.share:
        server.data = shared_examples(stage.share, federation, source, seed)
    clients = LocalClients(bench.runtime, federation, source, states)
    needs = np.zeros(federation.n_clients, np.int64) if setup_bytes is None else setup_bytes
    play_rounds(server, clients, Costs(ledger, needs, stage.communicates), seed, after_round, first_round)
    return server.state


def played_on(
    bench: Bench, federation: Federation, ledger: Ledger, after_round: AfterRound = lambda *_: None, **keys: Any
) -> tuple[Any, dict[str, np.ndarray]]:
    """The state after a stage on features, and what is each client's own [K, …] then."""
    features = federation.dataset.train.features()
    with TemporaryDirectory() as folder:
        states = ClientStates(Path(folder), federation.n_clients, bench.runtime.client_state)
        for client, kept in keys.pop("kept", []):
            states.write(client, kept)
        states.commit()
        state = play(bench, federation, features, ledger, states, after_round, **keys)
        own = bench.method.personal_params(partial(states.read, clients=np.arange(federation.n_clients)))
    return state, own


def identities(count: int) -> list[Identity]:
    """Clients with long-term keys, each knowing the public keys of all."""
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    from headstart.channel.secure import Identity

    keys = [Ed25519PrivateKey.from_private_bytes(bytes([number]) * 32) for number in range(count)]
    peers = {number: key.public_key().public_bytes_raw() for number, key in enumerate(keys)}
    return [Identity(number, key, peers) for number, key in enumerate(keys)]
