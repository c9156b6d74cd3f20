"""`headstart node check`: what would stop a node from taking part, found before anybody waits for it.

Everything is looked at, whatever is found; nothing is written, and nothing about the data leaves the machine.
"""

from __future__ import annotations

import logging
import shutil
import tomllib
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from headstart.backbones.cache import cache_root
from headstart.channel.accounting import doubled
from headstart.config.node import NodeLimits
from headstart.config.recipe import Recipe
from headstart.config.stage import ClosedForm, Privacy, Rounds
from headstart.data import Federation
from headstart.deploy.attend import check_version
from headstart.deploy.guard import check_flower
from headstart.deploy.kit import Kit, check_keys
from headstart.deploy.reach import Findings, reach
from headstart.engine.flower_messages import recipe_digest
from headstart.engine.grid import LARGEST_DIM
from headstart.engine.model_store import ModelStore
from headstart.engine.node_ledger import NodeLedger, guarantee_key
from headstart.errors import HeadstartError

SCARCE, TIGHT = 100 << 20, 1 << 30
"""Free bytes beside the features, below which a node cannot run, and below which that is spoken of."""
_LISTED = 10


@dataclass(frozen=True)
class Finding:
    """What a check found; level: `ok`, `warning` or `wrong`."""

    level: str
    about: str
    text: str


