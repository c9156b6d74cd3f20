"""A model that completes prompts as files: its README loads it and completes one, and names no head."""

import re
from contextlib import chdir
from pathlib import Path

import pytest
from huggingface_hub import ModelCard

from headstart.backbones.completions import Sampling
from headstart.core.files import write_text
from headstart.export import Model, export
from headstart.export.completions import completions
from headstart.export.hub import card
from headstart.runner import run
from tests.backbones.test_language import folder_of
from tests.runner.test_generate import table

PROMPT = "What is 2 plus 2?"  # of the README


def completed(folder: Path, module: Path | None = None) -> str:
    """What the run goes on with."""
    write_text(folder / "prompts.txt", PROMPT)
    ((_, said),) = completions(Model.load(folder / "run", module=module), [folder / "prompts.txt"], Sampling(64))
    return said.strip()


@pytest.mark.parametrize(
    ("train", "merge", "family", "sentence"),
    [
        ("lora", False, "llama", "Its backbone without the LoRA (export with --merge for both), as the model of"),
        ("lora", True, "llama", "\nAs the model of a recipe:"),
        ("all", False, "llama", "\nAs the model of a recipe:"),
        ("lora", False, "mt5", "Its backbone without the LoRA (export with --merge for both), as the model of"),
    ],
)
def test_the_readme_completes_a_prompt_as_the_run_does(
    train: str, merge: bool, family: str, sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = table(tmp_path, train=train, lr=0.1)
    if family == "mt5":
        folder_of(tmp_path / "model", "mt5", ends=True)
    run(given, tmp_path / "run")
    files = export(tmp_path / "run", tmp_path / "out", merge=merge)
    assert not {"head.safetensors", "classes.json", "module.safetensors"} & {*files}
    text = (tmp_path / "out" / "README.md").read_text()
    assert sentence in text
    assert "head" not in text
    assert "classes" not in text
    (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    capsys.readouterr()
    with chdir(tmp_path / "out"):
        exec(code, {})
    said = capsys.readouterr().out.strip()
    assert len(said.split()) > 1
    assert said.endswith(completed(tmp_path))


def test_a_prefix_is_put_on_it_by_predict_alone(tmp_path: Path) -> None:
    run(table(tmp_path, train="prefix"), tmp_path / "run")
    files = export(tmp_path / "run", tmp_path / "out")
    assert not {"head.safetensors", "classes.json"} & {*files}
    text = (tmp_path / "out" / "README.md").read_text()
    assert "`module.safetensors`: the prefix, for headstart predict RUN INPUTS --module\n" in text
    assert "From within this folder, without the prefix:" in text
    assert "Its backbone without the prefix, as the model of a recipe:" in text
    assert completed(tmp_path, tmp_path / "out" / "module.safetensors") == completed(tmp_path)


def test_its_card_names_no_classes(tmp_path: Path) -> None:
    run(table(tmp_path, rounds=1), tmp_path / "run")
    text = card(tmp_path / "run", "# a\nb")
    assert ModelCard(text).data.pipeline_tag == "text-generation"
    assert "training examples of train.jsonl; the backbone is model." in text
