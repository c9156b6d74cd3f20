"""headstart: federated learning that starts from a pre-trained model."""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headstart.backbones import register_backbone
    from headstart.config.recipe import Recipe
    from headstart.core.aggregation import register_aggregation
    from headstart.core.statistics import ClientStatistics
    from headstart.errors import HeadstartError
    from headstart.export import Model
    from headstart.heads.estimators import Fed3R, FedCOF, FedNCM
    from headstart.heads.target_estimators import Fed3RMultiLabel, Fed3RRegressor
    from headstart.methods import register
    from headstart.runner import Result, run
    from headstart.runner.compare import Comparison, compare

    __version__: str

__all__ = [
    "ClientStatistics", "Comparison", "Fed3R", "Fed3RMultiLabel", "Fed3RRegressor", "FedCOF", "FedNCM",
    "HeadstartError", "Model", "Recipe", "Result", "__version__", "compare", "register", "register_aggregation",
    "register_backbone", "run",
]  # fmt: skip

# Threads of an operation that wait for each other sleep: where another process has one of the cores they would spin,
# and training takes five to ten times as long. Read when torch is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

_HOMES = {
    "ClientStatistics": "core.statistics",
    "Comparison": "runner.compare",
    "Fed3R": "heads.estimators",
    "Fed3RMultiLabel": "heads.target_estimators",
    "Fed3RRegressor": "heads.target_estimators",
    "FedCOF": "heads.estimators",
    "FedNCM": "heads.estimators",
    "HeadstartError": "errors",
    "Model": "export",
    "Recipe": "config.recipe",
    "Result": "runner",
    "compare": "runner.compare",
    "register": "methods",
    "register_aggregation": "core.aggregation",
    "register_backbone": "backbones",
    "run": "runner",
}


def __getattr__(name: str) -> Any:
    # Public names are imported when they are used: the command line must not wait for torch to print a usage error.
    if name in _HOMES:
        return getattr(import_module(f"headstart.{_HOMES[name]}"), name)
    if name == "__version__":
        return import_module("importlib.metadata").version("headstart")
    raise AttributeError(f"module 'headstart' has no attribute {name!r}")
