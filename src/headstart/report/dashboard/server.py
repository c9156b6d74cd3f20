"""The page of a gallery, for the machine that it runs on. It reads run directories and changes nothing."""

from __future__ import annotations

import json
import secrets
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cached_property
from html import escape
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from headstart.errors import HeadstartError
from headstart.records import find
from headstart.report import STYLE
from headstart.report.dashboard.gallery import Gallery

LOOPBACK = ("127.0.0.1", "localhost", "::1")
PATIENCE = 10.0
"""Seconds that a browser may take to ask, and again to take the answer."""


class Dashboard(ThreadingHTTPServer):
    """Serves the page of a gallery; it reads, and changes nothing."""

    daemon_threads = True

    def __init__(self, folders: Sequence[Path], host: str = "127.0.0.1", port: int = 0) -> None:
        find(folders)  # folders that are not there are said before anything is served
        self.gallery, self.host, self.nonce = Gallery(folders), host, secrets.token_urlsafe(12)
        try:
            super().__init__((host, port), _Handler)
        except OSError as error:
            raise HeadstartError(f"--host {host} --port {port}: {error.strerror or error}; give another port") from None

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A browser that went away while it was being answered is no error."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)

    @property
    def url(self) -> str:
        """Where the page is."""
        return f"http://{self.host}:{self.server_address[1]}/"

    @cached_property
    def page(self) -> bytes:
        """The page itself, which asks for everything else."""
        page = Path(__file__).with_name("page.html").read_text(encoding="utf-8")
        return page.replace("{style}", STYLE).replace("{nonce}", self.nonce).encode()


class _Handler(BaseHTTPRequestHandler):
    server: Dashboard

    def setup(self) -> None:
        """A client that asks letter by letter is cut off: the socket's own time starts anew with every letter."""
        super().setup()
        self.connection.settimeout(PATIENCE)
        self._limit = threading.Timer(PATIENCE, self._cut_off)
        self._limit.daemon = True
        self._limit.start()

    def _cut_off(self) -> None:
        with suppress(OSError):  # it is gone already
            self.connection.shutdown(socket.SHUT_RDWR)

    def finish(self) -> None:
        """The request is over."""
        self._limit.cancel()
        super().finish()

    def do_GET(self) -> None:
        self._limit.cancel()
        # A name that is not this machine's own may be another site's that points here.
        name = urlsplit(f"//{self.headers.get('Host', '')}").hostname
        if self.server.host in LOOPBACK and name not in LOOPBACK:
            self._send(HTTPStatus.FORBIDDEN, "text/plain", b"this page is for the machine that it runs on\n")
            return
        url = urlsplit(self.path)
        gallery, chosen = self.server.gallery, parse_qs(url.query).get("run", [])
        answers: dict[str, tuple[str, Callable[[], bytes]]] = {
            "/": ("text/html", lambda: self.server.page),
            "/runs": ("application/json", self._runs),
            "/federations": ("text/html", lambda: gallery.panels(chosen).encode()),
            "/view": ("text/html", lambda: gallery.body(chosen).encode()),
            "/report": ("text/html", lambda: gallery.report(chosen).encode()),
        }
        if url.path not in answers:
            self._send(HTTPStatus.NOT_FOUND, "text/plain", b"there is no such page\n")
            return
        kind, answer = answers[url.path]
        try:
            body = answer()
        except (HeadstartError, OSError, ValueError, KeyError) as error:
            self._send(HTTPStatus.SERVICE_UNAVAILABLE, "text/html", f"<p>{escape(str(error))}</p>".encode())
            return
        self._send(HTTPStatus.OK, kind, body)

    def _runs(self) -> bytes:
        return json.dumps([vars(status) for status in self.server.gallery.statuses()]).encode()

    def _send(self, status: HTTPStatus, kind: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        sources = f"default-src 'none'; connect-src 'self'; img-src data:; script-src 'nonce-{self.server.nonce}'"
        self.send_header("Content-Security-Policy", f"{sources}; style-src 'unsafe-inline'; frame-ancestors 'none'")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Quiet: the page asks every second."""
