"""The command as a user meets it: exit status 0, or 2 and a sentence."""

import errno
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from headstart import cli
from tests.command import Command

GOOD = """
name = "digits"
[data]
dataset = "digits"
[data.partition]
kind = "dirichlet"
clients = 10
[model]
backbone = "features"
[[stages]]
method = "fedcof"
"""


def headstart(*arguments: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "headstart.cli", *map(str, arguments)]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=120)


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "recipe.toml"
    path.write_text(GOOD)
    return path


def npz(path: Path, **changes: np.ndarray) -> None:
    rng = np.random.default_rng(0)
    arrays = {"X": rng.normal(size=(60, 4)), "y": np.arange(60) % 3, "split": np.repeat([0, 2], 30)} | changes
    np.savez(path, **arrays)


def test_run_prints_a_table_and_leaves_a_directory(recipe: Path, tmp_path: Path) -> None:
    done = headstart("run", recipe, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert all(word in done.stdout for word in ("fedcof", "accuracy", "rounds", "seconds", "runs/digits"))
    again = headstart("run", recipe, "--set", "stages.0.shrinkage=0.1", cwd=tmp_path)
    assert again.returncode == 0
    assert "fedcof γ 0.1" in again.stdout
    assert json.loads((tmp_path / "runs" / "digits-2" / "summary.json").read_text())["stages"][0]["chosen"] == {
        "shrinkage": 0.1, "means_share": 1.0
    }  # fmt: skip


def test_partition_draws_who_holds_which_class(recipe: Path, tmp_path: Path, command: Command) -> None:
    done = command("partition", recipe, "--out", "map.png", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "client-9" in done.stdout
    assert "8 of 1,438 training examples are not assigned to any client" in done.stdout
    assert Image.open(tmp_path / "map.png").size[0] > 500
    assert command("partition", recipe, "--out", "map.svg", cwd=tmp_path).returncode == 0
    assert "<svg" in (tmp_path / "map.svg").read_text()
    for out, why in (("map.png", "already exists"), ("map.bmp", "ends in .png"), ("no/map.png", "no directory")):
        refused = command("partition", recipe, "--out", out, cwd=tmp_path)
        assert refused.returncode == 2
        assert why in refused.stderr


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("methods", ["fedncm", "fed3r", "fedcof", "shrinkage = 'auto'", "beta1 = 0.9", "epsilon = 0.001"]),
        ("methods fedavg", ["Local SGD, then the mean", "required", "Random horizontal flips", "a number > 0"]),
        ("keys", ["data.partition.shards", "stages.privacy", "fedcof"]),
        ("keys data", ["dataset", "required", "a number > 0 and < 1", "Keep a class-balanced"]),
        ("keys data.partition.dirichlet", ["alpha", "0.1", "'report' or 'assign'"]),
        ("keys model", ["backbone", "'efficientnet-lite0'", "'squash' or a whole number > 0"]),
        ("backbones", ["efficientnet-lite0", "1280", "all-MiniLM-L6-v2", "headstart[timm]"]),
        ("datasets", ["mnist-mini", "inaturalist-users-120k", "user_id", "uoft-cs/cifar10"]),
    ],
)
def test_lists(name: str, words: list[str], tmp_path: Path, command: Command) -> None:
    done = command(*name.split(), cwd=tmp_path)
    assert done.returncode == 0
    for word in words:
        assert word in done.stdout


def test_no_such_method(tmp_path: Path, command: Command) -> None:
    done = command("methods", "fedmez", cwd=tmp_path)
    assert done.returncode == 2
    assert "did you mean 'fedmezo'" in done.stderr


