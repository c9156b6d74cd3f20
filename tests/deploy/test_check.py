"""`headstart node check`: each fault is made for real, and all are told at once."""

import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

pytest.importorskip("flwr")

from cryptography import x509

from headstart import cli
from headstart.config.recipe import Recipe
from headstart.deploy import check, keys
from headstart.deploy.admit import Server, add, init_server, renew
from headstart.deploy.kit import Kit, init_node
from headstart.engine.flower_messages import recipe_digest
from headstart.engine.node_ledger import NodeLedger
from tests.deploy.test_deployment import free_ports

NODES = ("a", "b", "c", "d")
CLASSES = [0, 1, 2]


class Home:
    """A server's folder, the folder of one node, and the node's data."""

    def __init__(self, home: Path, *stages: dict[str, Any], host: str = "localhost", nodes: int = 4) -> None:
        self.home = home
        recipe = {"data": {"dataset": "x", "classes": CLASSES}, "model": {"backbone": "features"}}
        self.recipe = Recipe.parse(recipe | {"stages": list(stages) or [{"method": "fedncm"}]})
        init_server(home / "server", self.recipe, host, free_ports(1))
        self.server = Server.load(home / "server")
        add(self.server, [init_node(home / name, name) for name in NODES[:nodes]])
        self.kit, self.node = self.server.kit_folder / "a.kit", home / "a"
        self.data([20, 20, 20])

    def data(self, counts: list[int], dim: int = 4) -> None:
        """So many examples of each class to train on, and one of each to test on."""
        y = np.repeat(np.arange(len(counts)), counts)
        X = np.random.default_rng(0).normal(size=(len(y) + 3, dim))
        split = np.r_[np.zeros(len(y), np.int64), np.full(3, 2)]
        np.savez(self.home / "data.npz", X=X, y=np.r_[y, CLASSES], split=split)

    @contextmanager
    def listening(self, behind: float = 0.0, address: str = "127.0.0.1") -> Iterator[None]:
        """A server with the certificate in its folder, whose clock is so many seconds behind."""

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.send_error(404)

            def date_time_string(self, timestamp: float | None = None) -> str:
                return super().date_time_string(int(time.time() - behind))

            def log_message(self, *args: object) -> None: ...

        place = self.server.folder / "certificates"
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(place / "server.pem", place / "server.key")
        with HTTPServer((address, self.server.port), Handler) as http:
            http.socket = context.wrap_socket(http.socket, server_side=True)
            http.handle_error = lambda *_: None  # type: ignore[method-assign]
            thread = threading.Thread(target=http.serve_forever, args=(0.05,))
            thread.start()
            try:
                yield
            finally:
                http.shutdown()
                thread.join()

    def check(self, status: int) -> dict[str, list[str]]:
        """What the command says, line by line, by `level about`."""
        words = ["node", "check", self.kit, "--data", self.home / "data.npz", "--folder", self.node]
        before = {path: path.stat().st_mtime_ns for path in self.node.rglob("*")}
        done = CliRunner().invoke(cli.app, [str(word) for word in words], catch_exceptions=False)
        assert done.exit_code == status, done.output
        assert {path: path.stat().st_mtime_ns for path in self.node.rglob("*")} == before  # nothing is written
        found: dict[str, list[str]] = {}
        for line in done.stdout.splitlines()[:-1]:
            about, text = line.split(": ", 1)
            found.setdefault(" ".join(about.split()), []).append(text)
        wrong = sum(line.startswith("wrong") for line in done.stdout.splitlines())
        failed = f"{wrong} {'check' if wrong == 1 else 'checks'} failed: the node cannot participate like this"
        assert done.stdout.splitlines()[-1] == (failed if status else "nothing is wrong")
        return found


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home(tmp_path)


