"""A FedMeZO run rebuilt from the weights it started from and its log of seeds and scalars, bit for bit."""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from headstart.cli import main
from headstart.config.recipe import Recipe
from headstart.core.message import Message
from headstart.errors import HeadstartError
from headstart.export.replay import replay
from headstart.records import RunDirectory
from headstart.runner import run
from tests.disk import contents

MEZO = {"method": "fedmezo", "rounds": 4, "participation": 0.5, "lr": 1e-4, "evaluate_every": 2}
IMAGES: dict[str, Any] = {
    "data": {
        "dataset": "mnist-mini",
        "train_examples": 30,
        "test_examples": 20,
        "partition": {"kind": "iid", "clients": 4},
    },
    "model": {"backbone": "efficientnet-lite0", "image_size": 32},
}
DIGITS: dict[str, Any] = {
    "data": {"dataset": "digits", "train_examples": 200, "partition": {"kind": "dirichlet", "clients": 6}},
    "model": {"backbone": "features"},
}


def texts(folder: Path) -> dict[str, Any]:
    rows = ["text,label,client"]
    rows += [f"the team won {n} matches,sport,c{n % 3}" for n in range(9)]
    rows += [f"bake the bread for {n} minutes,food,c{n % 3}" for n in range(9)]
    (folder / "texts.csv").write_text("\n".join(rows))
    return {
        "data": {"dataset": str(folder / "texts.csv"), "client_column": "client", "partition": {"kind": "natural"}},
        "model": {"backbone": "all-MiniLM-L6-v2"},
    }


def files(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in (path / "model").iterdir()}


def check(table: dict[str, Any], folder: Path, names: set[str]) -> None:
    """Run, replay, and compare the files ourselves; then a log with another scalar, which shows."""
    out, again = folder / "run", folder / "again"
    run(Recipe.parse(table), out)
    assert replay(out, again) == []
    made, rebuilt = files(out), files(again)
    assert rebuilt.keys() == names | {"classes.json"}
    for name in rebuilt:
        assert rebuilt[name] == made[name], name
    # The log matters: one slope of another sign gives another model.
    (log,) = (out / "model").glob("log-*.safetensors")
    arrays = load_file(log)
    assert arrays["seeds"].shape == (table["stages"][-1]["rounds"],)
    assert len(set(arrays["seeds"].tolist())) == len(arrays["seeds"])
    log.write_bytes(Message({"seeds": arrays["seeds"], "slopes": -arrays["slopes"]}).to_bytes())
    assert set(replay(out, folder / "wrong")) == names


def test_a_whole_network(tmp_path: Path) -> None:
    check(IMAGES | {"stages": [{"method": "fedncm"}, MEZO | {"train": "all"}]}, tmp_path, {
        "head.safetensors", "model.safetensors",
    })  # fmt: skip
    start, end = (
        load_file(tmp_path / "run" / place)
        for place in ("checkpoint/stage-0.safetensors", "checkpoint/stage-1.safetensors")
    )
    assert not np.array_equal(start["head.0.weight"], end["head.0.weight"])


@pytest.mark.parametrize(
    "keys",
    [{}, {"num_directions": 3, "weight_decay": 0.1, "schedule": "cosine", "batch_size": 4}, {"head": "mlp"}],
    ids=["plain", "everything", "mlp"],
)
def test_a_head_on_features(keys: dict[str, Any], tmp_path: Path) -> None:
    stages: list[dict[str, Any]] = [MEZO | {"train": "head", "lr": 1e-3, "head_init": "random"} | keys]
    check(DIGITS | {"stages": stages}, tmp_path, {"head.safetensors"})


def test_a_head_that_starts_from_an_earlier_stages(tmp_path: Path) -> None:
    stages = [{"method": "fedncm"}, {"method": "fed3r"}, MEZO | {"train": "head", "start": 0}]
    check(DIGITS | {"stages": stages}, tmp_path, {"head.safetensors"})


