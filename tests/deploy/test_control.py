"""Nodes that two processes register and unregister at the same moment."""

from types import SimpleNamespace
from typing import Any

import httpx
import pytest

pytest.importorskip("flwr")

from headstart.deploy.control import Control, ControlError


class SuperLink:
    """Flower's client of a SuperLink at which another process is a moment ahead, or which refuses for good."""

    def __init__(self, ahead: bool, *nodes: tuple[bytes, str]) -> None:
        self.ahead = ahead
        self.found = [
            SimpleNamespace(node_id=number, public_key=key, name=name, status="online")
            for number, (key, name) in enumerate(nodes)
        ]

    def ListNodes(self, request: Any) -> Any:
        return SimpleNamespace(nodes_info=[SimpleNamespace(**vars(node)) for node in self.found])

    def UnregisterNode(self, request: Any) -> None:
        if self.ahead:
            self.found[request.node_id].status = "unregistered"
        self._refuse("Node ID not found for account.")

    def RegisterNode(self, request: Any) -> None:
        if self.ahead:
            node = {"node_id": len(self.found), "public_key": request.public_key, "name": request.name}
            self.found.append(SimpleNamespace(**node, status="registered"))
        self._refuse("Public key already in use.")

    def _refuse(self, why: str) -> None:
        request = httpx.Request("POST", "https://127.0.0.1")
        raise httpx.HTTPStatusError(why, request=request, response=httpx.Response(400, text=why, request=request))


@pytest.mark.parametrize(
    ("there", "wanted"), [([(b"c", "c")], []), ([], [(b"a", "a")])], ids=["unregister", "register"]
)
def test_what_another_process_has_done_meanwhile_is_no_error(
    there: list[tuple[bytes, str]], wanted: list[tuple[bytes, str]]
) -> None:
    nodes: Any = [SimpleNamespace(pem=key, name=name) for key, name in wanted]
    Control(SuperLink(True, *there)).admit(nodes)
    with pytest.raises(ControlError, match="the SuperLink refused"):
        Control(SuperLink(False, *there)).admit(nodes)
