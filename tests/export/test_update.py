"""A head that lives: clients come and go, classes are added, and what is left has the bits of those that stayed."""

import json
import shutil
import stat
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file
from sklearn.datasets import load_digits
from sklearn.metrics import r2_score

from headstart.config.recipe import Recipe
from headstart.core.message import Message
from headstart.errors import HeadstartError
from headstart.export import Model, update
from headstart.runner import run
from tests.command import Command
from tests.disk import FAULTS, Disk, Fault, Killed, contents

pytestmark = pytest.mark.usefixtures("no_report")

STAGES: dict[str, dict[str, Any]] = {
    "fedncm": {"method": "fedncm"},
    "fed3r": {"method": "fed3r"},
    "fed3r-lda": {"method": "fed3r", "head": "lda"},
    "fed3r-random": {"method": "fed3r", "random_features": 20},
    "fedcof": {"method": "fedcof"},
    "fedcof-means": {"method": "fedcof", "means_per_client": 2},
    "fedcof-rank": {"method": "fedcof", "within": "diagonal", "rank": 3},
}
NAMES = ("a", "b", "c", "d")


@pytest.fixture(scope="module")
def silos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Digits below 9 at four clients: all of them, all but each one, and each alone; a fifth has nines only."""
    folder = tmp_path_factory.mktemp("silos")
    x, y = load_digits(return_X_y=True)
    x, rng = x.astype(np.float32), np.random.default_rng(0)
    owner, split = rng.integers(0, 4, len(y)), np.where(np.arange(len(y)) % 5 == 0, 2, 0)

    def save(name: str, mine: np.ndarray, **more: Any) -> None:
        np.savez(folder / f"{name}.npz", X=x[mine], y=y[mine], split=split[mine], **more)

    save("all", y < 9, client=owner[y < 9])
    for number, name in enumerate(NAMES):
        save(name, (owner == number) & (y < 9))
        others = ((owner != number) | (split == 2)) & (y < 9)
        save(f"without-{name}", others, client=owner[others])
    save("e", (y == 9) | ((y < 9) & (owner == 0)))
    return folder


def recipe_of(silos: Path, name: str, **keys: Any) -> Recipe:
    data = {"dataset": str(silos / f"{name}.npz"), "partition": {"kind": "natural"}}
    return Recipe.parse(
        {"data": data, "model": {"backbone": "features"}, "stages": [{"keep_statistics": True, **keys}]}
    )


def head(run: Path) -> dict[str, bytes]:
    return {name: array.tobytes() for name, array in load_file(run / "model" / "head.safetensors").items()}


@pytest.mark.parametrize("keys", [{}, {"clients_per_round": 3}])
@pytest.mark.parametrize("kind", STAGES)
def test_a_removed_client_was_never_there(kind: str, keys: dict[str, Any], silos: Path, tmp_path: Path) -> None:
    """To the bit, whatever its number was, and whatever the rounds in which clients were heard."""
    run(recipe_of(silos, "all", **STAGES[kind], **keys), tmp_path / "run")
    run(recipe_of(silos, "without-d", **STAGES[kind]), tmp_path / "never")
    assert head(tmp_path / "run") != head(tmp_path / "never")
    found = update(tmp_path / "run", remove=["3"])
    assert found.clients == ("0", "1", "2")
    assert head(tmp_path / "run") == head(tmp_path / "never")
    assert found.examples == int(np.load(silos / "without-d.npz")["split"].tolist().count(0))
    # Nothing of it is left in what the head is made of.
    kept = Message.from_bytes((tmp_path / "run" / "checkpoint" / "statistics-0.safetensors").read_bytes())
    assert {name.split("/")[1] for name in kept.arrays if name.startswith("clients/")} == {"0", "1", "2"}


@pytest.mark.parametrize("kind", ["fedncm", "fed3r", "fedcof"])
@pytest.mark.parametrize("number", range(3))
def test_removing_any_other_client(kind: str, number: int, silos: Path, tmp_path: Path) -> None:
    run(recipe_of(silos, "all", **STAGES[kind]), tmp_path / "run")
    run(recipe_of(silos, f"without-{NAMES[number]}", **STAGES[kind]), tmp_path / "never")
    update(tmp_path / "run", remove=[str(number)])
    assert head(tmp_path / "run") == head(tmp_path / "never")


@pytest.mark.parametrize("kind", STAGES)
def test_a_client_that_comes_later_and_one_that_comes_and_goes(kind: str, silos: Path, tmp_path: Path) -> None:
    run(recipe_of(silos, "without-d", **STAGES[kind]), tmp_path / "run")
    run(recipe_of(silos, "all", **STAGES[kind]), tmp_path / "all")
    before = head(tmp_path / "run")
    assert update(tmp_path / "run", add={"late": str(silos / "d.npz")}).clients == ("0", "1", "2", "late")
    assert head(tmp_path / "run") == head(tmp_path / "all")  # its number is the one that it has there
    update(tmp_path / "run", remove=["late"])
    assert head(tmp_path / "run") == before
    noted = json.loads((tmp_path / "run" / "summary.json").read_text())["updates"]
    assert [(each["added"], each["removed"], each["clients"]) for each in noted] == [
        (["late"], [], 4),
        ([], ["late"], 3),
    ]


@pytest.mark.parametrize("kind", ["fedncm", "fed3r", "fedcof"])
def test_a_class_that_comes_later(kind: str, silos: Path, tmp_path: Path) -> None:
    run(recipe_of(silos, "all", **STAGES[kind]), tmp_path / "run")
    update(tmp_path / "run", add={"e": str(silos / "e.npz")}, classes=["9"])
    model, test = Model.load(tmp_path / "run"), np.load(silos / "e.npz")
    assert model.classes == tuple("0123456789")
    mine = (test["split"] == 2) & (test["y"] == 9)
    assert (model.head.scores(test["X"][mine]).argmax(axis=1) == 9).mean() > 0.7
    update(tmp_path / "run", remove=["e"])
    assert np.isneginf(Model.load(tmp_path / "run").head.bias[9])  # nobody has it any more
    assert (Model.load(tmp_path / "run").head.scores(test["X"]).argmax(axis=1) < 9).all()


def test_statistics_are_for_their_owner_only_and_there_only_where_they_were_asked_for(
    silos: Path, tmp_path: Path
) -> None:
    run(recipe_of(silos, "all", method="fedncm"), tmp_path / "run")
    kept = tmp_path / "run" / "checkpoint" / "statistics-0.safetensors"
    assert stat.S_IMODE(kept.stat().st_mode) == 0o600
    update(tmp_path / "run", remove=["0"])
    assert stat.S_IMODE(kept.stat().st_mode) == 0o600
    run(recipe_of(silos, "all", method="fedncm", keep_statistics=False), tmp_path / "plain")
    assert not list((tmp_path / "plain" / "checkpoint").glob("statistics*"))
    with pytest.raises(HeadstartError, match="no client's statistics were kept"):
        update(tmp_path / "plain")


def test_an_update_that_was_interrupted_is_finished(
    silos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(recipe_of(silos, "all", method="fed3r"), tmp_path / "run")
    run(recipe_of(silos, "without-d", method="fed3r"), tmp_path / "never")
    with monkeypatch.context() as patch:
        patch.setattr("headstart.records.RunDirectory.save_model", lambda *_: (_ for _ in ()).throw(OSError("power")))
        with pytest.raises(OSError, match="power"):
            update(tmp_path / "run", remove=["3"])
    update(tmp_path / "run")
    assert head(tmp_path / "run") == head(tmp_path / "never")


def test_an_update_that_was_struck_anywhere_is_finished_and_noted_once(silos: Path, tmp_path: Path) -> None:
    run(recipe_of(silos, "all", method="fedncm"), tmp_path / "run")
    update(tmp_path / "run", remove=["1"])
    before = contents(tmp_path / "run")

    def struck(fault: Fault, at: int) -> tuple[Path, int]:
        root = tmp_path / f"{fault}-{at}"
        shutil.copytree(tmp_path / "run", root)
        with pytest.MonkeyPatch.context() as patch:
            disk = Disk(root, patch, fault, at)
            with suppress(Killed, OSError):
                update(root, {"e": str(silos / "e.npz")}, ["3"], ["9"])
        if fault == "power":
            disk.cut_power()
        return root, disk.done

    whole, count = struck("killed", 1 << 40)
    after, begun = contents(whole), 0
    (_, asked) = json.loads(after["summary.json"])["updates"]
    assert (asked["added"], asked["removed"], asked["classes"]) == (["e"], ["3"], ["9"])
    for fault in FAULTS:
        for at in range(1, count + 1):
            root, _ = struck(fault, at)
            update(root)
            assert contents(root) in (before, after), f"{fault} at {at}"
            begun += contents(root) == after
    assert begun > count


def test_resuming_an_updated_run_leaves_the_update(silos: Path, tmp_path: Path) -> None:
    recipe = recipe_of(silos, "all", method="fed3r")
    run(recipe, tmp_path / "run")
    update(tmp_path / "run", add={"e": str(silos / "e.npz")}, classes=["9"])
    before = contents(tmp_path / "run")
    again = run(recipe, tmp_path / "run", resume=True)
    assert contents(tmp_path / "run") == before
    assert (len(again.head.bias), len(again.summary["updates"])) == (10, 1)
    (tmp_path / "run" / "model" / "head.safetensors").unlink()
    with pytest.raises(HeadstartError, match="put it back from a copy"):
        run(recipe, tmp_path / "run", resume=True)


def test_mistakes_are_said_at_once_and_change_nothing(silos: Path, tmp_path: Path, command: Command) -> None:
    run(recipe_of(silos, "all", method="fedncm"), tmp_path / "run")
    before = head(tmp_path / "run")
    options = ("--remove", "7", "--add", f"1={silos / 'd.npz'}", "--class", "3")
    done = command("update", tmp_path / "run", *options, cwd=tmp_path)
    assert done.returncode == 2
    for part in ("'7' is no client", "'1' is a client already", "'3' is a class already"):
        assert part in done.stderr
    options = ("--class", "77", "--class", "77", "--class", "", "--remove", "0", "--remove", "0", "--add", "=x.npz")
    done = command("update", tmp_path / "run", *options, cwd=tmp_path)
    assert done.returncode == 2
    for part in (
        "--class: '77' is given more than once", "--class: a name is empty", "--remove: '0' is given more than once",
        "--add: a name is empty",
    ):  # fmt: skip
        assert part in done.stderr
    with pytest.raises(HeadstartError, match="nobody is left"):
        update(tmp_path / "run", remove=list("0123"))
    assert head(tmp_path / "run") == before


def test_a_class_that_nobody_has_is_said(silos: Path, tmp_path: Path, command: Command) -> None:
    run(recipe_of(silos, "all", method="fedcof"), tmp_path / "run")
    done = command("update", tmp_path / "run", "--add", silos / "e.npz", "--class", "nine", cwd=tmp_path)
    assert (done.returncode, "nobody has an example of: nine;" in done.stdout) == (0, True), done.stderr
    assert update(tmp_path / "run", add={"f": str(silos / "e.npz")}, classes=["9"]).empty == ("nine",)


def test_the_command(silos: Path, tmp_path: Path, command: Command) -> None:
    run(recipe_of(silos, "all", method="fedcof"), tmp_path / "run")
    options = ("--add", silos / "e.npz", "--class", "9", "--remove", "0")
    done = command("update", tmp_path / "run", *options, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "4 clients, 10 classes" in done.stdout
    assert Model.load(tmp_path / "run").classes == tuple("0123456789")
    assert "tested on" in done.stdout
    assert "macro-F1" in done.stdout


def test_the_head_before_and_the_head_after_are_tested_on_the_same_examples(silos: Path, tmp_path: Path) -> None:
    """Against predictions of both heads, counted here."""
    run(recipe_of(silos, "all", method="fed3r"), tmp_path / "run")
    old, (own, new) = Model.load(tmp_path / "run").head, (np.load(silos / f"{name}.npz") for name in ("all", "e"))
    x, y = (np.concatenate([part[key][part["split"] == 2] for part in (own, new)]) for key in ("X", "y"))
    found = update(tmp_path / "run", add={"e": str(silos / "e.npz")}, classes=["9"])
    head = Model.load(tmp_path / "run").head
    assert found.test_examples == len(y)
    assert found.before["accuracy"] == pytest.approx((old.scores(x).argmax(axis=1) == y).mean())
    assert found.after["accuracy"] == pytest.approx((head.scores(x).argmax(axis=1) == y).mean())
    assert found.after["balanced_accuracy"] > found.before["balanced_accuracy"]  # type: ignore[operator]
    (noted,) = json.loads((tmp_path / "run" / "summary.json").read_text())["updates"]
    assert (noted["test_examples"], noted["before"], noted["after"]) == (len(y), found.before, found.after)


def test_without_the_runs_data_an_update_is_not_tested(silos: Path, tmp_path: Path, command: Command) -> None:
    (tmp_path / "all.npz").write_bytes((silos / "all.npz").read_bytes())
    run(recipe_of(tmp_path, "all", method="fedncm"), tmp_path / "run")
    (tmp_path / "all.npz").unlink()
    done = command("update", tmp_path / "run", "--remove", "3", cwd=tmp_path)
    assert (done.returncode, "not tested: the run's test split is not here" in done.stdout) == (0, True), done.stderr


def test_numbers_and_labels_come_and_go_too(tmp_path: Path, command: Command) -> None:
    x, y = load_digits(return_X_y=True)
    x, who, split = x.astype(np.float32), np.arange(len(y)) % 3, 2 * (np.arange(len(y)) % 5 == 0)
    targets = np.stack([y + 0.5, x[:, 20] - x[:, 30]], axis=1)
    for name, mine in (("all", who >= 0), ("without-c", (who < 2) | (split == 2)), ("c", who == 2)):
        client = {"client": who[mine]} if name != "c" else {}
        np.savez(tmp_path / f"{name}.npz", X=x[mine], y=targets[mine], split=split[mine], **client)
    run(recipe_of(tmp_path, "all", method="fed3r"), tmp_path / "run")
    run(recipe_of(tmp_path, "without-c", method="fed3r"), tmp_path / "never")
    all_of_them = head(tmp_path / "run")
    found = update(tmp_path / "run", remove=["2"])
    assert head(tmp_path / "run") == head(tmp_path / "never")
    test, predicted = targets[split == 2], Model.load(tmp_path / "run").head.scores(x[split == 2])
    assert found.after["r2"] == pytest.approx(r2_score(test, predicted), rel=1e-5)
    assert update(tmp_path / "run", add={"c": str(tmp_path / "c.npz")}).after["r2"] is not None
    assert head(tmp_path / "run") == all_of_them
    done = command("update", tmp_path / "run", "--class", "more", cwd=tmp_path)
    assert (done.returncode, "are no classes (regression)" in done.stderr) == (2, True)


@pytest.mark.parametrize(
    ("keys", "why"),
    [
        ({"method": "fedncm", "secure": True}, "hidden, and cannot be kept"),
        ({"method": "fedncm", "privacy": {"epsilon": 1.0}}, "hidden, and cannot be kept"),
        ({"method": "fedncm", "centres": 2}, "participate again"),
        ({"method": "fed3r", "temperature": "auto"}, "fitted again"),
    ],
)
def test_what_cannot_be_kept(keys: dict[str, Any], why: str, silos: Path) -> None:
    with pytest.raises(HeadstartError, match=why):
        recipe_of(silos, "all", **keys)
