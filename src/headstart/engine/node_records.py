"""What a node has been asked and has replied, on its disk before a reply leaves."""

from __future__ import annotations

from pathlib import Path

from headstart.config.recipe import Recipe
from headstart.core.files import write_atomically
from headstart.core.message import Message
from headstart.errors import HeadstartError

AGREE_ANEW = "; a new run needs another recipe, to which nodes agree"


class NodeRecords:
    """The records of a deployed node: of each stage what it started from, its last reply, its last test, its noise.

    Where noise or secure aggregation protects a stage, its records are of all runs of the recipe.
    """

    def __init__(self, recipe: Recipe, recipe_digest: str, home: Path, folder: Path) -> None:
        """home: the node's own folder; folder: that of the run."""
        self.recipe, self.recipe_digest, self.home, self.folder = recipe, recipe_digest, home, folder

    def path(self, what: str, number: int) -> Path:
        """The file of a record of a stage."""
        if self.recipe.stages[number].protected:
            return self.home / f"{what}-{self.recipe_digest[:32]}-{number}.safetensors"
        return self.folder / f"{what}-{number}.safetensors"

    def read(self, what: str, number: int) -> Message:
        """A record of a stage; an empty message where there is none yet."""
        path = self.path(what, number)
        return Message.from_bytes(path.read_bytes()) if path.is_file() else Message()

    def write(self, what: str, number: int, record: Message) -> None:
        """Note something of a stage; it is on the disk when this returns."""
        write_atomically(self.path(what, number), lambda file: file.write_bytes(record.to_bytes()), private=True)

    def begin(self, number: int, setup: str) -> None:
        """A protected stage is begun from one setup, whatever comes of it: how it fails would tell of the examples."""
        if not self.recipe.stages[number].protected:
            return
        known = self.read("begun", number).scalars.get("setup")
        if known is None:
            self.write("begun", number, Message(scalars={"setup": setup}))
        elif known != setup:
            raise HeadstartError(f"the node has begun this stage from another setup, and keeps to it{AGREE_ANEW}")
