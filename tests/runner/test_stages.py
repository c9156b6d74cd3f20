"""Whole runs whose stages hand a model on: real weights, real digits and sentences, few of them."""

import csv
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from torch.nn.modules.batchnorm import _BatchNorm

from headstart.backbones import Backbone, load_backbone
from headstart.config.recipe import Model, Recipe
from headstart.core.message import Message
from headstart.data import Examples, Federation, federation
from headstart.engine.client import ClientRuntime
from headstart.errors import HeadstartError
from headstart.heads import HiddenLayers, LinearHead
from headstart.records import RunDirectory
from headstart.report import write_report
from headstart.runner import Result, run
from headstart.solvers.cohort import Cohort
from headstart.solvers.heads import batches

MODEL = {"backbone": "efficientnet-lite0", "image_size": 32}
# Ten examples at each of three clients: batches of five, none of them of a single example.
BODY = {"rounds": 2, "batch_size": 5, "lr": 0.002}
CHAIN = [
    {"method": "fedcof"},
    BODY | {"method": "fedavg", "train": "all", "temperature": 0.5},
    BODY | {"method": "scaffold", "train": "body", "clients_per_round": 2},
    BODY | {"method": "fedadam", "train": "head", "server_lr": 0.001, "clients_per_round": 2},
]
ORACLE = [
    BODY | {"method": "feddyn", "train": "all", "clients_per_round": 2},
    BODY | {"method": "centralised", "train": "all", "momentum": 0.9, "batch_size": 10, "start": "pretrained"},
]
BATCH = [
    BODY | {"method": "fedavg", "train": "all", "norm_statistics": "batch", "lr": 0.02},
    {"method": "fedncm", "clients_per_round": 2},
]
CLOSED = [BODY | {"method": "fedavg", "train": "all"}, {"method": "fedncm"}]
RECIPES = {"chain": CHAIN, "oracle": ORACLE, "batch": BATCH, "closed": CLOSED}
COSTS = ("bytes_up", "bytes_down", "forward_passes")


def images(*stages: dict[str, Any], **model: Any) -> Recipe:
    partition = {"kind": "iid", "clients": 3}
    return Recipe.parse(
        {
            "data": {"dataset": "mnist-mini", "train_examples": 30, "test_examples": 20, "partition": partition},
            "model": MODEL | model,
            "stages": list(stages),
        }
    )


def digits(*stages: dict[str, Any], **partition: Any) -> Recipe:
    return Recipe.parse(
        {
            "data": {"dataset": "digits", "partition": {"kind": "dirichlet", "clients": 10, "alpha": 0.3} | partition},
            "model": {"backbone": "features"},
            "stages": list(stages),
        }
    )


@pytest.fixture(scope="module", autouse=True)
def _light(no_report: None) -> Iterator[None]:
    """Data that are read once, no reports, and no compiler, which a small body does not earn back."""
    load, loaded = federation.load_dataset, {}

    def once(data: Any, seed: int, **how: bool) -> Any:
        key = f"{data!r} {seed} {how}"
        return loaded[key] if key in loaded else loaded.setdefault(key, load(data, seed, **how))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(federation, "load_dataset", once)
        patch.setitem(sys.modules, "openvino", None)
        yield


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Result]:
    """Uninterrupted runs by name, with their reports, each played once."""
    folder, results = tmp_path_factory.mktemp("whole"), {}

    def result(name: str) -> Result:
        if name not in results:
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv("HEADSTART_CACHE", str(folder / "cache"))
                patch.setattr("headstart.runner.run_recipe.write_report", write_report)
                results[name] = run(images(*RECIPES[name]), folder / name)
        return results[name]

    return result


Whole = Callable[[str], Result]


def out_of(result: Result) -> Path:
    assert result.out is not None
    return result.out


def metrics_of(out: Path) -> list[dict[str, Any]]:
    """Evaluations without the clock."""
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if key != "seconds"} for line in lines]