def test_low_rank_updates_of_a_text_model(tmp_path: Path) -> None:
    stages = [{"method": "fedncm"}, MEZO | {"train": "lora", "rounds": 3, "rank": 2}]
    check(texts(tmp_path) | {"stages": stages}, tmp_path, {"head.safetensors", "module-default.safetensors"})
    # safetensors writes several entries of metadata in any order, and files of the same model would differ.
    with safe_open(tmp_path / "run" / "model" / "module-default.safetensors", "numpy") as file:
        ((name, facts),) = file.metadata().items()
    assert name == "module"
    assert json.loads(facts) == {"kind": "lora", "rank": 2, "alpha_lora": 16.0}


def test_an_earlier_fedmezo_is_not_the_runs_last_model(tmp_path: Path) -> None:
    """The model of the stage is rebuilt; the run went on, and its files differ."""
    stages = [MEZO | {"train": "head", "lr": 1e-3}, {"method": "fed3r", "random_features": 20}]
    run(Recipe.parse(DIGITS | {"stages": stages}), tmp_path / "run")
    assert replay(tmp_path / "run", tmp_path / "again") == ["head.safetensors"]
    stage = load_file(tmp_path / "run" / "checkpoint" / "stage-0.safetensors")
    rebuilt = load_file(tmp_path / "again" / "model" / "head.safetensors")
    np.testing.assert_array_equal(rebuilt["weight"], stage["head.0.weight"])
    np.testing.assert_array_equal(rebuilt["bias"], stage["head.0.bias"])


def test_a_run_without_fedmezo(tmp_path: Path) -> None:
    run(Recipe.parse(DIGITS | {"stages": [{"method": "fedncm"}]}), tmp_path / "run")
    with pytest.raises(HeadstartError, match="is no run of fedmezo: there is no log to replay"):
        replay(tmp_path / "run", tmp_path / "again")
    assert not (tmp_path / "again").exists()


def test_nothing_is_written_over_but_an_earlier_replay(tmp_path: Path) -> None:
    out, other = tmp_path / "run", tmp_path / "other"
    run(Recipe.parse(DIGITS | {"stages": [MEZO | {"train": "head"}]}), out)
    run(Recipe.parse(DIGITS | {"stages": [{"method": "fedncm"}]}), other)
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "diary.txt").write_text("mine")
    before = contents(tmp_path)
    for taken in (other, out, tmp_path / "notes", tmp_path / "notes" / "diary.txt"):
        with pytest.raises(HeadstartError, match="already used; give another directory"):
            replay(out, taken)
    assert contents(tmp_path) == before
    for _ in range(2):
        assert replay(out, out / "replay") == []
    (tmp_path / "empty").mkdir()
    assert replay(out, tmp_path / "empty") == []