def test_a_node_on_which_nothing_is_wrong(home: Home) -> None:
    with home.listening():
        found = home.check(0)
    assert {key for key in found if not key.startswith("ok")} == set(), found
    assert list(found) == [
        f"ok {about}" for about in
        ("kit", "keys", "recipe", "limits", "data", "classes", "features", "disk", "connection", "certificate", "clock")
    ]  # fmt: skip
    assert Kit.load(home.kit).fingerprint() in found["ok kit"][0]
    assert found["ok data"] == ["60 examples to train on, 3 to test on"]
    assert found["ok features"] == ["4 numbers each"]
    assert found["ok certificate"] == [
        "it is for localhost, 127.0.0.1, signed by the kit's authority, and has 364 days left"
    ]


def test_everything_that_is_wrong_is_told_at_once(home: Home) -> None:
    """Other keys, a limit that forbids the recipe, no data, and nobody who listens."""
    (home.node / "node.toml").write_text('[limits]\nmethods = ["fed3r"]\n')
    (home.home / "data.npz").unlink()
    home.node = home.home / "b"
    (home.node / "node.toml").write_text('[limits]\nmethods = ["fed3r"]\n')
    found = home.check(2)
    assert "give the server the request of this folder" in found["wrong keys"][0]
    assert found["wrong limits"] == ["node.toml: limits.methods does not allow fedncm"]
    assert "data.npz" in found["wrong data"][0]
    assert "wrong features" not in found
    assert "ok disk" in found
    assert f"localhost:{home.server.port} does not answer (Connection refused)" in found["wrong connection"][0]
    assert "headstart server" in found["wrong connection"][0]


# ----------------------------------------------------------------------------------------------------- data and limits


def test_labels_and_class_counts_are_held_against_the_recipe(home: Home) -> None:
    home.data([20, 0, 1, 5, 7])
    with home.listening():
        found = home.check(0)
    assert "12 of 36 examples are left out: data.classes does not name 3 (5), 4 (7)" in found["warning labels"][0]
    missing, small = found["warning classes"]
    assert missing.startswith("the recipe's 1 have no example here")
    assert small.startswith("2: fewer than 2 examples, so that nothing is sent of them in stage 0 (fedncm)")
    (home.node / "node.toml").write_text("[limits]\nmin_examples = 21\n")
    with home.listening():
        assert home.check(0)["warning classes"][1].startswith("0, 2: fewer than 21 examples")


def test_data_of_other_classes_only_are_wrong(home: Home) -> None:
    home.data([0, 0, 0, 9])
    with home.listening():
        found = home.check(2)
    assert "no training examples of the recipe's classes, which are 0, 1, 2" in found["wrong data"][0]


def test_features_are_those_of_the_last_time(home: Home) -> None:
    joined = {"kind": "join", "run": "0" * 32, "recipe": recipe_digest(home.recipe), "examples": 60, "dim": 4}
    NodeLedger(home.node / "state").append(joined)
    with home.listening():
        home.check(0)
        home.data([20, 20, 20], dim=5)
        found = home.check(2)
    assert found["ok features"] == ["5 numbers each"]
    assert found["wrong features"][0].startswith("this node joined with 4 on ")
    assert "and it is 5 now" in found["wrong features"][0]


@pytest.mark.parametrize(
    ("limits", "level", "text"),
    [
        ("evaluation = false", "warning", "limits.evaluation is false"),
        ('recipes = ["0123456789abcdef"]', "wrong", "limits.recipes does not name the recipe"),
        ("[limits.epsilon]\nexample = 5.0", "ok", "node.toml allows all of the recipe"),
        ("[limits.epsilon]\nexample = 2.5", "wrong", "with fed3r the node would have spent 3"),
        ("[limits.epsilon]\nclient = 9.0", "wrong", "with fedncm the node would have spent inf"),
        ("min_example = 3", "wrong", "limits.min_example:"),
    ],
)  # fmt: skip
def test_limits_are_held_against_the_recipe(tmp_path: Path, limits: str, level: str, text: str) -> None:
    """Of two stages, of ε 1 and 2."""
    noise = {"clip": 1.0, "noise": "client"}
    stages = [{"method": m, "privacy": noise | {"epsilon": e}} for m, e in (("fedncm", 1.0), ("fed3r", 2.0))]
    home = Home(tmp_path, *stages)
    (home.node / "node.toml").write_text(f"[limits]\n{limits}\n")
    with home.listening():
        (said,) = home.check(2 if level == "wrong" else 0)[f"{level} limits"]
    assert text in said


