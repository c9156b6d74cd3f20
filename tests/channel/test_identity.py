"""Keys that clients know each other by, read from OpenSSH's files, and what is refused of them."""

import shutil
import subprocess
from pathlib import Path

import pytest

pytest.importorskip("cryptography")

from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
)  # fmt: skip

from headstart.channel.secure import Identity
from headstart.errors import HeadstartError

NAMES = ("a", "b-2", "c")


def line(key: Ed25519PrivateKey) -> str:
    return key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH).decode()


@pytest.fixture
def keys(tmp_path: Path) -> dict[str, Ed25519PrivateKey]:
    found = {name: Ed25519PrivateKey.generate() for name in NAMES}
    for name, key in found.items():
        (tmp_path / name).write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption()))
    (tmp_path / "peers").write_text("".join(f"{name} {line(key)} {name}@host\n\n" for name, key in found.items()))
    return found


def load(folder: Path, name: str = "b-2", key: str | None = None) -> Identity:
    return Identity.load(folder / (key or name), folder / "peers", name)


def test_a_nodes_number_is_its_place_in_the_list(tmp_path: Path, keys: dict[str, Ed25519PrivateKey]) -> None:
    found = [load(tmp_path, name) for name in NAMES]
    assert [one.number for one in found] == [0, 1, 2]
    assert found[0].peers == {n: key.public_key().public_bytes_raw() for n, key in enumerate(keys.values())}
    signature = found[2].sign(b"message")
    assert [found[0].signed_by(number, signature, b"message") for number in (0, 1, 2, 3)] == [False, False, True, False]
    assert not found[0].signed_by(2, signature, b"another message")
    assert not found[0].signed_by(2, signature[:-1], b"message")


@pytest.mark.skipif(not shutil.which("ssh-keygen"), reason="OpenSSH is not installed")
def test_keys_of_openssh_are_read(tmp_path: Path) -> None:
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(tmp_path / "a")], check=True)
    (tmp_path / "peers").write_text("a " + (tmp_path / "a.pub").read_text())
    assert load(tmp_path, "a").number == 0


def test_mistakes_are_named(tmp_path: Path, keys: dict[str, Ed25519PrivateKey]) -> None:
    with pytest.raises(HeadstartError, match="has no line for 'd'; it lists a, b-2, c"):
        load(tmp_path, "d")
    with pytest.raises(HeadstartError, match=r"is not the private key of what .* lists for b-2"):
        load(tmp_path, "b-2", key="c")
    with pytest.raises(HeadstartError, match="nowhere is not an OpenSSH private key"):
        load(tmp_path, "b-2", key="nowhere")
    curve = ec.generate_private_key(ec.SECP384R1()).private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption())
    (tmp_path / "curve").write_bytes(curve)
    with pytest.raises(HeadstartError, match="curve is no Ed25519 key; make one with ssh-keygen -t ed25519"):
        load(tmp_path, "b-2", key="curve")
    locked = keys["a"].private_bytes(Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"secret"))
    (tmp_path / "locked").write_bytes(locked)
    with pytest.raises(HeadstartError, match="without a passphrase"):
        load(tmp_path, "b-2", key="locked")
    (tmp_path / "peers").unlink()
    with pytest.raises(HeadstartError, match="the list of peers cannot be read"):
        load(tmp_path)


@pytest.mark.parametrize("wrong", ["d", "d ssh-ed25519", "d ssh-ed25519 AAAA", "d ecdsa-sha2-nistp384 AAAA"])
def test_lines_that_name_no_key_are_refused(tmp_path: Path, keys: dict[str, Ed25519PrivateKey], wrong: str) -> None:
    with (tmp_path / "peers").open("a") as file:
        file.write(wrong + "\n")
    with pytest.raises(HeadstartError, match="peers, line 7: a line is NAME ssh-ed25519 AAAA…, not 'd"):
        load(tmp_path)


@pytest.mark.parametrize(("name", "of"), [("a", "new"), ("d", "a")])
def test_nobody_is_listed_twice(tmp_path: Path, keys: dict[str, Ed25519PrivateKey], name: str, of: str) -> None:
    """Whoever is two of the peers has two voices."""
    key = keys.get(of) or Ed25519PrivateKey.generate()
    with (tmp_path / "peers").open("a") as file:
        file.write(f"{name} {line(key)}\n")
    with pytest.raises(HeadstartError, match="line 7: every node has one line and a key of its own"):
        load(tmp_path)


def test_keys_of_a_simulation_are_the_same_for_all_who_know_the_session() -> None:
    first, second = Identity.derived(b"s", 3), Identity.derived(b"s", 4)
    assert second.signed_by(3, first.sign(b"message"), b"message")
    assert not second.signed_by(4, first.sign(b"message"), b"message")
    assert not Identity.derived(b"t", 4).signed_by(3, first.sign(b"message"), b"message")
