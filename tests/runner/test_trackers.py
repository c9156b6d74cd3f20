"""Logs of other tools hold what `metrics.jsonl` holds, read back by their own readers."""

import json
import os
import shutil
import struct
import sys
from pathlib import Path
from typing import Any

import pytest
from mlflow.tracking import MlflowClient
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from wandb.proto import wandb_internal_pb2

from headstart.config.recipe import Recipe
from headstart.errors import HeadstartError
from headstart.runner import run
from headstart.runner.trackers import Name, Steps, tracker, trackers
from tests.export.test_export import headstart

pytestmark = pytest.mark.usefixtures("no_report")

ALL: list[Name] = ["tensorboard", "mlflow", "wandb"]

Points = dict[str, dict[int, float]]
"""By name, the values by step."""


@pytest.fixture(autouse=True)
def _at_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nothing is sent anywhere, and no setting of whoever runs the tests counts."""
    for name in [name for name in os.environ if name.startswith(("MLFLOW_", "WANDB_"))]:
        monkeypatch.delenv(name)
    settings = {"WANDB_MODE": "offline", "WANDB_SILENT": "true", "WANDB_ERROR_REPORTING": "false"}
    settings |= {"MLFLOW_DISABLE_TELEMETRY": "true", "DO_NOT_TRACK": "true"}
    settings |= {f"WANDB_{name}_DIR": str(tmp_path / "home") for name in ("CONFIG", "CACHE", "DATA")}
    for name, value in settings.items():
        monkeypatch.setenv(name, value)


def recipe() -> Recipe:
    """Two tasks, two stages: three evaluations with numbers of each task."""
    task = {"dataset": "digits", "train_examples": 100, "partition": {"kind": "iid", "clients": 2}}
    table = {
        "name": "two-tasks",
        "tasks": [{"name": "one", **task}, {"name": "other", **task, "train_examples": 60}],
        "model": {"backbone": "features"},
        "stages": [{"method": "fedncm"}, {"method": "fedavg", "train": "head", "rounds": 3, "lr": 0.01}],
    }
    return Recipe.parse(table)


def lines_of(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def expected(out: Path) -> Points:
    """What the lines of `metrics.jsonl` say, one line a step from 1."""
    points: Points = {}
    for step, line in enumerate(lines_of(out), 1):
        tasks = line.pop("tasks")
        named = {f"tasks/{task}/{name}": value for task, part in tasks.items() for name, value in part.items()}
        for name, value in {**line, **named}.items():
            if not isinstance(value, str):
                points.setdefault(name, {})[step] = value
    return points


def with_no_double(points: list[tuple[str, int, float]]) -> Points:
    assert len({(name, step) for name, step, _ in points}) == len(points), "two points at one step"
    found: Points = {}
    for name, step, value in points:
        found.setdefault(name, {})[step] = value
    return found


def tensorboard(out: Path) -> Points:
    events = EventAccumulator(str(out / "tensorboard"), size_guidance={"scalars": 0}).Reload()
    tags = events.Tags()
    assert "recipe/text_summary" in tags["tensors"]
    return with_no_double([(tag, each.step, each.value) for tag in tags["scalars"] for each in events.Scalars(tag)])


def mlflow_run(out: Path) -> tuple[Any, Any]:
    client = MlflowClient(f"sqlite:///{out / 'mlflow' / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("headstart")
    assert experiment is not None
    (found,) = client.search_runs([experiment.experiment_id])
    return client, found


def mlflow(out: Path) -> Points:
    client, found = mlflow_run(out)
    histories = {name: client.get_metric_history(found.info.run_id, name) for name in found.data.metrics}
    return with_no_double([(name, each.step, each.value) for name, points in histories.items() for each in points])


def records(file: Path) -> list[Any]:
    """What is in an offline file of W&B: after a header, records in blocks of 32 KiB, a long one in several parts."""
    data, place, part, found = file.read_bytes(), 7, b"", []
    while place + 7 <= len(data):
        left = 32768 - place % 32768
        if left < 7:
            place += left
            continue
        length, kind = struct.unpack_from("<HB", data, place + 4)
        part += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # whole, or the last part
            found.append(wandb_internal_pb2.Record.FromString(part))
            part = b""
    return found


def wandb_records(out: Path) -> list[Any]:
    return [record for file in sorted((out / "wandb").glob("offline-run-*/*.wandb")) for record in records(file)]


def wandb(out: Path) -> Points:
    points = []
    for record in wandb_records(out):
        if record.WhichOneof("record_type") == "history":
            for item in record.history.item:
                name = item.key or "/".join(item.nested_key)
                if not name.startswith("_"):
                    points.append((name, record.history.step.num, json.loads(item.value_json)))
    return with_no_double(points)


READERS = {"tensorboard": tensorboard, "mlflow": mlflow, "wandb": wandb}


def compare(out: Path, name: str, resumed: bool = False) -> None:
    found, wanted = READERS[name](out), expected(out)
    assert found.keys() == wanted.keys()
    assert "tasks/other/accuracy" in found
    for metric, values in wanted.items():
        # A round that is computed a second time takes another time.
        near = {"abs": 10} if resumed and metric == "seconds" else {"rel": 1e-6}
        assert found[metric] == pytest.approx(values, **near), (name, metric)


# ----------------------------------------------------------------------------------------------------------------------


def test_all_at_once_from_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "recipe.toml").write_text(recipe().to_toml())
    out = tmp_path / "run"
    options = [part for name in [*ALL, "mlflow"] for part in ("--log", name)]
    done, said = headstart(monkeypatch, capsys, "run", tmp_path / "recipe.toml", "--out", out, *options)
    assert (done, "failed" in said) == (0, False), said
    for name in ALL:
        compare(out, name)
    summary = json.loads((out / "summary.json").read_text())
    found = mlflow_run(out)[1]
    assert found.info.status == "FINISHED"
    assert found.info.run_name == "two-tasks"
    assert found.data.params["stages.1.lr"] == "0.01"
    assert found.data.params["tasks.1.partition.clients"] == "2"
    assert (
        json.loads((out / "mlflow" / "artifacts" / found.info.run_id / "artifacts/summary.json").read_text()) == summary
    )
    kept = wandb_records(out)
    config = {item.key: item.value_json for each in kept for item in each.run.config.update}
    assert json.loads(config["stages"])[1]["lr"] == 0.01
    last = {item.key or item.nested_key[0] for each in kept for item in each.summary.update}
    assert {"run", "accuracy"} <= last
    events = EventAccumulator(str(out / "tensorboard")).Reload()
    assert b"two-tasks" in events.Tensors("recipe/text_summary")[0].tensor_proto.string_val[0]
    assert b"peak_rss_bytes" in events.Tensors("summary/text_summary")[0].tensor_proto.string_val[0]


def test_a_resumed_run_goes_on_in_the_same_logs(tmp_path: Path) -> None:
    out = tmp_path / "run"

    def once(resume: bool, stop: tuple[int, int] | None) -> None:
        with trackers(ALL, recipe(), out) as tell:

            def on_metrics(line: dict[str, Any]) -> None:
                tell(line)
                if (line["stage"], line["round"]) == stop:
                    raise KeyboardInterrupt  # the line is told, its checkpoint is not written

            run(recipe(), out, resume, on_metrics)

    with pytest.raises(KeyboardInterrupt):
        once(False, (1, 2))
    assert mlflow_run(out)[1].info.status == "FAILED"
    with pytest.raises(KeyboardInterrupt):
        once(True, (1, 2))
    once(True, None)
    assert len(lines_of(out)) == 4
    for name in ALL:
        compare(out, name, resumed=True)
    assert mlflow_run(out)[1].info.status == "FINISHED"
    ids = {file.stem.removeprefix("run-") for file in (out / "wandb").glob("offline-run-*/*.wandb")}
    assert ids == {json.loads((out / "wandb" / "run.json").read_text())["run"]}


def test_steps_count_on_over_stages() -> None:
    rounds = [(0, 1), (1, 2), (1, 4), (2, 0), (2, 1), (3, 1)]  # the third stage is looked at before its first round
    steps = Steps()
    assert [steps({"stage": stage, "round": round}) for stage, round in rounds] == [1, 3, 5, 6, 7, 8]


def test_a_log_that_fails_does_not_spoil_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "nowhere://at.all")
    out = tmp_path / "run"
    with trackers(["mlflow", "wandb", "tensorboard"], recipe(), out) as tell:

        def on_metrics(line: dict[str, Any]) -> None:
            tell(line)
            shutil.rmtree(out / "wandb", ignore_errors=True)  # what it needs is gone from the second line on

        result = run(recipe(), out, on_metrics=on_metrics)
    assert result.summary["accuracy"] == run(recipe()).summary["accuracy"]
    said = [record.getMessage() for record in caplog.records]
    assert [line.partition(" failed: ")[0] for line in said if " failed: " in line] == ["--log mlflow", "--log wandb"]
    compare(out, "tensorboard")


def test_a_missing_package_is_named_before_anything_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "recipe.toml").write_text(recipe().to_toml())
    for name in ALL:
        monkeypatch.setitem(sys.modules, name, None)  # as if it were not installed
        arguments = ["run", tmp_path / "recipe.toml", "--out", tmp_path / "run", "--log", name]
        done, said = headstart(monkeypatch, capsys, *arguments)
        assert (done, f"pip install 'headstart[{name}]'" in said) == (2, True), said
    assert not (tmp_path / "run").exists()
    with pytest.raises(HeadstartError, match="'tensorbord' is not known; did you mean 'tensorboard'"):
        tracker("tensorbord", recipe(), tmp_path / "run").__enter__()  # type: ignore[arg-type]
