"""What a client does in a round: the same in this process and on a node."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from headstart.channel.channel import Channel
from headstart.core.message import Message
from headstart.core.params import norm
from headstart.core.reply import Reply, Sender
from headstart.core.statistics import Floats
from headstart.core.update import Blocks
from headstart.methods import Method
from headstart.solvers.cohort import Cohort


@dataclass(frozen=True, eq=False)
class ClientRuntime:
    """Receive, update, encode."""

    method: Method[Any]
    channel: Channel

    @property
    def memory_per_client(self) -> int:
        """Bytes that one more client of a cohort takes, beyond its features."""
        return max(self.method.memory_per_client, self.channel.memory_per_client)

    @property
    def client_state(self) -> Blocks:
        """Names and shapes of what stays with a client from one of its rounds to the next."""
        return {**self.method.client_state, **self.channel.client_state}

    def answer(self, cohort: Cohort, message: Message) -> list[Reply]:
        """What the clients of a cohort say to a message, and what stays with them."""
        received = self.method.receive(cohort, message)
        result = self.method.client_update(self.channel.prepare(cohort, received.round), received)
        return self.channel.encode(result, cohort, received.round)  # type: ignore[arg-type]

    def vector(self, reply: Reply, message: Message) -> Mapping[str, Floats]:
        """The answer of one client to a message, as what a secure sum adds."""
        client, round = int(reply.clients[0]), int(message.scalars["round"])
        return self.channel.vector(reply, sender_of(self.method, client, round, reply.task, message))


def sender_of(method: Method[Any], client: int, round: int, task: int, message: Message) -> Sender:
    """What is known of the sender of an update, from the message that it answers."""
    return Sender(client, round, task, method.expected(task), model_norm(message))


def model_norm(message: Message) -> float:
    """The norm of the model in a message, of whichever tasks."""
    return norm({name: array for name, array in message.arrays.items() if name.startswith("model.")})
