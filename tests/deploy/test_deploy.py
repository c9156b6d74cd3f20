import errno
import socket
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from ipaddress import IPv4Address
from pathlib import Path

import pytest

pytest.importorskip("cryptography")

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_pem_private_key, load_ssh_private_key, load_ssh_public_key
from cryptography.x509.verification import PolicyBuilder, Store, VerificationError

from headstart.channel.secure import Identity
from headstart.config.node import NodeLimits
from headstart.config.recipe import Recipe
from headstart.deploy.admit import init_server
from headstart.deploy.folder import init
from headstart.deploy.guard import app_digest
from headstart.errors import HeadstartError
from tests.disk import Order

NODES = ["hospital-a", "B2"]
DATA = {"dataset": 'it\'s a "test" of \\n $HOME', "classes": ["a", "b"]}
AWKWARD = "o'brien \\ \"n\" $HOME & 'sons'"
"""A folder whose name has what shells and TOML quote with."""
RECIPE = Recipe.parse({"data": DATA, "model": {"backbone": "features"}, "stages": [{"method": "fedcof"}]})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("with space") / AWKWARD / "federation"
    init(path, RECIPE, NODES, "fl.example.org", 20000)
    return path


def test_everything_is_written_and_the_commands_run_it(tmp_path: Path) -> None:
    path = tmp_path / "new" / "federation"
    commands = init(path, RECIPE, NODES)
    assert commands == [str(path / f"{name}.sh") for name in ("superlink", "nodes", "run")]
    assert {str(file.relative_to(path)) for file in path.rglob("*") if file.is_file()} == {
        "README.md", "recipe.toml", "recipe.schema.json", "state/federation.json", "app/pyproject.toml",
        "superlink.sh", "nodes.sh", "run.sh",
        "node-hospital-a.sh", "node-B2.sh", "node-hospital-a.toml", "node-B2.toml",
        "certificates/ca.pem", "certificates/ca.key", "certificates/server.pem", "certificates/server.key",
        "keys/hospital-a", "keys/hospital-a.pub", "keys/B2", "keys/B2.pub",
        "signing/hospital-a", "signing/hospital-a.pub", "signing/B2", "signing/B2.pub", "peers",
    }  # fmt: skip
    assert Recipe.load(path / "recipe.toml") == RECIPE
    assert NodeLimits.load(path / "node-B2.toml") == NodeLimits()
    assert list(path.parent.iterdir()) == [path]


def test_a_folder_that_has_its_name_is_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order = Order(monkeypatch)
    init(tmp_path / "federation", RECIPE, NODES)
    order.check(tmp_path / "federation")
    init_server(tmp_path / "server", RECIPE, "localhost", 20000)
    order.check(tmp_path / "server")


def test_a_full_disk_names_a_file_of_the_folder_and_leaves_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="full") as refused:
        init(tmp_path / "federation", RECIPE, NODES)
    assert refused.value.filename == str(tmp_path / "federation" / "recipe.toml")
    assert not list(tmp_path.iterdir())


def test_a_used_folder_is_refused_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("kept")
    with pytest.raises(HeadstartError, match="name a folder that is empty"):
        init(tmp_path, RECIPE, NODES)
    with pytest.raises(HeadstartError, match="name a folder that is empty"):
        init(tmp_path / "mine", RECIPE, NODES)
    assert [(file.name, file.read_text()) for file in tmp_path.iterdir()] == [("mine", "kept")]
    (tmp_path / "mine").unlink()
    init(tmp_path, RECIPE, NODES)
    assert (tmp_path / "run.sh").is_file()