def clients_of(out: Path) -> list[dict[str, str]]:
    with (out / "clients.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def same_bits(left: Path, right: Path) -> None:
    one, other = load_file(left), load_file(right)
    assert set(one) == set(other)
    differing = [name for name in one if one[name].tobytes() != other[name].tobytes()]
    assert not differing, f"{len(differing)} of {len(one)} arrays differ: {differing[:5]}"


def same_run(left: Path, right: Path) -> None:
    """The same models, evaluations and costs, bit for bit; only clock and memory may differ."""
    same_bits(left / "model" / "head.safetensors", right / "model" / "head.safetensors")
    assert (left / "model" / "model.safetensors").exists() == (right / "model" / "model.safetensors").exists()
    if (left / "model" / "model.safetensors").exists():
        same_bits(left / "model" / "model.safetensors", right / "model" / "model.safetensors")
    assert metrics_of(left) == metrics_of(right)
    assert (left / "clients.csv").read_text() == (right / "clients.csv").read_text()
    one, other = (json.loads((path / "summary.json").read_text()) for path in (left, right))
    for summary in (one, other):
        for table in (summary, *summary["stages"]):
            table.pop("seconds")
        for name in ("peak_rss_bytes", "started", "ended", "total_seconds"):
            summary.pop(name)
    assert one == other


def with_interruptions(recipe: Recipe, out: Path, every: int = 2) -> int:
    """Play a run that is stopped before every second checkpoint is written, until it is through; how often it was.

    A stage that leaves clients something of their own writes a second one at its end: stop before every third there.

    What else draws from torch's generator in between must not matter.
    """
    save, stops = RunDirectory.save_checkpoint, 0
    while True:
        saved = [0]

        def stop(self: RunDirectory, *arguments: Any, saved: list[int] = saved, **keys: Any) -> None:
            saved[0] += 1
            if saved[0] == every:
                raise KeyboardInterrupt  # the round's metrics are written, its checkpoint is not
            save(self, *arguments, **keys)

        with pytest.MonkeyPatch.context() as patch, torch.random.fork_rng():
            torch.manual_seed(stops)
            patch.setattr(RunDirectory, "save_checkpoint", stop)
            try:
                run(recipe, out, resume=out.exists())
            except KeyboardInterrupt:
                stops += 1
                assert not (out / "summary.json").exists()
            else:
                return stops


def features_of(backbone: Backbone, examples: Examples) -> np.ndarray:
    """Features [n, d] of the body as it is, 32 examples at a time."""
    inputs = [backbone.transform(value, "example") for value in examples.raw(0, len(examples))]
    parts = [backbone.transform.collate(inputs[start : start + 32]) for start in range(0, len(inputs), 32)]
    with torch.inference_mode():
        return np.concatenate([backbone.body(*part).numpy() for part in parts])


def parts_of(out: Path) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Backbone and head of `model.safetensors`, under the names of each."""
    arrays = load_file(out / "model" / "model.safetensors")
    head = {name.removeprefix("head."): array for name, array in arrays.items() if name.startswith("head.")}
    return {name: array for name, array in arrays.items() if not name.startswith("head.")}, head


def under(part: str, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The arrays under the names that they have in a message."""
    return {f"{part}.{name}": array for name, array in arrays.items()}


# ------------------------------------------------------------------------------------------------------------- resume


@pytest.mark.parametrize(
    ("name", "checkpoints"), [pytest.param("chain", 11, marks=pytest.mark.slow), ("oracle", 6), ("batch", 6)]
)
def test_a_run_that_is_interrupted_again_and_again_ends_in_the_same_bits(
    name: str, checkpoints: int, whole: Whole, tmp_path: Path
) -> None:
    expected = out_of(whole(name))
    assert with_interruptions(images(*RECIPES[name]), tmp_path / "cut") == checkpoints - 1
    same_run(expected, tmp_path / "cut")


def test_a_run_interrupted_between_two_stages_ends_in_the_same_bits(
    whole: Whole, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last round of a stage is saved, the model that the stage hands on is not."""
    save = RunDirectory.save_model

    def stop(self: RunDirectory, stage: int, *arguments: Any) -> None:
        if stage == 1:
            raise KeyboardInterrupt
        save(self, stage, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(RunDirectory, "save_model", stop)
        with pytest.raises(KeyboardInterrupt):
            run(images(*CHAIN), tmp_path / "cut")
    run(images(*CHAIN), tmp_path / "cut", resume=True)
    same_run(out_of(whole("chain")), tmp_path / "cut")


@pytest.mark.slow
def test_a_process_killed_in_the_middle_of_body_training_resumes_to_the_same_bits(tmp_path: Path) -> None:
    recipe = images(BODY | {"method": "fedavg", "train": "all", "rounds": 5, "clients_per_round": 2})
    path, out = tmp_path / "recipe.toml", tmp_path / "killed"
    path.write_text(recipe.to_toml())
    command = [sys.executable, "-m", "headstart.cli", "run", str(path), "--out", str(out)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and process.poll() is None:
        if (out / "metrics.jsonl").exists() and (out / "metrics.jsonl").read_text().count("\n") >= 2:
            process.send_signal(signal.SIGKILL)
            break
        time.sleep(0.005)
    assert process.wait() == -signal.SIGKILL, "the run ended before it could be killed"
    assert 2 <= len(metrics_of(out)) < 5
    subprocess.run([*command, "--resume"], check=True, stdout=subprocess.DEVNULL)
    run(recipe, tmp_path / "whole")
    for name in ("model", "head"):
        same_bits(tmp_path / "whole" / "model" / f"{name}.safetensors", out / "model" / f"{name}.safetensors")
    assert [line["round"] for line in metrics_of(out)] == [1, 2, 3, 4, 5]
    assert [line["accuracy"] for line in metrics_of(out)] == [
        line["accuracy"] for line in metrics_of(tmp_path / "whole")
    ]


# -------------------------------------------------------------------------------------------------------------- start


def test_start_at_a_stage_by_its_number_is_as_if_nothing_had_come_between(tmp_path: Path) -> None:
    first = BODY | {"method": "fedavg", "train": "all", "rounds": 1}
    last = BODY | {"method": "fedprox", "train": "all", "rounds": 1}
    # So small a rate moves no float32: this stage hands on what it was given, and takes number 1.
    idle = {"method": "fedavg", "train": "head", "rounds": 1, "lr": 1e-30}
    other = BODY | {"method": "fedavg", "train": "body", "rounds": 1, "norm_statistics": "batch"}
    direct = run(images(first, idle, last), tmp_path / "direct")
    around = run(images(first, other, last | {"start": 0}), tmp_path / "around")
    same_bits(*(out_of(result) / "model" / "model.safetensors" for result in (direct, around)))
    assert direct.summary["stages"][2]["bytes_down"] == around.summary["stages"][2]["bytes_down"]
    zeroth, between = (load_file(tmp_path / "around" / "checkpoint" / f"stage-{n}.safetensors") for n in (0, 1))
    assert not np.array_equal(zeroth["body._conv_stem.weight"], between["body._conv_stem.weight"])


def test_start_at_a_closed_form_stage_has_its_head_and_the_pretrained_body(tmp_path: Path) -> None:
    last = BODY | {"method": "fedavg", "train": "body", "rounds": 1}
    between = BODY | {"method": "fedavg", "train": "all", "rounds": 1}
    direct = run(images({"method": "fedncm"}, {"method": "fedncm"}, last), tmp_path / "direct")
    around = run(images({"method": "fedncm"}, between, last | {"start": 0}), tmp_path / "around")
    same_bits(*(out_of(result) / "model" / "model.safetensors" for result in (direct, around)))


def test_start_at_the_pretrained_model_forgets_body_and_head(tmp_path: Path) -> None:
    last = BODY | {"method": "fedavg", "train": "all", "rounds": 1}
    before = BODY | {"method": "fedavg", "train": "all", "rounds": 1, "norm_statistics": "batch"}
    fresh = run(images({"method": "fedncm"}, last | {"head_init": "random"}), tmp_path / "fresh")
    again = run(images(before, last | {"start": "pretrained"}), tmp_path / "again")
    same_bits(*(out_of(result) / "model" / "model.safetensors" for result in (fresh, again)))
    assert fresh.summary["accuracy"] == again.summary["accuracy"]
    # A closed form from the pre-trained body is the one that a run of its own gives; its clients need no body.
    alone = run(images({"method": "fedncm"}), tmp_path / "alone")
    back = run(images(before, {"method": "fedncm", "start": "pretrained"}), tmp_path / "back")
    np.testing.assert_array_equal(alone.head.weight, back.head.weight)
    assert alone.summary["bytes_down"] == back.summary["stages"][1]["bytes_down"]
    assert not (out_of(back) / "model" / "model.safetensors").exists()


# -------------------------------------------------------------------------------------------------- what a run leaves


def test_the_saved_model_loads_as_weights_and_scores_what_was_reported(whole: Whole) -> None:
    result = whole("chain")
    out, test = out_of(result), result.federation.dataset.test
    path = out / "model" / "model.safetensors"
    body, head = parts_of(out)
    separate = load_file(out / "model" / "head.safetensors")
    assert set(head) == set(separate) == {"weight", "bias"}
    for name, array in separate.items():
        assert head[name].tobytes() == array.tobytes()
    trained, pretrained = (load_backbone(Model(**MODEL | keys)) for keys in ({"weights": str(path)}, {}))
    names = set(trained.core.state_dict())
    assert set(body) == names
    changed = [name for name, tensor in pretrained.core.state_dict().items() if (body[name] != tensor.numpy()).any()]
    assert set(changed) == {name for name in names if not name.endswith("num_batches_tracked")}
    features = features_of(trained, test)
    accuracy = ((features @ separate["weight"].T + separate["bias"]).argmax(axis=1) == test.labels).mean()
    assert accuracy == result.summary["accuracy"] == metrics_of(out)[-1]["accuracy"]
    untouched = (features_of(pretrained, test) @ separate["weight"].T + separate["bias"]).argmax(axis=1)
    assert (untouched != (features @ separate["weight"].T + separate["bias"]).argmax(axis=1)).any()


def test_a_run_from_the_saved_weights_starts_where_the_other_ended(whole: Whole) -> None:
    chained = whole("closed")
    weights = str(out_of(chained) / "model" / "model.safetensors")
    alone = run(images({"method": "fedncm"}, weights=weights))
    np.testing.assert_array_equal(alone.head.weight, chained.head.weight)
    assert alone.summary["accuracy"] == chained.summary["accuracy"]


def test_heads_alone_leave_no_body(tmp_path: Path) -> None:
    train = {"method": "fedavg", "train": "head", "rounds": 1, "lr": 0.01}
    run(images({"method": "fedcof"}, train), tmp_path / "run")
    left = {path.name for path in (tmp_path / "run" / "model").iterdir()}
    assert left == {"classes.json", "head.safetensors"}


def test_a_closed_form_after_body_training_is_that_of_the_trained_body(whole: Whole) -> None:
    result = whole("closed")
    out, data = out_of(result), result.federation.dataset
    body, head = parts_of(out)
    features = features_of(
        load_backbone(Model(**MODEL, weights=str(out / "model" / "model.safetensors"))), data.train
    ).astype(np.float64)
    means = np.stack([features[data.train.labels == label].mean(axis=0) for label in range(10)])
    np.testing.assert_allclose(head["weight"], means / np.linalg.norm(means, axis=1, keepdims=True), rtol=1e-5)
    pretrained = run(images({"method": "fedncm"})).head.weight
    assert np.abs(pretrained - head["weight"]).max() > 1e-3
    # Every client is asked once, by number of the round, and needs the trained body for its answer.
    once = Message(scalars={"round": 0}).nbytes + Message(under("body", body)).nbytes
    assert [int(row["bytes_down"]) for row in clients_of(out) if row["stage"] == "1"] == [once] * 3
    assert result.summary["stages"][1]["bytes_down"] == 3 * once


def test_what_a_stage_freezes_travels_once_to_each_client_that_is_asked(whole: Whole) -> None:
    """Scaffold trains the body under the head of the stage before; FedAdam the head on the body of the stage before."""
    out = out_of(whole("chain"))
    rows = clients_of(out)
    body, head = parts_of(out)
    trained = {name: array for name, array in body.items() if not name.endswith("num_batches_tracked")}
    moving = {name: array for name, array in trained.items() if not name.endswith(("running_mean", "running_var"))}
    statistics = {f"statistics.body.{name}": array for name, array in trained.items() if name not in moving}
    both = {f"{what}.body.{name}": array for what in ("model", "control") for name, array in moving.items()}
    down = {
        "2": Message(both | statistics, {"round": 0}).nbytes,
        "3": Message({f"model.head.{name}": array for name, array in head.items()}, {"round": 0}).nbytes,
    }
    frozen = {"2": Message(under("head", head)).nbytes, "3": Message(under("body", body)).nbytes}
    for stage in ("2", "3"):
        mine = [row for row in rows if row["stage"] == stage]
        one = sum(int(row["bytes_up"]) for row in mine) // 4  # two of three clients are heard in each of two rounds
        heard = [int(row["bytes_up"]) // one for row in mine]
        assert sum(heard) == 4
        expected = [times * down[stage] + (times > 0) * frozen[stage] for times in heard]
        assert [int(row["bytes_down"]) for row in mine] == expected


def test_frozen_statistics_of_an_earlier_stage_travel_once(tmp_path: Path) -> None:
    stages = [BODY | {"method": "fedavg", "train": "all", "rounds": 1}]
    stages.append(BODY | {"method": "fedavg", "train": "all", "norm_statistics": "freeze"})
    result = run(images(*stages), tmp_path / "run")
    body, head = parts_of(out_of(result))
    moving = {name: array for name, array in body.items() if name.endswith(("weight", "bias"))}
    frozen = {name: array for name, array in body.items() if name.endswith(("running_mean", "running_var"))}
    model = {f"model.body.{name}": array for name, array in moving.items()}
    model |= {f"model.head.{name}": array for name, array in head.items()}
    expected = 2 * Message(model, {"round": 0}).nbytes + Message(under("body", frozen)).nbytes
    assert result.summary["stages"][1]["bytes_down"] == 3 * expected
    # The pre-trained body is public, and its statistics with it.
    alone = run(images(stages[1]))
    assert alone.summary["bytes_down"] == 3 * 2 * Message(model, {"round": 0}).nbytes


def test_a_frozen_head_stays_as_it_is(tmp_path: Path) -> None:
    before = run(images({"method": "fedcof"})).head
    after = run(images({"method": "fedcof"}, BODY | {"method": "fedavg", "train": "body", "rounds": 1})).head
    np.testing.assert_array_equal(before.weight, after.weight)
    np.testing.assert_array_equal(before.bias, after.bias)


# -------------------------------------------------------------------------------------------------------- clients.csv


@pytest.mark.parametrize("name", ["chain", "oracle"])
def test_one_row_for_each_client_and_stage(name: str, whole: Whole) -> None:
    result = whole(name)
    rows, metrics = clients_of(out_of(result)), metrics_of(out_of(result))
    pooled = [stage["method"] == "centralised" for stage in result.summary["stages"]]
    expected = [
        (str(number), client)
        for number, alone in enumerate(pooled)
        for client in (["everybody"] if alone else [f"client-{k}" for k in range(3)])
    ]
    assert [(row["stage"], row["client"]) for row in rows] == expected
    for number, stage in enumerate(result.summary["stages"]):
        mine = [row for row in rows if row["stage"] == str(number)]
        for cost in COSTS:
            assert sum(int(row[cost]) for row in mine) == stage[cost]
        if pooled[number]:
            assert [row["accuracy"] for row in mine] == [""]
        else:
            last = [line for line in metrics if line["stage"] == number][-1]
            mean = np.mean([float(row["accuracy"]) for row in mine])
            assert mean == pytest.approx(last["local_accuracy_mean"], abs=1e-6)
            assert stage["local_accuracy_mean"] == last["local_accuracy_mean"]


def test_a_clients_accuracy_is_that_on_its_own_test_examples(tmp_path: Path) -> None:
    train = {"method": "fedavg", "train": "head", "rounds": 2, "lr": 0.001}
    result = run(digits({"method": "fedncm"}, train, test="follow"), tmp_path / "run")
    head, test = load_file(tmp_path / "run" / "model" / "head.safetensors"), result.federation.dataset.test
    right = (test.features() @ head["weight"].T + head["bias"]).argmax(axis=1) == test.labels
    owners = result.federation.test_owners
    assert owners is not None
    expected = [right[owners == client].mean() for client in range(10)]
    found = [float(row["accuracy"]) for row in clients_of(tmp_path / "run") if row["stage"] == "1"]
    assert found == pytest.approx(expected, abs=1e-6)
    assert len(set(found)) > 3


# --------------------------------------------------------------------------------------------------------- centralised


def pooled_cohort(federation: Federation) -> Cohort:
    """Everybody's examples, in the order of the data."""
    rows = np.flatnonzero(federation.owners >= 0)
    labels = federation.dataset.train.labels[rows]
    source = np.zeros((0, 0), np.float32)
    return Cohort(np.array([0]), source, rows, labels, np.zeros_like(rows), np.array([True]), lambda name: np.zeros(0))


def parameters_of(head: LinearHead) -> list[torch.Tensor]:
    """Weight and bias of each layer, from the features to the scores."""
    arrays = head.arrays()
    layers = ("hidden.0.", "hidden.1.", "") if head.feature_map else ("",)
    return [torch.tensor(arrays[layer + part], requires_grad=True) for layer in layers for part in ("weight", "bias")]


def loss_of(head: list[torch.Tensor], features: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    *hidden, weight, bias = head
    for one, other in zip(hidden[::2], hidden[1::2], strict=True):
        features = torch.nn.functional.linear(features, one, other).relu()
    return torch.nn.functional.cross_entropy(features @ weight.T + bias, labels)


FIRST = {
    "linear": {"method": "fedncm"},
    "mlp": {"method": "fedavg", "train": "head", "head": "mlp", "hidden": 12, "rounds": 1, "lr": 0.001},
}


@pytest.mark.parametrize(("kind", "momentum"), [("linear", 0.0), ("linear", 0.9), ("mlp", 0.9)])
def test_centralised_training_of_a_head_is_sgd_over_all_examples(kind: str, momentum: float) -> None:
    stage = {"method": "centralised", "train": "head", "rounds": 3, "lr": 0.001, "momentum": momentum, "batch_size": 96}
    recipe = digits(FIRST[kind], stage | {"head": kind, "hidden": 12})
    result, begin = run(recipe), run(digits(FIRST[kind])).head
    cohort = pooled_cohort(result.federation)
    features = torch.from_numpy(result.federation.dataset.train.features()[cohort.rows].astype(np.float32))
    labels = torch.from_numpy(cohort.labels)

    def trained(forgetting: bool) -> list[torch.Tensor]:
        head = parameters_of(begin)
        sgd = torch.optim.SGD(head, lr=0.001, momentum=momentum)
        for epoch in range(3):
            if forgetting:
                sgd = torch.optim.SGD(head, lr=0.001, momentum=momentum)
            (plan,) = batches(cohort, recipe.stages[1], epoch, (0, 1))  # type: ignore[arg-type]
            assert sorted(plan[plan >= 0]) == list(range(len(cohort.rows)))
            for batch in plan:
                here = batch[batch >= 0]
                sgd.zero_grad()
                loss_of(head, features[here], labels[here]).backward()
                sgd.step()
        return head

    found, expected, other = parameters_of(result.head), trained(False), trained(True)
    for mine, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(mine.detach(), theirs.detach(), rtol=1e-3, atol=1e-5)
    largest = max((mine - theirs).detach().abs().max().item() for mine, theirs in zip(found, other, strict=True))
    assert momentum == 0 or largest > 1e-2
    costs = result.summary["stages"][1]
    assert (costs["bytes_up"], costs["bytes_down"], costs["published_bytes"]) == (0, 0, 0)
    assert costs["forward_passes"] == len(cohort.rows)


@pytest.mark.parametrize("kind", ["linear", "mlp"])
def test_centralised_training_of_a_body_is_sgd_over_all_examples(kind: str, tmp_path: Path) -> None:
    """A body without batch norm and dropout, whole batches and no flips: nothing is random but the start."""
    stage = {"method": "centralised", "train": "all", "rounds": 3, "lr": 0.01, "momentum": 0.9, "batch_size": "full"}
    stage |= {"augment": "none", "head": kind, "hidden": 12}
    own = {"backbone": "squeezenet1_1", "weights": "random"}
    result = run(images(FIRST[kind], stage, **own), tmp_path / "run")
    head = parameters_of(run(images(FIRST[kind], **own)).head)
    data = result.federation.dataset.train
    backbone, untouched = (load_backbone(Model(**MODEL | own)) for _ in range(2))
    inputs = backbone.transform.collate([backbone.transform(value, "") for value in data.raw(0, len(data))])
    backbone.body.requires_grad_(True)
    sgd = torch.optim.SGD([*backbone.core.parameters(), *head], lr=0.01, momentum=0.9)
    for _ in range(3):
        sgd.zero_grad()
        loss_of(head, backbone.body(*inputs), torch.from_numpy(data.labels)).backward()
        sgd.step()
    body, _ = parts_of(tmp_path / "run")
    start = untouched.core.state_dict()
    for name, tensor in backbone.core.state_dict().items():
        step = float((tensor - start[name]).abs().max())
        assert step > 0
        assert np.abs(body[name] - tensor.numpy()).max() < 0.02 * step
    for mine, theirs in zip(parameters_of(result.head), head, strict=True):
        np.testing.assert_allclose(mine.detach(), theirs.detach(), rtol=1e-3, atol=1e-5)
    costs = result.summary["stages"][1]
    assert (costs["bytes_up"], costs["bytes_down"]) == (0, 0)
    assert costs["forward_passes"] == 3 * 3 * 30  # three for each example of a step, in three rounds


# ----------------------------------------------------------------------------------------------------------- deadlines


def with_slow_answers(patch: pytest.MonkeyPatch, seconds: Callable[[Cohort], float]) -> None:
    """A clock that only answers move."""
    now, answer = [0.0], ClientRuntime.answer

    def slow(self: ClientRuntime, cohort: Cohort, message: Message) -> Any:
        replies = answer(self, cohort, message)
        now[0] += seconds(cohort)
        return replies

    patch.setattr(ClientRuntime, "answer", slow)
    patch.setattr("headstart.engine.local.time", SimpleNamespace(monotonic=lambda: now[0]))


def test_a_late_client_is_left_out_by_name_and_the_round_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = BODY | {"method": "fedavg", "train": "all", "rounds": 1, "deadline": 2.5}
    why = "late: it took 4.0 s, and the deadline is 2.5 s"
    without = []
    for client in range(3):
        with monkeypatch.context() as patch:
            with_slow_answers(patch, lambda cohort, late=client: 4.0 if late in cohort.clients else 2.0)
            result = run(images(stage))
            without.append(result)
            dropped = result.summary["stages"][0]["dropped"]
            assert dropped == [{"round": 1, "clients": f"client-{client}", "why": why}]
            if client == 2:
                with pytest.raises(HeadstartError, match=rf"round 1: 2 of 3 clients .* min_replies = 3; .*: {why}$"):
                    run(images(stage | {"min_replies": 3}), tmp_path / "stopped")
    assert not (tmp_path / "stopped").exists()
    everybody = run(images(stage | {"deadline": 600.0}))
    assert everybody.summary["stages"][0]["dropped"] == []
    # Three clients of one size: their mean is the mean of the means without one of them.
    means = np.stack([result.head.weight for result in without])
    np.testing.assert_allclose(means.mean(axis=0), everybody.head.weight, rtol=1e-5, atol=1e-7)
    assert np.abs(means - everybody.head.weight).max() > 1e-4
    # A late client's work was done and paid for all the same.
    for cost in COSTS:
        assert without[0].summary[cost] == everybody.summary[cost]


def test_clients_that_answer_together_are_timed_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = {"method": "fedavg", "train": "head", "rounds": 2, "lr": 0.001, "deadline": 3.0}
    with monkeypatch.context() as patch:
        with_slow_answers(patch, lambda cohort: 2.9 * len(cohort.clients))
        assert run(digits(stage)).summary["stages"][0]["dropped"] == []
    with_slow_answers(monkeypatch, lambda cohort: 3.1 * len(cohort.clients))
    with pytest.raises(HeadstartError, match="0 of 10 clients sent a usable reply, min_replies = 1"):
        run(digits(stage))


# ----------------------------------------------------------------------------------------------------------------- MLP

MLP = {"method": "fedavg", "train": "head", "head": "mlp", "hidden": 12, "rounds": 20, "lr": 0.03}


def test_an_mlp_head_by_hand(tmp_path: Path) -> None:
    result = run(digits(MLP), tmp_path / "run")
    arrays = load_file(tmp_path / "run" / "model" / "head.safetensors")
    assert {name: array.shape for name, array in arrays.items()} == {
        "hidden.0.weight": (12, 64), "hidden.0.bias": (12,), "hidden.1.weight": (12, 12), "hidden.1.bias": (12,),
        "weight": (10, 12), "bias": (10,),
    }  # fmt: skip
    test = result.federation.dataset.test
    values = test.features().astype(np.float64)
    for layer in ("hidden.0.", "hidden.1."):
        values = values @ arrays[f"{layer}weight"].T + arrays[f"{layer}bias"]
        values[values < 0] = 0
    accuracy = ((values @ arrays["weight"].T + arrays["bias"]).argmax(axis=1) == test.labels).mean()
    assert accuracy == result.summary["accuracy"] > 0.3  # chance is 0.1
    loaded = LinearHead.load(tmp_path / "run" / "model" / "head.safetensors")
    assert isinstance(loaded.feature_map, HiddenLayers)
    np.testing.assert_array_equal(loaded.scores(test.features()), result.head.scores(test.features()))


def test_heads_of_other_layers_cannot_be_taken_over() -> None:
    linear = {"method": "fedavg", "train": "head", "rounds": 1, "lr": 0.001}
    for stages, head in (([{"method": "fedcof"}, MLP], "mlp"), ([MLP | {"rounds": 1}, linear], "linear")):
        with pytest.raises(HeadstartError, match=r"stages\.1\.head_init: the earlier stage's head has other layers"):
            run(digits(*stages))
        fresh = run(digits(stages[0], stages[1] | {"head_init": "random"})).head
        assert isinstance(fresh.feature_map, HiddenLayers) == (head == "mlp")
    again = run(digits(MLP | {"rounds": 1}, MLP | {"lr": 1e-30, "rounds": 1}))
    first = run(digits(MLP | {"rounds": 1}))
    np.testing.assert_array_equal(again.head.arrays()["hidden.0.weight"], first.head.arrays()["hidden.0.weight"])


def test_an_mlp_head_trains_with_the_body(tmp_path: Path) -> None:
    stage = BODY | {"method": "fedavg", "train": "all", "head": "mlp", "hidden": 8, "rounds": 1, "lr": 0.01}
    result = run(images(stage), tmp_path / "run")
    body, head = parts_of(tmp_path / "run")
    assert head["hidden.0.weight"].shape == (8, 1280)
    weights = str(tmp_path / "run" / "model" / "model.safetensors")
    test = result.federation.dataset.test
    values = features_of(load_backbone(Model(**MODEL, weights=weights)), test)
    for layer in ("hidden.0.", "hidden.1."):
        values = np.maximum(values @ head[f"{layer}weight"].T + head[f"{layer}bias"], 0)
    accuracy = ((values @ head["weight"].T + head["bias"]).argmax(axis=1) == test.labels).mean()
    assert accuracy == result.summary["accuracy"]
    sent = {f"model.body.{name}": array for name, array in body.items() if name.endswith(("weight", "bias"))}
    sent |= {f"statistics.body.{name}": array for name, array in body.items() if ".running_" in name}
    sent |= {f"model.head.{name}": array for name, array in head.items()}
    assert result.summary["bytes_down"] == 3 * Message(sent, {"round": 0}).nbytes


# -------------------------------------------------------------------------------------------------- batch normalisation


def test_a_body_without_running_statistics_is_read_without_them(whole: Whole, tmp_path: Path) -> None:
    result = whole("batch")
    data, path = result.federation.dataset, out_of(result) / "model" / "model.safetensors"
    body, head = parts_of(out_of(result))
    pretrained = load_backbone(Model(**MODEL)).core.state_dict()
    for name, array in body.items():
        if ".running_" in name:
            np.testing.assert_array_equal(array, pretrained[name])
    backbone = load_backbone(Model(**MODEL, weights=str(path)))
    by_statistics = features_of(backbone, data.train)
    for module in backbone.body.modules():
        if isinstance(module, _BatchNorm):
            module.running_mean = module.running_var = None
            module.track_running_stats = False
    features, test = np.empty_like(by_statistics), features_of(backbone, data.test)
    owners = result.federation.owners
    for owner in np.unique(owners):  # no batch mixes clients; the test split is everybody's
        features[owners == owner] = features_of(backbone, data.train.take(np.flatnonzero(owners == owner)))
    means = np.stack([features[data.train.labels == label].astype(np.float64).mean(axis=0) for label in range(10)])
    np.testing.assert_allclose(head["weight"], means / np.linalg.norm(means, axis=1, keepdims=True), rtol=1e-4)
    assert np.abs(features - by_statistics).max() > 0.1
    assert ((test @ head["weight"].T).argmax(axis=1) == data.test.labels).mean() == result.summary["accuracy"]


def test_going_back_to_a_body_without_running_statistics(whole: Whole) -> None:
    between = BODY | {"method": "fedavg", "train": "all", "rounds": 1}
    back = run(images(BATCH[0], between, BATCH[1] | {"start": 0}))
    # Clients are heard in another order.
    np.testing.assert_allclose(back.head.weight, whole("batch").head.weight, rtol=1e-6)
    assert back.summary["accuracy"] == whole("batch").summary["accuracy"]


def test_cached_features_tell_statistics_of_batches_from_running_ones(tmp_path: Path) -> None:
    """The same weights, read in both ways from one cache."""
    first = run(images(*BATCH), tmp_path / "first")
    weights = str(out_of(first) / "model" / "model.safetensors")
    again = run(images({"method": "fedncm"}, weights=weights))
    data = again.federation.dataset.train
    features = features_of(load_backbone(Model(**MODEL, weights=weights)), data).astype(np.float64)
    means = np.stack([features[data.labels == label].mean(axis=0) for label in range(10)])
    np.testing.assert_allclose(again.head.weight, means / np.linalg.norm(means, axis=1, keepdims=True), rtol=1e-4)


# ---------------------------------------------------------------------------------------------------------------- text


@pytest.mark.slow
def test_a_text_body_trains_resumes_and_loads(tmp_path: Path) -> None:
    topics = {
        "sport": ["The team won the match", "She scored a goal", "The coach praised his players", "A race was run"],
        "food": ["The soup needs salt", "Bake the bread for an hour", "Fresh tomatoes taste sweet", "He fried an egg"],
    }
    rows = ["text,label,client"]
    rows += [f"{text} {n},{topic},c{n % 2}" for topic, texts in topics.items() for n in range(3) for text in texts]
    (tmp_path / "texts.csv").write_text("\n".join(rows))
    stage = {"method": "fedavg", "train": "all", "rounds": 2, "lr": 0.05, "batch_size": 4, "local_steps": 2}
    model = {"backbone": "all-MiniLM-L6-v2", "max_tokens": 8}
    data = {"dataset": str(tmp_path / "texts.csv"), "client_column": "client", "partition": {"kind": "natural"}}
    recipe = Recipe.parse({"data": data, "model": model, "stages": [stage]})
    result = run(recipe, tmp_path / "whole")
    assert with_interruptions(recipe, tmp_path / "cut") == 2  # after a round, and between the stages
    same_run(tmp_path / "whole", tmp_path / "cut")
    body, head = parts_of(tmp_path / "whole")
    backbone = load_backbone(Model(**model, weights=str(tmp_path / "whole" / "model" / "model.safetensors")))
    pretrained = load_backbone(Model(**model)).core.state_dict()
    # Features are taken before the pooler, which stays as it was.
    same = {name for name, tensor in pretrained.items() if np.array_equal(body[name], tensor.numpy())}
    assert same == {"pooler.dense.weight", "pooler.dense.bias"}
    test = result.federation.dataset.test
    scores = features_of(backbone, test) @ head["weight"].T + head["bias"]
    assert (scores.argmax(axis=1) == test.labels).mean() == result.summary["accuracy"]
    # Three times, in two rounds, at most two batches of four.
    assert result.summary["forward_passes"] == 3 * 2 * sum(min(2 * 4, size) for size in result.federation.sizes)
