"""A SuperLink that takes on a renewed certificate while it runs, and what its end means for who connects."""

from __future__ import annotations

import importlib
import ssl
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

LOOK = 2.0
"""Seconds between two looks at the files."""


def install() -> None:
    """Let uvicorn, which serves the SuperLink, show new connections the certificate that is in the files now."""
    config: Any = importlib.import_module("uvicorn.config")
    make: Callable[..., ssl.SSLContext] = config.create_ssl_context

    def watched(certfile: str, keyfile: str, **given: Any) -> ssl.SSLContext:
        context = make(certfile=certfile, keyfile=keyfile, **given)
        files = Path(certfile), Path(keyfile)
        threading.Thread(target=_watch, args=(context, *files, _version(*files)), daemon=True).start()
        return context

    config.create_ssl_context = watched


def _version(*files: Path) -> tuple[int, ...]:
    return tuple(file.stat().st_mtime_ns for file in files)


def _watch(context: ssl.SSLContext, certificate: Path, key: Path, known: tuple[int, ...]) -> None:
    while True:
        time.sleep(LOOK)
        known = take_on(context, certificate, key, known)


def take_on(context: ssl.SSLContext, certificate: Path, key: Path, known: tuple[int, ...]) -> tuple[int, ...]:
    """Load files that are not of the known version, once they belong together; returns the version in use."""
    try:
        found = _version(certificate, key)
        if found == known:
            return known
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key)  # a mistake leaves the other as it is
        context.load_cert_chain(certificate, key)
    except (OSError, ssl.SSLError):  # one of the two is not there yet
        return known
    return found