@pytest.mark.parametrize("names", [["-a"], ["a b"], ["a/b"], ["../a"], ["a.b"], ["ä"], [""], ["a\n"], ["a" * 64]])
def test_a_node_is_named_with_letters_digits_and_dashes(tmp_path: Path, names: list[str]) -> None:
    with pytest.raises(HeadstartError, match="letters, digits and dashes"):
        init(tmp_path / "federation", RECIPE, ["fine-1", *names])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("nodes", "host", "port", "message"),
    [
        ([], "localhost", 20000, "needs a node"),
        (["a", "A"], "localhost", 20000, "a name of its own"),
        (["a"], "fl.example.org:443", 20000, "without a port"),
        (["a"], "", 20000, "DNS name or IPv4"),
        (["a"], "$(reboot)", 20000, "DNS name or IPv4"),
        (["a"], "localhost", 0, "between 1 and 65534"),
        (["a", "b"], "localhost", 65534, "between 1 and 65533"),
    ],
)
def test_mistakes_are_refused(tmp_path: Path, nodes: list[str], host: str, port: int, message: str) -> None:
    with pytest.raises(HeadstartError, match=message):
        init(tmp_path / "federation", RECIPE, nodes, host, port)
    assert not list(tmp_path.iterdir())


def test_a_recipe_names_its_classes(tmp_path: Path) -> None:
    recipe = Recipe.parse({"data": {"dataset": "mnist"}, "stages": [{"method": "fedcof"}]})
    with pytest.raises(HeadstartError, match=r"data\.classes: name the classes"):
        init(tmp_path / "federation", recipe, NODES)


def test_private_keys_are_the_owners_alone(folder: Path) -> None:
    private = [
        *folder.glob("certificates/*.key"),
        *(folder / kind / name for kind in ("keys", "signing") for name in NODES),
    ]
    assert len(private) == 6
    for file in private:
        assert b"PRIVATE KEY" in file.read_bytes()
        assert file.stat().st_mode & 0o777 == 0o600
    for file in folder.rglob("*"):
        assert file in private or file.is_dir() or b"PRIVATE KEY" not in file.read_bytes()


def test_each_node_has_a_key_pair_of_its_own_on_a_nist_curve(folder: Path) -> None:
    numbers = set()
    for name in NODES:
        private = load_ssh_private_key((folder / "keys" / name).read_bytes(), None)
        public = load_ssh_public_key((folder / "keys" / f"{name}.pub").read_bytes())
        assert isinstance(private, ec.EllipticCurvePrivateKey)
        assert isinstance(public, ec.EllipticCurvePublicKey)
        assert public.curve.name == "secp384r1"
        assert private.public_key() == public
        numbers.add(public.public_numbers().x)
    assert len(numbers) == len(NODES)


def test_nodes_know_each_other_by_a_list_in_the_order_of_the_federation(folder: Path) -> None:
    lines = (folder / "peers").read_text().splitlines()
    assert lines == [f"{name} {(folder / 'signing' / f'{name}.pub').read_text().strip()}" for name in NODES]
    sides = [Identity.load(folder / "signing" / name, folder / "peers", name) for name in NODES]
    assert [one.number for one in sides] == [0, 1]
    assert sides[0].signed_by(1, sides[1].sign(b"message"), b"message")
    assert not sides[0].signed_by(0, sides[1].sign(b"message"), b"message")


def verify(folder: Path, subject: x509.DNSName | x509.IPAddress, authority: Path | None = None) -> None:
    roots = [x509.load_pem_x509_certificate(((authority or folder) / "certificates/ca.pem").read_bytes())]
    leaf = x509.load_pem_x509_certificate((folder / "certificates/server.pem").read_bytes())
    PolicyBuilder().store(Store(roots)).build_server_verifier(subject).verify(leaf, [])


def test_the_server_certificate_holds_for_its_host_and_its_own_machine(folder: Path, tmp_path: Path) -> None:
    local = x509.IPAddress(IPv4Address("127.0.0.1"))
    for subject in (x509.DNSName("fl.example.org"), x509.DNSName("localhost"), local):
        verify(folder, subject)
    with pytest.raises(VerificationError):
        verify(folder, x509.DNSName("other.example.org"))
    init(tmp_path / "other", RECIPE, NODES, "10.1.2.3")
    for subject in (x509.IPAddress(IPv4Address("10.1.2.3")), x509.DNSName("localhost"), local):
        verify(tmp_path / "other", subject)
    with pytest.raises(VerificationError):
        verify(folder, x509.DNSName("localhost"), authority=tmp_path / "other")