class NodeCheck:
    """The checks of a node that has a kit."""

    def __init__(self, path: Path, data: str, folder: Path, task: str = "") -> None:
        """folder: that of `headstart node init`; task: the node's own, where the recipe has several."""
        self.path, self.data, self.task, self.folder, self.kit = path, data, task, folder, Kit.load(path)
        self.ledger = NodeLedger(folder / "state")

    def findings(self) -> Iterator[Finding]:
        """One for every check, as they are made; a mistake that stops several is reported once."""
        reported: set[str] = set()
        checks: dict[str, Callable[[], Findings]] = {
            "kit": self._kit, "keys": self._keys, "recipe": self._recipe, "limits": self._limits,
            "secure aggregation": self._sums, "data": self._data, "features": self._features, "disk": self._disk,
            "connection": lambda: reach(self.kit),
        }  # fmt: skip
        for about, check in checks.items():
            try:
                for found in check():
                    yield Finding(*found)
            except HeadstartError as error:
                if str(error) not in reported:
                    yield Finding("wrong", about, str(error))
                reported.add(str(error))

    # ----------------------------------------------------------------------------------------------- what the kit says

    def _kit(self) -> Findings:
        check_flower()
        check_version(self.kit, self.path)
        yield "ok", "kit", f"it is for {self.kit.name}; its fingerprint is {self.kit.fingerprint()}"

    def _keys(self) -> Findings:
        check_keys(self.kit, self.folder)
        yield "ok", "keys", f"those in {self.folder} are the ones in the kit"

    def _recipe(self) -> Findings:
        stages = ", ".join(stage.method for stage in self.recipe.stages)
        yield "ok", "recipe", f"{self.digest[:16]}: {stages} with {len(self.kit.nodes)} nodes"
        for number, stage in enumerate(self.recipe.stages):
            answers = [entry for entry in self._entries("answer", "reveal") if entry["stage"] == number]
            if stage.protected and answers:
                yield (
                    "warning", "recipe", f"stage {number} ({stage.method}) was answered on {answers[-1]['time'][:10]}, "
                    "and noise or secure aggregation protects it: a new run gets no new reply; it needs another recipe",
                )  # fmt: skip

    def _entries(self, *kinds: str) -> list[dict[str, Any]]:
        """What left the node before in runs of this recipe."""
        return [e for e in self.ledger.entries() if e["recipe"] == self.digest and e["kind"] in kinds]

    @cached_property
    def recipe(self) -> Recipe:
        """The recipe of the kit."""
        try:
            return Recipe.parse(tomllib.loads(self.kit.recipe))
        except (tomllib.TOMLDecodeError, HeadstartError) as error:
            raise HeadstartError(f"the kit's recipe cannot be read: {error}; ask for a new kit") from None

    @cached_property
    def digest(self) -> str:
        """The recipe's."""
        return recipe_digest(self.recipe)

    # ------------------------------------------------------------------------------------------------------- may it be

    @cached_property
    def limits(self) -> NodeLimits:
        """The node's own."""
        return NodeLimits.load(self.folder / "node.toml")

    def _limits(self) -> Findings:
        """Whether the node would refuse the recipe, and what its owner has spent by its end."""
        self.limits.check(self.recipe, self.digest)
        known = self.ledger.guarantees()
        for number, stage in enumerate(self.recipe.stages):
            guarantee: dict[str, Any] | None = None
            if stage.privacy is not None:
                guarantee = self._guarantee(stage, stage.privacy)
            facts = {"recipe": self.digest, "stage": number, "of": "answer", "privacy": guarantee, "run": ""}
            known.pop(key := guarantee_key(facts), None)
            self.limits.check_statistics(stage)
            self.limits.check_spending(stage, guarantee, list(known.values()))
            known[key] = guarantee
        if self.limits.evaluation:
            yield "ok", "limits", "node.toml allows all of the recipe"
        else:
            yield "warning", "limits", "limits.evaluation is false: figures of tests are without this node's"

    def _guarantee(self, stage: ClosedForm | Rounds, privacy: Privacy) -> dict[str, Any]:
        """What a stage will have promised by its end."""
        about = {"epsilon": privacy.epsilon, "delta": privacy.delta, "noise": privacy.noise}
        if not stage.trains:
            return {**about, "unit": "example"}
        clients = len(self.kit.nodes)
        replaces = privacy.noise == "client" or (privacy.noise == "server" and stage.sampled(clients) < clients)
        example = privacy.epsilon if replaces else doubled(privacy.epsilon, privacy.delta)
        return {**about, "unit": "client", "example_epsilon": example}

    def _sums(self) -> Findings:
        """Whether a secure sum can be opened, and without whom."""
        clients = len(self.kit.nodes)
        for number, stage in enumerate(self.recipe.stages):
            if not stage.secure:
                continue
            group = min(stage.sampled(clients), stage.secure_group or clients)
            least, where = stage.survivors(group), f"stage {number} ({stage.method})"
            if least > group:
                yield (
                    "wrong",
                    "secure aggregation",
                    f"{where} adds up {group} nodes, and {least} are the fewest: add nodes",
                )
            elif least == group:
                text = f"{where} needs all {group} nodes to the end: none may be absent; with one more node, one may"
                yield "warning", "secure aggregation", text
            else:
                yield "ok", "secure aggregation", f"{where} needs {least} of {group} nodes to the end"

    # -------------------------------------------------------------------------------------------------------- the data

    @cached_property
    def _silo(self) -> tuple[Federation, str]:
        """The node's data, and what reading them warns of."""
        log, warnings = logging.getLogger("headstart"), list[str]()

        def keep(record: logging.LogRecord) -> bool:
            warnings.append(record.getMessage())
            return False  # it is reported with everything else

        log.addFilter(keep)
        try:
            federation = Federation.silo(self.recipe, self.data, self.kit.name, self.task)
        finally:
            log.removeFilter(keep)
        return federation, "; ".join(warnings)

    def _data(self) -> Findings:
        """Labels and class counts against the recipe."""
        federation, unread = self._silo
        classes, counts = federation.dataset.classes, federation.counts[0]
        if unread:
            yield "warning", "labels", f"{unread}; if they are to participate, label them as the recipe does"
        if not counts.sum():
            raise HeadstartError(
                f"{self.data}: there are no training examples of the recipe's classes, which are {_some(classes)}"
            )
        yield "ok", "data", f"{counts.sum():,} examples to train on, {len(federation.dataset.test):,} to test on"
        if missing := [name for name, count in zip(classes, counts, strict=True) if not count]:
            text = f"the recipe's {_some(missing)} have no example here; where they should, see how they are labelled"
            yield "warning", "classes", text
        else:
            least = int(counts.argmin())
            yield "ok", "classes", f"all {len(classes)} are here, {classes[least]} with the fewest: {counts[least]:,}"
        yield from self._small(classes, counts)

    def _small(self, classes: Sequence[str], counts: np.ndarray) -> Findings:
        """Classes of which a closed form says nothing."""
        for number, stage in enumerate(self.limits.applied(self.recipe).stages):
            if stage.trains or stage.protected:
                continue
            few = [name for name, count in zip(classes, counts, strict=True) if 0 < count < stage.min_examples]
            if few:
                yield (
                    "warning", "classes", f"{_some(few)}: fewer than {stage.min_examples} examples, so that nothing is "
                    f"sent of them in stage {number} ({stage.method}); min_examples in node.toml and in the recipe",
                )  # fmt: skip

    def _features(self) -> Findings:
        """The features' length and the weights' digest, and whether they are those of the last time."""
        store = self._store
        if store.dim > LARGEST_DIM:
            raise HeadstartError(f"they have {store.dim:,} numbers each, and {LARGEST_DIM:,} is the most")
        yield "ok", "features", f"{store.dim:,} numbers each"
        name, about, value = "dim", "features", str(store.dim)
        if store.backbone is not None:
            name, about, value = "weights", "weights", store.backbone.weights_digest()
            yield "ok", about, f"those of {self.recipe.model.backbone} have the digest {value}, as on every node"
        joined = self._entries("join")
        if joined and str(joined[-1].get(name)) != value:
            yield (
                "wrong", about, f"this node joined with {joined[-1].get(name)} on {joined[-1]['time'][:10]}, and it is "
                f"{value} now: bring back what it was, or ask the server's owner whether it has changed everywhere",
            )  # fmt: skip

    @cached_property
    def _store(self) -> ModelStore:
        federation = self._silo[0]
        task = self.recipe.task_names.index(federation.tasks[0])
        return ModelStore(self.recipe.model_of(task), federation.dataset)

    def _room(self) -> int:
        """Bytes of the features that are to be computed; 0 where they cannot be."""
        with suppress(HeadstartError):
            dataset = self._silo[0].dataset
            if dataset.kind != "features":
                return 4 * self._store.dim * (len(dataset.train) + len(dataset.test))
        return 0

    def _disk(self) -> Findings:
        """Room for what the node keeps, and for features that are to be computed."""
        for place, need in ((self.folder / "state", 0), (cache_root(), self._room())):
            there = next(folder for folder in (place.absolute(), *place.absolute().parents) if folder.exists())
            free = shutil.disk_usage(there).free - need
            level = "ok" if free > TIGHT else "warning" if free > SCARCE else "wrong"
            beside = f" beside {need / 1e6:,.0f} MB of features" if need else ""
            text = f"{free / 1e9:,.1f} GB free at {place}{beside}"
            yield level, "disk", text if level == "ok" else f"{text}: make room"


def _some(names: Sequence[str]) -> str:
    """The first of many names."""
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return ", ".join(names[:_LISTED]) + more