def bad_images(folder: Path) -> None:
    for label in ("cat", "dog"):
        (folder / label).mkdir(parents=True)
        for number in range(5):
            Image.new("RGB", (8, 8), (number, 0, 0)).save(folder / label / f"{number}.png")
    (folder / "dog" / "3.png").write_bytes(b"not an image")


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        (["stages.0.shrinkag=1"], "did you mean 'shrinkage'"),
        (["stages.0.shrinkage=plenty", "seed=-1"], "2 problems"),
        (["data.dataset=absent.npz"], "absent.npz"),
        (["data.dataset=digitz"], "did you mean 'digits'"),
        (["data.dataset=nan.npz"], "NaN, infinity"),
        (["data.dataset=labels.npz"], "label -1 at row 5 is out of range"),
        (["data.dataset=one.npz"], "one class only"),
        (["data.dataset=empty.npz"], "non-empty matrix"),
        (["data.dataset=junk.npz"], "not an .npz file"),
        (["data.partition.clients=100000"], "at most 1438 clients"),
        (["data.dataset=natural.npz", "data.partition={kind='natural', min_examples=99}"], "widen the limits"),
        (["model.backbone=efficientnet", "data.dataset=mnist-mini"], "did you mean 'efficientnet-lite"),
        (["model.weights=no.safetensors", "model.backbone=resnet18", "data.dataset=mnist-mini"], "there is no file"),
        (["data.dataset=images", "model.backbone=efficientnet-lite0", "data.partition.clients=2"], "3.png"),
        (["stages.²=1"], "stages has 1 entries, numbered from 0, not '²'"),
        ([f"stages.0.shrinkage=1{'0' * 5000}"], "stages.0.shrinkage: "),
        ([f"a{'.a' * 3000}=1"], "recipe.toml: tables and lists are nested more than 50 deep"),
        (['clients.trace="a\\u0000b"'], "clients.trace: no path has a NUL character (got 'a\\x00b')"),
        (['data.dataset="a\\u0000b"'], "data.dataset: 'a\\x00b' is neither"),
        (["model.backbone=\udcff"], "'model.backbone=\\udcff': this is not valid UTF-8"),
    ],
)  # fmt: skip
def test_a_mistake_is_a_sentence_and_touches_nothing(
    settings: list[str], why: str, recipe: Path, tmp_path: Path, command: Command
) -> None:
    npz(tmp_path / "nan.npz", X=np.full((60, 4), np.nan))
    npz(tmp_path / "labels.npz", y=np.where(np.arange(60) == 5, -1, 0))
    npz(tmp_path / "one.npz", y=np.zeros(60, np.int64))
    npz(tmp_path / "empty.npz", X=np.zeros((0, 4)))
    npz(tmp_path / "natural.npz", client=np.arange(60) % 4)
    (tmp_path / "junk.npz").write_bytes(b"junk")
    bad_images(tmp_path / "images")
    before = sorted(path.name for path in tmp_path.iterdir())
    flags = [word for setting in settings for word in ("--set", setting)]
    done = command("run", recipe, "--out", "run", *flags, cwd=tmp_path)
    assert done.returncode == 2, done.stdout + done.stderr
    assert why in done.stderr
    assert "Traceback" not in done.stderr
    assert sorted(path.name for path in tmp_path.iterdir() if path.name != "cache") == before


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (f"x = {'[' * 5000}{']' * 5000}", "bad.toml is not valid TOML: tables or lists are nested too deep"),
        (f"{'.'.join('a' * 5000)} = 1", "bad.toml: tables and lists are nested more than 50 deep"),
        (f"seed = 1{'0' * 5000}", "bad.toml is not valid TOML: a number has too many digits"),
    ],
)
@pytest.mark.parametrize("name", ["check", "compare"])
def test_a_recipe_that_python_cannot_hold_is_a_sentence(
    name: str, text: str, why: str, tmp_path: Path, command: Command
) -> None:
    (tmp_path / "bad.toml").write_text(text)
    done = command(name, "bad.toml", cwd=tmp_path)
    assert done.returncode == 2
    assert why in done.stderr


@pytest.mark.parametrize("name", ["advise", "new"])
def test_a_path_that_a_recipe_cannot_name_is_a_sentence(name: str, tmp_path: Path, command: Command) -> None:
    try:
        (tmp_path / "\udcff").mkdir()
    except OSError:
        pytest.skip("names are valid UTF-8 here")
    done = command(name, "\udcff", cwd=tmp_path)
    assert done.returncode == 2
    assert "'\\udcff': this is not valid UTF-8, and a recipe has to be; rename it" in done.stderr


def test_no_data_are_none_to_advise_on(tmp_path: Path, command: Command) -> None:
    done = command("advise", "", cwd=tmp_path)
    assert (done.returncode, done.stderr.startswith("headstart: which data?")) == (2, True)


@pytest.mark.parametrize("port", [-1, 70000])
def test_a_port_that_is_none_is_refused(port: int, tmp_path: Path, command: Command) -> None:
    done = command("dashboard", tmp_path, "--port", port, cwd=tmp_path)
    assert done.returncode == 2
    assert f"{port} is not in the range" in done.stderr


@pytest.mark.parametrize("words", ["export run --out ring", "report run --out ring/x", "replay run --out ring"])
def test_links_that_lead_to_themselves_are_a_sentence(words: str, tmp_path: Path, command: Command) -> None:
    (tmp_path / "ring").symlink_to("ring")
    done = command(*words.split(), cwd=tmp_path)
    assert done.returncode == 2
    assert "Too many levels of symbolic links" in done.stderr


