"""The server's folder of a federation whose nodes make their own keys: who is admitted, who is not, and their kits.

`federation.toml` says where the server is, `nodes.toml` who was admitted and revoked, `kits/` holds a file for every
node. No key of a node but its public ones is ever here.
"""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import tomli_w

from headstart.config.recipe import Recipe
from headstart.core.files import write_text
from headstart.deploy.folder import appearing, check_server, listen_on, write_server
from headstart.deploy.guard import app_digest, check_flower
from headstart.deploy.keys import certificate_end, write_server_certificate
from headstart.deploy.kit import Kit, PublicKeys, Request
from headstart.deploy.watch import note, now
from headstart.engine.flower_messages import package_version
from headstart.engine.server_log import ServerLog
from headstart.errors import HeadstartError
from headstart.records import NodeState

WARNING = timedelta(days=30)
"""How long before its end a certificate is spoken of."""


@dataclass(frozen=True)
class Member:
    """A node that was admitted, and when; revoked: when its keys were, or nothing."""

    keys: PublicKeys
    admitted: str
    revoked: str = ""


@dataclass(frozen=True)
class Server:
    """The folder of a server."""

    folder: Path
    host: str
    port: int

    @classmethod
    def load(cls, folder: Path) -> Server:
        """Open a folder that `headstart deploy init` made without nodes."""
        path = folder / "federation.toml"
        if not path.is_file():
            raise HeadstartError(
                f"{folder} is no server's folder: make one with `headstart deploy init {folder} RECIPE --host NAME`; "
                "one that was made with --nodes is run by its scripts"
            )
        facts = _toml(path)
        try:
            return cls(folder.absolute(), str(facts["host"]), int(facts["port"]))
        except (KeyError, TypeError, ValueError) as error:
            raise HeadstartError(f"{path}: host and port are missing or wrong: {error}") from None

    @property
    def log(self) -> ServerLog:
        """Who was admitted, what nodes were asked, and what came back."""
        return ServerLog(self.folder / "state" / "log.jsonl")

    @property
    def listen(self) -> str:
        """The address to listen on."""
        return listen_on(self.host)

    @property
    def local(self) -> str:
        """The address at which the server's own machine reaches it."""
        return self.listen if self.listen != "0.0.0.0" else "127.0.0.1"

    @property
    def members(self) -> list[Member]:
        """All that were ever admitted, in the order in which they were."""
        found = []
        for entry in _toml(self.folder / "nodes.toml").get("nodes", []):
            dates = entry.pop("admitted"), entry.pop("revoked", "")
            found.append(Member(PublicKeys(**entry), *dates))
        return found

    @property
    def admitted(self) -> list[PublicKeys]:
        """The nodes of the federation."""
        return [member.keys for member in self.members if not member.revoked]

    def save(self, members: Sequence[Member]) -> None:
        """Note who was admitted, and write a kit for everybody who is."""
        rows: list[dict[str, str]] = []
        for member in members:
            dates = {"admitted": member.admitted, **({"revoked": member.revoked} if member.revoked else {})}
            rows.append({**asdict(member.keys), **dates})
        write_text(self.folder / "nodes.toml", tomli_w.dumps({"nodes": rows}))
        kits = {kit.name: kit.to_toml() for kit in self.kits()}
        for path in self.kit_folder.glob("*.kit"):
            if path.stem not in kits:
                path.unlink()
        for name, text in kits.items():
            write_text(self.kit_folder / f"{name}.kit", text)
        self.note()

    def note(self, found: Sequence[Any] | None = None, **facts: str) -> None:
        """Tell those who watch; found: Flower's `NodeInfo` of all nodes, where the SuperLink was asked."""
        members = self.members
        nodes = [NodeState(member.keys.name, member.admitted, member.revoked) for member in members]
        infos = {info.public_key: info for info in found or []}
        known = {number: infos.get(member.keys.pem) for number, member in enumerate(members)}
        note(self.folder, (self.host, self.port), nodes, None if found is None else known, **facts)

    @property
    def kit_folder(self) -> Path:
        """Where the kits are."""
        return self.folder / "kits"

    def kits(self) -> list[Kit]:
        """A kit for every node; they differ by its name only."""
        nodes = tuple(self.admitted)
        app = app_digest(self.folder / "app")
        authority, recipe = (
            (self.folder / name).read_text(encoding="utf-8") for name in ("certificates/ca.pem", "recipe.toml")
        )
        place = self.host, self.port, app, authority, recipe
        return [Kit(node.name, package_version(), *place, nodes) for node in nodes]

    def check_kits(self) -> None:
        """Refuse to go on with kits that do not say what this folder does."""
        for kit in self.kits():
            path = self.kit_folder / f"{kit.name}.kit"
            if not path.is_file() or path.read_text(encoding="utf-8") != kit.to_toml():
                raise HeadstartError(
                    "the recipe, the certificates or headstart are not those of the kits: write new ones with "
                    f"`headstart deploy add {self.folder}`, and give every node its own"
                )

    def ends(self) -> dict[str, datetime]:
        """When the certificates end."""
        return {name: certificate_end(self.folder / "certificates" / f"{name}.pem") for name in ("ca", "server")}

    def warnings(self) -> list[str]:
        """Warnings of certificates that end soon, or have ended."""
        warnings = []
        for name, end in self.ends().items():
            if end - datetime.now(UTC) < WARNING:
                how = {
                    "server": f"make a new one with `headstart deploy renew {self.folder}`",
                    "ca": "make a new folder, and give every node its new kit",
                }[name]
                verb = "ended, and nobody can connect any more," if end < datetime.now(UTC) else "ends"
                warnings.append(f"certificates/{name}.pem {verb} on {end:%Y-%m-%d}: {how}")
        return warnings


