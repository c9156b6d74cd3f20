"""A head on features of texts in a prompt: what is exported puts them there, too."""

import re
from pathlib import Path

import numpy as np
import pytest

from headstart.export import Model, export
from headstart.runner import run
from tests.backbones.test_language import PROMPT
from tests.runner.test_choose import recipe_of


@pytest.mark.parametrize("stage", [{"method": "fedncm"}, {"method": "fedavg", "train": "lora", "lr": 0.1, "rounds": 1}])
def test_predictions_come_of_the_prompt(stage: dict[str, object], tmp_path: Path) -> None:
    table = recipe_of(tmp_path).model_dump(mode="json", exclude_none=True)
    model = {"backbone": table["model"]["backbone"], "prompt": PROMPT}
    run({"data": table["data"], "model": model, "stages": [stage]}, tmp_path / "run")
    texts = ["the cat sat", "very good bad"]
    found = Model.load(tmp_path / "run").predict(texts).probabilities
    assert np.isfinite(found).all()
    files = export(tmp_path / "run", tmp_path / "out")
    # A pipeline of `transformers` would read the texts as they are.
    assert not [name for name in files if name.startswith(("base/", "modeling", "adapter"))]
    code = re.findall(r"```python\n(.*?)```", (tmp_path / "out/README.md").read_text(), re.S)[0]
    assert "load_backbone" in code
    assert repr(PROMPT) in code
