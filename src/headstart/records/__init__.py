"""The directory of a run: what is written there, and what is read of it."""

from headstart.records.directory import Checkpoint, Handed, RunDirectory, StageCheckpoint
from headstart.records.record import Record, find

__all__ = ["Checkpoint", "Handed", "Record", "RunDirectory", "StageCheckpoint", "find"]
