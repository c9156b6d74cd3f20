"""g(z): heads computed in closed form from statistics of features."""

from headstart.heads.cof import cof_head
from headstart.heads.linear import LinearHead, RandomFeatures
from headstart.heads.ncm import ncm_head
from headstart.heads.ridge import ridge_head

__all__ = ["LinearHead", "RandomFeatures", "cof_head", "ncm_head", "ridge_head"]
