"""g(z): heads, and the closed forms that compute them from statistics of features; as scikit-learn estimators, too."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from headstart.heads.cof import cof_head
from headstart.heads.linear import HiddenLayers, LinearHead, RandomFeatures
from headstart.heads.ncm import ncm_head
from headstart.heads.ridge import ridge_head, ridge_optimism
from headstart.heads.targets import target_head

if TYPE_CHECKING:
    from headstart.heads.estimators import Fed3R, FedCOF, FedNCM
    from headstart.heads.target_estimators import Fed3RMultiLabel, Fed3RRegressor

__all__ = [
    "Fed3R", "Fed3RMultiLabel", "Fed3RRegressor", "FedCOF", "FedNCM", "HiddenLayers", "LinearHead", "RandomFeatures",
    "cof_head", "ncm_head", "ridge_head", "ridge_optimism", "target_head",
]  # fmt: skip

_HOMES = {
    "Fed3R": "estimators",
    "Fed3RMultiLabel": "target_estimators",
    "Fed3RRegressor": "target_estimators",
    "FedCOF": "estimators",
    "FedNCM": "estimators",
}


def __getattr__(name: str) -> Any:
    # A run does not wait for scikit-learn, which it does not need.
    if name in _HOMES:
        return getattr(import_module(f"headstart.heads.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'headstart.heads' has no attribute {name!r}")
