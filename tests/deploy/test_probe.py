"""What a node says of a server's certificate and of its own clock, and how a SuperLink takes on a new certificate."""

import http.server
import re
import ssl
import threading
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

pytest.importorskip("flwr")

from headstart.deploy import keys
from headstart.deploy.probe import clock_trouble, trouble
from headstart.deploy.renewal import take_on


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
    assert trouble("127.0.0.1", port, authority) is None
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
    said = trouble("127.0.0.1", port, authority)
    assert re.match(
        rf"not connected: the certificate of 127.0.0.1:{port} has ended, .* `headstart deploy renew`", str(said)
    )


def test_a_certificate_of_somebody_else_is_not_that_of_the_kit(
    server: tuple[int, ssl.SSLContext], tmp_path: Path
) -> None:
    (tmp_path / "other").mkdir()
    keys.write_certificates(tmp_path / "other", "127.0.0.1")
    said = trouble("127.0.0.1", server[0], tmp_path / "other" / "ca.pem")
    assert "is not what the kit says" in str(said)


def test_nobody_who_answers_is_no_trouble_of_the_certificate(tmp_path: Path) -> None:
    keys.write_certificates(tmp_path, "127.0.0.1")
    assert trouble("127.0.0.1", 1, tmp_path / "ca.pem") is None


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(0, None), (3, None), (-290, None),
     (7, "0:00:07 ahead of"), (-400, "0:06:40 behind"), (86400, "1 day, 0:00:00 ahead of")],
)  # fmt: skip
def test_clocks_may_differ_by_what_flower_allows(seconds: int, said: str | None) -> None:
    now = datetime.now(UTC)
    found = clock_trouble(now, now + timedelta(seconds=seconds), "h:1")
    assert found is None if said is None else f"this machine's clock is {said} that of h:1" in str(found)