def test_the_certificates_match_their_keys_and_last_a_year_the_authority_ten(folder: Path) -> None:
    for name, days in (("ca", 3650), ("server", 365)):
        certificate = x509.load_pem_x509_certificate((folder / f"certificates/{name}.pem").read_bytes())
        key = load_pem_private_key((folder / f"certificates/{name}.key").read_bytes(), None)
        assert key.public_key() == certificate.public_key()
        left = certificate.not_valid_after_utc - datetime.now(UTC)
        assert timedelta(days=days - 1) < left <= timedelta(days=days)


def test_flower_accepts_the_app(folder: Path) -> None:
    text = (folder / "app/pyproject.toml").read_text(encoding="utf-8")
    app = tomllib.loads(text)["tool"]["flwr"]["app"]
    assert app["components"] == {
        "serverapp": "headstart.deploy.apps:server",
        "clientapp": "headstart.deploy.apps:client",
    }
    config = pytest.importorskip("flwr.common.config")
    assert config.validate_config(tomllib.loads(text), check_module=False)[:2] == (True, [])


def stand_in(folder: Path, command: str, body: str) -> None:
    """A script in the place of one of Flower's commands, which says what it was asked to do."""
    folder.mkdir(exist_ok=True)
    (folder / command).write_text(f"#!/usr/bin/env bash\n{body}\n")
    (folder / command).chmod(0o755)


def shell(script: Path, commands: Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [script], cwd=cwd, env={"PATH": f"{commands}:/usr/bin:/bin"}, text=True, capture_output=True, timeout=30
    )


def test_scripts_are_executable_and_have_no_syntax_errors(folder: Path) -> None:
    scripts = sorted(folder.glob("*.sh"))
    assert len(scripts) == 5
    for script in scripts:
        assert script.stat().st_mode & 0o100
        assert subprocess.run(["bash", "-n", script], capture_output=True).stderr == b""
        assert str(folder) not in script.read_text()


GUARD = ["-P", "-m", "headstart.deploy.guard"]


def test_the_superlink_runs_with_tls_and_authentication_from_any_directory(folder: Path, tmp_path: Path) -> None:
    flower = pytest.importorskip("flwr.superlink.cli.flower_superlink")
    stand_in(tmp_path / "bin", "python3", 'printf "%s\\n" "$PWD" "$@"')
    where, *arguments = shell(folder / "superlink.sh", tmp_path / "bin", tmp_path).stdout.splitlines()
    assert where == str(folder)
    assert arguments[:4] == [*GUARD, "superlink"]
    arguments = arguments[4:]
    asked = flower._parse_args_run_superlink().parse_args(arguments)
    assert (asked.host, asked.port, asked.insecure, asked.enable_supernode_auth) == ("0.0.0.0", 20000, False, True)
    assert not asked.runtime_dependency_install
    assert asked.database == str(folder / "state/superlink.db")
    paths = [asked.ssl_ca_certfile, asked.ssl_certfile, asked.ssl_keyfile]
    assert paths == [str(folder / "certificates" / name) for name in ("ca.pem", "server.pem", "server.key")]


@pytest.mark.parametrize(
    ("host", "listen"), [("localhost", "127.0.0.1"), ("127.0.0.1", "127.0.0.1"), ("10.1.2.3", "0.0.0.0")]
)
def test_a_server_on_the_loopback_address_is_not_seen_from_outside(tmp_path: Path, host: str, listen: str) -> None:
    init(tmp_path / "federation", RECIPE, NODES, host)
    assert f"listen={listen} " in (tmp_path / "federation/superlink.sh").read_text()
    assert "host=127.0.0.1 " in (tmp_path / "federation/run.sh").read_text()  # where runs are started from


