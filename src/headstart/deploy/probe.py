"""What keeps a node from its server, as one request tells: its certificate, or the clock of this machine."""

from __future__ import annotations

import http.client
import ssl
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from pathlib import Path

AHEAD, BEHIND = timedelta(seconds=5), timedelta(minutes=5)
"""Flower's SuperLink refuses requests that were signed at a time that is further off."""
_UNSURE = timedelta(seconds=1)  # the server tells whole seconds
_NOT_YET, _EXPIRED = 9, 10  # X509_V_ERR_CERT_NOT_YET_VALID and X509_V_ERR_CERT_HAS_EXPIRED of OpenSSL


def trouble(host: str, port: int, authority: Path) -> str | None:
    """Why a server cannot be trusted, or would refuse a node; None where nothing is wrong, or nobody answers."""
    address = f"{host}:{port}"
    connection = http.client.HTTPSConnection(
        host, port, timeout=10, context=ssl.create_default_context(cafile=str(authority))
    )
    try:
        connection.request("GET", "/")
        told = connection.getresponse().getheader("Date")
        return clock_trouble(parsedate_to_datetime(told), datetime.now(UTC), address) if told else None
    except ssl.SSLCertVerificationError as error:
        return certificate_trouble(error.verify_code, error.verify_message, address)
    except (OSError, http.client.HTTPException, ValueError):
        return None
    finally:
        connection.close()


def certificate_trouble(code: int, words: str, address: str) -> str:
    """In words, why a certificate was refused; code, words: OpenSSL's own."""
    if code in (_NOT_YET, _EXPIRED):
        how, mend = ("is not valid yet", "set the clock if it is wrong")
        if code == _EXPIRED:
            how, mend = ("has ended", "if that is right, the server's owner runs `headstart deploy renew`")
        now = f"{datetime.now():%Y-%m-%d %H:%M}"
        return (
            f"not connected: the certificate of {address} {how}, by this machine's clock ({now}): {mend}; asking again"
        )
    return (
        f"not connected: the certificate of {address} is not what the kit says ({words}); ask the server's owner, "
        "and do not go on with a kit that came on another way"
    )


def clock_trouble(server: datetime, here: datetime, address: str) -> str | None:
    """In words, that the clocks differ by more than the server allows; None where they do not."""
    ahead = here - server
    if -BEHIND + _UNSURE < ahead < AHEAD - _UNSURE:
        return None
    off = f"{timedelta(seconds=round(abs(ahead).total_seconds()))} {'ahead of' if ahead > timedelta(0) else 'behind'}"
    return (
        f"not connected: this machine's clock is {off} that of {address}, which refuses what is signed more than "
        f"{AHEAD.seconds} seconds ahead or {BEHIND.seconds // 60} minutes behind: set the clock; asking again"
    )