def interrupt(recipe: Recipe, out: Path, after: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stop a run after so many checkpoints."""
    saved, save = [0], RunDirectory.save_checkpoint

    def stop(self: RunDirectory, *arguments: Any, **keys: Any) -> None:
        if saved[0] == after:
            raise KeyboardInterrupt
        saved[0] += 1
        save(self, *arguments, **keys)

    with monkeypatch.context() as patch:
        patch.setattr(RunDirectory, "save_checkpoint", stop)
        with pytest.raises(KeyboardInterrupt):
            run(recipe, out)


@pytest.mark.parametrize("participation", [0.34, 1.0])
@pytest.mark.parametrize("after", [1, 3])
def test_an_interrupted_run_resumes_to_the_same_bits(
    after: int, participation: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = MEZO | {"train": "head", "lr": 1e-3, "rounds": 5, "participation": participation, "head_init": "random"}
    recipe = Recipe.parse(DIGITS | {"stages": [stage]})
    whole = run(recipe, tmp_path / "whole")
    interrupt(recipe, tmp_path / "cut", after, monkeypatch)
    with pytest.raises(HeadstartError, match="holds no log of stage 0: only a finished fedmezo has one"):
        replay(tmp_path / "cut", tmp_path / "early")
    cut = run(recipe, tmp_path / "cut", resume=True)
    assert files(tmp_path / "cut") == files(tmp_path / "whole")
    assert {"classes.json", "head.safetensors", "log-0.safetensors"} == files(tmp_path / "cut").keys()
    for cost in ("bytes_up", "bytes_down", "forward_passes"):
        assert cut.summary[cost] == whole.summary[cost]
    assert replay(tmp_path / "cut", tmp_path / "again") == []


@pytest.mark.slow
def test_an_interrupted_run_of_a_whole_network_resumes_to_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stages = [{"method": "fedncm"}, MEZO | {"train": "all", "rounds": 3, "participation": 1.0}]
    recipe = Recipe.parse(IMAGES | {"stages": stages})
    run(recipe, tmp_path / "whole")
    interrupt(recipe, tmp_path / "cut", 3, monkeypatch)  # one of fedncm, two of fedmezo
    run(recipe, tmp_path / "cut", resume=True)
    assert files(tmp_path / "cut") == files(tmp_path / "whole")


def command(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    monkeypatch.setattr(sys, "argv", ["headstart", *map(str, arguments)])
    with pytest.raises(SystemExit) as stopped:
        main()
    return int(stopped.value.code or 0)


def test_the_command_prints_the_verdict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    run(Recipe.parse(DIGITS | {"stages": [MEZO | {"train": "head"}]}), out)
    capsys.readouterr()
    assert command(monkeypatch, "replay", out) == 0
    assert capsys.readouterr().out == f"{out / 'replay' / 'model'}: the model is bitwise identical to the run's\n"
    assert files(out / "replay")["head.safetensors"] == files(out)["head.safetensors"]
    head = load_file(out / "model" / "head.safetensors")
    head["bias"] = np.nextafter(head["bias"], np.float32(1))
    save_file(head, out / "model" / "head.safetensors")
    assert command(monkeypatch, "replay", out, "--out", tmp_path / "other") == 0
    verdict = f"{tmp_path / 'other' / 'model'}: the model differs from the run's in head.safetensors\n"
    assert capsys.readouterr().out == verdict
    run(Recipe.parse(DIGITS | {"stages": [{"method": "fedncm"}]}), tmp_path / "closed")
    assert command(monkeypatch, "replay", tmp_path / "closed") == 2
    assert "is no run of fedmezo" in capsys.readouterr().err


def test_another_module_than_the_one_that_is_there_is_refused(tmp_path: Path) -> None:
    rows = [f"a text about {topic} number {n},{topic}" for topic in ("cats", "dogs") for n in range(6)]
    (tmp_path / "texts.csv").write_text("\n".join(["text,label", *rows]))
    for second, refused in (
        ({"method": "fedavg", "train": "adapter"}, True),
        ({"method": "fedavg", "train": "lora", "rank": 4}, True),
        ({"method": "fedavg", "train": "all"}, True),
        ({"method": "slora"}, True),
        ({"method": "fedavg", "train": "lora", "rank": 2}, False),
        ({"method": "fedavg", "train": "adapter", "start": "pretrained"}, False),
    ):
        table = {
            "data": {"dataset": str(tmp_path / "texts.csv"), "partition": {"kind": "iid", "clients": 2}},
            "model": {"backbone": "all-MiniLM-L6-v2", "max_tokens": 16},
            "stages": [{"method": "fedavg", "train": "lora", "rank": 2, "rounds": 1}, {"rounds": 1, **second}],
        }
        if refused:
            with pytest.raises(HeadstartError, match=r"stages.1.train: an earlier stage left a lora on the backbone"):
                run(Recipe.parse(table))
        else:
            run(Recipe.parse(table))


def test_every_class_needs_its_word(tmp_path: Path) -> None:
    (tmp_path / "texts.csv").write_text("text,label\na,x\nb,y\nc,x\nd,y\n")
    table = {
        "data": {
            "dataset": str(tmp_path / "texts.csv"),
            "test_fraction": 0.5,
            "partition": {"kind": "iid", "clients": 1},
        },
        "model": {"backbone": "all-MiniLM-L6-v2", "prompt": "{text} {mask}", "label_words": ["good"]},
        "stages": [{"method": "fedncm"}],
    }
    with pytest.raises(HeadstartError, match="1 words for 2 classes"):
        run(Recipe.parse(table))
