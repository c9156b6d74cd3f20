"""FedEx-LoRA, FlexLoRA, FedSA-LoRA and rsLoRA against dense averages of what layers multiply by."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from headstart.config.recipe import Recipe
from headstart.core.files import write_text
from headstart.core.message import Message
from headstart.core.params import Params
from headstart.errors import RecipeError
from headstart.modules import attach
from headstart.runner import run
from tests.backbones.test_language import PROMPT, SHORT, folder_of
from tests.helpers import Bench, context_of
from tests.methods.test_mezo import bert_backbone, bert_head
from tests.runner.test_choose import TEXTS, lines

RNG = np.random.default_rng(5)
RANK, ALPHA = 4, 6.0


class Layers:
    """A stage of a method on a small BERT, and what its layers multiply by."""

    def __init__(self, method: str, **keys: Any) -> None:
        table = {"method": method, "train": "lora", "rank": RANK, "alpha_lora": ALPHA, "rounds": 2} | keys
        self.stage: Any = Recipe.parse({"data": {"dataset": "x"}, "stages": [table]}).stages[0]
        backbone = bert_backbone()
        module = attach("lora", backbone, self.stage.module_settings, seed=3)
        head = bert_head()
        context = context_of(self.stage, 3, backbone.dim, (0, 0), 3, 20, head, backbone=backbone, module=module)
        self.bench = Bench(self.stage, context)
        self.method: Any = self.bench.method
        self.weights = dict(backbone.core.named_parameters())
        # Not as they begin, with B = 0, where half of the formula would vanish.
        self.state = self.bench.init()
        moved = {n: v + RNG.normal(0, 0.3, v.shape) for n, v in self.state.params.items() if n.startswith("module.")}
        self.state = type(self.state)(self.state.params | moved, self.state.memory)

    def dense(self, params: Params, layer: str) -> np.ndarray:
        """The matrix of a layer by these parameters, in `peft`'s scale of rank and alpha."""
        name = layer.removeprefix("module.")
        weight = params.get(f"body.{name}.weight")
        if weight is None:
            weight = self.weights[f"{name}.base_layer.weight"].detach().numpy()
        return np.asarray(weight + ALPHA / RANK * params[f"{layer}.lora_B.weight"] @ params[f"{layer}.lora_A.weight"])

    def step(self, updates: list[Params], weights: list[int]) -> Params:
        total = self.bench.channel.total()
        for update, weight in zip(updates, weights, strict=True):
            arrays = {f"update.{name}": value.astype(np.float32) for name, value in update.items()}
            message = Message(arrays)
            self.method.check(message)
            total.add(self.method.counted(message.arrays), weight)
        after: Params = self.method.server_update(self.state, total, 0).params
        return after


def some_updates(layers: Layers, count: int = 3) -> list[Params]:
    shapes = layers.method.shapes
    return [Params({n: RNG.normal(0, 0.2, s).astype(np.float32) for n, s in shapes.items()}) for _ in range(count)]


@pytest.mark.parametrize("method", ["fedex-lora", "fedavg"])
def test_the_model_is_the_mean_of_the_clients_models(method: str) -> None:
    """With FedEx-LoRA, from any factors; a mean of factors is another one."""
    layers, weights = Layers(method), [1, 2, 5]
    updates = some_updates(layers)
    clients = [layers.state.params | (layers.state.params.select(u) + u) for u in updates]
    names = [name.removesuffix(".lora_A.weight") for name in layers.method.shapes if name.endswith("lora_A.weight")]
    if method == "fedavg":
        layers.method.counted = lambda arrays: arrays
    after = layers.step(updates, weights)
    assert len(names) == 4
    for name in names:
        expected = np.average([layers.dense(each, name) for each in clients], axis=0, weights=weights)
        error = np.abs(layers.dense(after, name) - expected).max()
        assert error < 1e-6 if method == "fedex-lora" else error > 1e-2


def test_flexlora_keeps_the_largest_part_of_the_mean() -> None:
    layers, weights = Layers("flexlora", ranks=[2, 4]), [1, 2, 5]
    updates = some_updates(layers)
    clients = [layers.state.params | (layers.state.params.select(u) + u) for u in updates]
    after = layers.step(updates, weights)
    for name in layers.method.layers:
        products = [each[f"{name}.lora_B.weight"] @ each[f"{name}.lora_A.weight"] for each in clients]
        mean = np.average(products, axis=0, weights=weights)
        left, right = after[f"{name}.lora_B.weight"], after[f"{name}.lora_A.weight"]
        discarded = np.linalg.svd(mean, compute_uv=False)
        for rank in (2, 4):  # each client has the best approximation of its rank (Eckart and Young)
            error = np.linalg.norm(mean - left[:, :rank] @ right[:rank])
            assert error == pytest.approx(np.linalg.norm(discarded[rank:]), rel=1e-5)


