"""On the server's path in a test: with `lie` in the federation's folder, the ServerApp runs `lying_server.attack`."""

import importlib.util
import os
import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any


class _Liar(MetaPathFinder):
    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if name != "headstart.runner" or not (Path(os.environ["HEADSTART_FEDERATION"]) / "lie").exists():
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        assert spec is not None
        assert spec.loader is not None
        honest = spec.loader.exec_module

        def lie(module: Any) -> None:
            honest(module)
            sys.path.insert(0, str(Path(__file__).parent.parent))
            import lying_server

            module.run_federation = lying_server.attack

        spec.loader.exec_module = lie  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, _Liar())
