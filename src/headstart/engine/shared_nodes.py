"""Clients of a simulation that share the nodes of a Flower grid: what is sent at once travels in few messages."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from headstart.engine.flower_messages import RECORD

if TYPE_CHECKING:  # Flower takes seconds to load
    from flwr.app import ConfigRecord
    from flwr.app import Message as FlowerMessage
    from flwr.serverapp import Grid

_LARGEST = 2**25
"""Bytes of the requests in a message, beyond which there are more messages: replies are about as large."""


@dataclass(frozen=True)
class SimulatedNode:
    """What a server sees as the node of one client."""

    node_id: int
    name: str = ""
    last_activated_at: str = ""


class SharedNodes:
    """A grid as a server sees it, with a node for every client, numbered from 1, on one that has fewer.

    Requests that are pushed together are dealt to the nodes evenly, whose clients they are does not matter: what a
    simulated client keeps is in a folder that all have.
    """

    def __init__(self, grid: Grid, n_clients: int) -> None:
        self._grid = grid
        self._clients = [SimulatedNode(number + 1) for number in range(n_clients)]
        self._requests: dict[str, dict[str, FlowerMessage]] = {}
        """Of each message that is under way: the requests in it, by the number of the client's node."""

    def get_nodes(self) -> list[SimulatedNode]:
        """One for every client."""
        return self._clients

    def push_messages(self, messages: Iterable[FlowerMessage]) -> list[str]:
        """Send requests; the name of each."""
        from flwr.app import Message as FlowerMessage
        from flwr.app import RecordDict

        requests, nodes = list(messages), sorted(self._grid.get_node_ids())
        size = sum(len(part) for request in requests for part in _record(request).values() if isinstance(part, bytes))
        count = min(len(requests), max(len(nodes), -(-size // _LARGEST)))
        for start in range(count):
            packed = {str(request.metadata.dst_node_id): request for request in requests[start::count]}
            content = RecordDict({number: _record(request) for number, request in packed.items()})
            message = FlowerMessage(content, nodes[start % len(nodes)], "query")
            (name,) = self._grid.push_messages([message])
            for number, request in packed.items():
                request.content = RecordDict()  # the message has it
                request.metadata.__dict__["_message_id"] = f"{name}/{number}"  # as Flower's own grid names messages
            self._requests[name] = packed
        return [request.metadata.message_id for request in requests]

    def pull_messages(self, names: Iterable[str]) -> Iterator[FlowerMessage]:
        """The replies that have come to requests of these names, and to those in the same messages."""
        from flwr.app import Message as FlowerMessage
        from flwr.app import RecordDict

        under_way = {name.partition("/")[0] for name in names} & self._requests.keys()
        for reply in self._grid.pull_messages(under_way):
            for number, request in self._requests.pop(reply.metadata.reply_to_message_id).items():
                if reply.has_error():
                    yield FlowerMessage(reply.error, reply_to=request)
                else:
                    record = reply.content.config_records[number]
                    yield FlowerMessage(RecordDict({RECORD: record}), reply_to=request)


def reply_to_all(message: FlowerMessage, respond: Callable[[FlowerMessage, int], FlowerMessage]) -> FlowerMessage:
    """The reply to a message of `SharedNodes`; respond: to one request, and from 0, the client that it is for."""
    from flwr.app import Message as FlowerMessage
    from flwr.app import RecordDict

    replies = RecordDict()
    for number, record in message.content.config_records.items():
        request = FlowerMessage(RecordDict({RECORD: record}), reply_to=message)  # a node can make no other messages
        replies[number] = _record(respond(request, int(number) - 1))
    return FlowerMessage(replies, reply_to=message)


def _record(message: FlowerMessage) -> ConfigRecord:
    return message.content.config_records[RECORD]
