"""Several tasks in one recipe: each as if it were alone, except for what all clients share; and FedYolo's modules.

Heads are trained on digits, low and high ones as two tasks. Bodies are a tiny vision transformer, saved to disk once,
that reads images of 8 x 8 pixels; its tasks have three and two classes.
"""

import gc
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors import safe_open
from safetensors.numpy import load_file
from torch.nn import functional

from headstart.backbones import Backbone, load_backbone
from headstart.config.recipe import Model, Recipe
from headstart.core.message import Message
from headstart.core.reply import Reply
from headstart.data import Federation
from headstart.engine import round as engine_round
from headstart.engine.client import ClientRuntime, sender_of
from headstart.engine.model_store import ModelStore
from headstart.errors import HeadstartError, MessageError
from headstart.export.replay import replay
from headstart.heads import LinearHead
from headstart.modules import plain_state
from headstart.records.directory import RunDirectory
from headstart.report import write_report
from headstart.runner import Result, run
from headstart.solvers.cohort import Cohort
from tests.helpers import drawing
from tests.runner.test_stages import _light, metrics_of, out_of, same_bits, with_interruptions  # noqa: F401 (a fixture among them)

LOW = {"name": "low", "dataset": "digits", "classes": [0, 1, 2, 3, 4], "partition": {"kind": "iid", "clients": 4}}
HIGH = {
    "name": "high", "dataset": "digits", "classes": [5, 6, 7, 8, 9], "train_examples": 300,
    "partition": {"kind": "dirichlet", "alpha": 0.5, "clients": 3},
}  # fmt: skip
MNIST = {"dataset": "mnist-mini", "test_examples": 20}
ABC = MNIST | {"name": "abc", "classes": [0, 1, 2], "train_examples": 33, "partition": {"kind": "iid", "clients": 3}}
DE = MNIST | {"name": "de", "classes": [4, 3], "train_examples": 22, "partition": {"kind": "iid", "clients": 2}}
HEAD = {"train": "head", "rounds": 4, "lr": 0.002, "batch_size": 20, "sampling": "tasks"}
BODY = {"rounds": 2, "lr": 0.05, "batch_size": 4, "augment": "none", "momentum": 0.0}
SIZES = {"lora": {"rank": 2}, "adapter": {"bottleneck": 3}, "vpt": {"tokens": 2}}
YOLO = BODY | {"method": "fedyolo", "train": "lora", "rank": 2, "lr": 0.3}
METHODS: dict[str, dict[str, Any]] = {
    "fedavg": {},
    "fedprox": {"mu": 0.1},
    "fedavgm": {},
    "fedadam": {},
    "fedyogi": {},
    "fedadagrad": {},
    "feddyn": {"alpha_dyn": 0.1},
    "scaffold": {},
    "fednova": {"momentum": 0.5, "server_momentum": 0.3},
    "ditto": {},
    "per-fedavg": {"batch_size": 10},
    "local-only": {"momentum": 0.5},
}
CLOCK = ("seconds", "bytes_up", "bytes_down")


# ----------------------------------------------------------------------------------------------------------------- runs


@dataclass
class Stage:
    """What a stage did: its method, the server's state before and after every round, and every answer."""

    method: Any
    channel: Any
    client_states: Any
    ledger: Any
    states: list[Any] = field(default_factory=list)
    drawn: list[list[int]] = field(default_factory=list)
    replies: list[list[Reply]] = field(default_factory=list)

    def head(self, task: int = 0, at: int = -1, own: Any = None) -> LinearHead:
        """The head of the model after a round, which is in the body from then on."""
        head: LinearHead = self.method.load(self.method.model(self.states[at], task), task, own)
        return head

    def vectors(self, at: int) -> dict[str, dict[str, np.ndarray]]:
        """The model after a round, and what the server remembers: what is a task's own under names that end in it."""
        state, found = self.states[at], dict[str, dict[str, np.ndarray]]()
        ends = ["", *(f"@{name}" for name in self.method.names)]
        for end, part in zip(ends, (state.common, *state.tasks), strict=True):
            for what, values in {"model": part.params, **part.memory}.items():
                found.setdefault(what, {}).update({f"{name}{end}": value for name, value in values.items()})
        return found

    def params(self, at: int) -> dict[str, np.ndarray]:
        """The model after a round."""
        return self.vectors(at)["model"]

    def updates(self, round: int = 0) -> dict[int, Message]:
        """What each client sent in a round."""
        return {int(reply.clients[0]): reply.message for reply in self.replies[round]}

    def broadcast(self, task: int) -> Message:
        """What a client of a task was sent in the first round."""
        message: Message = self.method.broadcast(self.states[0], 0, -1, task)
        return message

    def add(self, total: Any, reply: Reply) -> None:
        """Add a reply of the first round to a total, as the server does."""
        client, message = int(reply.clients[0]), self.broadcast(reply.task)
        self.channel.add(total, reply, sender_of(self.method, client, 0, reply.task, message))


@dataclass
class Watched:
    """A run and its stages."""

    result: Result
    store: ModelStore
    stages: list[Stage]
    lines: list[dict[str, Any]]

    @property
    def federation(self) -> Federation:
        return self.result.federation


def watch(recipe: Recipe, out: Path | None = None, **keys: Any) -> Watched:
    """Run a recipe and write down what happens."""
    stages: list[Stage] = []
    bodies: list[ModelStore] = []
    lines: list[dict[str, Any]] = []

    def made(*arguments: Any, **keys: Any) -> ModelStore:
        bodies.append(ModelStore(*arguments, **keys))
        return bodies[-1]

    def play(server: Any, clients: Any, costs: Any, seed: Any, after_round: Any, first_round: int) -> None:
        seen = Stage(server.method, server.channel, clients.states, costs.ledger, [server.state])
        stages.append(seen)
        draw = engine_round.draw

        class Heard(ClientRuntime):
            def answer(self, cohort: Cohort, message: Message) -> list[Reply]:
                replies = super().answer(cohort, message)
                seen.replies[-1] += replies
                return replies

        def drawn(*arguments: Any) -> Any:
            asked = draw(*arguments)
            seen.replies.append([])
            seen.drawn.append(asked.tolist())
            return asked

        def after(number: int, state: Any) -> Any:
            seen.states.append(state)
            return after_round(number, state)

        heard = replace(clients, runtime=Heard(server.method, server.channel))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(engine_round, "draw", drawn)
            engine_round.play_rounds(server, heard, costs, seed, after, first_round)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("headstart.runner.run_stage.play_rounds", play)
        patch.setattr("headstart.runner.run_recipe.ModelStore", made)
        result = run(recipe, out, on_metrics=lambda line: lines.append(json.loads(json.dumps(line))), **keys)
    return Watched(result, bodies[0], stages, lines)


