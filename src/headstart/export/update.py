"""A finished closed form with clients added, removed, and new classes: its head solved for again.

The statistics of every client are on disk (`keep_statistics`). The head is always that of their sum in the order of the
clients, so that a head without a client has the bits of one that never had it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from headstart.channel.channel import channel_of
from headstart.config.recipe import Recipe
from headstart.core.files import write_json
from headstart.core.message import Message, Scalar
from headstart.core.reply import Sender
from headstart.core.state import pack, unpack
from headstart.data.load import load_silo
from headstart.engine.client import ClientRuntime
from headstart.errors import HeadstartError, nearest
from headstart.export.model import Model
from headstart.methods import Population, StageContext, Task, build
from headstart.methods.closed_form import ClosedForm, ClosedFormState
from headstart.records import RunDirectory, StageModel
from headstart.solvers.cohort import Cohort


@dataclass(frozen=True, eq=False)
class Updated:
    """A run after an update: its clients and classes by name, and how many examples are behind the head."""

    clients: tuple[str, ...]
    classes: tuple[str, ...]
    examples: int


def update(
    run: Path, add: Mapping[str, str] | None = None, remove: Sequence[str] = (), classes: Sequence[str] = ()
) -> Updated:
    """Add clients (a name, and where their data are), remove clients, add classes; then solve and write the model.

    Without any of these, an update that was interrupted is finished.
    """
    model = Model.load(run)
    stage = model.recipe.stages[-1]
    directory, number = RunDirectory(run), len(model.recipe.stages) - 1
    if not stage.keep_statistics:
        raise HeadstartError(
            f"{run}: no client's statistics were kept; only a last stage with keep_statistics = true can be updated"
        )
    with directory.lock():
        saved = Message.from_bytes(directory.statistics(number).read_bytes())
        names: dict[str, int] = json.loads(str(saved.scalars["names"]))
        known = tuple(json.loads(str(saved.scalars["classes"])))
        state = unpack(ClosedFormState, Message(saved.arrays, json.loads(str(saved.scalars["state"]))))
        last = int(saved.scalars["last"])
        _check(run, names, known, add or {}, remove, classes)
        known += tuple(classes)
        gone = {str(names.pop(name)) for name in remove}
        kept = {c: replace(s, n_classes=len(known)) for c, s in state.clients.items() if c not in gone}
        method = _method(model, number, len(known), len(kept) + len(add or {}))
        for name, path in (add or {}).items():
            last += 1
            kept |= _told(model, method, path, known, last)
            names[name] = last
        state = method.of_clients(kept)
        if not state.rows:
            raise HeadstartError(f"{run}: nobody is left; start another run")
        head = method.head(state)
        about: dict[str, Scalar] = {"names": json.dumps(names), "classes": json.dumps(known), "last": last}
        directory.save_statistics(number, pack(state), about)
        directory.save_model(number, StageModel((head,), directory.load_model(number)[0].body), None)
        (task,) = json.loads((run / "model" / "classes.json").read_text(encoding="utf-8"))
        directory.save_final(None, [head], [task], [known])
        examples = sum(int(each.counts.sum()) for each in kept.values())
        _note(directory, add or {}, remove, classes, len(names), examples)
    return Updated(tuple(names), known, examples)


def _check(
    run: Path,
    names: Mapping[str, int],
    known: Sequence[str],
    add: Mapping[str, str],
    remove: Sequence[str],
    classes: Sequence[str],
) -> None:
    """Refuse what cannot be, all at once and before anything is written."""
    problems = [
        f"--remove: {name!r} is no client of {run}; {nearest(name, names)}" for name in remove if name not in names
    ]
    problems += [
        f"--add: {name!r} is a client already; remove it first" for name in add if name in set(names) - {*remove}
    ]
    problems += [f"--class: {name!r} is a class already" for name in classes if name in known]
    if problems:
        raise HeadstartError("\n".join(problems))


def _method(model: Model, number: int, n_classes: int, clients: int) -> ClosedForm:
    """The method of the run's last stage."""
    recipe: Recipe = model.recipe
    stage: Any = recipe.stages[number]
    tasks = (Task("default", n_classes, Population(clients)),)
    method = build(stage, StageContext(tasks, model.width, (recipe.seed, number), stage.plan))
    assert isinstance(method, ClosedForm)
    return method


def _told(model: Model, method: ClosedForm, path: str, classes: Sequence[str], number: int) -> dict[str, Any]:
    """What a client with these data says, as the server reads it, under its number."""
    data = model.data.model_copy(update={"classes": tuple(classes)})
    train = load_silo(data, path, model.recipe.seed).train
    if not len(train):
        raise HeadstartError(f"--add {path}: it has no example of the classes {', '.join(classes)}")
    channel = channel_of(method.stage, method, method.context.seed, {"default": 1}, ())

    def nothing(name: str, start: Any) -> Any:
        raise AssertionError("a closed form keeps nothing with a client")

    owners = np.full(len(train), number)
    cohort = Cohort(
        np.array([number]),
        model.features(train),
        np.arange(len(train)),
        train.labels,
        owners,
        np.array([True]),
        nothing,
    )
    (reply,) = ClientRuntime(method, channel).answer(cohort, Message(scalars={"round": 0}))
    total: Any = channel.total()
    channel.add(total, reply, Sender(number, 0))
    return {str(client): statistics for client, statistics in total.kept.items()}


def _note(
    directory: RunDirectory,
    add: Mapping[str, str],
    remove: Sequence[str],
    classes: Sequence[str],
    clients: int,
    examples: int,
) -> None:
    """Say in the summary what has changed since the figures in it."""
    summary = directory.summary() or {}
    entry = {"added": list(add), "removed": list(remove), "classes": list(classes), "clients": clients}
    summary.setdefault("updates", []).append({**entry, "examples": examples})
    write_json(directory.path / "summary.json", summary)
