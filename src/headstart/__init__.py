"""headstart: federated learning that starts from a pre-trained model."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headstart.config.recipe import Recipe
    from headstart.core.statistics import ClientStatistics
    from headstart.errors import HeadstartError
    from headstart.heads.estimators import Fed3R, FedCOF, FedNCM
    from headstart.heads.target_estimators import Fed3RMultiLabel, Fed3RRegressor
    from headstart.methods import register
    from headstart.runner import Result, run

__all__ = [
    "ClientStatistics", "Fed3R", "Fed3RMultiLabel", "Fed3RRegressor", "FedCOF", "FedNCM", "HeadstartError", "Recipe",
    "Result", "register", "run",
]  # fmt: skip

_HOMES = {
    "ClientStatistics": "core.statistics",
    "Fed3R": "heads.estimators",
    "Fed3RMultiLabel": "heads.target_estimators",
    "Fed3RRegressor": "heads.target_estimators",
    "FedCOF": "heads.estimators",
    "FedNCM": "heads.estimators",
    "HeadstartError": "errors",
    "Recipe": "config.recipe",
    "Result": "runner",
    "register": "methods",
    "run": "runner",
}


def __getattr__(name: str) -> Any:
    # Public names are imported when they are used: the command line must not wait for torch to print a usage error.
    if name in _HOMES:
        return getattr(import_module(f"headstart.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'headstart' has no attribute {name!r}")
