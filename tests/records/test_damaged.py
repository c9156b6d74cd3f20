"""Files of a run that are damaged or gone: a sentence that names one of them, and nothing is lost beyond it."""

import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headstart.errors import HeadstartError
from headstart.export import Model, update
from headstart.export.replay import replay
from headstart.records import Record, RunDirectory
from headstart.report import report_body
from headstart.runner import Result, run
from tests.disk import contents

pytestmark = pytest.mark.usefixtures("no_report")

BASE: dict[str, Any] = {
    "data": {
        "dataset": "digits", "train_examples": 60, "test_examples": 30, "partition": {"kind": "iid", "clients": 3},
    },
    "model": {"backbone": "features"},
}  # fmt: skip
ROUNDS = {"train": "head", "rounds": 3, "clients_per_round": 2}
STAGES: dict[str, list[dict[str, Any]]] = {
    "cut": [{"method": "fed3r"}, ROUNDS | {"method": "scaffold"}],
    "personal": [ROUNDS | {"method": "fedper", "head": "mlp", "hidden": 4}, {"method": "personalise", "epochs": 1}],
    "mezo": [ROUNDS | {"method": "fedmezo"}],
    "kept": [{"method": "fedncm", "keep_statistics": True}],
}
DAMAGES: dict[str, Callable[[bytes], bytes] | None] = {
    "gone": None,
    "empty": lambda data: b"",
    "half": lambda data: data[: len(data) // 2],
    "noise": lambda data: bytes((7 * place + 13) % 256 for place in range(len(data))),
    "zeros": lambda data: bytes(len(data)),
    "json": lambda data: b"[1]\n",
}
STATES = ("personal.bin", "kept.bin")  # values as they are, which may be any


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of each kind; the one called cut was stopped in its second stage."""
    root = tmp_path_factory.mktemp("runs")

    def stop(line: dict[str, Any]) -> None:
        if (line["stage"], line["round"]) == (1, 3):
            raise KeyboardInterrupt

    for name, stages in STAGES.items():
        with suppress(KeyboardInterrupt):
            run(BASE | {"stages": stages}, root / name, on_metrics=stop if name == "cut" else None)
    return root


def resume(path: Path, name: str) -> object:
    return run(BASE | {"stages": STAGES[name]}, path, resume=True)


def predict(path: Path, name: str) -> object:
    model = Model.load(path, client="0" if name == "personal" else None)
    return model.predict(np.zeros((2, 64), np.float32))


READERS: dict[str, Callable[[Path, str], object]] = {
    "resume": resume,
    "result": lambda path, name: Result.load(path),
    "report": lambda path, name: report_body([Record.read(path)]),
    "predict": predict,
    "replay": lambda path, name: replay(path, path / "replay"),
    "update": lambda path, name: update(path, remove=["client-0"]),
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", STAGES)
def test_what_is_damaged_is_named_or_not_needed(name: str, damage: str, runs: Path, tmp_path: Path) -> None:
    files = [path.relative_to(runs / name) for path in (runs / name).rglob("*") if path.is_file()]
    change, place = DAMAGES[damage], tmp_path / "run"
    readers = {key: READERS[key] for key in ("resume", "report", *(("result", "predict") if name != "cut" else ()))}
    readers |= {"replay": READERS["replay"]} if name == "mezo" else {}
    readers |= {"update": READERS["update"]} if name == "kept" else {}
    for file in files:
        if file.name in (*STATES, "recipe.toml", "recipe.schema.json"):
            continue
        for reader in (each for key, each in readers.items() if key != "report" or file.parent == Path()):
            shutil.copytree(runs / name, place)
            if change is None:
                (place / file).unlink()
            else:
                (place / file).write_bytes(change((place / file).read_bytes()))
            try:
                reader(place, name)
            except HeadstartError as error:
                assert any(said in str(error) for said in (file.name, "is not finished", "holds no log"))  # noqa: PT017
            shutil.rmtree(place)


def test_evaluations_that_are_gone_stop_a_resumed_run_before_it_writes(runs: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    shutil.copytree(runs / "cut", out)
    path = out / "metrics.jsonl"
    path.write_text(path.read_text().splitlines(keepends=True)[0])
    before = contents(out)
    with pytest.raises(HeadstartError, match=r"metrics\.jsonl: it has 1 of 3 evaluations; put it back from a copy"):
        resume(out, "cut")
    assert {name for name, data in contents(out).items() if before.get(name) != data} <= {"run.log"}


@pytest.mark.parametrize("name", ["cut", "personal"])
def test_a_checkpoint_that_is_gone_is_no_beginning(name: str, runs: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    shutil.copytree(runs / name, out)
    (out / "checkpoint" / "state.safetensors").unlink()
    before = contents(out)
    with pytest.raises(HeadstartError, match=r"state\.safetensors: it is gone, and says where the run stands; put it"):
        resume(out, name)
    assert contents(out) == before


def test_a_run_that_was_updated_and_lost_its_summary_is_not_run_to_its_end_again(runs: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    shutil.copytree(runs / "kept", out)
    update(out, remove=["client-0"])
    (out / "summary.json").unlink()
    head = (out / "model" / "head.safetensors").read_bytes()
    with pytest.raises(HeadstartError, match=r"summary\.json: the run was updated, and to go on would undo that"):
        resume(out, "kept")
    assert (out / "model" / "head.safetensors").read_bytes() == head


def test_a_summary_that_was_removed_is_written_anew(runs: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    shutil.copytree(runs / "kept", out)
    before = RunDirectory(out).summary()
    (out / "summary.json").write_text("{")
    with pytest.raises(HeadstartError, match=r"summary\.json: .*; put it back from a copy, or remove it and resume"):
        resume(out, "kept")
    (out / "summary.json").unlink()
    resume(out, "kept")
    assert before is not None
    assert (RunDirectory(out).summary() or {})["stages"] == before["stages"]