def digits(*stages: dict[str, Any], tasks: Any = (LOW, HIGH)) -> Recipe:
    """Two tasks, or one as the only data."""
    data = {"tasks": list(tasks)} if len(tasks) > 1 else {"data": {k: v for k, v in tasks[0].items() if k != "name"}}
    return Recipe.parse(data | {"model": {"backbone": "features"}, "stages": list(stages)})


def head_stage(method: str, **keys: Any) -> dict[str, Any]:
    return HEAD | METHODS[method] | {"method": method} | keys


def same_head(left: LinearHead, right: LinearHead) -> None:
    one, other = left.arrays(), right.arrays()
    assert set(one) == set(other)
    for name in one:
        np.testing.assert_array_equal(one[name], other[name])


def same_vectors(left: dict[str, np.ndarray], right: dict[str, np.ndarray]) -> None:
    assert set(left) == set(right)
    for name in left:
        np.testing.assert_array_equal(left[name], right[name], err_msg=name)


def figures(line: dict[str, Any]) -> dict[str, Any]:
    """An evaluation without clock and bytes."""
    return {name: value for name, value in line.items() if name not in CLOCK}


@pytest.fixture(scope="module")
def vit(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Recipe]:
    """Recipes of two tasks, or of those given, on a tiny vision transformer of three blocks without dropout."""
    place = tmp_path_factory.mktemp("vit")
    config = transformers.ViTConfig(
        hidden_size=8, num_hidden_layers=3, num_attention_heads=2, intermediate_size=16, image_size=8, patch_size=4,
        initializer_range=0.4,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(3)
        transformers.ViTModel(config, add_pooling_layer=False).save_pretrained(place)
    model = {"backbone": str(place), "image_size": 8}

    def recipe(*stages: dict[str, Any], tasks: Any = (ABC, DE)) -> Recipe:
        return Recipe.parse({"tasks": list(tasks), "model": model, "stages": list(stages)})

    return recipe


Tiny = Callable[..., Recipe]


def pretrained(recipe: Recipe) -> Backbone:
    return load_backbone(Model.model_validate(recipe.model.model_dump()))


def pixels(backbone: Backbone, watched: Watched, split: str, rows: np.ndarray) -> torch.Tensor:
    """What a body makes of some examples, as a tensor with its gradients."""
    examples = getattr(watched.federation.dataset, split).take(rows)
    values = [backbone.transform(value, "example") for value in examples.raw(0, len(rows))]
    found: torch.Tensor = backbone.body(*backbone.transform.collate(values))
    return found


def task_features(watched: Watched, stage: Stage, task: int, at: int = -1) -> np.ndarray:
    """Features of a task's test examples by the model after a round."""
    stage.head(task, at)
    assert watched.store.backbone is not None
    with torch.no_grad():
        rows = watched.federation.examples_of(task, "test")
        return pixels(watched.store.backbone, watched, "test", rows).numpy().copy()


# ------------------------------------------------------------------------------------------------------ what is refused


def test_a_method_for_one_task_refuses_several() -> None:
    with pytest.raises(HeadstartError, match=r"stages\.1\.method: centralised has one machine .*run each as \[data\]"):
        run(digits({"method": "fedncm"}, {"method": "centralised", "train": "head"}))


def test_validation_is_refused_where_a_task_has_none() -> None:
    with pytest.raises(HeadstartError, match=r"stages\.0\.eval_split: the data have no validation split"):
        run(digits({"method": "fedncm", "eval_split": "validation"}))


# --------------------------------------------------------------------------------------------------------- closed forms


@pytest.mark.parametrize("sampled", [{}, {"clients_per_round": 3}, {"clients_per_round": 3, "sampling": "tasks"}])
@pytest.mark.parametrize(
    "keys",
    [{"method": "fedncm"}, {"method": "fed3r"}, {"method": "fed3r", "random_features": 20}, {"method": "fedcof"}],
)
def test_a_closed_form_head_is_that_of_its_task_alone(keys: dict[str, Any], sampled: dict[str, Any]) -> None:
    both = watch(digits(keys | sampled))
    assert both.result.summary["stages"][0]["rounds"] == (3 if sampled else 1)
    for number, task in enumerate((LOW, HIGH)):
        alone = watch(digits(keys, tasks=[task]))
        head, expected = both.stages[0].head(number), alone.stages[0].head()
        if not sampled:
            same_head(head, expected)
            found = both.lines[-1]["tasks"][task["name"]]
            assert found == {name: alone.lines[-1][name] for name in found}
        else:  # clients are added up in another order
            np.testing.assert_allclose(head.weight, expected.weight, rtol=1e-3, atol=1e-4)
    alone_costs = [watch(digits(keys, tasks=[task])).result.summary["stages"][0] for task in (LOW, HIGH)]
    for cost in ("forward_passes", "published_bytes", "published_compute"):
        assert both.result.summary["stages"][0][cost] == sum(each[cost] for each in alone_costs), cost


def test_a_closed_form_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    recipe = digits({"method": "fedcof", "clients_per_round": 2}, {"method": "fed3r", "clients_per_round": 3})
    run(recipe, tmp_path / "whole")
    assert with_interruptions(recipe, tmp_path / "often") > 2
    same_model(tmp_path / "whole", tmp_path / "often")


def same_model(left: Path, right: Path) -> None:
    """The same files of the final model, bit for bit, and the same evaluations."""
    names = [sorted(file.name for file in (path / "model").iterdir()) for path in (left, right)]
    assert names[0] == names[1]
    for name in names[0]:
        assert (left / "model" / name).read_bytes() == (right / "model" / name).read_bytes(), name
    assert metrics_of(left) == metrics_of(right)


# -------------------------------------------------------------------------------------------------------- trained heads


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("rounds", [(), ([0, 2, 4, 6], [1, 3, 5], [0, 1, 2, 4, 5])])
def test_the_head_of_the_first_task_is_that_of_the_task_alone(
    method: str, rounds: tuple[list[int], ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clients and batches are drawn by number, and those of the first task have the same ones."""
    if rounds:
        drawing(monkeypatch, *rounds)
    both, alone = watch(digits(head_stage(method))), watch(digits(head_stage(method), tasks=[LOW]))
    for at in range(5):
        same_head(both.stages[0].head(0, at), alone.stages[0].head(0, at))
    for line, expected in zip(both.lines, alone.lines, strict=True):
        found = line["tasks"]["low"]
        assert found == {name: expected[name] for name in found}


def test_whom_a_task_sends_does_not_depend_on_other_tasks() -> None:
    both = watch(digits(head_stage("fedavg", clients_per_round=4)))
    alone = watch(digits(head_stage("fedavg", clients_per_round=2), tasks=[LOW]))
    same_head(both.stages[0].head(0), alone.stages[0].head())


@pytest.mark.parametrize("method", [name for name in METHODS if name != "per-fedavg"])  # which draws halves of examples
def test_the_head_of_the_second_task_is_that_of_the_task_alone(method: str) -> None:
    """Where neither batches nor the start are drawn, up to the order of sums."""
    keys = {"batch_size": "full", "head_init": "zeros"}
    both, alone = watch(digits(head_stage(method, **keys))), watch(digits(head_stage(method, **keys), tasks=[HIGH]))
    head, expected = both.stages[0].head(1), alone.stages[0].head()
    assert method == "local-only" or np.abs(expected.weight).max() > 1e-3
    np.testing.assert_allclose(head.weight, expected.weight, rtol=1e-4, atol=1e-6)
    assert both.lines[-1]["tasks"]["high"]["accuracy"] == pytest.approx(alone.lines[-1]["accuracy"], abs=0.01)


@pytest.mark.parametrize("number", [0, 1])
def test_a_head_that_fedmezo_trains_is_that_of_its_task_alone_to_the_bit(number: int) -> None:
    keys = {"method": "fedmezo", "train": "head", "rounds": 4, "lr": 0.01, "num_directions": 2, "beta2": 0.9}
    both = watch(digits({"method": "fedncm"}, keys))
    alone = watch(digits({"method": "fedncm"}, keys, tasks=[(LOW, HIGH)[number]]))
    same_head(both.stages[1].head(number), alone.stages[1].head())
    assert not np.array_equal(both.stages[1].head(number).weight, both.stages[0].head(number).weight)


def test_an_mlp_for_each_task(tmp_path: Path) -> None:
    stage = head_stage("fedavg", head="mlp", hidden=6, lr=0.01)
    both, alone = watch(digits(stage), tmp_path / "out"), watch(digits(stage, tasks=[LOW]))
    same_head(both.stages[0].head(0), alone.stages[0].head())
    assert load_file(tmp_path / "out" / "model" / "head-high.safetensors")["hidden.1.weight"].shape == (6, 6)


@pytest.mark.parametrize("method", ["fedadam", "fedavgm", "scaffold", "feddyn"])
def test_a_task_that_nobody_was_drawn_for_stays_as_it_is(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    drawing(monkeypatch, [0, 1, 4, 5], [2, 3], [4, 6])
    stage = watch(digits(head_stage(method))).stages[0]

    def of(at: int, task: str) -> dict[str, np.ndarray]:
        vectors = stage.vectors(at)
        return {f"{what}.{n}": v for what, each in vectors.items() for n, v in each.items() if n.endswith(f"@{task}")}

    same_vectors(of(1, "high"), of(2, "high"))
    same_vectors(of(2, "low"), of(3, "low"))
    for before, after, task in ((1, 2, "low"), (2, 3, "high")):
        moved = [name for name, value in of(before, task).items() if not np.array_equal(value, of(after, task)[name])]
        assert moved == list(of(before, task))


@pytest.mark.parametrize("method", ["fedadam", "fedyogi"])
def test_the_first_step_of_a_task_is_its_optimisers_first_whenever_it_comes(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Adam with its bias corrected: the first step has the length of the server's rate, in every direction."""
    drawing(monkeypatch, [0, 1], [0, 1, 4, 5])
    stage = watch(digits(head_stage(method, bias_correction=True, tau=1e-12, server_lr=0.25))).stages[0]
    for task, round in (("low", 0), ("high", 1)):
        before, after = stage.params(round), stage.params(round + 1)
        moved = np.abs(after[f"head.bias@{task}"] - before[f"head.bias@{task}"])
        np.testing.assert_allclose(moved, 0.25, rtol=1e-6)


def test_an_optimiser_goes_on_from_its_checkpoint_though_a_task_was_not_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawing(monkeypatch, [0, 1], [4, 5], [0, 5])
    recipe = digits(head_stage("fedadam", bias_correction=True))
    run(recipe, tmp_path / "whole")
    assert with_interruptions(recipe, tmp_path / "often") > 1
    same_model(tmp_path / "whole", tmp_path / "often")


@pytest.mark.parametrize("method", ["scaffold", "feddyn", "ditto", "local-only", "fedavg"])
def test_heads_go_on_from_their_checkpoints(method: str, tmp_path: Path) -> None:
    recipe = digits(head_stage(method, clients_per_round=3), {"method": "personalise", "update": "head", "epochs": 2})
    run(recipe, tmp_path / "whole")
    assert with_interruptions(recipe, tmp_path / "often", every=3) >= 1
    same_model(tmp_path / "whole", tmp_path / "often")


def test_files_in_which_clients_keep_their_own_are_closed_after_the_run() -> None:
    recipe = digits(head_stage("local-only"), {"method": "personalise", "update": "head", "epochs": 1})
    run(recipe)
    gc.collect()
    before = len(os.listdir("/dev/fd"))
    run(recipe)
    gc.collect()
    assert len(os.listdir("/dev/fd")) <= before


def test_what_a_client_of_one_task_sends_holds_nothing_of_another() -> None:
    for method in ("scaffold", "fedavg"):
        stage = watch(digits(head_stage(method))).stages[0]
        for client, message in stage.updates().items():
            mine, other = ("low", "high") if client < 4 else ("high", "low")
            assert f"update.head.weight@{mine}" in message.arrays
            assert not [name for name in message.arrays if name.endswith(f"@{other}")]
            down = stage.broadcast(int(client >= 4))
            assert not [name for name in down.arrays if name.endswith(f"@{other}")]
            assert stage.ledger.bytes_down[client] == 4 * len(down.to_bytes())
            assert stage.ledger.bytes_up[client] == 4 * len(message.to_bytes())


def test_the_papers_count_is_of_what_a_client_of_a_task_sends() -> None:
    """Five classes, not ten, travel both ways: 64 features, seven clients, four rounds, four bytes."""
    (stage,) = watch(digits(head_stage("fedavg"))).result.summary["stages"]
    assert stage["published_bytes"] == 2 * 5 * 64 * 7 * 4 * 4


# ------------------------------------------------------------------------------------------------------------- sampling


@pytest.mark.parametrize("per_round", [1, 2, 3, 4, 5, 6, 7])
def test_a_round_draws_as_many_from_each_task_in_turn(per_round: int) -> None:
    stage = watch(digits(head_stage("fedavg", clients_per_round=per_round))).stages[0]
    for number, clients in enumerate(stage.drawn):
        low, high = (sum((client < 4) == first for client in clients) for first in (True, False))
        assert len(set(clients)) == low + high == per_round
        if per_round < 7:
            first, second = (low, high) if number % 2 == 0 else (high, low)
            assert (first, second) == (-(-per_round // 2), per_round // 2)
        else:
            assert (low, high) == (4, 3)
    if 1 < per_round < 7:
        assert len({tuple(clients) for clients in stage.drawn}) > 1


def test_whom_a_task_sends_does_not_depend_on_the_other_tasks() -> None:
    crowd = HIGH | {"name": "crowd", "partition": {"kind": "iid", "clients": 30}}
    stage = head_stage("fedavg", clients_per_round=4)
    drawn = [
        [[client for client in clients if client < 4] for clients in watch(digits(stage, tasks=tasks)).stages[0].drawn]
        for tasks in ((LOW, HIGH), (LOW, crowd))
    ]
    assert drawn[0] == drawn[1]
    third = watch(digits(stage | {"clients_per_round": 6}, tasks=(LOW, HIGH, crowd))).stages[0]
    assert [[client for client in clients if client < 4] for clients in third.drawn] == drawn[0]


def test_by_default_a_round_draws_from_all_clients_alike() -> None:
    crowd = HIGH | {"partition": {"kind": "iid", "clients": 40}}
    stage = head_stage("fedavg", clients_per_round=20, sampling="clients", rounds=10)
    low = [
        sum(client < 4 for client in clients) for clients in watch(digits(stage, tasks=(LOW, crowd))).stages[0].drawn
    ]
    assert max(low) < 8
    assert len(set(low)) > 1


def test_a_closed_form_that_draws_from_tasks_hears_everybody_once() -> None:
    stage = watch(digits({"method": "fedncm", "clients_per_round": 2, "sampling": "tasks"})).stages[0]
    assert sorted(client for clients in stage.drawn for client in clients) == list(range(7))
    assert [sum(client < 4 for client in clients) for clients in stage.drawn] == [1, 1, 1, 1]


# --------------------------------------------------------------------------------------------------------- hidden tasks


@pytest.mark.parametrize("method", METHODS)
def test_to_hide_the_task_changes_no_model(method: str) -> None:
    stage = head_stage(method, clients_per_round=4)
    plain, hidden = (watch(digits(stage | {"hide_task": hide})) for hide in (False, True))
    for at in range(5):
        one, other = (each.stages[0].vectors(at) for each in (plain, hidden))
        assert one.keys() == other.keys()
        for what in one:
            same_vectors(one[what], other[what])
    assert [figures(line) for line in plain.lines] == [figures(line) for line in hidden.lines]
    if method != "local-only":
        assert plain.lines[-1]["bytes_up"] < hidden.lines[-1]["bytes_up"]
        assert plain.lines[-1]["bytes_down"] < hidden.lines[-1]["bytes_down"]


@pytest.mark.parametrize("method", ["fedavg", "scaffold"])
def test_a_hidden_task_cannot_be_told_by_what_is_in_a_message(method: str) -> None:
    even = [LOW | {"train_examples": 40}, HIGH | {"train_examples": 30, "partition": {"kind": "iid", "clients": 3}}]
    stage = watch(digits(head_stage(method, hide_task=True), tasks=even)).stages[0]
    updates = stage.updates()
    layouts = [{name: (a.dtype, a.shape) for name, a in message.arrays.items()} for message in updates.values()]
    assert all(layout == layouts[0] for layout in layouts)
    assert len({len(message.to_bytes()) for message in updates.values()}) == 1
    assert len(set(stage.ledger.bytes_up)) == len(set(stage.ledger.bytes_down)) == 1
    whats = ("update", "control") if method == "scaffold" else ("update",)
    names = {f"{w}.head.{p}@{task}" for w in whats for p in ("weight", "bias") for task in ("low", "high")}
    assert set(layouts[0]) == names | {"present"}
    for client, message in updates.items():
        mine, other = ("low", "high") if client < 4 else ("high", "low")
        assert message.arrays["present"].tolist() == [client < 4, client >= 4]
        assert all(not array.any() for name, array in message.arrays.items() if name.endswith(f"@{other}"))
        assert message.arrays[f"update.head.weight@{mine}"].any()


def test_one_sum_over_all_clients_gives_the_means_of_all_tasks() -> None:
    seen = watch(digits(head_stage("fedavg", hide_task=True, clients_per_round=5)))
    stage = seen.stages[0]
    for round in range(4):
        total: dict[str, Any] = {}
        for message in stage.updates(round).values():
            weight = message.scalars["examples"]
            for name, array in message.arrays.items():
                total[name] = total.get(name, 0) + float(weight) * array.astype(np.float64)  # type: ignore[arg-type]
        weights = dict(zip(("low", "high"), total.pop("present"), strict=True))
        for name, value in stage.params(round).items():
            mean = total[f"update.{name}"] / weights[name.partition("@")[2]]
            np.testing.assert_allclose(stage.params(round + 1)[name], value + mean, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    "present", [[1, 1], [0, 0], [0.5, 0.5], [2, -1], [1], [np.nan, 1], None, np.array([1.0, 0.0])]
)  # fmt: skip
def test_a_client_of_no_task_or_of_several_is_refused(present: Any) -> None:
    stage = watch(digits(head_stage("fedavg", hide_task=True, rounds=1))).stages[0]
    reply, total = stage.replies[0][0], stage.channel.total()
    arrays = {name: array for name, array in reply.message.arrays.items() if name != "present"}
    if isinstance(present, list):
        arrays["present"] = np.array(present, np.float32)
    elif present is not None:
        arrays["present"] = present
    with pytest.raises(MessageError, match=r"no task, or more than one|'present'"):
        stage.add(total, replace(reply, message=Message(arrays, reply.message.scalars)))
    assert not total.sums
    assert not total.weights
    stage.add(total, reply)
    assert total.weights


def test_an_update_without_the_other_tasks_is_refused_where_tasks_are_hidden() -> None:
    stage = watch(digits(head_stage("fedavg", hide_task=True, rounds=1))).stages[0]
    reply = stage.replies[0][0]
    arrays = {name: array for name, array in reply.message.arrays.items() if not name.endswith("@high")}
    with pytest.raises(MessageError, match=r"'update\.head\.weight@high' is missing"):
        stage.add(stage.channel.total(), replace(reply, message=Message(arrays, reply.message.scalars)))


# -------------------------------------------------------------------------------------------------------- a shared body


def by_hand(watched: Watched, recipe: Recipe, client: int, rate: float) -> dict[str, np.ndarray]:
    """One step of SGD by a client on all of its examples, by torch alone: the update of every parameter.

    It starts at the centre of a proximal term, which has no gradient there.
    """
    task = int(client >= 3)
    backbone, stage = pretrained(recipe), watched.stages[0]
    backbone.body.requires_grad_(True)
    head = stage.head(task, 0)
    weight, bias = (torch.tensor(value, requires_grad=True) for value in (head.weight, head.bias))
    rows, _ = watched.federation.rows_of(np.array([client]))
    labels = torch.from_numpy(watched.federation.dataset.train.labels[rows] - watched.federation.class_starts[task])
    loss = functional.cross_entropy(pixels(backbone, watched, "train", rows) @ weight.T + bias, labels)
    loss.backward()
    name = ("abc", "de")[task]
    tensors = {f"body.{n}": p for n, p in backbone.core.named_parameters()}
    tensors |= {f"head.weight@{name}": weight, f"head.bias@{name}": bias}
    return {n: np.zeros(p.shape) if p.grad is None else -rate * p.grad.double().numpy() for n, p in tensors.items()}


@pytest.mark.parametrize(
    ("method", "weighting"), [("fedavg", "examples"), ("fedavg", "uniform"), ("fedprox", "uniform")]
)
def test_the_body_is_the_mean_over_all_clients_and_a_head_over_those_of_its_task(
    vit: Tiny, method: str, weighting: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawing(monkeypatch, [0, 2, 3, 4])
    tasks = ABC | {"train_examples": 21}, DE | {"train_examples": 22}  # seven examples each, and eleven
    keys = {"rounds": 1, "batch_size": "full", "train": "all", "weighting": weighting}
    recipe = vit(BODY | keys | {"method": method}, tasks=tasks)
    seen = watch(recipe)
    assert seen.federation.sizes.tolist() == [7, 7, 7, 11, 11]
    updates = {client: by_hand(seen, recipe, client, BODY["lr"]) for client in (0, 2, 3, 4)}
    before, after = (seen.stages[0].params(at) for at in (0, 1))
    for name, value in after.items():
        about = [client for client, update in updates.items() if name in update]
        assert about == ([0, 2, 3, 4] if name.startswith("body.") else [0, 2] if name.endswith("@abc") else [3, 4])
        weights = seen.federation.sizes[about] if weighting == "examples" else np.ones(len(about))
        mean = np.average([updates[client][name] for client in about], axis=0, weights=weights)
        np.testing.assert_allclose(value - before[name], mean, rtol=1e-3, atol=2e-6, err_msg=name)


@pytest.mark.parametrize(
    "method", ["fedprox", "feddyn", "scaffold", "fedadam", "ditto", "fedper", "local-only", "fedbabu"]
)
def test_whole_models_of_several_tasks_train_and_go_on_from_their_checkpoints(
    vit: Tiny, method: str, tmp_path: Path
) -> None:
    train = "body" if method == "fedbabu" else "all"
    recipe = vit(BODY | {"method": method, "train": train, "clients_per_round": 3, "local_epochs": 1, "lr": 0.02})
    run(recipe, tmp_path / "whole")
    assert with_interruptions(recipe, tmp_path / "often") >= 1
    same_model(tmp_path / "whole", tmp_path / "often")
    heads = [load_file(tmp_path / "whole" / "model" / f"head-{task}.safetensors") for task in ("abc", "de")]
    assert [len(head["weight"]) for head in heads] == [3, 2]
    assert 0 <= metrics_of(tmp_path / "whole")[-1]["accuracy"] <= 1


@pytest.mark.parametrize(("method", "train"), [("fedmezo", "all"), ("fedmezo", "lora"), ("distmezo", "all")])
def test_slopes_of_several_tasks_go_on_from_their_checkpoints(
    vit: Tiny, method: str, train: str, tmp_path: Path
) -> None:
    """With "all", a backbone takes the steps of all clients, and the head of a task those of its own."""
    keys = {"train": train, "rounds": 3, "lr": 1e-3, "clients_per_round": 3, "batch_size": 4}
    recipe = vit({"method": method, **keys})
    run(recipe, tmp_path / "whole")
    assert with_interruptions(recipe, tmp_path / "often") >= 1
    same_model(tmp_path / "whole", tmp_path / "often")
    if method == "fedmezo":
        assert replay(tmp_path / "whole", tmp_path / "again") == []


def test_a_shared_body_is_written_without_a_head(vit: Tiny, tmp_path: Path) -> None:
    recipe = vit(BODY | {"method": "fedavg", "train": "all"})
    seen = watch(recipe, tmp_path / "out")
    arrays = load_file(tmp_path / "out" / "model" / "model.safetensors")
    assert set(arrays) == set(pretrained(recipe).core.state_dict())
    for name, value in seen.stages[0].params(-1).items():
        if name.startswith("body."):
            np.testing.assert_array_equal(arrays[name.removeprefix("body.")], value.astype(np.float32))
    assert json.loads((tmp_path / "out" / "model" / "classes.json").read_text()) == {
        "abc": ["0", "1", "2"],
        "de": ["4", "3"],
    }


# --------------------------------------------------------------------------------------------------------- interference


def only_the_second_task(patch: pytest.MonkeyPatch) -> None:
    drawing(patch, [3, 4])


def test_training_one_task_changes_the_features_of_another_where_they_share_a_body(
    vit: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    only_the_second_task(monkeypatch)
    seen = watch(vit(BODY | {"method": "fedavg", "train": "all", "lr": 0.5}))
    (stage,) = seen.stages
    same_head(stage.head(0), stage.head(0, 0))
    before, after = (task_features(seen, stage, 0, at) for at in (0, -1))
    assert np.abs(before - after).max() > 0.05
    assert seen.lines[-1]["feature_similarity"] < 0.999


@pytest.mark.parametrize("kind", SIZES)
def test_training_one_task_leaves_the_others_alone_with_fedyolo(
    vit: Tiny, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    only_the_second_task(monkeypatch)
    recipe = vit(YOLO | {"train": kind} | SIZES[kind])
    seen = watch(recipe)
    (stage,) = seen.stages
    first, last = stage.params(0), stage.params(-1)
    same_vectors({n: v for n, v in first.items() if "@abc" in n}, {n: v for n, v in last.items() if "@abc" in n})
    np.testing.assert_array_equal(task_features(seen, stage, 0, 0), task_features(seen, stage, 0))
    assert np.abs(task_features(seen, stage, 1, 0) - task_features(seen, stage, 1)).max() > 1e-3
    lines = [line["tasks"]["abc"] for line in seen.lines]
    assert lines[0] == lines[1]


@pytest.mark.parametrize("hide", [False, True])
@pytest.mark.parametrize("kind", SIZES)
def test_fedyolo_leaves_the_backbone_as_it_was(vit: Tiny, kind: str, hide: bool) -> None:
    recipe = vit(YOLO | {"train": kind, "hide_task": hide, "augment": "flip"} | SIZES[kind])
    expected = {name: value.numpy().tobytes() for name, value in pretrained(recipe).core.state_dict().items()}
    seen = watch(recipe)
    assert seen.store.backbone is not None
    found = {name: value.numpy().tobytes() for name, value in plain_state(seen.store.backbone.core).items()}
    assert {name: found[name] for name in expected} == expected


# -------------------------------------------------------------------------------------------------------------- fedyolo


def final(stage: Stage, task: str) -> dict[str, np.ndarray]:
    """Parameters of a task at the end of a stage, under plain names."""
    return {n.partition("@")[0]: v.astype(np.float32) for n, v in stage.params(-1).items() if n.endswith(f"@{task}")}


@pytest.mark.parametrize("kind", SIZES)
def test_every_task_has_a_file_with_its_module_and_head(vit: Tiny, kind: str, tmp_path: Path) -> None:
    seen = watch(vit(YOLO | {"train": kind} | SIZES[kind]), tmp_path / "out")
    folder = tmp_path / "out" / "model"
    names = {f"{what}-{task}.safetensors" for what in ("head", "module") for task in ("abc", "de")}
    assert {file.name for file in folder.iterdir()} == names | {"classes.json"}
    values = []
    for task, classes in (("abc", 3), ("de", 2)):
        path = folder / f"module-{task}.safetensors"
        arrays, expected = load_file(path), final(seen.stages[0], task)
        same_vectors(arrays, {name.removeprefix("module."): value for name, value in expected.items()})
        assert arrays["head.weight"].shape == (classes, 8)
        with safe_open(path, "numpy") as file:
            facts = json.loads(file.metadata()["module"])
        assert facts == {"kind": kind, **SIZES[kind], **({"alpha_lora": 16.0} if kind == "lora" else {})}
        assert {f"head.{n}": a.shape for n, a in load_file(folder / f"head-{task}.safetensors").items()} == {
            name: array.shape for name, array in arrays.items() if name.startswith("head.")
        }
        values.append(arrays)
    modules = [name for name in values[0] if not name.startswith("head.")]
    assert modules
    assert any(not np.array_equal(values[0][name], values[1][name]) for name in modules)


def test_every_task_starts_from_the_same_module_and_another_head(vit: Tiny) -> None:
    start = watch(vit(YOLO | {"rounds": 1})).stages[0].params(0)
    modules = [name for name in start if name.startswith("module.") and name.endswith("@abc")]
    assert modules
    for name in modules:
        np.testing.assert_array_equal(start[name], start[name.replace("@abc", "@de")])
    assert not np.array_equal(start["head.weight@abc"][:2], start["head.weight@de"])


def test_a_round_of_fedyolo_is_the_mean_over_the_clients_of_a_task(vit: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    drawing(monkeypatch, [0, 1, 3])
    (stage,) = watch(vit(YOLO | {"rounds": 1})).stages
    before, after = (stage.params(at) for at in (0, 1))
    for name, value in after.items():
        senders = [0, 1] if name.endswith("@abc") else [3]
        mean = np.mean(
            [stage.updates()[client].arrays[f"update.{name}"].astype(np.float64) for client in senders], axis=0
        )
        np.testing.assert_allclose(value - before[name], mean, rtol=0, atol=1e-12, err_msg=name)
        assert name.startswith("module.") or mean.any()


def test_only_a_tasks_module_and_head_travel(vit: Tiny) -> None:
    seen = watch(vit(YOLO))
    (stage,) = seen.stages
    shapes = {name: value.shape for name, value in stage.params(0).items()}
    up = np.zeros(5, np.int64)
    for round in range(2):
        for client, message in stage.updates(round).items():
            task = "abc" if client < 3 else "de"
            expected = {f"update.{name}": shape for name, shape in shapes.items() if name.endswith(f"@{task}")}
            assert {name: array.shape for name, array in message.arrays.items()} == expected
            assert {name.split(".")[1] for name in expected} == {"module", "head"}
            up[client] += len(message.to_bytes())
    assert up.tolist() == stage.ledger.bytes_up.tolist()
    down = [2 * len(stage.broadcast(task).to_bytes()) for task in (0, 1)]
    assert stage.ledger.bytes_down.tolist() == [down[0]] * 3 + [down[1]] * 2
    assert seen.lines[-1]["bytes_up"] == up.sum()
    # The paper's count, one way: two rounds, three clients of one task and two of the other, four bytes a parameter.
    abc, de = (
        sum(int(np.prod(shapes[name])) for name in shapes if name.endswith(f"@{task}")) for task in ("abc", "de")
    )
    (summary,) = seen.result.summary["stages"]
    assert summary["published_bytes"] == 2 * (3 * abc + 2 * de) * 4


@pytest.mark.parametrize("kind", SIZES)
def test_to_hide_the_task_changes_nothing_in_fedyolo(vit: Tiny, kind: str, tmp_path: Path) -> None:
    stage = YOLO | {"train": kind, "momentum": 0.9} | SIZES[kind]
    for hide in (False, True):
        run(vit(stage | {"hide_task": hide}), tmp_path / f"{hide}")
    for task in ("abc", "de"):
        same_bits(*(tmp_path / f"{hide}" / "model" / f"module-{task}.safetensors" for hide in (False, True)))
    one, other = ([figures(line) for line in metrics_of(tmp_path / f"{hide}")] for hide in (False, True))
    assert one == other


@pytest.mark.parametrize("hide", [False, True])
def test_a_later_stage_goes_on_from_each_tasks_module(vit: Tiny, hide: bool) -> None:
    personal = {"method": "personalise", "update": "lora", "epochs": 0, "augment": "none"}
    seen = watch(vit(YOLO, YOLO | {"rounds": 1, "hide_task": hide}, personal))
    first, second, third = seen.stages
    start = second.params(0)
    for task in ("abc", "de"):
        for name, value in final(first, task).items():
            np.testing.assert_array_equal(start[f"{name}@{task}"], value)
    for number, task in enumerate(("abc", "de")):
        same_vectors(third.method.personal_params(lambda name, value: value, number), final(second, task))


def test_a_closed_form_after_fedyolo_reads_each_task_with_its_own_module(vit: Tiny) -> None:
    seen = watch(vit(YOLO, {"method": "fedncm"}))
    train = seen.federation.dataset.train
    for task in (0, 1):
        seen.stages[0].head(task)
        rows = seen.federation.examples_of(task, "train")
        assert seen.store.backbone is not None
        with torch.no_grad():
            features = pixels(seen.store.backbone, seen, "train", rows).double().numpy()
        labels = train.labels[rows] - seen.federation.class_starts[task]
        means = np.stack([features[labels == label].mean(axis=0) for label in np.unique(labels)])
        weight = seen.stages[1].head(task).weight
        np.testing.assert_allclose(weight, means / np.linalg.norm(means, axis=1, keepdims=True), rtol=1e-3, atol=1e-4)


CHAIN = [
    YOLO | {"rounds": 3, "clients_per_round": 3, "momentum": 0.9, "warmup_rounds": 1},
    {"method": "fedcof"},
    YOLO | {"rounds": 2, "hide_task": True, "start": 0},
    {"method": "personalise", "update": "lora", "epochs": 2, "batch_size": 4, "lr": 0.1, "augment": "none"},
]


@pytest.mark.parametrize("kind", SIZES)
def test_fedyolo_that_is_interrupted_again_and_again_ends_in_the_same_bits(
    vit: Tiny, kind: str, tmp_path: Path
) -> None:
    stages = [stage | {"train": kind} | SIZES[kind] if stage["method"] == "fedyolo" else stage for stage in CHAIN]
    recipe = vit(*stages[:-1], CHAIN[-1] | {"update": kind})
    run(recipe, tmp_path / "whole")
    assert with_interruptions(recipe, tmp_path / "often", every=3) >= 1
    same_model(tmp_path / "whole", tmp_path / "often")


def test_fedyolo_that_is_interrupted_between_its_stages_ends_in_the_same_bits(
    vit: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = vit(*CHAIN)
    run(recipe, tmp_path / "whole")
    save = RunDirectory.save_model
    for last in range(len(CHAIN)):

        def stop(self: RunDirectory, stage: int, *arguments: Any, last: int = last) -> None:
            save(self, stage, *arguments)
            if stage == last:
                raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(RunDirectory, "save_model", stop)
            with pytest.raises(KeyboardInterrupt):
                run(recipe, tmp_path / "often", resume=last > 0)
    run(recipe, tmp_path / "often", resume=True)
    same_model(tmp_path / "whole", tmp_path / "often")


def test_features_that_have_not_moved_are_as_they_were(vit: Tiny) -> None:
    still, moved = (watch(vit(YOLO | {"lr": lr})).lines[-1]["feature_similarity"] for lr in (1e-30, 3.0))
    assert still == pytest.approx(1, abs=1e-6)
    assert moved < 0.99


def test_feature_similarity_by_hand(vit: Tiny) -> None:
    seen = watch(vit(YOLO | {"lr": 1.0}))
    (stage,) = seen.stages
    cosines = []
    for task in (0, 1):
        one, other = (task_features(seen, stage, task, at).astype(np.float64) for at in (0, -1))
        cosines += [a @ b / np.linalg.norm(a) / np.linalg.norm(b) for a, b in zip(one, other, strict=True)]
    assert seen.lines[-1]["feature_similarity"] == pytest.approx(np.mean(cosines), abs=1e-5)
    assert "feature_similarity" not in seen.lines[0]


def test_evaluations_of_each_task_and_their_mean(vit: Tiny) -> None:
    seen = watch(vit(YOLO | {"lr": 1.0}))
    for at, line in enumerate(seen.lines, 1):
        assert set(line["tasks"]) == {"abc", "de"}
        for task, name in enumerate(("abc", "de")):
            features, head = task_features(seen, seen.stages[0], task, at), seen.stages[0].head(task, at)
            rows = seen.federation.examples_of(task, "test")
            labels = seen.federation.dataset.test.labels[rows] - seen.federation.class_starts[task]
            right = head.scores(features).argmax(axis=1) == labels
            assert line["tasks"][name]["accuracy"] == pytest.approx(right.mean())
        each = list(line["tasks"].values())
        assert line["accuracy"] == pytest.approx(np.mean([part["accuracy"] for part in each]))
        assert line["loss"] == pytest.approx(np.mean([part["loss"] for part in each]))
        clients = 3 * [each[0]["local_accuracy_mean"]] + 2 * [each[1]["local_accuracy_mean"]]
        assert line["local_accuracy_mean"] == pytest.approx(np.mean(clients))
    assert seen.result.summary["accuracy"] == seen.lines[-1]["accuracy"]


def test_the_report_is_about_all_tasks(vit: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headstart.runner.run_recipe.write_report", write_report)
    out = out_of(run(vit(YOLO), tmp_path / "out"))
    page = (out / "report.html").read_text()
    for text in ("abc: 0", "de: 4", "fedyolo", "5 clients", "5 classes"):
        assert text in page
    clients = (out / "clients.csv").read_text()
    assert [line.split(",")[1] for line in clients.splitlines()[1:]] == [
        *(f"abc/client-{n}" for n in range(3)), *(f"de/client-{n}" for n in range(2)),
    ]  # fmt: skip


def test_a_test_split_that_follows_the_clients(vit: Tiny) -> None:
    tasks = [each | {"partition": each["partition"] | {"test": "follow"}} for each in (ABC, DE)]  # type: ignore[dict-item]
    seen = watch(vit(YOLO, {"method": "personalise", "update": "lora", "epochs": 1, "augment": "none"}, tasks=tasks))
    owners = seen.federation.test_owners
    assert owners is not None
    rates = []
    for task in (0, 1):
        rows = seen.federation.examples_of(task, "test")
        labels = seen.federation.dataset.test.labels[rows] - seen.federation.class_starts[task]
        right = seen.stages[0].head(task).scores(task_features(seen, seen.stages[0], task)).argmax(axis=1) == labels
        clients = seen.federation.clients_of(task)
        rates += [right[owners[rows] == client].mean() for client in clients]
    yolo, initial, _ = (line for line in seen.lines if line["round"] == 2 or line["stage"] == 1)
    assert yolo["local_accuracy_mean"] == pytest.approx(np.mean(rates))
    assert yolo["local_accuracy_std"] == pytest.approx(np.std(rates))
    assert initial["initial_accuracy_mean"] == pytest.approx(np.mean(rates))


# ---------------------------------------------------------------------------------------------------------- personalise


PERSONAL = {"method": "personalise", "epochs": 2, "batch_size": 4, "lr": 0.1, "augment": "none"}


def own_heads(seen: Watched, stage: Stage, task: int) -> Iterator[tuple[int, LinearHead, dict[str, np.ndarray]]]:
    clients = seen.federation.clients_of(task)
    for client in clients.tolist():
        own = stage.method.personal_params(
            lambda name, start, c=client: stage.client_states.read(name, start, np.array([c])), task
        )
        values = {name: value[0] for name, value in own.items()}
        yield client, stage.head(task, own=values), values


@pytest.mark.parametrize(
    ("first", "update"),
    [
        (YOLO, "lora"),
        (YOLO, "head"),
        (BODY | {"method": "fedavg", "train": "all"}, "all"),
        (BODY | {"method": "fedavg", "train": "all"}, "head"),
    ],
)
def test_personalisation_starts_at_the_global_model_and_forgets_by_the_paper(
    vit: Tiny, first: dict[str, Any], update: str
) -> None:
    seen = watch(vit(first, PERSONAL | {"update": update, "forgetting": True, "without_head": True}))
    end, initial, *_, last = (line for line in seen.lines if (line["stage"], line["round"]) != (0, 1))
    assert (end["stage"], initial["round"], last["round"]) == (0, 0, 2)
    for what in ("mean", "std"):
        assert initial[f"initial_accuracy_{what}"] == pytest.approx(end[f"local_accuracy_{what}"])
        assert last[f"initial_accuracy_{what}"] == initial[f"initial_accuracy_{what}"]
    assert initial["initial_whole_accuracy"] == pytest.approx(
        np.average([end["tasks"]["abc"]["accuracy"], end["tasks"]["de"]["accuracy"]], weights=[3, 2])
    )
    stage, whole = seen.stages[1], []
    assert seen.store.backbone is not None
    for task in (0, 1):
        rows = seen.federation.examples_of(task, "test")
        labels = seen.federation.dataset.test.labels[rows] - seen.federation.class_starts[task]
        for _, head, values in own_heads(seen, stage, task):
            source = stage if update != "head" else seen.stages[0]
            source.head(task, own={n: v for n, v in values.items() if not n.startswith("head.")})
            with torch.no_grad():
                features = pixels(seen.store.backbone, seen, "test", rows).numpy()
            whole.append((head.scores(features).argmax(axis=1) == labels).mean())
    assert last["whole_accuracy"] == pytest.approx(np.mean(whole))
    before = initial["initial_whole_accuracy"]
    assert last["forgetting_ratio"] == pytest.approx((before - np.mean(whole)) / before)
    assert "forgetting_ratio" not in initial
    assert 0 <= last["headless_accuracy_mean"] <= 1


def test_every_client_moves_its_own_tasks_module(vit: Tiny) -> None:
    seen = watch(vit(YOLO, PERSONAL | {"update": "lora"}))
    found = {}
    for task, name in enumerate(("abc", "de")):
        start = final(seen.stages[0], name)
        for client, _, values in own_heads(seen, seen.stages[1], task):
            assert set(values) == set(start)
            assert any(not np.array_equal(values[n], start[n]) for n in values if n.startswith("module."))
            found[client] = values
    assert not np.array_equal(found[0]["head.weight"], found[1]["head.weight"])
    assert seen.stages[1].ledger.bytes_up.tolist() == [0] * 5  # nothing travels but what is handed over
    for task, name in enumerate(("abc", "de")):
        clients = seen.federation.clients_of(task)
        arrays = final(seen.stages[0], name)
        expected = len(Message(arrays).to_bytes())
        assert seen.stages[1].ledger.bytes_down[clients].tolist() == [expected] * len(clients)


@pytest.mark.parametrize("kind", ["fedncm", "fed3r", "fedcof"])
def test_a_computed_head_of_each_client_is_on_its_own_tasks_classes(kind: str) -> None:
    seen = watch(digits(head_stage("fedavg"), {"method": "personalise", "compute": kind, "blend": 1.0}))
    alone = watch(digits(head_stage("fedavg"), {"method": "personalise", "compute": kind, "blend": 1.0}, tasks=[LOW]))
    ours, theirs = (list(own_heads(each, each.stages[1], 0)) for each in (seen, alone))
    for (_, head, _), (_, expected, _) in zip(ours, theirs, strict=True):
        same_head(head, expected)
    found = seen.lines[-1]["tasks"]["low"]
    assert found == {name: alone.lines[-1][name] for name in found}


def test_personal_models_are_personalised_further(vit: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "headstart.runner.run_recipe.collect", lambda *_: None
    )  # to look at what clients had in between
    stages = [YOLO, PERSONAL | {"update": "lora"}, PERSONAL | {"update": "head", "epochs": 1}]
    seen = watch(vit(*stages))
    for task in (0, 1):
        pairs = zip(own_heads(seen, seen.stages[1], task), own_heads(seen, seen.stages[2], task), strict=True)
        for (_, _, before), (_, _, after) in pairs:
            assert not np.array_equal(before["head.weight"], after["head.weight"])
            same_vectors(*({n: v for n, v in each.items() if n.startswith("module.")} for each in (before, after)))


# ------------------------------------------------------------------------------------------------- the last block alone


LAST = YOLO | {"blocks": 1, "rounds": 3, "momentum": 0.9, "clients_per_round": 4}


@pytest.mark.parametrize("kind", SIZES)
def test_a_module_on_the_last_block_trains_and_goes_on_to_the_same_bits(vit: Tiny, kind: str, tmp_path: Path) -> None:
    stage = LAST | {"train": kind} | SIZES[kind]
    recipe = vit(stage, PERSONAL | {"update": kind})
    run(recipe, tmp_path / "whole")
    assert with_interruptions(recipe, tmp_path / "often", every=3) >= 1
    same_model(tmp_path / "whole", tmp_path / "often")
    arrays = load_file(tmp_path / "whole" / "model" / "module-de.safetensors")
    everywhere = watch(vit(YOLO | {"train": kind, "rounds": 1} | SIZES[kind])).stages[0]
    assert 3 * (len(arrays) - 2) == len(final(everywhere, "de")) - 2 or kind == "vpt"
    with safe_open(tmp_path / "whole" / "model" / "module-de.safetensors", "numpy") as file:
        assert json.loads(file.metadata()["module"])["blocks"] == 1


@pytest.mark.parametrize("kind", SIZES)
def test_blocks_that_are_computed_once_change_no_result(vit: Tiny, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = vit(LAST | {"train": kind} | SIZES[kind])
    cached = watch(recipe)
    attach, prefixes = ModelStore.attach, []

    def without(self: ModelStore, *arguments: Any) -> Any:
        attached = attach(self, *arguments)
        assert self.model is not None
        prefixes.append(self.model.prefix)
        self.model.prefix = None
        return attached

    monkeypatch.setattr(ModelStore, "attach", without)
    plain = watch(recipe)
    assert prefixes[0] is not None
    one, other = (each.stages[0].params(-1) for each in (cached, plain))
    assert set(one) == set(other)
    start = cached.stages[0].params(0)
    for name in one:
        np.testing.assert_allclose(one[name], other[name], rtol=2e-3, atol=2e-5, err_msg=name)
    assert max(np.abs(one[name] - start[name]).max() for name in one) > 0.01
    assert cached.lines[-1]["tasks"]["abc"]["loss"] == pytest.approx(plain.lines[-1]["tasks"]["abc"]["loss"], rel=1e-3)
