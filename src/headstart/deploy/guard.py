"""Flower's SuperLink and SuperNode, started so that reaching the SuperLink's port is not enough to run code.

Flower 1.41 serves three APIs on one port. Fleet requests are signed with a node's key. Control (start a run, admit a
key) and Runtime (of the ServerApp) ask nobody who they are, and a node executes whatever app a run brings. Here the
SuperLink answers the last two on the loopback address only, and a node executes only apps whose SHA-256 it was given:

    python -m headstart.deploy.guard superlink [arguments of flower-superlink]
    python -m headstart.deploy.guard supernode SHA256[,SHA256] [arguments of flower-supernode]
"""

from __future__ import annotations

import atexit
import hashlib
import importlib.metadata
import ipaddress
import os
import re
import sys
import traceback
from collections.abc import Callable, Sequence
from logging import ERROR
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headstart.deploy import polling, renewal, warm
from headstart.errors import HeadstartError

if TYPE_CHECKING:
    from flwr.supercore.fab import Fab
    from starlette.types import ASGIApp, Receive, Scope, Send

FLOWER = ("1.41.0",)
"""Tested versions, by `tests/deploy/test_deployment.py`: what is changed here is not Flower's public interface."""
GUARDED, LOG = "HEADSTART_GUARDED", "HEADSTART_LOG"
"""Environment variables that tell the apps what started them, and the ServerApp where the server's log is."""


def check_flower() -> None:
    """Refuse versions of Flower that were not tested with this module."""
    try:
        version = importlib.metadata.version("flwr")
    except importlib.metadata.PackageNotFoundError:
        raise HeadstartError("Flower is missing; install it with: pip install 'headstart[federation]'") from None
    if version not in FLOWER:
        raise HeadstartError(
            f"Flower {version} is installed; who can start a run was tested with {', '.join(FLOWER)} only: "
            f"pip install 'flwr[simulation]=={FLOWER[-1]}'"
        )


def check_guarded(part: str) -> None:
    """Refuse to run an app whose SuperLink or SuperNode (``part``) was started without this module."""
    if os.environ.get(GUARDED) != part:
        raise HeadstartError(
            f"flower-{part} was started without headstart's checks, so that others can run code on this machine: "
            "stop it, make a new folder with `headstart deploy init`, and start the scripts there"
        )


def app_digest(app: Path) -> str:
    """SHA-256 of the bundle that `flwr run` makes of the folder ``app``, which Flower calls the FAB hash."""
    from flwr.cli.build import build_fab_from_disk

    return hashlib.sha256(build_fab_from_disk(app)).hexdigest()


class LocalOnly:
    """ASGI middleware: a peer on another machine reaches the Fleet API, and nothing else."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or answer 403."""
        # `path` is what the router goes by; a URL would be put together from the Host header.
        if scope["type"] == "lifespan" or scope["path"].startswith("/v1/fleet/") or _local(scope["client"]):
            await self.app(scope, receive, send)
        elif scope["type"] == "http":
            headers = [(b"content-type", b"application/json")]
            await send({"type": "http.response.start", "status": 403, "headers": headers})
            body = b'{"detail": "Only the SuperLink\'s own machine may ask this, at 127.0.0.1."}'
            await send({"type": "http.response.body", "body": body})


def _local(client: tuple[str, int] | None) -> bool:
    try:
        return client is not None and ipaddress.ip_address(client[0]).is_loopback
    except ValueError:
        return False


def superlink(arguments: Sequence[str]) -> None:
    """Run `flower-superlink` with Control and Runtime API on the loopback address only."""
    from flwr.superlink import extensions
    from flwr.superlink.cli.flower_superlink import _parse_args_run_superlink, flower_superlink
    from starlette.middleware import Middleware

    given = _parse_args_run_superlink().parse_args(arguments)
    host = given.host
    # Flower reaches its own Runtime API at the address it listens on, and for all interfaces at the loopback address.
    if host not in ("0.0.0.0", "::") and not _local((host, 0)):
        raise HeadstartError(f"--host {host}: must be 0.0.0.0 (all interfaces) or 127.0.0.1 (this machine only)")
    # A header may say that a local request was forwarded from elsewhere, never that another machine is this one.
    os.environ["FORWARDED_ALLOW_IPS"] = "127.0.0.1"
    for name in ("FLWR_INTERNAL_GRPC_CONTROL_API", "FLWR_INTERNAL_GRPC_FLEET_API"):  # ports of their own
        os.environ.pop(name, None)
    os.environ[LOG] = str(Path(given.database).absolute().with_name("log.jsonl"))
    others = extensions.get_middleware
    renewal.install()
    extensions.get_middleware = lambda: (Middleware(LocalOnly), Middleware(polling.Held), *others())
    _run("superlink", flower_superlink, arguments)


def supernode(apps: str, arguments: Sequence[str]) -> None:
    """Run `flower-supernode` with apps of these digests only: others are refused before they are stored or unpacked."""
    if not re.fullmatch(r"[0-9a-f]{64}(,[0-9a-f]{64})*", apps):
        raise HeadstartError(
            f"app {apps!r}: must be the SHA-256 of headstart's app, as `headstart deploy init` wrote it"
        )

    import flwr.supernode.start_client_internal as node
    from flwr.common.config import parse_config_args
    from flwr.supercore import log
    from flwr.supernode.cli.flower_supernode import _parse_args_run_supernode, flower_supernode

    pull = node._pull_and_store_message

    def pull_verified(*_: Any, **given: Any) -> int | None:
        def get_fab(fab_hash: str, run_id: int) -> Fab:
            fab: Fab = given["get_fab"](fab_hash, run_id)
            fab.verifications = {"valid_license": "by digest"}  # without it Flower does not ask `verify`
            return fab

        return pull(**{**given, "get_fab": get_fab, "trusted_entities": {"digests": apps}})

    def verify(fab: Fab, trusted_entities: dict[str, str]) -> bool:
        digest = hashlib.sha256(fab.content).hexdigest()
        if digest not in apps.split(","):
            log(ERROR, "Refused: the app of this run has SHA-256 %s; this node executes only %s.", digest, apps)
            return False
        return True

    node._pull_and_store_message = pull_verified
    node._verify_fab = verify
    polling.install(node)
    config = _parse_args_run_supernode().parse_args(arguments).node_config
    os.environ[warm.RECIPE] = str(parse_config_args([config] if config else None).get("recipe", ""))
    _run("supernode", flower_supernode, arguments)


def _run(part: str, command: Callable[[], None], arguments: Sequence[str]) -> None:
    os.environ[GUARDED] = part
    sys.argv = [f"flower-{part}", *arguments]
    command()


def main() -> None:
    """Start one of the two; a mistake is one sentence and exit status 2."""
    try:
        check_flower()
        match sys.argv[1:]:
            case ["superlink", *arguments]:
                superlink(arguments)
            case ["supernode", apps, *arguments]:
                supernode(apps, arguments)
            case _:
                raise HeadstartError(
                    "python -m headstart.deploy.guard: superlink or supernode SHA256, then Flower's arguments"
                )
    except HeadstartError as error:
        print(f"headstart: {error}", file=sys.stderr)
        raise SystemExit(2) from None


def leave(command: Callable[[], None]) -> None:
    """Run a command and end the process with it, whatever threads there are: one of a SuperNode's may try for ever to
    reach a SuperLink whose certificate has ended, and nobody would start the SuperNode anew."""
    status = 0
    try:
        command()
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        status = 1
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    leave(main)
