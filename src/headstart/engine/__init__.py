"""Who runs the rounds, what clients keep between them, and the body they share."""

from headstart.engine.begin import Begin, method_of
from headstart.engine.body import PRETRAINED, Body
from headstart.engine.local import play
from headstart.engine.rounds import play_rounds, rounds_of, shared_examples
from headstart.engine.store import ClientStore, RemoteStore, collect

__all__ = [
    "PRETRAINED",
    "Begin",
    "Body",
    "ClientStore",
    "RemoteStore",
    "collect",
    "method_of",
    "play",
    "play_rounds",
    "rounds_of",
    "shared_examples",
]
