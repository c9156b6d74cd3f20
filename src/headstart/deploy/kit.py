"""What travels between a server and its nodes before a federation: a node's request, and the kit it gets for it.

A node makes its keys on its own machine. Its request holds the public halves, and is all that leaves. The kit holds
what a node has to know of the federation. Nothing in either is secret, but a kit decides whom a node trusts: its
fingerprint is compared over a way on which the server has no hand.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import tomli_w
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    PublicFormat,
    load_ssh_private_key,
    load_ssh_public_key,
)

from headstart.core.files import sync_folder, write_text
from headstart.deploy.keys import public_line, write_pair
from headstart.engine.flower_messages import package_version
from headstart.errors import HeadstartError

LARGEST = 1 << 22
"""Bytes of a request or a kit; a larger file is not read."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9-]{0,62}")
_KINDS = {"key": ec.EllipticCurvePublicKey, "signing": Ed25519PublicKey}


def check_name(name: str) -> None:
    """Refuse a name that is no name of a node."""
    if not _NAME.fullmatch(name):
        raise HeadstartError(
            f"node {name!r}: a name is made of letters, digits and dashes, starts with a letter or digit, "
            "and has at most 63 characters"
        )


@dataclass(frozen=True)
class PublicKeys:
    """A node's name and public keys, as OpenSSH writes them: P-384 for the server, Ed25519 for the other nodes."""

    name: str
    key: str
    signing: str

    @property
    def pem(self) -> bytes:
        """The key for the server as Flower keeps it."""
        return load_ssh_public_key(self.key.encode()).public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)

    def check(self) -> None:
        """Refuse names and keys that are none."""
        check_name(self.name)
        for field, kind in _KINDS.items():
            text = getattr(self, field)
            try:
                key = load_ssh_public_key(text.encode())
            except (ValueError, UnsupportedAlgorithm):
                key = None
            curve = getattr(getattr(key, "curve", None), "name", "secp384r1")
            # One spelling of a key: two requests with the same keys are the same text.
            if not isinstance(key, kind) or curve != "secp384r1" or public_line(key) != text:
                raise HeadstartError(f"{self.name}: {field} is no such public key as `headstart node init` makes")


@dataclass(frozen=True)
class Request:
    """What a node sends to the server in order to be admitted."""

    version: str
    node: PublicKeys

    def to_toml(self) -> str:
        """The text of the file."""
        return tomli_w.dumps({"headstart": self.version, **asdict(self.node)})

    @classmethod
    def load(cls, path: Path) -> Request:
        """Read and check a request."""
        facts = _read(path, ("headstart", "name", "key", "signing"), "request")
        node = PublicKeys(str(facts["name"]), str(facts["key"]), str(facts["signing"]))
        node.check()
        return cls(str(facts["headstart"]), node)


@dataclass(frozen=True)
class Kit:
    """What a node has to know of its federation."""

    name: str
    version: str
    host: str
    port: int
    app: str
    """SHA-256 of the one app that the node executes."""
    authority: str
    """The certificate that the server's is checked with."""
    recipe: str
    nodes: tuple[PublicKeys, ...]
    """All nodes, in the order of the server's list."""

    def to_toml(self) -> str:
        """The text of the file."""
        facts = {**asdict(self), "nodes": [asdict(node) for node in self.nodes]}
        return tomli_w.dumps({"headstart": facts.pop("version"), **facts}, multiline_strings=True)

    def fingerprint(self) -> str:
        """24 letters and digits, the same for all nodes of a federation.

        They stand for 120 bits of a hash that takes time: a server that looks for two kits with one fingerprint has to
        compute some 2^60 of them.
        """
        facts = asdict(self)
        del facts["name"]
        text = json.dumps(facts, sort_keys=True).encode()
        digest = hashlib.scrypt(hashlib.sha256(text).digest(), salt=b"headstart kit", n=1 << 14, r=8, p=1, dklen=15)
        letters = base64.b32encode(digest).decode()
        return "-".join(letters[place : place + 4] for place in range(0, 24, 4))

    @property
    def own(self) -> PublicKeys:
        """The keys of the node that the kit is for."""
        return next(node for node in self.nodes if node.name == self.name)

    @property
    def peers(self) -> str:
        """The list of keys for secure sums, as `Identity.load` reads it."""
        return "".join(f"{node.name} {node.signing}\n" for node in self.nodes)

    @classmethod
    def load(cls, path: Path) -> Kit:
        """Read and check a kit."""
        fields = ("headstart", "name", "host", "port", "app", "authority", "recipe", "nodes")
        facts = _read(path, fields, "kit")
        version, found = str(facts["headstart"]), facts["nodes"]
        try:
            nodes = tuple(PublicKeys(**{key: str(value) for key, value in node.items()}) for node in found)
            app, authority, recipe = (str(facts[name]) for name in ("app", "authority", "recipe"))
            address = str(facts["host"]), int(facts["port"])
            kit = cls(str(facts["name"]), version, *address, app, authority, recipe, nodes)
        except (AttributeError, TypeError, ValueError):
            raise HeadstartError(f"{path} is no kit as `headstart deploy add` writes it") from None
        for node in nodes:
            node.check()
        if kit.name not in [node.name for node in nodes]:
            raise HeadstartError(f"{path} is for {kit.name!r}, which is not among its nodes")
        return kit


