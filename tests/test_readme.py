"""What the README shows works: its Python runs, its recipe is valid, its commands exist, the recipes/ are valid."""

import re
import tomllib
from pathlib import Path

import pytest
from typer.main import get_command

from headstart.cli import app
from headstart.recipe import Recipe

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


def test_python_blocks_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert blocks("python")
    for block in blocks("python"):
        exec(block, {})
    scores = [float(line.split()[-1]) for line in capsys.readouterr().out.splitlines()]
    assert len(scores) == 3
    assert min(scores) > 0.8


def test_recipes_are_valid() -> None:
    assert blocks("toml")
    for block in blocks("toml"):
        Recipe.parse(tomllib.loads(block))
    files = sorted((ROOT / "recipes").glob("*.toml"))
    assert files
    for file in files:
        Recipe.load(file)


def test_commands_exist() -> None:
    shown = set(re.findall(r"bin/headstart (\w+)", README))
    assert {"run", "partition", "methods"} <= shown <= set(get_command(app).commands)


def test_make_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in {*re.findall(r"^make (\w+)|`make (\w+)`", README, flags=re.MULTILINE)}:
        assert re.search(rf"^{''.join(target)}:", makefile, flags=re.MULTILINE), target
