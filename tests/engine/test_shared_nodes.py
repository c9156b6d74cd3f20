"""Clients of a simulation that share nodes: few messages, and every request has its own reply."""

from collections.abc import Iterable

import pytest

pytest.importorskip("flwr")

from flwr.app import ConfigRecord, Error, Message, RecordDict
from flwr.supercore.task_identity import TaskIdentity

from headstart.engine import shared_nodes
from headstart.engine.flower_messages import RECORD, facts_of, reply_to
from headstart.engine.shared_nodes import SharedNodes, reply_to_all


class TwoNodes:
    """A grid of two nodes that reply as those of a simulation, the second one with an error where it is broken."""

    def __init__(self, broken: bool = False) -> None:
        self.broken, self.received, self.replies = broken, list[tuple[int, list[str]]](), dict[str, Message]()

    def get_node_ids(self) -> list[int]:
        return [70, 71]

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        names = list[str]()
        for message in messages:
            node, names = message.metadata.dst_node_id, [*names, f"m{len(self.received)}"]
            message.metadata.__dict__["_message_id"] = names[-1]
            self.received.append((node, list(message.content.config_records)))
            failed = self.broken and node == 71
            self.replies[names[-1]] = (
                Message(Error(0, "killed"), reply_to=message) if failed else reply_to_all(message, echo)
            )
        return names

    def pull_messages(self, names: Iterable[str]) -> list[Message]:
        return [self.replies.pop(name) for name in names if name in self.replies]


def echo(request: Message, client: int) -> Message:
    """A reply that holds what it was asked, and as whom."""
    facts, parts = facts_of(request)
    return reply_to(request, {"client": client, "asked": facts}, parts)


@pytest.fixture(autouse=True)
def _identity(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_task_id", "_run_id", "_node_id"):  # as Flower sets them in its own processes
        monkeypatch.setattr(TaskIdentity, name, 1)


def requests(clients: Iterable[int]) -> list[Message]:
    """To the nodes of these clients, each with a part of its own."""

    def record(client: int) -> ConfigRecord:
        return ConfigRecord({"facts": f'{{"of": {client}}}', "part": bytes([client]) * 10})

    return [Message(RecordDict({RECORD: record(client)}), client, "query") for client in clients]


def test_requests_travel_in_a_message_per_node_and_replies_find_their_way() -> None:
    grid = TwoNodes()
    shared = SharedNodes(grid, 100)  # type: ignore[arg-type]
    assert [node.node_id for node in shared.get_nodes()] == list(range(1, 101))
    clients = [5, 90, 17, 2, 44]
    names = shared.push_messages(requests(clients))
    assert grid.received == [(70, ["5", "17", "44"]), (71, ["90", "2"])]
    replies = {reply.metadata.reply_to_message_id: facts_of(reply) for reply in shared.pull_messages(names)}
    for name, client in zip(names, clients, strict=True):
        assert replies[name] == ({"client": client - 1, "asked": {"of": client}}, {"part": bytes([client]) * 10})
    assert not list(shared.pull_messages(names))


def test_large_requests_travel_in_more_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_nodes, "_LARGEST", 25)
    grid = TwoNodes()
    names = SharedNodes(grid, 9).push_messages(requests(range(1, 8)))  # type: ignore[arg-type]
    assert [node for node, _ in grid.received] == [70, 71, 70]  # 70 bytes, 25 each
    assert sorted(len(packed) for _, packed in grid.received) == [2, 2, 3]
    assert len(set(names)) == 7


def test_an_error_of_a_message_is_that_of_every_request_in_it() -> None:
    shared = SharedNodes(TwoNodes(broken=True), 4)  # type: ignore[arg-type]
    names = shared.push_messages(requests([1, 2, 3, 4]))
    replies = {reply.metadata.reply_to_message_id: reply for reply in shared.pull_messages(names)}
    assert [replies[name].has_error() for name in names] == [False, True, False, True]
    assert replies[names[1]].error.reason == "killed"
