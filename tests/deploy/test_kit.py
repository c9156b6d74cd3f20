"""Keys that stay where they were made, requests, kits, and who is admitted."""

import shutil
import socket
import subprocess
import tomllib
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from typer.testing import CliRunner

pytest.importorskip("flwr")

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_ssh_private_key

from headstart import cli
from headstart.channel.secure import Identity
from headstart.config.node import NodeLimits
from headstart.config.recipe import Recipe
from headstart.deploy import keys
from headstart.deploy.admit import Server, add, init_server, renew, revoke
from headstart.deploy.guard import app_digest
from headstart.deploy.kit import Kit, Request, check_keys, init_node
from headstart.errors import HeadstartError
from tests.disk import Disk, Order

RECIPE = Recipe.parse(
    {"data": {"dataset": "x", "classes": ["a", "b"]}, "model": {"backbone": "features"},
     "stages": [{"method": "fedncm"}]}
)  # fmt: skip


@pytest.fixture
def server(tmp_path: Path) -> Server:
    with socket.create_server(("127.0.0.1", 0)) as one:
        port = one.getsockname()[1]
    init_server(tmp_path / "o'brien" / "server", RECIPE, "localhost", port)
    return Server.load(tmp_path / "o'brien" / "server")


def private_keys(folder: Path) -> set[str]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)) for path in files if b"PRIVATE KEY" in path.read_bytes()}


def test_a_node_makes_its_own_keys_and_only_public_ones_leave(tmp_path: Path) -> None:
    folder = tmp_path / "node"
    path = init_node(folder, "hospital-a")
    assert path == folder / "hospital-a.request"
    assert folder.stat().st_mode & 0o777 == 0o700
    assert private_keys(folder) == {"key", "signing"}
    for name in ("key", "signing"):
        assert (folder / name).stat().st_mode & 0o777 == 0o600
    key = load_ssh_private_key((folder / "key").read_bytes(), None)
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    assert key.curve.name == "secp384r1"
    assert NodeLimits.load(folder / "node.toml") == NodeLimits()
    facts = tomllib.loads(path.read_text())
    assert set(facts) == {"headstart", "name", "key", "signing"}
    assert facts["key"] == (folder / "key.pub").read_text().strip()
    assert facts["signing"].startswith("ssh-ed25519 ")


def test_a_folder_in_use_keeps_its_keys(tmp_path: Path) -> None:
    init_node(tmp_path / "node", "a")
    before = (tmp_path / "node/key").read_bytes()
    with pytest.raises(HeadstartError, match="is in use"):
        init_node(tmp_path / "node", "a")
    assert (tmp_path / "node/key").read_bytes() == before
    with pytest.raises(HeadstartError, match="letters, digits and dashes"):
        init_node(tmp_path / "other", "../a")
    assert not (tmp_path / "other").exists()


def test_the_keys_of_a_node_are_on_disk_before_its_request_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order = Order(monkeypatch)
    request = init_node(tmp_path / "node", "a")
    made = order.done.index(("rename", request.stat().st_ino))
    for name in ("", "key", "key.pub", "signing", "signing.pub", "node.toml"):
        assert ("fsync", (tmp_path / "node" / name).stat().st_ino) in order.done[:made], name
    assert ("fsync", tmp_path.stat().st_ino) in order.done[:made]


def test_a_disk_without_room_for_keys_leaves_a_folder_to_start_again_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        disk = Disk(tmp_path, patch)
        init_node(tmp_path / "other", "a")
    for at in range(1, disk.done):  # the last removes a name that is gone already
        node = tmp_path / f"node-{at}"
        with monkeypatch.context() as patch:
            Disk(tmp_path, patch, "full", at)
            with pytest.raises(OSError, match="No space left"):
                init_node(node, "a")
        assert not node.exists() or not list(node.iterdir())
        init_node(node, "a")


def test_a_server_without_nodes_has_no_key_of_a_node(server: Server) -> None:
    assert private_keys(server.folder) == {"certificates/ca.key", "certificates/server.key"}
    assert (server.admitted, server.kits()) == ([], [])
    assert server.warnings() == []


