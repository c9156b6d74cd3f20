import csv
import json
import os
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from safetensors.numpy import load_file
from scipy.stats import binomtest

import headstart
from headstart.channel.channel import UpdateChannel
from headstart.config.recipe import Recipe
from headstart.engine.client_states import ClientStates
from headstart.errors import HeadstartError, MessageError
from headstart.records import RunDirectory
from headstart.report.tables import quality, remarks
from headstart.runner import Result, run
from tests.disk import contents


def recipe_of(*stages: dict[str, Any], **partition: Any) -> Recipe:
    shares = {"kind": "dirichlet", "clients": 20, "alpha": 0.1} | partition
    return Recipe.parse(
        {
            "name": "digits",
            "data": {"dataset": "digits", "partition": shares},
            "model": {"backbone": "features"},
            "stages": list(stages) or [{"method": "fedncm"}, {"method": "fed3r"}, {"method": "fedcof"}],
        }
    )


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]


def test_a_run_that_was_begun_before_recipes_named_their_schema_goes_on(tmp_path: Path) -> None:
    out, recipe = tmp_path / "old", recipe_of()
    result = run(recipe, out)
    (out / "recipe.toml").write_text(recipe.to_toml())
    (out / "recipe.schema.json").unlink()
    (out / "summary.json").unlink()
    assert run(recipe, out, resume=True).summary["stages"] == result.summary["stages"]
    assert not (out / "recipe.schema.json").exists()
    assert Result.load(out).summary == json.loads((out / "summary.json").read_text())


def test_a_run_leaves_what_the_contract_says(tmp_path: Path) -> None:
    out = tmp_path / "run"
    recipe = recipe_of(test="follow")
    result = run(recipe, out)
    assert {path.name for path in out.iterdir()} == {
        "recipe.toml", "recipe.schema.json", "metrics.jsonl", "summary.json", "clients.csv",
        "rounds.csv", "holdings.csv", "confusion.csv", "checkpoint", "model", "report.html", "run.log",
    }  # fmt: skip
    assert Recipe.load(out / "recipe.toml") == recipe
    text = (out / "recipe.toml").read_text()
    assert text.startswith("#:schema recipe.schema.json\n")
    jsonschema.validate(tomllib.loads(text), json.loads((out / "recipe.schema.json").read_text()))
    assert tomllib.loads((out / "recipe.toml").read_text())["stages"][2]["shrinkage"] == "auto"
    metrics, summary = lines(out), json.loads((out / "summary.json").read_text())
    assert [(line["stage"], line["method"], line["round"]) for line in metrics] == [
        (0, "fedncm", 1), (1, "fed3r", 1), (2, "fedcof", 1),
    ]  # fmt: skip
    for line in metrics:
        assert {"accuracy", "loss", "bytes_up", "bytes_down", "forward_passes", "seconds"} <= line.keys()
        assert {"local_accuracy_mean", "local_accuracy_std"} <= line.keys()
    # Costs in the metrics are cumulative; those of a stage are its own.
    for cost in ("bytes_up", "bytes_down", "forward_passes"):
        assert metrics[-1][cost] == sum(stage[cost] for stage in summary["stages"]) == summary[cost]
    assert metrics[0]["forward_passes"] == 20 * 71  # 1,438 examples dealt evenly to 20 clients
    assert summary["unused_examples"] == 1438 - 20 * 71
    for stage in summary["stages"]:
        assert {"rounds", "accuracy", "published_bytes", "published_compute"} <= stage.keys()
    assert summary["accuracy"] == summary["stages"][-1]["accuracy"] == result.summary["accuracy"]
    assert summary["peak_rss_bytes"] > 1e7
    assert summary["versions"]["headstart"]
    head = load_file(out / "model" / "head.safetensors")
    assert head["weight"].shape == (10, 64)
    assert head["bias"].shape == (10,)
    test = result.federation.dataset.test
    predictions = (test.features() @ head["weight"].T + head["bias"]).argmax(axis=1)
    assert (predictions == test.labels).mean() == summary["accuracy"]
    page = (out / "report.html").read_text()
    assert page.count('role="img"') == 4
    assert "fedcof γ" in page
    assert "http" not in page.replace("http://www.w3.org", "").replace("https://www.w3.org", "").replace(
        "http://purl.org", ""
    ).replace("http://creativecommons.org", "").replace("https://matplotlib.org", "")


