"""A recipe from its data to its report: stages in order, evaluation, sweeps, and logs for other tools."""

from headstart.runner.result import Result
from headstart.runner.run_recipe import OnMetrics, run, run_federation

__all__ = ["OnMetrics", "Result", "run", "run_federation"]