def init_server(folder: Path, recipe: Recipe, host: str, port: int) -> None:
    """Make a server's folder, to which nodes are added; it has no key of a node."""
    check_flower()
    check_server(folder, recipe, host, port)
    with appearing(folder) as draft:
        write_server(draft, recipe, host)
        (draft / "kits").mkdir()
        (draft / "federation.toml").write_text(tomli_w.dumps({"host": host, "port": port}), encoding="utf-8")
        (draft / "nodes.toml").write_text("nodes = []\n", encoding="utf-8")
        (draft / "README.md").write_text(_README, encoding="utf-8")
        Server(draft, host, port).note()


def add(server: Server, requests: Sequence[Path]) -> list[str]:
    """Admit the nodes of requests, all or none; returns the names of those that were not admitted before."""
    members, new = server.members, list[PublicKeys]()
    for path in requests:
        request = Request.load(path)
        if request.version != package_version():
            raise HeadstartError(
                f"{path} was made with headstart {request.version}, and this is {package_version()}: install the same "
                "version on all machines, and make the request anew in a new folder"
            )
        if _admit(server, members, request.node):
            new.append(request.node)
    _note(server, "admitted", new)
    server.save(members)
    return [node.name for node in new]


def _admit(server: Server, members: list[Member], node: PublicKeys) -> bool:
    """Append a node to the members; False if it is among them already."""
    for member in members:
        known = member.keys
        if {known.key, known.signing} & {node.key, node.signing} and member.revoked:
            raise HeadstartError(
                f"{node.name}: these keys were revoked on {member.revoked[:10]}; make new ones in a new folder with "
                f"`headstart node init`, and send the new request"
            )
        if known == node:
            return False
        if known.name.lower() == node.name.lower() and not member.revoked:
            raise HeadstartError(
                f"{known.name} is admitted with other keys. If it has new ones, ask it by phone, then "
                f"`headstart deploy revoke {server.folder} {known.name}` and add the request again; if this is another "
                "node, let it choose another name"
            )
        if {known.key, known.signing} & {node.key, node.signing}:
            raise HeadstartError(f"{node.name}: the same keys are those of {known.name}; every node makes its own")
    members.append(Member(node, now()))
    return True


def revoke(server: Server, name: str) -> None:
    """The keys of a node no longer participate, and are never admitted again."""
    members = server.members
    if name not in [node.name for node in server.admitted]:
        names = ", ".join(node.name for node in server.admitted) or "nobody"
        raise HeadstartError(f"{name!r} is not admitted; admitted are: {names}")
    _note(server, "revoked", [node for node in server.admitted if node.name == name])
    server.save([replace(one, revoked=now()) if one.keys.name == name and not one.revoked else one for one in members])


def _note(server: Server, event: str, nodes: Sequence[PublicKeys]) -> None:
    """Write into the server's log what is about to become of nodes."""
    if nodes:
        server.log.append(*({"event": event, "node": node.name, "key": node.key} for node in nodes))


def renew(server: Server) -> datetime:
    """Sign a new certificate of the server by the same authority, so that no kit changes; returns when it ends."""
    write_server_certificate(server.folder / "certificates", server.host)
    server.note()
    return server.ends()["server"]


def _toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise HeadstartError(f"{path}: {error}") from None


_README = """\
# The server of a federation

| command | what it does |
|---|---|
| `headstart deploy add FOLDER NAME.request` | admits a node, and writes `kits/NAME.kit` for every node |
| `headstart server FOLDER` | runs `recipe.toml` as soon as all nodes are there; the result is in `run/` |
| `headstart deploy status FOLDER` | nodes, certificates, and whether the server listens |
| `headstart deploy revoke FOLDER NAME` | the keys of this node no longer participate |
| `headstart deploy renew FOLDER` | a new certificate of the server, by the same authority |

A node makes its keys with `headstart node init`, sends its request, gets its kit, and starts with
`headstart node run NAME.kit --data PATH`. Kits are not secret, but they say whom a node trusts: compare the fingerprint
that `deploy add` prints, over the phone. It is the same for all nodes, and changes whenever a node comes or goes.

`certificates/ca.key` signs certificates. Only `deploy renew` reads it: keep it off the network.
`certificates/server.key` and `state/` stay on this machine.
Only the port in `federation.toml` has to be reachable, and only by the nodes.
"""