def test_an_accuracy_is_of_so_many_examples_with_an_interval() -> None:
    data = {"dataset": "digits", "test_examples": 77, "partition": {"kind": "iid", "clients": 5}}
    table = {"data": data, "model": {"backbone": "features"}, "stages": [{"method": "fedncm"}]}
    (stage,) = run(Recipe.parse(table)).summary["stages"]
    right = round(77 * stage["accuracy"])
    expected = binomtest(right, 77).proportion_ci(0.95, method="wilson")
    assert stage["test_examples"] == 77
    assert stage["accuracy_interval"] == pytest.approx((expected.low, expected.high))
    shown = f"of 77 examples (95 % confidence: {100 * expected.low:.1f} to {100 * expected.high:.1f} %)"
    assert shown in (quality(stage) or "")


def test_without_a_directory_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert headstart.run(recipe_of()).summary["stages"][0]["accuracy"] > 0.8
    assert list(tmp_path.iterdir()) == []


def test_the_order_of_stages_does_not_change_a_closed_form_head(tmp_path: Path) -> None:
    first = run(recipe_of({"method": "fedcof"}))
    last = run(recipe_of({"method": "fed3r"}, {"method": "fedcof"}))
    np.testing.assert_array_equal(first.head.weight, last.head.weight)


def test_evaluation_every_few_rounds_and_at_the_end(tmp_path: Path) -> None:
    run(recipe_of({"method": "fedcof", "clients_per_round": 3, "evaluate_every": 3}), tmp_path / "run")
    assert [line["round"] for line in lines(tmp_path / "run")] == [3, 6, 7]
    accuracies = [line["accuracy"] for line in lines(tmp_path / "run")]
    assert accuracies[-1] > accuracies[0]


