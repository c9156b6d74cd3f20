"""FFA-LoRA: with A as it was drawn, the mean of factors is the mean of the clients' updates; with both, it is not."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from headstart.config.recipe import Recipe
from headstart.core.files import write_text
from headstart.errors import RecipeError
from headstart.runner import run
from tests.backbones.test_language import PROMPT, SHORT, folder_of
from tests.runner.test_choose import TEXTS

SCALE = 16.0 / 2  # alpha_lora / rank


def updates(folder: Path, clients: str, freeze_a: bool) -> dict[str, np.ndarray]:
    """Dense updates of every layer after a round of some clients, a third of whose examples are a's; bytes sent."""
    where = folder / f"{clients}-{freeze_a}"
    where.mkdir()
    owners = ["a" if n % 3 == 0 else "b" for n in range(len(TEXTS))]
    rows = [f"{t},{n // 2 % 2},{w}" for n, (t, w) in enumerate(zip(TEXTS, owners, strict=True)) if w in clients]
    for split in ("train", "test"):
        write_text(where / f"{split}.csv", "\n".join(["text,label,who", *rows]))
    stage = {"method": "fedavg", "train": "lora", "rank": 2, "lr": 0.5, "rounds": 1, "local_steps": 3}
    table: dict[str, Any] = {
        "data": {"dataset": str(where), "client_column": "who", "partition": {"kind": "natural"}},
        "model": {
            "backbone": str(folder / "model"), "task": "choose", "prompt": PROMPT, "label_words": list(SHORT),
        },
        "stages": [stage | {"batch_size": "full", "freeze_a": freeze_a}],
    }  # fmt: skip
    summary = run(Recipe.parse(table), where / "run").summary
    found = load_file(where / "run" / "model" / "module-default.safetensors")
    names = [name.removesuffix(".lora_A.weight") for name in found if name.endswith(".lora_A.weight")]
    dense = {name: SCALE * found[f"{name}.lora_B.weight"] @ found[f"{name}.lora_A.weight"] for name in names}
    return dense | {"bytes": np.array(summary["bytes_up"])}


@pytest.mark.parametrize("freeze_a", [True, False])
def test_the_mean_of_factors_against_the_dense_average(freeze_a: bool, tmp_path: Path) -> None:
    folder_of(tmp_path / "model")
    together, a, b = (updates(tmp_path, clients, freeze_a) for clients in ("ab", "a", "b"))
    layers = [name for name in together if name != "bytes"]
    assert len(layers) == 4
    error = max(np.abs(together[name] - (a[name] + 2 * b[name]) / 3).max() for name in layers)
    size = max(np.abs(together[name]).max() for name in layers)
    assert size > 0.1
    assert error < 1e-5 * size if freeze_a else error > 1e-3 * size


def test_half_as_much_travels(tmp_path: Path) -> None:
    folder_of(tmp_path / "model")
    one, both = (int(updates(tmp_path, "ab", freeze_a)["bytes"]) for freeze_a in (True, False))
    # Queries: A [2, 8], B [8, 2]; values of one of two heads: A [2, 8], B [4, 2]; in two blocks, for two clients.
    assert both - one >= 4 * 2 * 2 * (16 + 16)


@pytest.mark.parametrize(
    ("stage", "sentence"),
    [
        (
            {"method": "fedavg", "train": "all"},
            "stages.0.freeze_a: A is a factor of a lora; leave it out, or set train",
        ),
        ({"method": "slora"}, "stages.0.freeze_a: the factors of slora both change; leave it out"),
    ],
)
def test_where_there_is_no_such_factor(stage: dict[str, Any], sentence: str) -> None:
    with pytest.raises(RecipeError, match=sentence):
        Recipe.parse({"data": {"dataset": "x"}, "stages": [stage | {"freeze_a": True}]})