def test_a_used_output_directory_is_refused(recipe: Path, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "thesis.tex").write_text("precious")
    done = headstart("run", recipe, "--out", "run", cwd=tmp_path)
    assert done.returncode == 2
    assert "already used" in done.stderr
    assert (tmp_path / "run" / "thesis.tex").read_text() == "precious"


def test_an_unwritable_output_is_refused(recipe: Path, tmp_path: Path, command: Command) -> None:
    done = command("run", recipe, "--out", recipe / "run", cwd=tmp_path)
    assert done.returncode == 2
    assert "cannot write there" in done.stderr


@pytest.mark.parametrize(
    "words",
    ["report LONG", "update LONG", "predict LONG x.npz", "export LONG --out x", "dashboard LONG --port 0",
     "new LONG --out new.toml", "run recipe.toml --out LONG", "run --resume --out LONG", "schema --out LONG",
     "compare recipe.toml --out LONG", "partition recipe.toml --out LONG.png", "reproduce --formulas --out LONG",
     "deploy add LONG", "node ledger LONG", "node init LONG --name a", "server LONG"],
)  # fmt: skip
def test_a_place_that_the_system_refuses_is_a_sentence(
    words: str, recipe: Path, tmp_path: Path, command: Command
) -> None:
    if words.startswith(("deploy", "node", "server")):
        pytest.importorskip("flwr")
    done = command(*words.replace("LONG", "x" * 300).split(), cwd=tmp_path)
    status = 1 if words.startswith("server") else 2  # what may pass: its unit starts it again
    assert (done.returncode, done.stderr.count("\n")) == (status, 1), done.stderr
    assert done.stderr.startswith("headstart: ")
    assert "x" * 300 in done.stderr
    assert "File name too long" in done.stderr


@pytest.mark.parametrize("words", ["report {} --out {}", "replay run --out {}", "reproduce --formulas --out {}"])
def test_a_file_in_the_place_of_a_folder_is_refused(words: str, tmp_path: Path, command: Command) -> None:
    (tmp_path / "notes").write_text("precious")
    done = command(*words.replace("{}", "notes").split(), cwd=tmp_path)
    assert (done.returncode, done.stderr) == (2, "headstart: --out notes: this is a file; give a folder\n")
    assert (tmp_path / "notes").read_text() == "precious"