def _read(path: Path, fields: Sequence[str], what: str) -> Mapping[str, Any]:
    """The values of a file that somebody else wrote."""
    try:
        with path.open("rb") as file:
            text = file.read(LARGEST + 1)
        if len(text) > LARGEST:
            raise ValueError(f"it is larger than {LARGEST} bytes")
        facts = tomllib.loads(text.decode("utf-8"))
    except OSError as error:
        raise HeadstartError(f"cannot read {path}: {error.strerror or error}") from None
    except ValueError as error:
        raise HeadstartError(f"{path} is no {what}: {error}") from None
    if missing := [name for name in fields if name not in facts]:
        raise HeadstartError(f"{path} is no {what}: it has no {', '.join(missing)}")
    return facts


# ----------------------------------------------------------------------------------------------------- a node's folder


def init_node(folder: Path, name: str) -> Path:
    """Make the private keys of a node, its limits, and the request, whose path is returned."""
    check_name(name)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise HeadstartError(f"{folder} is in use: name a folder that is empty or does not exist yet")
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o700)
    path = folder / f"{name}.request"
    try:
        key = write_pair(folder / "key", ec.generate_private_key(ec.SECP384R1())).strip()
        signing = write_pair(folder / "signing", Ed25519PrivateKey.generate()).strip()
        write_text(folder / "node.toml", LIMITS)
        sync_folder(folder.parent)
        write_text(path, Request(package_version(), PublicKeys(name, key, signing)).to_toml())
    except OSError:
        for file in folder.iterdir():  # the same command can start again
            file.unlink()
        raise
    return path


def check_keys(kit: Kit, folder: Path) -> None:
    """Refuse a kit that is not for the private keys in a node's folder."""
    for field in _KINDS:
        path = folder / field
        try:
            key = load_ssh_private_key(path.read_bytes(), None)
        except (OSError, ValueError, TypeError, UnsupportedAlgorithm) as error:
            raise HeadstartError(f"{path}: {error}; --folder names the folder of `headstart node init`") from None
        if public_line(key.public_key()) != getattr(kit.own, field):
            raise HeadstartError(
                f"the kit is for another {field} of {kit.name} than {path}: give the server the request of this folder"
            )
        if path.stat().st_mode & 0o077:
            raise HeadstartError(f"{path} can be read by others: chmod 600 it, or make new keys if somebody has")


LIMITS = """\
# What this node lets leave its machine, whatever a server or a recipe asks. No server reads or changes it.
[limits]
min_examples = 2            # classes with fewer are left out, where neither noise nor secure aggregation hides them
evaluation = true           # whether figures of tests on this node's data may leave
trust_server = false        # whether limits on epsilon count noise that the server promises to add
other_participants = false  # whether statistics of the data may be added up again with other participants
delta = 1e-4                # with a limit on epsilon, the most that the delta of all answers add up to
# methods = ["fedncm"]      # no other method may run
# recipes = ["0123456789abcdef"]  # nor another recipe; `headstart node ledger` shows their digests

# The largest epsilon that all answers about this data set may spend together.
# [limits.epsilon]
# example = 3.0
# client = 8.0
"""
