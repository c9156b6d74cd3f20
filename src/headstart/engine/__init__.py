"""Who runs the rounds, what clients keep between them, the body they share, and the directory of a run."""

from headstart.engine.begin import Begin, method_of
from headstart.engine.body import PRETRAINED, Body
from headstart.engine.local import play
from headstart.engine.rounds import play_rounds, rounds_of, shared_examples
from headstart.engine.rundir import Checkpoint, Handed, RunDirectory, StageCheckpoint
from headstart.engine.store import ClientStore, RemoteStore, collect

__all__ = [
    "PRETRAINED",
    "Begin",
    "Body",
    "Checkpoint",
    "ClientStore",
    "Handed",
    "RemoteStore",
    "RunDirectory",
    "StageCheckpoint",
    "collect",
    "method_of",
    "play",
    "play_rounds",
    "rounds_of",
    "shared_examples",
]