def test_what_the_ledger_says_was_spent_counts(tmp_path: Path) -> None:
    home = Home(tmp_path, {"method": "fedncm", "privacy": {"epsilon": 1.0, "clip": 1.0, "noise": "client"}})
    (home.node / "node.toml").write_text("[limits.epsilon]\nexample = 2.0\n")
    spent = {"unit": "example", "epsilon": 1.5, "delta": 1e-5, "noise": "client"}
    answer = {"kind": "answer", "run": "0" * 32, "stage": 0, "round": 0, "of": "answer", "privacy": spent}
    ledger = NodeLedger(home.node / "state")
    ledger.append(answer | {"recipe": recipe_digest(home.recipe)})
    with home.listening():
        found = home.check(0)  # the same recipe is not answered, and not paid for, again
        assert "a new run gets no new reply" in found["warning recipe"][0]
        ledger.append(answer | {"recipe": "another"})
        assert "would have spent 2.5" in home.check(2)["wrong limits"][0]


@pytest.mark.parametrize(
    ("nodes", "level", "text"),
    [(2, "wrong", "adds up 2 nodes, and 3 are the fewest"), (3, "warning", "needs all 3 nodes to the end"),
     (4, "ok", "needs 3 of 4 nodes to the end")],
)  # fmt: skip
def test_who_may_be_absent_from_a_secure_sum(tmp_path: Path, nodes: int, level: str, text: str) -> None:
    home = Home(tmp_path, {"method": "fedncm", "secure": True}, nodes=nodes)
    with home.listening():
        (said,) = home.check(2 if level == "wrong" else 0)[f"{level} secure aggregation"]
    assert text in said


def test_a_full_disk_is_wrong_and_a_nearly_full_one_is_told(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "TIGHT", 1 << 60)
    with home.listening():
        assert all(text.endswith("make room") for text in home.check(0)["warning disk"])
        monkeypatch.setattr(check, "SCARCE", 1 << 60)
        assert len(home.check(2)["wrong disk"]) == 2


def test_the_weights_of_a_backbone_have_a_digest(tmp_path: Path) -> None:
    """Images of mnist-mini on a network of random weights, which are the same everywhere."""
    from headstart.backbones import load_backbone

    recipe = Recipe.parse(
        {"data": {"dataset": "x", "classes": list(range(10))}, "model": {"backbone": "conv4", "weights": "random"},
         "stages": [{"method": "fedncm"}]}
    )  # fmt: skip
    home = Home(tmp_path)
    kit = replace(Kit.load(home.kit), recipe=recipe.to_toml())
    home.kit.write_text(kit.to_toml())
    found = [one for one in check.NodeCheck(home.kit, "mnist-mini", home.node).findings() if one.level == "ok"]
    texts = {one.about: one.text for one in found}
    backbone = load_backbone(recipe.model)
    assert texts["features"] == f"{backbone.dim:,} numbers each"
    assert backbone.weights_digest() in texts["weights"]
    megabytes = 4 * backbone.dim * 5000 / 1e6  # 5,000 images
    assert f"beside {megabytes:,.0f} MB of features" in texts["disk"]
    NodeLedger(home.node / "state").append({"kind": "join", "recipe": recipe_digest(recipe), "weights": "other"})
    wrong = [one for one in check.NodeCheck(home.kit, "mnist-mini", home.node).findings() if one.about == "weights"]
    assert [one.level for one in wrong] == ["ok", "wrong"]
    assert "joined with other on" in wrong[1].text


