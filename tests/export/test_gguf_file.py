"""A tuned model back into GGUF: what comes out is read by `transformers` as the model of the run."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.special import softmax

from headstart.backbones import load_backbone
from headstart.config.recipe import Model as ModelTable
from headstart.core.files import write_text
from headstart.errors import HeadstartError
from headstart.export import Model, export, gguf_file
from headstart.runner import run
from tests.backbones.test_gguf import TOKENS, written
from tests.backbones.test_language import scores
from tests.runner.test_choose import recipe_of

CHOICE: dict[str, Any] = {"task": "choose", "prompt": "{text}", "label_words": ["a", "b"]}


def trained(folder: Path, monkeypatch: pytest.MonkeyPatch, **stage: Any) -> Path:
    """A run of a tiny LLaMA that was read from a GGUF file."""
    monkeypatch.setenv("HEADSTART_CACHE", str(folder / "cache"))
    written(folder / "tiny.gguf")
    rows = [f"{a}{b}{c},{int(c == 'e')}" for a in "cdgh" for b in "fij" for c in "ek"]
    write_text(folder / "data.csv", "\n".join(["text,label", *rows]))
    table = {
        "data": {"dataset": str(folder / "data.csv"), "partition": {"kind": "iid", "clients": 2}},
        "model": {"backbone": str(folder / "tiny.gguf"), **CHOICE},
        "stages": [{"method": "fedavg", "lr": 0.2, "rounds": 2, "evaluate_every": 2, "batch_size": 4} | stage],
    }
    run(table, folder / "run")
    return folder / "run"


@pytest.mark.parametrize("train", ["lora", "all"])
def test_the_file_is_the_model_of_the_run(train: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gguf = pytest.importorskip("gguf")
    # Both ways that rows are turned: LoRA is on queries, and every head has its halves in pairs.
    out = trained(tmp_path, monkeypatch, train=train)
    assert export(out, tmp_path / "out", format="gguf") == ["README.md", "classes.json", "model.gguf"]
    texts = ["cfe", "dik", "hje"]
    found = load_backbone(ModelTable(backbone=str(tmp_path / "out/model.gguf"), **CHOICE))
    plain = load_backbone(ModelTable(backbone=str(tmp_path / "tiny.gguf"), **CHOICE))
    wanted = Model.load(out).predict(texts).probabilities
    np.testing.assert_allclose(softmax(scores(found, texts), axis=1), wanted, atol=1e-5)
    assert np.abs(softmax(scores(plain, texts), axis=1) - wanted).max() > 1e-2
    before, after = (gguf.GGUFReader(tmp_path / name) for name in ("tiny.gguf", "out/model.gguf"))
    assert after.fields["tokenizer.ggml.tokens"].contents() == TOKENS
    assert {each.name for each in after.tensors} == {each.name for each in before.tensors}
    assert after.fields.keys() >= before.fields.keys() - {"general.file_type"}


def test_a_file_that_is_read_otherwise_is_not_left_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("gguf")
    out = trained(tmp_path, monkeypatch, train="lora")
    monkeypatch.setattr(gguf_file, "_interleaved", lambda array, heads: array)
    with pytest.raises(HeadstartError, match=r"q_proj\.weight does not come back from the file as it was"):
        export(out, tmp_path / "out", format="gguf")
    assert not (tmp_path / "out").exists()


def test_what_such_a_file_cannot_hold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("gguf")
    with pytest.raises(HeadstartError, match="such a file holds no adapter; leave --format out"):
        export(trained(tmp_path, monkeypatch, train="adapter", rounds=1), tmp_path / "out", format="gguf")
    run(recipe_of(tmp_path / "folder", train="lora", rounds=1), tmp_path / "other")
    with pytest.raises(
        HeadstartError, match=r"model came from, and .*model came from none; name one as model.backbone"
    ):
        export(tmp_path / "other", tmp_path / "out", format="gguf")
    monkeypatch.setattr(gguf_file, "find_spec", lambda name: None)
    with pytest.raises(HeadstartError, match=r"--format gguf needs gguf; pip install 'headstart\[language\]'"):
        export(tmp_path / "run", tmp_path / "out", format="gguf")
