"""Data flows one way: a room imports only from rooms to its left."""

import ast
from pathlib import Path

import headstart

ROOMS = [
    "errors", "core", "config", "data", "backbones", "heads", "modules", "solvers", "channel", "combiners",
    "methods", "engine", "records", "report", "runner", "published", "export", "deploy", "cli", "__main__",
]  # fmt: skip


def test_no_room_imports_from_a_room_to_its_right() -> None:
    root = Path(headstart.__file__).parent
    files = [path for path in root.rglob("*.py") if path != root / "__init__.py"]
    back = set()
    for path in files:
        room = path.relative_to(root).parts[0].removesuffix(".py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("headstart."):
                other = str(node.module).split(".")[1]
                if ROOMS.index(other) > ROOMS.index(room):
                    back.add((room, other))
    assert {path.relative_to(root).parts[0].removesuffix(".py") for path in files} == set(ROOMS)
    assert back == set()


WRITES = {"copy_", "sub_", "requires_grad_", "load_state_dict", "train", "eval"}
"""Methods of tensors and networks that change a model."""


def test_only_the_local_model_changes_the_network_of_a_run() -> None:
    root = Path(headstart.__file__).parent
    writers = set()
    for room in ("modules", "solvers", "channel", "combiners", "methods", "engine", "records", "runner"):
        for path in (root / room).rglob("*.py"):
            calls = [node.func for node in ast.walk(ast.parse(path.read_text("utf-8"))) if isinstance(node, ast.Call)]
            if WRITES & {call.attr for call in calls if isinstance(call, ast.Attribute)}:
                writers.add(str(path.relative_to(root)))
    assert writers == {"modules/local_model.py"}
