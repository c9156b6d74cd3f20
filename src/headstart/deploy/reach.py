"""What a node can tell of its server before it takes part: whether it answers, its certificate, and its clock."""

from __future__ import annotations

import ssl
from collections.abc import Iterator
from contextlib import closing
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from http.client import HTTPException, HTTPSConnection

from cryptography import x509
from flwr.common.constant import SYSTEM_TIME_TOLERANCE, TIMESTAMP_TOLERANCE

from headstart.deploy.admit import WARNING
from headstart.deploy.kit import Kit
from headstart.errors import first_line

PATIENCE = 10.0
"""Seconds for each step of a connection."""
_STRAY = 2.0
"""Seconds that clocks may differ without a word."""
_EXPIRED, _NOT_YET, _OTHER_HOST, _OTHER_ADDRESS = 10, 9, 62, 64  # X509_V_ERR_… of OpenSSL
Findings = Iterator[tuple[str, str, str]]
"""Level, what it is about, and a sentence."""


def reach(kit: Kit) -> Findings:
    """Call the server, as nobody: no key is used, and nothing is sent but the request for a page that is not there."""
    address = f"{kit.host}:{kit.port}"
    trusted = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # which trusts nobody else
    try:
        trusted.load_verify_locations(cadata=kit.authority)
    except (ssl.SSLError, ValueError, TypeError) as error:
        yield "wrong", "certificate", f"the kit's authority is no certificate ({first_line(error)}): ask for a new kit"
        return
    blind = ssl.create_default_context()
    blind.check_hostname, blind.verify_mode = False, ssl.CERT_NONE
    try:
        certificate, date = _look(kit, blind)
    except (OSError, HTTPException) as error:
        yield "wrong", "connection", f"{address} does not answer ({_reason(error)}); {_mend(error)}"
        return
    yield "ok", "connection", f"{address} answers"
    try:
        with _call(kit, trusted) as connection:
            connection.connect()
    except ssl.SSLCertVerificationError as error:
        yield "wrong", "certificate", _distrusted(kit, error, certificate)
    except OSError as error:
        yield "wrong", "certificate", f"{address} ended the connection: {first_line(error)}; try again"
    else:
        yield _valid(kit, certificate)
    yield _clock(date)


def trouble(kit: Kit) -> str | None:
    """What keeps a node from a server that answers: its certificate, or the clock; None where nothing does."""
    found = ((about, text) for level, about, text in reach(kit) if level == "wrong" and about != "connection")
    return next(
        (f"no connection with {kit.host}:{kit.port}: {about}: {text}; asking again" for about, text in found), None
    )


def _call(kit: Kit, context: ssl.SSLContext) -> closing[HTTPSConnection]:
    return closing(HTTPSConnection(kit.host, kit.port, timeout=PATIENCE, context=context))


def _look(kit: Kit, blind: ssl.SSLContext) -> tuple[x509.Certificate, str | None]:
    """The certificate that the server shows, whoever signed it, and what time it says it is."""
    with _call(kit, blind) as connection:
        connection.connect()
        shown: ssl.SSLSocket = connection.sock
        certificate = x509.load_der_x509_certificate(shown.getpeercert(binary_form=True) or b"")
        connection.request("GET", "/")
        return certificate, connection.getresponse().getheader("Date")


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or first_line(error)


def _mend(error: Exception) -> str:
    if isinstance(error, ssl.SSLError | HTTPException):
        return "what listens there is no SuperLink: ask the server's owner for the right address"
    if isinstance(error, ConnectionRefusedError):
        return "nobody listens there: ask whether `headstart server` runs; `headstart node run` asks until it does"
    if isinstance(error, TimeoutError):
        return "a firewall may be in the way, here or there: the node has to reach this port"
    return "see whether this machine knows the name and has a way to it"


def _distrusted(kit: Kit, error: ssl.SSLCertVerificationError, certificate: x509.Certificate) -> str:
    """Why a certificate does not do."""
    start, end = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    if error.verify_code in (_EXPIRED, _NOT_YET):
        return (
            f"it, or its authority's, is not valid now: it holds from {start:%Y-%m-%d %H:%M} to {end:%Y-%m-%d %H:%M} "
            f"UTC, and this clock says {datetime.now(UTC):%Y-%m-%d %H:%M}; where the clock is right, the server's "
            "owner runs `headstart deploy renew`"
        )
    if error.verify_code in (_OTHER_HOST, _OTHER_ADDRESS):
        return f"it is for {_names(certificate)}, and the kit calls {kit.host}: ask the server's owner"
    return (
        "the kit's authority has not signed it: this is not the server of the kit, or it has made new certificates; "
        "ask its owner by phone, and do not go on with a kit that came on another way"
    )


def _valid(kit: Kit, certificate: x509.Certificate) -> tuple[str, str, str]:
    authority = x509.load_pem_x509_certificate(kit.authority.encode())
    left = min(one.not_valid_after_utc for one in (certificate, authority)) - datetime.now(UTC)
    text = f"it is for {_names(certificate)}, signed by the kit's authority, and has {left.days} days left"
    if left > WARNING:
        return "ok", "certificate", text
    return "warning", "certificate", f"{text}: remind the server's owner of `headstart deploy renew`"


def _names(certificate: x509.Certificate) -> str:
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return "no name"
    return ", ".join(str(name.value) for name in names)


def _clock(date: str | None) -> tuple[str, str, str]:
    """How far this machine's clock is from the server's, who refuses requests that were signed at another time."""
    try:
        there = parsedate_to_datetime(str(date)).astimezone(UTC)
    except ValueError:
        return "warning", "clock", "the server does not say what time it is"
    ahead = (datetime.now(UTC) - there - timedelta(seconds=0.5)).total_seconds()  # a date has whole seconds
    text = f"{abs(ahead):,.0f} s {'ahead of' if ahead > 0 else 'behind'} the server's"
    if -TIMESTAMP_TOLERANCE - SYSTEM_TIME_TOLERANCE < ahead < SYSTEM_TIME_TOLERANCE:
        return ("ok" if abs(ahead) < _STRAY else "warning"), "clock", text
    return (
        "wrong", "clock", f"{text}; the server refuses a node that is more than {SYSTEM_TIME_TOLERANCE} s ahead or "
        f"{TIMESTAMP_TOLERANCE + SYSTEM_TIME_TOLERANCE} s behind: set the one that is wrong (timedatectl set-ntp true)"
    )  # fmt: skip