def test_a_node_tells_flower_who_it_is_and_tries_again_when_refused(folder: Path, tmp_path: Path) -> None:
    flower = pytest.importorskip("flwr.supernode.cli.flower_supernode")
    body = f'printf "%s\\n" "$@"; [[ -e {tmp_path}/tried ]] || ! touch {tmp_path}/tried'
    stand_in(tmp_path / "bin", "python3", body)
    stand_in(tmp_path / "bin", "headstart", "")
    stand_in(tmp_path / "bin", "sleep", "")
    done = shell(folder / "node-B2.sh", tmp_path / "bin", tmp_path)
    assert (done.returncode, done.stderr) == (0, "B2 is not connected; next attempt in 5 seconds\n")
    lines = done.stdout.splitlines()
    first, second = lines[: len(lines) // 2], lines[len(lines) // 2 :]
    assert first == second
    assert first[:5] == [*GUARD, "supernode", app_digest(folder / "app")]
    asked = flower._parse_args_run_supernode().parse_args(first[5:])
    assert (asked.superlink, asked.port, asked.insecure) == ("fl.example.org:20000", 20002, False)
    assert asked.root_certificates == str(folder / "certificates/ca.pem")
    assert asked.auth_supernode_private_key == str(folder / "keys/B2")
    assert flower.parse_config_args([asked.node_config]) == {
        "name": "B2", "data": str(folder / "data/B2"), "task": "", "recipe": str(folder / "recipe.toml"),
        "limits": str(folder / "node-B2.toml"), "state": str(folder / "state/B2"),
        "signing_key": str(folder / "signing/B2"), "peers": str(folder / "peers"),
    }  # fmt: skip


def test_a_node_that_is_told_to_stop_says_goodbye(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "node.py").write_text(
        "import signal, sys, time\n"
        "signal.signal(signal.SIGINT, lambda *_: sys.exit(print('goodbye')))\n"
        "print('here', flush=True)\n"
        "time.sleep(60)\n"
    )
    stand_in(tmp_path / "bin", "headstart", "")
    stand_in(tmp_path / "bin", "python3", f"exec {sys.executable} {tmp_path}/node.py")
    process = subprocess.Popen(
        [folder / "node-B2.sh"], env={"PATH": f"{tmp_path / 'bin'}:/usr/bin:/bin"}, text=True, stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "here\n"
    process.terminate()
    assert (process.communicate(timeout=30)[0], process.returncode) == ("goodbye\n", 0)


def test_a_node_does_not_try_again_after_a_mistake(folder: Path, tmp_path: Path) -> None:
    stand_in(tmp_path / "bin", "headstart", "")
    stand_in(tmp_path / "bin", "python3", "echo the mistake >&2; exit 2")
    done = shell(folder / "node-B2.sh", tmp_path / "bin", tmp_path)
    assert (done.returncode, done.stderr) == (2, "the mistake\n")


def test_a_node_without_flower_says_what_to_do(folder: Path, tmp_path: Path) -> None:
    done = shell(folder / "node-B2.sh", tmp_path, tmp_path)
    assert (done.returncode, done.stderr) == (2, "activate the environment with headstart[federation]\n")


@pytest.fixture
def listening(tmp_path: Path) -> Iterator[Path]:
    """A folder whose server listens, and no more."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        folder = tmp_path / AWKWARD / "federation"
        init(folder, RECIPE, NODES, "localhost", port := server.getsockname()[1])
        assert f"port={port}\n" in (folder / "run.sh").read_text()
        yield folder


@pytest.mark.parametrize(("status", "code"), [("completed", 0), ("failed", 1)])
def test_run_admits_the_nodes_hands_over_the_recipe_and_reports_the_outcome(
    listening: Path, tmp_path: Path, status: str, code: int
) -> None:
    body = f"""echo "$@" >>{tmp_path}/log
case $1 in
  run) echo '{{"run-id": "12345678901234567890"}}' ;;
  list) echo '"status": "finished:{status}"' ;;