@pytest.mark.parametrize(
    ("words", "named"),
    [("schema --out schema.json", "schema.json"), ("partition recipe.toml --out map.png", "map.png"),
     ("reproduce --formulas --out rows", "rows/reproduce.html"), ("node init node --name a", "node/")],
)  # fmt: skip
def test_a_full_disk_is_a_sentence_with_the_file(
    words: str, named: str, recipe: Path, tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    if words.startswith("node"):
        pytest.importorskip("flwr")

    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    done = command(*words.split(), cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith(f"headstart: {named}"), done.stderr
    assert "No space left on device; make room and start again; a run that left a checkpoint goes on" in done.stderr


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no such device")
@pytest.mark.parametrize("words", ["--version", "keys"])
def test_output_that_nobody_takes_is_no_success(words: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "headstart.cli", words]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=120)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert done.stderr.startswith("headstart: standard output: No space left on device; make room")
    reads, writes = os.pipe()
    os.close(reads)
    gone = subprocess.run(command, stdout=writes, stderr=subprocess.PIPE, text=True, timeout=120)
    os.close(writes)
    assert (gone.returncode, gone.stderr) == (1, "")


def test_an_error_that_no_disk_reports_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong() -> None:
        raise OSError("a mistake of the program")

    monkeypatch.setattr(cli, "app", wrong)
    with pytest.raises(OSError, match="a mistake of the program"):
        cli.main()


def test_ctrl_c_says_how_to_go_on_and_going_on_ends_where_it_would_have(recipe: Path, tmp_path: Path) -> None:
    recipe.write_text(GOOD + '[[stages]]\nmethod = "fedavg"\ntrain = "head"\nrounds = 500\nlr = 0.1\n')
    whole = headstart("run", recipe, "--out", "whole", cwd=tmp_path)
    assert whole.returncode == 0, whole.stderr
    command = Path(sys.executable).with_name("headstart")  # `python -m` may end by the signal itself, a shell's 130
    process = subprocess.Popen(
        [command, "run", recipe, "--out", "cut"], cwd=tmp_path, stderr=subprocess.PIPE, text=True
    )
    metrics = tmp_path / "cut" / "metrics.jsonl"
    while not (metrics.is_file() and metrics.read_text().count("\n") > 1) and process.poll() is None:
        time.sleep(0.05)  # until the second stage is under way: a run without a checkpoint leaves nothing
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "interrupted; continue with headstart run --resume --out cut" in said
    assert "Traceback" not in said
    assert not (tmp_path / "cut" / "summary.json").exists()
    recipe.unlink()  # the run has its own
    done = headstart("run", "--resume", "--out", "cut", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    heads = [(tmp_path / name / "model" / "head.safetensors").read_bytes() for name in ("whole", "cut")]
    assert heads[0] == heads[1]


@pytest.mark.parametrize(
    "lines",
    [
        # Python only prints what a finaliser raises
        "class File: pass\nfile = File()\nweakref.finalize(file, signal.raise_signal, signal.SIGINT)\ndel file",
        # torch ends the process if its import is interrupted
        "import slow",
    ],
)
def test_ctrl_c_waits_where_it_would_be_lost(lines: str, tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(
        "import signal\ntry:\n    signal.raise_signal(signal.SIGINT)\nexcept KeyboardInterrupt:\n    print('lost')\n"
    )
    program = (
        "import pathlib, signal, time, weakref\nfrom headstart.cli.shared import interruptible\n"
        "with interruptible(pathlib.Path(), 'headstart run --resume'):\n"
    )
    program += textwrap.indent(f"{lines}\ntime.sleep(60)\n", "    ")
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=50)
    assert (done.returncode, done.stdout) == (130, "")
    assert done.stderr == "\nheadstart: interrupted; continue with headstart run --resume --out .\n"


def test_reports_of_runs_and_where_there_is_none(recipe: Path, tmp_path: Path, command: Command) -> None:
    assert command("run", recipe, "--out", "runs/one", cwd=tmp_path).returncode == 0
    assert command("run", recipe, "--out", "runs/two", "--set", "seed=1", cwd=tmp_path).returncode == 0
    done = command("report", "runs", "--out", "both", cwd=tmp_path)
    assert done.returncode == 0
    assert "open both/report.html" in done.stdout
    assert "<td>2</td>" in (tmp_path / "both" / "report.html").read_text()  # two seeds are one row
    assert command("report", "runs/one", cwd=tmp_path).returncode == 0
    assert (tmp_path / "runs" / "one" / "figures" / "confusion.svg").is_file()
    (tmp_path / "empty").mkdir()
    for folder, why in (("empty", "there is no run"), ("nowhere", "no such directory"), ("emptiy", "'empty'?")):
        for name in ("report", "dashboard"):
            if (folder, name) != ("empty", "dashboard"):  # runs may come
                done = command(name, folder, cwd=tmp_path)
                assert (done.returncode, why in done.stderr) == (2, True), done.stderr


def test_usage_errors_have_status_two(tmp_path: Path) -> None:
    assert headstart("run", cwd=tmp_path).returncode == 2
    assert headstart("fly", cwd=tmp_path).returncode == 2
    assert headstart("run", "absent.toml", cwd=tmp_path).returncode == 2


def test_every_key_of_every_table_is_explained_and_required_ones_come_first() -> None:
    from headstart.config.describe import keys_of, tables

    for table in tables():
        _, rows = keys_of(table)
        assert not [row[0] for row in rows if not row[3]], table
        assert not [row[0] for row in rows if not row[1]], table
        needed = [row[2] == "required" for row in rows]
        assert needed == sorted(needed, reverse=True), table


def test_no_such_table(tmp_path: Path, command: Command) -> None:
    done = command("keys", "data.partition.shard", cwd=tmp_path)
    assert done.returncode == 2
    assert "did you mean 'data.partition.shards'" in done.stderr


def test_the_schema_takes_recipes_and_refuses_mistakes(recipe: Path, tmp_path: Path, command: Command) -> None:
    import tomllib

    import jsonschema

    done = command("schema", "--out", "recipe.schema.json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    schema = json.loads((tmp_path / "recipe.schema.json").read_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    root = Path(__file__).parents[2]
    published = json.loads((root / "docs/recipe.schema.json").read_text(encoding="utf-8"))
    assert published == schema, "write it anew: headstart schema > docs/recipe.schema.json"
    valid = jsonschema.Draft202012Validator(schema).is_valid
    recipes = sorted((root / "recipes").glob("*.toml"))
    for path in recipes:
        text = path.read_text(encoding="utf-8")
        assert text.startswith("#:schema ../docs/recipe.schema.json\n"), path
        assert valid(tomllib.loads(text)), path
    table = tomllib.loads(GOOD)
    assert valid(table)
    assert not valid({**table, "stages": [{"method": "fedcof", "shrinkag": 1.0}]})
    assert not valid({**table, "stages": [{"method": "fedcov"}]})
    assert not valid({**table, "sed": 3})
    assert not valid({**table, "data": {"dataset": "digits", "partition": {"kind": "iid", "clients": 0}}})


def test_a_key_is_unset(recipe: Path, tmp_path: Path, command: Command) -> None:
    import tomllib

    recipe.write_text(GOOD + "shrinkage = 0.5\n")
    done = command("run", recipe, "--set", "stages.0.shrinkage=", "--out", "run", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    saved = tomllib.loads((tmp_path / "run" / "recipe.toml").read_text())
    assert saved["stages"][0]["shrinkage"] == "auto"
    done = command("run", recipe, "--set", "stages.0.shrinkag=", cwd=tmp_path)
    assert done.returncode == 2
    assert "--set stages.0.shrinkag=: there is no such key to unset" in done.stderr


def test_quiet_and_verbose(recipe: Path, tmp_path: Path, command: Command) -> None:
    done = command("run", recipe, "--quiet", "--out", "quiet", cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert "finished" in (tmp_path / "quiet" / "run.log").read_text()
    done = command("run", recipe, "--verbose", "--out", "verbose", cwd=tmp_path)
    assert done.returncode == 0
    assert "stage 0, fedcof, round 1" in done.stderr
    done = command("run", recipe, "--quiet", "--set", "seed=-1", cwd=tmp_path)
    assert (done.returncode, "seed" in done.stderr) == (2, True)


METHOD = """
from typing import Literal
import headstart
from headstart.config.stage import ClosedFormStage
from headstart.methods.fedncm import FedNCM, FedNCMStage

class MineStage(FedNCMStage):
    \"\"\"The nearest mean, once more.\"\"\"

    method: Literal["mine"]

headstart.register(MineStage, FedNCM)
headstart.register_aggregation("first", lambda updates, weights: {name: each[0] for name, each in updates.items()})
"""


@pytest.mark.parametrize("name", ["my_methods", "my_methods.py"])
def test_a_method_is_imported_and_its_report_needs_no_registration(name: str, recipe: Path, tmp_path: Path) -> None:
    (tmp_path / "my_methods.py").write_text(METHOD)
    training = '{method = "fedavg", train = "head", rounds = 1, combine = "first"}'
    change = ("--set", f'stages=[{{method = "mine"}}, {training}]')
    assert "'mine' is not known" in headstart("run", recipe, *change, cwd=tmp_path).stderr
    done = headstart("run", recipe, *change, "--import", name, "--out", "run", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    done = headstart("report", "run", "--out", "page", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "page" / "report.html").read_text()
    assert "mine" in page
    assert "combine = &quot;first&quot;" in page
    done = headstart("methods", "mine", "--import", name, cwd=tmp_path)
    assert "The nearest mean, once more" in done.stdout


def test_a_module_that_does_not_import_is_a_sentence(recipe: Path, tmp_path: Path, command: Command) -> None:
    (tmp_path / "broken.py").write_text("1 / 0\n")
    for name, why in (
        ("absent", "ModuleNotFoundError"),
        ("borken.py", "it is not there; did you mean 'broken.py'?"),
        ("broken.py", "ZeroDivisionError: division by zero"),
    ):
        done = command("run", recipe, "--import", name, cwd=tmp_path)
        assert done.returncode == 2
        assert f"--import {name}: {why}" in done.stderr


def test_resume_without_a_recipe_needs_a_run(tmp_path: Path, command: Command) -> None:
    for arguments, why in (
        ([], "which recipe?"),
        (["--resume"], "needs --out"),
        (["--resume", "--out", "no"], "no run"),
    ):
        done = command("run", *arguments, cwd=tmp_path)
        assert (done.returncode, why in done.stderr) == (2, True), done.stderr


def test_a_shell_completes_commands_and_methods(tmp_path: Path) -> None:
    import os

    def completed(words: str) -> list[str]:
        asked = {"_HEADSTART_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
        code = "import sys; sys.argv = ['headstart']; from headstart.cli import app; app(prog_name='headstart')"
        done = subprocess.run(
            [sys.executable, "-c", code],
            env=os.environ | asked,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )
        return done.stdout.split()

    assert {"report", "reproduce", "replay"} <= {*completed("headstart re")}
    assert completed("headstart methods fedc") == ["fedcof"]
