"""The stages of a run on a node: what it was sent of each, the one that is loaded, and what its client keeps."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np

from headstart.config.node import NodeLimits
from headstart.config.recipe import Recipe
from headstart.core.files import make_folder, write_atomically, write_json
from headstart.core.message import Message
from headstart.core.statistics import Ints
from headstart.core.update import Blocks
from headstart.data import Federation
from headstart.engine.client_states import ClientStates
from headstart.engine.node_errors import StateLostError, untold
from headstart.engine.node_records import NodeRecords
from headstart.engine.node_stage import NodeRequest, NodeStage
from headstart.engine.setup import StageSetup, digest
from headstart.errors import HeadstartError, MessageError

# Beside a client's states: the names and shapes of them.
_SHAPES = "shapes.json"


class NodeStages:
    """Stages by their requests; deployed: as `Node` has it."""

    def __init__(
        self,
        recipe: Recipe,
        federation: Federation,
        folder: Path,
        deployed: bool,
        records: NodeRecords,
        limits: NodeLimits,
    ) -> None:
        self.recipe, self.federation, self.folder, self.deployed = recipe, federation, folder, deployed
        self.records, self.limits = records, limits
        self._loaded: tuple[str, NodeStage] | None = None
        self._setup: tuple[str, StageSetup] | None = None

    def remember(self, setup: bytes) -> str:
        """Keep what a stage starts from; returns its digest."""
        path = self._path(name := digest(setup))
        if not path.is_file():
            write_atomically(path, lambda file: file.write_bytes(setup))
        return name

    def _path(self, name: str) -> Path:
        return self.folder / f"setup-{name[:32]}.safetensors"

    def setup_of(self, request: NodeRequest) -> StageSetup:
        """The setup of the stage, as the server sent it."""
        path = self._path(request.setup)
        if not path.is_file():
            raise StateLostError("the node no longer has what the stage starts from")
        if self._setup is None or self._setup[0] != request.setup:
            data = path.read_bytes()
            if digest(data) != request.setup:
                raise MessageError("the request does not name what the stage starts from by its digest")
            setup = StageSetup.from_message(Message.from_bytes(data))
            self._check(setup)
            self._setup = request.setup, setup
        return self._setup[1]

    def _check(self, setup: StageSetup) -> None:
        """Refuse the setup of a stage that the recipe does not have, or of other tasks and classes than the node's."""
        if type(setup.number) is not int or not 0 <= setup.number < len(self.recipe.stages):
            raise MessageError(f"the recipe has {len(self.recipe.stages)} stages, from 0, and none {setup.number!r}")
        if not self.deployed:
            return
        tasks = [name for name, *_ in setup.tasks]
        if (tuple(tasks), tasks[setup.task : setup.task + 1]) != (self.recipe.task_names, [*self.federation.tasks]):
            raise HeadstartError(f"the node's task is {self.federation.tasks[0]!r}, and the request is for another")
        setup.check(self.recipe, len(self.federation.dataset.classes))

    def of(self, request: NodeRequest) -> NodeStage:
        """The stage of a request; the one before it is unloaded."""
        key = request.session + request.setup
        if self._loaded is None or self._loaded[0] != key:
            setup = self.setup_of(request)
            self._loaded = None  # a backbone less in memory while the next one is loaded
            self._loaded = key, self._load(request, setup)
        return self._loaded[1]

    def _load(self, request: NodeRequest, setup: StageSetup) -> NodeStage:
        if not self.deployed:
            return NodeStage.load(self.recipe, self.recipe, self.federation, setup, deployed=False)
        self._refuse_lost_states(request)
        self.limits.check_stage(self.recipe.stages[setup.number])
        self.records.begin(setup.number, request.setup)
        limited, states = self.limits.applied(self.recipe), self._prefix_states(request.setup)
        with untold(self.recipe.stages[setup.number].protected):
            return NodeStage.load(self.recipe, limited, self.federation, setup, True, states)

    def _prefix_states(self, setup: str) -> Path:
        """Where a stage keeps what its frozen blocks make of the examples, for the process of the next message; what
        other stages and runs have kept goes."""
        folder = self.folder / f"states-{setup[:32]}"
        for other in self.folder.parent.glob("*/states-*"):
            if other != folder:
                shutil.rmtree(other, ignore_errors=True)
        return folder

    def _refuse_lost_states(self, request: NodeRequest) -> None:
        """Refuse a request that counts on what the node no longer has, or on what no stage of the recipe leaves."""
        numbers = [number for number, *_ in request.states]
        here = self.setup_of(request).number
        if numbers[:1] != [here] or numbers != sorted(set(numbers), reverse=True) or min(numbers) < 0:
            raise MessageError(f"the request counts on states of stages {numbers}, and is for stage {here}")
        for number, slot, shapes in request.states:
            if slot not in (-1, 0, 1):
                raise MessageError(f"a client's state is in slot 0 or 1, and the request counts on {slot}")
            folder = self._states_folder(number)
            if slot >= 0 and not (ClientStates.is_there(folder, shapes) and (folder / _SHAPES).is_file()):
                raise StateLostError("the node no longer has the client's state")

    def _states_folder(self, number: int) -> Path:
        return self.folder / f"clients-{number}"

    def _shapes(self, request: NodeRequest, number: int) -> Blocks:
        """Names and shapes of what stays with a client of a stage, whatever a server says of it: the method's own, and
        of an earlier stage those that were noted then."""
        path = self._states_folder(number) / _SHAPES
        if number == self.setup_of(request).number:
            shapes = self.of(request).client_state
            if shapes and not path.is_file():
                make_folder(path.parent)
                write_json(path, dict(shapes))
            return shapes
        noted = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        return {name: tuple(shape) for name, shape in noted.items()}

    def states_of(self, request: NodeRequest) -> ClientStates:
        """The client's states, of this stage and of those that it continues."""
        self._refuse_lost_states(request)
        states = None
        count = 1 if self.deployed else self.federation.n_clients
        here = 0 if self.deployed else request.client
        for number, slot, _ in reversed(request.states):
            slots: Ints = np.full(count, -1)
            slots[here] = slot
            from_head = self.recipe.stages[number].head_init == "previous"

            def inherits(name: str, from_head: bool = from_head) -> bool:
                return from_head or not name.startswith("personal.head.")

            shapes = self._shapes(request, number)
            states = ClientStates(self._states_folder(number), count, shapes, slots, states, inherits)
        assert states is not None
        return states