def test_a_kit_of_another_version_is_wrong(home: Home) -> None:
    home.kit.write_text(replace(Kit.load(home.kit), version="0.0.1").to_toml())
    with home.listening():
        assert "install the server's version" in home.check(2)["wrong kit"][0]


# ---------------------------------------------------------------------------------------------------------- the server


def test_another_authority_is_found_out(home: Home) -> None:
    (home.server.folder / "certificates" / "ca.key").unlink()
    keys.write_certificates(home.server.folder / "certificates", "localhost")
    with home.listening():
        found = home.check(2)
    assert "ok connection" in found
    assert "the kit's authority has not signed it" in found["wrong certificate"][0]


@pytest.mark.parametrize("authority", ["", "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n", "ä"])
def test_a_kit_without_an_authority_trusts_nobody(home: Home, authority: str) -> None:
    home.kit.write_text(replace(Kit.load(home.kit), authority=authority).to_toml())
    with home.listening():
        assert "the kit's authority is no certificate" in home.check(2)["wrong certificate"][0]


def test_a_certificate_for_another_name_is_found_out(home: Home) -> None:
    home.kit.write_text(replace(Kit.load(home.kit), host="127.0.0.2").to_toml())
    with home.listening(address="127.0.0.2"):
        assert "it is for localhost, 127.0.0.1, and the kit calls 127.0.0.2" in home.check(2)["wrong certificate"][0]


def _shifted(home: Home, monkeypatch: pytest.MonkeyPatch, start: timedelta, end: timedelta) -> None:
    """Give the server a certificate that is valid from one time to another, from now."""
    true = keys._certificate

    def certificate(subject: Any, issuer: Any, key: Any, _: datetime) -> x509.CertificateBuilder:
        made = true(subject, issuer, key, datetime.now(UTC) + timedelta(days=9))
        made._not_valid_before, made._not_valid_after = (
            (datetime.now(UTC) + each).replace(tzinfo=None) for each in (start, end)
        )
        return made

    monkeypatch.setattr(keys, "_certificate", certificate)
    renew(home.server)
    monkeypatch.undo()


@pytest.mark.parametrize(
    ("days", "level", "text"),
    [((-9, -1), "wrong", "not valid now"), ((1, 9), "wrong", "not valid now"), ((-1, 9.5), "warning", "9 days left")],
    ids=["ended", "not begun", "ends soon"],
)  # fmt: skip
def test_a_certificate_that_is_not_valid_now_is_found(
    home: Home, monkeypatch: pytest.MonkeyPatch, days: tuple[float, float], level: str, text: str
) -> None:
    _shifted(home, monkeypatch, timedelta(days=days[0]), timedelta(days=days[1]))
    with home.listening():
        found = home.check(2 if level == "wrong" else 0)
    assert text in found[f"{level} certificate"][0]
    assert "headstart deploy renew" in found[f"{level} certificate"][0]
    assert "ok clock" in found


@pytest.mark.parametrize(
    ("behind", "level", "text"),
    [(3600, "wrong", "ahead of the server's"), (-3600, "wrong", "behind the server's"), (8, "wrong", "ahead of"),
     (-60, "warning", "60 s behind the server's")],
)  # fmt: skip
def test_a_clock_that_is_off_is_found(home: Home, behind: float, level: str, text: str) -> None:
    with home.listening(behind):
        (said,) = home.check(2 if level == "wrong" else 0)[f"{level} clock"]
    assert text in said
    if level == "wrong":
        assert "more than 5 s ahead or 305 s behind" in said


def test_what_listens_may_be_no_superlink(home: Home) -> None:
    class Handler(BaseHTTPRequestHandler):
        pass

    with HTTPServer(("127.0.0.1", home.server.port), Handler) as http:
        thread = threading.Thread(target=http.handle_request)
        thread.start()
        assert "what listens there is no SuperLink" in home.check(2)["wrong connection"][0]
        thread.join()
