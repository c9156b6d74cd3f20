"""The directory of a run: what is written there, and what is read of it."""

from headstart.records.checkpoint import Checkpoint, StageCheckpoint, StageModel
from headstart.records.directory import RunDirectory
from headstart.records.nowhere import NoDirectory
from headstart.records.record import Record, find

__all__ = ["Checkpoint", "NoDirectory", "Record", "RunDirectory", "StageCheckpoint", "StageModel", "find"]