def test_every_node_gets_a_kit_with_everybody_in_order(server: Server, tmp_path: Path) -> None:
    requests = [init_node(tmp_path / name, name) for name in ("b", "a", "c")]
    assert add(server, requests) == ["b", "a", "c"]
    kits = {name: Kit.load(server.folder / "kits" / f"{name}.kit") for name in ("a", "b", "c")}
    for name, kit in kits.items():
        assert (kit.name, kit.host, kit.port) == (name, "localhost", server.port)
        assert kit.app == app_digest(server.folder / "app")
        assert kit.authority == (server.folder / "certificates/ca.pem").read_text()
        assert Recipe.parse(tomllib.loads(kit.recipe)) == RECIPE
        assert [node.name for node in kit.nodes] == ["b", "a", "c"]
        check_keys(kit, tmp_path / name)
    (tmp_path / "peers").write_text(kits["a"].peers)
    assert Identity.load(tmp_path / "c" / "signing", tmp_path / "peers", "c").number == 2
    assert private_keys(server.folder) == {"certificates/ca.key", "certificates/server.key"}
    with pytest.raises(HeadstartError, match="the kit is for another key of a than"):
        check_keys(kits["a"], tmp_path / "b")
    (tmp_path / "a" / "key").chmod(0o644)
    with pytest.raises(HeadstartError, match="can be read by others"):
        check_keys(kits["a"], tmp_path / "a")


def test_the_fingerprint_is_that_of_all_kits_and_of_all_that_they_say(server: Server, tmp_path: Path) -> None:
    add(server, [init_node(tmp_path / name, name) for name in ("a", "b")])
    first, second = server.kits()
    print_ = first.fingerprint()
    assert print_ == second.fingerprint()
    assert [len(part) for part in print_.split("-")] == [4] * 6
    others = [
        replace(first, host="other"), replace(first, port=1), replace(first, app="0"), replace(first, recipe=""),
        replace(first, authority=""), replace(first, version="0"), replace(first, nodes=first.nodes[::-1]),
    ]  # fmt: skip
    assert len({kit.fingerprint() for kit in others} | {print_}) == 8


def test_a_name_stays_with_its_keys(server: Server, tmp_path: Path) -> None:
    request = init_node(tmp_path / "one", "a")
    assert add(server, [request]) == ["a"]
    assert add(server, [request]) == []
    kit = (server.folder / "kits/a.kit").read_text()
    for name in ("a", "A"):
        with pytest.raises(HeadstartError, match=r"a is admitted with other keys.*headstart deploy revoke"):
            add(server, [init_node(tmp_path / f"other-{name}", "b"), init_node(tmp_path / name, name)])
    assert [node.name for node in server.admitted] == ["a"]
    assert (server.folder / "kits/a.kit").read_text() == kit
    renamed = tmp_path / "renamed.request"
    renamed.write_text(request.read_text().replace('name = "a"', 'name = "thief"'))
    with pytest.raises(HeadstartError, match="the same keys are those of a"):
        add(server, [renamed])


def test_revoked_keys_never_come_back_and_new_ones_of_the_same_node_may(server: Server, tmp_path: Path) -> None:
    requests = [init_node(tmp_path / name, name) for name in ("a", "b")]
    add(server, requests)
    before = server.kits()[0].fingerprint()
    revoke(server, "a")
    assert [node.name for node in server.admitted] == ["b"]
    assert [path.name for path in (server.folder / "kits").iterdir()] == ["b.kit"]
    assert server.kits()[0].fingerprint() != before
    with pytest.raises(HeadstartError, match="these keys were revoked on"):
        add(server, [requests[0]])
    with pytest.raises(HeadstartError, match="'a' is not admitted; admitted are: b"):
        revoke(server, "a")
    assert add(server, [init_node(tmp_path / "anew", "a")]) == ["a"]
    assert [node.name for node in server.admitted] == ["b", "a"]
    keys = {name: (tmp_path / name / "key.pub").read_text().strip() for name in ("a", "b", "anew")}
    assert [(entry["event"], entry["node"], entry["key"]) for entry in server.log.entries()] == [
        ("admitted", "a", keys["a"]), ("admitted", "b", keys["b"]), ("revoked", "a", keys["a"]),
        ("admitted", "a", keys["anew"]),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda text: text[:40], "is no request"),
        (lambda text: text.replace("name", "nom"), "it has no name"),
        (lambda text: text.replace('"a"', '"../a"'), "letters, digits and dashes"),
        (lambda text: text.replace("ssh-ed25519 ", "ssh-rsa "), "signing is no such public key"),
        (lambda text: text.replace("ecdsa-sha2-nistp384", "ecdsa-sha2-nistp256"), "key is no such public key"),
        (lambda text: text + "#" * (1 << 22), "larger than"),
    ],
)
def test_requests_that_are_none_are_refused(server: Server, tmp_path: Path, change, message: str) -> None:  # type: ignore[no-untyped-def]
    path = init_node(tmp_path / "a", "a")
    path.write_text(change(path.read_text()))
    with pytest.raises(HeadstartError, match=message):
        Request.load(path)
    with pytest.raises(HeadstartError, match=r"^cannot read .*nope\.request: No such file or directory$"):
        Request.load(tmp_path / "nope.request")
    with pytest.raises(HeadstartError, match=message):
        add(server, [path])
    assert server.admitted == []


