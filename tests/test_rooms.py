"""Data flows one way: a room imports only from rooms to its left."""

import ast
from pathlib import Path

import headstart

ROOMS = [
    "errors", "core", "config", "data", "backbones", "heads", "modules", "solvers", "channel", "combiners",
    "methods", "engine", "records", "report", "runner", "published", "export", "deploy", "cli", "__main__",
]  # fmt: skip


PLUGINS = {("config", "methods")}
"""Rooms to the right that are imported by name at run time: the methods, which register their stages."""


def imported(tree: ast.AST) -> tuple[set[str], set[str]]:
    """The modules that a file imports by statements, and those that it names to `import_module`."""
    statements, names = set(), set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            statements |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            whole = [f"headstart.{alias.name}" for alias in node.names] if node.module == "headstart" else []
            statements |= {*whole, str(node.module)}
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            names |= {str(node.args[0].value)} if called == "import_module" else set()
    return statements, names


def test_no_room_imports_from_a_room_to_its_right() -> None:
    root = Path(headstart.__file__).parent
    files = [path for path in root.rglob("*.py") if path != root / "__init__.py"]
    back: list[set[tuple[str, str]]] = [set(), set()]
    for path in files:
        room = path.relative_to(root).parts[0].removesuffix(".py")
        for found, modules in zip(back, imported(ast.parse(path.read_text(encoding="utf-8"))), strict=True):
            others = {module.split(".")[1] for module in modules if module.startswith("headstart.")}
            found |= {(room, other) for other in others & set(ROOMS) if ROOMS.index(other) > ROOMS.index(room)}
    assert {path.relative_to(root).parts[0].removesuffix(".py") for path in files} == set(ROOMS)
    assert back == [set(), PLUGINS]


def test_imports_by_name_are_seen() -> None:
    source = "import headstart.cli.runs\nimport_module('headstart.data.load')\nimportlib.import_module('torch')\n"
    assert imported(ast.parse(source)) == ({"headstart.cli.runs"}, {"headstart.data.load", "torch"})
    source = "from headstart import methods\nfrom headstart.engine.node import Node\nimport_module(name)\n"
    assert imported(ast.parse(source)) == ({"headstart", "headstart.methods", "headstart.engine.node"}, set())


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
