"""The dashboard: what it says of runs that go on, that are killed and that are done; and in a real browser."""

import http.client
import json
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from selenium.webdriver import Chrome, ChromeOptions
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By

from headstart.config.recipe import Recipe
from headstart.errors import HeadstartError
from headstart.report.dashboard import Dashboard, Gallery
from headstart.runner import run

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
TABLE: dict[str, Any] = {
    "name": "digits",
    "data": {"dataset": "digits", "partition": {"kind": "dirichlet", "clients": 10, "alpha": 0.5, "test": "follow"}},
    "model": {"backbone": "features"},
    "stages": [{"method": "fedcof"}, {"method": "fedavg", "train": "head", "rounds": 3, "lr": 0.1}],
}
LONG = TABLE | {"name": "long", "stages": [TABLE["stages"][0], TABLE["stages"][1] | {"rounds": 100_000}]}


def until(answer: Callable[[], Any], seconds: float = 60) -> Any:
    """Wait until there is an answer."""
    end = time.monotonic() + seconds
    while not (found := answer()):
        assert time.monotonic() < end, "it did not come"
        time.sleep(0.1)
    return found


@contextmanager
def going_on(folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A run of its own process that would take an hour."""
    recipe = folder.parent / "long.toml"
    recipe.write_text(Recipe.parse(LONG).to_toml())
    command = [sys.executable, "-m", "headstart.cli", "run", str(recipe), "--out", str(folder)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        until((folder / "metrics.jsonl").is_file)
        yield process
    finally:
        process.kill()
        process.wait()


@contextmanager
def serving(*folders: Path) -> Iterator[Dashboard]:
    with Dashboard(folders) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def ask(server: Dashboard, path: str, **headers: str) -> tuple[int, str]:
    connection = http.client.HTTPConnection(*server.server_address[:2], timeout=30)
    connection.request("GET", path, headers=headers)
    answer = connection.getresponse()
    return answer.status, answer.read().decode()


@pytest.mark.parametrize("letters", [b"", b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"x" * 100])
def test_a_client_that_asks_slowly_is_cut_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, letters: bytes) -> None:
    monkeypatch.setattr("headstart.report.dashboard.server.PATIENCE", 0.5)
    before = threading.active_count()
    with serving(tmp_path) as server, socket.create_connection(server.server_address[:2], timeout=10) as slow:
        began = time.monotonic()
        for letter in letters:
            try:
                slow.send(bytes([letter]))
            except OSError:
                break
            time.sleep(0.1)
        with suppress(ConnectionError):
            assert slow.recv(1) == b""
        assert time.monotonic() - began < 5
        until(lambda: threading.active_count() <= before + 1)  # the one that accepts
        assert ask(server, "/runs") == (200, "[]")


@pytest.mark.slow
def test_a_run_goes_on_is_killed_and_is_finished(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    run(Recipe.parse(TABLE), runs / "done")
    gallery = Gallery([runs])
    with going_on(runs / "long") as process:
        first, done = until(lambda: (found := gallery.statuses()) and len(found) == 2 and found[0].left and found)
        assert first.began >= done.began  # the newest first
        assert (done.id, done.state, done.share, done.left) == ("done", "finished", 1.0, None)
        accuracy = json.loads((runs / "done" / "summary.json").read_text())["accuracy"]
        assert done.score == f"{100 * accuracy:.2f} % of 359 test examples"
        assert done.goodness == accuracy
        assert (first.id, first.name, first.state) == ("long", "long", "running")
        assert "stage 2 of 2: fedavg, round" in first.doing
        assert "of 1,000,000" in first.doing  # ten clients in each round
        until(lambda: (now := gallery.statuses()[0]).version != first.version and now.share > first.share)
        assert "<svg" in gallery.body(["long", "done"])
        process.send_signal(signal.SIGKILL)
        process.wait()
        last = gallery.statuses()[0]
        assert (last.state, last.left) == ("stopped", None)
        assert "not finished" in gallery.body(["long"])
    shutil.rmtree(runs / "long")
    assert [status.id for status in gallery.statuses()] == ["done"]


def test_clients_left_out_are_counted_as_they_come(tmp_path: Path) -> None:
    run(Recipe.parse(TABLE), tmp_path / "one")
    gallery, file = Gallery([tmp_path]), tmp_path / "one" / "rounds.csv"
    before = file.read_text()
    assert gallery.statuses()[0].dropped == 0
    with file.open("a") as rounds:
        rounds.write("1,3,client-1,10,20,cannot be reached\n1,3,client-2,10,20,too la")
    assert gallery.statuses()[0].dropped == 1
    with file.open("a") as rounds:
        rounds.write("te\n")
    assert gallery.statuses()[0].dropped == 2
    file.write_text(before)
    assert gallery.statuses()[0].dropped == 0


def test_it_answers_this_machine_only_and_serves_no_files(tmp_path: Path) -> None:
    run(Recipe.parse(TABLE), tmp_path / "one")
    (tmp_path / "secret").write_text("secret")
    with serving(tmp_path) as server:
        assert server.server_address[0] == "127.0.0.1"
        assert ask(server, "/")[0] == 200
        assert ask(server, "/runs", Host="elsewhere.example")[0] == 403
        assert ask(server, "/runs", Host=f"localhost:{server.server_address[1]}")[0] == 200
        for path in ("/secret", "/../secret", "/one/recipe.toml", "//etc/passwd"):
            assert ask(server, path)[0] == 404, path
        for query in ("/view?run=../secret", "/view?run=/etc", "/view"):
            assert ask(server, query) == (200, "<p class='soft'>Choose a run.</p>")
        assert ask(server, "/report?run=one") == (200, (tmp_path / "one" / "report.html").read_text())
        for query in ("/report?run=../secret", "/report?run=/etc", "/report"):
            assert ask(server, query)[0] == 503
        (tmp_path / "one" / "recipe.toml").write_text("no recipe at all")
        assert ask(server, "/runs") == (200, "[]")
        assert ask(server, "/view?run=one")[0] == 503
    with pytest.raises(HeadstartError, match="no such directory"):
        Dashboard([tmp_path / "nowhere"])
    with Dashboard([tmp_path]) as first, pytest.raises(HeadstartError, match="give another port"):
        Dashboard([tmp_path], port=first.server_address[1])


@contextmanager
def browser(folder: Path) -> Iterator[Chrome]:
    options = ChromeOptions()
    options.binary_location = str(CHROMIUM)
    for flag in ("headless", "no-sandbox", "disable-gpu", "disable-dev-shm-usage", "disable-background-networking",
                 "disable-component-update", "disable-sync", "no-first-run", "disable-quic", "window-size=1400,1000",
                 f"user-data-dir={folder}"):  # fmt: skip
        options.add_argument(f"--{flag}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = Chrome(options, Service(DRIVER))
    try:
        yield driver
    finally:
        driver.quit()


@pytest.mark.slow
@pytest.mark.skipif(not (CHROMIUM and DRIVER), reason="needs chromium and chromium-driver; make browser installs them")
def test_in_a_browser_it_follows_a_run_compares_two_and_outlives_one(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    run(Recipe.parse(TABLE), runs / "done")
    with serving(runs) as server, browser(tmp_path / "profile") as page:

        def asked(script: str) -> Any:  # in one step: what is on the page is replaced as the run goes on
            return page.execute_script(f"return {script}")  # type: ignore[no-untyped-call]

        def text(selector: str) -> str:
            return str(asked(f"[...document.querySelectorAll({selector!r})].map(e => e.innerText).join(' | ')"))

        with going_on(runs / "long") as process:
            page.get(server.url)
            until(lambda: "running" in text("#runs"))
            assert "finished" in text("#runs")
            until(lambda: "long" in text("#view h1"))  # the one that goes on is shown first
            until(lambda: " left" in text("#runs .running"))

            def drawn() -> str:
                return str(asked("document.querySelector('#view .figures svg').outerHTML"))

            first = until(drawn)
            until(lambda: drawn() != first)  # curves grow

            page.find_elements(By.CSS_SELECTOR, "#runs input")[1].click()  # the newest run is the first
            until(lambda: "digits" in text("#view .legend") and "long" in text("#view .legend"))
            assert asked("document.querySelector('#view tbody').rows.length") == 4
            assert "run=done" in page.current_url

            assert text("#runs b").split(" | ") == ["long", "done"]
            page.find_element(By.ID, "filter").send_keys("no such run")
            until(lambda: text("#runs b").split(" | ") == ["long", "done"])  # what is chosen stays
            page.find_elements(By.CSS_SELECTOR, "#runs input")[1].click()
            until(lambda: text("#runs b") == "long")
            page.find_element(By.ID, "filter").clear()
            page.execute_script("document.getElementById('filter').dispatchEvent(new Event('input'))")  # type: ignore[no-untyped-call]
            page.execute_script(  # type: ignore[no-untyped-call]
                "const by = document.getElementById('sort'); by.value = 'id'; by.dispatchEvent(new Event('change'))"
            )
            until(lambda: text("#runs b").split(" | ") == ["done", "long"])
            assert "report?run=done" in str(asked("document.querySelector('#runs a').href"))

            process.send_signal(signal.SIGKILL)
            process.wait()
            until(lambda: "stopped" in text("#runs .stopped"))
        assert "long" in text("#view h1")
        page.set_window_size(390, 800)
        fits = "document.documentElement.scrollWidth <= window.innerWidth"
        assert asked(fits)

        page.get((runs / "done" / "report.html").as_uri())
        assert text("h1") == "digits"
        assert asked(fits)
        assert page.get_log("browser") == []  # type: ignore[no-untyped-call]