def table(folder: Path, **stage: Any) -> dict[str, Any]:
    """Two clients, whose classes are the other way round."""
    if not (folder / "model").is_dir():
        folder_of(folder / "model")
        rows = [f"{t},{(n // 2 + (n % 3 == 0)) % 2},{'ab'[n % 3 == 0]}" for n, t in enumerate(TEXTS)]
        for split in ("train", "test"):
            write_text(folder / f"{split}.csv", "\n".join(["text,label,who", *rows]))
    given = {"train": "lora", "rank": 2, "lr": 0.5, "rounds": 3, "batch_size": "full", "local_steps": 2}
    partition = {"kind": "natural", "test": "follow"}
    return {
        "data": {"dataset": str(folder), "client_column": "who", "partition": partition},
        "model": {
            "backbone": str(folder / "model"), "task": "choose", "prompt": PROMPT, "label_words": list(SHORT),
        },
        "stages": [given | stage],
    }  # fmt: skip


def test_a_run_of_fedex_folds_into_the_weights_and_leaves_the_rest(tmp_path: Path) -> None:
    result = run(Recipe.parse(table(tmp_path, method="fedex-lora")), tmp_path / "run")
    before = load_file(tmp_path / "model" / "model.safetensors")
    after = load_file(tmp_path / "run" / "model" / "model.safetensors")
    changed = {name for name in before if not np.array_equal(before[name], after[name])}
    ends = {".".join(name.split(".")[-2:]) for name in changed}
    assert ends == {"q_proj.weight", "v_proj.weight"}
    assert lines(tmp_path / "run")[-1]["loss"] < lines(tmp_path / "run")[0]["loss"]
    # Up travel the factors alone: A [2, 8] and B [8, 2] of queries, A [2, 8] and B [4, 2] of values, in two blocks.
    up = result.summary["bytes_up"] / (2 * 3)
    assert 4 * 2 * (32 + 24) < up < 4 * 2 * (32 + 24) + 2000
    assert result.summary["bytes_down"] > result.summary["bytes_up"] + 2 * 3 * 4 * 2 * (64 + 32)


def test_clients_of_flexlora_train_as_many_directions_as_their_rank(tmp_path: Path) -> None:
    given = table(tmp_path, method="flexlora", rank=2, ranks=[1, 2], rounds=3)
    run(Recipe.parse(given), tmp_path / "run")
    assert lines(tmp_path / "run")[-1]["loss"] < lines(tmp_path / "run")[0]["loss"]
    layers = Layers("flexlora", ranks=[2, 3])
    bench = layers.bench
    cohort: Any = type("Clients", (), {"clients": np.array([1, 0]), "state": None})()
    given = bench.method.receive(cohort, bench.broadcast(layers.state))
    for name in layers.method.layers:
        left, right = given.model[f"{name}.lora_B.weight"], given.model[f"{name}.lora_A.weight"]
        for place, rank in enumerate((3, 2)):
            assert torch.equal(left[place].abs().sum(0) > 0, torch.arange(RANK) < rank)
            assert torch.equal(right[place].abs().sum(1) > 0, torch.arange(RANK) < rank)


def test_of_fedsa_lora_a_travels_and_b_stays(tmp_path: Path) -> None:
    """Clients that disagree on the classes: one B for both cannot be right, their own can."""
    keys = {"rounds": 12, "rank": 4}
    own = run(Recipe.parse(table(tmp_path, method="fedsa-lora", **keys)), tmp_path / "own")
    one = run(Recipe.parse(table(tmp_path, method="fedavg", **keys)), tmp_path / "one")
    assert own.summary["bytes_up"] < 0.75 * one.summary["bytes_up"]
    last = [lines(tmp_path / name)[-1] for name in ("own", "one")]
    assert last[0]["local_accuracy_mean"] > last[1]["local_accuracy_mean"] + 0.1
    sent = Layers("fedsa-lora").method.shapes
    assert {name.split(".")[-2] for name in sent if name.startswith("module.")} == {"lora_A"}


def test_rslora_divides_by_the_root_of_the_rank() -> None:
    for rslora, scale in ((False, ALPHA / RANK), (True, ALPHA / np.sqrt(RANK))):
        backbone = bert_backbone()
        stage = Layers("fedavg", rslora=rslora).stage
        module = attach("lora", backbone, stage.module_settings, seed=3)
        layer: Any = next(each for each in backbone.core.modules() if hasattr(each, "lora_A"))
        with torch.no_grad():
            for parameter in module.parameters.values():
                parameter.normal_()
            inputs = torch.randn(5, layer.in_features)
            change = layer(inputs) - layer.base_layer(inputs)
            product = inputs @ layer.lora_A["default"].weight.T @ layer.lora_B["default"].weight.T
        torch.testing.assert_close(change, scale * product, rtol=1e-4, atol=1e-5)
        assert stage.lora_scale == pytest.approx(scale)


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        ({"method": "flexlora", "rank": 4, "ranks": [2, 8]}, "stages.0.ranks: 8 is more than the server's 4; set rank"),
        ({"method": "fedsa-lora", "freeze_a": True}, "stages.0.freeze_a: the factors of fedsa-lora both change"),
        ({"method": "fedex-lora", "combine": "median"}, "stages.0.combine: fedex-lora also adds up the products of"),
        ({"method": "fedsa-lora", "keep": "best"}, "stages.0.keep: personal models are those of the last round"),
        ({"method": "fedex-lora", "train": "all"}, "stages.0.train: 'all' .*lora"),
    ],
)
def test_what_does_not_go_together(keys: dict[str, Any], sentence: str) -> None:
    with pytest.raises(RecipeError, match=sentence):
        Recipe.parse({"data": {"dataset": "x"}, "stages": [keys]})
