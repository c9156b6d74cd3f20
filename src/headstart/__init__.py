"""headstart: federated learning that starts from a pre-trained model."""

from headstart.engine import Result, run
from headstart.errors import HeadstartError
from headstart.heads import Fed3R, FedCOF, FedNCM
from headstart.recipe import Recipe
from headstart.statistics import ClientStatistics

__all__ = ["ClientStatistics", "Fed3R", "FedCOF", "FedNCM", "HeadstartError", "Recipe", "Result", "run"]
