"""Who clients are to each other: long-term Ed25519 keys that they know without the server."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import load_ssh_private_key, load_ssh_public_key

from headstart.errors import HeadstartError

SIGNATURE_BYTES = 64


@dataclass(frozen=True, eq=False)
class Identity:
    """A client's number and private key, and everyone's public key by number."""

    number: int
    private_key: Ed25519PrivateKey
    peers: Mapping[int, bytes]

    def sign(self, message: bytes) -> bytes:
        """The client's signature."""
        return self.private_key.sign(message)

    def signed_by(self, number: int, signature: bytes, message: bytes) -> bool:
        """Whether this is client `number`'s signature of the message; nobody signs who is not among the peers."""
        try:
            Ed25519PublicKey.from_public_bytes(self.peers[number]).verify(signature, message)
        except (KeyError, InvalidSignature):
            return False
        return True

    @classmethod
    def load(cls, signing_key: Path, peers: Path, name: str) -> Identity:
        """From an OpenSSH private key and a list of peers, with a line ``NAME ssh-ed25519 AAAA…`` for every node.

        A node's number is the place of its name in the list, from 0.
        """
        listed = _read_peers(peers)
        if name not in listed:
            raise HeadstartError(f"{peers} has no line for {name!r}; it lists {', '.join(listed) or 'nobody'}")
        private = _read_private(signing_key)
        number = list(listed).index(name)
        if private.public_key().public_bytes_raw() != listed[name]:
            raise HeadstartError(f"{signing_key} is not the private key of what {peers} lists for {name}")
        return cls(number, private, dict(enumerate(listed.values())))

    @classmethod
    def derived(cls, session: bytes, number: int) -> Identity:
        """For a simulation: keys that anybody can compute from the session. They protect nobody."""
        return cls(number, _derived_key(session, number), _DerivedPeers(session))


class _DerivedPeers(dict[int, bytes]):
    """Public keys of a simulation's clients, made when they are looked up."""

    def __init__(self, session: bytes) -> None:
        super().__init__()
        self._session = session

    def __missing__(self, number: int) -> bytes:
        self[number] = _derived_key(self._session, number).public_key().public_bytes_raw()
        return self[number]


def _derived_key(session: bytes, number: int) -> Ed25519PrivateKey:
    seed = hashlib.sha256(b"headstart simulated client %d " % number + session).digest()
    return Ed25519PrivateKey.from_private_bytes(seed)


def _read_private(path: Path) -> Ed25519PrivateKey:
    try:
        key = load_ssh_private_key(path.read_bytes(), None)
    except (OSError, ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise HeadstartError(f"{path} is not an OpenSSH private key without a passphrase: {error}") from None
    if not isinstance(key, Ed25519PrivateKey):
        raise HeadstartError(f"{path} is no Ed25519 key; make one with ssh-keygen -t ed25519 -N ''")
    return key


def _read_peers(path: Path) -> dict[str, bytes]:
    """Names and public keys, in the order of the lines."""
    found: dict[str, bytes] = {}
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise HeadstartError(f"the list of peers cannot be read: {error}") from None
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        name, _, text = line.strip().partition(" ")
        try:
            key = load_ssh_public_key(text.strip().encode())
        except (ValueError, UnsupportedAlgorithm):
            key = None
        if not isinstance(key, Ed25519PublicKey):
            raise HeadstartError(f"{path}, line {number}: a line is NAME ssh-ed25519 AAAA…, not {line[:80]!r}")
        if name in found or key.public_bytes_raw() in found.values():
            raise HeadstartError(f"{path}, line {number}: every node has one line and a key of its own")
        found[name] = key.public_bytes_raw()
    return found
