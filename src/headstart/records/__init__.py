"""The directory of a run: what is written there, and what is read of it."""

from headstart.records.checkpoint import Checkpoint, StageCheckpoint, StageModel
from headstart.records.directory import RunDirectory
from headstart.records.federation import FederationState, NodeState, find_federations
from headstart.records.nowhere import NoDirectory
from headstart.records.record import Record, find, privacy_spent
from headstart.records.rounds import RoundsLog

__all__ = [
    "Checkpoint",
    "FederationState",
    "NoDirectory",
    "NodeState",
    "Record",
    "RoundsLog",
    "RunDirectory",
    "StageCheckpoint",
    "StageModel",
    "find",
    "find_federations",
    "privacy_spent",
]
