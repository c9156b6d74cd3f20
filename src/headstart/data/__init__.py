"""Where examples come from, and who holds them."""

from headstart.data.examples import Dataset, Examples
from headstart.data.federation import Federation
from headstart.data.load import load_dataset
from headstart.data.partition import partition

__all__ = ["Dataset", "Examples", "Federation", "load_dataset", "partition"]