def test_another_version_is_refused(server: Server, tmp_path: Path) -> None:
    path = init_node(tmp_path / "a", "a")
    request = replace(Request.load(path), version="0.0.1")
    path.write_text(request.to_toml())
    with pytest.raises(HeadstartError, match=r"was made with headstart 0\.0\.1, and this is"):
        add(server, [path])


def test_kits_that_are_no_longer_true_are_found(server: Server, tmp_path: Path) -> None:
    add(server, [init_node(tmp_path / "a", "a")])
    server.check_kits()
    text = (server.folder / "recipe.toml").read_text()
    (server.folder / "recipe.toml").write_text(text.replace("fedncm", "fedcof"))
    with pytest.raises(HeadstartError, match="headstart deploy add"):
        server.check_kits()
    add(server, [])
    server.check_kits()


def test_a_certificate_is_renewed_by_the_same_authority(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add(server, [init_node(tmp_path / "a", "a")])
    monkeypatch.setattr(keys, "DAYS", 20)
    renew(server)
    (warning,) = server.warnings()
    assert "certificates/server.pem ends on" in warning
    assert "headstart deploy renew" in warning
    monkeypatch.undo()
    old = (server.folder / "certificates/server.pem").read_bytes()
    end = renew(server)
    assert timedelta(days=364) < end - datetime.now(UTC) <= timedelta(days=365)
    assert server.warnings() == []
    server.check_kits()
    new, root = (
        x509.load_pem_x509_certificate((server.folder / f"certificates/{name}.pem").read_bytes())
        for name in ("server", "ca")
    )
    assert (server.folder / "certificates/server.pem").read_bytes() != old
    new.verify_directly_issued_by(root)
    assert (server.folder / "certificates/server.key").stat().st_mode & 0o777 == 0o600
    (server.folder / "certificates/ca.key").unlink()
    with pytest.raises(HeadstartError, match="bring the authority's key back"):
        renew(server)


def command(*words: str | Path) -> str:
    done = CliRunner().invoke(cli.app, [str(word) for word in words], catch_exceptions=False)
    assert done.exit_code == 0
    return done.stdout


def test_the_commands_say_who_needs_what(tmp_path: Path) -> None:
    (tmp_path / "recipe.toml").write_text(RECIPE.to_toml())
    folder = tmp_path / "server"
    assert "headstart deploy add" in command("deploy", "init", folder, tmp_path / "recipe.toml", "--port", "1")
    for name in ("a", "b"):
        assert "never leave this machine" in command("node", "init", tmp_path / name, "--name", name)
    said = command("deploy", "add", folder, tmp_path / "a" / "a.request")
    server = Server.load(folder)
    assert "admitted: a" in said
    assert server.kits()[0].fingerprint() in said
    assert "send a new one" not in said
    assert "send a new one to a, too" in command("deploy", "add", folder, tmp_path / "b" / "b.request")
    assert "send a new one to b, too" in command("deploy", "revoke", folder, "a")
    said = command("deploy", "status", folder)
    assert "the SuperLink is off" in said
    assert "certificates/server.pem ends on" in said
    assert "ends on" in command("deploy", "renew", folder)


def test_units_are_what_systemd_accepts(server: Server, tmp_path: Path) -> None:
    kit = tmp_path / "o'brien 100% \"$HOME" / "a.kit"
    units = {
        "server": command("server", server.folder, "--wait", "60", "--unit"),
        "node": command("node", "run", kit, "--data", "hf://x", "--unit"),
    }
    assert f'"server" "{server.folder}" "--wait" "60.0"' in units["server"]
    assert 'o\'brien 100%% \\"$$HOME/a.kit" "--data" "hf://x" "--folder"' in units["node"]
    if (analyze := shutil.which("systemd-analyze")) is None:
        pytest.skip("there is no systemd-analyze")
    for name, text in units.items():
        path = tmp_path / f"headstart-{name}.service"
        path.write_text(text)
        done = subprocess.run([analyze, "verify", "--man=no", path], capture_output=True, text=True)
        assert path.name not in done.stderr, done.stderr


def test_a_folder_of_scripts_is_no_servers_folder(tmp_path: Path) -> None:
    with pytest.raises(HeadstartError, match="is run by its scripts"):
        Server.load(tmp_path)
