"""g(z): heads, and the closed forms that compute them from statistics of features."""

from headstart.heads.cof import cof_head
from headstart.heads.linear import HiddenLayers, LinearHead, RandomFeatures
from headstart.heads.ncm import ncm_head
from headstart.heads.ridge import ridge_head, ridge_optimism
from headstart.heads.targets import target_head

__all__ = [
    "HiddenLayers", "LinearHead", "RandomFeatures", "cof_head", "ncm_head", "ridge_head", "ridge_optimism",
    "target_head",
]  # fmt: skip
