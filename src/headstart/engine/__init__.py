"""Who runs the rounds, what clients keep between them, the body they share, and the directory of a run."""

from headstart.engine.body import PRETRAINED, Body
from headstart.engine.local import play, rounds_of
from headstart.engine.rundir import Handed, RunDirectory
from headstart.engine.store import ClientStore

__all__ = ["PRETRAINED", "Body", "ClientStore", "Handed", "RunDirectory", "play", "rounds_of"]