esac"""
    stand_in(tmp_path / "bin", "flwr", body)
    stand_in(tmp_path / "bin", "python3", f'echo "$@" >>{tmp_path}/log')
    done = shell(listening / "run.sh", tmp_path / "bin", tmp_path)
    assert (done.returncode, done.stderr) == (code, "")
    connection = tomllib.loads((listening / "state/run/config.toml").read_text())["superlink"]["federation"]
    assert (tmp_path / "log").read_text().splitlines() == [
        f"-P -m headstart.deploy.control {listening} 127.0.0.1 {connection['address'].split(':')[1]}",
        f"run {listening}/app federation --run-config {listening}/state/run/values.toml --format json",
        "log 12345678901234567890 federation",
        "list federation --run-id 12345678901234567890 --format json",
    ]
    values = tomllib.loads((listening / "state/run/values.toml").read_text(encoding="utf-8"))
    assert Recipe.parse(tomllib.loads(values.pop("recipe"))) == RECIPE
    assert values == {"nodes": "hospital-a,B2", "wait": "", "test": "", "out": str(listening / "run")}
    declared = tomllib.loads((listening / "app/pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"]
    assert set(declared) == {"recipe", *values}
    assert connection["root-certificates"] == str(listening / "certificates/ca.pem")


def test_run_shows_why_a_node_cannot_be_admitted(listening: Path, tmp_path: Path) -> None:
    stand_in(tmp_path / "bin", "python3", 'echo "headstart: the SuperLink refused" >&2; exit 1')
    done = shell(listening / "run.sh", tmp_path / "bin", tmp_path)
    assert (done.returncode, done.stderr) == (1, "headstart: the SuperLink refused\n")


def test_run_shows_why_a_run_is_refused(listening: Path, tmp_path: Path) -> None:
    stand_in(tmp_path / "bin", "python3", "")
    stand_in(tmp_path / "bin", "flwr", """[[ $1 != run ]] || echo '{"success": false, "error-message": "no"}'""")
    done = shell(listening / "run.sh", tmp_path / "bin", tmp_path)
    assert (done.returncode, done.stderr) == (1, '{"success": false, "error-message": "no"}\n')


def test_run_says_that_a_run_is_finished(listening: Path, tmp_path: Path) -> None:
    (listening / "run").mkdir()
    (listening / "run" / "summary.json").write_text("{}")
    stand_in(tmp_path / "bin", "flwr", "exit 1")
    done = shell(listening / "run.sh", tmp_path / "bin", tmp_path)
    finished = f"the run in {listening}/run is finished; another one needs another out in run.sh\n"
    assert (done.returncode, done.stdout) == (0, finished)


def test_run_waits_for_the_server(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    init(tmp_path / "federation", RECIPE, NODES, "127.0.0.1", port)
    stand_in(tmp_path / "bin", "python3", "echo asked >&2; exit 1")
    environment = {"PATH": f"{tmp_path / 'bin'}:/usr/bin:/bin"}
    process = subprocess.Popen([tmp_path / "federation/run.sh"], env=environment, text=True, stderr=subprocess.PIPE)
    assert process.stderr is not None
    assert process.stderr.readline() == f"waiting for the SuperLink at 127.0.0.1:{port}\n"
    with socket.create_server(("127.0.0.1", port)):
        assert process.communicate(timeout=30)[1].splitlines()[-1] == "asked"


def test_without_cryptography_the_missing_extra_is_named() -> None:
    code = "import sys; sys.modules['cryptography'] = None; import headstart.deploy.folder"
    done = subprocess.run([sys.executable, "-c", code], text=True, capture_output=True)
    assert "HeadstartError: headstart deploy: Flower is missing; install headstart[federation]" in done.stderr