def test_a_used_directory_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "diary.txt").write_text("mine")
    with pytest.raises(HeadstartError, match="already used"):
        run(recipe_of(), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["diary.txt"]
    with pytest.raises(HeadstartError, match="already used"):
        run(recipe_of(), tmp_path / "diary.txt")


def test_a_directory_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(HeadstartError, match="cannot write there"):
        run(recipe_of(), tmp_path / "file" / "run")


def test_a_run_that_fails_before_its_first_result_leaves_nothing(tmp_path: Path) -> None:
    recipe = recipe_of({"method": "fed3r", "ridge": 0.0, "bias": False})  # some pixels are always zero
    with pytest.raises(HeadstartError, match="ridge = 0 leaves the 64 × 64 Gram matrix singular"):
        run(recipe, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_validation_must_be_there() -> None:
    with pytest.raises(HeadstartError, match=r"stages.0.eval_split: the data have no validation split"):
        run(recipe_of({"method": "fedncm", "eval_split": "validation"}))


TRAIN = {"train": "head", "rounds": 3, "clients_per_round": 6, "lr": 0.002, "momentum": 0.5}
CHAINS: dict[str, list[dict[str, Any]]] = {
    "closed-form": [
        {"method": "fedncm", "clients_per_round": 6},
        {"method": "fed3r", "clients_per_round": 7},
        {"method": "fedcof", "clients_per_round": 6, "means_per_client": 2},
    ],
    "stateful": [
        {"method": "fedcof"},
        TRAIN | {"method": "feddyn", "rounds": 4},
        TRAIN | {"method": "scaffold", "momentum": 0.0, "rounds": 4, "head_init": "random"},
    ],
    "server": [TRAIN | {"method": method} for method in ("fedavgm", "fedadam", "fedyogi", "fedadagrad", "fednova")],
}


@pytest.mark.parametrize("chain", CHAINS)
@pytest.mark.parametrize("stop_after", [1, 2, 5, 8])
def test_resuming_gives_the_same_bits(
    chain: str, stop_after: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = recipe_of(*CHAINS[chain])
    run(recipe, tmp_path / "whole")
    saved, save = [0], RunDirectory.save_checkpoint

    def stop(self: RunDirectory, *arguments: Any, **keys: Any) -> None:
        if saved[0] == stop_after:
            raise KeyboardInterrupt  # the round's metrics are written, its checkpoint is not
        saved[0] += 1
        save(self, *arguments, **keys)

    with monkeypatch.context() as patch:
        patch.setattr(RunDirectory, "save_checkpoint", stop)
        with pytest.raises(KeyboardInterrupt):
            run(recipe, tmp_path / "cut")
    assert not (tmp_path / "cut" / "summary.json").exists()
    run(recipe, tmp_path / "cut", resume=True)
    whole, cut = (load_file(tmp_path / name / "model" / "head.safetensors") for name in ("whole", "cut"))
    np.testing.assert_array_equal(whole["weight"], cut["weight"])
    np.testing.assert_array_equal(whole["bias"], cut["bias"])
    without_time = [
        [{key: value for key, value in line.items() if key != "seconds"} for line in lines(tmp_path / name)]
        for name in ("whole", "cut")
    ]
    assert without_time[0] == without_time[1]


def test_a_crash_between_what_clients_keep_and_the_checkpoint_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = recipe_of(TRAIN | {"method": "scaffold", "momentum": 0.0, "rounds": 6})
    run(recipe, tmp_path / "whole")
    committed, commit = [0], ClientStates.commit

    def stop(self: ClientStates) -> None:
        commit(self)
        committed[0] += 1
        if committed[0] == 3:
            raise KeyboardInterrupt  # the third round's state is on disk, its checkpoint is not

    with monkeypatch.context() as patch:
        patch.setattr(ClientStates, "commit", stop)
        with pytest.raises(KeyboardInterrupt):
            run(recipe, tmp_path / "cut")
    resumed = run(recipe, tmp_path / "cut", resume=True)
    whole = load_file(tmp_path / "whole" / "model" / "head.safetensors")
    np.testing.assert_array_equal(resumed.head.weight, whole["weight"])


def test_what_clients_keep_is_gone_after_the_stage_and_nothing_else(tmp_path: Path) -> None:
    run(recipe_of(TRAIN | {"method": "feddyn", "rounds": 2}), tmp_path / "run")
    assert sorted(path.name for path in (tmp_path / "run" / "checkpoint").iterdir()) == [
        "lock", "stage-0.safetensors", "state.safetensors",
    ]  # fmt: skip


def test_two_stages_start_where_the_first_ended(tmp_path: Path) -> None:
    train = {"method": "fedavg", "train": "head", "rounds": 15, "lr": 0.003, "participation": 0.5, "temperature": 0.3}
    run(recipe_of({"method": "fedcof"}, train), tmp_path / "warm")
    run(recipe_of(train | {"head_init": "random"}), tmp_path / "cold")
    warm, cold = ([line["accuracy"] for line in lines(tmp_path / name)] for name in ("warm", "cold"))
    assert warm[1] > cold[0] + 0.1  # the first round after the head start, and the first round from nothing
    assert warm[-1] > warm[0]  # training improves on the closed form
    assert "fedcof → fedavg" in (tmp_path / "warm" / "report.html").read_text()
    costs = [line["bytes_down"] for line in lines(tmp_path / "warm")]
    assert costs == sorted(costs)
    # The forward passes of cached features are counted once a client, not once a round.
    summary = json.loads((tmp_path / "warm" / "summary.json").read_text())
    assert summary["stages"][1]["forward_passes"] <= 1420
    assert summary["stages"][1]["published_compute"] == 15 * 1420


def test_validation_chooses_and_the_test_reports(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    y = np.arange(300) % 3
    x = np.eye(3)[y] + rng.normal(0, 0.6, (300, 3))
    np.savez(tmp_path / "data.npz", X=x, y=y, split=rng.permutation(np.repeat([0, 1, 2], 100)))
    stage = {"method": "fedavg", "train": "head", "rounds": 12, "lr": 0.5, "head_init": "random", "participation": 0.4}
    table = {
        "data": {"dataset": str(tmp_path / "data.npz"), "partition": {"kind": "dirichlet", "clients": 5, "alpha": 0.2}},
        "model": {"backbone": "features"},
        "stages": [stage],
    }
    summary = run(Recipe.parse(table), tmp_path / "run").summary["stages"][0]
    evaluations = lines(tmp_path / "run")
    chosen = max(evaluations, key=lambda line: line["validation_accuracy"])  # the first of the best
    assert summary["best_round"] == chosen["round"]
    assert summary["best_accuracy"] == chosen["accuracy"]
    assert summary["best_validation_accuracy"] == chosen["validation_accuracy"]
    assert summary["accuracy"] == evaluations[-1]["accuracy"]
    assert remarks(summary)[0].endswith("on the test split; the table shows the last round")
    assert summary["best_round"] < 11  # or there would be nothing to choose

    # The chosen round is what the stage ends with, whichever rounds come after it: the same as if it were the last.
    best = run(Recipe.parse(table | {"stages": [stage | {"keep": "best"}]}), tmp_path / "best")
    short = run(Recipe.parse(table | {"stages": [stage | {"rounds": summary["best_round"]}]}))
    np.testing.assert_array_equal(best.head.weight, short.head.weight)
    found = best.summary["stages"][0]
    assert (found["accuracy"], found["rounds"], found["loss"]) == (chosen["accuracy"], 12, chosen["loss"])
    assert remarks(found)[0].endswith("on the test split; the stage ends with it")
    np.testing.assert_array_equal(
        load_file(tmp_path / "best" / "model" / "head.safetensors")["weight"], best.head.weight
    )
    assert not list((tmp_path / "best" / "checkpoint").glob("best-*"))

    # Patience ends it at the first evaluation that is no better than all before.
    patient = run(Recipe.parse(table | {"stages": [stage | {"patience": 1, "keep": "best"}]}), tmp_path / "patient")
    seen = [line["validation_accuracy"] for line in evaluations]
    stop = next(n for n in range(2, 13) if max(seen[: n - 1]) >= seen[n - 1])
    assert patient.summary["stages"][0]["rounds"] == len(lines(tmp_path / "patient")) == stop < 12
    assert patient.summary["stages"][0]["accuracy"] == evaluations[int(np.argmax(seen[:stop]))]["accuracy"]


def test_a_validation_accuracy_is_called_one(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    y = np.arange(60) % 3
    np.savez(tmp_path / "data.npz", X=np.eye(3)[y] + rng.normal(0, 0.6, (60, 3)), y=y, split=np.arange(60) // 3 % 3)
    stage = {"method": "fedavg", "train": "head", "rounds": 3, "eval_split": "validation"}
    table = {
        "data": {"dataset": str(tmp_path / "data.npz"), "partition": {"kind": "iid", "clients": 3}},
        "model": {"backbone": "features"},
        "stages": [stage],
    }
    summary = run(Recipe.parse(table), tmp_path / "run").summary["stages"][0]
    assert summary["eval_split"] == "validation"
    assert summary["accuracy"] == summary["validation_accuracy"]
    assert "on the validation split" in remarks(summary)[0]
    page = (tmp_path / "run" / "report.html").read_text()
    assert "test split" not in page


@pytest.mark.parametrize(
    ("stage", "sentence"),
    [
        ({"method": "fedavg", "keep": "best"}, "need a validation split"),
        ({"method": "fedavg", "patience": 3}, "need a validation split"),
        ({"method": "fedper", "keep": "best", "head": "mlp"}, "personal models are those of the last round"),
        ({"method": "ditto", "keep": "best"}, "personal models are those of the last round"),
    ],
)
def test_the_best_round_needs_a_validation_split_and_one_model(stage: dict[str, Any], sentence: str) -> None:
    with pytest.raises(HeadstartError, match=sentence):
        run(recipe_of(stage | {"train": "head", "rounds": 1}))


def test_too_few_usable_answers_stop_the_run_and_leave_a_good_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = recipe_of(TRAIN | {"method": "fedavg", "rounds": 5, "min_replies": 5})
    add, added = UpdateChannel.add, [0]

    def sometimes(self: UpdateChannel, total: Any, reply: Any, sender: Any) -> None:
        added[0] += 1
        if added[0] > 14:  # six replies a round: the third round gets two good ones
            raise MessageError("array 'update.weight' holds NaN or infinity")
        add(self, total, reply, sender)

    with monkeypatch.context() as patch:
        patch.setattr(UpdateChannel, "add", sometimes)
        with pytest.raises(HeadstartError, match=r"fedavg, round 3: 2 of 6 clients .* min_replies = 5; .* NaN"):
            run(recipe, tmp_path / "run")
    assert [line["round"] for line in lines(tmp_path / "run")] == [1, 2]
    resumed = run(recipe, tmp_path / "run", resume=True)
    np.testing.assert_array_equal(resumed.head.weight, run(recipe).head.weight)


def test_resuming_a_finished_run_changes_nothing(tmp_path: Path) -> None:
    recipe, out = recipe_of({"method": "fedncm"}), tmp_path / "run"
    first = run(recipe, out)
    before = contents(out)
    again = run(recipe, out, resume=True)
    assert contents(out) == before
    assert (again.summary, again.metrics) == (first.summary, first.metrics)
    np.testing.assert_array_equal(again.head.weight, first.head.weight)
    (out / "report.html").unlink()
    run(recipe, out, resume=True, report=False)
    assert not (out / "report.html").exists()
    run(recipe, out, resume=True)
    assert contents(out).keys() == before.keys()
    (out / "model" / "head.safetensors").unlink()
    with pytest.raises(HeadstartError, match=r"head\.safetensors: .*; remove .*summary\.json and resume the run"):
        run(recipe, out, resume=True)
    (out / "summary.json").unlink()
    run(recipe, out, resume=True)
    assert contents(out)["model/head.safetensors"] == before["model/head.safetensors"]


def test_resume_refuses_another_recipe_and_an_empty_place(tmp_path: Path) -> None:
    run(recipe_of({"method": "fedncm"}), tmp_path / "run")
    with pytest.raises(HeadstartError, match="another recipe"):
        run(recipe_of({"method": "fedcof"}), tmp_path / "run", resume=True)
    with pytest.raises(HeadstartError, match="holds no run"):
        run(recipe_of(), tmp_path / "elsewhere", resume=True)
    with pytest.raises(HeadstartError, match="--resume needs --out"):
        run(recipe_of(), resume=True)


def test_a_killed_process_resumes_to_the_same_bits(tmp_path: Path) -> None:
    recipe = recipe_of({"method": "fedcof", "clients_per_round": 1}, clients=250)
    path, out = tmp_path / "recipe.toml", tmp_path / "killed"
    path.write_text(recipe.to_toml())
    command = [sys.executable, "-m", "headstart.cli", "run", str(path), "--out", str(out)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, env=os.environ.copy())
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and process.poll() is None:
        if (out / "metrics.jsonl").exists() and (out / "metrics.jsonl").read_text().count("\n") > 20:
            process.send_signal(signal.SIGKILL)
            break
        time.sleep(0.01)
    assert process.wait() == -signal.SIGKILL, "the run ended before it could be killed"
    assert 20 < len(lines(out)) < 250
    subprocess.run([*command, "--resume"], check=True, stdout=subprocess.DEVNULL)
    whole = run(recipe)
    np.testing.assert_array_equal(load_file(out / "model" / "head.safetensors")["weight"], whole.head.weight)
    assert [line["round"] for line in lines(out)] == list(range(1, 251))


def test_raw_images_to_a_scored_head(tmp_path: Path) -> None:
    """The whole way with real weights: MNIST through EfficientNet-Lite0, the second time from the cache."""
    recipe = Recipe.parse(
        {
            "name": "tiny",
            "data": {
                "dataset": "mnist-mini",
                "train_examples": 200,
                "test_examples": 60,
                "partition": {"kind": "dirichlet", "clients": 10, "alpha": 0.3},
            },
            "model": {"backbone": "efficientnet-lite0", "image_size": 64},
            "stages": [{"method": "fedncm"}, {"method": "fed3r"}, {"method": "fedcof"}],
        }
    )
    first = run(recipe, tmp_path / "first")
    assert first.summary["stages"][1]["accuracy"] > 0.6  # chance is 0.1
    second = run(recipe, tmp_path / "second")
    np.testing.assert_array_equal(first.head.weight, second.head.weight)


def test_raw_text_to_a_scored_head(tmp_path: Path) -> None:
    """A CSV of sentences through all-MiniLM-L6-v2, by clients that the file names."""
    topics = {
        "sport": ["The team won the match", "She scored a goal", "The coach praised his players", "A race was run"],
        "food": ["The soup needs salt", "Bake the bread for an hour", "Fresh tomatoes taste sweet", "He fried an egg"],
    }
    rows = ["text,label,client"]
    rows += [
        f"{text} number {n},{topic},c{n % 3}" for topic, texts in topics.items() for n in range(6) for text in texts
    ]
    (tmp_path / "texts.csv").write_text("\n".join(rows))
    recipe = Recipe.parse(
        {
            "data": {
                "dataset": str(tmp_path / "texts.csv"),
                "client_column": "client",
                "partition": {"kind": "natural", "test": "follow"},
            },
            "model": {"backbone": "all-MiniLM-L6-v2"},
            "stages": [{"method": "fedcof"}],
        }
    )
    result = run(recipe)
    assert result.federation.names == ("c0", "c1", "c2")
    assert result.summary["accuracy"] == 1.0


def test_kind_of_data_and_backbone_must_agree() -> None:
    table = recipe_of().model_dump(exclude_none=True)
    with pytest.raises(HeadstartError, match='already features; set it to "features"'):
        run(Recipe.parse(table | {"model": {"backbone": "efficientnet-lite0"}}))
    table["data"] |= {"dataset": "mnist-mini"}
    with pytest.raises(HeadstartError, match="images, not features"):
        run(Recipe.parse(table))
    with pytest.raises(HeadstartError, match=r"reads texts.*the data are images"):
        run(Recipe.parse(table | {"model": {"backbone": "all-MiniLM-L6-v2"}}))


def test_every_bar_is_over_before_the_next_begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two bars at once are an error on a terminal: features are computed before the rounds are played."""
    open_bars, most = [0], [0]

    @contextmanager
    def counting(description: str, total: int, done: int = 0) -> Iterator[Any]:
        open_bars[0] += 1
        most[0] = max(most[0], open_bars[0])
        yield lambda steps: None
        open_bars[0] -= 1

    monkeypatch.setattr("headstart.engine.round.progress", counting)
    monkeypatch.setattr(import_module("headstart.backbones.extract"), "progress", counting)
    part = {"train_examples": 20, "test_examples": 10, "partition": {"kind": "iid", "clients": 2}}
    table = {
        "data": {"dataset": "mnist-mini", **part},
        "model": {"backbone": "conv4", "weights": "random"},
        "stages": [
            {"method": "fedncm"},
            {"method": "fedavg", "train": "all", "rounds": 2},
            {"method": "fedavg", "train": "head", "rounds": 2},
        ],
    }
    run(Recipe.parse(table))
    assert most == [1]


# ----------------------------------------------------------------------------------------- who took part in which round


def rounds_in(path: Path) -> list[dict[str, str]]:
    with (path / "rounds.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_every_round_says_who_was_asked_what_it_moved_and_who_was_left_out(tmp_path: Path) -> None:
    recipe = recipe_of({"method": "fedncm"}, TRAIN | {"method": "fedavg", "rounds": 3, "clients_per_round": 2})
    add = UpdateChannel.add

    def picky(self: UpdateChannel, total: Any, reply: Any, sender: Any) -> None:
        if sender.round == 1 and int(reply.clients[0]) == asked[1][0]:
            raise MessageError("it is Monday")
        add(self, total, reply, sender)

    order = [np.random.default_rng([0x0DE, 0, 1, number]).permutation(20)[:2] for number in range(3)]
    asked = [sorted(each.tolist()) for each in order]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(UpdateChannel, "add", picky)
        run(recipe, tmp_path / "run")
    rows = rounds_in(tmp_path / "run")
    assert [row["client"] for row in rows if row["stage"] == "0"] == [f"client-{client}" for client in range(20)]
    trained = [row for row in rows if row["stage"] == "1"]
    assert [(int(row["round"]), row["client"]) for row in trained] == [
        (number + 1, f"client-{client}") for number in range(3) for client in asked[number]
    ]
    assert [row["left_out"] for row in trained] == ["", "", "it is Monday", "", "", ""]
    with (tmp_path / "run" / "clients.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            mine = [each for each in rows if (each["stage"], each["client"]) == (row["stage"], row["client"])]
            for cost in ("bytes_up", "bytes_down"):
                assert sum(int(each[cost]) for each in mine) == int(row[cost])


def test_a_resumed_run_tells_every_round_once(tmp_path: Path) -> None:
    recipe = recipe_of(TRAIN | {"method": "fedavg", "rounds": 4, "clients_per_round": 2})
    run(recipe, tmp_path / "whole")

    def stop(line: dict[str, Any]) -> None:
        if line["round"] == 3:  # it is in the files, and not in the checkpoint
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(recipe, tmp_path / "cut", on_metrics=stop)
    assert {row["round"] for row in rounds_in(tmp_path / "cut")} == {"1", "2", "3"}
    with (tmp_path / "cut" / "rounds.csv").open("a") as file:
        file.write("0,3,client")  # cut short by a crash
    run(recipe, tmp_path / "cut", resume=True)
    assert rounds_in(tmp_path / "cut") == rounds_in(tmp_path / "whole")


def test_a_client_whose_name_was_cut_within_a_letter_stops_no_resumed_run(tmp_path: Path) -> None:
    """A disk that fills up takes a part of what is appended, as many bytes as there is room for."""
    y = np.arange(60) % 3
    data = {"X": np.eye(3)[y], "y": y, "client": np.array(["Graz", "Köln", "Zürich"])[np.arange(60) // 20]}
    data["split"] = np.where(np.arange(60) % 4 > 0, "train", "test")
    stage = {"method": "fedavg", "train": "head", "rounds": 3}
    recipe: dict[str, Any] = {"name": "cities", "model": {"backbone": "features"}, "stages": [stage]}

    def stop(line: dict[str, Any]) -> None:
        if line["round"] == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(recipe, tmp_path / "run", on_metrics=stop, data=data)
    with (tmp_path / "run" / "rounds.csv").open("ab") as file:
        file.write("0,3,Kö".encode()[:-1])
    run(recipe, tmp_path / "run", resume=True, data=data)
    assert [row["client"] for row in rounds_in(tmp_path / "run")] == ["Graz", "Köln", "Zürich"] * 3


def test_two_processes_do_not_share_a_run_directory(tmp_path: Path) -> None:
    recipe = recipe_of(TRAIN | {"method": "fedavg", "rounds": 2})

    def again(line: dict[str, Any]) -> None:
        with pytest.raises(HeadstartError, match="another process is running there"):
            run(recipe, tmp_path / "run", resume=True)

    run(recipe, tmp_path / "run", on_metrics=again)
    assert len(lines(tmp_path / "run")) == 2


def test_of_two_processes_that_begin_together_the_loser_takes_nothing_from_the_winner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both have found the directory free."""
    recipe, refused = recipe_of(TRAIN | {"method": "fedavg", "rounds": 2}), []
    monkeypatch.setattr(RunDirectory, "check_free", lambda path: None)

    def again(line: dict[str, Any]) -> None:
        with pytest.raises(HeadstartError, match="another process is running there"):
            run(recipe_of({"method": "fedncm"}), tmp_path / "run")
        refused.append(line)

    run(recipe, tmp_path / "run", on_metrics=again)
    assert len(refused) == len(lines(tmp_path / "run")) == 2
    assert Recipe.load(tmp_path / "run" / "recipe.toml") == recipe


def test_who_waits_for_the_lock_looks_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(recipe_of({"method": "fedncm"}), tmp_path / "run")
    before, looks, look = contents(tmp_path / "run"), list[Path](), RunDirectory.check_free

    def free_at_first(path: Path) -> None:
        looks.append(path)
        if len(looks) > 2:
            look(path)

    monkeypatch.setattr(RunDirectory, "check_free", free_at_first)
    with pytest.raises(HeadstartError, match="already used"):
        run(recipe_of({"method": "fed3r"}), tmp_path / "run")
    assert contents(tmp_path / "run") == before


def test_who_lost_the_lock_after_making_the_directory_removes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody has resumed it in between."""
    recipe, out = recipe_of({"method": "fedncm"}), tmp_path / "run"
    create = RunDirectory.create
    with ExitStack() as other:

        def taken(path: Path, recipe: Recipe) -> RunDirectory:
            made = create(path, recipe)
            other.enter_context(RunDirectory(path).lock())
            return made

        monkeypatch.setattr(RunDirectory, "create", taken)
        with pytest.raises(HeadstartError, match="another process is running there"):
            run(recipe, out)
        assert (out / "recipe.toml").is_file()
    run(recipe, out, resume=True)


def test_a_lock_that_was_left_before_there_was_a_run_takes_no_directory(tmp_path: Path) -> None:
    (tmp_path / "run" / "checkpoint").mkdir(parents=True)
    (tmp_path / "run" / "checkpoint" / "lock").touch()
    run(recipe_of({"method": "fedncm"}), tmp_path / "run")
    (tmp_path / "other" / "checkpoint").mkdir(parents=True)
    (tmp_path / "other" / "checkpoint" / "mine").touch()
    with pytest.raises(HeadstartError, match="already used"):
        run(recipe_of({"method": "fedncm"}), tmp_path / "other")
