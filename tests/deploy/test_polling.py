"""How long the SuperLink keeps a request, and how long a SuperNode pauses."""

import asyncio
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("flwr")

import flwr.supernode.start_client_internal as supernode
from flwr.proto.message_pb2 import ObjectTree
from flwr.supercore.run import RunNotRunningException

from headstart.deploy import polling
from headstart.deploy.polling import Held, install

PULL, PUSH, PART = "/v1/fleet/pull-messages", "/v1/runtime/push-messages", "/v1/runtime/push-object"


class Link:
    """A SuperLink behind the middleware: notes what reaches it, with the body."""

    def __init__(self, status: int = 200) -> None:
        self.status, self.reached = status, list[tuple[str, bytes]]()
        self.held = Held(self.app)

    async def app(self, scope: Any, receive: Any, send: Any) -> None:
        body, more = b"", True
        while more:
            message = await receive()
            body, more = body + message["body"], message.get("more_body", False)
        self.reached.append((scope["path"], body))
        await send({"type": "http.response.start", "status": self.status})

    async def request(self, path: str, who: bytes = b"a", gone: asyncio.Event | None = None) -> None:
        parts = [{"type": "http.request", "body": b"1", "more_body": True}, {"type": "http.request", "body": b"2"}]

        async def receive() -> Any:
            if parts:
                return parts.pop(0)
            await (gone or asyncio.Event()).wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            pass

        headers = [(b"flwr-public-key", who)]
        await self.held({"type": "http", "path": path, "headers": headers}, receive, send)


def played(play: Callable[[Link], Awaitable[None]], status: int = 200) -> list[str]:
    """Paths in the order in which they reached the SuperLink."""
    link = Link(status)
    asyncio.run(asyncio.wait_for(play(link), 20))  # type: ignore[arg-type]
    assert all(body == b"12" for _, body in link.reached)
    return [path for path, _ in link.reached]


def test_a_request_is_kept_until_a_message_is_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(polling, "HOLD", 10.0)

    async def play(link: Link) -> None:
        await link.request(PULL)  # the first one
        second = asyncio.ensure_future(link.request(PULL))
        await asyncio.sleep(0.1)
        await link.request("/v1/fleet/push-messages")  # of another node, which is not for this one
        await asyncio.sleep(0.1)
        assert len(link.reached) == 2
        await link.request(PUSH)
        await link.request(PART)
        assert not second.done()
        await second

    assert played(play) == [PULL, "/v1/fleet/push-messages", PUSH, PART, PULL]


def test_who_has_not_asked_since_the_last_push_is_answered_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(polling, "HOLD", 10.0)

    async def play(link: Link) -> None:
        for who in (b"a", b"b"):
            await link.request(PULL, who)
        await link.request(PUSH)
        await asyncio.sleep(0.1)
        for who in (b"a", b"b", b"c"):
            await asyncio.wait_for(link.request(PULL, who), 1)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(link.request(PULL), 0.1)

    assert played(play) == [PULL, PULL, PUSH, PULL, PULL, PULL]


def test_a_request_is_answered_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(polling, "HOLD", 0.1)

    async def play(link: Link) -> None:
        for _ in range(3):
            await link.request(PULL)

    assert played(play) == [PULL] * 3


def test_a_message_is_not_given_to_a_connection_that_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(polling, "HOLD", 10.0)

    async def play(link: Link) -> None:
        await link.request(PULL)
        gone = asyncio.Event()
        second = asyncio.ensure_future(link.request(PULL, gone=gone))
        await asyncio.sleep(0.05)
        gone.set()
        await second
        await link.request(PUSH)

    assert played(play) == [PULL, PUSH]


def test_of_strangers_nothing_is_kept() -> None:
    links = []

    async def play(link: Link) -> None:
        links.append(link)
        for _ in range(3):
            await asyncio.wait_for(link.request(PULL), 1)

    assert played(play, 401) == [PULL] * 3
    assert all(not bell.known for bell in links[0].held.pulls.values())


def node_of(pull: Callable[..., int | None]) -> Any:
    """Of Flower's SuperNode, what is changed."""
    parts = {"pull_objects": lambda *_, **given: given["initial_backoff"], "_push_messages": supernode._push_messages}
    return SimpleNamespace(_pull_and_store_message=pull, **parts)


def test_a_reply_of_a_run_that_has_ended_does_not_keep_the_next_one_back() -> None:
    """Its message came while the SuperLink was away, and was ignored; what had been started for it has replied."""
    kinds = {"message_type": "query", "group_id": "", "reply_to_message_id": "message"}
    late, reply = (
        SimpleNamespace(metadata=SimpleNamespace(run_id=run, message_id=str(run), **kinds)) for run in (1, 2)
    )
    store, deleted, sent = [[late], [], [reply]], list[str](), list[int]()

    def send(message: Any, *_: Any) -> tuple[set[str], str]:
        if message is late:
            raise RunNotRunningException
        sent.append(message.metadata.run_id)
        return set(), ""

    state = SimpleNamespace(
        get_messages_legacy=lambda **_: store.pop(0),
        get_message_processing_duration=lambda message_id: 0.1,
        delete_messages=lambda message_ids: deleted.extend(message_ids),
    )
    objects = SimpleNamespace(get_object_tree=lambda _: ObjectTree(), delete=lambda _: None)
    node = node_of(lambda **_: 2)
    install(node)
    node._pull_and_store_message()
    node._push_messages(state=state, object_store=objects, send=send, push_object=lambda *_: None)
    assert (sent, store) == ([2], [])
    assert deleted == ["1", "message", "2", "message"]


def test_a_supernode_pauses_for_a_twentieth_of_the_time_without_work(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, slept, found, held = [100.0], list[float](), [False], [0.0]

    def pull(**_: Any) -> int | None:
        clock[0] += held[0]
        return 1 if found[0] else None

    monkeypatch.setattr(polling, "time", SimpleNamespace(monotonic=lambda: clock[0], sleep=slept.append))
    node = node_of(pull)
    install(node)
    assert node.pull_objects([]) == polling.BACKOFF
    for seconds, expected in ((0.0, 0.1), (1.0, 0.1), (10.0, 0.55), (100.0, 3.0)):
        clock[0] += seconds
        node._pull_and_store_message()
        node.time.sleep(3)
        assert slept.pop() == pytest.approx(expected)
    held[0] = 3.0  # by the SuperLink, in the node's place
    node._pull_and_store_message()
    node.time.sleep(3)
    assert slept.pop() == 0
    found[0] = True  # then a reply is waited for
    node._pull_and_store_message()
    node.time.sleep(0.5)
    assert slept.pop() == pytest.approx(0.5 / 30)
    clock[0] += 4
    node.time.sleep(0.5)
    assert slept.pop() == pytest.approx(0.2)
    found[0], held[0] = False, 0.0  # it has been sent
    node._pull_and_store_message()
    node.time.sleep(3)
    assert slept.pop() == pytest.approx(0.1)
