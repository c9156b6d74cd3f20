"""Who runs the rounds, what clients keep between them, and the directory of a run."""

from headstart.engine.local import Finished, play, rounds_of
from headstart.engine.rundir import RunDirectory
from headstart.engine.store import ClientStore

__all__ = ["ClientStore", "Finished", "RunDirectory", "play", "rounds_of"]
