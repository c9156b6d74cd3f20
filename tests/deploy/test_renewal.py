"""How a SuperLink takes on a new certificate, and what a node says of one that has ended or is another's."""

import http.server
import re
import ssl
import threading
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest

pytest.importorskip("flwr")

from headstart.deploy import keys
from headstart.deploy.kit import Kit
from headstart.deploy.reach import trouble
from headstart.deploy.renewal import take_on


def said_of(port: int, authority: Path) -> str:
    """What a node of this authority says of the server at a port; nothing where nothing is wrong."""
    return trouble(Kit("a", "", "127.0.0.1", port, "", authority.read_text(), "", ())) or ""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[tuple[int, ssl.SSLContext]]:
    """A port with TLS by the certificates of a new authority, and its context."""
    keys.write_certificates(tmp_path, "127.0.0.1")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "server.pem", tmp_path / "server.key")
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler) as served:
        served.socket = context.wrap_socket(served.socket, server_side=True)
        served.handle_error = lambda *_: None  # type: ignore[method-assign]
        thread = threading.Thread(target=served.serve_forever, args=(0.05,))
        thread.start()
        yield served.server_address[1], context
        served.shutdown()
        thread.join()


def test_a_renewed_certificate_is_taken_on_once_it_is_whole(
    server: tuple[int, ssl.SSLContext], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (port, context), files = server, (tmp_path / "server.pem", tmp_path / "server.key")

    def version() -> tuple[int, ...]:
        return tuple(file.stat().st_mtime_ns for file in files)

    def shown() -> str:
        return ssl.get_server_certificate(("127.0.0.1", port)).strip()

    authority, first, known = tmp_path / "ca.pem", files[0].read_text().strip(), version()
    assert said_of(port, authority) == ""
    assert shown() == first
    monkeypatch.setattr(keys, "DAYS", -timedelta(minutes=1) / timedelta(days=1))
    keys.write_server_certificate(tmp_path, "127.0.0.1")
    key = files[1].read_bytes()
    files[1].unlink()
    assert take_on(context, *files, known) == known
    assert shown() == first
    files[1].write_bytes(b"no key")
    assert take_on(context, *files, known) == known
    assert shown() == first
    files[1].write_bytes(key)
    assert take_on(context, *files, known) == version() != known
    assert shown() == files[0].read_text().strip() != first
    ended = rf"no connection with 127.0.0.1:{port}: certificate: .* is not valid now: .* `headstart deploy renew`"
    assert re.match(ended, said_of(port, authority))


def test_a_certificate_of_somebody_else_is_not_that_of_the_kit(
    server: tuple[int, ssl.SSLContext], tmp_path: Path
) -> None:
    (tmp_path / "other").mkdir()
    keys.write_certificates(tmp_path / "other", "127.0.0.1")
    assert "the kit's authority has not signed it" in said_of(server[0], tmp_path / "other" / "ca.pem")


def test_nobody_who_answers_is_no_trouble_of_the_certificate(tmp_path: Path) -> None:
    keys.write_certificates(tmp_path, "127.0.0.1")
    assert said_of(1, tmp_path / "ca.pem") == ""
