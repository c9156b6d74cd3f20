"""Keys and certificates of a federation: between nodes and server, and between the nodes."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from headstart.core.files import write_atomically, write_text
from headstart.errors import HeadstartError

try:
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import (
        Encoding,
        NoEncryption,
        PrivateFormat,
        PublicFormat,
        load_pem_private_key,
    )
    from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
except ImportError:
    raise HeadstartError("headstart deploy: Flower is missing; install headstart[federation]") from None

DAYS = 365
"""How long the server's certificate is valid."""
AUTHORITY_DAYS = 3650
"""How long the authority is: its certificate is on all nodes."""


def address_of(host: str) -> ipaddress.IPv4Address | None:
    """The host, where it is an IPv4 address."""
    try:
        return ipaddress.IPv4Address(host)
    except ValueError:
        return None


def write_certificates(folder: Path, host: str) -> None:
    """An authority, and a certificate of the server for ``host`` and for its own machine."""
    authority = ec.generate_private_key(ec.SECP384R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "headstart test authority")])
    root = (
        _certificate(name, name, authority.public_key(), datetime.now(UTC) + timedelta(days=AUTHORITY_DAYS))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage("key_cert_sign", "crl_sign"), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(authority.public_key()), critical=False)
        .sign(authority, hashes.SHA384())
    )
    (folder / "ca.pem").write_bytes(root.public_bytes(Encoding.PEM))
    _private(folder / "ca.key", authority, PrivateFormat.PKCS8)
    write_server_certificate(folder, host)


def write_server_certificate(folder: Path, host: str) -> None:
    """A new certificate and key of the server, signed by the authority in the folder."""
    authority, root = _authority(folder)
    server = ec.generate_private_key(ec.SECP384R1())
    # The ServerApp reaches the SuperLink on the loopback address.
    local = ipaddress.IPv4Address("127.0.0.1")
    address = address_of(host)
    names: list[x509.GeneralName] = [x509.DNSName("localhost"), x509.IPAddress(local)]
    if address is None and host != "localhost":
        names.append(x509.DNSName(host))
    elif address is not None and address != local:
        names.append(x509.IPAddress(address))
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "headstart SuperLink")])
    end = min(datetime.now(UTC) + timedelta(days=DAYS), root.not_valid_after_utc)
    leaf = (
        _certificate(subject, root.subject, server.public_key(), end)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage("digital_signature"), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.public_key()), critical=False)
        .sign(authority, hashes.SHA384())
    )
    key = server.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    write_atomically(folder / "server.key", lambda path: path.write_bytes(key), private=True)
    write_atomically(folder / "server.pem", lambda path: path.write_bytes(leaf.public_bytes(Encoding.PEM)))


def certificate_end(path: Path) -> datetime:
    """When a certificate ends."""
    try:
        return x509.load_pem_x509_certificate(path.read_bytes()).not_valid_after_utc
    except (OSError, ValueError) as error:
        raise HeadstartError(f"{path} is no certificate: {error}") from None


def _authority(folder: Path) -> tuple[ec.EllipticCurvePrivateKey, x509.Certificate]:
    try:
        key = load_pem_private_key((folder / "ca.key").read_bytes(), None)
        root = x509.load_pem_x509_certificate((folder / "ca.pem").read_bytes())
    except FileNotFoundError as error:
        raise HeadstartError(
            f"{error.filename} is missing: bring the authority's key back for as long as it signs, or let your own "
            f"authority sign {folder / 'server.pem'}"
        ) from None
    except (OSError, ValueError, TypeError) as error:
        raise HeadstartError(f"{folder}: the authority cannot be read: {error}") from None
    if not isinstance(key, ec.EllipticCurvePrivateKey) or key.public_key() != root.public_key():
        raise HeadstartError(f"{folder / 'ca.key'} is not the key of {folder / 'ca.pem'}")
    return key, root


def _usage(*allowed: str) -> x509.KeyUsage:
    usage = dict.fromkeys(
        ("digital_signature", "content_commitment", "key_encipherment", "data_encipherment", "key_agreement",
         "key_cert_sign", "crl_sign", "encipher_only", "decipher_only"), False
    )  # fmt: skip
    return x509.KeyUsage(**{**usage, **dict.fromkeys(allowed, True)})


def _certificate(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, end: datetime
) -> x509.CertificateBuilder:
    return x509.CertificateBuilder(
        issuer,
        subject,
        key,
        serial_number=x509.random_serial_number(),
        not_valid_before=datetime.now(UTC) - timedelta(hours=1),  # clocks differ
        not_valid_after=end,
    )


def write_node_keys(folder: Path, nodes: Sequence[str]) -> None:
    """Keys by which the SuperLink knows the nodes."""
    for name in nodes:
        write_pair(folder / name, ec.generate_private_key(ec.SECP384R1()))


def write_signing_keys(folder: Path, nodes: Sequence[str]) -> None:
    """Keys by which nodes know each other in secure sums, and the list of the public ones."""
    lines = [f"{name} {write_pair(folder / 'signing' / name, Ed25519PrivateKey.generate())}" for name in nodes]
    (folder / "peers").write_text("".join(lines), encoding="utf-8")


def write_pair(path: Path, key: ec.EllipticCurvePrivateKey | Ed25519PrivateKey) -> str:
    """Write a key and, beside it, its public half; returns the line of that."""
    _private(path, key, PrivateFormat.OpenSSH)
    line = public_line(key.public_key()) + "\n"
    write_text(path.with_name(f"{path.name}.pub"), line)
    return line


def public_line(key: Any) -> str:
    """A public key as OpenSSH writes it."""
    return str(key.public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH).decode())


def _private(path: Path, key: ec.EllipticCurvePrivateKey | Ed25519PrivateKey, form: PrivateFormat) -> None:
    """Write a private key, durably, into a file that nobody else could read at any moment."""
    text = key.private_bytes(Encoding.PEM, form, NoEncryption())
    write_atomically(path, lambda temporary: temporary.write_bytes(text), private=True)
