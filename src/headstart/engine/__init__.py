"""Who runs the rounds, and what a run leaves behind."""

from headstart.engine.run import Result, run
from headstart.engine.rundir import RunDirectory

__all__ = ["Result", "RunDirectory", "run"]
