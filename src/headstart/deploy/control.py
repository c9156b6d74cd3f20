"""Flower's Control API of a SuperLink, asked from its own machine: nodes, runs and their logs."""

from __future__ import annotations

import hashlib
import socket
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from headstart.deploy.admit import Server
from headstart.deploy.kit import PublicKeys
from headstart.errors import HeadstartError, first_line


def listens(server: Server) -> bool:
    """Whether somebody listens at the server's port."""
    with socket.socket() as one:
        one.settimeout(2)
        return one.connect_ex((server.local, server.port)) == 0


class ControlError(Exception):
    """The SuperLink did not answer, or refused."""


class Control:
    """A SuperLink as its own machine reaches it."""

    def __init__(self, client: Any) -> None:
        """client: Flower's `ControlHttpClient`."""
        self.client = client

    @classmethod
    @contextmanager
    def of(cls, server: Server) -> Iterator[Control]:
        """The SuperLink of a folder; its certificate is checked by the folder's authority."""
        from flwr.supercore.control import ControlHttpClient
        from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor

        authority = (server.folder / "certificates" / "ca.pem").read_bytes()
        version = RuntimeVersionHttpInterceptor(component_name="flwr CLI")
        address = f"{server.local}:{server.port}"
        client = ControlHttpClient.from_server_address(address, False, authority, [version])
        try:
            yield cls(client)
        finally:
            client.close()

    def nodes(self) -> list[Any]:
        """Flower's `NodeInfo` of all nodes that were ever registered."""
        from flwr.proto.control_pb2 import ListNodesRequest

        with _answered():
            return list(self.client.ListNodes(ListNodesRequest()).nodes_info)

    def admit(self, nodes: Sequence[PublicKeys]) -> None:
        """Register the nodes that are not yet, under their names, and unregister all others."""
        from flwr.proto.control_pb2 import RegisterNodeRequest, UnregisterNodeRequest

        wanted = {node.pem: node.name for node in nodes}
        found = self.nodes()
        for node in found:
            if node.status != "unregistered" and wanted.get(node.public_key) != node.name:
                with self._unless(partial(_is_gone, node.node_id)), _answered():
                    self.client.UnregisterNode(UnregisterNodeRequest(node_id=node.node_id))
        known = {node.public_key for node in found}
        for key, name in wanted.items():
            if key not in known:
                with self._unless(partial(_is_known, key)), _answered():
                    self.client.RegisterNode(RegisterNodeRequest(public_key=key, name=name))

    @contextmanager
    def _unless(self, done: Callable[[list[Any]], bool]) -> Iterator[None]:
        """What is refused is no error where another process has done it meanwhile: a server and `headstart deploy
        revoke` may admit at the same moment."""
        try:
            yield
        except ControlError:
            if not done(self.nodes()):
                raise

    def start(self, app: Path, values: Mapping[str, str]) -> int:
        """Start a run of an app; returns its number."""
        from flwr.cli.build import build_fab_from_disk
        from flwr.common.serde import fab_to_proto, user_config_to_proto
        from flwr.proto.control_pb2 import StartRunRequest
        from flwr.supercore.fab import Fab

        content = build_fab_from_disk(app)
        fab = fab_to_proto(Fab(hashlib.sha256(content).hexdigest(), content, {}))
        request = StartRunRequest(fab=fab, override_config=user_config_to_proto(dict(values)))
        with _answered():
            reply = self.client.StartRun(request)
        if not reply.HasField("run_id"):
            raise ControlError("the SuperLink did not start the run")
        return int(reply.run_id)

    def runs(self) -> dict[int, tuple[str, str, str]]:
        """Status, how it ended, and details of every run, by its number."""
        from flwr.proto.control_pb2 import ListRunsRequest

        with _answered():
            found = self.client.ListRuns(ListRunsRequest()).run_dict
        return {run: (one.status.status, one.status.sub_status, one.status.details) for run, one in found.items()}

    def log(self, run: int) -> Iterator[str]:
        """What the ServerApp of a run prints, from its start until its end."""
        from flwr.proto.control_pb2 import StreamLogsRequest

        with _answered():
            for part in self.client.StreamLogs(StreamLogsRequest(run_id=run, after_timestamp=0.0)):
                yield part.log_output


def _is_gone(number: int, nodes: Iterable[Any]) -> bool:
    return all(node.node_id != number or node.status == "unregistered" for node in nodes)


def _is_known(key: bytes, nodes: Iterable[Any]) -> bool:
    return any(node.public_key == key for node in nodes)


@contextmanager
def _answered() -> Iterator[None]:
    import httpx

    try:
        yield
    except httpx.HTTPStatusError as error:
        raise ControlError(f"the SuperLink refused: {error.response.text[:500]}") from None
    except httpx.HTTPError as error:
        if "CERTIFICATE_VERIFY_FAILED" in str(error):
            raise ControlError(
                f"who answers at the port is not this server, or its certificate has ended: {first_line(error)}; "
                "another federation on this machine needs another port, `headstart deploy init --port`"
            ) from None
        raise ControlError(f"the SuperLink does not answer: {first_line(error)}") from None


def admit_at(server: Server) -> bool:
    """Tell a SuperLink that runs who is admitted; False where none runs."""
    if not listens(server):
        return False
    try:
        with Control.of(server) as control:
            control.admit(server.admitted)
    except ControlError as error:
        raise HeadstartError(f"{server.folder} is changed, but its SuperLink does not know: {error}") from None
    return True


def main(folder: str, host: str, port: str) -> None:
    """Admit the nodes whose public keys are in a folder's keys/, and nobody else, as its run.sh does."""
    server = Server(Path(folder), host, int(port))
    keys = sorted((server.folder / "keys").glob("*.pub"))
    try:
        with Control.of(server) as control:
            control.admit([PublicKeys(key.stem, key.read_text(), "") for key in keys])
    except (ControlError, ValueError) as error:
        raise SystemExit(f"headstart: {error}") from None


if __name__ == "__main__":
    main(*sys.argv[1:])
